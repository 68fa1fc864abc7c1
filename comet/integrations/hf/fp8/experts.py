"""Experts that stay in block FP8: half the memory of bfloat16, and half of what a decode step reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from comet.config import MoEConfig, require
from comet.decode import DecodeWeights, joins_step, rank_slots
from comet.decode.runners import Runner
from comet.integrations.hf.experts import CometExperts
from comet.integrations.hf.stored import SCALES
from comet.layout import ExpertLayout
from comet.quantization.formats import FP8, FP8_BLOCK


class FP8Experts(CometExperts):
    """Decode steps read the elements and scales as they are, with activations in the model's type.

    More tokens are computed in FP8, too, where the runner's path is the fused one on a GPU and D a multiple of 128:
    activations are then quantised, dynamically, per token and 128 columns, as such checkpoints are meant to be run.
    Elsewhere the layer is dequantised for that one call.

    Parameters are allocated, not filled: ``gate_up_proj (e, 2F/TP, D)`` and ``down_proj (e, D, F/TP)`` float8_e4m3fn,
    and ``gate_up_proj_scale_inv (e, 2F/TP/128, ceil(D/128))`` and ``down_proj_scale_inv (e, ceil(D/128), F/TP/128)``
    float32. They get no gradient, and keep their types: ``.half()`` breaks them. A shared expert runs by itself;
    ``FP8JoinedExperts`` includes it in decode steps.

    Args:
        width: F/TP, a multiple of 128.
    """

    def __init__(
        self, hidden_size: int, width: int, layout: ExpertLayout, runner: Runner, device: torch.device
    ) -> None:
        experts, blocks, deep = layout.experts_local, width // FP8_BLOCK, -(-hidden_size // FP8_BLOCK)

        def parameter(dtype: torch.dtype, *shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(experts, *shape, dtype=dtype, device=device), requires_grad=False)

        elements = torch.float8_e4m3fn
        super().__init__(
            parameter(elements, 2 * width, hidden_size), parameter(elements, hidden_size, width), layout, runner
        )
        self.register_parameter(f"gate_up_proj{SCALES}", parameter(torch.float32, 2 * blocks, deep))
        self.register_parameter(f"down_proj{SCALES}", parameter(torch.float32, deep, blocks))
        self._decoded: DecodeWeights | None = None

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``(T, D)`` of ``(T, D)``, ``(T, K)`` and ``(T, K)``."""
        w1, w2, experts = self.gate_up_proj.detach(), self.down_proj.detach(), None
        if self.runner.takes_fp8 or joins_step(hidden_states, self.runner.decode.max_tokens):
            experts = self._decode_weights()
        else:
            w1, w2 = (
                FP8(elements=elements, scales=scales, trusted=True).dequantize(hidden_states.dtype)
                for elements, scales in zip((w1, w2), self._scales(), strict=True)
            )
        ids, weights = top_k_index.to(torch.int32), top_k_weights.float()
        return self.runner(hidden_states, ids, weights, w1, w2, experts=experts)

    def _decode_weights(self) -> DecodeWeights:
        """Made at the first step, for which it waits for the device, and again where somebody moved the weights."""
        decoded = self._decoded
        if decoded is None or decoded.w1.data_ptr() != self.gate_up_proj.data_ptr():
            w1_scales, w2_scales = self._scales()
            self._decoded = decoded = DecodeWeights(
                w1=self.gate_up_proj.detach(),
                w2=self.down_proj.detach(),
                slots=rank_slots(self.layout, self.gate_up_proj.device),
                w1_scales=w1_scales,
                w2_scales=w2_scales,
            )
        return decoded

    def _scales(self) -> tuple[Tensor, Tensor]:
        return self.get_parameter(f"gate_up_proj{SCALES}").detach(), self.get_parameter(f"down_proj{SCALES}").detach()


def check_width(moe: MoEConfig, layout: ExpertLayout) -> None:
    """Raise ``ValueError`` unless F/TP is a whole number of blocks: ranks, or gate and up, would share scales."""
    width = moe.ffn_size // layout.tp
    require(
        width % FP8_BLOCK == 0,
        f"ffn_size={moe.ffn_size} / tp={layout.tp} = {width} must be a multiple of {FP8_BLOCK} for keep_fp8=True: a "
        "rank holds whole blocks, each with its scale",
    )
