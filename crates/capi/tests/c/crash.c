/* A process that dies, and the recovery after it. Usage: crash write|recover VOLUME MEMBER... */
#include "check.h"

#include <unistd.h>

int main(int argc, char **argv) {
    CHECK(argc >= 4);
    int writes = strcmp(argv[1], "write") == 0;
    riop_open_options options = {.size = sizeof options, .take_over = 1};
    riop_volume *volume = NULL;
    riop_recovery *recovery = NULL;
    riop_stream *stream = NULL;
    riop_stream_recovery found = {.size = sizeof found};
    unsigned char block[RIOP_BLOCK_BYTES];
    int code;
    do /* A target may not have noticed the end of the first process yet. */
        code = riop_volume_open(argv[2], (const char *const *)argv + 3, (size_t)argc - 3, &options, &volume, &recovery,
                                &error);
    while (code != RIOP_OK && riop_error_is_retryable(error));
    OK(code);
    OK(riop_recovery_stream(recovery, 3, &found, &error));
    if (writes) {
        OK(riop_stream_open(volume, 3, NULL, &stream, &error));
        uint64_t seq = submit(stream, 300, 'y', 1234, RIOP_DURABLE);
        OK(riop_stream_wait(stream, RIOP_UNTIL_DURABLE, seq, SOON, NULL, &error));
        _exit(0);
    }
    CHECK(found.tag == 1234 && found.last == 1 && found.acknowledge == 0 && found.in_place == 0);
    riop_recovery_free(recovery);
    OK(riop_stream_open(volume, 3, NULL, &stream, &error));
    OK(riop_stream_read(stream, 300, block, sizeof block, SOON, &error));
    CHECK(all(block, sizeof block, 'y'));
    OK(riop_stream_close(stream, SOON, NULL, &error));
    OK(riop_volume_close(volume, SOON, &error));
    no_error();
    puts("crash: passed");
    return 0;
}
