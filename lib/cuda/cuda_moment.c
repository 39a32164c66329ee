/* SPDX-License-Identifier: MIT */
/* Records of events that outlive the next one of the same event; and what streams stand behind. */
#include "cuda_backend.h"
#include "hostmem.h"

/* ---- The pool ---- */

static fsdp__cuda_moment *pop(fsdp__cuda_device *dev, uint32_t refs)
{
    fsdp__cuda_moment *m = dev->moments;
    if (m == NULL) return NULL;
    dev->moments = m->next;
    m->refs = refs;
    return m;
}

/* With the lock held. */
static void let_go(fsdp__cuda_device *dev, fsdp__cuda_moment *m)
{
    if (--m->refs > 0) return;
    m->next = dev->moments;
    dev->moments = m;
}

/* Making an event is allowed in any capture, of this thread or another. */
static fsdp_status make(fsdp__cuda_device *dev, fsdp__cuda_moment **out_moment)
{
    fsdp__cuda_moment *m = fsdp__host_alloc(dev->host, 1, sizeof *m);
    if (m == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "event: no host memory for %zu bytes", sizeof *m);
    int before = fsdp__cuda_enter(dev);
    cudaError_t error = cudaEventCreateWithFlags(&m->native, cudaEventDisableTiming);
    fsdp_status status = fsdp__cuda_fail(dev, error, "cudaEventCreateWithFlags");
    fsdp__cuda_leave(before);
    if (error == cudaSuccess) *out_moment = m;
    else fsdp__host_free(dev->host, m, 1, sizeof *m);
    return status;
}

fsdp_status fsdp__cuda_moment_take(fsdp__cuda_device *dev, uint32_t refs, fsdp__cuda_moment **out_moment)
{
    pthread_mutex_lock(&dev->moment_lock);
    fsdp__cuda_moment *m = pop(dev, refs);
    pthread_mutex_unlock(&dev->moment_lock);
    if (m == NULL) {
        FSDP_TRY(make(dev, &m));
        m->refs = refs;
    }
    *out_moment = m;
    return FSDP_OK;
}

fsdp_status fsdp__cuda_moments_reserve(fsdp__cuda_device *dev, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        fsdp__cuda_moment *m = NULL;
        FSDP_TRY(make(dev, &m));
        m->refs = 1;
        fsdp__cuda_moment_release(dev, m);
    }
    return FSDP_OK;
}

void fsdp__cuda_moments_close(fsdp__cuda_device *dev)
{
    for (fsdp__cuda_moment *m; (m = pop(dev, 0)) != NULL;) {
        if (cudaEventDestroy(m->native) != cudaSuccess) (void)cudaGetLastError();
        fsdp__host_free(dev->host, m, 1, sizeof *m);
    }
}

fsdp__cuda_moment *fsdp__cuda_moment_hold(fsdp__cuda_device *dev, fsdp__cuda_moment *const *from)
{
    pthread_mutex_lock(&dev->moment_lock);
    fsdp__cuda_moment *m = *from;
    m->refs++;
    pthread_mutex_unlock(&dev->moment_lock);
    return m;
}

void fsdp__cuda_moment_release(fsdp__cuda_device *dev, fsdp__cuda_moment *m)
{
    if (m == NULL) return;
    pthread_mutex_lock(&dev->moment_lock);
    let_go(dev, m);
    pthread_mutex_unlock(&dev->moment_lock);
}

fsdp_status fsdp__cuda_moment_to_record(fsdp__cuda_device *dev, fsdp__cuda_moment *moment,
                                        fsdp__cuda_moment **out_moment)
{
    pthread_mutex_lock(&dev->moment_lock);
    bool is_alone = moment->refs == 1;
    fsdp__cuda_moment *m = is_alone ? moment : pop(dev, 1);
    pthread_mutex_unlock(&dev->moment_lock);
    if (m == NULL) {
        FSDP_TRY(make(dev, &m));
        m->refs = 1;
    }
    *out_moment = m;
    return FSDP_OK;
}

void fsdp__cuda_moment_recorded(fsdp__cuda_device *dev, fsdp__cuda_moment **moment, fsdp__cuda_moment *m)
{
    if (*moment == m) return;
    pthread_mutex_lock(&dev->moment_lock);
    let_go(dev, *moment);
    *moment = m;
    pthread_mutex_unlock(&dev->moment_lock);
}

/* ---- Fronts ---- */

void fsdp__cuda_front_release(fsdp__cuda_device *dev, fsdp__cuda_front *front)
{
    if (front->n == 0) return;
    pthread_mutex_lock(&dev->moment_lock);
    while (front->n > 0) let_go(dev, front->at[--front->n]);
    pthread_mutex_unlock(&dev->moment_lock);
}

void fsdp__cuda_front_set(fsdp__cuda_stream *s, fsdp__cuda_moment *m)
{
    fsdp__cuda_front_release(s->dev, &s->front);
    s->front.at[0] = m;
    s->front.n = 1;
    s->front.has_more = false;
}

void fsdp__cuda_front_wait(fsdp__cuda_stream *s, fsdp__cuda_moment *const *moment)
{
    if (s->front.n == 0) return;
    if (s->front.n == FSDP__CUDA_FRONT) fsdp__cuda_front_release(s->dev, &s->front);
    else s->front.at[s->front.n++] = fsdp__cuda_moment_hold(s->dev, moment);
}

bool fsdp__cuda_front_share(fsdp__cuda_stream *s, fsdp__cuda_moment **moment)
{
    fsdp__cuda_device *dev = s->dev;
    if (s->front.n != 1 || s->front.has_more || !fsdp__cuda_front_is_known(s)) return false;
    pthread_mutex_lock(&dev->moment_lock);
    fsdp__cuda_moment *m = s->front.at[0];
    if (*moment != m) {
        m->refs++;
        let_go(dev, *moment);
        *moment = m;
    }
    pthread_mutex_unlock(&dev->moment_lock);
    return true;
}
