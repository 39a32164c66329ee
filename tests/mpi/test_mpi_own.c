/* SPDX-License-Identifier: MIT */
/* What only the MPI backend promises: which communicators it takes, that it leaves the program's messages alone, that it gives
 * everything back, and that a failure is every rank's with one sentence. Needs three processes or more. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fsdp/fsdp.h"
#include "hostmem.h"
#include "mpi_ranks.h"

enum { MOST = 16, SAID = 512, N_AGAIN = 1100 /* with two communicators each: more than MPICH has */ };

static const uint64_t timeout_ns = 30ull * SECOND;

typedef struct said {
    fsdp_status status;
    char text[SAID];
} said;

static said last(fsdp_status status)
{
    said s = {.status = status};
    if (status != FSDP_OK) snprintf(s.text, sizeof s.text, "%s", fsdp_last_error());
    return s;
}

/* Everybody's, on every process. */
static const said *gather(said mine)
{
    static said all[MOST];
    mpi_gather(MPI_COMM_WORLD, &mine, all, sizeof mine);
    return all;
}

static fsdp_status open_context(const fsdp_mpi_config *mpi, bool reduce_comm, const fsdp_host_allocator *host,
                                fsdp_context **out_ctx)
{
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = fsdp_mpi_backend();
    config.backend_config = mpi;
    config.timeout_ns = timeout_ns;
    config.reduce_comm = reduce_comm;
    if (host != NULL) config.host = *host;
    return fsdp_context_create(&config, out_ctx);
}

/* The sum of rank + 1, by an all-reduce on a stream. */
static fsdp_status sum_ranks(fsdp_context *ctx, float *out_sum)
{
    fsdp_stream *s;
    fsdp_status status = fsdp_stream_create(ctx, "test", &s);
    if (status != FSDP_OK) return status;
    *out_sum = (float)(fsdp_context_rank(ctx) + 1);
    status = fsdp_all_reduce(fsdp_context_comm(ctx), out_sum, out_sum, 1, FSDP_DTYPE_FP32, s, NULL);
    if (status == FSDP_OK) status = fsdp_stream_drain_host(s, timeout_ns);
    if (status == FSDP_OK) status = fsdp_stream_release(s);
    return status;
}

/* ---- Communicators ---- */

static void a_null_communicator_is_refused(void **state)
{
    (void)state;
    MPI_Comm null = MPI_COMM_NULL;
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    mpi.comm = &null;
    assert_int_equal(open_context(&mpi, false, NULL, &ctx), FSDP_ERR_ARG);
    assert_string_equal(fsdp_last_error(), "fsdp_mpi_config.comm is MPI_COMM_NULL: this process is none of its ranks");
    assert_null(ctx);
}

static void two_groups_of_ranks_are_refused(void **state)
{
    (void)state;
    MPI_Comm half, inter;
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    int first = mpi_rank() == 0;
    MPI_Comm_split(MPI_COMM_WORLD, first, mpi_rank(), &half);
    MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, first ? 1 : 0, 7, &inter);
    mpi.comm = &inter;
    said s = last(open_context(&mpi, false, NULL, &ctx));
    MPI_Comm_free(&inter);
    MPI_Comm_free(&half);
    assert_int_equal(s.status, FSDP_ERR_ARG);
    assert_non_null(strstr(s.text, "intercommunicator"));
}

static void a_config_is_checked(void **state)
{
    (void)state;
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    mpi.chunk_bytes = 30;
    assert_int_equal(open_context(&mpi, false, NULL, &ctx), FSDP_ERR_ARG);
    assert_non_null(strstr(fsdp_last_error(), "chunk_bytes is 30"));
    mpi.chunk_bytes = 0;
    mpi.size = 8;
    assert_int_equal(open_context(&mpi, false, NULL, &ctx), FSDP_ERR_ARG);
}

static void different_lengths_of_messages_are_refused_on_every_rank(void **state)
{
    (void)state;
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    mpi.chunk_bytes = mpi_rank() == 1 ? 128 : 256;
    const said *all = gather(last(open_context(&mpi, false, NULL, &ctx)));
    for (int r = 0; r < mpi_size(); r++) {
        assert_int_equal(all[r].status, FSDP_ERR_MISMATCH);
        assert_non_null(strstr(all[r].text, "chunk_bytes is 256 on rank 0 and 128 on rank 1"));
    }
}

