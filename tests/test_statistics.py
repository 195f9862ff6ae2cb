"""The statistics of evals/speed: thousands of simulated studies with known effects, other people's
implementations of the same tests, latencies counted by hand."""

from __future__ import annotations

import math
import sys
from functools import cache

import numpy as np
import pytest

from core.errors import UserError
from core.metrics import RequestMetrics
from evals.speed.latency import (
    Served,
    e2e_ms,
    goodput,
    itl_ms,
    latencies_ms,
    percentile,
    smallest_sample,
    tpot_ms,
    ttft_ms,
)
from evals.speed.paired import MARGIN, Ratio, Run, estimate, interaction, paired
from evals.speed.replication import (
    DEFAULT_PAIRS,
    NUM_STEPS,
    chance_of_no_change,
    plan,
    power,
    upper_spread,
)
from evals.speed.verdicts import decide, has_moved, holm, interactions, judged

pytest.importorskip("scipy", reason="the statistics need scipy, which the extra `speed` brings")

NUM_STUDIES = 4000
NUM_ARMS = NUM_STEPS + 2  # the base, the steps, the base again
PLANTED = 5  # the step whose effect is planted: one of twelve, the hardest case for Holm
MOST_NOISE = 0.03


def backwards(num_rounds):
    return np.arange(num_rounds) % 2 == 1


def orders(num_rounds):
    return np.where(backwards(num_rounds), -1, 1)


def simulated(rng, num_studies, num_rounds, num_arms, *, noise=(0.01, 0.03), drift=0.05, warm=0.05):
    """Log run times [studies, rounds, arms] of arms that do not differ.

    Each study has its own noise of a run; the machine drifts by up to `drift` in a straight line,
    and cools down by up to `warm` early on; one run in a hundred is slower by 5 to 28 %.
    """
    slots = np.arange(num_rounds * num_arms).reshape(num_rounds, num_arms)
    slots[backwards(num_rounds)] = slots[backwards(num_rounds), ::-1]
    time = slots / slots.size
    shape, each = (num_studies, *slots.shape), (num_studies, 1, 1)
    logs = rng.uniform(*noise, each) * rng.standard_normal(shape)
    logs += drift * rng.uniform(-1, 1, each) * time + warm * rng.random(each) * np.exp(-8 * time)
    return logs + (rng.random(shape) < 0.01) * rng.uniform(0.05, 0.25, shape)


def compared(logs, numerator, denominator):
    """The Ratios of columns of `logs` [studies, rounds, arms]."""
    pairs = logs[:, :, numerator] - logs[:, :, denominator]
    return estimate(np.moveaxis(pairs, 1, -1), orders(logs.shape[1]))


@cache
def ladders(planted=0.0, num_rounds=DEFAULT_PAIRS, noise=(0.01, 0.03), moved=0.0):
    """Steps, each to the one before, and controls of many studies. `planted`: by how much one step
    is slower; `moved`: by how much the control is."""
    rng = np.random.default_rng(2024)
    logs = simulated(rng, NUM_STUDIES, num_rounds, NUM_ARMS, noise=noise)
    logs[:, :, PLANTED : NUM_STEPS + 1] += math.log1p(planted)
    logs[:, :, -1] += math.log1p(moved)
    steps = compared(logs, slice(1, NUM_STEPS + 1), slice(0, NUM_STEPS))
    return steps, compared(logs, -1, 0)


def part(ratio, index):
    return Ratio(*(field[index] for field in vars(ratio).values()))


def planted_step(said):
    return said[:, PLANTED - 1]


def shares(said):
    return {word: float((said == word).mean()) for word in np.unique(said).tolist()}


def is_alarm(said):
    return (said == "faster") | (said == "slower")


def covered(ratio, truth):
    return float((np.abs(ratio.log_mean - truth) < ratio.half).mean())


# ------------------------------------------------------------------ what a study may be believed in


