/* SPDX-License-Identifier: MIT */
#include "order_team.h"

/* ---- A rank ---- */

static void keep_log(void *arg, const char *text)
{
    member *m = arg;
    snprintf(m->log, sizeof m->log, "%s", text);
}

void open_context(member *m)
{
    fsdp_host_config host = FSDP_HOST_CONFIG_INIT;
    host.local = m->local;
    host.rank = m->number;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = m->backend;
    config.backend_config = &host;
    config.timeout_ns = m->timeout_ns;
    config.debug = m->debug;
    config.reduce_comm = m->reduce_comm;
    config.log = keep_log, config.log_arg = m;
    char path[sizeof m->path];
    memcpy(path, m->path, sizeof path);
    config.flight_path = path;
    EXPECT_OK(fsdp_context_create(&config, &m->ctx));
    memset(path, 'x', sizeof path - 1); /* it was copied */
    EXPECT_OK(fsdp_stream_create(m->ctx, "compute", &m->s));
}

static int fill(void *arg, const fsdp_param_range *range, void *dst)
{
    (void)arg;
    for (uint64_t i = 0; i < range->count; i++) ((float *)dst)[i] = 1.0f;
    return 0;
}

void open_all(member *m)
{
    open_context(m);
    fsdp_model_config config = FSDP_MODEL_CONFIG_INIT;
    config.depth = m->depth;
    EXPECT_OK(fsdp_model_create(m->ctx, &config, &m->model));
    for (int i = 0; i < UNITS; i++) {
        const uint64_t size = i == 0 ? 100 : 1000; /* h.1 and h.2 are equal */
        char name[16];
        fsdp_unit_config unit = FSDP_UNIT_CONFIG_INIT;
        unit.reshard = FSDP_RESHARD_AFTER_USE;
        snprintf(name, sizeof name, "h.%d", i);
        EXPECT_OK(fsdp_model_add_unit(m->model, name, &unit, &m->unit[i]));
        EXPECT_OK(fsdp_unit_add_param(m->unit[i], name, 1, &size, NULL, NULL));
    }
    EXPECT_OK(fsdp_adamw_create(m->model, NULL, &m->opt));
    EXPECT_OK(fsdp_model_seal(m->model));
    EXPECT_OK(fsdp_model_fill(m->model, fill, NULL, FSDP_DTYPE_FP32));
}

void close_context(member *m)
{
    EXPECT_OK(fsdp_stream_release(m->s));
    EXPECT_OK(fsdp_context_destroy(m->ctx));
}

void close_all(member *m)
{
    EXPECT_OK(fsdp_model_destroy(m->model));
    close_context(m);
}

void keep(member *m, fsdp_status status)
{
    m->status = status;
    snprintf(m->said, sizeof m->said, "%s", status == FSDP_OK ? "" : fsdp_last_error());
}

fsdp_status visit(member *m, uint32_t unit, bool backward)
{
    fsdp_view view = FSDP_VIEW_INIT;
    fsdp_status status =
        backward ? fsdp_backward_begin(m->unit[unit], m->s, &view) : fsdp_forward_begin(m->unit[unit], m->s, &view);
    if (status != FSDP_OK) return status;
    return backward ? fsdp_backward_end(m->unit[unit], m->s) : fsdp_forward_end(m->unit[unit], m->s);
}

fsdp_status all_reduce(member *m, uint64_t count)
{
    return fsdp_all_reduce(fsdp_context_comm(m->ctx), m->data, m->data, count, FSDP_DTYPE_FP32, m->s, NULL);
}

void read_file(member *m, const char *path)
{
    char complaint[256] = "";
    bool read = flight_file_read(path, &m->file, complaint, sizeof complaint);
    if (!read) fprintf(stderr, "%s\n", complaint);
    EXPECT(read);
    EXPECT(m->file.rank == m->number && m->file.world == m->world);
}

bool is_there(const member *m) { return access(m->file_path, F_OK) == 0; }

/* From now on every call says the same; the file was written once. */
void is_dead_with_one_sentence(member *m)
{
    double sum = 1.0;
    uint64_t hash;
    char said[SAID];
    pthread_barrier_wait(m->meet); /* by now every rank has said why */
    EXPECT(fsdp_context_check(m->ctx) == m->status);
    snprintf(said, sizeof said, "%s", fsdp_last_error());
    EXPECT(strstr(m->said, said) != NULL); /* a host call puts its name before */
    snprintf(m->said, sizeof m->said, "%s", said);
    EXPECT(is_there(m));
    read_file(m, m->file_path);
    EXPECT(strcmp(m->file.status, fsdp_status_name(m->status)) == 0);
    EXPECT(strcmp(m->file.error, said) == 0);
    EXPECT(unlink(m->file_path) == 0);
    EXPECT(fsdp_sum_host(m->ctx, &sum, 1) == m->status);
    EXPECT(fsdp_stream_delay(m->s, 1) == m->status && strcmp(fsdp_last_error(), said) == 0);
    if (m->model != NULL) EXPECT(fsdp_model_hash(m->model, &hash) == m->status);
    EXPECT(!is_there(m));
    EXPECT(m->log[0] == '\0');
}

/* ---- Teams ---- */

static void *run_one(void *arg)
{
    member *m = arg;
    m->body(m);
    return NULL;
}

member *team_new(uint32_t world, void (*body)(member *m), const void *arg)
{
    member *team = calloc(world, sizeof *team);
    assert_non_null(team);
    char folder[] = "/tmp/fsdp_order_XXXXXX";
    assert_non_null(mkdtemp(folder));
    for (uint32_t r = 0; r < world; r++) {
        member *m = &team[r];
        m->number = r, m->world = world, m->body = body, m->arg = (void *)(uintptr_t)arg,
        m->timeout_ns = 20 * second_ns;
        snprintf(m->folder, sizeof m->folder, "%s", folder);
        snprintf(m->path, sizeof m->path, "%s/flight", folder);
        snprintf(m->file_path, sizeof m->file_path, "%s/flight.rank%u.json", folder, r);
    }
    return team;
}

void team_run(member *team)
{
    uint32_t world = team->world;
    pthread_t thread[WORLD];
    pthread_barrier_t meet;
    fsdp_local *local;
    assert_int_equal(fsdp_local_create(world, NULL, &local), FSDP_OK);
    pthread_barrier_init(&meet, NULL, world);
    for (uint32_t r = 0; r < world; r++) {
        team[r].local = local, team[r].meet = &meet;
        assert_int_equal(pthread_create(&thread[r], NULL, run_one, &team[r]), 0);
    }
    for (uint32_t r = 0; r < world; r++) pthread_join(thread[r], NULL);
    pthread_barrier_destroy(&meet);
    fsdp_local_destroy(local);
}

/* Nothing is left in the folder. */
void team_free(member *team)
{
    assert_int_equal(rmdir(team->folder), 0);
    free(team);
}

void has(const member *m, const char *part)
{
    if (strstr(m->said, part) == NULL) fail_msg("rank %u: '%s' is not in: %s", m->number, part, m->said);
}
