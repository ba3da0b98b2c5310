#!/usr/bin/env python3
"""Greedy continuations beside llama.cpp's (testdata/golden-llama), token ids in and out, from the same file.

Two engines that both compute in a narrow type round differently: where the best logits lie close together either may go first, and from
there the texts part for good. So the judge at each parting is the same weights in float32: the token we chose may stand below its best by
no more than llama.cpp's worst choice does anywhere, half as much again allowed; and of all partings we must be right about as often as
llama.cpp. llama.cpp was driven on past the end-of-text token; we stop there."""
import json
import os
import subprocess
import sys

B = os.environ.get("B", "build")
model = os.environ.get("PD_MODEL", "")
golden = json.load(open("testdata/golden-llama/greedy.json"))
prompts = golden["prompts"]

if os.path.basename(model) != golden["model"]:
    print(f"1..0 # SKIP no model {golden['model']}")
    sys.exit(0)


def below(place, token):
    """How far the float32 reference has this token below its best; what is not among its five best is far below."""
    return dict(map(tuple, place)).get(token, float("inf"))


requests = "".join(json.dumps({"id": str(i), "token_ids": p["ids"], "max_tokens": golden["tokens_each"], "temperature": 0}) + "\n"
                   for i, p in enumerate(prompts))
made = subprocess.run([f"{B}/bin/pd-prefill", "-m", model], input=requests.encode(), stdout=subprocess.PIPE, check=True).stdout
out = subprocess.run([f"{B}/bin/pd-decode", "-m", model, "--format", "json"], input=made, stdout=subprocess.PIPE, check=True).stdout
results = {r["id"]: r for r in map(json.loads, out.decode().splitlines()) if r.get("pd", "result") == "result"}

worst = max(below(place, t) for p in prompts for place, t in zip(p["reference"], p["tokens"]))
print(f"# llama.cpp's worst choice stands {worst} below the reference's best")
print(f"1..{len(prompts) + 1}")
failed, partings, right, theirs_right = 0, 0, 0, 0
for i, p in enumerate(prompts):
    ours, theirs = results.get(str(i), {}).get("tokens", []), p["tokens"]
    at = next((k for k, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
    stopped = results.get(str(i), {}).get("finish_reason") == "stop"
    good, how = len(ours) == len(theirs) or (stopped and len(ours) > 0), f"equal, {len(ours)} tokens"
    if at is not None:
        we, they = below(p["reference"][at], ours[at]), below(p["reference"][at], theirs[at])
        partings, right, theirs_right = partings + 1, right + (we == 0), theirs_right + (they == 0)
        good = good and we <= 1.5 * worst
        how = f"part at token {at}: below the reference's best we are {we}, llama.cpp {they}"
    failed += not good
    print(f"{'ok' if good else 'not ok'} {i + 1} - {p['prompt'][:30]!r}: {how}")
good = right >= theirs_right - 2 * max(partings, 1) ** 0.5
failed += not good
print(f"{'ok' if good else 'not ok'} {len(prompts) + 1} - of {partings} partings we are right {right} times, llama.cpp {theirs_right}")
sys.exit(failed > 0)
