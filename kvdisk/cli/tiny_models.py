"""Tiny models for the demo and the tests: a config.json each, no weights, no tokenizer, but vLLM's real model classes.

Each family is here for the shape of its KV cache. Weights come from `load_format="tiny_random"`, which
kvdisk/vllm/tiny_random.py registers; worker processes find it as a vLLM plugin. The plugin's entry point is written
next to the models and reaches a process by PYTHONPATH, since one in kvdisk's own package metadata would be loaded into
every vLLM of every user.

Knows nothing of torch or vLLM.
"""

import json
import os
from pathlib import Path
from typing import Any

PLUGIN = "kvdisk_tiny_random"
LOAD_FORMAT = "tiny_random"
VOCABULARY = 512

_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"

_COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def _config(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **_COMMON, **fields}


CONFIGS: dict[str, dict[str, Any]] = {
    # One group of full attention: the plain case.
    "llama": _config(
        "LlamaForCausalLM", "llama", num_hidden_layers=3, rope_theta=1e4, hidden_act="silu", tie_word_embeddings=False
    ),
    # Five sliding-window layers to one full, alike in size: several groups with equal pages.
    "gemma3": _config(
        "Gemma3ForCausalLM",
        "gemma3_text",
        num_hidden_layers=6,
        layer_types=[_SLIDING] * 5 + [_FULL],
        sliding_window=256,
        query_pre_attn_scalar=64,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    ),
    # The full layers have another head size and head count: groups whose pages differ.
    "gemma4": _config(
        "Gemma4ForCausalLM",
        "gemma4_text",
        num_hidden_layers=6,
        layer_types=[_SLIDING] * 5 + [_FULL],
        sliding_window=256,
        global_head_dim=128,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCABULARY,
        num_kv_shared_layers=0,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        rope_parameters={
            _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    ),
    # Alternating window and full attention with sinks, mixture of experts.
    "gpt_oss": _config(
        "GptOssForCausalLM",
        "gpt_oss",
        intermediate_size=128,
        num_hidden_layers=4,
        layer_types=[_SLIDING, _FULL] * 2,
        sliding_window=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_theta=150000.0,
        swiglu_limit=7.0,
        hidden_act="silu",
    ),
    # Gated delta net: a recurrent state instead of keys and values, whose page is padded to the attention page.
    "qwen3_next": _config(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        num_hidden_layers=4,
        layer_types=[_LINEAR] * 3 + [_FULL],
        linear_conv_kernel_dim=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        decoder_sparse_step=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[],
        rope_theta=1e6,
        partial_rotary_factor=0.25,
        hidden_act="silu",
    ),
    # Multi-head latent attention: one latent vector a token instead of heads.
    "deepseek_v3": _config(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        num_hidden_layers=3,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=64,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        moe_layer_freq=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        num_nextn_predict_layers=0,
        rope_theta=1e4,
        hidden_act="silu",
    ),
}


def write(directory: Path, **changes: Any) -> None:
    """Write every model as `directory`/NAME/config.json, and the plugin's entry point.

    Args:
        directory: created if missing; existing files are replaced.
        changes: fields to set in every config, for example a larger hidden_size.

    Raises:
        OSError: the directory cannot be written.
    """
    for name, config in CONFIGS.items():
        folder = directory / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**config, **changes}, indent=1))
    plugin = directory / f"{PLUGIN}-1.0.dist-info"
    plugin.mkdir(exist_ok=True)
    (plugin / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 1.0\n")
    (plugin / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{PLUGIN} = kvdisk.vllm.tiny_random:register\n")


def environment(directory: Path) -> dict[str, str]:
    """What a process needs in its environment to run the models that `write` put into `directory`, offline.

    Returns:
        Variables to lay over the caller's environment: those that make vLLM find the loader, keep it off the network
        and quiet. PYTHONPATH starts with `directory` and keeps what it had.
    """
    path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH", "")]))
    return {
        "PYTHONPATH": path,
        "VLLM_PLUGINS": PLUGIN,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
