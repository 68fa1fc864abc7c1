"""The layer benchmark: arithmetic, routing and baselines, what is compared and kept, block FP8, and runs on CPUs."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bench_cases import ALONE, CPU, ROOT, TINY, report_of, run_on_rank
from ranks import in_ranks, run_ranks

from comet.config import MoEConfig, OverlapConfig
from comet.layer.routed_experts import SymmetricPath
from comet.layout import ExpertLayout

import suites.moe
from baselines.layer import gemm_variants, split_evenly, tile_table
from lib.moe import Layer, make_inputs, relative_error
from lib.ranks import Ranks, attempt
from lib.report import geometric_mean
from lib.shapes import MODELS, make_routing, model, parse_overlap
from lib.suite import Checked
from suites.moe import (
    LayerVariant,
    Run,
    balanced_rows,
    check_variants,
    figures,
    layer_flops,
    link_bytes,
    rows_to_ranks,
)


def layout_of(num_experts: int, top_k: int, ep: int, tp: int, rank: int = 0) -> ExpertLayout:
    return ExpertLayout(num_experts=num_experts, top_k=top_k, ep=ep, tp=tp, rank=rank)


def test_accounting_examples() -> None:
    assert balanced_rows(6, layout_of(4, 2, 2, 2)) == 24
    config = MoEConfig(hidden_size=16, ffn_size=32, num_experts=4, top_k=1)
    # 3 rows: 2 * 3 * 16 * 64 + 2 * 3 * 32 * 16
    assert layer_flops(config, layout_of(4, 1, 1, 1), 3, backward=False) == 6144 + 3072
    assert layer_flops(config, layout_of(4, 1, 1, 1), 3, backward=True) == 3 * 9216
    assert geometric_mean([2.0, None, 8.0]) == pytest.approx(4)
    assert geometric_mean([None]) is None


def test_rows_are_counted_once_per_rank() -> None:
    ids = torch.tensor([[0, 1], [1, 3], [2, -1]]).int()
    assert rows_to_ranks(ids, layout_of(4, 2, 2, 1)).tolist() == [2, 2]
    assert rows_to_ranks(ids, layout_of(4, 2, 2, 2)).tolist() == [2, 2, 2, 2]
    assert rows_to_ranks(ids[:0], layout_of(4, 2, 2, 1)).tolist() == [0, 0]


@in_ranks(2)
def test_link_bytes_are_those_of_the_busiest_rank(rank: int, world_size: int) -> None:
    ids = [[[0, 1], [1, 3], [2, -1]], [[0, 2]]][rank]
    layout, group = layout_of(4, 2, 2, 1, rank), dist.group.WORLD
    both = [link_bytes(torch.tensor(ids).int(), layout, 10, group, backward=backward) for backward in (False, True)]
    # rank 0 sends 2 rows to rank 1 and returns 1 partial sum; rank 1 likewise the other way round: 3 rows of 10 bytes
    assert both == [30, 60]


@pytest.mark.parametrize("kind", ["uniform", "zipf", "hot"])
def test_routing_is_legal_and_repeatable(kind: str) -> None:
    def draw(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return make_routing(kind, num_tokens=500, num_experts=16, top_k=4, seed=seed, device="cpu")

    ids, weights = draw(3)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 16
    assert kind != "hot" or ids[:, 0].eq(0).all()
    assert all(len(set(row)) == 4 for row in ids.tolist())
    torch.testing.assert_close(weights.sum(1), torch.ones(500))
    assert torch.equal(ids, draw(3)[0])
    assert not torch.equal(ids, draw(4)[0])


def test_zipf_first_choices_follow_one_over_n() -> None:
    counts = [
        torch.bincount(
            make_routing("zipf", num_tokens=40_000, num_experts=8, top_k=1, seed=seed, device="cpu")[0].flatten(),
            minlength=8,
        )
        for seed in (1, 2)
    ]
    assert torch.equal(counts[0].argsort(), counts[1].argsort())  # one permutation for all seeds
    share = 1 / torch.arange(1, 9)
    expected = 40_000 * share / share.sum()
    torch.testing.assert_close(counts[0].sort(descending=True).values.float(), expected, rtol=0.06, atol=0)


def test_shapes_are_those_of_the_shipped_configurations() -> None:
    assert {path.stem for path in (ROOT / "configs" / "model").glob("*.yaml")} == MODELS.keys()
    assert model("qwen3_30b_a3b") == MoEConfig(num_experts=128, top_k=8, hidden_size=2048, ffn_size=768)
    assert model("deepseek_v3/8") == MoEConfig(num_experts=32, top_k=8, hidden_size=7168, ffn_size=2048)


def test_gemm_examples() -> None:
    assert split_evenly(7, 3) == (3, 2, 2)
    table = tile_table((130, 0, 5), "cpu")
    assert table.tiles[: int(table.num_tiles)].tolist() == [[0, 0, 128, 0], [0, 128, 2, 0], [2, 256, 5, 0]]
    variants = gemm_variants(torch.randn(3, 64, 16), torch.randn(3, 16, 32), (4, 0, 3))
    assert list(variants) == ["gemm_torch"]
    variants["gemm_torch"](0)


def test_figures_example() -> None:
    times = {"comet": 2.0, "plain": 6.0, "all_gather": 5.0, "gemm_comet": 1.5, "comm_comet": 1.0}
    times |= {"network": 2.0, "in_node": 1.5}
    derived = figures(times, 3_000_000_000, 1_000_000, 100.0)
    assert derived == pytest.approx(
        dict(
            link_ms=0.01,
            tflops=1.5,
            link_gbs=0.5,
            efficiency=0.75,
            hidden=0.5,
            network_hidden=0.75,
            x_plain=3.0,
            x_best=2.5,
        )
    )
    assert set(figures({}, 1, 1, None).values()) == {None}


def test_relative_error() -> None:
    wanted = torch.tensor([3.0, 4.0])
    assert relative_error((torch.tensor([3.0, 5.0]),), (wanted,)) == pytest.approx(1 / math.sqrt(12.5))
    assert relative_error((torch.tensor([3.0, math.nan]),), (wanted,)) == math.inf
    assert relative_error((wanted[:0],), (wanted[:0],)) == 0


@in_ranks(2)
def test_a_failure_is_a_value_and_one_on_one_rank_is_one_on_all(rank: int, world_size: int) -> None:
    ranks = Ranks(rank, CPU, dist.group.WORLD)
    assert attempt(lambda: 3, ranks) == (3, "")
    assert attempt(lambda: [4][rank], ranks) == (None, "rank 1: IndexError: list index out of range")


WORDS = [*TINY, "--ep", "2"]


@pytest.mark.slow
def test_forward_end_to_end(tmp_path: Path) -> None:
    words = [*WORDS, "--out", str(tmp_path), "--tokens", "32,16", "--routing", "zipf"]
    report, _ = report_of("moe", *words, torchrun=True)
    assert [row["tokens"] for row in report["rows"]] == [32, 16]
    for row in report["rows"]:
        assert row["failures"] == {}
        assert row["error"] < 1e-4
        assert all(row[f"{name}_ms"] > 0 for name in ("comet", "plain", "all_gather", "gemm_torch", "comm_comet"))
        assert row["setting"] == "0/2"
        assert row["hidden"] == pytest.approx(1 - (row["comet_ms"] - row["gemm_torch_ms"]) / row["comm_comet_ms"])
        assert row["x_plain"] == pytest.approx(row["plain_ms"] / row["comet_ms"])
    assert [row["routing"] for row in report["rows"]] == ["zipf", "zipf"]
    assert report["facts"]["link_roofline_gbs"] > 0


def test_backward_and_a_variant_that_fails(tmp_path: Path) -> None:
    words = [*WORDS, "--out", str(tmp_path), "--tokens", "16", "--backward", "--path", "warp"]
    run_ranks(run_on_rank, 2, "moe", words)
    (row,) = json.loads((tmp_path / "bench_moe.json").read_text())["rows"]
    assert row["direction"] == "forward+backward"
    assert row["failures"]["comet"].startswith("ValueError: path='warp' must be")
    assert row["plain_ms"] > 0
    assert "comet_ms" not in row


def run_with_fault(rank: int, world_size: int, words: list[str]) -> None:
    """A rank of a run in which a wait on rank 1 meets its deadline in the timed rounds."""
    call, calls = SymmetricPath.__call__, []

    def meets_deadline(path: SymmetricPath, *inputs: torch.Tensor) -> torch.Tensor:
        calls.append(path)
        if rank == 1 and len(calls) == 6:
            path.workspace.fault[:6] = torch.tensor([1, 2, 0, 17, 41, 40])
        return call(path, *inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SymmetricPath, "__call__", meets_deadline)
        run_on_rank(rank, world_size, "moe", words)


def test_times_of_aborted_kernels_are_no_result(tmp_path: Path) -> None:
    words = [*WORDS, "--out", str(tmp_path), "--tokens", "16,8", "--routing", "hot,uniform", "--rounds", "5"]
    run_ranks(run_with_fault, 2, [*words, "--variants", "comet,plain"])
    first, *others = json.loads((tmp_path / "bench_moe.json").read_text())["rows"]
    fault = "CommTimeoutError: rank 1 waited 60.0 s for rank 0 (layer 0 dispatch, chunk 17, epoch 41, saw 40)"
    assert fault in first["failures"]["point"], "its own error, or the first one of the step that another rank failed"
    assert not [name for name in first if name.endswith("_ms")]
    assert [(row["tokens"], row["routing"]) for row in others] == [(16, "uniform"), (8, "hot"), (8, "uniform")]
    assert all(row["failures"] == {} and row["comet_ms"] > 0 for row in others), "in a group without a fault"


CUDA = torch.device("cuda")
TINY = model("tiny")


class PretendedGPU(Ranks):
    """A rank alone that takes the ways of a GPU, on CPU tensors."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def worst(self, value: float) -> float:
        return value


