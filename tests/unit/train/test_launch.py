"""Death, failure, stop requests and configuration errors of launched ranks, in real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dbsp_megatron.train.launch import same_start

SCRIPT = Path(__file__).with_name("launched_loop.py")
ROOT = Path(__file__).resolve().parents[3]


def _environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


def _torchrun(folder: Path, num_ranks: int, num_steps: int, **extra: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    command += [str(SCRIPT), str(folder), str(num_steps)]
    return subprocess.Popen(command, env=_environment(**extra), stderr=subprocess.PIPE, text=True)


def _wait_for(paths: list[Path], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline, f"{[path.name for path in paths if not path.exists()]} did not appear"
        time.sleep(0.05)


def test_killed_rank_is_named_by_the_others(tmp_path: Path) -> None:
    """`kill -9` of a rank: the launcher sends SIGTERM to the others, which still say who died before they end."""
    process = _torchrun(tmp_path, 3, 100_000)
    pids = [tmp_path / f"pid_{rank}" for rank in range(3)]
    _wait_for(pids)
    time.sleep(1)
    victim = int(pids[2].read_text())
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert process.returncode != 0
    message = f"rank 2 ({socket.gethostname()}, pid {victim}) stopped responding"
    assert errors.count(message) == 2, errors
    assert "resume with: the same command" in errors


def test_failed_rank_is_quoted_by_the_others(tmp_path: Path) -> None:
    """An exception on one rank ends the others, which repeat it instead of their lost connection."""
    process = _torchrun(tmp_path, 2, 100_000, FAIL_RANK="1")
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert f"rank 1 ({socket.gethostname()}, pid" in errors
    assert "failed: KeyError: 'a fault of one rank'" in errors


def test_clean_end_is_not_a_death(tmp_path: Path) -> None:
    process = _torchrun(tmp_path, 2, 3)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "stopped responding" not in errors


def test_configuration_error_is_one_line_and_code_2(tmp_path: Path) -> None:
    """The rank that found it is named; ranks that found nothing end too."""
    process = _torchrun(tmp_path, 2, 3, BAD_RANK="1")
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    lines = [line for line in errors.splitlines() if line.startswith("error:")]
    assert lines == ["error: rank 1: data.paths is bad here"]
    assert "exitcode  : 2" in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"])
def test_signal_to_one_rank_stops_all_of_them_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(2):
        extra = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, str(SCRIPT), str(tmp_path), "100000"]
        ranks.append(subprocess.Popen(command, env=_environment(**extra)))
    _wait_for([tmp_path / f"pid_{rank}" for rank in range(2)])
    time.sleep(0.5)
    ranks[1].send_signal(number)
    assert [process.wait(30) for process in ranks] == [0, 0]
    assert (tmp_path / "stopped_1").read_text() == number.name
    assert (tmp_path / "stopped_0").read_text() == "by another rank"


def test_ranks_with_other_settings_end_with_one_line(tmp_path: Path) -> None:
    """They would make other process groups and wait for one another; the setting is named, with both values."""
    process = _torchrun(tmp_path, 3, 3, OTHER_RANK="2")
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    lines = [line for line in errors.splitlines() if line.startswith("error:")]
    assert lines == [
        "error: sp.ring_degree must be equal on all ranks, got 2 on rank 2 and 1 on rank 0: start all of them with the "
        "same arguments and configuration files"
    ]
    assert "exitcode  : 2" in errors
    assert not list(tmp_path.glob("pid_*"))


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "8"}, "torchrun --nproc_per_node 8 -m x"),
        (
            {"TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "SLURM_PROCID": "0"},
            "torchrun --nnodes 2 --nproc_per_node 4 -m x on every node",
        ),
        ({"SLURM_PROCID": "3", "WORLD_SIZE": "8"}, "srun --ntasks 8 python -m x with"),
        ({"SLURM_PROCID": "3", "WORLD_SIZE": "8", "RUN_LIFE_DIR": "/runs/a/launch/logs/life_0"}, "launch/run.sh"),
        ({"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "8", "RUN_LIFE_DIR": "/runs/a"}, "launch/run.sh"),
        ({"WORLD_SIZE": "8"}, "python -m x on 8 processes"),
        ({}, "python -m x on 1 processes"),
    ],
    ids=str,
)
def test_same_start_names_what_started_the_ranks(environ: dict[str, str], words: str) -> None:
    """Advice to use torchrun is of no use in a job whose ranks srun started."""
    text = same_start("-m x", environ)
    assert words in text
    assert ("torchrun" in text) == words.startswith("torchrun")
