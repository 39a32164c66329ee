/* SPDX-License-Identifier: MIT */
/* Who holds how much. */
#include <stdlib.h>
#include <string.h>

#include "fsdp_memory_svg.h"

static int by_name(const void *a, const void *b)
{
    return strcmp(((const fsdp__snapshot_owner *)a)->name, ((const fsdp__snapshot_owner *)b)->name);
}

int fsdp__snapshot_by_bytes(const void *a, const void *b)
{
    const fsdp__snapshot_owner *left = a, *right = b;
    return left->bytes != right->bytes ? (left->bytes < right->bytes ? 1 : -1) : by_name(a, b);
}

static size_t add_pool(const fsdp__snapshot_pool *pool, fsdp__snapshot_owner *owners, size_t n)
{
    for (size_t s = 0; s < pool->n_segments; s++) {
        const fsdp__snapshot_segment *segment = &pool->segments[s];
        for (size_t i = 0; i < segment->n_pieces; i++)
            if (segment->pieces[i].kind == FSDP__PIECE_LIVE)
                owners[n++] = (fsdp__snapshot_owner){segment->pieces[i].owner, segment->pieces[i].bytes, 1, 0};
    }
    return n;
}

fsdp__snapshot_owner *fsdp__snapshot_owners(const fsdp__snapshot_pool *pools, size_t n_pools, size_t *out_n)
{
    size_t n_pieces = 0, n = 0, kept = 0;
    for (size_t p = 0; p < n_pools; p++) n_pieces += pools[p].n_pieces;
    fsdp__snapshot_owner *owners = calloc(n_pieces + 1, sizeof *owners);
    if (owners == NULL) return NULL;
    for (size_t p = 0; p < n_pools; p++) n = add_pool(&pools[p], owners, n);
    qsort(owners, n, sizeof *owners, by_name);
    for (size_t i = 0; i < n; i++) {
        if (kept > 0 && strcmp(owners[kept - 1].name, owners[i].name) == 0) {
            owners[kept - 1].bytes += owners[i].bytes;
            owners[kept - 1].blocks++;
        } else {
            owners[kept++] = owners[i];
        }
    }
    *out_n = kept;
    return owners;
}
