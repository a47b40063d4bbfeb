"""What decides a KV cache's bytes beyond page sizes, as far as only a worker can see it.

vLLM's `OffloadingConfig`, which both sides get, lacks the model's revision, overrides, the draft model, dtypes of
states and the real layout of the layers. On the worker `get_worker` runs inside `set_current_vllm_config`, so all of
it is at hand. It is collected once, as flat JSON scalars for `Geometry.facts`, and travels to the manager in the
share.

The rule: when in doubt a fact is in. A fact too many costs a cold cache after a change of settings, a fact too few
hands a model the KV of another. What cannot be read here (vLLM renames attributes between releases) is "unknown",
never an error.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Final

import torch
import vllm
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches
from vllm.v1.kv_offload.config import OffloadingConfig

from kvdisk.geometry import INFO_FACT, RANK_FACT, Fact, Geometry, GroupGeometry, Page

UNKNOWN: Final = "unknown"

# Name of the fact, path from VllmConfig. A None on the way is the fact "none" (no draft model, no LoRA).
_PATHS: Final = {
    "dtype": "model_config.dtype",
    "quantization": "model_config.quantization",
    "quantization_config": "model_config.quantization_config",
    "hf_overrides": "model_config.hf_overrides",
    "model_impl": "model_config.model_impl",
    "model_class_overrides": "model_config.model_class_overrides",
    "disable_sliding_window": "model_config.disable_sliding_window",
    "cache_dtype": "cache_config.cache_dtype",
    "cache_dtype_skip_layers": "cache_config.kv_cache_dtype_skip_layers",
    "mamba_cache_dtype": "cache_config.mamba_cache_dtype",
    "mamba_ssm_cache_dtype": "cache_config.mamba_ssm_cache_dtype",
    "mamba_cache_mode": "cache_config.mamba_cache_mode",
    "indexer_kv_dtype": "attention_config.indexer_kv_dtype",
    "v2_model_runner": "use_v2_model_runner",
    "draft_method": "speculative_config.method",
    "draft_model": "speculative_config.model",
    INFO_FACT + "executor_backend": "parallel_config.distributed_executor_backend",
    INFO_FACT + "nodes": "parallel_config.nnodes_within_dp",
    INFO_FACT + "max_loras": "lora_config.max_loras",
    # Independent data-parallel engines are told a size of 1; this keeps what the user asked for.
    INFO_FACT + "dp_size": "parallel_config.elastic_ep_max_dp_size",
}
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SNAPSHOT: Final = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")


def collect_facts(config: OffloadingConfig, kv_caches: CanonicalKVCaches) -> dict[str, Fact]:
    """The facts of this rank; call it inside `get_worker`. Never raises for what vLLM does not show.

    Args:
        config: what vLLM gave the spec.
        kv_caches: as vLLM registered them (before `live_kv_caches`).
    """
    facts = model_facts(config, get_current_vllm_config_or_none())
    layers = forward_context()
    facts[RANK_FACT + "layers"] = "\n".join(_describe_layers(config, layers, kv_caches))
    return facts


def model_facts(config: OffloadingConfig, vllm_config: Any) -> dict[str, Fact]:
    """The facts that do not take a worker; never raises for what vLLM does not show.

    Args:
        config: what vLLM gave the spec.
        vllm_config: vLLM's whole configuration, or None: what only that shows is then "none".
    """
    parallel = config.parallel
    facts: dict[str, Fact] = {
        "model": config.model.name,
        "kv_dtype": config.model.dtype,
        "kv_cache_layout": config.kv_cache_layout,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "tp_size": parallel.tp_size,
        "pp_size": parallel.pp_size,
        "pcp_size": parallel.pcp_size,
        "dcp_size": parallel.dcp_size,
        "replicated": config.replicated_layout,
        # Kernels may change what they write within pages of one size between releases, not within one.
        "vllm": ".".join(str(getattr(vllm, "__version__", UNKNOWN)).split(".")[:2]),
    }
    for name, path in _PATHS.items():
        facts[name] = _scalar(_follow(vllm_config, path))
    model = _follow(vllm_config, "model_config")
    facts.update(_identity(model, ""))
    draft = _follow(vllm_config, "speculative_config.draft_model_config")
    if draft not in (None, UNKNOWN):
        facts.update(_identity(draft, "draft_"))
    facts["hf_config"] = _hf_config_digest(model)
    load_format = _scalar(_follow(vllm_config, "load_config.load_format"))
    facts["load_format"] = load_format
    if load_format not in ("auto", "safetensors", "hf"):  # weights may be made up, from a seed
        facts["seed"] = _scalar(_follow(model, "seed"))
    return facts


def forward_context() -> Mapping[str, Any]:
    """vLLM's layers by name, with their cache views; empty where they cannot be reached."""
    layers = _follow(get_current_vllm_config_or_none(), "compilation_config.static_forward_context")
    return layers if isinstance(layers, Mapping) else {}


def build_geometry(config: OffloadingConfig, kv_caches: CanonicalKVCaches, facts: Mapping[str, Fact]) -> Geometry:
    """This rank's geometry: the pages are `kv_caches`' references, in their order, each place of a group once.

    Layers of one group may share a place (KV sharing between layers); the longest page there is stored.

    Raises:
        ValueError: config and caches have different numbers of groups, or sizes that cannot be.
    """
    refs = kv_caches.group_data_refs
    if len(refs) != len(config.groups):
        raise ValueError(f"{len(refs)} groups of KV caches were registered, the config has {len(config.groups)}")
    groups = tuple(
        GroupGeometry(
            group.group_id,
            group.tokens_per_block,
            _pages(group_refs),
        )
        for group, group_refs in zip(config.groups, refs, strict=True)
    )
    return Geometry(
        config.parallel.rank, config.parallel.world_size, config.cache.blocks_per_chunk, groups, dict(facts)
    )


