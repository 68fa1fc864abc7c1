"""The generation benchmark: one model in two libraries, every path's tokens, the arithmetic, and a run on a CPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bench_cases import CPU, report_of, run_on_rank
from generate_cases import graphs_on_cpu
from ranks import run_ranks

from comet.config import ParallelConfig
from comet.layer.group import make_expert_group
from comet.models.config import ModelConfig
from comet.models.gpt import GPT
from comet.tuner.timing import Timing

from baselines.library import library_version, make_library_model
from lib.gpt import make_gpt, model_config
from lib.ranks import Ranks, differs_over_ranks
from suites.generate import Paths, path_rows, prepare, room, step_bytes

SMALL = "--device cpu --model tiny --layers 1 --contexts 8,40 --rounds 1 --steps 2".split()
needs_library = pytest.mark.skipif(library_version() is None, reason="needs pip install 'comet-moe[hf]'")


def tiny_config(layers: int = 2) -> ModelConfig:
    return replace(model_config("tiny", layers, 128), num_kv_heads=2)


def tiny_gpt(layers: int = 2) -> GPT:
    config = tiny_config(layers)
    group = make_expert_group(config.moe, ParallelConfig(), max_tokens=64, dtype=torch.float32, device="cpu")
    return make_gpt(config, group)


def contents_of(gpt: GPT, batch: int, positions: int) -> torch.Tensor:
    config = gpt.config
    generator = torch.Generator().manual_seed(positions)
    shape = (2, config.num_layers, batch, config.num_kv_heads, positions, config.head_width)
    return torch.randn(shape, generator=generator)


@needs_library
@torch.no_grad()
def test_both_libraries_run_the_same_model() -> None:
    gpt = tiny_gpt()
    ids = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1))
    wanted = gpt(ids).logits
    for experts in (None, "eager", "batched_mm"):
        model = make_library_model(gpt, experts)
        assert model.model.layers[1].mlp.experts.gate_up_proj.data_ptr() == gpt.moe_layers()[1].w1.data_ptr()
        torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-3, atol=1e-3)
    assert wanted.std() > 0.3, "there is something to compare"


@needs_library
@torch.no_grad()
def test_all_paths_choose_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured paths do, too: ``graphs_on_cpu`` replaces the twin of warp decode, which reads tensors on the host."""
    captures = graphs_on_cpu(monkeypatch)
    gpt = tiny_gpt()
    first = torch.tensor([7, 200])
    makers = Paths(gpt).makers(contents_of(gpt, 2, 21), 64, with_graphs=True)
    assert makers.pop("hf_generate")
    assert len(makers) == 9
    made = {}
    for name, maker in makers.items():
        path = maker()
        for _ in range(2):
            path.rewind()
            chosen = [path.decode(first, count) for count in (1, 2, 3)]
        made[name] = torch.stack(chosen)
    assert captures.count == sum(name.endswith("_graph") for name in makers) == 4
    assert captures.replays == 4 * (2 * (1 + 2 + 3) - 1), "all but the first step of each"
    for name, tokens in made.items():
        assert torch.equal(tokens, made["comet"]), name


@needs_library
@torch.no_grad()
def test_generate_of_the_library_takes_the_same_steps() -> None:
    gpt = tiny_gpt()
    first = torch.tensor([9])
    makers = Paths(gpt).makers(contents_of(gpt, 1, 21), 64, with_graphs=False)
    made = []
    for name in ("comet", "hf_generate"):
        path = makers[name]()
        for count in (3, 6):
            path.rewind()
            made.append(path.decode(first, count))
    assert torch.equal(made[0], made[2])
    assert torch.equal(made[1], made[3])


@torch.no_grad()
def test_without_transformers_comet_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("suites.generate.library_version", lambda: None)
    gpt = tiny_gpt(1)
    makers = Paths(gpt).makers(contents_of(gpt, 1, 5), 64, with_graphs=True)
    assert list(makers) == ["comet_graph", "comet"]
    assert makers["comet"]().decode(torch.tensor([3]), 2).shape == (1,)


