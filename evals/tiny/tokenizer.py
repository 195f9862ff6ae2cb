"""Train the tokeniser of the embedded model: byte-level BPE of 6,144 entries.

    python -m evals.tiny.tokenizer CORPUS.jsonl.xz --out DIR

Every digit is a token of its own, so that a number of five digits is five tokens. Any bytes come
back as they went in. `<|endoftext|>` stands between documents and ends a text; nothing is added to
the front of one, and there is no chat template: the model is a base model.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from evals.arguments import Parser
from evals.tiny.corpus import TOKENIZER_SAMPLE, sample_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 6144
END = "<|endoftext|>"
SPECIALS = [END, "<|im_start|>", "<|im_end|>"]
MAX_LENGTH = 8192

# Words and runs of signs take the space before them along; digits, line ends, wider space do not.
SPLIT = r"'\p{L}{1,2}(?!\p{L})| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+(?!\S)|[^\S\n]+"


def train(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """A tokeniser learned from `texts`; at most `vocab_size` entries, its specials the last."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(SPECIALS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=SPECIALS[1:],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
    )


def main() -> None:
    parser = Parser("evals.tiny.tokenizer", __doc__)
    parser.add_argument("corpus", type=Path, help="documents, one JSON object a line, .xz")
    parser.add_argument("--out", type=Path, required=True, help="folder of the tokeniser")
    options = parser.parse_args()
    tokenizer = train(sample_documents(options.corpus, TOKENIZER_SAMPLE))
    tokenizer.save_pretrained(options.out)
    print(f"{len(tokenizer)} entries in {options.out}")


if __name__ == "__main__":
    main()