@pytest.mark.parametrize("noise", [(0.01, 0.03), (MOST_NOISE, MOST_NOISE)], ids=str)
@pytest.mark.parametrize("num_rounds", [4, 6, DEFAULT_PAIRS, 20])
def test_false_alarms_of_a_whole_ladder_are_at_most_one_in_twenty(num_rounds, noise):
    said = decide(*ladders(num_rounds=num_rounds, noise=noise))
    assert is_alarm(said).any(1).mean() <= 0.05


def test_without_holm_every_third_ladder_would_have_a_false_alarm():
    steps, _ = ladders(noise=(MOST_NOISE, MOST_NOISE))
    assert (steps.p_equal < 0.05).any(1).mean() > 1 / 3


def test_steps_beside_a_changed_one_raise_no_more_alarms():
    said = np.delete(decide(*ladders(0.1)), PLANTED - 1, 1)
    assert is_alarm(said).any(1).mean() <= 0.05


@pytest.mark.parametrize(
    ("planted", "noise", "wanted"),
    [
        (0.10, (0.01, 0.03), 0.94),
        (0.10, (MOST_NOISE, MOST_NOISE), 0.90),
        (0.30, (0.01, 0.03), 0.98),
        (0.30, (MOST_NOISE, MOST_NOISE), 0.98),
    ],
)
def test_a_step_that_is_slower_is_called_so(planted, noise, wanted):
    found = shares(planted_step(decide(*ladders(planted, noise=noise))))
    assert found["slower"] >= wanted
    assert not found.keys() & {"faster", "no change"}


def test_the_default_number_of_pairs_is_the_least_even_one_that_has_the_power():
    found = shares(planted_step(decide(*ladders(0.1, DEFAULT_PAIRS - 2, (MOST_NOISE, MOST_NOISE)))))
    assert found["slower"] < 0.90


@pytest.mark.parametrize("planted", [0.0, 0.03, 0.1, 0.3])
@pytest.mark.parametrize("num_rounds", [4, 5, DEFAULT_PAIRS])
def test_the_interval_covers_the_truth_in_95_of_100_studies(planted, num_rounds):
    steps, control = ladders(planted, num_rounds)
    ratio = part(steps, (slice(None), PLANTED - 1))
    assert 0.93 <= covered(ratio, math.log1p(planted)) <= 0.97
    assert 0.93 <= covered(control, 0.0) <= 0.97


@pytest.mark.parametrize(
    ("noise", "at_least"), [(0.005, 0.8), (0.01, 0.8), (0.02, 0.5), (0.03, 0.1)]
)
def test_no_change_is_said_of_nothing_where_the_noise_lets_it(noise, at_least):
    found = shares(decide(*ladders(noise=(noise, noise))))
    assert at_least <= found["no change"] <= at_least + 0.1
    assert found.get("faster", 0) + found.get("slower", 0) < 0.01  # of steps; else inconclusive


@pytest.mark.parametrize("noise", [0.005, 0.01, 0.02, 0.03])
def test_a_step_of_3_percent_is_rarely_called_no_change(noise):
    found = shares(planted_step(decide(*ladders(MARGIN, noise=(noise, noise)))))
    assert found["no change"] <= 0.035
    assert found.get("faster", 0) < 0.001


def test_drift_within_a_round_neither_shifts_nor_widens():
    """The control stands at the other end of a round than the base, where drift weighs most."""

    def control(drift, order):
        rng = np.random.default_rng(3)
        logs = simulated(rng, NUM_STUDIES, DEFAULT_PAIRS, NUM_ARMS, drift=drift, warm=0)
        return estimate(logs[:, :, -1] - logs[:, :, 0], order)

    order = orders(DEFAULT_PAIRS)
    still, drifting = control(0.0, order), control(0.3, order)
    np.testing.assert_allclose(drifting.log_mean, still.log_mean, atol=1e-12)
    np.testing.assert_allclose(drifting.half, still.half, rtol=1e-9)
    without = control(0.3, 0 * order)
    assert covered(without, 0.0) > 0.97


