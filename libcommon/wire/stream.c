#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../base/fault.h"
#include "../base/stop.h"
#include "../base/utf8.h"
#include "endpoint.h"
#include "frame.h"
#include "json.h"
#include "stream.h"
#include "value.h"

/* ---- reader ---- */

enum { MIN_ROOM = 1 << 18,      /* asked of one read when the need is not known: small enough to stay in the cache */
       FED_ROOM = 1 << 14,      /* the same of a fed stream, of which there may be thousands */
       AHEAD = 1 << 14 };       /* read past a known need, so that the next record's head comes along; only this much is ever moved */

enum mode { UNDECIDED, MSGPACK, JSON, LINES };

struct pd_rstream {
    int fd;
    struct pd_tls *tls;             /* in its place */
    bool tells_end, own, lines, eof, dead, exact;
    enum mode mode;
    size_t max_record;
    char name[64];
    uint8_t *buf;
    size_t begin, end, cap;         /* bytes not yet given out: [begin, end) */
    uint64_t offset;                /* of buf[begin] in the stream */
    struct pd_frame_scan scan;      /* of the record at begin */
    size_t need;                    /* bytes that record needs at least, 0: not known */
    size_t looked;                  /* of the line at begin: bytes without a newline */
    bool skipping;                  /* the rest of a line that was too long */
    struct pd_buf rec;              /* a converted line */
    struct pd_err fatal;
};

/* What messages call a stream: the endpoint as it was given, but "-" would say nothing. */
static void set_name(char out[64], const char *name, const char *absent, const char *std)
{
    snprintf(out, 64, "%s", !name ? absent : strcmp(name, "-") ? name : std);
}

int pd_rstream_new(int fd, const struct pd_rstream_opts *o, struct pd_rstream **out, struct pd_err *e)
{
    struct pd_rstream *s = pd_calloc(1, sizeof *s, "a record stream", e);
    if (!s)
        return PD_ENOMEM;
    s->fd = fd;
    s->lines = o && o->lines;
    s->own = o && o->own_fd;
    s->tls = o ? o->tls : NULL;
    s->tells_end = o && o->tells_end;
    s->max_record = o && o->max_record ? o->max_record : PD_MAX_RECORD_DEFAULT;
    set_name(s->name, o ? o->name : NULL, "input", "stdin");
    *out = s;
    return 0;
}

int pd_rstream_of(const struct pd_endpoint *in, const struct pd_rstream_opts *o, struct pd_rstream **out, struct pd_err *e)
{
    struct pd_rstream_opts mine = *o;
    mine.tls = in->tls;
    mine.tells_end = in->tcp;
    return pd_rstream_new(in->fd, &mine, out, e);
}

static bool is_fed(const struct pd_rstream *s) { return s->fd < 0 && !s->tls; }

bool pd_rstream_is_json(const struct pd_rstream *s) { return s->mode == JSON; }

void pd_rstream_free(struct pd_rstream *s)
{
    if (!s)
        return;
    if (s->own)
        close(s->fd);
    pd_free(s->buf);
    pd_buf_free(&s->rec);
    pd_free(s);
}

static void consume(struct pd_rstream *s, size_t n)
{
    s->begin += n;
    s->offset += n;
    s->need = s->looked = 0;
    s->scan = (struct pd_frame_scan){ 0 };
}

/* Nothing more can be read after this: every later call says the same. */
static int die(struct pd_rstream *s, int code, struct pd_err *e)
{
    s->dead = true;
    s->fatal.code = code;
    pd_err_prefix(&s->fatal, "%s", s->name);
    if (e)
        *e = s->fatal;
    return code;
}

/* Room for `want` bytes past end. What is left over is moved to the front, which AHEAD keeps short. */
static int make_room(struct pd_rstream *s, size_t want, struct pd_err *e)
{
    size_t have = s->end - s->begin, cap;
    if (s->begin == s->end)
        s->begin = s->end = 0;
    if (s->cap - s->end >= want)
        return 0;
    if (s->begin) {
        memmove(s->buf, s->buf + s->begin, have);
        s->begin = 0;
        s->end = have;
    }
    if (s->cap - s->end >= want)
        return 0;
    if (!pd_add_size(have, want, &cap))
        return pd_fail(e, PD_ENOMEM, "%s: a record is too large", s->name);
    if (cap < s->cap * 2)
        cap = s->cap * 2;
    uint8_t *p = pd_realloc(s->buf, cap, 1, "a record stream's buffer", e);
    if (!p)
        return PD_ENOMEM;
    s->buf = p;
    s->cap = cap;
    return 0;
}

