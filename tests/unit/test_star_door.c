/* SPDX-License-Identifier: MIT */
/* Strangers at the door of a star: none joins, none makes it wait, none harms it. And members in front of the wrong door. */
#include "star_rig.h"

#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { N_RANKS = 4 };
static star_rank ranks[N_RANKS];

/* ---- While it forms ---- */

typedef struct forming {
    pthread_barrier_t strangers_came;
    const star_place *place;
    void (*strangers)(star_rank *r);
} forming;

static void gather_is_right(star_rank *r)
{
    unsigned char all[N_RANKS * 100];
    for (size_t bytes = 8; bytes <= 100; bytes += 92) {
        CHECK(star_rank_gather(r, all, bytes, 50 * STAR_SECOND) == FSDP_OK);
        for (size_t k = 0; k < bytes * r->world; k++) CHECK(all[k] == k / bytes + 1);
    }
}

/* Rank 0 listens; the strangers come; then the other ranks. */
static void come_after_strangers(star_rank *r)
{
    forming *f = r->arg;
    if (r->rank == 1) f->strangers(r);
    if (r->rank > 0) pthread_barrier_wait(&f->strangers_came);
    if (r->check_failed) r->args.timeout_ns = STAR_SECOND;
    CHECK(star_rank_open(r) == FSDP_OK);
    gather_is_right(r);
    star_rank_close(r);
}

static void form_after(void (*strangers)(star_rank *r), const char *address)
{
    star_place place;
    if (!star_place_make(&place, address, N_RANKS)) return;
    forming f = {.place = &place, .strangers = strangers};
    pthread_barrier_init(&f.strangers_came, NULL, N_RANKS - 1);
    for (uint32_t k = 0; k < N_RANKS; k++) {
        star_rank_init(&ranks[k], &place, k);
        ranks[k].arg = &f;
    }
    int n_fds = star_count_fds();
    star_run(ranks, N_RANKS, come_after_strangers);
    assert_int_equal(star_count_fds(), n_fds - (place.listener >= 0));
    pthread_barrier_destroy(&f.strangers_came);
}

/* They hear nothing, and the connection ends. */
static void expect_silence(star_rank *r, const void *text, size_t bytes)
{
    char heard[8];
    int fd = star_knock(r->place);
    CHECK(fd >= 0);
    star_say(fd, text, bytes);
    size_t n = star_hear_all(fd, heard, sizeof heard);
    close(fd);
    CHECK(n == 0);
}

static void expect_answer(star_rank *r, const unsigned char *hello, fsdp__answer code)
{
    unsigned char heard[FSDP__HELLO_BYTES + 1];
    int fd = star_knock(r->place);
    CHECK(fd >= 0);
    star_say(fd, hello, FSDP__HELLO_BYTES);
    size_t n = star_hear_all(fd, heard, sizeof heard);
    close(fd);
    CHECK(n == FSDP__HELLO_BYTES);
    CHECK(memcmp(heard, FSDP__HELLO_MAGIC, 8) == 0);
    CHECK(fsdp__get_u32(heard + 8) == (uint32_t)code);
    CHECK(fsdp__get_u32(heard + 12) == FSDP__HELLO_VERSION);
    CHECK(fsdp__get_u32(heard + 16) == r->world);
}

