/* SPDX-License-Identifier: MIT */
/* fsdp_memory_write_json: a file is either the whole snapshot or what was there before, and host memory that runs out is an
 * error. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "scarce.h"
#include "snapshot_rig.h"

/* ---- Host memory ---- */

static void scarce_stats(void *arg, fsdp_arena_stats *out_stats)
{
    (void)arg;
    out_stats->allocated_bytes = 101;
    out_stats->active_bytes = 102;
    out_stats->mapped_bytes = 103;
}

static void without_host_memory_nothing_is_written_and_nothing_is_kept(void **state)
{
    bench *b = *state;
    close_context(b);
    scarce memory = {1000000, 0};
    const fsdp_host_allocator host = {scarce_alloc, scarce_free, &memory, scarce_stats};
    open_context(b, &host);
    open_pool(b, "pool", 0, 64);
    void *ptr = take(b, 256, b->a, "x");
    size_t live = memory.live;
    int n = 0;
    for (fsdp_status status = FSDP_ERR_NO_HOST_MEMORY; status != FSDP_OK; n++) {
        assert_true(n < 100);
        assert_int_not_equal(access(b->path, F_OK), 0);
        memory.left = n;
        status = fsdp_memory_write_json(b->ctx, b->path);
        if (status != FSDP_OK) assert_non_null(strstr(fsdp_last_error(), "no host memory for a memory snapshot"));
        assert_true(status == FSDP_OK || status == FSDP_ERR_NO_HOST_MEMORY);
        assert_int_equal(memory.live, live);
    }
    assert_true(n > 3);
    memory.left = 1000000;
    const fsdp__snapshot *s = snapshot(b);
    assert_string_equal(s->arenas[0].name, "host");
    assert_int_equal(s->arenas[0].allocated, 101);
    assert_int_equal(s->arenas[0].active, 102);
    assert_int_equal(s->arenas[0].mapped, 103);
    OK(fsdp_allocator_free(b->pool, ptr));
    close_context(b); /* host is gone when this returns */
    open_context(b, NULL);
}

static void pinned_pieces_are_in_the_totals(void **state)
{
    bench *b = *state;
    void *piece = NULL;
    uint64_t before = snapshot(b)->pinned_bytes;
    OK(fsdp_pinned_alloc(b->ctx, 8192, &piece));
    const fsdp__snapshot *s = snapshot(b);
    assert_int_equal(s->pinned_bytes, before + 8192);
    assert_int_equal(s->n_arenas, 1);
    assert_string_equal(s->arenas[0].name, "pinned");
    assert_int_equal(s->arenas[0].allocated, before + 8192);
    OK(fsdp_pinned_free(b->ctx, piece));
    assert_int_equal(snapshot(b)->pinned_bytes, before);
}

/* ---- The file ---- */

static void refuse(bench *b, const char *path, fsdp_status status, const char *words)
{
    assert_int_equal(fsdp_memory_write_json(b->ctx, path), status);
    if (strstr(fsdp_last_error(), words) == NULL) fail_msg("expected \"%s\" in \"%s\"", words, fsdp_last_error());
}

static void a_file_that_cannot_be_written_is_an_error_and_stays_as_it_was(void **state)
{
    bench *b = *state;
    char beside[128], got[16] = "";
    snprintf(beside, sizeof beside, "%s.tmp0", b->path);
    refuse(b, NULL, FSDP_ERR_ARG, "path is NULL");
    refuse(b, "", FSDP_ERR_ARG, "path is empty");
    refuse(b, "/no such folder/x.json", FSDP_ERR_IO,
           "cannot open /no such folder/x.json.tmp0: No such file or directory");
    refuse(b, b->folder, FSDP_ERR_IO, "it is there and no regular file");
    refuse(b, "/dev/null", FSDP_ERR_IO, "cannot write /dev/null: it is there and no regular file");

    FILE *old = fopen(b->path, "w");
    assert_non_null(old);
    fputs("old", old);
    fclose(old);
    struct rlimit limit, few = {100, RLIM_INFINITY};
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    few.rlim_max = limit.rlim_max;
    sigset_t pending, blocked; /* SIGXFSZ would end this program */
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &few), 0);
    fsdp_status status = fsdp_memory_write_json(b->ctx, b->path);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    assert_int_equal(status, FSDP_ERR_IO);
    assert_non_null(strstr(fsdp_last_error(), "/memory.json: File too large"));
    assert_int_equal(sigpending(&pending), 0);
    assert_int_equal(pthread_sigmask(SIG_SETMASK, NULL, &blocked), 0);
    assert_true(!sigismember(&pending, SIGXFSZ) && !sigismember(&blocked, SIGXFSZ));
    assert_int_not_equal(access(beside, F_OK), 0);
    old = fopen(b->path, "r");
    assert_non_null(fgets(got, sizeof got, old));
    fclose(old);
    assert_string_equal(got, "old");
}

/* /dev/stdout is one, and may lead to a file. */
static void a_link_is_neither_followed_nor_replaced(void **state)
{
    bench *b = *state;
    char target[128], got[16] = "";
    struct stat there;
    snprintf(target, sizeof target, "%s.target", b->path);
    FILE *file = fopen(target, "w");
    assert_non_null(file);
    fputs("mine", file);
    fclose(file);
    assert_int_equal(symlink(target, b->path), 0);
    refuse(b, b->path, FSDP_ERR_IO, "it is there and no regular file");
    assert_int_equal(lstat(b->path, &there), 0);
    assert_true(S_ISLNK(there.st_mode));
    file = fopen(target, "r");
    assert_non_null(fgets(got, sizeof got, file));
    fclose(file);
    assert_string_equal(got, "mine");
    unlink(b->path);
    unlink(target);
}

/* Somebody's file of that name is left alone. */
static void a_name_beside_the_file_that_is_taken_is_not_used(void **state)
{
    bench *b = *state;
    char beside[128], next[128], got[16] = "";
    snprintf(beside, sizeof beside, "%s.tmp0", b->path);
    snprintf(next, sizeof next, "%s.tmp1", b->path);
    FILE *file = fopen(beside, "w");
    assert_non_null(file);
    fputs("mine", file);
    fclose(file);
    snapshot(b);
    file = fopen(beside, "r");
    assert_non_null(file);
    assert_non_null(fgets(got, sizeof got, file));
    fclose(file);
    assert_string_equal(got, "mine");
    assert_int_not_equal(access(next, F_OK), 0);
    unlink(beside);
    mode_t mask = umask(022);
    umask(mask);
    struct stat there;
    assert_int_equal(stat(b->path, &there), 0);
    assert_int_equal(there.st_mode & 0777, 0666 & ~mask);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(without_host_memory_nothing_is_written_and_nothing_is_kept),
        TEST(pinned_pieces_are_in_the_totals),
        TEST(a_file_that_cannot_be_written_is_an_error_and_stays_as_it_was),
        TEST(a_link_is_neither_followed_nor_replaced),
        TEST(a_name_beside_the_file_that_is_taken_is_not_used),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
