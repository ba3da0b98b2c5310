/* Records: what people write wrong in a request, what a lying program writes in the others. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "../../libcommon/wire/json.h"
#include "samples.h"

static int decode(const char *json, struct pd_arena *a, struct pd_request *r, struct pd_err *e)
{
    struct pd_buf b = { 0 };
    if (pd_json_to_msgpack(json, strlen(json), &b, e))
        fail_msg("%s: %s", json, e->msg);
    int rc = pd_request_decode(b.p, b.n, a, r, e);
    pd_buf_free(&b);
    return rc;
}

static void refused(const char *json, const char *why)
{
    struct pd_arena a = { 0 };
    struct pd_request r;
    struct pd_err e = { 0 };
    int rc = decode(json, &a, &r, &e);
    rc = rc ? rc : pd_request_resolve(&r, 0, &e);
    if (rc != PD_EFAIL || !strstr(e.msg, why))
        fail_msg("%s: not refused with '%s' but %d '%s'", json, why, rc, e.msg);
    pd_arena_free(&a);
}

static void bad_requests_are_told_by_field(void **state)
{
    refused("{}", "one of prompt, messages or token_ids");
    refused("{\"prompt\":\"\"}", "prompt is empty");
    refused("{\"prompt\":\"a\",\"token_ids\":[1]}", "only one of");
    refused("{\"prompt\":\"a\",\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}", "only one of");
    refused("{\"token_ids\":[]}", "token_ids is empty");
    refused("{\"token_ids\":[1,-2]}", "token_ids[1] = -2");
    refused("{\"token_ids\":[1,\"2\"]}", "token_ids[1]");
    refused("{\"token_ids\":[2147483648]}", "2147483648");
    refused("{\"token_ids\":{\"$b64\":\"AAAA\"}}", "3 bytes");
    refused("{\"prompt\":7}", "prompt must be a string, not 7");
    refused("{\"prompt\":\"a\",\"temperature\":\"hot\"}", "temperature must be a finite number, not \"hot\"");
    refused("{\"prompt\":\"a\",\"temperature\":1e39}", "float32");
    refused("{\"prompt\":\"a\",\"max_tokens\":1.5}", "max_tokens must be a whole number");
    refused("{\"prompt\":\"a\",\"max_tokens\":99999999999}", "99999999999");
    refused("{\"prompt\":\"a\",\"max_tokens\":true}", "not true");
    refused("{\"prompt\":\"a\",\"ignore_eos\":1}", "ignore_eos must be true or false, not 1");
    refused("{\"prompt\":\"a\",\"stop\":7}", "stop must be a string");
    refused("{\"prompt\":\"a\",\"stop\":[\"x\",\"\"]}", "empty string");
    refused("{\"prompt\":\"a\",\"logit_bias\":{\"x\":1}}", "\"x\" is no token id");
    refused("{\"prompt\":\"a\",\"logit_bias\":{\"-1\":1}}", "no token id");
    refused("{\"prompt\":\"a\",\"logit_bias\":{\"1\":1,\"01\":2}}", "token 1 comes twice");
    refused("{\"prompt\":\"a\",\"logit_bias\":{\"99999999999\":1}}", "no token id");
    refused("{\"prompt\":\"a\",\"id\":1.5}", "id must be a string or an integer");
    refused("{\"prompt\":\"a\",\"run\":\"abc\"}", "ULID");
    refused("{\"prompt\":\"a\",\"slo\":3}", "slo must be a map");
    refused("{\"prompt\":\"a\",\"cancel_token\":{\"$b64\":\"AAAA\"}}", "16 bytes");
    refused("{\"prompt\":\"a\",\"cancel_token\":\"AAAA\"}", "cancel_token must be bin");
    refused("{\"prompt\":\"a\",\"v\":2}", "v 2 is not known");
    refused("{\"prompt\":\"a\",\"pd\":\"token\"}", "pd must be request");
    refused("{\"messages\":[]}", "not empty");
    refused("{\"messages\":[{\"role\":\"user\"}]}", "content is missing");
    refused("{\"messages\":[{\"role\":7,\"content\":\"x\"}]}", "messages: role");
    refused("{\"messages\":[\"x\"]}", "a map is expected");
    refused("{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":{}}]}]}", "image_url");
    refused("{\"prompt\":\"a\",\"temperature\":-0.1}", "temperature");
    refused("{\"prompt\":\"a\",\"top_p\":0}", "top_p");
    refused("{\"prompt\":\"a\",\"top_p\":1.01}", "top_p");
    refused("{\"prompt\":\"a\",\"top_k\":-2}", "top_k");
    refused("{\"prompt\":\"a\",\"min_p\":1.5}", "min_p");
    refused("{\"prompt\":\"a\",\"n\":0}", "n = 0");
    refused("{\"prompt\":\"a\",\"n\":129}", "n = 129");
    refused("{\"prompt\":\"a\",\"max_tokens\":-1}", "max_tokens = -1");
    refused("{\"prompt\":\"a\",\"max_tokens\":0}", "max_tokens = 0");
    refused("{\"prompt\":\"a\",\"max_tokens\":4,\"min_tokens\":5}", "min_tokens");
    refused("{\"prompt\":\"a\",\"repetition_penalty\":0}", "repetition_penalty");
    refused("{\"prompt\":\"a\",\"presence_penalty\":3}", "presence_penalty");
    refused("{\"prompt\":\"a\",\"seed\":-1}", "seed");
    refused("{\"prompt\":\"a\",\"deadline_ms\":0}", "deadline_ms");
    refused("{\"prompt\":\"a\",\"logit_bias\":{\"1\":1e30}}", "logit_bias");
    refused("{\"prompt\":\"a\",\"top_logprobs\":1000}", "top_logprobs");
}

static void defaults_are_filled(void **state)
{
    struct pd_arena a = { 0 };
    struct pd_request r, again;
    struct pd_err e = { 0 };
    assert_int_equal(decode("{\"prompt\":\"a\",\"id\":7,\"temperature\":null}", &a, &r, &e), 0);
    assert_int_equal(r.has, 0);
    assert_int_equal(pd_request_resolve(&r, 5, &e), 0);
    assert_int_equal(r.max_tokens, 256);
    assert_true(r.temperature == 1 && r.top_p == 1 && r.min_p == 0 && r.presence_penalty == 0 && r.frequency_penalty == 0 && r.repetition_penalty == 1);
    assert_int_equal(r.top_k, 0);
    assert_int_equal(r.n, 1);
    assert_int_equal(r.seed, 5);
    assert_true(pd_run_valid(r.run, strlen(r.run)));
    struct pd_buf b = { 0 };
    assert_int_equal(pd_request_encode(&r, &b, &e), 0);
    assert_int_equal(pd_request_decode(b.p, b.n, &a, &again, &e), 0);
    assert_int_equal(again.seed, 5);        /* carried in full from here on: another default changes nothing */
    assert_int_equal(pd_request_resolve(&again, 6, &e), 0);
    assert_int_equal(again.seed, 5);
    assert_string_equal(again.run, r.run);
    assert_int_equal(again.has, r.has);
    pd_buf_free(&b);
    pd_arena_free(&a);
}

