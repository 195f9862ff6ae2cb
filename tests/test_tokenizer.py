"""core/tokenizer.py: text to ids and back, and streams that lose nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from pathlib import Path

import pytest

from core.errors import UserError
from core.testing.tiny import VOCAB_SIZE, save_tokenizer
from core.tokenizer import (
    ByteTokenizer,
    HFTokenizer,
    NoTokenizer,
    Tokenizer,
    load_tokenizer,
)


class Stream:
    """One incremental decoder, by the names of what is done with it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.incremental()

    def push(self, ids: Seq[int]) -> str:
        return self._decode(ids, False)

    def flush(self) -> str:
        return self._decode((), True)


TEXTS = (
    "",
    "The quick brown fox.",
    "  two spaces, a tab\t, a line\nend ",
    "Grüße, Καλημέρα, привет, 你好，世界",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 👍🏽 and combining é ñ",
    "<tool> ends <|end|> here",
)


def save_sentencepiece_like(path: Path) -> None:
    """A tokenizer with ▁ for spaces, byte fallback and a BOS, as Llama 2 and Mistral have."""
    from tokenizers import Tokenizer as Pipeline, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += list("▁abcdefghijklmnopqrstuvwxyz.,é你") + ["▁t", "th", "he", "▁th", "▁the"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("t", "h"), ("h", "e"), ("▁t", "h"), ("▁th", "e")]
    pipeline = Pipeline(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    pipeline.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    pipeline.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    pipeline.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=pipeline, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(path)


def save_added_tokens(path: Path) -> None:
    """Added tokens that byte-level BPE could take for bytes: é is a character of its alphabet."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["<é>", "<outil é>", "→", "ÿ"])
    tokenizer.save_pretrained(path)


def save_wordpiece(path: Path) -> None:
    """A tokenizer whose decoder is neither byte-level nor has byte fallback."""
    from tokenizers import Tokenizer as Pipeline, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["[UNK]", "[SEP]", *"abcdefgh.,'", *(f"##{letter}" for letter in "abcdefgh")]
    pipeline = Pipeline(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pipeline.decoder = decoders.WordPiece(cleanup=False)
    PreTrainedTokenizerFast(
        tokenizer_object=pipeline, unk_token="[UNK]", sep_token="[SEP]"
    ).save_pretrained(path)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    save_tokenizer(root / "byte-level", " ".join(TEXTS))
    save_added_tokens(root / "byte-level")
    save_sentencepiece_like(root / "sentencepiece")
    save_wordpiece(root / "wordpiece")
    named: dict[str, Tokenizer] = {p.name: load_tokenizer(p) for p in root.iterdir()}
    return named | {"bytes": ByteTokenizer()}


NAMES = ("byte-level", "sentencepiece", "wordpiece", "bytes")


def in_pieces(ids: Seq[int], rng: random.Random) -> Iterator[Seq[int]]:
    at = 0
    while at < len(ids):
        width = rng.choice((1, 1, 1, 2, 7))
        yield ids[at : at + width]
        at += width


def streamed(tokenizer: Tokenizer, ids: Seq[int], rng: random.Random) -> str:
    stream = Stream(tokenizer)
    return "".join([*map(stream.push, in_pieces(ids, rng)), stream.flush()])


@pytest.mark.parametrize("name", ["byte-level", "bytes"])
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(name: str, text: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    expected = text.replace("<|end|>", "") if name == "byte-level" else text
    assert tokenizer.decode(tokenizer.encode(text)) == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_of_text_is_its_decoding(
    name: str, text: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(text)
    for seed in range(5):
        assert streamed(tokenizer, ids, random.Random(seed)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_of_gibberish_is_its_decoding(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    # All ids, special and unknown ones among them: half-characters in every combination.
    tokenizer, rng = tokenizers[name], random.Random(0)
    for _ in range(300):
        ids = rng.choices(range(VOCAB_SIZE + 30), k=rng.randrange(40))
        assert streamed(tokenizer, ids, rng) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "bytes"])
def test_streams_of_raw_bytes_are_their_decoding(
    name: str, tokenizers: dict[str, Tokenizer]
) -> None:
    # Bytes around the edges of UTF-8: surrogates, overlong forms, beyond U+10FFFF.
    tokenizer, rng = tokenizers[name], random.Random(1)
    edges = [0x41, 0x80, 0xA0, 0xBF, 0xC0, 0xC3, 0xE0, 0xE4, 0xED, 0xF0, 0xF4, 0xF5, 0xFF, 0x9F]
    if name == "bytes":
        spelled = {byte: byte for byte in edges}
    elif name == "sentencepiece":
        spelled = {byte: 3 + byte for byte in edges}
    else:
        assert isinstance(tokenizer, HFTokenizer)
        by_bytes = {tokenizer._piece(token_id): token_id for token_id in range(VOCAB_SIZE)}
        spelled = {byte: by_bytes[bytes((byte,))] for byte in edges}
    for _ in range(500):
        ids = [spelled[byte] for byte in rng.choices(edges, k=rng.randrange(1, 9))]
        assert streamed(tokenizer, ids, rng) == tokenizer.decode(ids)


def test_what_is_undecided_is_held_back(tokenizers: dict[str, Tokenizer]) -> None:
    stream = Stream(tokenizers["bytes"])
    thumb = list("👍".encode())
    assert [stream.push([byte]) for byte in thumb] == ["", "", "", "👍"]
    assert stream.push([*thumb[:2], 65]) == "�A"
    assert stream.push(thumb[:3]) == "" and stream.flush() == "�"

    # A run of byte tokens is judged as a whole, so it comes out when it has ended.
    sentencepiece = tokenizers["sentencepiece"]
    ids = sentencepiece.encode("the 👍 he")
    stream = Stream(sentencepiece)
    deltas = [stream.push([token_id]) for token_id in ids]
    assert deltas == ["", "t", "he", " ", "", "", "", "", "👍 ", "he"] and stream.flush() == ""


def test_byte_ids_beyond_a_byte_show_as_replacement_characters() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.has_text
    assert tokenizer.decode([104, 105, 256, 150000, 33]) == "hi��!"
    assert tokenizer.encode("hé") == [104, 195, 169]


def test_hugging_face_ids_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for save in (save_tokenizer, save_sentencepiece_like):
        path = tmp_path / save.__name__
        save(path)
        ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(path)
        assert ours.has_text
        for text in TEXTS:
            ids = theirs(text).input_ids
            assert ours.encode(text) == ids
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", NAMES)
def test_streaming_costs_the_same_at_any_length(
    name: str, tokenizers: dict[str, Tokenizer]
) -> None:
    # Undecided tails are the trap: one that is decoded again at every token is quadratic.
    tokenizer, rng = tokenizers[name], random.Random(2)
    ids = rng.choices(range(3, VOCAB_SIZE), k=8000)
    if name == "sentencepiece":
        ids = [3 + byte for byte in rng.choices(range(256), k=8000)]  # one run of byte tokens
    streamed(tokenizer, ids[:1000], rng)

    def seconds(length: int) -> float:
        started = time.process_time()
        streamed(tokenizer, ids[:length], rng)
        return time.process_time() - started

    short, long = (min(seconds(length) for _ in range(5)) for length in (1000, 8000))
    assert long < 24 * short + 0.02, "8 times the tokens; quadratic would be 64 times the work"


def test_a_directory_without_tokenizer_files_still_takes_ids(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, NoTokenizer)
    assert not tokenizer.has_text
    assert tokenizer.decode([1, 2]) == "" == streamed(tokenizer, [1, 2, 3], random.Random(0))
    with pytest.raises(UserError, match="no tokenizer files.*pass token ids"):
        tokenizer.encode("text")


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer files of .* cannot be read") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("save", [save_tokenizer, save_sentencepiece_like])
def test_a_chat_is_one_message_of_the_user(save: Callable[[Path], None], tmp_path: Path) -> None:
    save(tmp_path)
    assert load_tokenizer(tmp_path).chat("the fox") is None
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, HFTokenizer)
    bos = tokenizer.backend.bos_token or ""
    expected = tokenizer.backend(
        f"{bos}<user>the fox<end><assistant>", add_special_tokens=False
    ).input_ids
    assert tokenizer.chat("the fox") == expected
    assert expected[0] == 1 or not bos, "one BOS, and no second one"


def test_what_has_no_template_has_no_chat(tmp_path: Path) -> None:
    assert ByteTokenizer().chat("text") is None
    assert load_tokenizer(tmp_path).chat("text") is None


def test_a_broken_chat_template_is_named(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('only in pairs') }}")
    with pytest.raises(UserError, match="only in pairs.*--no-chat-template"):
        load_tokenizer(tmp_path).chat("text")
