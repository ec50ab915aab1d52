"""The example of docs/python.md: two groups in order, the second one durable.

Usage: example.py VOLUME MEMBER...
"""

import sys

import riopipe
from riopipe import Place


def main(name: str, members: list[str]) -> None:
    with riopipe.open(name, members, wait_for_lease=60) as volume:
        print(volume.recovery)
        with volume.stream(0) as stream:
            # Two groups in order: the commit is there only if the record is. Neither submission waits for an answer.
            record = stream.buf()
            with memoryview(record) as memory:
                memory[:] = b"r" * riopipe.BLOCK_BYTES
            stream.group().write(0, record, Place.FRESH).submit()  # takes `record`

            with stream.group(durable=True) as group:
                group.write(1, b"c" * riopipe.BLOCK_BYTES, Place.FRESH).tag(1)  # copies the bytes

            print(f"durable up to group {stream.wait_durable(group.seq).durable}")
            blocks = stream.read(0, 2)
            print(f"read back: {chr(blocks[0])}{chr(blocks[riopipe.BLOCK_BYTES])}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
