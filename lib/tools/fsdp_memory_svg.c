/* SPDX-License-Identifier: MIT */
#include "fsdp_memory_svg.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    WIDTH = FSDP__PAGE_WIDTH,
    LEFT = FSDP__PAGE_LEFT,
    RIGHT = FSDP__PAGE_RIGHT,
    TOP = 192,  /* of the first panel */
    GAUGE = 44, /* from the head of a panel to the gauge */
    MAP = GAUGE + 30,
    BETWEEN = 44, /* panels */
    LEGEND = 24   /* height of a line of it */
};

/* ---- Places ---- */

static double history_y(const fsdp__snapshot_pool *pool) { return MAP + fsdp__map_height(pool) + 14; }
static double panel_height(const fsdp__snapshot_pool *pool)
{
    return history_y(pool) + fsdp__history_height(pool) + BETWEEN;
}

static void put_words(FILE *file, const char *css, double x, double y, const char *words)
{
    fprintf(file, "<text class=\"%s\" x=\"%s\" y=\"%s\">", css, fsdp__svg_px(x).text, fsdp__svg_px(y).text);
    fsdp__svg_put(file, words);
    fputs("</text>\n", file);
}

/* ---- Head ---- */

static void draw_head(const fsdp__page *page, double height)
{
    FILE *file = page->file;
    const fsdp__snapshot *s = page->snapshot;
    fprintf(file,
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\" version=\"1.1\" "
            "width=\"%d\" height=\"%s\" viewBox=\"0 0 %d %s\">\n<title>Memory of rank %llu of %llu</title>\n",
            WIDTH, fsdp__svg_px(height).text, WIDTH, fsdp__svg_px(height).text, (unsigned long long)s->rank,
            (unsigned long long)s->world);
    fputs(
        "<style type=\"text/css\">\n"
        "text{font-family:system-ui,'Segoe UI','Helvetica Neue',Arial,'DejaVu Sans',sans-serif;font-size:11px;"
        "fill:#1f2933;pointer-events:none}\n"
        ".m{text-anchor:middle}.e{text-anchor:end}.g{fill:#66727f}.title{font-size:22px;font-weight:bold}\n"
        ".v{font-size:19px;font-weight:bold}.pool{font-size:14px;font-weight:bold}.p{fill:#c53030;font-weight:bold}\n"
        ".k{fill:#eef1f4}.f{fill:none;stroke:#3e4c59;stroke-width:1.2}.bu{fill:none;stroke:#9aa5b1;stroke-dasharray:4 "
        "3}\n"
        ".al{fill:#dbe9f6;stroke:#2b6cb0;stroke-width:1.2}.re{fill:none;stroke:#3e4c59;stroke-width:1.4}\n"
        ".a{stroke:#cbd2d9;stroke-width:.8}.pk{stroke:#c53030;stroke-width:1;stroke-dasharray:5 4}\n"
        ".oom{stroke:#c53030;stroke-width:1.2}.l{paint-order:stroke;stroke:#ffffff;stroke-width:3px}\n</"
        "style>\n<defs>\n"
        "<pattern id=\"pending\" width=\"7\" height=\"7\" patternUnits=\"userSpaceOnUse\" "
        "patternTransform=\"rotate(45)\">"
        "<rect width=\"7\" height=\"7\" fill=\"#fff9eb\"/><rect width=\"2\" height=\"7\" fill=\"#e2a336\"/></pattern>\n"
        "</defs>\n",
        file);
    fprintf(file, "<rect width=\"%d\" height=\"%s\" fill=\"#ffffff\"/>\n", WIDTH, fsdp__svg_px(height).text);
    fprintf(file, "<text class=\"title\" x=\"24\" y=\"40\">Memory of rank %llu of %llu, ", (unsigned long long)s->rank,
            (unsigned long long)s->world);
    fsdp__svg_put(file, s->backend);
    fputs(" backend</text>\n", file);
}

