/* SPDX-License-Identifier: MIT */
/* The step as one writes it by hand, for this model alone: the floor for what a library may cost. Gathers in place, `depth`
 * layers ahead, on a high-priority stream, in depth + 1 buffers by turns; gradients in two buffers, reduce-scattered on a
 * third stream; AdamW on the shards at the end, with clipping where it is asked for. The last block stays gathered from forward
 * to backward. Nothing is checked or counted, and a step gathers its first layer when the optimizer is done. */
#include <string.h>

#include "block_bench.h"

typedef struct bare {
    block_way *way;
    uint32_t rank, world, layers, depth;
    uint64_t elems, shard; /* of a layer: padded to the world; this rank's part */
    cudaStream_t gather, reduce;
    ncclComm_t comm, reduce_comm;
    char *full[BLOCK_MOST_DEPTH + 1], *full_range;
    float *grad[2], *grad_range;
    float *master[BLOCK_MOST_LAYERS], *gradient[BLOCK_MOST_LAYERS], *m[BLOCK_MOST_LAYERS], *v[BLOCK_MOST_LAYERS];
    block_record *record;
    float *meeting, *partial; /* partial: with clip, BLOCK_SUMS a layer and their sum */
    cudaEvent_t begin, ready[BLOCK_MOST_LAYERS], used[BLOCK_MOST_LAYERS], reduced[BLOCK_MOST_LAYERS];
    uint32_t slot_of[BLOCK_MOST_LAYERS], next_slot;
    int user_of[BLOCK_MOST_DEPTH + 1];
    cudaGraph_t graph;
    cudaGraphExec_t exec;
} bare;

static void gather(bare *b, uint32_t layer)
{
    uint32_t slot = b->next_slot;
    if (b->way->options->keep) slot = layer % (b->depth + 1);
    b->next_slot = (slot + 1) % (b->depth + 1);
    b->slot_of[layer] = slot;
    if (b->user_of[slot] >= 0) CUDA(cudaStreamWaitEvent(b->gather, b->used[b->user_of[slot]], 0));
    b->user_of[slot] = (int)layer;
    char *mine = b->full[slot] + b->rank * b->shard * 2;
    block_cast(mine, b->master[layer], b->shard, b->gather);
    NCCL(ncclAllGather(mine, b->full[slot], b->shard, ncclBfloat16, b->comm, b->gather));
    CUDA(cudaEventRecord(b->ready[layer], b->gather));
    b->way->gathers++;
}

static void forward(bare *b, bool compute)
{
    block_way *way = b->way;
    for (uint32_t l = 0; l < b->layers; l++) {
        block_enter(way);
        if (l == 0) {
            CUDA(cudaEventRecord(b->begin, way->stream));
            CUDA(cudaStreamWaitEvent(b->gather, b->begin, 0));
            gather(b, 0);
        }
        CUDA(cudaStreamWaitEvent(way->stream, b->ready[l], 0));
        for (uint32_t k = 1; k <= b->depth; k++)
            if (l + k < b->layers && (k == b->depth || l == 0)) gather(b, l + k);
        block_leave_hook(way);
        const void *params[BLOCK_PARAMS];
        block_params_at(way, b->full[b->slot_of[l]], params);
        if (compute) block_forward(way->math, l, params);
        block_enter(way);
        CUDA(cudaEventRecord(b->used[l], way->stream));
        if (b->depth == 0 && l + 1 < b->layers) gather(b, l + 1);
        block_leave_hook(way);
    }
}

/* What backward's layer l wants gathered before it begins. */
static void gather_back(bare *b, uint32_t l)
{
    const bool first = l + 1 == b->layers;
    if (b->depth == 0) {
        if (!first) gather(b, l);
        return;
    }
    if (b->way->options->keep) {
        if (!first && l >= b->depth) gather(b, l - b->depth);
        return;
    }
    for (uint32_t k = 1; k <= b->depth; k++)
        if (l >= k && (k == b->depth || first)) gather(b, l - k);
}

