/* SPDX-License-Identifier: MIT */
#include "room_model.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include "check.h"
#include "host/host_room.h"

/* ---- The room's steps become the model's ---- */

/* Before a step of the room at this line; writes: others can tell whether it was done. */
static void step(int line, bool writes);
static void copy_in_two(int line, void *to, const void *from, size_t n);
static int model_lock(const pthread_mutex_t *lock);
static int model_unlock(const pthread_mutex_t *lock);
static uint64_t model_now_ns(void);
static uint64_t model_after_ns(uint64_t ns);

#undef atomic_load
#undef atomic_store
#undef atomic_fetch_add
#undef atomic_fetch_sub
#undef atomic_fetch_or
#undef atomic_compare_exchange_strong
#undef memcpy
#define atomic_load(p)         (step(__LINE__, false), atomic_load_explicit(p, memory_order_seq_cst))
#define atomic_store(p, v)     (step(__LINE__, true), atomic_store_explicit(p, v, memory_order_seq_cst))
#define atomic_fetch_add(p, v) (step(__LINE__, true), atomic_fetch_add_explicit(p, v, memory_order_seq_cst))
#define atomic_fetch_sub(p, v) (step(__LINE__, true), atomic_fetch_sub_explicit(p, v, memory_order_seq_cst))
#define atomic_fetch_or(p, v)  (step(__LINE__, true), atomic_fetch_or_explicit(p, v, memory_order_seq_cst))
#define atomic_compare_exchange_strong(p, e, v) \
    (step(__LINE__, true), atomic_compare_exchange_strong_explicit(p, e, v, memory_order_seq_cst, memory_order_seq_cst))
#define memcpy(to, from, n)  copy_in_two(__LINE__, to, from, n)
#define pthread_mutex_lock   model_lock
#define pthread_mutex_unlock model_unlock
#define fsdp__now_ns         model_now_ns
#define fsdp__after_ns       model_after_ns
/* Its functions are defined here, so that the linker does not ask the library for them. */
#include "host/host_room.c"
#undef memcpy
#undef pthread_mutex_lock
#undef pthread_mutex_unlock
#undef fsdp__now_ns
#undef fsdp__after_ns

/* ---- Threads ---- */

enum {
    STACK = 128 * 1024,
    MAX_CHOICES = 1 << 16,
    MAX_STEPS = 20000,
    MAX_TRAIL = 32,
    ROOM_BYTES = 1 << 14,
    TIMEOUT_NS = 1000000000
};

typedef struct thread {
    ucontext_t context;
    room_script script;
    bool done, killed;
    int line;                          /* of the room, where it is */
    bool writes;                       /* it is about to */
    const _Atomic uint32_t *sleeps_on; /* NULL: it does not sleep */
    uint64_t deadline_ns;
    const pthread_mutex_t *wants;
    fsdp_status status;
    char sentence[FSDP__SENTENCE_BYTES];
} thread;

/* What may happen next. */
typedef struct option {
    thread *thread; /* goes on; NULL: the victim is killed */
    bool early;     /* its deadline passes */
} option;

static const room_scenario *scenario;
static thread threads[ROOM_THREADS], *now;
static uint32_t n_threads, threads_left[ROOM_WORLD];
static unsigned char stacks[ROOM_THREADS][STACK] __attribute__((aligned(64)));
static ucontext_t home, away; /* where a run began; where a fault leaves to */
static fsdp__room rooms[ROOM_WORLD];
static _Alignas(64) unsigned char shared_memory[ROOM_BYTES];
static bool memory_is_there[ROOM_WORLD][ROOM_MEETINGS]; /* behind an item */
static uint64_t clock_ns, n_steps;
static const pthread_mutex_t *held[ROOM_WORLD];
static bool killed_one, faulty;
static uint32_t n_preempted;

/* The schedule: of n things that could happen, which one did. */
static struct {
    uint8_t taken, n;
} choices[MAX_CHOICES];
static uint32_t n_choices, at_choice;

/* The same in words: where it was not the first. */
static struct {
    uint64_t step;
    const thread *from;
    int line;
    option to;
} trail[MAX_TRAIL];
static uint32_t n_trail;

