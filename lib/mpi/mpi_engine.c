/* SPDX-License-Identifier: MIT */
/* The program's MPI: is it there, what may be called, in which words does it fail; and what is exchanged while a context is
 * opened. */
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "mpi_backend.h"

enum { YIELD_NS = 50000, SLEEP_LEAST_NS = 20000, SLEEP_MOST_NS = 1000000 };

/* ---- Between two looks ---- */

fsdp__mpi_pace fsdp__mpi_pace_begin(void) { return (fsdp__mpi_pace){fsdp__now_ns()}; }

/* A sixteenth of the wait is what it may last too long. */
void fsdp__mpi_rest(const fsdp__mpi_pace *pace)
{
    uint64_t waited = fsdp__now_ns() - pace->since_ns, ns = waited / 16;
    if (waited < YIELD_NS) {
        sched_yield();
        return;
    }
    if (ns < SLEEP_LEAST_NS) ns = SLEEP_LEAST_NS;
    if (ns > SLEEP_MOST_NS) ns = SLEEP_MOST_NS;
    const struct timespec sleep = {0, (long)ns};
    nanosleep(&sleep, NULL);
}

/* ---- Errors ---- */

fsdp_status fsdp__mpi_fail(const char *what, int code)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) snprintf(text, sizeof text, "error %d", code);
    for (char *at = text; *at != '\0'; at++)
        if (*at == '\n') *at = ' ';
    return fsdp__fail(FSDP_ERR_RANK_LOST, "%s: MPI says: %.400s", what, text);
}

/* ---- The config ---- */

static const char *level_name(int level)
{
    switch (level) {
    case MPI_THREAD_SINGLE: return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED: return "MPI_THREAD_FUNNELED";
    default: return "a thread level that is none of MPI's";
    }
}

static fsdp_status check_running(fsdp__mpi_engine *engine)
{
    int initialized = 0, finalized = 0, level = MPI_THREAD_SINGLE;
    MPI_Initialized(&initialized);
    if (!initialized)
        return fsdp__fail(FSDP_ERR_ARG, "MPI is not initialised: call MPI_Init_thread with MPI_THREAD_MULTIPLE before "
                                        "fsdp_context_create");
    MPI_Finalized(&finalized);
    if (finalized)
        return fsdp__fail(FSDP_ERR_ARG, "MPI is finalised already: create and destroy contexts before MPI_Finalize");
    MPI_Query_thread(&level);
    if (level != MPI_THREAD_MULTIPLE && level != MPI_THREAD_SERIALIZED)
        return fsdp__fail(
            FSDP_ERR_UNSUPPORTED,
            "MPI was initialised with %s, and streams are threads that call it: call MPI_Init_thread with "
            "MPI_THREAD_MULTIPLE, or with MPI_THREAD_SERIALIZED (see fsdp/mpi.h)",
            level_name(level));
    engine->serialized = level == MPI_THREAD_SERIALIZED;
    return FSDP_OK;
}

fsdp_status fsdp__mpi_config_read(const void *given, fsdp_mpi_config *out_config, fsdp__mpi_engine *out_engine)
{
    fsdp_mpi_config config = FSDP_MPI_CONFIG_INIT;
    if (given != NULL) FSDP_TRY(fsdp__read_config("fsdp_mpi_config", &config, sizeof config, given, sizeof config));
    if (config.chunk_bytes % 4 != 0 || config.chunk_bytes > 1 << 30)
        return fsdp__fail(FSDP_ERR_ARG,
                          "fsdp_mpi_config.chunk_bytes is %llu: expected a multiple of 4, at most 1 GiB, or 0",
                          (unsigned long long)config.chunk_bytes);
    FSDP_TRY(check_running(out_engine));
    *out_config = config;
    return FSDP_OK;
}

fsdp_status fsdp__mpi_comm_read(const fsdp_mpi_config *config, fsdp__mpi_engine *engine, MPI_Comm *out_comm,
                                uint32_t *out_rank, uint32_t *out_world)
{
    MPI_Comm comm = config->comm != NULL ? *(const MPI_Comm *)config->comm : MPI_COMM_WORLD;
    if (comm == MPI_COMM_NULL)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_mpi_config.comm is MPI_COMM_NULL: this process is none of its ranks");
    int rank = 0, world = 0, inter = 0;
    fsdp__mpi_enter(engine);
    int code = MPI_Comm_test_inter(comm, &inter);
    if (code == MPI_SUCCESS) code = MPI_Comm_rank(comm, &rank);
    if (code == MPI_SUCCESS) code = MPI_Comm_size(comm, &world);
    fsdp__mpi_leave(engine);
    if (code != MPI_SUCCESS) return fsdp__mpi_fail("fsdp_mpi_config.comm", code);
    if (inter)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_mpi_config.comm is an intercommunicator, which has two groups of ranks: "
                                        "merge it with MPI_Intercomm_merge");
    if (world > FSDP__MAX_WORLD)
        return fsdp__fail(FSDP_ERR_UNSUPPORTED, "fsdp_mpi_config.comm has %d ranks: this backend takes %d at most",
                          world, FSDP__MAX_WORLD);
    *out_comm = comm;
    *out_rank = (uint32_t)rank;
    *out_world = (uint32_t)world;
    return FSDP_OK;
}

/* ---- Opening ---- */

fsdp_status fsdp__mpi_opening_wait(const fsdp__mpi_opening *opening, int code, MPI_Request *request)
{
    fsdp__mpi_pace pace = fsdp__mpi_pace_begin();
    int done = 0;
    for (;;) {
        if (code == MPI_SUCCESS) {
            fsdp__mpi_enter(opening->engine);
            code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
            fsdp__mpi_leave(opening->engine);
        }
        if (code != MPI_SUCCESS) return fsdp__mpi_fail(opening->what, code);
        if (done) return FSDP_OK;
        if (opening->side != NULL) FSDP_TRY(fsdp__mpi_side_ops.check(opening->side));
        if (fsdp__now_ns() >= opening->deadline_ns)
            return fsdp__fail(FSDP_ERR_RANK_LOST,
                              "%s: a rank of fsdp_mpi_config.comm did not come within %.3f s: every rank of it calls "
                              "fsdp_context_create",
                              opening->what, (double)opening->timeout_ns * 1e-9);
        fsdp__mpi_rest(&pace);
    }
}

fsdp_status fsdp__mpi_opening_dup(const fsdp__mpi_opening *opening, MPI_Comm comm, MPI_Comm *out_comm)
{
    MPI_Request request = MPI_REQUEST_NULL;
    fsdp__mpi_enter(opening->engine);
    int code = MPI_Comm_idup(comm, out_comm, &request);
    fsdp__mpi_leave(opening->engine);
    FSDP_TRY(fsdp__mpi_opening_wait(opening, code, &request));
    fsdp__mpi_enter(opening->engine);
    code = MPI_Comm_set_errhandler(*out_comm, MPI_ERRORS_RETURN);
    fsdp__mpi_leave(opening->engine);
    return code == MPI_SUCCESS ? FSDP_OK : fsdp__mpi_fail(opening->what, code);
}
