"""One vLLM engine in a process of its own: runs a list of actions and writes what happened as JSON.

    python -m kvdisk.vllm.demo_phase PLAN.json RESULT.json

For `kvdisk demo` and the end-to-end tests, where every engine must be a fresh process: engines do not release all
they hold, and a restart is only a restart if the process is another. The plan is

    {"engine": {keyword arguments of vllm.LLM}, "actions": [ACTION, ...]}

with an ACTION one of

    {"do": "generate", "prompts": [[token, ...], ...], "max_tokens": 16, "together": false}
    {"do": "drain"}                       wait until all that was stored is on disk
    {"do": "reset", "connector": false}   drop the GPU's prefix cache, and with connector also the connector's

The result is a list with one object an action: for generate the requests (tokens, logprobs, cached_tokens, ttft_s),
for all of them `stats` of the manager where it can be reached (an in-process engine) and vLLM's offloading metrics. A
plan that cannot be carried out ends the process with a traceback and no result.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

DRAIN_TIMEOUT_S = 60
METRICS = ("kvdisk", "kv_offload", "external_prefix_cache")


def _generate(llm: Any, action: dict[str, Any]) -> list[dict[str, Any]]:
    """Greedy requests, one after another unless `together`, so that no request waits for another's prefill."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=action.get("max_tokens", 16), ignore_eos=True, detokenize=False, logprobs=4
    )
    prompts = [{"prompt_token_ids": tokens} for tokens in action["prompts"]]
    batches = [prompts] if action.get("together") else [[prompt] for prompt in prompts]
    outputs = [output for batch in batches for output in llm.generate(batch, sampling, use_tqdm=False)]
    return [_request(output) for output in outputs]


def _request(output: Any) -> dict[str, Any]:
    """What there is to know about one finished request."""
    completion = output.outputs[0]
    logprobs = [sorted((token, entry.logprob) for token, entry in step.items()) for step in completion.logprobs]
    assert all(math.isfinite(value) for step in logprobs for _, value in step), "NaN output proves nothing"
    return {
        "tokens": list(completion.token_ids),
        "logprobs": logprobs,
        "cached_tokens": output.num_cached_tokens,
        "ttft_s": output.metrics.first_token_latency if output.metrics else None,
    }


def _in_process_scheduler(llm: Any) -> Any | None:
    """The scheduler of an engine that runs in this process; None if it has one of its own."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    return getattr(core, "scheduler", None)


def _drain(llm: Any) -> None:
    """Return when all that was stored is on disk. An engine in this process is stepped; `generate` stops that earlier.

    One in a process of its own steps by itself, and its counters come with requests' outputs: tiny ones ask for them.
    """
    scheduler = _in_process_scheduler(llm)
    if scheduler is not None:
        while scheduler.has_requests():
            llm.llm_engine.engine_core.get_output()
        return
    tiny = {"do": "generate", "prompts": [[3]], "max_tokens": 1}
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    while True:
        _generate(llm, tiny)
        metrics = _metrics(llm)
        if metrics.get("vllm:kvdisk_chunks_flushed", 0) >= metrics.get("vllm:kvdisk_chunks_stored", 0):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"not everything was flushed within {DRAIN_TIMEOUT_S} s: {metrics}")


def _stats(llm: Any) -> dict[str, Any] | None:
    """The manager's own counters, where it can be reached and keeps any."""
    scheduler = _in_process_scheduler(llm)
    connector = getattr(getattr(scheduler, "connector", None), "connector_scheduler", None)
    stats = getattr(getattr(connector, "manager", None), "stats", None)
    return dict(stats()) if stats else None


def _metrics(llm: Any) -> dict[str, float]:
    """vLLM's Prometheus metrics that concern offloading, summed over their labels."""
    totals: dict[str, float] = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "value", getattr(metric, "sum", None))
        if value is not None and any(part in metric.name for part in METRICS):
            totals[metric.name] = totals.get(metric.name, 0) + value
    return totals


def act(llm: Any, action: dict[str, Any]) -> dict[str, Any]:
    """Carry out one action of a plan.

    Raises:
        ValueError: there is no such action.
    """
    result: dict[str, Any] = {"do": action["do"]}
    if action["do"] == "generate":
        result["requests"] = _generate(llm, action)
    elif action["do"] == "drain":
        _drain(llm)
    elif action["do"] == "reset":
        result["done"] = llm.reset_prefix_cache(reset_connector=action.get("connector", False))
    else:
        raise ValueError(f"unknown action {action['do']!r}: generate, drain or reset")
    result["stats"] = _stats(llm)
    result["metrics"] = _metrics(llm)
    return result


def main(plan_path: str, result_path: str) -> None:
    """Build the engine, run the plan, write the result, shut the engine down."""
    from vllm import LLM

    plan = json.loads(Path(plan_path).read_text())
    llm = LLM(**plan["engine"])
    results = [act(llm, action) for action in plan["actions"]]
    Path(result_path).write_text(json.dumps(results))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
