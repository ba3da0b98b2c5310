"""Cancels of hand-overs between a real prefill and a real decode worker, each at a chosen point: a gate between the two stops before a record (or, where it cannot
read what passes, after so many bytes), then both workers are told to cancel, and the gate opens. How long it takes until neither holds anything is measured.
Way and point are the caller's to choose: ways() and Sweep."""
import array
import collections
import os
import select
import socket
import struct
import tempfile
import threading
import time

import pdset
from pdset import Router, Worker, msgpack

WAYS = ("inline", "shm", "in_place", "tcp", "tls")
PROMPT = dict(prompt="A long tale of a fox that went into the woods " * 4, max_tokens=100, ignore_eos=True, temperature=0.7, seed=9)


class Gate:
    """Dialled by the prefill worker in place of the decode worker. It passes records one by one, descriptors with theirs, and chunks of data streams."""

    def __init__(self, folder, to, opaque=False):
        self.opaque, self.p, self.name = opaque, to.p, to.name
        self.lock = threading.Lock()
        self.open = threading.Event()
        self.arm(None)
        self.seen = collections.Counter()
        self.unix = to.at.startswith("unix:")
        self.to = to.at[5:] if self.unix else ("127.0.0.1", int(to.at.rsplit(":", 1)[1]))
        self.l = socket.socket(socket.AF_UNIX if self.unix else socket.AF_INET)
        self.l.bind(os.path.join(folder, "gate") if self.unix else ("127.0.0.1", 0))
        self.l.listen(50)
        self.at = "unix:" + self.l.getsockname() if self.unix else "tcp:127.0.0.1:%d" % self.l.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def arm(self, point):
        """point: (way, kind, nth) or None. Where all is opaque kind is None, and nth counts bytes."""
        with self.lock:
            self.point, self.n, self.held = point, 0, threading.Event()
            self.open.set()
            if point:
                self.open = threading.Event()

    def let_go(self):
        self.open.set()

    def room(self, way, kind, n):
        """How much of n may pass now: all of it, once the gate is open."""
        with self.lock:
            self.seen[way, kind] += n
            if not self.point or self.point[0] != way or self.open.is_set():
                return n
            if not self.held.is_set():
                if self.point[1] not in (kind, "any"):
                    return n
                self.n += n
                if self.n < self.point[2]:
                    return n
                self.held.set()
        self.open.wait()
        return n

    def accept(self):
        while True:
            a, _ = self.l.accept()
            b = socket.socket(a.family)
            b.connect(self.to)
            for s in (a, b):
                if not self.unix:
                    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self.pump, args=(a, b, "out"), daemon=True).start()
            threading.Thread(target=self.pump, args=(b, a, "back"), daemon=True).start()

    def pump(self, src, dst, way):
        try:
            if self.opaque:
                while d := src.recv(2048):
                    self.room(way, None, len(d))
                    dst.sendall(d)
            else:
                self.records(src, dst, way)
        except OSError:
            pass
        for s in (src, dst):
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def records(self, src, dst, way):
        buf, fds, data = b"", array.array("i"), False
        while True:
            d, anc, _, _ = src.recvmsg(1 << 16, 4096) if self.unix else (src.recv(1 << 16), (), 0, 0)
            for level, kind, body in anc:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds.frombytes(body[:len(body) - len(body) % fds.itemsize])
            if not d:
                return
            buf += d
            while buf:
                if not self.unix and buf[:4] == b"pdup":        # the answer to a data stream
                    n, kind = 4, "up"
                elif data:
                    if len(buf) < 24 or len(buf) < (n := 24 + struct.unpack(">I", buf[12:16])[0]):
                        break
                    kind = "chunk"
                else:
                    u = msgpack.Unpacker(max_buffer_size=1 << 28)
                    u.feed(buf)
                    try:
                        r = u.unpack()
                    except msgpack.OutOfData:
                        break
                    n, kind = u.tell(), r["pd"]
                    data = not self.unix and "attach" in r
                self.room(way, kind, 1)
                if kind == "slab" and fds:          # its record alone, as what reads hello keeps no descriptor
                    dst.sendmsg([buf[:n]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds[:1])])
                    os.close(fds.pop(0))
                else:
                    dst.sendall(buf[:n])
                buf = buf[n:]


