/* SPDX-License-Identifier: MIT */
/* Which launcher started this process, and its place. The most specific one wins:
 *
 *  torchrun   TORCHELASTIC_…: whatever else is there belongs to what started torchrun, once a machine
 *  env        RANK and WORLD_SIZE, Open MPI's and PMI's: any of them. All that are there must name the same rank and world;
 *             then the one that knows most is taken, and the others have only to agree
 *  Slurm      only within a step (SLURM_STEP_ID): a batch script and salloc's shell have SLURM_PROCID=0 and SLURM_NTASKS too.
 *             It yields to the others: srun also starts mpirun's daemons
 *  none       a world of one */
#include "launch.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

/* As bits. */
enum {
    ENV = 1u << FSDP_LAUNCHER_ENV,
    TORCHRUN = 1u << FSDP_LAUNCHER_TORCHRUN,
    OPEN_MPI = 1u << FSDP_LAUNCHER_OPEN_MPI,
    PMI = 1u << FSDP_LAUNCHER_MPICH,
    SLURM = 1u << FSDP_LAUNCHER_SLURM,
    MEETING = 1u << FSDP__LAUNCH_MEETING
};

const char *fsdp_launcher_name(fsdp_launcher launcher)
{
    switch (launcher) {
    case FSDP_LAUNCHER_NONE: return "none";
    case FSDP_LAUNCHER_ENV: return "env";
    case FSDP_LAUNCHER_TORCHRUN: return "torchrun";
    case FSDP_LAUNCHER_OPEN_MPI: return "Open MPI";
    case FSDP_LAUNCHER_MPICH: return "MPICH";
    case FSDP_LAUNCHER_SLURM: return "Slurm";
    }
    return "?";
}

static const char *get(const fsdp__launch_env *env, const char *name) { return env->get(env->arg, name); }

/* ---- One launcher's variables ---- */

/* What one launcher says. Unset: rank or world is missing, and the others are not looked at. */
typedef struct place {
    bool set, has_local_rank, has_local_world;
    uint32_t rank, world, local_rank, local_world;
} place;

static fsdp_status number(const fsdp__launch_env *env, unsigned of, const char *name, uint32_t *out)
{
    const char *value = get(env, name);
    if (value == NULL) return fsdp__launch_refuse(env, of, "%s is missing", name);
    if (*value == '\0') return fsdp__launch_refuse(env, of, "%s is empty", name);
    if (!fsdp__launch_number(value, INT32_MAX, out))
        return fsdp__launch_refuse(env, of, "%s=%.80s is not a number from 0 to %d", name, value, INT32_MAX);
    return FSDP_OK;
}

/* rank of world, or local rank of local world. */
static fsdp_status pair(const fsdp__launch_env *env, unsigned of, const char *const names[2], uint32_t out[2])
{
    for (int i = 0; i < 2; i++) {
        if (get(env, names[i]) == NULL) return fsdp__launch_refuse(env, of, "%s without %s", names[1 - i], names[i]);
    }
    FSDP_TRY(number(env, of, names[0], &out[0]));
    FSDP_TRY(number(env, of, names[1], &out[1]));
    if (out[0] >= out[1])
        return fsdp__launch_refuse(env, of, "%s=%u is not below %s=%u", names[0], out[0], names[1], out[1]);
    return FSDP_OK;
}

static bool either(const fsdp__launch_env *env, const char *const names[2])
{
    return get(env, names[0]) != NULL || get(env, names[1]) != NULL;
}

static fsdp_status read_place(const fsdp__launch_env *env, unsigned of, const char *const names[2], place *out)
{
    if (!either(env, names)) return FSDP_OK;
    uint32_t at[2];
    FSDP_TRY(pair(env, of, names, at));
    out->set = true;
    out->rank = at[0];
    out->world = at[1];
    return FSDP_OK;
}

/* The first pair of local rank and local size that is there. */
static fsdp_status read_local(const fsdp__launch_env *env, unsigned of, const char *const (*names)[2], size_t n,
                              place *p)
{
    for (size_t i = 0; i < n; i++) {
        if (!either(env, names[i])) continue;
        uint32_t at[2];
        FSDP_TRY(pair(env, of, names[i], at));
        p->local_rank = at[0];
        p->local_world = at[1];
        p->has_local_rank = p->has_local_world = true;
        if (at[1] > p->world)
            return fsdp__launch_refuse(env, of, "%s=%u is more than the world of %u", names[i][1], at[1], p->world);
        return FSDP_OK;
    }
    return FSDP_OK;
}

