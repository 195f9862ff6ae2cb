"""The numbers of `evals.quality` and the verdicts on them, over comparisons made by hand."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest

from core.errors import UserError
from evals.quality import statistics, verdicts
from evals.quality.lockstep import Compared
from evals.quality.verdicts import Finding, judge, limits_of, overall
from plugins.kv.paged import Paged
from plugins.kv.paged_int8 import PagedInt8

# ---------------------------------------- statistics


def documents(*kls, same=1.0, delta=0.0, seed=0):
    """Documents with these divergences, [n] each, and a share of equal tokens."""
    rng = np.random.default_rng(seed)
    found = []
    for kl in kls:
        n = len(kl)
        nats = rng.uniform(1, 5, n)
        equal = rng.permutation(np.arange(n) < round(same * n))
        found.append(Compared(np.asarray(kl, float), equal, nats, nats + delta, np.ones(n, bool)))
    return found


def numbers(found, tail_kl=1e-2):
    return statistics.statistics(found, tail_kl, 0)


@pytest.mark.parametrize(
    ("longest", "buckets"),
    [
        (1, [(0, 63)]),
        (64, [(0, 63)]),
        (65, [(0, 63), (64, 255)]),
        (5000, [(0, 63), (64, 255), (256, 1023), (1024, 4095), (4096, 16383)]),
    ],
)
def test_buckets_are_powers_of_four(longest, buckets):
    assert statistics.bucket_edges(longest) == buckets


def test_numbers_of_a_known_comparison():
    found = documents(np.full(100, 1e-3), np.full(300, 3e-3), same=0.9, delta=0.1)
    got = numbers(found, tail_kl=2e-3)
    assert got["num_documents"] == 2 and got["num_positions"] == 400
    assert got["mean_kl"] == pytest.approx(2.5e-3) and got["median_kl"] == pytest.approx(3e-3)
    assert got["tail_share"] == 0.75 and got["max_kl"] == 3e-3
    assert got["mean_kl_interval"] == pytest.approx((1e-3, 3e-3))
    assert got["top1"] == 0.9 and got["top1_wilson"] == pytest.approx((0.8667, 0.9257), abs=1e-4)
    assert got["delta_nats"] == pytest.approx(0.1)
    assert got["delta_nats_interval"] == pytest.approx((0.1, 0.1))
    assert got["perplexity"] / got["base_perplexity"] == pytest.approx(np.exp(0.1))
    p = np.exp(-np.concatenate([one.base_nats for one in found]))
    off = p * (1 - np.exp(-0.1))
    assert got["delta_p"]["rms"] == pytest.approx(np.sqrt((off**2).mean()))
    assert got["delta_p"]["mean"] == pytest.approx(-off.mean())
    assert got["kl_percentiles"]["50"] == got["median_kl"]
    rows = [(row["first"], row["num_documents"], row["num_positions"]) for row in got["buckets"]]
    assert rows == [(0, 2, 128), (64, 2, 228), (256, 1, 44)]
    assert got["buckets"][2]["mean_kl"] == pytest.approx(3e-3)


def test_intervals_draw_documents_not_positions():
    """Ten documents that differ, constant inside: 1,000 positions know no more than ten do."""
    levels = np.random.default_rng(3).exponential(1e-3, 10)
    low, high = statistics.mean_interval([np.full(100, x) for x in levels], 0)
    error = levels.std(ddof=0) / 10**0.5
    assert low == pytest.approx(levels.mean() - 1.96 * error, abs=0.3 * error)
    assert high == pytest.approx(levels.mean() + 1.96 * error, abs=0.3 * error)
    assert (low, high) == statistics.mean_interval([np.full(100, x) for x in levels], 0)
    shares = [np.arange(100) < x for x in (0, 0, 0, 0, 0, 100, 100, 100, 100, 100)]
    low, high = statistics.share_interval(shares, 0)
    assert low < 0.25 and high > 0.75  # Wilson's alone is 0.47 to 0.53


def test_drift_reads_the_same_documents_at_both_places():
    kl = np.r_[np.zeros(256), np.full(768, 1e-4), np.full(100, 3e-4)]
    short = np.full(1024, 9.0)
    measured, (low, high) = statistics.drift(documents(kl, kl, short), (256, 1023), (1024, 4095), 0)
    assert measured == pytest.approx(3) and low == pytest.approx(3) and high == pytest.approx(3)
    nothing = documents(np.zeros(1100))
    assert statistics.drift(nothing, (256, 1023), (1024, 4095), 0) == (0, (0, 0))


# ---------------------------------------- verdicts


def findings(found, offer=PagedInt8):
    limits = limits_of(offer, "float32")
    rows = judge(found, numbers(found, limits.values["tail_kl"]), limits, 0)
    return {row.metric: row for row in rows}


def long(level, num=8, late=1.0):
    """Documents whose divergence is `late` times as large behind position 1,023."""
    return [np.r_[np.full(1024, level), np.full(100, level * late)] for _ in range(num)]


@pytest.mark.parametrize(
    ("change", "metric"),
    [
        ({"level": 2e-3}, "mean_kl"),
        ({"level": 2e-2}, "tail_share"),
        ({"same": 0.95}, "top1"),
        ({"delta": 0.01}, "delta_nats"),
        ({"late": 2.5}, "drift"),
    ],
)
def test_each_limit_fails_by_its_name(change, metric):
    def made(level=2e-4, late=1.0, **rest):
        return findings(documents(*long(level, late=late), **rest))

    assert {row.verdict for row in made().values()} == {"pass"}
    got = made(**change)
    assert got[metric].verdict == "fail" and overall(list(got.values())) == "fail"
    failing = {name for name, row in got.items() if row.verdict == "fail"}
    assert failing <= {metric, "mean_kl"}


def test_what_straddles_is_not_shown():
    half = [np.full(1124, level) for level in (2e-4, 1.8e-3) * 4]
    got = findings(documents(*half))
    assert got["mean_kl"].verdict == "not shown" and "straddles" in got["mean_kl"].why
    assert overall(list(got.values())) == "not shown"
    got = findings(documents(*long(1e-5), same=0.981))
    assert got["top1"].verdict == "not shown" and got["top1"].measured > 0.98


def test_too_little_text_shows_nothing():
    few = findings(documents(*long(1.0, num=7)))
    assert few["mean_kl"].verdict == "not shown" and "7 documents of the 8" in few["mean_kl"].why
    brief = findings(documents(*[np.zeros(255)] * 8))
    assert brief["top1"].verdict == "not shown" and "2,040 positions" in brief["top1"].why
    medium = findings(documents(*[np.zeros(1000)] * 8))
    assert medium["top1"].verdict == "pass" and medium["drift"].verdict == "not shown"
    assert "longer documents" in medium["drift"].why
    one_long = findings(documents(*[np.zeros(1000)] * 8, np.zeros(2000)))
    assert one_long["drift"].verdict == "not shown"


def test_drift_is_read_from_the_last_bucket_with_text_enough():
    deep = [
        np.r_[one, np.full(3000 + extra, 1e-4)]
        for one, extra in zip(long(1e-4), range(8), strict=True)
    ]
    got = findings(documents(*deep))["drift"]
    assert got.verdict == "pass" and got.why.startswith("positions 1,024-4,095")


def test_lossless_offers_are_held_to_nearly_nothing():
    for dtype, kind in {"float32": "float32", "bfloat16": "half", "float16": "half"}.items():
        limits = limits_of(Paged, dtype)
        assert limits.source == f"lossless.{kind}" and "drift" not in limits.values
        assert limits.values["mean_kl"] < limits_of(PagedInt8, dtype).values["mean_kl"]
    got = findings(documents(*long(2e-6)), Paged)
    assert got["mean_kl"].verdict == "fail" and "drift" not in got


def test_a_lossy_offer_may_name_limits_of_its_own():
    class Own(PagedInt8):
        quality = {"mean_kl": 0.5, "tail_share": 1.0}

    class Lossless(Paged):
        quality = {"mean_kl": 0.5}

    limits = limits_of(Own, "float32")
    assert limits.values["mean_kl"] == 0.5 and "its own mean_kl, tail_share" in limits.source
    assert limits.values["top1"] == limits_of(PagedInt8, "float32").values["top1"]
    assert limits_of(Lossless, "float32").values["mean_kl"] == 1e-6


def test_a_limit_of_no_metric_is_refused():
    class Misspelt(PagedInt8):
        quality = {"kl": 1.0}

    with pytest.raises(UserError, match="'kl' .* no metric: choose from mean_kl, tail_kl"):
        limits_of(Misspelt, "float32")


def test_every_limit_has_a_reason():
    text = verdicts._FILE.read_text()
    lines = text.splitlines()
    for table in (tomllib.loads(text)["lossy"], tomllib.loads(text)["evidence"]):
        for name in table:
            i = next(i for i, line in enumerate(lines) if line.startswith(f"{name} ="))
            near = (lines[i], lines[i - 1], lines[i - 2])
            assert any("#" in line for line in near), name


@pytest.mark.parametrize(
    ("said", "whole", "code"),
    [
        (["pass", "pass"], "pass", 0),
        (["pass", "not shown"], "not shown", 3),
        (["fail", "not shown", "pass"], "fail", 1),
    ],
)
def test_the_whole_is_as_good_as_its_worst(said, whole, code):
    rows = [Finding("m", 0.0, None, "", verdict, "") for verdict in said]
    assert overall(rows) == whole and verdicts.EXIT_CODES[whole] == code
