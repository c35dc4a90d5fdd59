"""Detection of optional packages and of process groups."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path

import pytest
import torch

from dbsp_megatron.compat import group_rank, group_size, nvidia_apex, process_groups, version_tuple

FUSED_ADAM = "class FusedAdam: ...\n"


def install_apex(folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """Puts a package named apex, and nothing older of that name, in front of the path."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for name in [name for name in sys.modules if name.split(".")[0] in ("apex", "amp_C")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(folder))
    importlib.machinery.PathFinder.invalidate_caches()


def forget_apex() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("apex", "amp_C")]:
        del sys.modules[name]


NVIDIA = {
    "apex/__init__.py": "",
    "apex/optimizers/__init__.py": FUSED_ADAM,
    "apex/multi_tensor_apply/__init__.py": "multi_tensor_applier = None\n",
    "amp_C.py": "",
}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"apex/__init__.py": "name = 'another project'\n"}, "not NVIDIA's apex"),
        ({"apex/__init__.py": "raise RuntimeError('needs a web server')\n"}, "RuntimeError: needs a web server"),
        (NVIDIA | {"apex/optimizers/__init__.py": ""}, "has no apex.optimizers.FusedAdam"),
        (NVIDIA | {"apex/multi_tensor_apply/__init__.py": ""}, "has no apex.multi_tensor_apply"),
        ({name: text for name, text in NVIDIA.items() if name != "amp_C.py"}, "without its CUDA extension amp_C"),
    ],
)
def test_nvidia_apex_tells_why_a_package_of_that_name_does_not_do(
    files: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_apex(tmp_path, monkeypatch, files)
    module, why = nvidia_apex()
    forget_apex()
    assert module is None
    assert reason in why


def test_nvidia_apex_accepts_nvidias_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_apex(tmp_path, monkeypatch, NVIDIA)
    module, why = nvidia_apex()
    forget_apex()
    assert module is not None
    assert why == ""


def test_version_tuple_reads_releases_only() -> None:
    found = version_tuple("torch")
    assert found == tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:3])
    assert version_tuple("no-such-distribution-here") is None


def test_process_groups_without_torch_distributed_are_one_rank() -> None:
    """Trap B121: nothing is initialised."""
    groups = process_groups()
    assert group_size(groups.tp) == group_size(groups.pp) == 1
    assert group_rank(groups.tp) == 0
    assert process_groups(groups) is groups
    assert not torch.distributed.is_initialized()
