"""Models for EleutherAI's lm-eval: its tasks, run by the engine under a memory budget (extra ``eval``).

::

    python -m pwjax.lm_harness --model pwjax --model_args pretrained=model.pw,memory_budget=10GiB --tasks ...

is ``lm_eval`` with the model ``pwjax`` known to it, which the entry point in the group ``lm_eval.models`` also names.
``model_args`` are those of :func:`pwjax.load`, and ``pretrained``, its model (left out: the bundled one).
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from pwjax.engine.engine import Engine
from pwjax.engine.requests import Request
from pwjax.engine.sampling import SamplingParams
from pwjax.engine.text import Tokenizer
from pwjax.errors import PWJaxError, UsageError
from pwjax.evaluate.windows import leading_bos
from pwjax.loading import load

MAX_NEW_TOKENS = 256


def score_pairs(engine: Engine, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
    """For token ids of a context and what goes on: its log-probability, and whether greedy decoding would give it.

    Where both do not fit, the context loses its beginning. UsageError for an empty continuation or context.
    """
    requests, counts = [], []
    for index, (context, continuation) in enumerate(pairs):
        ids = (*context, *continuation)[-engine.parts.shapes.context :]
        if not 0 < len(continuation) < len(ids):
            raise UsageError(f"text {index} has {len(continuation)} tokens to score behind {len(context)} of context")
        requests.append(Request(index, None, ids, score=True))
        counts.append(len(continuation))
    found = engine.generate(requests) if requests else []
    results = []
    for one, count in zip(found, counts, strict=True):
        if one.scores is None or one.greedy is None or one.finish_reason != "score":
            raise PWJaxError(f"text {one.id} could not be scored: {one.error}")
        results.append((float(np.sum(one.scores[-count:], dtype=np.float64)), all(one.greedy[-count:])))
    return results


def continue_prompts(engine: Engine, prompts: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Text behind each ``(prompt, arguments)``, arguments as lm-eval's tasks give them to ``generate_until``.

    A prompt that leaves no room for ``max_gen_toks`` loses its beginning. UsageError for unknown arguments.
    """
    requests, tokenizer, context = [], _tokenizer(engine), engine.parts.shapes.context
    for index, (prompt, given) in enumerate(prompts):
        sampling = sampling_of(given)
        # As many as lm-eval's own models leave, whose inputs are one token shorter than our context.
        room = context - 1 - sampling.max_tokens
        if room < 1:
            raise UsageError(f"max_gen_toks of {sampling.max_tokens} leaves no room for a prompt in {context} tokens")
        requests.append(Request(index, None, tuple(tokenizer.encode(prompt)[-room:]), sampling))
    return [completion.text for completion in engine.generate(requests)] if requests else []


def sampling_of(given: dict[str, Any]) -> SamplingParams:
    """Sampling parameters of lm-eval's generation arguments; greedy unless they sample. UsageError for unknown ones."""
    rest = dict(given)
    until = rest.pop("until", None) or ()
    until = (until,) if isinstance(until, str) else tuple(until)
    limits = [rest.pop(name) for name in ("max_gen_toks", "max_new_tokens", "max_tokens") if name in rest]
    temperature = float(rest.pop("temperature", 0.0) or 0.0)
    sampled = rest.pop("do_sample", temperature > 0)
    options = {name: rest.pop(name) for name in ("top_k", "top_p", "min_p", "seed") if rest.get(name) is not None}
    if rest:
        raise UsageError(f"generation argument {sorted(rest)[0]!r} has no meaning here; leave it out of the task")
    temperature = (temperature or 1.0) if sampled else 0.0
    options = options if sampled else {}
    stop = tuple(text for text in until if text)
    new = limits[0] if limits else MAX_NEW_TOKENS
    return SamplingParams(max_tokens=new, temperature=temperature, stop=stop, **options)


def _tokenizer(engine: Engine) -> Tokenizer:
    if engine.tokenizer is None:
        raise UsageError("lm-eval's tasks are text, and this model has no tokenizer.json")
    return engine.tokenizer


@lru_cache(maxsize=1)
def model_class() -> type:
    """The class that lm-eval makes models of; registered as ``pwjax``. UsageError where lm-eval is not installed."""
    try:
        from lm_eval import utils
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import register_model
    except ImportError as error:
        raise UsageError(f"the lm-eval adapter needs its extra: pip install 'pwjax[eval]' ({error})") from error

    @register_model("pwjax")
    class PWJaxLM(TemplateLM):
        """An engine behind lm-eval's interface; see the module."""

        def __init__(self, pretrained: str | None = None, batch_size: int | str = 8, device=None, max_batch_size=None,
                     max_length: int | None = None, **options):  # fmt: skip
            super().__init__()
            batch = int(batch_size) if str(batch_size).isdigit() else 8
            self.engine = load(pretrained, batch=batch, context=max_length, **options)
            self.text = _tokenizer(self.engine)

        @property
        def max_length(self) -> int:
            """Input tokens at most: one less than the context, which also holds the token that is predicted."""
            return self.engine.parts.shapes.context - 1

        @property
        def eot_token_id(self) -> int:
            """The token that ends a text."""
            ends = self.engine.config.eos_token_ids
            if not ends:
                raise UsageError("this model has no end-of-text token, which lm-eval puts before an empty context")
            return ends[0]

        @property
        def prefix_token_id(self) -> int:
            """What the first token of a text is predicted from."""
            bos = leading_bos(self.text)
            return self.eot_token_id if bos is None else bos

        @property
        def tokenizer_name(self) -> str:
            """For lm-eval's cache of requests."""
            return "pwjax"

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            """Token ids, with the special tokens of the tokenizer unless told otherwise."""
            return self.text.encode_plain(string) if add_special_tokens is False else self.text.encode(string)

        def _loglikelihood_tokens(self, requests, **_: Any) -> list[tuple[float, bool]]:
            return score_pairs(self.engine, [(context, rest) for _, context, rest in requests])

        def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
            """Log-probability of whole texts, in windows as lm-eval cuts them."""
            pairs, owners = [], []
            for index, request in enumerate(requests):
                (text,) = request.args
                windows = utils.get_rolling_token_windows(
                    token_list=self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length,
                    context_len=1,
                )  # fmt: skip
                pairs += map(utils.make_disjoint_window, windows)
                owners += [index] * (len(pairs) - len(owners))
            sums = [0.0] * len(requests)
            for owner, (logprob, _) in zip(owners, score_pairs(self.engine, pairs), strict=True):
                sums[owner] += logprob
            return sums

        def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
            """Text behind each prompt."""
            return continue_prompts(self.engine, [request.args for request in requests])

        def apply_chat_template(self, chat_history, add_generation_prompt: bool = True) -> str:
            """The prompt of the model's chat template."""
            if not add_generation_prompt:
                raise UsageError("an answer that is begun by the task cannot be put into the chat template here")
            return self.text.chat_prompt(tuple(chat_history))

    return PWJaxLM


def __getattr__(name: str) -> type:
    if name == "PWJaxLM":  # made when it is asked for: lm-eval is an extra
        return model_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    """``lm_eval`` with our model known."""
    model_class()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
