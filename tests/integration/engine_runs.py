"""Short training runs of any engine and layout, and how they differ from one process."""

from __future__ import annotations

import dataclasses
import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dbsp_megatron.compat import import_deepspeed
from dbsp_megatron.config import TrainConfig
from dbsp_megatron.config.parallel import ParallelConfig
from dbsp_megatron.masks import MaskConfig
from dbsp_megatron.models.dit.lora import LoraConfig
from dbsp_megatron.train.trainer import Trainer
from tests.integration.training import MODEL, make_config, make_trainer, whole_state, with_run
from tests.megatron_on_cpu import megatron_on_cpu

DEEPSPEED_ENV = {"DS_ACCELERATOR": "cpu"}
"""Variables of the processes that DeepSpeed runs in."""

if os.environ.get("DS_ACCELERATOR") and find_spec("deepspeed") is not None:
    # Ranks import it before they form a group: on a busy machine it takes longer than they wait for one another.
    import_deepspeed(torch.device("cpu"))

# Four query heads and two of keys, so that two tensor-parallel ranks share them; layers for two pipeline stages.
SPLIT_MODEL = MODEL.replace("num_heads: 3", "num_heads: 4\nnum_kv_heads: 2")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout of a run; what is left out is not split."""

    engine: str = "native"
    ulysses: int = 1
    ring: int = 1
    strategy: str = "dbsp"
    parallel: dict[str, Any] = field(default_factory=dict)
    loop: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    mask: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        split = {key.removesuffix("_parallel_size"): value for key, value in self.parallel.items()}
        words = [self.engine, f"U{self.ulysses}R{self.ring}", *(f"{key}={value}" for key, value in split.items())]
        return " ".join([*words, *self.loop])

    def config(self, root: Path, **loop: Any) -> TrainConfig:
        """A run that starts from `spread_weights(root)`; `root` receives its checkpoints."""
        config = make_config(
            root,
            strategy=self.strategy,
            ulysses=self.ulysses,
            ring=self.ring,
            **({"global_batch_size": 4, "engine": self.engine} | self.loop | loop),
        )
        config = with_run(config, init_from=str(root / "start"))
        if self.mask:
            config = dataclasses.replace(config, mask=MaskConfig(**self.mask))
        return dataclasses.replace(config, parallel=ParallelConfig(**self.parallel), lora=LoraConfig(**self.lora))


def spread_weights(root: Path, model: str = SPLIT_MODEL) -> Path:
    """Write the model file and a checkpoint whose weights are all random, and return `root`.

    A new model's gates are zero, and with them the gradients of nearly all of its weights.
    """
    (root / "model.yaml").write_text(model)
    trainer = make_trainer(with_run(make_config(root, strategy="none"), name="start"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.engine.module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    trainer.save()
    return root


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run measured on one rank, and its state with split tensors put together."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


def run_steps(trainer: Trainer, first: int, last: int) -> Run:
    """Steps `first` to `last` (0-based, not included)."""
    rows = [trainer.train_step(step) for step in range(first, last)]
    trainer.steps_done = last
    return Run(
        losses=[row["train/loss"] for row in rows],
        norms=[row["train/grad_norm"] for row in rows],
        state={name: tensor.clone() for name, tensor in whole_state(trainer).items()},
    )


def train_case(root: Path, case: Case, num_steps: int, **loop: Any) -> Run:
    """Train and release the engine."""
    with megatron_on_cpu() if case.engine == "megatron" else nullcontext():
        trainer = make_trainer(case.config(root, **loop))
        run = run_steps(trainer, 0, num_steps)
        trainer.close()
    return run


def merged(runs: list[Run]) -> Run:
    """One run of those of all ranks: pipeline stages have the state of their own layers."""
    for other in runs[1:]:
        assert (other.losses, other.norms) == (runs[0].losses, runs[0].norms), "ranks report different numbers"
    state: dict[str, Tensor] = {}
    for run in runs:
        for name, tensor in run.state.items():
            if name in state:
                torch.testing.assert_close(tensor, state[name], rtol=1e-5, atol=1e-6, msg=f"ranks differ in {name}")
            state[name] = tensor
    return Run(losses=runs[0].losses, norms=runs[0].norms, state=state)


def differences(run: Run, reference: Run) -> dict[str, float]:
    """Largest differences: relative for losses and norms, absolute for weights, relative to the largest for moments."""
    assert run.state.keys() == reference.state.keys(), run.state.keys() ^ reference.state.keys()
    found = {
        "loss": max(abs(a / b - 1) for a, b in zip(run.losses, reference.losses, strict=True)),
        "norm": max(abs(a / b - 1) for a, b in zip(run.norms, reference.norms, strict=True)),
    }
    for name, tensor in run.state.items():
        other = reference.state[name]
        kind = ".".join(name.split(".")[: 2 if name.startswith("optim.") else 1])
        scale = 1.0 if kind in ("model", "ema") else max(float(other.abs().max()), 1e-7)
        found[kind] = max(found.get(kind, 0.0), float((tensor - other).abs().max()) / scale)
    return found
