/* Endpoints of -i and -o: "-", a path, unix:PATH, unix-listen:PATH, tcp:HOST:PORT, tcp-listen:[HOST]:PORT.
 *
 * A Unix socket is made with mode 0600 (in a umask-safe way) and its peer's uid is checked. TCP is TLS when there are keys, and plain on loopback or with
 * `insecure` (wire/tcp.h); the handshake is over when an endpoint is open, and a peer without a good key is told of and waited out. A listening endpoint
 * serves one peer. A reader over TCP says when it has read the end (pd_rstream_of), and pd_endpoint_commit waits for that word: a writer over a network is
 * not done before. A connecting side retries a refused or absent endpoint until net->connect_us. An output path that is absent or a regular file appears
 * whole with pd_endpoint_commit, or not at all (base/outfile.h); a device, FIFO or socket is opened and written as it is. rdma: and the others are refused by
 * name until they exist. Pipes are enlarged (F_SETPIPE_SZ, 1 MiB) where the kernel allows.
 */
#ifndef PD_WIRE_ENDPOINT_H
#define PD_WIRE_ENDPOINT_H
#include <stdbool.h>
#include <stdint.h>
#include "../base/outfile.h"
#include "tcp.h"
#include "tls.h"
/* fd: -1 under TLS, where bytes go through tls alone (pd_rstream_of and pd_wstream_of know). */
struct pd_endpoint { int fd; bool own /* fd is to be closed */; struct pd_outfile file /* an output file: fd is its */; struct pd_tls *tls; int sock /* under tls */; bool tcp; };
int pd_endpoint_open_in(const char *spec, const struct pd_net *net, struct pd_endpoint *ep, struct pd_err *e);
int pd_endpoint_open_out(const char *spec, const struct pd_net *net, struct pd_endpoint *ep, struct pd_err *e);
bool pd_endpoint_is_h5(const char *spec);                       /* a path that ends in .h5 */
/* Was it an `error` record as text, or a TLS alert, that the reader of an output sent back? Then *e says so (PD_ECANCEL). */
bool pd_reader_said(const char *p, size_t n, const char *name, struct pd_err *e);
int pd_endpoint_commit(struct pd_endpoint *ep, struct pd_err *e);       /* output: a file gets its name, TLS its end; closes */
void pd_endpoint_abort(struct pd_endpoint *ep);                 /* close; nothing half-written stays */
/* What --connect-timeout, --key-file and --insecure say; the key file is read once. NULL: *e. */
const struct pd_net *pd_net_cli(struct pd_err *e);
#endif
