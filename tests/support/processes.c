/* SPDX-License-Identifier: MIT */
#include "processes.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { SECOND_NS = 1000000000, GRACE_S = 5, LATEST_S = 600 };

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define HAS_OTHER_THREADS 1 /* of the sanitizer */
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define HAS_OTHER_THREADS 1
#endif
#ifndef HAS_OTHER_THREADS
#define HAS_OTHER_THREADS 0
#endif

/* Of the leak sanitizer, where there is one: processes end by _exit, before it looks by itself. */
extern int __lsan_do_recoverable_leak_check(void) __attribute__((weak));

struct process_said {
    char text[PROCESSES_SAID_BYTES];
};

static struct process_said *own_said; /* of this child; NULL in the parent */
static uint32_t own_rank;

static _Noreturn void die(const char *what)
{
    fprintf(stderr, "processes: %s: %s\n", what, strerror(errno));
    abort();
}

/* ---- Children ---- */

void processes_complain(const char *file, int line, const char *format, ...)
{
    char text[PROCESSES_SAID_BYTES];
    const char *slash = strrchr(file, '/');
    int length = snprintf(text, sizeof text, "%s:%d: ", slash != NULL ? slash + 1 : file, line);
    va_list list;
    va_start(list, format);
    vsnprintf(text + length, sizeof text - (size_t)length, format, list);
    va_end(list);
    if (own_said != NULL) fprintf(stderr, "process %u: %s\n", own_rank, text);
    else fprintf(stderr, "%s\n", text);
    if (own_said != NULL && own_said->text[0] == '\0') memcpy(own_said->text, text, sizeof text);
}

static _Noreturn void be_child(processes *p, uint32_t rank, process_fn fn, void *arg)
{
    /* CMocka's handlers and asserts would go on with the parent's tests, in here. */
    static const int signals[] = {SIGSEGV, SIGABRT, SIGFPE, SIGILL, SIGBUS, SIGSYS};
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) signal(signals[i], SIG_DFL);
    setenv("CMOCKA_TEST_ABORT", "1", 1);
    for (uint32_t r = 0; r < rank; r++) close(p->gone[r]);
    own_said = &p->said[rank];
    own_rank = rank;
    alarm(LATEST_S);
    bool ok = fn(rank, arg);
    if (ok && __lsan_do_recoverable_leak_check != NULL && __lsan_do_recoverable_leak_check() != 0) {
        processes_complain(__FILE__, __LINE__, "memory has leaked: see above");
        ok = false;
    }
    _exit(ok ? 0 : 1);
}

static uint32_t count_threads(void)
{
    uint32_t n = 0;
    DIR *dir = opendir("/proc/self/task");
    for (struct dirent *entry; dir != NULL && (entry = readdir(dir)) != NULL;) n += entry->d_name[0] != '.';
    if (dir != NULL) closedir(dir);
    return n;
}

/* Is this the only thread? One that was joined may stand in the kernel's list for a moment more. */
static bool alone(void)
{
    const struct timespec moment = {0, 1000000};
    for (int i = 0; i < 1000; i++, nanosleep(&moment, NULL))
        if (count_threads() == 1) return true;
    return false;
}

void processes_start(processes *p, uint32_t world, process_fn fn, void *arg)
{
    *p = (processes){.world = world, .said = processes_shared(PROCESSES_MAX * sizeof *p->said)};
    pid_t parent = getpid();
    errno = EBUSY;
    if (!HAS_OTHER_THREADS && !alone()) die("a fork with other threads");
    if (world == 0 || world > PROCESSES_MAX || own_said != NULL) die("a world that cannot be");
    fflush(NULL);
    for (uint32_t r = 0; r < world; r++) {
        int ends[2];
        if (pipe2(ends, O_CLOEXEC) != 0) die("pipe");
        p->gone[r] = ends[0];
        p->pid[r] = fork();
        if (p->pid[r] < 0) die("fork");
        if (p->pid[r] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent) _exit(1); /* it died before */
            close(ends[0]);
            be_child(p, r, fn, arg);
        }
        close(ends[1]);
    }
}

void processes_signal(processes *p, uint32_t rank, int signal_)
{
    if (p->end[rank] == PROCESS_RUNNING) kill(p->pid[rank], signal_);
}

static void reap(processes *p, uint32_t rank)
{
    int how;
    pid_t pid;
    while ((pid = waitpid(p->pid[rank], &how, 0)) < 0 && errno == EINTR) continue;
    if (pid != p->pid[rank]) die("waitpid");
    close(p->gone[rank]);
    p->gone[rank] = -1;
    p->end[rank] = WIFEXITED(how) ? (WEXITSTATUS(how) == 0 ? PROCESS_DONE : PROCESS_FAILED) : PROCESS_KILLED;
    p->signal[rank] = WIFSIGNALED(how) ? WTERMSIG(how) : 0;
}

