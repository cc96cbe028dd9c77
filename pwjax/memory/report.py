"""What a boundary did, as data: for the log, the statistics and a replay."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Commit:
    """A block that changed precision: pages written for it and pages it gave back."""

    block: int
    from_bits: int
    to_bits: int
    written_pages: int
    freed_pages: int


@dataclass(frozen=True)
class Outcome:
    """What a replay needs of a boundary: blocks whose copy landed, failed (and why), whose move started, in order.

    ``blocked_pages``: what the first move that found too few free pages lacked.
    """

    landed: tuple[int, ...] = ()
    failed: tuple[tuple[int, str], ...] = ()
    started: tuple[int, ...] = ()
    blocked_pages: int = 0


@dataclass(frozen=True)
class BoundaryReport:
    """What one boundary did, and the epoch in force after it.

    ``landed`` lists blocks whose copy (or part of it) ended well, ``failed`` holds ``(block, reason)``, ``given_up``
    the blocks that keep their bits from now on, ``started`` the blocks whose move began. ``blocked_pages`` is what
    the first move that found too few free pages lacks (0: none did); ``queued`` moves are still to start.
    """

    boundary: int
    epoch: int
    committed: tuple[Commit, ...] = ()
    landed: tuple[int, ...] = ()
    failed: tuple[tuple[int, str], ...] = ()
    given_up: tuple[int, ...] = ()
    started: tuple[int, ...] = ()
    blocked_pages: int = 0
    queued: int = 0

    @property
    def outcome(self) -> Outcome:
        """The part that a replay needs."""
        return Outcome(self.landed, self.failed, self.started, self.blocked_pages)


@dataclass
class Counters:
    """Totals of a pager's life.

    ``pages`` and ``bytes`` were written to the arena, the initial load included (without padding); ``failed`` copies
    came to nothing; ``staging_peak_pages`` is the most padded pages of staged words that were alive at once.
    """

    pages: int = 0
    bytes: int = 0
    failed: int = 0
    demotions: int = 0
    promotions: int = 0
    epochs: int = 0
    staging_peak_pages: int = 0
