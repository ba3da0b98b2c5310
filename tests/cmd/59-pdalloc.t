#!/usr/bin/env python3
"""An allocation refused in a prefill or decode worker while it serves (make V=fault): the run comes out as without, or fails by a typed error or a connection
that closes; the worker lives, serves the next one as before, holds nothing, and drains."""
import os
import re
import tempfile

import pdset
import tap
from pdset import ARGS, Router, Worker, ulid
from tap import TINY, ok

tmp = tempfile.TemporaryDirectory()
V = os.environ.get("V", "")
if V == "tsan":
    print("1..0 # SKIP no fault points in V=tsan")
    raise SystemExit
FAULT = tap.B if V else f"{tap.B}/fault"        # of the plain build's own: V=fault, which `make check` has made
STEP = 1 if os.environ.get("LONG") else 6
REQ = {"id": 1, "prompt": "Once upon a time there were foxes " * 3, "max_tokens": 6, "temperature": 0.8, "seed": 3}
count = os.path.join(tmp.name, "count")


def worker(name, command, when, *args):
    pdset.B = FAULT if when else tap.B
    return Worker(tmp.name, name, command, *args, env={"PD_FAULT": f"malloc:fail:{when}", "PD_FAULT_COUNT": count} if when else None)


def ask(R, P, D):
    c, told = R.to(D), False
    r = R.remote(REQ, P, D)
    for _ in range(400):                # 8 s: nobody waits for what cannot come
        if R.of(r, "result") or c.gone:
            break
        if not told and (R.conn[P].gone or any(w is P and x["pd"] == "error" for w, x in R.got[r["run"]])):
            R.local(r, D, new=False, fallback="prefill_failed")         # as a router does
            told = True
        R.pump(0.02)
    x = R.result(r)
    return x["tokens"] if x and x["finish_reason"] == "length" else "error" if x and R.of(r, "error") else "closed" if c.gone else "nothing"


def one(victim, when, via):
    P, D = worker("P", "prefill", victim == "P" and when, "--via", via, "--lease", "1s"), worker("D", "decode", victim == "D" and when, "--via", via, "--in-place")
    R = Router()
    first = ask(R, P, D)
    R.close()
    R = Router()
    second = ask(R, P, D)
    # An offer of a run that D has lost waits there for 5 s, as there is no router to cancel it.
    free = [w.until({"runs": 0, "blocks_used": 0, "moves": 0}, 9) for w in (P, D)]
    R.close()
    return first, second, all(f for f, _ in free) or [g for f, g in free if not f], P.end()[0], D.end()[0]


for via in ("shm", "inline"):
    for victim in "PD":
        if os.path.exists(count):
            os.unlink(count)
        good, again, *rest = one(victim, 10 ** 9, via)
        last = int(re.search(r"malloc\D+(\d+)", open(count).read()).group(1))
        ok(good == again and rest == [True, 0, 0] and isinstance(good, list), f"{via}, {victim}: {last} allocations, none refused", (good, again, rest))
        bad, said = [], {}
        for when in range(last - 160, last + 1, STEP):
            try:
                got = one(victim, when, via)
            except RuntimeError:
                continue                # it was not ready yet
            kind = "same" if got[0] == good else got[0]
            said[str(kind)] = said.get(str(kind), 0) + 1
            if kind not in ("same", "error", "closed") or (got[1] != good and got[1] not in ("error", "closed")) or got[2:] != (True, 0, 0):
                bad.append((when, got))
        ok(not bad and said.get("same", 0) > 5, f"{via}, {victim}: each of the last ones refused: {said}", bad)
tap.done()
