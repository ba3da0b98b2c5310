#!/bin/bash
# The transfer protocol over RDMA, in one process: on two devices, then on one; unit tests that are skipped elsewhere.
[ -n "${RDMA_VM:-}" ] || { echo "1..0 # skip not in the guest of scripts/rdma-vm"; exit; }
timeout 200 "$B/unit/test_rdma" >/tmp/rdma.out 2>/tmp/rdma.err
rc=$?
sed 's/^1\.\.\([0-9]*\)$/# \1 of a group/; /^not ok [0-9]* # SKIP/s/^not //' /tmp/rdma.out | awk '/^(not )?ok/ { n++; sub(/ok [0-9]+/, "ok " n) } { print } END { print "1.." n }'
cat /tmp/rdma.err >&2
exit $rc
