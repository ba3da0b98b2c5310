"""Hostile model files: a small good model taken apart, every part of it spoiled, put together again.

named() are the cases with a name and a message each: counts, lengths, types, dimensions, offsets, duplicates, hyperparameters, ids, numbers that are not finite,
and what has been a hole in other loaders (each CVE by its number). fields() are all fields of the header with values at their edges."""
import os
import random
import struct
import tempfile

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
SCALAR = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
DIR = "testdata/tiny"
OWNED = os.path.join(tempfile.gettempdir(), f"pd-owned-{os.getpid()}")      # what a template that is run would leave


def string(s):
    return struct.pack("<Q", len(s)) + s


class Key:
    """One key: its value as stored; `elem` and `items` too when it is an array."""
    def __init__(self, name, kind, raw, elem=None, items=None):
        self.name, self.kind, self.raw, self.elem, self.items = name, kind, raw, elem, items

    def bytes(self):
        body = self.raw if self.items is None else struct.pack("<IQ", self.elem, len(self.items)) + b"".join(self.items)
        return string(self.name) + struct.pack("<I", self.kind) + body


class Tensor:
    def __init__(self, name, dims, kind, at):
        self.name, self.dims, self.kind, self.at = name, dims, kind, at

    def bytes(self):
        return string(self.name) + struct.pack("<I", len(self.dims)) + b"".join(struct.pack("<Q", d % 2**64) for d in self.dims) + struct.pack("<IQ", self.kind, self.at % 2**64)


class Model:
    def __init__(self, name="llama-q4_1"):
        data = open(f"{DIR}/{name}.gguf", "rb").read()
        self.spots = spots = []         # (field, offset, bytes) of every field of the header
        at = 24

        def num(fmt, field):
            nonlocal at
            v, = struct.unpack_from("<" + fmt, data, at)
            spots.append((field, at, struct.calcsize("<" + fmt)))
            at += struct.calcsize("<" + fmt)
            return v

        def text(field):
            nonlocal at
            n = num("Q", f"length of {field}")
            if n:
                spots.append((field, at, 1))
            at += n
            return data[at - n:at]

        def value(kind, field):
            start = at
            if kind == STR:
                text(field)
            else:
                num(SCALAR[kind], field)
            return data[start:at]

        self.version = 3
        spots += [("magic", 0, 4), ("version", 4, 4), ("n_tensors", 8, 8), ("n_kv", 16, 8)]
        n_tensors, n_kv = struct.unpack_from("<QQ", data, 8)
        self.keys, self.tensors = [], []
        for i in range(n_kv):
            key = text(f"key {i}")
            shown = key.decode()
            kind = num("I", f"type of {shown}")
            if kind == ARR:
                elem, count = num("I", f"element type of {shown}"), num("Q", f"count of {shown}")
                self.keys.append(Key(key, kind, None, elem, [value(elem, f"{shown}[{j}]") for j in range(count)]))
            else:
                self.keys.append(Key(key, kind, value(kind, shown)))
        for i in range(n_tensors):
            name = text(f"name of tensor {i}")
            shown = name.decode()
            dims = [num("Q", f"{shown} dimension {j}") for j in range(num("I", f"{shown} n_dims"))]
            self.tensors.append(Tensor(name, dims, num("I", f"{shown} type"), num("Q", f"{shown} offset")))
        self.align = 32
        start = (at + 31) // 32 * 32
        self.data = bytearray(data[start:])
        self.whole = bytes(data)
        self.n_tensors = self.n_keys = None     # to lie

    def bytes(self):
        head = b"GGUF" + struct.pack("<IQQ", self.version, *((n if told is None else told) % 2**64 for n, told in ((len(self.tensors), self.n_tensors), (len(self.keys), self.n_keys))))
        head += b"".join(k.bytes() for k in self.keys) + b"".join(t.bytes() for t in self.tensors)
        return head + bytes(-len(head) % self.align) + bytes(self.data)

    # --- to spoil ---

    def key(self, name):
        return next(k for k in self.keys if k.name == name.encode())

    def tensor(self, name):
        return next(t for t in self.tensors if t.name == name.encode())

    def set(self, name, value, kind=U32):
        """A key of a number or text, replaced or added."""
        raw = string(value) if kind == STR else struct.pack("<" + SCALAR[kind], value)
        self.keys = [k for k in self.keys if k.name != name.encode()] + [Key(name.encode(), kind, raw)]

    def array(self, name, items, kind=I32):
        raw = [string(v) if kind == STR else struct.pack("<" + SCALAR[kind], v) for v in items]
        self.keys = [k for k in self.keys if k.name != name.encode()] + [Key(name.encode(), ARR, None, kind, raw)]

    def drop(self, name):
        self.keys = [k for k in self.keys if k.name != name.encode()]

    def put(self, tensor, at, raw):
        at += self.tensor(tensor).at
        self.data[at:at + len(raw)] = raw


