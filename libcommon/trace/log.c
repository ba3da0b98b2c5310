#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>
#include "../base/fault.h"
#include "../base/stop.h"
#include "../wire/endpoint.h"
#include "../wire/frame.h"
#include "../wire/json.h"
#include "keyed.h"
#include "log.h"

enum { ROOM = 1 << 16, HEAD = 6 /* the longest beginning of a record: map 32, then "pd" */, GIVE_UP = 4 << 20 /* bytes without a record: this is no log */,
       STEP_US = 1000 /* clocks that differ by less agree */, MAX_CLOCKED = 1 << 16 };

enum form { UNDECIDED, MSGPACK, JSON };

struct file {
    char *name;
    struct pd_endpoint ep;
    dev_t dev; ino_t ino;
    bool regular, over;                 /* over: its end was read, and nothing can follow */
    enum form form;
    uint8_t *buf;
    size_t begin, end, cap;
    uint64_t offset;                    /* of buf[begin] */
    bool lost;                          /* looking for the next record */
    uint64_t records, torn_bytes;
    bool held, given;                   /* rec is to be given out; was */
    struct pd_log_rec rec;
    struct pd_arena mem;
    struct pd_buf converted;
    int64_t key;                        /* of rec: never less than that of the one before */
};

/* Clocks that were seen to agree: wall = mono + base. `now` is where wall time stands against mono, after steps. */
struct clock_group { int64_t base, now; };
struct clocked { struct pd_node node; uint32_t group; };

struct pd_log {
    struct pd_log_opts o;
    struct file *file;
    uint32_t n;
    struct pd_log_stats st;
    struct clock_group *group;
    uint32_t n_groups;
    struct pd_keyed clocked;            /* a hash of the worker's name */
};

/* ---- where a record begins ---- */

/* Does a map begin at p whose first key is "pd" and whose first value a short string? Its length up to the value's head byte, or 0. No UTF-8 text holds these
 * bytes: after the letter d a continuation byte (101xxxxx) cannot stand. */
static size_t head_at(const uint8_t *p, size_t n)
{
    size_t k = n && p[0] > 0x80 && p[0] < 0x90 ? 1 : n && p[0] == 0xde ? 3 : n && p[0] == 0xdf ? 5 : 0;
    return k && n > k + 3 && !memcmp(p + k, "\xa2pd", 3) && p[k + 3] > 0xa0 && p[k + 3] < 0xc0 ? k + 3 : 0;
}

/* The first place in [from, n) where a record begins; n: none. */
static size_t find_head(const uint8_t *p, size_t n, size_t from)
{
    while (from < n) {
        const uint8_t *key = memmem(p + from, n - from, "\xa2pd", 3);
        if (!key)
            return n;
        size_t at = (size_t)(key - p), back[] = { 1, 3, 5 };
        for (size_t i = 0; i < 3; i++)
            if (at >= from + back[i] && head_at(p + at - back[i], n - at + back[i]) == back[i] + 3)
                return at - back[i];
        from = at + 1;
    }
    return n;
}

/* ---- one file ---- */

static void consume(struct file *f, size_t n)
{
    f->begin += n;
    f->offset += n;
}

static void lose(struct pd_log *l, struct file *f, size_t n)
{
    if (!f->lost && n)
        l->st.torn++;
    f->lost = true;
    l->st.torn_bytes += n;
    f->torn_bytes += n;
    consume(f, n);
}

static int make_room(struct file *f, struct pd_err *e)
{
    if (f->begin) {
        memmove(f->buf, f->buf + f->begin, f->end - f->begin);
        f->end -= f->begin;
        f->begin = 0;
    }
    if (f->cap - f->end >= ROOM)
        return 0;
    size_t cap = f->cap ? f->cap * 2 : 2 * ROOM;
    uint8_t *p = pd_realloc(f->buf, cap, 1, "a log's buffer", e);
    if (!p)
        return PD_ENOMEM;
    f->buf = p;
    f->cap = cap;
    return 0;
}

