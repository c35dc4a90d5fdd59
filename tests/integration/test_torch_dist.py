"""Checkpoints in megatron-core's format go on under other layouts, engines and formats as if nothing had stopped."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from torch import Tensor

from dbsp_megatron.config.parallel import ParallelConfig
from dbsp_megatron.config.resolve import ResolvedMesh
from dbsp_megatron.models.dit import load_model_config
from dbsp_megatron.models.dit.lora import is_adapter
from dbsp_megatron.models.dit.model import VideoDiT
from dbsp_megatron.train.checkpoint import Checkpoint, open_checkpoint
from dbsp_megatron.train.checkpoint_folder import list_checkpoints
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.engines.base import ParameterNames
from dbsp_megatron.train.engines.megatron_state import MegatronState
from dbsp_megatron.train.mesh import megatron_mesh
from dbsp_megatron.train.state import gathered
from tests.harness import run_ranks
from tests.integration.engine_runs import Case, Run, differences, merged, run_steps, spread_weights
from tests.integration.torch_dist_runs import LOOP, PP2, SAVED, TP2, allow_children, go_on, save_after, trainer_of
from tests.integration.training import this_world, whole_state
from tests.megatron_on_cpu import megatron_on_cpu

# AdamW moves a weight by the learning rate whatever the size of its gradient, so rounding shows there most.
LIMITS = {"loss": 1e-4, "norm": 1e-4, "model": 1e-4, "ema": 1e-4, "optim.exp_avg": 1e-3, "optim.exp_avg_sq": 1e-3}
NATIVE = LOOP | {"checkpoint_format": "native"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the weights that all runs start from, and the run `saved`, stopped after two steps."""
    folder = spread_weights(tmp_path_factory.mktemp("torch_dist"))
    run_ranks(save_after, 2, folder, SAVED, "saved", timeout_s=100)
    return folder


@pytest.fixture(scope="module")
def alone(root: Path) -> tuple[Run, Run]:
    """One process that does not stop: its first two steps, and the three after them."""
    trainer = trainer_of(root, Case(strategy="none", loop=NATIVE), "alone")
    return run_steps(trainer, 0, 2), run_steps(trainer, 2, 5)


