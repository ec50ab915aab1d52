/* Submitted reads. Usage: reads VOLUME MEMBER... */
#include "check.h"

#include <poll.h>
#include <pthread.h>

enum { BLOCKS = 64, READS_MAX = 1024 };

static riop_stream *stream;

/* Memory of exactly one block, so that checkers of memory notice each byte beside it. */
static unsigned char *block_of_memory(void) {
    unsigned char *memory = malloc(RIOP_BLOCK_BYTES);
    CHECK(memory != NULL);
    memset(memory, 0xEE, RIOP_BLOCK_BYTES);
    return memory;
}

static uint64_t submit_read(uint64_t lba) {
    uint64_t id = 0;
    OK(riop_stream_submit_read(stream, lba, block_of_memory(), RIOP_BLOCK_BYTES, lba, RIOP_FOREVER, &id, &error));
    CHECK(id != 0);
    return id;
}

/* Takes `count` ends, each of a block that has its number as its content, and frees the memory. */
static void take(size_t count) {
    riop_read_end ends[7];
    size_t taken;
    unsigned char seen[BLOCKS] = {0};
    while (count > 0) {
        OK(riop_stream_wait(stream, RIOP_UNTIL_READ, 0, SOON, NULL, &error));
        OK(riop_stream_read_ends(stream, ends, 7, &taken, &error));
        CHECK(taken > 0 && taken <= count);
        for (size_t i = 0; i < taken; i++) {
            CHECK(ends[i].code == RIOP_OK && ends[i].error == NULL && ends[i].length == RIOP_BLOCK_BYTES);
            CHECK(ends[i].tag < BLOCKS && !seen[ends[i].tag]++);
            CHECK(all(ends[i].into, RIOP_BLOCK_BYTES, (int)ends[i].tag));
            free(ends[i].into);
        }
        count -= taken;
    }
    OK(riop_stream_read_ends(stream, ends, 7, &taken, &error));
    CHECK(taken == 0);
}

/* Another thread may take the ends, as long as only one is in a call. */
static void *take_all(void *nothing) {
    take(BLOCKS);
    no_error();
    return nothing;
}

static void check_arguments(void) {
    static unsigned char memory[RIOP_BLOCK_BYTES];
    riop_read_end end;
    size_t count = 9;
    RETURNS(RIOP_ARGUMENT, riop_stream_submit_read(NULL, 0, memory, sizeof memory, 0, 0, NULL, &error));
    RETURNS(RIOP_ARGUMENT, riop_stream_submit_read(stream, 0, NULL, sizeof memory, 0, 0, NULL, &error));
    RETURNS(RIOP_RANGE, riop_stream_submit_read(stream, 0, memory, 5, 0, 0, NULL, &error));
    RETURNS(RIOP_RANGE, riop_stream_submit_read(stream, UINT64_MAX, memory, sizeof memory, 0, 0, NULL, &error));
    RETURNS(RIOP_ARGUMENT, riop_stream_read_ends(stream, NULL, 1, &count, &error));
    RETURNS(RIOP_ARGUMENT, riop_stream_read_ends(stream, &end, 1, NULL, &error));
    CHECK(count == 9);
    OK(riop_stream_read_ends(stream, NULL, 0, &count, &error));
    CHECK(count == 0);
    RETURNS(RIOP_NOT_FOUND, riop_stream_cancel_read(stream, 77, &error));
    /* None is in flight, so the wait is over at once. */
    OK(riop_stream_wait(stream, RIOP_UNTIL_READ, 0, RIOP_FOREVER, NULL, &error));
}

/* The memory of a cancelled read is the caller's at once, also if the request is out. */
static void check_cancel(void) {
    riop_read_end end;
    size_t count;
    for (int round = 0; round < 50; round++) {
        uint64_t id = submit_read(3), other = submit_read(4);
        CHECK(other != id);
        if (round % 2)
            OK(riop_stream_send(stream, &error));
        int code = riop_stream_cancel_read(stream, id, &error);
        if (code == RIOP_NOT_FOUND) { /* It has ended before. */
            take(2);
            continue;
        }
        OK(code);
        for (;;) {
            OK(riop_stream_read_ends(stream, &end, 1, &count, &error));
            CHECK(count == 1);
            if (end.id == id)
                break;
            CHECK(end.id == other && end.code == RIOP_OK);
            other = 0;
            free(end.into);
        }
        CHECK(end.code == RIOP_CANCELLED && riop_error_code(end.error) == RIOP_CANCELLED);
        CHECK(strstr(riop_error_text(end.error), "cancelled") != NULL);
        OK(riop_error_free(end.error));
        free(end.into);
        if (other != 0)
            take(1);
    }
}

