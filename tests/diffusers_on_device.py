"""What transformers of diffusers must do under `parallelize` on any device: the CPU in CI, CUDA in tests/gpu.

The models have heads of 64 and grids of 720 tokens, so that the kernels of GPUs run, not only the blockwise engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron import BlockMask, SequenceParallel, SequenceParallelConfig
from dbsp_megatron.masks import MaskMethod, SlidingTileMask, TopKMask
from dbsp_megatron.models.diffusers import parallelize, split_guidance
from dbsp_megatron.models.diffusers.checks import find_table
from dbsp_megatron.models.diffusers.entry import TABLES
from tests.distributed.diffusers_models import NUM_GRID, Inputs, make_inputs, make_model, num_text
from tests.harness import device_for
from tests.reference import max_error, random_blocks
from tools.pipeline_entries import change_of
from tools.pipeline_model import SIZES, denoise, make_pipeline, make_transformer, make_video
from tools.sp_entries import relative_error

WIDE: dict[str, dict[str, Any]] = {
    "wan": {"attention_head_dim": 64},
    "cogvideox": {"attention_head_dim": 64},
    "hunyuan": {"attention_head_dim": 64, "rope_axes_dim": (16, 24, 24)},
    "flux": {"attention_head_dim": 64, "axes_dims_rope": (16, 24, 24)},
}
SIDE, HEADS, BLOCK = 4, 3, 64
ATOL = 1e-4
MASKS = ("random", "tile", "topk")
_FACTOR = 2.0
"""An error may be this many times that of the stock processors, or of the blockwise engine, in the same precision."""


def exact_matmuls() -> None:
    """No TF32, which would hide errors of fp32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def wide_model(name: str) -> Any:
    """A model on the CPU in fp32, the same each time."""
    return make_model(name, **WIDE[name])


