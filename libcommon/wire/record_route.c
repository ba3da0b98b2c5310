/* route and outcome: a router's decision, and what came of it. */
#include "fields.h"
#include "record_route.h"

const char *const pd_mode_names[] = { "aggregated", "remote", "local", NULL };
const char *const pd_excluded_names[] = { "no", "unknown", "state", "unreachable", "silent", "epoch", "tried", "adapter", "context", "fingerprint",
                                          "numerics", "stale", "maintenance", "hold", "domain", "path", "runs", "behind", "blocks", "fallbacks", NULL };
const char *const pd_degraded_names[] = { "no_token_ids", "no_index", "approximate", "no_topology", "cold", "stale", "index_in_doubt" };
const char *const pd_outcome_names[] = { "chosen", "wait_room", "wait_worker", "no_prefill_worker", "never", "stay", NULL };
_Static_assert(sizeof pd_excluded_names / sizeof *pd_excluded_names == PD_X_KINDS + 1, "a name each");
_Static_assert(1u << sizeof pd_degraded_names / sizeof *pd_degraded_names == PD_DG_ALL + 1, "a name each");

const struct pd_str pd_route_apart_words = { "kept apart by a breaker or a hold", 33 };

enum { MOST_ROW_BYTES = 38 << 10, ROW_BYTES = 245 };     /* of all rows; of one, beside its texts, about */

#define N(t) (int)(sizeof t / sizeof *t)
static const struct pd_route_rec *rec_of(const void *rec) { return rec; }

/* ---- words for numbers ---- */

static int find(const char *const *names, int n, struct pd_str s)
{
    for (int i = 0; i < n && names[i]; i++)
        if (pd_str_eq(s, names[i]))
            return i;
    return -1;
}

static int unpack_word(const char *name, const char *const *names, int n, struct pd_bin v, uint64_t *out, struct pd_unpack *u)
{
    struct pd_str s = { NULL, 0 };
    int i = pd_get_str(v, &s) ? find(names, n, s) : -1;
    if (i < 0) {
        char text[96];
        return pd_fail(u->e, u->code, "%s: %s is not known here", name, pd_value_text(v, text, sizeof text));
    }
    *out = (uint64_t)i;
    return 0;
}

/* A member `uint64_t m` of T as a word of pd_excluded_names; absent when 0. */
#define WHY(fn, T, m) \
    static void enc_##fn(const void *rec, struct pd_packer *k) { pd_pack_text(k, pd_excluded_names[((const T *)rec)->m]); } \
    static int dec_##fn(void *rec, struct pd_bin v, struct pd_unpack *u) { return unpack_word(#m, pd_excluded_names, PD_X_KINDS, v, &((T *)rec)->m, u); }
WHY(row_x, struct pd_route_row, x)
WHY(row_x_kv, struct pd_route_row, x_kv)
WHY(path_x, struct pd_route_path, x)
WHY(pair_x, struct pd_route_pair, x)
#define AS_WORD(name, fn, at) { name, PD_F_CUSTOM, 0, at, .enc = enc_##fn, .dec = dec_##fn }

/* ---- rows ---- */

#define R(m) PD_FIELD(struct pd_route_row, m)
static const struct pd_field row_field[] = {
    { "worker", PD_F_STR, PD_FF_REQ | PD_FF_MEND, R(worker) }, { "at", PD_F_STR, PD_FF_REQ | PD_FF_MEND, R(at) }, { "epoch", PD_F_U64, PD_FF_NZ, R(epoch) },
    { "domain", PD_F_U32, PD_FF_NZ, R(domain) }, { "kin", PD_F_U32, PD_FF_NZ, R(kin) }, { "hit_blocks", PD_F_U32, PD_FF_NZ, R(hit_blocks) },
    { "miss_blocks", PD_F_U32, PD_FF_NZ, R(miss_blocks) }, { "miss_tokens", PD_F_U32, PD_FF_NZ, R(miss_tokens) }, { "tier", PD_F_STR, 0, R(tier) }, { "index", PD_F_STR, 0, R(index) },
    { "runs", PD_F_U32, PD_FF_NZ, R(runs) }, { "foreign_runs", PD_F_U32, PD_FF_NZ, R(foreign_runs) }, { "runs_most", PD_F_U32, PD_FF_NZ, R(runs_most) },
    { "seqs", PD_F_U32, PD_FF_NZ, R(seqs) }, { "seqs_most", PD_F_U32, PD_FF_NZ, R(seqs_most) }, { "queue_runs", PD_F_U32, PD_FF_NZ, R(queue_runs) },
    { "queue_tokens", PD_F_U64, PD_FF_NZ, R(queue_tokens) }, { "kv_tokens", PD_F_U64, PD_FF_NZ, R(kv_tokens) }, { "blocks", PD_F_U64, PD_FF_NZ, R(blocks) },
    { "blocks_most", PD_F_U64, PD_FF_NZ, R(blocks_most) }, { "given", PD_F_U64, PD_FF_NZ, R(given) }, { "load_age_us", PD_F_I64, PD_FF_NZ, R(load_age_us) },
    { "index_age_us", PD_F_I64, PD_FF_NZ, R(index_age_us) }, { "queue", PD_F_SPREAD, 0, R(queue) }, { "prefill", PD_F_SPREAD, 0, R(prefill) },
    { "interference", PD_F_SPREAD, 0, R(interference) }, { "slot", PD_F_SPREAD, 0, R(slot) }, { "tpot", PD_F_SPREAD, 0, R(tpot) },
    { "itl_us", PD_F_I64, PD_FF_NZ, R(itl_us) }, { "cost", PD_F_U64, PD_FF_NZ, R(cost) }, AS_WORD("x", row_x, R(x)), AS_WORD("x_kv", row_x_kv, R(x_kv)),
    { "excluded", PD_F_STR, PD_FF_NULL | PD_FF_MEND, R(excluded) }, { "apart", PD_F_BIN, 0, R(apart) } };
