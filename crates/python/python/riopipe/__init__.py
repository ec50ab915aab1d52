"""Ordered volumes over NVMe/TCP.

A volume spans drives on one or several targets. A stream of it takes groups of writes. Groups are ordered; the writes
inside one group are not. After a crash the volume holds, for each stream, every group up to some group, and no fresh block
of a later one. docs/python.md of the project is the introduction.
"""

import enum
import json
from collections.abc import Sequence
from typing import Any

from . import _riopipe
from ._errors import Busy, Closed, Code, Error, Full, Members, Owned, StreamFailed, Timeout, Unreachable, Woken
from ._riopipe import (
    BLOCK_BYTES,
    Buf,
    ConnectOptions,
    Group,
    Marks,
    ReadEnd,
    Reader,
    Recovery,
    Stream,
    StreamRecovery,
    Volume,
    VolumeInfo,
    Waker,
    Watch,
    __version__,
    create,
    delete,
    inspect,
)

__all__ = [
    "BLOCK_BYTES", "Buf", "Busy", "Closed", "Code", "ConnectOptions", "Error", "Full", "Group", "Marks", "Members",
    "Owned", "Place", "ReadEnd", "Reader", "Recovery", "Stream", "StreamFailed", "StreamRecovery", "Timeout",
    "Unreachable", "Volume", "VolumeInfo", "Waker", "Watch", "Woken", "__version__", "create", "delete", "inspect", "list_volumes", "open",
    "stat",
]


class Place(enum.StrEnum):
    """Whether the old content of a write's blocks is still needed (docs/ordering-contract.md, trap T11)."""

    FRESH = "fresh"  #: No state to which the volume may still recover needs the old content.
    IN_PLACE = "in_place"  #: It may be needed.
    EXTEND = "extend"  #: For each of these states, the new content serves as well as the old.


open = Volume.open


def list_volumes(members: Sequence[str], *, connect: ConnectOptions | None = None) -> Any:
    """Lists the volumes on the targets of the members: the object of ``rio volume list -o json``."""
    return json.loads(_riopipe.list_json(members, connect=connect))


def stat(volume: Volume) -> Any:
    """The figures of an open volume: the object of ``rio volume stat -o json``."""
    return json.loads(volume.stat_json())
