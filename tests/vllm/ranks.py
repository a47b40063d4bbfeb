"""The harness with several ranks in one process: tensor parallel ranks hold other heads of the same layers (or, where
vLLM replicates, the same bytes), pipeline parallel ones hold other layers.

Every rank has its own config, caches, connector and share, as in a worker process of its own; vLLM's
KVOutputAggregator joins what they report. What one rank writes differs from what another writes, unless
the layout is replicated, so a chunk loaded into the wrong rank shows.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

from tests.vllm.harness import POISON, Harness, _Layer, plan


class Rank:
    """One worker."""

    def __init__(self, config: Any, kv_cache_config: Any, kv_caches: dict[str, torch.Tensor], label: str) -> None:
        self.config = config
        self.kv_cache_config = kv_cache_config
        self.kv_caches = kv_caches
        self.label = label  # goes into the bytes that it writes
        self.pages: dict[str, Any] = {}
        self.connector: Any = None


class RanksHarness(Harness):
    """See the module's docstring.

    Args:
        specs: of each rank, layer name -> KVCacheSpec.
        tp_size, pp_size: their product is the number of ranks.
        replicated: whether all ranks hold the same bytes; vLLM decides it, the test says what it expects.
        more: as for Harness.
    """

    def __init__(
        self,
        specs: Sequence[dict[str, Any]],
        kv_transfer_config: dict[str, Any],
        directory: Path,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
        replicated: bool = False,
        **more: Any,
    ) -> None:
        assert len(specs) == tp_size * pp_size
        self.specs = specs
        self.replicated = replicated
        self.ranks: list[Rank] = []
        super().__init__(
            specs[0],
            kv_transfer_config,
            directory,
            tensor_parallel_size=tp_size,
            pipeline_parallel_size=pp_size,
            distributed_executor_backend="mp",
            **more,
        )

    def _build(self, specs: dict[str, Any], memory_bytes: int, layout: str) -> None:
        worker_kvs = plan(self.config, self.specs, memory_bytes)
        for worker_kv in worker_kvs:
            worker_kv.kv_cache_layout = layout
        kv = kv_cache_utils.generate_scheduler_kv_cache_config(worker_kvs)
        cache = self.config.cache_config
        cache.num_gpu_blocks = kv.num_blocks
        cache.block_size = min(g.kv_cache_spec.block_size for g in kv.kv_cache_groups)
        scheduler_block, self.hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(kv, self.config)
        alignment = kv_cache_utils.resolve_cache_hit_alignment_tokens(
            kv, self.config, scheduler_block, self.hash_block_size
        )
        for each in (*worker_kvs, kv):
            each.hash_block_size = self.hash_block_size
            each.cache_hit_alignment_tokens = alignment
        for number, (worker_kv, own) in enumerate(zip(worker_kvs, self.specs, strict=True)):
            self.ranks.append(self._build_rank(number, worker_kv, own, layout))
        self.kv_cache_config = kv
        self.aggregator = KVOutputAggregator.from_connector(self.ranks[0].connector, len(self.ranks))
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=scheduler_block,
            hash_block_size=self.hash_block_size,
            log_stats=True,
        )

    def _build_rank(self, number: int, worker_kv: Any, specs: dict[str, Any], layout: str) -> Rank:
        config = copy.copy(self.config)
        config.parallel_config = copy.copy(self.config.parallel_config)
        config.parallel_config.rank = number
        config.compilation_config = copy.copy(self.config.compilation_config)
        block_sizes = [g.kv_cache_spec.block_size for g in worker_kv.kv_cache_groups]
        caches = allocate_kv_cache(worker_kv, torch.device("cpu"), KVCacheLayout[layout], block_sizes)
        config.compilation_config.static_forward_context = {
            name: _Layer(spec, caches[name]) for name, spec in specs.items()
        }
        rank = Rank(config, worker_kv, caches, "" if self.replicated else f"rank {number} ")
        # `_page_views` looks at one rank's caches: the one being built.
        self.kv_cache_config, self.kv_caches = worker_kv, caches
        rank.pages = dict(self._page_views())
        with set_current_vllm_config(config):
            rank.connector = OffloadingConnector(config, KVConnectorRole.WORKER, worker_kv)
            rank.connector.register_kv_caches(caches)
        return rank

    def step(self) -> bool:
        """As Harness.step, on every rank."""
        scheduled = self.scheduler.schedule()
        for new in scheduled.scheduled_new_reqs:
            self.cached_tokens[new.req_id] = new.num_computed_tokens
        outputs = [self._step_rank(rank, scheduled) for rank in self.ranks]
        output = self.aggregator.aggregate(outputs)
        self.scheduler.update_from_output(scheduled, output)
        return scheduled.total_num_scheduled_tokens > 0

    def _step_rank(self, rank: Rank, scheduled: Any) -> ModelRunnerOutput:
        connector = rank.connector
        # In a process of its own it would get a copy.
        meta = copy.deepcopy(scheduled.kv_connector_metadata)
        connector.handle_preemptions(meta)
        connector.bind_connector_metadata(meta)
        connector.start_load_kv(None)
        for request_id, token_count in scheduled.num_scheduled_tokens.items():
            self._forward_rank(rank, self.scheduler.requests[request_id], token_count)
        if scheduled.total_num_scheduled_tokens > 0:
            connector.wait_for_save()
        sent, received = connector.get_finished(scheduled.finished_req_ids)
        worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        ids = list(scheduled.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[self._sampled(self.scheduler.requests[request_id]) for request_id in ids],
            kv_connector_output=KVConnectorOutput(
                finished_sending=sent, finished_recving=received, kv_connector_worker_meta=worker_meta
            ),
        )

    def _forward_rank(self, rank: Rank, request: Request, token_count: int) -> None:
        after = request.num_computed_tokens
        for group, _, end, block, block_hash in self._blocks(request):
            if after - token_count < end <= after:
                for layer in rank.kv_cache_config.kv_cache_groups[group].layer_names:
                    rank.pages[layer][block] = self._expected_of(rank, block_hash, group, layer)

    def _expected_of(self, rank: Rank, block_hash: bytes, group: int, layer: str) -> Any:
        self.pages = rank.pages  # `expected` asks for the page's size
        return self.expected(rank.label.encode() + block_hash, group, layer)

    def verify(self, request: Request) -> tuple[int, int]:
        """(right, wrong): pages of this request's computed blocks on all ranks."""
        right = wrong = 0
        for group, _, end, block, block_hash in self._blocks(request):
            if end > request.num_computed_tokens:
                continue
            for rank in self.ranks:
                for layer in rank.kv_cache_config.kv_cache_groups[group].layer_names:
                    same = (rank.pages[layer][block] == self._expected_of(rank, block_hash, group, layer)).all()
                    right, wrong = right + bool(same), wrong + (not same)
        return right, wrong

    def drop_gpu_cache(self) -> None:
        """As Harness.drop_gpu_cache, on every rank."""
        assert self.scheduler.reset_prefix_cache(), "requests still hold blocks"
        for rank in self.ranks:
            for pages in rank.pages.values():
                pages[:] = POISON

    def close(self) -> None:
        """Shut down all workers, then the scheduler."""
        for rank in self.ranks:
            rank.connector.shutdown()
        self.scheduler.shutdown()