/* Any message, from anyone: were the library's on this communicator, one would come. */
static void the_programs_messages_and_ours_do_not_meet(void **state)
{
    (void)state;
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    int mine = mpi_rank(), got = -1, next = (mpi_rank() + 1) % mpi_size();
    MPI_Request request;
    MPI_Status status;
    MPI_Irecv(&got, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &request);
    float sum = 0.0f;
    DO(open_context(&mpi, true, NULL, &ctx));
    DO(sum_ranks(ctx, &sum));
    assert_true(sum == (float)(mpi_size() * (mpi_size() + 1) / 2));
    int done = 1;
    MPI_Test(&request, &done, &status);
    assert_false(done);
    mpi_meet(MPI_COMM_WORLD, timeout_ns);
    MPI_Send(&mine, 1, MPI_INT, next, 9, MPI_COMM_WORLD);
    MPI_Wait(&request, &status);
    assert_int_equal(got, (mpi_rank() + mpi_size() - 1) % mpi_size());
    assert_int_equal(status.MPI_TAG, 9);
    DO(fsdp_context_destroy(ctx));
}

/* As ranks of several machines do. */
static void the_side_channel_goes_by_tcp_where_an_address_is_given(void **state)
{
    (void)state;
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    double sum[1] = {mpi_rank() + 1.0};
    mpi.address = mpi_rank() == 0 ? "localhost" : "nowhere.invalid"; /* only rank 0's counts */
    DO(open_context(&mpi, true, NULL, &ctx));
    DO(fsdp_sum_host(ctx, sum, 1));
    assert_true(sum[0] == mpi_size() * (mpi_size() + 1) / 2.0);
    DO(fsdp_context_destroy(ctx));
    mpi.address = "nowhere.invalid"; /* rank 0 needs none to listen: the others cannot find it */
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = fsdp_mpi_backend();
    config.backend_config = &mpi;
    config.timeout_ns = SECOND / 2;
    const said *all = gather(last(fsdp_context_create(&config, &ctx)));
    for (int r = 0; r < mpi_size(); r++) assert_int_equal(all[r].status, FSDP_ERR_RANK_LOST);
    assert_non_null(strstr(all[1].text, "nowhere.invalid"));
}

/* Two jobs, as it were: each half sums by itself, at the same time. */
static void disjoint_communicators_do_not_meet(void **state)
{
    (void)state;
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    MPI_Comm half;
    int size = 0;
    MPI_Comm_split(MPI_COMM_WORLD, mpi_rank() % 2, mpi_rank(), &half);
    MPI_Comm_size(half, &size);
    mpi.comm = &half;
    DO(open_context(&mpi, false, NULL, &ctx));
    assert_int_equal(fsdp_context_world(ctx), size);
    MPI_Comm_free(&half); /* the library has its own */
    for (int i = 0; i < 50; i++) {
        float sum = 0.0f;
        DO(sum_ranks(ctx, &sum));
        assert_true(sum == (float)(size * (size + 1) / 2));
    }
    DO(fsdp_context_destroy(ctx));
}

static void a_context_can_be_made_and_destroyed_any_number_of_times(void **state)
{
    (void)state;
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    footprint before = {0}, after;
    for (int i = 0; i < N_AGAIN; i++) {
        fsdp_context *ctx = NULL;
        float sum = 0.0f;
        DO(open_context(&mpi, true, NULL, &ctx));
        if (i % 50 == 0) DO(sum_ranks(ctx, &sum));
        DO(fsdp_context_destroy(ctx));
        if (i == 50) before = footprint_take();
    }
    after = footprint_take();
    assert_int_equal(after.n_descriptors, before.n_descriptors);
    assert_int_equal(after.n_threads, before.n_threads);
}

/* ---- Host memory that ends ---- */

typedef struct scarce_memory {
    fsdp_host_allocator libc;
    pthread_mutex_t lock;
    int left, live;
} scarce_memory;

static void *scarce_take(void *arg, size_t bytes, size_t alignment)
{
    scarce_memory *m = arg;
    pthread_mutex_lock(&m->lock);
    bool ends = m->left == 0;
    if (m->left > 0) m->left--;
    if (!ends) m->live++;
    pthread_mutex_unlock(&m->lock);
    return ends ? NULL : m->libc.alloc(m->libc.arg, bytes, alignment);
}

static void scarce_give(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    scarce_memory *m = arg;
    pthread_mutex_lock(&m->lock);
    m->live--;
    pthread_mutex_unlock(&m->lock);
    m->libc.free(m->libc.arg, ptr, bytes, alignment);
}

