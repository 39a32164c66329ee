/* SPDX-License-Identifier: MIT */
/* Hand-overs around collectives, in a world of two, and around a model's gathers. */
#include <string.h>

#include "race_rig.h"

enum { A, COMM, N = 384, PARAM = 512, UNITS = 3 };

/* Rank 0's numbers are the pattern, the others' are zeros, so that sums over ranks are the pattern again. */
static uint8_t write_addend(race_rig *r, race_block *block, int stream)
{
    uint8_t byte = (uint8_t)(race_next_byte(r) % 127);
    if (byte == 0) byte = 1; /* a float of four such bytes is finite and normal */
    if (!r->stopped) RACE_TRY(r, fsdp_stream_fill(r->s[stream], block->ptr, r->rank == 0 ? byte : 0, block->bytes));
    return byte;
}

typedef enum where { OUT_OF_PLACE, IN_PLACE, ON_THE_LANE } where;

/* pytorch#180889: g is in an all-reduce on the lane when it is freed, and what is taken next, for a reduce-scatter, is g's
 * bytes: taken on compute, or (ON_THE_LANE) on the stream of the collectives itself. */
static void reduce_with_freed_buffer(race_rig *r, where how)
{
    fsdp_comm *comm = fsdp_context_comm(r->ctx);
    fsdp_work *work = NULL;
    int taker = how == ON_THE_LANE ? COMM : A;
    race_block *sum = race_take(r, N * 4, A), *out = race_take(r, 4 * KIB - 2 * N * 4, A);
    race_block *g = race_take(r, N * 4, A);
    if (r->stopped) return;
    uint8_t p = write_addend(r, g, A);
    race_order(r, COMM, A);
    race_record_stream(r, g, COMM);
    race_record_stream(r, sum, COMM);
    RACE_TRY(r,
             fsdp_all_reduce(comm, g->ptr, how == IN_PLACE ? g->ptr : sum->ptr, N, FSDP_DTYPE_FP32, r->s[COMM], &work));
    race_give(r, g);

    race_block *h = race_take(r, N * 4, taker);
    if (r->stopped) return;
    uint8_t q = write_addend(r, h, taker);
    if (taker != COMM) race_order(r, COMM, taker);
    race_record_stream(r, h, COMM);
    race_record_stream(r, out, COMM);
    RACE_TRY(r, fsdp_reduce_scatter(comm, h->ptr, out->ptr, N / 2, FSDP_DTYPE_FP32, r->s[COMM], NULL));
    race_give(r, h);
    RACE_TRY(r, fsdp_work_wait(work, r->s[A]));
    if (how != IN_PLACE && !r->stopped) race_read_bytes(r, sum->ptr, sum->bytes, p, A);
    race_order(r, A, COMM);
    if (!r->stopped) race_read_bytes(r, out->ptr, N / 2 * 4, q, A);
    race_give(r, sum);
    race_give(r, out);
    fsdp_work_release(work);
}

static void slow_all_reduce_buffer(race_rig *r)
{
    for (int i = 0; i < 3; i++) reduce_with_freed_buffer(r, OUT_OF_PLACE);
}

static void slow_all_reduce_buffer_in_place(race_rig *r)
{
    for (int i = 0; i < 3; i++) reduce_with_freed_buffer(r, IN_PLACE);
}

static void slow_all_reduce_buffer_on_the_lane(race_rig *r)
{
    for (int i = 0; i < 3; i++) reduce_with_freed_buffer(r, ON_THE_LANE);
}

/* ---- A unit that is gathered ahead and never used ---- */

static int fill_zeros(void *arg, const fsdp_param_range *range, void *dst)
{
    (void)arg;
    memset(dst, 0, range->count * sizeof(float));
    return 0;
}

/* Three bf16 units with fp32 masters, so that a gather casts the shard; a pass that reads all three. */
static fsdp_model *open_model(race_rig *r, fsdp_unit **unit, int32_t *pass)
{
    static const char *const names[UNITS] = {"u0", "u1", "u2"};
    const uint64_t dims[] = {PARAM};
    fsdp_model *model = NULL;
    fsdp_visit visits[UNITS];
    fsdp_model_config config = FSDP_MODEL_CONFIG_INIT;
    config.depth = 2;
    RACE_TRY(r, fsdp_model_create(r->ctx, &config, &model));
    for (int u = 0; u < UNITS && !r->stopped; u++) {
        fsdp_unit_config unit_config = FSDP_UNIT_CONFIG_INIT;
        unit_config.compute_dtype = FSDP_DTYPE_BF16;
        RACE_TRY(r, fsdp_model_add_unit(model, names[u], &unit_config, &unit[u]));
        if (!r->stopped) RACE_TRY(r, fsdp_unit_add_param(unit[u], names[u], 1, dims, NULL, NULL));
        visits[u] = (fsdp_visit){unit[u], FSDP_USE_FORWARD, 0};
    }
    RACE_TRY(r, fsdp_model_add_pass(model, "look", UNITS, visits, pass));
    RACE_TRY(r, fsdp_model_seal(model));
    race_restart_tape(r); /* what seal runs, the host orders */
    RACE_TRY(r, fsdp_model_fill(model, fill_zeros, NULL, FSDP_DTYPE_FP32));
    return model;
}

