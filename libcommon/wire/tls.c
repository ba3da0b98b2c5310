#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../base/mem.h"
#include "../base/stop.h"
#include "tls.h"

enum { FILE_MAX = 256 << 10, RECORD = 16 << 10 /* the most that TLS seals in one piece */, SEALED = 160 << 10 /* that waits to be sent: about ten pieces in one write */,
       AHEAD = 160 << 10 /* that is read in one call */ };

struct key { char id[PD_KEY_ID_MAX + 1]; uint8_t secret[PD_KEY_LEN]; };
struct pd_keys { SSL_CTX *ctx; int n; struct key key[]; };

struct pd_tls {
    SSL *ssl;
    const struct pd_keys *keys;
    int fd;
    bool client, open, dead, ended, saw_first, eof /* of the socket */;
    bool not_tls;               /* the peer's first byte begins no TLS */
    bool full;                  /* the socket takes no more for now */
    int sys;                    /* of the last recv or send that failed */
    short wants;
    char name[96], id[PD_KEY_ID_MAX + 1], unknown[PD_KEY_ID_MAX + 1];
    struct pd_err why;
    size_t at, n;               /* of out: sealed, and not sent yet */
    uint8_t out[SEALED];
};

/* ---- the key file ---- */

static int hex(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1; }
static bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r'; }

/* One line without its newline: 1 a key, 0 nothing on it, < 0. */
static int parse_line(const char *p, size_t n, struct key *k)
{
    size_t i = 0, id = 0;
    while (n && is_blank(p[n - 1]))
        n--;
    while (i < n && is_blank(p[i]))
        i++;
    if (i == n || p[i] == '#')
        return 0;
    for (; i < n && !is_blank(p[i]); i++) {
        if (id == PD_KEY_ID_MAX || p[i] < 33 || p[i] > 126)
            return -1;
        k->id[id++] = p[i];
    }
    k->id[id] = 0;
    while (i < n && is_blank(p[i]))
        i++;
    if (n - i != 2 * PD_KEY_LEN)
        return -1;
    for (size_t b = 0; b < PD_KEY_LEN; b++, i += 2) {
        int hi = hex(p[i]), lo = hex(p[i + 1]);
        if (hi < 0 || lo < 0)
            return -1;
        k->secret[b] = (uint8_t)(hi << 4 | lo);
    }
    return 1;
}

static SSL_CTX *make_ctx(struct pd_err *e);

int pd_keys_parse(const char *text, size_t n, const char *name, struct pd_keys **out, struct pd_err *e)
{
    static const char example[] = "example of a line: prod-1 and 64 hexadecimal digits, as `openssl rand -hex 32` makes";
    int lines = 1, rc;
    for (size_t i = 0; i < n; i++)
        lines += text[i] == '\n';
    if (lines > 4 * PD_KEYS_MAX)
        return pd_fail(e, PD_EUSAGE, "%s: more than %d lines are no key file", name, 4 * PD_KEYS_MAX);
    struct pd_keys *k = pd_calloc(1, sizeof *k + (size_t)lines * sizeof *k->key, "keys", e);
    if (!k)
        return PD_ENOMEM;
    int at = 1;
    for (const char *p = text, *end = text + n; p < end; at++) {
        const char *nl = memchr(p, '\n', (size_t)(end - p));
        struct key *new = &k->key[k->n];
        rc = parse_line(p, (size_t)((nl ? nl : end) - p), new);
        if (rc < 0) {
            rc = pd_fail(e, PD_EUSAGE, "%s: line %d is no key (%s)", name, at, example);
            goto out;
        }
        for (int i = 0; rc && i < k->n; i++)
            if (!strcmp(k->key[i].id, new->id)) {
                rc = pd_fail(e, PD_EUSAGE, "%s: line %d: the id '%s' is there twice", name, at, new->id);
                goto out;
            }
        k->n += rc;
        p = nl ? nl + 1 : end;
    }
    rc = !k->n ? pd_fail(e, PD_EUSAGE, "%s: there is no key in it (%s)", name, example) :
         k->n > PD_KEYS_MAX ? pd_fail(e, PD_EUSAGE, "%s: more than %d keys", name, PD_KEYS_MAX) : 0;
    if (!rc && !(k->ctx = make_ctx(e)))
        rc = PD_ENOMEM;
out:
    if (rc)
        pd_keys_free(k);
    else
        *out = k;
    return rc;
}

