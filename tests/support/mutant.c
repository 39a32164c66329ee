/* SPDX-License-Identifier: MIT */
/* Which planted bug is switched on: the one that FSDP_MUTANT names. Only in builds with FSDP_MUTATIONS. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lib/mutate.h"

int fsdp__mutant = FSDP__MUTANT_NONE;

static const struct {
    const char *name, *what;
} mutants[] = {
#define ROW(name, what) {#name, what},
    FSDP__MUTANTS(ROW)
#undef ROW
};

__attribute__((constructor)) static void choose_mutant(void)
{
    const char *wanted = getenv("FSDP_MUTANT");
    if (wanted == NULL || wanted[0] == '\0') return;
    for (size_t i = 0; i < sizeof mutants / sizeof *mutants; i++)
        if (strcmp(mutants[i].name, wanted) == 0) fsdp__mutant = (int)i + 1;
    if (fsdp__mutant != FSDP__MUTANT_NONE) return;
    fprintf(stderr, "FSDP_MUTANT=%s: there is no such bug. There are:\n", wanted);
    for (size_t i = 0; i < sizeof mutants / sizeof *mutants; i++)
        fprintf(stderr, "    %-26s %s\n", mutants[i].name, mutants[i].what);
    exit(2);
}
