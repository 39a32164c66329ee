/* SPDX-License-Identifier: MIT */
/* What ranks as processes share with each other and the test: memory, barriers, a side channel, an address. */
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "fsdp/backend.h"
#include "processes.h"

enum { SECOND_NS = 1000000000, LATEST_S = 600 };

/* Of the leak sanitizer, where there is one: it looks for pointers in here as well. */
extern void __lsan_register_root_region(const void *begin, size_t bytes) __attribute__((weak));
extern void __lsan_unregister_root_region(const void *begin, size_t bytes) __attribute__((weak));

static _Noreturn void die(const char *what)
{
    fprintf(stderr, "processes: %s: %s\n", what, strerror(errno));
    abort();
}

/* ---- Shared memory ---- */

void *processes_shared(size_t bytes)
{
    void *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) die("mmap");
    if (__lsan_register_root_region != NULL) __lsan_register_root_region(shared, bytes);
    return shared;
}

void processes_unshare(void *shared, size_t bytes)
{
    if (shared == NULL) return;
    if (__lsan_unregister_root_region != NULL) __lsan_unregister_root_region(shared, bytes);
    munmap(shared, bytes);
}

/* False: the deadline has passed. */
static bool futex_wait(_Atomic uint32_t *word, uint32_t value, uint64_t deadline_ns)
{
    uint64_t now = fsdp__now_ns();
    if (now >= deadline_ns) return false;
    uint64_t ns =
        deadline_ns - now < LATEST_S * (uint64_t)SECOND_NS ? deadline_ns - now : LATEST_S * (uint64_t)SECOND_NS;
    const struct timespec timeout = fsdp__timespec(ns);
    syscall(SYS_futex, word, FUTEX_WAIT, value, &timeout, NULL, 0);
    return true;
}

static void futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

#define BROKEN 0x80000000u /* in a meeting's round */

void meeting_init(meeting *m, uint32_t n)
{
    atomic_store(&m->round, 0);
    atomic_store(&m->came, 0);
    m->n = n;
}

void meeting_break(meeting *m)
{
    atomic_fetch_or(&m->round, BROKEN);
    futex_wake(&m->round);
}

bool meeting_wait(meeting *m, uint64_t timeout_ns)
{
    uint64_t deadline_ns = fsdp__after_ns(timeout_ns);
    uint32_t round = atomic_load(&m->round), now;
    if ((round & BROKEN) != 0) return false;
    if (atomic_fetch_add(&m->came, 1) + 1 == m->n) {
        atomic_store(&m->came, 0);
        atomic_fetch_add(&m->round, 1);
        futex_wake(&m->round);
    }
    while (((now = atomic_load(&m->round)) & ~BROKEN) == round) {
        if ((now & BROKEN) != 0) return false;
        if (!futex_wait(&m->round, now, deadline_ns)) meeting_break(m);
    }
    return true; /* also if it was broken after */
}

void mark_set(mark *m, uint32_t value)
{
    atomic_store(&m->value, value);
    futex_wake(&m->value);
}

void mark_add(mark *m)
{
    atomic_fetch_add(&m->value, 1);
    futex_wake(&m->value);
}

bool mark_wait(mark *m, uint32_t at_least, uint64_t timeout_ns)
{
    uint64_t deadline_ns = fsdp__after_ns(timeout_ns);
    uint32_t value;
    while ((value = atomic_load(&m->value)) < at_least)
        if (!futex_wait(&m->value, value, deadline_ns)) return false;
    return true;
}

/* ---- Where they meet ---- */

static uint16_t free_port(void)
{
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof in;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool bound = fd >= 0 && bind(fd, (struct sockaddr *)&in, sizeof in) == 0 &&
                 getsockname(fd, (struct sockaddr *)&in, &bytes) == 0;
    if (!bound) die("a free port");
    close(fd);
    return ntohs(in.sin_port);
}

fsdp_launch processes_launch(process_way way)
{
    static uint64_t n_launches;
    fsdp_launch launch = FSDP_LAUNCH_INIT;
    launch.launcher = FSDP_LAUNCHER_ENV;
    launch.nonce = fsdp__now_ns() * 1000003 + (uint64_t)getpid() * 64 + ++n_launches;
    if (way == PROCESSES_BY_NAME) {
        snprintf(launch.address, sizeof launch.address, "@fsdp-test-%d-%llu", (int)getpid(),
                 (unsigned long long)n_launches);
    } else {
        snprintf(launch.address, sizeof launch.address, "127.0.0.1");
        launch.port = free_port();
    }
    return launch;
}

bool processes_listens(const fsdp_launch *launch)
{
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(launch->port)};
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    bool by_name = launch->address[0] == '@';
    size_t length = strlen(launch->address);
    const struct sockaddr *to = by_name ? (struct sockaddr *)&un : (struct sockaddr *)&in;
    if (by_name) memcpy(un.sun_path + 1, launch->address + 1, length - 1); /* an abstract name: no end */
    else in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(to->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) die("socket");
    bool listens =
        connect(fd, to, by_name ? (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length) : sizeof in) == 0;
    close(fd);
    return listens;
}

/* ---- A side channel of the test's own ---- */

enum { CHUNK = 1 << 14, REASON_BYTES = 512 };

