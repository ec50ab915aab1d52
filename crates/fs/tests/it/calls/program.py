"""Makes all calls of riofs.py in the directory of its argument, and prints what they return."""

import errno
import mmap
import os
import sys

import riofs

os.chdir(sys.argv[1])
a = open("a", "wb+")
a.truncate(8192)
b = os.open("b", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
pages = mmap.mmap(a.fileno(), 8192)
pages[4090:4100] = b"by mapping"
first = riofs.fbarrier(a)
os.write(b, b"b")
done = [first, riofs.fdatabarrier(b), riofs.syncfs(b)]
try:
    riofs.fbarrier(-1)
except OSError as error:
    bad = error.errno == errno.EBADF
print(*("0" if by_riofs else "1" for by_riofs in done), "EBADF" if bad else "?")
