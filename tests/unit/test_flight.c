/* SPDX-License-Identifier: MIT */
/* The flight recorder: its ring and its file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bare_recorder.h"
#include "flight_file.h"
#include "fsdp/fsdp.h"

enum { ALL = FSDP_FLIGHT_CALLS };

#define OK(call)                                                                                     \
    do {                                                                                             \
        fsdp_status ok_ = (call);                                                                    \
        if (ok_ != FSDP_OK) fail_msg("%s: %s: %s", #call, fsdp_status_name(ok_), fsdp_last_error()); \
    } while (0)

static uint64_t hash_of(const fsdp_context *ctx, uint32_t comm)
{
    uint64_t n, hash;
    fsdp__flight_count(&ctx->flight, comm, &n, &hash);
    return hash;
}

static uint64_t n_of(const fsdp_context *ctx, uint32_t comm)
{
    uint64_t n, hash;
    fsdp__flight_count(&ctx->flight, comm, &n, &hash);
    return n;
}

/* ---- The ring ---- */

static void the_last_256_calls_are_kept_with_their_names(void **state)
{
    (void)state;
    fsdp_context *ctx = bare();
    fsdp__flight_entry e;
    for (uint64_t i = 0; i < 3 * ALL + 10; i++) {
        char name[32];
        snprintf(name, sizeof name, "unit.%llu", (unsigned long long)i);
        add(ctx, i % 3 == 0, gather_of(name, "TRAIN", i));
        memset(name, 'x', sizeof name - 1); /* the unit has gone */
        assert_true(fsdp__flight_read(&ctx->flight, i, &e));
        if (i >= ALL) assert_false(fsdp__flight_read(&ctx->flight, i - ALL, &e));
    }
    uint64_t end = 3 * ALL + 10;
    assert_int_equal(ctx->flight.n, end);
    assert_int_equal(n_of(ctx, 0) + n_of(ctx, 1), end);
    for (uint64_t i = end - ALL; i < end; i++) {
        char name[32];
        snprintf(name, sizeof name, "unit.%llu", (unsigned long long)i);
        assert_true(fsdp__flight_read(&ctx->flight, i, &e));
        assert_string_equal(e.call.label, name);
        assert_string_equal(e.call.pass, "TRAIN");
        assert_int_equal(e.call.count, i);
        assert_int_equal(fsdp__flight_comm(&e), i % 3 == 0);
        assert_int_equal(e.call.number, i % 3 == 0 ? i / 3 + 1 : i - i / 3);
        assert_int_equal(fsdp__flight_point(&e), fsdp__point_of(1, 1));
        assert_int_equal(e.enqueued_ns, 7);
    }
    free(ctx);
}

static void a_group_has_one_number_and_can_be_taken_back(void **state)
{
    (void)state;
    fsdp_context *ctx = bare();
    fsdp_collective list[3] = {gather_of("a", NULL, 1), gather_of("b", NULL, 2), gather_of("c", NULL, 3)};
    fsdp__flight_entry e;
    uint64_t hash = 0;
    for (uint32_t k = 0; k < 200; k++) {
        uint64_t n = n_of(ctx, 0), end = ctx->flight.n;
        hash = hash_of(ctx, 0);
        fsdp__flight_add(&ctx->flight, 0, list, 3, 0, 0);
        assert_int_equal(n_of(ctx, 0), n + 1);
        assert_int_not_equal(hash_of(ctx, 0), hash);
        for (uint32_t i = 0; i < 3; i++) {
            assert_true(fsdp__flight_read(&ctx->flight, end + i, &e));
            assert_int_equal(e.call.number, n + 1);
            assert_int_equal(e.call.part, i);
            assert_int_equal(e.call.n_parts, 3);
        }
        assert_int_equal(e.rolling, hash_of(ctx, 0));
        if (k % 2 == 0) continue;
        fsdp__flight_take_back(&ctx->flight, 0, 3);
        assert_int_equal(n_of(ctx, 0), n);
        assert_int_equal(hash_of(ctx, 0), hash);
        assert_int_equal(ctx->flight.n, end);
    }
    uint64_t after;
    assert_true(fsdp__flight_hash_after(&ctx->flight, 0, 0, &after) && after == 0);
    assert_true(fsdp__flight_hash_after(&ctx->flight, 0, n_of(ctx, 0), &after) && after == hash_of(ctx, 0));
    assert_false(fsdp__flight_hash_after(&ctx->flight, 0, 1, &after)); /* it has gone */
    assert_false(fsdp__flight_hash_after(&ctx->flight, 0, n_of(ctx, 0) + 1, &after));
    free(ctx);
}

