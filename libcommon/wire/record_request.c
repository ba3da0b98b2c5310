/* request: what a person writes by hand, so every refusal says what would have been right. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "fields.h"

enum { MAX_STOP = 64, MAX_STOP_IDS = 1024, MAX_BIAS = 4096 };

static int list_too_long(const char *name, uint64_t n, int most, struct pd_unpack *u)
{
    return pd_fail(u->e, u->code, "%s has %llu entries, at most %d are taken", name, (unsigned long long)n, most);
}

/* ---- messages: [{role, content}], content a string or a list of text parts ---- */

static void enc_messages(const void *rec, struct pd_packer *k)
{
    const struct pd_request *r = rec;
    msgpack_pack_array(&k->pk, r->n_messages);
    for (uint32_t i = 0; i < r->n_messages; i++) {
        const struct pd_message *m = &r->messages[i];
        msgpack_pack_map(&k->pk, 2 + m->extra.pairs);
        pd_pack_text(k, "role");
        pd_pack_str(k, m->role);
        pd_pack_text(k, "content");
        pd_pack_str(k, m->content);
        if (m->extra.pairs)
            pd_pack_raw(k, m->extra.p, m->extra.n);
    }
}

/* [{"type":"text","text":...}, ...]: joined. A part of another type is refused by name, never dropped. */
static int dec_parts(struct pd_bin v, struct pd_str *out, struct pd_unpack *u)
{
    struct pd_buf all = { 0 };
    struct pd_iter it;
    struct pd_bin part, x;
    struct pd_str s;
    int rc = 0;
    pd_iter_open(&it, v, PD_T_ARRAY);
    while (!rc && pd_iter_next(&it, &part)) {
        char text[96];
        if (pd_map_find(part.p, part.n, "type", &x) != 1 || !pd_get_str(x, &s))
            rc = pd_fail(u->e, u->code, "a part of the content has no type");
        else if (!pd_str_eq(s, "text"))
            rc = pd_fail(u->e, u->code, "content of type %s is not supported, only \"text\" is", pd_value_text(x, text, sizeof text));
        else if (pd_map_find(part.p, part.n, "text", &x) != 1)
            rc = pd_fail(u->e, u->code, "a text part has no text");
        else if (!(rc = pd_unpack_str("text", x, &s, u)))
            rc = pd_buf_add(&all, s.p, s.n, u->e);
    }
    if (!rc) {
        *out = (struct pd_str){ pd_arena_dup(u->a, all.p, all.n, u->e), all.n };
        rc = out->p ? 0 : PD_ENOMEM;
    }
    pd_buf_free(&all);
    return rc;
}

static void enc_content_never(const void *rec, struct pd_packer *k) { pd_pack_str(k, ((const struct pd_message *)rec)->content); }

static int dec_content(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_message *m = rec;
    return pd_value_type(v) == PD_T_ARRAY ? dec_parts(v, &m->content, u) : pd_unpack_str("content", v, &m->content, u);
}

#define M(m) PD_FIELD(struct pd_message, m)
static const struct pd_field message_field[] = {
    { "role", PD_F_STR, PD_FF_REQ, M(role) }, { "content", PD_F_CUSTOM, PD_FF_REQ, M(content), .enc = enc_content_never, .dec = dec_content } };
static const struct pd_table message_table = { "messages", message_field, 2, offsetof(struct pd_message, extra) };

static int dec_messages(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_request *r = rec;
    struct pd_iter it;
    struct pd_bin x;
    if (!pd_iter_open(&it, v, PD_T_ARRAY) || !it.left)
        return pd_fail(u->e, u->code, "messages must be a list of {role, content} that is not empty");
    if (!(r->messages = pd_arena_alloc(u->a, (size_t)it.left, sizeof *r->messages, u->e)))
        return PD_ENOMEM;
    for (; pd_iter_next(&it, &x); r->n_messages++) {
        int rc = pd_fields_decode(&message_table, x, &r->messages[r->n_messages], u);
        if (rc)
            return rc;
    }
    return 0;
}

/* ---- stop: one string or a list ---- */

static void enc_stop(const void *rec, struct pd_packer *k)
{
    const struct pd_request *r = rec;
    msgpack_pack_array(&k->pk, r->n_stop);
    for (uint32_t i = 0; i < r->n_stop; i++)
        pd_pack_str(k, r->stop[i]);
}

