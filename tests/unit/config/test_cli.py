"""Command lines and YAML files become configurations; mistakes become one line that names the key."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from dbsp_megatron.config.cli import (
    INFER_ALIASES,
    TRAIN_ALIASES,
    expand_aliases,
    names_pipeline,
    parse_infer,
    parse_pipeline,
    parse_train,
    without_section,
)
from dbsp_megatron.masks import METHODS, MaskConfig
from dbsp_megatron.masks.config import settings_of
from dbsp_megatron.observability.run_folder import RunFolder


def test_parse_train_reads_short_names() -> None:
    words = "--sp-strategy usp --ulysses-degree 2 --ring-degree auto --data a.mp4 b --model wan2_1_1_3b --steps 7"
    words += " --name x --wandb offline --skip-bad-data --engine native"
    config = parse_train(words.split()).config
    assert (config.sp.strategy, config.sp.ulysses_degree, config.sp.ring_degree) == ("usp", 2, "auto")
    assert (config.data.paths, config.data.skip_bad_data) == (["a.mp4", "b"], True)
    assert (config.model, config.train.steps, config.run.name) == ("wan2_1_1_3b", 7, "x")
    assert (config.wandb.mode, config.train.engine) == ("offline", "native")


def test_parse_train_flags_win_over_yaml(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("train:\n  steps: 7\n  seed: 4\noptim:\n  lr: 1.0e-3\n")
    config = parse_train(["--config", str(path), "--steps", "9"]).config
    assert (config.train.steps, config.train.seed, config.optim.lr) == (9, 4, 1e-3)


def test_parse_train_reads_the_saved_configuration_of_a_run(tmp_path: Path) -> None:
    import dataclasses

    config = parse_train(["--data", 'it\'s "odd".mp4', "--sp.block_size=16", "--mask.top_p=0.4"]).config
    RunFolder(tmp_path, "run").write_config(dataclasses.asdict(config))
    again = parse_train(["--config", str(tmp_path / "run" / "config.yaml")]).config
    assert dataclasses.asdict(again) == dataclasses.asdict(config)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--stepz", "3"], "stepz"),
        (["--train.stepz", "3"], "train.stepz"),
        (["--steps", "many"], "train.steps"),
        (["--train.precision", "fp64"], "train.precision"),
        (["--optim.lr", "-1"], "optim.lr"),
        (["--ring-degree", "few"], "sp.ring_degree"),
        (["--sp.head_policy", "best"], "sp.head_policy"),
        (["--engine", "megatron", "--parallel.zero_stage", "3"], "parallel.zero_stage=3 has no effect"),
        (["--pipeline-parallel-size", "2"], "parallel.pipeline_parallel_size=2 has no effect with train.engine=native"),
        (["--parallel.sequence_parallel", "true"], "parallel.tensor_parallel_size > 1"),
        (["--parallel.cpu_offload", "true"], "parallel.data_parallel=fsdp"),
        (["--sp-mask", "duo", "--tensor-parallel-size", "2"], "parallel.tensor_parallel_size=1"),
        (
            ["--sp-mask", "sliding_tile", "--mask.window=[[3,3,1],[1,3,1]]", "--tensor-parallel-size", "2"],
            "tells heads of the whole model apart (mask.window)",
        ),
        (["--sp-mask", "sparge", "--mask.top_p=[0.5,0.6]", "--tensor-parallel-size", "2"], "apart (mask.top_p)"),
        (["--sp-mask", "sliding_tile", "--mask.window=[[3,3,1],[1,2,1]]"], "mask.window must be odd"),
        (["--sp-mask", "sliding_tile", "--mask.window=[3,3]"], "mask.window"),
        (["--sp-mask", "topk", "--mask.top_p", "0.4"], "mask.top_p=0.4 does not belong to mask.method=topk"),
        (["--steps", "3", "--optim.warmup_steps", "4"], "optim.warmup_steps"),
        (["--data"], "--data needs at least one path"),
        (["--world-size", "0"], "--world-size"),
        (["--run.name", "a/b"], "run.name"),
        (["--train.micro_batch_size", "2"], "train.micro_batch_size"),
        (["--train.eval_every", "2"], "train.eval_samples"),
        (["--config", "missing.yaml"], "missing.yaml"),
    ],
)
def test_parse_train_names_the_mistake(words: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        parse_train(words)


@pytest.mark.parametrize(
    ("word", "window"),
    [
        ("[3,3,1]", (3, 3, 1)),
        ("[[3,3,1]]", ((3, 3, 1),)),
        ("[[3,3,1],[1,3,1],[3,3,3]]", ((3, 3, 1), (1, 3, 1), (3, 3, 3))),
    ],
)
def test_windows_of_heads_come_from_flags_files_and_saved_runs(tmp_path: Path, word: str, window: tuple) -> None:
    config = parse_train(["--mask", "sliding_tile", f"--mask.window={word}"]).config
    assert config.mask.window == window
    file = tmp_path / "a.yaml"
    file.write_text(f"mask:\n  method: sliding_tile\n  window: {word}\n")
    assert parse_train(["--config", str(file)]).config.mask.window == window
    saved = {f"mask.{key}": value for key, value in json.loads(json.dumps(asdict(config.mask))).items()}
    assert parse_infer(["--checkpoint", "runs/a"], saved).config.mask == config.mask


@pytest.mark.parametrize("config", [["--config", "FILE"], ["--config=FILE"]])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_flags_win_over_a_file_wherever_it_stands(tmp_path: Path, config: list[str], place: int) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("train:\n  steps: 7\nsp:\n  block_size: 32\noptim:\n  warmup_steps: 1\n")
    words = ["--steps=9", "--sp.block_size=16"]
    words[place:place] = [word.replace("FILE", str(file)) for word in config]
    got = parse_train(words).config
    assert (got.train.steps, got.sp.block_size, got.optim.warmup_steps) == (9, 16, 1)


def test_shares_of_heads_come_from_flags() -> None:
    assert parse_train(["--mask", "sparge", "--mask.top_p=[0.5,0.6]"]).config.mask.top_p == (0.5, 0.6)
    assert parse_train(["--mask", "sparge", "--mask.top_p=0.5"]).config.mask.top_p == 0.5


@pytest.mark.parametrize("flag", ["--mask", "--sp-mask", "--mask.method"])
@pytest.mark.parametrize("method", [name for name in METHODS if "path" not in settings_of(name)])
def test_a_method_named_by_a_flag_has_its_own_settings(tmp_path: Path, method: str, flag: str) -> None:
    """`--mask NAME` beside the demo's file is enough; schedule and order of tokens stay those of the file."""
    file = tmp_path / "a.yaml"
    file.write_text("mask:\n  method: topp\n  top_p: 0.6\n  min_blocks: 2\n  cube: [2, 2, 2]\n  dense_steps: 3\n")
    given = {"top_p": 0.6, "min_blocks": 2} if method == "topp" else {}
    want = MaskConfig(method=method, cube=(2, 2, 2), dense_steps=3, **given)
    for words in ([flag, method, "--config", str(file)], ["--config", str(file), f"{flag}={method}"]):
        assert parse_train(words).config.mask == want
    assert parse_pipeline(["--pipeline", "a", "--prompt", "x", flag, method]).config.mask == MaskConfig(method=method)


