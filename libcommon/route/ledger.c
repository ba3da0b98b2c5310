#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include "../base/clock.h"
#include "../base/fault.h"
#include "../base/hash.h"
#include "../base/outfile.h"
#include "../wire/frame.h"
#include "../wire/pack.h"
#include "../wire/record.h"
#include "../wire/value.h"
#include "ledger.h"

enum { FILE_MAX = 1 << 30, REC_MAX = 4096, GROWTH = 4 };

/* An endpoint, or two: kept while something is about it. */
struct place { struct pd_node node; char *at, *to; struct pd_ledger_sum sum; uint32_t users; };

struct pd_ledger {
    struct pd_keyed items, holds, places /* one endpoint, and links */;
    struct pd_ledger_sum all;
    uint32_t n_left;
    char *path;
    int fd;
    size_t size, clean;         /* bytes of the file, and of what it held when it was written anew */
    struct pd_buf line;
    char trouble[200];
    int64_t retry_us;
    bool reading;               /* nothing is written back */
};

/* ---- places ---- */

static void key_of(const char *a, const char *b, uint8_t out[16])
{
    pd_put_be64(out, pd_xxh3(a, strlen(a), 0));
    pd_put_be64(out + 8, b ? pd_xxh3(b, strlen(b), 1) : 0);
}

static struct place *place_at(const struct pd_ledger *l, const char *at, const char *to)
{
    uint8_t key[16];
    key_of(at, to, key);
    return pd_keyed_find(&l->places, key, sizeof key);
}

static void place_let(struct pd_ledger *l, struct place *p)
{
    if (!p || --p->users)
        return;
    pd_keyed_remove(&l->places, p);
    pd_free(p->at);
    pd_free(p->to);
    pd_free(p);
}

static struct place *place_keep(struct pd_ledger *l, const char *at, const char *to, struct pd_err *e)
{
    uint8_t key[16];
    struct place *p = place_at(l, at, to);
    if (p) {
        p->users++;
        return p;
    }
    key_of(at, to, key);
    if (!(p = pd_calloc(1, sizeof *p, "a place of the ledger", e)) || !(p->at = pd_strndup(at, strlen(at), e)) || (to && !(p->to = pd_strndup(to, strlen(to), e))) ||
        pd_keyed_add(&l->places, p, key, sizeof key, e) < 0) {
        if (p) {
            pd_free(p->at);
            pd_free(p->to);
        }
        pd_free(p);
        return NULL;
    }
    p->users = 1;
    return p;
}

/* ---- items ---- */

static void item_key(const char *run, uint8_t attempt, uint8_t out[PD_RUN_LEN + 1])
{
    memcpy(out, run, PD_RUN_LEN);
    out[PD_RUN_LEN] = attempt;
}

static void count(struct pd_ledger_sum *s, const struct pd_ledger_item *i, int by)
{
    s->runs += (uint32_t)by;
    s->tokens += by > 0 ? i->tokens : -i->tokens;
    s->blocks += by > 0 ? i->blocks : -i->blocks;
    s->bytes += by > 0 ? i->bytes : -i->bytes;
}

static void count_all(struct pd_ledger *l, const struct pd_ledger_item *i, int by)
{
    if (i->taken)
        return;
    count(&l->all, i, by);
    count(&place_at(l, i->p, NULL)->sum, i, by);
    count(&place_at(l, i->p, i->d)->sum, i, by);
}

struct pd_ledger_item *pd_ledger_find(const struct pd_ledger *l, const char *run, uint8_t attempt)
{
    uint8_t key[PD_RUN_LEN + 1];
    item_key(run, attempt, key);
    return pd_keyed_find(&l->items, key, sizeof key);
}

static void forget(struct pd_ledger *l, struct pd_ledger_item *i)
{
    struct place *p = place_at(l, i->p, NULL), *link = place_at(l, i->p, i->d);
    count_all(l, i, -1);
    l->n_left -= i->left;
    pd_keyed_remove(&l->items, i);
    pd_free(i);
    place_let(l, link);         /* the item's strings are the link's */
    place_let(l, p);
}

