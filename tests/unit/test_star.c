/* SPDX-License-Identifier: MIT */
/* The star passes the conformance suite of side channels, and keeps what only it promises: ranks as threads, each with its own
 * launch and connection. */
#include "star_rig.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../conformance/comm_suite.h"
#include "scarce.h"

/* ---- The conformance suite: the star's side table beside the host's device and no communicator ---- */

typedef struct group {
    star_place place;
    fsdp_launch launch[MAX_RANKS];
} group;

static const char *suite_address;

static void *group_create(uint32_t world, const fsdp_link *link)
{
    (void)link;
    group *g = calloc(1, sizeof *g);
    assert_non_null(g);
    assert_true(star_place_make(&g->place, suite_address, world));
    for (uint32_t r = 0; r < world; r++) {
        g->launch[r] = g->place.launch;
        g->launch[r].rank = r;
    }
    return g;
}

static void group_destroy(void *g) { free(g); }

static const void *rank_config(void *storage, void *group_, uint32_t rank, uint64_t jitter_ns, uint64_t jitter_seed)
{
    group *g = group_;
    (void)jitter_ns, (void)jitter_seed;
    fsdp__star_config *config = storage;
    *config = (fsdp__star_config){&g->launch[rank], NULL, rank == 0 ? g->place.listener : -1};
    return config;
}

static fsdp_status device_open(const fsdp_device_args *args, void **out_dev, fsdp_device_caps *out_caps)
{
    fsdp_host_config alone = FSDP_HOST_CONFIG_INIT;
    fsdp_device_args own = *args;
    own.backend_config = &alone;
    return fsdp_host_backend()->device->open(&own, out_dev, out_caps);
}

static fsdp_status no_comm_open(const fsdp_comm_args *args, void **out_comm)
{
    static char none;
    (void)args;
    *out_comm = &none;
    return FSDP_OK;
}

static void no_comm_close(void *comm) { (void)comm; }

static int run_suite(const char *address)
{
    star_place probe;
    if (!star_place_make(&probe, address, 1)) {
        printf("skipped: this machine has no %s\n", address);
        return 0;
    }
    if (probe.listener >= 0) close(probe.listener);
    static fsdp_device_ops device;
    static fsdp_comm_ops comm;
    static fsdp_backend backend;
    device = *fsdp_host_backend()->device;
    device.open = device_open;
    comm = (fsdp_comm_ops){.size = sizeof comm, .name = "none", .open = no_comm_open, .close = no_comm_close};
    backend = (fsdp_backend){sizeof backend, "star", &device, &comm, &fsdp__star_side_ops};
    const comm_suite suite = {
        .backend = &backend, .group_create = group_create, .group_destroy = group_destroy, .config = rank_config};
    suite_address = address;
    printf("at %s\n", address);
    return run_side_suite(&suite);
}

/* ---- More of what a call is ---- */

static star_rank ranks[MAX_RANKS];

static void gather_and_broadcast(star_rank *r)
{
    unsigned char all[64];
    if (r->rank == 1) CHECK(star_rank_gather(r, all, 16, 50 * STAR_SECOND) == FSDP_ERR_MISMATCH);
    else CHECK(fsdp__star_side_ops.broadcast(r->side, all, 16, 2, 50 * STAR_SECOND) == FSDP_ERR_MISMATCH);
    star_rank_keep(r, fsdp__star_side_ops.check(r->side));
}

static void a_gather_and_a_broadcast_are_a_mismatch(void **state)
{
    (void)state;
    star_place place;
    assert_true(star_place_make(&place, "127.0.0.1", 3));
    star_run_open(&place, ranks, gather_and_broadcast, NULL);
    for (int i = 0; i < 3; i++)
        assert_string_equal(ranks[i].sentence,
                            "ranks 0, 2: side channel #1 of 16 bytes from rank 2; rank 1: side channel "
                            "#1 of 16 bytes");
}