/* LOCAL_RANK and LOCAL_WORLD_SIZE: each may be missing where somebody else knows it. */
static fsdp_status read_env_local(const fsdp__launch_env *env, unsigned of, place *p)
{
    p->has_local_rank = get(env, "LOCAL_RANK") != NULL;
    p->has_local_world = get(env, "LOCAL_WORLD_SIZE") != NULL;
    if (p->has_local_rank) FSDP_TRY(number(env, of, "LOCAL_RANK", &p->local_rank));
    if (p->has_local_world) FSDP_TRY(number(env, of, "LOCAL_WORLD_SIZE", &p->local_world));
    if (p->has_local_world && p->local_world > p->world)
        return fsdp__launch_refuse(env, of, "LOCAL_WORLD_SIZE=%u is more than WORLD_SIZE=%u", p->local_world, p->world);
    if (p->has_local_rank && p->local_rank >= (p->has_local_world ? p->local_world : p->world))
        return fsdp__launch_refuse(env, of, "LOCAL_RANK=%u is not below %s=%u", p->local_rank,
                                   p->has_local_world ? "LOCAL_WORLD_SIZE" : "WORLD_SIZE",
                                   p->has_local_world ? p->local_world : p->world);
    return FSDP_OK;
}

/* ---- Slurm ---- */

static const char *slurm_world(const fsdp__launch_env *env)
{
    return get(env, "SLURM_STEP_NUM_TASKS") != NULL ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
}

/* Are we a task of a step? The steps of batch scripts and of salloc's shell have no number, or one from the very end. */
static bool in_slurm_step(const fsdp__launch_env *env)
{
    const char *step = get(env, "SLURM_STEP_ID");
    uint32_t id = 0;
    if (step == NULL || get(env, "SLURM_PROCID") == NULL) return false;
    return !fsdp__launch_number(step, UINT32_MAX, &id) || id < 0xfffffff0u;
}

/* Does srun name this rank and this world? Without judging what else it says. */
static bool slurm_agrees(const fsdp__launch_env *env, const char *rank, const char *world)
{
    uint32_t mine = 0, its = 0;
    const char *tasks = get(env, slurm_world(env)), *task = get(env, "SLURM_PROCID");
    if (!in_slurm_step(env) || tasks == NULL) return false;
    if (rank != NULL &&
        !(fsdp__launch_number(rank, INT32_MAX, &mine) && fsdp__launch_number(task, INT32_MAX, &its) && mine == its))
        return false;
    return world == NULL ||
           (fsdp__launch_number(world, INT32_MAX, &mine) && fsdp__launch_number(tasks, INT32_MAX, &its) && mine == its);
}

static fsdp_status read_slurm_local(const fsdp__launch_env *env, place *p)
{
    uint32_t node = 0, nodes = 0;
    uint64_t all = 0;
    const char *counts = get(env, "SLURM_STEP_TASKS_PER_NODE");
    FSDP_TRY(number(env, SLURM, "SLURM_LOCALID", &p->local_rank));
    if (counts != NULL) {
        if (get(env, "SLURM_NODEID") != NULL) FSDP_TRY(number(env, SLURM, "SLURM_NODEID", &node));
        if (!fsdp__slurm_tasks(counts, node, &p->local_world, &all))
            return fsdp__launch_refuse(env, SLURM, "SLURM_STEP_TASKS_PER_NODE has no count for node %u", node);
        if (all != p->world)
            return fsdp__launch_refuse(env, SLURM, "SLURM_STEP_TASKS_PER_NODE sums up to %llu tasks, %s is %u",
                                       (unsigned long long)all, slurm_world(env), p->world);
        if (p->local_world < p->world && get(env, "SLURM_NODEID") == NULL)
            return fsdp__launch_refuse(env, SLURM, "SLURM_NODEID is missing");
    } else {
        FSDP_TRY(number(env, SLURM, "SLURM_STEP_NUM_NODES", &nodes));
        if (nodes != 1)
            return fsdp__launch_refuse(env, SLURM, "SLURM_STEP_TASKS_PER_NODE is missing, and there are %u nodes",
                                       nodes);
        p->local_world = p->world;
    }
    if (p->local_rank >= p->local_world)
        return fsdp__launch_refuse(env, SLURM, "SLURM_LOCALID=%u is not below the %u tasks of this node", p->local_rank,
                                   p->local_world);
    return FSDP_OK;
}

