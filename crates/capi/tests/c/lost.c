/* A target that dies. Prints "ready", and goes on when a line comes: then the target is dead. Usage: lost VOLUME MEMBER... */
#include "check.h"

int main(int argc, char **argv) {
    riop_connect_options connect = {.size = sizeof connect, .loss_timeout_ms = RIOP_ZERO};
    riop_open_options options = {.size = sizeof options, .connect = &connect};
    riop_volume *volume = NULL;
    riop_stream *stream = NULL;
    riop_group *group = NULL;
    riop_marks marks;
    unsigned char block[RIOP_BLOCK_BYTES];
    riop_read_end ends[3];
    size_t count = 0;
    CHECK(argc >= 3);
    OK(riop_volume_open(argv[1], (const char *const *)argv + 2, (size_t)argc - 2, &options, &volume, NULL, &error));
    OK(riop_stream_open(volume, 0, NULL, &stream, &error));
    uint64_t seq = submit(stream, 0, 'z', 0, RIOP_DURABLE);
    OK(riop_stream_wait(stream, RIOP_UNTIL_DURABLE, seq, SOON, NULL, &error));
    OK(riop_group_new(&group, &error));
    OK(riop_group_write(group, 1, filled(stream, RIOP_BLOCK_BYTES, 'z'), RIOP_FRESH, &error));
    puts("ready");
    fflush(stdout);
    CHECK(getchar() == '\n');

    for (uint64_t tag = 0; tag < 2; tag++)
        OK(riop_stream_submit_read(stream, 0, malloc(sizeof block), sizeof block, tag, RIOP_FOREVER, NULL, &error));
    /* A write to the dead connection raises no SIGPIPE, which would end this process. */
    int code = riop_group_submit(group, stream, RIOP_DURABLE, SOON, &seq, &error);
    if (code == RIOP_OK)
        RETURNS(RIOP_FAILED, riop_stream_wait(stream, RIOP_UNTIL_DURABLE, seq, SOON, &marks, &error));
    else
        RETURNS(RIOP_FAILED, code);
    TEXT_HAS("stream 0");
    CHECK(!riop_error_is_retryable(error));
    int can_reopen = riop_error_can_reopen(error);
    /* Each later call has the same error, and the objects can still be used and freed. */
    RETURNS(RIOP_FAILED, riop_stream_poll(stream, &marks, &error));
    CHECK(riop_error_can_reopen(error) == can_reopen);
    RETURNS(RIOP_FAILED, riop_stream_read(stream, 0, block, sizeof block, SOON, &error));
    /* The failure has ended the reads. Their ends can be taken, and no other read can be submitted. */
    RETURNS(RIOP_FAILED, riop_stream_submit_read(stream, 0, block, sizeof block, 0, RIOP_FOREVER, NULL, &error));
    OK(riop_stream_read_ends(stream, ends, 3, &count, &error));
    CHECK(count == 2);
    for (size_t i = 0; i < count; i++) {
        CHECK(ends[i].code == RIOP_FAILED && riop_error_can_reopen(ends[i].error) == can_reopen);
        free(ends[i].into);
        OK(riop_error_free(ends[i].error));
    }
    RETURNS(RIOP_FAILED, riop_stream_close(stream, RIOP_FOREVER, NULL, &error));
    CHECK(riop_stream_reopen(stream, NULL, &error) != RIOP_OK);
    OK(riop_group_free(group));
    OK(riop_stream_free(stream));
    CHECK(riop_volume_close(volume, 0, &error) != RIOP_OK);
    OK(riop_volume_free(volume));
    no_error();
    puts("lost: passed");
    return 0;
}
