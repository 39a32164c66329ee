/* SPDX-License-Identifier: MIT */
/* The host backend passes the conformance suites, and keeps what only it promises. */
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "comm_suite.h"
#include "fsdp/host.h"
#include "hostmem.h"

static fsdp_host_allocator libc_host; /* set by main */

static const void *rank_config(void *storage, void *group, uint32_t rank, uint64_t jitter_ns, uint64_t jitter_seed)
{
    fsdp_host_config *config = storage;
    *config = (fsdp_host_config)FSDP_HOST_CONFIG_INIT;
    config->local = group;
    config->rank = rank;
    config->jitter_ns = jitter_ns;
    config->jitter_seed = jitter_seed;
    return config;
}

static const void *alone_config(void *storage, uint64_t jitter_ns, uint64_t jitter_seed)
{
    return rank_config(storage, NULL, 0, jitter_ns, jitter_seed);
}

static void *group_create(uint32_t world, const fsdp_link *link)
{
    fsdp_local *local = NULL;
    DO(fsdp_local_create(world, link, &local));
    return local;
}

static void group_destroy(void *group) { fsdp_local_destroy(group); }

/* ---- Threads ---- */

static long switches(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_nvcsw + usage.ru_nivcsw;
}

/* A thread that polls or times out gets the processor; one that waits on a condition does not. */
static void idle_streams_do_not_wake(void **state)
{
    (void)state;
    enum { N = 64 };
    const device_suite suite = {.backend = fsdp_host_backend(), .config = alone_config};
    static fixture f;
    void *streams[N];
    assert_true(fixture_open(&f, &suite, 0, 0, 0));
    for (int i = 0; i < N; i++) DO(f.ops->stream_create(f.dev, "idle", false, &streams[i]));
    for (int i = 0; i < N; i++) {
        fsdp_device_op op = {.kind = FSDP_OPERATION_DELAY, .u.delay = {1}};
        DO(f.ops->launch(f.dev, streams[i], &op, NULL));
        DO(f.ops->stream_drain(f.dev, streams[i], UINT64_MAX));
    }
    const struct timespec settle = {0, 50000000}, look = {0, 500000000};
    nanosleep(&settle, NULL);
    long before = switches();
    nanosleep(&look, NULL);
    assert_true(switches() - before < N / 4);
    for (int i = 0; i < N; i++) f.ops->stream_destroy(f.dev, streams[i]);
    fixture_close(&f);
}

static void jitter_delays_about_half_of_the_operations(void **state)
{
    (void)state;
    const device_suite suite = {.backend = fsdp_host_backend(), .config = alone_config};
    assert_jitter_delays(&suite);
}

/* ---- Arguments ---- */

static void a_local_group_has_1_to_64_ranks(void **state)
{
    (void)state;
    fsdp_local *local = NULL;
    assert_int_equal(fsdp_local_create(0, NULL, &local), FSDP_ERR_ARG);
    assert_int_equal(fsdp_local_create(65, NULL, &local), FSDP_ERR_ARG);
    assert_int_equal(fsdp_local_create(2, NULL, NULL), FSDP_ERR_ARG);
    assert_null(local);
    DO(fsdp_local_create(64, NULL, &local));
    fsdp_local_destroy(local);
    fsdp_local_destroy(NULL);
}

static fsdp_status open_device(const fsdp_host_config *config, void **dev)
{
    fsdp_device_args args = {sizeof args, config, &libc_host, 0, SECOND, NULL, NULL};
    fsdp_device_caps caps = {.size = sizeof caps};
    return fsdp_host_backend()->device->open(&args, dev, &caps);
}

static void a_config_names_a_rank_of_its_group(void **state)
{
    (void)state;
    fsdp_local *local = NULL;
    void *dev = NULL;
    DO(fsdp_local_create(2, NULL, &local));
    fsdp_host_config config = FSDP_HOST_CONFIG_INIT;
    config.rank = 1;
    assert_int_equal(open_device(&config, &dev), FSDP_ERR_ARG);
    config.local = local;
    config.rank = 2;
    assert_int_equal(open_device(&config, &dev), FSDP_ERR_ARG);
    assert_string_equal(fsdp_last_error(), "fsdp_host_config.rank is 2 in a world of 2");
    config.rank = 1;
    config.size = 4;
    assert_int_equal(open_device(&config, &dev), FSDP_ERR_ARG);
    assert_null(dev);
    DO(open_device(NULL, &dev));
    fsdp_host_backend()->device->close(dev);
    fsdp_local_destroy(local);
}

