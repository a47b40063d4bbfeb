"""The data plane in a process of its own, as its owner sees it: once it is open there is no thread here, and nothing
that blocks. Only a death is more, which happens twice at most: a thread waits for the end of the dead one's I/O
(quiet.py), and the one restart is a `Popen` within the owner's step, some milliseconds.

What must hold:
- Every command ends, whatever happens to the process. When it dies (or its socket breaks, or it says what cannot be,
  or nothing for too long) what is out ends at once as `late`, and is `settled` only when the process was reaped and its
  I/O is over (quiet.py): until then the kernel may still write to the slots. One that is never reaped keeps them.
- It is started again once, for the same instances, without a scan: the store goes on where it was. After a second
  death, or if it cannot be started again, the plane is lost, and every command fails at once.
- The locks stay with the owner all the while.
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvdisk.commands import Command, Completion, FoundSegment, WriteEpoch, WritePack
from kvdisk.dataplane import Units
from kvdisk.directory import Directory
from kvdisk.errors import PlaneUnavailableError
from kvdisk.io.protocol import EngineInfo
from kvdisk.options import Options
from kvdisk.plane import Counts
from kvdisk.plane.checks import can_be_packed, fits
from kvdisk.plane.process import PlaneProcess
from kvdisk.plane.quiet import Quiet
from kvdisk.plane.wire import (
    FRAME_BYTES_MAX,
    Claimed,
    Do,
    Done,
    Event,
    Found,
    Open,
    Opened,
    Refused,
    Start,
    Started,
    Stop,
    Stopped,
    UnitsAt,
    WireError,
)
from kvdisk.store_config import StoreConfig

logger = logging.getLogger("kvdisk")

START_S_MAX: Final = 60.0
RESTARTS: Final = 1
MOURNING_S_MAX: Final = 10.0
"""How long commands are held for a plane that died and cannot be replaced yet."""

_SILENCE_S: Final = 10.0
_DEAF_S: Final = 1.0
"""Most that counts as waiting between two times that we listened."""

_NEVER_STARTED: Final = EngineInfo("none", direct=False, registered=False, detail="")


class ProcessPlane:
    """See `Plane` and the module's docstring.

    Args:
        options, units, checksums: see Backend.
        memfds: one a unit, of the memory that it lies in; they are duplicated.

    Raises:
        PlaneUnavailableError: they cannot be.
    """

    def __init__(
        self, options: Options, units: Sequence[Units], memfds: Sequence[int], *, checksums: bool = True
    ) -> None:
        self.info = _NEVER_STARTED
        self.is_lost = False
        self._options = options
        self._checksums = checksums
        self._units: list[UnitsAt] = []
        self._keep(units, memfds)
        self._process: PlaneProcess | None = None
        self._is_dead = False
        self._closed_idle: bool | None = None
        self._restarts = 0
        self._quiet: Quiet | None = None
        self._mourned_since = 0.0
        self._directories: Sequence[Directory] = ()
        self._config: StoreConfig | None = None
        self._heard_s = 0.0  # how long we have listened
        self._heard_at = time.monotonic()
        self._out: dict[int, tuple[float, Command]] = {}  # with `_heard_s` when they were sent, oldest first
        self._sizes: dict[int, int] = {}  # of packs in `_out` that were compressed, once they are known
        self._late: dict[int, Command] = {}  # reported as late, not settled
        self._held: list[Command] = []
        self._ready: list[Completion] = []
        self._counts = self._counts_before = Counts()

    def _keep(self, units: Sequence[Units], memfds: Sequence[int]) -> None:
        try:
            for unit, memfd in zip(units, memfds, strict=True):
                self._units.append(UnitsAt(os.dup(memfd), unit.memory.size, unit.start))
        except OSError as error:
            self._let_go()
            raise PlaneUnavailableError(f"the arena cannot be handed to a process: {error}") from error

    def _let_go(self) -> None:
        units, self._units = self._units, []
        for unit in units:
            os.close(unit.fd)

    @property
    def pid(self) -> int | None:
        """Of the process, as long as there is one."""
        return self._process.pid if self._process is not None else None

    @property
    def counts(self) -> Counts:
        """See Plane; of all processes."""
        return Counts(*map(sum, zip(self._counts_before, self._counts, strict=True)))

    # ---- opening

    def start(self) -> int:
        """See Plane."""
        self._launch()
        assert self._process is not None
        event = self._process.next_event(START_S_MAX)
        if not isinstance(event, Started):
            raise PlaneUnavailableError(f"the data plane said {type(event).__name__} at its start")
        self.info = event.info
        return event.alignment

    def open(self, directories: Sequence[Directory], config: StoreConfig, take: Callable[[FoundSegment], None]) -> int:
        """See Plane."""
        self._directories, self._config = directories, config
        assert self._process is not None
        try:
            self._send_open(scan=True)
            while isinstance(event := self._process.next_event(None), Found):
                for segment in event.segments:
                    take(segment)
        except PlaneUnavailableError as error:
            raise OSError(errno.EIO, str(error)) from error
        if not isinstance(event, Opened):
            raise OSError(errno.EIO, f"the data plane said {type(event).__name__} while it was opened")
        return event.epoch

    def _launch(self) -> None:
        options = self._options
        memfds = [unit.fd for unit in self._units]
        self._process = PlaneProcess(memfds, FRAME_BYTES_MAX + options.segment_bytes)
        level = logger.getEffectiveLevel()
        try:
            self._process.sender.send(Start(options, self._units, self._checksums, level))
        except (OSError, UnicodeError) as error:  # UnicodeError: a path that is not text
            raise PlaneUnavailableError(f"the data plane cannot be told what to do: {error}") from error

    def _send_open(self, *, scan: bool) -> None:
        assert self._process is not None and self._config is not None
        claimed = [Claimed(d.root, d.namespace, d.instance, d.cap_bytes) for d in self._directories]
        locks = [directory.lock_fd for directory in self._directories]
        self._process.sender.send_with_fds(Open(claimed, self._config, scan), locks)

    # ---- at work

    def send(self, commands: Sequence[Command]) -> None:
        """See Plane."""
        if self.is_lost:
            self._ready += [Completion(command.id, error=errno.EIO) for command in commands]
            return
        assert self._process is not None
        if not self._is_dead and not self._out and self._process.is_reaped:
            self._die(self._process.end)  # before it is given anything, which would be lost
        if self._is_dead:
            self._held += commands
        else:
            self._hear()
            self._out.update((command.id, (self._heard_s, command)) for command in commands)
            try:
                self._process.sender.send(Do(list(commands)))
            except OSError as error:
                self._die(f"its socket broke ({error.strerror})")

    def completions(self) -> list[Completion]:
        """See Plane."""
        if self._is_dead:
            self._mourn()
        elif self._out or self._late:
            self._receive()
        ready, self._ready = self._ready, []
        return ready

    def wait(self, timeout_s: float) -> None:
        """See Plane."""
        if self._ready:
            return
        if self._process is None:
            time.sleep(timeout_s)
        elif not self._is_dead:
            self._process.wait(timeout_s)
        elif self._quiet is None:
            self._process.wait(timeout_s, for_end=True)
        else:
            time.sleep(min(timeout_s, 0.002))

    def _hear(self) -> None:
        """Let the clock of waiting for it run on. Time in which we did not listen is not waiting: both may have been
        paused together, and its word may be on the way."""
        now = time.monotonic()
        self._heard_s += min(now - self._heard_at, _DEAF_S)
        self._heard_at = now

    def _receive(self) -> None:
        assert self._process is not None
        self._hear()
        try:
            for event in self._process.events():
                self._take(event)
        except WireError as error:
            self._die(str(error))
        except OSError as error:
            self._die(f"its socket broke ({error.strerror})")
        if self._out:
            sent_at, command = next(iter(self._out.values()))
            # A command makes a few calls, one after the other, each with this deadline.
            if self._heard_s - sent_at > 4 * self._options.io_timeout_s + _SILENCE_S:
                self._die(f"no word of a {type(command).__name__}")

    def _take(self, event: Event) -> None:
        if isinstance(event, Done):
            for completion in event.completions:
                self._check(completion)
                self._ready.append(completion)  # at once: it is not out any more, whatever the next one is
            self._counts = event.counts
            self.info = event.info or self.info
        elif isinstance(event, Started):  # after a restart
            self.info = event.info
        elif isinstance(event, Refused):
            raise WireError(f"it cannot go on: {event.text}")
        elif not isinstance(event, Opened):
            raise WireError(f"{type(event).__name__} came while at work")

    def _check(self, completion: Completion) -> None:
        """Note that a command ended; WireError, and nothing noted, unless it can have ended like this."""
        number = completion.id
        if completion.packed_bytes:  # of a pack that is compressed; its end is yet to come
            _, command = self._out.get(number, (0.0, None))
            if not isinstance(command, WritePack) or not command.compress or number in self._sizes:
                raise WireError(f"command {number} has a size, but is no pack to be compressed")
            if not can_be_packed(command, completion.packed_bytes):
                raise WireError(f"pack {number} of {completion.packed_bytes} bytes is none of its chunks")
            self._sizes[number] = completion.packed_bytes
            return
        command = self._late.get(number) if completion.settled else self._out.get(number, (0.0, None))[1]
        if command is None:
            raise WireError(f"command {number} ended, but was not out")
        if completion.late and (completion.settled or not completion.error):
            raise WireError(f"command {number} is late, but {'settled' if completion.settled else 'without an error'}")
        if completion.error == 0 and not completion.settled and not fits(command, completion, self._sizes.get(number)):
            raise WireError(f"{type(command).__name__} {number} ended with results that are not its own")
        if completion.settled:
            del self._late[number]
        else:
            del self._out[number]
            self._sizes.pop(number, None)
            if completion.late:
                self._late[number] = command

    # ---- when it dies

    def _die(self, why: str) -> None:
        if self._is_dead:
            return
        assert self._process is not None
        self._is_dead = True
        self._process.kill()
        self._hear()
        self._mourned_since = self._heard_s
        logger.warning("kvdisk: the data plane (pid %d) is gone: %s", self._process.pid, why)
        for number, (_, command) in self._out.items():
            self._ready.append(Completion(number, error=errno.EIO, late=True))
            self._late[number] = command
        self._out.clear()
        self._sizes.clear()

    def _mourn(self) -> None:
        """Settle what was out once nothing of the process is left, and then replace it."""
        process = self._process
        if process is None:
            return
        self._hear()
        if self._quiet is None and process.is_reaped:
            self._quiet = Quiet(self._paths())
        if self._quiet is not None and self._quiet.reached:
            self._ready += [Completion(number, settled=True) for number in self._late]
            self._late.clear()
            process.bury()
            self._process = self._quiet = None
            self._counts_before, self._counts = self.counts, Counts()
            self._replace(process.end)
        elif self._heard_s - self._mourned_since > MOURNING_S_MAX:
            self._lose("its last I/O does not end")

    def _paths(self) -> set[str]:
        """Of the files that the commands which are out read or write."""
        return {
            self._directories[command.file.root].segment_path(command.file.number)
            for command in self._late.values()
            if not isinstance(command, WriteEpoch)
        }

    def _replace(self, how: str) -> None:
        if self.is_lost:
            return
        if self._restarts == RESTARTS:
            self._lose(how)
            return
        self._restarts += 1
        try:
            self._launch()
            self._send_open(scan=False)
        except (PlaneUnavailableError, OSError) as error:
            stillborn, self._process = self._process, None
            if stillborn is not None:
                stillborn.kill()
                stillborn.bury()
            self._lose(str(error))
            return
        assert self._process is not None
        logger.warning("kvdisk: the data plane ended (%s) and was started again, pid %d", how, self._process.pid)
        self._is_dead = False
        held, self._held = self._held, []
        if held:
            self.send(held)

    def _lose(self, why: str) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        logger.error(
            "kvdisk: KV offloading to disk is OFF until the server is restarted: the data plane died (%s)", why
        )
        held, self._held = self._held, []
        self.send(held)

    # ---- the end

    def close(self, timeout_s: float) -> bool:
        """See Plane. A process that does not end in time ends by itself when what it waits for does: it is not killed,
        since the locks that it was lent must outlive its writes."""
        if self._closed_idle is not None:
            return self._closed_idle
        process, self._process = self._process, None
        idle = False
        if self._quiet is not None:
            self._quiet.stop()
        if process is not None:
            deadline = time.monotonic() + timeout_s
            if not self._is_dead:
                process.go_on()
                idle = self._stop(process, timeout_s / 2, deadline)
            idle = process.await_end(deadline - time.monotonic()) and idle
            process.bury()
        self._let_go()
        self._is_dead = self.is_lost = True
        self._closed_idle = idle
        return idle

    def _stop(self, process: PlaneProcess, stop_s: float, deadline: float) -> bool:
        """Have it end by itself; whether nothing was in progress any more when it did."""
        try:
            process.sender.send(Stop(stop_s))
            while (left := deadline - time.monotonic()) > 0:
                process.wait(left)
                for event in process.events():
                    if isinstance(event, Stopped):
                        return event.idle
        except (OSError, WireError):
            pass
        return False
