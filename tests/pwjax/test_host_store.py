"""Pages from files: any order, fresh memory, every fault named, threads welcome."""

import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pallas_kernels.pages import BlockShape, Geometry
from pwjax.errors import ArtifactError
from pwjax.memory import host_store
from pwjax.memory.host_store import HostStore

GEOMETRY = Geometry(64, (2, 3), True, BlockShape(12, 16), BlockShape(8, 12))
LAYERS, EXPERTS = 2, 3
PAGES = GEOMETRY.host_layer_pages(EXPERTS)


def write(folder):
    rng = np.random.default_rng(0)
    data = rng.integers(0, 2**32, (LAYERS, PAGES, 64), dtype=np.uint32)
    for layer in range(LAYERS):
        data[layer].astype("<u4").tofile(folder / host_store.page_file(layer))
        crcs = [zlib.crc32(page.astype("<u4")) for page in data[layer]]
        np.array(crcs, "<u4").tofile(folder / host_store.crc_file(layer))
    return data


@pytest.fixture
def stored(tmp_path):
    return tmp_path, write(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    data = write(folder)
    with HostStore(folder, GEOMETRY, LAYERS, EXPERTS) as store:
        yield store, data


@given(layer=st.integers(0, LAYERS - 1), pages=st.lists(st.integers(0, PAGES - 1), max_size=30))
@hypothesis_settings(deadline=None, max_examples=60)
def test_reads_pages_in_any_order(shared, layer, pages):
    store, data = shared
    got = store.read(layer, pages)
    assert got.dtype == np.uint32 and np.array_equal(got, data[layer][pages].reshape(-1, 64))
    assert got.flags.owndata or got.base.flags.owndata


def test_runs_come_with_one_read(shared, monkeypatch):
    store, _ = shared
    calls = []
    real = host_store.os.preadv
    monkeypatch.setattr(host_store.os, "preadv", lambda *a: calls.append(a[2]) or real(*a))
    store.read(0, [3, 4, 5, 9, 10, 2])
    assert calls == [3 * 256, 9 * 256, 2 * 256]


def test_long_runs_are_read_in_pieces(shared, monkeypatch):
    store, data = shared
    monkeypatch.setattr(host_store, "MAX_READ_BYTES", 100)
    assert np.array_equal(store.read(1, range(7)), data[1][:7])


def test_corrupted_page_is_named(stored):
    folder, data = stored
    with open(folder / "layer_001.bin", "r+b") as file:
        file.seek(5 * 256 + 17)
        byte = file.read(1)
        file.seek(5 * 256 + 17)
        file.write(bytes([byte[0] ^ 1]))
    with HostStore(folder, GEOMETRY, LAYERS, EXPERTS) as store:
        assert np.array_equal(store.read(1, [4, 6]), data[1][[4, 6]])
        with pytest.raises(ArtifactError, match=r"page 5 of .*layer_001\.bin is corrupted"):
            store.read(1, [4, 5, 6])
        assert store.check(1) == [5] and store.check(0) == []


def test_file_that_shrinks_while_open_is_an_error(stored):
    folder, _ = stored
    with HostStore(folder, GEOMETRY, LAYERS, EXPERTS) as store:
        with open(folder / "layer_000.bin", "r+b") as file:
            file.truncate(4 * 256 + 10)
        store.read(0, [3])
        with pytest.raises(ArtifactError, match="truncated: page 4 of"):
            store.read(0, [2, 3, 4])


def test_open_checks_files_and_sizes(stored):
    folder, _ = stored
    opened = lambda: HostStore(folder, GEOMETRY, LAYERS, EXPERTS)  # noqa: E731
    path = folder / "layer_001.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ArtifactError, match=r"layer_001\.bin is truncated"):
        opened()
    path.write_bytes(whole + b"x")
    with pytest.raises(ArtifactError, match="too long"):
        opened()
    path.write_bytes(whole)
    (folder / "layer_001.crc32").write_bytes(b"1234")
    with pytest.raises(ArtifactError, match="1 checksums"):
        opened()
    (folder / "layer_001.crc32").unlink()
    with pytest.raises(ArtifactError, match="cannot read the checksums"):
        opened()
    path.unlink()
    with pytest.raises(ArtifactError, match="cannot open the page file"):
        opened()


def test_page_out_of_range_and_closed_store(stored):
    folder, _ = stored
    store = HostStore(folder, GEOMETRY, LAYERS, EXPERTS)
    with pytest.raises(IndexError, match=f"asked for {PAGES}"):
        store.read(0, [PAGES])
    store.close()
    with pytest.raises(ArtifactError, match="closed"):
        store.read(0, [0])


def test_threads_share_a_store(shared):
    store, data = shared
    rng = np.random.default_rng(1)
    jobs = [(int(rng.integers(LAYERS)), rng.integers(0, PAGES, 20)) for _ in range(200)]
    with ThreadPoolExecutor(8) as pool:
        for (layer, pages), got in zip(jobs, pool.map(lambda job: store.read(*job), jobs), strict=True):
            assert np.array_equal(got, data[layer][pages])
