/* SPDX-License-Identifier: MIT */
/* A rank on a GPU is killed, stopped, late, or gives up: every other rank is told, its GPU is free of what waited for it, and
 * its process ends by itself. Ranks are processes on one GPU, with nothing but a context and collectives. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fsdp/fsdp.h"
#include "fsdp/nccl.h"
#include "gpu_kernels.h"
#include "gpu_ranks.h"
#include "processes.h"

enum { WORLD = 3, VICTIM = 1, SAID_BYTES = 2048, COUNT = 1 << 16, GO_ON = 1 };

static const uint64_t second_ns = 1000000000, deadline_ns = GPU_LATE_S * (uint64_t)1000000000, run_ns = 60000000000;

typedef struct crew crew;
typedef struct rank {
    crew *crew;
    uint32_t number;
    fsdp_context *ctx;
    fsdp_allocator *pool;
    fsdp_stream *s;
    float *data;
    fsdp_status status; /* what it was told */
    char said[SAID_BYTES];
} rank;

struct crew {
    fsdp_launch launch;
    meeting meet;
    mark n_kept, go;
    void (*body)(rank *r);
    uint32_t after_ms; /* when the parent kills, since the start */
    rank rank[WORLD];
};

#define NEED(condition)                                                                               \
    do {                                                                                              \
        if (!(condition)) {                                                                           \
            processes_complain(__FILE__, __LINE__, "rank %u: not so: %s (%s)", r->number, #condition, \
                               fsdp_last_error());                                                    \
            return;                                                                                   \
        }                                                                                             \
    } while (0)

/* ---- One rank ---- */

static fsdp_status open_context(rank *r)
{
    fsdp_launch launch = r->crew->launch;
    fsdp_cuda_config cuda = FSDP_CUDA_CONFIG_INIT;
    fsdp_config config = FSDP_CONFIG_INIT;
    launch.rank = launch.local_rank = r->number;
    cuda.launch = &launch;
    config.backend = fsdp_cuda_backend();
    config.backend_config = &cuda;
    config.timeout_ns = deadline_ns;
    return fsdp_context_create(&config, &r->ctx);
}

static fsdp_status open_all(rank *r)
{
    fsdp_allocator_config pool = FSDP_ALLOCATOR_CONFIG_INIT;
    void *data;
    fsdp_status status = open_context(r);
    if (status == FSDP_OK) status = fsdp_stream_create(r->ctx, "compute", &r->s);
    if (status == FSDP_OK) status = fsdp_allocator_create(r->ctx, &pool, &r->pool);
    if (status == FSDP_OK)
        status = fsdp_allocator_alloc(r->pool, (uint64_t)WORLD * COUNT * sizeof *r->data, r->s, "data", &data);
    if (status == FSDP_OK) r->data = data;
    return status;
}

/* A few all-gathers, enqueued at once. */
static fsdp_status some_steps(rank *r)
{
    for (int i = 0; i < 8; i++) {
        fsdp_status status = fsdp_all_gather(fsdp_context_comm(r->ctx), r->data + r->number * COUNT, r->data, COUNT,
                                             FSDP_DTYPE_FP32, r->s, NULL);
        if (status != FSDP_OK) return status;
    }
    return FSDP_OK;
}

static fsdp_status some_steps_to_their_end(rank *r)
{
    fsdp_status status = some_steps(r);
    if (status == FSDP_OK) status = fsdp_stream_drain_host(r->s, 100 * second_ns);
    return status == FSDP_OK ? fsdp_context_check(r->ctx) : status;
}

static void keep(rank *r, fsdp_status status)
{
    r->status = status;
    snprintf(r->said, sizeof r->said, "%s", fsdp_last_error());
    mark_add(&r->crew->n_kept);
}

/* Everything can be closed after a failure. */
static void close_all(rank *r)
{
    if (r->data != NULL) NEED(fsdp_allocator_free(r->pool, r->data) == FSDP_OK);
    NEED(fsdp_allocator_destroy(r->pool) == FSDP_OK);
    NEED(fsdp_stream_release(r->s) == FSDP_OK);
    NEED(fsdp_context_destroy(r->ctx) == FSDP_OK);
}

static void until(rank *r, fsdp_status (*call)(rank *r))
{
    fsdp_status status = FSDP_OK;
    uint64_t end = fsdp__after_ns(40 * second_ns);
    while (status == FSDP_OK && fsdp__now_ns() < end) status = call(r);
    keep(r, status);
}

