"""Train the embedded model on one GPU in a quarter of an hour.

    python -m evals.tiny.train --data FILE --tokenizer DIR --out DIR [--max-minutes M] [--resume]

`--data` is a file of evals.tiny.corpus. `--out` receives train_config.json, log.jsonl (a line every
20 steps), checkpoint.pt, and at the end the folder model/ in the Hugging Face layout. A run that is
stopped by `--max-minutes`, or in any other way, goes on with `--resume`: the same batches, the same
optimizer states. `--rehearse` times some steps of every stage instead. `--plot DIR` draws loss.png.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import threading
import time
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import UserError, explained, reason
from evals.arguments import Parser, count, positive, seed
from evals.tiny import corpus
from evals.tiny.batches import Batches, Stream, in_background
from evals.tiny.corpus import read_tokenizer
from evals.tiny.muon import Muon
from evals.tiny.recipe import Recipe, Stage
from evals.tiny.skills import ANSWER, TEXT, Pieces

LOG_EVERY = 20  # steps; the host waits for the device at each
REHEARSED_STEPS = 20
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
ATTENTION = {"auto": [], "flash": ["FLASH_ATTENTION"], "cudnn": ["CUDNN_ATTENTION"]}


class Trainer:
    """The model, its two optimizers and one step of both."""

    def __init__(self, recipe: Recipe, eos_token_id: int, device: str, compiled: str) -> None:
        from transformers import Qwen3ForCausalLM

        torch.manual_seed(recipe.seed)
        torch.set_float32_matmul_precision("high")
        self.recipe, self.device, self.step = recipe, torch.device(device), 0
        self.model = Qwen3ForCausalLM(recipe.model_config(eos_token_id)).to(self.device)
        self.model.train()
        layers = self.model.model.layers
        matrices = [p for p in layers.parameters() if p.ndim == 2]
        known = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in known]
        self.parameters = [*matrices, *others]
        adam = torch.optim.AdamW(
            others,
            lr=recipe.adam_rate,
            betas=recipe.adam_betas,
            weight_decay=0.0,
            fused=self.device.type == "cuda",
        )
        muon = Muon(matrices, recipe.muon_rate, recipe.muon_momentum, recipe.muon_decay)
        self.optimizers = ((muon, recipe.muon_rate), (adam, recipe.adam_rate))
        weights = torch.zeros(3, device=self.device)
        weights[TEXT], weights[ANSWER] = 1.0, recipe.answer_weight
        self.weights = weights
        self.head = self._head
        self.loss = self._loss
        if compiled == "full":
            self.loss = torch.compile(self._loss, dynamic=False)
        elif compiled == "layers":  # one small graph for all layers: compiles faster, runs slower
            for layer in layers:
                layer.compile(dynamic=False)
            self.head = torch.compile(self._head, dynamic=False)

    def _hidden(self, ids: Tensor) -> Tensor:
        """The last hidden states of ids [rows, length]. Without a mask, attention is causal."""
        body = self.model.model
        hidden = body.embed_tokens(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        embeddings = body.rotary_emb(hidden, positions)
        for layer in body.layers:
            hidden = layer(hidden, position_embeddings=embeddings)
        return body.norm(hidden)

    def _losses(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [tokens, vocabulary] and the loss of every token, float32 [tokens]."""
        logits = self.model.lm_head(hidden).flatten(0, 1)
        return logits, F.cross_entropy(logits.float(), targets.flatten(), reduction="none")

    def _head(self, hidden: Tensor, targets: Tensor, roles: Tensor) -> tuple[Tensor, Tensor]:
        losses = self._losses(hidden, targets)[1]
        roles = roles.flatten()
        weights = self.weights[roles]
        loss = (losses * weights).sum() / weights.sum()
        return loss, torch.stack([loss.detach(), *_means(losses.detach(), roles)])

    def _loss(self, ids: Tensor, targets: Tensor, roles: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and the vector [loss, mean over TEXT, mean over ANSWER]."""
        with self._autocast():
            return self.head(self._hidden(ids), targets, roles)

    def _autocast(self) -> Any:
        on_cuda = self.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if on_cuda else nullcontext()

    def on_device(self, batch: tuple[np.ndarray, np.ndarray]) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, targets and the roles of the targets: int64 [rows, length]."""
        ids = torch.from_numpy(batch[0].astype(np.int32)).to(self.device).long()
        roles = torch.from_numpy(batch[1]).to(self.device).long()
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), roles[:, 1:].contiguous()

    def train_step(self, batch: tuple[np.ndarray, np.ndarray]) -> Tensor:
        """One step of both optimizers; the vector of `_loss`, on the device."""
        loss, figures = self.loss(*self.on_device(batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.recipe.max_gradient_norm)
        share = self.recipe.rate(self.step)
        for optimizer, rate in self.optimizers:
            optimizer.param_groups[0]["lr"] = rate * share
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return figures

    @torch.no_grad()
    def validate(self, held_out: Batches) -> dict[str, dict[str, float]]:
        """At every length: loss on text, loss and accuracy on answers. Not compiled."""
        found = {}
        for stage in self.recipe.stages:
            row: dict[str, float] = {}
            for synthetic in (False, True):
                ids, targets, roles = self.on_device(held_out.fixed(stage.length, synthetic))
                with self._autocast():
                    logits, losses = self._losses(self._hidden(ids), targets)
                roles, targets = roles.flatten(), targets.flatten()
                text, answer = (mean.item() for mean in _means(losses, roles))
                if synthetic:
                    hits = (logits.argmax(-1) == targets) & (roles == ANSWER)
                    accuracy = hits.sum() / (roles == ANSWER).sum().clamp(min=1)
                    row |= {"answer_loss": answer, "answer_accuracy": accuracy.item()}
                else:
                    row["text_loss"] = text
            found[str(stage.length)] = {name: round(value, 4) for name, value in row.items()}
        return found

    def state(self) -> dict[str, Any]:
        """A copy in host memory of all that the next step depends on."""
        state = {
            "step": self.step,
            "recipe": asdict(self.recipe),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
        }
        copied: dict[str, Any] = torch.utils._pytree.tree_map_only(
            Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state
        )
        return copied

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint. Raises UserError if there is none, or one of another recipe."""
        with explained(f"{path} cannot be read", "leave out --resume to begin anew"):
            state = torch.load(path, map_location="cpu", weights_only=True)
        if state["recipe"] != asdict(self.recipe):
            raise UserError(
                f"{path} belongs to another recipe; pass the options it was made with, or leave "
                "out --resume to begin anew"
            )
        self.model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]

    def export(self, tokenizer: Path, folder: Path) -> None:
        """The model in bfloat16 and the files of its tokeniser, in the Hugging Face layout."""
        from transformers import Qwen3ForCausalLM

        copy = Qwen3ForCausalLM(self.model.config)
        copy.load_state_dict(self.model.state_dict())
        copy.to(torch.bfloat16).save_pretrained(folder)
        for name in TOKENIZER_FILES:
            shutil.copyfile(tokenizer / name, folder / name)


def _means(losses: Tensor, roles: Tensor) -> list[Tensor]:
    """Mean loss of the TEXT tokens and of the ANSWER tokens; 0 where there are none."""
    found = []
    for role in (TEXT, ANSWER):
        mask = (roles == role).float()
        found.append((losses * mask).sum() / mask.sum().clamp(min=1))
    return found


class Checkpoints:
    """Writes states in a thread of its own, each whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path, self.thread = path, threading.Thread()
        self.last, self.failure = time.monotonic(), ""

    def save(self, state: dict[str, Any]) -> None:
        self.wait()
        self.thread = threading.Thread(target=self._write, args=(state,))
        self.thread.start()
        self.last = time.monotonic()

    def _write(self, state: dict[str, Any]) -> None:
        beside = self.path.with_suffix(".tmp")
        try:
            torch.save(state, beside)
            os.replace(beside, self.path)
        except (OSError, RuntimeError) as error:  # torch's for a full disk; `wait` tells of it
            self.failure = reason(error)

    def wait(self) -> None:
        """Until the last one is written. Raises UserError where it could not be."""
        if self.thread.ident is not None:
            self.thread.join()
        if self.failure:
            raise UserError(
                f"{self.path} could not be written ({self.failure}): make room, then --resume"
            )


def _log_from(path: Path, step: int) -> Any:
    """The log opened for appending, without the lines behind `step`."""
    lines = path.read_text().splitlines() if step and path.exists() else []
    path.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= step))
    return path.open("a", buffering=1)


