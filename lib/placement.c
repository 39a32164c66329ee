/* SPDX-License-Identifier: MIT */
/* Placement of buffers with known lives in one range (dynamic storage allocation), by a beam search.
 *
 * Lives are placed in the order of their begin, larger ones first, then by index. A state is what is taken at the
 * current position. Each free choice puts the life at the low or the high end of a gap that holds it; the `width`
 * states with the largest free gap survive, ties going to the lower offset. States that take the same bytes until the
 * same positions are one. A range is tried with widths 1, 8, 64, 256: first the live peak, which is optimal, then
 * ranges that grow by 1/128 of it. Tries wider than 1 share a budget of work, so that no input makes a seal slow.
 *
 * Lives that are linked by same_as are a class; its first life in order chooses the offset for all. The choice avoids
 * every class chosen before that is live together with any life of this class, now or later, so the others always fit.
 *
 * What is not found before the range is the sum of all classes is laid out class after class, which always works.
 * Integers only, total orders, no library sort: the same input gives the same offsets on every machine. */
#include "placement.h"

#include <assert.h>

#include "check.h"
#include "hostmem.h"
#include "placement_input.h"

enum {
    WIDTH_MAX = 256,
    STEPS_OF_PEAK = 128, /* a range grows by this part of the live peak */
    WORK_MAX = 1 << 24   /* gaps that all tries wider than 1 look at: about half a second; one try: a quarter */
};

/* Bytes begin … end of the range, taken until position `until`, included. */
typedef struct taken {
    uint64_t begin, end;
    uint32_t until;
} taken;

typedef struct gap {
    uint64_t begin, end;
} gap;

/* One choice on the way to a state. Ancestors are shared between states; `jump` is an older ancestor, set so that any
 * ancestor is found in O(log steps) (Myers, An applicative random-access stack, 1983). */
typedef struct node {
    uint64_t offset;
    uint32_t parent, jump; /* of the first: itself */
    uint32_t step;
    uint32_t refs; /* states and children that hold it */
} node;

typedef struct state {
    uint64_t hash;    /* of what is taken, and of the offsets that later lives must have */
    uint32_t node;    /* its last choice */
    uint32_t n_taken; /* in the state's part of beam.taken, by offset */
} state;

typedef struct choice {
    uint64_t free_gap; /* largest gap that is left: more is better */
    uint64_t offset, hash;
    uint32_t state;
} choice;

typedef struct seen {
    uint64_t hash;
    uint32_t step; /* in which it was seen, plus one; any other: empty */
} seen;

/* One try: a range and a width. */
typedef struct beam {
    const fsdp__placement_input *input;
    uint64_t range;
    uint32_t width, stride; /* stride: lives at a time, a state's part of `taken` */
    uint64_t work_left;
    uint32_t n_states;
    state *states, *next_states; /* [width] */
    taken *taken, *next_taken;   /* [width × stride] */
    choice *choices;             /* [width] a heap, the worst first */
    uint32_t n_choices;
    seen *seen; /* [n_seen] open addressing */
    size_t n_seen;
    taken *blocked; /* [stride + most_avoids] scratch: taken and avoided, by offset */
    gap *gaps;      /* [stride + most_avoids + 1] scratch */
    node *nodes;
    size_t n_nodes, nodes_capacity;
    uint32_t free_node; /* index + 1, chained by parent; 0: none */
} beam;

/* ---- The path to a state ---- */

static uint32_t node_add(beam *b, uint32_t parent, uint32_t step, uint64_t offset)
{
    uint32_t at = b->free_node != 0 ? b->free_node - 1 : (uint32_t)b->n_nodes++;
    node *nodes = b->nodes;
    assert(at < b->nodes_capacity);
    if (b->free_node != 0) b->free_node = nodes[at].parent;
    nodes[at] = (node){offset, at, at, step, 1};
    if (step == 0) return at;
    uint32_t jump = nodes[parent].jump, far = nodes[jump].jump;
    bool equal = nodes[parent].step - nodes[jump].step == nodes[jump].step - nodes[far].step;
    nodes[at].parent = parent;
    nodes[at].jump = equal ? far : parent;
    nodes[parent].refs++;
    return at;
}

