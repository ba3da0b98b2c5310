#!/bin/sh
# Chat templates, and hundreds of mutations of each, beside Jinja2 itself: the same text, or refused; and the ids of the whole text.
B=${B:-build}
PY=${PD_PY:-${PD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pd}/venv/bin/python3}
cd "$(dirname "$0")/../.." || exit 1

"$PY" -c 'import jinja2, tokenizers' 2>/dev/null || { echo "1..0 # SKIP no Python with jinja2 and tokenizers (scripts/setup makes one)"; exit 0; }
[ -n "${PD_MODEL-}" ] || PD_MODEL=$(scripts/fetch-model 2>/dev/null) || PD_MODEL=

n=0 rc=0
for m in "$PD_MODEL" testdata/tok/tok-llama-bpe.gguf testdata/tok/tok-spm.gguf; do
    n=$((n + 1)) mutations=100
    [ "$m" != testdata/tok/tok-llama-bpe.gguf ] || mutations=1      # the same templates; here for the ids
    [ -z "${LONG-}" ] || mutations=1000
    if [ -z "$m" ]; then
        echo "ok $n - the real model's template # SKIP no model (scripts/fetch-model fetches it)"
        continue
    fi
    out=$("$PY" scripts/golden/chat.py check "$B/tools/chat" "$m" $mutations); status=$?
    if [ "$status" = 0 ] && printf '%s\n' "$out" | grep -q '^ok 2 ' && ! printf '%s\n' "$out" | grep -q '^not ok'; then
        echo "ok $n - ${m##*/}: $(printf '%s\n' "$out" | grep -c '^ok') comparisons with Jinja2"
    else
        echo "not ok $n - ${m##*/}: comparisons with Jinja2"; rc=1
        printf '%s\n' "$out" | grep -A6 '^not ok' >&2
    fi
done
echo "1..$n"
exit $rc
