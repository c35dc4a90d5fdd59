"""Linear layers with a low-rank adapter (LoRA) beside a frozen weight.

Dims: in and out are the channels of a whole layer, r is the rank of its adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dbsp_megatron.compat import group_size
from dbsp_megatron.models.dit.coarse import COARSE_BRANCH
from dbsp_megatron.models.dit.init_weights import init_weights, mark_init
from dbsp_megatron.models.dit.linear import ColumnLinear, RowLinear
from dbsp_megatron.models.dit.lora import DEFAULT_TARGETS, LoraConfig, is_adapter
from dbsp_megatron.models.dit.model import VideoDiT
from dbsp_megatron.models.dit.tensor_parallel import gather_last_dim, sum_gradient


class _Adapted(nn.Module):
    """What both kinds of adapted layers have: `lora_a` [r, in] and `lora_b` [out, r] beside `weight`."""

    weight: nn.Parameter
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    tp_group: ProcessGroup | None
    lora_scale: float
    lora_merged: bool

    def _update(self, x: Tensor, between: Callable[[Tensor], Tensor] | None) -> Tensor:
        """B A x in the dtype of the adapter (under autocast, of autocast); `between` is applied to A x."""
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.lora_a.dtype)
        low = F.linear(x, self.lora_a)
        return F.linear(low if between is None else between(low), self.lora_b)

    def _split_over(self) -> ProcessGroup | None:
        """The tensor-parallel group, None for one rank."""
        return self.tp_group if group_size(self.tp_group) > 1 else None

    def _adds(self) -> bool:
        """Whether the forward pass is to add the adapter: not if the weight holds it."""
        if self.lora_merged and self.training and torch.is_grad_enabled():
            raise ValueError(
                "adapters cannot be trained while they are merged into the weights, got a model in training mode; "
                "call unmerge_lora first, or eval()"
            )
        return not self.lora_merged

    @torch.no_grad()
    def _add_to_weight(self, sign: int) -> None:
        wide = torch.promote_types(self.lora_a.dtype, self.weight.dtype)
        change = self.lora_b.to(wide) @ self.lora_a.to(wide)
        self.weight.copy_(self.weight.to(wide) + sign * self.lora_scale * change)

    def _sharded(
        self, inherited: dict[str, Any], prefix: str, offsets: tuple[Any, ...], metadata: Any, split: dict[str, int]
    ) -> dict[str, Any]:
        """Megatron's checkpoint view, in which the inherited one takes every parameter it does not know as whole."""
        own = {name: getattr(self, name) for name in split}
        return inherited | make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            split,
            offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


class LoraColumnLinear(_Adapted, ColumnLinear):
    """`ColumnLinear` plus alpha / r * B A x; A is whole on every tensor-parallel rank, B is split like the output."""

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Maps as `ColumnLinear` does."""
        out, left_bias = super().forward(input_, *args, **kwargs)
        if not self._adds():
            return out, left_bias
        group = self._split_over()
        # Every rank applies its part of B to the whole A x, so gradients of A and of the input are sums over ranks.
        update = self._update(input_, None if group is None else lambda low: sum_gradient(low, group))
        if group is not None and self.gathers:
            update = gather_last_dim(update, group)
        return torch.add(out, update, alpha=self.lora_scale).to(out.dtype), left_bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Megatron's checkpoint view."""
        inherited = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return self._sharded(inherited, prefix, sharded_offsets, metadata, {"lora_b": 0})


class LoraRowLinear(_Adapted, RowLinear):
    """`RowLinear` plus alpha / r * B A x; A is split like the input, B is whole on every tensor-parallel rank."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Maps as `RowLinear` does."""
        out, left_bias = super().forward(input_)
        if not self._adds():
            return out, left_bias
        group = self._split_over()
        # Parts of A x are added up before B, r channels instead of all: from there on ranks do the same.
        update = self._update(
            input_, None if group is None else lambda low: reduce_from_tensor_model_parallel_region(low, group=group)
        )
        return torch.add(out, update, alpha=self.lora_scale).to(out.dtype), left_bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Megatron's checkpoint view."""
        inherited = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return self._sharded(inherited, prefix, sharded_offsets, metadata, {"lora_a": 1})


