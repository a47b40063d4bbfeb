"""Handing shares from the workers to the scheduler's process, which starts minutes later and may find some dead.

A worker `offer`s its share; the manager `collect`s one of every rank, a rank without units `find`s another rank's. In
one process that is a dictionary. Between processes a daemon thread of the worker serves the share's memfd over a unix
socket in a runtime directory of the user, so that nothing lies in /dev/shm to leak, or to overflow it in containers:

    $XDG_RUNTIME_DIR or the temp dir / kvdisk-<uid> / <engine>-<rank>-<pid>-<start>-<pidns>.sock

`engine` is a hash of the engine's id, pid and start time name the process for good (pids return), and `pidns` is its
pid namespace: only within one's own can a pid be called dead, and its socket be removed.

What must hold: the directory and every peer are the user's own. The directory is opened without following links, its
owner and mode are checked on the descriptor, and all names are reached through that descriptor (/proc/self/fd), which
also keeps them under the 108 bytes of `sun_path`. A forked child owns nothing of its parent's offers: neither sockets
nor private memory are its to serve.

What can fail: ranks that never come, or that disagree. Both are `RendezvousError`; everything else that goes wrong
with one peer (it dies, it is stale, it talks nonsense) is waited out until the deadline, and then reported.
"""

import atexit
import contextlib
import hashlib
import logging
import os
import re
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvdisk.errors import RendezvousError
from kvdisk.processes import ProcessName, this_process
from kvdisk.vllm.share import Share

logger = logging.getLogger("kvdisk")

_GREETING: Final = b"kvdisk share 1\n"
_NAME: Final = re.compile(r"([0-9a-f]{16})-(\d{1,9})-(\d{1,9})-(\d{1,19})-(\d{1,19})\.sock")
_PEER: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid
_PEER_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.02  # between looks at the directory; the ranks come at different times


class _Offer(NamedTuple):
    """One socket in the directory, by its name."""

    name: str
    engine: str
    rank: int
    pid: int
    start: int
    pid_namespace: int


class _Server:
    """Serves one share of this process to whoever of the same user connects."""

    def __init__(self, directory: int, name: str, share: Share) -> None:
        self.share = share
        self._directory = directory
        self._name = name
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)  # an earlier offer's, of this very process
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(_reach(directory, name))
            self._socket.listen(16)
        except OSError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="kvdisk-rendezvous", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return  # closed
            # One peer's trouble must not end the service for the others.
            with contextlib.suppress(OSError), peer:
                peer.settimeout(_PEER_TIMEOUT_S)
                fd = self.share.fd
                if _peer(peer)[1] == os.geteuid() and fd is not None:
                    socket.send_fds(peer, [_GREETING], [fd])

    def close(self) -> None:
        """Stop serving; idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._socket.close()
        self._thread.join(_PEER_TIMEOUT_S)
        with contextlib.suppress(OSError):
            os.unlink(self._name, dir_fd=self._directory)
        with contextlib.suppress(OSError):
            os.close(self._directory)

    def forget(self) -> None:
        """In a forked child: close the descriptors, leave the parent's name alone."""
        self._socket.close()
        with contextlib.suppress(OSError):
            os.close(self._directory)


_lock = threading.Lock()
_shares: dict[tuple[str, int], Share] = {}
_servers: dict[tuple[str, int], _Server] = {}


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # the parent's may have been held
    _shares.clear()
    for server in _servers.values():
        server.forget()
    _servers.clear()


def _remove_sockets() -> None:
    for server in _servers.values():
        server.close()
    _servers.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_remove_sockets)  # for tidiness; who is killed leaves a name behind, and the next offer removes it


def offer(engine_id: str, share: Share, *, elsewhere: bool = True) -> None:
    """Offer this process's share of `engine_id`; a share with a memfd also to other processes, unless all are in this.

    A later offer of the same engine and rank replaces the earlier one (elastic scaling). Whoever attached the earlier
    one keeps it.

    Raises:
        RendezvousError: no directory for the socket, or one that is not safe; the message names it and the remedy.
    """
    key = engine_id, share.rank
    with _lock:
        server = _servers.pop(key, None)
        if server is not None:
            server.close()
        _shares[key] = share
        if share.fd is not None and elsewhere:
            directory = _open_directory()
            try:
                _remove_stale(directory)
                _servers[key] = _Server(directory, _socket_name(engine_id, share), share)
            except OSError as error:
                os.close(directory)
                raise RendezvousError(f"cannot offer rank {share.rank}'s share on a unix socket: {error}") from error


def withdraw(engine_id: str, share: Share) -> None:
    """Take back an offer. Nothing happens if another one replaced it already."""
    key = engine_id, share.rank
    with _lock:
        if _shares.get(key) is share:
            del _shares[key]
            server = _servers.pop(key, None)
            if server is not None:
                server.close()


def collect(engine_id: str, world_size: int, timeout_s: float) -> list[Share]:
    """The shares of all ranks, in order of rank, checked against each other.

    Raises:
        RendezvousError: ranks missing after `timeout_s`, or ranks that disagree (both are named, and the field).
    """
    shares = _await_ranks(engine_id, range(world_size), timeout_s)
    for share in shares:
        if share.geometry.world_size != world_size:
            raise RendezvousError(
                f"rank {share.rank} works in a world of {share.geometry.world_size}, the scheduler's has {world_size}"
            )
        shares[0].geometry.check_agrees(share.geometry)
    return shares


