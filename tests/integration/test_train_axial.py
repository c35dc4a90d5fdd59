"""Runs of models that attend along dims, on tensor x sequence x data ranks: every engine trains as one process does."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from megatron.core.process_groups_config import ProcessGroupCollection

from dbsp_megatron.config import TrainConfig
from dbsp_megatron.models.dit import load_model_config
from dbsp_megatron.models.dit.config import model_config_text
from dbsp_megatron.train import trainer as trainer_module
from dbsp_megatron.train.mesh import build_mesh
from tests.harness import run_ranks
from tests.integration.engine_runs import (
    DEEPSPEED_ENV,
    Case,
    Run,
    differences,
    merged,
    run_steps,
    spread_weights,
    train_case,
)
from tests.integration.test_engines import LIMITS
from tests.integration.test_train_dsp import SPACE_TIME
from tests.integration.torch_dist_runs import go_on, save_after
from tests.integration.training import make_trainer

pytestmark = pytest.mark.timeout(300)

TP2 = {"tensor_parallel_size": 2}
SHARED = TP2 | {"sequence_parallel": True}
# Clips have no text: gradients of attention to it would be rounding errors, which AdamW takes for directions.
MODEL = SPACE_TIME.replace("num_heads: 3", "num_heads: 4\nnum_kv_heads: 2").replace(
    "text: cross\ntext_dim: 6", "text: none"
)
SPARSE = {"method": "topk", "density": 0.4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxialCase(Case):
    """Strategy dsp over `ulysses` ranks; frames of 9 tokens have masks of 5 blocks, where there is a mask."""

    strategy: str = "dsp"
    mask: dict[str, Any] = dataclasses.field(default_factory=lambda: {"method": "dense"})

    def config(self, root: Path, **loop: Any) -> TrainConfig:
        config = super().config(root, **loop)
        return dataclasses.replace(config, sp=dataclasses.replace(config.sp, block_size=2))


ALONE = AxialCase(strategy="none")
CASES = [
    AxialCase(ulysses=2, parallel=TP2),
    AxialCase(engine="megatron", ulysses=2, parallel=TP2),
    AxialCase(strategy="none", parallel=TP2),
    AxialCase(engine="megatron", strategy="none", parallel=TP2 | {"distributed_optimizer": False}),
    AxialCase(ulysses=2, parallel=TP2, loop={"recompute": "selective", "micro_batch_size": 2}),
    AxialCase(engine="megatron", ulysses=2, parallel=TP2, loop={"recompute": True}),
    AxialCase(parallel=TP2 | {"data_parallel": "fsdp"}),
    AxialCase(engine="megatron", ulysses=2, parallel=SHARED),
    AxialCase(engine="megatron", strategy="none", parallel=SHARED, loop={"recompute": "selective"}),
]
DEEPSPEED_CASES = [
    AxialCase(engine="deepspeed", ulysses=2, parallel=TP2 | {"zero_stage": 1}),
    AxialCase(engine="deepspeed", ulysses=2, parallel=TP2 | {"zero_stage": 3}),
]


def _train_all(rank: int, world_size: int, root: Path, cases: list[Case]) -> list[Run]:
    return [train_case(root, case, 3, ema_decay=0.8) for case in cases]


def _expect(ranks: list[list[Run]], cases: list[Any], reference: Run) -> None:
    for index, case in enumerate(cases):
        found = differences(merged([runs[index] for runs in ranks]), reference)
        assert all(found[key] <= LIMITS[key] for key in found), f"{case}: {found}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the weights that all runs start from."""
    return spread_weights(tmp_path_factory.mktemp("axial"), MODEL)


@pytest.fixture(scope="module")
def reference(root: Path) -> Run:
    """Three steps of one process."""
    return train_case(root, ALONE, 3, ema_decay=0.8)


def test_training_does_not_depend_on_engine_or_layout(root: Path, reference: Run) -> None:
    assert len({f"{loss:.3f}" for loss in reference.losses}) > 1, "the reference does not train"
    _expect(run_ranks(_train_all, 4, root, CASES, timeout_s=250), CASES, reference)


def test_sparse_training_does_not_depend_on_the_layout(root: Path, reference: Run) -> None:
    cases = [AxialCase(ulysses=2, parallel=TP2, mask=SPARSE), AxialCase(engine="megatron", parallel=TP2, mask=SPARSE)]
    alone = train_case(root, AxialCase(strategy="none", mask=SPARSE), 3, ema_decay=0.8)
    assert differences(alone, reference)["loss"] > 1e-4
    _expect(run_ranks(_train_all, 4, root, cases, timeout_s=200), cases, alone)


def test_adapters_train_alike(root: Path, reference: Run) -> None:
    adapted = {"lora": {"rank": 2, "alpha": 4.0}}
    cases = [AxialCase(ulysses=2, parallel=TP2, **adapted), AxialCase(engine="megatron", parallel=TP2, **adapted)]
    alone = train_case(root, AxialCase(strategy="none", **adapted), 3, ema_decay=0.8)
    assert alone.state.keys() != reference.state.keys()
    _expect(run_ranks(_train_all, 4, root, cases, timeout_s=200), cases, alone)


