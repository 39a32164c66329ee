/* SPDX-License-Identifier: MIT */
/* Pinned memory: the caller's pieces, the library's staging, the heap that cuts both, and the pages that are locked. */
#include "toy_assert.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "context.h"
#include "fsdp/fsdp.h"
#include "pinned.h"

#define OK(call) assert_int_equal((call), FSDP_OK)

/* The call is refused with this status, and its sentence says so. */
#define REFUSED(call, status, text)                                                                             \
    do {                                                                                                        \
        assert_int_equal((call), (status));                                                                     \
        if (strstr(fsdp_last_error(), (text)) == NULL) fail_msg("'%s' is not in: %s", text, fsdp_last_error()); \
    } while (0)

enum { KB = 1024, MB = 1024 * 1024, REGION = 64 * MB, MAX_PIECES = 64 };

static const uint64_t second_ns = 1000000000u;

static fsdp_counters counters_of(fsdp_context *ctx)
{
    fsdp_counters counters = FSDP_COUNTERS_INIT;
    OK(fsdp_context_counters(ctx, &counters));
    return counters;
}

/* ---- A heap: one region, handed out from its begin to its end, and a note of who has what ---- */

typedef struct heap {
    pthread_mutex_t lock; /* held around the source, as a real heap's is */
    const fsdp_pinned_source *source;
    fsdp_context *ctx; /* NULL until create has returned */
    char *region;
    size_t used;
    struct {
        char *ptr;
        size_t bytes;
        bool live;
    } piece[MAX_PIECES];
    uint32_t n_pieces, n_live, n_locked; /* n_locked: calls with the context's lock held */
    bool is_open, refuses_to_open, was_closed;
} heap;

static void look_at_lock(heap *h)
{
    if (h->ctx == NULL) return;
    if (pthread_mutex_trylock(&h->ctx->lock) != 0) h->n_locked++;
    else pthread_mutex_unlock(&h->ctx->lock);
}

static void *heap_open(void *arg, const fsdp_pinned_source *source)
{
    heap *h = arg;
    if (h->refuses_to_open) return NULL;
    pthread_mutex_init(&h->lock, NULL);
    h->source = source;
    h->is_open = true;
    return h;
}

static void heap_close(void *heap_)
{
    heap *h = heap_;
    assert_int_equal(h->n_live, 0);
    if (h->region != NULL) h->source->give(h->source->arg, h->region, REGION);
    h->was_closed = true;
    pthread_mutex_destroy(&h->lock);
}

static void *heap_alloc(void *heap_, size_t bytes, size_t alignment)
{
    heap *h = heap_;
    char *ptr = NULL;
    look_at_lock(h);
    pthread_mutex_lock(&h->lock);
    if (h->region == NULL) h->region = h->source->take(h->source->arg, REGION);
    size_t at = (h->used + alignment - 1) & ~(alignment - 1);
    if (h->region != NULL && at + bytes <= REGION && h->n_pieces < MAX_PIECES) {
        ptr = h->region + at;
        h->used = at + bytes;
        h->piece[h->n_pieces].ptr = ptr;
        h->piece[h->n_pieces].bytes = bytes;
        h->piece[h->n_pieces++].live = true;
        h->n_live++;
        memset(ptr, 0xee, bytes); /* of any content */
    }
    pthread_mutex_unlock(&h->lock);
    return ptr;
}

static void heap_free(void *heap_, void *ptr, size_t bytes, size_t alignment)
{
    heap *h = heap_;
    uint32_t found = 0;
    look_at_lock(h);
    assert_int_equal((uintptr_t)ptr % alignment, 0);
    pthread_mutex_lock(&h->lock);
    for (uint32_t i = 0; i < h->n_pieces; i++) {
        if (h->piece[i].ptr != ptr || h->piece[i].bytes != bytes || !h->piece[i].live) continue;
        h->piece[i].live = false;
        h->n_live--;
        found++;
    }
    pthread_mutex_unlock(&h->lock);
    if (found != 1) abort(); /* not what alloc gave, with the same sizes */
    memset(ptr, 0xdd, bytes);
}

