/* A target that demands authentication. Usage: secrets HOSTNQN HOST TARGETS WRONG SHARED MEMBER: files with secrets. */
#include "check.h"

static const char *member, *host, *targets, *wrong;

/* Creates, opens or inspects the volume with these secrets. */
static int inspect(const char *secret, const char *ctrl_secret) {
    riop_connect_options connect = {.size = sizeof connect, .host_nqn = host};
    riop_volume_info info = {.size = sizeof info};
    connect.dhchap_secret_file = secret;
    connect.dhchap_ctrl_secret_file = ctrl_secret;
    return riop_volume_inspect(&member, 1, &connect, &info, &error);
}

/* The call fails because of authentication. Its text has none of the secrets. */
static void refused(const char *secret, const char *ctrl_secret) {
    const char *files[] = {secret, ctrl_secret};
    RETURNS(RIOP_AUTHENTICATION, inspect(secret, ctrl_secret));
    TEXT_HAS("authenticate");
    CHECK(!riop_error_is_retryable(error));
    for (int i = 0; i < 2; i++) {
        char text[256] = "";
        FILE *file = files[i] ? fopen(files[i], "r") : NULL;
        if (!file)
            continue;
        CHECK(fgets(text, sizeof text, file) != NULL && strlen(text) > 40);
        fclose(file);
        text[30] = 0;
        CHECK(strstr(riop_error_text(error), text + 10) == NULL);
    }
}

int main(int argc, char **argv) {
    CHECK(argc == 7);
    host = argv[1];
    targets = argv[3];
    wrong = argv[4];
    member = argv[6];
    const char *right = argv[2], *shared = argv[5];
    riop_connect_options connect = {.size = sizeof connect, .host_nqn = host};
    riop_create_options create = {.size = sizeof create, .connect = &connect};
    riop_open_options open = {.size = sizeof open, .connect = &connect};
    riop_volume *volume = NULL;
    riop_stream *stream = NULL;
    connect.dhchap_secret_file = right;
    OK(riop_volume_create("s", &member, 1, &create, NULL, &error));
    /* Both directions; streams and readers have connections of their own. */
    connect.dhchap_ctrl_secret_file = targets;
    OK(riop_volume_open("s", &member, 1, &open, &volume, NULL, &error));
    OK(riop_stream_open(volume, 0, NULL, &stream, &error));
    uint64_t seq = submit(stream, 0, 's', 0, RIOP_DURABLE);
    OK(riop_stream_wait(stream, RIOP_UNTIL_DURABLE, seq, SOON, NULL, &error));
    OK(riop_stream_close(stream, SOON, NULL, &error));
    OK(riop_volume_close(volume, SOON, &error));
    OK(inspect(right, NULL));
    OK(inspect(right, targets));

    refused(NULL, NULL);
    refused(wrong, NULL);
    refused(right, wrong); /* The target has another one. */
    /* A program of an earlier version had no secrets. */
    connect.size = offsetof(riop_connect_options, dhchap_secret_file);
    RETURNS(RIOP_AUTHENTICATION, riop_volume_open("s", &member, 1, &open, &volume, NULL, &error));

    RETURNS(RIOP_OPTION, inspect(shared, NULL));
    TEXT_HAS("chmod 600");
    RETURNS(RIOP_OPTION, inspect("/nowhere/secret", NULL));
    TEXT_HAS("/nowhere/secret");
    RETURNS(RIOP_OPTION, inspect(NULL, targets));
    TEXT_HAS("dhchap_secret_file");
    RETURNS(RIOP_OPTION, inspect(argv[0], NULL)); /* This program is no secret, and others may read it. */
    /* The secret itself in the place of its file is not shown. */
    RETURNS(RIOP_OPTION, inspect("DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:", NULL));
    CHECK(strstr(riop_error_text(error), "ia6z") == NULL);
    TEXT_HAS("path");
    no_error();
    puts("secrets: passed");
    return 0;
}