static int keep(struct pd_ledger *l, const struct pd_ledger_item *what, struct pd_ledger_item **out, struct pd_err *e)
{
    uint8_t key[PD_RUN_LEN + 1];
    struct pd_ledger_item *i = pd_ledger_find(l, what->run, what->attempt);
    if (!i && l->items.n >= PD_LEDGER_ITEMS)
        return pd_fail(e, PD_ENOMEM, "the ledger has %d items that nobody has read", PD_LEDGER_ITEMS);
    struct place *p = place_keep(l, what->p, NULL, e), *link = p ? place_keep(l, what->p, what->d, e) : NULL;
    if (i && link)              /* after that: its strings may be those of `what` */
        forget(l, i);
    item_key(what->run, what->attempt, key);
    if (!link || !(i = pd_calloc(1, sizeof *i, "an item of the ledger", e)) || pd_keyed_add(&l->items, i, key, sizeof key, e) < 0) {
        if (link)
            pd_free(i);
        place_let(l, link);
        place_let(l, p);
        return PD_ENOMEM;
    }
    struct pd_node node = i->node;
    *i = *what;
    i->node = node;
    i->p = link->at;
    i->d = link->to;
    l->n_left += i->left;
    count_all(l, i, 1);
    *out = i;
    return 0;
}

/* ---- records ---- */

static void head(struct pd_packer *k, const char *what, uint32_t pairs)
{
    msgpack_pack_map(&k->pk, 3 + pairs);
    pd_pack_text(k, "pd");
    pd_pack_text(k, "ledger");
    pd_pack_text(k, "v");
    msgpack_pack_int(&k->pk, 1);
    pd_pack_text(k, "do");
    pd_pack_text(k, what);
}

static void put_text(struct pd_packer *k, const char *key, const char *v)
{
    pd_pack_text(k, key);
    size_t n = strlen(v);
    pd_pack_str(k, (struct pd_str){ v, n < PD_LEDGER_TEXT ? n : PD_LEDGER_TEXT });
}

static void put_num(struct pd_packer *k, const char *key, uint64_t v)
{
    pd_pack_text(k, key);
    msgpack_pack_uint64(&k->pk, v);
}

static void pack_named(struct pd_packer *k, const char *what, const struct pd_ledger_item *i, uint32_t pairs)
{
    head(k, what, 2 + pairs);
    put_text(k, "run", i->run);
    put_num(k, "attempt", i->attempt);
}

static void pack_give(struct pd_packer *k, const struct pd_ledger_item *i)
{
    pack_named(k, "give", i, 6);
    pd_pack_text(k, "token");
    pd_pack_bin(k, i->token, sizeof i->token);
    put_text(k, "p", i->p);
    put_text(k, "d", i->d);
    put_num(k, "tokens", i->tokens);
    put_num(k, "blocks", i->blocks);
    put_num(k, "t_us", (uint64_t)i->t_us);
}

static void pack_publish(struct pd_packer *k, const struct pd_ledger_item *i)
{
    pack_named(k, "publish", i, 1);
    put_num(k, "bytes", i->bytes);
}

static void pack_pair(struct pd_packer *k, const char *what, const char *p, const char *d, const char *key, const char *text, int64_t t_us)
{
    head(k, what, 4);
    put_text(k, "p", p);
    put_text(k, "d", d);
    put_text(k, key, text);
    put_num(k, "t_us", (uint64_t)t_us);
}

/* ---- the file ---- */

static bool write_all(int fd, const uint8_t *p, size_t n)
{
    while (n) {
        ssize_t k = pd_fault("write") ? (errno = ENOSPC, -1) : write(fd, p, n);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return false;
        p += k;
        n -= (size_t)k;
    }
    return true;
}

