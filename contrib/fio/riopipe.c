/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * An external I/O engine of fio: ordered groups of writes on a stream of a riopipe volume. docs/fio.md describes it.
 *
 * Each job (and each clone of numjobs) is a thread with one stream. Jobs on the same volume share it.
 *
 * A write waits in a group until the group has `rio_group` writes, or until fio waits for more than what is submitted.
 * It is complete for fio when the group is complete on all targets, or durable where the job asks for that. A read is
 * submitted at once, into fio's buffer, and leaves with fio's next call for completions. A sync is a durable group, and fio waits for it: fio
 * counts syncs that are queued only when they end, and would issue more of them than the job says.
 *
 * fio uses a buffer again when its write is complete; the stream keeps the bytes until they are durable. So each write
 * is copied once, into a buffer of the stream.
 */
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "fio.h"
#include "optgroup.h"

#include <riopipe.h>

#define MEMBERS_MAX 64
#define READS_MAX 1024 /* the bound of riop_stream_submit_read */

struct rio_options {
    void *pad; /* fio takes an option at offset 0 for one without a place. */
    char *volume;
    char *members;
    char *engine;
    unsigned int group;
    unsigned int durable;
    unsigned int place;
    unsigned long long commit;
    int stream;
    unsigned int create;
    unsigned int streams;
    unsigned int lease;
    unsigned int loss;
    unsigned int depth;
    unsigned int no_merge;
    unsigned int check;
    unsigned int spin;
    char *hostnqn;
    char *dhchap_secret;
    char *dhchap_ctrl_secret;
};

#define OPTION(field, name_, label, type_, help_) \
    .name = name_, .lname = label, .type = type_, .off1 = offsetof(struct rio_options, field), .help = help_, \
    .category = FIO_OPT_C_ENGINE, .group = FIO_OPT_G_INVALID

static struct fio_option options[] = {
    {OPTION(volume, "rio_volume", "Volume", FIO_OPT_STR_STORE, "The name of the volume")},
    {OPTION(members, "rio_members", "Members", FIO_OPT_STR_STORE,
            "The drives of the volume, in its order, with spaces between them: ADDR[:PORT][,nqn=NQN][,ns=N]")},
    {OPTION(engine, "rio_engine", "Engine", FIO_OPT_STR_STORE,
            "rio, sync, linux, horae, barrier, opimq or none; default: the one for which the volume was created"),
     .def = "default"},
    {OPTION(group, "rio_group", "Writes in a group", FIO_OPT_INT,
            "A group ends after so many writes and trims; iodepth must be at least as large"),
     .def = "1", .minval = 1, .maxval = 1024},
    {OPTION(durable, "rio_durable", "Durable groups", FIO_OPT_INT,
            "Each group with a number that this divides is durable, and its writes are complete when it is; 0: none"),
     .def = "0"},
    {OPTION(commit, "rio_commit", "Commit record", FIO_OPT_STR_VAL,
            "The last so many bytes of each write are a group of their own, behind the rest; 0: none"),
     .def = "0"},
    {OPTION(place, "rio_place", "Place", FIO_OPT_STR, "Whether the old content of the blocks is needed"),
     .def = "extend",
     .posval = {{.ival = "fresh", .oval = RIOP_FRESH, .help = "No. After a crash the block may be zeroed"},
                {.ival = "in_place", .oval = RIOP_IN_PLACE, .help = "Yes"},
                {.ival = "extend", .oval = RIOP_EXTEND, .help = "The new content serves as well as the old"}}},
    {OPTION(stream, "rio_stream", "Stream", FIO_OPT_INT,
            "The stream of the first clone; others have the following ones; default: the lowest that no job has"),
     .def = "-1", .minval = -1, .maxval = 65535},
    {OPTION(create, "rio_create", "Create the volume", FIO_OPT_BOOL, "Create the volume if the members have none"),
     .def = "0"},
    {OPTION(streams, "rio_streams", "Streams of a new volume", FIO_OPT_INT, "The number of streams of a new volume"),
     .def = "8", .minval = 1, .maxval = 1024},
    {OPTION(lease, "rio_lease", "Wait for the lease", FIO_OPT_INT,
            "How long to wait for a volume that has an owner, ms"),
     .def = "60000"},
    {OPTION(loss, "rio_loss", "Loss timeout", FIO_OPT_INT,
            "How long a target may be unreachable before the job fails, ms; 0: 30 s"),
     .def = "0"},
    {OPTION(depth, "rio_depth", "Queue depth", FIO_OPT_INT, "Requests in flight for each target; 0: 128"),
     .def = "0", .maxval = 1024},
    {OPTION(no_merge, "rio_no_merge", "Do not merge", FIO_OPT_BOOL, "Do not merge requests for adjacent blocks"),
     .def = "0"},
    {OPTION(check, "rio_check", "Check the places", FIO_OPT_BOOL,
            "Refuse writes that violate what rio_place promises, or that overlap another job's; costs time"),
     .def = "0"},
    {OPTION(spin, "rio_spin", "Poll before sleeping", FIO_OPT_INT,
            "How long to poll for an answer before sleeping, microseconds; 0: 200"),
     .def = "0"},
    {OPTION(hostnqn, "rio_hostnqn", "Host NQN", FIO_OPT_STR_STORE, "The host NQN; default: that of the machine")},
    {OPTION(dhchap_secret, "rio_dhchap_secret", "Secret of this host", FIO_OPT_STR_STORE,
            "The file with the secret of this host, for targets that demand authentication")},
    {OPTION(dhchap_ctrl_secret, "rio_dhchap_ctrl_secret", "Secret of the targets", FIO_OPT_STR_STORE,
            "The file with the secret of the targets: each must prove its own identity, too")},
    {.name = NULL},
};

