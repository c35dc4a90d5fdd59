"""Transformers while they are parallel: hooks that split and gather, processors, and how to undo them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.comm.agree import Belief, agree, digest_int
from dbsp_megatron.masks import MaskMethod
from dbsp_megatron.models.diffusers.checks import check_guidance, check_runnable
from dbsp_megatron.models.diffusers.guidance import BranchCall, GuidanceBranches, SharedForward
from dbsp_megatron.models.diffusers.inputs import check_same_inputs, named_tensors
from dbsp_megatron.models.diffusers.processor import ActiveForward
from dbsp_megatron.models.diffusers.steps import StepCounter, timestep_value
from dbsp_megatron.models.diffusers.table import Arguments, SplitInput, SplitOutput, TransformerTable, map_tensors
from dbsp_megatron.models.diffusers.text_mask import DenseTextMask, with_dense_text
from dbsp_megatron.models.diffusers.tokens import ReplicatedInputs, Stream, TokenCounts, TokenStreams
from dbsp_megatron.strategy import SequenceParallel, TokenLayout

_MAX_STREAMS = 8


class ParallelTransformers:
    """One or two transformers whose sequence is split over ranks, until `undo` or the end of a `with` block.

    Gradients: those of the inputs are whole on every rank; those of parameters are this rank's share and are to be
    summed over `sp.group`. (Every rank computes the same loss from the whole output.)

    Made by `parallelize`.
    """

    def __init__(
        self,
        transformers: list[tuple[nn.Module, TransformerTable]],
        sp: SequenceParallel,
        mask: BlockMask | MaskMethod | None,
        guidance_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.sp, self._steps = sp, StepCounter(sp)
        self._parallel: list[_ParallelTransformer] = []
        try:
            for transformer, table in transformers:
                branches = None if guidance_group is None else GuidanceBranches(guidance_group, table)
                self._parallel.append(
                    _ParallelTransformer(transformer, table, sp, mask, self._steps, branches, self.num_layers)
                )
        except BaseException:
            self.undo()
            raise

    @property
    def num_layers(self) -> int:
        """Attention layers; those of a second transformer come after those of the first."""
        return sum(len(parallel.processors) for parallel in self._parallel)

    @property
    def step(self) -> int:
        """Denoising step of the last call, -1 before the first."""
        return self._steps.step

    def begin_step(self, step: int) -> None:
        """Number the steps by hand from now on, alike on all ranks; else calls with one timestep are one step."""
        self._steps.set(step)

    def undo(self) -> None:
        """Give the transformers back as they were; may be called again."""
        while self._parallel:
            self._parallel.pop().undo()

    def __enter__(self) -> ParallelTransformers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


class _ParallelTransformer:
    """One transformer with our processors and hooks on."""

    def __init__(
        self,
        transformer: Any,
        table: TransformerTable,
        sp: SequenceParallel,
        mask: BlockMask | MaskMethod | None,
        steps: StepCounter,
        branches: GuidanceBranches | None,
        first_layer: int,
    ) -> None:
        self._transformer, self._table, self._sp, self._mask, self._steps = transformer, table, sp, mask, steps
        self._branches = branches
        self._forward: SharedForward | None = None
        self._active = ActiveForward()
        self._known: OrderedDict[tuple[object, ...], TokenStreams] = OrderedDict()
        self._pinned: dict[int, TokenLayout] = {}
        self._text_mask: tuple[tuple[object, ...], BlockMask] | None = None
        self._hooks: list[RemovableHandle] = []
        self._hooked: dict[str, nn.Module] = {}
        attentions = table.attentions(transformer)
        self.processors = [
            table.processor(self._active, first_layer + i, attention.processor)
            for i, attention in enumerate(attentions)
        ]
        self._before = dict(transformer.attn_processors)
        self._heads = int(attentions[0].heads)
        try:
            self._install(attentions)
        except BaseException:
            self.undo()
            raise

    def _install(self, attentions: list[Any]) -> None:
        ours = {id(attention): processor for attention, processor in zip(attentions, self.processors, strict=True)}
        processors = dict(self._before)
        for path, module in self._transformer.named_modules():
            if id(module) in ours:
                processors[f"{path}.processor"] = ours[id(module)]
        self._transformer.set_attn_processor(processors)
        add = self._hooks.append
        add(self._transformer.register_forward_pre_hook(self._begin, with_kwargs=True))
        add(self._transformer.register_forward_hook(self._end, always_call=True))
        for rule in self._table.splits:
            if rule.module:
                add(self._attach(rule))
        for path, block in self._table.block_paths(self._transformer).items():
            self._hooked[path] = block
            if self._table.enter_block is not None:
                enter = partial(self._enter_block, self._table.enter_block)
                add(block.register_forward_pre_hook(enter, with_kwargs=True))
        add(self._submodule(self._table.gather.module).register_forward_hook(self._gather))
        if self._branches is not None:
            self._forward = SharedForward(self._transformer, self._branches)

    def _submodule(self, path: str) -> nn.Module:
        """A module that gets a hook."""
        self._hooked[path] = self._transformer.get_submodule(path)
        return self._hooked[path]

    def _attach(self, rule: SplitInput | SplitOutput) -> RemovableHandle:
        module = self._submodule(rule.module)
        if isinstance(rule, SplitInput):
            return module.register_forward_pre_hook(partial(self._split_input, rule), with_kwargs=True)
        return module.register_forward_hook(partial(self._split_output, rule))

    def undo(self) -> None:
        """Remove hooks and give processors back."""
        while self._hooks:
            self._hooks.pop().remove()
        if self._forward is not None:
            self._forward.undo()
        self._active.end()
        ours = set(map(id, self.processors))
        # Processors that somebody set since stay.
        now = self._transformer.attn_processors
        back = {path: self._before.get(path, p) if id(p) in ours else p for path, p in now.items()}
        self._transformer.set_attn_processor(back)

    @torch.compiler.disable
    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Agree with the other ranks on the call, then lay out its tokens."""
        arguments = Arguments(module, args, kwargs)
        given, gradients = arguments.by_name(), torch.is_grad_enabled()
        own, problem, counts, timestep, cached = given, None, None, None, False
        call: BranchCall | None = None
        try:
            cached = check_runnable(self._transformer, self._table, self.processors, self._hooked, gradients)
            if self._branches is not None:
                check_guidance(cached, gradients)
                call = self._branches.plan(given)
                own = call.arguments
            counts = self._table.measure(self._transformer, own, isinstance(self._mask, MaskMethod))
            self._check_mask(counts)
            timestep = timestep_value(given.get("timestep"))
        except (ValueError, KeyError) as error:
            problem = f"missing argument {error}" if isinstance(error, KeyError) else str(error)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = f"{type(error).__name__}: {error}"
        where = f"{self._table.class_name}, step {self._steps.step}"
        if self._branches is not None:
            problem = self._branches.agree(problem, call, given)
        tensors, kind = named_tensors(given), call and call.kind
        shapes = f"{counts}, {', '.join(f'{name} {_shape(x)}' for name, x in tensors)}"
        beliefs = {
            "shapes of the inputs": Belief(
                digest_int(shapes), lambda: shapes, "give all ranks the same prompt, batch size and video size"
            ),
            "the timestep": Belief(
                digest_int(timestep), lambda: str(timestep), "run the same schedule of timesteps on all ranks"
            ),
            "whether gradients are on": Belief(
                int(gradients), lambda: "on" if gradients else "off", "use the same grad mode on all ranks"
            ),
            "whether a feature cache is on": Belief(
                int(cached), lambda: "on" if cached else "off", "enable the cache on all ranks or on none"
            ),
            "the branch of guidance": Belief(
                digest_int(kind), lambda: str(kind), "call the transformer alike on all ranks of a half"
            ),
        }
        try:
            agree(where, problem, beliefs, self._sp.groups.control_group)
            check_same_inputs(tensors, self._sp.groups.control_group)
        except ValueError:
            if self._branches is not None:
                self._branches.forget()
            raise
        if counts is None:
            raise ValueError(f"{where}: {problem}")
        if self._branches is not None and call is not None:
            self._branches.begin(call)
            if call.kind == "ready":
                return args, kwargs
            for name in own:
                arguments.replace(name, own[name])
        with torch.inference_mode(False), torch.no_grad():
            self._lay_out(counts, cached, new_step=self._steps.see(timestep, gradients))
        for rule in self._table.splits:
            if not rule.module and isinstance(rule, SplitInput):
                self._split_argument(rule, arguments)
        if gradients and self._sp.group is not None:
            self._join_gradients(arguments)
        return tuple(arguments.args), arguments.kwargs

    def _check_mask(self, counts: TokenCounts) -> None:
        mask = self._mask
        if not isinstance(mask, BlockMask):
            return
        if not mask.seqlen_q == mask.seqlen_k == counts.seqlen or mask.num_heads != self._heads:
            raise ValueError(
                f"mask is for {mask.seqlen_q} x {mask.seqlen_k} tokens and {mask.num_heads} heads, attention has "
                f"{counts.seqlen} tokens ({counts.num_text} of text in front of {counts.num_grid}) and {self._heads} "
                "heads: make it for them, or pass a mask method"
            )

    def _lay_out(self, counts: TokenCounts, cached: bool, new_step: bool) -> None:
        """Homes of the tokens of this call, and its mask."""
        if new_step and not cached:
            self._sp.recalibrate()
        if not cached:
            self._pinned.clear()
        layout = self._sp.layout(counts.seqlen)
        if cached:
            # What a feature cache keeps is of the tokens that were here then.
            layout = self._pinned.setdefault(counts.seqlen, layout)
        key = (*layout.key, counts.num_text)
        if key not in self._known:
            self._known[key] = TokenStreams(layout, counts.num_text, self._sp.group)
            while len(self._known) > _MAX_STREAMS:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        mask = self._mask_with_text(counts.num_text)

        # What is compiled around attention (or around the hooks below) is cut here.
        @torch.compiler.disable
        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            return self._sp.attention(q, k, v, mask=mask, layer=layer, layout=layout, grid=counts.grid)

        self._smallest = min(layout.counts)
        self._active.begin(attend, self._known[key])

    def _mask_with_text(self, num_text: int) -> BlockMask | MaskMethod | None:
        mask = self._mask
        if mask is None or num_text == 0:
            return mask
        if isinstance(mask, MaskMethod):
            return DenseTextMask(mask, num_text)
        version = None if mask.blocks.is_inference() else mask.blocks._version
        if self._text_mask is None or version is None or self._text_mask[0] != (num_text, version):
            self._text_mask = ((num_text, version), with_dense_text(mask, num_text))
        return self._text_mask[1]

    def _split_argument(self, rule: SplitInput, arguments: Arguments) -> None:
        value = arguments.get(rule.argument)
        if value is None or (rule.only_dims is not None and value.dim() != rule.only_dims):
            return
        if rule.only_dims is not None and self._smallest == 0:
            raise ValueError(
                f"{rule.argument} of {self._table.class_name} has one entry for each token, and a rank holds no token: "
                f"use fewer ranks, or a smaller sp.block_size than {self._sp.config.block_size}"
            )
        arguments.replace(rule.argument, self._taken(value, rule.dim, rule.tokens))

    def _taken(self, value: Any, dim: int, tokens: Stream) -> Any:
        return map_tensors(value, lambda x: self._active.streams.take(x, dim, tokens))

    def _join_gradients(self, arguments: Arguments) -> None:
        inputs = {name: arguments.get(name) for name in self._table.differentiable}
        wanted = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}
        if wanted:
            joined = ReplicatedInputs.apply(self._sp.group, *wanted.values())
            for name, x in zip(wanted, joined, strict=True):
                arguments.replace(name, x)

    @torch.compiler.disable
    def _split_input(
        self, rule: SplitInput, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        arguments = Arguments(module, args, kwargs)
        self._split_argument(rule, arguments)
        return tuple(arguments.args), arguments.kwargs

    @torch.compiler.disable
    def _split_output(self, rule: SplitOutput, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        taken = self._taken(output, rule.dim, rule.tokens)
        if rule.never_empty and self._active.streams.count(rule.tokens) == 0:
            return map_tensors(output, lambda x: x.narrow(rule.dim, 0, 1))
        return taken

    @torch.compiler.disable
    def _enter_block(
        self,
        change: Callable[[Arguments, TokenStreams], None],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Any]:
        arguments = Arguments(module, args, kwargs)
        change(arguments, self._active.streams)
        return tuple(arguments.args), arguments.kwargs

    @torch.compiler.disable
    def _gather(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        rule = self._table.gather
        return self._active.streams.gather(output, rule.dim, rule.tokens)

    @torch.compiler.disable
    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._active.end()


def _shape(x: Tensor) -> object:
    return *x.shape, str(x.dtype), x.requires_grad
