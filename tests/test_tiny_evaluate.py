"""The evaluation of the embedded model: its statistics, every part on a model of random weights,
and what the weights that ship can do."""

from __future__ import annotations

import collections
import json
import lzma
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core import Engine, SamplingParams
from core.errors import UserError
from core.testing.tiny import reference_logits, save_tiny, save_tokenizer
from core.tokenizer import ByteTokenizer
from evals import intervals, records
from evals.tiny import evaluate
from evals.tiny.answers import (
    Item,
    by_cell,
    exact,
    passkey_items,
    pieces_of,
    recall_items,
    repeated_share,
    repetition,
)
from evals.tiny.damage import damage, divergence, log_probabilities
from evals.tiny.documents import (
    Document,
    excerpts,
    filler,
    first_lines,
    read_documents,
    spans,
)
from evals.tiny.gates import Gate, damage_gates, gates
from evals.tiny.kneser_ney import KneserNey
from evals.tiny.losses import Positions, Window, bits_per_byte, by_position, losses, token_nats
from plugins.kv.paged import Paged

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = "tiny"


def quiet(*_):
    """Progress that nobody watches."""


class PerTensorInt4(Paged):
    """Keys and values rounded to 4 bits with one scale a tensor and layer, that of the first step.

    What a careless format does; it exists to show that the evaluation sees it.
    """

    lossless = False
    graph_safe = False

    def write(self, layer, k, v, batch):
        super().write(layer, self._rounded("k", layer, k), self._rounded("v", layer, v), batch)

    def _rounded(self, name, layer, values):
        scales = self.__dict__.setdefault("scales", {})
        scale = scales.setdefault((name, layer), values.abs().amax().float() / 7)
        return ((values.float() / scale).round().clamp(-7, 7) * scale).to(values.dtype)

    def sink(self, layer):
        return None


# ---------------------------------------- Kneser-Ney

TEXTS = [
    "the cat sat on the mat, and the dog sat on the cat.",
    "naïve café — 你好, the mat!",
    "",
    "aaaaaaaaab" * 5,
    "q",
]


class Naive:
    """The same model by dictionaries, a byte at a time."""

    def __init__(self, documents, order):
        self.order = order
        self.counts = [collections.Counter() for _ in range(order + 1)]
        for document in documents:
            data = b"\xff" * (order - 1) + document.encode()
            self.counts[order].update(data[i : i + order] for i in range(len(data) - order + 1))
        for size in range(order - 1, 0, -1):
            longer = {gram[-size - 1 :] for gram in self.counts[order]}
            self.counts[size].update(gram[1:] for gram in longer)

    def probability(self, context, byte, size):
        if size == 0:
            return 1 / 256
        counts = self.counts[size]
        context = context[len(context) - size + 1 :]
        lower = self.probability(context[1:], byte, size - 1)
        after = [c for gram, c in counts.items() if gram[:-1] == context]
        if not after:
            return lower
        ones, twos = (sum(c == n for c in counts.values()) for n in (1, 2))
        discount = ones / (ones + 2 * twos) if ones else 0.5
        own = max(counts[context + bytes([byte])] - discount, 0)
        return (own + discount * len(after) * lower) / sum(after)

    def nats(self, text):
        data = b"\xff" * (self.order - 1) + text.encode()
        first = self.order - 1
        return [
            -math.log(self.probability(data[i - first : i], data[i], self.order))
            for i in range(first, len(data))
        ]


@pytest.mark.parametrize("order", [1, 2, 5])
@pytest.mark.parametrize("text", ["the dog sat on a mat — 你们", "zzz\x00", *TEXTS[:2]])
def test_the_byte_model_equals_a_naive_one(order, text):
    naive = np.array(Naive(TEXTS, order).nats(text))
    model = KneserNey.fit(TEXTS, order)
    assert model.order == order
    assert np.abs(model.nats(text) - naive).max() < 1e-9
    assert model.bits_per_byte(text) == pytest.approx(naive.mean() / math.log(2), abs=1e-9)