def run(
    trainer: Trainer,
    batches: Batches,
    held_out: Batches,
    out: Path,
    stop_at: float,
    num_workers: int,
) -> bool:
    """Train until the end (True) or until time.monotonic() passes `stop_at` (False)."""
    recipe, total = trainer.recipe, len(batches)
    checkpoints = Checkpoints(out / "checkpoint.pt")
    log = _log_from(out / "log.jsonl", trainer.step)
    source = in_background(batches, range(trainer.step, total), num_workers)
    recent: list[Tensor] = []
    waited, since, first = 0.0, time.monotonic(), trainer.step

    def write(row: dict[str, Any]) -> None:
        row = {"step": trainer.step, "tokens": trainer.step * recipe.tokens_per_step} | row
        line = json.dumps(row)
        log.write(line + "\n")
        print(line, flush=True)

    while trainer.step < total and time.monotonic() < stop_at:
        before = time.monotonic()
        batch = next(source)
        waited += time.monotonic() - before
        recent.append(trainer.train_step(batch))
        if trainer.step % LOG_EVERY == 0 or trainer.step == total:
            loss, text, answer = torch.stack(recent).mean(0).tolist()
            seconds = time.monotonic() - since
            num_tokens = (trainer.step - first) * recipe.tokens_per_step
            write(
                {
                    "length": batch[0].shape[1] - 1,
                    "loss": round(loss, 4),
                    "text_loss": round(text, 4),
                    "answer_loss": round(answer, 4),
                    "rate": round(recipe.rate(trainer.step - 1), 5),
                    "tokens_per_s": round(num_tokens / seconds),
                    "data_wait_share": round(waited / seconds, 4),
                }
            )
            recent, waited, since, first = [], 0.0, time.monotonic(), trainer.step
        if trainer.step % recipe.validation_every == 0 or trainer.step == total:
            write({"validation": trainer.validate(held_out)})
            since = time.monotonic()
        if time.monotonic() - checkpoints.last > recipe.checkpoint_seconds:
            checkpoints.save(trainer.state())
    checkpoints.save(trainer.state())
    checkpoints.wait()
    log.close()
    return trainer.step == total


