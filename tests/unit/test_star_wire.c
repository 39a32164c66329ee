/* SPDX-License-Identifier: MIT */
/* A peer that lies: sizes, numbers and frames from the wire end in a sentence, never outside a buffer. */
#include "star_rig.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { N_RANKS = 3, LIAR = 2, WORDS_BYTES = 48 };
static star_rank ranks[N_RANKS];
static uint64_t seed = 1;

#define GONE     "rank 2 is gone: it sent what does not belong there"
#define HUB_GONE "rank 0 is gone: it sent what does not belong there"
#define CLOSED   "rank 2 is gone: its connection closed (the process ended or was killed)"

static void tell(void *arg, void *blob) { memset(blob, (int)((star_rank *)arg)->rank, WORDS_BYTES); }

static void compose(void *arg, const char *sentence, const void *const *blobs, uint32_t world, char *text, size_t bytes)
{
    (void)arg, (void)sentence;
    size_t at = (size_t)snprintf(text, bytes, "words of");
    for (uint32_t i = 0; i < world && at < bytes; i++)
        if (blobs[i] != NULL) at += (size_t)snprintf(text + at, bytes - at, " %u", i);
}

/* ---- A member that lies ---- */

typedef struct lie {
    void (*say)(int fd, const struct lie *lie);
    fsdp__frame frame;
    uint64_t
        words[4];   /* the first 32 bytes of the payload, as two 4-byte words and three of 8: what, root, bytes, need */
    size_t payload; /* bytes that are sent */
    const char *expected;
} lie;

static void put_frame(int fd, fsdp__frame frame, const void *payload, size_t bytes)
{
    unsigned char head[FSDP__HEAD_BYTES];
    fsdp__frame_put(head, &frame);
    star_say(fd, head, sizeof head);
    if (bytes > 0) star_say(fd, payload, bytes);
}

/* CALL number 1 of so many bytes. */
static void put_call(int fd, uint32_t what, uint32_t root, uint64_t bytes, uint64_t need, size_t blob)
{
    unsigned char text[FSDP__CALL_BYTES + 4096] = {0};
    fsdp__put_u32(text, what);
    fsdp__put_u32(text + 4, root);
    fsdp__put_u64(text + 8, bytes);
    fsdp__put_u64(text + 16, need);
    put_frame(fd, (fsdp__frame){FSDP__FRAME_CALL, 0, 1, FSDP__CALL_BYTES + blob}, text, FSDP__CALL_BYTES + blob);
}

static void say_frame(int fd, const lie *l)
{
    static const unsigned char payload[4096];
    put_frame(fd, l->frame, payload, l->payload);
}

static void say_call(int fd, const lie *l)
{
    put_call(fd, (uint32_t)l->words[0], (uint32_t)l->words[1], l->words[2], l->words[3], l->payload);
}

static void call_twice(int fd, const lie *l)
{
    (void)l;
    put_call(fd, 0, 0, 100, 0, 0);
    put_call(fd, 0, 0, 100, 0, 0);
}

/* Data of another size than it said, once it is asked for. */
static void wrong_data(int fd, const lie *l)
{
    unsigned char go[FSDP__HEAD_BYTES], data[200] = {0};
    put_call(fd, 0, 0, 100, 0, 0);
    if (!star_hear(fd, go, sizeof go)) return;
    put_frame(fd, (fsdp__frame){FSDP__FRAME_DATA, 0, 1, l->frame.bytes}, data, sizeof data);
}

/* Words of another size, once it is asked for them. */
static void wrong_words(int fd, const lie *l)
{
    unsigned char ask[FSDP__HEAD_BYTES];
    put_frame(fd, (fsdp__frame){FSDP__FRAME_FAIL, (uint32_t)FSDP_ERR_DEVICE, 0, 3}, "bad", 3);
    if (!star_hear(fd, ask, sizeof ask)) return;
    static const unsigned char words[4096];
    put_frame(fd, (fsdp__frame){FSDP__FRAME_WORDS, 0, 0, l->frame.bytes}, words, sizeof words);
}

