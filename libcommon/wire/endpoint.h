/* Endpoints of -i and -o: "-", a path, unix:PATH, unix-listen:PATH.
 *
 * A Unix socket is made with mode 0600 (in a umask-safe way) and its peer's uid is checked. unix-listen serves one peer. A connecting side retries a
 * refused or absent endpoint until connect_timeout_us. An output path that is absent or a regular file appears whole with pd_endpoint_commit, or not at
 * all (base/outfile.h); a device, FIFO or socket is opened and written as it is. tcp: and the others are refused by name until they exist.
 * Pipes are enlarged (F_SETPIPE_SZ, 1 MiB) where the kernel allows.
 */
#ifndef PD_WIRE_ENDPOINT_H
#define PD_WIRE_ENDPOINT_H
#include <stdbool.h>
#include <stdint.h>
#include "../base/outfile.h"
struct pd_endpoint { int fd; bool own /* fd is to be closed */; struct pd_outfile file /* an output file: fd is its */; };
int pd_endpoint_open_in(const char *spec, int64_t connect_timeout_us, struct pd_endpoint *ep, struct pd_err *e);
int pd_endpoint_open_out(const char *spec, int64_t connect_timeout_us, struct pd_endpoint *ep, struct pd_err *e);
bool pd_endpoint_is_h5(const char *spec);                       /* a path that ends in .h5 */
int pd_endpoint_commit(struct pd_endpoint *ep, struct pd_err *e);       /* output: a file gets its name; closes */
void pd_endpoint_abort(struct pd_endpoint *ep);                 /* close; nothing half-written stays */
#endif
