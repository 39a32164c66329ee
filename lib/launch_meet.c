/* SPDX-License-Identifier: MIT */
/* Where the ranks of a job meet, and what tells the job from others. Every rank comes to the same answer by itself. */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "hash.h"
#include "launch.h"

static const char *get(const fsdp__launch_env *env, const char *name) { return env->get(env->arg, name); }

/* ---- Which job ---- */

/* The variables that are the same on all ranks of one job and its attempt, and differ between jobs. MASTER_ADDR is none of
 * them: it may be written differently on different machines, and whoever reaches rank 0 used some name of it. */
static const char *const identity[6][5] = {
    [FSDP_LAUNCHER_TORCHRUN] = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"},
    [FSDP_LAUNCHER_OPEN_MPI] = {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_precondition_transports"},
    [FSDP_LAUNCHER_MPICH] = {"I_MPI_HYDRA_UUID", "PMI_JOBID", "PALS_APID"},
    [FSDP_LAUNCHER_SLURM] = {"SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"},
};

/* With its end, so that "a" and "bc" are not "ab" and "c". */
static uint64_t hash_text(uint64_t h, const char *text) { return fsdp__hash_bytes(h, text, strlen(text) + 1); }

/* Sets the nonce; returns whether anything told this job from another. */
static bool name_job(const fsdp__launch_env *env, fsdp_launch *launch)
{
    const uint32_t numbers[2] = {launch->world, launch->port};
    const char *own = get(env, "FSDP_NONCE");
    uint64_t h = fsdp__hash_bytes(FSDP__HASH_SEED, numbers, sizeof numbers);
    bool known = own != NULL;
    if (own != NULL) h = hash_text(h, own);
    for (size_t i = 0; own == NULL && i < 5 && identity[launch->launcher][i] != NULL; i++) {
        const char *value = get(env, identity[launch->launcher][i]);
        if (value == NULL) continue;
        h = hash_text(hash_text(h, identity[launch->launcher][i]), value);
        known = true;
    }
    if (own == NULL && launch->launcher == FSDP_LAUNCHER_MPICH) {
        char text[512];
        env->hydra(env->arg, launch->local_world == launch->world, text, sizeof text);
        h = hash_text(h, text);
        known = known || text[0] != '\0';
    }
    launch->nonce = fsdp__mix(h);
    return known;
}

/* ---- Where ---- */

static fsdp_status read_port(const fsdp__launch_env *env, unsigned of, const char *name, uint32_t *out)
{
    const char *value = get(env, name);
    if (!fsdp__launch_number(value, UINT16_MAX, out) || *out == 0)
        return fsdp__launch_refuse(env, of, "%s=%.80s is not a port, 1 to 65535", name, value);
    return FSDP_OK;
}

/* FSDP_PORT, else the one after MASTER_PORT: torchrun's agent listens on that one itself. 0: neither is set. */
static fsdp_status choose_port(const fsdp__launch_env *env, unsigned of, fsdp_launch *launch)
{
    uint32_t port = 0;
    if (get(env, "FSDP_PORT") != NULL) {
        FSDP_TRY(read_port(env, of, "FSDP_PORT", &port));
    } else if (get(env, "MASTER_PORT") != NULL) {
        FSDP_TRY(read_port(env, of, "MASTER_PORT", &port));
        if (port == UINT16_MAX)
            return fsdp__launch_refuse(
                env, of, "MASTER_PORT=65535 and no port comes after it: set FSDP_PORT to one that is free");
        port++;
    }
    launch->port = (uint16_t)port;
    return FSDP_OK;
}

/* The first node of the step, and a port that two steps hardly share. 20000 to 29999 is below Linux's ports for outgoing
 * connections (32768 and up). */
static fsdp_status meet_at_first_node(const fsdp__launch_env *env, fsdp_launch *launch)
{
    enum { OF = 1u << FSDP_LAUNCHER_SLURM | 1u << FSDP__LAUNCH_MEETING };
    const char *step = get(env, "SLURM_STEP_NODELIST"), *node = get(env, "SLURM_NODEID");
    const char *name = step != NULL ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST", *list = get(env, name);
    if (list == NULL) return fsdp__launch_refuse(env, OF, "no list of nodes: set MASTER_ADDR and MASTER_PORT");
    if (!fsdp__slurm_first_host(list, launch->address, sizeof launch->address))
        return fsdp__launch_refuse(env, OF, "%s is not a list of nodes; set MASTER_ADDR and MASTER_PORT", name);
    if (launch->rank == 0 && node != NULL && strcmp(node, "0") != 0)
        return fsdp__launch_refuse(env, OF, "rank 0 is not on the first node (%s): set MASTER_ADDR and MASTER_PORT",
                                   launch->address);
    uint64_t h = hash_text(hash_text(FSDP__HASH_SEED, get(env, "SLURM_JOB_ID")), get(env, "SLURM_STEP_ID"));
    if (launch->port == 0) launch->port = (uint16_t)(20000 + fsdp__mix(h) % 10000);
    return FSDP_OK;
}

/* No MASTER_ADDR. */
static fsdp_status meet_anyhow(const fsdp__launch_env *env, unsigned of, fsdp_launch *launch, bool known)
{
    if (launch->local_world < launch->world)
        return launch->launcher == FSDP_LAUNCHER_SLURM ? meet_at_first_node(env, launch) : FSDP_OK;
    if (launch->port != 0) {
        memcpy(launch->address, "127.0.0.1", sizeof "127.0.0.1");
        return FSDP_OK;
    }
    if (!known)
        return fsdp__launch_refuse(env, of,
                                   "nothing tells this job from another one on this machine: set FSDP_NONCE to a text "
                                   "of its own, or MASTER_ADDR and MASTER_PORT");
    snprintf(launch->address, sizeof launch->address, "@fsdp-%u-%016llx", env->user, (unsigned long long)launch->nonce);
    return FSDP_OK;
}

fsdp_status fsdp__launch_meet(const fsdp__launch_env *env, fsdp_launch *launch)
{
    unsigned of = 1u << launch->launcher | 1u << FSDP__LAUNCH_MEETING;
    const char *address = get(env, "MASTER_ADDR"), *port = get(env, "MASTER_PORT"), *nonce = get(env, "FSDP_NONCE");
    bool named_here = nonce != NULL && launch->local_world == launch->world;
    bool needed = launch->launcher == FSDP_LAUNCHER_ENV && !named_here;
    if (nonce != NULL && *nonce == '\0') return fsdp__launch_refuse(env, of, "FSDP_NONCE is empty");
    if (launch->world == 1) {
        name_job(env, launch);
        return FSDP_OK;
    }
    if (address == NULL && (needed || port != NULL))
        return fsdp__launch_refuse(env, of, "%s without MASTER_ADDR: set it to the host of rank 0%s",
                                   port != NULL ? "MASTER_PORT" : "RANK and WORLD_SIZE",
                                   port == NULL && launch->local_world == launch->world
                                       ? ", or FSDP_NONCE to a text of this job's own, since all ranks are here"
                                       : "");
    FSDP_TRY(choose_port(env, of, launch));
    if (address != NULL && launch->port == 0)
        return fsdp__launch_refuse(env, of, "MASTER_ADDR without MASTER_PORT: set it to a free port of rank 0's host");
    bool known = name_job(env, launch);
    if (address == NULL) return meet_anyhow(env, of, launch, known);
    if (*address == '\0' || *address == '@' || strlen(address) >= sizeof launch->address)
        return fsdp__launch_refuse(env, of, "MASTER_ADDR=%.80s is not a host's name or address", address);
    snprintf(launch->address, sizeof launch->address, "%s", address);
    return FSDP_OK;
}
