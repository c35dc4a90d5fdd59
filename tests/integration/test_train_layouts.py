"""The loss curve and the weights do not depend on how a run is split over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron.config.sections import OptimConfig
from tests.harness import run_ranks
from tests.integration.training import make_config, train

SGD = OptimConfig(name="sgd", lr=1.0, schedule="constant")


def _train_meshes(
    rank: int, world_size: int, root: Path, cases: list[dict[str, Any]]
) -> list[tuple[list[float], Tensor]]:
    return [train(make_config(root, **case)) for case in cases]


def _assert_like(reference: tuple[list[float], Tensor], runs: list[tuple[list[float], Tensor]]) -> None:
    assert reference[0][0] != reference[0][-1], "the reference does not train"
    for losses, final in runs:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference[0]), rtol=1e-4, atol=0)
        torch.testing.assert_close(final, reference[1], rtol=0, atol=1e-4)


def test_five_steps_do_not_depend_on_the_mesh(tmp_path: Path) -> None:
    """Traps B59, B61, B79, B83: one loss curve for every strategy, mesh and data-parallel size."""
    reference = train(make_config(tmp_path, strategy="none"))
    meshes = [(4, 1), (1, 4), (2, 2), (2, 1)]
    cases = [{"strategy": "dbsp", "ulysses": u, "ring": r} for u, r in meshes]
    cases += [{"strategy": "usp", "ulysses": u, "ring": r} for u, r in [(4, 1), (1, 4), (2, 2), (1, 2)]]
    _assert_like(reference, run_ranks(_train_meshes, 4, tmp_path, cases, timeout_s=300)[0])


@pytest.mark.slow
def test_data_parallel_over_two_dimensional_meshes(tmp_path: Path) -> None:
    """Eight ranks: two data-parallel groups of Ulysses 2 x Ring 2."""
    reference = train(make_config(tmp_path, strategy="none"))
    cases = [{"strategy": name, "ulysses": 2, "ring": 2} for name in ("dbsp", "usp")]
    _assert_like(reference, run_ranks(_train_meshes, 8, tmp_path, cases, timeout_s=300)[0])


def test_gradients_have_the_scale_of_one_process(tmp_path: Path) -> None:
    """Trap B55: with SGD and lr 1 the step *is* the gradient, so a constant factor shows; AdamW would hide it."""
    settings = {"optim": SGD, "steps": 1, "grad_clip": 0.0, "seed": 8}
    before = train(make_config(tmp_path, strategy="none", **settings | {"optim": OptimConfig(name="sgd", lr=1e-30)}))[1]
    after = train(make_config(tmp_path, strategy="none", **settings))[1]
    cases = [{"ulysses": u, "ring": r, **settings} for u, r in [(4, 1), (2, 1), (1, 2)]]
    step = after - before
    assert step.abs().max() > 1e-2
    for _, other in run_ranks(_train_meshes, 4, tmp_path, cases)[0]:
        torch.testing.assert_close(other - before, step, rtol=0, atol=1e-6)


def test_micro_batches_and_recompute_change_nothing(tmp_path: Path) -> None:
    """Traps B89, B91: two clips at once, one after the other, and with recomputed activations."""
    together = train(make_config(tmp_path, strategy="none", steps=2, micro_batch_size=2))
    apart = train(make_config(tmp_path, strategy="none", steps=2))
    _assert_like(together, [apart])
    cases = [{"ulysses": 2, "ring": 2, "steps": 2, "micro_batch_size": size, "recompute": True} for size in (1, 2)]
    _assert_like(together, run_ranks(_train_meshes, 4, tmp_path, cases)[0])
