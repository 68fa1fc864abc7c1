"""The decode benchmark: its arithmetic, its expert-centric paths, and one run end to end on a CPU."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench_decode import compare, figures, parse
from decode_paths import EXPERT_CONFIGS, expert_counts, tile_table, torch_experts, triton_experts
from decode_steps import Step, make_set, make_steps
from routing import make_routing
from timing import Timing

from comet.config import MoEConfig
from comet.decode import warp_decode_torch

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def test_tile_table_example() -> None:
    table, places = tile_table(torch.tensor([[2, 0], [2, 1]], dtype=torch.int32), 4)
    assert table.num_tiles.tolist() == [3]
    assert table.tiles[:3, :3].tolist() == [[0, 0, 1], [1, 16, 1], [2, 32, 2]]
    assert table.row_ids[32:34].tolist() == [0, 1]
    assert places.tolist() == [32, 0, 33, 16]
    assert expert_counts(torch.tensor([[2, 0], [2, 1]]), 4).tolist() == [1, 1, 2, 0]


def one_step(config: MoEConfig, num_tokens: int, routing: str, kind: str = "bf16") -> Step:
    (step,) = make_steps(config, [make_set(config, CPU, torch.float32, 0, kind)], num_tokens, routing)
    return step


@pytest.mark.parametrize("routing", ["uniform", "hot"])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_expert_centric_paths_agree_with_warp_decode(routing: str, num_tokens: int) -> None:
    config = MoEConfig(num_experts=5, top_k=2, hidden_size=32, ffn_size=48)
    step = one_step(config, num_tokens, routing)
    arguments = (step.tokens, step.ids, step.routing_weights)
    wanted = warp_decode_torch(*arguments, step.weights)
    weights = (step.set.plain.w1, step.set.plain.w2)
    for output in (torch_experts(*arguments, *weights), triton_experts(*arguments, *weights, EXPERT_CONFIGS[0])):
        assert (output - wanted).abs().max() < 1e-5
    assert (wanted - step.exact()).abs().max() < 1e-5


def test_touched_bytes_count_an_expert_once() -> None:
    config = MoEConfig(num_experts=8, top_k=2, hidden_size=32, ffn_size=16)
    step = one_step(config, 30, "hot")
    ids, _ = make_routing("hot", num_tokens=30, num_experts=8, top_k=2, seed=0, device="cpu")
    assert step.touched_bytes == len(set(ids.flatten().tolist())) * 3 * 32 * 16 * 4


@pytest.mark.parametrize(("kind", "per_expert"), [("mxfp8", 3 * 64 * 32 * 33 // 32), ("fp8", 3 * 64 * 32 + 2 * 4)])
def test_quantised_steps(kind: str, per_expert: int) -> None:
    """Bytes count the scales; the other paths and float64 get the quantised numbers."""
    config = MoEConfig(num_experts=8, top_k=2, hidden_size=64, ffn_size=32)
    step = one_step(config, 5, "uniform", kind)
    assert step.touched_bytes == len(step.ids.unique()) * per_expert
    arguments = (step.tokens, step.ids, step.routing_weights)
    wanted = warp_decode_torch(*arguments, step.weights)
    assert torch.equal(warp_decode_torch(*arguments, step.set.plain), wanted)
    assert (wanted - step.exact()).abs().max() < 1e-5


def test_figures_example() -> None:
    timings = {name: Timing(median, median, median) for name, median in (("comet", 0.4), ("triton1", 0.8))}
    row = figures(timings, {"comet": (0.1, 0.9)}, 4, 2e8, 4.0)
    assert (row["comet_us"], row["tbs"], row["of_roof"], row["x_triton"]) == pytest.approx((100, 2, 0.5, 2))
    assert (row["torch_us"], row["comet_error"], row["triton_error"]) == (None, 0.1, None)


def test_compare_example() -> None:
    error, cosine = compare(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 5.0]], dtype=torch.float64))
    assert (error, cosine) == pytest.approx((0.1715, 0.9947), abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "gpt"], "models='gpt' must be one of qwen3_30b_a3b"),
        (["--routing", "round"], "routing='round' must be one of"),
        (["--weights", "bf16,int4"], "weights='int4' must be one of bf16, mxfp8, fp8"),
        (["--try", "gate_up.width=3"], "--try gate_up.width=3: the field must be one of form, fold"),
        (["--try", "form=vector,gate_up.rows=3"], "gate_up.rows=3 must be a power of two"),
    ],
)
def test_mistakes_on_the_command_line_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(arguments)


def test_run_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/bench_decode.py"), "--device", "cpu", "--models", "tiny"]
    command += [
        "--weights",
        "bf16,mxfp8,fp8",
        "--tokens",
        "1,3",
        "--rounds",
        "2",
        "--try",
        "dependent=1",
        "--out",
        str(tmp_path),
    ]
    child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    run = json.loads(child.stdout.splitlines()[-1])
    points = [(row["weights"], row["tokens"]) for row in run["rows"]]
    assert points == [(kind, tokens) for kind in ("bf16", "mxfp8", "fp8") for tokens in (1, 3)]
    for row in run["rows"]:
        assert not row["failures"]
        assert set(row["times_us"]) == {"comet", "dependent=1", "torch", "triton0", "triton1", "triton2"}
        assert row["comet_error"] < 1e-5
        assert row["comet_cosine"] > 0.999996
    with (tmp_path / "bench_decode.csv").open() as file:
        assert [line["tokens"] for line in csv.DictReader(file)] == 3 * ["1", "3"]
