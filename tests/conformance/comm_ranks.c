/* SPDX-License-Identifier: MIT */
/* Ranks as threads or processes: opens and closes what a body needs, and brings failures home to the main thread. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "comm_suite.h"
#include "hostmem.h"

enum { DEADLINE_S = 100 };

void rank_failed(member *r, const char *file, int line, const char *condition)
{
    r->failed = true;
    processes_complain(file, line, "rank %u of %u: %s (%s)", r->rank, r->world, condition, fsdp_last_error());
    meeting_break(&r->team->meet); /* nobody waits for this rank */
}

void meet(member *r)
{
    r->doing = "meeting the others";
    (void)meeting_wait(&r->team->meet, DEADLINE_S * (uint64_t)SECOND);
    r->doing = "in its body";
}

fsdp_status open_comm(member *r, uint32_t index, uint64_t timeout_ns)
{
    fsdp_comm_args args = {sizeof args, r->config, r->dev, &r->host, index, timeout_ns, r->sides, r->side};
    return r->comms->open(&args, &r->comm[index]);
}

void close_comm(member *r, uint32_t index)
{
    if (r->comm[index] != NULL) r->comms->close(r->comm[index]);
    r->comm[index] = NULL;
}

void *rank_block(member *r, uint64_t bytes)
{
    bytes = (bytes + r->caps.granularity) / r->caps.granularity * r->caps.granularity;
    int i = 0;
    while (i < RANK_BLOCKS && r->block[i].ptr != NULL) i++;
    if (i == RANK_BLOCKS) return NULL;
    if (r->device->mem_alloc(r->dev, bytes, FSDP_MEMORY_KIND_DEVICE, &r->block[i].ptr) != FSDP_OK) return NULL;
    r->block[i].bytes = bytes;
    return r->block[i].ptr;
}

fsdp_status rank_memory(member *r, fsdp_collective *list, uint32_t n)
{
    uint64_t most = 64;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t bytes = list[i].count * fsdp_dtype_bytes(list[i].dtype) * r->world;
        if (bytes > most) most = bytes;
    }
    void *block = rank_block(r, most);
    if (block == NULL) return FSDP_ERR_NO_MEMORY;
    for (uint32_t i = 0; i < n; i++) list[i].send = list[i].recv = block;
    return FSDP_OK;
}

void free_blocks(member *r)
{
    for (int i = 0; i < RANK_BLOCKS; i++) {
        if (r->block[i].ptr != NULL)
            r->device->mem_free(r->dev, r->block[i].ptr, r->block[i].bytes, FSDP_MEMORY_KIND_DEVICE);
        r->block[i].ptr = NULL;
    }
}

fsdp_status rank_drain(member *r, int stream) { return r->device->stream_drain(r->dev, r->stream[stream], UINT64_MAX); }

fsdp_status rank_copy(member *r, void *dst, const void *src, uint64_t bytes)
{
    fsdp_device_op op = {.kind = FSDP_OPERATION_COPY, .u.copy = {dst, src, bytes}};
    fsdp_status status = r->device->launch(r->dev, r->stream[0], &op, NULL);
    return status != FSDP_OK ? status : rank_drain(r, 0);
}

void rank_close_gate(member *r, int stream)
{
    const comm_suite *suite = r->team->suite;
    if (suite->hold != NULL) {
        __atomic_store_n(r->word, 0, __ATOMIC_SEQ_CST);
        EXPECT_OK(suite->hold(r->stream[stream], r->word));
        return;
    }
    gate_close(&r->gate);
    fsdp_device_op op = gate_op(&r->gate);
    EXPECT_OK(r->device->launch(r->dev, r->stream[stream], &op, NULL));
}

void rank_open_gate(member *r)
{
    if (r->word != NULL) __atomic_store_n(r->word, 1, __ATOMIC_SEQ_CST);
    gate_open(&r->gate);
}

fsdp_status enqueue(member *r, int comm, int stream, fsdp_collective c)
{
    return r->comms->enqueue(r->comm[comm], r->stream[stream], &c, 1);
}

static void rank_open(member *r)
{
    team *t = r->team;
    uint32_t number, world;
    r->device = t->suite->backend->device;
    r->comms = t->suite->backend->comm;
    r->sides = t->suite->backend->side;
    fsdp_host_allocator none = {NULL, NULL, NULL, NULL};
    EXPECT_OK(fsdp__host_allocator_resolve(&none, &r->host));
    EXPECT(t->suite->config(r->config, t->group, r->rank, t->jitter_ns, t->jitter_seed) == r->config);
    fsdp_device_args dev = {sizeof dev, r->config, &r->host, t->debug, t->timeout_ns, NULL, NULL};
    r->caps.size = sizeof r->caps;
    EXPECT_OK(r->device->open(&dev, &r->dev, &r->caps));
    for (int i = 0; i < RANK_STREAMS; i++) EXPECT_OK(r->device->stream_create(r->dev, "rank", i == 1, &r->stream[i]));
    for (int i = 0; i < 2; i++) EXPECT_OK(r->device->event_create(r->dev, &r->event[i]));
    if (t->suite->hold != NULL) {
        void *word = NULL;
        EXPECT_OK(r->device->mem_alloc(r->dev, r->caps.granularity, FSDP_MEMORY_KIND_PINNED, &word));
        r->word = word;
    }
    r->doing = "opening its side channel";
    fsdp_side_args side = {
        .size = sizeof side, .backend_config = r->config, .host = &r->host, .timeout_ns = 60ull * SECOND};
    EXPECT_OK(r->sides->open(&side, &r->side, &number, &world));
    EXPECT(number == r->rank && world == r->world);
    r->doing = "opening its communicators";
    if (t->is_apart) return;
    EXPECT_OK(open_comm(r, 0, t->timeout_ns));
    EXPECT_OK(open_comm(r, 1, t->timeout_ns));
}

