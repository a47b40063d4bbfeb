"""A program in a process and an environment of its own that is told by lines of JSON what to do, and answers so."""

import contextlib
import json
import os
import select
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ANSWER_S_MAX = 300.0
START_S_MAX = 180.0
ROOT = Path(__file__).parents[1]


class TalkError(RuntimeError):
    """It has ended, does not answer, or says that it failed; the text has its name."""


class Talker:
    """Starts a program, which says {"ready": true} when it is.

    Args:
        name: for messages.
        command: to start it.
        log: file for its standard error.
        environment: variables over this process's own. PYTHONPATH starts with this checkout, for kvdisk's own sake.
    """

    def __init__(self, name: str, command: list[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._log = log
        more = dict(environment or {})
        path = os.pathsep.join(filter(None, [str(ROOT), more.pop("PYTHONPATH", "")]))
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **more, "PYTHONPATH": path},
            )

    def wait_until_ready(self) -> None:
        """Return when it is.

        Raises:
            TalkError: with its last words.
        """
        try:
            while not self._answer(START_S_MAX).get("ready"):
                pass
        except TalkError:
            self.close()
            lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
            raise TalkError(lines[-1] if lines else "it does not start") from None

    def ask(self, **command: Any) -> dict[str, Any]:
        """Its answer to a command."""
        self.tell(**command)
        answer = self._answer(ANSWER_S_MAX)
        if "error" in answer:
            raise TalkError(f"{self.name}: {answer['error']}")
        return answer

    def tell(self, **command: Any) -> None:
        """Give a command; the answer is for `ask` or nobody."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise TalkError(f"{self.name} has ended ({error}); see {self._log}") from None

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        """The next line that is an answer; libraries print before the program can stop them."""
        stdout = self._process.stdout
        assert stdout is not None
        while True:
            if not select.select([stdout], [], [], timeout_s)[0]:
                raise TalkError(f"{self.name} does not answer; see {self._log}")
            line = stdout.raw.readline() if hasattr(stdout, "raw") else stdout.readline()
            if not line:
                raise TalkError(f"{self.name} has ended; see {self._log}")
            with contextlib.suppress(json.JSONDecodeError):
                answer = json.loads(line)
                if isinstance(answer, dict):
                    return answer
