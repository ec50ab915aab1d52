/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A loadable VFS of SQLite that keeps the write-ahead log of a database on a stream of a riopipe volume. The database
 * itself, and all other files, are with the default VFS. docs/sqlite.md describes it.
 *
 *     .load ./riopipe_vfs
 *     .open 'file:app.db?vfs=riopipe&rio_volume=app&rio_members=10.0.0.1:4420'
 *     PRAGMA journal_mode=WAL;
 *
 * SQLite ends a transaction in one of two ways. With synchronous=FULL it syncs the log: all frames of the transaction are
 * one durable group then, and the write and the FLUSH travel together. With synchronous=NORMAL it goes on at once: the
 * frames are a group behind the earlier ones, so a crash leaves a prefix of the transactions.
 *
 * Block 0 of the volume has the name of the database. The log begins at block 1. This process has an image of the log in
 * memory, so reads of the log need no target, and a block that is written in part is sent whole.
 *
 * The place of all blocks is RIOP_EXTEND (trap T11): the new content serves as well as the old for each state to which
 * the volume may recover.
 *  - SQLite appends frames, and each has a checksum over all frames before it. So a frame beyond the prefix is never
 *    taken for a valid one, and the last block, which is written again with each transaction, begins with its old content.
 *  - SQLite begins the log anew when all frames are in the database, and synced there. Then the old frames and none serve
 *    the same. But a part of the old frames would not: so the new header is durable before any frame behind it is sent.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <riopipe.h>
#include <sqlite3ext.h>
SQLITE_EXTENSION_INIT1

#define MEMBERS_MAX 64
#define BLOCK ((sqlite3_int64)RIOP_BLOCK_BYTES)
#define MAGIC "riopipe SQLite log 1"
/* A longer name of a database does not fit into block 0. */
#define NAME_MAX_BYTES 3072
/* The longest log. SQLite's default is a checkpoint after 4 MiB; a long transaction or reader makes it longer. */
#define CAPACITY_MAX ((sqlite3_int64)1 << 30)
/* A transaction with more than so many blocks is sent in several groups. The last one has the commit. */
#define GROUP_BLOCKS_MAX 128
/* How much is read at once when a log is found. */
#define LOAD_BYTES ((sqlite3_int64)1 << 20)

/* The bytes of an error's text in one message of SQLite. */
#define TEXT_PIECE 180

/* The log of a database that is open in this process. Its connections share it. */
typedef struct Log {
    struct Log *next;
    int users;
    char *name;               /* the name of the log's file: that of the database, and -wal */
    sqlite3_mutex *mutex;
    riop_volume *volume;
    riop_stream *stream;
    riop_group *group;
    riop_error *error;
    int failed;               /* nothing is written after a failure */
    unsigned char *image;     /* the log, `capacity` bytes; the system gives memory when it is first touched */
    sqlite3_int64 capacity;   /* bytes */
    sqlite3_int64 loaded;     /* the image has the log up to this offset; no block behind it was written */
    sqlite3_int64 size;       /* the size of the log's file, as SQLite sees it, bytes */
    unsigned char *dirty;     /* for each block: it waits for the next group */
    sqlite3_int64 dirty_first, dirty_end, dirty_count; /* blocks */
} Log;

/* A file of SQLite: the log, or a file of the default VFS, which stands behind this structure. */
typedef struct File {
    sqlite3_file base;
    Log *log;           /* of the database, and of the log; else NULL */
    int is_log;
    sqlite3_file *real; /* NULL: the log */
} File;

static sqlite3_vfs *below; /* the default VFS */
static Log *logs;          /* under the static mutex of applications */

static sqlite3_mutex *list_mutex(void) {
    return sqlite3_mutex_alloc(SQLITE_MUTEX_STATIC_APP1);
}

/* ---- The log on its stream ---------------------------------------------------------------------------------------- */