/* Sums of a size that no sum had before need memory to sum in. Without it nothing is enqueued, and the next one may be. */
static void without_memory_to_sum_in_nothing_is_enqueued(void **state)
{
    (void)state;
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    fsdp_stream *s;
    static float x[4096];
    scarce_memory m = {.left = -1};
    fsdp_host_allocator none = {NULL, NULL, NULL, NULL}, host = {scarce_take, scarce_give, &m, NULL};
    DO(fsdp__host_allocator_resolve(&none, &m.libc));
    pthread_mutex_init(&m.lock, NULL);
    DO(open_context(&mpi, false, &host, &ctx));
    DO(fsdp_stream_create(ctx, "test", &s));
    DO(fsdp_barrier(fsdp_context_comm(ctx), s, NULL)); /* a group is there */
    DO(fsdp_stream_drain_host(s, timeout_ns));
    m.left = 0;
    assert_int_equal(fsdp_all_reduce(fsdp_context_comm(ctx), x, x, 4096, FSDP_DTYPE_FP32, s, NULL),
                     FSDP_ERR_NO_HOST_MEMORY);
    m.left = -1;
    for (int i = 0; i < 4096; i++) x[i] = 1.0f;
    DO(fsdp_all_reduce(fsdp_context_comm(ctx), x, x, 4096, FSDP_DTYPE_FP32, s, NULL));
    DO(fsdp_stream_drain_host(s, timeout_ns));
    for (int i = 0; i < 4096; i++) assert_true(x[i] == (float)mpi_size());
    /* Warm: the same again takes nothing. */
    m.left = 0;
    DO(fsdp_all_reduce(fsdp_context_comm(ctx), x, x, 4096, FSDP_DTYPE_FP32, s, NULL));
    DO(fsdp_stream_drain_host(s, timeout_ns));
    m.left = -1;
    (void)!fsdp_stream_release(s);
    DO(fsdp_context_destroy(ctx));
    assert_int_equal(m.live, 0);
    pthread_mutex_destroy(&m.lock);
}

/* How many allocations a context of one rank makes before what fails without the next says `where`; -1: none. */
static int allocations_before(const char *where, scarce_memory *m, const fsdp_host_allocator *host)
{
    MPI_Comm self = MPI_COMM_SELF;
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    mpi.comm = &self;
    for (int n = 0; n < 100; n++) {
        fsdp_context *ctx = NULL;
        m->left = n;
        said s = last(open_context(&mpi, false, host, &ctx));
        m->left = -1;
        if (s.status == FSDP_OK) DO(fsdp_context_destroy(ctx));
        assert_int_equal(m->live, 0);
        if (s.status == FSDP_OK) return -1;
        assert_int_equal(s.status, FSDP_ERR_NO_HOST_MEMORY);
        if (strstr(s.text, where) != NULL) return n;
    }
    return -1;
}

/* The last rank's memory ends while it opens its communicator: the others do not wait for their deadline, and are told. */
static void a_rank_without_memory_to_open_is_every_ranks_error(void **state)
{
    (void)state;
    static const char *const places[] = {"communicator 0: no host memory", "opening communicator 0: no host memory"};
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    scarce_memory m = {.left = -1};
    fsdp_host_allocator none = {NULL, NULL, NULL, NULL}, host = {scarce_take, scarce_give, &m, NULL};
    DO(fsdp__host_allocator_resolve(&none, &m.libc));
    pthread_mutex_init(&m.lock, NULL);
    int end = mpi_size() - 1;
    for (int i = 0; i < 2; i++) {
        int n = allocations_before(places[i], &m, &host);
        assert_true(n > 0);
        fsdp_context *ctx = NULL;
        m.left = mpi_rank() == end ? n : -1;
        const said *all = gather(last(open_context(&mpi, false, &host, &ctx)));
        m.left = -1;
        assert_null(ctx);
        assert_int_equal(m.live, 0);
        assert_int_equal(all[end].status, FSDP_ERR_NO_HOST_MEMORY);
        for (int r = 0; r < end; r++) {
            /* Where it could still vote it has failed for all; else it tells why it leaves. */
            assert_int_equal(all[r].status, i == 0 ? FSDP_ERR_ABORTED : FSDP_ERR_NO_HOST_MEMORY);
            const char *says = i == 0 ? "rank 2 could not open its context: communicator 0: no host memory"
                                      : "opening communicator 0 failed on rank 2, so on every rank";
            if (strstr(all[r].text, says) == NULL) fail_msg("%d: \"%s\" does not say \"%s\"", i, all[r].text, says);
        }
    }
    pthread_mutex_destroy(&m.lock);
}

/* ---- Failures ---- */