static void node_release(beam *b, uint32_t at)
{
    while (--b->nodes[at].refs == 0) {
        uint32_t parent = b->nodes[at].parent;
        bool root = parent == at;
        b->nodes[at].parent = b->free_node;
        b->free_node = at + 1;
        if (root) return;
        at = parent;
    }
}

/* The offset that was chosen at `step` on the way to node `at`. */
static uint64_t chosen_offset(const beam *b, uint32_t at, uint32_t step)
{
    while (b->nodes[at].step > step) {
        uint32_t jump = b->nodes[at].jump;
        at = b->nodes[jump].step >= step ? jump : b->nodes[at].parent;
    }
    return b->nodes[at].offset;
}

/* ---- Choices ---- */

/* splitmix64's finaliser. A collision costs a state, never a wrong offset. */
static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static uint64_t hash_taken(const taken *t) { return mix(mix(mix(t->begin + 1) + t->end) + t->until); }
static uint64_t hash_class(uint32_t step, uint64_t offset) { return mix(mix(~(uint64_t)step) ^ offset); }

static bool is_better(const choice *a, const choice *b)
{
    if (a->free_gap != b->free_gap) return a->free_gap > b->free_gap;
    if (a->offset != b->offset) return a->offset < b->offset;
    return a->state < b->state;
}

/* True the first time in a step. */
static bool is_new(beam *b, uint64_t hash, uint32_t step)
{
    size_t at = hash & (b->n_seen - 1);
    for (; b->seen[at].step == step + 1; at = (at + 1) & (b->n_seen - 1))
        if (b->seen[at].hash == hash) return false;
    b->seen[at] = (seen){hash, step + 1};
    return true;
}

/* Keep the choice if it is among the best `width`. */
static void offer(beam *b, choice c, uint32_t step)
{
    choice *heap = b->choices;
    if (!is_new(b, c.hash, step)) return;
    if (b->n_choices < b->width) {
        uint32_t at = b->n_choices++;
        for (; at > 0 && is_better(&heap[(at - 1) / 2], &c); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
        heap[at] = c;
        return;
    }
    if (!is_better(&c, &heap[0])) return;
    uint32_t at = 0;
    for (uint32_t child; (child = 2 * at + 1) < b->n_choices; at = child) {
        if (child + 1 < b->n_choices && is_better(&heap[child], &heap[child + 1])) child++;
        if (!is_better(&c, &heap[child])) break;
        heap[at] = heap[child];
    }
    heap[at] = c;
}

static uint32_t insert_taken(taken *list, uint32_t n, taken t)
{
    uint32_t at = n;
    for (; at > 0 && list[at - 1].begin > t.begin; at--) list[at] = list[at - 1];
    list[at] = t;
    return n + 1;
}

/* Gaps between what the state takes now and what the step must avoid for later. */
static uint32_t find_gaps(beam *b, const state *s, const taken *list, uint32_t step)
{
    const fsdp__placement_input *p = b->input;
    uint32_t n = s->n_taken, n_gaps = 0;
    if (p->avoid_head[step] != 0) {
        for (uint32_t i = 0; i < n; i++) b->blocked[i] = list[i];
        for (uint32_t i = p->avoid_head[step]; i != 0; i = p->avoids[i - 1].next) {
            uint32_t other = p->avoids[i - 1].step;
            uint64_t begin = chosen_offset(b, s->node, other);
            n = insert_taken(b->blocked, n, (taken){begin, begin + p->lives[p->order[other]].bytes, 0});
        }
        list = b->blocked;
    }
    uint64_t end = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (list[i].begin > end) b->gaps[n_gaps++] = (gap){end, list[i].begin};
        if (list[i].end > end) end = list[i].end;
    }
    if (b->range > end) b->gaps[n_gaps++] = (gap){end, b->range};
    return n_gaps;
}

static void offer_at(beam *b, uint32_t at, uint32_t step, uint64_t offset, uint64_t free_gap)
{
    const fsdp__placement_input *p = b->input;
    const fsdp__life *life = &p->lives[p->order[step]];
    taken t = {offset, offset + life->bytes, life->end};
    uint64_t hash = b->states[at].hash ^ hash_taken(&t);
    bool opens = p->first[step] == step, closes = p->last[p->first[step]] == step;
    if (opens != closes) hash ^= hash_class(p->first[step], offset);
    offer(b, (choice){free_gap, offset, hash, at}, step);
}

