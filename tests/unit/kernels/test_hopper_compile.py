"""The Hopper kernels compiled for sm_90 without a card: registers, spills, shared memory, and wgmma that overlap."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs triton with Gluon for Hopper")

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from dbsp_megatron.kernels.block_sparse_attention.hopper_backward import backward_kernel
from dbsp_megatron.kernels.block_sparse_attention.hopper_forward import forward_kernel
from dbsp_megatron.kernels.block_sparse_attention.hopper_launch import backward_config, forward_config

SHARED_OF_A_MULTIPROCESSOR = 228 * 1024
SHARED_RESERVED = 1024
"""Bytes that a CTA takes of it beside its own."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One kernel as a launch would compile it."""

    backward: bool = False
    dim: int = 128
    block_q: int = 128
    block_k: int = 128
    dtype: str = "bf16"
    index: str = "i16"
    listed: bool = True
    """False: every block is dense and nothing is listed."""
    shared: bool = False
    tail: bool = True
    """The last k-block may be short (backward pass only)."""
    grads: str = "fp32"
    """Type of dk and dv."""
    resume: bool = False
    kv_index: bool = False
    """A table of kv heads is given."""
    q_range: bool = False
    runs: bool = False
    """Programs have some tiles in a row, as inside `giving_way`."""
    grouped: bool = False
    """Several query heads share a kv head (backward pass only: there the kernel differs)."""

    def __str__(self) -> str:
        options = [
            name for name in ("resume", "kv_index", "q_range", "grouped", "shared", "runs") if getattr(self, name)
        ]
        direction = "backward" if self.backward else "forward"
        options += [] if self.listed else ["dense"]
        options += [] if self.tail else ["whole blocks"]
        kind = f"{self.dtype} {self.index} {self.grads}"
        return f"{direction} D{self.dim} {self.block_q}x{self.block_k} {kind} {' '.join(options)}"


@dataclass(frozen=True)
class Usage:
    """What the assembler says of a kernel."""

    registers: int
    stack: int
    shared: int
    num_products: int
    num_waits: int
    sass: str
    ptx: str


def _descriptor(dtype: str, block: list[int], layout: Any = None) -> str:
    kind = {"bf16": gl.bfloat16, "fp16": gl.float16}.get(dtype)
    layout = gl.NVMMASharedLayout.get_default_for(block, kind) if layout is None else layout
    return f"tensordesc<{dtype}{block},{layout!r}>".replace(", ", ",", len(block) - 1)


def _forward_arguments(variant: Variant) -> tuple[dict[str, str], dict[str, Any], int]:
    config = forward_config(variant.dim, variant.block_q, variant.block_k)
    tile = [1, 1, 64, config.dim]
    keys = _descriptor(variant.dtype, [1, 1, variant.block_k, config.dim])
    types = {"q_desc": _descriptor(variant.dtype, tile), "k_desc": keys, "v_desc": keys, "lse": "*fp32", "sc2": "fp32"}
    if variant.resume:
        state = gl.NVMMASharedLayout.get_default_for(tile, gl.float32)
        types |= {"out": "*fp32", "state_desc": _descriptor("fp32", tile, state)}
    else:
        types["out_desc"] = _descriptor(variant.dtype, tile)
    types |= {"kv_index": "*i64"} if variant.kv_index else {}
    types |= {"q_range": "*i32"} if variant.q_range else {}
    constants = {
        "D": config.dim,
        "DV": variant.dim,
        "KB": variant.block_k,
        "NB": config.blocks_per_tile,
        "NWG": config.num_consumers,
        "NQ": config.num_q_stages,
        "NSLOT": config.num_slots,
        "SHARED": variant.shared,
    }
    return types, constants, config.max_registers