static void assert_all_say(const said *all, fsdp_status status, const char *what)
{
    for (int r = 0; r < mpi_size(); r++) {
        if (all[r].status != status || strstr(all[r].text, what) == NULL)
            fail_msg("rank %d: %s: %s; not: %s", r, fsdp_status_name(all[r].status), all[r].text, what);
        assert_string_equal(all[r].text, all[0].text);
    }
}

/* What check comes to within the time: a failure is on its way to this rank. */
static fsdp_status check_soon(fsdp_context *ctx)
{
    uint64_t deadline_ns = fsdp__after_ns(timeout_ns);
    fsdp_status status;
    while ((status = fsdp_context_check(ctx)) == FSDP_OK && fsdp__now_ns() < deadline_ns) usleep(1000);
    return status;
}

static void an_abort_is_every_ranks_with_its_reason(void **state)
{
    (void)state;
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    fsdp_stream *s;
    float x = 0.0f;
    DO(open_context(&mpi, false, NULL, &ctx));
    DO(fsdp_stream_create(ctx, "test", &s));
    mpi_meet(MPI_COMM_WORLD, timeout_ns); /* else an abort could come while others still open */
    /* All but rank 1 stand in a collective to which it never comes. */
    if (mpi_rank() == 1) fsdp_context_abort(ctx, "the loss is NaN");
    else (void)!fsdp_all_reduce(fsdp_context_comm(ctx), &x, &x, 1, FSDP_DTYPE_FP32, s, NULL);
    if (mpi_rank() != 1) assert_int_not_equal(fsdp_stream_drain_host(s, timeout_ns), FSDP_OK);
    const said *all = gather(last(check_soon(ctx)));
    (void)!fsdp_stream_release(s);
    DO(fsdp_context_destroy(ctx));
    assert_all_say(all, FSDP_ERR_ABORTED, "rank 1 aborted: the loss is NaN");
}

static void ranks_that_call_different_things_all_hear_both(void **state)
{
    (void)state;
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    fsdp_stream *s;
    static float x[64 * MOST];
    DO(open_context(&mpi, true, NULL, &ctx));
    DO(fsdp_stream_create(ctx, "test", &s));
    fsdp_comm *comm = fsdp_context_reduce_comm(ctx);
    static float y[64];
    (void)!fsdp_all_gather(comm, y, x, mpi_rank() == 1 ? 63 : 64, FSDP_DTYPE_BF16, s, NULL);
    assert_int_not_equal(fsdp_stream_drain_host(s, timeout_ns), FSDP_OK);
    const said *all = gather(last(check_soon(ctx)));
    (void)!fsdp_stream_release(s);
    DO(fsdp_context_destroy(ctx));
    assert_all_say(all, FSDP_ERR_MISMATCH, "rank 1: #1 all-gather of caller (63 bf16)");
    assert_non_null(strstr(all[0].text, "#1 all-gather of caller (64 bf16)"));
}

/* Rank 1 does not come to communicator 0, and waits in communicator 1 for the others, who cannot come there any more. */
static void a_rank_that_waits_elsewhere_is_told_too(void **state)
{
    (void)state;
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    fsdp_config config = FSDP_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    fsdp_stream *s;
    config.backend = fsdp_mpi_backend();
    config.backend_config = &mpi;
    config.timeout_ns = 3ull * SECOND / 2;
    config.reduce_comm = true;
    DO(fsdp_context_create(&config, &ctx));
    DO(fsdp_stream_create(ctx, "test", &s));
    mpi_meet(MPI_COMM_WORLD, timeout_ns);
    fsdp_comm *comm = mpi_rank() == 1 ? fsdp_context_reduce_comm(ctx) : fsdp_context_comm(ctx);
    (void)!fsdp_barrier(comm, s, NULL);
    assert_int_equal(fsdp_stream_drain_host(s, timeout_ns), FSDP_ERR_RANK_LOST);
    const said *all = gather(last(check_soon(ctx)));
    (void)!fsdp_stream_release(s);
    DO(fsdp_context_destroy(ctx));
    assert_int_equal(all[0].status, FSDP_ERR_RANK_LOST);
    for (int r = 1; r < mpi_size(); r++) assert_string_equal(all[r].text, all[0].text);
    assert_non_null(strstr(all[0].text, "#1 barrier of caller: rank"));
    assert_non_null(strstr(all[0].text, "did not come within 1.500 s"));
}

