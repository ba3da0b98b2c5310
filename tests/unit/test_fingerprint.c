/* kv/fingerprint: of a real (tiny) model; comparing; hostile maps. */
#include "kv_fixture.h"

static struct pd_bin bin(const msgpack_sbuffer *b) { return (struct pd_bin){ (const uint8_t *)b->data, b->size }; }
static struct pd_bin map_of(const struct pd_fp *f) { return (struct pd_bin){ f->map.p, f->map.n }; }

static void a_difference_is_named_with_both_values(void **state)
{
    msgpack_sbuffer a, b, c;
    struct pd_err e = { 0 };
    fix_fp(&a, "rope_theta", 10000, "pd 0.1");
    fix_fp(&b, "rope_theta", 500000, "pd 0.1");
    fix_fp(&c, "rope_thetb", 10000, "pd 0.2");
    assert_int_equal(pd_fp_compare(bin(&a), bin(&a), &e), PD_FP_SAME);
    assert_int_equal(pd_fp_compare(bin(&a), bin(&b), &e), PD_FP_DIFFERS);
    assert_string_equal(e.msg, "rope_theta differs (prefill 10000, decode 500000)");
    assert_int_equal(e.code, PD_EINCOMPAT);
    assert_int_equal(pd_fp_compare(bin(&a), bin(&c), &e), PD_FP_DIFFERS);
    assert_string_equal(e.msg, "rope_theta differs (prefill 10000, decode has none)");
    msgpack_sbuffer_destroy(&a);
    msgpack_sbuffer_destroy(&b);
    msgpack_sbuffer_destroy(&c);
}

static void a_field_more_on_either_side_differs(void **state)
{
    msgpack_sbuffer a, b;
    msgpack_packer k;
    struct pd_err e = { 0 };
    fix_fp(&a, "rope_theta", 1, "x");
    msgpack_sbuffer_init(&b);
    msgpack_sbuffer_write(&b, a.data, a.size);
    b.data[0]++;                /* fixmap of one pair more */
    msgpack_packer_init(&k, &b, msgpack_sbuffer_write);
    fix_pack_str(&k, "slice");
    msgpack_pack_true(&k);
    assert_int_equal(pd_fp_compare(bin(&a), bin(&b), &e), PD_FP_DIFFERS);
    assert_string_equal(e.msg, "slice differs (prefill has none, decode true)");
    assert_int_equal(pd_fp_compare(bin(&b), bin(&a), &e), PD_FP_DIFFERS);
    assert_string_equal(e.msg, "slice differs (prefill true, decode has none)");
    msgpack_sbuffer_destroy(&a);
    msgpack_sbuffer_destroy(&b);
}

static void advisory_fields_only_advise(void **state)
{
    msgpack_sbuffer a, b, c;
    struct pd_err e = { 0 };
    fix_fp(&a, "rope_theta", 1, "pd 0.1");
    fix_fp(&b, "rope_theta", 1, "pd 0.2");
    fix_fp(&c, "rope_theta", 2, "pd 0.2");
    assert_int_equal(pd_fp_compare(bin(&a), bin(&b), &e), PD_FP_ADVISORY);
    assert_string_equal(e.msg, "software differs (prefill pd 0.1, decode pd 0.2)");
    assert_int_equal(pd_fp_compare(bin(&a), bin(&c), &e), PD_FP_DIFFERS);     /* a must-field wins, wherever it stands */
    assert_non_null(strstr(e.msg, "rope_theta"));
    msgpack_sbuffer_destroy(&a);
    msgpack_sbuffer_destroy(&b);
    msgpack_sbuffer_destroy(&c);
}

static void digests_are_short_and_text_is_tame(void **state)
{
    msgpack_sbuffer a, b;
    msgpack_packer k;
    struct pd_err e = { 0 };
    char nasty[300];
    memset(nasty, 'x', sizeof nasty);
    memcpy(nasty, "\x1b[2J\n\x80", 6);
    for (int i = 0; i < 2; i++) {
        msgpack_sbuffer *s = i ? &b : &a;
        msgpack_sbuffer_init(s);
        msgpack_packer_init(&k, s, msgpack_sbuffer_write);
        msgpack_pack_map(&k, 1);
        if (i)
            msgpack_pack_str_with_body(&k, "q", 1);
        else
            msgpack_pack_str_with_body(&k, nasty, 100);
        msgpack_pack_bin_with_body(&k, "\xab\xcd\xef\x01\x23\x45\x67\x89", 8);
    }
    assert_int_equal(pd_fp_compare(bin(&a), bin(&b), &e), PD_FP_DIFFERS);
    assert_non_null(strstr(e.msg, "abcdef012345,"));
    for (const char *p = e.msg; *p; p++)
        assert_true(*p >= 0x20 && *p < 0x7f);
    msgpack_sbuffer_destroy(&a);
    msgpack_sbuffer_destroy(&b);
}

