/* SPDX-License-Identifier: MIT */
/* The text: reading, splitting, sampling. */
#include "data.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "counter_random.h"

enum { MAX_FOLDERS_DEEP = 16, SEQUENCE_STREAM = 1 << 30 /* beyond every parameter's stream of random numbers */ };

static const size_t most_bytes = (size_t)1 << 30;

typedef struct document {
    uint8_t *text;
    size_t bytes;
} document;

typedef struct library {
    document *documents;
    size_t count, capacity, bytes;
    int duplicates;
} library;

static bool read_all(FILE *file, size_t bytes, document *out, const char *path, problem *why)
{
    out->text = malloc(bytes);
    if (!out->text) return problem_set(why, "no memory for the %zu bytes of %s", bytes, path);
    out->bytes = fread(out->text, 1, bytes, file);
    if (out->bytes == bytes && !ferror(file)) return true;
    free(out->text);
    return problem_set(why, "reading %s gave %zu of %zu bytes", path, out->bytes, bytes);
}

static bool is_known(const library *lib, const document *doc)
{
    for (size_t i = 0; i < lib->count; i++)
        if (lib->documents[i].bytes == doc->bytes && memcmp(lib->documents[i].text, doc->text, doc->bytes) == 0)
            return true;
    return false;
}

static bool keep(library *lib, const document *doc, problem *why)
{
    if (lib->count == lib->capacity) {
        const size_t capacity = lib->capacity ? 2 * lib->capacity : 64;
        document *grown = realloc(lib->documents, capacity * sizeof *grown);
        if (!grown) return problem_set(why, "no memory for %zu documents", capacity);
        lib->documents = grown;
        lib->capacity = capacity;
    }
    lib->documents[lib->count++] = *doc;
    lib->bytes += doc->bytes;
    return true;
}

static bool add_file(library *lib, const char *path, size_t bytes, problem *why)
{
    if (bytes == 0) return true;
    if (bytes > most_bytes - lib->bytes)
        return problem_set(why, "%s would make it more than %zu bytes of text, which is the most", path, most_bytes);
    FILE *file = fopen(path, "rb");
    if (!file) return problem_set(why, "cannot open %s: %s", path, strerror(errno));
    document doc;
    const bool ok = read_all(file, bytes, &doc, path, why);
    fclose(file);
    if (!ok) return false;
    if (is_known(lib, &doc)) {
        lib->duplicates++;
        free(doc.text);
        return true;
    }
    if (keep(lib, &doc, why)) return true;
    free(doc.text);
    return false;
}

static int skip_dots(const struct dirent *entry) { return strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."); }

/* By bytes, not by the locale's order: the same text everywhere. */
static int by_name(const struct dirent **a, const struct dirent **b) { return strcmp((*a)->d_name, (*b)->d_name); }

static bool add_path(library *lib, const char *path, int deep, problem *why);

static bool add_folder(library *lib, const char *path, int deep, problem *why)
{
    if (deep == MAX_FOLDERS_DEEP) return problem_set(why, "%s lies more than %d folders deep", path, MAX_FOLDERS_DEEP);
    struct dirent **entries;
    const int count = scandir(path, &entries, skip_dots, by_name);
    if (count < 0) return problem_set(why, "cannot list %s: %s", path, strerror(errno));
    bool ok = true;
    for (int i = 0; i < count; i++) {
        const size_t room = strlen(path) + strlen(entries[i]->d_name) + 2;
        char *inside = ok ? malloc(room) : NULL;
        if (ok && !inside) ok = problem_set(why, "no memory for a path in %s", path);
        if (ok) {
            snprintf(inside, room, "%s/%s", path, entries[i]->d_name);
            ok = add_path(lib, inside, deep + 1, why);
        }
        free(inside);
        free(entries[i]);
    }
    free(entries);
    return ok;
}

static bool add_path(library *lib, const char *path, int deep, problem *why)
{
    struct stat about;
    /* The path that was asked for may be a link; what lies in a folder may not. */
    if ((deep == 0 ? stat(path, &about) : lstat(path, &about)) != 0)
        return problem_set(why, "no text: %s: %s; give a file or a folder with --data", path, strerror(errno));
    if (S_ISDIR(about.st_mode)) return add_folder(lib, path, deep, why);
    if (S_ISREG(about.st_mode)) return add_file(lib, path, (size_t)about.st_size, why);
    if (deep == 0) return problem_set(why, "%s is neither a file nor a folder", path);
    return true;
}

static bool split(data_set *data, const library *lib, problem *why)
{
    /* One byte more than needed: malloc(0) may be NULL. */
    data->train = malloc(lib->bytes + 1);
    data->held_out = malloc(lib->bytes / 10 + 1);
    if (!data->train || !data->held_out) return problem_set(why, "no memory for %zu bytes of text", lib->bytes);
    for (size_t i = 0; i < lib->count; i++) {
        const document *doc = &lib->documents[i];
        const size_t held = doc->bytes / 10, kept = doc->bytes - held;
        memcpy(data->train + data->train_bytes, doc->text, kept);
        memcpy(data->held_out + data->held_out_bytes, doc->text + kept, held);
        data->train_bytes += kept;
        data->held_out_bytes += held;
    }
    data->documents = (int)lib->count;
    data->duplicates = lib->duplicates;
    return true;
}

bool data_load(data_set *data, const char *path, int context, problem *why)
{
    library lib = {.documents = NULL};
    *data = (data_set){.train = NULL};
    const size_t least = (size_t)context + 1;
    bool ok = add_path(&lib, path, 0, why) && split(data, &lib, why);
    if (ok && (data->train_bytes < least || data->held_out_bytes < least))
        ok = problem_set(why, "%s is too little text: %zu bytes to train on and %zu held out, and a sequence takes %zu",
                         path, data->train_bytes, data->held_out_bytes, least);
    for (size_t i = 0; i < lib.count; i++) free(lib.documents[i].text);
    free(lib.documents);
    if (!ok) data_free(data);
    return ok;
}

void data_free(data_set *data)
{
    free(data->train);
    free(data->held_out);
    *data = (data_set){.train = NULL};
}

static void take(const uint8_t *text, int context, int *tokens, int *targets)
{
    for (int t = 0; t < context; t++) {
        tokens[t] = text[t];
        targets[t] = text[t + 1];
    }
}

data_set data_random(int vocab) { return (data_set){.random_vocab = vocab}; }

static void draw(uint64_t from, int vocab, int context, int *tokens, int *targets)
{
    for (int t = 0; t < context; t++) tokens[t] = (int)(random_mix(from + (uint64_t)t) % (uint64_t)vocab);
    memcpy(targets, tokens + 1, (size_t)(context - 1) * sizeof *targets);
    targets[context - 1] = (int)(random_mix(from + (uint64_t)context) % (uint64_t)vocab);
}

void data_sequence(const data_set *data, uint64_t seed, uint64_t step, uint64_t sequence, int context, int *tokens,
                   int *targets)
{
    if (data->random_vocab > 0) {
        draw(random_bits(seed, SEQUENCE_STREAM + step, sequence), data->random_vocab, context, tokens, targets);
        return;
    }
    const uint64_t places = data->train_bytes - (size_t)context;
    const uint64_t at = random_bits(seed, SEQUENCE_STREAM + step, sequence) % places;
    take(data->train + at, context, tokens, targets);
}

size_t data_windows(const data_set *data, int context) { return (data->held_out_bytes - 1) / (size_t)context; }

void data_window(const data_set *data, size_t window, int context, int *tokens, int *targets)
{
    take(data->held_out + window * (size_t)context, context, tokens, targets);
}