static fsdp_pinned_allocator heap_table(heap *h)
{
    return (fsdp_pinned_allocator){heap_open, heap_close, heap_alloc, heap_free, NULL, h};
}

static fsdp_context *open_context(const fsdp_backend *backend, heap *h)
{
    fsdp_config config = FSDP_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    config.backend = backend;
    config.timeout_ns = 10 * second_ns;
    if (h != NULL) config.pinned = heap_table(h);
    OK(fsdp_context_create(&config, &ctx));
    if (h != NULL) h->ctx = ctx;
    return ctx;
}

/* ---- The caller's pieces ---- */

static void a_piece_is_a_region_of_its_own_and_counted_to_the_byte(void **unused)
{
    (void)unused;
    const fsdp_backend *backends[] = {fsdp_host_backend(), fsdp_sim_backend()};
    for (int b = 0; b < 2; b++) {
        fsdp_context *ctx = open_context(backends[b], NULL);
        fsdp_arena_stats stats;
        void *p[3];
        for (size_t i = 0; i < 3; i++) {
            OK(fsdp_pinned_alloc(ctx, 1 + i * 4096, &p[i]));
            memset(p[i], 1, 1 + i * 4096);
            assert_int_equal((uintptr_t)p[i] % (b == 0 ? 4096 : 64), 0);
            assert_int_equal(counters_of(ctx).pinned_bytes, (i + 1) * (i + 2) / 2 * 4096);
        }
        assert_int_equal(counters_of(ctx).allocations, 3);
        assert_true(fsdp__arena_stats(ctx, FSDP__ARENA_PINNED, &stats));
        assert_int_equal(stats.allocated_bytes, 6 * 4096);
        assert_int_equal(stats.mapped_bytes, 6 * 4096);
        assert_int_equal(stats.regions, 3);
        OK(fsdp_pinned_free(ctx, p[1]));
        assert_int_equal(counters_of(ctx).pinned_bytes, 4 * 4096);
        OK(fsdp_pinned_free(ctx, p[0]));
        OK(fsdp_pinned_free(ctx, p[2]));
        OK(fsdp_pinned_free(ctx, NULL));
        assert_int_equal(counters_of(ctx).pinned_bytes, 0);
        assert_true(fsdp__arena_stats(ctx, FSDP__ARENA_PINNED, &stats));
        assert_int_equal(stats.regions, 0);
        assert_int_equal(stats.allocs, 3);
        assert_int_equal(stats.frees, 3);
        assert_false(fsdp__arena_stats(ctx, FSDP__ARENA_HOST, &stats)); /* libc does not tell */
        OK(fsdp_context_destroy(ctx));
    }
}

static void a_wrong_pointer_is_an_error_and_frees_nothing(void **unused)
{
    (void)unused;
    fsdp_context *ctx = open_context(NULL, NULL), *other = open_context(NULL, NULL);
    void *a, *b, *none = &a;
    char foreign[8];
    OK(fsdp_pinned_alloc(ctx, 10000, &a));
    OK(fsdp_pinned_alloc(ctx, 4096, &b));
    REFUSED(fsdp_pinned_alloc(ctx, 0, &none), FSDP_ERR_ARG, "fsdp_pinned_alloc: bytes is 0");
    REFUSED(fsdp_pinned_alloc(NULL, 1, &none), FSDP_ERR_ARG, "ctx is NULL");
    REFUSED(fsdp_pinned_alloc(ctx, 1, NULL), FSDP_ERR_ARG, "out_ptr is NULL");
    REFUSED(fsdp_pinned_alloc(ctx, SIZE_MAX - 100, &none), FSDP_ERR_NO_HOST_MEMORY, "host memory");
    assert_ptr_equal(none, &a);
    REFUSED(fsdp_pinned_free(ctx, foreign), FSDP_ERR_ARG, "is no live piece of this context: it was freed already, or");
    REFUSED(fsdp_pinned_free(other, a), FSDP_ERR_ARG, "is no live piece of this context");
    REFUSED(fsdp_pinned_free(ctx, (char *)a + 5000), FSDP_ERR_ARG, "points 5000 bytes into a piece of 12288");
    REFUSED(fsdp_pinned_free(ctx, (char *)b + 4095), FSDP_ERR_ARG, "points 4095 bytes into a piece of 4096");
    assert_int_equal(counters_of(ctx).pinned_bytes, 12288 + 4096);
    OK(fsdp_pinned_free(ctx, a));
    REFUSED(fsdp_pinned_free(ctx, a), FSDP_ERR_ARG, "it was freed already, or");
    assert_int_equal(counters_of(ctx).pinned_bytes, 4096);
    REFUSED(fsdp_context_destroy(ctx), FSDP_ERR_STATE, "1 pinned piece of yours still live");
    fsdp_context_abort(ctx, "enough");
    REFUSED(fsdp_pinned_alloc(ctx, 1, &none), FSDP_ERR_ABORTED, "enough");
    OK(fsdp_pinned_free(ctx, b)); /* giving back always works */
    OK(fsdp_context_destroy(ctx));
    OK(fsdp_context_destroy(other));
}

