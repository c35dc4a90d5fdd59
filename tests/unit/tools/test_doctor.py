"""The doctor finds what is broken and never hangs, whatever packages and commands do."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.unit.tools.fake_commands import add_command, only_commands
from tools import doctor, doctor_machine, doctor_packages, doctor_selftest
from tools.doctor_check import FAIL, OK, WARN, Check, run
from tools.doctor_packages import Package, check_packages, import_facts

TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0\t\tN/A
GPU1\tNV18\t X \tPHB\tSYS\t0-31\t0\t\tN/A
GPU2\tSYS\tPHB\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X
Legend:
  X    = Self
"""
H200 = "0, NVIDIA H200, 143771, 4, 570.86, 9.0, Enabled, 0, 700.00, 700.00, 1980, Not Active, Disabled"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return only_commands(tmp_path / "bin", monkeypatch)


def _gpus(commands: Path, *lines: str) -> list[Check]:
    (commands / "list").write_text("\n".join(lines) + "\n")
    add_command(commands, "nvidia-smi", f"cat {commands}/list")
    return doctor_machine.check_gpus()[1]


def test_run_ends_a_command_and_what_it_started() -> None:
    started = time.monotonic()
    done = run(["sh", "-c", "sleep 60 & echo begun; sleep 60"], 0.5)
    assert time.monotonic() - started < 20
    assert (done.code, done.out.strip()) == (None, "begun")
    assert "did not end within 0.5 s" in done.err


def test_check_gpus_describes_a_sound_one(commands: Path) -> None:
    (check,) = _gpus(commands, H200)
    assert check.status == OK
    assert "NVIDIA H200, 140 GiB, driver 570.86, compute capability 9.0 (Hopper kernels)" in check.found


@pytest.mark.parametrize(
    ("column", "value", "found"),
    [
        (3, "100000", "100000 MiB are in use"),
        (5, "7.5", "kernels need compute capability 8.0 or more"),
        (6, "Disabled", "ECC is off"),
        (7, "2", "2 uncorrected memory errors"),
        (8, "400.00", "power limit 400 W of 700 W"),
        (11, "Active", "the hardware slows its clocks"),
        (12, "Enabled", "MIG"),
    ],
)
def test_check_gpus_finds_what_is_wrong(column: int, value: str, found: str, commands: Path) -> None:
    fields = H200.split(", ")
    fields[column] = value
    (check,) = _gpus(commands, ", ".join(fields))
    assert check.status == WARN
    assert found in check.found
    assert check.remedy


def test_check_gpus_takes_unknown_values_for_unknown(commands: Path) -> None:
    (check,) = _gpus(
        commands, "0, GPU, 1000, 4, 570.86, [N/A], [N/A], [N/A], [Not Supported], N/A, [N/A], [N/A], [N/A]"
    )
    assert check.status == OK
    assert "capability" not in check.found


def test_check_gpus_asks_an_old_driver_for_less(commands: Path) -> None:
    script = 'case "$1" in *compute_cap*) echo "not a valid field"; exit 2;; *) echo "0, A100, 81920, 4, 450.1";; esac'
    add_command(commands, "nvidia-smi", script)
    gpus, (check,) = doctor_machine.check_gpus()
    assert (len(gpus), check.status) == (1, OK)
    assert "A100, 80 GiB, driver 450.1" in check.found


def test_check_gpus_without_nvidia_smi_is_no_fault(commands: Path) -> None:
    gpus, (check,) = doctor_machine.check_gpus()
    assert (gpus, check.status) == ([], OK)
    assert "everything runs on the CPU" in check.found


def test_check_gpus_fails_where_the_driver_does(commands: Path) -> None:
    add_command(commands, "nvidia-smi", "echo 'NVIDIA-SMI has failed because it could not talk to the driver.'; exit 9")
    gpus, (check,) = doctor_machine.check_gpus()
    assert (gpus, check.status) == ([], FAIL)
    assert "could not talk to the driver" in check.found


def test_check_gpus_does_not_wait_for_one_that_hangs(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "_SECONDS", 0.5)
    add_command(commands, "nvidia-smi", "sleep 60")
    _, (check,) = doctor_machine.check_gpus()
    assert check.status == FAIL
    assert "did not end within 0.5 s" in check.found


def test_check_gpus_warns_of_unequal_ones(commands: Path) -> None:
    checks = _gpus(commands, H200, H200.replace("0, NVIDIA H200", "1, NVIDIA L40S"))
    assert [check.status for check in checks] == [OK, OK, WARN]


