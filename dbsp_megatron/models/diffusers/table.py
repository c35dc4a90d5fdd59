"""What a transformer of diffusers is made of, as far as sequence parallelism is concerned: one table per model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dbsp_megatron.models.diffusers.processor import SequenceParallelProcessor
from dbsp_megatron.models.diffusers.tokens import Stream, TokenCounts, TokenStreams


@dataclass(frozen=True, kw_only=True)
class SplitInput:
    """A rank keeps its own tokens of an argument; tuples and lists of tensors are split one by one, None is left."""

    module: str
    """Path of the module in the transformer; empty for the transformer itself."""
    argument: str
    """Name of the argument of its forward."""
    dim: int
    """Token dim."""
    tokens: Stream
    """What its rows stand for."""
    only_dims: int | None = None
    """Split it only if it has that many dims; such an argument cannot be empty."""


@dataclass(frozen=True, kw_only=True)
class SplitOutput:
    """A rank keeps its own tokens of what a module returns: a tensor, or tensors in a tuple."""

    module: str
    """Path of the module in the transformer."""
    dim: int
    """Token dim."""
    tokens: Stream
    """What its rows stand for."""
    never_empty: bool = False
    """A rank without tokens of this kind keeps the first row in their place, which its processors leave out."""


@dataclass(frozen=True, kw_only=True)
class GatherOutput:
    """What a module returns for a rank's tokens becomes whole again on every rank."""

    module: str
    """Path of the module in the transformer."""
    dim: int
    """Token dim."""
    tokens: Stream
    """What its rows stand for."""


@dataclass(frozen=True, kw_only=True)
class TransformerTable:
    """How one class of transformers is split."""

    class_name: str
    """Class in diffusers."""
    block_lists: tuple[str, ...]
    """Attributes that hold the blocks, in the order in which they run."""
    attention: str
    """Attribute of a block that holds its attention over the sequence."""
    stock_processors: tuple[str, ...]
    """Classes of attention processors whose computation ours takes over."""
    processor: type[SequenceParallelProcessor]
    """Ours."""
    splits: tuple[SplitInput | SplitOutput, ...]
    """Where whole tensors become a rank's."""
    gather: GatherOutput
    """Where the result becomes whole."""
    measure: Callable[[Any, Mapping[str, Any], bool], TokenCounts]
    """Sizes of the sequence from the transformer, the arguments of its forward by name and whether the grid is needed;
    ValueError for what cannot be split."""
    enter_block: Callable[[Arguments, TokenStreams], None] | None = None
    """Changes arguments of a block that count tokens."""
    differentiable: tuple[str, ...] = ("hidden_states", "encoder_hidden_states")
    """Arguments that may need a gradient."""
    batched: tuple[str, ...]
    """Arguments whose first dim is the batch, where it is not 1."""

    def block_paths(self, transformer: nn.Module) -> dict[str, nn.Module]:
        """All blocks by path, in the order in which they run."""
        return {f"{name}.{i}": block for name in self.block_lists for i, block in enumerate(getattr(transformer, name))}

    def blocks(self, transformer: nn.Module) -> list[nn.Module]:
        """All blocks, in the order in which they run."""
        return list(self.block_paths(transformer).values())

    def attentions(self, transformer: nn.Module) -> list[Any]:
        """The attention over the sequence of each block; its place is its layer index."""
        return [getattr(block, self.attention) for block in self.blocks(transformer)]


class Arguments:
    """Arguments of a forward call by name; each stays positional or named as it was given.

    Args:
        module: whose forward is called; hooks of others may have replaced that of the object, so its class is asked.
        args: positional ones.
        kwargs: named ones.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        names = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD]
        self._index = {name: i for i, name in enumerate(names[: len(args)])}
        self.args, self.kwargs = list(args), dict(kwargs)

    def get(self, name: str) -> Any:
        """The argument, or None where it was not given."""
        return self.args[self._index[name]] if name in self._index else self.kwargs.get(name)

    def replace(self, name: str, value: Any) -> None:
        """Another value for an argument that was given."""
        if name in self._index:
            self.args[self._index[name]] = value
        else:
            self.kwargs[name] = value

    def by_name(self) -> dict[str, Any]:
        """All of them."""
        return {**{name: self.args[i] for name, i in self._index.items()}, **self.kwargs}


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with each of its tensors changed: a tensor, a tuple or list of values, or anything else as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(x, change) for x in value)
    return value
