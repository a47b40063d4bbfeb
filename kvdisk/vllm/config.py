"""The adapter's configuration: `kv_connector_extra_config`, checked as a whole before anything is allocated.

Three kinds of keys: kvdisk's own, vLLM's that mean the same here as in its CPUOffloadingSpec, and vLLM's that cannot be
honoured, which are an error rather than a silent difference. So a configuration that worked with CPUOffloadingSpec
works after changing `spec_name` and adding `root_dir` and `disk_bytes_to_use`.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.kv_offload.config import OffloadingConfig

from kvdisk.options import Options, parse_bool, parse_options, reject_unknown

logger = logging.getLogger("kvdisk")

STORE_KEYS = tuple(field.name for field in fields(Options))
ADAPTER_KEYS = ("reset_keeps_disk", "rendezvous_timeout_s")
VLLM_KEYS = (
    "spec_name",
    "spec_module_path",
    "block_size",
    "blocks_per_chunk",
    "offload_prompt_only",
    "self_describing_kv_events",
    "store_threshold",
    "max_tracker_size",
    "eviction_policy",
    "sync_load_budget_bytes",  # 0.33
)
_REFUSED = {
    "canonical_layout": "kvdisk stores each rank's own bytes; leave it out",
    "cache_policy_module_path": "kvdisk evicts whole segments on disk and by CLOCK in memory; leave it out",
    "secondary_tiers": "kvdisk is a tier of its own; leave it out",
}
_POLICIES = ("lru", "arc")


@dataclass(frozen=True)
class AdapterConfig:
    """What a user configured.

    options: of the store. reset_keeps_disk: `reset_cache` does not make the data on disk stale. rendezvous_timeout_s:
    how long the scheduler waits for its workers. store_threshold: how often a chunk must be offered before it is
    stored (below 2: always). max_tracker_size: chunks whose offers are counted.
    """

    options: Options
    reset_keeps_disk: bool = False
    rendezvous_timeout_s: float = 300.0
    store_threshold: int = 0
    max_tracker_size: int = 64_000


def parse_config(extra: Mapping[str, Any]) -> AdapterConfig:
    """The configuration in `extra`.

    Raises:
        ValueError: a key that is unknown, cannot be honoured or has an impossible value; the message has the remedy.
    """
    for key, why in _REFUSED.items():
        if extra.get(key):
            raise ValueError(f"kv_connector_extra_config: {key}={extra[key]!r} cannot be honoured: {why}")
    known = {key: value for key, value in extra.items() if key not in _REFUSED}
    try:
        reject_unknown(known, [*STORE_KEYS, *ADAPTER_KEYS, *VLLM_KEYS])
        options = parse_options({key: known[key] for key in STORE_KEYS if key in known})
        timeout = known.get("rendezvous_timeout_s", 300.0)
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout <= 0:
            raise ValueError(f"rendezvous_timeout_s={timeout!r} is not a positive number of seconds")
        policy = known.get("eviction_policy", "lru")
        if policy not in _POLICIES:
            raise ValueError(f"eviction_policy={policy!r} is none of {', '.join(_POLICIES)}")
        return AdapterConfig(
            options,
            parse_bool(known.get("reset_keeps_disk", False), "reset_keeps_disk"),
            float(timeout),
            _count(known.get("store_threshold", 0), "store_threshold", 0),
            _count(known.get("max_tracker_size", 64_000), "max_tracker_size", 1),
        )
    except ValueError as error:
        raise ValueError(f"kv_connector_extra_config: {error}") from None


def check_block_size(extra: Mapping[str, Any], tokens_per_block: Mapping[int, int]) -> None:
    """Refuse `block_size` (tokens) where KV cache groups differ in block size, with what to write instead.

    Args:
        extra: kv_connector_extra_config.
        tokens_per_block: by group id.

    Raises:
        ValueError: naming each group's block size and `blocks_per_chunk`.
    """
    if extra.get("block_size") is None or len(set(tokens_per_block.values())) < 2:
        return
    sizes = ", ".join(f"group {group}: {tokens}" for group, tokens in sorted(tokens_per_block.items()))
    raise ValueError(
        f"kv_connector_extra_config: block_size={extra['block_size']!r} is in tokens, but this model's KV cache groups "
        f"have different block sizes ({sizes} tokens); use blocks_per_chunk, which counts GPU blocks of each group"
    )


def tokens_per_block(config: OffloadingConfig) -> dict[int, int]:
    """Block size in tokens of each offloaded group, by group id."""
    return {group.group_id: group.tokens_per_block for group in config.groups}


def _count(value: object, name: str, least: int) -> int:
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} is not an integer of at least {least}")
    return value
