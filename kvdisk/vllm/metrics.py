"""What an operator's dashboards show: the manager's counters as Prometheus metrics `vllm:kvdisk_*`.

One table: name of a key in `KVDiskManager.stats`, kind, help. Nothing is computed here, and nothing is scanned.
"""

from collections.abc import Callable, Mapping

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

PREFIX = "vllm:kvdisk_"

COUNTERS = {
    "hits": "Chunks that a request found in host memory",
    "misses": "Chunks that a request did not find",
    "misses_over_budget": "Chunks on disk that a request did not get: it holds its share of the arena already",
    "misses_no_slot": "Chunks on disk that were recomputed, because no slot became free in time",
    "retries": "Lookups put off because no slot was free",
    "scans_cut": "Scans of waiting requests that were cut short",
    "chunks_loaded": "Chunks copied from the arena to KV blocks",
    "loads_dropped": "Chunks not loaded because their request ended or the cache was reset before their turn",
    "chunks_stored": "Chunks copied from KV blocks to the arena",
    "chunks_partial": "Chunks not kept because some of their blocks were not written",
    "stores_cut": "Chunks refused because the prefix before them was not kept",
    "stores_put_off": "Offers put off because too much was unflushed",
    "stores_refused_unflushed": "Slots refused because too much was unflushed",
    "slots_refused": "Slots refused because nothing could be evicted",
    "slots_evicted": "Slots given up for other chunks",
    "chunks_flushed": "Chunks written to disk",
    "chunks_compressed": "Chunks of those that were written compressed",
    "chunks_not_flushed": "Chunks kept in memory only, because the disk did not take them",
    "chunks_promoted": "Chunks read from disk and verified",
    "chunks_evicted": "Chunks dropped from the index with their segment, or because their prefix was",
    "chunks_damaged": "Chunks read from disk that did not match their checksum",
    "chunks_late": "Chunks whose read missed its deadline",
    "reads_failed": "Chunks whose read ended in an error",
    "headers_damaged": "Pack headers or footers found damaged at start",
    "bytes_flushed": "Live bytes written to disk",
    "bytes_rewritten": "Live bytes of prefix heads written again when their segment was evicted",
    "bytes_written": "Bytes of packs written to disk, padding and headers included",
    "bytes_promoted": "Live bytes read from disk and verified",
    "bytes_read": "Bytes read from disk",
    "segments_recycled": "Segments evicted",
    "writes_failed": "Writes that ended in an error",
    "writes_no_space": "Writes that the disk refused for lack of space",
    "io_ops": "I/O operations issued",
    "io_short_results": "I/O operations that moved less than asked and were continued",
    "io_retries": "I/O operations tried again",
    "io_errors": "I/O operations that ended in an error",
    "io_late": "Transfers that missed their deadline",
    "resets": "Times the cache was declared stale",
}
GAUGES = {
    "chunks_on_disk": "Chunks in the index",
    "chunks_resident": "Chunks in the arena",
    "segments": "Segment files",
    "disk_bytes": "Bytes reserved on disk",
    "arena_units": "Units of the arena",
    "arena_units_free": "Units of the arena that hold nothing",
}


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """For vLLM's `build_metric_definitions`."""
    definitions: dict[str, OffloadingMetricMetadata] = {
        PREFIX + name: OffloadingCounterMetadata(documentation=text + ".") for name, text in COUNTERS.items()
    }
    definitions.update(
        {PREFIX + name: OffloadingGaugeMetadata(documentation=text + ".") for name, text in GAUGES.items()}
    )
    return definitions


class StatsReporter:
    """Turns growing counters into what vLLM wants: increments since the last call.

    Args:
        stats: counters and sizes, by the names above.
    """

    def __init__(self, stats: Callable[[], Mapping[str, int | str]]) -> None:
        self._stats = stats
        self._reported: dict[str, int] = {}
        self._mark: object = None

    def report(self, mark: object) -> OffloadingConnectorStats | None:
        """Increments of counters that grew and gauges as they are; None if no counter moved. Never raises.

        Args:
            mark: whatever differs from the last call's if a counter may have moved since; else nothing is looked at.
        """
        if mark == self._mark:
            return None
        self._mark = mark
        stats = self._stats()
        grown = {name: int(stats.get(name, 0)) - self._reported.get(name, 0) for name in COUNTERS}
        moved = {name: value for name, value in grown.items() if value > 0}
        if not moved:
            return None
        out = OffloadingConnectorStats()
        for name, value in moved.items():
            out.increase_counter(PREFIX + name, value)
            self._reported[name] = self._reported.get(name, 0) + value
        for name in GAUGES:
            out.set_gauge(PREFIX + name, int(stats.get(name, 0)))
        return out