static void forms_that_people_use(void **state)
{
    struct pd_arena a = { 0 };
    struct pd_request r;
    struct pd_err e = { 0 };
    assert_int_equal(decode("{\"prompt\":\"a\",\"stop\":\"END\",\"logprobs\":true,\"top_k\":-1}", &a, &r, &e), 0);
    assert_int_equal(r.n_stop, 1);
    assert_true(pd_str_eq(r.stop[0], "END"));
    assert_int_equal(r.logprobs, 1);
    assert_int_equal(pd_request_resolve(&r, 0, &e), 0);
    assert_int_equal(r.top_k, 0);
    assert_int_equal(r.top_logprobs, 0);
    assert_int_equal(decode("{\"prompt\":\"a\",\"logprobs\":5}", &a, &r, &e), 0);
    assert_int_equal(r.logprobs, 1);
    assert_int_equal(r.top_logprobs, 5);
    assert_int_equal(decode("{\"prompt\":\"a\",\"logprobs\":false,\"stop\":[]}", &a, &r, &e), 0);
    assert_int_equal(r.logprobs, 0);
    assert_int_equal(r.n_stop, 0);
    assert_int_equal(decode("{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"text\",\"text\":\"b\"}]}]}", &a, &r, &e), 0);
    assert_true(pd_str_eq(r.messages[0].content, "ab"));
    assert_int_equal(decode("{\"token_ids\":{\"$b64\":\"AQAAAAIAAAA=\"}}", &a, &r, &e), 0);
    assert_int_equal(r.n_token_ids, 2);
    assert_int_equal(r.token_ids[1], 2);
    assert_int_equal(decode("{\"prompt\":\"a\",\"logit_bias\":{\"50256\":-100,\"7\":1}}", &a, &r, &e), 0);
    assert_int_equal(r.n_logit_bias, 2);
    assert_int_equal(r.logit_bias[0].token, 7);
    pd_arena_free(&a);
}

