"""Rules that say which of our tensors are made of which of another model's, and how, in both directions.

A rule only moves numbers, so that what it makes is undone bit by bit. It also works on meta tensors: expected shapes of
the other model follow from ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Transform = Callable[[Sequence[Tensor]], Sequence[Tensor]]
PARTS = ("weight", "bias")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Some of our tensors and the tensors of the other model that hold the same numbers."""

    ours: tuple[str, ...]
    """Parameter names of `VideoDiT`."""
    theirs: tuple[str, ...]
    """Names in the other model."""
    to_ours: Transform
    """Makes ours from theirs, each in the order of the names."""
    to_theirs: Transform
    """The inverse."""


def same(ours: str, theirs: str) -> Rule:
    """One tensor under two names."""
    return Rule(ours=(ours,), theirs=(theirs,), to_ours=list, to_theirs=list)


def same_layer(ours: str, theirs: str) -> list[Rule]:
    """Weight and bias of a layer under two names."""
    return [same(f"{ours}.{part}", f"{theirs}.{part}") for part in PARTS]


def reshaped(ours: str, theirs: str, our_shape: Sequence[int], their_shape: Sequence[int]) -> Rule:
    """The same numbers in the same order, in two shapes."""
    return Rule(
        ours=(ours,),
        theirs=(theirs,),
        to_ours=lambda tensors: [tensors[0].reshape(tuple(our_shape))],
        to_theirs=lambda tensors: [tensors[0].reshape(tuple(their_shape))],
    )


def by_head(ours: str, theirs: Sequence[str], head_dim: int) -> list[Rule]:
    """Separate projections as one whose rows are grouped by head: `(query, key, value)` of the first, and so on."""

    def join(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.stack([each.unflatten(0, (-1, head_dim)) for each in tensors], dim=1).flatten(0, 2)]

    def split(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        parts = tensors[0].unflatten(0, (-1, len(theirs), head_dim)).unbind(1)
        return [part.flatten(0, 1) for part in parts]

    return [
        Rule(
            ours=(f"{ours}.{part}",),
            theirs=tuple(f"{name}.{part}" for name in theirs),
            to_ours=join,
            to_theirs=split,
        )
        for part in PARTS
    ]


def halves(ours: tuple[str, str], theirs: str) -> Rule:
    """Two tensors that are the halves of one, along dim 1."""
    return Rule(
        ours=ours,
        theirs=(theirs,),
        to_ours=lambda tensors: tensors[0].chunk(2, dim=1),
        to_theirs=lambda tensors: [torch.cat(list(tensors), dim=1)],
    )


def channels_first(ours: str, theirs: str, num_voxels: int) -> list[Rule]:
    """A projection to patches whose rows are `(channel, voxel)` with us, and `(voxel, channel)` with them."""

    def rows(tensors: Sequence[Tensor], first: int) -> Sequence[Tensor]:
        return [tensors[0].unflatten(0, (first, -1)).transpose(0, 1).flatten(0, 1)]

    return [
        Rule(
            ours=(f"{ours}.{part}",),
            theirs=(f"{theirs}.{part}",),
            to_ours=lambda tensors: rows(tensors, num_voxels),
            to_theirs=lambda tensors: rows(tensors, tensors[0].shape[0] // num_voxels),
        )
        for part in PARTS
    ]


def their_tensors(rules: Sequence[Rule], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The other model's tensors by name, or what they will be like.

    Args:
        rules: All rules of a model.
        ours: All our tensors; meta ones give meta ones, with shape and dtype.

    Raises:
        ValueError: A tensor of ours is in no rule, or in two.
    """
    uses = Counter(name for rule in rules for name in rule.ours)
    odd = sorted({name for name, count in uses.items() if count > 1} | set(uses) ^ set(ours))
    if odd:
        raise ValueError(f"every tensor must be in one rule; not so {describe_names(odd)}")
    made: dict[str, Tensor] = {}
    for rule in rules:
        made.update(zip(rule.theirs, rule.to_theirs([ours[name] for name in rule.ours]), strict=True))
    return made


def check_shapes(found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]], where: str) -> None:
    """Refuse tensors that are missing, unknown or of another shape.

    Args:
        found: Shapes of what there is, by name.
        expected: Shapes of what there must be.
        where: What holds them.

    Raises:
        ValueError: They differ; it names the tensors.
    """
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    if missing or unknown:
        faults = [f"lacks {describe_names(missing)}"] if missing else []
        faults += [f"has {describe_names(unknown)}, which this model has no place for"] if unknown else []
        raise ValueError(f"{where} {' and '.join(faults)}. Its configuration must be that of its weights")
    wrong = [name for name in expected if tuple(found[name]) != tuple(expected[name])]
    if wrong:
        first = wrong[0]
        others = f" ({len(wrong) - 1} others do not fit either)" if len(wrong) > 1 else ""
        raise ValueError(
            f"{where}: {first} must have the shape {list(expected[first])} by the configuration; got "
            f"{list(found[first])}{others}. Its configuration must be that of its weights"
        )


def describe_names(names: Sequence[str], at_most: int = 4) -> str:
    """Some names and how many more there are."""
    shown = ", ".join(names[:at_most])
    return shown if len(names) <= at_most else f"{shown} and {len(names) - at_most} more"
