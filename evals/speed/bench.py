"""Workloads on any composition, beside any other engine, and what of the roofline they reach.

    python -m evals.speed.bench --model random:qwen3-0.6b --json bench.json
    python -m evals.speed.bench --peer vllm --rebuild --json bench.json
    python -m evals.speed.bench --workload grid --grid-concurrency 1 8 64
    python -m evals.speed.bench --workload serve --input-len lognormal:512:1 --request-rate 8
    python -m evals.speed.bench --workload serve --trace conv.csv --utilisation 0.6

The workloads, and how each figure is defined: w1 throughput, w2 time to first token of lone
prompts, w3 decode steps, w4 requests that come as a Poisson process (evals.speed.workloads); grid,
lengths by concurrency in closed loops (evals.speed.grid); serve, requests of any lengths and
arrivals or those of a trace, with the figures of `vllm bench serve` (evals.speed.serve). Without
--workload the first four are run.

With a peer (evals.speed.peers) ours runs before and after it, as an A/A control; all engines live
at once and are measured in turn, or with --rebuild one after the other. A peer gets our limits, and
prefix caching is off everywhere unless --enable-prefix-caching asks for it. A share of the roofline
is counted step by step (evals.speed.roofline). The result is written after each workload.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from core.config import parse_setting
from core.errors import RunError, UserError, explained
from core.show import Progress, progress_bar
from evals import records
from evals.speed import bench_arguments, peers, roofline, serve, workloads
from evals.speed.arms import in_turn, where
from evals.speed.bench_tables import AGAIN, OURS, rows_of, show
from evals.speed.driving import Clock, Result
from evals.speed.grid import grid
from evals.speed.steps import kv_token_bytes
from evals.speed.workloads import WORKLOADS, Workload

if TYPE_CHECKING:
    from core.engine import Engine

Builder = Callable[[], peers.Peer]
Floor = Callable[[roofline.Step], float]


class Bench:
    """One run: its arms, and the document that fills up."""

    def __init__(self, args: argparse.Namespace, progress: Progress) -> None:
        self.args, self._progress = args, progress
        self._setup: peers.Setup | None = None
        makers = {spec: peers.find(spec, args.plugins) for spec in args.peer}
        self.arms: dict[str, Builder] = {OURS: self._ours}
        self.arms |= {spec: partial(self._peer, make) for spec, make in makers.items()}
        if makers:
            self.arms[AGAIN] = self._ours
        self._works: dict[str, Workload] = {**WORKLOADS, "grid": grid}
        if "serve" in args.workload:
            self._works["serve"] = serve.Serving(args)
        self._ceilings: roofline.Ceilings | None = None
        self._floor: Floor | None = None
        self._left_out: dict[str, str] = {}
        self._engines: dict[str, Any] = {}
        self._found: dict[str, dict[str, Any]] = {}  # workload -> arm -> what it came to

    # -------- engines

    def _ours(self) -> peers.Peer:
        from core.engine import Engine

        args = self.args
        engine = Engine(
            model=args.model,
            kv=args.kv,
            fusion=args.fusion,
            graphs=args.graphs,
            sched=args.sched,
            settings=dict(parse_setting(text) for text in args.set),
            plugins=tuple(args.plugins),
            device=args.device,
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            kv_cache_bytes=args.kv_cache_bytes,
            gpu_memory_utilization=args.gpu_memory_utilization,
            enable_prefix_caching=args.enable_prefix_caching,
            seed=args.seed,
            progress=self._progress,
        )
        made = peers.Ours(engine, args.model)
        self._setup = made.setup
        if self._ceilings is not None and self._floor is None:
            self._floor = self._floor_of(engine)
        return made

    def _floor_of(self, engine: Engine) -> Floor | None:
        """What a step of this engine cannot take less than, in seconds; None where its cache does
        not tell the bytes of a token, or prompts are found in it."""
        if self.args.enable_prefix_caching:
            why = "which tokens of a prompt a step computed is not known with prefix caching"
            self._left_out["shares of the roofline"] = why
            return None
        try:
            size = kv_token_bytes(engine)
        except UserError as error:
            self._left_out["shares of the roofline"] = str(error)
            return None
        facts, rates = engine.facts, self._ceilings
        assert rates is not None, "asked for with ceilings alone"
        return lambda step: roofline.floor_s(facts, step, rates, size)

    def _peer(self, make: Callable[[peers.Setup], peers.Peer]) -> peers.Peer:
        assert self._setup is not None, "ours is built first"
        return make(self._setup)

    # -------- measuring

    def run(self) -> Iterator[dict[str, Any]]:
        """The document, each time that a workload is through."""
        args, names = self.args, list(self.arms)
        self._ceilings, bandwidth = ceilings(args)
        about = {
            "command": f"python -m evals.speed.bench {shlex.join(args.argv)}",
            **where(args.device),
            "arguments": {k: v for k, v in vars(args).items() if k != "argv"},
            "bandwidth": bandwidth,
            "definitions": {**workloads.DEFINITIONS, **serve.DEFINITIONS},
        }
        for group in [[name] for name in names] if args.rebuild else [names]:
            with ExitStack() as stack:
                engines = self._built(group, stack)
                for workload in args.workload:
                    self._measure(workload, engines)
                    self._engines |= {name: one.describe() for name, one in engines.items()}
                    yield {**about, **self._result()}

    def _built(self, group: list[str], stack: ExitStack) -> dict[str, peers.Peer]:
        """What can be built; ours must."""
        found: dict[str, peers.Peer] = {}
        for name in group:
            try:
                found[name] = stack.enter_context(closing(self.arms[name]()))
            except (UserError, RunError) as error:
                if name == OURS:
                    raise
                self._left_out[name] = str(error)
        return found

    def _measure(self, workload: str, engines: Mapping[str, peers.Peer]) -> None:
        """Every repetition of a workload on these engines, in turn, and ours alone once more."""
        args, lost = self.args, set[str]()
        by_arm = self._found.setdefault(workload, {})
        for i in range(args.repetitions):
            for name in in_turn(engines, i):
                if name in lost:
                    continue
                try:
                    with _guarded(name, engines[name]):
                        found = self._once(workload, engines[name], i)
                except (UserError, RunError) as error:
                    self._left_out[f"{name}, {workload}"] = str(error)
                    lost.add(name)
                    by_arm.pop(name, None)
                    self._give_up(name, engines[name], workload)
                else:
                    by_arm.setdefault(name, {"repetitions": []})["repetitions"].append(found)
            self._progress(workload, i + 1, args.repetitions)
        if OURS in engines and OURS not in lost:
            by_arm[OURS]["host"] = self._host_times(workload, engines[OURS])

    def _give_up(self, name: str, engine: peers.Peer, workload: str) -> None:
        """The next workload begins with an idle engine, as far as this one gets there."""
        engine.section(None)
        try:
            with _guarded(name, engine):
                engine.abandon()
        except RunError as error:
            self._left_out[f"{name}, after {workload}"] = str(error)

    def _once(self, workload: str, engine: peers.Peer, i: int) -> dict[str, Any]:
        if isinstance(engine, peers.Ours):
            engine.forget()
        found = self._run(workload, engine, i)._asdict()
        if isinstance(engine, peers.Ours):
            steps = roofline.steps_of(engine.calls, engine.prompt_lens, engine.depth)
            # The bytes of a token are those of our cache; another composition has its own.
            floor = None if isinstance(engine, peers.Composition) else self._floor
            found["steps"] = roofline.shares(steps, floor)
        return found

    def _run(self, workload: str, engine: peers.Peer, i: int) -> Result:
        return workloads.run(workload, engine, self.args, i, Clock(), self._works)

    def _host_times(self, workload: str, engine: peers.Peer) -> dict[str, Any]:
        """What the host alone takes, from one more pass in which the device is idle whenever a step
        begins."""
        assert isinstance(engine, peers.Ours)
        if not engine.setup.device.startswith("cuda"):
            why = f"a step on {engine.setup.device} is the host's own work: there is no device part"
            return {"not_known": why}
        engine.forget()
        engine.is_alone = True
        try:
            self._run(workload, engine, self.args.repetitions)
            return roofline.host_times(engine.calls)
        except (UserError, RunError) as error:
            return {"not_known": str(error)}
        finally:
            engine.is_alone = False

    def _result(self) -> dict[str, Any]:
        rows = [row for name, found in self._found.items() for row in self._rows(name, found)]
        return {
            "engines": self._engines,
            "rows": rows,
            "workloads": self._found,
            "left_out": self._left_out,
        }

    def _rows(self, workload: str, found: Mapping[str, Any]) -> list[dict[str, Any]]:
        return rows_of(workload, {arm: found[arm] for arm in self.arms if arm in found})


def _guarded(name: str, engine: peers.Peer) -> AbstractContextManager[None]:
    """Whatever a peer raises is a sentence; what ours raises and no sentence is, is a bug."""
    if isinstance(engine, peers.Ours):
        return nullcontext()
    return explained(f"{name} failed", "leave it out", RunError, (Exception,))


def ceilings(args: argparse.Namespace) -> tuple[roofline.Ceilings | None, dict[str, Any]]:
    """What floors are computed with (None: nobody has said), and where it is from."""
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = device.startswith("cuda")
    bandwidth, flops = args.bandwidth, args.flops
    if on_cuda:  # of one H200, measured
        bandwidth, flops = bandwidth or 4.24, flops or 765.0
    measured = None
    if args.measure_bandwidth:
        size = args.bandwidth_bytes or (1 << 32 if on_cuda else 1 << 26)
        measured = roofline.measured_bandwidth(device, size)
        bandwidth = max(measured.values()) / 1e12
    known = {"terabytes_per_s": bandwidth, "teraflops_per_s": flops, "measured": measured}
    if bandwidth is None or flops is None:
        return None, known
    return roofline.Ceilings(bandwidth * 1e12, flops * 1e12), known


def main(argv: list[str] | None = None) -> int:
    document: dict[str, Any] | None = None
    try:
        args = bench_arguments.parse(argv, __doc__)
        records.check_folder(args.json)
        if args.peer and not args.rebuild and args.kv_cache_bytes is None:
            num = len(set(args.peer)) + 2
            raise UserError(f"{num} engines live at once: give --kv-cache-bytes, or --rebuild")
        with progress_bar(sys.stderr) as progress:
            for document in Bench(args, progress).run():
                if args.json:  # whoever is short of time keeps what there is
                    records.write(args.json, document)
        assert document is not None, "there is a workload"
        show(document)
        if lost := [why for what, why in document["left_out"].items() if what.startswith(OURS)]:
            raise RunError("; ".join(dict.fromkeys(lost)))
        if not document["rows"]:
            raise RunError("nothing was measured: what was refused, and why, stands above")
    except KeyboardInterrupt:
        kept = f"{args.json} has what there is" if args.json and document else "nothing was written"
        print(f"outweigh: interrupted; {kept}", file=sys.stderr)
        return 130
    except (UserError, RunError) as error:
        print(f"outweigh: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
