/* SPDX-License-Identifier: MIT */
/* Ask before a run whether a model fits: a rank's bytes for published shapes on machines that are not here.
 *
 *     02_will_it_fit [--of GIB] [RANKS…]  default: 8 64 512; --of: what is left of a device of so many GiB, for activations
 *
 * A sim context stands for one rank of a world; the model is registered as for training, and fsdp_model_predict adds up what
 * seal would take, to the byte. Activations are the caller's and not in it. bf16 parameters and gradients, fp32 shards and
 * reduction, AdamW, one unit ahead. */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TRY(call)                                                                      \
    do {                                                                               \
        fsdp_status status_ = (call);                                                  \
        if (status_ != FSDP_OK) {                                                      \
            fprintf(stderr, "%s: %s\n", fsdp_status_name(status_), fsdp_last_error()); \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)

typedef struct shape {
    const char *name;
    uint64_t embed, block, head; /* parameters; head 0: tied, and the embedding is held */
    uint32_t layers;
} shape;

/* Elements from the published configurations: GPT-2's embed is wte and wpe (its final LayerNorm is in the last line of a
 * block here), Llama 3's block is attention, MLP and two norms. */
static const shape shapes[] = {
    {"GPT-2 124M", 50257u * 768 + 1024u * 768, 12u * 768 * 768 + 13u * 768, 0, 12},
    {"GPT-2 1.5B", 50257u * 1600 + 1024u * 1600, 12u * 1600 * 1600 + 13u * 1600, 0, 48},
    {"Llama-3 8B", 128256ull * 4096, 2ull * 4096 * 4096 + 2ull * 4096 * 1024 + 3ull * 4096 * 14336 + 2u * 4096,
     128256ull * 4096 + 4096, 32},
    {"Llama-3 70B", 128256ull * 8192, 2ull * 8192 * 8192 + 2ull * 8192 * 1024 + 3ull * 8192 * 28672 + 2u * 8192,
     128256ull * 8192 + 8192, 80},
};

static void add_unit(fsdp_model *model, const char *name, uint64_t elems, bool held)
{
    fsdp_unit_config config = FSDP_UNIT_CONFIG_INIT;
    config.compute_dtype = config.grad_dtype = FSDP_DTYPE_BF16;
    config.reshard = held ? FSDP_RESHARD_NEVER : FSDP_RESHARD_AFTER_USE;
    fsdp_unit *unit;
    char weight[64];
    snprintf(weight, sizeof weight, "%s.w", name);
    TRY(fsdp_model_add_unit(model, name, &config, &unit));
    TRY(fsdp_unit_add_param(unit, weight, 1, &elems, NULL, NULL));
}

static fsdp_memory predict(const shape *s, uint32_t ranks)
{
    fsdp_sim_config machine = FSDP_SIM_CONFIG_INIT;
    machine.world = ranks;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = fsdp_sim_backend();
    config.backend_config = &machine;
    fsdp_context *ctx;
    fsdp_model *model;
    fsdp_adamw *opt;
    TRY(fsdp_context_create(&config, &ctx));
    TRY(fsdp_model_create(ctx, NULL, &model));
    add_unit(model, "embed", s->embed, s->head == 0);
    for (uint32_t l = 0; l < s->layers; l++) {
        char name[32];
        snprintf(name, sizeof name, "h.%u", l);
        add_unit(model, name, s->block, false);
    }
    if (s->head > 0) add_unit(model, "head", s->head, false);
    TRY(fsdp_adamw_create(model, NULL, &opt));
    fsdp_memory memory = FSDP_MEMORY_INIT;
    TRY(fsdp_model_predict(model, &memory));
    TRY(fsdp_model_destroy(model));
    TRY(fsdp_context_destroy(ctx));
    return memory;
}

static double gib(uint64_t bytes) { return (double)bytes / (double)(1u << 30); }

int main(int argc, char **argv)
{
    static const uint32_t usual[] = {8, 64, 512};
    double of = 0.0;
    if (argc > 2 && strcmp(argv[1], "--of") == 0 && atof(argv[2]) > 0.0) of = atof(argv[2]), argc -= 2, argv += 2;
    uint32_t n_worlds = argc > 1 ? (uint32_t)argc - 1 : 3;
    for (int i = 1; i < argc; i++) {
        if (atoi(argv[i]) > 0) continue;
        fprintf(stderr,
                "usage: 02_will_it_fit [--of GIB] [RANKS…]; other shapes: a line each in the table of its source\n");
        return 2;
    }
    printf("GiB of one rank        ranks   shards  moments  gathered  gradients   scratch     total         bytes");
    if (of > 0.0) printf("  left of %g", of);
    putchar('\n');
    for (size_t m = 0; m < sizeof shapes / sizeof *shapes; m++) {
        uint64_t last = UINT64_MAX;
        for (uint32_t w = 0; w < n_worlds; w++) {
            uint32_t ranks = argc > 1 ? (uint32_t)atoi(argv[w + 1]) : usual[w];
            fsdp_memory b = predict(&shapes[m], ranks);
            printf("%-14s %13u %8.3f %8.3f %9.3f %10.3f %9.3f %9.3f %13llu", shapes[m].name, ranks,
                   gib(b.master + b.gradients), gib(b.moments), gib(b.gather), gib(b.grad), gib(b.scratch),
                   gib(b.total), (unsigned long long)b.total);
            if (of > 0.0 && of >= gib(b.total)) printf(" %12.3f", of - gib(b.total));
            puts(of > 0.0 && of < gib(b.total) ? "   too much" : "");
            uint64_t parts = b.master + b.gradients + b.moments + b.gather + b.grad + b.scratch;
            if (parts != b.total || b.gather < b.gather_live_peak || (argc == 1 && b.total >= last)) {
                fprintf(stderr, "the parts do not add up, or more ranks took more memory\n");
                return 1;
            }
            last = b.total;
        }
    }
    return 0;
}
