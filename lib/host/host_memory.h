/* SPDX-License-Identifier: MIT */
/* Device memory of the host backend. Between processes it is one file without a name (memfd) a rank: pieces are mapped by
 * their owner, and by peers that read them (host_process.c); the kernel frees it with the last of them, however they end. */
#ifndef FSDP_LIB_HOST_MEMORY_H
#define FSDP_LIB_HOST_MEMORY_H

#include <pthread.h>

#include "fsdp/backend.h"

/* A piece that lives: bytes [offset, offset + bytes) of the file, mapped at ptr. */
typedef struct fsdp__piece {
    char *ptr;
    uint64_t offset, bytes;
} fsdp__piece;

typedef struct fsdp__memory {
    const fsdp_host_allocator *host;
    int file; /* -1: memory is anonymous */
    pthread_mutex_t lock;
    fsdp__piece *piece; /* by address */
    size_t n_pieces, capacity;
    uint64_t end, page;
} fsdp__memory;

/* As ftruncate; beyond this process's limit on file size it fails with EFBIG, where ftruncate would send SIGXFSZ too. */
int fsdp__file_resize(int file, uint64_t bytes);
/* What errno says of memory that is a file. */
void fsdp__file_words(int error, char *text, size_t bytes);

/* Errors: NO_MEMORY (no file can be made). */
fsdp_status fsdp__memory_open(fsdp__memory *memory, const fsdp_host_allocator *host, bool shared);
void fsdp__memory_close(fsdp__memory *memory);
/* Zeroed. Errors: NO_MEMORY, or NO_HOST_MEMORY for pinned memory. */
fsdp_status fsdp__memory_take(fsdp__memory *memory, uint64_t bytes, bool pinned, void **out_ptr);
void fsdp__memory_give(fsdp__memory *memory, void *ptr, uint64_t bytes);
/* The piece of the file in which [ptr, ptr + bytes) lies; false: it is not device memory. */
bool fsdp__memory_find(fsdp__memory *memory, const void *ptr, uint64_t bytes, fsdp__piece *out_piece);

#endif
