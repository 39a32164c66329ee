/* SPDX-License-Identifier: MIT */
/* A rank runs out of memory, at seal and in a step. */
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "fault_rig.h"

enum { BIG_ROWS = 1 << 16 }; /* of 7 fp32: a unit of 1.8 MB, and six times that with moments and buffers */

static bool limit_address_space(uint64_t more_bytes)
{
    unsigned long long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%llu", &pages) != 1) return false;
    fclose(file);
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) != 0) return false;
    limit.rlim_cur = more_bytes == UINT64_MAX ? limit.rlim_max : pages * 4096 + more_bytes;
    return setrlimit(RLIMIT_AS, &limit) == 0;
}

/* The victim's memory ends; nothing has changed by that, and with more memory all go on. */
static void seal_with_one_in_poverty(rank *r)
{
    uint64_t hash = 0;
    r->recipe.dims[2][0][0] = BIG_ROWS * 8;
    EXPECT_OK(r, open_context(r));
    EXPECT_OK(r, register_model(r));
    if (is_victim(r)) EXPECT(r, limit_address_space(1 << 20));
    crew_keep(r, fsdp_model_seal(r->model));
    if (is_victim(r)) EXPECT(r, limit_address_space(UINT64_MAX));
    EXPECT_OK(r, fsdp_context_check(r->ctx));
    EXPECT_OK(r, fsdp_model_seal(r->model));
    EXPECT_OK(r, fill_model(r));
    EXPECT_OK(r, step_to_end(r));
    EXPECT_OK(r, hash_model(r, &hash));
    close_all(r);
}

static void a_rank_without_memory_at_seal_is_named_and_can_try_again(void **state)
{
    (void)state;
    if (ERRORS_REDUCED) skip(); /* sanitizers map terabytes */
    for (uint32_t victim = 0; victim < WORLD; victim += 3) {
        char sentence[80];
        crew *c = crew_create(WORLD, PROCESSES_BY_NAME);
        c->victim = victim;
        crew_run(c, seal_with_one_in_poverty, 0, NULL);
        printf("    no memory at seal: %s\n", c->rank[!victim].said);
        snprintf(sentence, sizeof sentence, "fsdp_model_seal failed on rank %u, so on every rank: ", victim);
        assert_others_kept(c, c->rank[victim].status, sentence);
        assert_true(c->rank[victim].status == FSDP_ERR_NO_MEMORY || c->rank[victim].status == FSDP_ERR_NO_HOST_MEMORY);
        crew_destroy(c);
    }
}

/* Its host memory ends at the n-th allocation of a step, n = 0, 1, … until a step needs no more. What a program does that is
 * refused something in the middle of a step: it tells the others, and all give up. */
static void step_with_one_in_poverty(rank *r)
{
    crew *c = crew_of(r);
    meter m;
    meter_init(&m);
    r->meter = &m;
    EXPECT_OK(r, open_all(r));
    (void)meeting_wait(r->meet, 60 * second_ns);
    if (is_victim(r)) meter_fail_after(&m, c->phase, true);
    fsdp_status status = step_to_end(r);
    if (is_victim(r)) {
        mark_set(&c->victim_mark, m.failed);
        meter_fail_after(&m, -1, false);
        EXPECT(r, status == FSDP_OK || status == FSDP_ERR_NO_HOST_MEMORY);
    }
    if (status == FSDP_OK) status = fsdp_barrier_host(r->ctx);
    crew_keep(r, status);
    if (is_victim(r) && status != FSDP_OK) fsdp_context_abort(r->ctx, r->said);
    close_all(r);
    EXPECT(r, m.live_bytes == 0);
}

static void a_rank_without_memory_in_a_step_tells_the_others(void **state)
{
    (void)state;
    int n = 0, n_refused = 0;
    bool enough = false;
    for (; n < 200 && !enough; n++) {
        crew *c = crew_create(3, PROCESSES_BY_NAME);
        c->victim = 1;
        c->phase = n;
        crew_run(c, step_with_one_in_poverty, 0, NULL);
        enough = atomic_load(&c->victim_mark.value) == 0;
        bool refused = c->rank[1].status != FSDP_OK;
        assert_true(!enough || !refused);
        if (refused) assert_others_kept(c, FSDP_ERR_ABORTED, "rank 1 aborted: ");
        assert_others_kept(c, refused ? FSDP_ERR_ABORTED : FSDP_OK, refused ? "no host memory" : "");
        if (refused && n_refused++ == 0) printf("    no memory in a step: %s\n", c->rank[0].said);
        crew_destroy(c);
    }
    printf("    %d host allocations in a step, %d of them needed\n", n - 1, n_refused);
    assert_true(enough && n_refused > 0);
}

int run_memory_faults(void)
{
    const struct CMUnitTest tests[] = {
        FAULT(a_rank_without_memory_at_seal_is_named_and_can_try_again),
        FAULT(a_rank_without_memory_in_a_step_tells_the_others),
    };
    return cmocka_run_group_tests_name("out of memory", tests, NULL, NULL);
}