/* Logs an error of the library. SQLite cuts a message after some 200 bytes, so a long text is logged in pieces. */
static void log_error(const Log *log, const char *what, int code, const riop_error *error) {
    const char *text = riop_error_text(error);
    sqlite3_log(code, "riopipe: %s: %s: %s", log->name, what, riop_code_name(riop_error_code(error)));
    for (size_t left = strlen(text); left > 0;) {
        size_t piece = left < TEXT_PIECE ? left : TEXT_PIECE;
        /* A piece ends with a word, if there is one. */
        for (size_t end = piece; piece < left && end > 0; end--)
            if (text[end] == ' ') {
                piece = end;
                break;
            }
        sqlite3_log(code, "riopipe: %.*s", (int)piece, text);
        text += piece;
        left -= piece;
    }
}

/* Reports the last error of the library, and ends all writing. */
static int failed(Log *log, const char *what, int code) {
    if (!log->failed)
        log_error(log, what, code, log->error);
    riop_error_free(log->error);
    log->error = NULL;
    log->failed = 1;
    return code;
}

static void set_dirty(Log *log, sqlite3_int64 offset, sqlite3_int64 bytes) {
    sqlite3_int64 first = offset / BLOCK, end = (offset + bytes + BLOCK - 1) / BLOCK;
    for (sqlite3_int64 block = first; block < end; block++) {
        log->dirty_count += !log->dirty[block];
        log->dirty[block] = 1;
    }
    if (log->dirty_end == log->dirty_first) {
        log->dirty_first = first;
        log->dirty_end = end;
    } else {
        log->dirty_first = first < log->dirty_first ? first : log->dirty_first;
        log->dirty_end = end > log->dirty_end ? end : log->dirty_end;
    }
}

/* Adds a run of blocks of the image to the group. Each is copied: the stream keeps the bytes until they are durable. */
static int add_run(Log *log, sqlite3_int64 first, sqlite3_int64 end) {
    riop_buf *buf = NULL;
    size_t bytes = (size_t)((end - first) * BLOCK);
    if (riop_buf_new(log->stream, bytes, &buf, &log->error) != RIOP_OK)
        return failed(log, "a buffer", SQLITE_IOERR_NOMEM);
    memcpy(riop_buf_data(buf), log->image + first * BLOCK, bytes);
    if (riop_group_write(log->group, 1 + (uint64_t)first, buf, RIOP_EXTEND, &log->error) != RIOP_OK) {
        riop_buf_free(buf);
        return failed(log, "a write", SQLITE_IOERR_WRITE);
    }
    return SQLITE_OK;
}

/* Submits the blocks that wait as one group. With `durable`, waits until it is durable. */
static int submit(Log *log, int durable) {
    uint64_t seq = 0;
    if (log->failed)
        return SQLITE_IOERR_WRITE;
    for (sqlite3_int64 block = log->dirty_first; block < log->dirty_end;) {
        sqlite3_int64 first = block;
        while (block < log->dirty_end && log->dirty[block])
            log->dirty[block++] = 0;
        int rc = block > first ? add_run(log, first, block) : SQLITE_OK;
        if (rc != SQLITE_OK)
            return rc;
        block += block == first;
    }
    log->dirty_first = log->dirty_end = log->dirty_count = 0;
    uint32_t flags = durable ? RIOP_DURABLE : 0;
    if (riop_group_submit(log->group, log->stream, flags, RIOP_FOREVER, &seq, &log->error) != RIOP_OK)
        return failed(log, "a group", SQLITE_IOERR_WRITE);
    if (durable &&
        riop_stream_wait(log->stream, RIOP_UNTIL_DURABLE, seq, RIOP_FOREVER, NULL, &log->error) != RIOP_OK)
        return failed(log, "a sync", SQLITE_IOERR_FSYNC);
    if (!durable && riop_stream_send(log->stream, &log->error) != RIOP_OK)
        return failed(log, "a group", SQLITE_IOERR_WRITE);
    return SQLITE_OK;
}

/* Reads the log into the image, up to an offset at least. */
static int load(Log *log, sqlite3_int64 up_to) {
    while (log->loaded < up_to) {
        sqlite3_int64 left = log->capacity - log->loaded;
        size_t bytes = (size_t)(left < LOAD_BYTES ? left : LOAD_BYTES);
        uint64_t lba = 1 + (uint64_t)(log->loaded / BLOCK);
        if (riop_stream_read(log->stream, lba, log->image + log->loaded, bytes, RIOP_FOREVER, &log->error) != RIOP_OK)
            return failed(log, "a read", SQLITE_IOERR_READ);
        log->loaded += (sqlite3_int64)bytes;
    }
    return SQLITE_OK;
}

