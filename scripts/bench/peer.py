"""llama.cpp through llama-cpp-python's low-level API, as the golden makers and the speed comparison use it.
Run with the Python that scripts/bench/build-peer prints. Token ids go in and logits come out; nothing here tokenises or adds a
BOS. KV is f16, a micro-batch has 512 tokens, flash attention is on unless told otherwise, weights are repacked as llama.cpp likes (its extra
buffer types are on, and work from a mapped file too), and a pool of threads is attached, as llama-bench does."""
import ctypes
import importlib.metadata
import json
import os
import re
import sys

import numpy as np
import llama_cpp as L


@L.llama_log_callback
def _quiet(level, text, user_data):
    text = text.decode(errors="replace")
    if level == 4:      # GGML_LOG_LEVEL_ERROR
        sys.stderr.write(text)
    found = re.match(r"load_tensors: +(\S+) model buffer size = +([0-9.]+) MiB", text)
    if found:
        _buffers[found[1]] = _buffers.get(found[1], 0) + float(found[2])


_buffers = {}       # of the model that is being loaded: where its weights lie, in MiB
L.llama_log_set(_quiet, ctypes.c_void_p(0))
LIBS = os.path.join(os.path.dirname(L.__file__), "lib")


def system_info():
    return " ".join(L.llama_print_system_info().decode().replace("|", " ").replace(" = ", "=").split())


def build_id():
    """Which llama.cpp this is: the release on PyPI with its digest, ggml's version, and what the CPU back end was built with."""
    base = ctypes.CDLL(os.path.join(LIBS, "libggml-base.so"))
    base.ggml_version.restype = ctypes.c_char_p
    digest = "?"
    with open(os.path.join(sys.prefix, "report.json")) as f:
        for item in json.load(f)["install"]:
            if item["metadata"]["name"].lower().replace("_", "-") == "llama-cpp-python":
                digest = item["download_info"]["archive_info"]["hashes"]["sha256"][:16]
    return (f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')} (sdist sha256 {digest}), "
            f"ggml {base.ggml_version().decode()}, {system_info()}")


