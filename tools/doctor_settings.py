"""Environment variables, limits of the process, disks and Slurm."""

from __future__ import annotations

import fnmatch
import os
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

from tools import doctor_machine
from tools.doctor_check import FAIL, OK, WARN, Check, last_line, redaction, run

VARIABLES, LIMITS, DISKS, SLURM = "Environment", "Limits", "Disks", "Slurm"
_SHOWN = (
    "NCCL_*", "TORCH_NCCL_*", "TORCH_DISTRIBUTED_*", "GLOO_*", "CUDA_*", "PYTORCH_*", "TRITON_*", "OMP_NUM_THREADS",
    "PYTHONSAFEPATH", "PYTHONPATH", "MASTER_*", "RANK", "WORLD_SIZE", "LOCAL_*", "WANDB_*", "FI_*", "LD_PRELOAD",
)  # fmt: skip
_MIB, _GIB = 2**20, 2**30
_LEAST_FILES = 4096
_LEAST_SHM = _GIB
_LEAST_MEMLOCK = 64 * _MIB
_FULL, _NEARLY_FULL = _GIB, 10 * _GIB
_SECONDS = 10.0
_SHARED_FILE_SYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph")
_SWITCHED_OFF = ("1", "true", "yes")


def check_environment(environ: Mapping[str, str] | None = None) -> list[Check]:
    """Variables that change how a run behaves, with those that are likely mistakes marked.

    Args:
        environ: default: this process's.
    """
    environ = os.environ if environ is None else environ
    redact = redaction()
    checks = []
    for name in sorted(environ):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in _SHOWN):
            continue
        value = environ[name]
        problem = _problem(name, value, environ)
        shown = "***" if redact.is_secret(name, value) else redact.redact_text(value, environ)
        status, what, remedy = problem or (OK, "", "")
        found = f"{shown}{f' ({what})' if what else ''}"
        checks.append(Check(group=VARIABLES, name=name, status=status, found=found, remedy=remedy))
    return checks or [Check(group=VARIABLES, name="variables", status=OK, found="none that matters is set")]


