"""Shell scripts in place of the commands of a machine."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest


def only_commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder that is the whole path for commands, but for what scripts need themselves."""
    folder.mkdir()
    for name in ("cat", "sleep", "sh"):
        (folder / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def add_command(folder: Path, name: str, script: str) -> None:
    """Put a shell script there under the name of a command."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
