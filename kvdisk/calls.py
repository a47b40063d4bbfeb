"""Calls that block on a file system, made from an event loop: each in a daemon thread, each with a deadline.

A file system that hangs (a network mount, a device in error recovery) holds its caller for ever, and a thread that
hangs in a pool takes the pool with it, and the end of the process. These calls are rare, one or two a segment, so
each gets a thread of its own.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from kvdisk.io.transfer import TransferLateError

T = TypeVar("T")


class FileCall(Protocol):
    """How the data plane makes its blocking calls: `call_in_thread`, or a stand-in that needs no thread."""

    async def __call__(
        self, work: Callable[[], T], timeout_s: float, what: str, discard: Callable[[T], object] | None = None
    ) -> T: ...


async def call_in_thread(
    work: Callable[[], T], timeout_s: float, what: str, discard: Callable[[T], object] | None = None
) -> T:
    """The result of `work()`, or its exception.

    Args:
        work: blocks; runs on a daemon thread.
        timeout_s: from now.
        what: for the message.
        discard: called on the loop with a result that came too late.

    Raises:
        TransferLateError: the deadline passed; `settled` resolves when `work` has ended all the same.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def end(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(end, result, error)
        except RuntimeError:  # the loop was closed meanwhile; nobody waits any more
            pass

    threading.Thread(target=run, name=f"kvdisk-{what}", daemon=True).start()
    done, _ = await asyncio.wait([future], timeout=timeout_s)
    if done:
        return future.result()
    settled: asyncio.Future[None] = loop.create_future()

    def settle(ended: "asyncio.Future[T]") -> None:
        if ended.exception() is None and discard is not None:
            discard(ended.result())
        settled.set_result(None)

    future.add_done_callback(settle)
    raise TransferLateError(f"{what} did not end within {timeout_s:g} s", settled)