/* The number of reads whose end was not taken is bounded. */
static void check_bound(void) {
    static unsigned char memory[RIOP_BLOCK_BYTES], more[RIOP_BLOCK_BYTES];
    static riop_read_end ends[READS_MAX];
    size_t count, taken = 0;
    for (int i = 0; i < READS_MAX; i++) /* All have no blocks: they end at once. */
        OK(riop_stream_submit_read(stream, 0, memory, 0, 0, RIOP_FOREVER, NULL, &error));
    RETURNS(RIOP_FULL, riop_stream_submit_read(stream, 0, more, sizeof more, 0, RIOP_FOREVER, NULL, &error));
    CHECK(riop_error_is_retryable(error));
    do {
        OK(riop_stream_read_ends(stream, ends, READS_MAX, &count, &error));
        taken += count;
    } while (count > 0);
    CHECK(taken == READS_MAX);
    OK(riop_stream_submit_read(stream, 0, more, sizeof more, 0, RIOP_FOREVER, NULL, &error));
    OK(riop_stream_wait(stream, RIOP_UNTIL_READ, 0, SOON, NULL, &error));
    OK(riop_stream_read_ends(stream, ends, READS_MAX, &count, &error));
    CHECK(count == 1 && ends[0].into == more);
}

/* The owner sleeps on the descriptor only. */
static void check_descriptor(void) {
    int fd;
    int64_t timeout;
    size_t count = 0, taken;
    riop_read_end end;
    OK(riop_stream_event_fd(stream, &fd, &error));
    for (uint64_t lba = 0; lba < BLOCKS; lba++)
        submit_read(lba);
    while (count < BLOCKS) {
        OK(riop_stream_poll(stream, NULL, &error));
        for (;;) {
            OK(riop_stream_read_ends(stream, &end, 1, &taken, &error));
            if (taken == 0)
                break;
            CHECK(end.code == RIOP_OK && all(end.into, RIOP_BLOCK_BYTES, (int)end.tag));
            free(end.into);
            count++;
        }
        if (count == BLOCKS)
            break;
        OK(riop_stream_next_deadline(stream, &timeout, &error));
        struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
        CHECK(poll(&poll_fd, 1, timeout < 0 || timeout > SOON ? SOON : (int)timeout) >= 0);
    }
}

int main(int argc, char **argv) {
    riop_volume *volume = NULL;
    riop_group *group = NULL;
    uint64_t seq = 0;
    pthread_t thread;
    CHECK(argc >= 3);
    OK(riop_volume_open(argv[1], (const char *const *)argv + 2, (size_t)argc - 2, NULL, &volume, NULL, &error));
    OK(riop_stream_open(volume, 0, NULL, &stream, &error));
    OK(riop_group_new(&group, &error));
    for (uint64_t lba = 0; lba < BLOCKS; lba++)
        OK(riop_group_write(group, lba, filled(stream, RIOP_BLOCK_BYTES, (int)lba), RIOP_EXTEND, &error));
    OK(riop_group_submit(group, stream, 0, SOON, &seq, &error));
    OK(riop_group_free(group));

    /* The stream's own writes, of which nothing was sent. */
    for (uint64_t lba = 0; lba < BLOCKS; lba++)
        submit_read(lba);
    take(BLOCKS);
    check_arguments();
    check_cancel();
    check_bound();
    check_descriptor();

    for (uint64_t lba = 0; lba < BLOCKS; lba++)
        submit_read(lba);
    CHECK(pthread_create(&thread, NULL, take_all, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);

    /* A read that has no time, and then the end of the stream with reads in flight. */
    unsigned char *memory[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) {
        memory[i] = block_of_memory();
        OK(riop_stream_submit_read(stream, 0, memory[i], RIOP_BLOCK_BYTES, 0, RIOP_FOREVER, NULL, &error));
    }
    OK(riop_stream_close(stream, SOON, NULL, &error));
    for (int i = 0; i < BLOCKS; i++)
        free(memory[i]);
    OK(riop_stream_open(volume, 1, NULL, &stream, &error));
    for (int i = 0; i < BLOCKS; i++) {
        memory[i] = block_of_memory();
        OK(riop_stream_submit_read(stream, 0, memory[i], RIOP_BLOCK_BYTES, 0, RIOP_FOREVER, NULL, &error));
    }
    OK(riop_stream_send(stream, &error));
    OK(riop_stream_free(stream));
    for (int i = 0; i < BLOCKS; i++)
        free(memory[i]);
    OK(riop_volume_close(volume, SOON, &error));
    no_error();
    puts("reads: passed");
    return 0;
}
