"""Fixtures of the launch tests: a real Slurm cluster for the session, and a folder with a tiny configuration."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dbsp_megatron.infer.video_file import write_mp4
from tests.integration.training import MODEL
from tests.launch.cluster import Cluster

CONFIG = """
model: model.yaml
data: {paths: [a.mp4], height: 24, width: 24, num_frames: 4, patch_size: [1, 8, 8]}
sp: {strategy: dbsp, block_size: 5}
mask: {method: topp, top_p: 0.5}
optim: {lr: 0.003, warmup_steps: 1}
train: {steps: 12, global_batch_size: 2, checkpoint_every: 0, seed: 3, device: cpu}
run: {plots: false}
"""


def pytest_configure(config: pytest.Config) -> None:
    """Register this folder's marker."""
    config.addinivalue_line("markers", "slurm: starts a small Slurm cluster on this machine; needs root and Slurm")


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """Three nodes, up for the session; one session of this machine at a time."""
    reason = Cluster.missing()
    if reason is not None:
        pytest.skip(reason)
    with (Path(tempfile.gettempdir()) / "dbsp_slurm_tests.lock").open("a+") as lock:
        deadline = time.monotonic() + 240
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    pytest.skip("another test session of this machine has its Slurm cluster up")
                time.sleep(1)
        # A session that was killed left its cluster behind: the lock says where.
        lock.seek(0)
        left = Path(lock.read().strip() or "none")
        if left.is_dir():
            Cluster(folder=left).down()
        # Not pytest's folder: the path of munge's socket may not be long.
        cluster = Cluster(folder=Path(tempfile.mkdtemp(prefix="slurm")))
        lock.truncate(0)
        print(cluster.folder, file=lock, flush=True)
        try:
            try:
                cluster.up()
            except RuntimeError as error:
                if "Operation not permitted" in str(error):
                    pytest.skip("this machine allows no network namespaces")
                raise
            yield cluster
        finally:
            cluster.down()
            shutil.rmtree(cluster.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder to launch from, with a model of two layers and one clip."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "model.yaml").write_text(MODEL)
    (folder / "tiny.yaml").write_text(CONFIG)
    ramp = torch.linspace(-1, 1, 32)
    write_mp4(torch.stack([ramp.roll(shift).expand(3, 24, 32) for shift in range(8)], dim=1), folder / "a.mp4", 8)
    return folder
