/* SPDX-License-Identifier: MIT */
/* The host backend's config, checked once for all three of its tables. */
#include "check.h"
#include "host.h"
#include "launch.h"

static fsdp_status read_launch(const fsdp_host_config *config, fsdp__host_setup *out)
{
    fsdp_launch launch;
    FSDP_TRY(fsdp__launch_of_config("fsdp_host_config", config->launch, config->local != NULL, config->rank, &launch));
    if (launch.world > FSDP__ROOM_WORLD)
        return fsdp__fail(FSDP_ERR_UNSUPPORTED,
                          "fsdp_launch: a world of %u: the host backend's shared memory takes %d ranks of one machine",
                          launch.world, FSDP__ROOM_WORLD);
    out->rank = launch.rank;
    out->world = launch.world;
    out->processes = launch.world > 1;
    if (config->link != NULL) out->link = *config->link;
    return FSDP_OK;
}

fsdp_status fsdp__host_setup_read(const void *given, fsdp__host_setup *out_setup)
{
    fsdp__host_setup setup = {.config = FSDP_HOST_CONFIG_INIT, .world = 1};
    fsdp_host_config *config = &setup.config;
    if (given != NULL) FSDP_TRY(fsdp__read_config("fsdp_host_config", config, sizeof *config, given, sizeof *config));
    if (config->launch != NULL) {
        FSDP_TRY(read_launch(config, &setup));
        *out_setup = setup;
        return FSDP_OK;
    }
    if (config->side != NULL || config->link != NULL)
        return fsdp__fail(FSDP_ERR_ARG,
                          "fsdp_host_config.%s is set without launch: threads have their local's; or is it no "
                          "fsdp_host_config: is fsdp_config.backend the one that it belongs to?",
                          config->side != NULL ? "side" : "link");
    if (config->local != NULL) {
        setup.world = fsdp__local_world(config->local);
        setup.link = fsdp__local_link(config->local);
    }
    setup.rank = config->rank;
    FSDP_TRY(fsdp__launch_thread("fsdp_host_config", config->local != NULL, setup.rank, setup.world));
    *out_setup = setup;
    return FSDP_OK;
}
