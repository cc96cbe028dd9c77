"""Which blocks failed, when they may try again, and which are given up."""

import numpy as np


class Retries:
    """Failures in a row of each block: tried again after 1, 2, 4, ... boundaries, given up after ``tries``."""

    def __init__(self, blocks: int, tries: int):
        self._tries = tries
        self._failures: dict[int, tuple[int, int]] = {}  # block -> (failures in a row, boundary of the next try)
        self.given_up = np.zeros(blocks, bool)

    def failed(self, block: int, boundary: int) -> bool:
        """Count a failure; True where the block is given up with it."""
        count = self._failures.get(block, (0, 0))[0] + 1
        self._failures[block] = (count, boundary + (1 << (count - 1)))
        if count >= self._tries:
            self.given_up[block] = True
        return bool(self.given_up[block])

    def succeeded(self, block: int) -> None:
        """Only failures in a row count."""
        self._failures.pop(block, None)

    def may_start(self, block: int, boundary: int) -> bool:
        """Whether the wait after the last failure is over."""
        return self._failures.get(block, (0, boundary))[1] <= boundary
