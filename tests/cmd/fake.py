"""Workers that do as a test says, and clients: for the router's tests. A fake worker registers, beats, and hands each request to `serve`; what real ones do with
tokens it imitates: token i of a prompt is a function of prompt and i alone, so that whoever computes it gets the same."""
import atexit
import ctypes
import hashlib
import os
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
import zlib

import tap
from packed import msgpack
from tap import B, ok, run

FP = {"arch": "fake", "layers": 2, "rope_theta": 10000.0, "weights_digest": b"\1" * 32, "block_size": 16, "numerics": "fake-1", "software": "pd 0.1"}


def tokens_of(req, choice=0):
    """What the model says."""
    key = zlib.crc32(str(req.get("prompt", req.get("token_ids"))).encode()) + choice
    return [(key + 7919 * i) % 50000 for i in range(req.get("max_tokens", 4))]


def text_of(token):
    return f" t{token}"


class Conn:
    def __init__(self, sock):
        self.s, self.lock, self.u = sock, threading.Lock(), msgpack.Unpacker(strict_map_key=False)

    def put(self, *records):
        with self.lock:
            try:
                self.s.sendall(b"".join(msgpack.packb(r) for r in records))
            except OSError:
                pass

    def records(self):
        while True:
            try:
                data = self.s.recv(65536)
            except OSError:
                return
            if not data:
                return
            self.u.feed(data)
            yield from self.u

    def close(self, linger=True):
        try:
            self.s.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.s.close()