/* Gone at once, by a reset. */
static void knock_and_run(star_rank *r)
{
    const struct linger at_once = {1, 0};
    for (int i = 0; i < 20; i++) {
        int fd = star_knock(r->place);
        CHECK(fd >= 0);
        (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        close(fd);
    }
}

static void wrong_in_every_way(star_rank *r)
{
    unsigned char hello[FSDP__HELLO_BYTES], zeros[4096] = {0}, ones[4096];
    knock_and_run(r);
    memset(ones, 0xff, sizeof ones); /* as lengths: as huge as can be */
    static const char http[] = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    expect_silence(r, http, sizeof http - 1);
    expect_silence(r, zeros, sizeof zeros);
    expect_silence(r, ones, sizeof ones);
    star_hello(hello, STAR_NONCE + 1, FSDP__HELLO_VERSION, r->world, 1); /* an earlier job's rank */
    expect_silence(r, hello, sizeof hello);
    star_hello(hello, STAR_NONCE + 1, FSDP__HELLO_VERSION + 1, r->world + 1, 99);
    expect_silence(r, hello, sizeof hello);
    star_hello(hello, STAR_NONCE, FSDP__HELLO_VERSION + 1, r->world, 1);
    expect_answer(r, hello, FSDP__ANSWER_VERSION);
    star_hello(hello, STAR_NONCE, FSDP__HELLO_VERSION, r->world + 1, 1);
    expect_answer(r, hello, FSDP__ANSWER_WORLD);
    const uint32_t no_ranks[] = {0, N_RANKS, UINT32_MAX};
    for (int i = 0; i < 3; i++) {
        star_hello(hello, STAR_NONCE, FSDP__HELLO_VERSION, r->world, no_ranks[i]);
        expect_answer(r, hello, FSDP__ANSWER_RANK);
    }
}

static void strangers_are_turned_away(void **state)
{
    (void)state;
    form_after(wrong_in_every_way, "127.0.0.1");
    form_after(wrong_in_every_way, "::1");
    form_after(wrong_in_every_way, "@");
}

static int held[400];

/* Some say nothing, some begin a hello; all stay. */
static void many_that_stay(star_rank *r)
{
    unsigned char hello[FSDP__HELLO_BYTES];
    star_hello(hello, STAR_NONCE, FSDP__HELLO_VERSION, r->world, 2);
    for (size_t i = 0; i < sizeof held / sizeof *held; i++) {
        held[i] = star_knock(r->place);
        if (held[i] >= 0) star_say(held[i], hello, i % FSDP__HELLO_BYTES);
    }
    /* The places of those that wait are all taken; a rank is let in at its first knock. */
    unsigned char heard[FSDP__HELLO_BYTES];
    int fd = star_knock(r->place);
    CHECK(fd >= 0);
    star_say(fd, hello, sizeof hello);
    bool let_in = star_hear(fd, heard, sizeof heard) && fsdp__get_u32(heard + 8) == FSDP__ANSWER_WELCOME;
    close(fd);
    CHECK(let_in);
}

static void a_flood_of_connections_does_not_keep_ranks_out(void **state)
{
    (void)state;
    star_place place;
    assert_true(star_place_make(&place, "127.0.0.1", N_RANKS));
    forming f = {.place = &place, .strangers = many_that_stay};
    pthread_barrier_init(&f.strangers_came, NULL, N_RANKS - 1);
    for (uint32_t k = 0; k < N_RANKS; k++) {
        star_rank_init(&ranks[k], &place, k);
        ranks[k].arg = &f;
    }
    star_run(ranks, N_RANKS, come_after_strangers);
    for (size_t i = 0; i < sizeof held / sizeof *held; i++)
        if (held[i] >= 0) close(held[i]);
    pthread_barrier_destroy(&f.strangers_came);
}

/* The hello of a rank, but it never ends: its time does. */
static void one_that_is_slow(star_rank *r)
{
    unsigned char hello[FSDP__HELLO_BYTES];
    char heard[8];
    star_hello(hello, STAR_NONCE, FSDP__HELLO_VERSION, r->world, 2);
    int fd = star_knock(r->place);
    CHECK(fd >= 0);
    star_say(fd, hello, sizeof hello - 1);
    size_t n = star_hear_all(fd, heard, sizeof heard);
    close(fd);
    CHECK(n == 0);
}

static void a_hello_has_a_deadline(void **state)
{
    (void)state;
    form_after(one_that_is_slow, "127.0.0.1");
}

/* As rank 1, welcome, and away again. */
static void one_that_leaves(star_rank *r)
{
    unsigned char hello[FSDP__HELLO_BYTES], heard[FSDP__HELLO_BYTES];
    star_hello(hello, STAR_NONCE, FSDP__HELLO_VERSION, r->world, 1);
    for (int i = 0; i < 3; i++) {
        bool right = false;
        while (!right) { /* "later" while the last one's end is not seen */
            int fd = star_knock(r->place);
            CHECK(fd >= 0);
            star_say(fd, hello, sizeof hello);
            right = star_hear(fd, heard, sizeof heard) && fsdp__get_u32(heard + 8) == FSDP__ANSWER_WELCOME;
            close(fd);
        }
    }
}

static void a_rank_that_leaves_before_the_start_may_come_again(void **state)
{
    (void)state;
    form_after(one_that_leaves, "127.0.0.1");
    form_after(one_that_leaves, "@");
}

static uint64_t seed = 1;

static void random_talk(star_rank *r)
{
    for (int i = 0; i < 300; i++) {
        unsigned char text[200];
        size_t bytes = star_random(&seed) % sizeof text;
        for (size_t k = 0; k < bytes; k++) text[k] = (unsigned char)star_random(&seed);
        if (star_random(&seed) % 2) { /* a hello with one byte wrong, of magic or nonce */
            star_hello(text, STAR_NONCE, FSDP__HELLO_VERSION, r->world, 1 + (uint32_t)(star_random(&seed) % 3));
            text[star_random(&seed) % 16] ^= (unsigned char)(1 + star_random(&seed) % 255);
        }
        int fd = star_knock(r->place);
        if (fd < 0) continue;
        star_say(fd, text, bytes);
        close(fd);
    }
}

static void random_bytes_at_the_door_do_no_harm(void **state)
{
    (void)state;
    printf("seed %llu\n", (unsigned long long)seed);
    form_after(random_talk, "127.0.0.1");
}

/* ---- Who is missing ---- */

static void come_if_not_odd(star_rank *r)
{
    if (r->rank == 1) { /* another job's, three times; then rank 0 may see that its time is over */
        unsigned char hello[FSDP__HELLO_BYTES];
        star_hello(hello, STAR_NONCE + 1, FSDP__HELLO_VERSION, r->world, 1);
        for (int i = 0; i < 3; i++) expect_silence(r, hello, sizeof hello);
    }
    if (r->rank % 2 == 0) (void)star_rank_open(r);
    star_rank_close(r);
}

/* Whoever's deadline is first: rank 0's, or that of rank 2. */
static void the_missing_are_named_on_every_rank(void **state)
{
    (void)state;
    for (uint32_t first = 0; first <= 2; first += 2) {
        star_place place;
        char expected[512];
        assert_true(star_place_make(&place, "127.0.0.1", 4));
        for (uint32_t k = 0; k < 4; k++) star_rank_init(&ranks[k], &place, k);
        ranks[first].args.timeout_ns = 3 * STAR_SECOND;
        star_run(ranks, 4, come_if_not_odd);
        snprintf(
            expected, sizeof expected,
            "side channel: ranks 1, 3 of 4 did not come to rank 0 at 127.0.0.1:%u within 3.000 s; ranks 0, 2 did; 3 "
            "connections were turned away: another job's (WORLD_SIZE, MASTER_PORT or FSDP_NONCE differs)",
            place.launch.port);
        for (int k = 0; k < 4; k += 2) {
            assert_int_equal(ranks[k].status, FSDP_ERR_RANK_LOST);
            assert_string_equal(ranks[k].sentence, expected);
        }
    }
}

/* In as rank 3, and at once out of patience: rank 0 gives up now. */
static void end_it(star_rank *r)
{
    unsigned char hello[FSDP__HELLO_BYTES], heard[512], late[FSDP__HEAD_BYTES + 16] = {0};
    star_hello(hello, STAR_NONCE, FSDP__HELLO_VERSION, 4, 3);
    fsdp__frame frame = {FSDP__FRAME_LATE, 0, 0, 16};
    fsdp__frame_put(late, &frame);
    fsdp__put_u64(late + FSDP__HEAD_BYTES, 2 * STAR_SECOND);
    int fd = star_knock(r->place);
    CHECK(fd >= 0);
    star_say(fd, hello, sizeof hello);
    star_say(fd, late, sizeof late);
    size_t n = star_hear_all(fd, heard, sizeof heard); /* welcome, and why it failed */
    close(fd);
    CHECK(n > FSDP__HELLO_BYTES + FSDP__HEAD_BYTES && fsdp__get_u32(heard + FSDP__HELLO_BYTES) == FSDP__FRAME_FAILED);
}

static void come_wrong(star_rank *r)
{
    pthread_barrier_t *through = r->arg;
    if (r->rank == 1) r->launch.world = 3;
    if (r->rank == 2) r->launch.nonce++, r->args.timeout_ns = STAR_SECOND;
    if (r->rank < 3) (void)star_rank_open(r);
    star_rank_close(r);
    if (r->rank > 0) pthread_barrier_wait(through);
    if (r->rank == 3) end_it(r);
}

static void a_wrong_world_is_told_at_once_and_a_wrong_nonce_nothing(void **state)
{
    (void)state;
    star_place place;
    char expected[256];
    pthread_barrier_t through;
    pthread_barrier_init(&through, NULL, 3);
    assert_true(star_place_make(&place, "127.0.0.1", 4));
    for (uint32_t k = 0; k < 4; k++) {
        star_rank_init(&ranks[k], &place, k);
        ranks[k].arg = &through;
    }
    star_run(ranks, 4, come_wrong);
    assert_int_equal(ranks[1].status, FSDP_ERR_MISMATCH);
    snprintf(expected, sizeof expected,
             "side channel: rank 1 is of a world of 3, rank 0 at 127.0.0.1:%u of a world of 4", place.launch.port);
    assert_string_equal(ranks[1].sentence, expected);
    assert_int_equal(ranks[2].status, FSDP_ERR_RANK_LOST);
    assert_non_null(strstr(ranks[2].sentence,
                           "within 1.000 s: what listens there turned it away without a word: another job, or none of "
                           "ours: is that rank 0's address and port, and is the job the same (FSDP_NONCE, world)?"));
    assert_true(strlen(ranks[2].sentence) < 300);
    assert_int_equal(ranks[0].status, FSDP_ERR_RANK_LOST);
    assert_non_null(strstr(ranks[0].sentence, "ranks 1, 2 of 4 did not come"));
    assert_non_null(strstr(ranks[0].sentence, "within 2.000 s; ranks 0, 3 did"));
    assert_non_null(strstr(ranks[0].sentence, "FSDP_NONCE differs) ("));
    assert_non_null(strstr(ranks[0].sentence, ", wrong world (1)"));
    pthread_barrier_destroy(&through);
}

/* Nobody is where it looks: what could be wrong there. */
static void a_member_that_finds_nobody_is_told_what_to_check(void **state)
{
    (void)state;
    static const char *const addresses[] = {"@", "127.0.0.1"};
    static const char *const says[] = {
        ": are FSDP_NONCE, the world and the user the same on all ranks?",
        ": is that rank 0's address and port, and is the job the same (FSDP_NONCE, world)?"};
    for (int i = 0; i < 2; i++) {
        star_place place;
        assert_true(star_place_make(&place, addresses[i], 2));
        if (place.listener >= 0) close(place.listener);
        star_rank_init(&ranks[1], &place, 1);
        ranks[1].args.timeout_ns = STAR_SECOND / 5;
        assert_int_equal(star_rank_open(&ranks[1]), FSDP_ERR_RANK_LOST);
        const char *end = strstr(ranks[1].sentence, "within 0.200 s: Connection refused");
        assert_non_null(end);
        assert_string_equal(end + strlen("within 0.200 s: Connection refused"), says[i]);
        assert_true(strlen(ranks[1].sentence) < 300);
    }
}

static void come_twice(star_rank *r)
{
    pthread_barrier_t *through = r->arg;
    if (r->rank == 2) r->args.timeout_ns = STAR_SECOND / 2;
    if (r->rank == 3) { /* as rank 2 once more, in the same moments */
        r->launch.rank = 2;
        r->args.timeout_ns = STAR_SECOND / 2;
    }
    if (r->rank != 1) (void)star_rank_open(r);
    star_rank_close(r);
    pthread_barrier_wait(through);
}

/* Rank 0 is there: who looks for it found it. */
static void a_rank_that_comes_twice_is_told_nothing_about_places(void **state)
{
    (void)state;
    star_place place;
    pthread_barrier_t through;
    pthread_barrier_init(&through, NULL, 4);
    assert_true(star_place_make(&place, "127.0.0.1", 4));
    for (uint32_t k = 0; k < 4; k++) {
        star_rank_init(&ranks[k], &place, k);
        ranks[k].arg = &through;
    }
    ranks[0].args.timeout_ns = 2 * STAR_SECOND;
    star_run(ranks, 4, come_twice);
    int n = 0;
    for (int k = 2; k < 4; k++) {
        if (strstr(ranks[k].sentence, "rank 0 has a rank 2 already") == NULL) continue;
        n++;
        assert_null(strstr(ranks[k].sentence, "FSDP_NONCE"));
    }
    assert_int_equal(n, 1);
    pthread_barrier_destroy(&through);
}

/* ---- Places ---- */

static void *second_of_rank(void *arg)
{
    star_rank *r = arg;
    if (star_rank_open(r) == FSDP_OK) gather_is_right(r);
    star_rank_close(r);
    return NULL;
}

static star_rank seconds[N_RANKS];

/* A process with two contexts: its ranks knock for both at once, rank 0 opens one after the other. */
static void open_both(star_rank *r)
{
    pthread_t thread;
    star_rank *second = &seconds[r->rank];
    if (r->rank > 0) CHECK(pthread_create(&thread, NULL, second_of_rank, second) == 0);
    CHECK(star_rank_open(r) == FSDP_OK);
    if (r->rank == 0) CHECK(pthread_create(&thread, NULL, second_of_rank, second) == 0);
    gather_is_right(r);
    pthread_join(thread, NULL);
    star_rank_close(r);
    CHECK(!second->check_failed && second->status == FSDP_OK);
}

static void two_stars_of_a_job_share_a_place(void **state)
{
    (void)state;
    star_place place;
    assert_true(star_place_make(&place, "127.0.0.1", N_RANKS));
    close(place.listener);
    place.listener = -1; /* each listens there itself */
    for (uint32_t k = 0; k < N_RANKS; k++) {
        star_rank_init(&ranks[k], &place, k);
        star_rank_init(&seconds[k], &place, k);
    }
    star_run(ranks, N_RANKS, open_both);
}

static void a_port_that_is_taken_is_told_with_the_reason(void **state)
{
    (void)state;
    star_place place;
    char expected[256];
    assert_true(star_place_make(&place, "127.0.0.1", 2));
    star_rank_init(&ranks[0], &place, 0);
    ranks[0].config.listener = -1;
    ranks[0].args.timeout_ns = STAR_SECOND / 10;
    assert_int_equal(star_rank_open(&ranks[0]), FSDP_ERR_RANK_LOST);
    snprintf(expected, sizeof expected,
             "side channel: rank 0 cannot listen at 127.0.0.1:%u: Address already in use: is another job there, or a "
             "second rank 0? Give this one another MASTER_PORT",
             place.launch.port);
    assert_string_equal(ranks[0].sentence, expected);
    close(place.listener);
}

/* A name is no port: what to change is what the name is made from. */
static void a_name_that_is_taken_is_told_with_the_reason(void **state)
{
    (void)state;
    star_place place;
    char expected[256];
    assert_true(star_place_make(&place, "@", 2));
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    const size_t length = strlen(place.launch.address);
    memcpy(name.sun_path + 1, place.launch.address + 1,
           length - 1); /* Linux's names without a file begin with a zero */
    int taken = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(taken >= 0);
    assert_int_equal(
        bind(taken, (struct sockaddr *)&name, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length)), 0);
    star_rank_init(&ranks[0], &place, 0);
    ranks[0].args.timeout_ns = STAR_SECOND / 10;
    assert_int_equal(star_rank_open(&ranks[0]), FSDP_ERR_RANK_LOST);
    snprintf(
        expected, sizeof expected,
        "side channel: rank 0 cannot listen at %s: Address already in use: is another job there, or a second rank 0? "
        "Give each job an FSDP_NONCE of its own",
        place.launch.address);
    assert_string_equal(ranks[0].sentence, expected);
    close(taken);
}

