"""What does moving precision cost the engine's thread and the decode rate?

    python -m experiments.throughput.movement [--pairs 10] [--context 2048 --tokens 1600] [--out FILE]

Decodes on all slots while plans given by hand move a few blocks down and others up every few boundaries, so pages
move all the time. Each pair is one live run (copies by threads, from files) and one replay of its log in which every
copy is on the device before it is asked for, so that only commits and table updates are left. Order within a pair
alternates: a live run is needed first, so the control replays the log of the pair before in every second pair.
Reported: the share of run time that boundaries took (all of it, not only commits; at most 2 %), and the decode rate
of the live run over its control's (at least 98 %), mean and 95 % interval over pairs. A few minutes, most of them
loading; raw samples are in the JSON.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from scipy import stats as scipy_stats

import pwjax
from experiments import tables
from planner import Plan
from pwjax import environment
from pwjax.engine.decisions import Recorded
from pwjax.engine.log import EpochLog, read_log
from pwjax.engine.replay import run_records
from pwjax.loading import Injected, load, open_model
from pwjax.memory.host_store import HostStore
from pwjax.memory.transfer import StagedPages, TransferJob, stage

SHARE_LIMIT, RATE_LIMIT = 0.02, 0.98


class Staged:
    """A copy that has ended."""

    def __init__(self, pages: StagedPages):
        self._pages = pages

    def done(self) -> bool:
        """Yes."""
        return True

    def result(self) -> StagedPages:
        """Its words."""
        return self._pages

    def cancel(self) -> None:
        """Too late."""
        pass


class Prestaged:
    """A transfer whose copies are on the device already; one that it has not seen before is made at once."""

    words: dict[tuple, StagedPages] = {}  # noqa: RUF012  shared by all runs, filled by the first

    def __init__(self, store: HostStore):
        self._store, self.misses, self.loading = store, 0, True

    def submit(self, job: TransferJob) -> Staged:
        """The words of a job, without a copy where they were asked for before."""
        key = job.layer, job.pages
        if self.loading:  # the first load of all blocks is not kept
            return Staged(stage(self._store, job))
        if key not in self.words:
            self.misses += 1
            self.words[key] = stage(self._store, job)
        return Staged(self.words[key])

    def close(self) -> None:
        """Nothing to release; the words stay for the next run."""
        pass


def moved(table, bits: np.ndarray, turn: int, blocks: int) -> Plan:
    """The blocks that went down last time go up one width again, the next ones down."""
    widths = [b for b in table.widths if b < 16]
    wanted = np.array(bits)
    up = np.arange((turn - 1) * blocks, turn * blocks) % table.blocks if turn else np.array([], int)
    down = np.arange(turn * blocks, (turn + 1) * blocks) % table.blocks
    for where, step in ((up, 1), (down, -1)):
        for block in where:
            at = widths.index(wanted[block]) + step
            wanted[block] = widths[min(max(at, 0), len(widths) - 1)]
    return Plan(table, bits, wanted, cause="steady movement")


def rate(engine: pwjax.Engine, seconds: float) -> dict:
    """Decode tokens a second, and the share that boundaries took."""
    pace, meter = engine.parts.pager.pace, engine.parts.meter
    return {
        "tokens_per_s": meter.decode.tokens / seconds,
        "seconds": seconds,
        "share": pace.spent_s / seconds,
        "moves": engine.parts.pager.counters.promotions + engine.parts.pager.counters.demotions,
        "pages": engine.parts.pager.counters.pages,
    }


def live(log: Path, args: argparse.Namespace) -> dict:
    """A live run; writes its log."""
    with load(args.model, args.budget, log=log, **options(args)) as engine:
        parts = engine.parts
        loaded = parts.pager.counters.pages
        for i in range(parts.shapes.slots):
            sampling = pwjax.SamplingParams(max_tokens=args.tokens, ignore_eos=True)
            prompt = tuple(1 + (np.arange(8) * 7 + i) % (parts.shapes.config.vocab_size - 1))
            engine.submit(pwjax.Request(i, None, tuple(int(t) for t in prompt), sampling))
        while any(s.prefilling for s in engine.scheduler.running) or engine.scheduler.waiting:
            engine.step()
        parts.meter.decode.tokens, parts.pager.pace.spent_s, turn = 0, 0.0, 0
        began = time.perf_counter()
        while not engine.idle:
            if engine.boundaries.index % args.every == 0:
                engine.apply(moved(parts.table, parts.pager.committed, turn, args.blocks))
                turn += 1
            engine.step()
        result = rate(engine, time.perf_counter() - began)
        result["pages"] -= loaded
    return result


def control(log: Path, args: argparse.Namespace) -> dict:
    """A replay of ``log`` with every page staged before."""
    records = list(read_log(log)[1])
    made: list[Prestaged] = []

    def transfer(store):
        made.append(Prestaged(store))
        return made[0]

    injected = Injected(transfer=transfer, decisions=Recorded(records), log=lambda header: EpochLog(None, header))
    with load(args.model, args.budget, **options(args), injected=injected) as engine:
        loaded = engine.parts.pager.counters.pages
        made[0].loading = False
        start = next(i for i, r in enumerate(records) if r["kind"] == "apply")
        run_records(engine, records[:start])
        engine.parts.meter.decode.tokens, engine.parts.pager.pace.spent_s = 0, 0.0
        began = time.perf_counter()
        run_records(engine, records[start:])
        result = rate(engine, time.perf_counter() - began)
        result["pages"] -= loaded
    return {**result, "misses": made[0].misses}


def options(args: argparse.Namespace) -> dict:
    """What both arms are loaded with; nothing moves but what is asked for by hand."""
    return {"batch": args.batch, "context": args.context, "bits": args.bits}


def interval(values: list[float]) -> list[float]:
    """95 % t-interval of the mean."""
    mean, error = np.mean(values), scipy_stats.sem(values)
    spread = scipy_stats.t.ppf(0.975, len(values) - 1) * error
    return [float(mean - spread), float(mean + spread)]


def summary(pairs: list[dict]) -> dict:
    """Mean decode rate over the control's with its interval, share of boundaries, moves a run, and what holds."""
    ratios = [p["live"]["tokens_per_s"] / p["control"]["tokens_per_s"] for p in pairs]
    shares = [p["live"]["share"] for p in pairs]
    limits = interval(ratios) if len(ratios) > 1 else None
    return {
        "tokens_per_s": {arm: float(np.mean([p[arm]["tokens_per_s"] for p in pairs])) for arm in ("live", "control")},
        "decode_rate_ratio": {"mean": float(np.mean(ratios)), "interval_95": limits, "limit": RATE_LIMIT},
        "boundary_share": {"mean": float(np.mean(shares)), "max": max(shares), "limit": SHARE_LIMIT},
        "moves_per_run": float(np.mean([p["live"]["moves"] for p in pairs])),
        "pages_per_run": float(np.mean([p["live"]["pages"] for p in pairs])),
        "passed": {"rate": bool(limits and limits[0] >= RATE_LIMIT), "share": max(shares) <= SHARE_LIMIT},
    }


