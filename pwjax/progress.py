"""Progress of long work: a callable ``progress(stage, done, total)``, and one that draws bars on a terminal."""

import sys
from collections.abc import Callable

from tqdm import tqdm

Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""


class Bars:
    """Bars with an estimate of the time left, one a stage, on stderr; nothing where stderr is not a terminal."""

    def __init__(self, enabled: bool | None = None):
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._bar: tqdm | None = None
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show ``done`` of ``total`` of a stage; another stage starts another bar."""
        if not self._enabled:
            return
        if self._bar is None or stage != self._stage:
            self.close()
            # Work of an earlier run that is resumed must not count as speed.
            self._bar, self._stage = tqdm(total=total, initial=max(done - 1, 0), desc=stage, file=sys.stderr), stage
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Finish the current bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
