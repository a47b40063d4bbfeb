"""The one table: each bar, what was measured, the verdict. Reads what the scripts left in bench/results/.

    python bench/summary.py [--results DIR] [--document docs/performance.md]

Prints it and writes bars.md. A row shows the worst of its cases: for rules with many sizes, directions and peers, the
details are in each script's own Markdown. `--document` puts bars.md and those into a document, each between its
<!-- begin NAME.md --> and <!-- end NAME.md -->: what was measured there is never copied by hand.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from adapters import bars_of, interference_markdown
from bars import MET, MISSED, REPORTED, REQUIREMENTS, Bar, Requirement

HERE = Path(__file__).parent
NOT_MEASURED = "not measured"
ELSEWHERE = {"make test": "shown by `make test`: every crash point, errno and late copy is a test"}


class Row(NamedTuple):
    """A line of the table. cases: of those with a bar, how many met it, such as "5 of 6"."""

    what: str
    bar: str
    measured: str
    cases: str
    verdict: str


def rows(bars: Sequence[Bar], why_not: Mapping[str, str]) -> list[Row]:
    """A row a requirement.

    Args:
        bars: of all scripts.
        why_not: script -> why there is nothing of it, or not all.
    """
    return [_row(one, [bar for bar in bars if bar.requirement == one.name], why_not) for one in REQUIREMENTS]


def _row(one: Requirement, bars: Sequence[Bar], why_not: Mapping[str, str]) -> Row:
    if not bars:
        why = ELSEWHERE.get(one.script) or why_not.get(one.script, f"{one.script} had nothing to say about it")
        return Row(one.what, one.bar, why, "", NOT_MEASURED)
    judged = [bar for bar in bars if bar.verdict != REPORTED]
    if not judged:
        return Row(one.what, one.bar, "; ".join(f"{b.case}: {b.measured}" for b in bars), "", REPORTED)
    missed = [bar for bar in judged if bar.verdict == MISSED]
    worst = min(judged, key=lambda bar: bar.margin)
    where = ", ".join(filter(None, (worst.rule, worst.case)))
    cases = f"{len(judged) - len(missed)} of {len(judged)}"
    return Row(one.what, one.bar, f"{worst.measured} ({where})", cases, MISSED if missed else MET)


def read(results: Path) -> tuple[list[Bar], dict[str, str]]:
    """The bars in every script's JSON, and why a script has none."""
    bars: list[Bar] = []
    why_not: dict[str, str] = {}
    failed = _failed(results)
    for script in dict.fromkeys(one.script for one in REQUIREMENTS):
        try:
            report = json.loads((results / f"{script}.json").read_text())
            bars += bars_of(script, report)
            absent = report.get("not measured", ()) if isinstance(report, dict) else ()
            why_not[script] = "; ".join(absent) or f"not among what bench/{script}.py measured"
        except FileNotFoundError:
            why_not[script] = failed.get(script, f"bench/{script}.py has not run")
        except (ValueError, KeyError, TypeError) as error:
            why_not[script] = f"{script}.json is of another version of this script ({error})"
    return bars, why_not


def _failed(results: Path) -> dict[str, str]:
    """Script -> how it ended, of those that bench/run.py ran and that failed."""
    try:
        steps = json.loads((results / "run.json").read_text())["steps"]
        return {step["script"]: step["outcome"] for step in steps if step["outcome"] != "done"}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def markdown(found: Sequence[Row]) -> str:
    """The table."""
    head = ["| what | bar | measured, the worst case | cases | verdict |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in found)]) + "\n"


def into(document: str, results: Path) -> str:
    """The document with the results between its marks; parts of which there are no results stay as they are."""

    def fresh(match: re.Match[str]) -> str:
        path = results / match[1]
        if not path.exists():
            return match[0]
        return f"<!-- begin {match[1]} -->\n{body(path.read_text())}\n<!-- end {match[1]} -->"

    return re.sub(r"<!-- begin ([a-z_]+\.md) -->\n.*?<!-- end \1 -->", fresh, document, flags=re.DOTALL)


def body(report: str) -> str:
    """A script's Markdown without its title and its bars, and its headings two levels down."""
    lines = report.split("\n## Bars\n")[0].strip().splitlines()
    if lines and lines[0].startswith("# "):
        del lines[0]
    return "\n".join("##" + line if line.startswith("## ") else line for line in lines).strip()


def text(found: Sequence[Row]) -> str:
    """The table for a terminal: verdict first, what and bar in columns, the measured value below."""
    width = max(len(row.what) for row in found)
    lines = []
    for row in found:
        cases = f" ({row.cases} cases)" if row.cases else ""
        lines += [f"{row.verdict:>12}  {row.what:{width}}  {row.bar}{cases}", f"{'':14}{row.measured}"]
    return "\n".join(lines)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--document", type=Path, help="a document to put the results into")
    arguments = parser.parse_args()
    found = rows(*read(arguments.results))
    print(text(found))
    count = {verdict: sum(row.verdict == verdict for row in found) for verdict in (MET, MISSED, REPORTED, NOT_MEASURED)}
    print("\n" + ", ".join(f"{number} {verdict}" for verdict, number in count.items() if number))
    arguments.results.mkdir(exist_ok=True)
    (arguments.results / "bars.md").write_text(markdown(found))
    interference = arguments.results / "interference.json"
    if interference.exists():
        interference.with_suffix(".md").write_text(interference_markdown(json.loads(interference.read_text())))
    print(f"the same as Markdown: {arguments.results / 'bars.md'}")
    if arguments.document:
        arguments.document.write_text(into(arguments.document.read_text(), arguments.results))


if __name__ == "__main__":
    main()
