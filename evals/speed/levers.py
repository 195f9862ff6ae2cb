"""What each lever is worth alone, through the Engine: graphs, the fused KV write, the block size.

    python -m evals.speed.levers --json levers.json

- graphs: every strategy on offer, beside none at all: steps, and what the capture costs (its second
  in this process, so that no strategy pays for kernels that another has compiled).
- kv_write: one span (`--span`) beside the nodes that it replaces, all other spans of its set on.
- block_size: many short requests at once, the same in every arm, and a cache of as many bytes in
  every arm, which holds `--share` of what the running sequences would like.

The arms of a lever live at once and are measured in turn, its base twice a round as an A/A control
(see evals.speed.arms). An arm that cannot run here is said, with the reason.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from core.errors import RunError, UserError
from core.metrics import KVUse
from core.registry import Registry
from core.show import print_rows
from evals import records
from evals.arguments import Parser, count, positive, seed
from evals.speed.arms import Figures, build, cells, compared, side_by_side, where
from evals.speed.spans import these_graphs
from evals.speed.steps import step_medians

if TYPE_CHECKING:
    from core.engine import Engine
    from core.facts import ModelFacts

RATE = "output tok/s"
Requests = list[tuple[list[int], int]]  # prompt ids, output tokens
Builder = Callable[[], "Engine"]


class Lever(NamedTuple):
    """`arms[base]` is built a second time as `again`; `costs` fills up with what building took."""

    base: str
    again: str
    arms: dict[str, Builder]
    measure: Callable[[Engine, int], Mapping[str, float]]
    costs: dict[str, dict[str, float]]


def lever(
    base: str, arms: Mapping[str, Builder], measure: Any, costs: dict[str, Any] | None = None
) -> Lever:
    again = f"{base} again"
    others = {name: arm for name, arm in arms.items() if name != base}
    costs = {} if costs is None else costs
    return Lever(base, again, {base: arms[base], again: arms[base], **others}, measure, costs)


# -------- graphs


def graphs(args: argparse.Namespace) -> Lever:
    """Every strategy of the registry beside eager steps, all of them with overlap."""
    costs: dict[str, dict[str, float]] = {}
    arms = {n: partial(_captured, args, n, costs) for n in Registry().offers["graphs"]}
    return lever("none", arms, partial(step_medians, args), costs)


def _captured(args: argparse.Namespace, name: str, costs: dict[str, dict[str, float]]) -> Engine:
    """An engine of this strategy, and into `costs` what its capture took."""
    if name not in costs:
        build(args, graphs=name, overlap=True).close()  # compiles what it captures
        costs[name] = {}
    stamps: list[tuple[float, int]] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "capture":
            stamps.append((time.perf_counter(), total))

    started = time.perf_counter()
    engine = build(args, graphs=name, overlap=True, progress=progress)
    if stamps:
        costs[name] = {
            "build_s": time.perf_counter() - started,
            "capture_s": stamps[-1][0] - stamps[0][0],
            "num_shapes": stamps[-1][1],
            "graph_bytes": engine.report()["graph_bytes"],
        }
    return engine


# -------- kv_write


def kv_write(args: argparse.Namespace) -> Lever:
    """A fusion set whole, beside the same set without one of its spans."""
    fusion, _, span = args.span.partition(":")
    base, fused = "separate nodes", f"fused {span}"

    def arm(choice: Callable[[], Any]) -> Engine:
        return build(args, fusion=choice(), graphs=these_graphs(args))

    arms = {base: partial(arm, partial(without, fusion, span)), fused: partial(arm, lambda: fusion)}
    return lever(base, arms, partial(step_medians, args))


def without(fusion: str, span: str) -> Any:
    """The set less one span. `fusion.only` would do where no two spans of a set want one node."""
    offer: Any = Registry().find("fusion", fusion).load()

    class Without(offer):  # type: ignore[misc]
        def spans(self, facts: Any, device: Any) -> list[Any]:
            found = super().spans(facts, device)
            rest = [one for one in found if one.name != span]
            if len(rest) == len(found):
                known = ", ".join(dict.fromkeys(one.name for one in found))
                raise UserError(f"fusion '{fusion}' has no span '{span}': choose one of {known}")
            return rest

    return Without(offer.Config())


# -------- block_size


def block_size(args: argparse.Namespace) -> Lever:
    """The same requests and the same bytes of cache under every block size; the base is 16."""
    base = 16 if 16 in args.block_size else args.block_size[0]
    with _mixed(args, base, args.kv_cache_bytes, graphs="none") as engine:
        facts, num_bytes = engine.facts, scarce_bytes(engine, args)
    wanted = requests(args, facts)

    def arm(size: int) -> Engine:
        engine = _mixed(args, size, num_bytes)
        mix_figures(wanted[: 2 * args.seats], engine, 0)  # compiles what runs eagerly
        return engine

    arms = {_size(size): partial(arm, size) for size in dict.fromkeys(args.block_size)}
    costs = {"all arms": {"kv_cache_bytes": num_bytes}}
    return lever(_size(base), arms, partial(mix_figures, wanted), costs)


def _size(block_size: int) -> str:
    return f"block size {block_size}"


def _mixed(args: argparse.Namespace, size: int, num_bytes: Any, graphs: str = "auto") -> Engine:
    from core.engine import Engine

    return Engine(
        model=args.model,
        device=args.device,
        kv=args.kv,
        settings={"kv.block_size": size},
        graphs=graphs,
        max_model_len=args.prompt_tokens[1] + args.output_tokens[1],
        max_num_seqs=args.seats,
        max_num_batched_tokens=max(args.seats, args.step_tokens),
        kv_cache_bytes=num_bytes,
        enable_prefix_caching=False,
    )


def requests(args: argparse.Namespace, facts: ModelFacts) -> Requests:
    """Lengths of prompts and outputs are uniform in what was asked for, ends included."""
    rng = np.random.default_rng(args.seed)

    def one() -> tuple[list[int], int]:
        (lo, hi), (fewest, most) = args.prompt_tokens, args.output_tokens
        ids = rng.integers(0, facts.vocab_size, int(rng.integers(lo, hi + 1))).tolist()
        return ids, int(rng.integers(fewest, most + 1))

    return [one() for _ in range(args.num_requests)]


def scarce_bytes(engine: Engine, args: argparse.Namespace) -> int:
    """Bytes that hold `--share` of the mean request times the seats, tables and scratch too."""
    from core.testing.rig import budget_for

    num_seats = min(args.seats, args.num_requests)
    wanted = num_seats * (sum(args.prompt_tokens) + sum(args.output_tokens)) / 2
    return budget_for(engine.plan.kv.build(), engine.facts, engine.limits, int(wanted * args.share))


def mix_figures(wanted: Requests, engine: Engine, i: int) -> dict[str, float]:
    """All requests at once, to their end: the rate, and what became of the cache meanwhile.

    `room held` and `room filled` are means over steps of what sequences hold and of what tokens lie
    in, as shares of the room; `fragmentation` is the mean share of the held that is empty.
    """
    from core.sampling import SamplingParams

    params = [SamplingParams(max_tokens=n, ignore_eos=True) for _, n in wanted]
    before, engine.kv_use = {**vars(engine.counters)}, KVUse()
    start = time.perf_counter()
    outputs = engine.generate([ids for ids, _ in wanted], params, progress=False)
    seconds = time.perf_counter() - start
    if errors := [output.error for output in outputs if output.error]:
        raise RunError(f"{len(errors)} of {len(wanted)} requests failed: {errors[0]}")
    done = {name: value - before[name] for name, value in vars(engine.counters).items()}
    report = engine.report()
    use, num_tokens = report["kv_use"], report["kv_cache_tokens"]
    held, filled = (
        float(np.mean([look[name] for look in use["over_time"]])) / num_tokens
        for name in ("num_held_tokens", "num_live_tokens")
    )
    return {
        RATE: sum(len(output.token_ids) for output in outputs) / seconds,
        "preemptions": done["num_preemptions"],
        "recomputed tokens": done["num_recomputed_tokens"],
        "steps": done["num_steps"],
        "eager steps": done["num_eager_steps"],
        "room in tokens": num_tokens,
        "room held": held,
        "room filled": filled,
        "fragmentation": use["fragmentation"],
    }


# -------- all of them

LEVERS: Mapping[str, Callable[[argparse.Namespace], Lever]] = {
    "graphs": graphs,
    "kv_write": kv_write,
    "block_size": block_size,
}


def result(found: Figures, pulled: Lever, left_out: dict[str, str]) -> dict[str, Any]:
    """What one lever came to, JSON-able. `rows` compare speeds; `figures` are medians of the
    rest."""
    if any(pulled.base not in by_arm for by_arm in found.values()):
        found = {}  # nothing to compare with
    speeds = {RATE: found[RATE]} if RATE in found else found
    others = {name: by_arm for name, by_arm in found.items() if name not in speeds}
    rows = compared(speeds, pulled.base, pulled.again, more_is_better={RATE})
    return {
        "rows": rows,
        "figures": {
            arm: {name: float(np.median(by_arm[arm])) for name, by_arm in others.items()}
            for arm in next(iter(others.values()), {})
        },
        "costs": {name: cost for name, cost in pulled.costs.items() if cost},
        "says": [_says(row, pulled.base) for row in rows if row["figure"] == RATE],
        "left_out": left_out,
        "per_round": found,
    }


def _says(row: dict[str, Any], base: str) -> str:
    within = "" if row["control"] is None else f" (A/A within a factor of {row['control']:.3f})"
    what = f"{row['arm']}: {row['median']:.0f} {row['figure']}, {row['ratio']:.3f} of {base}'s"
    return f"{what}: {row['verdict']}{within}"


def pull(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one lever. What cannot run here is in `left_out`, "all arms" where nothing can."""
    left_out: dict[str, str] = {}
    try:
        pulled = LEVERS[name](args)
    except (UserError, RunError) as error:
        left_out["all arms"] = str(error)
        return {"rows": [], "figures": {}, "costs": {}, "says": [], "left_out": left_out}
    found = side_by_side(
        pulled.arms, pulled.measure, args.rounds, rebuild=args.rebuild, left_out=left_out
    )
    return result(found, pulled, left_out)


