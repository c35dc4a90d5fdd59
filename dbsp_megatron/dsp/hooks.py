"""Stages by module name: hooks that switch before them, installed after a dry run and taken off again.

The model's code stays as it is. It has to be free of lengths of the grid: what it reads from shapes are this rank's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from dbsp_megatron.compat import in_backward
from dbsp_megatron.dsp.fake_call import call_on_shapes
from dbsp_megatron.dsp.mesh import DspMesh
from dbsp_megatron.dsp.patterns import parse
from dbsp_megatron.dsp.run import DspRun
from dbsp_megatron.dsp.session import DspSession
from dbsp_megatron.dsp.specs import Boundary, StageSpec, find_modules, find_stages
from dbsp_megatron.dsp.stages import Stage

_installed: WeakKeyDictionary[nn.Module, Parallelized] = WeakKeyDictionary()


class Parallelized:
    """A model whose stages switch; undone by `remove`, or at the end of a `with`.

    Attributes:
        model: the model.
        session: its stages and plans.
    """

    def __init__(
        self,
        model: nn.Module,
        session: DspSession,
        stages: Mapping[str, tuple[nn.Module, StageSpec]],
        entries: Sequence[Boundary],
        exits: Sequence[Boundary],
    ) -> None:
        self.model, self.session = model, session
        self._run: DspRun | None = None
        self._recomputed: DspRun | None = None
        self._calls: Counter[str] = Counter()
        self._call_of: dict[str, str] = {}
        self._handles: list[Any] = [model.register_forward_pre_hook(self._begin)]
        for boundaries, hook in ((entries, self._enter), (exits, self._leave)):
            for boundary in boundaries:
                for _, module in find_modules(model, boundary.modules):
                    self._install(module, boundary, hook)
        for name, (module, spec) in stages.items():
            before, after = self._stage_hooks(name, spec)
            self._handles += [module.register_forward_pre_hook(before, with_kwargs=True)]
            if spec.branch:
                self._handles += [module.register_forward_hook(after)]
        # Last, so that an exit of the model itself still finds the pass.
        self._handles += [model.register_forward_hook(self._end, always_call=True)]
        _installed[model] = self

    @property
    def run(self) -> DspRun:
        """The pass that calls belong to: in a backward pass that recomputes, the forward pass it belongs to.

        Raises:
            ValueError: the model is not running.
        """
        run = self._recomputed if in_backward() else self._run
        if run is None:
            raise ValueError(
                "dsp: a stage or boundary runs outside a forward pass of the parallelized model, or before its entry: "
                "call the model itself, and declare as entry the first place that the stream passes"
            )
        return run

    def remove(self) -> None:
        """Take the hooks off; the model is as before."""
        while self._handles:
            self._handles.pop().remove()
        if _installed.get(self.model) is self:
            del _installed[self.model]

    def __reduce_ex__(self, _: Any) -> Any:
        # Hooks of a copy would switch with the state of this one.
        raise ValueError(
            "dsp: a parallelized model can be neither copied nor pickled as a whole: copy it before dsp.parallelize or "
            "after remove(), or take its state_dict()"
        )

    def __enter__(self) -> Parallelized:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _install(self, module: nn.Module, boundary: Boundary, hook: Callable[[Boundary, Tensor], Tensor]) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            try:
                _argument(args, kwargs, boundary.arg)
            except ValueError as error:
                if self._run is None and not in_backward():
                    # Other ranks are about to begin a pass, and must hear of it.
                    self.session.run({}, problem=str(error))
                raise
            return _replace_arg(args, kwargs, boundary.arg, lambda x: hook(boundary, x))

        def after(_: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            return _replace_result(out, boundary.result, lambda x: hook(boundary, x))

        if boundary.at == "input":
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        else:
            self._handles.append(module.register_forward_hook(after))

    def _begin(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if not in_backward():
            self._run = None
            self._calls.clear()

    def _enter(self, boundary: Boundary, x: Tensor) -> Tensor:
        if self._run is None and not in_backward():
            self._run = begin_pass(self.session, x, boundary.tensor)
        return self.run.enter(x, boundary.tensor, grad=boundary.grad or "partial")

    def _leave(self, boundary: Boundary, x: Tensor) -> Tensor:
        return self.run.leave(x, boundary.tensor, grad=boundary.grad or "whole")

    def _end(self, model: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        run = self._run
        if run is None or in_backward():
            return
        run.close(failed=out is None)
        self._run = None

        def note(_: Tensor) -> None:
            # The gradient comes through here before anything of this pass is recomputed, so that passes of other
            # lengths may lie in between.
            self._recomputed = run

        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(note)

    def _stage_hooks(self, name: str, spec: StageSpec) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            run = self.run
            call = self._call_of[name] = self._call_name(name, run)
            enter = run.into if spec.branch else run.stage
            args, kwargs = _replace_arg(args, kwargs, spec.arg, lambda x: enter(call, x, spec.tensor, needs=spec.needs))
            for arg, pattern in spec.sliced.items():
                args, kwargs = _replace_arg(args, kwargs, arg, partial(run.slice, pattern=pattern, stage=call))
            return args, kwargs

        def after(_: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            return _replace_result(out, spec.result, lambda x: self.run.back(self._call_of[name], x, spec.tensor))

        return before, after

    def _call_name(self, name: str, run: DspRun) -> str:
        if in_backward():
            if not run.same_layouts(calls := [call for call in run.entered if _is_call(call, name)]):
                raise ValueError(
                    f"dsp: module {name!r} was called {len(calls)} times with different layouts and is recomputed: use "
                    "a module for each call, or keep its activations"
                )
            return name
        self._calls[name] += 1
        return name if self._calls[name] == 1 else f"{name}:{self._calls[name]}"


def parallelize(
    model: nn.Module,
    mesh: DspMesh,
    *,
    grid: Sequence[str],
    entries: Sequence[Boundary],
    example: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None = None,
    stages: Sequence[StageSpec] = (),
    exits: Sequence[Boundary] = (),
    cut: Sequence[str] | None = None,
    fake: bool = True,
    check_stages: bool = False,
) -> Parallelized:
    """Let a model run on parts: find its stages in a dry run, plan, and install hooks.

    Args:
        model: the model, equal on all ranks; its code is not changed.
        mesh: the ranks.
        grid: names of the sequence dims.
        entries: where the stream (and other inputs with its dims) is cut; the first that is passed begins the pass.
        example: arguments of a call of the model, of any lengths.
        example_kwargs: named arguments of that call.
        stages: modules that read dims as a whole, beside those marked by `@dsp.stage`.
        exits: where it is put together; none if the loss is computed on parts.
        cut: names of the dims that may be cut; all of the grid if None.
        fake: make the dry run without computing; False computes it, for kernels that cannot be run on shapes alone.
        check_stages: see `DspSession`.

    Returns:
        A handle: `remove()` takes all of it back.

    Raises:
        ValueError: specs fit no module, the model is parallelized already, or no plan exists for the example.
    """
    if model in _installed:
        raise ValueError("the model is parallelized already: call remove() on its handle first")
    found = find_stages(model, tuple(stages))
    session = DspSession(mesh, grid, cut=cut, check_stages=check_stages)
    recorded, lengths = dry_run(model, found, entries, session.grid, example, example_kwargs or {}, fake=fake)
    session.set_stages(recorded)
    session.plan(lengths)
    return Parallelized(model, session, found, entries, exits)


def installed(model: nn.Module) -> Parallelized | None:
    """The handle of a parallelized model."""
    return _installed.get(model)


def grid_lengths(x: Tensor, pattern: str, grid: Sequence[str]) -> dict[str, int]:
    """Lengths of the grid from a whole tensor.

    Raises:
        ValueError: the pattern does not show each of them alone.
    """
    groups = parse(pattern).groups
    if missing := [name for name in grid if (name,) not in groups]:
        raise ValueError(
            f"dsp: entry {pattern!r} does not show the length of {missing}: begin where every dim of the grid "
            f"{list(grid)} is a dim of its own"
        )
    if x.dim() != len(groups):
        raise ValueError(f"dsp: entry {pattern!r} names {len(groups)} dims, got {list(x.shape)}: name each dim")
    return {name: int(x.shape[groups.index((name,))]) for name in grid}


@torch.compiler.disable
def begin_pass(session: DspSession, x: Tensor, pattern: str) -> DspRun:
    """Begin a pass with the lengths of a whole tensor.

    Raises:
        ValueError: on every rank: its pattern does not fit on one of them, or ranks differ.
    """
    try:
        lengths = grid_lengths(x, pattern, session.grid)
    except ValueError as error:
        return session.run({}, problem=str(error))
    return session.run(lengths, facts={"dtype": x.dtype, "shape": list(x.shape)})


def dry_run(
    model: nn.Module,
    found: Mapping[str, tuple[nn.Module, StageSpec]],
    entries: Sequence[Boundary],
    grid: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    fake: bool,
) -> tuple[list[Stage], dict[str, int]]:
    """(stages in the order of their calls, lengths of the grid) of one call on whole tensors."""
    calls: Counter[str] = Counter()
    recorded: list[Stage] = []
    lengths: dict[str, int] = {}
    handles: list[Any] = []

    def stage_hook(name: str, spec: StageSpec) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[name] += 1
            x = _argument(args, kwargs, spec.arg)
            points = 1
            for dim in set(grid) & set(parse(spec.tensor).names):
                points *= lengths.get(dim, 1)
            recorded.append(
                Stage(
                    name=name if calls[name] == 1 else f"{name}:{calls[name]}",
                    needs=spec.needs,
                    branch=spec.branch,
                    stream_bytes=max(1, x.numel() * x.element_size() // max(1, points)),
                    rate=spec.rate,
                    time_ns=spec.time_ns,
                )
            )

        return hook

    def note(boundary: Boundary, x: Tensor) -> None:
        if not lengths:
            lengths.update(grid_lengths(x, boundary.tensor, grid))

    try:
        for boundary in entries:
            for _, module in find_modules(model, boundary.modules):
                if boundary.at == "input":
                    handles.append(
                        module.register_forward_pre_hook(
                            lambda _, a, k, b=boundary: note(b, _argument(a, k, b.arg)), with_kwargs=True
                        )
                    )
                else:
                    handles.append(
                        module.register_forward_hook(
                            lambda _, a, out, b=boundary: note(b, out if b.result is None else out[b.result])
                        )
                    )
        for name, (module, spec) in found.items():
            handles.append(module.register_forward_pre_hook(stage_hook(name, spec), with_kwargs=True))
        _call(model, args, kwargs, fake=fake)
    finally:
        for handle in handles:
            handle.remove()
    if not lengths or not recorded:
        what = "entry" if not lengths else "stage"
        raise ValueError(f"dsp: the dry run passed no {what}: declare modules that the example call goes through")
    return recorded, lengths


def _call(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, fake: bool) -> None:
    if not fake:
        with torch.no_grad():
            model(*args, **kwargs)
        return

    def call(mode: FakeTensorMode) -> None:
        def convert(x: Any) -> Any:
            return mode.from_tensor(x) if isinstance(x, Tensor) else x

        with mode, torch.no_grad():
            model(*tree_map(convert, tuple(args)), **tree_map(convert, dict(kwargs)))

    call_on_shapes(model, call, "dsp.parallelize")


def _is_call(call: str, name: str) -> bool:
    return call == name or (call.startswith(f"{name}:") and call[len(name) + 1 :].isdigit())


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], arg: int | str) -> Tensor:
    found = kwargs.get(arg) if isinstance(arg, str) else (args[arg] if -len(args) <= arg < len(args) else None)
    if not isinstance(found, Tensor):
        raise ValueError(
            f"dsp: argument {arg!r} is not a tensor in a call with {len(args)} unnamed arguments and {sorted(kwargs)}: "
            "name it in arg= as the model passes it"
        )
    return found


def _replace_arg(
    args: tuple[Any, ...], kwargs: dict[str, Any], arg: int | str, change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = change(_argument(args, kwargs, arg))
    if isinstance(arg, str):
        return args, {**kwargs, arg: x}
    at = arg % len(args)
    return (*args[:at], x, *args[at + 1 :]), kwargs


def _replace_result(out: Any, result: int | None, change: Callable[[Tensor], Tensor]) -> Any:
    if result is None:
        return change(out)
    items = list(out)
    items[result] = change(items[result])
    return tuple(items)