static int log_read(Log *log, void *into, int bytes, sqlite3_int64 offset) {
    sqlite3_int64 there = log->size - offset;
    memset(into, 0, (size_t)bytes);
    if (there <= 0)
        return SQLITE_IOERR_SHORT_READ;
    sqlite3_int64 take = there < bytes ? there : bytes;
    int rc = load(log, offset + take);
    if (rc == SQLITE_OK) {
        memcpy(into, log->image + offset, (size_t)take);
        rc = take < bytes ? SQLITE_IOERR_SHORT_READ : SQLITE_OK;
    }
    return rc;
}

static int log_write(Log *log, const void *from, int bytes, sqlite3_int64 offset) {
    sqlite3_int64 end = offset + bytes;
    if (end > log->capacity)
        return SQLITE_FULL;
    int rc = SQLITE_OK;
    if (offset == 0) {
        /* A header: the log begins anew, and nothing behind it counts any more. */
        if (log->dirty_count > 0)
            rc = submit(log, 0);
        log->loaded = log->capacity;
    } else {
        /* Blocks are sent whole. */
        rc = load(log, end);
    }
    if (rc != SQLITE_OK)
        return rc;
    memcpy(log->image + offset, from, (size_t)bytes);
    log->size = end > log->size ? end : log->size;
    set_dirty(log, offset, bytes);
    if (offset == 0)
        return submit(log, 1);
    return log->dirty_count >= GROUP_BLOCKS_MAX ? submit(log, 0) : SQLITE_OK;
}

/* Makes the log empty: its header is not there any more. */
static int log_empty(Log *log) {
    if (log->size == 0)
        return SQLITE_OK;
    memset(log->image, 0, RIOP_BLOCK_BYTES);
    log->size = 0;
    log->loaded = log->capacity;
    set_dirty(log, 0, BLOCK);
    return submit(log, 1);
}

static void free_log(Log *log) {
    riop_group_free(log->group);
    riop_stream_free(log->stream);
    riop_volume_free(log->volume);
    riop_error_free(log->error);
    sqlite3_mutex_free(log->mutex);
    free(log->image);
    free(log->dirty);
    free(log->name);
    free(log);
}

/* Ends the log after its last user. What cannot be closed is left as by a crash: the next opening recovers it. */
static void close_log(Log *log) {
    if (riop_stream_close(log->stream, RIOP_FOREVER, NULL, &log->error) == RIOP_OK)
        log->stream = NULL;
    else
        failed(log, "the end of the stream", SQLITE_IOERR_CLOSE);
    if (riop_volume_close(log->volume, RIOP_FOREVER, &log->error) == RIOP_OK)
        log->volume = NULL;
    else
        failed(log, "the release of the volume", SQLITE_IOERR_CLOSE);
    free_log(log);
}

/* ---- Opening ------------------------------------------------------------------------------------------------------ */

/* A parameter of the URI, or of the environment. */
static const char *parameter(const char *file, const char *uri, const char *environment) {
    const char *value = sqlite3_uri_parameter(file, uri);
    return value ? value : environment ? getenv(environment) : NULL;
}

