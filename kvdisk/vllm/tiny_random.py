"""`load_format="tiny_random"`: random weights under which greedy output really depends on the KV cache.

vLLM's own dummy weights are so small that a model repeats one token whatever its cache holds; a test that compares
outputs then passes with a cache of zeros. Here attention and MLP outputs dominate the residual stream. For the demo and
the tests, which load this as a vLLM plugin (kvdisk/cli/tiny_models.py); nothing else imports it.

A weight is a function of its parameter's name and shape alone: every process, and every run, gets the same model.
"""

import math
import zlib
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader


def _fill(name: str, weight: Any) -> None:
    """Give one parameter its values, by what its name says it is."""
    if not torch.is_floating_point(weight) or weight.device.type == "meta" or weight.dim() == 0:
        return
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
    lower = name.lower()
    leaf = lower.rpartition(".")[2]
    if "norm" in lower and weight.dim() == 1:
        values = 1.0 + 0.1 * values
    elif leaf == "a":  # Mamba-2 keeps A = -exp(A_log): it has to be negative, or the state grows without bound
        values = -(0.5 + 3.0 * torch.rand(weight.shape, generator=generator))
    elif "a_log" in leaf:
        values = values.uniform_(0.0, 2.0, generator=generator).log1p()
    elif weight.dim() == 1 or "embed" in lower:  # small, or the token itself would outweigh all it attends to
        values = 0.1 * values
    else:
        values = values * (1.6 / math.sqrt(weight.shape[-1]))
    weight.data.copy_(values.to(weight.dtype))


class TinyRandomLoader(BaseModelLoader):
    """Fills parameters, and the buffers that a checkpoint would have held."""

    def download_model(self, model_config: Any) -> None:
        """Nothing to fetch."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fill every weight of `model` in place; tables that the model computes itself (rotary) are left alone."""
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _fill(name, parameter)
            for name, buffer in model.named_buffers():
                module, _, leaf = name.rpartition(".")
                is_computed = leaf in model.get_submodule(module)._non_persistent_buffers_set
                if not is_computed and "cos_sin" not in name and "inv_freq" not in name:
                    _fill(name, buffer)


def register() -> None:
    """Plugin entry point; vLLM calls it in every process, and may call it more than once."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

    if "tiny_random" not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader("tiny_random")(TinyRandomLoader)