# ------------------------------------------------------------------------------------- the control


@pytest.mark.parametrize("noise", [0.01, 0.02, 0.03])
def test_a_sound_control_hardly_ever_voids_a_study(noise):
    assert has_moved(ladders(noise=(noise, noise))[1]).mean() <= 0.015


@pytest.mark.parametrize(("moved", "at_least"), [(0.03, 0.4), (0.05, 0.75), (0.1, 0.97)])
def test_a_control_that_moved_voids_what_is_no_larger_than_its_move(moved, at_least):
    for planted in (0.0, 0.03):
        steps, control = ladders(planted, moved=moved)
        is_void = has_moved(control)
        assert is_void.mean() >= at_least
        said = decide(steps, control)[is_void]
        assert is_alarm(said).any(1).mean() <= 0.005
        assert np.isin(said, ["inconclusive", "slower", "faster"]).all()


def test_what_moved_the_control_and_the_steps_alike_is_hardly_ever_called_an_effect():
    """The base was slow in its first runs, so that its second ones and all arms seem faster."""
    rng = np.random.default_rng(7)
    logs = simulated(rng, NUM_STUDIES, DEFAULT_PAIRS, NUM_ARMS)
    logs[:, :, 0] += math.log1p(0.1)
    control = compared(logs, -1, 0)
    steps = compared(logs, slice(1, NUM_STEPS + 1), slice(0, 1))
    said = decide(steps, control)
    assert has_moved(control).mean() > 0.95
    assert is_alarm(said)[has_moved(control)].any(1).mean() <= 0.05


def test_an_effect_far_beyond_a_control_that_moved_is_called_by_its_name():
    steps, control = ladders(0.3, moved=0.03)
    said = decide(steps, control)[has_moved(control)]
    assert (planted_step(said) == "slower").mean() > 0.95
    others = np.delete(said, PLANTED - 1, axis=1)
    assert is_alarm(others).any(1).mean() <= 0.01


def test_a_control_off_by_less_than_the_margin_voids_nothing():
    assert has_moved(ladders(noise=(0.001, 0.002), moved=0.01)[1]).mean() <= 0.01


def test_the_sentences_name_the_numbers():
    rounds = range(10)
    base = [Run(0, i, 100 + i % 3) for i in rounds]
    arms = {
        "graphs": [Run(0, i, 80 + i % 3) for i in rounds],
        "fusion": [Run(0, i, 101 + i % 3) for i in rounds],
        "int8": [Run(0, i, 100 * 1.3 ** (i % 5 - 2)) for i in rounds],
    }
    steps = {name: paired(base, arm, "repeatability") for name, arm in arms.items()}
    found = judged(steps, paired(base, base, "repeatability"))
    assert [f.verdict for f in found] == ["faster", "no change", "inconclusive"]
    assert found[0].sentence.startswith("faster: 0.802x [0.800, 0.803] (n = 10), p = ")
    assert found[1].sentence.endswith("(n = 10), within 3%, though not 1")
    assert found[2].sentence.endswith("neither apart from 1 nor within 3%; measure more pairs")
    more = judged(steps, paired(base, base, "repeatability"), more_is_better=True)
    assert more[0].verdict == "slower"

    shifted = [Run(*run[:2], run.value * 1.1) for run in base]
    void = judged(steps, paired(base, shifted, "repeatability"))
    said = (
        "inconclusive: the control moved, 1.100x [1.100, 1.100] (n = 10); find out why and "
        "measure again"
    )
    assert [f.verdict for f in void] == ["faster", "inconclusive", "inconclusive"]
    assert [f.sentence for f in void[1:]] == [said, said]
    assert void[0].sentence.endswith(
        "over 3 steps, and more than the control moved, 1.100x [1.100, 1.100] (n = 10)"
    )


