/* The small kernels between products: normalisation, rotation, activation, KV rounding, and what the sampler needs. */
#include <math.h>
#include "kern.h"

void K(rmsnorm)(float *out, const float *x, const float *w, int n, float eps)
{
    vf acc = vf_set1(0);
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        vf v = vf_load(x + i);
        acc = vf_fma(v, v, acc);
    }
    if (i < n) {
        vf v = vf_loadn(x + i, n - i, 0);
        acc = vf_fma(v, v, acc);
    }
    vf scale = vf_set1(1.0f / sqrtf(vf_sum(acc) / (float)n + eps));
    for (i = 0; i + 16 <= n; i += 16)
        vf_store(out + i, vf_mul(vf_mul(vf_load(x + i), scale), vf_load(w + i)));
    if (i < n)
        vf_storen(out + i, vf_mul(vf_mul(vf_loadn(x + i, n - i, 0), scale), vf_loadn(w + i, n - i, 0)), n - i);
}

INL void turn(float *a, float *b, float c, float s)
{
    float x = *a, y = *b;
    *a = __builtin_fmaf(x, c, -(y * s));
    *b = __builtin_fmaf(x, s, y * c);
}

void K(rope)(float *x, int n_heads, int head_dim, int n_rot, const float *cs, int pairs)
{
    int h2 = n_rot / 2;
    for (int h = 0; h < n_heads; h++, x += head_dim) {
        if (pairs)
            for (int i = 0; i < h2; i++)
                turn(x + 2 * i, x + 2 * i + 1, cs[2 * i], cs[2 * i + 1]);
        else
            for (int i = 0; i < h2; i++)
                turn(x + i, x + h2 + i, cs[2 * i], cs[2 * i + 1]);
    }
}

INL vf silu(vf g, vf u)
{
    vf e = vf_exp(vf_sub(vf_set1(0), g));
    return vf_mul(vf_div(g, vf_add(vf_set1(1.0f), e)), u);
}

void K(silu_mul)(float *out, const float *gate, const float *up, int n)
{
    int i = 0;
    for (; i + 16 <= n; i += 16)
        vf_store(out + i, silu(vf_load(gate + i), vf_load(up + i)));
    if (i < n)
        vf_storen(out + i, silu(vf_loadn(gate + i, n - i, 0), vf_loadn(up + i, n - i, 0)), n - i);
}

void K(add)(float *x, const float *y, int n)
{
    for (int i = 0; i < n; i++)
        x[i] += y[i];
}

void K(kv_write)(void *dst, enum pd_dtype t, const float *x, int n)
{
    if (t == PD_F32) {
        memcpy(dst, x, (size_t)n * 4);
    } else if (t == PD_BF16) {
        uint16_t *d = dst;
        for (int i = 0; i < n; i++)
            d[i] = float_to_bf16(x[i]);
    } else {
        uint16_t *d = dst;
        int i = 0;
        for (; i + 16 <= n; i += 16)
            vf_store_half(d + i, vf_load(x + i));
        for (; i < n; i++)
            d[i] = float_to_half(x[i]);
    }
}

void K(exp_sub)(float *out, const float *x, int n, float max, float *sum)
{
    vf m = vf_set1(max), acc = vf_set1(0);
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        vf e = vf_exp(vf_sub(vf_load(x + i), m));
        vf_store(out + i, e);
        acc = vf_add(acc, e);
    }
    if (i < n) {
        vf e = vf_keepn(vf_exp(vf_sub(vf_loadn(x + i, n - i, 0), m)), n - i, 0);
        vf_storen(out + i, e, n - i);
        acc = vf_add(acc, e);
    }
    *sum = vf_sum(acc);
}

float K(max)(const float *x, int n)
{
    vf m = vf_set1(-INFINITY);
    int i = 0;
    for (; i + 16 <= n; i += 16)
        m = vf_max(vf_load(x + i), m);
    if (i < n)
        m = vf_max(vf_loadn(x + i, n - i, -INFINITY), m);
    return vf_maxlane(m);
}
