#!/usr/bin/env python3
"""Daemons and pd-kvsend on two RDMA devices: the output is to the bit what the filter gives; a link that dies costs no token, and every count is back at its start."""
import os
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cmd"))
if "RDMA_VM" not in os.environ:
    print("1..0 # skip not in the guest of scripts/rdma-vm")
    sys.exit()
import cancels
import pdset
import tap
from pdset import ARGS, Router, Worker, check
from tap import B, TINY, ok, run

tmp = tempfile.TemporaryDirectory()
A, D_ENV = {"PD_RDMA_DEVICE": "rxe_a"}, {"PD_RDMA_DEVICE": "rxe_b"}


def reqs(count, first=0):
    return [{"id": i, "prompt": f"Once upon a time there were {i} foxes " * (4 + i % 5), "max_tokens": 5 + i % 7, "temperature": 0.8, "seed": i} for i in range(first, first + count)]


def key(rs):
    return {r["id"]: (r["tokens"], r["text"], r["finish_reason"]) for r in rs}


WHOLE = key(tap.results(run([f"{B}/bin/pd-decode", "-m", TINY, *ARGS, "--kv-mem", "4MiB", "--format", "json"], tap.lines(reqs(40))).stdout))


def got(R, runs):
    return key([x for r in runs for x in R.of(r, "result")])


def want(runs, first=0):
    return {i: WHOLE[i] for i in range(first, first + len(runs))}


def sent():
    return int(open("/sys/class/net/a0/statistics/tx_bytes").read())


def start(name, via="rdma,inline", d_via="rdma,inline"):
    P = Worker(tmp.name, name + "P", "prefill", "-v", "--lease", "3s", "--via", via, env=A)
    D = Worker(tmp.name, name + "D", "decode", "-v", "--via", d_via, env=D_ENV)
    return P, D, Router(os.path.join(tmp.name, name + "R.trace"))


def close(name, R, *workers):
    for w in workers:
        if w.p.poll() is None:
            counts = {"runs": 0, "blocks_used": 0, "moves": 0, "sequences": 0}
            counts.update({"leases_live": 0} if "leases_live" in w.ledger() else {"expected": 0})
            good, g = w.until(counts)
            ok(good, f"{name}: every count of {w.path[-1]} is back at its start", g)
    R.close()
    ends = [w.end() for w in workers if w.p.poll() is None]
    ok(all(rc == 0 for rc, _ in ends), f"{name}: all drain", ends)
    c = check(R.path, *[w.trace for w in workers])
    ok(c.returncode == 0, f"{name}: the merged log keeps every rule", c.stdout + c.stderr)


P, D, R = start("many")
was = sent()
runs = [R.remote(q, P, D) for q in reqs(12)]
R.wait(runs)
err = open(P.err_path).read()
ok(got(R, runs) == want(runs), "many: to the bit what the filter gives", got(R, runs))
bytes_ = sum(x["kv_bytes"] for r in runs for x in R.of(r, "result"))
ok(all(x["mode"] == "remote" and x["kv_bytes"] > 0 for r in runs for x in R.of(r, "result")), "many: none was recomputed", [R.of(r, "result") for r in runs])
ok("connected, by rdma, inline" in err, "many: by rdma", err)
ok(sent() - was > bytes_, "many: over the link", (sent() - was, bytes_))
close("many", R, P, D)

P, D, R = start("other", d_via="inline")
runs = [R.remote(q, P, D) for q in reqs(2)]
R.wait(runs)
err = open(P.err_path).read()
ok(got(R, runs) == want(runs) and "by inline (rdma: the other side does not offer it" in err or "connected, by inline" in err, "the taker does not offer it: in the stream, and it is said", err)
close("other", R, P, D)

for via, how in (("rdma", "local"), ("rdma,inline", "remote")):
    name = f"blocks of 32 into 16 by {via}"
    P = Worker(tmp.name, via + "cP", "prefill", "-v", "--via", via, "--block-size", "32", env=A)
    D = Worker(tmp.name, via + "cD", "decode", "-v", "--via", via, "--allow-convert", "block_size", env=D_ENV)
    R = Router(os.path.join(tmp.name, via + "cR.trace"))
    r = R.remote(dict(reqs(1)[0], timeouts_ms={"prefill": 3000}), P, D)
    R.wait([r])
    x, said = R.result(r), P.said() + D.said()
    ok(got(R, [r]) == want([r]) and x["mode"] == how and x.get("converted", "") == ("block_size" if how == "remote" else ""), f"{name}: {how}", (x, said))
    ok("rdma: what has to be converted cannot be written straight into its place" in said, f"{name}: not by rdma, and it is said why", said)
    close(name, R, P, D)

