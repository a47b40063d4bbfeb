"""The scheduler's side of vLLM's OffloadingConnector without its Scheduler: its lookups, loads and hooks, by hand.

For scenarios that need thousands of chunks or many waiting requests: chunks are put on disk through the store, with
bytes that nobody looks at, and nothing is computed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.outputs import KVConnectorOutput

from kvdisk.resident import State
from kvdisk.vllm.lookups import group_of
from tests.vllm.harness import Harness

DISK_S_MAX = 20.0


class Desk:
    """See the module's docstring. `answers` counts what the manager said since it was last cleared."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.connector = harness.scheduler.connector.connector_scheduler
        self.manager = harness.manager
        self.answers: dict[LookupResult, int] = {}
        self._count_answers()
        self.connector.on_new_request(harness.request([1]))  # the first one opens the store

    def _count_answers(self) -> None:
        lookup = self.manager.lookup

        def counted(key: Any, req_context: Any) -> LookupResult:
            answer = lookup(key, req_context)
            self.answers[answer] = self.answers.get(answer, 0) + 1
            return answer

        self.manager.lookup = counted

    @property
    def store(self) -> Any:
        return self.manager._service.store

    @property
    def lookup_count(self) -> int:
        return sum(self.answers.values())

    def request(self, tokens: Sequence[int]) -> Any:
        """A request that is waiting from now on."""
        request = self.harness.request(tokens)
        self.connector.on_new_request(request)
        self.status(request).update_offload_keys()
        return request

    def status(self, request: Any) -> Any:
        return self.connector._req_status[request.request_id]

    def keys(self, request: Any, group: int = 0) -> list[bytes]:
        """Its keys of one group, in prefix order."""
        return list(self.status(request).group_states[group].offload_keys)

    def put(self, request: Any, keys: Sequence[bytes], *, in_memory: bool = False) -> None:
        """Have these chunks on disk, and in memory or not."""
        context, store = self.status(request).req_context, self.store
        parent = b""
        for key in keys:
            group = group_of(key)
            while True:
                position = context.get_offload_key_position(key)
                slot = store.reserve(key, group, store.parts_of(group), position, parent)
                if slot is not None:
                    break
                self.settle()
            store.commit([slot])
            parent = key
        self.settle()
        if not in_memory:
            store.drop_slots()

    def settle(self) -> None:
        """Let the disk finish everything."""
        assert self.manager._service.drain(DISK_S_MAX)

    def ask(self, request: Any, computed: int = 0) -> int | None:
        """Tokens beyond `computed` that can be loaded; None: not decided yet."""
        hit, _ = self.connector.get_num_new_matched_tokens(request, computed)
        return hit

    def resolve(self, request: Any, steps_max: int = 50) -> int:
        """Ask step after step, with a disk that is done by the next step, until it is decided."""
        for _ in range(steps_max):
            hit = self.ask(request)
            if hit is not None:
                return hit
            self.end_step()
            self.settle()
        raise AssertionError(f"not decided in {steps_max} steps")

    def load(self, request: Any, tokens: int) -> list[bytes]:
        """Begin loading, as after an allocation of GPU blocks; the keys that vLLM wants."""
        wanted: list[bytes] = []
        prepare = self.manager.prepare_load

        def noted(keys: Any, req_context: Any) -> Any:
            wanted.extend(keys)
            return prepare(keys, req_context)

        self.manager.prepare_load = noted
        blocks = []
        for group in self.connector.config.kv_group_configs:
            count = -(-tokens // group.tokens_per_block)
            reach = group.sliding_window_size_in_chunks
            first = 0 if reach is None else max(0, count - reach * self.connector.config.blocks_per_chunk)
            blocks.append([SimpleNamespace(block_id=i + 1, is_null=i < first, block_hash=None) for i in range(count)])
        self.connector.update_state_after_alloc(request, SimpleNamespace(blocks=blocks), tokens)
        self.manager.prepare_load = prepare
        return wanted

    def end_step(self, finished: Sequence[Any] = (), *, loads_end: bool = True) -> None:
        """The end of `schedule()`; then all loads of the step end, or not."""
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = {request.request_id for request in finished}
        meta = self.connector.build_connector_meta(output)
        jobs = dict.fromkeys(meta.load_jobs, 1)
        if jobs and loads_end:
            done = OffloadingWorkerMetadata(completed_jobs=jobs)
            self.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=done))

    def pinned(self) -> int:
        """Slots that somebody keeps from reuse."""
        return sum(1 for owner in self.store.arena.owners() if owner.pins or owner.state is not State.CLEAN)

    @contextmanager
    def held_disk(self) -> Iterator[None]:
        """Commands are not begun before the end of this block."""
        service = self.manager._service
        plane, held, begin = service.plane.backend.plane, [], service.plane.backend.plane.start
        plane.start = held.extend
        try:
            yield
        finally:
            plane.start = begin
            service.pump()
            service.plane.loop.call_soon_threadsafe(lambda: begin(held))


def finished(request: Any) -> Any:
    """The request, ended by its client."""
    from vllm.v1.request import RequestStatus

    request.status = RequestStatus.FINISHED_ABORTED
    return request