static fsdp_status only_check(rank *r)
{
    const struct timespec moment = {0, 10000000};
    nanosleep(&moment, NULL);
    return fsdp_context_check(r->ctx);
}

/* ---- The crew ---- */

static bool run_rank(uint32_t number, void *arg)
{
    crew *c = arg;
    rank *r = &c->rank[number];
    gpu_rank_environment(number);
    r->crew = c;
    r->number = number;
    c->body(r);
    return true;
}

typedef void (*parent_fn)(crew *c, processes *p);

/* signal: what the victim is to die of; 0: it ends by itself. */
static crew *run(void (*body)(rank *r), int signal_, parent_fn parent, uint32_t after_ms)
{
    static processes p;
    crew *c = processes_shared(sizeof *c);
    c->launch = processes_launch(PROCESSES_BY_NAME);
    c->launch.world = c->launch.local_world = WORLD;
    c->body = body;
    c->after_ms = after_ms;
    meeting_init(&c->meet, WORLD);
    processes_start(&p, WORLD, run_rank, c);
    p.expected[VICTIM] = signal_;
    if (parent != NULL) parent(c, &p);
    processes_wait(&p, run_ns);
    const char *failure = processes_failure(&p);
    if (failure != NULL) print_error("%s\n", failure);
    bool failed = failure != NULL;
    processes_finish(&p);
    for (uint32_t i = 0; i < WORLD; i++) printf("    rank %u: %s\n", i, c->rank[i].said);
    if (failed) fail_msg("%s", "a process did not end as it should: see above");
    return c;
}

/* Of every rank but the victim. */
static void assert_told(crew *c, fsdp_status status, const char *part)
{
    for (uint32_t i = 0; i < WORLD; i++) {
        if (i == VICTIM) continue;
        assert_string_equal(fsdp_status_name(c->rank[i].status), fsdp_status_name(status));
        if (strstr(c->rank[i].said, part) == NULL) fail_msg("\"%s\" does not say \"%s\"", c->rank[i].said, part);
    }
}

static void done(crew *c) { processes_unshare(c, sizeof *c); }

/* ---- Killed ---- */

static void train_until_one_dies(rank *r)
{
    NEED(open_all(r) == FSDP_OK);
    NEED(some_steps_to_their_end(r) == FSDP_OK);
    (void)meeting_wait(&r->crew->meet, 40 * second_ns);
    if (r->number == VICTIM) {
        NEED(some_steps(r) == FSDP_OK);
        (void)raise(SIGKILL);
    }
    until(r, some_steps_to_their_end);
    close_all(r);
}

static void a_rank_killed_in_a_step_is_named(void **state)
{
    (void)state;
    crew *c = run(train_until_one_dies, SIGKILL, NULL, 0);
    assert_told(c, FSDP_ERR_RANK_LOST, "rank 1 is gone");
    done(c);
}

static void train_from_the_start(rank *r)
{
    fsdp_status status = open_all(r);
    if (status != FSDP_OK) {
        keep(r, status);
        return; /* and the process ends */
    }
    until(r, some_steps_to_their_end);
    close_all(r);
}

static void kill_after_a_while(crew *c, processes *p)
{
    const struct timespec delay = {c->after_ms / 1000, (long)(c->after_ms % 1000) * 1000000};
    nanosleep(&delay, NULL);
    processes_signal(p, VICTIM, SIGKILL);
}

static void a_rank_killed_while_all_open_is_named(void **state)
{
    (void)state;
    static const uint32_t fifteenths[] = {2, 6, 10, 15};
    for (int i = 0; i < 4; i++) {
        crew *c = run(train_from_the_start, SIGKILL, kill_after_a_while, fifteenths[i] * GPU_OPENING_MS / 15);
        assert_told(c, FSDP_ERR_RANK_LOST, "rank 1");
        done(c);
    }
}

/* ---- Stopped, late, never there ---- */

static void let_go_on(crew *c, processes *p)
{
    if (!processes_wait_stopped(p, VICTIM, 40 * second_ns)) return;
    (void)mark_wait(&c->n_kept, WORLD - 1, 40 * second_ns);
    processes_signal(p, VICTIM, SIGCONT);
}

