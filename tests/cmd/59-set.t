#!/usr/bin/env python3
"""Whole sets brought up by pd-up, on a tiny model: what comes out is what the filters give, to the bit; the traces hold; nothing is left."""
import json
import os
import subprocess
import tempfile

import tap
from tap import B, TINY, decode, lines, ok, prefill, records, results, run, trace

tmp = tempfile.TemporaryDirectory()
REQS = [{"id": i, "prompt": f"Once upon a time there were {i} foxes" * (1 + i % 4), "max_tokens": 5 + i % 7, "temperature": 0.8, "seed": i} for i in range(24)]
ASK = 'socat -t 600 - "UNIX-CONNECT:$PD_ROUTE"'


def up(which, command, data, *args):
    d = os.path.join(tmp.name, which)
    r = run(["scripts/pd-up", which, "-m", TINY, "--dir", d, "--workers", "-t 1 --chunk 32 --max-seqs 8 --kv-mem 4MiB", *args, "--", "sh", "-c", command], data, env={"B": B})
    return d, r


def tokens(recs):
    return {(r["id"], r["choice"]): (r["tokens"], r["text"], r["finish_reason"]) for r in recs}


ARGS = ["-t", "1", "--chunk", "32", "--max-seqs", "8", "--kv-mem", "4MiB"]
kv = run(prefill(*ARGS, m=TINY), lines(REQS)).stdout
want = tokens(results(run(decode(*ARGS, "--format", "json", m=TINY), kv).stdout))
for which, mode, processes, args in (("1P1D", {"remote"}, 3, []), ("2P2D", {"remote"}, 5, []), ("1A", {"aggregated"}, 2, []), ("2A", {"aggregated"}, 3, []),
                                     ("2B", {"remote"}, 3, []), ("2B", {"aggregated"}, 3, ["--route", "--policy aggregated"]), ("1P1D2B", {"remote"}, 5, [])):
    d, r = up(which, ASK, lines(REQS), *args)
    got = results(r.stdout)
    ok(r.returncode == 0 and tokens(got) == want, f"{which}: its results are the filters', to the bit", r)
    ok({x["mode"] for x in got} == mode and all(x["fallback"] is None for x in got), f"{which}: done as {mode}", got)
    logs = [os.path.join(d, f) for f in os.listdir(d) if f.endswith(".trace")]
    c = run(trace("check", *logs))
    ok(c.returncode == 0 and len(logs) == processes and f"runs {len(REQS)}, completed {len(REQS)}," in c.stdout.decode() and "violations 0" in c.stdout.decode(), f"{which}: the traces hold", c)
    ok(not [f for f in os.listdir(d) if not f.endswith((".trace", ".log"))], f"{which}: logs and traces are left, and nothing else", os.listdir(d))
# Requests of 900 KB, whose answers from prefill are as long: no two ends wait for each other to read, and nobody is sent more than it can take.
LARGE = [dict(q, x="y" * 900000) for q in REQS]
for which in ("1P1D", "1A"):
    d, r = up(which, ASK, lines(LARGE))
    ok(r.returncode == 0 and tokens(results(r.stdout)) == want and all(x["fallback"] is None for x in results(r.stdout)), f"{which}: large requests are served alike", r.stdout[-500:])
ok(subprocess.run(["pgrep", "-f", tmp.name], stdout=subprocess.DEVNULL).returncode == 1, "no process is left")
d, r = up("1P1D", f'{B}/bin/pd-route --check --worker "unix:$PD_ROUTE" --format json', "")
ok(r.returncode == 0 and [x["match"] for x in records(r.stdout)] == ["ok"], "the router can be asked which of them fit together", r)
d, r = up("1P1D", ASK, lines(REQS[:1]), "--decode", "--block-size 32")
ok(r.returncode == 3 and not r.stdout and b"block_size differs (prefill 16, decode 32)" in r.stderr, "a set between whose workers no KV can go is not served, and the field is named", r)
d, r = up("1P1D", "exit 3", "", "--prefill", "--no-such-option")
ok(r.returncode == 1 and b"p0 ended with status 2" in r.stderr and b"--no-such-option" in r.stderr, "a worker's own words about an option are shown", r)
tap.done()