def test_the_byte_model_sums_to_one():
    model = KneserNey.fit(TEXTS)
    rng = np.random.default_rng(0)
    seen = [TEXTS[0].encode()[i : i + n] for i, n in rng.integers(0, 40, (50, 2)).tolist()]
    drawn = [rng.bytes(n) for n in rng.integers(0, 9, 50).tolist()]
    for context in [b"", *seen, *drawn]:
        probabilities = model.distribution(context)
        assert probabilities.sum() == pytest.approx(1, abs=1e-12)
        assert probabilities.min() > 0


def test_the_distribution_is_what_a_text_is_judged_by():
    model, text = KneserNey.fit(TEXTS), "the café"
    data = text.encode()
    one_by_one = [-math.log(model.distribution(data[:i])[b]) for i, b in enumerate(data)]
    assert np.abs(model.nats(text) - one_by_one).max() < 1e-12


def test_chunks_do_not_change_the_counts():
    whole, cut = KneserNey.fit(TEXTS), KneserNey.fit(TEXTS, chunk_grams=3)
    for one, other in zip(whole.levels, cut.levels, strict=True):
        for name in ("grams", "counts", "contexts", "totals", "num_types"):
            assert (getattr(one, name) == getattr(other, name)).all()
    assert whole.levels[-1].counts.sum() == sum(len(text.encode()) for text in TEXTS)


def test_grams_do_not_cross_documents():
    model = KneserNey.fit(["ab", "cd"])
    pairs = model.levels[1].grams.tolist()
    assert ord("b") << 8 | ord("c") not in pairs
    assert 0xFF << 8 | ord("c") in pairs


def test_without_counts_of_one_something_is_left_for_unseen_bytes():
    model = KneserNey.fit(["abab" * 9, "baba" * 9])
    assert model.levels[0].discount == 0.5
    assert model.distribution(b"abab")[ord("z")] > 0


def test_nothing_to_count_is_refused():
    with pytest.raises(UserError, match="no byte to count"):
        KneserNey.fit([""])


# ---------------------------------------- statistics

Z = 1.959963984540054


@pytest.mark.parametrize(("num_right", "n"), [(0, 10), (7, 10), (190, 200), (200, 200)])
def test_the_ends_of_wilson_are_one_quantile_away(num_right, n):
    share = num_right / n
    low, high = intervals.wilson(num_right, n)
    assert 0 <= low <= share <= high <= 1
    for end in {low, high} - {0.0, 1.0}:
        distance = abs(share - end) / math.sqrt(end * (1 - end) / n)
        assert distance == pytest.approx(Z, rel=1e-6)


def test_wilson_of_nothing_says_nothing():
    assert intervals.wilson(0, 0) == (0.0, 1.0)


def test_the_paired_bound_without_a_difference_in_closed_form():
    z2 = 1.6448536269514722**2
    for n in (50, 400):
        expected = -z2 / (n + z2)
        assert intervals.paired_lower_bound(0, 0, n) == pytest.approx(expected, abs=1e-9)


def test_the_paired_bound_decides_at_400_items():
    """Two lost and none gained is within 2 points; six lost is not, nor is 8 against 4."""
    bounds = [intervals.paired_lower_bound(*pair, 400) for pair in ((0, 2), (0, 6), (4, 8))]
    assert bounds[0] > -0.02 > max(bounds[1:])


@pytest.mark.parametrize(
    ("gained", "lost", "difference"), [(2, 9, -0.1), (5, 5, 0.05), (0, 3, 0.0)]
)
def test_the_share_of_losses_is_the_likeliest(gained, lost, difference):
    n = 100
    found = intervals.lost_share(gained, lost, n, difference)
    shares = np.linspace(max(0, -difference) + 1e-6, (1 - difference) / 2 - 1e-6, 200_001)
    likelihood = (
        gained * np.log(shares + difference)
        + lost * np.log(shares)
        + (n - gained - lost) * np.log(1 - 2 * shares - difference)
    )
    assert found == pytest.approx(shares[likelihood.argmax()], abs=1e-5)