def test_beyond_a_control_that_moved_it_is_said_that_holm_takes_a_step_back():
    moved = estimate([0.05, 0.06, 0.05, 0.06, 0.055, 0.06], orders(6))
    step = estimate([0.3, 0.35, 0.5, 0.2, 0.3, 0.4], orders(6))
    nothing = estimate([0.1, -0.1, -0.1, 0.1, -0.1, 0.1], orders(6))
    first, *others = judged({"a": step} | {str(i): nothing for i in range(100)}, moved)
    assert first.verdict == "inconclusive" and "but not over 101 steps (p = " in first.sentence
    assert all("the control moved" in other.sentence for other in others)


def test_what_holm_takes_back_is_said():
    shifted = estimate([0.05, 0.15, 0.05, 0.15, 0.18, 0.02], orders(6))
    nothing = estimate([0.1, -0.1, -0.1, 0.1, -0.1, 0.1], orders(6))
    alone = judged({"a": shifted}, nothing)
    among = judged({"a": shifted} | {str(i): nothing for i in range(11)}, nothing)
    assert alone[0].verdict == "slower"
    assert among[0].verdict == "inconclusive"
    assert "which excludes 1, but not over 12 steps (p = " in among[0].sentence


# ----------------------------------------------------------------------------- pairs of real runs


def runs(logs, seeds=None):
    """Of one arm, from log values [rounds]."""
    return [Run(seeds[i] if seeds else 7, i, math.exp(v)) for i, v in enumerate(logs)]


def test_runs_are_paired_by_seed_and_round_whatever_their_order():
    logs = simulated(np.random.default_rng(1), 1, 6, 2)[0]
    base, arm = runs(logs[:, 0]), runs(logs[:, 1])
    ratio = paired(base[::-1], arm, "repeatability")
    expected = compared(logs[None], 1, 0)
    assert ratio.ratio == pytest.approx(math.exp((logs[:, 1] - logs[:, 0]).mean()))
    assert float(ratio.half) == pytest.approx(expected.half[0])
    swapped = paired(arm, base, "repeatability")
    assert float(swapped.low) == pytest.approx(1 / float(ratio.high))


def test_repeatability_and_generality_are_two_intervals():
    """Eight workloads, whose effects differ by 20 %, six rounds each with 2 % of noise."""
    rng, num_seeds, num_rounds = np.random.default_rng(5), 8, 6
    effects = 0.1 + 0.2 * rng.standard_normal((NUM_STUDIES, num_seeds, 1))
    logs = effects + 0.02 * 2**0.5 * rng.standard_normal((*effects.shape[:2], num_rounds))
    general = estimate(logs.mean(-1), np.zeros(num_seeds))
    of_one_trace = estimate(logs[:, 0], orders(num_rounds))
    assert 0.93 <= covered(general, 0.1) <= 0.97
    assert 0.93 <= covered(of_one_trace, effects[:, 0, 0]) <= 0.97
    assert covered(of_one_trace, 0.1) < 0.25  # one trace says next to nothing of the others

    flat = logs[0].ravel()
    seeds = np.repeat(np.arange(num_seeds), num_rounds).tolist()
    same = paired(runs(0 * flat, seeds), runs(flat, seeds), "generality")
    assert (float(same.low), float(same.high)) == pytest.approx(
        (float(general.low[0]), float(general.high[0]))
    )
    assert int(same.num_units) == num_seeds
    with pytest.raises(UserError, match="these runs have 8 seeds: ask for generality"):
        paired(runs(0 * flat, seeds), runs(flat, seeds), "repeatability")


