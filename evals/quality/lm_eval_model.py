"""`outweigh` as a model of lm-evaluation-harness (extra `lm-eval`), any kv offer behind it.

    python -m evals.quality.lm_eval_model run --model outweigh --tasks hellaswag \\
        --model_args model=DIR,kv=paged_int8

    lm = OutweighLM(model="DIR", kv="paged_int8", dtype="float32")
    lm_eval.simple_evaluate(model=lm, tasks=["gsm8k"], log_samples=True)

Importing this module registers the model; `model_args` are fields of core.config.RunConfig, and
`kv.block_size=32` sets an option of an offer. What is scored is read through the stored keys and
values, as what is generated is: a loglikelihood over keys of full precision would not see a lossy
cache. Two runs with `log_samples` give pairs, which evals.quality.pairs compares.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from core.errors import UserError, explained
from core.sampling import SamplingParams
from evals.quality.arms import written

if TYPE_CHECKING:
    from torch import Tensor

    from core.engine import Engine

with explained("lm-evaluation-harness is not here", "pip install 'outweigh[lm-eval]' brings it"):
    _models = importlib.import_module("lm_eval.api.model")
    _registry = importlib.import_module("lm_eval.api.registry")
    _rolling = importlib.import_module("lm_eval.utils")

_PREFIX_SHARING = "enable_prefix_caching"
_NEW_TOKENS = 256  # where a task does not say how many
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# Arguments that the harness hands to every model, and that say nothing to an engine.
_OF_HARNESS = ("batch_size", "max_batch_size")


@_registry.register_model("outweigh")
class OutweighLM(_models.TemplateLM):  # type: ignore[misc, name-defined]
    """An engine by what the harness asks of a model. Greedy, unless a task asks for sampling.

    Keyword arguments are fields of RunConfig, or `engine=` one that is there already. A request
    that is longer than the engine's `max_model_len` loses its beginning, as with other models.
    Raises UserError where the model has no text, or a task wants what the engine does not offer.
    """

    def __init__(self, engine: Engine | None = None, **fields: Any) -> None:
        super().__init__()
        self.engine = _built(fields) if engine is None else engine
        if not self.engine.tokenizer.has_text:
            raise UserError("the model has no tokenizer, and tasks are text: add tokenizer.json")
        self.tokenizer = getattr(self.engine.tokenizer, "backend", None)

    # -------- what the harness asks

    @property
    def eot_token_id(self) -> int:
        ends = self.engine.facts.eos_token_ids
        if not ends:
            raise UserError("the model names no end of text: give eos_token_id in its config.json")
        own = getattr(self.tokenizer, "eos_token_id", None)
        return int(ends[0] if own is None else own)

    @property
    def prefix_token_id(self) -> int:
        begin = getattr(self.tokenizer, "bos_token_id", None)
        return self.eot_token_id if begin is None else int(begin)

    @property
    def max_length(self) -> int:
        return int(self.engine.limits.max_model_len)

    @property
    def tokenizer_name(self) -> str:
        return str(self.engine.config.model).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        begin = getattr(self.tokenizer, "bos_token", None)
        if add_special_tokens is None and begin and string.startswith(begin):
            add_special_tokens = False
        if add_special_tokens is None or self.tokenizer is None:
            return self.engine.tokenizer.encode(string)
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        if self.tokenizer is None or not self.tokenizer.chat_template:
            model = self.engine.config.model
            raise UserError(f"{model} has no template for chats: leave --apply_chat_template out")
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(
        self, requests: Seq[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return [self._scored(context, target) for _, context, target in requests]

    def loglikelihood_rolling(self, requests: Seq[Any], disable_tqdm: bool = False) -> list[float]:
        return [self._rolled(request.args[0]) for request in requests]

    def generate_until(self, requests: Seq[Any], disable_tqdm: bool = False) -> list[str]:
        prompts, params = [], []
        for context, wanted in (request.args for request in requests):
            one = self._params(wanted)
            room = self.max_length - one.max_tokens
            if room < 1:
                what = f"{one.max_tokens} new tokens are wanted of max_model_len {self.max_length}"
                raise UserError(f"{what}: raise max_model_len, or lower max_gen_toks")
            prompts.append(self.tok_encode(context)[-room:])
            params.append(one)
        outputs = written(self.engine, prompts, params, lambda *_: None, "lm-eval")
        return [output.text for output in outputs]

    # -------- by the engine

    def _scored(self, context: list[int], target: list[int]) -> tuple[float, bool]:
        """Log-probability of `target` behind `context`, and whether greedy text would be it.

        The last token is predicted and read by nobody, so it needs no room.
        """
        import torch

        ids = [*context, *target][-self.max_length - 1 :]
        first = len(ids) - len(target) - 1  # the position that predicts the first of target
        wanted = torch.tensor(ids[first + 1 :])

        def reduce(start: int, logits: Tensor, _: Tensor) -> tuple[float, bool]:
            lo, hi = max(first, start), start + len(logits)
            if hi <= lo:
                return 0.0, True
            own = logits[lo - start :].float()
            targets = wanted[lo - first : hi - first].to(own.device)
            gained = own.log_softmax(-1).gather(1, targets[:, None])
            return float(gained.double().sum()), bool((own.argmax(-1) == targets).all())

        parts = self.engine.score(ids[:-1], reduce)
        return sum(part for part, _ in parts), all(same for _, same in parts)

    def _rolled(self, text: str) -> float:
        """Of a whole text, in windows that predict each of its tokens once."""
        windows = _rolling.get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        pairs = map(_rolling.make_disjoint_window, windows)
        return sum(self._scored(list(context), list(target))[0] for context, target in pairs)

    def _params(self, wanted: dict[str, Any]) -> SamplingParams:
        given = dict(wanted)
        until = given.pop("until", None) or ()
        stop = (until,) if isinstance(until, str) else tuple(until)
        lengths = [given.pop(name) for name in _LENGTHS if name in given]
        sampled = given.pop("do_sample", None)
        heat = float(given.pop("temperature", 0.0) or 0.0)
        known = {name: given.pop(name) for name in ("top_p", "top_k", "min_p") if name in given}
        if given:
            what = f"a task wants {', '.join(given)} of generation, which is not offered"
            raise UserError(f"{what}: leave it out with --gen_kwargs, or choose another task")
        return SamplingParams(
            max_tokens=int(lengths[0]) if lengths else _NEW_TOKENS,
            temperature=heat if sampled is None or sampled else 0.0,
            stop=tuple(text for text in stop if text),
            **known,
        )


def _built(fields: dict[str, Any]) -> Engine:
    """An engine by RunConfig's fields; those with a dot are options of offers."""
    from core.engine import Engine

    for name in _OF_HARNESS:
        fields.pop(name, None)
    settings = {name: fields.pop(name) for name in list(fields) if "." in name}
    return Engine(**{_PREFIX_SHARING: False, **fields, "settings": settings})


def main() -> None:
    """The harness's own command line, with `outweigh` among its models."""
    importlib.import_module("lm_eval.__main__").cli_evaluate()


if __name__ == "__main__":
    main()
