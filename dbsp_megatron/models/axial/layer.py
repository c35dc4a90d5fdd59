"""A layer that attends along one dim, and where it finds that dim whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from torch.distributed import ProcessGroup

from dbsp_megatron.attention.dense import dense_attention
from dbsp_megatron.dsp import DspRun, Stage
from dbsp_megatron.models.axial.config import AxialConfig
from dbsp_megatron.models.axial.sparse import SparseAttention
from dbsp_megatron.models.dit.attention import CoreAttention, DiTCrossAttention, DiTSelfAttention
from dbsp_megatron.models.dit.conditioning import Conditioning
from dbsp_megatron.models.dit.layers import DiTLayer, DiTLayerSubmodules
from dbsp_megatron.models.dit.linear import ColumnLinear, RowLinear
from dbsp_megatron.models.dit.pointwise import pointwise
from dbsp_megatron.models.dit.rope import apply_rotary
from dbsp_megatron.models.dit.rows import gather_rows, own_rows, scatter_rows
from dbsp_megatron.models.dit.tokens import LocalTokens


@dataclass(frozen=True, kw_only=True, eq=False)
class AxialConditioning(Conditioning):
    """Made once per pass; a layer is given one of its own, with its dim and the lengths that it meets."""

    run: DspRun | None
    """The pass that switches; None where one rank holds everything."""
    lengths: Mapping[str, int]
    """Length of every sequence dim on this rank, outermost first: of the whole video, until a layer is entered."""
    along: Mapping[str, LocalTokens]
    """All places along each dim, with their rotary angles."""
    time_features: Tensor | None = None
    """float32 [T, hidden]: added before the first layer along T; None for nothing."""
    sparse: SparseAttention | None = None
    """Which blocks are computed along long dims; None for all."""
    dim: str = ""
    """The dim that the layer attends along."""
    row_group: ProcessGroup | None = None
    """Tensor-parallel ranks that share out the tokens between matrices (Megatron's sequence parallelism); else None."""
    stage: str | None = None
    """Name of the layer's stage if that dim stays cut, so that its attention is computed in (frame, head) units."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Length of every sequence dim on this rank, and samples."""
        return (*self.lengths.values(), self.embedding.shape[0])

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank, of all those that share them out together."""
        return math.prod(self.lengths.values())

    @property
    def place(self) -> int:
        """Number of the dim that the layer attends along."""
        return list(self.lengths).index(self.dim)

    @torch.compiler.disable
    def entered(self, layer: int, dim: str, x: Tensor) -> tuple[Tensor, AxialConditioning]:
        """The stream [s, b, hidden] in the layout that a layer computes in, and what that layer is told.

        Where tensor-parallel ranks share out the tokens, they are put together to be switched, as other ones lie side
        by side afterwards.
        """
        here = replace(self, dim=dim, tokens=self.along[dim])
        if self.run is None:
            return x, here
        name = stage_name(layer, dim)
        x = self._switched(self.run, name, x, dim)
        here = replace(here, lengths={each: self.run.local(each, name) for each in self.lengths})
        if self.run.plan is None or not self.run.plan.by_name[name].in_units:
            return x, here
        places = self.run.positions(dim, name)
        features = self.time_features
        if features is not None and dim == "T":
            features = features[places.start : places.stop]
        return x, replace(here, stage=name, tokens=self.along[dim].part(places), time_features=features)

    def _switched(self, run: DspRun, name: str, x: Tensor, dim: str) -> Tensor:
        """The stream as `DspRun.stage` gives it."""
        pattern = stream_pattern(self.lengths)
        if self.row_group is None:
            return run.stage(name, x, pattern, needs={dim})
        if run.plan is not None and not run.plan.by_name[name].before:
            run.stage_all(name, (), pattern, needs={dim})
            return x
        whole = gather_rows(x, math.prod(run.lengths_before(name).values()), self.row_group)
        return scatter_rows(run.stage(name, whole, pattern, needs={dim}), self.row_group)


def stage_name(layer: int, dim: str) -> str:
    """Name of layer 0, 1, ... in plans."""
    return f"layers.{layer}.{dim}"


def stream_pattern(dims: Mapping[str, int] | tuple[str, ...]) -> str:
    """Pattern of the stream: all sequence dims share the first one."""
    return f"({' '.join(dims)}) B C"


def axial_stages(dit: AxialConfig, *, in_units: bool = True, tp_size: int = 1) -> list[Stage]:
    """What a pass computes: each layer needs the dim that it attends along, or attends in (frame, head) units.

    Args:
        dit: The model description.
        in_units: Whether the attention of a layer can be computed in units.
        tp_size: Tensor-parallel ranks, which share the heads; each of them switches the whole stream.
    """
    heads, kv_heads = dit.num_heads // tp_size, dit.kv_heads // tp_size
    units = heads if in_units else 0
    dims = [dit.attention_dim(layer) for layer in range(dit.num_layers)]
    # Of one sample in 16 bits: a plan, and with it the tokens of a rank, must not depend on the batch.
    return [
        Stage(
            name=stage_name(layer, dim),
            needs=frozenset({dim}),
            stream_bytes=2 * dit.hidden_size,
            units=units,
            unit_bytes=4 * (heads + kv_heads) * dit.heads_dim,
        )
        for layer, dim in enumerate(dims)
    ]


class DenseAttention(MegatronModule):
    """Attention of everything to everything along dim 0; Megatron's `core_attention` contract."""

    def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
        super().__init__(config=config)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None = None, **_: Any) -> Tensor:
        """Maps [s, b, h, d], and keys and values [s, b, kv_heads, d], to [s, b, h * d]; b may be 0."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return dense_attention(q, k, v).permute(2, 0, 1, 3).flatten(-2)


class AxialSelfAttention(DiTSelfAttention):
    """Attention along `conditioning.dim`, all other dims are batch; ranks have it whole, or attend in units."""

    def __init__(self, config: Any, layer_number: int, **options: Any) -> None:
        super().__init__(config, layer_number, **options)
        self.index = layer_number - 1

    def project(self, x: Tensor, conditioning: Conditioning) -> tuple[Tensor, Tensor, Tensor]:
        """See `DiTSelfAttention.project`: q, k and v are [length of the dim, all else, heads, d]."""
        here = _axial(conditioning)
        if here.row_group is not None:
            # The projection gathers rows in the order of the stream, and those that were added.
            q, k, v = (self._along(each[: here.num_tokens], here) for each in self.qkv(x))
            rotate = pointwise(apply_rotary, self.compiles)
            q, k = (rotate(each, here.tokens.cos, here.tokens.sin) for each in (q, k))
            return q, k, v
        return super().project(self._along(x, here), conditioning)

    def _along(self, x: Tensor, here: AxialConditioning) -> Tensor:
        """[tokens of this rank, b, ...] as [length of the dim, all else, ...]."""
        rows = x.unflatten(0, tuple(here.lengths.values())).movedim(here.place, 0)
        # No -1: this rank may hold nothing.
        return rows.reshape(rows.shape[0], rows.shape[1 : len(here.sizes)].numel(), *x.shape[2:])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, conditioning: Conditioning) -> Tensor:
        """See `DiTSelfAttention.attend`."""
        here = _axial(conditioning)
        sparse = here.sparse
        if sparse is not None and not sparse.takes(here.along[here.dim].num_video):
            sparse = None
        if here.stage is not None and here.run is not None:
            return self._attend_in_units(q, k, v, here, here.run, here.stage, sparse)
        # A rank that holds nothing leaves it to dense attention, which gives nothing its gradients.
        if sparse is None or not q.numel():
            return super().attend(q, k, v, x, conditioning)
        return sparse(q, k, v, self.index)

    @torch.compiler.disable
    def _attend_in_units(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        here: AxialConditioning,
        run: DspRun,
        stage: str,
        sparse: SparseAttention | None,
    ) -> Tensor:
        options: dict[str, Any] = {}
        if sparse is not None:
            cut = run.cut_of(here.dim, stage)
            options = {"mask": sparse.mask_of_parts(q, k, v, self.index, cut), "check": False, "engine": sparse.engine}
        others = " ".join([*(dim for dim in here.lengths if dim != here.dim), "B"])
        out = run.attend(stage, q, k, v, f"{here.dim} ({others}) heads channels", here.dim, **options)
        return out.flatten(-2)

    def output(self, out: Tensor, conditioning: Conditioning) -> Tensor:
        """See `DiTSelfAttention.output`: [s_local, b, hidden] again."""
        here = _axial(conditioning)
        sizes = list(here.sizes)
        length = sizes.pop(here.place)
        rows = out.reshape(length, *sizes, out.shape[-1]).movedim(0, here.place)
        return super().output(rows.reshape(here.num_tokens, here.sizes[-1], out.shape[-1]), conditioning)


def _axial(conditioning: Conditioning) -> AxialConditioning:
    if not isinstance(conditioning, AxialConditioning):
        raise ValueError(f"an axial layer needs AxialConditioning, got {type(conditioning).__name__}")
    return conditioning


class AxialLayer(DiTLayer):
    """`DiTLayer` along one dim; the stream is switched before it where that dim is cut."""

    def __init__(self, config: Any, submodules: DiTLayerSubmodules, layer_number: int = 1, **options: Any) -> None:
        super().__init__(config, submodules, layer_number, **options)
        dit: AxialConfig = options["dit"]
        self.index = self.layer_number - 1
        self.dim = dit.attention_dim(self.index)
        self.first_in_time = self.dim == "T" and "T" not in map(dit.attention_dim, range(self.index))

    def forward(self, hidden_states: Tensor, conditioning: Conditioning, *, selective: bool = False) -> Tensor:
        """Maps [s_local, b, hidden] to [s_local, b, hidden], another part of the video where it is switched.

        Args:
            hidden_states: tokens of this rank, as the layer before left them.
            conditioning: an `AxialConditioning`.
            selective: compute all but switch and attention again in the backward pass.
        """
        x, here = _axial(conditioning).entered(self.index, self.dim, hidden_states)
        if self.first_in_time and here.time_features is not None:
            # Each frame's row for all tokens of it; T comes first. This rank may hold no frame.
            per_frame = math.prod(length for dim, length in here.lengths.items() if dim != "T")
            of_tokens = here.time_features.to(x.dtype).repeat_interleave(per_frame, dim=0)
            x = x + (of_tokens if here.row_group is None else own_rows(of_tokens, here.row_group))[:, None]
        return super().forward(x, here, selective=selective)


def axial_block_spec(dit: AxialConfig, core_attention: CoreAttention | None) -> TransformerBlockSubmodules:
    """The layers of an `AxialDiT`.

    Args:
        dit: The model description.
        core_attention: Attention along dim 0 of [s, b, h, d], in Megatron's contract; None for dense attention.
    """
    mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear))
    core = DenseAttention if core_attention is None else core_attention
    attention = ModuleSpec(module=AxialSelfAttention, params={"dit": dit, "core_attention": core})
    specs = {
        dim: ModuleSpec(
            module=AxialLayer,
            params={"dit": dit, "norms_cross": dit.cross_norm},
            submodules=DiTLayerSubmodules(
                self_attention=attention,
                cross_attention=(
                    ModuleSpec(module=DiTCrossAttention, params={"dit": replace(dit, qk_norm="none")})
                    if dit.attends_text(dim)
                    else None
                ),
                mlp=mlp,
            ),
        )
        for dim in dit.attention_dims
    }
    return TransformerBlockSubmodules(layer_specs=[specs[dit.attention_dim(n)] for n in range(dit.num_layers)])
