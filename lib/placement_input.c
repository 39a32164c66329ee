/* SPDX-License-Identifier: MIT */
#include "placement_input.h"

#include <assert.h>

#include "hostmem.h"

static bool comes_before(const fsdp__life *lives, uint32_t a, uint32_t b)
{
    if (lives[a].begin != lives[b].begin) return lives[a].begin < lives[b].begin;
    if (lives[a].bytes != lives[b].bytes) return lives[a].bytes > lives[b].bytes;
    return a < b;
}

static void sift_order(const fsdp__life *lives, uint32_t *order, uint32_t n, uint32_t at)
{
    uint32_t moved = order[at];
    for (uint32_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && comes_before(lives, order[child], order[child + 1])) child++;
        if (!comes_before(lives, moved, order[child])) break;
        order[at] = order[child];
    }
    order[at] = moved;
}

/* Heapsort: in place, and the order is total. */
static void sort_order(const fsdp__life *lives, uint32_t *order, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) order[i] = i;
    for (uint32_t i = n / 2; i-- > 0;) sift_order(lives, order, n, i);
    for (uint32_t left = n; left-- > 1;) {
        uint32_t top = order[0];
        order[0] = order[left];
        order[left] = top;
        sift_order(lives, order, left, 0);
    }
}

/* Fill first, last and class_bytes. root: scratch of n, life → step that chooses for its class, plus one. */
static void find_classes(fsdp__placement_input *p, uint32_t *root, uint32_t *chooser)
{
    for (uint32_t i = 0; i < p->n; i++) {
        int32_t same = p->lives[i].same_as;
        assert(same < 0 || ((uint32_t)same < i && p->lives[same].bytes == p->lives[i].bytes));
        root[i] = same < 0 ? i : root[same];
    }
    for (uint32_t step = 0; step < p->n; step++) {
        uint32_t class = root[p->order[step]];
        if (chooser[class] == 0) {
            chooser[class] = step + 1;
            p->class_bytes += p->lives[p->order[step]].bytes;
        }
        p->first[step] = chooser[class] - 1;
        p->last[p->first[step]] = step;
    }
}

/* Steps a and b are live together. If both choose, they meet when the later one does; else its chooser must know. */
static bool note_meeting(fsdp__placement_input *p, uint32_t a, uint32_t b)
{
    uint32_t early = p->first[a], late = p->first[b];
    assert(early != late); /* lives of one class are not live together */
    if (early == late || (early == a && late == b)) return true;
    if (early > late) early = p->first[b], late = p->first[a];
    if (!fsdp__host_grow(p->host, &p->avoids, &p->avoids_capacity, p->n_avoids + 1, sizeof *p->avoids)) return false;
    p->avoids[p->n_avoids] = (fsdp__avoid){early, p->avoid_head[late]};
    p->avoid_head[late] = (uint32_t)++p->n_avoids;
    return true;
}

/* Walk the positions once: live peak, most lives at a time, and who must avoid whom. live: scratch of n. */
static bool sweep(fsdp__placement_input *p, uint32_t *live)
{
    uint32_t n_live = 0;
    uint64_t bytes = 0;
    for (uint32_t step = 0; step < p->n; step++) {
        const fsdp__life *life = &p->lives[p->order[step]];
        uint32_t kept = 0;
        for (uint32_t i = 0; i < n_live; i++) {
            const fsdp__life *other = &p->lives[p->order[live[i]]];
            if (other->end < life->begin) {
                bytes -= other->bytes;
                continue;
            }
            live[kept++] = live[i];
            if (!note_meeting(p, live[i], step)) return false;
        }
        n_live = kept;
        live[n_live++] = step;
        bytes += life->bytes;
        if (bytes > p->live_peak) p->live_peak = bytes;
        if (n_live > p->most_live) p->most_live = n_live;
    }
    for (uint32_t step = 0; step < p->n; step++) {
        uint32_t count = 0;
        for (uint32_t i = p->avoid_head[step]; i != 0; i = p->avoids[i - 1].next) count++;
        if (count > p->most_avoids) p->most_avoids = count;
    }
    return true;
}

void fsdp__placement_input_close(fsdp__placement_input *p)
{
    fsdp__host_free(p->host, p->order, p->n, sizeof *p->order);
    fsdp__host_free(p->host, p->first, p->n, sizeof *p->first);
    fsdp__host_free(p->host, p->last, p->n, sizeof *p->last);
    fsdp__host_free(p->host, p->avoid_head, p->n, sizeof *p->avoid_head);
    fsdp__host_free(p->host, p->avoids, p->avoids_capacity, sizeof *p->avoids);
}

bool fsdp__placement_input_open(fsdp__placement_input *p)
{
    p->order = fsdp__host_alloc(p->host, p->n, sizeof *p->order);
    p->first = fsdp__host_alloc(p->host, p->n, sizeof *p->first);
    p->last = fsdp__host_alloc(p->host, p->n, sizeof *p->last);
    p->avoid_head = fsdp__host_alloc(p->host, p->n, sizeof *p->avoid_head);
    uint32_t *scratch = fsdp__host_alloc(p->host, p->n, 2 * sizeof *scratch);
    bool ok = p->order != NULL && p->first != NULL && p->last != NULL && p->avoid_head != NULL && scratch != NULL;
    if (ok) {
        sort_order(p->lives, p->order, p->n);
        find_classes(p, scratch, scratch + p->n);
        ok = sweep(p, scratch);
    }
    fsdp__host_free(p->host, scratch, p->n, 2 * sizeof *scratch);
    return ok;
}
