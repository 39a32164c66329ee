/* SPDX-License-Identifier: MIT */
/* fsdp-memory: what is drawn from a snapshot made by hand, and that no file, however broken, gets more than a sentence. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "svg_assert.h"
#include "tools/fsdp_memory_svg.h"
#include "xorshift.h"

/* Two pools. The first: 10240 bytes in two segments, with a block of each kind. */
static const char sample[] =
    "{\"format\":\"fsdp-memory\",\"version\":1,\"rank\":1,\"world\":4,\"backend\":\"host\",\n"
    "\"streams\":[{\"slot\":0,\"name\":\"gather\"},{\"slot\":3,\"name\":\"compute\"}],\n"
    "\"device\":{\"bytes\":20480,\"peak\":30720,\"pinned\":4096},\n"
    "\"arenas\":{\"host\":null,\"pinned\":{\"allocated\":512,\"active\":4096,\"mapped\":8192,\"regions\":1}},\n"
    "\"pools\":[{\"name\":\"acti<v>ations\",\"model\":null,\"policy\":\"wait "
    "first\",\"budget\":\"18446744073709551615\",\n"
    "\"segment_bytes\":8192,\"stats\":{\"allocated\":5120,\"active\":6144,\"reserved\":10240,\"allocated_peak\":7168,\n"
    "\"active_peak\":8192,\"reserved_peak\":10240,\"allocs\":12,\"frees\":10,\"waits\":3,\"grows\":2,\n"
    "\"trace_hash\":\"12345678901234567890\"},\"segments\":[{\"number\":0,\"bytes\":8192,\"blocks\":[\n"
    "{\"offset\":0,\"bytes\":4096,\"state\":\"live\",\"owner\":\"scores & \\\"co\\\"\",\"stream\":\"compute\",\n"
    "\"until_free\":[\"compute\",\"gather\"],\"uses\":[{\"stream\":\"compute\",\"epoch\":7}]},\n"
    "{\"offset\":4096,\"bytes\":3072,\"state\":\"free\",\"fragments\":[\n"
    "{\"offset\":4096,\"bytes\":1024,\"stream\":\"compute\",\"freed\":9,\"pending\":true,\n"
    "\"clock\":[{\"stream\":\"gather\",\"epoch\":5}]},\n"
    "{\"offset\":5120,\"bytes\":2048,\"stream\":\"compute\",\"freed\":4,\"pending\":false,\"clock\":[]}]},\n"
    "{\"offset\":7168,\"bytes\":1024,\"state\":\"live\",\"owner\":\"\",\"stream\":\"gather\",\"until_free\":[],"
    "\"uses\":[]}]},\n"
    "{\"number\":1,\"bytes\":2048,\"blocks\":[{\"offset\":0,\"bytes\":2048,\"state\":\"free\",\"fragments\":[\n"
    "{\"offset\":0,\"bytes\":2048,\"stream\":\"\",\"freed\":0,\"pending\":false,\"clock\":[]}]}]}],\n"
    "\"history\":{\"kept\":4,\"dropped\":6,\"events\":[\n"
    "{\"n\":6,\"what\":\"grow\",\"bytes\":2048,\"segment\":1,\"offset\":0,\"stream\":\"\",\"owner\":\"\",\"allocated\":"
    "1024,\n"
    "\"reserved\":10240},\n"
    "{\"n\":7,\"what\":\"alloc\",\"bytes\":4096,\"segment\":0,\"offset\":0,\"stream\":\"compute\",\"owner\":\"x\",\n"
    "\"allocated\":5120,\"reserved\":10240},\n"
    "{\"n\":8,\"what\":\"wait\",\"other\":\"copy\",\"bytes\":4096,\"segment\":0,\"offset\":0,\"stream\":\"compute\","
    "\"owner\":\"x\",\n"
    "\"allocated\":5120,\"reserved\":10240},\n"
    "{\"n\":9,\"what\":\"out_of_memory\",\"bytes\":1048576,\"segment\":0,\"offset\":0,\"stream\":\"compute\",\"owner\":"
    "\"big\",\n"
    "\"allocated\":5120,\"reserved\":10240}]}},\n"
    "{\"name\":\"gather\",\"model\":\"gpt\",\"policy\":\"planned\",\"budget\":0,\"segment_bytes\":0,\"stats\":{"
    "\"allocated\":0,\n"
    "\"active\":0,\"reserved\":0,\"allocated_peak\":0,\"active_peak\":0,\"reserved_peak\":0,\"allocs\":0,\"frees\":0,\n"
    "\"waits\":0,\"grows\":0,\"trace_hash\":0},\"segments\":[],\"history\":{\"kept\":0,\"dropped\":0,\"events\":[]}}]}"
    "\n";

