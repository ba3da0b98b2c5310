/* TCP for records: addresses "HOST:PORT", listening, connecting, and who may be talked to in the clear.
 *
 * HOST is a name, an IPv4 address, or an IPv6 address in brackets; where one listens it may be empty (all addresses) and PORT 0 (any). What is not loopback asks
 * for keys (wire/tls.h), or for --insecure. Sockets have TCP_NODELAY and notice a peer whose host is gone within about half a minute.
 */
#ifndef PD_WIRE_TCP_H
#define PD_WIRE_TCP_H
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include "tls.h"

enum { PD_TCP_ADDRS = 8, PD_TCP_NAME = 80 };
struct pd_tcp_addr { struct sockaddr_storage a; socklen_t n; };

/* The addresses of HOST:PORT, at most PD_TCP_ADDRS, those of names as the resolver orders them: a name may block for as long as it takes, an address never does. PD_EUSAGE: it
 * is none; PD_ENOWORKER: the name is not known now. */
int pd_tcp_resolve(const char *where, bool listening, struct pd_tcp_addr out[PD_TCP_ADDRS], int *n, struct pd_err *e);
/* The same without asking anybody, to connect to: 1: HOST is a name (wire/lookup asks beside a loop). */
int pd_tcp_numeric(const char *where, struct pd_tcp_addr out[PD_TCP_ADDRS], int *n, struct pd_err *e);
int pd_tcp_check(const char *where, bool listening, struct pd_err *e);  /* PD_EUSAGE: it is no HOST:PORT. Nobody is asked */
bool pd_tcp_is_loopback(const struct pd_tcp_addr *a);
/* PD_EUSAGE, naming --key-file and --insecure, when records would leave this host in the clear. */
int pd_tcp_may(const struct pd_tcp_addr *a, int n, const struct pd_net *net, const char *where, bool listening, struct pd_err *e);
void pd_tcp_name(const struct pd_tcp_addr *a, char out[PD_TCP_NAME]);   /* "127.0.0.1:7000", "[::1]:7000" */
void pd_tcp_local(int fd, char out[PD_TCP_NAME]);
void pd_tcp_tune(int fd);
bool pd_is_tcp(int fd);
/* A listening, non-blocking socket; told: where, with the port that was chosen. PD_EUSAGE: it cannot be had. */
int pd_tcp_listen(const char *where, int backlog, const struct pd_net *net, int *fd, char told[PD_TCP_NAME], struct pd_err *e);
/* A non-blocking socket on its way to *a. 0: *fd; it stands, or has failed (SO_ERROR), when it can be written. PD_ENOWORKER: it has failed already. */
int pd_tcp_dial(const struct pd_tcp_addr *a, int *fd, struct pd_err *e);
int pd_tcp_stands(int fd, const char *name, struct pd_err *e);  /* of one that can be written: 0, or PD_ENOWORKER */
/* For others to dial: "HOST:PORT" of a socket that listens at `told`; of one that listens on all addresses, an address of this host that others can reach. */
void pd_tcp_reachable(const char *told, char out[PD_TCP_NAME]);
#endif
