/* SPDX-License-Identifier: MIT */
#include "fault_rig.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { RUN_S = 40 };

crew *crew_create(uint32_t world, process_way way)
{
    crew *c = processes_shared(sizeof *c);
    fsdp_launch launch = processes_launch(way);
    launch.world = launch.local_world = world;
    c->n_processes = world;
    meeting_init(&c->meet, world);
    for (uint32_t i = 0; i < world; i++) {
        rank *r = &c->rank[i];
        *r = rank_default();
        launch.rank = launch.local_rank = i;
        r->launch = launch, r->number = i, r->world = world, r->meet = &c->meet, r->arg = c;
        r->timeout_ns = 100 * second_ns;
    }
    return c;
}

void crew_destroy(crew *c) { processes_unshare(c, sizeof *c); }

static bool run_process(uint32_t number, void *arg)
{
    rank *r = &((crew *)arg)->rank[number];
    crew_of(r)->body(r);
    if (r->failed[0] != 0) processes_complain("rank", (int)number, "%s", r->failed);
    return r->failed[0] == 0;
}

void crew_run(crew *c, rank_body body, int signal, crew_watch watch)
{
    static processes p;
    c->body = body;
    processes_start(&p, c->n_processes, run_process, c);
    p.expected[c->victim] = signal;
    if (watch != NULL) watch(c, &p);
    processes_wait(&p, RUN_S * second_ns);
    const char *failure = processes_failure(&p);
    processes_finish(&p);
    if (failure != NULL) fail_msg("victim %u, phase %d: %s", c->victim, c->phase, failure);
}

void crew_keep(rank *r, fsdp_status status)
{
    rank_keep(r, status);
    crew_of(r)->told_ns[place_of(r)] = fsdp__now_ns();
    mark_add(&crew_of(r)->n_kept);
}

fsdp_status step_to_end(rank *r)
{
    fsdp_status status = train_step(r);
    if (status == FSDP_OK) status = fsdp_stream_drain_host(r->s, 200 * second_ns);
    return status == FSDP_OK ? fsdp_context_check(r->ctx) : status;
}

void fail_on_and_close(rank *r, fsdp_status status)
{
    double value = 1.0;
    char *said = crew_of(r)->after[place_of(r)];
    EXPECT(r, fsdp_context_check(r->ctx) == status);
    snprintf(said, SAID_BYTES, "%s", fsdp_last_error());
    EXPECT(r, fsdp_barrier_host(r->ctx) == status);
    EXPECT(r, fsdp_sum_host(r->ctx, &value, 1) == status);
    if (r->n_kernels > 0) EXPECT(r, train_step(r) == status); /* it has trained before */
    EXPECT(r, strcmp(fsdp_last_error(), said) == 0);
    close_all(r);
}

void assert_others_kept(const crew *c, fsdp_status status, const char *fragment)
{
    for (uint32_t i = 0; i < c->n_processes; i++)
        if (i != c->victim) assert_kept(&c->rank[i], status, fragment);
}

void assert_others_agree(const crew *c)
{
    uint32_t first = c->victim == 0;
    for (uint32_t i = first; i < c->n_processes; i++)
        if (i != c->victim) assert_string_equal(c->after[i], c->after[first]);
}

/* ---- Before and after ---- */

static footprint before;

int fault_setup(void **state)
{
    (void)state;
    alarm(ERRORS_REDUCED ? 400 : 100);
    before = footprint_take();
    return 0;
}

static bool is_clean(footprint now)
{
    return now.n_shm <= before.n_shm && now.n_children == 0 && now.n_descriptors == before.n_descriptors;
}

int fault_teardown(void **state)
{
    (void)state;
    const struct timespec moment = {0, 10000000};
    footprint after = footprint_take();
    /* Another program's file may be on its way between being made and being mapped, or removed. */
    for (int i = 0; i < 100 && !is_clean(after); i++, nanosleep(&moment, NULL)) after = footprint_take();
    alarm(0);
    if (!is_clean(after))
        print_error("left behind: files in /dev/shm: %u, before %u; processes: %u; descriptors: %u, before %u\n",
                    after.n_shm, before.n_shm, after.n_children, after.n_descriptors, before.n_descriptors);
    return is_clean(after) ? 0 : -1;
}
