/* SPDX-License-Identifier: MIT */
/* Ranks that differ on a wire that does not see it (NCCL compares nothing: two collectives of a size, swapped, exchange each
 * other's bytes). The order of each rank's calls rides in the step's sum, so that every rank hears of it at the end of that
 * step, and no step that differs changes anything. The wire is the host backend's, which is shown neither names nor passes. */
#include "order_team.h"

enum { STEPS = 3, MAX_GROUP = 16, SHARD = 512 };

/* How the odd rank's third step differs. */
typedef struct oddity {
    uint32_t rank, world;
    bool swap;  /* two units of a size swapped in an evaluation, else one in place of the other */
    bool polls; /* found by the hooks of the next step, else by the report */
    bool reduce_comm;
} oddity;

static fsdp_status silent_enqueue(void *comm, void *stream, const fsdp_collective *list, uint32_t n)
{
    fsdp_collective shown[MAX_GROUP];
    for (uint32_t i = 0; i < n; i++) {
        shown[i] = list[i];
        shown[i].label = "call";
        shown[i].pass = NULL;
    }
    return fsdp_host_backend()->comm->enqueue(comm, stream, shown, n);
}

static const fsdp_backend *silent_backend(void)
{
    static fsdp_comm_ops comm;
    static fsdp_backend backend;
    backend = *fsdp_host_backend();
    comm = *backend.comm, comm.enqueue = silent_enqueue;
    backend.comm = &comm;
    return &backend;
}

static fsdp_status pass(member *m, int32_t which, const uint32_t *order, uint32_t n)
{
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    args.pass = which;
    args.next = FSDP_PASS_NONE; /* nothing is gathered ahead of an order that the plan does not know */
    fsdp_status status = fsdp_pass_begin(m->model, &args, m->s);
    for (uint32_t i = 0; status == FSDP_OK && i < n; i++) status = visit(m, order[i], i >= UNITS);
    return status == FSDP_OK ? fsdp_pass_end(m->model, m->s) : status;
}

static fsdp_status step(member *m, bool odd)
{
    static const uint32_t train[] = {0, 1, 2, 2, 1, 0}, plain[] = {0, 1, 2}, swapped[] = {0, 2, 1}, other[] = {0, 2, 2};
    const oddity *o = m->arg;
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    fsdp_status status = pass(m, FSDP_PASS_EVAL, !odd ? plain : o->swap ? swapped : other, UNITS);
    if (status == FSDP_OK) status = pass(m, FSDP_PASS_TRAIN, train, 2 * UNITS);
    return status == FSDP_OK ? fsdp_adamw_step(m->opt, &args, m->s) : status;
}

/* This rank's masters, which are host memory. */
static void copy_masters(member *m, float *to)
{
    memset(to, 0, UNITS * SHARD * sizeof *to);
    EXPECT_OK(fsdp_stream_drain_host(m->s, 20 * second_ns));
    for (int i = 0; i < UNITS; i++) {
        const fsdp_shard_segment *segment;
        uint32_t n;
        EXPECT_OK(fsdp_unit_shard(m->unit[i], &segment, &n));
        EXPECT(n <= 1 && (n == 0 || segment->count <= SHARD));
        if (n == 1) memcpy(to + i * SHARD, segment->master, segment->count * sizeof *to);
    }
}

static void good_steps(member *m)
{
    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    for (uint64_t i = 1; i < STEPS; i++) {
        EXPECT_OK(step(m, false));
        EXPECT_OK(fsdp_step_report_get(m->model, i, 20 * second_ns, &report));
        EXPECT(report.step == i && report.updates == i && !report.skipped);
    }
}

static void one_is_odd(member *m)
{
    const oddity *o = m->arg;
    float before[UNITS * SHARD], after[UNITS * SHARD];
    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    const fsdp_shard_segment *segment[UNITS];
    uint32_t n[UNITS];
    open_all(m);
    good_steps(m);
    copy_masters(m, before);
    for (int i = 0; i < UNITS; i++) EXPECT_OK(fsdp_unit_shard(m->unit[i], &segment[i], &n[i]));
    pthread_barrier_wait(m->meet);
    fsdp_status status = step(m, m->number == o->rank);
    if (status == FSDP_OK && o->polls) {
        status = fsdp_stream_drain_host(m->s, 20 * second_ns);
        if (status == FSDP_OK) status = step(m, false);
    } else if (status == FSDP_OK) {
        status = fsdp_step_report_get(m->model, STEPS, 20 * second_ns, &report);
    }
    keep(m, status);
    pthread_barrier_wait(m->meet);
    memset(after, 0, sizeof after);
    for (int i = 0; i < UNITS; i++)
        if (n[i] == 1) memcpy(after + i * SHARD, segment[i]->master, segment[i]->count * sizeof *after);
    EXPECT(memcmp(before, after, sizeof after) == 0);
    is_dead_with_one_sentence(m);
    close_all(m);
}

static const oddity oddities[] = {
    {.rank = 2, .world = 4, .swap = true},
    {.rank = 0, .world = 4, .swap = false},
    {.rank = 1, .world = 2, .swap = true, .polls = true},
    {.rank = 2, .world = 3, .swap = false, .polls = true, .reduce_comm = true},
    {.rank = 0, .world = 2, .swap = true, .reduce_comm = true},
};

static void a_difference_that_the_wire_does_not_see_ends_that_step_on_every_rank(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof oddities / sizeof *oddities; i++) {
        const oddity *o = &oddities[i];
        member *team = team_new(o->world, one_is_odd, o);
        for (uint32_t r = 0; r < o->world; r++)
            team[r].backend = silent_backend(), team[r].reduce_comm = o->reduce_comm, team[r].depth = 0;
        team_run(team);
        for (uint32_t r = 0; r < o->world; r++) {
            char odd[64];
            assert_int_equal(team[r].status, FSDP_ERR_MISMATCH);
            has(&team[r], "step 3 of model");
            has(&team[r], "ranks have enqueued different collectives before its sum, and it changed nothing. "
                          "First difference: ");
            has(&team[r], " all-gather of h.1 in EVAL (");
            snprintf(odd, sizeof odd, "rank %u: #", o->rank);
            has(&team[r], odd);
            has(&team[r], " all-gather of h.2 in EVAL (");
        }
        team_free(team);
    }
}

static void all_agree(member *m)
{
    open_all(m);
    good_steps(m);
    EXPECT_OK(fsdp_barrier_host(m->ctx));
    EXPECT_OK(fsdp_context_check(m->ctx));
    EXPECT(!is_there(m));
    close_all(m);
}

static void ranks_that_agree_hear_nothing(void **state)
{
    (void)state;
    static const oddity none = {0};
    for (uint32_t world = 1; world <= WORLD; world++) {
        for (uint32_t reduce_comm = 0; reduce_comm < 2; reduce_comm++) {
            member *team = team_new(world, all_agree, &none);
            for (uint32_t r = 0; r < world; r++)
                team[r].backend = silent_backend(), team[r].reduce_comm = reduce_comm, team[r].depth = world % 3;
            team_run(team);
            team_free(team);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_difference_that_the_wire_does_not_see_ends_that_step_on_every_rank),
        cmocka_unit_test(ranks_that_agree_hear_nothing),
    };
    alarm(100);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
