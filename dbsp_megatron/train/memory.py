"""Peak memory of this process."""

from __future__ import annotations

import torch


def peak_memory_gib(device: torch.device) -> float:
    """Highest memory use so far: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
