"""What a review of the engines broke: stages that counted layers anew, evaluations before a save, foreign groups."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from dbsp_megatron.config.sections import OptimConfig
from dbsp_megatron.models.dit import load_model_config
from dbsp_megatron.models.dit.lora_layers import lora_layers
from dbsp_megatron.train.engines.deepspeed_config import build_deepspeed_config
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
from tests.integration.training import make_trainer, whole_state
from tests.megatron_on_cpu import megatron_on_cpu

TP2, PP2, FSDP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel": "fsdp"}
BY_LAYER: list[dict[str, Any]] = [
    {"method": "topp", "top_p": 0.3, "dense_layers": 1},
    {"method": "sparse_videogen", "density": 0.4},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the weights that all runs start from."""
    return spread_weights(tmp_path_factory.mktemp("corners"))


def _train_all(rank: int, world_size: int, root: Path, cases: list[Case]) -> list[Run]:
    return [train_case(root, case, 2) for case in cases]


def test_pipeline_stages_number_layers_as_the_whole_model_does(root: Path) -> None:
    """Masks, schedules and plans are by layer; a stage that began at 0 again was wrong without a word."""
    cases = [Case(engine="megatron", parallel=PP2, mask=mask) for mask in BY_LAYER]
    ranks = run_ranks(_train_all, 2, root, cases, timeout_s=100)
    for index, case in enumerate(cases):
        alone = train_case(root, Case(strategy="none", mask=case.mask), 2)
        found = differences(merged([runs[index] for runs in ranks]), alone)
        assert max(found["loss"], found["norm"]) < 1e-5, (case.mask, found)


def _adapted(rank: int, world_size: int, root: Path, targets: list[str], saved: list[str]) -> Any:
    case = Case(engine="megatron", parallel=PP2, lora={"rank": 2, "targets": targets, "modules_to_save": saved})
    with megatron_on_cpu():
        try:
            trainer = make_trainer(case.config(root))
        except ValueError as error:
            return str(error)
        module: Any = trainer.engine.module
        trained = [module.global_name(name) for name, p in module.named_parameters() if p.requires_grad]
        trainer.close()
    return [module.global_name(name) for name in lora_layers(module)], trained


def test_adapters_are_named_by_the_whole_model(root: Path) -> None:
    layer = "block.layers.1.self_attention.qkv.linear_qkv"
    first, second = run_ranks(_adapted, 2, root, [layer], ["patch_embed"])
    assert (first[0], second[0]) == ([], [layer])
    assert first[1] == ["patch_embed.weight", "patch_embed.bias"]
    assert second[1] == [f"{layer}.lora_a", f"{layer}.lora_b"]
    for text in run_ranks(_adapted, 2, root, ["nowhere"], []):
        assert "lora.targets must name layers" in text


def _evaluate_and_save(rank: int, world_size: int, root: Path, parallel: dict[str, Any]) -> set[str]:
    loop = {"steps": 2, "eval_every": 1, "eval_samples": 1, "checkpoint_every": 1}
    trainer = make_trainer(Case(ulysses=2, parallel=parallel, loop=loop).config(root))
    assert trainer.run() == 0
    again = make_trainer(Case(ulysses=2, parallel=parallel, loop=loop).config(root))
    assert again.steps_done == 2
    return {name for name in whole_state(again) if name.startswith("optim.exp_avg.")}


@pytest.mark.parametrize("parallel", [FSDP, FSDP | {"cpu_offload": True}], ids=["fsdp", "offload"])
def test_a_checkpoint_after_an_evaluation_is_whole(tmp_path: Path, parallel: dict[str, Any]) -> None:
    spread_weights(tmp_path)
    names = run_ranks(_evaluate_and_save, 2, tmp_path, parallel, timeout_s=100)[0]
    assert "optim.exp_avg.patch_embed.weight" in names


def _foreign_groups(rank: int, world_size: int, root: Path, options: dict[str, Any], parallel: dict[str, Any]) -> str:
    with megatron_on_cpu():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **options)
        try:
            make_trainer(Case(engine="megatron", parallel=parallel).config(root))
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "parallel", "told"),
    [
        ({"pipeline_model_parallel_size": 2, "order": "tp-cp-ep-pp-dp"}, PP2, "order='tp-cp-ep-dp-pp'"),
        ({"tensor_model_parallel_size": 2, "order": "dp-tp-cp-ep-pp"}, TP2, "order='tp-cp-ep-dp-pp'"),
        ({"num_distributed_optimizer_instances": 2}, {}, "num_distributed_optimizer_instances=1"),
        ({"tensor_model_parallel_size": 2}, {}, "tensor_model_parallel_size=2"),
    ],
    ids=["pp before dp", "dp before tp", "instances", "size"],
)
def test_groups_of_another_order_are_refused(
    root: Path, options: dict[str, Any], parallel: dict[str, Any], told: str
) -> None:
    for text in run_ranks(_foreign_groups, 4, root, options, parallel):
        assert told in text


