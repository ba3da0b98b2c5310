#!/usr/bin/env python3
"""What goes wrong between prefill and decode workers, made to happen: either is killed or stopped at each state, leases run out, cancels, routes that change,
pools that are too small. Each time the output is what an undisturbed run gives, or the typed end that was asked for; every count is back at its start; the merged
log keeps every rule."""
import os
import signal
import time

import tap
from pdset import Router, Scene, reqs, results, ulid, whole, why
from relay import Relay

LONG = dict(prompt="A long tale of a fox " * 8, max_tokens=60, ignore_eos=True, temperature=0.7, seed=9)
FILTER = whole(reqs(20))
TALE = whole([dict(LONG, id="t")])

# ---- prefill workers that go away ----

s = Scene("prefill worker killed before it publishes, the router says local")
P, D = s.P(), s.D()
runs = [s.R.remote(q, P, D) for q in reqs(20)]
P.kill()
for r in runs:
    s.R.local(r, D, new=False, fallback="prefill_worker_gone: it was killed")
s.ok(s.R.wait(runs) and results(s.R, runs) == FILTER, "the output is the same", why(s.R, runs))
s.ok(all(R_["mode"] == "remote" or (R_["mode"] == "local" and R_["fallback"].startswith("prefill_worker_gone") and R_["recomputed_tokens"] + R_["cached_tokens"] == R_["prompt_tokens"] and
                                    R_["transferred_tokens"] == 0) for R_ in map(s.R.result, runs)), "and says how it came to be", why(s.R, runs))
s.end()

s = Scene("prefill worker killed, and no word from the router")
P, D = s.P(), s.D()
s.R.wait([s.R.remote(reqs(1)[0], P, D)])
D.p.send_signal(signal.SIGSTOP)
runs = [s.R.remote(q, P, D) for q in reqs(20, timeouts_ms={"prefill": 1500})]
time.sleep(0.3)             # offered, and not answered
P.kill()
D.p.send_signal(signal.SIGCONT)
s.ok(s.R.wait(runs) and results(s.R, runs) == FILTER, "computed by the decode worker", why(s.R, runs))
kinds = {s.R.result(r)["fallback"].split(":")[0] for r in runs}
s.ok("prefill_worker_gone" in kinds and kinds <= {"prefill_worker_gone", "prefill_timeout"}, "for want of its prefill worker", why(s.R, runs))
s.end()

s = Scene("prefill worker killed, another one takes the same op")
P, P2, D = s.P(), s.P(name="P2"), s.D()
runs = [s.R.request(q) for q in reqs(20)]
for r in runs:
    s.R.event(r["run"], "route_selected")
    s.R.to(D).send(s.R.route(r, "remote", P, D))
P.kill()
for r in runs:
    s.R.event(r["run"], "retry")
    s.R.event(r["run"], "route_selected")
    for w in (D, P2):
        s.R.to(w).send(s.R.route(r, "remote", P2, D))
s.ok(s.R.wait(runs) and results(s.R, runs) == FILTER and {s.R.result(r)["mode"] for r in runs} == {"remote"}, "its KV is used", why(s.R, runs))
s.end()

s = Scene("prefill worker stopped")
P, D = s.P(), s.D()
P.p.send_signal(signal.SIGSTOP)
runs = [s.R.remote(q, P, D) for q in reqs(5, timeouts_ms={"prefill": 300})]
s.ok(s.R.wait(runs) and results(s.R, runs).items() <= FILTER.items() and all(s.R.result(r)["fallback"].startswith("prefill_timeout") for r in runs), "the stage's timeout counts", why(s.R, runs))
P.p.send_signal(signal.SIGCONT)
s.ok(P.until({"runs": 0, "leases_live": 0})[0] and D.until({"offers_early": 0}, 8)[0], "what it offers later is not taken", (P.ledger(), D.ledger()))
s.end()

# ---- decode workers that go away ----

