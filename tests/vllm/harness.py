"""vLLM's real planner, allocator, Scheduler and OffloadingConnector (both roles), with no model, engine or executor.

    KV cache specs, by hand -> get_kv_cache_configs -> allocate_kv_cache on CPU tensors -> register_kv_caches -> steps

The forward pass is faked: it writes into every page of every block that a step completes bytes that are a function of
(block hash, group, layer). So after a load every page can be checked, padding aside, without a model's tolerance for a
few wrong bytes. A scenario takes a tenth of a second; importing vLLM takes ten.

What must hold: what the fake writes for a block depends on nothing but its place in the prompt, and `verify` never
counts a block that is null, partial or not computed yet.
"""

# ruff: noqa: E402 - vLLM reads its environment when it is imported

import math
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
for _name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS"):
    os.environ.setdefault(_name, "1")

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheLayout, UniformTypeKVCacheSpecs
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

from kvdisk.cli import tiny_models

POISON = 0xEE


class Outcome(NamedTuple):
    """One request at the end of its prefill: tokens it did not have to compute, and its pages as expected or not."""

    cached_tokens: int
    pages_right: int
    pages_wrong: int


class _Layer:
    """A model's attention layer, as far as kvdisk looks at it."""

    def __init__(self, spec: Any, kv_cache: torch.Tensor) -> None:
        self.spec = spec
        self.kv_cache = kv_cache

    def get_kv_cache_spec(self, _: Any) -> Any:
        return self.spec


def plan(config: Any, specs: Sequence[dict[str, Any]], memory_bytes: int) -> list[Any]:
    """vLLM's own plan for the workers that have these layers."""
    sizes = [memory_bytes] * len(specs)
    try:
        from vllm.v1.core import kv_cache_planning as planning  # 0.33
    except ImportError:
        return list(kv_cache_utils.get_kv_cache_configs(config, list(specs), sizes))
    groups = planning.get_global_kv_cache_groups(config, list(specs))
    return list(planning.get_kv_cache_configs(config, list(specs), sizes, groups))


