"""Layer 1 in CUDA C++, as far as it goes without a GPU: what host and source must agree on, and when it is chosen."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from launch_arguments import in_16_bits, make_symm, make_table

from comet.kernels.layer import gemm_combine as module
from comet.kernels.layer.gemm_combine import DEFAULT, CudaConfig, Variant, combine_bytes, launched_blocks, ticket_parts
from comet.kernels.layer.triton.gemm_combine import GemmCombineConfig
from comet.kernels.runtime.arch import HOPPER
from comet.kernels.runtime.arguments import CHUNK_FLAGS, COMBINE_CHUNK_ROWS, CombineLists, GradBuffer
from comet.layer import fused
from comet.layer.launch_arguments import tile_table
from comet.layer.plan import Launch, Plan
from comet.layout import ExpertLayout


def shared_bytes(num_experts: int, config: CudaConfig = DEFAULT) -> int:
    """Of a block in bfloat16, top-8."""
    variant = Variant(weights=torch.bfloat16, output=torch.bfloat16, top_k=8, world_size=4, config=config)
    return variant.shared_bytes(num_experts)


def test_worked_examples() -> None:
    assert shared_bytes(32) == 1024 + 4 * 49152 + 2 * 4096 + 64 + 384 + 3 * (2048 + 6144) + 4 * 33 == 230980
    assert CudaConfig.select(256).most_rows == 272
    assert CudaConfig.select(512) == CudaConfig.select(64) == CudaConfig(most_rows=256)
    assert combine_bytes(8, 12) == 3 * (32 * 8 * 8 + 12 * 512) == 24576
    assert ticket_parts(2048, 4, 8, 2048, 4) == (2, 4)
    assert ticket_parts(2048, 4, 8, 7168, 4) == (4, 2)
    assert ticket_parts(256, 1, 8, 2048, 1) == (8, 8)
    assert ticket_parts(8192, 4, 8, 7168, 4) == (1, 2)
    assert ticket_parts(2048, 4, 2, 4096, 4) == (4, 1)


@pytest.mark.parametrize("num_panels", range(1, 17))
@pytest.mark.parametrize("cols", [16, 256, 2048, 7168])
@pytest.mark.parametrize("max_tokens", [128, 512, 8192])
def test_parts_of_the_launch_have_flags_and_column_blocks(max_tokens: int, cols: int, num_panels: int) -> None:
    column_parts, row_parts = ticket_parts(max_tokens, 2, 8, cols, num_panels)
    assert 1 <= column_parts * row_parts <= CHUNK_FLAGS // num_panels
    assert column_parts <= max(1, -(-cols // 256))
    assert COMBINE_CHUNK_ROWS % row_parts == 0


def test_rows_of_an_expert_if_all_have_equally_many() -> None:
    layout = ExpertLayout(num_experts=256, top_k=8, ep=4, tp=1, rank=0)
    values = {field.name: torch.zeros(64, dtype=torch.int32) for field in fields(Plan)}
    plan = Plan(**values | {"layout": layout, "num_tokens": 2048})
    assert tile_table(plan, Launch.GEMM_COMBINE).expected_tokens_per_expert == 8192 * 8 / 256 == 256


@pytest.mark.parametrize("expected_tokens_per_expert", [0.0, 231.9, 232.0, 256.0, 280.0, 280.1, 4096.0])
def test_blocks_fit_where_the_layer_takes_them(expected_tokens_per_expert: float) -> None:
    chosen, default = CudaConfig.select(expected_tokens_per_expert), CudaConfig()
    assert (chosen == default) == (not 232 <= expected_tokens_per_expert <= 280)
    assert chosen.most_rows % chosen.box_rows == 0
    assert shared_bytes(256, chosen) <= shared_bytes(256, default) <= HOPPER.shared_bytes


def make_call(**changes: object) -> dict[str, object]:
    flags = torch.zeros(2, 4, 16, dtype=torch.int32)
    returns = CombineLists(row_slots=torch.zeros(1, 8), row_weights=torch.zeros(1), send_rows=flags, recv_counts=flags)
    y, b = in_16_bits(1, 2048), in_16_bits(32, 2048, 768)
    return dict(y=y, b=b, symm=make_symm(2, 8192), returns=returns, table=make_table()) | changes


def test_when_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_available", lambda device: True)
    assert module.can_run(**make_call())
    wide = torch.empty(1, 768, device="meta")
    assert not module.can_run(**make_call(y=wide))  # float32
    assert not module.can_run(**make_call(b=in_16_bits(4096, 2048, 768)))  # their table needs too much shared memory
    unweighted = CombineLists(
        row_slots=torch.zeros(1, 8), row_weights=None, send_rows=torch.zeros(1), recv_counts=torch.zeros(1)
    )  # fmt: skip
    assert not module.can_run(**make_call(returns=unweighted))  # sums alone
    grads = GradBuffer(row_grads=wide, received=wide, received_pointers=wide, out=wide)
    gradients = unweighted._replace(grads=grads)
    assert module.can_run(**make_call(returns=gradients, b=in_16_bits(32, 1536, 2048)))
    assert not module.can_run(**make_call(returns=gradients._replace(row_weights=wide)))  # of weighted sums


def test_blocks_of_a_launch() -> None:
    """Pairs of blocks may find an SM left over in each part of the GPU, where others hold some."""
    assert [launched_blocks(132, 0, cluster) for cluster in (1, 2)] == [132, 132]
    assert [launched_blocks(132, 31, cluster) for cluster in (1, 2)] == [101, 92]
    assert [launched_blocks(16, 8, cluster) for cluster in (1, 2)] == [8, 2], "half of a small part of a GPU"


@pytest.mark.parametrize("cuda_kernels", [False, True])
def test_it_is_not_asked_where_a_rank_of_the_group_lacks_it(
    monkeypatch: pytest.MonkeyPatch, cuda_kernels: bool
) -> None:
    """Its flags are not those of the twin: the others would wait for ever, or not at all."""
    launched: list[str] = []
    monkeypatch.setattr(module, "is_available", lambda device: True)
    monkeypatch.setattr(module, "gemm_combine_cuda", lambda *_, **__: launched.append("cuda"))
    monkeypatch.setattr(fused, "gemm_combine", lambda *_, **__: launched.append("triton"))
    call = make_call()
    tensors = (call[name] for name in ("y", "b", "y", "y", "symm", "returns", "table"))
    fused.launch_gemm_combine(*tensors, GemmCombineConfig(), in_cuda=cuda_kernels)
    assert launched == ["cuda" if cuda_kernels else "triton"]