/* Follow: a file that was replaced (rotated) is opened anew once its old self is read, and one that was cut is read from its beginning. */
static bool look_again(struct file *f, struct pd_err *e)
{
    struct stat st;
    if (stat(f->name, &st))
        return false;
    bool other = st.st_dev != f->dev || st.st_ino != f->ino;
    if (!other && (uint64_t)st.st_size >= f->offset + (f->end - f->begin))
        return false;
    if (other) {
        struct pd_endpoint ep;
        if (pd_endpoint_open_in(f->name, NULL, &ep, e))
            return false;
        pd_endpoint_abort(&f->ep);
        f->ep = ep;
        f->dev = st.st_dev;
        f->ino = st.st_ino;
    } else if (lseek(f->ep.fd, 0, SEEK_SET) < 0)
        return false;
    f->begin = f->end = 0;
    f->offset = 0;
    f->lost = false;
    return true;
}

/* 1: bytes came, 0: the end, for now or for good */
static int fill(struct pd_log *l, struct file *f, struct pd_err *e)
{
    if (f->over)
        return 0;
    int rc = make_room(f, e);
    if (rc)
        return rc;
    for (;;) {
        if (pd_stop_level())
            return pd_fail(e, PD_ECANCEL, "%s: interrupted", f->name);
        ssize_t n = pd_fault("read") ? (errno = EIO, -1) : read(f->ep.fd, f->buf + f->end, f->cap - f->end);
        if (n > 0) {
            f->end += (size_t)n;
            return 1;
        }
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return pd_fail_sys(e, "%s: cannot read at byte %llu", f->name, (unsigned long long)(f->offset + (f->end - f->begin)));
        if (l->o.follow && f->regular) {
            if (look_again(f, e))
                continue;
            return 0;
        }
        f->over = true;
        return 0;
    }
}

/* Decodes what was framed. 1 f->rec is it, 0 it is no record of ours, < 0: memory. */
static int take(struct pd_log *l, struct file *f, const uint8_t *p, size_t n, uint64_t offset, struct pd_err *e)
{
    struct pd_bin kind;
    pd_arena_free(&f->mem);
    if (pd_frame_check(p, n, e) || pd_map_find(p, n, "pd", &kind) != 1)
        return 0;
    f->rec = (struct pd_log_rec){ .kind = pd_kind_of(p, n), .p = p, .n = n, .offset = offset, .file = (uint32_t)(f - l->file) };
    if (f->rec.kind == PD_K_EVENT) {
        int rc = pd_event_decode(p, n, &f->mem, &f->rec.ev, e);
        if (rc)
            return rc == PD_ENOMEM ? rc : 0;
        f->rec.state = pd_state_find((struct pd_str){ f->rec.ev.state, strlen(f->rec.ev.state) });
    }
    f->lost = false;
    f->records++;
    l->st.records++;
    return 1;
}

/* 1 a record, 0 more bytes are needed, 2 something was passed over, < 0: memory */
static int next_msgpack(struct pd_log *l, struct file *f, struct pd_err *e)
{
    const uint8_t *p = f->buf + f->begin;
    size_t n = f->end - f->begin, len = 0, max = l->o.max_record;
    struct pd_frame_scan scan = { 0 };
    size_t other = find_head(p, n, 1);
    if (f->lost && !head_at(p, n)) {
        size_t keep = other < n ? other : f->over ? n : n > HEAD + 1 ? n - HEAD - 1 : 0;
        lose(l, f, keep);
        return keep ? 2 : 0;
    }
    int rc = n ? pd_frame_next(&scan, p, n, max, &len, e) : 0, taken = rc == 1 && other >= len ? take(l, f, p, len, f->offset, e) : 0;
    if (taken < 0)
        return taken;
    if (taken) {
        consume(f, len);
        return 1;
    }
    if (rc == 0 && other == n && !f->over)
        return 0;
    /* Cut, or no record: on to the next that begins. A whole one that could not be decoded is passed over alone. */
    lose(l, f, other < n ? other : rc == 1 ? len : f->over ? n : 1);
    return 2;
}

