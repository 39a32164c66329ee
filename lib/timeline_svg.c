/* SPDX-License-Identifier: MIT */
/* The picture of a tape: a lane a row, time to the right, bars for operations, arrows from a recorded event to the stream
 * that waits for it, hatching where compute stood, dots where the host was late. SVG 1.1, no scripts, the reader's own
 * fonts. */
#include "timeline_svg.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "check.h"
#include "hostmem.h"
#include "new_file.h"
#include "svg.h"
#include "timeline_draw.h"

/* ---- Words ---- */

/* Find columns for a word of that many characters beside x, in a line; right of it first. *out_x: where it begins. */
static bool take_columns(fsdp__picture *p, int line, double x, size_t chars, double *out_x)
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

static double line_y(int line) { return line % 2 == 0 ? fsdp__y_of(line / 2) - 10 : fsdp__y_of(line / 2) + BAR + 18; }

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

static void put_wait_title(const fsdp__picture *p, const fsdp_trace_record *wait)
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
            fsdp__svg_ns(wait->start_ns - p->timeline->first_ns).text,
            fsdp__svg_ns(wait->end_ns - wait->start_ns).text);
}

static bool is_drawn(const fsdp__picture *p, const fsdp__arrow *a)
{
    return a->from_row >= 0 && p->n_waits[a->weight] <= CROWD;
}

