/* SPDX-License-Identifier: MIT */
/* The addresses of a pool, to scale: its segments one after the other, wrapped into lines like a text. Pieces that are too
 * narrow to be seen apart become one crumb, so that the picture stays bounded. Under each line runs a strip that shows where
 * the free ranges lie, the narrow ones too. */
#include <string.h>

#include "fsdp_memory_svg.h"

enum {
    LINE = 34,  /* height of a line of the map */
    PITCH = 52, /* from line to line */
    GAP = 6,    /* px between segments, less if there are many */
    NARROW = 2, /* px of the narrowest piece that is drawn alone */
    MOST_LINES = 8,
    WIDTH = FSDP__PAGE_RIGHT - FSDP__PAGE_LEFT
};

const char *const fsdp__page_colors[FSDP__PAGE_OWNERS + 1] = {"#9cc5ec", "#8fd6b3", "#f6c27c", "#c9bbf2", "#f1a58c",
                                                              "#eeb1d3", "#cfd978", "#86d3da", "#d9bd97", "#aebcf2",
                                                              "#ecdb7c", "#b9dba4", "#bcc5ce"};

/* What is drawn as one rectangle: a piece, or a crumb of several. Positions are px along all lines put end to end. */
typedef struct span {
    double begin, end;
    const fsdp__snapshot_segment *segment;
    const fsdp__snapshot_piece *piece; /* the largest of a crumb */
    size_t n_pieces;
    uint64_t bytes[FSDP__PIECE_KINDS];
} span;

typedef struct map {
    const fsdp__page *page;
    const fsdp__snapshot_pool *pool;
    double y, px_per_byte, gap;
    int n_lines;
} map;

static int count_lines(const fsdp__snapshot_pool *pool)
{
    int lines = 1;
    while (lines < MOST_LINES && pool->n_pieces > (size_t)(24 * lines)) lines++;
    return lines;
}

double fsdp__map_height(const fsdp__snapshot_pool *pool)
{
    return pool->reserved == 0 ? LINE : (double)count_lines(pool) * PITCH - (PITCH - LINE - 10);
}

const char *fsdp__page_fill(const fsdp__page *page, fsdp__piece_kind kind, const char *owner)
{
    static const char *const free_fill[FSDP__PIECE_KINDS] = {
        [FSDP__PIECE_PENDING] = "url(#pending)", [FSDP__PIECE_READY] = "#ffffff", [FSDP__PIECE_UNUSED] = "#eef1f4"};
    if (kind != FSDP__PIECE_LIVE) return free_fill[kind];
    size_t low = 0, high = page->n_owners;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (strcmp(page->owners[middle].name, owner) <= 0) low = middle;
        else high = middle;
    }
    return fsdp__page_colors[page->owners[low].color];
}

/* ---- Words ---- */

static void put_points(FILE *file, const char *caption, const fsdp__snapshot_piece *piece)
{
    for (size_t i = 0; i < piece->n_points; i++) {
        fputs(i == 0 ? caption : ", ", file);
        fsdp__svg_put(file, piece->points[i].stream);
        fprintf(file, " %llu", (unsigned long long)piece->points[i].epoch);
    }
}

static void put_piece_title(const map *m, const span *s)
{
    FILE *file = m->page->file;
    const fsdp__snapshot_piece *piece = s->piece;
    static const char *const states[FSDP__PIECE_KINDS] = {"live", "free, pending", "free", "free, never used"};
    if (piece->kind == FSDP__PIECE_LIVE) fsdp__svg_put(file, piece->owner[0] != '\0' ? piece->owner : "nobody named");
    else fputs(states[piece->kind], file);
    fprintf(file, "\n%s: %llu bytes at %llu of segment %llu", fsdp__svg_bytes(piece->bytes).text,
            (unsigned long long)piece->bytes, (unsigned long long)piece->offset,
            (unsigned long long)s->segment->number);
    if (piece->stream[0] != '\0') {
        fputs("\ntaken for ", file);
        fsdp__svg_put(file, piece->stream);
    }
    for (size_t i = 0; i < piece->n_until_free; i++) {
        fputs(i == 0 ? "\nused until it is freed by " : ", ", file);
        fsdp__svg_put(file, piece->until_free[i]);
    }
    put_points(file, piece->kind == FSDP__PIECE_LIVE ? "\nused by epoch of " : "\nready after epoch of ", piece);
    if (piece->freed > 0) fprintf(file, "\nfree() number %llu", (unsigned long long)piece->freed);
    if (piece->range_bytes > piece->bytes)
        fprintf(file, "\npart of a free range of %s", fsdp__svg_bytes(piece->range_bytes).text);
}