/* ---- Volumes: jobs with the same name, members and engine share one ----------------------------------------------- */

struct shared {
    struct shared *next;
    char *name, *members, *engine;
    riop_volume *volume;
    unsigned int jobs;
    uint32_t streams;
    uint8_t *taken; /* for each stream: a job has it */
};

static struct shared *volumes;
static pthread_mutex_t volumes_lock = PTHREAD_MUTEX_INITIALIZER;

/* A stream with what is in flight on it. */
struct job {
    struct shared *shared;
    uint16_t id;
    riop_stream *stream;
    riop_group *group;
    riop_error *error;
    unsigned int in_group;  /* writes and trims in the group, which is not submitted */
    uint64_t groups, durable_groups, cut;
    int failed;             /* the errno after which nothing else is submitted; 0: none */
    uint64_t last;          /* the seq of the last group */
    riop_marks marks;
    /* What was submitted, in its order. Its first `in_flight` entries have a seq; the others are in the group. */
    struct waiting {
        struct io_u *io;
        uint64_t seq;
        bool durable;
    } *queue;
    unsigned int head, count, in_flight, capacity;
    /* Reads that are submitted and have not ended. */
    unsigned int reads;
    riop_read_end *ends;
    /* Completions that fio has not taken yet. */
    struct io_u **done, **events;
    unsigned int done_count;
};

/* The engine of a job; `other` for the one for which the volume was created. */
static const char *engine_or(const struct rio_options *o, const char *other) {
    return o->engine && *o->engine && strcmp(o->engine, "default") != 0 ? o->engine : other;
}

/* The members of an option. The words point into *copy, which the caller frees. */
static size_t split_members(const char *members, char **copy, const char **words) {
    size_t count = 0;
    char *rest = NULL;
    *copy = strdup(members);
    for (char *word = *copy ? strtok_r(*copy, " \t", &rest) : NULL; word; word = strtok_r(NULL, " \t", &rest)) {
        if (count == MEMBERS_MAX)
            return 0;
        words[count++] = word;
    }
    return count;
}

static int errno_of(int code) {
    switch (code) {
    case RIOP_OK: return 0;
    case RIOP_RESOURCES: return ENOMEM;
    case RIOP_ARGUMENT: case RIOP_OPTION: case RIOP_RANGE: case RIOP_TOO_LARGE: case RIOP_VIOLATION: return EINVAL;
    case RIOP_TIMEOUT: return ETIMEDOUT;
    case RIOP_OWNED: return EBUSY;
    case RIOP_NOT_FOUND: return ENOENT;
    default: return EIO;
    }
}

