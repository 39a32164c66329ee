/* SPDX-License-Identifier: MIT */
/* How long a step takes, in virtual time and to the nanosecond, against formulas that know nothing of the library; and which
 * waits of compute are exposed. */
#include "journey.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "context.h"
#include "sharding/model.h"
#include "xorshift.h"

enum { LATENCY = 1000 }; /* of the link; behind it a byte is a nanosecond */

static uint64_t max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }
static uint64_t over(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

static uint64_t wire_ns(const journey *j, uint64_t shard_elems, uint64_t elem_bytes)
{
    return j->sim.world == 1 ? 0 : LATENCY + (j->sim.world - 1) * shard_elems * elem_bytes;
}

static uint64_t gather_ns(const journey *j, uint32_t i)
{
    return wire_ns(j, j->shard_elems[i], fsdp_dtype_bytes(j->unit_config.compute_dtype));
}

static uint64_t reduce_ns(const journey *j, uint32_t i) { return wire_ns(j, j->shard_elems[i], sizeof(float)); }

/* ---- Formulas, from the first begin to update_begin's wait ---- */

/* Depth 0: nothing overlaps but what the turn keeps; the reduction stands on the wire before the next gather. */
static uint64_t formula_depth_0(const journey *j)
{
    uint32_t last = j->n_blocks - 1;
    uint64_t t = 0;
    for (uint32_t i = 0; i <= last; i++) t += gather_ns(j, i) + j->block[i].forward_ns;
    t += j->block[last].backward_ns;
    for (uint32_t l = last; l-- > 0;) t += reduce_ns(j, l + 1) + gather_ns(j, l) + j->block[l].backward_ns;
    return t + reduce_ns(j, 0);
}

/* Depth 1, two blocks or more: docs/streams.md, "Time". */
static uint64_t formula_depth_1(const journey *j)
{
    uint32_t n = j->n_blocks;
    uint64_t t = gather_ns(j, 0);
    for (uint32_t i = 0; i + 2 <= n; i++) t += max_u64(j->block[i].forward_ns, gather_ns(j, i + 1));
    t += j->block[n - 1].forward_ns + j->block[n - 1].backward_ns;
    for (uint32_t l = n - 2; l >= 1; l--)
        t += max_u64(j->block[l].backward_ns, reduce_ns(j, l + 1) + gather_ns(j, l - 1));
    return t + max_u64(j->block[0].backward_ns, reduce_ns(j, 1)) + reduce_ns(j, 0);
}

/* Any depth: one wire and one compute stream, event by event. A block lies where full[] and grad[] say. */
typedef struct range {
    uint64_t begin, bytes;
} range;

typedef struct machine {
    const journey *j;
    range full[JOURNEY_BLOCKS], grad[JOURNEY_BLOCKS];
    bool gathered[JOURNEY_BLOCKS];
    uint64_t ready[JOURNEY_BLOCKS];         /* when its gather ends */
    uint64_t given[JOURNEY_BLOCKS];         /* when compute is done with the buffer it gave back */
    uint64_t reduced[JOURNEY_BLOCKS];       /* when its gradient buffer is free */
    uint64_t compute, gather, reduce, wire; /* when each is idle */
} machine;

static bool overlap(range a, range b) { return a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes; }

static void machine_gather(machine *m, uint32_t unit)
{
    if (m->gathered[unit]) return;
    for (uint32_t i = 0; i < m->j->n_blocks; i++)
        if (overlap(m->full[unit], m->full[i])) m->gather = max_u64(m->gather, m->given[i]);
    m->ready[unit] = m->gather = m->wire = max_u64(m->gather, m->wire) + gather_ns(m->j, unit);
    m->gathered[unit] = true;
}

static void machine_visit(machine *m, uint32_t position)
{
    uint32_t n = m->j->n_blocks, depth = m->j->model_config.depth;
    bool backward = position >= n;
    uint32_t unit = backward ? 2 * n - 1 - position : position;
    machine_gather(m, unit);
    for (uint32_t p = position + 1; p <= position + depth && p < 2 * n; p++)
        machine_gather(m, p < n ? p : 2 * n - 1 - p);
    m->compute = max_u64(m->compute, m->ready[unit]);
    for (uint32_t i = 0; backward && i < n; i++)
        if (overlap(m->grad[unit], m->grad[i])) m->compute = max_u64(m->compute, m->reduced[i]);
    m->compute += backward ? m->j->block[unit].backward_ns : m->j->block[unit].forward_ns;
    bool keep = !backward && n - 1 - unit <= depth; /* the others between a block's two visits are those behind it */
    if (!keep) {
        m->gathered[unit] = false;
        m->given[unit] = m->compute;
    }
    if (!backward) return;
    m->reduced[unit] = m->reduce = m->wire = max_u64(max_u64(m->reduce, m->compute), m->wire) + reduce_ns(m->j, unit);
}

static uint64_t machine_step(machine *m)
{
    for (uint32_t position = 0; position < 2 * m->j->n_blocks; position++) machine_visit(m, position);
    return max_u64(m->compute, m->reduce);
}

/* Where equal blocks lie: one of depth + 1 buffers, and one of two gradient buffers, in turn. */
static machine equal_blocks(const journey *j)
{
    machine m = {.j = j};
    for (uint32_t i = 0; i < j->n_blocks; i++) {
        m.full[i] = (range){i % (j->model_config.depth + 1), 1};
        m.grad[i] = (range){i % 2, 1};
    }
    return m;
}

/* Where the library put the blocks: of uneven ones, which gather takes whose bytes is the plan's choice. */
static machine planned_blocks(const journey *j)
{
    machine m = {.j = j};
    const fsdp__pass *pass = &j->model->passes[FSDP_PASS_TRAIN];
    for (uint32_t i = 0; i < j->n_blocks; i++) {
        uint32_t mirror = 2 * j->n_blocks - 1 - i;
        assert_int_equal(pass->full_offset[i], pass->full_offset[mirror]);
        m.full[i] = (range){pass->full_offset[i], j->unit[i]->full_bytes};
        m.grad[i] = (range){pass->grad_offset[mirror], j->unit[i]->grad_bytes};
    }
    return m;
}

/* ---- The step ---- */

static void init_step(journey *j, uint32_t n_blocks, uint32_t world, uint32_t depth)
{
    journey_init(j, n_blocks);
    j->own_optimizer = true;
    j->sim.world = world;
    j->sim.link = (fsdp_link){LATENCY, 1000000000};
    j->model_config.depth = depth;
}

/* The first step after seal: nothing is gathered. The journey stays open. */
static uint64_t time_step(journey *j)
{
    journey_open(j);
    uint64_t begin_ns = fsdp_context_now_ns(j->ctx);
    journey_micro_step(j, 0);
    assert_int_equal(fsdp_context_now_ns(j->ctx), begin_ns); /* the host has not waited */
    OK(fsdp_update_begin(j->model, j->s));
    OK(fsdp_stream_drain_host(j->s, UINT64_MAX));
    uint64_t end_ns = fsdp_context_now_ns(j->ctx);
    OK(fsdp_update_end(j->model, j->s));
    return end_ns - begin_ns;
}

/* Compute a block, in percent of the communication that it can hide: its neighbour's gather; reduction and gather. */
static void set_compute(journey *j, uint32_t percent)
{
    uint64_t world = j->sim.world;
    if (world == 1) j->sim.world = 2;
    for (uint32_t i = 0; i < j->n_blocks; i++) {
        j->block[i].forward_ns = gather_ns(j, i) * percent / 100;
        j->block[i].backward_ns = (reduce_ns(j, i) + gather_ns(j, i)) * percent / 100;
    }
    j->sim.world = (uint32_t)world;
}

static uint64_t sum_of_compute(const journey *j)
{
    uint64_t t = 0;
    for (uint32_t i = 0; i < j->n_blocks; i++) t += j->block[i].forward_ns + j->block[i].backward_ns;
    return t;
}

static const uint32_t worlds[] = {1, 2, 8, 64}, blocks[] = {2, 3, 4, 7, 12, 48},
                      percents[] = {0, 10, 60, 100, 101, 300};

#define N_OF(array) (sizeof(array) / sizeof *(array))

/* Every world, number of blocks and share of compute, at one depth. */
static void for_equal_blocks(uint32_t depth, void (*check)(journey *j, uint32_t percent))
{
    for (size_t k = 0; k < N_OF(worlds) * N_OF(blocks) * N_OF(percents) * 2; k++) {
        journey j;
        uint32_t percent = percents[k / 2 % N_OF(percents)];
        init_step(&j, blocks[k / 2 / N_OF(percents) % N_OF(blocks)], worlds[k / 2 / N_OF(percents) / N_OF(blocks)],
                  depth);
        if (k % 2 != 0) j.unit_config.compute_dtype = FSDP_DTYPE_BF16;
        set_compute(&j, percent);
        check(&j, percent);
        journey_close(&j);
    }
}

static void check_depth_0(journey *j, uint32_t percent)
{
    (void)percent;
    assert_int_equal(time_step(j), formula_depth_0(j));
}

static void at_depth_0_only_the_turn_hides_a_gather(void **state)
{
    (void)state;
    for_equal_blocks(0, check_depth_0);
}

static void check_depth_1(journey *j, uint32_t percent)
{
    uint64_t t = time_step(j);
    assert_int_equal(t, formula_depth_1(j));
    /* Compute-bound or balanced: the first gather and the last reduction are exposed, nothing else. */
    if (percent >= 100) assert_int_equal(t, gather_ns(j, 0) + sum_of_compute(j) + reduce_ns(j, 0));
    if (j->sim.world == 1) assert_int_equal(t, sum_of_compute(j));
}

static void at_depth_1_the_step_is_the_closed_formula(void **state)
{
    (void)state;
    for_equal_blocks(1, check_depth_1);
}

static void check_machine(journey *j, uint32_t percent)
{
    (void)percent;
    machine m = equal_blocks(j);
    assert_int_equal(time_step(j), machine_step(&m));
}

static void at_any_depth_the_step_is_one_wire_and_one_compute_stream(void **state)
{
    (void)state;
    for (uint32_t depth = 0; depth <= 5; depth++) for_equal_blocks(depth, check_machine);
}

static void one_block_hides_nothing(void **state)
{
    (void)state;
    for (uint32_t depth = 0; depth <= 2; depth++) {
        journey j;
        init_step(&j, 1, 8, depth);
        j.block[0] = (journey_costs){700, 1300, 0};
        assert_int_equal(time_step(&j), gather_ns(&j, 0) + 700 + 1300 + reduce_ns(&j, 0));
        journey_close(&j);
    }
}

/* ---- Uneven blocks and costs, at random ---- */

static uint64_t next_random(uint64_t *state) { return xorshift_star(state) >> 16; }

static void random_step(journey *j, uint64_t seed, bool uneven_bytes)
{
    uint64_t r = seed * 2 + 1;
    for (int i = 0; i < 8; i++) next_random(&r);
    uint32_t world = worlds[next_random(&r) % N_OF(worlds)], n_blocks = 2 + (uint32_t)(next_random(&r) % 14);
    init_step(j, n_blocks, world, (uint32_t)(next_random(&r) % 4));
    if (next_random(&r) % 2) j->unit_config.compute_dtype = FSDP_DTYPE_BF16;
    uint64_t most_ns = wire_ns(j, 1280, 8) + 1000;
    for (uint32_t i = 0; i < n_blocks; i++) {
        if (uneven_bytes) j->shard_elems[i] = 128 * (1 + next_random(&r) % 20);
        j->block[i].forward_ns = next_random(&r) % most_ns;
        j->block[i].backward_ns = next_random(&r) % (2 * most_ns);
    }
}

/* Each block's gather takes bytes of the one that was closed last, as with equal blocks. */
static bool takes_turns(const machine *m)
{
    uint32_t turn = m->j->model_config.depth + 1;
    for (uint32_t i = 0; i + turn < m->j->n_blocks; i++)
        if (!overlap(m->full[i], m->full[i + turn])) return false;
    return true;
}

static void assert_random_step(uint64_t seed, bool uneven_bytes, uint32_t *n_literal)
{
    journey j;
    random_step(&j, seed, uneven_bytes);
    uint64_t t = time_step(&j);
    machine m = planned_blocks(&j);
    uint64_t expected = machine_step(&m);
    if (t != expected) fail_msg("seed %" PRIu64 ": %" PRIu64 " ns, expected %" PRIu64, seed, t, expected);
    uint32_t depth = j.model_config.depth;
    if (depth <= 1) {
        /* Where a plan leaves a gather bytes that nobody has to leave first, it comes earlier; never later. */
        uint64_t literal = depth == 0 ? formula_depth_0(&j) : formula_depth_1(&j);
        bool turns = takes_turns(&m);
        if (turns ? t != literal : t > literal)
            fail_msg("seed %" PRIu64 ": %" PRIu64 " ns, by the formula %" PRIu64, seed, t, literal);
        *n_literal += turns;
    }
    journey_close(&j);
}

static void uneven_costs_keep_to_the_formulas(void **state)
{
    (void)state;
    uint32_t n_literal = 0;
    for (uint64_t seed = 1; seed <= 400; seed++) assert_random_step(seed, false, &n_literal);
    assert_in_range(n_literal, 100, 400); /* equal bytes: all of depth 0 and 1 */
}

static void uneven_blocks_keep_to_the_formulas(void **state)
{
    (void)state;
    uint32_t n_literal = 0;
    for (uint64_t seed = 1; seed <= 600; seed++) assert_random_step(seed, true, &n_literal);
    assert_in_range(n_literal, 50, 600);
}

/* ---- What is exposed in warm steps, with a held unit and two micro-steps ---- */

typedef struct exposed {
    char what[32]; /* "h2.ready" */
    uint64_t ns;
} exposed;

enum { MAX_EXPOSED = 16 };

/* The waits of s among records begin … end that took time. */
static uint32_t list_exposed(const journey *j, uint64_t begin, uint64_t end, exposed *list)
{
    uint32_t n = 0;
    for (uint64_t i = begin; i < end; i++) {
        const fsdp_trace_record *r = fsdp_trace_at(j->trace, i);
        if (r->kind != FSDP_RECORD_WAIT || r->stream != j->s->slot || r->end_ns == r->start_ns) continue;
        assert_in_range(n, 0, MAX_EXPOSED - 1);
        list[n].ns = r->end_ns - r->start_ns;
        snprintf(list[n++].what, sizeof list[0].what, "%s.%s", r->label, fsdp_mark_name(r->mark));
    }
    return n;
}

static void expect(exposed *list, uint32_t *n, const char *what, uint64_t ns)
{
    if (ns == 0) return;
    snprintf(list[*n].what, sizeof list[0].what, "%s", what);
    list[(*n)++].ns = ns;
}

static void assert_exposed(const exposed *have, uint32_t n_have, const exposed *want, uint32_t n_want)
{
    for (uint32_t i = 0; i < n_have && i < n_want; i++) {
        assert_string_equal(have[i].what, want[i].what);
        assert_int_equal(have[i].ns, want[i].ns);
    }
    assert_int_equal(n_have, n_want);
}

/* docs/streams.md, "Time": begin, border of micro-steps, end; blocks' compute covers everything else. `rest_ns`: what the
 * optimizer still runs when H is updated. */
static uint32_t expect_step(const journey *j, uint64_t rest_ns, exposed *list)
{
    uint32_t n = 0;
    uint64_t gather_h = wire_ns(j, j->held_shard_elems, sizeof(float)), reduce_h = gather_h;
    uint64_t embed_f = j->embed.forward_ns, embed_b = j->embed.backward_ns;
    uint64_t first = max_u64(gather_h, rest_ns > 0 ? j->block[0].update_ns : 0); /* AG(h0) starts then */
    expect(list, &n, "H.ready", over(gather_h, rest_ns));
    expect(list, &n, "h0.ready", over(first + gather_ns(j, 0), max_u64(rest_ns, gather_h) + embed_f));
    if (j->model_config.accumulation == FSDP_ACCUMULATE_REDUCE_EACH)
        expect(list, &n, "h2.ready",
               over(max_u64(reduce_ns(j, 0), embed_b) + reduce_h + gather_ns(j, 2),
                    embed_b + embed_f + j->block[0].forward_ns + j->block[1].forward_ns));
    expect(list, &n, "H.reduced", max_u64(reduce_ns(j, 0), embed_b) + reduce_h - embed_b);
    return n;
}

/* Compute of embedding and optimizer, and the size of H: from nothing to more than enough. */
typedef struct setting {
    uint64_t embed_f, embed_b, update_ns, held_shard_elems;
} setting;

static const setting settings[] = {
    {0, 0, 0, 1024},           {0, 0, 3000, 1024},        {1000, 2000, 2000, 8192},  {1000, 2000, 9000, 8192},
    {1000, 9000, 30000, 8192}, {9000, 500, 30000, 16384}, {1000, 2000, 100, 131072}, {20000, 60000, 60000, 131072},
};

static void init_exposed(journey *j, uint32_t n_blocks, const setting *s, fsdp_accumulation accumulation)
{
    init_step(j, n_blocks, 2, 1);
    j->held = true;
    j->n_micro = 2;
    j->model_config.accumulation = accumulation;
    j->held_shard_elems = s->held_shard_elems;
    j->embed = (journey_costs){s->embed_f, s->embed_b, s->update_ns * 2};
    j->head = (journey_costs){4000, 8000, 0};
    for (uint32_t i = 0; i < n_blocks; i++) j->block[i] = (journey_costs){7000, 15000, s->update_ns + i};
}

static void assert_three_steps(journey *j)
{
    exposed have[MAX_EXPOSED], want[MAX_EXPOSED];
    uint64_t at[4] = {0}, rest_ns = 0, sum = 0;
    fsdp_trace_summary summary = FSDP_TRACE_SUMMARY_INIT;
    for (uint32_t i = 0; i < j->n_blocks; i++) rest_ns += j->block[i].update_ns;
    journey_open(j);
    journey_tape_start(j);
    for (int step = 0; step < 3; step++) {
        journey_step(j);
        at[step + 1] = fsdp_trace_count(j->trace);
    }
    journey_tape_stop(j);
    for (int step = 0; step < 3; step++) { /* nothing runs beside the first step's gathers */
        uint32_t n_have = list_exposed(j, at[step], at[step + 1], have);
        assert_exposed(have, n_have, want, expect_step(j, step > 0 ? rest_ns : 0, want));
        for (uint32_t i = 0; i < n_have; i++) sum += have[i].ns;
    }
    OK(fsdp_trace_summarize(j->trace, j->s, &summary));
    assert_int_equal(summary.exposed_ns, sum);
    assert_int_equal(summary.exposed_gather_ns + summary.exposed_reduce_ns, sum);
    journey_close(j);
}

static void with_a_held_unit_begin_border_and_end_are_exposed_and_nothing_else(void **state)
{
    (void)state;
    for (size_t k = 0; k < N_OF(settings) * 2; k++) {
        for (uint32_t n_blocks = 3; n_blocks <= 7; n_blocks += 2) {
            journey j;
            init_exposed(&j, n_blocks, &settings[k / 2],
                         k % 2 ? FSDP_ACCUMULATE_REDUCE_EACH : FSDP_ACCUMULATE_KEEP_FULL);
            assert_three_steps(&j);
        }
    }
}

/* ---- The same with AdamW, whose kernels take time ---- */

static const fsdp_trace_record *find_operation(const journey *j, uint64_t from, fsdp_operation operation,
                                               const char *label)
{
    for (uint64_t i = from; i < fsdp_trace_count(j->trace); i++) {
        const fsdp_trace_record *r = fsdp_trace_at(j->trace, i);
        if (r->kind == FSDP_RECORD_OPERATION && r->operation == operation && strcmp(r->label, label) == 0) return r;
    }
    fail_msg("no %s of %s from record %" PRIu64 " on", fsdp_operation_name(operation), label, from);
    return NULL;
}

/* How long s stands in its next wait for label's mark. */
static uint64_t stands_ns(const journey *j, uint64_t from, const char *label, fsdp_mark mark)
{
    for (uint64_t i = from; i < fsdp_trace_count(j->trace); i++) {
        const fsdp_trace_record *r = fsdp_trace_at(j->trace, i);
        if (r->kind == FSDP_RECORD_WAIT && r->stream == j->s->slot && r->mark == mark && strcmp(r->label, label) == 0)
            return r->end_ns - r->start_ns;
    }
    fail_msg("no wait for %s.%s from record %" PRIu64 " on", label, fsdp_mark_name(mark), from);
    return 0;
}

/* The update among records update … next, the step from next on. H's gather follows H's AdamW while the others run, h0's
 * follows H's; s stands for what they last longer. Returns by how much H's does. */
static uint64_t assert_begin_hides(const journey *j, uint64_t update, uint64_t next)
{
    const fsdp_trace_record *adamw_h = find_operation(j, update, FSDP_OPERATION_ADAMW, "H");
    const fsdp_trace_record *adamw_h0 = find_operation(j, update, FSDP_OPERATION_ADAMW, "h0");
    const fsdp_trace_record *adamw_h2 = find_operation(j, update, FSDP_OPERATION_ADAMW, "h2");
    uint64_t gathers = update;
    while (fsdp_trace_at(j->trace, gathers) != adamw_h2) gathers++;
    assert_true(gathers < next);
    const fsdp_trace_record *gather_h = find_operation(j, gathers, FSDP_OPERATION_ALL_GATHER, "H");
    const fsdp_trace_record *gather_h0 = find_operation(j, gathers, FSDP_OPERATION_ALL_GATHER, "h0");
    assert_int_equal(gather_h->start_ns, adamw_h->end_ns);
    assert_true(gather_h->start_ns < adamw_h2->start_ns);
    assert_int_equal(gather_h0->start_ns, max_u64(gather_h->end_ns, adamw_h0->end_ns));
    uint64_t embed_end = max_u64(gather_h->end_ns, adamw_h2->end_ns) + j->embed.forward_ns;
    assert_int_equal(stands_ns(j, next, "H", FSDP_MARK_READY), over(gather_h->end_ns, adamw_h2->end_ns));
    assert_int_equal(stands_ns(j, next, "h0", FSDP_MARK_READY), over(gather_h0->end_ns, embed_end));
    return over(gather_h->end_ns, adamw_h2->end_ns);
}

/* Every step sees the norm: once the last gradients, H's, are there, s stands for their squares, and until the sums of all
 * ranks are there and judged. The squares of the other units are done by then, behind their own reductions. */
static void assert_norm_is_exposed(const journey *j, uint64_t update)
{
    const fsdp_trace_record *sum = find_operation(j, update, FSDP_OPERATION_ALL_REDUCE, "norm");
    const fsdp_trace_record *result = find_operation(j, update, FSDP_OPERATION_STEP_RESULT, "norm");
    const fsdp_trace_record *squares = find_operation(j, update, FSDP_OPERATION_SQUARE_SUM, "H");
    const fsdp_trace_record *input = find_operation(j, update, FSDP_OPERATION_STEP_INPUT, "norm");
    uint64_t bytes = FSDP_STEP_FLOATS * sizeof(float);
    assert_int_equal(sum->end_ns - sum->start_ns, LATENCY + 2 * bytes * (j->sim.world - 1) / j->sim.world);
    assert_int_equal(input->start_ns, squares->end_ns);
    assert_int_equal(sum->start_ns, input->end_ns);
    assert_int_equal(result->start_ns, sum->end_ns);
    assert_int_equal(stands_ns(j, update, "norm", FSDP_MARK_NORM_SUM), result->end_ns - squares->start_ns);
    assert_true(find_operation(j, update, FSDP_OPERATION_SQUARE_SUM, "h0")->end_ns < squares->start_ns);
}

/* bytes_per_second: of kernels. */
static void assert_adamw_hides(uint64_t bytes_per_second, bool whole)
{
    journey j;
    uint64_t update[3], next[3];
    init_exposed(&j, 3, &settings[2], FSDP_ACCUMULATE_REDUCE_EACH);
    j.own_optimizer = false;
    j.sim.kernel_bytes_per_second = bytes_per_second;
    journey_open(&j);
    journey_tape_start(&j);
    for (int step = 0; step < 3; step++) {
        for (uint32_t i = 0; i < j.n_micro; i++) journey_micro_step(&j, i);
        update[step] = fsdp_trace_count(j.trace);
        journey_update(&j);
        next[step] = fsdp_trace_count(j.trace);
    }
    journey_tape_stop(&j);
    for (int step = 0; step < 3; step++) assert_norm_is_exposed(&j, update[step]);
    for (int step = 0; step < 2; step++) assert_int_equal(assert_begin_hides(&j, update[step], next[step]) == 0, whole);
    journey_close(&j);
}

static void the_next_steps_first_gathers_hide_behind_adamw(void **state)
{
    (void)state;
    assert_adamw_hides(1000000000, true); /* a byte a nanosecond: AdamW of a block takes 29 µs, the gather of H 34 */
    assert_adamw_hides(50000000000, false);
}

int main(void)
{
    alarm(60);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(at_depth_0_only_the_turn_hides_a_gather),
        cmocka_unit_test(at_depth_1_the_step_is_the_closed_formula),
        cmocka_unit_test(at_any_depth_the_step_is_one_wire_and_one_compute_stream),
        cmocka_unit_test(one_block_hides_nothing),
        cmocka_unit_test(uneven_costs_keep_to_the_formulas),
        cmocka_unit_test(uneven_blocks_keep_to_the_formulas),
        cmocka_unit_test(with_a_held_unit_begin_border_and_end_are_exposed_and_nothing_else),
        cmocka_unit_test(the_next_steps_first_gathers_hide_behind_adamw),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
