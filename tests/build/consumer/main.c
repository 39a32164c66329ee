/* SPDX-License-Identifier: MIT */
/* The smallest program that uses the library from outside: it opens and closes a context of the library that its headers are
 * of. */
#include <stdio.h>

#include <fsdp/fsdp.h>

int main(void)
{
    uint32_t parts[] = {fsdp_version() / 10000, fsdp_version() / 100 % 100, fsdp_version() % 100};
    if (parts[0] != FSDP_VERSION_MAJOR || parts[1] != FSDP_VERSION_MINOR || parts[2] != FSDP_VERSION_PATCH) {
        fprintf(stderr, "consumer: version %u.%u.%u, and other headers\n", parts[0], parts[1], parts[2]);
        return 1;
    }
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
