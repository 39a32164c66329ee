/* SPDX-License-Identifier: MIT */
/* What srun's variables come to, with its lists of nodes and of tasks. */
#include <stdbool.h>
#include <string.h>

#include "launch_rig.h"

#define STEP_THREE                                                                                                    \
    JOB "SLURM_PROCID=4 SLURM_STEP_NUM_TASKS=5 SLURM_NTASKS=9 SLURM_LOCALID=0 SLURM_NODEID=2 SLURM_STEP_NUM_NODES=3 " \
        "SLURM_STEP_TASKS_PER_NODE=2(x2),1 SLURM_STEP_NODELIST=node[09-10,12] SLURM_JOB_NODELIST=node[01-12] "

static void slurm_counts_within_a_step_only(void **state)
{
    (void)state;
    static const row rows[] = {
        {STEP_ONE, "Slurm 1 of 4, here 1 of 4, at @fsdp-7-NONCE:0"},
        {STEP_ONE MASTER, "Slurm 1 of 4, here 1 of 4, at host:29501"},
        {STEP_THREE, "Slurm 4 of 5, here 0 of 1, at node09:PORT"},
        {STEP_THREE "FSDP_PORT=7000", "Slurm 4 of 5, here 0 of 1, at node09:7000"},
        {STEP_THREE MASTER, "Slurm 4 of 5, here 0 of 1, at host:29501"},
        {JOB "SLURM_PROCID=0 SLURM_NTASKS=1", "Slurm 0 of 1, here 0 of 1, at :0"},
        {JOB "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_STEP_NUM_NODES=1",
         "Slurm 1 of 2, here 1 of 2, at @fsdp-7-NONCE:0"},
        /* A batch script's own environment; salloc's shell, as a step of its own. */
        {"SLURM_JOB_ID=4711 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=8",
         "none 0 of 1, here 0 of 1, at :0"},
        {"SLURM_JOB_ID=4711 SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_NTASKS=8", "none 0 of 1, here 0 of 1, at :0"},
        {"SLURM_JOB_ID=4711 SLURM_STEP_ID=0 SLURM_NTASKS=8", "none 0 of 1, here 0 of 1, at :0"},
    };
    CHECK(rows);
}

#define STEP_TWO(job, step, rank, node)                              \
    "SLURM_JOB_ID=" job " SLURM_STEP_ID=" step " SLURM_PROCID=" rank \
    " SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NODEID=" node " SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_STEP_NODELIST=n[1-2]"

static void slurm_steps_meet_at_ports_of_their_own(void **state)
{
    (void)state;
    static const char *const lines[] = {STEP_TWO("11", "0", "0", "0"), STEP_TWO("11", "0", "1", "1"),
                                        STEP_TWO("11", "1", "0", "0"), STEP_TWO("12", "0", "0", "0")};
    fsdp_launch at[4];
    for (int i = 0; i < 4; i++) {
        assert_int_equal(read_line(lines[i], "", &at[i]), FSDP_OK);
        assert_string_equal(at[i].address, "n1");
        assert_in_range(at[i].port, 20000, 29999);
    }
    assert_int_equal(at[0].port, at[1].port);
    assert_true(at[0].nonce == at[1].nonce);
    assert_int_not_equal(at[0].port, at[2].port);
    assert_int_not_equal(at[0].port, at[3].port);
    assert_int_not_equal(at[2].port, at[3].port);
}

static void slurm_yields_to_what_it_started(void **state)
{
    (void)state;
    static const row rows[] = {
        {STEP_THREE ONE_MACHINE "PMIX_NAMESPACE=a", "Open MPI 1 of 4, here 1 of 4, at @fsdp-7-NONCE:0"},
        {STEP_THREE HYDRA_4, "MPICH 1 of 4, here 1 of 4, at @fsdp-7-NONCE:0"},
        {STEP_ONE "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 " MASTER,
         "env 0 of 2, here 0 of 1, at host:29501"},
        {STEP_ONE "RANK=1 WORLD_SIZE=4", "Slurm 1 of 4, here 1 of 4, at @fsdp-7-NONCE:0"},
        {STEP_ONE "RANK=1 WORLD_SIZE=4 LOCAL_RANK=0",
         "LOCAL_RANK and LOCAL_WORLD_SIZE contradict Slurm: unset them; seen: RANK=1, WORLD_SIZE=4, LOCAL_RANK=0, "
         "SLURM_JOB_ID=4711, SLURM_STEP_ID=0, SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=4, SLURM_NTASKS=4, SLURM_LOCALID=1, "
         "SLURM_NODEID=0, SLURM_STEP_NUM_NODES=1, SLURM_STEP_TASKS_PER_NODE=4, SLURM_STEP_NODELIST=n07; not set: "
         "LOCAL_WORLD_SIZE"},
        /* srun's own PMI, whole and in part; of another job: Hydra's. */
        {STEP_ONE "PMI_RANK=1 PMI_SIZE=4 PMI_JOBID=4711.0", "Slurm 1 of 4, here 1 of 4, at @fsdp-7-NONCE:0"},
        {STEP_ONE "PMI_RANK=1", "Slurm 1 of 4, here 1 of 4, at @fsdp-7-NONCE:0"},
        {STEP_ONE "PMI_ID=1 PMI_PORT=x", "Slurm 1 of 4, here 1 of 4, at @fsdp-7-NONCE:0"},
        {STEP_ONE "PMI_RANK=0",
         "PMI_RANK without PMI_SIZE; seen: PMI_RANK=0; not set: PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS"},
        {STEP_ONE HYDRA_4, "MPICH 1 of 4, here 1 of 4, at @fsdp-7-NONCE:0"},
    };
    CHECK(rows);
}