static const struct pd_table row_table = { "row", row_field, N(row_field), -1 };

#define F(m) PD_FIELD(struct pd_route_fit, m)
static const struct pd_field fit_field[] = { { "p", PD_F_U32, PD_FF_REQ, F(p) }, { "d", PD_F_U32, PD_FF_REQ, F(d) }, { "converts", PD_F_U32, PD_FF_NZ, F(converts) },
                                             { "why", PD_F_STR, PD_FF_MEND, F(why) } };
static const struct pd_table fit_table = { "fit", fit_field, N(fit_field), -1 };

#define P(m) PD_FIELD(struct pd_route_path, m)
static const struct pd_field path_field[] = {
    { "p", PD_F_INDEX, 0, P(p) }, { "d", PD_F_INDEX, 0, P(d) }, { "from", PD_F_INDEX, 0, P(from) }, { "to", PD_F_INDEX, 0, P(to) }, { "kind", PD_F_STR, 0, P(kind) },
    { "latency", PD_F_SPREAD, 0, P(latency) }, { "kib_ns", PD_F_SPREAD, 0, P(kib_ns) }, { "sync", PD_F_SPREAD, 0, P(sync) },
    { "overlap_permille", PD_F_U32, PD_FF_NZ, P(overlap_permille) }, { "active", PD_F_U32, PD_FF_NZ, P(active) }, { "penalty_us", PD_F_I64, PD_FF_NZ, P(penalty_us) },
    { "age_us", PD_F_I64, PD_FF_NZ, P(age_us) }, { "breaker", PD_F_STR, 0, P(breaker) }, AS_WORD("x", path_x, P(x)), { "excluded", PD_F_STR, PD_FF_MEND, P(excluded) } };
static const struct pd_table path_table = { "path", path_field, N(path_field), -1 };

#define Q(m) PD_FIELD(struct pd_route_pair, m)
static const struct pd_field pair_field[] = {
    { "p", PD_F_INDEX, 0, Q(p) }, { "d", PD_F_INDEX, PD_FF_REQ, Q(d) }, { "path", PD_F_INDEX, 0, Q(path) }, { "bytes", PD_F_U64, PD_FF_NZ, Q(bytes) },
    { "transfer", PD_F_SPREAD, 0, Q(transfer) }, { "ttft", PD_F_SPREAD, 0, Q(ttft) }, { "completion", PD_F_SPREAD, 0, Q(completion) },
    { "overlap_us", PD_F_I64, PD_FF_NZ, Q(overlap_us) }, { "itl_us", PD_F_I64, PD_FF_NZ, Q(itl_us) }, { "queue_us", PD_F_I64, PD_FF_NZ, Q(queue_us) },
    { "link_us", PD_F_I64, PD_FF_NZ, Q(link_us) }, { "capacity_us", PD_F_I64, PD_FF_NZ, Q(capacity_us) }, { "score", PD_F_I64, PD_FF_NZ, Q(score) },
    AS_WORD("x", pair_x, Q(x)), { "excluded", PD_F_STR, PD_FF_MEND, Q(excluded) } };
static const struct pd_table pair_table = { "pair", pair_field, N(pair_field), -1 };

static void pack_list(const struct pd_table *t, const void *at, size_t size, uint32_t n, struct pd_packer *k)
{
    msgpack_pack_array(&k->pk, n);
    for (uint32_t i = 0; i < n; i++)
        pd_fields_encode(t, (const char *)at + i * size, false, 0, 0, k);
}

/* A list of maps into [most] of the arena, or into `into`. What has indices begins with them at -1: first[] bytes of it are set so. */
static int unpack_list(const char *name, const struct pd_table *t, struct pd_bin v, size_t size, uint32_t most, size_t minus, void **out, uint32_t *n, struct pd_unpack *u)
{
    struct pd_iter it;
    struct pd_bin x;
    if (!pd_iter_open(&it, v, PD_T_ARRAY) || it.left > most)
        return pd_fail(u->e, u->code, "%s must be a list of at most %u", name, most);
    char *at = *out ? *out : pd_arena_alloc(u->a, (size_t)it.left + 1, size, u->e);
    int rc;
    if (!at)
        return PD_ENOMEM;
    *out = at;
    for (*n = 0; pd_iter_next(&it, &x); ++*n) {
        memset(at + *n * size, 0xff, minus);
        if ((rc = pd_fields_decode(t, x, at + *n * size, u)))
            return rc;
    }
    return 0;
}

/* ---- lists of the record ---- */

