"""Router: logits in float32 by matrix instructions.

A bfloat16 token times a float32 weight is exact if the weight is cut into three bfloat16 pieces, for
24 bits are three times 8: so three products of bfloat16 with float32 sums are a product in float32, at the speed of the
matrix instructions and without a float32 copy of the tokens. Weights are the M side of ``tl.dot``, from registers. What
bounds it: reading the tokens, once for every BLOCK_E experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_D = 64


@triton.jit(do_not_specialize=["T", "E"])
def logits_kernel(
    tokens_ptr, weight_ptr, logits_ptr, T, D, E,
    PIECES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """``(T, E)`` float32 of tokens ``(T, D)`` and weight ``(E, D)``; grid (blocks of tokens, blocks of experts)."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    ds = tl.arange(0, BLOCK_D)
    x_ptrs = tokens_ptr + tokens.to(tl.int64)[:, None] * D + ds[None, :]
    w_ptrs = weight_ptr + experts[:, None] * D + ds[None, :]
    in_batch, known = (tokens < T)[:, None], (experts < E)[:, None]
    sums = tl.zeros((BLOCK_E, BLOCK_T), dtype=tl.float32)
    for d in range(0, D, BLOCK_D):
        in_depth = EVEN_D | (d + ds < D)[None, :]
        x = tl.load(x_ptrs + d, mask=in_batch & in_depth, other=0.0)
        rest = tl.load(w_ptrs + d, mask=known & in_depth, other=0.0).to(tl.float32)
        # Matrix instructions round sums towards zero: over the whole of D that would add up to a hundred times the
        # error of float32. So each step has sums of its own; the last argument, which means nothing here, keeps the
        # compiler from joining them.
        of_step = tl.zeros((BLOCK_E, BLOCK_T), dtype=tl.float32)
        for _ in tl.static_range(PIECES):
            piece = rest.to(tl.bfloat16)
            rest -= piece.to(tl.float32)
            if INTERPRET:  # the interpreter multiplies bfloat16 wrongly
                of_step = tl.dot(piece.to(tl.float32), x.to(tl.float32).T, of_step, input_precision="ieee")
            else:
                of_step = tl.dot(piece, x.T, of_step, max_num_imprecise_acc=BLOCK_D)
        sums += of_step
    targets = logits_ptr + tokens.to(tl.int64)[None, :] * E + experts[:, None]
    tl.store(targets, sums, mask=(tokens < T)[None, :] & known)


def router_logits(tokens: Tensor, weight: Tensor) -> Tensor:
    """Logits ``(T, E)`` float32 of tokens ``(T, D)`` bfloat16 and weight ``(E, D)`` float32 or bfloat16, contiguous."""
    assert tokens.dtype == torch.bfloat16, tokens.dtype
    assert weight.dtype in (torch.float32, torch.bfloat16), weight.dtype
    (num_tokens, hidden_size), num_experts = tokens.shape, weight.shape[0]
    logits = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=tokens.device)
    if num_tokens == 0:
        return logits
    # Blocks as large as still gives every SM one, at two thousand tokens and more.
    block_t = 16 if num_tokens <= 64 else 32 if num_tokens <= 4096 else 64
    block_e = min(64, max(16, triton.next_power_of_2(num_experts)))
    logits_kernel[triton.cdiv(num_tokens, block_t), triton.cdiv(num_experts, block_e)](
        tokens, weight, logits, num_tokens, hidden_size, num_experts,
        PIECES=3 if weight.dtype == torch.float32 else 1, BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_D=BLOCK_D,
        EVEN_D=hidden_size % BLOCK_D == 0, INTERPRET=triton.knobs.runtime.interpret, num_warps=4, num_stages=4,
    )  # fmt: skip
    return logits