def _backward_arguments(variant: Variant) -> tuple[dict[str, str], dict[str, Any], int]:
    config = backward_config(variant.dim, variant.block_q, variant.block_k)
    tile = _descriptor(variant.dtype, [1, 1, 64, config.dim])
    row = _descriptor("fp32", [64], gl.NVMMASharedLayout(0, 32, 1))
    part = [config.dim // config.num_consumers // 2, 128]
    types = {
        **dict.fromkeys(("q_desc", "do_desc"), tile),
        "v_desc": _descriptor(variant.dtype, [1, 1, 64, config.dim]),
        "k_desc": _descriptor(variant.dtype, [1, 1, 64 * config.num_consumers, config.dim]),
        **dict.fromkeys(("lse_desc", "delta_desc"), row),
        "dq_desc": _descriptor("fp32", part, gl.NVMMASharedLayout(0, 32, 2)),
        "dq_sums": "*fp32",
        **dict.fromkeys(("dk", "dv"), f"*{variant.grads}"),
        **dict.fromkeys(("sc", "sc2"), "fp32"),
    }
    types |= {"first": "*i32", "heads": "*i32"} if variant.kv_index else {}
    constants = {
        "D": config.dim,
        "DV": variant.dim,
        "NST": config.num_slots,
        "NWG": config.num_consumers,
        "KEYS": variant.block_k,
        "NSUB": config.blocks_per_tile,
        "GROUPED": variant.grouped or variant.kv_index,
        "SHARED": variant.shared,
        "TAIL": variant.tail,
    }
    return types, constants, config.max_registers


def compile_variant(variant: Variant) -> Usage:
    """Compile for sm_90; arguments without a type here and no constant are sizes and strides, or absent tensors."""
    kernel = backward_kernel if variant.backward else forward_kernel
    types, constants, registers = (_backward_arguments if variant.backward else _forward_arguments)(variant)
    types |= {"count": "*i32", "order": "*i32"} | ({"index": f"*{variant.index}"} if variant.listed else {})
    sizes = {param.name for param in kernel.params if param.do_not_specialize}
    types |= dict.fromkeys(sizes, "i32")
    if not variant.runs:
        types |= {"next_tile": "*i32"}
        del types["run"]
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    constants = {name: constants.get(name) for name, kind in signature.items() if kind == "constexpr"}
    source = GluonASTSource(kernel, signature, constants)
    options = {"num_warps": 4, "maxnreg": registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage, sass = (
            subprocess.run([tool, flag, cubin.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return Usage(
        registers=int(found[1]),
        stack=int(found[2]),
        shared=compiled.metadata.shared,
        num_products=sass.count("HGMMA"),
        num_waits=sass.count("WARPGROUP.DEPBAR"),
        sass=sass,
        ptx=compiled.asm["ptx"],
    )


BACKWARD_SHARED = {(128, 128): 231_568, (128, 64): 108_012, (64, 128): 99_820, (64, 64): 58_860}
"""Bytes by columns and k-block: K, V, stages of Q and dO, dS^T, dQ where TMA adds it; the rest is below 2.5 KiB."""
BLOCKS = [(128, 128), (64, 64), (128, 64), (64, 128)]
FORWARD = [
    *(Variant(block_q=block_q, block_k=block_k) for block_q, block_k in BLOCKS),
    *(Variant(block_q=block_q, block_k=block_k, resume=True) for block_q, block_k in BLOCKS[:3]),
    Variant(dtype="fp16", kv_index=True, q_range=True, index="i32", shared=True),
    Variant(listed=False),
    Variant(block_q=64, block_k=64, kv_index=True, q_range=True, resume=True),
    Variant(dim=64),
    Variant(dim=64, block_q=64, block_k=64, resume=True),
    Variant(dim=96, resume=True),
    *(
        Variant(block_q=block, block_k=block, runs=True, resume=resume)
        for block in (128, 64)
        for resume in (False, True)
    ),
    Variant(dim=72),
    Variant(dim=40, block_q=64, block_k=64),
]
BACKWARD = [
    *(Variant(backward=True, block_q=block_q, block_k=block_k) for block_q, block_k in BLOCKS),
    Variant(backward=True, dtype="fp16", index="i32", grads="fp16", shared=True),
    Variant(backward=True, grads="bf16", tail=False),
    Variant(backward=True, block_q=64, block_k=64, grads="bf16", tail=False),
    Variant(backward=True, listed=False),
    Variant(backward=True, grouped=True),
    Variant(backward=True, block_q=64, block_k=64, grouped=True),
    Variant(backward=True, kv_index=True),
    Variant(backward=True, block_k=64, kv_index=True, shared=True),
    *(Variant(backward=True, dim=64, block_q=block_q, block_k=block_k) for block_q, block_k in BLOCKS),
    Variant(backward=True, dim=64, dtype="fp16", index="i32", grads="fp16", shared=True),
    Variant(backward=True, dim=64, grads="bf16", tail=False),
    Variant(backward=True, dim=64, grouped=True),
    Variant(backward=True, dim=64, kv_index=True, grads="bf16", shared=True),
    Variant(backward=True, dim=64, block_q=64, block_k=64, grouped=True),
    Variant(backward=True, dim=96),
    Variant(backward=True, dim=96, block_k=64),
    *(Variant(backward=True, block_q=block, block_k=block, runs=True) for block in (128, 64)),
    Variant(backward=True, runs=True, grads="bf16", grouped=True),
    Variant(backward=True, dim=64, runs=True, grads="bf16"),
    Variant(backward=True, dim=72, grads="bf16"),
    Variant(backward=True, dim=72, block_k=64),
    Variant(backward=True, dim=40),
]
TABLE = [*FORWARD, *BACKWARD]


def stack_limit(variant: Variant) -> int:
    """Bytes of local memory allowed, of the producer's 24 registers or outside the steps of a k-block."""
    if not variant.backward:
        return 0
    if variant.kv_index:
        return 40
    if variant.grouped or (variant.dim, variant.block_k) == (64, 128):
        return 16
    return 8 if variant.runs else 0


# A few seconds each: those that the others vary run always.
OFTEN = [
    *(FORWARD[i] for i in (0, 1, 4)),
    *(BACKWARD[i] for i in (0, 1, 5, 6)),
    Variant(backward=True, dim=64),
    Variant(backward=True, dim=64, grads="bf16", tail=False),
]


@pytest.mark.parametrize(
    "variant", [pytest.param(x, marks=() if x in OFTEN else pytest.mark.slow, id=str(x)) for x in TABLE]
)
def test_hopper_kernel_fits_the_card_and_overlaps_its_products(variant: Variant) -> None:
    usage = compile_variant(variant)
    config = (backward_config if variant.backward else forward_config)(variant.dim, variant.block_q, variant.block_k)
    assert usage.registers <= config.max_registers
    assert usage.stack <= stack_limit(variant)
    warps = 12 if config.num_consumers == 2 else 8
    ctas = 65536 // (config.max_registers * warps * 32)
    assert ctas == 3 - config.num_consumers
    assert ctas * (usage.shared + SHARED_RESERVED) <= SHARED_OF_A_MULTIPROCESSOR
    if variant.backward:
        assert usage.shared <= BACKWARD_SHARED[config.dim, variant.block_k]
    # A wait after every product is what the assembler does when it gives up on asynchronous ones.
    assert usage.num_products > 0
    assert usage.num_waits * 4 <= usage.num_products
    assert "USETMAXREG" in usage.sass
    assert "cp.async.bulk.tensor.4d" in usage.ptx


def products_before_barrier(ptx: str) -> list[int]:
    """Groups of products issued between the fence after each store of dS^T and the next barrier of the warpgroup."""
    events = re.findall(r"stmatrix|fence\.proxy\.async|\bbar\.sync|wgmma\.commit_group", ptx)
    return [len(found[1]) for found in re.finditer(r"sf(w*)b", "".join(x[0] for x in events))]


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize(
    ("dim", "block_k", "products"),
    [
        # Two warpgroups: the first step of a k-block, and the others.
        (128, 128, [0, 0, 0, 0]),
        # S and dP of tile 1 do not read the dS^T of tile 0.
        (64, 128, [2, 0]),
        (128, 64, [0]),
        (64, 64, [0]),
    ],
)
def test_backward_kernel_orders_score_gradients_without_mbarrier(
    dim: int, block_k: int, products: list[int], tail: bool
) -> None:
    """No product reads dS^T before the barrier that follows its fence: one warpgroup has no other order than this."""
    ptx = compile_variant(Variant(backward=True, dim=dim, block_k=block_k, grads="bf16", tail=tail)).ptx
    assert products_before_barrier(ptx) == products


def test_products_before_barrier_are_counted() -> None:
    """A kernel without the barrier, or with one before the fence, would not pass."""
    store, fence, product, barrier = "stmatrix.sync;", "fence.proxy.async;", "wgmma.commit_group.sync;", "bar.sync 0;"
    assert products_before_barrier(store + fence + barrier + product + barrier) == [0]
    assert products_before_barrier(store + fence + product + product + barrier) == [2]
    assert products_before_barrier(store + barrier + fence + product + barrier) == []


@pytest.mark.parametrize(("dim", "block_k", "by_tma"), [(128, 128, True), (64, 128, True), (128, 64, False)])
def test_backward_kernel_adds_dq_in_wide_operations(dim: int, block_k: int, by_tma: bool) -> None:
    """By TMA for 128 keys, four numbers at a time from registers for 64."""
    ptx = compile_variant(Variant(backward=True, dim=dim, block_k=block_k, grads="bf16", tail=False)).ptx
    assert ("cp.reduce.async.bulk.tensor" in ptx) == by_tma
    assert ("red.relaxed.gpu.global.add.v4.f32" in ptx) != by_tma


if __name__ == "__main__":
    print(triton.__version__)
    for chosen in TABLE:
        result = compile_variant(chosen)
        print(
            f"{chosen}: {result.registers} registers, {result.stack} B stack, {result.shared} B shared, "
            f"{result.num_products} products, {result.num_waits} waits, limit {stack_limit(chosen)}",
            flush=True,
        )
    sys.exit()
