/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Single inserts in a database whose log is on a stream, to measure the VFS and to kill it.
 *
 *   commits VFS.so URI measure SYNC SECONDS   inserts one row in each transaction; prints the transactions in a second
 *   commits VFS.so URI write SYNC             the same without an end; prints each row's number when its commit has returned
 *   commits VFS.so URI check LAST             checks that rows 1 to some k are there, with k >= LAST; prints k
 *   commits VFS.so URI many                   long transactions, one that is rolled back, and a reader beside a writer
 *
 * SYNC is full or normal: PRAGMA synchronous.
 */
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static sqlite3 *db;

static void die(const char *what) {
    fprintf(stderr, "commits: %s: %s\n", what, sqlite3_errmsg(db));
    exit(1);
}

static void run(const char *sql) {
    if (sqlite3_exec(db, sql, NULL, NULL, NULL) != SQLITE_OK)
        die(sql);
}

static void log_line(void *nothing, int code, const char *text) {
    (void)nothing;
    if (strncmp(text, "riopipe", 7) == 0 && code != SQLITE_NOTICE)
        fprintf(stderr, "commits: %s\n", text);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* The number of a query with one row and one column. */
static sqlite3_int64 number(const char *sql) {
    sqlite3_stmt *statement = NULL;
    if (sqlite3_prepare_v2(db, sql, -1, &statement, NULL) != SQLITE_OK || sqlite3_step(statement) != SQLITE_ROW)
        die(sql);
    sqlite3_int64 value = sqlite3_column_int64(statement, 0);
    sqlite3_finalize(statement);
    return value;
}

/* Inserts rows until the end of the time; without one, until the process is killed. */
static void insert(double seconds) {
    sqlite3_stmt *statement = NULL;
    run("CREATE TABLE IF NOT EXISTS t (n INTEGER PRIMARY KEY, text TEXT)");
    sqlite3_int64 n = number("SELECT coalesce(max(n), 0) FROM t"), begun = n;
    if (sqlite3_prepare_v2(db, "INSERT INTO t VALUES (?1, printf('row %d %0100d', ?1, ?1))", -1, &statement, NULL) != SQLITE_OK)
        die("INSERT");
    if (seconds == 0)
        /* The log begins anew every few commits, so that kills hit that, too. */
        run("PRAGMA wal_autocheckpoint=20");
    double start = now(), end = start;
    while (seconds == 0 || end - start < seconds) {
        sqlite3_bind_int64(statement, 1, ++n);
        if (sqlite3_step(statement) != SQLITE_DONE || sqlite3_reset(statement) != SQLITE_OK)
            die("INSERT");
        end = now();
        if (seconds == 0) {
            char line[32];
            int bytes = snprintf(line, sizeof line, "%lld\n", (long long)n);
            if (write(1, line, (size_t)bytes) != bytes)
                exit(1);
        }
    }
    sqlite3_finalize(statement);
    printf("%.0f\n", (double)(n - begun) / (end - start));
}

static void check(sqlite3_int64 last) {
    sqlite3_int64 rows = number("SELECT count(*) FROM t");
    if (rows < last || number("SELECT coalesce(max(n), 0) FROM t") != rows) {
        fprintf(stderr, "commits: %lld rows, and the last commit had returned for %lld\n", (long long)rows, (long long)last);
        exit(1);
    }
    if (number("SELECT count(*) FROM t WHERE text <> printf('row %d %0100d', n, n)") != 0)
        die("a row has another text");
    if (number("SELECT integrity_check <> 'ok' FROM pragma_integrity_check") != 0)
        die("integrity_check");
    printf("%lld\n", (long long)rows);
}

static void open_uri(const char *uri) {
    if (sqlite3_open_v2(uri, &db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_URI, NULL) != SQLITE_OK)
        die("open");
    run("PRAGMA journal_mode=WAL");
}

static void expect(const char *sql, sqlite3_int64 value) {
    sqlite3_int64 is = number(sql);
    if (is != value) {
        fprintf(stderr, "commits: %s: %lld, and not %lld\n", sql, (long long)is, (long long)value);
        exit(1);
    }
}

/* Transactions of some MiB in a small cache, so that frames are written before the commit. */
static void many(const char *uri) {
    const char *fill = "INSERT INTO m WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 20000) "
                       "SELECT n, hex(zeroblob(100)) FROM c";
    run("DROP TABLE IF EXISTS m; CREATE TABLE m (n INTEGER, text TEXT); PRAGMA cache_size=20");
    run("BEGIN");
    run(fill);
    run("ROLLBACK");
    expect("SELECT count(*) FROM m", 0);
    run(fill);
    expect("SELECT count(*) FROM m", 20000);
    /* A reader keeps its state while another connection writes and goes on. */
    sqlite3 *writer = db;
    open_uri(uri);
    run("BEGIN");
    expect("SELECT count(*) FROM m", 20000);
    sqlite3 *reader = db;
    db = writer;
    run("DELETE FROM m WHERE n > 10000");
    expect("SELECT count(*) FROM m", 10000);
    db = reader;
    expect("SELECT count(*) FROM m", 20000);
    run("COMMIT");
    expect("SELECT count(*) FROM m", 10000);
    if (sqlite3_close(db) != SQLITE_OK)
        die("close");
    db = writer;
    run("PRAGMA wal_checkpoint(TRUNCATE)");
    expect("SELECT integrity_check <> 'ok' FROM pragma_integrity_check", 0);
    run("DROP TABLE m");
}

int main(int argc, char **argv) {
    char *message = NULL;
    if (argc < 4) {
        fputs("usage: commits VFS.so URI measure|write|check|many …\n", stderr);
        return 2;
    }
    sqlite3_config(SQLITE_CONFIG_LOG, log_line, NULL);
    /* A VFS is loaded through some connection, and stays. */
    if (sqlite3_open(":memory:", &db) != SQLITE_OK)
        die("open");
    sqlite3_enable_load_extension(db, 1);
    if (sqlite3_load_extension(db, argv[1], "sqlite3_riopipevfs_init", &message) != SQLITE_OK) {
        fprintf(stderr, "commits: %s\n", message);
        return 1;
    }
    sqlite3_close(db);
    open_uri(argv[2]);
    if (strcmp(argv[3], "many") == 0) {
        many(argv[2]);
    } else if (argc < 5) {
        die("no argument");
    } else if (strcmp(argv[3], "check") == 0) {
        check(atoll(argv[4]));
    } else {
        char pragma[64];
        snprintf(pragma, sizeof pragma, "PRAGMA synchronous=%s", argv[4]);
        run(pragma);
        insert(argc > 5 ? atof(argv[5]) : 0);
    }
    if (sqlite3_close(db) != SQLITE_OK)
        die("close");
    return 0;
}
