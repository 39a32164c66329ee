/* SPDX-License-Identifier: MIT */
/* The arena over pinned memory: jemalloc cuts pieces out of regions that the device gives, by hooks.
 *
 * A region goes back to the device exactly as it was taken, once, whole. jemalloc does not think in regions: it splits,
 * merges and hands parts back as it likes. So a hook looks every range up in the table of regions and refuses what would
 * cross or tear one: a merge of two regions, a free of a part. What was refused stays with the arena ("retained") and
 * goes when the arena is destroyed. Nothing is ever purged on the way: decay is off, and committing is not ours.
 *
 * Hooks run inside jemalloc's locks and must not call malloc: the table is mapped pages. */
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

#include "arena.h"

enum { GROW_LIMIT = 2 << 20 }; /* regions for small pieces; without a limit they grow with every one */

/* What jemalloc sees, and what the device gave: more, where it did not lie on the alignment that was asked for. */
typedef struct region {
    char *ptr, *taken;
    size_t bytes, taken_bytes;
} region;

typedef struct heap {
    extent_hooks_t hooks; /* first: a hook gets its address */
    unsigned arena;
    fsdp__arena_counts counts;
    const fsdp_pinned_source *source;
    pthread_mutex_t lock; /* over what follows; nothing is called with it held */
    region *regions;      /* by address; mapped */
    size_t n_regions, capacity;
    uint64_t taken_bytes;
} heap;

/* ---- The table ---- */

static void *map(size_t bytes)
{
    void *ptr = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return ptr == MAP_FAILED ? NULL : ptr;
}

/* With the lock held: the first region that ends behind ptr. */
static size_t find_place(const heap *h, const char *ptr)
{
    size_t low = 0, high = h->n_regions;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (h->regions[middle].ptr + h->regions[middle].bytes <= ptr) low = middle + 1;
        else high = middle;
    }
    return low;
}

static bool add_region(heap *h, region r)
{
    pthread_mutex_lock(&h->lock);
    bool room = h->n_regions < h->capacity;
    size_t grown = h->capacity ? h->capacity * 2 : 64;
    region *regions = room ? NULL : map(grown * sizeof *regions);
    if (regions != NULL) {
        if (h->regions != NULL) {
            memcpy(regions, h->regions, h->n_regions * sizeof *regions);
            munmap(h->regions, h->capacity * sizeof *regions);
        }
        h->regions = regions, h->capacity = grown;
        room = true;
    }
    if (room) {
        size_t at = find_place(h, r.ptr);
        memmove(&h->regions[at + 1], &h->regions[at], (h->n_regions++ - at) * sizeof r);
        h->regions[at] = r;
        h->taken_bytes += r.taken_bytes;
    }
    pthread_mutex_unlock(&h->lock);
    return room;
}

/* With the lock held: the region that has ptr, or NULL. */
static region *find_region(const heap *h, const void *ptr)
{
    size_t at = find_place(h, ptr);
    return at < h->n_regions && h->regions[at].ptr <= (const char *)ptr ? &h->regions[at] : NULL;
}

/* If the range is exactly one region, forget it and give it back. */
static bool give_region(heap *h, const void *ptr, size_t bytes)
{
    region gone = {0};
    pthread_mutex_lock(&h->lock);
    region *r = find_region(h, ptr);
    if (r != NULL && r->ptr == ptr && r->bytes == bytes) {
        gone = *r;
        memmove(r, r + 1, (size_t)(h->regions + --h->n_regions - r) * sizeof *r);
        h->taken_bytes -= gone.taken_bytes;
    }
    pthread_mutex_unlock(&h->lock);
    if (gone.ptr == NULL) return false;
    h->source->give(h->source->arg, gone.taken, gone.taken_bytes);
    return true;
}

/* ---- The hooks. True is "no". ---- */

static heap *heap_of(extent_hooks_t *hooks) { return (heap *)(void *)hooks; }

static bool is_aligned(const void *ptr, size_t alignment) { return ((uintptr_t)ptr & (alignment - 1)) == 0; }

/* A region of the source, on the alignment: as it comes if it lies well, else with room to move. */
static bool take_region(heap *h, size_t bytes, size_t alignment, region *out)
{
    const fsdp_pinned_source *source = h->source;
    void *ptr = source->take(source->arg, bytes);
    if (ptr == NULL) return false;
    *out = (region){ptr, ptr, bytes, bytes};
    if (is_aligned(ptr, alignment)) return true;
    source->give(source->arg, ptr, bytes);
    ptr = source->take(source->arg, bytes + alignment);
    if (ptr == NULL) return false;
    size_t offset = (alignment - ((uintptr_t)ptr & (alignment - 1))) & (alignment - 1);
    *out = (region){(char *)ptr + offset, ptr, bytes, bytes + alignment};
    return true;
}

