"""Master weights and moments of megatron-core's optimizers, as whole tensors by name."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch import Tensor, nn

from dbsp_megatron.train.engines.base import ParameterNames
from dbsp_megatron.train.engines.frozen import FrozenMasters
from dbsp_megatron.train.mesh import Mesh
from dbsp_megatron.train.optimizer import MOMENTS, allocate_state
from dbsp_megatron.train.state import ByFunction, FlatRange, StateTensor


class MegatronState:
    """Finds, for each parameter, the part of its fp32 master weight and moments that this rank holds.

    Args:
        ddp: the wrapped model.
        optimizer: what `get_megatron_optimizer` made.
        names: names and tensor-parallel splits, taken before the model was wrapped.
        mesh: the groups.
        device: where whole tensors are put together.
        keeps_moments: whether the optimizer is a kind of Adam.
        frozen: fp32 copies of frozen weights, where the model was cast to bf16.
    """

    def __init__(
        self,
        ddp: Any,
        optimizer: Any,
        names: ParameterNames,
        mesh: Mesh,
        device: torch.device,
        *,
        keeps_moments: bool,
        frozen: FrozenMasters | None = None,
    ) -> None:
        self._frozen_masters = frozen
        self._ddp, self._names, self._mesh, self._device = ddp, names, mesh, device
        self._optimizers: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
        self._parameters: dict[str, nn.Parameter] = {
            names.to_global[name]: parameter for name, parameter in ddp.module.named_parameters()
        }
        self._keeps_moments, self.has_moments = keeps_moments, False
        self._parts = {name: self._find(parameter) for name, parameter in self._parameters.items()}

    def _find(self, parameter: nn.Parameter) -> tuple[Any, Tensor | None, int]:
        """Torch optimizer, master weight (part) or None, and where that part starts."""
        if not parameter.requires_grad:
            return None, None, 0
        for optimizer in self._optimizers:
            if not isinstance(optimizer, DistributedOptimizer):
                whole = isinstance(optimizer, FP32Optimizer)
                return optimizer.optimizer, parameter if whole else getattr(parameter, "main_param", parameter), 0
            if parameter in optimizer.model_param_gbuf_map:
                place = optimizer._get_model_param_range_map(parameter)["param"]
                group, index = optimizer.model_param_group_index_map[parameter]
                return optimizer.optimizer, optimizer.optimizer.param_groups[group]["params"][index], place.start
        return None, None, 0  # other ranks hold all of it

    @property
    def _is_split(self) -> bool:
        return any(isinstance(optimizer, DistributedOptimizer) for optimizer in self._optimizers)

    def _frozen(self, name: str) -> StateTensor:
        parameter = self._parameters[name]

        def write(value: Tensor) -> None:
            parameter.data.copy_(value)

        if self._frozen_masters is not None:
            return self._names.whole(name, self._frozen_masters.tensor(name, write))
        return self._names.whole(name, ByFunction(parameter.shape, lambda: parameter.detach().float(), write))

    def _whole(self, name: str, part: Tensor | None) -> StateTensor:
        if not self._is_split or self._mesh.data_group is None:
            if part is None:
                raise ValueError(f"no part of {name} on any rank")
            return self._names.whole(name, part)
        shape = self._parameters[name].shape
        flat = FlatRange(part, self._parts[name][2], shape, self._mesh.data_group, self._device)
        return self._names.whole(name, flat)

    def masters(self) -> dict[str, Any]:
        """This rank's parts of the master weights, by global name."""
        return {name: master for name, (_, master, _) in self._parts.items() if master is not None}

    def like_masters(self, kind: str, parts: dict[str, Tensor]) -> dict[str, StateTensor]:
        """Tensors split as the master weights are, as `<kind>.<name>`.

        Args:
            kind: first word of the names.
            parts: this rank's parts; names of which it has none may lack.
        """
        trained = [name for name, parameter in self._parameters.items() if parameter.requires_grad]
        return {f"{kind}.{name}": self._whole(name, parts.get(name)) for name in trained}

    def weights(self) -> dict[str, StateTensor]:
        """The master weights, and frozen ones as they are."""
        parts = {name: master.detach() for name, master in self.masters().items()}
        tensors = self.like_masters("model", parts)
        frozen = {name for name, parameter in self._parameters.items() if not parameter.requires_grad}
        return {
            f"model.{name}": self._frozen(name) if name in frozen else tensors[f"model.{name}"]
            for name in self._parameters
        }

    def moments(self) -> dict[str, StateTensor]:
        """What the optimizer keeps; empty for plain gradient descent and before the first step."""
        tensors: dict[str, StateTensor] = {}
        # Not asked of the optimizer's state: a rank may hold no part of any weight, and must name what others have.
        for moment in MOMENTS if self.has_moments else ():
            parts = {
                name: optimizer.state[master][moment]
                for name, (optimizer, master, _) in self._parts.items()
                if master is not None
            }
            tensors |= self.like_masters(f"optim.{moment}", parts)
        return tensors

    def stepped(self) -> None:
        """The optimizer has stepped: moments exist, if it is one that keeps them."""
        self.has_moments = self._keeps_moments

    def allocate(self, num_steps_done: int) -> None:
        """Make the state of a run that has done some steps, to load into."""
        for optimizer in self._optimizers:
            if optimizer.optimizer is not None:
                allocate_state(optimizer.optimizer, num_steps_done)
        self.stepped()

    def copy_to_model(self) -> None:
        """Bring the model's weights up to date with the master weights; collective."""
        for optimizer in self._optimizers:
            if not isinstance(optimizer, FP32Optimizer):
                optimizer._copy_main_params_to_model_params()
        if self._is_split:
            self._ddp.start_param_sync(force_sync=True)
