/* SPDX-License-Identifier: MIT */
/* The run behind docs/memory.svg: two steps of GPT-2 124M on one simulated rank of eight, activations from an allocator of
 * their own, and a snapshot in the middle of the second backward.
 *
 *     test_memory_picture [FILE.json]    with a file the snapshot stays there
 *
 * The numbers in it are those that the shapes say. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fsdp/fsdp.h"
#include "ok.h"
#include "tools/fsdp_memory_read.h"

enum { LAYERS = 12, WIDTH = 768, VOCABULARY = 50257, CONTEXT = 1024, BATCH = 2, HEADS = 12, STOP = 6, MIB = 1 << 20 };

typedef enum kept { RESIDUAL, QKV, HIDDEN, KINDS } kept;
static const uint64_t width_of[KINDS] = {WIDTH, 3 * WIDTH, 4 * WIDTH};
static const char *const kind_names[KINDS] = {"residual", "qkv", "mlp"};

typedef struct training {
    fsdp_context *ctx;
    fsdp_stream *compute;
    fsdp_model *model;
    fsdp_adamw *opt;
    fsdp_unit *embed, *layer[LAYERS];
    fsdp_allocator *activations;
    char owner[LAYERS][KINDS][24];
    void *block[LAYERS][KINDS], *logits;
    const char *path;
} training;

static char *path_given; /* by main */

static void *take(training *t, uint64_t bytes, const char *owner)
{
    void *ptr = NULL;
    OK(fsdp_allocator_alloc(t->activations, bytes, t->compute, owner, &ptr));
    return ptr;
}

static void give(training *t, void *ptr) { OK(fsdp_allocator_free(t->activations, ptr)); }

static fsdp_unit *add_unit(training *t, const char *name, uint64_t elems, fsdp_reshard reshard)
{
    char weight[32];
    fsdp_unit *unit;
    fsdp_unit_config config = FSDP_UNIT_CONFIG_INIT;
    config.compute_dtype = config.grad_dtype = FSDP_DTYPE_BF16;
    config.reshard = reshard;
    snprintf(weight, sizeof weight, "%s.w", name);
    OK(fsdp_model_add_unit(t->model, name, &config, &unit));
    OK(fsdp_unit_add_param(unit, weight, 1, &elems, NULL, NULL));
    return unit;
}

static void open_training(training *t)
{
    fsdp_sim_config machine = FSDP_SIM_CONFIG_INIT;
    machine.world = 8;
    machine.link = (fsdp_link){20000, 25000000000ull};
    machine.kernel_latency_ns = 5000;
    machine.kernel_bytes_per_second = 1000000000000ull;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = fsdp_sim_backend();
    config.backend_config = &machine;
    OK(fsdp_context_create(&config, &t->ctx));
    OK(fsdp_stream_create(t->ctx, "compute", &t->compute));
    fsdp_model_config model = FSDP_MODEL_CONFIG_INIT;
    model.name = "GPT-2 124M";
    model.depth = 2;
    OK(fsdp_model_create(t->ctx, &model, &t->model));
    t->embed = add_unit(t, "embed", (uint64_t)(VOCABULARY + CONTEXT) * WIDTH, FSDP_RESHARD_NEVER);
    for (int l = 0; l < LAYERS; l++) {
        char name[16];
        snprintf(name, sizeof name, "h.%d", l);
        t->layer[l] = add_unit(t, name, 12ull * WIDTH * WIDTH + 13 * WIDTH, FSDP_RESHARD_AFTER_USE);
        for (int k = 0; k < KINDS; k++) snprintf(t->owner[l][k], sizeof t->owner[l][k], "h.%d %s", l, kind_names[k]);
    }
    fsdp_adamw_config adamw = FSDP_ADAMW_CONFIG_INIT;
    OK(fsdp_adamw_create(t->model, &adamw, &t->opt));
    OK(fsdp_model_seal(t->model));
    fsdp_allocator_config pool = FSDP_ALLOCATOR_CONFIG_INIT;
    pool.name = "activations";
    pool.segment_bytes = 64 * MIB;
    pool.budget_bytes = 1024 * MIB;
    OK(fsdp_allocator_create(t->ctx, &pool, &t->activations));
}

static void close_training(training *t)
{
    for (int l = 0; l < LAYERS; l++)
        for (int k = 0; k < KINDS; k++) give(t, t->block[l][k]);
    give(t, t->logits);
    OK(fsdp_model_destroy(t->model));
    OK(fsdp_allocator_destroy(t->activations));
    OK(fsdp_stream_release(t->compute));
    OK(fsdp_context_destroy(t->ctx));
}

static void forward(training *t, int l)
{
    fsdp_view view = FSDP_VIEW_INIT;
    OK(fsdp_forward_begin(t->layer[l], t->compute, &view));
    for (int k = 0; k < KINDS; k++) t->block[l][k] = take(t, width_of[k] * BATCH * CONTEXT * 2, t->owner[l][k]);
    void *scores = take(t, 2ull * BATCH * HEADS * CONTEXT * CONTEXT, "attention scores");
    OK(fsdp_stream_delay(t->compute, 2000000));
    give(t, scores);
    OK(fsdp_forward_end(t->layer[l], t->compute));
}

