"""tools/convert_checkpoint.py: from diffusers into a run, trained and sampled there, and back into diffusers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron.config import InferConfig
from dbsp_megatron.config.sections import SampleConfig
from dbsp_megatron.infer.pipeline import SamplingPipeline
from dbsp_megatron.masks import MaskConfig
from dbsp_megatron.models.convert import DiffusersFolder
from dbsp_megatron.models.dit import load_model_config
from dbsp_megatron.train.checkpoint import open_checkpoint
from dbsp_megatron.train.distributed import World
from tests.integration.training import make_config, make_trainer, this_world, with_run
from tests.unit.models.convert.cases import (
    CASES,
    WAN,
    Case,
    conversion_of,
    load_theirs,
    make_inputs,
    run_theirs,
    save_theirs,
)
from tools.convert_checkpoint import main

pytestmark = pytest.mark.diffusers

PIXELS = Case(
    class_name="WanTransformer3DModel",
    settings=WAN | {"in_channels": 3, "out_channels": 3, "patch_size": (1, 8, 8), "rope_max_seq_len": 64},
    grid=(4, 3, 3),
)
"""A model that the trainer can feed: Wan on pixels."""


def _stored(folder: Path) -> dict[str, Tensor]:
    with DiffusersFolder(folder) as opened:
        return {name: opened.read(name) for name in opened.shapes}


def _same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", ["wan i2v", "cogvideox", "cogvideox 2b", "cogvideox i2v"])
def test_import_and_export_give_the_same_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mixed dtypes and shards; the config with what our description has no place for."""
    case = CASES[name]
    source, middle, target = (tmp_path / part for part in ("theirs", "ours", "back"))
    theirs = save_theirs(case, source, max_shard_size="30KB")
    with DiffusersFolder(source) as opened:
        for file in {path.name for path in source.glob("*.safetensors")}:
            _to_bfloat16(source / file)
    assert main(["import", str(source), str(middle)]) == 0
    assert main(["export", str(middle), str(target), "--max-shard-gib", "0.00003"]) == 0
    assert len(list(target.glob("*.safetensors"))) > 1
    _same(_stored(target), _stored(source))
    assert json.loads((target / "config.json").read_text()) == opened.config
    assert load_model_config(middle / "model.yaml") == conversion_of(case).model
    printed = capsys.readouterr().out
    assert f"{sum(tensor.numel() for tensor in theirs.state_dict().values()):,} parameters" in printed
    again = load_theirs(case.class_name, target)
    _same(
        {key: tensor.bfloat16() for key, tensor in again.state_dict().items()},
        {key: tensor.bfloat16() for key, tensor in theirs.state_dict().items()},
    )


