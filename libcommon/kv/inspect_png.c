#include <fcntl.h>
#include <math.h>
#include <png.h>
#include <setjmp.h>
#include <unistd.h>
#include "../wire/endpoint.h"
#include "inspect.h"

#define MAX_COLUMNS 2048        /* more tokens share columns */
#define GAP 4                   /* pixels between the K and the V panel */

/* rms of each (K or V, layer, column): [2][layers][columns]; NaN or infinity in a cell makes it NaN. */
struct grid { uint32_t layers, columns; double *rms, lo[2], hi[2]; };

static int measure(const struct pd_kv_run *r, struct grid *g, struct pd_err *e)
{
    const struct pd_kv_layout *y = &r->d.layout;
    uint32_t n = r->d.n_tokens;
    g->layers = y->layers;
    g->columns = n < MAX_COLUMNS ? n : MAX_COLUMNS;
    float *row = pd_calloc(y->head_dim, sizeof *row, "a row", e);
    g->rms = pd_calloc((size_t)2 * g->layers * g->columns, sizeof *g->rms, "the picture's numbers", e);
    if (!row || !g->rms) {
        pd_free(row);
        return PD_ENOMEM;
    }
    for (int v = 0; v < 2; v++) {
        g->lo[v] = INFINITY;
        g->hi[v] = -INFINITY;
        for (uint32_t l = 0; l < g->layers; l++)
            for (uint32_t c = 0; c < g->columns; c++) {
                uint32_t t0 = (uint32_t)((uint64_t)c * n / g->columns), t1 = (uint32_t)((uint64_t)(c + 1) * n / g->columns);
                double sum = 0;
                for (uint32_t t = t0; t < t1; t++)
                    for (uint32_t h = 0; h < y->kv_heads; h++) {
                        pd_kv_row(r, l, v, t, h, row);
                        for (uint32_t i = 0; i < y->head_dim; i++)
                            sum += (double)row[i] * row[i];
                    }
                double rms = sqrt(sum / ((double)(t1 - t0) * y->kv_heads * y->head_dim));
                g->rms[((size_t)v * g->layers + l) * g->columns + c] = isfinite(rms) ? rms : NAN;
                if (isfinite(rms) && rms > 0) {
                    g->lo[v] = fmin(g->lo[v], rms);
                    g->hi[v] = fmax(g->hi[v], rms);
                }
            }
    }
    pd_free(row);
    return 0;
}

/* Dark blue (small) over teal to yellow (large), on a logarithmic scale within the panel; not a number is magenta. */
static void colour(double rms, double lo, double hi, uint8_t rgb[3])
{
    static const double stop[5][3] = { { 20, 20, 70 }, { 40, 80, 150 }, { 30, 150, 140 }, { 140, 200, 80 }, { 250, 230, 50 } };
    if (isnan(rms)) {
        rgb[0] = rgb[2] = 255;
        rgb[1] = 0;
        return;
    }
    double x = rms <= 0 || !(hi > lo) ? 0 : (log(rms) - log(lo)) / (log(hi) - log(lo)) * 4;
    x = x < 0 ? 0 : x > 4 ? 4 : x;
    int i = x >= 4 ? 3 : (int)x;
    for (int k = 0; k < 3; k++)
        rgb[k] = (uint8_t)lrint(stop[i][k] + (stop[i + 1][k] - stop[i][k]) * (x - i));
}

static uint32_t cell_size(uint32_t n, uint32_t want)
{
    uint32_t s = n ? want / n : 1;
    return s < 1 ? 1 : s > 16 ? 16 : s;
}

static void paint_row(const struct grid *g, int v, uint32_t layer, uint32_t w, uint8_t *line)
{
    for (uint32_t c = 0; c < g->columns; c++) {
        uint8_t rgb[3];
        colour(g->rms[((size_t)v * g->layers + layer) * g->columns + c], g->lo[v], g->hi[v], rgb);
        for (uint32_t x = 0; x < w; x++)
            memcpy(line + ((size_t)c * w + x) * 3, rgb, 3);
    }
}

struct png_fail { jmp_buf back; char msg[120]; };

static void on_error(png_structp p, png_const_charp msg)
{
    struct png_fail *f = png_get_error_ptr(p);
    snprintf(f->msg, sizeof f->msg, "%s", msg);
    longjmp(f->back, 1);
}

static void on_warning(png_structp p, png_const_charp msg) { (void)p; (void)msg; }

struct look { const struct grid *g; const char *title, *scale; uint32_t w, h /* of a cell */; uint8_t *line; };

