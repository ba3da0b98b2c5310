/* Bytes put in another order, never changed: planes of 16-bit numbers, rows of KV. */
#include "kern.h"

/* Both halves of bf16 and f16 turned left by one bit: the upper byte holds the exponent (of f16 with the mantissa's top three bits), which is far from even;
 * the lower one mantissa and sign, which are noise. Plain loops: the compiler makes the vector ones of each build. */
void K(split16)(uint8_t *restrict hi, uint8_t *restrict lo, const uint16_t *restrict x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t r = (uint16_t)(x[i] << 1 | x[i] >> 15);
        hi[i] = (uint8_t)(r >> 8);
        lo[i] = (uint8_t)r;
    }
}

void K(merge16)(uint16_t *restrict x, const uint8_t *restrict hi, const uint8_t *restrict lo, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t r = (uint16_t)(hi[i] << 8 | lo[i]);
        x[i] = (uint16_t)(r >> 1 | r << 15);
    }
}

INL void row_of(uint8_t *d, const uint8_t *s, size_t row)
{
    for (size_t k = 0; k < row; k += 64)
        vb_store(d + k, vb_load(s + k));
}

void K(rows)(void *dst, size_t dst_step, const void *src, size_t src_step, size_t row, size_t n)
{
    uint8_t *d = dst;
    const uint8_t *s = src;
    if (dst_step == row && src_step == row)
        memcpy(d, s, row * n);
    else if (row == 128)
        for (; n; n--, d += dst_step, s += src_step)
            row_of(d, s, 128);
    else if (row == 256)
        for (; n; n--, d += dst_step, s += src_step)
            row_of(d, s, 256);
    else if (row % 64 == 0)
        for (; n; n--, d += dst_step, s += src_step)
            row_of(d, s, row);
    else
        for (; n; n--, d += dst_step, s += src_step)
            memcpy(d, s, row);
}