typedef struct bench {
    char json[64], svg[80];
    char error[1024];
    fsdp__snapshot snapshot;
} bench;

static int set_up(void **state)
{
    alarm(240);
    bench *b = calloc(1, sizeof *b);
    assert_non_null(b);
    strcpy(b->json, "/tmp/fsdp_memory_XXXXXX");
    int file = mkstemp(b->json);
    assert_true(file >= 0);
    close(file);
    snprintf(b->svg, sizeof b->svg, "%s.svg", b->json);
    *state = b;
    return 0;
}

static int tear_down(void **state)
{
    bench *b = *state;
    fsdp__snapshot_free(&b->snapshot);
    unlink(b->json);
    unlink(b->svg);
    free(b);
    return 0;
}

static void put_file(const char *path, const char *text, size_t n)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
}

/* The caller frees. */
static char *get_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    size_t n = (size_t)ftell(file);
    rewind(file);
    char *text = calloc(n + 1, 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, n, file), n);
    fclose(file);
    return text;
}

static bool read_bytes(bench *b, const char *text, size_t n)
{
    put_file(b->json, text, n);
    memset(b->error, 0, sizeof b->error);
    return fsdp__snapshot_read(b->json, &b->snapshot, b->error, sizeof b->error);
}

/* What is drawn from a text that must be good; the caller frees. */
static char *draw(bench *b, const char *text)
{
    if (!read_bytes(b, text, strlen(text))) fail_msg("%s", b->error);
    assert_true(fsdp__snapshot_draw(&b->snapshot, b->svg));
    fsdp__snapshot_free(&b->snapshot);
    return get_file(b->svg);
}

/* text with the first `from` replaced; the caller frees. */
static char *replaced(const char *text, const char *from, const char *to)
{
    const char *at = strstr(text, from);
    if (at == NULL) fail_msg("not in the sample: %s", from);
    char *out = malloc(strlen(text) + strlen(to) + 1);
    assert_non_null(out);
    sprintf(out, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    return out;
}

/* ---- The picture ---- */

static void blocks_free_ranges_and_events_are_drawn_with_their_words(void **state)
{
    bench *b = *state;
    char *svg = draw(b, sample);
    assert_well_formed(svg);
    static const char *const words[] = {
        "<title>Memory of rank 1 of 4</title>",
        ">acti&lt;v&gt;ations</text>",
        ">scores &amp; \"co\"</text>",
        "scores &amp; \"co\"\n4.00 KiB: 4096 bytes at 0 of segment 0\ntaken for compute\n"
        "used until it is freed by compute, gather\nused by epoch of compute 7</title>",
        "free, pending\n1.00 KiB: 1024 bytes at 4096 of segment 0\ntaken for compute\nready after epoch of gather 5\n"
        "free() number 9\npart of a free range of 3.00 KiB</title>",
        "free\n2.00 KiB: 2048 bytes at 5120 of segment 0",
        "nobody named\n1.00 KiB",
        "free, never used\n2.00 KiB: 2048 bytes at 0 of segment 1</title>",
        ">5.00 KiB allocated, 50.0 % of 10.0 KiB reserved</text>",
        ">1.00 KiB pending</text>",
        ">5.00 KiB free in 2 ranges, the largest 3.00 KiB</text>",
        ">12 allocs, 10 frees, 3 waits, 2 segments taken</text>",
        ">peak 7.00 KiB</text>",
        "<title>grow, event 6\n2.00 KiB</title>",
        "<title>wait, event 8\n4.00 KiB\nowner x\nstream compute\nwaits for copy</title>",
        "<title>out of memory, event 9\n1.00 MiB\nowner big\nstream compute</title>",
        ">(no owner named)  1.00 KiB</text>",
        ">pinned arena, allocated</text>",
        ">model gpt</text>",
        ">no segment</text>",
        ">no history was kept</text>",
    };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strstr(svg, words[i]) == NULL) fail_msg("not in the picture: %s", words[i]);
    assert_null(strstr(svg, "host arena"));
    assert_null(strstr(svg, "<script"));
    free(svg);
}

