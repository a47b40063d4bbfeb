"""What a tier remembers of running requests: how their chunks follow each other, and what they do not get or keep.

What must hold:
- A chunk that a request found no slot for is a miss to that request from then on, or it would wait for it for ever.
- What follows a chunk that was not stored can never be a hit, so it is not stored either, until that chunk is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.kv_offload.tiering.base import TransferJob

from kvdisk.vllm.lookups import group_of
from kvdisk.vllm.requests import Groups


class Chunk(NamedTuple):
    """One chunk of a job. position, parent: see Resident. end: of the prefix without which it is of no use."""

    key: bytes
    row: int
    group: int
    position: int
    end: int
    parent: bytes


class Cut(NamedTuple):
    """The first chunk of a request that was not stored, as far as it is known."""

    end: int
    key: bytes


@dataclass(slots=True, eq=False)
class Request:
    """One request; its jobs may outlive it.

    Attributes:
        chain: (group, position) -> key. refused: chunks on disk that it found no slot for. cut: stores end before it.
        is_running: vLLM has not said that it has finished.
    """

    is_running: bool = True
    chain: dict[tuple[int, int], bytes] = field(default_factory=dict)
    refused: set[bytes] = field(default_factory=set)
    cut: Cut | None = None

    def lose(self, end: int, key: bytes) -> None:
        """A chunk of it was not stored."""
        if self.cut is None or end < self.cut.end:
            self.cut = Cut(end, key)

    def is_cut_before(self, chunk: Chunk) -> bool:
        """Whether the chunk follows one that was not stored."""
        return self.cut is not None and chunk.end >= self.cut.end

    def forget_losses(self) -> None:
        """After a reset it may try again."""
        self.refused.clear()
        self.cut = None


class Requests:
    """The running requests.

    Args:
        groups: the KV cache groups.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._running: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, req_id: str) -> None:
        """A new request; an id that is used again starts anew."""
        self._running[req_id] = Request()

    def end(self, req_id: str) -> Request | None:
        """Forget a request."""
        request = self._running.pop(req_id, None)
        if request is not None:
            request.is_running = False
        return request

    def of(self, req_id: str) -> Request:
        """The request; one that is unknown has finished: a load may come later than that."""
        return self._running.get(req_id) or Request(is_running=False)

    def is_refused(self, key: bytes, req_id: str) -> bool:
        """Whether the request has found no slot for the chunk before."""
        request = self._running.get(req_id)
        return request is not None and key in request.refused

    def forget_losses(self) -> None:
        """After a reset all may try again."""
        for request in self._running.values():
            request.forget_losses()

    def chunks_of(self, job: TransferJob, request: Request) -> tuple[list[Chunk], list[bytes]]:
        """The job's chunks, parents before what needs them; and the keys of groups that the configuration has not."""
        groups, context = self._groups, job.req_context
        known: list[tuple[bytes, int, int, int]] = []
        lost: list[bytes] = []
        for key, row in zip(job.keys, job.chunk_ids, strict=True):
            group = group_of(key)
            if group not in groups.units:
                lost.append(key)
                continue
            position = context.get_offload_key_position(key)
            if position is not None:
                request.chain[group, position] = key
            known.append((key, int(row), group, position or 0))
        return self._in_order(known, request), lost

    def _in_order(self, known: Sequence[tuple[bytes, int, int, int]], request: Request) -> list[Chunk]:
        groups = self._groups
        chunks = [
            Chunk(
                key,
                row,
                group,
                position,
                groups.end_of(group, position),
                groups.parent_of(key, group, position, request.chain),
            )
            for key, row, group, position in known
        ]
        return sorted(chunks, key=lambda chunk: (chunk.end, chunk.group in groups.windows, chunk.position))
