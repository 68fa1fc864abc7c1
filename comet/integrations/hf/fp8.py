"""Experts that stay in block FP8: half the memory of bfloat16, and half of what a decode step reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from comet.config import require
from comet.decode import DecodeWeights, SequenceClock, SharedSlots, joins_step, rank_slots
from comet.decode.runners import Runner, fp8_weights
from comet.decode.shared import state_of
from comet.integrations.hf.modules import CometExperts, shared_matrices
from comet.integrations.hf.stored import FUSED, SCALES
from comet.layout import ExpertLayout, RoutedTokens
from comet.quantization.formats import FP8, FP8_BLOCK
from comet.utils.graphs import is_capturing

NAMES = (*FUSED, *(f"{name}{SCALES}" for name in FUSED))
_KEPT = "_comet_decode_weights"


class FP8Experts(CometExperts):
    """Decode steps read the elements and scales as they are, with activations in the model's type.

    More tokens are computed in FP8, too, where the runner's path is the fused one on a GPU and D a multiple of 128:
    activations are then quantised, dynamically, per token and 128 columns, as such checkpoints are meant to be run.
    Elsewhere the layer is dequantised for that one call.

    Parameters are allocated, not filled: float8_e4m3fn, and a float32 scale per block of 128 x 128 (``..._scale_inv``).
    They get no gradient, and keep their types: ``.half()`` breaks them. Behind this rank's experts they hold its pieces
    of a shared expert that joins decode steps, each as wide as F/TP.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        layout: ExpertLayout,
        runner: Runner,
        device: torch.device,
        num_pieces: int = 0,
    ) -> None:
        own = _allocated(layout.experts_local + num_pieces, hidden_size, width, device)
        super().__init__(own["gate_up_proj"], own["down_proj"], layout, runner)
        for name in NAMES:
            self.register_parameter(name, own[name])

    def shared_slots(self, shared: nn.Module, columns: int, clock: SequenceClock) -> SharedSlots:
        return FP8SharedSlots(self.layout, columns, shared, self, clock)

    def run(self, routed: RoutedTokens, joined: DecodeWeights | None = None) -> Tensor:
        """``(T, D)`` of the experts, or of those of a step that the shared expert has joined."""
        kept = kept_weights(self, lambda: rank_slots(self.layout, self.gate_up_proj.device), self.layout.experts_local)
        if joined is None:
            return run_kept(self.runner, routed, kept)
        return self.runner(routed, kept.w1, kept.w2, experts=joined)


def _allocated(count: int, hidden_size: int, width: int, device: torch.device) -> dict[str, nn.Parameter]:
    deep, blocks = -(-hidden_size // FP8_BLOCK), width // FP8_BLOCK
    shapes = (2 * width, hidden_size), (hidden_size, width), (2 * blocks, deep), (deep, blocks)
    return {
        name: nn.Parameter(
            torch.empty(count, *shape, device=device, dtype=torch.float8_e4m3fn if name in FUSED else torch.float32),
            requires_grad=False,
        )
        for name, shape in zip(NAMES, shapes, strict=True)
    }


def kept_weights(experts: Any, slots: Callable[[], Tensor], count: int | None = None) -> DecodeWeights:
    """Return what decode steps read of a module's first ``count`` experts in block FP8, in the memory of parameters.

    The values of scales are checked at the first step, which waits for the device, and when the weights were moved or
    torch counted a write to them.
    """
    parts = [getattr(experts, name) for name in NAMES]
    stand, kept = state_of(parts), experts.__dict__.get(_KEPT)
    if kept is None or kept[0] != stand:
        with torch.inference_mode(mode=False), torch.no_grad():
            w1, w2, w1_scales, w2_scales = (part.detach()[:count] for part in parts)
            scales = dict(w1_scales=w1_scales.float(), w2_scales=w2_scales.float())
            kept = experts.__dict__[_KEPT] = stand, DecodeWeights(w1=w1, w2=w2, slots=slots(), **scales)
    found: DecodeWeights = kept[1]
    for copied, part in ((found.w1_scales, parts[2]), (found.w2_scales, parts[3])):
        if copied is not None and part.dtype != copied.dtype:  # the only copies, of a few bytes
            copied.copy_(part[:count])
    return found


def run_kept(runner: Runner, routed: RoutedTokens, kept: DecodeWeights) -> Tensor:
    """``(T, D)``, from FP8 in decode steps and where the runner takes it; else the layer is dequantised for this."""
    if runner.takes_fp8 or joins_step(routed.tokens, runner.decode.max_tokens):
        return runner(routed, kept.w1, kept.w2, experts=kept)
    w1, w2 = (weight.dequantize(routed.tokens.dtype) for weight in fp8_weights(kept).values())
    return runner(routed, w1, w2)


class FP8SharedSlots(SharedSlots):
    """``SharedSlots`` of pieces that are kept in block FP8 by ``experts``, as the routed experts are.

    The shared expert's own module is dequantised and computes all that is no decode step. Each prompt compares it with
    the pieces: it must not be written to.
    """

    def __init__(
        self, layout: ExpertLayout, columns: int, module: nn.Module, experts: FP8Experts, clock: SequenceClock
    ) -> None:
        super().__init__(layout, columns, module, shared_matrices, clock=clock)
        self.experts = experts

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _join(self, w1: Tensor, w2: Tensor) -> DecodeWeights:
        w1, w2, w1_scales, w2_scales = (self.experts.get_parameter(name).detach() for name in NAMES)
        slots = self.table(len(w1) - self.layout.experts_local, w1.device)
        return DecodeWeights(w1=w1, w2=w2, slots=slots, w1_scales=w1_scales, w2_scales=w2_scales)

    def _fill(self, joined: DecodeWeights) -> None:
        """Raise ``ValueError`` if the module has other weights than the pieces; waits for the device."""
        dtype, first = self._matrices(self.module).gate.dtype, self.layout.experts_local
        if len(joined.w1) == first or is_capturing(joined.w1.device):
            return
        w1, w2 = (
            FP8(elements=each.elements[first:], scales=each.scales[first:], trusted=True).dequantize(dtype)
            for each in fp8_weights(joined).values()
        )
        with self.experts.runner.noting("comparison of a shared expert"):  # other ranks may hold no piece
            same = torch.stack([(part == source).all() for part, source in self._parts(w1, w2)]).all()
            advice = "decode steps read it in block FP8, load the model with keep_fp8=False to change it"
            require(bool(same), f"the shared expert must not be written to: {advice}")
