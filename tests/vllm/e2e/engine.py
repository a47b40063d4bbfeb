"""One tiny model over one root directory, engine after engine: what the end-to-end tests share."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from kvdisk.cli import tiny_models
from kvdisk.cli.engine_process import LOG_LINES_SHOWN, EngineFailed, engine_arguments, run_engine
from kvdisk.cli.tiny_models import VOCABULARY
from tests.vllm.config import connector

REPOSITORY = Path(__file__).parents[3]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Tests run two at a time: OpenMP's threads would wait for each other, spinning, for most of the time."""
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **ONE_THREAD}
OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **ONE_THREAD}
KV_CACHE_BYTES = 512 << 20  # DeepSeek-V4 needs more than half of it for one request of max_model_len
DRAIN = {"do": "drain"}
RESET = {"do": "reset"}
RESET_CONNECTOR = {"do": "reset", "connector": True}


def generate(prompt_tokens: int, *, count: int = 2, **options: Any) -> dict[str, Any]:
    """The same `count` prompts every time."""
    rng = random.Random(prompt_tokens)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(prompt_tokens)] for _ in range(count)]
    return {"do": "generate", "prompts": prompts, **options}


def variables(models_dir: Path) -> dict[str, str]:
    """The environment of a process that runs a module of these tests, and vLLM in it.

    The KV cache's size is an engine's argument here; this variable overrides it, and to zero a GiB takes its time.
    """
    variables = {**os.environ, **tiny_models.environment(models_dir)}
    del variables["VLLM_CPU_KVCACHE_SPACE"]
    return {**variables, "PYTHONPATH": os.pathsep.join([variables["PYTHONPATH"], str(REPOSITORY)])}


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


class Server:
    """A process for engine after engine (see server.py), so that vLLM is imported once. A context manager.

    Args:
        log: where the process writes what it has to say; replaced.
        models_dir: where tiny_models.write wrote.
        shims: names of functions of shims.py.
        environment: over this process's own.
    """

    def __init__(
        self, log: Path, models_dir: Path, shims: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self._log, self._models_dir = log, models_dir
        environment = {**variables(models_dir), **IN_PROCESS, **(environment or {})}
        results, result_fd = os.pipe()
        command = [sys.executable, "-m", "tests.vllm.e2e.server", str(result_fd), *shims]
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                pass_fds=[result_fd],
                env=environment,
                text=True,
            )
        os.close(result_fd)
        self._results = os.fdopen(results)
        self._said_before = 0

    def start(self, model: str, root: Path, extra: Mapping[str, Any], **engine: Any) -> list[dict[str, Any]]:
        """A new engine, with nothing in memory; what vLLM planned, group by group."""
        self._said_before = len(self._log.read_text())
        arguments = {
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            **engine,
            "model": model,
            "kv_transfer_config": connector(root, **extra),
        }
        planned = self._order({"do": "start", "engine": engine_arguments(self._models_dir, arguments)})
        assert isinstance(planned, list)
        return planned

    def do(self, *actions: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each action reports."""
        return [self._order(action) for action in actions]

    def stop(self) -> None:
        """End the engine; its host memory goes with it."""
        self._order({"do": "stop"})

    def said(self) -> str:
        """The log since the last start."""
        return self._log.read_text()[self._said_before :]

    def _order(self, order: Mapping[str, Any]) -> Any:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended; the log says why
        if answer := self._results.readline():
            return json.loads(answer)
        self._process.wait()  # its last words come after the end of the results
        lines = self._log.read_text(errors="replace").splitlines()
        lines = [line for line in lines if not line.startswith(("nanobind: ", " - "))]  # leaks at exit, of Triton's
        tail = "\n".join(lines[-LOG_LINES_SHOWN:])
        raise EngineFailed(f"{order['do']}: the process ended\n{tail}\nThe whole log: {self._log}")

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind:
            self._process.kill()
        self._process.communicate()  # the end of its input is the end of the process
        self._results.close()


def outputs(step: Mapping[str, Any]) -> list[tuple[list[int], list[Any]]]:
    """(tokens, log probabilities of the best tokens) of each request of a generate step."""
    return [(request["tokens"], request["logprobs"]) for request in step["requests"]]


def tokens(step: Mapping[str, Any]) -> list[list[int]]:
    return [request["tokens"] for request in step["requests"]]


def cached(step: Mapping[str, Any]) -> list[int]:
    return [request["cached_tokens"] for request in step["requests"]]
