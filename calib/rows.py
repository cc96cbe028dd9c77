"""The routed tokens of one expert, in tiles of equal shape that never mix two sequences."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from calib.spill import Spill

# Rows of one piece of an expert's tokens: what its programs are compiled for.
PIECE_ROWS = 128


class Rows(NamedTuple):
    """C tiles of m routed tokens of one expert; unused rows are zero and come last in their tile.

    ``inputs`` and ``gradients`` float32[C, m, H], ``gates`` float32[C, m], ``used`` bool[C, m], ``sequence`` int64[C]
    (-1: an empty tile), ``first`` and ``last`` bool[C]: the tile begins or ends its sequence.
    """

    inputs: np.ndarray
    gradients: np.ndarray
    gates: np.ndarray
    used: np.ndarray
    sequence: np.ndarray
    first: np.ndarray
    last: np.ndarray


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """What the routed experts of ``layer`` saw on N tokens: ``experts`` int32[N, k], ``gates`` float32[N, k],
    ``sequences`` int64[N] ascending, ``inputs`` and ``gradients`` [N, H] in files.

    ``gradients`` are of the loss with respect to the experts' weighted sum, ``fisher`` float64[H] is their mean square.
    """

    layer: int
    experts: np.ndarray
    gates: np.ndarray
    sequences: np.ndarray
    num_experts: int
    inputs: Spill
    gradients: Spill
    fisher: np.ndarray

    @cached_property
    def tile_rows(self) -> int:
        """Rows of a tile: half of an even share of a sequence's choices, a power of two from 8 to 64."""
        sequences = int(self.sequences[-1]) + 1
        share = self.experts.size / sequences / self.num_experts
        return 8 << int(np.clip(np.log2(max(share, 1)) - 4, 0, 3))

    def rows(self, expert: int) -> Iterator[Rows]:
        """All tokens of ``expert`` in pieces of PIECE_ROWS rows, in the order of the text; none if it has no tokens."""
        tokens, choice = np.nonzero(self.experts == expert)
        if not tokens.size:
            return
        m, tiles = self.tile_rows, PIECE_ROWS // self.tile_rows
        names, start, counts = np.unique(self.sequences[tokens], return_index=True, return_counts=True)
        of_sequence = -(-counts // m)
        begin = np.cumsum(of_sequence) - of_sequence
        rank = np.arange(tokens.size) - np.repeat(start, counts)
        total = -(-int(of_sequence.sum()) // tiles) * tiles
        index = np.full((total, m), -1)
        gates = np.zeros((total, m), np.float32)
        place = np.repeat(begin, counts) + rank // m, rank % m
        index[place], gates[place] = tokens, self.gates[tokens, choice]
        sequence, first, last = np.full(total, -1), np.zeros(total, bool), np.zeros(total, bool)
        sequence[: of_sequence.sum()] = np.repeat(names, of_sequence)
        first[begin], last[begin + of_sequence - 1] = True, True
        for piece in np.split(np.arange(total), total // tiles):
            used = index[piece] >= 0
            shape = (*used.shape, self.inputs.width)
            both = []
            for spill in (self.inputs, self.gradients):
                values = np.zeros(shape, np.float32)
                values[used] = spill.take(index[piece][used])
                both.append(values)
            yield Rows(*both, gates[piece], used, sequence[piece], first[piece], last[piece])
