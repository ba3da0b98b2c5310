#include <pthread.h>
#include <signal.h>
#include <sys/uio.h>
#include <time.h>
#include "../base/clock.h"
#include "../base/log.h"
#include "../base/stop.h"
#include "publish.h"
#include "reply.h"

#define QUEUE 2048

enum job_kind { J_RECORD, J_CHUNK, J_DUMP, J_END };
struct job {
    enum job_kind kind;
    struct pd_buf rec;
    const struct pd_kvdesc *desc;
    const struct pd_plan *plan;
    const uint32_t *blocks;
    uint32_t index;
    const uint8_t (*hashes)[16];
    void *run;
};

struct pd_publish {
    struct pd_wstream *out;
    struct pd_dump_w *dump;
    const struct pd_pool *pool;
    pthread_t thread;
    bool running, stop, over;   /* over: the thread has done its last job */
    pthread_mutex_t lock;
    pthread_cond_t more, room, done;
    struct job q[QUEUE];
    uint32_t head, n;           /* the job being done stays at the head until it is done */
    void **ended;
    uint32_t n_ended, cap_ended;
    struct pd_err err;
    struct iovec *iov;
    size_t cap_iov;
    struct pd_codec *codec;     /* the thread's */
    struct pd_codec_rule rule;
};

static int write_chunk(struct pd_publish *p, const struct job *j, struct pd_err *e)
{
    struct pd_chunk c;
    struct pd_buf head = { 0 };
    size_t want = 2 * (size_t)j->plan->chunk_blocks + 1;
    if (want > p->cap_iov) {
        void *iov = pd_realloc(p->iov, want, sizeof *p->iov, "chunk pieces", e);
        if (!iov)
            return PD_ENOMEM;
        p->iov = iov;
        p->cap_iov = want;
    }
    int n, rc = pd_export_chunk(p->pool, j->blocks, j->plan, j->desc, j->index, &c, p->iov + 1, &n, e);
    if (rc == 0 && *j->desc->payload.codec == 'z' && (p->codec || (rc = pd_codec_new(&p->codec, e)) == 0))
        rc = pd_codec_chunk(p->codec, &p->rule, &c, p->iov + 1, &n, e);
    if (rc == 0 && (rc = pd_chunk_encode_head(&c, &head, e)) == 0) {
        p->iov[0] = (struct iovec){ head.p, head.n };
        int64_t t0 = pd_mono_us();
        rc = pd_wstream_putv(p->out, p->iov, n + 1, e);
        pd_codec_wrote(&p->rule, c.data.n, pd_mono_us() - t0);
    }
    pd_buf_free(&head);
    return rc;
}

static int do_job(struct pd_publish *p, const struct job *j, bool last, struct pd_err *e)
{
    int rc = 0;
    switch (j->kind) {
    case J_RECORD:
        rc = pd_put_records(p->out, j->rec.p, j->rec.n, e);
        break;
    case J_CHUNK:
        return write_chunk(p, j, e);
    case J_DUMP:
        return pd_dump_add(p->dump, j->desc, p->pool, j->blocks, j->hashes, j->index, NULL, 0, e);
    case J_END:
        break;
    }
    return rc == 0 && last && p->out ? pd_wstream_flush(p->out, e) : rc;
}

static void add_ended(struct pd_publish *p, void *run)
{
    if (p->n_ended == p->cap_ended) {
        uint32_t cap = p->cap_ended ? p->cap_ended * 2 : 64;
        void *v = pd_realloc(p->ended, cap, sizeof *p->ended, "publisher", &p->err);
        if (!v)
            return;     /* p->err stops the command, which frees every run */
        p->ended = v;
        p->cap_ended = cap;
    }
    p->ended[p->n_ended++] = run;
}

static void *publisher(void *arg)
{
    struct pd_publish *p = arg;
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (!p->n && !p->stop)
            pthread_cond_wait(&p->more, &p->lock);
        if (!p->n)
            break;
        struct job *j = &p->q[p->head];
        bool last = p->n == 1, failed = p->err.code != 0;
        pthread_mutex_unlock(&p->lock);
        struct pd_err e = { 0 };
        if (!failed)
            do_job(p, j, last, &e);
        pd_buf_free(&j->rec);
        pthread_mutex_lock(&p->lock);
        if (e.code && !p->err.code)
            p->err = e;
        if (j->kind == J_END)
            add_ended(p, j->run);
        p->head = (p->head + 1) % QUEUE;
        p->n--;
        pthread_cond_signal(&p->room);
        pthread_cond_broadcast(&p->done);
    }
    p->over = true;
    pthread_cond_broadcast(&p->done);
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* Waits for the thread to come on, with the lock held. When the command is to stop at once, the thread is woken out of a write to a reader that stands still:
 * the signal came to another thread, or before the write began. */
