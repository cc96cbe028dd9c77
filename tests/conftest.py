"""Runs the tests on the CPU unless a GPU is asked for, and keeps compiled programs between runs."""

import inspect
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports JAX: a machine with a GPU must not hand it to every test.
if not os.environ.get("PWJAX_TEST_GPU"):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Compilation makes the first example slow, so no deadline; CI replays the same examples every time.
settings.register_profile(
    "pwjax", deadline=None, max_examples=40, derandomize=bool(os.environ.get("CI")), print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("pwjax")


def pytest_configure(config):
    cache = getattr(config, "cache", None)
    if cache is not None:
        # Inherited by the command lines that tests start.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache.mkdir("jax")))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("PWJAX_CACHE_DIR", str(cache.mkdir("pwjax")))


def pytest_collection_modifyitems(items):
    if os.environ.get("PWJAX_TEST_GPU"):
        return
    skip = pytest.mark.skip(reason="needs a GPU: set PWJAX_TEST_GPU=1")
    for item in items:
        # Keywords would also hold the names of folders.
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def exact_activations(monkeypatch):
    """Inputs of products are not rounded, for comparisons with float32; whether they are rounded otherwise."""
    from pallas_kernels import native

    rounded = not native.problem() and native.activations() != "float32"
    monkeypatch.setenv("PWJAX_ACTIVATIONS", "float32")
    return rounded


@pytest.fixture(scope="module")
def exact_module():
    """The same for all tests of a file, and for fixtures of its scope."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PWJAX_ACTIVATIONS", "float32")
        yield


# A tiny quantized model with random weights, for every test that needs one on disk; made once a session.

CORPUS = [
    "The quick brown fox jumps over the lazy dog.\n",
    "def f(x):\n    return x + 1\n",
    "12 + 30 = 42, naïve café.\n",
]


@pytest.fixture(scope="session")
def tiny_config():
    """Two layers, four experts, hidden 32, untied head, 300 tokens, 128 positions; token 0 ends a text."""
    from pwjax.config import ModelConfig

    return ModelConfig(
        model_type="qwen2_moe", vocab_size=300, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        num_experts=4, top_k=2, expert_size=32, shared_size=32, norm_topk_prob=False, rms_eps=1e-6, rope_theta=1e4,
        max_positions=128, tie_embeddings=False, qkv_bias=True, eos_token_ids=(0,),
    )  # fmt: skip


@pytest.fixture(scope="session")
def tiny_params(tiny_config) -> dict:
    """Random bfloat16 parameters, large enough that experts and their precision change the logits."""
    import ml_dtypes
    import numpy as np

    from pwjax.checkpoints.tree import param_shapes, unflatten

    rng = np.random.default_rng(0)
    draw = {name: rng.standard_t(5, shape) * 0.15 for name, shape in param_shapes(tiny_config).items()}
    draw |= {name: 1 + 0.1 * value for name, value in draw.items() if name.endswith("norm/scale")}
    return unflatten({name: value.astype(ml_dtypes.bfloat16) for name, value in draw.items()})


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory) -> Path:
    """``tokenizer.json`` of a byte-level BPE: every text has tokens, and every token has bytes but 0, the end."""
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False, min_frequency=1,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(CORPUS, trainer)
    assert backend.get_vocab_size() == 300
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return path


@pytest.fixture(scope="session")
def tiny_artifact(tmp_path_factory, tiny_config, tiny_params, tiny_tokenizer) -> Path:
    """Artifact of the tiny model at 2-6 and 16 bits, with its tokenizer. Read it, never change it.

    Small pages, so that every bit counts: all blocks take 48 pages at 2 bits, 120 at 6, 192 at 16; a page holds eight
    tokens of K or V of one layer, so a full context takes 64.
    """
    from pwjax.quantization import quantize

    out = tmp_path_factory.mktemp("tiny") / "tiny.pw"
    return quantize(tiny_params, tiny_config, out, tokenizer=tiny_tokenizer, lut_rows=32, page_words=64)


@pytest.fixture(scope="session")
def packed():
    """How any-precision-llm stores codes uint8[N, K] of ``parent`` bits, by the description of its format.

    ``qweight`` int32[parent, N, K/32] from big-endian bytes of 8 columns, dealt to the lanes of a warp: in every 1024
    columns (fewer at the end) the bytes form four quarters; word t takes byte t of each quarter, the first one on top.
    """
    import numpy as np

    def pack(codes: np.ndarray, parent: int) -> np.ndarray:
        rows, cols = codes.shape
        out = np.zeros((parent, rows, cols // 32), np.uint32)
        for plane in range(parent):
            for row in range(rows):
                bits = (codes[row] >> (parent - 1 - plane)) & 1
                bytes_ = [int("".join(map(str, bits[i : i + 8])), 2) for i in range(0, cols, 8)]
                words = []
                for first in range(0, len(bytes_), 128):
                    block = bytes_[first : first + 128]
                    lanes = len(block) // 4
                    for t in range(lanes):
                        a, b, c, d = (block[t + quarter * lanes] for quarter in range(4))
                        words.append(a << 24 | b << 16 | c << 8 | d)
                out[plane, row] = words
        return out.view(np.int32)

    return pack


@pytest.fixture(scope="session")
def budget_for():
    """``budget_for(path, pages, **options)``: bytes that leave exactly ``pages`` pages, the null page included.

    ``options`` are those of ``load``; those that have no part in the bytes are left out.
    """
    from pwjax.checkpoints.artifact import Artifact
    from pwjax.loading import outlook

    known = inspect.signature(outlook).parameters

    def budget(path, pages: int, **options) -> int:
        memory = outlook(Artifact.open(path), **{k: v for k, v in options.items() if k in known}).memory
        return memory.total_bytes - memory.arena_bytes + pages * memory.page_bytes

    return budget


@pytest.fixture(scope="session")
def open_tiny(tiny_artifact, budget_for):
    """``open_tiny(pages, **options)``: an engine of the tiny model whose arena has exactly ``pages`` pages.

    Four slots and 290 pages unless told otherwise: programs of one shape are compiled once. With these, KV cannot grow
    to its full size (256) beside the weights at 6 bits (120). ``path``: a copy of the model.
    """
    from pwjax.loading import load

    def opened(pages: int = 290, path=tiny_artifact, **options):
        options = {"batch": 4, "context": 128, **options}
        return load(path, budget_for(path, pages, **options), **options)

    return opened


@pytest.fixture(scope="module")
def quick_programs():
    """Where little is computed and much is compiled: leave out what makes programs fast, in a module's fixtures too."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
