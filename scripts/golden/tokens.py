#!/usr/bin/env python3
"""Compare our tokenizers with Hugging Face's `tokenizers`, and make the golden files of the tests.

  tokens.py check TOK MODEL.gguf         seeded strings through both; TAP on stdout. TOK is build/tools/tok
  tokens.py write MODEL.gguf OUT.jsonl   ids by the reference for a part of those strings
  tokens.py tiny DIR                     small vocabularies of every kind, each a GGUF without tensors, and ids by the reference

The reference gets vocabulary, merges and scores from the GGUF, and its pre-tokenizer from the published definition of the model's own
tokenizer.json, not from our patterns."""
import json, mmap, random, struct, subprocess, sys, unicodedata
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SEED = 20240229
CONTROL, USER, BYTE = 3, 4, 6


# --- GGUF metadata, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

SCALAR = {0: 'B', 1: 'b', 2: 'H', 3: 'h', 4: 'I', 5: 'i', 6: 'f', 7: '?', 10: 'Q', 11: 'q', 12: 'd'}


def read_gguf(path):
    with open(path, 'rb') as f:
        data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    at = 0

    def scalar(fmt):
        nonlocal at
        v, = struct.unpack_from('<' + fmt, data, at)
        at += struct.calcsize('<' + fmt)
        return v

    def string():
        nonlocal at
        n = scalar('Q')
        at += n
        return data[at - n:at]

    def value(kind):
        if kind == 8:
            return string()
        if kind == 9:
            elem, n = scalar('I'), scalar('Q')
            return [value(elem) for _ in range(n)]
        return scalar(SCALAR[kind])

    assert data[:4] == b'GGUF'
    at = 8
    scalar('Q')
    return {string().decode(): value(scalar('I')) for _ in range(scalar('Q'))}


def write_gguf(path, kv):
    def string(s):
        b = s if isinstance(s, bytes) else s.encode()
        return struct.pack('<Q', len(b)) + b

    def array(kind, items, pack):
        return struct.pack('<IIQ', 9, kind, len(items)) + b''.join(map(pack, items))

    out = [b'GGUF', struct.pack('<IQQ', 3, 0, len(kv))]
    for k, v in kv.items():
        out.append(string(k))
        if isinstance(v, bool):
            out.append(struct.pack('<I?', 7, v))
        elif isinstance(v, int):
            out.append(struct.pack('<II', 4, v))
        elif isinstance(v, str):
            out.append(struct.pack('<I', 8) + string(v))
        elif isinstance(v[0], float):
            out.append(array(6, v, lambda x: struct.pack('<f', x)))
        elif isinstance(v[0], int):
            out.append(array(5, v, lambda x: struct.pack('<i', x)))
        else:
            out.append(array(8, v, string))
    with open(path, 'wb') as f:
        f.write(b''.join(out))


# --- the reference

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r'{1,3}', '')


def byte_level(use_regex):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def pre_tokenizer(pre):
    if pre == 'gpt-2':
        return byte_level(True)
    if pre == 'smollm':
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(True)])
    pattern = {'llama-bpe': LLAMA3, 'qwen2': QWEN2}[pre]
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior='isolated'), byte_level(False)])


def sp_merges(tokens, scores, types):
    """A SentencePiece vocabulary as merges: every way to make a piece of two, the best score first."""
    ok = {t: s for t, s, k in zip(tokens, scores, types) if k == 1}
    pairs = [(-s, t[:i], t[i:]) for t, s in ok.items() for i in range(1, len(t)) if t[:i] in ok and t[i:] in ok]
    return [(a, b) for _, a, b in sorted(pairs, key=lambda p: p[0])]


