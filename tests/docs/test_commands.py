"""Every command of the documentation runs, in a folder like a fresh checkout, page by page."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dbsp_megatron.infer.video_file import write_mp4
from tests.docs.pages import ROOT, Block, blocks, commands, is_shell, pages
from tests.harness import run_ranks
from tests.pipeline_folders import missing_packages, save_pipeline

EXTERNAL = ("deepspeed", "sbatch", "scancel", "scontrol", "squeue", "tail", "tensorboard", "wandb")
OWN_PROCESSES = ("tools/doctor.py", "tools/fit_latency.py")
"""Tools that look at, or set up, the process they run in."""
SHORTER = {
    # A reader's training runs for minutes or days; two steps tell whether the command works.
    "dbsp_megatron.train": "--train.steps 2 --optim.warmup_steps 0 --train.check false --run.plots false "
    "--run.report false --data.max_clips_per_file 2 --wandb.mode disabled",
    "dbsp_megatron.infer": "--sample.steps 2",
}
"""Flags that a test adds to a command that would take long."""


def _workspace(folder: Path) -> Path:
    """A checkout as commands see it: they read the repository and write beside it."""
    for name in ("dbsp_megatron", "kernels", "launch", "tools", "model_configs", "requirements"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("Makefile", "pyproject.toml", "setup.py", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "my_clips").mkdir()
    ramp = torch.linspace(-1, 1, 48)
    frames = [torch.stack([ramp.roll(3 * shift + color) for color in range(3)])[:, None] for shift in range(24)]
    video = torch.stack([frame.expand(3, 40, 48) for frame in frames], dim=1)
    write_mp4(video, folder / "my_clips" / "a.mp4", 8)
    return folder


def _pipelines(page: Path) -> set[str]:
    """Folders of pipelines that a page's commands name."""
    words = [words for block in blocks(page) if is_shell(block) for words in commands(block)]
    return {line[line.index("--pipeline") + 1] for line in words if "--pipeline" in line}


def _add_pipelines(folder: Path, names: set[str]) -> None:
    """A tiny pipeline under each name, and a file of prompts."""
    missing = missing_packages()
    if missing is not None:
        pytest.skip(missing)
    for name in names:
        save_pipeline("wan", folder / name)
    (folder / "prompts.jsonl").write_text('a dog runs\n{"prompt": "a cat", "seed": 3, "name": "cat"}\n')


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "RUN_"))}
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(key, None)
    binaries = str(Path(sys.executable).parent)
    return {
        **kept,
        # As after activating the environment.
        "VIRTUAL_ENV": sys.prefix,
        "PATH": os.pathsep.join([binaries, kept.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
    }


@dataclass(frozen=True)
class Job:
    """What is run for one command line.

    Attributes:
        words: of a process, or the script (or `-m`, module) and its arguments.
        ranks: ranks that run it together, in processes that have imported torch already; 0 for a process of its own.
        parse: stop when the arguments are parsed.
    """

    words: tuple[str, ...]
    ranks: int = 0
    parse: bool = False


def _job(words: list[str], note: str) -> Job | None:
    """How a command line is run; None for what cannot be run here, which is checked otherwise."""
    while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):
        words = words[1:]
    program = words[0]
    if program == "make":
        return Job(("make", "--dry-run", *words[1:]))
    if program in ("pip", "cd", "export", ".", "source", "git", "cat", "ls"):
        _check_simple(words)
        return None
    if note.startswith("external"):
        assert program in EXTERNAL, f"{program} is not one of the programs that others provide: {EXTERNAL}"
        return None
    launcher, job = _split_launcher(words)
    if "launch/run.sh" in job[:2] or "./launch/run.sh" in job[:2]:
        flags = job[1 + (job[0] == "bash") :]
        return Job(("bash", "launch/run.sh", *([] if note == "run" else ["--dry-run"]), *flags))
    name = job[1] if job[0] == "-m" else job[0]
    if note == "parse" and job[0] == "-m":
        return Job((*job, "--dry-run", "--world-size", str(_processes(launcher))), ranks=1)
    if note == "parse":
        return Job(tuple(job), ranks=1, parse=True)
    if name in OWN_PROCESSES:
        return Job((*launcher, *job))
    quick = any(flag in job for flag in ("--dry-run", "--print-config", "--help"))
    return Job((*job, *([] if quick else shlex.split(SHORTER.get(name, "")))), ranks=_processes(launcher))


def _split_launcher(words: list[str]) -> tuple[list[str], list[str]]:
    """(`torchrun --flags` or `python`, script or `-m module` and its words)."""
    if words[0] in ("dbsp-train", "dbsp-infer"):
        return [sys.executable], ["-m", f"dbsp_megatron.{words[0].removeprefix('dbsp-')}", *words[1:]]
    if words[0] not in ("python", "torchrun"):
        return [], words
    for index, word in enumerate(words[1:], start=1):
        if word == "-m" or word.endswith(".py"):
            return words[:index], words[index:]
    raise AssertionError(f"no script in {shlex.join(words)}")


def _processes(launcher: list[str]) -> int:
    count = 1
    for flag in ("--nproc_per_node", "--nproc-per-node", "--nnodes"):
        for index, word in enumerate(launcher):
            if word == flag:
                count *= int(launcher[index + 1])
            elif word.startswith(f"{flag}="):
                count *= int(word.partition("=")[2])
    return count


def _check_simple(words: list[str]) -> None:
    """`pip install 'dbsp-megatron[extra]'` names an extra that exists."""
    for extra in re.findall(r"\[([\w,]+)\]", " ".join(words)):
        known = importlib.metadata.metadata("dbsp-megatron").get_all("Provides-Extra") or []
        assert set(extra.split(",")) <= set(known), f"{words}: extras are {known}"


def _on_rank(rank: int, world_size: int, words: tuple[str, ...], folder: str, parse: bool) -> str:
    """Run a script or module as `__main__`; what it printed, if it failed."""
    os.chdir(folder)
    sys.argv = list(words[1:] if words[0] == "-m" else words)
    parse_args = argparse.ArgumentParser.parse_args
    if parse:
        argparse.ArgumentParser.parse_args = _parse_and_stop  # type: ignore[assignment, method-assign]
    before, printed = dict(os.environ), io.StringIO()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            if words[0] == "-m":
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
        code: object = "it ended without parsing its arguments" if parse else 0
    except SystemExit as end:
        code = end.code or 0
    except _ParsedError:
        code = 0
    finally:
        argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign]
        os.environ.clear()
        os.environ.update(before)
    return "" if code == 0 else f"{printed.getvalue()[-4000:]}\nended with {code}"


