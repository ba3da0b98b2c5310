#!/usr/bin/env python3
"""tests/faults/table.tsv and reports.tsv name tests that exist: each file is run by the checks, and the words that tell its drill are in it."""
import os

from tap import done, ok

ROWS = """no worker yet; prefill worker dies before publish; prefill worker dies after publish, before or during the read; prefill done, KV partly sent;
metadata there, buffer gone; checksum or layout mismatch; fingerprint mismatch; transfer timeout, path slow; decode worker dies before streaming;
decode worker dies while streaming; router restarts; worker out of blocks; client gone; duplicate request (same idempotency key); fallback storm;
etcd or events bus gone; disk full, OOM, fd limit; kill -9 of each process at each state; SIGSTOP of each process at each state; client gone at each state;
expired lease; stale generation; flipped byte; slab truncated by its owner; out of blocks; fd limit; slow client; a worker that lies about its load;
a worker that lies about its fingerprint"""


def rows(name):
    with open(f"tests/faults/{name}") as f:
        return [line.rstrip("\n").split("\t") for line in f if not line.startswith("#")]


def missing(spec):
    """Why it is no test; None when it is one."""
    path, _, words = spec.strip().partition(":")
    path = f"tests/{path}"
    if not os.path.isfile(path):
        return f"{path} is not there"
    if path.endswith(".t") and not os.access(path, os.X_OK):
        return f"{path} is not run"
    with open(path) as f:
        text = f.read()
    if not words or words not in text:
        return f"{path} has no '{words}'"
    if path.endswith(".c") and words.replace("_", "").isalnum() and not any(f"cmocka_unit_test{x}({words}" in text for x in ("", "_setup", "_setup_teardown")) and f"static void {words}(" in text:
        return f"{path} does not run {words}"
    return None


table = rows("table.tsv")
ok(all(len(r) == 3 and all(r) for r in table), "table.tsv: row, drills, result", [r for r in table if len(r) != 3])
want = [" ".join(x.split()) for x in ROWS.split(";")]
ok(not set(want) - {r[0] for r in table}, "no row of the failure table is left out", set(want) - {r[0] for r in table})
for r in table:
    why = [m for spec in r[1].split("|") if (m := missing(spec))]
    ok(not why, f"row: {r[0]}", why)
reports = rows("reports.tsv")
ok(len(reports) > 40 and all(len(r) == 3 and all(r) for r in reports), "reports.tsv: report, what went wrong, test", [r for r in reports if len(r) != 3])
why = {r[0]: m for r in reports if not r[2].startswith("- ") and (m := missing(r[2]))}
ok(not why, "each report that applies has its test", why)
ok(not missing("faults/10-killed.t:P_STATES") and missing("faults/10-killed.t:no such words") and missing("faults/nothing.t:x"), "what is not there would be told")
done()
