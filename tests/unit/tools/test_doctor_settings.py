"""The doctor on variables, limits, disks and Slurm; secrets are never shown."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from tests.unit.tools.fake_commands import add_command, only_commands
from tools import doctor_machine, doctor_settings
from tools.doctor_check import FAIL, OK, WARN, Check, masked

_USAGE = namedtuple("_USAGE", "total used free")


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return only_commands(tmp_path / "bin", monkeypatch)


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("NCCL_SOCKET_IFNAME", "=nope0", FAIL),
        ("NCCL_SOCKET_IFNAME", "l", OK),
        ("NCCL_SOCKET_IFNAME", "^nope", OK),
        ("GLOO_SOCKET_IFNAME", "l", FAIL),
        ("GLOO_SOCKET_IFNAME", "lo", OK),
        ("NCCL_P2P_DISABLE", "1", WARN),
        ("NCCL_P2P_DISABLE", "0", OK),
        ("NCCL_SHM_DISABLE", "1", WARN),
        ("NCCL_ASYNC_ERROR_HANDLING", "1", WARN),
        ("NCCL_DEBUG", "INFO", WARN),
        ("NCCL_DEBUG", "WARN", OK),
        ("CUDA_LAUNCH_BLOCKING", "1", WARN),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", WARN),
        ("TRITON_INTERPRET", "1", WARN),
        ("OMP_NUM_THREADS", "100000", WARN),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", OK),
        ("PYTHONSAFEPATH", "1", OK),
    ],
)
def test_check_environment_marks_mistakes(name: str, value: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "interfaces", lambda: {"eth0": True})
    (check,) = doctor_settings.check_environment({name: value, "HOME": "/"})
    assert (check.name, check.status) == (name, status)
    assert value in check.found
    assert bool(check.remedy) == (status != OK)


def test_check_environment_fails_where_nodes_cannot_meet() -> None:
    environ = {"MASTER_ADDR": "localhost", "SLURM_NNODES": "2"}
    assert doctor_settings.check_environment(environ)[0].status == FAIL
    assert doctor_settings.check_environment({**environ, "SLURM_NNODES": "1"})[0].status == OK


def test_secrets_are_never_shown() -> None:
    environ = {"WANDB_API_KEY": "0123456789abcdef", "NCCL_X": "0123456789abcdef", "WANDB_BASE_URL": "https://u:pw@host"}
    text = repr(doctor_settings.check_environment(environ))
    assert "0123456789abcdef" not in text
    assert "pw" not in text
    shown = masked(Check(group="g", name="n", status=FAIL, found="login failed: token=abcdefgh", remedy="password=xy"))
    assert "abcdefgh" not in repr(shown)
    assert "xy" not in repr(shown)


@pytest.mark.parametrize("small", [True, False])
def test_check_limits(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 1024 if small else resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    port = Check(group="Links", name="mlx5_0 port 1", status=OK, found="ACTIVE")
    monkeypatch.setattr(doctor_machine, "check_infiniband", lambda: [port])
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: _USAGE(2**26, 0, 2**26) if small else _USAGE(2**34, 0, 2**34)
    )
    assert [check.status for check in doctor_settings.check_limits()] == [WARN if small else OK] * 3
    assert ("--shm-size" in doctor_settings.check_shared_memory()[0].remedy) == small


def test_check_shared_memory_warns_where_there_is_none(tmp_path: Path) -> None:
    assert doctor_settings.check_shared_memory(str(tmp_path / "none"))[0].status == WARN


def test_check_folder_writes_and_leaves_nothing(tmp_path: Path) -> None:
    check = doctor_settings.check_folder("runs", tmp_path / "not" / "there" / "yet")
    assert check.status in (OK, WARN)
    assert "GiB free" in check.found
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("free_gib", "status"), [(0.5, FAIL), (5, WARN), (500, OK)])
def test_check_folder_judges_free_room(
    free_gib: float, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = int(free_gib * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _USAGE(2**40, 2**40 - free, free))
    assert doctor_settings.check_folder("runs", tmp_path).status == status


def test_check_folder_fails_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    check = doctor_settings.check_folder("runs", tmp_path)
    assert check.status == FAIL
    assert "No space left on device" in check.found
    assert not list(tmp_path.iterdir())


def test_check_folder_fails_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert doctor_settings.check_folder("runs", tmp_path / "file" / "runs").status == FAIL


def test_check_folder_wants_caches_on_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_settings, "file_system", lambda folder: "nfs4")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _USAGE(2**40, 0, 2**40))
    assert doctor_settings.check_folder("cache", tmp_path, node_local=True).status == WARN
    assert doctor_settings.check_folder("runs", tmp_path).status == OK


def test_file_system_takes_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/a / ext4 rw 0 0\nserver:/x /data\\040set nfs4 rw 0 0\nbroken\n")
    assert doctor_settings.file_system(Path("/data set/runs"), mounts) == "nfs4"
    assert doctor_settings.file_system(Path("/data"), mounts) == "ext4"
    assert doctor_settings.file_system(Path("/"), tmp_path / "none") == ""


def test_check_slurm(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_settings.check_slurm({})[0].status == OK
    inside = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS": "16", "SLURM_JOB_NODELIST": "gpu[1-2]"}
    checks = doctor_settings.check_slurm(inside)
    assert [(check.name, check.status) for check in checks] == [("job", OK), ("scontrol", WARN)]
    assert "nnodes 2, ntasks 16, job_nodelist gpu[1-2], restart_count 0" in checks[0].found
    add_command(commands, "sinfo", "echo 'main up 2'")
    assert "main up 2" in doctor_settings.check_slurm({})[0].found
    add_command(commands, "sinfo", "echo 'Unable to contact slurm controller' >&2; exit 1")
    (check,) = doctor_settings.check_slurm({})
    assert (check.status, check.found) == (WARN, "Unable to contact slurm controller")
    monkeypatch.setattr(doctor_settings, "_SECONDS", 0.5)
    add_command(commands, "sinfo", "sleep 60")
    assert "did not end" in doctor_settings.check_slurm({})[0].found
