/* Checks of the test programs: a failure names its line, and ends the program with 1. */
#ifndef CHECK_H
#define CHECK_H

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "riopipe.h"

/* The longest time that anything may take, milliseconds. */
#define SOON 120000

/* The last error. Each thread of a test has its own. */
static _Thread_local riop_error *error;

#define CHECK(condition)                                                                          \
    do {                                                                                          \
        if (!(condition)) {                                                                       \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);               \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

/* The call returns this code, and the error has it, too. */
#define RETURNS(code, call)                                                                       \
    do {                                                                                          \
        int expected_ = (code), code_ = (call);                                                   \
        if (code_ != expected_ || (code_ != RIOP_OK && riop_error_code(error) != code_)) {        \
            fprintf(stderr, "%s:%d: %s: %s instead of %s: %s\n", __FILE__, __LINE__, #call,       \
                    riop_code_name(code_), riop_code_name(expected_), riop_error_text(error));    \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

#define OK(call) RETURNS(RIOP_OK, call)

/* The last error's text contains this. */
#define TEXT_HAS(part)                                                                            \
    do {                                                                                          \
        if (strstr(riop_error_text(error), part) == NULL) {                                       \
            fprintf(stderr, "%s:%d: no \"%s\" in: %s\n", __FILE__, __LINE__, part,                \
                    riop_error_text(error));                                                      \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

/* Frees the last error, for checkers of memory. */
static inline void no_error(void) {
    riop_error_free(error);
    error = NULL;
}

/* A buffer of the stream that is filled with one byte. */
static inline riop_buf *filled(riop_stream *stream, size_t length, int byte) {
    riop_buf *buf = NULL;
    OK(riop_buf_new(stream, length, &buf, &error));
    CHECK(riop_buf_length(buf) == length);
    memset(riop_buf_data(buf), byte, length);
    return buf;
}

/* Submits a group of one write of one block, and returns its seq. */
static inline uint64_t submit(riop_stream *stream, uint64_t lba, int byte, uint64_t tag, uint32_t flags) {
    riop_group *group = NULL;
    uint64_t seq = 0;
    OK(riop_group_new(&group, &error));
    OK(riop_group_write(group, lba, filled(stream, RIOP_BLOCK_BYTES, byte), RIOP_FRESH, &error));
    OK(riop_group_tag(group, tag, &error));
    OK(riop_group_submit(group, stream, flags, SOON, &seq, &error));
    OK(riop_group_free(group));
    return seq;
}

/* All bytes have this value. */
static inline int all(const unsigned char *bytes, size_t length, int byte) {
    for (size_t i = 0; i < length; i++)
        if (bytes[i] != byte)
            return 0;
    return 1;
}

#endif