def test_the_debug_model_trains_alike(tmp_path: Path) -> None:
    config = dataclasses.replace(load_model_config("axial_debug"), patch_size=(1, 8, 8))
    spread_weights(tmp_path, model_config_text(config))
    alone = train_case(tmp_path, ALONE, 3, ema_decay=0.8)
    _expect(run_ranks(_train_all, 4, tmp_path, CASES[:2], timeout_s=200), CASES[:2], alone)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed: pip install deepspeed")
def test_deepspeed_trains_alike(root: Path, reference: Run) -> None:
    env = DEEPSPEED_ENV
    ranks = run_ranks(_train_all, 4, root, DEEPSPEED_CASES, timeout_s=250, env=env)
    _expect(ranks, DEEPSPEED_CASES, reference)


def _with_wrong_groups(rank: int, world_size: int, root: Path, case: Case, wrong: dict[str, str]) -> Run | str:
    """A run whose mesh has one group in place of another."""

    def broken(*args: Any) -> Any:
        mesh = build_mesh(*args)
        groups = {name: getattr(mesh, other) for name, other in wrong.items()}
        if "tp_group" in groups:
            groups["model_groups"] = ProcessGroupCollection(tp=groups["tp_group"], cp=None, pp=None)
        return dataclasses.replace(mesh, **groups)

    with mock.patch.object(trainer_module, "build_mesh", broken):
        try:
            return run_steps(make_trainer(case.config(root)), 0, 2)
        except ValueError as error:
            return str(error)


def test_a_wrong_data_group_fails_the_comparison(root: Path, reference: Run) -> None:
    for run in run_ranks(_with_wrong_groups, 4, root, CASES[0], {"data_group": "stage_group"}, timeout_s=100):
        assert isinstance(run, Run)
        assert max(abs(a / b - 1) for a, b in zip(run.norms, reference.norms, strict=False)) > 1e-3


@pytest.mark.parametrize("wrong", [{"sp_group": "tp_group"}, {"tp_group": "sp_group"}], ids=["sequence", "tensor"])
def test_ranks_of_a_video_that_hold_other_heads_are_refused(root: Path, wrong: dict[str, str]) -> None:
    for text in run_ranks(_with_wrong_groups, 4, root, CASES[0], wrong, timeout_s=100):
        assert "disagree about their number among copies" in str(text)


def _save_and_resume(rank: int, world_size: int, root: Path, pairs: list[tuple[Case, Case]]) -> list[Run]:
    """Two steps on one layout, three on another."""
    runs = []
    for index, (first, second) in enumerate(pairs):
        save_after(rank, world_size, root, first, f"saved_{index}")
        runs += go_on(rank, world_size, root, f"saved_{index}", [second])
    return runs


LOOP: dict[str, Any] = {"ema_decay": 0.8, "steps": 5}
DIST = LOOP | {"checkpoint_format": "torch_dist"}
RESUMES = [
    (AxialCase(ulysses=2, parallel=TP2, loop=LOOP), AxialCase(ulysses=4, loop=LOOP)),
    (AxialCase(ulysses=4, loop=LOOP), AxialCase(ulysses=2, parallel=TP2, loop=LOOP)),
    (
        AxialCase(engine="megatron", ulysses=2, parallel=TP2, loop=DIST),
        AxialCase(engine="megatron", ulysses=4, loop=DIST),
    ),
    (AxialCase(engine="megatron", ulysses=4, loop=DIST), AxialCase(ulysses=2, parallel=TP2, loop=LOOP)),
    (AxialCase(ulysses=2, parallel=TP2, loop=LOOP), AxialCase(engine="megatron", parallel=TP2, loop=DIST)),
]


def test_a_run_goes_on_with_another_layout(root: Path) -> None:
    """Whole-tensor checkpoints and Megatron's, from tensor x sequence ranks to sequence ranks and back."""
    alone = train_case(root, ALONE, 5, ema_decay=0.8)
    expected = dataclasses.replace(alone, losses=alone.losses[2:], norms=alone.norms[2:])
    _expect(run_ranks(_save_and_resume, 4, root, RESUMES, timeout_s=280), [second for _, second in RESUMES], expected)


@pytest.mark.parametrize(
    ("parallel", "world_size", "message"),
    [
        ({"tensor_parallel_size": 4}, 8, "parallel.tensor_parallel_size=4 must divide num_kv_heads=2"),
        ({"tensor_parallel_size": 3}, 6, "parallel.tensor_parallel_size=3 must divide the number of heads 4"),
        ({"pipeline_parallel_size": 2}, 4, "parallel.pipeline_parallel_size=2 must be 1"),
        (TP2, 6, "must divide the number of processes 6"),
    ],
)
def test_splits_that_do_not_fit_are_refused(
    root: Path, parallel: dict[str, Any], world_size: int, message: str
) -> None:
    case = AxialCase(engine="megatron", ulysses=2, parallel=parallel)
    with pytest.raises(ValueError, match=message):
        case.config(root).validate(world_size)


def test_a_run_is_described(root: Path) -> None:
    text = AxialCase(ulysses=2, parallel=TP2).config(root).validate(8).describe()
    assert "8 = 2 data parallel x 2 sequence parallel x 2 tensor parallel" in text
    assert "2 of 4" in text
