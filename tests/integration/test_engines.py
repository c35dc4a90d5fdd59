"""Every engine, in every layout, trains as one process does: losses, gradients, norms, weights, averages."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

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
from tests.integration.training import make_trainer
from tests.megatron_on_cpu import megatron_on_cpu

TP2 = {"tensor_parallel_size": 2}
SHARED = TP2 | {"sequence_parallel": True}
PP2 = {"pipeline_parallel_size": 2}
FSDP = {"data_parallel": "fsdp"}
WHOLE = {"distributed_optimizer": False}
# AdamW moves a weight by the learning rate whatever the size of its gradient, so rounding shows in weights most.
LIMITS = {"loss": 1e-5, "norm": 1e-5, "model": 1e-4, "ema": 1e-4, "optim.exp_avg": 1e-4, "optim.exp_avg_sq": 2e-4}


def _cases(engine: str, *layouts: tuple[int, int, dict[str, Any]], **loop: Any) -> list[Case]:
    return [Case(engine=engine, ulysses=u, ring=r, parallel=parallel, loop=loop) for u, r, parallel in layouts]


CASES = {
    2: [
        *_cases("native", (1, 1, TP2), (2, 1, FSDP), recompute=True),
        *_cases("megatron", (1, 1, TP2), (1, 1, SHARED), (1, 1, PP2), (1, 2, {}), (1, 1, WHOLE)),
        *_cases("native", (1, 2, FSDP), recompute="selective"),
        *_cases("megatron", (1, 1, SHARED), (2, 1, {}), recompute="selective"),
    ],
    4: [
        *_cases("native", (2, 1, TP2), (1, 1, TP2), (2, 1, FSDP), (1, 1, TP2 | FSDP)),
        *_cases("native", (1, 2, FSDP | {"cpu_offload": True}), micro_batch_size=2),
        *_cases("megatron", (2, 1, TP2), (1, 1, TP2), (2, 1, {}), (2, 2, {}), (1, 2, PP2)),
        *_cases("megatron", (2, 1, {}), (1, 1, TP2 | PP2), recompute=True),
        *_cases("megatron", (1, 2, TP2 | WHOLE), (2, 1, SHARED), (1, 1, SHARED | PP2), micro_batch_size=2),
    ],
    8: [
        *_cases("native", (2, 1, TP2), (2, 2, TP2 | FSDP)),
        *_cases("megatron", (2, 2, TP2), (2, 1, TP2 | PP2), (1, 1, TP2 | PP2)),
    ],
}


# A process in which ZeRO 3 has run is not as it was (DeepSpeed counts parameters and patches classes), so these have
# processes of their own, of one world size, and the same history on every rank.
DEEPSPEED_CASES = [
    Case(engine="deepspeed", ulysses=u, parallel={"zero_stage": stage} | parallel, loop=loop)
    for stage, u, parallel, loop in (
        *((stage, 2, {}, {}) for stage in (0, 1, 2, 3)),
        (0, 1, TP2, {"recompute": True}),
        (1, 2, TP2, {"micro_batch_size": 2}),
        (2, 1, TP2, {}),
        (3, 2, TP2, {"micro_batch_size": 2}),
        (3, 2, {}, {"recompute": "selective"}),
    )
]


def _train_all(rank: int, world_size: int, root: Path, cases: list[Case], loop: dict[str, Any]) -> list[Run]:
    return [train_case(root, case, 3, **loop) for case in cases]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the weights that all runs start from."""
    return spread_weights(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def reference(root: Path) -> Run:
    """Three steps of one process."""
    return train_case(root, Case(strategy="none"), 3, ema_decay=0.8)


@pytest.mark.parametrize("world_size", CASES)
def test_training_does_not_depend_on_engine_or_layout(root: Path, reference: Run, world_size: int) -> None:
    """Traps B57, B61, B63, B91: TP, SP, DP and PP, accumulation, recompute, split optimizer state."""
    cases = CASES[world_size]
    assert len({f"{loss:.3f}" for loss in reference.losses}) > 1, "the reference does not train"
    ranks = run_ranks(_train_all, world_size, root, cases, {"ema_decay": 0.8}, timeout_s=300)
    for index, case in enumerate(cases):
        found = differences(merged([runs[index] for runs in ranks]), reference)
        assert all(found[key] <= LIMITS[key] for key in found), f"{case}: {found}"


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed: pip install deepspeed")
def test_deepspeed_trains_alike_at_every_stage(root: Path, reference: Run) -> None:
    """Traps B55, B123: the scale of gradients at ZeRO 0 to 3, through our mpu, beside TP and with accumulation."""
    settings = {"env": DEEPSPEED_ENV, "timeout_s": 300}
    ranks = run_ranks(_train_all, 4, root, DEEPSPEED_CASES, {"ema_decay": 0.8}, **settings)  # type: ignore[arg-type]
    for index, case in enumerate(DEEPSPEED_CASES):
        found = differences(merged([runs[index] for runs in ranks]), reference)
        assert all(found[key] <= LIMITS[key] for key in found), f"{case}: {found}"


@pytest.mark.parametrize("engine", ["native", "megatron"])
def test_first_moments_are_the_gradients_of_one_process(root: Path, engine: str) -> None:
    """One step: exp_avg = (1 - beta1) * gradient, for every parameter. AdamW's weights would hide a factor."""
    alone = train_case(root, Case(strategy="none"), 1, grad_clip=0.0)
    cases = _cases(engine, (2, 1, {}), (1, 2, TP2), (1, 2, {}))
    ranks = run_ranks(_train_all_once, 4, root, cases, timeout_s=200)
    for index, case in enumerate(cases):
        run = merged([runs[index] for runs in ranks])
        for name, moment in alone.state.items():
            if name.startswith("optim.exp_avg."):
                scale = float(moment.abs().max())
                assert scale > 0, f"{name} has no gradient"
                assert float((run.state[name] - moment).abs().max()) <= 1e-4 * scale, f"{case}: {name}"


def _train_all_once(rank: int, world_size: int, root: Path, cases: list[Case]) -> list[Run]:
    return [train_case(root, case, 1, grad_clip=0.0) for case in cases]


def _with_wrong_groups(rank: int, world_size: int, root: Path, case: Case, wrong: dict[str, str]) -> Run:
    """A run whose mesh has one group in place of another."""

    def broken(*args: Any) -> Any:
        mesh = build_mesh(*args)
        return dataclasses.replace(mesh, **{name: getattr(mesh, other) for name, other in wrong.items()})

    with mock.patch.object(trainer_module, "build_mesh", broken):
        return run_steps(make_trainer(case.config(root)), 0, 2)


@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        (Case(ulysses=2), {"data_group": "sp_group"}),  # gradients are not reduced over data ranks
        (Case(ulysses=2, parallel=TP2), {"data_group": "stage_group"}),  # nor summed over ranks that hold copies
        (Case(ulysses=2, parallel=FSDP), {"data_group": "sp_group"}),
    ],
    ids=["without dp", "with tp", "fsdp without dp"],
)
def test_a_wrong_group_fails_the_comparison(root: Path, reference: Run, case: Case, wrong: dict[str, str]) -> None:
    """The comparison of this file sees a gradient that is reduced over the wrong ranks."""
    runs = run_ranks(_with_wrong_groups, 4, root, case, wrong, timeout_s=100)
    two = Run(losses=reference.losses[:2], norms=reference.norms[:2], state=runs[0].state)
    found = differences(dataclasses.replace(runs[0]), two)
    assert found["loss"] > 1e-4 or found["norm"] > 1e-3, found


