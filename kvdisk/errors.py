"""Whose fault it was: the caller's is `ValueError`, ours is `assert`, the world's is one of these or `OSError`."""


class KVDiskError(Exception):
    """Base of the errors kvdisk raises on purpose."""


class StoreClosedError(KVDiskError):
    """The store was used after `close()`."""


class DirectoryInUseError(KVDiskError):
    """Another live process owns the directory; its name and pid are in the message."""


class EngineUnavailableError(KVDiskError):
    """An I/O engine cannot run here (no io_uring, or forbidden); the message names the cause and the remedy."""


class PlaneUnavailableError(KVDiskError):
    """The data plane could not be started in a process of its own; the message says why."""


class RendezvousError(KVDiskError):
    """Worker ranks did not hand over their shares in time, or disagree on the layout."""
