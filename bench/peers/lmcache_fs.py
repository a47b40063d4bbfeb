"""LMCache's C++ file client, one file a chunk, O_DIRECT, 16 workers. Argument: the folder of its unpacked wheel."""

import glob
import importlib.util
import os
import select
import sys
from typing import Any

import torch  # noqa: F401 - loads the libraries that the extension is linked against
from peer import Peer, serve, truncate_all

(BINARY,) = glob.glob(f"{sys.argv[1]}/lmcache/lmcache_fs*.so")
SPEC = importlib.util.spec_from_file_location("lmcache_fs", BINARY)
assert SPEC is not None
assert SPEC.loader is not None
lmcache_fs: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(lmcache_fs)


class FileClient(Peer):
    """All batches submitted at once, 32 keys each or fewer where that would leave workers idle."""

    many_files = True

    def open(self) -> None:
        self._pass = 0
        self._client: Any = None

    def before(self, op: str) -> None:
        if op == "store":
            self.close_client()
            self._pass += 1
            folder = f"{self.directory}/{self._pass}"
            os.makedirs(folder)
            self._client = lmcache_fs.LMCacheFSClient(folder, 16, "", True, 0)

    def move(self, op: str) -> None:
        client = self._client
        call = client.submit_batch_set if op == "store" else client.submit_batch_get
        keys = max(1, min(32, self.chunk_count // 64))
        pending = set()
        for at in range(0, self.chunk_count, keys):
            chunks = range(at, min(at + keys, self.chunk_count))
            pending.add(call([f"model@00000000@0@{c:064x}" for c in chunks], [self.slot(c) for c in chunks]))
        descriptor = client.event_fd()
        while pending:
            assert select.select([descriptor], [], [], 30)[0], "no completion within 30 s"
            for done in client.drain_completions():
                assert done[1], done[2]
                pending.discard(done[0])

    def close_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def close(self) -> None:
        self.close_client()
        truncate_all(self.directory)


serve(FileClient())
