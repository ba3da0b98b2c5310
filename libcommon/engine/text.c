#include "../base/utf8.h"
#include "text.h"

/* Moves raw[cleaned .. end) to text, replacing what is not UTF-8. */
static int clean(struct pd_text *t, size_t end, struct pd_err *e)
{
    while (t->cleaned < end) {
        const char *s = (const char *)t->raw.p + t->cleaned;
        size_t n = end - t->cleaned;
        long bad = pd_utf8_invalid(s, n);
        size_t good = bad < 0 ? n : (size_t)bad;
        int rc = pd_buf_add(&t->text, s, good, e);
        if (rc == 0 && bad >= 0)
            rc = pd_buf_add(&t->text, "\xef\xbf\xbd", 3, e);
        if (rc < 0)
            return rc;
        t->cleaned += good + (bad >= 0);
    }
    return 0;
}

/* The earliest stop string in raw that ends past what was scanned before (those that ended earlier were let pass); its offset, or -1. */
static long find_stop(const struct pd_text *t, const struct pd_request *r)
{
    long best = -1;
    for (uint32_t i = 0; i < r->n_stop; i++) {
        size_t n = r->stop[i].n, from = t->scanned >= n ? t->scanned - n + 1 : 0;
        if (!n || from >= t->raw.n)
            continue;
        const uint8_t *hit = memmem(t->raw.p + from, t->raw.n - from, r->stop[i].p, r->stop[i].n);
        if (hit && (best < 0 || hit - t->raw.p < best))
            best = hit - t->raw.p;
    }
    return best;
}

/* How many bytes at the end of raw are the beginning of a stop string. */
static size_t held_back(const struct pd_text *t, const struct pd_request *r)
{
    size_t held = 0;
    for (uint32_t i = 0; i < r->n_stop; i++) {
        size_t n = r->stop[i].n ? r->stop[i].n - 1 : 0;
        if (n > t->raw.n)
            n = t->raw.n;
        for (; n > held; n--)
            if (!memcmp(t->raw.p + t->raw.n - n, r->stop[i].p, n)) {
                held = n;
                break;
            }
    }
    return held;
}

int pd_text_add(struct pd_text *t, const struct pd_tokenizer *tok, const struct pd_request *r, int32_t token, bool may_stop, struct pd_err *e)
{
    int rc = pd_detokenize(tok, token, false, false, &t->raw, e);
    if (rc < 0)
        return rc;
    long at = may_stop ? find_stop(t, r) : -1;
    t->scanned = t->raw.n;
    if (at >= 0) {
        t->raw.n = (size_t)at;
        t->stopped = true;
        return pd_text_end(t, e);
    }
    size_t end = t->raw.n - held_back(t, r);
    if (end <= t->cleaned)
        return 0;
    return clean(t, t->cleaned + pd_utf8_complete((const char *)t->raw.p + t->cleaned, end - t->cleaned), e);
}

int pd_text_echo(struct pd_text *t, const struct pd_tokenizer *tok, const int32_t *tokens, uint32_t n, struct pd_err *e)
{
    struct pd_text prompt = { 0 };
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < n; i++)
        rc = pd_detokenize(tok, tokens[i], false, i == 0, &prompt.raw, e);
    if (rc == 0 && (rc = pd_text_end(&prompt, e)) == 0)
        rc = pd_buf_add(&t->text, prompt.text.p, prompt.text.n, e);
    pd_text_free(&prompt);
    return rc;
}

int pd_text_end(struct pd_text *t, struct pd_err *e) { return clean(t, t->raw.n, e); }

void pd_text_free(struct pd_text *t)
{
    pd_buf_free(&t->raw);
    pd_buf_free(&t->text);
}
