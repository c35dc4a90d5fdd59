"""Ranks of a parallel transformer refuse together, exchange nothing for cross-attention, and share feature caches."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from dbsp_megatron.masks import TopKMask, TopPMask
from dbsp_megatron.models.diffusers import parallelize
from tests.distributed.diffusers_models import make_inputs, make_model
from tests.distributed.sharded import make_sp, recorded_collectives, refusal
from tests.distributed.test_diffusers import alone
from tests.harness import run_ranks
from tests.reference import max_error

pytestmark = [pytest.mark.diffusers, pytest.mark.timeout(300)]


def _refusals(rank: int, world_size: int) -> dict[str, str]:
    """What each rank hears when the last one differs."""
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    odd = rank == world_size - 1
    sp, model = make_sp("dbsp", world_size, 1, block_size=4), make_model("wan")
    inputs, heard = make_inputs("wan", model), {}

    def call(**changes: Any) -> str:
        given = {**inputs, **changes} if odd else inputs
        with torch.no_grad():
            return refusal(lambda: model(**given))

    heard["class"] = refusal(lambda: parallelize(torch.nn.Linear(2, 2) if odd else model, sp))
    heard["mask"] = refusal(lambda: parallelize(model, sp, mask=TopKMask(0.5) if odd else TopPMask(0.5)))
    with parallelize(model, sp):
        other = make_inputs("wan", model, seed=3)
        heard["noise"] = call(hidden_states=other["hidden_states"])
        heard["prompt"] = call(encoder_hidden_states=other["encoder_hidden_states"])
        heard["timestep"] = call(timestep=inputs["timestep"] - 1)
        heard["batch"] = call(**{key: x[:1] for key, x in inputs.items()})
        long = torch.zeros(2, 512, 16)
        long[:, :60] = torch.randn(2, 60, 16, generator=torch.Generator().manual_seed(1))
        word = long.clone()
        word[0, 41] = torch.randn(16, generator=torch.Generator().manual_seed(2))
        inputs["encoder_hidden_states"] = long
        heard["word"] = call(encoder_hidden_states=word)
        heard["negative word"] = call(encoder_hidden_states=word.flip(0))
        # Encoders may round differently.
        rounded = long * (1 + 0.01 * torch.randn(long.shape, generator=torch.Generator().manual_seed(rank)))
        heard["rounding"] = call(encoder_hidden_states=rounded)
        before = dict(model.attn_processors)
        if odd:
            model.set_attn_processor(WanAttnProcessor())
        heard["processors"] = call()
        model.set_attn_processor(before)
        with torch.set_grad_enabled(odd):
            heard["gradients"] = refusal(lambda: model(**inputs))
        heard["sound"] = call()
    flux = make_model("flux")
    with parallelize(flux, sp), torch.no_grad():
        given = make_inputs("flux", flux)
        # A scale that the model takes as an input, and samples of a control network.
        heard["guidance"] = refusal(lambda: flux(**{**given, "guidance": given["guidance"] + 2 * odd}))
        samples = [torch.randn(2, 45, 48, generator=torch.Generator().manual_seed(i + odd)) for i in range(2)]
        heard["control"] = refusal(lambda: flux(**given, controlnet_block_samples=samples))
    with parallelize(model, make_sp("ulysses", block_size=64)), torch.no_grad():
        heard["no tokens"] = refusal(lambda: model(**make_inputs("wan ti2v", model)))
    sp.destroy()
    return heard


def test_ranks_refuse_together() -> None:
    """Different noise or prompts would give a plausible video; one-sided faults must not leave others waiting."""
    heard = run_ranks(_refusals, 2)
    assert heard[0] == heard[1]
    for what, says in {
        "class": "cannot parallelize a Linear",
        "mask": "ranks disagree about the kind of mask",
        "noise": "rank.s. .1. were given another hidden_states than rank 0.*seed",
        "prompt": "given another encoder_hidden_states",
        "word": "given another encoder_hidden_states",
        "negative word": "given another encoder_hidden_states",
        "timestep": "disagree about the timestep",
        "batch": "disagree about shapes of the inputs",
        "processors": "given the processor WanAttnProcessor while it is parallel",
        "no tokens": "one entry for each token, and a rank holds no token",
        "gradients": "disagree about whether gradients are on",
        "rounding": "accepted",
        "sound": "accepted",
        "guidance": "given another guidance than rank 0",
        "control": "given another controlnet_block_samples",
    }.items():
        assert re.search(says, heard[0][what]), f"{what}: {heard[0][what]}"


def _cross_attention(rank: int, world_size: int) -> dict[str, int]:
    """Collectives inside the two kinds of attention of Wan, image to video."""
    sp, model = make_sp("dbsp", 2, 2, block_size=4), make_model("wan i2v")
    counts = {"attn1": 0, "attn2": 0}
    with torch.no_grad(), parallelize(model, sp), recorded_collectives() as log:
        for name in counts:
            marks: list[int] = []
            module = getattr(model.blocks[0], name)

            def count(*_: Any, name: str = name, marks: list[int] = marks) -> None:
                counts[name] += len(log) - marks[-1]

            module.register_forward_pre_hook(lambda *_, marks=marks: marks.append(len(log)))
            module.register_forward_hook(count)
        model(**make_inputs("wan i2v", model))
    sp.destroy()
    return counts


def test_cross_attention_issues_no_collective() -> None:
    """Context is on every rank (Trap B33)."""
    for counts in run_ranks(_cross_attention, 4):
        assert counts["attn2"] == 0
        assert counts["attn1"] > 0


def _cached(model: Any, name: str) -> list[torch.Tensor]:
    """Outputs of six steps, of which a cache skips the attention of every other one."""
    from diffusers import PyramidAttentionBroadcastConfig

    inputs = make_inputs(name, model)
    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 1000),
        current_timestep_callback=lambda: 500,
    )
    model.enable_cache(config)
    outs = []
    for step in range(6):
        scale = 1 + 0.1 * step
        changed = {"hidden_states": inputs["hidden_states"] * scale, "timestep": inputs["timestep"] / scale}
        outs.append(model(**{**inputs, **changed}).sample)
    model.disable_cache()
    return outs


def _caches(rank: int, world_size: int, names: list[str]) -> list[str]:
    problems = []
    single = alone()
    with torch.no_grad():
        for name in names:
            model, mask = make_model(name), TopPMask(0.3)
            inputs = make_inputs(name, model)
            with parallelize(model, single, mask=mask):
                wants = _cached(model, name)
                again = model(**{**inputs, "hidden_states": inputs["hidden_states"] * 1.1}).sample
            sp = make_sp("dbsp", 1, world_size, block_size=4)
            with recorded_collectives() as log, parallelize(model, sp, mask=mask):
                gots = _cached(model, name)
                cached_calls = len(log)
                model(**inputs)
                calls = len(log) - cached_calls
            error = max(max_error(got, want) for got, want in zip(gots, wants, strict=True))
            if not error < 1e-4:
                problems.append(f"rank {rank}: {name} with a cache is off by {error:.3g}")
            if not max_error(again, wants[1]) > 1e-4:
                problems.append(f"rank {rank}: {name}: the cache skips nothing")
            if not cached_calls < 6 * calls:
                problems.append(f"rank {rank}: {name}: {cached_calls} collectives with a cache, {calls} a step without")
            sp.destroy()
    single.destroy()
    return problems


def test_feature_cache_equals_one_process() -> None:
    """A cache holds tokens of one layout, which stays while a ring learns a better one."""
    problems = [problem for rank in run_ranks(_caches, 3, ["wan", "hunyuan"], timeout_s=120) for problem in rank]
    assert not problems, "\n".join(problems)