def _save_and_resume(rank: int, world_size: int, root: Path, first: Case, second: Case) -> list[float]:
    """Two steps on one layout, three on another; the losses of the latter."""
    with megatron_on_cpu() if "megatron" in (first.engine, second.engine) else nullcontext():
        trainer = make_trainer(first.config(root, ema_decay=0.8))
        before = run_steps(trainer, 0, 2)
        trainer.save()
        trainer.close()
        again = make_trainer(second.config(root, ema_decay=0.8))
        assert again.steps_done == 2
        saved = run_steps(again, 2, 2).state
        for name, tensor in saved.items():
            if name in before.state:
                assert torch.equal(tensor, before.state[name]), name
        run = run_steps(again, 2, 5)
        again.close()
    return run.losses


RESUMES = [
    (Case(engine="megatron", ulysses=2, parallel=TP2), Case(ulysses=4)),
    (Case(ring=2, parallel=TP2), Case(engine="megatron", parallel=TP2 | PP2)),
    (Case(engine="megatron", ring=2, parallel=PP2), Case(ulysses=2, ring=2, parallel=FSDP)),
    (Case(ulysses=2, parallel=FSDP), Case(engine="megatron", ulysses=2, parallel=WHOLE)),
    (Case(parallel=FSDP | TP2), Case(engine="megatron", ulysses=2, ring=2)),
]


