/* SPDX-License-Identifier: MIT */
/* Stage 2: a unit becomes flat groups. In: its parameters. Out: where each lies, the same element offset in compute, master,
 * gradient and moment buffers, and how long a shard is. Pure. Next: shard.c.
 *
 *   group:  | param 0 …pad | param 1 ……pad | … pad |      each parameter at a multiple of 128 elements,
 *           |---- rank 0 ----|---- rank 1 ----| … |       the whole padded to world × a multiple of 128
 *
 * A parameter may straddle ranks, be smaller than the world, or be empty. Pads are never read by a kernel that counts. */
#include "sharding/layout.h"

#include "lib/check.h"

#define MAX_ELEMS ((uint64_t)1 << 48)

static uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

static uint32_t find_group(fsdp_unit *unit, const fsdp_param *param)
{
    for (uint32_t g = 0; g < unit->n_groups; g++)
        if (unit->groups[g].compute_dtype == param->compute_dtype && unit->groups[g].frozen == param->frozen) return g;
    unit->groups[unit->n_groups] = (fsdp__group){.compute_dtype = param->compute_dtype, .frozen = param->frozen};
    return unit->n_groups++;
}

fsdp_status fsdp__layout_unit(fsdp_unit *unit, uint32_t world)
{
    if (unit->n_params == 0)
        return fsdp__fail(FSDP_ERR_ARG, "unit %s has no parameters: add one, or leave the unit out", unit->name);
    unit->n_groups = 0;
    unit->full_bytes = unit->grad_bytes = 0;
    unit->aliased = false;
    uint64_t elems = 0; /* of all groups */
    for (size_t i = 0; i < unit->n_params; i++) {
        fsdp_param *param = unit->params[i];
        param->group = find_group(unit, param);
        fsdp__group *group = &unit->groups[param->group];
        param->offset = group->elems;
        uint64_t rounded = round_up(param->elems, FSDP__ALIGN_ELEMS);
        group->elems += rounded, elems += rounded;
        if (elems > MAX_ELEMS)
            return fsdp__fail(FSDP_ERR_ARG, "unit %s: more than 2^48 elements with parameter %s: split the unit",
                              unit->name, param->name);
    }
    for (uint32_t g = 0; g < unit->n_groups; g++) {
        fsdp__group *group = &unit->groups[g];
        group->elems = round_up(group->elems, (uint64_t)world * FSDP__ALIGN_ELEMS);
        group->shard_elems = group->elems / world;
        group->aliased = world == 1 && group->compute_dtype == unit->config.master_dtype;
        unit->aliased |= group->aliased;
        group->full_offset = unit->full_bytes;
        if (!group->aliased) unit->full_bytes += group->elems * fsdp_dtype_bytes(group->compute_dtype);
        group->grad_offset = unit->grad_bytes;
        if (!group->frozen) unit->grad_bytes += group->elems * fsdp_dtype_bytes(unit->config.grad_dtype);
    }
    return FSDP_OK;
}

void fsdp__layout_range(const fsdp_param *param, uint32_t rank, uint64_t *begin, uint64_t *count, uint64_t *at)
{
    const fsdp__group *group = &param->unit->groups[param->group];
    uint64_t shard_begin = rank * group->shard_elems, shard_end = shard_begin + group->shard_elems;
    uint64_t low = param->offset > shard_begin ? param->offset : shard_begin;
    uint64_t high = param->offset + param->elems < shard_end ? param->offset + param->elems : shard_end;
    *count = low < high ? high - low : 0;
    *begin = *count > 0 ? low - param->offset : 0;
    *at = *count > 0 ? low - shard_begin : 0;
}