static char *report;
static size_t report_bytes;

__attribute__((format(printf, 1, 2))) static void put(const char *format, ...)
{
    size_t at = strlen(report);
    va_list args;
    va_start(args, format);
    vsnprintf(report + at, report_bytes - at, format, args);
    va_end(args);
}

static uint32_t index_of(const thread *t) { return (uint32_t)(t - threads); }

static const char *state_of(const thread *t)
{
    return t->killed ? "killed" : t->done ? "done" : t->sleeps_on != NULL ? "asleep" : "running";
}

static void put_trail(void)
{
    put("\nWho runs goes on, and after it the first that can, but for:\n");
    for (uint32_t i = 0; i < n_trail; i++) {
        put("  step %llu: ", (unsigned long long)trail[i].step);
        if (trail[i].from != NULL) put("thread %u before host_room.c:%d; ", index_of(trail[i].from), trail[i].line);
        if (trail[i].to.thread == NULL) put("rank %u is killed\n", scenario->victim);
        else
            put("thread %u %s\n", index_of(trail[i].to.thread),
                trail[i].to.early ? "wakes by its deadline" : "goes on");
    }
    put("It ended at step %llu:\n", (unsigned long long)n_steps);
    for (uint32_t i = 0; i < n_threads; i++)
        put("  thread %u of rank %u: %s, host_room.c:%d, status %d \"%s\"\n", i, threads[i].script.rank,
            state_of(&threads[i]), threads[i].line, (int)threads[i].status, threads[i].sentence);
}

__attribute__((noreturn, format(printf, 1, 2))) static void fault(const char *format, ...)
{
    char what[256];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    report[0] = '\0';
    put("%s: %s", scenario->name, what);
    put_trail();
    faulty = true;
    setcontext(&away);
    abort();
}

/* ---- Who goes on ---- */

static uint32_t choose(uint32_t n)
{
    if (n <= 1) return 0;
    if (at_choice == n_choices) {
        if (n_choices == MAX_CHOICES) fault("too many choices");
        choices[n_choices].taken = 0;
        choices[n_choices++].n = (uint8_t)n;
    }
    if (choices[at_choice].n != n) fault("the search does not repeat itself");
    return choices[at_choice++].taken;
}

static bool lives(const thread *t) { return !t->done && !t->killed; }

static bool can_run(const thread *t)
{
    if (!lives(t) || (t->wants != NULL && held[t->script.rank] == t->wants)) return false;
    return t->sleeps_on == NULL || t->deadline_ns <= clock_ns;
}

static bool is_victim(const thread *t) { return scenario->victim != 0 && t->script.rank == scenario->victim; }

/* The current thread first, if it can go on. */
static uint32_t list_options(option *options)
{
    uint32_t n = 0;
    bool stays = now != NULL && can_run(now), spent = n_preempted >= scenario->preemptions;
    if (stays) options[n++] = (option){now, false};
    for (uint32_t i = 0; i < n_threads && !(stays && spent); i++)
        if (&threads[i] != now && can_run(&threads[i])) options[n++] = (option){&threads[i], false};
    if (n == 0) return 0;
    for (uint32_t i = 0; i < n_threads && scenario->early_deadlines && !spent; i++) {
        thread *t = &threads[i];
        bool waits = lives(t) && t->sleeps_on != NULL;
        if (waits && t->deadline_ns > clock_ns && t->deadline_ns != UINT64_MAX) options[n++] = (option){t, true};
    }
    if (stays && is_victim(now) && now->writes) options[n++] = (option){NULL, false};
    return n;
}

static void kill_victim(void)
{
    killed_one = true;
    for (uint32_t i = 0; i < n_threads; i++) threads[i].killed = is_victim(&threads[i]) && !threads[i].done;
}

