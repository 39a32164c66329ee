/* SPDX-License-Identifier: MIT */
/* Placement: live buffers never share bytes, the published shapes need their live peak and no more, same_as is kept. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hostmem.h"
#include "monotonic.h"
#include "placement.h"
#include "xorshift.h"

enum { ALIGNMENT = 256, MAX_LIVES = 10000 };

static fsdp__life lives[MAX_LIVES];
static uint64_t offsets[MAX_LIVES];

/* ---- A host allocator that counts, and fails on request ---- */

typedef struct counting {
    uint64_t calls, fail_at; /* fail_at: the call that returns NULL, from 1; 0: none */
    uint64_t live_bytes, peak_bytes;
} counting;

static void *counting_alloc(void *arg, size_t bytes, size_t alignment)
{
    counting *c = arg;
    if (++c->calls == c->fail_at) return NULL;
    void *ptr = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (ptr != NULL) c->live_bytes += bytes;
    if (c->live_bytes > c->peak_bytes) c->peak_bytes = c->live_bytes;
    return ptr;
}

static void counting_free(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    counting *c = arg;
    (void)alignment;
    c->live_bytes -= bytes;
    free(ptr);
}

static uint64_t host_bytes; /* most that the last place() took */

static fsdp__placement place(uint32_t n)
{
    counting c = {0, 0, 0, 0};
    fsdp_host_allocator host = {counting_alloc, counting_free, &c, NULL};
    fsdp__placement result = {0, 0};
    memset(offsets, 0xff, n * sizeof *offsets);
    assert_int_equal(fsdp__place(&host, lives, n, ALIGNMENT, offsets, &result), FSDP_OK);
    assert_int_equal(c.live_bytes, 0);
    host_bytes = c.peak_bytes;
    return result;
}

/* ---- What must hold for every placement ---- */

static bool live_together(const fsdp__life *a, const fsdp__life *b) { return a->begin <= b->end && b->begin <= a->end; }

static uint64_t live_peak(uint32_t n)
{
    uint64_t peak = 0;
    for (uint32_t i = 0; i < n; i++) { /* the peak is reached where some life begins */
        uint64_t bytes = 0;
        for (uint32_t j = 0; j < n; j++)
            if (lives[j].begin <= lives[i].begin && lives[i].begin <= lives[j].end) bytes += lives[j].bytes;
        if (bytes > peak) peak = bytes;
    }
    return peak;
}

static void assert_valid(uint32_t n, const fsdp__placement *result)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        const fsdp__life *a = &lives[i];
        sum += a->bytes;
        assert_int_equal(offsets[i] % ALIGNMENT, 0);
        assert_true(offsets[i] <= result->bytes && a->bytes <= result->bytes - offsets[i]);
        if (a->same_as >= 0) assert_int_equal(offsets[i], offsets[a->same_as]);
        for (uint32_t j = 0; j < i; j++) {
            if (!live_together(a, &lives[j])) continue;
            assert_true(offsets[i] + a->bytes <= offsets[j] || offsets[j] + lives[j].bytes <= offsets[i]);
        }
    }
    assert_int_equal(result->live_peak, live_peak(n));
    assert_true(result->bytes >= result->live_peak && result->bytes <= sum);
}

/* ---- Random inputs ---- */

static uint64_t random_state;

static uint64_t random_below(uint64_t bound) { return xorshift(&random_state) % bound; }

static uint64_t seed(void)
{
    const char *given = getenv("FSDP_TEST_SEED");
    uint64_t value = given != NULL ? strtoull(given, NULL, 0) : 0x9e3779b97f4a7c15u;
    print_message("seed: FSDP_TEST_SEED=%" PRIu64 "\n", value);
    random_state = value != 0 ? value : 1;
    return random_state;
}

static int32_t class_of(int32_t life)
{
    while (lives[life].same_as >= 0) life = lives[life].same_as;
    return life;
}

/* True if life i may join other's class: no member is live together with it. */
static bool may_join(uint32_t i, int32_t other)
{
    for (uint32_t k = 0; k < i; k++)
        if (class_of((int32_t)k) == class_of(other) && live_together(&lives[k], &lives[i])) return false;
    return true;
}