s = Scene("decode worker killed, the KV goes to another")
P, D, D2 = s.P("--lease", "3s"), s.D(), s.D(name="D2")
s.R.wait([s.R.remote(reqs(1)[0], P, D)])
D.p.send_signal(signal.SIGSTOP)
runs = [s.R.remote(q, P, D) for q in reqs(20)]
s.ok(s.R.wait(runs, "kv"), "published", s.R.got)
steps = P.ledger()["steps"]
D.kill()
time.sleep(0.2)
for r in runs:
    s.R.event(r["run"], "retry")
    s.R.event(r["run"], "route_selected")
    op = os.urandom(16) if r["id"] % 2 else None        # a router may count the place as an input of the attempt
    for w in (D2, P):
        s.R.to(w).send(s.R.route(r, "remote", P, D2, op=op))
s.ok(s.R.wait(runs) and results(s.R, runs) == FILTER and {s.R.result(r)["mode"] for r in runs} == {"remote"}, "moved there", why(s.R, runs))
s.ok(P.ledger()["steps"] == steps, "without a second prefill", (steps, P.ledger()))
s.end()

# The decode worker has accepted, and from then on nothing passes in either direction, while the connection stands: each side ends it by itself, at its timeout.
for via in ("inline", "shm"):
    s = Scene(f"{via}: accepted, and then not a word")
    P, D = s.P("--via", via), s.D("--via", via)
    s.R.wait([s.R.remote(reqs(1)[0], P, D)])
    y = Relay(os.path.join(s.dir, "relay"), D, hold=b"accept")
    since = time.monotonic()
    runs = [s.R.request(q) for q in reqs(1, timeouts_ms={"transfer": 500}, cache_salt="not held")]
    s.R.event(runs[0]["run"], "route_selected")
    for w in (D, P):
        s.R.to(w).send(s.R.route(runs[0], "remote", P, y))
    s.ok(s.R.wait(runs, seconds=20) and results(s.R, runs).items() <= FILTER.items() and all((s.R.result(r)["fallback"] or "").startswith("transfer_timeout") for r in runs),
         "it computes the prompt itself", why(s.R, runs))
    good, g = P.until({"moves": 0, "leases_live": 0, "blocks_leased": 0}, 8)
    s.ok(good and time.monotonic() - since < 10 and g["not_given"] == 1, "its giver has done with it too", g)
    y.held = False
    y.close()
    s.end()

s = Scene("decode worker killed, and nobody wants its KV")
P, D = s.P("--lease", "1s"), s.D()
s.R.wait([s.R.remote(reqs(1)[0], P, D)])
D.p.send_signal(signal.SIGSTOP)
runs = [s.R.remote(q, P, D) for q in reqs(10)]
s.R.wait(runs, "kv")
D.kill()
s.ok(s.R.wait(runs, "error"), "its router is told", s.R.got)
held, g = P.until({"leases_live": 0}, 4)
s.ok(held and g["leases_expired"] == 10, "the leases run out", g)
for r in runs:
    s.R.event(r["run"], "failed")
s.end()

for how in "refused", "killed":
    s = Scene(f"offered and over before it is asked for, {how}")
    P, D = s.P(), s.D()
    runs = [s.R.request(q) for q in reqs(10)]
    for r in runs:
        s.R.event(r["run"], "route_selected")
        s.R.to(P).send(s.R.route(r, "remote", P, D))
    s.ok(s.R.wait(runs, "kv") and D.until({"offers_early": 10})[0], "the offers wait", D.ledger())
    if how == "killed":
        P.kill()
    s.ok(D.until({"offers_early": 0}, 8)[0], "and are over", D.ledger())
    t0 = time.monotonic()
    for r in runs:
        s.R.to(D).send(s.R.route(r, "remote", P, D))
    reason = {"refused": "kv_failed", "killed": "prefill_worker_gone"}[how]
    s.ok(s.R.wait(runs) and results(s.R, runs).items() <= FILTER.items() and all(s.R.result(r)["fallback"].startswith(reason) for r in runs), "computed there, for that reason", why(s.R, runs))
    s.ok(time.monotonic() - t0 < 20, "and without waiting for another offer", time.monotonic() - t0)
    s.end()

