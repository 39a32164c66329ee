/* SPDX-License-Identifier: MIT */
/* A rank is killed, or stopped, in each phase of a training. */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fault_rig.h"

typedef enum phase { SEAL, FORWARD, BACKWARD, OPTIMIZER, IDLE, BARRIER, N_PHASES } phase;

/* Values of a crew's go. */
enum { FALLEN = 1, GO_ON = 2 };

static const char *const phase_names[N_PHASES] = {"seal", "forward", "backward", "optimizer", "idle", "barrier"};

/* A kernel in which its process dies, or stops until it may go on: a stop reaches the process's other threads first. */
static void die(void *crew_)
{
    crew *c = crew_;
    kill(getpid(), *(const int *)c->arg);
    (void)mark_wait(&c->go, GO_ON, 60 * second_ns);
}

static const int sigkill = SIGKILL, sigstop = SIGSTOP;

static int signal_of(const rank *r) { return *(const int *)crew_of(r)->arg; }

/* Before these calls of a micro-step the victim's stream gets the kernel in which it dies. */
enum { IN_FORWARD_OF_1 = 3, IN_BACKWARD_OF_2 = 13 };

static void put_kernel(rank *r, uint32_t call)
{
    int at = crew_of(r)->phase;
    bool here = (at == FORWARD && call == IN_FORWARD_OF_1) || (at == BACKWARD && call == IN_BACKWARD_OF_2);
    if (here) EXPECT_OK(r, fsdp_stream_host_call(r->s, die, crew_of(r)));
}

/* The victim's step, which ends on its stream in the middle of a unit, or between the last gradient and the update. */
static fsdp_status step_to_death(rank *r)
{
    fsdp_status status = micro_step(r, 0, 1, put_kernel);
    if (status == FSDP_OK && crew_of(r)->phase == OPTIMIZER) status = fsdp_stream_host_call(r->s, die, crew_of(r));
    return status == FSDP_OK ? update(r) : status;
}

/* The victim. With SIGSTOP it comes back, and is told as the others. */
static fsdp_status fall(rank *r)
{
    crew *c = crew_of(r);
    bool on_host = c->phase == SEAL || c->phase == BARRIER;
    fsdp_status status = FSDP_OK;
    mark_set(&c->victim_mark, 1);
    if (on_host) (void)raise(signal_of(r));
    else if (c->phase == IDLE) (void)mark_wait(&c->go, FALLEN, 60 * second_ns); /* the parent does it */
    else status = step_to_death(r);
    if (status == FSDP_OK && !on_host) status = fsdp_stream_drain_host(r->s, 200 * second_ns);
    return status == FSDP_OK ? fsdp_barrier_host(r->ctx) : status;
}

/* What the others do: the call that the victim does not come to. */
static fsdp_status go_on(rank *r)
{
    crew *c = crew_of(r);
    const struct timespec moment = {0, 1000000};
    switch (c->phase) {
    case SEAL: return fsdp_model_seal(r->model);
    case BARRIER: return fsdp_barrier_host(r->ctx);
    case IDLE: /* told without another call */
        if (!mark_wait(&c->go, FALLEN, 60 * second_ns)) return FSDP_OK;
        while (fsdp_context_check(r->ctx) == FSDP_OK) nanosleep(&moment, NULL); /* until the alarm */
        return train_step(r);
    default: return step_to_end(r);
    }
}

static void train_until_one_falls(rank *r)
{
    const crew *c = crew_of(r);
    EXPECT_OK(r, open_context(r));
    EXPECT_OK(r, register_model(r));
    if (c->phase != SEAL) {
        EXPECT_OK(r, fsdp_model_seal(r->model));
        EXPECT_OK(r, fill_model(r));
        EXPECT_OK(r, step_to_end(r));
    }
    (void)meeting_wait(r->meet, 60 * second_ns);
    crew_keep(r, is_victim(r) ? fall(r) : go_on(r));
    EXPECT(r, r->status != FSDP_OK);
    if (is_victim(r)) close_all(r);
    else fail_on_and_close(r, FSDP_ERR_RANK_LOST);
}

static void kill_when_idle(crew *c, processes *p)
{
    if (c->phase != IDLE) return;
    (void)mark_wait(&c->victim_mark, 1, 20 * second_ns);
    processes_signal(p, c->victim, SIGKILL);
    (void)processes_wait_one(p, c->victim, 20 * second_ns);
    mark_set(&c->go, FALLEN);
}

