"""What a reset of vLLM's caches means here: stored bytes are stale, and slots in use stay in use for a while.

vLLM resets when weights change, or the engine sleeps. It then forgets the transfers under way, but its workers still
carry them out: their slots are in quarantine until every rank says that the job has ended.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvdisk.resident import Resident
from kvdisk.service import Service
from kvdisk.vllm.share import TICKETS, Share

logger = logging.getLogger("kvdisk")

DURABLE_S_MAX = 10.0


def declare_stale(service: Service) -> None:
    """Nothing stored so far is used again, now or after a restart. Blocks until that is durable, a while at most."""
    is_durable = False
    try:
        service.store.reset()
        is_durable = service.write_epoch_now(DURABLE_S_MAX)
    finally:
        if not is_durable:
            logger.error(
                "the reset is not durable: remove %s before a restart, or stale KV may be served",
                ", ".join(service.instance_paths),
            )


class _Transfer(NamedTuple):
    """A transfer that vLLM has forgotten. stored: slots being filled. loaded: slots being read."""

    ticket: int
    stored: Sequence[Resident]
    loaded: Sequence[Resident]


class Quarantine:
    """Slots of transfers that vLLM has forgotten.

    Args:
        shares: of all ranks; `home` are those with units: only these are written to by stores.
        abandon: gives back a slot that was being filled.
        let_go: gives back a slot that was being read.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        home: Sequence[Share],
        abandon: Callable[[Resident], None],
        let_go: Callable[[Resident], None],
    ) -> None:
        self._shares = shares
        self._home = home
        self._abandon = abandon
        self._let_go = let_go
        self._transfers: list[_Transfer] = []

    def __len__(self) -> int:
        return len(self._transfers)

    def put(self, ticket: int, *, stored: Sequence[Resident] = (), loaded: Sequence[Resident] = ()) -> None:
        """Keep the slots of one transfer."""
        self._transfers.append(_Transfer(ticket, stored, loaded))
        assert len(self._transfers) < TICKETS

    def release(self, *, flushed: bool = False) -> None:
        """Give back the slots of transfers that every rank has ended, or of all of them (`flushed`)."""
        kept = []
        for transfer in self._transfers:
            shares = self._shares if transfer.loaded else self._home
            if not flushed and not all(share.has_ended(transfer.ticket) for share in shares):
                kept.append(transfer)
                continue
            for resident in transfer.stored:
                self._abandon(resident)
            for resident in transfer.loaded:
                self._let_go(resident)
        self._transfers = kept