/* 1422 px for 10240 bytes and a gap of 6 px: 0.13828 px a byte. */
static void blocks_are_drawn_to_scale_and_coloured_by_owner_and_state(void **state)
{
    bench *b = *state;
    char *svg = draw(b, sample);
    static const char *const rects[] = {
        "<rect x=\"150.00\" y=\"252.00\" width=\"566.40\" height=\"34\" fill=\"#9cc5ec\"", /* scores: the largest owner */
        "<rect x=\"716.40\" y=\"252.00\" width=\"141.60\" height=\"34\" fill=\"url(#pending)\"",
        "<rect x=\"858.00\" y=\"252.00\" width=\"283.20\" height=\"34\" fill=\"#ffffff\"",
        "<rect x=\"1141.20\" y=\"252.00\" width=\"141.60\" height=\"34\" fill=\"#8fd6b3\"", /* nobody's */
        "<rect x=\"1288.80\" y=\"252.00\" width=\"283.20\" height=\"34\" fill=\"#eef1f4\"",
        "<rect x=\"716.40\" y=\"289.00\" width=\"424.80\" height=\"4\" fill=\"#2f855a\"",  /* the largest free range */
        "<rect x=\"1288.80\" y=\"289.00\" width=\"283.20\" height=\"4\" fill=\"#dd6b20\"", /* the other */
    };
    for (size_t i = 0; i < sizeof rects / sizeof *rects; i++)
        if (strstr(svg, rects[i]) == NULL) fail_msg("not in the picture: %s", rects[i]);
    size_t n_strips = 0;
    for (const char *at = svg; (at = strstr(at, "height=\"4\"")) != NULL; at++) n_strips++;
    assert_int_equal(n_strips, 2); /* none under what is live */
    free(svg);
}

/* A pool of n blocks of 256 bytes, every third one free, and n events; the caller frees. */
static char *many_blocks(size_t n)
{
    char *text = malloc(420 * n + 4096);
    assert_non_null(text);
    size_t live = (n - n / 3) * 256, used = 0;
    used += (size_t)sprintf(
        text,
        "{\"format\":\"fsdp-memory\",\"version\":1,\"rank\":0,\"world\":1,\"backend\":\"sim\",\"device\":{\"bytes\":%"
        "zu,"
        "\"peak\":%zu,\"pinned\":0},\"arenas\":{},\"pools\":[{\"name\":\"p\",\"model\":null,\"policy\":\"w\","
        "\"budget\":0,"
        "\"segment_bytes\":0,\"stats\":{\"allocated\":%zu,\"active\":%zu,\"reserved\":%zu,\"allocated_peak\":%zu,"
        "\"active_peak\":0,\"reserved_peak\":0,\"allocs\":0,\"frees\":0,\"waits\":0,\"grows\":0},\"segments\":[{"
        "\"number\":0,\"bytes\":%zu,\"blocks\":[",
        n * 256, n * 256, live, live, n * 256, live, n * 256);
    for (size_t i = 0; i < n; i++) {
        used += (size_t)sprintf(text + used, "%s{\"offset\":%zu,\"bytes\":256,", i > 0 ? "," : "", i * 256);
        if (i % 3 != 2)
            used += (size_t)sprintf(
                text + used, "\"state\":\"live\",\"owner\":\"o%zu\",\"stream\":\"\",\"until_free\":[],\"uses\":[]}",
                i % 1000);
        else
            used += (size_t)sprintf(text + used,
                                    "\"state\":\"free\",\"fragments\":[{\"offset\":%zu,\"bytes\":256,\"stream\":\"\","
                                    "\"freed\":1,\"pending\":false,\"clock\":[]}]}",
                                    i * 256);
    }
    used += (size_t)sprintf(text + used, "]}],\"history\":{\"dropped\":0,\"events\":[");
    for (size_t i = 0; i < n; i++)
        used += (size_t)sprintf(
            text + used,
            "%s{\"n\":%zu,\"what\":\"%s\",\"other\":\"\",\"bytes\":1,\"owner\":\"\",\"stream\":\"\",\"allocated\":%zu,"
            "\"reserved\":9}",
            i > 0 ? "," : "", i, fsdp__event_names[i % FSDP__EVENT_KINDS], i % 10);
    sprintf(text + used, "]}}]}");
    return text;
}

