/* SPDX-License-Identifier: MIT */
/* Four completions, measured ([Note: Four completions] in docs/streams.md). Each result is checked, every element of it.
 *
 *     bench_work [--device host|cuda] [--ranks N] [--sizes 1K,64M,…] [--cycles N] [--reps N] [--delay-ms N] [--spin-us N]
 *                [--only calls|order|wake] [--json]
 *
 *  calls  An all-reduce, out of place, of each size: `sync` (the call and the wait are one), `async` (call, then wait),
 *         `drain` (call, wait, then the device is idle), each with the wait that orders a stream and with the one that blocks
 *         the host. host: the host's time in all of it; wait: in the wait alone; stream: from the caller's stream having its
 *         input to being behind the result, its end noted before the host blocks; late: the same, its end noted after the
 *         host has been blocked; done: how often the work was done on return.
 *  order  A long delay on the caller's stream, then an all-reduce of its data; a mark behind a wait for it, and a mark on a
 *         stream that does not wait: which comes first on the device.
 *  wake   How long after the device's end the host goes on: blocked in fsdp_work_wait_host, or asking every 10 ms; and what
 *         the collective itself takes meanwhile.
 *
 * Ranks: host threads (--ranks), or processes by their launcher's environment (RANK, WORLD_SIZE, …). Rank 0 prints medians. */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

#include "sorted.h"
#include "work_rig.h"

enum { MAX_SIZES = 16, MAX_CYCLES = 1000, MAX_RANKS = 64, POLL_MS = 10, ORDER_BYTES = 64 << 20 };

typedef enum mode { SYNC, ASYNC, DRAIN, N_MODES } mode;
typedef enum wait_kind { ORDERS, BLOCKS, N_WAIT_KINDS } wait_kind;
static const char *const mode_names[N_MODES] = {"sync", "async", "drain"};
static const char *const wait_names[N_WAIT_KINDS] = {"orders", "blocks"};

typedef struct options {
    bool cuda, json;
    const char *only;
    uint32_t ranks, cycles, reps, n_sizes;
    uint64_t delay_ns, spin_ns, bytes[MAX_SIZES];
} options;

typedef struct bench {
    const options *o;
    work_rig rig;
    uint32_t round;
    bool wrong; /* some result was */
} bench;

/* ---- Numbers ---- */

static double at_rank(double *v, uint32_t n, double part)
{
    sort_doubles(v, n);
    return v[(uint32_t)(part * (n - 1) + 0.5)];
}

static double median(double *v, uint32_t n) { return at_rank(v, n, 0.5); }

static double us_since(uint64_t start_ns) { return (double)(fsdp__now_ns() - start_ns) * 1e-3; }

/* On how many ranks did it hold, of all? */
static bool everywhere(bench *b, bool here)
{
    double n = here ? 1.0 : 0.0;
    WORK_TRY(fsdp_sum_host(b->rig.ctx, &n, 1));
    if (n < b->rig.world) b->wrong = true;
    return n == b->rig.world;
}

static const char *size_name(uint64_t bytes, char *text, size_t n)
{
    bool mib = bytes % (1 << 20) == 0;
    snprintf(text, n, "%" PRIu64 " %s", bytes >> (mib ? 20 : 10), mib ? "MiB" : "KiB");
    return text;
}

/* ---- calls ---- */

enum { BEGIN, END, LATE }; /* marks on the caller's stream */

typedef struct calls_row {
    double host[MAX_CYCLES], wait[MAX_CYCLES], stream[MAX_CYCLES], late[MAX_CYCLES];
    uint32_t n_done, n_right;
} calls_row;

