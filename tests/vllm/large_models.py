"""KV cache specs of large published models, as vLLM's model code makes them of the numbers in fixtures/models/.

Nothing of the models themselves is needed: no weights, and no memory, for their caches are only promised address space.
Block sizes follow vLLM's rules on CUDA; the comments name the code they are from.
"""

import json
import mmap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
)
from vllm.v1.worker import utils

from kvdisk.geometry import Geometry, GroupGeometry, Page

FIXTURES = Path(__file__).parent / "fixtures" / "models"
BF16 = torch.bfloat16

Specs = dict[str, Any]


class LargeModel(NamedTuple):
    """One model, on one rank of `tp_size`.

    name: its fixture. specs: layer -> KVCacheSpec. layout: of the KV cache. tp_size: of the rank. replicated: whether
    all ranks hold the same bytes.
    """

    name: str
    specs: Specs
    layout: str = "LBHNC"
    tp_size: int = 1
    replicated: bool = False


def numbers(name: str) -> dict[str, Any]:
    """Of a fixture."""
    found: dict[str, Any] = json.loads((FIXTURES / f"{name}.json").read_text())["numbers"]
    return found


def _hybrid(attention_layers: dict[str, bool], state: MambaSpec, kv_heads: int, head_size: int) -> Specs:
    """Attention blocks are made as large as a state, in multiples of 16 tokens, and states padded to them.

    See Platform._align_hybrid_block_size; `mamba_cache_mode` "align" is what prefix caching needs.
    """
    token = FullAttentionSpec(block_size=1, num_kv_heads=kv_heads, head_size=head_size, dtype=BF16).page_size_bytes
    block_size = 16 * -(-state.page_size_bytes // (16 * token))
    full = FullAttentionSpec(block_size=block_size, num_kv_heads=kv_heads, head_size=head_size, dtype=BF16)
    padded = MambaSpec(
        shapes=state.shapes,
        dtypes=state.dtypes,
        block_size=block_size,
        page_size_padded=full.page_size_bytes,
        mamba_cache_mode="align",
    )
    return {name: full if is_attention else padded for name, is_attention in attention_layers.items()}


def qwen3_6_35b_a3b(layer_count: int | None = None) -> LargeModel:
    """GDN and attention."""
    n = numbers("qwen3.6-35b-a3b")
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
        1,
        n["linear_num_key_heads"],
        n["linear_num_value_heads"],
        n["linear_key_head_dim"],
        n["linear_value_head_dim"],
        n["linear_conv_kernel_dim"],
    )
    state = MambaSpec(shapes=shapes, dtypes=(BF16, torch.float32), block_size=-1)
    interval = n["full_attention_interval"]
    layers = {f"layers.{i}": i % interval == interval - 1 for i in range(layer_count or n["num_hidden_layers"])}
    return LargeModel("qwen3.6-35b-a3b", _hybrid(layers, state, n["num_key_value_heads"], n["head_dim"]))


def nemotron_3_super(layer_count: int | None = None) -> LargeModel:
    """Mamba-2 and attention; the MoE layers between them have no cache."""
    n = numbers("nemotron-3-super-120b-a12b")
    shapes = MambaStateShapeCalculator.mamba2_state_shape(
        1,
        n["mamba_num_heads"] * n["mamba_head_dim"],
        n["n_groups"],
        n["mamba_num_heads"],
        n["mamba_head_dim"],
        n["ssm_state_size"],
        n["conv_kernel"],
    )
    state = MambaSpec(shapes=shapes, dtypes=(BF16, torch.float32), block_size=-1)
    pattern = n["hybrid_override_pattern"][:layer_count]
    layers = {f"layers.{i}": kind == "*" for i, kind in enumerate(pattern) if kind in "M*"}
    specs = _hybrid(layers, state, n["num_key_value_heads"], n["head_dim"])
    return LargeModel("nemotron-3-super-120b-a12b", specs)


def deepseek_v4_flash(layer_count: int | None = None) -> LargeModel:
    """A window of latents in every layer, compressed latents, an index of them, and the compressors' states: packed.

    See vllm/models/deepseek_v4: DeepseekV4Attention, DeepseekV4IndexerCache, CompressorStateCache, DeepseekV4SWACache.
    """
    n = numbers("deepseek-v4-flash")
    packed = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": 576}
    latent = {**packed, "head_size": n["head_dim"], "dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla",
              "state_content_bytes": 584, "model_version": "deepseek_v4"}  # fmt: skip
    window = SlidingWindowMLASpec(block_size=64, sliding_window=n["sliding_window"], **latent)

    def compressor(ratio: int, head_size: int) -> SlidingWindowMLASpec:
        overlap = 2 if ratio == 4 else 1
        return SlidingWindowMLASpec(
            block_size={4: 4, 128: 8}[ratio],
            head_size=2 * overlap * head_size,
            dtype=torch.float32,
            sliding_window=overlap * ratio,
            **packed,
        )

    specs: Specs = {}
    for i in range(layer_count or n["num_hidden_layers"]):
        specs[f"layers.{i}.swa_cache"] = window
        ratio = n["compress_ratios"][i]
        if ratio:
            specs[f"layers.{i}"] = MLAAttentionSpec(block_size=256, tokens_per_state=ratio, **latent)
            specs[f"layers.{i}.compressor"] = compressor(ratio, n["head_dim"])
        if ratio == 4:
            index = n["index_head_dim"]
            specs[f"layers.{i}.indexer.k_cache"] = MLAAttentionSpec(
                block_size=256, tokens_per_state=4, head_size=index + 4, dtype=torch.uint8, **packed
            )
            specs[f"layers.{i}.indexer.compressor"] = compressor(4, index)
    return LargeModel("deepseek-v4-flash", specs, layout="BLHNC")


