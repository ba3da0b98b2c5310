"""A whole set for drills: real pd-route, pd-prefill --listen and pd-decode --listen in a build with fault points (base/fault.h), on a tiny model, and clients.
A fault is given by process: {"p0": "kv_published:kill:1"} kills p0 when it has told its first kv_published; with `stop` it stands there until cont()."""
import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cmd"))
try:
    import msgpack
except ImportError:             # the environment of the tests has it
    if "PD_PY" not in os.environ or os.environ.get("PD_PY_TRIED"):
        raise
    os.execve(os.environ["PD_PY"], [os.environ["PD_PY"], *sys.argv], dict(os.environ, PD_PY_TRIED="1"))

import tap
from tap import TINY, ok

PLAIN = tap.B
BIN = tap.B if os.environ.get("V") in ("fault", "asan", "tsan") else f"{tap.B}/fault"
ARGS = ["-t", "1", "--chunk", "16", "--max-seqs", "8"]
tmp = tempfile.TemporaryDirectory()
n_sets = 0


def reqs(n, **kw):
    return [dict({"id": i, "prompt": f"Once upon a time there were {i} foxes " * (1 + i % 4), "max_tokens": 6 + i % 9, "temperature": 0.8, "seed": i}, **kw) for i in range(n)]


def told(records):
    """What the client may hold on to: by id and choice."""
    return {(r["id"], r.get("choice", 0)): (r["tokens"], r["text"], r["finish_reason"]) for r in records if r["pd"] == "result"}


def undisturbed(rs):
    return told(tap.results(tap.run([f"{PLAIN}/bin/pd-decode", "-m", TINY, *ARGS, "--kv-mem", "8MiB", "--format", "json"], tap.lines(rs)).stdout))


class Client:
    """One connection; what came is in .got."""

    def __init__(self, path):
        self.s = socket.socket(socket.AF_UNIX)
        self.s.connect(path)
        self.got, self.gone, self.u = [], False, msgpack.Unpacker(strict_map_key=False)
        self.t = threading.Thread(target=self.read, daemon=True)
        self.t.start()

    def read(self):
        while True:
            try:
                data = self.s.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self.gone = True
                return
            self.u.feed(data)
            self.got.extend(self.u)

    def send(self, *records):
        try:
            self.s.sendall(b"".join(msgpack.packb(r) for r in records))
        except OSError:
            self.gone = True

    def of(self, kind):
        return [r for r in list(self.got) if r.get("pd") == kind]

    def wait(self, n, kind="result", seconds=40):
        end = time.time() + seconds
        while len(self.of(kind)) < n and time.time() < end and not (self.gone and not self.t.is_alive()):
            time.sleep(0.005)
        return len(self.of(kind)) >= n

    def close(self):
        try:
            self.s.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.s.close()


class Proc:
    def __init__(self, folder, name, cmd, fault=None, preexec=None):
        self.name, self.path = name, os.path.join(folder, name)
        self.trace, self.err_path = self.path + ".trace", self.path + ".err"
        self.cmd, self.preexec = cmd, preexec
        self.start(fault)

    def start(self, fault=None):
        r, w = os.pipe()
        with open(self.err_path, "ab") as err:
            self.p = subprocess.Popen([*self.cmd, "--listen", f"unix:{self.path}", "--ready-fd", str(w), "--trace", self.trace], stdin=subprocess.DEVNULL,
                                      stdout=subprocess.DEVNULL, stderr=err, pass_fds=[w], env=dict(os.environ, **({"PD_FAULT": fault} if fault else {})),
                                      preexec_fn=self.preexec)
        os.close(w)
        atexit.register(self.p.kill)
        with os.fdopen(r, "rb") as f:
            if f.readline() != b"READY=1\n":
                raise RuntimeError(f"{self.name} did not become ready: {self.said()}")

    def said(self):
        with open(self.err_path, errors="replace") as f:
            return f.read()

    def alive(self):
        return self.p.poll() is None

    def stopped(self):
        try:
            with open(f"/proc/{self.p.pid}/stat") as f:
                return f.read().rsplit(")", 1)[1].split()[0] == "T"
        except FileNotFoundError:
            return False

    def struck(self, seconds=20):
        """Until its fault has stopped or killed it."""
        end = time.time() + seconds
        while time.time() < end and self.alive() and not self.stopped():
            time.sleep(0.002)
        return not self.alive() or self.stopped()

    def stop(self):
        self.p.send_signal(signal.SIGSTOP)

    def cont(self):
        self.p.send_signal(signal.SIGCONT)

    def kill(self):
        self.p.kill()
        self.p.wait()

    def end(self, seconds=20):
        """Drained; else killed."""
        self.p.terminate()
        try:
            self.p.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def ask(self, record):
        c = Client(self.path)
        c.send(record)
        end = time.time() + 20
        while not c.got and time.time() < end and not c.gone:       # an error is an answer too: what is refused may be this
            time.sleep(0.002)
        c.close()
        return (c.got or [{}])[0]

    def ledger(self):
        return self.ask({"pd": "status", "v": 1}).get("ledger", {})