def shown(found: dict) -> dict[str, str]:
    """The table, by name."""
    rate, share, ratio = found["tokens_per_s"], found["boundary_share"], found["decode_rate_ratio"]
    limits = ratio["interval_95"]
    spread = f" [{limits[0]:.3f}, {limits[1]:.3f}]" if limits else ""
    held = {True: "yes", False: "not shown"}
    rows = [
        ["tokens/s, precision moving / copies made beforehand", f"{rate['live']:.0f} / {rate['control']:.0f}", "", ""],
        ["rate over its control's", f"{ratio['mean']:.3f}{spread}", f"at least {RATE_LIMIT}",
         held[found["passed"]["rate"]]],
        ["share of time in boundaries, mean / most", f"{share['mean']:.2%} / {share['max']:.2%}",
         f"at most {SHARE_LIMIT:.0%}", held[found["passed"]["share"]]],
        ["moves / pages a run", f"{found['moves_per_run']:.0f} / {found['pages_per_run']:.0f}", "", ""],
    ]  # fmt: skip
    return {"movement": tables.markdown(["", "measured", "wanted", "holds"], rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="an artifact; default: the bundled model")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=160, help="tokens of each sequence")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--budget", default=None, help="memory budget; default: enough for everything")
    parser.add_argument("--bits", type=int, default=5, help="where all blocks start, below the widest")
    parser.add_argument("--every", type=int, default=4, help="boundaries between two plans")
    parser.add_argument("--blocks", type=int, default=4, help="blocks that a plan moves down, and as many up")
    parser.add_argument("--out", type=Path, default=Path("runs/movement.json"))
    args = parser.parse_args()
    environment.enable_compile_cache()
    pairs: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        log, before = Path(folder) / "now", Path(folder) / "before"
        live(before, args)  # warms everything, and is the log of the first control that goes first
        control(before, args)
        for pair in range(args.pairs):
            if pair % 2:
                fixed = control(before, args)
                moving = live(log, args)
            else:
                moving = live(log, args)
                fixed = control(log, args)
            log.replace(before)
            pairs.append({"live": moving, "control": fixed})
            print(f"pair {pair + 1}: {moving['tokens_per_s']:.1f} against {fixed['tokens_per_s']:.1f} tokens/s, "
                  f"{moving['share']:.2%} in boundaries", file=sys.stderr)  # fmt: skip
    found = summary(pairs)
    made = shown(found)
    print(made["movement"])
    settings = {name: value for name, value in vars(args).items() if not isinstance(value, Path | None)}
    tables.write(
        args.out, settings={**settings, "model": open_model(args.model).path.name}, summary=found, tables=made,
        pairs=pairs,
    )  # fmt: skip


if __name__ == "__main__":
    main()
