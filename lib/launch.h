/* SPDX-License-Identifier: MIT */
/* Reading what launchers say. The variables come through a function, so that tests feed them. [Pure but for launch_hydra.c.]
 *
 *  launch.c        which launcher, and this process's place: rank, world, local rank, local world
 *  launch_text.c   the variables' names, and sentences that list them
 *  launch_slurm.c  Slurm's lists: node[01-04,07],x3 and 2(x3),1
 *  launch_meet.c   where the ranks meet and what tells their job from others: address, port, nonce
 *  launch_hydra.c  the process that started us; for MPICH, whose variables do not tell two jobs apart */
#ifndef FSDP_LIB_LAUNCH_H
#define FSDP_LIB_LAUNCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fsdp/launch.h"

typedef struct fsdp__launch_env {
    const char *(*get)(void *arg, const char *name); /* the value, or NULL: not set */
    /* What the ranks of one MPICH job have in common and other jobs have not; "" if it is not to be found. */
    void (*hydra)(void *arg, bool one_machine, char *text, size_t bytes);
    void *arg;
    uint32_t user;
} fsdp__launch_env;

/* fsdp_launch_from_env with variables from anywhere. out_launch is written on success only. */
fsdp_status fsdp__launch_read(const fsdp__launch_env *env, fsdp_launch *out_launch);

/* What a launch that was filled by hand may have wrong. Errors: ARG. */
fsdp_status fsdp__launch_check(const fsdp_launch *launch);

/* The launch of a backend's config (`what`), which makes ranks processes: then it has no local and leaves rank 0. */
fsdp_status fsdp__launch_of_config(const char *what, const fsdp_launch *given, bool has_local, uint32_t rank,
                                   fsdp_launch *out_launch);
/* The rank of such a config without launch, in a world of threads or of one. */
fsdp_status fsdp__launch_thread(const char *what, bool has_local, uint32_t rank, uint32_t world);

/* address, port and nonce of a launch whose place and launcher are known. */
fsdp_status fsdp__launch_meet(const fsdp__launch_env *env, fsdp_launch *launch);

/* Groups of variables: a launcher's, by its number; and where the ranks meet. */
enum { FSDP__LAUNCH_MEETING = FSDP_LAUNCHER_SLURM + 1, FSDP__LAUNCH_GROUPS };

/* ARG: "<format>; seen: RANK=1; not set: WORLD_SIZE", of the variables of the groups in `of`, a bit each. */
fsdp_status fsdp__launch_refuse(const fsdp__launch_env *env, unsigned of, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Digits only, at most `most`. */
bool fsdp__launch_number(const char *text, uint32_t most, uint32_t *out_number);

/* The first host of "node[01-04,07],x3": node01. False if the list is not well-formed, or the host's name too long. */
bool fsdp__slurm_first_host(const char *list, char *host, size_t bytes);
/* Of "2(x3),1": how many tasks node has, and all nodes together. False if the list is not well-formed or has no such node. */
bool fsdp__slurm_tasks(const char *counts, uint32_t node, uint32_t *out_here, uint64_t *out_all);

/* hydra of the real environment: looks in /proc for the nearest ancestor that is Hydra's. */
void fsdp__launch_hydra(void *arg, bool one_machine, char *text, size_t bytes);

#endif
