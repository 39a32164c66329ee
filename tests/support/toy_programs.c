/* SPDX-License-Identifier: MIT */
#include "toy_programs.h"

static void put(toy_program *p, toy_op op, uint32_t unit)
{
    toy_program_add(
        p, (toy_line){.op = op, .unit = unit, .use = op == TOY_BACKWARD_BEGIN ? FSDP_USE_BACKWARD : FSDP_USE_FORWARD});
}

static void put_begin(toy_program *p, uint32_t unit, fsdp_use use)
{
    toy_program_add(p, (toy_line){.op = TOY_FORWARD_BEGIN, .unit = unit, .use = use});
}

static void put_kernel(toy_program *p, toy_kernel kernel, uint32_t unit, uint32_t at)
{
    toy_program_add(p, (toy_line){.op = TOY_KERNEL, .unit = unit, .kernel = kernel, .at = at});
}

static void put_second(toy_program *p, toy_kernel kernel, uint32_t unit, uint32_t at)
{
    toy_program_add(p, (toy_line){.op = TOY_KERNEL_SECOND, .unit = unit, .kernel = kernel, .at = at});
}

static void put_look(toy_program *p, uint32_t unit)
{
    put_begin(p, unit, FSDP_USE_READ);
    put_kernel(p, TOY_LOOK, unit, 0);
    put(p, TOY_FORWARD_END, unit);
}

static void put_forward(toy_program *p, toy_kernel kernel, uint32_t unit, uint32_t at)
{
    put(p, TOY_FORWARD_BEGIN, unit);
    put_kernel(p, kernel, unit, at);
    put(p, TOY_FORWARD_END, unit);
}

static void put_backward(toy_program *p, toy_kernel kernel, uint32_t unit, uint32_t at)
{
    put(p, TOY_BACKWARD_BEGIN, unit);
    put_kernel(p, kernel, unit, at);
    put(p, TOY_BACKWARD_END, unit);
}

/* The ends of the network; each is there once, tied or not. */
static void put_start(toy_program *p, const toy_shape *shape)
{
    *p = (toy_program){.n = 0};
    put(p, TOY_FORWARD_BEGIN, shape->embed);
    put_kernel(p, TOY_EMBED, shape->embed, 0);
    if (shape->embed != shape->head) put(p, TOY_FORWARD_END, shape->embed);
}

static void put_turn(toy_program *p, const toy_shape *shape, uint32_t n)
{
    bool tied = shape->embed == shape->head;
    if (!tied) put(p, TOY_FORWARD_BEGIN, shape->head);
    put_kernel(p, TOY_HEAD, shape->head, n);
    put(p, TOY_FORWARD_END, shape->head);
    p->n_forward = p->n;
    put(p, TOY_BACKWARD_BEGIN, shape->head);
    put_kernel(p, TOY_HEAD_BACK, shape->head, n);
    if (!tied) put(p, TOY_BACKWARD_END, shape->head);
}

static void put_stop(toy_program *p, const toy_shape *shape)
{
    if (shape->embed != shape->head) put(p, TOY_BACKWARD_BEGIN, shape->embed);
    put_kernel(p, TOY_EMBED_BACK, shape->embed, 0);
    put(p, TOY_BACKWARD_END, shape->embed);
}

