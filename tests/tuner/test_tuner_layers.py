"""Which kernels a setting stands for: as the launchers decide, and what is idle there makes no candidate."""

from __future__ import annotations

import random
from dataclasses import replace
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
from comet.tuner.model import MOST_ROWS, ROW_STEP, TALLEST, TILE_COLS, predict, propose
from comet.tuner.problem import H200, Machine, Problem, candidate_name, cuda_layers, effective

QWEN3 = MoEConfig(num_experts=128, top_k=8, hidden_size=2048, ffn_size=768)
MIXTRAL = MoEConfig(num_experts=8, top_k=2, hidden_size=4096, ffn_size=14336)
SHAPES = [
    QWEN3,
    MIXTRAL,
    MoEConfig(num_experts=64, top_k=4, hidden_size=2048, ffn_size=1408),
    MoEConfig(num_experts=256, top_k=8, hidden_size=7168, ffn_size=2048),
    MoEConfig(num_experts=512, top_k=8, hidden_size=2048, ffn_size=768),  # alone more than layer 1's table holds
    MoEConfig(num_experts=64, top_k=10, hidden_size=2048, ffn_size=1408),  # more entries than a sum may have
    MoEConfig(num_experts=16, top_k=2, hidden_size=64, ffn_size=96),
]
TRITON = replace(H200, cuda_kernels=False)


def problem_of(moe: MoEConfig, tokens: int, ep: int = 4, tp: int = 1, dtype: torch.dtype = torch.bfloat16) -> Problem:
    return Problem.create(moe, ParallelConfig(ep=ep, tp=tp), tokens, dtype)


def random_problem(rng: random.Random) -> Problem:
    ep, tp = rng.choice([(1, 1), (2, 1), (4, 1), (1, 4), (2, 2), (8, 1)])
    tokens = rng.choice([0, 1, 129, 512, 2048, 4096, 8192])
    return problem_of(rng.choice(SHAPES), tokens, ep, tp, rng.choice([torch.bfloat16, torch.float16, torch.float32]))


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
    problems = [*(problem_of(QWEN3, num) for num in (128, 512, 8192)), *(random_problem(rng) for _ in range(400))]
    seen = set()
    for problem in problems:
        expected = launched(problem)
        assert cuda_layers(problem, H200) == expected, (seed, problem)
        assert cuda_layers(problem, TRITON) == (False, False)
        seen.add(expected)
    assert seen > {(True, True), (False, False)}


def test_examples_of_kernels() -> None:
    assert cuda_layers(problem_of(QWEN3, 512), H200) == (True, True)
    assert cuda_layers(problem_of(replace(QWEN3, top_k=24), 512), H200) == (True, False)
    narrow = MoEConfig(num_experts=8, top_k=2, hidden_size=512, ffn_size=768)
    assert effective(OverlapConfig(num_panels=8), problem_of(narrow, 8192)) == OverlapConfig(num_panels=2)


@pytest.mark.parametrize(
    ("moe", "tokens", "machine", "setting", "name"),
    [
        (QWEN3, 8192, TRITON, OverlapConfig(), "4 panels, in Triton"),
        (QWEN3, 8192, H200, OverlapConfig(), "4 panels, both layers in CUDA C++"),
        (replace(QWEN3, top_k=24), 2048, H200, OverlapConfig(num_panels=3), "3 panels, layer 0 in CUDA C++"),
        (QWEN3, 2048, H200, OverlapConfig(num_panels=1), "1 panel, both layers in CUDA C++"),
        (QWEN3, 9, H200, OverlapConfig(comm_blocks=1, num_panels=1), "1 comm block, 1 panel, both layers in CUDA C++"),
        (MIXTRAL, 8192, H200, OverlapConfig(num_panels=99), "16 panels, both layers in CUDA C++"),
        (QWEN3, 8192, H200, OverlapConfig(comm_blocks=16), "16 comm blocks, 4 panels, both layers in CUDA C++"),
        (QWEN3, 512, H200, None, "plain"),
    ],
)
def test_names_say_what_runs(
    moe: MoEConfig, tokens: int, machine: Machine, setting: OverlapConfig | None, name: str
) -> None:
    assert candidate_name(setting, problem_of(moe, tokens), machine) == name


def test_candidates_differ_in_what_they_launch() -> None:
    rng = random.Random(seed := random.randrange(10**6))
    print(f"seed {seed}")
    for _ in range(30):
        problem, machine = random_problem(rng), rng.choice([H200, TRITON])
        setting = OverlapConfig(comm_blocks=rng.choice([0, 4, 16]), num_panels=rng.choice([1, 3, 4, 8]))
        taken = effective(setting, problem)
        assert effective(taken, problem) == taken
        assert predict(problem, taken, machine).ms == pytest.approx(predict(problem, setting, machine).ms), seed
        found = [item.setting for item in propose(problem, machine)]
        assert [setting and effective(setting, problem) for setting in found] == found
        names = [candidate_name(setting, problem, machine) for setting in found]
        assert len(set(names)) == len(names), names


@pytest.mark.parametrize("machine", [H200, TRITON])
def test_all_panels_and_some_splits_are_tried(machine: Machine) -> None:
    settings = [item.setting for item in propose(problem_of(QWEN3, 8192), machine) if item.setting]
    assert sorted(item.num_panels for item in settings if not item.comm_blocks) == [1, 2, 3, 4, 6, 8]
    assert sorted(item.comm_blocks for item in settings if item.comm_blocks) == [8, 16, 32]


def test_pieces_are_those_of_the_kernels() -> None:
    assert (MMA.mma_rows, MMA.row_step, MMA.block_n) == (MOST_ROWS, ROW_STEP, TILE_COLS)
    tallest = dispatch_gemm_cuda.CudaConfig().most_rows, gemm_combine_cuda.CudaConfig.select(256).most_rows
    assert min(tallest) == TALLEST


@pytest.mark.parametrize("available", [True, False])
def test_a_machine_has_cuda_kernels_where_they_compile(available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "is_available", lambda device: available)
    properties = SimpleNamespace(name="NVIDIA H100", multi_processor_count=114)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert Machine.of(torch.device("cuda", 0)) == Machine(name="NVIDIA H100", num_sms=114, cuda_kernels=available)
    assert not Machine.of(torch.device("cpu")).cuda_kernels
