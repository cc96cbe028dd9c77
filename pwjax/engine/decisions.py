"""What a turn of the engine does not compute from its own state: plans, copies that had landed, prefixes to drop.

Everything else (admission, chunks, limits, preemption) follows from the requests and from these, so a run is repeated
by giving them again. :class:`Live` asks the policy, lets the pager look at its copies and compares prices (one of them
is a measured time); :class:`Recorded` reads all three from the records of an epoch log.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from planner import Observation, Plan, Policy
from pwjax.memory import Outcome


class Asked(NamedTuple):
    """A plan as it was taken: ``changes`` are ``(block, from_bits, to_bits)``, most urgent first.

    ``record``: what the log says about it beside the changes.
    """

    changes: tuple[tuple[int, int, int], ...]
    record: dict[str, Any]

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "Asked":
        """What a ``plan`` or ``apply`` record of a log says."""
        rest = {name: value for name, value in _fields(record).items() if name != "changes"}
        return cls(tuple((block, old, new) for block, old, new in record["changes"]), rest)


class Decisions(Protocol):
    """Where the decisions of a boundary come from; each is asked for at most once a boundary, in this order.

    ``live``: plans are made from the state; else they are all in a log, those for demands of requests included.
    """

    live: bool

    def plan(self, observation: Observation) -> Plan | None:
        """What the policy makes of the state, None where it wants nothing."""
        ...

    def asked(self, boundary: int, late: bool) -> Sequence[Asked]:
        """Plans that a log has for this boundary, before the pager's turn or (``late``) after it."""
        ...

    def evicted(self, boundary: int) -> dict[str, Any] | None:
        """What a log says about cached prefixes that were dropped for their price; None: nothing."""
        ...

    def outcome(self, boundary: int) -> Outcome | None:
        """Which copies landed, failed and started; None: let the pager find out."""
        ...


class Live:
    """Plans of a policy, outcomes of the real copies."""

    live = True

    def __init__(self, policy: Policy):
        self._policy = policy

    def plan(self, observation: Observation) -> Plan | None:
        """The policy's plan."""
        return self._policy.step(observation)

    def asked(self, boundary: int, late: bool) -> Sequence[Asked]:
        """Nothing."""
        return ()

    def evicted(self, boundary: int) -> dict[str, Any] | None:
        """None: prices are compared."""
        return None

    def outcome(self, boundary: int) -> Outcome | None:
        """None: the pager looks at its copies."""
        return None


class Recorded:
    """The decisions of a log: its kinds ``plan``, ``transfers`` and ``evict``; others are ignored."""

    live = False

    def __init__(self, records: Iterable[dict[str, Any]]):
        self._plans: dict[tuple[int, bool], list[Asked]] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._evicted: dict[int, dict[str, Any]] = {}
        self._blocked_pages = 0
        for record in records:
            if record["kind"] == "plan":
                when = record["boundary"], record.get("late", False)
                self._plans.setdefault(when, []).append(Asked.of_record(record))
            elif record["kind"] == "evict" and "price" in record:
                self._evicted[record["boundary"]] = _fields(record)
            elif record["kind"] == "transfers":
                self._outcomes[record["boundary"]] = Outcome(
                    landed=tuple(record["landed"]),
                    failed=tuple((block, reason) for block, reason in record["failed"]),
                    started=tuple(record["started"]),
                    blocked_pages=record["blocked_pages"],
                )

    def plan(self, observation: Observation) -> Plan | None:
        """None: plans come from the log, not from the state."""
        return None

    def asked(self, boundary: int, late: bool) -> Sequence[Asked]:
        """What was asked for then, by the policy or by a callback."""
        return self._plans.get((boundary, late), ())

    def evicted(self, boundary: int) -> dict[str, Any] | None:
        """What was logged."""
        return self._evicted.get(boundary)

    def outcome(self, boundary: int) -> Outcome:
        """What was logged; a boundary without a record moved nothing and lacked as many pages as the one before."""
        outcome = self._outcomes.get(boundary) or Outcome(blocked_pages=self._blocked_pages)
        self._blocked_pages = outcome.blocked_pages
        return outcome


def _fields(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what all records have."""
    return {k: v for k, v in record.items() if k not in ("kind", "boundary", "free_pages", "kv_pages")}
