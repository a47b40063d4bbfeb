"""`KVDiskOffloadingSpec`: what vLLM loads by `spec_name` and `spec_module_path`.

vLLM makes one of these in the scheduler's process, for the manager, and one in each worker, for the worker; workers
first, often minutes earlier. They find each other by the engine's id (rendezvous.py). Everything a user can get wrong
is refused here, at start, by name.
"""

import json
import logging
import os
from typing import Any

import vllm.v1.core.kv_cache_utils as kv_cache_utils
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvdisk.dataplane import Units
from kvdisk.directory import OVERHEAD_BYTES, check_room, segment_cost
from kvdisk.geometry import INFO_FACT, RANK_FACT, Geometry
from kvdisk.service import Service, Tenancy
from kvdisk.store_config import SEGMENTS_MIN
from kvdisk.units import MIB, UNIT_BYTES, format_size, round_up
from kvdisk.vllm import rendezvous
from kvdisk.vllm.certify import certify
from kvdisk.vllm.config import AdapterConfig, check_block_size, parse_config, tokens_per_block
from kvdisk.vllm.facts import build_geometry, collect_facts, forward_context
from kvdisk.vllm.live import live_kv_caches
from kvdisk.vllm.manager import KVDiskManager
from kvdisk.vllm.metrics import metric_definitions
from kvdisk.vllm.requests import Groups
from kvdisk.vllm.share import Share
from kvdisk.vllm.version import windows_in_chunks
from kvdisk.vllm.worker import KVDiskWorker

logger = logging.getLogger("kvdisk")

WINDOW_FACT = INFO_FACT + "window_groups"
MAMBA_FACT = INFO_FACT + "mamba_groups"
_WINDOWED = (MambaSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)


