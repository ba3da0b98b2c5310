#include "reqlog.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "../base/hash.h"
#include "../base/infile.h"
#include "../wire/frame.h"
#include "../wire/json.h"
#include "../wire/record.h"
#include "../wire/value.h"

static const int64_t MOST_US = INT64_MAX / 4;
enum { OWN_BLOCK = 16 };
#define MAX_FILE ((size_t)1 << 30)

struct reader {
    struct pd_reqlog *l;
    struct pd_buf rows, blocks;
    const char *name;
    uint64_t line;                      /* the row at hand: a line, or of msgpack a record */
    const char *unit;
    int64_t t0, last;                   /* us; as the file has them */
    struct pd_err *e;
};

static int bad(struct reader *r, const char *what) { return pd_fail(r->e, PD_ECORRUPT, "%s: %s %llu: %s", r->name, r->unit, (unsigned long long)r->line, what); }

/* *e, filled by somebody else, with the place before it; rc: PD_ENOMEM stays what it is. */
static int inside(struct reader *r, int rc)
{
    pd_err_prefix(r->e, "%s: %s %llu", r->name, r->unit, (unsigned long long)r->line);
    rc = rc == PD_ENOMEM ? rc : PD_ECORRUPT;
    if (r->e)
        r->e->code = rc;
    return rc;
}

static int add_row(struct reader *r, int64_t at_us, bool timed, int64_t isl, int64_t osl, uint32_t n_blocks)
{
    struct pd_reqlog_row row = { .isl = (uint32_t)isl, .osl = (uint32_t)osl, .n_blocks = n_blocks, .block = r->blocks.n / sizeof(uint64_t) - n_blocks };
    if (!isl || !osl) {
        r->l->dropped++;
        r->blocks.n -= n_blocks * sizeof(uint64_t);
        return 0;
    }
    bool first = !r->rows.n;
    r->l->timed = first ? timed : r->l->timed && timed;
    if (timed) {
        if (first)
            r->t0 = at_us;
        else if (at_us < r->last)
            return bad(r, "its time is before that of the row above (sort the file by time)");
        r->last = at_us;
        row.at_us = at_us - r->t0;
    }
    return pd_buf_add(&r->rows, &row, sizeof row, r->e);
}

static int tokens_of(struct reader *r, const char *key, double v, int64_t *out)
{
    char what[120];
    if (!(v >= 0 && v <= PD_REQLOG_TOKENS) || v != floor(v)) {
        snprintf(what, sizeof what, "%s: %.10g is no number of tokens (0 to %d)", key, v, PD_REQLOG_TOKENS);
        return bad(r, what);
    }
    *out = (int64_t)v;
    return 0;
}

/* ---- JSON Lines of others ---- */

static int number(struct reader *r, struct pd_bin map, const char *key, double *out)
{
    struct pd_bin v;
    char what[120];
    if (pd_map_find(map.p, map.n, key, &v) == 1 && pd_get_float(v, out))
        return 0;
    snprintf(what, sizeof what, "%s is missing, or no number", key);
    return bad(r, what);
}

static int hash_ids(struct reader *r, struct pd_bin map, int64_t isl, uint32_t *n)
{
    struct pd_bin v, one;
    struct pd_iter it;
    char what[120];
    int64_t id, most = (isl + r->l->block_tokens - 1) / r->l->block_tokens;
    *n = 0;
    if (pd_map_find(map.p, map.n, "hash_ids", &v) != 1)
        return 0;
    if (!pd_iter_open(&it, v, PD_T_ARRAY))
        return bad(r, "hash_ids is no list");
    if (it.left > (uint64_t)most) {
        snprintf(what, sizeof what, "%llu hash_ids are more blocks of %u than input_length %lld has", (unsigned long long)it.left, r->l->block_tokens, (long long)isl);
        return bad(r, what);
    }
    while (pd_iter_next(&it, &one)) {
        if (!pd_get_int(one, &id))
            return bad(r, "hash_ids: an id is no whole number");
        int rc = pd_buf_add(&r->blocks, &id, sizeof id, r->e);
        if (rc)
            return rc;
        ++*n;
    }
    return 0;
}

