"""Adaptive workload assignment: formulas against brute force and simulation, the model against measured layers, and
which kernels a setting stands for: as the launchers decide.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from launch_arguments import make_symm, make_table

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.kernels.layer import dispatch_gemm as dispatch_gemm_cuda
from comet.kernels.layer import gemm_combine as gemm_combine_cuda
from comet.kernels.layer.blocks import MMA
from comet.kernels.runtime import nvrtc
from comet.kernels.runtime.arguments import CombineLists
from comet.layer.workspace import WorkspaceShape
from comet.tuner.choice import check_setting
from comet.tuner.model import HOPELESS, MOST_ROWS, PANELS, ROW_STEP, SPLITS, TALLEST, TILE_COLS, predict, propose
from comet.tuner.problem import (
    H200,
    Machine,
    Problem,
    candidate_name,
    cuda_layers,
    default_setting,
    effective,
    expected_tiles,
    shard_reach,
)

QWEN3 = MoEConfig(num_experts=128, top_k=8, hidden_size=2048, ffn_size=768)
SHAPES = {
    "qwen3": QWEN3,
    "mixtral": MoEConfig(num_experts=8, top_k=2, hidden_size=4096, ffn_size=14336),
    "qwen2": MoEConfig(num_experts=64, top_k=4, hidden_size=2048, ffn_size=1408),
    "phi35": MoEConfig(num_experts=16, top_k=2, hidden_size=4096, ffn_size=6400),
    "deepseek": MoEConfig(num_experts=256, top_k=8, hidden_size=7168, ffn_size=2048),
}
# benchmarks/results/tuner.md, H200, bf16, uniform routing, ms: in CUDA C++ with half the experts at EP2 (12f0b6d; layer
# 1 of 2048 tokens in Triton), which the model has not seen, and the plain path at EP4 (0d3eb02, the fastest).
MEASURED = [
    ("qwen3", 2048, 0.387, 2.11),
    ("qwen3", 8192, 1.12, 5.40),
    ("mixtral", 2048, 2.21, 3.72),
    ("mixtral", 8192, 9.27, 13.23),
    ("qwen2", 2048, 0.338, 1.56),
    ("qwen2", 8192, 0.967, 3.55),
    ("phi35", 2048, 1.09, 2.41),
    ("phi35", 8192, 3.98, 6.94),
    ("deepseek", 2048, 2.65, 7.12),
    ("deepseek", 8192, 9.55, 24.29),
]


def problem_of(moe: MoEConfig = QWEN3, num_tokens: int = 8192, ep: int = 4, tp: int = 1, **changes) -> Problem:
    created = Problem.create(moe, ParallelConfig(ep=ep, tp=tp), num_tokens, torch.bfloat16)
    return replace(created, **changes)


def random_problem(rng: random.Random, layers: Sequence[MoEConfig] = tuple(SHAPES.values())) -> Problem:
    ep, tp = rng.choice([(1, 1), (2, 1), (4, 1), (1, 4), (2, 2), (8, 1)])
    return problem_of(rng.choice(layers), rng.choice([0, 1, 7, 300, 2048, 8192]), ep, tp)


def brute_reach(num_experts: int, top_k: int, ep: int, num_groups: int, top_groups: int) -> float:
    size, local, hits, draws = num_experts // num_groups, num_experts // ep, 0, 0
    for groups in combinations(range(num_groups), top_groups):
        experts = [expert for group in groups for expert in range(group * size, (group + 1) * size)]
        for chosen in combinations(experts, top_k):
            draws += ep
            hits += len({expert // local for expert in chosen})
    return hits / draws


@pytest.mark.parametrize("shape", [
    (8, 2, 4, 1, 1), (8, 2, 1, 1, 1), (8, 8, 4, 1, 1), (12, 3, 3, 4, 2),
    (12, 3, 4, 3, 2),  # shards that straddle groups
    (12, 2, 6, 2, 1), (12, 4, 2, 3, 2), (6, 1, 6, 1, 1),
])  # fmt: skip
def test_reach_equals_enumeration(shape: tuple[int, int, int, int, int]) -> None:
    assert shard_reach(*shape) == pytest.approx(brute_reach(*shape), abs=1e-12)


def test_rows_and_tiles_equal_simulation() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    for moe, ep, tokens, block_rows in ((QWEN3, 4, 256, 64), (SHAPES["mixtral"], 2, 100, 16), (QWEN3, 8, 3, 16)):
        problem, sent, routed, tiles = problem_of(moe, tokens, ep), 0.0, 0.0, 0.0
        num_runs = 60
        for _ in range(num_runs):
            ids = torch.rand(ep * tokens, moe.num_experts, generator=generator).topk(moe.top_k, dim=1).indices
            reached = torch.zeros(ep * tokens, ep).scatter_(1, ids // problem.experts_local, 1.0)
            counts = ids.flatten().bincount(minlength=moe.num_experts)
            sent += reached[:tokens, 1:].sum().item() / num_runs  # rank 0 owns shard 0
            routed += counts.sum().item() / ep / num_runs
            tiles += (-(-counts // block_rows)).sum().item() / ep / num_runs
        assert sent == pytest.approx(problem.sent_rows, rel=0.05)
        assert routed == pytest.approx(problem.routed_rows)
        assert tiles == pytest.approx(problem.num_tiles(block_rows), rel=0.03)


def test_expected_tiles_examples_and_edges() -> None:
    assert expected_tiles(1, 0.25, 128) == 0.25
    assert expected_tiles(256, 1.0, 128) == 2
    assert expected_tiles(256, 1.0, 128, tallest=256) == 1
    assert expected_tiles(257, 1.0, 128, tallest=256) == 3
    assert expected_tiles(0, 0.5, 16) == expected_tiles(0, 0.5, 16, tallest=20) == 0
    whole = sum(
        math.comb(40, n) * 0.3**n * 0.7 ** (40 - n) * (math.ceil(n / 16) if n > 20 else n > 0) for n in range(41)
    )
    assert expected_tiles(40, 0.3, 16, tallest=20) == pytest.approx(whole, rel=0.01)
    exact = sum(math.comb(40, n) * 0.3**n * 0.7 ** (40 - n) * math.ceil(n / 16) for n in range(41))
    assert expected_tiles(40, 0.3, 16) == pytest.approx(exact, rel=0.01)


def test_problem_counts_and_rules() -> None:
    moe = MoEConfig(num_experts=4, top_k=2, hidden_size=32, ffn_size=64)
    problem = problem_of(moe, 8, 2, 2, reach=0.5)
    assert (problem.sent_rows, problem.recv_rows, problem.routed_rows) == (12, 16, 32)
    with pytest.raises(ValueError, match=r"reach=1.5 must be between 0 and 1"):
        replace(problem, reach=1.5)
    with pytest.raises(ValueError, match=r"num_tokens=-1 must be at least 0"):
        replace(problem, num_tokens=-1)


@pytest.mark.parametrize(("name", "tokens", "fused_ms", "plain_ms"), MEASURED)
def test_model_agrees_with_measured_layers(name: str, tokens: int, fused_ms: float, plain_ms: float) -> None:
    half = replace(SHAPES[name], num_experts=SHAPES[name].num_experts // 2)
    assert predict(problem_of(half, tokens, ep=2), OverlapConfig(), H200).ms == pytest.approx(fused_ms, rel=0.08)
    assert predict(problem_of(SHAPES[name], tokens), None, H200).ms == pytest.approx(plain_ms, rel=0.16)


def test_machine_examples_and_rules() -> None:
    assert [H200.throttle(ms) for ms in (1, 5, 10)] == pytest.approx([1.0, 1.05, 1.10])
    with pytest.raises(ValueError, match=r"num_sms=1 must be at least 2"):
        Machine(num_sms=1)
    with pytest.raises(ValueError, match=r"hbm_gbs=0 must be positive"):
        Machine(hbm_gbs=0)


def random_setting(rng: random.Random) -> OverlapConfig:
    return OverlapConfig(comm_blocks=rng.choice([0, 0, 4, *SPLITS]), num_panels=rng.choice(PANELS))


def test_worse_conditions_are_never_faster() -> None:
    rng = random.Random(seed := random.randrange(10**6))
    print(f"seed {seed}")
    machines = [replace(H200, link_gbs=H200.link_gbs / 2, nccl_gbs=H200.nccl_gbs / 2)]
    machines += [replace(H200, gemm_tflops=H200.gemm_tflops / 2), replace(H200, hbm_gbs=H200.hbm_gbs / 2)]
    for _ in range(40):
        problem = random_problem(rng)
        for setting in (None, *(random_setting(rng) for _ in range(5))):
            base = predict(problem, setting, H200)
            assert base.ms == pytest.approx(sum(ms for _, ms in base.parts))
            assert 0 < base.ms < 1e4
            for machine in machines:
                assert predict(problem, setting, machine).ms >= base.ms - 1e-12, (seed, problem, setting, machine)
            fewer = replace(problem, reach=problem.reach / 2)
            assert predict(fewer, setting, H200).ms <= base.ms + 1e-12, (seed, problem, setting)


def test_panels_hide_what_is_sent() -> None:
    one, four = (predict(problem_of(), OverlapConfig(num_panels=panels), H200).ms for panels in (1, 4))
    assert one > four, "nothing is sent beside the only panel"


def test_splits_follow_the_measured_curve() -> None:
    """benchmarks/results/layer.md, two H100: times over those of 0 comm blocks, of Qwen3 and a quarter of DeepSeek."""
    curve = {1: (1.17, 1.66), 2: (1.06, 1.27), 4: (1.01, 1.1), 8: (0.99, 1.05), 16: (1.0, 1.04), 32: (1.01, 1.07)}
    for blocks, (least, most) in curve.items():
        alone, split = (predict(problem_of(), OverlapConfig(comm_blocks=num), H200).ms for num in (0, blocks))
        assert least <= split / alone <= most, blocks


def test_proposals_are_few_legal_sorted_and_include_plain() -> None:
    rng = random.Random(seed := random.randrange(10**6))
    print(f"seed {seed}")
    for _ in range(40):
        problem = random_layer(rng)
        machine = replace(H200, num_sms=rng.choice([2, 20, 132]), cuda_kernels=rng.random() < 0.5)
        proposed = propose(problem, machine)
        settings = [item.setting for item in proposed]
        assert 2 <= len(settings) <= 11
        assert [setting and effective(setting, problem) for setting in settings] == settings, "each launch once"
        assert len({candidate_name(setting, problem, machine) for setting in settings}) == len(settings)
        assert None in settings
        default = effective(default_setting(problem), problem)
        assert default in settings
        fused = [item for item in proposed if item.setting is not None]
        others = [item for item in fused if item.setting != default]
        assert all(item.ms <= HOPELESS * fused[0].ms for item in others), "what is hopeless is not measured"
        assert [item.ms for item in proposed] == sorted(item.ms for item in proposed)
        assert {item.setting.comm_blocks for item in fused} == {0, *(num for num in SPLITS if num < machine.num_sms)}
        for setting in filter(None, settings):
            check_setting(setting, problem, machine)
        assert proposed == propose(problem, machine), "pure"


def test_plain_wins_where_overlap_does_not_pay() -> None:
    slow_peers = replace(H200, link_gbs=0.2, nccl_gbs=380.0, plain_ms=0.01)
    assert propose(problem_of(), slow_peers)[0].setting is None


# ---- which kernels ----

LAYERS = [
    *SHAPES.values(),
    MoEConfig(num_experts=512, top_k=8, hidden_size=2048, ffn_size=768),  # alone more than layer 1's table holds
    MoEConfig(num_experts=64, top_k=10, hidden_size=2048, ffn_size=1408),  # more entries than a sum may have
    MoEConfig(num_experts=16, top_k=2, hidden_size=64, ffn_size=96),
]
TRITON = replace(H200, cuda_kernels=False)


def random_layer(rng: random.Random) -> Problem:
    dtype, tokens = rng.choice([torch.bfloat16, torch.float16, torch.float32]), rng.choice([0, 1, 129, 512, 2048, 8192])
    return replace(random_problem(rng, LAYERS), dtype=dtype, num_tokens=tokens)


def launched(problem: Problem) -> tuple[bool, bool]:
    """What the launchers decide on a GPU, for tensors of the sizes a layer has there."""
    moe, experts, width = problem.moe, problem.experts_local, -(-problem.width // 16) * 16
    shape = WorkspaceShape.create(moe, problem.world_size, max(problem.num_tokens, 1), problem.dtype)
    some = torch.zeros(problem.world_size, dtype=torch.int64)
    symm, table = make_symm(problem.world_size, shape.padded_tokens), make_table()
    returns = CombineLists(row_slots=torch.zeros(1, moe.top_k), row_weights=some, send_rows=some, recv_counts=some)

    def empty(*dims: int) -> torch.Tensor:
        return torch.empty(*dims, dtype=problem.dtype, device="meta")

    w1 = empty(experts, 2 * width, moe.hidden_size)
    y, w2 = empty(1, moe.hidden_size), empty(experts, moe.hidden_size, width)
    return (
        dispatch_gemm_cuda.can_run(w1, table),
        gemm_combine_cuda.can_run(y, w2, symm, returns, table),
    )


def test_the_tuner_knows_what_the_launchers_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dispatch_gemm_cuda, gemm_combine_cuda):
        monkeypatch.setattr(module, "is_available", lambda device: True)
    rng = random.Random(seed := random.randrange(10**6))
    print(f"seed {seed}")
    problems = [*(problem_of(QWEN3, num) for num in (128, 512, 8192)), *(random_layer(rng) for _ in range(400))]
    seen = set()
    for problem in problems:
        expected = launched(problem)
        assert cuda_layers(problem, H200) == expected, (seed, problem)
        assert cuda_layers(problem, TRITON) == (False, False)
        seen.add(expected)
    assert seen > {(True, True), (False, False)}


@pytest.mark.parametrize(
    ("moe", "tokens", "machine", "setting", "name"),
    [
        (QWEN3, 8192, TRITON, OverlapConfig(), "4 panels, in Triton"),
        (QWEN3, 8192, H200, OverlapConfig(), "4 panels, both layers in CUDA C++"),
        (replace(QWEN3, top_k=24), 2048, H200, OverlapConfig(num_panels=3), "3 panels, layer 0 in CUDA C++"),
        (QWEN3, 2048, H200, OverlapConfig(num_panels=1), "1 panel, both layers in CUDA C++"),
        (QWEN3, 9, H200, OverlapConfig(comm_blocks=1, num_panels=1), "1 comm block, 1 panel, both layers in CUDA C++"),
        (SHAPES["mixtral"], 8192, H200, OverlapConfig(num_panels=99), "16 panels, both layers in CUDA C++"),
        (QWEN3, 8192, H200, OverlapConfig(comm_blocks=16), "16 comm blocks, 4 panels, both layers in CUDA C++"),
        (QWEN3, 512, H200, None, "plain"),
    ],
)
def test_names_say_what_runs(
    moe: MoEConfig, tokens: int, machine: Machine, setting: OverlapConfig | None, name: str
) -> None:
    assert candidate_name(setting, problem_of(moe, tokens), machine) == name


@pytest.mark.parametrize("machine", [H200, TRITON])
def test_all_panels_and_some_splits_are_tried(machine: Machine) -> None:
    settings = [item.setting for item in propose(problem_of(QWEN3, 8192), machine) if item.setting]
    assert sorted(item.num_panels for item in settings if not item.comm_blocks) == [1, 2, 3, 4, 6, 8]
    assert sorted(item.comm_blocks for item in settings if item.comm_blocks) == [8, 16, 32]


def test_pieces_are_those_of_the_kernels() -> None:
    assert (MMA.mma_rows, MMA.row_step, MMA.block_n) == (MOST_ROWS, ROW_STEP, TILE_COLS)
    tallest = dispatch_gemm_cuda.MOST_ROWS, gemm_combine_cuda.CudaConfig.select(256).most_rows
    assert min(tallest) == TALLEST


@pytest.mark.parametrize("available", [True, False])
def test_a_machine_has_cuda_kernels_where_they_compile(available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "is_available", lambda device: available)
    properties = SimpleNamespace(name="NVIDIA H100", multi_processor_count=114)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert Machine.of(torch.device("cuda", 0)) == Machine(name="NVIDIA H100", num_sms=114, cuda_kernels=available)
    assert not Machine.of(torch.device("cpu")).cuda_kernels
