"""Adapters, weighted losses and clips of several sizes train alike on every engine and layout."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron.data import DataConfig, plan_batches
from dbsp_megatron.infer.pipeline import SamplingPipeline
from dbsp_megatron.models.dit.lora import is_adapter
from dbsp_megatron.train.trainer import Trainer
from tests.harness import run_ranks
from tests.integration.engine_runs import DEEPSPEED_ENV, Case, Run, differences, merged, spread_weights, train_case
from tests.integration.test_infer_sampling import sampling_config
from tests.integration.training import MemoryClips, make_trainer, this_world, whole_state

TP2 = {"tensor_parallel_size": 2}
LORA = {"rank": 3, "alpha": 5.0}
LIMITS = {"loss": 1e-5, "norm": 1e-4, "model": 1e-4, "ema": 1e-4, "optim.exp_avg": 2e-4, "optim.exp_avg_sq": 4e-4}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the weights that all runs start from."""
    return spread_weights(tmp_path_factory.mktemp("variants"))


def _train_all(rank: int, world_size: int, root: Path, cases: list[Case], loop: dict[str, Any]) -> list[Run]:
    return [train_case(root, case, 3, **loop) for case in cases]


LORA_CASES = [
    Case(ulysses=2, lora=LORA),
    Case(ring=2, parallel=TP2, lora=LORA),
    Case(ulysses=2, parallel={"data_parallel": "fsdp"}, lora=LORA),
    Case(engine="megatron", ulysses=2, lora=LORA),
    Case(engine="megatron", parallel=TP2 | {"pipeline_parallel_size": 2}, lora=LORA),
]


def test_adapters_train_alike_everywhere_and_leave_the_base_alone(root: Path) -> None:
    loop = {"ema_decay": 0.8}
    reference = train_case(root, Case(strategy="none", lora=LORA), 3, **loop)
    start = whole_state(make_trainer(Case(strategy="none").config(root)))
    for name, tensor in start.items():
        if name.startswith("model."):
            assert torch.equal(reference.state[name], tensor), name
    trained = {name for name in reference.state if name.startswith("optim.exp_avg.")}
    assert trained
    assert all(is_adapter(name) for name in trained)
    ranks = run_ranks(_train_all, 4, root, LORA_CASES, loop, timeout_s=200)
    for index, case in enumerate(LORA_CASES):
        found = differences(merged([runs[index] for runs in ranks]), reference)
        assert all(found[key] <= LIMITS[key] for key in found), f"{case}: {found}"


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed: pip install deepspeed")
def test_adapters_under_deepspeed(root: Path) -> None:
    cases = [Case(engine="deepspeed", ulysses=2, parallel={"zero_stage": stage}, lora=LORA) for stage in (0, 2, 3)]
    reference = train_case(root, Case(strategy="none", lora=LORA), 3, ema_decay=0.8)
    env = DEEPSPEED_ENV
    ranks = run_ranks(_train_all, 4, root, cases, {"ema_decay": 0.8}, timeout_s=200, env=env)
    for index, case in enumerate(cases):
        found = differences(merged([runs[index] for runs in ranks]), reference)
        assert all(found[key] <= LIMITS[key] for key in found), f"{case}: {found}"