static void the_hash_sees_every_difference_and_the_order(void **state)
{
    (void)state;
    const fsdp_collective base = {.kind = FSDP_OPERATION_BROADCAST,
                                  .dtype = FSDP_DTYPE_FP32,
                                  .count = 24,
                                  .root = 1,
                                  .label = "transformer.h.7.mlp",
                                  .pass = "TRAIN"};
    fsdp_collective other[9];
    for (int i = 0; i < 9; i++) other[i] = base;
    other[0].kind = FSDP_OPERATION_ALL_REDUCE;
    other[1].dtype = FSDP_DTYPE_BF16;
    other[2].count = 25;
    other[3].root = 2;
    other[4].label = "transformer.h.7.mlq";
    other[5].label = "transformer.h.7.mlp.a.name.that.is.longer.than.the.48.bytes.kept";
    other[6].label = "transformer.h.7.mlp.a.name.that.is.longer.than.the.48.bytes.kept.2";
    other[7].pass = "EVAL";
    other[8].pass = NULL;
    uint64_t seen[11];
    uint32_t n = 0;
    for (int i = -1; i < 9; i++) {
        fsdp_context *ctx = bare(), *same = bare();
        add(ctx, 0, i < 0 ? base : other[i]);
        add(same, 0, i < 0 ? base : other[i]);
        assert_int_equal(hash_of(ctx, 0), hash_of(same, 0));
        assert_int_equal(hash_of(ctx, 1), 0);
        for (uint32_t k = 0; k < n; k++) assert_int_not_equal(hash_of(ctx, 0), seen[k]);
        seen[n++] = hash_of(ctx, 0);
        add(ctx, 0, other[0]), add(ctx, 0, other[1]);
        add(same, 0, other[1]), add(same, 0, other[0]);
        assert_int_not_equal(hash_of(ctx, 0), hash_of(same, 0));
        free(ctx), free(same);
    }
}

static void a_host_call_is_inside_until_it_ends(void **state)
{
    (void)state;
    fsdp_context *ctx = bare();
    fsdp__flight_entry e;
    fsdp__flight_host_begin(&ctx->flight, "fsdp_sum_host of 4", 11);
    assert_int_equal(ctx->flight.inside, 1);
    assert_true(fsdp__flight_read(&ctx->flight, 0, &e));
    assert_int_equal(fsdp__flight_comm(&e), FSDP__FLIGHT_HOST);
    assert_string_equal(e.call.label, "fsdp_sum_host of 4");
    assert_int_equal(n_of(ctx, 0), 0);
    fsdp__flight_host_end(&ctx->flight);
    assert_int_equal(ctx->flight.inside, 0);
    free(ctx);
}

/* Every word of an entry follows from its index, so that a torn one shows. */
static void *add_many(void *arg)
{
    fsdp_context *ctx = arg;
    for (uint64_t i = 0; i < 1000000; i++) {
        char name[32];
        snprintf(name, sizeof name, "n%llu", (unsigned long long)i);
        fsdp_collective c = gather_of(name, name, i);
        fsdp__flight_add(&ctx->flight, 0, &c, 1, i, 3 * i);
    }
    return NULL;
}

static void readers_see_whole_entries_while_one_writes(void **state)
{
    (void)state;
    fsdp_context *ctx = bare();
    pthread_t thread;
    uint64_t n_read = 0, n = 0, hash, last_n = 0;
    assert_int_equal(pthread_create(&thread, NULL, add_many, ctx), 0);
    while (n < 1000000) {
        fsdp__flight_entry e;
        fsdp__flight_count(&ctx->flight, 0, &n, &hash);
        assert_true(n >= last_n && (n == 0) == (hash == 0));
        uint64_t end = ctx->flight.n;
        assert_true(end >= n);
        for (int k = 0; k < 2000 && end >= ALL; k++) { /* those that are being overwritten just now */
            uint64_t i = ctx->flight.n - ALL;
            if (!fsdp__flight_read(&ctx->flight, i, &e)) continue;
            assert_int_equal(e.call.count, i);
            assert_int_equal(e.call.number, i + 1);
            assert_int_equal(e.enqueued_ns, 3 * i);
            assert_int_equal(fsdp__flight_point(&e), i);
        }
        for (uint64_t i = end > ALL ? end - ALL : 0; i < end; i++) {
            char name[32];
            if (!fsdp__flight_read(&ctx->flight, i, &e)) continue;
            snprintf(name, sizeof name, "n%llu", (unsigned long long)i);
            assert_string_equal(e.call.label, name);
            assert_int_equal(e.call.count, i);
            assert_int_equal(e.call.number, i + 1);
            assert_int_equal(e.enqueued_ns, 3 * i);
            assert_int_equal(fsdp__flight_point(&e), i);
            if (e.call.number == n) assert_int_equal(e.rolling, hash);
            n_read++;
        }
        last_n = n;
    }
    pthread_join(thread, NULL);
    assert_true(n_read >= ALL);
    free(ctx);
}