static void lie_to_hub(star_rank *r, const lie *l)
{
    unsigned char hello[FSDP__HELLO_BYTES], heard[FSDP__HELLO_BYTES + FSDP__HEAD_BYTES];
    star_hello(hello, STAR_NONCE, FSDP__HELLO_VERSION, r->world, LIAR);
    int fd = star_knock(r->place);
    CHECK(fd >= 0);
    star_say(fd, hello, sizeof hello);
    CHECK(star_hear(fd, heard, sizeof heard)); /* welcome, start */
    l->say(fd, l);
    char end[64];
    (void)star_hear_all(fd, end, sizeof end); /* rank 0 ends it, at the latest when it closes */
    close(fd);
}

static void be_one_of_three(star_rank *r)
{
    const lie *l = r->arg;
    unsigned char all[N_RANKS * 100];
    if (r->rank == LIAR) {
        lie_to_hub(r, l);
        return;
    }
    r->args.words = (fsdp_side_words){r, WORDS_BYTES, tell, compose};
    CHECK(star_rank_open(r) == FSDP_OK);
    memset(all, 0xa5, sizeof all);
    star_rank_keep(r, star_rank_gather(r, all, 100, 50 * STAR_SECOND));
    for (size_t k = 0; k < sizeof all && r->status != FSDP_OK; k++) CHECK(all[k] == 0xa5);
    star_rank_close(r);
}

static void lie_and_expect(const lie *l)
{
    star_place place;
    assert_true(star_place_make(&place, "127.0.0.1", N_RANKS));
    for (uint32_t k = 0; k < N_RANKS; k++) {
        star_rank_init(&ranks[k], &place, k);
        ranks[k].arg = (void *)(uintptr_t)l;
    }
    star_run(ranks, N_RANKS, be_one_of_three);
    for (int k = 0; k < LIAR; k++) {
        assert_int_not_equal(ranks[k].status, FSDP_OK);
        assert_non_null(strstr(ranks[k].sentence, l->expected));
    }
    assert_string_equal(ranks[1].sentence, ranks[0].sentence);
}

#define HUGE (1ull << 62)

