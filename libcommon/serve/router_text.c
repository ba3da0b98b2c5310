/* With a tokenizer at hand (-m) text becomes token ids here, so that it is known who holds its beginning. They are sent on in its place, to workers whose
 * fingerprint has the same tokenizer, and for messages the same chat template; to others the text goes as it came. What cannot be tokenised is for the worker to
 * refuse. On the loop's thread: 20 ns a byte, so that a prompt of MOST_TEXT bytes keeps others waiting for as long as its record does. */
#include "../base/log.h"
#include "../engine/runtime.h"
#include "router_in.h"

enum { MOST_TEXT = 1 << 20 };

static bool has_digest(struct pd_bin fields, const char *name, const uint8_t digest[PD_SHA_LEN])
{
    struct pd_bin v, b;
    return pd_map_find(fields.p, fields.n, name, &v) == 1 && pd_get_bin(v, &b) && b.n == PD_SHA_LEN && !memcmp(b.p, digest, PD_SHA_LEN);
}

void pd_rt_text_said(struct pd_router *r, struct pd_rt_worker *w)
{
    const struct pd_model *m = r->o.model;
    if (!m)
        return;
    w->same_tokens = has_digest(w->m->said.fp_fields, "tokenizer_digest", pd_tokenizer_digest(m->tok));
    w->same_chat = w->same_tokens && has_digest(w->m->said.fp_fields, "chat_digest", m->chat.digest);
    if (!w->same_chat && !w->told_text)
        pd_warn("worker %s: its %s is not that of -m: %s are sent to it as text", pd_member_name(w->m), w->same_tokens ? "chat template" : "tokenizer",
                w->same_tokens ? "messages" : "prompts");
    w->told_text = !w->same_chat;
}

static bool reads(const struct pd_rt_run *run, const struct pd_rt_worker *w) { return run->of_messages ? w->same_chat : w->same_tokens; }

const struct pd_rt_body *pd_rt_body_for(const struct pd_rt_run *run)
{
    return run->ids.b.n && run->d && reads(run, run->d) && (!run->p || reads(run, run->p)) ? &run->ids : &run->body;
}

int pd_rt_tokenise(struct pd_router *r, struct pd_rt_run *run, const struct pd_request *q, struct pd_err *e)
{
    struct pd_buf ids = { 0 };
    struct pd_err why;
    bool any = false;
    size_t text = q->prompt.n;
    for (uint32_t i = 0; i < q->n_messages; i++)
        text += q->messages[i].content.n;
    run->of_messages = q->n_messages > 0;
    for (const struct pd_rt_worker *w = r->workers; w && !any; w = w->next)
        any = reads(run, w);
    if (!r->o.model || q->has_token_ids || !any || text > MOST_TEXT || pd_prompt_ids(r->o.model, q, &ids, &why) < 0 || !ids.n) {
        pd_buf_free(&ids);
        return 0;
    }
    struct pd_request as = *q;
    as.prompt = (struct pd_str){ NULL, 0 };
    as.n_messages = 0;
    as.messages = NULL;
    as.has_token_ids = true;
    as.token_ids = (int32_t *)(void *)ids.p;
    as.n_token_ids = (uint32_t)(ids.n / sizeof(int32_t));
    int rc = pd_rt_body_make(&as, &run->ids, e);
    run->need.exact = rc == 0;
    run->need.prompt_tokens = rc ? run->need.prompt_tokens : as.n_token_ids;
    pd_buf_free(&ids);
    return rc;
}