static void one_call(bench *b, uint64_t bytes, mode m, wait_kind kind, uint32_t cycle, calls_row *row)
{
    work_rig *rig = &b->rig;
    fsdp_work *work;
    bool done;
    work_fill(rig, bytes, ++b->round);
    WORK_TRY(fsdp_barrier_host(rig->ctx)); /* nobody comes late */
    rig->ops->mark(rig->clock, BEGIN, rig->app);
    uint64_t start = fsdp__now_ns();
    WORK_TRY(fsdp_stream_wait_stream(rig->wire, rig->app));
    WORK_TRY(
        fsdp_all_reduce(rig->comm, rig->send, rig->recv, bytes / sizeof(float), FSDP_DTYPE_FP32, rig->wire, &work));
    uint64_t wait_start = fsdp__now_ns();
    WORK_TRY(fsdp_work_wait(work, rig->app));
    double wait = us_since(wait_start);
    uint64_t mark_start = fsdp__now_ns();
    rig->ops->mark(rig->clock, END, rig->app);
    double marking = us_since(mark_start); /* the measurement's, not the call's */
    if (kind == BLOCKS) {
        wait_start = fsdp__now_ns();
        WORK_TRY(fsdp_work_wait_host(work, UINT64_MAX));
        wait += us_since(wait_start);
    }
    if (m == DRAIN) work_drain(rig);
    row->host[cycle] = us_since(start) - marking;
    row->wait[cycle] = wait;
    WORK_TRY(fsdp_work_is_done(work, &done));
    row->n_done += done;
    rig->ops->mark(rig->clock, LATE, rig->app);
    work_drain(rig);
    row->stream[cycle] = rig->ops->us_between(rig->clock, BEGIN, END);
    row->late[cycle] = rig->ops->us_between(rig->clock, BEGIN, LATE);
    row->n_right += everywhere(b, work_is_right(rig, bytes, b->round));
    fsdp_work_release(work);
}

static void say_calls(const bench *b, uint64_t bytes, mode m, wait_kind kind, calls_row *row)
{
    uint32_t n = b->o->cycles;
    char size[32];
    if (b->rig.rank != 0) return;
    double host = median(row->host, n), wait = median(row->wait, n), stream = median(row->stream, n),
           late = median(row->late, n);
    if (b->o->json)
        printf("{\"bench\":\"work_calls\",\"world\":%u,\"bytes\":%" PRIu64 ",\"mode\":\"%s\",\"wait\":\"%s\","
               "\"host_us\":%.2f,\"wait_us\":%.2f,\"stream_us\":%.2f,\"late_us\":%.2f,\"done\":%u,\"right\":%u,"
               "\"cycles\":%u}\n",
               b->rig.world, bytes, mode_names[m], wait_names[kind], host, wait, stream, late, row->n_done,
               row->n_right, n);
    else
        printf("%8s  %-5s  %-6s  %10.2f  %10.2f  %10.1f  %10.1f  %3u/%u  %3u/%u\n", size_name(bytes, size, sizeof size),
               mode_names[m], wait_names[kind], host, wait, stream, late, row->n_done, n, row->n_right, n);
    fflush(stdout);
}

/* `sync` is call and wait as one; that the wait is measured in it changes nothing, so both are the same cycle. */
static void calls(bench *b)
{
    if (b->rig.rank == 0 && !b->o->json)
        printf("%8s  %-5s  %-6s  %10s  %10s  %10s  %10s  %6s %6s   (us, medians of %u)\n", "all-red.", "mode", "wait",
               "host", "of it wait", "stream", "late", "done", "right", b->o->cycles);
    calls_row *row = malloc(sizeof *row);
    if (row == NULL) exit(1);
    for (uint32_t s = 0; s < b->o->n_sizes; s++)
        for (mode m = SYNC; m < N_MODES; m++)
            for (wait_kind kind = ORDERS; kind < N_WAIT_KINDS; kind++) {
                one_call(b, b->o->bytes[s], m, kind, 0, row); /* warm */
                *row = (calls_row){.n_done = 0};
                for (uint32_t c = 0; c < b->o->cycles; c++) one_call(b, b->o->bytes[s], m, kind, c, row);
                say_calls(b, b->o->bytes[s], m, kind, row);
            }
    free(row);
}

/* ---- order ---- */

enum { FREE_MARK = 0, WAIT_MARK = 1 };

static uint64_t order_bytes(const bench *b) { return b->rig.max_bytes < ORDER_BYTES ? b->rig.max_bytes : ORDER_BYTES; }