static int dec_stop(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_request *r = rec;
    struct pd_iter it = { 0 };
    struct pd_bin x = v;
    bool list = pd_iter_open(&it, v, PD_T_ARRAY);
    uint64_t n = list ? it.left : 1;
    if (n > MAX_STOP)
        return list_too_long("stop", n, MAX_STOP, u);
    if (!(r->stop = pd_arena_alloc(u->a, (size_t)n, sizeof *r->stop, u->e)))
        return PD_ENOMEM;
    for (; r->n_stop < n; r->n_stop++) {
        struct pd_str *s = &r->stop[r->n_stop];
        int rc = list && !pd_iter_next(&it, &x) ? pd_fail(u->e, u->code, "stop ends early") : pd_unpack_str("stop", x, s, u);
        if (rc)
            return rc;
        if (!s->n)
            return pd_fail(u->e, u->code, "stop: an empty string would stop at once");
    }
    return 0;
}

static int dec_stop_ids(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_request *r = rec;
    int rc = pd_unpack_ids("stop_token_ids", v, &r->stop_token_ids, &r->n_stop_token_ids, u);
    return !rc && r->n_stop_token_ids > MAX_STOP_IDS ? list_too_long("stop_token_ids", r->n_stop_token_ids, MAX_STOP_IDS, u) : rc;
}

static void enc_stop_ids(const void *rec, struct pd_packer *k)
{
    const struct pd_request *r = rec;
    msgpack_pack_array(&k->pk, r->n_stop_token_ids);
    for (uint32_t i = 0; i < r->n_stop_token_ids; i++)
        msgpack_pack_int32(&k->pk, r->stop_token_ids[i]);
}

/* ---- logit_bias: {"token id": bias}, string keys because JSON has no others ---- */

static void enc_bias(const void *rec, struct pd_packer *k)
{
    const struct pd_request *r = rec;
    msgpack_pack_map(&k->pk, r->n_logit_bias);
    for (uint32_t i = 0; i < r->n_logit_bias; i++) {
        char key[16];
        snprintf(key, sizeof key, "%d", r->logit_bias[i].token);
        pd_pack_text(k, key);
        pd_pack_float(k, "logit_bias", r->logit_bias[i].bias);
    }
}

static int by_token(const void *a, const void *b)
{
    int32_t x = ((const struct pd_logit_bias *)a)->token, y = ((const struct pd_logit_bias *)b)->token;
    return x < y ? -1 : x > y;
}

static int dec_bias(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_request *r = rec;
    struct pd_iter it;
    struct pd_bin key, x;
    struct pd_str s;
    if (!pd_iter_open(&it, v, PD_T_MAP))
        return pd_fail(u->e, u->code, "logit_bias must be a map from token id to bias");
    if (it.left > MAX_BIAS)
        return list_too_long("logit_bias", it.left, MAX_BIAS, u);
    if (!(r->logit_bias = pd_arena_alloc(u->a, (size_t)it.left, sizeof *r->logit_bias, u->e)))
        return PD_ENOMEM;
    uint32_t n = (uint32_t)it.left;
    it.left *= 2;       /* keys may be integers too: walked as values */
    for (uint32_t i = 0; i < n; i++) {
        struct pd_logit_bias *b = &r->logit_bias[i];
        char text[96];
        int64_t id = -1;
        if (!pd_iter_next(&it, &key) || !pd_iter_next(&it, &x))
            return pd_fail(u->e, u->code, "logit_bias ends early");
        if (pd_get_str(key, &s) && s.n > 0 && s.n < 11) {
            id = 0;
            for (size_t c = 0; c < s.n && id >= 0; c++)
                id = s.p[c] >= '0' && s.p[c] <= '9' ? id * 10 + (s.p[c] - '0') : -1;
        } else if (!pd_get_int(key, &id))
            id = -1;
        if (id < 0 || id > INT32_MAX)
            return pd_fail(u->e, u->code, "logit_bias: %s is no token id", pd_value_text(key, text, sizeof text));
        int rc = pd_unpack_float("logit_bias", x, &b->bias, u);
        if (rc)
            return rc;
        b->token = (int32_t)id;
    }
    qsort(r->logit_bias, n, sizeof *r->logit_bias, by_token);
    for (uint32_t i = 1; i < n; i++)
        if (r->logit_bias[i].token == r->logit_bias[i - 1].token)
            return pd_fail(u->e, u->code, "logit_bias: token %d comes twice", r->logit_bias[i].token);
    r->n_logit_bias = n;
    return 0;
}

/* ---- the rest ---- */

static void enc_ids(const void *rec, struct pd_packer *k)
{
    const struct pd_request *r = rec;
    msgpack_pack_array(&k->pk, r->n_token_ids);
    for (uint32_t i = 0; i < r->n_token_ids; i++)
        msgpack_pack_int32(&k->pk, r->token_ids[i]);
}