static fsdp_status read_slurm(const fsdp__launch_env *env, place *p)
{
    const char *const names[2] = {"SLURM_PROCID", slurm_world(env)};
    uint32_t at[2];
    FSDP_TRY(pair(env, SLURM, names, at));
    if (get(env, "SLURM_JOB_ID") == NULL) return fsdp__launch_refuse(env, SLURM, "SLURM_JOB_ID is missing");
    *p = (place){true, true, true, at[0], at[1], 0, 1};
    return at[1] == 1 ? FSDP_OK : read_slurm_local(env, p);
}

/* ---- Which one ---- */

/* This process's own machine, whoever asks. */
static bool is_loopback(const char *address)
{
    return strcmp(address, "localhost") == 0 || strncmp(address, "127.", 4) == 0 || strcmp(address, "::1") == 0;
}

/* RANK and WORLD_SIZE, and nobody else to ask. Who sets them by hand often leaves the local ones out. With a loopback address
 * all ranks are here; else it could be one rank a machine or all on one: a guess would give two ranks one GPU. */
static fsdp_status complete_env_local(const fsdp__launch_env *env, place *p)
{
    const char *address = get(env, "MASTER_ADDR");
    bool here = p->world == 1 || (address != NULL && is_loopback(address));
    if (!here && !(p->has_local_rank && p->has_local_world))
        return fsdp__launch_refuse(
            env, ENV | MEETING,
            "how many ranks share this machine is not said: set LOCAL_RANK and LOCAL_WORLD_SIZE "
            "(0 and 1 where it is one rank a machine), or MASTER_ADDR=127.0.0.1 where all ranks are "
            "here");
    if (!p->has_local_world) p->local_world = p->world;
    if (!p->has_local_rank) p->local_rank = p->rank;
    if (p->local_rank >= p->local_world)
        return fsdp__launch_refuse(env, ENV, "RANK=%u is not below LOCAL_WORLD_SIZE=%u; set LOCAL_RANK", p->rank,
                                   p->local_world);
    return FSDP_OK;
}

static fsdp_status read_torchrun(const fsdp__launch_env *env, place *p)
{
    unsigned of = TORCHRUN | MEETING;
    static const char *const names[2] = {"RANK", "WORLD_SIZE"};
    static const char *const local[1][2] = {{"LOCAL_RANK", "LOCAL_WORLD_SIZE"}};
    static const char *const needed[] = {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"};
    uint32_t at[2];
    if (!either(env, names)) return fsdp__launch_refuse(env, of, "torchrun without RANK and WORLD_SIZE");
    FSDP_TRY(pair(env, of, names, at));
    *p = (place){true, false, false, at[0], at[1], 0, 0};
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        if (get(env, needed[i]) == NULL) return fsdp__launch_refuse(env, of, "torchrun without %s", needed[i]);
    }
    return read_local(env, of, local, 1, p);
}

static fsdp_status read_open_mpi(const fsdp__launch_env *env, place *p)
{
    static const char *const names[2] = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"};
    static const char *const local[1][2] = {{"OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"}};
    FSDP_TRY(read_place(env, OPEN_MPI, names, p));
    if (!p->set) return FSDP_OK;
    FSDP_TRY(read_local(env, OPEN_MPI, local, 1, p));
    if (!p->has_local_rank) return fsdp__launch_refuse(env, OPEN_MPI, "Open MPI without its local rank");
    return FSDP_OK;
}

