"""RunConfig, the options of offers, `--set`; and the plan that they resolve to."""

from __future__ import annotations

import json
from typing import Literal

import pytest
import torch
from pydantic import Field, ValidationError, field_validator

from core.config import (
    OfferConfig,
    RunConfig,
    parse_setting,
    settings_by_seam,
    validated,
    versions,
)
from core.errors import RunError, UserError
from core.plan import resolve
from core.registry import Registry


class Options(OfferConfig):
    block_size: int = Field(16, gt=0, description="tokens of a block")
    mode: Literal["fast", "slow"] = "fast"
    name: str | None = None

    @field_validator("block_size")
    @classmethod
    def power_of_two(cls, value):
        if value & (value - 1):
            raise ValueError("block_size is a power of two")
        return value


class Needy(OfferConfig):
    path: str


def offer_config(schema, settings):
    return validated(schema, settings, "kv 'x'", "kv.")


class Sched:
    api = 1
    rekey = "never"

    class Config(OfferConfig):
        bonus: int = 0

    def __init__(self, config):
        self.config = config

    def key(self, seq, clock):
        return 0

    def chunk(self, seq, budget):
        return budget

    def victim(self, running, for_seq):
        return None


def plan(*plugins, **fields):
    return resolve(RunConfig.of(**fields), Registry(plugins))


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


# --set


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kv.block_size=32", ("kv.block_size", 32)),
        ("kv.scale=0.5", ("kv.scale", 0.5)),
        ('fusion.only=["rope", "norm"]', ("fusion.only", ["rope", "norm"])),
        ("kv.mode=slow", ("kv.mode", "slow")),
        ("kv.on=true", ("kv.on", True)),
        ("kv.formula=a=b", ("kv.formula", "a=b")),
        ("kv.empty=", ("kv.empty", "")),
    ],
)
def test_a_setting_is_json_where_it_parses(text, expected):
    assert parse_setting(text) == expected


@pytest.mark.parametrize("text", ["kv.block_size", "block_size=3", ""])
def test_a_setting_has_a_seam_a_field_and_a_value(text):
    with pytest.raises(UserError, match="--set takes SEAM.FIELD=VALUE"):
        parse_setting(text)


def test_settings_go_to_their_seam():
    assert settings_by_seam({"kv.a": 1, "kv.b": 2, "sched.c": 3}) == {
        "kv": {"a": 1, "b": 2},
        "fusion": {},
        "graphs": {},
        "sched": {"c": 3},
    }


@pytest.mark.parametrize(
    ("key", "hint"),
    [("graph.a", "did you mean graphs"), ("zz.a", "kv, fusion"), ("kv", "did you mean kv")],
)
def test_a_setting_of_no_seam(key, hint):
    with pytest.raises(UserError, match=f"the setting '{key}' names no option of a seam.*{hint}"):
        settings_by_seam({key: 1})


# Options of offers


def test_options_are_converted_where_nothing_is_lost():
    made = offer_config(Options, {"block_size": "32", "name": 7})
    assert made == Options(block_size=32, name="7")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blocksize": 1}, "kv 'x' has no option 'blocksize'; did you mean block_size?"),
        ({"qq": 1}, "kv 'x' has no option 'qq'; its options: block_size, mode, name"),
        (
            {"block_size": "abc"},
            "kv 'x' refuses kv.block_size='abc': input should be a valid integer",
        ),
        ({"block_size": 0}, "kv 'x' refuses kv.block_size=0: input should be greater than 0"),
        ({"block_size": 1.5}, "kv 'x' refuses kv.block_size=1.5: input should be a valid integer"),
        ({"block_size": 3}, "kv 'x' refuses kv.block_size=3: block_size is a power of two"),
        ({"mode": "medium"}, "kv 'x' refuses kv.mode='medium': input should be 'fast' or 'slow'"),
    ],
)
def test_a_wrong_option_is_one_sentence(settings, message):
    with pytest.raises(UserError) as caught:
        offer_config(Options, settings)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_all_wrong_options_are_named():
    with pytest.raises(UserError, match="kv.mode='m'.*; kv 'x' has no option 'q'"):
        offer_config(Options, {"mode": "m", "q": 1})