def print_lever(name: str, found: dict[str, Any]) -> None:
    print(f"{name}:")
    print_rows([cells(row) for row in found["rows"]], sys.stdout)
    for what in ("figures", "costs"):
        print_rows([{"arm": arm, **row} for arm, row in found[what].items()], sys.stdout)
    for sentence in found["says"]:
        print(sentence)
    for arm, reason in found["left_out"].items():
        print(f"not measured, {arm}: {reason}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("evals.speed.levers", __doc__)
    add = parser.add_argument
    add("--model", default="random:qwen3-0.6b")
    add("--levers", nargs="+", choices=tuple(LEVERS), default=list(LEVERS))
    add("--device")
    add("--rounds", type=count, default=4, help="even, so that drift cancels")
    add("--rebuild", action="store_true", help="one engine at a time, built anew each round")
    add("--json", type=Path)
    steps = parser.add_argument_group("graphs and kv_write")
    add = steps.add_argument
    add("--prefill", type=count, nargs="+", default=[128, 1024, 4096], help="tokens of prompts")
    add("--batch", type=count, nargs="+", default=[1, 64, 256], help="sequences of decode steps")
    add("--context", type=count, default=320, help="tokens, at the middle of the timed steps")
    add("--steps", type=count, default=32, help="decode steps timed, each round")
    add("--repeats", type=count, default=8, help="prefills timed, each round")
    add("--kv-cache-bytes", default="10GiB", help="of each engine; it must hold --batch")
    add("--span", default="triton:qk_rope_write", metavar="FUSION:NAME", help="of kv_write")
    mix = parser.add_argument_group("block_size")
    add = mix.add_argument
    add("--kv", default="paged", help="a kv offer with kv.block_size")
    add("--block-size", type=count, nargs="+", default=[16, 8, 32, 64], metavar="TOKENS")
    add("--num-requests", type=count, default=512)
    add("--prompt-tokens", type=count, nargs=2, default=[16, 200], metavar=("LO", "HI"))
    add("--output-tokens", type=count, nargs=2, default=[8, 64], metavar=("LO", "HI"))
    add("--seats", type=count, default=256, help="sequences that may run at once")
    add("--step-tokens", type=count, default=2048, help="of one step; graphs go up to 8192")
    add("--share", type=positive, default=0.25, help="of the room that full seats would like")
    add("--seed", type=seed, default=0, help="of the requests")
    args = parser.parse_args(argv)
    for name in ("prompt_tokens", "output_tokens"):
        lo, hi = getattr(args, name)
        if lo > hi:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} is {lo} to {hi}: give the lower first")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    command = " ".join(["python -m evals.speed.levers", *(argv or sys.argv[1:])])
    found: dict[str, dict[str, Any]] = {}
    try:
        records.check_folder(args.json)
        for name in args.levers:
            found[name] = pull(name, args)
            print_lever(name, found[name])
            if args.json:  # after each lever: whoever is short of time keeps what there is
                records.write(
                    args.json, {"command": command, **where(args.device), "levers": found}
                )
        if not any(one["rows"] for one in found.values()):
            reasons = [why for one in found.values() for why in one["left_out"].values()]
            raise UserError("; ".join(dict.fromkeys(reasons)))
    except (UserError, RunError) as error:
        print(f"outweigh: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