/* ---- The file ---- */

typedef struct rig {
    char folder[64], path[128];
    fsdp_context *ctx;
    fsdp_stream *s;
    float *data;
    flight_file file;
    char complaint[256];
} rig;

static rig *rig_open(fsdp_config *config)
{
    rig *g = calloc(1, sizeof *g);
    assert_non_null(g);
    snprintf(g->folder, sizeof g->folder, "/tmp/fsdp_flight_XXXXXX");
    assert_non_null(mkdtemp(g->folder));
    snprintf(g->path, sizeof g->path, "%s/flight", g->folder);
    fsdp_config c = FSDP_CONFIG_INIT;
    OK(fsdp_context_create(config != NULL ? config : &c, &g->ctx));
    OK(fsdp_stream_create(g->ctx, "compute", &g->s));
    g->data = calloc(1024, sizeof *g->data);
    return g;
}

static void rig_close(rig *g)
{
    OK(fsdp_stream_release(g->s));
    OK(fsdp_context_destroy(g->ctx));
    unlink(g->path);
    assert_int_equal(rmdir(g->folder), 0); /* nothing else was left there */
    free(g->data);
    free(g);
}

static void enqueue(rig *g, uint64_t count)
{
    OK(fsdp_all_reduce(fsdp_context_comm(g->ctx), g->data, g->data, count, FSDP_DTYPE_FP32, g->s, NULL));
}

static void write_and_read(rig *g)
{
    OK(fsdp_flight_write_json(g->ctx, g->path));
    if (!flight_file_read(g->path, &g->file, g->complaint, sizeof g->complaint)) fail_msg("%s", g->complaint);
}

typedef struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool open;
} gate;

static void wait_at(void *arg)
{
    gate *g = arg;
    pthread_mutex_lock(&g->lock);
    while (!g->open) pthread_cond_wait(&g->changed, &g->lock);
    pthread_mutex_unlock(&g->lock);
}

static void open_gate(gate *g)
{
    pthread_mutex_lock(&g->lock);
    g->open = true;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

static void the_file_says_what_was_called_and_how_far_it_is(void **state)
{
    (void)state;
    rig *g = rig_open(NULL);
    gate shut = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};
    write_and_read(g);
    assert_int_equal(g->file.n_calls, 0);
    assert_string_equal(g->file.status, "FSDP_OK");
    assert_string_equal(g->file.error, "");
    double sums[3] = {1, 2, 3};
    uint64_t before = fsdp_context_now_ns(g->ctx);
    enqueue(g, 5);
    OK(fsdp_stream_drain_host(g->s, UINT64_MAX));
    OK(fsdp_sum_host(g->ctx, sums, 3));
    OK(fsdp_stream_host_call(g->s, wait_at, &shut));
    enqueue(g, 6);
    write_and_read(g); /* a file of that name is replaced */
    uint64_t after = fsdp_context_now_ns(g->ctx);
    assert_int_equal(g->file.rank, 0);
    assert_int_equal(g->file.world, 1);
    assert_int_equal(g->file.n[0], 2);
    assert_int_equal(g->file.n[1], 0);
    assert_int_equal(g->file.hash[0], hash_of(g->ctx, 0));
    assert_int_equal(g->file.n_calls, 3);
    const flight_call *c = g->file.call;
    assert_string_equal(c[0].call, "all-reduce");
    assert_string_equal(c[0].what, "caller");
    assert_string_equal(c[0].pass, "");
    assert_string_equal(c[0].dtype, "fp32");
    assert_int_equal(c[0].count, 5);
    assert_int_equal(c[0].number, 1);
    assert_int_equal(c[0].of, 1);
    assert_string_equal(c[0].state, "done");
    assert_int_equal(c[1].comm, -1);
    assert_string_equal(c[1].call, "fsdp_sum_host");
    assert_string_equal(c[1].what, "3");
    assert_string_equal(c[1].state, "returned");
    assert_int_equal(c[2].count, 6);
    assert_string_equal(c[2].state, "enqueued"); /* behind the gate */
    assert_true(before <= c[0].enqueued_ns && c[0].enqueued_ns <= c[1].enqueued_ns);
    assert_true(c[1].enqueued_ns <= c[2].enqueued_ns && c[2].enqueued_ns <= after);
    open_gate(&shut);
    OK(fsdp_stream_drain_host(g->s, UINT64_MAX));
    write_and_read(g);
    assert_string_equal(g->file.call[2].state, "done");
    for (uint64_t i = 0; i < 2 * ALL; i++) enqueue(g, i);
    OK(fsdp_stream_drain_host(g->s, UINT64_MAX));
    write_and_read(g);
    assert_int_equal(g->file.n_calls, ALL);
    assert_int_equal(g->file.n[0], 2 * ALL + 2);
    for (uint64_t i = 0; i < ALL; i++) {
        assert_int_equal(g->file.call[i].count, ALL + i);
        assert_int_equal(g->file.call[i].number, ALL + i + 3);
        assert_string_equal(g->file.call[i].state, "done");
    }
    rig_close(g);
}

