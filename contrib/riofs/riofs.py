# SPDX-License-Identifier: MIT OR Apache-2.0
"""Calls of RioFS that other file systems do not have: order without waiting.

riofs.h beside this file explains them. Copy this file beside a program.

    import os, riofs

    os.write(log, record)
    riofs.fdatabarrier(log)         # waits for no drive
    os.pwrite(table, page, offset)
    os.fdatasync(table)             # the table is durable, so the log is, too

Each call takes a descriptor or a file object, and returns

    True    RioFS has done it.
    False   It is not RioFS, or the kernel is older than 6.16. The file was made durable instead, by
            fsync, fdatasync or syncfs: the order is the same, and the call has waited.

They raise OSError as os.fsync does. What a file object has buffered is not written: flush() it
before.
"""

import ctypes
import errno
import fcntl
import os
import re

IOC_BARRIER = 0x72A0
IOC_DATA_BARRIER = 0x72A1
IOC_SYNCFS = 0x72A2

__all__ = ["fbarrier", "fdatabarrier", "syncfs", "IOC_BARRIER", "IOC_DATA_BARRIER", "IOC_SYNCFS"]

_UNKNOWN = (errno.ENOTTY, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
# SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE and _WAIT_AFTER
_WRITE_AND_WAIT = 1 | 2 | 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_libc.syncfs.argtypes = [ctypes.c_int]


def fbarrier(file):
    """A barrier for a file: its data, its fields and its names. Without RioFS: fsync."""
    return _barrier(_fd(file), IOC_BARRIER, os.fsync)


def fdatabarrier(file):
    """A barrier for the data of a file. Without RioFS: fdatasync."""
    return _barrier(_fd(file), IOC_DATA_BARRIER, os.fdatasync)


def syncfs(file):
    """Makes the file system of an open file durable, and waits for it.

    Pages of other files that were changed through mappings need their own flush() before.
    """
    fd = _fd(file)
    _check(_libc.syncfs(fd))
    # It writes changed pages on any version of the kernel.
    os.fsync(fd)
    return _command(fd, IOC_SYNCFS)


def _fd(file):
    return file if isinstance(file, int) else file.fileno()


def _barrier(fd, command, sync):
    if _pages_can_be_written():
        try:
            _check(_libc.sync_file_range(fd, 0, 0, _WRITE_AND_WAIT))
            if _command(fd, command):
                return True
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
    sync(fd)
    return False


def _command(fd, command):
    try:
        fcntl.ioctl(fd, command)
    except OSError as error:
        if error.errno in _UNKNOWN:
            return False
        raise
    return True


def _check(returned):
    if returned != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _pages_can_be_written():
    """Whether sync_file_range waits until a FUSE file system has the pages: since Linux 6.16."""
    numbers = [int(number) for number in re.findall(r"\d+", os.uname().release)[:2]]
    return numbers >= [6, 16]
