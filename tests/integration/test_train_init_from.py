"""Fine-tuning: a new run takes the weights of another, which may have a coarse branch or not."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron.config import InferConfig, TrainConfig
from dbsp_megatron.config.cli import parse_train
from dbsp_megatron.config.sections import RunConfig, SampleConfig
from dbsp_megatron.infer.pipeline import SamplingPipeline
from dbsp_megatron.masks import MaskConfig
from dbsp_megatron.models.dit.coarse import in_coarse_branch
from dbsp_megatron.train.trainer import Trainer
from tests.harness import run_ranks
from tests.integration.training import make_config, make_trainer, this_world, whole_state, with_run

DENSE = MaskConfig(method="dense")
VSA = MaskConfig(method="vsa", density=0.4, ramp="linear", ramp_steps=2)


def _config(root: Path, name: str, mask: MaskConfig, start: str = "", **options: Any) -> TrainConfig:
    config = dataclasses.replace(make_config(root, **options), mask=mask)
    return with_run(config, name=name, init_from=start and str(root / start))


def _trained(config: TrainConfig, steps: int = 2) -> Trainer:
    trainer = make_trainer(config)
    for step in range(steps):
        trainer.train_step(step)
    trainer.steps_done = steps
    trainer.save()
    return trainer


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.engine.module.named_parameters()}


def _spoken(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "coarse_branch" in record.getMessage()]


def test_a_dense_run_goes_on_as_vsa_and_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights, loss, step and learning rate of the first step; gates at their initial values, said once each way."""
    dense = _trained(_config(tmp_path, "dense", DENSE, ema_decay=0.9))
    kept = _weights(dense)
    with caplog.at_level(logging.WARNING):
        vsa = make_trainer(_config(tmp_path, "vsa", VSA, "dense", ema_decay=0.9))
        assert len(_spoken(caplog)) == 1
        assert "lacks 8 tensors" in _spoken(caplog)[0]
    loaded = _weights(vsa)
    assert {name for name in loaded if name not in kept} == {name for name in loaded if in_coarse_branch(name)}
    assert vsa.steps_done == 0
    for name, weight in loaded.items():
        assert torch.equal(weight, kept.get(name, torch.full_like(weight, float(name.endswith("fine.bias"))))), name
        assert vsa.engine.ema is not None
        assert torch.equal(vsa.engine.ema.tensors[name], weight), name
    # The ramp starts at density 1: the first loss is that of the dense model.
    again = make_trainer(_config(tmp_path, "again", DENSE, "dense"))
    first = vsa.train_step(0)
    assert first["train/loss"] == pytest.approx(again.train_step(0)["train/loss"], rel=1e-6)
    assert first["sp/density"] == 1
    # Density is told one step later, once its counts are on the host.
    densities = [vsa.train_step(step)["sp/density"] for step in (1, 2, 3)]
    assert densities[0] == 1 > densities[1] > densities[2] == pytest.approx(0.5)
    vsa.steps_done = 4
    vsa.save()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        back = make_trainer(_config(tmp_path, "back", DENSE, "vsa"))
    assert len(_spoken(caplog)) == 1
    assert "also holds 8 tensors" in _spoken(caplog)[0]
    trained = _weights(vsa)
    for name, weight in _weights(back).items():
        assert torch.equal(weight, trained[name]), name
    assert not torch.equal(trained["patch_embed.weight"], kept["patch_embed.weight"])


def test_a_run_with_a_checkpoint_goes_on_from_it(tmp_path: Path) -> None:
    """The same command starts the run and continues it, gates and their moments included."""
    _trained(_config(tmp_path, "dense", DENSE))
    first = _trained(_config(tmp_path, "vsa", VSA, "dense"))
    again = make_trainer(_config(tmp_path, "vsa", VSA, "dense"))
    assert again.steps_done == 2
    for name, tensor in whole_state(first).items():
        assert torch.equal(whole_state(again)[name], tensor), name


