"""The tables of docs/models.md: a row each is what a test found, and that test says when the committed one differs.

    make test ARGS="tests/vllm --write-models-doc"      writes the rows anew instead

What must hold: a row is named by its first cell; what is not a row of a marked table stays as it is.
"""

import fcntl
import re
from collections.abc import Sequence
from pathlib import Path

DOC = Path(__file__).parents[2] / "docs" / "models.md"
END_TO_END, LARGE = "end to end", "large"
"""Tables: the line `<!-- table: NAME -->` comes before each one's head."""

HOW = 'run `make test ARGS="tests/vllm --write-models-doc"` and read the difference'


def rows(table: str) -> dict[str, str]:
    """Name -> line of each row, in their order."""
    lines, start, end = _table(DOC.read_text().splitlines(), table)
    return {_name(line): line for line in lines[start:end]}


def check_row(table: str, cells: Sequence[str], *, write: bool) -> None:
    """Assert that the row that is named by the first cell is this one; or write it.

    A new row goes to the end of its table.
    """
    row = f"| {' | '.join(cells)} |"
    if write:
        _write(table, row)
    found = rows(table).get(cells[0])
    assert found == row, f"{DOC.name} says something else than was found: {HOW}"


def _write(table: str, row: str) -> None:
    with DOC.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # tests run in several processes
        lines, start, end = _table(file.read().splitlines(), table)
        places = [number for number in range(start, end) if _name(lines[number]) == _name(row)]
        if places:
            lines[places[0]] = row
        else:
            lines.insert(end, row)
        file.seek(0)
        file.write("\n".join(lines) + "\n")
        file.truncate()


def _table(lines: list[str], table: str) -> tuple[list[str], int, int]:
    """The lines, and where the rows of a table begin and end among them."""
    start = lines.index(f"<!-- table: {table} -->") + 3  # the mark, the head and the rule below it
    end = start
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    return lines, start, end


def _name(row: str) -> str:
    return re.split(r" *\| *", row)[1]
