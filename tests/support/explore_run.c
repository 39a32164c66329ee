/* SPDX-License-Identifier: MIT */
/* Queues and steps. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "explore_parts.h"
#include "hash.h"
#include "monotonic.h"

enum { MAX_BACKLOG = 1024, MAX_QUERIES = 16 };

uint64_t explore__now(explore *x)
{
    if (!x->config.free_threads) return x->clock_ns;
    return fsdp__now_ns();
}

void explore__wake(explore *x)
{
    if (x->n_waiting > 0) pthread_cond_broadcast(&x->changed);
}

/* ---- The queue ---- */

bool explore__idle(const void *stream)
{
    const explore_stream *s = stream;
    return s->head == s->tail;
}

void explore__point_release(explore *x, explore_point *point)
{
    if (point == NULL || --point->refs > 0) return;
    point->next_free = x->free_points;
    x->free_points = point;
}

void explore__over(explore_stream *s)
{
    explore *x = s->dev->x;
    if (x->n_freed > 0) explore__freed_over(s);
    s->head++;
    s->begun = s->dropped = false;
    s->free_since_ns = explore__now(x);
    x->backlog--;
}

static bool make_room(explore_stream *s)
{
    if (s->tail - s->head < s->capacity) return true;
    size_t capacity = s->capacity * 2;
    explore_item *ring = malloc(capacity * sizeof *ring);
    explore_reach *reach = malloc(capacity * sizeof *reach);
    if (ring == NULL || reach == NULL) {
        free(ring);
        free(reach);
        return false;
    }
    for (uint64_t i = s->head; i < s->tail; i++) {
        ring[i & (capacity - 1)] = *explore__item(s, i);
        reach[i & (capacity - 1)] = s->reach[i & (s->capacity - 1)];
    }
    free(s->ring);
    free(s->reach);
    s->ring = ring;
    s->reach = reach;
    s->capacity = capacity;
    return true;
}

fsdp_status explore__push(explore_stream *s, explore_item item)
{
    explore_device *dev = s->dev;
    explore *x = dev->x;
    FSDP_TRY(explore__device_check(dev));
    if (!make_room(s))
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "stream's queue: no host memory to grow beyond %zu operations",
                          s->capacity);
    if (s->head == s->tail) s->free_since_ns = explore__now(x);
    item.number = x->n_items++;
    item.given_ns = explore__now(x);
    s->reach[s->tail & (s->capacity - 1)] = explore__reach(&item);
    *explore__item(s, s->tail++) = item;
    x->backlog++;
    explore__wake(x);
    return FSDP_OK;
}

/* ---- Errors ---- */

fsdp_status explore__device_check(const explore_device *dev)
{
    return dev->status == FSDP_OK ? FSDP_OK : fsdp__fail(dev->status, "%s", dev->sentence);
}

/* An entry is taken off before it is dealt with: that may come back here. */
static void skip_stream(explore_stream *s)
{
    explore *x = s->dev->x;
    while (s->head < s->tail) {
        explore_item item = *explore__head(s);
        if (s->begun && (s->calling || item.kind == EXPLORE_GROUP)) return;
        explore__over(s);
        if (item.kind == EXPLORE_GROUP) {
            explore__group_skip(item.u.group, s->dev->sentence);
            explore__group_release(item.u.group);
        } else if (item.kind != EXPLORE_OPERATION) {
            explore__point_release(x, item.u.point); /* not reached: who waits for it looks at the device too */
        }
    }
}

void explore__device_break(explore_device *dev, fsdp_status status, const char *sentence)
{
    if (dev->status != FSDP_OK) return;
    dev->status = status;
    snprintf(dev->sentence, sizeof dev->sentence, "%s", sentence);
}

void explore__device_skip(explore_device *dev)
{
    explore *x = dev->x;
    for (uint32_t i = 0; i < x->n_streams; i++)
        if (x->streams[i]->dev == dev) skip_stream(x->streams[i]);
    explore__wake(x);
}

void explore__device_fail(explore_device *dev, fsdp_status status, const char *sentence)
{
    explore__device_break(dev, status, sentence);
    explore__device_skip(dev);
}

/* ---- Steps ---- */

static bool can_step(explore_stream *s)
{
    if (s->head == s->tail) return false;
    const explore_item *head = explore__head(s);
    switch (head->kind) {
    case EXPLORE_OPERATION:
        if (!s->begun) return true;
        if (s->calling) return false;
        return !s->dev->x->config.free_threads || explore__now(s->dev->x) >= s->not_before_ns;
    case EXPLORE_WAIT: return head->u.point == NULL || head->u.point->reached;
    case EXPLORE_GROUP:
        return s->begun ? explore__group_can_end(s, head->u.group) : explore__group_can_begin(head->u.group);
    default: return true;
    }
}

static void write_span(fsdp_span *span, uint64_t start_ns, uint64_t end_ns)
{
    if (span != NULL) *span = (fsdp_span){start_ns, end_ns};
}

