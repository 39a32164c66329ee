/* SPDX-License-Identifier: MIT */
/* fsdp-memory: draws a memory snapshot, and says in words what is in it. docs/memory.md. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "fsdp_memory_svg.h"

enum { MOST_HOLDERS = 20 };

static const char usage[] =
    "usage: fsdp-memory SNAPSHOT [-o FILE.svg]\n"
    "\n"
    "Draws a memory snapshot that fsdp_memory_write_json has written: each pool with its blocks by\n"
    "owner and state, and its bytes over the last events.\n"
    "\n"
    "  -o FILE.svg   where to; without it SNAPSHOT with .svg at its end, and a summary is printed\n"
    "  --help        this\n";

/* To a terminal: no control characters. */
static void print_name(const char *name)
{
    for (int chars = 0; *name != '\0'; chars++) {
        if (chars == 64) {
            fputs("…", stdout);
            return;
        }
        size_t n = fsdp__utf8_bytes(name);
        if (n == 0) putchar('?');
        else fwrite(name, 1, n, stdout);
        name += n > 0 ? n : 1;
    }
}

static bool print_holders(const fsdp__snapshot_pool *pool)
{
    size_t n = 0;
    uint64_t rest = 0;
    fsdp__snapshot_owner *owners = fsdp__snapshot_owners(pool, 1, &n);
    if (owners == NULL) return false;
    qsort(owners, n, sizeof *owners, fsdp__snapshot_by_bytes);
    for (size_t i = 0; i < n; i++) {
        if (i >= MOST_HOLDERS) {
            rest += owners[i].bytes;
            continue;
        }
        printf("    %10s in %llu block%s  ", fsdp__svg_bytes(owners[i].bytes).text,
               (unsigned long long)owners[i].blocks, owners[i].blocks == 1 ? "" : "s");
        print_name(owners[i].name[0] != '\0' ? owners[i].name : "(no owner named)");
        putchar('\n');
    }
    if (n > MOST_HOLDERS) printf("    %10s of %zu more owners\n", fsdp__svg_bytes(rest).text, n - MOST_HOLDERS);
    free(owners);
    return true;
}

static bool print_summary(const fsdp__snapshot *s)
{
    printf("rank %llu of %llu, ", (unsigned long long)s->rank, (unsigned long long)s->world);
    print_name(s->backend);
    printf(" backend: device %s (peak %s), pinned %s\n", fsdp__svg_bytes(s->device_bytes).text,
           fsdp__svg_bytes(s->device_peak).text, fsdp__svg_bytes(s->pinned_bytes).text);
    for (size_t i = 0; i < s->n_arenas; i++)
        printf("%s arena: %s allocated, %s active, %s mapped\n", s->arenas[i].name,
               fsdp__svg_bytes(s->arenas[i].allocated).text, fsdp__svg_bytes(s->arenas[i].active).text,
               fsdp__svg_bytes(s->arenas[i].mapped).text);
    for (size_t p = 0; p < s->n_pools; p++) {
        const fsdp__snapshot_pool *pool = &s->pools[p];
        print_name(pool->name);
        if (pool->model != NULL) {
            fputs(" of model ", stdout);
            print_name(pool->model);
        }
        printf(": %s allocated (peak %s) of %s reserved, %s pending, %s free in %llu range%s, the largest %s\n",
               fsdp__svg_bytes(pool->allocated).text, fsdp__svg_bytes(pool->allocated_peak).text,
               fsdp__svg_bytes(pool->reserved).text, fsdp__svg_bytes(pool->active - pool->allocated).text,
               fsdp__svg_bytes(pool->free_bytes).text, (unsigned long long)pool->free_ranges,
               pool->free_ranges == 1 ? "" : "s", fsdp__svg_bytes(pool->largest_free).text);
        if (!print_holders(pool)) return false;
    }
    return true;
}

/* "a/b.json" -> "a/b.svg"; the caller frees. */
static char *default_path(const char *path)
{
    size_t n = strlen(path);
    if (n > 5 && strcmp(path + n - 5, ".json") == 0) n -= 5;
    char *out = malloc(n + sizeof ".svg");
    if (out == NULL) return NULL;
    memcpy(out, path, n);
    memcpy(out + n, ".svg", sizeof ".svg");
    return out;
}

static int run(const char *path, const char *given)
{
    char error[1024];
    fsdp__snapshot snapshot;
    if (!fsdp__snapshot_read(path, &snapshot, error, sizeof error)) {
        fprintf(stderr, "fsdp-memory: %s\n", error);
        return 1;
    }
    char *made = given == NULL ? default_path(path) : NULL;
    const char *out = given != NULL ? given : made;
    bool drawn = out != NULL && fsdp__snapshot_draw(&snapshot, out);
    if (!drawn) fprintf(stderr, "fsdp-memory: %s cannot be written: %s\n", out != NULL ? out : path, strerror(errno));
    bool printed = !drawn || given != NULL || print_summary(&snapshot);
    if (!printed) fprintf(stderr, "fsdp-memory: %s: no memory for a summary\n", path);
    if (printed && drawn && given == NULL) printf("drawn: %s\n", out);
    free(made);
    fsdp__snapshot_free(&snapshot);
    return drawn && printed && fflush(stdout) == 0 ? 0 : 1;
}

int main(int argc, char **argv)
{
    const char *path = NULL, *out = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            fputs(usage, stdout);
            return 0;
        }
        if (strcmp(argv[i], "-o") == 0 && i + 1 < argc && out == NULL) out = argv[++i];
        else if (argv[i][0] != '-' && path == NULL) path = argv[i];
        else {
            fprintf(stderr, "fsdp-memory: \"%s\" is not understood\n%s", argv[i], usage);
            return 1;
        }
    }
    if (path != NULL) return run(path, out);
    fputs(usage, stderr);
    return 1;
}
