"""What `dbsp-infer --pipeline` says before it loads anything: defaults, sizes, and refusals with a remedy."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dbsp_megatron.infer.__main__ import main
from dbsp_megatron.infer.pipeline_command import describe, prepare
from tests.pipeline_folders import save_pipeline

pytestmark = [pytest.mark.pipelines, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from PIL import Image

    root = tmp_path_factory.mktemp("pipelines")
    Image.new("RGB", (50, 90)).save(root / "start.png")
    return {
        name: save_pipeline(name, root / name.replace(" ", "_")) for name in ("wan", "wan i2v", "cogvideox", "flux")
    }


@pytest.fixture
def wan(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return shutil.copytree(folders["wan"], tmp_path / "wan")


def _words(folder: Path, *more: str) -> list[str]:
    return ["--pipeline", str(folder), "--prompt", "a cat", *more]


def test_prepare_fills_in_the_defaults_of_the_pipeline(folders: dict[str, Path]) -> None:
    asked = prepare(_words(folders["wan"])).config.generate
    found = (asked.num_frames, asked.height, asked.width, asked.steps, asked.fps)
    assert found == (81, 480, 832, 50, 16)
    # The model names its own size: 6 x 10 latents, 9 frames.
    asked = prepare(_words(folders["cogvideox"])).config.generate
    assert (asked.num_frames, asked.height, asked.width, asked.fps) == (9, 80, 48, 8)
    asked = prepare(_words(folders["flux"])).config.generate
    assert (asked.height, asked.width, asked.steps) == (1024, 1024, 28)


def test_dry_run_says_what_would_be_done(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(_words(folders["wan"], "--mask", "sparge", "--dry-run", "--world-size", "8"))
    printed = capsys.readouterr().out
    assert end.value.code == 0
    assert "processes:       8 = 1 data parallel x 8 sequence parallel" in printed
    assert "tokens:          32760 (21 x 30 x 52 patches)" in printed
    assert "WanPipeline, bf16, 832 x 480, 81 frames, 16 fps" in printed
    assert "mask:            sparge" in printed
    assert "outputs/a-cat-" in printed
    prepared = prepare(_words(folders["wan"]))
    count = sum(
        parameter.numel()
        for name in ("transformer", "transformer_2")
        for parameter in _transformer(folders["wan"] / name).parameters()
    )
    assert f"{count:,} parameters, 3 layers" in describe(prepared)


def _transformer(folder: Path) -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("wan", "--height 90", "generate.height must be a multiple of 16 for this pipeline, got 90; use 80 or 96"),
        ("wan", "--width 8", "generate.width must be a multiple of 16 for this pipeline, got 8; use 16 or more"),
        ("wan", "--num-frames 80", "generate.num_frames must be 1 more than a multiple of 4 .* got 80; use 77 or 81"),
        ("flux", "--num-frames 9", "generate.num_frames=9 is nothing that FluxPipeline takes; remove it"),
        ("wan", "--true-cfg-scale 3", "generate.true_cfg_scale=3.0 is nothing that WanPipeline takes"),
        ("wan", "--image __picture__", "generate.image='.*' is nothing that WanPipeline takes"),
        ("wan i2v", "--image __file__", "generate.prompt: image must be a picture file, .*py cannot be read"),
        ("wan i2v", "", "WanImageToVideoPipeline starts from a picture: give generate.image"),
        (
            "wan i2v",
            "--guidance-scale-2 3 --image __picture__",
            "generate.guidance_scale_2=3.0 is for the second of two",
        ),
        ("wan", "--negative-prompt x --guidance-scale 1", "negative_prompt has no effect on WanPipeline with"),
        ("flux", "--negative-prompt x", "negative_prompt has no effect on FluxPipeline with generate.true_cfg_scale=1"),
        ("flux", "--true-cfg-scale 2", "generate.true_cfg_scale=2.0 has no effect on FluxPipeline without a negative"),
        ("wan", "--mask topp --mask.cube [2,2,2]", "mask.cube=.* orders the tokens of this project's own models"),
        ("wan", "--compare-dense", "compares a sparse mask with a dense one, got mask.method=dense"),
        ("wan", "--reuse-report --sp-strategy ulysses", "generate.reuse_report=true .* needs sp.strategy=dbsp"),
        ("flux", "--vae-dtype fp32", "generate.vae_dtype=fp32 must be auto or generate.dtype=bf16 for AutoencoderKL:"),
        ("wan", "--lora-scale 2", "generate.lora_scale=2.0 needs generate.lora"),
        ("wan", "--lora nowhere.safetensors", "generate.lora=nowhere.safetensors must be a safetensors file"),
        ("wan", "--lora __file__", "generate.lora=.*py must be a safetensors file"),
        ("wan", "--sp.ulysses_degree 3 --sp.ring_degree 1", "must divide the number of processes 4"),
        ("wan", "--checkpoint runs/a", "pipeline and checkpoint exclude one another"),
        ("wan", "--frames 9", "frames"),
        (
            "wan",
            "--cfg-parallel --guidance-scale 1",
            "generate.cfg_parallel=true divides .* generate.guidance_scale above 1",
        ),
        (
            "flux",
            "--cfg-parallel",
            "true_cfg_scale above 1 and a negative prompt for every prompt; give that, or leave",
        ),
        ("wan", "--cfg-parallel --world-size 3", "takes an even number of processes, .* got 3; start one more or less"),
        (
            *("wan", "--cfg-parallel --sp.ulysses_degree 2 --sp.ring_degree 2"),
            "gives a branch half of 4 processes: .*must divide the number of processes 2",
        ),
        ("wan", "--prompts a.txt", "exactly one of generate.prompt and generate.prompts must be given, got both"),
    ],
)
def test_command_refuses(
    name: str, more: str, says: str, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, before any weight is loaded or rank spoken to."""
    more = more.replace("__file__", __file__).replace("__picture__", str(folders["wan"].parent / "start.png"))
    words = _words(folders[name], "--dry-run", "--world-size", "4", *more.split())
    with pytest.raises(SystemExit) as end:
        main(words)
    captured = capsys.readouterr()
    assert end.value.code == 2, captured.out
    (line,) = captured.err.splitlines()
    assert re.search(f"^error: .*{says}", line), line