typedef struct worker {
    fsdp_context *ctx;
    uint64_t seed;
    bool failed;
} worker;

static void *take_and_give(void *arg)
{
    worker *w = arg;
    unsigned char *held[8] = {NULL};
    size_t bytes[8] = {0};
    for (uint32_t i = 0; i < 2000 + 8; i++) {
        w->seed = w->seed * 6364136223846793005u + 1442695040888963407u;
        size_t k = i % 8;
        if (held[k] != NULL) {
            for (size_t j = 0; j < bytes[k]; j += 512) w->failed |= held[k][j] != (unsigned char)(bytes[k] + j / 512);
            w->failed |= fsdp_pinned_free(w->ctx, held[k]) != FSDP_OK;
        }
        held[k] = NULL;
        void *ptr;
        bytes[k] = 1 + (w->seed >> 33) % 20000;
        if (i >= 2000) continue;
        w->failed |= fsdp_pinned_alloc(w->ctx, bytes[k], &ptr) != FSDP_OK;
        held[k] = ptr;
        for (size_t j = 0; j < bytes[k]; j += 512) held[k][j] = (unsigned char)(bytes[k] + j / 512);
    }
    return NULL;
}

static void any_thread_takes_and_gives(void **unused)
{
    (void)unused;
    fsdp_context *ctx = open_context(NULL, NULL);
    worker w[4];
    pthread_t thread[4];
    for (uint64_t i = 0; i < 4; i++) {
        w[i] = (worker){ctx, i + 1, false};
        assert_int_equal(pthread_create(&thread[i], NULL, take_and_give, &w[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(thread[i], NULL);
        assert_false(w[i].failed);
    }
    assert_int_equal(counters_of(ctx).pinned_bytes, 0);
    assert_int_equal(counters_of(ctx).allocations, 8000);
    OK(fsdp_context_destroy(ctx));
}

/* ---- Heaps ---- */

static void a_table_is_whole_or_zero(void **unused)
{
    (void)unused;
    fsdp_context *ctx = NULL;
    heap h = {.refuses_to_open = true};
    fsdp_config config = FSDP_CONFIG_INIT;
    config.pinned = heap_table(&h);
    REFUSED(fsdp_context_create(&config, &ctx), FSDP_ERR_NO_HOST_MEMORY, "fsdp_config.pinned.open gave no heap");
    config.pinned.free = NULL;
    REFUSED(fsdp_context_create(&config, &ctx), FSDP_ERR_ARG,
            "fsdp_config.pinned has 3 of open, close, alloc and free");
    assert_null(ctx);
    assert_false(h.is_open);
}

static void pieces_come_from_the_heap_and_no_lock_is_held_around_it(void **unused)
{
    (void)unused;
    heap h = {0};
    fsdp_context *ctx = open_context(NULL, &h);
    void *a, *b;
    OK(fsdp_pinned_alloc(ctx, 100, &a));
    OK(fsdp_pinned_alloc(ctx, 5000, &b));
    assert_ptr_equal(a, h.piece[0].ptr);
    assert_int_equal(h.piece[1].bytes, 5000);
    assert_int_equal(counters_of(ctx).pinned_bytes, REGION); /* what the device gave */
    assert_int_equal(counters_of(ctx).allocations, 1);
    REFUSED(fsdp_pinned_alloc(ctx, REGION, &a), FSDP_ERR_NO_HOST_MEMORY, "the heap gave none");
    OK(fsdp_pinned_free(ctx, a));
    REFUSED(fsdp_pinned_free(ctx, a), FSDP_ERR_ARG, "it was freed already, or");
    OK(fsdp_pinned_free(ctx, b));
    assert_int_equal(counters_of(ctx).pinned_bytes, REGION);
    assert_int_equal(h.n_locked, 0);
    OK(fsdp_context_destroy(ctx));
    assert_true(h.was_closed);
}

/* ---- Staging ---- */

enum { ELEMS = 3 * 262144 + 1001 }; /* four chunks */

typedef struct trainee {
    heap h;
    fsdp_context *ctx;
    fsdp_model *model;
    fsdp_param *param;
    float *values;
    uint64_t gives_up_at; /* of fill */
    void *given;          /* fill's last dst */
    uint32_t n_same;      /* chunks that went to the same place as the one before */
    fsdp_status refusal;  /* of freeing it */
} trainee;

static float value_of(uint64_t i, uint32_t k) { return (float)((i * 7919 + k * 131) % 65521) - 30000.0f; }

static void open_trainee(trainee *t, uint64_t jitter_ns, uint64_t timeout_ns)
{
    *t = (trainee){.gives_up_at = UINT64_MAX};
    fsdp_host_config host = FSDP_HOST_CONFIG_INIT;
    host.jitter_ns = jitter_ns;
    host.jitter_seed = 7;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend_config = &host;
    config.timeout_ns = timeout_ns;
    config.pinned = heap_table(&t->h);
    OK(fsdp_context_create(&config, &t->ctx));
    t->h.ctx = t->ctx;
    fsdp_unit *unit;
    OK(fsdp_model_create(t->ctx, NULL, &t->model));
    OK(fsdp_model_add_unit(t->model, "u", NULL, &unit));
    OK(fsdp_unit_add_param(unit, "w", 1, (uint64_t[]){ELEMS}, NULL, &t->param));
    OK(fsdp_model_seal(t->model));
    t->values = malloc(ELEMS * sizeof(float));
    assert_non_null(t->values);
}

static void close_trainee(trainee *t)
{
    OK(fsdp_model_destroy(t->model));
    OK(fsdp_context_destroy(t->ctx));
    assert_true(t->h.was_closed);
    free(t->values);
}

static int fill_values(void *arg, const fsdp_param_range *range, void *dst)
{
    trainee *t = arg;
    if (range->begin >= t->gives_up_at) return 1;
    for (uint64_t i = 0; i < range->count; i++) ((float *)dst)[i] = value_of(range->begin + i, 5);
    t->n_same += dst == t->given;
    t->given = dst;
    t->refusal = fsdp_pinned_free(t->ctx, dst);
    return 0;
}

static void assert_values(trainee *t, uint64_t n, uint32_t k)
{
    memset(t->values, 0, ELEMS * sizeof(float));
    OK(fsdp_param_get(t->param, FSDP_VALUE_MASTER, t->values, FSDP_DTYPE_FP32));
    for (uint64_t i = 0; i < n; i++)
        if (t->values[i] != value_of(i, k)) fail_msg("element %llu is %g", (unsigned long long)i, (double)t->values[i]);
}

/* Chunks take turns in two pieces; a copy that is late, or a piece that is filled too early, mixes them up. */
static void values_go_through_two_pieces_in_turn_whole(void **unused)
{
    (void)unused;
    for (uint32_t k = 0; k < 6; k++) {
        trainee t;
        uint64_t hash[3];
        open_trainee(&t, k % 2 ? 3000000 : 0, 10 * second_ns);
        for (uint64_t i = 0; i < ELEMS; i++) t.values[i] = value_of(i, k);
        OK(fsdp_param_set(t.param, t.values, FSDP_DTYPE_FP32));
        assert_values(&t, ELEMS, k);
        OK(fsdp_model_hash(t.model, &hash[0]));
        OK(fsdp_model_hash(t.model, &hash[1]));
        t.values[ELEMS - 1] += 1.0f;
        OK(fsdp_param_set(t.param, t.values, FSDP_DTYPE_FP32));
        OK(fsdp_model_hash(t.model, &hash[2]));
        assert_int_equal(hash[0], hash[1]);
        assert_int_not_equal(hash[0], hash[2]);
        assert_int_equal(t.h.n_live, 0);
        assert_int_equal(t.h.n_locked, 0);
        assert_true(t.h.n_pieces >= 6);
        close_trainee(&t);
    }
}

static void the_same_values_have_the_same_hash_however_they_came(void **unused)
{
    (void)unused;
    trainee t;
    uint64_t set, filled;
    open_trainee(&t, 0, 10 * second_ns);
    for (uint64_t i = 0; i < ELEMS; i++) t.values[i] = value_of(i, 5);
    OK(fsdp_param_set(t.param, t.values, FSDP_DTYPE_FP32));
    OK(fsdp_model_hash(t.model, &set));
    close_trainee(&t);
    open_trainee(&t, 3000000, 10 * second_ns);
    OK(fsdp_model_fill(t.model, fill_values, &t, FSDP_DTYPE_FP32));
    OK(fsdp_model_hash(t.model, &filled));
    assert_int_equal(set, filled);
    assert_int_equal(t.n_same, 0); /* one is filled while the other is copied */
    close_trainee(&t);
}

static void staging_is_not_the_callers_to_free(void **unused)
{
    (void)unused;
    trainee t;
    open_trainee(&t, 0, 10 * second_ns);
    OK(fsdp_model_fill(t.model, fill_values, &t, FSDP_DTYPE_FP32));
    assert_int_equal(t.refusal, FSDP_ERR_ARG);
    REFUSED(fsdp_pinned_free(t.ctx, t.given), FSDP_ERR_ARG, "is no live piece of this context");
    assert_values(&t, ELEMS, 5);
    close_trainee(&t);
}

static void what_was_asked_for_before_fill_gave_up_is_written(void **unused)
{
    (void)unused;
    trainee t;
    open_trainee(&t, 3000000, 10 * second_ns);
    t.gives_up_at = 2 * 262144;
    REFUSED(fsdp_model_fill(t.model, fill_values, &t, FSDP_DTYPE_FP32), FSDP_ERR_ARG, "gave up at element 524288");
    assert_int_equal(t.h.n_live, 0); /* and no copy is under way any more */
    assert_values(&t, 2 * 262144, 5);
    close_trainee(&t);
}

typedef struct gate {
    pthread_mutex_t lock;
    pthread_cond_t opened;
    bool open;
} gate;

static void wait_at_gate(void *arg)
{
    gate *g = arg;
    pthread_mutex_lock(&g->lock);
    while (!g->open) pthread_cond_wait(&g->opened, &g->lock);
    pthread_mutex_unlock(&g->lock);
}

static void staging_stays_as_long_as_a_late_device_may_read_it(void **unused)
{
    (void)unused;
    trainee t;
    gate g = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};
    open_trainee(&t, 0, 50000000);
    memset(t.values, 0, ELEMS * sizeof(float));
    OK(fsdp_stream_host_call(fsdp_context_lane(t.ctx, FSDP_LANE_COPY), wait_at_gate, &g));
    assert_int_equal(fsdp_param_set(t.param, t.values, FSDP_DTYPE_FP32), FSDP_ERR_TIMEOUT);
    assert_int_equal(t.h.n_live, 1); /* the heap would have overwritten it */
    pthread_mutex_lock(&g.lock);
    g.open = true;
    pthread_cond_broadcast(&g.opened);
    pthread_mutex_unlock(&g.lock);
    close_trainee(&t); /* the heap sees that nothing lives */
    assert_int_equal(t.h.n_live, 0);
}

/* ---- Page locks ---- */

static long locked_kb(void)
{
    char line[128];
    long kb = -1;
    FILE *f = fopen("/proc/self/status", "r");
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "VmLck: %ld", &kb) == 1) break;
    if (f != NULL) fclose(f);
    return kb;
}

