"""Models of image to video train on what is given of the first frame, alike on every layout."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dbsp_megatron.config import TrainConfig
from dbsp_megatron.config.parallel import ParallelConfig
from dbsp_megatron.config.sections import OptimConfig
from dbsp_megatron.data import DataConfig, open_dataset
from dbsp_megatron.data.latents import write_latents
from dbsp_megatron.masks import MaskConfig
from dbsp_megatron.models.dit import VideoDiT
from dbsp_megatron.train import flow_matching
from dbsp_megatron.train.trainer import Trainer
from tests.harness import run_ranks
from tests.integration.engine_runs import DEEPSPEED_ENV
from tests.integration.training import make_config, this_world, whole_state, with_run
from tests.megatron_on_cpu import megatron_on_cpu
from tests.unit.models.cores import DenseCore

MODEL = """
hidden_size: 24
num_layers: 2
num_heads: 4
head_dim: 6
ffn_hidden_size: 32
patch_size: [1, 2, 2]
in_channels: {channels}
out_channels: 4
text: cross
text_dim: 7
image_dim: 5
qk_norm: rms_hidden
modulation: table
time_freq_dim: 16
"""
CHANNELS, MASK, NUM_CLIPS = 4, 2, 5
SIZE = (3, 6, 10)
"""45 tokens in blocks of 5, which three ranks share unequally."""
SGD = OptimConfig(name="sgd", lr=1.0, schedule="constant", weight_decay=0.0)


def make_data(root: Path) -> Path:
    """Latents with conditions, image and text features, the model file, and a checkpoint with weights all random."""
    generator = torch.Generator().manual_seed(0)
    images = {}
    for index in range(NUM_CLIPS):
        name = f"v{index}.mp4@{index}"
        latents, condition = (torch.randn(n, *SIZE, generator=generator) for n in (CHANNELS, MASK + CHANNELS))
        path = root / "latents" / f"{name}.safetensors"
        write_latents(path, latents, name=name, settings={"vae": 1}, condition=condition)
        images[name] = torch.randn(3, 5, generator=generator)
    save_file(images, root / "images.safetensors")
    save_file(
        {"v1.mp4": torch.randn(6, 7, generator=generator), "context": torch.ones(6, 7)}, root / "text.safetensors"
    )
    (root / "model.yaml").write_text(MODEL.format(channels=2 * CHANNELS + MASK))
    trainer = open_trainer(with_run(i2v_config(root), name="start", init_from=""))
    with torch.no_grad():
        for parameter in trainer.engine.module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    trainer.save()
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("image_to_video"))


def i2v_config(
    root: Path, *, parallel: dict[str, Any] | None = None, method: str = "topp", **settings: Any
) -> TrainConfig:
    """A run from the weights of `make_data`."""
    files = {"context": str(root / "text.safetensors"), "image_context": str(root / "images.safetensors")}
    config = make_config(root, **({"grad_clip": 0.0, **files} | settings))
    mask = MaskConfig(top_p=0.5) if method == "topp" else MaskConfig(method="dense")
    return dataclasses.replace(
        with_run(config, init_from=str(root / "start")),
        data=DataConfig(latents=str(root / "latents"), patch_size=(1, 2, 2)),
        mask=mask,
        parallel=ParallelConfig(**(parallel or {})),
    )


def open_trainer(config: TrainConfig) -> Trainer:
    return Trainer(config, this_world(), open_dataset(config.data))


def _step(rank: int, world_size: int, root: Path, cases: list[dict[str, Any]]) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and change of all weights in one step of plain descent, the gradient."""
    found = []
    for case in cases:
        with megatron_on_cpu() if case.get("engine") == "megatron" else nullcontext():
            trainer = open_trainer(i2v_config(root, optim=SGD, **case))
            before = {name: tensor.clone() for name, tensor in whole_state(trainer).items()}
            loss = trainer.train_step(0)["train/loss"]
            after = whole_state(trainer)
            found.append((loss, {name: before[name] - after[name] for name in before if name.startswith("model.")}))
            trainer.close()
    return found