static void put_crumb_title(const map *m, const span *s)
{
    fprintf(m->page->file, "%zu pieces too small to draw\nlive %s\nfree %s, of it pending %s", s->n_pieces,
            fsdp__svg_bytes(s->bytes[FSDP__PIECE_LIVE]).text,
            fsdp__svg_bytes(s->bytes[FSDP__PIECE_PENDING] + s->bytes[FSDP__PIECE_READY] + s->bytes[FSDP__PIECE_UNUSED])
                .text,
            fsdp__svg_bytes(s->bytes[FSDP__PIECE_PENDING]).text);
}

/* Name and size if there is room, or one of them. */
static void put_label(const map *m, const span *s, double x, double y, double width)
{
    FILE *file = m->page->file;
    const fsdp__snapshot_piece *piece = s->piece;
    const fsdp__svg_text size = fsdp__svg_bytes(piece->bytes), middle = fsdp__svg_px(x + width / 2);
    bool names = piece->kind == FSDP__PIECE_LIVE && piece->owner[0] != '\0' &&
                 fsdp__svg_width(fsdp__svg_chars(piece->owner)) + 6 <= width;
    bool sizes = fsdp__svg_width(strlen(size.text)) + 6 <= width;
    if (s->n_pieces > 1) return;
    if (names) {
        fprintf(file, "<text class=\"m\" x=\"%s\" y=\"%s\">", middle.text, fsdp__svg_px(y + (sizes ? 14 : 21)).text);
        fsdp__svg_put(file, piece->owner);
        fputs("</text>", file);
    }
    if (sizes)
        fprintf(file, "<text class=\"m g%s\" x=\"%s\" y=\"%s\">%s</text>",
                piece->kind == FSDP__PIECE_PENDING ? " l" : "", middle.text, fsdp__svg_px(y + (names ? 27 : 21)).text,
                size.text);
}

/* ---- Shapes ---- */

static double line_y(const map *m, int line) { return m->y + line * PITCH; }

/* The part of [begin, end) that lies in a line. */
static bool clip(double begin, double end, int line, double *out_x, double *out_width)
{
    double from = begin - (double)line * WIDTH, to = end - (double)line * WIDTH;
    if (from < 0) from = 0;
    if (to > WIDTH) to = WIDTH;
    *out_x = FSDP__PAGE_LEFT + from;
    *out_width = to - from;
    return to > from;
}

static int line_of(const map *m, double at)
{
    int line = (int)(at / WIDTH);
    return line < m->n_lines ? line : m->n_lines - 1;
}

static void draw_span(const map *m, const span *s)
{
    FILE *file = m->page->file;
    fsdp__piece_kind kind = s->piece->kind;
    const char *border = kind == FSDP__PIECE_LIVE ? "#52606d" : kind == FSDP__PIECE_PENDING ? "#b7791f" : "#9aa5b1";
    double x, width, label_x = 0, label_y = 0, label_width = 0;
    fputs("<g><title>", file);
    if (s->n_pieces == 1) put_piece_title(m, s);
    else put_crumb_title(m, s);
    fputs("</title>", file);
    for (int line = line_of(m, s->begin); line <= line_of(m, s->end); line++) {
        if (!clip(s->begin, s->end, line, &x, &width)) continue;
        fprintf(file, "<rect x=\"%s\" y=\"%s\" width=\"%s\" height=\"%d\" fill=\"%s\"", fsdp__svg_px(x).text,
                fsdp__svg_px(line_y(m, line)).text, fsdp__svg_px(width < 0.5 ? 0.5 : width).text, LINE,
                fsdp__page_fill(m->page, kind, s->piece->owner));
        if (width > 3) fprintf(file, " stroke=\"%s\" stroke-width=\".6\"", border);
        fputs("/>", file);
        if (width <= label_width) continue;
        label_x = x;
        label_y = line_y(m, line);
        label_width = width;
    }
    put_label(m, s, label_x, label_y, label_width);
    fputs("</g>\n", file);
}

static void draw_segment_frame(const map *m, double begin, double end)
{
    double x, width;
    for (int line = line_of(m, begin); line <= line_of(m, end); line++) {
        if (!clip(begin, end, line, &x, &width) || width < 3) continue;
        fprintf(m->page->file, "<rect class=\"f\" x=\"%s\" y=\"%s\" width=\"%s\" height=\"%d\"/>\n",
                fsdp__svg_px(x).text, fsdp__svg_px(line_y(m, line)).text, fsdp__svg_px(width).text, LINE);
    }
}