static void two_hundred_thousand_blocks_make_a_file_below_three_megabytes(void **state)
{
    bench *b = *state;
    char *text = many_blocks(200000), *svg = draw(b, text);
    assert_well_formed(svg);
    assert_non_null(strstr(svg, " pieces too small to draw\nlive "));
    assert_non_null(strstr(svg, ">988 more  ")); /* of 1000 owners, 12 have a colour */
    assert_true(strlen(svg) < 3000000);
    free(svg);
    free(text);
}

/* ---- Broken files ---- */

static void every_fault_has_its_sentence(void **state)
{
    static const struct {
        const char *from, *to, *sentence;
    } faults[] = {
        {"\"fsdp-memory\"", "\"other\"", "is JSON, but no memory snapshot: \"format\" is not \"fsdp-memory\""},
        {"\"version\":1", "\"version\":2", "has version 2; this program knows version 1"},
        {"\"rank\":1", "\"rank\":-1", "\"rank\" is no count"},
        {"\"rank\":1", "\"rank\":1.5", "\"rank\" is no count"},
        {"\"rank\":1", "\"rank\":1e400", "\"rank\" is no count"},
        {"\"rank\":1", "\"rank\":\"18446744073709551616\"", "\"rank\" is no count"},
        {"\"world\":4", "\"worlds\":4", "\"world\" is missing"},
        {"\"bytes\":20480", "\"bytes\":\"9223372036854775807\"",
         "\"bytes\" is 9223372036854775807 bytes, more than any memory has"},
        {"\"pools\":[", "\"pools\":[7,", "\"pools\" holds something that is no object"},
        {"\"until_free\":[", "\"until_free\":[7,",
         "pool 0: segment 0: block 0: \"until_free\" holds something that is no string"},
        {"\"state\":\"live\"", "\"state\":\"dead\"", "pool 0: segment 0: \"state\" is \"dead\", neither live nor free"},
        {"\"pending\":true", "\"pending\":1", "pool 0: segment 0: block 1: \"pending\" is neither true nor false"},
        {"\"offset\":4096,\"bytes\":3072", "\"offset\":4095,\"bytes\":3072",
         "pool 0: segment 0: block 1: a block begins at 4095, where the one before it ends at 4096"},
        {"\"bytes\":3072", "\"bytes\":3328", "pool 0: segment 0: block 1: its fragments end at 7168, and not at 7424"},
        {"\"bytes\":3072", "\"bytes\":0",
         "pool 0: segment 0: block 1: a block has 0 bytes, where there is room for 1 to 4096"},
        {"\"offset\":7168,\"bytes\":1024", "\"offset\":7168,\"bytes\":1280",
         "pool 0: segment 0: block 2: a block has 1280 bytes, where there is room for 1 to 1024"},
        {"\"number\":1,\"bytes\":2048", "\"number\":1,\"bytes\":2304",
         "pool 0: segment 1: its blocks end at 2048, and not at 2304"},
        {"\"reserved\":10240", "\"reserved\":10241",
         "pool 0: the segments add up to 10240 bytes, where \"reserved\" says 10241"},
        {"\"allocated\":5120", "\"allocated\":5121",
         "pool 0: live blocks add up to 5120 bytes, where \"allocated\" says 5121"},
        {"\"active\":6144", "\"active\":5119", "pool 0: \"active\" is not between \"allocated\" and \"reserved\""},
        {"\"what\":\"wait\"", "\"what\":\"nap\"", "pool 0: event 2: \"what\" is \"nap\", which is no kind of event"},
        {"\"history\":{\"kept\":0", "\"history\":{\"kept\":0,\"events\":7", "pool 1: \"events\" is no array"},
        {"\"rank\":1,", "\"rank\":1,,", "is not JSON: byte "},
    };
    bench *b = *state;
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        char *text = replaced(sample, faults[i].from, faults[i].to), expected[512];
        snprintf(expected, sizeof expected, "%s: %s", b->json, faults[i].sentence);
        assert_false(read_bytes(b, text, strlen(text)));
        if (strncmp(b->error, expected, strlen(expected)) != 0)
            fail_msg("expected \"%s\", not \"%s\"", expected, b->error);
        free(text);
    }
    assert_false(read_bytes(b, "", 0));
    assert_non_null(strstr(b->error, ": is empty"));
    assert_false(read_bytes(b, "\x89PNG\r\n", 6));
    assert_non_null(strstr(b->error, ": is not JSON: byte 0 does not belong there"));
    assert_false(read_bytes(b, "{}\0{}", 5));
    assert_non_null(strstr(b->error, ": is not JSON: byte 2 is zero"));
    assert_false(fsdp__snapshot_read("/tmp", &b->snapshot, b->error, sizeof b->error));
    assert_string_equal(b->error, "/tmp: cannot be read: Is a directory");
}

