"""The benchmark of experts beyond GPU memory: texts of a trained model, routed experts alone, and what routing says."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench
import pytest
import torch
from bench_cases import ALONE, report_of
from training_cases import MODEL, MOE, Rank, make_job, make_model

from comet.config import MoEConfig
from comet.experts.cache import CacheReport
from comet.jobs.generate import GenerateConfig
from comet.training.trainer import train

import lib.experts
from lib.experts import CODEC, Way
from lib.traces import Trace, made_trace, record_routing, resized_guesses, resized_trace, reuse_distances
from suites.experts import KINDS, Run

SMALL = replace(MODEL, context=96, num_layers=1, moe=replace(MOE, num_experts=8, top_k=3, shared_ffn_size=32))
SHAPE = ["--device", "cpu", "--model", "tiny", "--rounds", "1"]


def rows_of(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    bench.main(["experts", *words])
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    return rows


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lib.experts, "STEPS_PER_CALL", 4)
    monkeypatch.setattr(lib.experts, "HELDOUT_SHAPE", (1, 2, 24))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The words that name a trained model and its text."""
    folder = tmp_path_factory.mktemp("trained")
    job = make_job(folder, model=SMALL, steps=20, eval_batches=1, sample_bytes=0)
    train(job, Rank())
    words = ("--source", str(folder / "out"), "--data", str(job.data.path), "--device", "cpu")
    return (*words, "--budgets", "0.5", "--tokens", "4", "--rounds", "1", "--temperature", "0")