/* What this build does not know goes on as it came, but in canonical form: a float32 would not come back from JSON. */
static void unknown_fields_are_carried(void **state)
{
    struct pd_arena a = { 0 };
    struct pd_request r;
    struct pd_err e = { 0 };
    struct pd_buf b = { 0 }, j = { 0 };
    struct pd_bin rec = BIN("\x83\xa6prompt\xa1" "a\xa1x\x92\xca\x3f\0\0\0\xd1\0\x07\xa1y\xc0");
    assert_int_equal(pd_request_decode(rec.p, rec.n, &a, &r, &e), 0);
    assert_int_equal(r.extra.pairs, 2);
    assert_int_equal(decode("{\"prompt\":\"a\",\"\":{\"\":\"\"},\"adapter\":\"\"}", &a, &r, &e), 0);
    assert_int_equal(r.extra.pairs, 1);
    assert_true(r.adapter.p && !r.adapter.n);
    assert_int_equal(pd_request_decode(rec.p, rec.n, &a, &r, &e), 0);
    assert_int_equal(pd_request_encode(&r, &b, &e), 0);
    assert_int_equal(pd_msgpack_to_json(b.p, b.n, &j, &e), 0);
    pd_buf_add(&j, "", 1, NULL);
    assert_string_equal((char *)j.p, "{\"pd\":\"request\",\"v\":1,\"prompt\":\"a\",\"x\":[0.5,7],\"y\":null}");
    rec = BIN("\x82\xa6prompt\xa1" "a\xa1x\xd4\x01\x02");
    assert_int_equal(pd_request_decode(rec.p, rec.n, &a, &r, &e), PD_EFAIL);
    assert_non_null(strstr(e.msg, "x: extension"));
    pd_buf_free(&b);
    pd_buf_free(&j);
    pd_arena_free(&a);
}

/* Change one thing in the sample descriptor's JSON, put the sum right again, and decode. */
static void kv_refused(const char *find, const char *replace, const char *why)
{
    struct pd_kvdesc d = sample_kv(false), out;
    struct pd_buf b = { 0 }, j = { 0 }, m = { 0 };
    struct pd_arena a = { 0 };
    struct pd_err e = { 0 };
    assert_int_equal(pd_kvdesc_encode(&d, &b, &e), 0);
    assert_int_equal(pd_msgpack_to_json(b.p, b.n, &j, &e), 0);
    char *at = memmem(j.p, j.n, find, strlen(find));
    assert_non_null(at);
    struct pd_buf k = { 0 };
    pd_buf_add(&k, j.p, (size_t)(at - (char *)j.p), NULL);
    pd_buf_add(&k, replace, strlen(replace), NULL);
    pd_buf_add(&k, at + strlen(find), j.n - (size_t)(at - (char *)j.p) - strlen(find), NULL);
    if (pd_json_to_msgpack((char *)k.p, k.n, &m, &e))
        fail_msg("%s: %s", replace, e.msg);
    if (m.n > 14 && !memcmp(m.p + m.n - 14, "\xa3sum", 4))
        pd_put_be64(m.p + m.n - 8, pd_xxh3(m.p, m.n - 14, 0));
    int rc = pd_kvdesc_decode(m.p, m.n, &a, &out, &e);
    if (rc != PD_ECORRUPT || !strstr(e.msg, why))
        fail_msg("%s: not refused with '%s' but %d '%s'", replace, why, rc, e.msg);
    pd_buf_free(&b); pd_buf_free(&j); pd_buf_free(&k); pd_buf_free(&m);
    pd_arena_free(&a);
}

