"""A vLLM engine on CPU in a process of its own, told by lines of JSON what to do; see bench/talk.py.

    python bench/ttft_engine.py ENGINE.json

ENGINE.json has the keyword arguments of vllm.LLM. Commands:

    {"op": "generate", "prompts": [[token, ...], ...], "max_tokens": 16}
        -> {"total_s", "ttft_s": [...], "cached": [...], "steps": [[ms, scheduled tokens, copy ms, rest ms], ...]}
    {"op": "forget"}   what was stored goes to disk and leaves host memory; the engine's own prefix cache is dropped
        -> {"stored": chunks that kvdisk has on disk}

A step is one of the engine's. copy ms: of it kvdisk's worker was copying blocks into the arena. rest ms: of it
the engine was in kvdisk's other calls about stores.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DRAIN_S_MAX = 120.0


class Watch:
    """Milliseconds that kvdisk's calls took since the last step began."""

    def __init__(self) -> None:
        self.copy_ms = self.rest_ms = 0.0

    def watch(self, owner: Any, method: str, what: str) -> None:
        """Count the calls of a class's method."""
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*arguments, **named)
            finally:
                setattr(self, what, getattr(self, what) + (time.perf_counter() - start) * 1e3)

        setattr(owner, method, timed)

    def take(self) -> tuple[float, float]:
        """(copy, rest), and begin anew."""
        both = self.copy_ms, self.rest_ms
        self.copy_ms = self.rest_ms = 0.0
        return both


class Engine:
    """The engine and what it is asked."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._watch = Watch()
        extra = arguments.get("kv_transfer_config", {}).get("kv_connector_extra_config", {})
        if extra.get("spec_name") == "KVDiskOffloadingSpec":
            from kvdisk.vllm.manager import KVDiskManager
            from kvdisk.vllm.worker import KVDiskWorker

            self._watch.watch(KVDiskWorker, "submit_store", "copy_ms")
            for method in ("prepare_store", "complete_store", "on_schedule_end", "has_pending_work"):
                self._watch.watch(KVDiskManager, method, "rest_ms")
            self._watch.watch(KVDiskWorker, "get_finished", "rest_ms")
        from vllm import LLM

        self._llm = LLM(**arguments)
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._steps: list[tuple[float, int, float, float]] = []
        self._watch_steps()

    def _watch_steps(self) -> None:
        scheduler = self._core.scheduler
        schedule, step = scheduler.schedule, self._llm.llm_engine.step
        scheduled: list[int] = []

        def counted(*arguments: Any, **named: Any) -> Any:
            output = schedule(*arguments, **named)
            scheduled.append(output.total_num_scheduled_tokens)
            return output

        def timed() -> Any:
            scheduled.clear()
            self._watch.take()
            start = time.perf_counter()
            outputs = step()
            ms = (time.perf_counter() - start) * 1e3
            self._steps.append((ms, sum(scheduled), *self._watch.take()))
            return outputs

        scheduler.schedule = counted
        self._llm.llm_engine.step = timed

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        """Greedy, all prompts at once."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=command["max_tokens"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": tokens} for tokens in command["prompts"]]
        self._steps.clear()
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        return {
            "total_s": time.perf_counter() - start,
            "ttft_s": [output.metrics.first_token_latency for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "steps": self._steps,
        }

    def forget(self, _: dict[str, Any]) -> dict[str, Any]:
        """See the module's docstring."""
        scheduler, deadline = self._core.scheduler, time.monotonic() + DRAIN_S_MAX
        while scheduler.has_requests():
            assert time.monotonic() < deadline, "what was stored does not reach the disk"
            self._llm.llm_engine.engine_core.get_output()
        connector = getattr(scheduler.connector, "connector_scheduler", None)
        manager = getattr(connector, "manager", None)
        tiers = getattr(manager, "secondary_tiers", ())
        for tier in tiers:
            tier.drain_jobs()
        assert self._llm.reset_prefix_cache(reset_connector=bool(tiers)), "requests still hold blocks"
        service = getattr(manager, "_service", None)
        if service is None:
            return {"stored": 0}
        service.store.drop_slots()
        assert not service.store.stats()["chunks_resident"], "the arena is not empty"
        return {"stored": service.store.stats()["chunks_on_disk"]}


def main() -> None:
    """Obey lines on standard input; whatever a library prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = Engine(json.loads(Path(sys.argv[1]).read_text()))
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"generate": engine.generate, "forget": engine.forget}[command["op"]](command)
        except Exception as error:  # told to the parent
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    engine._llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