def reference_step(root: Path) -> tuple[float, dict[str, Tensor]]:
    """The same step in fp64 and one process, from the files: by its definition, without loader and trainer."""
    config = i2v_config(root, method="dense")
    model = VideoDiT(config.load_model(), core_attention=DenseCore)
    start = open_trainer(with_run(config, name="reference"))
    model.load_state_dict(
        {name.removeprefix("model."): x for name, x in whole_state(start).items() if name[:3] == "mod"}
    )
    model = model.double()
    texts, images = load_file(root / "text.safetensors"), load_file(root / "images.safetensors")
    samples = start.plan.sample_ids(0)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        name = f"v{sample}.mp4@{sample}"
        file = load_file(root / "latents" / f"{name}.safetensors")
        latents, condition = file["latents"].double(), file["condition"].double()
        noise = flow_matching.draw_noise(45, 16, seed=3, samples=[sample], step=0)[0].double()
        t = flow_matching.draw_timesteps(seed=3, samples=[sample], step=0).double()
        clean = _patches(latents)
        x = torch.cat([(1 - t) * clean + t * noise, _patches(condition)], dim=1)
        predicted = model(
            x[None],
            t,
            grid=(3, 3, 5),
            positions=torch.arange(45),
            context=texts.get(name.partition("@")[0], texts["context"])[None].double(),
            image_context=images[name][None].double(),
        )
        total = total + (predicted[0] - (noise - clean)).square().sum()
        count += predicted.numel()
    loss = total / count
    loss.backward()
    return loss.item(), {f"model.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


def _patches(video: Tensor) -> Tensor:
    """[C, T, H, W] to tokens of 1 x 2 x 2, the channel first, by unfolding."""
    parts = video.unfold(2, 2, 2).unfold(3, 2, 2)
    return parts.permute(1, 2, 3, 0, 4, 5).reshape(-1, video.shape[0] * 4)


def _largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def test_gradient_is_that_of_the_definition_for_any_number_of_ranks(root: Path) -> None:
    loss, gradient = reference_step(root)
    assert gradient["model.image_proj.linear_2.weight"].abs().max() > 1e-3
    assert gradient["model.patch_embed.weight"][:, 4 * CHANNELS :].abs().max() > 1e-3
    dense = {"method": "dense"}
    alone = _step(0, 1, root, [dense])
    two = run_ranks(_step, 2, root, [{"ulysses": 2, **dense}, {"ring": 2, **dense}], timeout_s=200)
    three = run_ranks(_step, 3, root, [{"ulysses": 3, **dense}, {"ring": 3, **dense}], timeout_s=200)
    for ranks in (alone, *two, *three):
        for found_loss, found in ranks:
            assert found_loss == pytest.approx(loss, rel=1e-5)
            assert _largest(found, gradient) < 1e-5


def test_sparse_masks_and_engines_train_alike(root: Path) -> None:
    (alone,) = _step(0, 1, root, [{"strategy": "none"}])
    megatron: dict[str, Any] = {"engine": "megatron", "micro_batch_size": 1}
    cases = [
        {"ulysses": 2, "ring": 2},
        {"ulysses": 2, "parallel": {"data_parallel": "fsdp"}},
        {"ulysses": 2, "parallel": {"tensor_parallel_size": 2}},
        {"ulysses": 2, "parallel": {"pipeline_parallel_size": 2}, **megatron},
        {"parallel": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True}, **megatron},
    ]
    ranks = run_ranks(_step, 4, root, cases, timeout_s=300)
    for index, case in enumerate(cases):
        # Pipeline stages hold the gradients of their own layers.
        gradient = {name: x for found in ranks for name, x in found[index][1].items()}
        assert _largest(gradient, alone[1]) < 1e-5, case
        assert [found[index][0] for found in ranks] == pytest.approx([alone[0]] * 4, rel=1e-5), case


def _curve(rank: int, world_size: int, root: Path, name: str, steps: list[int], mesh: tuple[int, int]) -> Any:
    config = i2v_config(root, ulysses=mesh[0], ring=mesh[1], steps=4, ema_decay=0.5, eval_every=4, eval_samples=2)
    trainer = open_trainer(with_run(config, name=name))
    assert trainer.steps_done == steps[0]
    losses = [trainer.train_step(step)["train/loss"] for step in steps]
    evaluated = trainer.evaluate()
    trainer.steps_done = steps[-1] + 1
    trainer.save()
    return losses, evaluated, {key: tensor.clone() for key, tensor in whole_state(trainer).items()}