static void descriptors_that_lie(void **state)
{
    kv_refused("\"n_tokens\":6", "\"n_tokens\":7", "n_tokens differs");
    kv_refused("\"n_tokens\":6", "\"n_tokens\":-1", "n_tokens differs");
    kv_refused("\"n_tokens\":6,", "", "n_tokens");
    kv_refused("\"epoch\":3,", "", "epoch is missing");
    kv_refused("\"epoch\":3", "\"epoch\":null", "epoch");
    kv_refused("\"sha\":{\"$b64\":\"yuY2", "\"sha\":{\"$b64\":\"yuY3", "not the SHA-256");
    kv_refused("\"layers\":30,\"kv_heads\"", "\"layers\":4294967296,\"kv_heads\"", "kv: layout: layers");
    kv_refused("\"token_ids\":{\"$b64\":\"AQAAAMIB", "\"token_ids\":{\"$b64\":\"/////8IB", "token_ids[0] = -1");
    kv_refused("\"token_ids\":{", "\"token_ids\":1,\"x\":{", "token_ids must be bin");
    kv_refused("\"lease\":null", "\"lease\":7", "lease must be a map");
    kv_refused("\"scheme\":\"inline\"", "\"scheme\":\"\"", "scheme is empty");
    kv_refused("\"scheme\":\"inline\"", "\"scheme\":\"a scheme that is too long\"", "short string");
    kv_refused("\"first\":[", "\"first\":[{\"token\":-1,\"logprob\":0},", "first.token = -1");
    kv_refused("\"gen\":{\"$b64\":\"AQID", "\"gen\":{\"$b64\":\"", "gen must be bin of 16 bytes");
    kv_refused("\"temperature\":", "\"temperature\":\"x\",\"temperature2\":", "kv: request: temperature");
    kv_refused(",\"sum\":{", ",\"sun\":{", "no sum");
    kv_refused("\"v\":1", "\"v\":2", "v 2");
}

static void encoders_refuse_what_no_reader_could_take(void **state)
{
    struct pd_buf b = { 0 };
    struct pd_err e = { 0 };
    struct pd_token t = sample_token();
    pd_buf_add(&b, "keep", 4, NULL);
    t.logprob = NAN;
    assert_int_equal(pd_token_encode(&t, &b, &e), PD_EFAIL);
    assert_non_null(strstr(e.msg, "logprob is not a finite"));
    t = sample_token();
    t.text = STR("a\xff");
    assert_int_equal(pd_token_encode(&t, &b, &e), PD_EFAIL);
    assert_non_null(strstr(e.msg, "text: invalid UTF-8 at byte 1"));
    t = sample_token();
    t.run[0] = 0;
    assert_int_equal(pd_token_encode(&t, &b, &e), PD_EFAIL);
    assert_non_null(strstr(e.msg, "run is missing"));
    struct pd_request r = small_request();
    r.slo = BIN("\x81\xa1");       /* a raw value that is no value */
    assert_true(pd_request_encode(&r, &b, &e) < 0);
    r.slo = BIN("\x81\xa1" "a\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\xc0");
    assert_true(pd_request_encode(&r, &b, &e) < 0);
    assert_non_null(strstr(e.msg, "levels"));
    struct pd_kvdesc d = sample_kv(false);
    d.epoch = UINT64_MAX;
    assert_int_equal(pd_kvdesc_encode(&d, &b, &e), PD_EFAIL);
    d = sample_kv(false);
    d.fp_fields = (struct pd_bin){ 0 };
    assert_int_equal(pd_kvdesc_encode(&d, &b, &e), PD_EFAIL);
    assert_int_equal(b.n, 4);
    pd_buf_free(&b);
}

static void an_error_is_always_told(void **state)
{
    struct pd_buf b = { 0 };
    struct pd_arena a = { 0 };
    struct pd_err e = { 0 };
    struct pd_error_rec er = sample_error(), out;
    er.message = STR("a\xff" "b\xe2\x82");
    assert_int_equal(pd_error_encode(&er, &b, &e), 0);
    assert_int_equal(pd_error_decode(b.p, b.n, &a, &out, &e), 0);
    assert_true(pd_str_eq(out.message, "a\xef\xbf\xbd" "b\xef\xbf\xbd\xef\xbf\xbd"));
    pd_buf_free(&b);
    pd_arena_free(&a);
}

static void a_decoded_record_outlives_its_bytes(void **state)
{
    struct pd_buf b = { 0 }, again = { 0 };
    struct pd_arena a = { 0 };
    struct pd_kvdesc d, want = sample_kv(false);
    struct pd_err e;
    assert_int_equal(pd_kvdesc_encode(&want, &b, &e), 0);
    assert_int_equal(pd_kvdesc_decode(b.p, b.n, &a, &d, &e), 0);
    uint8_t *copy = malloc(b.n);
    memcpy(copy, b.p, b.n);
    memset(b.p, 0xee, b.n);
    assert_string_equal(d.request.run, RUN_A);
    assert_false(d.request.has_token_ids);      /* the record's own token_ids serve */
    assert_int_equal(d.token_ids[5], 338);
    assert_true(d.layout.layout_hash == want.layout.layout_hash);
    assert_int_equal(pd_kvdesc_encode(&d, &again, &e), 0);
    assert_int_equal(again.n, b.n);
    assert_memory_equal(again.p, copy, again.n);
    free(copy);
    pd_buf_free(&b);
    pd_buf_free(&again);
    pd_arena_free(&a);
}

