/* SPDX-License-Identifier: MIT */
/* Schedules for tests: passes are written as words. */
#ifndef SCHEDULE_WORDS_H
#define SCHEDULE_WORDS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "hostmem.h"
#include "schedule.h"

enum { MAX_UNITS = 128, MAX_VISITS = 256 };

/* A schedule and its passes, which are written as words: a letter is a visit of the unit of that name, capitals are held; a
 * digit behind it says how many of the visits that follow begin inside its window. "H2ab" is an EVAL pass. */
typedef struct plan {
    fsdp__schedule schedule;
    uint64_t bytes[MAX_UNITS];
    uint8_t held[MAX_UNITS];
    char letter[MAX_UNITS + 1];
    uint32_t n_units;
    fsdp__visit pass[MAX_VISITS], next[MAX_VISITS];
    fsdp__cursor cursor;
    fsdp__life life[MAX_VISITS];
    uint32_t life_unit[MAX_VISITS];
    int32_t visit_life[MAX_VISITS];
    fsdp__lives lives;
} plan;

static inline uint32_t unit_of(plan *p, char letter)
{
    const char *at = strchr(p->letter, letter);
    if (at != NULL) return (uint32_t)(at - p->letter);
    assert_in_range(p->n_units, 0, MAX_UNITS - 1);
    p->letter[p->n_units] = letter;
    p->held[p->n_units] = letter >= 'A' && letter <= 'Z';
    p->bytes[p->n_units] = 100;
    return p->n_units++;
}

static inline fsdp__visit_list read_pass(plan *p, fsdp__visit *visits, const char *text)
{
    uint32_t n = 0;
    for (; *text != '\0'; text++) {
        if (*text >= '0' && *text <= '9') {
            visits[n - 1].until += (uint32_t)(*text - '0');
        } else if (*text != ' ') {
            assert_in_range(n, 0, MAX_VISITS - 1);
            visits[n] = (fsdp__visit){unit_of(p, *text), n};
            n++;
        }
    }
    return (fsdp__visit_list){visits, n};
}

static inline void init_plan(plan *p, uint32_t depth, const char *pass, const char *next)
{
    memset(p, 0, sizeof *p);
    p->schedule = (fsdp__schedule){depth, 0, p->bytes, p->held};
    p->cursor.pass = read_pass(p, p->pass, pass);
    p->cursor.next = read_pass(p, p->next, next);
    p->lives = (fsdp__lives){p->life, p->life_unit, p->visit_life, 0};
}

static inline void make_lives(plan *p)
{
    memset(p->life, 0xff, sizeof p->life);
    memset(p->visit_life, 0x77, sizeof p->visit_life);
    fsdp_host_allocator host, libc = {NULL, NULL, NULL, NULL};
    assert_int_equal(fsdp__host_allocator_resolve(&libc, &host), FSDP_OK);
    p->cursor.at = 0;
    assert_int_equal(fsdp__schedule_lives(&host, &p->schedule, &p->cursor, p->n_units, &p->lives), FSDP_OK);
    assert_in_range(p->lives.n, 0, p->cursor.pass.n);
}

#endif