/* Shows an error, frees it, and returns its errno. */
static int report(const char *what, riop_error **error) {
    int code = riop_error_code(*error);
    log_err("riopipe: %s: %s: %s\n", what, riop_code_name(code), riop_error_text(*error));
    riop_error_free(*error);
    *error = NULL;
    return errno_of(code);
}

static riop_connect_options connect_options(const struct rio_options *o) {
    return (riop_connect_options){.size = sizeof(riop_connect_options),
                                  .host_nqn = o->hostnqn,
                                  .loss_timeout_ms = o->loss,
                                  .spin_us = o->spin,
                                  .dhchap_secret_file = o->dhchap_secret,
                                  .dhchap_ctrl_secret_file = o->dhchap_ctrl_secret};
}

/* The properties of the volume, which is created where the job allows it. */
static int look_up(const struct rio_options *o, riop_volume_info *info) {
    riop_connect_options connect = connect_options(o);
    riop_error *error = NULL;
    const char *words[MEMBERS_MAX];
    char *copy;
    size_t count = split_members(o->members, &copy, words);
    int code = riop_volume_inspect(words, count, &connect, info, &error);
    if (code == RIOP_MEMBERS && riop_error_members(error) == RIOP_MEMBERS_BLANK && o->create) {
        riop_create_options create = {.size = sizeof create, .connect = &connect, .streams = o->streams};
        create.engine = engine_or(o, NULL);
        riop_error_free(error);
        error = NULL;
        code = riop_volume_create(o->volume, words, count, &create, info, &error);
    }
    free(copy);
    return code == RIOP_OK ? 0 : report(o->volume, &error);
}

static bool is_it(const struct shared *shared, const struct rio_options *o) {
    return !strcmp(shared->name, o->volume) && !strcmp(shared->members, o->members) &&
           !strcmp(shared->engine, engine_or(o, ""));
}

static void drop_volume(struct shared *shared) {
    free(shared->name);
    free(shared->members);
    free(shared->engine);
    free(shared->taken);
    free(shared);
}

/* Opens the volume of a job. The caller has the lock. */
static int open_volume(const struct rio_options *o, struct shared **opened) {
    riop_connect_options connect = connect_options(o);
    riop_open_options options = {.size = sizeof options, .connect = &connect, .wait_for_lease_ms = o->lease};
    riop_volume_info info = {.size = sizeof info};
    riop_recovery *recovery = NULL;
    riop_error *error = NULL;
    const char *words[MEMBERS_MAX];
    char *copy;
    struct shared *shared = calloc(1, sizeof *shared);
    if (!shared)
        return ENOMEM;
    options.engine = engine_or(o, NULL);
    options.check_ownership = o->check;
    size_t count = split_members(o->members, &copy, words);
    int code = riop_volume_open(o->volume, words, count, &options, &shared->volume, &recovery, &error);
    free(copy);
    if (code == RIOP_OK)
        code = riop_volume_get_info(shared->volume, &info, &error);
    if (code != RIOP_OK) {
        riop_volume_free(shared->volume);
        drop_volume(shared);
        return report(o->volume, &error);
    }
    if (!riop_recovery_is_nothing(recovery))
        log_info("riopipe: %s: %s\n", o->volume, riop_recovery_text(recovery));
    riop_recovery_free(recovery);
    shared->name = strdup(o->volume);
    shared->members = strdup(o->members);
    shared->engine = strdup(engine_or(o, ""));
    shared->streams = info.streams;
    shared->taken = calloc(info.streams, 1);
    if (!shared->name || !shared->members || !shared->engine || !shared->taken) {
        riop_volume_free(shared->volume);
        drop_volume(shared);
        return ENOMEM;
    }
    shared->next = volumes;
    volumes = shared;
    *opened = shared;
    return 0;
}