#define LIST(fn, table, at, n, most, minus, word) \
    static void enc_##fn(const void *rec, struct pd_packer *k) { pack_list(&table, rec_of(rec)->at, sizeof *rec_of(rec)->at, rec_of(rec)->n, k); } \
    static int dec_##fn(void *rec, struct pd_bin v, struct pd_unpack *u) \
    { \
        struct pd_route_rec *r = rec; \
        void *out = NULL; \
        int rc = unpack_list(word, &table, v, sizeof *r->at, most, minus, &out, &r->n, u); \
        r->at = out; \
        return rc; \
    }
LIST(fits, fit_table, fits, n_fits, PD_ROUTE_FITS, 0, "fits")
LIST(p, row_table, p, n_p, PD_ROUTE_MOST, 0, "p")
LIST(d, row_table, d, n_d, PD_ROUTE_MOST, 0, "d")
LIST(paths, path_table, paths, n_paths, PD_ROUTE_PATHS, offsetof(struct pd_route_path, kind), "paths")

static void enc_pairs(const void *rec, struct pd_packer *k) { pack_list(&pair_table, rec_of(rec)->pair, sizeof *rec_of(rec)->pair, rec_of(rec)->n_pairs, k); }
static int dec_pairs(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_route_rec *r = rec;
    void *out = r->pair;
    return unpack_list("pairs", &pair_table, v, sizeof *r->pair, PD_ROUTE_PAIRS, offsetof(struct pd_route_pair, bytes), &out, &r->n_pairs, u);
}

static void enc_domains(const void *rec, struct pd_packer *k) { pd_pack_strs(rec_of(rec)->domains, rec_of(rec)->n_domains, k); }
static int dec_domains(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_route_rec *r = rec;
    return pd_unpack_strs("domains", v, &r->domains, &r->n_domains, u);
}

static uint32_t n_bits(uint32_t v)
{
    uint32_t n = 0;
    for (; v; v &= v - 1)
        n++;
    return n;
}

static void enc_degraded(const void *rec, struct pd_packer *k)
{
    msgpack_pack_array(&k->pk, n_bits(rec_of(rec)->degraded));
    for (int i = 0; i < N(pd_degraded_names); i++)
        if (rec_of(rec)->degraded >> i & 1)
            pd_pack_text(k, pd_degraded_names[i]);
}

static int dec_degraded(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_iter it;
    struct pd_bin x;
    uint64_t bit;
    int rc;
    if (!pd_iter_open(&it, v, PD_T_ARRAY))
        return pd_fail(u->e, u->code, "degraded must be a list of words");
    while (pd_iter_next(&it, &x)) {
        if ((rc = unpack_word("degraded", pd_degraded_names, N(pd_degraded_names), x, &bit, u)))
            return rc;
        ((struct pd_route_rec *)rec)->degraded |= 1u << bit;
    }
    return 0;
}

static void pack_left(const char *key, const uint32_t left[PD_X_KINDS], struct pd_packer *k)
{
    uint32_t n = 0;
    for (int i = 0; i < PD_X_KINDS; i++)
        n += left[i] > 0;
    pd_pack_text(k, key);
    msgpack_pack_map(&k->pk, n);
    for (int i = 0; i < PD_X_KINDS; i++)
        if (left[i]) {
            pd_pack_text(k, pd_excluded_names[i]);
            msgpack_pack_uint32(&k->pk, left[i]);
        }
}

static void enc_left(const void *rec, struct pd_packer *k)
{
    msgpack_pack_map(&k->pk, 2);
    pack_left("p", rec_of(rec)->left_p, k);
    pack_left("d", rec_of(rec)->left_d, k);
}

static int unpack_left(struct pd_bin v, uint32_t left[PD_X_KINDS], struct pd_unpack *u)
{
    struct pd_iter it;
    struct pd_str key;
    struct pd_bin x;
    int64_t n;
    int rc = pd_map_check(v, u->code, u->e);
    if (rc)
        return rc;
    pd_iter_open(&it, v, PD_T_MAP);
    while (pd_iter_pair(&it, &key, &x)) {
        int i = find(pd_excluded_names, PD_X_KINDS, key);
        if (i < 0)
            return pd_fail(u->e, u->code, "left_out: '%.*s' is not known here", (int)(key.n < 40 ? key.n : 40), key.p);
        if ((rc = pd_unpack_int("left_out", x, 1, UINT32_MAX / 2, &n, u)))
            return rc;
        left[i] = (uint32_t)n;
    }
    return 0;
}

static int dec_left(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_route_rec *r = rec;
    struct pd_iter it;
    struct pd_str key;
    struct pd_bin x;
    int rc = pd_map_check(v, u->code, u->e);
    if (rc)
        return rc;
    pd_iter_open(&it, v, PD_T_MAP);
    while (!rc && pd_iter_pair(&it, &key, &x))
        rc = pd_str_eq(key, "p") ? unpack_left(x, r->left_p, u) : pd_str_eq(key, "d") ? unpack_left(x, r->left_d, u) : 0;
    return rc;
}

/* ---- maps of the record ---- */

#define V(m) PD_FIELD(struct pd_route_versions, m)
static const struct pd_field version_field[] = { { "index", PD_F_U64, 0, V(index) }, { "topology", PD_F_U64, 0, V(topology) }, { "registry", PD_F_U64, 0, V(registry) } };
static const struct pd_table version_table = { "versions", version_field, N(version_field), -1 };

