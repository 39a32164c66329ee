/* SPDX-License-Identifier: MIT */
/* A trainer for tests: the toy network of toy_math.h through the whole library, ranks as threads or processes (or one
 * simulated rank), every knob in a config, everything that can be compared in a result; and the same training as a plain
 * loop.
 *
 * toy_run gives each rank a thread or a process, and a toy, opens it, runs a script on it (NULL: toy_train) and closes it.
 * A script returns at once when something fails; the rank's context is then aborted, so that no other rank waits for it,
 * and the first rank's sentence comes back. No CMocka assertion runs on a rank: scripts use TOY_TRY and TOY_CHECK. What a
 * script writes to its argument comes home from processes only if that lies in memory of processes_shared.
 *
 * Kernels are host functions. Where device memory is none of the host's (CUDA), each works on copies in pinned memory, which
 * the stream brings before it and takes back after it (toy_stage.c). */
#ifndef TOY_H
#define TOY_H

#include "explore.h"
#include "fsdp/fsdp.h"
#include "processes.h"
#include "toy_math.h"
#include "toy_tape.h"

enum {
    TOY_STEPS = 200,
    TOY_WORLD = 8,
    TOY_LINES = 128,
    TOY_SCRATCH_BYTES = 1 << 16,
    TOY_STAGE_BYTES = 1 << 17,
    TOY_TRAININGS = 32
};
static const uint64_t toy_timeout_ns = 100000000000ull;

typedef enum toy_pace {
    TOY_AHEAD,     /* the host asks for a report when it is about to leave the ring */
    TOY_TWO_AHEAD, /* the report of step − 2 */
    TOY_STEP_BY_STEP,
    TOY_HOOK_BY_HOOK /* the compute stream is idle after every hook */
} toy_pace;

typedef enum toy_eval {
    TOY_EVAL_NONE,
    TOY_EVAL_NAMED,   /* an EVAL pass before each step, and `next` says so */
    TOY_EVAL_SURPRISE /* … and `next` says something else */
} toy_eval;

typedef enum toy_optimizer {
    TOY_ADAMW,
    TOY_OWN_ADAMW, /* the same, written by the test inside the update bracket */
    TOY_OWN_SGD
} toy_optimizer;

/* What a micro-step does, line by line. */
typedef enum toy_op {
    TOY_FORWARD_BEGIN,
    TOY_FORWARD_END,
    TOY_BACKWARD_BEGIN,
    TOY_BACKWARD_END,
    TOY_USE,    /* the second stream joins the unit's window */
    TOY_FOLLOW, /* the second stream waits for the first … */
    TOY_LEAD,   /* … or the first for the second */
    TOY_KERNEL,
    TOY_KERNEL_SECOND /* on the second stream */
} toy_op;

typedef struct toy_line {
    toy_op op;
    uint32_t unit;
    fsdp_use use; /* BEGIN */
    toy_kernel kernel;
    uint32_t at;
} toy_line;

typedef struct toy_program {
    toy_line line[TOY_LINES];
    uint32_t n, n_forward; /* lines; of these, up to the loss: an evaluation */
} toy_program;

/* The way through `n` layers, there and back. */
void toy_program_make(const toy_shape *shape, const uint32_t *layers, uint32_t n, toy_program *program);
void toy_program_add(toy_program *program, toy_line line);
/* The pass that the program is: its begin lines, with the windows that nest. Returns how many visits. */
uint32_t toy_program_visits(const toy_program *program, fsdp_unit *const *units, fsdp_visit *visits);

typedef struct toy toy;

/* A device that support does not know: tests/gpu/gpu_toy.h. */
typedef struct toy_device {
    void (*begin_process)(uint32_t rank);
    fsdp_status (*open_context)(toy *t, fsdp_config *config); /* t->ctx */
} toy_device;