/* What holds, into a new file that takes the old one's place. */
static int write_anew(struct pd_ledger *l, struct pd_err *e)
{
    struct pd_buf b = { 0 };
    struct pd_packer k;
    struct pd_outfile f;
    int fd = -1;
    pd_pack_init(&k, &b, e);
    for (const struct pd_node *n = l->holds.first; n; n = n->next) {
        const struct pd_ledger_hold *h = (const struct pd_ledger_hold *)n;
        pack_pair(&k, "hold", h->p, h->d, "cause", h->cause, h->t_us);
    }
    for (const struct pd_node *n = l->items.first; n; n = n->next) {
        const struct pd_ledger_item *i = (const struct pd_ledger_item *)n;
        pack_give(&k, i);
        if (i->published)
            pack_publish(&k, i);
        if (i->taken)
            pack_named(&k, "take", i, 0);
    }
    int rc = k.rc ? k.rc : pd_outfile_open(l->path, &f, e);
    if (rc < 0) {
        pd_buf_free(&b);
        return rc;
    }
    if (!write_all(f.fd, b.p, b.n) || (fd = fcntl(f.fd, F_DUPFD_CLOEXEC, 0)) < 0 || flock(fd, LOCK_EX | LOCK_NB))
        rc = pd_fail_sys(e, "%s: cannot write this ledger anew", l->path);
    if (rc < 0)
        pd_outfile_abort(&f);
    else
        rc = pd_outfile_commit(&f, e);
    if (rc < 0 && fd >= 0)
        close(fd);
    if (rc == 0) {
        if (l->fd >= 0)
            close(l->fd);
        l->fd = fd;
        l->size = l->clean = b.n;
        l->trouble[0] = 0;
    }
    pd_buf_free(&b);
    return rc;
}

static void try_again(struct pd_ledger *l, int64_t now)
{
    struct pd_err e;
    if (now < l->retry_us)
        return;
    l->retry_us = now + 1000000;
    if (write_anew(l, &e) < 0)
        snprintf(l->trouble, sizeof l->trouble, "%.180s", e.msg);
}

void pd_ledger_beat(struct pd_ledger *l, int64_t now_us)
{
    if (l->trouble[0])
        try_again(l, now_us);
}

/* What was packed is written. After a failure the file is written anew once a second, until that is done: what was lost is then there. */
static void append(struct pd_ledger *l, const struct pd_packer *k)
{
    struct pd_err e = { 0 };
    if (l->reading || !l->path)
        return;
    if (!k->rc && !l->trouble[0] && write_all(l->fd, l->line.p, l->line.n)) {
        l->size += l->line.n;
        if (l->size > PD_LEDGER_SLACK && l->size > GROWTH * l->clean && write_anew(l, &e) < 0)
            l->clean = l->size;         /* not before it has grown as much again */
        return;
    }
    if (!l->trouble[0])
        snprintf(l->trouble, sizeof l->trouble, "%s: %s", l->path, k->rc ? "out of memory" : strerror(errno));
    try_again(l, pd_mono_us());
}

static struct pd_packer *begin(struct pd_ledger *l, struct pd_packer *k)
{
    l->line.n = 0;
    pd_pack_init(k, &l->line, NULL);
    return k;
}

/* ---- words of it ---- */

int pd_ledger_give(struct pd_ledger *l, const struct pd_ledger_item *what, struct pd_err *e)
{
    struct pd_ledger_item *i;
    struct pd_packer k;
    int rc = keep(l, what, &i, e);
    if (rc < 0)
        return rc;
    pack_give(begin(l, &k), i);
    append(l, &k);
    return 0;
}

void pd_ledger_publish(struct pd_ledger *l, struct pd_ledger_item *i, uint64_t bytes)
{
    struct pd_packer k;
    count_all(l, i, -1);
    i->bytes = bytes;
    i->published = true;
    count_all(l, i, 1);
    pack_publish(begin(l, &k), i);
    append(l, &k);
}

void pd_ledger_take(struct pd_ledger *l, struct pd_ledger_item *i)
{
    struct pd_packer k;
    if (i->taken)
        return;
    count_all(l, i, -1);
    i->taken = true;
    pack_named(begin(l, &k), "take", i, 0);
    append(l, &k);
}

void pd_ledger_end(struct pd_ledger *l, struct pd_ledger_item *i)
{
    struct pd_packer k;
    pack_named(begin(l, &k), "end", i, 0);
    forget(l, i);
    append(l, &k);
}

static void drop_hold(struct pd_ledger *l, struct pd_ledger_hold *h)
{
    struct place *link = place_at(l, h->p, h->d);
    pd_keyed_remove(&l->holds, h);
    pd_free(h->cause);
    pd_free(h);
    place_let(l, link);
}

