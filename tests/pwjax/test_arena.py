"""The arena is written in place and never copied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pwjax.memory.arena import Arena, commit_programs, padded_pages, program_memory, split_widths


@pytest.mark.parametrize("pages", [1, 7, 8, 9, 63, 64, 65, 130])
def test_widths_cover_with_least_padding(pages):
    widths = split_widths(pages)
    assert sum(widths) == padded_pages(pages) and 0 <= sum(widths) - pages < 8


def test_commit_pages_writes_its_pages_and_no_other():
    arena = Arena(40, 16, page_widths=(4, 8))
    words = np.arange(8 * 16, dtype=np.uint32).reshape(8, 16) + 1
    arena.commit_pages([39, 3, 7], jnp.asarray(words[:4]))
    arena.commit_pages([10, 11, 12, 13, 14], jnp.asarray(words))
    want = np.zeros((40, 16), np.uint32)
    want[[39, 3, 7]], want[10:15] = words[:3], words[:5]
    np.testing.assert_array_equal(arena.read_pages(np.arange(40)), want)


@pytest.mark.parametrize("ids", [[0], [40], [-1], [5, 5], [1, 2, 3, 4, 5]])
def test_commit_pages_refuses_bad_ids(ids):
    arena = Arena(40, 16, page_widths=(4,))
    with pytest.raises(ValueError):
        arena.commit_pages(ids, jnp.zeros((4, 16), jnp.uint32))
    with pytest.raises(ValueError, match="widths"):
        arena.commit_pages([1], jnp.zeros((5, 16), jnp.uint32))


def test_commit_kv_writes_rows_and_drops_padding():
    arena = Arena(10, 16, page_widths=(4,), kv_shapes=[(6, 5)])
    rows = np.arange(30, dtype=np.uint32).reshape(6, 5) + 1
    arena.commit_kv(np.array([9, 9, 10, 2, 10, 99]), np.array([0, 5, 0, 10, 15, 3]), jnp.asarray(rows))
    want = np.zeros((10, 16), np.uint32)
    want[9, :5], want[9, 5:10], want[2, 10:15] = rows[0], rows[1], rows[3]
    np.testing.assert_array_equal(arena.read_pages(np.arange(10)), want)
    assert set(arena.programs) == {("commit_pages", 4), ("commit_kv", 6, 5)}


@pytest.mark.parametrize(("page", "word"), [(0, 0), (-1, 0), (3, 12), (3, -1)])
def test_commit_kv_refuses_places_outside_of_a_page(page, word):
    arena = Arena(10, 16, page_widths=(4,))
    with pytest.raises(ValueError, match="inside of a page"):
        arena.commit_kv(np.array([page]), np.array([word]), jnp.zeros((1, 5), jnp.uint32))


def test_commits_keep_the_pointer_and_delete_the_old_handle():
    arena = Arena(64, 32, page_widths=(4,), kv_shapes=[(2, 8)])
    old, pointer = arena.array, arena.array.unsafe_buffer_pointer()
    for step in range(5):
        arena.commit_pages([1 + step], jnp.ones((4, 32), jnp.uint32))
        arena.commit_kv(np.array([9, 9]), np.array([0, 8]), jnp.ones((2, 8), jnp.uint32))
        assert arena.array.unsafe_buffer_pointer() == pointer
    assert old.is_deleted()
    arena.delete()


def test_program_sizes_do_not_depend_on_the_arena():
    small, large = (commit_programs(n, 1024, (8, 64), [(128, 64)]) for n in (256, 1 << 18))
    assert small.keys() == large.keys()
    for key in small:
        a, b = program_memory(small[key]), program_memory(large[key])
        assert (a.alias_bytes, b.alias_bytes) == (256 * 4096, (1 << 18) * 4096)
        assert a.temp_bytes == b.temp_bytes < 64 << 10 and a.extra_bytes == b.extra_bytes
        assert a.output_bytes == a.alias_bytes
    words = program_memory(large["commit_pages", 64])
    assert words.argument_bytes - words.alias_bytes == 64 * 4096 + 64 * 4


def test_a_gibibyte_arena_is_not_copied():
    page_words = 11 * 1024
    arena = Arena((1 << 30) // (page_words * 4), page_words, kv_shapes=[(96, 1024)])
    arena.wait()
    pointer = arena.array.unsafe_buffer_pointer()
    words, rows = jnp.ones((8, page_words), jnp.uint32), jnp.full((96, 1024), 7, jnp.uint32)
    page, word = np.repeat(np.arange(2000, 2012), 8), np.tile(np.arange(8) * 1024, 12)
    for start in range(1, 81, 8):
        arena.commit_pages(np.arange(start, start + 8), words)
        arena.commit_kv(page, word, rows)
    arena.wait()
    assert arena.array.unsafe_buffer_pointer() == pointer
    for program in arena.programs.values():
        assert program_memory(program).alias_bytes == arena.nbytes
    assert arena.read_pages([80, 81, 2011])[:, 0].tolist() == [1, 0, 7]
    arena.delete()


def test_reading_pages_is_a_copy_that_leaves_donation_alone():
    arena = Arena(64, 32, page_widths=(4,))
    view = arena.read_pages([1, 2])
    pointer = arena.array.unsafe_buffer_pointer()
    arena.commit_pages([1], jnp.ones((4, 32), jnp.uint32))
    assert arena.array.unsafe_buffer_pointer() == pointer and not view.any()


def test_commit_widths_are_checked():
    with pytest.raises(ValueError, match="multiples"):
        Arena(8, 8, page_widths=(4, 6))


def test_a_reader_in_flight_sees_the_pages_from_before():
    arena = Arena(512, 1024, page_widths=(4,))
    total = jax.jit(lambda a: a.astype(jnp.float32).sum())
    for step in range(4):
        before = total(arena.array)
        arena.commit_pages([1 + step], jnp.ones((4, 1024), jnp.uint32))
        assert float(before) == 1024 * step
