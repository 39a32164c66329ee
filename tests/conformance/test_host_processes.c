/* SPDX-License-Identifier: MIT */
/* The host backend with ranks as processes passes what it passes with ranks as threads; by the library's side channel and
 * by the caller's own. */
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "comm_suite.h"
#include "fsdp/sim.h"
#include "hostmem.h"

/* Where ranks meet. Each process has its copy. */
typedef struct group {
    fsdp_link link;
    shared_side *side; /* NULL: the library's */
    fsdp_launch launch[MAX_RANKS];
} group;

static bool own_side;
static process_way way;

static const void *rank_config(void *storage, void *group_, uint32_t rank, uint64_t jitter_ns, uint64_t jitter_seed)
{
    group *g = group_;
    fsdp_host_config *config = storage;
    *config = (fsdp_host_config)FSDP_HOST_CONFIG_INIT;
    config->launch = &g->launch[rank];
    config->link = &g->link;
    if (g->side != NULL) config->side = shared_side_end(g->side, rank);
    config->jitter_ns = jitter_ns;
    config->jitter_seed = jitter_seed;
    return config;
}

static void *group_create(uint32_t world, const fsdp_link *link)
{
    group *g = calloc(1, sizeof *g);
    assert_non_null(g);
    if (link != NULL) g->link = *link;
    g->launch[0] = processes_launch(way);
    for (uint32_t r = 0; r < world; r++) {
        g->launch[r] = g->launch[0];
        g->launch[r].rank = g->launch[r].local_rank = r;
        g->launch[r].world = g->launch[r].local_world = world;
    }
    if (own_side) g->side = shared_side_create(world);
    return g;
}

static void group_destroy(void *group_)
{
    group *g = group_;
    if (g->side != NULL) shared_side_destroy(g->side);
    free(g);
}

/* A device of a world of one, whose memory could be another process's too. */
static const void *alone_config(void *storage, uint64_t jitter_ns, uint64_t jitter_seed)
{
    static group alone;
    alone.launch[0] = (fsdp_launch)FSDP_LAUNCH_INIT;
    return rank_config(storage, &alone, 0, jitter_ns, jitter_seed);
}

/* ---- What only processes have: memory that peers map ---- */

static void expect_sum(member *r, float *x)
{
    float value = (float)(r->rank + 1), sum = 0.0f, expected = (float)(r->world * (r->world + 1) / 2);
    fsdp_collective c = {.kind = FSDP_OPERATION_ALL_REDUCE, .dtype = FSDP_DTYPE_FP32, .count = 1, .send = x, .recv = x};
    EXPECT_OK(rank_copy(r, x, &value, sizeof value));
    EXPECT_OK(enqueue(r, 0, 0, c));
    EXPECT_OK(rank_copy(r, &sum, x, sizeof sum));
    EXPECT(sum == expected);
}

