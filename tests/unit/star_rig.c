/* SPDX-License-Identifier: MIT */
#include "star_rig.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hash.h"
#include "hostmem.h"

bool star_place_make(star_place *place, const char *address, uint32_t world)
{
    static int n_names;
    *place = (star_place){FSDP_LAUNCH_INIT, -1};
    fsdp_launch *l = &place->launch;
    l->world = world;
    l->nonce = STAR_NONCE;
    if (address[0] == '@') {
        snprintf(l->address, sizeof l->address, "@fsdp-test-%d-%d", (int)getpid(), n_names++);
        return true;
    }
    snprintf(l->address, sizeof l->address, "%s", address);
    struct sockaddr_in v4 = {.sin_family = AF_INET};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6};
    bool is_v6 = strchr(address, ':') != NULL;
    if (is_v6) inet_pton(AF_INET6, address, &v6.sin6_addr);
    else inet_pton(AF_INET, address, &v4.sin_addr);
    int fd = socket(is_v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct sockaddr *any = is_v6 ? (void *)&v6 : (void *)&v4;
    socklen_t bytes = is_v6 ? sizeof v6 : sizeof v4;
    if (fd < 0 || bind(fd, any, bytes) != 0 || listen(fd, 4096) != 0 || getsockname(fd, any, &bytes) != 0) {
        if (fd >= 0) close(fd);
        return false;
    }
    l->port = ntohs(is_v6 ? v6.sin6_port : v4.sin_port);
    place->listener = fd;
    return true;
}

void star_rank_init(star_rank *r, const star_place *place, uint32_t rank)
{
    memset(r, 0, sizeof *r);
    r->place = place;
    r->launch = place->launch;
    r->launch.rank = rank;
    r->rank = rank;
    r->world = place->launch.world;
    r->config = (fsdp__star_config){&r->launch, NULL, rank == 0 ? place->listener : -1};
    fsdp_host_allocator none = {NULL, NULL, NULL, NULL};
    assert_int_equal(fsdp__host_allocator_resolve(&none, &r->host), FSDP_OK);
    r->args = (fsdp_side_args){
        .size = sizeof r->args, .backend_config = &r->config, .host = &r->host, .timeout_ns = 50 * STAR_SECOND};
}

void star_rank_keep(star_rank *r, fsdp_status status)
{
    r->status = status;
    snprintf(r->sentence, sizeof r->sentence, "%s", status == FSDP_OK ? "" : fsdp_last_error());
}

fsdp_status star_rank_open(star_rank *r)
{
    uint32_t rank = 0, world = 0;
    star_rank_keep(r, fsdp__star_side_ops.open(&r->args, &r->side, &rank, &world));
    if (r->status == FSDP_OK && (rank != r->rank || world != r->world)) r->check_failed = true;
    return r->status;
}

void star_rank_close(star_rank *r)
{
    if (r->side != NULL) fsdp__star_side_ops.close(r->side);
    r->side = NULL;
}

fsdp_status star_rank_gather(star_rank *r, void *all, size_t bytes, uint64_t timeout_ns)
{
    unsigned char mine[4096];
    memset(mine, (int)(r->rank + 1), sizeof mine);
    return fsdp__star_side_ops.all_gather(r->side, mine, all, bytes, timeout_ns);
}

/* ---- Threads ---- */

typedef struct job {
    star_rank *rank;
    star_body body;
} job;

static void *job_main(void *arg)
{
    job *j = arg;
    j->body(j->rank);
    return NULL;
}