/* A caption, the figure, and a note under it. Returns where the next one begins. */
static double put_figure(const fsdp__page *page, double x, const char *caption, uint64_t bytes, const char *note)
{
    size_t widest = strlen(note) > strlen(caption) ? strlen(note) : strlen(caption);
    put_words(page->file, "g", x, 72, caption);
    put_words(page->file, "v", x, 95, fsdp__svg_bytes(bytes).text);
    put_words(page->file, "g", x, 114, note);
    return x + fsdp__svg_width(widest < 15 ? 15 : widest) + 36;
}

static void draw_figures(const fsdp__page *page)
{
    const fsdp__snapshot *s = page->snapshot;
    uint64_t allocated = 0, active = 0, reserved = 0;
    char note[160];
    for (size_t p = 0; p < s->n_pools; p++) {
        allocated += s->pools[p].allocated;
        active += s->pools[p].active;
        reserved += s->pools[p].reserved;
    }
    snprintf(note, sizeof note, "peak %s", fsdp__svg_bytes(s->device_peak).text);
    double x = put_figure(page, 24, "device memory held", s->device_bytes, note);
    snprintf(note, sizeof note, "%s of the device's", fsdp__svg_percent(reserved, s->device_bytes).text);
    x = put_figure(page, x, "of it in pools", reserved, note);
    snprintf(note, sizeof note, "%s of the pools, %s with what is pending", fsdp__svg_percent(allocated, reserved).text,
             fsdp__svg_bytes(active).text);
    x = put_figure(page, x, "of it allocated", allocated, note);
    x = put_figure(page, x, "pinned host memory", s->pinned_bytes, "");
    for (size_t i = 0; i < s->n_arenas; i++) {
        char caption[64];
        if (s->arenas[i].mapped == 0) continue; /* nothing came from it */
        snprintf(caption, sizeof caption, "%s arena, allocated", s->arenas[i].name);
        snprintf(note, sizeof note, "%s mapped", fsdp__svg_bytes(s->arenas[i].mapped).text);
        x = put_figure(page, x, caption, s->arenas[i].allocated, note);
    }
}

/* All of the device's memory: pools to scale, and the rest. */
static void draw_device(const fsdp__page *page)
{
    static const char *const shades[2] = {"#cbd2d9", "#b3bdc7"};
    const fsdp__snapshot *s = page->snapshot;
    FILE *file = page->file;
    uint64_t pools = 0, at = 0;
    for (size_t p = 0; p < s->n_pools; p++) pools += s->pools[p].reserved;
    uint64_t whole = s->device_bytes > pools ? s->device_bytes : pools;
    if (whole == 0) return;
    put_words(file, "g", 24, 150, "device memory");
    fprintf(file, "<rect class=\"k\" x=\"%d\" y=\"136\" width=\"%d\" height=\"20\"/>\n", LEFT, RIGHT - LEFT);
    for (size_t p = 0; p <= s->n_pools; p++) {
        const fsdp__snapshot_pool *pool = p < s->n_pools ? &s->pools[p] : NULL;
        const char *name = pool != NULL ? pool->name : "not in a pool: shards, gradients, optimizer, scratch";
        uint64_t bytes = pool != NULL ? pool->reserved : whole - pools;
        double x = LEFT + (double)at / (double)whole * (RIGHT - LEFT),
               width = (double)bytes / (double)whole * (RIGHT - LEFT);
        at += bytes;
        if (width < 0.5) continue;
        fputs("<g><title>", file);
        fsdp__svg_put(file, name);
        fprintf(file,
                "\n%s</title><rect x=\"%s\" y=\"136\" width=\"%s\" height=\"20\" fill=\"%s\" stroke=\"#ffffff\"/>",
                fsdp__svg_bytes(bytes).text, fsdp__svg_px(x).text, fsdp__svg_px(width).text,
                pool != NULL ? shades[p % 2] : "#eef1f4");
        if (fsdp__svg_width(fsdp__svg_chars(name)) + 6 <= width) put_words(file, "m", x + width / 2, 150, name);
        fputs("</g>\n", file);
    }
}

/* ---- Panels ---- */

