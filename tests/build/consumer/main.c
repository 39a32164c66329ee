/* SPDX-License-Identifier: MIT */
/* The smallest program that uses the library from outside: it opens and closes a context. */
#include <stdio.h>

#include <fsdp/fsdp.h>

int main(void)
{
    fsdp_config config = FSDP_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    if (fsdp_context_create(&config, &ctx) != FSDP_OK || fsdp_context_world(ctx) != 1 ||
        fsdp_context_destroy(ctx) != FSDP_OK) {
        fprintf(stderr, "consumer: %s\n", fsdp_last_error());
        return 1;
    }
    printf("fsdp %d.%d.%d\n", FSDP_VERSION_MAJOR, FSDP_VERSION_MINOR, FSDP_VERSION_PATCH);
    return 0;
}
