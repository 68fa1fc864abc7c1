"""The task ``modular``: its matrix, and a pair that runs beside the fused layer, on two CPU ranks as users start it."""

from __future__ import annotations

import json
import types
from pathlib import Path

import launch_jobs
import pytest
import torch
from modular_cases import combinations

from comet.config import MoEConfig, ParallelConfig
from comet.launch.config import compose, make_job
from comet.launch.tasks.modular import modular_job
from comet.layer.group import make_expert_group
from comet.modular.matrix import pairs
from comet.quantization.formats import WEIGHT_TYPES

PAIR = "SymmetricBatched", "GroupedBatched"


def test_a_pair_is_timed_and_traced_beside_the_fused_layer(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    settings = (f"modular.pair=[{','.join(PAIR)}]", "modular.tokens=24", "modular.rounds=2", f"output_dir={folder}")
    status, lines, errors = launch_jobs.run("modular", *settings, program=("-P", "-m", "comet.launch"))
    assert status == 0, errors
    facts = json.loads(lines[-1])
    label = " + ".join(PAIR)
    assert facts["times"].keys() == {label, "fused layer"}
    assert all(0 < time["p10_ms"] <= time["median_ms"] <= time["p90_ms"] for time in facts["times"].values())
    assert facts["apart"] < 1e-5
    assert facts["trace"] == str(folder / "trace.json")
    assert f"trace: {facts['trace']}" in lines
    names = [event.get("name") for event in json.loads(Path(facts["trace"]).read_text())["traceEvents"]]
    assert {label, "fused layer"} <= set(names)
    fits = [line for line in lines if "  fits: " in line]
    assert len(fits) == sum(pair["reason"] is None for pair in facts["pairs"]) == 12
    assert sum("SingleRank sends nothing to other ranks" in line for line in lines[:-1]) == 7


def test_the_matrix_of_one_rank_has_every_pair_with_the_reason_of_the_composer() -> None:
    config = MoEConfig(hidden_size=32, ffn_size=32, num_experts=4, top_k=2)
    group = make_expert_group(
        config, ParallelConfig(ep=1, tp=1), max_tokens=4, dtype=torch.float32, device="cpu", timeout_s=60.0
    )
    found = {(pair.prepare_finalize, pair.experts): pair for pair in pairs(config, group)}
    expected = {
        (item.prepare_finalize.__name__, item.experts.__name__): item.reason(1)
        for item in combinations()
        if item.reduction is item.experts.reductions[0] and item.weight_type is torch.Tensor
    }
    assert found.keys() == expected.keys()
    for names, wanted in expected.items():
        pair = found[names]
        assert (pair.reason is None) == (wanted is None) == bool(pair.weights), names
        assert wanted is None or wanted in (pair.reason or ""), names
    assert found["AllToAll", "GroupedContiguous"].weights == tuple(kind.__name__ for kind in WEIGHT_TYPES)
    assert found["FusedPrepareFinalize", "FusedExperts"].weights == ("Tensor",)
    group.close()


def test_a_pair_that_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("model=tiny", "modular.pair=[AllToAll,GroupedBatched]", "modular.tokens=4", f"output_dir={tmp_path}/x")
    job = make_job(compose(settings), 1)
    with pytest.raises(ValueError, match="AllToAll hands out contiguous rows, GroupedBatched takes batched rows"):
        modular_job(job, types.SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu")))  # type: ignore[arg-type]
    assert "AllToAll              GroupedBatched          no: AllToAll hands" in capsys.readouterr().out
    assert not (tmp_path / "x").exists()