static void backward(bare *b, bool compute)
{
    block_way *way = b->way;
    for (uint32_t l = b->layers; l-- > 0;) {
        block_enter(way);
        gather_back(b, l);
        CUDA(cudaStreamWaitEvent(way->stream, b->ready[l], 0));
        if (l + 2 < b->layers) CUDA(cudaStreamWaitEvent(way->stream, b->reduced[l + 2], 0));
        block_leave_hook(way);
        const void *params[BLOCK_PARAMS];
        float *grads[BLOCK_PARAMS];
        block_params_at(way, b->full[b->slot_of[l]], params);
        block_grads_at(way, b->grad[l % 2], grads);
        if (compute) block_backward(way->math, l, params, grads);
        block_enter(way);
        CUDA(cudaEventRecord(b->used[l], way->stream));
        CUDA(cudaStreamWaitEvent(b->reduce, b->used[l], 0));
        NCCL(
            ncclReduceScatter(b->grad[l % 2], b->gradient[l], b->shard, ncclFloat, ncclSum, b->reduce_comm, b->reduce));
        CUDA(cudaEventRecord(b->reduced[l], b->reduce));
        block_leave_hook(way);
    }
}

/* The gradient's norm over all ranks, and what clipping makes of it. */
static void clip(bare *b, float factor)
{
    cudaStream_t stream = b->way->stream;
    float *sum = b->partial + (uint64_t)b->layers * BLOCK_SUMS;
    for (uint32_t l = 0; l < b->layers; l++)
        block_square_sums(b->partial + (uint64_t)l * BLOCK_SUMS, b->gradient[l], b->shard, stream);
    block_add_sums(sum, b->partial, b->layers, stream);
    if (b->world > 1) NCCL(ncclAllReduce(sum, sum, 1, ncclFloat, ncclSum, b->reduce_comm, stream));
    block_clip(b->record, sum, factor, BLOCK_MAX_NORM, stream);
}

static void bare_step(block_way *way, bool compute)
{
    bare *b = way->self;
    memset(&way->times, 0, sizeof way->times);
    b->next_slot = 0;
    for (uint32_t i = 0; i <= b->depth; i++) b->user_of[i] = -1;
    forward(b, compute);
    if (compute) block_loss(way->math);
    backward(b, compute);
    block_enter(way);
    CUDA(cudaStreamWaitEvent(way->stream, b->reduced[0], 0));
    if (compute) {
        const float factor = 1.0f / (float)b->world;
        block_advance(b->record, way->stream);
        if (way->options->clip) clip(b, factor);
        for (uint32_t l = 0; l < b->layers; l++)
            block_adamw(b->master[l], b->gradient[l], b->m[l], b->v[l], b->shard, b->record, factor, way->stream);
    }
    block_leave_update(way);
}

static void bare_barrier(block_way *way)
{
    bare *b = way->self;
    NCCL(ncclAllReduce(b->meeting, b->meeting, 1, ncclFloat, ncclSum, b->comm, way->stream));
}

static void drop_graph(bare *b)
{
    if (b->exec == NULL) return;
    CUDA(cudaGraphExecDestroy(b->exec));
    CUDA(cudaGraphDestroy(b->graph));
    b->exec = NULL;
}

static void bare_capture(block_way *way)
{
    bare *b = way->self;
    drop_graph(b);
    CUDA(cudaStreamBeginCapture(way->stream, cudaStreamCaptureModeThreadLocal));
    bare_step(way, true);
    CUDA(cudaStreamEndCapture(way->stream, &b->graph));
    block_stage = "instantiating the graph";
    CUDA(cudaGraphInstantiate(&b->exec, b->graph, cudaGraphInstantiateFlagUseNodePriority));
    block_stage = "replaying";
}

static void bare_replay(block_way *way)
{
    bare *b = way->self;
    CUDA(cudaGraphLaunch(b->exec, way->stream));
}

static void bare_look(block_way *way) { way->predicted_bytes = way->device_bytes; } /* nobody predicts them */

static void bare_close(block_way *way)
{
    bare *b = way->self;
    CUDA(cudaDeviceSynchronize());
    drop_graph(b); /* NCCL waits for graphs that hold its collectives */
    if (b->reduce_comm != b->comm) NCCL(ncclCommDestroy(b->reduce_comm));
    NCCL(ncclCommDestroy(b->comm)); /* windows end with it; memory, events and streams with the process */
    free(b);
}

/* ---- Opening ---- */

static void open_comms(bare *b)
{
    const block_options *o = b->way->options;
    char at[FSDP_ADDRESS_BYTES + 8];
    /* Every rank makes the same id from an address: no other bootstrap is needed. */
    snprintf(at, sizeof at, "%s:%u", b->way->launch.address, b->way->launch.port + 1u);
    if (b->world > 1 && setenv("NCCL_COMM_ID", at, 0) != 0) BENCH_FAIL("no memory");
    ncclUniqueId id;
    ncclConfig_t config;
    block_nccl_config(o, &config);
    NCCL(ncclGetUniqueId(&id));
    NCCL(ncclCommInitRankConfig(&b->comm, (int)b->world, id, (int)b->rank, &config));
    b->reduce_comm = b->comm;
    if (o->comms == 2) NCCL(ncclCommSplit(b->comm, 0, (int)b->rank, &b->reduce_comm, NULL));
}