def _whole(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """All tensors, read by one process that knows nothing of Megatron."""
    tensors = {name: torch.full(entry.shape, torch.nan) for name, entry in checkpoint.stored().items()}
    checkpoint.load_tensors(tensors, World())
    return tensors


def _expect(ranks: list[list[Run]], cases: list[Case], expected: Run) -> None:
    for index, case in enumerate(cases):
        found = differences(merged([runs[index] for runs in ranks]), expected)
        assert all(found[kind] < limit for kind, limit in LIMITS.items()), (str(case), found)


def test_the_state_of_the_step_is_saved(root: Path, alone: tuple[Run, Run]) -> None:
    stored = _whole(open_checkpoint(root / "saved", World()))
    found = differences(
        Run(losses=[1.0], norms=[1.0], state=stored), dataclasses.replace(alone[0], losses=[1.0], norms=[1.0])
    )
    assert all(found[kind] < limit for kind, limit in LIMITS.items()), found


def test_a_run_goes_on_under_other_layouts(root: Path, alone: tuple[Run, Run]) -> None:
    cases = [
        *(Case(engine="megatron", parallel=parallel, loop=LOOP) for parallel in (TP2, {}, PP2)),
        Case(engine="megatron", parallel=TP2 | {"distributed_optimizer": False}, loop=LOOP),
        Case(ulysses=2, parallel={"data_parallel": "fsdp"}, loop=NATIVE),
    ]
    _expect(run_ranks(go_on, 2, root, "saved", cases, timeout_s=100), cases, alone[1])


def _four(rank: int, world_size: int, root: Path, cases: list[Case]) -> list[Run]:
    save_after(rank, world_size, root, Case(engine="megatron", parallel=TP2 | PP2, loop=LOOP), "saved_by_four")
    return go_on(rank, world_size, root, "saved", cases)


def test_more_ranks_and_fewer(root: Path, alone: tuple[Run, Run]) -> None:
    cases = [Case(engine="megatron", ulysses=2, parallel=TP2, loop=LOOP)]
    _expect(run_ranks(_four, 4, root, cases, timeout_s=100), cases, alone[1])
    cases = [Case(engine="megatron", ulysses=2, loop=LOOP), Case(engine="megatron", loop=NATIVE)]
    _expect(run_ranks(go_on, 2, root, "saved_by_four", cases, timeout_s=100), cases, alone[1])
    cases = [Case(engine="megatron", strategy="none", loop=LOOP)]
    _expect(run_ranks(go_on, 1, root, "saved", cases, timeout_s=100), cases, alone[1])
    cases = [Case(strategy="none", loop=NATIVE)]
    _expect([go_on(0, 1, root, "saved_by_four", cases)], cases, alone[1])


def _change_format(rank: int, world_size: int, root: Path, parallels: list[dict[str, Any]]) -> list[float]:
    losses = []
    for step, parallel in enumerate(parallels):
        case = Case(engine="megatron", parallel=parallel, loop=NATIVE if step % 2 else LOOP)
        with megatron_on_cpu():
            trainer = trainer_of(root, case, "changing", init_from=str(root / "start") if step == 0 else "")
            assert trainer.steps_done == step
            losses += run_steps(trainer, step, step + 1).losses
            trainer.save()
            trainer.close()
    return losses


def test_the_format_may_change_at_every_resume(root: Path, alone: tuple[Run, Run]) -> None:
    """The folder says what it is, in the run folder and by path; both formats share `latest` and what is kept."""
    for losses in run_ranks(_change_format, 2, root, [TP2, {}, {}, PP2], timeout_s=100):
        assert losses == pytest.approx(alone[0].losses + alone[1].losses[:2], rel=1e-4)
    folder = root / "changing" / "checkpoints"
    assert [path.name for path in list_checkpoints(folder)] == ["step_00000004", "step_00000003"]
    assert (folder / "latest").read_text() == "step_00000004\n"
    kinds = [open_checkpoint(path, World()).is_torch_dist for path in list_checkpoints(folder)]
    assert kinds == [False, True]


def _adapted(rank: int, world_size: int, root: Path, parallels: list[dict[str, Any]]) -> list[str]:
    """Names whose value after loading is not that of the run that saved."""
    lora = {"rank": 2, "targets": ["linear_qkv", "linear_proj"]}
    cases = [
        Case(engine="megatron", parallel=parallel, lora=lora, loop=LOOP | {"precision": "bf16"})
        for parallel in parallels
    ]
    with megatron_on_cpu():
        trainer = trainer_of(root, cases[0], "adapted")
        run_steps(trainer, 0, 2)
        before = {name: tensor.clone() for name, tensor in whole_state(trainer).items()}
        trainer.save()
        trainer.close()
        differing = []
        for case in cases[1:]:
            trainer = trainer_of(root, case, "adapted", init_from="")
            after = whole_state(trainer)
            differing += [name for name in before.keys() | after.keys() if not torch.equal(before[name], after[name])]
            run_steps(trainer, 2, 3)
            trainer.close()
    return differing


def test_adapters_alone_have_masters_and_moments(root: Path) -> None:
    """In bf16, too, where frozen weights are kept as they were given."""
    assert run_ranks(_adapted, 2, root, [TP2, {}, TP2 | {"distributed_optimizer": False}], timeout_s=100) == [[], []]
    checkpoint = open_checkpoint(root / "adapted", World())
    stored, start = _whole(checkpoint), _whole(open_checkpoint(root / "start", World()))
    kept = {name for name in stored if not name.startswith("model.")}
    assert kept
    assert all(is_adapter(name) for name in kept)
    frozen = [name for name in stored if name.startswith("model.") and not is_adapter(name)]
    assert len(frozen) > 20
    for name in frozen:
        assert torch.equal(stored[name], start[name]), name


class _StepInGroups(torch.optim.AdamW):
    """Counts steps where Transformer Engine's Adam does; with torch's own, Megatron's loading fails on the count."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)


def _plain(rank: int, world_size: int, root: Path) -> list[str]:
    """What a script with megatron-core's own calls loads of the run `saved`, compared with all of it.

    Returns:
        Names of tensors that differ.
    """
    checkpoint = open_checkpoint(root / "saved", this_world())
    allow_children()
    expected = {name: torch.empty(entry.shape) for name, entry in checkpoint.stored().items()}
    checkpoint.load_tensors(expected, this_world())
    with megatron_on_cpu(), mock.patch.object(distrib_optimizer, "HAVE_APEX_OR_TE", True):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
        model = VideoDiT(load_model_config(str(root / "model.yaml")))
        mesh = megatron_mesh(
            this_world(), ResolvedMesh(world_size=2, ulysses_degree=1, ring_degree=1), ParallelConfig(**TP2)
        )
        names = ParameterNames.of(model, mesh)
        ddp = DistributedDataParallel(
            model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
        )
        config = OptimizerConfig(optimizer="adam", lr=3e-3, use_distributed_optimizer=True)
        optimizer = get_megatron_optimizer(config, [ddp], use_gloo_process_groups=False)
        inner = optimizer.chained_optimizers[0]
        inner._init_optimizer_states_with_dummy_values()
        inner.optimizer.__class__ = _StepInGroups
        for entry in inner.optimizer.state.values():
            entry.pop("step")
        # From here on as in docs/megatron.md.
        weights = model.sharded_state_dict()
        wanted = {
            "model": weights,
            "optimizer": optimizer.sharded_state_dict(
                weights, is_loading=True, metadata={"distrib_optim_sharding_type": "fully_reshardable"}
            ),
        }
        loaded = dist_checkpointing.load(wanted, str(checkpoint.path))
        model.load_state_dict(loaded["model"])
        with torch.no_grad():  # Megatron leaves it out, which matters to fp32 weights
            optimizer.load_state_dict(loaded["optimizer"])
        assert loaded["iteration"] == 2
        state = MegatronState(ddp, optimizer, names, mesh, torch.device("cpu"), keeps_moments=True)
        state.stepped()
        found = {name: gathered(tensor) for name, tensor in (state.weights() | state.moments()).items()}
        assert {group["step"] for group in inner.optimizer.param_groups} == {2}
    assert len(found) == 3 * len(names.to_global)
    return [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]


def test_a_script_of_megatron_core_loads_weights_and_optimizer(root: Path) -> None:
    assert run_ranks(_plain, 2, root, timeout_s=100) == [[], []]
