#include "fit.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "../base/mem.h"

/* Normal equations of the coefficients in `use`, by Gauss with pivots; false: they do not tell these apart. */
static bool solve(int k, double a[PD_FIT_MOST][PD_FIT_MOST], const double *b, unsigned use, double *theta)
{
    double m[PD_FIT_MOST][PD_FIT_MOST + 1];
    int of[PD_FIT_MOST], n = 0;
    for (int i = 0; i < k; i++)
        if (use >> i & 1)
            of[n++] = i;
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < n; j++)
            m[i][j] = a[of[i]][of[j]];
        m[i][n] = b[of[i]];
    }
    for (int c = 0; c < n; c++) {
        int top = c;
        for (int r = c + 1; r < n; r++)
            top = fabs(m[r][c]) > fabs(m[top][c]) ? r : top;
        if (!(fabs(m[top][c]) > 1e-12))
            return false;
        for (int j = 0; j <= n; j++) {
            double t = m[c][j];
            m[c][j] = m[top][j];
            m[top][j] = t;
        }
        for (int r = 0; r < n; r++)
            for (int j = n; r != c && j >= c; j--)
                m[r][j] -= m[r][c] / m[c][c] * m[c][j];
    }
    memset(theta, 0, PD_FIT_MOST * sizeof *theta);
    for (int i = 0; i < n; i++)
        theta[of[i]] = m[i][n] / m[i][i];
    return true;
}

static double dot(int k, const double *x, const double *theta)
{
    double y = 0;
    for (int i = 0; i < k; i++)
        y += x[i] * theta[i];
    return y;
}

static int by_value(const void *a, const void *b) { return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b); }

static int judge(int k, uint32_t n, const double *x, const double *y, const double *theta, double *worst, double *p95, struct pd_err *e)
{
    double *r = pd_calloc(n, sizeof *r, "fit", e);
    if (!r)
        return PD_ENOMEM;
    for (uint32_t i = 0; i < n; i++)
        r[i] = y[i] / fmax(dot(k, x + (size_t)i * (size_t)k, theta), 1e-9);
    qsort(r, n, sizeof *r, by_value);
    if (worst)
        *worst = fmax(fabs(r[0] - 1), fabs(r[n - 1] - 1));
    if (p95)
        *p95 = r[(uint32_t)ceil(0.95 * n) - 1];
    pd_free(r);
    return 0;
}

int pd_fit_rows(int k, uint32_t n, const double *x, const double *y, double theta[PD_FIT_MOST], double *worst, double *p95, struct pd_err *e)
{
    double a[PD_FIT_MOST][PD_FIT_MOST] = { { 0 } }, b[PD_FIT_MOST] = { 0 }, scale[PD_FIT_MOST] = { 0 }, best = INFINITY;
    if (k < 1 || k > PD_FIT_MOST || n < 1)
        return pd_fail(e, PD_EFAIL, "fit: %u rows of %d quantities (1 row or more, 1 to %d quantities)", n, k, PD_FIT_MOST);
    for (uint32_t i = 0; i < n; i++)
        for (int j = 0; j < k; j++) {
            double v = x[(size_t)i * (size_t)k + (size_t)j];
            if (!isfinite(v) || v < 0 || !isfinite(y[i]) || y[i] <= 0)
                return pd_fail(e, PD_EFAIL, "fit: row %u: %g costs %g: no cost of something", i + 1, v, y[i]);
            scale[j] = fmax(scale[j], v / y[i]);
        }
    for (int j = 0; j < k; j++)
        scale[j] = scale[j] > 0 ? scale[j] : 1;
    for (uint32_t i = 0; i < n; i++)        /* each quantity of about 1, so that a square of a thousand tokens does not drown the one */
        for (int r = 0; r < k; r++) {
            double u = x[(size_t)i * (size_t)k + (size_t)r] / y[i] / scale[r];
            b[r] += u / n;
            for (int c = 0; c < k; c++)
                a[r][c] += u * x[(size_t)i * (size_t)k + (size_t)c] / y[i] / scale[c] / n;
        }
    for (unsigned use = 1; use < 1u << k; use++) {
        double t[PD_FIT_MOST], sum = 0;
        if (!solve(k, a, b, use, t))
            continue;
        for (int j = 0; j < k; j++)
            sum = t[j] < 0 ? INFINITY : sum, t[j] /= scale[j];
        for (uint32_t i = 0; i < n && sum < best; i++) {
            double d = dot(k, x + (size_t)i * (size_t)k, t) / y[i] - 1;
            sum += d * d;
        }
        if (sum < best) {
            best = sum;
            memcpy(theta, t, sizeof t);
        }
    }
    if (!isfinite(best))
        return pd_fail(e, PD_EFAIL, "fit: no coefficients fit the %u rows", n);
    return worst || p95 ? judge(k, n, x, y, theta, worst, p95, e) : 0;
}