static void gather_large(star_rank *r)
{
    enum { BYTES = 100000, N = 5 };
    unsigned char *mine = malloc(BYTES), *all = malloc((size_t)BYTES * r->world);
    bool right = mine != NULL && all != NULL;
    for (int i = 0; i < N && right; i++) {
        size_t bytes = (size_t)(BYTES - i * 777);
        for (size_t k = 0; k < bytes; k++) mine[k] = (unsigned char)(k * 31 + r->rank + (size_t)i);
        right = fsdp__star_side_ops.all_gather(r->side, mine, all, bytes, 50 * STAR_SECOND) == FSDP_OK;
        for (size_t q = 0; q < r->world && right; q++)
            for (size_t k = 0; k < bytes && right; k++)
                right = all[q * bytes + k] == (unsigned char)(k * 31 + q + (size_t)i);
    }
    free(mine);
    free(all);
    CHECK(right);
}

static void large_blobs_arrive_whole(void **state)
{
    (void)state;
    const char *const addresses[] = {"127.0.0.1", "@"};
    for (int i = 0; i < 2; i++) {
        star_place place;
        assert_true(star_place_make(&place, addresses[i], 5));
        star_run_open(&place, ranks, gather_large, NULL);
    }
}

static void gather_many(star_rank *r)
{
    unsigned char *all = malloc((size_t)r->world * 100);
    bool right = all != NULL;
    for (int i = 0; i < 4 && right; i++) {
        size_t bytes = i % 2 ? 16 : 100;
        right = star_rank_gather(r, all, bytes, 50 * STAR_SECOND) == FSDP_OK;
        for (size_t k = 0; k < bytes * r->world && right; k++) right = all[k] == (unsigned char)(k / bytes + 1);
    }
    free(all);
    CHECK(right);
}

static void hundreds_of_ranks_meet(void **state)
{
    (void)state;
    enum { WORLD = 300 };
    star_place place;
    star_rank *many = calloc(WORLD, sizeof *many);
    assert_non_null(many);
    assert_true(star_place_make(&place, "127.0.0.1", WORLD));
    uint64_t start_ns = fsdp__now_ns();
    star_run_open(&place, many, gather_many, NULL);
    printf("%d ranks: opened, 4 gathers, closed in %.3f s\n", WORLD, (double)(fsdp__now_ns() - start_ns) * 1e-9);
    free(many);
}

static void one_rank_needs_no_socket_and_no_thread(void **state)
{
    (void)state;
    star_place place = {FSDP_LAUNCH_INIT, -1};
    int n_fds = star_count_fds(), n_threads = star_count_threads();
    star_rank *r = &ranks[0];
    star_rank_init(r, &place, 0);
    assert_int_equal(star_rank_open(r), FSDP_OK);
    assert_int_equal(star_count_fds(), n_fds);
    assert_int_equal(star_count_threads(), n_threads);
    unsigned char all[200];
    assert_int_equal(star_rank_gather(r, all, 200, 0), FSDP_OK);
    for (int i = 0; i < 200; i++) assert_int_equal(all[i], 1);
    assert_int_equal(fsdp__star_side_ops.broadcast(r->side, all, 200, 0, 0), FSDP_OK);
    (fsdp__star_side_ops.fail)(r->side, FSDP_ERR_MISMATCH, "rank 0 is at odds with itself");
    assert_int_equal(fsdp__star_side_ops.check(r->side), FSDP_ERR_MISMATCH);
    assert_string_equal(fsdp_last_error(), "rank 0 is at odds with itself");
    star_rank_close(r);
}

/* ---- Time, printed and not judged ---- */

static void gather_for_time(star_rank *r)
{
    enum { N = 200 };
    unsigned char all[MAX_RANKS * 16];
    for (int i = 0; i < 10; i++) CHECK(star_rank_gather(r, all, 16, 50 * STAR_SECOND) == FSDP_OK);
    uint64_t start_ns = fsdp__now_ns();
    for (int i = 0; i < N; i++) CHECK(star_rank_gather(r, all, 16, 50 * STAR_SECOND) == FSDP_OK);
    if (r->rank != 0) return;
    printf("16 bytes of %u ranks, gathered: %.1f us\n", r->world, (double)(fsdp__now_ns() - start_ns) * 1e-3 / N);
}