@pytest.mark.parametrize(("cuda", "remedy"), [(None, "CUDA build"), ("13.0", "driver")])
def test_check_torch_sees_fails_without_devices(cuda: str | None, remedy: str) -> None:
    (check,) = doctor_machine.check_torch_sees(2, {"devices": 0, "cuda": cuda})
    assert check.status == FAIL
    assert remedy in check.remedy
    assert doctor_machine.check_torch_sees(2, {"devices": 2, "cuda": "13.0"})[0].status == OK


def test_parse_topology_reads_pairs() -> None:
    assert doctor_machine.parse_topology(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "PHB"}


def test_check_links_names_pairs_without_nvlink(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (commands / "topology").write_text(TOPOLOGY)
    add_command(commands, "nvidia-smi", f"cat {commands}/topology")
    check = doctor_machine.check_links(3)[0]
    assert (check.name, check.status) == ("between GPUs", WARN)
    assert "1 pairs NV18, 1 pairs SYS, 1 pairs PHB" in check.found
    assert "GPUs 0 and 2" in check.remedy
    (commands / "topology").write_text(TOPOLOGY.replace("SYS", "NV18").replace("PHB", "NV18"))
    assert doctor_machine.check_links(3)[0].status == OK
    add_command(commands, "nvidia-smi", "echo no; exit 1")
    assert "told nothing" in doctor_machine.check_links(3)[0].found


def test_check_infiniband_reads_ports(tmp_path: Path) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert [(c.name, c.status) for c in doctor_machine.check_infiniband(tmp_path)] == [
        ("mlx5_0 port 1", OK),
        ("mlx5_1 port 1", WARN),
    ]
    assert doctor_machine.check_infiniband(tmp_path / "none")[0].status == OK


def test_check_interfaces_warns_if_none_is_up(tmp_path: Path) -> None:
    for name, state in (("lo", "unknown"), ("eth0", "down")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(state)
    assert doctor_machine.check_interfaces(tmp_path)[0].status == WARN
    (tmp_path / "eth0" / "operstate").write_text("up")
    assert doctor_machine.check_interfaces(tmp_path)[0].status == OK


def _modules(folder: Path, monkeypatch: pytest.MonkeyPatch, **sources: str) -> None:
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_import_facts_survives_modules_that_raise_crash_or_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _modules(
        tmp_path,
        monkeypatch,
        fake_good="__version__ = '1.2'",
        fake_raising="raise RuntimeError('no\\nluck')",
        fake_crashing="import os; os._exit(3)",
        fake_hanging="import time; time.sleep(60)",
        fake_last="__version__ = '3'",
    )
    names = ["fake_good", "fake_raising", "fake_crashing", "fake_hanging", "fake_last", "fake_absent"]
    facts = import_facts(names, timeout_s=5)
    assert list(facts) == names
    assert (facts["fake_good"]["error"], facts["fake_good"]["version"]) == (None, "1.2")
    assert facts["fake_raising"]["error"] == "RuntimeError: no luck"
    assert "ended with code 3" in facts["fake_crashing"]["error"]
    assert "did not end within 5 s" in facts["fake_hanging"]["error"]
    assert (facts["fake_last"]["error"], facts["fake_last"]["version"]) == (None, "3")
    assert "ModuleNotFoundError" in facts["fake_absent"]["error"]


def test_check_packages_tells_required_from_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _modules(tmp_path, monkeypatch, fake_broken="raise OSError('libcuda.so.1 is missing')", fake_good="")
    packages = (
        Package(name="pytest", module="fake_broken", purpose="this", required=True),
        Package(name="ruff", module="fake_broken", purpose="that"),
        Package(name="mypy", module="fake_good", purpose="both"),
        Package(name="no-such-thing-1", module="no_such_thing_1", purpose="needed", required=True),
        Package(name="no-such-thing-2", module="no_such_thing_2", purpose="not needed"),
    )
    monkeypatch.setattr(doctor_packages, "PACKAGES", packages)
    checks, torch = check_packages(quick=False)
    assert torch is None
    by_name = {check.name: check for check in checks}
    assert [by_name[p.name].status for p in packages] == [FAIL, WARN, OK, FAIL, OK]
    assert "libcuda.so.1 is missing" in by_name["ruff"].found
    assert by_name["no-such-thing-1"].remedy == "pip install no-such-thing-1"
    assert "not needed: not needed" in by_name["no-such-thing-2"].found


def test_check_packages_tells_nvidias_apex_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    apex = next(package for package in doctor_packages.PACKAGES if package.name == "apex")
    monkeypatch.setattr(doctor_packages, "PACKAGES", (apex,))
    monkeypatch.setattr(doctor_packages, "_version", lambda name: "0.9")
    found = {"module": "apex", "error": None, "refusal": "the installed package named apex is not NVIDIA's apex"}
    monkeypatch.setattr(doctor_packages, "import_facts", lambda modules: {"apex": found})
    assert check_packages(quick=False)[0][-1].status == WARN
    assert "not NVIDIA's" in check_packages(quick=False)[0][-1].found
    found["refusal"] = ""
    assert check_packages(quick=False)[0][-1].status == OK


def test_check_packages_fails_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = {"module": "torch", "error": None, "gloo": False, "cuda": None, "hip": None, "devices": 0}
    monkeypatch.setattr(doctor_packages, "PACKAGES", doctor_packages.PACKAGES[:1])
    monkeypatch.setattr(doctor_packages, "import_facts", lambda modules: {"torch": torch})
    checks, facts = check_packages(quick=True)
    assert facts is torch
    assert [(c.name, c.status) for c in checks if c.name in ("gloo", "torch build")] == [
        ("gloo", FAIL),
        ("torch build", OK),
    ]


_RANK = """
import json, os, sys, time
folder, rank = sys.argv[1], int(sys.argv[2])
out = open(f"{folder}/rank_{rank}", "w", buffering=1)
def begin(name): out.write(json.dumps({"begin": name}) + "\\n")
def tell(**line): out.write(json.dumps(line) + "\\n")
"""
_GOOD = "begin('gloo'); tell(name='gloo', found='met')\n"


def _ranks(folder: Path, body: str, timeout_s: float = 20) -> list[Check]:
    script = folder / "ranks.py"
    script.write_text(_RANK + body)
    return doctor_selftest.check_processes(2, timeout_s, script)


def test_check_processes_reports_what_all_ranks_did(tmp_path: Path) -> None:
    checks = _ranks(tmp_path, _GOOD)
    assert [(check.name, check.status) for check in checks] == [("gloo", OK), ("all", OK)]
    assert checks[0].found == "met"


@pytest.mark.parametrize(
    ("body", "name", "found"),
    [
        ("if rank == 1: sys.exit('no module')\n" + _GOOD, "start", "rank 1: ended with code 1: no module"),
        (
            _GOOD + "begin('attention')\nif rank == 1: os._exit(7)\ntime.sleep(60)",
            "attention",
            "rank 1: the process ended with code 7",
        ),
        (
            _GOOD + "begin('attention')\nif rank: tell(name='attention', error='off by 3'); sys.exit(1)\n"
            "tell(name='attention', error='collective timed out'); sys.exit(1)",
            "attention",
            "rank 1: off by 3",
        ),
        (_GOOD + "if rank == 1: os._exit(4)", "end", "rank 1 ended with code 4"),
    ],
)
def test_check_processes_finds_the_rank_that_failed(body: str, name: str, found: str, tmp_path: Path) -> None:
    failed = [check for check in _ranks(tmp_path, body) if check.status == FAIL]
    assert failed[0].name == name
    assert failed[0].found.startswith(found)
    assert failed[0].remedy


def test_check_processes_ends_what_hangs(tmp_path: Path) -> None:
    started = time.monotonic()
    checks = _ranks(tmp_path, "begin('gloo')\ntime.sleep(60)", timeout_s=3)
    assert time.monotonic() - started < 30
    assert [(check.name, check.status) for check in checks] == [("gloo", FAIL)]
    assert "not done within 3 s" in checks[0].found


@pytest.mark.slow
def test_check_processes_meet_for_real() -> None:
    checks = doctor_selftest.check_processes(2, 240)
    assert [(check.name, check.status) for check in checks] == [("gloo", OK), ("attention", OK), ("all", OK)], checks
    assert "2x1 and 1x2" in checks[1].found


def _examined(status: str) -> list[Check]:
    return [
        Check(group="A", name="first", status=OK, found="there"),
        Check(group="B", name="second one", status=status, found="gone", remedy="fetch it"),
    ]


@pytest.mark.parametrize(("status", "code"), [(OK, 0), (WARN, 0), (FAIL, 1)])
def test_main_exit_code(
    status: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda **_: _examined(status))
    assert doctor.main(["--json"]) == code
    assert [entry["status"] for entry in json.loads(capsys.readouterr().out)] == [OK, status]
    assert doctor.main([]) == code
    text = capsys.readouterr().out
    assert "  ok    first       there\n" in text
    assert ("-> fetch it" in text) == (status != OK)
    assert text.endswith(f"{1 + (status == OK)} ok, {int(status == WARN)} warn, {int(status == FAIL)} fail\n")


def test_examine_quick_starts_no_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_packages, "PACKAGES", ())
    monkeypatch.setattr(doctor_selftest, "check_processes", lambda number, timeout_s: pytest.fail("a test was started"))
    checks = doctor.examine(quick=True, num_processes=None, run_root=tmp_path / "runs", timeout_s=1)
    assert {"Software", "GPUs", "Links", "Environment", "Limits", "Disks", "Slurm"} == {check.group for check in checks}