class _ParsedError(Exception):
    """The arguments were parsed."""


def _parse_and_stop(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
    _, unknown = self.parse_known_args(args, namespace)
    if unknown:
        self.error(f"unrecognized arguments: {' '.join(unknown)}")
    raise _ParsedError


def _run(block: Block, job: Job, folder: Path) -> None:
    if job.ranks:
        printed = "\n".join(
            filter(None, run_ranks(_on_rank, job.ranks, job.words, str(folder), job.parse, timeout_s=200))
        )
    else:
        done = subprocess.run(
            job.words, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=400, check=False
        )
        text = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}\nended with {done.returncode}"
        printed = text if done.returncode else ""
    assert not printed, f"{block.where}: {shlex.join(job.words)}\n{printed}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_run(page: Path, tmp_path: Path) -> None:
    """In the order of the page, so that a command may use what one above it made."""
    folder = _workspace(tmp_path)
    if names := _pipelines(page):
        _add_pipelines(folder, names)
    for block in blocks(page):
        if is_shell(block):
            for words in commands(block):
                job = _job(words, block.note)
                if job is not None:
                    started = time.perf_counter()
                    _run(block, job, folder)
                    print(f"{block.where} {time.perf_counter() - started:.1f} s: {shlex.join(words)}")


def test_a_wrong_command_is_found(tmp_path: Path) -> None:
    """The test above would pass on a page whose commands nobody sees, or whose failures nobody reads."""
    lines = ["python tools/plot_metrics.py runs/x \\", "    --no-such-flag 1  # a comment"]
    block = Block("page.md", 2, "bash", "parse", "\n".join(lines) + "\n")
    (words,) = commands(block)
    assert words == ["python", "tools/plot_metrics.py", "runs/x", "--no-such-flag", "1"]
    folder = _workspace(tmp_path)
    for note in ("parse", "run"):
        job = _job(words, note)
        assert job is not None
        with pytest.raises(AssertionError, match=r"(?s)page.md:2.*unrecognized arguments: --no-such-flag"):
            _run(block, job, folder)
    good = _job(words[:3], "parse")
    assert good is not None
    _run(block, good, folder)
    missing = _job(["python", "tools/plot_metrics.py", "runs/x"], "run")
    assert missing is not None
    with pytest.raises(AssertionError, match="ended with"):
        _run(block, missing, folder)