/* At most so many characters of text, and a sign that there were more; the column is narrow. */
static const char *shorten(const char *text, size_t chars, char *out, size_t out_bytes)
{
    size_t n = 0;
    for (const char *at = text; *at != '\0' && chars > 0; chars--) {
        size_t bytes = fsdp__utf8_bytes(at);
        if (bytes == 0) bytes = 1;
        if (n + bytes + sizeof "…" > out_bytes) break;
        memcpy(out + n, at, bytes);
        n += bytes;
        at += bytes;
        text = at;
    }
    snprintf(out + n, out_bytes - n, "%s", *text != '\0' ? "…" : "");
    return out;
}

static void put_pool_words(const fsdp__page *page, const fsdp__snapshot_pool *pool, double y)
{
    char words[512];
    FILE *file = page->file;
    char name[128], model[128];
    put_words(file, "pool", 24, y, shorten(pool->name, 12, name, sizeof name));
    snprintf(words, sizeof words, "%s%s", pool->model != NULL ? "model " : "",
             pool->model != NULL ? shorten(pool->model, 12, model, sizeof model) : "allocator");
    put_words(file, "g", 24, y + 16, words);
    snprintf(words, sizeof words, "policy %.40s", pool->policy);
    put_words(file, "g", 24, y + 30, words);
    snprintf(words, sizeof words, "%s allocated, %s of %s reserved", fsdp__svg_bytes(pool->allocated).text,
             fsdp__svg_percent(pool->allocated, pool->reserved).text, fsdp__svg_bytes(pool->reserved).text);
    put_words(file, "lead", LEFT, y, words);
    double x = LEFT + fsdp__svg_width(strlen(words)) + 30;
    snprintf(words, sizeof words, "%s pending", fsdp__svg_bytes(pool->active - pool->allocated).text);
    put_words(file, "g", x, y, words);
    x += fsdp__svg_width(strlen(words)) + 30;
    snprintf(words, sizeof words, "%s free in %llu range%s, the largest %s", fsdp__svg_bytes(pool->free_bytes).text,
             (unsigned long long)pool->free_ranges, pool->free_ranges == 1 ? "" : "s",
             fsdp__svg_bytes(pool->largest_free).text);
    put_words(file, "g", x, y, words);
    x += fsdp__svg_width(strlen(words)) + 30;
    snprintf(words, sizeof words, "%llu allocs, %llu frees, %llu waits, %llu segment%s taken",
             (unsigned long long)pool->allocs, (unsigned long long)pool->frees, (unsigned long long)pool->waits,
             (unsigned long long)pool->grows, pool->grows == 1 ? "" : "s");
    put_words(file, "g", x, y, words);
}

/* How full: allocated, pending, reserved, and what the budget would allow. Amounts, not places. */
static void draw_gauge(const fsdp__page *page, const fsdp__snapshot_pool *pool, double y)
{
    FILE *file = page->file;
    uint64_t whole = pool->reserved > pool->reserved_peak ? pool->reserved : pool->reserved_peak;
    bool budget = pool->budget > whole && pool->budget / 4 <= whole;
    if (budget) whole = pool->budget;
    if (whole == 0) whole = 1;
    double scale = (double)(RIGHT - LEFT) / (double)whole;
    const fsdp__svg_text top = fsdp__svg_px(y);
    const uint64_t parts[3] = {pool->allocated, pool->active - pool->allocated, pool->reserved - pool->active};
    static const char *const fills[3] = {"#52606d", "url(#pending)", "#d9e0e6"};
    uint64_t at = 0;
    for (int i = 0; i < 3; i++) {
        fprintf(file, "<rect x=\"%s\" y=\"%s\" width=\"%s\" height=\"14\" fill=\"%s\"/>",
                fsdp__svg_px(LEFT + (double)at * scale).text, top.text, fsdp__svg_px((double)parts[i] * scale).text,
                fills[i]);
        at += parts[i];
    }
    if (budget) {
        fprintf(file, "<rect class=\"bu\" x=\"%s\" y=\"%s\" width=\"%s\" height=\"13\"/>",
                fsdp__svg_px(LEFT + (double)at * scale).text, fsdp__svg_px(y + .5).text,
                fsdp__svg_px((double)(whole - at) * scale).text);
        put_words(file, "e g", RIGHT - 4, y + 11, "budget");
    }
    double peak = LEFT + (double)pool->allocated_peak * scale;
    bool left = peak > RIGHT - 120;
    fprintf(file, "<path style=\"stroke:#c53030;stroke-width:2\" d=\"M%s %sv20\"/>", fsdp__svg_px(peak).text,
            fsdp__svg_px(y - 4).text);
    char words[64];
    snprintf(words, sizeof words, "peak %s", fsdp__svg_bytes(pool->allocated_peak).text);
    put_words(file, left ? "p e" : "p", left ? peak - 5 : peak + 5, y - 4, words);
}