@pytest.mark.parametrize("stale", [False, True])
def test_graphs_are_compared_as_they_are_replayed(monkeypatch: pytest.MonkeyPatch, stale: bool) -> None:
    """``stale`` is a replay that leaves another input set's output in memory."""
    recorded: list[LayerVariant] = []

    def pretend(variant: LayerVariant, rotate: int) -> LayerVariant:
        recorded.append(lambda index: tuple(2 * part if stale else part for part in variant(index)))
        return recorded[-1]

    monkeypatch.setattr(suites.moe, "capture", pretend)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    asked, checked = (
        Run.parse("--variants comet,comet_graph,plain,comm_comet".split()),
        Checked(PretendedGPU(0, CUDA, None)),
    )
    with asked.open_layer(TINY, 64, ALONE) as layer:
        errors = check_variants(layer, make_inputs(TINY, 48, "zipf", ALONE), asked, checked)
    usable, failures = checked.variants, checked.failures
    assert len(recorded) == 2
    assert usable["comm_comet"] is recorded[-1]
    if stale:
        assert failures["comet_graph"].startswith("differs from the plain path")
        assert "comet_graph" not in usable
    else:
        assert not failures
        assert usable["comet_graph"] is recorded[0]
        assert errors["comet_graph"] < 1e-4