# What llama.cpp reports of its build, and the CPU's flag by which a native build has it.
NATIVE = {"AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "AVX512": "avx512f", "AVX512_VNNI": "avx512_vnni", "AVX512_BF16": "avx512_bf16", "AMX_INT8": "amx_int8"}


def require_best(cpuinfo="/proc/cpuinfo"):
    """A build without llamafile's kernels, or not made for this CPU, is two to three times slower: no figure from it may be quoted as llama.cpp's."""
    info = system_info()
    if "LLAMAFILE=1" not in info:
        sys.exit("peer: this llama.cpp was built without llamafile (GGML_LLAMAFILE=ON); build it with scripts/bench/build-peer")
    with open(cpuinfo) as f:
        cpu = next((set(line.split(":")[1].split()) for line in f if line.startswith("flags")), set())
    lacks = [name for name, flag in NATIVE.items() if flag in cpu and f"{name}=1" not in info]
    if lacks:
        sys.exit(f"peer: this llama.cpp was not built for this CPU (GGML_NATIVE=ON): it lacks {', '.join(lacks)}; build it with scripts/bench/build-peer")


class _PoolParams(ctypes.Structure):
    _fields_ = [("cpumask", ctypes.c_bool * 512), ("n_threads", ctypes.c_int), ("prio", ctypes.c_int), ("poll", ctypes.c_uint32),
                ("strict_cpu", ctypes.c_bool), ("paused", ctypes.c_bool)]


class Pool:
    """Threads that stay: without one llama.cpp makes threads for every graph. pause() ends their waiting in a loop, the next run wakes them."""
    made = {}

    def __init__(self, threads):
        self.cpu = ctypes.CDLL(os.path.join(LIBS, "libggml-cpu.so"))
        params = _PoolParams()
        ctypes.CDLL(os.path.join(LIBS, "libggml-base.so")).ggml_threadpool_params_init(ctypes.byref(params), ctypes.c_int(threads))
        assert (params.n_threads, params.poll) == (threads, 50), "ggml_threadpool_params is not laid out as this file thinks"
        self.cpu.ggml_threadpool_new.restype = ctypes.c_void_p
        self.at = ctypes.c_void_p(self.cpu.ggml_threadpool_new(ctypes.byref(params)))

    @classmethod
    def of(cls, threads):
        if threads not in cls.made:
            cls.made[threads] = cls(threads)
        return cls.made[threads]

    def pause(self):
        self.cpu.ggml_threadpool_pause(self.at)


class Model:
    """buffers: where the weights lie, in MiB: AMX, CPU_REPACK, CPU_Mapped."""

    def __init__(self, path):
        L.llama_backend_init()
        mp = L.llama_model_default_params()
        mp.n_gpu_layers = 0
        mp.use_extra_bufts = True
        _buffers.clear()
        self.at = L.llama_model_load_from_file(path.encode(), mp)
        if not self.at:
            sys.exit(f"peer: llama.cpp cannot load {path}")
        self.buffers = dict(_buffers)


class Engine:
    """One context, one sequence, of a Model or of the file of one. outputs: rows of logits of one run at the most."""

    def __init__(self, model, threads, n_ctx, flash=True, outputs=512):
        self.model = model if isinstance(model, Model) else Model(model)
        cp = L.llama_context_default_params()
        cp.n_ctx, cp.n_batch, cp.n_ubatch, cp.n_seq_max = n_ctx, 512, 512, 1
        cp.n_threads = cp.n_threads_batch = threads
        cp.n_outputs_max = cp.n_outputs_max_per_seq = outputs
        cp.flash_attn_type = 1 if flash else 0
        cp.type_k = cp.type_v = 1     # GGML_TYPE_F16
        self.ctx = L.llama_init_from_model(self.model.at, cp)
        if not self.ctx:
            sys.exit("peer: llama.cpp cannot make a context")
        self.vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(self.model.at))
        self.batch = L.llama_batch_init(512, 0, 1)
        self.n_past = 0
        self.use_threads(threads)

    def use_threads(self, n):
        L.llama_set_n_threads(self.ctx, n, n)
        self.pool = Pool.of(n)
        ctypes.CDLL(os.path.join(LIBS, "libllama.so")).llama_attach_threadpool(ctypes.c_void_p(self.ctx), self.pool.at, self.pool.at)

    def free(self):
        L.llama_batch_free(self.batch)
        L.llama_free(self.ctx)

    def save(self, path):
        if not L.llama_state_seq_save_file(self.ctx, path.encode(), 0, (L.llama_token * 1)(), 0):
            sys.exit(f"peer: llama.cpp cannot save {path}")

    def load(self, path):
        """Takes the sequence that save() wrote, of the same model and with flash attention alike; False if it cannot."""
        n = ctypes.c_size_t(0)
        if not L.llama_state_seq_load_file(self.ctx, path.encode(), 0, (L.llama_token * 1)(), 1, ctypes.byref(n)):
            return False
        self.n_past = L.llama_memory_seq_pos_max(L.llama_get_memory(self.ctx), 0) + 1
        return True

    def clear(self):
        L.llama_memory_clear(L.llama_get_memory(self.ctx), True)
        self.n_past = 0

    def back_to(self, n):
        """Forgets what came after the first n tokens."""
        if not L.llama_memory_seq_rm(L.llama_get_memory(self.ctx), 0, n, -1):
            sys.exit("peer: llama.cpp cannot take tokens back")
        self.n_past = n

    def fill(self, ids, every=False, last=True):
        """Up to 512 tokens for the next run(); logits are wanted of every one, of the last one, or of none."""
        assert 0 < len(ids) <= 512
        b = self.batch
        for i, t in enumerate(ids):
            b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0] = int(t), self.n_past + i, 1, 0
            b.logits[i] = every or (last and i == len(ids) - 1)
        b.n_tokens = len(ids)

    def run(self):
        rc = L.llama_decode(self.ctx, self.batch)
        if rc != 0:
            sys.exit(f"peer: llama_decode answered {rc} at position {self.n_past}")
        L.llama_synchronize(self.ctx)
        self.n_past += self.batch.n_tokens

    def feed(self, ids, every=False):
        self.fill(ids, every)
        self.run()

    def logits(self, i=-1):
        """Row i of the last feed, a view that the next feed overwrites."""
        return np.ctypeslib.as_array(L.llama_get_logits_ith(self.ctx, i), (self.vocab,))

    def tokenize(self, text):
        data = text.encode()
        out = (L.llama_token * (len(data) + 8))()
        n = L.llama_tokenize(L.llama_model_get_vocab(self.model.at), data, len(data), out, len(out), False, False)
        if n < 0:
            sys.exit(f"peer: cannot tokenise {text[:40]!r}")
        return list(out[:n])

    def text(self, ids):
        out = b""
        buf = ctypes.create_string_buffer(256)
        for t in ids:
            n = L.llama_token_to_piece(L.llama_model_get_vocab(self.model.at), t, buf, 256, 0, True)
            out += buf.raw[:n]
        return out.decode(errors="replace")

    def is_eog(self, token):
        return bool(L.llama_vocab_is_eog(L.llama_model_get_vocab(self.model.at), token))