static void kill_one(uint32_t world, uint32_t victim, phase at, process_way way)
{
    char name[32];
    crew *c = crew_create(world, way);
    c->victim = victim;
    c->phase = (int)at;
    c->arg = &sigkill;
    crew_run(c, train_until_one_falls, SIGKILL, kill_when_idle);
    snprintf(name, sizeof name, "rank %u", victim);
    assert_others_kept(c, FSDP_ERR_RANK_LOST, name);
    assert_others_agree(c);
    bool in_step = at == FORWARD || at == BACKWARD || at == OPTIMIZER;
    /* The words of all ranks come by rank 0. */
    if (in_step && victim != 0) assert_others_kept(c, FSDP_ERR_RANK_LOST, "all-gather of h.");
    printf("    rank %u of %u killed in %s: %s\n", victim, world, phase_names[at], c->rank[victim == 0].said);
    crew_destroy(c);
}

static void a_killed_rank_is_named_on_every_other_in_every_phase(void **state)
{
    (void)state;
    static const uint32_t victims[] = {0, 1, WORLD - 1};
    for (int at = SEAL; at < N_PHASES; at++)
        for (int v = 0; v < 3; v++) kill_one(WORLD, victims[v], (phase)at, PROCESSES_BY_NAME);
}

static void a_killed_rank_is_named_by_tcp_and_in_other_worlds(void **state)
{
    (void)state;
    kill_one(WORLD, 0, BACKWARD, PROCESSES_BY_TCP);
    kill_one(WORLD, 2, IDLE, PROCESSES_BY_TCP);
    kill_one(2, 0, FORWARD, PROCESSES_BY_NAME);
    kill_one(2, 1, BARRIER, PROCESSES_BY_NAME);
    kill_one(3, 1, SEAL, PROCESSES_BY_NAME);
    kill_one(MAX_RANKS, 0, OPTIMIZER, PROCESSES_BY_NAME);
    kill_one(MAX_RANKS, 7, BACKWARD, PROCESSES_BY_NAME);
}

/* ---- At any moment ---- */

/* From opening on, until a call fails. */
static void train_until_told(rank *r)
{
    crew *c = crew_of(r);
    mark_add(&c->go); /* it lives */
    fsdp_status status = open_all(r);
    if (status == FSDP_OK) mark_add(&c->victim_mark);
    while (status == FSDP_OK) status = step_to_end(r);
    crew_keep(r, status);
    EXPECT(r, !is_victim(r)); /* it never fails by itself */
    if (r->model != NULL) close_model(r);
    if (r->s != NULL) EXPECT_OK(r, fsdp_stream_release(r->s));
    if (r->ctx != NULL) EXPECT_OK(r, fsdp_context_destroy(r->ctx));
}

static void kill_after_a_while(crew *c, processes *p)
{
    uint64_t ns = (uint64_t)c->phase * 1000;
    (void)mark_wait(&c->go, c->n_processes, 20 * second_ns);
    const struct timespec delay = {(time_t)(ns / second_ns), (long)(ns % second_ns)};
    nanosleep(&delay, NULL); /* whatever they are doing by then is a case of this test */
    processes_signal(p, c->victim, SIGKILL);
}

static void a_rank_killed_at_any_moment_is_named(void **state)
{
    (void)state;
    uint32_t seed = 4, n_opened = 0, n_runs = ERRORS_REDUCED ? 10 : 40;
    for (uint32_t i = 0; i < n_runs; i++) {
        char name[32];
        seed = seed * 1664525u + 1013904223u;
        crew *c = crew_create(3 + i % 2, i % 3 ? PROCESSES_BY_NAME : PROCESSES_BY_TCP);
        c->victim = i % c->n_processes;
        c->phase = (int)((seed >> 16) % (i % 2 ? 60000 : 3000)); /* opening takes some ms, a step less than one */
        for (uint32_t r = 0; r < c->n_processes; r++)
            c->rank[r].timeout_ns = 2 * second_ns; /* of who comes to nobody */
        crew_run(c, train_until_told, SIGKILL, kill_after_a_while);
        snprintf(name, sizeof name, "rank %u", c->victim);
        for (uint32_t r = 0; r < c->n_processes; r++)
            if (r != c->victim) assert_kept(&c->rank[r], FSDP_ERR_RANK_LOST, name);
        n_opened += atomic_load(&c->victim_mark.value) == c->n_processes;
        crew_destroy(c);
    }
    printf("    %u runs, %u of them past opening\n", n_runs, n_opened);
}

/* ---- Stopped ---- */

/* Once the others have been told, the victim goes on, and is told. */
static void let_go_on(crew *c, processes *p)
{
    if (!processes_wait_stopped(p, c->victim, 30 * second_ns)) return; /* it will be late */
    if (!mark_wait(&c->n_kept, c->n_processes - 1, 30 * second_ns)) return;
    mark_set(&c->go, GO_ON);
    processes_signal(p, c->victim, SIGCONT);
}

