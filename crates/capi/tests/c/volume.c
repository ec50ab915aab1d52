/* A volume from its creation to its deletion, with an error of each kind on the way. Usage: volume MEMBER... */
#include "check.h"

static const char *const *members;
static size_t count;
static riop_volume *volume;

static void arguments(void) {
    riop_create_options options = {.size = sizeof options};
    const char *const bad[] = {"127.0.0.1:4420,foo=1"}, *const nothing[] = {"127.0.0.1:1"};
    const char *const absent[] = {NULL}, *const latin[] = {"\xe4:4420"};
    CHECK(riop_version() == (RIOP_VERSION_MAJOR << 16 | RIOP_VERSION_MINOR << 8 | RIOP_VERSION_PATCH));
    RETURNS(RIOP_ARGUMENT, riop_volume_create(NULL, members, count, NULL, NULL, &error));
    TEXT_HAS("name is null");
    RETURNS(RIOP_ARGUMENT, riop_volume_create("c", NULL, 1, NULL, NULL, &error));
    RETURNS(RIOP_ARGUMENT, riop_volume_create("c", members, 0, NULL, NULL, &error));
    RETURNS(RIOP_ARGUMENT, riop_volume_create("c", absent, 1, NULL, NULL, &error));
    RETURNS(RIOP_ARGUMENT, riop_volume_create("c", latin, 1, NULL, NULL, &error));
    RETURNS(RIOP_ARGUMENT, riop_volume_create("", members, count, NULL, NULL, &error));
    RETURNS(RIOP_ADDRESS, riop_volume_create("c", bad, 1, NULL, NULL, &error));
    TEXT_HAS("foo=1");
    CHECK(!riop_error_is_retryable(error));
    RETURNS(RIOP_UNREACHABLE, riop_volume_create("c", nothing, 1, NULL, NULL, &error));
    TEXT_HAS("127.0.0.1:1");
    CHECK(riop_error_is_retryable(error));
    CHECK(strcmp(riop_code_name(RIOP_UNREACHABLE), "RIOP_UNREACHABLE") == 0);
    /* Without a place for the error the code is the same. */
    CHECK(riop_volume_create("c", bad, 1, NULL, NULL, NULL) == RIOP_ADDRESS);

    options.engine = "fast";
    RETURNS(RIOP_OPTION, riop_volume_create("c", members, count, &options, NULL, &error));
    TEXT_HAS("horae");
    options.engine = NULL;
    options.streams = 2000;
    RETURNS(RIOP_OPTION, riop_volume_create("c", members, count, &options, NULL, &error));
    options.size = 0;
    RETURNS(RIOP_ARGUMENT, riop_volume_create("c", members, count, &options, NULL, &error));
    TEXT_HAS("sizeof(riop_create_options)");
    /* An option of a later version. */
    struct {
        riop_create_options known;
        uint64_t later;
    } later = {.known = {.size = sizeof later}, .later = 1};
    RETURNS(RIOP_OPTION, riop_volume_create("c", members, count, &later.known, NULL, &error));
    /* A structure for results without its size is refused before anything is created. */
    riop_volume_info info = {.size = 0};
    RETURNS(RIOP_ARGUMENT, riop_volume_create("c", members, count, NULL, &info, &error));
    info.size = sizeof info;
    RETURNS(RIOP_MEMBERS, riop_volume_inspect(members, count, NULL, &info, &error));
    CHECK(riop_error_members(error) == RIOP_MEMBERS_BLANK);
}

static void create(void) {
    /* A structure of a later version, in which nothing is set that this one does not know. */
    struct {
        riop_create_options known;
        uint64_t later;
    } options = {.known = {.size = sizeof options, .streams = 4}};
    riop_volume_info info = {.size = sizeof info};
    char *json = NULL;
    OK(riop_volume_create("c", members, count, &options.known, &info, &error));
    CHECK(info.streams == 4 && info.members == count && info.block_size == RIOP_BLOCK_BYTES);
    CHECK(info.blocks > 1000 && strcmp(info.name, "c") == 0 && strcmp(info.engine, "rio") == 0);
    RETURNS(RIOP_DRIVE, riop_volume_create("c", members, count, NULL, NULL, &error));
    /* An earlier version knew only the size of the volume. */
    riop_volume_info earlier;
    memset(&earlier, 7, sizeof earlier);
    earlier.size = offsetof(riop_volume_info, block_size);
    OK(riop_volume_inspect(members, count, NULL, &earlier, &error));
    CHECK(earlier.blocks == info.blocks && all((unsigned char *)&earlier.block_size, 4, 7));

    OK(riop_volume_list_json(members, count, NULL, &json, &error));
    CHECK(strstr(json, "\"name\":\"c\"") != NULL);
    riop_text_free(json);
    riop_text_free(NULL);
    RETURNS(RIOP_ARGUMENT, riop_volume_list_json(members, count, NULL, NULL, &error));
}

