/* SPDX-License-Identifier: MIT */
/* The variables by their names, and the sentences that list them. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "launch.h"

/* Variables that belong together; NULL ends a list. */
typedef struct names_of_group {
    const char *name[12];
    const char *more[6]; /* told where they are set, not missed where they are not */
} names_of_group;

static const names_of_group names_of[FSDP__LAUNCH_GROUPS] = {
    [FSDP_LAUNCHER_ENV] = {{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}, {NULL}},
    [FSDP_LAUNCHER_TORCHRUN] = {{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
                                {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}},
    [FSDP_LAUNCHER_OPEN_MPI] = {{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                                 "OMPI_COMM_WORLD_LOCAL_SIZE"},
                                {NULL}},
    [FSDP_LAUNCHER_MPICH] = {{"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
                             {"PMI_ID", "PMI_PORT", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
                              "MV2_COMM_WORLD_LOCAL_SIZE"}},
    [FSDP_LAUNCHER_SLURM] = {{"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS",
                              "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE",
                              "SLURM_STEP_NODELIST"},
                             {"SLURM_JOB_NODELIST"}},
    [FSDP__LAUNCH_MEETING] = {{"MASTER_ADDR", "MASTER_PORT"}, {"FSDP_PORT", "FSDP_NONCE"}},
};

static const char *get(const fsdp__launch_env *env, const char *name) { return env->get(env->arg, name); }

bool fsdp__launch_number(const char *text, uint32_t most, uint32_t *out_number)
{
    uint64_t n = 0;
    if (*text == '\0') return false;
    for (; *text != '\0'; text++) {
        if (*text < '0' || *text > '9') return false;
        n = n * 10 + (uint64_t)(*text - '0');
        if (n > most) return false;
    }
    *out_number = (uint32_t)n;
    return true;
}

typedef struct sentence {
    char text[4096];
    size_t length;
} sentence;

static void put(sentence *s, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void put(sentence *s, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(s->text + s->length, sizeof s->text - s->length, format, args);
    va_end(args);
    if (n > 0) s->length += (size_t)n;
    if (s->length >= sizeof s->text) s->length = sizeof s->text - 1;
}

static void put_variable(sentence *seen, sentence *missing, const char *name, const char *value)
{
    enum { SHOWN = 80 };
    if (value != NULL)
        put(seen, "%s%s=%.*s%s", seen->length == 0 ? "; seen: " : ", ", name, SHOWN, value,
            strlen(value) > SHOWN ? "..." : "");
    else if (missing != NULL) put(missing, "%s%s", missing->length == 0 ? "; not set: " : ", ", name);
}

fsdp_status fsdp__launch_refuse(const fsdp__launch_env *env, unsigned of, const char *format, ...)
{
    sentence what = {"", 0}, seen = {"", 0}, missing = {"", 0};
    va_list args;
    va_start(args, format);
    vsnprintf(what.text, sizeof what.text, format, args);
    va_end(args);
    for (unsigned group = 0; group < FSDP__LAUNCH_GROUPS; group++) {
        const names_of_group *names = &names_of[group];
        if ((of >> group & 1) == 0) continue;
        for (size_t i = 0; i < sizeof names->name / sizeof *names->name && names->name[i] != NULL; i++)
            put_variable(&seen, &missing, names->name[i], get(env, names->name[i]));
        for (size_t i = 0; i < sizeof names->more / sizeof *names->more && names->more[i] != NULL; i++)
            put_variable(&seen, NULL, names->more[i], get(env, names->more[i]));
    }
    return fsdp__fail(FSDP_ERR_ARG, "%s%s%s", what.text, seen.text, missing.text);
}