def test_flags_beside_a_method_are_kept_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("mask:\n  method: topp\n  top_p: 0.6\n")
    words = ["--config", str(file), "--mask", "topk", "--mask.density=0.3"]
    assert parse_train(words).config.mask == MaskConfig(method="topk", density=0.3)
    assert parse_train([*words, "--mask.top_p", "null"]).config.mask == MaskConfig(method="topk", density=0.3)
    with pytest.raises(ValueError, match=r"mask\.top_p=0.5 does not belong to mask\.method=topk"):
        parse_train([*words, "--mask.top_p", "0.5"])
    file.write_text("mask:\n  method: topk\n  top_p: 0.6\n")
    with pytest.raises(ValueError, match=r"mask\.top_p=0.6 does not belong to mask\.method=topk"):
        parse_train(["--config", str(file)])


def test_parse_train_names_unknown_keys_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("train:\n  stepz: 7\n")
    with pytest.raises(ValueError, match="stepz"):
        parse_train(["--config", str(path)])


def test_expand_aliases() -> None:
    assert expand_aliases(["--data", "a", "b c", "--print-config"], TRAIN_ALIASES) == [
        '--data.paths=["a", "b c"]',
        "--print_config",
    ]
    assert expand_aliases(["--skip-bad-data", "false"], TRAIN_ALIASES) == ["--data.skip_bad_data", "false"]
    assert expand_aliases(["--seed=3"], INFER_ALIASES) == ["--sample.seed=3"]