#define I(m) PD_FIELD(struct pd_route_input, m)
static const struct pd_field input_field[] = {
    { "n_tokens", PD_F_U32, PD_FF_REQ, I(n_tokens) }, { "exact", PD_F_BOOL, PD_FF_ALWAYS, I(exact) }, { "max_tokens", PD_F_U32, PD_FF_REQ, I(max_tokens) },
    { "n", PD_F_U32, PD_FF_REQ, I(n) }, { "out_p50", PD_F_U32, PD_FF_NZ, I(out_p50) }, { "out_p95", PD_F_U32, PD_FF_NZ, I(out_p95) },
    { "local_ttft_permille", PD_F_U32, PD_FF_NZ, I(local_ttft) }, { "local_completion_permille", PD_F_U32, PD_FF_NZ, I(local_completion) },
    { "remote_ttft_permille", PD_F_U32, PD_FF_NZ, I(remote_ttft) }, { "remote_completion_permille", PD_F_U32, PD_FF_NZ, I(remote_completion) },
    { "block_size", PD_F_U32, PD_FF_NZ, I(block_size) }, { "kv_bytes", PD_F_U32, PD_FF_NZ, I(kv_bytes) }, { "adapter", PD_F_STR, 0, I(adapter) },
    { "deadline_us", PD_F_I64, PD_FF_NZ, I(deadline_us) }, { "slo", PD_F_MAP, 0, I(slo) },
    { "digest", PD_F_BYTES, PD_FF_HAS, I(digest), .aux = offsetof(struct pd_route_input, has_digest) }, { "local", PD_F_BOOL, 0, I(local) },
    { "moves", PD_F_BOOL, 0, I(moves) }, { "d_given", PD_F_BOOL, 0, I(d_given) }, { "early", PD_F_BOOL, 0, I(early) } };
static const struct pd_table input_table = { "input", input_field, N(input_field), -1 };

#define MAP(fn, table, m) \
    static void enc_##fn(const void *rec, struct pd_packer *k) { pd_fields_encode(&table, &rec_of(rec)->m, false, 0, 0, k); } \
    static int dec_##fn(void *rec, struct pd_bin v, struct pd_unpack *u) { return pd_fields_decode(&table, v, &((struct pd_route_rec *)rec)->m, u); }
MAP(versions, version_table, versions)
MAP(input, input_table, input)

#define E(m) PD_FIELD(struct pd_route_rec, m)
static const struct pd_field estimate_field[] = { { "ttft", PD_F_SPREAD, 0, E(ttft) }, { "completion", PD_F_SPREAD, 0, E(completion) } };
static const struct pd_table estimate_table = { "estimate", estimate_field, N(estimate_field), -1 };
static void enc_estimate(const void *rec, struct pd_packer *k) { pd_fields_encode(&estimate_table, rec, false, 0, 0, k); }
static int dec_estimate(void *rec, struct pd_bin v, struct pd_unpack *u) { return pd_fields_decode(&estimate_table, v, rec, u); }

#define L(m) PD_FIELD(struct pd_route_late, m)
static const struct pd_field late_field[] = { { "since_us", PD_F_I64, PD_FF_REQ, L(since_us) }, { "way", PD_F_SPREAD, 0, L(way) }, { "rest_us", PD_F_I64, PD_FF_REQ, L(rest_us) },
                                              { "local_us", PD_F_I64, PD_FF_REQ, L(local_us) } };
static const struct pd_table late_table = { "late", late_field, N(late_field), -1 };
static void enc_late(const void *rec, struct pd_packer *k) { pd_fields_encode(&late_table, &rec_of(rec)->late, false, 0, 0, k); }
static int dec_late(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_route_late *l = &((struct pd_route_rec *)rec)->late;
    l->any = true;
    return pd_fields_decode(&late_table, v, l, u);
}

/* Who was chosen is told by name; a reader takes the rows from the pair. */
static void pack_chosen(const struct pd_route_rec *r, const struct pd_route_chosen *c, struct pd_packer *k)
{
    if (!c->any) {
        msgpack_pack_nil(&k->pk);
        return;
    }
    msgpack_pack_map(&k->pk, 4 + (c->converted[0] != 0));
    pd_pack_text(k, "mode");
    pd_pack_text(k, pd_mode_names[c->mode]);
    pd_pack_text(k, "p");
    if (c->p >= 0)
        pd_pack_str(k, r->p[c->p].worker);
    else
        msgpack_pack_nil(&k->pk);
    pd_pack_text(k, "d");
    pd_pack_str(k, r->d[c->d].worker);
    pd_pack_text(k, "pair");
    msgpack_pack_int32(&k->pk, c->pair);
    if (c->converted[0]) {
        pd_pack_text(k, "converted");
        pd_pack_text(k, c->converted);
    }
}

