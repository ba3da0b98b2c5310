#!/bin/bash
# What the other tests here stand on: three devices that carry RDMA, two of them over a link that can be cut.
n=0
ok() { n=$((n + 1)); if [ "$1" = 0 ]; then echo "ok $n - $2"; else echo "not ok $n - $2"; fi; }
[ -n "${RDMA_VM:-}" ] || { echo "1..0 # skip not in the guest of scripts/rdma-vm"; exit; }
bw() { timeout 20 ib_write_bw -d "$1" -x 1 -s 65536 -n 20 -F -p "$3" >/dev/null 2>&1 & sleep 0.5; timeout 20 ib_write_bw -d "$2" -x 1 -s 65536 -n 20 -F -p "$3" 127.0.0.1 >&2; }
sent() { cat /sys/class/net/a0/statistics/tx_bytes; }
[ "$(ls /sys/class/infiniband | xargs)" = "rxe_0 rxe_a rxe_b" ]; ok $? "rxe_0, rxe_a, rxe_b"
bw rxe_0 rxe_0 5001; ok $? "both peers on one device"
was=$(sent)
bw rxe_b rxe_a 5002; ok $? "from device to device"
[ $(($(sent) - was)) -gt $((20 * 65536)) ]; ok $? "over the link between them"
ip link set a0 down
bw rxe_b rxe_a 5003; [ $? != 0 ]; ok $? "not when the link is down"
pd-link-up; sleep 0.5
bw rxe_b rxe_a 5004; ok $? "again when it is up"
echo "1..$n"
