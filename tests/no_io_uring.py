"""Makes io_uring system calls of this process fail with EPERM, as under Docker's default seccomp profile."""

import ctypes
import errno
import os
import struct

# <linux/filter.h>, <linux/seccomp.h>, <linux/prctl.h>; setup, enter, register have the same numbers everywhere.
_IO_URING_FIRST, _IO_URING_LAST = 425, 427
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_GE, _JUMP_GT, _RETURN = 0x20, 0x35, 0x25, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def forbid() -> None:
    """From now on, for this process, its threads to come and its children; it cannot be undone."""
    steps = [
        (_LOAD, 0, 0, 0),
        (_JUMP_GE, 0, 2, _IO_URING_FIRST),
        (_JUMP_GT, 1, 0, _IO_URING_LAST),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(steps), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    refused = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program)
    )
    if refused:
        code_ = ctypes.get_errno()
        raise OSError(code_, f"seccomp filter refused: {os.strerror(code_)}")
