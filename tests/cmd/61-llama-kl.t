#!/bin/bash
# The logits are no further from the float32 reference than 1.05 times llama.cpp's (mean KL). Two windows of text here, all nine with LONG=1.
B=${B:-build}
want=SmolLM2-135M-Instruct.Q4_1.gguf
[ "${PD_MODEL##*/}" = $want ] || { echo "1..0 # SKIP no model $want"; exit 0; }
[ -z "${V:-}" ] || { echo "1..0 # SKIP measured in the plain build only"; exit 0; }
[ "${LONG:-}" = 1 ] && windows=9 || windows=2
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
echo 1..2
head -n "$windows" testdata/text/opticks.ids >"$tmp/ids"
if "$B/bin/pd-bench" logits -m "$PD_MODEL" --ids "$tmp/ids" -o "$tmp/logits" >&2; then echo "ok 1 - logits of $windows windows"; else echo "not ok 1 - logits"; exit 1; fi
if told=$("$PD_PY" scripts/golden/kl.py "$PD_MODEL" testdata/text/opticks.ids "$tmp/logits" --windows "$windows"); then
    echo "ok 2 - mean KL within 1.05 of llama.cpp's"
    echo "# $told"
else
    echo "not ok 2 - mean KL within 1.05 of llama.cpp's"
    echo "# $told"
    exit 1
fi
