import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from pwjax.engine.text import Detokenizer, StopMatcher, TextStream, Tokenizer
from pwjax.errors import CheckpointError, PromptError

CORPUS = ["the cat sat on the mat and the dog sat on the cat\n", "héllo wörld 😀 世界 def f(x): return x\n"] * 20


def train() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|bos|>", "<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


BACKEND = train()
TOKENIZER = Tokenizer(BACKEND)
VOCAB = TOKENIZER.vocab_size


def stream(ids) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", ["héllo 😀 世界", "", " ", "\n\n  x", "👩‍👩‍👧‍👦 family", "日本語テキスト"])
def test_round_trip_and_whole_characters(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    pieces = stream(ids)
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in p for p in pieces)


@given(st.text())
def test_streamed_text_equals_the_text(text):
    assert "".join(stream(TOKENIZER.encode(text))) == text


@given(st.lists(st.integers(0, VOCAB - 1), max_size=40))
def test_pieces_concatenate_to_the_final_text_for_any_tokens(ids):
    # Random ids are mostly broken UTF-8: the worst that an untrained model can do.
    assert "".join(stream(ids)) == TOKENIZER.decode(ids)


@pytest.mark.parametrize("decoder", ["metaspace", "fallback"])
def test_other_decoders_stream_as_well(decoder):
    if decoder == "metaspace":
        vocab = {"▁the": 0, "▁cat": 1, "s": 2, "▁": 3, "<unk>": 4}
        backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        backend.decoder = decoders.Metaspace()
        ids = [0, 1, 2, 3, 0, 2]
    else:
        vocab = {f"<0x{b:02X}>": b for b in range(256)} | {"▁a": 256}
        backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="▁a"))
        backend.decoder = decoders.Sequence([
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
        ])
        ids = [256, *"😀".encode(), 256, *"é".encode(), 256]
    tokenizer = Tokenizer(backend)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(i) for i in ids]
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(ids)


def test_truncated_character_shows_at_the_end_only():
    ids = TOKENIZER.encode_plain("ab😀")[:-1]
    pieces = stream(ids)
    assert "".join(pieces[:-1]) == "ab" and set(pieces[-1]) == {"\N{REPLACEMENT CHARACTER}"}


def test_special_tokens_are_not_text():
    end = BACKEND.token_to_id("<|end|>")
    ids = [*TOKENIZER.encode("cat"), end, *TOKENIZER.encode(" sat")]
    assert "".join(stream(ids)) == "cat sat" == TOKENIZER.decode(ids)


def test_bos_is_never_doubled(tmp_path):
    backend = train()
    bos = backend.token_to_id("<|bos|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", bos)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path, bos_token_id=bos)
    plain = tokenizer.encode("the cat")
    assert plain[0] == bos and plain.count(bos) == 1
    assert tokenizer.encode("<|bos|>the cat") == plain
    assert tokenizer.encode_plain("the cat") == plain[1:]
    assert Tokenizer(train(), bos_token_id=bos).encode("the cat") == plain[1:]


def test_truncation_and_padding_of_training_are_switched_off(tmp_path):
    backend = train()
    backend.enable_truncation(3)
    backend.enable_padding(length=500)
    backend.save(str(tmp_path / "tokenizer.json"))
    ids = Tokenizer.load(tmp_path / "tokenizer.json").encode("the cat sat on the mat with a xylophone")
    assert 3 < len(ids) < 100


def test_unreadable_tokenizers_are_sentences(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer at .*tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_lone_surrogate_is_a_sentence():
    with pytest.raises(PromptError, match="not valid Unicode"):
        TOKENIZER.encode("a\ud800b")


def feed(stops, pieces):
    matcher = StopMatcher(stops)
    shown = [matcher.push(p) for p in pieces]
    return "".join(shown) + matcher.finish(), matcher.matched, shown


def test_a_partial_match_is_held_back_and_released():
    text, matched, shown = feed(["###"], ["a#", "#", "b", "##"])
    assert shown == ["a", "", "##b", ""] and text == "a##b##" and matched is None


def test_a_stop_string_across_pieces_never_shows():
    text, matched, shown = feed(["\n\nQ:"], ["answer\n", "\nQ", ": next", "more"])
    assert (text, matched) == ("answer", "\n\nQ:") and shown == ["answer", "", "", ""]


def test_overlapping_and_repeating_stops():
    assert feed(["aab"], ["a", "a", "a", "b", "c"])[:2] == ("a", "aab")
    assert feed(["abc", "b"], ["abc"])[:2] == feed(["abc", "b"], ["a", "bc"])[:2] == ("a", "b")
    assert feed(["xyz", "yz"], ["wxyz"])[:2] == ("w", "xyz")


def first_stop(text, stops):
    """The definition: the stop string complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))], max(ending, key=len)
    return text, None


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=4), max_size=8),
)
def test_matcher_follows_the_definition_however_the_text_is_cut(stops, pieces):
    text, matched, shown = feed(stops, pieces)
    assert (text, matched) == first_stop("".join(pieces), stops)
    so_far = ""
    for piece in shown:
        so_far += piece
        assert text.startswith(so_far)


@given(st.lists(st.integers(0, VOCAB - 1), max_size=30), st.lists(st.text("the a\N{REPLACEMENT CHARACTER}",
       min_size=1, max_size=3), max_size=2))
def test_stream_text_is_what_was_shown(ids, stops):
    text_stream = TextStream(TOKENIZER, stops)
    shown = []
    for i in ids:
        shown.append(text_stream.push(i))
        if text_stream.stopped:
            break
    shown.append(text_stream.finish())
    assert "".join(shown) == text_stream.text
    assert not any(stop in text_stream.text for stop in stops)
    assert TOKENIZER.decode(ids).startswith(text_stream.text)


def test_stop_in_the_middle_of_a_token():
    token = next(i for i in range(VOCAB) if len(TOKENIZER.decode([i])) >= 3)
    word = TOKENIZER.decode([token])
    text_stream = TextStream(TOKENIZER, [word[1]])
    assert text_stream.push(token) == word[0] and text_stream.stopped
    assert text_stream.push(token) == "" and text_stream.finish() == "" and text_stream.text == word[0]
