/* SPDX-License-Identifier: MIT */
#include "launch_rig.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* ---- An environment in one line ---- */

enum { MOST = 32 };

typedef struct variables {
    char text[2048];
    char *name[MOST], *value[MOST];
    int n;
    const char *proxy; /* what /proc says of MPICH's proxy, "" of none */
} variables;

/* "RANK=1 WORLD_SIZE=4"; no value has a space. */
static void parse(variables *v, const char *line, const char *proxy)
{
    v->n = 0;
    v->proxy = proxy;
    assert_true(strlen(line) < sizeof v->text);
    memcpy(v->text, line, strlen(line) + 1);
    char *rest = NULL;
    for (char *word = strtok_r(v->text, " ", &rest); word != NULL; word = strtok_r(NULL, " ", &rest)) {
        char *equals = strchr(word, '=');
        assert_true(equals != NULL && v->n < MOST);
        *equals = '\0';
        v->name[v->n] = word;
        v->value[v->n++] = equals + 1;
    }
}

static const char *get(void *arg, const char *name)
{
    const variables *v = arg;
    for (int i = 0; i < v->n; i++) {
        if (strcmp(v->name[i], name) == 0) return v->value[i];
    }
    return NULL;
}

static void hydra(void *arg, bool one_machine, char *text, size_t bytes)
{
    const variables *v = arg;
    snprintf(text, bytes, "%s%s", v->proxy, one_machine && v->proxy[0] != '\0' ? " here" : "");
}

fsdp_status read_line(const char *line, const char *proxy, fsdp_launch *launch)
{
    variables v;
    parse(&v, line, proxy);
    fsdp__launch_env env = {get, hydra, &v, 7};
    return fsdp__launch_read(&env, launch);
}

uint64_t nonce_of(const char *line)
{
    fsdp_launch launch = FSDP_LAUNCH_INIT;
    assert_int_equal(read_line(line, "77 1234 host:5", &launch), FSDP_OK);
    return launch.nonce;
}

/* "torchrun 1 of 4, here 1 of 4, at host:29501", or the sentence. The nonce in "@fsdp-7-<nonce>" is shown as NONCE, once it is
 * found to be the launch's; a port that is made of a Slurm job's numbers as PORT. */
static void describe(const char *line, char *text, size_t bytes)
{
    fsdp_launch launch, before;
    memset(&launch, 0x5a, sizeof launch);
    memcpy(&before, &launch, sizeof launch);
    if (read_line(line, "77 1234 host:5", &launch) != FSDP_OK) {
        assert_memory_equal(&launch, &before, sizeof launch);
        snprintf(text, bytes, "%s", fsdp_last_error());
        return;
    }
    assert_int_equal(launch.size, sizeof launch);
    char own[64], port[16];
    bool derived = strncmp(launch.address, "node", 4) == 0 && launch.port >= 20000 && launch.port <= 29999;
    snprintf(port, sizeof port, derived ? "PORT" : "%u", launch.port);
    snprintf(own, sizeof own, "@fsdp-7-%016" PRIx64, launch.nonce);
    snprintf(text, bytes, "%s %u of %u, here %u of %u, at %s:%s", fsdp_launcher_name(launch.launcher), launch.rank,
             launch.world, launch.local_rank, launch.local_world,
             strcmp(launch.address, own) == 0 ? "@fsdp-7-NONCE" : launch.address, port);
}

void check_rows(const row *rows, size_t n)
{
    size_t wrong = 0;
    for (size_t i = 0; i < n; i++) {
        char text[4096];
        describe(rows[i].line, text, sizeof text);
        if (strcmp(text, rows[i].expected) == 0) continue;
        print_error("%s\n  is       %s\n  expected %s\n", rows[i].line, text, rows[i].expected);
        wrong++;
    }
    assert_int_equal(wrong, 0);
}