GRID = ["--device", "cpu", "--models", "tiny", "--rounds", "1", "--routing", "hot,uniform", "--tokens", "16,8"]


def test_an_interrupted_run_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = []

    def interrupted(layer: Layer, num_tokens: int, routing: str, *rest: object) -> dict[str, object]:
        measured.append((num_tokens, routing))
        if len(measured) == 8:
            raise KeyboardInterrupt
        return measure_point(layer, num_tokens, routing, *rest)

    measure_point = suites.moe.measure_point
    monkeypatch.setattr(suites.moe, "measure_point", interrupted)
    words = [*GRID, "--out", str(tmp_path)]
    Run.parse(words).run(ALONE)
    points = [(16, "hot"), (16, "uniform"), (8, "hot"), (8, "uniform")]
    assert measured == points
    report = json.loads((tmp_path / "bench_moe.json").read_text())
    assert [(row["tokens"], row["routing"]) for row in report["rows"]] == points
    assert all(row["error"] < 1e-4 and row["seconds"] > 0 for row in report["rows"])
    assert "tiny 8 1 1 hot forward: done in " in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        Run.parse(words).run(ALONE)
    rows, earlier = (json.loads((tmp_path / f"bench_moe{each}.json").read_text())["rows"] for each in ("", ".1"))
    assert [(row["tokens"], row["routing"]) for row in rows] == points[:3]
    assert len(earlier) == 4
    assert "bench_moe.json of an earlier run is now bench_moe.1.json" in capsys.readouterr().err