int pd_keys_load(const char *path, struct pd_keys **out, struct pd_err *e)
{
    struct stat st;
    int rc = PD_ENOMEM, fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) {
        pd_fail_sys(e, "%s: cannot open this key file", path);
        if (e)
            e->code = PD_EUSAGE;
        return PD_EUSAGE;
    }
    char *text = pd_calloc(1, FILE_MAX + 1, "a key file", e);
    size_t n = 0;
    if (!text)
        goto out;
    if (fstat(fd, &st))
        rc = pd_fail_sys(e, "%s", path);
    else if (!S_ISREG(st.st_mode))
        rc = pd_fail(e, PD_EUSAGE, "%s: a key file is a regular file", path);
    else if (st.st_mode & 077 || (st.st_uid != geteuid() && st.st_uid != 0))
        rc = pd_fail(e, PD_EUSAGE, "%s: a key file is its owner's alone, and its owner runs this (mode %03o, uid %u; chmod 600 %s)", path,
                     (unsigned)st.st_mode & 0777, (unsigned)st.st_uid, path);
    else {
        ssize_t k = 0;
        while (n <= FILE_MAX && ((k = read(fd, text + n, FILE_MAX + 1 - n)) > 0 || (k < 0 && errno == EINTR)))
            n += (size_t)(k > 0 ? k : 0);
        rc = k < 0 ? pd_fail_sys(e, "%s: cannot read", path) : n > FILE_MAX ? pd_fail(e, PD_EUSAGE, "%s: more than %d bytes are no key file", path, FILE_MAX) :
             pd_keys_parse(text, n, path, out, e);
    }
out:
    if (text)
        OPENSSL_cleanse(text, FILE_MAX);
    pd_free(text);
    close(fd);
    return rc;
}

int pd_keys_count(const struct pd_keys *k) { return k->n; }
const char *pd_keys_id(const struct pd_keys *k, int i) { return k->key[i].id; }

void pd_keys_free(struct pd_keys *k)
{
    if (!k)
        return;
    SSL_CTX_free(k->ctx);
    OPENSSL_cleanse(k->key, (size_t)k->n * sizeof *k->key);
    pd_free(k);
}

/* ---- what OpenSSL asks of us ---- */

/* The socket, with the peer's first byte looked at, and what is sealed gathered. */
static int on_read(BIO *b, char *p, int n)
{
    struct pd_tls *t = BIO_get_data(b);
    BIO_clear_retry_flags(b);
    ssize_t k = recv(t->fd, p, (size_t)n, MSG_DONTWAIT);
    if (k > 0 && !t->saw_first) {
        t->saw_first = true;
        t->not_tls = p[0] < 20 || p[0] > 23;    /* a kind of record of TLS */
    }
    if (t->not_tls)
        return -1;              /* at once: it may wait for an answer after less than a record's head */
    if (k < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        BIO_set_retry_read(b);
    else if (k < 0)
        t->sys = errno;
    t->eof |= k == 0;
    return (int)k;
}

int pd_tls_flush(struct pd_tls *t)
{
    t->full = false;
    while (t->at < t->n) {
        ssize_t k = send(t->fd, t->out + t->at, t->n - t->at, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0) {
            t->full = errno == EAGAIN || errno == EWOULDBLOCK;
            t->wants = POLLOUT;
            if (!t->full) {
                t->sys = errno;
                pd_fail(&t->why, PD_ECANCEL, "%s: the peer went away (%s)", t->name, strerror(t->sys));
            }
            return t->full ? 1 : -1;
        }
        t->at += (size_t)k;
    }
    t->at = t->n = 0;
    return 0;
}

static size_t room(const struct pd_tls *t) { return SEALED - t->n; }

static int on_write(BIO *b, const char *p, int n)
{
    struct pd_tls *t = BIO_get_data(b);
    BIO_clear_retry_flags(b);
    if ((size_t)n > room(t) && t->at) {
        memmove(t->out, t->out + t->at, t->n - t->at);
        t->n -= t->at;
        t->at = 0;
    }
    if ((size_t)n > room(t)) {
        BIO_set_retry_write(b);
        return -1;
    }
    memcpy(t->out + t->n, p, (size_t)n);
    t->n += (size_t)n;
    return n;
}

static long on_ctrl(BIO *b, int what, long num, void *p)
{
    (void)num;
    (void)p;
    if (what == BIO_CTRL_FLUSH)         /* only the handshake's end is worth a call of its own: all else is sent by its caller */
        return pd_tls_flush(BIO_get_data(b)) >= 0;
    return what == BIO_CTRL_DUP;
}

static BIO_METHOD *the_method;
static void make_method(void)
{
    BIO_METHOD *m = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK | BIO_TYPE_DESCRIPTOR, "pd");
    if (m && BIO_meth_set_read(m, on_read) && BIO_meth_set_write(m, on_write) && BIO_meth_set_ctrl(m, on_ctrl))
        the_method = m;
    else
        BIO_meth_free(m);
}

