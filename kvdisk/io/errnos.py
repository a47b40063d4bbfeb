"""What an errno of the disk means, in one table.

What an errno means:

    RETRY        EAGAIN EINTR EBUSY ENOMEM ECANCELED        again, a bounded number of times, waiting longer each time
    UNSUPPORTED  EINVAL EOPNOTSUPP ENOTSUP                  direct I/O refused: buffered from now on, again once
    NO_SPACE     ENOSPC EDQUOT EFBIG                        OSError; the owner evicts
    GONE         ENOENT EBADF ESTALE ENODEV ENXIO ENOTCONN  OSError; the file or its disk is gone
    BROKEN       EIO and everything else                    OSError
"""

import errno
from enum import Enum
from typing import Final


class Meaning(Enum):
    """What to do about an errno; see the module's text."""

    RETRY = "retry"
    UNSUPPORTED = "unsupported"
    NO_SPACE = "no space"
    GONE = "gone"
    BROKEN = "broken"


_MEANINGS: Final = {
    errno.EAGAIN: Meaning.RETRY,
    errno.EINTR: Meaning.RETRY,
    errno.EBUSY: Meaning.RETRY,
    errno.ENOMEM: Meaning.RETRY,
    errno.ECANCELED: Meaning.RETRY,
    errno.EINVAL: Meaning.UNSUPPORTED,
    errno.EOPNOTSUPP: Meaning.UNSUPPORTED,
    errno.ENOTSUP: Meaning.UNSUPPORTED,
    errno.ENOSPC: Meaning.NO_SPACE,
    errno.EDQUOT: Meaning.NO_SPACE,
    errno.EFBIG: Meaning.NO_SPACE,
    errno.ENOENT: Meaning.GONE,
    errno.EBADF: Meaning.GONE,
    errno.ESTALE: Meaning.GONE,
    errno.ENODEV: Meaning.GONE,
    errno.ENXIO: Meaning.GONE,
    errno.ENOTCONN: Meaning.GONE,
}


def classify(code: int | None) -> Meaning:
    """What the errno of a read, a write or a file call means; see the module's text."""
    return _MEANINGS.get(code or 0, Meaning.BROKEN)
