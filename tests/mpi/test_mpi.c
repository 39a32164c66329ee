/* SPDX-License-Identifier: MIT */
/* The MPI backend passes the conformance suites, and, with "chunks", the collectives' again with messages so
 * short that everything comes in many. */
#include <string.h>

#include "mpi_ranks.h"

static const void *device_config(void *storage, uint64_t jitter_ns, uint64_t jitter_seed)
{
    fsdp_mpi_config *config = storage;
    *config = (fsdp_mpi_config)FSDP_MPI_CONFIG_INIT;
    config->jitter_ns = jitter_ns;
    config->jitter_seed = jitter_seed;
    return config;
}

int main(int argc, char **argv)
{
    mpi_tests_begin(&argc, &argv, MPI_THREAD_MULTIPLE);
    /* Here both communicators fail with one sentence, the side channel's: test_mpi_own looks at that. */
    cmocka_set_skip_filter("a_rank_that_has_failed_elsewhere_*");
    const comm_suite suite = mpi_suite();
    const device_suite device = {.backend = fsdp_mpi_backend(), .config = device_config};
    int failed = 0;
    if (argc > 1 && strcmp(argv[1], "chunks") == 0) {
        mpi_chunk_bytes = 68;
        failed = run_comm_suite(&suite);
    } else {
        failed =
            run_device_suite(&device) + run_comm_suite(&suite) + run_comm_error_suite(&suite) + run_side_suite(&suite);
    }
    return mpi_tests_end(failed);
}
