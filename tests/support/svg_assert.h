/* SPDX-License-Identifier: MIT */
/* What every picture must be, whatever names it was given. */
#ifndef FSDP_TESTS_SVG_ASSERT_H
#define FSDP_TESTS_SVG_ASSERT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <string.h>

/* Elements nest and close, references are XML's five, and bytes are UTF-8 of characters that XML allows (but for
 * surrogates and overlong forms, which this reader does not tell). */
static inline void assert_well_formed(const char *svg)
{
    char stack[32][16];
    int depth = 0;
    assert_memory_equal(svg, "<?xml", 5);
    for (const char *s = strstr(svg, "?>") + 2; *s != '\0'; s++) {
        unsigned char c = (unsigned char)*s;
        assert_true(c >= 0x20 || c == '\n');
        if (c == '&') assert_true(!strncmp(s, "&amp;", 5) || !strncmp(s, "&lt;", 4) || !strncmp(s, "&gt;", 4));
        if (c >= 0xc0) assert_true(((unsigned char)s[1] & 0xc0) == 0x80);
        if (c >= 0x80 && c < 0xc0) assert_true((unsigned char)s[-1] >= 0x80);
        if (c != '<') continue;
        const char *end = strchr(s, '>');
        assert_non_null(end);
        assert_null(memchr(s + 1, '<', (size_t)(end - s - 1)));
        char name[16] = "";
        sscanf(s + (s[1] == '/' ? 2 : 1), "%15[a-z]", name);
        if (s[1] == '/') {
            assert_true(depth > 0);
            assert_string_equal(stack[--depth], name);
        } else if (end[-1] != '/') {
            assert_true(depth < 32);
            strcpy(stack[depth++], name);
        }
        s = end;
    }
    assert_int_equal(depth, 0);
}

#endif
