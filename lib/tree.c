/* SPDX-License-Identifier: MIT */
#include "tree.h"

#include "hash.h"

static void replace_child(fsdp__tree *tree, fsdp__tree_node *parent, fsdp__tree_node *old, fsdp__tree_node *new)
{
    if (parent == NULL) tree->root = new;
    else if (parent->left == old) parent->left = new;
    else parent->right = new;
    if (new != NULL) new->parent = parent;
}

/* Lift node over its parent, keeping the order. */
static void rotate_up(fsdp__tree *tree, fsdp__tree_node *node)
{
    fsdp__tree_node *parent = node->parent;
    replace_child(tree, parent->parent, parent, node);
    if (parent->left == node) {
        parent->left = node->right;
        if (node->right != NULL) node->right->parent = parent;
        node->right = parent;
    } else {
        parent->right = node->left;
        if (node->left != NULL) node->left->parent = parent;
        node->left = parent;
    }
    parent->parent = node;
}

void fsdp__tree_insert(fsdp__tree *tree, fsdp__tree_node *node, uint64_t serial, fsdp__tree_less less)
{
    fsdp__tree_node **link = &tree->root, *parent = NULL;
    while (*link != NULL) {
        parent = *link;
        link = less(node, parent) ? &parent->left : &parent->right;
    }
    *node = (fsdp__tree_node){.parent = parent, .priority = fsdp__mix(serial)};
    *link = node;
    while (node->parent != NULL && node->parent->priority < node->priority) rotate_up(tree, node);
}

void fsdp__tree_remove(fsdp__tree *tree, fsdp__tree_node *node)
{
    while (node->left != NULL && node->right != NULL)
        rotate_up(tree, node->left->priority > node->right->priority ? node->left : node->right);
    replace_child(tree, node->parent, node, node->left != NULL ? node->left : node->right);
}

fsdp__tree_node *fsdp__tree_first(const fsdp__tree *tree)
{
    fsdp__tree_node *node = tree->root;
    while (node != NULL && node->left != NULL) node = node->left;
    return node;
}

fsdp__tree_node *fsdp__tree_next(fsdp__tree_node *node)
{
    if (node->right != NULL) {
        node = node->right;
        while (node->left != NULL) node = node->left;
        return node;
    }
    while (node->parent != NULL && node->parent->right == node) node = node->parent;
    return node->parent;
}
