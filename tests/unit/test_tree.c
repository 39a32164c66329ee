/* SPDX-License-Identifier: MIT */
/* The balanced tree against a sorted array: random insertions and removals, every answer compared. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tree.h"
#include "xorshift.h"

enum { MAX_NODES = 512, STEPS = 6000, SEEDS = 8 };

typedef struct item {
    uint64_t key;
    fsdp__tree_node node;
} item;

static item *item_of(fsdp__tree_node *node)
{
    return node != NULL ? (item *)(void *)((char *)node - offsetof(item, node)) : NULL;
}

static bool less_key(const fsdp__tree_node *a, const fsdp__tree_node *b)
{
    const item *x = (const item *)(const void *)((const char *)a - offsetof(item, node));
    const item *y = (const item *)(const void *)((const char *)b - offsetof(item, node));
    return x->key < y->key;
}

/* The same, the plain way. */
typedef struct sorted {
    item *at[MAX_NODES];
    size_t n;
} sorted;

static size_t lower(const sorted *s, uint64_t key)
{
    size_t i = 0;
    while (i < s->n && s->at[i]->key < key) i++;
    return i;
}

static void sorted_insert(sorted *s, item *it)
{
    size_t i = lower(s, it->key);
    memmove(&s->at[i + 1], &s->at[i], (s->n - i) * sizeof(item *));
    s->at[i] = it;
    s->n++;
}

static void sorted_remove(sorted *s, size_t i)
{
    s->n--;
    memmove(&s->at[i], &s->at[i + 1], (s->n - i) * sizeof(item *));
}

static item *first_from(const fsdp__tree *tree, uint64_t key)
{
    item *found = NULL;
    for (fsdp__tree_node *node = tree->root; node != NULL;) {
        if (item_of(node)->key < key) node = node->right;
        else found = item_of(node), node = node->left;
    }
    return found;
}

/* Below node: parents fit, order fits, no child before its parent. Returns the height. */
static int check_shape(const fsdp__tree_node *node, const fsdp__tree_node *parent)
{
    if (node == NULL) return 0;
    assert_ptr_equal(node->parent, parent);
    if (parent != NULL) assert_true(node->priority <= parent->priority);
    if (node->left != NULL) assert_true(less_key(node->left, node));
    if (node->right != NULL) assert_true(less_key(node, node->right));
    int left = check_shape(node->left, node), right = check_shape(node->right, node);
    return 1 + (left > right ? left : right);
}

static void check_all(const fsdp__tree *tree, const sorted *s)
{
    fsdp__tree_node *node = fsdp__tree_first(tree);
    for (size_t i = 0; i < s->n; i++, node = fsdp__tree_next(node)) assert_ptr_equal(item_of(node), s->at[i]);
    assert_null(node);
    check_shape(tree->root, NULL);
}

static void a_tree_answers_as_a_sorted_array(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        static item pool[MAX_NODES];
        sorted s = {.n = 0};
        fsdp__tree tree = {NULL};
        item *unused[MAX_NODES];
        size_t n_unused = MAX_NODES;
        for (size_t i = 0; i < MAX_NODES; i++) unused[i] = &pool[i];
        uint64_t serial = 0, random = seed * 0x9e3779b97f4a7c15ull;
        for (int step = 0; step < STEPS; step++) {
            uint64_t key = xorshift_star(&random) % 4096;
            size_t i = lower(&s, key);
            assert_ptr_equal(first_from(&tree, key), i < s.n ? s.at[i] : NULL);
            bool there = i < s.n && s.at[i]->key == key;
            bool grows = (unsigned)step / 700 % 2 == 0; /* fill up and run down in turns */
            if (!there && n_unused > 0 && (grows || xorshift_star(&random) % 4 == 0)) {
                item *it = unused[--n_unused];
                it->key = key;
                fsdp__tree_insert(&tree, &it->node, serial++, less_key);
                sorted_insert(&s, it);
            } else if (s.n > 0 && (!grows || xorshift_star(&random) % 4 == 0)) {
                if (i == s.n) i = 0;
                fsdp__tree_remove(&tree, &s.at[i]->node);
                unused[n_unused++] = s.at[i];
                sorted_remove(&s, i);
            }
            if (step % 50 == 0 || s.n < 4) check_all(&tree, &s);
        }
        while (s.n > 0) {
            fsdp__tree_remove(&tree, &s.at[s.n / 2]->node);
            sorted_remove(&s, s.n / 2);
            check_all(&tree, &s);
        }
        assert_null(tree.root);
    }
}

/* Keys in order are what a plain tree turns into a list of. The bound is generous: 2^12 nodes stand about 30 high. */
static void keys_in_order_leave_the_tree_flat(void **state)
{
    (void)state;
    static item pool[4096];
    for (int descending = 0; descending < 2; descending++) {
        fsdp__tree tree = {NULL};
        for (uint64_t i = 0; i < 4096; i++) {
            pool[i].key = descending ? 4096 - i : i;
            fsdp__tree_insert(&tree, &pool[i].node, i, less_key);
        }
        assert_in_range(check_shape(tree.root, NULL), 12, 48);
    }
}

static void the_same_calls_make_the_same_shape(void **state)
{
    (void)state;
    static item pool[2][256];
    fsdp__tree tree[2] = {{NULL}, {NULL}};
    for (int t = 0; t < 2; t++) {
        for (uint64_t i = 0; i < 256; i++) {
            pool[t][i].key = i * 37 % 256;
            fsdp__tree_insert(&tree[t], &pool[t][i].node, i, less_key);
        }
        for (int i = 0; i < 256; i += 3) fsdp__tree_remove(&tree[t], &pool[t][i].node);
    }
    for (int i = 0; i < 256; i++) {
        if (i % 3 == 0) continue;
        const fsdp__tree_node *a = pool[0][i].node.parent, *b = pool[1][i].node.parent;
        assert_int_equal(a == NULL, b == NULL);
        if (a == NULL) continue;
        assert_int_equal(((const item *)(const void *)((const char *)a - offsetof(item, node)))->key,
                         ((const item *)(const void *)((const char *)b - offsetof(item, node)))->key);
    }
}

int main(void)
{
    alarm(60);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_tree_answers_as_a_sorted_array),
        cmocka_unit_test(keys_in_order_leave_the_tree_flat),
        cmocka_unit_test(the_same_calls_make_the_same_shape),
    };
    return cmocka_run_group_tests_name("tree", tests, NULL, NULL);
}
