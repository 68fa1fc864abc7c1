"""The benchmark of speculation: a run on a CPU over a trained model, and what it says of drafts and of routing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training_cases import MODEL, MOE, Rank, make_job, make_model

from comet.config import MoEConfig, SpeculationConfig
from comet.experts import DraftRouter, Speculation
from comet.generation.engine import GPTEngine
from comet.jobs.generate import GenerateConfig
from comet.training.trainer import train

import suites.experts
import suites.speculation
from lib.drafts import Rounds, draft_passes, kept_drafts, measure_drafts, of_positions, record_routing, whole_pass
from lib.traces import Trace, made_trace, resized_guesses, resized_trace, reuse_distances
from suites.experts import HOST_CORES
from suites.speculation import KINDS, main

SEED = 7
SMALL = replace(MODEL, context=96, num_layers=1, moe=replace(MOE, num_experts=8, top_k=3, shared_ffn_size=32))


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
    main([*trained, *words, "--out", str(tmp_path)])
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
    for same in ("cache", "cache lfu", "cache score", "conservative", "conservative cached"):
        assert rows[same]["nll"] == pytest.approx(resident["nll"], rel=1e-5), f"greedy texts are the same: {same}"
    for name, row in rows.items():
        assert ("acceptance" in row) == (KINDS.get(name, {}).get("speculate") is not None)
        assert row["first_token_ms"] > 0
    check_modes(found["modes"])
    assert "held-out, by T" in out
    kinds = [name for name in suites.experts.KINDS if not name.endswith(HOST_CORES)]
    replay_elsewhere(tmp_path / "routing.pt", kinds, capsys)


def check_modes(modes: list[dict]) -> None:
    """What has to hold of any model."""
    assert [row["tolerance"] for row in modes] == [None, 0.1, 0.3, 0.5, 0.9]
    assert (modes[0]["nll_added"], modes[0]["agreement"]) == (0, pytest.approx(1)), "conservative"
    assert all(1 <= row["tokens_per_round"] <= 5 for row in modes)


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
        suites.experts.main(words)
    suites.experts.main([*words, "--trace", str(path)])
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
    suites.experts.main([*words, "--stored", "bf16,mxfp8,mxfp4", "--out", str(tmp_path)])
    line = capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / "bench_experts.json").read_text() == line + "\n"
    rows = json.loads(line)["rows"]
    assert [row["stored"] for row in rows if row["variant"] == "cache"] == ["bf16", "mxfp8", "mxfp4"]
    assert json.loads(line)["trace"] == "made, sticky=0.5"


def test_prompts_beside_their_bound(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--model", "tiny", "--layers", "2", "--steps", "4", "--rounds", "1", "--prompt", "40"]
    suites.experts.main([*words, "--budgets", "0.5,1.0"])
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
    main([*trained, *words, "--variants", "cache mxfp8,cache"])
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
    main([*trained, "--budgets", "0.5,0.1", "--variants", "cache", "--tokens", "4", "--rounds", "1", "--seconds", "0"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["variant"] for row in rows] == ["resident", "cache", "cache"]
    assert all(row["failure"] == "left out: the time was over" for row in rows[1:])


def test_who_names_no_prefetch_has_none(trained: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The default would prefetch on a GPU."""
    monkeypatch.setattr(suites.speculation.Run, "make", lambda run, *_: None)
    monkeypatch.setattr(suites.speculation, "link_gbs", lambda _: 1.0)
    model, ranks = SimpleNamespace(config=SMALL), SimpleNamespace(device=torch.device("cpu"))
    run = suites.speculation.Run(suites.speculation.parse(trained), model, ranks, torch.zeros(1))  # type: ignore[arg-type]
    found = {name: replace(run.plain, **changes).expert_prefetch for name, changes in KINDS.items()}
    assert found == {name: "prefetch" in name for name in KINDS}