def gemma_4_31b(layer_count: int | None = None) -> LargeModel:
    """Five windows to one full attention, of other heads."""
    n = numbers("gemma-4-31b")
    full = FullAttentionSpec(
        block_size=16, num_kv_heads=n["num_global_key_value_heads"], head_size=n["global_head_dim"], dtype=BF16
    )
    window = SlidingWindowSpec(
        block_size=16,
        num_kv_heads=n["num_key_value_heads"],
        head_size=n["head_dim"],
        dtype=BF16,
        sliding_window=n["sliding_window"],
    )
    pattern = n["sliding_window_pattern"]
    count = layer_count or n["num_hidden_layers"]
    return LargeModel("gemma-4-31b", {f"layers.{i}": window if (i + 1) % pattern else full for i in range(count)})


def _index(head_dim: int) -> MLAAttentionSpec:
    """An indexer's keys: fp8 and a float32 scale a token. See DeepseekV32IndexerCache."""
    return MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=head_dim + 4,
        dtype=torch.uint8,
        cache_role=SparseCacheRole.INDEXER,
    )


def glm_5_2(layer_count: int | None = None) -> LargeModel:
    """A latent in every layer and an index in every fourth: two page sizes in one group, the same on all ranks.

    See DeepseekV2MLAAttention (which layers have an index) and DeepseekV32IndexerCache.
    """
    n = numbers("glm-5.2")
    frequency, offset = n["index_topk_freq"], n["index_skip_topk_offset"]
    specs: Specs = {}
    for i in range(layer_count or n["num_hidden_layers"]):
        has_index = max(i - offset + 1, 0) % frequency == 0
        specs[f"layers.{i}.attn"] = MLAAttentionSpec(
            block_size=64,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=n["kv_lora_rank"] + n["qk_rope_head_dim"],
            dtype=torch.uint8,
            cache_dtype_str="fp8_ds_mla",
            state_content_bytes=656,
            is_index_group_leader=has_index,
        )
        if has_index:
            specs[f"layers.{i}.indexer.k_cache"] = _index(n["index_head_dim"])
    return LargeModel("glm-5.2", specs, tp_size=8, replicated=True)


def llama_3_1_8b(layer_count: int | None = None) -> LargeModel:
    """Full attention, the plain case."""
    n = numbers("llama-3.1-8b")
    full = FullAttentionSpec(block_size=16, num_kv_heads=n["num_key_value_heads"], head_size=n["head_dim"], dtype=BF16)
    return LargeModel("llama-3.1-8b", {f"layers.{i}": full for i in range(layer_count or n["num_hidden_layers"])})


def gpt_oss_20b(layer_count: int | None = None) -> LargeModel:
    """Windows and full attention in turn, alike in size."""
    n = numbers("gpt-oss-20b")
    sizes = {"block_size": 16, "num_kv_heads": n["num_key_value_heads"], "head_size": n["head_dim"], "dtype": BF16}
    kinds = [SlidingWindowSpec(sliding_window=n["sliding_window"], **sizes), FullAttentionSpec(**sizes)]
    return LargeModel(
        "gpt-oss-20b", {f"layers.{i}": kinds[i % 2] for i in range(layer_count or n["num_hidden_layers"])}
    )


def deepseek_v3(layer_count: int | None = None) -> LargeModel:
    """One latent in every layer, the same on all ranks."""
    n = numbers("deepseek-v3")
    latent = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=n["kv_lora_rank"] + n["qk_rope_head_dim"],
        dtype=BF16,
    )
    specs = {f"layers.{i}": latent for i in range(layer_count or n["num_hidden_layers"])}
    return LargeModel("deepseek-v3", specs, tp_size=8, replicated=True)