typedef struct toy_config {
    bool sim;
    uint32_t world, depth, grad_buffers, micro_steps, steps;
    uint64_t prefetch_bytes;
    fsdp_accumulation accumulation;
    bool grad_sum, reduce_comm;
    toy_shape_config shape;
    uint32_t debug;
    uint64_t jitter_ns, jitter_seed;
    toy_pace pace;
    toy_eval eval;
    toy_optimizer optimizer;
    float lr, weight_decay, max_norm;
    uint32_t spoil_step, spoil_rank; /* a NaN gradient there; step 0: none */
    bool own_program, declare;       /* program below instead of the way through all layers; as a pass of its own */
    toy_program program;
    bool alternate;     /* every other micro-step on the second stream, with rows of its own */
    bool touch;         /* kernels' accesses stand on the tape, as copies */
    bool trace, values; /* what the result is wanted to have besides: a verdict; the masters */
    bool explored;      /* on the exploration device, in this order of steps; its world and memory are set by toy_run */
    explore_config order;
    bool processes; /* ranks are processes, which meet in this way; no tape comes home */
    bool own_side;  /* … by a side channel of the test's own */
    process_way way;
    bool staged;                             /* kernels work on copies, as on CUDA, whatever the device */
    uint64_t sim_alignment, sim_granularity; /* not 0: of sim, as another device has them */
    const toy_device *device;                /* not NULL: this one; staged, ranks are processes */
    bool tape, schedule; /* what the result is wanted to have besides: the tape itself (with trace); order's schedule */
} toy_config;

/* One rank, depth 1, fp32, three steps. */
toy_config toy_config_default(void);

typedef struct toy_result {
    char error[768];                    /* "" if all went well */
    fsdp_step_report report[TOY_STEPS]; /* of step i + 1; TOY_ADAMW only */
    float loss[TOY_STEPS];              /* sum over ranks and micro-steps */
    uint64_t hash;
    fsdp_memory predicted, memory;
    uint64_t room_bytes;        /* device memory that a staged toy took for itself */
    fsdp_counters sealed, done; /* after seal; after the script */
    fsdp_model_stats stats;
    size_t races;
    char race[640];
    char complaint[1024]; /* the exploration device's, on rank 0; "" if none */
    uint64_t order_hash, n_order_steps;
    char *schedule; /* on rank 0 */
    toy_tape *tape;
    uint64_t n_records;
    float *master; /* every parameter, in registration order, on rank 0 */
    uint64_t n_master;
} toy_result;

typedef struct toy_jobs toy_jobs;
typedef struct toy_own_job toy_own_job;

struct toy {
    const toy_config *config;
    toy_result *result;
    float *masters; /* rank 0's result.master, to which each rank adds its own */
    void *arg;
    uint32_t rank;
    fsdp_local *local;
    const fsdp_launch *launch; /* ranks are processes */
    const fsdp_side_channel *side;
    const fsdp_backend *backend; /* not NULL: this one, with its config, whatever the toy's config says */
    const void *backend_config;
    explore *x;
    toy_shape shape;
    toy_program program;
    fsdp_context *ctx;
    fsdp_stream *s, *second, *streams[2]; /* the two in their roles; the two */
    fsdp_model *model;
    fsdp_unit *unit[TOY_UNITS];
    fsdp_adamw *opt;
    int32_t pass; /* that micro-steps run under */
    fsdp_trace *trace;
    toy_math *math; /* of the micro-step that is being made */
    toy_jobs *jobs; /* what was enqueued; freed when the stream is idle for good */
    void *p[TOY_UNITS][TOY_PARAMS], *g[TOY_UNITS][TOY_PARAMS]; /* of the last begin hooks */
    toy_math *maths;                                           /* one a stream */
    void *scratch[2];                                          /* of each stream, for touches */
    void *pinned;                                              /* staged: maths and stages */
    char *stage[2];                                            /* … of each stream: what a kernel works on */
    fsdp_allocator *room;                                      /* … where what lies on the device is from: */
    void *block;                                               /* … scratch, and the next two */
    float *device_loss[2], *device_one;                        /* … as in maths, where step sums want them */
    float *own_m, *own_v; /* of an optimizer of the test's own: as many elements as the segments have */
    toy_own_job *own_jobs;
    uint64_t n_updates, n_reported;
};

typedef fsdp_status (*toy_script)(toy *t);

/* Every run on the host backend has ranks as processes, whatever its config says. False to begin with. */
extern bool toy_always_processes;
/* Every run but those on sim and the exploration device is staged. False to begin with. */
extern bool toy_always_staged;

