/* SPDX-License-Identifier: MIT */
/* Slurm's compressed lists. */
#include <string.h>

#include "launch.h"

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

/* Digits at *at as a number; *at moves behind them. */
static bool take_number(const char **at, uint64_t *out)
{
    if (!is_digit(**at)) return false;
    uint64_t n = 0;
    for (; is_digit(**at); (*at)++) {
        n = n * 10 + (uint64_t)(**at - '0');
        if (n > UINT32_MAX) return false;
    }
    *out = n;
    return true;
}

/* "[01-04,07]" at *at, whose first number, with its zeros, is returned; *at moves behind it. */
static bool take_bracket(const char **at, const char **first, size_t *length)
{
    bool any = false;
    (*at)++;
    do {
        uint64_t low = 0, high = 0;
        const char *start = *at;
        if (!take_number(at, &low)) return false;
        if (!any) *first = start, *length = (size_t)(*at - start);
        any = true;
        high = low;
        if (**at == '-') {
            (*at)++;
            if (!take_number(at, &high) || high < low) return false;
        }
    } while (**at == ',' && (*at)++ != NULL);
    return *(*at)++ == ']';
}

/* One host of the list, brackets and all, as the first of those it stands for; host NULL: only moves on. */
static bool take_host(const char **at, char *host, size_t bytes)
{
    size_t used = 0;
    while (**at != '\0' && **at != ',') {
        const char *piece = *at;
        size_t length = 1;
        if (*piece == '[') {
            if (!take_bracket(at, &piece, &length)) return false;
        } else {
            if (*piece == ']' || *piece == ' ') return false;
            (*at)++;
        }
        if (host != NULL && used + length >= bytes) return false;
        if (host != NULL) memcpy(host + used, piece, length);
        used += length;
    }
    if (host != NULL) host[used] = '\0';
    return used > 0;
}

bool fsdp__slurm_first_host(const char *list, char *host, size_t bytes)
{
    if (!take_host(&list, host, bytes)) return false;
    while (*list == ',') {
        list++;
        if (!take_host(&list, NULL, 0)) return false;
    }
    return *list == '\0';
}

bool fsdp__slurm_tasks(const char *counts, uint32_t node, uint32_t *out_here, uint64_t *out_all)
{
    uint64_t nodes = 0, all = 0;
    bool found = false;
    for (const char *at = counts;; at++) {
        uint64_t tasks = 0, times = 1;
        if (!take_number(&at, &tasks)) return false;
        if (*at == '(') {
            if (*++at != 'x') return false;
            at++;
            if (!take_number(&at, &times) || *at++ != ')') return false;
        }
        if (node >= nodes && node < nodes + times) {
            *out_here = (uint32_t)tasks;
            found = true;
        }
        nodes += times;
        if (nodes > UINT32_MAX) return false;
        all += tasks * times;
        if (all > UINT32_MAX) return false;
        if (*at == '\0') break;
        if (*at != ',') return false;
    }
    *out_all = all;
    return found;
}
