/* SPDX-License-Identifier: MIT */
/* Four call sequences over one allocator, each with a stream: they take, write, read and free blocks, and post some to
 * each other, who then use and free them. Either one thread makes the calls of all four, interleaved by the program's number,
 * or four threads do. A context is one thread's at a time, so threads give work to streams under a lock; the
 * allocator they call whenever they like. */
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include "race_rig.h"

enum { ACTORS = 4, MAX_OWN = 6, MAX_POST = 8 };

typedef struct letter {
    char *ptr;
    uint64_t bytes;
    uint8_t byte;
    int from;     /* whose stream touched it last */
    bool foreign; /* allocated on another stream: to be recorded */
} letter;

typedef struct stage stage;

typedef struct actor {
    stage *stage;
    int me;
    uint64_t random;
    letter own[MAX_OWN];
    int n_own;
    pthread_t thread;
} actor;

struct stage {
    race_rig *r;
    pthread_barrier_t start;
    pthread_mutex_t lock; /* over the rig's own things, the streams and the post */
    letter post[ACTORS][MAX_POST];
    int n_post[ACTORS];
    actor actor[ACTORS];
};

static uint64_t draw(actor *a, uint64_t below)
{
    a->random ^= a->random << 13, a->random ^= a->random >> 7, a->random ^= a->random << 17;
    return (a->random >> 11) % below;
}

static void complain(stage *g, const char *call)
{
    pthread_mutex_lock(&g->lock);
    race_say(g->r, RACE_CALL, "%s: %s", call, fsdp_last_error());
    pthread_mutex_unlock(&g->lock);
}

static void write_block(stage *g, letter *l, int stream)
{
    race_block block = {.ptr = l->ptr, .bytes = l->bytes};
    race_write(g->r, &block, stream);
    l->byte = block.byte;
}

static void take(actor *a)
{
    stage *g = a->stage;
    uint64_t bytes = 1 + draw(a, draw(a, 4) == 0 ? 4 * KIB : 900);
    void *ptr = NULL;
    fsdp_status status = fsdp_allocator_alloc(g->r->a, bytes, g->r->s[a->me], "actor", &ptr);
    if (status != FSDP_OK) {
        pthread_mutex_lock(&g->lock);
        if (status == FSDP_ERR_NO_MEMORY) g->r->verdict->n_refused++;
        else race_say(g->r, RACE_CALL, "fsdp_allocator_alloc: %s", fsdp_last_error());
        pthread_mutex_unlock(&g->lock);
        return;
    }
    letter *l = &a->own[a->n_own++];
    *l = (letter){ptr, bytes, 0, a->me, false};
    pthread_mutex_lock(&g->lock);
    write_block(g, l, a->me);
    pthread_mutex_unlock(&g->lock);
}

static void touch(actor *a, letter *l)
{
    stage *g = a->stage;
    bool write = draw(a, 3) == 0, early = draw(a, 2);
    if (l->foreign && early && fsdp_allocator_record_stream(g->r->a, l->ptr, g->r->s[a->me]) != FSDP_OK)
        complain(g, "fsdp_allocator_record_stream");
    pthread_mutex_lock(&g->lock);
    if (l->from != a->me) race_order(g->r, a->me, l->from);
    if (write) write_block(g, l, a->me);
    else race_read_bytes(g->r, l->ptr, l->bytes, l->byte, a->me);
    pthread_mutex_unlock(&g->lock);
    l->from = a->me;
    if (l->foreign && !early && fsdp_allocator_record_use(g->r->a, l->ptr, g->r->s[a->me]) != FSDP_OK)
        complain(g, "fsdp_allocator_record_use");
}

static void give(actor *a, int i)
{
    stage *g = a->stage;
    if (fsdp_allocator_free(g->r->a, a->own[i].ptr) != FSDP_OK) complain(g, "fsdp_allocator_free");
    if (g->r->x != NULL) explore_freed(g->r->x, g->r->rank, a->own[i].ptr, a->own[i].bytes);
    a->own[i] = a->own[--a->n_own];
}

