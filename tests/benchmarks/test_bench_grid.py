"""Many points in one run of the layer benchmark: what is compared, what is kept, and block FP8."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import ALONE, CPU
from ranks import run_ranks
from torch import Tensor

from comet.config import MoEConfig, OverlapConfig
from comet.reference.plain import plain_experts

import suites.moe
from lib.moe.layer import Layer, make_inputs, open_layer
from lib.ranks import Ranks
from lib.report import set_aside
from lib.shapes import model, parse_overlap
from suites.moe import checked_variants, parse
from variants.layer import LayerVariant

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
    """``stale``: what a replay leaves in the memory of the output is not this input set's."""
    recorded: list[LayerVariant] = []

    def pretend(variant: LayerVariant, rotate: int) -> LayerVariant:
        recorded.append(lambda index: tuple(2 * part if stale else part for part in variant(index)))
        return recorded[-1]

    monkeypatch.setattr(suites.moe, "capture", pretend)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    arguments, failures = parse("--variants comet,comet_graph,plain,comm_comet".split()), dict[str, str]()
    with open_layer(TINY, arguments, 64, ALONE) as layer:
        inputs = make_inputs(TINY, 48, "zipf", ALONE)
        usable, errors = checked_variants(layer, inputs, arguments, PretendedGPU(0, CUDA, None), failures)
    assert len(recorded) == 2
    assert usable["comm_comet"] is recorded[-1]
    if stale:
        assert failures["comet_graph"].startswith("differs from the plain path")
        assert "comet_graph" not in usable
    else:
        assert not failures
        assert usable["comet_graph"] is recorded[0]
        assert errors["comet_graph"] < 1e-4


def test_files_of_an_earlier_run_are_set_aside(tmp_path: Path) -> None:
    assert set_aside(tmp_path, "bench_moe") == []
    for run in (1, 2):
        for suffix in (".csv", ".json"):
            (tmp_path / f"bench_moe{suffix}").write_text(f"{run}{suffix}")
        moved = [(old.name, new.name) for old, new in set_aside(tmp_path, "bench_moe")]
        assert moved == [(f"bench_moe{suffix}", f"bench_moe.{run}{suffix}") for suffix in (".csv", ".json")]
    assert (tmp_path / "bench_moe.1.csv").read_text() == "1.csv"
    assert (tmp_path / "bench_moe.2.json").read_text() == "2.json"
    (tmp_path / "bench_moe.csv").touch()
    (tmp_path / "bench_moe.1.csv").unlink()
    (tmp_path / "bench_moe.1.json").unlink()
    (tmp_path / "bench_moe.2.csv").unlink()  # 2 is taken by the .json still, 1 is free
    assert [new.name for _, new in set_aside(tmp_path, "bench_moe")] == ["bench_moe.1.csv"]


WORDS = ["--device", "cpu", "--models", "tiny", "--rounds", "1", "--routing", "hot,uniform", "--tokens", "16,8"]


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
    suites.moe.run(parse(words), ALONE)
    points = [(16, "hot"), (16, "uniform"), (8, "hot"), (8, "uniform")]
    assert measured == points
    report = json.loads((tmp_path / "bench_moe.json").read_text())
    assert [(row["tokens"], row["routing"]) for row in report["rows"]] == points
    assert all(row["error"] < 1e-4 and row["seconds"] > 0 for row in report["rows"])
    assert "tiny 8 hot: done in " in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        suites.moe.run(parse(words), ALONE)
    with (tmp_path / "bench_moe.csv").open() as file:
        assert [(int(row["tokens"]), row["routing"]) for row in csv.DictReader(file)] == points[:3]
    with (tmp_path / "bench_moe.1.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4
    assert len(json.loads((tmp_path / "bench_moe.json").read_text())["rows"]) == 3
    assert "bench_moe.csv of an earlier run is now bench_moe.1.csv" in capsys.readouterr().err


SPLITS = ["comm_blocks", "comm_blocks=", "comm_blocks=-1", "", "num_panels=2,"]


@pytest.mark.parametrize(("text", "message"), [
    *((text, "must be comm_blocks=N or num_panels=N") for text in SPLITS),
    ("num_panels=0", "num_panels=0 must be at least 1"),
    ("transport=copy", "overlap='transport=copy': transport is no longer a setting: leave it out"),
])  # fmt: skip
def test_a_split_names_settings_and_obeys_their_rules(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_overlap(text, "overlap")
    assert parse_overlap("num_panels=2,comm_blocks=3", "overlap") == OverlapConfig(num_panels=2, comm_blocks=3)


def checked(
    rank: int, world_size: int, config: MoEConfig, words: list[str]
) -> tuple[list[str], dict[str, float], dict[str, str]]:
    import torch.distributed as dist

    ranks, failures = Ranks(rank, CPU, dist.group.WORLD), dict[str, str]()
    arguments = parse(["--ep", str(world_size), *words])
    with open_layer(config, arguments, 48, ranks) as layer:
        inputs = make_inputs(config, 40, "uniform", ranks)
        usable, errors = checked_variants(layer, inputs, arguments, ranks, failures)
    return sorted(usable), errors, failures


@pytest.mark.parametrize("hidden_size", [256, 64])
def test_block_fp8_is_compared_with_the_plain_path_where_widths_are_whole_blocks(hidden_size: int) -> None:
    config = MoEConfig(num_experts=4, top_k=2, hidden_size=hidden_size, ffn_size=128)
    words = ["--variants", "comet,plain,comet_fp8,comet_fp8_graph"]
    for usable, errors, failures in run_ranks(checked, 2, config, words):
        assert not failures
        assert usable == (["comet", "comet_fp8", "plain"] if hidden_size == 256 else ["comet", "plain"])
        assert hidden_size == 64 or 0.1 < errors["comet_fp8"] < 0.6


@pytest.mark.parametrize("words", [[], ["--backward"]])
def test_biases_and_activation_of_a_model_are_what_is_measured(words: list[str]) -> None:
    gpt_oss = model("gpt_oss_20b")
    assert (gpt_oss.activation.name, gpt_oss.expert_bias) == ("clamped_swiglu", True)
    config = replace(gpt_oss, num_experts=4, top_k=2, hidden_size=256, ffn_size=128)
    names = {"comet", "plain"} if words else {"comet", "plain", "pipelined", "all_gather", "comet_fp8"}
    for usable, errors, failures in run_ranks(checked, 2, config, [*words, "--variants", ",".join(names)]):
        assert not failures
        assert set(usable) == names
        assert all(error < (1 if name == "comet_fp8" else 1e-4) for name, error in errors.items())
        assert errors.keys() == names


def without_biases(*routed: Any) -> Tensor:
    return plain_experts(*routed[:-1], None)


def test_a_variant_without_the_biases_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("variants.layer.pipelined_experts", without_biases)
    config, failures = replace(model("tiny"), expert_bias=True), dict[str, str]()
    arguments = parse("--variants plain,comet,pipelined".split())
    with open_layer(config, arguments, 48, ALONE) as layer:
        usable, _ = checked_variants(layer, make_inputs(config, 40, "uniform", ALONE), arguments, ALONE, failures)
    assert (set(usable), list(failures)) == ({"plain", "comet"}, ["pipelined"])