/* Finds the log of this database on its volume, or begins one. */
static int find(Log *log, const char *database, uint64_t blocks) {
    unsigned char *first = calloc(1, RIOP_BLOCK_BYTES), *own = calloc(1, RIOP_BLOCK_BYTES);
    size_t length = strlen(database);
    int rc = SQLITE_OK;
    if (!first || !own || length > NAME_MAX_BYTES) {
        rc = length > NAME_MAX_BYTES ? SQLITE_CANTOPEN : SQLITE_NOMEM;
        goto end;
    }
    memcpy(own, MAGIC, sizeof MAGIC);
    memcpy(own + sizeof MAGIC, database, length);
    if (riop_stream_read(log->stream, 0, first, RIOP_BLOCK_BYTES, RIOP_FOREVER, &log->error) != RIOP_OK) {
        rc = failed(log, "a read", SQLITE_IOERR_READ);
        goto end;
    }
    log->capacity = (sqlite3_int64)(blocks - 1) * BLOCK;
    log->capacity = log->capacity < CAPACITY_MAX ? log->capacity : CAPACITY_MAX;
    log->image = calloc(1, (size_t)log->capacity);
    log->dirty = calloc(1, (size_t)(log->capacity / BLOCK));
    if (!log->image || !log->dirty) {
        rc = SQLITE_NOMEM;
        goto end;
    }
    if (memcmp(first, own, RIOP_BLOCK_BYTES) == 0) {
        /* A log is there if its header is. Where it ends, the checksums of its frames show. */
        rc = load(log, BLOCK);
        if (rc == SQLITE_OK && log->image[0] != 0)
            log->size = log->capacity;
    } else if (memcmp(first, MAGIC, sizeof MAGIC) == 0) {
        sqlite3_log(SQLITE_CANTOPEN, "riopipe: the volume has the log of %s, and not that of %s: open that database, or "
                    "give each database a volume of its own", first + sizeof MAGIC, database);
        rc = SQLITE_CANTOPEN;
    } else {
        /* A new volume: block 0 and an empty header, in one durable group. */
        riop_buf *buf = NULL;
        if (riop_buf_new(log->stream, 2 * RIOP_BLOCK_BYTES, &buf, &log->error) != RIOP_OK) {
            rc = failed(log, "a buffer", SQLITE_NOMEM);
            goto end;
        }
        memcpy(riop_buf_data(buf), own, RIOP_BLOCK_BYTES);
        memset((char *)riop_buf_data(buf) + RIOP_BLOCK_BYTES, 0, RIOP_BLOCK_BYTES);
        if (riop_group_write(log->group, 0, buf, RIOP_FRESH, &log->error) != RIOP_OK) {
            riop_buf_free(buf);
            rc = failed(log, "a write", SQLITE_IOERR_WRITE);
        } else {
            rc = submit(log, 1);
        }
        log->loaded = log->capacity;
    }
end:
    free(first);
    free(own);
    return rc;
}

/* Opens the volume of a database. The caller has the list. */
static int open_log(const char *database, Log **opened) {
    const char *volume = parameter(database, "rio_volume", "RIO_VOLUME");
    const char *members = parameter(database, "rio_members", "RIO_MEMBERS");
    const char *words[MEMBERS_MAX];
    size_t count = 0;
    char *rest = NULL, *copy;
    riop_connect_options connect = {.size = sizeof connect};
    riop_open_options options = {.size = sizeof options, .connect = &connect};
    riop_volume_info info = {.size = sizeof info};
    riop_recovery *recovery = NULL;
    if (!volume || !members) {
        sqlite3_log(SQLITE_CANTOPEN, "riopipe: %s: the URI has no rio_volume and rio_members", database);
        return SQLITE_CANTOPEN;
    }
    Log *log = calloc(1, sizeof *log);
    copy = strdup(members);
    if (log)
        log->name = malloc(strlen(database) + sizeof "-wal");
    if (!log || !copy || !log->name) {
        free(copy);
        free(log);
        return SQLITE_NOMEM;
    }
    strcpy(log->name, database);
    strcat(log->name, "-wal");
    log->mutex = sqlite3_mutex_alloc(SQLITE_MUTEX_FAST);
    for (char *word = strtok_r(copy, " ;", &rest); word && count < MEMBERS_MAX; word = strtok_r(NULL, " ;", &rest))
        words[count++] = word;
    options.engine = parameter(database, "rio_engine", "RIO_ENGINE");
    options.wait_for_lease_ms = (uint32_t)sqlite3_uri_int64(database, "rio_lease", 60000);
    connect.host_nqn = parameter(database, "rio_hostnqn", "RIO_HOSTNQN");
    connect.dhchap_secret_file = parameter(database, "rio_dhchap_secret", "RIO_DHCHAP_SECRET");
    connect.dhchap_ctrl_secret_file = parameter(database, "rio_dhchap_ctrl_secret", "RIO_DHCHAP_CTRL_SECRET");
    connect.loss_timeout_ms = (uint32_t)sqlite3_uri_int64(database, "rio_loss", 0);
    connect.keep_alive_ms = (uint32_t)sqlite3_uri_int64(database, "rio_keep_alive", 0);
    int code = riop_volume_open(volume, words, count, &options, &log->volume, &recovery, &log->error);
    if (code == RIOP_OK && !riop_recovery_is_nothing(recovery))
        sqlite3_log(SQLITE_NOTICE, "riopipe: %s: %s", log->name, riop_recovery_text(recovery));
    if (code == RIOP_OK)
        code = riop_volume_get_info(log->volume, &info, &log->error);
    if (code == RIOP_OK)
        code = riop_stream_open(log->volume, 0, NULL, &log->stream, &log->error);
    if (code == RIOP_OK)
        code = riop_group_new(&log->group, &log->error);
    riop_recovery_free(recovery);
    free(copy);
    int rc = SQLITE_OK;
    if (code != RIOP_OK)
        rc = failed(log, volume, code == RIOP_OWNED ? SQLITE_BUSY : SQLITE_CANTOPEN);
    else
        rc = find(log, database, info.blocks);
    if (rc != SQLITE_OK) {
        /* Nothing was promised yet. The volume is released, so that the next attempt gets it. */
        if (log->stream)
            close_log(log);
        else
            free_log(log);
        return rc;
    }
    log->next = logs;
    logs = log;
    *opened = log;
    return SQLITE_OK;
}