static void use_memory_that_is_not_the_devices(member *r)
{
    static float own[64];
    char *block = rank_block(r, 4096);
    EXPECT(block != NULL);
    uint64_t bytes = r->block[0].bytes;
    fsdp_collective c = {.kind = FSDP_OPERATION_ALL_GATHER, .dtype = FSDP_DTYPE_FP32, .count = 8, .label = "h.0"};
    const struct {
        const void *send;
        void *recv;
        const char *says;
    } wrong[] = {{own, block, "#1 all-gather of h.0 (8 fp32): 32 bytes of send are not device memory"},
                 {block, own, "of recv are not device memory"},
                 {block + bytes - 28, block, "32 bytes of send are not device memory"}, /* ends behind it */
                 {block, block + bytes - 4, "of recv are not device memory"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        c.send = wrong[i].send;
        c.recv = wrong[i].recv;
        EXPECT(enqueue(r, 0, 0, c) == FSDP_ERR_ARG);
        EXPECT(strstr(fsdp_last_error(), wrong[i].says) != NULL);
    }
    EXPECT_OK(r->comms->check(r->comm[0]));
    expect_sum(r, (float *)block);
}

static void memory_that_peers_cannot_see_is_refused_and_nothing_has_happened(void **state)
{
    run_team(new_team(state, 3), use_memory_that_is_not_the_devices);
}

static void sum_in_pinned_memory(member *r)
{
    void *pinned = NULL;
    EXPECT_OK(r->device->mem_alloc(r->dev, r->caps.granularity, FSDP_MEMORY_KIND_PINNED, &pinned));
    expect_sum(r, pinned);
    r->device->mem_free(r->dev, pinned, r->caps.granularity, FSDP_MEMORY_KIND_PINNED);
}

static void pinned_memory_serves_as_well(void **state) { run_team(new_team(state, 2), sum_in_pinned_memory); }

/* More pieces than anybody keeps mapped; and pieces that come and go, in other places and sizes on every rank. */
static void sum_in_many_places(member *r)
{
    enum { N = 150, ROUNDS = 3 };
    char *piece[N];
    uint64_t bytes[N];
    for (uint64_t n = 1; n <= 4; n++) { /* each where the last one was, and larger */
        void *larger = NULL;
        uint64_t larger_bytes = 32 * n * r->caps.granularity;
        EXPECT_OK(r->device->mem_alloc(r->dev, larger_bytes, FSDP_MEMORY_KIND_DEVICE, &larger));
        expect_sum(r, (float *)((char *)larger + larger_bytes) - 1);
        r->device->mem_free(r->dev, larger, larger_bytes, FSDP_MEMORY_KIND_DEVICE);
    }
    for (int i = 0; i < N; i++) {
        bytes[i] = 32 * r->caps.granularity * (uint64_t)(1 + i % 3); /* pages, more and fewer */
        EXPECT_OK(r->device->mem_alloc(r->dev, bytes[i], FSDP_MEMORY_KIND_DEVICE, (void **)&piece[i]));
    }
    for (int i = 0; i < ROUNDS * N && !r->failed; i++) {
        int at = (i * 7 + (int)r->rank * 11) % N;
        expect_sum(r, (float *)(piece[at] + bytes[at]) - 1 - i % 5);
        if (r->failed || i % 4 != 0) continue;
        r->device->mem_free(r->dev, piece[at], bytes[at], FSDP_MEMORY_KIND_DEVICE);
        bytes[at] = 32 * r->caps.granularity * (uint64_t)(1 + i % 5);
        EXPECT_OK(r->device->mem_alloc(r->dev, bytes[at], FSDP_MEMORY_KIND_DEVICE, (void **)&piece[at]));
    }
    for (int i = 0; i < N; i++) r->device->mem_free(r->dev, piece[i], bytes[i], FSDP_MEMORY_KIND_DEVICE);
}

static void pieces_may_be_many_and_come_and_go(void **state)
{
    run_team(new_team(state, 2), sum_in_many_places);
    run_team(new_team(state, 4), sum_in_many_places);
}

/* ---- Arguments ---- */

static void open_with_another_link(member *r)
{
    static fsdp_link other = {5, 0};
    fsdp_host_config *config = (void *)r->config;
    close_comm(r, 0);
    if (r->rank == 1) config->link = &other;
    EXPECT(open_comm(r, 0, 10ull * SECOND) == FSDP_ERR_MISMATCH);
    strncpy(r->sentence, fsdp_last_error(), sizeof r->sentence - 1);
}

static void a_link_is_the_same_on_every_rank(void **state)
{
    team *t = new_team(state, 3);
    run_team(t, open_with_another_link);
    for (int i = 0; i < 3; i++)
        if (strstr(t->rank[i].sentence, "rank 1") == NULL || strstr(t->rank[i].sentence, "link") == NULL)
            fail_msg("rank %d: %s", i, t->rank[i].sentence);
}

static void a_launch_is_checked(void **state)
{
    (void)state;
    const fsdp_device_ops *ops = fsdp_host_backend()->device;
    fsdp_host_allocator none = {NULL, NULL, NULL, NULL}, host;
    fsdp_local *local = NULL;
    void *dev = NULL;
    DO(fsdp__host_allocator_resolve(&none, &host));
    DO(fsdp_local_create(2, NULL, &local));
    static const fsdp_side_channel side = {sizeof side, NULL, NULL, NULL, NULL};
    static const fsdp_link link = {1, 1};
    static const struct {
        uint32_t rank, world, own_rank;
        bool launch, local, side, link;
        fsdp_status status;
        const char *says;
    } cases[] = {
        {0, 2, 0, true, true, false, false, FSDP_ERR_ARG, "threads (local) or processes (launch), not both"},
        {0, 2, 1, true, false, false, false, FSDP_ERR_ARG, "fsdp_host_config.rank is 1"},
        {2, 2, 0, true, false, false, false, FSDP_ERR_ARG, "fsdp_launch: rank 2 in a world of 2"},
        {0, 0, 0, true, false, false, false, FSDP_ERR_ARG, "fsdp_launch: rank 0 in a world of 0"},
        {0, 65, 0, true, false, false, false, FSDP_ERR_UNSUPPORTED, "a world of 65"},
        {0, 2, 0, false, true, true, false, FSDP_ERR_ARG, "fsdp_host_config.side is set without launch"},
        {0, 2, 0, false, true, false, true, FSDP_ERR_ARG, "fsdp_host_config.link is set without launch"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsdp_launch launch = FSDP_LAUNCH_INIT;
        launch.rank = cases[i].rank, launch.world = cases[i].world;
        fsdp_host_config config = FSDP_HOST_CONFIG_INIT;
        config.rank = cases[i].own_rank;
        if (cases[i].launch) config.launch = &launch;
        if (cases[i].local) config.local = local;
        if (cases[i].side) config.side = &side;
        if (cases[i].link) config.link = &link;
        fsdp_device_args args = {sizeof args, &config, &host, 0, SECOND, NULL, NULL};
        fsdp_device_caps caps = {.size = sizeof caps};
        assert_int_equal(ops->open(&args, &dev, &caps), cases[i].status);
        if (strstr(fsdp_last_error(), cases[i].says) == NULL) fail_msg("case %zu: %s", i, fsdp_last_error());
        assert_null(dev);
    }
    fsdp_local_destroy(local);
}

/* A sim machine whose fsdp_config.backend was forgotten: of the same size, and numbers where pointers are. */
static void another_backends_config_is_not_followed(void **state)
{
    (void)state;
    fsdp_sim_config machine = FSDP_SIM_CONFIG_INIT;
    for (uint64_t rate = 0; rate <= 1000000000; rate += 1000000000) {
        machine.world = 8;
        machine.kernel_bytes_per_second = rate;
        fsdp_config config = FSDP_CONFIG_INIT;
        config.backend_config = &machine;
        fsdp_context *ctx = NULL;
        assert_int_equal(fsdp_context_create(&config, &ctx), FSDP_ERR_ARG);
        assert_null(ctx);
        if (strstr(fsdp_last_error(), "is fsdp_config.backend the one that it belongs to?") == NULL)
            fail_msg("%s", fsdp_last_error());
    }
}

static void a_launch_says_what_can_be(void **state)
{
    (void)state;
    const fsdp_backend *b = fsdp_host_backend();
    fsdp_host_allocator none = {NULL, NULL, NULL, NULL}, host;
    DO(fsdp__host_allocator_resolve(&none, &host));
    static const struct {
        uint32_t rank, world, local_rank, local_world;
        const char *address, *says; /* says NULL: it is fine */
    } cases[] = {
        {0, 2, 5, 2, "@y", "fsdp_launch: local_rank 5 in a local_world of 2 in a world of 2"},
        {0, 2, 0, 3, "@y", "fsdp_launch: local_rank 0 in a local_world of 3 in a world of 2"},
        {1, 2, 2, 2, "@y", "local_rank 2 in a local_world of 2"},
        {0, 2, 0, 0, "@y", "local_rank 0 in a local_world of 0"},
        {0, 2, 0, 2, "@", "fsdp_launch.address is \"@\" with no name behind it"},
        {0, 2, 0, 2, NULL, "fsdp_launch.address has no end within its 256 bytes"},
        {1, 4, 0, 1, "@y", NULL}, /* what is left from FSDP_LAUNCH_INIT */
        {3, 4, 1, 2, "@y", NULL},
        {1, 2, 1, 2, "", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsdp_launch launch = FSDP_LAUNCH_INIT;
        launch.rank = cases[i].rank, launch.world = cases[i].world;
        launch.local_rank = cases[i].local_rank, launch.local_world = cases[i].local_world;
        memset(launch.address, 'a', sizeof launch.address);
        if (cases[i].address != NULL) strcpy(launch.address, cases[i].address);
        fsdp_host_config config = FSDP_HOST_CONFIG_INIT;
        config.launch = &launch;
        fsdp_device_args args = {sizeof args, &config, &host, 0, SECOND, NULL, NULL};
        fsdp_device_caps caps = {.size = sizeof caps};
        void *dev = NULL;
        fsdp_status status = b->device->open(&args, &dev, &caps);
        if (cases[i].says == NULL) {
            DO(status);
            b->device->close(dev);
            continue;
        }
        assert_int_equal(status, FSDP_ERR_ARG);
        if (strstr(fsdp_last_error(), cases[i].says) == NULL) fail_msg("case %zu: %s", i, fsdp_last_error());
    }
}

/* ---- Limits of the process ---- */

#define WANT(condition)                                                                           \
    do {                                                                                          \
        if (condition) break;                                                                     \
        processes_complain(__FILE__, __LINE__, "not so: %s (%s)", #condition, fsdp_last_error()); \
        return false;                                                                             \
    } while (0)

/* A file that is too large would end the process by a signal. */
static bool take_beyond_the_limit_on_files(uint32_t rank, void *arg)
{
    (void)rank, (void)arg;
    const fsdp_device_ops *ops = fsdp_host_backend()->device;
    fsdp_host_allocator none = {NULL, NULL, NULL, NULL}, host;
    fsdp_launch launch = FSDP_LAUNCH_INIT;
    fsdp_host_config config = FSDP_HOST_CONFIG_INIT;
    fsdp_device_caps caps = {.size = sizeof caps};
    void *dev = NULL, *first = NULL, *second = NULL;
    struct rlimit limit;
    launch.world = 2;
    config.launch = &launch;
    WANT(fsdp__host_allocator_resolve(&none, &host) == FSDP_OK);
    fsdp_device_args args = {sizeof args, &config, &host, 0, SECOND, NULL, NULL};
    WANT(ops->open(&args, &dev, &caps) == FSDP_OK);
    WANT(getrlimit(RLIMIT_FSIZE, &limit) == 0);
    limit.rlim_cur = 1 << 20;
    WANT(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    static const char says[] =
        "the limit on file size (ulimit -f) is 1048576 bytes, and memory between processes is a file";
    WANT(ops->mem_alloc(dev, 2 << 20, FSDP_MEMORY_KIND_DEVICE, &first) == FSDP_ERR_NO_MEMORY);
    WANT(strstr(fsdp_last_error(), says) != NULL && strstr(fsdp_last_error(), "2097152 bytes") != NULL);
    WANT(ops->mem_alloc(dev, 2 << 20, FSDP_MEMORY_KIND_PINNED, &first) == FSDP_ERR_NO_HOST_MEMORY);
    WANT(strstr(fsdp_last_error(), says) != NULL);
    /* Up to it all is well, and what was given back serves again. */
    for (int i = 0; i < 2; i++) {
        WANT(ops->mem_alloc(dev, 1 << 20, FSDP_MEMORY_KIND_DEVICE, &first) == FSDP_OK);
        memset(first, 1, 1 << 20);
        WANT(ops->mem_alloc(dev, caps.granularity, FSDP_MEMORY_KIND_DEVICE, &second) == FSDP_ERR_NO_MEMORY);
        ops->mem_free(dev, first, 1 << 20, FSDP_MEMORY_KIND_DEVICE);
    }
    WANT(ops->check(dev) == FSDP_OK);
    ops->close(dev);
    return true;
}

static void the_limit_on_files_is_named_and_kills_nobody(void **state)
{
    (void)state;
    const char *failure = processes_run(1, 20ull * SECOND, take_beyond_the_limit_on_files, NULL);
    if (failure != NULL) fail_msg("%s", failure);
}

static int run_process_suite(const comm_suite *suite)
{
#define TEST(name)                                   \
    {                                                \
#name, name, team_setup, team_teardown, NULL \
    }
    struct CMUnitTest tests[] = {
        TEST(memory_that_peers_cannot_see_is_refused_and_nothing_has_happened),
        TEST(pinned_memory_serves_as_well),
        TEST(pieces_may_be_many_and_come_and_go),
        TEST(a_link_is_the_same_on_every_rank),
        TEST(a_launch_is_checked),
        TEST(another_backends_config_is_not_followed),
        TEST(a_launch_says_what_can_be),
        TEST(the_limit_on_files_is_named_and_kills_nobody),
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) tests[i].initial_state = (void *)(uintptr_t)suite;
    return cmocka_run_group_tests_name("processes", tests, NULL, NULL);
}

int main(void)
{
    const device_suite device = {.backend = fsdp_host_backend(), .config = alone_config};
    const comm_suite comm = {fsdp_host_backend(), group_create, group_destroy, rank_config, true, false, 0, NULL};
    footprint before = footprint_take();
    int failed = run_device_suite(&device) + run_kernel_suite(&device);
    failed += run_process_suite(&comm);
    failed += run_comm_suite(&comm) + run_comm_error_suite(&comm) + run_side_suite(&comm);
    way = PROCESSES_BY_TCP;
    failed += run_side_suite(&comm);
    own_side = true;
    failed += run_comm_suite(&comm);
    footprint after = footprint_take();
    bool clean = after.n_shm <= before.n_shm && after.n_children == 0;
    if (!clean)
        print_error("files in /dev/shm: %u, before %u; children: %u\n", after.n_shm, before.n_shm, after.n_children);
    return failed > 0 || !clean;
}
