"""Every kernel compiled for sm_90, as published models in bfloat16 launch it, without a GPU.

The wrappers run on tensors without storage and their launches are recorded instead of made. What
must hold: no spilled registers, shared memory that an SM has, keys and values fetched ahead in
16-byte copies, and prefill on the tensor cores' warp-group instructions. A harmless-looking edit of
an address loses these silently.
"""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton, which is not installed here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 is set: nothing compiles", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime import JITFunction  # noqa: E402

SHARED_BYTES = 227 * 1024  # that one program may have on sm_90
SM_SHARED_BYTES = 228 * 1024  # that an SM has; every program takes 1 KB of it beside its own
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int8: "i8",
}


class Launch(NamedTuple):
    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


class Compiled(NamedTuple):
    name: str
    ptx: str
    shared_bytes: int
    stack_bytes: int
    num_registers: int


@pytest.fixture
def launches(monkeypatch):
    """Launches of kernels from here on are kept in this list."""
    found = []

    def run(self, *args, grid, warmup, **options):
        found.append(Launch(self, args, options))

    monkeypatch.setattr(JITFunction, "run", run)
    return found


def compile_launch(launch, folder):
    """Compile as the launch would, with the same specialisation of arguments."""
    options = dict(launch.options)
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.args[i] if i < len(launch.args) else options.pop(parameter.name)
        kind, may_specialize = None, not parameter.do_not_specialize
        if isinstance(value, torch.Tensor):
            kind = "*" + TYPES[value.dtype]
        elif isinstance(value, float):
            kind, may_specialize = "fp32", False
        elif not parameter.is_constexpr and not (value == 1 and may_specialize):
            kind = "i32" if value < 1 << 31 else "i64"
            may_specialize = may_specialize and value % 16 == 0
        signature[parameter.name] = kind or "constexpr"
        if kind is None:
            constants[parameter.name] = value
        elif may_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    binary = folder / "kernel.cubin"
    binary.write_bytes(made.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)]
    usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return Compiled(
        name=launch.kernel.__name__,
        ptx=made.asm["ptx"],
        shared_bytes=made.metadata.shared,
        stack_bytes=numbers["STACK"] + numbers["LOCAL"],
        num_registers=numbers["REG"],
    )


def compile_all(launches, folder):
    found = [compile_launch(launch, folder) for launch in launches]
    assert found
    for kernel in found:
        print(f"{kernel.name}: {kernel.num_registers} registers, {kernel.shared_bytes} B shared")
        assert kernel.stack_bytes == 0, f"{kernel.name} spills, at {kernel.num_registers} registers"
        assert kernel.shared_bytes <= SHARED_BYTES
    return {kernel.name: kernel for kernel in found}


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape):
    return empty(*shape, dtype=torch.int32)


# Query heads, KV heads, head_dim, block size (None: contiguous): Qwen3-0.6B, Qwen3-4B,
# Qwen2.5-0.5B, Llama-3-8B.
MODELS = [
    (16, 8, 128, 16),
    (32, 8, 128, 256),
    (14, 2, 64, 32),
    (32, 8, 128, None),
    (8, 4, 256, 16),
    (8, 8, 80, 16),
]


def attention(shape, num_tokens):
    num_heads, num_kv_heads, head_dim, block_size = shape
    num_blocks, tokens_a_block = (1000, block_size) if block_size else (257, 4096)
    cache = empty(num_blocks, num_kv_heads, tokens_a_block, head_dim)
    table = ints(257, 300) if block_size else None
    q = empty(num_tokens, num_heads, head_dim)
    return q, cache, cache, table, ints(256), {
        "block_size": tokens_a_block, "scale": head_dim**-0.5, "out": torch.empty_like(q)
    }  # fmt: skip


