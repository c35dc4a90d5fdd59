"""run.sh refuses what cannot work, in one line and before sbatch, and shows what it would do without doing it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.launch.cluster import HERE, ROOT, clean_environment, run_script

STAND_IN = str(HERE / "stand_in.py")
BASE = ("--slurm", "--procs-per-node", "2", "--name", "run", "--python", STAND_IN)
TRAIN = ("--", "--config", "tiny.yaml")


@pytest.fixture
def sbatch(tmp_path: Path) -> dict[str, str]:
    """Environment with an sbatch that only notes its arguments, in the file `called`."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sbatch").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >>{tmp_path}/called\necho 4711\n')
    (tools / "squeue").write_text("#!/bin/sh\necho RUNNING\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    return clean_environment(PATH=f"{tools}:{os.environ['PATH']}")


REFUSED = {
    "no place": (("--procs-per-node", "2", "--name", "a", *TRAIN), "--slurm or --local must be given"),
    "nodes": ((*BASE, "--nodes", "two", *TRAIN), "--nodes must be a whole number >= 1, got 'two'"),
    "octal": ((*BASE, "--nodes", "08", *TRAIN), "--nodes must be a whole number >= 1, got '08'"),
    "no processes": (("--local", "--name", "a", *TRAIN), "--gpus-per-node must be given"),
    "two counts": ((*BASE, "--gpus-per-node", "4", *TRAIN), "--procs-per-node must equal --gpus-per-node 4"),
    "launcher": ((*BASE, "--launcher", "mpirun", *TRAIN), "--launcher must be one of: torchrun srun deepspeed"),
    "c10d": ((*BASE, "--launcher", "srun", "--rdzv", "c10d", *TRAIN), "--rdzv must be static with --launcher srun"),
    "restarts": ((*BASE, "--max-restarts", "1", *TRAIN), "--max-restarts must be 0 with --rdzv static"),
    "time": ((*BASE, "--time", "4h", *TRAIN), "--time must be MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS, got '4h'"),
    "late": ((*BASE, "--time", "0:02:30", *TRAIN), "--signal-before must be below --time 0:02:30 (150 s), got 180"),
    "array": ((*BASE, "--array", "1..3", "--", "{task}"), "--array must be task numbers such as 0-3"),
    "array backwards": ((*BASE, "--array", "3-1", "--", "{task}"), "--array must go upwards"),
    "array too long": ((*BASE, "--array", "0-5000", "--", "{task}"), "--array must span at most 1000"),
    "switch with a value": ((*BASE, "--no-preflight=1", *TRAIN), "--no-preflight must stand alone"),
    "same tasks": ((*BASE, "--array", "0-3", *TRAIN), "--array must have {task} in the arguments of training"),
    "mounts": ((*BASE, "--mounts", "/a:/a", *TRAIN), "--mounts must come with --container"),
    "container": (("--local", "--container", "i", *BASE[1:], *TRAIN), "--container must not be given with --local"),
    "secret": ((*BASE, "--env", "WANDB_API_KEY=12345", *TRAIN), "--env must hold no secret, got WANDB_API_KEY"),
    "secret word": ((*BASE, "--", "--wandb.api_key", "12345"), "arguments of training must hold no secret"),
    "rank": ((*BASE, "--env", "MASTER_ADDR=localhost", *TRAIN), "--env must leave MASTER_ADDR to the launcher"),
    "unset": ((*BASE, "--pass-env", "NOT_SET_HERE", *TRAIN), "--pass-env must name a variable that is set here"),
    "unknown": ((*BASE, "--node", "2", *TRAIN), "--node is not an option of run.sh"),
    "no value": (("--slurm", "--nodes"), "--nodes must have a value, got none"),
    "loose word": ((*BASE, "tiny.yaml"), "arguments of training must stand behind --, got 'tiny.yaml'"),
    "no training": (BASE, "arguments of training must stand behind --, got none"),
    "name twice": ((*BASE, "--", "--run.name", "b"), "--run.name must be given to run.sh"),
    "name": ((*BASE, "--name", "a b", *TRAIN), "the run folder must consist of letters"),
    "path": ((*BASE, "--name", "../x", *TRAIN), "--name must be one folder name, got '../x'"),
    "python": ((*BASE, "--python", "/none/python", *TRAIN), "--python must be an interpreter, got '/none/python'"),
    "site": ((*BASE, "--site", "none.env", *TRAIN), "--site must be a readable file, got 'none.env'"),
    "calibration": ((*BASE, "--calibrate", "--", "--sp.calibration", "c"), "--sp.calibration must not be given"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_options_are_one_line_and_reach_no_sbatch(tmp_path: Path, sbatch: dict[str, str], case: str) -> None:
    words, message = REFUSED[case]
    done = run_script(*words, cwd=tmp_path, env=sbatch)
    assert done.returncode == 2, done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"error: {message}")
    assert "12345" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("NODES 2", "site.env:1 must be NAME=value or a # comment"),
        ("# why\nRUN_NODE=2", "RUN_NODE is not an option of run.sh"),
        ("RUN_NODES=0", "RUN_NODES must be a whole number >= 1, got '0'"),
        ("HF_TOKEN=12345", "site site.env:1 must hold no secret, got HF_TOKEN"),
    ],
)
def test_a_wrong_site_file_is_named(tmp_path: Path, sbatch: dict[str, str], text: str, message: str) -> None:
    (tmp_path / "site.env").write_text(text)
    done = run_script(*BASE, "--site", "site.env", *TRAIN, cwd=tmp_path, env=sbatch)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}"), done.stderr
    assert not (tmp_path / "called").exists()


