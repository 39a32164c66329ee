/* SPDX-License-Identifier: MIT */
/* What is around the lanes of a picture: head, sums, axis, names of rows, legend. */
#include <stdio.h>

#include "svg.h"
#include "timeline_draw.h"

const fsdp__shade_look fsdp__shade_looks[FSDP__SHADES] = {
    [FSDP__SHADE_FORWARD] = {"#b0d2f2", "forward"},
    [FSDP__SHADE_BACKWARD] = {"#ccbff1", "backward"},
    [FSDP__SHADE_COMPUTE] = {"#bcd3e6", "compute"},
    [FSDP__SHADE_GATHER] = {"#86d3ac", "all-gather"},
    [FSDP__SHADE_SCATTER] = {"#f6bc70", "reduce-scatter"},
    [FSDP__SHADE_ALL_REDUCE] = {"#f0977a", "all-reduce"},
    [FSDP__SHADE_OPTIMIZER] = {"#eeb1d3", "optimizer"},
    [FSDP__SHADE_SMALL] = {"#9eabb8", "cast, fill, copy, add"},
    [FSDP__SHADE_OTHER] = {"#cdbf9f", "broadcast, barrier"},
    [FSDP__SHADE_WIRE] = {"url(#wire)", "collective waits for the wire or a rank"},
    [FSDP__SHADE_IDLE] = {"#f1f4f7", NULL},
};

const fsdp__weight_look fsdp__weight_looks[FSDP__WEIGHTS] = {
    [FSDP__WEIGHT_PASSED] = {"p", "#aab4bf", "awaited event that had happened"},
    [FSDP__WEIGHT_STOOD] = {"s", "#52606d", "event that a lane stood for"},
    [FSDP__WEIGHT_EXPOSED] = {"e", "#d0342c", "event that compute stood for"},
};

static void draw_head(const fsdp__picture *p)
{
    int height = (int)fsdp__axis_y(p) + 100;
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
          ".h{fill:url(#hatch);stroke:#d0342c;stroke-width:.7}.l{fill:url(#dots);pointer-events:none}\n.k{fill:#f1f4f7}"
          ".a{stroke:#e3e8ed;stroke-width:1}\n"
          "</style>\n<defs>\n<pattern id=\"hatch\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" "
          "patternTransform=\"rotate(45)\"><rect width=\"6\" height=\"6\" fill=\"#fdeeec\"/>"
          "<rect width=\"2\" height=\"6\" fill=\"#e4716b\"/></pattern>\n"
          "<pattern id=\"dots\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\">"
          "<circle cx=\"1.5\" cy=\"1.5\" r=\"1.1\" fill=\"#52606d\"/></pattern>\n"
          "<pattern id=\"wire\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" "
          "patternTransform=\"rotate(-45)\"><rect width=\"6\" height=\"6\" fill=\"#eef1f4\"/>"
          "<rect width=\"1.5\" height=\"6\" fill=\"#b8c2cc\"/></pattern>\n",
          p->file);
    for (int w = 0; w < FSDP__WEIGHTS; w++)
        fprintf(
            p->file,
            "<marker id=\"%s\" viewBox=\"0 0 8 8\" refX=\"3\" refY=\"4\" markerWidth=\"8\" markerHeight=\"8\" "
            "markerUnits=\"userSpaceOnUse\" orient=\"auto\"><path d=\"M0 0L8 4L0 8z\" style=\"fill:%s\"/></marker>\n",
            fsdp__weight_looks[w].css, fsdp__weight_looks[w].color);
    fprintf(p->file, "</defs>\n<rect width=\"%d\" height=\"%d\" fill=\"#ffffff\"/>\n", WIDTH, height);
}

/* A caption, the figure, and a note under it. Returns where the next one begins. */
static double put_figure(const fsdp__picture *p, double x, const char *caption, uint64_t ns, const char *note)
{
    const fsdp__svg_text at = fsdp__svg_px(x);
    fprintf(p->file, "<text class=\"g\" x=\"%s\" y=\"72\">", at.text);
    fsdp__svg_put(p->file, caption);
    fprintf(p->file, "</text><text class=\"v\" x=\"%s\" y=\"95\">%s</text>", at.text, fsdp__svg_ns(ns).text);
    fprintf(p->file, "<text class=\"g\" x=\"%s\" y=\"114\">%s</text>\n", at.text, note);
    size_t widest = fsdp__svg_chars(note) > fsdp__svg_chars(caption) ? fsdp__svg_chars(note) : fsdp__svg_chars(caption);
    return x + fsdp__svg_width(widest < 15 ? 15 : widest) + 36;
}

/* Where the tape does not see the caller's kernels, a stream that was not empty at the end of a gap ran them. */
static uint64_t ran_ns(const fsdp_trace_summary *sum)
{
    return sum->compute_ns + (sum->between_ns > sum->late_ns ? sum->between_ns - sum->late_ns : 0);
}

static void draw_summary(const fsdp__picture *p)
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
        snprintf(note, sizeof note, "%s of the span", fsdp__svg_percent(ran_ns(&sum), sum.span_ns).text);
        snprintf(caption, sizeof caption, "%s ran", compute);
        x = put_figure(p, x, caption, ran_ns(&sum), note);
        snprintf(note, sizeof note, "%s of the span: %s for gathers, %s for reductions",
                 fsdp__svg_percent(sum.exposed_ns, sum.span_ns).text, fsdp__svg_ns(sum.exposed_gather_ns).text,
                 fsdp__svg_ns(sum.exposed_reduce_ns).text);
        snprintf(caption, sizeof caption, "exposed: %s stood and waited", compute);
        x = put_figure(p, x, caption, sum.exposed_ns, note);
        snprintf(note, sizeof note, "%s%s of the span", sum.between_ns > 0 ? "at most " : "",
                 fsdp__svg_percent(sum.late_ns, sum.span_ns).text);
        if (sum.late_ns >= t->pixel_ns) x = put_figure(p, x, "the host was late", sum.late_ns, note);
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

