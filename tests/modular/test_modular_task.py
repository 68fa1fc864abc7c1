"""The task ``modular``: its matrix, and a pair that is timed with the fused layer, on two CPU ranks."""

import io
import json
import types
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from training_cases import Rank

from comet.jobs.config import ModularJob
from comet.launch.config import compose, make_job
from comet.launch.tasks.modular import find_parts, modular_job
from comet.quantization.formats import WEIGHT_TYPES

PAIR = "SymmetricBatched", "GroupedBatched"


def printed(rank: int, world_size: int, settings: list[str]) -> list[str]:
    """The lines that the task prints on a rank."""
    out = io.StringIO()
    with redirect_stdout(out):
        modular_job(make_job(compose(settings, ModularJob), world_size, ModularJob), Rank(rank, world_size))
    return out.getvalue().splitlines()


def test_a_pair_is_timed_and_traced_beside_the_fused_layer(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    settings = [f"modular.pair=[{','.join(PAIR)}]", "modular.tokens=24", "modular.rounds=2", f"output_dir={folder}"]
    lines, others = run_ranks(printed, 2, settings)
    assert not others
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
    found = {(pair["prepare_finalize"], pair["experts"]): pair["weights"] for pair in facts["pairs"]}
    assert len(fits) == sum(map(bool, found.values())) == sum(pair["reason"] is None for pair in facts["pairs"]) == 6
    assert found["AllToAll", "GroupedContiguous"] == [kind.__name__ for kind in WEIGHT_TYPES]
    assert found["FusedPrepareFinalize", "FusedExperts"] == ["Tensor"]
    assert sum("SingleRank sends nothing to other ranks" in line for line in lines[:-1]) == 4
    with pytest.raises(ValueError, match=r"output_dir='.*run' holds the trace\.json of an earlier run: overwrite=true"):
        find_parts(make_job(compose(settings, ModularJob), 2, ModularJob))
    for free in (["overwrite=true"], ["modular.pair=[]"]):
        find_parts(make_job(compose([*settings, *free], ModularJob), 2, ModularJob))


def test_a_pair_that_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("model=tiny", "modular.pair=[AllToAll,GroupedBatched]", "modular.tokens=4", f"output_dir={tmp_path}/x")
    job = make_job(compose(settings, ModularJob), 1, ModularJob)
    with pytest.raises(ValueError, match="AllToAll hands out contiguous rows, GroupedBatched takes batched rows"):
        modular_job(job, types.SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu")))  # type: ignore[arg-type]
    assert "AllToAll              GroupedBatched     no: AllToAll hands" in capsys.readouterr().out
    assert not (tmp_path / "x").exists()