static void open_it(void) {
    riop_recovery *recovery = NULL;
    riop_stream_recovery found = {.size = sizeof found};
    riop_volume_info info = {.size = sizeof info};
    riop_volume *second = NULL;
    char *json = NULL;
    RETURNS(RIOP_MEMBERS, riop_volume_open("d", members, count, NULL, &volume, NULL, &error));
    CHECK(riop_error_members(error) == RIOP_MEMBERS_NAME);
    RETURNS(RIOP_ARGUMENT, riop_volume_open("c", members, 0, NULL, &volume, NULL, &error));
    CHECK(riop_error_members(error) == RIOP_MEMBERS_OTHER && riop_error_members(NULL) == RIOP_MEMBERS_OTHER);
    CHECK(volume == NULL);
    RETURNS(RIOP_ARGUMENT, riop_volume_open("c", members, count, NULL, NULL, NULL, &error));
    OK(riop_volume_open("c", members, count, NULL, &volume, &recovery, &error));
    CHECK(riop_recovery_is_nothing(recovery) && strstr(riop_recovery_text(recovery), "nothing to recover"));
    OK(riop_recovery_stream(recovery, 0, &found, &error));
    CHECK(found.last == 0 && found.tag == 0 && found.acknowledge == 0);
    RETURNS(RIOP_NOT_FOUND, riop_recovery_stream(recovery, 4, &found, &error));
    OK(riop_recovery_free(recovery));

    RETURNS(RIOP_OWNED, riop_volume_open("c", members, count, NULL, &second, NULL, &error));
    CHECK(riop_error_is_retryable(error) && second == NULL);
    OK(riop_volume_get_info(volume, &info, &error));
    CHECK(info.streams == 4 && strcmp(info.name, "c") == 0);
    OK(riop_volume_stat_json(volume, &json, &error));
    CHECK(strstr(json, "\"volume\":\"c\"") != NULL);
    riop_text_free(json);
}

static void wrong_objects(void) {
    riop_stream *stream = NULL;
    riop_group *group = NULL;
    riop_marks marks;
    uint64_t memory[64] = {0};
    OK(riop_group_new(&group, &error));
    RETURNS(RIOP_ARGUMENT, riop_stream_poll(NULL, &marks, &error));
    RETURNS(RIOP_HANDLE, riop_stream_poll((riop_stream *)volume, &marks, &error));
    TEXT_HAS("riop_stream");
    RETURNS(RIOP_HANDLE, riop_stream_poll((riop_stream *)memory, &marks, &error));
    RETURNS(RIOP_HANDLE, riop_stream_close((riop_stream *)group, 0, NULL, &error));
    CHECK(riop_volume_free((riop_volume *)group) == RIOP_HANDLE);
    CHECK(riop_buf_data((riop_buf *)group) == NULL && riop_buf_length((riop_buf *)group) == 0);
    CHECK(riop_group_free(NULL) == RIOP_OK && riop_stream_free(NULL) == RIOP_OK);
    RETURNS(RIOP_NOT_FOUND, riop_stream_open(volume, 99, NULL, &stream, &error));
    riop_stream_options options = {.size = sizeof options, .queue_depth = 5000};
    RETURNS(RIOP_OPTION, riop_stream_open(volume, 0, &options, &stream, &error));
    CHECK(stream == NULL);
    OK(riop_group_free(group));
}

