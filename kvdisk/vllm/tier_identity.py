"""Whose data a tier keeps: everything that decides the bytes of a row in the primary tier, as far as it is known here.

A tier lives in the scheduler's process and is told vLLM's `OffloadingConfig`; how workers lay out the layers it never
sees. So the rule of facts.py holds all the more: when in doubt a fact is in. vLLM's whole configuration comes by the
plugin; without it (VLLM_PLUGINS forbids it) the revision, overrides and quantization are unknown, and that is said.

A row is what the workers of all ranks wrote for one chunk of one group, in vLLM's own layout. It is never exchanged
with what `KVDiskOffloadingSpec` stores: the identity names the adapter's format.
"""

import logging
from typing import Any

import vllm.v1.core.kv_cache_utils as kv_cache_utils
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform

from kvdisk.geometry import INFO_FACT
from kvdisk.service import Tenancy
from kvdisk.vllm import plugin
from kvdisk.vllm.facts import UNKNOWN, model_facts

logger = logging.getLogger("kvdisk")

ROW_FORMAT = "vLLM's primary tier, 1"


def tenancy_of(spec: Any, row_bytes: int, namespace: str) -> Tenancy:
    """Whose data the rows of `spec` are. Call it when the root of the block hashes exists: with the first request.

    Args:
        spec: vLLM's OffloadingSpec.
        row_bytes: of the primary tier.
        namespace: the operator's word.
    """
    config = spec.config
    vllm_config = get_current_vllm_config_or_none() or plugin.config_of(config.engine_id)
    if vllm_config is None and not namespace:
        logger.warning(
            "kvdisk tier: the model's revision, quantization and overrides are unknown here, so data on disk is told "
            "apart by model name and weight files only. Let vLLM load kvdisk's plugin (VLLM_PLUGINS), or set "
            "`namespace` to a word that changes with them"
        )
    facts = model_facts(config, vllm_config)
    identity = {
        "adapter": ROW_FORMAT,
        "namespace": namespace,
        "none_hash": bytes(getattr(kv_cache_utils, "NONE_HASH", b"")).hex(),
        "row_bytes": row_bytes,
        "row_parts": [_number(spec, "cpu_page_size_per_worker"), _number(spec, "kv_bytes_per_chunk")],
        "bytes_per_block": config.worker_kv_bytes_per_block,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "canonical": config.canonical_layout,
        "world_size": config.parallel.world_size,
        "groups": [[group.group_id, group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        # vLLM chooses attention backends by it, and they choose how a block is laid out.
        "device": _device_name(),
        "facts": {name: fact for name, fact in facts.items() if not name.startswith(INFO_FACT)},
    }
    index = config.parallel.data_parallel_index
    instances = (f"dp{index}", *(f"dp{index}-{spare}" for spare in range(1, 8)))
    return Tenancy(identity, instances, engines_of(config, facts))


def engines_of(config: Any, facts: dict[str, Any]) -> int:
    """Data-parallel engines that share the cap. vLLM tells those of a dense model that they are alone."""
    asked = facts.get(INFO_FACT + "dp_size")
    return max(int(config.parallel.data_parallel_size), asked if isinstance(asked, int) else 1)


def _number(spec: Any, name: str) -> int:
    value = getattr(spec, name, 0)
    return value if isinstance(value, int) else 0


def _device_name() -> str:
    try:
        return str(current_platform.get_device_name())
    except Exception:  # platforms without a name, or a driver that cannot be asked from here
        return UNKNOWN
