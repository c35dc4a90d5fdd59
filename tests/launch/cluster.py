"""The small Slurm cluster of the launch tests, seen from a test: submit, watch, break and repair."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "launch" / "run.sh"
HERE = Path(__file__).resolve().parent
_UNFINISHED = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED", "SIGNALING", "SUSPENDED", "STOPPED")


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without what another launcher, or the test session, put there."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES")
    return {key: value for key, value in os.environ.items() if key not in dropped and "SLURM" not in key} | more


def run_script(*words: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run launch/run.sh."""
    return subprocess.run(
        ["bash", str(RUN), *words],
        cwd=cwd,
        env=clean_environment() if env is None else env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def wait_until(what: Callable[[], Any], seconds: float, tell: Callable[[], str]) -> Any:
    """First true value of `what`; fails with `tell()` when the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = what()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"nothing after {seconds:.0f} s: {tell()}")


def losses(run: Path) -> dict[int, float]:
    """Loss of each step that a run has logged so far; the last entry of a step counts."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return {}
    # The last line may be half written.
    lines = path.read_text().rpartition("\n")[0].splitlines()
    return {row["step"]: row["train/loss"] for row in map(json.loads, lines) if "train/loss" in row}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A running cluster; `folder` holds its configuration and logs."""

    folder: Path

    @staticmethod
    def missing() -> str | None:
        """What this machine lacks for a cluster, or None."""
        if os.geteuid() != 0:
            return "needs root to start Slurm's daemons and network namespaces"
        for program in ("slurmctld", "slurmd", "munged", "sbatch", "ip", "unshare", "flock", "setsid"):
            if shutil.which(program) is None:
                return f"needs {program} (on Debian: apt-get install slurm-wlm munge iproute2 util-linux)"
        return None

    @property
    def environment(self) -> dict[str, str]:
        return clean_environment(SLURM_CONF=str(self.folder / "etc" / "slurm.conf"))

    def up(self) -> None:
        """Start it, or restart what died; raises with the script's words."""
        self._script("slurm_up.sh", 250)

    def down(self) -> None:
        self._script("slurm_down.sh", 200)

    def _script(self, name: str, seconds: int) -> None:
        log = self.folder / f"{name}.txt"
        # Not through pipes: the daemons would hold them open.
        with log.open("w") as stream:
            done = subprocess.run(
                ["bash", str(HERE / name), str(self.folder)], stdout=stream, stderr=stream, timeout=seconds, check=False
            )
        if done.returncode:
            raise RuntimeError(f"{name}: {log.read_text()[-2000:]}")

    def ask(self, *command: str) -> str:
        """Output of one of Slurm's commands."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout

    def submit(self, cwd: Path, *words: str, **environ: str) -> str:
        """Number of the job that run.sh submitted."""
        # Each preflight imports torch; test_wrong_options_use_up_no_job_number has it.
        words = ("--no-preflight", *words)
        done = run_script("--slurm", "--python", sys.executable, *words, cwd=cwd, env=self.environment | environ)
        assert done.returncode == 0, done.stderr + done.stdout
        return next(line.split()[1].rstrip(";") for line in done.stdout.splitlines() if line.startswith("job "))

    def jobs(self, job: str) -> list[dict[str, str]]:
        """Facts of a job, of each task if it is an array."""
        text = self.ask("scontrol", "show", "job", "--oneliner", job)
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in text.splitlines()]

    def wait(self, job: str, seconds: float = 400) -> list[dict[str, str]]:
        """Facts of a job that has ended."""

        def ended() -> list[dict[str, str]]:
            facts = self.jobs(job)
            return [] if any(fact["JobState"].startswith(_UNFINISHED) for fact in facts) else facts

        found: list[dict[str, str]] = wait_until(ended, seconds, lambda: self.tell(job))
        return found

    def wait_for_steps(self, job: str, run: Path, steps: int, seconds: float = 300) -> None:
        """Until a run has logged so many steps."""
        wait_until(lambda: len(losses(run)) >= steps, seconds, lambda: self.tell(job))

    def tell(self, job: str) -> str:
        """The queue and the end of a job's log."""
        logs = [Path(fact["StdOut"]) for fact in self.jobs(job) if "StdOut" in fact]
        texts = [f"{log}:\n{log.read_text()[-3000:]}" for log in logs if log.exists()]
        return "\n".join([self.ask("squeue"), *texts])

    def kill_node(self, name: str) -> None:
        """Let a node die: its daemon and every process on it, at once."""
        pid = (self.folder / "pids" / f"slurmd-{name}").read_text().split()[0]
        space = os.readlink(f"/proc/{pid}/ns/uts")
        assert space != os.readlink("/proc/self/ns/uts")
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "ns" / "uts") == space:
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:  # gone, or not ours to look at
                continue