s = Scene("no decode worker at the address")
P, D = s.P(), s.D()
D.kill()
r = s.R.request(reqs(1)[0])
s.R.event(r["run"], "route_selected")
s.R.to(P).send(s.R.route(r, "remote", P, D))
s.ok(s.R.wait([r], "error", seconds=10) and not s.R.of(r, "kv"), "an error says so", s.R.got)
e = (s.R.of(r, "error") or [{}])[0]
s.ok(e.get("action") == "retry" and "cannot be given its KV" in e.get("message", "") and D.path in e["message"], "with the address", e)
s.R.event(r["run"], "failed")
s.end()

# ---- leases ----

s = Scene("a lease that runs out while its reader is stopped")
P, D = s.P("--lease", "300ms"), s.D()
s.R.wait([s.R.remote(reqs(1)[0], P, D)])
D.p.send_signal(signal.SIGSTOP)
runs = [s.R.remote(q, P, D) for q in reqs(10)]
s.R.wait(runs, "kv")
held, g = P.until({"leases_live": 0}, 5)
s.ok(held and g["leases_expired"] == 10 and g["blocks_leased"] == 0, "its blocks come back", g)
D.p.send_signal(signal.SIGCONT)
s.ok(s.R.wait(runs) and results(s.R, runs).items() <= FILTER.items() and all(s.R.result(r)["fallback"].startswith("lease_ended") for r in runs), "the reader computes it itself", why(s.R, runs))
s.end()

# ---- routes that change ----

s = Scene("remote, then local")
D = s.D()
P = s.P()
runs = [s.R.request(q) for q in reqs(20)]
for r in runs:
    s.R.event(r["run"], "route_selected")
    s.R.to(D).send(s.R.route(r, "remote", P, D))
s.ok(D.until({"expected": 20})[0], "they wait for their KV", D.ledger())
for r in runs:
    s.R.event(r["run"], "fallback")
    s.R.to(D).send(*(s.R.route(r, "local", None, D, fallback=f) for f in ("prefill_failed: out of paper", "said twice")))      # at once: a run takes less than a millisecond
s.ok(s.R.wait(runs) and results(s.R, runs) == FILTER and {s.R.result(r)["fallback"] for r in runs} == {"prefill_failed: out of paper"}, "computed there, for the router's reason", why(s.R, runs))
s.end()

s = Scene("offered before it is asked for")
P, D = s.P(), s.D()
runs = [s.R.request(q) for q in reqs(20)]
for r in runs:
    s.R.event(r["run"], "route_selected")
    s.R.to(P).send(s.R.route(r, "remote", P, D))
s.ok(s.R.wait(runs, "kv") and D.until({"offers_early": 20})[0], "the offers wait", D.ledger())
for r in runs:
    s.R.to(D).send(s.R.route(r, "remote", P, D))
s.ok(s.R.wait(runs) and results(s.R, runs) == FILTER and {s.R.result(r)["mode"] for r in runs} == {"remote"}, "and are taken", why(s.R, runs))
r = s.R.request(reqs(1)[0])
s.R.event(r["run"], "route_selected")
s.R.to(P).send(s.R.route(r, "remote", P, D))
s.ok(D.until({"offers_early": 1})[0] and D.until({"offers_early": 0}, 8)[0] and P.until({"leases_live": 0}, 3)[0], "what nobody asks for is refused after a while", (D.ledger(), P.ledger()))
s.R.event(r["run"], "failed")
s.end()

s = Scene("KV of another prompt under the same name")
P, D = s.P(), s.D()
r = s.R.request(reqs(1)[0])
s.R.event(r["run"], "route_selected")
s.R.to(D).send(s.R.route(r, "remote", P, D))
s.R.to(P).send(s.R.route(dict(r, prompt="Quite another thing"), "remote", P, D))
s.ok(s.R.wait([r]) and results(s.R, [r]).items() <= FILTER.items() and s.R.result(r)["fallback"].startswith("integrity: its KV is of other tokens"), "is not used", s.R.got)
s.end()

