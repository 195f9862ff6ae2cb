"""evals/speed/steps.py: floors in the cache's own format, padding, refusals, and a short run."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from core import Engine
from core.batch import Limits
from core.errors import RunError, UserError
from core.seams import Span
from core.testing.fusion import PlainNodes
from evals.speed.steps import (
    decode_floor_ms,
    decode_ms,
    kv_token_bytes,
    main,
    prefill_ms,
    prompt_padding,
    weight_bytes,
)
from plugins.graphs.full import FullGraphs
from plugins.graphs.none import NoGraphs


def engine(**fields):
    given = {"kv_cache_bytes": "16MiB", "max_model_len": 128, "max_num_seqs": 4} | fields
    return Engine(model="random:tiny", device="cpu", enable_prefix_caching=False, **given)


# random:tiny in float32: 2 layers, 2 key/value heads of 32; INT8 has a float32 scale a head.
@pytest.mark.parametrize(
    ("kv", "settings", "num_bytes"),
    [
        ("paged", {}, 2 * 2 * 2 * 32 * 4),
        ("paged", {"kv.block_size": 64}, 2 * 2 * 2 * 32 * 4),
        ("contiguous", {}, 2 * 2 * 2 * 32 * 4),
        ("paged_int8", {}, 2 * 2 * 2 * (32 + 4)),
        ("paged_int8", {"kv.block_size": 8}, 2 * 2 * 2 * (32 + 4)),
    ],
)
def test_a_token_has_the_bytes_that_its_cache_stores(kv, settings, num_bytes):
    with engine(kv=kv, settings=settings) as one:
        assert kv_token_bytes(one) == num_bytes


def test_a_room_that_does_not_follow_the_bytes_is_refused():
    with engine(settings={"kv.num_blocks": 40}) as one:
        with pytest.raises(UserError, match="room for 640 tokens whatever its bytes"):
            kv_token_bytes(one)


def test_the_floor_of_a_decode_step_counts_those_bytes():
    with engine() as one:
        facts = one.facts
    plain, int8 = (decode_floor_ms(facts, 4, 100, 1e9, n) for n in (1024.0, 288.0))
    assert plain == pytest.approx((weight_bytes(facts) + 4 * 100 * 1024) / 1e6)
    assert plain - int8 == pytest.approx(4 * 100 * (1024 - 288) / 1e6)


def composed(strategy, **limits):
    given = {"max_model_len": 8192, "max_num_seqs": 8, "max_num_batched_tokens": 2048} | limits
    plan = SimpleNamespace(graphs=SimpleNamespace(build=lambda: strategy))
    return SimpleNamespace(plan=plan, limits=Limits(**given))


def test_padding_is_that_of_the_shapes_selected():
    one = composed(FullGraphs())
    assert prompt_padding(one, 128) == 0
    assert prompt_padding(one, 150) == pytest.approx(10 / 150)
    assert prompt_padding(one, 1) == 0  # a token alone is a decode step


def test_padding_of_a_prompt_in_chunks_is_that_of_its_last():
    last = composed(FullGraphs()).limits.max_num_batched_tokens
    assert prompt_padding(composed(FullGraphs()), 2 * last) == 0
    padded = prompt_padding(composed(FullGraphs()), 2 * last + 150) * (2 * last + 150)
    # Behind a prefix: the ladder of mixed steps is coarser than that of prompts.
    assert padded == pytest.approx(256 - 150)


def test_what_runs_eagerly_is_not_padded():
    assert prompt_padding(composed(NoGraphs()), 150) == 0
    beyond = composed(FullGraphs(FullGraphs.Config(max_tokens=64)))
    assert prompt_padding(beyond, 150) == 0


class Broken(PlainNodes):
    """A set with a span that raises."""

    def spans(self, facts, device):
        def run(sites, batch, gate_up):
            raise ValueError("no")

        return [Span("broken", ("act_mul",), run, lambda *_: True)]


def test_a_step_that_fails_is_no_figure():
    rng = np.random.default_rng(0)
    with engine(fusion=Broken()) as one:
        with pytest.raises(
            RunError, match="a prompt of 8 tokens failed: fusion .* failed in run: ValueError: no"
        ):
            prefill_ms(one, 8, 1, rng)
        with pytest.raises(
            RunError, match="2 of 2 sequences failed: fusion .* failed in run: ValueError: no"
        ):
            decode_ms(one, 2, 32, 4, rng)


def test_a_batch_that_the_cache_does_not_hold_is_refused():
    rng = np.random.default_rng(0)
    with engine(settings={"kv.num_blocks": 12}) as one:
        assert len(decode_ms(one, 2, 64, 4, rng)) == 4
        with pytest.raises(UserError, match="does not hold 4 sequences of 66 tokens at once"):
            decode_ms(one, 4, 64, 4, rng)
        with pytest.raises(UserError, match="a batch of 5 was asked for and 4 sequences run"):
            decode_ms(one, 5, 64, 4, rng)


@pytest.mark.parametrize(
    "given",
    ["--steps 0", "--repeats 0", "--prefill -1", "--bandwidth 0", "--flops -1", "--seed -1"],
)
def test_numbers_that_measure_nothing_are_refused_at_once(given, capsys):
    with pytest.raises(SystemExit) as caught:
        main(given.split())
    assert caught.value.code == 2 and f"argument {given.split()[0]}" in capsys.readouterr().err


def test_a_context_too_short_for_its_steps_is_refused_and_the_rest_goes_on(tmp_path, capsys):
    argv = "--model random:tiny --device cpu --max-model-len 64 --prefill 8 --batch 1 --steps 4"
    argv += f" --context 5 32 500 --repeats 1 --json {tmp_path}/x.json"
    assert main(argv.split()) == 0
    said = capsys.readouterr().out
    assert "decode 1 sequences at 5: 4 steps cannot be timed with 5 tokens in the middle" in said
    decode = json.loads((tmp_path / "x.json").read_text())["decode"]
    assert "p50_ms" in decode["32"]["1"] and "refused" in decode["500"]["1"]


def test_nothing_that_fits_is_no_measurement(capsys):
    """Sizes that no memory holds among them: prompts are not drawn first."""
    argv = f"--model random:tiny --device cpu --max-model-len 64 --prefill 64 {10**20} --batch 1"
    assert main([*argv.split(), "--context", str(10**20)]) == 1
    shown = capsys.readouterr()
    assert shown.out.count("do not fit max_model_len 64") == 3
    assert shown.err == "outweigh: error: nothing was measured, for the reasons above\n"


@pytest.mark.parametrize("name", ["a" * 300, "\ud800"])
def test_a_name_that_no_file_has_is_refused(tmp_path, name, capsys):
    assert main(["--model", "random:tiny", "--device", "cpu", "--json", f"{tmp_path}/{name}"]) == 2
    error = capsys.readouterr().err
    assert "cannot be written: " in error and error.count("\n") == 1


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, capsys):
    argv = f"--model random:tiny --device cpu --json {tmp_path}"
    assert main(argv.split()) == 2
    assert f"{tmp_path} cannot be written, it is a folder" in capsys.readouterr().err
    assert not tmp_path.with_name(f"{tmp_path.name}.partial").exists()


def test_a_run_measures_what_fits_and_says_what_does_not(tmp_path, capsys):
    argv = "--model random:tiny --device cpu --max-model-len 64 --prefill 16 64 --batch 2 --steps 4"
    argv += f" --context 32 --repeats 2 --kv paged_int8 --json {tmp_path}/x.json"
    assert main(argv.split()) == 0
    said = capsys.readouterr().out
    assert "prefill 64 tokens: sequences of 65 tokens do not fit max_model_len 64" in said
    assert "% of floor" in said
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["kv_token_bytes"] == 288
    assert result["prefill"]["64"].keys() == {"refused"}
    assert result["prefill"]["16"]["padding"] == 0
    for row in (result["prefill"]["16"], result["decode"]["32"]["2"]):
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["p50_ms"])
        assert row["share_of_floor"] == pytest.approx(1 / row["x_floor"])
