/* SPDX-License-Identifier: MIT */
/* Starting a thread of the library's own. Signals are the program's: none is delivered on it. */
#ifndef FSDP_LIB_THREAD_H
#define FSDP_LIB_THREAD_H

#include <pthread.h>
#include <signal.h>
#include <stddef.h>

/* pthread_create, and what it returns. */
static inline int fsdp__thread_start(pthread_t *out_thread, const pthread_attr_t *attributes, void *(*run)(void *),
                                     void *arg)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(out_thread, attributes, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

#endif
