"""evals/speed/serve.py, grid.py, driving.py, saturation.py: requests of any arrivals through an
engine, the figures of `vllm bench serve`, and what is said of a load that is too much."""

from __future__ import annotations

import json
import re
import shlex
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from core.errors import RunError, UserError
from evals.speed import bench, replay, workloads
from evals.speed.bench_arguments import parse
from evals.speed.bench_tables import rows_of
from evals.speed.driving import Clock, Driver, Request, Timeline, serve
from evals.speed.grid import cells, grid, table
from evals.speed.peers import News, Peer, Setup
from evals.speed.saturation import FEWEST, is_behind, rate_kept, saturated
from evals.speed.serve import DETAILS, Serving, measured

README = Path(__file__).parents[1] / "evals" / "speed" / "README.md"
TICK = 1e-9  # s that a wait is too long, as on any clock


class Seats(Peer):
    """A step takes `step_s` and brings each of at most `max_num_seqs` requests a token; prompts of
    more than `longest` tokens are refused. `owes` tokens are missing of each."""

    name = "seats"

    def __init__(self, seats=4, step_s=0.1, longest=1000, owes=0):
        super().__init__(Setup("random:tiny", 320, 4096, seats, 64, "float32", "cpu"))
        self.now, self.step_s, self.longest, self.owes = 0.0, step_s, longest, owes
        self.left, self.most, self.due, self.prompts, self.sections = {}, 0, [], [], []

    @property
    def clock(self):
        return Clock(lambda: self.now, self.wait)

    def wait(self, seconds):
        self.now += seconds + TICK

    def add(self, key, prompt, max_tokens):
        if len(prompt) > self.longest:
            raise UserError(f"{len(prompt)} tokens are too many")
        self.left[key] = max_tokens - self.owes
        self.most = max(self.most, len(self.left))
        self.due.append(self.due_s)
        self.prompts.append(prompt)

    def pending(self):
        return bool(self.left)

    def step(self):
        self.now += self.step_s
        running = list(self.left)[: self.setup.max_num_seqs]
        news = [News(key, 1, self.left[key] == 1) for key in running]
        for key in running:
            self.left[key] -= 1
        self.left = {key: n for key, n in self.left.items() if n}
        return news

    def section(self, name):
        self.sections.append(name)


def asked(*dues, num_output=2, num_prompt=8):
    return [Request([1] * num_prompt, num_output, at) for at in dues]


# -------- driving


def test_an_open_loop_sends_what_is_due_and_waits_for_nobody():
    engine = Seats()
    engine.now = 7.0
    line = serve(engine, asked(0.0, 0.05, 5.0), engine.clock)
    assert line.begin_s == 7.0 and line.due_s == pytest.approx([0, 0.05, 5.0])
    # The second was seen when the step of the first had ended, 50 ms after it was due.
    assert line.sent_s == pytest.approx([0, 0.1, 5.0])
    assert line.token_times_s[1] == pytest.approx([0.2, 0.3])
    assert line.token_times_s[2] == pytest.approx([5.1, 5.2])
    assert line.busy_s == pytest.approx(0.5) and line.duration_s == pytest.approx(5.2)
    assert engine.due == pytest.approx([7.0, 7.05, 12.0]), "engines are told when it was due"


def test_places_hold_requests_back_and_their_waiting_counts():
    engine = Seats()
    line = serve(engine, asked(0.0, 0.0, 0.0), engine.clock, max_concurrency=1)
    assert engine.most == line.most_running == 1
    assert line.due_s == [0, 0, 0] and line.sent_s == pytest.approx([0, 0.2, 0.4])


