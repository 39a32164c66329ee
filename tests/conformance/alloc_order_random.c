/* SPDX-License-Identifier: MIT */
/* Random programs of allocations, uses and orders: no bytes are handed over without an edge. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "alloc_suite.h"
#include "hb_oracle.h"
#include "xorshift.h"

/* A judge of the tape who knows nothing of clocks either, by plain search over all pairs. Unlike hb_check it knows what
 * the host did: when a stream is released, all that it was given comes before all that anybody is given later. */
enum { LANES = 3, MAX_RECORDS = 8192, MAX_RELEASES = 64, MAX_TOUCHES = 4096, SLOTS = 16 };

typedef struct judged {
    uint32_t at[SLOTS]; /* records of each stream that come before this touch, counted from 1 on the tape */
    uint64_t record;
    int32_t stream;
    fsdp_trace_access access;
} judged;

typedef struct release {
    uint64_t at; /* records on the tape by then */
    int32_t slot;
} release;

typedef struct last_record {
    uint64_t event;
    uint32_t at[SLOTS];
} last_record;

static void raise(uint32_t *into, const uint32_t *other)
{
    for (int t = 0; t < SLOTS; t++)
        if (other[t] > into[t]) into[t] = other[t];
}

static bool overlap(const fsdp_trace_access *x, const fsdp_trace_access *y)
{
    return (x->write || y->write) && x->begin < y->begin + y->bytes && y->begin < x->begin + x->bytes;
}

/* How many pairs of touches are not ordered. */
static size_t count_races(const fsdp_trace *trace, const release *released, int n_released)
{
    static judged touched[MAX_TOUCHES];
    static last_record event[MAX_RECORDS];
    uint32_t after[SLOTS][SLOTS] = {{0}};
    size_t n = 0, n_events = 0, races = 0;
    for (uint64_t i = 0; i < fsdp_trace_count(trace); i++) {
        const fsdp_trace_record *r = fsdp_trace_at(trace, i);
        for (; n_released > 0 && released->at <= i; released++, n_released--)
            for (int s = 0; s < SLOTS; s++) after[s][released->slot] = (uint32_t)released->at;
        uint32_t *mine = after[r->stream];
        mine[r->stream] = (uint32_t)i + 1;
        size_t e = 0;
        while (e < n_events && event[e].event != r->event) e++;
        if (r->kind == FSDP_RECORD_WAIT && e < n_events) raise(mine, event[e].at);
        if (r->kind == FSDP_RECORD_EVENT) {
            if (e == n_events) event[n_events++].event = r->event;
            memcpy(event[e].at, mine, sizeof event[e].at);
        }
        for (uint32_t a = 0; a < r->n_accesses; a++) {
            for (size_t k = 0; k < n; k++)
                races += overlap(&touched[k].access, &r->access[a]) && touched[k].record >= mine[touched[k].stream];
            assert_true(n < MAX_TOUCHES);
            touched[n].record = i;
            touched[n].stream = r->stream;
            touched[n++].access = r->access[a];
        }
    }
    return races;
}

enum { MAX_LIVE = 20, MAX_READS = 1024, READ_BYTES = 64 };

typedef struct owned {
    char *ptr;
    uint64_t bytes;
    int last;          /* stream of the last touch */
    unsigned declared; /* mask: streams that it belongs to until free */
    unsigned reader;   /* mask: streams that have waited for the last touch */
    uint8_t byte;      /* what is in it; 0: nothing was written */
} owned;

typedef struct program {
    alloc_rig rig;
    owned live[MAX_LIVE];
    int n_live;
    uint64_t random;
    uint8_t next_byte;
    release released[MAX_RELEASES];
    int n_released;
    struct {
        uint8_t want, got[READ_BYTES];
    } read[MAX_READS];
    int n_reads;
    fsdp_trace *trace;
} program;

static uint64_t draw(program *g, uint64_t below) { return (xorshift(&g->random) >> 11) % below; }

static void random_alloc(program *g)
{
    if (g->n_live == MAX_LIVE) return;
    uint64_t bytes = 1 + draw(g, draw(g, 4) == 0 ? 12 * KIB : 1500);
    int s = (int)draw(g, ALLOC_STREAMS);
    void *ptr = NULL;
    fsdp_status status = fsdp_allocator_alloc(g->rig.a, bytes, g->rig.s[s], NULL, &ptr);
    if (status == FSDP_ERR_NO_MEMORY) return;
    OK(status);
    g->live[g->n_live++] = (owned){ptr, bytes, s, 1u << s, 0, 0};
}

static void random_free(program *g)
{
    if (g->n_live == 0) return;
    int i = (int)draw(g, (uint64_t)g->n_live);
    give(&g->rig, g->live[i].ptr);
    g->live[i] = g->live[--g->n_live];
}