static int dec_ids(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_request *r = rec;
    return pd_unpack_ids("token_ids", v, &r->token_ids, &r->n_token_ids, u);
}

/* true, false, or a count as older completion APIs have it: then that many alternatives too. */
static int dec_logprobs(void *rec, struct pd_bin v, struct pd_unpack *u)
{
    struct pd_request *r = rec;
    bool on;
    int64_t n;
    if (pd_get_bool(v, &on)) {
        r->logprobs = on;
        return 0;
    }
    int rc = pd_unpack_int("logprobs", v, 0, INT32_MAX, &n, u);
    if (rc)
        return rc;
    r->logprobs = n > 0;
    if (n > 1 && !(r->has & PD_RQ_TOP_LOGPROBS)) {
        r->top_logprobs = (int32_t)n;
        r->has |= PD_RQ_TOP_LOGPROBS;
    }
    return 0;
}

static void enc_logprobs(const void *rec, struct pd_packer *k)
{
    msgpack_pack_int32(&k->pk, ((const struct pd_request *)rec)->logprobs);
}

#define R(m) PD_FIELD(struct pd_request, m)
#define BIT(b) .aux = offsetof(struct pd_request, has), .bit = (b)
#define COUNT(m) .aux = offsetof(struct pd_request, m)
static const struct pd_field field[] = {
    { "run", PD_F_RUN, 0, R(run) }, { "id", PD_F_ID, 0, R(id) }, { "prompt", PD_F_STR, 0, R(prompt) },
    { "messages", PD_F_CUSTOM, PD_FF_COUNT, R(messages), COUNT(n_messages), .enc = enc_messages, .dec = dec_messages },
    { "token_ids", PD_F_CUSTOM, PD_FF_HAS, R(token_ids), .aux = offsetof(struct pd_request, has_token_ids), .enc = enc_ids, .dec = dec_ids },
    { "max_tokens", PD_F_I32, PD_FF_BIT, R(max_tokens), BIT(PD_RQ_MAX_TOKENS) }, { "min_tokens", PD_F_I32, PD_FF_BIT, R(min_tokens), BIT(PD_RQ_MIN_TOKENS) },
    { "temperature", PD_F_FLOAT, PD_FF_BIT, R(temperature), BIT(PD_RQ_TEMPERATURE) }, { "top_p", PD_F_FLOAT, PD_FF_BIT, R(top_p), BIT(PD_RQ_TOP_P) },
    { "top_k", PD_F_I32, PD_FF_BIT, R(top_k), BIT(PD_RQ_TOP_K) }, { "min_p", PD_F_FLOAT, PD_FF_BIT, R(min_p), BIT(PD_RQ_MIN_P) },
    { "seed", PD_F_I64, PD_FF_BIT, R(seed), BIT(PD_RQ_SEED) },
    { "stop", PD_F_CUSTOM, PD_FF_COUNT, R(stop), COUNT(n_stop), .enc = enc_stop, .dec = dec_stop },
    { "stop_token_ids", PD_F_CUSTOM, PD_FF_COUNT, R(stop_token_ids), COUNT(n_stop_token_ids), .enc = enc_stop_ids, .dec = dec_stop_ids },
    { "presence_penalty", PD_F_FLOAT, PD_FF_BIT, R(presence_penalty), BIT(PD_RQ_PRESENCE) },
    { "frequency_penalty", PD_F_FLOAT, PD_FF_BIT, R(frequency_penalty), BIT(PD_RQ_FREQUENCY) },
    { "repetition_penalty", PD_F_FLOAT, PD_FF_BIT, R(repetition_penalty), BIT(PD_RQ_REPETITION) },
    { "logit_bias", PD_F_CUSTOM, PD_FF_COUNT, R(logit_bias), COUNT(n_logit_bias), .enc = enc_bias, .dec = dec_bias },
    { "ignore_eos", PD_F_BOOL, 0, R(ignore_eos) },
    { "logprobs", PD_F_CUSTOM, PD_FF_BIT, R(logprobs), BIT(PD_RQ_LOGPROBS), .enc = enc_logprobs, .dec = dec_logprobs },
    { "top_logprobs", PD_F_I32, PD_FF_BIT, R(top_logprobs), BIT(PD_RQ_TOP_LOGPROBS) }, { "echo", PD_F_BOOL, 0, R(echo) },
    { "n", PD_F_I32, PD_FF_BIT, R(n), BIT(PD_RQ_N) }, { "adapter", PD_F_STR, 0, R(adapter) }, { "cache_salt", PD_F_STR, 0, R(cache_salt) },
    { "deadline_ms", PD_F_I64, PD_FF_BIT, R(deadline_ms), BIT(PD_RQ_DEADLINE) }, { "timeouts_ms", PD_F_MAP, 0, R(timeouts_ms) }, { "slo", PD_F_MAP, 0, R(slo) },
    { "cancel_token", PD_F_BIN, 0, R(cancel_token) }, { "priority", PD_F_I32, PD_FF_BIT, R(priority), BIT(PD_RQ_PRIORITY) },
    { "idempotency_key", PD_F_STR, 0, R(idempotency_key) }, { "arrival_us", PD_F_I64, PD_FF_BIT, R(arrival_us), BIT(PD_RQ_ARRIVAL) },
    { "route", PD_F_MAP, 0, R(route) } };