/* Hydra's local variables; Cray's; MVAPICH's. */
static const char *const pmi_local[3][2] = {{"MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
                                            {"PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"},
                                            {"MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"}};

static fsdp_status read_pmi(const fsdp__launch_env *env, place *p)
{
    unsigned of = PMI;
    static const char *const names[2] = {"PMI_RANK", "PMI_SIZE"};
    if (!either(env, names)) {
        if (get(env, "PMI_ID") == NULL || get(env, "PMI_PORT") == NULL || in_slurm_step(env)) return FSDP_OK;
        return fsdp__launch_refuse(env, of,
                                   "PMI_ID=%.20s and PMI_PORT do not say how many ranks there are: "
                                   "start mpiexec without -pmi-port",
                                   get(env, "PMI_ID"));
    }
    /* srun's own PMI (--mpi=pmi2, Cray's) repeats what srun says, in part. Hydra, which may run within a step, says more. */
    if (!either(env, pmi_local[0]) && slurm_agrees(env, get(env, names[0]), get(env, names[1]))) return FSDP_OK;
    FSDP_TRY(read_place(env, of, names, p));
    return read_local(env, of, pmi_local, 3, p);
}

/* RANK and WORLD_SIZE stand beside another launcher's variables: nothing may contradict. */
static fsdp_status check_agreement(const fsdp__launch_env *env, const place by[FSDP__LAUNCH_GROUPS])
{
    const place *first = NULL;
    unsigned all = 0;
    bool equal = true;
    for (unsigned i = 0; i < FSDP__LAUNCH_GROUPS; i++) {
        if (!by[i].set) continue;
        all |= 1u << i;
        if (first == NULL) first = &by[i];
        equal = equal && by[i].rank == first->rank && by[i].world == first->world;
    }
    if (equal) return FSDP_OK;
    return fsdp__launch_refuse(env, all, "two launchers contradict each other: unset the one that is left over");
}

/* A PMI that says nothing of this machine: RANK and the others may. */
static fsdp_status complete_pmi_local(const fsdp__launch_env *env, const place *said, place *p)
{
    if (p->has_local_rank) return FSDP_OK;
    if (p->world > 1 && !(said->has_local_rank && said->has_local_world))
        return fsdp__launch_refuse(env, PMI | ENV,
                                   "PMI_RANK without MPI_LOCALRANKID: set RANK and the others yourself");
    p->local_rank = p->world > 1 ? said->local_rank : 0;
    p->local_world = p->world > 1 ? said->local_world : 1;
    return FSDP_OK;
}

static fsdp_status check_local(const fsdp__launch_env *env, const place by[FSDP__LAUNCH_GROUPS], fsdp_launcher chosen)
{
    const place *said = &by[FSDP_LAUNCHER_ENV], *p = &by[chosen];
    if (!said->set || !((said->has_local_rank && said->local_rank != p->local_rank) ||
                        (said->has_local_world && said->local_world != p->local_world)))
        return FSDP_OK;
    return fsdp__launch_refuse(env, ENV | 1u << chosen, "LOCAL_RANK and LOCAL_WORLD_SIZE contradict %s: unset them",
                               fsdp_launcher_name(chosen));
}

static const char *const env_names[2] = {"RANK", "WORLD_SIZE"};

static fsdp_status choose(const fsdp__launch_env *env, place by[FSDP__LAUNCH_GROUPS], fsdp_launcher *out)
{
    place *said = &by[FSDP_LAUNCHER_ENV];
    if (get(env, "TORCHELASTIC_RUN_ID") != NULL || get(env, "TORCHELASTIC_RESTART_COUNT") != NULL) {
        *out = FSDP_LAUNCHER_TORCHRUN;
        return read_torchrun(env, &by[FSDP_LAUNCHER_TORCHRUN]);
    }
    FSDP_TRY(read_place(env, ENV, env_names, said));
    if (said->set) FSDP_TRY(read_env_local(env, ENV, said));
    FSDP_TRY(read_open_mpi(env, &by[FSDP_LAUNCHER_OPEN_MPI]));
    FSDP_TRY(read_pmi(env, &by[FSDP_LAUNCHER_MPICH]));
    FSDP_TRY(check_agreement(env, by));
    if (by[FSDP_LAUNCHER_OPEN_MPI].set) *out = FSDP_LAUNCHER_OPEN_MPI;
    else if (by[FSDP_LAUNCHER_MPICH].set) *out = FSDP_LAUNCHER_MPICH;
    else if (said->set && !slurm_agrees(env, get(env, "RANK"), get(env, "WORLD_SIZE"))) *out = FSDP_LAUNCHER_ENV;
    else if (in_slurm_step(env)) *out = FSDP_LAUNCHER_SLURM;
    else *out = FSDP_LAUNCHER_NONE;
    if (*out == FSDP_LAUNCHER_MPICH) FSDP_TRY(complete_pmi_local(env, said, &by[*out]));
    if (*out == FSDP_LAUNCHER_SLURM) FSDP_TRY(read_slurm(env, &by[FSDP_LAUNCHER_SLURM]));
    if (*out == FSDP_LAUNCHER_ENV) return complete_env_local(env, said);
    if (*out != FSDP_LAUNCHER_NONE) return check_local(env, by, *out);
    if (get(env, "LOCAL_RANK") != NULL || get(env, "LOCAL_WORLD_SIZE") != NULL)
        return fsdp__launch_refuse(env, ENV, "a local rank without RANK and WORLD_SIZE");
    return FSDP_OK;
}

fsdp_status fsdp__launch_read(const fsdp__launch_env *env, fsdp_launch *out_launch)
{
    place by[FSDP__LAUNCH_GROUPS] = {{false, false, false, 0, 1, 0, 1}};
    fsdp_launch launch = FSDP_LAUNCH_INIT;
    FSDP_TRY(choose(env, by, &launch.launcher));
    const place *p = &by[launch.launcher];
    launch.rank = p->rank;
    launch.world = p->world;
    launch.local_rank = p->local_rank;
    launch.local_world = p->local_world;
    FSDP_TRY(fsdp__launch_meet(env, &launch));
    *out_launch = launch;
    return FSDP_OK;
}

fsdp_status fsdp__launch_check(const fsdp_launch *launch)
{
    if (launch->world == 0 || launch->rank >= launch->world)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_launch: rank %u in a world of %u", launch->rank, launch->world);
    if (launch->local_world > launch->world || launch->local_rank >= launch->local_world)
        return fsdp__fail(
            FSDP_ERR_ARG,
            "fsdp_launch: local_rank %u in a local_world of %u in a world of %u: they are a rank among the "
            "ranks of this machine, and the number of those",
            launch->local_rank, launch->local_world, launch->world);
    if (memchr(launch->address, 0, sizeof launch->address) == NULL)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_launch.address has no end within its %zu bytes", sizeof launch->address);
    if (strcmp(launch->address, "@") == 0)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_launch.address is \"@\" with no name behind it");
    return FSDP_OK;
}

