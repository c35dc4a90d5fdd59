"""Master weights, moments and moving average of a DeepSpeed engine, as whole tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dbsp_megatron.train.ema import ramped_decay
from dbsp_megatron.train.engines.base import ParameterNames
from dbsp_megatron.train.engines.frozen import FrozenMasters
from dbsp_megatron.train.mesh import Mesh
from dbsp_megatron.train.optimizer import MOMENTS, NormGroups, allocate_state
from dbsp_megatron.train.state import ByFunction, FromOwner, StateTensor, gathered


class DeepSpeedState:
    """Reads and writes what ZeRO holds of each parameter, through DeepSpeed's own accessors.

    Args:
        engine: what `deepspeed.initialize` made.
        names: names and tensor-parallel splits.
        parameters: by global name.
        device: where whole tensors are put together.
        frozen: fp32 copies of frozen weights, where the model was cast to bf16.
    """

    def __init__(
        self,
        engine: Any,
        names: ParameterNames,
        parameters: Mapping[str, nn.Parameter],
        device: torch.device,
        frozen: FrozenMasters | None = None,
    ) -> None:
        self._frozen = frozen
        self._engine, self.names, self.parameters, self.device = engine, names, dict(parameters), device
        self.trained = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        self.is_plain = isinstance(engine.optimizer, torch.optim.Optimizer)
        """Whether DeepSpeed left the optimizer as it was: stage 0 in fp32."""
        self._inner: torch.optim.Optimizer = engine.optimizer if self.is_plain else engine.optimizer.optimizer

    def with_norm_groups(self) -> list[tuple[nn.Parameter, NormGroups]]:
        """Parameters, each with the groups that split its gradient; for stage 0."""
        tp_group = self.names.mesh.tp_group
        groups: NormGroups = () if tp_group is None else (tp_group,)
        return [(p, groups if name in self.names.split_dims else ()) for name, p in self.parameters.items()]

    def shape(self, name: str) -> torch.Size:
        """Shape of a parameter on this tensor-parallel rank; stage 3 leaves an empty tensor in its place."""
        parameter = self.parameters[name]
        return torch.Size(getattr(parameter, "ds_shape", parameter.shape))

    def weights(self) -> dict[str, StateTensor]:
        """The master weights."""
        return {f"model.{name}": self.weight(name) for name in self.parameters}

    def weight(self, name: str) -> StateTensor:
        """One master weight."""
        parameter = self.parameters[name]
        if self.is_plain:
            return self.names.whole(name, parameter.detach())
        if self._frozen is not None and name in self._frozen:
            master = self._frozen.tensor(name, lambda value: self._set_model_weight(parameter, value))
            return self.names.whole(name, master)
        if not parameter.requires_grad:
            return self._by_function(
                name, lambda: self._model_weight(parameter), lambda value: self._set_model_weight(parameter, value)
            )
        from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param, safe_set_local_fp32_param

        def write(value: Tensor) -> None:
            if hasattr(parameter, "ds_id"):
                safe_set_local_fp32_param(parameter, _own_partition(parameter, value))
            else:
                safe_set_full_fp32_param(parameter, value)
            self._set_model_weight(parameter, value)

        return self._by_function(name, lambda: safe_get_full_fp32_param(parameter), write)

    def _model_weight(self, parameter: nn.Parameter) -> Tensor:
        if not hasattr(parameter, "ds_id"):
            return parameter.detach()
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter]):
            return parameter.detach().clone()

    def _set_model_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        """What the forward pass reads; DeepSpeed copies master weights there after an optimizer step only."""
        if not hasattr(parameter, "ds_id"):
            parameter.data.copy_(value)
            return
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter.copy_(value)

    def moments(self) -> dict[str, StateTensor]:
        """What the optimizer keeps; empty for plain gradient descent and before the first step."""
        if not any(MOMENTS[0] in state for state in self._inner.state.values()):
            return {}
        self._link()
        return {f"optim.{moment}.{name}": self._moment(moment, name) for moment in MOMENTS for name in self.trained}

    def _moment(self, moment: str, name: str) -> StateTensor:
        parameter = self.parameters[name]
        if self.is_plain:
            return self.names.whole(name, self._inner.state[parameter][moment])
        from deepspeed.utils import (
            safe_get_full_optimizer_state,
            safe_set_full_optimizer_state,
            safe_set_local_optimizer_state,
        )

        def write(value: Tensor) -> None:
            if hasattr(parameter, "ds_id"):
                safe_set_local_optimizer_state(parameter, _own_partition(parameter, value), moment)
            else:
                safe_set_full_optimizer_state(parameter, value, moment)

        return self._by_function(name, lambda: safe_get_full_optimizer_state(parameter, moment), write)

    def _by_function(self, name: str, read: Callable[[], Tensor], write: Callable[[Tensor], None]) -> StateTensor:
        shape = self.shape(name)

        def whole() -> Tensor:
            return read().detach().to(self.device, torch.float32).view(shape)

        return self.names.whole(name, ByFunction(shape, whole, write))

    def allocate(self, num_steps_done: int) -> None:
        """Make the optimizer's state of a run that has done some steps, to load into."""
        wrapper = self._engine.optimizer
        if hasattr(wrapper, "_set_fp32_optimizer_param_groups"):  # stage 3 empties the groups between steps
            wrapper._set_fp32_optimizer_param_groups()
            allocate_state(self._inner, num_steps_done)
            wrapper._clear_fp32_optimizer_param_groups()
        else:
            allocate_state(self._inner, num_steps_done)
        self._link()

    def _link(self) -> None:
        """Let parameters find their part of the optimizer's state.

        Stages 1 and 2 do it once, after the first of their parameter groups has stepped (DeepSpeed 0.19), when the
        state of the others does not exist yet.
        """
        wrapper = self._engine.optimizer
        if hasattr(wrapper, "_lazy_init_hp_params_optimizer_state"):
            wrapper._hp_optimizer_states_linked = False
            wrapper._lazy_init_hp_params_optimizer_state()