static SSL_SESSION *session_of(SSL *ssl, const struct key *k)
{
    static const uint8_t suite[] = { 0x13, 0x01 };     /* TLS_AES_128_GCM_SHA256 */
    SSL_SESSION *s = SSL_SESSION_new();
    const SSL_CIPHER *c = SSL_CIPHER_find(ssl, suite);
    if (s && c && SSL_SESSION_set1_master_key(s, k->secret, PD_KEY_LEN) && SSL_SESSION_set_cipher(s, c) && SSL_SESSION_set_protocol_version(s, TLS1_3_VERSION))
        return s;
    SSL_SESSION_free(s);
    return NULL;
}

/* Connecting: the first key. */
static int on_use(SSL *ssl, const EVP_MD *md, const unsigned char **id, size_t *n, SSL_SESSION **out)
{
    struct pd_tls *t = SSL_get_app_data(ssl);
    const struct key *k = &t->keys->key[0];
    (void)md;
    if (!(*out = session_of(ssl, k)))
        return 0;
    *id = (const unsigned char *)k->id;
    *n = strlen(k->id);
    memcpy(t->id, k->id, sizeof t->id);
    return 1;
}

/* Listening: the key of this id. Without one there is no certificate either, and the handshake fails. */
static int on_find(SSL *ssl, const unsigned char *id, size_t n, SSL_SESSION **out)
{
    struct pd_tls *t = SSL_get_app_data(ssl);
    *out = NULL;
    for (int i = 0; i < t->keys->n; i++)
        if (n == strlen(t->keys->key[i].id) && !memcmp(id, t->keys->key[i].id, n)) {
            memcpy(t->id, t->keys->key[i].id, sizeof t->id);
            return (*out = session_of(ssl, &t->keys->key[i])) != NULL;
        }
    for (size_t i = 0; i < n && i < PD_KEY_ID_MAX; i++)
        t->unknown[i] = id[i] > 32 && id[i] < 127 ? (char)id[i] : '?';
    return 1;
}

