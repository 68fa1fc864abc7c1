"""The configurations of the barriers between ranks that ship, for the compile-ahead tool."""

import torch

from ..runtime.case import KernelCase, meta, recorded
from ..runtime.primitives import barrier_kernel
from ..runtime.recorder import align


def aot_cases() -> list[KernelCase]:
    """The barriers for one rank and for the widest group of one host."""
    epoch, fault, cases = meta(1), meta(8, dtype=torch.int64), []
    for ranks in (1, 8):
        flags, name = meta(ranks, dtype=torch.int64), f"up to {ranks} ranks"
        cases += recorded(name, (), align, flags, epoch, fault, 0, 10**10)
        for words, calls, status in ((name, flags, epoch), ("without calls", None, None))[: 1 + ranks // 8]:
            cases += recorded(
                words, (), barrier_kernel[1,], flags, calls, status, epoch, fault, 0, ranks, 10**10, 0,
                W_BLOCK=ranks, INTERPRET=False,
            )  # fmt: skip
    return cases