def _own_partition(parameter: Any, value: Tensor) -> Tensor:
    """What stage 3 keeps of a whole tensor on this rank.

    DeepSpeed's own setters of whole tensors fail where the ranks do not divide a parameter, whose last part is padded.
    """
    size, group = parameter.ds_tensor.numel(), parameter.ds_process_group
    padded = F.pad(value.flatten(), (0, size * dist.get_world_size(group) - value.numel()))
    return padded.narrow(0, size * dist.get_rank(group), size)


class OwnedEma:
    """Moving average of the master weights, each kept by one data rank; the formula is that of `Ema`.

    ZeRO's partitions are flat and cut through parameters, so each step puts the weights together one by one, which
    costs about as much communication as gathering them for a forward pass.

    Args:
        state: the engine's state.
        decay: in (0, 1).
        mesh: the groups.
    """

    def __init__(self, state: DeepSpeedState, decay: float, mesh: Mesh) -> None:
        self._state, self._mesh, self.decay, self.num_updates = state, mesh, decay, 0
        self._group = mesh.data_group
        rank, size = (0, 1) if self._group is None else (self._group.rank(), self._group.size())
        self._owners = {name: index % size for index, name in enumerate(state.trained)}
        self._rank = rank
        self.tensors: dict[str, Tensor] = {}
        self.restart()

    def _own_part(self, name: str) -> Tensor | None:
        """This rank's slice of a master weight, if it keeps that average; collective."""
        weight: Any = self._state.weight(name)
        part = getattr(weight, "part", weight)  # not put together over tensor-parallel ranks
        values = gathered(part)
        return values if self._owners[name] == self._rank else None

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the present weights; collective."""
        self.num_updates += 1
        decay = ramped_decay(self.decay, self.num_updates)
        for name in self._owners:
            values = self._own_part(name)
            if values is not None:
                self.tensors[name].lerp_(values, 1 - decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew at the present weights; collective."""
        self.num_updates = 0
        for name in self._owners:
            values = self._own_part(name)
            if values is not None:
                self.tensors[name] = values.clone()

    def state(self) -> dict[str, StateTensor]:
        """The averages, as `ema.<name>`."""
        found: dict[str, StateTensor] = {}
        for name, owner in self._owners.items():
            part = FromOwner(self.tensors.get(name), owner, self._state.shape(name), self._group, self._state.device)
            found[f"ema.{name}"] = self._state.names.whole(name, part)
        return found
