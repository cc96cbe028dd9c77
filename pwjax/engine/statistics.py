"""What a run did, as the JSON object that ``generate --stats`` writes."""

from pwjax.engine.parts import Parts
from pwjax.environment import versions


def run_statistics(parts: Parts, preemptions: int, lowest_bits: float, last_failure: str | None) -> dict:
    """Memory, precision, compile, throughput, transfers, scheduler, shared prefixes and versions of an engine's life.

    ``lowest_bits``: the least mean bits so far; ``last_failure``: why the latest failed copy failed.
    """
    memory = parts.memory
    counters, bits = parts.pager.counters, parts.pager.committed
    device_peak = parts.meter.device_peak()
    peak = max(parts.meter.peak_bytes, device_peak or 0)
    return {
        "memory": {
            "budget_bytes": memory.budget_bytes,
            "dense_bytes": memory.dense_bytes,
            "table_bytes": memory.table_bytes,
            "arena_bytes": memory.arena_bytes,
            "step_bytes": memory.step_bytes,
            "commit_bytes": memory.commit_bytes,
            "staging_bytes": memory.staging_bytes,
            "peak_bytes": peak,
            "page_bytes": memory.page_bytes,
            "pages_total": memory.num_pages,
            "pages_weights_min": memory.weights_min_pages,
            "pages_weights_max": memory.weights_max_pages,
            "pages_kv_peak": parts.kv.peak_pages,
        },
        "precision": {
            "epochs": counters.epochs,
            "demotions": counters.demotions,
            "promotions": counters.promotions,
            "mean_bits_start": parts.table.mean_bits(parts.start_bits),
            "mean_bits_min": lowest_bits,
            "mean_bits_end": parts.table.mean_bits(bits),
            "histogram": {str(b): int(n) for b, n in parts.table.histogram(bits).items()},
        },
        "compile": {
            "programs": [{"kind": kind, "bucket": bucket} for kind, bucket in parts.programs],
            "recompiles_after_warmup": parts.meter.recompiles,
        },
        "throughput": {
            "prefill_tokens_per_s": parts.meter.prefill.per_second,
            "decode_tokens_per_s": parts.meter.decode.per_second,
        },
        "transfers": {
            "bytes": counters.bytes,
            "pages": counters.pages,
            "failed": counters.failed,
            "blocks_given_up": int(parts.pager.given_up.sum()),
            "last_failure": last_failure,
            "engine_seconds": parts.pager.pace.spent_s,
            "engine_share": parts.pager.pace.share_spent,
            "copy_seconds": parts.pager.pace.copies_s,
        },
        "scheduler": {"slots": parts.shapes.slots, "preemptions": preemptions},
        "prefixes": {
            "hits": parts.prefixes.hits,
            "tokens_saved": parts.prefixes.found_chunks * parts.prefixes.chunk_tokens,
            "evicted": parts.prefixes.evicted,
            "cached_pages": parts.prefixes.evictable_pages,
        },
        "versions": versions(),
    }
