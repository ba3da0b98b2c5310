#!/bin/sh
# The daemons under ThreadSanitizer: workers and router, whole runs, failures, cancels. A race that is seen ends a daemon with status 66, which its test notices.
cd "$(dirname "$0")/../../.." || exit 1
[ -z "${V-}" ] || { echo "1..0 # SKIP made from the plain build alone"; exit 0; }
suites="56-worker 58-route-fixed 59-pd 59-pdfaults 59-route-cond 59-route-fail"
echo "1..7"
rc=0 n=1
mkdir -p build/tests
if make -s -j2 V=tsan all >build/tests/tsan-daemons-build.log 2>&1; then
    echo "ok 1 - V=tsan builds"
else
    echo "not ok 1 - V=tsan builds"
    tail -n 20 build/tests/tsan-daemons-build.log >&2
    exit 1
fi
export TSAN_OPTIONS="halt_on_error=0 exitcode=66"
for s in $suites; do
    n=$((n + 1))
    log=build/tests/tsan-$s.log
    if LONG= V=tsan B=build/tsan timeout 600 scripts/run-tests "$s" >"$log" 2>&1 && ! grep -q "ThreadSanitizer" "$log"; then
        echo "ok $n - $s"
    else
        echo "not ok $n - $s"
        grep -E "^not ok|ThreadSanitizer|^    #[0-4]" "$log" | head -n 40 >&2
        rc=1
    fi
done
exit $rc