static int json_row(struct reader *r, struct pd_bin map)
{
    struct pd_bin v;
    double at = 0, in = 0, out = 0;
    int64_t isl = 0, osl = 0;
    uint32_t n = 0;
    bool chat = pd_map_find(map.p, map.n, "chat_id", &v) == 1;
    if (!r->rows.n) {
        r->l->kind = chat ? "bailian" : "mooncake";
        r->l->block_tokens = chat ? 16 : 512;
    }
    int rc = number(r, map, "timestamp", &at);
    rc = rc ? rc : number(r, map, "input_length", &in);
    rc = rc ? rc : number(r, map, "output_length", &out);
    at *= !strcmp(r->l->kind, "bailian") ? 1e6 : 1e3;
    if (rc == 0 && !(fabs(at) < (double)MOST_US))
        rc = bad(r, "timestamp is no time");
    rc = rc ? rc : tokens_of(r, "input_length", in, &isl);
    rc = rc ? rc : tokens_of(r, "output_length", out, &osl);
    rc = rc ? rc : hash_ids(r, map, isl, &n);
    return rc ? rc : add_row(r, llround(at), true, isl, osl, n);
}

/* ---- our own records ---- */

static int own_row(struct reader *r, const uint8_t *rec, size_t n)
{
    struct pd_arena mem = { 0 };
    struct pd_request q;
    uint64_t parent = 0;
    uint32_t blocks = 0;
    r->l->kind = "requests";
    r->l->block_tokens = OWN_BLOCK;
    int rc = pd_request_decode(rec, n, &mem, &q, r->e);
    if (rc)
        rc = inside(r, rc);
    else if (!q.has_token_ids || !(q.has & PD_RQ_MAX_TOKENS))
        rc = bad(r, "a request without token_ids or max_tokens tells no lengths (pd-bench gen writes both)");
    else if (q.n_token_ids > PD_REQLOG_TOKENS || q.max_tokens < 0 || q.max_tokens > PD_REQLOG_TOKENS || q.arrival_us < 0 || q.arrival_us > MOST_US)
        rc = bad(r, "token_ids, max_tokens or arrival_us is out of range");
    for (uint32_t i = 0; rc == 0 && i < q.n_token_ids; i += OWN_BLOCK, blocks++) {
        uint32_t left = q.n_token_ids - i;
        parent = pd_xxh3(q.token_ids + i, (left < OWN_BLOCK ? left : OWN_BLOCK) * sizeof *q.token_ids, parent + 1);
        rc = pd_buf_add(&r->blocks, &parent, sizeof parent, r->e);
    }
    rc = rc ? rc : add_row(r, q.arrival_us, q.has & PD_RQ_ARRIVAL, q.n_token_ids, q.max_tokens, blocks);
    pd_arena_free(&mem);
    return rc;
}

static int json_lines(struct reader *r, const char *p, size_t n)
{
    struct pd_buf rec = { 0 };
    struct pd_bin v;
    int rc = 0;
    for (size_t at = 0, len; rc == 0 && at < n; at += len + 1) {
        const char *end = memchr(p + at, '\n', n - at);
        len = end ? (size_t)(end - p) - at : n - at;
        r->line++;
        size_t blank = 0;
        while (blank < len && memchr(" \t\r", p[at + blank], 3))
            blank++;
        if (blank == len)
            continue;
        rec.n = 0;
        if ((rc = pd_json_to_msgpack(p + at, len, &rec, r->e)) < 0) {
            rc = inside(r, rc);
            break;
        }
        bool own = r->rows.n ? !strcmp(r->l->kind, "requests") : pd_map_find(rec.p, rec.n, "input_length", &v) != 1;
        rc = own ? own_row(r, rec.p, rec.n) : json_row(r, (struct pd_bin){ rec.p, rec.n });
    }
    pd_buf_free(&rec);
    return rc;
}

static int records(struct reader *r, const uint8_t *p, size_t n)
{
    int rc = 0;
    r->unit = "record";
    for (size_t at = 0, len = 0; rc == 0 && at < n; at += len) {
        struct pd_frame_scan scan = { 0 };
        r->line++;
        int got = pd_frame_next(&scan, p + at, n - at, PD_MAX_RECORD_DEFAULT, &len, r->e);
        if (got == 0)
            return bad(r, "it is cut off");
        if (got < 0 || pd_frame_check(p + at, len, r->e) < 0)
            return inside(r, PD_ECORRUPT);
        rc = pd_kind_of(p + at, len) == PD_K_REQUEST ? own_row(r, p + at, len) : 0;
    }
    return rc;
}

