/* SPDX-License-Identifier: MIT */
/* An intrusive balanced tree (a treap whose priorities are a hash of the node's serial number, so that its shape, and the
 * time that it takes, are the same in every run). */
#ifndef FSDP_LIB_TREE_H
#define FSDP_LIB_TREE_H

#include <stdbool.h>
#include <stdint.h>

typedef struct fsdp__tree_node {
    struct fsdp__tree_node *parent, *left, *right;
    uint64_t priority;
} fsdp__tree_node;

typedef bool (*fsdp__tree_less)(const fsdp__tree_node *a, const fsdp__tree_node *b);

typedef struct fsdp__tree {
    fsdp__tree_node *root;
    uint64_t serial;
    fsdp__tree_less less; /* a strict total order: no two nodes are equal */
} fsdp__tree;

void fsdp__tree_insert(fsdp__tree *tree, fsdp__tree_node *node);
void fsdp__tree_remove(fsdp__tree *tree, fsdp__tree_node *node);
/* In order; NULL at the end. */
fsdp__tree_node *fsdp__tree_next(fsdp__tree_node *node);
/* The first node that is not less than key, by tree->less(node, key). */
fsdp__tree_node *fsdp__tree_lower_bound(const fsdp__tree *tree, const fsdp__tree_node *key);

#endif