static void a_stopped_rank_is_lost_at_the_timeout_and_told_when_it_goes_on(void **state)
{
    (void)state;
    static const struct {
        phase at;
        uint32_t victim;
    } cases[] = {{SEAL, 1}, {FORWARD, 0}, {BACKWARD, 2}, {OPTIMIZER, 3}, {BARRIER, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char name[32];
        crew *c = crew_create(WORLD, PROCESSES_BY_NAME);
        c->victim = cases[i].victim;
        c->phase = (int)cases[i].at;
        c->arg = &sigstop;
        for (uint32_t r = 0; r < WORLD; r++) c->rank[r].timeout_ns = second_ns;
        crew_run(c, train_until_one_falls, 0, let_go_on);
        snprintf(name, sizeof name, "rank %u", c->victim);
        assert_others_kept(c, FSDP_ERR_RANK_LOST, name);
        printf("    rank %u stopped in %s: %s\n", c->victim, phase_names[cases[i].at], c->rank[c->victim == 0].said);
        printf("        and it: %s\n", c->rank[c->victim].said);
        assert_true(c->rank[c->victim].status != FSDP_OK);
        crew_destroy(c);
    }
}

/* ---- What hides a death, or a failure ---- */

/* A child that lives on holds everything open that its parent had: sockets above all. */
static void die_with_a_child_left(rank *r)
{
    crew *c = crew_of(r);
    EXPECT_OK(r, open_all(r));
    EXPECT_OK(r, step_to_end(r));
    (void)meeting_wait(r->meet, 60 * second_ns);
    if (is_victim(r)) {
        if (fork() == 0) {
            (void)mark_wait(&c->go, GO_ON, 60 * second_ns);
            _exit(0);
        }
        (void)raise(SIGKILL);
    }
    crew_keep(r, step_to_end(r));
    fail_on_and_close(r, FSDP_ERR_RANK_LOST);
}

static void let_the_child_go(crew *c, processes *p)
{
    (void)p;
    (void)mark_wait(&c->n_kept, c->n_processes - 1, 20 * second_ns); /* long before the library's timeouts */
    mark_set(&c->go, GO_ON);
}

static void a_child_left_behind_does_not_hide_a_death(void **state)
{
    (void)state;
    for (uint32_t victim = 0; victim < 2; victim++) {
        crew *c = crew_create(3, victim == 0 ? PROCESSES_BY_NAME : PROCESSES_BY_TCP);
        c->victim = victim;
        crew_run(c, die_with_a_child_left, SIGKILL, let_the_child_go);
        assert_others_kept(c, FSDP_ERR_RANK_LOST, victim == 0 ? "rank 0 is gone" : "rank 1 is gone: its process ended");
        assert_int_equal(atomic_load(&c->go.value), GO_ON);
        crew_destroy(c);
    }
}

/* The collective that waits for the victim is older than the barrier: its timeout ends both. */
static void wait_in_a_host_call(rank *r)
{
    const struct timespec most_of_the_timeout = {0, 600000000};
    EXPECT_OK(r, open_all(r));
    (void)meeting_wait(r->meet, 60 * second_ns);
    if (is_victim(r)) {
        (void)raise(SIGSTOP);
        crew_keep(r, fsdp_barrier_host(r->ctx));
    } else {
        EXPECT_OK(r, fsdp_barrier(fsdp_context_comm(r->ctx), r->s, NULL));
        nanosleep(&most_of_the_timeout, NULL);
        crew_keep(r, fsdp_barrier_host(r->ctx));
    }
    close_all(r);
}

static void a_collective_that_fails_ends_the_host_call_beside_it(void **state)
{
    (void)state;
    crew *c = crew_create(3, PROCESSES_BY_NAME);
    c->victim = 1;
    for (uint32_t r = 0; r < 3; r++) c->rank[r].timeout_ns = second_ns;
    crew_run(c, wait_in_a_host_call, 0, let_go_on);
    assert_others_kept(c, FSDP_ERR_RANK_LOST, " barrier of caller: rank 1 of 3 did not come within 1.000 s");
    crew_destroy(c);
}

int run_kill_faults(void)
{
    const struct CMUnitTest tests[] = {
        FAULT(a_killed_rank_is_named_on_every_other_in_every_phase),
        FAULT(a_killed_rank_is_named_by_tcp_and_in_other_worlds),
        FAULT(a_rank_killed_at_any_moment_is_named),
        FAULT(a_stopped_rank_is_lost_at_the_timeout_and_told_when_it_goes_on),
        FAULT(a_child_left_behind_does_not_hide_a_death),
        FAULT(a_collective_that_fails_ends_the_host_call_beside_it),
    };
    return cmocka_run_group_tests_name("killed and stopped", tests, NULL, NULL);
}
