/* SPDX-License-Identifier: MIT */
/* Words and numbers of pictures: whatever a name holds, the file stays XML, and numbers are put together from integers, since
 * printf's decimal point is the caller's locale's. */
#ifndef FSDP_LIB_SVG_H
#define FSDP_LIB_SVG_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct fsdp__svg_text {
    char text[40];
} fsdp__svg_text;

/* value >= 0, with at most 2 decimals. */
fsdp__svg_text fsdp__svg_fixed(double value, int decimals, const char *unit);
/* A coordinate. */
fsdp__svg_text fsdp__svg_px(double value);
/* Three figures. */
fsdp__svg_text fsdp__svg_scaled(double value, const char *unit);
/* "1.50 ms" */
fsdp__svg_text fsdp__svg_ns(uint64_t ns);
/* "1.50 MiB" */
fsdp__svg_text fsdp__svg_bytes(uint64_t bytes);
fsdp__svg_text fsdp__svg_percent(uint64_t part, uint64_t whole);

/* Bytes of the character that text begins with; 0 if it is none of UTF-8 (RFC 3629), or none that XML 1.0 allows. */
size_t fsdp__utf8_bytes(const char *text);
/* Write text, escaped; "?" for each byte that begins no character. */
void fsdp__svg_put(FILE *file, const char *text);
size_t fsdp__svg_chars(const char *text);
/* Of so many characters at 11 px. The reader's font is not known; this is a wide one's mean. */
double fsdp__svg_width(size_t chars);

#endif