/* An optimizer of one's own: every master becomes the byte, four times: rounded to bf16 it is the byte twice. */
static void update(race_rig *r, fsdp_model *model, fsdp_unit *const *unit, uint8_t byte)
{
    RACE_TRY(r, fsdp_update_begin(model, r->s[A]));
    for (int u = 0; u < UNITS && !r->stopped; u++) {
        const fsdp_shard_segment *segment = NULL;
        uint32_t n = 0;
        RACE_TRY(r, fsdp_unit_shard(unit[u], &segment, &n));
        for (uint32_t i = 0; i < n; i++)
            RACE_TRY(r, fsdp_stream_fill(r->s[A], segment[i].master, byte, segment[i].count * sizeof(float)));
    }
    RACE_TRY(r, fsdp_update_end(model, r->s[A]));
}

/* n_used of the units are read; the others are gathered ahead, and the pass is given up or ended under them. */
static void look(race_rig *r, fsdp_model *model, fsdp_unit *const *unit, int32_t pass, int n_used, uint8_t want)
{
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    args.pass = args.next = pass;
    RACE_TRY(r, fsdp_pass_begin(model, &args, r->s[A]));
    for (int u = 0; u < n_used && !r->stopped; u++) {
        fsdp_view view = FSDP_VIEW_INIT;
        RACE_TRY(r, fsdp_forward_begin(unit[u], r->s[A], &view));
        if (r->stopped) return;
        race_read_bytes(r, view.params[0], RACE_READ_BYTES, want, A);
        race_read_bytes(r, (char *)view.params[0] + PARAM * 2 - RACE_READ_BYTES, RACE_READ_BYTES, want, A);
        RACE_TRY(r, fsdp_forward_end(unit[u], r->s[A]));
    }
    if (n_used == UNITS) RACE_TRY(r, fsdp_pass_end(model, r->s[A]));
    else RACE_TRY(r, fsdp_pass_abort(model, r->s[A]));
}

/* The casts of u1 and u2 may still be reading their shards when the optimizer writes them: nobody waits for their gather
 * but update_begin. The next pass reads what was written, all of it. */
static void unused_prefetched_unit(race_rig *r)
{
    fsdp_unit *unit[UNITS];
    int32_t pass = FSDP_PASS_NONE;
    fsdp_model *model = open_model(r, unit, &pass);
    uint8_t byte = 0;
    uint64_t n_used = 0;
    for (int step = 0; step < 4 && !r->stopped; step++) {
        look(r, model, unit, pass, step % 2 ? UNITS : 1, byte);
        byte = (uint8_t)(1 + (11 * step) % 60);
        update(r, model, unit, byte);
        if (step % 2) look(r, model, unit, pass, 2, byte);
        n_used += step % 2 ? UNITS + 2 : 1;
    }
    fsdp_model_stats stats = FSDP_MODEL_STATS_INIT;
    RACE_TRY(r, fsdp_model_stats_get(model, &stats));
    if (!r->stopped && stats.gathers <= n_used)
        race_say(r, RACE_CALL, "%llu gathers for %llu windows: none was unused", (unsigned long long)stats.gathers,
                 (unsigned long long)n_used);
    RACE_TRY(r, fsdp_trace_stop_host(r->trace));
    race_write_down(r); /* its memory goes */
    RACE_TRY(r, fsdp_model_destroy(model));
}

#define ONE(name)                                                                  \
    {                                                                              \
#name, name, 2, 4 * KIB, 4 * KIB, FSDP_ALLOC_WAIT_FIRST, 2, 0, 0, 0, false \
    }
const race_scenario race_rank_scenarios[] = {
    ONE(slow_all_reduce_buffer),
    ONE(slow_all_reduce_buffer_in_place),
    ONE(slow_all_reduce_buffer_on_the_lane),
    ONE(unused_prefetched_unit),
};
const size_t n_race_rank_scenarios = sizeof race_rank_scenarios / sizeof *race_rank_scenarios;