def test_names_that_are_none(trained: Sequence[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="variants='lru' must be one of on_demand, cache, cache lfu"):
        main([*trained, "--variants", "cache,lru"])
    with pytest.raises(ValueError, match=r"variants='lru' must be one of cache, cache lfu, cache \+ prefetch"):
        suites.experts.main(["--variants", "lru"])
    with pytest.raises(ValueError, match=r"trace='.*none.pt' must be a file that bench.py speculation wrote"):
        suites.experts.main(["--device", "cpu", "--model", "tiny", "--trace", str(tmp_path / "none.pt")])
    torch.save(dict.fromkeys(("ids", "num_experts"), 1), tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other.pt' must hold ids, num_experts, guessed, as"):
        suites.experts.main(["--device", "cpu", "--model", "tiny", "--trace", str(tmp_path / "other.pt")])


def test_the_examples_of_modes() -> None:
    p, q = torch.tensor([[[0.4, 0.6]]]).double(), torch.tensor([[[0.8, 0.2]]]).double()
    for tolerance, kept in ((None, [0.4, 0.2]), (0.6, [0.8, 0.0]), (0.4, [0.0, 0.0])):
        torch.testing.assert_close(kept_drafts(p, q, 0.5, tolerance)[0, 0], torch.tensor(kept).double())
    found = of_positions(p, q, torch.tensor([[0]]), 0.5, 0.6)
    expected = {"accepted": 0.8, "nll_added": math.log(0.4 / 0.88), "agreement": 0.52, "goes_on": 2.0}
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected)
    assert float(of_positions(p, q, torch.tensor([[1]]), 0.1, None)["goes_on"]) == pytest.approx(0.2 / 0.6)
    assert float(of_positions(p, q, torch.tensor([[1]]), 0.5, None)["goes_on"]) == 0, (
        "a draft that is not sure is the last"
    )


@pytest.mark.parametrize("mode", ["conservative", "adaptive"])
def test_rounds_are_those_of_speculation(mode: str) -> None:
    """A memoryless model: p and q do not depend on what came before, so the text is as many draws from p."""
    drawn = torch.Generator().manual_seed(SEED)
    p, q = torch.tensor([0.45, 0.35, 0.15, 0.05]).double(), torch.tensor([0.6, 0.22, 0.1, 0.08]).double()
    config = SpeculationConfig(speculate=mode, tau=0.2, adaptive_tolerance=0.5, draft_tokens=3)  # type: ignore[arg-type]
    model = SimpleNamespace(lengths=torch.zeros(1).long(), rewind=lambda _: None, decode=lambda _: p[None])
    model.draft, model.verify = lambda _: q[None], lambda ids: p.expand(1, ids.shape[1], -1)
    sampling = SimpleNamespace(seen=None, probabilities=lambda each, _: each, certain=lambda each: each)
    count = 1500
    rounds = Speculation(model, sampling, config, torch.rand(count, 1, 7, generator=drawn, dtype=torch.float64))
    made = []
    for _ in range(count):
        rounds._next_length = 3  # not what the clock says
        made += rounds(torch.zeros(1).long(), [True], 100)[1]
    tolerance = None if mode == "conservative" else 0.5
    counted = Rounds(0.2, tolerance, 3)
    text = torch.multinomial(p, 40_000, replacement=True, generator=drawn)[None]
    for place in range(3):
        counted.add(place, p.expand(1, 40_000, -1), q.expand(1, 40_000, -1), text)
    found, said = counted.summary(), rounds.report.facts()
    assert said["tokens_per_round"] == pytest.approx(found["tokens_per_round"], rel=0.03)
    made_by_place = [sum(len(tokens) > place for tokens in made) / count for place in range(4)]
    reached = [row["reached"] * row["acceptance"] for row in counted.by_position()]
    assert made_by_place == pytest.approx([1.0, *reached], abs=0.03)


def test_adaptive_mode_draws_from_the_distribution_that_is_scored() -> None:
    from comet.experts.drafts.speculation import Draft, pick, verdict

    drawn = torch.Generator().manual_seed(SEED)
    p, q = torch.rand(2, 6, generator=drawn, dtype=torch.float64).softmax(1)
    p, q = (p * 2).softmax(0), (q * 8).softmax(0)
    tau, tolerance, count = 0.05, 0.4, 40_000
    config = SpeculationConfig(speculate="adaptive", tau=tau, adaptive_tolerance=tolerance)
    draws = torch.rand(count, 3, generator=drawn, dtype=torch.float64)
    drafts = pick(q.expand(count, -1), draws[:, 0])
    draft = Draft(
        ids=torch.stack([torch.zeros_like(drafts), drafts], dim=1), proposed=torch.ones(count, 1, dtype=torch.bool),
        confidence=q[drafts][:, None], q=[q.expand(count, -1)], seen=None,
    )  # fmt: skip
    likely = p.expand(count, 2, -1)
    accepted, weights = verdict(config, draft, likely, likely, draws[:, 1:2])
    made = torch.where(accepted == 1, drafts, pick(weights, draws[:, 2]))
    shares = made.bincount(minlength=6) / count
    for token in range(6):
        found = of_positions(p[None, None], q[None, None], torch.tensor([[token]]), tau, tolerance)
        assert float(shares[token]) == pytest.approx(float(p[token] * torch.exp(-found["nll_added"])), abs=0.01)
    assert float((accepted == 1).double().mean()) == pytest.approx(float(found["accepted"]), abs=0.01)


def test_drafts_on_given_text_are_those_of_decoding() -> None:
    model, group = make_model(SMALL, max_tokens=64)
    torch.nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(SEED))
    config = SpeculationConfig(draft_experts=(1,), draft_tokens=3, tau=0.0)
    engine = GPTEngine(model, group, speculation=config)
    text = torch.randint(256, (1, 20), generator=torch.Generator().manual_seed(SEED))
    with torch.no_grad():
        logits, whole = whole_pass(model, text)
        routers = [DraftRouter(layer.router, 1) for layer in model.moe_layers()]
        drafted = list(draft_passes(model, text, whole, routers, 3))
        for start in (5, 12):
            first = engine.prefill(text[:, :start], torch.tensor([start]), 20)
            torch.testing.assert_close(first, logits[:, start - 1], rtol=1e-4, atol=1e-4)
            for place in range(3):
                decoded = engine.draft(text[:, start + place])
                torch.testing.assert_close(decoded, drafted[place][:, start + place], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(drafted[0][:, 5:], logits[:, 5:], atol=1e-3), "drafts differ, or nothing is tested"
    group.close()


def test_a_conservative_estimate_of_all_experts_is_certain() -> None:
    model, group = make_model(SMALL, max_tokens=64)
    GPTEngine(model, group)
    text = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(SEED))
    with torch.no_grad():
        found = measure_drafts(model, [text], SpeculationConfig(draft_experts=(2,), tau=0.0), [1.0], 256)
    assert all(row["acceptance"] == pytest.approx(1) for row in found), "an untrained head"
    assert all(row["tokens_per_round"] == pytest.approx(5) for row in found)
    assert all(row["nll_added"] == pytest.approx(0, abs=1e-9) for row in found)
    group.close()


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
        whole_pass(model, text)
        for hook in hooks:
            hook.remove()
        trace = record_routing(model, [text])
        for layer, router in enumerate(routers):
            assert torch.equal(trace.ids[:, layer], router(asked[layer]).top_k_ids.long())
            guessed = router(asked[layer - 1]).top_k_ids.long() if layer else torch.full_like(trace.ids[:, 0], -1)
            assert torch.equal(trace.guessed[:, layer], guessed)
    group.close()


def test_a_quantised_variant_leaves_the_experts_to_the_others() -> None:
    model, group = make_model(SMALL, max_tokens=64)
    whole = [weight.clone() for layer in model.moe_layers() for weight in layer.expert_weights()]
    settings = GenerateConfig(expert_budget=1.0, expert_dtype="mxfp8")
    engine = suites.speculation.Run.engine(SimpleNamespace(model=model), 8, settings)  # type: ignore[arg-type]
    assert engine.caches[0].weights.w1_scales is not None
    left = [weight for layer in model.moe_layers() for weight in layer.expert_weights()]
    assert all(torch.equal(*pair) for pair in zip(whole, left, strict=True))
    group.close()