/* Blocks 0, 2 and 3 are of 'a', 'b' and 'c', and block 1 of zeroes. */
static void read_many(riop_stream *stream, unsigned char *blocks) {
    unsigned char *second = blocks + RIOP_BLOCK_BYTES;
    riop_extent extents[] = {
        {.lba = 2, .into = second, .length = 2 * RIOP_BLOCK_BYTES},
        {.lba = 0, .into = blocks, .length = RIOP_BLOCK_BYTES},
        {.lba = 5, .into = NULL, .length = 0},
    };
    memset(blocks, 1, 3 * RIOP_BLOCK_BYTES);
    OK(riop_stream_read_many(stream, extents, 3, SOON, &error));
    CHECK(all(blocks, RIOP_BLOCK_BYTES, 'a'));
    CHECK(all(second, RIOP_BLOCK_BYTES, 'b') && all(second + RIOP_BLOCK_BYTES, RIOP_BLOCK_BYTES, 'c'));
    OK(riop_stream_read_many(stream, NULL, 0, SOON, &error));
    RETURNS(RIOP_ARGUMENT, riop_stream_read_many(stream, NULL, 1, SOON, &error));
    RETURNS(RIOP_ARGUMENT, riop_stream_read_many(stream, extents, SIZE_MAX, SOON, &error));
    /* The second one begins within the first one. */
    extents[1].into = second + RIOP_BLOCK_BYTES;
    RETURNS(RIOP_ARGUMENT, riop_stream_read_many(stream, extents, 2, SOON, &error));
    TEXT_HAS("the same memory");
    extents[1].into = NULL;
    RETURNS(RIOP_ARGUMENT, riop_stream_read_many(stream, extents, 2, SOON, &error));
    extents[1] = (riop_extent){.lba = (uint64_t)1 << 40, .into = blocks, .length = RIOP_BLOCK_BYTES};
    RETURNS(RIOP_RANGE, riop_stream_read_many(stream, extents, 2, SOON, &error));
}

