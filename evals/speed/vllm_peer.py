"""vLLM behind the interface of `evals.speed.peers`; imported only when it is asked for, from the
environment of whoever asks."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import UserError
from evals.speed.peers import TEMPERATURE, News, Peer, Setup, free_memory

if TYPE_CHECKING:
    from torch import Tensor

    from evals.speed.driving import Request


LARGE_BYTES = 256 << 20  # of a tensor: those of a cache, and embeddings
MOST_SHARE = 0.85  # of the device's memory, beside what this process holds already


class Vllm(Peer):
    """vLLM's synchronous engine, its core in this process.

    Options are arguments of `vllm.LLM`; `max_capture` is a shorthand for graphs of up to that many
    tokens. `random:SHAPE` becomes random weights of that shape there too.
    """

    name = "vllm"

    @classmethod
    def check(cls) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise UserError(
                "vLLM is not installed in this environment: install it beside outweigh, put its "
                "folder on PYTHONPATH, or leave --peer vllm out"
            )

    def __init__(self, setup: Setup, max_capture: int | None = None, **options: Any) -> None:
        super().__init__(setup)
        # Before the import: without the first its steps would run in another process.
        for name, value in {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }.items():
            os.environ.setdefault(name, value)
        self._module: Any = importlib.import_module("vllm")
        self.version = self._module.__version__
        self._folder = tempfile.TemporaryDirectory()
        arguments = self._arguments(setup) | options
        if max_capture is not None:
            arguments["cudagraph_capture_sizes"] = capture_sizes(max_capture)
        self._options = arguments
        before = {id(one): one for one in tensors_on(setup.device)}  # held: ids stay theirs
        self._llm: Any = self._module.LLM(**arguments)
        gc.unfreeze()  # it has frozen what it made, which hides that from whoever looks for it
        self._made = [weakref.ref(t) for t in tensors_on(setup.device) if id(t) not in before]
        gc.freeze()
        self._engine: Any = self._llm.llm_engine
        self._kinds: Any = importlib.import_module("vllm.sampling_params").RequestOutputKind

    def _arguments(self, setup: Setup) -> dict[str, Any]:
        from core.loading import EMBEDDED, RANDOM_SHAPES
        from evals.tiny import MODEL

        share = setup.gpu_memory_utilization or MOST_SHARE
        if share > MOST_SHARE and setup.kv_cache_bytes is None:
            raise UserError(
                f"gpu_memory_utilization is {share:g}, and vLLM refuses to start unless that much "
                f"is free, of which this process holds some: give {MOST_SHARE:g} or less, or "
                "--kv-cache-bytes"
            )
        found: dict[str, Any] = {
            "model": MODEL if setup.model == EMBEDDED else setup.model,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "dtype": setup.dtype,
            "seed": setup.seed,
            "max_model_len": setup.max_model_len,
            "max_num_seqs": setup.max_num_seqs,
            "max_num_batched_tokens": setup.max_num_batched_tokens,
            "enable_prefix_caching": setup.enable_prefix_caching,
            "gpu_memory_utilization": share,
        }
        if setup.kv_cache_bytes is not None:  # then that share sizes nothing
            size = int(setup.kv_cache_bytes)
            found |= {"kv_cache_memory_bytes": size, "gpu_memory_utilization": 0.05}
        if setup.model in RANDOM_SHAPES:
            write_config(Path(self._folder.name), RANDOM_SHAPES[setup.model])
            found |= {"model": self._folder.name, "load_format": "dummy"}
        return found

    def _params(self, max_tokens: int, kind: Any) -> Any:
        return self._module.SamplingParams(
            temperature=TEMPERATURE,
            ignore_eos=True,
            max_tokens=max_tokens,
            detokenize=False,
            output_kind=kind,
        )

    def add(self, key: int, prompt: list[int], max_tokens: int) -> None:
        params = self._params(max_tokens, self._kinds.DELTA)
        self._engine.add_request(str(key), {"prompt_token_ids": prompt}, params)

    def step(self) -> list[News]:
        return [
            News(int(one.request_id), sum(len(c.token_ids) for c in one.outputs), one.finished)
            for one in self._engine.step()
        ]

    def pending(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def generate(self, requests: Seq[Request]) -> int:
        """By `LLM.generate`, which makes one output a request, at its end."""
        params = [self._params(r.num_output, self._kinds.FINAL_ONLY) for r in requests]
        prompts = [{"prompt_token_ids": r.prompt} for r in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in outputs)

    def describe(self) -> dict[str, Any]:
        config = self._engine.vllm_config
        chosen = {
            "async_scheduling": config.scheduler_config.async_scheduling,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "cudagraph_capture_sizes": config.compilation_config.cudagraph_capture_sizes,
        }
        return {**super().describe(), "options": self._options, "resolved": chosen}

    def close(self) -> None:
        self._engine.engine_core.shutdown()
        del self._engine, self._llm
        importlib.import_module("vllm.distributed.parallel_state").cleanup_dist_env_and_memory()
        self._folder.cleanup()
        # Its weights and its cache stay referred to by its caches of compiled code, and whoever
        # comes next needs the memory.
        give_back([tensor for made in self._made if (tensor := made()) is not None])
        free_memory()


def tensors_on(device: str) -> list[Tensor]:
    """All plain ones, and parameters, that anything in this process refers to."""
    import torch

    kind = torch.device(device).type
    found: list[Tensor] = [
        one
        for one in gc.get_objects()
        if type(one) is torch.Tensor or issubclass(type(one), torch.nn.Parameter)
    ]
    return [one for one in found if one.device.type == kind]


def give_back(tensors: Seq[Tensor]) -> None:
    """Give the memory of large tensors back, whoever still refers to them.

    Small ones may be in a cache that the next of its engines looks into (tables of rotary
    embeddings are), and what torch was lent by others cannot be given back: these stay.
    """
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() >= LARGE_BYTES and storage.resizable():
            storage.resize_(0)


def capture_sizes(most: int) -> list[int]:
    """Numbers of tokens to capture up to `most`, each at most an eighth above the one before it
    from 64 on."""
    sizes = [1, 2, 4, *range(8, 65, 8)]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + (1 << sizes[-1].bit_length() - 1) // 8)
    return [size for size in sizes if size < most] + [most]


def write_config(folder: Path, shape: Mapping[str, Any]) -> None:
    """A config.json that other engines read: the shape and the class of transformers for it."""
    kind = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[shape["model_type"]]
    content = json.dumps({"architectures": [kind], **shape})
    (folder / "config.json").write_text(content, encoding="utf-8")
