"""BlockTable: what it accepts, what it says when it does not, and its sums."""

from dataclasses import replace

import numpy as np
import pytest

from planner import BlockTable


@pytest.fixture
def table() -> BlockTable:
    damage = [[4.0, 1.0, 0.0], [2.0, 0.5, 0.0]]
    return BlockTable(1, 1, (2, 3, 16), damage, [[5, 7, 32], [3, 4, 16]], [200, 100], [[1.0]])


def test_names_and_sums(table):
    assert table.blocks == 2
    assert table.locate(1) == (0, 0, 1)
    assert table.name(1) == "layer 0 expert 0 down"
    bits = np.array([16, 2])
    assert table.level(bits).tolist() == [2, 0]
    assert table.bits(table.level(bits)).tolist() == [16, 2]
    assert table.total_pages(bits) == 35
    assert table.total_damage(bits) == 2.0
    assert table.mean_bits(bits) == pytest.approx((16 * 200 + 2 * 100) / 300)
    assert table.histogram(bits) == {2: 1, 3: 0, 16: 1}
    assert table.total_pages(3) == 11


def test_block_index_order(make_table):
    table = make_table(layers=3, experts=5)
    assert table.locate((2 * 5 + 4) * 2 + 1) == (2, 4, 1)


def test_arrays_are_copied_and_read_only():
    damage = np.array([[1.0, 0.0], [1.0, 0.0]])
    table = BlockTable(1, 1, (2, 16), damage, [[1, 2], [1, 2]], [1, 1], [[1.0]])
    damage[:] = 7
    assert table.damage[0, 0] == 1
    with pytest.raises(ValueError, match="read-only"):
        table.pages[0, 0] = 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"widths": (3, 2, 16)}, "widths must ascend"),
        ({"widths": (2, 3, 9)}, "within 2..8"),
        ({"layers": 0}, "layers and experts"),
        ({"experts": 2}, "damage must have the shape"),
        ({"damage": [[1.0, 2.0, 0.0], [2.0, 1.0, 0.0]]}, "expert 0 gate_up has 1 at 2 bits and 2 at 3"),
        ({"damage": [[4.0, np.nan, 0.0], [2.0, 1.0, 0.0]]}, r"damage\[0, 1\] is nan"),
        ({"damage": [[4.0, 1.0, 0.5], [2.0, 0.5, 0.0]]}, "0 at 16 bits"),
        ({"pages": [[5, 7, 32], [0, 4, 16]]}, r"pages\[1, 0\] is 0"),
        ({"params": [200, 0]}, r"params\[1\] is 0"),
        ({"routing_mass": [[-0.1]]}, "routing_mass"),
    ],
)
def test_bad_tables_name_the_fault(table, change, words):
    with pytest.raises(ValueError, match=words):
        replace(table, **change)


def test_unknown_width_lists_the_known(table):
    with pytest.raises(ValueError, match="4 bits are not in this table; it has 2, 3, 16"):
        table.level(np.array([2, 4]))
    with pytest.raises(ValueError, match="17 bits"):
        table.level(17)
