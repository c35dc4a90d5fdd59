"""The portable kernels compiled for sm_90 without a card: registers, spills, shared memory, kinds of instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dbsp_megatron.kernels.block_sparse_attention import portable_backward, portable_forward  # noqa: E402
from dbsp_megatron.kernels.block_sparse_attention.portable_config import (  # noqa: E402
    Pass,
    TileConfig,
    padded_dim,
    tile_config,
)

SHARED_MEMORY = 227 * 1024
KERNELS: dict[Pass, Any] = {
    "forward": portable_forward._forward_kernel,
    "dkdv": portable_backward._dkdv_kernel,
    "dq": portable_backward._dq_kernel,
}
# Bytes of stack (spilled registers) of a thread: what the compiler versions in use need, and a little more.
MAX_STACK: dict[Pass, int] = {"forward": 96, "dkdv": 32, "dq": 0}
TABLE = [
    (dim, block_q, block_k, which)
    for dim, block_q, block_k in ((64, 128, 128), (64, 64, 64), (96, 128, 128), (128, 128, 128), (128, 64, 64))
    for which in KERNELS
]
VARIANTS: list[tuple[Pass, dict[str, bool], int]] = [
    ("forward", {"resume": True}, 512),
    ("forward", {"tma": False}, 320),
    ("dkdv", {"grouped": True}, 96),
    ("dkdv", {"tma": False}, 112),
    ("dq", {"tma": False}, 0),
]


@dataclass(frozen=True)
class Usage:
    """What the assembler says of a kernel."""

    registers: int
    stack: int
    shared: int
    products: int
    """Warpgroup products in the machine code."""
    waits: int
    """Waits for products there; one for each product means that the assembler runs them one at a time."""
    slow_products: int
    """Products of the older kind, of a warp."""


def compile_kernel(
    which: Pass,
    dim: int,
    block_q: int,
    block_k: int,
    config: TileConfig,
    *,
    dtype: str = "bf16",
    tma: bool = True,
    short: bool = True,
    resume: bool = False,
    grouped: bool = False,
) -> Usage:
    """Compile one variant for sm_90 as a launch with aligned tensors would."""
    kernel = KERNELS[which]
    constants: dict[str, Any] = {
        "DIM": dim,
        "DIM_PAD": padded_dim(dim),
        "BLOCK_Q": block_q,
        "BLOCK_K": block_k,
        "M": config.block_m,
        "N": config.block_n,
        "TMA": tma,
        "RESUME": resume,
        "SHORT_Q": short,
        "SHORT_K": short,
        "MASK_BATCHED": False,
        "PRECISION": "tf32",
        "range_ptr": None,
    }
    if not grouped:
        constants |= {"kv_index_ptr": None, "heads_ptr": None, "group_ptr": None}
    rows = {"q": config.block_m, "dout": config.block_m, "k": config.block_n, "v": config.block_n}
    pointers = {"out_ptr": "fp32" if resume else dtype, "index_ptr": "i16", "full_ptr": "i8"}
    floats = ("lse_ptr", "stats_ptr", "dq_ptr", "dk_ptr", "dv_ptr")
    plain = {p.name for p in kernel.params if p.do_not_specialize}
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in rows:
            box = f"[1, {rows[name]}, 1, {padded_dim(dim)}]"
            signature[name] = f"tensordesc<{dtype}{box}>" if tma else f"*{dtype}"
        elif name.endswith("_ptr"):
            signature[name] = "*" + pointers.get(name, "fp32" if name in floats else "i32")
        else:
            signature[name] = "fp32" if name.startswith("scale") else "i32"
        if signature[name] != "fp32" and name not in plain and not signature[name].startswith("tensordesc"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): x for name, x in constants.items() if name in kernel.arg_names},
        attrs=attributes,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=config.launch_options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage, code = (
            subprocess.run([tool, option, cubin.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return Usage(
        registers=int(found[1]),
        stack=int(found[2]),
        shared=compiled.metadata.shared,
        products=code.count("HGMMA"),
        waits=code.count("WARPGROUP.DEPBAR"),
        slow_products=len(re.findall(r"\bHMMA", code)),
    )


def _check(usage: Usage, max_stack: int) -> None:
    assert usage.shared <= SHARED_MEMORY, usage
    assert usage.stack <= max_stack, usage
    assert usage.products > 0, usage
    assert usage.slow_products == 0, usage


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_table_compiles_without_spills_and_with_products_in_flight(case: tuple[int, int, int, Pass]) -> None:
    config = tile_config(*case, torch.bfloat16, torch.device("cpu"))
    usage = compile_kernel(case[3], *case[:3], config)
    _check(usage, MAX_STACK[case[3]])
    # 128 query rows of 128 dims in four warps leave no registers for that: two programs share a multiprocessor instead.
    crowded = case[3] == "forward" and config.block_m == 128 and padded_dim(case[0]) == 128 and config.num_warps == 4
    assert crowded or usage.waits <= usage.products // 3, usage


@pytest.mark.parametrize(("which", "variant", "max_stack"), VARIANTS, ids=str)
def test_variants_compile(which: Pass, variant: dict[str, bool], max_stack: int) -> None:
    config = tile_config(128, 128, 128, which, torch.float16, torch.device("cpu"))
    _check(compile_kernel(which, 128, 128, 128, config, dtype="fp16", **variant), max_stack)