def reference(kv, parse_special):
    tokens = [t.decode() for t in kv['tokenizer.ggml.tokens']]
    types = kv['tokenizer.ggml.token_type']
    if kv['tokenizer.ggml.model'] == b'gpt2':
        pre = kv['tokenizer.ggml.pre'].decode()
        merges = [tuple(m.decode().split(' ')) for m in kv['tokenizer.ggml.merges']]
        tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, ignore_merges=pre == 'llama-bpe'))
        tok.pre_tokenizer = pre_tokenizer(pre)
    else:
        merges = sp_merges(tokens, kv['tokenizer.ggml.scores'], types)
        tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, byte_fallback=True, fuse_unk=True, unk_token='<unk>'))
        space = [normalizers.Replace(' ', '\u2581')]
        if kv['tokenizer.ggml.add_space_prefix']:
            space.insert(0, normalizers.Prepend('\u2581'))
        tok.normalizer = normalizers.Sequence(space)
    found = [t for t, k in zip(tokens, types) if k == USER or (parse_special and k in (2, CONTROL))]
    tok.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in found])
    return tok


# --- the strings

SCRIPTS = {
    'latin': 'àéîõüßçñøåžšłđœæÀÉÑŠŽİıǅẞ',
    'greek': 'αβγδεζηθικλμνξοπρσςτυφχψωΆΈΉΊΌΎΏ',
    'cyrillic': 'абвгдежзийклмнопрстуфхцчшщъыьэюяЁЇЄҐЂЉЊ',
    'arabic': 'ابتثجحخدذرزسشصضطظعغفقكلمنهويءآأإةىًٌٍَُِّْ',
    'hebrew': 'אבגדהוזחטיכלמנסעפצקרשתךםןףץְֱֲֳִֵֶַָֹ',
    'devanagari': 'अआइईउऊएऐओऔकखगघचछजझटठडढणतथदधनपफबभमयरलवशषसहािीुूेैोौ्ंः',
    'bengali-tamil': 'অআইকখগঘচছজঝটঠডঢতথদধনপফবভমযরলশষসহািীুূেைொஅஆஇஈகஙசஞடணதநபமயரலவழளறன',
    'thai-khmer': 'กขคงจฉชซญดตถทธนบปผฝพฟภมยรลวศษสหอฮะาิีึืุู่้๊๋កខគឃងចឆជឈញ',
    'han': '的一是不了人我在有他这中大来上国和地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实',
    'kana': 'あいうえおかきくけこさしすせそたちつてとなにぬねのはひふへほまみむめもやゆよらりるれろわをんアイウエオカキクケコサシスセソガギグゲゴヷーッャュョ',
    'hangul': '가나다라마바사아자차카타파하각간갇갈감갑값갓갔강개객거건걸검겁것게겨격견결겸경계고곡곤골공과관괄광괘괴굉교구국군굴궁권',
    'others': 'աբգდევზჰᏣᎳᎩᐃᓄᒃᚠᚢᚦ𐌰𐌱𐌲𝔘𝔫𝔦𝒞𝟘𝟙𐍈ꙮ𒀀𓀀',
}
WORDS = '''the of and to in is that it was for on are as with his they at be this from have or by one had not but what all were when we there can an your
which their said if do will each about how up out them then she many some so these would other into has more her two like him see time could no make than
first been its who now people my made over did down only way find use may water long little very after words called just where most know get through back
much before go good new write our used me man too any day same right look think also around another came come work three word must because does part even
place well such here take why things help put years different away again off went old number Paris France capital neural transformer prefill decode cache
antidisestablishmentarianism Kubernetes HTTP2 iPhone macOS README x86_64'''.split()
SPACES = [' ', '\t', '\n', '\r', '\r\n', '\v', '\f', '\x1c', '\x1f', '\x85', '\xa0', '\u1680', '\u180e', '\u2000', '\u2003', '\u2009', '\u200b', '\u2028', '\u2029',
          '\u202f', '\u205f', '\u2060', '\u3000', '\ufeff']