class Harness:
    """One engine of one rank, stepped by hand.

    Args:
        specs: layer name -> vLLM KVCacheSpec.
        kv_transfer_config: as a user gives it, see tests/vllm/config.py.
        directory: for the model's config.json.
        memory_bytes: of the fake GPU's KV cache.
        engine_args: further arguments of vLLM's EngineArgs.
    """

    def __init__(
        self,
        specs: dict[str, Any],
        kv_transfer_config: dict[str, Any],
        directory: Path,
        *,
        memory_bytes: int = 16 << 20,
        layout: str = "LBHNC",
        **engine_args: Any,
    ) -> None:
        tiny_models.write(directory)
        block_size = next(iter(specs.values())).block_size
        self.config = EngineArgs(
            **{
                "model": str(directory / "llama"),
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "dtype": "bfloat16",
                "max_model_len": 2048,
                "max_num_seqs": 8,
                "enforce_eager": True,
                "enable_prefix_caching": True,
                "block_size": block_size,
                "kv_cache_memory_bytes": memory_bytes,
                "kv_transfer_config": kv_transfer_config,
                **engine_args,
            }
        ).create_engine_config()
        self.config.cache_config.kv_cache_layout = layout
        self.config.cache_config.block_size = block_size
        with set_current_vllm_config(self.config):
            self._build(specs, memory_bytes, layout)
        kv_cache_utils.init_none_hash(sha256)
        self.hasher = kv_cache_utils.get_request_block_hasher(self.hash_block_size, sha256)
        self.request_count = 0
        self.expects_off = False  # the test makes kvdisk fail
        self.cached_tokens: dict[str, int] = {}

    def _build(self, specs: dict[str, Any], memory_bytes: int, layout: str) -> None:
        """What EngineCore and the worker do at start, in their order: the worker's role exists before the manager."""
        worker_kv = plan(self.config, [specs], memory_bytes)[0]
        worker_kv.kv_cache_layout = layout
        kv = kv_cache_utils.generate_scheduler_kv_cache_config([worker_kv])
        groups = kv.kv_cache_groups
        cache = self.config.cache_config
        cache.num_gpu_blocks = kv.num_blocks
        cache.block_size = min(g.kv_cache_spec.block_size for g in groups if g.kv_cache_spec.prefix_cacheable)
        scheduler_block, self.hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(kv, self.config)
        alignment = kv_cache_utils.resolve_cache_hit_alignment_tokens(
            kv, self.config, scheduler_block, self.hash_block_size
        )
        for each in (worker_kv, kv):
            each.hash_block_size = self.hash_block_size
            each.cache_hit_alignment_tokens = alignment
        self.kv_cache_config = worker_kv
        block_sizes = [g.kv_cache_spec.block_size for g in worker_kv.kv_cache_groups]
        self.kv_caches = allocate_kv_cache(worker_kv, torch.device("cpu"), KVCacheLayout[layout], block_sizes)
        self.pages = dict(self._page_views())
        layers = self.config.compilation_config.static_forward_context
        for name, spec in specs.items():  # what vLLM's models leave there; kvdisk asks them for their specs
            layers[name] = _Layer(spec, self.kv_caches[name])
        self.connector = OffloadingConnector(self.config, KVConnectorRole.WORKER, worker_kv)
        self.connector.register_kv_caches(self.kv_caches)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=scheduler_block,
            hash_block_size=self.hash_block_size,
            log_stats=True,
        )

    def _page_views(self) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
        """(layer, view of its un-padded pages, one row a block) over the storage itself, whatever vLLM made of it."""
        for group in self.kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            for layer in group.layer_names:
                own = spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
                tensor = self.kv_caches[layer]
                item = tensor.element_size()
                whole = getattr(own, "real_page_size_bytes", own.page_size_bytes)  # of states, without their padding
                page = getattr(own, "unpadded_page_size_bytes", whole)
                raw = torch.tensor([], dtype=torch.uint8).set_(
                    tensor.untyped_storage(),
                    tensor.storage_offset() * item,
                    (self.kv_cache_config.num_blocks, page),
                    (tensor.stride(0) * item, 1),
                )
                yield layer, raw.numpy()

    @property
    def chunk_tokens(self) -> int:
        """Tokens that all groups' hits are multiples of: the coarsest group's chunk, when sizes divide each other."""
        extra = self.config.kv_transfer_config.kv_connector_extra_config
        block_sizes = [group.kv_cache_spec.block_size for group in self.kv_cache_config.kv_cache_groups]
        return math.lcm(*block_sizes) * int(extra["blocks_per_chunk"])

    @property
    def manager(self) -> Any:
        """The spec's OffloadingManager."""
        return self.scheduler.connector.connector_scheduler.manager

    def add(self, tokens: Sequence[int], max_tokens: int = 4) -> Request:
        """Queue a request; it starts with the next step."""
        request = self.request(tokens, max_tokens)
        self.scheduler.add_request(request)
        return request

    def request(self, tokens: Sequence[int], max_tokens: int = 4) -> Request:
        """A request that is not queued anywhere yet."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        sampling.update_from_generation_config({}, None)
        request = Request(
            request_id=str(self.request_count),
            prompt_token_ids=list(tokens),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.request_count += 1
        return request

    def step(self) -> bool:
        """One engine step: schedule, load, "compute", store, report. True if anything was computed."""
        scheduled = self.scheduler.schedule()
        for new in scheduled.scheduled_new_reqs:
            self.cached_tokens[new.req_id] = new.num_computed_tokens
        connector = self.connector
        connector.handle_preemptions(scheduled.kv_connector_metadata)
        connector.bind_connector_metadata(scheduled.kv_connector_metadata)
        connector.start_load_kv(None)
        for request_id, token_count in scheduled.num_scheduled_tokens.items():
            self._forward(self.scheduler.requests[request_id], token_count)
        if scheduled.total_num_scheduled_tokens > 0:
            connector.wait_for_save()
        sent, received = connector.get_finished(scheduled.finished_req_ids)
        meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        ids = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[self._sampled(self.scheduler.requests[request_id]) for request_id in ids],
            kv_connector_output=KVConnectorOutput(
                finished_sending=sent, finished_recving=received, kv_connector_worker_meta=meta
            ),
        )
        self.scheduler.update_from_output(scheduled, output)
        return scheduled.total_num_scheduled_tokens > 0

    def _forward(self, request: Request, token_count: int) -> None:
        """Write the pages of the blocks that these tokens complete."""
        after = request.num_computed_tokens  # schedule() has advanced it already
        for group, layers, end, block, block_hash in self._blocks(request):
            if after - token_count < end <= after:
                for layer in layers:
                    self.pages[layer][block] = self.expected(block_hash, group, layer)

    @staticmethod
    def _sampled(request: Request) -> list[int]:
        """A token, always the same, once the whole prompt is computed."""
        return [7] if request.num_computed_tokens >= request.num_tokens else []

    def _blocks(self, request: Request) -> Iterator[tuple[int, list[str], int, int, bytes]]:
        """(group, its layers, end in tokens, block id, block hash) of blocks that have a hash and are not null."""
        block_ids = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for group, (spec, ids) in enumerate(zip(self.kv_cache_config.kv_cache_groups, block_ids, strict=True)):
            block_size = spec.kv_cache_spec.block_size
            for i, block in enumerate(ids):
                end = (i + 1) * block_size
                last_hash = end // self.hash_block_size - 1
                if block != 0 and last_hash < len(request.block_hashes):
                    yield group, spec.layer_names, end, block, bytes(request.block_hashes[last_hash])

    def expected(self, block_hash: bytes, group: int, layer: str) -> npt.NDArray[np.uint8]:
        """What a page must hold."""
        seed = zlib.crc32(b"%b/%d/%b" % (block_hash, group, layer.encode()))
        return np.frombuffer(np.random.default_rng(seed).bytes(self.pages[layer].shape[1]), dtype=np.uint8)

    def verify(self, request: Request) -> tuple[int, int]:
        """(right, wrong): pages of this running request's computed blocks."""
        right = wrong = 0
        for group, layers, end, block, block_hash in self._blocks(request):
            if end > request.num_computed_tokens:
                continue
            for layer in layers:
                same = np.array_equal(self.pages[layer][block], self.expected(block_hash, group, layer))
                right, wrong = right + same, wrong + (not same)
        return right, wrong

    def run(self, requests: Sequence[Request], timeout_s: float = 30.0) -> list[Outcome]:
        """Step until these requests are finished and the connector has nothing left to do.

        Raises:
            TimeoutError: it never came to rest; what every request was doing is in the message.
        """
        outcomes: dict[str, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        while self.scheduler.has_requests():
            if time.monotonic() > deadline:
                states = {r.request_id: r.status.name for r in self.scheduler.requests.values()}
                raise TimeoutError(f"not at rest after {timeout_s} s: {states or 'the connector still has work'}")
            if not self.step():
                time.sleep(0.001)  # as EngineCore does when a step computed nothing: lets I/O threads run
            for request in requests:
                name = request.request_id
                is_running = name in self.scheduler.requests
                if is_running and name not in outcomes and request.num_computed_tokens >= request.num_prompt_tokens:
                    outcomes[name] = Outcome(self.cached_tokens[name], *self.verify(request))
        return [outcomes[request.request_id] for request in requests]

    def serve(self, prompts: Sequence[Sequence[int]], **kwargs: Any) -> list[Outcome]:
        """`add` and `run` in one."""
        return self.run([self.add(tokens) for tokens in prompts], **kwargs)

    def drop_gpu_cache(self) -> None:
        """Forget the GPU's prefix cache and overwrite every block: what is right later was loaded or computed."""
        assert self.scheduler.reset_prefix_cache(), "requests still hold blocks"
        for pages in self.pages.values():
            pages[:] = POISON

    def close(self) -> None:
        """Shut down both roles, the worker first, as an executor does. An error of ours must not pass unseen."""
        self.connector.shutdown()
        self.scheduler.shutdown()
        assert getattr(self.manager, "is_off", False) == self.expects_off, "see the log"
