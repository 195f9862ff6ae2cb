"""Every kernel of the plugins, launched at small odd shapes: for tools that watch a device.

    PYTHONPATH=. python tests/plugins/every_kernel.py [kernels] [engine] [graphs]

`kernels` launches each by its wrapper, in bfloat16, at sizes that leave parts of tiles and blocks;
it fails if it has forgotten one. `engine` is a tiny model over every cache, each step launched by
the host, `graphs` the same with every step captured. test_sanitizer.py says what for.

Without a GPU, `kernels` runs in Triton's interpreter (TRITON_INTERPRET=1), in float16. What kernels
compute is not looked at here: other tests do.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from triton.runtime.jit import KernelInterface

import plugins
from core.batch import HostBatch, Limits
from core.testing.interpreter import INTERPRETING, Place, ints, randn
from plugins.kv.kernels.tiles import fill_tiles, tiles_shape

FAR = 1 << 28  # a block id that nothing may follow


# ----------------------------------------------------------------------------------- what there is


def name_of(function: Any) -> str:
    return f"{function.fn.__module__}.{function.fn.__name__}"


def kernels() -> dict[str, Any]:
    """Functions of triton.jit in any module of `plugins` that none of the others calls, by name."""
    found = {}
    for module in pkgutil.walk_packages(plugins.__path__, "plugins."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, KernelInterface):
                found[name_of(value)] = value
    called = set()
    for function in found.values():
        names = function.fn.__code__.co_names
        callees = [function.fn.__globals__.get(name) for name in names]
        called |= {name_of(one) for one in callees if isinstance(one, KernelInterface)}
    return {name: kernel for name, kernel in found.items() if name not in called}


@contextlib.contextmanager
def recorded() -> Iterator[set[str]]:
    """The names of all that is launched until it exits."""
    launched: set[str] = set()

    def recording(run: Callable[..., Any]) -> Callable[..., Any]:
        def recorder(self: Any, *args: Any, **options: Any) -> Any:
            launched.add(name_of(self))
            return run(self, *args, **options)

        return recorder

    with contextlib.ExitStack() as stack:
        for kind in {type(kernel) for kernel in kernels().values()}:
            stack.enter_context(mock.patch.object(kind, "run", recording(kind.run)))
        yield launched


# -------------------------------------------------------------------------------- a cache, and rows


class Rows(NamedTuple):
    """Where the context of every row lies. Blocks are the fewest, and the trash block 0."""

    table: torch.Tensor | None  # [S + 1, W]; wild ids in entries that nobody may follow
    slots: torch.Tensor
    lengths: torch.Tensor
    num_blocks: int
    block_size: int


def rows(place: Place, lengths: list[int], block_size: int | None) -> Rows:
    """Sequences of these lengths in slots of their own; None: contiguous, one block a slot."""
    slots = list(range(len(lengths)))[::-1]
    on_device = ints(place, slots), ints(place, lengths)
    if block_size is None:
        return Rows(None, *on_device, len(lengths), max(lengths))
    table = np.full((len(lengths) + 1, -(-max(lengths) // block_size)), FAR, np.int32)
    table[-1] = 0  # the trash slot
    num_blocks = 1
    for slot, length in zip(slots, lengths, strict=True):
        width = -(-length // block_size)
        table[slot, :width] = range(num_blocks, num_blocks + width)
        num_blocks += width
    return Rows(ints(place, table), *on_device, num_blocks, block_size)


def codes(place: Place, num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int) -> Any:
    """INT8 keys and values, and the scales of both."""
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    k = (randn(place, *shape) * 50).clamp(-127, 127).to(torch.int8)
    scale = torch.full(shape[:3], 0.02, device=place[0])
    return (k, k.transpose(2, 3).contiguous()), (scale, scale.clone())


def floats(place: Place, *shape: int) -> torch.Tensor:
    return randn((place[0], torch.float32), *shape).abs() + 0.1


# --------------------------------------------------------------------------------------- attention

# Query heads, KV heads, head_dim, block size: blocks that tiles hold, that hold tiles, neither.
SHAPES = [(7, 1, 64, 16), (4, 2, 128, 5), (7, 1, 80, 128), (4, 2, 128, None)]
NUM_SPLITS = [(1, 3), (2,), (3,), (3,)]  # for each


def attention(place: Place) -> None:
    for shape, splits in zip(SHAPES, NUM_SPLITS, strict=True):
        decode(place, shape, splits)
        prefill(place, shape)
        fresh(place, shape)
        prefix(place, shape)


def cached(place: Place, shape: tuple[int, int, int, int | None], lengths: list[int]) -> Any:
    """The rows, and calls of both kinds of kernels with what they have in common."""
    num_heads, num_kv_heads, head_dim, block_size = shape
    context = rows(place, lengths, block_size)
    size = (context.num_blocks, num_kv_heads, context.block_size, head_dim)
    static = {"block_size": context.block_size, "scale": head_dim**-0.5}
    given = (context.table, context.slots)

    def launch(plain: Any, int8: Any, q: Any, *rest: Any, **options: Any) -> None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        k, v = randn(place, *size), randn(place, *size, seed=2)
        plain(q, k, v, *given, *rest, out=out, **static, **options)
        if block_size is not None:
            stored = codes(place, context.num_blocks, num_kv_heads, head_dim, block_size)
            factor = floats(place, num_kv_heads, head_dim)
            int8(q, factor, *stored, *given, *rest, out=out, **static, **options)

    return context, launch


def decode(place: Place, shape: tuple[int, int, int, int | None], splits: Iterable[int]) -> None:
    """Four rows decode, one of them empty; the last two are no decodes."""
    from plugins.kv.kernels.decode import decode_attention
    from plugins.kv.kernels.decode_int8 import decode_int8

    context, launch = cached(place, shape, [1, 129, 0, 70, 9, 16])
    q = randn(place, 6, shape[0] + 1, shape[2])[:, 1:]  # strided over tokens
    rest = (context.lengths, ints(place, [4]))
    arrivals = torch.zeros(64, dtype=torch.int32, device=place[0])
    for num_splits in splits:
        options = {"num_rows": 6, "num_splits": num_splits, "arrivals": arrivals}
        launch(decode_attention, decode_int8, q, *rest, **options)
    assert not arrivals.any()


def fresh(place: Place, shape: tuple[int, int, int, int | None]) -> None:
    """Less than a tile, and a part of one behind another."""
    from plugins.kv.kernels.fresh import fresh_attention

    num_heads, num_kv_heads, head_dim, _ = shape
    for num_tokens in (3, 200):
        q = randn(place, num_tokens, num_heads + 1, head_dim)[:, 1:]
        k, v = (randn(place, num_tokens, num_kv_heads, head_dim) for _ in "kv")
        fresh_attention(q, k, v, scale=head_dim**-0.5)


def prefill(place: Place, shape: tuple[int, int, int, int | None]) -> None:
    """A decode row, then chunks with and without a context, and tokens of padding."""
    from plugins.kv.kernels.prefill import prefill_attention
    from plugins.kv.kernels.prefill_int8 import prefill_int8

    num_queries, lengths = np.array([1, 2, 130, 9]), np.array([7, 2, 133, 139], np.int32)
    context, launch = cached(place, shape, lengths.tolist())
    starts = np.concatenate([[0], np.cumsum(num_queries)]).astype(np.int32)
    num_tokens, none = int(starts[-1]), np.zeros(0, np.int32)
    step = HostBatch(num_tokens, 4, 1, none, starts, lengths, none, none)
    size, dtype = tiles_shape(Limits(139, 4, num_tokens + 3))
    tiles = np.zeros(size, dtype)
    fill_tiles(step, tiles)
    q = randn(place, num_tokens + 3, shape[0], shape[2] + 16)[..., : shape[2]]
    rest = (ints(place, starts), context.lengths, ints(place, tiles))
    launch(prefill_attention, prefill_int8, q, *rest)


def prefix(place: Place, shape: tuple[int, int, int, int | None]) -> None:
    """129 positions of the second row, and two parts of the attention of 5 tokens."""
    from plugins.kv.kernels.prefix import gather_prefix, merge_parts

    num_heads, num_kv_heads, head_dim, block_size = shape
    context = rows(place, [1, 129], block_size)
    size = (context.num_blocks, num_kv_heads, context.block_size, head_dim)
    k, v = (randn(place, 129, num_kv_heads, head_dim) for _ in "kv")
    given = (randn(place, *size), randn(place, *size), context.table, context.slots[1:])
    gather_prefix(*given, k, v, block_size=context.block_size)
    out = randn(place, 5, num_heads + 1, head_dim)[:, 1:]
    part = randn(place, 5, num_heads, head_dim)
    merge_parts(out, floats(place, num_heads, 5), part, floats(place, num_heads, 5))


# ----------------------------------------------------------------------------------------- writing


def slot_map(place: Place) -> None:
    """More tokens than a program takes, the last of them padding."""
    from plugins.kv.kernels.slot_map import fill_slot_map

    for block_size in (16, None):
        context = rows(place, [7, 300], block_size)
        positions = ints(place, [*range(7), *range(300), 0, 0])
        token_slots = ints(place, [1] * 7 + [0] * 300 + [2, 2])
        out = torch.empty_like(positions)
        fill_slot_map(positions, token_slots, context.table, context.block_size, out)


def write(place: Place) -> None:
    """21 tokens in blocks from the last place down, and padding in the trash block."""
    from plugins.kv.kernels.write import write_kv
    from plugins.kv.kernels.write_int8 import write_int8

    for num_kv_heads, head_dim, block_size in ((1, 64, 16), (2, 128, 5), (3, 80, 16)):
        num_blocks, packed = -(-21 // block_size) + 1, randn(place, 23, 3 * num_kv_heads, head_dim)
        k, v = packed[:, num_kv_heads : 2 * num_kv_heads], packed[:, 2 * num_kv_heads :]
        last = num_blocks * block_size - 1
        places = ints(place, [*range(last, last - 21, -1), 0, 0])
        size = (num_blocks, num_kv_heads, block_size, head_dim)
        caches = randn(place, *size), randn(place, *size)
        stored = codes(place, num_blocks, num_kv_heads, head_dim, block_size)
        shift, factor = (floats(place, num_kv_heads, head_dim) for _ in "sf")
        for fresh in (None, (randn(place, *k.shape), randn(place, *k.shape))):
            write_kv(k, v, *caches, places, block_size, fresh=fresh)
            write_int8(k, v, shift, factor, *stored, places, block_size, fresh=fresh)


def qk_rope_write(place: Place) -> None:
    """As `write`, of 3 tokens, with norms where Qwen3 has them and without as in Qwen2.5."""
    from plugins.fusion.kernels.qk_rope_write import qk_rope_write
    from plugins.fusion.kernels.qk_rope_write_int8 import qk_rope_write_int8
    from plugins.kv.int8_storage import Int8Sink

    for num_heads, num_kv_heads, head_dim, block_size in ((14, 2, 64, 16), (6, 3, 128, 5)):
        qkv = randn(place, 3, (num_heads + 2 * num_kv_heads) * head_dim + 16)[:, :-16]
        gains = (randn(place, head_dim), randn(place, head_dim)) if head_dim == 128 else None
        turns = (floats(place, 40, head_dim // 2), floats(place, 40, head_dim // 2))
        given = (qkv, gains, *turns, ints(place, [39, 7, 0]))
        places = ints(place, [2 * block_size - 1, block_size, 0])
        size = (2, num_kv_heads, block_size, head_dim)
        caches = randn(place, *size), randn(place, *size)
        (k, v), (k_scale, v_scale) = codes(place, 2, num_kv_heads, head_dim, block_size)
        shift, factor = (floats(place, num_kv_heads, head_dim) for _ in "sf")
        sink = Int8Sink(
            "int8_blocks", k, v, block_size, places, caches, k_scale=k_scale, v_scale=v_scale,
            k_shift=shift, k_factor=factor,
        )  # fmt: skip
        options: dict[str, Any] = {"num_heads": num_heads, "eps": 1e-6}
        scratch = (3, num_kv_heads, head_dim)
        for fresh in (None, (randn(place, *scratch), randn(place, *scratch))):
            qk_rope_write(*given, caches, places, fresh, block_size=block_size, **options)
            qk_rope_write_int8(*given, sink, fresh, **options)


# --------------------------------------------------------------------- norms, products, the sampler


def norms(place: Place) -> None:
    from plugins.fusion.kernels.act_mul import act_mul
    from plugins.fusion.kernels.add_norm import add_norm, embed_norm, norm

    for width in (96, 1000):
        residual, gain = randn(place, 5, width + 8)[:, :width], randn(place, width)
        hidden = randn(place, 5, width)
        add_norm(residual, hidden, gain, 1e-6, hidden)
        norm(residual, gain, 1e-6)
        tokens = ints(place, [9, -1, 0]), ints(place, [0, 1, 0]), ints(place, [FAR, 4])
        embed_norm(*tokens, randn(place, 10, width), gain, 1e-6)
    for width in (5, 1500):
        act_mul(randn(place, 3, 2 * width + 3)[:, : 2 * width])


# Outputs and inputs of a product: less than a tile; a chunk and a part of one; three chunks; 4 rows
# or 16 columns a program, the last ones beyond the weight.
PRODUCTS = [(5, 24), (33, 1500), (130, 2560), (2050, 64)]
ONE_ROW = [
    ["plain"],
    ["bias", "norm bias", "norm", "act", "norm act", "add"],
    ["norm bias", "act"],
    ["add", "norm act"],
]
FEW_ROWS = [["plain"], ["plain", "bias", "act"], ["bias"], ["act"]]


def products(place: Place) -> None:
    from plugins.fusion.kernels.add_norm import add_parts_norm
    from plugins.fusion.kernels.few_rows import few_rows, one_row
    from plugins.fusion.kernels.one_tile import one_tile, one_tile_parts

    for (n, k), for_one, for_few in zip(PRODUCTS, ONE_ROW, FEW_ROWS, strict=True):
        weights = {False: randn(place, n, k), True: randn(place, 2 * n, k)}
        bias, gain = randn(place, n), randn(place, k)
        for kind in for_one:
            residual = randn(place, 1, n) if kind == "add" else None
            one_row(
                randn(place, 1, k), weights["act" in kind], bias if "bias" in kind else None,
                gain_K=gain if "norm" in kind else None, eps=1e-6, act="act" in kind,
                residual_N=residual, out_N=residual,
            )  # fmt: skip
        for kind in for_few:
            x = randn(place, 3, k + 16)[:, :k]
            given = x, weights[kind == "act"], bias if kind == "bias" else None
            few_rows(*given, act=kind == "act")
            one_tile(*given, act=kind == "act")
        for num_rows in (20, 130):
            parts = one_tile_parts(randn(place, num_rows, k + 16)[:, :k], weights[False])
            add_parts_norm(randn(place, num_rows, n), parts, randn(place, n), 1e-6)


def sampler(place: Place) -> None:
    from plugins.fusion.kernels.sample import sample

    keys = ints(place, [[7, -9], [1 << 30, 3], [0, 0]])
    out = torch.empty(3, dtype=torch.int32, device=place[0])
    temperature = torch.tensor([0.0, 0.7, 1.0], device=place[0])
    for num_entries in (100, 6001):
        sample(randn(place, 3, num_entries + 24)[:, :num_entries], temperature, keys, out)


def every_kernel() -> None:
    place: Place = ("cpu", torch.float16) if INTERPRETING else ("cuda", torch.bfloat16)
    for part in (attention, slot_map, write, qk_rope_write, norms, products, sampler):
        part(place)


# --------------------------------------------------------------------------------- as in production


def engine(graphs: str) -> None:
    """A prompt alone and its decodes, then prompts, a chunk of one, and decodes beside each other.

    Raises RuntimeError if a request ends with an error.
    """
    from core import Engine, SamplingParams

    prompts = [[5 + (7 * i + n) % 250 for i in range(n)] for n in (1, 5, 40, 100)]
    params = [
        SamplingParams(max_tokens=4, ignore_eos=True, temperature=temperature, seed=1)
        for temperature in (0.0, 1.0, 0.7, 0.0)
    ]
    for kv in ("contiguous", "paged", "paged_int8"):
        with Engine(
            model="random:tiny", device="cuda", kv=kv, fusion="triton", graphs=graphs,
            max_model_len=160, max_num_seqs=3, max_num_batched_tokens=64, kv_cache_bytes=1 << 22,
        ) as made:  # fmt: skip
            outputs = [*made.generate(prompts[2:3], params[2]), *made.generate(prompts, params)]
        for output in outputs:
            if output.error:
                raise RuntimeError(f"kv {kv}, graphs {graphs}: {output.error}")


def overrun() -> None:
    """A token is stored behind the cache: whoever watches memory has to see it."""
    from plugins.kv.kernels.write import write_kv

    place: Place = ("cuda", torch.bfloat16)
    k, caches = randn(place, 1, 1, 64), [randn(place, 2, 1, 16, 64) for _ in "kv"]
    write_kv(k, k, *caches, ints(place, [2 * 16]), 16)


PARTS: dict[str, Callable[[], None]] = {
    "kernels": every_kernel,
    "engine": lambda: engine("none"),
    "graphs": lambda: engine("full"),
    "overrun": overrun,
}


def main(names: list[str]) -> str | None:
    """None, or what is wrong: with a kernel that `kernels` does not launch."""
    for name in names or ["kernels"]:
        with recorded() as launched:
            PARTS[name]()
            if not INTERPRETING:
                torch.cuda.synchronize()
        known = set(kernels())
        print(f"{name}: launched {len(launched & known)} of {len(known)} kernels", flush=True)
        if name == "kernels" and (forgotten := known - launched):
            return f"never launched: {', '.join(sorted(forgotten))}; give each a launch here"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
