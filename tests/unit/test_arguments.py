"""Flags for Megatron-LM style scripts end up in our configs, with the same defaults and the same rules."""

from __future__ import annotations

import argparse

import pytest

from dbsp_megatron.arguments import add_dbsp_args, config_from_args, mask_config_from_args
from dbsp_megatron.masks import MaskConfig
from dbsp_megatron.strategy import SequenceParallelConfig


def _parse(*flags: str) -> argparse.Namespace:
    return add_dbsp_args(argparse.ArgumentParser()).parse_args(flags)


def test_add_dbsp_args_returns_its_parser() -> None:
    """Megatron uses the return value of an extra_args_provider as the parser."""
    parser = argparse.ArgumentParser()
    assert add_dbsp_args(parser) is parser


def test_no_flags_give_the_default_configs() -> None:
    args = _parse()
    assert config_from_args(args) == SequenceParallelConfig()
    assert mask_config_from_args(args) == MaskConfig()


def test_config_from_args_takes_every_flag() -> None:
    args = _parse(
        *("--sp-strategy", "usp", "--ulysses-degree", "3", "--ring-degree", "auto", "--sp-head-policy", "contiguous"),
        *("--sp-block-policy", "stripe", "--sp-reward", "0.5", "--sp-engine", "torch", "--sp-block-size", "128"),
        *("--sp-plan-counts", "current"),
    )
    assert config_from_args(args) == SequenceParallelConfig(
        strategy="usp",
        ulysses_degree=3,
        ring_degree="auto",
        head_policy="contiguous",
        block_policy="stripe",
        reward=0.5,
        engine="torch",
        block_size=128,
        plan_counts="current",
    )


def test_mask_config_from_args_takes_every_flag() -> None:
    args = _parse(
        *("--sp-mask", "topp", "--sp-top-p", "0.9", "--sp-min-blocks", "2"),
        *("--sp-dense-layers", "1", "--sp-dense-steps", "3"),
    )
    assert mask_config_from_args(args) == MaskConfig(
        method="topp", top_p=0.9, min_blocks=2, dense_layers=1, dense_steps=3
    )


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ("--sp-mask dense", MaskConfig(method="dense")),
        ("--sp-mask topk --sp-mask-density 0.3", MaskConfig(method="topk", density=0.3)),
        ("--sp-mask sparge --sp-mask-similarity 0.4", MaskConfig(method="sparge", similarity=0.4)),
        ("--sp-mask vsa --sp-mask-cube 4 4 4", MaskConfig(method="vsa", cube=(4, 4, 4))),
        (
            "--sp-mask sparse_videogen --sp-mask-sample-rows 8 --sp-mask-sink-frames 0",
            MaskConfig(method="sparse_videogen", sample_rows=8, sink_frames=0),
        ),
        (
            "--sp-mask sliding_tile --sp-mask-tile 1 2 4 --sp-mask-window 3 1 1",
            MaskConfig(method="sliding_tile", tile=(1, 2, 4), window=(3, 1, 1)),
        ),
        (
            "--sp-mask sliding_tile --sp-mask-window 3 1 1 1 3 1",
            MaskConfig(method="sliding_tile", window=((3, 1, 1), (1, 3, 1))),
        ),
        ("--sp-mask sparge --sp-top-p 0.4 0.5", MaskConfig(method="sparge", top_p=(0.4, 0.5))),
        ("--sp-mask radial --sp-mask-width 0.5", MaskConfig(method="radial", width=0.5)),
        (
            "--sp-mask duo --sp-mask-global-heads 0 3 --sp-mask-sink-tokens 4 --sp-mask-window-tokens 5",
            MaskConfig(method="duo", global_heads=(0, 3), sink_tokens=4, window_tokens=5),
        ),
        ("--sp-mask duo --sp-mask-global-heads", MaskConfig(method="duo", global_heads=())),
        ("--sp-mask file --sp-mask-path a.safetensors", MaskConfig(method="file", path="a.safetensors")),
        ("--sp-mask-ramp cosine --sp-mask-ramp-steps 9", MaskConfig(ramp="cosine", ramp_steps=9)),
    ],
)
def test_mask_config_from_args_knows_every_method(words: str, config: MaskConfig) -> None:
    assert mask_config_from_args(_parse(*words.split())) == config


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_mask_windows_are_threes(count: int) -> None:
    with pytest.raises(ValueError, match=r"mask\.window must be three integers"):
        mask_config_from_args(_parse("--sp-mask", "sliding_tile", "--sp-mask-window", *["1"] * count))


def test_mask_flags_that_do_not_belong_are_refused() -> None:
    with pytest.raises(ValueError, match="mask.density=0.3 does not belong to mask.method=topp"):
        mask_config_from_args(_parse("--sp-mask-density", "0.3"))


def test_config_from_args_applies_the_rules_of_the_config() -> None:
    with pytest.raises(ValueError, match="ulysses_degree"):
        config_from_args(_parse("--ulysses-degree", "0"))


def test_degree_refuses_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse("--ring-degree", "many")
    assert "expected a number of ranks or 'auto', got 'many'" in capsys.readouterr().err


def test_flags_do_not_collide_with_megatron() -> None:
    """An extra_args_provider that repeats one of Megatron's flags makes every script fail at start-up."""
    megatron_flags = ["--context-parallel-size", "--cp-comm-type", "--sequence-parallel", "--seq-length"]
    parser = argparse.ArgumentParser()
    for flag in megatron_flags:
        parser.add_argument(flag)
    add_dbsp_args(parser)
    assert parser.parse_args([]).context_parallel_size is None
