#!/usr/bin/env python3
"""make bench-serve runs from end to end (SHORT=1: a tiny model, a few of each): every part brings its rows, and nothing is held or lost on the way. No figure is
judged here."""
import json
import os
import subprocess
import sys

import tap

env = dict(os.environ, SHORT="1", B=os.environ.get("B", "build"))
if not all(os.access(f"{env['B']}/tools/{t}", os.X_OK) for t in ("bench_serve", "bench_xfer")):
    tap.skip("bench-serve, short", "its tools are not built (make units)")
    tap.done()
got = subprocess.run(["scripts/bench-serve"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300)
tap.ok(got.returncode == 0, "bench-serve, short: exit 0", got.stdout + got.stderr)
rows = {r["name"]: r for r in map(json.loads, open("build/bench/serve-short.jsonl"))} if got.returncode == 0 else {}
for part, names in {
        "route": ["route.added_us.p50", "route.added_us.p99", "route.rate"], "mapped": ["shm.mapped_us.64MiB", "shm.verify_ms.64MiB"],
        "decode": ["decode16.engine", "decode16.worker", "decode16.share"], "ttft": [f"ttft.{k}_more_ms.64" for k in ("remote", "in_place", "aggregated")],
        "cancel": ["cancel.free_ms.p99"], "leak": [f"leak.{k}.{u}" for k in ("d0", "p0", "route") for u in ("kib", "fds")]}.items():
    tap.ok(all(n in rows for n in names), f"{part}: its rows are there", sorted(rows))
tap.ok(sum(r["value"] for n, r in rows.items() if n.startswith("cancel.in.")) == 20, "20 cancels came, each in a state that the trace names", rows)
tap.ok(all(rows[f"leak.{k}.fds"]["value"] == 0 for k in ("d0", "p0", "route") if rows), "200 runs leave no descriptor open", rows)
tap.ok(rows and all(r["pass"] is None for r in rows.values()), "a short run judges no figure", rows)
tap.done()