static void malformed_maps_differ(void **state)
{
    msgpack_sbuffer a;
    struct pd_err e = { 0 };
    fix_fp(&a, "rope_theta", 1, "x");
    static const struct { const char *p; size_t n; } bad[] = {
        { "", 0 }, { "\x80", 1 }, { "\xc0", 1 }, { "\x81\x01\x01", 3 }, { "\x82\xa1q\x01\xa1q\x02", 7 }, { "\xdf\xff\xff\xff\xff", 5 },
        { "\x81\xa1q\xdd\xff\xff\xff\xff", 8 }, { "\x81\xa1q\xc6\xff\xff\xff\xff", 8 }, { "\x81\xa1q\x01\x00", 5 },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct pd_bin x = { (const uint8_t *)bad[i].p, bad[i].n };
        assert_int_equal(pd_fp_compare(x, bin(&a), &e), PD_FP_DIFFERS);
        assert_non_null(strstr(e.msg, "prefill fingerprint"));
        assert_int_equal(pd_fp_compare(bin(&a), x, &e), PD_FP_DIFFERS);
        assert_int_equal(pd_fp_compare(x, x, &e), PD_FP_DIFFERS);       /* two broken maps are not the same either */
    }
    for (size_t n = 0; n < a.size; n++) {
        struct pd_bin cut = { (const uint8_t *)a.data, n };
        assert_int_equal(pd_fp_compare(cut, bin(&a), &e), PD_FP_DIFFERS);
    }
    msgpack_sbuffer_destroy(&a);
}

static struct pd_model *open_tiny(const char *path)
{
    struct pd_model *m = NULL;
    struct pd_err e = { 0 };
    if (pd_model_open(path, &(struct pd_model_opts){ .no_weights = true }, &m, &e))
        fail_msg("%s", e.msg);
    return m;
}

static const struct pd_fp_params params = { .kv_dtype = PD_F16, .block_size = 16, .numerics = "f32", .software = "pd 0.1" };

static void a_model_has_one_fingerprint(void **state)
{
    struct pd_model *m = open_tiny("testdata/tiny/llama-f32.gguf"), *o = open_tiny("testdata/tiny/llama-linear.gguf");
    struct pd_fp a, b, c;
    struct pd_err e = { 0 };
    uint64_t seed = 0;
    uint8_t sha[PD_SHA_LEN];
    assert_int_equal(pd_fp_make(m, &params, &a, &e), 0);
    assert_int_equal(pd_fp_make(m, &params, &b, &e), 0);
    assert_int_equal(a.map.n, b.map.n);
    assert_memory_equal(a.map.p, b.map.p, a.map.n);
    assert_int_equal(pd_sha256(a.map.p, a.map.n, sha, &e), 0);
    assert_memory_equal(sha, a.sha, sizeof sha);
    assert_int_equal(pd_fp_must_seed(map_of(&a), &seed, &e), 0);        /* what a consumer derives is what the producer used */
    assert_true(seed == a.must_seed);
    assert_int_equal(pd_fp_make(o, &params, &c, &e), 0);
    assert_int_equal(pd_fp_compare(map_of(&a), map_of(&c), &e), PD_FP_DIFFERS);
    pd_fp_free(&a);
    pd_fp_free(&b);
    pd_fp_free(&c);
    pd_model_free(m);
    pd_model_free(o);
}

static void what_matters_is_in_it(void **state)
{
    struct pd_model *m = open_tiny("testdata/tiny/llama-llama3.gguf");
    struct pd_fp a, b;
    struct pd_err e = { 0 };
    assert_int_equal(pd_fp_make(m, &params, &a, &e), 0);
#define DIFFERS(text) do { \
        assert_int_equal(pd_fp_make(m, &p, &b, &e), 0); \
        assert_int_equal(pd_fp_compare(map_of(&a), map_of(&b), &e), PD_FP_DIFFERS); \
        if (strncmp(e.msg, text, strlen(text))) fail_msg("'%s' does not begin with '%s'", e.msg, text); \
        assert_true(a.must_seed != b.must_seed); \
        pd_fp_free(&b); \
    } while (0)
    struct pd_fp_params p = params;
    p.kv_dtype = PD_F32;
    DIFFERS("kv_dtype differs (prefill f16, decode f32)");
    p = params;
    p.block_size = 32;
    DIFFERS("block_size differs (prefill 16, decode 32)");
    p = params;
