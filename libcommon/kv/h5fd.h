/* An HDF5 file driver over an open descriptor. Two reasons for one of our own: an unnamed file (O_TMPFILE, a padded copy) has no path that libhdf5's drivers
 * take, and libhdf5 1.10 crashes in its clean-up once a write has failed (a full disk). Here a failed write is noted in *sys and all later ones are
 * dropped as if they had gone well, so that everything closes; the writer looks at *sys and throws the file away. Want of memory to open, and a read that
 * fails, are noted there too: neither is the file's fault. */
#ifndef PD_KV_H5FD_H
#define PD_KV_H5FD_H
#include <hdf5.h>
/* Makes a file access property list use descriptor fd (not closed), which is written when `write`. *sys is 0 at first. */
bool pd_h5fd_set(hid_t fapl, int fd, bool write, int *sys);
#endif
