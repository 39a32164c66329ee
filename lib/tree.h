/* SPDX-License-Identifier: MIT */
/* An intrusive balanced tree: a treap whose priorities are a hash of a serial number that the caller counts, so that its
 * shape, and the time that it takes, are the same in every run. */
#ifndef FSDP_LIB_TREE_H
#define FSDP_LIB_TREE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fsdp__tree_node {
    struct fsdp__tree_node *parent, *left, *right;
    uint64_t priority;
} fsdp__tree_node;

/* A strict total order: no two nodes are equal. */
typedef bool (*fsdp__tree_less)(const fsdp__tree_node *a, const fsdp__tree_node *b);

typedef struct fsdp__tree {
    fsdp__tree_node *root; /* NULL: empty */
} fsdp__tree;

void fsdp__tree_insert(fsdp__tree *tree, fsdp__tree_node *node, uint64_t serial, fsdp__tree_less less);
void fsdp__tree_remove(fsdp__tree *tree, fsdp__tree_node *node);
/* The first in order; NULL if it is empty. */
fsdp__tree_node *fsdp__tree_first(const fsdp__tree *tree);
/* The next in order; NULL at the end. */
fsdp__tree_node *fsdp__tree_next(fsdp__tree_node *node);

#endif