#define TOY_TRY(expr)                                                                                              \
    do {                                                                                                           \
        fsdp_status toy_status_ = (expr);                                                                          \
        if (toy_status_ != FSDP_OK) return toy_fail(t, toy_status_, __FILE__, __LINE__, #expr, fsdp_last_error()); \
    } while (0)
#define TOY_CHECK(condition)                                                                              \
    do {                                                                                                  \
        if (!(condition)) return toy_fail(t, FSDP_ERR_STATE, __FILE__, __LINE__, #condition, "is false"); \
    } while (0)
/* Keeps the first sentence; returns status. */
fsdp_status toy_fail(toy *t, fsdp_status status, const char *file, int line, const char *what, const char *why);

/* results: one a rank (one, if simulated); zeros, or what an earlier run left, which is freed. False: a rank failed;
 * results[0].error is its sentence. */
bool toy_run(const toy_config *config, toy_script script, void *arg, toy_result *results);
/* n trainings of one world one after the other, by ranks that are processes and are started once: for devices that are slow to
 * open. results: those of the first, then those of the second, … False: as above; the sentence is in the training's first. */
bool toy_run_each(const toy_config *configs, uint32_t n, toy_script script, void *arg, toy_result *results);
void toy_results_free(toy_result *results, uint32_t n);
/* One rank of a training whose others are started elsewhere, here and now. */
bool toy_run_rank(const toy_config *config, const fsdp_launch *launch, toy_script script, void *arg,
                  toy_result *result);

/* ---- Scripts ---- */

/* All steps, all reports, then toy_finish. */
fsdp_status toy_train(toy *t);
/* Step t->n_updates + 1: an evaluation if so configured, micro-steps, update, reports by pace. */
fsdp_status toy_step(toy *t);
fsdp_status toy_micro(toy *t, uint32_t index);
fsdp_status toy_evaluate(toy *t);
fsdp_status toy_update(toy *t);
/* Reports up to step. */
fsdp_status toy_reports(toy *t, uint64_t step);
/* What is left of the reports; hash, values, counters; the tape's verdict. */
fsdp_status toy_finish(toy *t);

/* What toy_run does around a script (toy_rank.c). */
fsdp_status toy_open(toy *t);
void toy_close(toy *t);
void toy_jobs_free(toy_jobs *jobs);

/* toy_stage.c. Where kernels are not staged, these leave all as it is. open: before the first kernel. */
bool toy_is_staged(const toy *t);
fsdp_status toy_stage_open(toy *t);
void toy_stage_close(toy *t);
/* Bring what the kernel reads and adds to, pointing job at the copies, before it; take back what it added to, after it. */
fsdp_status toy_stage_in(toy *t, fsdp_stream *s, toy_job *job);
fsdp_status toy_stage_out(toy *t, fsdp_stream *s, const toy_job *job);
/* The gradients that a kernel adds to: *first … *end − 1 of its unit's parameters. */
void toy_kernel_adds(const toy_job *job, uint32_t *first, uint32_t *end);
/* A copy of device memory in the stream's stage, from byte `at` on; *out is where it lies once it has run. */
fsdp_status toy_stage_bytes(toy *t, fsdp_stream *s, uint64_t at, const void *from, uint64_t bytes, void **out);
/* Where fsdp_step_sum finds the loss of the micro-step that is being made. */
fsdp_status toy_stage_loss(toy *t, const float **out_loss);

fsdp_status toy_pass_begin(toy *t, uint32_t index);
/* Copies of `bytes` at ptr into the stream's scratch, and back if write: accesses that a tape sees. */
fsdp_status toy_touch(toy *t, fsdp_stream *s, void *ptr, uint64_t bytes, bool write);
/* Lines begin … end − 1 of a program. sample: which data. */
fsdp_status toy_play(toy *t, const toy_program *program, uint32_t begin, uint32_t end, uint64_t sample);
/* The step sums of a micro-step: its loss, and a one. */
fsdp_status toy_sums(toy *t);
/* The sample of this rank's micro-step of the step that is being made. */
uint64_t toy_sample(const toy *t, uint32_t index);
/* Every parameter's value in out (result.n_master floats). Collective. */
fsdp_status toy_values(toy *t, fsdp_value value, float *out);

/* ---- The plain loop (toy_plain.c): no shards, no streams; the samples of all ranks one after the other, and sums over
 * ranks, windows and micro-steps in the order that fsdp/comm.h and fsdp/model.h promise ----
 *
 * Fills loss, master and, of the reports, grad_norm (from a sum in double precision), clip_scale, updates and skipped.
 * norms: what to clip by, a float a step, instead of its own norm; NULL: its own. */
void toy_plain(const toy_config *config, const toy_shape *shape, const toy_program *program, const float *norms,
               toy_result *result);
/* Shape and program that a config runs. */
void toy_resolve(const toy_config *config, toy_shape *shape, toy_program *program);

#endif