/* How much to read now: what the record at begin needs, as far as that is known. */
static size_t wanted(const struct pd_rstream *s)
{
    size_t have = s->end - s->begin, need = s->need > have ? s->need - have : 0;
    if (s->exact && s->mode != JSON)
        return need ? need : 1;
    return need ? need + AHEAD : is_fed(s) ? FED_ROOM : MIN_ROOM;
}

void pd_rstream_exact(struct pd_rstream *s, bool exact) { s->exact = exact; }

int pd_rstream_room(struct pd_rstream *s, uint8_t **p, size_t *n, struct pd_err *e)
{
    size_t want = wanted(s);
    if (want > MIN_ROOM)        /* a count alone makes no room: what a peer announces and does not send costs no memory */
        want = MIN_ROOM;
    int rc = make_room(s, want, e);
    *p = s->buf + s->end;
    *n = want;
    return rc;
}

void pd_rstream_fed(struct pd_rstream *s, size_t n)
{
    s->end += n;
    s->eof |= n == 0;
}

bool pd_rstream_empty(const struct pd_rstream *s) { return s->begin == s->end; }

/* A fed stream that has nothing to give gives back the room of a large record. */
static int hungry(struct pd_rstream *s)
{
    if (s->begin == s->end && s->cap > 4 * FED_ROOM) {
        pd_free(s->buf);
        s->buf = NULL;
        s->begin = s->end = s->cap = 0;
    }
    if (s->rec.cap > 4 * FED_ROOM)
        pd_buf_free(&s->rec);
    return 2;
}

/* One read. 1: bytes came or the end was reached, 2: nothing within timeout_ms, < 0: an error. */
static int fill(struct pd_rstream *s, int timeout_ms, struct pd_err *e)
{
    size_t have = s->end - s->begin, want = wanted(s);
    struct pollfd p = { .fd = s->tls ? pd_tls_fd(s->tls) : s->fd, .events = s->tls ? pd_tls_wants(s->tls) : POLLIN };
    int ready = s->tls && pd_tls_pending(s->tls) ? 1 : poll(&p, 1, timeout_ms);
    if (ready == 0 || (ready < 0 && errno == EINTR))
        return 2;
    if (ready < 0) {
        pd_fail_sys(&s->fatal, "cannot wait for input");
        return die(s, s->fatal.code, e);
    }
    int rc = make_room(s, want, e);
    if (rc)
        return rc;
    ssize_t n = pd_fault("read") ? (errno = EIO, -1) : s->tls ? pd_tls_read(s->tls, s->buf + s->end, want) : read(s->fd, s->buf + s->end, want);
    if (n < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK))
        return 2;
    if (n < 0 && s->tls && (errno == EPROTO || errno == ECONNRESET)) {
        s->fatal = *pd_tls_why(s->tls);
        s->dead = true;
        if (e)
            *e = s->fatal;
        return s->fatal.code;
    }
    if (n < 0) {
        pd_fail_sys(&s->fatal, "cannot read at byte %llu", (unsigned long long)(s->offset + have));
        return die(s, s->fatal.code, e);
    }
    s->end += (size_t)n;
    s->eof = n == 0;
    if (s->eof && s->tells_end) {       /* the writer waits for the word that all was read */
        if (s->tls)
            pd_tls_end(s->tls);
        shutdown(s->tls ? pd_tls_fd(s->tls) : s->fd, SHUT_WR);
    }
    return 1;
}

