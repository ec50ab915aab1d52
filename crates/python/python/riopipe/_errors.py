"""The exceptions of riopipe. Each has the code of the C interface."""

import enum


class Code(enum.IntEnum):
    """Why a call failed: ``Code.FULL`` is ``RIOP_FULL`` of ``riopipe.h``. A code keeps its number and its meaning."""

    OK = 0
    OTHER = 1
    ARGUMENT = 2
    HANDLE = 3
    BUSY = 4
    PANIC = 5
    ADDRESS = 6
    OPTION = 7
    NOT_FOUND = 8
    UNREACHABLE = 9
    PROTOCOL = 10
    REFUSED = 11
    RESOURCES = 12
    MEMBERS = 13
    DRIVE = 14
    OWNED = 15
    LOG = 16
    ENGINE = 17
    RECOVERY = 18
    PENDING = 19
    NOT_PENDING = 20
    STREAM_OPEN = 21
    STREAMS_OPEN = 22
    FULL = 23
    TOO_LARGE = 24
    EMPTY = 25
    RANGE = 26
    FOLLOWER = 27
    VIOLATION = 28
    FAILED = 29
    HEALTHY = 30
    TIMEOUT = 31
    WOKEN = 32
    NOT_SUBMITTED = 33
    CLOSED = 34
    READ = 35
    CANCELLED = 36
    AUTHENTICATION = 37


class Members(enum.IntEnum):
    """Why the members do not make the volume: ``Members.ORDER`` is ``RIOP_MEMBERS_ORDER`` of ``riopipe.h``."""

    OTHER = 0
    BLANK = 1
    NAME = 2
    FOREIGN = 3
    ORDER = 4
    COUNT = 5
    LABEL = 6
    LOG = 7
    TWICE = 8
    AMBIGUOUS = 9


class Error(Exception):
    """A call failed. The text is what failed, where, and what to do."""

    code: Code
    #: The same call may succeed later, if only time passes.
    retryable: bool
    #: The stream has failed, and ``Stream.reopen`` may restart it.
    can_reopen: bool
    #: The reason if the code is ``Code.MEMBERS``.
    members: Members

    def __init__(
        self, code: int, text: str, retryable: bool = False, can_reopen: bool = False, members: int = 0
    ) -> None:
        super().__init__(text)
        # A later library may have more codes.
        known = code in Code._value2member_map_
        self.code = Code(code) if known else Code.OTHER
        self.retryable = retryable
        self.can_reopen = can_reopen
        self.members = Members(members) if members in Members._value2member_map_ else Members.OTHER

    def __reduce__(self) -> tuple[type, tuple[int, str, bool, bool, int]]:
        return type(self), (int(self.code), str(self), self.retryable, self.can_reopen, int(self.members))


class Timeout(Error, TimeoutError):
    """The time limit has passed. The object is as before."""


class Full(Error):
    """There is no space for the group now. It is as before, and can be submitted again."""


class StreamFailed(Error):
    """The stream has failed. If ``can_reopen``, ``Stream.reopen`` may restart it."""


class Owned(Error):
    """The volume has an owner."""


class Busy(Error):
    """Another thread is using the object."""


class Closed(Error, ValueError):
    """The object was closed, or the buffer was written."""


class Woken(Error):
    """Another thread has interrupted the wait."""


class Unreachable(Error, ConnectionError):
    """A target can't be reached, or does not answer."""


_CLASSES: dict[int, type[Error]] = {
    Code.TIMEOUT: Timeout,
    Code.FULL: Full,
    Code.FAILED: StreamFailed,
    Code.OWNED: Owned,
    Code.BUSY: Busy,
    Code.CLOSED: Closed,
    Code.WOKEN: Woken,
    Code.UNREACHABLE: Unreachable,
}


def make(code: int, text: str, retryable: bool, can_reopen: bool, members: int) -> Error:
    """The exception of a failure. The module calls it."""
    return _CLASSES.get(code, Error)(code, text, retryable, can_reopen, members)
