/* SPDX-License-Identifier: MIT */
/* A picture of a tape while it is drawn: where things are, and the looks of bars and waits. timeline_frame.c draws what
 * is around the lanes, timeline_svg.c what is in them. */
#ifndef FSDP_LIB_TIMELINE_DRAW_H
#define FSDP_LIB_TIMELINE_DRAW_H

#include <stdio.h>

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

typedef struct fsdp__shade_look {
    const char *fill, *legend;
} fsdp__shade_look;

typedef struct fsdp__weight_look {
    const char *css, *color, *legend;
} fsdp__weight_look;

extern const fsdp__shade_look fsdp__shade_looks[FSDP__SHADES];
extern const fsdp__weight_look fsdp__weight_looks[FSDP__WEIGHTS];

typedef struct fsdp__picture {
    const fsdp__timeline *timeline;
    FILE *file;
    const char *title;
    double px_per_ns;
    size_t n_waits[FSDP__WEIGHTS]; /* arrows by weight; a crowd of them is not drawn */
    bool taken[2 * FSDP__TIMELINE_SLOTS]
              [WIDTH]; /* columns of a line of words; line 2r is over row r, 2r + 1 under it */
} fsdp__picture;

static inline double fsdp__y_of(int row) { return TOP + row * PITCH; }
static inline double fsdp__axis_y(const fsdp__picture *p) { return fsdp__y_of(p->timeline->n_rows) - PITCH + BAR + 28; }
static inline double fsdp__width_of(const fsdp__picture *p, uint64_t ns) { return (double)ns * p->px_per_ns; }
static inline double fsdp__x_of(const fsdp__picture *p, uint64_t ns)
{
    return LEFT + fsdp__width_of(p, ns - p->timeline->first_ns);
}

/* Before the lanes: the file's beginning, sums, axis and rows; behind them: the legend. */
void fsdp__draw_frame(const fsdp__picture *p);
void fsdp__draw_legend(const fsdp__picture *p);

#endif