int pd_ledger_hold(struct pd_ledger *l, const char *p, const char *d, const char *cause, int64_t t_us, struct pd_err *e)
{
    struct pd_packer k;
    uint8_t key[16];
    if (pd_ledger_held(l, p, d))
        return 0;
    if (l->holds.n >= PD_LEDGER_HOLDS)
        return pd_fail(e, PD_ENOMEM, "%d pairs are on hold already", PD_LEDGER_HOLDS);
    struct place *link = place_keep(l, p, d, e);
    struct pd_ledger_hold *h = link ? pd_calloc(1, sizeof *h, "a hold", e) : NULL;
    key_of(p, d, key);
    if (!h || !(h->cause = pd_strndup(cause, strnlen(cause, PD_LEDGER_TEXT), e)) || pd_keyed_add(&l->holds, h, key, sizeof key, e) < 0) {
        if (h)
            pd_free(h->cause);
        pd_free(h);
        place_let(l, link);
        return PD_ENOMEM;
    }
    for (char *c = h->cause; *c; c++)   /* it may be a worker's word: see swallowed() */
        *c = (unsigned char)*c < 32 || (unsigned char)*c > 126 ? '?' : *c;
    h->p = link->at;
    h->d = link->to;
    h->t_us = t_us;
    pack_pair(begin(l, &k), "hold", p, d, "cause", h->cause, t_us);
    append(l, &k);
    return 0;
}

const struct pd_ledger_hold *pd_ledger_held(const struct pd_ledger *l, const char *p, const char *d)
{
    uint8_t key[16];
    if (!l->holds.n)
        return NULL;
    key_of(p, d, key);
    return pd_keyed_find(&l->holds, key, sizeof key);
}

static void release(struct pd_ledger *l, struct pd_ledger_hold *h, const char *reason, int64_t t_us)
{
    struct pd_packer k;
    pack_pair(begin(l, &k), "release", h->p, h->d, "reason", reason, t_us);
    drop_hold(l, h);
    append(l, &k);
}

int pd_ledger_release(struct pd_ledger *l, const char *p, const char *d, const char *reason, int64_t t_us)
{
    int any = 0;
    if (p && d) {               /* they may be the hold's own */
        struct pd_ledger_hold *h = (struct pd_ledger_hold *)pd_ledger_held(l, p, d);
        if (h)
            release(l, h, reason, t_us);
        return h != NULL;
    }
    for (struct pd_node *n = l->holds.first, *next; n; n = next) {
        struct pd_ledger_hold *h = (struct pd_ledger_hold *)n;
        next = n->next;
        if ((p && strcmp(h->p, p)) || (d && strcmp(h->d, d)))
            continue;
        release(l, h, reason, t_us);
        any = 1;
    }
    return any;
}

struct pd_ledger_item *pd_ledger_first(const struct pd_ledger *l) { return (void *)l->items.first; }
const struct pd_ledger_hold *pd_ledger_first_hold(const struct pd_ledger *l) { return (void *)l->holds.first; }
struct pd_ledger_sum pd_ledger_all(const struct pd_ledger *l) { return l->all; }
uint32_t pd_ledger_left(const struct pd_ledger *l) { return l->n_left; }
const char *pd_ledger_trouble(const struct pd_ledger *l) { return l->trouble[0] ? l->trouble : NULL; }
struct pd_ledger_sum pd_ledger_of(const struct pd_ledger *l, const char *p) { return pd_ledger_of_link(l, p, NULL); }

struct pd_ledger_sum pd_ledger_of_link(const struct pd_ledger *l, const char *p, const char *d)
{
    const struct place *at = place_at(l, p, d);
    return at ? at->sum : (struct pd_ledger_sum){ 0 };
}

/* ---- reading ---- */

static bool text_in(const uint8_t *p, size_t n, const char *key, char out[PD_LEDGER_TEXT + 1])
{
    struct pd_bin v;
    struct pd_str s;
    if (pd_map_find(p, n, key, &v) != 1 || !pd_get_str(v, &s) || !s.n || s.n > PD_LEDGER_TEXT || memchr(s.p, 0, s.n))
        return false;
    memcpy(out, s.p, s.n);
    out[s.n] = 0;
    return true;
}