def test_the_paired_bound_covers():
    """At the true difference one of 20 samples has its bound above it."""
    rng, n, chances = np.random.default_rng(5), 200, [0.03, 0.07, 0.9]
    drawn = rng.multinomial(n, chances, 1000)
    above = [intervals.paired_lower_bound(g, lost, n) > -0.04 for g, lost, _ in drawn.tolist()]
    assert 0.03 < np.mean(above) < 0.07


def test_the_bootstrap_of_independent_values_is_near_the_normal_interval():
    values = np.random.default_rng(1).normal(3, 2, 400)
    low, high = intervals.clustered_mean(values, [0] * 400)
    half = Z * values.std() / 20
    assert low == pytest.approx(values.mean() - half, abs=0.05)
    assert high == pytest.approx(values.mean() + half, abs=0.05)
    assert intervals.clustered_mean(values, [0] * 400) == (low, high)  # a function of its seed


def test_windows_of_few_documents_tell_less_than_as_many_of_their_own():
    rng = np.random.default_rng(2)
    values = np.repeat(rng.normal(0, 1, 8), 25) + rng.normal(0, 0.1, 200)
    clustered = intervals.clustered_mean(values, np.repeat(np.arange(8), 25).tolist())
    naive = intervals.clustered_mean(values, [0] * 200)
    assert np.diff(clustered) > 2.5 * np.diff(naive)


def test_the_ratio_is_of_sums():
    low, high = intervals.clustered_ratio([1, 10, 100], [2, 20, 200], ["a", "b", "c"])
    assert low == high == 0.5


def test_the_bootstrap_of_a_median():
    assert intervals.bootstrap([0.5] * 9, np.median) == (0.5, 0.5)
    low, high = intervals.bootstrap(list(range(101)), np.median)
    assert 30 < low < 50 < high < 70


@pytest.mark.parametrize(
    ("ids", "expected"),
    [([1, 2, 3], 0), (range(200), 0), ([7] * 200, 1 - 1 / 197), ([1, 2, 3, 4] * 5, 1 - 4 / 17)],
)
def test_the_share_of_repeated_grams(ids, expected):
    assert repeated_share(list(ids)) == pytest.approx(expected)


# ---------------------------------------- random weights

