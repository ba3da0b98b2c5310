/* One attempt to reach a peer, beside the loop: its name is looked up, it is dialled, keys are proved, in a thread of its own, however long that takes. */
#ifndef PD_SERVE_REDIAL_H
#define PD_SERVE_REDIAL_H
#include "../wire/endpoint.h"
struct pd_redial;
/* out: to write there. Of net the keys are used for as long as the attempt lasts, also after pd_redial_free. */
int pd_redial_new(const char *spec, bool out, const struct pd_net *net, struct pd_redial **r, struct pd_err *e);
/* 1: not yet. Else *r is gone: 0, and *ep is open; < 0: it could not be reached. */
int pd_redial_done(struct pd_redial **r, struct pd_endpoint *ep, struct pd_err *e);
void pd_redial_free(struct pd_redial *r);       /* nobody waits for it any more. NULL: nothing */
#endif