typedef struct warnings {
    int n;
    char text[512];
} warnings;

static void keep_warning(void *arg, const char *text)
{
    warnings *w = arg;
    w->n++;
    snprintf(w->text, sizeof w->text, "%s", text);
}

static fsdp_context *open_listening(warnings *w)
{
    fsdp_context *ctx = NULL;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.log = keep_warning;
    config.log_arg = w;
    return fsdp_context_create(&config, &ctx) == FSDP_OK ? ctx : NULL;
}

static bool may_lock(size_t bytes)
{
    struct rlimit limit = {0, 0};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    return geteuid() == 0 || limit.rlim_cur >= bytes;
}

static void pinned_pages_are_locked_until_they_are_given_back(void **unused)
{
    (void)unused;
    if (TOY_REDUCED) skip(); /* sanitizers lock nothing */
    if (locked_kb() < 0 || !may_lock(40 * KB)) skip();
    warnings w = {0};
    void *p;
    fsdp_context *ctx = open_listening(&w);
    long before = locked_kb();
    OK(fsdp_pinned_alloc(ctx, 40 * KB, &p));
    assert_int_equal(locked_kb() - before, 40);
    OK(fsdp_pinned_free(ctx, p));
    assert_int_equal(locked_kb(), before);
    assert_int_equal(w.n, 0);
    OK(fsdp_context_destroy(ctx));
}

