"""The training side of the embedded model: tokeniser, packing, skills, batches, the command."""

from __future__ import annotations

import json
import lzma
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from core.errors import UserError  # noqa: E402
from evals.tiny import corpus, skills  # noqa: E402
from evals.tiny.batches import Batches, Stream, in_background  # noqa: E402
from evals.tiny.muon import Muon  # noqa: E402
from evals.tiny.recipe import Recipe, Stage  # noqa: E402
from evals.tiny.tokenizer import END, SPECIALS, train as train_tokenizer  # noqa: E402
from evals.tiny.train import Checkpoints, Trainer, main, plot, run  # noqa: E402

WORDS = "the a river boat went down to see old stone house where rain fell on grey roofs".split()


def prose(seed, num_words):
    rng = np.random.default_rng(seed)
    words = [WORDS[i] for i in rng.integers(0, len(WORDS), num_words)]
    return " ".join(words) + ".\n"


def row(number, kind, text):
    lang = "code" if kind == "python" else "en"
    return {"id": str(number), "lang": lang, "kind": kind, "source": "here", "text": text}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A corpus of sixty documents, a tokeniser of it and the packed file."""
    folder = tmp_path_factory.mktemp("tiny")
    rows = [row(n, "book", prose(n, 900)) for n in range(40)]
    rows += [row(n, "python", f"def f{n}(x):\n    return x + {n}\n" * 9) for n in range(20)]
    with lzma.open(folder / "corpus.jsonl.xz", "wt") as file:
        file.writelines(json.dumps(each) + "\n" for each in rows)
    tokenizer = train_tokenizer((each["text"] for each in rows), vocab_size=600)
    tokenizer.save_pretrained(folder / "tokenizer")
    chosen = list(corpus.documents(folder / "corpus.jsonl.xz"))
    corpus.write(chosen, tokenizer, folder / "corpus.bin")
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder / "tokenizer")


@pytest.fixture(scope="module")
def pieces(tokenizer):
    return skills.Pieces(tokenizer)


@pytest.fixture(scope="module")
def packed(folder):
    return corpus.load(folder / "corpus.bin")


# Without units for bfloat16 a step of the whole model takes a CPU seconds.
SMALL = {"num_layers": 2, "hidden_size": 64, "intermediate_size": 96}


@pytest.fixture
def batches(packed, pieces, tokenizer):
    stages = (Stage(64, 0.5), Stage(128, 0.5))
    recipe = Recipe(num_tokens=256 * 24, tokens_per_step=256, stages=stages, vocab_size=603)
    recipe = replace(recipe, **SMALL)
    stream = Stream(packed, "train", tokenizer.eos_token_id, recipe.seed)
    return Batches(recipe, stream, pieces)


# ----------------------------------------------------------------------------- tokeniser, packing


@pytest.mark.parametrize(
    "text",
    ["the old  house\n\n\tit's 1 2", "天下大势，分久必合", "\x00\x7f", "½ 🜚 naïve", "  x\n  y \n"],
)
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_byte_has_a_token(tokenizer):
    backend = tokenizer.get_vocab()
    assert len({token for token in backend if len(token) == 1}) == 256


def test_every_digit_is_a_token_and_nothing_is_added(tokenizer):
    ids = tokenizer.encode("house 90210x7")
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert [token for token in tokens if any(c.isdigit() for c in token)] == list("902107")
    assert tokens[0].startswith("h")


def test_specials_are_single_tokens_and_the_end_is_eos(tokenizer):
    assert all(len(tokenizer.encode(special)) == 1 for special in SPECIALS)
    assert tokenizer.eos_token == END and tokenizer.chat_template is None


def test_packing_keeps_every_token_of_every_document(folder, packed, tokenizer):
    texts = {split: [] for split in corpus.SPLITS}
    for d, split in enumerate(packed.splits):
        ids = packed.tokens[packed.starts[d] : packed.starts[d + 1]]
        texts[corpus.SPLITS[split]].append(tokenizer.decode(ids.tolist()))
    for split in corpus.SPLITS:
        expected = list(corpus.training_documents(folder / "corpus.jsonl.xz", split))
        assert sorted(texts[split]) == sorted(expected) and expected
        counted = sum(part[split]["bytes"] for part in packed.figures.values())
        assert counted == sum(len(text.encode()) for text in expected)


def test_a_part_stops_at_its_bytes(folder, monkeypatch):
    some = corpus.Part("books", "en", "book", "", 9_000)
    monkeypatch.setattr(corpus, "MIX", (some,))
    chosen = list(corpus.documents(folder / "corpus.jsonl.xz"))
    sizes = [len(text.encode()) for _, split, text in chosen if split == "train"]
    assert 4_000 < sum(sizes) <= 9_000
    assert {part for part, _, _ in chosen} == {"books"}


def test_a_file_over_the_limit_is_refused_and_not_written(folder, tokenizer, tmp_path):
    rows = [("books", "train", prose(1, 500))]
    with pytest.raises(UserError, match="lower max_bytes"):
        corpus.write(rows, tokenizer, tmp_path / "large.bin", max_bytes=100)
    assert not (tmp_path / "large.bin").exists()


def test_a_file_that_is_no_corpus_is_refused(tmp_path):
    (tmp_path / "other").write_bytes(b"text")
    with pytest.raises(UserError, match="no packed corpus"):
        corpus.load(tmp_path / "other")
    lines = {"cut": b'{"id": "a"', "no object": b"3", "no language": b'{"id": "a", "text": "b"}'}
    for name, content in lines.items():
        (tmp_path / name).write_bytes(lzma.compress(content))
    whole = lzma.compress(b"{}" * 1000)
    (tmp_path / "truncated").write_bytes(whole[:-20])
    for name in ("other", "absent", *lines, "truncated"):
        with pytest.raises(UserError, match="cannot be read as a corpus"):
            list(corpus.read_rows(tmp_path / name))


def test_a_corpus_of_other_parts_is_refused(tokenizer, tmp_path):
    with pytest.raises(UserError, match="no document of the corpus is of a part"):
        corpus.write([], tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------ skills


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_passkey_states_its_answer_once_at_its_depth(tokenizer, pieces, depth):
    filler = tokenizer.encode(prose(3, 2000))
    item = skills.passkey(pieces, filler, 400, depth, np.random.default_rng(5))
    answer = tokenizer.decode(item.answer_ids)
    assert len(item.answer_ids) == 5 and answer.isdigit()
    assert len(item.prompt_ids) + len(item.answer_ids) == 400
    prompt = tokenizer.decode(item.prompt_ids)
    assert prompt.count(answer) == 1 and prompt.endswith("The pass key is ")
    before, after = prompt.split(f"The pass key is {answer}. Remember it.")
    rest = after.removesuffix("What is the pass key? The pass key is ")
    assert rest != after
    assert len(before) / (len(before) + len(rest)) == pytest.approx(depth, abs=0.02)


def test_a_tokenizer_serves_as_well_as_pieces(tokenizer, pieces):
    filler = tokenizer.encode(prose(3, 500))
    same = [
        skills.passkey(given, filler, 200, 0.5, np.random.default_rng(1))
        for given in (tokenizer, pieces)
    ]
    assert same[0] == same[1]


def test_a_passkey_without_room_is_refused(pieces):
    rng = np.random.default_rng(0)
    with pytest.raises(UserError, match="filler"):
        skills.passkey(pieces, [5] * 50, 400, 0.5, rng)
    with pytest.raises(UserError, match="passkey of 10 tokens is asked for and takes"):
        skills.passkey(pieces, [5] * 50, 10, 0.5, rng)
    with pytest.raises(UserError, match="between 0 and 1"):
        skills.passkey(pieces, [5] * 500, 400, 1.5, rng)


@pytest.mark.parametrize("keys", ["word", "words", "name", "hex", "number"])
@pytest.mark.parametrize("values", ["digits", "word"])
def test_recall_asks_for_what_was_listed(tokenizer, pieces, keys, values):
    items = skills.recall(pieces, 20, np.random.default_rng(2), keys=keys, values=values)
    assert len(items) == 20
    for item in items:
        listed, _, asked = tokenizer.decode(item.prompt_ids).partition("Question: ")
        pairs = dict(line.split(": ") for line in listed.splitlines()[1:])
        key = asked.removeprefix("What is the value of ").split("?")[0]
        assert len(pairs) == 20
        assert pairs[key] == tokenizer.decode(item.answer_ids).strip()


def test_recall_of_more_keys_than_there_are_is_refused(pieces):
    with pytest.raises(UserError, match="ask for fewer"):
        skills.recall(pieces, 5000, np.random.default_rng(0))


@pytest.mark.parametrize("make", [skills.needles, skills.recalls, skills.copies])
@pytest.mark.parametrize("length", [64, 700, 8192])
def test_every_answer_of_a_training_sequence_stands_before_it(pieces, make, length):
    filler = list(range(30, 60)) * 300
    for seed in range(4):
        rng = np.random.default_rng([seed, length])
        script = make(pieces, length, lambda count: filler[:count], rng)
        assert length <= len(script) == len(script.roles)
        ids, roles = np.array(script.ids, np.uint16)[:length], np.array(script.roles)[:length]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], roles == skills.ANSWER, [0]])))
        runs = edges.reshape(-1, 2)
        for start, end in runs[:: max(1, len(runs) // 40)].tolist():
            assert ids[start:end].tobytes() in ids[:start].tobytes()
        if length == 8192:
            assert len(runs) >= 1


def test_the_evaluated_phrasings_are_trained_on(tokenizer, pieces):
    filler = tokenizer.encode(prose(1, 3000))
    rng = np.random.default_rng(0)
    lone, listed = 0, 0
    for _ in range(60):
        script = skills.needles(pieces, 300, lambda count: filler[:count], rng)
        lone += "is the pass key? The pass key is " in tokenizer.decode(script.ids)
        script = skills.recalls(pieces, 300, lambda count: filler[:count], rng)
        listed += "Question: What is the value of " in tokenizer.decode(script.ids)
    assert lone >= 1 and listed >= 5


# -------------------------------------------------------------------------------- batches, training


def test_a_batch_depends_on_the_seed_and_its_number_alone(batches):
    first = [batches[step] for step in (5, 0, 23)]
    again = [batches[step] for step in (23, 5, 0)]
    for left, right in zip(first, [again[1], again[2], again[0]], strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))
    other = Batches(replace(batches.recipe, seed=2), batches.stream, batches.pieces)
    assert not np.array_equal(other[5][0], first[0][0])


def test_stages_follow_one_another(batches):
    shapes = [batches[step][0].shape for step in (0, 11, 12, 23)]
    assert shapes == [(4, 65), (4, 65), (2, 129), (2, 129)]


def test_processes_make_the_same_batches_in_the_same_order(batches):
    made = list(in_background(batches, range(10, 14), 2))
    for step, batch in zip(range(10, 14), made, strict=True):
        assert np.array_equal(batch[0], batches[step][0])


def test_text_of_a_batch_is_text_of_the_corpus(batches):
    ids, roles = batches[0]
    stream = batches.stream.tokens.tobytes()
    natural = [row for row, role in zip(ids, roles, strict=True) if (role == skills.TEXT).all()]
    assert len(natural) >= 2
    assert all(row.tobytes() in stream for row in natural)


def test_muon_is_that_of_torch():
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=draw) for shape in ((8, 8), (4, 8), (8, 8), (16, 8))]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    one = Muon(ours, 0.01, 0.9, 0.1)
    other = torch.optim.Muon(
        theirs, lr=0.01, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        for left, right in zip(ours, theirs, strict=True):
            left.grad = torch.randn(left.shape, generator=draw)
            right.grad = left.grad.clone()
        one.step()
        other.step()
    for left, right, before in zip(ours, theirs, start, strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=0)
        assert (left - before).abs().max() > 0.01


def test_the_loss_is_that_of_the_model_of_transformers(batches):
    trainer = Trainer(batches.recipe, 600, "cpu", "none")
    ids, targets, roles = trainer.on_device(batches[12])
    loss, figures = trainer.loss(ids, targets, roles)
    log_probs = trainer.model(ids).logits.log_softmax(-1)
    losses = -log_probs.gather(-1, targets[..., None])[..., 0]
    weights = torch.tensor([0.0, 1.0, batches.recipe.answer_weight])[roles]
    torch.testing.assert_close(loss, (losses * weights).sum() / weights.sum())
    torch.testing.assert_close(figures[2], losses[roles == skills.ANSWER].mean())


def test_resuming_equals_never_having_stopped(batches, tmp_path):
    def losses(trainer, steps):
        return [trainer.train_step(batches[step]).tolist() for step in steps]

    whole = Trainer(batches.recipe, 600, "cpu", "none")
    losses(whole, range(10))
    torch.save(whole.state(), tmp_path / "checkpoint.pt")
    resumed = Trainer(batches.recipe, 600, "cpu", "none")
    resumed.restore(tmp_path / "checkpoint.pt")
    assert resumed.step == 10
    assert losses(resumed, range(10, 16)) == losses(whole, range(10, 16))


class Interrupted(Batches):
    """Fails at one batch, as a machine that is taken away does."""

    def __getitem__(self, step):
        if step == 13:
            raise KeyboardInterrupt
        return super().__getitem__(step)


def test_a_run_that_was_cut_off_writes_the_log_of_one_that_was_not(batches, tmp_path):
    # A checkpoint after every step; the log of the step after it is written anew.
    recipe = replace(batches.recipe, checkpoint_seconds=-1.0, validation_every=7)
    recipe = replace(recipe, validation_tokens=256)
    batches.recipe = recipe
    cut = Interrupted(recipe, batches.stream, batches.pieces)

    def go(source, out, resume=False):
        out.mkdir(exist_ok=True)
        trainer = Trainer(recipe, 600, "cpu", "none")
        if resume:
            trainer.restore(out / "checkpoint.pt")
        return run(trainer, source, batches, out, float("inf"), 0)

    assert go(batches, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        go(cut, tmp_path / "cut")
    assert go(batches, tmp_path / "cut", resume=True)
    logs = []
    for name in ("whole", "cut"):
        lines = (tmp_path / name / "log.jsonl").read_text().splitlines()
        logs.append([row for row in map(json.loads, lines) if "validation" in row])
    assert logs[0] == logs[1] and [row["step"] for row in logs[0]] == [7, 14, 21, 24]


def test_a_checkpoint_of_another_recipe_or_none_is_refused(batches, tmp_path):
    trainer = Trainer(batches.recipe, 600, "cpu", "none")
    with pytest.raises(UserError, match="leave out --resume"):
        trainer.restore(tmp_path / "checkpoint.pt")
    torch.save(trainer.state(), tmp_path / "checkpoint.pt")
    other = Trainer(replace(batches.recipe, seed=2), 600, "cpu", "none")
    with pytest.raises(UserError, match="another recipe"):
        other.restore(tmp_path / "checkpoint.pt")


def test_a_checkpoint_that_cannot_be_written_is_noticed(batches, tmp_path):
    checkpoints = Checkpoints(tmp_path / "absent" / "checkpoint.pt")
    checkpoints.save(Trainer(batches.recipe, 600, "cpu", "none").state())
    with pytest.raises(UserError, match="could not be written .*: make room, then --resume"):
        checkpoints.wait()


def test_the_rate_goes_up_stays_and_falls():
    recipe = Recipe()
    total = sum(recipe.steps())
    rates = [recipe.rate(step) for step in range(total)]
    assert rates[0] < 0.01 and max(rates) == 1.0 and 0 < rates[-1] < 0.02
    assert sum(rate == 1.0 for rate in rates) / total == pytest.approx(
        recipe.hold_share - recipe.warmup_steps / total, abs=0.001
    )


@pytest.fixture
def small_recipe(monkeypatch):
    """What the command trains, with a smaller model."""
    monkeypatch.setattr("evals.tiny.train.Recipe", lambda: Recipe(**SMALL))


def test_the_command_trains_stops_resumes_and_leaves_a_model(
    folder, tmp_path, capsys, small_recipe
):
    out = tmp_path / "run"
    given = ["--data", str(folder / "corpus.bin"), "--tokenizer", str(folder / "tokenizer")]
    given += ["--out", str(out), "--device", "cpu", "--max-length", "64"]
    # A two-hundredth of the steps of the recipe, each a thousandth of its tokens.
    num_tokens = 128 * sum(Recipe().steps())
    given += ["--tokens-per-step", "128", "--num-tokens", str(num_tokens), "--steps-scale", "0.005"]
    assert main([*given, "--max-minutes", "0.001"]) == 0
    assert "--resume goes on" in capsys.readouterr().out
    assert main([*given, "--resume"]) == 0
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    steps = [entry["step"] for entry in rows if "loss" in entry]
    assert steps == [20, 40, 60, 76]
    assert rows[-1]["validation"]["64"].keys() == {"text_loss", "answer_loss", "answer_accuracy"}
    first, *_, last = (entry["text_loss"] for entry in rows if "loss" in entry)
    assert last < first - 1
    config = json.loads((out / "train_config.json").read_text())
    assert config["num_tokens"] == round(num_tokens * 0.005)
    check_model(out / "model")


def test_the_whole_model_is_left_small_enough_for_the_repository(folder, tokenizer, tmp_path):
    trainer = Trainer(Recipe(), tokenizer.eos_token_id, "cpu", "none")
    trainer.export(folder / "tokenizer", tmp_path / "model")
    model = check_model(tmp_path / "model")
    assert model.config.num_hidden_layers == Recipe().num_layers
    assert sum(file.stat().st_size for file in (tmp_path / "model").iterdir()) < 15_500_000


def check_model(folder):
    """A model in bfloat16 and its tokeniser, which transformers loads and runs."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and len(tokenizer) <= model.config.vocab_size
    assert model.config.eos_token_id == tokenizer.eos_token_id
    ids = torch.tensor([tokenizer.encode(prose(7, 20))])
    assert model(ids).logits.isfinite().all()
    return model