/* By a process that is just ending, say. If rank 0 comes too late to see it taken, this shows nothing, and does not fail. */
static void meet_once_it_is_free(star_rank *r)
{
    if (r->rank == 1) {
        usleep(200000);
        close(r->place->listener);
    }
    CHECK(star_rank_open(r) == FSDP_OK);
    gather_is_right(r);
    star_rank_close(r);
}

static void a_port_that_is_taken_for_a_moment_is_waited_for(void **state)
{
    (void)state;
    star_place place;
    assert_true(star_place_make(&place, "127.0.0.1", 2));
    for (uint32_t k = 0; k < 2; k++) star_rank_init(&ranks[k], &place, k);
    ranks[0].config.listener = -1;
    star_run(ranks, 2, meet_once_it_is_free);
}

static void meet_anywhere(const char *address)
{
    star_place place = {FSDP_LAUNCH_INIT, -1};
    assert_int_equal(fsdp__star_listen(&place.listener, &place.launch.port), FSDP_OK);
    place.launch.world = 3;
    place.launch.nonce = STAR_NONCE;
    strcpy(place.launch.address, address);
    star_run_open(&place, ranks, gather_is_right, NULL);
    place.listener = -1; /* and again there, by its number */
    star_run_open(&place, ranks, gather_is_right, NULL);
}

