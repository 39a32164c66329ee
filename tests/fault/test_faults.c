/* SPDX-License-Identifier: MIT */
/* Whatever goes wrong between ranks that are processes ends in a sentence, on every other rank, and leaves nothing behind. */
#include "fault_rig.h"

int main(void)
{
    int failed = run_kill_faults();
    failed += run_order_faults();
    failed += run_memory_faults();
    failed += run_job_faults();
    return failed > 0;
}
