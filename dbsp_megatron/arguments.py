"""Command-line flags for training scripts in the style of Megatron-LM (`extra_args_provider`)."""

from __future__ import annotations

import argparse
from typing import Any, Literal

from dbsp_megatron.masks import METHODS, MaskConfig
from dbsp_megatron.strategy import SequenceParallelConfig

_MASK_FLAGS: dict[str, tuple[str, type, str, str]] = {
    "top_p": (
        "--sp-top-p",
        float,
        "P",
        "topp, sparge: share of the estimated attention weight to keep in each row of blocks; sparge also takes one "
        "for each head",
    ),
    "density": (
        "--sp-mask-density",
        float,
        "D",
        "topk, vsa, sparse_videogen: share of blocks, or of token pairs, to keep",
    ),
    "min_blocks": ("--sp-min-blocks", int, "N", "topp, topk, sparge, vsa: blocks that each row keeps at least"),
    "similarity": (
        "--sp-mask-similarity",
        float,
        "X",
        "sparge: blocks less alike inside than this are always computed",
    ),
    "sample_rows": ("--sp-mask-sample-rows", int, "N", "sparse_videogen: query tokens that decide the kind of a head"),
    "tile": ("--sp-mask-tile", int, "T H W", "sliding_tile: tokens of a tile"),
    "window": (
        "--sp-mask-window",
        int,
        "N",
        "sliding_tile: three odd numbers, tiles of the window along T, H and W; several windows go to heads in turn",
    ),
    "width": ("--sp-mask-width", float, "X", "radial: factor on the width of its windows"),
    "sink_frames": (
        "--sp-mask-sink-frames",
        int,
        "N",
        "radial, sparse_videogen: first frames that every token attends",
    ),
    "global_heads": ("--sp-mask-global-heads", int, "HEAD", "duo: heads that are dense"),
    "sink_tokens": ("--sp-mask-sink-tokens", int, "N", "duo: first tokens that local heads attend"),
    "window_tokens": ("--sp-mask-window-tokens", int, "N", "duo: distance up to which local heads attend"),
    "path": ("--sp-mask-path", str, "FILE", "file, paro: saved masks"),
    "cube": ("--sp-mask-cube", int, "T H W", "tokens of the model input come cube by cube, of this size"),
    "dense_layers": ("--sp-dense-layers", int, "N", "first layers that stay dense"),
    "dense_steps": ("--sp-dense-steps", int, "N", "first steps that stay dense"),
    "ramp": (
        "--sp-mask-ramp",
        str,
        "NAME",
        "linear or cosine: density falls from 1 to its value after the dense steps",
    ),
    "ramp_steps": ("--sp-mask-ramp-steps", int, "N", "steps of the ramp"),
}
"""Fields of MaskConfig (all but the method): flag, type, metavar and help."""
_SEVERAL = {"top_p": "+", "window": "+", "global_heads": "*"}
"""Fields whose flag takes any number of values."""


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
    group.add_argument(
        "--sp-calibration",
        default=sp.calibration,
        metavar="FILE",
        help="strategy 'auto': what tools/fit_latency.py measured on this machine; default: rates of one H200 node",
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
    group.add_argument("--sp-mask", default=mask.method, metavar="NAME", help=f"mask method: {', '.join(METHODS)}")
    for key, (flag, kind, metavar, text) in _MASK_FLAGS.items():
        count = len(metavar.split()) if " " in metavar else None
        group.add_argument(
            flag,
            dest=f"sp_mask_{key}",
            type=kind,
            nargs=_SEVERAL.get(key, count),
            default=getattr(mask, key),
            metavar=metavar if count is None else tuple(metavar.split()),
            help=text,
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
        calibration=args.sp_calibration,
        verify_steps=args.sp_verify,
    )


def mask_config_from_args(args: argparse.Namespace) -> MaskConfig:
    """Build the mask config from parsed `--sp-*` flags.

    Raises:
        ValueError: a value breaks a rule of the config.
    """
    settings: dict[str, Any] = {}
    for key in _MASK_FLAGS:
        given = getattr(args, f"sp_mask_{key}")
        settings[key] = tuple(given) if isinstance(given, list) else given
    share, window = settings["top_p"], settings["window"]
    if share is not None and len(share) == 1:
        settings["top_p"] = share[0]
    if window is not None and len(window) > 3 and len(window) % 3 == 0:
        settings["window"] = tuple(window[first : first + 3] for first in range(0, len(window), 3))
    return MaskConfig(method=args.sp_mask, **settings)


def _degree(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number of ranks or 'auto', got {text!r}") from None
