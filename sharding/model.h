/* SPDX-License-Identifier: MIT */
/* What the files of sharding/ share: a model, its units, their flat groups and parameters.
 *
 * The journey of a parameter, a file a stage:  param → layout → shard → unshard → [compute] → reduce → optim. */
#ifndef FSDP_SHARDING_MODEL_H
#define FSDP_SHARDING_MODEL_H

#include "fsdp/optim.h"
#include "lib/alloc.h"
#include "lib/context.h"
#include "lib/schedule.h"
#include "sharding/names.h"

enum {
    FSDP__ALIGN_ELEMS = 128, /* every parameter begins at a multiple, every group ends at world × a multiple */
    FSDP__MAX_DEPTH = 64,
    FSDP__MAX_USERS = 4, /* further compute streams in a window */
    FSDP__MAX_GROUPS = 6 /* three compute dtypes × trainable or frozen */
};

struct fsdp_param {
    fsdp_unit *unit;
    char *name;
    uint32_t index;  /* in its unit */
    uint32_t number; /* in the model, registration order */
    uint32_t n_dims;
    uint64_t dims[FSDP_MAX_DIMS];
    uint64_t elems;
    fsdp_dtype compute_dtype;
    bool frozen, no_decay;
    float lr_scale;
    uint32_t group;
    uint64_t offset; /* elements, in its group: the same in compute, master, gradient and moment buffers */
};

/* Parameters of one compute dtype, trainable or frozen, one after another: what one collective carries. */
typedef struct fsdp__group {
    /* of hooks */
    _Alignas(64) fsdp_dtype compute_dtype;
    bool frozen;
    bool aliased;   /* world of one, compute dtype == master dtype: the full buffer is the shard */
    uint64_t elems; /* padded: world × shard_elems */
    uint64_t shard_elems;
    uint64_t full_offset;    /* bytes, in the unit's gathered buffer */
    uint64_t grad_offset;    /* bytes, in the unit's gradient buffer */
    char *master, *gradient; /* after seal; gradient NULL if frozen */

    uint64_t master_offset, gradient_offset; /* bytes, in the model's ranges */
    uint64_t moment_offset;                  /* bytes of m in the range of moments; v follows at + shard_elems floats */
    uint64_t table_offset;                   /* bytes of the first kernel segment, in the scratch range */
    uint32_t n_segments;
    float *m, *v;
} fsdp__group;

/* The order is that of use, a cache line or two a paragraph: what hooks touch are the first lines and the first group, which at
 * 10,000 units come mostly from memory. Of edges they touch the beginning. */
struct fsdp_unit {
    fsdp_model *model;
    char *name;
    fsdp__block *full;     /* the gathered buffer; NULL: none */
    uint64_t full_bytes;   /* of it; what is aliased is left out */
    uint64_t full_version; /* of the shard that it was gathered from */
    uint64_t version;      /* updates that the shard has seen */
    fsdp_stream *stream;   /* that windows are open on */
    uint32_t n_open[2];    /* forward and backward windows that are open */

    fsdp_unit *newer, *older; /* among the model's gathered units that are not held */
    uint32_t index;
    uint32_t n_users;
    uint32_t n_groups;
    bool ahead;          /* gathered before its begin hook, not opened since */
    bool aliased;        /* some group's buffer is its shard */
    bool reduced;        /* since the last update: the next reduction adds */
    bool updated;        /* in this update bracket, by fsdp_update_unit */
    bool grad_aliased;   /* the full gradient buffer is the shard: plan.c says when */
    fsdp__block *grad;   /* bytes of the full gradient buffer; NULL: none, or the shard's */
    uint64_t grad_begin; /* address of the full gradient buffer; 0: none */
    uint64_t grad_bytes; /* of it; what is frozen is left out */

    size_t n_params;
    void **param_ptrs, **grad_ptrs; /* the view's, n_params each */
    uint64_t param_base, grad_base; /* what they were made for */
    fsdp_param **params;

    fsdp_unit_config config;
    fsdp__edges full_edges;
    fsdp_shard_segment *segments; /* of this rank's shard. Here, so that no edges begin at the end of a line */
    uint32_t n_segments;
    size_t params_capacity;
    fsdp__edges master_edges, grad_edges, gradient_edges;
    uint64_t full_place; /* held: its own bytes in the gather range */
    uint64_t grad_place; /* held, or gradients kept, and not aliased: its own bytes in the grad range */

    fsdp__group groups[FSDP__MAX_GROUPS];

    fsdp_stream *user[FSDP__MAX_USERS]; /* further compute streams in the open windows */
};

typedef struct fsdp__pass {
    char *name;
    fsdp_visit *given;   /* units and uses, as declared */
    fsdp__visit *visits; /* the same, for the schedule */
    uint32_t n;
    bool backward;         /* has BACKWARD visits: an update follows its last micro-step */
    uint64_t *full_offset; /* of each visit that is not held's, in the gather range */
    uint64_t *grad_offset; /* of each BACKWARD visit without bytes of its own, in the grad range */
    uint32_t *closing;     /* all windows in the order in which the plan closes them, as visits; idle.c */
} fsdp__pass;

