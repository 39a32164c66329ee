/* SPDX-License-Identifier: MIT */
/* Reads the flight recorder's file back, strictly: every key, in its order, and nothing else. */
#ifndef FLIGHT_FILE_H
#define FLIGHT_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fsdp/flight.h"

typedef struct flight_call {
    int comm; /* -1: a host call, with nothing but number, call, what, enqueued_ns and state */
    uint64_t number, part, of, count, root, enqueued_ns;
    char call[64], what[128], pass[64], dtype[16], state[16];
} flight_call;

typedef struct flight_file {
    uint64_t rank, world, hash[2], n[2];
    char status[32], error[8192];
    uint32_t n_calls;
    flight_call call[FSDP_FLIGHT_CALLS];
} flight_file;

/* False: it is not there, or not as flight.h says; complaint says where. */
bool flight_file_read(const char *path, flight_file *out_file, char *complaint, size_t bytes);
/* The newest entry that is a collective; NULL: none. */
const flight_call *flight_file_last(const flight_file *file);

#endif