static void wait_for(struct pd_publish *p, pthread_cond_t *cond)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 200000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_cond_timedwait(cond, &p->lock, &until);
    if (pd_stop_level() > 1 && !p->over)
        pthread_kill(p->thread, SIGTERM);
}

int pd_publish_new(struct pd_wstream *out, struct pd_dump_w *dump, const struct pd_pool *pool, struct pd_publish **pp, struct pd_err *e)
{
    struct pd_publish *p = pd_calloc(1, sizeof *p, "publisher", e);
    if (!p)
        return PD_ENOMEM;
    p->out = out;
    p->dump = dump;
    p->pool = pool;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->more, NULL);
    pthread_cond_init(&p->room, NULL);
    pthread_cond_init(&p->done, NULL);
    if (pthread_create(&p->thread, NULL, publisher, p)) {
        pd_publish_free(p);
        return pd_fail(e, PD_ENOMEM, "no thread for the publisher");
    }
    p->running = true;
    *pp = p;
    return 0;
}

void pd_publish_codec(struct pd_publish *p, enum pd_codec_mode m) { p->rule.mode = m; }

static int push(struct pd_publish *p, struct job j, struct pd_err *e)
{
    pthread_mutex_lock(&p->lock);
    while (p->n == QUEUE && !p->err.code)
        wait_for(p, &p->room);
    int rc = p->err.code;
    if (rc && e)
        *e = p->err;
    if (rc == 0 || (j.kind == J_END && p->n < QUEUE)) {
        p->q[(p->head + p->n++) % QUEUE] = j;
        pthread_cond_signal(&p->more);
    } else
        pd_buf_free(&j.rec);
    pthread_mutex_unlock(&p->lock);
    return rc;
}

int pd_publish_record(struct pd_publish *p, struct pd_buf *rec, struct pd_err *e)
{
    struct job j = { .kind = J_RECORD, .rec = *rec };
    memset(rec, 0, sizeof *rec);
    return push(p, j, e);
}

int pd_publish_chunk(struct pd_publish *p, const struct pd_kvdesc *desc, const struct pd_plan *plan, const uint32_t *blocks, uint32_t index, struct pd_err *e)
{
    return push(p, (struct job){ .kind = J_CHUNK, .desc = desc, .plan = plan, .blocks = blocks, .index = index }, e);
}

int pd_publish_dump(struct pd_publish *p, const struct pd_kvdesc *desc, const uint32_t *blocks, const uint8_t (*hashes)[16], uint32_t n_hashes, struct pd_err *e)
{
    return push(p, (struct job){ .kind = J_DUMP, .desc = desc, .blocks = blocks, .hashes = hashes, .index = n_hashes }, e);
}

int pd_publish_end(struct pd_publish *p, void *run, struct pd_err *e)
{
    return push(p, (struct job){ .kind = J_END, .run = run }, e);
}

void *pd_publish_ended(struct pd_publish *p, bool wait)
{
    pthread_mutex_lock(&p->lock);
    while (wait && !p->n_ended && p->n && !p->err.code)
        wait_for(p, &p->done);
    void *run = p->n_ended ? p->ended[--p->n_ended] : NULL;
    pthread_mutex_unlock(&p->lock);
    return run;
}

int pd_publish_error(struct pd_publish *p, struct pd_err *e)
{
    pthread_mutex_lock(&p->lock);
    int rc = p->err.code;
    if (rc && e)
        *e = p->err;
    pthread_mutex_unlock(&p->lock);
    return rc;
}

int pd_publish_finish(struct pd_publish *p, struct pd_err *e)
{
    if (p->running) {
        pthread_mutex_lock(&p->lock);
        p->stop = true;
        pthread_cond_signal(&p->more);
        while (!p->over)
            wait_for(p, &p->done);
        pthread_mutex_unlock(&p->lock);
        pthread_join(p->thread, NULL);
        p->running = false;
        if (p->rule.coded) {
            char text[160];
            pd_codec_tell(&p->rule, text, sizeof text);
            pd_info("codec: %s", text);
        }
    }
    if (p->err.code) {
        if (e)
            *e = p->err;
        return p->err.code;
    }
    return p->out ? pd_wstream_flush(p->out, e) : 0;
}

void pd_publish_free(struct pd_publish *p)
{
    if (!p)
        return;
    if (p->running) {
        pthread_mutex_lock(&p->lock);
        if (!p->err.code)
            p->err.code = PD_ECANCEL;   /* what is queued is dropped */
        pthread_mutex_unlock(&p->lock);
        pd_publish_finish(p, NULL);
    }
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->more);
    pthread_cond_destroy(&p->room);
    pthread_cond_destroy(&p->done);
    pd_codec_free(p->codec);
    pd_free(p->ended);
    pd_free(p->iov);
    pd_free(p);
}
