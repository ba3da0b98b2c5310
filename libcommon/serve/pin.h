/* KV that is read where the prefill worker has it, under its lease, for as long as a run lasts.
 *
 * A connection stands for a pin, and renews its lease. One that is lost leaves the KV where it is: it is read on while the control word says that its
 * generation stands, until the lease that was last asked for has run out. The prefill worker offers it again over the next connection, which then stands for
 * the pin; a run that is over by then is released there.
 * What has ended once, by its word, its time or its prefill worker's, has ended for ever.
 * The loop's, but for pd_pin_valid. */
#ifndef PD_SERVE_PIN_H
#define PD_SERVE_PIN_H
#include <pthread.h>
#include "link.h"

struct pd_pin;
struct pd_pins {
    pthread_mutex_t lock;       /* of what the reading thread looks at */
    struct pd_pin *first;
    uint32_t n;                 /* that are read */
    /* It is not read any more, and no connection is there to say so. */
    void (*release)(void *ctx, const char *run, const uint8_t *gen, const uint8_t *lease);
    void *ctx;
};
void pd_pins_init(struct pd_pins *s, void (*release)(void *ctx, const char *run, const uint8_t *gen, const uint8_t *lease), void *ctx);
void pd_pins_free(struct pd_pins *s);           /* after the links, and each pd_pin_free */
int pd_pin_new(struct pd_pins *s, struct pd_link *k, struct pd_move *m, struct pd_pin **out, struct pd_err *e);         /* of a move that was just taken */
void pd_pin_free(struct pd_pin *p);             /* nothing reads it any more: the lease is released */
/* Was all that was read of it before this call its KV? Any thread, until pd_pin_free. false once: false for ever. */
bool pd_pin_valid(struct pd_pin *p);

/* What comes of moves; true: it was of one that is pinned, and has been dealt with. */
bool pd_pins_offered(struct pd_pins *s, struct pd_link *k, struct pd_move *m);
bool pd_pins_taken(struct pd_pins *s, struct pd_move *m);       /* offered again, verified */
bool pd_pins_ended(struct pd_pins *s, const struct pd_xfer_event *ev);  /* its last event */
#endif