/* Offer what state `at` can do with this step's life. */
static void offer_choices(beam *b, uint32_t at, uint32_t step)
{
    const fsdp__placement_input *p = b->input;
    const state *s = &b->states[at];
    uint64_t bytes = p->lives[p->order[step]].bytes, largest = 0, second = 0;
    uint32_t n_gaps = find_gaps(b, s, b->taken + (size_t)at * b->stride, step);
    if (b->width > 1) b->work_left -= b->work_left < s->n_taken + 1u ? b->work_left : s->n_taken + 1u;
    for (uint32_t i = 0; i < n_gaps; i++) {
        uint64_t size = b->gaps[i].end - b->gaps[i].begin;
        if (size > largest) second = largest, largest = size;
        else if (size > second) second = size;
    }
    if (p->first[step] != step) {
        offer_at(b, at, step, chosen_offset(b, s->node, p->first[step]), largest);
        return;
    }
    for (uint32_t i = 0; i < n_gaps; i++) {
        uint64_t size = b->gaps[i].end - b->gaps[i].begin, other = size == largest ? second : largest;
        if (size < bytes) continue;
        uint64_t left = size - bytes > other ? size - bytes : other;
        offer_at(b, at, step, b->gaps[i].begin, left);
        if (size > bytes) offer_at(b, at, step, b->gaps[i].end - bytes, left);
    }
}

static void expire(state *s, taken *list, uint32_t position)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < s->n_taken; i++) {
        if (list[i].until >= position) list[kept++] = list[i];
        else s->hash ^= hash_taken(&list[i]);
    }
    s->n_taken = kept;
}

/* ---- A try ---- */

/* Turn the choices into the next states. */
static bool advance(beam *b, uint32_t step)
{
    const fsdp__life *life = &b->input->lives[b->input->order[step]];
    if (!fsdp__host_grow(b->input->host, &b->nodes, &b->nodes_capacity, b->n_nodes + b->n_choices, sizeof *b->nodes))
        return false;
    for (uint32_t i = 0; i < b->n_choices; i++) {
        const choice *c = &b->choices[i];
        const state *from = &b->states[c->state];
        const taken *list = b->taken + (size_t)c->state * b->stride;
        taken *next = b->next_taken + (size_t)i * b->stride;
        for (uint32_t k = 0; k < from->n_taken; k++) next[k] = list[k];
        uint32_t n = insert_taken(next, from->n_taken, (taken){c->offset, c->offset + life->bytes, life->end});
        b->next_states[i] = (state){c->hash, node_add(b, from->node, step, c->offset), n};
    }
    if (step > 0)
        for (uint32_t i = 0; i < b->n_states; i++) node_release(b, b->states[i].node);
    state *states = b->states;
    taken *lists = b->taken;
    b->states = b->next_states, b->next_states = states;
    b->taken = b->next_taken, b->next_taken = lists;
    b->n_states = b->n_choices;
    b->n_choices = 0;
    return true;
}

/* Place every life; *out_found false: no state survived, or no work is left. False: no memory. */
static bool search(beam *b, uint64_t *out_offsets, bool *out_found)
{
    const fsdp__placement_input *p = b->input;
    *out_found = false;
    b->n_states = 1;
    b->states[0] = (state){0, 0, 0};
    for (uint32_t step = 0; step < p->n; step++) {
        uint32_t position = p->lives[p->order[step]].begin;
        for (uint32_t i = 0; i < b->n_states; i++) {
            expire(&b->states[i], b->taken + (size_t)i * b->stride, position);
            offer_choices(b, i, step);
        }
        if (b->n_choices == 0 || (b->width > 1 && b->work_left == 0)) return true;
        if (!advance(b, step)) return false;
    }
    uint32_t at = b->states[0].node;
    for (uint32_t step = p->n; step-- > 0; at = b->nodes[at].parent) out_offsets[p->order[step]] = b->nodes[at].offset;
    *out_found = true;
    return true;
}