def add_lora(model: VideoDiT, config: LoraConfig, *, seed: int | None = None) -> None:
    """Gives a model its adapters and freezes everything else.

    Adapted layers stay where they are and keep the names of their parameters, so that any checkpoint of the model fits
    as before; adapters are `<layer>.lora_a` and `<layer>.lora_b`. B starts at zero, so the output does not change; A
    is normal and depends on seed and name only, not on how the model is split. Call it before the model is wrapped for
    data parallelism and before the optimizer is made. Without effect if the rank is 0.

    Args:
        model: on any device; adapters are made beside the weights, in fp32 (fp64 beside fp64 weights).
        config: rank, targets.
        seed: of A; default that of the model's weights.

    Raises:
        ValueError: a target is not in the model, or the model has adapters already.

    Source:
        LoRA (arXiv:2106.09685). A has standard deviation in ** -0.5, as all matrices here.
    """
    if not config.rank:
        return
    if lora_layers(model):
        raise ValueError("the model must have no adapters yet, got one with adapters; build a new model")
    found = _targets(model, config.targets)
    known = [name for name, _ in _whole_model(model).named_parameters()]
    for name in config.modules_to_save:
        if name != COARSE_BRANCH and not any(_is_inside(parameter, name) for parameter in known):
            raise ValueError(f"lora.modules_to_save must name modules of the model, got {name!r}; remove it")
    for name, parameter in model.named_parameters():
        whole = model.global_name(name)
        parameter.requires_grad_(any(_is_inside(whole, module) for module in config.modules_to_save))
    for layer in found:
        _adapt(layer, config)
    adapters = {model.global_name(name): p for name, p in model.named_parameters() if is_adapter(name)}
    init_weights(adapters, model.dit_config.init_seed if seed is None else seed, model.tp_group)


def lora_layers(model: nn.Module) -> dict[str, LoraColumnLinear | LoraRowLinear]:
    """Adapted layers by name."""
    return {
        name: layer for name, layer in model.named_modules() if isinstance(layer, (LoraColumnLinear, LoraRowLinear))
    }


def merge_lora(model: nn.Module) -> None:
    """Adds every adapter to its weight, for sampling or export; the model then computes as fast as without.

    Adapters stay as they are, without effect until `unmerge_lora`. Each rank merges its own slices; nothing is sent.

    Raises:
        ValueError: there are no adapters, or they are merged already.
    """
    for layer in _in_state(model, merged=False):
        layer._add_to_weight(+1)
        layer.lora_merged = True


def unmerge_lora(model: nn.Module) -> None:
    """Takes merged adapters out of the weights, which then are what they were up to rounding in their dtype.

    Raises:
        ValueError: there are no adapters, or they are not merged.
    """
    for layer in _in_state(model, merged=True):
        layer._add_to_weight(-1)
        layer.lora_merged = False


def _in_state(model: nn.Module, *, merged: bool) -> Iterator[LoraColumnLinear | LoraRowLinear]:
    layers = lora_layers(model)
    if not layers:
        raise ValueError("the model has no adapters; call add_lora first")
    wrong = [name for name, layer in layers.items() if layer.lora_merged != merged]
    if wrong:
        state = "merged" if merged else "not merged"
        raise ValueError(f"all adapters must be {state}, got {len(wrong)} that are not so, {wrong[0]} among them")
    return iter(layers.values())


def _is_inside(parameter: str, module: str) -> bool:
    """Whether a parameter belongs to a module called so, at any depth."""
    return f".{module}." in f".{parameter}"


def _whole_model(model: VideoDiT) -> VideoDiT:
    """The model, or one of its description without storage if this is one of several pipeline stages.

    Names are checked against the whole model, so that stages refuse alike.
    """
    if group_size(model.pg_collection.pp) == 1:
        return model
    with torch.device("meta"):
        return VideoDiT(model.dit_config, pg_collection=ProcessGroupCollection(tp=None, cp=None, pp=None))


def _targets(model: VideoDiT, wanted: list[str]) -> list[ColumnLinear | RowLinear]:
    def linear_layers(module: nn.Module) -> dict[str, ColumnLinear | RowLinear]:
        return {name: part for name, part in module.named_modules() if isinstance(part, (ColumnLinear, RowLinear))}

    names = list(linear_layers(_whole_model(model)))
    found = {
        target: [name for name in names if f".{name}".endswith(f".{target}")] for target in wanted or DEFAULT_TARGETS
    }
    missing = [target for target, layers in found.items() if not layers]
    if missing and wanted:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
        raise ValueError(f"lora.targets must name layers of the model ({known}), got {missing[0]!r}")
    chosen = {name for layers in found.values() for name in layers}
    return [layer for name, layer in linear_layers(model).items() if model.global_name(name) in chosen]


def _adapt(layer: ColumnLinear | RowLinear, config: LoraConfig) -> None:
    is_row = isinstance(layer, RowLinear)
    if layer.sequence_parallel or (is_row and not layer.input_is_parallel):
        raise ValueError("adapters need layers without Megatron's sequence_parallel, whose input is split as given")
    weight = layer.weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    out_channels, in_channels = weight.shape
    layer.lora_a = nn.Parameter(torch.empty(config.rank, in_channels, dtype=dtype, device=weight.device))
    layer.lora_b = nn.Parameter(torch.empty(out_channels, config.rank, dtype=dtype, device=weight.device))
    mark_init(layer.lora_b, "zero")
    split, dim = (layer.lora_a, 1) if is_row else (layer.lora_b, 0)
    set_tensor_model_parallel_attributes(split, True, dim, 1)
    layer.lora_scale = config.scale
    layer.lora_merged = False
    # In place, as fully_shard of torch does it: a wrapper would rename the parameters of the base model.
    layer.__class__ = LoraRowLinear if is_row else LoraColumnLinear
