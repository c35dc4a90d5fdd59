"""Facts about the machine, software and command line of a run, with secrets masked."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .redact import is_secret, redact_command, redact_text

PACKAGES = (
    *("dbsp_megatron", "torch", "triton", "megatron-core", "numpy"),
    *("av", "wandb", "safetensors", "jsonargparse", "PyYAML"),
)
ENVIRONMENT_PREFIXES = (
    "CUDA_", "DBSP_", "GLOO_", "HF_", "LOCAL_", "MASTER_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "RANK", "SLURM_",
    "TORCH", "TRITON_", "WANDB_", "WORLD_SIZE",
)  # fmt: skip


def collect_environment(
    *,
    world_size: int | None = None,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    source: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Describe where and how this process runs.

    Args:
        world_size: number of ranks; default: `WORLD_SIZE` of the environment, else 1.
        argv: command line; default: this process's.
        environ: environment; default: this process's. Only names with a prefix of `ENVIRONMENT_PREFIXES` are kept.
        source: folder whose git state is recorded; default: the folder of this package.

    Returns:
        A dict of JSON values: git, python, packages, hostname, platform, devices, world_size, command, env.
    """
    environ = os.environ if environ is None else environ
    return {
        "git": git_state(Path(__file__).parent if source is None else source),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "hostname": socket.gethostname(),
        "platform": platform.platform(),
        "devices": device_names(),
        "world_size": int(environ.get("WORLD_SIZE", "1")) if world_size is None else world_size,
        "command": redact_command(sys.argv if argv is None else argv, environ),
        "env": {
            name: "***" if is_secret(name, value) else redact_text(value, environ)
            for name, value in sorted(environ.items())
            if name.startswith(ENVIRONMENT_PREFIXES)
        },
    }


def git_state(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return `{"commit": hex or None, "dirty": bool}` of the git tree that holds `folder`; None outside a tree."""
    if _git(folder, "rev-parse", "--is-inside-work-tree") != "true":
        return None
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": _git(folder, "rev-parse", "--verify", "--quiet", "HEAD") or None, "dirty": status != ""}


def _git(folder: str | os.PathLike[str], *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", os.fspath(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def device_names() -> list[str]:
    """Names of the visible accelerators, or of the processor where there are none."""
    torch = sys.modules.get("torch")
    # Not imported here: a process that never used torch has no device worth the import time.
    if torch is not None and torch.cuda.is_available():
        return [str(torch.cuda.get_device_name(index)) for index in range(torch.cuda.device_count())]
    return [f"cpu ({platform.machine()}, {os.cpu_count()} cores)"]