/* Nobody can run: to the first deadline. False: all have ended. */
static bool pass_time(void)
{
    uint64_t first_ns = UINT64_MAX;
    bool any = false;
    for (uint32_t i = 0; i < n_threads; i++) {
        const thread *t = &threads[i];
        any = any || lives(t);
        if (lives(t) && t->sleeps_on != NULL && t->deadline_ns < first_ns) first_ns = t->deadline_ns;
    }
    if (any && first_ns == UINT64_MAX) fault("nobody runs, and nobody will: a hang");
    if (any) clock_ns = first_ns;
    return any;
}

static thread *next_thread(void)
{
    option options[2 * ROOM_THREADS + 1];
    for (;;) {
        uint32_t n = list_options(options);
        if (n == 0) {
            if (!pass_time()) return NULL;
            continue;
        }
        bool stays = options[0].thread == now;
        uint32_t i = choose(n);
        option to = options[i];
        if (i > 0 && n_trail < MAX_TRAIL) {
            trail[n_trail].step = n_steps;
            trail[n_trail].from = now;
            trail[n_trail].line = now != NULL ? now->line : 0;
            trail[n_trail++].to = to;
        }
        if (to.thread == NULL) {
            kill_victim();
            continue;
        }
        if (to.early) clock_ns = to.thread->deadline_ns;
        if (to.early || (stays && to.thread != now)) n_preempted++;
        return to.thread;
    }
}

static void switch_over(void)
{
    thread *from = now, *to = next_thread();
    if (to == from) return;
    now = to;
    swapcontext(from != NULL ? &from->context : &home, to != NULL ? &to->context : &home);
}

/* Others may run now; the room's state is as it was before. */
static void step(int line, bool writes)
{
    if (now == NULL) return; /* a room is made, or looked at */
    if (line != 0) now->line = line;
    if (++n_steps > MAX_STEPS) fault("it does not come to an end");
    now->writes = writes;
    switch_over();
    now->writes = false;
}

/* In the middle of a sentence too. */
static void copy_in_two(int line, void *to, const void *from, size_t n)
{
    size_t half = n < 32 ? n / 2 : 16;
    memcpy(to, from, half);
    step(line, true);
    memcpy((char *)to + half, (const char *)from + half, n - half);
}

static int model_lock(const pthread_mutex_t *lock)
{
    step(0, false);
    now->wants = lock;
    while (held[now->script.rank] == lock) switch_over();
    now->wants = NULL;
    held[now->script.rank] = lock;
    return 0;
}

static int model_unlock(const pthread_mutex_t *lock)
{
    (void)lock;
    held[now->script.rank] = NULL;
    return 0;
}

/* ---- In place of host_futex.c and of the clock ---- */

static uint64_t model_now_ns(void) { return clock_ns; }
static uint64_t model_after_ns(uint64_t ns) { return ns > UINT64_MAX - clock_ns ? UINT64_MAX : clock_ns + ns; }

bool fsdp__futex_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t deadline_ns, bool between_processes)
{
    (void)between_processes;
    step(0, false);
    if (atomic_load_explicit(word, memory_order_seq_cst) != seen) return true;
    thread *me = now;
    me->sleeps_on = word;
    me->deadline_ns = deadline_ns;
    while (me->sleeps_on != NULL && me->deadline_ns > clock_ns) switch_over();
    bool in_time = me->sleeps_on == NULL;
    me->sleeps_on = NULL;
    return in_time;
}

void fsdp__futex_wake_all(_Atomic uint32_t *word, bool between_processes)
{
    (void)between_processes;
    step(0, true);
    for (uint32_t i = 0; i < n_threads; i++)
        if (threads[i].sleeps_on == word) threads[i].sleeps_on = NULL;
}

/* ---- What ranks do ---- */

typedef struct my_item {
    uint64_t number, what;
    const bool *memory;
    unsigned char filling[FSDP__ROOM_ITEM_BYTES / 4];
    uint64_t number_again;
} my_item;

static bool same_item(const void *one, const void *other, uint32_t *out_place)
{
    const my_item *a = one, *b = other;
    *out_place = 0;
    uint64_t number = a->number;
    step(0, false);
    if (a->number_again != number || b->number != b->number_again || b->number != number)
        fault("items of two meetings are compared, or half an item");
    return a->what == b->what;
}

