/* The chunk codec of dump files: byte shuffle, then zstd, as the HDF5 library applies its filters 2 (shuffle) and 32015 (zstd).
 *
 * Two uses of one file. The plug-in (h5zstd_plugin) exports pd_h5z_class, so that h5dump and h5py read dumps; it is loaded into programs with an HDF5 library
 * of their own and therefore calls nothing of libhdf5. Our own writer and reader encode and decode chunks by the functions and pass them as raw chunks, because
 * libhdf5 does not check that a filter gave back as many bytes as a chunk has. */
#ifndef PD_KV_H5ZSTD_H
#define PD_KV_H5ZSTD_H
#include <hdf5.h>
#include "../base/err.h"
#define PD_H5Z_ZSTD 32015       /* registered with The HDF Group; cd_values[0] is the level */
#define PD_H5Z_LEVEL 1          /* shuffled halves: higher levels cost more time than they save bytes */
extern const H5Z_class2_t pd_h5z_class;
/* out holds pd_h5z_bound(n); tmp holds n bytes. *len: bytes written. n a multiple of el. */
size_t pd_h5z_bound(size_t n);
int pd_h5z_encode(const void *in, size_t n, size_t el, void *tmp, void *out, size_t *len, struct pd_err *e);
/* Exactly n bytes into out, or PD_ECORRUPT. tmp holds n bytes. */
int pd_h5z_decode(const void *in, size_t len, size_t el, void *tmp, void *out, size_t n, struct pd_err *e);
#endif
