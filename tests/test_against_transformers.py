"""evals/speed/against_transformers.py: a short run, and that only whole outputs count as speed."""

from __future__ import annotations

import json

import psutil
import pytest

from core.errors import RunError
from evals.speed import against_transformers
from evals.speed.against_transformers import main, requests, timed

WANTED = [([1, 2], 2), ([3], 3)]


def test_a_run_measures_all_four(tmp_path, capsys, monkeypatch):
    def shorter(*given):
        """Beginnings of them; the rows of a batch still differ in both lengths."""
        return [(ids[: 9 + 20 * i], 8 - 3 * i) for i, (ids, _) in enumerate(requests(*given))]

    monkeypatch.setattr(against_transformers, "requests", shorter)
    # generate_batch fills most of the machine's memory with its cache: let it see 2 GiB.
    memory = psutil.virtual_memory()._replace(total=psutil.Process().memory_info().rss + (2 << 30))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    file = tmp_path / "result.json"
    assert main(["--num-requests", "2", "--rounds", "1", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert (result["prompt_tokens"], result["output_tokens"]) == (9 + 29, 8 + 5)
    assert result["seconds"].keys() == {"ours", "generate", "generate_batch", "ours again"}
    assert all(len(times) == 1 and times[0] > 0 for times in result["seconds"].values())
    ours = result["tokens_per_s"]["ours"]
    assert result["ratio"]["generate"] == ours / result["tokens_per_s"]["generate"]
    assert "generate_batch" in capsys.readouterr().out


def test_requests_are_drawn_from_the_seed():
    drawn = requests(300, 90, 7)
    assert drawn == requests(300, 90, 7) != requests(300, 90, 8)
    prompts, outputs = zip(*drawn, strict=True)
    lengths = [len(ids) for ids in prompts]
    assert (min(lengths), max(lengths)) == (pytest.approx(32, abs=9), pytest.approx(512, abs=9))
    assert (min(outputs), max(outputs)) == (pytest.approx(16, abs=2), pytest.approx(128, abs=2))
    assert {i for ids in prompts for i in ids} == set(range(90))


def test_outputs_that_are_too_short_are_no_speed():
    assert timed(lambda: [[5, 6], [7, 8, 9]], WANTED) >= 0
    with pytest.raises(RunError, match="1 of 2 requests got fewer tokens"):
        timed(lambda: [[5, 6], [7, 8]], WANTED)


def test_a_failed_request_is_no_speed(monkeypatch, capsys):
    from core.executor import Executor

    def launch(self, plan):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(Executor, "launch", launch)
    assert main(["--num-requests", "2", "--rounds", "1"]) == 1
    error = capsys.readouterr().err
    assert "2 of 2 requests failed" in error and "the device is gone" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "no/such"], "transformers cannot load no/such on cpu"),
        (["--json", "no/such/file.json"], "its folder is not there"),
    ],
)
def test_what_a_user_can_mend_is_a_sentence(capsys, options, message):
    assert main(options) == 2
    assert message in capsys.readouterr().err
