"""Runs kvdisk/vllm/demo_phase.py: a vLLM engine in a process of its own, its plan, result and log as files.

What can fail: `EngineFailed`, if the process ends without a result.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvdisk.cli import tiny_models

LOG_LINES_SHOWN = 25


class EngineFailed(Exception):
    """An engine's process ended without a result; the message has the last lines of its log, and its path."""


def engine_arguments(models_dir: Path, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of vllm.LLM for a tiny model: `engine`, over defaults under which every run takes the same steps."""
    return {
        "load_format": tiny_models.LOAD_FORMAT,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 8192,
        "max_num_seqs": 1,  # one request at a time, so that every run splits it into the same steps
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "seed": 0,
        "disable_log_stats": False,
        **tiny_models.ENGINE.get(engine["model"], {}),
        **engine,
        "model": str(models_dir / engine["model"]),
    }


def run_engine(
    base: Path,
    models_dir: Path,
    engine: Mapping[str, Any],
    actions: Sequence[Mapping[str, Any]],
    environment: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Start an engine, let it carry out `actions`, wait for its end.

    Args:
        base: path without suffix; `.plan.json`, `.json` and `.log` are written beside each other and kept.
        models_dir: where `tiny_models.write` wrote.
        engine: arguments of vllm.LLM over the defaults here; `model` is a name of tiny_models.CONFIGS.
        actions: see kvdisk/vllm/demo_phase.py.
        environment: over this process's own.

    Returns:
        What each action reports, in order.

    Raises:
        EngineFailed: the process failed, in vLLM or in kvdisk.
    """
    arguments = engine_arguments(models_dir, engine)
    plan_path, result_path, log_path = (base.with_name(base.name + end) for end in (".plan.json", ".json", ".log"))
    plan_path.write_text(json.dumps({"engine": arguments, "actions": list(actions)}))
    result_path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "kvdisk.vllm.demo_phase", str(plan_path), str(result_path)]
    variables = {**os.environ, **tiny_models.environment(models_dir), **environment}
    with log_path.open("w") as log:
        status = subprocess.run(command, env=variables, stdout=log, stderr=log, check=False).returncode
    if status or not result_path.exists():
        tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
        raise EngineFailed(f"{base.name}: exit status {status}\n{tail}\nThe whole log: {log_path}")
    results = json.loads(result_path.read_text())
    assert isinstance(results, list)
    return results