#define SEEN_JOB "; seen: SLURM_JOB_ID=4711, SLURM_STEP_ID=0, "

static void an_odd_step_is_refused(void **state)
{
    (void)state;
    static const row rows[] = {
        {JOB "SLURM_PROCID=1",
         "SLURM_PROCID without SLURM_NTASKS" SEEN_JOB
         "SLURM_PROCID=1; not set: SLURM_STEP_NUM_TASKS, SLURM_NTASKS, SLURM_LOCALID, SLURM_NODEID, "
         "SLURM_STEP_NUM_NODES, SLURM_STEP_TASKS_PER_NODE, SLURM_STEP_NODELIST"},
        {JOB "SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=2", "SLURM_PROCID=2 is not below SLURM_STEP_NUM_TASKS=2" SEEN_JOB
                                                      "SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=2; not set: SLURM_NTASKS, "
                                                      "SLURM_LOCALID, SLURM_NODEID, SLURM_STEP_NUM_NODES, "
                                                      "SLURM_STEP_TASKS_PER_NODE, SLURM_STEP_NODELIST"},
        {"SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1",
         "SLURM_JOB_ID is missing; seen: SLURM_STEP_ID=0, SLURM_PROCID=0, SLURM_NTASKS=1; not set: SLURM_JOB_ID, "
         "SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_NODEID, SLURM_STEP_NUM_NODES, SLURM_STEP_TASKS_PER_NODE, "
         "SLURM_STEP_NODELIST"},
        {JOB "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_STEP_NUM_NODES=2",
         "SLURM_STEP_TASKS_PER_NODE is missing, and there are 2 nodes" SEEN_JOB
         "SLURM_PROCID=0, SLURM_NTASKS=2, SLURM_LOCALID=0, SLURM_STEP_NUM_NODES=2; not set: SLURM_STEP_NUM_TASKS, "
         "SLURM_NODEID, SLURM_STEP_TASKS_PER_NODE, SLURM_STEP_NODELIST"},
        {JOB "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=3",
         "SLURM_STEP_TASKS_PER_NODE sums up to 3 tasks, SLURM_NTASKS is 4" SEEN_JOB
         "SLURM_PROCID=0, SLURM_NTASKS=4, SLURM_LOCALID=0, SLURM_NODEID=0, SLURM_STEP_TASKS_PER_NODE=3; not set: "
         "SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES, SLURM_STEP_NODELIST"},
        {JOB "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_NODEID=2 SLURM_STEP_TASKS_PER_NODE=2(x2)",
         "SLURM_STEP_TASKS_PER_NODE has no count for node 2" SEEN_JOB
         "SLURM_PROCID=0, SLURM_NTASKS=4, SLURM_LOCALID=0, SLURM_NODEID=2, SLURM_STEP_TASKS_PER_NODE=2(x2); not set: "
         "SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES, SLURM_STEP_NODELIST"},
        {JOB "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE=2(x2)",
         "SLURM_NODEID is missing" SEEN_JOB "SLURM_PROCID=0, SLURM_NTASKS=4, SLURM_LOCALID=0, "
         "SLURM_STEP_TASKS_PER_NODE=2(x2); not set: SLURM_STEP_NUM_TASKS, "
         "SLURM_NODEID, SLURM_STEP_NUM_NODES, SLURM_STEP_NODELIST"},
        {JOB "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=2 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=2(x2)",
         "SLURM_LOCALID=2 is not below the 2 tasks of this node" SEEN_JOB
         "SLURM_PROCID=0, SLURM_NTASKS=4, SLURM_LOCALID=2, SLURM_NODEID=0, SLURM_STEP_TASKS_PER_NODE=2(x2); not set: "
         "SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES, SLURM_STEP_NODELIST"},
        {JOB "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=2(x2)",
         "no list of nodes: set MASTER_ADDR and MASTER_PORT" SEEN_JOB
         "SLURM_PROCID=0, SLURM_NTASKS=4, SLURM_LOCALID=0, SLURM_NODEID=0, SLURM_STEP_TASKS_PER_NODE=2(x2); not set: "
         "SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES, SLURM_STEP_NODELIST, MASTER_ADDR, MASTER_PORT"},
        {JOB "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=1(x2) "
             "SLURM_JOB_NODELIST=n[1-",
         "SLURM_JOB_NODELIST is not a list of nodes; set MASTER_ADDR and MASTER_PORT" SEEN_JOB
         "SLURM_PROCID=0, SLURM_NTASKS=2, SLURM_LOCALID=0, SLURM_NODEID=0, SLURM_STEP_TASKS_PER_NODE=1(x2), "
         "SLURM_JOB_NODELIST=n[1-; not set: SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES, SLURM_STEP_NODELIST, "
         "MASTER_ADDR, "
         "MASTER_PORT"},
        {JOB "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=1(x2) "
             "SLURM_STEP_NODELIST=n[1-2]",
         "rank 0 is not on the first node (n1): set MASTER_ADDR and MASTER_PORT" SEEN_JOB
         "SLURM_PROCID=0, SLURM_NTASKS=2, SLURM_LOCALID=0, SLURM_NODEID=1, SLURM_STEP_TASKS_PER_NODE=1(x2), "
         "SLURM_STEP_NODELIST=n[1-2]; not set: SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES, MASTER_ADDR, MASTER_PORT"},
    };
    CHECK(rows);
}

