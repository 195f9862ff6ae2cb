"""evals/speed/ladder: one variable a rung, who is measured when, verdicts on planted timings."""

from __future__ import annotations

import itertools
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.config import RunConfig
from core.errors import RunError, UserError
from core.metrics import RequestMetrics
from core.seams import SEAMS
from evals.speed.driving import Clock
from evals.speed.ladder import findings, markdown, measured, rungs
from evals.speed.ladder.findings import TTFT, saturated
from evals.speed.ladder.loads import Load, Mix, requests, serve
from evals.speed.ladder.phases import Climb, Plan, checked
from evals.speed.ladder.rungs import (
    BASELINE,
    all_rungs,
    base_of,
    build,
    chosen,
    own_rung,
    plan_of,
    without,
)
from evals.speed.ladder.study import Store, Timetable
from evals.speed.peers import News
from evals.speed.saturation import is_behind

COMMON = {
    "model": "tiny",
    "device": "cpu",
    "max_model_len": 288,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "kv_cache_bytes": 1 << 24,
}
SOME = ["paged", "block=32", "fusion=onednn", "aging", "paged_int8"]


def ladder_of(*names, base=BASELINE, common=COMMON):
    return build(base, chosen(all_rungs(64), list(names) or None), common, device="cpu")


# -------- rungs


def resolved(arm, common):
    """Every field and every option of an arm, by a path, as its record has them."""
    record = plan_of(arm.choices, common).dump()
    fields = {k: v for k, v in record["config"].items() if k not in (*SEAMS, "settings")}
    offers = {seam: record["offers"][seam]["name"] for seam in SEAMS}
    options = {
        f"{seam}.{name}": value
        for seam in SEAMS
        for name, value in record["offers"][seam]["settings"].items()
    }
    return fields, offers, options


