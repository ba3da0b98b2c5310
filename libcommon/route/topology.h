/* Where workers are, and what the paths between them are worth: domains that lie in one another, classes of paths, and what is known of paths that differ from
 * their class. Read from a file that an operator writes (man/pd-topology.5). Pure: the same text gives the same answers; never changed once it was read.
 *
 * A domain has the class of the paths inside it. The class of a path between two domains is that of the innermost domain that both are in; of none: cross. A
 * `path` line says otherwise for all that lies in its two domains; of several the innermost on both sides holds, and where none is innermost on both, or two
 * lines say two things, the file is refused. What a line leaves open comes from its class (`assumed` says which), so each path has a value for everything.
 */
#ifndef PD_ROUTE_TOPOLOGY_H
#define PD_ROUTE_TOPOLOGY_H
#include "../base/mem.h"

enum pd_near { PD_NEAR_LOCAL, PD_NEAR_NVLINK, PD_NEAR_PCIE, PD_NEAR_RACK, PD_NEAR_CROSS, PD_NEAR_N };     /* the nearest first */
extern const char *const pd_near_names[];       /* by enum, NULL-ended */
bool pd_near_find(const char *name, enum pd_near *out);

enum { PD_WAY_LATENCY = 1, PD_WAY_BANDWIDTH = 2, PD_WAY_JITTER = 4, PD_WAY_COST = 8, PD_WAY_ALL = 15 };
struct pd_way {                         /* a path, as far as it is known before anything has gone over it */
    enum pd_near near;
    double latency_us, bytes_per_us, jitter_us /* P95 of what comes on top */, cost_us /* what using it is to count besides its time */;
    unsigned assumed;                   /* PD_WAY_*: by its class, not said of this path */
    int line;                           /* of the file; 0: no line is about it */
};

struct pd_topology;
/* name: of the file, for messages. PD_EUSAGE: what is wrong in which line, and what to write; PD_ENOMEM. */
int pd_topology_parse(const char *text, size_t n, const char *name, struct pd_topology **out, struct pd_err *e);
int pd_topology_load(const char *path, struct pd_topology **out, struct pd_err *e);
void pd_topology_free(struct pd_topology *t);   /* NULL: nothing */

enum { PD_TOPO_DOMAINS = 1024, PD_TOPO_WAYS = 4096, PD_TOPO_WORKERS = 8192, PD_TOPO_DEPTH = 8, PD_TOPO_NAME = 63 };
uint32_t pd_topology_domains(const struct pd_topology *t);
uint64_t pd_topology_version(const struct pd_topology *t);      /* a hash of the text */
const char *pd_topology_name(const struct pd_topology *t, int domain);  /* -1: "none" */
int pd_topology_domain(const struct pd_topology *t, const char *name, size_t n);       /* -1: there is none of that name */

/* Where a worker is: by the file, which goes by its endpoint or its name, else by the domain that it says itself. */
struct pd_spot { int domain /* -1: none that the file knows */; bool maintenance /* of the worker, or of a domain it is in */; bool by_file; };
struct pd_spot pd_topology_spot(const struct pd_topology *t, const char *at, struct pd_str worker, struct pd_str domain);
/* From a domain to another, or inside one; -1: as if from elsewhere. Never NULL. */
const struct pd_way *pd_topology_way(const struct pd_topology *t, int from, int to);
const struct pd_way *pd_topology_class(const struct pd_topology *t, enum pd_near near);         /* of the file */
const struct pd_way *pd_way_of_class(enum pd_near near);        /* without one */

/* What was filled from classes, in a line for a person: "6 of 15 pairs of domains are as their class (hostA1 and hostB1 first), ...". "" when nothing was. */
int pd_topology_filled(const struct pd_topology *t, struct pd_buf *out, struct pd_err *e);

/* --domain: how near to each other the two workers of a run have to be. */
struct pd_domain_rule { enum { PD_DOMAIN_ANY, PD_DOMAIN_PREFER, PD_DOMAIN_REQUIRE } how; enum pd_near near; };
int pd_domain_rule_parse(const char *text, struct pd_domain_rule *out, struct pd_err *e);      /* require:rack, prefer:pcie, any */
/* The widest domain around `at` whose inside is of that class or nearer: what "require:rack" asks of those who give to a worker there; -1: it is in none. */
int pd_topology_around(const struct pd_topology *t, int at, enum pd_near near);
#endif