/* The residual is sent to the host by the copy lane, too, which may still read it when it is freed. */
static void backward(training *t, int l, bool snapshot)
{
    fsdp_view view = FSDP_VIEW_INIT;
    fsdp_stream *copy = fsdp_context_lane(t->ctx, FSDP_LANE_COPY);
    OK(fsdp_backward_begin(t->layer[l], t->compute, &view));
    void *scores = take(t, 2ull * BATCH * HEADS * CONTEXT * CONTEXT, "attention scores");
    OK(fsdp_allocator_record_stream(t->activations, t->block[l][RESIDUAL], copy));
    OK(fsdp_stream_delay(copy, 1000000));
    OK(fsdp_stream_delay(t->compute, 4000000));
    if (snapshot) OK(fsdp_memory_write_json(t->ctx, t->path));
    give(t, scores);
    for (int k = 0; k < KINDS; k++) {
        give(t, t->block[l][k]);
        t->block[l][k] = NULL;
    }
    OK(fsdp_backward_end(t->layer[l], t->compute));
}

static void step(training *t, bool last)
{
    fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    fsdp_view view = FSDP_VIEW_INIT;
    OK(fsdp_pass_begin(t->model, &pass, t->compute));
    OK(fsdp_forward_begin(t->embed, t->compute, &view));
    for (int l = 0; l < LAYERS; l++) forward(t, l);
    void *probe = NULL; /* somebody tries a larger batch */
    fsdp_status status = fsdp_allocator_alloc(t->activations, 768ull * MIB, t->compute, "logits, 8 rows", &probe);
    assert_int_equal(status, FSDP_ERR_NO_MEMORY);
    t->logits = take(t, 2ull * BATCH * CONTEXT * VOCABULARY, "logits");
    OK(fsdp_stream_delay(t->compute, 3000000));
    OK(fsdp_forward_end(t->embed, t->compute));
    OK(fsdp_backward_begin(t->embed, t->compute, &view));
    give(t, t->logits);
    t->logits = NULL;
    for (int l = LAYERS - 1; l >= 0; l--) {
        backward(t, l, last && l == STOP);
        if (last && l == STOP) { /* seen what there is to see */
            OK(fsdp_pass_abort(t->model, t->compute));
            return;
        }
    }
    OK(fsdp_backward_end(t->embed, t->compute));
    OK(fsdp_pass_end(t->model, t->compute));
    OK(fsdp_stream_wait_stream(t->compute, fsdp_context_lane(t->ctx, FSDP_LANE_COPY)));
    fsdp_adamw_args update = FSDP_ADAMW_ARGS_INIT;
    OK(fsdp_adamw_step(t->opt, &update, t->compute));
}

/* Live bytes of an owner in a pool. */
static uint64_t held_by(const fsdp__snapshot_pool *pool, const char *owner)
{
    uint64_t bytes = 0;
    for (size_t s = 0; s < pool->n_segments; s++)
        for (size_t i = 0; i < pool->segments[s].n_pieces; i++) {
            const fsdp__snapshot_piece *p = &pool->segments[s].pieces[i];
            if (p->kind == FSDP__PIECE_LIVE && strcmp(p->owner, owner) == 0) bytes += p->bytes;
        }
    return bytes;
}

static void a_snapshot_in_the_middle_of_backward_says_who_holds_what(void **state)
{
    (void)state;
    char made[] = "/tmp/fsdp_picture_XXXXXX", error[512];
    training t = {.path = path_given};
    if (t.path == NULL) {
        int file = mkstemp(made);
        assert_true(file >= 0);
        close(file);
        t.path = made;
    }
    open_training(&t);
    step(&t, false);
    step(&t, true);
    fsdp__snapshot s;
    if (!fsdp__snapshot_read(t.path, &s, error, sizeof error)) fail_msg("%s", error);
    if (t.path == made) unlink(made);
    assert_int_equal(s.n_pools, 3);
    const fsdp__snapshot_pool *gather = &s.pools[0], *grad = &s.pools[1], *activations = &s.pools[2];
    const uint64_t row = 2ull * BATCH * CONTEXT * WIDTH, layer = 2 * (12ull * WIDTH * WIDTH + 13 * WIDTH);
    /* Held, open, and two ahead: h.6, h.5 and h.4. */
    assert_true(held_by(gather, "embed") >= 2ull * (VOCABULARY + CONTEXT) * WIDTH);
    for (int l = 0; l < LAYERS; l++) {
        char name[16];
        snprintf(name, sizeof name, "h.%d", l);
        uint64_t bytes = held_by(gather, name);
        if (l <= STOP && l >= STOP - 2) assert_true(bytes >= layer && bytes < layer + 8 * 256);
        else assert_int_equal(bytes, 0);
        assert_int_equal(held_by(activations, t.owner[l][QKV]), l <= STOP ? 3 * row : 0);
    }
    assert_true(held_by(grad, "h.6") >= layer);
    assert_int_equal(held_by(activations, "attention scores"), 2ull * BATCH * HEADS * CONTEXT * CONTEXT);
    /* The copy lane's, of h.11 to h.7: compute has not waited for it since the first step's end. */
    assert_int_equal(activations->active - activations->allocated, 5 * row);
    size_t n_refused = 0;
    for (size_t i = 0; i < activations->n_events; i++)
        if (activations->events[i].kind == FSDP__EVENT_OUT_OF_MEMORY) n_refused++;
    assert_int_equal(n_refused, 2);
    fsdp__snapshot_free(&s);
    close_training(&t);
}

int main(int argc, char **argv)
{
    alarm(60);
    path_given = argc > 1 ? argv[1] : NULL;
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_snapshot_in_the_middle_of_backward_says_who_holds_what)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
