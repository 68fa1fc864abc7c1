"""How the launches of one layer cut its tensors and share the GPU.

This module needs no Triton: tuner and twin ask it where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..runtime.activation import SWIGLU, Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class TileShape:
    """GEMM tile of the layer's kernels in Triton for one element type."""

    block_f: int = 128  # hidden columns of a layer-0 tile (its GEMM tile is gate and up, twice as wide)
    block_n: int = 256  # output columns of a layer-1 tile
    block_k: int = 64  # contraction step
    num_stages: int = 3  # depth of the load pipeline

    @classmethod
    def select(cls, dtype: torch.dtype, hidden_size: int, ffn_size: int) -> TileShape:
        """The measured default, narrowed to the matrix.

        128 x 256 x 64 in 16 bits; 16 x 64 x 16 in 32, as IEEE float32 has no tensor cores.

        Example: bfloat16, D=2048, F=768: 128, 256, 64; bfloat16, D=64, F=48: 64, 64, 64.
        """
        full = cls(block_f=16, block_n=64, block_k=16, num_stages=2) if dtype == torch.float32 else cls()
        return cls(
            block_f=min(full.block_f, _power_of_2(ffn_size)),
            block_n=min(full.block_n, _power_of_2(hidden_size)),
            block_k=min(full.block_k, _power_of_2(min(hidden_size, ffn_size))),
            num_stages=full.num_stages,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """The settings that the launches of one layer share."""

    comm_blocks: int = 0  # thread blocks that only communicate at first; 0: communication is colocated with compute
    num_panels: int = 4  # column panels of layer 1 and of the tokens' gradient, no more than there are column blocks
    reserved_sms: int = 0  # SMs that layer 1 leaves to kernels of other streams
    activation: Activation = SWIGLU  # the experts' activation
    tile: TileShape = TileShape()


def _power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()
