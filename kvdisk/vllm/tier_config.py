"""The configuration of a `KVDiskTier`: one entry of `secondary_tiers`, checked before anything is allocated.

vLLM takes its own keys (`type`, `module_path`, `backpressure`) out before it hands the rest over.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.kv_offload.base import Locality
from vllm.v1.kv_offload.config import OffloadingConfig

from kvdisk.options import Options, parse_bool, parse_options, reject_unknown
from kvdisk.units import MIB, UNIT_BYTES, format_size, round_up
from kvdisk.vllm.requests import Groups
from kvdisk.vllm.version import windows_in_chunks

ARENA_BYTES_DEFAULT = 512 * MIB
ARENA_ROWS_DEFAULT = 16
ARENA_ROWS_MIN = 8
SEGMENT_ROWS_MIN = 4

STORE_KEYS = tuple(field.name for field in fields(Options))
TIER_KEYS = ("reset_keeps_disk", "locality", "enable_kv_events")


@dataclass(frozen=True)
class TierConfig:
    """What a user configured.

    options: of the store; its arena is what bytes pass through on their way between the primary tier and the disk.
    reset_keeps_disk: `reset_cache` does not make the data on disk stale, as it does in vLLM's own tiers; with changed
        weights that serves stale KV, so it has to be asked for. locality: of the disk, for vLLM's filters.
    enable_kv_events: report what enters and leaves the disk.
    """

    options: Options
    reset_keeps_disk: bool
    locality: Locality
    enable_kv_events: bool


def parse_tier_config(config: Mapping[str, Any], row_bytes: int) -> TierConfig:
    """The configuration in `config`.

    Args:
        config: the tier's entry of `secondary_tiers`, without vLLM's own keys.
        row_bytes: of a chunk in the primary tier.

    Raises:
        ValueError: a key that is unknown, missing or impossible, or chunks that do not fit; with the remedy.
    """
    try:
        reject_unknown(config, [*STORE_KEYS, *TIER_KEYS])
        row = round_up(row_bytes, UNIT_BYTES)
        arena = max(ARENA_BYTES_DEFAULT, ARENA_ROWS_DEFAULT * row)
        values = {key: config[key] for key in STORE_KEYS if config.get(key) is not None}
        options = parse_options({"cpu_bytes_to_use": arena, **values})
        _check_sizes(options, row)
        locality = config.get("locality") or Locality.LOCAL.value
        if locality not in [each.value for each in Locality]:
            raise ValueError(f"locality={locality!r} is none of {', '.join(each.value for each in Locality)}")
        return TierConfig(
            options,
            parse_bool(config.get("reset_keeps_disk", False), "reset_keeps_disk"),
            Locality(locality),
            parse_bool(config.get("enable_kv_events", False), "enable_kv_events"),
        )
    except ValueError as error:
        raise ValueError(f"secondary_tiers, KVDiskTier: {error}") from None


def _check_sizes(options: Options, row: int) -> None:
    what = f"a chunk of all KV cache groups and ranks has {format_size(row)}"
    if row * SEGMENT_ROWS_MIN > options.segment_bytes:
        needed = format_size(round_up(SEGMENT_ROWS_MIN * row, MIB))
        raise ValueError(f"{what}; set segment_bytes to at least {needed}, or lower blocks_per_chunk")
    if row * ARENA_ROWS_MIN > options.cpu_bytes_to_use:
        needed = format_size(ARENA_ROWS_MIN * row)
        raise ValueError(f"{what}; set the tier's cpu_bytes_to_use to at least {needed}, or lower blocks_per_chunk")


def describe_groups(config: OffloadingConfig, row_bytes: int, options: Options) -> Groups:
    """The KV cache groups: a row holds a chunk of any of them."""
    tokens = {group.group_id: group.tokens_per_block * config.cache.blocks_per_chunk for group in config.groups}
    units = dict.fromkeys(tokens, round_up(row_bytes, UNIT_BYTES) // UNIT_BYTES)
    windows = windows_in_chunks(config)
    if windows is None:
        # Which of several groups are windows, 0.32 tells nobody here. A chunk without a parent is kept as long as its
        # segment; a wrong parent would take it away too early.
        windows = dict.fromkeys(tokens, 1) if len(tokens) > 1 else {}
    return Groups(tokens, units, windows, options.cpu_bytes_to_use // UNIT_BYTES)
