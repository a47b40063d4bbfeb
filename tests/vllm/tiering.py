"""vLLM's real TieringOffloadingManager and primary tier with a `KVDiskTier`, and no worker: rows are filled by hand.

What the GPU's worker would copy into a row is a function of its key, so every row that is loaded can be checked.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

ROW_BYTES = 64 << 10
CHUNK_TOKENS = 16
WAIT_S_MAX = 20.0


class Region:
    """The primary tier's memory: private here, of all ranks in vLLM."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        # From a page on, as vLLM's mapping.
        raw = np.zeros(rows * row_bytes + 4096, np.int8)
        start = -raw.ctypes.data % 4096
        self.rows = raw[start : start + rows * row_bytes].reshape(rows, row_bytes)
        self.cleaned = False

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self.rows)

    def cleanup(self) -> None:
        self.cleaned = True


def offloading_config(groups: Sequence[int] = (0,), **changes: Any) -> OffloadingConfig:
    """Of one rank; `changes` replace fields."""
    fields: dict[str, Any] = {
        "groups": tuple(OffloadingGroupConfig(CHUNK_TOKENS, (f"layers.{group}",), group) for group in groups),
        "worker_kv_bytes_per_block": ROW_BYTES,
        "enable_kv_cache_events": False,
        "extra_config": {},
        "engine_id": "engine",
        "model": OffloadingModelConfig("org/model", "bfloat16"),
        "cache": OffloadingCacheConfig(CHUNK_TOKENS, 1),
        "parallel": OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        **changes,
    }
    return OffloadingConfig(**fields)


def tier_config(root: Path, **extra: Any) -> dict[str, Any]:
    """An entry of `secondary_tiers`; `root` is made."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {
        "type": "KVDiskTier",
        "module_path": "kvdisk.vllm",
        "root_dir": str(root),
        "disk_bytes_to_use": "64MiB",
        "cpu_bytes_to_use": "4MiB",
        "segment_bytes": "2MiB",
        "namespace": "test",
        "data_plane": "thread",  # where tests can reach it
        **extra,
    }


def make_tier(region: Region, config: dict[str, Any], offloading: OffloadingConfig, *, events: bool = False) -> Any:
    """As vLLM makes it."""
    spec = SimpleNamespace(
        config=offloading,
        extra_config={},
        blocks_per_chunk=offloading.cache.blocks_per_chunk,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
        kv_bytes_per_chunk=region.rows.shape[1],
    )
    return SecondaryTierFactory.create_secondary_tier(config, region.create_kv_memoryview(), spec)


class Tiers:
    """See the module's docstring.

    Args:
        root: the tier's root_dir.
        rows: of the primary tier.
        extra: keys of the tier's configuration.
        offloading: vLLM's configuration.
    """

    def __init__(
        self,
        root: Path,
        *,
        rows: int = 16,
        row_bytes: int = ROW_BYTES,
        offloading: OffloadingConfig | None = None,
        events: bool = False,
        **extra: Any,
    ) -> None:
        self.region = Region(rows, row_bytes)
        self.primary = CPUPrimaryTierOffloadingManager(rows, self.region)
        config = tier_config(root, **extra)
        self.tier = make_tier(self.region, config, offloading or offloading_config(), events=events)
        self.manager = TieringOffloadingManager(self.primary, [self.tier])
        self.requests = 0

    def request(self, keys: Iterable[bytes] = ()) -> ReqContext:
        """A new request over these keys, which follow each other in each group."""
        context = ReqContext(f"r{self.requests}")
        self.requests += 1
        ends: dict[bytes, int] = {}
        for key in keys:
            ends[key[-4:]] = ends.get(key[-4:], 0) + CHUNK_TOKENS
            context.set_offload_key_position(OffloadKey(key), ends[key[-4:]])
        self.manager.on_new_request(context)
        return context

    def write(self, keys: Sequence[bytes], context: ReqContext | None = None) -> ReqContext:
        """Store these chunks as a request of its own: primary tier, and from there the disk."""
        context = context or self.request(keys)
        out = self.manager.prepare_store([OffloadKey(key) for key in keys], context)
        assert out is not None, "the primary tier is full"
        for key, row in zip(out.keys_to_store, out.store_spec.chunk_ids, strict=True):
            self.region.rows[row] = content(key, self.region.rows.shape[1])
        self.manager.complete_store(out.keys_to_store, context)
        return context

    def end_step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self, *, flush: bool = True) -> None:
        """Step until all jobs have ended and, with `flush`, all is on disk."""
        deadline = time.monotonic() + WAIT_S_MAX
        while self.manager._jobs or (flush and self.manager.has_pending_work()):
            assert time.monotonic() < deadline, f"jobs {list(self.manager._jobs)} never end"
            self.end_step()
            self.manager._maybe_process_finished_jobs()
            self.wait()

    def wait(self) -> None:
        """Until something of the tier's ends, or soon."""
        tier = self.tier
        if tier._service is not None and tier._rows.busy:
            tier._rows.wait(0.01)
        elif tier._service is not None:
            tier._service.wait(0.01)

    def forget_host(self) -> None:
        """Drop every chunk from the primary tier and every slot: what is found later came from disk."""
        self.settle()
        self.primary.reset_cache()
        self.tier._service.store.drop_slots()
        self.region.rows[:] = 0x55

    def resolve(self, keys: Sequence[bytes], context: ReqContext, steps_max: int = 200) -> list[LookupResult]:
        """Look the keys up, step by step, until each is a hit or a miss."""
        for _ in range(steps_max):
            answers = [self.manager.lookup(OffloadKey(key), context) for key in keys]
            if all(answer in (LookupResult.HIT, LookupResult.MISS) for answer in answers):
                return answers
            self.end_step()
            self.wait()
        raise AssertionError(f"not decided in {steps_max} steps: {answers}")

    def read(self, keys: Sequence[bytes], context: ReqContext | None = None) -> list[bool]:
        """Which of these chunks a request can load; the rows of those are checked."""
        context = context or self.request(keys)
        hits = [answer is LookupResult.HIT for answer in self.resolve(keys, context)]
        good = [OffloadKey(key) for key, hit in zip(keys, hits, strict=True) if hit]
        spec = self.manager.prepare_load(good, context)
        for key, row in zip(good, spec.chunk_ids, strict=True):
            assert (self.region.rows[row] == content(key, self.region.rows.shape[1])).all(), f"{key.hex()} is wrong"
        self.manager.complete_load(good, context)
        return hits

    def hold_disk(self) -> Callable[[], None]:
        """From now on the data plane gets nothing; call what is returned, once, to let it have all of that."""
        service = self.tier._service
        plane = service.plane.backend.plane
        begin, held = plane.start, []
        plane.start = held.extend

        def release() -> None:
            plane.start = begin
            service.plane.loop.call_soon_threadsafe(lambda: begin(held))

        return release

    def close(self) -> None:
        self.manager.shutdown()


def keys_of(count: int, seed: int = 0, group: int = 0) -> list[bytes]:
    """`count` chunks of one prefix."""
    return [hashlib.sha256(b"%d/%d" % (seed, i)).digest() + group.to_bytes(4, "big") for i in range(count)]


def content(key: bytes, size: int) -> Any:
    """What a row of `key` holds."""
    rng = np.random.default_rng(int.from_bytes(key[:8], "big") + key[-1])
    return np.frombuffer(rng.bytes(size), np.int8)


Start = Callable[..., Tiers]
