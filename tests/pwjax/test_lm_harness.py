"""What the lm-eval adapter makes of the engine, where lm-eval is not installed either."""

import importlib.util

import numpy as np
import pytest

from pwjax import lm_harness
from pwjax.engine.sampling import SamplingParams
from pwjax.errors import UsageError
from pwjax.lm_harness import continue_prompts, sampling_of, score_pairs

pytestmark = pytest.mark.usefixtures("quick_programs")


def test_generation_arguments():
    found = sampling_of({"until": ["\n", ""], "max_gen_toks": 7, "do_sample": False, "temperature": 0.0, "top_p": 0.9})
    assert found == SamplingParams(max_tokens=7, temperature=0, stop=("\n",))
    found = sampling_of({"until": "x", "do_sample": True, "top_k": 5, "temperature": 0.7})
    assert found == SamplingParams(max_tokens=256, temperature=0.7, stop=("x",), top_k=5)
    assert sampling_of({"do_sample": True}).temperature == 1 and sampling_of({}).temperature == 0
    with pytest.raises(UsageError, match="generation argument 'num_beams' has no meaning here"):
        sampling_of({"num_beams": 4})


def test_pairs_and_prompts(open_tiny):
    with open_tiny(bits=4) as engine:
        greedy = engine.generate("The quick", SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids
        context = engine.tokenizer.encode("The quick")
        other = [(greedy[0] + 1) % 300, *greedy[1:]]
        found = score_pairs(engine, [(context, greedy), (context, other), (list(range(1, 127)), [5, 6, 7])])
        assert [flag for _, flag in found[:2]] == [True, False] and found[0][0] > found[1][0]
        # The last of 128 tokens, and what stands before them in the context.
        whole = engine.score([(*range(2, 127), 5, 6, 7)])[0]
        assert found[2][0] == pytest.approx(float(np.sum(whole[-3:], dtype=np.float64)), abs=1e-5)
        texts = continue_prompts(engine, [("The quick", {"max_gen_toks": 4}), ("fox " * 200, {"max_gen_toks": 4})])
        assert texts[0] == engine.tokenizer.decode(greedy) and len(texts) == 2
        with pytest.raises(UsageError, match="text 0 has 0 tokens to score behind 2 of context"):
            score_pairs(engine, [([1, 2], [])])
        with pytest.raises(UsageError, match="leaves no room for a prompt in 128 tokens"):
            continue_prompts(engine, [("x", {"max_gen_toks": 128})])


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_lm_eval_the_extra_is_named():
    with pytest.raises(UsageError, match=r"pip install 'pwjax\[eval\]'"):
        _ = lm_harness.PWJaxLM
