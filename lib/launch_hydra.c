/* SPDX-License-Identifier: MIT */
/* MPICH's variables are the same for any two jobs of one size: PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS, and some
 * descriptors' numbers. What differs is who started us. Hydra has one proxy a job and machine, and each proxy was told the
 * address where mpiexec listens (--control-port), the same on all machines. Shells and scripts may stand in between. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launch.h"

enum { MOST_ANCESTORS = 64 }; /* scripts between the proxy and us */

static size_t read_file(long process, const char *name, char *text, size_t bytes)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%ld/%s", process, name);
    FILE *file = fopen(path, "re");
    if (file == NULL) return 0;
    size_t length = fread(text, 1, bytes - 1, file);
    fclose(file);
    text[length] = '\0';
    return length;
}

/* A process as /proc/<pid>/stat has it: "pid (name) state parent …", the start time is the 22nd. A name may hold spaces and
 * parentheses, so what follows is counted from the last one. */
typedef struct process {
    char name[32];
    long parent;
    unsigned long long started;
} process;

static bool read_process(long number, process *p)
{
    char text[1024];
    if (read_file(number, "stat", text, sizeof text) == 0) return false;
    char *open = strchr(text, '('), *end = strrchr(text, ')');
    if (open == NULL || end == NULL || end < open) return false;
    *end = '\0';
    snprintf(p->name, sizeof p->name, "%s", open + 1);
    return sscanf(end + 1, " %*c %ld %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                  &p->parent, &p->started) == 2;
}

/* Names are cut to 15 by the kernel. mpiexec's own counts where no proxy stands in between (gforker). */
static bool starts_ranks(const char *name)
{
    static const char *const names[] = {"hydra_pmi_proxy", "hydra_bstrap_pr", "mpiexec.hydra", "mpiexec.gforker",
                                        "mpiexec.mpich",   "mpirun.mpich",    "mpiexec",       "mpirun"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(name, names[i]) == 0) return true;
    }
    return false;
}

/* The word behind --control-port among the words of a command line; "" if it has none. */
static const char *control_port(const char *words, size_t length)
{
    static const char option[] = "--control-port";
    for (size_t at = 0; at < length; at += strlen(words + at) + 1) {
        if (strncmp(words + at, option, sizeof option - 1) != 0) continue;
        const char *value = words + at + sizeof option - 1;
        if (*value == '=') return value + 1;
        if (*value == '\0' && (size_t)(value + 1 - words) < length) return value + 1;
    }
    return "";
}

void fsdp__launch_hydra(void *arg, bool one_machine, char *text, size_t bytes)
{
    (void)arg;
    text[0] = '\0';
    long number = (long)getppid();
    for (int i = 0; i < MOST_ANCESTORS && number > 1; i++) {
        process p = {"", 0, 0};
        if (!read_process(number, &p)) return;
        if (starts_ranks(p.name)) {
            char words[4096];
            size_t length = read_file(number, "cmdline", words, sizeof words);
            const char *port = control_port(words, length);
            if (one_machine) snprintf(text, bytes, "%ld %llu %s", number, p.started, port);
            else snprintf(text, bytes, "%s", port);
            return;
        }
        number = p.parent;
    }
}