static void train_until_one_stops(rank *r)
{
    NEED(open_all(r) == FSDP_OK);
    NEED(some_steps_to_their_end(r) == FSDP_OK);
    (void)meeting_wait(&r->crew->meet, 40 * second_ns);
    if (r->number == VICTIM) (void)raise(SIGSTOP);
    until(r, some_steps_to_their_end);
    close_all(r);
}

static void a_stopped_rank_is_lost_at_the_timeout_and_told_when_it_goes_on(void **state)
{
    (void)state;
    crew *c = run(train_until_one_stops, 0, let_go_on, 0);
    assert_told(c, FSDP_ERR_RANK_LOST, "rank 1 did not answer");
    assert_true(c->rank[VICTIM].status != FSDP_OK);
    done(c);
}

static void come_or_not(rank *r)
{
    if (r->number == VICTIM) {
        (void)mark_wait(&r->crew->n_kept, WORLD - 1, 50 * second_ns);
        return;
    }
    keep(r, open_context(r));
}

static void a_rank_that_never_comes_is_named(void **state)
{
    (void)state;
    crew *c = run(come_or_not, 0, NULL, 0);
    assert_told(c, FSDP_ERR_RANK_LOST, "rank 1");
    done(c);
}

/* The victim computes on its host; the others wait for it in a step. */
static void sleep_past_the_deadline(rank *r)
{
    NEED(open_all(r) == FSDP_OK);
    NEED(some_steps_to_their_end(r) == FSDP_OK);
    (void)meeting_wait(&r->crew->meet, 40 * second_ns);
    if (r->number == VICTIM) (void)mark_wait(&r->crew->n_kept, WORLD - 1, 40 * second_ns);
    until(r, some_steps_to_their_end);
    close_all(r);
}

static void a_rank_whose_host_is_late_is_lost_and_told(void **state)
{
    (void)state;
    crew *c = run(sleep_past_the_deadline, 0, NULL, 0);
    assert_told(c, FSDP_ERR_RANK_LOST, "#9 all-gather of caller");
    assert_told(c, FSDP_ERR_RANK_LOST, "rank 1: #8 all-gather of caller");
    assert_int_equal(c->rank[VICTIM].status, FSDP_ERR_RANK_LOST);
    done(c);
}

/* All hosts but the victim's sleep after a collective that it does not make: their threads tell it. */
static void sleep_all(rank *r)
{
    NEED(open_all(r) == FSDP_OK);
    NEED(some_steps_to_their_end(r) == FSDP_OK);
    (void)meeting_wait(&r->crew->meet, 40 * second_ns);
    if (r->number != VICTIM) {
        NEED(some_steps(r) == FSDP_OK);
        (void)mark_wait(&r->crew->go, GO_ON, 50 * second_ns); /* no call of the library */
    } else {
        until(r, only_check);
        mark_set(&r->crew->go, GO_ON);
    }
    if (r->number != VICTIM) until(r, only_check); /* the victim may have heard a moment before */
    close_all(r);
}

static void a_failure_is_known_while_hosts_sleep(void **state)
{
    (void)state;
    crew *c = run(sleep_all, 0, NULL, 0);
    assert_told(c, FSDP_ERR_RANK_LOST, "#9 all-gather of caller");
    assert_int_equal(c->rank[VICTIM].status, FSDP_ERR_RANK_LOST);
    assert_string_equal(c->rank[VICTIM].said, c->rank[0].said);
    done(c);
}

/* ---- Giving up ---- */

static void train_until_one_gives_up(rank *r)
{
    NEED(open_all(r) == FSDP_OK);
    NEED(some_steps_to_their_end(r) == FSDP_OK);
    (void)meeting_wait(&r->crew->meet, 40 * second_ns);
    if (r->number == VICTIM) fsdp_context_abort(r->ctx, "the loss is NaN");
    until(r, some_steps_to_their_end);
    close_all(r);
}

static void an_abort_ends_all_with_its_reason(void **state)
{
    (void)state;
    crew *c = run(train_until_one_gives_up, 0, NULL, 0);
    assert_told(c, FSDP_ERR_ABORTED, "rank 1 aborted: the loss is NaN");
    assert_int_equal(c->rank[VICTIM].status, FSDP_ERR_ABORTED);
    done(c);
}

