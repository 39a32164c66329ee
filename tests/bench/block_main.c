/* SPDX-License-Identifier: MIT */
/* The command line of bench_prefetch --device cuda, and its order of things. */
#include <execinfo.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "block_bench.h"

const char *volatile block_stage = "opening";

static void usage(int code)
{
    fprintf(
        code ? stderr : stdout,
        "bench_prefetch --device cuda [--mode bare|library] [--fused] [--layers|-L N] [--dim|-d N] [--tokens|-T "
        "N[,N…]]\n"
        "               [--depth|-k K] [--comms 1|2 | -2 0|1] [--what both,comm,compute] [--steps N] [--rounds N]\n"
        "               [--captured] [--window] [--window-grad] [--cta-zero] [--keep] [--one-lane] [--clip]\n"
        "               [--no-bias] [--pad BYTES] [--json]\n"
        "               [--timeline FILE.svg]\n"
        "Ranks: tests/bench/ranks.sh WORLD [--one-gpu] bench_prefetch --device cuda …; alone it is a world of one.\n");
    exit(code);
}

static uint64_t number(const char *text, uint64_t low, uint64_t high)
{
    char *end;
    const unsigned long long value = strtoull(text, &end, 10);
    if (end == text || *end != '\0' || value < low || value > high) {
        fprintf(stderr, "bench_prefetch: '%s' is no number from %llu to %llu\n", text, (unsigned long long)low,
                (unsigned long long)high);
        exit(2);
    }
    return value;
}

static void set_tokens(block_options *o, const char *text)
{
    char copy[128];
    if (strlen(text) >= sizeof copy) usage(2);
    strcpy(copy, text);
    o->n_tokens = 0;
    for (char *word = strtok(copy, ","); word != NULL; word = strtok(NULL, ",")) {
        if (o->n_tokens == BLOCK_MOST_CASES) usage(2);
        o->tokens[o->n_tokens++] = number(word, 1, 1 << 20);
    }
    if (o->n_tokens == 0) usage(2);
}

static void set_what(block_options *o, const char *text)
{
    o->what = (strstr(text, "both") ? BLOCK_BOTH_WAYS : 0) | (strstr(text, "comm") ? BLOCK_COMM : 0) |
              (strstr(text, "compute") ? BLOCK_COMPUTE : 0);
    if (o->what == 0) usage(2);
}

static bool is(const char *word, const char *name, const char *letter)
{
    return strcmp(word, name) == 0 || (letter != NULL && strcmp(word, letter) == 0);
}

static bool set_flag(block_options *o, const char *flag)
{
    if (is(flag, "--fused", NULL)) o->fused = true;
    else if (is(flag, "--json", NULL)) o->json = true;
    else if (is(flag, "--captured", NULL)) o->captured = true;
    else if (is(flag, "--window", NULL)) o->window = true;
    else if (is(flag, "--window-grad", NULL)) o->window_grad = true;
    else if (is(flag, "--cta-zero", NULL)) o->cta_zero = true;
    else if (is(flag, "--clip", NULL)) o->clip = true;
    else if (is(flag, "--keep", NULL)) o->keep = true;
    else if (is(flag, "--no-bias", NULL)) o->no_bias = true;
    else if (is(flag, "--one-lane", NULL)) o->one_lane = true;
    else return false;
    return true;
}

static void set_value(block_options *o, const char *flag, const char *text)
{
    if (is(flag, "--device", NULL)) return;
    if (is(flag, "--mode", NULL)) {
        o->library = strcmp(text, "library") == 0;
        if (!o->library && strcmp(text, "bare") != 0) usage(2);
    } else if (is(flag, "--layers", "-L")) o->layers = (uint32_t)number(text, 2, BLOCK_MOST_LAYERS);
    else if (is(flag, "--dim", "-d")) o->dim = (uint32_t)number(text, 128, 16384);
    else if (is(flag, "--tokens", "-T")) set_tokens(o, text);
    else if (is(flag, "--depth", "-k")) o->depth = (uint32_t)number(text, 0, BLOCK_MOST_DEPTH);
    else if (is(flag, "--comms", NULL)) o->comms = (uint32_t)number(text, 1, 2);
    else if (is(flag, "-2", NULL)) o->comms = 1 + (uint32_t)number(text, 0, 1);
    else if (is(flag, "--what", NULL)) set_what(o, text);
    else if (is(flag, "--pad", NULL)) o->pad = number(text, 0, 1 << 30);
    else if (is(flag, "--timeline", NULL)) o->timeline = text;
    else if (is(flag, "--steps", NULL)) o->steps = (uint32_t)number(text, 2, 256);
    else if (is(flag, "--rounds", NULL)) o->rounds = (uint32_t)number(text, 1, 256);
    else usage(2);
}

