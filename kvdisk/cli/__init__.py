"""The `kvdisk` command. Importing this costs nothing: click and rich are imported when a command runs."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; ends the process with the command's exit status.

    Args:
        arguments: instead of those of the process.
    """
    try:
        from kvdisk.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in {"click", "rich"}:
            raise
        print(f"kvdisk: the command needs {error.name}: pip install 'kvdisk[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    app(args=arguments, prog_name="kvdisk")