static int until(uint64_t deadline_ns)
{
    uint64_t now = fsdp__now_ns();
    if (now >= deadline_ns) return 0;
    uint64_t ms = (deadline_ns - now) / 1000000 + 1;
    return ms < 60000 ? (int)ms : 60000;
}

bool processes_wait_one(processes *p, uint32_t rank, uint64_t timeout_ns)
{
    uint64_t deadline_ns = fsdp__after_ns(timeout_ns);
    while (p->end[rank] == PROCESS_RUNNING) {
        struct pollfd fd = {p->gone[rank], POLLIN, 0};
        int ms = until(deadline_ns), n = poll(&fd, 1, ms);
        if (n > 0) reap(p, rank);
        else if (ms == 0) return false;
    }
    return true;
}

bool processes_wait_stopped(processes *p, uint32_t rank, uint64_t timeout_ns)
{
    const struct timespec moment = {0, 1000000};
    for (uint64_t deadline_ns = fsdp__after_ns(timeout_ns); fsdp__now_ns() < deadline_ns; nanosleep(&moment, NULL)) {
        siginfo_t info = {.si_pid = 0};
        if (waitid(P_PID, (id_t)p->pid[rank], &info, WSTOPPED | WNOHANG) == 0 && info.si_pid == p->pid[rank])
            return true;
    }
    return false;
}

static bool as_expected(const processes *p, uint32_t r)
{
    if (p->expected[r] != 0) return p->end[r] == PROCESS_KILLED && p->signal[r] == p->expected[r];
    return p->end[r] == PROCESS_DONE;
}

void processes_wait(processes *p, uint64_t timeout_ns)
{
    uint64_t deadline_ns = fsdp__after_ns(timeout_ns);
    bool failed = false;
    for (;;) {
        struct pollfd fds[PROCESSES_MAX];
        uint32_t rank[PROCESSES_MAX], n = 0;
        for (uint32_t r = 0; r < p->world; r++) {
            if (p->end[r] == PROCESS_RUNNING) rank[n] = r, fds[n++] = (struct pollfd){p->gone[r], POLLIN, 0};
            else if (!failed && !as_expected(p, r)) {
                uint64_t grace_ns = fsdp__after_ns(GRACE_S * (uint64_t)SECOND_NS);
                failed = true;
                if (grace_ns < deadline_ns) deadline_ns = grace_ns;
            }
        }
        if (n == 0) return;
        int ms = until(deadline_ns);
        if (poll(fds, n, ms) == 0 && ms == 0) break;
        for (uint32_t i = 0; i < n; i++)
            if (fds[i].revents != 0) reap(p, rank[i]);
    }
    for (uint32_t r = 0; r < p->world; r++) {
        if (p->end[r] != PROCESS_RUNNING) continue;
        kill(p->pid[r], SIGKILL);
        reap(p, r);
        p->end[r] = PROCESS_LATE;
    }
}

/* Who has something to say comes before who was killed, and that before who waited in vain for others. */
static uint32_t weight(const processes *p, uint32_t r)
{
    if (as_expected(p, r)) return 0;
    return p->end[r] == PROCESS_LATE ? 1 : p->end[r] == PROCESS_KILLED ? 2 : p->said[r].text[0] != '\0' ? 4 : 3;
}

const char *processes_failure(const processes *p)
{
    static char text[PROCESSES_SAID_BYTES + 128];
    uint32_t worst = 0;
    for (uint32_t r = 1; r < p->world; r++)
        if (weight(p, r) > weight(p, worst)) worst = r;
    if (weight(p, worst) == 0) return NULL;
    int length = snprintf(text, sizeof text, "process %u of %u ", worst, p->world);
    char *to = text + length;
    size_t bytes = sizeof text - (size_t)length;
    const char *said = p->said[worst].text[0] != '\0' ? p->said[worst].text : "said nothing";
    switch (p->end[worst]) {
    case PROCESS_DONE:
        snprintf(to, bytes, "came to its end, which signal %d should have been", p->expected[worst]);
        break;
    case PROCESS_FAILED: snprintf(to, bytes, "failed: %s", said); break;
    case PROCESS_KILLED: snprintf(to, bytes, "was killed by signal %d: %s", p->signal[worst], said); break;
    case PROCESS_LATE: snprintf(to, bytes, "did not end in time: %s", said); break;
    case PROCESS_RUNNING: snprintf(to, bytes, "is running"); break;
    }
    return text;
}

void processes_finish(processes *p)
{
    for (uint32_t r = 0; r < p->world; r++) {
        if (p->end[r] != PROCESS_RUNNING) continue;
        kill(p->pid[r], SIGKILL);
        reap(p, r);
    }
    processes_unshare(p->said, PROCESSES_MAX * sizeof *p->said);
    p->said = NULL;
}

const char *processes_run(uint32_t world, uint64_t timeout_ns, process_fn fn, void *arg)
{
    static processes p;
    processes_start(&p, world, fn, arg);
    processes_wait(&p, timeout_ns);
    const char *failure = processes_failure(&p);
    processes_finish(&p);
    return failure;
}