def rehearse(trainer: Trainer, batches: Batches, num_workers: int) -> dict[str, Any]:
    """Tokens a second, peak memory and time to compile of every stage, and what a run will take."""
    recipe, on_cuda = trainer.recipe, trainer.device.type == "cuda"
    wait = torch.cuda.synchronize if on_cuda else (lambda: None)
    rows, minutes, begin = [], 0.0, 0
    for stage, num_steps in zip(recipe.stages, recipe.steps(), strict=True):
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        trainer.step = begin
        steps = range(begin, begin + 3 + REHEARSED_STEPS)
        source = in_background(batches, steps, num_workers)
        started = time.monotonic()
        trainer.train_step(next(source))
        wait()
        compiling = time.monotonic() - started
        for _ in range(2):
            trainer.train_step(next(source))
        wait()
        started, waited = time.monotonic(), 0.0
        for batch in source:
            waited += time.monotonic()
            trainer.train_step(batch)
            waited -= time.monotonic()
        wait()
        seconds = time.monotonic() - started
        speed = REHEARSED_STEPS * recipe.tokens_per_step / seconds
        minutes += (num_steps * recipe.tokens_per_step / speed + compiling) / 60
        begin += num_steps
        rows.append(
            {
                "length": stage.length,
                "tokens_per_s": round(speed),
                "step_ms": round(seconds / REHEARSED_STEPS * 1e3, 1),
                "host_share": round(-waited / seconds, 3),
                "first_step_s": round(compiling, 1),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if on_cuda else 0,
            }
        )
    return {"stages": rows, "num_tokens": recipe.num_tokens, "minutes": round(minutes, 2)}


