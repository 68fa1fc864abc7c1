"""The layers in CUDA C++, as far as it goes without a GPU: what host and source must agree on, which launch is taken,
and what it is handed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from comet.comm import LocalCommunicator
from comet.kernels.layer import dispatch_gemm as layer0
from comet.kernels.layer import gemm_combine as layer1
from comet.kernels.layer.gemm_combine import FP8_CONFIG, CudaConfig, combine_bytes, launched_blocks, ticket_parts
from comet.kernels.layer.settings import TileShape
from comet.kernels.layer.triton import gemm_combine as triton_layer1
from comet.kernels.runtime.arch import HOPPER
from comet.kernels.runtime.arguments import CombineLists, GradBuffer, Scaled, SymmBuffer, TileTable, num_sms
from comet.kernels.runtime.cuda_source import TensorMap
from comet.kernels.runtime.limits import CHUNK_FLAGS, COMBINE_CHUNK_ROWS
from comet.layer import fused
from comet.layer.fused import tile_table
from comet.layer.plan import Launch, Plan, PlanRules, num_counters
from comet.layer.twin.layer import Twin
from comet.layer.workspace import Workspace, WorkspaceShape
from comet.layout import ExpertLayout
from comet.schedule.settings import LayerSettings


def make_symm(world_size: int = 2, max_tokens: int = 128) -> SymmBuffer:
    numbers, pointers = torch.zeros(4, 16, dtype=torch.int32), torch.zeros(world_size, dtype=torch.int64)
    return SymmBuffer(
        rows=numbers, row_pointers=pointers, flags=numbers, flag_pointers=pointers, epoch=numbers, fault=numbers,
        rank=0, max_tokens=max_tokens, timeout_ns=1,
    )  # fmt: skip


def make_table(block_rows: int = 128) -> TileTable:
    """With segments."""
    numbers = torch.zeros(4, dtype=torch.int32)
    return TileTable(
        tiles=numbers, num_tiles=numbers, row_ids=numbers, counters=numbers, block_rows=block_rows,
        segments=(numbers, numbers),
    )  # fmt: skip


def in_16_bits(*shape: int) -> Tensor:
    """Weights without memory."""
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def in_fp8(experts: int, rows: int, columns: int) -> Scaled:
    """The same, ``(e, N, K)`` in block FP8."""
    elements = torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn, device="meta")
    return Scaled(elements=elements, scales=torch.empty(experts, rows // 128, columns // 128, device="meta"))


BF16 = dict(weights=torch.bfloat16, output=torch.bfloat16)
FP8 = dict(weights=torch.float8_e4m3fn, output=torch.bfloat16)
LAYER0 = partial(layer0.Variant, **BF16, world_size=4)
LAYER1 = partial(layer1.Variant, **BF16, top_k=8, world_size=4)
SMS, RESERVED = 132, 31
NUMBERS = torch.zeros(4, dtype=torch.int32)

# ---- worked examples, and what they fit


@pytest.mark.parametrize(
    ("variant", "num_bytes", "per_expert"),
    [
        (LAYER0(), 1024 + 4 * 53248 + 2 * 2048 + 64 + 512 + 4 * 97, 12),
        (LAYER0(is_dgrad=True), 1024 + 4 * 53248 + 2 * 4096 + 64 + 512 + 4 * 97, 12),
        (LAYER0(**FP8), 1024 + 4 * 49152 + 4 * 2048 + 1024 + 64 + 512 + 4 * 97, 12),
        (LAYER1(), 1024 + 4 * 49152 + 2 * 4096 + 64 + 384 + 3 * (2048 + 6144) + 4 * 33, 4),
        (LAYER1(**FP8, config=FP8_CONFIG), 1024 + 4 * 49152 + 4 * 512 + 64 + 384 + 3 * (2048 + 6144) + 4 * 33, 4),
    ],
)
def test_shared_memory(variant: layer0.Variant | layer1.Variant, num_bytes: int, per_expert: int) -> None:
    assert variant.shared_bytes(32) == num_bytes
    assert variant.shared_bytes(33) - num_bytes == per_expert
    assert variant.shared_bytes(256) <= HOPPER.shared_bytes


def test_worked_examples() -> None:
    assert num_counters(4, 2048) == 128 + 4 * 16 == 192
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
    assert LAYER1(config=chosen).shared_bytes(256) <= LAYER1(config=default).shared_bytes(256) <= HOPPER.shared_bytes


def test_sums_of_all_lengths_fit_in_block_fp8() -> None:
    for entries in range(1, layer1.MOST_ENTRIES + 1):
        assert LAYER1(**FP8, top_k=entries, config=FP8_CONFIG).shared_bytes(256) <= HOPPER.shared_bytes


def test_blocks_of_a_launch() -> None:
    """When other kernels hold SMs, each part of the GPU may have one SM left over that a pair cannot use."""
    assert [launched_blocks(132, 0, cluster) for cluster in (1, 2)] == [132, 132]
    assert [launched_blocks(132, 31, cluster) for cluster in (1, 2)] == [101, 92]
    assert [launched_blocks(16, 8, cluster) for cluster in (1, 2)] == [8, 2], "half of a small part of a GPU"


@pytest.mark.parametrize(("dtype", "cols"), [(torch.bfloat16, 128), (torch.float8_e4m3fn, 256)])
def test_copies_of_w1_have_eights_of_gate_and_of_up_in_turn(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, cols: int
) -> None:
    monkeypatch.setattr(layer0, "tensor_map", lambda tensor, box: (tensor, box))
    ffn = 2 * cols
    w1 = torch.zeros(3, 2 * ffn, 256, dtype=dtype)
    view, box = layer0.gate_up_map(w1, cols)
    assert view.data_ptr() == w1.data_ptr()
    assert box[-1] * w1.itemsize == 128, "a line of shared memory"
    row_ids = torch.arange(w1.shape[0] * w1.shape[1])[:, None].expand(-1, 256)  # each element is the id of its row
    seen = row_ids.as_strided(view.shape, [stride // 256 for stride in view.stride()[:-1]] + [0])
    copy = seen[1:2, box[1] : 2 * box[1], : box[2], : box[3], 0].flatten()  # the second block of columns of expert 1
    gate = torch.arange(cols // 2, cols).view(-1, 1, 8) + 2 * ffn
    assert torch.equal(copy, torch.cat([gate, gate + ffn], dim=1).flatten())


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "Bf16"), (torch.float16, "Fp16"), (torch.float32, "Fp32")]
)
def test_a_kernel_is_compiled_for_the_type_of_biases(weights: torch.dtype, dtype: torch.dtype, name: str) -> None:
    for variant in (LAYER0(weights=weights), LAYER1(weights=weights)):
        plain, biased = variant.source(8), replace(variant, bias=dtype).source(8)
        assert (plain.entry.count("biases"), biased.entry.count("biases")) == (0, 1)
        assert plain.constants["HAS_BIAS"] is False
        assert biased.constants == dict(plain.constants, HAS_BIAS=True)
        assert biased.types["Bias"] == name


# ---- when it is taken


@pytest.mark.parametrize(("make", "is_dgrad"), [(in_16_bits, False), (in_16_bits, True), (in_fp8, False)])
def test_when_layer_0_is_taken(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any], is_dgrad: bool) -> None:
    monkeypatch.setattr(layer0, "is_available", lambda device: True)
    can_run, weights, table = partial(layer0.can_run, is_dgrad=is_dgrad), make(32, 1536, 2048), make_table()
    assert can_run(weights, table)
    assert not can_run(weights, replace(table, block_rows=64))
    assert not can_run(weights, replace(table, segments=None))
    assert not can_run(make(20_000, 256, 128), table)  # their table is too large
    assert not can_run(torch.empty(32, 1536, 2048, device="meta"), table)  # float32
    for shape in ((32, 2048, 764), (32, 2044, 768)):  # rows that do not start at 16 bytes
        assert not is_dgrad or not can_run(make(*shape), table)
    monkeypatch.setattr(layer0, "is_available", lambda device: False)
    assert not can_run(weights, table)


def make_returns(top_k: int = 2, *, backward: bool = False, weighted: bool | None = None) -> CombineLists:
    rows = torch.zeros(128, top_k)
    grads = GradBuffer(row_grads=rows, received=rows, received_pointers=rows, out=rows) if backward else None
    weights = rows if (weighted if weighted is not None else not backward) else None
    return CombineLists(rows.int(), weights, send_rows=NUMBERS, recv_counts=NUMBERS, grads=grads)


def layer1_call(b: Tensor | Scaled, /, **changes: object) -> dict[str, Any]:
    """Arguments of a launch of layer 1 that runs in CUDA C++ where there is a GPU."""
    y = torch.empty(1, 512, dtype=torch.bfloat16, device="meta")
    return dict(y=y, b=b, symm=make_symm(), returns=make_returns(), table=make_table()) | changes


@pytest.mark.parametrize("make", [in_16_bits, in_fp8])
def test_when_layer_1_is_taken(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]) -> None:
    monkeypatch.setattr(layer1, "is_available", lambda device: True)
    call, table = partial(layer1_call, make(8, 512, 256)), make_table()
    y = call()["y"]
    for taken in ({}, dict(returns=make_returns(8)), dict(symm=make_symm(world_size=8)), dict(y=y.half())):
        assert layer1.can_run(**call(**taken))
    for refused in (
        dict(returns=make_returns(17)),
        dict(symm=make_symm(world_size=17)),
        dict(y=y.float()),  # a pool in float32
        dict(table=replace(table, block_rows=64)),
        dict(table=replace(table, segments=None)),
        dict(returns=make_returns(weighted=False)),  # sums alone
        dict(returns=make_returns(backward=True, weighted=True)),  # gradients of weighted sums
        dict(b=make(20_000, 128, 128)),  # their table needs too much shared memory
    ):
        assert not layer1.can_run(**call(**refused)), refused
    assert layer1.can_run(**call(returns=make_returns(backward=True))) == (make is in_16_bits)
    monkeypatch.setattr(layer1, "is_available", lambda device: False)
    assert not layer1.can_run(**call())


def test_neither_is_taken_without_a_gpu() -> None:
    assert not layer0.can_run(in_fp8(8, 512, 512), make_table())
    assert not layer1.can_run(**layer1_call(in_fp8(8, 512, 256), y=torch.empty(1, 512, dtype=torch.bfloat16)))


def make_layer1(settings: LayerSettings) -> Callable[..., Tensor]:
    """Layer 1 of a layer of one rank, of operands and bias, in a forward or a backward pass."""
    layout = ExpertLayout(num_experts=2, top_k=2, ep=1, tp=1, rank=0)
    shape = WorkspaceShape(world_size=1, max_tokens=128, hidden_size=128, top_k=2, dtype=torch.bfloat16)
    parts = layout, Workspace(LocalCommunicator(torch.device("cpu")), shape), PlanRules.create(128, None, 512), settings
    plan, backend = Twin(*parts).plan(torch.tensor([[0, 1]]).int(), torch.ones(1, 2)), fused.Fused(*parts)

    def run(a: Any, b: Any, *, backward: bool = False) -> Tensor:
        return backend._layer1(a, b, plan, make_returns(backward=backward), Launch.GEMM_COMBINE)

    return run


@pytest.mark.parametrize("cuda_kernels", [False, True])
def test_layer_1_is_not_asked_where_a_rank_of_the_group_lacks_it(
    monkeypatch: pytest.MonkeyPatch, cuda_kernels: bool
) -> None:
    """The twin has other flags: the other ranks would wait for ever, or not at all."""
    launched: list[str] = []
    monkeypatch.setattr(layer1, "is_available", lambda device: True)
    monkeypatch.setattr(layer1, "gemm_combine_cuda", lambda *_: launched.append("cuda"))
    monkeypatch.setattr(fused, "gemm_combine", lambda *_: launched.append("triton"))
    make_layer1(LayerSettings(cuda_kernels=cuda_kernels))(torch.zeros(512, 128), in_16_bits(2, 128, 128))
    assert launched == ["cuda" if cuda_kernels else "triton"]


# ---- SMs that layer 1 leaves alone


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=SMS))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(layer1, "tensor_map", lambda tensor, box: TensorMap())
    yield
    num_sms.cache_clear()


def run_layer1(settings: LayerSettings, *, fp8: bool, backward: bool = False) -> None:
    a, b = torch.zeros(512, 128), torch.zeros(2, 128, 128)
    if fp8:
        a, b = (Scaled(elements=each.to(torch.float8_e4m3fn), scales=torch.zeros(1)) for each in (a, b))
    make_layer1(settings)(a, b, backward=backward)


@pytest.mark.parametrize(("fp8", "blocks"), [(True, SMS - RESERVED), (False, 92)])
def test_reserved_sms_in_cuda(monkeypatch: pytest.MonkeyPatch, a_gpu: None, fp8: bool, blocks: int) -> None:
    found: list[int] = []
    kernel = SimpleNamespace(launch=lambda num_blocks, arguments: found.append(num_blocks))
    monkeypatch.setattr(layer1, "can_run", lambda *_: True)
    monkeypatch.setattr(layer1, "_kernels", lambda *_: defaultdict(lambda: kernel))
    for reserved in (0, RESERVED):
        run_layer1(LayerSettings(reserved_sms=reserved), fp8=fp8)
    assert found == [SMS, blocks]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_reserved_sms_in_triton(monkeypatch: pytest.MonkeyPatch, a_gpu: None, fp8: bool, backward: bool) -> None:
    found: list[int] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            found.extend(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(triton_layer1, "gemm_combine_kernel", Kernel())
    run_layer1(
        LayerSettings(tile=TileShape(block_n=128, block_k=128), reserved_sms=RESERVED), fp8=fp8, backward=backward
    )
    assert found == [SMS - RESERVED]
