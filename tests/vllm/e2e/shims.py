"""What vLLM's CPU build needs to run a model that it could run: changed at run time in a test's own process.

None of it touches KV caches or what offloads them.
"""

import collections
import enum
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

TRITON_INTERPRETED = {"TRITON_INTERPRET": "1"}
"""The environment that `deepseek_v4` needs before anything imports Triton."""


def inspect_models_here() -> None:
    """vLLM looks at the first engine's model class in another process, for 13 s, to keep its own free of CUDA."""
    registry = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()  # type: ignore[attr-defined]


class _Anything:
    """Whatever is asked of it, until it is called."""

    def __getattr__(self, name: str) -> "_Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("there is no torchvision here")


class _Interpolation(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _TorchvisionFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_ours = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None

    def exec_module(self, module: types.ModuleType) -> None:
        def stand_in(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Interpolation if name == "InterpolationMode" else _Anything()

        module.__dict__.update(__version__="0.28.0", __getattr__=stand_in)


def torchvision() -> None:
    """An importable torchvision, which Qwen3.5's module asks for also where there are no images. PyPI's needs CUDA."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_TorchvisionFinder())


def deepseek_v4() -> None:
    """DeepSeek-V4's kernels have CPU versions, but for a few that prepare metadata and are Triton's, which has no CPU
    backend on PyPI: its own interpreter runs those. And vLLM 0.32's CPU metadata builder leaves out keys that are read.
    """
    assert os.environ.get("TRITON_INTERPRET") == "1", "has to be set before Triton is imported"
    import triton
    from vllm.model_executor.warmup.jit_warmup_triton_helper import VllmTritonJitKernel
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder

    for name in (
        "vllm.v1.attention.ops.metadata",
        "vllm.v1.attention.backends.mla.sparse_swa",
        "vllm.v1.attention.backends.mla.indexer",
        "vllm.v1.attention.backends.mla.compressor_utils",
    ):
        _interpret(importlib.import_module(name), triton, VllmTritonJitKernel)
    DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = lambda *_: collections.defaultdict(lambda: None)


def _interpret(module: types.ModuleType, triton: Any, kernel_class: type) -> None:
    """Give a module's kernels, which vLLM left as plain functions, Triton's decorator after all."""
    compiled: dict[Callable[..., Any], Any] = {}

    def jit(function: Callable[..., Any]) -> Any:
        return compiled.setdefault(function, compiled.get(function) or triton.jit(function))

    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, types.FunctionType):
            if inspect.getsource(value).lstrip().startswith("@triton.jit"):
                setattr(module, name, jit(value))
        elif inspect.isclass(value) and issubclass(value, kernel_class):
            kernel = vars(value).get("kernel")
            function = getattr(kernel, "__func__", kernel)
            if isinstance(function, types.FunctionType):
                value.kernel = staticmethod(jit(function))  # type: ignore[attr-defined]
    for name, value in (("tl", triton.language), ("triton", triton)):
        if hasattr(module, name):
            setattr(module, name, value)