static int unpack_chosen(struct pd_bin v, struct pd_route_chosen *c, struct pd_unpack *u)
{
    struct pd_bin x;
    struct pd_str s;
    uint64_t mode;
    int64_t pair;
    int rc = pd_map_check(v, u->code, u->e);
    if (rc)
        return rc;
    if (pd_map_find(v.p, v.n, "mode", &x) != 1 || pd_map_find(v.p, v.n, "pair", &x) != 1)
        return pd_fail(u->e, u->code, "chosen: mode or pair is missing");
    if ((rc = pd_unpack_int("chosen.pair", x, 0, PD_ROUTE_PAIRS - 1, &pair, u)))
        return rc;
    pd_map_find(v.p, v.n, "mode", &x);
    if ((rc = unpack_word("chosen.mode", pd_mode_names, 3, x, &mode, u)))
        return rc;
    if (pd_map_find(v.p, v.n, "converted", &x) == 1) {
        if (!pd_get_str(x, &s) || !s.n || s.n >= sizeof c->converted || memchr(s.p, 0, s.n))
            return pd_fail(u->e, u->code, "chosen.converted must be a short string");
        memcpy(c->converted, s.p, s.n);
    }
    c->any = true;
    c->mode = (enum pd_mode)mode;
    c->pair = (int32_t)pair;
    return 0;
}

static void enc_chosen(const void *rec, struct pd_packer *k) { pack_chosen(rec, &rec_of(rec)->chosen, k); }
static int dec_chosen(void *rec, struct pd_bin v, struct pd_unpack *u) { return unpack_chosen(v, &((struct pd_route_rec *)rec)->chosen, u); }

static void enc_shadow(const void *rec, struct pd_packer *k)
{
    const struct pd_route_shadow *s = &rec_of(rec)->shadow;
    msgpack_pack_map(&k->pk, 3);
    pd_pack_text(k, "policy");
    pd_pack_text(k, s->policy);
    pd_pack_text(k, "chosen");
    pack_chosen(rec, &s->chosen, k);
    pd_pack_text(k, "score");
    msgpack_pack_int64(&k->pk, s->score);
}

static int dec_shadow(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_route_shadow *s = &((struct pd_route_rec *)rec)->shadow;
    struct pd_bin x;
    struct pd_str name;
    int rc = pd_map_check(v, u->code, u->e);
    if (rc)
        return rc;
    if (pd_map_find(v.p, v.n, "policy", &x) != 1 || !pd_get_str(x, &name) || !name.n || name.n >= sizeof s->policy || memchr(name.p, 0, name.n))
        return pd_fail(u->e, u->code, "shadow: policy must be a short string");
    memcpy(s->policy, name.p, name.n);
    if (pd_map_find(v.p, v.n, "chosen", &x) == 1 && pd_value_type(x) != PD_T_NIL && (rc = unpack_chosen(x, &s->chosen, u)))
        return rc;
    return pd_map_find(v.p, v.n, "score", &x) == 1 ? pd_unpack_int("shadow.score", x, INT64_MIN, INT64_MAX, &s->score, u) : 0;
}

/* ---- the record ---- */

#define CUSTOM(name, flags, at) { #name, PD_F_CUSTOM, flags, at, .enc = enc_##name, .dec = dec_##name }
static const struct pd_field route_field[] = {
    { "run", PD_F_RUN, PD_FF_REQ, E(run) }, { "op", PD_F_BYTES, PD_FF_REQ, E(op) }, { "t_us", PD_F_I64, PD_FF_REQ, E(t_us) },
    { "policy", PD_F_CHARS, PD_FF_REQ, E(policy) }, { "attempt", PD_F_U32, PD_FF_REQ, E(attempt) }, { "resumed", PD_F_U32, 0, E(resumed) },
    { "waited_us", PD_F_I64, 0, E(waited_us) }, { "seed", PD_F_HASH, PD_FF_REQ, E(seed) }, { "temperature", PD_F_DOUBLE, PD_FF_REQ, E(temperature) },
    { "risk", PD_F_DOUBLE, PD_FF_REQ, E(risk) }, { "externality", PD_F_DOUBLE, PD_FF_REQ, E(externality) }, CUSTOM(versions, PD_FF_ALWAYS, E(versions)),
    CUSTOM(input, PD_FF_REQ, E(input)), { "epoch", PD_F_U64, PD_FF_REQ, E(epoch) }, CUSTOM(domains, PD_FF_ALWAYS, E(domains)), CUSTOM(fits, PD_FF_ALWAYS, E(fits)),
    CUSTOM(p, PD_FF_REQ, E(p)), CUSTOM(d, PD_FF_REQ, E(d)), CUSTOM(paths, PD_FF_ALWAYS, E(paths)),
    { "left_out", PD_F_CUSTOM, PD_FF_ALWAYS, E(left_p), .enc = enc_left, .dec = dec_left },
    { "lots_p", PD_F_U32, PD_FF_NZ, E(lots_p) }, { "lots_d", PD_F_U32, PD_FF_NZ, E(lots_d) }, CUSTOM(pairs, PD_FF_ALWAYS, E(pair)),
    { "chosen", PD_F_CUSTOM, PD_FF_HAS | PD_FF_NULL, E(chosen), .aux = offsetof(struct pd_route_rec, chosen.any), .enc = enc_chosen, .dec = dec_chosen },
    { "reason", PD_F_CHARS, PD_FF_REQ, E(reason) }, { "propensity", PD_F_DOUBLE, PD_FF_REQ, E(propensity) }, CUSTOM(estimate, PD_FF_ALWAYS, E(ttft)),
    CUSTOM(degraded, PD_FF_ALWAYS, E(degraded)), { "cause", PD_F_STR, PD_FF_NULL | PD_FF_MEND, E(cause) }, { "fallback", PD_F_STR, PD_FF_NULL | PD_FF_MEND, E(fallback) },
    { "late", PD_F_CUSTOM, PD_FF_HAS, E(late), .aux = offsetof(struct pd_route_rec, late.any), .enc = enc_late, .dec = dec_late },
    { "shadow", PD_F_CUSTOM, PD_FF_COUNT, E(shadow), .aux = offsetof(struct pd_route_rec, shadow), .enc = enc_shadow, .dec = dec_shadow } };
