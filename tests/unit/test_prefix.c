/* kv/prefix: the chain of block hashes. */
#include "kv_fixture.h"

static const struct pd_str none = { NULL, 0 };

static void hashes_are_chained(void **state)
{
    int32_t a[64], b[64];
    uint8_t x[4][16], y[4][16];
    for (int i = 0; i < 64; i++)
        a[i] = b[i] = i * 3;
    pd_block_hashes(7, a, 64, 16, none, none, x);
    pd_block_hashes(7, a, 64, 16, none, none, y);
    assert_memory_equal(x, y, sizeof x);
    b[17]++;                    /* in block 1: block 0 stays, all later ones change */
    pd_block_hashes(7, b, 64, 16, none, none, y);
    assert_memory_equal(x[0], y[0], 16);
    for (int i = 1; i < 4; i++)
        assert_memory_not_equal(x[i], y[i], 16);
    /* the same tokens after another parent are another block */
    memcpy(b, a + 16, 32 * sizeof *b);
    pd_block_hashes(7, b, 32, 16, none, none, y);
    assert_memory_not_equal(x[1], y[0], 16);
}

static void only_full_blocks(void **state)
{
    int32_t a[40] = { 0 };
    uint8_t x[3][16], y[3][16];
    memset(x, 0xee, sizeof x);
    pd_block_hashes(7, a, 39, 16, none, none, x);
    pd_block_hashes(7, a, 32, 16, none, none, y);
    assert_memory_equal(x, y, 32);
    for (int i = 0; i < 16; i++)
        assert_int_equal(x[2][i], 0xee);
    pd_block_hashes(7, a, 15, 16, none, none, x);       /* none at all */
    assert_memory_equal(x, y, 32);
}

static void everything_counts(void **state)
{
    int32_t a[16] = { 5 };
    uint8_t h[6][16];
    struct pd_str ab = { "ab", 2 }, a1 = { "a", 1 }, c = { "c", 1 }, bc = { "bc", 2 };
    pd_block_hashes(7, a, 16, 16, none, none, &h[0]);
    pd_block_hashes(8, a, 16, 16, none, none, &h[1]);           /* other must-fields */
    pd_block_hashes(7, a, 16, 16, ab, c, &h[2]);
    pd_block_hashes(7, a, 16, 16, a1, bc, &h[3]);               /* the same letters, otherwise divided */
    pd_block_hashes(7, a, 16, 16, none, ab, &h[4]);
    pd_block_hashes(7, a, 16, 16, ab, none, &h[5]);
    for (int i = 0; i < 6; i++)
        for (int k = 0; k < i; k++)
            assert_memory_not_equal(h[i], h[k], 16);
}

/* The definition, byte by byte: parent, block size, ids, three lengths; little-endian. The digest was computed by another program. */
static void the_definition_is_fixed(void **state)
{
    int32_t a[2] = { 1, -2 };
    uint8_t h[1][16];
    char hex[33];
    pd_block_hashes(42, a, 2, 2, none, (struct pd_str){ "s", 1 }, h);
    pd_hex(h[0], 16, hex);
    assert_string_equal(hex, "e837667495fb39d2d46a2d1c93e70fd9");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hashes_are_chained), cmocka_unit_test(only_full_blocks), cmocka_unit_test(everything_counts), cmocka_unit_test(the_definition_is_fixed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
