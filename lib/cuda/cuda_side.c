/* SPDX-License-Identifier: MIT */
/* The side channel: of processes the star of lib/net, or the caller's own; of threads, and of a world of one, the host
 * backend's room. */
#include "cuda_backend.h"
#include "fsdp/host.h"
#include "host/host.h"
#include "hostmem.h"
#include "net/star.h"

typedef struct side {
    const fsdp_host_allocator *host;
    const fsdp_side_ops *ops; /* who does it */
    void *real;
} side;

static fsdp_status open_real(side *s, const fsdp_side_args *args, const fsdp_cuda_config *config, uint32_t *out_rank,
                             uint32_t *out_world)
{
    fsdp__star_config star = {config->launch, config->side, -1};
    fsdp_host_config room = FSDP_HOST_CONFIG_INIT;
    room.local = config->local;
    room.rank = config->rank;
    fsdp_side_args theirs = *args;
    if (config->launch != NULL) {
        s->ops = config->side != NULL ? &fsdp__own_side_ops : &fsdp__star_side_ops;
        theirs.backend_config = &star;
    } else {
        s->ops = &fsdp__host_side_ops;
        theirs.backend_config = &room;
    }
    return s->ops->open(&theirs, &s->real, out_rank, out_world);
}

static fsdp_status side_open(const fsdp_side_args *args, void **out_side, uint32_t *out_rank, uint32_t *out_world)
{
    fsdp__cuda_setup setup;
    FSDP_TRY(fsdp__cuda_setup_read(args->backend_config, &setup));
    side *s = fsdp__host_alloc(args->host, 1, sizeof *s);
    if (s == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "side channel: no host memory for %zu bytes", sizeof *s);
    s->host = args->host;
    fsdp_status status = open_real(s, args, &setup.config, out_rank, out_world);
    if (status != FSDP_OK) {
        fsdp__host_free(args->host, s, 1, sizeof *s);
        return status;
    }
    *out_side = s;
    return FSDP_OK;
}

static void side_close(void *side_)
{
    side *s = side_;
    s->ops->close(s->real);
    fsdp__host_free(s->host, s, 1, sizeof *s);
}

static fsdp_status all_gather(void *side_, const void *mine, void *all, size_t bytes, uint64_t timeout_ns)
{
    side *s = side_;
    return s->ops->all_gather(s->real, mine, all, bytes, timeout_ns);
}

static fsdp_status broadcast(void *side_, void *data, size_t bytes, uint32_t root, uint64_t timeout_ns)
{
    side *s = side_;
    return s->ops->broadcast(s->real, data, bytes, root, timeout_ns);
}

static void side_fail(void *side_, fsdp_status status, const char *sentence)
{
    side *s = side_;
    (s->ops->fail)(s->real, status, sentence);
}

static fsdp_status side_check(void *side_)
{
    side *s = side_;
    return s->ops->check(s->real);
}

const fsdp_side_ops fsdp__cuda_side_ops = {
    .size = sizeof fsdp__cuda_side_ops,
    .open = side_open,
    .close = side_close,
    .all_gather = all_gather,
    .broadcast = broadcast,
    .fail = side_fail,
    .check = side_check,
};
