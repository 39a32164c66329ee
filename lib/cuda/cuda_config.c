/* SPDX-License-Identifier: MIT */
/* The CUDA backend's config, checked once for all three of its tables. */
#include "cuda_backend.h"
#include "host/host.h"
#include "launch.h"

static fsdp_status read_launch(const fsdp_cuda_config *config, fsdp__cuda_setup *out)
{
    fsdp_launch launch;
    FSDP_TRY(fsdp__launch_of_config("fsdp_cuda_config", config->launch, config->local != NULL, config->rank, &launch));
    if (launch.world > FSDP__MAX_WORLD)
        return fsdp__fail(FSDP_ERR_UNSUPPORTED, "fsdp_launch: a world of %u: at most %d ranks", launch.world,
                          FSDP__MAX_WORLD);
    out->rank = launch.rank;
    out->world = launch.world;
    return FSDP_OK;
}

fsdp_status fsdp__cuda_setup_read(const void *given, fsdp__cuda_setup *out_setup)
{
    fsdp__cuda_setup setup = {.config = FSDP_CUDA_CONFIG_INIT, .world = 1};
    fsdp_cuda_config *config = &setup.config;
    if (given != NULL) FSDP_TRY(fsdp__read_config("fsdp_cuda_config", config, sizeof *config, given, sizeof *config));
    if (config->device < -1)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_cuda_config.device is %d: a GPU's number, or -1 for the current one",
                          config->device);
    if (config->launch != NULL) {
        FSDP_TRY(read_launch(config, &setup));
        *out_setup = setup;
        return FSDP_OK;
    }
    if (config->side != NULL)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_cuda_config.side is set without launch: threads have their local's");
    if (config->local != NULL) setup.world = fsdp__local_world(config->local);
    setup.rank = config->rank;
    FSDP_TRY(fsdp__launch_thread("fsdp_cuda_config", config->local != NULL, setup.rank, setup.world));
    *out_setup = setup;
    return FSDP_OK;
}