EMOJI = ['😀', '😂', '❤️', '👍🏽', '👩‍👩‍👧‍👦', '👨🏿‍💻', '🏳️‍🌈', '🇫🇷', '🇯🇵', '🏴󠁧󠁢󠁥󠁮󠁧󠁿', '1️⃣', '#️⃣', '🤷🏻‍♀️', '🧑‍🚀', '☺', '☺️', '✈', '♟', '🫠', '🥲', '🪄', '©️', '‼️', '🀄', '👁️‍🗨️', '🧑🏾‍🤝‍🧑🏻']
MARKERS = ['<|im_start|>', '<|im_end|>', '<|endoftext|>', '<repo_name>', '<file_sep>', '<|begin_of_text|>', '<|eot_id|>', '<|start_header_id|>', '<s>', '</s>', '<unk>',
           '<0x0A>', '<0x41>', '<pad>', '[INST]', '<tool>', '<tool_call>']
CODE = ['def f(x):\n    return x + 1\n', 'for (int i = 0; i < n; ++i) {\n\ta[i] *= 2;\n}\n', 'if x != None and y is not None:', '#include <stdio.h>\n', 'SELECT * FROM t WHERE a >= 10;',
        'let mut v: Vec<u8> = vec![0; 16];', 'x = {"a": [1, 2.5e-3, null], "b": "c\\n"}', '<div class="x">&nbsp;</div>', 'echo "$HOME" | sed -e s/a/b/g >/dev/null 2>&1',
        '\\frac{\\partial f}{\\partial x}', 'git commit -m "fix: off-by-one"', 'https://example.com/a?b=c&d=%20#e', '__init__(self, *args, **kwargs)', 'a->b->c[0]', 'lambda x: (x**2)//3',
        '    \n        \n\tpass\n', '/* comment */ // more', '0xDEADBEEF', '@property', 'x?.y ?? z', '$$$', '!!!', '...', '---', '===', '\u2014\u2026\u201cq\u201d']
NUMBERS = ['0', '1', '12', '123', '1234', '12345678901234567890', '3.14159', '1,000,000', '-273.15', '1e-9', '½', '²', 'Ⅻ', '①', '٣٤٥', '१२३', '〇一二', '𝟘𝟙𝟚', '10:45', '2024-02-29', '50%', '$9.99',
           '1st', '2nd', 'v2.0.1', '192.168.0.1', '+49-30-901820', '٠', '㊿', '৳১২']
SHORT = ["don't", "I'm", "you're", "we've", "he'll", "she'd", "it's", "DON'T", "I'M", "YOU'RE", "'S", "o'clock", "'tis", "rock'n'roll", "y'all'd've", "'''", "''s", "l'été", "it’s", "'ſ", "'LL go", "'Ve", "a'd b'D"]


