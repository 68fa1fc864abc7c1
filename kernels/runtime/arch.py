"""One table of GPUs: what each runs, and its limits.

A GPU that is not in it runs no kernel of ours. ``comet compile --arch NAME`` compiles what an entry says it runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from triton.backends.compiler import GPUTarget


@dataclass(frozen=True, kw_only=True, slots=True)
class Arch:
    """The abilities of GPUs of one compute capability."""

    name: str  # the family's name on command lines
    capability: tuple[int, int]  # major and minor number
    assembler: str  # ``--gpu-name`` of ptxas, and of NVRTC where ``cuda_kernels``
    shared_bytes: int  # most shared memory of a block
    cuda_kernels: bool = False  # whether it runs the kernels in CUDA C++, which are written for ``wgmma`` and TMA
    starts_early: bool = (
        False  # whether a kernel may start before the one before it has ended (``primitives.allow_next``)
    )
    converts_e4m3: bool = True  # whether it converts e4m3, which experts in block FP8 and MXFP8 are stored in
    # what the fused layer's Triton kernels need and it does not have, in words; layers take the plain path there. Empty
    # where they run.
    lacks: str = ""

    @property
    def target(self) -> GPUTarget:
        """For Triton's compiler."""
        major, minor = self.capability
        return GPUTarget("cuda", 10 * major + minor, 32)


HOPPER = Arch(
    name="hopper",
    capability=(9, 0),
    assembler="sm_90a",
    shared_bytes=232448,
    cuda_kernels=True,
    starts_early=True,
)
AMPERE = Arch(
    name="ampere",
    capability=(8, 0),
    assembler="sm_80",
    shared_bytes=166912,
    converts_e4m3=False,
    lacks="a fence that kernels of expert caches use, and e4m3 for block FP8",
)
BLACKWELL = Arch(
    name="blackwell",
    capability=(10, 0),
    assembler="sm_100a",
    shared_bytes=232448,
    starts_early=True,
)
ARCHS = {arch.name: arch for arch in (AMPERE, HOPPER, BLACKWELL)}


def arch_of(device: torch.device) -> Arch | None:
    """The entry of a GPU; ``None`` of one that is not in the table, and of a CPU."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    return next((arch for arch in ARCHS.values() if arch.capability == capability), None)


@functools.cache
def starts_early(device: torch.device) -> bool:
    """``Arch.starts_early`` of a device, kept for every step; launches that are recorded are those of Hopper."""
    arch = HOPPER if device.type == "meta" else arch_of(device)
    return arch is not None and arch.starts_early


def obstacle(device: torch.device) -> str:
    """The reason why a GPU runs no kernel of ours; empty where it does."""
    arch, name = arch_of(device), torch.cuda.get_device_name(device)
    major, minor = torch.cuda.get_device_capability(device)
    if arch is None:
        return f"{name} (sm_{major}{minor}) is not in the table of GPUs, {', '.join(ARCHS)}"
    return arch.lacks and f"{name} (sm_{major}{minor}) lacks {arch.lacks}"
