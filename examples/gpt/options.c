/* SPDX-License-Identifier: MIT */
/* The command line, by table. */
#include "options.h"

#include <errno.h>
#include <limits.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "data.h"

typedef enum option_kind { WHOLE, REAL, TEXT, FLAG, LINK, ACCUMULATE } option_kind;

typedef struct option_entry {
    const char *name, *value; /* value: what stands for it in the help; NULL for a flag */
    option_kind kind;
    size_t at;        /* in struct options */
    double low, high; /* WHOLE, REAL */
    const char *help;
} option_entry;

#define AT(field) offsetof(options, field)

static const option_entry table[] = {
    {"data", "PATH", TEXT, AT(data), 0, 0,
     "text to learn: a file, or a folder with all that is in it\n"
     "(" DATA_DEFAULT_PATH ")"},
    {"ranks", "N", WHOLE, AT(ranks), 1, 64,
     "ranks, each a thread with streams of its own (4); under mpirun,\n"
     "torchrun or srun ranks are the processes that it starts"},
    {"depth", "K", WHOLE, AT(depth), 0, 64, "how many blocks ahead are gathered; 0: prefetch off (1)"},
    {"layers", "L", WHOLE, AT(layers), 1, 256, "blocks (4)"},
    {"dim", "D", WHOLE, AT(dim), 1, 8192, "channels (128)"},
    {"heads", "H", WHOLE, AT(heads), 1, 128, "attention heads; must divide --dim (4)"},
    {"context", "T", WHOLE, AT(context), 1, 8192, "bytes in a sequence (64)"},
    {"batch", "B", WHOLE, AT(batch), 1, 4096, "sequences a micro-step and rank (4)"},
    {"micro-steps", "N", WHOLE, AT(micro_steps), 1, 65536, "micro-steps a step (1)"},
    {"accumulate", "WAY", ACCUMULATE, AT(keep_full), 0, 0,
     "each: reduce in every micro-step; keep: keep full gradients,\n"
     "reduce in the last (each)"},
    {"steps", "N", WHOLE, AT(steps), 1, 10000000, "steps (400)"},
    {"lr", "X", REAL, AT(lr), 0, 1e3, "learning rate at its highest (0.003)"},
    {"clip", "X", REAL, AT(clip), 0, 1e30,
     "clip the gradient norm to this; 0: never. The norm's last bits\n"
     "depend on the number of ranks, and so do clipped losses' (0)"},
    {"seed", "N", WHOLE, AT(seed), 0, INT_MAX, "first values and order of the text (1)"},
    {"link", "US:MB", LINK, AT(link_us), 0, 0,
     "model a wire between ranks: latency in us, MB/s (no model);\n"
     "with --compare, for the comparison only"},
    {"jitter", "US", WHOLE, AT(jitter_us), 0, 10000000, "delay every operation by a random time below this (0)"},
    {"run-ahead", "0|1", WHOLE, AT(run_ahead), 0, 1, "0: wait for each step's report before the next step (1)"},
    {"plain", NULL, FLAG, AT(plain), 0, 0, "the unsharded loop, without the library: the same losses"},
    {"compare", NULL, FLAG, AT(compare), 0, 0,
     "after training: the first steps again, prefetch off and on, over\n"
     "a modelled link (--link, or one fitted to this machine)"},
    {"timeline", "FILE", TEXT, AT(timeline), 0, 0, "draw one step as SVG"},
    {"losses", "FILE", TEXT, AT(losses), 0, 0, "write the loss of each step, in hexadecimal, a line each"},
    {"poison", NULL, FLAG, AT(poison), 0, 0, "fill buffers with NaN when they are given back"},
    {"sync", NULL, FLAG, AT(sync), 0, 0, "every operation has finished when its call returns"},
    {"json", NULL, FLAG, AT(json), 0, 0,
     "the result as one line of JSON on standard output, all else\n"
     "on standard error"},
    {"quiet", NULL, FLAG, AT(quiet), 0, 0, "no progress"},
    {"help", NULL, FLAG, AT(help), 0, 0, "this"},
};

enum { TABLE_LENGTH = sizeof table / sizeof table[0] };

void options_help(FILE *out)
{
    fprintf(out, "gpt: train a byte-level GPT on sharded ranks (FSDP / ZeRO-3), on this machine's cores.\n\n");
    for (int i = 0; i < TABLE_LENGTH; i++) {
        char left[40];
        snprintf(left, sizeof left, "--%s %s", table[i].name, table[i].value ? table[i].value : "");
        const char *line = table[i].help, *end;
        for (; (end = strchr(line, '\n')) != NULL; line = end + 1, left[0] = '\0')
            fprintf(out, "  %-20s %.*s\n", left, (int)(end - line), line);
        fprintf(out, "  %-20s %s\n", left, line);
    }
}

