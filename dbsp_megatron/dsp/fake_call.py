"""A call of a model on shapes alone, which leaves nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import ref

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def call_on_shapes(model: nn.Module, call: Callable[[FakeTensorMode], None], where: str) -> None:
    """Runs `call` with fake tensors; what modules keep of it (tables made at first use, counters) is taken back.

    Args:
        model: whose modules `call` runs.
        call: is given the mode to make its arguments with.
        where: for the message.

    Raises:
        ValueError: something outside of the modules keeps a fake tensor, which later passes would compute with.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _undone(model):
        call(mode)
    kept = ref(mode)
    del mode, call
    # A fake tensor keeps its mode alive.
    gc.collect()
    if kept() is not None:
        raise ValueError(
            f"{where}: the model keeps a tensor of the dry run outside of its modules, as in a functools.cache, "
            "and would compute with it later: clear that cache, and call the model once on real tensors before; "
            "dsp.parallelize takes fake=False instead"
        )


@contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """Attributes of modules, and dicts and lists among them, are as before at the end."""
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    dicts = [(x, dict(x)) for _, saved in attributes for x in saved.values() if isinstance(x, dict)]
    lists = [(x, list(x)) for _, saved in attributes for x in saved.values() if isinstance(x, list)]
    try:
        yield
    finally:
        for now, before in attributes + dicts:
            now.clear()
            now.update(before)
        for items, earlier in lists:
            items[:] = earlier