class Sweep:
    """A prefill worker, a gate and a decode worker, by one way."""

    def __init__(self, way, folder=None, p_env=None, d_env=None):
        self.tmp = tempfile.TemporaryDirectory(prefix="pd-cancels-", dir=folder)
        self.way, dir_ = way, self.tmp.name
        net = way in ("tcp", "tls")
        args = ["--via", {"in_place": "shm", "tls": "tcp"}.get(way, way)]
        keys = []
        if way == "tls":
            with open(os.open(f"{dir_}/keys", os.O_WRONLY | os.O_CREAT, 0o600), "w") as f:
                f.write("k " + os.urandom(32).hex() + "\n")
            keys = ["--key-file", f"{dir_}/keys"]
        self.P = Worker(dir_, "P", "prefill", *args, *keys, "--lease", "5s", env=p_env)
        self.D = Worker(dir_, "D", "decode", "--stream", *args, *keys, *(["--listen", "tcp-listen:127.0.0.1:0"] if net else []),
                        *(["--in-place"] if way == "in_place" else []), env=d_env)
        if net:
            self.D.over_tcp()
        self.gate = Gate(dir_, self.D, opaque=way == "tls")
        self.R = Router(f"{dir_}/R.trace")
        self.number = 0
        self.ask()
        self.R.wait([self.last])                # connected; and what one hand-over is made of
        self.gate.seen.clear()
        self.ask()
        if not self.R.wait([self.last]) or self.R.result(self.last)["mode"] != "remote":
            raise RuntimeError(f"{way}: {self.P.said()} {self.D.said()}")
        self.free()
        self.seen = dict(self.gate.seen)

    def ask(self, decode_only=False):
        self.number += 1
        r = self.last = self.R.request(dict(PROMPT, id=self.number, cache_salt=str(self.number)))       # else it is held, and not sent
        self.R.event(r["run"], "route_selected")
        for w in (self.D,) if decode_only else (self.D, self.P):
            self.R.to(w).send(self.R.route(r, "remote", self.P, self.gate))
        return r

    def points(self):
        """(name of the state, what the gate stops before; or None: nothing) in a hand-over by this way."""
        p = [("expected", "decode only"), ("decoding", 1), ("decoding", 30), ("decoding", 70)]
        if self.gate.opaque:
            total, back = self.seen["out", None], self.seen["back", None]
            return p + [("at a byte out", ("out", None, 1 + total * i // 12)) for i in range(12)] + [("at a byte back", ("back", None, 1 + back * i // 6)) for i in range(6)]
        p += [("prefilled", ("out", "offer", 1)), ("offered", ("back", "accept", 1)), ("done, unverified", ("out", "kv", 1)), ("verified", ("back", "verified", 1)),
              ("committed", ("back", "release", 1)), ("committed", ("out", "status", 1))]
        for kind in ("chunk", "done"):
            n = self.seen.get(("out", kind), 0)
            p += [("transferring" if i else "accepted", ("out", kind, 1 + n * i // 6)) for i in range(6) if n > i]
        return p

    def free(self, seconds=10):
        """Until neither holds anything: what still does, or None."""
        end = time.perf_counter() + seconds
        for w, want in ((self.D, ("runs", "sequences", "blocks_used", "blocks_borrowed", "moves", "moves_waiting", "expected", "offers_early")),
                        (self.P, ("runs", "blocks_used", "moves", "leases_live"))):
            while held := [(k, v) for k in want if (v := w.ledger().get(k))]:
                if time.perf_counter() > end:
                    return w.path, held
        return None

    def cancel(self, i, point):
        """One: (seconds until all is free or None, how it ended). What else is wrong raises."""
        how = point[1]
        self.gate.arm(how if isinstance(how, tuple) else None)
        r = self.ask(how == "decode only")
        end = time.time() + 10
        while not (self.gate.held.is_set() if isinstance(how, tuple) else self.R.of(r, "token")[how - 1:] if isinstance(how, int) else self.D.ledger()["expected"]):
            self.R.pump(0.0005)
            if self.R.result(r):        # of some records there are more in one run, and fewer in another
                self.gate.let_go()
                self.free()
                return 0, self.R.result(r)["finish_reason"]
            if time.time() > end:
                raise RuntimeError(f"{self.way}: {point}: never reached; {self.R.got[r['run']]}")
        t0 = time.perf_counter()
        self.R.cancel(r, *((self.D, self.P) if i & 1 else (self.P, self.D)))
        self.gate.let_go()
        if held := self.free():
            raise RuntimeError(f"{self.way}: {point}: 10 s after the cancel there is still {held}")
        took = time.perf_counter() - t0
        if not self.R.wait([r], seconds=10) or len(self.R.of(r, "result")) != 1:
            raise RuntimeError(f"{self.way}: {point}: its end was not told once: {self.R.got[r['run']]}")
        return took, self.R.result(r)["finish_reason"]

    def many(self, n):
        """n that were cancelled, over all points by turns: seconds each took, and how many came in which state."""
        points, took, states = self.points(), [], collections.Counter()
        for i in range(4 * n):
            if len(took) == n:
                break
            point = points[i % len(points)]
            t, end = self.cancel(i // len(points), point)
            if end == "cancelled":
                took.append(t)
                states[point[0]] += 1
            elif end != "length":
                raise RuntimeError(f"{self.way}: {point}: it ended with {end}")
        return took, states

    def end(self):
        """Both drain, and the merged log keeps every rule: what was wrong, or ''."""
        self.gate.l.close()
        self.R.close()
        ends = [w.end() for w in (self.P, self.D)]
        c = pdset.check(self.R.path, self.P.trace, self.D.trace)
        g = "" if all(rc == 0 for rc, _ in ends) and c.returncode == 0 else f"{ends} {c.stdout.decode()} {c.stderr.decode()}"
        return g
