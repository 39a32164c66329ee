/* SPDX-License-Identifier: MIT */
/* Which version this is, for who cannot read the macros, or reads those of other headers. */
#include "fsdp/fsdp.h"

uint32_t fsdp_version(void) { return FSDP_VERSION; }