/* The log of a database or of the file of a log; NULL if it is not open. The caller has the list. */
static Log *log_named(const char *name) {
    Log *log = logs;
    while (log && strcmp(log->name, name) != 0)
        log = log->next;
    return log;
}

static int use_log(const char *database, Log **used) {
    char *name = sqlite3_mprintf("%s-wal", database);
    if (!name)
        return SQLITE_NOMEM;
    sqlite3_mutex_enter(list_mutex());
    Log *log = log_named(name);
    int rc = log ? SQLITE_OK : open_log(database, &log);
    if (rc == SQLITE_OK) {
        log->users++;
        *used = log;
    }
    sqlite3_mutex_leave(list_mutex());
    sqlite3_free(name);
    return rc;
}

static void leave_log(Log *log) {
    sqlite3_mutex_enter(list_mutex());
    if (--log->users == 0) {
        Log **at = &logs;
        while (*at != log)
            at = &(*at)->next;
        *at = log->next;
        close_log(log);
    }
    sqlite3_mutex_leave(list_mutex());
}

/* ---- Methods of the log's file ------------------------------------------------------------------------------------ */

static Log *locked(sqlite3_file *file) {
    Log *log = ((File *)file)->log;
    sqlite3_mutex_enter(log->mutex);
    return log;
}

static int unlocked(Log *log, int rc) {
    sqlite3_mutex_leave(log->mutex);
    return rc;
}

static int wal_close(sqlite3_file *file) {
    leave_log(((File *)file)->log);
    return SQLITE_OK;
}

static int wal_read(sqlite3_file *file, void *into, int bytes, sqlite3_int64 offset) {
    Log *log = locked(file);
    return unlocked(log, log_read(log, into, bytes, offset));
}

static int wal_write(sqlite3_file *file, const void *from, int bytes, sqlite3_int64 offset) {
    Log *log = locked(file);
    return unlocked(log, log_write(log, from, bytes, offset));
}

static int wal_truncate(sqlite3_file *file, sqlite3_int64 size) {
    Log *log = locked(file);
    int rc = SQLITE_OK;
    if (size == 0)
        rc = log_empty(log);
    else if (size < log->size)
        log->size = size;
    return unlocked(log, rc);
}

static int wal_sync(sqlite3_file *file, int flags) {
    Log *log = locked(file);
    (void)flags;
    return unlocked(log, submit(log, 1));
}

static int wal_size(sqlite3_file *file, sqlite3_int64 *size) {
    Log *log = locked(file);
    *size = log->size;
    return unlocked(log, SQLITE_OK);
}

/* SQLite locks the database, and not its log. */
static int wal_lock(sqlite3_file *file, int lock) {
    (void)file, (void)lock;
    return SQLITE_OK;
}

static int wal_is_reserved(sqlite3_file *file, int *is_reserved) {
    (void)file;
    *is_reserved = 0;
    return SQLITE_OK;
}

static int wal_control(sqlite3_file *file, int operation, void *argument) {
    (void)file, (void)operation, (void)argument;
    return SQLITE_NOTFOUND;
}