def _spoil(folder: Path, change: str) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    if change == "no index":
        (folder / "model_index.json").unlink()
        return
    if change == "code":
        index["_class_name"] = ["pipeline", "MyPipeline"]
    elif change == "component of code":
        index["scheduler"] = ["my_scheduler", "MyScheduler"]
    elif change == "pickle":
        torch.save({}, folder / "vae" / "diffusion_pytorch_model.bin")
        (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    elif change == "no weights":
        (folder / "text_encoder" / "model.safetensors").unlink()
    elif change == "no folder":
        shutil.rmtree(folder / "tokenizer")
    elif change == "other transformer":
        index["transformer"] = ["diffusers", "LTXVideoTransformer3DModel"]
    elif change == "other class":
        index["_class_name"] = "NoSuchPipeline"
    elif change == "cut short":
        file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    elif change == "config":
        (folder / "transformer" / "config.json").write_text("[")
    (folder / "model_index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("no index", "must be a folder with a model_index.json, there is none; names of hub repositories are not"),
        ("code", "names a class in code of its own .* which is never run"),
        ("component of code", "component scheduler is .*; only classes of diffusers and transformers are loaded"),
        ("pickle", "vae must be safetensors, it has diffusion_pytorch_model.bin, which could run code"),
        ("no weights", "text_encoder must be safetensors, it has none"),
        ("no folder", "names the component tokenizer, but .*tokenizer is not there"),
        ("other transformer", "LTXVideoTransformer3DModel, which cannot be parallel; supported are Wan"),
        ("other class", "NoSuchPipeline, which is no pipeline of diffusers"),
        ("cut short", "is not a whole safetensors file"),
        ("config", "config.json must be a JSON file"),
    ],
)
def test_prepare_refuses_folders(change: str, says: str, wan: Path) -> None:
    _spoil(wan, change)
    with pytest.raises(ValueError, match=says):
        prepare(_words(wan))


def test_prepare_names_missing_packages(wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else find(name))
    with pytest.raises(ValueError, match=r"needs the packages accelerate; run pip install 'dbsp-megatron\[diffusers\]"):
        prepare(_words(wan))


def test_a_yaml_file_may_name_the_pipeline(wan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(
        f"pipeline: {wan}\ngenerate:\n  prompt: a dog\n  steps: 7\nmask:\n  method: topk\n"
    )
    with pytest.raises(SystemExit) as end:
        main(["--config", str(tmp_path / "a.yaml"), "--dry-run"])
    printed = capsys.readouterr().out
    assert end.value.code == 0
    for words in ("steps:           7", "mask:            topk", "outputs/a-dog-"):
        assert words in printed


_ALONE = """
import pickle, socket, sys
import torch
def refuse(*args, **kwargs):
    raise SystemExit("asked for the network, or for a pickle")
socket.create_connection = socket.getaddrinfo = socket.socket.connect = refuse
torch.load = pickle.load = refuse
from dbsp_megatron.infer.__main__ import main
main(sys.argv[1:])
"""


def test_nothing_is_downloaded_or_unpickled(wan: Path, tmp_path: Path) -> None:
    """In a process whose libraries were not told to stay offline, with a pickle beside the safetensors."""
    torch.save({}, wan / "transformer" / "diffusion_pytorch_model.bin")
    sizes = "--height 80 --width 48 --num-frames 9 --max-sequence-length 9 --dtype fp32 --device cpu --steps 2"
    words = _words(wan, *sizes.split(), "--output", str(tmp_path / "out"))
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out").glob("*.mp4"))) == 1


def test_an_output_folder_that_cannot_be_written_to_is_refused_before_the_work(
    wan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("a file")
    shutil.rmtree(wan / "text_encoder")
    (wan / "text_encoder").mkdir()
    with pytest.raises(SystemExit) as end:
        main(_words(wan, "--output", str(tmp_path / "out"), "--device", "cpu"))
    assert end.value.code == 2
    assert "out must be a folder that can be written to" in capsys.readouterr().err


def test_sigterm_ends_the_command_with_code_0(wan: Path, tmp_path: Path) -> None:
    """As a process of its own, between two steps; a second start makes what is missing."""
    sizes = "--height 80 --width 48 --num-frames 9 --max-sequence-length 9 --dtype fp32 --device cpu"
    more = [*sizes.split(), "--output", str(tmp_path / "out")]
    command = [sys.executable, "-m", "dbsp_megatron.infer", *_words(wan, *more)]
    with subprocess.Popen([*command, "--steps", "5000"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        printed = []
        for line in process.stderr:
            printed.append(line)
            if "prompt 1/1 1/5000" in line:
                process.send_signal(signal.SIGTERM)
                break
        started = time.monotonic()
        rest = process.stderr.read()
        assert process.wait(60) == 0, "".join(printed) + rest
    assert time.monotonic() - started < 30
    assert "stopped by SIGTERM with 0 of 1 outputs made" in rest
    assert not list((tmp_path / "out").glob("*")) or not (tmp_path / "out").exists()
    done = subprocess.run([*command, "--steps", "2"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".json", ".mp4"]
