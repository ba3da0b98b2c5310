/* An output file that appears whole or not at all.
 *
 * It is written beside its target, without a name where the file system can do that (whatever ends the process, nothing half-written stays), else under a
 * temporary one; the commit brings it to the disk and renames it. A target that exists keeps its mode, a new one has 0600. A link is followed: the file that
 * it points to is replaced, the link stays. The target is absent or a regular file; anything else is refused.
 * Owns its descriptor. path NULL is an outfile that is not open: there is nothing to commit, and abort does nothing.
 */
#ifndef PD_BASE_OUTFILE_H
#define PD_BASE_OUTFILE_H
#include "err.h"
struct pd_outfile { char *path, *dir, *tmp; int fd; };  /* path: the target, links resolved; tmp: a name to remove, or NULL; fd: to read and write */
int pd_outfile_open(const char *path, struct pd_outfile *f, struct pd_err *e);
int pd_outfile_commit(struct pd_outfile *f, struct pd_err *e);     /* fsync, rename, close; after a failure nothing stays but the old file */
void pd_outfile_abort(struct pd_outfile *f);
#endif
