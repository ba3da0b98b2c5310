/* Names of workers and paths as numbers: for tables about many runs that name few of them. Zero-initialise. */
#ifndef PD_ROUTE_NAMES_H
#define PD_ROUTE_NAMES_H
#include "../wire/record_route.h"
enum { PD_NAMES_MOST = 4096 };          /* what comes after these is one: "others" */
struct pd_names { char **name; uint64_t *hash; uint32_t n; };
int pd_name_of(struct pd_names *t, struct pd_str s, uint32_t *out, struct pd_err *e);
/* Of a way: "d0", "p0 > d0"; of its path: the two domains, the two workers when it is theirs alone, or its kind. */
int pd_name_of_way(struct pd_names *t, const struct pd_route_rec *r, const struct pd_route_pair *o, uint32_t *out, struct pd_err *e);
int pd_name_of_path(struct pd_names *t, const struct pd_route_rec *r, const struct pd_route_pair *o, uint32_t *out, struct pd_err *e);
void pd_names_free(struct pd_names *t);
#endif