static const struct pd_table route_table = { "route", route_field, N(route_field), offsetof(struct pd_route_rec, extra) };

/* ---- which rows stay ---- */

struct plan { int32_t at[2][PD_ROUTE_MOST]; uint32_t n[2]; };   /* where each row goes; -1: nowhere */

static size_t row_bytes(const struct pd_route_row *w) { return ROW_BYTES + w->worker.n + w->at.n + w->tier.n + w->excluded.n; }

/* Those that were scored, then those that might have been, then the excluded ones, each side its half or what the other leaves. What is encoded again is whole
 * again. */
static void plan_rows(const struct pd_route_rec *r, struct plan *o)
{
    const struct pd_route_row *side[] = { r->p, r->d };
    const uint32_t n[] = { r->n_p, r->n_d };
    uint32_t half = PD_ROUTE_ROWS / 2, most[2];
    bool in[2][PD_ROUTE_MOST] = { { 0 } };
    size_t bytes = 0;
    for (int s = 0; s < 2; s++)
        most[s] = n[!s] < half ? PD_ROUTE_ROWS - n[!s] : half;
    memset(o->n, 0, sizeof o->n);
    for (int pass = 0; pass < 3; pass++)
        for (int s = 0; s < 2; s++)
            for (uint32_t i = 0; i < n[s]; i++) {
                const struct pd_route_row *w = &side[s][i];
                if (in[s][i] || (pass == 0 && !w->keep) || (pass == 1 && w->x) || (pass && (o->n[s] == most[s] || bytes + row_bytes(w) > MOST_ROW_BYTES)))
                    continue;
                in[s][i] = true;
                o->n[s]++;
                bytes += row_bytes(w);
            }
    for (int s = 0; s < 2; s++)
        for (uint32_t i = 0, to = 0; i < n[s]; i++)
            o->at[s][i] = in[s][i] ? (int32_t)to++ : -1;
}

static int32_t moved(const struct plan *o, int side, int32_t i) { return i < 0 ? i : o->at[side][i]; }

/* Whom w may not give to, by their new places, as few bytes as tell it. */
static int thin_apart(const struct pd_route_rec *r, const struct plan *o, struct pd_arena *a, struct pd_route_row *w, struct pd_err *e)
{
    struct pd_bin was = w->apart;
    uint8_t *bits = was.n ? pd_arena_alloc(a, (o->n[1] + 7) / 8 + 1, 1, e) : NULL;
    if (was.n && !bits)
        return PD_ENOMEM;
    struct pd_route_row old = *w;
    w->apart = (struct pd_bin){ NULL, 0 };
    for (uint32_t k = 0; was.n && k < r->n_d; k++)
        if (o->at[1][k] >= 0 && pd_route_apart(&old, (int32_t)k)) {
            bits[o->at[1][k] / 8] |= (uint8_t)(1 << o->at[1][k] % 8);
            w->apart = (struct pd_bin){ bits, (size_t)o->at[1][k] / 8 + 1 };
        }
    return 0;
}

/* r with the rows of the plan, in memory of a. */
static int thin(const struct pd_route_rec *r, const struct plan *o, struct pd_arena *a, struct pd_route_rec *t, struct pd_err *e)
{
    *t = *r;
    struct pd_route_row *row[2] = { pd_arena_alloc(a, o->n[0] + 1, sizeof *t->p, e), pd_arena_alloc(a, o->n[1] + 1, sizeof *t->d, e) };
    struct pd_route_path *path = pd_arena_alloc(a, r->n_paths + 1, sizeof *path, e);
    if (!row[0] || !row[1] || !path)
        return PD_ENOMEM;
    t->p = row[0];
    t->d = row[1];
    t->paths = path;
    t->n_p = o->n[0];
    t->n_d = o->n[1];
    t->n_paths = 0;
    for (int s = 0; s < 2; s++)
        for (uint32_t i = 0; i < (s ? r->n_d : r->n_p); i++) {
            const struct pd_route_row *w = s ? &r->d[i] : &r->p[i];
            if (o->at[s][i] >= 0)
                row[s][o->at[s][i]] = *w;
            else {
                (s ? t->left_d : t->left_p)[w->x]++;
                *(s ? &t->lots_d : &t->lots_p) += w->drawn;
            }
        }
    for (uint32_t i = 0; i < t->n_p; i++)
        if (thin_apart(r, o, a, &row[0][i], e) < 0)
            return PD_ENOMEM;
    int32_t *at = pd_arena_alloc(a, r->n_paths + 1, sizeof *at, e);
    if (!at)
        return PD_ENOMEM;
    for (uint32_t i = 0; i < r->n_paths; i++) {
        struct pd_route_path x = r->paths[i];
        x.p = moved(o, 0, x.p);
        x.d = moved(o, 1, x.d);
        at[i] = (r->paths[i].p >= 0 && x.p < 0) || (r->paths[i].d >= 0 && x.d < 0) ? -1 : (int32_t)t->n_paths;
        if (at[i] >= 0)
            path[t->n_paths++] = x;
    }
    for (uint32_t i = 0; i < t->n_pairs; i++) {
        struct pd_route_pair *x = &t->pair[i];
        x->p = moved(o, 0, x->p);
        x->d = moved(o, 1, x->d);
        x->path = x->path < 0 ? -1 : at[x->path];
    }
    struct pd_route_chosen *c[] = { &t->chosen, &t->shadow.chosen };
    for (int i = 0; i < 2; i++)
        if (c[i]->any) {
            c[i]->p = moved(o, 0, c[i]->p);
            c[i]->d = moved(o, 1, c[i]->d);
        }
    return 0;
}

