/* TLS 1.3 with a pre-shared key, over a connected socket that never blocks here: the same shape as recv and send.
 *
 * One suite (TLS_AES_128_GCM_SHA256) and psk_dhe_ke, so each connection has keys that no recording gives away later, and a handshake that is played again
 * fails at its Finished; no certificates, tickets, early data, renegotiation. Both ends have a key file with lines `id hex64`: who connects proves the first
 * key, who listens accepts any, so keys are changed by adding the new one everywhere, then putting it first, then dropping the old one.
 *
 * Reading and writing give -1 with errno as a socket would: EAGAIN (wait for what pd_tls_wants says), ECONNRESET (the peer went without a word), EPROTO (pd_tls_why
 * has the words). The handshake is done by whichever comes first. What is written is sealed at once, so that the caller's bytes are free, and waits here if the socket is full:
 * pd_tls_unsent, pd_tls_flush. Nothing is read from the socket past what TLS itself holds: pd_tls_pending says that more can be had without the socket's word.
 */
#ifndef PD_WIRE_TLS_H
#define PD_WIRE_TLS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include "../base/err.h"
struct iovec;

enum { PD_KEY_LEN = 32, PD_KEY_ID_MAX = 64, PD_KEYS_MAX = 1024 };
struct pd_keys;                 /* what a key file holds; read only after it was made, so threads may share it */
/* PD_EUSAGE: a file that others may read, or a line that is none; keys are never in the words. */
int pd_keys_load(const char *path, struct pd_keys **out, struct pd_err *e);
int pd_keys_parse(const char *text, size_t n, const char *name, struct pd_keys **out, struct pd_err *e);
int pd_keys_count(const struct pd_keys *k);
const char *pd_keys_id(const struct pd_keys *k, int i);
void pd_keys_free(struct pd_keys *k);           /* after every pd_tls of it. NULL: nothing */

/* How sockets are used; NULL in its place: no patience, no keys, loopback only. */
struct pd_net { int64_t connect_us /* how long an absent peer is waited for */; const struct pd_keys *keys; bool insecure; };

struct pd_tls;
/* fd stays the caller's; name is for messages, and copied. */
int pd_tls_new(const struct pd_keys *k, int fd, bool client, const char *name, struct pd_tls **out, struct pd_err *e);
int pd_tls_shake(struct pd_tls *t);             /* 1 the peer has proved its key, 0 not yet, -1 */
ssize_t pd_tls_read(struct pd_tls *t, void *p, size_t n);       /* 0: the peer said that it writes no more */
ssize_t pd_tls_writev(struct pd_tls *t, const struct iovec *v, int n);
int pd_tls_fd(const struct pd_tls *t);
bool pd_tls_pending(const struct pd_tls *t);
bool pd_tls_unsent(const struct pd_tls *t);
int pd_tls_flush(struct pd_tls *t);             /* 0 all is sent, 1 not yet, -1 */
int pd_tls_end(struct pd_tls *t);               /* say that nothing more is written; as flush */
short pd_tls_wants(const struct pd_tls *t);     /* POLLIN, POLLOUT: what the last thing that could not go on waits for */
const struct pd_err *pd_tls_why(const struct pd_tls *t);        /* after EPROTO or ECONNRESET */
const char *pd_tls_peer(const struct pd_tls *t);        /* the id of the key in use; "" before the handshake is over */
/* Wait for the handshake to be over, until_us (pd_mono_us) at the most; for a thread that may block. */
int pd_tls_shake_wait(struct pd_tls *t, int64_t until_us, struct pd_err *e);
void pd_tls_free(struct pd_tls *t);             /* NULL: nothing */
#endif
