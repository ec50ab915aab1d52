/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * riopipe.h: ordered volumes over NVMe/TCP, for C and C++. docs/c-api.md is the introduction.
 *
 * A volume spans drives on one or several targets. A stream of it takes groups of writes. Groups are ordered; the
 * writes inside one group are not. After a crash the volume holds, for each stream, every group up to some group, and
 * no fresh block of a later one.
 *
 * UNITS. A block has 4096 bytes (RIOP_BLOCK_BYTES). An `lba` is the number of a block of the volume, from 0. A `seq` is
 * the number of a group in its stream, from 1; 0 means "before the first". Time limits are in milliseconds; a negative
 * one (RIOP_FOREVER) is no limit, and 0 does not wait at all.
 *
 * TEXTS are UTF-8 and end with a zero byte. A member is a drive of a volume: ADDR[:PORT][,nqn=NQN][,ns=N], such as
 * "10.0.0.1:4420,ns=1". The default port is 4420, the default namespace is 1.
 *
 * ERRORS. A function that can fail returns RIOP_OK (0) or another code. If its last argument `error` is not NULL, it
 * then puts an error into *error, which the caller frees with riop_error_free. Before the first call *error must be
 * NULL. A later failure replaces an error that is still there; a success leaves it as it is. If a function fails, the
 * places for its results are unchanged, unless it says otherwise.
 *
 * OBJECTS. The caller gets pointers to objects of the library, and frees each one exactly once. A pointer to an object
 * of another kind, and most other pointers, are refused with RIOP_HANDLE. A pointer to an object that was freed is an
 * error of the program, as with free(). The free functions accept NULL. They return a code, which may be ignored:
 * RIOP_OK, or RIOP_BUSY or RIOP_HANDLE, in which case they have done nothing.
 *
 * OPTIONS are structures that begin with their size. Set all other fields to zero, and then change some: zero is the
 * default of each. NULL is the default of all. A program that was built for an earlier version has shorter structures,
 * which later versions accept.
 *
 *     riop_stream_options options = { .size = sizeof options, .queue_depth = 32 };
 *
 * Structures for results begin with their size, too, and the caller sets it.
 *
 * THREADS. Different objects may be used at the same time. Of one object:
 *   - riop_volume, riop_watch, riop_waker, riop_reader, riop_recovery, riop_error: any number of threads, except that no
 *     thread may use the object while another one closes or frees it.
 *   - riop_stream, riop_group, riop_buf: one thread at a time. A second one gets RIOP_BUSY.
 *   Each object may pass to another thread at any time.
 * A volume has threads of its own. So a process that has forked may not use an object in its child.
 *
 * SIGNALS. The library changes no signal handler, and raises no SIGPIPE.
 */
#ifndef RIOPIPE_H
#define RIOPIPE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Version ---------------------------------------------------------------------------------------------------- */

/* The version of this header. The library may be a later one. */
#define RIOP_VERSION_MAJOR 0
#define RIOP_VERSION_MINOR 1
#define RIOP_VERSION_PATCH 0

/* The version of the library: major << 16 | minor << 8 | patch. */
uint32_t riop_version(void);
/* The same as text, such as "0.1.0". It is never freed. */
const char *riop_version_text(void);

/* ---- Constants -------------------------------------------------------------------------------------------------- */

#define RIOP_BLOCK_BYTES 4096

/* No time limit. */
#define RIOP_FOREVER (-1)