static block_options parse(int argc, char **argv)
{
    block_options o = {.layers = 8,
                       .dim = 1024,
                       .depth = 1,
                       .comms = 1,
                       .steps = 8,
                       .rounds = 3,
                       .n_tokens = 1,
                       .tokens = {131072},
                       .what = BLOCK_BOTH_WAYS | BLOCK_COMM | BLOCK_COMPUTE};
    for (int i = 1; i < argc; i++) {
        if (is(argv[i], "--help", NULL)) usage(0);
        if (set_flag(&o, argv[i])) continue;
        if (i + 1 == argc) usage(2);
        set_value(&o, argv[i], argv[i + 1]);
        i++;
    }
    if (o.dim % 128 != 0) {
        fprintf(stderr, "bench_prefetch: --dim %u is no multiple of 128\n", o.dim);
        exit(2);
    }
    if (o.pad % 256 != 0) {
        fprintf(stderr, "bench_prefetch: --pad %llu is no multiple of 256\n", (unsigned long long)o.pad);
        exit(2);
    }
    if (o.depth >= o.layers) o.depth = o.layers - 1;
    return o;
}

static void say(const char *text)
{
    if (write(STDERR_FILENO, text, strlen(text)) < 0) return;
}

/* A crash in CUDA, NCCL or here says where: addr2line -e FILE OFFSET makes lines of it. */
static void crashed(int signal)
{
    void *frames[48];
    say("bench_prefetch: ");
    say(signal == SIGSEGV ? "segmentation fault" : "crash");
    say(" while ");
    say(block_stage);
    say("\n");
    backtrace_symbols_fd(frames, backtrace(frames, 48), STDERR_FILENO);
    _exit(128 + signal);
}

static void catch_crashes(void)
{
    static char stack[1 << 16]; /* of its own: the thread's may be what ran over */
    void *frame[1];
    (void)backtrace(frame, 1); /* its first call loads a library */
    const stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_handler = crashed, .sa_flags = SA_ONSTACK | (int)SA_RESETHAND};
    sigemptyset(&action.sa_mask);
    if (sigaltstack(&other, NULL) != 0) return;
    (void)sigaction(SIGSEGV, &action, NULL);
    (void)sigaction(SIGBUS, &action, NULL);
    (void)sigaction(SIGABRT, &action, NULL);
}

static void open_math(block_way *way)
{
    const block_options *o = way->options;
    block_math_config config = {o->layers, o->dim, way->launch.rank, 0, o->fused, way->stream};
    for (uint32_t i = 0; i < o->n_tokens; i++)
        if (o->tokens[i] > config.max_tokens) config.max_tokens = o->tokens[i];
    way->math = block_math_create(&config);
    if (!o->no_bias) return;
    CUDA(cudaMalloc(&way->zeros, 8ull * o->dim));
    CUDA(cudaMalloc((void **)&way->bias_scratch, 16ull * o->dim));
    CUDA(cudaMemset(way->zeros, 0, 8ull * o->dim));
    CUDA(cudaDeviceSynchronize());
}

int block_bench_main(int argc, char **argv)
{
    const block_options o = parse(argc, argv);
    catch_crashes();
    const fsdp_launch nobody = FSDP_LAUNCH_INIT;
    block_way way = {.options = &o, .launch = nobody};
    LIB(fsdp_launch_from_env(&way.launch));
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
        fprintf(stderr, "bench_prefetch: no GPU: %s\n", cudaGetErrorString(error));
        return 77;
    }
    way.device = (int)(way.launch.local_rank % (uint32_t)devices);
    CUDA(cudaSetDevice(way.device));
    CUDA(cudaStreamCreateWithFlags(&way.stream, cudaStreamNonBlocking));
    open_math(&way);
    if (way.options->library) block_library_open(&way);
    else block_bare_open(&way);
    bool ok = true;
    for (uint32_t i = 0; i < o.n_tokens; i++) ok = block_measure_case(&way, o.tokens[i]) && ok;
    block_stage = "drawing and closing";
    if (o.timeline != NULL && way.draw != NULL) way.draw(&way, o.timeline);
    way.close(&way);
    block_math_destroy(way.math);
    CUDA(cudaFree(way.zeros));
    CUDA(cudaFree(way.bias_scratch));
    CUDA(cudaStreamDestroy(way.stream));
    return ok ? 0 : 1;
}
