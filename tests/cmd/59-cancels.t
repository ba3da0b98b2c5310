#!/usr/bin/env python3
"""A hand-over cancelled at each of its points, by each way between two daemons: all is free within a second, each run ends once, and the merged log keeps every
rule. (make bench-kv does it more than a thousand times; make check-rdma by rdma.)"""
import cancels
from tap import done, ok

READ = {"expected", "prefilled", "offered", "accepted", "done, unverified", "verified", "decoding"}      # of states that the gate can tell
MORE = {"inline": {"transferring", "committed"}, "tcp": {"transferring", "committed"}, "shm": {"committed"}, "in_place": set()}
for way in cancels.WAYS:
    s = cancels.Sweep(way)
    took, states = s.many(len(s.points()) * 3)
    want = READ | MORE[way] if way in MORE else {"expected", "at a byte out", "at a byte back", "decoding"}
    ok(max(took) < 1, f"{way}: {len(took)} cancels, all is free after {max(took) * 1e3:.0f} ms at most", took)
    ok(want <= set(states), f"{way}: in every state", states)
    wrong = s.end()
    ok(not wrong, f"{way}: both drain, and the merged log keeps every rule", wrong)
done()
