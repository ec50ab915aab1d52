/* A stream in an event loop, without a blocking call. Usage: event_loop VOLUME MEMBER... */
#include "check.h"

#include <sys/epoll.h>
#include <unistd.h>

enum { GROUPS = 200 };

int main(int argc, char **argv) {
    riop_volume *volume = NULL;
    riop_stream *stream = NULL;
    riop_marks marks = {0, 0};
    int fd = -1, same = -1, loop = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN};
    CHECK(argc >= 3 && loop >= 0);
    OK(riop_volume_open(argv[1], (const char *const *)argv + 2, (size_t)argc - 2, NULL, &volume, NULL, &error));
    OK(riop_stream_open(volume, 1, NULL, &stream, &error));
    OK(riop_stream_event_fd(stream, &fd, &error));
    OK(riop_stream_event_fd(stream, &same, &error));
    CHECK(fd >= 0 && fd == same);
    CHECK(epoll_ctl(loop, EPOLL_CTL_ADD, fd, &event) == 0);

    /* At most 20 groups are in flight. Each tenth is durable. */
    uint64_t submitted = 0;
    for (;;) {
        int64_t timeout_ms;
        while (submitted < GROUPS && submitted < marks.durable + 20)
            submitted = submit(stream, submitted, 'x', submitted, submitted % 10 == 9 ? RIOP_DURABLE : 0);
        OK(riop_stream_poll(stream, &marks, &error));
        CHECK(marks.durable <= marks.complete && marks.complete <= submitted);
        if (marks.durable >= GROUPS)
            break;
        if (submitted < GROUPS && submitted < marks.durable + 20)
            continue;
        OK(riop_stream_next_deadline(stream, &timeout_ms, &error));
        CHECK(timeout_ms >= -1 && timeout_ms <= INT32_MAX);
        /* The deadline is the stream's own, so this ends even if a target is lost. */
        CHECK(epoll_wait(loop, &event, 1, (int)timeout_ms) >= 0);
    }
    CHECK(epoll_ctl(loop, EPOLL_CTL_DEL, fd, NULL) == 0);
    close(loop);
    OK(riop_stream_close(stream, SOON, NULL, &error));
    OK(riop_volume_close(volume, SOON, &error));
    puts("event_loop: passed");
    return 0;
}