/* Gets a volume and a stream for a job. */
static int join(struct thread_data *td, struct job *job) {
    struct rio_options *o = td->eo;
    struct shared *shared;
    int64_t id = 0;
    int error = 0;
    pthread_mutex_lock(&volumes_lock);
    for (shared = volumes; shared && !is_it(shared, o); shared = shared->next)
        ;
    if (!shared)
        error = open_volume(o, &shared);
    if (!error) {
        if (o->stream >= 0)
            id = (int64_t)o->stream + td->subjob_number;
        else
            while (id < shared->streams && shared->taken[id])
                id++;
        if (id >= shared->streams || shared->taken[id]) {
            log_err("riopipe: %s has %u streams, and stream %lld is not one, or another job has it: fewer jobs, or a "
                    "volume with more streams (rio_streams)\n", o->volume, shared->streams, (long long)id);
            error = EINVAL;
        } else {
            shared->taken[id] = 1;
            job->id = (uint16_t)id;
            job->shared = shared;
        }
        shared->jobs += !error;
    }
    pthread_mutex_unlock(&volumes_lock);
    return error;
}

/* Gives the stream of a job free, and closes the volume after the last job. */
static void leave(struct job *job) {
    struct shared *shared = job->shared;
    riop_error *error = NULL;
    if (!shared)
        return;
    pthread_mutex_lock(&volumes_lock);
    shared->taken[job->id] = 0;
    if (--shared->jobs == 0) {
        struct shared **at = &volumes;
        while (*at != shared)
            at = &(*at)->next;
        *at = shared->next;
        if (riop_volume_close(shared->volume, RIOP_FOREVER, &error) != RIOP_OK) {
            report(shared->name, &error);
            riop_volume_free(shared->volume);
        }
        drop_volume(shared);
    }
    pthread_mutex_unlock(&volumes_lock);
    job->shared = NULL;
}

/* ---- Groups ------------------------------------------------------------------------------------------------------- */

static struct waiting *entry(struct job *job, unsigned int n) {
    return &job->queue[(job->head + n) % job->capacity];
}

/* The stream has failed, or a call: everything that waits fails with it. */
static int fail(struct job *job, int code) {
    if (!job->failed) {
        char what[32];
        snprintf(what, sizeof what, "stream %u", job->id);
        job->failed = code == RIOP_OK ? EIO : report(what, &job->error);
    } else {
        riop_error_free(job->error);
        job->error = NULL;
    }
    return job->failed;
}

static void push(struct job *job, struct io_u *io) {
    struct waiting *last = entry(job, job->count++);
    *last = (struct waiting){.io = io};
}

/* Submits the group: what waits in it is complete with it, or durable with it. */
static int submit(struct job *job, bool durable) {
    uint64_t seq = 0;
    int code = riop_group_submit(job->group, job->stream, durable ? RIOP_DURABLE : 0, RIOP_FOREVER, &seq, &job->error);
    if (code != RIOP_OK)
        return fail(job, code);
    for (; job->in_flight < job->count; job->in_flight++) {
        entry(job, job->in_flight)->seq = seq;
        entry(job, job->in_flight)->durable = durable;
    }
    job->in_group = 0;
    job->last = seq;
    job->groups++;
    job->durable_groups += durable;
    return 0;
}

/* Ends the group where the options say so, or early. */
static int end_group(struct thread_data *td, struct job *job) {
    struct rio_options *o = td->eo;
    bool is_durable = td->o.sync_io || (o->durable && (job->groups + 1) % o->durable == 0);
    return submit(job, is_durable);
}

/* Adds a part of a write to the group. */
static int add(struct job *job, unsigned int place, uint64_t offset, const char *bytes, size_t length) {
    riop_buf *buf = NULL;
    int code = riop_buf_new(job->stream, length, &buf, &job->error);
    if (code == RIOP_OK) {
        memcpy(riop_buf_data(buf), bytes, length);
        code = riop_group_write(job->group, offset / RIOP_BLOCK_BYTES, buf, place, &job->error);
    }
    if (code != RIOP_OK) {
        riop_buf_free(buf);
        return fail(job, code);
    }
    return 0;
}

