#!/bin/sh
# Our tokenizers beside Hugging Face's `tokenizers`, on some 3,000 seeded strings: equal ids, and texts that come back byte for byte.
# The small vocabularies need no network; the real model is skipped where it is not.
B=${B:-build}
PY=${PD_PY:-${PD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pd}/venv/bin/python3}
cd "$(dirname "$0")/../.." || exit 1

"$PY" -c 'import tokenizers' 2>/dev/null || { echo "1..0 # SKIP no Python with tokenizers (scripts/setup makes one)"; exit 0; }
[ -n "${PD_MODEL-}" ] || PD_MODEL=$(scripts/fetch-model 2>/dev/null) || PD_MODEL=

n=0 rc=0
t() { # t VERDICT NAME
    n=$((n + 1))
    [ "$1" = 0 ] && echo "ok $n - $2" || { echo "not ok $n - $2"; rc=1; }
}

# One line of our TAP a model; what differed goes to stderr.
for m in "$PD_MODEL" testdata/tok/tok-gpt-2.gguf testdata/tok/tok-smollm.gguf testdata/tok/tok-qwen2.gguf testdata/tok/tok-llama-bpe.gguf testdata/tok/tok-spm.gguf \
         testdata/tok/tok-spm-noprefix.gguf; do
    if [ -z "$m" ]; then
        n=$((n + 1)); echo "ok $n - the real model # SKIP no model (scripts/fetch-model fetches it)"
        continue
    fi
    out=$("$PY" scripts/golden/tokens.py check "$B/tools/tok" "$m"); status=$?
    bad=$(printf '%s\n' "$out" | grep -c '^not ok')
    good=$(printf '%s\n' "$out" | grep -c '^ok')
    [ "$status" = 0 ] && [ "$bad" = 0 ] && [ "$good" -gt 50 ]
    t $? "${m##*/}: $(printf '%s\n' "$out" | sed -n 's/^ok [0-9]* - \([0-9]* strings of .*\)/\1/p'), no mismatch"
    [ "$bad" = 0 ] || printf '%s\n' "$out" | grep -A4 '^not ok' >&2
done

# The comparison can fail: another pre-tokenizer's ids are told apart.
out=$("$PY" - "$B/tools/tok" 2>&1 <<'END'
import sys
sys.path.insert(0, 'scripts/golden')
import tokens
real = tokens.pre_tokenizer
tokens.pre_tokenizer = lambda pre: real('gpt-2')
tokens.check(sys.argv[1], 'testdata/tok/tok-smollm.gguf')
END
)
printf '%s\n' "$out" | grep -q '^not ok.*digits'
t $? "a reference with another pre-tokenizer does not agree"

# A word of a megabyte
if [ -n "$PD_MODEL" ]; then
    us=$("$PY" -c 'import random; random.seed(7); print(b"a".hex() * 10**6); print("".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=10**6)).encode().hex())' |
         "$B/tools/tok" -t "$PD_MODEL" 2>&1 >/dev/null | sed -n 's/.* encode_us \([0-9]*\) .*/\1/p' | sort -n | tail -1)
    echo "# the slower of two words of 1 MB took $us us of processor time"
    [ -n "$us" ] && [ "$us" -lt $([ -n "${V-}" ] && echo 30000000 || echo 1000000) ]
    t $? "a word of a megabyte takes less than a second"
else
    n=$((n + 1)); echo "ok $n - a word of a megabyte # SKIP no model"
fi
echo "1..$n"
exit $rc
