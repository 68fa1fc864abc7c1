"""The layer in block FP8 with real ranks: twin and kernels against float64 on the quantised operands."""

import pytest
import torch
from fp8_cases import check_pack, fp8_shard
from layer_cases import LayerCase, rank_inputs
from layer_ranks import build_layer, run_case
from ranks import in_ranks
from tiers import slow

WIDE = dict(hidden_size=128, ffn_size=128, fp8=True)


@pytest.mark.parametrize("path", ["twin", slow("fused")])
@in_ranks(2, interpret="path")
def test_delayed_ranks_and_a_layer_in_between_whose_rows_are_not_packed(rank: int, world_size: int, path: str) -> None:
    """Packed and plain rows take turns in the same memory, where they lie differently."""
    case = LayerCase("ep2", 2, 1, (140, 20), calls=3, seed=3, delay_s=0.05, **WIDE)
    moe, (w1, w2) = build_layer(case, rank, path), fp8_shard(case, rank)
    experts, group = moe.experts, moe.group
    plain, given = (w1.dequantize(), w2.dequantize()), rank_inputs(case, rank).routed
    first = experts.fp8(given, w1, w2), experts(given, *plain)
    for _ in range(2):
        assert torch.equal(experts.fp8(given, w1, w2), first[0])
        assert torch.equal(experts(given, *plain), first[1])
    group.workspace.check()
    group.close()
    run_case(rank, world_size, case, path)


def hard_numbers(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Rows of all magnitudes float32 has, among them zeros, ties of e4m3 and numbers that become subnormal there."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    values[1] = torch.arange(columns) % 449 / 16
    values[2] = 0
    values[3, ::3] = -0.0
    values[4] *= 2.0 ** torch.randint(-30, 30, (columns,), generator=generator)
    values[5] = 2.0 ** torch.arange(columns).sub(columns // 2).clamp(-126, 120)
    values[6] = 1e-37
    values[7] = 448 * 2.0**-7
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@in_ranks(1, interpret=True)
def test_the_kernel_that_packs_gives_the_bits_of_the_quantiser(rank: int, world_size: int, dtype: torch.dtype) -> None:
    for seed, columns in enumerate((128, 256, 896)):
        check_pack(hard_numbers(67, columns, seed).to(dtype).nan_to_num())


@pytest.mark.parametrize(
    ("hidden_size", "ffn_size", "message"),
    [
        (144, 128, "hidden_size=144 must be a multiple of 128 for experts in block FP8"),
        (128, 192, "ffn_size / tp=192 must be a multiple of 128 for experts in block FP8"),
    ],
)
def test_widths_that_are_no_whole_blocks(hidden_size: int, ffn_size: int, message: str) -> None:
    case = LayerCase("odd", 1, 1, (4,), hidden_size=hidden_size, ffn_size=ffn_size)
    inputs, experts = rank_inputs(case, 0), build_layer(case, 0, "twin").experts
    with pytest.raises(ValueError, match=message):
        experts.fp8(inputs.routed, *fp8_shard(case, 0))


def test_gradients_are_refused() -> None:
    case = LayerCase("one rank", 1, 1, (4,), **WIDE)
    inputs, experts = rank_inputs(case, 0), build_layer(case, 0, "twin").experts
    inputs.tokens.requires_grad_()
    with pytest.raises(ValueError, match="requires_grad=True of tokens or top_k_weights must be False"):
        experts.fp8(inputs.routed, *fp8_shard(case, 0))
    with torch.no_grad():
        experts.fp8(inputs.routed, *fp8_shard(case, 0))
