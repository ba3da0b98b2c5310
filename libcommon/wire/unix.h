/* Unix sockets that this process listens on: made with mode 0600 whatever the umask, their peers of our own uid or root. */
#ifndef PD_WIRE_UNIX_H
#define PD_WIRE_UNIX_H
#include <sys/types.h>
#include "../base/err.h"
struct sockaddr_un;

/* The name in the file system that a listening socket made: what is at the path later may be somebody else's. */
struct pd_unix_name { dev_t dev; ino_t ino; };

int pd_unix_address(const char *path, struct sockaddr_un *a, struct pd_err *e);
/* Whoever runs as another user is turned away (PD_EFAIL), root excepted, whatever the modes of the directories above. */
int pd_unix_check_peer(int fd, const char *path, struct pd_err *e);
/* A blocking, listening socket. One that a killed process left over is replaced; where another process listens, or what is there is no socket: PD_EUSAGE.
 * Of several processes that start at one path at once one listens (the folder is locked meanwhile, for a second at the most). */
int pd_unix_listen(const char *path, int backlog, int *fd, struct pd_unix_name *name, struct pd_err *e);
void pd_unix_unlink(const char *path, const struct pd_unix_name *name);         /* only what pd_unix_listen made; before its socket is closed */
#endif
