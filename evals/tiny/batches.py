"""The batches of the training: batch `i` is a function of the seed and of `i` alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from core.errors import UserError
from evals.tiny.corpus import SPLITS, Packed
from evals.tiny.recipe import Recipe
from evals.tiny.skills import TEXT, Pieces, training_sequence

GOLDEN = (5**0.5 - 1) / 2  # multiples of it, modulo 1, cover the unit interval evenly


class Stream:
    """The documents of one split in a random order, with the end-of-text token behind each."""

    def __init__(self, packed: Packed, split: str, eos: int, seed: int) -> None:
        chosen = np.flatnonzero(packed.splits == SPLITS.index(split))
        if not len(chosen):
            raise UserError(f"the data hold no document of the split {split!r}; pack them again")
        order = np.random.default_rng(seed).permutation(chosen)
        lengths = (packed.starts[1:] - packed.starts[:-1])[order] + 1
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        self.tokens = np.full(self.starts[-1], eos, np.uint16)
        for at, document in zip(self.starts.tolist(), order.tolist(), strict=False):
            text = packed.tokens[packed.starts[document] : packed.starts[document + 1]]
            self.tokens[at : at + len(text)] = text

    def slice(self, place: float, length: int) -> np.ndarray:
        """`length` tokens at a place between 0 and 1 of the stream, uint16.

        Within one document where it is long enough; else documents one after another.
        """
        if length >= len(self.tokens):
            return np.resize(self.tokens, length)
        start = int(place * (len(self.tokens) - length))
        document = int(np.searchsorted(self.starts, start, side="right")) - 1
        first, end = self.starts[document], self.starts[document + 1]
        if end - first >= length:
            start = min(start, int(end) - length)
        return self.tokens[start : start + length]


class Batches:
    """Batches by number, for torch's DataLoader. Both arrays of a batch are [rows, length + 1]:
    ids, uint16, and roles, uint8 (`skills.NOISE`, TEXT, ANSWER)."""

    def __init__(self, recipe: Recipe, stream: Stream, pieces: Pieces) -> None:
        self.recipe, self.stream, self.pieces = recipe, stream, pieces
        self.offset = float(np.random.default_rng(recipe.seed).random())

    def __len__(self) -> int:
        return sum(self.recipe.steps())

    def __getitem__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        recipe = self.recipe
        length = recipe.stages[recipe.stage_of(step)].length
        rows = recipe.tokens_per_step // length
        rng = np.random.default_rng([recipe.seed, step])
        num_synthetic = int(rows * recipe.synthetic_share + rng.random())
        ids = np.empty((rows, length + 1), np.uint16)
        roles = np.full((rows, length + 1), TEXT, np.uint8)
        for row in range(rows):
            if row < num_synthetic:
                ids[row], roles[row] = self.synthetic(length + 1, rng)
            else:
                place = (self.offset + (step * rows + row) * GOLDEN) % 1.0
                ids[row] = self.stream.slice(place, length + 1)
        return ids, roles

    def synthetic(self, length: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        def filler(num_tokens: int) -> list[int]:
            return self.stream.slice(rng.random(), num_tokens).tolist()

        return training_sequence(self.pieces, length, filler, rng)

    def fixed(self, length: int, synthetic: bool) -> tuple[np.ndarray, np.ndarray]:
        """The same rows every time, of text alone or of skills alone; `validation_tokens` long."""
        rows = max(1, self.recipe.validation_tokens // length)
        rng = np.random.default_rng([self.recipe.seed, length])
        ids = np.empty((rows, length + 1), np.uint16)
        roles = np.full((rows, length + 1), TEXT, np.uint8)
        for row in range(rows):
            if synthetic:
                ids[row], roles[row] = self.synthetic(length + 1, rng)
            else:
                ids[row] = self.stream.slice((row + 0.5) / rows, length + 1)
        return ids, roles


def _as_it_is(batch: Any) -> Any:
    return batch


def in_background(batches: Batches, steps: range, num_workers: int) -> Iterator[Any]:
    """The batches of `steps` in order, made ahead by `num_workers` processes (0: made here).

    They come as numpy arrays through a pipe: a batch is a few hundred kilobytes, and shared memory
    may be scarce in a container.
    """
    from torch.utils.data import DataLoader

    loader = DataLoader(
        batches,  # type: ignore[arg-type]
        batch_size=None,
        sampler=steps,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        prefetch_factor=8 if num_workers else None,
    )
    return iter(loader)
