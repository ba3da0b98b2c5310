#!/bin/bash
# The list of faults that every transport goes through, by rdma over two devices: among them two processes, one killed (-9) at each of its steps, or stopped.
[ -n "${RDMA_VM:-}" ] || { echo "1..0 # skip not in the guest of scripts/rdma-vm"; exit; }
exec timeout 400 "$B/unit/test_xfer_faults"