static void small_gathers_go_on_and_on(void **state)
{
    (void)state;
    const uint32_t worlds[] = {2, 4, 64};
    for (int i = 0; i < 3; i++) {
        star_place place;
        assert_true(star_place_make(&place, "127.0.0.1", worlds[i]));
        star_run_open(&place, ranks, gather_for_time, NULL);
    }
}

/* ---- Nothing is left ---- */

static atomic_long n_live;

static void *counted_alloc(void *arg, size_t bytes, size_t alignment)
{
    atomic_fetch_add((atomic_long *)arg, 1);
    return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void counted_free(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    (void)bytes, (void)alignment;
    atomic_fetch_sub((atomic_long *)arg, 1);
    free(ptr);
}

static void open_gather_close(star_rank *r)
{
    unsigned char all[2 * 100];
    r->host = (fsdp_host_allocator){counted_alloc, counted_free, &n_live, NULL};
    for (int i = 0; i < 1000; i++) {
        CHECK(star_rank_open(r) == FSDP_OK);
        CHECK(star_rank_gather(r, all, i % 2 ? 8 : 100, 50 * STAR_SECOND) == FSDP_OK);
        star_rank_close(r);
    }
}

static void a_thousand_stars_leave_nothing(void **state)
{
    (void)state;
    star_place place;
    assert_true(star_place_make(&place, "@", 2));
    for (uint32_t k = 0; k < 2; k++) star_rank_init(&ranks[k], &place, k);
    int n_fds = star_count_fds(), n_threads = star_count_threads();
    star_run(ranks, 2, open_gather_close);
    assert_int_equal(star_count_fds(), n_fds);
    assert_int_equal(star_count_threads(), n_threads);
    assert_int_equal(n_live, 0);
}

/* ---- Out of host memory ---- */

static void gather_scarcely(star_rank *r)
{
    unsigned char all[3 * 100];
    memset(all, 0xa5, sizeof all);
    CHECK(star_rank_gather(r, all, 16, 50 * STAR_SECOND) == FSDP_OK); /* takes none */
    star_rank_keep(r, star_rank_gather(r, all, 100, 50 * STAR_SECOND));
    if (r->status != FSDP_OK)
        for (size_t k = 3 * 16; k < sizeof all; k++) CHECK(all[k] == 0xa5);
    CHECK(fsdp__star_side_ops.check(r->side) == FSDP_OK);
    CHECK(star_rank_gather(r, all, 16, 50 * STAR_SECOND) == FSDP_OK);
}

static void open_scarcely(star_rank *r)
{
    if (star_rank_open(r) == FSDP_OK) gather_scarcely(r);
    star_rank_close(r);
}

static void a_rank_without_memory_is_named_on_all(void **state)
{
    (void)state;
    for (uint32_t scarce_rank = 0; scarce_rank < 3; scarce_rank++) {
        for (int left = scarce_rank == 0; left < 3; left++) { /* a hub without any cannot listen: see the next test */
            star_place place;
            scarce memory = {.left = left};
            char text[64];
            assert_true(star_place_make(&place, "127.0.0.1", 3));
            for (uint32_t k = 0; k < 3; k++) star_rank_init(&ranks[k], &place, k);
            ranks[scarce_rank].host = (fsdp_host_allocator){scarce_alloc, scarce_free, &memory, NULL};
            star_run(ranks, 3, open_scarcely);
            snprintf(text, sizeof text, "rank %u has no host memory", scarce_rank);
            for (int k = 0; k < 3; k++) {
                assert_int_equal(ranks[k].status, left < 2 ? FSDP_ERR_NO_HOST_MEMORY : FSDP_OK);
                if (left < 2) assert_non_null(strstr(ranks[k].sentence, text));
            }
            assert_int_equal(memory.live, 0);
        }
    }
}

static void a_hub_without_memory_is_named_at_the_deadline(void **state)
{
    (void)state;
    star_place place;
    scarce memory = {.left = 0};
    assert_true(star_place_make(&place, "127.0.0.1", 2));
    for (uint32_t k = 0; k < 2; k++) star_rank_init(&ranks[k], &place, k);
    ranks[0].host = (fsdp_host_allocator){scarce_alloc, scarce_free, &memory, NULL};
    ranks[1].args.timeout_ns = STAR_SECOND / 2;
    star_run(ranks, 2, open_scarcely);
    assert_int_equal(ranks[0].status, FSDP_ERR_NO_HOST_MEMORY);
    assert_int_equal(ranks[1].status, FSDP_ERR_RANK_LOST);
    assert_non_null(strstr(ranks[1].sentence, "rank 1 of 2 was not let in by rank 0 at 127.0.0.1:"));
}

/* ---- Arguments ---- */

static void what_cannot_be_is_refused(void **state)
{
    (void)state;
    star_place place = {FSDP_LAUNCH_INIT, -1};
    star_rank *r = &ranks[0];
    star_rank_init(r, &place, 0);
    r->config.launch = NULL;
    assert_int_equal(star_rank_open(r), FSDP_ERR_ARG);
    star_rank_init(r, &place, 1);
    assert_int_equal(star_rank_open(r), FSDP_ERR_ARG); /* rank 1 of 1 */
    place.launch.world = 2;
    star_rank_init(r, &place, 1);
    assert_int_equal(star_rank_open(r), FSDP_ERR_ARG);
    assert_non_null(strstr(r->sentence, "rank 1 of 2 knows no address"));
    strcpy(place.launch.address, "127.0.0.1");
    star_rank_init(r, &place, 1);
    assert_int_equal(star_rank_open(r), FSDP_ERR_ARG);
    assert_non_null(strstr(r->sentence, "rank 1 of 2 knows no port"));
    strcpy(place.launch.address, "@");
    star_rank_init(r, &place, 1);
    assert_int_equal(star_rank_open(r), FSDP_ERR_ARG);
    assert_string_equal(r->sentence, "side channel: the address is \"@\" with no name behind it");
    memset(place.launch.address, 'a', 200);
    place.launch.address[0] = '@', place.launch.address[200] = '\0';
    for (uint32_t k = 0; k < 2; k++) {
        star_rank_init(r, &place, k);
        assert_int_equal(star_rank_open(r), FSDP_ERR_ARG);
        assert_non_null(strstr(r->sentence,
                               "the name behind the @ of the address is 199 bytes long, and a Unix socket's "
                               "has at most 107: \"@aaa"));
    }
    place.launch.address[108] = '\0'; /* as long as one may be: nobody is there */
    star_rank_init(r, &place, 1);
    r->args.timeout_ns = STAR_SECOND / 20;
    assert_int_equal(star_rank_open(r), FSDP_ERR_RANK_LOST);
    strcpy(place.launch.address, "127.0.0.1");
    place.launch.world = FSDP__MAX_WORLD + 1;
    star_rank_init(r, &place, 1);
    assert_int_equal(star_rank_open(r), FSDP_ERR_ARG);
    place.launch.size = 4;
    star_rank_init(r, &place, 1);
    assert_int_equal(star_rank_open(r), FSDP_ERR_ARG);
}

#define TEST(name) cmocka_unit_test_setup(name, star_deadline)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_gather_and_a_broadcast_are_a_mismatch),
        TEST(large_blobs_arrive_whole),
        TEST(hundreds_of_ranks_meet),
        TEST(small_gathers_go_on_and_on),
        TEST(one_rank_needs_no_socket_and_no_thread),
        TEST(a_thousand_stars_leave_nothing),
        TEST(a_rank_without_memory_is_named_on_all),
        TEST(a_hub_without_memory_is_named_at_the_deadline),
        TEST(what_cannot_be_is_refused),
    };
    int failed = run_suite("127.0.0.1") + run_suite("::1") + run_suite("@");
    return failed + cmocka_run_group_tests_name("star", tests, NULL, NULL);
}
