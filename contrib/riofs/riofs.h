/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Calls of RioFS that other file systems do not have: order without waiting.
 *
 *     #include "riofs.h"
 *
 *     write(log, ...);
 *     if (riofs_fdatabarrier(log) < 0)     // waits for no drive
 *         err(1, "log");
 *     pwrite(table, ...);
 *     if (fsync(table) < 0)                // the table is durable, so the log is, too
 *         err(1, "table");
 *
 * Every call returns
 *
 *      0  RioFS has done it.
 *      1  It is not RioFS, or the kernel is too old (below). The file was made durable instead, by
 *         fsync, fdatasync or syncfs: the order is the same, and the call has waited.
 *     -1  It failed, and errno has the reason, as after fsync. Nothing is known about the order.
 *
 * A barrier orders a file: all that was written to it before is durable before
 *
 *   - any later change of any file that a later call makes durable, and
 *   - later writes of this file.
 *
 * "Later" means after the barrier has returned. A barrier makes nothing durable: after a crash the
 * file may have its old content, and then nothing that came after the barrier is there.
 *
 * Mapped files: what was changed through a shared mapping is in the kernel, and an ioctl does not
 * write it to RioFS. So the barriers first write the changed pages (sync_file_range), and wait until
 * RioFS has them; that is no wait for a drive. Before Linux 6.16, sync_file_range does not wait
 * until a FUSE file system has the pages, so the barriers use fsync and return 1. A program that
 * never changes files through mappings needs none of that, on any kernel:
 *
 *     ioctl(fd, RIOFS_IOC_BARRIER)         // ENOTTY: not RioFS
 *
 * Needs Linux, and _GNU_SOURCE before the first header (C++ has it).
 */
#ifndef RIOFS_H
#define RIOFS_H

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/utsname.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Orders the data of a file, its fields (such as its times) and the names that lead to it. */
#define RIOFS_IOC_BARRIER 0x72a0
/* Orders the data of a file and the fields that are needed to read it, as fdatasync. */
#define RIOFS_IOC_DATA_BARRIER 0x72a1
/* Makes the whole file system durable. */
#define RIOFS_IOC_SYNCFS 0x72a2

/* Whether sync_file_range waits until a FUSE file system has the pages: since Linux 6.16. */
static inline int riofs_pages_can_be_written_(void)
{
	static int known; /* 0: not yet, 1: no, 2: yes; threads may all set it to the same value */
	int can = __atomic_load_n(&known, __ATOMIC_RELAXED);
	if (can == 0) {
		struct utsname name;
		long major = 0, minor = 0;
		if (uname(&name) == 0) {
			char *end;
			major = strtol(name.release, &end, 10);
			minor = *end == '.' ? strtol(end + 1, &end, 10) : 0;
		}
		can = major > 6 || (major == 6 && minor >= 16) ? 2 : 1;
		__atomic_store_n(&known, can, __ATOMIC_RELAXED);
	}
	return can == 2;
}

/* Whether an ioctl has failed because it is not known. */
static inline int riofs_is_unknown_(int error)
{
	return error == ENOTTY || error == ENOSYS || error == EINVAL || error == EOPNOTSUPP;
}

static inline int riofs_barrier_(int fd, unsigned long command, int (*sync)(int))
{
	/* Without a way to write the pages first there is only fsync, which does it itself. */
	if (riofs_pages_can_be_written_()) {
		unsigned flags = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
				 SYNC_FILE_RANGE_WAIT_AFTER;
		if (sync_file_range(fd, 0, 0, flags) == 0) {
			if (ioctl(fd, command) == 0)
				return 0;
			if (!riofs_is_unknown_(errno))
				return -1;
		} else if (errno != ENOSYS) {
			return -1;
		}
	}
	return sync(fd) == 0 ? 1 : -1;
}

/* A barrier for a file: its data, its fields and its names. Without RioFS: fsync. */
static inline int riofs_fbarrier(int fd)
{
	return riofs_barrier_(fd, RIOFS_IOC_BARRIER, fsync);
}

/* A barrier for the data of a file. Without RioFS: fdatasync. */
static inline int riofs_fdatabarrier(int fd)
{
	return riofs_barrier_(fd, RIOFS_IOC_DATA_BARRIER, fdatasync);
}

/*
 * Makes the file system of an open file durable, and waits for it: all that was written, all
 * directories, and the pages of this file that were changed through mappings. syncfs alone does not
 * reach RioFS, because the kernel does not pass it on. Pages of other mapped files: msync or fsync
 * them before.
 */
static inline int riofs_syncfs(int fd)
{
	/* The kernel's fsync writes the pages on any version, and waits until RioFS has them. */
	if (syncfs(fd) != 0 || fsync(fd) != 0)
		return -1;
	if (ioctl(fd, RIOFS_IOC_SYNCFS) == 0)
		return 0;
	return riofs_is_unknown_(errno) ? 1 : -1;
}

#ifdef __cplusplus
}
#endif

#endif /* RIOFS_H */