class KVDiskOffloadingSpec(OffloadingSpec):
    """See the module's docstring. The configuration's keys are in docs/configuration.md."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Prometheus metrics, `vllm:kvdisk_*`."""
        return metric_definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        """Checks the configuration.

        Raises:
            ValueError: a key that is unknown, cannot be honoured or has an impossible value.
        """
        super().__init__(config)
        self._adapter: AdapterConfig = parse_config(config.extra_config)
        check_block_size(config.extra_config, tokens_per_block(config))
        self.replicated_layout = config.replicated_layout
        self._manager: KVDiskManager | None = None
        self._worker: tuple[Share, KVDiskWorker] | None = None

    # ---- worker side

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker of this rank. A second call (elastic scaling) gets a new worker over the same share, which the
        manager may have mapped already.

        Raises:
            RuntimeError: outside vLLM's worker, or a second call with another layout; that takes a restart.
            ValueError: a layout that cannot be stored whole, by group, layer and numbers.
        """
        config = self.config
        if get_current_vllm_config_or_none() is None:
            raise RuntimeError("get_worker needs vLLM's current config: without it nobody can tell whose KV this is")
        facts = collect_facts(config, kv_caches)
        facts.update(_group_kinds(config))
        layers = [group.layer_names for group in config.groups]
        live = live_kv_caches(kv_caches, forward_context(), layers)
        certify(live, forward_context(), [(group.group_id, group.layer_names) for group in config.groups])
        geometry = build_geometry(config, live, facts)
        rank = config.parallel.rank
        reads_rank_0 = self.replicated_layout and rank > 0
        unit_count = 0 if reads_rank_0 else self._units_a_rank()
        in_one_process = facts.get(INFO_FACT + "executor_backend") == "uni" and config.parallel.world_size == 1
        if self._worker is None:
            share = Share.create(geometry, unit_count, shared=self._must_share or not in_one_process)
        else:
            share, before = self._worker
            before.shutdown()
            if share.geometry.to_json() != geometry.to_json():
                raise RuntimeError("the KV caches of a running engine were laid out anew; restart it to offload again")
        rendezvous.offer(config.engine_id, share, elsewhere=not in_one_process)
        timeout = self._adapter.rendezvous_timeout_s
        units = rendezvous.find(config.engine_id, 0, timeout) if reads_rank_0 else None
        worker = KVDiskWorker(
            share,
            geometry,
            live,
            units=units,
            layer_names=layers,
            on_shutdown=lambda: rendezvous.withdraw(config.engine_id, share),
        )
        self._worker = share, worker
        size = format_size(unit_count * UNIT_BYTES)
        logger.info("kvdisk: rank %d has %s of arena (%s%s)", rank, size, share.pages, ", pinned" * worker.pinned)
        return worker

    @property
    def _must_share(self) -> bool:
        """Whether the arena goes to a data plane in another process, too."""
        return self._adapter.options.data_plane == "process"

    def _units_a_rank(self) -> int:
        ranks = 1 if self.replicated_layout else self.config.parallel.world_size
        return self._adapter.options.cpu_bytes_to_use // ranks // UNIT_BYTES

    # ---- scheduler side

    def get_manager(self) -> OffloadingManager:
        """The manager, once all ranks have offered their shares.

        Raises:
            RendezvousError: ranks that do not come or disagree.
            ValueError, DirectoryInUseError: a root that cannot be used, chunks that fit neither arena nor segment.
        """
        if self._manager is None:
            self._manager = self._build_manager()
        return self._manager

    def _build_manager(self) -> KVDiskManager:
        config, adapter = self.config, self._adapter
        world = config.parallel.world_size
        shares = rendezvous.collect(config.engine_id, world, adapter.rendezvous_timeout_s)
        home = shares[:1] if self.replicated_layout else shares
        group_ids = tuple(group.group_id for group in config.groups)
        parts = {
            group_id: tuple(share.geometry.chunk_bytes(index) for share in home)
            for index, group_id in enumerate(group_ids)
        }
        unit_count = min(share.unit_count for share in home)
        self._check_sizes(parts, unit_count)
        for path in adapter.options.root_dir:
            self._check_root(path, self._engines(shares[0].geometry))
        units = {group_id: round_up(max(parts[group_id]), UNIT_BYTES) // UNIT_BYTES for group_id in group_ids}
        chunk_tokens = {group.group_id: group.tokens_per_block * self.blocks_per_chunk for group in config.groups}
        groups = Groups(chunk_tokens, units, self._windows(shares[0].geometry, chunk_tokens), unit_count)
        self._say_what_to_expect(shares[0].geometry, groups)

        def open_service() -> Service:
            return Service(
                adapter.options,
                self._tenancy([share.geometry for share in shares]),
                [Units(*share.memory_units) for share in home],
                unit_count=unit_count,
                group_parts=parts,
                memfds=[share.fd for share in home if share.fd is not None],
            )

        return KVDiskManager(
            open_service,
            groups,
            group_ids,
            shares,
            home,
            self.blocks_per_chunk,
            store_threshold=adapter.store_threshold,
            max_tracker_size=adapter.max_tracker_size,
            reset_keeps_disk=adapter.reset_keeps_disk,
            emit_events=self.kv_events_config.enable_kv_cache_events,
        )

    def _check_sizes(self, parts: dict[int, tuple[int, ...]], unit_count: int) -> None:
        options = self._adapter.options
        for group_id, sizes in parts.items():
            chunk = sum(round_up(size, UNIT_BYTES) for size in sizes)
            units = max(round_up(size, UNIT_BYTES) for size in sizes) // UNIT_BYTES
            what = f"a chunk of KV cache group {group_id} has {format_size(chunk)} ({self.blocks_per_chunk} blocks)"
            if chunk == 0:
                raise ValueError(f"KV cache group {group_id} has no bytes on any rank")
            if chunk > options.segment_bytes // 4:
                needed = -(-4 * chunk // MIB)
                raise ValueError(f"{what}; set segment_bytes to at least {needed}MiB, or lower blocks_per_chunk")
            if units * 8 > unit_count:  # on every rank that has slots
                needed = -(-8 * units * UNIT_BYTES * len(sizes) // MIB)
                raise ValueError(f"{what}; set cpu_bytes_to_use to at least {needed}MiB, or lower blocks_per_chunk")

    def _check_root(self, path: str, engines: int) -> None:
        options = self._adapter.options
        cap = options.disk_bytes_to_use // len(options.root_dir)
        share = cap // engines
        needed = OVERHEAD_BYTES + SEGMENTS_MIN * segment_cost(options.segment_bytes)
        check_room(path, cap, share, needed, options.allow_shared_root)

    def _windows(self, geometry: Geometry, chunk_tokens: dict[int, int]) -> dict[int, int]:
        """Groups that are looked up from the tail, and how many chunks of each a hit needs.

        The config says so, or (0.32) the layers do, on the workers.
        """
        told = windows_in_chunks(self.config)
        if told is not None:
            return told
        tokens = json.loads(str(geometry.facts.get(WINDOW_FACT) or "{}"))
        return {
            group_id: max(1, -(-int(tokens[str(group_id)]) // chunk))
            for group_id, chunk in chunk_tokens.items()
            if str(group_id) in tokens
        }

    def _say_what_to_expect(self, geometry: Geometry, groups: Groups) -> None:
        if groups.starved_windows:
            logger.warning(
                "kvdisk: the arena is too small for one request's windows of KV cache groups %s, so long prefixes may "
                "not hit at all: raise cpu_bytes_to_use, or lower blocks_per_chunk",
                list(groups.starved_windows),
            )
        if self.offload_prompt_only:
            logger.info("kvdisk: only prompts are stored (offload_prompt_only, vLLM's default), not generated turns")
        if geometry.facts.get(INFO_FACT + "max_loras") not in (None, "none", "unknown"):
            logger.warning(
                "kvdisk: vLLM tells LoRA adapters apart by name and path, not by weights; an adapter that was trained "
                "again needs a new path, or another `namespace`, or it is served the old one's KV"
            )
        mamba = _ids(geometry.facts.get(MAMBA_FACT))
        if mamba and self.blocks_per_chunk > 1:
            logger.warning(
                "kvdisk: KV cache groups %s hold Mamba or linear-attention states. With blocks_per_chunk=%d a state is "
                "stored only when a step ends on a chunk, so there may be no hits at all: set blocks_per_chunk to 1",
                mamba,
                self.blocks_per_chunk,
            )
        seed = getattr(kv_cache_utils, "_NON_CRYPTO_HASH_FUNCTIONS", ())
        vllm_config = get_current_vllm_config_or_none()
        algorithm = getattr(getattr(vllm_config, "cache_config", None), "prefix_caching_hash_algo", "")
        names = {function.__name__ for function in seed}
        if algorithm in names and "PYTHONHASHSEED" not in os.environ:
            logger.warning(
                "kvdisk: prefix_caching_hash_algo=%s has a random seed, so nothing on disk will be found after a "
                "restart: set PYTHONHASHSEED, or use sha256",
                algorithm,
            )

    def _tenancy(self, geometries: list[Geometry]) -> Tenancy:
        """Whose data: everything that decides the bytes, and the root of the block hashes, which exists by now."""
        config = self.config
        none_hash = getattr(kv_cache_utils, "NONE_HASH", b"")
        identity = {
            "model": config.model.name,
            "ranks": [geometry.fingerprint() for geometry in geometries],
            "none_hash": bytes(none_hash).hex(),
            "namespace": self._adapter.options.namespace,
            "facts": {
                name: fact
                for name, fact in geometries[0].facts.items()
                if not name.startswith((RANK_FACT, INFO_FACT))  # of the rank: in its fingerprint; others decide nothing
            },
        }
        index = config.parallel.data_parallel_index
        instances = (f"dp{index}", *(f"dp{index}-{spare}" for spare in range(1, 8)))
        return Tenancy(identity, instances, self._engines(geometries[0]))

    def _engines(self, geometry: Geometry) -> int:
        """Data-parallel engines that share the cap. vLLM tells those of a dense model that they are alone."""
        asked = geometry.facts.get(INFO_FACT + "dp_size")
        told: int = self.config.parallel.data_parallel_size
        return max(told, asked if isinstance(asked, int) else 1)


def _group_kinds(config: OffloadingConfig) -> dict[str, str]:
    """Which groups are looked up from the tail, how far they reach, and which hold states; 0.32's config does not say.

    The layers say it. But a layer's own word is not vLLM's last: without the hybrid KV cache manager it treats windows
    as full attention, unless there is nothing else.
    """
    vllm_config, layers = get_current_vllm_config_or_none(), forward_context()
    kinds = {
        group.group_id: [spec for name in group.layer_names if (spec := _spec_of(layers.get(name), vllm_config))]
        for group in config.groups
    }
    scheduler_config = getattr(vllm_config, "scheduler_config", None)
    if getattr(scheduler_config, "disable_hybrid_kv_cache_manager", False) and not all(
        isinstance(spec, _WINDOWED) for specs in kinds.values() for spec in specs
    ):
        kinds = {group_id: [s for s in specs if isinstance(s, MambaSpec)] for group_id, specs in kinds.items()}
    windows = {
        group_id: max(_reach(spec) for spec in specs)
        for group_id, specs in kinds.items()
        if specs and all(isinstance(spec, _WINDOWED) for spec in specs)
    }
    mamba = [group_id for group_id, specs in kinds.items() if any(isinstance(spec, MambaSpec) for spec in specs)]
    return {WINDOW_FACT: json.dumps(windows), MAMBA_FACT: ",".join(map(str, mamba))}


def _spec_of(layer: object, vllm_config: object) -> object:
    get_spec = getattr(layer, "get_kv_cache_spec", None)
    try:
        return get_spec(vllm_config) if get_spec is not None else None
    except Exception:  # a layer that cannot say counts as full attention
        logger.debug("layer %r does not tell its KV cache spec", layer, exc_info=True)
        return None


def _reach(spec: object) -> int:
    """Tokens that attention reaches back; 1 for a state."""
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    return int(spec.attention_chunk_size) if isinstance(spec, ChunkedLocalAttentionSpec) else 1


def _ids(fact: object) -> list[int]:
    return [int(word) for word in str(fact or "").split(",") if word.isdigit()]
