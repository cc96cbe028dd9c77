"""KV pages: all-or-nothing reservations, places that no two tokens share, a device table that follows."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pwjax.memory.allocator import PageAllocator, PageError
from pwjax.memory.arena import Arena, program_memory
from pwjax.memory.kv import KV_OWNER, KVKind, KVPages, compile_kv_table_updates


def make(pages=200, slots=3, layers=2, max_tokens=50, page_words=64, row_words=20):
    return KVPages(PageAllocator(pages), [KVKind(layers, row_words, page_words, max_tokens)], slots)


def make_kinds(pages=400, slots=3, window=8, max_tokens=50):
    """Three sliding layers with 3 tokens a page, two full ones with 5."""
    kinds = [KVKind(3, 20, 64, max_tokens, window), KVKind(2, 12, 64, max_tokens)]
    return KVPages(PageAllocator(pages), kinds, slots)


def test_sizes():
    kv = make()
    assert kv.kinds[0].page_tokens == 3 and kv.kinds[0].columns == 17
    assert kv.pages_for(0) == 0 and kv.pages_for(1) == kv.pages_for(3) == 4 and kv.pages_for(4) == 8
    assert kv.nbytes == kv.table[0].nbytes == 3 * 2 * 2 * 17 * 4


def test_a_window_bounds_the_pages_of_its_layers():
    kv = make_kinds()
    sliding, full = kv.kinds
    # A window of 8 reaches 7 tokens back: at most 4 pages of 3.
    assert sliding.columns == 4 and full.columns == 10
    assert kv.pages_for(9) == 3 * 6 + 2 * 4 and kv.pages_for(50) == 4 * 6 + 10 * 4
    assert kv.reserve(0, 12) and kv.pages_needed(0, 50) == 7 * 4
    assert kv.reserved_tokens(0) == 15 and kv.reserve(0, 50) and kv.reserved_tokens(0) == 50
    kv.check_invariants()
    assert KVKind(3, 20, 64, 50, window=1).columns == 1 and KVKind(3, 20, 64, 50, window=60).columns == 17
    with pytest.raises(ValueError, match="equally long"):
        KVPages(PageAllocator(9), [KVKind(1, 4, 64, 50), KVKind(1, 4, 64, 51)], 1)


@settings(deadline=None, max_examples=60)
@given(
    window=st.integers(1, 20),
    counts=st.lists(st.integers(0, 17), max_size=12),
    page_tokens=st.integers(1, 7),
)
def test_every_token_that_a_window_sees_is_where_it_was_written(window, counts, page_tokens):
    """Commits of any sizes: a ring keeps the newest window - 1 tokens, a full layer keeps all."""
    kinds = [KVKind(1, 8, 8 * page_tokens, 100, window), KVKind(1, 4, 8 * page_tokens, 100)]
    kv = KVPages(PageAllocator(500), kinds, 1)
    written = [{}, {}]
    end = 0
    for count in counts:
        count = min(count, 100 - end)
        assert kv.reserve(0, end + count)
        for (page, word), places in zip(kv.places(0, end, count, 17), written, strict=True):
            kept = page[0, 0] < 500
            assert not kept[count:].any() and len(set(zip(page[0, 0][kept], word[0, 0][kept], strict=True))) == sum(
                kept
            )
            for token in np.flatnonzero(kept):
                places[int(page[0, 0, token]), int(word[0, 0, token])] = end + int(token)
        end += count
    for kind, pages, places, first in zip(kinds, kv.pages, written, (max(0, end - window + 1), 0), strict=True):
        for token in range(first, end):
            turn, at = divmod(token, kind.page_tokens)
            assert places[int(pages[0, 0, 0, turn % kind.columns]), at * kind.row_words] == token
    kv.check_invariants()


def same_tables(kv):
    for device, host in zip(kv.table, kv.pages, strict=True):
        np.testing.assert_array_equal(np.array(device), host)


def test_reserve_takes_the_difference_and_release_returns_all():
    kv = make()
    assert kv.pages_needed(1, 7) == 12 and kv.reserve(1, 7)
    assert kv.pages_needed(1, 9) == 0 and kv.pages_needed(1, 10) == 4 and kv.pages_needed(1, 2) == 0
    assert kv.reserved_tokens(1) == 9 and kv.reserve(1, 10) and kv.slot_pages(1) == 16
    assert kv.reserve(1, 50) and kv.reserved_tokens(1) == 50
    kv.check_invariants()
    assert kv.used_pages == kv.peak_pages == 17 * 4
    assert kv.release(1) == 17 * 4 and kv.release(1) == 0 and kv.used_pages == 0 and kv.peak_pages == 17 * 4
    assert kv.allocator.free_pages == 199
    kv.check_invariants()


def test_reserve_is_all_or_nothing():
    kv = make(pages=18)
    assert kv.reserve(0, 9)
    assert not kv.reserve(1, 6) and kv.slot_pages(1) == 0 and kv.allocator.free_pages == 5
    assert not kv.reserve(0, 15) and kv.slot_pages(0) == 12
    assert kv.reserve(1, 3)
    kv.check_invariants()


@pytest.mark.parametrize("tokens", [51, -1])
def test_more_tokens_than_a_slot_holds_are_refused(tokens):
    with pytest.raises(ValueError, match=r"0\.\.50"):
        make().reserve(0, tokens)


def test_a_row_must_fit_a_page():
    with pytest.raises(ValueError, match="cannot hold"):
        make(row_words=65)


def test_positions_are_distinct_and_reserved():
    kv = make()
    kv.reserve(0, 10)
    kv.reserve(2, 5)
    seen = set()
    for slot, n in ((0, 12), (2, 6)):
        [(page, word)] = kv.places(slot, 0, n, n)
        assert page.shape == word.shape == (2, 2, n)
        assert kv.allocator.owns(page.reshape(-1), KV_OWNER) and word.max() + 20 <= 64
        places = list(zip(page.reshape(-1).tolist(), word.reshape(-1).tolist(), strict=True))
        assert len(set(places)) == len(places) and seen.isdisjoint(places)
        seen.update(places)
    [(later, word)] = kv.places(0, 7, 2, 2)
    np.testing.assert_array_equal(later, kv.places(0, 0, 12, 12)[0][0][:, :, 7:9])
    assert word[1, 1].tolist() == [20, 40]
    with pytest.raises(PageError, match="room for 12"):
        kv.places(0, 11, 2, 4)
    kv.release(0)
    with pytest.raises(PageError, match="room for 0"):
        kv.places(0, 0, 1, 4)


def test_rows_written_at_positions_are_read_back_through_the_table():
    kv = make()
    arena = Arena(200, 64, page_widths=(4,))
    kv.reserve(1, 8)
    kv.apply()
    [(page, word)] = kv.places(1, 0, 8, 11)
    rows = np.arange(2 * 2 * 11 * 20, dtype=np.uint32).reshape(2, 2, 11, 20) + 5
    arena.commit_kv(page, word, jnp.asarray(rows.reshape(-1, 20)))
    table = np.array(kv.table[0])[1, :, :, :3]  # (L, 2, turns)
    read = arena.read_pages(table.reshape(-1))[:, : 3 * 20].reshape(2, 2, -1, 20)
    np.testing.assert_array_equal(read[:, :, :8], rows[:, :, :8])
    assert not read[:, :, 8:].any() and not arena.read_pages([0]).any()


def test_device_table_is_updated_in_place_and_only_when_needed():
    kv = make()
    pointer = kv.table[0].unsafe_buffer_pointer()
    assert not kv.apply()
    kv.reserve(0, 50)  # 17 turns: more than one scatter sets
    assert kv.apply() and not kv.apply()
    assert kv.table[0].unsafe_buffer_pointer() == pointer
    same_tables(kv)
    kv.release(0)
    kv.reserve(0, 4)
    assert kv.apply()
    same_tables(kv)


def test_table_programs_do_not_copy_the_table():
    for small, large in zip(*(compile_kv_table_updates((8, 4, 2, turns)) for turns in (64, 8192)), strict=True):
        a, b = program_memory(small), program_memory(large)
        assert b.alias_bytes == 8 * 4 * 2 * 8192 * 4 and a.temp_bytes == b.temp_bytes


@settings(deadline=None, max_examples=40)
@pytest.mark.parametrize("build", [make, make_kinds])
@given(st.lists(st.tuples(st.sampled_from(["reserve", "release", "apply"]), st.integers(0, 2), st.integers(0, 50))))
def test_any_sequence_keeps_the_invariants(build, steps):
    kv = build(pages=100)
    for kind, slot, tokens in steps:
        if kind == "reserve":
            need, free = kv.pages_needed(slot, tokens), kv.allocator.free_pages
            assert kv.reserve(slot, tokens) == (need <= free)
        elif kind == "release":
            kv.release(slot)
        else:
            kv.apply()
            same_tables(kv)
        kv.check_invariants()
        kv.allocator.check_invariants()
    kv.apply()
    same_tables(kv)
