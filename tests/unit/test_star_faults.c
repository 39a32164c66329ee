/* SPDX-License-Identifier: MIT */
/* Ranks as processes that are killed or stopped: every other rank is told who it was, whether it waits in a call or asks. The
 * program itself starts no thread, so that it may fork. */
#include "star_rig.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WORLD = 4, SENTENCE = 600 };

/* What a child does once its star stands and its first gather is through. */
typedef enum doing {
    IN_A_GATHER, /* waits for a rank that will not come */
    ONLY_ASKING, /* asks check, calls nothing */
} doing;

typedef struct report {
    fsdp_status status, check;
    uint32_t rank;
    char sentence[SENTENCE], check_sentence[SENTENCE];
} report;

typedef struct job {
    star_place place;
    uint32_t victim;
    doing doing;
    bool words;
    uint64_t timeout_ns;
    pid_t child[WORLD];
    int ready[2], reports[2]; /* pipes to the parent */
} job;

enum { WORDS_BYTES = 32 };

static void tell(void *arg, void *blob)
{
    const star_rank *r = arg;
    snprintf(blob, WORDS_BYTES, "rank %u lives", r->rank);
}

static void compose(void *arg, const char *sentence, const void *const *blobs, uint32_t world, char *text, size_t bytes)
{
    (void)arg, (void)sentence;
    size_t at = 0;
    for (uint32_t i = 0; i < world && at < bytes; i++)
        at += (size_t)snprintf(text + at, bytes - at, "%s%s", i > 0 ? ", " : "",
                               blobs[i] != NULL ? (const char *)blobs[i] : "no answer");
}

static void child_main(job *j, uint32_t rank)
{
    static star_rank r;
    unsigned char all[WORLD * 8];
    report said = {.rank = rank};
    alarm(150);
    star_rank_init(&r, &j->place, rank);
    if (rank > 0 && j->place.listener >= 0) close(j->place.listener);
    if (j->words) r.args.words = (fsdp_side_words){&r, WORDS_BYTES, tell, compose};
    if (star_rank_open(&r) != FSDP_OK || star_rank_gather(&r, all, 8, 50 * STAR_SECOND) != FSDP_OK) {
        fprintf(stderr, "rank %u: %s\n", rank, fsdp_last_error());
        _exit(1);
    }
    if (write(j->ready[1], &rank, sizeof rank) != sizeof rank) _exit(1);
    if (rank == j->victim)
        for (;;) pause();
    if (j->doing == IN_A_GATHER) said.status = star_rank_gather(&r, all, 8, j->timeout_ns);
    else
        while ((said.status = fsdp__star_side_ops.check(r.side)) == FSDP_OK) usleep(1000);
    snprintf(said.sentence, sizeof said.sentence, "%s", fsdp_last_error());
    said.check = fsdp__star_side_ops.check(r.side);
    snprintf(said.check_sentence, sizeof said.check_sentence, "%s", fsdp_last_error());
    star_rank_close(&r);
    _exit(write(j->reports[1], &said, sizeof said) == sizeof said ? 0 : 1);
}

static void read_whole(int fd, void *to, size_t bytes)
{
    for (size_t have = 0; have < bytes;) {
        ssize_t n = read(fd, (char *)to + have, bytes - have);
        if (n < 0 && errno == EINTR) continue;
        assert_true(n > 0);
        have += (size_t)n;
    }
}