static void post(actor *a, int i)
{
    stage *g = a->stage;
    int to = (a->me + 1 + (int)draw(a, ACTORS - 1)) % ACTORS;
    pthread_mutex_lock(&g->lock);
    if (g->n_post[to] < MAX_POST) {
        g->post[to][g->n_post[to]++] = a->own[i];
        a->own[i] = a->own[--a->n_own];
    }
    pthread_mutex_unlock(&g->lock);
}

static void fetch(actor *a)
{
    stage *g = a->stage;
    pthread_mutex_lock(&g->lock);
    bool got = g->n_post[a->me] > 0;
    if (got) a->own[a->n_own++] = g->post[a->me][--g->n_post[a->me]];
    pthread_mutex_unlock(&g->lock);
    if (!got) return;
    a->own[a->n_own - 1].foreign = true;
    touch(a, &a->own[a->n_own - 1]);
}

static void act(actor *a)
{
    uint64_t what = draw(a, 10);
    int i = a->n_own > 0 ? (int)draw(a, (uint64_t)a->n_own) : -1;
    if (what < 3 && a->n_own < MAX_OWN) take(a);
    else if (what < 5 && a->n_own < MAX_OWN) fetch(a);
    else if (i < 0) return;
    else if (what < 7) touch(a, &a->own[i]);
    else if (what < 8) post(a, i);
    else give(a, i);
}

static stage *open_stage(race_rig *r)
{
    stage *g = calloc(1, sizeof *g);
    if (g == NULL) abort();
    g->r = r;
    pthread_mutex_init(&g->lock, NULL);
    pthread_barrier_init(&g->start, NULL, ACTORS);
    for (int i = 0; i < ACTORS; i++) {
        actor *a = &g->actor[i];
        a->stage = g;
        a->me = i;
        a->random = (r->scenario->number * ACTORS + (uint64_t)i + 1) * 0x9e3779b97f4a7c15ull;
    }
    return g;
}

/* All blocks go back; those in the post by who gets them. */
static void close_stage(stage *g)
{
    for (int i = 0; i < ACTORS; i++) {
        actor *a = &g->actor[i];
        while (a->n_own > 0) give(a, a->n_own - 1);
        while (g->n_post[i] > 0) fetch(a), give(a, a->n_own - 1);
    }
    pthread_barrier_destroy(&g->start);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

static void play_interleaved(race_rig *r)
{
    stage *g = open_stage(r);
    for (uint32_t i = 0; i < r->scenario->n_moves && !r->stopped; i++) {
        act(&g->actor[race_draw(r, ACTORS)]);
        r->verdict->n_moves++;
    }
    close_stage(g);
}

static void *run_actor(void *arg)
{
    actor *a = arg;
    pthread_barrier_wait(&a->stage->start);
    for (uint32_t i = 0; i < a->stage->r->scenario->n_moves / ACTORS; i++) {
        act(a);
        sched_yield();
    }
    return NULL;
}

void race_play_threads(race_rig *r)
{
    stage *g = open_stage(r);
    for (int i = 0; i < ACTORS; i++)
        if (pthread_create(&g->actor[i].thread, NULL, run_actor, &g->actor[i]) != 0) abort();
    for (int i = 0; i < ACTORS; i++) pthread_join(g->actor[i].thread, NULL);
    r->verdict->n_moves += r->scenario->n_moves;
    close_stage(g);
}

race_scenario race_actors_program(uint64_t number, uint32_t n_moves)
{
    return (race_scenario){.name = "actors",
                           .play = play_interleaved,
                           .n_streams = ACTORS,
                           .budget_bytes = 12 * KIB,
                           .segment_bytes = 4 * KIB,
                           .policy = number % 2 ? FSDP_ALLOC_GROW_FIRST : FSDP_ALLOC_WAIT_FIRST,
                           .number = number,
                           .n_moves = n_moves};
}
