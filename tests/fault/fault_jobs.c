/* SPDX-License-Identifier: MIT */
/* An abort from another thread; jobs beside and after each other; a context a thousand times. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fault_rig.h"

/* ---- Abort ---- */

static void *abort_all(void *arg)
{
    rank *r = arg;
    crew *c = crew_of(r);
    (void)meeting_wait(&c->meet, 60 * second_ns);
    c->told_ns[MAX_RANKS - 1] = fsdp__now_ns();
    fsdp_context_abort(r->ctx, "the operator pressed the button");
    fsdp_context_abort(r->ctx, "twice"); /* once is enough */
    return NULL;
}

/* Each waits for something that does not come: rank 0 on the side channel, 1 for an event, 2 for a report, 3 for its stream. */
static void wait_in_vain(rank *r)
{
    double value = 1.0;
    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    fsdp_event *event;
    pthread_t outside;
    crew *c = crew_of(r);
    EXPECT_OK(r, open_all(r));
    EXPECT_OK(r, train_step(r));
    EXPECT_OK(r, fsdp_event_create(r->ctx, &event));
    if (r->number > 0) EXPECT_OK(r, train_step(r));
    EXPECT_OK(r, fsdp_event_record(event, r->s));
    if (is_victim(r)) EXPECT(r, pthread_create(&outside, NULL, abort_all, r) == 0);
    (void)meeting_wait(&c->meet, 60 * second_ns);
    switch (r->number) {
    case 0: crew_keep(r, fsdp_sum_host(r->ctx, &value, 1)); break;
    case 1: crew_keep(r, fsdp_event_wait_host(event, 200 * second_ns)); break;
    case 2: crew_keep(r, fsdp_step_report_get(r->model, 2, 200 * second_ns, &report)); break;
    default: crew_keep(r, fsdp_stream_drain_host(r->s, 200 * second_ns)); break;
    }
    if (is_victim(r)) pthread_join(outside, NULL);
    EXPECT(r, fsdp_pass_abort(r->model, r->s) == FSDP_ERR_ABORTED);
    fsdp_event_destroy(event);
    fail_on_and_close(r, FSDP_ERR_ABORTED);
}

static void an_abort_from_another_thread_reaches_every_rank(void **state)
{
    (void)state;
    for (uint32_t victim = 0; victim < WORLD; victim++) {
        char sentence[80];
        crew *c = crew_create(WORLD, victim % 2 ? PROCESSES_BY_TCP : PROCESSES_BY_NAME);
        c->victim = victim;
        meeting_init(&c->meet, WORLD + 1);
        crew_run(c, wait_in_vain, 0, NULL);
        snprintf(sentence, sizeof sentence, "rank %u aborted: the operator pressed the button", victim);
        uint64_t last_ns = 0;
        for (int i = 0; i < WORLD; i++) {
            assert_kept(&c->rank[i], FSDP_ERR_ABORTED, sentence);
            if (c->told_ns[i] > last_ns) last_ns = c->told_ns[i];
        }
        printf("    rank %u aborted; all were told after %.3f ms\n", victim,
               (double)(last_ns - c->told_ns[MAX_RANKS - 1]) * 1e-6);
        crew_destroy(c);
    }
}

/* ---- Jobs beside each other ---- */

static void train_three_steps(rank *r)
{
    uint64_t hash = 0;
    EXPECT_OK(r, open_all(r));
    for (int i = 0; i < 3; i++) EXPECT_OK(r, step_to_end(r));
    EXPECT_OK(r, hash_model(r, &hash));
    crew_of(r)->told_ns[place_of(r)] = hash;
    close_all(r);
}

/* The first two processes are the one job, the others the other. */
static void make_two_jobs(crew *c, bool same_address)
{
    fsdp_launch other = same_address ? c->rank[0].launch : processes_launch(PROCESSES_BY_TCP);
    other.nonce = c->rank[0].launch.nonce + 1;
    for (uint32_t i = 0; i < 4; i++) {
        rank *r = &c->rank[i];
        if (i >= 2) r->launch = other;
        r->number = r->launch.rank = r->launch.local_rank = i % 2;
        r->world = r->launch.world = r->launch.local_world = 2;
    }
}

