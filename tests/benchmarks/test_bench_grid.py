"""Many points in one run of the layer benchmark: what is compared, what is kept, and block FP8."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_cases import ALONE, CPU
from ranks import run_ranks
from recorded_layers import LaterExperts, record_on_cpu
from torch import Tensor

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.quantization.formats import quantize_fp8

import suites.moe
import variants.layer
from lib.moe.layer import WEIGHT_SEED, Layer, Settings, make_inputs, open_layer, quantize_experts
from lib.moe.report import COLUMNS
from lib.ranks import Ranks
from lib.report import append_csv, set_aside
from lib.shapes import draw_weights, model, parse_overlap
from suites.moe import checked_variants, parse, progress
from variants.layer import LayerVariant, record

CUDA = torch.device("cuda")
TINY = model("tiny")


class PretendedGPU(Ranks):
    """A rank alone that takes the ways of a GPU, on CPU tensors."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def worst(self, value: float) -> float:
        return value


def settings_of(*variants: str) -> Settings:
    return Settings(parallel=ParallelConfig(), max_tokens=64, variants=variants)


@pytest.mark.parametrize("stale", [False, True])
def test_graphs_are_compared_as_they_are_replayed(monkeypatch: pytest.MonkeyPatch, stale: bool) -> None:
    """``stale``: what a replay leaves in the memory of the output is not this input set's."""
    recorded: list[LayerVariant] = []

    def pretend(variant: LayerVariant) -> LayerVariant:
        recorded.append(lambda index: tuple(2 * part if stale else part for part in variant(index)))
        return recorded[-1]

    monkeypatch.setattr(suites.moe, "record", pretend)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    settings, failures = settings_of("comet", "comet_graph", "plain", "comm_comet"), dict[str, str]()
    with open_layer(TINY, settings, ALONE) as layer:
        inputs = make_inputs(TINY, 48, "zipf", ALONE)
        usable, errors = checked_variants(layer, inputs, settings, PretendedGPU(0, CUDA, None), failures)
    assert len(recorded) == 2
    assert usable["comm_comet"] is recorded[-1]
    if stale:
        assert failures["comet_graph"].startswith("differs from the plain path")
        assert "comet_graph" not in usable
    else:
        assert not failures
        assert usable["comet_graph"] is recorded[0]
        assert errors["comet_graph"] < 1e-4


