/* SPDX-License-Identifier: MIT */
/* Programs for the toy trainer beyond there and back. All are for square shapes. */
#ifndef TOY_PROGRAMS_H
#define TOY_PROGRAMS_H

#include "toy.h"

/* Windows that overlap and nest, forward recomputed inside backward (around it and in it), units read in passing, and a
 * unit that is only read. */
void toy_program_windows(const toy_shape *shape, toy_program *program);
/* Layer 1 three times, layer 2 twice, so that both are reduced more than once in a micro-step. */
void toy_program_again(const toy_shape *shape, toy_program *program);
/* A second stream reads in forward and computes the weights' gradients in backward, while the first goes on. */
void toy_program_two_streams(const toy_shape *shape, toy_program *program);
/* The second stream joins a window of recomputation, and again once a backward window lies in it: for the gradients. */
void toy_program_late_gradients(const toy_shape *shape, toy_program *program);

#endif
