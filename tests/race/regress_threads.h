/* SPDX-License-Identifier: MIT */
/* Of test_alloc_regress: what needs several threads. */
#ifndef FSDP_TESTS_REGRESS_THREADS_H
#define FSDP_TESTS_REGRESS_THREADS_H

void trim_keeps_what_is_freed_while_it_drains(void **state);
void release_waits_until_nobody_drains_the_stream(void **state);
void trim_on_one_thread_and_streams_that_come_and_go_on_another(void **state);
void destroy_on_one_thread_and_streams_that_come_and_go_on_another(void **state);
void while_a_stream_is_released_other_threads_go_on(void **state);
void counters_may_be_asked_for_while_another_thread_allocates(void **state);

#endif
