"""Jobs on a real Slurm: every launcher to the end, requeueing, cancelling, a dead node, an array, what the job sees."""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import sys
from pathlib import Path

import pytest

from tests.launch.cluster import Cluster, losses, run_script, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

MESH = ("--", "--config", "tiny.yaml", "--ulysses-degree", "2", "--ring-degree", "2")
TWO_BY_TWO = ("--nodes", "2", "--procs-per-node", "2", "--time", "20")


@pytest.fixture(scope="module")
def reference(slurm: Cluster, work: Path) -> dict[int, float]:
    """Losses of a run that nothing interrupted, by the srun launcher."""
    job = slurm.submit(work, *TWO_BY_TWO, "--name", "whole", "--launcher", "srun", *MESH)
    _check_completed(slurm, job, work / "runs" / "whole")
    return losses(work / "runs" / "whole")


def _check_completed(slurm: Cluster, job: str, run: Path, restarts: str = "0", steps: int = 12) -> str:
    """Text of the job's log."""
    fact = slurm.wait(job)[0]
    log = Path(fact["StdOut"]).read_text()
    assert (fact["JobState"], fact["ExitCode"]) == ("COMPLETED", "0:0"), log
    assert fact["Restarts"] == restarts, log
    assert json.loads((run / "done.json").read_text()) == {"step": steps}
    return log


def _life(run: Path, number: int) -> Path:
    return run / "launch" / "logs" / f"life_{number}"


@pytest.mark.parametrize(
    ("launcher", "procs"),
    [(("srun",), 2), (("torchrun",), 2), (("torchrun", "--rdzv", "c10d"), 1), (("deepspeed",), 1)],
    ids=["srun", "torchrun-static", "torchrun-c10d", "deepspeed"],
)
def test_launcher_trains_on_two_nodes(
    slurm: Cluster, work: Path, reference: dict[int, float], launcher: tuple[str, ...], procs: int
) -> None:
    """Trap B115: rank 0 need not be where the rendezvous is; nodes have networks of their own, so localhost fails."""
    if launcher == ("deepspeed",) and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs the deepspeed extra: pip install 'dbsp-megatron[deepspeed]'")
    run = work / "runs" / "whole"
    if launcher != ("srun",):
        run = work / "runs" / "-".join(word.strip("-") for word in launcher)
        words = ("--nodes", "2", "--procs-per-node", str(procs), "--time", "20", "--name", run.name)
        mesh = MESH if procs == 2 else (*MESH[:-1], "1")
        job = slurm.submit(work, *words, "--launcher", *launcher, *mesh)
        log = _check_completed(slurm, job, run)
        assert "train 12/12" in log  # rank 0 is to be read in the job's log
        assert f"rendezvous at node1:{20000 + int(job)}" in log
    assert len(reference) == 12
    assert losses(run) == pytest.approx(reference, rel=1e-6 if procs == 2 else 1e-5)
    logs = sorted(path.name for path in _life(run, 0).glob("rank_*.log"))
    assert logs == [f"rank_{rank:05d}.log" for rank in range(2 * procs)]
    assert (_life(run, 0) / "outcome").read_text() == "done 0\n"
    assert (run / "launch" / "launch.env").stat().st_mode & 0o777 == 0o600


def test_usr1_requeues_and_the_run_ends_as_if_uninterrupted(
    slurm: Cluster, work: Path, reference: dict[int, float]
) -> None:
    """The signal comes while ranks still import: sent to them, it would kill them; the stop file waits."""
    run = work / "runs" / "requeued"
    job = slurm.submit(work, *TWO_BY_TWO, "--name", run.name, *MESH)
    wait_until((_life(run, 0) / "rank_00001.log").exists, 200, lambda: slurm.tell(job))
    slurm.ask("scancel", "--batch", "--signal=USR1", job)
    log = _check_completed(slurm, job, run, restarts="1")
    assert (_life(run, 0) / "outcome").read_text() == "requeue 75\n"
    assert "restart 1 of at most 20, from step_000000" in log
    assert losses(run) == pytest.approx(reference, rel=1e-6)


def test_usr1_while_measuring_requeues(slurm: Cluster, work: Path) -> None:
    """The batch script alone is signalled: it ends what measures, which looks for no stop file."""
    run = work / "runs" / "measured"
    words = ("--nodes", "2", "--procs-per-node", "1", "--launcher", "srun", "--name", run.name, "--time", "20")
    stand_in = str(Path(__file__).with_name("stand_in.py"))
    job = slurm.submit(work, *words, "--python", stand_in, "--calibrate", "--", "--steps", "3", "--act", "slow")
    wait_until((run / "slow_lives" / "0").exists, 100, lambda: slurm.tell(job))
    slurm.ask("scancel", "--batch", "--signal=USR1", job)
    fact = slurm.wait(job, 140)[0]
    log = Path(fact["StdOut"]).read_text()
    assert (fact["JobState"], fact["ExitCode"], fact["Restarts"]) == ("COMPLETED", "0:0", "1"), log
    assert [(_life(run, life) / "outcome").read_text() for life in (0, 1)] == ["requeue 75\n", "done 0\n"]
    assert (run / "calibration.json").read_text() == "measured by 2\n"


