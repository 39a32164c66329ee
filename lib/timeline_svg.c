/* SPDX-License-Identifier: MIT */
/* The picture of a tape: a lane a row, time to the right, bars for operations, arrows from a recorded event to the
 * stream that waits for it, hatching where compute stood. SVG 1.1, no scripts, the reader's own fonts. */
#include "timeline_svg.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "check.h"
#include "fsdp/device.h"
#include "hostmem.h"
#include "new_file.h"
#include "svg.h"
#include "timeline.h"

enum {
    WIDTH = 1600,
    LEFT = 140,   /* the first moment; lane names stand left of it */
    RIGHT = 1572, /* the last one */
    TOP = 168,    /* of the first lane's bars */
    BAR = 34,     /* height of a bar */
    PITCH = 96,   /* from lane to lane; between them arrows, and two lines of words */
    CROWD = 160   /* arrows of one weight that can still be told apart */
};

static const struct {
    const char *fill, *legend;
} shades[FSDP__SHADES] = {
    [FSDP__SHADE_FORWARD] = {"#b0d2f2", "forward"},          [FSDP__SHADE_BACKWARD] = {"#ccbff1", "backward"},
    [FSDP__SHADE_COMPUTE] = {"#bcd3e6", "compute"},          [FSDP__SHADE_GATHER] = {"#86d3ac", "all-gather"},
    [FSDP__SHADE_SCATTER] = {"#f6bc70", "reduce-scatter"},   [FSDP__SHADE_ALL_REDUCE] = {"#f0977a", "all-reduce"},
    [FSDP__SHADE_OPTIMIZER] = {"#eeb1d3", "optimizer"},      [FSDP__SHADE_SMALL] = {"#9eabb8", "cast, fill, copy, add"},
    [FSDP__SHADE_OTHER] = {"#cdbf9f", "broadcast, barrier"},
};

static const struct {
    const char *css, *color, *legend;
} weights[FSDP__WEIGHTS] = {
    [FSDP__WEIGHT_PASSED] = {"p", "#aab4bf", "awaited event that had happened"},
    [FSDP__WEIGHT_STOOD] = {"s", "#52606d", "event that a lane stood for"},
    [FSDP__WEIGHT_EXPOSED] = {"e", "#d0342c", "event that compute stood for"},
};

typedef struct picture {
    const fsdp__timeline *timeline;
    FILE *file;
    const char *title;
    double px_per_ns;
    size_t n_waits[FSDP__WEIGHTS]; /* arrows by weight; a crowd of them is not drawn */
    bool taken[2 * FSDP__TIMELINE_SLOTS]
              [WIDTH]; /* columns of a line of words; line 2r is over row r, 2r + 1 under it */
} picture;

static double y_of(int row) { return TOP + row * PITCH; }
static double axis_y(const picture *p) { return y_of(p->timeline->n_rows) - PITCH + BAR + 28; }
static double width_of(const picture *p, uint64_t ns) { return (double)ns * p->px_per_ns; }
static double x_of(const picture *p, uint64_t ns) { return LEFT + width_of(p, ns - p->timeline->first_ns); }

/* ---- Numbers and words ---- */

static fsdp__svg_text text_ns(uint64_t ns)
{
    if (ns < 1000) return fsdp__svg_fixed((double)ns, 0, " ns");
    if (ns < 1000000) return fsdp__svg_scaled((double)ns / 1e3, " µs");
    if (ns < 1000000000) return fsdp__svg_scaled((double)ns / 1e6, " ms");
    return fsdp__svg_scaled((double)ns / 1e9, " s");
}

