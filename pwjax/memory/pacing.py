"""How much run time moves may take: an account that run time fills, and that boundaries and copies draw on."""

from collections.abc import Callable

# Time in commits, table updates and starting copies, and of processors that copies take from kernels, as a share of run
# time. Below the promised 2 %, since urgent demotions may overdraw the account.
SHARE = 0.015
# Seconds that a second of a copying thread takes from steps: where it takes a processor that a kernel was using, the
# kernel's other threads wait, and the engine for the interpreter's lock. Steps lost about four seconds for each in
# experiments/throughput/movement.py, before copying threads were made to yield.
COPY_COST = 4.0
# Most seconds saved up: what a burst of moves may take at once after a quiet time.
SAVED_S = 0.02
# Most seconds owed: a machine that stalls in a boundary must not stop movement for minutes.
OWED_S = 0.2
# A longer pause between two boundaries is no run time: nothing was running.
PAUSE_S = 2.0


class Pace:
    """Decides at each boundary how many pages may be committed.

    The account grows by ``share`` of the time since the last boundary, up to ``saved_s``, and pays for the seconds
    that each boundary and each copy took. A move is taken while the account, less what the pages taken so far are
    expected to cost, is positive; it may then go negative, and nothing more is taken until time has filled it again.
    What is staged and not taken keeps its staging, so copies slow down with commits. ``page_s`` is the first guess of a
    page's cost, a running mean from then on. ``clock`` gives seconds and only grows.
    """

    def __init__(
        self, clock: Callable[[], float], share: float = SHARE, saved_s: float = SAVED_S, page_s: float = 1e-4
    ):
        self._clock, self.share, self._saved_s = clock, share, saved_s
        self._account_s = saved_s
        self._page_s = page_s
        self._taken = 0
        self._began_s = self._last_s = None
        self.run_s = self.spent_s = self.copies_s = 0.0

    def begin(self) -> None:
        """A boundary begins."""
        now = self._clock()
        passed = 0.0 if self._last_s is None else min(now - self._last_s, PAUSE_S)
        self.run_s += passed
        self._account_s = min(self._account_s + self.share * passed, self._saved_s)
        self._began_s, self._last_s, self._taken = now, now, 0

    def charge(self, seconds: float) -> None:
        """Pay for a copy that took ``seconds`` of the processors that steps run on."""
        self.copies_s += seconds
        self._account_s = max(self._account_s - COPY_COST * seconds, -OWED_S)

    def take(self, pages: int, urgent: bool = False) -> bool:
        """Whether ``pages`` more may be committed now; ``urgent`` ones always may, and are paid for all the same."""
        if not urgent and self._account_s - self._taken * self._page_s <= 0:
            return False
        self._taken += pages
        return True

    def end(self) -> None:
        """The boundary is over: pay for it."""
        spent = self._clock() - self._began_s
        self.spent_s += spent
        self._account_s = max(self._account_s - spent, -OWED_S)
        if self._taken:
            self._page_s += 0.25 * (spent / self._taken - self._page_s)

    @property
    def share_spent(self) -> float:
        """Share of run time so far that boundaries took."""
        return self.spent_s / self.run_s if self.run_s else 0.0
