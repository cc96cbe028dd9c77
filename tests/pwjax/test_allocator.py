"""The allocator loses no page and gives none out twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pwjax.memory.allocator import PageAllocator, PageError


def test_allocator_gives_low_ids_and_never_the_null_page():
    pages = PageAllocator(6)
    assert pages.alloc(3, "a").tolist() == [1, 2, 3]
    assert pages.alloc(3, "b") is None and pages.free_pages == 2
    assert pages.alloc(2, "b").tolist() == [4, 5]
    assert pages.alloc(0, "c").tolist() == []
    pages.free([2], "a")
    assert pages.counts() == {"a": 2, "b": 2} and pages.peak_pages == 5
    assert pages.owned("a").tolist() == [1, 3] and pages.owner_of(2) is None and pages.owner_of(0) is None
    assert pages.alloc(1, "b").tolist() == [2]
    pages.check_invariants()


@pytest.mark.parametrize(
    ("ids", "owner", "message"),
    [
        ([1], "b", "page 1 belongs to a, not to b"),
        ([3], "a", "page 3 belongs to nobody"),
        ([1, 1], "a", "twice"),
        ([0], "a", "1..7"),
        ([8], "a", "1..7"),
        ([-1], "a", "1..7"),
        ([1, 3], "a", "page 3"),
    ],
)
def test_allocator_refuses_double_and_foreign_frees_whole(ids, owner, message):
    pages = PageAllocator(8)
    pages.alloc(2, "a")
    for call in (lambda: pages.free(ids, owner), lambda: pages.reassign(ids, owner, "new")):
        with pytest.raises(PageError, match=message):
            call()
    assert pages.counts() == {"a": 2}
    pages.check_invariants()


def test_allocator_needs_a_page_beside_the_null_page():
    with pytest.raises(ValueError, match="null page"):
        PageAllocator(1)
    with pytest.raises(ValueError, match="-1"):
        PageAllocator(4).alloc(-1, "a")


def test_check_invariants_finds_a_leak():
    pages = PageAllocator(4)
    pages.alloc(1, "a")
    pages._holder[1] = 0
    with pytest.raises(PageError):
        pages.check_invariants()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7), st.sampled_from("abc"), st.sampled_from("abc"))))
def test_allocator_agrees_with_sets(steps):
    pages, held = PageAllocator(20), {owner: [] for owner in "abc"}
    for kind, n, owner, other in steps:
        if kind == 0:
            ids = pages.alloc(n, owner)
            assert (ids is None) == (n > 19 - sum(map(len, held.values())))
            held[owner] += [] if ids is None else ids.tolist()
        else:
            moved, held[owner] = held[owner][:n], held[owner][n:]
            if kind == 1:
                pages.free(moved, owner)
            else:
                pages.reassign(moved, owner, other)
                held[other] = held[other] + moved
        pages.check_invariants()
        for name, ids in held.items():
            assert pages.owned(name).tolist() == sorted(ids) and pages.pages_of(name) == len(ids)
