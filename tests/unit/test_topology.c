/* route/topology: who is where, which path holds, what is filled, and files that contradict themselves. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdlib.h>
#include <unistd.h>
#include "../../libcommon/route/topology.h"

static const char two_racks[] =
    "# two racks of two hosts\n"
    "class rack latency 40us bandwidth 10GB/s\n"
    "domain hostA1 pcie in rackA\r\n"
    "domain rackA rack in hall\n"
    "domain rackB rack in hall\n"
    "\tdomain hostA2  local in rackA   # a comment\n"
    "domain hostB1 pcie in rackB maintenance\n"
    "domain hostB2 pcie in rackB\n"
    "domain hall cross\n"
    "domain island nvlink\n"
    "path rackA rackB bandwidth 2GB/s jitter 3ms cost 5ms\n"
    "path hostA1 > hostB1 latency 900us\n"
    "path hostA1 hostA2 nvlink bandwidth 100Gbit/s\n"
    "worker unix:/run/d0 in hostA1\n"
    "worker decode@x:7 in hostB2 maintenance\n";

static struct pd_topology *parse(const char *text)
{
    struct pd_topology *t = NULL;
    struct pd_err e = { 0 };
    int rc = pd_topology_parse(text, strlen(text), "topo", &t, &e);
    if (rc)
        print_error("%s\n", e.msg);
    assert_int_equal(rc, 0);
    return t;
}

static int id(const struct pd_topology *t, const char *name)
{
    int d = pd_topology_domain(t, name, strlen(name));
    assert_true(d >= 0 && !strcmp(pd_topology_name(t, d), name));
    return d;
}
static const struct pd_way *way(const struct pd_topology *t, const char *a, const char *b) { return pd_topology_way(t, id(t, a), id(t, b)); }

static void classes_come_from_the_tree(void **state)
{
    struct pd_topology *t = parse(two_racks);
    assert_int_equal(pd_topology_domains(t), 8);
    assert_int_equal(way(t, "hostA1", "hostA1")->near, PD_NEAR_PCIE);
    assert_int_equal(way(t, "hostB1", "hostB2")->near, PD_NEAR_RACK);
    assert_int_equal(way(t, "hostB1", "rackB")->near, PD_NEAR_RACK);
    assert_int_equal(way(t, "island", "hostA1")->near, PD_NEAR_CROSS);
    assert_int_equal(pd_topology_way(t, -1, id(t, "hostA1"))->near, PD_NEAR_CROSS);
    assert_int_equal(pd_topology_domain(t, "hostA", 5), -1);
    assert_int_equal(pd_topology_domain(t, "hostA11", 7), -1);
    assert_string_equal(pd_topology_name(t, -1), "none");
    pd_topology_free(t);
}

static void the_innermost_line_holds(void **state)
{
    struct pd_topology *t = parse(two_racks);
    const struct pd_way *w = way(t, "hostA2", "hostB2"), *one = way(t, "hostA1", "hostB1"), *back = way(t, "hostB1", "hostA1");
    assert_true(w->bytes_per_us == 2000 && w->jitter_us == 3000 && w->cost_us == 5000 && w->line == 11);
    assert_int_equal(w->assumed, PD_WAY_LATENCY);
    assert_true(w->latency_us == pd_way_of_class(PD_NEAR_CROSS)->latency_us);
    assert_true(one->latency_us == 900 && one->line == 12 && one->assumed == (PD_WAY_ALL & ~PD_WAY_LATENCY));
    assert_true(back->line == 11);
    assert_true(way(t, "hostA2", "hostA1")->bytes_per_us == 12500 && way(t, "hostA2", "hostA1")->near == PD_NEAR_NVLINK);
    assert_true(way(t, "hostB1", "hostB2")->latency_us == 40 && way(t, "hostB1", "hostB2")->bytes_per_us == 10000);
    assert_int_equal(way(t, "hostB1", "hostB2")->assumed, PD_WAY_JITTER | PD_WAY_COST);
    assert_int_equal(way(t, "hostB1", "hostB2")->line, 0);
    pd_topology_free(t);
    /* two lines cross, and a third is inside both */
    t = parse("domain A rack\ndomain a local in A\ndomain B rack\ndomain b local in B\npath a B cost 1ms\npath A b cost 2ms\npath a b cost 3ms\n");
    assert_true(way(t, "a", "b")->cost_us == 3000 && way(t, "b", "a")->cost_us == 3000 && way(t, "a", "B")->cost_us == 1000 && way(t, "A", "b")->cost_us == 2000);
    assert_true(way(t, "A", "B")->line == 0);
    pd_topology_free(t);
}

