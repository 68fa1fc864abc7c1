"""The benchmark of speculation: a run on a CPU over a trained model, and what it says of drafts and of routing."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import bench
import pytest
import torch
from bench_cases import report_of
from training_cases import MODEL, MOE, Rank, make_job, make_model

from comet.config import MoEConfig
from comet.experts.cache import CacheReport
from comet.training.trainer import train

import suites.experts
import suites.speculation
from lib.ranks import Ranks
from lib.traces import Trace, made_trace, record_routing, resized_guesses, resized_trace, reuse_distances
from suites.experts import HOST_CORES
from suites.speculation import CODEC, KINDS

SMALL = replace(MODEL, context=96, num_layers=1, moe=replace(MOE, num_experts=8, top_k=3, shared_ffn_size=32))


def main(suite: str, words: Sequence[str]) -> None:
    bench.main([suite, *words])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The words that name a trained model and its text."""
    folder = tmp_path_factory.mktemp("trained")
    job = make_job(folder, model=SMALL, steps=20, eval_batches=1, sample_bytes=0)
    train(job, Rank())
    return "--source", str(folder / "out"), "--data", str(job.data.path), "--device", "cpu"


@pytest.mark.slow
def test_a_run_on_a_cpu(
    trained: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites.speculation, "HELDOUT_SHAPE", (2, 2, 24))
    kinds = list(KINDS)
    words = ["--budgets", "0.5", "--tokens", "8", "--rounds", "1", "--temperature", "0", "--variants", ",".join(kinds)]
    main("speculation", [*trained, *words, "--out", str(tmp_path)])
    out = capsys.readouterr().out.splitlines()
    assert (tmp_path / "bench_speculation.json").read_text() == out[-1] + "\n"
    found = json.loads(out[-1])
    rows = {row["variant"]: row for row in found["rows"]}
    assert list(rows) == [*kinds, "resident"]
    assert [row["budget"] for row in rows.values()] == [0.5] * len(kinds) + [1.0]
    assert not any("failure" in row for row in rows.values())
    on_demand, cache, resident = rows["on_demand"], rows["cache"], rows["resident"]
    assert on_demand["hits"] == 0
    assert resident["hits"] == resident["of_resident"] == 1
    assert on_demand["mb_per_token"] > cache["mb_per_token"] > resident["mb_per_token"] == 0
    assert cache["mb_per_token"] > 2 * rows["cache mxfp8"]["mb_per_token"] > 0
    for same in ("cache", "cache lfu", "conservative"):
        assert rows[same]["nll"] == pytest.approx(resident["nll"], rel=1e-5), f"greedy texts are the same: {same}"
    for name, row in rows.items():
        assert ("acceptance" in row) == (KINDS.get(name, {}).get("speculate") is not None)
        assert row["first_token_ms"] > 0
    kinds = [name for name in suites.experts.KINDS if not name.endswith(HOST_CORES)]
    replay_elsewhere(tmp_path / "routing.pt", kinds, capsys)


def test_texts_are_scored_by_the_bytes_that_were_made() -> None:
    made, stream = [0xA9, 0x41, 0xFF, 0xC3, 0xA9, 0xE2, 0x82], CODEC.stream([0xC3])
    shown = [stream.push(byte) for byte in made]
    assert all(shown), "what a step costs is counted from the first token on"
    assert CODEC.encode("".join(shown) + stream.finish()) == made


@pytest.mark.slow
def test_host_cores_at_another_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = small_trace()
    trace.save(tmp_path / "routing.pt")
    kinds = [name for name in suites.experts.KINDS if name.endswith(HOST_CORES)]
    rows = replay_elsewhere(tmp_path / "routing.pt", kinds, capsys)
    assert all(0 <= row["hosted"] <= 1 for row in rows)


