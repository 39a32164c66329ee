/* SPDX-License-Identifier: MIT */
/* Prints what fsdp_launch_from_env says, in one line and by one write, so that the lines of several ranks do not mix:
 *  launch|<launcher>|<rank>|<world>|<local rank>|<local world>|<address>|<port>|<nonce>|<environment: same or changed>
 *  error|<sentence>                                                                                    and exit status 1 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fsdp/launch.h"

extern char **environ;

/* FNV-1a of every variable, and of where it lies. */
static uint64_t hash_environment(void)
{
    uint64_t h = 0xcbf29ce484222325ull;
    for (char **v = environ; *v != NULL; v++) {
        for (const char *c = *v; *c != '\0'; c++) h = (h ^ (unsigned char)*c) * 0x100000001b3ull;
        h = (h ^ (uint64_t)(uintptr_t)*v) * 0x100000001b3ull;
    }
    return h ^ (uint64_t)(uintptr_t)environ;
}

int main(void)
{
    char line[9000];
    uint64_t before = hash_environment();
    fsdp_launch l = FSDP_LAUNCH_INIT;
    fsdp_status status = fsdp_launch_from_env(&l);
    if (status != FSDP_OK) snprintf(line, sizeof line, "error|%s\n", fsdp_last_error());
    else
        snprintf(line, sizeof line, "launch|%s|%u|%u|%u|%u|%s|%u|%016" PRIx64 "|%s\n", fsdp_launcher_name(l.launcher),
                 l.rank, l.world, l.local_rank, l.local_world, l.address, l.port, l.nonce,
                 hash_environment() == before ? "same" : "changed");
    if (write(STDOUT_FILENO, line, strlen(line)) != (ssize_t)strlen(line)) return 2;
    return status == FSDP_OK ? 0 : 1;
}