typedef struct seat {
    shared_side *side;
    uint32_t rank;
    fsdp_side_channel end;
} seat;

struct shared_side {
    uint32_t world;
    meeting meet;
    _Atomic uint32_t aborting, aborted; /* somebody writes the reason; it is there */
    char reason[REASON_BYTES];
    seat seat[PROCESSES_MAX];
    char blob[PROCESSES_MAX][CHUNK];
};

static const char *side_aborted(void *arg)
{
    const seat *s = arg;
    return atomic_load(&s->side->aborted) ? s->side->reason : NULL;
}

static void side_abort(void *arg, const char *reason)
{
    shared_side *side = ((seat *)arg)->side;
    if (atomic_exchange(&side->aborting, 1)) return;
    snprintf(side->reason, sizeof side->reason, "%s", reason);
    atomic_store(&side->aborted, 1);
    meeting_break(&side->meet);
}

static fsdp_status side_gather(void *arg, const void *mine, void *all, size_t bytes, uint64_t timeout_ns)
{
    seat *s = arg;
    shared_side *side = s->side;
    uint64_t deadline_ns = fsdp__after_ns(timeout_ns);
    for (size_t at = 0; at == 0 || at < bytes; at += CHUNK) {
        size_t n = bytes - at < CHUNK ? bytes - at : CHUNK;
        if (n > 0) memcpy(side->blob[s->rank], (const char *)mine + at, n);
        for (int twice = 0; twice < 2; twice++) { /* written by all; read by all */
            uint64_t now = fsdp__now_ns();
            if (!meeting_wait(&side->meet, now < deadline_ns ? deadline_ns - now : 0)) {
                if (side_aborted(s) != NULL) return fsdp_backend_fail(FSDP_ERR_ABORTED, "%s", side->reason);
                return fsdp_backend_fail(FSDP_ERR_RANK_LOST, "the test's side channel: not all came in time");
            }
            for (uint32_t r = 0; r < side->world && twice == 0 && n > 0; r++)
                memcpy((char *)all + r * bytes + at, side->blob[r], n);
        }
    }
    return FSDP_OK;
}

shared_side *shared_side_create(uint32_t world)
{
    shared_side *side = processes_shared(sizeof *side);
    side->world = world;
    meeting_init(&side->meet, world);
    for (uint32_t r = 0; r < world; r++) {
        seat *s = &side->seat[r];
        s->side = side;
        s->rank = r;
        s->end = (fsdp_side_channel){sizeof s->end, s, side_gather, side_abort, side_aborted};
    }
    return side;
}

void shared_side_destroy(shared_side *side) { processes_unshare(side, sizeof *side); }

const fsdp_side_channel *shared_side_end(shared_side *side, uint32_t rank) { return &side->seat[rank].end; }

/* ---- What is left ---- */

static uint32_t count_entries(const char *path)
{
    uint32_t n = 0;
    DIR *dir = opendir(path);
    if (dir == NULL) return 0;
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) n += entry->d_name[0] != '.';
    closedir(dir);
    return n;
}

static bool maps(const char *pid, const char *file)
{
    char path[300], line[512];
    bool found = false;
    snprintf(path, sizeof path, "/proc/%.200s/maps", pid);
    FILE *list = fopen(path, "r");
    while (list != NULL && !found && fgets(line, sizeof line, list) != NULL) found = strstr(line, file) != NULL;
    if (list != NULL) fclose(list);
    return found;
}

static bool is_mapped(const char *file)
{
    bool found = false;
    DIR *dir = opendir("/proc");
    if (dir == NULL) return false;
    for (struct dirent *entry; !found && (entry = readdir(dir)) != NULL;)
        found = entry->d_name[0] >= '1' && entry->d_name[0] <= '9' && maps(entry->d_name, file);
    closedir(dir);
    return found;
}

static uint32_t count_orphans(void)
{
    uint32_t n = 0;
    DIR *dir = opendir("/dev/shm");
    if (dir == NULL) return 0;
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        char file[300];
        snprintf(file, sizeof file, "/dev/shm/%s", entry->d_name);
        n += entry->d_name[0] != '.' && !is_mapped(file) && access(file, F_OK) == 0;
    }
    closedir(dir);
    return n;
}

static uint32_t count_children(void)
{
    char path[64], line[4096];
    uint32_t n = 0;
    snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    FILE *file = fopen(path, "r");
    if (file == NULL) return 0;
    if (fgets(line, sizeof line, file) != NULL)
        for (const char *c = line; *c != '\0'; c++) n += *c == ' ';
    fclose(file);
    return n;
}

static void take_memory(footprint *f)
{
    unsigned long long mapped = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL) return;
    if (fscanf(file, "%llu %llu", &mapped, &resident) != 2) mapped = resident = 0;
    fclose(file);
    f->mapped_bytes = mapped * (uint64_t)sysconf(_SC_PAGESIZE);
    f->resident_bytes = resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

footprint footprint_take(void)
{
    footprint f = {0};
    f.n_descriptors = count_entries("/proc/self/fd");
    f.n_threads = count_entries("/proc/self/task");
    f.n_children = count_children();
    f.n_shm = count_orphans();
    take_memory(&f);
    return f;
}
