"""Predicted damage against a measurement: sampled tokens of a logged run, run again at high bits.

The prefix of every sampled token goes through an engine of the log's own memory budget, with one slot and the best
bits that fit beside it: 16 where they all do. The divergence is that of the two distributions of the next token,
KL(high || used), over the tokens that both sides have among their likeliest and one bin for all others: a lower bound
of the whole one, and close to it where these hold most of the mass.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pwjax.engine.log import read_log
from pwjax.engine.requests import Request
from pwjax.engine.sampling import MAX_LOGPROBS, SamplingParams
from pwjax.errors import PWJaxError, UsageError

Top = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Shadowed:
    """One request: ``predicted`` damage in force, mean over its ``tokens`` sampled ones, and the ``measured`` mean KL.

    ``standard_error`` of the measured mean, None for one token. ``kept``: whether no prediction was above its
    ``max_damage``, None where it has none.
    """

    id: str | int
    order: int
    tokens: int
    predicted: float
    measured: float
    standard_error: float | None
    max_damage: float | None
    kept: bool | None


@dataclass(frozen=True)
class Shadow:
    """All sampled ``requests`` of a run; ``mean_bits`` and ``damage`` are those of the high side."""

    requests: tuple[Shadowed, ...]
    mean_bits: float
    damage: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def render(self) -> str:
        """A table of the requests."""
        lines = [
            f"shadow    sampled tokens also at {self.mean_bits:.2f} bits a weight, predicted damage {self.damage:.4g}",
            f"{'request':>10} {'tokens':>6} {'predicted':>10} {'measured KL':>22} {'max_damage':>10}",
        ]
        for r in self.requests:
            error = "" if r.standard_error is None else f" ± {r.standard_error:.2g}"
            limit = "-" if r.max_damage is None else f"{r.max_damage:.4g}"
            measured = f"{r.measured:.4g}{error}"
            lines.append(f"{r.id!s:>10} {r.tokens:>6} {r.predicted:>10.4g} {measured:>22} {limit:>10}")
        return "\n".join(lines)


def measure(
    path: str | os.PathLike, model: str | os.PathLike | None = None, report: Callable[[str], None] | None = None
) -> Shadow:
    """Run the sampled tokens of the log at ``path`` at high bits, under the memory budget of the run.

    ``model``: the artifact, default the one that the log names. UsageError where the log has no sample or is of another
    model, and what :func:`pwjax.load` raises.
    """
    from pwjax.loading import load, model_identity, open_model

    header, records = read_log(path)
    submitted, ended = {}, []
    for record in records:
        if record["kind"] == "submit":
            submitted[record["order"]] = record
        elif record.get("shadow"):
            ended.append(record)
    if not ended:
        raise UsageError(f"{path} has no shadow sample; generate with --max-damage D or --shadow SHARE")
    model = header.get("model_path") if model is None else model
    if model_identity(open_model(model)) != header["model"]:
        raise UsageError(f"{path} is the log of another model; name the model that it was made with")
    highest = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=MAX_LOGPROBS)
    requests = []
    for record in ended:
        tokens = [*submitted[record["order"]]["prompt_token_ids"], *record["token_ids"]]
        for index, *_ in record["shadow"]:
            prefix = tuple(tokens[: record["prompt_tokens"] + index])
            requests.append(Request(len(requests), prompt_token_ids=prefix, sampling=highest))
    with load(
        model, header["settings"]["memory_budget"], batch=1, context=header["context"], kv_dtype=header["kv_dtype"],
        policy="static", chunks=tuple(header["chunks"]), report=report,
    ) as engine:  # fmt: skip
        done = engine.generate(requests)
        table, bits = engine.parts.table, engine.parts.pager.committed
        mean_bits, damage = table.mean_bits(bits), table.total_damage(bits)
    # One completion a sampled token, in their order.
    high = iter(done)
    found = []
    for record in ended:
        divergence = []
        for _, _, ids, logprobs in record["shadow"]:
            entries = next(high).logprobs
            if not entries:
                raise PWJaxError(f"a prefix of request {record['id']!r} could not be run")
            divergence.append(shared_kl(entries[0]["top"], list(zip(ids, logprobs, strict=True))))
        limit = submitted[record["order"]].get("max_damage")
        predicted = [damage for _, damage, *_ in record["shadow"]]
        count = len(divergence)
        error = float(np.std(divergence, ddof=1) / math.sqrt(count)) if count > 1 else None
        kept = None if limit is None else bool(max(predicted) <= limit * (1 + 1e-9))
        found.append(Shadowed(
            record["id"], record["order"], count, float(np.mean(predicted)), float(np.mean(divergence)), error, limit,
            kept,
        ))  # fmt: skip
    return Shadow(tuple(found), mean_bits, damage)


def shared_kl(high: Top, used: Top) -> float:
    """``KL(high || used)`` in nats over the token ids that both name, and one bin for the rest.

    Each is ``(token id, log-probability)`` of the likeliest tokens. By the data-processing inequality no more than the
    divergence over all tokens.
    """
    q = dict(used)
    p = {token: logprob for token, logprob in high if token in q}
    terms = [math.exp(p[token]) * (p[token] - q[token]) for token in p]
    rest_p, rest_q = (max(0.0, 1 - sum(math.exp(side[token]) for token in p)) for side in (p, q))
    # What float32 leaves of a whole distribution is noise, on either side.
    if rest_p > 1e-6:
        terms.append(rest_p * math.log(rest_p / max(rest_q, 1e-6)))
    return max(0.0, math.fsum(terms))