def test_a_mesh_that_does_not_fit_is_refused_by_the_trainer(tmp_path: Path, sbatch: dict[str, str]) -> None:
    words = ("--slurm", "--procs-per-node", "3", "--name", "run", "--python", sys.executable)
    keys = ("--data", "demo", "--ulysses-degree", "2", "--ring-degree", "2")
    done = run_script(*words, "--", *keys, cwd=tmp_path, env=sbatch)
    assert done.returncode == 2
    assert done.stderr.startswith("error: sp.ulysses_degree * sp.ring_degree = 4 must divide the number of processes 3")
    assert not (tmp_path / "called").exists()


def test_submit_passes_names_but_no_values_of_secrets(tmp_path: Path, sbatch: dict[str, str]) -> None:
    words = ("--pass-env", "WANDB_API_KEY", "--sbatch=--comment=a b", "--cpus-per-proc", "4", "--partition", "long")
    done = run_script(*BASE, *words, *TRAIN, cwd=tmp_path, env=sbatch | {"WANDB_API_KEY": "k-12345"})
    assert done.returncode == 0, done.stderr
    called = (tmp_path / "called").read_text().splitlines()
    assert called[-2:] == [str(ROOT / "launch" / "job.sbatch"), str(tmp_path / "runs/run/launch/launch.env")]
    for word in ("--export=WANDB_API_KEY", "--comment=a b", "--cpus-per-task=8", "--partition=long", "--requeue"):
        assert word in called
    folder = tmp_path / "runs" / "run" / "launch"
    assert (folder / "job_id").read_text() == "4711\n"
    assert shlex.split((folder / "sbatch.txt").read_text())[1:] == called
    assert "k-12345" not in done.stdout + "".join(path.read_text() for path in folder.iterdir() if path.is_file())
    again = run_script(*BASE, *TRAIN, cwd=tmp_path, env=sbatch)
    assert again.stderr.startswith("error: --name must be a run that is not in the queue, got run with job 4711")


def test_site_file_gives_way_to_flags(tmp_path: Path, sbatch: dict[str, str]) -> None:
    (tmp_path / "site.env").write_text(
        "# a cluster\nRUN_NODES=8\nRUN_PARTITION=site\nNCCL_IB_HCA=mlx5\nNCCL_DEBUG=INFO\n"
    )
    words = ("--partition", "mine", "--env", "NCCL_DEBUG=WARN", "--site", "site.env")
    done = run_script(*BASE, *words, *TRAIN, cwd=tmp_path, env=sbatch)
    assert done.returncode == 0, done.stderr
    called = (tmp_path / "called").read_text()
    assert "--nodes=8\n" in called
    assert "--partition=mine\n" in called
    text = (tmp_path / "runs" / "run" / "launch" / "launch.env").read_text()
    assert "NCCL_IB_HCA=mlx5\n" in text
    assert "NCCL_DEBUG=WARN\n" in text


