/* SPDX-License-Identifier: MIT */
/* Rooms, and meeting in them. */
#include "standin_nccl.h"

#include <string.h>
#include <sys/mman.h>

enum { ROOMS = 256 /* then from the start again: tests run one after another */ };

typedef struct house {
    _Atomic uint32_t n_made;
    standin_room room[ROOMS];
} house;

static house *all;

/* Before main, and so before any fork. Pages cost nothing until they are used. */
__attribute__((constructor)) static void open_house(void)
{
    void *shared = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (shared == MAP_FAILED) standin_die("no shared memory of %zu bytes", sizeof *all);
    all = shared;
}

uint32_t standin_room_new(void)
{
    uint32_t number = 1 + atomic_fetch_add(&all->n_made, 1);
    standin_room *room = standin_room_of(number);
    memset(room, 0, offsetof(standin_room, slot));
    return number;
}

standin_room *standin_room_of(uint32_t number) { return &all->room[number % ROOMS]; }

void standin_room_changed(standin_room *room)
{
    atomic_fetch_add_explicit(&room->tick, 1, memory_order_release);
    fsdp__futex_wake_all(&room->tick, true);
}

bool standin_is_over(const standin_way_out *out)
{
    return atomic_load(&out->stopped) || standin_is_broken(out->device);
}

static void nap(standin_room *room, uint32_t seen)
{
    (void)fsdp__futex_wait(&room->tick, seen, fsdp__after_ns(STANDIN_LOOK_NS), true);
}

bool standin_room_meet(standin_room *room, _Atomic uint64_t *count, uint64_t n, const standin_way_out *out)
{
    atomic_fetch_add(count, 1);
    standin_room_changed(room);
    for (;;) {
        uint32_t seen = atomic_load_explicit(&room->tick, memory_order_acquire);
        if (atomic_load(count) >= n) return true;
        if (standin_is_over(out)) return false;
        nap(room, seen);
    }
}

bool standin_room_all(standin_room *room, _Atomic uint64_t *steps, int world, uint64_t step, const standin_way_out *out)
{
    for (;;) {
        uint32_t seen = atomic_load_explicit(&room->tick, memory_order_acquire);
        bool came = true;
        for (int r = 0; r < world; r++) came &= atomic_load_explicit(&steps[r], memory_order_acquire) >= step;
        if (came) return true;
        if (standin_is_over(out)) return false;
        nap(room, seen);
    }
}