/* What functions return. A code keeps its number and its meaning. Later versions may have more codes. */
enum riop_code {
    RIOP_OK = 0,             /* success */
    RIOP_OTHER = 1,          /* an error for which this version has no code */
    RIOP_ARGUMENT = 2,       /* an argument is NULL, or invalid in itself */
    RIOP_HANDLE = 3,         /* a pointer is not to an object of the expected kind */
    RIOP_BUSY = 4,           /* another thread is using the object */
    RIOP_PANIC = 5,          /* an error of the library; the objects of the call can only be freed */
    RIOP_ADDRESS = 6,        /* a text is not the address of a member, or its name is unknown */
    RIOP_OPTION = 7,         /* an option is invalid, or unknown to this version */
    RIOP_NOT_FOUND = 8,      /* there is no such namespace, stream, volume or recovery */
    RIOP_UNREACHABLE = 9,    /* a target can't be reached, or does not answer */
    RIOP_PROTOCOL = 10,      /* a target answers, and can't be used */
    RIOP_REFUSED = 11,       /* a target refused a request */
    RIOP_RESOURCES = 12,     /* no memory, descriptors, threads or I/O queues left */
    RIOP_MEMBERS = 13,       /* the members do not make this volume: riop_error_members has the reason */
    RIOP_DRIVE = 14,         /* a drive is in use, too small, or unfit */
    RIOP_OWNED = 15,         /* the volume has an owner */
    RIOP_LOG = 16,           /* an ordering log is lost, damaged, too small, or not the one that is due */
    RIOP_ENGINE = 17,        /* the engine can't run here */
    RIOP_RECOVERY = 18,      /* the recovery failed */
    RIOP_PENDING = 19,       /* writes must be acknowledged first: riop_volume_pending */
    RIOP_NOT_PENDING = 20,   /* there is nothing to acknowledge */
    RIOP_STREAM_OPEN = 21,   /* the stream is open already */
    RIOP_STREAMS_OPEN = 22,  /* streams of the volume are still open */
    RIOP_FULL = 23,          /* no space for the group now: wait for RIOP_UNTIL_SPACE, and submit it again; of a read:
                                take the ends of others first */
    RIOP_TOO_LARGE = 24,     /* the group or the buffer can never fit */
    RIOP_EMPTY = 25,         /* a group without writes that is not durable */
    RIOP_RANGE = 26,         /* not within the volume, or no whole blocks */
    RIOP_FOLLOWER = 27,      /* the stream can't follow the group */
    RIOP_VIOLATION = 28,     /* the group violates a duty of the caller (check_ownership) */
    RIOP_FAILED = 29,        /* the stream has failed: riop_error_can_reopen */
    RIOP_HEALTHY = 30,       /* the stream has not failed */
    RIOP_TIMEOUT = 31,       /* the time limit has passed */
    RIOP_WOKEN = 32,         /* another thread has interrupted the wait */
    RIOP_NOT_SUBMITTED = 33, /* the group has not been submitted */
    RIOP_CLOSED = 34,        /* the stream or the volume was closed or freed */
    RIOP_READ = 35,          /* a target or its drive failed to read */
    RIOP_CANCELLED = 36,     /* the read was cancelled */
    RIOP_AUTHENTICATION = 37 /* a target demands authentication, and a secret is missing or wrong */
};

/* Why the members do not make the volume. Later versions may have more reasons. */
enum riop_members {
    RIOP_MEMBERS_OTHER = 0,    /* another reason, or another code */
    RIOP_MEMBERS_BLANK = 1,    /* a drive has no label: it belongs to no volume, and may be used for a new one */
    RIOP_MEMBERS_NAME = 2,     /* the drives are a volume with another name */
    RIOP_MEMBERS_FOREIGN = 3,  /* a drive belongs to another volume than the first one */
    RIOP_MEMBERS_ORDER = 4,    /* the drives are those of the volume, in another order */
    RIOP_MEMBERS_COUNT = 5,    /* drives of the volume are missing, or there are too many */
    RIOP_MEMBERS_LABEL = 6,    /* a label is damaged, of a later version, a copy, or contradicts another one */
    RIOP_MEMBERS_LOG = 7,      /* a target serves a drive without the ordering log that is due */
    RIOP_MEMBERS_TWICE = 8,    /* a drive is given twice */
    RIOP_MEMBERS_AMBIGUOUS = 9 /* several volumes have the name: give the id */
};

/* Places: whether the old content of a write's blocks is still needed (docs/ordering-contract.md, trap T11). */
enum {
    RIOP_FRESH = 1,    /* No state to which the volume may still recover needs the old content. */
    RIOP_IN_PLACE = 2, /* It may be needed. */
    RIOP_EXTEND = 3    /* For each of these states, the new content serves as well as the old. */
};

/* Flags of riop_group_submit. */
enum {
    RIOP_DURABLE = 1 /* with a FLUSH of the drives that the stream has written */
};