static void calls_on_a_stream_that_was_released_are_done(void **state)
{
    (void)state;
    rig *g = rig_open(NULL);
    for (int turn = 0; turn < 3; turn++) {
        fsdp_stream *other;
        OK(fsdp_stream_create(g->ctx, "other", &other));
        OK(fsdp_all_reduce(fsdp_context_comm(g->ctx), g->data, g->data, 1, FSDP_DTYPE_FP32, other, NULL));
        OK(fsdp_stream_release(other));
        write_and_read(g);
        for (uint32_t i = 0; i < g->file.n_calls; i++) assert_string_equal(g->file.call[i].state, "done");
    }
    /* Another stream in the same slot: its own are not. */
    gate shut = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};
    fsdp_stream *other;
    OK(fsdp_stream_create(g->ctx, "other", &other));
    OK(fsdp_stream_host_call(other, wait_at, &shut));
    OK(fsdp_all_reduce(fsdp_context_comm(g->ctx), g->data, g->data, 1, FSDP_DTYPE_FP32, other, NULL));
    write_and_read(g);
    assert_string_equal(g->file.call[2].state, "done");
    assert_string_equal(g->file.call[3].state, "enqueued");
    open_gate(&shut);
    OK(fsdp_stream_release(other));
    rig_close(g);
}

static void names_may_hold_anything(void **state)
{
    (void)state;
    rig *g = rig_open(NULL);
    fsdp__lock(g->ctx);
    add(g->ctx, 0, gather_of("a\"b\\c\n\x01\xff\xc3\xa4", "\x7f", 8));
    add(g->ctx, 0, gather_of("€€€€€€€€€€€€€€€€€€€€", "TRAIN", 8)); /* cut between characters: 15 of 3 bytes */
    fsdp__unlock(g->ctx);
    write_and_read(g);
    assert_string_equal(g->file.call[0].what, "a\"b\\c\n\x01?\xc3\xa4");
    assert_string_equal(g->file.call[0].pass, "\x7f");
    assert_string_equal(g->file.call[1].what, "€€€€€€€€€€€€€€€");
    rig_close(g);
}

static void *wait_for_work(void *arg)
{
    fsdp_status status = fsdp_work_wait_host(arg, UINT64_MAX);
    return (void *)(intptr_t)status;
}

static void any_thread_may_write_it_while_another_waits(void **state)
{
    (void)state;
    rig *g = rig_open(NULL);
    gate shut = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};
    fsdp_work *work;
    pthread_t thread;
    void *status;
    OK(fsdp_stream_host_call(g->s, wait_at, &shut));
    OK(fsdp_all_reduce(fsdp_context_comm(g->ctx), g->data, g->data, 3, FSDP_DTYPE_FP32, g->s, &work));
    assert_int_equal(pthread_create(&thread, NULL, wait_for_work, work), 0);
    for (int i = 0; i < 100; i++) write_and_read(g);
    assert_int_equal(g->file.n_calls, 1);
    assert_string_equal(g->file.call[0].state, "enqueued");
    /* Also while somebody holds the context's lock for long, as FSDP_DEBUG_ORDER does while it waits for a rank. */
    pthread_mutex_lock(&g->ctx->lock);
    write_and_read(g);
    pthread_mutex_unlock(&g->ctx->lock);
    assert_int_equal(g->file.n_calls, 1);
    open_gate(&shut);
    pthread_join(thread, &status);
    assert_int_equal((intptr_t)status, FSDP_OK);
    fsdp_work_release(work);
    rig_close(g);
}