static bool num_in(const uint8_t *p, size_t n, const char *key, uint64_t most, uint64_t *out)
{
    struct pd_bin v;
    int64_t x;
    if (pd_map_find(p, n, key, &v) != 1 || !pd_get_int(v, &x) || x < 0 || (uint64_t)x > most)
        return false;
    *out = (uint64_t)x;
    return true;
}

/* 1: taken, or about something that has ended; 0: no record of a ledger. */
static int take(struct pd_ledger *l, const uint8_t *p, size_t n, struct pd_err *e)
{
    char kind[PD_LEDGER_TEXT + 1], what[PD_LEDGER_TEXT + 1], run[PD_LEDGER_TEXT + 1], at[PD_LEDGER_TEXT + 1], to[PD_LEDGER_TEXT + 1], cause[PD_LEDGER_TEXT + 1];
    struct pd_ledger_item i = { .left = true }, *known;
    struct pd_bin v, token;
    uint64_t attempt, t_us = 0;
    int rc;
    if (!text_in(p, n, "pd", kind) || strcmp(kind, "ledger") || !text_in(p, n, "do", what))
        return 0;
    if (!strcmp(what, "hold") || !strcmp(what, "release")) {
        bool hold = what[0] == 'h';
        if (!text_in(p, n, "p", at) || !text_in(p, n, "d", to) || !text_in(p, n, hold ? "cause" : "reason", cause) || !num_in(p, n, "t_us", INT64_MAX, &t_us))
            return 0;
        rc = hold ? pd_ledger_hold(l, at, to, cause, (int64_t)t_us, e) : 0;
        if (!hold)
            pd_ledger_release(l, at, to, cause, (int64_t)t_us);
        return rc < 0 ? rc : 1;
    }
    if (!text_in(p, n, "run", run) || !pd_run_valid(run, strlen(run)) || !num_in(p, n, "attempt", UINT8_MAX, &attempt))
        return 0;
    if (!strcmp(what, "give")) {
        if (!text_in(p, n, "p", at) || !text_in(p, n, "d", to) || pd_map_find(p, n, "token", &v) != 1 || !pd_get_bin(v, &token) || token.n != sizeof i.token ||
            !num_in(p, n, "tokens", UINT32_MAX, &i.tokens) || !num_in(p, n, "blocks", UINT32_MAX, &i.blocks) || !num_in(p, n, "t_us", INT64_MAX, &t_us))
            return 0;
        memcpy(i.run, run, PD_RUN_LEN);
        memcpy(i.token, token.p, sizeof i.token);
        i.attempt = (uint8_t)attempt;
        i.p = at;
        i.d = to;
        i.t_us = (int64_t)t_us;
        rc = keep(l, &i, &known, e);
        return rc < 0 ? rc : 1;
    }
    known = pd_ledger_find(l, run, (uint8_t)attempt);
    if (!strcmp(what, "publish")) {
        if (!num_in(p, n, "bytes", (uint64_t)1 << 50, &i.bytes))
            return 0;
        if (known)
            pd_ledger_publish(l, known, i.bytes);
        return 1;
    }
    bool takes = !strcmp(what, "take");
    if (!takes && strcmp(what, "end"))
        return 0;
    if (known)
        takes ? pd_ledger_take(l, known) : pd_ledger_end(l, known);
    return 1;
}

/* A torn record can look whole when it has swallowed the head of the next one, or the first byte of that: the head's bytes are in no other place of a record.
 * n: of the record; left: all that there is from p on. */
static bool swallowed(const uint8_t *p, size_t n, size_t left)
{
    static const uint8_t mark[] = "\xa2pd\xa6ledger\xa1v\x01\xa2" "do";
    size_t within = n + sizeof mark - 1 < left ? n + sizeof mark - 1 : left;
    return memmem(p + 2, within - 2, mark, sizeof mark - 1) != NULL;
}