/* Find columns for a word of that many characters beside x, in a line; right of it first. *out_x: where it begins. */
static bool take_columns(picture *p, int line, double x, size_t chars, double *out_x)
{
    int width = (int)fsdp__svg_width(chars) + 6;
    for (int side = 0; side < 2; side++) {
        int begin = side == 0 ? (int)x + 4 : (int)x - 2 - width;
        if (begin < LEFT - 20 || begin + width > WIDTH) continue;
        int column = begin;
        while (column < begin + width && !p->taken[line][column]) column++;
        if (column < begin + width) continue;
        memset(&p->taken[line][begin], 1, (size_t)width);
        *out_x = begin + 2;
        return true;
    }
    return false;
}

static double line_y(int line) { return line % 2 == 0 ? y_of(line / 2) - 10 : y_of(line / 2) + BAR + 18; }

/* ---- Arrows ---- */

static bool says_unit(const fsdp_trace_record *record)
{
    return record->label[0] != '\0' && record->mark != FSDP_MARK_NORM_PART && record->mark != FSDP_MARK_NORM_SUM;
}

/* "h1.ready" */
static void put_mark(FILE *file, const fsdp_trace_record *record)
{
    if (says_unit(record)) {
        fsdp__svg_put(file, record->label);
        fputc('.', file);
    }
    fputs(fsdp_mark_name(record->mark), file);
}

static size_t mark_chars(const fsdp_trace_record *record)
{
    return strlen(fsdp_mark_name(record->mark)) + (says_unit(record) ? 1 + fsdp__svg_chars(record->label) : 0);
}

static void put_wait_title(const picture *p, const fsdp_trace_record *wait)
{
    const fsdp_trace *trace = p->timeline->trace;
    fputs("<title>", p->file);
    fsdp__svg_put(p->file, fsdp_trace_stream_name(trace, wait->stream));
    fputs(" waits for ", p->file);
    put_mark(p->file, wait);
    if (wait->other >= 0) {
        fputs(" of ", p->file);
        fsdp__svg_put(p->file, fsdp_trace_stream_name(trace, wait->other));
    }
    fprintf(p->file, "\nwhy: %s\nstarts %s\nstands %s</title>", fsdp_reason_name(wait->reason),
            text_ns(wait->start_ns - p->timeline->first_ns).text, text_ns(wait->end_ns - wait->start_ns).text);
}

static bool is_drawn(const picture *p, const fsdp__arrow *a)
{
    return a->from_row >= 0 && p->n_waits[a->weight] <= CROWD;
}

static void draw_arrow(picture *p, const fsdp__arrow *a)
{
    bool up = a->to_row < a->from_row;
    double x0 = x_of(p, a->from_ns), y0 = y_of(a->from_row) + (up ? 0 : BAR);
    double x1 = x_of(p, a->wait->end_ns), y1 = y_of(a->to_row) + (up ? BAR + 6 : -6), bend = (y1 - y0) / 2;
    const char *css = weights[a->weight].css;
    fprintf(p->file, "<path class=\"%s\" marker-end=\"url(#%s)\" d=\"M%s %s", css, css, fsdp__svg_px(x0).text,
            fsdp__svg_px(y0).text);
    fprintf(p->file, "C%s %s %s %s %s %s\">", fsdp__svg_px(x0).text, fsdp__svg_px(y0 + bend).text,
            fsdp__svg_px(x1).text, fsdp__svg_px(y1 - bend).text, fsdp__svg_px(x1).text, fsdp__svg_px(y1).text);
    put_wait_title(p, a->wait);
    fputs("</path>\n", p->file);
    if (a->weight == FSDP__WEIGHT_PASSED) return;
    /* The line of a wait that stood is upright: keep words off it. */
    int first = 2 * (up ? a->to_row : a->from_row) + 1, last = 2 * (up ? a->from_row : a->to_row);
    for (int line = first; line <= last; line++) memset(&p->taken[line][(int)x1 - 2], 1, 5);
}