/* Conditions of a wait. */
enum {
    RIOP_UNTIL_COMPLETE = 1, /* The group and all earlier ones are complete on all targets. */
    RIOP_UNTIL_DURABLE = 2,  /* The group and all earlier ones are durable. The drives are flushed for that, if needed. */
    RIOP_UNTIL_SPACE = 3,    /* There is space for groups again. */
    RIOP_UNTIL_IDLE = 4,     /* Nothing is in flight. */
    RIOP_UNTIL_MOVED = 5,    /* A mark has moved since the marks were last returned, or the end of a submitted read can be
                                taken. */
    RIOP_UNTIL_WOKEN = 6,    /* Another thread has called riop_waker_wake. */
    RIOP_UNTIL_READ = 7      /* The end of a submitted read can be taken, or no read is in flight. */
};

/* Values of options. */
#define RIOP_ON 1
#define RIOP_OFF 2
/* Zero itself, where 0 means the default. */
#define RIOP_ZERO UINT32_MAX

/* ---- Objects ---------------------------------------------------------------------------------------------------- */

typedef struct riop_error riop_error;       /* why a call failed */
typedef struct riop_volume riop_volume;     /* an open volume, which this process owns */
typedef struct riop_recovery riop_recovery; /* the findings when a volume was opened */
typedef struct riop_stream riop_stream;     /* an open stream */
typedef struct riop_group riop_group;       /* writes that are not submitted yet */
typedef struct riop_buf riop_buf;           /* a buffer for a write */
typedef struct riop_watch riop_watch;       /* the marks of a stream, for other threads */
typedef struct riop_waker riop_waker;       /* interrupts a wait of a stream's thread */
typedef struct riop_reader riop_reader;     /* reads a volume beside its streams */

/* ---- Structures ------------------------------------------------------------------------------------------------- */

/* The options of connections. */
typedef struct riop_connect_options {
    size_t size;
    const char *host_nqn;     /* The host NQN of this initiator. NULL: that of the machine. */
    const uint8_t *host_id;   /* The host identifier, 16 bytes. NULL: that of the machine. */
    uint32_t header_digest;   /* 1: a checksum over each header. */
    uint32_t data_digest;     /* RIOP_ON, RIOP_OFF: a checksum over all data. 0: on, except over loopback. */
    uint32_t timeout_ms;      /* The limit for making a connection, and for an answer. 0: 10 s. */
    uint32_t keep_alive_ms;   /* The keep-alive timeout. 0: 15 s. */
    uint32_t loss_timeout_ms; /* How long a target of an open volume may be unreachable before the streams that need it
                                 fail. 0: 30 s. RIOP_ZERO: they fail at once. */
    uint32_t spin_us;         /* How long to poll for an answer before sleeping, microseconds. 0: 200. RIOP_ZERO: not. */
    const char *dhchap_secret_file;      /* The file with the secret of this host (DHHC-1:…), for targets that demand
                                            authentication. Only its owner may have permissions for it. NULL: none. */
    const char *dhchap_ctrl_secret_file; /* The file with the secret of the targets: each must prove its own identity,
                                            too. NULL: none. */
} riop_connect_options;

/* The options of a new volume. */
typedef struct riop_create_options {
    size_t size;
    const riop_connect_options *connect;
    const char *engine;      /* "rio", "sync", "linux", "horae", "barrier", "opimq", "none". NULL: "rio" where it can
                                run, else "sync". */
    uint32_t unit_blocks;    /* The size of a stripe unit, blocks. 0: 16. */
    uint32_t streams;        /* The number of streams, at most 1024. 0: 8. */
    uint32_t slots;          /* Log slots for each stream on each target. 0: as many as fit. */
    uint32_t prepare_blocks; /* Blocks of each drive for the prepare area of engine "horae". 0: 1024 for each stream, at
                                most a sixteenth of the drive. RIOP_ZERO: none. */
    uint32_t force;          /* 1: use drives that are in use. Their content, and volumes on them, are lost. */
    uint32_t reserved;       /* 0 */
} riop_create_options;

/* The options for opening a volume. */
typedef struct riop_open_options {
    size_t size;
    const riop_connect_options *connect;
    const char *engine;         /* NULL: the engine for which the volume was created. */
    uint32_t take_over;         /* 1: fence an owner that is alive, or may still come back. */
    uint32_t accept_lost_log;   /* 1: give up an ordering log that is lost. See docs/ordering-contract.md first. */
    uint32_t check_ownership;   /* 1: check the caller's declarations about blocks, at some cost. */
    uint32_t wait_for_lease_ms; /* How long to wait for a volume that is owned. 0: not at all. */
} riop_open_options;