def test_resume_takes_a_dense_optimizer_into_a_vsa_model(tmp_path: Path) -> None:
    """`run.resume=PATH` goes on with step and moments; those of the gates start at zero."""
    dense = _trained(_config(tmp_path, "dense", DENSE))
    config = with_run(_config(tmp_path, "vsa", VSA), resume=str(tmp_path / "dense"))
    vsa = make_trainer(config)
    assert vsa.steps_done == 2
    old, new = whole_state(dense), whole_state(vsa)
    for name, tensor in new.items():
        if name.startswith("optim."):
            assert torch.equal(tensor, old.get(name, torch.zeros_like(tensor))), name
    vsa.train_step(2)


def test_other_missing_tensors_are_refused(tmp_path: Path) -> None:
    """Only the branch may be new."""
    _trained(_config(tmp_path, "dense", DENSE))
    text = (tmp_path / "model.yaml").read_text().replace("qk_norm: rms_head", "qk_norm: layer_head")
    (tmp_path / "other.yaml").write_text(text)
    config = dataclasses.replace(_config(tmp_path, "other", DENSE, "dense"), model=str(tmp_path / "other.yaml"))
    with pytest.raises(ValueError, match=r"does not fit this model"):
        make_trainer(config)


def test_coarse_branch_setting_decides_over_the_mask(tmp_path: Path) -> None:
    """By itself it follows the mask method and the model file; the others do not."""
    for mask, wanted, has in (
        (VSA, "auto", True),
        (VSA, "never", False),
        (DENSE, "auto", False),
        (DENSE, "always", True),
    ):
        config = _config(tmp_path, "run", mask, coarse_branch=wanted)
        assert config.load_model().coarse_branch is has, (mask, wanted)
    path = tmp_path / "model.yaml"
    path.write_text(path.read_text() + "coarse_branch: true\n")
    assert _config(tmp_path, "run", DENSE).load_model().coarse_branch


def test_init_from_is_a_flag_and_excludes_resume() -> None:
    assert parse_train(["--init-from", "runs/dense"]).config.run.init_from == "runs/dense"
    with pytest.raises(ValueError, match=r"run\.init_from must be empty with run\.resume=a, got 'b'"):
        RunConfig(resume="a", init_from="b")


def _finetune(rank: int, world_size: int, root: Path, mesh: tuple[int, int], recompute: bool) -> list[float]:
    config = _config(root, "vsa", VSA, "dense", ulysses=mesh[0], ring=mesh[1], recompute=recompute)
    trainer = make_trainer(config)
    losses = [trainer.train_step(step)["train/loss"] for step in range(4)]
    assert len(set(trainer.world.gather(_weights(trainer)["patch_embed.weight"].sum().item()))) == 1
    return losses


def test_vsa_finetunes_alike_on_any_mesh(tmp_path: Path) -> None:
    """Four optimizer steps from a dense checkpoint, with and without recompute, on 1 and on 2 x 2 ranks."""
    _trained(_config(tmp_path, "dense", DENSE))
    alone = _finetune(0, 1, tmp_path, (1, 1), False)
    assert alone[0] != alone[-1]
    for recompute in (False, True):
        for losses in run_ranks(_finetune, 4, tmp_path, (2, 2), recompute, timeout_s=300):
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=1e-5, atol=0)


def test_a_vsa_run_samples_with_its_branch(tmp_path: Path) -> None:
    """The model of the checkpoint has it, whatever mask sampling uses."""
    _trained(_config(tmp_path, "dense", DENSE))
    _trained(_config(tmp_path, "vsa", VSA, "dense"), steps=4)
    sample = SampleConfig(steps=2, device="cpu")
    sp = make_config(tmp_path, strategy="none").sp
    for mask in (DENSE, MaskConfig(method="vsa", density=0.4)):
        pipeline = SamplingPipeline(
            InferConfig(checkpoint=str(tmp_path / "vsa"), sp=sp, mask=mask, sample=sample), this_world()
        )
        assert pipeline.model_config.coarse_branch
        assert torch.isfinite(pipeline.sample(0)[0]).all()