static void names_and_numbers_lead_to_rank_0(void **state)
{
    (void)state;
    char host[FSDP_ADDRESS_BYTES] = "localhost";
    meet_anywhere("localhost");
    meet_anywhere("127.0.0.1");
    if (gethostname(host, sizeof host - 1) == 0) {
        fsdp_launch launch = FSDP_LAUNCH_INIT;
        char why[160];
        strcpy(launch.address, host);
        launch.port = 1;
        int fd = fsdp__place_connect(&launch, fsdp__now_ns() + STAR_SECOND, why, sizeof why);
        if (fd >= 0) close(fd);
        else if (strstr(why, "refused") != NULL) meet_anywhere(host);
    }
}

static void after_the_start_nobody_is_let_in(star_rank *r)
{
    if (r->rank != 0) return;
    char why[160];
    int fd = fsdp__place_connect(&r->place->launch, fsdp__now_ns() + STAR_SECOND, why, sizeof why);
    if (fd >= 0) close(fd);
    CHECK(fd < 0);
}

static void the_door_is_closed_after_the_start(void **state)
{
    (void)state;
    star_place place;
    assert_true(star_place_make(&place, "127.0.0.1", 3));
    star_run_open(&place, ranks, after_the_start_nobody_is_let_in, NULL);
}