/* Rank 0 is late: the others cannot ask it who is missing. */
static void a_late_rank_0_is_named_by_the_others(void **state)
{
    (void)state;
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    fsdp_config config = FSDP_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    fsdp_stream *s;
    config.backend = fsdp_mpi_backend();
    config.backend_config = &mpi;
    config.timeout_ns = SECOND;
    DO(fsdp_context_create(&config, &ctx));
    DO(fsdp_stream_create(ctx, "test", &s));
    mpi_meet(MPI_COMM_WORLD, timeout_ns);
    if (mpi_rank() > 0) {
        (void)!fsdp_barrier(fsdp_context_comm(ctx), s, NULL);
        assert_int_equal(fsdp_stream_drain_host(s, timeout_ns), FSDP_ERR_RANK_LOST);
    }
    const said *all = gather(last(check_soon(ctx)));
    (void)!fsdp_stream_release(s);
    DO(fsdp_context_destroy(ctx));
    assert_all_say(all, FSDP_ERR_RANK_LOST, "#1 barrier of caller: rank 0 of");
}

/* Rank 1's patience ends before rank 0's, which came later and is there all the same: rank 0 is asked who is missing. */
static void the_rank_that_came_first_does_not_blame_rank_0(void **state)
{
    (void)state;
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    fsdp_config config = FSDP_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    fsdp_stream *s;
    config.backend = fsdp_mpi_backend();
    config.backend_config = &mpi;
    config.timeout_ns = 4ull * SECOND;
    DO(fsdp_context_create(&config, &ctx));
    DO(fsdp_stream_create(ctx, "test", &s));
    mpi_meet(MPI_COMM_WORLD, timeout_ns);
    if (mpi_rank() == 0) usleep(2000000);
    if (mpi_rank() < 2) {
        (void)!fsdp_barrier(fsdp_context_comm(ctx), s, NULL);
        assert_int_equal(fsdp_stream_drain_host(s, timeout_ns), FSDP_ERR_RANK_LOST);
    }
    const said *all = gather(last(check_soon(ctx)));
    (void)!fsdp_stream_release(s);
    DO(fsdp_context_destroy(ctx));
    assert_all_say(all, FSDP_ERR_RANK_LOST, "#1 barrier of caller: rank 2 of 3 did not come within 4.000 s");
}

/* After all of this a new context works: nothing of a failed one is in its way. */
static void a_new_context_works_after_failed_ones(void **state)
{
    (void)state;
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    float sum = 0.0f;
    DO(open_context(&mpi, true, NULL, &ctx));
    DO(sum_ranks(ctx, &sum));
    DO(fsdp_context_destroy(ctx));
    assert_true(sum == (float)(mpi_size() * (mpi_size() + 1) / 2));
}

/* Processes begin each test together, whatever has become of the one before. */
static int together(void **state)
{
    (void)state;
    alarm(MPI_DEADLINE_S);
    return mpi_meet(MPI_COMM_WORLD, 60ull * SECOND) ? 0 : -1;
}

int main(int argc, char **argv)
{
    mpi_tests_begin(&argc, &argv, MPI_THREAD_MULTIPLE);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(a_null_communicator_is_refused, together),
        cmocka_unit_test_setup(two_groups_of_ranks_are_refused, together),
        cmocka_unit_test_setup(a_config_is_checked, together),
        cmocka_unit_test_setup(different_lengths_of_messages_are_refused_on_every_rank, together),
        cmocka_unit_test_setup(the_programs_messages_and_ours_do_not_meet, together),
        cmocka_unit_test_setup(the_side_channel_goes_by_tcp_where_an_address_is_given, together),
        cmocka_unit_test_setup(disjoint_communicators_do_not_meet, together),
        cmocka_unit_test_setup(a_context_can_be_made_and_destroyed_any_number_of_times, together),
        cmocka_unit_test_setup(without_memory_to_sum_in_nothing_is_enqueued, together),
        cmocka_unit_test_setup(a_rank_without_memory_to_open_is_every_ranks_error, together),
        cmocka_unit_test_setup(an_abort_is_every_ranks_with_its_reason, together),
        cmocka_unit_test_setup(ranks_that_call_different_things_all_hear_both, together),
        cmocka_unit_test_setup(a_rank_that_waits_elsewhere_is_told_too, together),
        cmocka_unit_test_setup(a_late_rank_0_is_named_by_the_others, together),
        cmocka_unit_test_setup(the_rank_that_came_first_does_not_blame_rank_0, together),
        cmocka_unit_test_setup(a_new_context_works_after_failed_ones, together),
    };
    return mpi_tests_end(cmocka_run_group_tests_name("MPI backend", tests, NULL, NULL));
}
