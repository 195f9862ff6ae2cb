"""evals/speed/levers.py and arms.py: who is measured when, verdicts, and a short run here."""

from __future__ import annotations

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from core.errors import RunError, UserError
from core.facts import facts_from_config
from core.loading import RANDOM_SHAPES
from evals.speed import levers
from evals.speed.arms import compared, in_turn, noise, side_by_side, verdict
from evals.speed.levers import main, parse, requests, without

SMALL = "--model random:tiny --device cpu --prefill 16 --batch 1 2 --steps 4 --context 32"
SMALL += " --repeats 2 --rounds 2 --kv-cache-bytes 16MiB --num-requests 24 --seats 8"
SMALL += " --prompt-tokens 4 30 --output-tokens 2 20 --share 0.5 --step-tokens 64"


class Log(list):
    """Engines that only say when they are built, measured and closed."""

    def arm(self, name):
        @contextmanager
        def opened():
            self.append(f"+{name}")
            yield name
            self.append(f"-{name}")

        return opened

    def measure(self, name, i):
        self.append(f"{name}{i}")
        return {"ms": float(i)}


def test_rounds_go_forwards_and_backwards_in_turn():
    assert [in_turn("ab", i) for i in range(4)] == [["a", "b"], ["b", "a"]] * 2


def test_arms_live_side_by_side():
    log = Log()
    found = side_by_side({n: log.arm(n) for n in "abc"}, log.measure, 2)
    assert log == "+a +b +c a0 b0 c0 c1 b1 a1 -c -b -a".split()
    assert found == {"ms": {n: [0.0, 1.0] for n in "abc"}}


def test_or_are_built_anew_one_at_a_time():
    log = Log()
    side_by_side({n: log.arm(n) for n in "ab"}, log.measure, 2, rebuild=True)
    assert log == "+a a0 -a +b b0 -b +b b1 -b +a a1 -a".split()


@pytest.mark.parametrize("rebuild", [False, True])
def test_an_arm_that_cannot_run_is_left_out_and_no_other(rebuild):
    def refuses():
        raise UserError("not here")

    def breaks(name, i):
        if name == "c" and i == 1:
            raise RunError("out of memory")
        return {"ms": 1.0}

    log, left_out = Log(), {}
    arms = {"a": log.arm("a"), "b": refuses, "c": log.arm("c")}
    found = side_by_side(arms, breaks, 3, rebuild=rebuild, left_out=left_out)
    assert found == {"ms": {"a": [1.0] * 3}}, "half of the rounds is no figure"
    assert left_out == {"b": "not here", "c": "out of memory"}
    with pytest.raises(UserError, match="not here"):
        side_by_side(arms, breaks, 3, rebuild=rebuild)


