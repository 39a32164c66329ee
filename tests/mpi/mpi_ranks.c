/* SPDX-License-Identifier: MIT */
/* The conformance suites' teams under mpirun: comm_ranks.c with other ways to meet and to run. */
#define meet     meet_in_memory
#define run_team run_team_here
#include "conformance/comm_ranks.c"
#undef meet
#undef run_team

#include <stdlib.h>
#include <time.h>

#include "mpi_ranks.h"

void meet(member *r);
void run_team(team *t, rank_body body);

uint64_t mpi_chunk_bytes;

/* ---- MPI ---- */

int mpi_rank(void)
{
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return rank;
}

int mpi_size(void)
{
    int size = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    return size;
}

void mpi_tests_begin(int *argc, char ***argv, int level)
{
    int given = MPI_THREAD_SINGLE;
    MPI_Init_thread(argc, argv, level, &given);
    if (given < level) {
        if (mpi_rank() == 0) fprintf(stderr, "this MPI has thread level %d, not %d\n", given, level);
        MPI_Finalize();
        exit(77);
    }
    if (mpi_rank() > 0 && freopen("/dev/null", "w", stdout) == NULL) exit(1);
}

int mpi_tests_end(int failed)
{
    int all = 0;
    MPI_Allreduce(&failed, &all, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    MPI_Finalize();
    return all > 0;
}

static bool sleep_until(MPI_Request *request, uint64_t timeout_ns)
{
    const struct timespec nap = {0, 200000};
    uint64_t deadline_ns = fsdp__after_ns(timeout_ns);
    int done = 0;
    while (MPI_Test(request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done) {
        if (fsdp__now_ns() >= deadline_ns) return false;
        nanosleep(&nap, NULL);
    }
    return true;
}

bool mpi_meet(MPI_Comm comm, uint64_t timeout_ns)
{
    MPI_Request request;
    MPI_Ibarrier(comm, &request);
    return sleep_until(&request, timeout_ns);
}

void mpi_gather(MPI_Comm comm, const void *mine, void *all, size_t bytes)
{
    MPI_Request request;
    MPI_Iallgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, comm, &request);
    if (sleep_until(&request, MPI_DEADLINE_S * (uint64_t)SECOND)) return;
    fprintf(stderr, "process %d: the others did not come to the end of a test\n", mpi_rank());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

MPI_Comm mpi_first(uint32_t world)
{
    MPI_Comm comm;
    int rank = mpi_rank();
    MPI_Comm_split(MPI_COMM_WORLD, (uint32_t)rank < world ? 0 : MPI_UNDEFINED, rank, &comm);
    return comm;
}

/* ---- The suite ---- */

static const void *rank_config(void *storage, void *group, uint32_t rank, uint64_t jitter_ns, uint64_t jitter_seed)
{
    (void)rank;
    fsdp_mpi_config *config = storage;
    *config = (fsdp_mpi_config)FSDP_MPI_CONFIG_INIT;
    config->comm = group;
    config->chunk_bytes = mpi_chunk_bytes;
    config->jitter_ns = jitter_ns;
    config->jitter_seed = jitter_seed;
    return config;
}

/* MPI is as fast as it is, and a world has as many ranks as mpirun has started. */
static void *group_create(uint32_t world, const fsdp_link *link)
{
    if (world > (uint32_t)mpi_size() || link->latency_ns != 0 || link->bytes_per_second != 0) skip();
    MPI_Comm *comm = malloc(sizeof *comm);
    assert_non_null(comm);
    *comm = mpi_first(world);
    return comm;
}

static void group_destroy(void *group)
{
    MPI_Comm *comm = group;
    if (*comm != MPI_COMM_NULL) MPI_Comm_free(comm);
    free(comm);
}

comm_suite mpi_suite(void)
{
    return (comm_suite){fsdp_mpi_backend(), group_create, group_destroy, rank_config, false, false, 0, NULL};
}

void meet(member *r)
{
    if (mpi_meet(*(MPI_Comm *)r->team->group, 20ull * SECOND)) return;
    r->failed = true;
    fprintf(stderr, "rank %u of %u: the others did not come to where the test meets\n", r->rank, r->world);
}

typedef struct left_behind {
    char sentence[SENTENCE_BYTES];
    bool failed;
} left_behind;

void run_team(team *t, rank_body body)
{
    static left_behind mine, all[MAX_RANKS];
    bool own_group = t->group == NULL, failed = false;
    uint32_t self = (uint32_t)mpi_rank();
    if (own_group) t->group = t->suite->group_create(t->world, &t->link);
    memset(&mine, 0, sizeof mine);
    if (self < t->world) {
        member *r = &t->rank[self];
        *r = (member){.team = t, .rank = self, .world = t->world};
        rank_live(r, body);
        memcpy(mine.sentence, r->sentence, sizeof mine.sentence);
        mine.failed = r->failed;
    }
    mpi_gather(MPI_COMM_WORLD, &mine, all, sizeof mine);
    for (uint32_t i = 0; i < t->world; i++) {
        memcpy(t->rank[i].sentence, all[i].sentence, sizeof mine.sentence);
        failed = failed || all[i].failed;
    }
    if (own_group) {
        t->suite->group_destroy(t->group);
        t->group = NULL;
    }
    if (failed) fail_msg("%s", "a rank failed: see above");
}