/* The options of a stream. */
typedef struct riop_stream_options {
    size_t size;
    uint64_t kept_bytes_max; /* The bound of the data that the stream keeps until it is durable, bytes. 0: 64 MiB. */
    uint32_t queue_depth;    /* Requests in flight for each target, at most 1024. 0: 128. */
    uint32_t timeout_ms;     /* How long a target may owe an answer. 0: 30 s. */
    uint32_t no_merge;       /* 1: requests for adjacent blocks are not merged. */
    uint32_t orderless;      /* 1: the writes of the stream have no order. Only with engine "barrier". */
} riop_stream_options;

/* The options of a reader. */
typedef struct riop_reader_options {
    size_t size;
    uint32_t concurrent;  /* How many calls may read at the same time, at most 64. 0: 4. */
    uint32_t queue_depth; /* Requests in flight for each target and call, at most 1024. 0: 32. */
    uint32_t timeout_ms;  /* How long a target may owe an answer. 0: 30 s. */
    uint32_t reserved;    /* 0 */
} riop_reader_options;

/* The properties of a volume. */
typedef struct riop_volume_info {
    size_t size;
    uint64_t blocks;      /* the size of the volume, in blocks */
    uint32_t block_size;  /* the size of a block, bytes */
    uint32_t unit_blocks; /* the size of a stripe unit, in blocks */
    uint32_t streams;     /* the number of streams */
    uint32_t members;     /* the number of members */
    uint32_t generation;  /* the generation on the labels: that of the last owner */
    uint32_t unrecovered; /* the greatest number of log entries that wait for recovery on one target */
    uint8_t id[16];       /* the id of the volume */
    char engine[16];      /* the engine for which the volume was created */
    char name[72];        /* the name of the volume, at most 64 bytes */
} riop_volume_info;

/* The findings of a recovery for one stream. */
typedef struct riop_stream_recovery {
    size_t size;
    uint64_t last;          /* The recovered seq: each group up to it is there. */
    uint64_t tag;           /* The tag of that group; 0 if it has none. */
    uint64_t kept;          /* Groups that were not released before the crash, and are kept. */
    uint64_t dropped;       /* Groups beyond `last` of which something was found. */
    uint64_t replayed;      /* Requests that were sent again. Only a reopened stream has them. */
    uint64_t undone_blocks; /* Fresh blocks beyond `last`, which were zeroed. */
    uint32_t found;         /* Log entries that were found. */
    uint32_t in_place;      /* Ranges of updates in place beyond `last`. They may be there or not. */
    uint32_t in_doubt;      /* Ranges of other writes that may be there or not, since a log was given up. */
    uint32_t acknowledge;   /* 1: these ranges wait for riop_volume_acknowledge. Until then the stream can't be opened. */
    uint32_t log_given_up;  /* 1: a log was given up: nothing was undone. */
    uint32_t reserved;
} riop_stream_recovery;

/* Blocks that a group has written. */
typedef struct riop_written {
    uint64_t seq;    /* the group */
    uint64_t lba;    /* the first block */
    uint64_t blocks; /* the number of blocks */
} riop_written;

/* Blocks to read, and the memory for them. */
typedef struct riop_extent {
    uint64_t lba;  /* the first block */
    void *into;    /* the memory for the blocks */
    size_t length; /* the number of bytes, a multiple of 4096 */
} riop_extent;

/* The end of a submitted read. */
typedef struct riop_read_end {
    uint64_t id;       /* the number of the read, from riop_stream_submit_read */
    uint64_t tag;      /* the caller's tag of the read */
    void *into;        /* the memory, which is the caller's again; after an error its content is undefined */
    size_t length;     /* its length, bytes */
    riop_error *error; /* why the read failed, to be freed by the caller; NULL after a success */
    int code;          /* the code of the error */
    uint32_t reserved; /* 0 */
} riop_read_end;

/* The marks of a stream. */
typedef struct riop_marks {
    uint64_t complete; /* Each group up to this one is complete on all targets. */
    uint64_t durable;  /* Each group up to this one is durable. */
} riop_marks;