/* ---- Opening ---- */

static fsdp_status open_side(fsdp_local *local, uint32_t rank, uint64_t timeout_ns, void **side)
{
    _Alignas(16) char config[CONFIG_BYTES];
    uint32_t number, world;
    fsdp_side_args args = {.size = sizeof args,
                           .backend_config = rank_config(config, local, rank, 0, 0),
                           .host = &libc_host,
                           .timeout_ns = timeout_ns};
    return fsdp_host_backend()->side->open(&args, side, &number, &world);
}

static void opening_without_all_ranks_says_who_came_and_can_be_tried_again(void **state)
{
    (void)state;
    fsdp_local *local = NULL;
    void *side = NULL;
    DO(fsdp_local_create(4, NULL, &local));
    for (int i = 0; i < 2; i++) {
        assert_int_equal(open_side(local, 2, 30000000, &side), FSDP_ERR_RANK_LOST);
        assert_string_equal(
            fsdp_last_error(),
            "opening the side channel: rank 2 of 4 came, ranks 0, 1, 3 did not within 0.030 s: do they have the "
            "same fsdp_local?");
    }
    assert_null(side);
    fsdp_local_destroy(local);
}

typedef struct opener {
    fsdp_local *local;
    fsdp_status status;
} opener;

static void *open_as_rank_0(void *arg)
{
    opener *o = arg;
    void *side = NULL;
    o->status = open_side(o->local, 0, 300000000, &side);
    return NULL;
}

static void a_rank_opened_twice_is_refused(void **state)
{
    (void)state;
    opener o[2];
    pthread_t threads[2];
    fsdp_local *local = NULL;
    DO(fsdp_local_create(2, NULL, &local));
    for (int i = 0; i < 2; i++) {
        o[i] = (opener){local, FSDP_OK};
        assert_int_equal(pthread_create(&threads[i], NULL, open_as_rank_0, &o[i]), 0);
    }
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    /* One waits in vain; the other is refused, unless it came so late that it waited in vain by itself. */
    assert_true(o[0].status == FSDP_ERR_RANK_LOST || o[1].status == FSDP_ERR_RANK_LOST);
    assert_true(o[0].status == FSDP_ERR_ARG || o[1].status == FSDP_ERR_ARG || o[0].status == o[1].status);
    fsdp_local_destroy(local);
}

/* ---- Host memory that runs out ---- */

typedef struct failing {
    fsdp_host_allocator libc;
    pthread_mutex_t lock;
    int until_failure; /* 0: the next allocation fails */
    int live;
} failing;

static void *failing_alloc(void *arg, size_t bytes, size_t alignment)
{
    failing *f = arg;
    pthread_mutex_lock(&f->lock);
    bool fails = f->until_failure-- == 0;
    if (!fails) f->live++;
    pthread_mutex_unlock(&f->lock);
    return fails ? NULL : f->libc.alloc(f->libc.arg, bytes, alignment);
}

static void failing_free(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    failing *f = arg;
    pthread_mutex_lock(&f->lock);
    f->live--;
    pthread_mutex_unlock(&f->lock);
    f->libc.free(f->libc.arg, ptr, bytes, alignment);
}

typedef struct parts {
    void *dev, *stream, *event, *side, *comm, *pinned;
} parts;