/* Its GPU fails, and its program sees it, closes everything and goes on with something else: the others do not wait. */
static void train_until_a_gpu_fails(rank *r)
{
    NEED(open_all(r) == FSDP_OK);
    NEED(some_steps_to_their_end(r) == FSDP_OK);
    (void)meeting_wait(&r->crew->meet, 40 * second_ns);
    if (r->number == VICTIM) NEED(gpu_store_nowhere(fsdp_cuda_stream(r->s)) == cudaSuccess);
    if (r->number == VICTIM) keep(r, fsdp_stream_drain_host(r->s, 40 * second_ns));
    else until(r, some_steps_to_their_end);
    close_all(r);
}

static void a_rank_whose_gpu_fails_and_that_closes_at_once_is_named(void **state)
{
    (void)state;
    crew *c = run(train_until_a_gpu_fails, 0, NULL, 0);
    assert_told(c, FSDP_ERR_RANK_LOST, "rank 1 is lost: rank 1: CUDA on GPU ");
    assert_int_equal(c->rank[VICTIM].status, FSDP_ERR_DEVICE);
    done(c);
}

/* It leaves without a word, with what it has enqueued still there: the process's end is not held up, here or there. */
static void leave_in_the_middle(rank *r)
{
    NEED(open_all(r) == FSDP_OK);
    (void)meeting_wait(&r->crew->meet, 40 * second_ns);
    NEED(some_steps(r) == FSDP_OK || r->number != VICTIM);
    if (r->number == VICTIM) return;
    until(r, some_steps_to_their_end);
    close_all(r);
}

static void a_rank_that_ends_without_closing_is_named_and_ends(void **state)
{
    (void)state;
    crew *c = run(leave_in_the_middle, 0, NULL, 0);
    assert_told(c, FSDP_ERR_RANK_LOST, "rank 1 is gone");
    done(c);
}

/* ---- Calls that differ ---- */

static void call_different_things(rank *r)
{
    fsdp_config config = FSDP_CONFIG_INIT;
    fsdp_launch launch = r->crew->launch;
    fsdp_cuda_config cuda = FSDP_CUDA_CONFIG_INIT;
    launch.rank = launch.local_rank = r->number;
    cuda.launch = &launch;
    config.backend = fsdp_cuda_backend();
    config.backend_config = &cuda;
    config.debug = FSDP_DEBUG_ORDER;
    config.timeout_ns = deadline_ns;
    NEED(fsdp_context_create(&config, &r->ctx) == FSDP_OK);
    NEED(fsdp_stream_create(r->ctx, "compute", &r->s) == FSDP_OK);
    fsdp_comm *comm = fsdp_context_comm(r->ctx);
    NEED(fsdp_barrier(comm, r->s, NULL) == FSDP_OK);
    keep(r, r->number == VICTIM ? fsdp_all_reduce(comm, NULL, NULL, 0, FSDP_DTYPE_FP32, r->s, NULL)
                                : fsdp_barrier(comm, r->s, NULL));
    close_all(r);
}

static void with_debug_order_calls_that_differ_are_named_where_they_are_made(void **state)
{
    (void)state;
    crew *c = run(call_different_things, 0, NULL, 0);
    assert_told(c, FSDP_ERR_MISMATCH, "ranks 0, 2: #2 barrier of caller; rank 1: #2 all-reduce of caller (0 fp32)");
    done(c);
}

static int setup(void **state)
{
    (void)state;
    alarm(300);
    return 0;
}

#define FAULT(name) cmocka_unit_test_setup(name, setup)

int main(void)
{
    if (gpu_is_missing_here("test_gpu_faults")) return 77;
    const struct CMUnitTest tests[] = {
        FAULT(a_rank_killed_in_a_step_is_named),
        FAULT(a_stopped_rank_is_lost_at_the_timeout_and_told_when_it_goes_on),
        FAULT(a_rank_that_never_comes_is_named),
        FAULT(a_rank_whose_host_is_late_is_lost_and_told),
        FAULT(a_failure_is_known_while_hosts_sleep),
        FAULT(an_abort_ends_all_with_its_reason),
        FAULT(a_rank_whose_gpu_fails_and_that_closes_at_once_is_named),
        FAULT(a_rank_that_ends_without_closing_is_named_and_ends),
        FAULT(with_debug_order_calls_that_differ_are_named_where_they_are_made),
        FAULT(a_rank_killed_while_all_open_is_named),
    };
    return cmocka_run_group_tests_name("faults on a GPU", tests, NULL, NULL) > 0;
}