#define TEST(name) cmocka_unit_test_setup(name, star_deadline)

int main(int argc, char **argv)
{
    if (argc > 1) seed = strtoull(argv[1], NULL, 10);
    const struct CMUnitTest tests[] = {
        TEST(strangers_are_turned_away),
        TEST(a_flood_of_connections_does_not_keep_ranks_out),
        TEST(a_hello_has_a_deadline),
        TEST(a_rank_that_leaves_before_the_start_may_come_again),
        TEST(random_bytes_at_the_door_do_no_harm),
        TEST(the_missing_are_named_on_every_rank),
        TEST(a_wrong_world_is_told_at_once_and_a_wrong_nonce_nothing),
        TEST(a_member_that_finds_nobody_is_told_what_to_check),
        TEST(a_rank_that_comes_twice_is_told_nothing_about_places),
        TEST(two_stars_of_a_job_share_a_place),
        TEST(a_port_that_is_taken_is_told_with_the_reason),
        TEST(a_name_that_is_taken_is_told_with_the_reason),
        TEST(a_port_that_is_taken_for_a_moment_is_waited_for),
        TEST(names_and_numbers_lead_to_rank_0),
        TEST(the_door_is_closed_after_the_start),
    };
    return cmocka_run_group_tests_name("door", tests, NULL, NULL);
}
