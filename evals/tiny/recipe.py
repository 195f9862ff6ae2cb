"""What the embedded model is and how it is trained: every number in one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evals.tiny.tokenizer import MAX_LENGTH, VOCAB_SIZE

if TYPE_CHECKING:
    from transformers import Qwen3Config

# The one number that decides how long the training takes.
NUM_TOKENS = 2_000_000_000


@dataclass(frozen=True)
class Stage:
    """A part of the training with one length of sequence, in tokens."""

    length: int
    share: float  # of all tokens


@dataclass(frozen=True)
class Recipe:
    """The model and its training. Rates are those at the top of the schedule."""

    seed: int = 1
    num_tokens: int = NUM_TOKENS
    tokens_per_step: int = 131_072
    stages: tuple[Stage, ...] = (
        Stage(1024, 0.45),
        Stage(2048, 0.20),
        Stage(4096, 0.15),
        Stage(8192, 0.20),
    )
    synthetic_share: float = 0.28  # of the sequences, at every length
    answer_weight: float = 3.0  # of a token that can be read off the context; ordinary ones: 1

    # Matrices of the layers: Muon. An update has a root mean square of 0.2 * rate, as AdamW's has.
    muon_rate: float = 6e-3
    muon_momentum: float = 0.95
    muon_decay: float = 0.1
    # Embeddings (tied to the head) and gains: AdamW.
    adam_rate: float = 4e-3
    adam_betas: tuple[float, float] = (0.9, 0.95)
    max_gradient_norm: float = 1.0
    warmup_steps: int = 200
    hold_share: float = 0.35  # of the steps at the full rate; from there in a line to `last_rate`
    last_rate: float = 0.01  # of the full rate

    validation_every: int = 400  # steps
    validation_tokens: int = 32_768  # at every length, of text and of skills
    checkpoint_seconds: float = 60.0

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 256
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 640
    rope_theta: float = 1e6

    def steps(self) -> list[int]:
        """Steps of every stage, one at least."""
        total = self.num_tokens / self.tokens_per_step
        return [max(1, round(total * stage.share)) for stage in self.stages]

    def stage_of(self, step: int) -> int:
        """The index of the stage that a step belongs to; the last one for steps behind the end."""
        for index, count in enumerate(self.steps()):
            if step < count:
                return index
            step -= count
        return len(self.stages) - 1

    def rate(self, step: int) -> float:
        """The share of the full rate at a step: up in a line, level, down in a line."""
        total = sum(self.steps())
        warmup = min(self.warmup_steps, total // 10)
        hold_until = max(warmup, round(total * self.hold_share))
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if step < hold_until:
            return 1.0
        left = max(0, total - step) / max(1, total - hold_until)
        return self.last_rate + (1 - self.last_rate) * left

    def model_config(self, eos_token_id: int) -> Qwen3Config:
        from transformers import Qwen3Config

        return Qwen3Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=eos_token_id,
            attn_implementation="sdpa",
        )