/* ---- Errors ----------------------------------------------------------------------------------------------------- */

/* The code of an error; RIOP_OK for NULL. */
int riop_error_code(const riop_error *error);
/* The text of an error: what failed, where, and what to do. Valid until the error is freed or replaced. "" for NULL. */
const char *riop_error_text(const riop_error *error);
/* 1 if the same call may succeed later, if only time passes; else 0. */
int riop_error_is_retryable(const riop_error *error);
/* 1 if the code is RIOP_FAILED and riop_stream_reopen may restart the stream; else 0. */
int riop_error_can_reopen(const riop_error *error);
/* The reason (RIOP_MEMBERS_…) if the code is RIOP_MEMBERS. For NULL and any other code: RIOP_MEMBERS_OTHER. */
int riop_error_members(const riop_error *error);
int riop_error_free(riop_error *error);
/* The name of a code, such as "RIOP_FULL". It is never freed. */
const char *riop_code_name(int code);

/* Frees a text that a function has put into a `char **`. */
void riop_text_free(char *text);

/* ---- Volumes ---------------------------------------------------------------------------------------------------- */

/*
 * Creates a volume of the members, in this order: log partitions at each target with an ordering log, and labels on
 * each drive. The name has 1 to 64 bytes. `options` and `info` may be NULL.
 */
int riop_volume_create(const char *name, const char *const *members, size_t member_count,
                       const riop_create_options *options, riop_volume_info *info, riop_error **error);

/* Reads the properties of the volume that the members make, without claiming it. `options` may be NULL. */
int riop_volume_inspect(const char *const *members, size_t member_count, const riop_connect_options *options,
                        riop_volume_info *info, riop_error **error);

/*
 * Lists the volumes on the targets of the members, as JSON with the keys of `rio volume list -o json`. The namespaces of
 * the members do not matter. The caller frees *json with riop_text_free. `options` may be NULL.
 */
int riop_volume_list_json(const char *const *members, size_t member_count, const riop_connect_options *options,
                          char **json, riop_error **error);

/*
 * Deletes a volume with all its data. `name` is its name or its id. With `force` (not 0) a volume that has an owner is
 * taken from it, and members may be missing. `options` may be NULL.
 */
int riop_volume_delete(const char *name, const char *const *members, size_t member_count, int force,
                       const riop_connect_options *options, riop_error **error);

/*
 * Opens a volume, and becomes its owner. After a crash the volume is recovered first. The members are all drives of the
 * volume, in its order. The caller closes or frees *volume. `recovery` may be NULL; else the caller frees *recovery,
 * which has the last group of each stream, with the caller's tag of that group. `options` may be NULL.
 */
int riop_volume_open(const char *name, const char *const *members, size_t member_count,
                     const riop_open_options *options, riop_volume **volume, riop_recovery **recovery,
                     riop_error **error);

/* Reads the properties of an open volume, as they were when it was opened. */
int riop_volume_get_info(const riop_volume *volume, riop_volume_info *info, riop_error **error);

/*
 * Reads the figures of an open volume: its targets, the marks of its streams, the time in each stage. They are JSON with
 * the keys of `rio volume stat -o json`. No stream waits for this. The caller frees *json with riop_text_free.
 */
int riop_volume_stat_json(const riop_volume *volume, char **json, riop_error **error);

/*
 * Lists the writes beyond the last group of stream `id` that wait to be acknowledged: these blocks may hold the old
 * content or the new. At most `capacity` of them are put into `written`, which may be NULL if that is 0. *count is the
 * number of all.
 */
int riop_volume_pending(const riop_volume *volume, uint16_t id, riop_written *written, size_t capacity, size_t *count,
                        riop_error **error);

/* Acknowledges these writes, once the caller has checked their blocks. The stream can be opened then. */
int riop_volume_acknowledge(const riop_volume *volume, uint16_t id, riop_error **error);

/*
 * Releases the volume, so that any initiator may open it, and frees it. All of its streams must have been closed. With
 * RIOP_FOREVER, a target that is unreachable ends the wait after the loss timeout. After a failure the volume is as
 * before.
 */
