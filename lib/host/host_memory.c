/* SPDX-License-Identifier: MIT */
#include "host_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "check.h"
#include "hostmem.h"

int fsdp__file_resize(int file, uint64_t bytes)
{
    struct rlimit limit;
    if (bytes > INT64_MAX ||
        (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur)) {
        errno = EFBIG;
        return -1;
    }
    return ftruncate(file, (off_t)bytes);
}

void fsdp__file_words(int error, char *text, size_t bytes)
{
    struct rlimit limit;
    if (error == EFBIG && getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        snprintf(text, bytes,
                 "the limit on file size (ulimit -f) is %llu bytes, and memory between processes is a file",
                 (unsigned long long)limit.rlim_cur);
    else if (error == ENOMEM) snprintf(text, bytes, "ENOMEM (the machine, or its limit on address space, is full)");
    else snprintf(text, bytes, "%s", strerror(error));
}

fsdp_status fsdp__memory_open(fsdp__memory *memory, const fsdp_host_allocator *host, bool shared)
{
    *memory = (fsdp__memory){.host = host, .file = -1, .page = (uint64_t)sysconf(_SC_PAGESIZE)};
    if (shared) {
        memory->file = memfd_create("fsdp device memory", MFD_CLOEXEC);
        if (memory->file < 0)
            return fsdp__fail(FSDP_ERR_NO_MEMORY, "host device: memory that other processes can map: memfd_create: %s",
                              strerror(errno));
    }
    pthread_mutex_init(&memory->lock, NULL);
    return FSDP_OK;
}

void fsdp__memory_close(fsdp__memory *memory)
{
    assert(memory->n_pieces == 0);
    if (memory->file >= 0) close(memory->file);
    fsdp__host_free(memory->host, memory->piece, memory->capacity, sizeof *memory->piece);
    pthread_mutex_destroy(&memory->lock);
}

/* Pieces before the first whose address is above ptr. */
static size_t n_up_to(const fsdp__memory *memory, const char *ptr)
{
    size_t low = 0, high = memory->n_pieces;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (memory->piece[middle].ptr <= ptr) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* The lowest offset at which `bytes` are free. */
static uint64_t free_offset(const fsdp__memory *memory, uint64_t bytes)
{
    uint64_t offset = 0;
    for (bool moved = true; moved;) {
        moved = false;
        for (size_t i = 0; i < memory->n_pieces; i++) {
            const fsdp__piece *p = &memory->piece[i];
            if (p->offset + p->bytes <= offset || offset + bytes <= p->offset) continue;
            offset = p->offset + p->bytes;
            moved = true;
        }
    }
    return offset;
}

/* With the lock held: map `bytes` of the file; MAP_FAILED with errno. */
static void *take_of_file(fsdp__memory *memory, uint64_t bytes)
{
    errno = ENOMEM;
    if (!fsdp__host_grow(memory->host, &memory->piece, &memory->capacity, memory->n_pieces + 1, sizeof *memory->piece))
        return MAP_FAILED;
    uint64_t whole = (bytes + memory->page - 1) / memory->page * memory->page, offset = free_offset(memory, whole);
    if (offset + whole > memory->end) {
        if (fsdp__file_resize(memory->file, offset + whole) != 0) return MAP_FAILED;
        memory->end = offset + whole;
    }
    void *ptr = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED, memory->file, (off_t)offset);
    if (ptr == MAP_FAILED) return MAP_FAILED;
    size_t at = n_up_to(memory, ptr);
    memmove(memory->piece + at + 1, memory->piece + at, (memory->n_pieces - at) * sizeof *memory->piece);
    memory->piece[at] = (fsdp__piece){ptr, offset, whole};
    memory->n_pieces++;
    return ptr;
}

fsdp_status fsdp__memory_take(fsdp__memory *memory, uint64_t bytes, bool pinned, void **out_ptr)
{
    void *ptr;
    if (memory->file >= 0) {
        pthread_mutex_lock(&memory->lock);
        ptr = take_of_file(memory, bytes);
        pthread_mutex_unlock(&memory->lock);
    } else {
        ptr = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    if (ptr == MAP_FAILED) {
        char words[160];
        fsdp__file_words(errno, words, sizeof words);
        return fsdp__fail(pinned ? FSDP_ERR_NO_HOST_MEMORY : FSDP_ERR_NO_MEMORY,
                          "host device: mmap of %llu %sbytes failed: %s", (unsigned long long)bytes,
                          pinned ? "pinned " : "", words);
    }
    *out_ptr = ptr;
    return FSDP_OK;
}

void fsdp__memory_give(fsdp__memory *memory, void *ptr, uint64_t bytes)
{
    if (memory->file < 0) {
        munmap(ptr, bytes);
        return;
    }
    pthread_mutex_lock(&memory->lock);
    size_t at = n_up_to(memory, ptr) - 1;
    fsdp__piece piece = memory->piece[at];
    assert(piece.ptr == ptr);
    memory->n_pieces--;
    memmove(memory->piece + at, memory->piece + at + 1, (memory->n_pieces - at) * sizeof *memory->piece);
    munmap(ptr, piece.bytes);
    /* The pages go back now, and whoever gets these bytes next finds zeros, as in new memory. */
    (void)fallocate(memory->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)piece.offset, (off_t)piece.bytes);
    pthread_mutex_unlock(&memory->lock);
}

bool fsdp__memory_find(fsdp__memory *memory, const void *ptr, uint64_t bytes, fsdp__piece *out_piece)
{
    const char *begin = ptr;
    pthread_mutex_lock(&memory->lock);
    size_t n = n_up_to(memory, begin);
    bool found = false;
    if (n > 0) {
        const fsdp__piece *p = &memory->piece[n - 1];
        uint64_t into = (uint64_t)(begin - p->ptr);
        found = into <= p->bytes && bytes <= p->bytes - into;
        if (found) *out_piece = *p;
    }
    pthread_mutex_unlock(&memory->lock);
    return found;
}