static void draw_panel(const fsdp__page *page, const fsdp__snapshot_pool *pool, double y)
{
    FILE *file = page->file;
    char words[96];
    fprintf(file, "<path class=\"a\" d=\"M24 %sH%d\"/>\n", fsdp__svg_px(y - 24).text, RIGHT);
    put_pool_words(page, pool, y);
    draw_gauge(page, pool, y + GAUGE - 16);
    double map_y = y + MAP - 14;
    if (pool->reserved > 0) {
        snprintf(words, sizeof words, "%zu segment%s", pool->n_segments, pool->n_segments == 1 ? "" : "s");
        put_words(file, "e g", LEFT - 6, map_y + 14, "addresses");
        put_words(file, "e g", LEFT - 6, map_y + 28, words);
    }
    fsdp__map_draw(page, pool, map_y);
    fsdp__history_draw(page, pool, y + history_y(pool) - 14);
}

/* ---- Legend ---- */

/* Shapes and what they mean; a line that is full is followed by another. Without a file it is only measured. */
typedef struct legend {
    FILE *file;
    double x, y;
} legend;

static void put_legend(legend *l, const char *shape, const char *words)
{
    double width = 31 + fsdp__svg_width(fsdp__svg_chars(words)) + 22;
    if (l->x + width > RIGHT && l->x > LEFT) {
        l->x = LEFT;
        l->y += LEGEND;
    }
    if (l->file != NULL) {
        fprintf(l->file, "<g transform=\"translate(%s %s)\">%s</g>", fsdp__svg_px(l->x).text, fsdp__svg_px(l->y).text,
                shape);
        put_words(l->file, "", l->x + 31, l->y + 11, words);
    }
    l->x += width;
}

static void put_box(legend *l, const char *fill, const char *border, const char *words)
{
    char shape[160];
    snprintf(shape, sizeof shape, "<rect width=\"24\" height=\"14\" fill=\"%s\" stroke=\"%s\" stroke-width=\".8\"/>",
             fill, border);
    put_legend(l, shape, words);
}

static void begin_legend(legend *l, const char *caption)
{
    if (l->x > LEFT) l->y += LEGEND;
    l->x = LEFT;
    if (l->file != NULL) put_words(l->file, "g", 24, l->y + 11, caption);
}

static void draw_owner_legend(const fsdp__page *page, legend *l)
{
    uint64_t rest_bytes = 0, rest = 0;
    char words[160];
    begin_legend(l, "owners");
    for (int color = 0; color < FSDP__PAGE_OWNERS; color++) {
        for (size_t i = 0; i < page->n_owners; i++) {
            const fsdp__snapshot_owner *owner = &page->owners[i];
            if (owner->color != color) continue;
            snprintf(words, sizeof words, "%.100s  %s", owner->name[0] != '\0' ? owner->name : "(no owner named)",
                     fsdp__svg_bytes(owner->bytes).text);
            put_box(l, fsdp__page_colors[color], "#52606d", words);
        }
    }
    for (size_t i = 0; i < page->n_owners; i++) {
        if (page->owners[i].color < FSDP__PAGE_OWNERS) continue;
        rest_bytes += page->owners[i].bytes;
        rest++;
    }
    snprintf(words, sizeof words, "%llu more  %s", (unsigned long long)rest, fsdp__svg_bytes(rest_bytes).text);
    if (rest > 0) put_box(l, fsdp__page_colors[FSDP__PAGE_OWNERS], "#52606d", words);
    if (page->n_owners == 0) put_legend(l, "", "nothing is live");
}