static void ordered(void) {
    riop_stream *stream = NULL, *again = NULL;
    riop_group *group = NULL;
    riop_buf *buf = NULL;
    riop_marks marks;
    uint64_t seq = 0, last = 0;
    static unsigned char blocks[4 * RIOP_BLOCK_BYTES];
    OK(riop_stream_open(volume, 0, NULL, &stream, &error));
    RETURNS(RIOP_STREAM_OPEN, riop_stream_open(volume, 0, NULL, &again, &error));
    RETURNS(RIOP_STREAMS_OPEN, riop_volume_close(volume, SOON, &error));

    RETURNS(RIOP_RANGE, riop_buf_new(stream, 100, &buf, &error));
    RETURNS(RIOP_TOO_LARGE, riop_buf_new(stream, (size_t)1 << 40, &buf, &error));
    OK(riop_group_new(&group, &error));
    RETURNS(RIOP_EMPTY, riop_group_submit(group, stream, 0, 0, &seq, &error));
    RETURNS(RIOP_ARGUMENT, riop_group_submit(group, stream, 6, 0, &seq, &error));
    RETURNS(RIOP_RANGE, riop_group_discard(group, 0, 0, &error));

    /* A write that is not taken leaves the buffer to the caller. */
    buf = filled(stream, 2 * RIOP_BLOCK_BYTES, 'a');
    CHECK((uintptr_t)riop_buf_data(buf) % RIOP_BLOCK_BYTES == 0);
    RETURNS(RIOP_ARGUMENT, riop_group_write(group, 0, buf, 9, &error));
    CHECK(riop_buf_length(buf) == 2 * RIOP_BLOCK_BYTES);
    OK(riop_group_write(group, (uint64_t)1 << 40, buf, RIOP_FRESH, &error));
    /* A group that is refused is as before: it is refused again, and its buffers are freed with it. */
    for (int i = 0; i < 2; i++) {
        RETURNS(RIOP_RANGE, riop_group_submit(group, stream, 0, 0, &seq, &error));
        TEXT_HAS("1099511627776");
    }
    OK(riop_group_reset(group, &error));
    RETURNS(RIOP_EMPTY, riop_group_submit(group, stream, 0, 0, &seq, &error));

    /* Three groups: two writes, then one durable, then a discard. */
    OK(riop_group_write(group, 0, filled(stream, 2 * RIOP_BLOCK_BYTES, 'a'), RIOP_FRESH, &error));
    OK(riop_group_write(group, 2, filled(stream, RIOP_BLOCK_BYTES, 'b'), RIOP_EXTEND, &error));
    OK(riop_group_tag(group, 7, &error));
    OK(riop_group_submit(group, stream, 0, SOON, &seq, &error));
    CHECK(seq == 1);
    /* The group is empty now. */
    RETURNS(RIOP_EMPTY, riop_group_submit(group, stream, 0, 0, &seq, &error));
    OK(riop_group_write(group, 3, filled(stream, RIOP_BLOCK_BYTES, 'c'), RIOP_IN_PLACE, &error));
    OK(riop_group_submit(group, stream, RIOP_DURABLE, SOON, &seq, &error));
    CHECK(seq == 2);
    OK(riop_stream_wait(stream, RIOP_UNTIL_COMPLETE, 1, SOON, &marks, &error));
    CHECK(marks.complete >= 1);
    OK(riop_stream_wait(stream, RIOP_UNTIL_DURABLE, 2, SOON, &marks, &error));
    CHECK(marks.complete == 2 && marks.durable == 2);
    OK(riop_group_discard(group, 1, 1, &error));
    OK(riop_group_submit(group, stream, RIOP_DURABLE, SOON, NULL, &error));
    OK(riop_stream_send(stream, &error));
    OK(riop_stream_read(stream, 0, blocks, sizeof blocks, SOON, &error));
    CHECK(all(blocks, RIOP_BLOCK_BYTES, 'a') && all(blocks + RIOP_BLOCK_BYTES, RIOP_BLOCK_BYTES, 0));
    CHECK(all(blocks + 2 * RIOP_BLOCK_BYTES, RIOP_BLOCK_BYTES, 'b'));
    CHECK(all(blocks + 3 * RIOP_BLOCK_BYTES, RIOP_BLOCK_BYTES, 'c'));
    RETURNS(RIOP_RANGE, riop_stream_read(stream, 0, blocks, 100, SOON, &error));
    RETURNS(RIOP_ARGUMENT, riop_stream_read(stream, 0, NULL, sizeof blocks, SOON, &error));
    RETURNS(RIOP_ARGUMENT, riop_stream_read(stream, 0, blocks, SIZE_MAX, SOON, &error));

    read_many(stream, blocks);

    OK(riop_stream_last(stream, &last, &error));
    CHECK(last == 3);
    RETURNS(RIOP_NOT_SUBMITTED, riop_stream_wait(stream, RIOP_UNTIL_DURABLE, 99, SOON, NULL, &error));
    RETURNS(RIOP_TIMEOUT, riop_stream_wait(stream, RIOP_UNTIL_WOKEN, 0, 0, NULL, &error));
    CHECK(riop_error_is_retryable(error));
    RETURNS(RIOP_ARGUMENT, riop_stream_wait(stream, 77, 0, 0, NULL, &error));
    RETURNS(RIOP_HEALTHY, riop_stream_reopen(stream, NULL, &error));
    OK(riop_stream_wait(stream, RIOP_UNTIL_IDLE, 0, SOON, NULL, &error));
    OK(riop_stream_wait(stream, RIOP_UNTIL_DURABLE, 3, SOON, &marks, &error));
    OK(riop_stream_released(stream, &last, &error));
    CHECK(last <= 3);
    OK(riop_stream_poll(stream, &marks, &error));
    CHECK(marks.durable == 3);
    OK(riop_group_free(group));
    OK(riop_stream_close(stream, SOON, &last, &error));
    CHECK(last == 3);
}