def replay_elsewhere(path: Path, kinds: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[dict]:
    """The recorded routing in the benchmark of experts, at its own shape."""
    words = ["--device", "cpu", "--model", "tiny", "--layers", "2", "--budgets", "0.5,1.0", "--steps", "6"]
    words += ["--variants", ",".join(kinds), "--rounds", "1"]
    with pytest.raises(ValueError, match=r"variants='cache \+ prefetch.* must come with --trace"):
        main("experts", words)
    main("experts", [*words, "--trace", str(path)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["trace"] == str(path)
    kept = [row for row in found["rows"] if row["variant"] in kinds]
    assert [(row["variant"], row["budget"]) for row in kept] == [
        (kind, budget) for budget in (0.5, 1.0) for kind in kinds
    ]
    assert all(row["hits"] == 1 for row in kept if row["budget"] == 1)
    assert all(0 < row["hits"] < 1 for row in kept if row["budget"] < 1)
    return kept


def test_made_routing_and_every_stored_type(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--device", "cpu", "--model", "tiny", "--layers", "1", "--budgets", "0.5", "--steps", "4", "--rounds", "1"]
    main("experts", [*words, "--stored", "bf16,mxfp8,mxfp4", "--out", str(tmp_path)])
    line = capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / "bench_experts.json").read_text() == line + "\n"
    rows = json.loads(line)["rows"]
    assert [row["stored"] for row in rows if row["variant"] == "cache"] == ["bf16", "mxfp8", "mxfp4"]
    assert json.loads(line)["trace"] == "made, sticky=0.5"
    assert {"commit", "date", "command", "device", "ranks", "torch"} <= json.loads(line).keys()


def test_shares_are_of_all_ranks() -> None:
    nothing = CacheReport(**dict.fromkeys((each.name for each in fields(CacheReport)), 0))
    missing = replace(nothing, fetched=1, hosted=1, prefetched_needed=1)
    reports = [replace(missing, needed=needed, prefetched=needed) for needed in (6, 2)]
    found = suites.experts.cache_figures(reports, 1e3, 2.0, 1.0, 1.0)
    assert (found["hits"], found["hosted"], found["precision"]) == (0.5, 0.25, 0.25)


@pytest.mark.slow
def test_ranks_each_cache_their_own_experts() -> None:
    words = ["--device", "cpu", "--model", "tiny", "--layers", "2", "--budgets", "0.5,1.0", "--steps", "8"]
    with pytest.raises(ValueError, match=r"ep=2 must be 1 with --prompt"):
        main("experts", [*words, "--ep", "2", "--prompt", "40"])
    found, _ = report_of("experts", *words, "--rounds", "1", "--ep", "2", torchrun=True)
    on_demand, resident, half, whole = found["rows"]
    assert (on_demand["variant"], resident["variant"], found["ep"]) == ("on_demand", "resident", 2)
    assert [(row["slots"], row["hits"] < 1) for row in (half, whole)] == [(2, True), (4, False)], "of four experts each"
    assert whole["bound_us"] == resident["us"], "nothing came over the link"


def test_prompts_beside_their_bound(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--model", "tiny", "--layers", "2", "--steps", "4", "--rounds", "1", "--prompt", "40"]
    main("experts", [*words, "--budgets", "0.5,1.0"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    products, *prompts = (row for row in rows if row["variant"].startswith("prompt of 40"))
    assert products["us"] > 0
    assert [(row["budget"], row["hits"]) for row in prompts] == [(0.5, 0.5), (1.0, 1)], "every expert is needed"


def test_a_variant_that_fails_has_a_row_and_the_others_go_on(
    trained: Sequence[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites.speculation, "HELDOUT_SHAPE", (1, 2, 24))
    monkeypatch.setattr("comet.generation.engine.QuantisedReader", fails)
    words = ["--budgets", "0.5", "--tokens", "4", "--rounds", "1", "--temperature", "0"]
    main("speculation", [*trained, *words, "--variants", "cache mxfp8,cache"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["variant"] for row in rows] == ["cache", "resident", "cache mxfp8"]
    assert rows[0]["nll"] == pytest.approx(rows[1]["nll"]), "the experts were given back"
    assert rows[2]["failure"] == "out of memory"


def fails(*_: object) -> None:
    """In place of what a GPU refuses."""
    raise torch.OutOfMemoryError("out of memory")


def test_what_is_left_out_says_why(trained: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = suites.speculation.parse([*trained, "--variants", "cache", "--seconds", "0", "--rounds", "1"])
    assert arguments.seconds == 0
    main(
        "speculation",
        [*trained, "--budgets", "0.5,0.1", "--variants", "cache", "--tokens", "4", "--rounds", "1", "--seconds", "0"],
    )
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["variant"] for row in rows] == ["resident", "cache", "cache"]
    assert all(row["failure"] == "left out: the time was over" for row in rows[1:])


def test_who_names_no_prefetch_has_none(trained: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The default would prefetch on a GPU."""
    monkeypatch.setattr(suites.speculation.Run, "make", lambda run, *_: None)
    monkeypatch.setattr(suites.speculation, "link_gbs", lambda _: 1.0)
    model, ranks = SimpleNamespace(config=SMALL), Ranks(0, torch.device("cpu"), None)
    run = suites.speculation.Run(suites.speculation.parse(trained), model, ranks, torch.zeros(1))  # type: ignore[arg-type]
    found = {name: replace(run.plain, **changes).expert_prefetch for name, changes in KINDS.items()}
    assert found == {name: "prefetch" in name for name in KINDS}


def test_names_that_are_none(trained: Sequence[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="variants='lru' must be one of on_demand, cache, cache lfu"):
        main("speculation", [*trained, "--variants", "cache,lru"])
    with pytest.raises(ValueError, match=r"variants='lru' must be one of cache, cache lfu, cache \+ prefetch"):
        main("experts", ["--variants", "lru"])
    with pytest.raises(ValueError, match=r"trace='.*none.pt' must be a file that bench.py speculation wrote"):
        main("experts", ["--device", "cpu", "--model", "tiny", "--trace", str(tmp_path / "none.pt")])
    torch.save(dict.fromkeys(("ids", "num_experts"), 1), tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other.pt' must hold ids, num_experts, guessed, as"):
        main("experts", ["--device", "cpu", "--model", "tiny", "--trace", str(tmp_path / "other.pt")])


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