/* Start all ranks, hit one with a signal, and hear what the others say. */
static void hit(job *j, const char *address, int signal_number, const char *expected)
{
    uint32_t rank;
    assert_true(star_place_make(&j->place, address, WORLD));
    assert_int_equal(pipe(j->ready), 0);
    assert_int_equal(pipe(j->reports), 0);
    for (uint32_t r = 0; r < WORLD; r++) {
        fflush(NULL);
        j->child[r] = fork();
        assert_true(j->child[r] >= 0);
        if (j->child[r] == 0) child_main(j, r);
    }
    if (j->place.listener >= 0) close(j->place.listener);
    close(j->ready[1]);
    close(j->reports[1]);
    for (int i = 0; i < WORLD; i++) read_whole(j->ready[0], &rank, sizeof rank);
    assert_int_equal(kill(j->child[j->victim], signal_number), 0);
    for (int i = 0; i < WORLD - 1; i++) {
        report said;
        read_whole(j->reports[0], &said, sizeof said);
        if (said.status != FSDP_ERR_RANK_LOST || strcmp(said.sentence, expected) != 0)
            fail_msg("rank %u: %s: %s; expected: %s", said.rank, fsdp_status_name(said.status), said.sentence,
                     expected);
        assert_int_equal(said.check, FSDP_ERR_RANK_LOST);
        assert_string_equal(said.check_sentence, expected);
    }
    assert_int_equal(kill(j->child[j->victim], SIGKILL), 0);
    for (uint32_t r = 0; r < WORLD; r++) {
        int ended;
        assert_int_equal(waitpid(j->child[r], &ended, 0), j->child[r]);
        assert_true(r == j->victim ? WIFSIGNALED(ended) : WIFEXITED(ended) && WEXITSTATUS(ended) == 0);
    }
    close(j->ready[0]);
    close(j->reports[0]);
}

static const char *const addresses[] = {"127.0.0.1", "@"};

static void a_killed_rank_is_named_on_all(void **state)
{
    (void)state;
    for (uint32_t victim = 0; victim < WORLD; victim++) {
        for (int i = 0; i < 4; i++) {
            char expected[256];
            job j = {.victim = victim, .doing = i / 2 ? ONLY_ASKING : IN_A_GATHER, .timeout_ns = 60 * STAR_SECOND};
            snprintf(expected, sizeof expected,
                     "rank %u is gone: its connection closed (the process ended or was killed)", victim);
            hit(&j, addresses[i % 2], SIGKILL, expected);
        }
    }
}

static void with_a_killed_rank_come_the_words_of_the_living(void **state)
{
    (void)state;
    job j = {.victim = 2, .doing = IN_A_GATHER, .words = true, .timeout_ns = 60 * STAR_SECOND};
    hit(&j, "127.0.0.1", SIGKILL,
        "rank 2 is gone: its connection closed (the process ended or was killed). rank 0 lives, rank 1 lives, no "
        "answer, "
        "rank 3 lives");
    j = (job){.victim = 0, .doing = ONLY_ASKING, .words = true};
    hit(&j, "127.0.0.1", SIGKILL, "rank 0 is gone: its connection closed (the process ended or was killed)");
}

static void a_stopped_rank_is_named_at_the_deadline(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        job j = {.victim = 1, .doing = IN_A_GATHER, .words = i == 1, .timeout_ns = STAR_SECOND * 3 / 2};
        hit(&j, addresses[i], SIGSTOP,
            i == 0 ? "side channel #2 of 8 bytes: rank 1 of 4 did not come within 1.500 s"
                   : "side channel #2 of 8 bytes: rank 1 of 4 did not come within 1.500 s. rank 0 lives, no answer, "
                     "rank 2 "
                     "lives, rank 3 lives");
        j = (job){.victim = 0, .doing = IN_A_GATHER, .timeout_ns = STAR_SECOND * 3 / 2};
        hit(&j, addresses[i], SIGSTOP,
            "side channel #2 of 8 bytes: rank 0 of 4, which holds the side channel, did not answer within 1.500 s");
    }
}

#define TEST(name) cmocka_unit_test_setup(name, star_deadline)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_killed_rank_is_named_on_all),
        TEST(with_a_killed_rank_come_the_words_of_the_living),
        TEST(a_stopped_rank_is_named_at_the_deadline),
    };
    return cmocka_run_group_tests_name("faults", tests, NULL, NULL);
}
