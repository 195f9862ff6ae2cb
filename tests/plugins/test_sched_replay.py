"""`python -m evals.speed.replay`, on a trace made here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from core.errors import UserError
from evals.speed.replay import main, read_trace

ROOT = Path(__file__).parents[2]
SCHEDS = ("fifo", "shortest", "aging:rate=2000", "priority")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """400 requests in the format of the Azure traces, their seven fractional digits included."""
    rng = np.random.default_rng(0)
    at = datetime(2023, 11, 16, 18, 15, 46, 680590)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for gap in rng.exponential(0.2, 400):
        at += timedelta(seconds=float(gap))
        size = int(min(7000, rng.lognormal(6.8, 1.0)))
        lines.append(f"{at:%Y-%m-%d %H:%M:%S.%f}0,{size},{int(rng.integers(1, 40))}")
    path = tmp_path_factory.mktemp("traces") / "made.csv"
    path.write_text("\n".join(lines))  # no newline at the end, like the originals
    return path


def replay(trace, path, *options):
    argv = ["--trace", str(trace), "--sched", *SCHEDS, "--json", str(path), *options]
    assert main(argv) == 0
    return json.loads(path.read_text())["results"]


@pytest.fixture(scope="module")
def results(trace, tmp_path_factory):
    path = tmp_path_factory.mktemp("out") / "replay.json"
    found = replay(trace, path, "--utilisation", "0.3", "0.85", "--urgent", "0.1")
    return {(r["utilisation"], r["sched"].partition(":")[0]): r for r in found}


def test_every_policy_serves_the_whole_trace(results):
    assert set(results) == {(u, s.partition(":")[0]) for u in (0.3, 0.85) for s in SCHEDS}
    assert {r["num_requests"] for r in results.values()} == {400}
    assert len({r["capacity_s"] for r in results.values()}) == 1


def test_utilisation_is_of_the_capacity(results):
    """The last request comes in when capacity / utilisation has gone by; then comes the tail."""
    for (utilisation, _), r in results.items():
        span_s = r["capacity_s"] / utilisation
        assert span_s < r["duration_s"] < span_s + 3


def test_each_policy_does_what_it_is_for(results):
    busy = {name: r for (u, name), r in results.items() if u == 0.85}
    p50, longest = (
        {name: r["ttft_ms"][point] for name, r in busy.items()} for point in ("p50", "max")
    )
    assert p50["shortest"] < p50["aging"] < p50["fifo"]
    assert longest["fifo"] < longest["aging"] < longest["shortest"]
    urgent = {name: r["urgent_ttft_ms"]["p99"] for name, r in busy.items()}
    assert urgent["priority"] < 0.6 * urgent["fifo"]


def test_bounds_that_are_declared_are_kept_and_passes_are_seen(results):
    for (_, name), r in results.items():
        assert r["num_beyond_bound"] == (None if name == "fifo" else 0)
    busy = {name: r["longest_pass_s"] for (u, name), r in results.items() if u == 0.85}
    assert busy["fifo"] == 0 < busy["aging"] < busy["shortest"]


def test_a_broken_bound_is_counted(trace, tmp_path, monkeypatch):
    from plugins.sched.shortest import Shortest

    monkeypatch.setattr(Shortest, "pass_bound_s", lambda self, seq: 0.05)
    argv = ["--trace", str(trace), "--sched", "shortest", "--utilisation", "0.85"]
    assert main([*argv, "--json", str(tmp_path / "out.json")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())["results"][0]
    assert result["num_beyond_bound"] > 0


def test_the_same_arguments_give_the_same_bytes(trace, tmp_path, capsys):
    """In another process too; and the table goes to stdout, fit for a Markdown file."""
    path = tmp_path / "out.json"
    argv = ["--trace", str(trace), "--utilisation", "0.85", "--requests", "99", "--json", str(path)]
    assert main(argv) == 0
    table, written = capsys.readouterr().out, path.read_bytes()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "evals.speed.replay", *argv]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == table and path.read_bytes() == written
    head, *rows = [line for line in table.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in head.split("|")][1:6] == ["sched", "p50", "p90", "p99", "max"]
    names = [row.split("|")[1].strip() for row in rows[1:]]
    assert names == ["fifo", "shortest", "aging", "priority"]


def test_what_is_too_long_is_dropped_and_counted(trace):
    whole = read_trace(trace, max_model_len=16_384, num_requests=None)
    short = read_trace(trace, max_model_len=500, num_requests=None)
    assert whole.num_dropped == 0 and len(whole.arrivals) == 400
    assert short.num_dropped + len(short.arrivals) == 400
    assert max(a.num_prompt + a.num_output for a in short.arrivals) <= 500
    assert short.arrivals[0].at == 0.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", ["TIMESTAMP", "Azure"]),
        ("", ["TIMESTAMP"]),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48000,10\n",
            ["0 of 1", "--max-model-len"],
        ),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, capsys, text, words):
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    with pytest.raises(UserError):
        read_trace(path, max_model_len=16_384, num_requests=None)
    assert main(["--trace", str(path)]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in ["wrong.csv", *words]), error


@pytest.mark.parametrize(
    ("sched", "words"),
    [
        ("agin", ["agin", "aging"]),
        ("aging:rat=3", ["rat", "rate"]),
        ("aging:rate=0", ["sched.rate", "greater than 0"]),
        ("aging:rate", ["rate"]),
    ],
)
def test_a_wrong_policy_is_said_before_anything_runs(trace, capsys, sched, words):
    assert main(["--trace", str(trace), "--sched", "fifo", sched]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and all(word in captured.err for word in words), captured.err
