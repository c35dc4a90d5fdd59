"""run.sh --local: the scripts of the Slurm job on this machine, and the verdict on every kind of end."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launch.cluster import HERE, RUN, clean_environment, run_script, wait_until

STAND_IN = str(HERE / "stand_in.py")
OPTIONS = ("--local", "--procs-per-node", "2", "--launcher", "srun", "--name", "run", "--python", STAND_IN)


def _run(cwd: Path, *words: str, steps: int = 3, act: str = "train") -> subprocess.CompletedProcess[str]:
    return run_script(*OPTIONS, *words, "--", "--steps", str(steps), "--act", act, cwd=cwd)


@contextmanager
def _started(cwd: Path, *words: str, steps: int = 100, act: str = "train") -> Iterator[subprocess.Popen[str]]:
    """run.sh in a session of its own, with its first step behind it."""
    with subprocess.Popen(
        ["bash", str(RUN), *OPTIONS, *words, "--", "--steps", str(steps), "--act", act],
        cwd=cwd,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        log = cwd / "runs" / "run" / "launch" / "logs" / "life_0" / "rank_00001.log"
        wait_until(lambda: log.exists() and "start" in log.read_text(), 60, lambda: "no first step")
        yield process


def _outcomes(cwd: Path, name: str = "run") -> list[str]:
    logs = cwd / "runs" / name / "launch" / "logs"
    return [(logs / f"life_{life}" / "outcome").read_text().strip() for life in range(len(list(logs.glob("life_*"))))]


def _environments(cwd: Path, count: int) -> list[dict[str, str]]:
    return [json.loads((cwd / "runs" / "run" / f"env.{rank}").read_text()) for rank in range(count)]


def test_local_starts_every_rank_of_every_node(tmp_path: Path) -> None:
    done = _run(tmp_path, "--nodes", "3", "--env", "NCCL_DEBUG=WARN", "--setup", "export FROM_SETUP=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "start at step 0" in done.stdout  # rank 0 is shown
    for rank, environ in enumerate(_environments(tmp_path, 6)):
        expected = {
            "RANK": rank,
            "WORLD_SIZE": 6,
            "LOCAL_RANK": rank % 2,
            "LOCAL_WORLD_SIZE": 2,
            "NODE_RANK": rank // 2,
        }
        assert {name: int(environ[name]) for name in expected} == expected
        assert (environ["MASTER_ADDR"], environ["NCCL_DEBUG"], environ["FROM_SETUP"]) == ("127.0.0.1", "WARN", "1")
    assert _outcomes(tmp_path) == ["done 0"]


def test_local_gives_each_node_its_own_gpus(tmp_path: Path) -> None:
    options = ("--local", "--nodes", "2", "--gpus-per-node", "2", *OPTIONS[3:])
    done = run_script(
        *options, "--", "--steps", "1", cwd=tmp_path, env=clean_environment(CUDA_VISIBLE_DEVICES="4,5,6,7")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [environ["CUDA_VISIBLE_DEVICES"] for environ in _environments(tmp_path, 4)]
    assert seen == ["4,5", "4,5", "6,7", "6,7"]


def test_usr1_goes_on_in_a_second_life(tmp_path: Path) -> None:
    with _started(tmp_path) as process:
        process.send_signal(signal.SIGUSR1)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    assert _outcomes(tmp_path) == ["requeue 75", "done 0"]
    log = (tmp_path / "runs" / "run" / "launch" / "logs" / "life_1" / "rank_00000.log").read_text()
    assert log.startswith("start at step ")
    assert not log.startswith("start at step 0\n")


def test_restarts_end_at_the_cap(tmp_path: Path) -> None:
    with _started(tmp_path, "--max-requeues", "0") as process:
        process.send_signal(signal.SIGUSR1)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 75, text
    assert _outcomes(tmp_path) == ["stopped 75"]


def test_a_life_without_a_new_checkpoint_is_the_last(tmp_path: Path) -> None:
    """A job that cannot get one step done in its time would come back for ever."""
    with _started(tmp_path, act="forgetful") as process:
        process.send_signal(signal.SIGUSR1)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 75, text
    assert "no new checkpoint in this life" in text
    assert _outcomes(tmp_path) == ["failed 75"]


def test_ctrl_c_saves_and_ends(tmp_path: Path) -> None:
    with _started(tmp_path) as process:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert _outcomes(tmp_path) == ["stopped 75"]
    assert len(list((tmp_path / "runs" / "run" / "checkpoints").iterdir())) == 1


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    with _started(tmp_path, steps=100_000, act="deaf") as process:
        os.killpg(process.pid, signal.SIGINT)
        stop = tmp_path / "runs" / "run" / "launch" / "stop.0"
        wait_until(stop.exists, 30, lambda: "no stop file")
        os.killpg(process.pid, signal.SIGINT)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert _outcomes(tmp_path) == ["stopped 143"]


def test_a_failed_rank_ends_the_others_and_is_shown(tmp_path: Path) -> None:
    done = _run(tmp_path, steps=100_000, act="fail")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "life_0/rank_00001.log" in done.stdout
    assert "  | ValueError: rank 1 cannot go on" in done.stdout
    assert _outcomes(tmp_path) == ["failed 3"]


@pytest.mark.parametrize(("act", "code"), [("killed-after", 0), ("fail-after", 3)])
def test_success_is_what_the_done_marker_says(tmp_path: Path, act: str, code: int) -> None:
    """A launcher killed after the work was done has not failed; a check that failed after it has."""
    done = _run(tmp_path, act=act)
    assert done.returncode == code, done.stdout + done.stderr
    assert _outcomes(tmp_path) == [f"done {code}"]


def test_the_done_marker_of_an_earlier_end_does_not_count(tmp_path: Path) -> None:
    assert _run(tmp_path).returncode == 0
    done = _run(tmp_path, act="fail", steps=100_000)
    assert done.returncode == 3, done.stdout
    assert _outcomes(tmp_path) == ["done 0", "failed 3"]


def test_a_requeued_run_that_is_done_starts_nothing(tmp_path: Path) -> None:
    """The node may die between the last step and the end of the job; Slurm then requeues it."""
    assert _run(tmp_path).returncode == 0
    file = tmp_path / "runs" / "run" / "launch" / "launch.env"
    script = f"RUN_ENV_FILE={file}; source {file}; source $RUN_LAUNCH/life.sh; resolve_task; begin_life 1; exit 9"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "launch: the run is done already\n")
    assert _outcomes(tmp_path) == ["done 0"]
    assert (tmp_path / "runs" / "run" / "done.json").exists()


def test_array_runs_its_tasks_in_turn(tmp_path: Path) -> None:
    options = (*OPTIONS, "--array", "1-3:2,7%2", "--", "--steps", "{task}")
    done = run_script(*options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = tmp_path / "runs" / "run"
    assert sorted(path.parent.name for path in runs.glob("*/done.json")) == ["run-1", "run-3", "run-7"]
    assert "--steps 7 " in json.loads((runs / "run-7" / "env.1").read_text())["argv"]


def test_calibrate_measures_on_all_nodes_and_trains_with_it(tmp_path: Path) -> None:
    done = _run(tmp_path, "--nodes", "2", "--calibrate", "--calibrate-with", "--quick --block 5")
    assert done.returncode == 0, done.stdout + done.stderr
    file = tmp_path / "runs" / "run" / "calibration.json"
    assert file.read_text() == "measured by 4\n"
    log = file.parent / "launch" / "logs" / "life_0" / "calibrate_rank_00001.log"
    assert log.read_text() == "measured with --quick --block 5 -- --steps 3 --act train\n"
    assert f"--sp.calibration {file}" in _environments(tmp_path, 4)[3]["argv"]


@contextmanager
def _measuring(cwd: Path, lives: int) -> Iterator[subprocess.Popen[str]]:
    """run.sh while its first life measures, which takes longer than anybody waits for it in so many lives."""
    words = ["bash", str(RUN), *OPTIONS, "--calibrate", "--", "--steps", "3", *["--act", "slow"] * lives]
    with subprocess.Popen(
        words,
        cwd=cwd,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        _wait_for_measuring(cwd, 0)
        yield process


def _wait_for_measuring(cwd: Path, life: int) -> None:
    wait_until((cwd / "runs" / "run" / "slow_lives" / str(life)).exists, 60, lambda: "nothing is measured")


def test_usr1_while_measuring_goes_on_in_a_second_life(tmp_path: Path) -> None:
    """A pre-emption may come before training begins: nothing is lost by coming back."""
    with _measuring(tmp_path, 1) as process:
        process.send_signal(signal.SIGUSR1)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    assert _outcomes(tmp_path) == ["requeue 75", "done 0"]
    assert "start at step 0" in text


def test_two_lives_that_measure_nothing_are_enough(tmp_path: Path) -> None:
    """Measuring that never fits into the time of a job would come back for ever."""
    with _measuring(tmp_path, 2) as process:
        process.send_signal(signal.SIGUSR1)
        _wait_for_measuring(tmp_path, 1)
        process.send_signal(signal.SIGUSR1)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 75, text
    assert "two lives in a row ended before kernels and links were measured" in text
    assert _outcomes(tmp_path) == ["requeue 75", "failed 75"]


def test_ctrl_c_while_measuring_ends(tmp_path: Path) -> None:
    with _measuring(tmp_path, 1) as process:
        os.killpg(process.pid, signal.SIGINT)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert _outcomes(tmp_path) == ["stopped 75"]
    assert not (tmp_path / "runs" / "run" / "env.0").exists()


def test_a_calibration_counts_as_progress_of_a_life(tmp_path: Path) -> None:
    """What was measured is kept, so that the next life has more time for its first step."""
    with _started(tmp_path, "--calibrate", act="forgetful") as process:
        process.send_signal(signal.SIGUSR1)
        log = tmp_path / "runs" / "run" / "launch" / "logs" / "life_1" / "rank_00001.log"
        wait_until(lambda: log.exists() and "start" in log.read_text(), 60, lambda: "no second life")
        # Measures nothing new.
        process.send_signal(signal.SIGUSR1)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 75, text
    assert "no new checkpoint in this life" in text
    assert _outcomes(tmp_path) == ["requeue 75", "failed 75"]


def test_an_old_done_marker_says_nothing(tmp_path: Path) -> None:
    """It stays until the trainer goes on, and a start that fails is not taken for the finished run that it was."""
    assert _run(tmp_path).returncode == 0
    again = _run(tmp_path, steps=100_000, act="fail")
    assert again.returncode == 3, again.stdout + again.stderr
    assert (tmp_path / "runs" / "run" / "done.json").exists()
    assert _outcomes(tmp_path) == ["done 0", "failed 3"]


def test_a_run_has_one_launcher(tmp_path: Path) -> None:
    (tmp_path / "runs" / "run" / "launch").mkdir(parents=True)
    with (tmp_path / "runs" / "run" / "launch" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused = _run(tmp_path)
    assert refused.returncode == 2
    assert "must be a run that is not going on" in refused.stderr
    assert _run(tmp_path).returncode == 0


def test_what_a_rank_says_is_shown_without_secrets(tmp_path: Path) -> None:
    words = ["bash", "-c", f"source {RUN.parent}/masked.sh; masked"]
    text = "token=abc1 my_api_key: abc2 https://me:abc3@host/x --run.note=passwd=abc4 keyboard tokens 12"
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=True)
    assert "abc" not in done.stdout
    assert done.stdout.endswith("keyboard tokens 12")