def test_a_required_option_is_asked_for():
    with pytest.raises(UserError, match=r"^kv 'x' needs kv\.path$"):
        offer_config(Needy, {})


def test_options_are_frozen():
    with pytest.raises(ValidationError):
        Options().block_size = 3


# RunConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_nm_seqs": 3}, "the run has no option 'max_nm_seqs'; did you mean max_num_seqs"),
        ({"max_num_seqs": 0}, "the run refuses max_num_seqs=0: input should be greater than 0"),
        ({"dtype": "int4"}, "the run refuses dtype='int4': input should be 'float32', 'bfloat16'"),
        ({"gpu_memory_utilization": 1.5}, "the run refuses gpu_memory_utilization=1.5"),
    ],
)
def test_a_wrong_run_is_one_sentence(fields, message):
    with pytest.raises(UserError) as caught:
        RunConfig.of(**fields)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("512M", 512_000_000),
        ("1.5kB", 1500),
        ("3TiB", 3 << 40),
        ("7B", 7),
        (7, 7),
    ],
)
def test_byte_counts(text, expected):
    assert RunConfig.of(kv_cache_bytes=text).kv_cache_bytes == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2XiB", "1e3", "2iB"])
def test_what_is_no_byte_count(text):
    with pytest.raises(UserError, match="kv_cache_bytes=.*: could not (parse|interpret)"):
        RunConfig.of(kv_cache_bytes=text)


def test_versions_name_what_decides_the_numbers():
    found = versions(["outweigh", "pluggy", "no-such-distribution"])
    assert found["torch"] == torch.__version__
    assert found["outweigh"]
    assert found["pluggy"]
    assert found["no-such-distribution"] is None


# The plan


def test_auto_on_a_cpu(no_gpu):
    made = plan()
    assert made.names() == "kv=paged fusion=onednn graphs=none sched=fifo device=cpu dtype=float32"
    config = made.config
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (32, 2048)
    assert (config.overlap, config.enable_prefix_caching) == (False, True)
    assert (config.max_model_len, config.kv_cache_bytes, config.chunk_size) == (None, None, None)


def test_auto_on_cuda(two_gpus):
    made = plan()
    assert (
        made.names() == "kv=paged fusion=triton graphs=full sched=fifo device=cuda dtype=bfloat16"
    )
    assert (made.config.max_num_seqs, made.config.max_num_batched_tokens) == (256, 8192)
    assert made.config.overlap is True
    assert plan(device="cuda:1").config.device == "cuda:1"


def test_what_is_given_is_kept(two_gpus):
    config = plan(
        dtype="float32", max_num_seqs=3, overlap=False, enable_prefix_caching=False
    ).config
    assert (config.dtype, config.max_num_seqs, config.overlap) == ("float32", 3, False)
    assert config.enable_prefix_caching is False


def test_a_default_gives_way_to_the_limit_that_was_given(no_gpu):
    assert plan(max_num_batched_tokens=8).config.max_num_seqs == 8
    assert plan(max_num_seqs=4096).config.max_num_batched_tokens == 4096
    with pytest.raises(
        UserError, match="max_num_batched_tokens=8 tokens, fewer than the max_num_seqs=9"
    ):
        plan(max_num_batched_tokens=8, max_num_seqs=9)


def test_steps_overlap_where_they_are_captured(two_gpus):
    """A step that is launched kernel by kernel has run when its launch returns: its tokens would
    wait for the launch of the next."""
    for graphs, overlaps in {
        "none": False,
        "decode": True,
        "piecewise": True,
        "full": True,
    }.items():
        assert plan(graphs=graphs).config.overlap is overlaps
        assert plan(graphs=graphs, overlap=not overlaps).config.overlap is not overlaps
    assert plan(device="cpu").config.overlap is False


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CPU"])
def test_an_unknown_device(no_gpu, device):
    with pytest.raises(UserError, match=f"there is no device '{device}'.* choose one of cpu$"):
        plan(device=device)


def test_a_device_that_is_not_there(no_gpu):
    with pytest.raises(UserError, match="no device 'cuda', torch .* sees 0 CUDA devices"):
        plan(device="cuda")