class Set:
    """n_p prefill, n_d decode workers (role decode), n_a of role both, and a router that knows them."""

    def __init__(self, n_p=1, n_d=1, n_a=0, faults={}, p=(), d=(), route=(), mem="8MiB", beat=True, limits={}):
        global n_sets
        n_sets += 1
        self.dir = os.path.join(tmp.name, str(n_sets))
        os.mkdir(self.dir)
        self.workers, self.faults, self.clients = {}, faults, []
        engine = ["-m", TINY, *ARGS, "--kv-mem", mem]
        names = [f"p{i}" for i in range(n_p)] + [f"d{i}" for i in range(n_d)] + [f"a{i}" for i in range(n_a)]
        for x in names:
            cmd = [f"{BIN}/bin/pd-prefill", *engine, *p] if x[0] == "p" else [f"{BIN}/bin/pd-decode", *engine, "--role", "both" if x[0] == "a" else "decode", *d]
            self.workers[x] = Proc(self.dir, x, cmd, faults.get(x), limits.get(x))
        args = [y for x in names for y in ("--worker", f"unix:{self.workers[x].path}")]
        self.r = Proc(self.dir, "r", [f"{BIN}/bin/pd-route", *args, *route], faults.get("r"), limits.get("r"))
        self.workers_ready(len(names))

    def __getitem__(self, name):
        return self.r if name == "r" else self.workers[name]

    def workers_ready(self, n, seconds=20):
        end = time.time() + seconds
        while self.r.ledger().get("workers_ready") != n and time.time() < end:
            time.sleep(0.01)

    def all(self):
        return [*self.workers.values(), self.r]

    def client(self):
        self.clients.append(Client(self.r.path))
        return self.clients[-1]

    def busy(self, p):
        """What it still holds; nothing: {}."""
        g = p.ledger()
        bad = {k: g[k] for k in ("runs", "blocks_used", "blocks_borrowed", "blocks_leased", "moves", "moves_waiting", "sequences", "leases_live", "expected", "offers_early",
                                 "queued", "at_workers", "answers_owed") if g.get(k)}
        if "leases_live" in g and g["leases_granted"] != g["leases_released"] + g["leases_expired"] + g["leases_revoked"]:
            bad["leases"] = {k: v for k, v in g.items() if k.startswith("leases")}
        return bad if g else {"no": "answer"}

    def quiet(self, seconds=20):
        """Every count of the living is back at its start; else which is not, after so long."""
        end = time.time() + seconds
        while True:
            bad = {p.name: b for p in self.all() if p.alive() and (b := self.busy(p))}
            if not bad or time.time() > end:
                return bad
            time.sleep(0.02)

    def end(self, name, check=True, bound="1s"):
        """bound: how late a process may still act on what is over (one that stood still does not know)."""
        for p in self.all():
            if p.alive() and p.stopped():
                p.cont()
        bad = self.quiet()
        ok(not bad, f"{name}: every count is back at its start", bad)
        for c in self.clients:
            c.close()
        fallen = [(p.name, p.p.returncode, p.said()[-600:]) for p in self.all() if not p.alive() and p.p.returncode not in (0, -signal.SIGKILL)]
        ok(not fallen, f"{name}: nobody died but who was killed", fallen)
        living = [p for p in self.all() if p.alive()]
        for p in reversed(living):      # the router first
            p.end(30)
        ok(all(p.p.returncode == 0 for p in living), f"{name}: what lives drains", [(p.name, p.p.returncode, p.said()[-400:]) for p in living if p.p.returncode])
        said = [(p.name, x) for p in self.all() for x in ("not held", "Sanitizer", "runtime error", "assert") if x in p.said()]
        ok(not said, f"{name}: nobody complains of itself", said)
        if check:
            c = tap.run([f"{PLAIN}/bin/pd-trace", "check", "--bound", bound, *[p.trace for p in self.all()]])
            ok(c.returncode == 0, f"{name}: the merged log keeps every rule", c.stdout + c.stderr)


def modes(c):
    return [(r["id"], r["mode"], (r.get("fallback") or "")[:60], r["finish_reason"]) for r in c.of("result")]