@pytest.mark.parametrize("num_rows", [1, 256])
@pytest.mark.parametrize("shape", MODELS, ids=str)
def test_decode(launches, tmp_path, shape, num_rows):
    from plugins.kv.kernels.decode import decode_attention

    *given, static = attention(shape, num_rows)
    decode_attention(*given, ints(256), ints(1), num_rows=num_rows, arrivals=ints(512), **static)
    kernels = compile_all(launches, tmp_path)
    assert ("_merge_kernel" in kernels) == (num_rows == 1), "256 rows of two KV heads are one wave"
    decode = kernels["_decode_kernel"]
    assert two_stages_ahead(decode.ptx)
    assert 3 * (decode.shared_bytes + 1024) <= SM_SHARED_BYTES, (
        "fewer than three programs share an SM"
    )


@pytest.mark.parametrize("shape", MODELS, ids=str)
def test_decode_where_the_last_program_merges(launches, tmp_path, shape):
    """One arrival a program, and parts that are read past L1."""
    from plugins.kv.kernels.decode import decode_attention

    *given, static = attention(shape, 8)
    options = {**static, "arrivals": ints(512), "num_splits": 13}
    decode_attention(*given, ints(256), ints(1), num_rows=8, **options)
    (decode,) = compile_all(launches, tmp_path).values()
    assert two_stages_ahead(decode.ptx)
    assert 3 * (decode.shared_bytes + 1024) <= SM_SHARED_BYTES
    _, _, behind = decode.ptx.partition("atom.global.gpu.acq_rel.add")
    assert "ld.global.cg" in behind and "ld.global.cg" not in decode.ptx[: -len(behind)]
    assert "atom" not in behind


@pytest.mark.parametrize("num_tokens", [128, 512])
@pytest.mark.parametrize("shape", MODELS, ids=str)
def test_fresh(launches, tmp_path, shape, num_tokens):
    from plugins.kv.kernels.fresh import fresh_attention

    num_heads, num_kv_heads, head_dim, _ = shape
    k = empty(num_tokens, num_kv_heads, head_dim)
    fresh_attention(empty(num_tokens, num_heads, head_dim), k, k, scale=1.0)
    (fresh,) = compile_all(launches, tmp_path).values()
    assert "wgmma.mma_async" in fresh.ptx and "griddepcontrol.wait" in fresh.ptx
    assert fresh.shared_bytes <= SHARED_BYTES
    assert "cp.async.cg" in fresh.ptx


@pytest.mark.parametrize("shape", MODELS, ids=str)
def test_prefill(launches, tmp_path, shape):
    from plugins.kv.kernels.prefill import prefill_attention

    *given, static = attention(shape, 8192)
    prefill_attention(*given, ints(257), ints(256), ints(318, 2), **static)
    prefill = compile_all(launches, tmp_path)["_prefill_kernel"]
    assert two_stages_ahead(prefill.ptx)
    assert "wgmma.mma_async" in prefill.ptx


# In tiles of 8 KB, blocks that are contained, contain, and do neither; up to 16 heads a group.
INT8_MODELS = [
    *(shape for shape in MODELS if shape[3]),
    (16, 1, 128, 16),
    (7, 1, 128, 5),
    (4, 4, 64, 8),
    (4, 4, 64, 1),
]


def int8_attention(shape, num_tokens, dtype=torch.bfloat16):
    """As `attention`, codes and scales of keys and values beside the factor of keys."""
    num_heads, num_kv_heads, head_dim, block_size = shape
    q = empty(num_tokens, num_heads, head_dim, dtype=dtype)
    codes = (
        empty(1000, num_kv_heads, block_size, head_dim, dtype=torch.int8),
        empty(1000, num_kv_heads, head_dim, block_size, dtype=torch.int8),
    )
    scale = empty(1000, num_kv_heads, block_size, dtype=torch.float32)
    factor = empty(num_kv_heads, head_dim, dtype=torch.float32)
    static = {"block_size": block_size, "scale": head_dim**-0.5, "out": torch.empty_like(q)}
    return q, factor, codes, (scale, scale), ints(257, 300), ints(256), static


