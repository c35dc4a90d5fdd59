"""Stages in a traced graph: switches as nodes, put where the fewest bytes of the stream are alive between two stages.

torch.fx traces the model with stages as leaves. Everything that depends on the stream must have its shape, so that
what is computed between stages works entry by entry; between two stages all of it is switched at one place.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.shape_prop import ShapeProp, TensorMetadata

from dbsp_megatron.dsp.entrywise import is_entrywise
from dbsp_megatron.dsp.fake_call import call_on_shapes
from dbsp_megatron.dsp.hooks import begin_pass, grid_lengths
from dbsp_megatron.dsp.mesh import DspMesh
from dbsp_megatron.dsp.patterns import Pattern, parse
from dbsp_megatron.dsp.run import DspRun
from dbsp_megatron.dsp.session import DspSession
from dbsp_megatron.dsp.specs import StageSpec, find_stages
from dbsp_megatron.dsp.stages import Stage

BEGIN = "dsp_begin"
"""Name of the submodule that begins a pass."""


class DspBegin(nn.Module):
    """Begins a pass with the lengths of the first entry; a module, so that a graph can hold the session."""

    def __init__(self, session: DspSession, pattern: str) -> None:
        super().__init__()
        self.session, self.pattern = session, pattern

    def forward(self, x: Tensor) -> DspRun:
        """Begin."""
        return begin_pass(self.session, x, self.pattern)


def dsp_enter(run: DspRun, x: Tensor, pattern: str) -> Tensor:
    """Cut an entry."""
    return run.enter(x, pattern)


def dsp_switch(run: DspRun, name: str, pattern: str, *xs: Tensor) -> list[Tensor]:
    """Bring all of the stream that is alive to the layout of a stage."""
    return run.stage_all(name, xs, pattern)


def dsp_into(run: DspRun, name: str, pattern: str, x: Tensor) -> Tensor:
    """Bring a branch to the layout of its stage."""
    return run.into(name, x, pattern)


def dsp_back(run: DspRun, name: str, pattern: str, x: Tensor) -> Tensor:
    """Bring a branch back."""
    return run.back(name, x, pattern)


def dsp_slice(run: DspRun, x: Tensor, pattern: str, stage: str) -> Tensor:
    """Cut a side input of a stage."""
    return run.slice(x, pattern, stage)


def dsp_leave(run: DspRun, x: Tensor, pattern: str) -> Tensor:
    """Put an output together."""
    return run.leave(x, pattern)


class _StageTracer(fx.Tracer):
    """Traces everything but stages and modules of torch."""

    def __init__(self, stages: frozenset[str]) -> None:
        super().__init__()
        self._stages = stages

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is called as it is."""
        return module_qualified_name in self._stages or super().is_leaf_module(m, module_qualified_name)


def trace(
    model: nn.Module,
    mesh: DspMesh,
    *,
    grid: Sequence[str],
    entries: Mapping[str, str],
    example: Mapping[str, Any],
    tensor: str = "B T S C",
    stages: Sequence[StageSpec] = (),
    gather: bool = False,
    cut: Sequence[str] | None = None,
    entrywise: Sequence[str] = (),
) -> fx.GraphModule:
    """A model that runs on parts, as a graph with switches; the model itself is not changed and shares its parameters.

    Args:
        model: traceable by torch.fx but for its stages.
        mesh: the ranks.
        grid: names of the sequence dims.
        entries: pattern of every argument of the model that is to be cut, by its name; the first begins the pass.
        example: arguments by name, of any lengths; nothing is computed.
        tensor: pattern of the stream.
        stages: modules that read dims as a whole, beside those marked by `@dsp.stage`.
        gather: put outputs that are parts of the stream together; else each rank returns its part.
        cut: names of the dims that may be cut; all of the grid if None.
        entrywise: names of further functions and modules that work entry by entry of the grid.

    Returns:
        The graph, called as the model is.

    Raises:
        ValueError: something between stages does not work entry by entry; the message names the node.
    """
    found = find_stages(model, tuple(stages))
    for name, (_, spec) in found.items():
        if spec.tensor != tensor or spec.result is not None:
            raise ValueError(
                f"dsp.trace: stage {name!r} has tensor={spec.tensor!r} and result={spec.result}, expected "
                f"{tensor!r} and None: use hooks (dsp.parallelize) for stages of other patterns"
            )
    tracer = _StageTracer(frozenset(found))
    module = fx.GraphModule(model, tracer.trace(model))
    names = {node.target for node in module.graph.nodes if node.op == "placeholder"}
    if not entries or not set(entries) <= names:
        raise ValueError(
            f"dsp.trace: entries {sorted(entries)} must be arguments of the model, {sorted(map(str, names))}"
        )
    session = DspSession(mesh, grid, cut=cut)
    builder = _Builder(module, session, {name: spec for name, (_, spec) in found.items()}, parse(tensor), entrywise)
    builder.find_shapes(example)
    builder.build(entries, example, gather=gather)
    return module


