"""One rank's decode step: routed tokens in, their weighted expert outputs out."""

from __future__ import annotations

import torch
from torch import Tensor

from comet.config import check_kernels, resolve_kernels
from comet.decode.twin import warp_decode_torch
from comet.decode.weights import DecodeScratch, DecodeWeights, check_inputs
from comet.kernels.decode.blocks import DecodeConfig, select
from comet.kernels.decode.step import ExpertWeights, ReceiveBuffer, Step, StepTensors
from comet.kernels.decode.warp_decode import decode
from comet.kernels.experts.waves import waves_of
from comet.kernels.runtime.arguments import aligned
from comet.limits import at_least, check_values
from comet.utils.graphs import hold_if_captured
from comet.utils.uncompiled import uncompiled


@uncompiled
def warp_decode(
    tokens: Tensor,
    top_k_ids: Tensor,
    top_k_weights: Tensor,
    weights: DecodeWeights,
    *,
    scratch: DecodeScratch | None = None,
    use_kernels: bool | None = None,
) -> Tensor:
    """Run the experts held here on a few tokens, reading every weight row that is needed once.

    The host reads no tensor and, given ``scratch`` and contiguous tensors, allocates only the output, so the step can
    be captured in a CUDA graph and replayed with other tokens and other routing. Equal inputs give equal bits.

    Args:
        tokens: ``(T, D)`` of the weights' dtype, or of any where these are quantised; T at most 64.
        top_k_ids: ``(T, K)`` int32 or int64; -1 masks. Kernels take any id outside ``[0, E)`` as masked; the twin
            raises.
        top_k_weights: ``(T, K)`` float32.
        scratch: Memory between the two kernels, shared by all layers of one stream; ``None`` allocates it. What a
            captured step uses lives at least as long as the memory of ``weights.w1``.
        use_kernels: Triton kernels or the torch twin; ``None``: kernels on a GPU, twin on a CPU.

    Returns:
        ``(T, D)``: for each token the sum over its routed rows held here, in slot order.
    """
    if not resolve_kernels(tokens.device, use_kernels):
        return warp_decode_torch(tokens, top_k_ids, top_k_weights, weights)
    check_inputs(tokens, top_k_ids, top_k_weights, weights)
    return run_kernels(tokens, top_k_ids, top_k_weights, weights, scratch=scratch)


def run_kernels(
    tokens: Tensor,
    top_k_ids: Tensor,
    top_k_weights: Tensor,
    weights: DecodeWeights,
    *,
    scratch: DecodeScratch | None = None,
    config: DecodeConfig | None = None,
    buffer: ReceiveBuffer | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``warp_decode`` on kernels, with a choice of blocks and, over ranks, a receive buffer for the sum.

    The caller has checked the inputs. Gathered tokens, ids and routing weights need no contents yet; ``out`` is then of
    this rank's tokens.
    """
    check_kernels(tokens.dtype, tokens.device)
    num_tokens, top_k = top_k_ids.shape
    out = tokens.new_empty(tokens.shape) if out is None else out
    if num_tokens == 0:
        return out
    if scratch is None:
        scratch = DecodeScratch.create(weights, top_k, tokens.dtype, max_tokens=num_tokens)
    scratch.check(tokens, top_k, weights)
    host = weights.host
    if host is not None and num_tokens == 1 and waves_of(top_k_ids, host) > 1:  # its kernels know no waves
        check_values(at_least(top_k, "K of one token"), num_slots=host.tables.num_slots)
    held = () if host is None else host.memory
    held += tuple(bias for bias in (weights.b1, weights.b2) if bias is not None)
    hold_if_captured(weights.w1, *held, weights.slots, *scratch.buffers)
    w1, w2 = weights.w1, weights.w2
    if weights.per_number > 1:
        w1, w2 = w1.view(torch.int32), w2.view(torch.int32)
    ids, routing_weights, tokens = top_k_ids.contiguous(), top_k_weights.contiguous(), aligned(tokens.contiguous())
    step = Step(
        tensors=StepTensors(tokens, ids, routing_weights, weights.slots, *scratch.buffers, out),
        w1=ExpertWeights(w1, weights.w1_scales, weights.b1),
        w2=ExpertWeights(w2, weights.w2_scales, weights.b2),
        shared_scale=weights.shared_scale,
        activation=weights.activation,
        interleaved=weights.interleaved,
        host=host,
    )
    if config is None:
        sizes = (weights.hidden_size, weights.ffn_size)
        config = select(
            tokens.dtype, num_tokens, top_k, *sizes,
            shared_scale=weights.shared_scale, four_bits=weights.per_number > 1,
        )  # fmt: skip
    decode(step, config, buffer)
    return out
