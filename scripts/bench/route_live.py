"""The live parts of scripts/bench-route: three modes of one set of workers under one load, and a recorded run that is decided again."""
import collections
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

B = os.environ.get("B") or "build"
TINY = "testdata/tiny/llama-q4_1.gguf"
SHORT, LONG = os.environ.get("SHORT") == "1", os.environ.get("LONG") == "1"
MODES = ("aggregated", "fixed", "conditional")
# Chats that stream while documents are read: what a prefill beside them costs their pace is what separation is for.
CLASSES = ["name=chat,weight=6,isl=32-128,osl=24-64", "name=doc,weight=1,isl=400-900,osl=8-16"]
SLO = "ttft=1s,tpot=20ms"
if SHORT:
    CLASSES, SLO = ["name=chat,weight=6,isl=8-32,osl=4-8", "name=doc,weight=1,isl=64-160,osl=2-4"], "ttft=10s,tpot=10s"


def out(*cmd, **kw):
    r = subprocess.run([str(x) for x in cmd], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kw)
    if r.returncode:
        sys.exit(f"bench-route: {cmd[0]}: {r.stderr.decode(errors='replace').strip()}")
    return r.stdout


class Set:
    """Two workers of role both, one thread each, and a router a mode over them: an idle router costs nothing, and what each has learnt stays. Prompts are never
    held from before (--prefix-cache off), as the modes get the same ones one after the other."""
    def __init__(self, model, profile=None):
        self.dir = tempfile.mkdtemp(prefix="pd-live-")
        self.up = subprocess.Popen(["scripts/pd-up", "2B", "-m", model, "--dir", self.dir, "--workers", "-t 1 --prefix-cache off", "--route",
                                    "--policy conditional" + (f" --profile {profile}" if profile else ""), "--", "sh", "-c", "echo up; exec cat"],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if self.up.stdout.readline() != b"up\n":
            sys.exit(f"bench-route: pd-up: {self.up.stderr.read().decode()}")
        self.routers = [subprocess.Popen([f"{B}/bin/pd-route", "--listen", f"unix:{self.dir}/{m}", "--worker", f"unix:{self.dir}/b0", "--worker", f"unix:{self.dir}/b1",
                                          "--policy", m, "-q"], stdin=subprocess.DEVNULL) for m in MODES[:2]]
        self.at = {"aggregated": f"{self.dir}/aggregated", "fixed": f"{self.dir}/fixed", "conditional": f"{self.dir}/route"}
        end = time.time() + 30
        while any(self.ledger(m).get("workers_ready", 0) < 2 for m in MODES):
            if time.time() > end:
                sys.exit("bench-route: a router does not see its workers")
            time.sleep(0.1)

    def ledger(self, mode):
        r = subprocess.run([f"{B}/bin/pd-route", "--status", f"unix:{self.at[mode]}", "--format", "json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        return json.loads(r.stdout).get("ledger", {}) if r.stdout else {}

    def load(self, mode, requests, *args):
        """What score makes of it."""
        with open(os.path.join(self.dir, "results"), "wb") as f:
            r = subprocess.run([f"{B}/bin/pd-bench", "load", "-i", requests, "-o", f"unix:{self.at[mode]}", *map(str, args)], stdout=f, stderr=subprocess.PIPE)
        if r.returncode:
            sys.exit(f"bench-route: load, {mode}: {r.stderr.decode(errors='replace').strip()}")
        return json.loads(out(f"{B}/bin/pd-bench", "score", "-i", f.name, "--format", "json"))

    def end(self):
        for p in self.routers:
            p.terminate()
        for p in self.routers:
            p.wait()
        self.up.stdin.close()
        if self.up.wait(120):
            sys.exit(f"bench-route: pd-up: {self.up.stderr.read().decode()}")
        return f"{self.dir}/route.trace"


def gen(to, model, seed, *args):
    out(f"{B}/bin/pd-bench", "gen", "-m", model, "--seed", seed, "--slo", SLO, *[x for c in CLASSES for x in ("--class", c)], *args, "-o", to)
    return to


def judged(trace, since):
    """(estimate, outcome) of the first decision of each run of a trace that was decided after the first `since` ones."""
    route, got = {}, []
    for r in map(json.loads, out(f"{B}/bin/pd-trace", "cat", trace).splitlines()):
        if r["pd"] == "route" and r.get("chosen"):
            route[json.dumps(r["op"])] = r
        elif r["pd"] == "outcome" and r["finish_reason"] in ("length", "stop") and r["attempt"] == 1 and (d := route.pop(json.dumps(r["op"]), None)) and "ttft_us" in r:
            got.append((d, r))
    return got[since:]


def live(row, model):
    model = TINY if SHORT else model
    seconds, blocks = (1, 2) if SHORT else (60, 5) if LONG else (10, 3)
    with tempfile.TemporaryDirectory(prefix="pd-live-") as tmp:
        profile = os.path.join(tmp, "profile.json")
        out(f"{B}/bin/pd-bench", "calibrate", "-m", model, "-t", 1, *(["--quick"] if not LONG else []), "-o", profile)
        s = Set(model, profile)
        # what either fixed mode can do: so many at once, one after the other
        n = 40 if not LONG else 160
        warm = gen(os.path.join(tmp, "warm"), model, 1, "-n", n)
        rate = {m: (r := s.load(m, warm, "--concurrency", 8))["ended"] / r["span_s"] for m in MODES}
        learnt = n
        offered = min(0.8 * max(rate[m] for m in MODES[:2]), 50 if SHORT else 1e9)
        for m in MODES:
            row(f"live.capacity.{m}", rate[m], "requests/s", n)
        row("live.offered", offered, "requests/s", 1)
        good, met, ratio = collections.defaultdict(list), collections.Counter(), collections.Counter()
        for b in range(blocks):
            reqs = gen(os.path.join(tmp, f"block{b}"), model, 100 + b, "--rate", f"{offered:.4f}", "--duration", f"{seconds}s", "-n", int(3 * offered * seconds) + 10)
            for m in MODES[b % 3:] + MODES[:b % 3]:
                r = s.load(m, reqs)
                good[m].append(r["met"] / seconds)
                met[m] += r["met"]
                ratio[m] += r["requests"]
                if m == "conditional":
                    where = r["mode"]
                    ratio["remote"] += where.get("remote", 0)
        trace = s.end()
        for m in MODES:
            row(f"live.goodput.{m}", statistics.mean(good[m]), "requests/s", blocks)
            row(f"live.attained.{m}", met[m] / ratio[m], "", ratio[m])
        better = max(MODES[:2], key=lambda m: sum(good[m]))
        rng = random.Random(1)
        draws = sorted(sum(good["conditional"][i] for i in k) / max(1e-9, sum(good[better][i] for i in k))
                       for k in ([rng.randrange(blocks) for _ in range(blocks)] for _ in range(10000)))
        row(f"live.goodput_ratio.{better}", sum(good["conditional"]) / max(1e-9, sum(good[better])), "", blocks)
        row("live.goodput_ratio.low", draws[250], "", blocks)
        row("live.goodput_ratio.high", draws[9749], "", blocks)
        row("live.remote", ratio["remote"] / max(1, ratio["conditional"]), "", ratio["conditional"])
        pairs = judged(trace, learnt)
        inside = [o["ttft_us"] <= d["estimate"]["ttft"][1] for d, o in pairs]
        error = [abs(o["ttft_us"] - d["estimate"]["ttft"][0]) / o["ttft_us"] for d, o in pairs]
        row("live.ttft_covered", sum(inside) / max(1, len(inside)), "", len(inside))
        row("live.ttft_error", statistics.median(error) if error else 1, "", len(error))
        os.makedirs("build/bench", exist_ok=True)
        os.replace(trace, "build/bench/routes-live.mp")


def replay(row, model):
    n = 60 if SHORT else 2000
    with tempfile.TemporaryDirectory(prefix="pd-live-") as tmp:
        s = Set(TINY)
        reqs = os.path.join(tmp, "reqs")
        out(f"{B}/bin/pd-bench", "gen", "-m", TINY, "-n", n, "--rate", 200, "--class", "name=chat,weight=4,isl=16-64,osl=4-8,prefix=partial", "--class", "name=doc,isl=64-200,osl=2-4",
            "-o", reqs)
        s.load("conditional", reqs)
        trace = s.end()
        os.makedirs("build/bench", exist_ok=True)
        os.replace(trace, "build/bench/routes.mp")
    r = subprocess.run([f"{B}/bin/pd-trace", "replay", "build/bench/routes.mp", "--expect-identical", "--format", "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    last = json.loads(r.stdout.splitlines()[-1]).get("summary", {}) if r.stdout else {}
    same = last.get("identical", 0)
    row("replay.identical", same, "decisions", n)
    row("replay.different", last.get("different", 1) + last.get("unreadable", 0) if r.returncode == 0 else 1, "decisions", n)