static SSL_CTX *make_ctx(struct pd_err *e)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_method);
    SSL_CTX *c = the_method ? SSL_CTX_new(TLS_method()) : NULL;
    if (!c || !SSL_CTX_set_min_proto_version(c, TLS1_3_VERSION) || !SSL_CTX_set_max_proto_version(c, TLS1_3_VERSION) ||
        !SSL_CTX_set_ciphersuites(c, "TLS_AES_128_GCM_SHA256") || !SSL_CTX_set_num_tickets(c, 0) || !SSL_CTX_set_max_early_data(c, 0) ||
        !SSL_CTX_set_recv_max_early_data(c, 0)) {
        SSL_CTX_free(c);
        pd_fail(e, PD_ENOMEM, "OpenSSL %s gives no TLS 1.3 with TLS_AES_128_GCM_SHA256", OpenSSL_version(OPENSSL_VERSION_STRING));
        return NULL;
    }
    SSL_CTX_set_options(c, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
    SSL_CTX_set_session_cache_mode(c, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_mode(c, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_AUTO_RETRY | SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_read_ahead(c, 1);
    SSL_CTX_set_default_read_buffer_len(c, AHEAD);
    SSL_CTX_set_psk_use_session_callback(c, on_use);
    SSL_CTX_set_psk_find_session_callback(c, on_find);
    return c;
}

/* ---- a connection ---- */

int pd_tls_new(const struct pd_keys *k, int fd, bool client, const char *name, struct pd_tls **out, struct pd_err *e)
{
    struct pd_tls *t = pd_calloc(1, sizeof *t, "a TLS connection", e);
    if (!t)
        return PD_ENOMEM;
    t->keys = k;
    t->fd = fd;
    t->client = client;
    t->wants = client ? POLLOUT : POLLIN;
    snprintf(t->name, sizeof t->name, "%s", name);
    BIO *b = BIO_new(the_method);
    if (!b || !(t->ssl = SSL_new(k->ctx))) {
        BIO_free(b);
        pd_tls_free(t);
        return pd_fail(e, PD_ENOMEM, "out of memory for a TLS connection");
    }
    BIO_set_data(b, t);
    BIO_set_init(b, 1);
    SSL_set_bio(t->ssl, b, b);
    SSL_set_app_data(t->ssl, t);
    client ? SSL_set_connect_state(t->ssl) : SSL_set_accept_state(t->ssl);
    *out = t;
    return 0;
}

void pd_tls_free(struct pd_tls *t)
{
    if (!t)
        return;
    SSL_free(t->ssl);
    pd_free(t);
}

/* Why it failed, for a person, from what OpenSSL and the other side say. */
static void explain(struct pd_tls *t)
{
    unsigned long code = ERR_peek_error();
    int reason = ERR_GET_REASON(code), alert = reason >= SSL_AD_REASON_OFFSET ? reason - SSL_AD_REASON_OFFSET : -1;
    const char *text = ERR_reason_error_string(code);
    if (t->not_tls)
        pd_fail(&t->why, PD_EFAIL, "%s: the other side speaks no TLS (start it with --key-file too)", t->name);
    else if (t->unknown[0])
        pd_fail(&t->why, PD_EFAIL, "%s: the other side proves a key with the id '%s', which is not in this key file", t->name, t->unknown);
    else if (!t->client && reason == SSL_R_BINDER_DOES_NOT_VERIFY)
        pd_fail(&t->why, PD_EFAIL, "%s: the other side has another key by the id '%s'", t->name, t->id);
    else if (t->client && alert == SSL_AD_HANDSHAKE_FAILURE)
        pd_fail(&t->why, PD_EFAIL, "%s: the other side does not know the key with the id '%s' (is it in the key file there?)", t->name, t->id);
    else if (t->client && !t->open && (alert == SSL_AD_ILLEGAL_PARAMETER || alert == SSL_AD_DECRYPT_ERROR))
        pd_fail(&t->why, PD_EFAIL, "%s: the other side has another key by the id '%s'", t->name, t->id);
    else if (!t->open)
        pd_fail(&t->why, PD_EFAIL, "%s: the TLS handshake failed: %s", t->name, text && !t->eof ? text : t->sys ? strerror(t->sys) :
                t->client ? "the other side closed the connection (was it started with --key-file?)" : "the other side closed the connection");
    else
        pd_fail(&t->why, PD_ECORRUPT, "%s: TLS: %s", t->name, text ? text : "the connection failed");
}

/* What a call that gave k <= 0 means, as errno; 0: the peer ended its writing. */
static int outcome(struct pd_tls *t, int k)
{
    int what = SSL_get_error(t->ssl, k);
    if (what == SSL_ERROR_ZERO_RETURN)
        return 0;
    if (what == SSL_ERROR_WANT_READ || what == SSL_ERROR_WANT_WRITE) {
        t->wants = what == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT;
        return EAGAIN;
    }
    bool cut = t->open && (t->sys || t->eof);
    if (cut)
        pd_fail(&t->why, PD_ECANCEL, "%s: the peer went away (%s)", t->name, t->sys ? strerror(t->sys) : "it did not end its TLS");
    else
        explain(t);
    t->dead = true;
    ERR_clear_error();
    if (t->not_tls && !t->client) {     /* instead of an alert, which it could not read */
        static const char say[] = "{\"pd\":\"error\",\"v\":1,\"class\":\"failed\",\"code\":1,\"message\":\"this endpoint speaks TLS: give --key-file FILE\","
                                  "\"action\":\"abort\"}\n";
        t->at = 0;
        memcpy(t->out, say, t->n = sizeof say - 1);
    }
    pd_tls_flush(t);            /* what says so to the other side */
    return cut ? ECONNRESET : EPROTO;
}

int pd_tls_shake(struct pd_tls *t)
{
    if (t->open)
        return 1;
    if (t->dead)
        return errno = EPROTO, -1;
    ERR_clear_error();
    t->sys = 0;
    int k = SSL_do_handshake(t->ssl);
    if (k == 1) {
        t->open = true;
        if (pd_tls_flush(t) < 0)
            return errno = ECONNRESET, -1;
        return 1;
    }
    int why = outcome(t, k);
    if (why == EAGAIN && pd_tls_flush(t) == 1)
        t->wants |= POLLOUT;
    errno = why ? why : EPROTO;
    return why == EAGAIN ? 0 : -1;
}

ssize_t pd_tls_read(struct pd_tls *t, void *p, size_t n)
{
    int rc = pd_tls_shake(t);
    if (rc <= 0)
        return errno = rc ? errno : EAGAIN, -1;
    if (t->dead)
        return errno = EPROTO, -1;
    ERR_clear_error();
    t->sys = 0;
    int k = SSL_read(t->ssl, p, n > INT32_MAX ? INT32_MAX : (int)n);
    if (k > 0)
        return k;
    int why = outcome(t, k);
    return why ? (errno = why, -1) : 0;
}

ssize_t pd_tls_writev(struct pd_tls *t, const struct iovec *v, int n)
{
    ssize_t done = 0;
    int rc = pd_tls_shake(t);
    if (rc <= 0)
        return errno = rc ? errno : EAGAIN, -1;
    if (t->dead || t->ended)
        return errno = t->dead ? EPROTO : EPIPE, -1;
    for (int i = 0; i < n; i++)
        for (size_t at = 0; at < v[i].iov_len;) {
            size_t len = v[i].iov_len - at < RECORD ? v[i].iov_len - at : RECORD;
            if (room(t) + t->at < len + 256 && (rc = pd_tls_flush(t)) != 0) {   /* a piece is sealed whole or not at all */
                if (rc < 0 && !done)
                    return errno = ECONNRESET, -1;
                if (room(t) + t->at < len + 256)
                    return done ? done : (errno = EAGAIN, -1);
            }
            ERR_clear_error();
            t->sys = 0;
            int k = SSL_write(t->ssl, (const char *)v[i].iov_base + at, (int)len);
            if (k <= 0)
                return errno = outcome(t, k), done ? done : -1;
            at += (size_t)k;
            done += k;
        }
    if (pd_tls_flush(t) < 0 && !done)
        return errno = ECONNRESET, -1;
    return done;
}

int pd_tls_fd(const struct pd_tls *t) { return t->fd; }
bool pd_tls_pending(const struct pd_tls *t) { return SSL_has_pending(t->ssl); }
bool pd_tls_unsent(const struct pd_tls *t) { return t->at < t->n; }

int pd_tls_end(struct pd_tls *t)
{
    if (t->open && !t->dead && !t->ended) {
        t->ended = true;
        ERR_clear_error();
        SSL_shutdown(t->ssl);
        ERR_clear_error();
    }
    return t->open ? pd_tls_flush(t) : 0;
}

short pd_tls_wants(const struct pd_tls *t) { return (short)(t->wants | (t->full ? POLLOUT : 0)); }
const struct pd_err *pd_tls_why(const struct pd_tls *t) { return &t->why; }
const char *pd_tls_peer(const struct pd_tls *t) { return t->open ? t->id : ""; }

int pd_tls_shake_wait(struct pd_tls *t, int64_t until_us, struct pd_err *e)
{
    int rc;
    while ((rc = pd_tls_shake(t)) == 0) {
        struct pollfd p = { .fd = t->fd, .events = pd_tls_wants(t) };
        int64_t left = until_us - pd_mono_us();
        if (left <= 0)
            return pd_fail(e, PD_ETIME, "%s: the TLS handshake was not over in time (does the other side speak TLS? start it with --key-file too)", t->name);
        if (pd_stop_level())
            return pd_fail(e, PD_ECANCEL, "%s: interrupted while connecting", t->name);
        poll(&p, 1, left < 500000 ? (int)(left / 1000) + 1 : 500);
    }
    if (rc < 0 && e)
        *e = t->why;
    return rc < 0 ? t->why.code : 0;
}