static void random_lives(uint32_t n, uint32_t longest, uint32_t sizes, bool link)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t begin = (uint32_t)random_below(n), end = begin + (uint32_t)random_below(longest);
        lives[i] = (fsdp__life){begin, end, -1, (1 + random_below(sizes)) * ALIGNMENT};
        if (!link || i == 0 || random_below(3) != 0) continue;
        int32_t other = (int32_t)random_below(i);
        if (!may_join(i, other)) continue;
        lives[i].same_as = other;
        lives[i].bytes = lives[other].bytes;
    }
}

static void live_buffers_never_share_bytes_for_random_lives(void **unused)
{
    (void)unused;
    seed();
    uint32_t exact = 0, cases = 400;
    for (uint32_t i = 0; i < cases; i++) {
        uint32_t n = 1 + (uint32_t)random_below(60);
        random_lives(n, 1 + (uint32_t)random_below(8), i % 2 == 0 ? 4 : 100, i % 3 == 0);
        fsdp__placement result = place(n);
        assert_valid(n, &result);
        exact += result.bytes == result.live_peak;
    }
    print_message("%u of %u random inputs lie in their live peak\n", exact, cases);
}

/* ---- Published shapes ---- */

typedef struct shape {
    const char *name;
    uint64_t embed, block, head; /* elements; head 0: tied to embed, and held outside the range */
    uint32_t blocks;
    uint64_t total; /* elements of the model as published; 0: not a published model */
    uint64_t apart; /* elements of the model that are in no unit of the range, or in two */
} shape;

/* GPT-2: d(V + T), 12 d² + 13 d, 2 d for the last LayerNorm; Radford et al. 2019, d = 768 and 1600, V 50257, T 1024.
 * Llama 3: V d, 2 d² + 2 d (1024) + 3 d f + 2 d, d + V d; Grattafiori et al. 2024, d = 4096, 8192, f = 14336, 28672. */
static const shape shapes[] = {
    {"GPT-2 124M, tied and held", 39383808, 7087872, 0, 12, 124439808, 1536},
    {"GPT-2 124M, tied, visited first and last", 39383808, 7087872, 39383808, 12, 0, 0},
    {"GPT-2 124M, untied", 39383808, 7087872, 38597376 + 1536, 12, 0, 0},
    {"GPT-2 1.5B, tied and held", 82049600, 30740800, 0, 48, 1557611200, 3200},
    {"GPT-2 1.5B, tied, visited first and last", 82049600, 30740800, 82049600, 48, 0, 0},
    {"GPT-2 1.5B, untied", 82049600, 30740800, 80411200 + 3200, 48, 0, 0},
    {"Llama 3 8B, untied", 525336576, 218112000, 525336576 + 4096, 32, 8030261248, 0},
    {"Llama 3 8B, tied and held", 525336576, 218112000, 0, 32, 0, 0},
    {"Llama 3 8B, tied, visited first and last", 525336576, 218112000, 525336576, 32, 0, 0},
    {"Llama 3 8B, 31 blocks", 525336576, 218112000, 525336576 + 4096, 31, 0, 0},
    {"Llama 3 70B, untied", 1050673152, 855654400, 1050673152 + 8192, 80, 70553706496, 0},
    {"Llama 3 70B, tied and held", 1050673152, 855654400, 0, 80, 0, 0},
    {"Llama 3 70B, tied, visited first and last", 1050673152, 855654400, 1050673152, 80, 0, 0},
};