static void *take(bare *b, uint64_t bytes, bool for_window)
{
    void *ptr = NULL;
    if (for_window) NCCL(ncclMemAlloc(&ptr, bytes));
    else CUDA(cudaMalloc(&ptr, bytes));
    CUDA(cudaMemset(ptr, 0, bytes));
    CUDA(cudaDeviceSynchronize()); /* our streams do not wait for the default stream, where memsets are */
    b->way->device_bytes += bytes;
    return ptr;
}

static void register_window(ncclComm_t comm, void *range, uint64_t bytes)
{
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    ncclWindow_t window;
    NCCL(ncclCommWindowRegister(comm, range, bytes, &window, NCCL_WIN_COLL_SYMMETRIC));
#else
    (void)comm, (void)range, (void)bytes;
    BENCH_FAIL("--window needs NCCL 2.27 or later");
#endif
}

static void open_memory(bare *b)
{
    const block_options *o = b->way->options;
    block_load_shard_kernels();
    b->elems = block_padded_elems(o, b->world);
    b->shard = b->elems / b->world;
    for (uint32_t l = 0; l < b->layers; l++) {
        float **const at[] = {&b->master[l], &b->gradient[l], &b->m[l], &b->v[l]};
        for (int i = 0; i < 4; i++) *at[i] = take(b, b->shard * 4, false);
        block_first_values(b->master[l], b->rank * b->shard, b->shard, l, o->dim, b->way->stream);
    }
    const uint64_t full_bytes = (b->elems * 2 + 511) / 512 * 512;
    b->full_range = take(b, full_bytes * (b->depth + 1), o->window);
    b->grad_range = take(b, b->elems * 4 * 2, o->window_grad);
    for (uint32_t i = 0; i <= b->depth; i++) b->full[i] = b->full_range + i * full_bytes;
    for (uint32_t i = 0; i < 2; i++) b->grad[i] = b->grad_range + i * b->elems;
    if (o->window) register_window(b->comm, b->full_range, full_bytes * (b->depth + 1));
    if (o->window_grad) register_window(b->reduce_comm, b->grad_range, b->elems * 4 * 2);
    b->record = take(b, sizeof *b->record, false);
    b->meeting = take(b, sizeof *b->meeting, false);
    b->partial = o->clip ? take(b, ((uint64_t)b->layers * BLOCK_SUMS + 1) * sizeof(float), false) : NULL;
}

void block_bare_open(block_way *way)
{
    bare *b = calloc(1, sizeof *b);
    if (b == NULL) BENCH_FAIL("no memory");
    way->self = b;
    way->step = bare_step;
    way->barrier = bare_barrier;
    way->capture = bare_capture;
    way->replay = bare_replay;
    way->look = bare_look;
    way->close = bare_close;
    b->way = way;
    b->rank = way->launch.rank;
    b->world = way->launch.world;
    b->layers = way->options->layers;
    b->depth = way->options->depth;
    int low, high;
    CUDA(cudaDeviceGetStreamPriorityRange(&low, &high));
    CUDA(cudaStreamCreateWithPriority(&b->gather, cudaStreamNonBlocking, high));
    if (way->options->one_lane) b->reduce = b->gather;
    else CUDA(cudaStreamCreateWithPriority(&b->reduce, cudaStreamNonBlocking, high));
    CUDA(cudaEventCreateWithFlags(&b->begin, cudaEventDisableTiming));
    for (uint32_t l = 0; l < b->layers; l++) {
        CUDA(cudaEventCreateWithFlags(&b->ready[l], cudaEventDisableTiming));
        CUDA(cudaEventCreateWithFlags(&b->used[l], cudaEventDisableTiming));
        CUDA(cudaEventCreateWithFlags(&b->reduced[l], cudaEventDisableTiming));
    }
    open_comms(b);
    open_memory(b);
    /* Each kind of collective once: NCCL connects at the first. */
    bare_barrier(way);
    NCCL(ncclAllGather(b->full[0] + b->rank * b->shard * 2, b->full[0], b->shard, ncclBfloat16, b->comm, way->stream));
    NCCL(ncclReduceScatter(b->grad[0], b->gradient[0], b->shard, ncclFloat, ncclSum, b->reduce_comm, way->stream));
    CUDA(cudaDeviceSynchronize());
}