#define CHANGE(field, value, text) do { __typeof__(m->field) old = m->field; m->field = value; DIFFERS(text); m->field = old; } while (0)
    CHANGE(cfg.rope.theta, 123.5, "rope_theta differs (prefill 10000, decode 123.5)");
    CHANGE(cfg.rope.pairs, !old, "rope_basis differs (prefill pairs, decode halves)");
    CHANGE(cfg.rope.scaling, PD_ROPE_LINEAR, "rope_type differs (prefill llama3, decode linear)");
    CHANGE(cfg.rope.factor, old + 2, "rope_factor differs");
    CHANGE(cfg.rope.original_ctx, old + 1, "rope_original_ctx differs");
    CHANGE(cfg.n_layers, old + 1, "layers differs");
    CHANGE(cfg.n_heads, old + 1, "heads differs");
    CHANGE(cfg.n_kv_heads, old + 1, "kv_heads differs");
    CHANGE(cfg.head_dim, old + 1, "head_dim differs");
    CHANGE(cfg.n_embd, old + 1, "hidden differs");
    CHANGE(cfg.n_ff, old + 1, "ff differs");
    CHANGE(cfg.n_vocab, old + 1, "vocab differs");
    CHANGE(digest[31], (uint8_t)(old ^ 1), "weights_digest differs");
    CHANGE(quant[0], '~', "weight_quant differs");
    CHANGE(chat.digest[0], (uint8_t)(old ^ 1), "chat_digest differs");
    int ctx = m->cfg.n_ctx;
    m->cfg.n_ctx = ctx * 2;     /* how long a context may be does not change what its KV means */
    assert_int_equal(pd_fp_make(m, &p, &b, &e), 0);
    assert_int_equal(pd_fp_compare(map_of(&a), map_of(&b), &e), PD_FP_SAME);
    pd_fp_free(&b);
    m->cfg.n_ctx = ctx;
    p.numerics = "u8";
    p.software = "pd 9";
    assert_int_equal(pd_fp_make(m, &p, &b, &e), 0);
    assert_int_equal(pd_fp_compare(map_of(&a), map_of(&b), &e), PD_FP_ADVISORY);
    assert_string_equal(e.msg, "numerics differs (prefill f32, decode u8); software differs (prefill pd 0.1, decode pd 9)");
    assert_true(a.must_seed == b.must_seed);    /* and their blocks are found under the same hashes */
    pd_fp_free(&b);
    p = params;
    p.kv_dtype = PD_Q8_0;
    FAILS_WITH(pd_fp_make(m, &p, &b, &e), PD_EUSAGE, "KV dtype");
    memset(m->digest, 0, sizeof m->digest);
    FAILS_WITH(pd_fp_make(m, &params, &b, &e), PD_EFAIL, "digest");
    pd_fp_free(&a);
    pd_model_free(m);
}

/* The bytes of the map are a contract: peers compare them and derive block hashes from them. The digests are set aside, so that only its form and the
 * model's shape count. */
static void its_bytes_do_not_change(void **state)
{
    static const struct { const char *model, *sha; } t[] = {
        { "testdata/tiny/llama-f32.gguf", "bdf98c125f742aa80be8988838ccf7fdd7af0f98ef04b4722203875d3e438db2" },
        { "testdata/tiny/llama-llama3.gguf", "8732171598d5978b6c245e2f6d56d9edc4d4c318b33c160fe4c502b2dd2e016e" },
    };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        struct pd_model *m = open_tiny(t[i].model);
        struct pd_tokenizer *tok = m->tok;
        struct pd_err e = { 0 };
        struct pd_fp fp;
        char hex[2 * PD_SHA_LEN + 1];
        memset(m->digest, 7, sizeof m->digest);
        memset(m->chat.digest, 8, sizeof m->chat.digest);
        m->tok = NULL;
        assert_int_equal(pd_fp_make(m, &params, &fp, &e), 0);
        m->tok = tok;
        pd_hex(fp.sha, PD_SHA_LEN, hex);
        assert_string_equal(hex, t[i].sha);
        pd_fp_free(&fp);
        pd_model_free(m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_difference_is_named_with_both_values), cmocka_unit_test(a_field_more_on_either_side_differs),
        cmocka_unit_test(advisory_fields_only_advise), cmocka_unit_test(digests_are_short_and_text_is_tame), cmocka_unit_test(malformed_maps_differ),
        cmocka_unit_test(a_model_has_one_fingerprint), cmocka_unit_test(what_matters_is_in_it), cmocka_unit_test(its_bytes_do_not_change),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
