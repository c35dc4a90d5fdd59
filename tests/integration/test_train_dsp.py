"""Training and sampling of models that attend along one dim at a time: the same on any number of ranks."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dbsp_megatron.config import InferConfig, TrainConfig
from dbsp_megatron.config.parallel import ParallelConfig
from dbsp_megatron.config.sections import OptimConfig, SampleConfig
from dbsp_megatron.dsp import DspSession
from dbsp_megatron.infer.pipeline import SamplingPipeline
from dbsp_megatron.masks import MaskConfig
from dbsp_megatron.strategy import SequenceParallelConfig
from tests.distributed.axial_models import sent_numbers
from tests.harness import run_ranks
from tests.integration.training import make_config, make_trainer, save_first_step, this_world, whole_state

SPACE_TIME = """
hidden_size: 24
num_layers: 4
num_heads: 3
head_dim: 8
ffn_hidden_size: 32
patch_size: [1, 8, 8]
in_channels: 3
text: cross
text_dim: 6
qk_norm: rms_head
modulation: table
time_freq_dim: 16
attention_dims: [S, T]
rope_dims: [T]
space_positions: area
fps: 12.0
"""
THREE_DIMS = (
    SPACE_TIME.replace("[S, T]", "[T, H, W]")
    .replace("num_layers: 4", "num_layers: 3")
    .replace("text: cross\ntext_dim: 6", "text: none")
)
SGD = OptimConfig(name="sgd", lr=1.0, schedule="constant")


def dsp_config(root: Path, ranks: int = 1, model: str = SPACE_TIME, **loop: Any) -> TrainConfig:
    """4 frames of 9 patches; on one rank without a strategy."""
    parallel = loop.pop("parallel", ParallelConfig())
    path = root / "model.yaml"
    if not path.exists():
        # Several ranks may come here at once: the content is the same, and a rename is atomic.
        temporary = root / f"model_{os.getpid()}.tmp"
        temporary.write_text(model)
        temporary.replace(path)
    mask, block_size = loop.pop("mask", MaskConfig(method="dense")), loop.pop("block_size", 64)
    config = make_config(root, strategy="none" if ranks == 1 else "dsp", ulysses=ranks, **loop)
    sp = dataclasses.replace(config.sp, block_size=block_size)
    return dataclasses.replace(config, mask=mask, parallel=parallel, sp=sp)


def train(config: TrainConfig) -> tuple[list[float], Tensor]:
    """Losses of the run's steps, and all weights after them."""
    trainer = make_trainer(config)
    losses = [trainer.train_step(step)["train/loss"] for step in range(config.train.steps)]
    final = [tensor.flatten() for name, tensor in sorted(whole_state(trainer).items()) if name.startswith("model.")]
    return losses, torch.cat(final).clone()


def _train(rank: int, world_size: int, root: Path, cases: list[dict[str, Any]]) -> list[tuple[list[float], Tensor]]:
    return [train(dsp_config(root, **case)) for case in cases]


@pytest.mark.parametrize("model", [SPACE_TIME, THREE_DIMS])
def test_five_steps_do_not_depend_on_the_number_of_ranks(tmp_path: Path, model: str) -> None:
    reference = train(dsp_config(tmp_path, model=model))
    cases: list[dict[str, Any]] = [
        {"ranks": 4},
        {"ranks": 2},
        {"ranks": 4, "recompute": "full"},
        {"ranks": 2, "recompute": "selective"},
    ]
    cases += [{"ranks": 2, "parallel": ParallelConfig(data_parallel="fsdp")}]
    runs = run_ranks(_train, 4, tmp_path, [case | {"model": model} for case in cases], timeout_s=200)[0]
    assert reference[0][0] != reference[0][-1], "the reference does not train"
    for losses, final in runs:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference[0]), rtol=1e-4, atol=0)
        torch.testing.assert_close(final, reference[1], rtol=0, atol=1e-4)


def test_sparse_steps_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """Frames of 9 tokens in 5 blocks of 2, a mask for each; the 4 frames are too few blocks."""
    sparse: dict[str, Any] = {"mask": MaskConfig(method="topk", density=0.4), "block_size": 2, "recompute": True}
    reference = train(dsp_config(tmp_path, **sparse))
    losses, final = run_ranks(_train, 3, tmp_path, [{"ranks": 3, **sparse}], timeout_s=200)[0][0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference[0]), rtol=1e-4, atol=0)
    torch.testing.assert_close(final, reference[1], rtol=0, atol=1e-4)
    assert (train(dsp_config(tmp_path))[1] - final).abs().max() > 1e-3


def test_gradients_have_the_scale_of_one_process(tmp_path: Path) -> None:
    """With SGD and lr 1 the step is the gradient, so a constant factor shows."""
    settings: dict[str, Any] = {"optim": SGD, "steps": 1, "grad_clip": 0.0, "seed": 8}
    before = train(dsp_config(tmp_path, **settings | {"optim": OptimConfig(name="sgd", lr=1e-30)}))[1]
    step = train(dsp_config(tmp_path, **settings))[1] - before
    assert step.abs().max() > 1e-2
    cases = [{"ranks": 3, **settings}]
    for _, other in run_ranks(_train, 3, tmp_path, cases)[0]:
        torch.testing.assert_close(other - before, step, rtol=0, atol=1e-6)