def test_cancelled_job_stays_cancelled(slurm: Cluster, work: Path) -> None:
    """Slurm tells a batch script of scancel as it tells it of a requeue: by SIGTERM."""
    run = work / "runs" / "cancelled"
    words = ("--nodes", "2", "--procs-per-node", "1", "--launcher", "srun", "--name", run.name, "--time", "20")
    job = slurm.submit(work, *words, "--", "--config", "tiny.yaml", "--steps", "100000")
    slurm.wait_for_steps(job, run, 2)
    slurm.ask("scancel", job)
    fact = slurm.wait(job)[0]
    assert (fact["JobState"], fact["Restarts"]) == ("CANCELLED", "0")
    assert not (run / "done.json").exists()
    assert list((run / "checkpoints").glob("step_*")), "the ranks were told too, and had time to save"
    wait_until(lambda: (_life(run, 0) / "outcome").exists(), 20, lambda: "no outcome")
    assert (_life(run, 0) / "outcome").read_text().startswith("stopped ")


def test_dead_node_is_replaced_and_the_run_goes_on(slurm: Cluster, work: Path) -> None:
    run = work / "runs" / "dead"
    words = ("--nodes", "2", "--procs-per-node", "1", "--launcher", "srun", "--name", run.name, "--time", "20")
    keys = ("--train.checkpoint_every", "2", "--train.keep_last", "20", "--steps", "30")
    job = slurm.submit(work, *words, "--", "--config", "tiny.yaml", *keys)
    slurm.wait_for_steps(job, run, 5)
    try:
        slurm.kill_node("node2")
        log = _check_completed(slurm, job, run, restarts="1", steps=30)
    finally:
        slurm.up()
    assert "on node1 node2, rendezvous" in log
    assert "on node1 node3, rendezvous" in log
    assert sorted(losses(run)) == list(range(1, 31))


def test_array_trains_three_configurations(slurm: Cluster, work: Path) -> None:
    for task, rate in ((1, 0.001), (2, 0.002), (4, 0.004)):
        text = (work / "tiny.yaml").read_text().replace("lr: 0.003", f"lr: {rate}")
        (work / f"sweep_{task}.yaml").write_text(text)
    words = ("--procs-per-node", "1", "--name", "sweep", "--array", "1-2,4%3", "--launcher", "srun")
    job = slurm.submit(work, *words, "--", "--config", "sweep_{task}.yaml", "--steps", "4")
    facts = slurm.wait(job)
    assert [fact["JobState"] for fact in facts] == ["COMPLETED"] * 3
    last = {}
    for task in (1, 2, 4):
        run = work / "runs" / "sweep" / f"sweep-{task}"
        assert (run / "done.json").exists()
        assert f"lr: 0.00{task}" in (run / "config.yaml").read_text()
        last[task] = losses(run)[4]
    assert len(set(last.values())) == 3


@pytest.mark.parametrize("passed", [(), ("--pass-env", "MY_TOKEN")], ids=["nothing", "one-name"])
def test_job_sees_what_it_was_given_and_nothing_else(slurm: Cluster, work: Path, passed: tuple[str, ...]) -> None:
    """With sbatch --export=ALL every secret of the submitting shell would be in the job; with NONE alone srun fails."""
    show = work / "show.sh"
    # One rank fails, after the other has ended: of two that do, srun ends the later one, with a code of its own.
    show.write_text(
        '#!/usr/bin/env bash\nenv >"$SEEN/env.$SLURM_PROCID"\nif [[ $SLURM_PROCID == 1 ]]; then exit 0; fi\n'
        "until [[ -e $SEEN/env.1 ]]; do sleep 0.1; done\nsleep 1\nexit 3\n"
    )
    show.chmod(0o755)
    run = work / "runs" / f"seen{len(passed)}"
    words = ["--nodes", "2", "--procs-per-node", "1", "--launcher", "srun", "--name", run.name, "--gpus-per-node", "1"]
    words += ["--env", f"SEEN={run}", "--env", "NCCL_DEBUG=WARN", "--python", str(show), *passed, "--", "--steps", "1"]
    job = slurm.submit(work, *words, MY_TOKEN="given-1234", OTHER_SECRET="hidden-5678")
    fact = slurm.wait(job)[0]
    log = Path(fact["StdOut"]).read_text()
    assert (fact["JobState"], fact["ExitCode"]) == ("FAILED", "3:0"), log
    for rank in (0, 1):
        lines = (run / f"env.{rank}").read_text().splitlines()
        environ = dict(line.split("=", 1) for line in lines if "=" in line)
        assert environ.get("MY_TOKEN") == ("given-1234" if passed else None)
        assert "OTHER_SECRET" not in environ
        assert (environ["RANK"], environ["WORLD_SIZE"], environ["LOCAL_RANK"]) == (str(rank), "2", "0")
        assert (environ["MASTER_ADDR"], environ["NCCL_DEBUG"]) == ("node1", "WARN")
        assert environ["TORCH_FR_DUMP_TEMP_FILE"] == str(_life(run, 0) / "nccl_trace_rank_")
        assert environ["CUDA_VISIBLE_DEVICES"] == "0"
        assert (environ["HOME"], environ["USER"]) == (pwd.getpwuid(os.getuid()).pw_dir, "root")  # as after a login
    written = "".join(path.read_text() for path in (run / "launch").rglob("*") if path.is_file())
    assert "given-1234" not in written
    assert "hidden-5678" not in written


def test_wrong_options_use_up_no_job_number(slurm: Cluster, work: Path) -> None:
    def last_number() -> int:
        text = slurm.ask("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true")
        slurm.ask("scancel", text.strip())
        return int(text)

    before = last_number()
    for words in (("--nodes", "0"), ("--nodes", "2")):  # the second one: 2 processes do not make 2 x 2 ranks
        done = run_script(
            *("--slurm", "--python", sys.executable, "--procs-per-node", "1", "--name", "bad"),
            *words,
            *MESH,
            cwd=work,
            env=slurm.environment,
        )
        assert done.returncode == 2, done.stdout
        assert done.stderr.startswith("error: "), done.stderr
    assert last_number() == before + 1
    assert not (work / "runs" / "bad").exists()