/* In a child, which gives up the right to lock. Returns what went wrong. */
static int live_without_locks(void)
{
    const struct rlimit none = {0, 0};
    warnings w = {0};
    void *p, *q;
    if (setrlimit(RLIMIT_MEMLOCK, &none) != 0) return 1;
    if (geteuid() == 0 && setuid(65534) != 0) return 2;
    fsdp_context *ctx = open_listening(&w);
    if (ctx == NULL) return 3;
    if (fsdp_pinned_alloc(ctx, 10000, &p) != FSDP_OK || fsdp_pinned_alloc(ctx, 10000, &q) != FSDP_OK) return 4;
    memset(p, 1, 10000);
    if (w.n != 1) return 5;
    if (strstr(w.text, "rank 0: 12288 bytes of pinned memory are not page-locked") == NULL) return 6;
    if (strstr(w.text, "RLIMIT_MEMLOCK is 0 bytes") == NULL) return 7;
    if (fsdp_pinned_free(ctx, p) != FSDP_OK || fsdp_pinned_free(ctx, q) != FSDP_OK) return 8;
    return fsdp_context_destroy(ctx) == FSDP_OK ? 0 : 9;
}

static void without_the_right_to_lock_it_works_and_warns_once(void **unused)
{
    (void)unused;
    if (TOY_REDUCED) skip();
    int status = 0;
    pid_t child = fork();
    if (child == 0) _exit(live_without_locks());
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup(name, toy_deadline)
    const struct CMUnitTest tests[] = {
        TEST(a_piece_is_a_region_of_its_own_and_counted_to_the_byte),
        TEST(a_wrong_pointer_is_an_error_and_frees_nothing),
        TEST(any_thread_takes_and_gives),
        TEST(a_table_is_whole_or_zero),
        TEST(pieces_come_from_the_heap_and_no_lock_is_held_around_it),
        TEST(values_go_through_two_pieces_in_turn_whole),
        TEST(the_same_values_have_the_same_hash_however_they_came),
        TEST(staging_is_not_the_callers_to_free),
        TEST(what_was_asked_for_before_fill_gave_up_is_written),
        TEST(staging_stays_as_long_as_a_late_device_may_read_it),
        TEST(pinned_pages_are_locked_until_they_are_given_back),
        TEST(without_the_right_to_lock_it_works_and_warns_once),
    };
    return cmocka_run_group_tests_name("pinned memory", tests, NULL, NULL);
}
