"""What does moving precision cost the engine's thread and the decode rate?

    python -m experiments.throughput.movement [--pairs 10] [--context 2048 --tokens 1600] [--out FILE]

Decodes on all slots while plans given by hand move a few blocks down and others up every few boundaries, so pages
move all the time. A pair is a live run (copies by threads, from files) and a replay of the live run before it with
every copy on the device beforehand, so that only commits and table updates are left. Both engines are loaded at once
and decode in turns of ``--slice`` steps, since a machine's speed drifts by more within seconds than what is measured;
time counts for an engine, its pager included, only in its turns.
Reported: the share of run time that boundaries took (all of it, not only commits; at most 2 %), and the decode rate
of the live run over its control's (at least 98 %), mean and 95 % interval over pairs. A few minutes; raw samples are
in the JSON.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
# Between two turns, so that what one engine's threads still copy is done before the other's turn.
REST_S = 0.02


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


class Stopwatch:
    """Seconds inside of ``with`` blocks; the clock of an engine that has only turns."""

    def __init__(self):
        self._gone, self._began = 0.0, None

    def __call__(self) -> float:
        """Seconds so far."""
        return self._gone + (time.perf_counter() - self._began if self._began is not None else 0.0)

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_exc) -> None:
        self._gone, self._began = self(), None


class Side:
    """One engine of a pair: ``turns`` drives it, a slice at a time."""

    def __init__(self, engine: pwjax.Engine, watch: Stopwatch, turns: Iterator[None]):
        self.engine, self._watch, self._turns = engine, watch, turns
        self._loaded = engine.parts.pager.counters.pages
        with watch:
            next(turns)  # to where all sequences decode
        pace, meter = engine.parts.pager.pace, engine.parts.meter
        meter.decode.tokens, pace.spent_s, pace.copies_s = 0, 0.0, 0.0
        self._start_s = watch()

    def turn(self) -> bool:
        """One slice; False at the end of the run."""
        with self._watch:
            more = next(self._turns, self) is not self
        time.sleep(REST_S)
        return more

    @property
    def result(self) -> dict:
        """Decode tokens a second, and the shares that boundaries and copies took."""
        parts, seconds = self.engine.parts, self._watch() - self._start_s
        counters = parts.pager.counters
        return {
            "tokens_per_s": parts.meter.decode.tokens / seconds,
            "seconds": seconds,
            "share": parts.pager.pace.spent_s / seconds,
            "copies_share": parts.pager.pace.copies_s / seconds,
            "moves": counters.promotions + counters.demotions,
            "pages": counters.pages - self._loaded,
        }


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


def decode(engine: pwjax.Engine, args: argparse.Namespace) -> Iterator[None]:
    """Fill all slots and decode to the end with plans by hand; yields when all decode, and after each slice."""
    parts, turn = engine.parts, 0
    for i in range(parts.shapes.slots):
        sampling = pwjax.SamplingParams(max_tokens=args.tokens, ignore_eos=True)
        prompt = tuple(1 + (np.arange(8) * 7 + i) % (parts.shapes.config.vocab_size - 1))
        engine.submit(pwjax.Request(i, None, tuple(int(t) for t in prompt), sampling))
    while any(s.prefilling for s in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    yield
    while not engine.idle:
        if engine.boundaries.index % args.every == 0:
            engine.apply(moved(parts.table, parts.pager.committed, turn, args.blocks))
            turn += 1
        engine.step()
        if engine.boundaries.index % args.slice == 0:
            yield


def repeat(engine: pwjax.Engine, records: list[dict], args: argparse.Namespace) -> Iterator[None]:
    """Repeat a logged run of :func:`decode`, in slices as there."""
    start = next(i for i, r in enumerate(records) if r["kind"] == "apply")
    run_records(engine, records[:start])
    yield
    while start < len(records):
        until = engine.boundaries.index + args.slice
        end = next((i for i in range(start, len(records)) if records[i]["boundary"] > until), len(records))
        run_records(engine, records[start:end])
        start = end
        yield


@contextmanager
def live(log: Path, args: argparse.Namespace) -> Iterator[Side]:
    """A live run, which writes its log."""
    watch = Stopwatch()
    with load(args.model, args.budget, log=log, **options(args), injected=Injected(clock=watch)) as engine:
        yield Side(engine, watch, decode(engine, args))


@contextmanager
def control(log: Path, args: argparse.Namespace) -> Iterator[Side]:
    """A replay of ``log`` with every page staged before, which writes a log as the live run does."""
    records, watch = list(read_log(log)[1]), Stopwatch()
    made: list[Prestaged] = []

    def transfer(store):
        made.append(Prestaged(store))
        return made[0]

    injected = Injected(
        transfer=transfer, decisions=Recorded(records), clock=watch,
        log=lambda header: EpochLog(log.with_suffix(".repeated"), header),
    )  # fmt: skip
    with load(args.model, args.budget, **options(args), injected=injected) as engine:
        made[0].loading = False
        yield Side(engine, watch, repeat(engine, records, args))


def pair(log: Path, before: Path, args: argparse.Namespace, live_first: bool) -> dict:
    """A live run and a replay of the one before, in turns."""
    with live(log, args) as moving, control(before, args) as fixed:
        sides = [moving, fixed] if live_first else [fixed, moving]
        while sides:
            sides = [side for side in sides if side.turn()]
        return {"live": moving.result, "control": fixed.result}


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
    shares, copies = ([p["live"][name] for p in pairs] for name in ("share", "copies_share"))
    limits = interval(ratios) if len(ratios) > 1 else None
    return {
        "tokens_per_s": {arm: float(np.mean([p[arm]["tokens_per_s"] for p in pairs])) for arm in ("live", "control")},
        "decode_rate_ratio": {"mean": float(np.mean(ratios)), "interval_95": limits, "limit": RATE_LIMIT},
        "boundary_share": {"mean": float(np.mean(shares)), "max": max(shares), "limit": SHARE_LIMIT},
        "copies_share": float(np.mean(copies)),
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
        ["processor time of copies, share of run time", f"{found['copies_share']:.2%}", "", ""],
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
    parser.add_argument("--every", type=int, default=16, help="boundaries between two plans")
    parser.add_argument("--slice", type=int, default=32, help="steps of a turn")
    parser.add_argument("--blocks", type=int, default=8, help="blocks that a plan moves down, and as many up")
    parser.add_argument("--out", type=Path, default=Path("runs/movement.json"))
    args = parser.parse_args()
    environment.enable_compile_cache()
    pairs: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        log, before = Path(folder) / "now", Path(folder) / "before"
        with live(before, args) as first:
            while first.turn():
                pass
        pair(log, before, args, live_first=True)  # warms both sides, and makes the copies of the control
        for number in range(args.pairs):
            log.replace(before)
            pairs.append(pair(log, before, args, live_first=number % 2 == 0))
            speed = {side: result["tokens_per_s"] for side, result in pairs[-1].items()}
            print(f"pair {number + 1}: {speed['live']:.1f} against {speed['control']:.1f} tokens/s, "
                  f"{pairs[-1]['live']['share']:.2%} in boundaries", file=sys.stderr)  # fmt: skip
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