static int next_json(struct pd_log *l, struct file *f, struct pd_err *e)
{
    const uint8_t *p = f->buf + f->begin;
    size_t n = f->end - f->begin, limit = l->o.max_record * 2;
    const uint8_t *nl = n ? memchr(p, '\n', n) : NULL;
    if (!nl && (!f->over || !n) && n <= limit)
        return 0;
    size_t all = nl ? (size_t)(nl - p) + 1 : n, len = all - (nl != NULL);
    uint64_t offset = f->offset;
    bool blank = true;
    for (size_t i = 0; i < len && blank; i++)
        blank = p[i] == ' ' || p[i] == '\t' || p[i] == '\r';
    f->converted.n = 0;
    int rc = blank ? 0 : pd_json_to_msgpack((const char *)p, len, &f->converted, e), taken = 0;
    if (rc == PD_ENOMEM || (!blank && !rc && (taken = take(l, f, f->converted.p, f->converted.n, offset, e)) < 0))
        return PD_ENOMEM;
    if (blank || taken) {
        consume(f, all);
        return blank ? 2 : 1;
    }
    lose(l, f, all);
    f->lost = !nl;              /* each line by itself */
    return 2;
}

/* 1 f->rec holds the next record, 0 the end (for now) */
static int advance(struct pd_log *l, struct file *f, struct pd_err *e)
{
    for (;;) {
        size_t n = f->end - f->begin;
        if (f->form == UNDECIDED)
            while (n && (f->buf[f->begin] == ' ' || f->buf[f->begin] == '\n' || f->buf[f->begin] == '\t' || f->buf[f->begin] == '\r'))
                consume(f, 1), n--;
        if (f->form == UNDECIDED && n)
            f->form = f->buf[f->begin] == '{' ? JSON : MSGPACK;
        int rc = !n ? 0 : f->form == JSON ? next_json(l, f, e) : next_msgpack(l, f, e);
        if (rc == 1 || rc < 0)
            return rc;
        if (!f->records && (f->torn_bytes > GIVE_UP || (rc == 0 && f->over && f->torn_bytes)))
            return pd_fail(e, PD_ECORRUPT, "%s: there is no record in it; a log of events is expected (made by --trace)", f->name);
        if (rc == 2)
            continue;
        if (f->over)
            return 0;
        if ((rc = fill(l, f, e)) < 0 || (rc == 0 && !f->over))
            return rc;          /* once it is over, what is left is passed over */
    }
}

/* ---- clocks ---- */

static int64_t apart(int64_t a, int64_t b) { return a < b ? b - a : a - b; }

/* The event's time on the wall, as the first of its clock's events had it. */
static int aligned(struct pd_log *l, const struct pd_event *v, int64_t *at, struct pd_err *e)
{
    const int64_t far = (int64_t)1 << 60;
    *at = v->t_us;
    if (v->t_us < 0 || v->t_us > far || v->mono_us < 0 || v->mono_us > far || !v->worker.n)
        return 0;
    int64_t off = v->t_us - v->mono_us;
    uint8_t key[8];
    pd_put_be64(key, pd_xxh3(v->worker.p, v->worker.n, 0));
    struct clocked *w = pd_keyed_find(&l->clocked, key, 8);
    if (!w) {
        uint32_t g = 0;
        while (g < l->n_groups && apart(l->group[g].now, off) > STEP_US)
            g++;
        if (g == l->n_groups) {
            if (g == MAX_CLOCKED)
                return 0;
            struct clock_group *p = pd_realloc(l->group, g + 1, sizeof *p, "clocks", e);
            if (!p)
                return PD_ENOMEM;
            l->group = p;
            l->group[l->n_groups++] = (struct clock_group){ off, off };
        }
        if (l->clocked.n == MAX_CLOCKED) {
            *at = v->mono_us + l->group[g].base;
            return 0;
        }
        if (!(w = pd_calloc(1, sizeof *w, "clocks", e)))
            return PD_ENOMEM;
        w->group = g;
        int rc = pd_keyed_add(&l->clocked, w, key, 8, e);
        if (rc) {
            pd_free(w);
            return rc;
        }
    }
    l->group[w->group].now = off;
    *at = v->mono_us + l->group[w->group].base;
    return 0;
}

/* ---- all of them ---- */

static int hold(struct pd_log *l, struct file *f, struct pd_err *e)
{
    int rc = advance(l, f, e);
    if (rc != 1)
        return rc;
    int64_t at = f->key;
    if (f->rec.kind == PD_K_EVENT && (rc = aligned(l, &f->rec.ev, &at, e)))
        return rc;
    f->rec.at_us = at;
    if (at > f->key)
        f->key = at;
    f->held = true;
    return 1;
}

