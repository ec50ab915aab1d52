#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <riopipe.h>

static riop_error *error; /* NULL before the first call */

static void check(int code, const char *what) {
    if (code != RIOP_OK) {
        fprintf(stderr, "%s: %s: %s\n", what, riop_code_name(code), riop_error_text(error));
        exit(1);
    }
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: example VOLUME MEMBER...\n");
        return 2;
    }
    const char *name = argv[1];
    const char *const *members = (const char *const *)argv + 2;
    size_t count = (size_t)argc - 2;

    riop_volume *volume;
    riop_recovery *recovery;
    riop_open_options options = { .size = sizeof options, .wait_for_lease_ms = 60000 };
    check(riop_volume_open(name, members, count, &options, &volume, &recovery, &error), "open");
    puts(riop_recovery_text(recovery));
    riop_recovery_free(recovery);

    riop_stream *stream;
    check(riop_stream_open(volume, 0, NULL, &stream, &error), "stream");

    /* Two groups in order: the commit is there only if the record is. Neither call waits for an answer. */
    riop_group *group;
    riop_buf *record, *commit;
    uint64_t seq;
    check(riop_group_new(&group, &error), "group");
    check(riop_buf_new(stream, RIOP_BLOCK_BYTES, &record, &error), "buffer");
    memset(riop_buf_data(record), 'r', RIOP_BLOCK_BYTES);
    check(riop_group_write(group, 0, record, RIOP_FRESH, &error), "write"); /* takes `record` */
    check(riop_group_submit(group, stream, 0, RIOP_FOREVER, NULL, &error), "submit");

    check(riop_buf_new(stream, RIOP_BLOCK_BYTES, &commit, &error), "buffer");
    memset(riop_buf_data(commit), 'c', RIOP_BLOCK_BYTES);
    check(riop_group_write(group, 1, commit, RIOP_FRESH, &error), "write");
    check(riop_group_tag(group, 1, &error), "tag");
    check(riop_group_submit(group, stream, RIOP_DURABLE, RIOP_FOREVER, &seq, &error), "submit");
    riop_group_free(group);

    riop_marks marks;
    check(riop_stream_wait(stream, RIOP_UNTIL_DURABLE, seq, RIOP_FOREVER, &marks, &error), "wait");
    printf("durable up to group %llu\n", (unsigned long long)marks.durable);

    static char blocks[2 * RIOP_BLOCK_BYTES];
    check(riop_stream_read(stream, 0, blocks, sizeof blocks, RIOP_FOREVER, &error), "read");
    printf("read back: %c%c\n", blocks[0], blocks[RIOP_BLOCK_BYTES]);

    check(riop_stream_close(stream, RIOP_FOREVER, NULL, &error), "close the stream");
    check(riop_volume_close(volume, RIOP_FOREVER, &error), "close the volume");
    return 0;
}