@pytest.mark.parametrize(
    ("base", "arm", "says"),
    [
        (runs([0] * 6), runs([0] * 5), "1 runs of arm or its base have no partner"),
        (runs([0] * 6), runs([0] * 6, range(6)), "have no partner"),
        (runs([0] * 3), runs([0] * 3), "3 pairs are too few to judge by: measure at least 4"),
        (runs([0] * 6), [*runs([0] * 5), Run(7, 5, 0.0)], "with seed 7 in round 5 measured 0.0"),
        (runs([0] * 6), [*runs([0] * 6), Run(7, 5, 1.0)], "arm has two runs of seed 7 in round 5"),
        ([Run(7, 2 * i, 1) for i in range(4)],) * 2 + ("run every other round backwards",),
    ],
)
def test_runs_that_make_no_pairs_are_refused(base, arm, says):
    with pytest.raises(UserError, match=says):
        paired(base, arm, "repeatability")


def test_one_seed_is_no_workload_in_general():
    with pytest.raises(UserError, match="1 seeds are too few"):
        paired(runs([0] * 6), runs([0] * 6), "generality")


# ------------------------------------------------------------------------------------ interactions


@pytest.mark.parametrize("together", [0.0, 0.1])
def test_a_step_that_does_more_in_company_is_flagged(together):
    """Twelve steps, each with base, alone, without, full; the fourth is slower only in company."""
    rng = np.random.default_rng(11)
    logs = simulated(rng, NUM_STUDIES, DEFAULT_PAIRS, 4 * NUM_STEPS, noise=(0.01, 0.02))
    four = logs.reshape(NUM_STUDIES, DEFAULT_PAIRS, NUM_STEPS, 4) + [0, 0.2, -0.1, 0.1]
    four[:, :, 3, 3] += together
    contrast = np.moveaxis(four @ np.array([1, -1, -1, 1]), 1, -1)
    is_flagged = is_alarm(decide(estimate(contrast, orders(DEFAULT_PAIRS)), ladders()[1]))
    assert np.delete(is_flagged, 3, 1).any(1).mean() <= 0.05
    assert (is_flagged[:, 3].mean() >= 0.9) == (together > 0)


def test_interactions_are_told_from_effects_that_add_up():
    rng = np.random.default_rng(2)

    def arm(effect):
        return runs(effect + 0.002 * rng.standard_normal(8))

    base, full = arm(0), arm(-0.6)
    steps = {
        "graphs": interaction(base, arm(-0.4), arm(-0.2), full, "repeatability"),
        "fusion": interaction(base, arm(-0.1), arm(-0.3), full, "repeatability"),
    }
    found = interactions(steps, paired(base, arm(0), "repeatability"))
    assert [f.verdict for f in found] == ["adds up", "interaction"]
    assert found[1].ratio == pytest.approx(math.exp(-0.2), rel=0.01)
    assert found[1].sentence.startswith("interaction: 0.8")


# ------------------------------------------------------------------------------------- replication


@pytest.mark.parametrize("num_pairs", [6, 10, 16])
def test_the_power_is_that_of_simulated_studies(num_pairs):
    rng, spread = np.random.default_rng(4), 0.04
    logs = spread * rng.standard_normal((20_000, num_pairs)) + math.log(1.08)
    called = estimate(logs, orders(num_pairs)).p_equal < 0.05 / NUM_STEPS
    assert called.mean() == pytest.approx(float(power(num_pairs, spread, 1.08)), abs=0.015)
    inside = estimate(logs - math.log(1.08), orders(num_pairs)).is_inside(0.05)
    expected = float(chance_of_no_change(num_pairs, spread, 0.05))
    assert inside.mean() == pytest.approx(expected, abs=0.015)


def test_a_plan_keeps_its_promise_whatever_the_pilot_found():
    """Pilots of ten pairs; studies of the planned size see 10 % in at least 90 of 100."""
    rng, truth = np.random.default_rng(6), 0.05
    pilots = estimate(truth * rng.standard_normal((200, 10)), orders(10))
    single = [part(pilots, i) for i in range(200)]
    assert np.mean([upper_spread(p) > truth for p in single]) == pytest.approx(0.8, abs=0.08)
    sizes = np.array([plan(p).num_pairs for p in single])
    assert power(sizes, truth, 1.10).mean() >= 0.9
    assert set(sizes % 2) == {0}


