#!/usr/bin/env python3
"""The examples of the manual pages and the README are run, each in a folder of its own, with the build's commands on PATH and M the model.

A page's examples are the literal displays of its EXAMPLES section; the README's are its ```sh blocks. One that a line before it marks with
"not run" (a comment in the page's source) is left out. An example passes when every command of it does and it prints something.
The tutorial is one example: all of its displays, one after the other."""
import os
import re
import signal
import subprocess
import sys
import tempfile

B = os.environ.get("B", "build")
B = B if os.path.isabs(B) else os.path.join(os.getcwd(), B)
model = os.environ.get("PD_MODEL", "")


def of_page(path, everywhere=False):
    lines = open(path).read().split("\n")
    inside = everywhere
    block = None
    skip = False
    for n, line in enumerate(lines, 1):
        if line.startswith(".Sh"):
            inside = everywhere or line == ".Sh EXAMPLES"
        elif inside and "not run" in line and line.startswith('.\\"'):
            skip = True
        elif inside and line.startswith(".Bd -literal"):
            block, start = [], n
        elif line == ".Ed" and block is not None:
            if not skip:
                yield f"{path}:{start}", "\n".join(block)
            block, skip = None, False
        elif block is not None:
            block.append(line.replace("\\e", "\\").replace("\\&", "").replace("\\(dq", '"').replace("\\-", "-"))


def of_readme(path):
    text = open(path).read()
    for m in re.finditer(r"^```sh\n(.*?)^```", text, re.S | re.M):
        line = text[:m.start()].count("\n") + 1
        if "not run" not in text[:m.start()].rstrip("\n").rsplit("\n", 1)[-1]:
            yield f"{path}:{line}", m.group(1)


examples = []
for page in sorted(os.listdir("man")):
    path = os.path.join("man", page)
    if page == "pd-tutorial.7":
        steps = [f"echo == {where}\n{text}" for where, text in of_page(path, everywhere=True)]
        examples.append((path, "\n".join(["trap 'kill $(jobs -p) 2>/dev/null || true' EXIT", *steps])))
    else:
        examples += list(of_page(path))
examples += list(of_readme("README.md"))
LIMIT = 1200 if os.environ.get("V") else 300         # s; one of them measures a whole model
print(f"1..{len(examples)}", flush=True)
failed = 0
for i, (where, text) in enumerate(examples, 1):
    if not model:
        print(f"ok {i} - {where} # SKIP no model", flush=True)
        continue
    with tempfile.TemporaryDirectory() as tmp:
        env = dict(os.environ, M=model, B=B, PATH=f"{B}/bin:{os.environ['PATH']}:{os.getcwd()}/scripts", HDF5_PLUGIN_PATH=f"{B}/hdf5-plugin")
        # `wait` at the end gives the last status of a background job away, so let every failure end the example
        p = subprocess.Popen(["bash", "-eu", "-o", "pipefail", "-c", text], cwd=tmp, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             start_new_session=True)
        try:
            out, err = p.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(p.pid, signal.SIGKILL)        # all of it: an example has several processes
            out, err = p.communicate()
    ok = p.returncode == 0 and out.strip()
    failed += not ok
    print(f"{'ok' if ok else 'not ok'} {i} - {where}", flush=True)
    if not ok:
        sys.stderr.write(f"{where}: status {p.returncode}\n{text}\n{out.decode(errors='replace')[-1500:]}\n{err.decode(errors='replace')[-2000:]}\n")
sys.exit(failed > 0)