static bool try_range(fsdp__placement_input *p, uint64_t range, uint32_t width, uint64_t *out_offsets, bool *out_found)
{
    beam b = {.input = p, .range = range, .width = width, .stride = p->most_live, .n_seen = 64};
    b.work_left = p->work_left;
    size_t n_taken = (size_t)width * b.stride, n_blocked = (size_t)b.stride + p->most_avoids + 1;
    while (b.n_seen < 4 * (size_t)width * n_blocked) b.n_seen *= 2; /* at most half full: two choices a gap */
    b.states = fsdp__host_alloc(p->host, width, sizeof *b.states);
    b.next_states = fsdp__host_alloc(p->host, width, sizeof *b.states);
    b.taken = fsdp__host_alloc(p->host, n_taken, sizeof *b.taken);
    b.next_taken = fsdp__host_alloc(p->host, n_taken, sizeof *b.taken);
    b.choices = fsdp__host_alloc(p->host, width, sizeof *b.choices);
    b.seen = fsdp__host_alloc(p->host, b.n_seen, sizeof *b.seen);
    b.blocked = fsdp__host_alloc(p->host, n_blocked, sizeof *b.blocked);
    b.gaps = fsdp__host_alloc(p->host, n_blocked, sizeof *b.gaps);
    bool ok = b.states != NULL && b.next_states != NULL && b.taken != NULL && b.next_taken != NULL;
    ok = ok && b.choices != NULL && b.seen != NULL && b.blocked != NULL && b.gaps != NULL;
    ok = ok && search(&b, out_offsets, out_found);
    p->work_left = b.work_left;
    fsdp__host_free(p->host, b.nodes, b.nodes_capacity, sizeof *b.nodes);
    fsdp__host_free(p->host, b.gaps, n_blocked, sizeof *b.gaps);
    fsdp__host_free(p->host, b.blocked, n_blocked, sizeof *b.blocked);
    fsdp__host_free(p->host, b.seen, b.n_seen, sizeof *b.seen);
    fsdp__host_free(p->host, b.choices, width, sizeof *b.choices);
    fsdp__host_free(p->host, b.next_taken, n_taken, sizeof *b.taken);
    fsdp__host_free(p->host, b.taken, n_taken, sizeof *b.taken);
    fsdp__host_free(p->host, b.next_states, width, sizeof *b.states);
    fsdp__host_free(p->host, b.states, width, sizeof *b.states);
    return ok;
}

/* A place of its own for each class. */
static void place_apart(const fsdp__placement_input *p, uint64_t *out_offsets)
{
    uint64_t end = 0;
    for (uint32_t step = 0; step < p->n; step++) {
        uint32_t first = p->first[step];
        if (first != step) {
            out_offsets[p->order[step]] = out_offsets[p->order[first]];
            continue;
        }
        out_offsets[p->order[step]] = end;
        end += p->lives[p->order[step]].bytes;
    }
}

/* The least range that a try fits into. False: no memory. */
static bool find_range(fsdp__placement_input *p, uint64_t *out_offsets, uint64_t *out_range)
{
    uint64_t growth = p->live_peak / STEPS_OF_PEAK / p->alignment * p->alignment + p->alignment;
    uint64_t work = ((uint64_t)p->most_live + p->most_avoids) * p->n; /* of width 1, at most */
    for (*out_range = p->live_peak; *out_range < p->class_bytes; *out_range += growth) {
        for (uint32_t width = 1; width <= WIDTH_MAX; width = width < 64 ? width * 8 : width * 4) {
            bool found = false;
            if (width > 1 && (p->work_left == 0 || work * width > WORK_MAX / 4)) break;
            if (!try_range(p, *out_range, width, out_offsets, &found)) return false;
            if (found) return true;
        }
    }
    *out_range = p->class_bytes;
    place_apart(p, out_offsets);
    return true;
}

fsdp_status fsdp__place(const fsdp_host_allocator *host, const fsdp__life *lives, uint32_t n, uint64_t alignment,
                        uint64_t *out_offsets, fsdp__placement *out)
{
    fsdp__placement_input p = {.host = host, .lives = lives, .n = n, .alignment = alignment, .work_left = WORK_MAX};
    uint64_t range = 0;
    bool ok = fsdp__placement_input_open(&p) && find_range(&p, out_offsets, &range);
    if (ok) *out = (fsdp__placement){range, p.live_peak};
    fsdp__placement_input_close(&p);
    if (!ok) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "placing %u buffers: the host allocator returned NULL", n);
    return FSDP_OK;
}
