#include <inttypes.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>
#include "../model/dtype.h"
#include "dump.h"
#include "dump_format.h"

hid_t pd_dump_type(const char *dtype)
{
    enum pd_dtype id;
    if (!pd_kv_dtype_parse(dtype, &id))
        return -1;
    hid_t t = H5Tcopy(H5T_IEEE_F32LE);
    if (t < 0 || id == PD_F32)
        return t;
    bool half = id == PD_F16;
    /* sign, exponent, mantissa: 1 5 10 or 1 8 7; fields before size, for libhdf5 checks them against the precision it has */
    herr_t bad = half ? H5Tset_fields(t, 15, 10, 5, 0, 10) : H5Tset_fields(t, 15, 7, 8, 0, 7);
    if (bad < 0 || H5Tset_size(t, 2) < 0 || H5Tset_ebias(t, half ? 15 : 127) < 0) {
        H5Tclose(t);
        return -1;
    }
    return t;
}

void pd_dump_rows_of_block(const struct pd_kv_layout *l, size_t el, const uint8_t *block, uint8_t *rows)
{
    size_t row = l->head_dim * el;
    for (uint32_t h = 0; h < l->kv_heads; h++)
        for (uint32_t t = 0; t < l->block_size; t++)
            memcpy(rows + ((size_t)t * l->kv_heads + h) * row, block + ((size_t)h * l->block_size + t) * row, row);
}

void pd_dump_block_of_rows(const struct pd_kv_layout *l, size_t el, const uint8_t *rows, uint8_t *block)
{
    size_t row = l->head_dim * el;
    for (uint32_t h = 0; h < l->kv_heads; h++)
        for (uint32_t t = 0; t < l->block_size; t++)
            memcpy(block + ((size_t)h * l->block_size + t) * row, rows + ((size_t)t * l->kv_heads + h) * row, row);
}

uint64_t pd_dump_seed(const struct pd_kvdesc *d, uint32_t layer, int v, uint32_t block)
{
    return pd_chunk_seed(d->gen, d->layout.layout_hash, layer | (uint32_t)(v != 0) << 31, block);
}

/* libhdf5 forgets an error as soon as its next function is called, also one that only cleans up: the first one is noted when it happens. */
static __thread struct inner { char desc[200]; bool found; } noted;

static herr_t look(unsigned n, const H5E_error2_t *err, void *data)
{
    if (!noted.found && err->desc)
        snprintf(noted.desc, sizeof noted.desc, "%s", err->desc);
    noted.found = true;
    return 0;
}

static herr_t note(hid_t stack, void *data)
{
    if (!noted.found)
        H5Ewalk2(stack, H5E_WALK_UPWARD, look, NULL);
    return 0;
}

void pd_h5_begin(void)
{
    memset(&noted, 0, sizeof noted);
    H5Eset_auto2(H5E_DEFAULT, note, NULL);
}

int pd_h5_fail(struct pd_err *e, int code, const char *what)
{
    struct inner in = noted;
    memset(&noted, 0, sizeof noted);
    return pd_fail(e, code, "%s: %s", what, in.found ? in.desc : "libhdf5 failed");
}

static const uint8_t magic[8] = { 0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n' };

static uint64_t le64(const uint8_t *p)
{
    uint64_t v = 0;
    for (int i = 7; i >= 0; i--)
        v = v << 8 | p[i];
    return v;
}

/* HDF5 file format 3.0, section II.A.4: signature 8, version, size of offsets, size of lengths, flags, then base, extension, end, root: 8 bytes each. */
int pd_h5_super_read(int fd, const char *path, struct pd_h5_super *s, struct pd_err *e)
{
    uint8_t b[48];
    struct stat st;
    memset(s, 0, sizeof *s);
    if (fstat(fd, &st))
        return pd_fail_sys(e, "%s", path);
    if (!S_ISREG(st.st_mode))
        return pd_fail(e, PD_EFAIL, "%s: a dump is read from a regular file", path);
    ssize_t n = pread(fd, b, sizeof b, 0);
    if (n < 0)
        return pd_fail_sys(e, "%s", path);
    if (n < 8 || memcmp(b, magic, 8))
        return pd_fail(e, PD_ECORRUPT, "%s: not an HDF5 file", path);
    if (n < (ssize_t)sizeof b)
        return pd_fail(e, PD_ECORRUPT, "%s: cut after %zd bytes, within the superblock", path, n);
    if (b[8] != 2 && b[8] != 3)
        return pd_fail(e, PD_ECORRUPT, "%s: superblock version %u (dumps have 2 or 3)", path, b[8]);
    if (b[9] != 8 || b[10] != 8 || le64(b + 12) || le64(b + 20) != UINT64_MAX)
        return pd_fail(e, PD_ECORRUPT, "%s: superblock of a kind that no dump has (offsets of %u bytes, lengths of %u)", path, b[9], b[10]);
    if (b[8] == 3 && b[11])
        return pd_fail(e, PD_ECORRUPT, "%s: was not closed by its writer (flags 0x%02x)", path, b[11]);
    s->version = b[8];
    s->eof = le64(b + 28);
    s->root = le64(b + 36);
    s->size = (uint64_t)st.st_size;
    if (s->eof < sizeof b || s->root < sizeof b || s->root >= s->eof || s->eof > (uint64_t)1 << 50)
        return pd_fail(e, PD_ECORRUPT, "%s: superblock says %" PRIu64 " bytes, root group at %" PRIu64, path, s->eof, s->root);
    return 0;
}

bool pd_dump_is(const char *path)
{
    uint8_t b[8];
    struct stat st;
    if (stat(path, &st) || !S_ISREG(st.st_mode))        /* a FIFO would lose its first bytes, and wait for a writer */
        return false;
    FILE *f = fopen(path, "re");
    bool is = f && fread(b, 1, 8, f) == 8 && !memcmp(b, magic, 8);
    if (f)
        fclose(f);
    return is;
}