@pytest.mark.parametrize("num_rows", [1, 8, 256])
@pytest.mark.parametrize("shape", INT8_MODELS, ids=str)
def test_decode_int8(launches, tmp_path, shape, num_rows):
    """Keys meet queries as INT8; no byte is loaded alone, neither from memory nor from shared."""
    from plugins.kv.kernels.decode_int8 import decode_int8

    *given, static = int8_attention(shape, num_rows)
    if num_rows == 8:
        static |= {"arrivals": ints(512), "num_splits": 13}
    decode_int8(*given, ints(256), ints(1), num_rows=num_rows, **static)
    decode = compile_all(launches, tmp_path)["_decode_int8_kernel"]
    assert ("atom.global.gpu.acq_rel.add" in decode.ptx) == (num_rows == 8)
    assert "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32" in decode.ptx
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in decode.ptx
    assert "ld.shared.b8" not in decode.ptx and "ld.shared.u8" not in decode.ptx
    assert 3 * (decode.shared_bytes + 1024) <= SM_SHARED_BYTES
    # Two warps a program.
    assert 3 * 64 * decode.num_registers <= 1 << 16, "fewer than three programs share an SM"
    if shape[3] % 16 == 0:
        assert not re.search(r"ld\.global[.\w]*\.[bsu]8\b", decode.ptx)
        assert wide_copies(decode.ptx) >= 24, "keys and values come in 16-byte copies"
        assert pending_copies(decode.ptx) >= 4, "a tile's two codes and two scales are in flight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_int8_in_every_dtype(launches, tmp_path, head_dim, dtype):
    from plugins.kv.kernels.decode_int8 import decode_int8
    from plugins.kv.kernels.prefill_int8 import prefill_int8

    *given, static = int8_attention((8, 4, head_dim, 16), 256, dtype)
    decode_int8(*given, ints(256), ints(1), num_rows=256, **static)
    prefill_int8(*given, ints(257), ints(256), ints(318, 2), **static)
    compile_all(launches, tmp_path)


@pytest.mark.parametrize("shape", INT8_MODELS, ids=str)
def test_prefill_int8(launches, tmp_path, shape):
    from plugins.kv.kernels.prefill_int8 import prefill_int8

    *given, static = int8_attention(shape, 8192)
    prefill_int8(*given, ints(257), ints(256), ints(318, 2), **static)
    prefill = compile_all(launches, tmp_path)["_prefill_int8_kernel"]
    assert "wgmma.mma_async" in prefill.ptx
    if shape[3] % 16 == 0:
        assert wide_copies(prefill.ptx) >= 12 and pending_copies(prefill.ptx) >= 4