def test_a_run_goes_on_as_if_it_had_never_stopped(root: Path) -> None:
    whole = _curve(0, 1, root, "whole", [0, 1, 2, 3], (1, 1))
    first = _curve(0, 1, root, "parts", [0, 1], (1, 1))
    second = _curve(0, 1, root, "parts", [2, 3], (1, 1))
    assert first[0] + second[0] == whole[0]
    assert second[1] == whole[1]
    assert all(torch.equal(second[2][key], whole[2][key]) for key in whole[2])
    for losses, evaluated, _ in run_ranks(_curve, 3, root, "ranks", [0, 1, 2, 3], (1, 3), timeout_s=200):
        assert losses == pytest.approx(whole[0], rel=1e-5)
        assert evaluated == pytest.approx(whole[1], rel=1e-5)


def test_missing_features_and_conditions_are_refused(root: Path, tmp_path: Path) -> None:
    config = i2v_config(root)
    loop = dataclasses.replace(config.train, image_context="")
    with pytest.raises(
        ValueError, match=r"train\.image_context must name a file .* \(image_dim=5\), got none; make it by"
    ):
        dataclasses.replace(config, train=loop).validate(1)
    features = load_file(root / "images.safetensors")
    del features["v3.mp4@3"]
    save_file(features, tmp_path / "images.safetensors")
    loop = dataclasses.replace(config.train, image_context=str(tmp_path / "images.safetensors"))
    with pytest.raises(ValueError, match=r"of every clip, got none for 1 of 5, the first v3\.mp4@3"):
        open_trainer(dataclasses.replace(config, train=loop))
    features["v3.mp4@3"] = torch.zeros(4, 5)
    save_file(features, tmp_path / "images.safetensors")
    with pytest.raises(ValueError, match=r"v3\.mp4@3 must be \[3, 5\] for this model, got \[4, 5\]"):
        open_trainer(dataclasses.replace(config, train=loop))
    (tmp_path / "model.yaml").write_text(MODEL.format(channels=2 * CHANNELS))
    with pytest.raises(
        ValueError, match=r"takes 4 channels beside the 4 noisy ones, the latents .* have 6 of a condition"
    ):
        dataclasses.replace(config, model=str(tmp_path / "model.yaml")).validate(1)
    (tmp_path / "model.yaml").write_text(MODEL.format(channels=CHANNELS).replace("image_dim: 5", ""))
    plain = dataclasses.replace(config, model=str(tmp_path / "model.yaml"))
    with pytest.raises(
        ValueError, match=r"train\.image_context=.* needs a model with image_dim; .* remove the setting"
    ):
        plain.validate(1)
    # A model of text to video trains on the same files, without their conditions.
    loop = dataclasses.replace(config.train, image_context="")
    trainer = open_trainer(with_run(dataclasses.replace(plain, train=loop), init_from="", name="text_only"))
    assert trainer.loader.load([0]).condition is None
    assert trainer.train_step(0)["train/loss"] > 0


def _deepspeed_goes_on(rank: int, world_size: int, root: Path) -> list[tuple[float, float, bool]]:
    """Losses of two steps, by stage, the second of them after a resume, which gives back the state bit for bit."""
    found = []
    for stage in (1, 3):
        config = i2v_config(root, ulysses=world_size, engine="deepspeed", parallel={"zero_stage": stage}, ema_decay=0.5)
        config = with_run(config, name=f"deepspeed_{stage}")
        trainer = open_trainer(config)
        first = trainer.train_step(0)["train/loss"]
        trainer.steps_done = 1
        trainer.save()
        saved = {name: tensor.clone() for name, tensor in whole_state(trainer).items()}
        trainer.close()
        again = open_trainer(config)
        state = whole_state(again)
        same = saved.keys() == state.keys() and all(torch.equal(saved[name], state[name]) for name in saved)
        found.append((first, again.train_step(1)["train/loss"], same))
        again.close()
    return found


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed: pip install deepspeed")
def test_deepspeed_loads_parameters_that_ranks_do_not_divide(root: Path) -> None:
    """The norm of five image channels on two ranks, under stages 1 and 3."""
    trainer = open_trainer(with_run(i2v_config(root, strategy="none", ema_decay=0.5), name="deepspeed_alone"))
    expected = [trainer.train_step(step)["train/loss"] for step in range(2)]
    for ranks in run_ranks(_deepspeed_goes_on, 2, root, timeout_s=200, env=DEEPSPEED_ENV):
        for first, second, same in ranks:
            assert [first, second] == pytest.approx(expected, rel=1e-5)
            assert same