static void label_arrow(picture *p, const fsdp__arrow *a)
{
    int line = a->to_row < a->from_row ? 2 * a->to_row + 1 : 2 * a->to_row;
    double x;
    if (!take_columns(p, line, x_of(p, a->wait->end_ns), mark_chars(a->wait), &x)) return;
    fprintf(p->file, "<text class=\"t%s\" x=\"%s\" y=\"%s\">", weights[a->weight].css, fsdp__svg_px(x).text,
            fsdp__svg_px(line_y(line)).text);
    put_mark(p->file, a->wait);
    fputs("</text>\n", p->file);
}

/* The light ones first and the heavy ones over them; words for the heavy ones first, since they may fill the line. */
static void draw_arrows(picture *p)
{
    const fsdp__timeline *t = p->timeline;
    for (int weight = 0; weight < FSDP__WEIGHTS; weight++)
        for (size_t i = 0; i < t->n_arrows; i++)
            if ((int)t->arrow[i].weight == weight && is_drawn(p, &t->arrow[i])) draw_arrow(p, &t->arrow[i]);
}

static void label_arrows(picture *p)
{
    const fsdp__timeline *t = p->timeline;
    for (int weight = FSDP__WEIGHTS - 1; weight >= 0; weight--)
        for (size_t i = 0; i < t->n_arrows; i++)
            if ((int)t->arrow[i].weight == weight && is_drawn(p, &t->arrow[i])) label_arrow(p, &t->arrow[i]);
}

/* ---- Bars ---- */

static bool in_window(const fsdp__bar *b)
{
    return b->shade == FSDP__SHADE_FORWARD || b->shade == FSDP__SHADE_BACKWARD;
}

static const char *kind_of(const fsdp__bar *b)
{
    return in_window(b) ? shades[b->shade].legend : fsdp_operation_name(b->longest->operation);
}

/* Compute is shaded by its unit's place in the order of first use, light to full. */
static void put_fill(const picture *p, const fsdp__bar *b)
{
    static const int ramp[2][2][3] = {{{0xd9, 0xea, 0xfa}, {0x8f, 0xbf, 0xec}},
                                      {{0xe7, 0xe0, 0xfa}, {0xb9, 0xa7, 0xec}}};
    if (!in_window(b)) {
        fprintf(p->file, " fill=\"%s\">", shades[b->shade].fill);
        return;
    }
    const int(*ends)[3] = ramp[b->shade == FSDP__SHADE_BACKWARD];
    size_t n_units = p->timeline->n_units;
    double t = n_units > 1 ? (double)b->unit / (double)(n_units - 1) : 0.5;
    unsigned rgb[3];
    for (int c = 0; c < 3; c++) rgb[c] = (unsigned)((1 - t) * ends[0][c] + t * ends[1][c] + 0.5);
    fprintf(p->file, " fill=\"#%02x%02x%02x\">", rgb[0], rgb[1], rgb[2]);
}

static void put_bar_title(const picture *p, const fsdp__bar *b)
{
    fputs("<title>", p->file);
    if (b->count > 1) fprintf(p->file, "%u operations, the longest: ", (unsigned)b->count);
    fprintf(p->file, "%s%s", kind_of(b), b->name[0] != '\0' ? " " : "");
    fsdp__svg_put(p->file, b->name);
    if (b->bytes > 0) fprintf(p->file, "\n%s", fsdp__svg_bytes(b->bytes).text);
    fprintf(p->file, "\nstarts %s\ntakes %s</title>", text_ns(b->start_ns - p->timeline->first_ns).text,
            text_ns(b->end_ns - b->start_ns).text);
}

/* "all-gather h1" where it fits, else "h1", else nothing. */
static void put_bar_text(const picture *p, const fsdp__bar *b, double x, double width)
{
    const char *kind = kind_of(b);
    size_t name = fsdp__svg_chars(b->name);
    bool both = fsdp__svg_width(strlen(kind) + (name > 0) + name) + 4 < width;
    if (!both && (name == 0 || fsdp__svg_width(name) + 4 >= width)) return;
    fprintf(p->file, "<text class=\"m\" x=\"%s\" y=\"%s\">", fsdp__svg_px(x + width / 2).text,
            fsdp__svg_px(y_of(b->row) + 21).text);
    if (both) fprintf(p->file, "%s%s", kind, name > 0 ? " " : "");
    fsdp__svg_put(p->file, b->name);
    fputs("</text>\n", p->file);
}