# One of each kind of trouble, by name: what breaks tokenizers is seldom what chance makes.
EDGES = [
    '', ' ', '  ', '   ', '\t', '\n', '\n\n', '\n\n\n', '\n\n\n\n\n', '\r\n', '\r\n\r\n', '\n \n', ' \n', '\n ', '\t\n', '\n\t', ' \n\n  \n', 'a\n\n\nb', 'a \n b', 'trailing   ', '   leading',
    'in   between', 'tab\there', 'a\u00a0b', 'a\u3000b', 'a\u200bb', 'a\u2028b', '\ufeffbom', 'Hello', ' Hello', 'Hello World', ' Hello World!', 'Hello, y\'all! How are you \U0001f601 ?',
    "I'll we've don't you're he'd it's I'm", "I'LL WE'VE DON'T YOU'RE HE'D IT'S I'M", "'", "''", "'s", " 's", "it\u2019s", "'S'T'RE", "a'b'c", "'\u017f",
    '1', '12', '123', '1234', '12345', '1234567', '12345678901234567890', '3.14', '1,000', '1 2 3', 'a1b22c333', '\u0663\u0664', '\u00bd\u00b2', '\u2167',
    'the_quick-brown.fox/jumps', '!!!', '?!?!', '=====', '------', '"quoted"', '(a)[b]{c}', 'x=y+z;', '//comment', '#include <a.h>', 'https://a.example/b?c=d#e', 'a@b.example', '$100.00%', 'C:\\x\\y',
    '\u00e9', 'e\u0301', 'na\u00efve caf\u00e9', 'Stra\u00dfe', '\u0130stanbul', '\u1e9e', '\u03a3\u03af\u03c3\u03c5\u03c6\u03bf\u03c2', '\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!',
    '\u0645\u0631\u062d\u0628\u0627 \u0628\u0643', '\u05e9\u05dc\u05d5\u05dd', '\u0928\u092e\u0938\u094d\u0924\u0947', '\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35', '\u1780\u17b6\u1793\u17cb\u178f\u17c2\u1796\u17b7\u179f\u17c1\u179f',
    '\u17a2\u17b6\u1785\u1794\u1793\u17d2\u1790\u17c2\u1798', '\u4f60\u597d\uff0c\u4e16\u754c', '\u3053\u3093\u306b\u3061\u306f', '\uc548\ub155', '\u0b95\u0bcd\u0bb7', '\U0001d54f\U0001d56a', '\U00020000\U0002a6d6', '\U0010ffff', '\uffff',
    '\U0001f600', '\U0001f44d\U0001f3fd', '\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466', '\U0001f1eb\U0001f1f7\U0001f1ef\U0001f1f5', '\u2764\ufe0f\u200d\U0001f525', '1\ufe0f\u20e3', '\U0001f3f4\U000e0067\U000e0062\U000e007f',
    '\U0001f600\U0001f600 \U0001f600', 'a\U0001f9d1\u200d\U0001f680b', '\u200d', '\ufe0f',
    '<|im_start|>', '<|im_end|>', '<|endoftext|>', '<|im_start|', '|im_start|>', '<|im_start |>', '<|IM_START|>', '<|im_start|><|im_start|>', '<|im_<|im_end|>', '<\uff5cim_start\uff5c>', 'a<|im_end|>b', ' <|im_end|> ',
    '<|eot_id|>', '<|begin_of_text|', '<s>', '</s>', '<s', '<unk>', '<0x0A>', '<0xZZ>', '[INST]', '<tool_call>', '<tool_call', '\0', 'a\0b', '\0\0', '\u2581', 'a\u2581b', '\u2581\u2581', '\u0120a', '\u010a',
    '\x7f', '\x1b[31m', '\x85', 'a' * 300, 'ab' * 150, ' ' * 300, '\n' * 300, '1' * 300, '\u00e9' * 300, '\U0001f600' * 100, ' a' * 200, 'antidisestablishmentarianism',
]
INVALID = {b'\xff': 0, b'a\x80': 1, b'\xc3': 0, b'ab\xc0\xaf': 2, b'\xe2\x82': 0, b'ok \xed\xa0\x80': 3, b'\xf0\x9f\x98': 0, b'\xf4\x90\x80\x80': 0, b'\xf8\x88\x80\x80\x80': 0, b'\xe0\x80\x80': 0, b'a b\xfe': 3}


