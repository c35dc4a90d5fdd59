"""What may stand between two stages of a traced graph: operations that work entry by entry of the grid.

Anything else is refused, as on a part it would give a finite wrong answer (a softmax over what is left of a dim) or the
right answer by chance of the example's shapes (a transposition of equal lengths).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx, nn

from dbsp_megatron.dsp.patterns import Pattern

# fmt: off
FUNCTIONS = frozenset(
    (
        "abs", "add", "and_", "bfloat16", "celu", "clamp", "clone", "contiguous", "cos", "detach", "div",
        "double", "dropout", "elu", "eq", "exp", "expm1", "float", "floordiv", "ge", "gelu", "gt", "half",
        "hardswish", "invert", "isfinite", "le", "leaky_relu", "log", "log1p", "logical_and",
        "logical_not", "logical_or", "lt", "masked_fill", "maximum", "minimum", "mish", "mod", "mul", "ne",
        "neg", "or_", "pow", "reciprocal", "relu", "requires_grad_", "rsqrt", "sigmoid", "silu", "sin",
        "softplus", "sqrt", "square", "sub", "tanh", "to", "truediv", "type", "type_as", "where",
    )
)
# fmt: on
"""Functions and methods by name."""
ALONG_DIM = {"cat": 1, "chunk": 2, "split": 2, "unbind": 1, "softmax": 1, "log_softmax": 1, "layer_norm": None}
"""Those that are so if their dim is not one of the grid: place of the dim among their arguments."""
MODULES = (
    nn.Identity,
    nn.Dropout,
    nn.GELU,
    nn.SiLU,
    nn.ReLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.ELU,
    nn.LeakyReLU,
    nn.Mish,
    nn.Softplus,
)
"""Modules."""


def is_entrywise(
    node: fx.Node, module: nn.Module, pattern: Pattern, grid: Collection[str], extra: Collection[str]
) -> bool:
    """Whether a node works entry by entry.

    Args:
        node: a call.
        module: the model that was traced.
        pattern: of the stream.
        grid: names of the sequence dims.
        extra: further names of functions or modules that the user knows to be so.
    """
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        if str(node.target) in extra:
            return True
        norms = isinstance(called, nn.LayerNorm | nn.RMSNorm)
        if norms or isinstance(called, nn.Linear):
            # Over the last dim alone.
            one = not norms or len(called.normalized_shape) == 1  # type: ignore[arg-type]
            return one and not set(pattern.groups[-1]) & set(grid)
        return isinstance(called, MODULES)
    name = str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", node.target))
    plain = name.removeprefix("i") if name.startswith("i") and name not in FUNCTIONS else name
    if plain == "linear" and name not in extra:
        return not set(pattern.groups[-1]) & set(grid)
    if plain in FUNCTIONS or name in extra or name in ("size", "dim", "numel"):
        return True
    if name == "getitem":
        return _keeps_grid(node.args[1], pattern, grid)
    if name not in ALONG_DIM:
        return False
    return _dim_is_free(node, name, pattern, grid)


def _keeps_grid(index: Any, pattern: Pattern, grid: Collection[str]) -> bool:
    """An item of a tuple, or a slice that takes all of every grid dim."""
    if isinstance(index, int | str):
        return True
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(pattern.groups) - len(items) + 1)
    return all(
        item == slice(None) or not set(group) & set(grid) for item, group in zip(items, pattern.groups, strict=False)
    )


def _dim_is_free(node: fx.Node, name: str, pattern: Pattern, grid: Collection[str]) -> bool:
    place = ALONG_DIM[name]
    if place is None:
        shape = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape")
        return isinstance(shape, tuple | list) and len(shape) == 1 and not set(pattern.groups[-1]) & set(grid)
    dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    if not isinstance(dim, int) or not -len(pattern.groups) <= dim < len(pattern.groups):
        return False
    return not set(pattern.groups[dim]) & set(grid)