static void rank_close(member *r)
{
    rank_open_gate(r);
    r->doing = "destroying its streams";
    for (int i = 0; i < RANK_STREAMS; i++)
        if (r->stream[i] != NULL) r->device->stream_destroy(r->dev, r->stream[i]);
    for (int i = 0; i < 2; i++)
        if (r->event[i] != NULL) r->device->event_destroy(r->dev, r->event[i]);
    r->doing = "closing its communicators";
    close_comm(r, 0);
    close_comm(r, 1);
    r->doing = "closing its side channel";
    if (r->side != NULL) r->sides->close(r->side);
    r->doing = "freeing its memory";
    free_blocks(r);
    if (r->word != NULL) r->device->mem_free(r->dev, r->word, r->caps.granularity, FSDP_MEMORY_KIND_PINNED);
    r->doing = "closing its device";
    r->device->close(r->dev);
    r->doing = NULL;
}

typedef struct job {
    member *rank;
    rank_body body;
} job;

static void rank_live(member *r, rank_body body)
{
    gate_init(&r->gate);
    r->doing = "opening its device";
    rank_open(r);
    r->doing = "in its body";
    if (!r->failed) body(r);
    if (r->dev != NULL) rank_close(r);
    gate_fini(&r->gate);
}

static void *rank_thread(void *arg)
{
    const job *j = arg;
    rank_live(j->rank, j->body);
    return NULL;
}

static bool rank_process(uint32_t number, void *arg)
{
    const job *j = arg;
    member *r = &j->rank[number];
    rank_live(r, j->body);
    return !r->failed;
}

/* NULL, or what went wrong. */
static const char *run_threads(team *t, rank_body body)
{
    static job jobs[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    bool failed = false;
    for (uint32_t i = 0; i < t->world; i++) {
        jobs[i] = (job){&t->rank[i], body};
        assert_int_equal(pthread_create(&threads[i], NULL, rank_thread, &jobs[i]), 0);
    }
    for (uint32_t i = 0; i < t->world; i++) {
        pthread_join(threads[i], NULL);
        failed = failed || t->rank[i].failed;
    }
    return failed ? "a rank failed: see above" : NULL;
}

void run_team(team *t, rank_body body)
{
    bool own_group = t->group == NULL;
    if (own_group) t->group = t->suite->group_create(t->world, &t->link);
    meeting_init(&t->meet, t->world);
    for (uint32_t i = 0; i < t->world; i++) t->rank[i] = (member){.team = t, .rank = i, .world = t->world};
    job j = {t->rank, body};
    const char *failure = t->suite->processes ? processes_run(t->world, DEADLINE_S * (uint64_t)SECOND, rank_process, &j)
                                              : run_threads(t, body);
    if (own_group) {
        t->suite->group_destroy(t->group);
        t->group = NULL;
    }
    if (failure == NULL) return;
    for (uint32_t i = 0; i < t->world && t->suite->processes; i++)
        if (t->rank[i].doing != NULL) print_error("rank %u was %s\n", i, t->rank[i].doing);
    fail_msg("%s", failure);
}

team *new_team(void **state, uint32_t world)
{
    team *t = *state;
    *t = (team){.suite = t->suite, .world = world, .timeout_ns = 60ull * SECOND};
    return t;
}

bool suite_has(void **state, uint32_t world)
{
    const comm_suite *suite = ((const team *)*state)->suite;
    return suite->most == 0 || world <= suite->most;
}

team *team_of_at_most(void **state, uint32_t world)
{
    uint32_t most = ((const team *)*state)->suite->most;
    return new_team(state, suite_has(state, world) ? world : most);
}

int suite_times(void **state, int usual) { return ((const team *)*state)->suite->loose && usual > 2 ? 2 : usual; }

int team_setup(void **state)
{
    static team *t; /* tests run one after another */
    if (t == NULL) t = processes_shared(sizeof *t);
    alarm(DEADLINE_S + 10);
    t->suite = *state;
    *state = t;
    return 0;
}

int team_teardown(void **state)
{
    (void)state;
    alarm(0);
    return 0;
}
