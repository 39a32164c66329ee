/* SPDX-License-Identifier: MIT */
/* Calls of captures and replays that found no memory can be made again. On the CPU, by a backend that captures as CUDA does
 * (graphs.h), inside one that fails (faulty.h). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "captured.h"
#include "faulty.h"
#include "graphs.h"
#include "ok.h"

/* The n-th operation of a kind fails in one of these calls, which then can be made again. */
typedef struct shaky {
    faulty f;
    graphs g;
    fsdp_context *ctx;
    captured t;
    fsdp_capture *capture;
    graphs_graph *graph;
    uint64_t n_refused;
} shaky;

static void refuse_nth(shaky *k, faulty_seam seam, uint64_t nth)
{
    faulty_arm(&k->f, seam, FSDP_ERR_NO_HOST_MEMORY, nth, false);
}

/* True: something failed in the call, and it said so. */
static bool failed(shaky *k, fsdp_status status, const char *call)
{
    bool refused = faulty_n_failed(&k->f) > 0;
    refuse_nth(k, FAULTY_RECORD, 0);
    if (status != (refused ? FSDP_ERR_NO_HOST_MEMORY : FSDP_OK))
        fail_msg("%s: %s: %s", call, fsdp_status_name(status), fsdp_last_error());
    k->n_refused += refused;
    return refused;
}

static void take_steps(shaky *k, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        fsdp_adamw_args args = captured_args(k->t.n_steps + 1);
        OK(captured_batch(&k->t, k->t.s));
        OK(captured_step(&k->t, &args));
        k->t.n_steps++;
    }
}

static bool begin_fails(shaky *k, faulty_seam seam, uint64_t nth)
{
    refuse_nth(k, seam, nth);
    if (failed(k, fsdp_capture_begin(k->ctx, k->t.s), "fsdp_capture_begin")) return true;
    fsdp_adamw_args args = captured_args(1);
    graphs_begin(&k->g, k->t.s);
    OK(captured_step(&k->t, &args));
    return false;
}

/* A join that fails ends the capture: nothing has happened, and the model begins anew. */
static bool end_fails(shaky *k, faulty_seam seam, uint64_t nth)
{
    refuse_nth(k, seam, nth);
    if (!failed(k, fsdp_capture_end(k->ctx, k->t.s, &k->capture), "fsdp_capture_end")) {
        k->graph = graphs_end(&k->g, k->t.s);
        return false;
    }
    graphs_destroy(graphs_end(&k->g, k->t.s)); /* NULL: some have not joined */
    k->g.complaint[0] = 0;
    take_steps(k, 1);
    return true;
}

static void replay_shakily(shaky *k, faulty_seam seam)
{
    fsdp_adamw_args args = captured_args(k->t.n_steps + 1);
    uint64_t nth = 0;
    OK(captured_batch(&k->t, k->t.s));
    do refuse_nth(k, seam, ++nth);
    while (failed(k, fsdp_replay(k->capture, 1, &args, k->t.s), "fsdp_replay"));
    OK(graphs_launch(k->graph, k->t.s));
    nth = 0;
    do refuse_nth(k, seam, ++nth);
    while (failed(k, fsdp_replayed(k->capture, k->t.s), "fsdp_replayed"));
    k->t.n_steps++;
}

static uint64_t hash_of(fsdp_model *model)
{
    uint64_t hash = 0;
    OK(fsdp_model_hash(model, &hash));
    return hash;
}

static void open_shaky(shaky *k)
{
    memset(k, 0, sizeof *k);
    graphs_init(&k->g, fsdp_host_backend(), NULL);
    faulty_init(&k->f, graphs_backend(), &k->g);
    fsdp_config c = FSDP_CONFIG_INIT;
    c.backend = faulty_backend();
    c.backend_config = &k->f;
    c.host = faulty_host(&k->f);
    const captured_config config = {.depth = 1, .second = true};
    OK(fsdp_context_create(&c, &k->ctx));
    OK(captured_open(&k->t, &config, k->ctx));
}

static void close_shaky(shaky *k)
{
    fsdp_capture_destroy(k->capture);
    OK(captured_close(&k->t));
    graphs_destroy(k->graph);
    OK(fsdp_context_destroy(k->ctx));
    assert_string_equal(faulty_live(&k->f), "");
    assert_null(graphs_complaint(&k->g));
    faulty_fini(&k->f);
}

static void a_call_that_found_no_memory_can_be_made_again(void **unused)
{
    (void)unused;
    static const faulty_seam seams[] = {FAULTY_HOST_ALLOC, FAULTY_RECORD, FAULTY_WAIT, FAULTY_LAUNCH};
    for (int i = 0; i < 4; i++) {
        shaky k, calm;
        open_shaky(&k);
        take_steps(&k, 1);
        uint64_t nth_end = 0;
        do {
            uint64_t nth = 1;
            while (begin_fails(&k, seams[i], nth)) nth++;
        } while (end_fails(&k, seams[i], ++nth_end));
        for (int n = 0; n < 3; n++) replay_shakily(&k, seams[i]);
        take_steps(&k, 1);
        replay_shakily(&k, seams[i]);
        assert_true(k.n_refused > 2);
        open_shaky(&calm);
        take_steps(&calm, (uint32_t)k.t.n_steps);
        assert_true(hash_of(k.t.model) == hash_of(calm.t.model));
        close_shaky(&calm);
        close_shaky(&k);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_call_that_found_no_memory_can_be_made_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
