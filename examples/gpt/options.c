/* SPDX-License-Identifier: MIT */
/* The command line, by table. */
#include "options.h"

#include <errno.h>
#include <limits.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "data.h"
#include "gpt_math.h"

typedef enum option_kind { WHOLE, REAL, TEXT, FLAG, LINK, ACCUMULATE, DEVICE, SHAPE } option_kind;

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
     "(" DATA_DEFAULT_PATH ")\n"
     "random: tokens without meaning, to measure with"},
    {"device", "NAME", DEVICE, AT(cuda), 0, 0, "host: this machine's cores; cuda: its GPUs (host)"},
    {"ranks", "N", WHOLE, AT(ranks), 1, 64,
     "ranks, each a thread with streams of its own (4; on GPUs 1); under\n"
     "mpirun, torchrun or srun ranks are the processes that it starts"},
    {"depth", "K", WHOLE, AT(depth), 0, 64, "how many blocks ahead are gathered; 0: prefetch off (1)"},
    {"shape", "NAME", SHAPE, AT(layers), 0, 0,
     "gpt2-124m, gpt2-355m, gpt2-774m or gpt2-1.5b: layers, dim,\n"
     "heads, context 1024, and a vocabulary of 50304 with random data"},
    {"layers", "L", WHOLE, AT(layers), 1, 256, "blocks (4)"},
    {"dim", "D", WHOLE, AT(dim), 1, 8192, "channels (128)"},
    {"heads", "H", WHOLE, AT(heads), 1, 128, "attention heads; must divide --dim (4)"},
    {"context", "T", WHOLE, AT(context), 1, 8192, "bytes in a sequence (64)"},
    {"vocab", "V", WHOLE, AT(vocab), 2, 65536, "with --device cuda and random data: values of a token (256)"},
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
    {"reduce-comm", NULL, FLAG, AT(reduce_comm), 0, 0,
     "a second communicator for reductions, so that they overlap gathers"},
    {"plain", NULL, FLAG, AT(plain), 0, 0, "the unsharded loop, without the library: the same losses"},
    {"compare", NULL, FLAG, AT(compare), 0, 0,
     "after training: the first steps again, prefetch off and on, over\n"
     "a modelled link (--link, or one fitted to this machine)"},
    {"recompute", NULL, FLAG, AT(recompute), 0, 0,
     "with --device cuda: GELU again in backward, not kept: a quarter\n"
     "less memory for activations"},
    {"peak-tflops", "X", REAL, AT(peak_tflops), 1, 1e6,
     "with --device cuda: what MFU is a share of; dense bf16 of H100\n"
     "SXM and H200 by the maker's datasheet (989)"},
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
    fprintf(out, "gpt: train a byte-level GPT on sharded ranks (FSDP / ZeRO-3), on this machine's cores or GPUs.\n\n");
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

static bool parse_device(options *out, const char *text, problem *why)
{
    out->cuda = strcmp(text, "cuda") == 0;
    if (out->cuda || strcmp(text, "host") == 0) return true;
    return problem_set(why, "--device takes 'host' or 'cuda', not '%s'", text);
}

/* The family of GPT-2. */
static bool parse_shape(options *out, const char *text, problem *why)
{
    static const struct {
        const char *name;
        int layers, dim, heads;
    } shapes[] = {{"gpt2-124m", 12, 768, 12},
                  {"gpt2-355m", 24, 1024, 16},
                  {"gpt2-774m", 36, 1280, 20},
                  {"gpt2-1.5b", 48, 1600, 25}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        if (strcmp(text, shapes[i].name) != 0) continue;
        out->layers = shapes[i].layers;
        out->dim = shapes[i].dim;
        out->heads = shapes[i].heads;
        out->context = 1024;
        out->named_shape = true;
        return true;
    }
    return problem_set(why, "--shape takes gpt2-124m, gpt2-355m, gpt2-774m or gpt2-1.5b, not '%s'", text);
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
    case DEVICE: return parse_device(out, text, why);
    case SHAPE: return parse_shape(out, text, why);
    }
    return true;
}

static bool check_together(const options *o, problem *why)
{
    if (o->dim % o->heads != 0)
        return problem_set(why, "--dim %d cannot be divided among --heads %d; choose heads that divide it", o->dim,
                           o->heads);
    if (4.0 * o->batch * o->context * o->dim > INT_MAX ||
        (!o->cuda && 4.0 * o->batch * o->context * o->context > INT_MAX))
        return problem_set(why,
                           "--batch %d × --context %d is too much at --dim %d: more than 2^31 activations in one array",
                           o->batch, o->context, o->dim);
    if (o->compare && o->ranks == 1) return problem_set(why, "--compare needs --ranks 2 or more: one rank has no wire");
    if (!o->cuda && (o->vocab != GPT_VOCAB || o->recompute))
        return problem_set(why, "--vocab and --recompute need --device cuda: the host's kernels know bytes");
    if (!o->random_data && o->vocab != GPT_VOCAB)
        return problem_set(why, "--vocab %d needs --data random: text is bytes, and these have %d values", o->vocab,
                           GPT_VOCAB);
    if (o->cuda && (o->compare || o->has_link))
        return problem_set(why, "--compare and --link model a wire between ranks on the host: not with --device cuda");
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
                     .lr = 0.003,
                     .peak_tflops = 989.0};
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
    out->random_data = strcmp(out->data, "random") == 0;
    if (out->vocab == 0) out->vocab = out->named_shape && out->random_data && out->cuda ? 50304 : GPT_VOCAB;
    return check_together(out, why);
}
