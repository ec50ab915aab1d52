/* Watches, wakers and readers in other threads. Usage: threads VOLUME MEMBER... */
#include "check.h"

#include <pthread.h>

static riop_stream *stream;
static riop_watch *watch;
static riop_waker *waker;
static riop_reader *reader;

enum { GROUPS = 64 };

static void *wait_for_all(void *until) {
    riop_marks marks;
    uint64_t released;
    OK(riop_watch_wait(watch, *(uint32_t *)until, GROUPS, SOON, &marks, &error));
    CHECK(marks.complete >= GROUPS);
    OK(riop_watch_marks(watch, &marks, &error));
    CHECK(marks.complete >= GROUPS);
    OK(riop_watch_released(watch, &released, &error));
    no_error();
    return NULL;
}

/* Waits until the owner is in a call, and interrupts it. */
static void *interrupt(void *nothing) {
    uint64_t last;
    int code;
    do
        code = riop_stream_last(stream, &last, &error);
    while (code == RIOP_OK);
    RETURNS(RIOP_BUSY, code);
    CHECK(riop_stream_free(stream) == RIOP_BUSY);
    OK(riop_waker_wake(waker, &error));
    no_error();
    return nothing;
}

static void *read_blocks(void *nothing) {
    static _Thread_local unsigned char block[RIOP_BLOCK_BYTES];
    for (uint64_t lba = 0; lba < GROUPS; lba++) {
        OK(riop_reader_read(reader, lba, block, sizeof block, SOON, &error));
        CHECK(all(block, sizeof block, (int)lba));
    }
    RETURNS(RIOP_RANGE, riop_reader_read(reader, 0, block, 5, SOON, &error));
    unsigned char two[2 * RIOP_BLOCK_BYTES];
    riop_extent extents[] = {{1, two, RIOP_BLOCK_BYTES}, {0, two + RIOP_BLOCK_BYTES, RIOP_BLOCK_BYTES}};
    OK(riop_reader_read_many(reader, extents, 2, SOON, &error));
    CHECK(all(two, RIOP_BLOCK_BYTES, 1) && all(two + RIOP_BLOCK_BYTES, RIOP_BLOCK_BYTES, 0));
    extents[1].into = two;
    RETURNS(RIOP_ARGUMENT, riop_reader_read_many(reader, extents, 2, SOON, &error));
    extents[1].into = two + RIOP_BLOCK_BYTES;
    extents[0].length = 5;
    RETURNS(RIOP_RANGE, riop_reader_read_many(reader, extents, 2, SOON, &error));
    no_error();
    return nothing;
}

int main(int argc, char **argv) {
    riop_volume *volume = NULL;
    uint32_t conditions[2] = {RIOP_UNTIL_COMPLETE, RIOP_UNTIL_DURABLE};
    riop_reader_options options = {.size = sizeof options, .concurrent = 2};
    pthread_t threads[2];
    int code;
    CHECK(argc >= 3);
    OK(riop_volume_open(argv[1], (const char *const *)argv + 2, (size_t)argc - 2, NULL, &volume, NULL, &error));
    OK(riop_stream_open(volume, 0, NULL, &stream, &error));
    OK(riop_watch_new(stream, &watch, &error));
    OK(riop_waker_new(stream, &waker, &error));
    OK(riop_reader_new(volume, &options, &reader, &error));
    RETURNS(RIOP_ARGUMENT, riop_watch_wait(watch, RIOP_UNTIL_SPACE, 0, 0, NULL, &error));
    RETURNS(RIOP_TIMEOUT, riop_watch_wait(watch, RIOP_UNTIL_DURABLE, 1, 0, NULL, &error));

    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&threads[i], NULL, wait_for_all, &conditions[i]) == 0);
    for (uint64_t lba = 0; lba < GROUPS; lba++)
        submit(stream, lba, (int)lba, lba, lba + 1 == GROUPS ? RIOP_DURABLE : 0);
    /* The owner does not call: the volume's thread drives the stream. */
    for (int i = 0; i < 2; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);

    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&threads[i], NULL, read_blocks, NULL) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);

    /* A stream has one thread at a time: the second one is refused. */
    CHECK(pthread_create(&threads[0], NULL, interrupt, NULL) == 0);
    do /* The other thread is in its call. */
        code = riop_stream_wait(stream, RIOP_UNTIL_WOKEN, 0, SOON, NULL, &error);
    while (code == RIOP_BUSY);
    OK(code);
    CHECK(pthread_join(threads[0], NULL) == 0);
    OK(riop_waker_wake(waker, &error));
    do /* The released mark may move first. */
        code = riop_stream_wait(stream, RIOP_UNTIL_MOVED, 0, SOON, NULL, &error);
    while (code == RIOP_OK);
    RETURNS(RIOP_WOKEN, code);
    CHECK(riop_error_is_retryable(error));

    OK(riop_stream_close(stream, SOON, NULL, &error));
    RETURNS(RIOP_CLOSED, riop_watch_wait(watch, RIOP_UNTIL_DURABLE, GROUPS + 1, SOON, NULL, &error));
    OK(riop_waker_free(waker));
    OK(riop_watch_free(watch));
    OK(riop_reader_free(reader));
    OK(riop_volume_close(volume, SOON, &error));
    no_error();
    puts("threads: passed");
    return 0;
}
