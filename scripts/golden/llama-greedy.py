#!/usr/bin/env python3
"""Greedy continuations by llama.cpp, beside which pd's are laid. By hand, with the Python that scripts/bench/build-peer prints:
    $(scripts/bench/build-peer) scripts/golden/llama-greedy.py $(scripts/fetch-model) >testdata/golden-llama/greedy.json
20 prompts, 64 tokens each; token ids in and out, no BOS added; end-of-text tokens do not stop it. `gap` is how far llama.cpp's best logit
stood above its second. `reference` has, at each place and on llama.cpp's text up to there, the five best tokens of the same weights in
float32 and how far each is below the first: where two quantised engines part, this says which was right, and by how much the other erred."""
import hashlib
import json
import os
import sys

here = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [here, os.path.join(here, "..", "bench")]
import peer
import reference

TOKENS = 64
OPTICKS = os.path.join(here, "..", "..", "testdata", "text", "opticks.txt")
CHAT = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n" \
       "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def prompts():
    with open(OPTICKS) as f:
        opticks = f.read()
    yield from (
        "The capital of France is", "Once upon a time", "def fibonacci(n):\n", "Water boils at", "In the beginning",
        "The three primary colours are", "1, 1, 2, 3, 5, 8,", "Dear Sir or Madam,\n\n", "A list of European rivers:\n1.",
        "Photosynthesis is the process by which", "int main(int argc, char **argv) {\n", "She opened the door and saw",
        "Il était une fois", "Q: How many legs has a spider?\nA:", "SELECT name, age FROM people WHERE", "The mitochondrion is",
        opticks[:400], opticks[6000:8200], CHAT.format("Why is the sky blue?"), CHAT.format("Write a haiku about the sea."))


def main():
    path, = sys.argv[1:]
    engine = peer.Engine(path, threads=1, n_ctx=2048)
    special = {t: control_token(engine, t) for t in ("<|im_start|>", "<|im_end|>")}
    with open(path, "rb") as f:
        digest = hashlib.sha256(f.read()).hexdigest()
    truth = reference.Reference(path)
    rows = []
    for prompt in prompts():
        ids = tokenize(engine, prompt, special)
        engine.clear()
        for at in range(0, len(ids), 512):
            engine.feed(ids[at:at + 512])
        out, gaps = [], []
        for _ in range(TOKENS):
            logits = engine.logits()
            best = int(logits.argmax())
            top = logits[best]
            logits[best] = -float("inf")
            gaps.append(round(float(top - logits.max()), 4))
            out.append(best)
            engine.feed([best])
        rows.append({"prompt": prompt, "ids": ids, "tokens": out, "gap": gaps, "text": engine.text(out), "reference": best_of(truth, ids, out)})
    head = {"model": os.path.basename(path), "sha256": digest, "made_by": "scripts/golden/llama-greedy.py", "build": peer.build_id(),
            "threads": 1, "flash_attention": True, "kv": "f16", "tokens_each": TOKENS}
    print(json.dumps(head, ensure_ascii=False)[:-1] + ', "prompts": [\n' +
          ",\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n]}")


def best_of(truth, ids, out):
    rows = truth.logits((ids + out)[:-1])[len(ids) - 1:]
    tops = [row.argsort()[::-1][:5] for row in rows]
    return [[[int(t), round(float(row[top[0]] - row[t]), 4)] for t in top] for row, top in zip(rows, tops)]


def control_token(engine, text):
    """The id of a control token, found by its text."""
    for t in range(engine.vocab - 1, -1, -1):
        if engine.text([t]) == text:
            return t
    sys.exit(f"no token {text}")


def tokenize(engine, text, special):
    """peer.tokenize takes text as text; the control tokens of our own chat prompts are put in by id."""
    found = [(text.index(t), t) for t in special if t in text]
    if found:
        first = min(found)[1]
        before, after = text.split(first, 1)
        return tokenize(engine, before, special) + [special[first]] + tokenize(engine, after, special)
    return engine.tokenize(text) if text else []


if __name__ == "__main__":
    main()