def test_path_rows_example() -> None:
    timings = {"comet": Timing(4, 3, 5, 4), "comet_graph": Timing(2, 2, 2, 2)}
    rows = path_rows(timings, {"comet": 1.0}, {"hf_eager": "too hot"}, steps=8, batch=2, num_bytes=1e9)
    assert [row["path"] for row in rows] == ["comet_graph", "comet", "hf_eager"]
    fast, slow, failed = rows
    assert (slow["ms"], slow["tokens_per_s"], slow["tbs"], slow["cosine"]) == (0.5, 4000, 2, 1)
    assert slow["quantiles"] == {"median_ms": 0.5, "p10_ms": 0.375, "p90_ms": 0.625, "mean_ms": 0.5}
    assert (fast["tokens_per_s"], fast["cosine"]) == (8000, None)
    assert (failed["failure"], failed["ms"], failed["tbs"]) == ("too hot", None, None)


def test_room_for_the_warm_up() -> None:
    assert [room(context, steps) for context, steps in ((61, 1), (62, 1), (48, 16), (49, 16))] == [64, 128, 64, 128]


def test_run_on_a_cpu(tmp_path: Path) -> None:
    run, _ = report_of("generate", *SMALL, "--batch", "2", "--rounds", "2", "--steps", "3", "--out", str(tmp_path))
    library = ["hf_comet", "hf_grouped_mm", "hf_batched_mm", "hf_eager", "hf_generate"] if library_version() else []
    expected = {(context, path) for context in (8, 40) for path in ("comet", *library)}
    assert {(row["context"], row["path"]) for row in run["rows"]} == expected
    for row in run["rows"]:
        assert row["failure"] is None
        assert row["tokens_per_s"] == pytest.approx(2e3 / row["ms"])
        assert row["tbs"] == pytest.approx(row["mbytes"] / row["ms"] / 1e3)
        assert row["of_roofline"] == pytest.approx(row["tbs"] / run["facts"]["read_roofline_tbs"])
        assert row["path"] == "hf_generate" or row["cosine"] > 0.9999
    assert json.loads((tmp_path / "bench_generate.json").read_text()) == run


def test_run_over_ranks(tmp_path: Path) -> None:
    run_ranks(run_on_rank, 2, "generate", [*SMALL, "--ep", "2", "--out", str(tmp_path)])
    run = json.loads((tmp_path / "bench_generate.json").read_text())
    found = [(row["ep"], row["tp"], row["context"], row["path"], row["failure"]) for row in run["rows"]]
    assert found == [(2, 1, context, "comet", None) for context in (8, 40)]


def two_ranks(rank: int, world_size: int, ep: int, tp: int) -> tuple[list[int], float]:
    """Tokens that a rank chooses, and the bytes it touches of them."""
    config = tiny_config()
    layout = ParallelConfig(ep=ep, tp=tp)
    group = make_expert_group(config.moe, layout, max_tokens=64, dtype=torch.float32, device="cpu")
    gpt, first, ranks = make_gpt(config, group), torch.tensor([7, 200]), Ranks(rank, CPU, dist.group.WORLD)
    contents = contents_of(gpt, 2, 21)
    with torch.no_grad():
        ready, _, failures = prepare(Paths(gpt), contents, first, 64, ranks)
        assert list(ready) == ["comet"]
        assert not failures
        ready["comet"].rewind()
        chosen = ready["comet"].decode(first, 4).tolist()
        assert differs_over_ranks(torch.full((1, 2), float(rank)), ranks)
        num_bytes = step_bytes(gpt, contents, first, 64, 4)
    group.close()
    return chosen, num_bytes


def test_ranks_take_equal_steps_and_count_their_own_bytes() -> None:
    hidden, layers, batch = 128, 2, 2
    attention = hidden * (4 + 2 * 2) * 32 + 4 * 32 * hidden + 2 * hidden
    dense = layers * (attention + 8 * hidden) + hidden + 256 * hidden + batch * hidden
    cached = 2 * layers * batch * 2 * 32 * (21 + 5 / 2)
    expert = 3 * 128 * 128
    for ep, tp in ((1, 2), (2, 1)):
        found = run_ranks(two_ranks, 2, ep, tp)
        assert found[0][0] == found[1][0], "ranks choose the same tokens"
        touched = [(num_bytes / 4 - dense - cached) / (expert / tp) for _, num_bytes in found]
        if tp == 2:
            assert touched[0] == touched[1], "both hold a part of every expert"
        else:
            assert min(touched) < layers * 2, "each counts its own experts only"
        total = sum(touched) / tp
        assert layers * 2 <= total <= layers * batch * 2, f"two experts of each token, not {total}"