static void the_first_host_of_a_list_is_found(void **state)
{
    (void)state;
    static const row rows[] = {
        {"node1", "node1"},
        {"a,b", "a"},
        {"node[01-04,07],x3", "node01"},
        {"node[007,001-004]", "node007"},
        {"x3,node[01-04]", "x3"},
        {"rack[2-3]node[08-16]-ib", "rack2node08-ib"},
        {"node[1-2].cluster.example.org", "node1.cluster.example.org"},
        {"[10-11]a", "10a"},
        {"n[5]", "n5"},
        {"n[5],", ""},
        {",n5", ""},
        {"", ""},
        {"n[", ""},
        {"n[]", ""},
        {"n[1", ""},
        {"n[1-", ""},
        {"n[1-]", ""},
        {"n[2-1]", ""},
        {"n[1,]", ""},
        {"n[a-b]", ""},
        {"n[1[2]]", ""},
        {"n]", ""},
        {"n[1-2],m[", ""},
        {"n[99999999999999999999]", ""},
        {"a b", ""},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char host[64] = "";
        bool found = fsdp__slurm_first_host(rows[i].line, host, sizeof host);
        if (found != (rows[i].expected[0] != '\0') || (found && strcmp(host, rows[i].expected) != 0))
            fail_msg("'%s' gives '%s', expected '%s'", rows[i].line, found ? host : "", rows[i].expected);
    }
    char four[5];
    assert_true(fsdp__slurm_first_host("n[001]", four, sizeof four));
    assert_string_equal(four, "n001");
    assert_false(fsdp__slurm_first_host("n[0001]", four, sizeof four));
}

static void tasks_a_node_are_counted(void **state)
{
    (void)state;
    uint32_t here = 0;
    uint64_t all = 0;
    static const uint32_t expected[] = {2, 2, 2, 1, 7};
    for (uint32_t node = 0; node < 5; node++) {
        assert_true(fsdp__slurm_tasks("2(x3),1,7", node, &here, &all));
        assert_int_equal(here, expected[node]);
        assert_int_equal(all, 14);
    }
    static const char *const bad[] = {"",
                                      "x",
                                      "2(x",
                                      "2(x3",
                                      "2(3)",
                                      "2,",
                                      ",2",
                                      "2(x0)",
                                      "2(x3)1",
                                      "2 (x3)",
                                      "-2",
                                      "4294967296",
                                      "1(x4294967295),1"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (fsdp__slurm_tasks(bad[i], 0, &here, &all)) fail_msg("'%s' is taken for a list", bad[i]);
    }
    assert_false(fsdp__slurm_tasks("2(x3),1,7", 5, &here, &all));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slurm_counts_within_a_step_only),   cmocka_unit_test(slurm_steps_meet_at_ports_of_their_own),
        cmocka_unit_test(slurm_yields_to_what_it_started),   cmocka_unit_test(an_odd_step_is_refused),
        cmocka_unit_test(the_first_host_of_a_list_is_found), cmocka_unit_test(tasks_a_node_are_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
