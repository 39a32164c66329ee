/* SPDX-License-Identifier: MIT */
/* What went wrong, as one sentence for the person at the terminal. The first one is kept. */
#ifndef GPT_PROBLEM_H
#define GPT_PROBLEM_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

typedef struct problem {
    char text[512]; /* "" while all is well */
} problem;

/* Returns false, so that a function can fail with `return problem_set(…)`. */
__attribute__((format(printf, 2, 3))) static inline bool problem_set(problem *p, const char *format, ...)
{
    if (p->text[0] != '\0') return false;
    va_list args;
    va_start(args, format);
    vsnprintf(p->text, sizeof p->text, format, args);
    va_end(args);
    return false;
}

#endif
