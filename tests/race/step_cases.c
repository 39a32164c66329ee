/* SPDX-License-Identifier: MIT */
/* The matrix of trainings. */
#include <stdio.h>
#include <string.h>

#include "step_rig.h"
#include "toy_programs.h"

typedef struct program {
    const char *name;
    void (*make)(const toy_shape *shape, toy_program *program); /* NULL: TRAIN */
    bool tied, mixed, two_streams;
    toy_optimizer optimizer;
    toy_eval eval;
} program;

static const program programs[] = {
    {"train", NULL, false, false, false, TOY_ADAMW, TOY_EVAL_NONE},
    {"held", NULL, true, true, false, TOY_ADAMW, TOY_EVAL_NAMED},
    {"windows", toy_program_windows, false, false, false, TOY_OWN_SGD, TOY_EVAL_NONE},
    {"streams", toy_program_two_streams, true, false, true, TOY_ADAMW, TOY_EVAL_NONE},
    {"late", toy_program_late_gradients, false, false, true, TOY_OWN_ADAMW, TOY_EVAL_NONE},
    {"again", toy_program_again, true, false, false, TOY_ADAMW, TOY_EVAL_SURPRISE},
    {"alternate", NULL, false, true, true, TOY_ADAMW, TOY_EVAL_NAMED},
};
static const char *const accumulations[] = {"none", "each", "full"};
enum { N_PROGRAMS = sizeof programs / sizeof *programs, N_DEPTHS = 5 };

static uint32_t digit(uint32_t *i, uint32_t base)
{
    uint32_t value = *i % base;
    *i /= base;
    return value;
}

/* docs/schedule.md's count, for the way there and back without an evaluation; the last update gathers for a step that does
 * not come. */
static uint64_t gathers_of(const toy_config *config)
{
    uint64_t n_free = TOY_LAYERS + 2, n = config->micro_steps;
    return config->steps * (2 * n * n_free - (2 * n - 1) * (config->depth + 1)) + config->depth;
}

bool step_training(uint32_t i, step_case *out)
{
    uint32_t number = i;
    *out = (step_case){.config = toy_config_default(), .training = true};
    toy_config *c = &out->config;
    const program *p = &programs[digit(&i, N_PROGRAMS)];
    c->accumulation = (fsdp_accumulation)digit(&i, 3);
    c->depth = digit(&i, N_DEPTHS);
    c->world = 1 + digit(&i, STEP_RANKS);
    c->debug = digit(&i, 2) ? FSDP_DEBUG_POISON : 0;
    if (i > 0) return false;
    c->micro_steps = c->accumulation == FSDP_ACCUMULATE_NONE ? 1 : 2;
    c->grad_buffers = 1 + number % 3;
    c->reduce_comm = number % 5 == 2;
    c->pace = number % 3 == 1 ? TOY_TWO_AHEAD : TOY_AHEAD;
    c->optimizer = p->optimizer;
    c->eval = p->eval;
    c->alternate = p->two_streams && p->make == NULL;
    c->shape.tied = p->tied;
    c->shape.mixed = p->mixed;
    if (p->mixed) c->shape.compute = FSDP_DTYPE_BF16;
    c->trace = c->touch = c->tape = c->values = true;
    if (p->make != NULL) {
        toy_shape shape;
        c->shape.square = c->own_program = c->declare = true;
        toy_shape_make(&c->shape, &shape);
        p->make(&shape, &c->program);
    }
    /* With streams that take turns the steps are equal if their number of micro-steps is even; SURPRISE alternates, too. */
    out->steady = p->eval != TOY_EVAL_SURPRISE && (!c->alternate || c->micro_steps % 2 == 0);
    if (out->steady && c->world > 1 && p->make == NULL && p->eval == TOY_EVAL_NONE && !p->tied)
        out->gathers = gathers_of(c);
    snprintf(out->name, sizeof out->name, "%s-%s-depth%u-world%u%s", p->name, accumulations[c->accumulation], c->depth,
             c->world, c->debug ? "-poison" : "");
    return true;
}