SPLITS = ["comm_blocks", "comm_blocks=", "comm_blocks=-1", "", "num_panels=2,"]


@pytest.mark.parametrize(("text", "message"), [
    *((text, "must be comm_blocks=N or num_panels=N") for text in SPLITS),
    ("num_panels=0", "num_panels=0 must be at least 1"),
    ("transport=copy", "overlap='transport=copy': transport is no longer a setting: leave it out"),
])  # fmt: skip
def test_a_split_names_settings_and_obeys_their_rules(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_overlap(text)
    assert parse_overlap("num_panels=2,comm_blocks=3") == OverlapConfig(num_panels=2, comm_blocks=3)


def checked_on_rank(
    rank: int, world_size: int, config: MoEConfig, words: list[str]
) -> tuple[list[str], dict[str, float], dict[str, str]]:
    ranks, asked = Ranks(rank, CPU, dist.group.WORLD), Run.parse(words)
    checked = Checked(ranks)
    with asked.open_layer(config, 48, ranks) as layer:
        errors = check_variants(layer, make_inputs(config, 40, "uniform", ranks), asked, checked)
    return sorted(checked.variants), errors, checked.failures


@pytest.mark.parametrize("hidden_size", [256, 64])
def test_block_fp8_is_compared_with_the_plain_path_where_widths_are_whole_blocks(hidden_size: int) -> None:
    config = MoEConfig(num_experts=4, top_k=2, hidden_size=hidden_size, ffn_size=128)
    words = ["--ep", "2", "--variants", "comet,plain,comet_fp8,comet_fp8_graph"]
    for usable, errors, failures in run_ranks(checked_on_rank, 2, config, words):
        assert not failures
        assert usable == (["comet", "comet_fp8", "plain"] if hidden_size == 256 else ["comet", "plain"])
        assert hidden_size == 64 or 0.1 < errors["comet_fp8"] < 0.6


@pytest.mark.parametrize("words", [["--ep", "2"], ["--tp", "2"], ["--ep", "2", "--backward"]], ids=" ".join)
def test_all_ways_compute_the_layer_of_a_model_with_its_activation_and_biases(words: list[str]) -> None:
    gpt_oss = model("gpt_oss_20b")
    assert (gpt_oss.activation.name, gpt_oss.expert_bias) == ("clamped_swiglu", True)
    config = replace(gpt_oss, num_experts=4, top_k=2, hidden_size=256, ffn_size=256)
    names = {"comet", "plain"} | (set() if "--backward" in words else {"pipelined", "all_gather", "comet_fp8"})
    for usable, errors, failures in run_ranks(checked_on_rank, 2, config, [*words, "--variants", ",".join(names)]):
        assert not failures
        assert set(usable) == errors.keys() == names
        assert all(error < (1 if name == "comet_fp8" else 1e-4) for name, error in errors.items())
