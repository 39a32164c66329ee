/* SPDX-License-Identifier: MIT */
#include "schedule.h"

#include <string.h>

#include "check.h"
#include "hostmem.h"

enum { MAX_DISTINCT = 65 }; /* depth is at most 64: fsdp_model_create refuses more */

const fsdp__visit *fsdp__schedule_visit(const fsdp__cursor *cursor, uint32_t i)
{
    if (i < cursor->pass.n) return &cursor->pass.visits[i];
    i -= cursor->pass.n;
    return i < cursor->next.n ? &cursor->next.visits[i] : NULL;
}

const fsdp__visit *fsdp__schedule_ahead(const fsdp__schedule *schedule, const fsdp__cursor *cursor, fsdp__ahead *state)
{
    const fsdp__visit *visit = fsdp__schedule_visit(cursor, state->position);
    if (visit == NULL) return NULL;
    if (!schedule->held[visit->unit]) {
        if (state->n_counted == schedule->depth) return NULL;
        uint64_t bytes = state->bytes + schedule->bytes[visit->unit];
        if (schedule->budget > 0 && bytes > schedule->budget) {
            state->over_budget = true;
            return NULL;
        }
        state->n_counted++;
        state->bytes = bytes;
    }
    state->position++;
    return visit;
}

bool fsdp__schedule_keeps(const fsdp__schedule *schedule, const fsdp__cursor *cursor, uint32_t unit)
{
    uint32_t other[MAX_DISTINCT], n_others = 0;
    uint64_t bytes = schedule->bytes[unit];
    for (uint32_t i = cursor->at;; i++) {
        const fsdp__visit *visit = fsdp__schedule_visit(cursor, i);
        if (visit == NULL) return false;
        if (visit->unit == unit) return n_others == 0 || schedule->budget == 0 || bytes <= schedule->budget;
        if (schedule->held[visit->unit]) continue;
        uint32_t k = 0;
        while (k < n_others && other[k] != visit->unit) k++;
        if (k < n_others) continue;
        if (n_others == schedule->depth) return false;
        other[n_others++] = visit->unit;
        bytes += schedule->bytes[visit->unit];
    }
}

/* What fsdp__schedule_lives carries along. */
typedef struct walk {
    const fsdp__schedule *schedule;
    fsdp__cursor cursor;
    fsdp__lives *lives;
    int32_t *in_life; /* of each unit: the life that it is in; -1: not gathered */
    uint32_t *open;   /* visits whose windows are open, oldest first */
    uint32_t n_open;
} walk;

static void gather(walk *w, uint32_t unit, uint32_t now)
{
    if (w->schedule->held[unit] || w->in_life[unit] >= 0) return;
    fsdp__lives *lives = w->lives;
    lives->life[lives->n] = (fsdp__life){now, UINT32_MAX, -1, w->schedule->bytes[unit]};
    lives->unit[lives->n] = unit;
    w->in_life[unit] = (int32_t)lives->n++;
}

static bool is_open(const walk *w, uint32_t unit)
{
    for (uint32_t k = 0; k < w->n_open; k++)
        if (w->cursor.pass.visits[w->open[k]].unit == unit) return true;
    return false;
}

/* Close the windows that end with visit `now`, and end the lives of units that are not kept. */
static void close_windows(walk *w, uint32_t now)
{
    const fsdp__visit *visits = w->cursor.pass.visits;
    for (uint32_t k = w->n_open; k-- > 0;) {
        uint32_t unit = visits[w->open[k]].unit;
        if (visits[w->open[k]].until > now) continue;
        memmove(&w->open[k], &w->open[k + 1], (w->n_open - k - 1) * sizeof *w->open);
        w->n_open--;
        if (w->in_life[unit] < 0 || is_open(w, unit) || fsdp__schedule_keeps(w->schedule, &w->cursor, unit)) continue;
        w->lives->life[w->in_life[unit]].end = now;
        w->in_life[unit] = -1;
    }
}

static void walk_pass(walk *w)
{
    uint32_t n = w->cursor.pass.n;
    for (uint32_t now = 0; now < n; now++) {
        uint32_t unit = w->cursor.pass.visits[now].unit;
        gather(w, unit, now);
        w->lives->visit_life[now] = w->in_life[unit];
        w->open[w->n_open++] = now;
        w->cursor.at = now + 1;
        fsdp__ahead ahead = {.position = now + 1};
        const fsdp__visit *visit;
        while ((visit = fsdp__schedule_ahead(w->schedule, &w->cursor, &ahead)) != NULL && ahead.position <= n)
            gather(w, visit->unit, now);
        close_windows(w, now);
    }
    for (uint32_t i = 0; i < w->lives->n; i++)
        if (w->lives->life[i].end == UINT32_MAX) w->lives->life[i].end = n - 1;
}

fsdp_status fsdp__schedule_lives(const fsdp_host_allocator *host, const fsdp__schedule *schedule,
                                 const fsdp__cursor *start, uint32_t n_units, fsdp__lives *lives)
{
    uint32_t n = start->pass.n;
    walk w = {.schedule = schedule, .cursor = *start, .lives = lives};
    w.in_life = fsdp__host_alloc(host, n_units, sizeof *w.in_life);
    w.open = fsdp__host_alloc(host, n, sizeof *w.open);
    fsdp_status status = FSDP_OK;
    if (w.in_life == NULL || w.open == NULL) {
        status = fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "schedule of %u visits: no host memory", n);
    } else {
        for (uint32_t u = 0; u < n_units; u++) w.in_life[u] = -1;
        lives->n = 0;
        walk_pass(&w);
    }
    fsdp__host_free(host, w.open, n, sizeof *w.open);
    fsdp__host_free(host, w.in_life, n_units, sizeof *w.in_life);
    return status;
}

/* From position i in steps of `step`, the first visit that is neither held nor of `unit`; -1 or n at the ends. *n_visits: of
 * `unit`, on the way. */
static int32_t next_group(const fsdp__schedule *schedule, fsdp__visit_list pass, int32_t i, int32_t step, uint32_t unit,
                          uint32_t *n_visits)
{
    for (*n_visits = 0; i >= 0 && i < (int32_t)pass.n; i += step) {
        if (schedule->held[pass.visits[i].unit]) continue;
        if (pass.visits[i].unit != unit) break;
        ++*n_visits;
    }
    return i;
}

int32_t fsdp__schedule_mirror(const fsdp__schedule *schedule, fsdp__visit_list pass)
{
    for (uint32_t i = 0; i < pass.n; i++)
        if (!schedule->held[pass.visits[i].unit] && pass.visits[i].until != i) return -1;
    /* Visits of one unit in a row are one group; the groups must read the same from both ends, so their number is odd. Where
     * one is shorter on the way back, units come closer together there, and more of them are gathered at a time. */
    uint32_t n_low, n_high;
    int32_t low = next_group(schedule, pass, 0, 1, UINT32_MAX, &n_low),
            high = next_group(schedule, pass, (int32_t)pass.n - 1, -1, UINT32_MAX, &n_high);
    while (low <= high) {
        uint32_t unit = pass.visits[low].unit;
        if (unit != pass.visits[high].unit) return -1;
        int32_t inner = next_group(schedule, pass, low, 1, unit, &n_low);
        if (inner > high) return high;
        low = inner;
        high = next_group(schedule, pass, high, -1, unit, &n_high);
        if (n_high < n_low) return -1;
    }
    return -1;
}
