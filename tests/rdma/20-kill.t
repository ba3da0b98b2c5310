#!/bin/bash
# Two processes on two devices, one of them killed (-9) at each of its steps.
[ -n "${RDMA_VM:-}" ] || { echo "1..0 # skip not in the guest of scripts/rdma-vm"; exit; }
exec timeout 400 "$B/unit/test_xfer_kill"
