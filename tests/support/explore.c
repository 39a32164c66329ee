/* SPDX-License-Identifier: MIT */
#include "explore_parts.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hash.h"
#include "monotonic.h"

enum { DEFAULT_STEPS = 1000 };
static const char digits[] = "0123456789abcdefghijklmnopqrstuvwxyz";

void explore__complain(explore *x, const char *format, ...)
{
    if (x->complaint[0] != 0) return;
    va_list args;
    va_start(args, format);
    vsnprintf(x->complaint, sizeof x->complaint, format, args);
    va_end(args);
}

bool explore__grow(void *array, size_t *capacity, size_t needed, size_t each)
{
    if (needed <= *capacity) return true;
    size_t wanted = *capacity == 0 ? 64 : *capacity * 2;
    if (wanted < needed) wanted = needed;
    void *old;
    memcpy(&old, array, sizeof old);
    void *grown = realloc(old, wanted * each);
    if (grown == NULL) return false;
    memcpy(array, &grown, sizeof grown);
    *capacity = wanted;
    return true;
}

uint64_t explore__random(explore *x) { return fsdp__mix(x->random++); }

/* ---- The schedule: "r" or "e" (every order), then picks in base 36; "_40." is one beyond, "3*12." one twelve times ---- */

static void note_pick(explore *x, uint32_t pick)
{
    if (x->n_picks > 0 && x->picks[x->n_picks - 1].pick == pick && x->picks[x->n_picks - 1].times < UINT16_MAX) {
        x->picks[x->n_picks - 1].times++;
        return;
    }
    if (!explore__grow(&x->picks, &x->capacity_picks, x->n_picks + 1, sizeof *x->picks)) {
        explore__complain(x, "no host memory for the schedule");
        return;
    }
    x->picks[x->n_picks++] = (explore_run_length){(uint16_t)pick, 1};
}

static size_t write_pick(char *text, explore_run_length run)
{
    char pick[16], times[16] = "";
    if (run.pick < 36) snprintf(pick, sizeof pick, "%c", digits[run.pick]);
    else snprintf(pick, sizeof pick, "_%u.", run.pick);
    if (run.times == 2 && run.pick < 36) snprintf(times, sizeof times, "%s", pick);
    else if (run.times > 1) snprintf(times, sizeof times, "*%u.", run.times);
    return (size_t)sprintf(text, "%s%s", pick, times);
}

const char *explore_schedule(explore *x)
{
    pthread_mutex_lock(&x->lock);
    char *text = realloc(x->text, x->n_picks * 32 + 2);
    if (text != NULL) {
        x->text = text;
        *text++ = x->eager ? 'e' : 'r';
        for (size_t i = 0; i < x->n_picks; i++) text += write_pick(text, x->picks[i]);
        *text = 0;
    }
    pthread_mutex_unlock(&x->lock);
    return text != NULL ? x->text : "";
}

/* "123." */
static bool read_number(const char **at, uint16_t *out)
{
    char *end;
    unsigned long value = strtoul(*at, &end, 10);
    if (end == *at || *end != '.' || value > UINT16_MAX) return false;
    *at = end + 1;
    *out = (uint16_t)value;
    return true;
}

static bool read_schedule(explore *x, const char *text)
{
    size_t capacity = 0;
    if (text == NULL || (*text != 'r' && *text != 'e')) return false;
    x->eager = *text++ == 'e';
    while (*text != 0) {
        explore_run_length run = {0, 1};
        const char *digit = strchr(digits, *text);
        if (digit != NULL) run.pick = (uint16_t)(digit - digits);
        else if (*text != '_') return false;
        text++;
        if (digit == NULL && !read_number(&text, &run.pick)) return false;
        if (*text == '*' && (text++, !read_number(&text, &run.times))) return false;
        if (run.times == 0) return false;
        if (!explore__grow(&x->given, &capacity, x->n_given + 1, sizeof *x->given)) return false;
        x->given[x->n_given++] = run;
    }
    return true;
}

static uint32_t next_given(explore *x)
{
    if (x->at_given == x->n_given) return 0;
    explore_run_length run = x->given[x->at_given];
    if (++x->used_given == run.times) x->at_given++, x->used_given = 0;
    return run.pick;
}

/* ---- Policies. Each picks one of x->can[0 … n), or n: the host goes on ---- */

static bool may_step(const explore *x, const explore_stream *s)
{
    const explore_item *head = explore__head(s);
    switch (x->config.policy) {
    case EXPLORE_STARVE: return s->number != x->config.target;
    case EXPLORE_SLOW_COMM: return head->kind != EXPLORE_GROUP || !s->begun;
    case EXPLORE_SLOW_COMPUTE:
        if (s->high_priority || head->kind != EXPLORE_OPERATION) return true;
        return !s->begun && (head->u.op.kind != FSDP_OPERATION_HOST_CALL || x->config.free_threads);
    default: return true;
    }
}

/* The more the device has to do, the more likely it does some of it. */
static bool host_goes_on(explore *x) { return explore__random(x) % (x->backlog + x->backlog_scale) >= x->backlog; }

static uint32_t pick_at_random(explore *x, uint32_t n, bool may_go_on)
{
    uint32_t n_may = 0;
    for (uint32_t i = 0; i < n; i++) n_may += may_step(x, x->can[i]);
    if (may_go_on && (n_may == 0 || host_goes_on(x))) return n;
    if (n_may == 0) return (uint32_t)(explore__random(x) % n);
    uint64_t k = explore__random(x) % n_may;
    uint32_t i = 0;
    while (!may_step(x, x->can[i]) || k-- > 0) i++;
    return i;
}