static void a_request_within_has_no_tokens_of_its_own(void **state)
{
    struct pd_kvdesc d = sample_kv(true), out;
    struct pd_buf b = { 0 };
    struct pd_arena a = { 0 };
    struct pd_err e;
    d.request = (struct pd_request){ .token_ids = sample_ids, .n_token_ids = 6, .has_token_ids = true };
    assert_int_equal(pd_kvdesc_encode(&d, &b, &e), 0);
    assert_int_equal(pd_kvdesc_decode(b.p, b.n, &a, &out, &e), 0);
    assert_true(out.offer);
    assert_false(out.request.has_token_ids);
    assert_int_equal(out.n_tokens, 6);
    assert_null(out.first);
    assert_null(out.t.p);
    pd_buf_free(&b);
    pd_arena_free(&a);
}

static void a_chunk_points_into_its_record(void **state)
{
    struct pd_buf b = { 0 };
    struct pd_chunk c = sample_chunk(), out;
    struct pd_err e;
    assert_int_equal(pd_chunk_encode_head(&c, &b, &e), 0);
    assert_int_equal(pd_buf_add(&b, c.data.p, c.data.n, &e), 0);
    assert_int_equal(pd_chunk_decode(b.p, b.n, &out, &e), 0);
    assert_ptr_equal(out.data.p, b.p + b.n - c.data.n);
    assert_true(out.xxh3 == c.xxh3 && out.raw_len == 10 && out.index == 5);
    assert_int_equal(pd_chunk_decode(b.p, b.n - 1, &out, &e), PD_ECORRUPT);
    pd_buf_free(&b);
}

static void results_and_kinds(void **state)
{
    struct pd_arena a = { 0 };
    struct pd_result r;
    struct pd_err e;
    struct pd_buf b = { 0 };
    static const char *const json = "{\"pd\":\"result\",\"choice\":0,\"text\":\"\",\"tokens\":[1,2],\"logprobs\":[-1.0],\"prompt_tokens\":0,\"completion_tokens\":0,"
        "\"cached_tokens\":0,\"transferred_tokens\":0,\"recomputed_tokens\":0,\"finish_reason\":\"stop\"}";
    assert_int_equal(pd_json_to_msgpack(json, strlen(json), &b, &e), 0);
    assert_int_equal(pd_result_decode(b.p, b.n, &a, &r, &e), PD_ECORRUPT);
    assert_non_null(strstr(e.msg, "1 logprobs for 2 tokens"));
    pd_buf_free(&b);
    pd_arena_free(&a);
    assert_int_equal(pd_kind_of("\x80", 1), PD_K_REQUEST);
    assert_int_equal(pd_kind_of("\x81\xa2pd\xa4lamp", 9), PD_K_UNKNOWN);
    assert_int_equal(pd_kind_of("\x81\xa2pd\x07", 5), PD_K_UNKNOWN);
    assert_int_equal(pd_kind_of("\x81\xa2pd\xa7unknown", 12), PD_K_UNKNOWN);
    for (int k = PD_K_REQUEST; k <= PD_K_ROUTE; k++) {
        struct pd_buf m = { 0 };
        pd_buf_printf(&m, NULL, "\x81\xa2pd%c%s", 0xa0 + (int)strlen(pd_kind_name(k)), pd_kind_name(k));
        assert_int_equal(pd_kind_of(m.p, m.n), k);
        pd_buf_free(&m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_requests_are_told_by_field), cmocka_unit_test(defaults_are_filled), cmocka_unit_test(forms_that_people_use),
        cmocka_unit_test(unknown_fields_are_carried), cmocka_unit_test(descriptors_that_lie), cmocka_unit_test(encoders_refuse_what_no_reader_could_take),
        cmocka_unit_test(an_error_is_always_told), cmocka_unit_test(a_decoded_record_outlives_its_bytes), cmocka_unit_test(a_request_within_has_no_tokens_of_its_own),
        cmocka_unit_test(a_chunk_points_into_its_record), cmocka_unit_test(results_and_kinds) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