static void a_member_that_lies_is_named(void **state)
{
    (void)state;
    static const lie lies[] = {
        {say_frame, {0, 0, 0, 0}, {0}, 0, GONE},
        {say_frame, {13, 0, 0, 0}, {0}, 0, GONE},
        {say_frame, {FSDP__FRAME_CALL, 0, 1, 0}, {0}, 0, GONE},
        {say_frame, {FSDP__FRAME_CALL, 0, 1, UINT64_MAX}, {0}, 4096, GONE},
        {say_frame, {FSDP__FRAME_CALL, 0, 1, FSDP__CALL_BYTES + 65}, {0}, 4096, GONE},
        {say_frame, {FSDP__FRAME_RESULT, 0, 1, 300}, {0}, 300, GONE},
        {say_frame, {FSDP__FRAME_START, 0, 0, 0}, {0}, 0, GONE},
        {say_frame, {FSDP__FRAME_DATA, 0, 1, 100}, {0}, 100, GONE},
        {say_frame, {FSDP__FRAME_DATA, 0, 1, UINT64_MAX}, {0}, 4096, GONE},
        {say_frame, {FSDP__FRAME_WORDS, 0, 0, WORDS_BYTES}, {0}, WORDS_BYTES, GONE},
        {say_frame, {FSDP__FRAME_FAIL, (uint32_t)FSDP_ERR_DEVICE, 0, FSDP__SENTENCE_BYTES}, {0}, 4096, GONE},
        {say_frame, {FSDP__FRAME_FAIL, (uint32_t)FSDP_ERR_DEVICE, 0, 0}, {0}, 0, GONE},
        {say_frame, {FSDP__FRAME_FAIL, 0, 0, 5}, {0}, 5, GONE}, /* a failure that is none */
        {say_frame, {FSDP__FRAME_FAIL, 77, 0, 5}, {0}, 5, GONE},
        {say_frame, {FSDP__FRAME_BYE, 0, 0, 1}, {0}, 1, GONE},
        {say_call, {0}, {2, 0, 8, 0}, 8, GONE}, /* neither gather nor broadcast */
        {say_call, {0}, {0, N_RANKS, 8, 0}, 8, GONE},
        {say_call, {0}, {0, 0, 8, 0}, 9, GONE}, /* a blob that is not as long as it says */
        {say_call, {0}, {0, 0, 64, 0}, 0, GONE},
        {say_call, {0}, {0, 0, HUGE, 0}, 1, GONE},
        {say_call, {0}, {0, 0, HUGE, 0}, 0, "rank 2: side channel #1 of 4611686018427387904 bytes"},
        {say_call, {0}, {1, 1, 100, 0}, 0, "rank 2: side channel #1 of 100 bytes from rank 1"},
        {say_call, {0}, {0, 0, 100, HUGE}, 0, "rank 2 has no host memory for 4611686018427387904 bytes"},
        {call_twice, {0}, {0}, 0, GONE},
        {wrong_data, {0, 0, 0, 99}, {0}, 0, GONE},
        {wrong_data, {0, 0, 0, 101}, {0}, 0, GONE},
        {wrong_data, {0, 0, 0, UINT64_MAX}, {0}, 0, GONE},
        {wrong_words, {0, 0, 0, WORDS_BYTES + 1}, {0}, 0, "bad. words of 0 1"},
        {wrong_words, {0, 0, 0, UINT64_MAX}, {0}, 0, "bad. words of 0 1"},
        {wrong_words, {0, 0, 0, WORDS_BYTES}, {0}, 0, "bad. words of 0 1"}, /* right, but for what follows */
    };
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) lie_and_expect(&lies[i]);
}

/* ---- A member that is slow ---- */

enum { LARGE = 1 << 20 };
static unsigned char large[N_RANKS][LARGE], larges[N_RANKS][N_RANKS * LARGE];

/* It sends its part, or only says that it will, and reads nothing more. */
static void be_slow(star_rank *r, bool sends, pthread_barrier_t *through)
{
    unsigned char hello[FSDP__HELLO_BYTES], heard[FSDP__HELLO_BYTES + FSDP__HEAD_BYTES];
    star_hello(hello, STAR_NONCE, FSDP__HELLO_VERSION, r->world, LIAR);
    int fd = star_knock(r->place);
    CHECK(fd >= 0);
    star_say(fd, hello, sizeof hello);
    bool right = star_hear(fd, heard, sizeof heard);
    put_call(fd, 0, 0, LARGE, 0, 0);
    right = right && star_hear(fd, heard, FSDP__HEAD_BYTES) && fsdp__get_u32(heard) == FSDP__FRAME_GO;
    if (sends) put_frame(fd, (fsdp__frame){FSDP__FRAME_DATA, 0, 1, LARGE}, large[LIAR], LARGE);
    pthread_barrier_wait(through);
    close(fd);
    CHECK(right);
}

typedef struct slow {
    bool sends;
    pthread_barrier_t through;
} slow;

static void gather_with_a_slow_one(star_rank *r)
{
    slow *w = r->arg;
    if (r->rank == LIAR) {
        be_slow(r, w->sends, &w->through);
        return;
    }
    unsigned char all[N_RANKS * 8], *mine = large[r->rank], *whole = larges[r->rank];
    CHECK(star_rank_open(r) == FSDP_OK);
    fsdp_status status = fsdp__star_side_ops.all_gather(r->side, mine, whole, LARGE, 3 * STAR_SECOND);
    bool right = status == (w->sends ? FSDP_OK : FSDP_ERR_RANK_LOST);
    for (uint32_t q = 0; q < N_RANKS && w->sends && right; q++)
        right = memcmp(whole + (size_t)q * LARGE, large[q], LARGE) == 0;
    if (w->sends) status = star_rank_gather(r, all, 8, 3 * STAR_SECOND);
    star_rank_keep(r, status);
    pthread_barrier_wait(&w->through);
    star_rank_close(r);
    CHECK(right);
}