def make_strings():
    """[(kind, text)], at least 100 of each kind, the same at every call."""
    rnd = random.Random(SEED)
    pick, ri = rnd.choice, rnd.randint
    # Characters that Unicode 14 has, so that the tables of both sides know them.
    assigned = [chr(c) for c in list(range(32, 0xd800)) + list(range(0xe000, 0x20000)) + list(range(0x20000, 0x20100)) + list(range(0xe0000, 0xe0200))
                if unicodedata.category(chr(c)) not in ('Cn', 'Cs', 'Co')]

    def words(n):
        return ' '.join(pick(WORDS).capitalize() if ri(0, 6) == 0 else pick(WORDS) for _ in range(n))

    def script(name, n):
        return ''.join(pick(SCRIPTS[name]) if ri(0, 5) else ' ' for _ in range(n))

    def run(of, n):
        return ''.join(pick(of) * pick([1, 1, 1, 2, 3, 7, 40]) for _ in range(n))

    def split_marker():
        m = pick(MARKERS)
        how = ri(0, 7)
        if how == 0:
            return m
        i = ri(1, len(m) - 1)
        return [m, m[:i] + ' ' + m[i:], m[:i] + m[i:].upper(), m[:i], m[i:], m + m[1:], m.replace('|', '\uff5c'), m[:i] + '\0' + m[i:]][how]

    def interleave(items, n, between=(' ', '', '\n', '  ', ', ')):
        return ''.join(pick(items) + pick(between) for _ in range(n))

    kinds = {
        'prose': lambda: words(ri(1, 60)) + pick(['', '.', '!', '?', ' ', '\n']),
        'long': lambda: '\n\n'.join(words(ri(20, 120)) + '.' for _ in range(4)),
        'one word': lambda: ''.join(pick('abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ') for _ in range(pick([1, 2, 5, 20, 41, 100, 500]))),
        'repeated': lambda: pick(['a', 'ab', 'the', ' ', '=', '\n', 'é', '的', '1', '😀', '-', ' a', 'Ġ']) * ri(1, 200),
        'emoji': lambda: interleave(EMOJI + WORDS[:8], ri(1, 12)),
        'code': lambda: interleave(CODE, ri(1, 6)),
        'white space': lambda: run(SPACES, ri(1, 8)) + pick(['', 'x', '1', '.', '\u00e9']) + run(SPACES[:5], ri(0, 4)) + pick(['', 'end']),
        'special look-alikes': lambda: ''.join(split_marker() + pick(['', ' ', 'a', '\n', words(2)]) for _ in range(ri(1, 6))),
        'embedded NUL': lambda: '\0'.join(pick([words(ri(0, 4)), '', script('han', 4), '1', ' ']) for _ in range(ri(2, 6))),
        'digits': lambda: interleave(NUMBERS, ri(1, 8)),
        'contractions': lambda: interleave(SHORT + WORDS[:5], ri(1, 8)),
        'punctuation': lambda: ''.join(pick('!"#$%&\'()*+,-./:;<=>?@[\\]^_`{|}~¡¿«»“”‘’…–—•§¶€£¥°') * pick([1, 1, 2, 5]) + pick(['', ' ', 'a', '7']) for _ in range(ri(1, 12))),
        'combining': lambda: ''.join(pick('aeiounAEIOU') + ''.join(pick('\u0301\u0300\u0308\u0323\u20dd\u0338') for _ in range(ri(0, 3))) + pick(['', ' ']) for _ in range(ri(1, 20))),
        'any character': lambda: ''.join(pick(assigned) + pick(['', '', ' ']) for _ in range(ri(1, 40))),
        'byte alphabet': lambda: ''.join(chr(ri(0x80, 0x143)) + pick(['', '', ' ', 'a']) for _ in range(ri(1, 30))),
        'mixed': lambda: ''.join(pick([words(2), script(pick(list(SCRIPTS)), 6), pick(EMOJI), pick(CODE), pick(NUMBERS), pick(SHORT), split_marker(), run(SPACES, 1)]) for _ in range(ri(2, 10))),
    }
    kinds.update({name: lambda name=name: script(name, ri(1, 60)) for name in SCRIPTS})
    return [(kind, make()) for kind, make in kinds.items() for _ in range(110 if kind in SCRIPTS else 120)]


def ours(tok, model, texts, parse_special):
    lines = ''.join((t if isinstance(t, bytes) else t.encode()).hex() + '\n' for t in texts)
    out = subprocess.run([tok] + ['-s'] * parse_special + [model], input=lines, stdout=subprocess.PIPE, text=True, check=True).stdout.split('\n')
    return [o.split('\t') if not o.startswith('error') else (o, None) for o in out[:-1]]


def spelled(kv, text):
    """Has the vocabulary a token for every byte? (SmolLM2's lacks 21.) The reference drops the others without a word."""
    if kv['tokenizer.ggml.model'] != b'gpt2':
        return True
    have = {t.decode() for t in kv['tokenizer.ggml.tokens']}
    alphabet = byte_alphabet()
    return all(alphabet[b] in have for b in text.encode())