def _metrics(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    trainer = make_trainer(dsp_config(root, world_size))
    row = trainer.train_step(0)
    session = trainer.engine.module.session
    assert isinstance(session, DspSession)
    assert session.last_plan is not None
    plan, config = session.last_plan, trainer.engine.module.dit_config
    return {
        "sent": row["sp/bytes_sent"],
        "numbers": sent_numbers(plan, config, 2, rank),
        "strategy": row["sp/strategy"],
        "in_units": [step.in_units for step in plan.steps],
    }


def test_metrics_count_what_layers_send(tmp_path: Path) -> None:
    """Four frames stay cut in two; layers along them are in units, as 9 places are not to be halved. Two samples."""
    found = run_ranks(_metrics, 2, tmp_path)
    assert all(each["strategy"] == "dsp" and each["in_units"] == [False, True] * 2 for each in found)
    # Of all ranks together, as a rank sends other parts backward than forward; four bytes a number.
    sent, numbers = (sum(each[key] for each in found) for key in ("sent", "numbers"))
    assert sent == 4 * numbers > 0


def _saved_run(root: Path) -> None:
    save_first_step(make_trainer(dsp_config(root, ema_decay=0.5)))


def _sampling(root: Path, ranks: int, **sample: Any) -> InferConfig:
    settings = {"steps": 3, "num_samples": 2, "device": "cpu", "seed": 4, "guidance_scale": 2.0}
    return InferConfig(
        checkpoint=str(root / "run"),
        sp=SequenceParallelConfig(strategy="none" if ranks == 1 else "dsp", ulysses_degree=ranks),
        mask=MaskConfig(method="dense"),
        sample=SampleConfig(**(settings | {"context": str(root / "text.safetensors")} | sample)),
    )


def _sample(rank: int, world_size: int, root: Path, cases: list[dict[str, Any]]) -> list[Tensor]:
    return [SamplingPipeline(_sampling(root, **case), this_world()).sample(1)[0] for case in cases]


def test_videos_and_images_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """Guidance in one batch and in two calls, other lengths than in training, and a single frame."""
    _saved_run(tmp_path)
    save_file({"context": torch.randn(5, 6), "negative": torch.randn(5, 6)}, tmp_path / "text.safetensors")
    kinds: list[dict[str, Any]] = [
        {},
        {"guidance_mode": "sequential"},
        {"num_frames": 1},
        {"num_frames": 7, "height": 8, "width": 40, "sampler": "euler"},
    ]
    alone = _sample(0, 1, tmp_path, [{"ranks": 1} | kind for kind in kinds])
    assert alone[0].std() > 0.1
    torch.testing.assert_close(alone[0], alone[1], rtol=0, atol=1e-4)
    cases = [{"ranks": ranks} | kind for ranks in (3,) for kind in kinds]
    for videos in run_ranks(_sample, 3, tmp_path, cases, timeout_s=200):
        for video, expected in zip(videos, alone, strict=True):
            torch.testing.assert_close(video, expected, rtol=0, atol=1e-4)


def _finish(rank: int, world_size: int, root: Path) -> int:
    config = dsp_config(root, world_size, steps=12, optim=OptimConfig(lr=1e-2), check=True)
    return make_trainer(config).run()


def test_a_whole_run_reports(tmp_path: Path) -> None:
    assert run_ranks(_finish, 2, tmp_path, timeout_s=200) == [0, 0]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["strategy"] == "dsp"
    assert summary["bytes_sent_per_step"] > 0
    assert summary["last_loss"] < summary["first_loss"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sp": SequenceParallelConfig(strategy="dbsp")}, "sp.strategy=dbsp splits one sequence"),
        ({"mask": MaskConfig(method="radial")}, "mask.method=radial .* is for attention to whole videos"),
        ({"mask": MaskConfig(method="topk", cube=(1, 2, 2))}, "mask.cube=.1, 2, 2. is for attention to whole videos"),
        ({"parallel": ParallelConfig(tensor_parallel_size=2)}, "tensor_parallel_size=2 must divide .* heads 3"),
        ({"sp": SequenceParallelConfig(strategy="dsp", ring_degree=2)}, "ring_degree"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(dsp_config(tmp_path, 2), **change).validate(2)


def test_dsp_is_refused_for_a_model_of_one_sequence(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    config = make_config(tmp_path / "one", strategy="dsp")
    with pytest.raises(ValueError, match="needs a model that attends along one dim"):
        config.validate(1)
    text = dsp_config(tmp_path, 2).validate(4).describe()
    assert "4 = 2 data parallel x 2 sequence parallel" in text
    assert "dsp, 2 ranks" in text