/* Use a block on a stream, as a correct caller: ordered after the block's last touch, declared one way or the other. */
static void random_touch(program *g)
{
    if (g->n_live == 0) return;
    owned *o = &g->live[draw(g, (uint64_t)g->n_live)];
    int t = (int)draw(g, ALLOC_STREAMS);
    bool write = o->byte == 0 || draw(g, 2) == 0 || g->n_reads == MAX_READS;
    unsigned way = (unsigned)draw(g, 3), mine = 1u << t;
    if (t != o->last) order(&g->rig, t, o->last);
    if (way == 0) OK(fsdp_allocator_record_stream(g->rig.a, o->ptr, g->rig.s[t]));
    if (draw(g, 3) == 0) OK(fsdp_stream_delay(g->rig.s[t], 1000 + draw(g, 30000)));
    if (draw(g, 4) == 0) order(&g->rig, (int)draw(g, ALLOC_STREAMS), t); /* closes t's epoch between the two */
    if (write) {
        o->byte = g->next_byte = (uint8_t)(g->next_byte % 255 + 1);
        touch(&g->rig, t, o->ptr, o->byte, o->bytes);
    } else {
        uint64_t n = o->bytes < READ_BYTES ? o->bytes : READ_BYTES;
        g->read[g->n_reads].want = o->byte;
        memset(g->read[g->n_reads].got, o->byte, READ_BYTES);
        OK(fsdp_stream_copy(g->rig.s[t], g->read[g->n_reads++].got, o->ptr + o->bytes - n, n));
    }
    if (way == 1) OK(fsdp_allocator_record_stream(g->rig.a, o->ptr, g->rig.s[t]));
    if (way < 2) o->declared |= mine;
    if (!(o->declared & mine)) OK(fsdp_allocator_record_use(g->rig.a, o->ptr, g->rig.s[t]));
    o->last = t;
}

/* Release a stream and open another in its slot. Blocks that it owned stay, and belong to the new one from then on. */
static void random_release(program *g)
{
    if (g->n_released == MAX_RELEASES) return;
    int s = (int)draw(g, ALLOC_STREAMS);
    OK(fsdp_stream_release(g->rig.s[s]));
    g->released[g->n_released++] = (release){fsdp_trace_count(g->trace), LANES + s};
    OK(fsdp_stream_create(g->rig.ctx, "again", &g->rig.s[s]));
    for (int i = 0; i < g->n_live; i++) g->live[i].declared &= ~(1u << s);
}

static void run_program(const alloc_suite *suite, uint64_t seed, int moves, bool with_releases)
{
    static program g;
    memset(&g, 0, sizeof g);
    g.random = seed * 0x9e3779b97f4a7c15ull;
    alloc_rig_open(&g.rig, suite, 15000, seed, 10000000000ull, NULL);
    make_allocator(&g.rig, 24 * KIB, 8 * KIB);
    OK(fsdp_trace_start(g.rig.ctx, MAX_RECORDS, &g.trace));
    for (int i = 0; i < moves; i++) {
        uint64_t what = draw(&g, 100);
        if (what < 22) random_alloc(&g);
        else if (what < 40) random_free(&g);
        else if (what < 88) random_touch(&g);
        else if (what < 98 || !with_releases) order(&g.rig, (int)draw(&g, ALLOC_STREAMS), (int)draw(&g, ALLOC_STREAMS));
        else random_release(&g);
    }
    while (g.n_live > 0) random_free(&g);
    OK(fsdp_trace_stop_host(g.trace));
    assert_true(fsdp_trace_dropped(g.trace) == 0);
    size_t races = count_races(g.trace, g.released, g.n_released);
    if (races > 0) fail_msg("seed %llu: %zu pairs of touches are not ordered", (unsigned long long)seed, races);
    char text[1024];
    if (!with_releases && hb_check(g.trace, text, sizeof text) != 0)
        fail_msg("seed %llu: %s", (unsigned long long)seed, text);
    for (int i = 0; suite->has_data && i < g.n_reads; i++)
        for (int k = 0; k < READ_BYTES; k++)
            if (g.read[i].got[k] != g.read[i].want)
                fail_msg("seed %llu: read %d found another owner's bytes", (unsigned long long)seed, i);
    fsdp_trace_destroy(g.trace);
    alloc_rig_close(&g.rig);
}

void alloc_random_programs_have_no_unordered_pair(void **state)
{
    const alloc_suite *suite = *state;
    alarm(60);
    for (uint64_t seed = 1; seed <= (suite->has_data ? 6 : 60); seed++) run_program(suite, seed, 700, seed % 2 == 0);
}
