"""`evals.quality`: engines in lockstep, and the command with its records and exit codes.

Random weights serve where they can. Verdicts on INT8, which holds its limits, and on a careless
INT4 are those of the embedded model over sources of this project.
"""

from __future__ import annotations

import json
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import core.compose
from core import Engine
from core.errors import RunError, UserError
from evals.quality.__main__ import main
from evals.quality.lockstep import compare, slices

ROOT = Path(__file__).resolve().parent.parent
MODEL = "random:tiny"

BAD = '''
import torch

from core import hookimpl
from plugins.kv.paged import Paged


class Int4(Paged):
    """Keys and values rounded to 4 bits with one scale a tensor: what every limit must refuse."""

    lossless = graph_safe = False
    quality = {"delta_nats": 9.0}

    def write(self, layer, k, v, batch):
        super().write(layer, self.rounded(k), self.rounded(v), batch)

    def rounded(self, x):
        scale = x.abs().amax() / 7
        return (x / scale).round() * scale

    def sink(self, layer):
        return None


class Holes(Int4):
    """The last layer loses positions from 200 on in NaN."""

    def attend(self, layer, q, batch):
        out = super().attend(layer, q, batch)
        lost = torch.arange(len(out))[:, None] >= 200
        return torch.where(lost, float("nan"), out) if layer == 1 else out


class Claims(Int4):
    lossless = True


class Misspelt(Int4):
    quality = {"kl": 1.0}


class Breaks(Int4):
    def attend(self, layer, q, batch):
        raise ZeroDivisionError("out of ideas")


@hookimpl
def outweigh_register_kv(register):
    for offer in (Int4, Holes, Claims, Misspelt, Breaks):
        register(offer.__name__.lower(), offer)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A plugin of bad offers, and ten documents of 300 bytes and tokens."""
    path = tmp_path_factory.mktemp("quality")
    (path / "bad.py").write_text(BAD)
    rng = np.random.default_rng(0)
    rows = ["".join(map(chr, rng.integers(97, 123, 300))) for _ in range(10)]
    (path / "texts.json").write_text(json.dumps(rows))
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder with the eight longest modules of the core as documents."""
    path = tmp_path_factory.mktemp("sources")
    for file in sorted((ROOT / "core").glob("*.py"), key=lambda file: file.stat().st_size)[-8:]:
        (path / f"{file.stem}.txt").write_text(file.read_text())
    return path


@pytest.fixture
def run(folder, capsys):
    """The command on the documents: exit code, what it printed, what it said, its record."""

    def go(*options, **replaced):
        record = folder / "record.json"
        record.unlink(missing_ok=True)
        own = {"--model": MODEL, "--data": folder / "texts.json", "--tokens": 300} | replaced
        own |= {"--json": record, "--device": "cpu", "-p": folder / "bad.py"}
        try:
            code = main([*(str(x) for pair in own.items() for x in pair), *options])
        except SystemExit as end:  # of the parser
            code = end.code
        out, err = capsys.readouterr()
        return code, out, err, json.loads(record.read_text()) if record.exists() else None

    return go


def by_metric(record):
    return {finding["metric"]: finding for finding in record["findings"]}


# ---------------------------------------- lockstep


@pytest.fixture(scope="module")
def engines():
    with build("paged") as base, build("paged_int8") as other:
        yield {"base": base, "int8": other}


def build(kv, model=MODEL):
    # 100 tokens a step: slices end with a step or after `rows`, whichever is first.
    limits = {"max_model_len": 300, "max_num_seqs": 1, "max_num_batched_tokens": 100}
    return Engine(model=model, kv=kv, device="cpu", enable_prefix_caching=False, **limits)


IDS = np.random.default_rng(1).integers(0, 256, 290).tolist()
PAIR = ("base", "int8")


def whole(engine):
    """Log-probabilities of all positions that a token follows, float64 [n, V]."""
    made = engine.score(IDS, lambda _, logits, targets: logits.double().log_softmax(-1))
    return torch.cat(made)[:-1]


@pytest.mark.parametrize("rows", [1, 48, 400])
def test_slices_side_by_side_give_what_whole_logits_give(engines, rows):
    got = compare(engines, [PAIR], IDS, rows)[PAIR]
    p, q = (whole(engine) for engine in engines.values())
    places = torch.arange(289), torch.tensor(IDS[1:])
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    np.testing.assert_allclose(got.kl, kl, rtol=1e-3, atol=1e-10)
    np.testing.assert_array_equal(got.same, p.argmax(-1) == q.argmax(-1))
    np.testing.assert_allclose(got.base_nats, -p[places], rtol=1e-5)
    np.testing.assert_allclose(got.nats, -q[places], rtol=1e-5)
    assert got.finite.all() and 0 < got.kl.mean() < 1e-2


class Fixed:
    """An engine by what compare sees of one: it hands out these logits, two rows at a time."""

    def __init__(self, logits):
        self.logits = torch.from_numpy(np.array(logits))

    def score(self, ids, reducer, rows):
        for first in range(0, len(ids), 2):
            targets = torch.tensor(ids[first + 1 : first + 3])
            reducer(first, self.logits[first : first + 2], targets)


def test_divergence_is_from_the_reference_and_what_is_not_finite_is_a_uniform_guess():
    half, nan = np.log([0.5, 0.25, 0.25]), [np.nan, 1.0, 2.0]
    sure = np.log([0.8, 0.1, 0.1])
    pair = {"a": Fixed([half, half, half, half]), "b": Fixed([sure, half, nan, half])}
    got = compare(pair, [("a", "b"), ("a", "a")], [0, 1, 2, 0], 2)
    b, itself = got["a", "b"], got["a", "a"]
    uniform = np.log(3) - 1.5 * np.log(2)
    np.testing.assert_allclose(
        b.kl, [0.5 * np.log(0.5 / 0.8) + 0.5 * np.log(0.25 / 0.1), 0, uniform], atol=1e-7
    )
    assert b.same.tolist() == [True, True, False] and b.finite.tolist() == [True, True, False]
    np.testing.assert_allclose(b.base_nats, -np.log([0.25, 0.25, 0.5]), rtol=1e-6)
    np.testing.assert_allclose(b.nats, -np.log([0.1, 0.25, 1 / 3]), rtol=1e-6)
    assert not itself.kl.any() and itself.same.all()
    with pytest.raises(RunError, match="logits of b, the reference, are not finite"):
        compare(pair, [("b", "a")], [0, 1, 2, 0], 2)


class Wide:
    """Logits of a wide vocabulary, made when asked for; notes the memory that lives meanwhile."""

    VOCABULARY, ROWS = 1 << 16, 16

    def __init__(self, seed):
        self.seed, self.bytes = seed, []

    def score(self, ids, reducer, rows):
        made = torch.Generator().manual_seed(self.seed)
        for first in range(0, len(ids), self.ROWS):
            logits = torch.randn(self.ROWS, self.VOCABULARY, generator=made)
            self.bytes.append(psutil.Process().memory_info().rss)
            reducer(first, logits, torch.tensor(ids[first + 1 : first + 1 + self.ROWS]))


def test_logits_of_a_document_are_never_there_as_a_whole():
    """Those of one engine, 480 x 65,536 in float32, take 126 MB; the rows of all three take 13,
    and what is made of them in float64 fits a cache."""
    engines = {name: Wide(seed) for seed, name in enumerate(("a", "b", "c"))}
    got = compare(engines, [("a", "b"), ("a", "c")], [0] * 480)
    assert len(got["a", "c"].kl) == 479 and got["a", "c"].kl.min() > 0
    for engine in engines.values():
        settled = engine.bytes[3:]
        assert len(settled) == 27 and max(settled) - settled[0] < 126e6


def test_an_engine_beside_itself_differs_by_nothing(engines):
    with build("paged_int8") as again:
        got = compare({"a": engines["int8"], "b": again}, [("a", "b")], IDS)[("a", "b")]
    assert not got.kl.any() and got.same.all() and (got.nats == got.base_nats).all()


def test_one_engine_cannot_be_both_sides(engines):
    twice = {"a": engines["int8"], "b": engines["int8"]}
    with pytest.raises(UserError, match="no room to score 290 tokens"):
        compare(twice, [("a", "b")], IDS)
    assert not scoring()
    assert len(compare(engines, [PAIR], IDS)[PAIR].kl) == 289  # both have room again


def test_slices_are_computed_when_asked_for_and_given_back_when_left(engines):
    engine = engines["base"]
    with closing(slices(engine, IDS, 40)) as some:
        first, second, third = next(some), next(some), next(some)
        assert [one.first for one in (first, second, third)] == [0, 40, 80]
        assert [len(one.logits) for one in (first, second, third)] == [40, 40, 20]
        assert second.targets.tolist() == IDS[41:81]
        assert len(scoring()) == 1
    assert not scoring()
    assert sum(len(one.targets) for one in slices(engine, IDS, 40)) == 289  # it has room again


def scoring():
    return [thread for thread in threading.enumerate() if thread.name == "score"]


def test_what_scoring_raises_reaches_whoever_asks(engines):
    with pytest.raises(
        UserError, match="a sequence of 301 tokens is longer than max_model_len 300"
    ):
        next(slices(engines["base"], [1] * 301, 8))
    with pytest.raises(UserError, match="rows is 0"):
        compare(engines, [PAIR], IDS, 0)
    assert not scoring()


# ---------------------------------------- the command


def test_paged_beside_paged_is_exactly_nothing(run):
    code, out, _, record = run("--kv", "paged")
    assert code == 0 and "pass: it is shown that paged costs no more" in out
    got = record["comparisons"]["paged"]
    assert got["mean_kl"] == got["max_kl"] == got["delta_nats"] == got["delta_p"]["rms"] == 0
    assert got["top1"] == 1 and got["num_positions"] == 10 * 299
    assert got["limits"]["source"] == "lossless.float32" and record["verdict"] == "pass"


def test_four_bits_fail_by_name(run, sources):
    prose = {"--model": "tiny", "--data": sources}
    code, out, _, record = run("--kv", "int4", **prose)
    assert code == 1 and "fail: it is shown that int4 costs more than it may" in out
    got = by_metric(record)
    failing = {name for name, finding in got.items() if finding["verdict"] == "fail"}
    # "stored" too: a scale for all of a step depends on how long the step is.
    assert failing == {"mean_kl", "tail_share", "top1", "stored"}
    assert got["delta_nats"]["asked"] == "<= 9"  # the offer's own
    source = record["comparisons"]["int4"]["limits"]["source"]
    assert "mean_kl" in out and source == "lossy, its own delta_nats"


def test_who_claims_to_be_lossless_and_is_not_fails(run):
    code, _, _, record = run("--kv", "claims")
    assert code == 1
    assert record["comparisons"]["claims"]["limits"]["source"] == "lossless.float32"
    assert by_metric(record)["mean_kl"]["verdict"] == "fail"


def test_too_few_documents_are_three(run):
    code, out, _, record = run("--kv", "int4", "--limit", "7")
    assert code == 3 and "not shown: neither is shown of int4" in out
    assert record["verdict"] == "not shown"


def test_logits_that_are_not_finite_fail_however_few_documents(run):
    code, _, _, record = run("--kv", "holes", "--limit", "2")
    got = by_metric(record)["not_finite"]
    assert code == 1 and got["verdict"] == "fail" and got["measured"] == 2 * 99
    code, _, err, record = run("--kv", "paged", "--against", "holes")
    assert code == 2 and "the reference, are not finite" in err and record is None


def test_the_record_says_what_was_run(run):
    code, _, _, record = run("--set", "kv.block_size=8", "--set-against", "kv.block_size=32")
    assert code in (0, 1, 3) and record["command"].startswith("python -m evals.quality --model")
    assert record["machine"] and record["versions"]["torch"] == torch.__version__
    reference, other = (engine["offers"]["kv"] for engine in record["engines"].values())
    assert (reference["name"], reference["settings"]["block_size"]) == ("paged", 32)
    assert (other["name"], other["settings"]["block_size"]) == ("paged_int8", 8)
    assert record["vocabulary"] == 320 and record["num_documents_left_out"] == 0
    rows = record["documents"]
    assert [row["name"] for row in rows] == [f"row {i}" for i in range(1, 11)]
    assert np.mean([row["paged_int8"]["mean_kl"] for row in rows]) == pytest.approx(
        record["comparisons"]["paged_int8"]["mean_kl"]
    )
    raw = record["positions"]["paged_int8"]
    assert len(raw) == 10 and {len(part) for part in raw[0].values()} == {299}


def test_many_positions_stay_out_of_the_record(run, monkeypatch):
    monkeypatch.setattr("evals.quality.measure.MAX_RAW_POSITIONS", 500)
    _, _, _, record = run("--kv", "paged", "--limit", "2")
    assert record["positions"] == "left out: 598 positions, and a record holds up to 500"


@pytest.mark.parametrize(("dtype", "reference"), [
    ("float32", "paged (reference)"), ("float16", "paged in float32"),
])  # fmt: skip
def test_the_noise_floor_is_keys_and_values_in_bfloat16_in_a_model_in_float32(
    run, dtype, reference
):
    _, out, _, record = run("--noise-floor", "--dtype", dtype, "--limit", "2")
    floor = record["comparisons"]["noise_floor"]
    assert (floor["reference"], floor["other"]) == (reference, "bfloat16 keys and values")
    two = [record["engines"][floor[side]] for side in ("reference", "other")]
    assert [one["config"]["dtype"] for one in two] == ["float32", "float32"]
    assert [one["offers"]["kv"]["name"] for one in two] == ["paged", "Bfloat16KV"]
    assert 1e-9 < floor["mean_kl"] < record["comparisons"]["paged_int8"]["mean_kl"]
    assert "bfloat16 keys and values beside" in out and "limits" not in floor
    assert {"paged_int8", "noise_floor"} < set(record["documents"][0])


def test_several_offers_beside_one_pass_of_the_reference(run, monkeypatch):
    loads, loaded = [], core.compose.load_model
    monkeypatch.setattr(
        core.compose, "load_model", lambda *a, **k: loads.append(a) or loaded(*a, **k)
    )
    both = ["--kv", "paged_int8", "int4", "--noise-floor", "--limit", "8", "--tokens", "280"]
    code, out, _, record = run(*both)
    assert code == 1 and len(loads) == 1  # all engines read the same weights,
    settings = [engine["offers"]["fusion"]["settings"] for engine in record["engines"].values()]
    assert [one["pack"] for one in settings] == [False] * 4  # and keep no second copy
    assert list(record["comparisons"]) == ["paged_int8", "int4", "noise_floor"]
    alone = run("--kv", "int4", "--limit", "8", "--tokens", "280")[3]
    assert alone["comparisons"]["int4"]["mean_kl"] == record["comparisons"]["int4"]["mean_kl"]
    metrics = {finding["metric"] for finding in record["findings"]}
    assert {"mean_kl of int4", "stored of paged_int8"} <= metrics
    said = out.strip().splitlines()[-3:]
    verdicts = [record["comparisons"][arm]["verdict"] for arm in ("paged_int8", "int4")]
    assert verdicts[1] == "fail" and [line.partition(":")[0] for line in said] == [
        *verdicts,
        "fail",
    ]


def test_the_same_offer_in_two_ways(run):
    _, _, _, record = run("--kv", "paged_int8", "paged_int8:k_scales=channel,block_size=8")
    plain, by_channel = (engine["offers"]["kv"] for engine in list(record["engines"].values())[1:])
    assert plain["settings"]["k_scales"] == "token"
    assert (by_channel["settings"]["k_scales"], by_channel["settings"]["block_size"]) == (
        "channel",
        8,
    )
    kls = [one["mean_kl"] for one in record["comparisons"].values()]
    assert 0 < kls[1] < kls[0]


def test_documents_of_one_token_are_left_out(run, folder):
    (folder / "short.json").write_text('["a", "bc"]')
    _, out, _, record = run(**{"--data": folder / "short.json"})
    assert record["num_documents_left_out"] == 1 and len(record["documents"]) == 1
    assert "left out: 1 documents of fewer than two tokens" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", "0"], "'0' is not a whole number of 1 or more"),
        (["--tokens", "many"], "'many' is not a whole number of 1 or more"),
        (["--seed", "-1"], "'-1' is not a whole number of 0 or more"),
        (["--tok", "3"], "unrecognized arguments: --tok 3"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--tokens", "1"], "none of 10 documents gives two tokens"),
        (["--tokens", "99999"], "lower --tokens to 4096"),
        (["--kv", "pagd"], "did you mean paged"),
        (["--against", "pagd"], "did you mean paged"),
        (["--set", "kv.k_smooth=1"], "did you mean k_smoothing"),
        (["--set", "block_size"], "--set takes SEAM.FIELD=VALUE"),
        (["--set-against", "fusion.verify=true"], "--set-against takes options of kv"),
        (["--json", "/nowhere/at/all.json"], "its folder is not there"),
        (["--data", "nowhere.jsonl"], "no file or folder nowhere.jsonl"),
        (["--dataset", "nowhere.jsonl"], "no file or folder nowhere.jsonl"),
        (["--field", "body", "--data", "{rows}"], "choose --field from text"),
        (["--kv", "misspelt"], "'kl' by its attribute quality, which is no metric"),
        (["--kv", "breaks"], "breaks failed to score 300 tokens: ZeroDivisionError: out of ideas"),
    ],
)
def test_what_cannot_be_carried_out_is_one_sentence(run, folder, options, message):
    rows = folder / "rows.jsonl"
    rows.write_text('{"text": "some"}\n')
    code, out, err, record = run(*(option.format(rows=rows) for option in options))
    assert code == 2 and message in err and record is None and out == ""
    assert err.startswith("outweigh: error: ") and err.count("\n") == 1


def test_a_record_that_cannot_be_written_is_no_verdict(folder, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("evals.records.os.replace", full)
    taken = folder / "taken.json"
    own = "--kv paged --device cpu --tokens 99 --limit 1".split()
    code = main(
        ["--model", MODEL, "--data", str(folder / "texts.json"), "--json", str(taken), *own]
    )
    out, err = capsys.readouterr()
    assert code == 2 and "taken.json" in err and "not shown: neither is shown of paged" in out


def test_without_data_there_is_nothing_to_do(capsys):
    assert main(["--model", MODEL]) == 2
    assert "required: --data" in capsys.readouterr().err


def test_the_embedded_model_bears_int8(run, sources):
    """All limits, drift too: eight documents of 1,060 tokens."""
    code, out, _, record = run(**{"--model": "tiny", "--data": sources, "--tokens": 1060})
    assert code == 0, out
    got = by_metric(record)
    assert {finding["verdict"] for finding in got.values()} == {"pass"} and "drift" in got
    assert 1e-5 < got["mean_kl"]["measured"] < 5e-4