static void order(bench *b)
{
    work_rig *rig = &b->rig;
    uint64_t bytes = order_bytes(b);
    uint32_t n_first = 0, n_done = 0, n_right = 0, reps = b->o->reps;
    double *wait = malloc(reps * sizeof *wait), *apart = malloc(reps * sizeof *apart);
    if (wait == NULL || apart == NULL) exit(1);
    for (uint32_t i = 0; i < reps; i++) {
        fsdp_work *work;
        bool done;
        work_fill(rig, bytes, ++b->round);
        WORK_TRY(fsdp_barrier_host(rig->ctx));
        WORK_TRY(fsdp_stream_delay(rig->app, b->o->delay_ns));
        WORK_TRY(fsdp_stream_wait_stream(rig->wire, rig->app));
        WORK_TRY(
            fsdp_all_reduce(rig->comm, rig->send, rig->recv, bytes / sizeof(float), FSDP_DTYPE_FP32, rig->wire, &work));
        uint64_t start = fsdp__now_ns();
        WORK_TRY(fsdp_work_wait(work, rig->app));
        wait[i] = us_since(start);
        WORK_TRY(fsdp_work_is_done(work, &done));
        rig->ops->mark(rig->clock, WAIT_MARK, rig->app);
        rig->ops->mark(rig->clock, FREE_MARK, rig->idle); /* given last */
        work_drain(rig);
        WORK_TRY(fsdp_stream_drain_host(rig->idle, UINT64_MAX));
        apart[i] = rig->ops->us_between(rig->clock, FREE_MARK, WAIT_MARK);
        n_first += apart[i] > 0.0;
        n_done += done;
        n_right += everywhere(b, work_is_right(rig, bytes, b->round));
        fsdp_work_release(work);
    }
    double wait_us = median(wait, reps), apart_us = median(apart, reps);
    free(wait);
    free(apart);
    if (rig->rank != 0) return;
    char size[32];
    double delay_ms = (double)b->o->delay_ns * 1e-6;
    if (b->o->json)
        printf("{\"bench\":\"work_order\",\"world\":%u,\"bytes\":%" PRIu64 ",\"delay_ms\":%.0f,\"reps\":%u,"
               "\"free_first\":%u,\"apart_us\":%.1f,\"host_wait_us\":%.2f,\"done_on_return\":%u,\"right\":%u}\n",
               rig->world, bytes, delay_ms, reps, n_first, apart_us, wait_us, n_done, n_right);
    else
        printf("\n%.0f ms of delay, then an all-reduce of %s: the free stream's mark first %u/%u (%.1f ms before), "
               "host wait "
               "%.2f us, done on return %u/%u, right %u/%u\n",
               delay_ms, size_name(bytes, size, sizeof size), n_first, reps, apart_us * 1e-3, wait_us, n_done, reps,
               n_right, reps);
    fflush(stdout);
}

/* ---- wake ---- */

typedef enum how { NO_WAIT, WAIT_HOST, POLL, N_HOWS } how;
static const char *const how_names[N_HOWS] = {"not waited", "wait_host", "poll 10 ms"};

static void poll_until_done(fsdp_work *work)
{
    const struct timespec interval = {0, POLL_MS * 1000000};
    for (;;) {
        bool done;
        WORK_TRY(fsdp_work_is_done(work, &done));
        if (done) return;
        nanosleep(&interval, NULL);
    }
}

typedef struct wake_row {
    double latency[MAX_CYCLES], device[MAX_CYCLES];
    double error;
    uint32_t n_right;
} wake_row;