static const option_entry *find(const char *name, size_t length)
{
    for (int i = 0; i < TABLE_LENGTH; i++)
        if (strlen(table[i].name) == length && strncmp(table[i].name, name, length) == 0) return &table[i];
    return NULL;
}

static bool parse_number(const option_entry *entry, const char *text, double *out, problem *why)
{
    char *end;
    errno = 0;
    const double number = strtod(text, &end);
    const bool whole = entry->kind != WHOLE || (number >= -1e9 && number <= 4e9 && number == (double)(long long)number);
    if (end == text || *end != '\0' || errno != 0 || !whole || !(number >= entry->low && number <= entry->high))
        return problem_set(why, "--%s takes a %s from %.15g to %.15g, not '%s'", entry->name,
                           entry->kind == WHOLE ? "whole number" : "number", entry->low, entry->high, text);
    *out = number;
    return true;
}

static bool parse_link(options *out, const char *text, problem *why)
{
    int used = 0;
    if (sscanf(text, "%d:%d%n", &out->link_us, &out->link_mb_per_s, &used) != 2 || text[used] != '\0' ||
        out->link_us < 0 || out->link_mb_per_s < 0 || out->link_us > 10000000 || out->link_mb_per_s > 10000000)
        return problem_set(why, "--link takes microseconds:megabytes-a-second, such as 100:500, not '%s'", text);
    out->has_link = true;
    return true;
}

static bool parse_value(options *out, const option_entry *entry, const char *text, problem *why)
{
    char *at = (char *)out + entry->at;
    double number = 0.0;
    switch (entry->kind) {
    case WHOLE:
        if (!parse_number(entry, text, &number, why)) return false;
        *(int *)(void *)at = (int)number;
        return true;
    case REAL: return parse_number(entry, text, (double *)(void *)at, why);
    case TEXT: *(const char **)(void *)at = text; return true;
    case FLAG: *(bool *)(void *)at = true; return true;
    case LINK: return parse_link(out, text, why);
    case ACCUMULATE:
        out->keep_full = strcmp(text, "keep") == 0;
        if (out->keep_full || strcmp(text, "each") == 0) return true;
        return problem_set(why, "--accumulate takes 'each' or 'keep', not '%s'", text);
    }
    return true;
}

static bool check_together(const options *o, problem *why)
{
    if (o->dim % o->heads != 0)
        return problem_set(why, "--dim %d cannot be divided among --heads %d; choose heads that divide it", o->dim,
                           o->heads);
    if (4.0 * o->batch * o->context * o->dim > INT_MAX || 4.0 * o->batch * o->context * o->context > INT_MAX)
        return problem_set(why,
                           "--batch %d × --context %d is too much at --dim %d: more than 2^31 activations in one array",
                           o->batch, o->context, o->dim);
    if (o->compare && o->ranks == 1) return problem_set(why, "--compare needs --ranks 2 or more: one rank has no wire");
    if (o->plain && (o->compare || o->timeline))
        return problem_set(why, "--plain has no streams: it goes with neither --compare nor --timeline");
    return true;
}

bool options_parse(options *out, int argc, char **argv, problem *why)
{
    *out = (options){.data = DATA_DEFAULT_PATH,
                     .depth = 1,
                     .layers = 4,
                     .dim = 128,
                     .heads = 4,
                     .context = 64,
                     .batch = 4,
                     .micro_steps = 1,
                     .steps = 400,
                     .seed = 1,
                     .run_ahead = 1,
                     .lr = 0.003};
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i], *name = word + 2, *equals = strchr(word, '=');
        const bool dashed = strncmp(word, "--", 2) == 0;
        const size_t length = !dashed ? 0 : equals ? (size_t)(equals - name) : strlen(name);
        const option_entry *entry = dashed ? find(name, length) : NULL;
        if (!entry) return problem_set(why, "'%s' is no option of gpt; --help lists them", word);
        if (entry->kind == FLAG && equals) return problem_set(why, "--%s takes no value", entry->name);
        const char *text = equals ? equals + 1 : NULL;
        if (entry->kind != FLAG && !text) {
            if (i + 1 == argc) return problem_set(why, "--%s needs a value: %s", entry->name, entry->value);
            text = argv[++i];
        }
        if (!parse_value(out, entry, text, why)) return false;
    }
    return check_together(out, why);
}