static int wal_sector(sqlite3_file *file) {
    (void)file;
    return RIOP_BLOCK_BYTES;
}

/* A write that is cut leaves the bytes beside it alone: blocks are whole. So SQLite does not fill up the last sector. */
static int wal_characteristics(sqlite3_file *file) {
    (void)file;
    return SQLITE_IOCAP_POWERSAFE_OVERWRITE;
}

static const sqlite3_io_methods wal_methods = {
    .iVersion = 1,
    .xClose = wal_close,
    .xRead = wal_read,
    .xWrite = wal_write,
    .xTruncate = wal_truncate,
    .xSync = wal_sync,
    .xFileSize = wal_size,
    .xLock = wal_lock,
    .xUnlock = wal_lock,
    .xCheckReservedLock = wal_is_reserved,
    .xFileControl = wal_control,
    .xSectorSize = wal_sector,
    .xDeviceCharacteristics = wal_characteristics,
};

/* ---- Methods of the database's file: those of the default VFS, and the end of a transaction ------------------------- */

#define REAL(file) (((File *)(file))->real)

static int real_close(sqlite3_file *file) {
    int rc = REAL(file)->pMethods->xClose(REAL(file));
    leave_log(((File *)file)->log);
    return rc;
}
static int real_read(sqlite3_file *file, void *into, int bytes, sqlite3_int64 offset) {
    return REAL(file)->pMethods->xRead(REAL(file), into, bytes, offset);
}
static int real_write(sqlite3_file *file, const void *from, int bytes, sqlite3_int64 offset) {
    return REAL(file)->pMethods->xWrite(REAL(file), from, bytes, offset);
}
static int real_truncate(sqlite3_file *file, sqlite3_int64 size) {
    return REAL(file)->pMethods->xTruncate(REAL(file), size);
}
static int real_sync(sqlite3_file *file, int flags) {
    return REAL(file)->pMethods->xSync(REAL(file), flags);
}
static int real_size(sqlite3_file *file, sqlite3_int64 *size) {
    return REAL(file)->pMethods->xFileSize(REAL(file), size);
}
static int real_lock(sqlite3_file *file, int lock) {
    return REAL(file)->pMethods->xLock(REAL(file), lock);
}
static int real_unlock(sqlite3_file *file, int lock) {
    return REAL(file)->pMethods->xUnlock(REAL(file), lock);
}
static int real_is_reserved(sqlite3_file *file, int *is_reserved) {
    return REAL(file)->pMethods->xCheckReservedLock(REAL(file), is_reserved);
}
/* With synchronous=NORMAL no sync ends the transaction, so it leaves here. */
static int real_control(sqlite3_file *file, int operation, void *argument) {
    Log *log = ((File *)file)->log;
    if (operation == SQLITE_FCNTL_COMMIT_PHASETWO) {
        sqlite3_mutex_enter(log->mutex);
        int rc = log->dirty_count > 0 ? submit(log, 0) : SQLITE_OK;
        sqlite3_mutex_leave(log->mutex);
        if (rc != SQLITE_OK)
            return rc;
    }
    return REAL(file)->pMethods->xFileControl(REAL(file), operation, argument);
}
static int real_sector(sqlite3_file *file) {
    return REAL(file)->pMethods->xSectorSize(REAL(file));
}
static int real_characteristics(sqlite3_file *file) {
    return REAL(file)->pMethods->xDeviceCharacteristics(REAL(file));
}
static int real_shm_map(sqlite3_file *file, int page, int bytes, int extend, void volatile **memory) {
    return REAL(file)->pMethods->xShmMap(REAL(file), page, bytes, extend, memory);
}
static int real_shm_lock(sqlite3_file *file, int offset, int count, int flags) {
    return REAL(file)->pMethods->xShmLock(REAL(file), offset, count, flags);
}
static void real_shm_barrier(sqlite3_file *file) {
    REAL(file)->pMethods->xShmBarrier(REAL(file));
}
static int real_shm_unmap(sqlite3_file *file, int delete) {
    return REAL(file)->pMethods->xShmUnmap(REAL(file), delete);
}