static void flush(const map *m, span *crumb)
{
    if (crumb->n_pieces > 0) draw_span(m, crumb);
    *crumb = (span){0};
}

static void add_piece(const map *m, span *crumb, const span *s)
{
    if (s->end - s->begin >= NARROW) {
        flush(m, crumb);
        draw_span(m, s);
        return;
    }
    if (crumb->n_pieces == 0) *crumb = *s;
    else {
        crumb->end = s->end;
        crumb->n_pieces++;
        for (int kind = 0; kind < FSDP__PIECE_KINDS; kind++) crumb->bytes[kind] += s->bytes[kind];
        if (s->piece->bytes > crumb->piece->bytes) {
            crumb->piece = s->piece;
            crumb->segment = s->segment;
        }
    }
    if (crumb->end - crumb->begin >= NARROW) flush(m, crumb);
}

static void draw_pieces(const map *m)
{
    double begin = 0;
    span crumb = {0};
    for (size_t i = 0; i < m->pool->n_segments; i++) {
        const fsdp__snapshot_segment *segment = &m->pool->segments[i];
        for (size_t j = 0; j < segment->n_pieces; j++) {
            const fsdp__snapshot_piece *piece = &segment->pieces[j];
            span s = {begin + (double)piece->offset * m->px_per_byte,
                      begin + (double)(piece->offset + piece->bytes) * m->px_per_byte,
                      segment,
                      piece,
                      1,
                      {0}};
            s.bytes[piece->kind] = piece->bytes;
            add_piece(m, &crumb, &s);
        }
        begin += (double)segment->bytes * m->px_per_byte + m->gap;
    }
    flush(m, &crumb);
}

/* A free range, under its line. What would lie on the one drawn last is left out. */
static void draw_free_range(const map *m, double begin, double end, bool largest, double *drawn)
{
    double x, width;
    if (end < *drawn + 0.5) return;
    *drawn = end;
    for (int line = line_of(m, begin); line <= line_of(m, end); line++) {
        if (!clip(begin, end, line, &x, &width)) continue;
        fprintf(m->page->file, "<rect x=\"%s\" y=\"%s\" width=\"%s\" height=\"4\" fill=\"%s\"/>\n",
                fsdp__svg_px(x).text, fsdp__svg_px(line_y(m, line) + LINE + 3).text,
                fsdp__svg_px(width < 1.5 ? 1.5 : width).text, largest ? "#2f855a" : "#dd6b20");
    }
}

static void draw_free_strip(const map *m)
{
    double begin = 0, drawn = -1;
    bool has_largest = false;
    for (size_t i = 0; i < m->pool->n_segments; i++) {
        const fsdp__snapshot_segment *segment = &m->pool->segments[i];
        for (size_t j = 0; j < segment->n_pieces; j++) {
            const fsdp__snapshot_piece *piece = &segment->pieces[j];
            if (piece->kind == FSDP__PIECE_LIVE || (j > 0 && segment->pieces[j - 1].range == piece->range)) continue;
            bool largest = !has_largest && piece->range_bytes == m->pool->largest_free;
            double at = begin + (double)piece->offset * m->px_per_byte;
            draw_free_range(m, at, at + (double)piece->range_bytes * m->px_per_byte, largest, &drawn);
            has_largest |= largest;
        }
        begin += (double)segment->bytes * m->px_per_byte + m->gap;
    }
}

static void draw_frames(const map *m)
{
    double begin = 0;
    for (size_t i = 0; i < m->pool->n_segments; i++) {
        double end = begin + (double)m->pool->segments[i].bytes * m->px_per_byte;
        if (end - begin >= 3) draw_segment_frame(m, begin, end);
        begin = end + m->gap;
    }
}

void fsdp__map_draw(const fsdp__page *page, const fsdp__snapshot_pool *pool, double y)
{
    map m = {.page = page, .pool = pool, .y = y, .n_lines = count_lines(pool)};
    if (pool->reserved == 0) {
        fprintf(page->file, "<text class=\"g\" x=\"%d\" y=\"%s\">no segment</text>\n", FSDP__PAGE_LEFT,
                fsdp__svg_px(y + 20).text);
        return;
    }
    double total = (double)m.n_lines * WIDTH, n_gaps = (double)(pool->n_segments - 1);
    m.gap = n_gaps * GAP > 0.2 * total ? 0.2 * total / n_gaps : GAP;
    m.px_per_byte = (total - n_gaps * m.gap) / (double)pool->reserved;
    draw_pieces(&m);
    draw_frames(&m);
    draw_free_strip(&m);
}