static int queue_write(struct thread_data *td, struct job *job, struct io_u *io) {
    struct rio_options *o = td->eo;
    size_t behind = o->commit, first = io->xfer_buflen - behind;
    const char *bytes = io->xfer_buf;
    int error = add(job, o->place, io->offset, bytes, first);
    if (!error && behind) {
        /* fio's write is complete with its commit record, so the first part has no entry in the queue. */
        error = submit(job, false);
        if (!error)
            error = add(job, o->place, io->offset + first, bytes + first, behind);
    }
    return error;
}

static int queue_trim(struct job *job, struct io_u *io) {
    int code = riop_group_discard(job->group, io->offset / RIOP_BLOCK_BYTES,
                                  (uint32_t)(io->xfer_buflen / RIOP_BLOCK_BYTES), &job->error);
    return code == RIOP_OK ? 0 : fail(job, code);
}

/* Submits a read into fio's buffer, which fio leaves alone until the read is complete. */
static int queue_read(struct job *job, struct io_u *io) {
    int code = riop_stream_submit_read(job->stream, io->offset / RIOP_BLOCK_BYTES, io->xfer_buf, io->xfer_buflen,
                                       (uint64_t)(uintptr_t)io, RIOP_FOREVER, NULL, &job->error);
    if (code != RIOP_OK)
        return code == RIOP_FAILED ? fail(job, code) : report("read", &job->error);
    job->reads++;
    return 0;
}

/* Makes all that was submitted durable, and waits for it. */
static int queue_sync(struct thread_data *td, struct job *job) {
    int error = submit(job, true);
    if (!error) {
        int code = riop_stream_wait(job->stream, RIOP_UNTIL_DURABLE, job->last, RIOP_FOREVER, &job->marks, &job->error);
        error = code == RIOP_OK ? 0 : fail(job, code);
    }
    io_u_mark_submit(td, 1);
    io_u_mark_complete(td, 1);
    return error;
}

static enum fio_q_status rio_queue(struct thread_data *td, struct io_u *io) {
    struct rio_options *o = td->eo;
    struct job *job = td->io_ops_data;
    int error = job->failed;
    if (io->ddir == DDIR_READ && job->reads == READS_MAX)
        return FIO_Q_BUSY;
    fio_ro_check(td, io);
    /* Before the copy, and before the wait of a sync. */
    if (fio_fill_issue_time(td)) {
        fio_gettime(&io->issue_time, NULL);
        if (td->o.read_iolog_file)
            memcpy(&td->last_issue, &io->issue_time, sizeof td->last_issue);
    }
    if (!error && ddir_rw(io->ddir) && (io->offset % RIOP_BLOCK_BYTES || io->xfer_buflen % RIOP_BLOCK_BYTES)) {
        log_err("riopipe: %llu bytes at %llu are no whole blocks of %d bytes (bs, ba, offset)\n", io->xfer_buflen,
                io->offset, RIOP_BLOCK_BYTES);
        error = EINVAL;
    }
    if (!error && io->ddir == DDIR_READ) {
        error = queue_read(job, io);
        if (!error)
            return FIO_Q_QUEUED;
    } else if (!error) {
        switch (io->ddir) {
        case DDIR_WRITE:
            error = queue_write(td, job, io);
            break;
        case DDIR_TRIM:
            error = queue_trim(job, io);
            break;
        case DDIR_SYNC:
        case DDIR_DATASYNC:
            io->error = queue_sync(td, job);
            return FIO_Q_COMPLETED;
        default:
            error = EINVAL;
        }
    }
    if (error) {
        io->error = error;
        return FIO_Q_COMPLETED;
    }
    push(job, io);
    if (++job->in_group == o->group)
        error = end_group(td, job);
    if (error) {
        /* It is the last of the queue, and its group stays unsubmitted: getevents ends the others. */
        job->count--;
        io->error = error;
        return FIO_Q_COMPLETED;
    }
    return FIO_Q_QUEUED;
}

/* ---- Completions -------------------------------------------------------------------------------------------------- */

static void finish(struct job *job, struct io_u *io, int error) {
    io->error = error;
    io->resid = error ? io->xfer_buflen : 0;
    job->done[job->done_count++] = io;
}