enum { RUN = 0, PROMPT = 2, MESSAGES = 3, TOKEN_IDS = 4 };
static const struct pd_table table = { "request", field, sizeof field / sizeof *field, offsetof(struct pd_request, extra) };

enum { MAX_KEY = 1024 };
static int check(const struct pd_request *r, bool inside, struct pd_unpack *u)
{
    int forms = (r->prompt.p != NULL) + (r->n_messages > 0) + r->has_token_ids;
    if (forms > 1)
        return pd_fail(u->e, u->code, "request: only one of prompt, messages and token_ids may be given");
    if (!forms && !inside)
        return pd_fail(u->e, u->code, "request: one of prompt, messages or token_ids is needed");
    if (r->prompt.p && !r->prompt.n)
        return pd_fail(u->e, u->code, "request: prompt is empty");
    if (r->has_token_ids && !r->n_token_ids)
        return pd_fail(u->e, u->code, "request: token_ids is empty");
    if (r->cancel_token.p && r->cancel_token.n != 16)
        return pd_fail(u->e, u->code, "request: cancel_token must be bin of 16 bytes, not of %zu", r->cancel_token.n);
    if (r->idempotency_key.n > MAX_KEY)
        return pd_fail(u->e, u->code, "request: idempotency_key has %zu bytes, at most %d are taken", r->idempotency_key.n, MAX_KEY);
    return 0;
}

int pd_request_decode(const void *rec, size_t n, struct pd_arena *a, struct pd_request *r, struct pd_err *e)
{
    struct pd_unpack u = { a, e, PD_EFAIL };
    struct pd_bin v;
    *r = (struct pd_request){ 0 };
    int rc = pd_record_open("request", rec, n, true, &u);
    if (!rc && pd_map_find(rec, n, "sum", &v) == 1)     /* an offer has token_ids too, and is told from a request by `pd` alone */
        rc = pd_fail(e, PD_ECORRUPT, "request: it has a sum, as only offer and kv do; the record was changed on its way");
    rc = rc ? rc : pd_fields_decode(&table, (struct pd_bin){ rec, n }, r, &u);
    return rc ? rc : check(r, false, &u);
}

int pd_request_unpack_inside(struct pd_bin v, struct pd_request *r, struct pd_unpack *u)
{
    int rc = pd_fields_decode(&table, v, r, u);
    return rc ? rc : check(r, true, u);
}

int pd_request_encode(const struct pd_request *r, struct pd_buf *b, struct pd_err *e)
{
    struct pd_packer k;
    size_t from = b->n;
    pd_pack_init(&k, b, e);
    pd_fields_encode(&table, r, true, 0, 0, &k);
    return pd_record_close(&k, from);
}

void pd_request_pack_inside(const struct pd_request *r, struct pd_packer *k)
{
    pd_fields_encode(&table, r, false, 1ull << RUN | 1ull << TOKEN_IDS, 0, k);
}

static int in_range(const char *name, double v, double lo, double hi, const char *rule, struct pd_err *e)
{
    return v >= lo && v <= hi ? 0 : pd_fail(e, PD_EFAIL, "request: %s = %g is refused (%s)", name, v, rule);
}

int pd_timeouts_read(const struct pd_request *r, struct pd_timeouts *t, struct pd_err *e)
{
    static const char *const name[] = { "queue", "prefill", "transfer", "first_token" };
    int64_t *to[] = { &t->queue, &t->prefill, &t->transfer, &t->first_token }, ms;
    char text[64];
    struct pd_bin v;
    *t = (struct pd_timeouts){ 0, 0, 0, 0 };
    for (size_t i = 0; i < sizeof to / sizeof *to; i++) {
        if (!r->timeouts_ms.p || pd_map_find(r->timeouts_ms.p, r->timeouts_ms.n, name[i], &v) != 1 || pd_value_type(v) == PD_T_NIL)
            continue;
        if (!pd_get_int(v, &ms) || ms < 1 || ms > 1000000000000)
            return pd_fail(e, PD_EFAIL, "timeouts_ms.%s is %s: a whole number of milliseconds, 1 to 10^12", name[i], pd_value_text(v, text, sizeof text));
        *to[i] = ms * 1000;
    }
    return 0;
}