PROSE = (
    "It was the best of lines, it was the worst of lines, and nobody in “Würzburg” had read it. "
    "The quick brown fox went on — as foxes do — and the lazy dog watched the river run.\n\n"
)
WINDOW = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tiny("qwen3", path, max_position_embeddings=4096, eos_token_id=0)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model=str(model), device="cpu", max_num_seqs=8) as made:
        yield made


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of the evaluation, with two documents of each kind, about 2,000 bytes each."""
    root = tmp_path_factory.mktemp("eval")
    rng = np.random.default_rng(0)
    for folder, text in (("books_en", PROSE), ("books_zh", "你好，世界。\n"), ("code", "x = 1\n")):
        (root / folder).mkdir()
        for i in range(2):
            lines = [f"{rng.integers(1000)} {text}" for _ in range(1 + 2000 // len(text.encode()))]
            (root / folder / f"{folder}{i}.txt").write_text("".join(lines), encoding="utf-8")
    rows = [json.dumps({"id": f"new{i}", "text": PROSE * 11}) for i in range(2)]
    (root / "recent_docs.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl.xz"
    row = {"lang": "en", "kind": "book", "source": "s"}
    with lzma.open(path, "wt", encoding="utf-8") as file:
        for i in range(6):
            file.write(json.dumps({**row, "id": str(i), "text": f"{i} {PROSE * 3}"}) + "\n")
    return path


def test_documents_of_every_kind(data):
    kinds = [document.kind for document in read_documents(data)]
    assert kinds == [k for k in ("books_en", "books_zh", "code", "recent_docs") for _ in range(2)]


def test_a_folder_without_documents_is_refused(data, tmp_path):
    with pytest.raises(UserError, match="no documents in books_en"):
        read_documents(tmp_path)
    (tmp_path / "recent_docs.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(UserError, match="no lines of JSON with id and text"):
        read_documents(tmp_path, ("recent_docs",))


@pytest.mark.parametrize("window_tokens", [2, 50, 128, 10_000])
def test_windows_predict_every_byte_once(engine, data, window_tokens):
    for document in read_documents(data, ("books_en", "books_zh")):
        text, ids, place = document.text.encode(), [], 0
        for span in spans(engine, document, window_tokens, None):
            assert len(span.token_ids) <= window_tokens
            assert span.bytes_before == place
            assert not ids or ids[-1] == span.token_ids[0]
            ids += span.token_ids[bool(ids) :]
            place += span.num_bytes
        assert place == len(text)
        assert ids == [0, *engine.tokenizer.encode(document.text)]


def test_some_windows_are_spread_over_the_document(engine, data):
    document = read_documents(data)[0]
    every, some = (spans(engine, document, WINDOW, most) for most in (None, 3))
    assert len(every) > 5
    assert some == [every[0], every[(len(every) - 1) // 2], every[-1]]


def test_a_tokenizer_that_loses_text_is_refused():
    class Lossy(ByteTokenizer):
        def encode(self, text):
            return super().encode(text.lower().replace("!", ""))

    broken = SimpleNamespace(tokenizer=Lossy(), facts=SimpleNamespace(eos_token_ids=()))
    with pytest.raises(UserError, match="stand for 2 bytes and it has 3"):
        spans(broken, Document("d", "k", "Oh!"), 8, None)


def test_losses_are_those_of_transformers(engine, model, data):
    document = read_documents(data)[0]
    found = losses(engine, [document], WINDOW, 2, quiet)
    for window, span in zip(found, spans(engine, document, WINDOW, 2), strict=True):
        logits = reference_logits(model, span.token_ids).log_softmax(-1)
        expected = -logits[range(len(span.token_ids) - 1), span.token_ids[1:]]
        assert np.abs(window.nats - expected.numpy()).max() < 1e-3
        assert (window.document, window.kind) == (document.place, document.kind)
        assert (window.bytes_before, window.num_bytes) == (span.bytes_before, span.num_bytes)


def test_bits_per_byte_are_of_the_same_bytes():
    """The byte model's own losses, 10 bytes a window, as those of a model: a ratio of one."""
    documents = [
        Document(name, "books_en", text) for name, text in zip("ab", TEXTS[:2], strict=True)
    ]
    byte_model = KneserNey.fit(TEXTS)
    windows = [Window("code/a", "code", np.ones(5), 0, 5)]  # of the same name, elsewhere
    for document in documents:
        nats = byte_model.nats(document.text)
        for start in range(0, len(nats), 10):
            part = nats[start : start + 10]
            windows.append(Window(document.place, document.kind, part, start, len(part)))
    part = bits_per_byte(windows, documents, byte_model, quiet)
    assert part["estimate"] == pytest.approx(1)
    assert part["interval"] == pytest.approx((1, 1))
    assert part["num_bytes"] == sum(len(d.text.encode()) for d in documents)
    for document in documents:
        row = part["by_document"][document.place]
        assert row["byte_model"] == pytest.approx(byte_model.bits_per_byte(document.text))
    halved = [Window(w.document, w.kind, w.nats / 2, w.bytes_before, w.num_bytes) for w in windows]
    part = bits_per_byte(halved, documents, byte_model, quiet)
    assert part["estimate"] == pytest.approx(0.5)
    assert part["bits_per_byte"] == pytest.approx(part["byte_model"] / 2)


def test_positions_of_a_window_of_8192():
    positions = Positions.of(8192)
    assert (positions.early, positions.late) == ((256, 512), (4096, 8192))
    edges = [1, 64, 256, 512, 1024, 2048, 4096, 8192]
    assert positions.buckets == list(zip(edges, edges[1:], strict=False))


