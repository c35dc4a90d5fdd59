"""Interleaved pipelines train as one process does, and their checkpoints go on anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dbsp_megatron.config.parallel import ParallelConfig
from dbsp_megatron.models.dit.chunks import ChunkedDiT
from tests.harness import run_ranks
from tests.integration.engine_runs import (
    SPLIT_MODEL,
    Case,
    Run,
    differences,
    merged,
    run_steps,
    spread_weights,
    train_case,
)
from tests.integration.torch_dist_runs import go_on, save_after, trainer_of
from tests.integration.training import make_trainer
from tests.megatron_on_cpu import megatron_on_cpu
from tools.explain_stages import pipeline_ranks

VIRTUAL = {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}
TP2 = {"tensor_parallel_size": 2}
LOOP: dict[str, Any] = {"ema_decay": 0.5, "steps": 5, "checkpoint_format": "torch_dist"}
NATIVE = LOOP | {"checkpoint_format": "native"}
LIMITS = {"loss": 1e-5, "norm": 1e-5, "model": 1e-4, "ema": 1e-4, "optim.exp_avg": 1e-4, "optim.exp_avg_sq": 2e-4}
LAYERS = [{"method": "topp", "top_p": 0.3, "dense_layers": 1}, {"method": "sparse_videogen", "density": 0.4}]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the weights of four layers that all runs start from."""
    model = SPLIT_MODEL.replace("num_layers: 2", "num_layers: 4")
    return spread_weights(tmp_path_factory.mktemp("virtual"), model)


@pytest.fixture(scope="module")
def alone(root: Path) -> Run:
    """Two steps of one process."""
    return train_case(root, Case(strategy="none", loop=NATIVE), 2)


def _train_all(rank: int, world_size: int, root: Path, cases: list[Case]) -> list[Run]:
    return [train_case(root, case, 2) for case in cases]


def _expect(ranks: list[list[Run]], cases: list[Case], expected: list[Run], factor: float = 1.0) -> None:
    for index, case in enumerate(cases):
        found = differences(merged([runs[index] for runs in ranks]), expected[index])
        assert all(found[kind] < factor * limit for kind, limit in LIMITS.items() if kind in found), (str(case), found)


def test_two_ranks_train_as_one(root: Path, alone: Run) -> None:
    """Moments of the first steps are gradients."""
    cases = [
        Case(engine="megatron", parallel=VIRTUAL, loop=NATIVE),
        Case(engine="megatron", parallel=VIRTUAL | {"distributed_optimizer": False}, loop=NATIVE | {"recompute": True}),
    ]
    _expect(run_ranks(_train_all, 2, root, cases, timeout_s=100), cases, [alone] * 2)


def test_layers_are_numbered_and_adapted_as_in_the_whole_model(root: Path) -> None:
    cases = [Case(engine="megatron", parallel=VIRTUAL, mask=mask) for mask in LAYERS]
    lora = {"rank": 2, "targets": ["layers.2.self_attention.qkv.linear_qkv", "linear_fc1"]}
    cases.append(Case(engine="megatron", parallel=VIRTUAL, lora=lora))
    whole = [train_case(root, Case(strategy="none", mask=case.mask, lora=case.lora), 2) for case in cases]
    _expect(run_ranks(_train_all, 2, root, cases, timeout_s=100), cases, whole)


def test_four_ranks_train_as_one(root: Path, alone: Run) -> None:
    cases = [
        Case(engine="megatron", parallel=VIRTUAL | TP2 | {"sequence_parallel": True}, loop=NATIVE),
        Case(engine="megatron", parallel=VIRTUAL, ulysses=2, loop=NATIVE),
        Case(engine="megatron", parallel=VIRTUAL, loop=NATIVE),
    ]
    _expect(run_ranks(_train_all, 4, root, cases, timeout_s=100), cases, [alone] * 3)


def _half(rank: int, world_size: int, root: Path, cases: list[Case]) -> list[tuple[float, int]]:
    """Loss of the first step, and elements that are kept in bf16."""
    found = []
    for case in cases:
        with megatron_on_cpu():
            trainer = trainer_of(root, case, "half")
            halves = [p.numel() for p in trainer.engine.module.parameters() if p.dtype == torch.bfloat16]
            found.append((run_steps(trainer, 0, 1).losses[0], sum(halves)))
            trainer.close()
    return found


def test_half_precision_is_that_of_a_plain_pipeline(root: Path) -> None:
    """But for hidden states, which are rounded where stages meet."""
    half = NATIVE | {"precision": "bf16"}
    cases = [Case(engine="megatron", parallel=p, loop=half) for p in (VIRTUAL, {"pipeline_parallel_size": 2})]
    ranks = run_ranks(_half, 2, root, cases, timeout_s=100)
    (virtual, count), (plain, expected) = ranks[0]
    assert virtual == pytest.approx(plain, rel=1e-3)
    assert count + ranks[1][0][1] == expected + ranks[1][1][1] > 0