static void a_slow_member_holds_up_its_own_result_only(void **state)
{
    (void)state;
    for (size_t q = 0; q < N_RANKS; q++)
        for (size_t k = 0; k < LARGE; k++) large[q][k] = (unsigned char)(k * 13 + q);
    for (int sends = 0; sends < 2; sends++) {
        star_place place;
        slow w = {.sends = sends};
        pthread_barrier_init(&w.through, NULL, N_RANKS);
        assert_true(star_place_make(&place, "127.0.0.1", N_RANKS));
        for (uint32_t k = 0; k < N_RANKS; k++) {
            star_rank_init(&ranks[k], &place, k);
            ranks[k].arg = &w;
        }
        star_run(ranks, N_RANKS, gather_with_a_slow_one);
        for (int k = 0; k < LIAR; k++) {
            assert_int_equal(ranks[k].status, FSDP_ERR_RANK_LOST);
            assert_string_equal(ranks[k].sentence,
                                sends ? "side channel #2 of 8 bytes: rank 2 of 3 did not come within 3.000 s"
                                      : "side channel #1 of 1048576 bytes: rank 2 of 3 did not come within 3.000 s");
        }
        pthread_barrier_destroy(&w.through);
    }
}

/* ---- A hub that leaves ---- */

enum { HUGE_BYTES = 16 << 20 }; /* more than the kernel holds between two sockets */

static void leave_at_once(star_rank *r)
{
    pthread_barrier_t *meet = r->arg;
    unsigned char *data = malloc(HUGE_BYTES + 2 * FSDP__HEAD_BYTES + 1), hello[FSDP__HELLO_BYTES], heard[64];
    CHECK(data != NULL);
    if (r->rank == 0) {
        memset(data, 0x5a, HUGE_BYTES);
        bool right = star_rank_open(r) == FSDP_OK &&
                     fsdp__star_side_ops.broadcast(r->side, data, HUGE_BYTES, 0, 50 * STAR_SECOND) == FSDP_OK;
        pthread_barrier_wait(meet);
        star_rank_close(r);
        free(data);
        CHECK(right);
        return;
    }
    star_hello(hello, STAR_NONCE, FSDP__HELLO_VERSION, r->world, 1);
    int fd = star_knock(r->place);
    star_say(fd, hello, sizeof hello);
    bool right = star_hear(fd, heard, sizeof heard); /* welcome, start */
    put_call(fd, 1, 0, HUGE_BYTES, 0, 0);
    pthread_barrier_wait(meet);
    size_t bytes = star_hear_all(fd, data, HUGE_BYTES + 2 * FSDP__HEAD_BYTES + 1);
    close(fd);
    fsdp__frame result = fsdp__frame_get(data), bye = fsdp__frame_get(data + FSDP__HEAD_BYTES + HUGE_BYTES);
    right = right && bytes == HUGE_BYTES + 2 * FSDP__HEAD_BYTES && result.kind == FSDP__FRAME_RESULT &&
            data[FSDP__HEAD_BYTES] == 0x5a && data[FSDP__HEAD_BYTES + HUGE_BYTES - 1] == 0x5a &&
            bye.kind == FSDP__FRAME_BYE;
    free(data);
    CHECK(right);
}

static void a_result_is_sent_whole_before_goodbye(void **state)
{
    (void)state;
    star_place place;
    pthread_barrier_t meet;
    pthread_barrier_init(&meet, NULL, 2);
    assert_true(star_place_make(&place, "127.0.0.1", 2));
    for (uint32_t k = 0; k < 2; k++) {
        star_rank_init(&ranks[k], &place, k);
        ranks[k].arg = &meet;
    }
    star_run(ranks, 2, leave_at_once);
    pthread_barrier_destroy(&meet);
}

/* ---- Random frames ---- */

static uint64_t random_below(uint64_t n) { return star_random(&seed) % n; }