static void workers_have_a_place(void **state)
{
    struct pd_topology *t = parse(two_racks);
    struct pd_str name = { "decode@x:7", 10 }, other = { "decode@y:7", 10 }, a2 = { "hostA2", 6 }, b1 = { "hostB1", 6 }, local = { "local", 5 };
    struct pd_spot s = pd_topology_spot(t, "unix:/run/d0", other, a2);
    assert_true(s.domain == id(t, "hostA1") && !s.maintenance && s.by_file);
    s = pd_topology_spot(t, "unix:/run/d1", name, a2);
    assert_true(s.domain == id(t, "hostB2") && s.maintenance && s.by_file);
    s = pd_topology_spot(t, "unix:/run/d1", other, a2);
    assert_true(s.domain == id(t, "hostA2") && !s.maintenance && !s.by_file);
    s = pd_topology_spot(t, "unix:/run/d1", other, b1);
    assert_true(s.domain == id(t, "hostB1") && s.maintenance);
    s = pd_topology_spot(t, "unix:/run/d1", other, local);
    assert_true(s.domain == -1 && !s.maintenance);
    pd_topology_free(t);
    t = parse("domain A rack maintenance\ndomain a local in A\n");
    assert_true(pd_topology_spot(t, "x", other, (struct pd_str){ "a", 1 }).maintenance);        /* with all that is in it */
    pd_topology_free(t);
}

static void rules(void **state)
{
    struct pd_topology *t = parse(two_racks);
    struct pd_domain_rule r;
    struct pd_err e;
    assert_int_equal(pd_domain_rule_parse("require:rack", &r, &e), 0);
    assert_true(r.how == PD_DOMAIN_REQUIRE && r.near == PD_NEAR_RACK);
    assert_int_equal(pd_domain_rule_parse("prefer:pcie", &r, &e), 0);
    assert_true(r.how == PD_DOMAIN_PREFER && r.near == PD_NEAR_PCIE);
    assert_int_equal(pd_domain_rule_parse("any", &r, &e), 0);
    assert_true(r.how == PD_DOMAIN_ANY);
    static const char *const bad[] = { "", "require", "require:", "require:row", "any:rack", "requires:rack", "prefer:rack ", "rack" };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(pd_domain_rule_parse(bad[i], &r, &e), PD_EUSAGE);
        assert_non_null(strstr(e.msg, "example: require:rack"));
    }
    assert_int_equal(pd_topology_around(t, id(t, "hostA1"), PD_NEAR_RACK), id(t, "rackA"));
    assert_int_equal(pd_topology_around(t, id(t, "hostA1"), PD_NEAR_PCIE), id(t, "hostA1"));
    assert_int_equal(pd_topology_around(t, id(t, "hostA1"), PD_NEAR_NVLINK), -1);
    assert_int_equal(pd_topology_around(t, id(t, "hostA1"), PD_NEAR_CROSS), id(t, "hall"));
    assert_int_equal(pd_topology_around(t, -1, PD_NEAR_CROSS), -1);
    pd_topology_free(t);
}