/* Everything that takes host memory, until something fails. */
static fsdp_status use_everything(const fsdp_host_allocator *host, parts *p)
{
    const fsdp_backend *b = fsdp_host_backend();
    fsdp_device_args dev = {sizeof dev, NULL, host, 0, SECOND, NULL, NULL};
    fsdp_device_caps caps = {.size = sizeof caps};
    uint32_t rank, world;
    fsdp_status status = b->device->open(&dev, &p->dev, &caps);
    if (status != FSDP_OK) return status;
    fsdp_side_args side = {.size = sizeof side, .host = host, .timeout_ns = SECOND};
    status = b->side->open(&side, &p->side, &rank, &world);
    fsdp_comm_args args = {sizeof args, NULL, p->dev, host, 0, SECOND, b->side, p->side};
    if (status == FSDP_OK) status = b->comm->open(&args, &p->comm);
    if (status == FSDP_OK) status = b->device->stream_create(p->dev, "s", false, &p->stream);
    if (status == FSDP_OK) status = b->device->event_create(p->dev, &p->event);
    if (status == FSDP_OK) status = b->device->mem_alloc(p->dev, 4096, FSDP_MEMORY_KIND_PINNED, &p->pinned);
    fsdp_collective group[6];
    for (int i = 0; i < 6; i++)
        group[i] = (fsdp_collective){.kind = FSDP_OPERATION_ALL_REDUCE,
                                     .dtype = FSDP_DTYPE_FP32,
                                     .count = 1,
                                     .send = p->pinned,
                                     .recv = p->pinned};
    fsdp_device_op delay = {.kind = FSDP_OPERATION_DELAY, .u.delay = {2000000}};
    if (status == FSDP_OK) status = b->device->launch(p->dev, p->stream, &delay, NULL);
    for (int i = 0; status == FSDP_OK && i < 100; i++) {
        status = b->device->event_record(p->dev, p->event, p->stream, NULL);
        if (status == FSDP_OK) status = b->device->stream_wait(p->dev, p->stream, p->event, NULL);
        if (status == FSDP_OK && i % 40 == 0) status = b->comm->enqueue(p->comm, p->stream, group, i == 0 ? 1 : 6);
    }
    return status;
}

static void give_back(parts *p)
{
    const fsdp_backend *b = fsdp_host_backend();
    if (p->stream != NULL) b->device->stream_destroy(p->dev, p->stream);
    if (p->event != NULL) b->device->event_destroy(p->dev, p->event);
    if (p->comm != NULL) b->comm->close(p->comm);
    if (p->side != NULL) b->side->close(p->side);
    if (p->pinned != NULL) b->device->mem_free(p->dev, p->pinned, 4096, FSDP_MEMORY_KIND_PINNED);
    if (p->dev != NULL) b->device->close(p->dev);
}

static void each_host_allocation_may_fail_and_nothing_leaks(void **state)
{
    (void)state;
    alarm(60);
    failing f = {.libc = libc_host};
    fsdp_host_allocator host = {failing_alloc, failing_free, &f, NULL};
    pthread_mutex_init(&f.lock, NULL);
    fsdp_status status = FSDP_ERR_NO_HOST_MEMORY;
    int n = 0;
    for (; status != FSDP_OK && n < 1000; n++) {
        parts p = {NULL, NULL, NULL, NULL, NULL, NULL};
        f.until_failure = n;
        status = use_everything(&host, &p);
        if (status != FSDP_OK) assert_int_equal(status, FSDP_ERR_NO_HOST_MEMORY);
        if (p.dev != NULL) DO(fsdp_host_backend()->device->check(p.dev)); /* nothing is broken by it */
        give_back(&p);
        assert_int_equal(f.live, 0);
    }
    assert_int_equal(status, FSDP_OK);
    assert_true(n > 15);
    pthread_mutex_destroy(&f.lock);
}

int main(void)
{
    const device_suite device = {.backend = fsdp_host_backend(), .config = alone_config};
    const comm_suite comm = {fsdp_host_backend(), group_create, group_destroy, rank_config, false, false, 0, NULL};
    const struct CMUnitTest own[] = {
        cmocka_unit_test(idle_streams_do_not_wake),
        cmocka_unit_test(jitter_delays_about_half_of_the_operations),
        cmocka_unit_test(a_local_group_has_1_to_64_ranks),
        cmocka_unit_test(a_config_names_a_rank_of_its_group),
        cmocka_unit_test(opening_without_all_ranks_says_who_came_and_can_be_tried_again),
        cmocka_unit_test(a_rank_opened_twice_is_refused),
        cmocka_unit_test(each_host_allocation_may_fail_and_nothing_leaks),
    };
    fsdp_host_allocator none = {NULL, NULL, NULL, NULL};
    if (fsdp__host_allocator_resolve(&none, &libc_host) != FSDP_OK) return 1;
    int failed = run_device_suite(&device) + run_kernel_suite(&device);
    failed += run_comm_suite(&comm) + run_comm_error_suite(&comm) + run_side_suite(&comm);
    failed += cmocka_run_group_tests_name("host backend", own, NULL, NULL);
    return failed > 0;
}