def test_container_mounts_what_the_job_needs(tmp_path: Path, sbatch: dict[str, str]) -> None:
    words = ("--slurm", "--gpus-per-node", "8", "--name", "run", "--container", "nvcr.io#nvidia/pytorch:25.09-py3")
    done = run_script(*words, "--mounts", "/data:/data:ro", "--no-preflight", *TRAIN, cwd=tmp_path, env=sbatch)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "runs" / "run" / "launch" / "launch.env").read_text()
    mounts = next(line for line in text.splitlines() if line.startswith("RUN_MOUNTS="))
    for path in (ROOT, tmp_path, tmp_path / "runs" / "run"):
        assert f"{path}:{path}" in mounts
    assert "/data:/data:ro" in mounts
    assert "RUN_PYTHON=python3\n" in text


def _shown(tmp_path: Path, sbatch: dict[str, str], *words: str) -> str:
    done = run_script(*BASE, "--dry-run", *words, cwd=tmp_path, env=sbatch | {"WANDB_API_KEY": "k-12345"})
    assert done.returncode == 0, done.stderr
    assert "k-12345" not in done.stdout + done.stderr
    text = done.stdout
    for path, name in ((STAND_IN, "PYTHON"), (tmp_path, "HERE"), (ROOT / "launch", "LAUNCH"), (ROOT, "ROOT")):
        text = text.replace(str(path), name)
    return text


def test_dry_run_shows_everything_and_does_nothing(tmp_path: Path, sbatch: dict[str, str]) -> None:
    """Against dry_run.txt; after a wanted change write the new text there."""
    (tmp_path / "site.env").write_text("NCCL_SOCKET_IFNAME=eth0\nRUN_ACCOUNT=lab\n")
    (tmp_path / "runs" / "run" / "checkpoints" / "step_00000020").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    words = ("--nodes", "2", "--site", "site.env", "--time", "4:00:00", "--calibrate", "--pass-env", "WANDB_API_KEY")
    shown = _shown(tmp_path, sbatch, *words, "--env", "NCCL_DEBUG=WARN", *TRAIN)
    after = sorted(path for path in tmp_path.rglob("*") if path.name != "called")
    assert after == before
    assert (tmp_path / "called").read_text().splitlines().count("--test-only") == 1
    described, _, script = shown.partition("== batch script\n")
    assert script == (ROOT / "launch" / "job.sbatch").read_text() + "nothing was written or started\n"
    assert described == (HERE / "dry_run.txt").read_text()


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        (("torchrun", "--rdzv", "c10d", "--max-restarts", "2"), "--rdzv-endpoint $MASTER_ADDR:$MASTER_PORT"),
        (("srun",), "train: bash LAUNCH/worker.sh HERE/runs/run/launch/launch.env train rank\n"),
        (("deepspeed",), "--hostfile HERE/runs/run/launch/logs/life_$LIFE/hostfile.train --no_ssh"),
    ],
)  # fmt: skip
def test_dry_run_shows_each_launcher(
    tmp_path: Path, sbatch: dict[str, str], launcher: tuple[str, ...], expected: str
) -> None:
    shown = _shown(tmp_path, sbatch, "--launcher", *launcher, *TRAIN)
    assert expected in shown
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in shown) == ("--max-restarts" in launcher)


def test_dry_run_checks_each_task_of_an_array(tmp_path: Path, sbatch: dict[str, str]) -> None:
    shown = _shown(tmp_path, sbatch, "--array", "0-4:2,9%2", "--", "--config", "{task}.yaml")
    checked = [line for line in shown.splitlines() if line.startswith("checked:")]
    assert [line.split()[2] for line in checked] == ["0.yaml", "2.yaml", "4.yaml", "9.yaml"]
    assert "run folder    HERE/runs/run/run-TASK for each task" in shown


@pytest.mark.parametrize("site", sorted(path.name for path in (ROOT / "launch" / "sites").glob("*.env")))
def test_every_site_file_is_accepted(tmp_path: Path, sbatch: dict[str, str], site: str) -> None:
    words = ("--slurm", "--gpus-per-node", "2", "--name", "run", "--python", STAND_IN)
    done = run_script(
        *words, "--dry-run", "--site", str(ROOT / "launch" / "sites" / site), *TRAIN, cwd=tmp_path, env=sbatch
    )
    assert done.returncode == 0, done.stderr