/* Frames that are nearly right, with a good part of rubbish. */
static size_t random_talk(unsigned char *text, size_t room)
{
    size_t at = 0;
    while (at + 400 < room) {
        fsdp__frame frame = {(uint32_t)random_below(14), 0, random_below(3), random_below(130)};
        if (random_below(2)) frame.extra = (uint32_t)(-(int)random_below(40));
        if (random_below(8) == 0) frame.bytes = star_random(&seed);
        if (random_below(4) == 0) frame.bytes = random_below(2) ? 300 : 100;
        fsdp__frame_put(text + at, &frame);
        at += FSDP__HEAD_BYTES;
        uint64_t payload = frame.bytes < 300 ? frame.bytes : random_below(300);
        for (uint64_t k = 0; k < payload; k++) text[at + k] = (unsigned char)(random_below(3) ? 0 : star_random(&seed));
        if (frame.kind == FSDP__FRAME_CALL && payload >= FSDP__CALL_BYTES) {
            fsdp__put_u32(text + at, (uint32_t)random_below(3));
            fsdp__put_u32(text + at + 4, (uint32_t)random_below(4));
            fsdp__put_u64(text + at + 8, random_below(2) ? 100 : payload - FSDP__CALL_BYTES);
            fsdp__put_u64(text + at + 16, 0);
        }
        at += payload;
        if (random_below(6) == 0) break;
    }
    return at;
}

static void say_random(int fd, const lie *l)
{
    (void)l;
    unsigned char text[4096];
    star_say(fd, text, random_talk(text, sizeof text));
    (void)shutdown(fd, SHUT_WR);
}

static void random_frames_to_the_hub_end_in_a_sentence(void **state)
{
    (void)state;
    printf("seed %llu\n", (unsigned long long)seed);
    static const lie l = {.say = say_random, .expected = ""};
    for (int i = 0; i < 200; i++) {
        star_place place;
        assert_true(star_place_make(&place, "@", N_RANKS));
        for (uint32_t k = 0; k < N_RANKS; k++) {
            star_rank_init(&ranks[k], &place, k);
            ranks[k].arg = (void *)(uintptr_t)&l;
        }
        star_run(ranks, N_RANKS, be_one_of_three);
        /* A lie may even be a call that comes out right; never may two ranks hear different things. */
        assert_int_equal(ranks[0].status, ranks[1].status);
        assert_string_equal(ranks[1].sentence, ranks[0].sentence);
    }
}

/* ---- A hub that lies ---- */

typedef struct false_hub {
    int listener;
    const unsigned char *text;
    size_t bytes;
    bool no_start;
} false_hub;

static void be_hub_or_member(star_rank *r)
{
    const false_hub *h = r->arg;
    unsigned char hello[FSDP__HELLO_BYTES], welcome[FSDP__HELLO_BYTES + FSDP__HEAD_BYTES] = {0}, all[2 * 100];
    if (r->rank == 1) {
        r->args.words = (fsdp_side_words){r, WORDS_BYTES, tell, compose};
        memset(all, 0xa5, sizeof all);
        if (star_rank_open(r) == FSDP_OK) star_rank_keep(r, star_rank_gather(r, all, 100, STAR_SECOND / 2));
        for (size_t k = 0; k < sizeof all && r->status != FSDP_OK; k++) CHECK(all[k] == 0xa5);
        star_rank_close(r);
        return;
    }
    char end[64];
    CHECK(fsdp__wait_for(h->listener, POLLIN, fsdp__now_ns() + 10 * STAR_SECOND));
    int fd = accept(h->listener, NULL, NULL);
    CHECK(fd >= 0 && star_hear(fd, hello, sizeof hello));
    memcpy(welcome, FSDP__HELLO_MAGIC, 8);
    fsdp__put_u32(welcome + 8, FSDP__ANSWER_WELCOME);
    fsdp__frame start = {FSDP__FRAME_START, 0, 0, 0};
    fsdp__frame_put(welcome + FSDP__HELLO_BYTES, &start);
    if (!h->no_start) star_say(fd, welcome, sizeof welcome);
    star_say(fd, h->text, h->bytes);
    (void)shutdown(fd, SHUT_WR);
    close(h->listener); /* who comes again finds nobody */
    (void)star_hear_all(fd, end, sizeof end);
    close(fd);
}