static void say_item(const void *item, uint32_t place, char *text, size_t bytes)
{
    (void)place;
    const my_item *it = item;
    if (it->number != it->number_again) fault("half an item is described");
    snprintf(text, bytes, "#%llu item %llu", (unsigned long long)it->number, (unsigned long long)it->what);
}

static const fsdp__room_kind my_kind = {same_item, say_item, sizeof(my_item)};

/* What a rank is told by success: all have come to the meeting, or have ended the phase. */
static void must_be_together(const fsdp__room *room, uint64_t number)
{
    const fsdp__room_shared *sh = room->shared;
    if (atomic_load_explicit(&sh->complete, memory_order_seq_cst) < number ||
        atomic_load_explicit(&sh->phases, memory_order_seq_cst) < room->phases)
        fault("rank %u goes on alone", room->rank);
    for (uint32_t r = 0; r < room->world; r++)
        if (atomic_load_explicit(&sh->slot[r].arrived, memory_order_seq_cst) < number ||
            atomic_load_explicit(&sh->slot[r].synced, memory_order_seq_cst) < room->phases)
            fault("rank %u goes on before rank %u", room->rank, r);
}

static void read_peers(const fsdp__room *room, uint64_t number)
{
    must_be_together(room, number);
    for (uint32_t r = 0; r < room->world; r++) {
        const my_item *it = fsdp__room_item(room, r);
        if (it->number != number) fault("rank %u reads an item of another meeting", room->rank);
        step(0, false);
        if (it->number_again != number) fault("rank %u reads an item that is being written", room->rank);
        for (int twice = 0; twice < 2 && !scenario->processes; twice++) {
            if (!*it->memory) fault("rank %u reads what rank %u has already got back", room->rank, r);
            step(0, false);
        }
    }
}

static fsdp_status meet(fsdp__room *room, uint32_t m)
{
    uint64_t start_ns, end_ns, number = m + 1;
    bool two = scenario->two_phases >> m & 1, odd = (scenario->differs >> m & 1) && scenario->odd == room->rank;
    my_item item = {
        .number = number, .what = odd ? 2 : 1, .memory = &memory_is_there[room->rank][m], .number_again = number};
    FSDP_TRY(fsdp__room_enter(room, number, &item, TIMEOUT_NS, &start_ns));
    read_peers(room, number);
    FSDP_TRY(fsdp__room_sync(room, two));
    if (two) {
        read_peers(room, number);
        FSDP_TRY(fsdp__room_sync(room, false));
    }
    must_be_together(room, number);
    memory_is_there[room->rank][m] = false;
    return fsdp__room_leave(room, start_ns, &end_ns);
}

static void run_thread(int index)
{
    thread *t = &threads[index];
    fsdp__room *room = &rooms[t->script.rank];
    if (t->script.does == FAILS)
        t->status = fsdp__room_fail(room, FSDP_ERR_ABORTED, "rank %u, thread %d fails", room->rank, index);
    for (uint32_t m = 0; m < ROOM_MEETINGS && t->status == FSDP_OK; m++) {
        if (!((unsigned)t->script.does >> m & 1)) continue;
        t->status = meet(room, m);
        memory_is_there[room->rank][m] = false; /* after an error too its owner may free it */
    }
    if (t->status != FSDP_OK) snprintf(t->sentence, sizeof t->sentence, "%s", fsdp_last_error());
    if (--threads_left[room->rank] == 0 && (scenario->quits >> room->rank & 1)) fsdp__room_quit(room);
    t->done = true;
    switch_over();
    abort(); /* nobody comes back to it */
}

/* ---- What must hold in the end ---- */

/* "…: ranks 1, 2 of 3 …". Who slept when the victim died before it could wake them is late too. */
static bool names_rank(const char *sentence, uint32_t rank)
{
    const char *names = strstr(sentence, ": rank"), digit[] = {(char)('0' + rank), '\0'};
    if (names == NULL) return false;
    const char *end = strstr(names, " of ");
    return end != NULL && names + strcspn(names, digit) < end;
}

