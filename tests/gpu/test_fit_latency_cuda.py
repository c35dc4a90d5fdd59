"""The calibration tool on CUDA devices: kernels on one, links over NCCL on several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dbsp_megatron.plan.calibration import Calibration
from tools import fit_latency


@pytest.mark.gpu
def test_main_measures_one_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = fit_latency.main(["--quick", "--seqlen", "4096", "--output", str(tmp_path / "machine.json")])
    assert status == 0, capsys.readouterr().err
    calibration = Calibration.load(tmp_path / "machine.json")
    assert [rate.direction for rate in calibration.kernels] == list(fit_latency.DIRECTIONS)
    assert all(rate.dtype == "bfloat16" for rate in calibration.kernels)
    assert torch.cuda.get_device_name(0) in calibration.machine
    assert {"cuda", "nccl"} <= set(calibration.versions)


@pytest.mark.multigpu
def test_torchrun_measures_links_over_nccl(tmp_path: Path) -> None:
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    root = Path(fit_latency.__file__).resolve().parents[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["tools/fit_latency.py", "--quick", "--seqlen", "4096", "--output", str(tmp_path / "machine.json")]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "4"}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    calibration = Calibration.load(tmp_path / "machine.json")
    sizes = [n for n in (2, 4) if n <= ranks]
    assert [(link.collective, link.num_ranks, link.scope) for link in calibration.links] == [
        (collective, size, "node") for size in sizes for collective in fit_latency.COLLECTIVES
    ]
    for link in calibration.links:
        # Some tens of microseconds for little, and faster than any network between nodes for much.
        assert link.time(4096) < 2000, link
        assert link.num_bytes[-1] / link.time_us[-1] / 1e3 > 1, link
