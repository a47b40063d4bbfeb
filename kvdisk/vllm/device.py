"""The accelerator, as the worker needs it: streams, events, one batched copy, and pinning of the arena.

A small seam, so that the order in which streams wait, copy and record can be tested with recording fakes. The real one
uses vLLM's platform object and vLLM's own batched copy (`swap_blocks_batch`, cuMemcpyBatchAsync on CUDA 12.8 and
later), which takes raw addresses: whoever calls it has checked them, and keeps what they point to alive.

Pinning is an optimisation. It is done in pieces, since one call on a very large range fails whatever memory is free,
and it is all or nothing: a copy may not cross from registered into unregistered memory, nor from one registration into
the next (`PIECE_BYTES`). Where it fails, copies are pageable: right, but slower.
"""

import contextlib
import logging
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister

logger = logging.getLogger("kvdisk")

PIECE_BYTES: Final = 64 << 30  # vLLM's bound too; registrations of 512 GiB fail on CUDA, of 256 GiB on ROCm

Int64s = npt.NDArray[np.int64]


class Device(Protocol):
    """Streams and events are opaque here; events measure time."""

    def stream(self, *, urgent: bool) -> Any:
        """A new stream; an urgent one goes before others where the hardware knows priorities."""

    def current_stream(self) -> Any:
        """The stream that the model computes on."""

    def event(self) -> Any:
        """A new timing event, with record(stream), query(), synchronize() and elapsed_time(later) -> ms."""

    def copy(self, stream: Any, source: Int64s, target: Int64s, sizes: Int64s, *, any_order: bool) -> list[Any]:
        """Start copying sizes[i] bytes from address source[i] to target[i] on `stream`.

        Args:
            stream: made by `stream`.
            source, target, sizes: int64[n].
            any_order: the sources are complete already and nobody writes them, so they may be read at any time. Never
                for live KV cache.

        Returns:
            What must stay referenced until the copies are done.
        """

    def register(self, address: int, size: int) -> bool:
        """Pin host memory; on failure no error stays pending in the driver."""

    def unregister(self, address: int) -> None:
        """Undo one successful `register`."""


class PlatformDevice:
    """The accelerator that vLLM runs on (CUDA, ROCm, XPU)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pointer = np.uint64 if current_platform.is_xpu() else np.int64  # what the platform's copy takes

    def stream(self, *, urgent: bool) -> Any:
        """See Device. 0 is the lowest priority there is, and the default."""
        return current_platform.Stream(device=self._device, priority=-1 if urgent else 0)

    def current_stream(self) -> Any:
        """See Device."""
        return current_platform.current_stream()

    def event(self) -> Any:
        """See Device."""
        return torch.Event(enable_timing=True)

    def copy(self, stream: Any, source: Int64s, target: Int64s, sizes: Int64s, *, any_order: bool) -> list[Any]:
        """See Device."""
        arrays = [torch.from_numpy(array.view(self._pointer)) for array in (source, target, sizes)]
        with current_platform.stream(stream):
            ops.swap_blocks_batch(*arrays, is_src_access_order_any=any_order)
        return arrays

    def register(self, address: int, size: int) -> bool:
        """See Device; vLLM's call drains the driver's error itself."""
        return bool(host_register(address, size))

    def unregister(self, address: int) -> None:
        """See Device."""
        host_unregister(address)


class Pinning:
    """The registration of one range of host memory, in pieces; empty where it failed."""

    def __init__(self, device: Device, address: int, size: int) -> None:
        self._device = device
        self._pieces: list[int] = []
        for start in range(address, address + size, PIECE_BYTES):
            if not device.register(start, min(PIECE_BYTES, address + size - start)):
                logger.warning(
                    "could not pin %.1f GiB of host memory (failed after %.1f GiB): copies between GPU and host will "
                    "be slower. Check the container's memlock limit (ulimit -l) and free memory",
                    size / (1 << 30),
                    (start - address) / (1 << 30),
                )
                self.release()
                break
            self._pieces.append(start)

    @property
    def pinned(self) -> bool:
        """Whether copies from and to the range are asynchronous."""
        return bool(self._pieces)

    def release(self) -> None:
        """Unpin. Only when no copy is running. Idempotent."""
        while self._pieces:
            with contextlib.suppress(RuntimeError):  # a driver in ruins must not keep the other pieces pinned
                self._device.unregister(self._pieces.pop())