/* ---- CSV ---- */

struct csv { const char *time, *in, *out; const char *kind; };
static const struct csv forms[] = {
    { "TIMESTAMP", "ContextTokens", "GeneratedTokens", "azure" },
    { "Timestamp", "Request tokens", "Response tokens", "burstgpt" },
    { NULL, "num_prefill_tokens", "num_decode_tokens", "lengths" },
};
enum { COLUMNS = 64 };

/* Cuts a line into its fields, quotes off; < 0: more than COLUMNS. */
static int cut(const char *p, size_t n, struct pd_str *f)
{
    int count = 0;
    for (size_t at = 0; at <= n;) {
        size_t end = at, next;
        if (count == COLUMNS)
            return -1;
        if (at < n && p[at] == '"') {
            const char *q = memchr(p + at + 1, '"', n - at - 1);
            end = q ? (size_t)(q - p) : n;
            f[count++] = (struct pd_str){ p + at + 1, end - at - 1 };
            next = end;
        } else {
            const char *q = memchr(p + at, ',', n - at);
            end = q ? (size_t)(q - p) : n;
            f[count++] = (struct pd_str){ p + at, end - at };
            next = end;
        }
        const char *comma = next < n ? memchr(p + next, ',', n - next) : NULL;
        at = comma ? (size_t)(comma - p) + 1 : n + 1;
    }
    return count;
}

static bool plain_number(struct pd_str s, double *v)
{
    char t[64], *end;
    if (!s.n || s.n >= sizeof t || !((*s.p >= '0' && *s.p <= '9') || *s.p == '.' || *s.p == '-'))
        return false;
    memcpy(t, s.p, s.n);
    t[s.n] = 0;
    *v = strtod(t, &end);
    while (*end == ' ')
        end++;
    return !*end && isfinite(*v);
}

/* "2023-11-16 18:17:03.9799600", of the proleptic Gregorian calendar, in us since 1970. */
static bool date_time(struct pd_str s, int64_t *us)
{
    char t[64];
    int y, mo, d, h, mi, used = 0;
    double sec;
    if (s.n >= sizeof t)
        return false;
    memcpy(t, s.p, s.n);
    t[s.n] = 0;
    if (sscanf(t, "%4d-%2d-%2d%*1[ T]%2d:%2d:%lf%n", &y, &mo, &d, &h, &mi, &sec, &used) != 6 || (t[used] && strcmp(t + used, "Z") && t[used] != '+') || y < 1970 ||
        mo < 1 || mo > 12 || d < 1 || d > 31 || h < 0 || h > 23 || mi < 0 || mi > 59 || !(sec >= 0 && sec < 61))
        return false;
    int64_t yy = mo <= 2 ? y - 1 : y, m = (mo + 9) % 12, days = yy * 365 + yy / 4 - yy / 100 + yy / 400 + (m * 153 + 2) / 5 + d - 1 - 719468;
    *us = ((days * 24 + h) * 60 + mi) * 60000000 + llround(sec * 1e6);
    return true;
}

static int csv_row(struct reader *r, const struct csv *form, const struct pd_str *f, int n, const int col[3])
{
    double v[2] = { 0, 0 }, s;
    int64_t at = 0, isl, osl;
    char what[160];
    const char *names[] = { form->in, form->out };
    for (int i = 0; i < 2; i++)
        if (col[i + 1] >= n || !plain_number(f[col[i + 1]], &v[i])) {
            struct pd_str got = col[i + 1] < n ? f[col[i + 1]] : (struct pd_str){ "", 0 };
            snprintf(what, sizeof what, "%s: '%.*s' is no number of tokens (0 to %d)", names[i], (int)(got.n < 40 ? got.n : 40), got.p, PD_REQLOG_TOKENS);
            return bad(r, what);
        }
    if (form->time) {
        struct pd_str got = col[0] < n ? f[col[0]] : (struct pd_str){ "", 0 };
        if (plain_number(got, &s) && fabs(s) < (double)MOST_US / 1e6)
            at = llround(s * 1e6);
        else if (!date_time(got, &at)) {
            snprintf(what, sizeof what, "%s: '%.*s' is no time (seconds, or 2023-11-16 18:17:03.97)", form->time, (int)(got.n < 40 ? got.n : 40), got.p);
            return bad(r, what);
        }
    }
    int rc = tokens_of(r, form->in, v[0], &isl);
    rc = rc ? rc : tokens_of(r, form->out, v[1], &osl);
    return rc ? rc : add_row(r, at, form->time != NULL, isl, osl, 0);
}

