"""Peak memory of the blockwise attention engine beside dense attention, forward and backward.

Every measurement runs in a process of its own. On CPU the peak is the growth of the resident set, on CUDA that of the
allocator.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from typing import Any

import torch

from dbsp_megatron import BlockMask, block_sparse_attention
from dbsp_megatron.kernels.block_sparse_attention import naive_block_sparse_attention


def _peak_mib(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure(engine: str, seqlen: int, heads: int, head_dim: int, block: int, density: float, device: str) -> float:
    """MiB above the inputs for one forward and backward in fp32."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, seqlen, heads, head_dim, device=device, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, seqlen, heads, head_dim, device=device)
    count = -(-seqlen // block)
    blocks = torch.rand(1, heads, count, count, device=device) < density
    # First use of autograd and of the thread pool must not count.
    tiny = torch.ones(8, 8, device=device, requires_grad=True)
    (tiny @ tiny).sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() / 2**20 if device == "cuda" else _peak_mib(device)
    if engine == "blockwise":
        out: Any = block_sparse_attention(q, k, v, BlockMask(blocks, block, block, seqlen, seqlen), return_lse=False)
    else:
        out, _ = naive_block_sparse_attention(q, k, v, blocks, block, block)
    out.backward(dout)
    if device == "cuda":
        torch.cuda.synchronize()
    return _peak_mib(device) - before


def main() -> None:
    """Print one line per length, as a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqlens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--density", type=float, default=0.25)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--one", choices=["blockwise", "dense"], help="measure one engine and print MiB as JSON")
    args = parser.parse_args()
    if args.one:
        seqlen = args.seqlens[0]
        mib = measure(args.one, seqlen, args.heads, args.head_dim, args.block, args.density, args.device)
        print(json.dumps(mib))
        return
    sizes = f"heads {args.heads}, head_dim {args.head_dim}, block {args.block}, density {args.density}"
    print(f"{sizes}, {args.device}, fp32, torch {torch.__version__}")
    print("| tokens | dense MiB | blockwise MiB | ratio |\n|---|---|---|---|")
    for seqlen in args.seqlens:
        peaks = []
        for engine in ("dense", "blockwise"):
            command = [sys.executable, __file__, "--one", engine, "--seqlens", str(seqlen), "--heads", str(args.heads)]
            command += ["--head-dim", str(args.head_dim), "--block", str(args.block), "--density", str(args.density)]
            command += ["--device", args.device]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            peaks.append(float(json.loads(done.stdout)))
        print(f"| {seqlen} | {peaks[0]:.0f} | {peaks[1]:.0f} | {peaks[0] / max(peaks[1], 1e-9):.1f} |", flush=True)


if __name__ == "__main__":
    main()
