"""The store of an engine: opened late, and perhaps later still.

The root of vLLM's block hashes exists only when the first request is there, and the server that this one replaces may
still hold the directory then. An engine that serves without its cache is worth more than one that is gone, so whatever
goes wrong here is logged, and offloading stays off: for a while where waiting helps, else for good.

The first attempt is made in the caller's step, since a restarted engine must hit at once. To open a store takes a
process, proofs of I/O and a scan, so later attempts, which mostly fail, are made on a thread, beside the requests.
"""

import logging
import math
import threading
from collections.abc import Callable
from typing import Final

from kvdisk.errors import DirectoryInUseError
from kvdisk.service import Service

logger = logging.getLogger("kvdisk")

RETRY_S: Final = 30.0
"""Between attempts to open a store that another server still holds."""

_GIVE_UP_S: Final = 1.0
"""How long the end waits for an attempt, which goes on without anybody then."""


class _Attempt:
    """One attempt on a daemon thread. What it opened has one owner: who takes `outcome` when it `is_over`, or nobody
    after `abandon`, and then it is closed here."""

    def __init__(self, open_service: Callable[[], Service]) -> None:
        self.is_over = False
        self.outcome: Service | Exception | None = None
        self._open_service = open_service
        self._lock = threading.Lock()
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="kvdisk-opening", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for it to be over."""
        self._thread.join(timeout_s)

    def abandon(self) -> None:
        """Nobody wants its outcome. Waits a while, so that what the caller lets go of is not in use any more."""
        with self._lock:
            self._abandoned = True
            outcome, self.outcome = self.outcome, None
        _close(outcome)
        self.join(_GIVE_UP_S)

    def _run(self) -> None:
        outcome: Service | Exception | None = _outcome_of(self._open_service)
        with self._lock:
            if not self._abandoned:
                self.outcome, outcome = outcome, None
            self.is_over = True
        _close(outcome)


class Opening:
    """Opens a store once. Belongs to one thread.

    Args:
        open_service: what opens it; called on other threads, too, one call at a time.
        clock: seconds, monotonic.
    """

    def __init__(self, open_service: Callable[[], Service], clock: Callable[[], float]) -> None:
        self._open_service: Callable[[], Service] | None = open_service
        self._clock = clock
        self._at = -math.inf
        self._was_tried = False
        self._running: _Attempt | None = None

    @property
    def pending(self) -> bool:
        """Whether it was not opened yet and may be."""
        return self._open_service is not None

    def attempt(self) -> Service | None:
        """The store, the one time that there is one; never raises, and blocks the first time only."""
        open_service, running = self._open_service, self._running
        if open_service is None:
            return None
        if running is not None:
            if not running.is_over:
                return None
            self._running = None
            return self._settle(running.outcome)
        if self._clock() < self._at:
            return None
        if not self._was_tried:
            self._was_tried = True
            return self._settle(_outcome_of(open_service))
        try:
            self._running = _Attempt(open_service)
        except RuntimeError:  # no more threads
            self._at = self._clock() + RETRY_S
        return None

    def give_up(self) -> None:
        """It will not be opened (again); what is being opened is closed as soon as it is open."""
        self._open_service = None
        running, self._running = self._running, None
        if running is not None:
            running.abandon()

    def _settle(self, outcome: Service | Exception | None) -> Service | None:
        if isinstance(outcome, (DirectoryInUseError, OSError)):
            self._at = self._clock() + RETRY_S
            logger.error("KV offloading is OFF until %s is over; trying again in %d s", outcome, RETRY_S)
            return None
        self._open_service = None
        if isinstance(outcome, Exception):
            logger.error("KV offloading to disk is OFF: the store could not be opened", exc_info=outcome)
            return None
        return outcome


def _outcome_of(open_service: Callable[[], Service]) -> Service | Exception:
    try:
        return open_service()
    except Exception as error:
        return error


def _close(outcome: Service | Exception | None) -> None:
    if outcome is not None and not isinstance(outcome, Exception):
        outcome.close()