/* Moves the reads that have ended to the completions. */
static void reap_reads(struct job *job) {
    size_t count = job->capacity;
    while (job->reads > 0 && count == job->capacity) {
        int code = riop_stream_read_ends(job->stream, job->ends, job->capacity, &count, &job->error);
        if (code != RIOP_OK) {
            fail(job, code);
            break;
        }
        for (size_t n = 0; n < count; n++) {
            int error = 0;
            if (job->ends[n].code == RIOP_FAILED) {
                /* The other calls report the failure of the stream. */
                error = errno_of(RIOP_FAILED);
                riop_error_free(job->ends[n].error);
            } else if (job->ends[n].code != RIOP_OK) {
                error = report("read", &job->ends[n].error);
            }
            finish(job, (struct io_u *)(uintptr_t)job->ends[n].tag, error);
        }
        job->reads -= (unsigned int)count;
    }
}

/* Moves what the marks have reached to the completions; after a failure, all. */
static void reap(struct job *job) {
    while (job->count > 0) {
        struct waiting *first = entry(job, 0);
        bool reached = job->in_flight > 0 && first->seq <= (first->durable ? job->marks.durable : job->marks.complete);
        if (!reached && !job->failed)
            break;
        finish(job, first->io, reached ? 0 : job->failed);
        job->head = (job->head + 1) % job->capacity;
        job->count--;
        job->in_flight -= job->in_flight > 0;
    }
}

static int rio_commit(struct thread_data *td) {
    struct job *job = td->io_ops_data;
    if (!job->failed) {
        int code = riop_stream_send(job->stream, &job->error);
        if (code != RIOP_OK)
            fail(job, code);
    }
    return 0;
}

static int rio_getevents(struct thread_data *td, unsigned int min, unsigned int max, const struct timespec *limit) {
    struct job *job = td->io_ops_data;
    int64_t left_ms = limit ? (int64_t)limit->tv_sec * 1000 + limit->tv_nsec / 1000000 : RIOP_FOREVER;
    int code = RIOP_OK;
    if (min == 0 && !job->failed) /* A wait sends and receives, too. */
        code = riop_stream_poll(job->stream, &job->marks, &job->error);
    for (;;) {
        if (code == RIOP_TIMEOUT) {
            riop_error_free(job->error);
            job->error = NULL;
        } else if (code != RIOP_OK) {
            fail(job, code);
        }
        reap(job);
        reap_reads(job);
        if (job->done_count >= min || code == RIOP_TIMEOUT)
            break;
        if (job->count == 0 && job->reads == 0)
            break; /* fio waits for more than there is */
        /* fio waits for writes in a group that it does not fill any more. */
        if (job->done_count + job->in_flight + job->reads < min) {
            job->cut++;
            end_group(td, job);
            continue;
        }
        uint32_t until = job->count == 0 ? RIOP_UNTIL_READ : RIOP_UNTIL_MOVED;
        code = riop_stream_wait(job->stream, until, 0, left_ms, &job->marks, &job->error);
    }
    unsigned int taken = job->done_count < max ? job->done_count : max;
    memcpy(job->events, job->done, taken * sizeof *job->events);
    job->done_count -= taken;
    memmove(job->done, job->done + taken, job->done_count * sizeof *job->done);
    return (int)taken;
}

static struct io_u *rio_event(struct thread_data *td, int event) {
    struct job *job = td->io_ops_data;
    return job->events[event];
}

/* ---- The life of a job -------------------------------------------------------------------------------------------- */

static int check_options(struct thread_data *td) {
    struct rio_options *o = td->eo;
    const char *words[MEMBERS_MAX], *wrong = NULL;
    char *copy = NULL;
    if (!o->volume || !*o->volume)
        wrong = "rio_volume has no name";
    else if (!o->members || split_members(o->members, &copy, words) == 0)
        wrong = "rio_members has no drive, or more than 64: ADDR[:PORT][,nqn=NQN][,ns=N], with spaces between them";
    else if (o->group > td->o.iodepth)
        wrong = "iodepth is smaller than rio_group, so no group would ever be full";
    else if (o->commit % RIOP_BLOCK_BYTES)
        wrong = "rio_commit is no multiple of 4096";
    else if (o->commit && td_write(td) && o->commit >= td->o.min_bs[DDIR_WRITE])
        wrong = "rio_commit is not smaller than the writes (bs)";
    else if (o->commit && o->group != 1)
        wrong = "rio_commit needs rio_group=1";
    free(copy);
    if (wrong)
        log_err("riopipe: %s\n", wrong);
    return wrong != NULL;
}

