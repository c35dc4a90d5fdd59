"""Ways of calling a pipeline: several prompts and videos, own latents, callbacks, no guidance, compiled blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron.masks import TopPMask
from dbsp_megatron.models.diffusers import parallelize
from tests.distributed.sharded import make_sp
from tests.distributed.test_diffusers import alone
from tests.distributed.test_diffusers_pipelines import PIPELINES, draw, sample
from tests.harness import run_ranks
from tests.reference import max_error

pytestmark = [pytest.mark.diffusers, pytest.mark.timeout(300)]


def _halve(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    return {"latents": tensors["latents"] * 0.5}


def _ways(name: str) -> dict[str, dict[str, Any]]:
    """Arguments by what is special about them."""
    prompts: dict[str, Any] = {"prompt_embeds": draw(3, 7, 16, seed=8)}
    if name in ("hunyuan", "flux"):
        prompts["pooled_prompt_embeds"] = draw(3, 8, seed=9)
    if name in ("wan", "cogvideox"):
        prompts["negative_prompt_embeds"] = draw(3, 7, 16, seed=10)
    if name == "hunyuan":
        # One length for all in a call; guidance calls once for each branch.
        prompts |= {"prompt_attention_mask": torch.ones(3, 7), "negative_prompt_attention_mask": torch.ones(3, 7)}
        prompts |= {"negative_prompt_embeds": draw(3, 7, 16, seed=10), "negative_pooled_prompt_embeds": draw(3, 8)}
    several = {"num_images_per_prompt": 2} if name == "flux" else {"num_videos_per_prompt": 2}
    shapes = {"wan": (1, 4, 3, 10, 6), "cogvideox": (1, 3, 4, 10, 6), "hunyuan": (1, 4, 3, 10, 6), "flux": (1, 27, 16)}
    ways = {
        "prompts": prompts,
        "several of one prompt": several,
        "own latents": {"latents": draw(*shapes[name], seed=11)},
        "callback": {"callback_on_step_end": _halve},
        "guidance 1": {"true_cfg_scale": 1.0} if name in ("hunyuan", "flux") else {"guidance_scale": 1.0},
        "one step": {"num_inference_steps": 1},
    }
    if name == "hunyuan":
        # The pipeline itself repeats no mask for several videos of one prompt.
        del ways["several of one prompt"]
    return ways


def _calls(rank: int, world_size: int, names: list[str]) -> list[str]:
    problems = []
    single, mask = alone(), TopPMask(0.4)
    sp = make_sp("dbsp", 1, 2, block_size=4)
    for name in names:
        pipe = PIPELINES[name]()
        for way, given in _ways(name).items():
            for kind, chosen in (("dense", None), ("sparse", mask)):
                if chosen is None:
                    want = sample(pipe, name, **given)
                else:
                    with parallelize(pipe, single, mask=chosen):
                        want = sample(pipe, name, **given)
                with parallelize(pipe, sp, mask=chosen):
                    got = sample(pipe, name, **given)
                if not max_error(got, want) < 1e-4:
                    problems.append(f"rank {rank}: {name}, {way}, {kind}: off by {max_error(got, want):.3g}")
    return problems


@pytest.mark.parametrize("names", [("wan", "flux"), ("cogvideox", "hunyuan")])
def test_ways_of_calling_equal_one_process(names: tuple[str, ...]) -> None:
    problems = [problem for rank in run_ranks(_calls, 2, names, timeout_s=120) for problem in rank]
    assert not problems, "\n".join(problems)


def _stopped(rank: int, world_size: int) -> list[str]:
    """A callback that raises on all ranks, in a nested block with another pipeline, leaves both as they were."""
    problems = []
    sp = make_sp("dbsp", 1, 2, block_size=4)
    first, second = PIPELINES["wan"](), PIPELINES["flux"]()
    wants = sample(first, "wan"), sample(second, "flux")

    def stop(*_: Any) -> dict[str, Any]:
        raise RuntimeError("enough")

    for turn in range(2):
        try:
            with parallelize(first, sp), parallelize(second, sp, mask=TopPMask(0.4)):
                sample(second, "flux")
                sample(first, "wan", callback_on_step_end=stop)
        except RuntimeError as error:
            if str(error) != "enough":
                raise
        gots: tuple[Tensor, Tensor] = (sample(first, "wan"), sample(second, "flux"))
        if not all(map(torch.equal, gots, wants)):
            problems.append(f"rank {rank}, turn {turn}: not what it was")
    return problems


def test_an_exception_in_a_nested_block_leaves_both_pipelines_as_they_were() -> None:
    assert run_ranks(_stopped, 2) == [[], []]


def _compiled(rank: int, world_size: int, names: list[str]) -> list[str]:
    problems = []
    sp = make_sp("dbsp", 1, 2, block_size=4)
    for name in names:
        pipe = PIPELINES[name]()
        want = sample(pipe, name)
        for module in pipe.transformer.modules():
            if type(module).__name__ in (pipe.transformer._repeated_blocks or ()):
                module.compile(backend="eager")
        with parallelize(pipe, sp):
            error = max_error(sample(pipe, name), want)
        if not error < 1e-4:
            problems.append(f"rank {rank}: {name} compiled is off by {error:.3g}")
    return problems


@pytest.mark.parametrize("names", [("wan", "flux"), ("cogvideox", "hunyuan")])
def test_compiled_blocks_equal_one_process(names: tuple[str, ...]) -> None:
    """Blocks that were compiled before: traced with our hooks on or off (Trap B85)."""
    problems = [problem for rank in run_ranks(_compiled, 2, names, timeout_s=200) for problem in rank]
    assert not problems, "\n".join(problems)