def patched(at, raw):
    """The good file with bytes replaced; at: an offset or the name of a field."""
    m = Model()
    at = at if isinstance(at, int) else next(o for f, o, _ in m.spots if f == at)
    return m.whole[:at] + raw + m.whole[at + len(raw):]


def u64(v):
    return struct.pack("<Q", v % 2**64)


def u32(v):
    return struct.pack("<I", v % 2**32)


def spoiled(change, base="llama-q4_1"):
    m = Model(base)
    change(m)
    return m.bytes()


CORRUPT, INCOMPATIBLE, OK, MEMORY = 4, 3, 0, 8
ARCH = "llama."
TEMPLATE = "tokenizer.chat_template"


def named():
    """[(name, bytes or function of a path, status, words of the message)]"""
    out = []

    def case(name, data, status, *says):
        out.append((name, data, status, says))

    def do(name, change, status, *says, base="llama-q4_1"):
        case(name, spoiled(change, base), status, *says)

    # the fixed head
    case("another magic", patched("magic", b"GGML"), CORRUPT, "bytes 0 to 3", "GGUF")
    for v in (0, 1, 4, 2**32 - 1):
        case(f"version {v}", patched("version", u32(v)), INCOMPATIBLE, "version", "byte 4")
    case("big endian", patched("version", b"\0\0\0\3"), INCOMPATIBLE, "big-endian")
    for v, cve in ((2**64 - 1, " (CVE-2024-21836)"), (2**63, ""), (2**32, ""), (70000, ""), (len(Model().tensors) + 1, "")):
        case(f"n_tensors {v}{cve}", patched("n_tensors", u64(v)), CORRUPT, "byte")
    for v, cve in ((2**64 - 1, " (CVE-2024-23605)"), (2**60, ""), (2**63, ""), (70000, ""), (len(Model().keys) + 1, ""), (1, "")):
        case(f"n_kv {v}{cve}", patched("n_kv", u64(v)), CORRUPT, "byte")
    case("one tensor less", patched("n_tensors", u64(len(Model().tensors) - 1)), CORRUPT, "missing")
    case("no tensor", patched("n_tensors", u64(0)), CORRUPT, "token_embd.weight")
    case("no key", patched("n_kv", u64(0)), CORRUPT, "byte")
    for n in (0, 3, 23, 24, 100, 2000):
        case(f"cut to {n} bytes", Model().whole[:n], CORRUPT, "bytes")
    case("cut before the data", Model().whole[:-len(Model().data)], CORRUPT, "cut short")
    case("cut in the data", Model().whole[:-1], CORRUPT, "cut short")

    # keys
    for v in (2**62, 2**64 - 1, 2**64 - 8, 2**25, 2**31):
        case(f"key of {v} bytes", patched("length of key 0", u64(v)), CORRUPT, "key", "byte 24")
        case(f"text of {v} bytes (CVE-2024-23496)", patched("length of general.name", u64(v)), CORRUPT, "'general.name'", "byte")
        case(f"array of {v}", patched("count of tokenizer.ggml.token_type", u64(v)), CORRUPT, "'tokenizer.ggml.token_type'", "byte")
    case("token of 2^31+5 bytes (CVE-2025-49847)", patched("length of tokenizer.ggml.tokens[5]", u64(2**31 + 5)), CORRUPT, "'tokenizer.ggml.tokens'", "byte")
    case("token of 2^64-1 bytes", patched("length of tokenizer.ggml.tokens[319]", u64(-1)), CORRUPT, "'tokenizer.ggml.tokens'", "byte")
    case("array whose size wraps", patched("count of tokenizer.ggml.token_type", u64(2**62 + 320)), CORRUPT, "byte")
    for v in (13, 99, 2**32 - 1):
        case(f"value type {v}", patched("type of general.name", u32(v)), CORRUPT, "'general.name'", f"is {v}")
        case(f"element type {v} (CVE-2024-21825)", patched("element type of tokenizer.ggml.tokens", u32(v)), CORRUPT, "'tokenizer.ggml.tokens'", f"is {v}")
    case("array of arrays", patched("element type of tokenizer.ggml.tokens", u32(ARR)), CORRUPT, "arrays of arrays")
    do("a key twice", lambda m: m.keys.append(m.keys[3]), CORRUPT, "'llama.block_count'", "twice", "byte")
    do("an empty key twice", lambda m: m.keys.extend([Key(b"", U8, b"1"), Key(b"", U8, b"2")]), CORRUPT, "twice")
    do("keys that differ in a NUL", lambda m: m.set("general.name\0x", 1), OK)
    for a, say in ((0, "'general.alignment'"), (12, "multiple of 8"), (2**31, "'general.alignment'"), (1, "'general.alignment'"), (65544, "'general.alignment'")):
        do(f"alignment {a} (llama.cpp PR 24997)", lambda m: m.set("general.alignment", a), CORRUPT, say)
    case("alignment a text", spoiled(lambda m: m.set("general.alignment", b"32", STR)), CORRUPT, "'general.alignment'", "of type string", "byte")

    # tensors
    T = "blk.0.attn_q.weight"
    for v in (64, 2**31, 2**64 - 1):
        case(f"tensor name of {v} bytes", patched("length of name of tensor 4", u64(v)), CORRUPT, "a tensor's name", "byte")
    do("a tensor twice", lambda m: m.tensors.append(m.tensors[4]), CORRUPT, f"'{T}'", "twice", "byte")
    do("a tensor too much", lambda m: m.tensors.append(Tensor(b"extra", [32], 0, len(m.data) - 128)), CORRUPT, "overlap")
    do("an unknown tensor", lambda m: (m.data.extend(bytes(128)), m.tensors.append(Tensor(b"extra", [32], 0, len(m.data) - 128))), INCOMPATIBLE, "'extra'", "byte")
    do("a tensor missing", lambda m: m.tensors.pop(4), CORRUPT, f"'{T}' is missing")
    for v in (0, 5, 9, 2**31, 2**32 - 1):
        case(f"{v} dimensions", patched(f"{T} n_dims", u32(v)), CORRUPT, f"'{T}'", f"{v} dimensions", "byte")
    dims = {"a zero dimension (divides by zero in b10256)": [64, 0], "first dimension zero": [0, 64], "all zero": [0, 0], "a negative dimension": [-32, 64], "2^63": [2**63, 1],
            "a product that wraps (CVE-2024-21802)": [2**33, 2**31 + 1], "a product that wraps to zero": [2**32, 2**32], "bytes that wrap": [2**61, 4],
            "quantised bytes that wrap (CVE-2026-33298)": [2**32, 0x78787878], "an exabyte": [2**30, 2**31], "dimensions past the file (CVE-2026-7482)": [64, 65536],
            "right when cut to 32 bits (CVE-2026-53923)": [64, 2**32 + 64], "a row of half a block": [48, 64], "three dimensions": [64, 64, 2], "five": [64, 64, 1, 1, 1], "the transpose": [32, 128]}
    for name, d in dims.items():
        do(f"dimensions: {name}", lambda m: setattr(m.tensor(T), "dims", d), CORRUPT, f"'{T}'", "byte")
    for v in (4, 5, 10, 31, 36, 99, 2**32 - 1):
        do(f"tensor type {v}", lambda m: setattr(m.tensor(T), "kind", v), INCOMPATIBLE, f"'{T}'", f"type {v} ", "byte")
    do("a wider type than the data (reads past the file)", lambda m: setattr(m.tensors[-1], "kind", 0), CORRUPT, "pass the end", "byte")
    offs = {"past the end": 2**40, "one block past the end": 67840 + 32, "wraps (CVE-2025-53630)": -32, "wraps when padded (CVE-2026-27940, llama.cpp PR 26318)": 2**64 - 2592, "2^63": 2**63, "odd": 13568 + 1,
            "on another tensor": 0, "half over another": 13056}
    for name, v in offs.items():
        do(f"offset: {name}", lambda m: setattr(m.tensor(T), "at", v), CORRUPT, f"'{T}'", "byte")
    do("a quantised norm", lambda m: (setattr(m.tensors[-1], "kind", 3), setattr(m.tensor("output_norm.weight"), "kind", 8)), INCOMPATIBLE, "'output_norm.weight'", "Q8_0")

    # numbers that are not finite
    bad16 = (0x7c00, 0xfc00, 0x7e00, 0x7c01)
    for base, tensor, at, word in (("q4_0", T, 18 * 5, "scale"), ("q4_1", T, 20 * 3, "scale"), ("q4_1", T, 20 * 3 + 2, "scale"), ("q5_0", T, 22, "scale"), ("q5_1", T, 24 + 2, "scale"), ("q8_0", T, 34 * 7, "scale"),
                                   ("q4_k", T, 144, "scale"), ("q5_k", T, 176 + 2, "scale"), ("q6_k", T, 210 + 208, "scale"), ("f16", T, 22, "weight"), ("q4_1", "token_embd.weight", 20 * 639, "scale"),
                                   ("q4_1", "blk.1.ffn_down.weight", 20 * 319, "scale")):
        for v in bad16:
            do(f"{base} {tensor}: {word} {v:#x} at {at}", lambda m: m.put(tensor, at, struct.pack("<H", v)), CORRUPT, f"'{tensor}'", "not finite", "byte", base=f"llama-{base}")
    for base, tensor in (("f32", T), ("f32", "blk.1.attn_norm.weight"), ("q4_1", "output_norm.weight"), ("untied", "token_embd.weight"), ("untied", "output.weight")):
        for v in (0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001):
            do(f"{base} {tensor}: {v:#x}", lambda m: m.put(tensor, 8, u32(v)), CORRUPT, f"'{tensor}'", "not finite", "byte", base=f"llama-{base}")
    do("bf16: infinity", lambda m: m.put(T, 4, b"\x80\x7f"), CORRUPT, f"'{T}'", "not finite", base="llama-bf16")
    do("rope_freqs: infinity", lambda m: m.put("rope_freqs.weight", 0, u32(0x7f800000)), CORRUPT, "rope_freqs.weight", base="llama-llama3")
    do("rope_freqs: zero", lambda m: m.put("rope_freqs.weight", 0, u32(0)), CORRUPT, "rope_freqs.weight", base="llama-llama3")

    # hyperparameters
    need = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count", "attention.layer_norm_rms_epsilon")
    for k in need:
        do(f"{k} missing", lambda m: m.drop(ARCH + k), CORRUPT, f"'{ARCH}{k}' is missing")
        do(f"{k} a text", lambda m: m.set(ARCH + k, b"2", STR), CORRUPT, f"'{ARCH}{k}'", "byte")
        do(f"{k} an array", lambda m: m.array(ARCH + k, [2, 2]), CORRUPT, f"'{ARCH}{k}'", "byte")
    for k in need[:5] + ("attention.head_count_kv", "rope.dimension_count", "vocab_size"):
        for v in (0, 2**31, 2**32 - 1):
            do(f"{k} = {v}", lambda m: m.set(ARCH + k, v), CORRUPT, f"'{ARCH}{k}'", "byte")
        do(f"{k} = -1", lambda m: m.set(ARCH + k, -1, I32), CORRUPT, f"'{ARCH}{k}'", "is -1")
        do(f"{k} = 2^64-1", lambda m: m.set(ARCH + k, 2**64 - 1, U64), CORRUPT, f"'{ARCH}{k}'", "byte")
    do("block_count 0xffffffff aborts others", lambda m: m.set(ARCH + "block_count", 2**32 - 1), CORRUPT, "block_count")
    for k, v, say in (("block_count", 1025, "byte"), ("block_count", 3, "missing"), ("block_count", 1, "not part"), ("embedding_length", 2**17 + 16, "byte"), ("embedding_length", 128, "token_embd"),
                      ("feed_forward_length", 2**20 + 16, "byte"), ("feed_forward_length", 176, "ffn_"), ("attention.head_count", 1025, "byte"), ("attention.head_count", 3, "head"),
                      ("attention.head_count_kv", 3, "KV heads"), ("attention.head_count_kv", 1, "attn_k"), ("context_length", 2**24 + 1, "byte"), ("vocab_size", 319, "vocab_size"), ("vocab_size", 321, "vocab_size"),
                      ("rope.dimension_count", 15, "even"), ("rope.dimension_count", 18, "byte"), ("attention.key_length", 0, "byte"), ("attention.key_length", 32, ""), ("attention.key_length", 17, "head_dim")):
        do(f"{k} = {v}", lambda m: m.set(ARCH + k, v), None, say)
    for k in ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor"):
        for v in (float("nan"), float("inf"), -float("inf"), -1.0, 1e30):
            do(f"{k} = {v}", lambda m: m.set(ARCH + k, v, F32), CORRUPT, f"'{ARCH}{k}'", "byte")
    do("head_count_kv by layer, one 0", lambda m: m.array(ARCH + "attention.head_count_kv", [2, 0]), CORRUPT, "head_count_kv")
    do("head_count_kv for too few layers", lambda m: m.array(ARCH + "attention.head_count_kv", [2]), CORRUPT, "head_count_kv")
    for v, status in ((b"", INCOMPATIBLE), (b"mamba", INCOMPATIBLE), (b"llama\0", INCOMPATIBLE), (b"../../x", INCOMPATIBLE), (b"%n%s" * 999, INCOMPATIBLE), (b"\x1b[31m", INCOMPATIBLE)):
        do(f"architecture {v[:12]!r}", lambda m: m.set("general.architecture", v, STR), status, "architecture")
    do("architecture missing", lambda m: m.drop("general.architecture"), CORRUPT, "general.architecture")
    do("a name of 60,000 bytes", lambda m: m.set("general.name", b"n" * 60000, STR), OK)
    do("a name that is a format and no text", lambda m: m.set("general.name", b"%n%s\xff\xfe\0\x1b[2J", STR), OK)

    # tokenizer
    TOK = "tokenizer.ggml."
    for k in ("bos", "eos", "unknown", "padding", "eot", "eom"):
        for v, kind in ((320, U32), (2**31, U32), (2**32 - 1, U32), (-1, I32), (2**63, U64)):
            do(f"{k}_token_id {v}", lambda m: m.set(f"{TOK}{k}_token_id", v, kind), CORRUPT, f"{k}_token_id", "byte")
    for k in ("tokens", "token_type"):
        do(f"one {k} less", lambda m: m.key(TOK + k).items.pop(), CORRUPT, "token")
        do(f"one {k} more", lambda m: m.key(TOK + k).items.append(m.key(TOK + k).items[-1]), CORRUPT, "token")
        do(f"{k} empty", lambda m: m.key(TOK + k).items.clear(), CORRUPT, "token")
    do("no tokens", lambda m: m.drop(TOK + "tokens"), CORRUPT, "token")
    do("no scores", lambda m: m.drop(TOK + "scores"), CORRUPT, "scores", base="llama-spm")
    do("one score less", lambda m: m.key(TOK + "scores").items.pop(), CORRUPT, "scores", base="llama-spm")
    for v in (float("nan"), float("inf"), -float("inf")):
        do(f"a score of {v}", lambda m: m.key(TOK + "scores").items.__setitem__(300, struct.pack("<f", v)), CORRUPT if v != v else OK, "scores", base="llama-spm")
    for v in (7, -1, 2**31 - 1):
        do(f"token type {v}", lambda m: m.key(TOK + "token_type").items.__setitem__(9, struct.pack("<i", v)), CORRUPT, "token_type")
    do("a token twice", lambda m: m.key(TOK + "tokens").items.__setitem__(9, m.key(TOK + "tokens").items[8]), CORRUPT, "tokens")
    for v in (b"", b" ", b"a", b"a ", b" b", b"a b c", b"nosuch token", b"\xff \xff"):
        do(f"a merge {v!r}", lambda m: m.key(TOK + "merges").items.__setitem__(2, string(v)), CORRUPT, "merges")
    do("a merge twice", lambda m: m.key(TOK + "merges").items.append(m.key(TOK + "merges").items[0]), None, "merges")
    do("no merges", lambda m: m.drop(TOK + "merges"), CORRUPT, "merges")
    do("merges that are numbers", lambda m: m.array(TOK + "merges", [1, 2, 3]), CORRUPT, "merges")
    do("tokens that are numbers", lambda m: m.array(TOK + "tokens", list(range(320))), CORRUPT, "tokens")
    for v in (b"", b"nosuch", b"llama-bpe\0"):
        do(f"pre-tokenizer {v!r}", lambda m: m.set(TOK + "pre", v, STR), INCOMPATIBLE, "pre")
    do("tokenizer unknown", lambda m: m.set(TOK + "model", b"wordpiece", STR), INCOMPATIBLE, "tokenizer.ggml.model")
    do("tokenizer missing", lambda m: m.drop(TOK + "model"), INCOMPATIBLE, "tokenizer.ggml.model")
    do("a flag of 2", lambda m: m.keys.append(Key(b"tokenizer.ggml.add_eos_token", BOOL, b"\2")), CORRUPT, "add_eos_token", "byte")
    do("a template that runs code (CVE-2024-34359)", lambda m: m.set(TEMPLATE, b"{{ cycler.__init__.__globals__.os.popen('touch " + OWNED.encode() + b"').read() }}", STR), OK)
    do("a template of a megabyte of braces", lambda m: m.set(TEMPLATE, b"{{" * 500000, STR), OK)
    do("a template that nests", lambda m: m.set(TEMPLATE, b"{% for a in b %}" * 50000, STR), OK)

    # files that are large by their length alone: counts that such a length allows
    def sparse(name, build, status, *says, size=1 << 40):
        def make(path):
            with open(path, "wb") as f:
                f.write(build)
                f.truncate(size)
        case(f"sparse: {name}", make, status, *says)

    head = lambda t, k: b"GGUF" + struct.pack("<IQQ", 3, t, k)
    sparse("30 million tensors", head(30000000, 0), CORRUPT, "n_tensors")
    sparse("70 million keys", head(0, 70000000), CORRUPT, "n_kv")
    sparse("a text of a terabyte", head(0, 1) + string(b"k") + u32(STR) + u64(900 << 30), CORRUPT, "'k'")
    sparse("2^21 empty texts and a long one", head(0, 2) + string(b"k") + u32(ARR) + u32(STR) + u64(2**21), CORRUPT, "belong to no tensor")
    sparse("an array of 2^30 texts", head(0, 1) + string(b"k") + u32(ARR) + u32(STR) + u64(2**30), CORRUPT, "'k'")
    sparse("65536 keys named nothing", head(0, 65536), CORRUPT, "twice")
    sparse("65536 tensors named nothing", head(65536, 0), CORRUPT, "byte")
    sparse("a good header, then nothing but length", Model().whole, CORRUPT, "belong to no tensor", "byte")
    many = b"".join(string(b"%d" % i) + u32(U8) + b"1" for i in range(65536))
    case("65536 good keys, no tensor", head(0, 65536) + many, CORRUPT, "general.architecture")
    case("65537 keys", head(0, 65537) + many + string(b"x") + u32(U8) + b"1", CORRUPT, "n_kv")
    full = Model()
    full.array(TOK + "tokens", [b"%06d" % i for i in range(2**20)], STR)
    case("a million tokens for 320 embeddings", full.bytes(), CORRUPT, "tokens")
    full = Model()
    full.array(TOK + "merges", [b"t h"] * 2**20, STR)
    case("a million merges", full.bytes(), None, "merges")
    full = Model()
    full.keys.append(Key(b"pad", STR, string(bytes(33 << 20))))
    case("33 MiB of header", full.bytes(), CORRUPT, "'pad'")
    return out


