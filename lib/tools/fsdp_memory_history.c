/* SPDX-License-Identifier: MIT */
/* The bytes of a pool over its last events: allocated as an area, reserved as a line, and marks where it grew, trimmed,
 * evicted, waited or had no room. An event is a step to the right; events that share a pixel show their extremes. */
#include "fsdp_memory_svg.h"

enum {
    MARKS = 16,           /* height of the line of marks above the curves */
    CURVES = 84,          /* of the curves */
    BELOW = 34,           /* of marks of waits and numbers of events under them */
    MOST_LINES_DOWN = 24, /* out of memory: more of them would hide the curves */
    BUCKET = 7,           /* px in which marks of a kind are one */
    WIDTH = FSDP__PAGE_RIGHT - FSDP__PAGE_LEFT
};

typedef struct chart {
    FILE *file;
    const fsdp__snapshot_pool *pool;
    double y, px_per_event, px_per_byte;
} chart;

double fsdp__history_height(const fsdp__snapshot_pool *pool)
{
    return pool->n_events == 0 ? 16 : MARKS + CURVES + BELOW;
}

static double bottom(const chart *c) { return c->y + MARKS + CURVES; }
static double y_of(const chart *c, uint64_t bytes) { return bottom(c) - (double)bytes * c->px_per_byte; }
static double x_of(const chart *c, size_t i) { return FSDP__PAGE_LEFT + (double)i * c->px_per_event; }

static uint64_t level(const fsdp__snapshot_event *event, bool reserved)
{
    return reserved ? event->reserved : event->allocated;
}

/* The steps of one curve, with at most three corners a pixel. */
static void put_steps(const chart *c, bool reserved)
{
    const fsdp__snapshot_event *events = c->pool->events;
    for (size_t i = 0; i < c->pool->n_events;) {
        uint64_t least = level(&events[i], reserved), most = least;
        double x = x_of(c, i);
        for (; i < c->pool->n_events && (int)x_of(c, i) == (int)x; i++) {
            uint64_t now = level(&events[i], reserved);
            if (now < least) least = now;
            if (now > most) most = now;
        }
        uint64_t last = level(&events[i - 1], reserved);
        fprintf(c->file, "H%sV%s", fsdp__svg_px(x).text, fsdp__svg_px(y_of(c, most)).text);
        if (least != most)
            fprintf(c->file, "V%sV%s", fsdp__svg_px(y_of(c, least)).text, fsdp__svg_px(y_of(c, last)).text);
    }
    fprintf(c->file, "H%d", FSDP__PAGE_RIGHT);
}

static void draw_curves(const chart *c)
{
    const fsdp__snapshot_event *first = c->pool->events;
    fprintf(c->file, "<path class=\"al\" d=\"M%d %sV%s", FSDP__PAGE_LEFT, fsdp__svg_px(bottom(c)).text,
            fsdp__svg_px(y_of(c, first->allocated)).text);
    put_steps(c, false);
    fprintf(c->file, "V%sz\"/>\n<path class=\"re\" d=\"M%d %s", fsdp__svg_px(bottom(c)).text, FSDP__PAGE_LEFT,
            fsdp__svg_px(y_of(c, first->reserved)).text);
    put_steps(c, true);
    fputs("\"/>\n", c->file);
}

/* A line at some bytes, with its words at the left. */
static void draw_level(const chart *c, const char *line, const char *words, uint64_t bytes, double words_y)
{
    const fsdp__svg_text y = fsdp__svg_px(y_of(c, bytes));
    fprintf(c->file, "<path class=\"%s\" d=\"M%d %sH%d\"/>", line, FSDP__PAGE_LEFT, y.text, FSDP__PAGE_RIGHT);
    fprintf(c->file, "<text class=\"e g\" x=\"%d\" y=\"%s\">%s%s</text>\n", FSDP__PAGE_LEFT - 6,
            fsdp__svg_px(words_y).text, words, fsdp__svg_bytes(bytes).text);
}

static void draw_axes(const chart *c, uint64_t top)
{
    const fsdp__snapshot_pool *pool = c->pool;
    draw_level(c, "a", "", 0, bottom(c) + 4);
    double peak_y = y_of(c, pool->allocated_peak), top_y = c->y + MARKS;
    if (peak_y - top_y >= 14 || pool->allocated_peak == 0) draw_level(c, "a", "", top, top_y + 4);
    if (pool->allocated_peak > 0)
        draw_level(c, "pk", "peak ", pool->allocated_peak, peak_y + 4 > bottom(c) - 10 ? bottom(c) - 10 : peak_y + 4);
    size_t step = 1 + (pool->n_events - 1) / 10;
    for (size_t i = 0; i < pool->n_events; i += step)
        fprintf(c->file, "<text class=\"g\" x=\"%s\" y=\"%s\">%llu</text>", fsdp__svg_px(x_of(c, i)).text,
                fsdp__svg_px(bottom(c) + 30).text, (unsigned long long)pool->events[i].n);
    fprintf(c->file, "<text class=\"e g\" x=\"%d\" y=\"%s\">event</text>\n", FSDP__PAGE_LEFT - 6,
            fsdp__svg_px(bottom(c) + 30).text);
}