/* What has begun ends first, so that operations are whole; a collective may have to let others begin. */
static uint32_t pick_in_order(const explore *x, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 0; i < n; i++) {
        const explore_stream *s = x->can[i];
        if (s->begun && explore__head(s)->kind == EXPLORE_OPERATION) return i;
        if (explore__head(s)->number < explore__head(x->can[best])->number) best = i;
    }
    return best;
}

/* Burckhardt et al., ASPLOS 2010, with streams and the host as the threads. */
static uint32_t pick_by_priority(explore *x, uint32_t n, bool may_go_on)
{
    uint32_t best = may_go_on ? n : 0;
    uint64_t priority = may_go_on ? x->host_priority : x->can[0]->priority;
    for (uint32_t i = 0; i < n; i++)
        if (x->can[i]->priority > priority) best = i, priority = x->can[i]->priority;
    if (x->n_drops > 0 && x->drop_at[x->n_drops - 1] <= x->n_steps) {
        /* Below everybody, and below those that have fallen before. */
        *(best == n ? &x->host_priority : &x->can[best]->priority) = --x->n_drops;
        return pick_by_priority(x, n, may_go_on);
    }
    return best;
}

static uint32_t pick_by_policy(explore *x, uint32_t n, bool may_go_on)
{
    switch (x->config.policy) {
    case EXPLORE_IN_ORDER: return pick_in_order(x, n);
    case EXPLORE_PCT: return pick_by_priority(x, n, may_go_on);
    default: return pick_at_random(x, n, may_go_on);
    }
}

/* Written down as 0 for the host, where it may go on, and then the streams. */
explore_stream *explore__choose(explore *x, uint32_t n, bool may_go_on)
{
    explore_stream *at_once = x->eager ? explore__find_eager(x, n) : NULL;
    if (at_once != NULL) return at_once;
    uint32_t n_picks = n + may_go_on, pick;
    if (n_picks == 1 && x->path == NULL) return x->can[0];
    if (x->path != NULL) {
        pick = explore__pick_of_path(x, n);
    } else if (x->config.policy == EXPLORE_REPLAY) {
        pick = next_given(x);
    } else {
        uint32_t stream = pick_by_policy(x, n, may_go_on);
        pick = !may_go_on ? stream : stream == n ? 0 : stream + 1;
    }
    if (pick >= n_picks) {
        explore__complain(x, "the schedule picks %u of %u: it is of another program", pick, n_picks);
        pick = 0;
    }
    if (n_picks > 1) note_pick(x, pick);
    if (may_go_on && pick == 0) return NULL;
    return x->can[pick - may_go_on];
}

/* ---- Opening ---- */

static void set_up_policy(explore *x)
{
    const explore_config *c = &x->config;
    static const uint64_t scales[] = {4, 32, 256};
    x->random = fsdp__mix(c->seed ^ (uint64_t)c->policy << 56);
    x->backlog_scale = scales[explore__random(x) % 3];
    x->host_priority = explore__random(x) | 1ull << 32;
    if (c->policy != EXPLORE_PCT) return;
    uint64_t steps = c->steps != 0 ? c->steps : DEFAULT_STEPS;
    x->n_drops = c->depth > 1 ? c->depth - 1 : 0;
    if (x->n_drops > sizeof x->drop_at / sizeof *x->drop_at) x->n_drops = sizeof x->drop_at / sizeof *x->drop_at;
    for (uint64_t i = 0; i < x->n_drops; i++) {
        uint64_t at = explore__random(x) % steps, k = i;
        for (; k > 0 && x->drop_at[k - 1] < at; k--) x->drop_at[k] = x->drop_at[k - 1]; /* the last one first */
        x->drop_at[k] = at;
    }
}

explore *explore_open(const explore_config *config)
{
    if (config->world == 0 || config->world > EXPLORE_RANKS || config->policy > EXPLORE_REPLAY) return NULL;
    explore *x = calloc(1, sizeof *x);
    if (x == NULL) return NULL;
    x->config = *config;
    x->config.schedule = NULL;
    if (config->policy == EXPLORE_REPLAY && !read_schedule(x, config->schedule)) {
        free(x->given);
        free(x);
        return NULL;
    }
    set_up_policy(x);
    x->clock_ns = 1;
    x->n_hosts = 1;
    pthread_mutex_init(&x->lock, NULL);
    fsdp__cond_init(&x->changed);
    for (uint32_t r = 0; r < EXPLORE_RANKS; r++) pthread_cond_init(&x->host[r].turn, NULL);
    return x;
}

void explore_close(explore *x)
{
    if (x == NULL) return;
    explore__freed_drop(x, NULL, (char *)UINTPTR_MAX);
    explore__blocks_close(x);
    while (x->free_points != NULL) {
        explore_point *point = x->free_points;
        x->free_points = point->next_free;
        free(point);
    }
    for (uint32_t r = 0; r < EXPLORE_RANKS; r++) pthread_cond_destroy(&x->host[r].turn);
    pthread_cond_destroy(&x->changed);
    pthread_mutex_destroy(&x->lock);
    free(x->streams);
    free(x->can);
    free(x->blocks);
    free(x->freed);
    free(x->picks);
    free(x->given);
    free(x->text);
    free(x);
}

/* ---- What can be asked ---- */

uint64_t explore_hash(const explore *x) { return x->hash; }
uint64_t explore_steps(const explore *x) { return x->n_steps; }
const char *explore_complaint(const explore *x) { return x->complaint[0] != 0 ? x->complaint : NULL; }