static void one_wake(bench *b, uint64_t bytes, how h, uint32_t cycle, wake_row *row)
{
    work_rig *rig = &b->rig;
    fsdp_work *work;
    uint64_t begin, end, error;
    work_fill(rig, bytes, ++b->round);
    WORK_TRY(fsdp_barrier_host(rig->ctx));
    rig->ops->wire_begin(rig->clock);
    WORK_TRY(
        fsdp_all_reduce(rig->comm, rig->send, rig->recv, bytes / sizeof(float), FSDP_DTYPE_FP32, rig->wire, &work));
    rig->ops->wire_end(rig->clock);
    if (h == WAIT_HOST) WORK_TRY(fsdp_work_wait_host(work, UINT64_MAX));
    if (h == POLL) poll_until_done(work);
    uint64_t woken = fsdp__now_ns();
    work_drain(rig);
    rig->ops->wire_read(rig->clock, &begin, &end, &error);
    row->latency[cycle] = ((double)woken - (double)end) * 1e-3;
    row->device[cycle] = (double)(end - begin) * 1e-3;
    if ((double)error * 1e-3 > row->error) row->error = (double)error * 1e-3;
    row->n_right += everywhere(b, work_is_right(rig, bytes, b->round));
    fsdp_work_release(work);
}

static void say_wake(const bench *b, uint64_t bytes, how h, wake_row *row)
{
    uint32_t n = b->o->cycles;
    char size[32];
    if (b->rig.rank != 0) return;
    double most = at_rank(row->latency, n, 1.0), middle = median(row->latency, n), device = median(row->device, n);
    if (b->o->json) {
        printf("{\"bench\":\"work_wake\",\"world\":%u,\"bytes\":%" PRIu64 ",\"how\":\"%s\",\"device_us\":%.1f,",
               b->rig.world, bytes, how_names[h], device);
        if (h != NO_WAIT) printf("\"wake_us\":%.1f,\"wake_max_us\":%.1f,", middle, most);
        printf("\"error_us\":%.1f,\"right\":%u,\"cycles\":%u}\n", row->error, row->n_right, n);
    } else {
        printf("%8s  %-10s  %10.1f  ", size_name(bytes, size, sizeof size), how_names[h], device);
        if (h == NO_WAIT) printf("%10s  %10s", "–", "–");
        else printf("%10.1f  %10.1f", middle, most);
        printf("  %8.1f  %3u/%u\n", row->error, row->n_right, n);
    }
    fflush(stdout);
}

static void wake(bench *b)
{
    if (b->rig.rank == 0 && !b->o->json)
        printf("\n%8s  %-10s  %10s  %10s  %10s  %8s  %6s   (us; too long by at most `error`)\n", "all-red.", "host",
               "device", "woken after", "at most", "error", "right");
    wake_row *row = malloc(sizeof *row);
    if (row == NULL) exit(1);
    for (uint32_t s = 0; s < b->o->n_sizes; s++)
        for (how h = NO_WAIT; h < N_HOWS; h++) {
            *row = (wake_row){.n_right = 0};
            for (uint32_t c = 0; c < b->o->cycles; c++) one_wake(b, b->o->bytes[s], h, c, row);
            say_wake(b, b->o->bytes[s], h, row);
        }
    free(row);
}

/* ---- Ranks ---- */

static bool wanted(const options *o, const char *name) { return o->only == NULL || strcmp(o->only, name) == 0; }

static bool run_rank(const options *o, const fsdp_config *config, const work_clock *ops)
{
    bench b = {.o = o};
    uint64_t most = 1024;
    for (uint32_t i = 0; i < o->n_sizes; i++)
        if (o->bytes[i] > most) most = o->bytes[i];
    work_rig_open(&b.rig, config, ops, most);
    if (wanted(o, "calls")) calls(&b);
    if (wanted(o, "order")) order(&b);
    if (wanted(o, "wake")) wake(&b);
    work_rig_close(&b.rig);
    return !b.wrong;
}

typedef struct host_rank {
    const options *o;
    fsdp_local *local;
    uint32_t rank;
    bool right;
    pthread_t thread;
} host_rank;

static void *run_host_rank(void *arg)
{
    host_rank *r = arg;
    fsdp_host_config host = FSDP_HOST_CONFIG_INIT;
    host.local = r->local;
    host.rank = r->rank;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend_config = &host;
    r->right = run_rank(r->o, &config, &work_host_clock);
    return NULL;
}

