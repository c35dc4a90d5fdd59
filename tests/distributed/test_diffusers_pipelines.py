"""Whole pipelines of diffusers, run for a few steps on several ranks, equal those in one process."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron.masks import ScheduledMask, TopPMask
from dbsp_megatron.models.diffusers import parallelize
from tests.distributed.diffusers_models import make_model
from tests.distributed.sharded import make_sp
from tests.distributed.test_diffusers import alone
from tests.harness import run_ranks
from tests.reference import max_error

pytestmark = [pytest.mark.diffusers, pytest.mark.timeout(300)]

if multiprocessing.parent_process() is not None:
    from diffusers import CogVideoXPipeline, FluxPipeline, HunyuanVideoPipeline, WanPipeline  # noqa: F401


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal noise."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _wan() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    # Timesteps 1000, 500 and 1: the first step runs on one expert, the others on the second one.
    return WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=make_model("wan"),
        transformer_2=make_model("wan", num_layers=1),
        boundary_ratio=0.6,
    )


def _wan_ti2v() -> Any:
    """One timestep for each token, as in Wan 2.2 5B."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    return WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=make_model("wan ti2v"),
        expand_timesteps=True,
    )


def _cogvideox() -> Any:
    from diffusers import CogVideoXDDIMScheduler, CogVideoXPipeline

    model = make_model("cogvideox")
    return CogVideoXPipeline(None, None, None, model, CogVideoXDDIMScheduler(prediction_type="v_prediction"))


def _hunyuan() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideoPipeline

    scheduler = FlowMatchEulerDiscreteScheduler()
    return HunyuanVideoPipeline(None, None, make_model("hunyuan"), None, scheduler, None, None)


def _flux() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    model = make_model("flux", in_channels=16)
    return FluxPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, None, None, model)


PIPELINES = {"wan": _wan, "wan ti2v": _wan_ti2v, "cogvideox": _cogvideox, "hunyuan": _hunyuan, "flux": _flux}
STEPS = {"wan": 3, "wan ti2v": 2, "cogvideox": 2, "hunyuan": 2, "flux": 2}


def _arguments(name: str) -> dict[str, Any]:
    common = {"num_inference_steps": STEPS[name], "output_type": "latent", "height": 80, "width": 48}
    if name == "flux":
        return common | {"prompt_embeds": draw(1, 7, 16), "pooled_prompt_embeds": draw(1, 8)} | {"height": 144}
    arguments = common | {"num_frames": 9, "prompt_embeds": draw(1, 7, 16)}
    if name == "hunyuan":
        # Guidance with two prompts of unequal length, one call for each.
        masks = torch.ones(2, 1, 7)
        masks[0, :, 3:] = 0
        negative: dict[str, Any] = {
            "negative_prompt_embeds": draw(1, 7, 16, seed=1),
            "negative_pooled_prompt_embeds": draw(1, 8),
        }
        negative |= {"negative_prompt_attention_mask": masks[1], "true_cfg_scale": 3.0}
        return arguments | negative | {"prompt_attention_mask": masks[0], "pooled_prompt_embeds": draw(1, 8)}
    return arguments | {"negative_prompt_embeds": draw(1, 7, 16, seed=1), "guidance_scale": 4.0}


def sample(pipe: Any, name: str, **more: Any) -> Tensor:
    """What the pipeline makes, as latents."""
    pipe.set_progress_bar_config(disable=True)
    result = pipe(**{**_arguments(name), **more}, generator=torch.Generator().manual_seed(7), return_dict=False)[0]
    return result if isinstance(result, Tensor) else torch.as_tensor(result)


def _compare(rank: int, world_size: int, names: list[str]) -> list[str]:
    problems = []
    single = alone()
    mask = ScheduledMask(TopPMask(0.4), dense_steps=1)
    for name in names:
        pipe = PIPELINES[name]()
        dense = sample(pipe, name)
        with parallelize(pipe, single, mask=mask):
            sparse = sample(pipe, name)
        if not max_error(dense, sparse) > 1e-4:
            problems.append(f"rank {rank}: {name}: the mask changes nothing")
        sp = make_sp("dbsp", 1 if world_size == 3 else 2, block_size=4)
        for kind, chosen, want in (("dense", None, dense), ("sparse", mask, sparse)):
            with parallelize(pipe, sp, mask=chosen) as handle:
                # Twice: the second run starts at step 0 again, with its dense step.
                for run in range(2):
                    error = max_error(sample(pipe, name), want)
                    if not error < 1e-4:
                        problems.append(f"rank {rank}: {name}, {kind}, run {run}: off by {error:.3g}")
                if handle.step != STEPS[name] - 1:
                    problems.append(f"rank {rank}: {name}: {STEPS[name]} denoising steps ended at step {handle.step}")
        if not torch.equal(sample(pipe, name), dense):
            problems.append(f"rank {rank}: {name} is not what it was")
        sp.destroy()
    single.destroy()
    return problems


@pytest.mark.parametrize(("world_size", "names"), [(2, ["wan", "wan ti2v", "flux"]), (3, ["cogvideox", "hunyuan"])])
def test_pipeline_equals_one_process(world_size: int, names: list[str]) -> None:
    """Two experts, guidance in one call and in two, prompts of unequal length, and dense first steps."""
    problems = [problem for rank in run_ranks(_compare, world_size, names, timeout_s=120) for problem in rank]
    assert not problems, "\n".join(problems)