static void holes_are_told(void **state)
{
    struct pd_topology *t = parse(two_racks);
    struct pd_buf b = { 0 };
    struct pd_err e;
    assert_int_equal(pd_topology_filled(t, &b, &e), 0);
    assert_int_equal(pd_buf_add(&b, "", 1, &e), 0);
    assert_string_equal((char *)b.p, "8 of 18 pairs of domains have no path line and are as their class (hall and island first); 2 of 3 path lines say no latency: "
                                     "their class's; 1 of 3 path lines say no bandwidth: their class's; 2 of 3 path lines say no jitter: their class's");
    pd_buf_free(&b);
    pd_topology_free(t);
    t = parse("domain a local\ndomain b local\npath a b rack latency 1us bandwidth 1GB/s jitter 0us\n");
    assert_int_equal(pd_topology_filled(t, &b, &e), 0);
    assert_int_equal(b.n, 0);
    pd_topology_free(t);
    t = parse("");
    assert_int_equal(pd_topology_filled(t, &b, &e), 0);
    assert_true(!b.n && !pd_topology_domains(t) && pd_topology_way(t, -1, -1)->near == PD_NEAR_CROSS);
    pd_topology_free(t);
}

static void contradictions_are_told(void **state)
{
    static const struct { const char *text, *why; } bad[] = {
        { "domain a local\ndomain a rack\n", "topo: line 2: domain 'a' is there already, line 1 (keep one)" },
        { "\ndomain a local in b\n", "line 2: there is no domain 'b' (add a line: domain b CLASS)" },
        { "domain a local in b\ndomain b local in c\ndomain c local in a\n", "line 1: domain 'a' lies in itself, by way of 'b'" },
        { "domain a local in a\n", "line 1: domain 'a' lies in itself, by way of 'a'" },
        { "domain a rack in b\ndomain b pcie\n", "line 1: domain 'a' is rack inside, and lies in 'b', which is pcie: what lies inside is nearer (make it pcie or nearer)" },
        { "domain a local in R\ndomain b local in R\ndomain R rack\npath a b cross\n", "line 4: the path of 'a' and 'b' is cross, and both lie in a domain that is rack inside" },
        { "domain a local\ndomain b local\npath a b cost 1ms\npath b > a cost 2ms\n", "line 4: the path from 'b' to 'a' has a line already, line 3 (make one of the two)" },
        { "domain A rack\ndomain a local in A\ndomain B rack\ndomain b local in B\npath a B cost 1ms\npath A b cost 2ms\n",
          "line 6: between 'a' and 'b' this line and line 5 hold, and neither is the inner one (say `path a b` too)" },
        { "domain A rack\ndomain a local in A\npath a A cost 1ms\n", "line 3: 'a' and 'A' lie in one another (inside a domain: path a a)" },
        { "domain a local\nworker x in a\nworker y in a\nworker x in a maintenance\n", "line 4: worker 'x' has a place by line 2 already (keep one of them)" },
        { "worker x in a\n", "line 1: there is no domain 'a'" },
        { "domain a local\nworker x\n", "line 2: where is worker 'x'? (add: in DOMAIN)" },
        { "domain a local\npath a a\n", "line 2: nothing is said of this path" },
        { "domain a local\npath a\n", "line 2: a path goes between two domains" },
        { "class rack cost 1ms\nclass rack cost 2ms\n", "line 2: class rack has a line already, line 1" },
        { "class rack\n", "line 1: class rack, and nothing said of it" },
        { "class row cost 1ms\n", "line 1: 'row' is no class (local, nvlink, pcie, rack or cross)" },
        { "class rack cost 1ms cost 2ms\n", "line 1: cost is there twice" },
        { "class rack bandwidth\n", "line 1: bandwidth has no value (example: bandwidth 12GB/s)" },
        { "class rack bandwidth 0GB/s\n", "line 1: bandwidth '0GB/s' is none" },
        { "class rack bandwidth 12G\n", "line 1: bandwidth '12G' is none" },
        { "class rack bandwidth 1.2.3GB/s\n", "bandwidth '1.2.3GB/s' is none" },
        { "class rack bandwidth nanGB/s\n", "bandwidth 'nanGB/s' is none" },
        { "class rack latency -5us\n", "latency '-5us' is no time" },
        { "class rack latency 2m\n", "latency '2m' is no time of at most 60s" },
        { "class rack speed 5\n", "'speed' is not known here" },
        { "domain a\n", "line 1: a domain has a name and the class" },
        { "domain a local in b in c\n", "line 1: 'in' is not understood here" },
        { "domain none local\n", "'none' cannot be the name of a domain" },
        { "link a b\n", "line 1: 'link' is no line of a topology (class, domain, path or worker; # begins a comment)" },
        { "domain \001 local\n", "line 1: byte 8 of it is no text" },
        { "d d d d d d d d d d d d d d d d d d d d d\n", "line 1: more than 20 words" },
        { "domain a1 local in a2\ndomain a2 local in a3\ndomain a3 local in a4\ndomain a4 local in a5\ndomain a5 local in a6\ndomain a6 local in a7\n"
          "domain a7 local in a8\ndomain a8 local in a9\ndomain a9 local\n", "line 1: domain 'a1' lies in more than 7 others" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct pd_topology *t = NULL;
        struct pd_err e = { 0 };
        int rc = pd_topology_parse(bad[i].text, strlen(bad[i].text), "topo", &t, &e);
        if (rc != PD_EUSAGE || !strstr(e.msg, bad[i].why))
            print_error("%zu: %d %s\n", i, rc, e.msg);
        assert_true(rc == PD_EUSAGE && strstr(e.msg, bad[i].why));
        assert_null(t);
    }
}

static void versions_and_limits(void **state)
{
    struct pd_topology *a = parse("domain a local\n"), *b = parse("domain a local\n#\n"), *c = parse("domain a local\n");
    assert_true(pd_topology_version(a) == pd_topology_version(c) && pd_topology_version(a) != pd_topology_version(b));
    pd_topology_free(a);
    pd_topology_free(b);
    pd_topology_free(c);
    struct pd_buf text = { 0 };
    struct pd_topology *t = NULL;
    struct pd_err e;
    for (int i = 0; i < PD_TOPO_DOMAINS; i++)
        assert_int_equal(pd_buf_printf(&text, &e, "domain d%d local%s\n", i, i ? " in d0" : ""), 0);
    assert_int_equal(pd_topology_parse((char *)text.p, text.n, "topo", &t, &e), 0);
    assert_int_equal(pd_topology_domains(t), PD_TOPO_DOMAINS);
    pd_topology_free(t);
    assert_int_equal(pd_buf_printf(&text, &e, "domain more local\n"), 0);
    assert_int_equal(pd_topology_parse((char *)text.p, text.n, "topo", &t, &e), PD_EUSAGE);
    assert_non_null(strstr(e.msg, "line 1025: more than 1024 domains"));
    pd_buf_free(&text);
}

static void files(void **state)
{
    char path[] = "/tmp/pd-topology-XXXXXX";
    struct pd_topology *t = NULL;
    struct pd_err e;
    int fd = mkstemp(path);
    assert_true(fd >= 0 && write(fd, two_racks, sizeof two_racks - 1) == sizeof two_racks - 1);
    close(fd);
    assert_int_equal(pd_topology_load(path, &t, &e), 0);
    assert_int_equal(pd_topology_domains(t), 8);
    pd_topology_free(t);
    unlink(path);
    assert_true(pd_topology_load(path, &t, &e) < 0 && strstr(e.msg, path));
    assert_int_equal(pd_topology_load("/tmp", &t, &e), PD_EUSAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(classes_come_from_the_tree), cmocka_unit_test(the_innermost_line_holds), cmocka_unit_test(workers_have_a_place),
                                        cmocka_unit_test(rules), cmocka_unit_test(holes_are_told), cmocka_unit_test(contradictions_are_told),
                                        cmocka_unit_test(versions_and_limits), cmocka_unit_test(files) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