static void a_file_cut_off_anywhere_is_told_to_be(void **state)
{
    bench *b = *state;
    size_t whole = strlen(sample) - 1; /* without the newline */
    for (size_t n = 1; n < whole; n++) {
        assert_false(read_bytes(b, sample, n));
        if (strstr(b->error, ": is cut off: the JSON is not complete after ") == NULL)
            fail_msg("%zu bytes: %s", n, b->error);
    }
    assert_true(read_bytes(b, sample, whole));
}

static uint64_t random_state;

static size_t random_below(size_t bound) { return (size_t)(xorshift(&random_state) % bound); }

/* One random edit of text, which has room. Returns the new length. */
static size_t mutate(char *text, size_t n)
{
    static const char bytes[] = "{}[],:\"\\0123456789eE.-+ntfu \x01\x7f\xff\xc3";
    static const char *const words[] = {"-1",
                                        "1e999",
                                        "18446744073709551615",
                                        "9007199254740993",
                                        "0",
                                        "null",
                                        "\"\"",
                                        "[]",
                                        "{}",
                                        "true",
                                        "72057594037927936",
                                        "1e-999"};
    size_t at = random_below(n), span = 1 + random_below(40);
    const char *word = words[random_below(sizeof words / sizeof *words)];
    if (span > n - at) span = n - at;
    switch (random_below(4)) {
    case 0: text[at] = bytes[random_below(sizeof bytes)]; return n;
    case 1: memmove(text + at, text + at + span, n - at - span); return n - span;
    case 2: memmove(text + at + span, text + at, n - at); return n + span;
    default: /* a number becomes another one */
        while (at < n && (text[at] < '0' || text[at] > '9')) at++;
        for (span = 0; at + span < n && text[at + span] >= '0' && text[at + span] <= '9';) span++;
        memmove(text + at + strlen(word), text + at + span, n - at - span);
        memcpy(text + at, word, strlen(word));
        return n - span + strlen(word);
    }
}

static void garbage_is_refused_in_one_sentence_or_drawn(void **state)
{
    bench *b = *state;
    const char *given = getenv("FSDP_TEST_SEED");
    random_state = given != NULL ? strtoull(given, NULL, 0) : 0x9e3779b97f4a7c15u;
    print_message("seed: FSDP_TEST_SEED=%" PRIu64 "\n", random_state);
    char text[sizeof sample + 512];
    size_t n_drawn = 0, n_refused = 0;
    for (int i = 0; i < 4000; i++) {
        size_t n = sizeof sample - 1;
        memcpy(text, sample, n);
        for (size_t edits = 1 + random_below(3); edits > 0 && n > 0; edits--) n = mutate(text, n);
        if (read_bytes(b, text, n)) {
            assert_true(fsdp__snapshot_draw(&b->snapshot, b->svg));
            fsdp__snapshot_free(&b->snapshot);
            char *svg = get_file(b->svg);
            assert_well_formed(svg);
            free(svg);
            n_drawn++;
        } else {
            assert_memory_equal(b->error, b->json, strlen(b->json));
            assert_true(strlen(b->error) > strlen(b->json) + 8);
            assert_null(strpbrk(b->error, "\n\r\x01\x7f"));
            assert_null(b->snapshot.pools);
            n_refused++;
        }
    }
    print_message("%zu drawn, %zu refused\n", n_drawn, n_refused);
    assert_true(n_drawn > 100 && n_refused > 1000);
}

/* ---- The program ---- */

