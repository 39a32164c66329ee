/* SPDX-License-Identifier: MIT */
/* Kernels of the toy on devices whose memory the host cannot reach: the stream copies a kernel's parameters and gradients into
 * pinned memory, calls the host there, and copies the gradients back. One stage a stream is enough: the next kernel's copies
 * come after this one's. */
#include <stdlib.h>

#include "toy.h"

bool toy_always_staged;

bool toy_is_staged(const toy *t)
{
    const toy_config *c = t->config;
    return c->staged || c->device != NULL || (toy_always_staged && !c->sim && !c->explored);
}

static fsdp_status open_on_host(toy *t)
{
    t->math = t->maths = calloc(2, sizeof *t->maths);
    for (int i = 0; i < 2; i++) t->scratch[i] = calloc(1, TOY_SCRATCH_BYTES);
    TOY_CHECK(t->math != NULL && t->scratch[0] != NULL && t->scratch[1] != NULL);
    t->maths[0].one = t->maths[1].one = 1.0f;
    return FSDP_OK;
}

fsdp_status toy_stage_open(toy *t)
{
    const uint64_t math_bytes = (2 * sizeof *t->maths + 255) / 256 * 256, block_bytes = 2 * TOY_SCRATCH_BYTES + 1024;
    if (!toy_is_staged(t)) return open_on_host(t);
    TOY_TRY(fsdp_pinned_alloc(t->ctx, math_bytes + 2 * TOY_STAGE_BYTES, &t->pinned));
    t->math = t->maths = t->pinned;
    t->maths[0] = t->maths[1] = (toy_math){.one = 1.0f};
    fsdp_allocator_config room = FSDP_ALLOCATOR_CONFIG_INIT;
    room.name = "toy";
    TOY_TRY(fsdp_allocator_create(t->ctx, &room, &t->room));
    TOY_TRY(fsdp_allocator_alloc(t->room, block_bytes, t->s, "toy", &t->block));
    fsdp_alloc_stats stats = FSDP_ALLOC_STATS_INIT;
    TOY_TRY(fsdp_allocator_stats(t->room, &stats));
    t->result->room_bytes = stats.reserved;
    for (int i = 0; i < 2; i++) {
        t->stage[i] = (char *)t->pinned + math_bytes + i * TOY_STAGE_BYTES;
        t->scratch[i] = (char *)t->block + i * TOY_SCRATCH_BYTES;
        t->device_loss[i] = (float *)((char *)t->block + 2 * TOY_SCRATCH_BYTES + i * 256);
    }
    t->device_one = (float *)((char *)t->block + 2 * TOY_SCRATCH_BYTES + 512);
    TOY_TRY(fsdp_allocator_record_stream(t->room, t->block, t->second));
    TOY_TRY(fsdp_stream_fill(t->s, t->block, 0, block_bytes));
    TOY_TRY(fsdp_stream_copy(t->s, t->device_one, &t->maths[0].one, sizeof *t->device_one));
    TOY_TRY(fsdp_stream_drain_host(t->s, toy_timeout_ns));
    return FSDP_OK;
}

/* Once the streams are idle, before the context goes. */
void toy_stage_close(toy *t)
{
    if (!toy_is_staged(t)) {
        free(t->scratch[0]);
        free(t->scratch[1]);
        free(t->maths);
        return;
    }
    if (t->ctx == NULL) return;
    bool closed = t->room == NULL || fsdp_allocator_free(t->room, t->block) == FSDP_OK;
    closed &= fsdp_allocator_destroy(t->room) == FSDP_OK;
    closed &= fsdp_pinned_free(t->ctx, t->pinned) == FSDP_OK;
    if (!closed) (void)toy_fail(t, FSDP_ERR_STATE, __FILE__, __LINE__, "giving the stage back", fsdp_last_error());
}

void toy_kernel_adds(const toy_job *job, uint32_t *first, uint32_t *end)
{
    bool backward = job->kernel >= TOY_HEAD_BACK && job->kernel <= TOY_EMBED_BACK;
    bool weight = job->kernel == TOY_LAYER_BACK_WEIGHT || job->kernel == TOY_PULL;
    *first = job->kernel == TOY_LAYER_BACK_REST ? 1 : 0;
    *end = !backward ? 0 : weight ? 1 : job->shape->unit[job->unit].n_params;
}

fsdp_status toy_stage_bytes(toy *t, fsdp_stream *s, uint64_t at, const void *from, uint64_t bytes, void **out)
{
    TOY_CHECK(at + bytes <= TOY_STAGE_BYTES);
    *out = t->stage[s == t->streams[1]] + at;
    if (bytes > 0) TOY_TRY(fsdp_stream_copy(s, *out, from, bytes));
    return FSDP_OK;
}

static uint64_t aligned(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

fsdp_status toy_stage_in(toy *t, fsdp_stream *s, toy_job *job)
{
    if (!toy_is_staged(t)) return FSDP_OK;
    const toy_unit *unit = &job->shape->unit[job->unit];
    uint32_t first, end;
    uint64_t at = 0;
    toy_kernel_adds(job, &first, &end);
    for (uint32_t i = 0; i < unit->n_params; i++) {
        const toy_param *param = &unit->param[i];
        uint64_t bytes = param->elems * fsdp_dtype_bytes(param->compute);
        TOY_TRY(toy_stage_bytes(t, s, at, job->p[i], bytes, &job->p[i]));
        at += aligned(bytes);
        job->home[i] = i >= first && i < end ? job->g[i] : NULL;
        job->g[i] = NULL;
        if (job->home[i] == NULL) continue; /* not this kernel's, or frozen */
        bytes = param->elems * fsdp_dtype_bytes(unit->grad);
        TOY_TRY(toy_stage_bytes(t, s, at, job->home[i], bytes, &job->g[i]));
        at += aligned(bytes);
    }
    return FSDP_OK;
}

fsdp_status toy_stage_out(toy *t, fsdp_stream *s, const toy_job *job)
{
    if (!toy_is_staged(t)) return FSDP_OK;
    const toy_unit *unit = &job->shape->unit[job->unit];
    for (uint32_t i = 0; i < unit->n_params; i++) {
        uint64_t bytes = unit->param[i].elems * fsdp_dtype_bytes(unit->grad);
        if (job->home[i] != NULL && bytes > 0) TOY_TRY(fsdp_stream_copy(s, job->home[i], job->g[i], bytes));
    }
    return FSDP_OK;
}

fsdp_status toy_stage_loss(toy *t, const float **out_loss)
{
    *out_loss = &t->math->loss;
    if (!toy_is_staged(t)) return FSDP_OK;
    float *device = t->device_loss[t->s == t->streams[1]];
    TOY_TRY(fsdp_stream_copy(t->s, device, &t->math->loss, sizeof *device));
    *out_loss = device;
    return FSDP_OK;
}
