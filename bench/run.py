"""Everything that `make bench` measures, one script after another, and the one table of bars at the end.

    python bench/run.py --root DIR [--env-dir DIR] [--only compare,scale] [--full]

With the default profiles it takes less than 15 minutes on 2 cores, the installation of peers' packages on the first run
not counted; each script has its share, and one that needs three times that is ended. With `--full` it takes hours.
What fails or is ended costs its own rows, which say so. Results are in bench/results/: a JSON, a Markdown and most
also a plot for each script, run.json for this one, and bars.md with the table.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PATIENCE = 3
FULL_S_MAX = 6 * 3600


class Step(NamedTuple):
    """A script, its arguments, and the seconds that are meant for it."""

    script: str
    arguments: list[str]
    budget_s: int


def steps(arguments: argparse.Namespace) -> Iterator[Step]:
    """In their order: peers with a file a chunk come before anybody has deleted thousands of files.

    On an ext4 without a journal creating files is several times slower for minutes after that.
    """
    root = ["--root", str(arguments.root), "--results", str(arguments.results)]
    full = ["--full"] if arguments.full else []
    results = arguments.results
    yield Step("vllm_ttft", [*root, *full], 200)
    yield Step("compare", [*root, *full, "--env-dir", str(arguments.env_dir)], 400)
    planes = ["--rounds", "5"] if arguments.full else ["--rounds", "3", "--planes", "process"]  # vLLM has the process
    yield Step("interference", [*root, *planes], 150)
    yield Step("scale", [*root, *full], 120)
    yield Step("compression", ["--json", str(results / "compression.json")], 20)


def run(step: Step, full: bool) -> str:
    """Run a script on this terminal: "done", or how it failed."""
    command = [sys.executable, str(HERE / f"{step.script}.py"), *step.arguments]
    limit = FULL_S_MAX if full else PATIENCE * step.budget_s
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        _end(process)
        return f"{step.script} was ended after {limit} s, {PATIENCE} times what is meant for it"
    except BaseException:
        _end(process)
        raise
    return "done" if code == 0 else f"{step.script} failed with exit status {code}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Let it give back what it holds, then end it and all that it started."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="directory on the disk to measure")
    parser.add_argument("--env-dir", type=Path, default=Path.home() / ".cache" / "kvdisk-bench", help="peers' packages")
    parser.add_argument("--only", default="", help="scripts, with commas; default: all")
    parser.add_argument("--full", action="store_true", help="every size and combination; hours")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments.results.mkdir(exist_ok=True)
    only = set(filter(None, arguments.only.split(",")))
    chosen = [step for step in steps(arguments) if not only or step.script in only]
    if not chosen:
        parser.error(f"--only {arguments.only!r} names none of {', '.join(s.script for s in steps(arguments))}")
    profile = "every size and combination, hours" if arguments.full else "the short profile (--full is the long one)"
    print(f"{', '.join(step.script for step in chosen)}: {profile}, {sum(s.budget_s for s in chosen) // 60} minutes")
    report = []
    began = time.monotonic()
    for step in chosen:
        print(f"\n==== {step.script} ({step.budget_s} s are meant for it)", flush=True)
        (arguments.results / f"{step.script}.json").unlink(missing_ok=True)  # an old one would pass for this run's
        start = time.monotonic()
        outcome = run(step, arguments.full)
        seconds = time.monotonic() - start
        print(f"==== {step.script}: {outcome}, {seconds:.0f} s", flush=True)
        report.append({"script": step.script, "outcome": outcome, "seconds": round(seconds, 1)})
    total = time.monotonic() - began
    text = json.dumps({"profile": profile, "seconds": round(total, 1), "steps": report}, indent=1)
    (arguments.results / "run.json").write_text(text + "\n")
    print(f"\n==== all of it took {total / 60:.1f} minutes\n", flush=True)
    table = [sys.executable, str(HERE / "summary.py"), "--results", str(arguments.results)]
    failed = subprocess.run(table, check=False).returncode or any(step["outcome"] != "done" for step in report)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
