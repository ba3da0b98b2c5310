"""A set of workers and a router by script: real pd-prefill --listen and pd-decode --listen, and what a router would send them, step by step, with a trace of its own."""
import atexit
import hashlib
import os
import secrets
import select
import signal
import socket
import subprocess
import tempfile
import time

import tap
from packed import msgpack
from tap import B, TINY

ARGS = ["-t", "1", "--chunk", "32", "--max-seqs", "8"]


def ulid():
    alphabet = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
    n = (int(time.time() * 1000) << 80) | secrets.randbits(80)
    return "".join(alphabet[n >> (5 * i) & 31] for i in reversed(range(26)))


class Worker:
    """command: "prefill" or "decode"."""

    def __init__(self, folder, name, command, *args, mem="4MiB", m=TINY, env=None, ready=True):
        self.path = os.path.join(folder, name)
        if os.environ.get("PD_ROLE") and "--role" not in args:
            args = ("--role", os.environ["PD_ROLE"], *args)
        self.at = "unix:" + self.path
        self.name = None        # as it calls itself; a test may set it
        self.trace = self.path + ".trace"
        self.err_path = self.path + ".err"
        r, w = os.pipe()
        self.err = open(self.err_path, "ab")
        self.p = subprocess.Popen([f"{B}/bin/pd-{command}", "-m", m, *ARGS, "--kv-mem", mem, "--listen", self.at, "--ready-fd", str(w), "--trace", self.trace, *args],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.err, pass_fds=[w], env=dict(os.environ, **(env or {})))
        os.close(w)
        atexit.register(self.p.kill)
        self.fd = os.fdopen(r, "rb")
        if ready and self.fd.readline() != b"READY=1\n":
            raise RuntimeError(f"{name} did not become ready: {open(self.err_path).read()}")

    def over_tcp(self):
        """Of one that was given TCP besides: reached there by who is told where it is from now on."""
        self.at = next(w for w in self.said().replace(",", " ").split() if w.startswith("tcp:127.0.0.1:"))
        return self

    def status(self):
        s = socket.socket(socket.AF_UNIX)
        s.settimeout(30)
        s.connect(self.path)
        s.sendall(msgpack.packb({"pd": "status", "v": 1}))
        u = msgpack.Unpacker()
        while True:
            d = s.recv(65536)
            if not d:
                raise ConnectionError("closed")
            u.feed(d)
            for r in u:
                s.close()
                return r

    def ledger(self):
        return self.status()["ledger"]

    def until(self, want, seconds=20):
        """Until the ledger has these counts; the ledger, and whether it had them."""
        end = time.time() + seconds
        while True:
            try:
                g = self.ledger()
            except (ConnectionError, KeyError):         # what it was asked for failed there
                g = {}
            good = all(g.get(k) == v for k, v in want.items())
            if good or time.time() > end:
                return good, g
            time.sleep(0.02)

    def end(self, sig=signal.SIGTERM, seconds=60):
        self.p.send_signal(sig)
        try:
            rc = self.p.wait(seconds)
        except subprocess.TimeoutExpired:
            self.p.kill()
            rc = -99
        return rc, open(self.err_path, errors="replace").read()

    def kill(self):
        self.p.send_signal(signal.SIGKILL)
        self.p.wait()

    def said(self):
        return open(self.err_path, errors="replace").read()


class Conn:
    """One plain msgpack connection to a worker."""

    def __init__(self, worker):
        self.w = worker
        self.s = socket.socket(socket.AF_UNIX)
        self.s.connect(worker.path)
        self.s.setblocking(False)
        self.u = msgpack.Unpacker(max_buffer_size=1 << 28)
        self.gone = False

    def send(self, *recs):
        self.s.setblocking(True)
        try:
            self.s.sendall(b"".join(map(msgpack.packb, recs)))
        except OSError:
            self.gone = True
        self.s.setblocking(False)

    def read(self):
        out = []
        while not self.gone:
            try:
                d = self.s.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                d = b""
            if not d:
                self.gone = True
                break
            self.u.feed(d)
        out.extend(self.u)
        return out

    def close(self):
        self.s.close()
        self.gone = True


