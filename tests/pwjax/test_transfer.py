"""Copies from the store to the device: threads, errors, cancelling, and memory that nobody else writes to."""

import os
import threading
import time

import jax
import numpy as np
import pytest
from pager_rig import WIDTHS, Rig

from pwjax.memory.faults import FakeStore
from pwjax.memory.pacing import Pace
from pwjax.memory.transfer import SyncTransfer, ThreadTransfer, TransferError, TransferJob, stage


def test_staging_through_pinned_memory_gives_the_same_words():
    device = jax.devices()[0]
    if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        pytest.skip("this backend has no pinned memory")
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    job = TransferJob(0, 1, (1, 2, 3, 9, 8), WIDTHS)
    straight, through = (stage(FakeStore(64), job, way) for way in (None, pinned))
    for a, b in zip(straight.words, through.words, strict=True):
        np.testing.assert_array_equal(a, b)
        assert b.sharding.memory_kind == "device" or b.sharding.memory_kind == a.sharding.memory_kind


def test_threads_end_where_synchronous_copies_end():
    store, threads = FakeStore(64), set()
    read = store.read

    def recorded(layer, pages):
        threads.add(threading.current_thread().name)
        return read(layer, pages)

    store.read = recorded
    transfer = ThreadTransfer(store, workers=2)
    free = {"pace": Pace(time.monotonic, share=1.0)}  # the first commit compiles, which would be paid for by waiting
    rig, same = Rig(3, spare=40, transfer=transfer, **free), Rig(3, spare=40, transfer=SyncTransfer(FakeStore(64)))
    target = np.array([2, 2, 4, 16, 4, 3, 2, 3])
    for r in (rig, same):
        r.pager.request(target)
        r.settle(limit=100_000)
        r.check()
    np.testing.assert_array_equal(rig.pager.committed, same.pager.committed)
    assert all(name.startswith("pwjax-transfer") for name in threads)
    transfer.close()


def test_thread_transfer_passes_errors_and_cancels():
    gate = threading.Event()

    class Slow(FakeStore):
        def read(self, layer, pages):
            gate.wait(10)
            if layer == 1:
                raise OSError("checksum of page 3")
            return super().read(layer, pages)

    transfer = ThreadTransfer(Slow(64), workers=1)
    jobs = [TransferJob(0, layer, (1, 2, 3, 4, 5), WIDTHS) for layer in (0, 1, 0)]
    first, second, third = map(transfer.submit, jobs)
    third.cancel()
    assert not first.done() and third.done()
    gate.set()
    staged = first.result()
    assert staged.pages == 5 and [w.shape[0] for w in staged.words] == list(jobs[0].chunks) == [4, 4]
    with pytest.raises(OSError, match="page 3"):
        second.result()
    with pytest.raises(TransferError, match="cancelled"):
        third.result()
    transfer.close()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="batch scheduling is Linux's")
@pytest.mark.parametrize("allowed", [True, False])
def test_copying_threads_yield_to_steps_on_a_cpu_and_the_caller_does_not(monkeypatch, allowed):
    def forbidden(*_):
        raise PermissionError("not in this sandbox")

    if not allowed:
        monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    kinds = []

    class Asking(FakeStore):
        def read(self, layer, pages):
            kinds.append(os.sched_getscheduler(0))
            return super().read(layer, pages)

    transfer = ThreadTransfer(Asking(64), workers=1)
    before = os.sched_getscheduler(0)
    assert transfer.submit(TransferJob(0, 0, (1, 2), WIDTHS)).result().pages == 2
    transfer.close()
    assert kinds == [os.SCHED_BATCH if allowed else before]
    assert os.sched_getscheduler(0) == before


def test_staged_words_do_not_alias_what_the_store_returned():
    """A store may reuse its buffer, also a 64-byte aligned one that device_put would alias."""
    raw = np.zeros(4 * 64 + 16, np.uint32)
    offset = -raw.ctypes.data % 64 // 4
    aligned = raw[offset : offset + 4 * 64].reshape(4, 64)

    class Reusing(FakeStore):
        def read(self, layer, pages):
            aligned[:] = layer + 1
            return aligned

    transfer = SyncTransfer(Reusing(64))
    staged = transfer.submit(TransferJob(0, 0, (0, 1, 2, 3), WIDTHS)).result()
    transfer.submit(TransferJob(0, 7, (0, 1, 2, 3), WIDTHS))
    assert np.array(staged.words[0]).max() == 1