static void hear_from(const void *text, size_t bytes, bool no_start)
{
    star_place place;
    assert_true(star_place_make(&place, "127.0.0.1", 2));
    false_hub h = {place.listener, text, bytes, no_start};
    for (uint32_t k = 0; k < 2; k++) {
        star_rank_init(&ranks[k], &place, k);
        ranks[k].arg = &h;
    }
    ranks[1].args.timeout_ns = STAR_SECOND / 2;
    star_run(ranks, 2, be_hub_or_member);
}

static void a_hub_that_lies_is_named(void **state)
{
    (void)state;
    static const fsdp__frame lies[] = {
        {FSDP__FRAME_RESULT, 0, 1, 199},
        {FSDP__FRAME_RESULT, 0, 1, UINT64_MAX},
        {FSDP__FRAME_RESULT, 0, 7, 200},
        {FSDP__FRAME_FAILED, 0, 0, 5},
        {FSDP__FRAME_FAILED, (uint32_t)-20, 0, FSDP__ERROR_BYTES},
        {FSDP__FRAME_FAILED, (uint32_t)-20, 0, UINT64_MAX},
        {FSDP__FRAME_GO, 0, 1, 1},
        {FSDP__FRAME_GO, 0, 2, 0},
        {FSDP__FRAME_REFUSED, 99, 1, 8},
        {FSDP__FRAME_REFUSED, 0, 1, 9},
        {FSDP__FRAME_ASK, 0, 0, 1},
        {FSDP__FRAME_CALL, 0, 1, 32},
        {FSDP__FRAME_START, 0, 0, 0},
        {99, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        unsigned char text[FSDP__HEAD_BYTES + 300] = {0};
        fsdp__frame_put(text, &lies[i]);
        hear_from(text, sizeof text, false);
        assert_int_equal(ranks[1].status, FSDP_ERR_RANK_LOST);
        assert_string_equal(ranks[1].sentence, HUB_GONE);
    }
}

static void random_frames_to_a_member_end_in_a_sentence(void **state)
{
    (void)state;
    printf("seed %llu\n", (unsigned long long)seed);
    for (int i = 0; i < 200; i++) {
        unsigned char text[4096];
        size_t bytes = random_talk(text, sizeof text);
        hear_from(text, bytes, false);
        assert_true(ranks[1].status == FSDP_OK || ranks[1].sentence[0] != '\0');
    }
}

static void what_is_no_hub_is_told_so(void **state)
{
    (void)state;
    static const char http[] = "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    hear_from(http, sizeof http - 1, true);
    assert_int_equal(ranks[1].status, FSDP_ERR_RANK_LOST);
    assert_non_null(strstr(ranks[1].sentence, "rank 1 of 2 was not let in by rank 0 at 127.0.0.1:"));
    hear_from(http, 0, true);
    assert_int_equal(ranks[1].status, FSDP_ERR_RANK_LOST);
}

#define TEST(name) cmocka_unit_test_setup(name, star_deadline)

int main(int argc, char **argv)
{
    if (argc > 1) seed = strtoull(argv[1], NULL, 10);
    const struct CMUnitTest tests[] = {
        TEST(a_member_that_lies_is_named),
        TEST(a_slow_member_holds_up_its_own_result_only),
        TEST(a_result_is_sent_whole_before_goodbye),
        TEST(random_frames_to_the_hub_end_in_a_sentence),
        TEST(a_hub_that_lies_is_named),
        TEST(random_frames_to_a_member_end_in_a_sentence),
        TEST(what_is_no_hub_is_told_so),
    };
    return cmocka_run_group_tests_name("wire", tests, NULL, NULL);
}