def test_loss_by_position():
    """It falls by 0.3 from the early positions on, and windows that are not full do not count."""
    rng = np.random.default_rng(0)
    windows = []
    for i in range(12):
        nats = 2 + 0.01 * i + rng.normal(0, 0.1, WINDOW - 1)
        nats[63:] -= 0.3  # position 64 on
        windows.append(Window(f"d{i % 4}", "ab"[i % 2], nats, 0, 1))
    windows.append(Window("short", "a", np.full(WINDOW - 2, 99.0), 0, 1))
    part = by_position(windows, WINDOW)
    assert (part["n"], part["num_documents"]) == (12, 4)
    assert part["estimate"] == pytest.approx(-0.3, abs=0.05)
    assert part["interval"][0] < part["estimate"] < part["interval"][1] < 0
    assert {kind: row["n"] for kind, row in part["by_kind"].items()} == {"a": 6, "b": 6}
    last = part["buckets"][-1]
    assert (last["first"], last["last"]) == (64, 127)
    assert last["nats"] == pytest.approx(2.055 - 0.3, abs=0.01)
    with pytest.raises(UserError, match="longest window has 127 tokens of 128"):
        by_position(windows[-1:], WINDOW)


def test_position_zero_is_the_first_token_which_nobody_predicts():
    nats = np.arange(1, WINDOW, dtype=float)  # of position p it is p
    rows = by_position([Window("d", "k", nats, 0, 1)], WINDOW)["buckets"]
    assert [row["nats"] for row in rows] == [(row["first"] + row["last"]) / 2 for row in rows]


def test_exact_is_token_for_token(engine):
    prompts = [[5, 6, 7], [8] * 40, list(range(3, 90))]
    wanted = engine.generate(prompts, SamplingParams(max_tokens=5, ignore_eos=True))
    right = [Item(p, o.token_ids) for p, o in zip(prompts, wanted, strict=True)]
    wrong = [Item(i.prompt_ids, [*i.answer_ids[:-1], i.answer_ids[-1] ^ 1]) for i in right]
    assert exact(engine, right + wrong, quiet, "stage") == [True] * 3 + [False] * 3


def test_passkeys_go_round_the_cells(engine, data):
    text = filler(engine, read_documents(data, ("books_en",)))
    pieces = pieces_of(engine)
    cells, items = passkey_items(pieces, text, 10, (256, 300), (0.0, 1.0), seed=3)
    assert cells[:5] == [(256, 0.0), (256, 1.0), (300, 0.0), (300, 1.0), (256, 0.0)]
    sizes = [len(item.prompt_ids) + len(item.answer_ids) for item in items]
    assert sizes == [length for length, _ in cells]
    assert {len(item.answer_ids) for item in items} == {5}
    assert len({tuple(item.prompt_ids) for item in items}) == 10
    assert passkey_items(pieces, text, 4, (256, 300), (0.0, 1.0), seed=3)[1] == items[:4]
    rows = by_cell(cells, [cell == (300, 1.0) for cell in cells])
    assert [(row["n"], row["num_right"]) for row in rows] == [(3, 0), (3, 0), (2, 0), (2, 2)]


def test_recall_asks_each_list_once(engine):
    items = recall_items(pieces_of(engine), 6, num_pairs=5)
    assert len({tuple(item.prompt_ids[:60]) for item in items}) == 6
    for item in items:
        prompt, answer = (engine.tokenizer.decode(i) for i in (item.prompt_ids, item.answer_ids))
        assert prompt.count(answer) == 1 and len(answer) == 5


def test_skills_need_a_tokenizer():
    with (
        Engine(model="random:tiny", device="cpu", max_num_seqs=1) as bare,
        pytest.raises(UserError, match="random:tiny has no tokenizer"),
    ):
        pieces_of(bare)


def test_prompts_are_lines_from_all_over_the_books(data):
    books = read_documents(data, ("books_en",))
    prompts = first_lines(books, 5)
    assert len(set(prompts)) == 5
    for i, prompt in enumerate(prompts):
        assert len(prompt) >= 60 and prompt in books[i % 2].text