def deepseek_v3_2(layer_count: int | None = None) -> LargeModel:
    """As DeepSeek-V3, and an index in every layer: two page sizes in one group."""
    n = numbers("deepseek-v3.2")
    specs = deepseek_v3(layer_count).specs
    index = _index(n["index_head_dim"])
    specs = {name: replace(latent, is_index_group_leader=True) for name, latent in specs.items()}
    specs |= {f"{name}.indexer.k_cache": index for name in specs}
    return LargeModel("deepseek-v3.2", specs, tp_size=8, replicated=True)


def llama_4_scout(layer_count: int | None = None) -> LargeModel:
    """Three layers of chunked local attention to one of full attention."""
    n = numbers("llama-4-scout")
    sizes = {"block_size": 16, "num_kv_heads": n["num_key_value_heads"], "head_size": n["head_dim"], "dtype": BF16}
    full, interval = FullAttentionSpec(**sizes), n["no_rope_layer_interval"]
    local = ChunkedLocalAttentionSpec(attention_chunk_size=n["attention_chunk_size"], **sizes)
    count = layer_count or n["num_hidden_layers"]
    return LargeModel("llama-4-scout", {f"layers.{i}": local if (i + 1) % interval else full for i in range(count)})


LARGE_MODELS: dict[str, Callable[..., LargeModel]] = {
    "llama-3.1-8b": llama_3_1_8b,
    "gpt-oss-20b": gpt_oss_20b,
    "deepseek-v3": deepseek_v3,
    "deepseek-v3.2": deepseek_v3_2,
    "llama-4-scout": llama_4_scout,
    "qwen3.6-35b-a3b": qwen3_6_35b_a3b,
    "nemotron-3-super-120b-a12b": nemotron_3_super,
    "deepseek-v4-flash": deepseek_v4_flash,
    "gemma-4-31b": gemma_4_31b,
    "glm-5.2": glm_5_2,
}


GDN_STATE = 3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 4
MAMBA_STATE = 3 * (128 * 64 + 2 * 8 * 128) * 2 + 128 * 64 * 128 * 4
LATENT_V4 = 584
STATES_4 = 4 * 2 * 2 * 512 * 4  # a block of C4 states: kv and score of two overlapping windows, float32
PLANNED: dict[str, list[tuple[int, int, int]]] = {
    "llama-3.1-8b": [(16, 32, 32 * 16 * 2 * 8 * 128 * 2)],
    "gpt-oss-20b": [(16, 12, 12 * 16 * 2 * 8 * 64 * 2)] * 2,
    "deepseek-v3": [(64, 61, 61 * 64 * 576 * 2)],
    "deepseek-v3.2": [(64, 122, 61 * 64 * 576 * 2 + 61 * 64 * 132)],
    "llama-4-scout": [(16, 12, 12 * 16 * 2 * 8 * 128 * 2)] * 4,
    "qwen3.6-35b-a3b": [(1056, 10, 10 * GDN_STATE)] * 3 + [(1056, 10, 10 * 1056 * 2 * 2 * 256 * 2)],
    "nemotron-3-super-120b-a12b": [(4160, 8, 8 * MAMBA_STATE)] * 5 + [(4160, 8, 8 * 4160 * 2 * 2 * 128 * 2)],
    "deepseek-v4-flash": [
        (64, 22, 22 * 64 * LATENT_V4),  # the windows of 43 layers, in two groups
        (64, 21, 21 * 64 * LATENT_V4),
        (256, 62, 21 * 64 * LATENT_V4 + 21 * 64 * 132 + 20 * 2 * LATENT_V4),  # C4, its index, C128
        (4, 42, 21 * STATES_4 + 21 * STATES_4 // 4),
        (8, 20, 20 * 8 * 2 * 512 * 4),
    ],
    "gemma-4-31b": [(16, 10, 10 * 16 * 2 * 16 * 256 * 2)] * 5 + [(32, 10, 10 * 32 * 2 * 4 * 512 * 2)],
    "glm-5.2": [(64, 99, 78 * 64 * 656 + 21 * 64 * 132)],
}
"""What vLLM must plan, by arithmetic on the published numbers. Per group: tokens, pages and live bytes of a block."""


def planned_geometry(name: str, blocks_per_chunk: int = 1) -> Geometry:
    """The geometry of PLANNED; the group's pages as one, since only their sum matters for sizes."""
    groups = tuple(
        GroupGeometry(index, tokens, (Page(0, block_bytes),))
        for index, (tokens, _, block_bytes) in enumerate(PLANNED[name])
    )
    return Geometry(0, 1, blocks_per_chunk, groups)


def promised_kv_cache(*arguments: Any) -> dict[str, torch.Tensor]:
    """vLLM's `allocate_kv_cache`, with memory that is there only where it is touched; it reads as zeros.

    In place of tests.vllm.harness.allocate_kv_cache, for caches larger than the machine.
    """

    def promised(size: int, **_: Any) -> torch.Tensor:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.int8)

    with mock.patch.object(utils.torch, "zeros", promised):
        caches: dict[str, torch.Tensor] = utils.allocate_kv_cache(*arguments)
    return caches