def test_a_plan_is_a_sentence_with_numbers():
    control = estimate([0.02, -0.02, 0.02, -0.02, -0.02, 0.02, -0.02, 0.02], orders(8))
    found = plan(control)
    assert found.num_pairs >= 8
    assert found.num_pairs_no_change > found.num_pairs
    assert found.sentence == (
        f"pairs of the same arm differ by 2.3% (at most 3.3%): {found.num_pairs} pairs a step see "
        "a change of 10.0% with a chance of 90% among 12 steps; to say that a step changed "
        f"nothing, within 3%, takes at least {found.num_pairs_no_change}"
    )
    assert plan(estimate(np.zeros(6), orders(6))).num_pairs == 4
    with pytest.raises(UserError, match="more than 200 of them were needed to see 0.5%"):
        plan(control, effect=1.005)


# ------------------------------------------------------------- the same tests, by other people


def test_holm_equals_statsmodels():
    multitest = pytest.importorskip(
        "statsmodels.stats.multitest", reason="Holm is compared with statsmodels"
    )
    p = np.random.default_rng(0).uniform(0, 1, (50, NUM_STEPS)) ** 3
    expected = [multitest.multipletests(row, method="holm")[1] for row in p]
    np.testing.assert_allclose(holm(p), expected, rtol=1e-12)


def test_interval_and_equivalence_equal_statsmodels():
    api = pytest.importorskip("statsmodels.api", reason="least squares against statsmodels")
    from statsmodels.stats.weightstats import DescrStatsW

    logs = np.random.default_rng(0).normal(0.01, 0.02, 9)
    order = orders(9)  # five forwards, four backwards
    fit = api.OLS(logs, api.add_constant(order)).fit()
    found = estimate(logs, order)
    interval = (math.log(found.low), math.log(found.high))
    np.testing.assert_allclose(interval, fit.conf_int()[0], rtol=1e-9)
    assert float(found.p_equal) == pytest.approx(fit.pvalues[0])

    plain = estimate(logs, np.zeros(9))
    expected = DescrStatsW(logs).ttost_mean(-math.log1p(MARGIN), math.log1p(MARGIN))[0]
    assert float(plain.p_outside()) == pytest.approx(expected)


def test_the_equivalence_test_agrees_with_the_interval_always():
    steps, _ = ladders(0.03)
    np.testing.assert_array_equal(steps.p_outside() < 0.025, steps.is_inside())
    np.testing.assert_array_equal(steps.p_equal < 0.05, (steps.low > 1) | (steps.high < 1))


def test_power_equals_statsmodels():
    api = pytest.importorskip("statsmodels.stats.power", reason="power against statsmodels")
    for num, spread, steps in ((6, 0.02, 1), (10, 0.05, 12), (44, 0.249, 1)):
        expected = api.TTestPower().power(math.log(1.1) / spread, num, 0.05 / steps, df=num - 2)
        assert float(power(num, spread, 1.1, steps)) == pytest.approx(expected, abs=1e-3)


def test_without_scipy_one_sentence_says_what_brings_it(monkeypatch):
    for name in ("scipy", "scipy.special"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"pip install 'outweigh\[speed\]' brings scipy"):
        _ = paired(runs([0] * 6), runs([0] * 6), "repeatability").low


# ----------------------------------------------------------------------- latencies and percentiles

# Due at 1 s: tokens at 1.25, 1.5, 1.5 and 2.25 s. Due at 2 s: one token at 2.125 s. Due at 3 s:
# failed. All are exact in binary.
EVENTS = [Served(1.0, (1.25, 1.5, 1.5, 2.25)), Served(2.0, (2.125,)), Served(3.0, ())]


