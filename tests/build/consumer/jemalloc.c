/* SPDX-License-Identifier: MIT */
/* A program with both arenas of fsdp::jemalloc. */
#include <stdio.h>

#include <fsdp/fsdp.h>
#include <fsdp/jemalloc.h>

int main(void)
{
    fsdp_config config = FSDP_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    void *piece = NULL;
    if (fsdp_jemalloc_host_create(&config.host) != FSDP_OK) {
        fprintf(stderr, "consumer: %s\n", fsdp_jemalloc_last_error());
        return 1;
    }
    config.pinned = fsdp_jemalloc_pinned();
    if (fsdp_context_create(&config, &ctx) != FSDP_OK || fsdp_pinned_alloc(ctx, 100, &piece) != FSDP_OK ||
        fsdp_pinned_free(ctx, piece) != FSDP_OK || fsdp_context_destroy(ctx) != FSDP_OK) {
        fprintf(stderr, "consumer: %s\n", fsdp_last_error());
        return 1;
    }
    if (fsdp_jemalloc_host_destroy(&config.host) != FSDP_OK) {
        fprintf(stderr, "consumer: %s\n", fsdp_jemalloc_last_error());
        return 1;
    }
    puts("jemalloc");
    return 0;
}
