/* A whole input file into memory. */
#ifndef PD_BASE_INFILE_H
#define PD_BASE_INFILE_H
#include "mem.h"
/* All bytes of path, appended to b; a pipe is read to its end. More than `most` are no `what` ("profile"): PD_ECORRUPT. */
int pd_infile_read(const char *path, size_t most, const char *what, struct pd_buf *b, struct pd_err *e);
#endif