static void step_event(explore_stream *s)
{
    explore *x = s->dev->x;
    explore_item item = *explore__head(s);
    uint64_t now = explore__now(x), since = s->free_since_ns > item.given_ns ? s->free_since_ns : item.given_ns;
    if (item.kind == EXPLORE_RECORD) item.u.point->reached = true;
    write_span(item.span, item.kind == EXPLORE_RECORD ? now : since, now);
    explore__over(s);
    explore__point_release(x, item.u.point);
}

static void *call_main(void *arg)
{
    explore_stream *s = arg;
    explore *x = s->dev->x;
    pthread_mutex_lock(&x->lock);
    fsdp_device_op op = explore__head(s)->u.op;
    pthread_mutex_unlock(&x->lock);
    op.u.host_call.fn(op.u.host_call.arg);
    pthread_mutex_lock(&x->lock);
    s->calling = false;
    explore__wake(x);
    pthread_mutex_unlock(&x->lock);
    return NULL;
}

/* Whole: what a host call touches is not known, so that its beginning and its end are one step. */
static void host_call(explore_stream *s, fsdp_device_op op)
{
    explore *x = s->dev->x;
    s->calling = true;
    if (!x->config.free_threads) {
        pthread_mutex_unlock(&x->lock);
        op.u.host_call.fn(op.u.host_call.arg);
        pthread_mutex_lock(&x->lock);
        s->calling = false;
    } else if (pthread_create(&s->caller, NULL, call_main, s) == 0) {
        s->has_caller = true;
    } else {
        s->calling = false;
        explore__device_fail(s->dev, FSDP_ERR_DEVICE, "host call: pthread_create failed");
    }
}

static void end_operation(explore_stream *s)
{
    explore *x = s->dev->x;
    explore_item item = *explore__head(s);
    if (s->has_caller) {
        pthread_join(s->caller, NULL); /* it lets go of the lock for the last time before `calling` can be seen */
        s->has_caller = false;
    }
    if (s->dev->status == FSDP_OK) {
        if (s->not_before_ns > x->clock_ns) x->clock_ns = s->not_before_ns;
        if (item.u.op.kind != FSDP_OPERATION_HOST_CALL && !s->dropped) explore__op_end(s, &item.u.op);
        write_span(item.span, s->start_ns, explore__now(x));
    }
    explore__over(s);
    if (s->dev->status != FSDP_OK) skip_stream(s);
}

static void step_operation(explore_stream *s)
{
    explore *x = s->dev->x;
    explore_item item = *explore__head(s); /* a copy: a host call may give more, and the ring move */
    if (s->begun) {
        end_operation(s);
        return;
    }
    s->begun = true;
    s->start_ns = s->not_before_ns = explore__now(x);
    switch (item.u.op.kind) {
    case FSDP_OPERATION_DELAY:
        if (__builtin_add_overflow(s->start_ns, item.u.op.u.delay.ns, &s->not_before_ns)) s->not_before_ns = UINT64_MAX;
        break;
    case FSDP_OPERATION_HOST_CALL:
        host_call(s, item.u.op);
        if (!x->config.free_threads) end_operation(s);
        break;
    default:
        if (x->n_freed > 0) explore__freed_begin(x, &item);
        s->dropped = !explore__check_ranges(s, &item);
        if (!s->dropped) explore__op_begin(s, &item.u.op);
    }
}

static void step_group(explore_stream *s)
{
    explore *x = s->dev->x;
    explore_group *group = explore__head(s)->u.group;
    if (s->begun) {
        explore__group_end(s, group);
        return;
    }
    if (x->n_freed > 0) explore__freed_begin(x, explore__head(s));
    explore__group_begin(s, group);
}

bool explore__step(explore *x, bool may_go_on)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < x->n_streams; i++)
        if (can_step(x->streams[i])) x->can[n++] = x->streams[i];
    if (n == 0) return false;
    explore_stream *s = explore__choose(x, n, may_go_on);
    if (s == NULL) return false;
    x->n_steps++;
    x->n_queries = 0;
    x->clock_ns++;
    x->hash = fsdp__mix(x->hash ^ ((uint64_t)s->number << 48 ^ s->head << 1 ^ (uint64_t)s->begun));
    switch (explore__head(s)->kind) {
    case EXPLORE_OPERATION: step_operation(s); break;
    case EXPLORE_GROUP: step_group(s); break;
    default: step_event(s); break;
    }
    explore__wake(x);
    return true;
}

void explore__pause(explore *x)
{
    if (x->eager) return;
    while (explore__step(x, x->backlog < MAX_BACKLOG)) {
    }
}

void explore__query(explore *x)
{
    explore__pause(x);
    /* Who asks again and again waits: it must come true some day. */
    if (x->n_queries++ < MAX_QUERIES || explore__step(x, false) || x->config.free_threads) return;
    explore__yield(x, x->n_queries < MAX_QUERIES * MAX_QUERIES * x->n_hosts);
}
