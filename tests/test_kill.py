"""kill -9 at any moment: what was flushed is found by the next process, and nothing is ever wrong.

The child stores values that follow from their keys and says on its standard output what is flushed. It is killed after
a time drawn from the seed, and the next child checks everything before it goes on in the same directory.
"""

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvdisk

ROUNDS = 25

CHILD = """
import asyncio, os, random, sys
import kvdisk

root, engine, seed, expected = sys.argv[1], sys.argv[2], int(sys.argv[3]), set(sys.argv[4].split(",")) - {""}


def value(key):
    return random.Random(key).randbytes(500 + int(key) % 60_000)


async def main():
    async with kvdisk.open(root, capacity="9MiB", arena_bytes="4MiB", segment_bytes="1MiB", engine=engine) as store:
        hits = 0
        for key in map(str, range(max([0, *map(int, expected)]) + 200)):
            found = await store.get(key.encode())
            assert found is None or found == value(key), f"wrong bytes under {key}"
            assert found is not None or key not in expected, f"{key} was flushed and is gone"
            hits += found is not None
        print("hits", hits, flush=True)
        number = seed * 1000
        while True:
            keys = [str(number + n) for n in range(5)]
            for key in keys:
                await store.put(key.encode(), value(key))
            if await store.flush():
                print("flushed", *keys, flush=True)
            number += 5

asyncio.run(main())
"""


def start(root: Path, engine: str, seed: int, expected: list[str]) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "PYTHONPATH": str(Path(kvdisk.__file__).parents[1])}
    command = [sys.executable, "-c", CHILD, str(root), engine, str(seed), ",".join(expected)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("engine", ["auto", "posix"])
def test_what_was_flushed_before_kill_9_hits_afterwards_and_nothing_is_wrong(tmp_path: Path, engine: str) -> None:
    tmp_path.chmod(0o700)
    chance = random.Random(ROUNDS)
    flushed: list[str] = []
    hits = 0
    for seed in range(ROUNDS):
        # The newest half of the capacity cannot have been evicted: a batch has 150 KB at most.
        child = start(tmp_path, engine, seed, flushed[-60:])
        assert child.stdout is not None
        assert child.stderr is not None
        first = child.stdout.readline().split()
        if not first:
            raise AssertionError(f"seed {seed}: {child.stderr.read().decode()}")
        assert first[0] == b"hits"
        hits += int(first[1])
        end = time.monotonic() + chance.random() * 0.12
        while (left := end - time.monotonic()) > 0:
            select.select([], [], [], left)
        child.send_signal(signal.SIGKILL)
        said, complained = child.communicate()
        assert child.returncode == -signal.SIGKILL, f"seed {seed}: {complained.decode()}"
        for line in said.decode().splitlines():
            if line.startswith("flushed") and len(line.split()) == 6:
                flushed += line.split()[1:]
    assert len(flushed) > ROUNDS
    assert hits > ROUNDS