void star_run(star_rank *ranks, uint32_t n, star_body body)
{
    pthread_t *threads = calloc(n, sizeof *threads);
    job *jobs = calloc(n, sizeof *jobs);
    pthread_attr_t attributes;
    assert_true(threads != NULL && jobs != NULL);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 512 * 1024);
    for (uint32_t i = 0; i < n; i++) {
        jobs[i] = (job){&ranks[i], body};
        assert_int_equal(pthread_create(&threads[i], &attributes, job_main, &jobs[i]), 0);
    }
    bool failed = false;
    for (uint32_t i = 0; i < n; i++) {
        pthread_join(threads[i], NULL);
        failed = failed || ranks[i].check_failed;
    }
    pthread_attr_destroy(&attributes);
    free(threads);
    free(jobs);
    assert_false(failed);
}

typedef struct opened {
    star_body body;
    void *arg;
} opened;

static void open_body_close(star_rank *r)
{
    const opened *o = r->arg;
    r->arg = o->arg;
    CHECK(star_rank_open(r) == FSDP_OK);
    o->body(r);
    star_rank_close(r);
}

void star_run_open(const star_place *place, star_rank *ranks, star_body body, void *arg)
{
    opened o = {body, arg};
    for (uint32_t i = 0; i < place->launch.world; i++) {
        star_rank_init(&ranks[i], place, i);
        ranks[i].arg = &o;
    }
    star_run(ranks, place->launch.world, open_body_close);
}

/* ---- Raw connections ---- */

int star_knock(const star_place *place)
{
    char why[160];
    uint64_t until_ns = fsdp__now_ns() + 10 * STAR_SECOND;
    for (;;) {
        int fd = fsdp__place_connect(&place->launch, until_ns, why, sizeof why);
        if (fd >= 0 || fsdp__now_ns() >= until_ns) return fd;
        usleep(1000);
    }
}

void star_hello(unsigned char hello[FSDP__HELLO_BYTES], uint64_t nonce, uint32_t version, uint32_t world, uint32_t rank)
{
    memset(hello, 0, FSDP__HELLO_BYTES);
    memcpy(hello, FSDP__HELLO_MAGIC, 8);
    fsdp__put_u64(hello + 8, nonce);
    fsdp__put_u32(hello + 16, version);
    fsdp__put_u32(hello + 20, world);
    fsdp__put_u32(hello + 24, rank);
}

void star_say(int fd, const void *text, size_t bytes)
{
    const char *at = text;
    while (bytes > 0 && fsdp__wait_for(fd, POLLOUT, fsdp__now_ns() + 10 * STAR_SECOND)) {
        ssize_t n = send(fd, at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno != EAGAIN && errno != EINTR) return;
        if (n > 0) at += n, bytes -= (size_t)n;
    }
}

size_t star_hear_all(int fd, void *text, size_t bytes)
{
    size_t have = 0;
    char rest[512];
    while (fsdp__wait_for(fd, POLLIN, fsdp__now_ns() + 20 * STAR_SECOND)) {
        ssize_t n = recv(fd, have < bytes ? (char *)text + have : rest, have < bytes ? bytes - have : sizeof rest,
                         MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (n <= 0) return have;
        if (have < bytes) have += (size_t)n;
    }
    return (size_t)-1; /* it neither spoke nor ended */
}

bool star_hear(int fd, void *text, size_t bytes)
{
    size_t have = 0;
    while (have < bytes && fsdp__wait_for(fd, POLLIN, fsdp__now_ns() + 20 * STAR_SECOND)) {
        ssize_t n = recv(fd, (char *)text + have, bytes - have, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (n <= 0) return false;
        have += (size_t)n;
    }
    return have == bytes;
}

/* ---- What is left ---- */

static int count_entries(const char *folder)
{
    int n = 0;
    DIR *dir = opendir(folder);
    while (dir != NULL && readdir(dir) != NULL) n++;
    if (dir != NULL) closedir(dir);
    return n;
}

int star_count_fds(void) { return count_entries("/proc/self/fd"); }
int star_count_threads(void) { return count_entries("/proc/self/task"); }

uint64_t star_random(uint64_t *state) { return *state = fsdp__mix(*state + 1); }

int star_deadline(void **state)
{
    (void)state;
    alarm(100);
    return 0;
}