def test_a_run_with_adapters_is_sampled_and_resumed(tmp_path: Path) -> None:
    """Sampling merges the averaged adapters into the base weights, which have no average."""
    spread_weights(tmp_path)
    case = Case(strategy="none", lora=LORA)
    trainer = make_trainer(case.config(tmp_path, ema_decay=0.5))
    for step in range(2):
        trainer.train_step(step)
    trainer.steps_done = 2
    trainer.save()
    again = make_trainer(case.config(tmp_path, ema_decay=0.5))
    assert again.steps_done == 2
    before, after = whole_state(trainer), whole_state(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    averaged = SamplingPipeline(sampling_config(tmp_path), this_world())
    plain = SamplingPipeline(sampling_config(tmp_path, weights="model"), this_world())
    assert averaged.weights == "ema"
    start = dataclasses.replace(sampling_config(tmp_path), checkpoint=str(tmp_path / "start"))
    base = SamplingPipeline(start, this_world())
    videos = [pipeline.sample(0)[0] for pipeline in (averaged, plain, base)]
    assert not torch.equal(videos[0], videos[1])
    assert not torch.equal(videos[1], videos[2])


class _TwoSizes(MemoryClips):
    """Every third clip is shorter and lower than the others."""

    def __init__(self, num_clips: int, data: DataConfig) -> None:
        super().__init__(num_clips, data)
        self._videos = [video[:, :3, :16] if index % 3 == 2 else video for index, video in enumerate(self._videos)]


def _train_sizes(rank: int, world_size: int, root: Path, cases: list[Case]) -> list[list[float]]:
    return [_losses(root, case) for case in cases]


def _losses(root: Path, case: Case) -> list[float]:
    config = case.config(root, timestep_sampling="mode", loss_weighting="min_snr", min_snr_gamma=3.0)
    trainer = Trainer(config, this_world(), _TwoSizes(7, config.data))
    return [trainer.train_step(step)["train/loss"] for step in range(4)]


def test_clips_of_several_sizes_weigh_by_their_tokens(root: Path) -> None:
    """Mixed steps, unequal micro-batches and weighted losses: one loss curve whatever the layout."""
    alone = torch.tensor(_losses(root, Case(strategy="none")))
    cases = [
        Case(ulysses=2),
        Case(strategy="none"),
        Case(ring=2, parallel={"data_parallel": "fsdp"}),
        Case(strategy="none", loop={"micro_batch_size": 1}),
        Case(ulysses=2, loop={"micro_batch_size": 2}),
    ]
    for losses in run_ranks(_train_sizes, 4, root, cases, timeout_s=200):
        for case, mine in zip(cases, losses, strict=True):
            assert float((torch.tensor(mine) / alone - 1).abs().max()) < 1e-4, case


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed: pip install deepspeed")
def test_deepspeed_steps_after_the_last_micro_batch_of_a_mixed_step(root: Path) -> None:
    """A mixed step is cut into more micro-batches than the accumulation steps that DeepSpeed is told of."""
    alone = torch.tensor(_losses(root, Case(strategy="none")))
    loop = {"micro_batch_size": 2}
    cases = [Case(engine="deepspeed", ulysses=2, parallel={"zero_stage": z}, loop=loop) for z in (0, 1, 2, 3)]
    plan = plan_batches(_TwoSizes(7, cases[0].config(root).data).sizes, 4, seed=3)
    assert {len(plan.slice_for(step, 0, 1, 2)) for step in range(4)} == {2, 3}
    for losses in run_ranks(_train_sizes, 2, root, cases, timeout_s=200, env=DEEPSPEED_ENV):
        for case, mine in zip(cases, losses, strict=True):
            assert float((torch.tensor(mine) / alone - 1).abs().max()) < 1e-4, case


def test_loss_weights_change_the_gradient_as_they_say(root: Path) -> None:
    """With an infinite gamma the weight is (1 - t)^2: the loss of one clip is scaled by a number known beforehand."""
    from dbsp_megatron.train.flow_matching import draw_timesteps

    losses: list[Tensor] = []
    for weighting in ("none", "min_snr"):
        config = Case(strategy="none").config(root, global_batch_size=1, loss_weighting=weighting, min_snr_gamma=1e9)
        trainer = make_trainer(config)
        losses.append(torch.tensor(trainer.train_step(0)["train/loss"]))
        samples = trainer.plan.slice_for(0, 0, 1, 1)[0]
    t = draw_timesteps(seed=config.train.seed, samples=samples, step=0)
    torch.testing.assert_close(losses[1], losses[0] * (1 - t[0]) ** 2, rtol=1e-5, atol=0)


def test_pipelines_need_clips_of_one_size(root: Path) -> None:
    messages = run_ranks(_refused_sizes, 2, root)
    assert all("clips of one size" in message for message in messages)


def _refused_sizes(rank: int, world_size: int, root: Path) -> str:
    from tests.megatron_on_cpu import megatron_on_cpu

    config = Case(engine="megatron", parallel={"pipeline_parallel_size": 2}).config(root)
    try:
        with megatron_on_cpu():
            Trainer(config, this_world(), _TwoSizes(7, config.data))
    except ValueError as error:
        return str(error)
    return ""
