"""The training benchmark: its model and variants, how wrong steps differ from right ones, and runs on CPU ranks."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import ALONE, CPU, TINY, run_on_rank
from generate_cases import all_experts, graphs_on_cpu
from ranks import run_ranks
from torch import Tensor

from comet.config import ParallelConfig
from comet.layer.expert_path import FunctionPath
from comet.layer.group import make_expert_group
from comet.layer.routed_experts import SymmetricPath
from comet.layout import RoutedTokens
from comet.reference.plain import plain_experts

from lib.report import table_of
from lib.steps import CHECKED_STEPS, LEARNING_RATE, TOLERANCE, check_variants, deviations, row_norms
from lib.suite import Checked
from suites.train import COLUMNS, Run, SwitchedModel, figures, model_config

WORDS = [*TINY, "--context", "32", "--ep", "2"]


def make_model(dtype: torch.dtype = torch.float32) -> SwitchedModel:
    config = model_config("tiny", 2, 32)
    group = make_expert_group(config.moe, ParallelConfig(), max_tokens=64, dtype=dtype, device=CPU)
    return SwitchedModel(config, group, batch_size=2)


def test_examples_of_the_docstrings() -> None:
    times = {"comet": 5.0, "comet_graph": 4.0, "plain": 8.0, "rest": 3.0}
    assert figures(times, 1000) == dict(tokens_s=250_000, plain_tokens_s=125_000, x_plain=2, rest_share=0.75)
    assert set(figures({}, 1000).values()) == {None}
    assert row_norms(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).tolist() == [5, 1]
    found = torch.tensor([4.0, 2.0]), (torch.tensor([3.0, 4.0]),)
    wanted = torch.tensor([4.0, 4.0]), (torch.tensor([3.0, 5.0]),)
    assert deviations(found, wanted) == pytest.approx({"loss": 0.5, "gradient": 34**-0.5})
    assert deviations((found[0] * math.nan, ()), (wanted[0], ())) == {"loss": math.inf, "gradient": 0}
    rows = [{"model": "a", "x_plain": 2.0}, {"x_plain": 8.0}, {"model": "b", "failures": {"point": "out of memory"}}]
    summary = Run().summary(rows)
    assert summary == {"geometric_mean": {"x_plain": pytest.approx(4)}, "least_x_plain": 2}
    *_, means, remark = table_of(rows, ["model"], COLUMNS, summary["geometric_mean"]).splitlines()
    assert means.split() == ["geometric", "mean", "4"]
    assert remark == "failures: point: out of memory (at b)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_variant_starts_from_the_same_weights(dtype: torch.dtype) -> None:
    model = make_model(dtype)
    assert {parameter.dtype for parameter in model.gpt.parameters()} == {dtype}
    first = model.first_steps("comet")
    checked = Checked(ALONE, model.group.workspace)
    errors = check_variants(model, ("comet", "comet_graph", "plain", "rest"), checked)
    assert (list(checked.variants), list(checked.failures)) == (["plain", "comet", "rest"], ["comet_graph"])
    assert checked.failures["comet_graph"].startswith("RuntimeError: there are no graphs: ")
    assert 0 <= errors["loss_error"] <= TOLERANCE["loss"][dtype]
    assert 0 < errors["gradient_error"] <= TOLERANCE["gradient"][dtype] / 2
    again = model.first_steps("comet")
    assert torch.equal(again[0], first[0])
    assert all(map(torch.equal, again[1], first[1]))
    assert len(set(first[0].tolist())) == CHECKED_STEPS  # other batches, other weights
    assert model.first_steps("rest")[0][0] != first[0][0]  # even the first loss depends on the layers


def test_a_variant_runs_its_own_path_only() -> None:
    model, calls = make_model(), []

    def noted(name: str, run: Any) -> Any:
        return FunctionPath(lambda *inputs: calls.append(name) or run(*inputs))

    model.own_paths = [noted("own", path) for path in model.own_paths]
    model.other_paths = {name: noted(name, path) for name, path in model.other_paths.items()}
    for variant, ran in (("plain", "plain"), ("comet", "own"), ("rest", "rest"), ("comet", "own")):
        calls.clear()
        model.step(variant, 0)
        assert calls == [ran, ran], variant
    model.start_anew()
    drawn = model.layers[1].w1.detach().clone()
    model.step("rest", 0)  # the experts' gradients are all alike: each weight decays, and is one learning rate less
    rate = LEARNING_RATE
    torch.testing.assert_close(model.layers[1].w1, drawn * (1 - 0.1 * rate) - rate, rtol=0, atol=1e-3 * rate)


def test_steps_are_replayed_from_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = graphs_on_cpu(monkeypatch)
    model = make_model()
    model.own_paths = [FunctionPath(partial(all_experts, None))] * 2
    wanted = model.first_steps("comet")
    assert captures.count == 0
    found = model.first_steps("comet_graph")
    assert (captures.count, captures.replays) == (1, 2)  # in the second and third step
    assert torch.equal(found[0], wanted[0])
    assert all(map(torch.equal, found[1], wanted[1]))
    model.step("plain", 0)
    assert captures.replays == 2


def weights_exchanged(routed: RoutedTokens, w1: Tensor, w2: Tensor, *of: Any) -> Tensor:
    return plain_experts(routed, w1, w2.roll(1, 0), *of)


def no_gradient_of_tokens(routed: RoutedTokens, *rest: Any) -> Tensor:
    return plain_experts(routed._replace(tokens=routed.tokens.detach()), *rest)


def no_gradient_of_w1(routed: RoutedTokens, w1: Tensor, *rest: Any) -> Tensor:
    return plain_experts(routed, w1.detach() + 0 * w1, *rest)


@pytest.mark.parametrize("wrong", [weights_exchanged, no_gradient_of_tokens, no_gradient_of_w1])
def test_wrong_steps_are_not_timed(wrong: Any) -> None:
    model = make_model(torch.bfloat16)
    model.own_paths = [
        FunctionPath(lambda *inputs, layer=layer: wrong(*inputs, layer.layout, None)) for layer in model.layers
    ]
    checked = Checked(ALONE, model.group.workspace)
    assert check_variants(model, ("comet", "plain"), checked) == {}
    assert (list(checked.variants), list(checked.failures)) == (["plain"], ["comet"])
    assert "differs from that of plain by " in checked.failures["comet"]


def run_with_failures(rank: int, world_size: int, words: list[str]) -> None:
    """The plain path fails with 64 tokens; rank 1 meets a deadline in the timed rounds with 32 of them."""
    call, calls = SymmetricPath.__call__, []

    def plain(routed: RoutedTokens, *rest: Any) -> Tensor:
        if len(routed.tokens) == 64:
            raise RuntimeError("out of memory")
        return plain_experts(routed, *rest)

    def meets_deadline(path: SymmetricPath, routed: RoutedTokens, *rest: Any) -> Tensor:
        calls.append(len(routed.tokens))
        if rank == 1 and calls.count(32) == 2 * CHECKED_STEPS + 1:
            path.workspace.fault[:6] = torch.tensor([1, 2, 0, 17, 41, 40])
        return call(path, routed, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("comet.layer.paths.plain_experts", plain)
        patch.setattr(SymmetricPath, "__call__", meets_deadline)
        run_on_rank(rank, world_size, "train", words)


def test_what_fails_is_a_row(tmp_path: Path) -> None:
    words = [*WORDS, "--out", str(tmp_path), "--tokens", "64,32,96"]
    run_ranks(run_with_failures, 2, words)
    found = json.loads((tmp_path / "bench_train.json").read_text())
    first, second, third = found["rows"]
    assert (
        "RuntimeError: out of memory" in first["failures"]["plain"]
    )  # this rank's, or that of the one that failed before it
    assert (first["x_plain"], first.get("loss_error")) == (None, None)
    assert min(first["comet_ms"], first["rest_ms"]) > 0
    assert "point" in second["failures"]
    assert not [name for name in second if name.endswith("_ms")]
    assert third["failures"] == {}
    assert third["tokens_s"] == pytest.approx(2 * 96 / third["comet_ms"] * 1e3)
    assert third["x_plain"] == pytest.approx(third["plain_ms"] / third["comet_ms"])
    assert third["gradient_error"] < 1e-4
    assert found["geometric_mean"]["x_plain"] == pytest.approx(third["x_plain"])