def test_rehearsing_prints_one_object(folder, tmp_path, capsys, monkeypatch, small_recipe):
    monkeypatch.setattr("evals.tiny.train.REHEARSED_STEPS", 3)
    given = ["--data", str(folder / "corpus.bin"), "--tokenizer", str(folder / "tokenizer")]
    given += ["--out", str(tmp_path), "--device", "cpu", "--max-length", "32"]
    assert main([*given, "--tokens-per-step", "32", "--rehearse"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [stage["length"] for stage in found["stages"]] == [32]
    assert found["stages"][0]["tokens_per_s"] > 0 and found["minutes"] > 0


def test_a_step_that_cuts_a_sequence_is_refused(folder, tmp_path, capsys):
    given = ["--data", str(folder / "corpus.bin"), "--tokenizer", str(folder / "tokenizer")]
    given += ["--out", str(tmp_path), "--device", "cpu"]
    assert main([*given, "--tokens-per-step", "1000"]) == 2
    assert "no multiple of the longest sequence, 8192" in capsys.readouterr().err


def test_the_curves_are_drawn_small(tmp_path):
    pytest.importorskip("matplotlib", reason="loss.png needs matplotlib")
    rows = [
        {"step": n, "tokens": n * 1000, "loss": 5.0, "text_loss": 5 - n / 99, "answer_loss": 1.0}
        for n in range(1, 100)
    ]
    rows.append({"step": 99, "tokens": 99_000, "validation": {"1024": {"text_loss": 4.0}}})
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert plot(tmp_path).stat().st_size < 80_000