def byte_alphabet():
    own = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    rest = [b for b in range(256) if b not in own]
    return {**{b: chr(b) for b in own}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


def check(tok, model):
    kv = read_gguf(model)
    strings = make_strings()
    have = {t.decode() for t in kv['tokenizer.ggml.tokens']}
    lacking = [b for b, c in byte_alphabet().items() if kv['tokenizer.ggml.model'] == b'gpt2' and c not in have]
    strings = [(k, t) for k, t in strings if not any(b in lacking for b in t.encode())]
    kinds = {k: [t for kind, t in strings if kind == k] for k, _ in strings}
    rnd = random.Random(SEED)
    kinds['edges'] = [t for t in EDGES if not any(b in lacking for b in t.encode())]
    kinds['word of a megabyte'] = [''.join(rnd.choices('abcdefghijklmnopqrstuvwxyz', k=10**6))]
    spm = kv['tokenizer.ggml.model'] != b'gpt2'
    least = {'edges': 100, 'word of a megabyte': 1}
    n = 0
    for parse_special in (False, True):
        ref = reference(kv, parse_special)
        for kind, texts in kinds.items():
            if parse_special and kind == 'word of a megabyte':
                continue                # the reference takes seconds
            want = [' '.join(map(str, x.ids)) for x in ref.encode_batch(texts, add_special_tokens=False)]
            got = ours(tok, model, texts, parse_special)
            # U+2581 is SentencePiece's space: it comes back as one.
            wrong = [(t, w, g) for t, w, g in zip(texts, want, got) if g[0] != w or (g[1] != t.encode().hex() and not (spm and '\u2581' in t))]
            n += 1
            good = not wrong and len(got) == len(texts) >= least.get(kind, 100)
            print(f'{"ok" if good else "not ok"} {n} - {kind}: {len(texts)} strings, special tokens {"found" if parse_special else "not looked for"}')
            for t, w, g in wrong[:3]:
                print(f'# text {t[:400]!r}\n# want {w[:400]}\n# got  {g[0][:400]}\n# back {g[1] and bytes.fromhex(g[1])[:400]!r}')
    n += 1
    got = ours(tok, model, INVALID, True)
    wrong = [(t, g) for (t, at), g in zip(INVALID.items(), got) if g[1] is not None or f'at byte offset {at} ' not in g[0]]
    print(f'{"ok" if not wrong else "not ok"} {n} - {len(INVALID)} texts that are no UTF-8 are refused with their offset')
    for t, g in wrong:
        print(f'# text {t!r}\n# got  {g[0]}')
    n += 1
    total = len(strings)
    print(f'{"ok" if total >= 2000 else "not ok"} {n} - {total} strings of {len(kinds)} kinds')
    texts = ['ab' + bytes([b]).decode('ascii') for b in lacking if b < 0x80] + ['ab\U00040000']
    got = ours(tok, model, texts, False)
    named = [g[1] is None and 'at offset 2 ' in g[0] for g in got] if lacking else [True]
    n += 1
    print(f'{"ok" if all(named) else "not ok"} {n} - characters that the vocabulary cannot spell are refused with their offset\n1..{n}')


def golden(kv, strings, path):
    off, on = reference(kv, False), reference(kv, True)
    with open(path, 'w') as f:
        for kind, t in strings:
            if len(t) > 400 or not spelled(kv, t):
                continue
            a, b = (r.encode(t, add_special_tokens=False).ids for r in (off, on))
            f.write(json.dumps({'hex': t.encode().hex(), 'ids': a, **({'special': b} if b != a else {})}, separators=(',', ':')) + '\n')


def write(model, out):
    strings, seen = [], {}
    for kind, t in make_strings():
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= 12:
            strings.append((kind, t))
    golden(read_gguf(model), strings, out)


def tiny(folder):
    strings = make_strings()
    corpus = [t for k, t in strings if k in ('prose', 'code', 'digits', 'contractions', 'latin', 'cyrillic', 'han', 'white space')]
    few = [(k, t) for i, (k, t) in enumerate(strings) if i % 17 == 0 and len(t) <= 160]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    for pre, control in (('gpt-2', ['<|endoftext|>']), ('smollm', ['<|endoftext|>', '<|im_start|>', '<|im_end|>']), ('qwen2', ['<|endoftext|>', '<|im_start|>', '<|im_end|>']),
                         ('llama-bpe', ['<|begin_of_text|>', '<|end_of_text|>', '<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>'])):
        tok = Tokenizer(models.BPE())
        tok.pre_tokenizer = pre_tokenizer(pre)
        tok.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=256 + 320, initial_alphabet=sorted(alphabet), show_progress=False))
        model = json.loads(tok.to_str())['model']
        vocab = sorted(model['vocab'], key=model['vocab'].get)
        merges = [' '.join(m) if isinstance(m, list) else m for m in model['merges']]
        # A whole word that no merges make, to tell models that take it (Llama 3) from those that do not.
        vocab += ['Ġantidisestablishmentarianism', '<tool_call>'] + control
        n = len(vocab)
        types = [1] * (n - len(control) - 1) + [USER] + [CONTROL] * len(control)
        kv = {'general.architecture': 'llama', 'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.pre': pre, 'tokenizer.ggml.tokens': vocab, 'tokenizer.ggml.token_type': types,
              'tokenizer.ggml.merges': merges, 'tokenizer.ggml.bos_token_id': n - len(control), 'tokenizer.ggml.eos_token_id': n - 1}
        name = f'{folder}/tok-{pre}'
        write_gguf(name + '.gguf', kv)
        golden(read_gguf(name + '.gguf'), few, name + '.jsonl')
    tiny_spm(folder, corpus, few)