int pd_request_resolve(struct pd_request *r, int64_t default_seed, struct pd_err *e)
{
    static const struct { uint32_t bit; uint16_t off; int32_t v; } whole[] = {
        { PD_RQ_MAX_TOKENS, offsetof(struct pd_request, max_tokens), 256 }, { PD_RQ_MIN_TOKENS, offsetof(struct pd_request, min_tokens), 0 },
        { PD_RQ_TOP_K, offsetof(struct pd_request, top_k), 0 }, { PD_RQ_N, offsetof(struct pd_request, n), 1 }, { PD_RQ_LOGPROBS, offsetof(struct pd_request, logprobs), 0 },
        { PD_RQ_TOP_LOGPROBS, offsetof(struct pd_request, top_logprobs), 0 } };
    static const struct { uint32_t bit; uint16_t off; float v; } real[] = {
        { PD_RQ_TEMPERATURE, offsetof(struct pd_request, temperature), 1 }, { PD_RQ_TOP_P, offsetof(struct pd_request, top_p), 1 },
        { PD_RQ_MIN_P, offsetof(struct pd_request, min_p), 0 }, { PD_RQ_PRESENCE, offsetof(struct pd_request, presence_penalty), 0 },
        { PD_RQ_FREQUENCY, offsetof(struct pd_request, frequency_penalty), 0 }, { PD_RQ_REPETITION, offsetof(struct pd_request, repetition_penalty), 1 } };
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++)
        if (!(r->has & whole[i].bit)) {
            *(int32_t *)((char *)r + whole[i].off) = whole[i].v;
            r->has |= whole[i].bit;
        }
    for (size_t i = 0; i < sizeof real / sizeof *real; i++)
        if (!(r->has & real[i].bit)) {
            *(float *)((char *)r + real[i].off) = real[i].v;
            r->has |= real[i].bit;
        }
    if (!(r->has & PD_RQ_SEED)) {
        r->seed = default_seed;
        r->has |= PD_RQ_SEED;
    }
    int rc;
    if ((rc = in_range("max_tokens", r->max_tokens, 1, INT32_MAX, "1 or more", e)) ||
        (rc = in_range("min_tokens", r->min_tokens, 0, r->max_tokens, "0 to max_tokens", e)) ||
        (rc = in_range("temperature", r->temperature, 0, 100, "0 to 100; 0 takes the likeliest token", e)) ||
        (rc = in_range("top_p", r->top_p, 1e-45, 1, "above 0, at most 1", e)) ||
        (rc = in_range("top_k", r->top_k, -1, INT32_MAX, "1 or more; 0 or -1 for all", e)) ||
        (rc = in_range("min_p", r->min_p, 0, 1, "0 to 1", e)) ||
        (rc = in_range("presence_penalty", r->presence_penalty, -2, 2, "-2 to 2", e)) ||
        (rc = in_range("frequency_penalty", r->frequency_penalty, -2, 2, "-2 to 2", e)) ||
        (rc = in_range("repetition_penalty", r->repetition_penalty, 1e-3, 1e3, "0.001 to 1000; 1 is none", e)) ||
        (rc = in_range("n", r->n, 1, 128, "1 to 128", e)) ||
        (rc = in_range("top_logprobs", r->top_logprobs, 0, 128, "0 to 128", e)) ||
        (rc = in_range("seed", (double)r->seed, 0, 9.3e18, "0 to 2^63-1", e)) ||
        (r->has & PD_RQ_DEADLINE && (rc = in_range("deadline_ms", (double)r->deadline_ms, 1, 1e15, "1 to 10^15", e))) ||
        (r->has & PD_RQ_ARRIVAL && (rc = in_range("arrival_us", (double)r->arrival_us, 0, 9e18, "0 or more", e))))
        return rc;
    struct pd_timeouts t;
    if ((rc = pd_timeouts_read(r, &t, e)))
        return rc;
    for (uint32_t i = 0; i < r->n_logit_bias; i++)
        if ((rc = in_range("logit_bias", r->logit_bias[i].bias, -1e4, 1e4, "-10000 to 10000", e)))
            return rc;
    if (r->top_k == -1)
        r->top_k = 0;
    return r->run[0] ? 0 : pd_run_new(r->run, e);
}