/* K above, V below, a row of cells a layer (layer 0 on top), a column of cells a token. */
static void paint(png_structp png, png_infop info, const struct look *k)
{
    uint32_t panel = k->g->layers * k->h, width = k->g->columns * k->w;
    png_set_IHDR(png, info, width, panel * 2 + GAP, 8, PNG_COLOR_TYPE_RGB, PNG_INTERLACE_NONE, PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
    png_text text[2] = { { .compression = PNG_TEXT_COMPRESSION_NONE, .key = (png_charp)"Title", .text = (png_charp)(uintptr_t)k->title },
                         { .compression = PNG_TEXT_COMPRESSION_NONE, .key = (png_charp)"Description", .text = (png_charp)(uintptr_t)k->scale } };
    png_set_text(png, info, text, 2);
    png_write_info(png, info);
    for (uint32_t y = 0; y < panel * 2 + GAP; y++) {
        if (y < panel)
            paint_row(k->g, 0, y / k->h, k->w, k->line);
        else if (y < panel + GAP)
            memset(k->line, 255, (size_t)width * 3);
        else
            paint_row(k->g, 1, (y - panel - GAP) / k->h, k->w, k->line);
        png_write_row(png, k->line);
    }
    png_write_end(png, info);
}

static int write_png(FILE *f, const struct look *k, struct pd_err *e)
{
    struct png_fail fail;
    png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, &fail, on_error, on_warning);
    png_infop info = png ? png_create_info_struct(png) : NULL;
    if (!info) {
        png_destroy_write_struct(&png, NULL);
        return pd_fail(e, PD_ENOMEM, "libpng: out of memory");
    }
    if (setjmp(fail.back)) {
        png_destroy_write_struct(&png, &info);
        return pd_fail(e, PD_EFAIL, "libpng: %s", fail.msg);
    }
    png_init_io(png, f);
    paint(png, info, k);
    png_destroy_write_struct(&png, &info);
    return 0;
}

struct picture { const struct pd_kv_opts *o; const char *to; uint32_t runs; };

static int count_run(void *ctx, struct pd_kv_run *r, struct pd_err *e)
{
    ((struct picture *)ctx)->runs++;
    return 0;
}

static int png_run(void *ctx, struct pd_kv_run *r, struct pd_err *e)
{
    struct picture *p = ctx;
    struct pd_endpoint ep = { .fd = -1 };
    struct grid g = { 0 };
    char title[128], scale[160];
    int rc = measure(r, &g, e);
    if (!rc)
        rc = pd_endpoint_open_out(p->to, NULL, &ep, e);
    if (!rc) {
        snprintf(title, sizeof title, "KV of run %s: rms by token (across) and layer (down), K above V", r->d.run);
        snprintf(scale, sizeof scale, "K from %.6g to %.6g, V from %.6g to %.6g, logarithmic", g.lo[0], g.hi[0], g.lo[1], g.hi[1]);
        struct look k = { &g, title, scale, cell_size(g.columns, 768), cell_size(g.layers, 256), NULL };
        int fd = fcntl(ep.fd, F_DUPFD_CLOEXEC, 3);
        FILE *f = fd < 0 ? NULL : fdopen(fd, "wb");
        if (!f)
            rc = pd_fail_sys(e, "%s", p->to);
        else
            rc = (k.line = pd_calloc((size_t)g.columns * k.w, 3, "a line of the picture", e)) ? write_png(f, &k, e) : PD_ENOMEM;
        pd_free(k.line);
        if (f && fclose(f) && !rc)
            rc = pd_fail_sys(e, "%s", p->to);
        if (!f && fd >= 0)
            close(fd);
        if (!rc)
            rc = pd_endpoint_commit(&ep, e);
        else
            pd_endpoint_abort(&ep);
    }
    if (!rc && !p->o->quiet && strcmp(p->to, "-"))
        fprintf(p->o->out, "%s: run %s, %u layers, %u columns for %u tokens; %s\n", p->to, r->d.run, g.layers, g.columns, r->d.n_tokens, scale);
    pd_free(g.rms);
    return rc;
}

int pd_kv_png(const char *path, const char *to, const struct pd_kv_opts *o, struct pd_err *e)
{
    struct picture p = { .o = o, .to = to };
    int rc = pd_kv_each_run(path, -1, &(struct pd_kv_walk){ .mode = PD_DUMP_HEAD, .run = o->run, .run_fn = count_run, .ctx = &p }, e);
    if (!rc && p.runs != 1)
        rc = p.runs ? pd_fail(e, PD_EUSAGE, "%s: holds %u runs; choose one with --run (pd-trace kv ls)", path, p.runs) : pd_fail(e, PD_EFAIL, "%s: holds no run", path);
    return rc ? rc : pd_kv_each_run(path, -1, &(struct pd_kv_walk){ .mode = PD_DUMP_DATA, .run = o->run, .run_fn = png_run, .ctx = &p }, e);
}