int pd_route_encode(const struct pd_route_rec *r, struct pd_buf *b, struct pd_err *e)
{
    if (r->n_p > PD_ROUTE_MOST || r->n_d > PD_ROUTE_MOST)
        return pd_fail(e, PD_EFAIL, "route: %u and %u rows: at most %d a side", r->n_p, r->n_d, PD_ROUTE_MOST);
    if (!r->paths && r->n_paths)
        return pd_fail(e, PD_EFAIL, "route: paths are missing");
    struct pd_arena a = { 0 };
    struct plan *o = pd_arena_alloc(&a, 1, sizeof *o, e);
    struct pd_route_rec *t = pd_arena_alloc(&a, 1, sizeof *t, e);
    int rc = PD_ENOMEM;
    if (o && t) {
        plan_rows(r, o);
        rc = thin(r, o, &a, t, e);
    }
    rc = rc ? rc : pd_table_encode(&route_table, t, b, e);
    pd_arena_free(&a);
    return rc;
}

/* ---- what was read makes sense ---- */

static int check_rows(const struct pd_route_rec *r, const struct pd_route_row *row, uint32_t n, const char *side, struct pd_err *e)
{
    for (uint32_t i = 0; i < n; i++) {
        const struct pd_route_row *w = &row[i];
        if (w->domain && w->domain >= r->n_domains)
            return pd_fail(e, PD_ECORRUPT, "route: %s[%u].domain %u: there are %u", side, i, w->domain, r->n_domains);
        if (w->load_age_us < 0 || w->index_age_us < 0 || w->itl_us < 0 || w->itl_us > PD_US_MOST || (w->excluded.p != NULL) != (w->x || w->x_kv))
            return pd_fail(e, PD_ECORRUPT, "route: %s[%u]: its ages, itl_us, or excluded without x make no sense", side, i);
    }
    return 0;
}

static bool below(int32_t i, uint32_t n) { return i < 0 || (uint32_t)i < n; }

static int check_chosen(const struct pd_route_rec *r, struct pd_route_chosen *c, struct pd_err *e)
{
    c->p = c->d = -1;
    if (!c->any)
        return 0;
    if ((uint32_t)c->pair >= r->n_pairs)
        return pd_fail(e, PD_ECORRUPT, "route: chosen.pair %d: there are %u", c->pair, r->n_pairs);
    c->p = r->pair[c->pair].p;
    c->d = r->pair[c->pair].d;
    return (c->mode == PD_MODE_REMOTE) != (c->p >= 0) ? pd_fail(e, PD_ECORRUPT, "route: chosen.mode %s and its pair disagree", pd_mode_names[c->mode]) : 0;
}

static int check_apart(const struct pd_route_rec *r, struct pd_err *e)
{
    for (uint32_t i = 0; i < r->n_d; i++)
        if (r->d[i].apart.n)
            return pd_fail(e, PD_ECORRUPT, "route: d[%u].apart: it is of rows of p", i);
    for (uint32_t i = 0; i < r->n_p; i++) {
        struct pd_bin b = r->p[i].apart;
        if (b.p && (!b.n || b.n > (r->n_d + 7) / 8 || !b.p[b.n - 1] || (b.n * 8 > r->n_d && b.p[b.n - 1] >> (r->n_d - 8 * (b.n - 1)))))
            return pd_fail(e, PD_ECORRUPT, "route: p[%u].apart: there are %u rows of d, and its last byte is not 0", i, r->n_d);
    }
    return 0;
}