def find(engine_id: str, rank: int, timeout_s: float) -> Share:
    """One rank's share: for ranks that load from another rank's units.

    Raises:
        RendezvousError: it is not offered within `timeout_s`.
    """
    return _await_ranks(engine_id, [rank], timeout_s)[0]


def _await_ranks(engine_id: str, ranks: Sequence[int], timeout_s: float) -> list[Share]:
    deadline = time.monotonic() + timeout_s
    found: dict[int, Share] = {}
    trouble: dict[int, str] = {}
    while True:
        for rank in ranks:
            if rank not in found:
                share = _shares.get((engine_id, rank)) or _find_elsewhere(engine_id, rank, trouble)
                if share is not None:
                    found[rank] = share
        missing = [rank for rank in ranks if rank not in found]
        if not missing:
            return [found[rank] for rank in ranks]
        if time.monotonic() >= deadline:
            raise RendezvousError(_describe_missing(missing, len(ranks), timeout_s, trouble))
        time.sleep(_POLL_S)


def _describe_missing(missing: Sequence[int], wanted: int, timeout_s: float, trouble: dict[int, str]) -> str:
    reasons = "".join(f" Rank {rank}: {trouble[rank]}." for rank in missing if rank in trouble)
    return (
        f"ranks {', '.join(map(str, missing))} of {wanted} handed over no memory within {timeout_s:g} s.{reasons} "
        f"Possible causes: the worker died; it runs on another host (tensor or pipeline parallelism over several "
        f"nodes, Ray across nodes), which cannot share memory with the scheduler's; it runs as another user, in "
        f"another container, or with another XDG_RUNTIME_DIR or TMPDIR (searched: {', '.join(_candidates())})"
    )


def _find_elsewhere(engine_id: str, rank: int, trouble: dict[int, str]) -> Share | None:
    """Attach the newest live offer of another process; None, with the reason in `trouble`, if there is none."""
    for path in _candidates():
        try:
            directory = _open_checked(path)
        except (OSError, RendezvousError):
            continue
        with _closing(directory):
            offers = [one for one in _list(directory) if (one.engine, one.rank) == (_hash(engine_id), rank)]
            for one in sorted(offers, key=lambda one: one.start, reverse=True):
                if _is_dead(one):
                    trouble[rank] = f"the worker (pid {one.pid}) died after it had offered its share"
                    continue
                try:
                    return _attach(directory, one)
                except (OSError, ValueError) as error:
                    trouble[rank] = f"pid {one.pid} offered a share that cannot be taken: {error}"
    return None


def _attach(directory: int, one: _Offer) -> Share:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(_PEER_TIMEOUT_S)
        peer.connect(_reach(directory, one.name))
        _, uid, _ = _peer(peer)
        if uid != os.geteuid():
            raise ValueError(f"its socket is served by uid {uid}")
        greeting, fds, _, _ = socket.recv_fds(peer, len(_GREETING), 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if greeting != _GREETING or len(fds) != 1:
            raise ValueError(f"it answered {greeting!r} with {len(fds)} descriptors")
        share = Share.attach(fds[0])
    finally:
        for fd in fds:
            os.close(fd)
    if share.rank != one.rank:
        raise ValueError(f"it is the share of rank {share.rank}")
    return share


# The directory and the names in it


def _candidates() -> list[str]:
    """Where sockets may lie, best first. Worker and scheduler may see different environments: all are searched."""
    parents = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()]
    return list(dict.fromkeys(os.path.join(parent, f"kvdisk-{os.geteuid()}") for parent in parents if parent))


def _open_directory() -> int:
    """Descriptor of the first directory that exists or can be made."""
    problems = []
    for path in _candidates():
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            return _open_checked(path)
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
    raise RendezvousError(f"no directory for the workers' sockets ({'; '.join(problems)}); set XDG_RUNTIME_DIR to one")


def _open_checked(path: str) -> int:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(directory)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(directory)
        raise RendezvousError(
            f"{path} belongs to uid {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}; it must be this "
            f"user's alone, or others could hand in memory of theirs: remove it, or chmod 0700 it if it is yours"
        )
    return directory


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)


def _reach(directory: int, name: str) -> str:
    return f"/proc/self/fd/{directory}/{name}"


def _hash(engine_id: str) -> str:
    return hashlib.sha256(engine_id.encode()).hexdigest()[:16]


def _socket_name(engine_id: str, share: Share) -> str:
    me = this_process()
    return f"{_hash(engine_id)}-{share.rank}-{me.pid}-{me.start}-{me.namespace}.sock"


def _list(directory: int) -> Iterator[_Offer]:
    for name in os.listdir(directory):
        match = _NAME.fullmatch(name)
        if match:
            rank, pid, start, pid_namespace = map(int, match.groups()[1:])
            yield _Offer(name, match[1], rank, pid, start, pid_namespace)


def _is_dead(one: _Offer) -> bool:
    """Whether its process is surely gone; another pid namespace's cannot be judged and is left alone."""
    return ProcessName(one.pid, one.start, one.pid_namespace).is_dead


def _remove_stale(directory: int) -> None:
    for one in _list(directory):
        if _is_dead(one):
            logger.debug("removing the socket of a dead worker: %s", one.name)
            with contextlib.suppress(OSError):
                os.unlink(one.name, dir_fd=directory)


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process at the other end, by the kernel's word."""
    return _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
