"""Settings of verification and of the memory budget, from code, flags and the command line."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from dbsp_megatron.arguments import add_dbsp_args, config_from_args
from dbsp_megatron.config.cli import parse_infer, parse_train
from dbsp_megatron.strategy import SequenceParallelConfig


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("verify_steps", -1),
        ("verify_steps", True),
        ("verify_steps", 1.5),
        ("verify_steps", None),
        ("memory_budget_mib", 0),
        ("memory_budget_mib", 2.5),
        ("memory_budget_mib", True),
    ],
)
def test_config_refuses_what_is_no_count(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"sp\.{key} must be an integer >= ., got {value!r}"):
        SequenceParallelConfig(**{key: value})


def test_by_default_nothing_is_verified_and_memory_has_no_limit() -> None:
    config = SequenceParallelConfig()
    assert config.verify_steps == 0
    assert config.memory_budget_mib is None


def test_flags_of_training_scripts_reach_the_config() -> None:
    flags = ["--sp-verify", "3", "--sp-memory-budget-mib", "700"]
    config = config_from_args(add_dbsp_args(argparse.ArgumentParser()).parse_args(flags))
    assert (config.verify_steps, config.memory_budget_mib) == (3, 700)


@pytest.mark.parametrize(("parse", "more"), [(parse_train, []), (parse_infer, ["--checkpoint", "a"])])
def test_command_lines_take_sp_verify(parse: Any, more: list[str]) -> None:
    config = parse(["--sp-verify", "2", "--sp.memory_budget_mib", "700", *more]).config
    assert (config.sp.verify_steps, config.sp.memory_budget_mib) == (2, 700)


def test_ranks_with_other_settings_have_another_digest() -> None:
    """Whether a step is verified decides which collectives run, so it must be agreed on (Trap B65)."""
    digests = {
        SequenceParallelConfig(**options).digest
        for options in ({}, {"verify_steps": 1}, {"memory_budget_mib": 1}, {"memory_budget_mib": 2})
    }
    assert len(digests) == 4