static uint64_t bf16_bytes(uint64_t elems) { return (elems * 2 + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

/* Visit i of a forward half is gathered when visit i - depth opens; the last depth + 1 stay for backward. */
static uint32_t forward_lives(const uint64_t *bytes, uint32_t n, uint32_t depth)
{
    for (uint32_t i = 0; i < n; i++)
        lives[i] = (fsdp__life){i > depth ? i - depth : 0, i + depth + 1 >= n ? n - 1 : i, -1, bytes[i]};
    return n;
}

static uint32_t shape_lives(const shape *s, uint32_t depth)
{
    uint64_t bytes[128];
    uint32_t n = 0;
    if (s->head != 0) bytes[n++] = bf16_bytes(s->embed);
    for (uint32_t i = 0; i < s->blocks; i++) bytes[n++] = bf16_bytes(s->block);
    if (s->head != 0) bytes[n++] = bf16_bytes(s->head);
    return forward_lives(bytes, n, depth);
}

static void published_shapes_need_their_live_peak_and_no_more(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const shape *s = &shapes[i];
        if (s->total != 0) assert_int_equal(s->embed + s->blocks * s->block + s->head + s->apart, s->total);
        for (uint32_t depth = 0; depth <= 4; depth++) {
            uint32_t n = shape_lives(s, depth);
            fsdp__placement result = place(n);
            assert_valid(n, &result);
            if (result.bytes != result.live_peak) print_error("%s, depth %u\n", s->name, depth);
            assert_int_equal(result.bytes, result.live_peak);
        }
    }
}

/* The peak by hand, so that the test does not rest on a sweep like the one it checks. */
static void llama_8b_at_depth_1_needs_a_head_and_a_block(void **unused)
{
    (void)unused;
    fsdp__placement result = place(shape_lives(&shapes[6], 1));
    assert_int_equal(result.bytes, 2 * (525336576u + 4096u) + 2 * 218112000u);
}

/* ---- same_as ---- */

static void a_mirrored_pass_lies_where_its_forward_half_lies(void **unused)
{
    (void)unused;
    for (uint32_t depth = 0; depth <= 4; depth++) {
        uint32_t n = shape_lives(&shapes[6], depth), kept = depth + 1;
        for (uint32_t i = n; i-- > 0;) { /* the mirror of visit i; the last depth + 1 live on instead */
            uint32_t at = n + (n - 1 - i), mirror = n + (n - 1 - i) - kept;
            if (i >= n - kept) lives[i].end = at;
            else lives[mirror] = (fsdp__life){at - depth, at, (int32_t)i, lives[i].bytes};
        }
        fsdp__placement result = place(2 * n - kept);
        assert_valid(2 * n - kept, &result);
        assert_int_equal(result.bytes, result.live_peak);
    }
}

/* a meets b, b meets c, c meets a again: two at a time, but three places. */
static void a_class_that_closes_a_ring_gets_more_than_the_live_peak(void **unused)
{
    (void)unused;
    enum { BYTES = 1000 * ALIGNMENT };
    lives[0] = (fsdp__life){0, 0, -1, BYTES};
    lives[1] = (fsdp__life){0, 1, -1, BYTES};
    lives[2] = (fsdp__life){1, 2, -1, BYTES};
    lives[3] = (fsdp__life){2, 2, 0, BYTES};
    fsdp__placement result = place(4);
    assert_valid(4, &result);
    assert_int_equal(result.live_peak, 2 * BYTES);
    assert_int_equal(result.bytes, 3 * BYTES);
}

/* The choice looks ahead: life 2 must leave life 0's place alone, because life 3 comes back to it while 2 lives. */
static void a_choice_avoids_a_place_that_a_later_life_must_have(void **unused)
{
    (void)unused;
    lives[0] = (fsdp__life){0, 0, -1, ALIGNMENT};
    lives[1] = (fsdp__life){0, 1, -1, 3 * ALIGNMENT};
    lives[2] = (fsdp__life){1, 3, -1, ALIGNMENT};
    lives[3] = (fsdp__life){3, 3, 0, ALIGNMENT};
    fsdp__placement result = place(4);
    assert_valid(4, &result);
    assert_int_equal(result.bytes, 5 * ALIGNMENT);
}

/* ---- The rest ---- */

static void no_lives_need_no_bytes(void **unused)
{
    (void)unused;
    fsdp__placement result = place(0);
    assert_int_equal(result.bytes, 0);
    assert_int_equal(result.live_peak, 0);
}

static uint64_t hash_offsets(uint64_t hash, uint32_t n) /* FNV-1a over the values, not over memory: no byte order */
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t shift = 0; shift < 64; shift += 8) hash = (hash ^ (offsets[i] >> shift & 0xff)) * 0x100000001b3u;
    return hash;
}

static uint64_t hash_of_fixed_inputs(void)
{
    uint64_t hash = 0xcbf29ce484222325u;
    random_state = 42;
    for (uint32_t i = 0; i < 50; i++) {
        random_lives(40, 8, 50, i % 2 == 0);
        fsdp__placement result = place(40);
        hash = hash_offsets(hash, 40) ^ result.bytes;
    }
    return hash;
}