static void draw_bar(const picture *p, const fsdp__bar *b)
{
    double x = x_of(p, b->start_ns), width = width_of(p, b->end_ns - b->start_ns);
    double drawn = width > 3 ? width - 0.8 : width < 0.5 ? 0.5 : width; /* a gap to the neighbour where there is room */
    fprintf(p->file, "<rect x=\"%s\" y=\"%d\" width=\"%s\" height=\"%d\"%s", fsdp__svg_px(x).text, (int)y_of(b->row),
            fsdp__svg_px(drawn).text, BAR, width > 6 ? " rx=\"2\"" : "");
    put_fill(p, b);
    put_bar_title(p, b);
    fputs("</rect>\n", p->file);
    if (b->count == 1) put_bar_text(p, b, x, width);
}

/* Where compute stood: hatched, and over it how long. */
static void draw_exposed(picture *p, const fsdp__arrow *a)
{
    const fsdp_trace_record *wait = a->wait;
    double x = x_of(p, wait->start_ns), width = width_of(p, wait->end_ns - wait->start_ns);
    fprintf(p->file, "<rect class=\"h\" x=\"%s\" y=\"%d\" width=\"%s\" height=\"%d\">", fsdp__svg_px(x).text,
            (int)y_of(a->to_row), fsdp__svg_px(width > 3 ? width - 0.8 : width).text, BAR);
    put_wait_title(p, wait);
    fputs("</rect>\n", p->file);
}

static void label_exposed(picture *p, const fsdp__arrow *a)
{
    fsdp__svg_text stood = text_ns(a->wait->end_ns - a->wait->start_ns);
    double x;
    if (!take_columns(p, 2 * a->to_row, x_of(p, a->wait->start_ns) - 6, fsdp__svg_chars(stood.text), &x)) return;
    fprintf(p->file, "<text class=\"te\" x=\"%s\" y=\"%s\">%s</text>\n", fsdp__svg_px(x).text,
            fsdp__svg_px(line_y(2 * a->to_row)).text, stood.text);
}

static void draw_bars(picture *p)
{
    const fsdp__timeline *t = p->timeline;
    for (size_t i = 0; i < t->n_bars; i++) draw_bar(p, &t->bar[i]);
    for (size_t i = 0; i < t->n_arrows; i++)
        if (t->arrow[i].weight == FSDP__WEIGHT_EXPOSED) draw_exposed(p, &t->arrow[i]);
    /* Words for those of ten pixels first: the line may not hold them all. */
    for (int wide = 1; wide >= 0; wide--) {
        for (size_t i = 0; i < t->n_arrows; i++) {
            const fsdp_trace_record *wait = t->arrow[i].wait;
            if (t->arrow[i].weight != FSDP__WEIGHT_EXPOSED) continue;
            if ((width_of(p, wait->end_ns - wait->start_ns) >= 10) == wide) label_exposed(p, &t->arrow[i]);
        }
    }
}

/* ---- The frame ---- */

