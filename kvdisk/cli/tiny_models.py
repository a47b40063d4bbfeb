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


# Three layers of gated delta net, then one of full attention, all with experts.
_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [_LINEAR] * 3 + [_FULL],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
}

_LATENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
}

_GEMMA_4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [_SLIDING] * 5 + [_FULL],
    "sliding_window": 256,
    "global_head_dim": 128,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "rope_parameters": {
        _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}

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
    # The full layers have another head size and head count.
    "gemma4": _config("Gemma4ForCausalLM", "gemma4_text", **_GEMMA_4),
    # The last two layers have no cache of their own: they read that of an earlier layer of their kind. And the full
    # layers keep twice as much of a token, so that vLLM gives their groups and the others' blocks of different lengths.
    "gemma4_kv_sharing": _config(
        "Gemma4ForCausalLM",
        "gemma4_text",
        **{
            **_GEMMA_4,
            "num_hidden_layers": 8,
            "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL],
            "num_kv_shared_layers": 2,
            "num_global_key_value_heads": 2,
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
        **_DELTA_NET,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        mlp_only_layers=[],
        rope_theta=1e6,
        partial_rotary_factor=0.25,
    ),
    "qwen3_5_moe": _config(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        **_DELTA_NET,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    ),
    # Mamba-2 states beside one layer of attention. Without experts: their kernel has no CPU version of this activation.
    "nemotron_h": _config(
        "NemotronHForCausalLM",
        "nemotron_h",
        num_hidden_layers=6,
        layers_block_type=["mamba", "mlp", "mamba", "attention", "mamba", "mlp"],
        hybrid_override_pattern="M-M*M-",
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=32,
        n_groups=2,
        conv_kernel=4,
        expand=2,
        chunk_size=64,
        mlp_hidden_act="relu2",
        layer_norm_epsilon=1e-5,
        norm_eps=1e-5,
    ),
    # Multi-head latent attention: one latent vector a token instead of heads.
    "deepseek_v3": _config("DeepseekV3ForCausalLM", "deepseek_v3", **_LATENT, rope_theta=1e4),
    "glm4_moe_lite": _config(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        **{**_LATENT, "qk_nope_head_dim": 192, "v_head_dim": 256},
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        partial_rotary_factor=1.0,
    ),
    # Attention within chunks of 768 tokens in three layers of four, and over everything in the fourth.
    "llama4": _config(
        "Llama4ForCausalLM",
        "llama4_text",
        num_hidden_layers=4,
        attention_chunk_size=768,
        intermediate_size_mlp=256,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        no_rope_layers=[1, 1, 1, 0],
        layer_types=["chunked_attention"] * 3 + [_FULL],
        use_qk_norm=True,
        attn_temperature_tuning=False,
        rope_theta=5e5,
        hidden_act="silu",
        tie_word_embeddings=False,
    ),
    # Five groups that share packed blocks of 4 to 256 tokens: windows, compressed pasts, and the compressors' states.
    "deepseek_v4": _config(
        "DeepseekV4ForCausalLM",
        "deepseek_v4",
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=128,
        moe_intermediate_size=64,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=6,
        scoring_func="sqrtsoftplus",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        compress_ratios=[0, 4, 128, 4],
        compress_rope_theta=160000.0,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        num_hash_layers=0,
        swiglu_limit=10.0,
        sliding_window=128,
        o_groups=2,
        o_lora_rank=64,
        index_n_heads=8,
        index_head_dim=128,
        index_topk=512,
        num_nextn_predict_layers=0,
        rope_theta=1e4,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        hidden_act="silu",
    ),
}

ENGINE: dict[str, dict[str, Any]] = {
    name: {"attention_backend": "CPU_MLA"} for name in ("deepseek_v3", "glm4_moe_lite")
}
"""Arguments of vllm.LLM that a model needs. On a CPU with AMX vLLM takes other kernels, with blocks of 128 tokens, not
16: what a run looks like must not depend on that."""


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
