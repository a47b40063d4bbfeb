"""One tiny model over one root directory, engine after engine: what the end-to-end tests share."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvdisk.cli.engine_process import run_engine
from kvdisk.cli.tiny_models import VOCABULARY
from tests.vllm.config import connector

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
DRAIN = {"do": "drain"}
RESET = {"do": "reset"}
RESET_CONNECTOR = {"do": "reset", "connector": True}


def generate(prompt_tokens: int, *, count: int = 2, **options: Any) -> dict[str, Any]:
    """The same `count` prompts every time."""
    rng = random.Random(prompt_tokens)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(prompt_tokens)] for _ in range(count)]
    return {"do": "generate", "prompts": prompts, **options}


@dataclass
class Site:
    """A model, its configuration, and the directory that outlives its engines.

    Attributes:
        directory: for plans, results and logs.
        root: kvdisk's root_dir.
        extra: keys of the connector's configuration.
    """

    model: str
    models_dir: Path
    directory: Path
    root: Path
    extra: Mapping[str, Any] = field(default_factory=dict)
    starts: int = 0

    def start(
        self,
        actions: Sequence[Mapping[str, Any]],
        environment: Mapping[str, str] = IN_PROCESS,
        **engine: Any,
    ) -> list[dict[str, Any]]:
        """A new engine in a new process; what each action reports."""
        self.starts += 1
        arguments = {"model": self.model, "kv_transfer_config": connector(self.root, **self.extra), **engine}
        base = self.directory / f"{self.model}-{self.starts}"
        return run_engine(base, self.models_dir, arguments, actions, environment)


def outputs(step: Mapping[str, Any]) -> list[tuple[list[int], list[Any]]]:
    """(tokens, log probabilities of the best tokens) of each request of a generate step."""
    return [(request["tokens"], request["logprobs"]) for request in step["requests"]]


def tokens(step: Mapping[str, Any]) -> list[list[int]]:
    return [request["tokens"] for request in step["requests"]]


def cached(step: Mapping[str, Any]) -> list[int]:
    return [request["cached_tokens"] for request in step["requests"]]