/* The run that a cut record belonged to, from the whole pairs that it still has (msgpack) or from its text (JSON); "" when unknown. */
static void run_of_partial(const uint8_t *p, size_t n, bool json, char run[PD_RUN_LEN + 1])
{
    run[0] = 0;
    if (!json) {
        struct pd_iter it;
        struct pd_str key, val;
        struct pd_bin v;
        if (pd_iter_open(&it, (struct pd_bin){ p, n }, PD_T_MAP))
            while (pd_iter_pair(&it, &key, &v))
                if (pd_str_eq(key, "run") && pd_get_str(v, &val) && pd_run_valid(val.p, val.n))
                    memcpy(run, val.p, val.n), run[val.n] = 0;
        return;
    }
    const char *s = memmem(p, n, "\"run\"", 5), *end = (const char *)p + n;
    for (s = s ? s + 5 : end; s < end && (*s == ' ' || *s == ':' || *s == '"'); s++) {}
    if (end - s >= PD_RUN_LEN && pd_run_valid(s, PD_RUN_LEN))
        memcpy(run, s, PD_RUN_LEN), run[PD_RUN_LEN] = 0;
}

static int cut_short(struct pd_rstream *s, const char *why, struct pd_err *e)
{
    char run[PD_RUN_LEN + 1];
    size_t n = s->end - s->begin;
    run_of_partial(s->buf + s->begin, n, s->mode == JSON, run);
    pd_fail(&s->fatal, PD_ECORRUPT, "the stream ends inside a record that begins at byte %llu, after %zu bytes of it%s%s%s%s", (unsigned long long)s->offset, n,
            run[0] ? " (run " : "", run, run[0] ? ")" : "", why);
    return die(s, PD_ECORRUPT, e);
}