def test_repetition_samples_by_its_seed(engine):
    prompts = ["the quick brown fox", "the lazy dog"]
    first, again, other = (repetition(engine, prompts, 30, seed, quiet) for seed in (0, 0, 9))
    assert first == again
    assert first["first_text"] != other["first_text"]
    assert first["greedy"]["shares"] == other["greedy"]["shares"]
    assert first["n"] == len(first["shares"]) == 2
    assert 0 <= first["interval"][0] <= first["estimate"] <= first["interval"][1] <= 1


def test_excerpts_take_the_kinds_in_turn(engine, data):
    documents = read_documents(data)
    found = excerpts(engine, documents, 5, 100)
    assert [len(ids) for ids in found] == [100] * 5
    ids = engine.tokenizer.encode(documents[0].text)
    assert found[0] == ids[(len(ids) - 100) // 2 :][:100]
    second = engine.tokenizer.encode(documents[2].text)
    assert found[1] == second[(len(second) - 100) // 2 :][:100]
    with pytest.raises(UserError, match="no document has 1000000 tokens"):
        excerpts(engine, documents, 5, 10**6)


# ---------------------------------------- damage


def maker(model, **options):
    return lambda kv: Engine(
        model=str(model),
        kv=kv,
        device="cpu",
        max_num_seqs=8,
        enable_prefix_caching=False,
        **options,
    )


def test_divergence_by_hand(engine):
    ids = list(range(3, 40))
    p = log_probabilities(engine, ids)
    assert p.shape == (37, 300)
    kl, same = divergence(engine, ids, p)
    assert np.abs(kl).max() < 1e-6 and same.all()
    uniform = torch.full_like(p, -math.log(300))
    expected = (uniform.exp() * (uniform - p)).sum(-1)
    kl, _ = divergence(engine, ids, uniform)
    assert np.abs(kl - expected.numpy()).max() < 1e-5


def test_damage_of_nothing_and_of_four_bits(model, engine):
    """Answers that `paged` writes: it finds all of them, and INT4 loses many."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 290, 300).tolist() for _ in range(2)]
    prompts = [rng.integers(3, 290, n).tolist() for n in range(50, 62)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=5, ignore_eos=True))
    items = [Item(p, o.token_ids) for p, o in zip(prompts, outputs, strict=True)]

    none = damage(maker(model), "paged", Paged, items, texts, quiet)
    assert (none["kv_a"], none["kv_b"], none["n"]) == ("paged", "Paged", 12)
    assert none["a"]["num_right"] == none["b"]["num_right"] == 12
    assert none["difference"] == 0 and abs(none["mean_kl"]) < 1e-6
    assert none["num_positions"] == 600 and none["same_top_token"] == 1

    int4 = PerTensorInt4(PerTensorInt4.Config())
    coarse = damage(maker(model), "paged", int4, items, texts, quiet)
    assert coarse["difference"] <= -0.2 and coarse["mean_kl"] >= 0.1
    assert coarse["num_lost"] - coarse["num_gained"] == -coarse["difference"] * 12
    assert coarse["difference_bound"] < coarse["difference"]
    assert coarse["mean_kl_interval"][0] < coarse["mean_kl"] < coarse["mean_kl_interval"][1]
    assert not any(gate.holds for gate in damage_gates(coarse))


def test_int8_costs_a_random_model_little(model):
    text = np.random.default_rng(0).integers(3, 290, 300).tolist()
    part = damage(maker(model), "paged", "paged_int8", [Item([5] * 9, [1])], [text], quiet)
    assert 0 < part["mean_kl"] < 1e-3


# ---------------------------------------- gates


@pytest.mark.parametrize(
    ("measured", "sense", "bound", "n", "holds"),
    [
        (0.92, "<=", 0.92, 20, True),
        (0.93, "<=", 0.92, 20, False),
        (0.0, "<", 0.0, 20, False),
        (0.95, ">=", 0.95, 20, True),
        (0.95, ">", 0.95, 20, False),
        (0.5, "<=", 0.92, 19, False),
        (float("nan"), "<=", 0.92, 20, False),
    ],
)
def test_a_gate_holds(measured, sense, bound, n, holds):
    assert Gate("g", measured, sense, bound, n, min_n=20).holds is holds


GOOD = {
    "bpb": {"n": 100, "estimate": 0.9},
    "position": {"n": 100, "estimate": -0.1, "interval": (-0.2, -0.01)},
    "passkey": {"float32": {"n": 200, "estimate": 0.96}, "bfloat16": {"n": 200, "estimate": 0.95}},
    "recall": {"float32": {"n": 200, "estimate": 0.9}},
    "repetition": {"n": 20, "estimate": 0.1},
    "damage": {
        "kv_a": "a", "kv_b": "b", "n": 400, "num_positions": 4096,
        "difference_bound": -0.015, "mean_kl": 5e-4,
    },
}  # fmt: skip


def test_every_part_has_a_gate():
    found = gates(GOOD)
    assert len(found) == 8 and all(gate.holds for gate in found)
    assert gates({"engine": {}}) == []


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("bpb", {"estimate": 0.921}),
        ("position", {"interval": (-0.2, 0.001)}),
        ("passkey", {"bfloat16": {"n": 200, "estimate": 0.94}}),
        ("recall", {"float32": {"n": 199, "estimate": 1.0}}),
        ("repetition", {"estimate": 0.3}),
        ("damage", {"difference_bound": -0.021}),
        ("damage", {"mean_kl": 2e-3}),
        ("damage", {"num_positions": 4000}),
    ],
)
def test_every_gate_can_fail(part, change):
    found = gates({**GOOD, part: {**GOOD[part], **change}})
    assert sum(not gate.holds for gate in found) == 1


# ---------------------------------------- the command

SMALL = """--device cpu --dtype float32 --window 128 --num-windows 3 --lengths 256 --depths 0 1
    --num-passkey 4 --num-recall 3 --num-pairs 4 --num-prompts 3 --num-tokens 12 --num-damage 2
    --num-texts 2 --text-tokens 64 --max-num-seqs 4""".split()


def test_the_command_runs_every_part(model, data, corpus, tmp_path, capsys):
    file = tmp_path / "result.json"
    command = ["--data", data, "--corpus", corpus, "--model", model, "--json", file]
    assert evaluate.main([*map(str, command), *SMALL]) == 1
    result = json.loads(file.read_text())
    assert set(evaluate.PARTS) <= set(result)
    assert result["passkey"]["float32"]["n"] == 4
    assert result["bpb"]["n"] == 2 * 3 and result["position"]["n"] > 8
    assert result["bpb"]["estimate"] > 1  # random weights know less than counts
    assert result["damage"]["num_positions"] == 128
    assert [gate["holds"] for gate in result["gates"]] == [False] * 7
    shown = capsys.readouterr().out
    for gate in result["gates"]:
        assert gate["name"] in shown
    assert list(tmp_path.iterdir()) == [file]


def test_the_command_runs_some_parts_in_some_dtypes(model, data):
    args = evaluate.parse(
        ["--data", str(data), "--model", str(model), *SMALL]
        + ["--only", "recall", "--dtype", "float32", "bfloat16"]
    )
    results = evaluate.evaluate(args, quiet)
    assert set(results) == {"engines", "recall"}
    for dtype, report in results["engines"].items():
        assert report["config"]["dtype"] == dtype and report["counters"]["num_steps"] > 0
    assert {dtype: part["n"] for dtype, part in results["recall"].items()} == {
        "float32": 3,
        "bfloat16": 3,
    }


def test_the_command_succeeds_where_every_gate_holds(model, data, monkeypatch):
    monkeypatch.setattr(evaluate, "evaluate", lambda args, progress: dict(GOOD, bpb={}, position={},
                                                                          passkey={}))  # fmt: skip
    assert evaluate.main(["--data", str(data), "--only", "recall,repetition,damage"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "position", "--window", "4096"], "the longest window has"),
        (["--only", "passkey", "--lengths", "64"], "passkey of 64 tokens"),
        (["--only", "recall", "--kv", "pagd"], "did you mean"),
        (["--only", "damage", "--text-tokens", "99999"], "no document has 99999 tokens"),
        (["--only", "recall", "--json", "no/such/file.json"], "its folder is not there"),
    ],
)
def test_what_a_user_can_mend_is_said_in_a_sentence(model, data, capsys, options, message):
    command = ["--data", str(data), "--model", str(model), *SMALL, *options]
    assert evaluate.main(command) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --corpus"),
        (["--only", "bpb,speed"], "there is no part 'speed'"),
        (["--only", "recall", "--num-recall", "0"], "'0' is not a whole number of 1 or more"),
    ],
)
def test_options_that_make_no_sense_are_refused(capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        evaluate.parse(["--data", "x", *options])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_result_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "result.json"
    records.write(file, {"n": 1})
    with pytest.raises(TypeError):
        records.write(file, {(1, 2): "no key of JSON"})
    assert json.loads(file.read_text()) == {"n": 1}


# ---------------------------------------- the weights that ship

FILES = ("README.md", "core/README.md", "LICENSE", "CHANGELOG.md")  # English, and always there


@pytest.fixture(scope="module")
def shipped():
    with maker(SHIPPED, max_model_len=2048)("paged") as made:
        yield made


@pytest.fixture(scope="module")
def prose(shipped):
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in FILES]
    return filler(shipped, [Document(n, "docs", t) for n, t in zip(FILES, texts, strict=True)])


def test_the_shipped_model_finds_passkeys(shipped, prose):
    """95 %, so two of 40 may be missed."""
    lengths, depths = (512, 768, 1024, 2048), (0.0, 0.25, 0.5, 0.75, 1.0)
    cells, items = passkey_items(pieces_of(shipped), prose, 40, lengths, depths)
    right = exact(shipped, items, quiet, "passkey")
    assert sum(right) >= 38, by_cell(cells, right)


def test_the_shipped_model_recalls_pairs(shipped):
    items = recall_items(pieces_of(shipped), 40)
    assert sum(exact(shipped, items, quiet, "recall")) >= 36


OPENINGS = (
    "The old lighthouse keeper",
    "It was late in the autumn when my uncle came home",
    "She closed the letter and looked out over the garden",
    "Nobody in the village had seen the stranger before",
    "The judge, who was a man of few words,",
    "On the second morning of our journey the horses",
    '"You are not to speak of it," said the doctor,',
    "There lived in that street a clockmaker",
)


def test_the_shipped_model_writes_text_that_moves_on(shipped):
    part = repetition(shipped, list(OPENINGS), 200, 0, quiet)
    assert part["estimate"] <= 0.2, part


def test_the_shipped_model_knows_more_than_letters(shipped, prose):
    """2.5 nats a token would be a byte model's; random weights lose ln 6144, 8.7."""
    assert token_nats(shipped, prose[:1024]).mean() < 5


@pytest.fixture(scope="module")
def short_items(shipped, prose):
    return passkey_items(pieces_of(shipped), prose, 20, (512, 768), (0.1, 0.3, 0.5, 0.7, 0.9))[1]


def test_the_shipped_model_shows_the_damage_of_four_bits(prose, short_items):
    make = maker(SHIPPED, max_model_len=2048)
    part = damage(make, "paged", PerTensorInt4, short_items, [prose[:1024]], quiet)
    assert part["difference"] <= -0.2 or part["mean_kl"] >= 0.1, part
    assert not all(gate.holds for gate in damage_gates({**part, "n": 400, "num_positions": 4096}))


def test_the_shipped_model_bears_int8(prose, short_items):
    make = maker(SHIPPED, max_model_len=2048)
    part = damage(make, "paged", "paged_int8", short_items, [prose[:1024]], quiet)
    assert part["mean_kl"] <= 1e-3, part
    assert part["num_lost"] <= 1, part