static bool run_threads(const options *o)
{
    fsdp_local *local;
    host_rank rank[MAX_RANKS];
    bool right = true;
    WORK_TRY(fsdp_local_create(o->ranks, NULL, &local));
    for (uint32_t r = 0; r < o->ranks; r++) {
        rank[r] = (host_rank){.o = o, .local = local, .rank = r};
        if (pthread_create(&rank[r].thread, NULL, run_host_rank, &rank[r]) != 0) exit(1);
    }
    for (uint32_t r = 0; r < o->ranks; r++) {
        pthread_join(rank[r].thread, NULL);
        right &= rank[r].right;
    }
    fsdp_local_destroy(local);
    return right;
}

/* This process is a rank. */
static bool run_process(const options *o)
{
    fsdp_launch launch = FSDP_LAUNCH_INIT;
    fsdp_host_config host = FSDP_HOST_CONFIG_INIT;
    fsdp_config config = FSDP_CONFIG_INIT;
    WORK_TRY(fsdp_launch_from_env(&launch));
#ifdef WORK_WITH_CUDA
    if (o->cuda) {
        work_cuda_config(&config, &launch, o->spin_ns);
        return run_rank(o, &config, &work_cuda_clock);
    }
#endif
    host.launch = &launch;
    config.backend_config = &host;
    return run_rank(o, &config, &work_host_clock);
}

/* ---- Options ---- */

static bool read_sizes(options *o, char *text)
{
    o->n_sizes = 0;
    for (char *part = strtok(text, ","); part != NULL; part = strtok(NULL, ",")) {
        char *end;
        uint64_t n = strtoull(part, &end, 10);
        if (*end == 'K') n <<= 10;
        else if (*end == 'M') n <<= 20;
        if (n == 0 || n % 1024 != 0 || o->n_sizes == MAX_SIZES) return false;
        o->bytes[o->n_sizes++] = n;
    }
    return o->n_sizes > 0;
}

static bool read_device(options *o, const char *name)
{
#ifdef WORK_WITH_CUDA
    o->cuda = strcmp(name, "cuda") == 0;
#endif
    return o->cuda || strcmp(name, "host") == 0;
}

static bool read_options(options *o, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        if (strcmp(name, "--json") == 0) {
            o->json = true;
            continue;
        }
        char *value = i + 1 < argc ? argv[++i] : NULL;
        bool good = value != NULL;
        if (!good) return false;
        if (strcmp(name, "--device") == 0) good = read_device(o, value);
        else if (strcmp(name, "--sizes") == 0) good = read_sizes(o, value);
        else if (strcmp(name, "--only") == 0) o->only = value;
        else if (strcmp(name, "--ranks") == 0) o->ranks = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(name, "--cycles") == 0) o->cycles = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(name, "--reps") == 0) o->reps = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(name, "--delay-ms") == 0) o->delay_ns = strtoull(value, NULL, 10) * 1000000;
        else if (strcmp(name, "--spin-us") == 0) o->spin_ns = strtoull(value, NULL, 10) * 1000;
        else good = false;
        if (!good) return false;
    }
    return o->ranks <= MAX_RANKS && o->cycles > 0 && o->cycles <= MAX_CYCLES && o->reps > 0 &&
           (wanted(o, "calls") || wanted(o, "order") || wanted(o, "wake"));
}

int main(int argc, char **argv)
{
    options o = {.cycles = 10, .reps = 40, .n_sizes = 4, .delay_ns = 130000000, .spin_ns = 20000};
    memcpy(o.bytes, (uint64_t[]){1 << 10, 1 << 20, 64 << 20, 256 << 20}, 4 * sizeof *o.bytes);
    if (!read_options(&o, argc, argv)) {
        fprintf(stderr,
                "usage: bench_work [--device host|cuda] [--ranks N] [--sizes 1K,64M] [--cycles N] [--reps N] "
                "[--delay-ms N] [--spin-us N] [--only calls|order|wake] [--json]\n"
                "cuda: only in a build with CUDA. --ranks: threads of this process (host); else the launcher's\n");
        return 2;
    }
    bool right = o.ranks > 0 && !o.cuda ? run_threads(&o) : run_process(&o);
    if (!right) fprintf(stderr, "bench_work: a result was wrong\n");
    return right ? 0 : 1;
}