fsdp_status fsdp__launch_of_config(const char *what, const fsdp_launch *given, bool has_local, uint32_t rank,
                                   fsdp_launch *out_launch)
{
    fsdp_launch launch = FSDP_LAUNCH_INIT;
    if (has_local) /* before `given` is followed: it may be a number of another backend's config */
        return fsdp__fail(FSDP_ERR_ARG,
                          "%s: ranks are threads (local) or processes (launch), not both; or is it no %s: is "
                          "fsdp_config.backend the one that it belongs to?",
                          what, what);
    FSDP_TRY(fsdp__read_config("fsdp_launch", &launch, sizeof launch, given, sizeof launch));
    if (rank != 0)
        return fsdp__fail(FSDP_ERR_ARG, "%s.rank is %u: with launch the rank is launch's, leave this 0", what, rank);
    FSDP_TRY(fsdp__launch_check(&launch));
    *out_launch = launch;
    return FSDP_OK;
}

fsdp_status fsdp__launch_thread(const char *what, bool has_local, uint32_t rank, uint32_t world)
{
    if (rank < world) return FSDP_OK;
    return fsdp__fail(FSDP_ERR_ARG, "%s.rank is %u in a world of %u%s", what, rank, world,
                      has_local ? "" : " (local and launch are NULL)");
}

static const char *get_real(void *arg, const char *name)
{
    (void)arg;
    return getenv(name);
}

fsdp_status fsdp_launch_from_env(fsdp_launch *out_launch)
{
    FSDP_NEED(out_launch);
    fsdp__launch_env env = {get_real, fsdp__launch_hydra, NULL, (uint32_t)getuid()};
    fsdp_launch launch = FSDP_LAUNCH_INIT;
    FSDP_TRY(fsdp__launch_read(&env, &launch));
    return fsdp__write_result("fsdp_launch", out_launch, &launch, sizeof launch, sizeof launch);
}
