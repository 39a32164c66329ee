/* SPDX-License-Identifier: MIT */
/* MPI is the program's: before it is initialised, with too low a thread level, and after its end a context is refused, and the
 * sentence says what to do. */
#include <stdio.h>
#include <string.h>

#include <mpi.h>

#include "fsdp/fsdp.h"
#include "fsdp/mpi.h"

static int expect(const char *when, fsdp_status status, const char *says)
{
    fsdp_config config = FSDP_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    config.backend = fsdp_mpi_backend();
    fsdp_status got = fsdp_context_create(&config, &ctx);
    if (got == status && ctx == NULL && strstr(fsdp_last_error(), says) != NULL) return 0;
    fprintf(stderr, "%s: %s: %s\n", when, fsdp_status_name(got), fsdp_last_error());
    return 1;
}

int main(int argc, char **argv)
{
    int level = -1, failed = expect("before MPI_Init", FSDP_ERR_ARG, "MPI is not initialised: call MPI_Init_thread");
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
    if (level <= MPI_THREAD_FUNNELED)
        failed +=
            expect("with MPI_THREAD_FUNNELED", FSDP_ERR_UNSUPPORTED, "call MPI_Init_thread with MPI_THREAD_MULTIPLE");
    else printf("this MPI always has level %d\n", level);
    MPI_Finalize();
    return failed + expect("after MPI_Finalize", FSDP_ERR_ARG, "MPI is finalised already");
}
