/* SPDX-License-Identifier: MIT */
/* The current device of a thread that calls the library for another GPU: two of them are needed. */
#include <stdio.h>

#include "fsdp/fsdp.h"
#include "gpu_ranks.h"
#include "gpu_suites.h"
#include "ok.h"

enum { OTHER, OURS };

static bool is_used(int ordinal)
{
    fsdp__cuda_driver driver;
    fsdp__cuda_driver_find(&driver);
    assert_non_null(driver.context_state);
    return fsdp__cuda_is_used(&driver, ordinal);
}

/* A context on OURS lives, and does a little of everything that makes it current. */
static void live_on_ours(void)
{
    fsdp_cuda_config cuda = FSDP_CUDA_CONFIG_INIT;
    fsdp_config config = FSDP_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    fsdp_stream *s = NULL;
    fsdp_event *event = NULL;
    cuda.device = OURS;
    config.backend = fsdp_cuda_backend();
    config.backend_config = &cuda;
    OK(fsdp_context_create(&config, &ctx));
    assert_int_equal(fsdp_cuda_device(ctx), OURS);
    OK(fsdp_stream_create(ctx, "s", &s));
    OK(fsdp_event_create(ctx, &event));
    OK(fsdp_stream_delay(s, 1000));
    OK(fsdp_event_record(event, s));
    OK(fsdp_event_wait_host(event, UINT64_MAX));
    fsdp_event_destroy(event);
    OK(fsdp_stream_release(s));
    OK(fsdp_context_destroy(ctx));
}

static int current_device(void)
{
    int current = -1;
    CUDA(cudaGetDevice(&current));
    return current;
}

/* Before any other: this process has not used CUDA. */
static void a_gpu_that_nobody_has_used_gets_no_context(void **unused)
{
    (void)unused;
    assert_int_equal(current_device(), OTHER);
    assert_false(is_used(OTHER));
    live_on_ours();
    assert_true(is_used(OURS));
    assert_false(is_used(OTHER));
    assert_int_equal(current_device(), OURS);
}

static void a_gpu_that_was_set_stays_current(void **unused)
{
    (void)unused;
    CUDA(cudaSetDevice(OTHER));
    live_on_ours();
    assert_int_equal(current_device(), OTHER);
    assert_true(is_used(OTHER));
}

int main(void)
{
    int n = 0;
    if (gpu_is_missing_here("test_gpu_current")) return 77;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n < 2) {
        printf("test_gpu_current is skipped: fewer than two GPUs\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_gpu_that_nobody_has_used_gets_no_context),
        cmocka_unit_test(a_gpu_that_was_set_stays_current),
    };
    return cmocka_run_group_tests_name("current device", tests, NULL, NULL) > 0;
}
