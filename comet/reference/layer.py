"""The routed experts in plain torch, in the kernels' order of summation and rounding: specification and oracle.

For every rank d of W = ep * tp: EP shard d // tp owns experts ``[shard * e, (shard + 1) * e)``, TP rank d % tp owns an
equal run of columns of gate, of up and of w2. With ``round`` meaning "to the dtype of the tokens" and all else float32:

    hidden_k  = round(activation(x @ gate_k^T, x @ up_k^T))     silu(gate) * up, or another Activation
    output_k  = round(hidden_k @ w2_k^T)
    partial_d = round(sum over the slots k of rank d, in slot order, of weight_k * output_k)
    y         = round(sum over d, in rank order, of partial_d)

Biases are added to the products before they are rounded or activated: b1 to gate and up, b2 to the output on the first
TP rank of a shard alone.

In float16 what is past 65504 before such a rounding becomes infinite: a partial sum too, though the other ranks' might
bring y back, and then y is infinite or NaN, never a wrong number. Plain path and decode add before they round.

Everything is differentiable by autograd. float64 tensors run in float64 throughout: the exact oracle.
Not covered: communication (all experts are here), and speed beyond tiny models.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from comet.comm.collectives import accumulator_dtype
from comet.config import require
from comet.kernels.runtime.activation import SWIGLU, Activation
from comet.layout import Biases, ExpertLayout, positions_in_groups
from comet.utils.autocast import product, without_autocast
from comet.utils.match import Sizes, check_id_dtype, check_id_range


def reference_experts(
    tokens: Tensor,
    top_k_ids: Tensor,
    top_k_weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    ep: int = 1,
    tp: int = 1,
    expert_capacity: int | None = None,
    activation: Activation = SWIGLU,
    biases: Biases | None = None,
) -> Tensor:
    """Send every token through its K experts and add up the weighted outputs as W = ep * tp ranks would.

    Example (T = 1, K = E = 2, D = F = 1): token ``[[1]]``, ids ``[[0, 1]]``, weights ``[[0.5, 0.25]]``, w1
    ``[[[32], [1]], [[32], [2]]]``, w2 ``[[[1]], [[0.5]]]``. silu(32) is 32 in float32, so hidden is 32 and 64, the
    outputs are 32 and 32, and y is ``0.5 * 32 + 0.25 * 32 = [[24]]``. With ids ``[[1, -1]]`` it is ``[[16]]``.

    Args:
        tokens: ``(T, D)`` floating; T may be 0.
        top_k_ids: ``(T, K)`` integer in ``[-1, E)``; -1 is a masked slot and contributes nothing.
        top_k_weights: ``(T, K)`` float32; float64 with float64 tokens.
        w1: ``(E, 2F, D)``, gate rows first, then up rows; dtype of ``tokens``.
        w2: ``(E, D, F)``, dtype of ``tokens``.
        ep: Expert-parallel shards to imitate; divides E.
        tp: Ranks each expert is split over; divides F.
        expert_capacity: Routed rows an expert takes of these T tokens (see ``kept_slots``); ``None`` takes all.
        biases: ``(E, 2F)`` and ``(E, D)``, dtype of ``tokens``; ``None``: there are none.
    """
    _check(tokens, top_k_ids, top_k_weights, w1, w2, biases)
    num_experts = w1.shape[0]
    require(ep >= 1 and num_experts % ep == 0, f"ep={ep} must divide num_experts={num_experts}")
    require(tp >= 1 and w2.shape[2] % tp == 0, f"tp={tp} must divide ffn_size={w2.shape[2]}")
    if expert_capacity is not None:
        top_k_ids = top_k_ids.masked_fill(~kept_slots(top_k_ids, num_experts, expert_capacity), -1)
    partials = []
    for rank in range(ep * tp):
        layout = ExpertLayout(num_experts=num_experts, top_k=top_k_ids.shape[1], ep=ep, tp=tp, rank=rank)
        w1_local, w2_local = shard_experts(w1, w2, layout)
        partials.append(
            rank_partial(
                tokens, top_k_ids, top_k_weights, w1_local, w2_local, first_expert=layout.first_expert,
                activation=activation, biases=shard_biases(biases, layout),
            )
        )  # fmt: skip
    return sum_partials(partials)


def shard_experts(w1: Tensor, w2: Tensor, layout: ExpertLayout) -> tuple[Tensor, Tensor]:
    """The part of the experts ``(E, 2F, D)``, ``(E, D, F)`` that one rank owns: ``(e, 2F/tp, D)`` and ``(e, D, F/tp)``.

    Example: E = 4, F = 6, EP = 2, TP = 3, rank 4 is shard 1 and TP rank 1: of experts 2 and 3, the gate rows 2 and 3
    and the up rows 8 and 9 of w1, and the columns 2 and 3 of w2.
    """
    ffn_local = w2.shape[2] // layout.tp
    experts = slice(layout.first_expert, layout.first_expert + layout.experts_local)
    columns = slice(layout.tp_rank * ffn_local, (layout.tp_rank + 1) * ffn_local)
    gate, up = w1[experts].chunk(2, dim=1)
    return torch.cat([gate[:, columns], up[:, columns]], dim=1), w2[experts, :, columns]


def shard_biases(biases: Biases | None, layout: ExpertLayout) -> Biases | None:
    """Return the part ``(e, 2F/tp)`` and ``(e, D)`` of biases ``(E, 2F)`` and ``(E, D)`` that one rank adds.

    Only the first TP rank of a shard has b2, others have 0, so that the sum over ranks has b2 once.
    """
    if biases is None:
        return None
    experts = slice(layout.first_expert, layout.first_expert + layout.experts_local)
    width = biases.b1.shape[1] // (2 * layout.tp)
    columns = slice(layout.tp_rank * width, (layout.tp_rank + 1) * width)
    b1 = torch.cat([half[:, columns] for half in biases.b1[experts].chunk(2, dim=1)], dim=1)
    b2 = biases.b2[experts]
    return Biases(b1, b2 if layout.tp_rank == 0 else torch.zeros_like(b2))


def rank_partial(
    tokens: Tensor,
    top_k_ids: Tensor,
    top_k_weights: Tensor,
    w1_local: Tensor,
    w2_local: Tensor,
    *,
    first_expert: int,
    activation: Activation = SWIGLU,
    biases: Biases | None = None,
) -> Tensor:
    """The part ``(T, D)`` of one rank in every token: the weighted sum over the slots of the token that it owns.

    Weights and biases are those of ``shard_experts`` and ``shard_biases``, of the experts from ``first_expert`` on.
    """
    num_tokens, top_k = top_k_ids.shape
    owned = (top_k_ids >= first_expert) & (top_k_ids < first_expert + w1_local.shape[0])
    with without_autocast(tokens.device):
        outputs = expert_outputs(
            tokens, top_k_ids, w1_local, w2_local, first_expert=first_expert, activation=activation, biases=biases
        )
        outputs = outputs.to(accumulator_dtype(tokens.dtype)).view(num_tokens, top_k, tokens.shape[1])
        return sum_slots(outputs, top_k_weights, owned).to(tokens.dtype)


def sum_slots(outputs: Tensor, weights: Tensor, owned: Tensor) -> Tensor:
    """``(T, D)``: outputs ``(T, K, D)`` times weights ``(T, K)``, added in slot order, of slots that are ``owned``."""
    total = outputs.new_zeros(outputs.shape[0], outputs.shape[2])
    for slot in range(outputs.shape[1]):
        # Masking both factors keeps a NaN weight of a skipped slot out of the sum and out of the gradients.
        weight = weights[:, slot, None].to(outputs.dtype).where(owned[:, slot, None], 0.0)
        total = total + weight * outputs[:, slot]
    return total


def weighted_sum(outputs: Tensor, row_slots: Tensor, weights: Tensor | None) -> Tensor:
    """Add up weighted outputs in slot order, in float32, rounded once.

    Example: outputs ``[[1], [10], [nan]]``, row_slots ``[[1, 0], [-1, 0]]``, weights ``[[0.5, 2], [nan, 3]]`` give
    ``[[7], [3]]``.

    Args:
        row_slots: ``(N, K)`` int32 rows of ``outputs``; -1 contributes nothing.
        weights: ``(N, K)`` float32 (float64 for float64 outputs); ``None``: all are 1.
    """
    wide = accumulator_dtype(outputs.dtype)
    weights = torch.ones(row_slots.shape, dtype=wide, device=outputs.device) if weights is None else weights
    total = torch.zeros(row_slots.shape[0], outputs.shape[1], dtype=wide, device=outputs.device)
    for slots, slot_weights in zip(row_slots.unbind(1), weights.unbind(1), strict=True):
        part = outputs.index_select(0, slots.clamp(min=0)).to(wide) * slot_weights[:, None].to(wide)
        # A product with 0 would not do: the row of an absent slot may be NaN.
        total += part.where(slots[:, None] >= 0, 0.0)
    return total.to(outputs.dtype)


def expert_outputs(
    tokens: Tensor,
    top_k_ids: Tensor,
    w1_local: Tensor,
    w2_local: Tensor,
    *,
    first_expert: int,
    activation: Activation = SWIGLU,
    biases: Biases | None = None,
) -> Tensor:
    """Every routed row's expert output before weighting, ``(T*K, D)`` in (token, slot) order; 0 for other experts."""
    top_k = top_k_ids.shape[1]
    slot_ids = top_k_ids.flatten()
    rows, outputs = [], []
    # unbind, not w1_local[i]: its backward stacks the gradients once instead of filling E tensors of full size.
    # Experts without rows run on empty matrices, so that every weight always gets a gradient.
    weights = [w1_local, w2_local, *(biases or ())]
    for local_expert, of_expert in enumerate(zip(*(each.unbind() for each in weights), strict=True)):
        expert_rows = (slot_ids == first_expert + local_expert).nonzero().flatten()
        rows.append(expert_rows)
        of_rows = tokens.index_select(0, expert_rows // top_k)
        outputs.append(run_expert(of_rows, *of_expert, activation=activation).to(tokens.dtype))
    buffer = tokens.new_zeros(slot_ids.shape[0], tokens.shape[1])
    return buffer.index_copy(0, torch.cat(rows), torch.cat(outputs))


def run_expert(
    tokens: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    activation: Activation = SWIGLU,
) -> Tensor:
    """Run an expert ``(2F, D)``, ``(D, F)``, biases ``(2F,)``, ``(D,)``, on rows ``(R, D)``; only hidden is rounded."""
    accumulator = accumulator_dtype(tokens.dtype)
    gate, up = _affine(tokens.to(accumulator), w1, b1).chunk(2, dim=-1)
    hidden = activation.forward(gate, up).to(tokens.dtype)
    return _affine(hidden.to(accumulator), w2, b2)


def _affine(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result = product(rows, weight.to(rows.dtype))
    return result if bias is None else result + bias.to(rows.dtype)


def sum_partials(partials: Iterable[Tensor]) -> Tensor:
    """The ranks' contributions ``(T, D)``, added in order in float32 (float64 for float64), rounded once."""
    first, *others = partials
    total = first.to(accumulator_dtype(first.dtype))
    for partial in others:
        total = total + partial
    return total.to(first.dtype)


def kept_slots(top_k_ids: Tensor, num_experts: int, expert_capacity: int) -> Tensor:
    """Which slots ``(T, K)`` stay if experts take only their first routed rows in (token, slot) order.

    The number of dropped routed rows is ``(top_k_ids >= 0).sum() - kept.sum()``.

    Example: ids ``[[0, 1], [0, -1], [1, 0]]``, capacity 2: expert 0 has three rows and loses the last, so
    ``[[True, True], [True, False], [True, False]]``; one row is dropped.
    """
    require(expert_capacity >= 0, f"expert_capacity={expert_capacity} must be at least 0")
    bins = top_k_ids.flatten().long() + 1  # bin 0 holds the masked slots
    position, _ = positions_in_groups(bins, num_experts + 1)
    return ((bins > 0) & (position < expert_capacity)).view(top_k_ids.shape)


def _check(
    tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor, w1: Tensor, w2: Tensor, biases: Biases | None
) -> None:
    sizes, dtype, device = Sizes(), tokens.dtype, tokens.device
    sizes.match("tokens", tokens, "T D")
    require(tokens.is_floating_point(), f"tokens of dtype {dtype} must be floating")
    sizes.match("w2", w2, "E D F", dtype=dtype, device=device)
    sizes.match("w1", w1, "E 2F D", dtype=dtype, device=device)
    sizes.match("top_k_ids", top_k_ids, "T K", device=device)
    check_id_dtype(top_k_ids)
    sizes.match("top_k_weights", top_k_weights, "T K", dtype=accumulator_dtype(dtype), device=device)
    check_id_range(top_k_ids, w2.shape[0])
    if biases is not None:
        sizes.match("b1", biases.b1, "E 2F", dtype=dtype, device=device)
        sizes.match("b2", biases.b2, "E D", dtype=dtype, device=device)
