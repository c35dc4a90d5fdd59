"""`dbsp-infer --pipeline` makes on several ranks what diffusers makes in one process, and goes on where it stopped."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dbsp_megatron.infer import diffusers_run
from tests.distributed.pipeline_commands import (
    NEGATIVE,
    PROMPT,
    command,
    made,
    run_command,
    run_commands,
    run_until,
)
from tests.harness import run_ranks
from tests.pipeline_folders import PIPELINES, save_pipeline, text_length
from tests.reference import max_error

pytestmark = [pytest.mark.pipelines, pytest.mark.timeout(400)]

ATOL = 1e-4
MESHES = {
    2: ("ulysses", "ring", "dbsp"),
    3: ("usp --sp.ulysses_degree 3 --sp.ring_degree 1", "ring", "dbsp --sp.ulysses_degree 1"),
    4: ("usp --sp.ulysses_degree 2 --sp.ring_degree 2", "ulysses", "dbsp --sp.ulysses_degree 2 --sp.ring_degree 2"),
}
SPARSE = ("--mask", "topp", "--mask.top_p", "0.4")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All pipelines, and a picture beside them."""
    from PIL import Image

    root = tmp_path_factory.mktemp("pipelines")
    pixels = torch.randint(0, 255, (90, 50, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    Image.fromarray(pixels.numpy()).save(root / "start.png")
    return {name: save_pipeline(name, root / name.replace(" ", "_")) for name in PIPELINES}


def _diffusers(name: str, folder: Path, prepare: Callable[[Any], None] | None = None, **changes: Any) -> Tensor:
    """What diffusers makes by itself, without us, as [3, T, H, W] in [-1, 1]."""
    from diffusers import DiffusionPipeline
    from PIL import Image

    pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    if prepare is not None:
        prepare(pipe)
    words = command(name, folder, folder)
    settings: dict[str, Any] = {key: int(words[words.index(f"--{key}") + 1]) for key in ("height", "width")}
    settings["num_inference_steps"] = int(words[words.index("--steps") + 1])
    for key in ("num-frames", "guidance-scale", "true-cfg-scale"):
        if f"--{key}" in words:
            settings[key.replace("-", "_")] = int(words[words.index(f"--{key}") + 1])
    image: dict[str, Any] = {"image": Image.open(folder.parent / "start.png")} if name.startswith("wan i2v") else {}
    texts = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "max_sequence_length": text_length(name)}
    noise = {"generator": torch.Generator().manual_seed(7)}
    result = pipe(**{**settings, **image, **texts, **noise, **changes}, output_type="pt", return_dict=False)[0][0]
    return 2 * (result[:, None] if name == "flux" else result.transpose(0, 1)) - 1


def _run(world_size: int, lists: list[list[str]]) -> None:
    if world_size == 1:
        results = [[run_command(0, 1, words) for words in lists]]
    else:
        results = run_ranks(run_commands, world_size, lists, timeout_s=240)
    for rank, ended in enumerate(results):
        for words, (code, printed) in zip(lists, ended, strict=True):
            assert code == 0, f"rank {rank}: {shlex.join(words)}\n{printed}"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_pipeline_equals_diffusers(world_size: int, folders: dict[str, Path], tmp_path: Path) -> None:
    """Odd token counts, guidance, two experts, images, 769 context tokens, text of unequal length in the sequence.

    (Traps B31, B33, B93.)

    The same seed gives the same video at any world size (Traps B77, B79).
    """
    cases = []
    for index, name in enumerate(PIPELINES):
        strategies = MESHES.get(world_size, ("none",))
        # Each pipeline on two of the three.
        for strategy in {strategies[index % len(strategies)], strategies[-1]}:
            output = tmp_path / f"{name}_{strategy.split()[0]}"
            cases.append((name, output, command(name, folders[name], output, "--sp-strategy", *strategy.split())))
    _run(world_size, [words for _, _, words in cases])
    for name, output, words in cases:
        (video,) = made(output).values()
        error = max_error(video, _diffusers(name, folders[name]))
        assert error < ATOL, f"off by {error:.3g}: {shlex.join(words)}"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sparse_pipeline_equals_one_process_with_the_mask(
    world_size: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    cases = []
    for index, name in enumerate(PIPELINES):
        for strategy in {MESHES[world_size][index % 3], MESHES[world_size][-1]}:
            output = tmp_path / f"{name}_{strategy.split()[0]}"
            sparse = ("--sp-strategy", *strategy.split(), *SPARSE)
            cases.append((name, output, command(name, folders[name], output, *sparse)))
    alone = {name: command(name, folders[name], tmp_path / f"{name}_alone", *SPARSE) for name in PIPELINES}
    _run(1, list(alone.values()))
    _run(world_size, [words for _, _, words in cases])
    for name, output, words in cases:
        (want,) = made(tmp_path / f"{name}_alone").values()
        assert max_error(want, _diffusers(name, folders[name])) > 1e-3, f"{name}: the mask changes nothing"
        error = max_error(next(iter(made(output).values())), want)
        assert error < ATOL, f"off by {error:.3g}: {shlex.join(words)}"


@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_guidance_scales_equal_diffusers(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Off, weak and strong, with a negative prompt that is shorter than the prompt, and without one (Trap B93)."""
    cases = {}
    for scale in ("1", "1.5", "7"):
        words = command(name, folders[name], tmp_path / scale, "--guidance-scale", scale)
        if scale == "1":
            at = words.index("--negative-prompt")
            del words[at : at + 2]
        cases[scale] = words
    _run(2, list(cases.values()))
    for scale in cases:
        negative = None if scale == "1" else NEGATIVE
        want = _diffusers(name, folders[name], guidance_scale=float(scale), negative_prompt=negative)
        error = max_error(next(iter(made(tmp_path / scale).values())), want)
        assert error < ATOL, f"guidance scale {scale}: off by {error:.3g}"


def test_adapter_equals_diffusers_with_it(folders: dict[str, Path], tmp_path: Path) -> None:
    from diffusers import WanPipeline
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    pipe = WanPipeline.from_pretrained(folders["wan"], local_files_only=True)
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"]))
    weights = get_peft_model_state_dict(pipe.transformer)
    generator = torch.Generator().manual_seed(4)
    weights = {key: torch.randn(x.shape, generator=generator) for key, x in weights.items()}
    WanPipeline.save_lora_weights(tmp_path, weights)
    (file,) = tmp_path.glob("*.safetensors")

    def load(loaded: Any) -> None:
        loaded.load_lora_weights(str(tmp_path), weight_name=file.name, adapter_name="a")
        loaded.set_adapters("a", 0.5)

    adapter = ("--lora", str(file), "--lora-scale", "0.5", "--vae-tiling")
    _run(2, [command("wan", folders["wan"], tmp_path / "out", *adapter)])
    want = _diffusers("wan", folders["wan"], prepare=load)
    assert max_error(want, _diffusers("wan", folders["wan"])) > 1e-2, "the adapter changes nothing"
    assert max_error(next(iter(made(tmp_path / "out").values())), want) < ATOL
    torch.save({}, tmp_path / "a.pt")
    (tmp_path / "a.pt").rename(tmp_path / "pickle.safetensors")
    pickled = ("--lora", str(tmp_path / "pickle.safetensors"))
    code, printed = run_command(0, 1, command("wan", folders["wan"], tmp_path / "no", *pickled))
    assert code == 2
    assert "is not a whole safetensors file" in printed


def test_comparison_and_report_on_ranks(folders: dict[str, Path], tmp_path: Path) -> None:
    """The dense twin is what diffusers makes; layers of both experts, meshes and rules of reuse are in the JSON."""
    mesh = ("--sp.ulysses_degree", "2", "--sp.ring_degree", "1", "--compare-dense", "--reuse-report", "--steps", "6")
    _run(2, [command("wan", folders["wan"], tmp_path, *SPARSE, *mesh)])
    (file,) = tmp_path.glob("*.json")
    found, stem = json.loads(file.read_text()), file.stem
    kinds = ("", ".compare", ".dense", ".reuse")
    assert {path.name for path in tmp_path.glob("*[!t]")} == {
        f"{stem}{kind}{suffix}" for kind, suffix in zip(kinds, (".mp4", ".png", ".mp4", ".md"), strict=True)
    } | {file.name}
    assert [layer["layer"] for layer in found["layers"]] == [0, 1, 2]
    assert sum(found["layers"][0]["meshes"].values()) + sum(found["layers"][2]["meshes"].values()) == 6
    assert found["imbalance_before"] >= found["imbalance_after"] >= 1
    compared = found["compared"]
    assert 0 < compared["ssim"] < 1
    assert 0 < compared["psnr_db"] < 60
    assert not compared["identical"]
    rules = {row["rule"]: row for row in found["reuse_rules"]}
    # 6 steps of one of two experts, of two layers and of one.
    decisions = sum(sum(layer["meshes"].values()) for layer in found["layers"])
    assert {row["decisions"] for row in rules.values()} == {decisions}
    assert rules["never"]["replans"] == 0
    assert rules["never"]["hit_rate"] == pytest.approx((decisions - 3) / decisions)
    assert "| paper |" in (tmp_path / f"{stem}.reuse.md").read_text()


def test_interrupted_batch_goes_on(folders: dict[str, Path], tmp_path: Path) -> None:
    """SIGTERM on one rank stops all, finished outputs stay, and another number of ranks makes the rest."""
    lines = [json.dumps({"prompt": f"{name} cat", "name": name, "seed": i}) for i, name in enumerate(("red", "blue"))]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join([*lines, "a dog runs"]) + "\n")

    def words(output: str, *more: str) -> list[str]:
        plain = command("wan", folders["wan"], tmp_path / output, *SPARSE, *more)
        at = plain.index("--prompt")
        return [*plain[:at], "--prompts", str(prompts), *plain[at + 2 :]]

    _run(1, [words("whole")])
    # 3 steps a prompt: in the second one.
    ended = run_ranks(run_until, 2, words("parts"), 4, timeout_s=120)
    assert [code for code, _ in ended] == [0, 0], ended
    assert "stopped by SIGTERM with 1 of 3 outputs made; run the same command to go on" in ended[0][1]
    assert [path.name for path in (tmp_path / "parts").glob("*.json")] == ["red.json"]
    assert not list((tmp_path / "parts").glob(".*")), "a half-written file was left"
    first = (tmp_path / "parts" / "red.mp4").stat().st_mtime_ns
    _run(3, [words("parts", "--sp-strategy", "usp", "--sp.ulysses_degree", "1", "--sp.ring_degree", "3")])
    assert (tmp_path / "parts" / "red.mp4").stat().st_mtime_ns == first
    whole, parts = made(tmp_path / "whole"), made(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert len(whole) == 3
    for name, video in whole.items():
        assert max_error(parts[name], video) < ATOL, name
    assert max_error(*list(whole.values())[:2]) > 1e-2, "prompts and seeds change nothing"
    code, printed = run_command(0, 1, words("parts", "--steps", "4"))
    assert code == 2
    assert "red.mp4 exists and was made with other settings: steps was 3, is 4; name another output" in printed
    (tmp_path / "parts" / "red.json").unlink()
    _run(1, [words("parts")])
    assert (tmp_path / "parts" / "red.mp4").stat().st_mtime_ns > first, "an output without its JSON is not whole"


def test_groups_take_turns(folders: dict[str, Path], tmp_path: Path) -> None:
    """Four ranks as two sequences of two; a drawn seed is one for all, and kept when the command is repeated."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red cat\n\na blue dog\nsnow\n")
    words = command("wan", folders["wan"], tmp_path / "out", "--sp.ulysses_degree", "2", "--sp.ring_degree", "1")
    at = words.index("--prompt")
    words = [*words[:at], "--prompts", str(prompts), *words[at + 2 :], "--seed", "-1"]
    _run(4, [words])
    seeds = {json.loads(file.read_text())["settings"]["seed"] for file in (tmp_path / "out").glob("*.json")}
    assert len(made(tmp_path / "out")) == 3
    assert len(seeds) == 1
    assert seeds != {-1}
    for code, _ in (ended := run_ranks(run_command, 2, words)):
        assert code == 0
    assert "3 of 3 outputs exist already" in ended[0][1]


@pytest.mark.parametrize("world_size", [2, 4])
def test_guidance_on_halves_equals_diffusers(world_size: int, folders: dict[str, Path], tmp_path: Path) -> None:
    """Dense and sparse, one call a step and two, a first step that both halves compute (Trap B93)."""
    cases = []
    for name in PIPELINES:
        for kind, mask in (("dense", ()), ("sparse", SPARSE)):
            output = tmp_path / f"{name}_{kind}"
            cases.append((name, kind, output, command(name, folders[name], output, *mask, "--cfg-parallel")))
    alone = {name: command(name, folders[name], tmp_path / f"{name}_alone", *SPARSE) for name in PIPELINES}
    _run(1, list(alone.values()))
    _run(world_size, [words for *_, words in cases])
    for name, kind, output, words in cases:
        (sparse,) = made(tmp_path / f"{name}_alone").values()
        want = _diffusers(name, folders[name]) if kind == "dense" else sparse
        (video,) = made(output).values()
        assert max_error(video, want) < ATOL, shlex.join(words)


def test_guidance_on_halves_of_groups_that_take_turns(folders: dict[str, Path], tmp_path: Path) -> None:
    """Four ranks: two prompts at a time, each branch on one rank; SIGTERM on one ends its group after the step."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red cat\na blue dog\nsnow\n")
    mesh = ("--sp.ulysses_degree", "1", "--sp.ring_degree", "1", "--compare-dense", *SPARSE)
    words = command("wan", folders["wan"], tmp_path / "out", *mesh)
    at = words.index("--prompt")
    words = [*words[:at], "--prompts", str(prompts), *words[at + 2 :]]
    ended = run_ranks(run_until, 4, [*words, "--cfg-parallel"], 2, timeout_s=120)
    assert [code for code, _ in ended] == [0] * 4, ended
    _run(4, [[*words, "--cfg-parallel"]])
    _run(1, [[*words, "--output", str(tmp_path / "alone")]])
    halves, alone = made(tmp_path / "out"), made(tmp_path / "alone")
    assert halves.keys() == alone.keys()
    assert len(halves) == 6
    for name, video in halves.items():
        assert max_error(video, alone[name]) < ATOL, name


def _one_sided(rank: int, world_size: int, words: list[str]) -> tuple[object, str]:
    return run_command(rank, world_size, [*words, "--height", "81"] if rank == 1 else words)


def test_a_mistake_on_one_rank_ends_all(folders: dict[str, Path], tmp_path: Path) -> None:
    ended = run_ranks(_one_sided, 2, command("wan", folders["wan"], tmp_path / "out"))
    assert [code for code, _ in ended] == [2, 2], ended
    assert "rank 1: generate.height must be a multiple of 16 for this pipeline, got 81; use 80 or 96" in ended[0][1]
    assert not (tmp_path / "out").exists()


def _full(rank: int, world_size: int, words: list[str]) -> tuple[object, str]:
    full = OSError(28, "No space left on device")
    with patch.object(diffusers_run, "write_settings", side_effect=full):
        return run_command(rank, world_size, words)


def test_an_overwrite_that_ends_halfway_does_not_pass_for_the_old_output(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """The old JSON file would vouch for the new video."""
    words = command("wan", folders["wan"], tmp_path / "out")
    _run(1, [words])
    ended = run_ranks(_full, 2, [*words, "--overwrite", "--guidance-scale", "5"])
    assert [code for code, _ in ended] == [1, 1], ended
    assert not list((tmp_path / "out").glob("*.json"))


def test_another_picture_of_the_same_name_is_another_setting(folders: dict[str, Path], tmp_path: Path) -> None:
    from PIL import Image

    words = command("wan i2v", folders["wan i2v"], tmp_path / "out")
    picture = tmp_path / "start.png"
    words[words.index("--image") + 1] = str(picture)
    Image.new("RGB", (50, 90), (9, 9, 9)).save(picture)
    _run(1, [words])
    Image.new("RGB", (50, 90), (9, 9, 200)).save(picture)
    code, printed = run_command(0, 1, words)
    assert code == 2
    assert "was made with other settings: image_digest was" in printed


def _unwritable(rank: int, world_size: int, words: list[str]) -> tuple[object, str]:
    full = OSError(28, "No space left on device")
    with patch.object(diffusers_run, "write_comparison", side_effect=full):
        return run_command(rank, world_size, words)


def test_a_full_disk_ends_all_ranks_and_leaves_no_whole_output(folders: dict[str, Path], tmp_path: Path) -> None:
    words = command("wan", folders["wan"], tmp_path / "out", *SPARSE, "--compare-dense")
    ended = run_ranks(_unwritable, 2, words)
    assert [code for code, _ in ended] == [1, 1], ended
    assert "No space left on device" in ended[0][1]
    assert not list((tmp_path / "out").glob("*.json"))