def test_the_control_says_how_far_equal_arms_are_apart():
    assert noise([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 1
    assert noise([1.0], [1.1]) == pytest.approx(noise([1.1], [1.0])) == pytest.approx(1.1)
    many = [1.0] * 40
    assert noise(many, [1.02] * 39 + [9.0]) == pytest.approx(1.02), "one hiccup of forty"


def test_a_verdict_lies_outside_the_control():
    assert verdict(0.95, 1.10) == verdict(1.05, 1.10) == "no change"
    assert (verdict(0.8, 1.1), verdict(1.2, 1.1)) == ("faster", "slower")
    assert verdict(0.8, 1.1, more_is_better=True) == "slower"
    assert verdict(1.2, 1.1, more_is_better=True) == "faster"
    assert verdict(0.5, None) == "no control"


def test_ratios_are_of_medians_to_the_base():
    figures = {"a": [2.0, 4.0, 3.0], "a again": [2.1, 4.0, 3.0], "b": [1.0, 1.5, 9.0]}
    rows = {row["arm"]: row for row in compared({"ms": figures}, "a", "a again")}
    assert (rows["a"]["ratio"], rows["b"]["ratio"]) == (1.0, 0.5)
    assert [rows[arm]["verdict"] for arm in figures] == ["base", "control", "faster"]
    assert rows["b"]["spread"] == pytest.approx(8 / 1.5)
    rates = compared({"tok/s": figures}, "a", "a again", more_is_better={"tok/s"})
    assert rates[2]["verdict"] == "slower"


def test_requests_are_a_function_of_the_seed_within_their_bounds():
    facts = facts_from_config(RANDOM_SHAPES["random:tiny"], torch.float32)
    args = parse(SMALL.split())
    wanted = requests(args, facts)
    assert wanted == requests(args, facts) and len(wanted) == 24
    assert {len(ids) for ids, _ in wanted} <= set(range(4, 31))
    assert {n for _, n in wanted} <= set(range(2, 21))
    args.seed = 1
    assert wanted != requests(args, facts)


def test_a_set_without_a_span_has_all_the_others():
    facts, cpu = facts_from_config(RANDOM_SHAPES["random:tiny"], torch.float32), torch.device("cpu")
    names = [span.name for span in without("onednn", "gate_up").spans(facts, cpu)]
    assert names == ["qkv_proj", "o_proj", "down", "lm_head"]
    with pytest.raises(UserError, match="no span 'act_mul': choose one of qkv_proj, o_proj"):
        without("onednn", "act_mul").spans(facts, cpu)


def test_a_capture_is_timed_once_its_kernels_are_compiled(monkeypatch):
    log, costs = [], {}

    def build(args, graphs, overlap, progress=None):
        assert overlap  # in every arm, for it is graphs that are asked about
        log.append(f"+{graphs}")
        if progress:
            progress("load", 0, 1)
            progress("capture", 0, 3)
            progress("capture", 3, 3)
        return SimpleNamespace(
            close=lambda: log.append(f"-{graphs}"), report=lambda: {"graph_bytes": 5}
        )

    monkeypatch.setattr(levers, "build", build)
    levers._captured(None, "full", costs)
    assert log == ["+full", "-full", "+full"]
    assert (costs["full"]["num_shapes"], costs["full"]["graph_bytes"]) == (3, 5)
    assert 0 < costs["full"]["capture_s"] < costs["full"]["build_s"]
    levers._captured(None, "full", costs)
    assert log[3:] == ["+full"], "the control has nothing to compile"


def test_a_run_pulls_every_lever(tmp_path, capsys):
    argv = f"{SMALL} --span onednn:gate_up --block-size 16 4 32 4096 --json {tmp_path}/x.json"
    assert main(argv.split()) == 0
    said = capsys.readouterr().out
    assert "graphs 'full' captures CUDA graphs and the device is cpu" in said
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["device_name"] == "cpu" and result["versions"]["torch"]
    graphs, kv_write, sizes = (result["levers"][n] for n in ("graphs", "kv_write", "block_size"))

    steps = {"prefill 16", "decode 1", "decode 2"}
    assert {row["figure"] for row in graphs["rows"]} == steps
    assert {row["arm"] for row in graphs["rows"]} == {"none", "none again"}
    assert {"decode", "piecewise", "full"} <= graphs["left_out"].keys()
    assert {row["arm"] for row in kv_write["rows"]} == {
        "separate nodes",
        "separate nodes again",
        "fused gate_up",
    }
    assert all(len(v) == 2 for by_arm in kv_write["per_round"].values() for v in by_arm.values())

    assert sizes["left_out"].keys() == {"block size 4096"}
    assert sizes["costs"]["all arms"]["kv_cache_bytes"] > 0
    assert [row["arm"] for row in sizes["rows"]][0] == "block size 16"
    assert any(sentence.startswith("block size 32:") for sentence in sizes["says"])
    figures = sizes["figures"]
    again = figures.pop("block size 16 again")
    assert again == figures["block size 16"], "the same requests, the same steps"
    assert all(one["preemptions"] > 0 for one in figures.values()), "the cache is not scarce"
    empty = [figures[f"block size {size}"]["fragmentation"] for size in (4, 16, 32)]
    assert empty == sorted(empty) and empty[0] < empty[2]
    for one in figures.values():
        assert 0 < one["room filled"] < one["room held"] <= 1
        assert one["room filled"] == pytest.approx(
            one["room held"] * (1 - one["fragmentation"]), rel=0.3
        )


def test_what_no_lever_can_measure_is_an_error(capsys):
    assert main(f"{SMALL} --levers kv_write --rounds 1".split()) == 2
    assert "fusion 'triton' runs its kernels on CUDA" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_cuda_every_strategy_runs_and_says_what_it_costs(tmp_path):
    argv = f"{SMALL} --levers graphs kv_write --rounds 2 --json {tmp_path}/x.json"
    assert main(argv.replace("--device cpu", "--device cuda").split()) == 0
    found = json.loads((tmp_path / "x.json").read_text())["levers"]
    assert {row["arm"] for row in found["graphs"]["rows"]} >= {"none", "none again", "full"}
    assert found["graphs"]["costs"]["full"]["num_shapes"] > 3
    assert {row["arm"] for row in found["kv_write"]["rows"]} >= {"fused qk_rope_write"}