static void draw_axis(const fsdp__picture *p)
{
    static const struct {
        uint64_t ns;
        const char *name;
    } unit[] = {{1000000000, "s"}, {1000000, "ms"}, {1000, "µs"}, {1, "ns"}};
    const fsdp__timeline *t = p->timeline;
    int u = 0;
    while (unit[u].ns > 1 && t->span_ns < 10 * unit[u].ns) u++;
    double bottom = fsdp__axis_y(p);
    fprintf(p->file, "<text class=\"g\" x=\"24\" y=\"%s\">time, %s</text>\n", fsdp__svg_px(bottom + 16).text,
            unit[u].name);
    uint64_t tick = tick_of(t->span_ns),
             n_ticks = t->span_ns / tick; /* counted: the one after the last may not be a number */
    for (uint64_t i = 0, at = 0; i <= n_ticks; i++, at += tick) {
        const fsdp__svg_text x = fsdp__svg_px(fsdp__x_of(p, t->first_ns + at));
        fprintf(p->file, "<path class=\"a\" d=\"M%s %dV%s\"/>", x.text, TOP - 30, fsdp__svg_px(bottom).text);
        fprintf(p->file, "<text class=\"m g\" x=\"%s\" y=\"%s\">%llu</text>\n", x.text, fsdp__svg_px(bottom + 16).text,
                (unsigned long long)(at / unit[u].ns));
    }
}

static void draw_rows(const fsdp__picture *p)
{
    const fsdp__timeline *t = p->timeline;
    for (int row = 0; row < t->n_rows; row++) {
        int y = (int)fsdp__y_of(row), slot = t->slot_of[row];
        fprintf(p->file, "<rect class=\"k\" x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" rx=\"3\"/>", LEFT, y,
                RIGHT - LEFT, BAR);
        fprintf(p->file, "<text class=\"lane\" x=\"24\" y=\"%d\">", y + 15);
        fsdp__svg_put(p->file, fsdp_trace_stream_name(t->trace, slot));
        fsdp_trace_summary sum = FSDP_TRACE_SUMMARY_INIT;
        fsdp__timeline_sum(t->trace, slot, &sum);
        fprintf(p->file, "</text><text class=\"g\" x=\"24\" y=\"%d\">ran %s</text>\n", y + 30,
                fsdp__svg_percent(ran_ns(&sum), t->span_ns).text);
    }
}

/* A shape and what it means, on one of two lines. Returns where the next begins. */
static double put_legend(const fsdp__picture *p, double x, int line, const char *shape, const char *text,
                         const char *more)
{
    fprintf(p->file, "<g transform=\"translate(%s %s)\">%s<text x=\"31\" y=\"11\">%s%s</text></g>\n",
            fsdp__svg_px(x).text, fsdp__svg_px(fsdp__axis_y(p) + 40 + 24 * line).text, shape, text, more);
    return x + 31 + fsdp__svg_width(fsdp__svg_chars(text) + fsdp__svg_chars(more)) * 0.92 + 24;
}

/* Of what is in the picture: bars on one line, waits and a late host on the other. */
static double put_shades(const fsdp__picture *p, double x)
{
    const fsdp__timeline *t = p->timeline;
    bool has_shade[FSDP__SHADES] = {false}, is_late = false;
    for (size_t i = 0; i < t->n_bars; i++) {
        has_shade[t->bar[i].shade] = true;
        is_late = is_late || t->bar[i].late;
    }
    char shape[160];
    double at = x;
    for (int s = 0; s < FSDP__SHADES; s++) {
        const fsdp__shade_look *look = &fsdp__shade_looks[s];
        if (!has_shade[s] || look->legend == NULL) continue;
        snprintf(shape, sizeof shape, "<rect width=\"24\" height=\"14\" rx=\"2\" fill=\"%s\"/>", look->fill);
        at = put_legend(p, at, 0, shape, look->legend, fsdp__in_window((fsdp__shade)s) ? ", shaded by unit" : "");
    }
    return is_late ? put_legend(p, x, 1, "<rect class=\"l\" width=\"24\" height=\"14\"/>",
                                "the host was late: nothing left to run", "")
                   : x;
}

void fsdp__draw_legend(const fsdp__picture *p)
{
    double x = put_shades(p, 24);
    char shape[160];
    if (p->n_waits[FSDP__WEIGHT_EXPOSED] > 0)
        x = put_legend(p, x, 1, "<rect class=\"h\" width=\"24\" height=\"14\"/>", "exposed: compute stood and waited",
                       "");
    for (int w = FSDP__WEIGHTS - 1; w >= 0; w--) {
        const fsdp__weight_look *look = &fsdp__weight_looks[w];
        snprintf(shape, sizeof shape, "<path class=\"%s\" marker-end=\"url(#%s)\" d=\"M0 7H19\"/>", look->css,
                 look->css);
        const char *more = p->n_waits[w] > CROWD ? ": too many, not drawn" : "";
        if (p->n_waits[w] > 0) x = put_legend(p, x, 1, shape, look->legend, more);
    }
}

void fsdp__draw_frame(const fsdp__picture *p)
{
    draw_head(p);
    draw_summary(p);
    draw_axis(p);
    draw_rows(p);
}
