"""Output tokens a second beside transformers, on the same requests, in one process, interleaved.

    python -m evals.speed.against_transformers --model DIR --device cpu --json result.json

Requests: prompts of 32 to 512 random ids, outputs of 16 to 128 tokens, greedy, EOS ignored. Peers:
`generate` on the padded batch (it runs all rows to the longest output; only the tokens asked for
count) and `generate_batch`, transformers' own continuous batching. Rounds are interleaved, with
ours run twice a round as an A/A control.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Requests = list[tuple[list[int], int]]  # prompt ids, output tokens


def requests(num: int, vocab_size: int, seed: int) -> Requests:
    """Prompts of 32..512 ids and outputs of 16..128 tokens, uniform."""
    rng = np.random.default_rng(seed)
    return [
        (
            rng.integers(0, vocab_size, int(rng.integers(32, 513))).tolist(),
            int(rng.integers(16, 129)),
        )
        for _ in range(num)
    ]


def ours(engine: Any, wanted: Requests) -> list[list[int]]:
    from core.sampling import SamplingParams

    params = [SamplingParams(max_tokens=n, ignore_eos=True) for _, n in wanted]
    return [o.token_ids for o in engine.generate([ids for ids, _ in wanted], params)]


def padded_batch(model: Any, wanted: Requests) -> list[list[int]]:
    """`generate` on one left-padded batch."""
    import torch

    longest = max(len(ids) for ids, _ in wanted)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p, _ in wanted], device=model.device)
    mask = torch.tensor(
        [[0] * (longest - len(p)) + [1] * len(p) for p, _ in wanted], device=model.device
    )
    most = max(n for _, n in wanted)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False
    )
    return [row[longest : longest + n].tolist() for row, (_, n) in zip(out, wanted, strict=True)]


def continuous_batching(model: Any, wanted: Requests) -> list[list[int]]:
    """`generate_batch`; it takes one output length for all, so requests go in by length."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=max(n for _, n in wanted), do_sample=False, eos_token_id=-1
    )
    results = model.generate_batch(
        inputs=[ids for ids, _ in wanted], generation_config=config, progress_bar=False
    )
    outputs = [results[key].generated_tokens for key in sorted(results, key=_serial)]
    return [tokens[:n] for tokens, (_, n) in zip(outputs, wanted, strict=True)]


def _serial(request_id: str) -> int:
    return int(request_id.rsplit("_", 1)[-1])


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m evals.speed.against_transformers", description=__doc__
    )
    parser.add_argument("--model", required=True, type=Path, help="a Hugging Face directory")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)

    import torch
    from transformers import AutoModelForCausalLM

    from core.engine import Engine

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    model.to(args.device).eval()
    with Engine(
        model=str(args.model),
        device=args.device,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=args.num_requests,
        enable_prefix_caching=False,
    ) as engine:
        wanted = requests(args.num_requests, engine.facts.vocab_size, args.seed)
        runs: dict[str, Callable[[], Any]] = {
            "ours": lambda: ours(engine, wanted),
            "generate": lambda: padded_batch(model, wanted),
            "generate_batch": lambda: continuous_batching(model, wanted),
            "ours again": lambda: ours(engine, wanted),
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for i in range(args.rounds + 1):
            order = list(runs) if i % 2 else list(reversed(runs))
            for name in order:
                elapsed = timed(runs[name])
                print(f"round {i} of {args.rounds}: {name} {elapsed:.1f} s", file=sys.stderr)
                if i:  # the first round warms up
                    seconds[name].append(elapsed)
        report = engine.report()
    num_tokens = sum(n for _, n in wanted)
    rates = {name: num_tokens / statistics.median(times) for name, times in seconds.items()}
    result = {
        "command": " ".join(
            ["python -m evals.speed.against_transformers", *(argv or sys.argv[1:])]
        ),
        "output_tokens": num_tokens,
        "prompt_tokens": sum(len(ids) for ids, _ in wanted),
        "seconds": seconds,
        "tokens_per_s": rates,
        "ratio": {name: rates["ours"] / rate for name, rate in rates.items() if name != "ours"},
        "engine": report,
    }
    for name, rate in rates.items():
        print(f"{name:15} {rate:8.1f} tok/s   ours / it = {rates['ours'] / rate:.2f}")
    if args.json:
        partial = args.json.with_suffix(".partial")
        partial.write_text(json.dumps(result, indent=1))
        os.replace(partial, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
