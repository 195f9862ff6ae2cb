"""What `outweigh gate` times: the same calls in every revision, so only what is old and public."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def replay(sched: str = "fifo", num_requests: int = 60) -> Callable[[], None]:
    """A trace through schedule and cache on a virtual clock: the host's work without a device."""
    from core.batch import Limits
    from core.registry import Registry
    from core.testing.clock import Arrival, VirtualEngine

    offer = Registry().find("sched", sched).load()
    limits = Limits(max_model_len=256, max_num_seqs=16, max_num_batched_tokens=128)
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 100, num_requests).tolist()
    arrivals = [Arrival(i * 0.05, n, 1 + n % 20) for i, n in enumerate(lengths)]

    def call() -> None:
        engine = VirtualEngine(offer(offer.Config()), limits=limits, num_kv_tokens=2048)
        if engine.run(arrivals).stalled:
            raise RuntimeError("the trace does not come to its end")

    return call


def decode(num_sequences: int = 8, num_tokens: int = 8) -> Callable[[], None]:
    """Short prompts and some decode steps of a tiny random model, on whatever device there is."""
    from core import Engine, SamplingParams

    engine = Engine(
        model="random:tiny", max_model_len=128, max_num_seqs=num_sequences,
        max_num_batched_tokens=128, kv_cache_bytes=1 << 22, enable_prefix_caching=False,
    )  # fmt: skip
    prompts = np.random.default_rng(0).integers(3, 200, (num_sequences, 4)).tolist()
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)

    def call() -> None:
        for output in engine.generate(prompts, params):
            if output.error:
                raise RuntimeError(output.error)

    return call