@pytest.mark.slow
def test_a_run_on_a_cpu(trained: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows_of([*trained, "--tokens", "8", "--out", str(tmp_path)], capsys)
    assert json.loads((tmp_path / "bench_experts.json").read_text())["rows"] == found
    rows = {row["variant"]: row for row in found}
    assert list(rows) == [*KINDS, "resident"]
    assert [row["budget"] for row in rows.values()] == [0.5] * len(KINDS) + [1.0]
    assert not any("failure" in row for row in rows.values())
    on_demand, cache, resident = rows["on_demand"], rows["cache"], rows["resident"]
    assert on_demand["hits"] == 0
    assert resident["hits"] == resident["of_resident"] == 1
    assert on_demand["mb_per_token"] > cache["mb_per_token"] > resident["mb_per_token"] == 0
    assert cache["mb_per_token"] > 2 * rows["cache mxfp8"]["mb_per_token"] > 0
    for same in ("cache", "conservative"):
        assert rows[same]["nll"] == pytest.approx(resident["nll"], rel=1e-5), f"greedy texts are the same: {same}"
    for name, row in rows.items():
        assert ("acceptance" in row) == (KINDS.get(name, {}).get("speculate") is not None)
        assert row["first_token_ms"] > 0
    kinds = [name for name in KINDS if name.startswith("cache")]
    replay_elsewhere(tmp_path / "routing.pt", kinds, capsys)


def test_texts_are_scored_by_the_bytes_that_were_made() -> None:
    made, stream = [0xA9, 0x41, 0xFF, 0xC3, 0xA9, 0xE2, 0x82], CODEC.stream([0xC3])
    shown = [stream.push(byte) for byte in made]
    assert all(shown), "what a step costs is counted from the first token on"
    assert CODEC.encode("".join(shown) + stream.finish()) == made


def replay_elsewhere(path: Path, kinds: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The recorded routing at another shape, experts alone."""
    words = [*SHAPE, "--layers", "2", "--budgets", "0.5,1.0", "--steps", "6", "--variants", ",".join(kinds)]
    with pytest.raises(ValueError, match=r"variants='cache \+ prefetch.* must come with --trace"):
        Run.parse(words)
    rows = rows_of([*words, "--trace", str(path)], capsys)
    kept = [row for row in rows if row["variant"] in kinds]
    assert [(row["variant"], row["budget"]) for row in kept] == [
        (kind, budget) for budget in (0.5, 1.0) for kind in kinds
    ]
    assert all(row["hits"] == 1 for row in kept if row["budget"] == 1)
    assert all(0 < row["hits"] < 1 and row["hosted"] == 0 for row in kept if row["budget"] < 1)


def test_prefetched_experts_are_those_that_a_trace_guesses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = small_trace()
    trace.save(tmp_path / "routing.pt")
    words = ["--layers", "2", "--budgets", "0.5", "--steps", "8"]
    words += ["--variants", "on_demand,cache,cache + prefetch,cache mxfp4"]
    rows = rows_of([*SHAPE, *words, "--trace", str(tmp_path / "routing.pt"), "--out", str(tmp_path)], capsys)
    assert [row["variant"] for row in rows] == [
        "on_demand", "cache", "cache + prefetch", "cache mxfp4", "resident", "resident mxfp4",
    ]  # fmt: skip
    on_demand, cache, prefetch, quantised, *resident = rows
    assert (on_demand["hits"], *(row["hits"] for row in resident)) == (0, 1, 1)
    assert on_demand["mb_per_token"] > cache["mb_per_token"] > resident[0]["mb_per_token"] == 0
    assert (on_demand["x_on_demand"], resident[0]["of_resident"]) == (1, 1)
    assert cache["prefetch_precision"] is None
    assert prefetch["prefetch_precision"] == 1, "of this trace every guess is right"
    assert 0 < quantised["mb_per_token"] < cache["mb_per_token"] / 3
    report = json.loads((tmp_path / "bench_experts.json").read_text())
    assert {"commit", "date", "command", "device", "ranks", "torch", "trace", "link_gbs"} <= report["facts"].keys()


def test_shares_are_of_all_ranks() -> None:
    nothing = CacheReport(**dict.fromkeys((each.name for each in fields(CacheReport)), 0))
    missing = replace(nothing, fetched=1, hosted=1, prefetched_needed=1, fetched_bytes=8)
    reports = [replace(missing, needed=needed, prefetched=needed) for needed in (6, 2)]
    paths: Any = [SimpleNamespace(cache=SimpleNamespace(num_slots=3))]
    found = Way(name="cache", settings=GenerateConfig(expert_budget=0.5), paths=paths).row(reports, 2, 2.0, 1.0)
    assert (found["hits"], found["hosted"], found["prefetch_precision"], found["slots"]) == (0.5, 0.25, 0.25, 3)
    assert (found["mb_per_token"], found["link_gbs"]) == (4e-6, 0.002), "of the rank that brings most"


@pytest.mark.slow
def test_ranks_each_cache_their_own_experts() -> None:
    words = [*SHAPE, "--layers", "2", "--budgets", "0.5,1.0", "--steps", "8", "--ep", "2"]
    found, _ = report_of("experts", *words, torchrun=True)
    on_demand, half, whole, resident = found["rows"]
    assert (on_demand["variant"], resident["variant"], found["facts"]["ep"]) == ("on_demand", "resident", 2)
    assert [(row["slots"], row["hits"] < 1) for row in (half, whole)] == [(2, True), (4, False)], "of four experts each"
    assert on_demand["hits"] == 0
    assert whole["bound_us"] == resident["us"], "nothing came over the link"


def test_a_variant_that_fails_has_a_row_and_the_others_go_on(
    trained: Sequence[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comet.generation.engine.QuantisedReader", fails)
    rows = rows_of([*trained, "--variants", "cache mxfp8,cache"], capsys)
    assert [row["variant"] for row in rows] == ["cache", "resident", "cache mxfp8"]
    assert rows[0]["nll"] == pytest.approx(rows[1]["nll"]), "the experts were given back"
    assert rows[2]["failure"] == "OutOfMemoryError: out of memory"


def fails(*_: object) -> None:
    """In place of what a GPU refuses."""
    raise torch.OutOfMemoryError("out of memory")


def test_what_is_left_out_says_why(trained: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of([*trained, "--budgets", "0.5,0.1", "--variants", "cache", "--seconds", "0"], capsys)
    assert [row["variant"] for row in rows] == ["resident", "cache", "cache"]
    assert all(row["failure"] == "left out: the time was over" for row in rows[1:])


def test_who_names_no_prefetch_has_none() -> None:
    """The default of the library would prefetch on a GPU."""
    made: list[GenerateConfig] = []
    subject: Any = SimpleNamespace(
        moe=SMALL.moe, num_layers=1, dtype=torch.float32, make=lambda name, settings, slots: made.append(settings)
    )
    for name in KINDS:
        Run.parse(["--source", "x"]).make_one(subject, name, 0.5, ALONE)
    assert [settings.expert_prefetch for settings in made] == ["prefetch" in name for name in KINDS]


def test_names_that_are_none(tmp_path: Path) -> None:
    mistakes = {
        "variants='lru' must be one of on_demand, cache, ": ["--variants", "cache,lru"],
        "variants='adaptive' must come with --source": ["--variants", "adaptive"],
        "ep=2 must be 1 with --source": ["--ep", "2", "--source", "x"],
        "tokens=1 must be at least 2": ["--tokens", "1"],
        "sticky=1.0 must be at least 0 and below 1": ["--sticky", "1"],
    }
    for message, words in mistakes.items():
        with pytest.raises(ValueError, match=message):
            Run.parse(words)
    with pytest.raises(ValueError, match=r"trace='.*none.pt' must be a file that bench.py experts --source wrote"):
        bench.main(["experts", *SHAPE, "--trace", str(tmp_path / "none.pt")])
    torch.save(dict.fromkeys(("ids", "num_experts"), 1), tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other.pt' must hold ids, num_experts, guessed, as"):
        bench.main(["experts", *SHAPE, "--trace", str(tmp_path / "other.pt")])


def test_the_example_of_reuse_distances() -> None:
    assert reuse_distances([[2], [0], [2]], 4) == [[2], [1], [1]]


def small_trace(num_steps: int = 80) -> Trace:
    config = MoEConfig(num_experts=16, top_k=3, hidden_size=32, ffn_size=32)
    ids = made_trace(config, 2, num_steps, 0.4)
    return Trace(ids=ids, num_experts=16, guessed=ids.roll(1, dims=2))


def test_a_resized_trace_hits_as_the_recorded_one() -> None:
    trace, config = small_trace(400), MoEConfig(num_experts=64, top_k=8, hidden_size=32, ffn_size=32)
    ids = resized_trace(trace, config, num_layers=3, num_steps=400)
    assert ids.shape == (400, 3, 8)
    assert all(len(set(step)) == 8 for step in ids[:, 0].tolist())
    for size in (6, 10):
        recorded = hits_of(trace.ids, 16, size)
        assert hits_of(ids, 64, 4 * size) == pytest.approx(recorded, abs=0.05)
        assert recorded > 0.5, "routing that repeats, or nothing is tested"


def hits_of(ids: torch.Tensor, num_experts: int, num_slots: int) -> float:
    """Share of the needed experts that are among so many used last."""
    layers = [reuse_distances(layer.tolist(), num_experts) for layer in ids.unbind(1)]
    return float((torch.tensor(layers) < num_slots).float().mean())


def test_as_much_is_guessed_of_a_resized_trace() -> None:
    trace, config = small_trace(400), MoEConfig(num_experts=64, top_k=8, hidden_size=32, ffn_size=32)
    guessed = trace.ids.clone()
    guessed[:, 1, 2] = (trace.ids[:, 1, :2].sum(1) + 5) % 16
    trace = replace(trace, guessed=guessed)
    right = (guessed[..., None] == trace.ids[..., None, :]).any(-1).float().mean((0, 2))
    ids = resized_trace(trace, config, num_layers=3, num_steps=400)
    found = resized_guesses(trace, ids, 64)
    assert all(len(set(step)) == 8 for step in found[:, 1].tolist())
    shares = (found[..., None] == ids[..., None, :]).any(-1).float().mean((0, 2))
    assert shares[0] == 1
    assert shares.tolist()[1:] == pytest.approx([float(right[1])] * 2, abs=0.02)
    assert right[1] < 0.9, "a guess that fails, or nothing is tested"


def test_routers_are_asked_a_layer_ahead() -> None:
    model, group = make_model(replace(MODEL, num_layers=3), max_tokens=64)
    routers = [layer.router for layer in model.moe_layers()]
    for router in routers:
        torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(4))
    asked: list[torch.Tensor] = []
    hooks = [router.register_forward_pre_hook(lambda _, given: asked.append(given[0])) for router in routers]
    text = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        model(text)
        for hook in hooks:
            hook.remove()
        trace = record_routing(model, [text])
        for layer, router in enumerate(routers):
            assert torch.equal(trace.ids[:, layer], router(asked[layer]).top_k_ids.long())
            guessed = router(asked[layer - 1]).top_k_ids.long() if layer else torch.full_like(trace.ids[:, 0], -1)
            assert torch.equal(trace.guessed[:, layer], guessed)
    group.close()