static void a_failed_context_is_written_with_its_sentence(void **state)
{
    (void)state;
    rig *g = rig_open(NULL);
    enqueue(g, 5);
    fsdp_context_abort(g->ctx, "for \"a\" reason");
    assert_int_equal(fsdp_stream_delay(NULL, 1), FSDP_ERR_ARG);
    char before[256];
    snprintf(before, sizeof before, "%s", fsdp_last_error());
    write_and_read(g);
    assert_string_equal(fsdp_last_error(), before);
    assert_string_equal(g->file.status, "FSDP_ERR_ABORTED");
    assert_string_equal(g->file.error, "rank 0 aborted: for \"a\" reason");
    assert_int_equal(g->file.call[0].count, 5);
    rig_close(g);
}

static void refused(rig *g, const char *path, fsdp_status status, const char *words)
{
    assert_int_equal(fsdp_flight_write_json(g->ctx, path), status);
    if (strstr(fsdp_last_error(), words) == NULL) fail_msg("'%s' is not in: %s", words, fsdp_last_error());
}

static void a_file_is_written_whole_or_not_at_all(void **state)
{
    (void)state;
    rig *g = rig_open(NULL);
    char path[256];
    for (uint64_t i = 0; i < ALL; i++) enqueue(g, 1000);
    refused(g, "", FSDP_ERR_ARG, "path is empty");
    assert_int_equal(fsdp_flight_write_json(NULL, g->path), FSDP_ERR_ARG);
    assert_int_equal(fsdp_flight_write_json(g->ctx, NULL), FSDP_ERR_ARG);
    snprintf(path, sizeof path, "%s/no/such/file", g->folder);
    refused(g, path, FSDP_ERR_IO, "No such file or directory");
    refused(g, g->folder, FSDP_ERR_IO, "no regular file");
    refused(g, "/dev/full", FSDP_ERR_IO, "no regular file");
    write_and_read(g);
    struct stat whole, again;
    assert_int_equal(stat(g->path, &whole), 0);
    /* The disk is full after 10,000 bytes. SIGXFSZ would end this program. */
    struct rlimit all, some = {10000, 10000};
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &all), 0);
    some.rlim_max = all.rlim_max;
    assert_true(whole.st_size > 10000);
    enqueue(g, 1);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &some), 0);
    fsdp_status status = fsdp_flight_write_json(g->ctx, g->path);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &all), 0);
    assert_int_equal(status, FSDP_ERR_IO);
    assert_non_null(strstr(fsdp_last_error(), "File too large"));
    /* The old file is there as it was; rig_close sees that no part of the new one is left. */
    assert_int_equal(stat(g->path, &again), 0);
    assert_true(again.st_size == whole.st_size && again.st_ino == whole.st_ino);
    rig_close(g);
}

static int n_allocs_left = 1 << 30;
static void *counted_alloc(void *arg, size_t bytes, size_t alignment)
{
    (void)arg;
    return n_allocs_left-- > 0 ? aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment) : NULL;
}
static void counted_free(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    (void)arg, (void)bytes, (void)alignment;
    free(ptr);
}

static void without_host_memory_nothing_is_written_and_calls_are_recorded_all_the_same(void **state)
{
    (void)state;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = fsdp_sim_backend();
    config.host = (fsdp_host_allocator){counted_alloc, counted_free, NULL, NULL};
    rig *g = rig_open(&config);
    n_allocs_left = 0;
    for (uint64_t i = 0; i < 10 * ALL; i++) enqueue(g, i);
    refused(g, g->path, FSDP_ERR_NO_HOST_MEMORY, "no host memory to write");
    assert_int_equal(access(g->path, F_OK), -1);
    n_allocs_left = 1 << 30;
    write_and_read(g);
    assert_int_equal(g->file.n[0], 10 * ALL);
    rig_close(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_last_256_calls_are_kept_with_their_names),
        cmocka_unit_test(a_group_has_one_number_and_can_be_taken_back),
        cmocka_unit_test(the_hash_sees_every_difference_and_the_order),
        cmocka_unit_test(a_host_call_is_inside_until_it_ends),
        cmocka_unit_test(readers_see_whole_entries_while_one_writes),
        cmocka_unit_test(the_file_says_what_was_called_and_how_far_it_is),
        cmocka_unit_test(calls_on_a_stream_that_was_released_are_done),
        cmocka_unit_test(names_may_hold_anything),
        cmocka_unit_test(any_thread_may_write_it_while_another_waits),
        cmocka_unit_test(a_failed_context_is_written_with_its_sentence),
        cmocka_unit_test(a_file_is_written_whole_or_not_at_all),
        cmocka_unit_test(without_host_memory_nothing_is_written_and_calls_are_recorded_all_the_same),
    };
    alarm(300);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