@pytest.mark.parametrize(("first", "second"), RESUMES, ids=lambda case: str(case).replace(" ", "-"))
def test_a_run_goes_on_with_another_engine_and_layout(tmp_path: Path, first: Case, second: Case) -> None:
    """Trap B101: the state is loaded bit for bit, and the next three losses are those of an uninterrupted run."""
    spread_weights(tmp_path)
    alone = train_case(tmp_path, Case(strategy="none"), 5, ema_decay=0.8)
    losses = run_ranks(_save_and_resume, 4, tmp_path, first, second, timeout_s=200)
    for mine in losses:
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(alone.losses[2:]), rtol=1e-4, atol=0)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed: pip install deepspeed")
@pytest.mark.parametrize("stages", [(0, 2), (2, 3), (3, 1)], ids=lambda stages: f"{stages[0]}-{stages[1]}")
def test_a_deepspeed_run_goes_on_at_another_stage_and_layout(tmp_path: Path, stages: tuple[int, int]) -> None:
    """Checkpoints do not depend on the ZeRO stage, as DeepSpeed's universal ones, nor on TP and SP."""
    first = Case(engine="deepspeed", ulysses=2, parallel={"zero_stage": stages[0]})
    second = Case(engine="deepspeed", ring=2, parallel={"zero_stage": stages[1]} | TP2)
    spread_weights(tmp_path)
    alone = train_case(tmp_path, Case(strategy="none"), 5, ema_decay=0.8)
    env = DEEPSPEED_ENV
    for mine in run_ranks(_save_and_resume, 4, tmp_path, first, second, timeout_s=200, env=env):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(alone.losses[2:]), rtol=1e-4, atol=0)


def _evaluate(rank: int, world_size: int, root: Path, cases: list[Case]) -> list[float]:
    return [_evaluation(root, case) for case in cases]


def _evaluation(root: Path, case: Case) -> float:
    with megatron_on_cpu() if case.engine == "megatron" else nullcontext():
        trainer = make_trainer(case.config(root, eval_samples=3, global_batch_size=2), num_clips=8)
        trainer.train_step(0)
        loss = trainer.evaluate()
        trainer.train_step(1)  # nothing is left waiting
        trainer.close()
    return loss


def test_evaluation_counts_each_clip_once(root: Path) -> None:
    """Trap B69: three clips on two data-parallel ranks, also where ranks meet inside the forward pass."""
    alone = _evaluation(root, Case(strategy="none"))
    cases = [
        Case(ulysses=2, parallel=FSDP),
        Case(engine="megatron", ulysses=2),
        Case(engine="megatron", parallel=PP2),
        Case(parallel=TP2),
    ]
    for losses in run_ranks(_evaluate, 4, root, cases, timeout_s=200):
        torch.testing.assert_close(torch.tensor(losses), torch.full((len(cases),), alone), rtol=1e-5, atol=0)