class Fake:
    count = 0

    def __init__(self, where, role="both", serve=None, register=None, epoch=0, fp=None, beat=0.05, numerics="fake-1", max_runs=64, blocks=4096, context=65536, load=None, start=True):
        Fake.count += 1
        self.path, self.role, self.epoch, self.beat_s, self.register = where, role, epoch, beat, register
        self.name = f"{role}@fake:{Fake.count}"
        self.fp = dict(FP, **(fp or {}))
        self.numerics = self.fp["numerics"] = numerics
        self.capacity = {"blocks": blocks, "block_size": 16, "max_seqs": 8, "max_runs": max_runs, "context": context}
        self.load = dict({k: 0 for k in ("runs", "waiting", "seqs", "blocks_used", "blocks_leased", "prefill_tokens_ahead", "kv_tokens")}, **(load or {}))
        self.serve = serve or Fake.whole
        self.state, self.beats, self.life = "ready", True, os.urandom(8)
        self.requests, self.cancels, self.conns, self.seq = [], [], [], 0
        self.alive = False
        if start:
            self.start()

    def start(self):
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.bind(self.path)
        self.sock.listen(64)
        self.alive = True
        threading.Thread(target=self.accept, args=(self.sock,), daemon=True).start()
        if self.register:
            threading.Thread(target=self.dial_in, daemon=True).start()
        return self

    def record(self):
        self.seq += 1
        fields = msgpack.packb(self.fp)
        return {"pd": "worker", "v": 1, "worker": self.name, "role": self.role, "state": self.state, "model_revision": "fake@000000000000",
                "fingerprint": {"sha": hashlib.sha256(fields).digest(), "fields": self.fp},
                "layout": {"layout_hash": b"\0" * 8, "block_size": 16, "layers": 2, "kv_heads": 1, "head_dim": 16, "dtype": "f16", "order": "HND"},
                "parallel": {"tp": 1, "pp": 1, "ep": 1}, "adapters": [], "capacity": self.capacity, "load": self.load, "domain": "local", "via": ["shm", "inline"],
                "caps": [], "epoch": self.epoch, "numerics": self.numerics, "listen": "unix:" + self.path, "life": self.life, "pid": os.getpid(),
                "beat_us": int(self.beat_s * 1e6), "seq": self.seq}

    def beat(self, c):
        while self.alive and c.s.fileno() >= 0:
            if self.beats:
                c.put(self.record())
            time.sleep(self.beat_s)

    def dial_in(self):
        s = socket.socket(socket.AF_UNIX)
        s.connect(self.register)
        c = Conn(s)
        self.conns.append(c)
        threading.Thread(target=self.read, args=(c,), daemon=True).start()
        self.beat(c)

    def accept(self, sock):
        while self.alive:
            try:
                s, _ = sock.accept()
            except OSError:
                return
            c = Conn(s)
            self.conns.append(c)
            threading.Thread(target=self.read, args=(c,), daemon=True).start()

    def read(self, c):
        for r in c.records():
            kind = r.get("pd", "request")
            if kind == "status" and not r.get("follow"):
                c.put({"pd": "status", "v": 1, "state": self.state, "worker": self.name, "role": self.role, "ledger": {}})
            elif kind == "status" and r.get("events"):
                self.on_events(c, r)
            elif kind == "status":
                threading.Thread(target=self.beat, args=(c,), daemon=True).start()
            elif kind == "cancel":
                self.cancels.append(r)
                self.on_cancel(c, r)
            elif kind == "request":
                self.requests.append(r)
                threading.Thread(target=self.serve, args=(self, c, r), daemon=True).start()
        if c in self.conns:
            self.conns.remove(c)

    def on_events(self, c, r):
        """One without a prefix cache sends none."""

    def on_cancel(self, c, r):
        c.put(self.result({"run": r["run"]}, [], finish="cancelled"))

    def die(self):
        """As a killed process: everything closes."""
        self.alive = False
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.sock.close()
        for c in list(self.conns):
            c.close()
        self.conns.clear()

    # ---- what workers say ----

    @staticmethod
    def token(req, pos, choice=0, of=None):
        t = (of or tokens_of(req, choice))[pos]
        r = {"pd": "token", "v": 1, "run": req["run"]}
        if choice:
            r["choice"] = choice
        return dict(r, pos=pos, token=t, text=text_of(t), t_us=1)

    def result(self, req, tokens, choice=0, finish="length", **more):
        r = {"pd": "result", "v": 1, "run": req["run"]}
        if "id" in req:
            r["id"] = req["id"]
        route = req.get("route", {})
        return dict(r, choice=choice, text="".join(text_of(t) for t in tokens), tokens=tokens, prompt_tokens=3, completion_tokens=len(tokens), cached_tokens=0,
                    transferred_tokens=0, recomputed_tokens=0, finish_reason=finish, mode=route.get("mode", "aggregated"), fallback=route.get("fallback"), ttft_ms=1.5,
                    tpot_ms=0.5, e2e_ms=2.5, kv_bytes=0, kv_ms=0.0, prefill_worker=(route.get("p") or {}).get("worker"), decode_worker=self.name, **more)

    def whole(self, c, req, first=0, until=None, results=True):
        """Decode it all: the tokens (from `first` on, `until` before) and the results."""
        resume = req.get("route", {}).get("resume")
        first = max(first, len(resume) // 4 if resume else 0)
        for choice in range(req.get("n", 1)):
            t = tokens_of(req, choice)
            if req.get("stream"):
                c.put(*[Fake.token(req, i, choice, t) for i in range(first, len(t) if until is None else until)])
            if results:
                c.put(self.result(req, t, choice))

    def error(self, c, req, action, message="no", klass="failed"):
        c.put({"pd": "error", "v": 1, "run": req["run"], "class": klass, "code": 1, "message": message, "action": action})
        if self.role != "prefill":
            c.put(self.result(req, [], finish="error"))


class XXH128(ctypes.Structure):
    _fields_ = [("lo", ctypes.c_uint64), ("hi", ctypes.c_uint64)]


xxh = ctypes.CDLL("libxxhash.so.0")
xxh.XXH3_64bits.restype, xxh.XXH3_64bits.argtypes = ctypes.c_uint64, (ctypes.c_char_p, ctypes.c_size_t)
xxh.XXH3_128bits_withSeed.restype, xxh.XXH3_128bits_withSeed.argtypes = XXH128, (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64)


def block_hashes(fp, ids, size=16, adapter=b"", salt=b""):
    """As kv/prefix.h says, made apart from it. fp: the fingerprint's fields."""
    fields, key = msgpack.packb(fp), msgpack.packb("numerics")
    must = fields[1 if fields[0] != 0xde else 3:fields.index(key)]
    seed, parent, out = xxh.XXH3_64bits(must, len(must)), bytes(16), []
    for i in range(len(ids) // size):
        b = parent + struct.pack(f"<I{size}i", size, *ids[i * size:][:size])
        b += b"".join(struct.pack("<I", len(x)) + x for x in (adapter, b"", salt))
        h = xxh.XXH3_128bits_withSeed(b, len(b), seed)
        parent = struct.pack(">QQ", h.hi, h.lo)
        out.append(parent)
    return out


class Holder(Fake):
    """Publishes what a test says that it holds, in order; and what else a test says."""

    def __init__(self, where, snapshots=True, **kw):
        self.held, self.change, self.sinks, self.asked, self.snapshots, self.pub = {}, 0, [], [], snapshots, os.urandom(8)
        super().__init__(where, **kw)

    def event(self, op, hashes=(), parent=None, size=16, seq=None, **kw):
        if seq is None:
            self.change += 1
        r = {"pd": "kvevent", "v": 1, "life": self.pub, "seq": self.change if seq is None else seq, "op": op}
        if hashes:
            r["hashes"] = b"".join(hashes)
        if parent:
            r["parent"] = parent
        if op in ("stored", "snapshot"):
            r.update(token_ids=bytes(4 * size * len(hashes)), block_size=size)
        return dict(r, **kw)

    def publish(self, *events):
        for c in list(self.sinks):
            c.put(*events)

    def store(self, ids, first=0, **kw):
        """The blocks of a prompt, from the first-th on."""
        h = block_hashes(self.fp, ids, **kw)
        new = [x for x in h[first:] if x not in self.held]
        if new:
            at = h.index(new[0])
            self.held.update((x, h[i - 1] if i else bytes(16)) for i, x in enumerate(h) if x in new)
            self.publish(self.event("stored", new, h[at - 1] if at else None))

    def remove(self, ids, first=0):
        gone = [x for x in block_hashes(self.fp, ids)[first:] if self.held.pop(x, None)]
        self.publish(self.event("removed", gone))

    def whole(self):
        return self.event("snapshot", list(self.held), seq=self.change, parts=1, parents=b"".join(self.held.values()))

    def on_events(self, c, r):
        self.asked.append(r)
        if c not in self.sinks:
            self.sinks.append(c)
        if self.snapshots and not (r.get("life") == self.pub and r.get("seq") == self.change):
            c.put(self.whole())


class Decode(Fake):
    """Waits for the KV of a remote run; computes another at once."""
    by_path = {}

    def __init__(self, where, **kw):
        self.turn, self.pending, self.given = threading.Lock(), {}, set()
        self.taken = self.whole
        Decode.by_path["unix:" + where] = self
        super().__init__(where, **dict({"role": "decode", "serve": Decode.decode}, **kw))

    def decode(self, c, req):
        route = req["route"]
        with self.turn:
            key = (req["run"], route["op"])
            if route["mode"] == "remote" and key not in self.given:
                self.pending[req["run"]] = (c, req)
                return
            self.pending.pop(req["run"], None)
        self.taken(c, req)

    def give(self, run, op):
        with self.turn:
            self.given.add((run, op))
            waits = self.pending.pop(run, None)
        if waits and waits[1]["route"]["op"] == op:
            self.taken(*waits)


class Prefill(Fake):
    def __init__(self, where, **kw):
        super().__init__(where, **dict({"serve": Prefill.prefill}, **kw, role="prefill"))

    def prefill(self, c, req):
        self.answer(c, req)
        Decode.by_path[req["route"]["d"]["at"]].give(req["run"], req["route"]["op"])

    def answer(self, c, req):
        c.put({"pd": "kv", "v": 1, "run": req["run"], "payload": None})

    def on_cancel(self, c, r):
        pass


def silent(self, c, req):
    """Takes it, and says nothing."""


class Router:
    def __init__(self, where, *args, workers=(), build=B, env=None):
        """ready: what it told when it was, b"" when it has ended instead."""
        self.path, self.trace = where, where + ".trace"
        r, w = os.pipe()
        self.err = open(where + ".err", "w+b")
        self.p = subprocess.Popen([f"{build}/bin/pd-route", "--listen", f"unix:{where}", "--ready-fd", str(w), "--trace", self.trace,
                                   *[x for k in workers for x in ("--worker", f"unix:{k.path}")], *args],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.err, pass_fds=[w], env=dict(os.environ, **(env or {})))
        os.close(w)
        with os.fdopen(r, "rb") as f:
            self.ready = f.readline()
        if self.ready:
            self.until("workers_ready", len(workers))

    def dial(self):
        s = socket.socket(socket.AF_UNIX)
        s.settimeout(30)
        while True:
            try:
                s.connect(self.path)
                return s
            except BlockingIOError:     # its queue is full; a socket with a timeout does not wait for it
                time.sleep(0.002)

    def client(self, *records):
        c = Conn(self.dial())
        c.put(*records)
        return c

    def ask(self, *records):
        """All answers, the client half-closed."""
        c = self.client(*records)
        c.s.shutdown(socket.SHUT_WR)
        got = list(c.records())
        c.s.close()
        return got

    def ledger(self):
        return (self.ask({"pd": "status", "v": 1}) or [{}])[0].get("ledger", {})

    def until(self, key, want, seconds=10):
        end = time.time() + seconds
        while (got := self.ledger().get(key)) != want and time.time() < end:
            time.sleep(0.01)
        return got == want

    def stop(self, sig=signal.SIGTERM):
        self.p.send_signal(sig)
        try:
            rc = self.p.wait(30)
        except subprocess.TimeoutExpired:
            self.p.kill()
            rc = -1
        self.err.seek(0)
        return rc, self.err.read().decode()

    def events(self):
        return [r for r in tap.records(tap.run([f"{B}/bin/pd-trace", "cat", self.trace]).stdout)]


def results(got):
    return [r for r in got if r["pd"] == "result"]


def tokens(got, choice=0):
    return [(r["pos"], r["token"], r["text"]) for r in got if r["pd"] == "token" and r.get("choice", 0) == choice]


def right(got, req, choice=0):
    """Every position once, in order, and one result that says the same."""
    want = tokens_of(req, choice)
    res = [r for r in results(got) if r.get("choice", 0) == choice]
    return (len(res) == 1 and res[0]["tokens"] == want and res[0]["finish_reason"] == "length" and
            [t[:2] for t in tokens(got, choice)] == (list(enumerate(want)) if req.get("stream") else []) and
            (not req.get("stream") or "".join(t[2] for t in tokens(got, choice)) == res[0]["text"]))


def until(cond, seconds=10):
    end = time.time() + seconds
    while not cond() and time.time() < end:
        time.sleep(0.005)
    return bool(cond())


# ---- what most tests of the router begin with ----

tmp = tempfile.TemporaryDirectory()
turn = 0


def at(name):
    global turn
    turn += 1
    return os.path.join(tmp.name, f"{name}{turn}")


class D(Decode):
    def __init__(self, **kw):
        super().__init__(at("d"), **kw)


class P(Prefill):
    def __init__(self, **kw):
        super().__init__(at("p"), **kw)


def die(self, c, req):
    self.die()


def router(*args, workers=(), where=None):
    r = Router(where or at("r"), *args, workers=workers)
    atexit.register(r.p.kill)
    return r


def checked(r, name, *workers):
    """It ends well, and its trace holds every invariant."""
    rc, err = r.stop()
    c = run([f"{B}/bin/pd-trace", "check", r.trace])
    ok(rc == 0 and c.returncode == 0, f"{name}: drained, and the trace holds every invariant", (rc, err[-1500:], c.stdout, c.stderr))
    [w.die() for w in workers if w.alive]
    return err
