"""The engines of a ladder, and what measures them: the one place that builds any."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from core.batch import Limits
from core.compose import WEIGHTS
from core.errors import UserError
from core.metrics import KVUse
from evals.speed import roofline
from evals.speed.ladder import measured
from evals.speed.ladder.loads import Kind, Load, Mix, Served, requests, serve
from evals.speed.ladder.rungs import Arm, engine_fields, plan_of
from evals.speed.peers import Ours
from evals.speed.saturation import is_behind
from evals.speed.steps import kv_token_bytes

if TYPE_CHECKING:
    from core.engine import Engine
    from core.facts import ModelFacts
    from core.show import Progress

Run = dict[str, Any]


class Runner(Protocol):
    """What a study needs of whatever measures; tests have one that plants its timings."""

    def retain(self, arms: Iterable[Arm]) -> None:
        """These alone are needed from now on."""

    def measure(self, arm: Arm, load: Load, *, seed: int, label: str) -> Run:
        """One run. Raises UserError or RunError where the arm cannot be built or does not do it."""

    def room_for(self, arm: Arm, num_tokens: int) -> int:
        """Tokens of the smallest KV pool of this arm that holds so many and one request."""


class Common(NamedTuple):
    """What all arms share: fields of RunConfig, the requests, and the device's ceilings (None: no
    share of a roofline)."""

    fields: Mapping[str, Any]
    mix: Mix
    max_at_once: int
    ceilings: roofline.Ceilings | None


class Engines:
    """A Runner over real engines; those that live at once share their weights. Each arm has its
    own, which lives until it is not retained, or with `rebuild` for one run only. Before the first
    run of many requests at once, and before the first of one at a time, it serves the requests in a
    closed loop that is not measured."""

    def __init__(self, common: Common, progress: Progress, *, rebuild: bool = False) -> None:
        self._common, self._progress, self._rebuild = common, progress, rebuild
        self._live: dict[tuple[str, int | None], Ours] = {}
        self._warm: dict[Ours, set[Kind]] = {}  # loads that an engine has warmed up with
        self._floors: dict[str, tuple[float | None, Callable[[roofline.Step], float] | None]] = {}
        self.facts: ModelFacts | None = None
        self.reports: dict[str, dict[str, Any]] = {}
        self.build_s: list[float] = []

    # -------- engines

    def retain(self, arms: Iterable[Arm]) -> None:
        names = {arm.name for arm in arms}
        for key in [key for key in self._live if key[0] not in names]:
            self._warm.pop(self._live[key], None)
            self._live.pop(key).close()

    def close(self) -> None:
        self.retain(())

    def engine(self, arm: Arm, room_tokens: int | None = None) -> Ours:
        """The engine of an arm."""
        key = arm.name, room_tokens
        if key not in self._live:
            started = time.perf_counter()
            self._live[key] = Ours(self._build(arm, room_tokens), "")
            self.build_s.append(time.perf_counter() - started)
        return self._live[key]

    def _build(self, arm: Arm, room_tokens: int | None) -> Engine:
        from core.engine import Engine

        fields = {**self._common.fields, **engine_fields(arm.choices)}
        if room_tokens is not None:
            fields["kv_cache_bytes"] = self._bytes_for(arm, room_tokens)
        read = WEIGHTS(plan_of(arm.choices, self._common.fields).config)
        live = (ours.engine for ours in self._live.values())
        like = next((other for other in live if WEIGHTS(other.config) == read), None)
        engine = Engine(progress=self._progress, weights_of=like, **fields)
        self.facts = engine.facts
        if arm.name not in self.reports and room_tokens is None:
            report = engine.report()
            self.reports[arm.name] = {
                k: v for k, v in report.items() if k not in ("counters", "kv_use")
            }
        if arm.name not in self._floors:
            self._floors[arm.name] = self._floor_of(engine)
        return engine

    def _floor_of(
        self, engine: Engine
    ) -> tuple[float | None, Callable[[roofline.Step], float] | None]:
        """Bytes of a token of the cache, and what a step cannot take less than, in seconds."""
        try:
            size = kv_token_bytes(engine)
        except UserError:  # its room does not depend on its bytes
            return None, None
        facts, rates = engine.facts, self._common.ceilings
        if rates is None:
            return size, None
        return size, lambda step: roofline.floor_s(facts, step, rates, size)

    def _serve(self, engine: Ours, load: Load, seed: int, label: str) -> Served:
        setup, mix = engine.setup, self._common.mix
        wanted = requests(
            mix, load, seed=seed, label=label, vocab_size=setup.vocab_size,
            longest=setup.max_model_len,
        )  # fmt: skip
        engine.forget()
        engine.engine.kv_use = KVUse()
        at_once = {"closed": self._common.max_at_once, "lone": 1}.get(load.kind)
        return serve(engine, wanted, at_once)

    # -------- a run

    def measure(self, arm: Arm, load: Load, *, seed: int, label: str) -> Run:
        engine = self.engine(arm, load.room_tokens)
        warm = self._warm.setdefault(engine, set())
        if (warmth := Load("lone" if load.kind == "lone" else "closed")).kind not in warm:
            self._serve(engine, warmth, seed, "warm-up")
            warm.add(warmth.kind)
        counters = engine.engine.counters
        before = {**vars(counters)}
        served = self._serve(engine, load, seed, label)
        done = {name: value - before[name] for name, value in vars(counters).items()}
        numbers, samples = measured.figures(served)
        token_bytes, floor = self._floors[arm.name]
        due = [metrics.arrival_s for metrics in served.metrics]
        quantiles = [float(q) for q in measured.quantiles(samples.pop("itl_ms"))]
        found = {
            "figures": numbers,
            "samples": samples,
            "itl_ms quantiles": quantiles,
            "duration_s": served.end_s - served.begin_s,
            "is_behind": load.kind == "poisson" and is_behind(due, samples["ttft_ms"]),
            "kv": measured.cache_use(engine.engine.report(), served, token_bytes),
            **measured.work(engine, served, done, floor),
        }
        engine.forget()
        if self._rebuild:
            self.close()
        return found

    def lone_prompt(self, arm: Arm, num_tokens: int, num_prompts: int) -> tuple[float, float]:
        """Medians, in ms: of the TTFT of lone prompts of random ids, and of what the host takes for
        the step before it returns, the device idle at its begin."""
        engine, rng = self.engine(arm), np.random.default_rng([num_tokens, 7])
        engine.is_alone = engine.setup.device.startswith("cuda")
        times, host = [], []
        for _ in range(num_prompts + 2):
            ids = rng.integers(0, engine.setup.vocab_size, num_tokens).tolist()
            engine.forget()
            engine.submit(ids, 1)
            while engine.pending():
                engine.step()
            times.append(float(engine.ended[0].metrics.ttft_ms or 0.0))
            host.append(sum(c.end_s - c.begin_s for c in engine.calls if c.num_launched) * 1e3)
        engine.is_alone = False
        engine.forget()
        return statistics.median(times[2:]), statistics.median(host[2:])

    # -------- the pool

    def _bytes_for(self, arm: Arm, room_tokens: int) -> int:
        from core.testing.rig import budget_for

        assert self.facts is not None, "an engine was built before"
        plan = plan_of(arm.choices, self._common.fields)
        config = plan.config
        assert config.max_model_len and config.max_num_seqs and config.max_num_batched_tokens
        limits = Limits(config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens)
        return budget_for(plan.kv.build(), self.facts, limits, room_tokens)

    def room_for(self, arm: Arm, num_tokens: int) -> int:
        longest = int(self._common.fields["max_model_len"])
        return max(num_tokens, longest)

    def bytes_of_share(self, arm: Arm, share: float) -> int:
        """Bytes in which this arm holds `share` of all seats at full length."""
        fields = self._common.fields
        if self.facts is None:
            self._build(arm, None).close()
        return self._bytes_for(arm, int(share * fields["max_num_seqs"] * fields["max_model_len"]))