class _Builder:
    def __init__(
        self,
        module: fx.GraphModule,
        session: DspSession,
        specs: Mapping[str, StageSpec],
        pattern: Pattern,
        entrywise: Sequence[str],
    ) -> None:
        self.module, self.session, self.specs, self.pattern = module, session, specs, pattern
        self.entrywise = tuple(entrywise)
        self.lengths: dict[str, int] = {}
        self.stream: set[fx.Node] = set()
        self.local: set[fx.Node] = set()

    def find_shapes(self, example: Mapping[str, Any]) -> None:
        """Shapes of all nodes, from an example of whole tensors, without computing."""
        arguments = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        if missing := [str(node.target) for node in arguments if not node.args and str(node.target) not in example]:
            raise ValueError(f"dsp.trace: example lacks {missing}: give a value to every argument of the model")
        values = [example.get(str(node.target), *node.args) for node in arguments]

        def call(mode: FakeTensorMode) -> None:
            args = [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in values]
            with torch.no_grad():
                ShapeProp(self.module, fake_mode=mode).propagate(*args)

        call_on_shapes(self.module, call, "dsp.trace")

    def build(self, entries: Mapping[str, str], example: Mapping[str, Any], *, gather: bool) -> None:
        """Insert the nodes."""
        graph = self.module.graph
        first, first_pattern = next(iter(entries.items()))
        self.lengths = grid_lengths(example[first], first_pattern, self.session.grid)
        placeholders = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
        last = list(placeholders.values())[-1]
        self._mark([placeholders[name] for name in entries])
        stage_nodes = [node for node in graph.nodes if node.op == "call_module" and node.target in self.specs]
        calls = self._names(stage_nodes)
        self.session.set_stages([self._stage(calls[node], node) for node in stage_nodes])
        self.module.add_submodule(BEGIN, DspBegin(self.session, first_pattern))
        with graph.inserting_after(last):
            run = graph.call_module(BEGIN, (placeholders[first],))
        after = run
        entered: dict[fx.Node, fx.Node] = {}
        for name, pattern in entries.items():
            with graph.inserting_after(after):
                after = graph.call_function(dsp_enter, (run, placeholders[name], pattern))
            entered[placeholders[name]] = after
        for node, new in entered.items():
            node.replace_all_uses_with(new, delete_user_cb=lambda user: user.target not in (BEGIN, dsp_enter))
            self.stream.discard(node)
            self.stream.add(new)
            new.meta = dict(node.meta)
        previous = after
        for node in stage_nodes:
            spec = self.specs[str(node.target)]
            if spec.branch:
                self._wrap_branch(run, calls[node], node, spec)
            else:
                self._cut_before(run, calls[node], previous, node)
            self._slice_sides(run, calls[node], node, spec)
            previous = node
        if gather:
            self._gather(run)
        graph.lint()
        self.module.recompile()

    def _names(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, str]:
        seen: dict[str, int] = {}
        names = {}
        for node in nodes:
            count = seen[str(node.target)] = seen.get(str(node.target), 0) + 1
            names[node] = str(node.target) if count == 1 else f"{node.target}:{count}"
        return names

    def _input(self, node: fx.Node) -> fx.Node:
        arg = self.specs[str(node.target)].arg
        found = node.kwargs.get(arg) if isinstance(arg, str) else node.args[arg]
        if not isinstance(found, fx.Node) or found not in self.stream:
            raise ValueError(f"dsp.trace: argument {arg!r} of stage {node.target!r} is not the stream: name it in arg=")
        return found

    def _stage(self, name: str, node: fx.Node) -> Stage:
        spec = self.specs[str(node.target)]
        meta = _metadata(self._input(node))
        points = max(1, torch.Size(self.lengths.values()).numel())
        size = meta[0].shape.numel() * meta[0].dtype.itemsize // points
        return Stage(
            name=name,
            needs=spec.needs,
            branch=spec.branch,
            stream_bytes=max(1, size),
            rate=spec.rate,
            time_ns=spec.time_ns,
        )

    def _mark(self, starts: Sequence[fx.Node]) -> None:
        """Find what depends on the stream, and refuse what is not like it."""
        self.stream = set(starts)
        for node in self.module.graph.nodes:
            sources = [arg for arg in node.all_input_nodes if arg in self.stream or arg in self.local]
            if not sources or node.op == "output":
                continue
            metas = _metadata(node)
            if not metas:
                if not self._is_alike(node):
                    self.local.add(node)
                continue
            is_stage = node.op == "call_module" and node.target in self.specs
            if not is_stage and not is_entrywise(node, self.module, self.pattern, self.lengths, self.entrywise):
                self._refuse(
                    node, "does not work entry by entry, as far as is known", "a stage, or name it in entrywise="
                )
            if any(not self._fits(meta) for meta in metas):
                shapes = [list(meta.shape) for meta in metas]
                what = f"makes {shapes} of the stream, expected {self.pattern.text!r} with {self.lengths}"
                self._refuse(node, what, "a stage")
            if not is_stage:
                self._check_numbers(node)
                self._check_sides(node)
            self.stream.add(node)

    def _refuse(self, node: fx.Node, what: str, remedy: str) -> None:
        raise ValueError(f"dsp.trace: node {node.name!r} ({node.target}) {what}: make the module around it {remedy}")

    def _check_sides(self, node: fx.Node) -> None:
        """Refuse a whole tensor beside the stream: its part would have to be taken, or length 1 be broadcast."""
        for side in node.all_input_nodes:
            for meta in [] if side in self.stream else _metadata(side):
                sizes = zip(reversed(meta.shape), reversed(self.pattern.groups), strict=False)
                met = [(size, set(group) & set(self.lengths)) for size, group in sizes]
                if any(size != 1 and names for size, names in met):
                    what = f"meets {side.name!r} of shape {list(meta.shape)}, which all ranks hold whole"
                    self._refuse(node, what, "a stage with sliced=, or name the argument in entries")
                if short := [name for _, names in met for name in sorted(names) if self.lengths[name] == 1]:
                    raise ValueError(
                        f"dsp.trace: with 1 entry of {short} the example does not tell whether {side.name!r} of shape "
                        f"{list(meta.shape)} is broadcast along them: give an example of 2 or more"
                    )

    def _fits(self, meta: TensorMetadata) -> bool:
        if len(meta.shape) != len(self.pattern.groups):
            return False
        for size, group in zip(meta.shape, self.pattern.groups, strict=True):
            known = [self.lengths[name] for name in group if name in self.lengths]
            if len(known) == len(group) and size != torch.Size(known).numel():
                return False
        return True

    def _check_numbers(self, node: fx.Node) -> None:
        """Refuse arithmetic with a length of the grid, which is that of a part when the graph runs."""
        for number in node.all_input_nodes:
            if number in self.local and _name(node) not in self.entrywise:
                what = f"computes with {number.name!r}, which depends on lengths of the grid that are cut"
                self._refuse(node, what, "a stage, or pass the number as an argument of the model")

    def _is_alike(self, node: fx.Node) -> bool:
        """Whether what is no tensor is alike on all ranks: a dtype, a device, the length of a dim outside the grid."""
        source = node.args[0] if node.args else None
        if node.target is getattr:
            return node.args[1] in ("dtype", "device", "ndim", "is_cuda", "layout")
        if node.target == "dim" or not isinstance(source, fx.Node):
            return node.target == "dim"
        # Only of a shape as a whole are dims counted from the front.
        is_shape = source.target is getattr and source.args[1] == "shape"
        is_shape = is_shape or (source.target == "size" and len(source.args) == 1 and not source.kwargs)
        if node.target != "size" and not (node.target is operator.getitem and is_shape):
            return False
        index = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        return isinstance(index, int) and not set(self.pattern.groups[index]) & set(self.lengths)

    def _cut_before(self, run: fx.Node, name: str, previous: fx.Node, node: fx.Node) -> None:
        """Switch what is alive, at the place between two stages where that is least."""
        order = {each: index for index, each in enumerate(self.module.graph.nodes)}
        between = [each for each in self.module.graph.nodes if order[previous] < order[each] <= order[node]]
        best: tuple[int, int, fx.Node, list[fx.Node]] | None = None
        for place in between:
            alive = [
                each
                for each in self.stream | self.local
                if order[each] < order[place] and any(order[user] >= order[place] for user in each.users)
            ]
            if any(each in self.local or len(_metadata(each)) != 1 or _is_tuple(each) for each in alive):
                continue
            size = sum(_metadata(each)[0].shape.numel() * _metadata(each)[0].dtype.itemsize for each in alive)
            if best is None or size <= best[0]:
                best = size, len(alive), place, sorted(alive, key=order.__getitem__)
        if best is None:
            stale = sorted(each.name for each in self.local | self.stream if order[each] < order[node])
            raise ValueError(
                f"dsp.trace: before stage {name!r} there is no place to switch: lengths of the grid or tuples among "
                f"{stale[:6]} are used across it: read lengths after the stage"
            )
        _, _, place, alive = best
        graph = self.module.graph
        with graph.inserting_before(place):
            switched = graph.call_function(dsp_switch, (run, name, self.pattern.text, *alive))
            for index, old in enumerate(alive):
                new = graph.call_function(operator.getitem, (switched, index))
                new.meta = dict(old.meta)
                old.replace_all_uses_with(
                    new, delete_user_cb=lambda user: user is not switched and order.get(user, -1) >= order[place]
                )
                self.stream.add(new)

    def _wrap_branch(self, run: fx.Node, name: str, node: fx.Node, spec: StageSpec) -> None:
        graph, x = self.module.graph, self._input(node)
        with graph.inserting_before(node):
            into = graph.call_function(dsp_into, (run, name, spec.tensor, x))
        into.meta = dict(x.meta)
        node.replace_input_with(x, into)
        with graph.inserting_after(node):
            back = graph.call_function(dsp_back, (run, name, spec.tensor, node))
        back.meta = dict(node.meta)
        node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
        self.stream.discard(node)
        self.stream.add(back)

    def _slice_sides(self, run: fx.Node, name: str, node: fx.Node, spec: StageSpec) -> None:
        for arg, pattern in spec.sliced.items():
            side = node.kwargs.get(arg) if isinstance(arg, str) else node.args[arg]
            if not isinstance(side, fx.Node):
                raise ValueError(
                    f"dsp.trace: argument {arg!r} of stage {name!r} is not a tensor: leave it out of sliced"
                )
            with self.module.graph.inserting_before(node):
                part = self.module.graph.call_function(dsp_slice, (run, side, pattern, name))
            node.replace_input_with(side, part)

    def _gather(self, run: fx.Node) -> None:
        graph = self.module.graph
        (output,) = [node for node in graph.nodes if node.op == "output"]
        for part in list(output.all_input_nodes):
            if part in self.stream:
                with graph.inserting_before(output):
                    whole = graph.call_function(dsp_leave, (run, part, self.pattern.text))
                output.replace_input_with(part, whole)


def _name(node: fx.Node) -> str:
    return str(node.target) if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))


def _is_tuple(node: fx.Node) -> bool:
    return not isinstance(node.meta.get("tensor_meta"), TensorMetadata)


def _metadata(node: fx.Node) -> list[TensorMetadata]:
    """Shapes of the tensors that a node returns; empty for anything else."""
    meta = node.meta.get("tensor_meta")
    if isinstance(meta, TensorMetadata):
        return [meta]
    if isinstance(meta, tuple | list):
        return [each for each in meta if isinstance(each, TensorMetadata)]
    return []