static int check(struct pd_route_rec *r, struct pd_err *e)
{
    int rc = check_rows(r, r->p, r->n_p, "p", e);
    if (rc || (rc = check_rows(r, r->d, r->n_d, "d", e)) || (rc = check_apart(r, e)))
        return rc;
    if (!(r->temperature >= 0 && r->temperature <= 1000) || !(r->risk >= 0.5 && r->risk <= 0.999) || !(r->externality >= 0 && r->externality <= 1000) ||
        !(r->propensity >= 0 && r->propensity <= 1))
        return pd_fail(e, PD_ECORRUPT, "route: temperature %g, risk %g, externality %g, propensity %g make no sense", r->temperature, r->risk, r->externality,
                       r->propensity);
    if (r->late.any && (r->late.since_us < 0 || r->late.since_us > PD_US_MOST || r->late.local_us < 0))
        return pd_fail(e, PD_ECORRUPT, "route: late: since_us or local_us makes no sense");
    for (uint32_t i = 0; i < r->n_paths; i++) {
        const struct pd_route_path *x = &r->paths[i];
        if (!below(x->p, r->n_p) || !below(x->d, r->n_d) || !below(x->from, r->n_domains) || !below(x->to, r->n_domains) || x->overlap_permille > 1000 ||
            x->age_us < 0 || x->penalty_us < 0 || x->penalty_us > PD_US_MOST || (x->excluded.p != NULL) != (x->x != 0))
            return pd_fail(e, PD_ECORRUPT, "route: paths[%u] makes no sense", i);
    }
    for (uint32_t i = 0; i < r->n_pairs; i++)
        if (!below(r->pair[i].p, r->n_p) || !below(r->pair[i].d, r->n_d) || !below(r->pair[i].path, r->n_paths))
            return pd_fail(e, PD_ECORRUPT, "route: pairs[%u] is of rows that are not there", i);
    if ((rc = check_chosen(r, &r->chosen, e)) || (rc = check_chosen(r, &r->shadow.chosen, e)))
        return rc;
    int o = r->chosen.any ? PD_CHOSEN : find(pd_outcome_names, PD_STAY + 1, (struct pd_str){ r->reason, strlen(r->reason) });
    if (!r->chosen.any && o <= 0)
        return pd_fail(e, PD_ECORRUPT, "route: nothing is chosen, and the reason '%.40s' is not known here", r->reason);
    r->outcome = (enum pd_outcome)o;
    return 0;
}

int pd_route_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_route_rec *r, struct pd_err *e)
{
    *r = (struct pd_route_rec){ 0 };
    int rc = pd_table_decode(&route_table, rec, n, a, r, e);
    return rc ? rc : check(r, e);
}

/* ---- outcome ---- */

#define O(m) PD_FIELD(struct pd_outcome_rec, m)
#define KNOWN(b) .aux = offsetof(struct pd_outcome_rec, has), .bit = b
static const struct pd_field outcome_field[] = {
    { "run", PD_F_RUN, PD_FF_REQ, O(run) }, { "op", PD_F_BYTES, PD_FF_REQ, O(op) }, { "t_us", PD_F_I64, PD_FF_REQ, O(t_us) }, { "attempt", PD_F_U32, PD_FF_REQ, O(attempt) },
    { "migrations", PD_F_U32, PD_FF_NZ, O(migrations) }, { "policy", PD_F_CHARS, PD_FF_REQ, O(policy) }, { "mode", PD_F_CHARS, PD_FF_REQ, O(mode) },
    { "finish_reason", PD_F_CHARS, PD_FF_REQ, O(finish_reason) }, { "fallback", PD_F_STR, PD_FF_NULL | PD_FF_MEND, O(fallback) },
    { "cause", PD_F_STR, PD_FF_NULL | PD_FF_MEND, O(cause) }, { "p", PD_F_STR, PD_FF_NULL | PD_FF_MEND, O(p) }, { "d", PD_F_STR, PD_FF_NULL | PD_FF_MEND, O(d) },
    { "prompt_tokens", PD_F_U32, PD_FF_REQ, O(prompt_tokens) }, { "cached_tokens", PD_F_U32, 0, O(cached_tokens) }, { "transferred_tokens", PD_F_U32, 0, O(transferred_tokens) },
    { "recomputed_tokens", PD_F_U32, 0, O(recomputed_tokens) }, { "cached_expected", PD_F_U32, PD_FF_NZ, O(cached_expected) },
    { "p_cached_tokens", PD_F_U32, PD_FF_BIT, O(p_cached_tokens), KNOWN(PD_OC_P_CACHED) }, { "completion_tokens", PD_F_U32, PD_FF_REQ, O(completion_tokens) }, { "kv_bytes", PD_F_U64, 0, O(kv_bytes) },
    { "waited_us", PD_F_I64, 0, O(waited_us) }, { "queue_us", PD_F_I64, PD_FF_BIT, O(queue_us), KNOWN(PD_OC_QUEUE) },
    { "prefill_us", PD_F_I64, PD_FF_BIT, O(prefill_us), KNOWN(PD_OC_PREFILL) }, { "transfer_us", PD_F_I64, PD_FF_BIT, O(transfer_us), KNOWN(PD_OC_TRANSFER) },
    { "sync_us", PD_F_I64, PD_FF_BIT, O(sync_us), KNOWN(PD_OC_SYNC) }, { "kv_us", PD_F_I64, PD_FF_BIT, O(kv_us), KNOWN(PD_OC_KV) },
    { "ttft_us", PD_F_I64, PD_FF_BIT, O(ttft_us), KNOWN(PD_OC_TTFT) }, { "tpot_us", PD_F_I64, PD_FF_BIT, O(tpot_us), KNOWN(PD_OC_TPOT) },
    { "completion_us", PD_F_I64, PD_FF_BIT, O(completion_us), KNOWN(PD_OC_COMPLETION) } };
static const struct pd_table outcome_table = { "outcome", outcome_field, N(outcome_field), offsetof(struct pd_outcome_rec, extra) };

int pd_outcome_encode(const struct pd_outcome_rec *o, struct pd_buf *b, struct pd_err *e) { return pd_table_encode(&outcome_table, o, b, e); }

int pd_outcome_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_outcome_rec *o, struct pd_err *e)
{
    *o = (struct pd_outcome_rec){ 0 };
    return pd_table_decode(&outcome_table, rec, n, a, o, e);
}