int pd_log_next(struct pd_log *l, struct pd_log_rec *r, struct pd_err *e)
{
    struct file *best = NULL;
    for (struct file *f = l->file; f < l->file + l->n; f++) {
        int rc = f->held ? 1 : hold(l, f, e);
        if (rc < 0)
            return rc;
        if (rc == 1 && (!best || f->key < best->key))
            best = f;
    }
    if (!best)
        return 0;
    best->held = false;
    *r = best->rec;
    return 1;
}

static bool known(const struct pd_log *l, const struct stat *st)
{
    for (uint32_t i = 0; i < l->n; i++)
        if (l->file[i].regular && l->file[i].dev == st->st_dev && l->file[i].ino == st->st_ino)
            return true;
    return false;
}

static int add_file(struct pd_log *l, const char *path, struct pd_err *e)
{
    struct stat st;
    struct file *all = pd_realloc(l->file, l->n + 1, sizeof *all, "the files of a log", e);
    if (!all)
        return PD_ENOMEM;
    l->file = all;
    struct file f = { .ep = { .fd = -1 }, .key = INT64_MIN };
    int rc = pd_endpoint_open_in(path, l->o.net, &f.ep, e);
    if (!rc && f.ep.tls) {
        pd_endpoint_abort(&f.ep);
        rc = pd_fail(e, PD_EUSAGE, "%s: a log is not read by TLS (pd-trace cat writes it into a file or a pipe)", path);
    }
    if (rc)
        return rc;
    if (!fstat(f.ep.fd, &st) && S_ISREG(st.st_mode)) {
        if (known(l, &st)) {
            pd_endpoint_abort(&f.ep);
            return 0;
        }
        f.regular = strcmp(path, "-") != 0;
        f.dev = st.st_dev;
        f.ino = st.st_ino;
    }
    const char *name = strcmp(path, "-") ? path : "stdin";
    if (!(f.name = pd_strndup(name, strlen(name), e))) {
        pd_endpoint_abort(&f.ep);
        return PD_ENOMEM;
    }
    l->file[l->n++] = f;
    return 0;
}

static int add_path(struct pd_log *l, const char *path, struct pd_err *e)
{
    struct pd_buf old = { 0 };
    struct stat st, st1;
    int rc = 0;
    if (!l->o.follow && strcmp(path, "-") && !stat(path, &st) && S_ISREG(st.st_mode)) {
        if ((rc = pd_buf_printf(&old, e, "%s.1", path)) == 0 && !stat((char *)old.p, &st1) && S_ISREG(st1.st_mode))
            rc = add_file(l, (char *)old.p, e);
        pd_buf_free(&old);
    }
    return rc ? rc : add_file(l, path, e);
}

int pd_log_open(const char *const *paths, const struct pd_log_opts *o, struct pd_log **out, struct pd_err *e)
{
    static const char *const none[] = { "-", NULL };
    struct pd_log *l = pd_calloc(1, sizeof *l, "a log", e);
    int rc = 0;
    if (!l)
        return PD_ENOMEM;
    l->o = *o;
    if (!l->o.max_record)
        l->o.max_record = PD_MAX_RECORD_DEFAULT;
    for (const char *const *p = paths && paths[0] ? paths : none; *p && !rc; p++)
        rc = add_path(l, *p, e);
    if (rc) {
        pd_log_free(l);
        return rc;
    }
    *out = l;
    return 0;
}

const char *pd_log_name(const struct pd_log *l, uint32_t file) { return l->file[file].name; }
struct pd_log_stats pd_log_stats(const struct pd_log *l) { return l->st; }

bool pd_log_over(const struct pd_log *l)
{
    for (uint32_t i = 0; i < l->n; i++)
        if (!l->file[i].over)
            return false;
    return true;
}

void pd_log_free(struct pd_log *l)
{
    if (!l)
        return;
    for (uint32_t i = 0; i < l->n; i++) {
        pd_endpoint_abort(&l->file[i].ep);
        pd_arena_free(&l->file[i].mem);
        pd_buf_free(&l->file[i].converted);
        pd_free(l->file[i].buf);
        pd_free(l->file[i].name);
    }
    for (struct pd_node *p = l->clocked.first, *next; p; p = next) {
        next = p->next;
        pd_free(p);
    }
    pd_keyed_free(&l->clocked);
    pd_free(l->group);
    pd_free(l->file);
    pd_free(l);
}
