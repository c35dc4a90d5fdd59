"""What one process of the doctor's test does: meet the others, compute attention with them, compile a kernel.

Run by `doctor_selftest.py` as `doctor_ranks.py FOLDER RANK WORLD_SIZE`; results are JSON lines in FOLDER.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_ROOT = str(Path(__file__).resolve().parents[1])
if _ROOT not in sys.path:
    sys.path.append(_ROOT)

from dbsp_megatron import BlockMask, SequenceParallel, SequenceParallelConfig, block_sparse_attention  # noqa: E402
from dbsp_megatron.kernels.block_sparse_attention import naive_block_sparse_attention  # noqa: E402

_GROUP_TIMEOUT_S = 30
_SEQLEN, _BLOCK, _HEADS, _HEAD_DIM = 150, 16, 5, 16
_KERNEL_BLOCK, _KERNEL_HEAD_DIM = 64, 64
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def collectives(device: torch.device, rank: int, world_size: int) -> str:
    """All-reduce and all-to-all of small tensors; raises if a result is wrong."""
    total = torch.full((3,), float(rank + 1), device=device)
    dist.all_reduce(total)
    wanted = world_size * (world_size + 1) / 2
    if total.tolist() != [wanted] * 3:
        raise RuntimeError(f"all_reduce gave {total.tolist()}, not {wanted}")
    sent = torch.arange(world_size, device=device, dtype=torch.float32) + 100 * rank
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    expected = [100.0 * source + rank for source in range(world_size)]
    if received.tolist() != expected:
        raise RuntimeError(f"all_to_all gave {received.tolist()}, not {expected}")
    return f"all_reduce and all_to_all of {world_size} processes"


def attention(device: torch.device, world_size: int) -> str:
    """Balanced attention over all ranks, forward and backward, against one process; raises if they differ."""
    generator = torch.Generator().manual_seed(5)
    shape = (1, _SEQLEN, _HEADS, _HEAD_DIM)
    q, k, v, dout = (torch.randn(shape, generator=generator).to(device) for _ in range(4))
    num = -(-_SEQLEN // _BLOCK)
    blocks = (torch.rand((1, _HEADS, num, num), generator=generator) < 0.4).to(device)
    blocks[..., 0] = True
    mask = BlockMask(blocks, _BLOCK, _BLOCK, _SEQLEN, _SEQLEN)
    results, worst = [], 0.0
    meshes = list(dict.fromkeys([(1, 1), (world_size, 1), (1, world_size)]))
    for ulysses, ring in meshes:
        q_in, k_in, v_in = inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        if ulysses == ring == 1:
            out = naive_block_sparse_attention(q_in, k_in, v_in, blocks, _BLOCK, _BLOCK)[0]
        else:
            config = SequenceParallelConfig(ulysses_degree=ulysses, ring_degree=ring, block_size=_BLOCK)
            sp = SequenceParallel(config, group=dist.group.WORLD)
            layout = sp.layout(seqlen=_SEQLEN, block_size=_BLOCK)
            q_l, k_l, v_l = (layout.shard(x, dim=1) for x in inputs)
            out = layout.gather(sp.attention(q_l, k_l, v_l, mask=mask, layer=0), dim=1)
        (out * dout).sum().backward()
        results.append([out.detach(), *(x.grad for x in inputs if x.grad is not None)])
        worst = max(worst, _difference(results[-1], results[0], torch.float32))
    tried = " and ".join(f"{ulysses}x{ring}" for ulysses, ring in meshes[1:]) or "1x1"
    return f"forward and backward on {tried}, off by {worst:.1e}"


def kernel(device: torch.device) -> str:
    """A small call of the Triton engine, compiled if need be; raises if its result is wrong."""
    generator = torch.Generator().manual_seed(7)
    shape = (1, 4 * _KERNEL_BLOCK, 2, _KERNEL_HEAD_DIM)
    q, k, v = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for _ in range(3))
    blocks = torch.rand((1, 2, 4, 4), generator=generator).to(device) < 0.6
    blocks[..., 0] = True
    started = time.perf_counter()
    mask = BlockMask(blocks, _KERNEL_BLOCK, _KERNEL_BLOCK, shape[1], shape[1])
    out = block_sparse_attention(q, k, v, mask, engine="triton")[0]
    wanted = naive_block_sparse_attention(q.float(), k.float(), v.float(), blocks, _KERNEL_BLOCK, _KERNEL_BLOCK)[0]
    worst = _difference([out.float()], [wanted], torch.bfloat16)
    return f"compiled and run in {time.perf_counter() - started:.1f} s, off by {worst:.1e}"


def _difference(found: list[torch.Tensor], wanted: list[torch.Tensor], dtype: torch.dtype) -> float:
    worst = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
    if not worst <= _TOLERANCE[dtype]:
        raise RuntimeError(f"results differ from the reference by {worst:.2e}, more than {_TOLERANCE[dtype]:.0e}")
    return worst


def main(folder: str, rank: int, world_size: int) -> None:
    """All tests of one rank; what fails is told and ends the process, as later ones would hang."""
    with (Path(folder) / f"rank_{rank}").open("w", encoding="utf-8", buffering=1) as told:

        def attempt(name: str, test: Callable[[], str]) -> None:
            told.write(json.dumps({"begin": name}) + "\n")
            try:
                found = test()
            except Exception as error:
                text = " ".join(f"{type(error).__name__}: {error}".split())
                told.write(json.dumps({"name": name, "error": text}) + "\n")
                raise SystemExit(1) from error
            told.write(json.dumps({"name": name, "found": found}) + "\n")

        num_gpus = torch.cuda.device_count()
        on_gpus = num_gpus >= max(1, world_size)

        def meet() -> str:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=_GROUP_TIMEOUT_S),
            )
            return collectives(torch.device("cpu"), rank, world_size)

        attempt("gloo", meet)
        attempt("attention", lambda: attention(torch.device("cpu"), world_size))
        if on_gpus:
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
            if world_size > 1:
                attempt("nccl", lambda: collectives(device, rank, world_size))
                attempt("attention on GPUs", lambda: attention(device, world_size))
        if num_gpus and rank == 0:
            attempt("Triton kernel", lambda: kernel(torch.device("cuda", 0)))
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