static void draw_head(const picture *p)
{
    int height = (int)axis_y(p) + 100;
    fprintf(p->file,
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\" version=\"1.1\" "
            "width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\">\n<title>",
            WIDTH, height, WIDTH, height);
    fsdp__svg_put(p->file, p->title);
    fputs("</title>\n<style type=\"text/css\">\n"
          "text{font-family:system-ui,'Segoe UI','Helvetica Neue',Arial,'DejaVu Sans',sans-serif;font-size:11px;"
          "fill:#1f2933;pointer-events:none}\n"
          ".m{text-anchor:middle}.g{fill:#66727f}.title{font-size:22px;font-weight:bold}\n"
          ".v{font-size:19px;font-weight:bold}.lane{font-size:14px;font-weight:bold}\n"
          "path{fill:none}.p{stroke:#aab4bf;stroke-width:.8}.s{stroke:#52606d;stroke-width:1.2}\n"
          ".e{stroke:#d0342c;stroke-width:1.8}.tp{fill:#7b8794}.ts{fill:#3e4c59}.te{fill:#b3261e;font-weight:bold}\n"
          ".h{fill:url(#hatch);stroke:#d0342c;stroke-width:.7}.k{fill:#f1f4f7}.a{stroke:#e3e8ed;stroke-width:1}\n"
          "</style>\n<defs>\n<pattern id=\"hatch\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" "
          "patternTransform=\"rotate(45)\"><rect width=\"6\" height=\"6\" fill=\"#fdeeec\"/>"
          "<rect width=\"2\" height=\"6\" fill=\"#e4716b\"/></pattern>\n",
          p->file);
    for (int w = 0; w < FSDP__WEIGHTS; w++)
        fprintf(
            p->file,
            "<marker id=\"%s\" viewBox=\"0 0 8 8\" refX=\"3\" refY=\"4\" markerWidth=\"8\" markerHeight=\"8\" "
            "markerUnits=\"userSpaceOnUse\" orient=\"auto\"><path d=\"M0 0L8 4L0 8z\" style=\"fill:%s\"/></marker>\n",
            weights[w].css, weights[w].color);
    fprintf(p->file, "</defs>\n<rect width=\"%d\" height=\"%d\" fill=\"#ffffff\"/>\n", WIDTH, height);
}

/* A caption, the figure, and a note under it. Returns where the next one begins. */
static double put_figure(const picture *p, double x, const char *caption, uint64_t ns, const char *note)
{
    const fsdp__svg_text at = fsdp__svg_px(x);
    fprintf(p->file, "<text class=\"g\" x=\"%s\" y=\"72\">", at.text);
    fsdp__svg_put(p->file, caption);
    fprintf(p->file, "</text><text class=\"v\" x=\"%s\" y=\"95\">%s</text>", at.text, text_ns(ns).text);
    fprintf(p->file, "<text class=\"g\" x=\"%s\" y=\"114\">%s</text>\n", at.text, note);
    size_t widest = fsdp__svg_chars(note) > fsdp__svg_chars(caption) ? fsdp__svg_chars(note) : fsdp__svg_chars(caption);
    return x + fsdp__svg_width(widest < 15 ? 15 : widest) + 36;
}

static void draw_summary(const picture *p)
{
    const fsdp__timeline *t = p->timeline;
    fputs("<text class=\"title\" x=\"24\" y=\"40\">", p->file);
    fsdp__svg_put(p->file, p->title);
    fputs("</text>\n", p->file);
    fsdp_trace_summary sum = FSDP_TRACE_SUMMARY_INIT;
    fsdp__timeline_sum(t->trace, t->compute_slot, &sum);
    const char *compute = fsdp_trace_stream_name(t->trace, t->compute_slot);
    char caption[80], note[192];
    unsigned long long n = fsdp_trace_count(t->trace), dropped = fsdp_trace_dropped(t->trace);
    if (dropped == 0) snprintf(note, sizeof note, "%llu records", n);
    else snprintf(note, sizeof note, "%llu records, %llu more lost", n, dropped);
    double x = put_figure(p, 24, "span", sum.span_ns, note);
    if (t->compute_slot >= 0) {
        snprintf(note, sizeof note, "%s of the span", fsdp__svg_percent(sum.compute_ns, sum.span_ns).text);
        snprintf(caption, sizeof caption, "%s ran", compute);
        x = put_figure(p, x, caption, sum.compute_ns, note);
        snprintf(note, sizeof note, "%s of the span: %s for gathers, %s for reductions",
                 fsdp__svg_percent(sum.exposed_ns, sum.span_ns).text, text_ns(sum.exposed_gather_ns).text,
                 text_ns(sum.exposed_reduce_ns).text);
        snprintf(caption, sizeof caption, "exposed: %s stood and waited", compute);
        x = put_figure(p, x, caption, sum.exposed_ns, note);
    }
    snprintf(note, sizeof note, "%s of the span, %s sent", fsdp__svg_percent(sum.gather_ns, sum.span_ns).text,
             fsdp__svg_bytes(sum.gather_bytes).text);
    x = put_figure(p, x, "all-gathers ran", sum.gather_ns, note);
    snprintf(note, sizeof note, "%s of the span, %s sent", fsdp__svg_percent(sum.reduce_ns, sum.span_ns).text,
             fsdp__svg_bytes(sum.reduce_bytes).text);
    put_figure(p, x, "reductions ran", sum.reduce_ns, note);
}

