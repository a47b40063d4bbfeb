"""What kvdisk costs and gives vLLM's scheduler: deferred requests, lookups, prefixes larger than the arena.

    python bench/scale_vllm.py --root DIR

vLLM's own Scheduler and OffloadingConnector run, without a model (tests/vllm/harness.py). kvdisk is compared with
managers that answer from a constant: what those cost is vLLM's own part. Prints one line of JSON.
"""

# ruff: noqa: E402 - the harness is found only after sys.path was extended

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for the harness

from vllm.v1.kv_offload.base import LookupResult, OffloadingManager, RequestOffloadingContext

from tests.vllm.config import connector
from tests.vllm.desk import Desk
from tests.vllm.harness import Harness
from tests.vllm.models import BLOCK_BYTES, BLOCK_TOKENS, full, layers, state, window

REQUESTS, KEYS = 32, 3600
STEPS = 30
LOOKUP_KEYS, LOOKUP_ROUNDS = 1000, 7
ARENA_BYTES = 4 << 20
CHUNK_BLOCKS = 4
PREFIX_MODELS = {
    "full": (layers(full(), full()), CHUNK_BLOCKS),
    "full + window 8": (layers(full(), full(), *[window(8 * CHUNK_BLOCKS * BLOCK_TOKENS)] * 2), CHUNK_BLOCKS),
    "full + Mamba": (layers(full(), full(), *[state(BLOCK_BYTES)] * 2), 1),
}


class Constant(OffloadingManager):
    """Knows nothing. `answers` are given to a request's first key and to all others, step after step."""

    def __init__(self, first: LookupResult, others: LookupResult) -> None:
        self._answers = (first, others)
        self._asked: set[str] = set()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        first = req_context.req_id not in self._asked
        self._asked.add(req_context.req_id)
        return self._answers[0] if first else self._answers[1]

    def on_schedule_end(self, context: Any) -> None:
        self._asked.clear()

    def prepare_load(self, keys: Any, req_context: Any) -> Any:
        raise AssertionError("nothing is ever loaded")

    def prepare_store(self, keys: Any, req_context: Any) -> Any:
        return None

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()


@contextmanager
def engine(directory: Path, specs: Any, extra: dict[str, Any], **kwargs: Any) -> Iterator[Harness]:
    """An engine over DIRECTORY/root."""
    config = connector(directory / "root", **{"cpu_bytes_to_use": ARENA_BYTES, "segment_bytes": "4MiB", **extra})
    long = {"max_model_len": 16384, "hf_overrides": {"max_position_embeddings": 65536}}
    sizes = {"memory_bytes": 48 << 20, "max_num_batched_tokens": 256}
    harness = Harness(specs, config, directory / "models", **{**long, **sizes, **kwargs})
    try:
        yield harness
    finally:
        harness.close()


def deferred(directory: Path) -> dict[str, list[float]]:
    """ms of CPU that `schedule()` takes with REQUESTS waiting for a disk that does not answer, by manager, by step."""
    with engine(directory, layers(full()), {"blocks_per_chunk": 1, "cpu_bytes_to_use": "48MiB"}) as harness:
        desk = Desk(harness)
        desk.manager.__dict__.pop("lookup")  # the desk counts; here it would only cost
        tokens = [(i * 7919) % 490 + 3 for i in range(KEYS * BLOCK_TOKENS + 1)]
        writer = desk.request(tokens)
        desk.put(writer, desk.keys(writer))
        for _ in range(REQUESTS):
            harness.add(tokens)
        managers = {
            "kvdisk": desk.manager,
            "shortest": Constant(LookupResult.RETRY, LookupResult.MISS),
            "every key pending": Constant(LookupResult.HIT_PENDING, LookupResult.HIT_PENDING),
        }
        found: dict[str, list[float]] = {}
        desk.store.take_commands = lambda now: []  # nothing reaches the disk
        found["kvdisk, first scan"] = [_step(harness)]
        for _ in range(STEPS):
            for name, manager in managers.items():
                if name == "every key pending" and len(found.get(name, ())) >= 5:
                    continue
                desk.connector.manager = manager
                found.setdefault(name, []).append(_step(harness))
        desk.connector.manager = desk.manager
        del desk.store.take_commands
        assert len(harness.scheduler.requests) == REQUESTS, "somebody was not deferred"
        return found


def _step(harness: Harness) -> float:
    gc.collect()
    start = time.thread_time()
    harness.scheduler.schedule()
    return (time.thread_time() - start) * 1e3


def lookups(directory: Path) -> dict[str, list[float]]:
    """us a key of `manager.lookup`, by round: misses, first hits (which pin), hits asked again, and an empty loop."""
    found: dict[str, list[float]] = {}
    with engine(directory, layers(full()), {"blocks_per_chunk": 1, "cpu_bytes_to_use": "48MiB"}) as harness:
        desk = Desk(harness)
        desk.manager.__dict__.pop("lookup")  # the desk's own, which counts
        lookup = desk.manager.lookup
        for round_ in range(LOOKUP_ROUNDS):
            tokens = [(i * 7919 + round_) % 490 + 3 for i in range(LOOKUP_KEYS * BLOCK_TOKENS + 1)]
            absent, writer = desk.request(tokens), desk.request(tokens)
            _time_keys(found, "miss", lookup, desk, absent)
            desk.put(writer, desk.keys(writer), in_memory=True)
            present = desk.request(tokens)
            _time_keys(found, "first hit", lookup, desk, present)
            desk.end_step()
            _time_keys(found, "hit again", lookup, desk, present)
            _time_keys(found, "an empty call", lambda *_: None, desk, present)
            desk.manager._lookups.release(desk.manager._requests[present.request_id])
    return found


def _time_keys(
    found: dict[str, list[float]], name: str, lookup: Callable[[Any, Any], Any], desk: Desk, request: Any
) -> None:
    keys, context = desk.keys(request), desk.status(request).req_context
    gc.collect()
    start = time.thread_time()
    for key in keys:
        lookup(key, context)
    found.setdefault(name, []).append((time.thread_time() - start) / len(keys) * 1e6)


def prefixes(directory: Path) -> dict[str, float]:
    """Of a prefix of twice the arena that is on disk: bytes loaded over bytes of the arena, by model."""
    found = {}
    for number, (name, (specs, blocks_per_chunk)) in enumerate(PREFIX_MODELS.items()):
        place = directory / str(number)
        chunk_tokens = CHUNK_BLOCKS * BLOCK_TOKENS
        chunks = 2 * ARENA_BYTES // (CHUNK_BLOCKS * 2 * BLOCK_BYTES)
        tokens = [(i * 104729) % 490 + 3 for i in range(chunks * chunk_tokens + 1)]
        with engine(place, specs, {"blocks_per_chunk": blocks_per_chunk}) as harness:
            for end in range(8, chunks + 1, 8):  # a real GPU takes its time, too
                harness.serve([tokens[: end * chunk_tokens + 1]])
        with engine(place, specs, {"blocks_per_chunk": blocks_per_chunk}) as harness:
            (outcome,) = harness.serve([tokens])
            assert outcome.pages_wrong == 0 < outcome.pages_right
            loaded = harness.manager.counters["chunks_loaded"] * blocks_per_chunk * 2 * BLOCK_BYTES
            found[name] = loaded / ARENA_BYTES
    return found


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvdisk-scale-", dir=arguments.root) as folder:
        directory = Path(folder)
        found = {part.__name__: part(directory / part.__name__) for part in (deferred, lookups, prefixes)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
