/* SPDX-License-Identifier: MIT */
/* The exploration device passes the conformance suites under every policy. The suites hold host calls at gates and meet
 * on threads of their own, so most of it runs with free threads; what has neither runs once more the way it is used. */
#include <stdio.h>

#include "comm_suite.h"
#include "explore.h"

static explore_config config; /* of the suites that run */
static explore *alone;

static const void *rank_config(void *storage, void *group, uint32_t rank, uint64_t jitter_ns, uint64_t jitter_seed)
{
    (void)jitter_ns; /* the order is shaken without */
    (void)jitter_seed;
    explore_rank *r = storage;
    *r = (explore_rank){sizeof *r, group, rank};
    return r;
}

static const void *alone_config(void *storage, uint64_t jitter_ns, uint64_t jitter_seed)
{
    return jitter_ns > 0 ? NULL : rank_config(storage, alone, 0, jitter_ns, jitter_seed);
}

static void *group_create(uint32_t world, const fsdp_link *link)
{
    explore_config c = config;
    c.world = world;
    if (link != NULL) {
        c.link_latency_ns = link->latency_ns;
        c.link_bytes_per_second = link->bytes_per_second;
    }
    explore *x = explore_open(&c);
    assert_non_null(x);
    return x;
}

static void group_destroy(void *group) { explore_close(group); }

/* How many tests failed; and the device has found nothing wrong with what they do. */
static int on_one_rank(int (*run)(const device_suite *suite))
{
    const device_suite suite = {.backend = explore_backend(), .config = alone_config};
    alone = explore_open(&config);
    if (alone == NULL) return 1;
    int failed = run(&suite);
    const char *complaint = explore_complaint(alone);
    if (complaint != NULL) fprintf(stderr, "complaint: %s\n", complaint);
    failed += complaint != NULL;
    explore_close(alone);
    return failed;
}

int main(void)
{
    const comm_suite comm = {explore_backend(), group_create, group_destroy, rank_config, false, false, 0, NULL};
    int failed = 0;
    for (explore_policy policy = EXPLORE_IN_ORDER; policy <= EXPLORE_SLOW_COMPUTE; policy++) {
        config = (explore_config){.world = 1, .policy = policy, .seed = 7, .depth = 3, .free_threads = true};
        failed += on_one_rank(run_device_suite) + run_comm_suite(&comm) + run_side_suite(&comm);
        /* These wait for deadlines, half a second and more each: two policies will do. */
        if (policy == EXPLORE_RANDOM || policy == EXPLORE_IN_ORDER) failed += run_comm_error_suite(&comm);
        config.free_threads = false;
        failed += on_one_rank(run_kernel_suite);
    }
    return failed > 0;
}