s = Scene("KV of another model")
P, D = s.P(m="testdata/tiny/llama-q8_0.gguf"), s.D()
r = s.R.remote(reqs(1)[0], P, D)
s.ok(s.R.wait([r], "error", seconds=10) and "differs" in s.R.of(r, "error")[0]["message"], "is refused before any of it goes, with the field", s.R.got)
s.R.event(r["run"], "fallback")
s.R.local(r, D, new=False, fallback="fingerprint_mismatch")
s.ok(s.R.wait([r]) and results(s.R, [r]).items() <= FILTER.items(), "and computed", s.R.got)
s.end()

s = Scene("a stream that goes on elsewhere")
D = s.D("--stream")
q = dict(LONG, id="t", stop=["zzz"])
first = s.R.local(q, D, mode="aggregated")
s.R.wait([first])
all_, text, reason = TALE[("t", 0)]
s.ok(s.R.result(first)["tokens"] == all_, "the whole of it", s.R.result(first))
pieces = ["".join(t["text"] for t in s.R.of(first, "token")[:k]) for k in range(len(all_) + 1)]
s.R.close()
s.R = Router(os.path.join(s.dir, "R2.trace"))
bad = []
for k in list(range(1, len(all_), 7)) + [len(all_) - 1, len(all_)]:
    r = s.R.request(q)
    s.R.event(r["run"], "route_selected")
    s.R.event(r["run"], "prefill_started")
    s.R.event(r["run"], "prefill_completed")
    s.R.event(r["run"], "decode_started")
    s.R.event(r["run"], "streaming", choice=0, pos=0, tokens=k)
    s.R.event(r["run"], "migrated")
    s.R.out[r["run"]][0] = all_[:k]
    s.R.to(D).send(s.R.route(r, "local", None, D, fallback="migrated: it was killed", resume=b"".join(t.to_bytes(4, "little") for t in all_[:k])))
    s.R.wait([r])
    x, toks = s.R.result(r), s.R.of(r, "token")
    if not x or (x["tokens"], x["text"], x["finish_reason"]) != (all_, text, reason) or [t["pos"] for t in toks] != list(range(k, len(all_))) or \
            [t["token"] for t in toks] != all_[k:] or pieces[k] + "".join(t["text"] for t in toks) != text or not x["fallback"].startswith("migrated") or x["completion_tokens"] != len(all_):
        bad.append((k, x, toks))
s.ok(not bad, "goes on from each place, to the same end", bad[:1])
for bad_route, words in ((dict(mode="local", resume=b"\xff\xff\xff\x7f"), "vocabulary"), (dict(mode="local", resume=b"\x01\x00\x00\x00", n=2), "one choice"),
                         (dict(mode="remote", resume=b"\x01\x00\x00\x00"), "not remote")):
    n = bad_route.pop("n", 1)
    r = s.R.request(dict(q, n=n))
    s.R.expect(r, n)
    mode = bad_route.pop("mode")
    s.R.to(D).send(s.R.route(r, mode, D if mode == "remote" else None, D, **bad_route))
    s.ok(s.R.wait([r]) and words in s.R.of(r, "error")[0]["message"], f"refused: {words}", s.R.got[r["run"]])
s.end()

# ---- in place ----

s = Scene("in place")
P, D = s.P("--lease", "2s"), s.D("--in-place", "--stream")
runs = [s.R.remote(q, P, D) for q in reqs(20)]
s.ok(s.R.wait(runs) and results(s.R, runs) == FILTER and why(s.R, runs) == {"remote None"}, "the output is the same", why(s.R, runs))
three = reqs(6, n=3)
runs = [s.R.remote(q, P, D) for q in three]
for r in runs:
    s.R.expect(r, 3)