class Router:
    """Keeps one connection a worker, remembers all that came by run. Its trace makes a merged log whole."""

    def __init__(self, path=None):
        self.conn = {}
        self.got = {}           # run: [(worker, record)]
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if path else None
        self.out = {}           # run: choice: tokens
        self.ended = set()
        self.path = path
        self.event(None, "starting")

    def event(self, run, state, **kw):
        if self.fd is None:
            return
        e = {"pd": "event", "v": 1}
        if run:
            e["run"] = run
        e.update(state=state, role="route", worker="route@here:1", t_us=int(time.time() * 1e6), mono_us=time.monotonic_ns() // 1000, **kw)
        os.write(self.fd, msgpack.packb(e))

    def close(self):
        self.event(None, "gone")
        for c in self.conn.values():
            c.close()
        self.conn = {}

    def to(self, worker):
        c = self.conn.get(worker)
        if not c or c.gone:
            c = self.conn[worker] = Conn(worker)
        return c

    def request(self, req, run=None):
        """A new run; accepted."""
        r = dict(req, run=run or ulid())
        self.got[r["run"]] = []
        self.out[r["run"]] = {}
        self.event(r["run"], "accepted")
        return r

    def route(self, r, mode, p=None, d=None, op=None, **kw):
        op = op or hashlib.sha256((r["run"] + "prefill").encode()).digest()[:16]
        place = lambda w: {"worker": w.name or ("prefill@" if w is p else "decode@") + str(w.p.pid), "at": w.at} if w else None
        return dict(r, route={"op": op, "policy": "script", "mode": mode, "p": place(p), "d": place(d), "early": False, "fallback": None, **kw})

    def remote(self, req, p, d, run=None, first="d", **kw):
        r = self.request(req, run)
        self.event(r["run"], "route_selected")
        both = [d, p] if first == "d" else [p, d]
        for w in both:
            self.to(w).send(self.route(r, "remote", p, d, **kw))
        return r

    def local(self, r, d, mode="local", new=True, **kw):
        if new:
            r = self.request(r)
            self.event(r["run"], "route_selected")
        self.to(d).send(self.route(r, mode, None, d, **kw))
        return r

    def cancel(self, r, *workers):
        for w in workers:
            self.to(w).send({"pd": "cancel", "v": 1, "run": r["run"]})

    def pump(self, seconds=0.05):
        live = [c for c in self.conn.values() if not c.gone]
        if live:
            select.select([c.s for c in live], [], [], seconds)
        else:
            time.sleep(seconds)
        for c in live:
            for rec in c.read():
                run = rec.get("run")
                self.got.setdefault(run, []).append((c.w, rec))
                if run not in self.out or run in self.ended:
                    continue
                if rec["pd"] == "token":
                    o = self.out[run].setdefault(rec.get("choice", 0), [])
                    self.event(run, "streaming", choice=rec.get("choice", 0), pos=rec["pos"], tokens=1)
                    o.append(rec["token"])
                elif rec["pd"] == "result":
                    self.ends(run)

    def ends(self, run):
        rs = [x for _, x in self.got[run] if x["pd"] == "result"]
        reqn = max([x.get("choice", 0) for x in rs]) + 1
        if len(rs) < getattr(self, "n", {}).get(run, 1):
            return
        for x in rs:
            have = len(self.out[run].get(x.get("choice", 0), []))
            if len(x["tokens"]) > have:
                self.event(run, "streaming", choice=x.get("choice", 0), pos=have, tokens=len(x["tokens"]) - have)
        how = rs[0]["finish_reason"]
        self.event(run, {"cancelled": "cancelled", "error": "failed"}.get(how, "completed"), tokens=sum(len(x["tokens"]) for x in rs))
        self.ended.add(run)

    def expect(self, r, n):
        self.__dict__.setdefault("n", {})[r["run"]] = n

    def wait(self, runs, kind="result", n=1, seconds=60):
        """Until each run has n records of the kind (or of one of these kinds), from anybody, or time is over."""
        end = time.time() + seconds
        while time.time() < end:
            if all(sum(len(self.of(r, k)) for k in (kind if isinstance(kind, tuple) else (kind,))) >= n for r in runs):
                return True
            self.pump()
        return False

    def of(self, r, kind):
        return [x for _, x in self.got[r["run"]] if x["pd"] == kind]

    def result(self, r):
        x = self.of(r, "result")
        return x[0] if x else None


def check(*traces):
    """pd-trace check; its findings without what was lost with a process that was killed."""
    c = tap.run([f"{B}/bin/pd-trace", "check", *traces])
    said, skip = [], False
    for line in c.stdout.decode(errors="replace").split("\n"):
        if not line.startswith(" "):
            skip = " lost: " in line
        if not skip:
            said.append(line)
    c.stdout = "\n".join(said).encode()
    return c


folder = tempfile.TemporaryDirectory()


def reqs(count, **kw):
    return [dict({"id": i, "prompt": f"Once upon a time there were {i} foxes " * (1 + i % 5), "max_tokens": 5 + i % 7, "temperature": 0.8, "seed": i}, **kw) for i in range(count)]


def whole(rs):
    """What the filter gives: by id and choice."""
    out = tap.results(tap.run([f"{B}/bin/pd-decode", "-m", TINY, *ARGS, "--kv-mem", "4MiB", "--format", "json"], tap.lines(rs)).stdout)
    return {(r["id"], r.get("choice", 0)): (r["tokens"], r["text"], r["finish_reason"]) for r in out}


def results(R, runs):
    return {(x["id"], x.get("choice", 0)): (x["tokens"], x["text"], x["finish_reason"]) for r in runs for x in R.of(r, "result")}


def why(R, runs):
    return {(R.result(r) or {}).get("mode", "?") + " " + str((R.result(r) or {}).get("fallback"))[:80] for r in runs}


def at_start(*workers, seconds=20):
    """Nothing is held any more: (all of them, why not)."""
    bad = []
    for w in workers:
        want = {"runs": 0, "blocks_used": 0, "moves": 0, "sequences": 0}
        own = ("leases_live", "blocks_leased", "expected", "blocks_borrowed", "moves_waiting", "offers_early", "in_place")
        want.update({k: 0 for k in own if k in w.ledger()})
        good, g = w.until(want, seconds)
        if not good or g.get("leases_granted", 0) != sum(g.get(f"leases_{k}", 0) for k in ("released", "expired", "revoked")):
            bad.append((w.path, g))
    return not bad, bad


class Scene:
    """Workers and a router by script, in a folder of their own; at its end every count has to be back where it began."""

    def __init__(self, name):
        self.name = name
        self.dir = tempfile.mkdtemp(dir=folder.name)
        self.workers = []
        self.R = Router(os.path.join(self.dir, "R.trace"))

    def P(self, *args, name="P", **kw):
        self.workers.append(Worker(self.dir, name, "prefill", *args, **kw))
        return self.workers[-1]

    def D(self, *args, name="D", **kw):
        self.workers.append(Worker(self.dir, name, "decode", *args, **kw))
        return self.workers[-1]

    def both(self, name, prefer, *args, **kw):
        """A worker that does either, by the command whose side it prefers."""
        self.workers.append(Worker(self.dir, name, prefer, "--role", "both", *args, **kw))
        return self.workers[-1]

    def ok(self, cond, what, note=""):
        tap.ok(cond, f"{self.name}: {what}", note)

    def end(self, seconds=20):
        live = [w for w in self.workers if w.p.poll() is None]
        good, bad = at_start(*live, seconds=seconds)
        self.ok(good, "every count is back at its start", bad)
        self.R.close()
        ends = [w.end() for w in live]
        self.ok(all(rc == 0 for rc, _ in ends), "all drain", ends)
        self.ok(not any(x in w.said() for w in self.workers for x in ("not held", "Sanitizer", "runtime error")), "nobody complains of itself", [w.said() for w in self.workers])
        c = check(self.R.path, *[w.trace for w in self.workers])
        self.ok(c.returncode == 0, "the merged log keeps every rule", c.stdout + c.stderr)
