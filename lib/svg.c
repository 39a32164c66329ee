/* SPDX-License-Identifier: MIT */
#include "svg.h"

#include <stdbool.h>

fsdp__svg_text fsdp__svg_fixed(double value, int decimals, const char *unit)
{
    static const unsigned scale[3] = {1, 10, 100};
    unsigned long long parts = (unsigned long long)(value * scale[decimals] + 0.5);
    fsdp__svg_text out;
    if (decimals == 0) snprintf(out.text, sizeof out.text, "%llu%s", parts, unit);
    else
        snprintf(out.text, sizeof out.text, "%llu.%0*llu%s", parts / scale[decimals], decimals, parts % scale[decimals],
                 unit);
    return out;
}

fsdp__svg_text fsdp__svg_px(double value) { return fsdp__svg_fixed(value, 2, ""); }

fsdp__svg_text fsdp__svg_scaled(double value, const char *unit)
{
    return fsdp__svg_fixed(value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0, unit);
}

fsdp__svg_text fsdp__svg_ns(uint64_t ns)
{
    if (ns < 1000) return fsdp__svg_fixed((double)ns, 0, " ns");
    if (ns < 1000000) return fsdp__svg_scaled((double)ns / 1e3, " µs");
    if (ns < 1000000000) return fsdp__svg_scaled((double)ns / 1e6, " ms");
    return fsdp__svg_scaled((double)ns / 1e9, " s");
}

fsdp__svg_text fsdp__svg_bytes(uint64_t bytes)
{
    if (bytes < 1024) return fsdp__svg_fixed((double)bytes, 0, " B");
    if (bytes < 1 << 20) return fsdp__svg_scaled((double)bytes / 1024, " KiB");
    if (bytes < 1 << 30) return fsdp__svg_scaled((double)bytes / (1 << 20), " MiB");
    return fsdp__svg_scaled((double)bytes / (1 << 30), " GiB");
}

fsdp__svg_text fsdp__svg_percent(uint64_t part, uint64_t whole)
{
    return fsdp__svg_fixed(whole > 0 ? 100.0 * (double)part / (double)whole : 0, 1, " %");
}

size_t fsdp__utf8_bytes(const char *text)
{
    const unsigned char *s = (const unsigned char *)text;
    if (s[0] < 0x80) return s[0] >= 0x20 && s[0] != 0x7f;
    size_t n = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4) return 0;
    for (size_t i = 1; i < n; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    bool too_long = (s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xf0 && s[1] < 0x90);
    bool no_character =
        (s[0] == 0xed && s[1] > 0x9f) || (s[0] == 0xf4 && s[1] > 0x8f) || (s[0] == 0xef && s[1] == 0xbf && s[2] > 0xbd);
    return too_long || no_character ? 0 : n;
}

void fsdp__svg_put(FILE *file, const char *text)
{
    while (*text != '\0') {
        size_t n = fsdp__utf8_bytes(text);
        if (n == 0) fputc('?', file);
        else if (*text == '&') fputs("&amp;", file);
        else if (*text == '<') fputs("&lt;", file);
        else if (*text == '>') fputs("&gt;", file);
        else fwrite(text, 1, n, file);
        text += n > 0 ? n : 1;
    }
}

size_t fsdp__svg_chars(const char *text)
{
    size_t n = 0;
    for (; *text != '\0'; n++) {
        size_t bytes = fsdp__utf8_bytes(text);
        text += bytes > 0 ? bytes : 1;
    }
    return n;
}

double fsdp__svg_width(size_t chars) { return (double)chars * 6.5; }