def test_a_gpu_beyond_the_last(two_gpus):
    with pytest.raises(UserError, match="sees 2 CUDA .* choose one of cpu, cuda, cuda:0, cuda:1"):
        plan(device="cuda:2")


def test_options_reach_their_offer():
    made = plan(device="cpu", settings={"kv.block_size": 64})
    assert made.kv.config.block_size == 64
    built = made.build()
    assert built.kv.config.block_size == 64
    with pytest.raises(UserError, match="kv 'paged' has no option 'blocksize'; did you mean"):
        plan(device="cpu", settings={"kv.blocksize": 64})


def test_an_instance_stands_for_a_name():
    mine = Sched(Sched.Config(bonus=3))
    made = plan(device="cpu", sched=mine)
    assert made.build().sched is mine
    assert (made.sched.name, made.config.sched) == ("Sched", "Sched")
    assert str(made.sched.owner) == __file__
    assert made.dump()["offers"]["sched"] == {
        "name": "Sched",
        "owner": __file__,
        "settings": {"bonus": 3},
    }
    with pytest.raises(UserError, match="sched was given as an object.*set bonus in its Config"):
        plan(device="cpu", sched=mine, settings={"sched.bonus": 4})


def test_a_class_stands_for_a_name():
    made = plan(device="cpu", sched=Sched, settings={"sched.bonus": 4})
    assert made.build().sched.config.bonus == 4


def test_a_class_that_does_not_fit_is_refused_before_anything_is_built():
    with pytest.raises(
        UserError, match="sched 'dict' of .* does not fit the seam: it lacks the fact"
    ):
        plan(device="cpu", sched=dict)


def test_an_offer_that_cannot_be_made_is_named():
    class Broken(Sched):
        def __init__(self, config):
            raise OSError("no such table")

    with pytest.raises(
        RunError, match="sched '.*Broken' of .* could not be made: OSError: no such"
    ):
        plan(device="cpu", sched=Broken).build()


def test_the_dump_is_json_and_complete(no_gpu):
    record = plan(settings={"kv.block_size": 64}).dump()
    assert json.loads(json.dumps(record)) == record
    assert record["config"]["device"] == "cpu"
    assert record["offers"]["kv"]["settings"]["block_size"] == 64
    assert set(record["versions"]) >= {"outweigh", "python", "torch", "triton", "transformers"}


# Vetoes


def test_graphs_need_cuda(no_gpu):
    with pytest.raises(
        UserError, match="^graphs 'full' captures CUDA graphs and the device is cpu"
    ):
        plan(graphs="full")


def test_fusion_triton_needs_cuda_or_the_interpreter(no_gpu, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="^fusion 'triton' runs its kernels on CUDA"):
        plan(fusion="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert plan(fusion="triton").fusion.name == "triton"


def kv_with(**facts):
    """The contiguous kv with other facts."""
    offer = Registry().find("kv", "contiguous").load()
    return type("Odd", (offer,), facts)


def test_captured_attention_needs_a_graph_safe_kv(two_gpus):
    unsafe = kv_with(graph_safe=False)
    with pytest.raises(UserError, match="'full' captures and kv 'Odd' is not graph_safe"):
        plan(kv=unsafe, graphs="full")
    assert plan(kv=unsafe).graphs.name == "none"  # auto gives way instead


def test_prefix_caching_needs_a_kv_that_shares(no_gpu):
    unshared = kv_with(prefix_sharing=False)
    with pytest.raises(UserError, match="prefix caching was asked for and kv 'Odd' cannot share"):
        plan(kv=unshared, enable_prefix_caching=True)
    assert plan(kv=unshared).config.enable_prefix_caching is False


def test_all_vetoes_are_shown_together(no_gpu, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    file = tmp_path / "strict.py"
    file.write_text("def outweigh_check_combination(plan): return ['seed 0 is too plain: try 1']")
    with pytest.raises(
        UserError, match="^graphs 'full'.*; moreover, fusion 't.*; moreover, seed 0"
    ) as caught:
        plan(str(file), graphs="full", fusion="triton")
    assert f"try 1 ({file})" in str(caught.value)
