/* SPDX-License-Identifier: MIT */
/* Ranks tell each other bytes that somebody has written: no gap in a struct takes what lay on the stack or the heap before to
 * another process. The journey below is made twice, over memory painted with another byte each time; what shows both paints at
 * one place was never written. Ranks are processes to the library, and threads here, with a side channel that notes all. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "fsdp/fsdp.h"

enum { RANKS = 2, PAINTED = 1 << 16, MOST = 1 << 20, PAINT_A = 0xa5, PAINT_B = 0x5a };
static const uint64_t timeout_ns = 60000000000u;

typedef struct talk {
    unsigned char paint;
    bool differ;
    pthread_barrier_t meet;
    const void *mine[RANKS];
    unsigned char said[MOST]; /* by rank 0 */
    size_t n_said;
} talk;

typedef struct rank {
    talk *all;
    uint32_t number;
    char error[512];
    pthread_t thread;
} rank;

static fsdp_status gather(void *arg, const void *mine, void *all, size_t bytes, uint64_t unused)
{
    rank *r = arg;
    talk *t = r->all;
    (void)unused;
    t->mine[r->number] = mine;
    if (r->number == 0 && t->n_said + bytes <= MOST) {
        memcpy(t->said + t->n_said, mine, bytes);
        t->n_said += bytes;
    }
    pthread_barrier_wait(&t->meet);
    for (uint32_t k = 0; k < RANKS; k++) memcpy((char *)all + k * bytes, t->mine[k], bytes);
    pthread_barrier_wait(&t->meet);
    return FSDP_OK;
}

/* ---- Paint ---- */

static __attribute__((noinline)) void paint_stack(unsigned char paint)
{
    unsigned char below[PAINTED];
    memset(below, paint, sizeof below);
    __asm__ volatile("" : : "r"(below) : "memory"); /* it counts as used */
}

static void *painted_alloc(void *arg, size_t bytes, size_t alignment)
{
    void *ptr = NULL;
    if (posix_memalign(&ptr, alignment < sizeof(void *) ? sizeof(void *) : alignment, bytes) != 0) return NULL;
    return memset(ptr, ((const talk *)arg)->paint, bytes);
}

static void painted_free(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    (void)arg;
    (void)bytes;
    (void)alignment;
    free(ptr);
}

/* ---- The journey ---- */

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        paint_stack(r->all->paint);                                                                          \
        if ((call) != FSDP_OK) {                                                                             \
            snprintf(r->error, sizeof r->error, "rank %u: %s: %.300s", r->number, #call, fsdp_last_error()); \
            return;                                                                                          \
        }                                                                                                    \
    } while (0)

static int ones(void *arg, const fsdp_param_range *range, void *dst)
{
    (void)arg;
    for (uint64_t i = 0; i < range->count; i++) ((float *)dst)[i] = 1.0f;
    return 0;
}

static void train(rank *r, fsdp_context *ctx, fsdp_stream *s, fsdp_model *model)
{
    fsdp_unit *unit;
    fsdp_param *param;
    fsdp_adamw *opt;
    fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    fsdp_view view = FSDP_VIEW_INIT;
    fsdp_adamw_args update = FSDP_ADAMW_ARGS_INIT;
    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    float values[15];
    double sum = 1.0;
    uint64_t hash;
    char text[5] = "text";
    TRY(fsdp_sum_host(ctx, &sum, 1));
    TRY(fsdp_broadcast_host(ctx, text, sizeof text, 0));
    TRY(fsdp_model_add_unit(model, "unit", NULL, &unit));
    TRY(fsdp_unit_add_param(unit, "weight", 2, (uint64_t[]){3, 5}, NULL, &param));
    TRY(fsdp_adamw_create(model, NULL, &opt));
    TRY(fsdp_model_seal(model));
    TRY(fsdp_model_fill(model, ones, NULL, FSDP_DTYPE_FP32));
    TRY(fsdp_pass_begin(model, &pass, s));
    TRY(fsdp_forward_begin(unit, s, &view));
    TRY(fsdp_forward_end(unit, s));
    TRY(fsdp_backward_begin(unit, s, &view));
    TRY(fsdp_backward_end(unit, s));
    TRY(fsdp_pass_end(model, s));
    TRY(fsdp_adamw_step(opt, &update, s));
    TRY(fsdp_step_report_get(model, 1, timeout_ns, &report));
    TRY(fsdp_param_get(param, FSDP_VALUE_MOMENT_1, values, FSDP_DTYPE_FP32));
    TRY(fsdp_model_hash(model, &hash));
    TRY(fsdp_barrier_host(ctx));
}