def _save_and_go_on(rank: int, world_size: int, root: Path, saved: Case, others: list[Case]) -> list[Run]:
    save_after(rank, world_size, root, saved, "saved")
    return go_on(rank, world_size, root, "saved", others)


def test_checkpoints_go_on_with_and_without(root: Path) -> None:
    trainer = trainer_of(root, Case(strategy="none", loop=NATIVE), "alone")
    run_steps(trainer, 0, 2)
    trainer.save()
    expected = run_steps(trainer, 2, 5)
    virtual = Case(engine="megatron", parallel=VIRTUAL, loop=LOOP)
    others = [Case(engine="megatron", parallel=TP2, loop=LOOP), virtual]
    # Where moments are small, AdamW turns rounding into steps.
    _expect(run_ranks(_save_and_go_on, 2, root, virtual, others, timeout_s=100), others, [expected] * 2, 10)
    _expect(run_ranks(go_on, 2, root, "alone", [virtual], timeout_s=100), [virtual], [expected], 10)


def _evaluated(rank: int, world_size: int, root: Path, case: Case) -> float:
    with megatron_on_cpu():
        trainer = trainer_of(root, case, "evaluated")
        loss = trainer.evaluate(draws=2)
        trainer.close()
    return loss


def test_a_single_clip_is_evaluated(root: Path) -> None:
    """The schedule takes micro-batches by the number of ranks."""
    loop = NATIVE | {"eval_samples": 1}
    alone = trainer_of(root, Case(strategy="none", loop=loop), "alone_evaluated").evaluate(draws=2)
    case = Case(engine="megatron", parallel=VIRTUAL, loop=loop)
    assert run_ranks(_evaluated, 2, root, case, timeout_s=100) == pytest.approx([alone] * 2, rel=1e-6)


def test_sizes_that_do_not_fit_are_refused(root: Path) -> None:
    with pytest.raises(ValueError, match=r"virtual_pipeline_parallel_size=2 needs parallel.pipeline_parallel_size > 1"):
        ParallelConfig(virtual_pipeline_parallel_size=2)
    three = VIRTUAL | {"virtual_pipeline_parallel_size": 3}
    with pytest.raises(ValueError, match=r"\* parallel.virtual_pipeline_parallel_size=3 must divide the 4 layers"):
        Case(engine="megatron", parallel=three).config(root).validate(2)
    with pytest.raises(ValueError, match=r"multiple of parallel.pipeline_parallel_size=2 micro-batches .*; use 4, or"):
        Case(engine="megatron", parallel=VIRTUAL).config(root, global_batch_size=3).validate(2)


def _alive(rank: int, world_size: int, root: Path, cases: list[Case]) -> list[tuple[int, list[int]]]:
    """Pipeline rank, and most forward passes of each of its stages that waited for their backward pass at once."""
    found = []
    for case in cases:
        with megatron_on_cpu():
            trainer = make_trainer(case.config(root))
            module = trainer.engine.module
            chunks = module.chunks if isinstance(module, ChunkedDiT) else [module]
            waiting, most = [0] * len(chunks), [0] * len(chunks)

            def watch(index: int, waiting: list[int] = waiting, most: list[int] = most) -> Any:
                def done(_: Any) -> None:
                    waiting[index] -= 1

                def seen(_module: Any, _args: Any, output: torch.Tensor) -> None:
                    waiting[index] += 1
                    if sum(waiting) > sum(most):
                        most[:] = waiting
                    output.register_hook(done)

                return seen

            for index, chunk in enumerate(chunks):
                chunk.register_forward_hook(watch(index))
            trainer.train_step(0)
            assert not any(waiting)
            found.append((trainer.mesh.pp_rank, most))
            trainer.close()
    return found


def test_activations_are_kept_for_as_many_micro_batches_as_explain_says(root: Path) -> None:
    def case(virtual: int, batch: int) -> Case:
        parallel = {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": virtual}
        return Case(engine="megatron", parallel=parallel, loop={"global_batch_size": batch})

    settings = [(1, 1), (1, 4), (2, 2), (2, 6)]
    ranks = run_ranks(_alive, 2, root, [case(*setting) for setting in settings], timeout_s=100)
    for index, (virtual, batch) in enumerate(settings):
        expected = [list(rank.passes) for rank in pipeline_ranks(2, virtual, 4, batch)]
        assert dict(found[index] for found in ranks) == dict(enumerate(expected)), (virtual, batch)