static void draw_arrow(fsdp__picture *p, const fsdp__arrow *a)
{
    bool up = a->to_row < a->from_row;
    double x0 = fsdp__x_of(p, a->from_ns), y0 = fsdp__y_of(a->from_row) + (up ? 0 : BAR);
    double x1 = fsdp__x_of(p, a->wait->end_ns), y1 = fsdp__y_of(a->to_row) + (up ? BAR + 6 : -6), bend = (y1 - y0) / 2;
    const char *css = fsdp__weight_looks[a->weight].css;
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

static void label_arrow(fsdp__picture *p, const fsdp__arrow *a)
{
    int line = a->to_row < a->from_row ? 2 * a->to_row + 1 : 2 * a->to_row;
    double x;
    if (!take_columns(p, line, fsdp__x_of(p, a->wait->end_ns), mark_chars(a->wait), &x)) return;
    fprintf(p->file, "<text class=\"t%s\" x=\"%s\" y=\"%s\">", fsdp__weight_looks[a->weight].css, fsdp__svg_px(x).text,
            fsdp__svg_px(line_y(line)).text);
    put_mark(p->file, a->wait);
    fputs("</text>\n", p->file);
}

/* The light ones first and the heavy ones over them; words for the heavy ones first, since they may fill the line. */
static void draw_arrows(fsdp__picture *p)
{
    const fsdp__timeline *t = p->timeline;
    for (int weight = 0; weight < FSDP__WEIGHTS; weight++)
        for (size_t i = 0; i < t->n_arrows; i++)
            if ((int)t->arrow[i].weight == weight && is_drawn(p, &t->arrow[i])) draw_arrow(p, &t->arrow[i]);
}

static void label_arrows(fsdp__picture *p)
{
    const fsdp__timeline *t = p->timeline;
    for (int weight = FSDP__WEIGHTS - 1; weight >= 0; weight--)
        for (size_t i = 0; i < t->n_arrows; i++)
            if ((int)t->arrow[i].weight == weight && is_drawn(p, &t->arrow[i])) label_arrow(p, &t->arrow[i]);
}

/* ---- Bars ---- */

static const char *kind_of(const fsdp__bar *b)
{
    return fsdp__in_window(b->shade) ? fsdp__shade_looks[b->shade].legend : b->kind;
}

/* Compute is shaded by its unit's place in the order of first use, light to full. */
static void put_fill(const fsdp__picture *p, const fsdp__bar *b)
{
    static const int ramp[2][2][3] = {{{0xd9, 0xea, 0xfa}, {0x8f, 0xbf, 0xec}},
                                      {{0xe7, 0xe0, 0xfa}, {0xb9, 0xa7, 0xec}}};
    if (!fsdp__in_window(b->shade)) {
        fprintf(p->file, " fill=\"%s\">", fsdp__shade_looks[b->shade].fill);
        return;
    }
    const int(*ends)[3] = ramp[b->shade == FSDP__SHADE_BACKWARD];
    size_t n_units = p->timeline->n_units;
    double t = n_units > 1 ? (double)b->unit / (double)(n_units - 1) : 0.5;
    unsigned rgb[3];
    for (int c = 0; c < 3; c++) rgb[c] = (unsigned)((1 - t) * ends[0][c] + t * ends[1][c] + 0.5);
    fprintf(p->file, " fill=\"#%02x%02x%02x\">", rgb[0], rgb[1], rgb[2]);
}

static void put_bar_title(const fsdp__picture *p, const fsdp__bar *b)
{
    fputs("<title>", p->file);
    if (b->count > 1) fprintf(p->file, "%u in turn, the longest: ", (unsigned)b->count);
    fprintf(p->file, "%s%s", kind_of(b), b->name[0] != '\0' ? " " : "");
    fsdp__svg_put(p->file, b->name);
    if (b->bytes > 0) fprintf(p->file, "\n%s", fsdp__svg_bytes(b->bytes).text);
    if (b->late) fputs("\nnothing was left to run when the host came: it was late", p->file);
    fprintf(p->file, "\nstarts %s\ntakes %s</title>", fsdp__svg_ns(b->start_ns - p->timeline->first_ns).text,
            fsdp__svg_ns(b->end_ns - b->start_ns).text);
}

/* "all-gather h1" where it fits, else "h1", else nothing. */
static void put_bar_text(const fsdp__picture *p, const fsdp__bar *b, double x, double width)
{
    const char *kind = kind_of(b);
    size_t name = fsdp__svg_chars(b->name);
    bool both = fsdp__svg_width(strlen(kind) + (name > 0) + name) + 4 < width;
    if (!both && (name == 0 || fsdp__svg_width(name) + 4 >= width)) return;
    fprintf(p->file, "<text class=\"m\" x=\"%s\" y=\"%s\">", fsdp__svg_px(x + width / 2).text,
            fsdp__svg_px(fsdp__y_of(b->row) + 21).text);
    if (both) fprintf(p->file, "%s%s", kind, name > 0 ? " " : "");
    fsdp__svg_put(p->file, b->name);
    fputs("</text>\n", p->file);
}

static void open_rect(const fsdp__picture *p, const fsdp__bar *b, double x, double width)
{
    double drawn = width > 3 ? width - 0.8 : width < 0.5 ? 0.5 : width; /* a gap to the neighbour where there is room */
    fprintf(p->file, "<rect x=\"%s\" y=\"%d\" width=\"%s\" height=\"%d\"%s", fsdp__svg_px(x).text,
            (int)fsdp__y_of(b->row), fsdp__svg_px(drawn).text, BAR, width > 6 ? " rx=\"2\"" : "");
}

static void draw_bar(const fsdp__picture *p, const fsdp__bar *b)
{
    double x = fsdp__x_of(p, b->start_ns), width = fsdp__width_of(p, b->end_ns - b->start_ns);
    open_rect(p, b, x, width);
    put_fill(p, b);
    put_bar_title(p, b);
    fputs("</rect>\n", p->file);
    if (b->late) {
        open_rect(p, b, x, width);
        fputs(" class=\"l\"/>\n", p->file);
    }
    if (b->count == 1) put_bar_text(p, b, x, width);
}

/* Where compute stood: hatched, and over it how long. */
static void draw_exposed(fsdp__picture *p, const fsdp__arrow *a)
{
    const fsdp_trace_record *wait = a->wait;
    double x = fsdp__x_of(p, wait->start_ns), width = fsdp__width_of(p, wait->end_ns - wait->start_ns);
    fprintf(p->file, "<rect class=\"h\" x=\"%s\" y=\"%d\" width=\"%s\" height=\"%d\">", fsdp__svg_px(x).text,
            (int)fsdp__y_of(a->to_row), fsdp__svg_px(width > 3 ? width - 0.8 : width).text, BAR);
    put_wait_title(p, wait);
    fputs("</rect>\n", p->file);
}

static void label_exposed(fsdp__picture *p, const fsdp__arrow *a)
{
    fsdp__svg_text stood = fsdp__svg_ns(a->wait->end_ns - a->wait->start_ns);
    double x;
    if (!take_columns(p, 2 * a->to_row, fsdp__x_of(p, a->wait->start_ns) - 6, fsdp__svg_chars(stood.text), &x)) return;
    fprintf(p->file, "<text class=\"te\" x=\"%s\" y=\"%s\">%s</text>\n", fsdp__svg_px(x).text,
            fsdp__svg_px(line_y(2 * a->to_row)).text, stood.text);
}

static void draw_bars(fsdp__picture *p)
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
            if ((fsdp__width_of(p, wait->end_ns - wait->start_ns) >= 10) == wide) label_exposed(p, &t->arrow[i]);
        }
    }
}

static void draw(fsdp__picture *p)
{
    fsdp__draw_frame(p);
    draw_arrows(p);
    draw_bars(p);
    label_arrows(p);
    fsdp__draw_legend(p);
    fputs("</svg>\n", p->file);
}

static fsdp_status write_file(fsdp__picture *p, const char *path)
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
    fsdp__picture *p = fsdp__host_alloc(host, 1, sizeof *p);
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
