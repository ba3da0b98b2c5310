#!/bin/bash
# A verified hand-over by rdma against what ib_write_bw moves at 1 MiB over the same two devices, by turns; medians of five.
# Bandwidth here is that of an emulated machine: only the ratio says something, and that in quiet (make bench-kv; the goal is 0.9). In a test, with others
# about, less than half is a failure.
[ -n "${RDMA_VM:-}" ] || { echo "1..0 # skip not in the guest of scripts/rdma-vm"; exit; }
tmp=$(mktemp -d)
median() { sort -n "$1" | sed -n 3p; }
for i in 1 2 3 4 5; do
    timeout 60 ib_write_bw -d rxe_b -x 1 -s 1048576 -n 32 -t 16 -F -p 5100 >/dev/null 2>&1 &
    sleep 0.4
    # MiB/s, to MB/s
    timeout 60 ib_write_bw -d rxe_a -x 1 -s 1048576 -n 32 -t 16 -F -p 5100 127.0.0.1 | awk '$1 == 1048576 { print $4 * 1.048576 }' >>"$tmp/peer"
    wait
    timeout 60 "$B/tools/bench_rdma" rxe_a rxe_b 32 2 >"$tmp/one" || cat "$tmp/one" >&2
    sed -n 1p "$tmp/one" >>"$tmp/cold"
    sed -n 2p "$tmp/one" >>"$tmp/warm"
done
awk -v p="$(median "$tmp/peer")" -v w="$(median "$tmp/warm")" -v c="$(median "$tmp/cold")" 'BEGIN {
    printf "# ib_write_bw, 1 MiB        %8.1f MB/s\n# pd, verified, warm        %8.1f MB/s  %5.1f %% (goal 90)\n# pd, verified, registering %8.1f MB/s  %5.1f %%\n", p, w, 100 * w / p, c, 100 * c / p
    printf("# {\"name\":\"rdma.of_ib_write_bw\",\"value\":%.3f,\"unit\":\"ratio\",\"goal\":0.9,\"pass\":%s,\"n\":5}\n", w / p, (w >= 0.9 * p) ? "true" : "false")
    printf("%sok 1 - at least half of ib_write_bw, verified\n1..1\n", (p > 0 && w >= 0.5 * p) ? "" : "not ") }' | tee "$tmp/out"
sed -n 's/^# //p' "$tmp/out" >&2
grep -q '^ok 1' "$tmp/out"