static void *extent_alloc(extent_hooks_t *hooks, void *wanted, size_t bytes, size_t alignment, bool *zero, bool *commit,
                          unsigned arena)
{
    (void)arena;
    heap *h = heap_of(hooks);
    region r;
    if (wanted != NULL) return NULL; /* to lengthen a region in place; a device gives them where it likes */
    if (!take_region(h, bytes, alignment, &r)) return NULL;
    if (!add_region(h, r)) {
        h->source->give(h->source->arg, r.taken, r.taken_bytes);
        return NULL;
    }
    if (*zero) memset(r.ptr, 0, bytes); /* a device need not */
    *commit = true;
    return r.ptr;
}

static bool extent_dalloc(extent_hooks_t *hooks, void *ptr, size_t bytes, bool committed, unsigned arena)
{
    (void)committed, (void)arena;
    return !give_region(heap_of(hooks), ptr, bytes);
}

static void extent_destroy(extent_hooks_t *hooks, void *ptr, size_t bytes, bool committed, unsigned arena)
{
    (void)committed, (void)arena;
    (void)give_region(heap_of(hooks), ptr, bytes); /* if it is a part, close() gives the whole */
}

static bool extent_split(extent_hooks_t *hooks, void *ptr, size_t bytes, size_t a, size_t b, bool committed,
                         unsigned arena)
{
    (void)hooks, (void)ptr, (void)bytes, (void)a, (void)b, (void)committed, (void)arena;
    return false;
}

static bool extent_merge(extent_hooks_t *hooks, void *a, size_t a_bytes, void *b, size_t b_bytes, bool committed,
                         unsigned arena)
{
    (void)a_bytes, (void)b_bytes, (void)committed, (void)arena;
    heap *h = heap_of(hooks);
    pthread_mutex_lock(&h->lock);
    const region *r = find_region(h, a);
    bool same = r != NULL && r == find_region(h, b);
    pthread_mutex_unlock(&h->lock);
    return !same;
}

/* commit, decommit and purge are NULL: pinned pages stay, and touching them differently could stop a device. */
static const extent_hooks_t extent_hooks = {
    .alloc = extent_alloc,
    .dalloc = extent_dalloc,
    .destroy = extent_destroy,
    .split = extent_split,
    .merge = extent_merge,
};

/* ---- The table for fsdp_config.pinned ---- */

static void free_heap(heap *h)
{
    if (h->regions != NULL) munmap(h->regions, h->capacity * sizeof *h->regions);
    pthread_mutex_destroy(&h->lock);
    munmap(h, sizeof *h);
}

static void heap_close(void *heap_)
{
    heap *h = heap_;
    fsdp__arena_destroy(h->arena);
    while (h->n_regions > 0) { /* that jemalloc did not hand back whole: none, as far as is known */
        region r = h->regions[--h->n_regions];
        h->source->give(h->source->arg, r.taken, r.taken_bytes);
    }
    free_heap(h);
}

/* No decay: nothing is purged behind the caller's back, by no thread of jemalloc's either. */
static bool settle(heap *h)
{
    size_t limit = GROW_LIMIT;
    ptrdiff_t never = -1;
    (void)fsdp__arena_set(h->arena, "retain_grow_limit", &limit, sizeof limit); /* refused where nothing is retained */
    return fsdp__arena_set(h->arena, "dirty_decay_ms", &never, sizeof never) &&
           fsdp__arena_set(h->arena, "muzzy_decay_ms", &never, sizeof never);
}

static void *heap_open(void *arg, const fsdp_pinned_source *source)
{
    (void)arg;
    heap *h = map(sizeof *h);
    if (h == NULL) return NULL;
    h->hooks = extent_hooks;
    h->source = source;
    atomic_init(&h->counts.allocs, 0);
    atomic_init(&h->counts.frees, 0);
    pthread_mutex_init(&h->lock, NULL);
    if (!fsdp__arena_create(&h->hooks, &h->arena)) {
        free_heap(h);
        return NULL;
    }
    if (settle(h)) return h;
    heap_close(h);
    return NULL;
}

static void *heap_alloc(void *heap_, size_t bytes, size_t alignment)
{
    heap *h = heap_;
    return fsdp__arena_alloc(h->arena, &h->counts, bytes, alignment);
}

static void heap_free(void *heap_, void *ptr, size_t bytes, size_t alignment)
{
    heap *h = heap_;
    fsdp__arena_free(h->arena, &h->counts, ptr, bytes, alignment);
}

static void heap_stats(void *heap_, fsdp_arena_stats *out_stats)
{
    heap *h = heap_;
    fsdp__arena_read(h->arena, &h->counts, out_stats);
    pthread_mutex_lock(&h->lock);
    out_stats->mapped_bytes = h->taken_bytes;
    out_stats->regions = h->n_regions;
    pthread_mutex_unlock(&h->lock);
}

fsdp_pinned_allocator fsdp_jemalloc_pinned(void)
{
    return (fsdp_pinned_allocator){heap_open, heap_close, heap_alloc, heap_free, heap_stats, NULL};
}
