"""What the model writes: passkeys out of long text, values out of lists, text that moves on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from core.errors import RunError, UserError
from core.sampling import SamplingParams
from evals.intervals import bootstrap, wilson
from evals.tiny.skills import Item, Pieces, passkey, recall

if TYPE_CHECKING:
    from core.engine import Engine, RequestOutput
    from core.show import Progress

LENGTHS = (512, 1024, 2048, 4096, 6144, 7500)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
NUM_PAIRS = 50
REPEATED = 4  # tokens of a gram
TEMPERATURE, TOP_P = 0.8, 0.95
_BATCH = 64  # requests between two moves of the progress bar

Cell = tuple[int, float]  # length and depth


def pieces_of(engine: Engine) -> Pieces:
    """The skills' pieces for the engine's own tokenizer."""
    backend = getattr(engine.tokenizer, "backend", None)
    if backend is None:
        model = engine.config.model
        raise UserError(
            f"{model} has no tokenizer of transformers, and skills are put together from its "
            "tokens: give a model with tokenizer.json, or other parts with --only"
        )
    return Pieces(backend)


def passkey_items(
    pieces: Pieces,
    filler_ids: Seq[int],
    num: int,
    lengths: Seq[int] = LENGTHS,
    depths: Seq[float] = DEPTHS,
    seed: int = 0,
) -> tuple[list[Cell], list[Item]]:
    """`num` items, the cells of lengths x depths in turn, each in a stretch of filler of its own.

    The first items of a longer list are those of a shorter one.
    """
    rng = np.random.default_rng(seed)
    turns = itertools.cycle(itertools.product(lengths, depths))
    cells = list(itertools.islice(turns, num))
    items = []
    for length, depth in cells:
        start = int(rng.integers(0, max(1, len(filler_ids) - length + 1)))
        items.append(passkey(pieces, filler_ids[start : start + length], length, depth, rng))
    return cells, items


def recall_items(pieces: Pieces, num: int, num_pairs: int = NUM_PAIRS, seed: int = 0) -> list[Item]:
    """`num` lists of pairs, one query of each, so that items are independent."""
    rng = np.random.default_rng(seed)
    return [recall(pieces, num_pairs, rng, num_queries=1)[0] for _ in range(num)]


def exact(engine: Engine, items: Seq[Item], progress: Progress, stage: str) -> list[bool]:
    """Whether greedy decoding writes an item's answer, token for token."""
    params = [SamplingParams(max_tokens=len(i.answer_ids), ignore_eos=True) for i in items]
    outputs = _generate(engine, [item.prompt_ids for item in items], params, progress, stage)
    return [o.token_ids == item.answer_ids for o, item in zip(outputs, items, strict=True)]


def passkey_part(
    engine: Engine, cells: Seq[Cell], items: Seq[Item], progress: Progress
) -> dict[str, Any]:
    """Share of passkeys found, and how many of how many by length and depth."""
    right = exact(engine, items, progress, "passkey")
    return {**share(right), "cells": by_cell(cells, right)}


def recall_part(
    engine: Engine, items: Seq[Item], num_pairs: int, progress: Progress
) -> dict[str, Any]:
    """Share of values found."""
    return {**share(exact(engine, items, progress, "recall")), "num_pairs": num_pairs}


def share(right: Seq[bool]) -> dict[str, Any]:
    """A proportion with its interval."""
    n, num_right = len(right), sum(right)
    return {
        "n": n,
        "num_right": num_right,
        "estimate": num_right / n,
        "interval": wilson(num_right, n),
    }


def by_cell(cells: Seq[Cell], right: Seq[bool]) -> list[dict[str, Any]]:
    """A row for each length and depth, in order."""
    return [
        {
            "length": length,
            "depth": depth,
            "n": cells.count((length, depth)),
            "num_right": sum(r for c, r in zip(cells, right, strict=True) if c == (length, depth)),
        }
        for length, depth in sorted(set(cells))
    ]


def repetition(
    engine: Engine, prompts: Seq[str], num_tokens: int, seed: int, progress: Progress
) -> dict[str, Any]:
    """Median seq-rep-4 of what follows the prompts, sampled (temperature 0.8, top-p 0.95); greedy
    text beside it."""
    found: dict[str, dict[str, Any]] = {}
    sampled = SamplingParams(
        max_tokens=num_tokens, ignore_eos=True, temperature=TEMPERATURE, top_p=TOP_P
    )
    greedy = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    for name, sampling in (("sampled", sampled), ("greedy", greedy)):
        params = [replace(sampling, seed=seed + i) for i in range(len(prompts))]
        outputs = _generate(engine, list(prompts), params, progress, f"repetition, {name}")
        shares = [repeated_share(output.token_ids) for output in outputs]
        found[name] = {
            "estimate": float(np.median(shares)),
            "interval": bootstrap(shares, np.median),
            "shares": shares,
            "first_text": outputs[0].text,
        }
    return {
        "n": len(prompts),
        "num_tokens": num_tokens,
        **found["sampled"],
        "greedy": found["greedy"],
    }


def repeated_share(token_ids: Seq[int], size: int = REPEATED) -> float:
    """seq-rep-n: the share of grams of `size` tokens that were there before (Welleck et al.,
    "Neural text generation with unlikelihood training", ICLR 2020); 0 where there is none."""
    grams = [tuple(token_ids[i : i + size]) for i in range(len(token_ids) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _generate(
    engine: Engine,
    prompts: Seq[Any],
    params: Seq[SamplingParams],
    progress: Progress,
    stage: str,
) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    for start in range(0, len(prompts), _BATCH):
        end = start + _BATCH
        outputs += engine.generate(prompts[start:end], params[start:end], progress=False)
        if failed := next((o.error for o in outputs[start:] if o.error), None):
            raise RunError(f"a request of {stage} failed, which is no wrong answer: {failed}")
        progress(stage, len(outputs), len(prompts))
    return outputs
