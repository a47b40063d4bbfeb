"""Everything at once, at random: shared prefixes, aborts, resets, preemption, lost slots. A failure is a seed."""

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.v1.request import RequestStatus

from kvdisk.resident import State
from tests.vllm.harness import Harness
from tests.vllm.models import full, layers, state, window

Engine = Callable[..., Harness]
CHUNK = 64
STEPS = 120
MODELS = {
    "full": (layers(full(), full()), 4),
    "full and window": (layers(full(), full(), window(4 * CHUNK), window(4 * CHUNK)), 4),
    "window": (layers(window(3 * CHUNK), window(3 * CHUNK)), 4),
    "full and state": (layers(full(), full(), state(8192), state(8192)), 1),
}


class Soak:
    """One engine, prompts out of a small forest, and whatever can happen to them."""

    def __init__(self, harness: Harness, seed: int) -> None:
        self.harness = harness
        self.rng = random.Random(seed)
        stems = [[self.rng.randrange(3, 500) for _ in range(40 * CHUNK)] for _ in range(3)]
        self.forest = [stem[: self.rng.randrange(CHUNK, 40 * CHUNK)] for stem in stems for _ in range(4)]
        self.running: list[Any] = []
        self.verified = 0

    def turn(self) -> None:
        rng, harness = self.rng, self.harness
        dice = rng.random()
        if dice < 0.3 and len(self.running) < 6:
            tail = [rng.randrange(3, 500) for _ in range(rng.randrange(1, 3 * CHUNK))]
            self.running.append(harness.add(rng.choice(self.forest) + tail, max_tokens=rng.randrange(1, 40)))
        elif dice < 0.36 and self.running:
            victim = rng.choice(self.running)
            harness.scheduler.finish_requests([victim.request_id], RequestStatus.FINISHED_ABORTED)
        elif dice < 0.38:
            with contextlib.suppress(RuntimeError):  # vLLM refuses it while requests load
                harness.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=rng.random() < 0.5)
        elif dice < 0.45 and harness.manager._service is not None:
            harness.manager._service.store.drop_slots()
        elif dice < 0.5 and harness.manager._service is not None:
            harness.manager._service.wait(0.01)  # the disk gets on
        harness.step()
        for request in list(self.running):
            if request.request_id not in harness.scheduler.requests:
                self.running.remove(request)
            elif request.status is RequestStatus.RUNNING:
                right, wrong = harness.verify(request)
                assert wrong == 0
                self.verified += right


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_every_page_is_right_and_the_engine_comes_to_rest(
    engine: Engine, model: str, seed: int
) -> None:
    specs, blocks_per_chunk = MODELS[model]
    extra = {"blocks_per_chunk": blocks_per_chunk, "disk_bytes_to_use": "16MiB", "segment_bytes": "1MiB"}
    memory = {"memory_bytes": 8 << 20, "max_model_len": 4096}
    soak = Soak(engine(specs, extra, **memory), seed)
    for _ in range(STEPS):
        soak.turn()
    soak.harness.run([])
    manager = soak.harness.manager
    store = manager._service.store
    assert soak.verified > 1000
    assert not manager.has_pending_work()
    assert (manager._requests, manager._lookups.held_units, manager._loading, manager._storing) == ({}, 0, {}, {})
    manager._service.drain(5)
    assert {(owner.state, owner.pins) for owner in store.arena.owners()} <= {(State.CLEAN, 0)}
    assert store._unflushed_units == 0
    for _ in range(2):
        (outcome,) = soak.harness.serve(soak.forest[:1])
        soak.harness.drop_gpu_cache()
        store.drop_slots()
    assert outcome.pages_wrong == 0
    # A state is stored only where a step of vLLM's happens to end on a chunk; without one there is no hit to be had.
    assert outcome.cached_tokens > 0 or model == "full and state"
