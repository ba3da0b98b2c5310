"""A small relay between a prefill worker, which dials it, and a decode worker: it passes bytes and descriptors on, counts them, and cuts connections where it is
told to. It is a worker to pdset's Router: its `at` is where the prefill worker dials."""
import array
import os
import socket
import threading
import time

from pdset import msgpack


class Relay:
    """cuts: for the 1st, 2nd, ... transfer connection (direction, bytes): it ends when so many have been passed on that way, "out" (prefill to decode) or "back".
    None, or past the end of the list: it is left alone. absent: how long after a cut nobody listens, seconds; None: until open(). hold: once these bytes have come
    back, nothing more is read or passed on, of no connection, and all of them stand."""

    def __init__(self, path, to, cuts=(), absent=0, hold=None):
        self.hold, self.held = hold, False
        self.path, self.to, self.cuts, self.absent = path, to, list(cuts), absent
        self.at = "unix:" + path
        self.p, self.name = to.p, to.name
        self.lock = threading.Lock()
        self.live = []          # (connection, its sockets)
        self.conns = []         # [{"out": bytes, "back": bytes, "cut": bool}] of transfer connections, in order
        self.attached = []      # sockets of descriptors
        self.open()

    def open(self):
        self.l = socket.socket(socket.AF_UNIX)
        self.l.bind(self.path)
        self.l.listen(50)
        threading.Thread(target=self.accept, args=(self.l,), daemon=True).start()

    def accept(self, l):
        while True:
            try:
                s, _ = l.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(s,), daemon=True).start()

    def shut(self, *socks):
        for s in socks:
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def cut(self, c, *socks):
        with self.lock:
            if c["cut"]:
                return
            c["cut"] = True
        if self.absent != 0:
            os.unlink(self.path)
            self.shut(self.l)
            self.l.close()
        self.shut(*socks, *self.attached)
        self.attached = []
        if self.absent:
            threading.Timer(self.absent, self.open).start()

    def cut_all(self):
        for one in self.live:
            self.cut(*one)

    def serve(self, a):
        """a: the prefill worker's end."""
        first = a.recv(65536, socket.MSG_PEEK)
        b = socket.socket(socket.AF_UNIX)
        b.connect(self.to.path)
        if b"attach" in first[:200]:
            self.attached += [a, b]
            u = msgpack.Unpacker()      # its record alone, so that no descriptor comes with bytes that are read as records
            u.feed(first)
            u.unpack()
            b.sendall(a.recv(u.tell()))
            c, cut = {"out": 0, "back": 0, "cut": False}, None
        else:
            with self.lock:
                c = {"out": 0, "back": 0, "cut": False}
                self.conns.append(c)
                self.live.append((c, a, b))
                n = len(self.conns) - 1
            cut = self.cuts[n] if n < len(self.cuts) else None
        t = threading.Thread(target=self.pump, args=(b, a, "back", c, cut), daemon=True)
        t.start()
        self.pump(a, b, "out", c, cut)
        t.join()
        self.live = [x for x in self.live if x[0] is not c]
        a.close()
        b.close()

    def pump(self, src, dst, way, c, cut):
        left = cut[1] if cut and cut[0] == way else None
        while True:
            try:
                d, anc, _, _ = src.recvmsg(1 << 16, 4096)
            except OSError:
                d = b""
            if not d:
                break
            while self.held:
                time.sleep(0.02)
            self.held |= self.hold is not None and way == "back" and self.hold in d
            fds = array.array("i")
            for level, kind, data in anc:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds.frombytes(data[:len(data) - len(data) % fds.itemsize])
            if left is not None:
                d = d[:left - c[way]]
            try:
                n = dst.sendmsg([d], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else []) if d else 0
                if n < len(d):
                    dst.sendall(d[n:])
            except OSError:
                break
            finally:
                for fd in fds:
                    os.close(fd)
            c[way] += len(d)
            if left is not None and c[way] >= left:
                time.sleep(0.005)       # what was passed on is read first
                self.cut(c, src, dst)
                return
        self.shut(src, dst)

    def close(self):
        self.l.close()