static bool is_space(uint8_t c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

/* 1 decided (or empty at the end), 0 more bytes are needed, < 0 error */
static int decide(struct pd_rstream *s, struct pd_err *e)
{
    size_t i = s->begin;
    while (i < s->end && is_space(s->buf[i]))
        i++;
    if (i == s->end) {
        if (!s->lines)
            consume(s, i - s->begin);
        return s->eof;
    }
    uint8_t b = s->buf[i];
    bool map = (b >= 0x80 && b < 0x90) || b == 0xde || b == 0xdf;
    if (s->lines && b >= 0xde && map) {
        /* 0xde and 0xdf also begin characters of U+0780..07FF; then a continuation byte follows, which in msgpack would announce a map of 32768 keys or more */
        if (i + 1 == s->end && !s->eof)
            return 0;
        map = i + 1 == s->end || (s->buf[i + 1] & 0xc0) != 0x80;
    }
    if (b == 0x89 && i + 3 < s->end && !memcmp(s->buf + i, "\x89HDF", 4)) {    /* by itself: a map whose first key is 72 */
        pd_fail(&s->fatal, PD_ECORRUPT, "a KV dump (HDF5) begins here, records are expected: name the file (pd-decode -i FILE, pd-trace cat FILE, pd-trace kv)");
        return die(s, PD_ECORRUPT, e);
    }
    if (i + 1 < s->end && (b == 0x15 || b == 0x16) && s->buf[i + 1] == 3) {     /* records of TLS: an alert, a handshake */
        pd_fail(&s->fatal, PD_EFAIL, "%s (give --key-file)", b == 0x16 ? "the other side speaks TLS and this one does not" : "the other side asks for TLS");
        return die(s, PD_EFAIL, e);
    }
    if (b == '{' || map) {
        consume(s, i - s->begin);
        s->mode = b == '{' ? JSON : MSGPACK;
    } else if (s->lines)
        s->mode = LINES;
    else {
        pd_fail(&s->fatal, PD_ECORRUPT, "byte 0x%02x at %llu begins no record: JSON Lines ('{') or msgpack is expected (plain prompts, one a line: pd-prefill --lines)", b,
                (unsigned long long)(s->offset + (i - s->begin)));
        return die(s, PD_ECORRUPT, e);
    }
    return 1;
}

/* 1 a record, 0 more bytes are needed, < 0 error */
static int next_msgpack(struct pd_rstream *s, struct pd_rec *rec, struct pd_err *e)
{
    size_t len = 0, n = s->end - s->begin;
    const uint8_t *p = s->buf + s->begin;
    if (!n)
        return 0;
    int rc = n < s->need ? 0 : pd_frame_next(&s->scan, p, n, s->max_record, &len, &s->fatal);
    if (rc == 0) {
        s->need = len ? len : s->need;
        return 0;
    }
    if (rc == 1)
        rc = pd_frame_check(p, len, &s->fatal) ? PD_ECORRUPT : 1;
    if (rc < 0) {
        pd_err_prefix(&s->fatal, "record at byte %llu", (unsigned long long)s->offset);
        return die(s, PD_ECORRUPT, e);
    }
    *rec = (struct pd_rec){ pd_kind_of(p, len), p, len, s->offset };
    consume(s, len);
    return 1;
}

/* A prompt's line as a request. */
static int line_to_request(const uint8_t *p, size_t n, struct pd_buf *out, struct pd_err *e)
{
    long bad = pd_utf8_invalid((const char *)p, n);
    if (bad >= 0)
        return pd_fail(e, PD_EFAIL, "invalid UTF-8 at byte %ld", bad);
    struct pd_request r = { .prompt = { (const char *)p, n } };
    return pd_request_encode(&r, out, e);
}

/* 1 a record, 0 more bytes are needed, < 0 error (*bad: of this line only) */
static int next_line(struct pd_rstream *s, struct pd_rec *rec, bool *bad, struct pd_err *e)
{
    size_t limit = s->max_record > SIZE_MAX / 2 ? SIZE_MAX : s->max_record * 2;     /* base64 and escapes make a line longer than its record */
    for (;;) {
        size_t n = s->end - s->begin;
        const uint8_t *p = s->buf + s->begin;
        const uint8_t *nl = n > s->looked ? memchr(p + s->looked, '\n', n - s->looked) : NULL;
        s->looked = n;
        if (!nl && !(s->eof && n)) {
            if (s->skipping)
                consume(s, n);
            else if (n > limit) {
                *bad = s->skipping = true;
                int rc = pd_fail(e, PD_EFAIL, "%s: the line at byte %llu is longer than %zu bytes (see --max-record)", s->name, (unsigned long long)s->offset, limit);
                consume(s, n);
                return rc;
            }
            return 0;
        }
        size_t len = nl ? (size_t)(nl - p) : n, all = nl ? len + 1 : n;
        if (len && p[len - 1] == '\r')
            len--;
        size_t blank = 0;
        while (blank < len && is_space(p[blank]))
            blank++;
        if (s->skipping || !len || (s->mode == JSON && blank == len)) {
            s->skipping = false;
            consume(s, all);
            continue;
        }
        struct pd_err why = { 0 };
        s->rec.n = 0;
        int rc = s->mode == LINES ? line_to_request(p, len, &s->rec, &why) : pd_json_to_msgpack((const char *)p, len, &s->rec, &why);
        if (!rc && s->rec.n > s->max_record)
            rc = pd_fail(&why, PD_EFAIL, "the record is larger than %zu bytes (see --max-record)", s->max_record);
        if (rc == PD_ENOMEM) {
            if (e)
                *e = why;
            return rc;
        }
        if (rc && !nl && s->mode == JSON) {     /* a line that was cut, rather than a bad one */
            char text[300];
            snprintf(text, sizeof text, "; %.280s", why.msg);
            return cut_short(s, text, e);
        }
        uint64_t offset = s->offset;
        consume(s, all);
        if (rc) {
            *bad = true;
            return pd_fail(e, PD_EFAIL, "%s: line at byte %llu: %s", s->name, (unsigned long long)offset, why.msg);
        }
        *rec = (struct pd_rec){ pd_kind_of(s->rec.p, s->rec.n), s->rec.p, s->rec.n, offset };
        return 1;
    }
}

int pd_rstream_next(struct pd_rstream *s, int timeout_ms, struct pd_rec *rec, bool *bad, struct pd_err *e)
{
    int64_t until = timeout_ms > 0 ? pd_mono_us() + (int64_t)timeout_ms * 1000 : 0;
    bool unused;
    bad = bad ? bad : &unused;
    *bad = false;
    for (;;) {
        if (s->dead) {
            if (e)
                *e = s->fatal;
            return s->fatal.code;
        }
        int rc = s->mode == UNDECIDED && s->end > s->begin ? decide(s, e) : 1;
        if (rc == 1 && s->mode != UNDECIDED)
            rc = s->mode == MSGPACK ? next_msgpack(s, rec, e) : next_line(s, rec, bad, e);
        else if (rc == 1)
            rc = 0;
        if (rc)
            return rc;
        if (s->eof) {
            if (s->end == s->begin || s->mode == UNDECIDED)
                return 0;
            return cut_short(s, "", e);
        }
        if (is_fed(s))
            return hungry(s);
        int wait = timeout_ms;
        if (timeout_ms > 0) {
            int64_t left = until - pd_mono_us();
            wait = left > 0 ? (int)((left + 999) / 1000) : 0;
        }
        rc = fill(s, wait, e);
        if (rc != 1)
            return rc;
    }
}

/* ---- writer ---- */

enum { OUT_BYTES = 1 << 16, BATCH = 64 };

struct pd_wstream {
    int fd;
    struct pd_tls *tls;             /* in its place */
    bool own;
    enum pd_format format;
    char name[64];
    uint64_t bytes;
    size_t n;
    struct pd_buf line;             /* JSON text of a record */
    struct pd_err failed;           /* the first failure: what comes after it would leave a gap, so nothing does */
    uint8_t buf[OUT_BYTES];
};

int pd_wstream_new(int fd, enum pd_format f, bool own_fd, const char *name, struct pd_wstream **out, struct pd_err *e)
{
    struct pd_wstream *w = pd_calloc(1, sizeof *w, "a record stream", e);
    if (!w)
        return PD_ENOMEM;
    w->fd = fd;
    w->format = f;
    w->own = own_fd;
    set_name(w->name, name, "output", "stdout");
    *out = w;
    return 0;
}

int pd_wstream_of(const struct pd_endpoint *to, enum pd_format f, const char *name, struct pd_wstream **out, struct pd_err *e)
{
    int rc = pd_wstream_new(to->fd, f, false, name, out, e);
    if (!rc)
        (*out)->tls = to->tls;
    return rc;
}

uint64_t pd_wstream_bytes(const struct pd_wstream *w) { return w->bytes; }

/* What the reader of a socket said before it went. */
static bool last_words(struct pd_wstream *w)
{
    char said[1500];
    ssize_t n = w->tls ? -1 : recv(w->fd, said, sizeof said, MSG_DONTWAIT);
    return n > 0 && pd_reader_said(said, (size_t)n, w->name, &w->failed);
}

static int write_failed(struct pd_wstream *w, struct pd_err *e)
{
    int why = errno;
    bool gone = why == EPIPE || why == ECONNRESET, told = gone && last_words(w);
    errno = why;
    w->n = 0;
    if (told) {}
    else if (w->tls && errno == EPROTO)
        w->failed = *pd_tls_why(w->tls);
    else if (errno == EINTR)
        pd_fail(&w->failed, PD_ECANCEL, "%s: stopped by a signal while the reader stood still", w->name);
    else
        pd_fail_sys(&w->failed, gone ? "%s: the reader went away" : "%s: cannot write", w->name);
    if (e)
        *e = w->failed;
    return w->failed.code;
}

/* < 0: with errno EINTR, a second signal. */
static int wait_to_write(const struct pd_wstream *w)
{
    struct pollfd p = { .fd = w->tls ? pd_tls_fd(w->tls) : w->fd, .events = w->tls ? pd_tls_wants(w->tls) : POLLOUT };
    return poll(&p, 1, -1) < 0 && errno == EINTR && pd_stop_level() > 1 ? -1 : 0;
}

/* The buffered bytes, then v[0..n): all of them, in few calls. */
static int write_all(struct pd_wstream *w, const struct iovec *v, int n, struct pd_err *e)
{
    struct iovec part[BATCH];
    int taken = 0;                  /* of v, into part */
    int used = 0, at = 0;           /* part[at .. used) is to be written */
    if (w->failed.code) {
        if (e)
            *e = w->failed;
        return w->failed.code;
    }
    if (w->n)
        part[used++] = (struct iovec){ w->buf, w->n };
    for (;;) {
        if (at == used)
            at = used = 0;
        for (; used < BATCH && taken < n; taken++)
            if (v[taken].iov_len)
                part[used++] = v[taken];
        if (at == used)
            break;
        if (pd_stop_level() > 1) {      /* asked at each turn: a signal may also end a write that has written something */
            w->n = 0;
            pd_fail(&w->failed, PD_ECANCEL, "%s: stopped by a signal before all was written", w->name);
            if (e)
                *e = w->failed;
            return PD_ECANCEL;
        }
        ssize_t k = pd_fault("write") ? (errno = ENOSPC, -1) : w->tls ? pd_tls_writev(w->tls, part + at, used - at) : writev(w->fd, part + at, used - at);
        if (k < 0 && errno == EINTR) {
            if (pd_stop_level() > 1)        /* a reader that stands still must not keep us from stopping */
                return write_failed(w, e);
            continue;
        }
        if (k < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            if (wait_to_write(w) < 0)
                return write_failed(w, e);
            continue;
        }
        if (k < 0)
            return write_failed(w, e);
        w->bytes += (uint64_t)k;
        for (size_t left = (size_t)k; left;) {
            size_t step = left < part[at].iov_len ? left : part[at].iov_len;
            part[at].iov_base = (char *)part[at].iov_base + step;
            part[at].iov_len -= step;
            left -= step;
            at += !part[at].iov_len;
        }
    }
    w->n = 0;
    for (int rc; w->tls && (rc = pd_tls_flush(w->tls)) != 0;)
        if (rc < 0 ? (errno = ECONNRESET) : wait_to_write(w) < 0)
            return write_failed(w, e);
    return 0;
}

bool pd_wstream_failed(const struct pd_wstream *w) { return w->failed.code != 0; }

int pd_wstream_flush(struct pd_wstream *w, struct pd_err *e)
{
    return w->n ? write_all(w, NULL, 0, e) : 0;
}

int pd_wstream_raw(struct pd_wstream *w, const void *p, size_t n, struct pd_err *e)
{
    if (n > OUT_BYTES - w->n) {
        struct iovec v = { (void *)p, n };
        return write_all(w, &v, 1, e);
    }
    if (n)
        memcpy(w->buf + w->n, p, n);
    w->n += n;
    return 0;
}

int pd_wstream_put(struct pd_wstream *w, const void *rec, size_t n, struct pd_err *e)
{
    if (w->format == PD_FMT_MSGPACK)
        return pd_wstream_raw(w, rec, n, e);
    w->line.n = 0;
    int rc = pd_msgpack_to_json(rec, n, &w->line, e);
    rc = rc ? rc : pd_buf_add(&w->line, "\n", 1, e);
    return rc ? rc : pd_wstream_raw(w, w->line.p, w->line.n, e);
}

int pd_wstream_putv(struct pd_wstream *w, const struct iovec *v, int n, struct pd_err *e)
{
    if (w->format == PD_FMT_MSGPACK)
        return write_all(w, v, n, e);
    struct pd_buf all = { 0 };
    int rc = 0;
    for (int i = 0; !rc && i < n; i++)
        rc = pd_buf_add(&all, v[i].iov_base, v[i].iov_len, e);
    rc = rc ? rc : pd_wstream_put(w, all.p, all.n, e);
    pd_buf_free(&all);
    return rc;
}

int pd_wstream_close(struct pd_wstream *w, struct pd_err *e)
{
    if (!w)
        return 0;
    int rc = pd_wstream_flush(w, e);
    if (w->own && close(w->fd) && errno != EINTR && !rc)
        rc = write_failed(w, e);
    pd_buf_free(&w->line);
    pd_free(w);
    return rc;
}

int pd_wstream_end(struct pd_wstream *w, struct pd_endpoint *out, int rc, struct pd_err *e)
{
    int end = pd_wstream_close(w, rc ? NULL : e);
    rc = rc ? rc : end;
    rc = rc ? rc : pd_endpoint_commit(out, e);
    pd_endpoint_abort(out);
    return rc;
}