def _pages(refs: Iterable[CanonicalKVCacheRef]) -> tuple[Page, ...]:
    longest: dict[int, int] = {}
    for ref in refs:
        longest[ref.tensor_idx] = max(ref.page_size_bytes, longest.get(ref.tensor_idx, 0))
    return tuple(Page(*item) for item in longest.items())


def _identity(model: Any, prefix: str) -> dict[str, Fact]:
    """Which weights: the resolved commit where there is one, and a fingerprint of the files where they are local."""
    name = _follow(model, "model")
    weights = _follow(model, "model_weights")
    place = str(weights) if weights not in (None, UNKNOWN, "") else str(name)
    commit = _follow(model, "hf_config._commit_hash")
    if commit in (None, UNKNOWN):
        snapshot = _SNAPSHOT.search(os.path.realpath(place)) or _SNAPSHOT.search(place)
        commit = snapshot[1] if snapshot else _follow(model, "revision")
    return {prefix + "revision": _scalar(commit), prefix + "weights": weights_fingerprint(place)}


def weights_fingerprint(place: str) -> str:
    """SHA-256 (hex) over names, sizes and mtimes of the weight files at `place`, a directory or a file.

    "remote" if there is none of that name here. Contents are not read: that would take minutes at every start.
    """
    try:
        paths = [place] if os.path.isfile(place) else [entry.path for entry in os.scandir(place)]
        lines = []
        # config.json is not among them: it is in by its content, see _hf_config_digest.
        for path in sorted(path for path in paths if path.endswith(_WEIGHTS)):
            status = os.stat(path)
            lines.append(f"{os.path.basename(path)} {status.st_size} {status.st_mtime_ns}\n")
    except OSError:
        return "remote"
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _hf_config_digest(model: Any) -> str:
    """SHA-256 over the model's effective configuration, overrides applied; not over where it came from."""
    to_dict = getattr(_follow(model, "hf_config"), "to_dict", None)
    if to_dict is None:
        return UNKNOWN
    try:
        plain = to_dict()
        plain = {k: v for k, v in plain.items() if k not in ("_name_or_path", "transformers_version", "_commit_hash")}
        # Some rotary embeddings choose their factors by the longest sequence the server allows.
        if "longrope" in json.dumps(plain, default=_plain):
            plain["max_model_len"] = _scalar(_follow(model, "max_model_len"))
        return hashlib.sha256(_json(plain).encode()).hexdigest()
    except Exception:  # third-party configuration classes do as they please
        return UNKNOWN


def _describe_layers(
    config: OffloadingConfig, layers: Mapping[str, Any], kv_caches: CanonicalKVCaches
) -> Iterator[str]:
    """One line a layer: how its cache lies within a block. No address, and nothing that depends on memory size."""
    tensors = [tensor.tensor for tensor in kv_caches.tensors]
    for tensor in tensors:
        yield f"tensor row {tensor.shape[1]} stride {tensor.stride(0)}"
    num_blocks = tensors[0].shape[0] if tensors else 0
    for group in config.groups:
        for name in group.layer_names:
            layer = layers.get(name)
            cache = getattr(layer, "kv_cache", None)
            views = cache if isinstance(cache, (list, tuple)) else [cache]
            shown = [_describe_view(view, num_blocks) for view in views if isinstance(view, torch.Tensor)]
            kind = f"{type(layer).__name__}/{type(getattr(layer, 'impl', None)).__name__}" if layer else UNKNOWN
            yield f"{group.group_id} {name} {kind} {'; '.join(shown) or UNKNOWN}"


def _describe_view(view: torch.Tensor, num_blocks: int) -> str:
    """`dtype (sizes) (strides) offset`, with the number of blocks, which depends on free memory, written as B.

    Offset and strides that count whole blocks are taken modulo the stride of a block.
    """
    sizes, strides = list(view.shape), list(view.stride())
    candidates = [dim for dim, size in enumerate(sizes) if num_blocks and size and size % num_blocks == 0]
    if not candidates:
        return f"{view.dtype} {sizes} {strides}"
    block_dim = max(candidates, key=lambda dim: strides[dim])
    kernel_blocks = sizes[block_dim] // num_blocks
    block_stride = strides[block_dim] * kernel_blocks
    whole = block_stride * num_blocks
    shown_sizes = [str(size) for size in sizes]
    shown_sizes[block_dim] = "B" if kernel_blocks == 1 else f"{kernel_blocks}B"
    shown_strides = [f"{stride // num_blocks}B" if whole and stride >= whole else str(stride) for stride in strides]
    offset = view.storage_offset() % block_stride if block_stride else view.storage_offset()
    return f"{view.dtype} ({', '.join(shown_sizes)}) ({', '.join(shown_strides)}) +{offset}"


def _follow(thing: Any, path: str) -> Any:
    """`thing.a.b.c`; None if one on the way is None, UNKNOWN if one cannot be had."""
    for name in path.split("."):
        if thing is None:
            return None
        try:
            thing = getattr(thing, name)
        except Exception:  # a property of vLLM's may raise anything
            return UNKNOWN
    return thing


def _scalar(value: Any) -> Fact:
    if value is None:
        return "none"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    try:
        return _json(value)
    except Exception:  # circular, or with keys that JSON cannot order
        return UNKNOWN


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    """A stable stand-in for what JSON lacks: never the default repr, whose address changes with every run."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, torch.dtype):
        return str(value)
    if hasattr(value, "__qualname__"):  # classes and functions
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return {type(value).__qualname__: vars(value)} if hasattr(value, "__dict__") else str(value)