static const sqlite3_io_methods database_methods = {
    .iVersion = 2,
    .xClose = real_close,
    .xRead = real_read,
    .xWrite = real_write,
    .xTruncate = real_truncate,
    .xSync = real_sync,
    .xFileSize = real_size,
    .xLock = real_lock,
    .xUnlock = real_unlock,
    .xCheckReservedLock = real_is_reserved,
    .xFileControl = real_control,
    .xSectorSize = real_sector,
    .xDeviceCharacteristics = real_characteristics,
    .xShmMap = real_shm_map,
    .xShmLock = real_shm_lock,
    .xShmBarrier = real_shm_barrier,
    .xShmUnmap = real_shm_unmap,
};

/* ---- The VFS ------------------------------------------------------------------------------------------------------ */

static int vfs_open(sqlite3_vfs *vfs, const char *name, sqlite3_file *opened, int flags, int *out) {
    File *file = (File *)opened;
    Log *log = NULL;
    (void)vfs;
    memset(file, 0, sizeof *file);
    if (flags & SQLITE_OPEN_WAL) {
        sqlite3_mutex_enter(list_mutex());
        log = log_named(name);
        if (log)
            log->users++;
        sqlite3_mutex_leave(list_mutex());
        if (!log)
            return SQLITE_CANTOPEN;
        file->log = log;
        file->base.pMethods = &wal_methods;
        if (out)
            *out = flags;
        return SQLITE_OK;
    }
    if (flags & SQLITE_OPEN_MAIN_DB) {
        int rc = use_log(name, &log);
        if (rc != SQLITE_OK)
            return rc;
        file->real = (sqlite3_file *)(file + 1);
        rc = below->xOpen(below, name, file->real, flags, out);
        if (rc != SQLITE_OK) {
            leave_log(log);
            return rc;
        }
        file->log = log;
        file->base.pMethods = &database_methods;
        return SQLITE_OK;
    }
    /* Journals and temporary files: the default VFS alone. */
    return below->xOpen(below, name, opened, flags, out);
}

static int vfs_delete(sqlite3_vfs *vfs, const char *name, int sync) {
    (void)vfs;
    sqlite3_mutex_enter(list_mutex());
    Log *log = log_named(name);
    int rc = SQLITE_OK;
    if (log) {
        sqlite3_mutex_enter(log->mutex);
        rc = log_empty(log);
        sqlite3_mutex_leave(log->mutex);
    }
    sqlite3_mutex_leave(list_mutex());
    return log ? rc : below->xDelete(below, name, sync);
}

static int vfs_access(sqlite3_vfs *vfs, const char *name, int flags, int *result) {
    (void)vfs;
    sqlite3_mutex_enter(list_mutex());
    Log *log = log_named(name);
    if (log) {
        sqlite3_mutex_enter(log->mutex);
        *result = log->size > 0;
        sqlite3_mutex_leave(log->mutex);
    }
    sqlite3_mutex_leave(list_mutex());
    return log ? SQLITE_OK : below->xAccess(below, name, flags, result);
}

static int vfs_full_name(sqlite3_vfs *vfs, const char *name, int bytes, char *full) {
    (void)vfs;
    return below->xFullPathname(below, name, bytes, full);
}

static sqlite3_vfs riopipe_vfs;

int sqlite3_riopipevfs_init(sqlite3 *connection, char **message, const sqlite3_api_routines *api) {
    SQLITE_EXTENSION_INIT2(api);
    (void)connection, (void)message;
    if (sqlite3_vfs_find("riopipe"))
        return SQLITE_OK_LOAD_PERMANENTLY;
    below = sqlite3_vfs_find(NULL);
    riopipe_vfs = *below;
    riopipe_vfs.pNext = NULL;
    riopipe_vfs.zName = "riopipe";
    riopipe_vfs.szOsFile = (int)sizeof(File) + below->szOsFile;
    riopipe_vfs.xOpen = vfs_open;
    riopipe_vfs.xDelete = vfs_delete;
    riopipe_vfs.xAccess = vfs_access;
    riopipe_vfs.xFullPathname = vfs_full_name;
    int rc = sqlite3_vfs_register(&riopipe_vfs, 0);
    return rc == SQLITE_OK ? SQLITE_OK_LOAD_PERMANENTLY : rc;
}
