"""The quality check of lossy rungs: short, teacher-forced, by the measure of `evals.quality`.

The texts are what the arm below writes by itself (8 of them, seeded, at temperature 1), so that any
model has some without a network; or those of `--quality-data`. The verdict is that of
`evals.quality`: *pass*, *fail* or *not shown*, by the intervals over documents. Drift, which shows
from 1,024 positions on, is asked of longer texts only. Of random weights only what is not finite
speaks: the limits are of models that have learnt what comes next.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from evals.quality.data import Choice, read_documents
from evals.quality.lockstep import compare
from evals.quality.statistics import statistics
from evals.quality.verdicts import judge, limits_of, overall
from evals.speed.ladder.rungs import plan_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from core.engine import Engine
    from evals.speed.ladder.rungs import Arm
    from evals.speed.ladder.runner import Engines

NUM_TEXTS, DRIFT_FROM = 8, 1024
RANDOM = "the weights are random, and no limit is of such: give a --model that has learnt"
NUM_TOKENS = 272  # of each text: 2,168 positions, of which evals.quality asks for 2,048


def is_lossy(arm: Arm, common: Mapping[str, Any]) -> bool:
    """Whether any of its offers says that it is not lossless."""
    plan = plan_of(arm.choices, common)
    return any(not getattr(choice.offer, "lossless", True) for choice in plan.choices)


def check(engines: Engines, below: Arm, arm: Arm, data: Seq[str], seed: int) -> dict[str, Any]:
    """What `arm` does to texts, beside `below`: KL in nats, top-1 agreement, loss, and the verdict.

    Raises UserError where there is no text, RunError where scoring fails.
    """
    engines.retain([below, arm])
    base, other = (engines.engine(one).engine for one in (below, arm))
    texts = _given(base, data) if data else _written(base, seed)
    pair = below.name, arm.name
    found = [compare({pair[0]: base, pair[1]: other}, [pair], ids)[pair] for ids in texts]
    limits = limits_of(other.plan.kv.offer, str(base.config.dtype))
    numbers = statistics(found, limits.values["tail_kl"], seed)
    if not any(len(ids) > DRIFT_FROM for ids in texts):
        values = {name: value for name, value in limits.values.items() if name != "drift"}
        limits = limits._replace(values=values)
    findings = judge(found, numbers, limits, seed)
    if base.config.model.startswith("random:"):
        findings = [finding if finding.metric == "not_finite"
                    else finding._replace(verdict="not shown", why=RANDOM)
                    for finding in findings]  # fmt: skip
    names = ("num_documents", "num_positions", "mean_kl", "mean_kl_interval", "top1",
             "top1_interval", "delta_nats", "delta_nats_interval")  # fmt: skip
    return {
        "below": below.name,
        "texts": ", ".join(data) if data else f"{len(texts)} texts that '{below.name}' wrote",
        **{name: numbers[name] for name in names},
        "verdict": overall(findings),
        "findings": [finding._asdict() for finding in findings],
    }


def _given(engine: Engine, data: Seq[str]) -> list[list[int]]:
    documents = read_documents(list(data), Choice(limit=NUM_TEXTS))
    most = min(NUM_TOKENS, engine.limits.max_model_len)
    encoded = [engine.tokenizer.encode(document.text)[:most] for document in documents]
    return [ids for ids in encoded if len(ids) > 1]


def _written(engine: Engine, seed: int) -> list[list[int]]:
    """Texts that begin with one token each."""
    from core.sampling import SamplingParams

    most = min(NUM_TOKENS, engine.limits.max_model_len) - 1
    params = [SamplingParams(max_tokens=most, ignore_eos=True, temperature=1.0, seed=seed + i)
              for i in range(NUM_TEXTS)]  # fmt: skip
    step = max(1, engine.facts.vocab_size // NUM_TEXTS)
    prompts = [[i * step] for i in range(NUM_TEXTS)]
    outputs = engine.generate(prompts, params, progress=False)
    return [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