/* A stream that may keep two blocks. */
static void full(void) {
    riop_stream_options options = {.size = sizeof options, .kept_bytes_max = 2 * RIOP_BLOCK_BYTES};
    riop_stream *stream = NULL;
    riop_group *group = NULL;
    riop_buf *buf = NULL;
    uint64_t seq = 0;
    unsigned char block[RIOP_BLOCK_BYTES];
    OK(riop_stream_open(volume, 1, &options, &stream, &error));
    RETURNS(RIOP_TOO_LARGE, riop_buf_new(stream, 3 * RIOP_BLOCK_BYTES, &buf, &error));
    OK(riop_group_new(&group, &error));
    for (uint64_t lba = 100; lba < 103; lba++)
        OK(riop_group_write(group, lba, filled(stream, RIOP_BLOCK_BYTES, 'd'), RIOP_FRESH, &error));
    RETURNS(RIOP_TOO_LARGE, riop_group_submit(group, stream, 0, SOON, &seq, &error));
    CHECK(!riop_error_is_retryable(error));
    OK(riop_group_reset(group, &error));

    /* Groups that are not durable do not leave before the next call that sends. So nothing makes space meanwhile. */
    for (uint64_t lba = 100; lba < 102; lba++) {
        OK(riop_group_write(group, lba, filled(stream, RIOP_BLOCK_BYTES, 'd'), RIOP_FRESH, &error));
        OK(riop_group_submit(group, stream, 0, 0, &seq, &error));
    }
    OK(riop_group_write(group, 102, filled(stream, RIOP_BLOCK_BYTES, 'e'), RIOP_FRESH, &error));
    RETURNS(RIOP_FULL, riop_group_submit(group, stream, RIOP_DURABLE, 0, &seq, &error));
    CHECK(riop_error_is_retryable(error));
    OK(riop_stream_wait(stream, RIOP_UNTIL_SPACE, 0, SOON, NULL, &error));
    /* The same group, with its buffer. */
    OK(riop_group_submit(group, stream, RIOP_DURABLE, SOON, &seq, &error));
    CHECK(seq == 3);
    OK(riop_group_free(group));
    OK(riop_stream_wait(stream, RIOP_UNTIL_DURABLE, seq, SOON, NULL, &error));
    OK(riop_stream_read(stream, 102, block, sizeof block, SOON, &error));
    CHECK(all(block, sizeof block, 'e'));
    OK(riop_stream_close(stream, SOON, NULL, &error));
}

/* A stream that is freed without a close is recovered when it is opened again. */
static void stream_recovery(void) {
    riop_stream *stream = NULL;
    riop_stream_recovery found = {.size = sizeof found};
    riop_watch *watch = NULL;
    size_t pending = 9;
    OK(riop_stream_open(volume, 2, NULL, &stream, &error));
    RETURNS(RIOP_NOT_FOUND, riop_stream_recovery_of(stream, &found, &error));
    OK(riop_watch_new(stream, &watch, &error));
    uint64_t seq = submit(stream, 200, 'f', 42, RIOP_DURABLE);
    OK(riop_stream_wait(stream, RIOP_UNTIL_DURABLE, seq, SOON, NULL, &error));
    OK(riop_stream_free(stream));
    RETURNS(RIOP_CLOSED, riop_watch_wait(watch, RIOP_UNTIL_DURABLE, seq + 1, SOON, NULL, &error));
    OK(riop_watch_wait(watch, RIOP_UNTIL_DURABLE, seq, SOON, NULL, &error));
    OK(riop_watch_free(watch));
    OK(riop_volume_pending(volume, 2, NULL, 0, &pending, &error));
    CHECK(pending == 0);
    RETURNS(RIOP_NOT_PENDING, riop_volume_acknowledge(volume, 2, &error));
    OK(riop_stream_open(volume, 2, NULL, &stream, &error));
    OK(riop_stream_recovery_of(stream, &found, &error));
    CHECK(found.last == seq && found.tag == 42);
    OK(riop_stream_close(stream, RIOP_FOREVER, NULL, &error));
}

int main(int argc, char **argv) {
    riop_volume_info info = {.size = sizeof info};
    CHECK(argc >= 2);
    members = (const char *const *)argv + 1;
    count = (size_t)argc - 1;
    arguments();
    create();
    open_it();
    wrong_objects();
    ordered();
    full();
    stream_recovery();
    OK(riop_volume_close(volume, SOON, &error));
    OK(riop_volume_delete("c", members, count, 0, NULL, &error));
    RETURNS(RIOP_NOT_FOUND, riop_volume_delete("c", members, count, 0, NULL, &error));
    RETURNS(RIOP_MEMBERS, riop_volume_inspect(members, count, NULL, &info, &error));
    CHECK(riop_error_members(error) == RIOP_MEMBERS_BLANK);
    no_error();
    puts("volume: passed");
    return 0;
}