def _problem(name: str, value: str, environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Status, what is wrong and what to do; None if nothing is."""
    on = value.lower() in _SWITCHED_OFF
    if name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        return _interface_problem(name, value)
    if name == "NCCL_P2P_DISABLE" and on:
        return WARN, "GPUs of a node exchange through host memory", "unset it, unless the node hangs without"
    if name == "NCCL_SHM_DISABLE" and on:
        return WARN, "processes of a node talk over the network", "unset it"
    if name == "NCCL_IB_DISABLE" and on and any(c.name != "InfiniBand" for c in doctor_machine.check_infiniband()):
        return WARN, "InfiniBand is there and not used", "unset it"
    if name in ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT"):
        return WARN, "an old name", f"use TORCH_{name}"
    if name == "CUDA_LAUNCH_BLOCKING" and on:
        return WARN, "nothing overlaps", "unset it when you are done debugging"
    if name == "TORCH_DISTRIBUTED_DEBUG" and value.upper() == "DETAIL":
        return WARN, "every collective is checked, which is slow", "unset it when you are done debugging"
    if name == "NCCL_DEBUG" and value.upper() in ("INFO", "TRACE"):
        return WARN, "it writes a lot", "NCCL_DEBUG=WARN"
    if name == "TRITON_INTERPRET" and on:
        return WARN, "kernels run in an interpreter, thousands of times slower", "unset it"
    if name == "MASTER_ADDR" and value in ("localhost", "127.0.0.1") and _num_nodes(environ) > 1:
        return FAIL, f"{_num_nodes(environ)} nodes cannot meet there", "the name of the first node"
    if name == "OMP_NUM_THREADS" and value.isdigit() and int(value) > (os.cpu_count() or 1):
        return WARN, f"more than the {os.cpu_count()} processors", "processors divided by processes of the node"
    return None


def _interface_problem(name: str, value: str) -> tuple[str, str, str] | None:
    """NCCL takes prefixes, exact names after `=`, and all but some after `^`; gloo takes exact names."""
    known = doctor_machine.interfaces() | {"lo": True}
    wanted = [entry for entry in value.lstrip("^=").split(",") if entry]
    exact = name.startswith("GLOO") or value.startswith("=")
    matching = [i for i in known for entry in wanted if (i == entry if exact else i.startswith(entry))]
    if value.startswith("^") and name.startswith("NCCL"):
        matching = [interface for interface in known if interface not in matching and interface != "lo"]
    if matching:
        return None
    return FAIL, f"no such interface here, there are {', '.join(known)}", "name one of them, or unset it"


def _num_nodes(environ: Mapping[str, str]) -> int:
    text = environ.get("SLURM_NNODES", environ.get("SLURM_JOB_NUM_NODES", "1"))
    return int(text) if text.isdigit() else 1


def check_limits() -> list[Check]:
    """Open files, locked memory and shared memory."""
    files, locked = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    few = files != resource.RLIM_INFINITY and files < _LEAST_FILES
    checks = [
        Check(
            group=LIMITS,
            name="open files",
            status=WARN if few else OK,
            found=_limit(files, 1, ""),
            remedy=f"`ulimit -n {_LEAST_FILES}` before the start: many ranks and data files need more" if few else "",
        )
    ]
    has_infiniband = any(check.name != "InfiniBand" for check in doctor_machine.check_infiniband())
    small = has_infiniband and locked != resource.RLIM_INFINITY and locked < _LEAST_MEMLOCK
    checks.append(
        Check(
            group=LIMITS,
            name="locked memory",
            status=WARN if small else OK,
            found=_limit(locked, _MIB, " MiB"),
            remedy="InfiniBand needs `ulimit -l unlimited` (limits.conf, or the daemon of the scheduler)"
            if small
            else "",
        )
    )
    return [*checks, *check_shared_memory()]


def _limit(value: int, unit: int, name: str) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value / unit:.6g}{name}"


def check_shared_memory(path: str = "/dev/shm") -> list[Check]:
    """Room through which NCCL and loaders of data pass tensors inside a node."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        remedy = "mount a tmpfs there"
        return [Check(group=LIMITS, name=path, status=WARN, found=f"not there: {error.strerror}", remedy=remedy)]
    small = usage.free < _LEAST_SHM
    found = f"{usage.free / _MIB:.0f} of {usage.total / _MIB:.0f} MiB free"
    remedy = "start the container with --shm-size=8g or --ipc=host" if small else ""
    return [Check(group=LIMITS, name=path, status=WARN if small else OK, found=found, remedy=remedy)]


def check_disks(run_root: Path) -> list[Check]:
    """Free room, and whether a file can be written, for runs and for the cache of compiled kernels."""
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return [check_folder("runs", run_root), check_folder("Triton cache", cache, node_local=True)]


def check_folder(name: str, folder: Path, *, node_local: bool = False) -> Check:
    """Free room on a disk, and a file written there and moved into place, as checkpoints are.

    Args:
        name: what it is for.
        folder: perhaps not there yet.
        node_local: it should not be shared between nodes.
    """
    there = folder.resolve()
    while not there.exists():
        there = there.parent

    def check(status: str, found: str, remedy: str = "") -> Check:
        return Check(group=DISKS, name=name, status=status, found=f"{folder}: {found}", remedy=remedy)

    if not there.is_dir():
        return check(FAIL, f"{there} is a file", "choose another folder")
    try:
        free = shutil.disk_usage(there).free
        _write_atomically(there)
    except OSError as error:
        return check(FAIL, f"cannot be written: {error.strerror or error}", "choose another folder, or free the disk")
    found = f"{free / _GIB:.1f} GiB free"
    if free < _FULL:
        return check(FAIL, found, "free the disk, or choose another folder: a checkpoint would not fit")
    system = file_system(there)
    if node_local and system in _SHARED_FILE_SYSTEMS:
        return check(WARN, f"{found}, on {system}", "set TRITON_CACHE_DIR to a disk of the node: nodes race")
    if free < _NEARLY_FULL:
        return check(WARN, found, "checkpoints of a large model may not fit: see tools/explain.py")
    return check(OK, f"{found}{f', on {system}' if system else ''}")


def _write_atomically(folder: Path) -> None:
    temporary, final = (folder / f".doctor_{os.getpid()}.{suffix}" for suffix in ("tmp", "txt"))
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write("doctor\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, final)
        if final.read_text(encoding="utf-8") != "doctor\n":
            raise OSError("what was written is not what is read")
    finally:
        for path in (temporary, final):
            path.unlink(missing_ok=True)


def file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Type of the file system that holds a folder; empty if unknown."""
    try:
        lines = mounts.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found, longest = "", -1
    for line in lines:
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        if folder.is_relative_to(point) and len(point) > longest:
            found, longest = fields[2], len(point)
    return found


def check_slurm(environ: Mapping[str, str] | None = None) -> list[Check]:
    """The job that this runs in, and whether the commands of Slurm work.

    Args:
        environ: default: this process's.
    """
    environ = os.environ if environ is None else environ
    checks = []
    if "SLURM_JOB_ID" in environ:
        usual = {"NNODES": "?", "NTASKS": "?", "JOB_NODELIST": "?", "RESTART_COUNT": "0"}
        facts = {name: environ.get(f"SLURM_{name}", value) for name, value in usual.items()}
        told = ", ".join(f"{name.lower()} {value}" for name, value in facts.items())
        checks.append(Check(group=SLURM, name="job", status=OK, found=f"{environ['SLURM_JOB_ID']}: {told}"))
        if shutil.which("scontrol") is None:
            remedy = "run the launcher on the host, or give MASTER_ADDR: host names come from scontrol"
            found = "not on the path, as in most containers"
            checks.append(Check(group=SLURM, name="scontrol", status=WARN, found=found, remedy=remedy))
    if shutil.which("sinfo") is None:
        found = "no commands of Slurm here: use the launcher with --local"
        return checks or [Check(group=SLURM, name="sinfo", status=OK, found=found)]
    done = run(["sinfo", "--noheader", "--format=%P %a %D"], _SECONDS)
    if done.code != 0:
        why = last_line(done.err) or last_line(done.out) or "no answer"
        remedy = "is slurmctld running, and SLURM_CONF right?"
        return [*checks, Check(group=SLURM, name="sinfo", status=WARN, found=why, remedy=remedy)]
    partitions = "; ".join(" ".join(line.split()) for line in done.out.splitlines() if line.strip())
    return [*checks, Check(group=SLURM, name="partitions", status=OK, found=partitions or "none")]