def _to_bfloat16(file: Path) -> None:
    """Rewrites a file as published ones are: tables in fp32, the rest in bf16."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    save_file(
        {key: tensor if "table" in key else tensor.bfloat16() for key, tensor in tensors.items()},
        file,
        metadata={"format": "pt"},
    )


def test_an_imported_model_is_trained_sampled_and_exported(tmp_path: Path) -> None:
    theirs = save_theirs(PIXELS, tmp_path / "theirs")
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "wan")]) == 0
    config = dataclasses.replace(
        make_config(tmp_path, ema_decay=0.5),
        model=str(tmp_path / "wan" / "model.yaml"),
        mask=MaskConfig(method="dense"),
    )
    trainer = make_trainer(with_run(config, init_from=str(tmp_path / "wan")))
    wanted = dict(conversion_of(PIXELS).to_ours(theirs.state_dict().__getitem__))
    _same({name: parameter.detach() for name, parameter in trainer.engine.module.named_parameters()}, wanted)

    sample = SampleConfig(steps=2, device="cpu")
    sp = make_config(tmp_path, strategy="none").sp
    infer = InferConfig(checkpoint=str(tmp_path / "wan"), sp=sp, mask=MaskConfig(method="dense"), sample=sample)
    assert torch.isfinite(SamplingPipeline(infer, this_world()).sample(0)[0]).all()

    trainer.train_step(0)
    trainer.steps_done = 1
    trainer.save()
    run = str(tmp_path / "run")
    for weights, tensors in (
        ("model", dict(trainer.engine.module.named_parameters())),
        ("ema", trainer.engine.ema.tensors if trainer.engine.ema else {}),
    ):
        assert (
            main(["export", run, str(tmp_path / weights), "--weights", weights, "--like", str(tmp_path / "theirs")])
            == 0
        )
        again = load_theirs(PIXELS.class_name, tmp_path / weights)
        assert again.config.rope_max_seq_len == 64
        _same(dict(conversion_of(PIXELS).to_ours(again.state_dict().__getitem__)), dict(tensors))
    inputs = make_inputs(PIXELS, conversion_of(PIXELS).model)
    change = (run_theirs(PIXELS, again, inputs) - run_theirs(PIXELS, theirs, inputs)).abs().max()
    assert change > 1e-5


def _error(words: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    return printed


def test_what_is_refused_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, middle = tmp_path / "theirs", tmp_path / "ours"
    save_theirs(CASES["wan t2v"], source)
    assert main(["import", str(source), str(middle), "--dry-run"]) == 0
    assert "would write" in capsys.readouterr().out
    assert not middle.exists()
    middle.mkdir()
    (middle / "model.yaml").write_text("hidden_size: 8\n")
    assert "model.yaml describes another model" in _error(["import", source, middle], capsys)
    (middle / "model.yaml").unlink()
    assert main(["import", str(source), str(middle), "--dtype", "bfloat16"]) == 0
    assert "holds checkpoints already" in _error(["import", source, middle], capsys)
    assert main(["export", str(middle), str(tmp_path / "dry"), "--dry-run"]) == 0
    assert not (tmp_path / "dry").exists()
    assert "holds no ema weights" in _error(["export", middle, tmp_path / "x", "--weights", "ema"], capsys)
    assert "must be a new or empty folder" in _error(["export", middle, source], capsys)
    assert "no checkpoint in" in _error(["export", source, tmp_path / "x"], capsys)
    assert "max-shard-gib must be a number > 0" in _error(
        ["export", middle, tmp_path / "x", "--max-shard-gib", "0"], capsys
    )
    other = tmp_path / "other"
    save_theirs(dataclasses.replace(CASES["wan t2v"], settings=WAN | {"ffn_dim": 28}), other)
    assert "ffn_hidden_size would be 28, is 26" in _error(["export", middle, tmp_path / "x", "--like", other], capsys)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_layers": 1}))
    message = _error(["import", source, tmp_path / "x"], capsys)
    assert "has blocks.1." in message
    assert "which this model has no place for" in message
    (source / "config.json").write_text(json.dumps(config | {"cross_attn_norm": False}))
    assert "config.json: WanTransformer3DModel: cross_attn_norm must be True" in _error(
        ["import", source, tmp_path / "x"], capsys
    )
    assert not (tmp_path / "x").exists()


def test_a_smaller_dtype_must_hold_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    save_theirs(CASES["wan t2v"], tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.safetensors")
    tensors = load_file(file)
    tensors["proj_out.bias"][0] = 1e6
    save_file(tensors, file, metadata={"format": "pt"})
    assert "cannot hold weights as large as 1e+06" in _error(
        ["import", tmp_path / "a", tmp_path / "b", "--dtype", "float16"], capsys
    )
    assert main(["import", str(tmp_path / "a"), str(tmp_path / "b"), "--dtype", "bfloat16"]) == 0
    checkpoint = open_checkpoint(tmp_path / "b", World())
    found = {"model.output.proj.bias": torch.zeros(20)}
    checkpoint.load_tensors(found, World())
    assert found["model.output.proj.bias"].max() == torch.tensor(1e6).bfloat16()


def test_rotary_models_without_an_origin_are_exported(tmp_path: Path) -> None:
    """A checkpoint that was trained anew has no config.json to keep: one is made."""
    case = CASES["cogvideox"]
    save_theirs(case, tmp_path / "a")
    assert main(["import", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    state = next((tmp_path / "b" / "checkpoints").glob("step_*")) / "state.json"
    _forget_origin(state)
    assert main(["export", str(tmp_path / "b"), str(tmp_path / "c")]) == 0
    again = load_theirs(case.class_name, tmp_path / "c")
    assert (again.config.sample_height, again.config.sample_width) == (10, 6)
    _same(_stored(tmp_path / "c"), _stored(tmp_path / "a"))


def _forget_origin(state: Path) -> None:
    import hashlib

    kept = json.loads(state.read_text())
    del kept["source"]
    state.write_text(json.dumps(kept))
    manifest = state.with_name("manifest.json")
    entries = json.loads(manifest.read_text())
    entries["files"]["state.json"] = {
        "bytes": state.stat().st_size,
        "sha256": hashlib.sha256(state.read_bytes()).hexdigest(),
    }
    manifest.write_text(json.dumps(entries))