s.ok(s.R.wait(runs, n=3) and results(s.R, runs) == whole(three), "also of three choices", why(s.R, runs))
HEAD = "Now these are the foxes that came from the woods, and this is what they met: "
many = [dict(LONG, id=f"p{i}", prompt=HEAD + f"{i} foxes met " * 6, seed=i, max_tokens=90) for i in range(16)]
want = whole(many)
for what in ("lease", "held", "killed"):
    for attempt in range(20):       # a tiny model may be done too soon
        salt = f"{what} {attempt}"  # else all of it is held after the first
        if what == "held":          # what is read in place lies behind blocks of its own
            s.R.wait([s.R.local(dict(id="head", prompt=HEAD, max_tokens=1, cache_salt=salt), D)])
        runs = [s.R.remote(dict(q, cache_salt=salt), P, D) for q in many]
        while not any(len(s.R.of(r, "token")) > 5 for r in runs):
            s.R.pump()
        D.p.send_signal(signal.SIGSTOP)
        s.R.wait(runs, "kv")
        if what != "killed":
            P.until({"leases_live": 0}, 5)
        else:
            P.kill()
            time.sleep(2.1)     # until then what it left is read
        D.p.send_signal(signal.SIGCONT)
        s.R.wait(runs)
        if what == "killed":
            P = s.P("--lease", "2s", name=f"P{attempt}")
        if any(("read in place" if what == "held" else "lease_ended") in (s.R.result(r)["fallback"] or "") for r in runs):
            break
    said = why(s.R, runs)
    s.ok(what != "held" or any(x["cached_tokens"] >= 32 and "read in place" in (x["fallback"] or "") for x in map(s.R.result, runs)), f"{what}: it lay behind blocks that were here",
         [(s.R.result(r)["cached_tokens"], s.R.result(r)["fallback"]) for r in runs])
    s.ok(results(s.R, runs) == want, f"{what} while it is read: the output is the same", said)
    s.ok(any("lease_ended" in x for x in said) and all("lease_ended" in x or "None" in x or "prefill_worker_gone" in x for x in said), f"{what}: what was read too late was computed again", said)
    s.ok(all([t["token"] for t in s.R.of(r, "token")] == s.R.result(r)["tokens"] for r in runs), f"{what}: and no token left twice", said)
s.ok(D.until({"in_place": 0, "blocks_borrowed": 0})[0], "nothing is borrowed any more", D.ledger())
s.end()

# ---- cancels ----

s = Scene("cancel at each state")
P, D = s.P("--lease", "5s"), s.D("--stream")
s.R.wait([s.R.remote(reqs(1)[0], P, D)])
for state in ("before prefill", "right away", "published", "transfer", "decoding", "client gone"):
    if state == "transfer":
        D.p.send_signal(signal.SIGSTOP)
    runs = []
    for i in range(10):
        q = dict(LONG, id=f"{state} {i}", max_tokens=100)
        if state == "before prefill":
            r = s.R.request(q)
            s.R.event(r["run"], "route_selected")
            s.R.to(D).send(s.R.route(r, "remote", P, D))
        else:
            r = s.R.remote(q, P, D)
        runs.append(r)
    if state == "before prefill":
        D.until({"expected": 10})
    elif state in ("published", "transfer"):
        s.ok(s.R.wait(runs, "kv", seconds=5), f"{state}: reached", s.R.got)
    elif state in ("decoding", "client gone"):
        s.ok(s.R.wait(runs, "token", n=2, seconds=10), f"{state}: reached", s.R.got)
    t0 = time.time()
    if state == "client gone":
        for c in s.R.conn.values():
            c.close()
        s.R.conn = {}
        for r in runs:
            if r["run"] not in s.R.ended:
                s.R.event(r["run"], "cancelled")
                s.R.ended.add(r["run"])
    else:
        for r in runs:
            s.R.cancel(r, D, P)
    if state == "transfer":
        time.sleep(0.1)
        D.p.send_signal(signal.SIGCONT)
    free = [w.until({"runs": 0, "blocks_used": 0, "moves": 0}, 5) for w in (P, D)]
    took = time.time() - t0
    s.ok(all(f for f, _ in free) and took < 1, f"{state}: all is free in {took * 1000:.0f} ms", free)
    if state == "client gone":
        continue
    s.ok(s.R.wait(runs, seconds=5) and all(s.R.result(r)["finish_reason"] in ("cancelled", "length") for r in runs), f"{state}: each ends once", s.R.got)
    if state in ("before prefill", "transfer"):
        s.ok({s.R.result(r)["finish_reason"] for r in runs} == {"cancelled"}, f"{state}: all cancelled", why(s.R, runs))
    s.ok(all(len(s.R.of(r, "result")) == 1 for r in runs), f"{state}: and only once", s.R.got)