int riop_volume_close(riop_volume *volume, int64_t timeout_ms, riop_error **error);

/*
 * Frees the volume without releasing it. Open streams and readers keep it open. Then its targets keep it for this owner
 * until the lease is over, as after a crash.
 */
int riop_volume_free(riop_volume *volume);

/* ---- Recovery --------------------------------------------------------------------------------------------------- */

/* A report for people. Valid until the findings are freed. */
const char *riop_recovery_text(const riop_recovery *recovery);
/* 1 if there was nothing to recover; else 0. */
int riop_recovery_is_nothing(const riop_recovery *recovery);
/* The findings for stream `id`. RIOP_NOT_FOUND: the volume has no such stream, or no ordering log. */
int riop_recovery_stream(const riop_recovery *recovery, uint16_t id, riop_stream_recovery *found, riop_error **error);
int riop_recovery_free(riop_recovery *recovery);

/* ---- Streams ---------------------------------------------------------------------------------------------------- */

/*
 * Opens stream `id` of the volume. Ids count from 0, and keep their meaning after a restart. A stream that was freed
 * without a close is recovered first: riop_stream_recovery_of. The caller closes or frees *stream. `options` may be NULL.
 */
int riop_stream_open(const riop_volume *volume, uint16_t id, const riop_stream_options *options, riop_stream **stream,
                     riop_error **error);

/*
 * Sends the submitted groups as far as the connections take them, receives the answers that have arrived, and returns
 * the marks. Never waits. `marks` may be NULL.
 */
int riop_stream_poll(riop_stream *stream, riop_marks *marks, riop_error **error);

/* Sends the submitted groups as far as the connections take them, and receives nothing. Never waits. */
int riop_stream_send(riop_stream *stream, riop_error **error);

/*
 * Sends the submitted groups, and waits for a condition (RIOP_UNTIL_…). `seq` is the group of RIOP_UNTIL_COMPLETE and
 * RIOP_UNTIL_DURABLE. Returns the marks; `marks` may be NULL. RIOP_TIMEOUT, RIOP_WOKEN: the stream is as before, and the
 * same wait may still succeed.
 */
int riop_stream_wait(riop_stream *stream, uint32_t until, uint64_t seq, int64_t timeout_ms, riop_marks *marks,
                     riop_error **error);

/*
 * Reads whole blocks: `length` bytes, from block `lba` on. Returns the data of all writes that this stream has
 * submitted, also of incomplete groups. After a failure the content of the memory is undefined.
 */
int riop_stream_read(riop_stream *stream, uint64_t lba, void *into, size_t length, int64_t timeout_ms,
                     riop_error **error);

/*
 * As riop_stream_read, for several extents at once: in one round trip, as far as the queue depth allows. Their memory
 * must not overlap. An error of one extent is the error of the call.
 */
int riop_stream_read_many(riop_stream *stream, const riop_extent *extents, size_t count, int64_t timeout_ms,
                          riop_error **error);

/*
 * Submits a read of whole blocks, and does not wait for it: `length` bytes, from block `lba` on. It returns the data of
 * all writes that this stream has submitted before. Of a group that is submitted while the read is in flight, each block
 * has the old content or the new. Reads end in any order. Up to 1024 may be submitted whose end was not taken; more are
 * refused with RIOP_FULL. `tag` is the caller's. *id is the number of the read, which no other one of the stream has; `id`
 * may be NULL. The read is given up after the time limit.
 *
 * THE MEMORY BELONGS TO THE LIBRARY until the end of the read was taken with riop_stream_read_ends, or until the stream
 * was closed or freed. Until then the caller neither uses nor frees it, and no other read has it. If this call fails, the
 * caller has it.
 *
 * The read leaves with the next call that sends, as a group that is not durable does. It goes on in each call that
 * receives (riop_stream_poll, _wait, and any other that waits), and between the calls in a thread of the volume.
 * When the stream fails, all of its reads end with RIOP_FAILED, and their ends are still to be taken.
 */
int riop_stream_submit_read(riop_stream *stream, uint64_t lba, void *into, size_t length, uint64_t tag,
                            int64_t timeout_ms, uint64_t *id, riop_error **error);