def _sgd(rank: int, world_size: int, root: Path, cases: list[Case]) -> list[list[float]]:
    return [_sgd_losses(root, case) for case in cases]


def _sgd_losses(root: Path, case: Case) -> list[float]:
    optim = OptimConfig(name="sgd", lr=0.05, weight_decay=0.5)
    with megatron_on_cpu():
        trainer = make_trainer(dataclasses.replace(case.config(root), optim=optim))
        losses = run_steps(trainer, 0, 3).losses
        trainer.close()
    return losses


def test_gradient_descent_decays_weights_on_every_engine(root: Path) -> None:
    alone = torch.tensor(_sgd_losses(root, Case(strategy="none")))
    cases = [Case(engine="megatron", parallel=TP2), Case(engine="megatron", ulysses=2), Case(parallel=TP2)]
    for losses in run_ranks(_sgd, 2, root, cases, timeout_s=100)[0]:
        torch.testing.assert_close(torch.tensor(losses), alone, rtol=1e-5, atol=0)


LORA = {"rank": 2}


def _rounded(rank: int, world_size: int, root: Path, case: Case) -> list[str]:
    """Frozen weights whose saved form is not what the run started from."""
    with megatron_on_cpu():
        trainer = make_trainer(case.config(root, precision="bf16"))
        trainer.train_step(0)
        state = whole_state(trainer)
        trainer.close()
    start = whole_state(make_trainer(Case(strategy="none").config(root, engine="native")))
    frozen = [name for name in start if name.startswith("model.") and name in state]
    assert len(frozen) > 10
    return [name for name in frozen if not torch.equal(state[name], start[name])]


@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_frozen_weights_are_saved_as_they_were_given(root: Path, engine: str) -> None:
    """In bf16 the model holds rounded ones; a run that goes on elsewhere must not start from those."""
    if engine == "deepspeed" and find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed: pip install deepspeed")
    parallel: dict[str, Any] = {"zero_stage": 2} if engine == "deepspeed" else TP2
    case = Case(engine=engine, ulysses=1 if engine == "megatron" else 2, parallel=parallel, lora=LORA)
    env = DEEPSPEED_ENV if engine == "deepspeed" else {}
    world = 2 if engine == "megatron" else 4
    assert not [names for names in run_ranks(_rounded, world, root, case, timeout_s=100, env=env) if names]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"bf16": True}, "bf16 must be an object"),
        ({"zero_optimization": False}, "zero_optimization must be an object"),
        ({"torch_autocast": {"enabled": True}}, "train.precision"),
        ({"fp16": {"enabled": True}}, "train.precision"),
        ({"train_batch_size": 7}, "contradicts this run"),
        ({"optimizer": {"type": "Adam"}}, "optim"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_deepspeed_files_that_contradict_the_run(root: Path, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        _deepspeed_settings(root, settings)


def _deepspeed_settings(root: Path, settings: dict[str, Any]) -> dict[str, Any]:
    path = root / "deepspeed.json"
    path.write_text(json.dumps(settings))
    config = Case(engine="deepspeed", parallel={"deepspeed_config": str(path)}).config(root, grad_clip=0.0)
    return build_deepspeed_config(config.train, config.parallel, dp_size=2, data_size=2)


def test_deepspeed_files_may_leave_things_open(root: Path) -> None:
    settings: dict[str, Any] = {
        "zero_optimization": "auto",
        "bf16": "auto",
        "optimizer": "auto",
        "fp16": {"enabled": False},
    }
    settings |= {"gradient_clipping": 0.0, "train_batch_size": "auto", "wall_clock_breakdown": True}
    made = _deepspeed_settings(root, settings)
    assert made["wall_clock_breakdown"] is True
    assert made["zero_optimization"] == {"stage": 1}
    assert made["gradient_clipping"] > 1e20


def test_sizes_that_do_not_fit_are_refused_before_anything_starts(root: Path) -> None:
    with pytest.raises(ValueError, match=r"data_parallel=fsdp .* at least two, got 1"):
        Case(strategy="none", parallel=FSDP).config(root).validate(1)
    with pytest.raises(ValueError, match="lora.targets must name layers"):
        Case(strategy="none", lora={"rank": 2, "targets": ["nope"]}).config(root).validate(1)
    assert load_model_config(str(root / "model.yaml")).hidden_size == 24