P = Worker(tmp.name, "plainP", "prefill", "-v", env=A)
D = Worker(tmp.name, "plainD", "decode", "-v", "--listen", "tcp-listen:127.0.0.1:0", env=D_ENV).over_tcp()
R = Router(os.path.join(tmp.name, "plainR.trace"))
r = R.remote(reqs(1)[0], P, D)
R.wait([r])
ok(got(R, [r]) == want([r]) and "connected, by rdma, tcp, inline" in P.said() and D.ledger()["taken_rdma"] == 1, "nobody says --via: over TCP by rdma, as there are devices", P.said() + D.said())
close("plain", R, P, D)

P, D, R = start("cut")
r = R.remote(reqs(1)[0], P, D)
R.wait([r])
subprocess.check_call(["tc", "qdisc", "add", "dev", "a0", "root", "netem", "loss", "100%"])
runs = [R.remote(q, P, D) for q in reqs(4, 1)]
R.wait(runs)
subprocess.check_call(["tc", "qdisc", "del", "dev", "a0", "root"])
ok(got(R, runs) == want(runs, 1), "cut: the link is dead: the same tokens", (got(R, runs), open(P.err_path).read(), open(D.err_path).read()))
ok(all(x["mode"] == "remote" and x["kv_bytes"] > 0 for r in runs for x in R.of(r, "result")), "cut: they went on over the next connection", [R.of(r, "result") for r in runs])
ok("inline (rdma: 10.9.1.2 did not answer" in open(P.err_path).read(), "cut: by another way, and it is said", open(P.err_path).read())
close("cut", R, P, D)

# ---- cancels
s = cancels.Sweep("rdma", p_env=A, d_env=D_ENV)
took, states = s.many(60)
ok(max(took) < 1, f"{len(took)} cancels, all is free after {max(took) * 1e3:.0f} ms at most", took)
ok({"expected", "prefilled", "offered", "accepted", "done, unverified", "verified", "committed", "decoding"} <= set(states), "in every state", states)
wrong = s.end()
ok(not wrong, "cancels: both drain, and the merged log keeps every rule", wrong)

# ---- pd-kvsend, two of them
with open(f"{tmp.name}/a.kv", "wb") as f:
    f.write(run([f"{B}/bin/pd-prefill", "-m", TINY, *ARGS, "--kv-mem", "4MiB"], tap.lines(reqs(8))).stdout)
x = subprocess.Popen([f"{B}/bin/pd-kvsend", "-v", "--via", "rdma", "-i", f"unix-listen:{tmp.name}/s"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ, **D_ENV))
y = subprocess.run([f"{B}/bin/pd-kvsend", "-v", "--via", "rdma", "-i", f"{tmp.name}/a.kv", "-o", f"unix:{tmp.name}/s"], capture_output=True, env=dict(os.environ, **A), timeout=60)
out, err = x.communicate(timeout=60)
z = run([f"{B}/bin/pd-decode", "-m", TINY, *ARGS, "--kv-mem", "4MiB", "--format", "json"], out)
ok(y.returncode == 0 and x.returncode == 0 and b"KV comes by rdma" in err, "pd-kvsend --via rdma", y.stderr + err)
ok(key(tap.results(z.stdout)) == {i: WHOLE[i] for i in range(8)}, "pd-kvsend: what is decoded from it is the same", z.stderr)
x = subprocess.Popen([f"{B}/bin/pd-kvsend", "-v", "--via", "rdma", "-i", f"unix-listen:{tmp.name}/s"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ, PD_RDMA_DEVICE="nonesuch"))
y = subprocess.run([f"{B}/bin/pd-kvsend", "-v", "--via", "rdma", "-i", f"{tmp.name}/a.kv", "-o", f"unix:{tmp.name}/s"], capture_output=True, env=dict(os.environ, **A), timeout=60)
out, err = x.communicate(timeout=60)
ok(y.returncode == 3 and b"rdma: the other side has none: rdma: there is no device 'nonesuch'" in y.stderr, "no device at one end, and no other way: refused, and it is said why", (y.returncode, y.stderr + err))
tap.done()