def fields(share, seed):
    """[(what, bytes)]: every field of the header with values at its edges; of those, each field keeps `share` of its values, at least two. Of long arrays the ends."""
    rng = random.Random(seed)
    for base in ("llama-q4_1", "llama-spm"):
        m = Model(base)
        for field, at, size in m.spots:
            i = field[field.rfind("[") + 1:-1] if field.endswith("]") else ""
            if i.isdigit() and 2 < int(i) < 300 and rng.random() > 0.01:
                continue
            old = int.from_bytes(m.whole[at:at + size], "little")
            top = 1 << 8 * size
            values = {0, 1, old - 1, old + 1, old * 2, old ^ 1, top - 1, top >> 1, (top >> 1) - 1, top - 8, 0x7f800000, 0x7fc00000, 7, 13, 99, 65536, 1 << 31, (1 << 32) + old, 1 << 62, (1 << 62) + old,
                      len(m.whole) - at, len(m.whole) - at - size, len(m.whole) + 1}
            values = sorted({v % top for v in values} - {old})
            for v in rng.sample(values, max(2, int(len(values) * share))):
                yield f"{base}: {field} at byte {at} = {v}", m.whole[:at] + v.to_bytes(size, "little") + m.whole[at + size:]


if __name__ == "__main__":      # hostile.py DIR: all of them as files, to try with other loaders
    import sys
    os.makedirs(sys.argv[1], exist_ok=True)
    for n, (name, data, status, says) in enumerate(named()):
        path = f"{sys.argv[1]}/{n:03}.gguf"
        data(path) if callable(data) else open(path, "wb").write(data)
        print(path, status, name, sep="\t")
