/* SPDX-License-Identifier: MIT */
/* Bad input, file by file: each call is refused with the right status and a sentence that names what and says what to do,
 * nothing has changed by it, and the program goes on. docs/errors.md is the list. */
#include "errors.h"

int main(void)
{
    int failed = run_argument_errors();
    failed += run_model_argument_errors();
    failed += run_state_errors();
    failed += run_rank_errors(false);
    failed += run_rank_errors(true);
    failed += run_memory_errors();
    return failed > 0;
}