/* first: another that failed. */
static void check_failed(const thread *t, const thread *first)
{
    if (first->status != t->status || strcmp(first->sentence, t->sentence) != 0) fault("two sentences");
    if (strlen(t->sentence) < 10) fault("half a sentence");
    if (t->status != FSDP_ERR_RANK_LOST) return;
    bool any = false;
    for (uint32_t r = 0; r < scenario->world; r++) any = any || names_rank(t->sentence, r);
    if (!any) fault("nobody is named");
    if (killed_one && !scenario->early_deadlines && !names_rank(t->sentence, scenario->victim))
        fault("the victim is not named");
}

static void check_end(void)
{
    const thread *first = NULL;
    const fsdp__room_shared *sh = rooms[0].shared;
    bool failed = atomic_load_explicit(&sh->failure, memory_order_seq_cst) != 0, somebody_aborts = false;
    for (uint32_t i = 0; i < n_threads; i++) {
        const thread *t = &threads[i];
        somebody_aborts = somebody_aborts || t->script.does == FAILS;
        if (t->killed || t->status == FSDP_OK) continue;
        if (first == NULL) first = t;
        check_failed(t, first);
    }
    if (first != NULL && !failed) fault("a failure of nobody");
    if (failed && !scenario->may_fail && !killed_one) fault("it failed");
    if (killed_one) return;
    if (atomic_load_explicit(&sh->n_waiting, memory_order_seq_cst) != 0) fault("n_waiting is left");
    if (scenario->early_deadlines) return;
    if (clock_ns >= TIMEOUT_NS) fault("told by a deadline alone");
    if (scenario->differs != 0 && !somebody_aborts && (first == NULL || first->status != FSDP_ERR_MISMATCH))
        fault("no mismatch");
}

/* ---- The search ---- */

static void start_room(void)
{
    memset(shared_memory, 0, sizeof shared_memory);
    if (fsdp__room_shared_bytes(scenario->world) > sizeof shared_memory) fault("ROOM_BYTES are too few");
    fsdp__room_shared *sh = (fsdp__room_shared *)(void *)shared_memory;
    for (uint32_t r = 0; r < scenario->world; r++) {
        threads_left[r] = 0;
        held[r] = NULL;
        fsdp__room_init(&rooms[r], sh, &my_kind, r, scenario->world, scenario->processes, TIMEOUT_NS);
        for (uint32_t m = 0; m < ROOM_MEETINGS; m++) memory_is_there[r][m] = true;
    }
}

static void start_threads(void)
{
    for (n_threads = 0; n_threads < ROOM_THREADS && scenario->thread[n_threads].does != 0; n_threads++) {
        thread *t = &threads[n_threads];
        t->script = scenario->thread[n_threads];
        t->done = t->killed = t->writes = false;
        t->line = 0;
        t->sleeps_on = NULL;
        t->wants = NULL;
        t->status = FSDP_OK;
        t->sentence[0] = '\0';
        threads_left[t->script.rank]++;
        getcontext(&t->context);
        t->context.uc_stack.ss_sp = stacks[n_threads];
        t->context.uc_stack.ss_size = STACK;
        t->context.uc_link = NULL;
        makecontext(&t->context, (void (*)(void))run_thread, 1, (int)n_threads);
    }
}

static void run_once(void)
{
    clock_ns = 1000;
    killed_one = false;
    n_preempted = n_trail = at_choice = 0;
    n_steps = 0;
    now = NULL;
    getcontext(&away);
    if (faulty) return;
    start_room();
    start_threads();
    switch_over();
    check_end();
}

static bool next_schedule(void)
{
    while (n_choices > 0) {
        if (++choices[n_choices - 1].taken < choices[n_choices - 1].n) return true;
        n_choices--;
    }
    return false;
}

bool room_model_search(const room_scenario *s, room_count *count, char *text, size_t bytes)
{
    scenario = s;
    report = text;
    report_bytes = bytes;
    n_choices = 0;
    faulty = false;
    do {
        run_once();
        count->n_schedules++;
        count->n_steps += n_steps;
    } while (!faulty && next_schedule());
    return !faulty;
}
