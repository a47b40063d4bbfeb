"""NIXL's POSIX plugin on one preallocated file. Argument: uring or aio."""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from nixl_cu12._api import nixl_agent, nixl_agent_config
from peer import Peer, raw_file, serve

POLL_S = 100e-6


class Nixl(Peer):
    """A transfer a batch; polled, for the agent has no other way to wait."""

    batch_bytes = 8 << 20
    depth = 4

    def __init__(self) -> None:
        super().__init__()
        queue = sys.argv[1]
        self._agent = nixl_agent(f"bench_{queue}", nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._agent.create_backend("POSIX", {f"use_{queue}": "true"})

    def open(self) -> None:
        self._fd = os.open(raw_file(self), os.O_RDWR | os.O_DIRECT)
        self._memory = self._agent.register_memory([(self.address, len(self.view), 0, "")], "DRAM")
        self._file = self._agent.register_memory([(0, self.total, self._fd, "")], "FILE")

    def before(self, op: str) -> None:
        if op == "store" and self.fresh:  # over blocks that were never written, each time
            self.close()
            self.open()

    def submit(self, op: str, chunks: Sequence[int]) -> Any:
        agent, bs = self._agent, self.bs
        here = agent.get_xfer_descs([(self.address + c % self.slot_count * bs, bs, 0) for c in chunks], "DRAM")
        there = agent.get_xfer_descs([(c * bs, bs, self._fd) for c in chunks], "FILE")
        handle = agent.initialize_xfer("WRITE" if op == "store" else "READ", here, there, agent.name)
        assert agent.transfer(handle) != "ERR"
        return handle

    def wait(self, handle: Any) -> None:
        while (state := self._agent.check_xfer_state(handle)) != "DONE":
            assert state == "PROC", state
            time.sleep(POLL_S)
        handle.release()

    def close(self) -> None:
        self._agent.deregister_memory(self._memory)
        self._agent.deregister_memory(self._file)
        os.close(self._fd)


serve(Nixl())
