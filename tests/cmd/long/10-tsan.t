#!/bin/sh
# The engine's pool under ThreadSanitizer: its units, and both commands with two threads. A race that is seen ends a program with status 66.
cd "$(dirname "$0")/../../.." || exit 1
[ -z "${V-}" ] || { echo "1..0 # SKIP made from the plain build alone"; exit 0; }
units="test_threads test_sampler test_stream test_pool test_weights test_engine"
echo "1..9"
n=0 rc=0
t() { # t VERDICT NAME
    n=$((n + 1))
    [ "$1" = 0 ] && echo "ok $n - $2" || { echo "not ok $n - $2"; rc=1; return 1; }
}
set --
for u in $units; do set -- "$@" "build/tsan/unit/$u"; done
mkdir -p build/tests
make -s -j2 V=tsan "$@" build/tsan/bin/pd-prefill build/tsan/bin/pd-decode >build/tests/tsan-build.log 2>&1
t $? "V=tsan builds" || tail -n 20 build/tests/tsan-build.log >&2
export TSAN_OPTIONS="halt_on_error=0 exitcode=66"
for u in $units; do
    timeout 600 "build/tsan/unit/$u" >"build/tests/tsan-$u.log" 2>&1
    t $? "$u" || tail -n 40 "build/tests/tsan-$u.log" >&2
done
for m in mixed q4_1; do
    i=0
    while [ $i -lt 24 ]; do
        i=$((i + 1))
        echo "{\"id\":$i,\"prompt\":\"It was the best of times, it was the worst of times $i\",\"max_tokens\":$((i % 7 + 1)),\"seed\":$i,\"n\":$((i % 2 + 1))}"
    done >build/tests/tsan.jsonl
    { timeout 300 build/tsan/bin/pd-prefill -q -t 2 -m testdata/tiny/llama-$m.gguf -i build/tests/tsan.jsonl || echo "status $?" >&2; } 2>build/tests/tsan-p.err |
        { timeout 300 build/tsan/bin/pd-decode -q -t 2 -m testdata/tiny/llama-$m.gguf --format json || echo "status $?" >&2; } >build/tests/tsan.out 2>build/tests/tsan-d.err
    [ ! -s build/tests/tsan-p.err ] && [ ! -s build/tests/tsan-d.err ] && [ "$(grep -c '"finish_reason"' build/tests/tsan.out)" = 36 ]
    t $? "prefill and decode of llama-$m, two threads each" || cat build/tests/tsan-p.err build/tests/tsan-d.err >&2
done
exit $rc