/* Every byte, before any is taken. */
typedef struct fsdp__plan {
    fsdp_memory memory;
    bool reduces_twice;               /* some unit is, between updates: other second reductions are refused */
    uint64_t tmp_offset, tmp_bytes;   /* in scratch: the second reduction onto a shard lands here first */
    uint64_t cast_offset, cast_bytes; /* in scratch: gradients in the reduce dtype */
    uint64_t part_offset, total_offset, step_offset, table_offset, scratch_bytes;
    uint64_t input_offset; /* in scratch: the host's values of a step; eager steps use the first of FSDP_REPORT_RING */
    uint64_t master_bytes, gradient_bytes, moment_bytes;
} fsdp__plan;

typedef enum fsdp__phase {
    FSDP__OPEN, /* registering */
    FSDP__IDLE, /* sealed, between passes */
    FSDP__IN_PASS,
    FSDP__IN_UPDATE
} fsdp__phase;

struct fsdp_adamw {
    fsdp_model *model;
    fsdp_adamw_config config;
};

/* What hooks look at comes first, as in a unit. */
struct fsdp_model {
    fsdp_context *ctx;
    fsdp_unit **units;
    fsdp__phase phase;
    fsdp_status failed;      /* first failure after something was enqueued */
    fsdp__pass *pass, *next; /* the one we are in; what follows it without an update, or NULL */
    fsdp_allocator *gather_pool, *grad_pool;
    void *scratch; /* a device range, as are master, gradients and moments */

    fsdp__cursor cursor;
    uint32_t n_open;            /* windows open, over all units */
    uint32_t n_grads;           /* units that have a gradient buffer, their shard's bytes or others */
    fsdp_unit *newest_gathered; /* list of gathered units that are not held */
    bool mid_step;              /* a micro-step of a backward pass has ended, and it was not the last */
    bool update_due;            /* the last micro-step of a backward pass has ended */

    fsdp__schedule schedule;
    fsdp_model_config config;
    fsdp_model_stats stats;
    fsdp_pass_args args; /* of the last pass_begin */
    fsdp__plan plan;

    char *name;
    size_t n_units, units_capacity;
    fsdp__pass *passes; /* TRAIN, EVAL, then the caller's */
    size_t n_passes, passes_capacity;
    fsdp__names unit_names, param_names;
    uint32_t n_params;
    fsdp_adamw *adamw;
    char failed_text[512];

    /* seal.c */
    uint64_t *schedule_bytes;
    uint8_t *schedule_held;
    size_t schedule_units;
    void *master, *gradients, *moments;
    void *gather_attached, *grad_attached; /* what the backend knows the pools by */
    fsdp_report_record *reports;           /* pinned, a ring */
    void *report_event[FSDP_REPORT_RING];
    fsdp__fence report_fence[FSDP_REPORT_RING];
    uint64_t report_step[FSDP_REPORT_RING];

    /* the step */
    uint64_t n_updates;                               /* brackets closed */
    fsdp__edges square_edges, part_edges, step_edges; /* the step's sum of squares; its other sums; its record */

    /* capture.c */
    fsdp_model *newer, *older; /* in the context's list */
    uint64_t n_changes; /* times that what is gathered, or current, may have become another: a replay looks then */
};

static inline bool fsdp__unit_held(const fsdp_unit *unit) { return unit->config.reshard == FSDP_RESHARD_NEVER; }
static inline bool fsdp__unit_trainable(const fsdp_unit *unit) { return unit->grad_bytes > 0; }
/* Its gradient buffer, unless aliased, has bytes of its own, instead of sharing those of the pass's buffers in flight. */
static inline bool fsdp__unit_grad_own(const fsdp_unit *unit)
{
    return fsdp__unit_held(unit) || unit->model->config.accumulation == FSDP_ACCUMULATE_KEEP_FULL;
}
/* Who wrote and read its full gradients. */
static inline fsdp__edges *fsdp__grad_edges(fsdp_unit *unit)
{
    return unit->grad_aliased ? &unit->gradient_edges : &unit->grad_edges;
}

/* What every call on a model asks first: not null, not failed, context alive. */
fsdp_status fsdp__model_check(const char *call, fsdp_model *model);
fsdp_status fsdp__model_check_sealed(const char *call, fsdp_model *model);
/* Remember status, unless OK, as what the model returns from now on; returns it. */
fsdp_status fsdp__model_fail(fsdp_model *model, fsdp_status status);

/* Close every window, give every buffer back, forget what the step has summed up so far: host only. (step.c) */
void fsdp__drop_step(fsdp_model *model);

#endif