static int rio_setup(struct thread_data *td) {
    struct rio_options *o = td->eo;
    riop_volume_info info = {.size = sizeof info};
    if (check_options(td) || look_up(o, &info))
        return 1;
    /* A volume belongs to one process. */
    td->o.use_thread = 1;
    if (!td->files_index) {
        add_file(td, td->o.filename ? td->o.filename : o->volume, 0, 0);
        td->o.nr_files = td->o.nr_files ? td->o.nr_files : 1;
        td->o.open_files++;
    }
    td->files[0]->real_file_size = info.blocks * RIOP_BLOCK_BYTES;
    return 0;
}

static void rio_cleanup(struct thread_data *td) {
    struct job *job = td->io_ops_data;
    if (!job)
        return;
    if (job->stream) {
        if (job->failed || riop_stream_close(job->stream, RIOP_FOREVER, NULL, &job->error) != RIOP_OK) {
            if (job->error)
                fail(job, riop_error_code(job->error));
            riop_stream_free(job->stream);
        }
        log_info("riopipe: %s: stream %u: %llu groups, %llu of them durable, %llu ended early\n", job->shared->name,
                 job->id, (unsigned long long)job->groups, (unsigned long long)job->durable_groups,
                 (unsigned long long)job->cut);
    }
    riop_group_free(job->group);
    leave(job);
    riop_error_free(job->error);
    free(job->queue);
    free(job->ends);
    free(job->done);
    free(job->events);
    free(job);
}

static int rio_init(struct thread_data *td) {
    struct rio_options *o = td->eo;
    riop_stream_options options = {.size = sizeof options, .queue_depth = o->depth, .no_merge = o->no_merge};
    struct job *job = calloc(1, sizeof *job);
    unsigned int capacity = td->o.iodepth;
    if (!job)
        return 1;
    td->io_ops_data = job;
    job->capacity = capacity;
    job->queue = calloc(capacity, sizeof *job->queue);
    job->ends = calloc(capacity, sizeof *job->ends);
    job->done = calloc(capacity, sizeof *job->done);
    job->events = calloc(capacity, sizeof *job->events);
    if (!job->queue || !job->ends || !job->done || !job->events) {
        log_err("riopipe: no memory\n");
        return 1;
    }
    if (join(td, job))
        return 1;
    int code = riop_stream_open(job->shared->volume, job->id, &options, &job->stream, &job->error);
    if (code == RIOP_PENDING) {
        /* Test data that a crash has left in doubt: fio judges it, if anything does. */
        code = riop_volume_acknowledge(job->shared->volume, job->id, &job->error);
        if (code == RIOP_OK)
            code = riop_stream_open(job->shared->volume, job->id, &options, &job->stream, &job->error);
    }
    if (code == RIOP_OK)
        code = riop_group_new(&job->group, &job->error);
    if (code != RIOP_OK) {
        fail(job, code);
        return 1;
    }
    return 0;
}

static int rio_no_file(struct thread_data *td, struct fio_file *file) {
    return 0;
}

/* fio finds it by this name. */
struct ioengine_ops ioengine = {
    .name = "riopipe",
    .version = FIO_IOOPS_VERSION,
    .flags = FIO_DISKLESSIO | FIO_NOEXTEND | FIO_NODISKUTIL | FIO_ASYNCIO_SETS_ISSUE_TIME,
    .setup = rio_setup,
    .init = rio_init,
    .queue = rio_queue,
    .commit = rio_commit,
    .getevents = rio_getevents,
    .event = rio_event,
    .cleanup = rio_cleanup,
    .open_file = rio_no_file,
    .invalidate = rio_no_file,
    .option_struct_size = sizeof(struct rio_options),
    .options = options,
};