@pytest.mark.parametrize(("parse", "key"), [(parse_train, "--train.ema_decay"), (parse_infer, "--sample.shift")])
def test_help_explains_every_field(
    parse: Callable[[list[str]], object], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    explanation = shown[shown.index(f"{key} ") :][:200]
    assert "weights" in explanation or "noise" in explanation
    assert "--sp-strategy = --sp.strategy" in shown


def test_print_config_is_a_usable_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_train(["--steps", "12", "--print-config"])
    text = capsys.readouterr().out
    assert yaml.safe_load(text)["train"]["steps"] == 12
    path = tmp_path / "printed.yaml"
    path.write_text(text)
    assert parse_train(["--config", str(path)]).config.train.steps == 12


def test_parse_pipeline_takes_the_names_that_users_of_diffusers_know() -> None:
    words = (
        "--pipeline folder --num_inference_steps 7 --num_frames=9 --guidance-scale 3.5 --mask sparge --compare-dense"
    )
    config = parse_pipeline([*words.split(), "--prompt", "a cat: [red], 3", "--negative_prompt=null"]).config
    asked = config.generate
    assert (asked.steps, asked.num_frames, asked.guidance_scale, asked.compare_dense) == (7, 9, 3.5, True)
    assert (asked.prompt, asked.negative_prompt) == ("a cat: [red], 3", "null")
    assert config.mask.method == "sparge"
    assert parse_pipeline(["--pipeline", "folder", "--prompt", "cat"]).config.is_dense


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--pipeline", "a"], True),
        (["--pipeline=a"], True),
        (["--checkpoint", "pipeline"], False),
        (["--prompt", "--pipelines"], False),
        (["--config", "nowhere.yaml"], False),
    ],
)
def test_names_pipeline_tells_the_two_commands_apart(words: list[str], expected: bool) -> None:
    assert names_pipeline(words) == expected


def test_names_pipeline_refuses_both(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("checkpoint: runs/a\n")
    with pytest.raises(ValueError, match="pipeline and checkpoint exclude one another"):
        names_pipeline([f"--config={file}", "--pipeline", "a"])


def test_parse_infer_takes_defaults_of_the_run() -> None:
    defaults = {"sp.block_size": 16, "mask.top_p": 0.3}
    config = parse_infer(["--checkpoint", "runs/a", "--mask.top_p", "0.9"], defaults).config
    assert (config.sp.block_size, config.mask.top_p) == (16, 0.9)
    with pytest.raises(ValueError, match="checkpoint must name"):
        parse_infer([])


def test_a_dry_run_is_still_one_without_a_section() -> None:
    """`dbsp-infer --dry-run` parses its words twice, the first time without those of the mask."""
    words = ["--checkpoint", "runs/a", "--dry-run", "--world-size", "4", "--mask.method", "radial", "--seed", "3"]
    command = parse_infer(without_section(words, "mask"))
    assert (command.dry_run, command.world_size) == (True, 4)
    assert command.config.sample.seed == 3
