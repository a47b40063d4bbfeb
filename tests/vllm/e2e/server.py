"""vLLM engines one after another in one process: importing vLLM takes 10 s, an engine of a tiny model 2.

    python -m tests.vllm.e2e.server FD [SHIM ...]

Reads one JSON order a line from standard input, answers each with one line to the descriptor FD:

    {"do": "start", "engine": {keyword arguments of vllm.LLM}}      -> what vLLM planned: [group, ...]
    {"do": "stop"}                                                   -> null; with it goes all that was in host memory
    an action of kvdisk/vllm/demo_phase.py, on the running engine    -> its result

An order that fails ends the process with a traceback in its log. SHIMs are functions of shims.py.
"""

import gc
import json
import os
import sys
from typing import Any

from kvdisk.vllm.demo_phase import act
from tests.vllm.e2e import shims


def planned(llm: Any) -> list[dict[str, Any]]:
    """The KV cache groups, in their order, as vLLM's scheduler knows them.

    A block's bytes are what it takes of the allocation, whichever group has it.
    """
    cache = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    block_bytes = max(tensor.size for tensor in cache.kv_cache_tensors) // cache.num_blocks
    return [
        {
            "kind": type(group.kv_cache_spec).__name__,
            "block_tokens": group.kv_cache_spec.block_size,
            "layers": len(group.layer_names),
            "block_bytes": block_bytes,
        }
        for group in cache.kv_cache_groups
    ]


def _tidy() -> None:
    gc.collect()
    gc.freeze()  # vLLM collects garbage five times at a start: what is left by now is none


def main(result_fd: int) -> None:
    """Carry out orders until standard input ends."""
    from vllm import LLM

    llm: Any = None
    _tidy()
    with os.fdopen(result_fd, "w") as results:
        for line in sys.stdin:
            order = json.loads(line)
            answer: Any = None
            if order["do"] == "start":
                llm = LLM(**order["engine"])
                answer = planned(llm)
            elif order["do"] == "stop":
                llm.llm_engine.engine_core.shutdown()
                llm = None
                _tidy()
            else:
                answer = act(llm, order)
            results.write(json.dumps(answer) + "\n")
            results.flush()


if __name__ == "__main__":
    for name in ["inspect_models_here", *sys.argv[2:]]:
        getattr(shims, name)()
    main(int(sys.argv[1]))
