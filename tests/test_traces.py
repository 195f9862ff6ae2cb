"""evals/speed/traces.py and demand.py: what a workload asks for, recorded or drawn."""

from __future__ import annotations

import argparse
import json
import math
from datetime import datetime, timedelta

import numpy as np
import pytest

from core.errors import UserError
from evals.speed.bench_arguments import parse
from evals.speed.demand import Lengths, demand_of, due_times, lengths
from evals.speed.traces import (
    Columns,
    Item,
    Source,
    Trace,
    described,
    quantum_s,
    read_trace,
    shared_blocks,
    source_of,
)

AZURE_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def azure(rows):
    """A file as Azure has them: seven fractional digits, no newline at the end."""
    begin = datetime(2023, 11, 16, 18, 15, 46, 680590)
    lines = [f"{begin + timedelta(seconds=s):%Y-%m-%d %H:%M:%S.%f}0,{p},{o}" for s, p, o in rows]
    return AZURE_HEAD + "\n".join(lines)


def mooncake(rows):
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows)


@pytest.fixture
def write(tmp_path):
    def write(text, name="trace.csv"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def read(path, longest=16_384, **more):
    return read_trace(path, max_model_len=longest, **more)


# -------- formats


def test_azure_stamps_are_exact_and_the_first_is_at_0(write):
    trace = read(write(azure([(0.000001, 374, 44), (4.314579, 396, 109), (4.4, 20, 1)])))
    assert [item.at for item in trace.arrivals] == pytest.approx([0, 4.314578, 4.399999], abs=1e-9)
    assert [item[1:3] for item in trace.arrivals] == [(374, 44), (396, 109), (20, 1)]
    assert (trace.jitter_s, trace.num_dropped) == (None, 0)


def test_mooncake_stamps_are_milliseconds_and_equal_hashes_are_equal_blocks(write):
    rows = [(0, 1000, 5, [46, 7]), (2000, 512, 3, [46]), (2500, 600, 9, [9, 46])]
    trace = read(write(mooncake(rows), "trace.jsonl"))
    assert [item.at for item in trace.arrivals] == [0, 2.0, 2.5]
    assert [item.blocks for item in trace.arrivals] == [(0, 1), (0,), (2, 0)]


OTHERS = {
    "ServeGen": (
        "arrival_s,client_id,input_tokens,output_tokens\n1.5,a,30,4\n1.0,b,20,2\n",
        Columns("arrival_s", "input_tokens", "output_tokens", None, "s"),
    ),
    "BurstGPT": (
        "Timestamp,Model,Request tokens,Response tokens\n7.0,x,20,2\n7.5,x,30,4\n",
        Columns("Timestamp", "Request tokens", "Response tokens", None, "s"),
    ),
    "JSON lines": (
        '{"t": 3000000, "in": 20, "out": 2}\n\n{"t": 3500000, "in": 30, "out": 4}\n',
        Columns("t", "in", "out", None, "us"),
    ),
    "a JSON array": (
        '[{"t": "2026-01-01T00:00:00+01:00", "in": 20, "out": 2},'
        ' {"t": "2026-01-01T00:00:00.5+01:00", "in": 30, "out": 4}]',
        Columns("t", "in", "out", None, "date"),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_trace_is_read_by_its_columns(write, name):
    text, columns = OTHERS[name]
    trace = read(write(text), source=Source(columns))
    assert trace.arrivals == [Item(0.0, 20, 2), Item(0.5, 30, 4)]


def test_hashes_are_of_blocks_of_the_given_size(write):
    text = 'time,in,out,ids\n0,20,2,"[5, \'x\']"\n1,33,2,"[5, 6, 7]"\n'.replace("'", '""')
    columns = Columns("time", "in", "out", "ids", "s")
    trace = read(write(text), source=Source(columns, hash_block=16))
    assert [item.blocks for item in trace.arrivals] == [(0, 1), (0, 2, 3)]
    with pytest.raises(UserError, match="row 1 of .* has 2 hashes for 20 tokens, not one for"):
        read(write(text), source=Source(columns, hash_block=20))


def test_a_size_of_blocks_without_hashes_would_change_nothing(write):
    path = write(azure([(0, 10, 1), (1, 20, 2)]))
    with pytest.raises(UserError, match="--hash-block-size would change nothing: no hashes"):
        read(path, source=Source(hash_block=16))


def test_what_no_engine_can_be_given_is_dropped_and_counted_by_reason(write):
    rows = [(0, 100, 5), (1, 900, 101), (2, 0, 5), (3, 50, 0), (4, 900, 100)]
    trace = read(write(azure(rows)), longest=1000)
    assert [(item.at, item.num_prompt) for item in trace.arrivals] == [(0, 100), (4, 900)]
    assert trace.dropped == {
        "longer than 1,000 tokens": 1,
        "without a token of prompt or output": 2,
    }
    assert len(read(write(azure(rows)), num_requests=1 + 4).arrivals) == 3
    assert read(write(azure(rows)), num_requests=2).num_dropped == 0


@pytest.mark.parametrize(
    ("text", "columns", "said"),
    [
        ("a,b\n1,2\n", None, "has the columns a, b, neither an Azure trace's"),
        ("", None, "has no rows, neither an Azure trace's"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3, "turn": 1}', None, "give --col"),
        ("{1}\n", None, "line 1 of .* is no JSON object: .*; mend or remove it"),
        ('{"a": 1}\n\n[1]\n', None, "line 3 of .* is no JSON object: TypeError: it is "),
        ("[1,", None, "is neither CSV nor JSON lines"),
        ("[1, 2]", None, "has lines that are no objects"),
        ("a,b\n1,2\n", Columns("a", "b", "c", None, "s"), "has no column c, but a, b"),
        ('{"a": 1, "b": 2, "c": 3, "d": [[1]]}', Columns("a", "b", "c", "d", "s"), "row 1 of"),
        ("a,b,c\n1,2,x\n", Columns("a", "b", "c", None, "s"), "row 1 of .* is no request"),
        ("a,b,c\n1,2,1\n2,2\n", Columns("a", "b", "c", None, "s"), "row 2 of .* is no request"),
        ("a,b,c\nnan,2,1\n", Columns("a", "b", "c", None, "s"), "nan is no time"),
        ("a,b,c\n1,inf,1\n", Columns("a", "b", "c", None, "s"), "inf is no number of tokens"),
        ("a,b,c\n1,2.5,1\n", Columns("a", "b", "c", None, "s"), "2.5 is no number of tokens"),
        ("a,b,c\n1,2,1\n", Columns("a", "b", "c", None, "date"), "row 1 of .* is no request"),
        (azure([(0, 10, 1)]), None, "has 1 of 1 requests within 16384 tokens"),
    ],
)
def test_a_file_that_is_no_trace_is_a_sentence(write, text, columns, said):
    with pytest.raises(UserError, match=said):
        read(write(text), source=Source(columns))


def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"none.csv cannot be read \(No such file or directory\)"):
        read(tmp_path / "none.csv")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"cannot be read \(it is no text\)"):
        read(tmp_path / "bytes")


def test_columns_on_the_command_line():
    def source(text):
        return source_of(parse(f"--workload serve --trace x {text}".split()))

    given = "--columns timestamp=t input_length=in output_length=out"
    assert source(f"{given} --time-unit ms") == Source(Columns("t", "in", "out", None, "ms"))
    found = source(f"{given} hash_ids=ids --time-unit s --hash-block-size 16 --jitter off --seed 4")
    assert found == Source(Columns("t", "in", "out", "ids", "s"), 16, 0.0, 4)
    assert source("--jitter auto").jitter_s is None and source("--jitter 0.5").jitter_s == 0.5
    for text, said in {
        given: "--columns needs --time-unit",
        "--time-unit s": "--time-unit is that of --columns",
        "--columns timestamp=t --time-unit s": "--columns lacks input_length=COLUMN",
        f"{given} turn=x --time-unit s": "--columns has 'turn'",
        "--columns timestamp --time-unit s": "--columns has 'timestamp'",
    }.items():
        with pytest.raises(UserError, match=said):
            source(text)


# -------- stamps


def rounded(num=400, step_s=3.0):
    rng = np.random.default_rng(0)
    at = np.sort(rng.random(num)) * 90
    return [(int(t // step_s * step_s * 1000), 10 + i, 1, [0]) for i, t in enumerate(at)]


def test_rounded_stamps_are_spread_within_their_step_in_order(write):
    path = write(mooncake(rounded()), "trace.jsonl")
    spread, plain = read(path), read(path, source=Source(jitter_s=0.0))
    assert (spread.jitter_s, plain.jitter_s) == (3.0, None)
    assert [i.num_prompt for i in spread.arrivals] == [i.num_prompt for i in plain.arrivals]
    first = spread.arrivals[0].at - plain.arrivals[0].at
    moved = [a.at - b.at for a, b in zip(spread.arrivals, plain.arrivals, strict=True)]
    # All are shifted by what the first was, which stands at 0.
    assert first == 0 and -3 < min(moved) and max(moved) < 3 and max(moved) - min(moved) > 2
    assert [i.at for i in spread.arrivals] == sorted({i.at for i in spread.arrivals})
    assert described(plain)["gap_cv"] > 3 > 1.3 > described(spread)["gap_cv"] > 0.7
    assert read(path) == spread != read(path, source=Source(seed=1))


def test_stamps_are_spread_before_anything_is_dropped(write):
    path = write(mooncake(rounded()), "trace.jsonl")
    whole, short = read(path).arrivals, read(path, longest=200).arrivals
    assert [item.at for item in short] == [item.at for item in whole[: len(short)]]


def test_the_first_of_a_trace_come_when_they_do_in_the_whole_of_it(write):
    path = write(mooncake(rounded()), "trace.jsonl")
    assert read(path, num_requests=5).arrivals == read(path).arrivals[:5]


def test_a_width_of_ones_own_does_not_reach_beyond_the_next_stamp(write):
    rows = [(0, 10, 1, [0]), (0, 11, 1, [0]), (1000, 12, 1, [0]), (1000, 13, 1, [0])]
    trace = read(write(mooncake(rows), "x.jsonl"), source=Source(jitter_s=60.0))
    assert [item.num_prompt for item in trace.arrivals] == [10, 11, 12, 13]
    assert trace.arrivals[1].at < trace.arrivals[2].at and trace.arrivals[3].at > 2


def test_only_stamps_that_most_requests_share_are_taken_for_rounded():
    assert quantum_s([0.0, 1.0, 2.5, 2.5]) is None
    assert quantum_s([0.0] * 5) is None
    assert quantum_s([0.0, 0.0, 0.0, 3.0, 3.0, 5.9, 5.9, 9.0, 9.0]) == pytest.approx(3.0)


# -------- what a trace is like


def test_a_trace_in_the_wrong_unit_is_described_all_the_same(write):
    """Of ten billion times ten seconds."""
    path = write("a,b,c\n0,4,1\n1,4,1\n100000000000,4,1\n")
    found = described(read(path, source=Source(Columns("a", "b", "c", None, "s"))))
    assert found["peak_over_mean_10s"] == pytest.approx(2 * (10**10 + 1) / 3)


def test_a_width_for_an_empty_trace_is_a_sentence(write):
    with pytest.raises(UserError, match="has 0 of 0 requests"):
        read(write("a,b,c\n"), source=Source(Columns("a", "b", "c", None, "s"), jitter_s=3.0))


def test_the_figures_of_a_trace_counted_by_hand():
    items = [Item(0, 10, 4, (0, 1)), Item(1, 20, 3, (0, 2)), Item(4, 30, 2, (1, 0)),
             Item(25, 40, 1, (0, 2))]  # fmt: skip
    found = described(Trace("x", items, {"longer": 2}))
    assert found["num_requests"] == 4 and found["num_dropped"] == 2
    assert found["input_tokens p50 p90 p99 max"] == pytest.approx([25, 37, 39.7, 40])
    assert found["request_rate"] == pytest.approx(4 / 25)
    gaps = np.array([1, 3, 21])
    assert found["gap_cv"] == pytest.approx(gaps.std() / gaps.mean())
    assert found["peak_over_mean_10s"] == pytest.approx(3 / (4 / 3))
    assert found["length_correlation"] == pytest.approx(-1)
    # Of the third, block 1 was seen; of the first, none.
    assert shared_blocks(items) == pytest.approx((0 + 1 + 2 + 2) / 8)
    assert shared_blocks([Item(0, 1, 1)]) is None


PUBLISHED = {
    "AzureLLMInferenceTrace_code.csv": (
        8819, [1469, 5188, 7436, 7437], [13, 55, 251, 1899], 2.57, 13.2, 12.8, 0.00, None,
    ),
    "AzureLLMInferenceTrace_conv.csv": (
        19366, [1020, 2735, 4142, 14050], [129, 424, 601, 1000], 5.53, 1.09, 1.8, -0.11, None,
    ),
    "mooncake_conversation_trace.jsonl": (
        12031, [6909, 27367, 85400, 126195], [350, 597, 1119, 2000], 3.40, 3.03, 2.0, 0.07, 0.366,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_traces_are_what_they_are_known_for(traces_dir, name):
    trace = read(traces_dir / name, longest=1 << 20, source=Source(jitter_s=0.0))
    found = described(trace)
    num, num_prompt, num_output, rate, cv, peak, correlation, shared = PUBLISHED[name]
    assert found["num_requests"] == num and found["num_dropped"] == 0
    assert found["input_tokens p50 p90 p99 max"] == pytest.approx(num_prompt, abs=1)
    assert found["output_tokens p50 p90 p99 max"] == pytest.approx(num_output, abs=1)
    assert found["request_rate"] == pytest.approx(rate, abs=0.006)
    assert found["gap_cv"] == pytest.approx(cv, abs=0.06)
    assert found["peak_over_mean_10s"] == pytest.approx(peak, abs=0.06)
    assert found["length_correlation"] == pytest.approx(correlation, abs=0.006)
    assert found["shared_blocks"] == (None if shared is None else pytest.approx(shared, abs=6e-4))
    spread = read(traces_dir / name, longest=1 << 20)
    assert spread.jitter_s == (None if shared is None else pytest.approx(3.0, abs=0.01))
    assert described(spread)["gap_cv"] == pytest.approx(cv if shared is None else 1, abs=0.06)


# -------- what is drawn


def test_lengths_have_the_distribution_that_was_asked_for():
    rng = np.random.default_rng(0)
    assert lengths("512").draw(3, rng) == [512] * 3 == lengths("fixed:512").draw(3, rng)
    uniform = lengths("uniform:3:6").draw(4000, rng)
    assert set(uniform) == {3, 4, 5, 6} and np.mean(uniform) == pytest.approx(4.5, abs=0.1)
    logs = np.log(lengths("lognormal:500:0.8").draw(4000, rng))
    assert np.median(logs) == pytest.approx(math.log(500), abs=0.05)
    assert logs.std() == pytest.approx(0.8, abs=0.03)
    assert min(lengths("lognormal:1:3").draw(1000, rng)) == 1
    for text in ("512", "uniform:3:6", "lognormal:500:0.8"):
        assert str(lengths(text)) == text


@pytest.mark.parametrize("text", ["", "0", "-3", "uniform:6:3", "uniform:3", "lognormal:5:0",
                                  "gamma:3:2", "uniform:0:4", "fixed:1:2"])  # fmt: skip
def test_lengths_that_are_none_are_refused(text):
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        lengths(text)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, math.inf])
def test_gaps_are_as_bursty_as_was_asked_for(burstiness):
    at = due_times(20_000, burstiness, np.random.default_rng(0))
    gaps = np.diff(at)
    assert at[-1] == pytest.approx(20_000) and min(gaps) >= 0
    assert gaps.std() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05, abs=1e-9)


def demand(text):
    return demand_of(parse(f"--workload serve --max-model-len 2048 {text}".split()))


def test_a_rate_scales_the_same_arrivals():
    given = "--input-len uniform:8:32 --output-len 4 --num-prompts 50 --request-rate"
    slow, fast = (demand(f"{given} {r}").requests(99, [0]) for r in (2, 8))
    assert slow[-1].at == pytest.approx(25) and fast[-1].at == pytest.approx(50 / 8)
    assert [r.at for r in slow] == pytest.approx([4 * r.at for r in fast])
    assert [r.prompt for r in slow] == [r.prompt for r in fast]
    found = demand(f"{given} inf")
    assert found.arrivals == "burst" and {r.at for r in found.requests(99, [0])} == {0.0}
    assert demand(f"{given} inf --max-concurrency 4").arrivals == "closed"


def test_a_utilisation_becomes_a_speed_once_the_capacity_is_known():
    open_ended = demand("--num-prompts 50 --utilisation 0.5")
    assert open_ended.speed is None and open_ended.arrivals == "open"
    at_half = open_ended.at_utilisation(0.5, capacity_s=10.0)
    assert at_half.requests(99, [0])[-1].at == pytest.approx(20)


def test_blocks_of_one_number_are_of_equal_tokens(write):
    rows = [(0, 1000, 2, [1, 2]), (1000, 700, 2, [1, 3]), (2000, 600, 2, [4, 2])]
    path = write(mooncake(rows), "x.jsonl")
    asked = demand(f"--trace {path}")
    first, second, third = (r.prompt for r in asked.requests(5000, [0]))
    assert list(map(len, (first, second, third))) == [1000, 700, 600]
    assert first[:512] == second[:512] and first[512:600] == third[512:600]
    assert first[512:700] != second[512:700] and first[:512] != third[:512]
    others = asked.requests(5000, [1])
    assert first[:512] != others[0].prompt[:512] == others[1].prompt[:512]


def test_a_trace_is_scaled_in_time_alone(write):
    path = write(azure([(0, 10, 1), (1, 20, 2), (4, 30, 3)]))
    whole, twice = demand(f"--trace {path}"), demand(f"--trace {path} --speed 2")
    assert [r.at for r in whole.requests(9, [0])] == [0, 1, 4]
    assert [r.at for r in twice.requests(9, [0])] == [0, 0.5, 2]
    assert len(demand(f"--trace {path} --num-prompts 2").items) == 2
    assert twice.about["request_rate"] == pytest.approx(0.75)


def test_drawn_requests_that_do_not_fit_are_dropped():
    found = demand("--input-len uniform:1:4000 --output-len 48 --num-prompts 400")
    assert len(found.items) == pytest.approx(200, abs=40)
    assert max(i.num_prompt for i in found.items) <= 2000
    assert sum(found.dropped.values()) + len(found.items) == 400
    with pytest.raises(UserError, match="none of 400 requests is within 2048 tokens"):
        demand("--input-len 4000 --num-prompts 400")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--trace x --input-len 8", "--input-len would change nothing: the trace says so"),
        ("--trace x --request-rate 8", "--request-rate would change nothing"),
        ("--speed 2", "--speed would change nothing: it is of a --trace"),
        ("--jitter off", "--jitter would change nothing"),
        ("--utilisation 0.5 --request-rate 2", "--request-rate would change nothing: --util"),
        ("--trace x --utilisation 0.5 --speed 2", "--speed would change nothing: --util"),
        ("--burstiness 2", "--burstiness would change nothing: it is of a finite --request-rate"),
        ("--burstiness 2 --request-rate inf", "--burstiness would change nothing"),
    ],
)
def test_options_that_would_change_nothing_are_refused(text, said):
    with pytest.raises(UserError, match=said):
        demand(text)


def test_lengths_are_in_the_record_as_they_were_given():
    assert json.dumps({"input_len": Lengths("uniform", 3, 6)}, default=str).endswith('3:6"}')
