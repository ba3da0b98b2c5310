/* Inside the topology: what topology.c (the tree, the matrix, asking) and topology_read.c (the lines of a file) share. */
#ifndef PD_ROUTE_TOPOLOGY_IN_H
#define PD_ROUTE_TOPOLOGY_IN_H
#include "topology.h"

struct pd_topo_domain { const char *name; enum pd_near near; int parent; uint32_t end /* those inside it: [own number, end) */; uint8_t depth; bool maintenance; };
struct pd_topo_key { const char *name; uint16_t domain; bool maintenance; int line; };  /* sorted by name */

struct pd_topology {
    struct pd_arena mem;
    uint64_t version;
    struct pd_topo_domain *domain; uint32_t n;
    struct pd_topo_key *by_name, *worker; uint32_t n_workers;
    struct pd_way *way; uint32_t n_ways;        /* the classes, then the lines */
    uint16_t *matrix;                           /* [from][to]: which way */
};

struct pd_topo_said { const char *name, *in; int parent /* in said; -1: none */, id, line; enum pd_near near; bool maintenance; };
struct pd_topo_rect { int a, b, way, depth; bool has_near; };  /* what lies in a, to what lies in b */
struct pd_topo_parse {
    struct pd_topology *t;
    const char *text; size_t n_text;
    const char *file;
    struct pd_topo_said *said; uint32_t n_said, cap_said;
    struct pd_topo_rect *rect; uint32_t n_rects, cap_rects;
    uint32_t cap_ways, cap_workers;
    int class_line[PD_NEAR_N];
};
/* The `class` and `domain` lines; then the others, once domains have numbers. */
int pd_topo_read_domains(struct pd_topo_parse *q, struct pd_err *e);
int pd_topo_read_rest(struct pd_topo_parse *q, struct pd_err *e);
int pd_topo_bad(const struct pd_topo_parse *q, int line, struct pd_err *e, const char *fmt, ...) __attribute__((format(printf, 4, 5)));  /* PD_EUSAGE */
#endif