@pytest.mark.parametrize("most", [1, 3])
def test_in_a_closed_loop_a_request_is_due_when_its_place_is_free(most):
    engine = Seats()
    line = serve(engine, asked(*[0.0] * 6), engine.clock, max_concurrency=most, is_closed=True)
    assert engine.most == line.most_running == most
    assert line.due_s == line.sent_s == pytest.approx([i // most * 0.2 for i in range(6)])


def test_what_an_engine_refuses_is_put_down_or_raised():
    engine = Seats(longest=10)
    wanted = [*asked(0.0), *asked(0.0, num_prompt=11), *asked(0.1)]
    line = serve(engine, wanted, engine.clock, takes_refusals=True)
    assert line.refused == {1: "11 tokens are too many"}
    assert list(map(len, line.token_times_s)) == [2, 0, 2] and len(line.due_s) == 3
    with pytest.raises(UserError, match="11 tokens are too many"):
        serve(engine, wanted, engine.clock)


def test_tokens_that_are_missing_are_no_run():
    engine = Seats(owes=1)
    with pytest.raises(RunError, match="seats owes 3 tokens"):
        serve(engine, asked(0.0, 0.1, 0.2), engine.clock)


# -------- figures

LINE = Timeline(
    begin_s=5.0,
    duration_s=4.0,
    busy_s=3.0,
    due_s=[0.0, 1.0, 2.0],
    sent_s=[0.0, 1.5, 2.0],
    token_times_s=[[0.25, 0.5, 0.5, 1.25], [2.0], []],
    keys=[1, 2, -1],
    refused={2: "too long"},
    most_running=2,
)


def test_figures_of_events_counted_by_hand():
    """By the names and definitions of `vllm bench serve`, the clock apart."""
    wanted = [Request([0] * 10, 4), Request([0] * 20, 1), Request([0] * 99, 3)]
    result = measured(wanted, LINE, {"ttft": 300.0}, (90.0,))
    assert result.figures == {
        "request_throughput": 2 / 4,
        "request_goodput": 1 / 4,  # the second is late, the third has failed
        "output_throughput": 5 / 4,
        "total_token_throughput": (30 + 5) / 4,
        "mean_ttft_ms": (250 + 1000) / 2,
        "mean_tpot_ms": pytest.approx(1000 / 3),
        "mean_e2el_ms": (1250 + 1000) / 2,
        "mean_itl_ms": pytest.approx(1000 / 3),
        **{f"{p}_{name}_ms": None for p in ("median", "p90") for name in
           ("ttft", "tpot", "e2el", "itl")},
    }  # fmt: skip
    raw = result.raw
    assert (raw["completed"], raw["failed"], raw["duration"]) == (2, 1, 4.0)
    assert (raw["total_input_tokens"], raw["total_output_tokens"]) == (30, 5)
    assert (raw["max_output_tokens_per_s"], raw["max_concurrent_requests"]) == (3, 2)
    assert raw["busy"] == 0.75 and raw["std_ttft_ms"] == 375
    assert raw["max_client_queue_ms"] == 500 and raw["mean_client_queue_ms"] == pytest.approx(
        500 / 3
    )
    assert raw["itls"] == [[0.25, 0, 0.75], [], []] and raw["ttfts"] == [0.25, 1.0, None]
    assert raw["errors"] == ["", "", "too long"] and raw["input_lens"] == [10, 20, 99]
    assert result.notes == ["1 of 3 requests failed: too long"]
    assert result.num_samples["mean_tpot_ms"] == 1 and result.num_samples["mean_itl_ms"] == 3


def test_a_percentile_is_refused_below_the_samples_that_carry_it():
    for num, carried in {13: [], 14: ["median"], 69: ["median"], 70: ["median", "p90"],
                         700: ["median", "p90", "p99"]}.items():  # fmt: skip
        times = [[float(i), i + 0.5] for i in range(num)]
        due = [float(i) for i in range(num)]
        line = LINE._replace(due_s=due, sent_s=due, token_times_s=times, refused={}, keys=due)
        found = measured([Request([0], 2)] * num, line, {}, (90.0, 99.0))
        kept = [p for p in ("median", "p90", "p99") if found.figures[f"{p}_tpot_ms"] is not None]
        assert kept == carried
        missing = {"median", "p90", "p99"} - set(kept)
        assert {key for key in found.refused if key.endswith("tpot_ms")} == {
            f"{p}_tpot_ms" for p in missing
        }
        if "p99" in missing:
            assert found.refused["p99_tpot_ms"].startswith(f"{num} samples do not carry it, 700 do")


# -------- saturation


def queue(utilisation, num, rng):
    """Arrivals of a Poisson process, and the waits (ms) for one server of constant service."""
    due, waits, free = np.cumsum(rng.exponential(1.0, num)), [], 0.0
    for at in due:
        free = max(free, at) + utilisation
        waits.append((free - at) * 1e3)
    return due, waits


@pytest.mark.parametrize(
    ("utilisation", "low", "high"), [(0.6, 0, 0), (0.85, 0, 0.02), (1.1, 0.8, 1), (1.5, 1, 1)]
)
def test_saturation_is_seen_where_it_is_and_nowhere_else(utilisation, low, high):
    rng = np.random.default_rng(0)
    said = [saturated(*queue(utilisation, 400, rng), utilisation) for _ in range(100)]
    assert low <= np.mean([one is not None for one in said]) <= high


def test_the_sentence_has_the_numbers():
    due = np.arange(80.0)
    assert saturated(due, 500 + 500 * due, None) == (
        "saturated, not a latency result: first tokens came at 67% of the rate at which requests "
        "were due; lower the rate"
    )
    assert ", at 1.50 of the capacity;" in saturated(due, 500 + 500 * due, 1.5)
    assert rate_kept(due, 500 + 250 * due) == pytest.approx(0.8)
    assert rate_kept(due, 500 - due) == 1.0


def test_a_queue_that_grows_is_said_where_most_requests_came_at_once():
    due = [0.0] * 75 + [1.0] * 5
    said = saturated(due, np.arange(80.0) * 10, 0.5)
    assert said is not None and "the queue grew to the end, at 0.50 of the capacity" in said


def test_a_few_requests_and_a_burst_show_nothing():
    few = np.arange(FEWEST - 1.0)
    assert rate_kept(few, few * 1e3) is None and not is_behind(few, few * 1e3)
    assert rate_kept([0.0] * 80, np.arange(80.0)) is None
    assert not is_behind([0.0] * 80, np.arange(80.0)) and not is_behind([], [])


# -------- the workload


def run(text, engine=None, repetition=0, serving=None):
    """`serve` on Seats: its Result, the engine and the workload."""
    args = parse(f"--workload serve --max-model-len 900 --num-warmups 3 {text}".split())
    serving, engine = serving or Serving(args), engine or Seats()
    driver = Driver(engine, engine.clock, np.random.default_rng(0))
    return serving(driver, args, repetition), engine, serving


GIVEN = "--input-len uniform:4:40 --output-len 5 --num-prompts 200"


def test_utilisation_is_of_the_capacity_that_was_measured():
    """Four seats and steps of 0.1 s: eight requests of five tokens a second."""
    result, engine, _ = run(f"{GIVEN} --request-rate 4 --burstiness 4")
    raw = result.raw
    assert raw["capacity_request_throughput"] == pytest.approx(8.0)
    assert raw["utilisation"] == pytest.approx(0.5)
    assert raw["request_rate"] == 4 and raw["num_prompts"] == 200 == raw["completed"]
    assert engine.sections == ["serve", None]
    assert not result.is_saturated and raw["is_saturated"] is False
    assert result.notes == [
        "open loop, burstiness 4, 4 requests/s: utilisation 0.50 of a capacity of 8 requests/s, "
        f"busy {raw['busy']:.2f}"
    ]
    assert not set(DETAILS) & set(raw)
    json.dumps(result._asdict())


def test_a_speed_from_a_utilisation_is_that_of_the_first_engine():
    result, _, serving = run(f"{GIVEN} --utilisation 0.75")
    assert result.raw["request_rate"] == pytest.approx(6.0)
    assert result.raw["utilisation"] == pytest.approx(0.75)
    slower = Seats(step_s=0.2)
    other, _, _ = run(f"{GIVEN} --utilisation 0.75", slower, serving=serving)
    assert other.raw["request_rate"] == pytest.approx(6.0)
    assert other.raw["utilisation"] == pytest.approx(1.5)
    assert other.is_saturated and other.notes[-1].startswith("saturated, not a latency result")


def test_the_capacity_is_measured_once_an_engine():
    _, engine, serving = run(f"{GIVEN} --request-rate 4")
    num = len(engine.prompts)
    run(f"{GIVEN} --request-rate 4", engine, 1, serving)
    assert num == 3 + 200 + 3 + 200 and len(engine.prompts) == num + 3 + 200


def test_repetitions_have_the_same_lengths_and_times_and_other_tokens():
    _, engine, serving = run(f"{GIVEN} --request-rate 4")
    first, due = engine.prompts[-200:], np.diff(engine.due[-200:])
    run(f"{GIVEN} --request-rate 4", engine, 1, serving)
    second = engine.prompts[-200:]
    assert list(map(len, first)) == list(map(len, second))
    assert np.diff(engine.due[-200:]) == pytest.approx(due, abs=1e-6)
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_closed_loops_bursts_and_capped_ones_are_called_so():
    closed, _, _ = run(f"{GIVEN} --max-concurrency 2")
    assert closed.raw["request_rate"] == "inf" and closed.raw["max_concurrency"] == 2
    assert closed.raw["utilisation"] is None and closed.raw["max_concurrent_requests"] == 2
    assert closed.notes[0].startswith("closed loop of 2, busy 1.00: a request is due when")
    assert closed.figures["median_ttft_ms"] == pytest.approx(100)
    burst, _, _ = run(GIVEN)
    assert burst.notes[0].startswith("a burst, busy 1.00: all were due at once")
    assert burst.figures["median_ttft_ms"] == pytest.approx(25 * 500, rel=0.1)
    capped, engine, _ = run(f"{GIVEN} --request-rate 4 --max-concurrency 1")
    assert capped.raw["max_concurrent_requests"] == 1 and capped.is_saturated
    assert capped.raw["capacity_request_throughput"] == pytest.approx(2.0)
    assert capped.notes[1].startswith("1 at once at most: a request waited ")


def test_what_is_dropped_or_refused_is_said_and_refusals_break_every_limit():
    engine = Seats(longest=30)
    text = "--input-len uniform:8:1000 --output-len 5 --num-prompts 400 --goodput e2el:1e6"
    result, _, _ = run(f"{text} --request-rate 1", engine)
    raw = result.raw
    assert raw["dropped"] == {"longer than 900 tokens": raw["num_dropped"]}
    assert raw["dropped_share"] == pytest.approx(0.1, abs=0.04)
    assert raw["completed"] + raw["failed"] + raw["num_dropped"] == 400
    assert result.figures["request_goodput"] == result.figures["request_throughput"]
    assert result.notes[0].endswith(" tokens are too many")
    assert any(note.endswith("longer than 900 tokens") for note in result.notes)


def test_details_are_there_if_asked_for():
    result, _, _ = run(f"{GIVEN} --request-rate 4 --save-detailed --json x.json")
    assert set(DETAILS) <= set(result.raw) and len(result.raw["ttfts"]) == 200


def azure(path, num=40):
    """A trace in the format of Azure's."""
    begin, lines = datetime(2023, 11, 16, 18, 15, 46), ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for i in range(num):
        at = begin + timedelta(seconds=0.5 * i)
        lines.append(f"{at:%Y-%m-%d %H:%M:%S.%f}0,{8 + i % 30},{1 + i % 5}")
    path.write_text("\n".join(lines))
    return path


def mooncake(path, num=40):
    """One in the format of Mooncake's: stamps of 3 s, one prompt in two shares its first block."""
    rows = [
        {"timestamp": i // 10 * 3000, "input_length": 520, "output_length": 2,
         "hash_ids": [0 if i % 2 else 10 * i + 10, 10 * i + 11]} for i in range(num)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_trace_is_replayed_through_an_engine(tmp_path):
    path = azure(tmp_path / "made.csv")
    result, engine, _ = run(f"--trace {path} --speed 2 --num-prompts 30")
    assert np.diff(engine.due[-30:]) == pytest.approx([0.25] * 29)
    assert [len(p) for p in engine.prompts[-30:]] == [8 + i % 30 for i in range(30)]
    raw = result.raw
    assert (raw["dataset_name"], raw["speed"], raw["burstiness"]) == ("made", 2.0, None)
    assert raw["request_rate"] == pytest.approx(30 / 14.5 * 2)
    assert raw["trace"]["gap_cv"] == pytest.approx(0)
    assert result.notes[0].startswith("open loop, made at 2 times its speed, 4.14 requests/s:")


def test_rounded_stamps_and_shared_blocks_are_said(tmp_path):
    result, engine, _ = run(f"--trace {mooncake(tmp_path / 'm.jsonl')}")
    assert "requests of one stamp were spread over 3 s, in their order" in result.notes
    assert len(set(engine.due[-40:])) == 40
    assert any(note.startswith("23.8% of the blocks of prompts") for note in result.notes)


# -------- the grid


def test_a_grid_has_a_closed_loop_for_every_cell_that_fits():
    text = "--grid-input-lens 8 4000 --grid-output-lens 4 100 --grid-concurrency 1 4 8"
    args, engine = parse(f"--workload grid {text}".split()), Seats(longest=5000)
    result = grid(Driver(engine, engine.clock, np.random.default_rng(0)), args, 0)
    assert len(cells(args)) == 12 and list(result.raw) == [
        "8+4 x1", "8+4 x4", "8+100 x1", "8+100 x4", "4000+4 x1", "4000+4 x4",
    ]  # fmt: skip
    assert result.refused["grid 8+4 x8"] == "8 x 12 tokens need a larger --max-num-seqs than 4"
    assert result.refused["grid 4000+100 x1"] == (
        "1 x 4100 tokens need a larger --max-model-len than 4096"
    )
    for concurrency in (1, 4):
        cell = f"8+4 x{concurrency}"
        assert result.figures[f"median_ttft_ms {cell}"] == pytest.approx(100)
        assert result.figures[f"median_tpot_ms {cell}"] == pytest.approx(100)
        assert result.figures[f"output_throughput {cell}"] == pytest.approx(10 * concurrency)
        assert result.raw[cell]["max_concurrent_requests"] == concurrency
        assert result.raw[cell]["completed"] == result.num_samples[f"median_ttft_ms {cell}"] == 16
    assert [name for name in engine.sections if name][:2] == ["grid 8+4 x1", "grid 8+4 x4"]


def test_a_cell_of_few_requests_has_no_median_and_says_so():
    args = parse(
        "--workload grid --grid-input-lens 8 --grid-concurrency 1 --grid-prompts 4".split()
    )
    engine = Seats()
    result = grid(Driver(engine, engine.clock, np.random.default_rng(0)), args, 0)
    assert result.figures["median_ttft_ms 8+128 x1"] is None
    assert result.refused["median_ttft_ms 8+128 x1"].startswith("4 samples do not carry it, 14 do")
    assert result.refused.keys() <= result.figures.keys(), "of others nobody asks"


def test_the_table_of_a_grid_has_a_line_a_cell():
    rows = [
        {"workload": "grid", "arm": arm, "figure": f"{figure} 8+4 x{c}", "p50": value * c}
        for arm, value in {"ours": 1.25, "peer": 2.0}.items()
        for c in (1, 16)
        for figure in ("median_ttft_ms", "output_throughput")
    ]
    rows += [{"workload": "w1", "arm": "ours", "figure": "output_throughput", "p50": 3.0}]
    assert table(rows, "ours") == [
        {"input": "8", "output": "4", "concurrency": "1", "TTFT ms": "1.25", "tok/s": "1.25"},
        {"input": "8", "output": "4", "concurrency": "16", "TTFT ms": "20", "tok/s": "20"},
    ]
    assert table(rows[-1:], "ours") == []


# -------- rows and the command line


def repetition(saturated, **figures):
    return {"figures": figures, "raw": {}, "refused": {}, "num_samples": {}, "notes": [],
            "is_saturated": saturated}  # fmt: skip


def test_more_tokens_a_second_are_faster_in_a_cell_too():
    figure = "output_throughput 8+4 x1"
    speeds = {"ours": 5.0, "peer": 9.0, "ours again": 5.0}
    by_arm = {
        arm: {"repetitions": [repetition(False, **{figure: v})] * 2} for arm, v in speeds.items()
    }
    rows = {row["arm"]: row for row in rows_of("grid", by_arm)}
    assert rows["peer"]["verdict"] == "faster" and rows["peer"]["ratio_to_ours"] == 1.8


@pytest.mark.parametrize("at", ["ours", "peer"])
def test_latencies_of_a_saturated_run_are_compared_with_nothing(at):
    by_arm = {
        arm: {"repetitions": [repetition(arm == at, median_ttft_ms=5.0, output_throughput=9.0)] * 2}
        for arm in ("ours", "peer", "ours again")
    }
    rows = {(row["figure"], row["arm"]): row for row in rows_of("serve", by_arm)}
    assert rows["median_ttft_ms", "peer"]["verdict"] == "saturated"
    assert rows["median_ttft_ms", "peer"]["ratio_to_ours"] is None
    assert rows["output_throughput", "peer"]["verdict"] == "no change"
    assert rows["median_ttft_ms", "ours again"]["verdict"] == (
        "saturated" if at == "ours" else "control"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--request-rate 3", "--request-rate is of the workload serve, which is not run: add"),
        ("--workload w2 --rate 3", "--rate is of the workload w4, which is not run: add"),
        ("--workload w3 --num-requests 9", "--num-requests is of the workload w1"),
        ("--workload w1 grid --trace x", "--trace is of the workload serve"),
        ("--workload serve --grid-concurrency 3", "--grid-concurrency is of the workload grid"),
        ("--workload w1 --goodput ttft:5", "--goodput is of the workloads w4 and serve"),
        ("--workload serve --trace none.csv", "none.csv cannot be read"),
        ("--workload serve --burstiness 2", "--burstiness would change nothing"),
        ("--workload serve --save-detailed", "--save-detailed would change nothing: it is of --j"),
        ("--rebuild", "--rebuild would change nothing: it is of --peer"),
        ("--bandwidth-bytes 64", "--bandwidth-bytes would change nothing: it is of --measure"),
        ("--workload w1 w1", "--workload names w1 twice"),
        ("--measure-bandwidth --bandwidth-bytes 10", "--bandwidth-bytes is 10, which takes less"),
    ],
)
def test_a_command_that_would_change_nothing_is_one_sentence(capsys, text, said):
    assert bench.main(f"--model random:tiny --device cpu {text}".split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("outweigh: error: ") and said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "text", "said"),
    [
        (bench.main, "--repetitions x", "--repetitions: 'x' is not a whole number of 1 or more"),
        (bench.main, "--rate 0", "--rate: '0' is not a positive number"),
        (bench.main, "--metric-percentiles 50,x", "'50,x' are not percentiles between 0 and 100"),
        (bench.main, "--no-such", "unrecognized arguments: --no-such"),
        (replay.main, "--trace t --urgent 2", "--urgent: '2' is not a number from 0 to 1"),
        (replay.main, "--trace t --chunk-size -1", "--chunk-size: '-1' is not a whole number of 1"),
        (replay.main, "", "the following arguments are required: --trace"),
    ],
)
def test_what_a_command_line_does_not_take_is_one_sentence(capsys, command, text, said):
    with pytest.raises(SystemExit) as end:
        command(text.split())
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("outweigh: error: ") and said in error
    assert error.endswith("; --help shows every option\n") and error.count("\n") == 1


def examples():
    """Commands of the README that need no GPU, as lists of arguments."""
    block = re.findall(r"```sh\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    lines = [line for text in block for line in text.replace("\\\n", " ").splitlines()]
    begin = ["python", "-m", "evals.speed.bench"]
    return [words[3:] for line in lines if (words := shlex.split(line))[:3] == begin]


def test_the_readme_has_examples_of_the_grid_and_of_every_kind_of_arrivals():
    said = [" ".join(words) for words in examples()]
    for option in ("--workload grid", "--max-concurrency", "--burstiness", "--trace", "--columns"):
        assert any(option in line for line in said), option


@pytest.mark.parametrize("words", examples(), ids=lambda words: " ".join(words)[:60])
def test_an_example_of_the_readme(words, tmp_path, monkeypatch, capsys):
    azure(tmp_path / "AzureLLMInferenceTrace_conv.csv")
    mooncake(tmp_path / "mooncake_conversation_trace.jsonl", 12)
    (tmp_path / "BurstGPT_1.csv").write_text(
        "Timestamp,Model,Request tokens,Response tokens\n"
        + "\n".join(f"{i},x,{10 + i},{i % 3}" for i in range(20))
    )
    monkeypatch.chdir(tmp_path)
    quick = "--device cpu --repetitions 1 --kv-cache-bytes 16MiB --json found.json "
    quick += "--grid-prompts 14" if "grid" in words else "--num-prompts 20 --num-warmups 2"
    assert bench.main([*words, *quick.split()]) == 0
    result, said = json.loads((tmp_path / "found.json").read_text()), capsys.readouterr().out
    (name,) = result["workloads"]
    found = result["workloads"][name]["ours"]["repetitions"][0]
    assert result["left_out"] == {} or "shares of the roofline" in result["left_out"]
    if name == "grid":
        assert "concurrency" in said and all(v for v in found["figures"].values())
    else:
        assert found["raw"]["completed"] > 0 == found["raw"]["failed"]
        assert found["figures"]["mean_ttft_ms"] > 0 and found["raw"]["busy"] > 0
        assert all(f"serve, ours: {note}" in said for note in found["notes"])


def test_workloads_are_given_by_name():
    engine, args = (
        Seats(),
        parse("--workload grid --grid-input-lens 8 --grid-concurrency 1".split()),
    )
    args.grid_output_lens = [2]
    result = workloads.run("grid", engine, args, 0, engine.clock, {"grid": grid})
    assert result.figures["median_ttft_ms 8+2 x1"] == pytest.approx(100)