/* Run it with arguments; what it printed, both streams, is in *out, which the caller frees. Returns its exit code. */
static int run_tool(bench *b, const char *arguments, char **out)
{
    char command[1024], printed[80];
    snprintf(printed, sizeof printed, "%s.out", b->json);
    snprintf(command, sizeof command, "'%s' %s >%s 2>&1", FSDP_MEMORY_TOOL, arguments, printed);
    int status = system(command);
    assert_true(WIFEXITED(status));
    *out = get_file(printed);
    unlink(printed);
    return WEXITSTATUS(status);
}

static void check_tool(bench *b, const char *arguments, int code, const char *words)
{
    char *out;
    int got = run_tool(b, arguments, &out);
    if (got != code || strstr(out, words) == NULL)
        fail_msg("fsdp-memory %s: exit code %d, \"%s\"; expected %d, \"%s\"", arguments, got, out, code, words);
    if (words[0] == '\0') assert_string_equal(out, "");
    free(out);
}

static void the_program_draws_and_sums_up(void **state)
{
    bench *b = *state;
    char arguments[256], expected[256];
    put_file(b->json, sample, strlen(sample));
    snprintf(expected, sizeof expected, "drawn: %s\n", b->svg);
    check_tool(b, b->json, 0, expected);
    char *svg = get_file(b->svg);
    assert_well_formed(svg);
    check_tool(
        b, b->json, 0,
        "rank 1 of 4, host backend: device 20.0 KiB (peak 30.0 KiB), pinned 4.00 KiB\n"
        "pinned arena: 512 B allocated, 4.00 KiB active, 8.00 KiB mapped\n"
        "acti<v>ations: 5.00 KiB allocated (peak 7.00 KiB) of 10.0 KiB reserved, 1.00 KiB pending, 5.00 KiB free in 2 "
        "ranges, the largest 3.00 KiB\n"
        "      4.00 KiB in 1 block  scores & \"co\"\n"
        "      1.00 KiB in 1 block  (no owner named)\n"
        "gather of model gpt: 0 B allocated (peak 0 B) of 0 B reserved, 0 B pending, 0 B free in 0 ranges, the largest "
        "0 B\n");
    unlink(b->svg);
    snprintf(arguments, sizeof arguments, "%s -o %s", b->json, b->svg);
    check_tool(b, arguments, 0, "");
    char *again = get_file(b->svg);
    assert_string_equal(svg, again);
    free(svg);
    free(again);
}

static void the_program_says_what_is_wrong_and_exits_with_1(void **state)
{
    bench *b = *state;
    char arguments[256], expected[256];
    check_tool(b, "--help", 0, "usage: fsdp-memory SNAPSHOT [-o FILE.svg]\n");
    check_tool(b, "", 1, "usage: fsdp-memory");
    check_tool(b, "a b", 1, "\"b\" is not understood");
    check_tool(b, "a -o", 1, "\"-o\" is not understood");
    check_tool(b, "/no/such/file", 1, "fsdp-memory: /no/such/file: cannot be opened: No such file or directory\n");
    put_file(b->json, sample, 100);
    snprintf(expected, sizeof expected, "fsdp-memory: %s: is cut off: the JSON is not complete after 100 bytes\n",
             b->json);
    check_tool(b, b->json, 1, expected);
    put_file(b->json, sample, strlen(sample));
    snprintf(arguments, sizeof arguments, "%s -o /no/such/x.svg", b->json);
    check_tool(b, arguments, 1, "fsdp-memory: /no/such/x.svg cannot be written: No such file or directory\n");
    if (access("/dev/full", W_OK) != 0) return;
    snprintf(arguments, sizeof arguments, "%s -o /dev/full", b->json);
    check_tool(b, arguments, 1, "fsdp-memory: /dev/full cannot be written: No space left on device\n");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(blocks_free_ranges_and_events_are_drawn_with_their_words),
        TEST(blocks_are_drawn_to_scale_and_coloured_by_owner_and_state),
        TEST(two_hundred_thousand_blocks_make_a_file_below_three_megabytes),
        TEST(every_fault_has_its_sentence),
        TEST(a_file_cut_off_anywhere_is_told_to_be),
        TEST(garbage_is_refused_in_one_sentence_or_drawn),
        TEST(the_program_draws_and_sums_up),
        TEST(the_program_says_what_is_wrong_and_exits_with_1),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
