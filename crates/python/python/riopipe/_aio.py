"""Waits of asyncio."""

import asyncio

from ._riopipe import Marks, MarkWait


async def wait(mark_wait: MarkWait) -> Marks:
    """Waits without a thread: the loop watches a descriptor that is readable when the mark has moved."""
    marks = mark_wait.poll()
    if marks is not None:
        return marks
    loop = asyncio.get_running_loop()
    moved = asyncio.Event()
    loop.add_reader(mark_wait.fileno(), moved.set)
    try:
        while (marks := mark_wait.poll()) is None:
            await moved.wait()
            moved.clear()
        return marks
    finally:
        loop.remove_reader(mark_wait.fileno())
