"""Command-line flags for training scripts in the style of Megatron-LM (`extra_args_provider`)."""

from __future__ import annotations

import argparse
from typing import Literal

from dbsp_megatron.masks import MaskConfig
from dbsp_megatron.strategy import SequenceParallelConfig


def add_dbsp_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--sp-*` flags to a parser, with the defaults of the configs they end up in.

    The values are checked when the configs are built, so that flags, YAML files and code share one set of rules.

    Args:
        parser: parser to extend, for instance Megatron's; none of the flags is one of Megatron's own.

    Returns:
        The same parser, as Megatron expects from an `extra_args_provider`.
    """
    sp = SequenceParallelConfig()
    mask = MaskConfig()

    group = parser.add_argument_group("dual-balanced sequence parallelism")
    group.add_argument(
        "--sp-strategy", default=sp.strategy, metavar="NAME", help="none, ulysses, ring, usp, dbsp, dsp or auto"
    )
    group.add_argument(
        "--ulysses-degree",
        type=_degree,
        default=sp.ulysses_degree,
        metavar="N",
        help="ranks that exchange heads by all-to-all, or auto",
    )
    group.add_argument(
        "--ring-degree",
        type=_degree,
        default=sp.ring_degree,
        metavar="N",
        help="ranks that pass K/V around a ring, or auto; times --ulysses-degree it is the context-parallel size",
    )
    group.add_argument(
        "--sp-head-policy", default=sp.head_policy, metavar="NAME", help="how heads are given to Ulysses ranks"
    )
    group.add_argument(
        "--sp-block-policy", default=sp.block_policy, metavar="NAME", help="how token blocks are given to ring ranks"
    )
    group.add_argument(
        "--sp-reward",
        type=float,
        default=sp.reward,
        metavar="X",
        help="bonus of block policy 'paper' for leaving a block where it is",
    )
    group.add_argument("--sp-engine", default=sp.engine, metavar="NAME", help="attention engine, or auto")
    group.add_argument(
        "--sp-plan-counts",
        default=sp.plan_counts,
        metavar="WHEN",
        help="plan a dynamic mask from the counts of the previous step (no stall) or of the current one",
    )
    group.add_argument(
        "--sp-memory-budget-mib",
        type=int,
        default=sp.memory_budget_mib,
        metavar="MIB",
        help="memory that the buffers of one attention layer may take on a rank; default: no limit",
    )
    group.add_argument(
        "--sp-verify",
        type=int,
        default=sp.verify_steps,
        metavar="N",
        help="compare attention and its gradients with a single-device computation in the first N steps",
    )

    group = parser.add_argument_group("block-sparse mask")
    group.add_argument("--sp-block-size", type=int, default=sp.block_size, metavar="N", help="tokens per mask block")
    group.add_argument("--sp-mask", default=mask.method, metavar="NAME", help="mask method")
    group.add_argument(
        "--sp-top-p",
        type=float,
        default=mask.top_p,
        metavar="P",
        help="method 'topp': share of the estimated attention weight to keep in each row of blocks, in (0, 1]",
    )
    group.add_argument(
        "--sp-min-blocks", type=int, default=mask.min_blocks, metavar="N", help="blocks that each row keeps at least"
    )
    group.add_argument(
        "--sp-dense-layers", type=int, default=mask.dense_layers, metavar="N", help="first layers that stay dense"
    )
    group.add_argument(
        "--sp-dense-steps", type=int, default=mask.dense_steps, metavar="N", help="first steps that stay dense"
    )
    return parser


def config_from_args(args: argparse.Namespace) -> SequenceParallelConfig:
    """Build the sequence-parallel config from parsed `--sp-*` flags.

    Raises:
        ValueError: a value breaks a rule of the config.
    """
    return SequenceParallelConfig(
        strategy=args.sp_strategy,
        ulysses_degree=args.ulysses_degree,
        ring_degree=args.ring_degree,
        head_policy=args.sp_head_policy,
        block_policy=args.sp_block_policy,
        reward=args.sp_reward,
        engine=args.sp_engine,
        block_size=args.sp_block_size,
        plan_counts=args.sp_plan_counts,
        memory_budget_mib=args.sp_memory_budget_mib,
        verify_steps=args.sp_verify,
    )


def mask_config_from_args(args: argparse.Namespace) -> MaskConfig:
    """Build the mask config from parsed `--sp-*` flags.

    Raises:
        ValueError: a value breaks a rule of the config.
    """
    return MaskConfig(
        method=args.sp_mask,
        top_p=args.sp_top_p,
        min_blocks=args.sp_min_blocks,
        dense_layers=args.sp_dense_layers,
        dense_steps=args.sp_dense_steps,
    )


def _degree(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number of ranks or 'auto', got {text!r}") from None