/*
 * Takes the ends of submitted reads, at most `capacity`; *count is the number of those. Each read has exactly one end.
 * Neither sends nor receives: call riop_stream_poll first, or wait for RIOP_UNTIL_READ. Also works after the stream has
 * failed.
 */
int riop_stream_read_ends(riop_stream *stream, riop_read_end *ends, size_t capacity, size_t *count, riop_error **error);

/*
 * Cancels a submitted read. Its end, with RIOP_CANCELLED, can be taken at once, and no byte is written to its memory from
 * now on. RIOP_NOT_FOUND: the read has ended, and its end is the one that it had.
 */
int riop_stream_cancel_read(riop_stream *stream, uint64_t id, riop_error **error);

/* The seq of the last group that was submitted. */
int riop_stream_last(riop_stream *stream, uint64_t *seq, riop_error **error);

/*
 * The seq of the last group that is released: no recovery undoes it, and no replay sends it again. A block whose old
 * content was needed up to a group may be written as RIOP_FRESH once that group is released. Another stream may write a
 * block once the group that wrote it is released.
 */
int riop_stream_released(riop_stream *stream, uint64_t *seq, riop_error **error);

/*
 * A descriptor for poll and epoll: it is readable when the caller must call riop_stream_poll. It is the library's: the
 * caller neither reads nor closes it. It is valid until the stream is closed or freed. Other calls of the stream may
 * receive what made it readable, so call riop_stream_poll before sleeping.
 */
int riop_stream_event_fd(riop_stream *stream, int *fd, riop_error **error);

/*
 * The time until the caller must call riop_stream_poll at the latest, even if the descriptor is not readable:
 * milliseconds, as poll and epoll_wait take them; -1: there is no such time. Each call of the stream may change it.
 */
int riop_stream_next_deadline(riop_stream *stream, int64_t *timeout_ms, riop_error **error);

/*
 * Restarts a stream that has failed: undoes the fresh writes beyond its last whole group, and continues after it. Groups
 * after `last` of the findings are lost, and their seqs are used again. `found` may be NULL. RIOP_PENDING: acknowledge
 * the stream's writes, and reopen it again.
 */
int riop_stream_reopen(riop_stream *stream, riop_stream_recovery *found, riop_error **error);

/* The findings of the stream's own recovery, when it was opened or reopened. RIOP_NOT_FOUND: there was none. */
int riop_stream_recovery_of(riop_stream *stream, riop_stream_recovery *found, riop_error **error);

/*
 * Makes all groups durable, closes the stream, and frees it. *last is the seq of the last group; `last` may be NULL.
 * Submitted reads are dropped, and the caller has their memory again: take their ends first. After a failure the stream
 * is as before, with its reads: RIOP_TIMEOUT, or RIOP_FAILED. A stream that has failed is reopened or freed.
 */
int riop_stream_close(riop_stream *stream, int64_t timeout_ms, uint64_t *last, riop_error **error);

/*
 * Frees the stream without closing it: a crash of the stream. Durable groups stay, and the next opening recovers it.
 * Submitted reads are dropped, and the caller has their memory again.
 */
int riop_stream_free(riop_stream *stream);

/* ---- Buffers ---------------------------------------------------------------------------------------------------- */

/*
 * Takes a buffer of `length` bytes from the stream, a multiple of 4096. Its content is undefined. A group takes the
 * buffer, or the caller frees it.
 */
int riop_buf_new(riop_stream *stream, size_t length, riop_buf **buf, riop_error **error);
/* The bytes of the buffer, aligned to 4096. The caller may write to them until a group takes the buffer. */
void *riop_buf_data(riop_buf *buf);
/* The length of the buffer, bytes. */
size_t riop_buf_length(const riop_buf *buf);
int riop_buf_free(riop_buf *buf);

/* ---- Groups ----------------------------------------------------------------------------------------------------- */

/* Makes an empty group. It may be submitted to any stream, and used again after that. The caller frees *group. */
int riop_group_new(riop_group **group, riop_error **error);

/*
 * Adds a write of the buffer at block `lba`. `place` is RIOP_FRESH, RIOP_IN_PLACE or RIOP_EXTEND. After a success the
 * group has the buffer, and the caller uses neither `buf` nor its bytes any more. After a failure the caller still has
 * it. Whether the blocks lie within the volume is checked at the submission.
 */
