"""Slurm's compressed lists of nodes and tasks, good and garbage."""

from __future__ import annotations

import re

import pytest

from dbsp_megatron.train.slurm import expand_nodelist, job_nodes, main, parse_tasks_per_node


@pytest.mark.parametrize(
    ("text", "counts"),
    [("1(x2)", [1, 1]), ("2(x3),1", [2, 2, 2, 1]), ("8", [8]), ("3,2(x2),4", [3, 2, 2, 4])],
)
def test_parse_tasks_per_node_expands_repeats(text: str, counts: list[int]) -> None:
    """Trap B113: int('1(x2)') is not the number of tasks."""
    assert parse_tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x3", "2(x0)", "0", "-1", "2 (x3)", "2,,1", "1(x999999999)", "2(x3),"])
def test_parse_tasks_per_node_names_the_variable_of_garbage(text: str) -> None:
    """Trap B113."""
    with pytest.raises(ValueError, match=f"SLURM_TASKS_PER_NODE .*{re.escape(repr(text))}"):
        parse_tasks_per_node(text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu[01-03,7],cpu5", ["gpu01", "gpu02", "gpu03", "gpu7", "cpu5"]),
        ("node1", ["node1"]),
        ("b,a", ["b", "a"]),
        ("n[08-11]-ib", ["n08-ib", "n09-ib", "n10-ib", "n11-ib"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_expand_nodelist_keeps_order_and_zeros(text: str, names: list[str]) -> None:
    """Trap B115: the master is the first name of this list."""
    assert expand_nodelist(text) == names


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "a,,b", "n[1-", "n1-3]", "n[]", "n[3-1]", "n[a-b]", "n[1-999999999]", "a b"]
)
def test_expand_nodelist_names_the_variable_of_garbage(text: str) -> None:
    with pytest.raises(ValueError, match=f"SLURM_JOB_NODELIST .*{re.escape(repr(text))}"):
        expand_nodelist(text)


def test_job_nodes_compares_nodes_with_tasks() -> None:
    environ = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x3)"}
    assert job_nodes(environ) == ["n1", "n2", "n3"]
    with pytest.raises(ValueError, match="SLURM_TASKS_PER_NODE must count the 3 nodes"):
        job_nodes(environ | {"SLURM_TASKS_PER_NODE": "2(x2)"})


def test_main_prints_one_name_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.delenv("SLURM_TASKS_PER_NODE", raising=False)
    main()
    assert capsys.readouterr().out == "n1\nn2\n"


def test_main_ends_with_one_line_outside_a_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err == (
        "error: SLURM_JOB_NODELIST must be set, got nothing; run this inside a Slurm job\n"
    )
