#include "../base/clock.h"
#include "pin.h"

struct pd_pin {
    struct pd_pins *s;
    struct pd_pin *next;
    struct pd_view *view;
    char run[PD_RUN_LEN + 1];
    uint8_t gen[PD_GEN_LEN], lease[PD_LEASE_ID_LEN];
    struct pd_move *m;          /* what stands for it, or is about to; NULL: no connection does */
    struct pd_link *k;
    bool ended;                 /* its prefill worker knows */
    bool done;                  /* nothing reads it any more, which can be said once m is verified */
    /* under the lock */
    int64_t until;              /* no connection renews its lease: when it runs out (mono us); 0: one does */
    bool over;
};

void pd_pins_init(struct pd_pins *s, void (*release)(void *ctx, const char *run, const uint8_t *gen, const uint8_t *lease), void *ctx)
{
    *s = (struct pd_pins){ .release = release, .ctx = ctx };
    pthread_mutex_init(&s->lock, NULL);
}

static void drop(struct pd_pin *p)
{
    struct pd_pin **q = &p->s->first;
    while (*q != p)
        q = &(*q)->next;
    *q = p->next;
    pd_view_put(p->view);
    pd_free(p);
}

void pd_pins_free(struct pd_pins *s)
{
    while (s->first)
        drop(s->first);
    pthread_mutex_destroy(&s->lock);
}

bool pd_pin_valid(struct pd_pin *p)
{
    pthread_mutex_lock(&p->s->lock);
    if (!p->over && (!pd_view_valid(p->view, pd_lease_slot(p->lease), p->gen) || (p->until && pd_mono_us() >= p->until)))
        p->over = true;
    bool ok = !p->over;
    pthread_mutex_unlock(&p->s->lock);
    return ok;
}

int pd_pin_new(struct pd_pins *s, struct pd_link *k, struct pd_move *m, struct pd_pin **out, struct pd_err *e)
{
    struct pd_pin *p = pd_calloc(1, sizeof *p, "KV read in place", e);
    if (!p)
        return PD_ENOMEM;
    *p = (struct pd_pin){ .s = s, .next = s->first, .view = pd_take_view(m), .m = m, .k = k };
    memcpy(p->run, pd_move_run(m), sizeof p->run);
    memcpy(p->gen, pd_move_gen(m), sizeof p->gen);
    memcpy(p->lease, pd_move_lease(m), sizeof p->lease);
    *out = s->first = p;
    s->n++;
    return 0;
}

static void release(struct pd_link *k, struct pd_move *m)
{
    pd_take_release(m, pd_mono_us());
    pd_link_soon(k);
}

void pd_pin_free(struct pd_pin *p)
{
    struct pd_pins *s = p->s;
    s->n--;
    if (p->m && p->until) {     /* between its offer and its verification nothing can be said of it */
        p->done = true;
        return;
    }
    if (p->m)
        release(p->k, p->m);
    else if (!p->ended)
        s->release(s->ctx, p->run, p->gen, p->lease);
    drop(p);
}

bool pd_pins_offered(struct pd_pins *s, struct pd_link *k, struct pd_move *m)
{
    const uint8_t *lease = pd_move_lease(m);
    struct pd_pin *p = s->first;
    while (p && (strcmp(p->run, pd_move_run(m)) || memcmp(p->gen, pd_move_gen(m), sizeof p->gen)))
        p = p->next;
    if (!p)
        return false;
    if (p->done || p->ended || !pd_pin_valid(p))
        release(k, m);
    else if (!lease || memcmp(lease, p->lease, sizeof p->lease)) {
        pd_take_refuse(m, PD_EFAIL, "it is read in place here, under another lease", pd_mono_us());
        pd_link_soon(k);
    } else {
        if (p->m && !p->until) {        /* the giver has lost the connection before us */
            pthread_mutex_lock(&s->lock);
            p->until = pd_take_until(p->m);
            pthread_mutex_unlock(&s->lock);
        }
        p->m = m;
        p->k = k;
        pd_take(m, &(struct pd_take){ .again = true }, pd_mono_us(), NULL);     /* a failure is an event */
        pd_link_soon(k);
    }
    return true;
}

static struct pd_pin *pin_of(const struct pd_pins *s, const struct pd_move *m)
{
    struct pd_pin *p = s->first;
    while (p && p->m != m)
        p = p->next;
    return p;
}

bool pd_pins_taken(struct pd_pins *s, struct pd_move *m)
{
    struct pd_pin *p = pin_of(s, m);
    if (!p)
        return false;
    if (p->done) {
        release(p->k, m);
        drop(p);
        return true;
    }
    pthread_mutex_lock(&s->lock);
    p->until = 0;
    pthread_mutex_unlock(&s->lock);
    return true;
}

bool pd_pins_ended(struct pd_pins *s, const struct pd_xfer_event *ev)
{
    struct pd_pin *p = pin_of(s, ev->move);
    int64_t until;
    if (!p)
        return false;
    until = pd_take_until(ev->move);
    p->m = NULL;
    p->k = NULL;
    pthread_mutex_lock(&s->lock);
    if (!until)
        p->over = p->ended = true;
    else if (!p->until)
        p->until = until;
    pthread_mutex_unlock(&s->lock);
    if (p->done) {
        if (!p->ended)
            s->release(s->ctx, p->run, p->gen, p->lease);
        drop(p);
    }
    return true;
}
