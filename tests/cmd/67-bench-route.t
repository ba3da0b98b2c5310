#!/usr/bin/env python3
"""make bench-route's live parts run from end to end (SHORT=1: a tiny model, few requests): three modes over one set, every request answered, every decision made
again to the byte; and what the log of it tells. No figure is judged here."""
import json
import os
import subprocess

import tap
from tap import B, ok

env = dict(os.environ, SHORT="1", B=os.path.relpath(B))
got = subprocess.run(["scripts/bench-route", "live", "replay"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=500)
ok(got.returncode == 0, "bench-route live replay, short: exit 0", got.stdout + got.stderr)
rows = {r["name"]: r for r in map(json.loads, open("build/bench/route-short.jsonl"))} if got.returncode == 0 else {}
value = {n: r["value"] for n, r in rows.items()}
ok(all(value.get(f"live.attained.{m}") == 1 for m in ("aggregated", "fixed", "conditional")), "every mode answers every request in time", value)
ok(all(f"live.goodput_ratio.{x}" in value for x in ("low", "high")) and 0 <= value.get("live.remote", -1) <= 1 and rows["live.ttft_covered"]["n"] > 50, "the comparison and the estimates are there", rows)
ok(value.get("replay.identical") == 60 and value.get("replay.different") == 0, "sixty decisions are the same when made again", value)
ok(rows and all(r["pass"] is None for r in rows.values()), "a short run judges no figure", rows)
name = subprocess.run([f"{B}/bin/pd-trace", "ls", "build/bench/routes.mp"], stdout=subprocess.PIPE, text=True).stdout.split()[:1]
why = subprocess.run([f"{B}/bin/pd-trace", "why", *name, "build/bench/routes.mp"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
ok(why.returncode == 0 and name[0] in why.stdout and "conditional" in why.stdout, "pd-trace why tells the first of them", why.stdout + why.stderr)
tap.done()