def test_latencies_of_events_counted_by_hand():
    first, single, failed = EVENTS
    assert ttft_ms(first) == 250
    assert itl_ms(first) == [250, 0, 750]
    assert tpot_ms(first) == pytest.approx(1000 / 3)
    assert e2e_ms(first) == 1250
    assert (ttft_ms(single), itl_ms(single), tpot_ms(single), e2e_ms(single)) == (
        125,
        [],
        None,
        125,
    )
    assert (ttft_ms(failed), itl_ms(failed), tpot_ms(failed), e2e_ms(failed)) == (
        None,
        [],
        None,
        None,
    )
    assert latencies_ms(EVENTS) == {
        "ttft": [250, 125],
        "tpot": [pytest.approx(1000 / 3)],
        "e2el": [1250, 125],
        "itl": [250, 0, 750],
    }


def test_the_definitions_are_those_of_the_engine():
    first = EVENTS[0]
    metrics = RequestMetrics(8, 0, 4, 0, 1.0, 1.0, 1.1, 1.1, 2.25, first.token_times_s)
    assert metrics.ttft_ms == ttft_ms(first)
    assert list(metrics.itl_ms) == itl_ms(first)
    assert metrics.tpot_ms == pytest.approx(tpot_ms(first))
    assert metrics.e2e_ms == e2e_ms(first)


@pytest.mark.parametrize(
    ("limits", "num_good"),
    [
        ({}, 2),  # the failed one keeps none, not even none
        ({"ttft": 250}, 2),
        ({"ttft": 249}, 1),
        ({"ttft": 250, "tpot": 300}, 1),  # one token keeps any TPOT
        ({"e2el": 1250, "tpot": 334}, 2),
        ({"e2el": 100}, 0),
    ],
)
def test_goodput_counts_requests_that_keep_every_limit(limits, num_good):
    assert goodput(EVENTS, limits, duration_s=4.0) == num_good / 4


def test_goodput_refuses_limits_that_it_does_not_know():
    with pytest.raises(UserError, match="no limit itl: give ttft, tpot, e2el"):
        goodput(EVENTS, {"itl": 50}, 1.0)


def second_largest_below(num, share):
    """The chance that at most one of `num` lies beyond the percentile `share`."""
    return share**num + num * (1 - share) * share ** (num - 1)


@pytest.mark.parametrize(
    ("percent", "num", "loadgen"), [(50, 14, 11), (90, 70, 64), (99, 700, 662), (99.9, 7000, 6636)]
)
def test_a_percentile_needs_seven_observations_beyond_it(percent, num, loadgen):
    """The least that MLPerf's early stopping takes is where at most one lies beyond in one of a
    hundred runs; ours is that, rounded up to whole observations."""
    assert smallest_sample(percent) == smallest_sample(round(100 - percent, 1)) == num
    share = percent / 100
    least = next(n for n in range(2, num + 1) if second_largest_below(n, share) <= 0.01)
    assert least == loadgen
    assert smallest_sample(percent, beyond=1) == round(100 / (100 - percent))


def test_a_percentile_of_too_few_is_refused():
    with pytest.raises(UserError, match="699 observations do not carry p99, which takes 700"):
        percentile(range(699), 99)


@pytest.mark.parametrize(("percent", "num"), [(50, 14), (90, 70), (99, 700), (99, 5000)])
def test_the_interval_of_a_percentile_has_its_confidence(percent, num):
    """With the values 1 .. num the ends are ranks, whose coverage is a sum of binomial terms."""
    from scipy.stats import binom

    found = percentile(np.arange(1.0, num + 1), percent)
    coverage = np.diff(binom.cdf([found.low - 1, found.high - 1], num, percent / 100))[0]
    assert 0.95 <= coverage <= 0.99
    assert found.low < found.value < found.high
    assert found.value == np.percentile(np.arange(1.0, num + 1), percent)
