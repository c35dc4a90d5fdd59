"""Branches of guidance on two halves of the ranks, each with its own sequence parallelism, equal one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbsp_megatron import BlockMask, SequenceParallel, SequenceParallelConfig
from dbsp_megatron.masks import ScheduledMask, TopPMask
from dbsp_megatron.models.diffusers import parallelize, split_guidance
from dbsp_megatron.models.diffusers.handle import ParallelTransformers
from tests.distributed.diffusers_models import make_inputs, make_model
from tests.distributed.sharded import refusal
from tests.distributed.test_diffusers import alone
from tests.distributed.test_diffusers_pipelines import PIPELINES, draw, sample
from tests.harness import run_ranks
from tests.reference import max_error

pytestmark = [pytest.mark.diffusers, pytest.mark.timeout(300)]

ATOL = 1e-4
MESHES = {1: ("none", 1, 1), 2: ("dbsp", 1, 2), 3: ("ring", 1, 3)}
"""Strategy and degrees by the size of a half."""


def _halves() -> tuple[SequenceParallel, dist.ProcessGroup]:
    half, pair = split_guidance()
    strategy, ulysses, ring = MESHES[half.size()]
    config = SequenceParallelConfig(strategy=strategy, ulysses_degree=ulysses, ring_degree=ring, block_size=4)
    return SequenceParallel(config, half), pair


def _calls(pipe: Any) -> list[int]:
    """Counts runs of the first block, also where a half has none."""
    runs = [0]

    def count(*_: Any) -> None:
        runs[0] += 1

    for name in ("transformer", "transformer_2"):
        model = getattr(pipe, name, None)
        if model is not None:
            (model.blocks if hasattr(model, "blocks") else model.transformer_blocks)[0].register_forward_hook(count)
    return runs


def _pipelines(rank: int, world_size: int, names: list[str]) -> list[str]:
    problems = []
    single, mask = alone(), ScheduledMask(TopPMask(0.4), dense_steps=1)
    sp, pair = _halves()
    for name in names:
        pipe = PIPELINES[name]()
        more: dict[str, Any] = {"num_inference_steps": 4}
        if name == "flux":
            more |= {"true_cfg_scale": 3.0, "negative_prompt_embeds": draw(1, 7, 16, seed=5)}
            more |= {"negative_pooled_prompt_embeds": draw(1, 8, seed=6)}
        dense = sample(pipe, name, **more)
        with parallelize(pipe, single, mask=mask):
            sparse = sample(pipe, name, **more)
        if not max_error(dense, sparse) > ATOL:
            problems.append(f"rank {rank}: {name}: the mask changes nothing")
        runs = _calls(pipe)
        for kind, chosen, want in (("dense", None, dense), ("sparse", mask, sparse)):
            with parallelize(pipe, sp, mask=chosen, guidance_group=pair) as handle:
                for turn in range(2):
                    runs[0] = 0
                    error = max_error(sample(pipe, name, **more), want)
                    if not error < ATOL:
                        problems.append(f"rank {rank}: {name}, {kind}, run {turn}: off by {error:.3g}")
                    # Both calls of the first step of each transformer; the second run knows what comes, but for
                    # the prompt, which is another tensor with the same values.
                    first = 0 if turn or name == "cogvideox" else 1 + (name == "wan")
                    if runs[0] != 4 + first:
                        problems.append(f"rank {rank}: {name}, run {turn}: {runs[0]} calls were computed")
                if handle.step != 3:
                    problems.append(f"rank {rank}: {name} ended at step {handle.step}")
        if "forward" in pipe.transformer.__dict__ or not torch.equal(sample(pipe, name, **more), dense):
            problems.append(f"rank {rank}: {name} is not what it was")
    return problems


@pytest.mark.parametrize(("world_size", "names"), [(2, list(PIPELINES)), (4, list(PIPELINES)), (6, ["hunyuan"])])
def test_guidance_on_two_halves_equals_one_process(world_size: int, names: list[str]) -> None:
    """One call for both branches, two calls, prompts of unequal length, two experts (Trap B93)."""
    problems = [problem for rank in run_ranks(_pipelines, world_size, names, timeout_s=200) for problem in rank]
    assert not problems, "\n".join(problems)


def _odd_calls(rank: int, world_size: int) -> list[str]:
    """Calls that are not what was foreseen: every result is still that of its own inputs."""
    problems: list[str] = []
    sp, pair = _halves()

    def check(what: str, handle: ParallelTransformers, **inputs: Any) -> None:
        got = model(**inputs, return_dict=False)[0]
        with torch.no_grad():
            error = max_error(got, twin(**inputs).sample)
        if not error < ATOL:
            problems.append(f"rank {rank}: {what}: off by {error:.3g}")

    for name in ("wan", "flux", "hunyuan"):
        model, twin = make_model(name), make_model(name)
        one, two, three = (make_inputs(name, model, batch=1, seed=seed) for seed in (0, 1, 2))
        same = {key: one[key] for key in ("hidden_states", "timestep")}
        for inference in (torch.no_grad, torch.inference_mode):
            with inference(), parallelize(model, sp, guidance_group=pair) as handle:
                for step in range(3):
                    step_inputs = {key: x * (1 - 0.1 * step) for key, x in same.items()}
                    check("cond", handle, **{**one, **step_inputs})
                    check("uncond", handle, **{**two, **step_inputs})
                # Guidance is off in a step, then a third branch, another prompt, other latents for the second call.
                check("cond alone", handle, **three)
                check("cond again", handle, **{**one, **same})
                check("other uncond", handle, **{**three, **same})
                check("third branch", handle, **{**two, **same})
                check("cond", handle, **{**one, **same})
                check("other latents", handle, **{**three, **same, "hidden_states": two["hidden_states"]})
                # Written to in place between the two calls.
                given = {**one, "hidden_states": one["hidden_states"].clone()}
                check("cond", handle, **given)
                given["hidden_states"].mul_(1.5)
                check(
                    "written to",
                    handle,
                    **{**three, "hidden_states": given["hidden_states"], **{"timestep": one["timestep"]}},
                )
                batch = make_inputs(name, model, batch=4, seed=5)
                check("batch of four", handle, **batch)
                check("batch of three", handle, **make_inputs(name, model, batch=3, seed=6))
    return problems


@pytest.mark.parametrize("world_size", [2, 4])
def test_calls_that_were_not_foreseen_are_computed(world_size: int) -> None:
    problems = [problem for rank in run_ranks(_odd_calls, world_size, timeout_s=120) for problem in rank]
    assert not problems, "\n".join(problems)


def _refusals(rank: int, world_size: int) -> dict[str, str]:
    from diffusers import PyramidAttentionBroadcastConfig

    sp, pair = _halves()
    model, heard = make_model("wan"), {}
    inputs = make_inputs("wan", model, batch=1)
    odd = rank == world_size - 1
    blocks = torch.ones(2, 3, 12, 12, dtype=torch.bool)
    heard["mask"] = refusal(lambda: parallelize(model, sp, mask=BlockMask(blocks, 4, 4, 45, 45), guidance_group=pair))
    heard["group"] = refusal(lambda: parallelize(model, sp, guidance_group=dist.group.WORLD))
    heard["class"] = refusal(lambda: parallelize(torch.nn.Linear(1, 1) if odd else model, sp, guidance_group=pair))
    with parallelize(model, sp, guidance_group=pair):
        heard["gradients"] = refusal(lambda: model(**inputs))
        with torch.no_grad():
            given = {**inputs, "hidden_states": inputs["hidden_states"] * (2 if odd else 1)}
            heard["noise"] = refusal(lambda: model(**given))
            # Only one half is given another prompt.
            other = make_inputs("wan", model, batch=1, seed=4) if rank >= world_size // 2 else inputs
            heard["half"] = refusal(
                lambda: model(**{**inputs, "encoder_hidden_states": other["encoder_hidden_states"]})
            )
            heard["sound"] = refusal(lambda: model(**inputs))
            config = PyramidAttentionBroadcastConfig(
                spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
            )
            model.enable_cache(config)
            heard["cache"] = refusal(lambda: model(**inputs))
    return heard


def test_halves_refuse_together() -> None:
    heard = run_ranks(_refusals, 4)
    for what, says in {
        "mask": "mask has 2 samples",
        "group": "guidance_group must hold 2 ranks, one for each branch, got 4; split_guidance makes it",
        "class": "cannot parallelize a Linear",
        "gradients": "gradients are on",
        "noise": "given another hidden_states",
        "half": "given another encoder_hidden_states",
        "sound": "accepted",
        "cache": "a feature cache is on",
    }.items():
        for rank in range(4):
            assert re.search(says, heard[rank][what]), f"rank {rank}, {what}: {heard[rank][what]}"


def _odd_world(rank: int, world_size: int) -> str:
    return refusal(split_guidance)


def test_split_guidance_refuses_an_odd_number_of_ranks() -> None:
    assert all("takes an even number of ranks" in text and "got 3" in text for text in run_ranks(_odd_world, 3))
