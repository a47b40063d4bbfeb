"""KV cache specs of small made-up models, for the harness. 16 tokens a block, bfloat16, 2 KV heads."""

from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

BF16 = torch.bfloat16
BLOCK_TOKENS = 16
BLOCK_BYTES = BLOCK_TOKENS * 2 * 2 * 64 * 2
"""Of one layer with heads of 64."""


def full(head_size: int = 64) -> Any:
    return FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=head_size, dtype=BF16)


def window(tokens: int, head_size: int = 64) -> Any:
    return SlidingWindowSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=head_size, dtype=BF16, sliding_window=tokens
    )


def state(page_bytes: int) -> Any:
    """Mamba in the mode whose states can be cached: one state a block, padded to the attention layers' page."""
    return MambaSpec(
        block_size=BLOCK_TOKENS,
        shapes=((page_bytes // 4,),),
        dtypes=(BF16,),
        page_size_padded=page_bytes,
        mamba_cache_mode="align",
    )


def layers(*specs: Any) -> dict[str, Any]:
    return {f"layers.{i}": spec for i, spec in enumerate(specs)}