int pd_ledger_read(struct pd_ledger *l, const uint8_t *p, size_t n, uint64_t *torn, struct pd_err *e)
{
    bool was = l->reading;
    int rc = 0;
    *torn = 0;
    l->reading = true;
    for (size_t at = 0; at < n && rc >= 0;) {
        struct pd_frame_scan scan = { 0 };
        size_t len = 0, most = n - at < REC_MAX ? n - at : REC_MAX;
        bool framed = pd_frame_next(&scan, p + at, most, REC_MAX, &len, NULL) == 1 && pd_frame_check(p + at, len, NULL) == 0;
        rc = framed && len > 2 && !swallowed(p + at, len, n - at) ? take(l, p + at, len, e) : 0;
        at += rc == 1 ? len : 1;
        *torn += rc == 0;
    }
    l->reading = was;
    return rc < 0 ? rc : 0;
}

/* The file that is there now is the one that is locked: another router may have put a new one into its place meanwhile. */
static int lock(const char *path, int fd, struct pd_err *e)
{
    struct stat st, now;
    if (fstat(fd, &st))
        return pd_fail_sys(e, "%s", path);
    if (!S_ISREG(st.st_mode) || st.st_size > FILE_MAX)
        return pd_fail(e, PD_EUSAGE, "%s: a ledger is a regular file of at most %d MiB", path, FILE_MAX >> 20);
    if (st.st_mode & 077)
        return pd_fail(e, PD_EUSAGE, "%s: a ledger is its owner's alone, as it holds the tokens of runs (mode %03o; chmod 600 %s)", path, (unsigned)st.st_mode & 0777, path);
    if (flock(fd, LOCK_EX | LOCK_NB) || stat(path, &now) || now.st_ino != st.st_ino || now.st_dev != st.st_dev)
        return pd_fail(e, PD_EUSAGE, "%s: another router has this ledger (each has its own)", path);
    return 0;
}

static int read_file(struct pd_ledger *l, struct pd_ledger_read *was, struct pd_err *e)
{
    struct pd_buf b = { 0 };
    ssize_t k = 1;
    int rc = lock(l->path, l->fd, e);
    while (rc == 0 && k > 0 && (rc = pd_buf_reserve(&b, 1 << 16, e)) == 0) {
        k = pd_fault("read") ? (errno = EIO, -1) : read(l->fd, b.p + b.n, 1 << 16);
        if (k < 0 && errno == EINTR)
            k = 1;
        else if (k < 0)
            rc = pd_fail_sys(e, "%s: cannot read this ledger", l->path);
        else
            b.n += (size_t)k;
    }
    rc = rc ? rc : pd_ledger_read(l, b.p, b.n, &was->torn, e);
    if (rc == 0 && b.n && was->torn == b.n)     /* not one record: somebody else's file, which is not to be overwritten */
        rc = pd_fail(e, PD_EUSAGE, "%s: this is no ledger (name another file, or remove it)", l->path);
    was->left = (uint32_t)l->items.n;
    was->holds = (uint32_t)l->holds.n;
    pd_buf_free(&b);
    return rc;
}

int pd_ledger_open(const char *path, struct pd_ledger **out, struct pd_ledger_read *was, struct pd_err *e)
{
    struct pd_ledger *l = pd_calloc(1, sizeof *l, "a ledger", e);
    int rc = 0;
    *was = (struct pd_ledger_read){ 0 };
    if (!l)
        return PD_ENOMEM;
    l->fd = -1;
    if (path && !(l->path = pd_strndup(path, strlen(path), e)))
        rc = PD_ENOMEM;
    if (rc == 0 && path && (l->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0600)) < 0)
        rc = pd_fail_sys(e, "%s: cannot open this ledger", path);
    if (rc == 0 && path)
        rc = (rc = read_file(l, was, e)) ? rc : write_anew(l, e);
    if (rc < 0)
        pd_ledger_free(l);
    else
        *out = l;
    return rc;
}

void pd_ledger_free(struct pd_ledger *l)
{
    if (!l)
        return;
    while (l->items.first)
        forget(l, (struct pd_ledger_item *)l->items.first);
    while (l->holds.first)
        drop_hold(l, (struct pd_ledger_hold *)l->holds.first);
    pd_keyed_free(&l->items);
    pd_keyed_free(&l->holds);
    pd_keyed_free(&l->places);
    pd_buf_free(&l->line);
    if (l->fd >= 0)
        close(l->fd);
    pd_free(l->path);
    pd_free(l);
}