@pytest.fixture(params=["cpu", "cuda"])
def every_rung(request, monkeypatch):
    """The whole ladder of a device, and what its arms share; nothing is put on the device."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(request.param == "cuda"))
    common = {**COMMON, "device": request.param}
    whole = build(BASELINE, chosen(all_rungs(64), ["all"]), common, device=request.param)
    return request.param, common, whole


def test_each_rung_changes_exactly_one_variable(every_rung):
    device, common, whole = every_rung
    assert len(whole.arms) > (25 if device == "cuda" else 18)
    for arm in whole.arms[1:]:
        sides = [resolved(one, common) for one in (whole.arm(arm.before), arm)]
        (fields, offers, options), (fields_2, offers_2, options_2) = sides
        different = [k for k in fields if fields[k] != fields_2[k]]
        different += [seam for seam in SEAMS if offers[seam] != offers_2[seam]]
        both = options.keys() & options_2.keys()
        different += [k for k in both if options[k] != options_2[k]]
        # What comes and goes with an offer belongs to the choice of it.
        odd = {k.partition(".")[0] for k in options.keys() ^ options_2.keys()}
        assert len(different) == 1 and odd <= set(different), (arm.name, different, odd)


def test_what_the_device_lacks_is_said_and_not_run(every_rung):
    device, _, whole = every_rung
    lacks = {"cpu": "graphs=full", "cuda": "span=qkv_proj"}[device]
    assert whole.left_out[lacks] == f"needs {'cuda' if device == 'cpu' else 'cpu'}, and the " + (
        f"device is {device}"
    )
    assert lacks not in [arm.name for arm in whole.arms]


def test_spans_stand_in_place_of_the_set_as_a_whole():
    names = [arm.name for arm in ladder_of("all").arms]
    assert "span=lm_head" in names and "fusion=onednn" not in names
    top = ladder_of("all").top
    assert top.choices["fusion.only"] == ["qkv_proj", "o_proj", "gate_up", "down", "lm_head"]


def test_the_default_ladder_has_at_most_twelve_rungs():
    for device in ("cpu", "cuda"):
        found = [r for r in chosen(all_rungs(64), None) if r.device in (None, device)]
        assert len(found) <= 12


def test_graphs_bring_their_overlap_with_them(monkeypatch):
    """Eager steps with overlap are no baseline, and no top either."""
    assert base_of({}) == BASELINE == base_of({"graphs": "none"})
    assert base_of({"graphs": "full"})["overlap"] is None
    assert base_of({"graphs": "full", "overlap": False})["overlap"] is False
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    common = {**COMMON, "device": "cuda"}
    rungs = chosen(all_rungs(64), ["paged", "graphs=full", "overlap", "aging"])
    whole = build(BASELINE, rungs, common, device="cuda")
    assert whole.top.choices["overlap"] is True
    less, alone = without(whole, "graphs=full", common, device="cuda")
    assert (less.choices["graphs"], less.choices["overlap"]) == ("none", False)
    assert (alone.choices["graphs"], alone.choices["overlap"]) == ("full", False)
    less, alone = without(whole, "overlap", common, device="cuda")
    assert (less.choices["graphs"], less.choices["overlap"]) == ("full", False)
    assert alone == "it rests on 'graphs=full'"


def test_a_branch_does_not_stay():
    whole = ladder_of("paged", "block=32", "block=64", "prefix")
    assert [(arm.name, arm.before) for arm in whole.arms] == [
        ("baseline", None), ("paged", "baseline"), ("block=32", "paged"), ("block=64", "paged"),
        ("prefix", "paged"),
    ]  # fmt: skip
    assert whole.top.name == "prefix" and "kv.block_size" not in whole.top.choices


def test_a_rung_that_changes_nothing_is_not_run():
    rung = own_rung("same=kv.block_size=16")
    whole = build({**BASELINE, "kv": "paged"}, [rung], COMMON, device="cpu")
    assert whole.left_out == {"same": "it changes nothing of 'baseline' here"}


def test_an_arm_of_ones_own():
    rung = own_rung("mine=kv=paged,kv.block_size=32")
    whole = build(BASELINE, [rung, own_rung("slow=max_num_seqs=2")], COMMON, device="cpu")
    assert [arm.name for arm in whole.arms] == ["baseline", "mine", "slow"]
    assert whole.arm("mine").choices["kv.block_size"] == 32
    with pytest.raises(UserError, match=r"'both' changes 2 variables .* \(kv, sched\): make"):
        build(BASELINE, [own_rung("both=kv=paged,sched=aging")], COMMON, device="cpu")
    with pytest.raises(UserError, match="two arms are called 'mine'"):
        build(BASELINE, [rung, rung], COMMON, device="cpu")
    for text, said in {
        "mine": "--arm takes NAME=FIELD=VALUE",
        "mine=kw=paged": "a run has no field 'kw'; did you mean kv",
        "mine=kv=pagd": "there is no kv called 'pagd'",
    }.items():
        if text.endswith("pagd"):
            made = build(BASELINE, [own_rung(text)], COMMON, device="cpu")
            assert said in made.left_out["mine"]
        else:
            with pytest.raises(UserError, match=said):
                own_rung(text)
    with pytest.raises(UserError, match="there is no rung 'pagde'; did you mean paged"):
        chosen(all_rungs(64), ["pagde"])


def test_options_go_with_their_offer_or_stay_with_the_next():
    choices = {**BASELINE, "kv": "paged", "kv.block_size": 32, "sched": "aging", "sched.rate": 5.0}
    assert rungs.changed(choices, {"kv": "paged_int8"}, COMMON)["kv.block_size"] == 32
    assert "sched.rate" not in rungs.changed(choices, {"sched": "fifo"}, COMMON)


def test_without_a_rung_and_with_it_alone():
    whole = ladder_of("paged", "prefix", "fusion=onednn", "paged_int8")
    less, alone = without(whole, "fusion=onednn", COMMON, device="cpu")
    assert less.choices == {**whole.top.choices, "fusion": "none"}
    assert alone.choices == {**BASELINE, "fusion": "onednn"}
    less, alone = without(whole, "paged", COMMON, device="cpu")
    assert less.startswith("then 'prefix' is not to be had: prefix caching was asked for")
    assert alone.choices == {**BASELINE, "kv": "paged"}


# -------- loads

MIX = Mix(40, 5, 30, 120, 6, 16, 3)


def drawn(load, label="a", seed=0):
    return requests(MIX, load, seed=seed, label=label, vocab_size=8192, longest=288)


def test_runs_have_the_same_lengths_and_times_and_other_tokens():
    load = Load("poisson", 20.0)
    first, again, other = drawn(load), drawn(load), drawn(load, "b")
    assert first == again
    assert [(len(r.prompt), r.num_output, r.at) for r in first] == [
        (len(r.prompt), r.num_output, r.at) for r in other
    ]
    assert not {tuple(r.prompt[:8]) for r in first} & {tuple(r.prompt[:8]) for r in other}
    assert [len(r.prompt) for r in first] != [len(r.prompt) for r in drawn(load, seed=1)]


def test_the_last_request_is_due_at_requests_over_rate():
    assert drawn(Load("poisson", 20.0))[-1].at == pytest.approx(2.0)
    assert {r.at for r in drawn(Load("burst"))} == {0.0}
    assert len(drawn(Load("lone"))) == 5


def test_long_prompts_begin_with_one_of_the_prefixes():
    starts = {tuple(r.prompt[:16]) for r in drawn(Load("burst")) if len(r.prompt) > 16}
    assert len(starts) == 3


class Server:
    """A request takes `seconds` from its submission, whatever runs beside it."""

    def __init__(self, seconds):
        self.now, self.seconds = 0.0, seconds
        self.running, self.ended, self.most = {}, [], 0
        self.clock = Clock(lambda: self.now, self.sleep)

    def sleep(self, seconds):
        self.now += seconds + 1e-9

    def submit(self, prompt, num_output, due_s):
        key = len(self.running) + len(self.ended)
        self.running[key] = self.now + self.seconds, due_s, num_output
        self.most = max(self.most, len(self.running))
        return key

    def pending(self):
        return bool(self.running)

    def step(self):
        key = min(self.running, key=lambda k: self.running[k][0])
        at, due, num = self.running.pop(key)
        self.now = max(self.now, at)
        metrics = RequestMetrics(1, 0, num, 0, due, due, due, due, self.now, (self.now,) * num)
        self.ended.append(SimpleNamespace(request_id=str(key), metrics=metrics))
        return [News(key, num, True)]


def test_the_clock_starts_when_a_request_was_due():
    wanted = [r._replace(at=at) for r, at in zip(drawn(Load("burst")), (0, 0.1, 5.0), strict=False)]
    server = Server(1.0)
    served = serve(server, wanted, None, server.clock)
    assert [m.arrival_s for m in served.metrics] == pytest.approx([0, 0.1, 5.0])
    # The second was seen only once the first step had ended, and all of its waiting counts.
    assert [m.ttft_ms for m in served.metrics] == pytest.approx([1000, 1900, 1000])


@pytest.mark.parametrize("most", [1, 3])
def test_a_closed_loop_holds_so_many_at_once(most):
    server = Server(1.0)
    served = serve(server, drawn(Load("closed")), most, server.clock)
    assert server.most == most and len(served.metrics) == 40
    assert served.end_s == pytest.approx(-(-40 // most))


def test_figures_of_a_run():
    metrics = [
        RequestMetrics(4, 0, 2, 0, 1.0 * i, i, i, i + 0.25, i + 1.0, (i + 0.5, i + 0.75))
        for i in range(12)
    ]
    served = SimpleNamespace(metrics=metrics, begin_s=0.0, end_s=12.0)
    found, samples = measured.figures(served)
    assert found[TTFT] == pytest.approx(500) and found["tpot_ms p50"] == pytest.approx(250)
    assert found["queue_ms mean"] == pytest.approx(250) == found["prefill_ms mean"]
    assert found["output_throughput"] == 2 and found["request_throughput"] == 1
    assert found["ttft_ms p99"] is None and found["ttft_ms p90"] == pytest.approx(500)
    assert len(samples["ttft_ms"]) == 12


def test_a_growing_queue_is_seen_and_a_short_run_is_not_asked():
    due = np.linspace(0, 10, 80)
    assert is_behind(due, 500 + 400 * due)
    assert not is_behind(due, np.full(80, 500.0))
    assert not is_behind(due[:40], 500 + 400 * due[:40])


# -------- a study with planted timings


class Planted:
    """A runner whose times are a function of the configuration, with a little noise."""

    def __init__(self, ms, lose=(), stop_after=None, noise=0.01):
        self.ms, self.lose, self.stop_after, self.noise = ms, lose, stop_after, noise
        self.log, self.retained = [], []

    def retain(self, arms):
        self.retained.append([arm.name for arm in arms])

    def room_for(self, arm, num_tokens):
        return num_tokens

    def measure(self, arm, load, *, seed, label):
        if self.stop_after is not None and len(self.log) == self.stop_after:
            raise KeyboardInterrupt
        if arm.name in self.lose:
            raise RunError("it broke")
        self.log.append((label, arm.name))
        rng = np.random.default_rng([zlib.crc32(f"{label} {arm.name}".encode()), seed])
        ms = self.ms(arm.choices) * float(np.exp(rng.normal(0, self.noise)))
        return run_of(ms, load)


def run_of(ms, load):
    times = [ms] * 20
    return {
        "figures": {
            TTFT: ms, "ttft_ms p99": None, "tpot_ms p50": ms / 10, "itl_ms p50": ms / 10,
            "itl_ms p99": ms / 5, "e2el_ms p50": 2 * ms, "output_throughput": 1e5 / ms,
            "request_throughput": 1e4 / ms,
        },
        "samples": {"ttft_ms": times, "tpot_ms": times, "queue_ms": times, "prefill_ms": times},
        "itl_ms quantiles": [ms] * 101,
        "duration_s": 1.0,
        "is_behind": False,
        "kv": {"room_tokens": 400, "peak_held_tokens": 200, "token_bytes": 10.0,
               "peak_held_bytes": 2000.0, "fragmentation": 0.1, "over_time": [[0.0, 10, 5]]},
        "busy": 0.5, "recompute_tax": 0.0, "share_of_roofline": 0.2,
        "counters": {"num_preemptions": 0},
    }  # fmt: skip


def plain_ms(choices):
    ms = 100.0 if choices["kv"] == "contiguous" else 50.0
    ms *= 0.8 if choices["fusion"] == "onednn" else 1.0
    return ms * (1.3 if choices["kv"] == "paged_int8" else 1.0)


def study(tmp_path, runner, *, resume=False, rounds=8, num_left_out=2, **fields):
    plan = Plan(ladder_of(*SOME), [0.5, 0.8], num_left_out, COMMON, "cpu", **fields)
    store = Store(tmp_path, {"what": "a test"}, resume=resume)
    told = []
    timetable = Timetable(rounds, 3, "repeatability", lambda *place: told.append(place))
    climb = Climb(plan, runner, store, timetable)
    return climb, plan, told


def finished(tmp_path, runner, **fields):
    climb, _, _ = study(tmp_path, runner, **fields)
    assert list(climb.run())
    return climb.document


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    runner = Planted(plain_ms)
    return runner, finished(tmp_path_factory.mktemp("study"), runner)


def said(document, block, figure=TTFT):
    found = document["blocks"][block]["figures"][figure]["steps"]
    return {name: step["verdict"] for name, step in found.items()}


def test_verdicts_on_planted_timings(planted):
    _, document = planted
    expected = {
        "paged": "faster", "block=32": "no change", "fusion=onednn": "faster",
        "aging": "no change", "paged_int8": "slower",
    }  # fmt: skip
    assert said(document, "load-0.5") == said(document, "load-0.8") == expected
    assert said(document, "capacity", "output_throughput") == expected
    steps = document["blocks"]["load-0.5"]["figures"][TTFT]["steps"]
    assert steps["paged"]["low"] < 0.5 < steps["paged"]["high"]
    assert steps["paged_int8"]["ratio"] == pytest.approx(1.3, rel=0.02)
    whole = document["blocks"]["load-0.5"]["whole"][TTFT]
    assert whole["ratio"] == pytest.approx(0.5 * 0.8 * 1.3, rel=0.02)
    shares = document["blocks"]["load-0.5"]["shares"]
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["paged"] == pytest.approx(np.log(0.5) / np.log(0.52), rel=0.05)
    assert "block=32" not in shares  # a branch is no part of the whole


def test_rates_are_shares_of_the_capacity_of_the_baseline(planted):
    _, document = planted
    capacity = document["capacity"]["baseline"]
    assert capacity == pytest.approx(100, rel=0.02)
    blocks = document["blocks"]
    assert blocks["load-0.8"]["load"]["rate"] == 0.8 * capacity
    assert blocks["load-0.8"]["arms"]["baseline"]["utilisation"] == pytest.approx(0.8)
    assert blocks["load-0.8"]["arms"]["paged"]["utilisation"] == pytest.approx(0.4, rel=0.02)
    below = document["capacity"]["fusion=onednn"]
    assert blocks["pressure--aging"]["load"]["rate"] == 0.85 * below
    assert blocks["scarce--aging"]["load"]["room_tokens"] == 100  # half of the peak of 200


def test_rounds_go_forwards_and_backwards_with_the_first_arm_twice(planted):
    runner, _ = planted
    of_block = [(label, arm) for label, arm in runner.log if label.startswith("load-0.5 ")]
    rounds = [[arm for _, arm in group] for _, group in itertools.groupby(of_block, lambda x: x[0])]
    assert rounds[0] == ["baseline", "baseline again", *SOME]
    assert rounds[1] == rounds[0][::-1] and len(rounds) == 8


def test_only_rungs_that_compete_are_pressed(planted):
    _, document = planted
    pressed = [name for name in document["blocks"] if "--" in name]
    assert pressed == ["pressure--aging", "burst--aging", "scarce--aging"]
    assert said(document, "burst--aging") == {"aging": "no change"}


def test_what_was_expected_was_measured(planted, tmp_path):
    runner, _ = planted
    plan = study(tmp_path, runner)[1]
    # One arm of the leave-one-out is not to be had.
    assert len(runner.log) == 8 * (sum(num for *_, num in plan.expected()) - 1)


def test_the_largest_are_left_out_where_that_means_something(planted):
    result = planted[1]["blocks"]["leave-one-out"]
    assert [pair["name"] for pair in result["pairs"]] == ["paged_int8", "fusion=onednn"]
    assert result["refused"]["without paged"].startswith("a rung above it sets the same variable")
    # On the baseline INT8 would bring the blocks of `paged` along, which is no change of one.
    why = "it would be another change, since 'baseline' has another kv"
    assert result["refused"]["alone paged_int8"] == why
    assert result["interactions"].keys() == {"fusion=onednn"}
    assert result["interactions"]["fusion=onednn"]["verdict"] == "adds up"
    assert said(planted[1], "leave-one-out") == {"paged_int8": "slower", "fusion=onednn": "faster"}


def test_an_interaction_is_flagged(tmp_path):
    def ms(choices):
        helps = choices["fusion"] == "onednn" and choices["sched"] == "aging"
        return 100.0 * (0.6 if helps else 1.0) * (0.7 if choices["preemption"] == "swap" else 1.0)

    names = ["fusion=onednn", "aging", "swap"]
    plan = Plan(
        ladder_of(*names, base={**BASELINE, "kv": "paged"}), [0.5], 3, COMMON, "cpu",
        is_pressed=False,
    )  # fmt: skip
    store = Store(tmp_path, {}, resume=False)
    climb = Climb(
        plan, Planted(ms, noise=0.003), store, Timetable(8, 0, "repeatability", lambda *_: None)
    )
    list(climb.run())
    result = climb.document["blocks"]["leave-one-out"]
    verdicts = {name: one["verdict"] for name, one in result["interactions"].items()}
    assert verdicts == {"aging": "interaction", "fusion=onednn": "interaction", "swap": "adds up"}
    assert said(climb.document, "leave-one-out") == dict.fromkeys(names, "faster")


# -------- who is refused


def test_saturated():
    assert saturated(9.7, 10) is None and saturated(9.7, None) is None
    assert saturated(9.9, 10).startswith("saturated: 9.9 requests/s are offered and it serves 10,")


def test_a_saturated_arm_is_refused_and_not_measured(tmp_path):
    def ms(choices):  # aging serves half of what the baseline does, from there on it is as before
        return 200.0 if choices["sched"] == "aging" and choices["kv"] == "paged" else 100.0

    runner = Planted(ms)
    document = finished(tmp_path, runner, num_left_out=0)
    block = document["blocks"]["load-0.8"]
    assert block["refused"]["aging"].startswith("saturated: 80")
    assert ("load-0.8 0", "aging") not in runner.log and ("load-0.5 0", "aging") not in runner.log
    found = block["figures"][TTFT]
    assert set(found["steps"]) == {"paged", "block=32", "fusion=onednn"}
    assert found["refused"]["aging"].startswith("saturated")
    assert found["refused"]["paged_int8"].startswith("'aging', below it: saturated")
    pressed = document["blocks"]["pressure--aging"]
    assert pressed["refused"]["aging"].startswith("saturated") and not pressed["arms"]
    assert said(document, "burst--aging") == {"aging": "slower"}  # a burst comes to an end


def test_an_arm_that_falls_behind_has_no_verdict(tmp_path):
    class Behind(Planted):
        def measure(self, arm, load, **place):
            run = super().measure(arm, load, **place)
            return {**run, "is_behind": arm.name == "aging" and load.kind == "poisson"}

    document = finished(tmp_path, Behind(plain_ms), num_left_out=0)
    found = document["blocks"]["load-0.5"]["figures"][TTFT]
    assert found["refused"]["aging"] == "saturated: its queue grew in 8 of 8 runs"
    assert "aging" not in found["steps"] and "paged" in found["steps"]


def test_a_control_that_moved_voids_the_verdicts_that_it_may_explain(tmp_path):
    class Moved(Planted):
        def measure(self, arm, load, **place):
            run = super().measure(arm, load, **place)
            if arm.name.endswith(" again"):
                run["figures"][TTFT] *= 1.4
            return run

    document = finished(tmp_path, Moved(plain_ms), num_left_out=0)
    found = said(document, "load-0.5")
    assert found.pop("paged") == "faster"  # by half, and the control moved by 1.4
    assert set(found.values()) == {"inconclusive"}
    assert set(said(document, "capacity", "output_throughput").values()) > {"faster"}


def test_an_arm_that_breaks_is_left_out_and_no_other(tmp_path):
    document = finished(tmp_path, Planted(plain_ms, lose=("aging",)), num_left_out=0)
    assert document["blocks"]["capacity"]["refused"] == {"aging": "it broke"}
    assert (
        "fusion=onednn" in said(document, "load-0.5") and "burst--aging" not in document["blocks"]
    )
    with pytest.raises(RunError, match="the baseline could not be measured: it broke"):
        finished(tmp_path / "2", Planted(plain_ms, lose=("baseline",)))


def test_too_few_rounds_are_said(tmp_path):
    document = finished(tmp_path, Planted(plain_ms), rounds=2, num_left_out=0)
    found = document["blocks"]["load-0.5"]["figures"][TTFT]
    assert found["steps"] == {} and found["control"] is None
    assert found["refused"]["paged"].startswith("2 pairs are too few to judge by")


def test_generality_has_a_seed_a_round():
    timetable = Timetable(4, 10, "generality", lambda *_: None)
    assert [timetable.seed_of(i) for i in range(4)] == [10, 11, 12, 13]
    assert findings.question_sentence("generality", 4, 10).startswith(
        "generality: 4 traces (seeds 10 to 13)"
    )


# -------- interrupted and resumed


def test_a_study_that_stops_loses_the_run_in_flight_and_no_more(tmp_path):
    whole = Planted(plain_ms)
    expected = finished(tmp_path / "whole", whole)
    folder, logs = tmp_path / "parts", []
    for stop in (5, 100, 150, None):
        runner = Planted(plain_ms, stop_after=stop)
        climb, _, told = study(folder, runner, resume=bool(logs))
        if stop is None:
            list(climb.run())
        else:
            with pytest.raises(KeyboardInterrupt):
                list(climb.run())
        logs += runner.log
    assert logs == whole.log  # none twice, none missing, in the same order
    assert climb.document == expected


def test_what_there_is_of_an_interrupted_block_is_in_the_document(tmp_path):
    climb, _, _ = study(tmp_path, Planted(plain_ms, stop_after=7 * 8 + 7 * 5 + 3))
    with pytest.raises(KeyboardInterrupt):
        list(climb.run())
    block = climb.document["blocks"]["load-0.5"]
    assert block["arms"]["aging"]["num_runs"] in (5, 6)
    assert block["figures"][TTFT]["steps"]["paged"]["verdict"] == "faster"


def test_wherever_a_study_is_interrupted_there_is_a_page_of_it(tmp_path):
    runner = Planted(plain_ms)
    whole = finished(tmp_path / "whole", runner, rounds=4)
    rows = {"ladder": [], "left_out": {}}
    titles = [title for title, _ in markdown.sections({**whole, **rows})]
    starts = [0]  # of blocks, counted in runs
    for _, group in itertools.groupby(runner.log, lambda run: run[0].rsplit(" ", 1)[0]):
        starts.append(starts[-1] + len(list(group)))
    assert len(starts) == 1 + len(whole["blocks"])
    for i, start in enumerate(starts[:-1]):
        stopped = Planted(plain_ms, stop_after=start + 1)
        climb, _, _ = study(tmp_path / str(i), stopped, rounds=4)
        with pytest.raises(KeyboardInterrupt):
            list(climb.run())
        assert len(climb.document["blocks"]) == i + 1
        made = [title for title, parts in markdown.sections({**climb.document, **rows}) if parts]
        assert made == titles[: len(made)]


def test_a_folder_holds_the_runs_of_one_study(tmp_path):
    Store(tmp_path, {"rounds": 3, "seed": 0}, resume=False)
    with pytest.raises(UserError, match="holds runs already: give --resume, or another --out"):
        Store(tmp_path, {"rounds": 3, "seed": 0}, resume=False)
    with pytest.raises(UserError, match="are of another study, which differs in rounds: give"):
        Store(tmp_path, {"rounds": 4, "seed": 0}, resume=True)
    Store(tmp_path, {"rounds": 3, "seed": 0}, resume=True)
    Store(tmp_path / "2", {"arguments": {"seed": 0, "num_requests": 3}}, resume=False)
    with pytest.raises(UserError, match="differs in --num-requests, --seed: give the same"):
        Store(tmp_path / "2", {"arguments": {"seed": 1, "num_requests": 4}}, resume=True)


# -------- the rest


def test_the_ends_alone(tmp_path):
    runner = Planted(plain_ms)
    document = finished(tmp_path, runner, ends_only=True)
    assert {arm for _, arm in runner.log} == {"baseline", "baseline again", "paged_int8"}
    assert said(document, "load-0.5") == {"whole ladder": "faster"}


def test_lossy_rungs_are_checked_beside_the_one_below():
    whole = ladder_of(*SOME)

    def check(below, arm):
        if below.name == "aging":
            return {"verdict": "pass", "pair": (below.name, arm.name)}
        raise RunError("no text")

    def is_lossy(arm):
        return arm.choices["kv"] == "paged_int8"

    found = checked(whole, is_lossy, check)
    assert found == {"paged_int8": {"verdict": "pass", "pair": ("aging", "paged_int8")}}
    found = checked(ladder_of("paged", "paged_int8"), is_lossy, check)
    assert found == {"paged_int8": {"verdict": "not shown", "why": "no text"}}


def test_lists_of_markdown_stand_together():
    assert "\n".join(markdown._apart(["a", "- b", "- c", "d"])) == "a\n\n- b\n- c\n\nd\n"


def test_every_field_of_a_run_can_be_an_arm():
    for name in set(RunConfig.model_fields) - {"settings"}:
        assert rungs.assignments(f"{name}=1") == {name: 1}