int riop_group_write(riop_group *group, uint64_t lba, riop_buf *buf, uint32_t place, riop_error **error);

/* Adds a request that makes `blocks` blocks from `lba` on read as zeroes. Their old content must not be needed. */
int riop_group_discard(riop_group *group, uint64_t lba, uint32_t blocks, riop_error **error);

/* Sets the tag of the group, such as a log sequence number. A recovery returns the tag of the last group. 0 at first. */
int riop_group_tag(riop_group *group, uint64_t tag, riop_error **error);

/*
 * Lets stream `id` of the same volume follow the group: of the groups that are submitted to that stream later, none
 * survives a crash without this group (docs/engines.md).
 */
int riop_group_follower(riop_group *group, uint16_t id, riop_error **error);

/*
 * Submits the group to a stream, whole or not at all. *seq is its number; `seq` may be NULL. `flags` is 0 or
 * RIOP_DURABLE. If there is no space for the group, waits for it: RIOP_FULL after the time limit.
 *
 * A group that is not durable leaves with the next call that sends: riop_stream_send, _poll, _wait, _read, _close, a
 * durable group, or the 64th group in a row. A durable group leaves at once, with all groups before it.
 *
 * After a success the group is empty, and the stream has its buffers. After a failure the group is as before: submit it
 * again, reset it or free it.
 */
int riop_group_submit(riop_group *group, riop_stream *stream, uint32_t flags, int64_t timeout_ms, uint64_t *seq,
                      riop_error **error);

/* Makes the group empty, and frees its buffers. */
int riop_group_reset(riop_group *group, riop_error **error);
/* Frees the group and its buffers. */
int riop_group_free(riop_group *group);

/* ---- Other threads ---------------------------------------------------------------------------------------------- */

/* Makes a watch of the stream. It does not keep the stream open, and may outlive it. The caller frees *watch. */
int riop_watch_new(riop_stream *stream, riop_watch **watch, riop_error **error);
/* The marks that were published last. */
int riop_watch_marks(const riop_watch *watch, riop_marks *marks, riop_error **error);
/* As riop_stream_released. It may be behind the stream's own mark, never ahead of it. */
int riop_watch_released(const riop_watch *watch, uint64_t *seq, riop_error **error);
/*
 * Waits until group `seq` and all earlier ones are complete or durable: RIOP_UNTIL_COMPLETE or RIOP_UNTIL_DURABLE. The
 * group may be submitted later. `marks` may be NULL. Ends when the stream fails, is closed or is freed.
 */
int riop_watch_wait(const riop_watch *watch, uint32_t until, uint64_t seq, int64_t timeout_ms, riop_marks *marks,
                    riop_error **error);
int riop_watch_free(riop_watch *watch);

/* Makes a waker of the stream, which does not keep the stream open. The caller frees *waker. */
int riop_waker_new(riop_stream *stream, riop_waker **waker, riop_error **error);
/*
 * Ends the present riop_stream_wait of the stream's thread, or its next one, with RIOP_WOKEN. A wait for
 * RIOP_UNTIL_WOKEN succeeds. Also makes the stream's descriptor readable.
 */
int riop_waker_wake(const riop_waker *waker, riop_error **error);
int riop_waker_free(riop_waker *waker);

/*
 * Makes a reader: its reads have connections of their own, and wait for no stream. It keeps the volume open, unless the
 * volume is closed. The caller frees *reader. `options` may be NULL.
 */
int riop_reader_new(const riop_volume *volume, const riop_reader_options *options, riop_reader **reader,
                    riop_error **error);
/*
 * Reads whole blocks: `length` bytes, from block `lba` on. Returns each group that was complete when the read began. Of
 * groups in flight, each block has the old content or the new. After a failure the content of the memory is undefined.
 */
int riop_reader_read(const riop_reader *reader, uint64_t lba, void *into, size_t length, int64_t timeout_ms,
                     riop_error **error);
/* As riop_reader_read, for several extents at once, as riop_stream_read_many. */
int riop_reader_read_many(const riop_reader *reader, const riop_extent *extents, size_t count, int64_t timeout_ms,
                          riop_error **error);
int riop_reader_free(riop_reader *reader);

#ifdef __cplusplus
}
#endif

#endif /* RIOPIPE_H */