def tiny_spm(folder, corpus, few):
    for prefix in (True, False):
        tok = Tokenizer(models.BPE(unk_token='<unk>', byte_fallback=True))
        tok.normalizer = normalizers.Replace(' ', '\u2581')
        # No pre-tokenizer: pieces may span words, as in a vocabulary with runs of spaces.
        chunks = [c for t in corpus for c in (t[i:i + 12] for i in range(0, len(t), 12))]
        tok.train_from_iterator(chunks, trainers.BpeTrainer(vocab_size=560, limit_alphabet=120, show_progress=False))
        model = json.loads(tok.to_str())['model']
        learnt = [t for t in sorted(model['vocab'], key=model['vocab'].get)]
        if '\u2581' not in learnt:
            learnt.append('\u2581')
        head = ['<unk>', '<s>', '</s>'] + [f'<0x{b:02X}>' for b in range(256)]
        tokens = head + learnt
        # As SentencePiece numbers them: a later merge has a lower score. Characters come first in the trainer's vocabulary and never compete.
        scores = [0.0] * len(head) + [-float(i) for i in range(len(learnt))]
        types = [2, CONTROL, CONTROL] + [BYTE] * 256 + [1] * len(learnt)
        kv = {'general.architecture': 'llama', 'tokenizer.ggml.model': 'llama', 'tokenizer.ggml.tokens': tokens, 'tokenizer.ggml.scores': scores, 'tokenizer.ggml.token_type': types,
              'tokenizer.ggml.bos_token_id': 1, 'tokenizer.ggml.eos_token_id': 2, 'tokenizer.ggml.unknown_token_id': 0, 'tokenizer.ggml.add_space_prefix': prefix}
        name = f'{folder}/tok-spm{"" if prefix else "-noprefix"}'
        write_gguf(name + '.gguf', kv)
        golden(read_gguf(name + '.gguf'), few, name + '.jsonl')


if __name__ == '__main__':
    verbs = {'check': check, 'write': write, 'tiny': tiny}
    if len(sys.argv) < 3 or sys.argv[1] not in verbs:
        sys.exit(__doc__)
    verbs[sys.argv[1]](*sys.argv[2:])
