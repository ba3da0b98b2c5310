"""llama.cpp through llama-cpp-python's low-level API, as the golden makers and the speed comparison use it.
Run with the Python that scripts/bench/build-peer prints. Token ids go in and logits come out; nothing here tokenises or adds a
BOS. KV is f16, a micro-batch has 512 tokens, flash attention is on unless told otherwise, weights are repacked as llama.cpp likes."""
import ctypes
import importlib.metadata
import json
import os
import sys

import numpy as np
import llama_cpp as L


@L.llama_log_callback
def _quiet(level, text, user_data):
    if level == 4:      # GGML_LOG_LEVEL_ERROR
        sys.stderr.write(text.decode(errors="replace"))


L.llama_log_set(_quiet, ctypes.c_void_p(0))


def system_info():
    return " ".join(L.llama_print_system_info().decode().replace("|", " ").replace(" = ", "=").split())


def build_id():
    """Which llama.cpp this is: the release on PyPI with its digest, ggml's version, and what the CPU back end was built with."""
    base = ctypes.CDLL(os.path.join(os.path.dirname(L.__file__), "lib", "libggml-base.so"))
    base.ggml_version.restype = ctypes.c_char_p
    digest = "?"
    with open(os.path.join(sys.prefix, "report.json")) as f:
        for item in json.load(f)["install"]:
            if item["metadata"]["name"].lower().replace("_", "-") == "llama-cpp-python":
                digest = item["download_info"]["archive_info"]["hashes"]["sha256"][:16]
    return (f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')} (sdist sha256 {digest}), "
            f"ggml {base.ggml_version().decode()}, {system_info()}")


def require_llamafile():
    """A build without llamafile's kernels runs at half the speed: no figure from it may be quoted as llama.cpp's."""
    if "LLAMAFILE=1" not in system_info():
        sys.exit("peer: this llama.cpp was built without llamafile (GGML_LLAMAFILE=ON); build it with scripts/bench/build-peer")


class Engine:
    """One model, one context, one sequence."""

    def __init__(self, path, threads, n_ctx, flash=True):
        L.llama_backend_init()
        mp = L.llama_model_default_params()
        mp.n_gpu_layers = 0
        self.model = L.llama_model_load_from_file(path.encode(), mp)
        if not self.model:
            sys.exit(f"peer: llama.cpp cannot load {path}")
        cp = L.llama_context_default_params()
        cp.n_ctx, cp.n_batch, cp.n_ubatch, cp.n_seq_max = n_ctx, 512, 512, 1
        cp.n_threads = cp.n_threads_batch = threads
        cp.n_outputs_max = cp.n_outputs_max_per_seq = 512
        cp.flash_attn_type = 1 if flash else 0
        cp.type_k = cp.type_v = 1     # GGML_TYPE_F16
        self.ctx = L.llama_init_from_model(self.model, cp)
        if not self.ctx:
            sys.exit("peer: llama.cpp cannot make a context")
        self.vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(self.model))
        self.batch = L.llama_batch_init(512, 0, 1)
        self.n_past = 0

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
        n = L.llama_tokenize(L.llama_model_get_vocab(self.model), data, len(data), out, len(out), False, False)
        if n < 0:
            sys.exit(f"peer: cannot tokenise {text[:40]!r}")
        return list(out[:n])

    def text(self, ids):
        out = b""
        buf = ctypes.create_string_buffer(256)
        for t in ids:
            n = L.llama_token_to_piece(L.llama_model_get_vocab(self.model), t, buf, 256, 0, True)
            out += buf.raw[:n]
        return out.decode(errors="replace")

    def is_eog(self, token):
        return bool(L.llama_vocab_is_eog(L.llama_model_get_vocab(self.model), token))