def moved(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Inputs on a device; floating point ones, but for the timestep and what places tokens, in a dtype."""

    def move(key: str, x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(part.to(device) for part in x)
        if key in ("timestep", "img_ids", "txt_ids", "encoder_attention_mask") or not x.is_floating_point():
            return x.to(device)
        return x.to(device, dtype)

    return {key: move(key, x) for key, x in inputs.items()}


def make_sp(engine: str = "auto", strategy: str = "none", group: dist.ProcessGroup | None = None) -> SequenceParallel:
    """Blocks of 64, all of `group`."""
    return SequenceParallel(SequenceParallelConfig(strategy=strategy, block_size=BLOCK, engine=engine), group=group)


def make_mask(kind: str, name: str) -> BlockMask | MaskMethod:
    """One of MASKS for a model; that of blocks differs by head and is not symmetric."""
    if kind == "tile":
        return SlidingTileMask(tile=(1, 4, 4), window=(1, 1, 1))
    if kind == "topk":
        return TopKMask(density=0.3)
    seqlen = num_text(name) + NUM_GRID * SIDE**2
    count = -(-seqlen // BLOCK)
    return BlockMask(random_blocks(3, 1, HEADS, count, count), BLOCK, BLOCK, seqlen, seqlen)


def _on_device(mask: BlockMask | MaskMethod | None, device: torch.device) -> BlockMask | MaskMethod | None:
    return mask.to(device) if isinstance(mask, BlockMask) else mask


@torch.no_grad()
def equality_problems(name: str, device: torch.device, dtype: torch.dtype, mask: str | None) -> list[str]:
    """Against fp64 on the CPU: the stock processors, or the blockwise engine where there is a mask.

    Args:
        name: of WIDE.
        device: where it runs.
        dtype: fp32 or bf16; the error may be that without our kernels, a little more, and in fp32 at least ATOL.
        mask: of MASKS, or None for all blocks.
    """
    model = wide_model(name)
    inputs = make_inputs(name, model, side=SIDE)
    chosen = None if mask is None else make_mask(mask, name)
    model.double()
    cpu = torch.device("cpu")
    exact = _output(model, moved(inputs, cpu, torch.float64), chosen, "torch" if mask else None)
    if mask is not None:
        dense = _output(model, moved(inputs, cpu, torch.float64), None, None)
        if not max_error(exact, dense) > 1e-3:
            return [f"{name}: the {mask} mask changes nothing"]
    model = wide_model(name).to(device, dtype)
    here = moved(inputs, device, dtype)
    plain = _output(model, here, None, None)
    state = {key: x.clone() for key, x in model.state_dict().items()}
    got = _output(model, here, _on_device(chosen, device), "auto")
    problems = []
    other = plain if mask is None else _output(model, here, _on_device(chosen, device), "torch")
    allowed = _FACTOR * max_error(other.cpu(), exact)
    if dtype == torch.float32:
        allowed = max(allowed, ATOL)
    error = max_error(got.cpu(), exact)
    if not error < allowed:
        problems.append(f"{name}, mask {mask}, {dtype} on {device}: off by {error:.3g}, allowed {allowed:.3g}")
    if got.dtype != plain.dtype:
        problems.append(f"{name}: {got.dtype} in place of {plain.dtype}")
    if not torch.equal(_output(model, here, None, None), plain):
        problems.append(f"{name} on {device} is not what it was")
    if any(not torch.equal(x, state[key]) for key, x in model.state_dict().items()):
        problems.append(f"weights of {name} changed")
    return problems


def _output(model: Any, inputs: Inputs, mask: BlockMask | MaskMethod | None, engine: str | None) -> Tensor:
    """With an engine of ours, or None for the stock processors."""
    if engine is None:
        found: Tensor = model(**inputs).sample
        return found
    with parallelize(model, make_sp(engine), mask=mask):
        found = model(**inputs).sample
    return found


def _sequential_offload(model: Any, device: torch.device) -> None:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=device)


def _model_offload(model: Any, device: torch.device) -> None:
    from accelerate import cpu_offload_with_hook

    cpu_offload_with_hook(model, execution_device=device)


def _group_offload(model: Any, device: torch.device) -> None:
    model.enable_group_offload(
        onload_device=device, offload_device=torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1
    )


def _streamed_offload(model: Any, device: torch.device) -> None:
    model.enable_group_offload(
        onload_device=device, offload_device=torch.device("cpu"), offload_type="leaf_level",
        use_stream=device.type == "cuda",
    )  # fmt: skip


OFFLOADS: dict[str, Callable[[Any, torch.device], None]] = {
    "sequential": _sequential_offload,
    "whole model": _model_offload,
    "groups of blocks": _group_offload,
    "leaves, on a stream": _streamed_offload,
}


@torch.no_grad()
def offload_problems(name: str, device: torch.device) -> list[str]:
    """Weights that wait on the CPU give what weights on the device give, whatever was put on first."""
    model = wide_model(name)
    here = moved(make_inputs(name, model, side=SIDE), device, torch.float32)
    want = _output(model.to(device), here, None, None)
    problems = []
    for kind, put_on in OFFLOADS.items():
        for before in (True, False):
            model = wide_model(name)
            if before:
                put_on(model, device)
            with parallelize(model, make_sp()):
                if not before:
                    put_on(model, device)
                errors = [max_error(model(**here).sample, want) for _ in range(2)]
            # Group offloading starts where the forward pass of diffusers starts again.
            errors.append(max_error(model(**here).sample, want))
            if not max(errors) < ATOL:
                problems.append(f"{name}, offload of {kind}, {'before' if before else 'after'}: off by {errors}")
    return problems


def pipeline_offload_problems(device: torch.device) -> list[str]:
    """The weights of a pipeline come to the device while the transformer runs, and leave it, hooks put on anew."""
    size = SIZES["tiny"]
    video, pipe = make_video(size, 0, device, "float32", 5.0), _tiny_pipeline(device)
    want = change_of(denoise(pipe, video, 3), video)
    pipe.enable_model_cpu_offload(device=device)
    with parallelize(pipe, make_sp()):
        errors = [relative_error(change_of(denoise(pipe, video, 3), video), want) for _ in range(2)]
    problems = [] if max(errors) < ATOL else [f"offloaded pipeline on {device}: off by {errors}"]
    if not torch.equal(change_of(denoise(pipe, video, 3), video), want):
        problems.append(f"offloaded pipeline on {device}: not what it was")
    if pipe.transformer.device.type != "cpu":
        problems.append(f"weights stay on {pipe.transformer.device}")
    return problems


def _tiny_pipeline(device: torch.device) -> Any:
    size = SIZES["tiny"]
    return make_pipeline(size, make_transformer(size, None, 0, device, "float32"))


@torch.no_grad()
def compile_problems(name: str, device: torch.device, backend: str) -> list[str]:
    """Compiled blocks give what blocks give, dense and sparse, in steps of two timesteps."""
    model, problems = wide_model(name).to(device), []
    here = moved(make_inputs(name, model, side=SIDE), device, torch.float32)
    calls = [here, {**here, "timestep": here["timestep"] / 2}]
    for kind in (None, "tile"):
        mask = None if kind is None else make_mask(kind, name)
        with parallelize(model, make_sp(), mask=mask):
            wants = [model(**call).sample for call in calls]
        compiled = wide_model(name).to(device)
        with parallelize(compiled, make_sp(), mask=mask):
            for block in find_table(compiled, TABLES).blocks(compiled):
                block.compile(backend=backend)
            errors = [max_error(compiled(**call).sample, want) for call, want in zip(calls, wants, strict=True)]
        if not max(errors) < ATOL:
            problems.append(f"{name}, mask {kind}, compiled by {backend} on {device}: off by {errors}")
        torch.compiler.reset()
    return problems


@torch.no_grad()
def adapter_problems(name: str, device: torch.device) -> list[str]:
    """An adapter on queries and values counts."""
    from peft import LoraConfig

    model = wide_model(name).to(device)
    here = moved(make_inputs(name, model, side=SIDE), device, torch.float32)
    plain = _output(model, here, None, None)
    torch.manual_seed(3)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False), "a")
    want, got = _output(model, here, None, None), _output(model, here, None, "auto")
    problems = [] if max_error(plain, want) > 1e-3 else [f"{name}: the adapter changes nothing"]
    error = max_error(got, want)
    return problems if error < ATOL else [*problems, f"{name}, adapter: off by {error:.3g}"]


def rank_problems(rank: int, world_size: int, names: list[str]) -> list[str]:
    """On all ranks: strategies against one process, and both branches of guidance on two halves in a pipeline."""
    exact_matmuls()
    device, problems = device_for(rank), []
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with torch.no_grad():
        for name in names:
            problems += [f"rank {rank}: {problem}" for problem in _strategy_problems(rank, world_size, name, device)]
        return problems + [f"rank {rank}: {problem}" for problem in _guidance_problems(device, world_size)]


def _strategy_problems(rank: int, world_size: int, name: str, device: torch.device) -> list[str]:
    problems = []
    model = wide_model(name).to(device)
    here = moved(make_inputs(name, model, side=SIDE), device, torch.float32)
    for kind in (None, "random"):
        mask = None if kind is None else _on_device(make_mask(kind, name), device)
        alone = [dist.new_group([other]) for other in range(world_size)][rank]
        with parallelize(model, make_sp(group=alone), mask=mask):
            want = model(**here).sample
        for strategy in ("ulysses", "ring", "dbsp"):
            sp = make_sp("auto", strategy, dist.group.WORLD)
            with parallelize(model, sp, mask=mask):
                errors = [max_error(model(**here).sample, want) for _ in range(2)]
            if not max(errors) < ATOL:
                problems.append(f"{name}, {strategy}, mask {kind}: off by {errors}")
            sp.destroy()
    return problems


def _guidance_problems(device: torch.device, world_size: int) -> list[str]:
    if world_size % 2:
        return []
    video, pipe = make_video(SIZES["tiny"], 0, device, "float32", 5.0), _tiny_pipeline(device)
    want = change_of(denoise(pipe, video, 4), video)
    half, guidance_group = split_guidance(dist.group.WORLD)
    strategy = "none" if world_size == 2 else "dbsp"
    sp = SequenceParallel(SequenceParallelConfig(strategy=strategy, block_size=16), group=half)
    with parallelize(pipe, sp, guidance_group=guidance_group):
        error = relative_error(change_of(denoise(pipe, video, 4), video), want)
    return [] if error < ATOL else [f"guidance on two halves is off by {error:.3g}"]
