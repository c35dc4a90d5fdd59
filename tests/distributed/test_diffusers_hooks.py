"""What else is put on transformers of diffusers works while they are parallel, or is refused by all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron.masks import TopPMask
from dbsp_megatron.models.diffusers import parallelize
from tests.distributed.diffusers_models import make_inputs, make_model
from tests.distributed.sharded import make_sp, refusal
from tests.distributed.test_diffusers import alone
from tests.harness import run_ranks
from tests.reference import max_error

pytestmark = [pytest.mark.diffusers, pytest.mark.timeout(300)]

ATOL = 1e-4
STEPS = 6
CACHES = {
    "wan": ("pyramid", "faster", "mag", "taylor lite"),
    "cogvideox": ("pyramid", "faster", "mag", "taylor lite"),
    "hunyuan": ("pyramid", "mag", "taylor", "taylor lite"),
    "flux": ("pyramid", "mag", "taylor", "taylor lite"),
}
"""Caches that diffusers itself can run on a model, and that skip something."""


def _cache(kind: str, name: str) -> Any:
    import diffusers

    always = {"spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": (-1, 1000)}
    always["current_timestep_callback"] = lambda: 500
    if kind == "pyramid":
        return diffusers.PyramidAttentionBroadcastConfig(**always)
    if kind == "faster":
        guidance = {"unconditional_batch_skip_range": 2, "unconditional_batch_timestep_skip_range": (-1, 1000)}
        frames = "BFCHW" if name == "cogvideox" else "BCFHW"
        weight = {"attention_weight_callback": lambda _: 0.3}
        return diffusers.FasterCacheConfig(**always, **guidance, **weight, tensor_format=frames)
    if kind == "mag":
        return diffusers.MagCacheConfig(
            mag_ratios=[1.0] * STEPS, num_inference_steps=STEPS, threshold=0.5, max_skip_steps=2, retention_ratio=0.2
        )
    return diffusers.TaylorSeerCacheConfig(
        cache_interval=2,
        disable_cache_before_step=2,
        max_order=1,
        taylor_factors_dtype=torch.float32,
        use_lite_mode=kind == "taylor lite",
    )


def _denoised(model: Any, name: str, config: Any = None) -> Tensor:
    """Outputs of six steps."""
    inputs, outs = make_inputs(name, model), []
    if config is not None:
        model.enable_cache(config)
    try:
        with model.cache_context("cond_uncond"):
            for step in range(STEPS):
                scale = 1 + 0.1 * step
                changed = {"hidden_states": inputs["hidden_states"] * scale, "timestep": inputs["timestep"] / scale}
                outs.append(model(**{**inputs, **changed}).sample)
    finally:
        if config is not None:
            model.disable_cache()
    return torch.stack(outs)


def _caches(rank: int, world_size: int, name: str) -> list[str]:
    problems = []
    single, mask, model = alone(), TopPMask(0.3), make_model(name)
    # Contiguous tokens: only the first rank has text.
    sp = make_sp("ulysses", 2, block_size=4) if world_size == 2 else make_sp("dbsp", 1, world_size, block_size=4)
    with torch.no_grad():
        with parallelize(model, single, mask=mask):
            plain = _denoised(model, name)
        for kind in CACHES[name]:
            with parallelize(model, single, mask=mask):
                want = _denoised(model, name, _cache(kind, name))
            if not max_error(want, plain) > ATOL:
                problems.append(f"rank {rank}: {kind} on {name} skips nothing")
            with parallelize(model, sp, mask=mask):
                error = max_error(_denoised(model, name, _cache(kind, name)), want)
            if not error < ATOL:
                problems.append(f"rank {rank}: {kind} on {name} is off by {error:.3g}")
    return problems


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", CACHES)
def test_caches_that_count_steps_equal_one_process(name: str, world_size: int) -> None:
    """Also in blocks of ranks that hold no text, whose output a cache sees before anybody else."""
    problems = [problem for rank in run_ranks(_caches, world_size, name, timeout_s=120) for problem in rank]
    assert not problems, "\n".join(problems)


def _adapter(model: Any) -> None:
    from peft import LoraConfig

    torch.manual_seed(3)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False), "a")


def _adapter_of_ends(model: Any) -> None:
    """On the layers where tokens are gathered or split."""
    from peft import LoraConfig

    names = {"proj_out", "x_embedder", "context_embedder"} & {name for name, _ in model.named_children()}
    kinds = torch.nn.Linear, torch.nn.Conv3d
    targets = [name for name in sorted(names) if isinstance(getattr(model, name), kinds)]
    torch.manual_seed(3)
    model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False), "a")


def _sequential_offload(model: Any) -> None:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=torch.device("cpu"))


def _group_offload(kind: str) -> Callable[[Any], None]:
    def put_on(model: Any) -> None:
        cpu = torch.device("cpu")
        blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        model.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type=kind, **blocks)

    return put_on


ADDED: dict[str, Callable[[Any], None]] = {
    "adapter": _adapter,
    "sequential offload": _sequential_offload,
    "group offload of blocks": _group_offload("block_level"),
    "group offload of leaves": _group_offload("leaf_level"),
}
"""Works before parallelize and while it lasts."""


def _added(rank: int, world_size: int, names: list[str]) -> list[str]:
    problems = []
    sp = make_sp("dbsp", 1, 2, block_size=4)
    with torch.no_grad():
        for name in names:
            for kind, add in {**ADDED, "adapter of the ends": _adapter_of_ends}.items():
                twin = make_model(name)
                inputs = make_inputs(name, twin)
                plain = twin(**inputs).sample
                add(twin)
                want = twin(**inputs).sample
                if "adapter" in kind and not max_error(plain, want) > 1e-3:
                    problems.append(f"{name}: the {kind} changes nothing")
                for before in (True, False) if kind in ADDED else (True,):
                    model, where = make_model(name), f"rank {rank}: {name}, {kind}, {'before' if before else 'after'}"
                    if before:
                        add(model)
                    with parallelize(model, sp):
                        if not before:
                            add(model)
                        error = max_error(model(**inputs).sample, want)
                    if not error < ATOL:
                        problems.append(f"{where}: off by {error:.3g}")
                    if not torch.equal(model(**inputs).sample, want):
                        problems.append(f"{where}: not what it was")
    return problems


@pytest.mark.pipelines
@pytest.mark.parametrize("names", [("wan", "flux"), ("cogvideox", "hunyuan")])
def test_adapters_and_offloading_come_before_or_after(names: tuple[str, ...]) -> None:
    problems = [problem for rank in run_ranks(_added, 2, names, timeout_s=120) for problem in rank]
    assert not problems, "\n".join(problems)


def _replaced(rank: int, world_size: int) -> dict[str, str]:
    sp, heard = make_sp("dbsp", 2, 1, block_size=4), {}
    with torch.no_grad():
        for name in ("wan", "cogvideox", "hunyuan", "flux"):
            model = make_model(name)
            inputs = make_inputs(name, model)
            want = model(**inputs).sample
            with parallelize(model, sp):
                _adapter_of_ends(model)
                heard[f"{name} added"] = refusal(lambda model=model, inputs=inputs: model(**inputs))
            with parallelize(model, sp):
                model.unload_lora()
                heard[f"{name} removed"] = refusal(lambda model=model, inputs=inputs: model(**inputs))
            heard[f"{name} at last"] = str(torch.equal(model(**inputs).sample, want))
        model = make_model("wan")
        with parallelize(model, sp):
            del model.blocks[1]
            heard["a block"] = refusal(lambda: model(**make_inputs("wan", model)))
    return heard


@pytest.mark.pipelines
def test_modules_that_were_replaced_are_refused() -> None:
    """Tokens would not be split or gathered there: each rank would fail by itself, or give a wrong result."""
    heard = run_ranks(_replaced, 2)
    assert heard[0] == heard[1]
    for what, says in heard[0].items():
        if what.endswith("at last"):
            assert says == "True", what
        else:
            assert re.search("module .* was replaced while it is parallel", says), f"{what}: {says}"
