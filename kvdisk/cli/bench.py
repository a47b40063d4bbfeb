"""`kvdisk bench`: how fast a store on this disk is, in fio's words. What is measured: see bench_workload.py."""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvdisk.cli import bench_report as report
from kvdisk.cli.bench_workload import Job, Result, Setup, Workload
from kvdisk.errors import KVDiskError
from kvdisk.options import ENGINES
from kvdisk.units import format_size, parse_size

MODES = ("write", "read", "randread", "rw", "randrw")
RW = {"readwrite": "rw", "randwrite": ""}  # fio's other names; "" says that there is no such thing here


def _size(_ctx: click.Context, param: click.Parameter, value: str | int) -> int:
    try:
        return parse_size(int(value) if str(value).isdigit() else value, f"--{param.name}")
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _modes(_ctx: click.Context, _param: click.Parameter, value: str) -> list[str]:
    modes = [RW.get(word, word) for word in value.split(",")]
    if "" in modes:
        raise click.BadParameter("randwrite: a store packs what it writes, so writes are sequential; use write")
    for word in modes:
        if word not in MODES:
            raise click.BadParameter(f"{word!r} is none of {', '.join(MODES)}")
    return modes


@click.command()
@click.option(
    "--root",
    "--directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=".",
    help="Directory on the disk to measure; a sub-directory is used and removed. Default: here.",
)
@click.option(
    "--rw",
    default="write,read",
    callback=_modes,
    show_default=True,
    help=f"One or more of {', '.join(MODES)}, separated by commas, measured one after another.",
)
@click.option("--bs", callback=_size, default="1MiB", show_default=True, help="Bytes of a chunk.")
@click.option("--size", callback=_size, default="1GiB", show_default=True, help="Bytes a job moves in a pass.")
@click.option("--iodepth", type=click.IntRange(0), default=0, help="Chunks in flight a job. Default: 128 MiB in all.")
@click.option(
    "--numjobs",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Requests at once, each with its own chunks.",
)
@click.option("--direct", type=click.IntRange(0, 1), default=1, show_default=True, help="0: through the page cache.")
@click.option("--engine", "--ioengine", type=click.Choice(ENGINES), default="auto", show_default=True)
@click.option("--runtime", type=click.FloatRange(0), default=0.0, help="Seconds; nothing more is asked for after it.")
@click.option("--time-based", is_flag=True, help="Repeat passes until --runtime is over.")
@click.option(
    "--overwrite",
    type=click.IntRange(0, 1),
    default=0,
    show_default=True,
    help="1: write over segments that were written before, as a full store does.",
)
@click.option("--mem", type=click.Choice(["huge", "4k"]), default="huge", show_default=True, help="Pages of the arena.")
@click.option("--arena", callback=_size, default="1GiB", show_default=True, help="Bytes of host memory.")
@click.option("--segment-bytes", callback=_size, default="0", help="Bytes of a segment file. Default: chosen.")
@click.option("--no-checksums", is_flag=True, help="Hash and verify nothing, to see what it costs.")
@click.option("--randseed", type=int, default=0, show_default=True, help="Of the order of random reads.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Report as fio has it.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="PNG; needs matplotlib.")
def bench(
    root: Path,
    rw: list[str],
    iodepth: int,
    runtime: float,
    time_based: bool,
    overwrite: int,
    randseed: int,
    json_path: Path | None,
    plot_path: Path | None,
    **values: Any,
) -> None:
    """Measure a store on this disk: bandwidth, IOPS, CPU and latency of chunks, in fio's words.

    Exits with status 1 if a chunk failed. docs/bench.md says what each figure means and what makes one doubtful.
    """
    if time_based and not runtime:
        raise click.UsageError("--time-based needs --runtime: how long?")
    if plot_path is not None:
        _require_matplotlib()
    console = Console(highlight=False)
    try:
        setup = _setup(**values)
        _check_space(setup, root)
        with Workload(root, setup) as workload:
            runs = _Runs(workload, console, iodepth, runtime, time_based, bool(overwrite), Random(randseed)).all(rw)
            notes = list(report.warnings(workload, [result for _, results in runs for result in results.values()]))
            _print_warnings(console, notes)
            if json_path is not None:
                json_path.write_text(json.dumps(report.to_json(workload, runs, notes), indent=1) + "\n")
            if plot_path is not None:
                report.plot(plot_path, report.title(workload), runs)
    except (ValueError, KVDiskError, OSError, MemoryError) as error:
        raise click.ClickException(str(error)) from None
    errors = sum(result.errors for _, results in runs for result in results.values())
    if errors:
        raise click.ClickException(f"{errors} chunks failed; the log says why")


def _setup(*, bs: int, size: int, numjobs: int, engine: str, direct: int, mem: str, arena: int, segment_bytes: int,
           no_checksums: bool) -> Setup:  # fmt: skip
    return Setup(
        bs=bs, size=size, numjobs=numjobs, engine=engine, direct=bool(direct), checksums=not no_checksums,
        pages=mem, arena_bytes=arena, segment_bytes=segment_bytes,
    )  # fmt: skip


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise click.UsageError("--plot needs matplotlib: pip install 'kvdisk[bench]'") from None


class _Runs:
    """The passes, one mode after another, each shown when it is over."""

    def __init__(
        self, workload: Workload, console: Console, iodepth: int, runtime: float, time_based: bool, overwrite: bool,
        random: Random,
    ) -> None:  # fmt: skip
        self._workload = workload
        self._console = console
        self._iodepth = iodepth
        self._runtime = runtime
        self._time_based = time_based
        self._overwrite = overwrite
        self._random = random

    def all(self, modes: Sequence[str]) -> list[tuple[str, dict[str, Result]]]:
        """Results by mode. The environment is printed first, the lines as one table."""
        for name, value in report.environment(self._workload).items():
            self._console.print(f"[bold]{name:>12}[/]  {value}", soft_wrap=True)
        runs = []
        with self._progress() as progress:
            for mode in modes:
                task = progress.add_task(f"{mode}: laying out", total=None)
                self._lay_out(mode)
                runs.append((mode, self._run(mode, self._follow(progress, task, mode))))
                progress.remove_task(task)
        self._console.print(_table(self._workload, runs))
        return runs

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
            console=self._console, transient=True, disable=not self._console.is_terminal,
        )  # fmt: skip

    def _follow(self, progress: Progress, task: Any, mode: str) -> Callable[[dict[str, Result]], None]:
        total = self._workload.setup.chunk_count * self._workload.setup.bs

        def follow(results: dict[str, Result]) -> None:
            speeds = ", ".join(f"{d} {r.bytes_per_s / 1e6:,.0f} MB/s" for d, r in results.items())
            moved = sum(r.bytes for r in results.values())
            progress.update(task, description=f"{mode}: {speeds}", completed=moved, total=total * len(results))

        return follow

    def _lay_out(self, mode: str) -> None:
        """What the mode needs on disk."""
        workload = self._workload
        if self._overwrite and mode != "read":
            workload.recycle_all()
        if mode != "write" and workload.written < workload.setup.chunk_count:
            workload.write_all()

    def _run(self, mode: str, follow: Callable[[dict[str, Result]], None]) -> dict[str, Result]:
        """One pass, or with --time-based as many as fit."""
        until = time.monotonic() + self._runtime if self._runtime else float("inf")
        results = self._workload.run(self._jobs(mode), until=until, on_sample=follow)
        while self._time_based and time.monotonic() < until:
            for direction, more in self._workload.run(self._jobs(mode), until=until, on_sample=follow).items():
                results[direction].add(more)
        self._workload.service.drain(30)
        return results

    def _jobs(self, mode: str) -> list[Job]:
        workload, depth = self._workload, self._iodepth
        readers = []
        if mode != "write":
            readers = workload.readers(depth, shuffle=self._random if mode.startswith("rand") else None)
        return [*readers, *(workload.writers(depth) if mode in ("write", "rw", "randrw") else [])]


def _check_space(setup: Setup, root: Path) -> None:
    need, free = setup.capacity()[0], shutil.disk_usage(root).free
    if need > free:
        raise click.UsageError(
            f"{root} has {format_size(free)} free and this run may take {format_size(need)}: lower --size or --numjobs"
        )


def _table(workload: Workload, runs: Sequence[tuple[str, dict[str, Result]]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, title=report.title(workload), title_justify="left")
    rows = [report.line(name, result) for name, results in runs for result in results.values()]
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "rw" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values(), style="red" if row["errors"] != "0" else "")
    return table


def _print_warnings(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        console.print(f"[yellow]warning[/]  {note}", soft_wrap=True)