def test_with_a_backward_pass_the_graphs_are_those_a_user_trains_with(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = record_on_cpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    settings = replace(settings_of("comet", "comet_graph", "plain"), backward=True)
    with open_layer(TINY, settings, ALONE) as layer:
        assert layer.moe is not None
        layer.moe.experts = LaterExperts(TINY, layer.moe.group, OverlapConfig(), use_kernels=False)
        inputs, failures = make_inputs(TINY, 48, "uniform", ALONE), dict[str, str]()
        usable, errors = checked_variants(layer, inputs, settings, PretendedGPU(0, CUDA, None), failures)
        assert (failures, captures.count, captures.replays) == ({}, 2, 2)
        assert errors["comet_graph"] < 1e-4
        found, wanted = usable["comet_graph"](1), usable["comet"](1)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
        assert captures.replays == 4


def test_a_record_keeps_the_output_of_the_first_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """``capture`` runs every set twice, to warm up and to record: the second output is the one a replay writes."""
    calls: list[int] = []

    def variant(index: int) -> tuple[Tensor, ...]:
        calls.append(index)
        return (torch.full((), 10 * len(calls) + index),)

    def capture(run: Callable[[int], object], *, rotate: int) -> Callable[[int], object]:
        assert [run(index) for index in (*range(rotate), *range(rotate))] == [None] * (2 * rotate)
        return calls.append

    monkeypatch.setattr(variants.layer, "capture", capture)
    replayed = record(variant)
    assert [int(tensor) for tensor in replayed(2)] == [50]
    assert calls == [0, 1, 2, 3, 0, 1, 2, 3, 2]


@pytest.mark.parametrize("variants", [("comet", "plain"), ("plain",)])
def test_weights_are_drawn_where_they_are(variants: tuple[str, ...]) -> None:
    """With and without Comet's layer, which holds the same memory; the widths tell D and F apart."""
    config = MoEConfig(num_experts=4, top_k=2, hidden_size=128, ffn_size=64)
    wanted = torch.empty(4, 128, 128), torch.empty(4, 128, 64)
    others = torch.empty(4, 128, 128), torch.empty(4, 128, 64)
    draw_weights(*wanted, config, WEIGHT_SEED)
    draw_weights(*others, config, WEIGHT_SEED + 1)
    with open_layer(config, settings_of(*variants), ALONE) as layer:
        assert (layer.moe is None) == ("comet" not in variants)
        assert torch.equal(layer.w1, wanted[0])
        assert torch.equal(layer.w2, wanted[1])
        assert not torch.equal(layer.w2, others[1])
        spread = layer.w1.std().item() * math.sqrt(128), layer.w2.std().item() * math.sqrt(64)
        assert spread == pytest.approx((1, 1), rel=0.03)


def row_of(model_name: str, tokens: int, routing: str, x_best: float | None) -> dict[str, object]:
    keys = {"model": model_name, "tokens": tokens, "ep": 4, "tp": 1, "routing": routing, "direction": "forward"}
    return keys | ({"x_best": x_best, "plain_ms": 2.0, "comet_ms": 1.0} if x_best else {"failures": "comet: too bad"})


def test_files_of_an_earlier_run_are_set_aside(tmp_path: Path) -> None:
    assert set_aside(tmp_path, "bench_moe") == []
    for run in (1, 2):
        for suffix in (".csv", ".json"):
            (tmp_path / f"bench_moe{suffix}").write_text(f"{run}{suffix}")
        moved = [(old.name, new.name) for old, new in set_aside(tmp_path, "bench_moe")]
        assert moved == [(f"bench_moe{suffix}", f"bench_moe.{run}{suffix}") for suffix in (".csv", ".json")]
    assert (tmp_path / "bench_moe.1.csv").read_text() == "1.csv"
    assert (tmp_path / "bench_moe.2.json").read_text() == "2.json"
    append_csv(tmp_path / "bench_moe.csv", [row_of("a", 8, "zipf", 1.5)], COLUMNS)
    with (tmp_path / "bench_moe.csv").open() as file:
        assert [row["model"] for row in csv.DictReader(file)] == ["a"]
    (tmp_path / "bench_moe.1.csv").unlink()
    (tmp_path / "bench_moe.1.json").unlink()
    (tmp_path / "bench_moe.2.csv").unlink()  # 2 is taken by the .json still, 1 is free
    assert [new.name for _, new in set_aside(tmp_path, "bench_moe")] == ["bench_moe.1.csv"]


def test_progress_of_a_row() -> None:
    row = {"model": "tiny", "tokens": 64, "routing": "zipf", "seconds": 3.14, "timed_seconds": 0.88, "failures": ""}
    assert progress(row) == "tiny 64 zipf: done in 3.1 s, 0.9 s of it timed rounds"
    del row["timed_seconds"]
    assert progress(row | {"failures": "point: oh"}) == "tiny 64 zipf: done in 3.1 s; point: oh"


WORDS = ["--device", "cpu", "--models", "tiny", "--rounds", "1", "--routing", "hot,uniform", "--tokens", "16,8"]


def test_routings_are_a_list() -> None:
    assert parse(WORDS)[0].routing == ("hot", "uniform")


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
    words = [*WORDS, "--out", str(tmp_path)]
    suites.moe.run(*parse(words), ALONE)
    points = [(16, "hot"), (16, "uniform"), (8, "hot"), (8, "uniform")]
    assert measured == points
    report = json.loads((tmp_path / "bench_moe.json").read_text())
    assert [(row["tokens"], row["routing"]) for row in report["rows"]] == points
    assert all(row["error"] < 1e-4 and row["seconds"] >= row["timed_seconds"] > 0 for row in report["rows"])
    assert "tiny 8 hot: done in " in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        suites.moe.run(*parse(words), ALONE)
    with (tmp_path / "bench_moe.csv").open() as file:
        assert [(int(row["tokens"]), row["routing"]) for row in csv.DictReader(file)] == points[:3]
    with (tmp_path / "bench_moe.1.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4
    assert not (tmp_path / "bench_moe.json").exists()
    assert "bench_moe.csv of an earlier run is now bench_moe.1.csv" in capsys.readouterr().err


def test_splits_of_a_command_line() -> None:
    assert parse_overlap("num_panels=2,comm_blocks=3", "overlap") == OverlapConfig(num_panels=2, comm_blocks=3)


@pytest.mark.parametrize(
    "text",
    [
        "comm_blocks",
        "comm_blocks=",
        "comm_blocks=-1",
        "",
        "num_panels=2,",
    ],
)
def test_a_split_must_name_a_setting_and_a_number(text: str) -> None:
    with pytest.raises(ValueError, match=r"overlap='.*' must be comm_blocks=N or num_panels=N"):
        parse_overlap(text, "overlap")


def test_a_split_obeys_the_rules_of_the_settings() -> None:
    with pytest.raises(ValueError, match=r"num_panels=0 must be at least 1"):
        parse_overlap("num_panels=0", "overlap")
    with pytest.raises(ValueError, match=r"overlap='transport=copy': transport is no longer a setting: leave it out"):
        parse_overlap("transport=copy", "overlap")


VARIANTS = ("comet", "plain", "comet_fp8", "comet_fp8_graph")
CONFIG = MoEConfig(num_experts=4, top_k=2, hidden_size=256, ffn_size=128)


def checked(rank: int, world_size: int, config: MoEConfig) -> tuple[list[str], dict[str, float | None], dict[str, str]]:
    import torch.distributed as dist

    ranks = Ranks(rank, CPU, dist.group.WORLD)
    settings = Settings(parallel=ParallelConfig(ep=world_size), max_tokens=48, variants=VARIANTS)
    failures: dict[str, str] = {}
    with open_layer(config, settings, ranks) as layer:
        inputs = make_inputs(config, 40, "uniform", ranks)
        usable, errors = checked_variants(layer, inputs, settings, ranks, failures)
    return sorted(usable), errors, failures


def test_it_is_compared_with_the_plain_path() -> None:
    for usable, errors, failures in run_ranks(checked, 2, CONFIG):
        assert usable == ["comet", "comet_fp8", "plain"]
        assert not failures
        assert 0.1 < errors["comet_fp8"] < 0.6


def test_widths_that_are_no_whole_blocks_have_no_such_variant() -> None:
    for usable, _, failures in run_ranks(checked, 2, MoEConfig(num_experts=4, top_k=2, hidden_size=64, ffn_size=128)):
        assert usable == ["comet", "plain"]
        assert not failures


def test_quantised_experts_are_those_of_the_quantiser() -> None:
    weight = torch.randn(2, 256, 384, generator=torch.Generator().manual_seed(5))
    found, wanted = quantize_experts(weight), quantize_fp8(weight)
    assert torch.equal(found.elements.view(torch.uint8), wanted.elements.view(torch.uint8))
    assert torch.equal(found.scales, wanted.scales)


def test_it_has_columns_and_is_measured_where_it_is_asked_for() -> None:
    assert {"comet_fp8_ms", "comet_fp8_graph_ms", "error_fp8"} <= set(COLUMNS)
    assert not {"comet_fp8"} & set(parse([])[1].variants)
    assert parse(["--variants", "plain,comet_fp8"])[1].variants == ("plain", "comet_fp8")
