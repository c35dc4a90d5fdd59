"""What a user declares about a model: which modules are stages, and where the sequence enters and leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal, TypeVar

from torch import nn

from dbsp_megatron.dsp.patterns import parse
from dbsp_megatron.dsp.primitives import GradKind, check_grad_kind

_Module = TypeVar("_Module", bound=type[nn.Module])


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """Modules that read some dims as a whole.

    Raises:
        ValueError: the pattern cannot be read or lacks a dim that is needed.
    """

    modules: str = ""
    """Names of the modules, part by part with wildcards, such as "blocks.*.temporal"; "" is the model itself."""
    needs: frozenset[str] = frozenset()
    """Dims that they read as a whole."""
    tensor: str = "B T S C"
    """Pattern of the tensor that they take and return."""
    arg: int | str = 0
    """Which argument that is, by number or name."""
    result: int | None = None
    """Its place in a tuple that they return; None if they return the tensor itself."""
    branch: bool = False
    """Whether they compute a branch, see `Stage.branch`."""
    sliced: Mapping[int | str, str] = field(default_factory=dict)
    """Patterns of arguments that are given whole and are to be cut as the stage computes (masks, tables)."""
    rate: float = 1.0
    """See `Stage.rate`."""
    time_ns: float = 0.0
    """See `Stage.time_ns`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", frozenset(self.needs))
        names = parse(self.tensor).names
        if missing := sorted(self.needs - set(names)):
            raise ValueError(f"stage {self.modules!r} needs {missing}, expected names of its tensor {self.tensor!r}")


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Where a tensor that all ranks hold becomes the cut stream, or the other way round."""

    modules: str = ""
    """Name of the module, as in `StageSpec`."""
    tensor: str = "B T S C"
    """Pattern of the tensor."""
    at: Literal["input", "output"] = "input"
    """Before or after the module: cut before an embedding, so that each rank embeds its own part."""
    arg: int | str = 0
    """Which argument it is (at the input), by number or name."""
    result: int | None = None
    """Its place in a tuple (at the output); None for the tensor itself."""
    grad: GradKind | None = None
    """Gradient on the side that all ranks hold, see `primitives`. None is as in `DspRun.enter` and `leave`: of an entry
    `partial`, to be summed over the ranks with those of parameters before it; of an exit `whole`, as all ranks compute
    the same loss."""

    def __post_init__(self) -> None:
        parse(self.tensor)
        if self.at not in ("input", "output"):
            raise ValueError(f"boundary {self.modules!r}: at={self.at!r} is unknown: use 'input' or 'output'")
        if self.grad is not None:
            check_grad_kind(f"boundary {self.modules!r}", self.grad)


def stage(
    *, needs: set[str] | frozenset[str], tensor: str = "B T S C", branch: bool = False
) -> Callable[[_Module], _Module]:
    """Class decorator that declares a module class as a stage, as a `StageSpec` does by name.

    Args:
        needs: dims that it reads as a whole.
        tensor: pattern of its first argument and of what it returns.
        branch: whether it computes a branch.
    """
    spec = StageSpec(needs=frozenset(needs), tensor=tensor, branch=branch)

    def mark(cls: _Module) -> _Module:
        cls.dsp_stage = spec  # type: ignore[attr-defined]
        return cls

    return mark


def matches(name: str, pattern: str) -> bool:
    """Whether a module name fits, part by part: a wildcard does not cross a dot."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def find_modules(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules by name.

    Raises:
        ValueError: none fits.
    """
    found = [(name, module) for name, module in model.named_modules() if matches(name, pattern)]
    if not found:
        some = [name for name, _ in model.named_modules()][1:7]
        raise ValueError(f"no module is called {pattern!r}; there are {some} ...: write each part between dots, or *")
    yield from found


def find_stages(model: nn.Module, specs: tuple[StageSpec, ...]) -> dict[str, tuple[nn.Module, StageSpec]]:
    """Stage modules by name: those that specs name, and those whose class is marked.

    Raises:
        ValueError: a spec names no module, two name the same, one stage lies inside another, or there is none.
    """
    found: dict[str, tuple[nn.Module, StageSpec]] = {}
    for spec in specs:
        for name, module in find_modules(model, spec.modules):
            if name in found:
                raise ValueError(f"module {name!r} is named by two stage specs: let each name its own modules")
            found[name] = module, spec
    for name, module in model.named_modules():
        mark = getattr(type(module), "dsp_stage", None)
        if isinstance(mark, StageSpec) and name not in found:
            found[name] = module, replace(mark, modules=name)
    if not found:
        raise ValueError("no stage: pass stages=[StageSpec(...)], or mark module classes with @dsp.stage")
    for name in found:
        for other in found:
            if name != other and (not name or other.startswith(f"{name}.")):
                raise ValueError(f"stage {other!r} lies inside stage {name!r}: declare the outer or the inner one")
    return found