def plot(folder: Path) -> Path:
    """Draw loss.png from log.jsonl. Raises UserError without matplotlib or without a log."""
    with explained("the loss cannot be drawn", "install matplotlib and name a folder with a log"):
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
        rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    checks = [row for row in rows if "validation" in row]
    if not steps:
        raise UserError(f"{folder}/log.jsonl has no step in it: train first")
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=90)
    millions = [row["tokens"] / 1e6 for row in steps]
    axes.plot(millions, [row["text_loss"] for row in steps], lw=0.8, label="text, trained on")
    axes.plot(millions, [row["answer_loss"] for row in steps], lw=0.8, label="answers, trained on")
    checked = [row["tokens"] / 1e6 for row in checks]
    for length in checks[-1]["validation"] if checks else ():
        losses = [row["validation"][length]["text_loss"] for row in checks]
        axes.plot(checked, losses, "--", lw=1, label=f"held out, {length}")
    axes.set(xlabel="million tokens", ylabel="loss (nats a token)", ylim=(0, 6))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "loss.png")
    return folder / "loss.png"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("evals.tiny.train", __doc__)
    add = parser.add_argument
    add("--data", type=Path, help="packed corpus, of evals.tiny.corpus")
    add("--tokenizer", type=Path, help="folder of the tokeniser")
    add("--out", type=Path, help="folder of the run")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--max-minutes", type=positive, default=float("inf"), help="stop before, with a checkpoint")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    add("--steps-scale", type=positive, default=1.0, help="multiplies the number of tokens")
    add("--num-tokens", type=count, help="of the whole training")
    add("--tokens-per-step", type=count)
    add("--max-length", type=count, help="leave out the stages that are longer")
    add("--compile", choices=("full", "layers", "none"), help="default: full on CUDA, else none")
    add("--attention", choices=tuple(ATTENTION), default="auto", help="kernel of the attention")
    add("--workers", type=seed, help="processes that make batches; default 12 on CUDA, else 0")
    add("--rehearse", action="store_true", help="time some steps of every stage; prints JSON")
    add("--plot", type=Path, metavar="DIR", help="only draw loss.png from the log in DIR")
    options = parser.parse_args(arguments)
    if options.plot is None and None in (options.data, options.tokenizer, options.out):
        parser.error("--data, --tokenizer and --out are needed")
    return options


def recipe_of(options: argparse.Namespace) -> Recipe:
    """The recipe with what the options change. Raises UserError for sizes that do not fit."""
    recipe = Recipe()
    if options.max_length is not None:
        kept = [stage for stage in recipe.stages if stage.length <= options.max_length]
        kept = kept or [Stage(options.max_length, 1.0)]
        total = sum(stage.share for stage in kept)
        stages = tuple(Stage(stage.length, stage.share / total) for stage in kept)
        recipe = replace(recipe, stages=stages)
    per_step = options.tokens_per_step or recipe.tokens_per_step
    longest = max(stage.length for stage in recipe.stages)
    if per_step % longest:
        raise UserError(
            f"--tokens-per-step {per_step} is no multiple of the longest sequence, {longest}; "
            "change one of them"
        )
    return replace(
        recipe,
        tokens_per_step=per_step,
        num_tokens=round((options.num_tokens or recipe.num_tokens) * options.steps_scale),
        validation_tokens=min(recipe.validation_tokens, per_step),
    )


def train(options: argparse.Namespace, started: float) -> None:
    recipe = recipe_of(options)
    on_cuda = options.device.startswith("cuda")
    if on_cuda and not torch.cuda.is_available():
        raise UserError(f"torch {torch.__version__} sees no CUDA device: give --device cpu")
    tokenizer = read_tokenizer(options.tokenizer)
    packed, pieces = corpus.load(options.data), Pieces(tokenizer)
    batches, held_out = (
        Batches(recipe, Stream(packed, split, tokenizer.eos_token_id, recipe.seed), pieces)
        for split in corpus.SPLITS
    )
    num_workers = options.workers if options.workers is not None else (12 if on_cuda else 0)
    compiled = options.compile or ("full" if on_cuda else "none")
    trainer = Trainer(recipe, tokenizer.eos_token_id, options.device, compiled)
    options.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if names := ATTENTION[options.attention]:
            kernels = [getattr(torch.nn.attention.SDPBackend, name) for name in names]
            stack.enter_context(torch.nn.attention.sdpa_kernel(kernels))
        if options.rehearse:
            print(json.dumps(rehearse(trainer, batches, num_workers)))
            return
        if options.resume:
            trainer.restore(options.out / "checkpoint.pt")
        dumped = json.dumps(asdict(recipe), indent=1) + "\n"
        (options.out / "train_config.json").write_text(dumped)
        seconds = options.max_minutes * 60
        stop_at = started + seconds - min(10.0, seconds * 0.1)
        if run(trainer, batches, held_out, options.out, stop_at, num_workers):
            trainer.export(options.tokenizer, options.out / "model")
            print(f"the model is in {options.out / 'model'}")
        else:
            print(f"stopped at step {trainer.step} of {len(batches)}; --resume goes on")


def main(arguments: list[str] | None = None) -> int:
    started = time.monotonic()
    options = parse(arguments)
    try:
        if options.plot is not None:
            print(plot(options.plot))
        else:
            train(options, started)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
