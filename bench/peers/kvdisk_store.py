"""kvdisk itself. Arguments: on or off (checksums), an engine, and "process" or "thread" for the data plane."""

import sys
from pathlib import Path
from typing import Any

from peer import BUFFER_BYTES, Peer, serve

from kvdisk.cli.bench_workload import Setup, Workload, cpu_of


class KVDisk(Peer):
    """The workload of `kvdisk bench`: a request alone is one job, 32 at once are 32."""

    def prepare(self, case: dict[str, Any]) -> None:
        jobs = case["requests"]
        self.fresh = case["fresh"]
        self._root = Path(case["directory"])
        self._root.mkdir(parents=True, exist_ok=True)
        self._setup = Setup(
            bs=case["bs"],
            size=max(case["bs"], case["total"] // jobs),
            numjobs=jobs,
            engine=sys.argv[2],
            checksums=sys.argv[1] == "on",
            pages=case["pages"],
            arena_bytes=BUFFER_BYTES,
            segment_bytes=128 << 20,
            data_plane=sys.argv[3],
        )
        self._workload = Workload(self._root, self._setup)
        if not self.fresh:
            self._workload.recycle_all()

    def before(self, op: str) -> None:
        if op == "store" and self.fresh and self._workload.written:
            self._workload.close()
            self._workload = Workload(self._root, self._setup)

    def move(self, op: str) -> None:
        workload, jobs = self._workload, self._setup.numjobs
        if op not in ("store", "load"):
            raise ValueError(f"no operation {op!r}")
        depth = 0 if jobs == 1 else max(1, (16 << 20) // self._setup.bs)
        if op == "store":
            result = workload.run(workload.writers(depth))["write"]
        else:
            result = workload.run(workload.readers(depth))["read"]
        assert not result.errors, f"{result.errors} chunks failed"
        assert result.bytes == self._setup.chunk_count * self._setup.bs

    def cpu(self) -> float:
        return sum(cpu_of(self._workload.plane_pid))

    def close(self) -> None:
        self._workload.close()


serve(KVDisk())