static void two_jobs_of_one_machine_do_not_meet(void **state)
{
    (void)state;
    for (int way = PROCESSES_BY_NAME; way <= PROCESSES_BY_TCP; way++) {
        crew *c = crew_create(4, (process_way)way);
        make_two_jobs(c, false);
        crew_run(c, train_three_steps, 0, NULL);
        assert_true(c->told_ns[0] != 0);
        for (int i = 1; i < 4; i++) assert_int_equal(c->told_ns[i], c->told_ns[0]);
        crew_destroy(c);
    }
}

/* The first job's rank 0 waits there for its rank 1, which comes when the second job has been told. */
static void open_at_one_address(rank *r)
{
    crew *c = crew_of(r);
    uint32_t place = place_of(r);
    if (place >= 2) {
        EXPECT(r, mark_wait(&c->go, 1, 20 * second_ns)); /* rank 0 of the first job listens */
        crew_keep(r, open_context(r));
        EXPECT(r, r->ctx == NULL);
        return;
    }
    if (place == 1) EXPECT(r, mark_wait(&c->n_kept, 2, 20 * second_ns));
    train_three_steps(r);
}

/* Listening shows only by being refused or let in: the test asks in the first job's name, and stays outside. */
static void wait_for_the_listener(crew *c, processes *p)
{
    (void)p;
    const struct timespec moment = {0, 1000000};
    for (uint64_t deadline_ns = fsdp__after_ns(10 * second_ns); fsdp__now_ns() < deadline_ns; nanosleep(&moment, NULL))
        if (processes_listens(&c->rank[0].launch)) break;
    mark_set(&c->go, 1);
}

static void a_second_job_at_the_same_address_is_told_and_does_no_harm(void **state)
{
    (void)state;
    for (int way = PROCESSES_BY_NAME; way <= PROCESSES_BY_TCP; way++) {
        crew *c = crew_create(4, (process_way)way);
        make_two_jobs(c, true);
        c->rank[2].timeout_ns = c->rank[3].timeout_ns = second_ns;
        crew_run(c, open_at_one_address, 0, wait_for_the_listener);
        for (int i = 2; i < 4; i++) printf("    second job, rank %d: %s\n", i - 2, c->rank[i].said);
        for (int i = 2; i < 4; i++) assert_kept(&c->rank[i], c->rank[i].status, c->rank[0].launch.address);
        assert_true(c->rank[2].status != FSDP_OK && c->rank[3].status != FSDP_OK);
        assert_true(c->told_ns[0] != 0 && c->told_ns[0] == c->told_ns[1]);
        crew_destroy(c);
    }
}

/* ---- Again after a crash ---- */

static const int crash = SIGKILL;

static void die(void *unused)
{
    (void)unused;
    raise(crash);
}

static void train_and_crash(rank *r)
{
    EXPECT_OK(r, open_all(r));
    EXPECT_OK(r, step_to_end(r));
    (void)meeting_wait(r->meet, 60 * second_ns);
    if (is_victim(r)) EXPECT_OK(r, fsdp_stream_host_call(r->s, die, NULL));
    crew_keep(r, step_to_end(r));
    fail_on_and_close(r, FSDP_ERR_RANK_LOST);
}

static void a_job_starts_again_at_once_where_one_has_crashed(void **state)
{
    (void)state;
    for (int k = 0; k < 6; k++) {
        uint64_t hash = 0;
        crew *c = crew_create(WORLD, k % 2 ? PROCESSES_BY_TCP : PROCESSES_BY_NAME);
        fsdp_launch launch = c->rank[0].launch;
        c->victim = (uint32_t)k / 2;
        crew_run(c, train_and_crash, SIGKILL, NULL);
        crew_destroy(c);
        for (int again = 0; again < 2; again++) {
            c = crew_create(WORLD, PROCESSES_BY_NAME);
            for (uint32_t i = 0; i < WORLD; i++) {
                c->rank[i].launch = launch; /* the same address, port and, as a launcher gives it, nonce */
                c->rank[i].launch.rank = c->rank[i].launch.local_rank = i;
            }
            crew_run(c, train_three_steps, 0, NULL);
            if (again) assert_int_equal(c->told_ns[0], hash);
            hash = c->told_ns[0];
            crew_destroy(c);
        }
    }
}