static int csv(struct reader *r, const char *p, size_t n)
{
    const struct csv *form = NULL;
    struct pd_str f[COLUMNS];
    int col[3] = { 0 }, rc = 0;
    for (size_t at = 0, len; rc == 0 && at < n; at += len + 1) {
        const char *end = memchr(p + at, '\n', n - at);
        len = end ? (size_t)(end - p) - at : n - at;
        size_t text = len && p[at + len - 1] == '\r' ? len - 1 : len;
        r->line++;
        if (!text)
            continue;
        int fields = cut(p + at, text, f);
        if (fields < 0)
            return bad(r, "more than 64 fields");
        if (form) {
            rc = csv_row(r, form, f, fields, col);
            continue;
        }
        for (size_t k = 0; k < sizeof forms / sizeof *forms && !form; k++) {
            const char *want[] = { forms[k].time, forms[k].in, forms[k].out };
            int found = 0;
            for (int w = 0; w < 3; w++)
                for (int i = 0; want[w] && i < fields; i++)
                    if (pd_str_eq(f[i], want[w])) {
                        col[w] = i;
                        found++;
                        break;
                    }
            form = found == (want[0] ? 3 : 2) ? &forms[k] : NULL;
        }
        if (!form)
            return bad(r, "no head of a log that is known (Azure: TIMESTAMP,ContextTokens,GeneratedTokens; BurstGPT: Timestamp,Request tokens,Response tokens; "
                       "or num_prefill_tokens,num_decode_tokens)");
        r->l->kind = form->kind;
    }
    return rc;
}

int pd_reqlog_parse(const void *p, size_t n, const char *name, struct pd_reqlog *out, struct pd_err *e)
{
    struct reader r = { .l = out, .name = name, .unit = "line", .e = e };
    const uint8_t *b = p;
    size_t at = 0;
    *out = (struct pd_reqlog){ .kind = "" };
    if (n >= 3 && !memcmp(b, "\xef\xbb\xbf", 3))        /* a byte order mark, as spreadsheets write */
        b += 3, n -= 3;
    while (at < n && memchr(" \t\r\n", b[at], 4))
        at++;
    int rc = at == n ? pd_fail(e, PD_ECORRUPT, "%s: it is empty", name) : b[at] == '{' ? json_lines(&r, (const char *)b, n) : b[at] >= 0x80 ? records(&r, b, n) :
             csv(&r, (const char *)b, n);
    if (rc == 0 && !r.rows.n)
        rc = pd_fail(e, PD_ECORRUPT, "%s: there is no request in it", name);
    out->row = (struct pd_reqlog_row *)(void *)r.rows.p;
    out->n = r.rows.n / sizeof *out->row;
    out->block = (uint64_t *)(void *)r.blocks.p;
    out->n_blocks = r.blocks.n / sizeof *out->block;
    if (!out->n_blocks)
        out->block_tokens = 0;
    if (rc)
        pd_reqlog_free(out);
    return rc;
}

int pd_reqlog_read(const char *path, struct pd_reqlog *out, struct pd_err *e)
{
    struct pd_buf b = { 0 };
    int rc = pd_infile_read(path, MAX_FILE, "log of requests", &b, e);
    rc = rc ? rc : pd_reqlog_parse(b.p, b.n, path, out, e);
    pd_buf_free(&b);
    return rc;
}

void pd_reqlog_spread(struct pd_reqlog *l)
{
    int64_t gap = 0;
    for (size_t i = 0, n; l->timed && i < l->n; i += n) {
        int64_t at = l->row[i].at_us;
        for (n = 1; i + n < l->n && l->row[i + n].at_us == at; n++)
            ;
        gap = i + n < l->n ? l->row[i + n].at_us - at : gap;
        for (size_t k = 1; k < n; k++)
            l->row[i + k].at_us = at + (int64_t)((double)gap * (double)k / (double)n);
    }
}

void pd_reqlog_free(struct pd_reqlog *l)
{
    pd_free(l->row);
    pd_free(l->block);
    *l = (struct pd_reqlog){ .kind = "" };
}
