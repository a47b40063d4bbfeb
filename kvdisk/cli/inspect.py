"""`kvdisk inspect`: what lies in a directory of kvdisk, while a server runs or not. What is found: inspect_report.py.

Bytes from disk and file names reach the terminal only as printable characters, and never as markup.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdisk.cli import inspect_report as report
from kvdisk.cli.inspect_report import Inspector, InstanceReport, NamespaceReport, Report
from kvdisk.cli.inspect_segments import STATES
from kvdisk.units import format_size

SHOWN_MAX = 64
"""Lines of one kind at most; `--json` has all."""

FACTS = (
    "model",
    "revision",
    "namespace",
    "api",
    "vllm",
    "dtype",
    "kv_dtype",
    "cache_dtype",
    "tokens_per_hash",
    "tp_size",
    "pp_size",
    "pcp_size",
    "dcp_size",
    "replicated",
    "draft_model",
)
_DULL = {"none", "unknown", "", "1", "False"}


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="All of it as JSON, to standard output.")
def inspect(directory: Path, as_json: bool) -> None:
    """Show what lies in DIRECTORY: a root_dir, or one namespace or instance in it.

    Reads headers only, writes nothing and takes no lock, so it may run beside a server. Exits with status 1 if anything
    is damaged or cannot be read.
    """
    console = Console(highlight=False)
    try:
        with Console(stderr=True).status("reading headers") as status:
            found = Inspector(lambda path: status.update(Text(printable(path)))).inspect(str(directory))
    except OSError as error:
        raise click.ClickException(f"{directory}: {error.strerror}") from None
    if as_json:
        click.echo(json.dumps(to_json(found), indent=1))
    else:
        _Printer(console).show(found)
    if found.all_problems:
        raise SystemExit(1)


def to_json(found: Report) -> dict[str, Any]:
    """The whole report; docs/inspect.md describes it."""
    plain = asdict(found)
    for namespace, below in zip(found.namespaces, plain["namespaces"], strict=True):
        for instance, one in zip(namespace.instances, below["instances"], strict=True):
            one["segment_states"] = _states(instance)
            one["bytes"] = bytes_of(instance)
            for group, row in zip(instance.groups, one["groups"], strict=True):
                row["stored_over_live"] = round(group.ratio, 6)
    return {"kvdisk inspect": {"schema": report.SCHEMA_VERSION}, **plain}


def bytes_of(instance: InstanceReport) -> dict[str, int]:
    """Where the bytes of the segment files go; `live` to `other` sum up to `files`."""
    segments = instance.segments
    live = sum(group.live_bytes for group in instance.groups)
    padding = sum(group.stored_bytes for group in instance.groups) - live
    known = {
        "live": live,
        "padding": padding,
        "stale": sum(segment.stored_bytes for segment in segments) - live - padding,
        "headers": sum(segment.header_bytes for segment in segments),
        "gaps": sum(segment.gap_bytes for segment in segments),
        "tails": sum(segment.tail_bytes for segment in segments),
    }
    files = sum(segment.file_bytes for segment in segments)
    return {**known, "other": files - sum(known.values()), "files": files}


def printable(text: str, length_max: int = 200) -> str:
    """`text` as a terminal may see it: one line, no control characters, not too long."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:length_max])
    return shown + "..." * (len(text) > length_max)


def _states(instance: InstanceReport) -> dict[str, int]:
    counts = Counter(segment.state for segment in instance.segments)
    return {state: counts[state] for state in STATES}


