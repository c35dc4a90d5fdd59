"""Results of autograd functions that users may write to in place."""

from __future__ import annotations

from torch import Tensor


def own_tensor(x: Tensor) -> Tensor:
    """The memory of a temporary as a tensor that PyTorch takes for no view of another one.

    A view that an autograd function returns cannot be written to in place: PyTorch refuses, as the gradient would pass
    the function by. What is made inside and read by nothing else needs no copy.

    Args:
        x: made inside the function, perhaps a view; not one of its inputs, of which PyTorch would not notice writes.
    """
    if not x._is_view():
        return x
    return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.size(), x.stride())