static void draw_legend(const fsdp__page *page, legend *l)
{
    static const char *const marks[FSDP__EVENT_KINDS] = {[FSDP__EVENT_WAIT] = "a hand-over needed a wait",
                                                         [FSDP__EVENT_GROW] = "took a segment",
                                                         [FSDP__EVENT_TRIM] = "gave a segment back",
                                                         [FSDP__EVENT_EVICT] = "evicted a prefetched unit",
                                                         [FSDP__EVENT_OUT_OF_MEMORY] = "out of memory"};
    draw_owner_legend(page, l);
    begin_legend(l, "free");
    put_box(l, "url(#pending)", "#b7791f", "pending: its stream's last use may still run");
    put_box(l, "#ffffff", "#9aa5b1", "ready for its stream");
    put_box(l, "#eef1f4", "#9aa5b1", "never used");
    put_legend(l, "<path style=\"stroke:#2f855a;stroke-width:4\" d=\"M0 7H24\"/>",
               "line under a map: the largest free range");
    put_legend(l, "<path style=\"stroke:#dd6b20;stroke-width:4\" d=\"M0 7H24\"/>",
               "further free ranges: fragmentation");
    begin_legend(l, "history");
    put_box(l, "#dbe9f6", "#2b6cb0", "allocated");
    put_box(l, "#ffffff", "#3e4c59", "reserved");
    for (int kind = FSDP__EVENT_WAIT; kind < FSDP__EVENT_KINDS; kind++) {
        if (!page->has_event[kind]) continue;
        put_legend(l, "", marks[kind]);
        if (l->file != NULL)
            fsdp__history_mark(l->file, kind, l->x - 22 - fsdp__svg_width(strlen(marks[kind])) - 13, l->y + 7);
    }
}

/* ---- All ---- */

static void draw(const fsdp__page *page)
{
    const fsdp__snapshot *s = page->snapshot;
    double y = TOP;
    for (size_t p = 0; p < s->n_pools; p++) y += panel_height(&s->pools[p]);
    legend measured = {NULL, LEFT, y - 14};
    draw_legend(page, &measured);
    draw_head(page, measured.y + LEGEND + 16);
    draw_figures(page);
    draw_device(page);
    y = TOP;
    for (size_t p = 0; p < s->n_pools; p++) {
        draw_panel(page, &s->pools[p], y);
        y += panel_height(&s->pools[p]);
    }
    legend l = {page->file, LEFT, y - 14};
    draw_legend(page, &l);
    fputs("</svg>\n", page->file);
}

/* The largest owners get a colour each. */
static bool color_owners(fsdp__page *page)
{
    size_t n = page->n_owners;
    fsdp__snapshot_owner *sorted = calloc(n + 1, sizeof *sorted);
    if (sorted == NULL) return false;
    if (n > 0) memcpy(sorted, page->owners, n * sizeof *sorted);
    qsort(sorted, n, sizeof *sorted, fsdp__snapshot_by_bytes);
    for (size_t i = 0; i < n; i++) {
        page->owners[i].color = 0;
        while (page->owners[i].color < FSDP__PAGE_OWNERS &&
               strcmp(sorted[page->owners[i].color].name, page->owners[i].name) != 0)
            page->owners[i].color++;
    }
    free(sorted);
    return true;
}

static bool write_file(fsdp__page *page, const char *path)
{
    page->file = fopen(path, "w");
    if (page->file == NULL) return false;
    errno = 0;
    draw(page);
    int reason = ferror(page->file) != 0 ? (errno != 0 ? errno : EIO) : 0;
    if (fclose(page->file) != 0 && reason == 0) reason = errno;
    errno = reason;
    return reason == 0;
}

bool fsdp__snapshot_draw(const fsdp__snapshot *snapshot, const char *path)
{
    fsdp__page page = {.snapshot = snapshot};
    for (size_t p = 0; p < snapshot->n_pools; p++)
        for (size_t i = 0; i < snapshot->pools[p].n_events; i++)
            page.has_event[snapshot->pools[p].events[i].kind] = true;
    page.owners = fsdp__snapshot_owners(snapshot->pools, snapshot->n_pools, &page.n_owners);
    bool drawn = false;
    errno = ENOMEM;
    if (page.owners != NULL && color_owners(&page)) drawn = write_file(&page, path);
    int reason = errno;
    free(page.owners);
    errno = reason;
    return drawn;
}