static void the_same_input_gives_the_same_offsets_on_every_machine(void **unused)
{
    (void)unused;
    uint64_t hash = hash_of_fixed_inputs();
    assert_int_equal(hash, hash_of_fixed_inputs());
    assert_int_equal(hash, 0x36e8ee37d6ff540eu); /* changes with the algorithm, and with nothing else */
}

static void every_failed_host_allocation_is_reported_and_leaks_nothing(void **unused)
{
    (void)unused;
    random_state = 3;
    random_lives(12, 5, 100, true);
    fsdp__placement result = {1, 1};
    counting c = {0, 0, 0, 0};
    fsdp_host_allocator host = {counting_alloc, counting_free, &c, NULL};
    fsdp_status status = FSDP_ERR_NO_HOST_MEMORY;
    for (uint64_t fail_at = 1; status != FSDP_OK; fail_at++) {
        c = (counting){0, fail_at, 0, 0};
        status = fsdp__place(&host, lives, 12, ALIGNMENT, offsets, &result);
        assert_int_equal(c.live_bytes, 0);
        if (c.calls < fail_at) break;
        assert_int_equal(status, FSDP_ERR_NO_HOST_MEMORY);
        assert_int_equal(result.bytes, 1);
        assert_non_null(strstr(fsdp_last_error(), "12 buffers"));
    }
    assert_int_equal(status, FSDP_OK);
    assert_true(c.calls > 10);
}

static double place_ms(uint32_t n, fsdp__placement *result)
{
    uint64_t start_ns = fsdp__now_ns();
    *result = place(n);
    return (double)(fsdp__now_ns() - start_ns) * 1e-6;
}

static void ten_thousand_units_lie_in_their_live_peak(void **unused)
{
    (void)unused;
    static uint64_t bytes[MAX_LIVES];
    for (uint32_t i = 0; i < MAX_LIVES; i++) bytes[i] = 1 << 20;
    fsdp__placement result;
    double ms = place_ms(forward_lives(bytes, MAX_LIVES, 4), &result);
    assert_int_equal(result.bytes, 5 << 20);
    print_message("10000 equal units at depth 4: %.2f ms\n", ms);
}

/* Both need the widest search that is allowed, and fail or succeed late. */
static void hard_inputs_take_bounded_host_memory(void **unused)
{
    (void)unused;
    static uint64_t bytes[MAX_LIVES];
    fsdp__placement result;
    seed();
    for (uint32_t i = 0; i < MAX_LIVES; i++) bytes[i] = (1 + random_below(16)) << 20;
    double ms = place_ms(forward_lives(bytes, MAX_LIVES, 4), &result);
    print_message("10000 uneven units at depth 4: %.0f ms, %" PRIu64 " host bytes, %.3f of the live peak\n", ms,
                  host_bytes, (double)result.bytes / (double)result.live_peak);
    assert_true(host_bytes < 8u << 20);

    random_lives(3000, 4000, 100, false); /* over a thousand at a time */
    ms = place_ms(3000, &result);
    print_message("3000 long lives: %.0f ms, %" PRIu64 " host bytes, %.3f of the live peak\n", ms, host_bytes,
                  (double)result.bytes / (double)result.live_peak);
    assert_valid(3000, &result);
    assert_true(host_bytes < 8u << 20);
}

int main(void)
{
    alarm(120);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(live_buffers_never_share_bytes_for_random_lives),
        cmocka_unit_test(published_shapes_need_their_live_peak_and_no_more),
        cmocka_unit_test(llama_8b_at_depth_1_needs_a_head_and_a_block),
        cmocka_unit_test(a_mirrored_pass_lies_where_its_forward_half_lies),
        cmocka_unit_test(a_class_that_closes_a_ring_gets_more_than_the_live_peak),
        cmocka_unit_test(a_choice_avoids_a_place_that_a_later_life_must_have),
        cmocka_unit_test(no_lives_need_no_bytes),
        cmocka_unit_test(the_same_input_gives_the_same_offsets_on_every_machine),
        cmocka_unit_test(every_failed_host_allocation_is_reported_and_leaks_nothing),
        cmocka_unit_test(ten_thousand_units_lie_in_their_live_peak),
        cmocka_unit_test(hard_inputs_take_bounded_host_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