/* ---- A thousand times ---- */

/* A sum of all ranks, in memory that each has seen of the others. */
static void sum_once(rank *r)
{
    fsdp_allocator *allocator = NULL;
    void *x = NULL;
    EXPECT_OK(r, open_context(r));
    EXPECT_OK(r, fsdp_allocator_create(r->ctx, NULL, &allocator));
    EXPECT_OK(r, fsdp_allocator_alloc(allocator, 4096, r->s, NULL, &x));
    EXPECT_OK(r, fsdp_stream_fill(r->s, x, 0, 4096));
    EXPECT_OK(r, fsdp_all_reduce(fsdp_context_comm(r->ctx), x, x, 1024, FSDP_DTYPE_FP32, r->s, NULL));
    EXPECT_OK(r, fsdp_stream_drain_host(r->s, 60 * second_ns));
    EXPECT_OK(r, fsdp_allocator_free(allocator, x));
    EXPECT_OK(r, fsdp_allocator_destroy(allocator));
    close_all(r);
}

static void open_and_close(rank *r)
{
    footprint before = {0}, after;
    meter m;
    meter_init(&m);
    r->meter = &m;
    const int warm_up = 50, n = crew_of(r)->phase;
    for (int i = 0; i < n; i++) {
        if (i == warm_up) before = footprint_take();
        sum_once(r);
        if (r->failed[0] != 0) return;
        EXPECT(r, m.live_bytes == 0);
    }
    /* A thread that was joined may be in the list for a moment more. */
    const struct timespec moment = {0, 1000000};
    do {
        after = footprint_take();
    } while (after.n_threads != before.n_threads && nanosleep(&moment, NULL) == 0); /* until the alarm */
    EXPECT(r, after.n_descriptors == before.n_descriptors && after.n_children == before.n_children);
    EXPECT(r, after.n_shm <= before.n_shm);
    if (r->number == 0)
        printf("    %d contexts: mapped %lld KiB more, resident %lld KiB more than after %d\n", n,
               (long long)(after.mapped_bytes - before.mapped_bytes) / 1024,
               (long long)(after.resident_bytes - before.resident_bytes) / 1024, warm_up);
    fflush(stdout);
    /* A page leaked by each would be 4 MB. */
    EXPECT(r, ERRORS_REDUCED || after.mapped_bytes <= before.mapped_bytes + (1 << 20));
    EXPECT(r, ERRORS_REDUCED || after.resident_bytes <= before.resident_bytes + (1 << 20));
}

static void a_thousand_contexts_leave_nothing(void **state)
{
    (void)state;
    for (int way = PROCESSES_BY_NAME; way <= PROCESSES_BY_TCP; way++) {
        crew *c = crew_create(2, (process_way)way);
        c->phase = ERRORS_REDUCED ? 150 : way == PROCESSES_BY_NAME ? 1000 : 300;
        crew_run(c, open_and_close, 0, NULL);
        crew_destroy(c);
    }
}

int run_job_faults(void)
{
    const struct CMUnitTest tests[] = {
        FAULT(an_abort_from_another_thread_reaches_every_rank),
        FAULT(two_jobs_of_one_machine_do_not_meet),
        FAULT(a_second_job_at_the_same_address_is_told_and_does_no_harm),
        FAULT(a_job_starts_again_at_once_where_one_has_crashed),
        FAULT(a_thousand_contexts_leave_nothing),
    };
    return cmocka_run_group_tests_name("jobs", tests, NULL, NULL);
}