class _Printer:
    """Lines and tables for people."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, found: Report) -> None:
        self._say(f"kvdisk inspect {found.path}", "bold")
        granted = f" of {format_size(found.granted_bytes)} granted" if found.granted_bytes else ", nothing granted"
        self._say(f"{format_size(found.used_bytes)} on disk{granted}, {_count(len(found.namespaces), 'namespace')}")
        self._foreign(found.foreign)
        for namespace in found.namespaces:
            self._namespace(namespace)
        problems = found.all_problems
        for problem in problems[:SHOWN_MAX]:
            self._say(f"damaged: {problem}", "red")
        if len(problems) > SHOWN_MAX:
            self._say(f"and {len(problems) - SHOWN_MAX} more; --json lists all", "red")
        if not problems:
            self._say("No damage found in headers; payloads are verified when they are read.", "green")

    def _namespace(self, namespace: NamespaceReport) -> None:
        self._say("")
        self._say(Path(namespace.path).name, "bold")
        facts = report.facts_of(namespace.identity or {}, FACTS)
        shown = ", ".join(f"{name} {value}" for name, value in facts.items() if value not in _DULL)
        ranks = (namespace.identity or {}).get("ranks")
        ranks_shown = f", {_count(len(ranks), 'rank')}" if isinstance(ranks, list) else ""
        self._say(f"  identity: {shown}{ranks_shown}" if shown else "  identity: namespace.json says nothing")
        if namespace.identity is not None and not namespace.identity_matches:
            self._say("  namespace.json does not belong to this directory's name", "yellow")
        if namespace.epoch is not None:
            note = ", after a reset: the next start will use nothing stored since" if namespace.after_reset else ""
            self._say(f"  epoch {namespace.epoch}{note}")
        self._foreign(namespace.foreign, "  ")
        for instance in namespace.instances:
            self._instance(instance)

    def _instance(self, instance: InstanceReport) -> None:
        granted = f" of {format_size(instance.granted_bytes)}" if instance.granted_bytes else ""
        self._say(f"  {Path(instance.path).name}: {format_size(instance.used_bytes)}{granted}, {_owner(instance)}")
        states = ", ".join(f"{count} {state}" for state, count in _states(instance).items() if count)
        self._say(f"    {_count(len(instance.segments), 'segment')}: {states or 'none'}{_openings(instance)}")
        if instance.groups:
            self._console.print(_groups_table(instance))
        if instance.segments:
            self._console.print(_bytes_table(instance))
        self._foreign(instance.foreign, "    ")

    def _foreign(self, names: list[str], indent: str = "") -> None:
        if names:
            shown = ", ".join(printable(name, 60) for name in names[:8]) + ", ..." * (len(names) > 8)
            self._say(f"{indent}not kvdisk's, not counted, never touched: {shown} ({len(names)})", "yellow")

    def _say(self, line: str, style: str = "") -> None:
        self._console.print(Text(printable(line, 2000), style=style), soft_wrap=True)


def _groups_table(instance: InstanceReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("group", "chunks", "usable", "live", "stored", "stored/live", "positions"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in instance.groups[:SHOWN_MAX]:
        table.add_row(
            str(group.group),
            f"{group.chunk_count:,}",
            f"{group.usable_count:,}",
            format_size(group.live_bytes),
            format_size(group.stored_bytes),
            f"{group.ratio:.4f}",
            f"{group.position_min:,} to {group.position_max:,}",
        )
    if len(instance.groups) > SHOWN_MAX:
        table.add_row("...", *[""] * 6)
    return table


def _bytes_table(instance: InstanceReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    sizes = bytes_of(instance)
    for name in sizes:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(*(format_size(size) if size >= 0 else f"-{format_size(-size)}" for size in sizes.values()))
    return table


def _owner(instance: InstanceReport) -> str:
    pid = f" (pid {instance.pid})" if instance.pid else ""
    return {
        report.ALIVE: f"a server{pid} has it open",
        report.CLOSED_CLEANLY: "nobody has it open",
        report.ENDED: f"no process of this system has it open; the last server{pid} did not close it",
    }.get(instance.owner, f"nobody can tell whether a server{pid} has it open")


def _openings(instance: InstanceReport) -> str:
    """How often segments were begun: their sequence counts over all roots of a server."""
    last = max((segment.sequence for segment in instance.segments), default=0)
    recycled = sum(segment.has_remains for segment in instance.segments)
    return "".join(_parts(last, recycled))


def _parts(last: int, recycled: int) -> Iterator[str]:
    if last:
        yield f"; {last:,} begun so far"
    if recycled:
        yield f", {recycled} of the open ones recycled"


def _count(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"