q = s.R.remote(reqs(1)[0], P, D)
s.ok(s.R.wait([q]) and results(s.R, [q]).items() <= FILTER.items() and s.R.result(q)["mode"] == "remote", "and then it works as before", s.R.got[q["run"]])
s.end()

# ---- pools that are too small ----

for via in ("shm", "inline"):
    s = Scene(f"pools for a few runs ({via})")
    # a block of 16 tokens is 4 KiB here: 16 blocks
    P, D = s.P("--via", via, mem="64KiB"), s.D(mem="64KiB")
    many = [dict(LONG, id=f"m{i}", prompt=f"{i} foxes met " * (2 + i % 9), seed=i, max_tokens=20 + i % 30) for i in range(40)]
    want = whole(many)
    runs = [s.R.remote(q, P, D) for q in many]
    s.ok(s.R.wait(runs, seconds=100) and results(s.R, runs) == want, "all end, and are the same", (why(s.R, runs), [R_ for r in runs if not s.R.result(r) for R_ in s.R.got[r["run"]]], P.ledger(), D.ledger()))
    print("#", D.ledger()["remote"], "by KV,", D.ledger()["local"], "computed,", D.ledger()["preemptions"], "preempted", why(s.R, runs))
    s.end()

s = Scene("KV that decode can never hold")
P, D = s.P(mem="64KiB"), s.D(mem="16KiB")       # 4 blocks
many = reqs(10)
t0 = time.monotonic()
runs = [s.R.remote(q, P, D) for q in many]
good = s.R.wait(runs, seconds=20)
s.ok(good and time.monotonic() - t0 < 10, f"all have ended after {time.monotonic() - t0:.1f} s, not after prefill's 60", (why(s.R, runs), D.ledger()))
small = [r for r in runs if s.R.result(r)["finish_reason"] == "length"]
s.ok(results(s.R, small).items() <= FILTER.items() and 1 <= len(small) < 10, f"those that fit ({len(small)}) are the same", why(s.R, runs))
s.ok(all(s.R.of(r, "error")[0]["class"] == "exhausted" and "KV" in s.R.of(r, "error")[0]["message"] for r in runs if r not in small), "the others are told that there is too little",
     [s.R.of(r, "error") for r in runs if r not in small])
s.end()

s = Scene("KV that waits while another run has the blocks")
P, D = s.P(), s.D("--stream", mem="64KiB")      # 16 blocks: the tale grows to all of them
tale = s.R.local(dict(LONG, id="t", max_tokens=110), D)
s.R.wait([tale], "token", n=5)
runs = [s.R.remote(q, P, D) for q in reqs(20)]
s.ok(s.R.wait(runs + [tale], seconds=20) and results(s.R, runs) == FILTER, "they are the same", why(s.R, runs))
s.ok(all(s.R.result(r)["fallback"] is None or s.R.result(r)["fallback"].startswith("out_of_blocks") for r in runs), "by KV, or for want of blocks", why(s.R, runs))
s.end()

# ---- drains ----

s = Scene("drain in the middle")
P, D = s.P(), s.D()
runs = [s.R.remote(q, P, D) for q in reqs(20)]
s.R.wait(runs[:1], "kv")
P.p.send_signal(signal.SIGTERM)
s.ok(s.R.wait(runs) and results(s.R, runs) == FILTER, "the prefill worker gives what it has in hand", why(s.R, runs))
rc = P.p.wait(20)
s.ok(rc == 0, "and ends", (rc, P.said()))
runs = [s.R.local(dict(q, max_tokens=50), D) for q in reqs(20)]
D.until({"runs": 20}, 1)
D.p.send_signal(signal.SIGTERM)
s.ok(s.R.wait(runs, seconds=20) or any("drains" in x.get("message", "") for r in runs for x in s.R.of(r, "error")), "so does a decode worker", why(s.R, runs))
rc = D.p.wait(20)
s.ok(rc == 0, "and ends too", (rc, D.said()))
s.workers = []
s.R.close()

tap.done()