void fsdp__history_mark(FILE *file, fsdp__event_kind kind, double x, double y)
{
    static const struct {
        const char *style, *path; /* around 0, 0 */
    } marks[FSDP__EVENT_KINDS] = {
        [FSDP__EVENT_WAIT] = {"stroke:#2b6cb0;stroke-width:1.6", "M0 -5V5"},
        [FSDP__EVENT_GROW] = {"fill:#2f855a", "M0 -5L5 4H-5z"},
        [FSDP__EVENT_TRIM] = {"fill:#66727f", "M0 5L5 -4H-5z"},
        [FSDP__EVENT_EVICT] = {"fill:#805ad5", "M0 -6L5 0L0 6L-5 0z"},
        [FSDP__EVENT_OUT_OF_MEMORY] = {"stroke:#c53030;stroke-width:2.4", "M-4 -4L4 4M-4 4L4 -4"},
    };
    fprintf(file, "<path style=\"%s\" transform=\"translate(%s %s)\" d=\"%s\"/>", marks[kind].style,
            fsdp__svg_px(x).text, fsdp__svg_px(y).text, marks[kind].path);
}

static void put_mark_title(const chart *c, size_t from, size_t to, size_t n)
{
    const fsdp__snapshot_event *event = &c->pool->events[from];
    const char *name = event->kind == FSDP__EVENT_OUT_OF_MEMORY ? "out of memory" : fsdp__event_names[event->kind];
    if (n > 1) {
        fprintf(c->file, "%zu times %s, events %llu to %llu", n, name, (unsigned long long)event->n,
                (unsigned long long)c->pool->events[to].n);
        return;
    }
    fprintf(c->file, "%s, event %llu\n%s", name, (unsigned long long)event->n, fsdp__svg_bytes(event->bytes).text);
    if (event->owner[0] != '\0') {
        fputs("\nowner ", c->file);
        fsdp__svg_put(c->file, event->owner);
    }
    if (event->stream[0] != '\0') {
        fputs("\nstream ", c->file);
        fsdp__svg_put(c->file, event->stream);
    }
    if (event->other[0] != '\0') {
        fputs("\nwaits for ", c->file);
        fsdp__svg_put(c->file, event->other);
    }
}

/* The marks of one kind; those that would lie on each other are one. */
static void draw_marks(const chart *c, fsdp__event_kind kind)
{
    const fsdp__snapshot_event *events = c->pool->events;
    double y = kind == FSDP__EVENT_WAIT ? bottom(c) + 10 : c->y + 8;
    size_t n_kind = 0;
    for (size_t i = 0; i < c->pool->n_events; i++) n_kind += events[i].kind == kind;
    for (size_t i = 0; i < c->pool->n_events; i++) {
        if (events[i].kind != kind) continue;
        size_t first = i, last = i, n = 0;
        for (; i < c->pool->n_events && (x_of(c, i) < x_of(c, first) + BUCKET || i == first); i++) {
            if (events[i].kind != kind) continue;
            last = i;
            n++;
        }
        i--;
        fputs("<g><title>", c->file);
        put_mark_title(c, first, last, n);
        fputs("</title>", c->file);
        if (kind == FSDP__EVENT_OUT_OF_MEMORY && n_kind <= MOST_LINES_DOWN)
            fprintf(c->file, "<path class=\"oom\" d=\"M%s %sV%s\"/>", fsdp__svg_px(x_of(c, first)).text,
                    fsdp__svg_px(y).text, fsdp__svg_px(bottom(c)).text);
        fsdp__history_mark(c->file, kind, x_of(c, first), y);
        fputs("</g>\n", c->file);
    }
}

void fsdp__history_draw(const fsdp__page *page, const fsdp__snapshot_pool *pool, double y)
{
    if (pool->n_events == 0) {
        fprintf(page->file, "<text class=\"g\" x=\"%d\" y=\"%s\">no history was kept</text>\n", FSDP__PAGE_LEFT,
                fsdp__svg_px(y + 12).text);
        return;
    }
    uint64_t top = pool->allocated_peak > 0 ? pool->allocated_peak : 1;
    for (size_t i = 0; i < pool->n_events; i++) {
        if (pool->events[i].reserved > top) top = pool->events[i].reserved;
        if (pool->events[i].allocated > top) top = pool->events[i].allocated;
    }
    const chart c = {page->file, pool, y, (double)WIDTH / (double)pool->n_events, (double)CURVES / (double)top};
    draw_curves(&c);
    draw_axes(&c, top);
    for (int kind = FSDP__EVENT_WAIT; kind < FSDP__EVENT_KINDS; kind++) draw_marks(&c, kind);
}