/* The least of 1, 2, 5, 10, … that makes at most 14 steps of the span. */
static uint64_t tick_of(uint64_t span_ns)
{
    uint64_t tick = 1;
    for (int i = 0; span_ns / tick > 14; i++) tick = i % 3 == 1 ? tick / 2 * 5 : tick * 2;
    return tick;
}

static void draw_axis(const picture *p)
{
    static const struct {
        uint64_t ns;
        const char *name;
    } unit[] = {{1000000000, "s"}, {1000000, "ms"}, {1000, "µs"}, {1, "ns"}};
    const fsdp__timeline *t = p->timeline;
    int u = 0;
    while (unit[u].ns > 1 && t->span_ns < 10 * unit[u].ns) u++;
    double bottom = axis_y(p);
    fprintf(p->file, "<text class=\"g\" x=\"24\" y=\"%s\">time, %s</text>\n", fsdp__svg_px(bottom + 16).text,
            unit[u].name);
    uint64_t tick = tick_of(t->span_ns),
             n_ticks = t->span_ns / tick; /* counted: the one after the last may not be a number */
    for (uint64_t i = 0, at = 0; i <= n_ticks; i++, at += tick) {
        const fsdp__svg_text x = fsdp__svg_px(x_of(p, t->first_ns + at));
        fprintf(p->file, "<path class=\"a\" d=\"M%s %dV%s\"/>", x.text, TOP - 30, fsdp__svg_px(bottom).text);
        fprintf(p->file, "<text class=\"m g\" x=\"%s\" y=\"%s\">%llu</text>\n", x.text, fsdp__svg_px(bottom + 16).text,
                (unsigned long long)(at / unit[u].ns));
    }
}

static void draw_rows(const picture *p)
{
    const fsdp__timeline *t = p->timeline;
    for (int row = 0; row < t->n_rows; row++) {
        int y = (int)y_of(row), slot = t->slot_of[row];
        fprintf(p->file, "<rect class=\"k\" x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" rx=\"3\"/>", LEFT, y,
                RIGHT - LEFT, BAR);
        fprintf(p->file, "<text class=\"lane\" x=\"24\" y=\"%d\">", y + 15);
        fsdp__svg_put(p->file, fsdp_trace_stream_name(t->trace, slot));
        fsdp_trace_summary sum = FSDP_TRACE_SUMMARY_INIT;
        fsdp__timeline_sum(t->trace, slot, &sum);
        fprintf(p->file, "</text><text class=\"g\" x=\"24\" y=\"%d\">ran %s</text>\n", y + 30,
                fsdp__svg_percent(sum.compute_ns, t->span_ns).text);
    }
}

/* A shape and what it means, on one of two lines. Returns where the next begins. */
static double put_legend(const picture *p, double x, int line, const char *shape, const char *text, const char *more)
{
    fprintf(p->file, "<g transform=\"translate(%s %s)\">%s<text x=\"31\" y=\"11\">%s%s</text></g>\n",
            fsdp__svg_px(x).text, fsdp__svg_px(axis_y(p) + 40 + 24 * line).text, shape, text, more);
    return x + 31 + fsdp__svg_width(fsdp__svg_chars(text) + fsdp__svg_chars(more)) * 0.92 + 24;
}

