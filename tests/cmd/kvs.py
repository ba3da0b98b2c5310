"""What the tests of pd-kvsend begin with: its command line, a process of it, KV of 60 runs, and what decode makes of a stream."""
import subprocess

from tap import B, decode, lines, prefill, results, run, wait_for


def kvsend(*args):
    return [f"{B}/bin/pd-kvsend", *args]


def start(cmd, **kw):
    return subprocess.Popen(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kw)


def made():
    """The stream."""
    return run(prefill(), lines([{"id": i, "prompt": f"word {i} " * (i % 20 + 1), "max_tokens": 4, "seed": i} for i in range(60)])).stdout


def key(kv):
    return {r["id"]: (tuple(r["tokens"]), r["fallback"]) for r in results(run(decode("--format", "json"), kv).stdout) if r["finish_reason"] != "error"}


def have_met(path, p):
    """p and the end that listens at path: one connection to it stands."""
    wait_for(p, lambda: any(x.split()[5:6] == ["03"] and x.rstrip().endswith(path) for x in open("/proc/net/unix")))
