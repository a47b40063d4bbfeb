"""Data-parallel engines behind one front end, as `vllm serve` runs them; each request goes to the engine that is meant.

    python -m tests.vllm.e2e.data_parallel PLAN.json RESULT.json

The plan is {"engine": {keyword arguments of AsyncEngineArgs}, "prompts": [[[token, ...], ...], ...]}, by engine.
The result has, in the same order, {"tokens", "cached_tokens"} of each. Returns when all that was stored is on disk.
"""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_TOKENS = 16
DRAIN_TIMEOUT_S = 60


async def _ask(llm: Any, tokens: Sequence[int], rank: int, name: str) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    stream = llm.generate({"prompt_token_ids": tokens}, sampling, name, data_parallel_rank=rank)
    last = [output async for output in stream][-1]
    return {"tokens": list(last.outputs[0].token_ids), "cached_tokens": last.num_cached_tokens}


async def _drain(llm: Any, ranks: int) -> None:
    """Counters come with the outputs of requests: tiny ones ask for them."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    for number in itertools.count():
        for rank in range(ranks):
            await _ask(llm, [3], rank, f"drain-{rank}-{number}")
        counts: dict[str, float] = {}
        for metric in get_metrics_snapshot():
            counts[metric.name] = counts.get(metric.name, 0) + getattr(metric, "value", 0)
        if counts.get("vllm:kvdisk_chunks_flushed", 0) >= counts.get("vllm:kvdisk_chunks_stored", 0):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"not everything was flushed within {DRAIN_TIMEOUT_S} s: {counts}")


async def run(plan: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Both engines at the same time, one request at a time each."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**plan["engine"]))

    async def engine(rank: int, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        return [await _ask(llm, tokens, rank, f"{rank}-{number}") for number, tokens in enumerate(prompts)]

    try:
        results = await asyncio.gather(*(engine(rank, prompts) for rank, prompts in enumerate(plan["prompts"])))
        await _drain(llm, len(results))
        return results
    finally:
        llm.shutdown()


def main(plan_path: str, result_path: str) -> None:
    """Run the plan in a file, write the result to another."""
    plan = json.loads(Path(plan_path).read_text())
    Path(result_path).write_text(json.dumps(asyncio.run(run(plan))))


if __name__ == "__main__":
    main(*sys.argv[1:])