@pytest.mark.parametrize("has_fresh", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_write_int8(launches, tmp_path, head_dim, has_fresh):
    """Divisions as torch's: codes depend on the last bit."""
    from plugins.kv.kernels.write_int8 import write_int8

    heads = empty(8192, 32, head_dim)
    _, factor, codes, scales, *_ = int8_attention((32, 8, head_dim, 16), 1)
    fresh = (empty(8192, 8, head_dim), empty(8192, 8, head_dim)) if has_fresh else None
    given = (heads[:, 16:24], heads[:, 24:], factor, factor, codes, scales)
    write_int8(*given, ints(8192), 16, fresh=fresh)
    ptx = compile_all(launches, tmp_path)["_write_int8_kernel"].ptx
    assert "div.rn.f32" in ptx and "div.full.f32" not in ptx and "rcp.approx" not in ptx


def wide_copies(ptx):
    """Copies of 16 bytes into shared memory."""
    return len(re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", ptx))


def pending_copies(ptx):
    """Groups of them that stay outstanding when the first is used."""
    return max(int(n) for n in re.findall(r"cp\.async\.wait_group\s+(?:0x)?(\d+)", ptx))


def two_stages_ahead(ptx):
    """Some of the 16-byte copies into shared memory stay outstanding when the first is used."""
    return wide_copies(ptx) >= 12 and pending_copies(ptx) >= 2


@pytest.mark.parametrize("has_fresh", [False, True])
def test_write_and_slot_map(launches, tmp_path, has_fresh):
    from plugins.kv.kernels.slot_map import fill_slot_map
    from plugins.kv.kernels.write import write_kv

    heads, cache = empty(8192, 32, 128), empty(1000, 8, 16, 128)
    fresh = (empty(8192, 8, 128), empty(8192, 8, 128)) if has_fresh else None
    write_kv(heads[:, 16:24], heads[:, 24:], cache, cache, ints(8192), 16, fresh=fresh)
    fill_slot_map(ints(8192), ints(8192), ints(257, 300) if has_fresh else None, 16, ints(8192))
    kernels = compile_all(launches, tmp_path)
    assert "st.global.v4" in kernels["_write_kernel"].ptx


@pytest.mark.parametrize("shape", MODELS, ids=str)
def test_prefix(launches, tmp_path, shape):
    from plugins.kv.kernels.prefix import gather_prefix, merge_parts

    q, cache, _, table, slots, given = attention(shape, 1024)
    keys, sums = empty(3072, *cache.shape[1::2]), empty(shape[0], 1024, dtype=torch.float32)
    gather_prefix(cache, cache, table, slots, keys, keys, block_size=given["block_size"])
    merge_parts(q, sums, q, sums)
    for kernel in compile_all(launches, tmp_path).values():
        assert "ld.global.v4" in kernel.ptx and "st.global.v4" in kernel.ptx


@pytest.mark.parametrize("width", [896, 1024, 2560, 4096, 8192])
def test_norms(launches, tmp_path, width):
    from plugins.fusion.kernels.add_norm import add_norm, embed_norm

    x, gain = empty(8192, width), empty(width)
    add_norm(x, x, gain, 1e-6, x)
    embed_norm(ints(8192), ints(8192), ints(257), empty(151936, width), gain, 1e-6)
    kernels = compile_all(launches, tmp_path)
    assert all("ld.global.v4" in kernel.ptx for kernel in kernels.values())


def test_act_mul(launches, tmp_path):
    from plugins.fusion.kernels.act_mul import act_mul

    act_mul(empty(8192, 2 * 3072))
    assert "ld.global.v4" in compile_all(launches, tmp_path)["_act_mul_kernel"].ptx


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("shape", [(16, 8, 128), (32, 8, 128), (14, 2, 64)], ids=str)
def test_qk_rope_write(launches, tmp_path, shape, has_norm):
    from plugins.fusion.kernels.qk_rope_write import qk_rope_write

    num_heads, num_kv_heads, head_dim = shape
    cache = empty(1000, num_kv_heads, 16, head_dim)
    angles = empty(4096, head_dim // 2, dtype=torch.float32)
    gains = (empty(head_dim), empty(head_dim)) if has_norm else None
    fresh = (empty(8192, num_kv_heads, head_dim), empty(8192, num_kv_heads, head_dim))
    qkv = empty(8192, (num_heads + 2 * num_kv_heads) * head_dim)
    qk_rope_write(
        qkv, gains, angles, angles, ints(8192), (cache, cache), ints(8192), fresh,
        num_heads=num_heads, block_size=16, eps=1e-6,
    )  # fmt: skip
    ptx = compile_all(launches, tmp_path)["_qk_rope_write_kernel"].ptx
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx
    assert not re.search(r"fma\.rn(\.ftz)?\.bf16", ptx), "a product of rope lost its rounding"


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("shape", [(16, 8, 128), (32, 8, 128), (14, 2, 64)], ids=str)
def test_qk_rope_write_int8(launches, tmp_path, shape, has_norm):
    from plugins.fusion.kernels.qk_rope_write_int8 import qk_rope_write_int8
    from plugins.kv.int8_storage import Int8Sink

    num_heads, num_kv_heads, head_dim = shape
    _, factor, codes, scales, *_ = int8_attention((*shape, 16), 1)
    angles = empty(4096, head_dim // 2, dtype=torch.float32)
    gains = (empty(head_dim), empty(head_dim)) if has_norm else None
    fresh = (empty(8192, num_kv_heads, head_dim), empty(8192, num_kv_heads, head_dim))
    sink = Int8Sink(
        "int8_blocks", *codes, 16, ints(8192), fresh, k_scale=scales[0], v_scale=scales[1],
        k_shift=factor, k_factor=factor,
    )  # fmt: skip
    qkv = empty(8192, (num_heads + 2 * num_kv_heads) * head_dim)
    qk_rope_write_int8(
        qkv, gains, angles, angles, ints(8192), sink, fresh, num_heads=num_heads, eps=1e-6
    )
    ptx = compile_all(launches, tmp_path)["_qk_rope_write_int8_kernel"].ptx
    assert "ld.global.v4" in ptx and "div.rn.f32" in ptx
    assert ptx.count("div.full.f32") == 2 * has_norm, "only the mean of squares need not be exact"
    assert not re.search(r"fma\.rn(\.ftz)?\.bf16", ptx), "a product of rope lost its rounding"


def test_sample(launches, tmp_path):
    from plugins.fusion.kernels.sample import sample

    sample(empty(256, 151936), empty(256, dtype=torch.float32), ints(256, 2), ints(256))
    assert "ld.global.v4" in compile_all(launches, tmp_path)["_scores_kernel"].ptx


# Hidden width, query width, packed qkv width, width of the MLP: Qwen3-0.6B, Qwen3-4B, Qwen2.5-0.5B.
WIDTHS = [(1024, 2048, 4096, 3072), (2560, 4096, 6144, 9728), (896, 896, 1152, 4864)]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_few_rows(launches, tmp_path, widths):
    """Weights are loaded in 16-byte pieces, the first of them ahead of the wait."""
    from plugins.fusion.kernels.few_rows import few_rows, one_row

    hidden, query, qkv, inner = widths
    for num_rows in (1, 8):
        x = empty(num_rows, hidden)
        few_rows(x, empty(qkv, hidden), empty(qkv))
        few_rows(empty(num_rows, query), empty(hidden, query))
        few_rows(x, empty(2 * inner, hidden), act=True)
        few_rows(empty(num_rows, inner), empty(hidden, inner))
    x, gain = empty(1, hidden), empty(hidden)
    one_row(x, empty(qkv, hidden), empty(qkv), gain_K=gain)
    one_row(empty(1, query), empty(hidden, query), residual_N=x, out_N=x)
    one_row(x, empty(2 * inner, hidden), gain_K=gain, act=True)
    one_row(empty(1, inner), empty(hidden, inner), residual_N=x, out_N=x)
    for kernel in [compile_launch(launch, tmp_path) for launch in launches]:
        print(f"{kernel.name}: {kernel.num_registers} registers, {kernel.shared_bytes} B shared")
        assert kernel.stack_bytes == 0 and kernel.shared_bytes <= SHARED_BYTES
        ahead, wait, _ = kernel.ptx.partition("griddepcontrol.wait")
        assert wait and "griddepcontrol.launch_dependents" in ahead
        assert "ld.global.v4" in ahead


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_one_tile(launches, tmp_path, widths):
    """By Hopper's tensor cores, pipelined; weights are sent for ahead of the wait."""
    from plugins.fusion.kernels.one_tile import SHARED_BYTES, one_tile, one_tile_parts

    hidden, query, qkv, inner = widths
    x = empty(64, hidden)
    one_tile(x, empty(qkv, hidden), empty(qkv))
    one_tile(x, empty(2 * inner, hidden), act=True)
    one_tile_parts(empty(64, query), empty(hidden, query))
    one_tile_parts(empty(64, inner), empty(hidden, inner))
    for num_rows in (128, 256):
        one_tile_parts(empty(num_rows, query), empty(hidden, query))
        one_tile_parts(empty(num_rows, inner), empty(hidden, inner))
    for kernel in [compile_launch(launch, tmp_path) for launch in launches]:
        print(f"{kernel.name}: {kernel.num_registers} registers, {kernel.shared_bytes} B shared")
        assert kernel.stack_bytes == 0 and kernel.shared_bytes <= SHARED_BYTES
        ahead, wait, behind = kernel.ptx.partition("griddepcontrol.wait")
        assert wait and "prefetch.global.L2" in ahead and "ld.global" not in ahead
        is_one_step = kernel.shared_bytes < SHARED_BYTES // 2
        assert "wgmma" in behind and (is_one_step or "cp.async.cg" in behind)
