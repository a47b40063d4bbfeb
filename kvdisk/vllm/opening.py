"""The store of an engine: opened late, and perhaps later still.

The root of vLLM's block hashes exists only when the first request is there, and the server that this one replaces may
still hold the directory then. An engine that serves without its cache is worth more than one that is gone, so whatever
goes wrong here is logged, and offloading stays off: for a while where waiting helps, else for good.
"""

import logging
import math
from collections.abc import Callable

from kvdisk.errors import DirectoryInUseError
from kvdisk.service import Service

logger = logging.getLogger("kvdisk")

RETRY_S = 30.0
"""Between attempts to open a store that another server still holds."""


class Opening:
    """Opens a store once.

    Args:
        open_service: what opens it.
        clock: seconds, monotonic.
    """

    def __init__(self, open_service: Callable[[], Service], clock: Callable[[], float]) -> None:
        self._open_service: Callable[[], Service] | None = open_service
        self._clock = clock
        self._at = -math.inf

    @property
    def pending(self) -> bool:
        """Whether it was not opened yet and may be."""
        return self._open_service is not None

    def attempt(self) -> Service | None:
        """The store, the one time that it can be opened; never raises."""
        if self._open_service is None or self._clock() < self._at:
            return None
        try:
            service = self._open_service()
        except (DirectoryInUseError, OSError) as error:
            self._at = self._clock() + RETRY_S
            logger.error("KV offloading is OFF until %s is over; trying again in %d s", error, RETRY_S)
            return None
        except Exception:
            self.give_up()
            logger.exception("KV offloading to disk is OFF: the store could not be opened")
            return None
        self.give_up()
        return service

    def give_up(self) -> None:
        """It will not be opened (again)."""
        self._open_service = None
