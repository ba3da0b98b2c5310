/* The lines of a topology file. */
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include "../base/opt.h"
#include "topology_in.h"

enum { WORDS = 20, WORD = 255, FILE_MAX = 4 << 20 };
struct words { int n, line; char w[WORDS][WORD + 1]; };

int pd_topo_bad(const struct pd_topo_parse *q, int line, struct pd_err *e, const char *fmt, ...)
{
    char text[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return pd_fail(e, PD_EUSAGE, "%.80s: line %d: %s", q->file, line, text);
}

/* One line; a word that begins with # ends it. */
static int split(const struct pd_topo_parse *q, const char *p, size_t n, struct words *w, struct pd_err *e)
{
    w->n = 0;
    for (size_t i = 0; i < n;) {
        size_t from = i;
        while (i < n && p[i] != ' ' && p[i] != '\t' && p[i] != '\r') {
            if ((unsigned char)p[i] < 32 || p[i] == 127)
                return pd_topo_bad(q, w->line, e, "byte %d of it is no text (a topology is lines of words)", (int)i + 1);
            i++;
        }
        if (i == from) {
            i++;
            continue;
        }
        if (p[from] == '#')
            break;
        if (i - from > WORD)
            return pd_topo_bad(q, w->line, e, "a word of more than %d bytes", WORD);
        if (w->n == WORDS)
            return pd_topo_bad(q, w->line, e, "more than %d words", WORDS);
        memcpy(w->w[w->n], p + from, i - from);
        w->w[w->n++][i - from] = 0;
    }
    return 0;
}

static int each_line(struct pd_topo_parse *q, int (*fn)(struct pd_topo_parse *q, const struct words *w, struct pd_err *e), struct pd_err *e)
{
    struct words w = { 0 };
    const char *end = q->text + q->n_text;
    for (const char *p = q->text; p < end;) {
        const char *nl = memchr(p, '\n', (size_t)(end - p));
        size_t n = (size_t)((nl ? nl : end) - p);
        w.line++;
        int rc = split(q, p, n, &w, e);
        if (rc == 0 && w.n)
            rc = fn(q, &w, e);
        if (rc < 0)
            return rc;
        p = nl ? nl + 1 : end;
    }
    return 0;
}

static int grow(void **p, uint32_t n, uint32_t *cap, size_t size, uint32_t most, const char *what, const struct pd_topo_parse *q, int line, struct pd_err *e)
{
    if (n == most)
        return pd_topo_bad(q, line, e, "more than %u %s", most, what);
    if (n < *cap)
        return 0;
    uint32_t more = *cap ? 2 * *cap : 16;
    void *new = pd_realloc(*p, more, size, what, e);
    if (!new)
        return PD_ENOMEM;
    *p = new;
    *cap = more;
    return 0;
}

/* ---- facts ---- */

/* 12GB/s, 100Gbit/s, 2.5GiB/s: bytes a microsecond. */
static bool rate_of(const char *s, double *out)
{
    static const struct { const char *name; double bytes; } unit[] = {
        { "B/s", 1 }, { "KB/s", 1e3 }, { "MB/s", 1e6 }, { "GB/s", 1e9 }, { "TB/s", 1e12 }, { "KiB/s", 1024 }, { "MiB/s", 1048576 }, { "GiB/s", 1073741824 },
        { "Kbit/s", 125 }, { "Mbit/s", 125e3 }, { "Gbit/s", 125e6 }, { "Tbit/s", 125e9 } };
    size_t digits = strspn(s, "0123456789."), dots = 0;
    for (size_t i = 0; i < digits; i++)
        dots += s[i] == '.';
    if (!digits || digits > 15 || dots > 1)
        return false;
    double v = strtod(s, NULL);
    for (size_t i = 0; i < sizeof unit / sizeof *unit; i++)
        if (!strcmp(s + digits, unit[i].name)) {
            *out = v * unit[i].bytes / 1e6;
            return *out >= 1e-3 && *out <= 1e9;
        }
    return false;
}

static int facts(const struct pd_topo_parse *q, const struct words *w, int from, struct pd_way *way, struct pd_err *e)
{
    static const char *const name[] = { "latency", "bandwidth", "jitter", "cost", NULL };
    unsigned seen = 0;
    for (int i = from; i < w->n; i += 2) {
        int f = 0;
        int64_t us = 0;
        while (name[f] && strcmp(name[f], w->w[i]))
            f++;
        if (!name[f])
            return pd_topo_bad(q, w->line, e, "'%.40s' is not known here (latency, bandwidth, jitter or cost, each with its value)", w->w[i]);
        if (seen & 1u << f)
            return pd_topo_bad(q, w->line, e, "%s is there twice (keep one)", name[f]);
        if (i + 1 == w->n)
            return pd_topo_bad(q, w->line, e, "%s has no value (example: %s %s)", name[f], name[f], f == 1 ? "12GB/s" : "50us");
        if (f == 1 && !rate_of(w->w[i + 1], &way->bytes_per_us))
            return pd_topo_bad(q, w->line, e, "bandwidth '%.40s' is none (1KB/s or more; examples: 12GB/s, 100Gbit/s)", w->w[i + 1]);
        if (f != 1 && (pd_parse_duration(w->w[i + 1], &us, NULL) < 0 || us > 60000000))
            return pd_topo_bad(q, w->line, e, "%s '%.40s' is no time of at most 60s (examples: 50us, 2ms)", name[f], w->w[i + 1]);
        if (f != 1)
            *(f == 0 ? &way->latency_us : f == 2 ? &way->jitter_us : &way->cost_us) = (double)us;
        seen |= 1u << f;
    }
    way->assumed &= ~seen;
    return 0;
}

/* ---- class and domain ---- */

static int a_class(const struct pd_topo_parse *q, const struct words *w, int i, enum pd_near *out, struct pd_err *e)
{
    if (i >= w->n || !pd_near_find(w->w[i], out))
        return pd_topo_bad(q, w->line, e, "'%.40s' is no class (local, nvlink, pcie, rack or cross)", i < w->n ? w->w[i] : "");
    return 0;
}

static int read_class(struct pd_topo_parse *q, const struct words *w, struct pd_err *e)
{
    enum pd_near near;
    int rc = a_class(q, w, 1, &near, e);
    if (rc < 0)
        return rc;
    if (q->class_line[near])
        return pd_topo_bad(q, w->line, e, "class %s has a line already, line %d (make one of the two)", pd_near_names[near], q->class_line[near]);
    if (w->n == 2)
        return pd_topo_bad(q, w->line, e, "class %s, and nothing said of it (example: class rack latency 50us bandwidth 12GB/s)", pd_near_names[near]);
    q->class_line[near] = w->line;
    return facts(q, w, 2, &q->t->way[near], e);
}

static int find_said(const struct pd_topo_parse *q, const char *name)
{
    for (uint32_t i = 0; i < q->n_said; i++)
        if (!strcmp(q->said[i].name, name))
            return (int)i;
    return -1;
}

/* What may end a `domain` or `worker` line: in NAME, maintenance. */
static int tail(const struct pd_topo_parse *q, const struct words *w, int i, const char **in, bool *maintenance, struct pd_err *e)
{
    for (; i < w->n; i++)
        if (!strcmp(w->w[i], "maintenance") && !*maintenance)
            *maintenance = true;
        else if (!strcmp(w->w[i], "in") && i + 1 < w->n && !*in)
            *in = w->w[++i];
        else
            return pd_topo_bad(q, w->line, e, "'%.40s' is not understood here (`in DOMAIN` and `maintenance` may follow, each once)", w->w[i]);
    return 0;
}

static int read_domain(struct pd_topo_parse *q, const struct words *w, struct pd_err *e)
{
    struct pd_topo_said s = { .parent = -1, .id = -1, .line = w->line };
    const char *in = NULL;
    if (w->n < 3)
        return pd_topo_bad(q, w->line, e, "a domain has a name and the class of the paths inside it (example: domain rackA rack)");
    if (strlen(w->w[1]) > PD_TOPO_NAME)
        return pd_topo_bad(q, w->line, e, "the name '%.20s...' is longer than %d bytes", w->w[1], PD_TOPO_NAME);
    if (!strcmp(w->w[1], ">") || !strcmp(w->w[1], "none"))
        return pd_topo_bad(q, w->line, e, "'%s' cannot be the name of a domain", w->w[1]);
    int rc = a_class(q, w, 2, &s.near, e), twice = find_said(q, w->w[1]);
    if (rc < 0)
        return rc;
    if (twice >= 0)
        return pd_topo_bad(q, w->line, e, "domain '%s' is there already, line %d (keep one)", w->w[1], q->said[twice].line);
    if ((rc = tail(q, w, 3, &in, &s.maintenance, e)) < 0 ||
        (rc = grow((void **)&q->said, q->n_said, &q->cap_said, sizeof s, PD_TOPO_DOMAINS, "domains", q, w->line, e)) < 0)
        return rc;
    if (!(s.name = pd_arena_dup(&q->t->mem, w->w[1], strlen(w->w[1]), e)) || (in && !(s.in = pd_arena_dup(&q->t->mem, in, strlen(in), e))))
        return PD_ENOMEM;
    q->said[q->n_said++] = s;
    return 0;
}

static int first_pass(struct pd_topo_parse *q, const struct words *w, struct pd_err *e)
{
    return !strcmp(w->w[0], "class") ? read_class(q, w, e) : !strcmp(w->w[0], "domain") ? read_domain(q, w, e) : 0;
}

int pd_topo_read_domains(struct pd_topo_parse *q, struct pd_err *e)
{
    int rc = each_line(q, first_pass, e);
    for (uint32_t i = 0; i < q->n_said && rc == 0; i++)
        if (q->said[i].in && (q->said[i].parent = find_said(q, q->said[i].in)) < 0)
            rc = pd_topo_bad(q, q->said[i].line, e, "there is no domain '%.60s' (add a line: domain %.60s CLASS)", q->said[i].in, q->said[i].in);
    return rc;
}

/* ---- path and worker ---- */

static int a_domain(const struct pd_topo_parse *q, const struct words *w, const char *name, int *out, struct pd_err *e)
{
    if ((*out = pd_topology_domain(q->t, name, strlen(name))) < 0)
        return pd_topo_bad(q, w->line, e, "there is no domain '%.60s' (add a line: domain %.60s CLASS)", name, name);
    return 0;
}

static int add_rect(struct pd_topo_parse *q, const struct words *w, int a, int b, int way, bool has_near, struct pd_err *e)
{
    for (uint32_t i = 0; i < q->n_rects; i++)
        if (q->rect[i].a == a && q->rect[i].b == b)
            return pd_topo_bad(q, w->line, e, "the path from '%s' to '%s' has a line already, line %d (make one of the two)", pd_topology_name(q->t, a), pd_topology_name(q->t, b),
                               q->t->way[q->rect[i].way].line);
    int rc = grow((void **)&q->rect, q->n_rects, &q->cap_rects, sizeof *q->rect, 2 * PD_TOPO_WAYS, "paths", q, w->line, e);
    if (rc == 0)
        q->rect[q->n_rects++] = (struct pd_topo_rect){ .a = a, .b = b, .way = way, .has_near = has_near };
    return rc;
}

static int read_path(struct pd_topo_parse *q, const struct words *w, struct pd_err *e)
{
    bool one_way = w->n > 2 && !strcmp(w->w[2], ">");
    int at = one_way ? 3 : 2, a, b, rc;
    struct pd_way way = { .assumed = PD_WAY_ALL, .line = w->line };
    if (w->n <= at)
        return pd_topo_bad(q, w->line, e, "a path goes between two domains (examples: path hostA hostB bandwidth 10GB/s; one way: path hostA > hostB cost 5ms)");
    if ((rc = a_domain(q, w, w->w[1], &a, e)) < 0 || (rc = a_domain(q, w, w->w[at], &b, e)) < 0)
        return rc;
    const struct pd_topo_domain *da = &q->t->domain[a], *db = &q->t->domain[b];
    if (a != b && ((b > a && (uint32_t)b < da->end) || (a > b && (uint32_t)a < db->end)))
        return pd_topo_bad(q, w->line, e, "'%s' and '%s' lie in one another (inside a domain: path %s %s)", da->name, db->name, da->name, da->name);
    bool has_near = ++at < w->n && pd_near_find(w->w[at], &way.near);
    at += has_near;
    if (at >= w->n && !has_near)
        return pd_topo_bad(q, w->line, e, "nothing is said of this path (a class, latency, bandwidth, jitter or cost)");
    if ((rc = facts(q, w, at, &way, e)) < 0)
        return rc;
    q->cap_ways = q->cap_ways ? q->cap_ways : PD_NEAR_N;
    if ((rc = grow((void **)&q->t->way, q->t->n_ways, &q->cap_ways, sizeof way, PD_TOPO_WAYS, "paths", q, w->line, e)) < 0)
        return rc;
    q->t->way[q->t->n_ways++] = way;
    rc = add_rect(q, w, a, b, (int)q->t->n_ways - 1, has_near, e);
    return rc == 0 && !one_way && a != b ? add_rect(q, w, b, a, (int)q->t->n_ways - 1, has_near, e) : rc;
}

static int read_worker(struct pd_topo_parse *q, const struct words *w, struct pd_err *e)
{
    const char *in = NULL;
    struct pd_topo_key k = { .line = w->line };
    int domain, rc;
    if (w->n < 2)
        return pd_topo_bad(q, w->line, e, "which worker? (example: worker unix:/run/pd/d0 in hostA)");
    if ((rc = tail(q, w, 2, &in, &k.maintenance, e)) < 0)
        return rc;
    if (!in)
        return pd_topo_bad(q, w->line, e, "where is worker '%.80s'? (add: in DOMAIN)", w->w[1]);
    if ((rc = a_domain(q, w, in, &domain, e)) < 0 ||
        (rc = grow((void **)&q->t->worker, q->t->n_workers, &q->cap_workers, sizeof k, PD_TOPO_WORKERS, "workers", q, w->line, e)) < 0)
        return rc;
    if (!(k.name = pd_arena_dup(&q->t->mem, w->w[1], strlen(w->w[1]), e)))
        return PD_ENOMEM;
    k.domain = (uint16_t)domain;
    q->t->worker[q->t->n_workers++] = k;
    return 0;
}

static int second_pass(struct pd_topo_parse *q, const struct words *w, struct pd_err *e)
{
    const char *what = w->w[0];
    if (!strcmp(what, "path"))
        return read_path(q, w, e);
    if (!strcmp(what, "worker"))
        return read_worker(q, w, e);
    if (!strcmp(what, "class") || !strcmp(what, "domain"))
        return 0;
    return pd_topo_bad(q, w->line, e, "'%.40s' is no line of a topology (class, domain, path or worker; # begins a comment)", what);
}

int pd_topo_read_rest(struct pd_topo_parse *q, struct pd_err *e) { return each_line(q, second_pass, e); }

int pd_topology_load(const char *path, struct pd_topology **out, struct pd_err *e)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY), rc = 0;
    char *text = NULL;
    size_t n = 0;
    if (fd < 0)
        return pd_fail_sys(e, "%s: cannot open this topology", path);
    if (fstat(fd, &st))
        rc = pd_fail_sys(e, "%s", path);
    else if (!S_ISREG(st.st_mode) || st.st_size > FILE_MAX)
        rc = pd_fail(e, PD_EUSAGE, "%s: a topology is a regular file of at most %d MiB", path, FILE_MAX >> 20);
    else if (!(text = pd_calloc(1, FILE_MAX + 1, "a topology", e)))
        rc = PD_ENOMEM;
    for (ssize_t k = 1; rc == 0 && k > 0 && n <= FILE_MAX;) {
        k = read(fd, text + n, FILE_MAX + 1 - n);
        if (k < 0)
            rc = pd_fail_sys(e, "%s: cannot read this topology", path);
        else
            n += (size_t)k;
    }
    if (rc == 0 && n > FILE_MAX)
        rc = pd_fail(e, PD_EUSAGE, "%s: more than %d MiB are no topology", path, FILE_MAX >> 20);
    rc = rc ? rc : pd_topology_parse(text, n, path, out, e);
    pd_free(text);
    close(fd);
    return rc;
}