#define MUST_DIFFER(call)                                                                                 \
    do {                                                                                                  \
        paint_stack(r->all->paint);                                                                       \
        if ((call) != FSDP_ERR_MISMATCH) snprintf(r->error, sizeof r->error, "%s is no MISMATCH", #call); \
    } while (0)

/* What tells who made which call, and which models differ. */
static void differ(rank *r, fsdp_context *ctx, fsdp_model *model)
{
    fsdp_unit *unit;
    double sum = 1.0;
    MUST_DIFFER(r->number == 0 ? fsdp_sum_host(ctx, &sum, 1) : fsdp_barrier_host(ctx));
    TRY(fsdp_model_add_unit(model, "unit", NULL, &unit));
    TRY(fsdp_unit_add_param(unit, "weight", 2, (uint64_t[]){3, 5 + r->number}, NULL, NULL));
    MUST_DIFFER(fsdp_model_seal(model));
}

static void open_and_train(rank *r)
{
    fsdp_launch launch = FSDP_LAUNCH_INIT;
    launch.rank = launch.local_rank = r->number;
    launch.world = launch.local_world = RANKS;
    fsdp_side_channel side = FSDP_SIDE_CHANNEL_INIT;
    side.arg = r;
    side.all_gather = gather;
    fsdp_host_config host = FSDP_HOST_CONFIG_INIT;
    host.launch = &launch;
    host.side = &side;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend_config = &host;
    config.debug = FSDP_DEBUG_ORDER; /* each collective is compared by the side channel */
    config.host = (fsdp_host_allocator){painted_alloc, painted_free, r->all, NULL};
    fsdp_context *ctx = NULL;
    fsdp_stream *s = NULL;
    fsdp_model *model = NULL;
    TRY(fsdp_context_create(&config, &ctx));
    TRY(fsdp_stream_create(ctx, "compute", &s));
    TRY(fsdp_model_create(ctx, NULL, &model));
    if (r->all->differ) differ(r, ctx, model);
    else train(r, ctx, s, model);
    TRY(fsdp_model_destroy(model));
    TRY(fsdp_stream_release(s));
    TRY(fsdp_context_destroy(ctx));
}

static void *rank_main(void *arg)
{
    open_and_train(arg);
    return NULL;
}

static void run(talk *t, unsigned char paint)
{
    rank ranks[RANKS];
    t->paint = paint;
    t->n_said = 0;
    pthread_barrier_init(&t->meet, NULL, RANKS);
    for (uint32_t k = 0; k < RANKS; k++) {
        ranks[k] = (rank){.all = t, .number = k};
        assert_int_equal(pthread_create(&ranks[k].thread, NULL, rank_main, &ranks[k]), 0);
    }
    for (uint32_t k = 0; k < RANKS; k++) pthread_join(ranks[k].thread, NULL);
    pthread_barrier_destroy(&t->meet);
    for (uint32_t k = 0; k < RANKS; k++)
        if (ranks[k].error[0] != '\0') fail_msg("%s", ranks[k].error);
    assert_in_range(t->n_said, 100, MOST - 1);
}

/* Two bytes in a row: one alone can be what an inode has there. */
static void check(bool different)
{
    static talk a, b;
    alarm(120);
    a.differ = b.differ = different;
    run(&a, PAINT_A);
    run(&b, PAINT_B);
    assert_int_equal(a.n_said, b.n_said);
    for (size_t i = 1; i < a.n_said; i++) {
        const bool paint_before = a.said[i - 1] == PAINT_A && b.said[i - 1] == PAINT_B;
        if (paint_before && a.said[i] == PAINT_A && b.said[i] == PAINT_B)
            fail_msg("bytes %zu and %zu of the %zu that rank 0 said were never written", i - 1, i, a.n_said);
    }
}

static void what_ranks_tell_each_other_was_written(void **unused)
{
    (void)unused;
    check(false);
}

static void so_was_what_they_tell_where_they_differ(void **unused)
{
    (void)unused;
    check(true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_ranks_tell_each_other_was_written),
        cmocka_unit_test(so_was_what_they_tell_where_they_differ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
