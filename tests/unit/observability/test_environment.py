"""Git state of a tree, and of no tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dbsp_megatron.observability.environment import collect_environment, git_state


def _git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_git_state_gives_commit_and_dirty_flag(tmp_path: Path) -> None:
    _git(tmp_path, "init", "--quiet")
    assert git_state(tmp_path) == {"commit": None, "dirty": False}
    file = tmp_path / "a.txt"
    file.write_text("1")
    _git(tmp_path, "add", "a.txt")
    _git(tmp_path, "commit", "--quiet", "-m", "first")
    head = _git(tmp_path, "rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": head, "dirty": False}
    file.write_text("2")
    assert git_state(tmp_path) == {"commit": head, "dirty": True}


def test_git_state_is_none_outside_a_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) is None


def test_collect_environment_takes_world_size_from_the_launcher(tmp_path: Path) -> None:
    assert collect_environment(environ={"WORLD_SIZE": "12"}, source=tmp_path)["world_size"] == 12
    assert collect_environment(environ={}, source=tmp_path)["world_size"] == 1