void toy_program_windows(const toy_shape *shape, toy_program *p)
{
    uint32_t h = shape->first;
    put_start(p, shape);
    put(p, TOY_FORWARD_BEGIN, h);
    put_kernel(p, TOY_LAYER, h, 0);
    put(p, TOY_FORWARD_BEGIN, h + 1); /* 0 and 1 overlap, and 2 lies in 1 */
    put_kernel(p, TOY_LAYER, h + 1, 1);
    put(p, TOY_FORWARD_END, h);
    put(p, TOY_FORWARD_BEGIN, h + 2);
    put_kernel(p, TOY_LAYER, h + 2, 2);
    put_look(p, h + 4);
    put(p, TOY_FORWARD_END, h + 2);
    put_kernel(p, TOY_LOOK, h + 1, 0);
    put(p, TOY_FORWARD_END, h + 1);
    put_forward(p, TOY_LAYER, h + 3, 3);
    put_turn(p, shape, 4);
    put_begin(p, h + 3, FSDP_USE_RECOMPUTE);
    put_kernel(p, TOY_LAYER, h + 3, 3);
    put(p, TOY_BACKWARD_BEGIN, h + 3);
    put_kernel(p, TOY_LAYER_BACK, h + 3, 3);
    put(p, TOY_BACKWARD_END, h + 3);
    put(p, TOY_FORWARD_END, h + 3);
    put(p, TOY_BACKWARD_BEGIN, h + 2);
    put_begin(p, h + 2, FSDP_USE_RECOMPUTE);
    put_kernel(p, TOY_LAYER, h + 2, 2);
    put(p, TOY_FORWARD_END, h + 2);
    put_kernel(p, TOY_LAYER_BACK, h + 2, 2);
    put(p, TOY_BACKWARD_END, h + 2);
    put(p, TOY_BACKWARD_BEGIN, h + 1); /* two windows of one unit: one buffer, one reduction */
    put(p, TOY_BACKWARD_BEGIN, h + 1);
    put_kernel(p, TOY_LAYER_BACK_REST, h + 1, 1);
    put(p, TOY_BACKWARD_END, h + 1);
    put_look(p, h + 4);
    put_kernel(p, TOY_LAYER_BACK_WEIGHT, h + 1, 1);
    put(p, TOY_BACKWARD_END, h + 1);
    put_backward(p, TOY_LAYER_BACK, h, 0);
    put_stop(p, shape);
}

void toy_program_again(const toy_shape *shape, toy_program *p)
{
    static const uint32_t layers[] = {0, 1, 1, 2, 1, 2, 3, 4};
    toy_program_make(shape, layers, sizeof layers / sizeof *layers, p);
}

void toy_program_two_streams(const toy_shape *shape, toy_program *p)
{
    uint32_t h = shape->first;
    put_start(p, shape);
    for (uint32_t l = 0; l < TOY_LAYERS; l++) {
        put(p, TOY_FORWARD_BEGIN, h + l);
        put(p, TOY_USE, h + l);
        put_second(p, TOY_LOOK, h + l, 0);
        put_kernel(p, TOY_LAYER, h + l, l);
        put(p, TOY_FORWARD_END, h + l);
    }
    put_turn(p, shape, TOY_LAYERS);
    for (uint32_t l = TOY_LAYERS; l-- > 0;) {
        put(p, TOY_BACKWARD_BEGIN, h + l);
        put_kernel(p, TOY_LAYER_BACK_REST, h + l, l);
        put(p, TOY_FOLLOW, h + l);
        put(p, TOY_USE, h + l);
        put_second(p, TOY_LAYER_BACK_WEIGHT, h + l, l);
        put(p, TOY_BACKWARD_END, h + l);
    }
    put_stop(p, shape);
}

void toy_program_late_gradients(const toy_shape *shape, toy_program *p)
{
    uint32_t h = shape->first;
    put_start(p, shape);
    for (uint32_t l = 0; l < TOY_LAYERS; l++) put_forward(p, TOY_LAYER, h + l, l);
    put_turn(p, shape, TOY_LAYERS);
    for (uint32_t l = TOY_LAYERS; l-- > 0;) {
        put_begin(p, h + l, FSDP_USE_RECOMPUTE);
        put(p, TOY_USE, h + l);
        put_second(p, TOY_LOOK, h + l, 0);
        put_kernel(p, TOY_LAYER, h + l, l);
        put(p, TOY_BACKWARD_BEGIN, h + l);
        put(p, TOY_USE, h + l); /* now for the gradients */
        put_second(p, TOY_PULL, h + l, l);
        put(p, TOY_LEAD, h + l);
        put_kernel(p, TOY_LAYER_BACK_REST, h + l, l);
        put(p, TOY_FOLLOW, h + l);
        put_second(p, TOY_LAYER_BACK_WEIGHT, h + l, l);
        put(p, TOY_BACKWARD_END, h + l);
        put(p, TOY_FORWARD_END, h + l);
    }
    put_stop(p, shape);
}