/* Of what is in the picture: bars on one line, waits on the other. */
static void draw_legend(const picture *p)
{
    const fsdp__timeline *t = p->timeline;
    bool has_shade[FSDP__SHADES] = {false};
    for (size_t i = 0; i < t->n_bars; i++) has_shade[t->bar[i].shade] = true;
    double x = 24;
    char shape[160];
    for (int s = 0; s < FSDP__SHADES; s++) {
        snprintf(shape, sizeof shape, "<rect width=\"24\" height=\"14\" rx=\"2\" fill=\"%s\"/>", shades[s].fill);
        bool ramp = s == FSDP__SHADE_FORWARD || s == FSDP__SHADE_BACKWARD;
        if (has_shade[s]) x = put_legend(p, x, 0, shape, shades[s].legend, ramp ? ", shaded by unit" : "");
    }
    x = 24;
    if (p->n_waits[FSDP__WEIGHT_EXPOSED] > 0)
        x = put_legend(p, x, 1, "<rect class=\"h\" width=\"24\" height=\"14\"/>", "exposed: compute stood and waited",
                       "");
    for (int w = FSDP__WEIGHTS - 1; w >= 0; w--) {
        snprintf(shape, sizeof shape, "<path class=\"%s\" marker-end=\"url(#%s)\" d=\"M0 7H19\"/>", weights[w].css,
                 weights[w].css);
        const char *more = p->n_waits[w] > CROWD ? ": too many, not drawn" : "";
        if (p->n_waits[w] > 0) x = put_legend(p, x, 1, shape, weights[w].legend, more);
    }
}

static void draw(picture *p)
{
    draw_head(p);
    draw_summary(p);
    draw_axis(p);
    draw_rows(p);
    draw_arrows(p);
    draw_bars(p);
    label_arrows(p);
    draw_legend(p);
    fputs("</svg>\n", p->file);
}

static fsdp_status write_file(picture *p, const char *path)
{
    p->file = fopen(path, "we");
    if (p->file == NULL) return fsdp__fail(FSDP_ERR_IO, "cannot open %s: %s", path, strerror(errno));
    fsdp__write_guard guard;
    fsdp__write_guard_begin(&guard);
    errno = 0;
    draw(p);
    bool failed = ferror(p->file) != 0;
    int reason = errno;
    if (fclose(p->file) != 0 && !failed) failed = true, reason = errno;
    fsdp__write_guard_end(&guard);
    struct stat there;
    if (failed && lstat(path, &there) == 0 && S_ISREG(there.st_mode)) remove(path); /* half a picture */
    return failed ? fsdp__fail(FSDP_ERR_IO, "cannot write %s: %s", path, strerror(reason)) : FSDP_OK;
}

fsdp_status fsdp__timeline_write(const fsdp_host_allocator *host, const fsdp_trace *trace, const char *path,
                                 const char *title)
{
    fsdp__timeline timeline;
    FSDP_TRY(fsdp__timeline_read(host, trace, RIGHT - LEFT, &timeline));
    fsdp_status status;
    picture *p = fsdp__host_alloc(host, 1, sizeof *p);
    if (p != NULL) {
        p->timeline = &timeline;
        p->title = title;
        p->px_per_ns = (double)(RIGHT - LEFT) / (double)timeline.span_ns;
        for (size_t i = 0; i < timeline.n_arrows; i++) p->n_waits[timeline.arrow[i].weight]++;
        status = write_file(p, path);
    } else {
        status = fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "no host memory to draw a trace");
    }
    fsdp__host_free(host, p, 1, sizeof *p);
    fsdp__timeline_free(&timeline);
    return status;
}
