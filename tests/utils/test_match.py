"""Weights and scales that are not the layer's: every path refuses them by name, or is right."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from every_path import Layer, every_path
from layer_cases import LayerCase, as_strided, full_weights, rank_inputs
from ranks import in_ranks
from tiers import slow
from torch import Tensor
from torch.nn.functional import silu

from comet.decode import LocalRunner
from comet.quantization.formats import FP8, MXFP8, quantize_fp8, quantize_mxfp8
from comet.utils.match import MatchOnce, Sizes

CASE = LayerCase("one rank", 1, 1, (3,), hidden_size=128, ffn_size=128)
BLOCKS = replace(CASE, hidden_size=256)  # several scales in a row and in a column
Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
LESS = 64
# Other weights than the layer's, made of its own. D = F, so that a matrix and its transpose have one shape.
SIZES: dict[str, Change] = {
    "fewer experts": lambda w1, w2: (w1[:3].clone(), w2[:3].clone()),
    "fewer experts of w1": lambda w1, w2: (w1[:3].clone(), w2),
    "fewer experts of w2": lambda w1, w2: (w1, w2[:3].clone()),
    "another F of w1": lambda w1, w2: (w1[:, : -2 * LESS].clone(), w2),
    "another F of w2": lambda w1, w2: (w1, w2[..., :-LESS].clone()),
    "no up rows": lambda w1, w2: (w1.chunk(2, dim=1)[0].clone(), w2),
    "another D": lambda w1, w2: (w1[..., :-LESS].clone(), w2[:, :-LESS].clone()),
    "another D of w1": lambda w1, w2: (w1[..., :-LESS].clone(), w2),
    "another D of w2": lambda w1, w2: (w1, w2[:, :-LESS].clone()),
    "gate and up apart": lambda w1, w2: (w1.unflatten(1, (2, -1)), w2),
    "one matrix": lambda w1, w2: (w1[0].clone(), w2[0].clone()),
}
# Only a path that knows e and F of its layer refuses these.
OTHER_LAYERS: dict[str, Change] = {
    "another F": lambda w1, w2: (w1[:, : -2 * LESS].clone(), w2[..., :-LESS].clone()),
    "more experts": lambda w1, w2: (w1[[0, 1, 2, 3, 0]], w2[[0, 1, 2, 3, 0]]),
}
TYPES: dict[str, Change] = {
    "half": lambda w1, w2: (w1.half(), w2.half()),
    "half of w1": lambda w1, w2: (w1.half(), w2),
    "double of w2": lambda w1, w2: (w1, w2.double()),
    "elsewhere": lambda w1, w2: (w1.to("meta"), w2.to("meta")),
    "w2 elsewhere": lambda w1, w2: (w1, w2.to("meta")),
}
STRIDES: dict[str, Change] = {
    "transposed": lambda w1, w2: (w1, w2.mT),
    "other strides": lambda w1, w2: (w1.mT.contiguous().mT, w2.mT.contiguous().mT),
    "every second column": lambda w1, w2: (as_strided(w1), as_strided(w2)),
}
# Views of scales: the same numbers elsewhere in memory.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda scales: scales.mT.contiguous().mT,
    "a slice of columns": lambda scales: torch.cat([scales, scales.flip(0)], dim=2)[..., : scales.shape[2]],
    "a slice of rows": lambda scales: torch.cat([scales, scales.flip(0)], dim=1)[:, : scales.shape[1]],
    "every second": as_strided,
}
REFUSED, RIGHT = "refused", "right"
NAMES = ("w1", "w2", "elements", "scales", "slots", "the weights", "num_experts=3")


def loop(case: LayerCase, w1: Tensor, w2: Tensor) -> Tensor:
    """The layer in float64, token by token."""
    tokens, ids, weights = rank_inputs(case, 0).routed
    out = tokens.new_zeros(tokens.shape, dtype=torch.float64)
    for token, x in enumerate(tokens.double()):
        for slot, expert in enumerate(ids[token].tolist()):
            if expert < w1.shape[0]:
                gate, up = (w1[expert].double() @ x).chunk(2)
                out[token] += weights[token, slot] * (w2[expert].double() @ (silu(gate) * up))
    return out


def try_all(case: LayerCase, found: dict[str, Layer], w1: Any, w2: Any, exact: Callable[[], Tensor]) -> dict[str, str]:
    """Return, for each path, whether it refuses the weights and names one, or computes the right output."""
    outcome = {}
    for name, layer in found.items():
        try:
            y = layer(rank_inputs(case, 0).tokens, w1, w2)
        except ValueError as refusal:
            words = str(refusal)
            outcome[name] = REFUSED if any(word in words for word in NAMES) else words
            continue
        wanted, limit = exact(), 0.1 if "in FP8" in name or (name, type(w1)) == ("symmetric path", FP8) else 1e-4
        off = float((y - wanted).abs().max() / wanted.abs().max())
        outcome[name] = "right" if off < limit else f"off by {off:.2g} and says nothing"
    return outcome


def check(outcome: dict[str, dict[str, str]], refused: Iterable[str]) -> None:
    """All paths are right, or refuse what is not right for them; they do refuse these changes."""
    assert set(outcome["none"].values()) == {RIGHT}
    for change, paths in outcome.items():
        for path, found in paths.items():
            must = {REFUSED} if change in refused else {REFUSED, RIGHT}
            holds_fewer = change == "fewer experts" and path.startswith("decode")
            assert found in (must | {RIGHT} if holds_fewer else must), f"{change}: {path}: {found}"


@pytest.mark.parametrize("kernels", [False, slow(True)])
@in_ranks(1, interpret="kernels")
def test_plain_weights_are_refused_or_right(rank: int, world_size: int, kernels: bool) -> None:
    w1, w2 = full_weights(CASE)
    found, outcome = every_path(CASE, kernels=kernels), {}
    for change, changed in {"none": lambda *same: same, **SIZES, **OTHER_LAYERS, **TYPES, **STRIDES}.items():
        given = changed(w1.flatten(1, 2), w2)
        outcome[change] = try_all(CASE, found, *given, partial(loop, CASE, *given))
    check(outcome, refused=SIZES | TYPES)
    for change, path in itertools.product(OTHER_LAYERS, ("symmetric path", "reference", "plain")):
        assert outcome[change][path] == REFUSED, change
    for change, path in itertools.product(OTHER_LAYERS, ("own tokens", "replicated")):
        assert kernels or outcome[change][path] == REFUSED, change
    for change, path in itertools.product(STRIDES, ("symmetric path", "fused", "plain", "reference")):
        assert outcome[change][path] == RIGHT, f"{path} copies what kernels find by address"


def quantised(kind: type, w1: Tensor, w2: Tensor) -> tuple[Any, Any]:
    """Both weights; scales are powers of two apart, so that one in the place of another shows."""
    generator = torch.Generator().manual_seed(5)
    weights = []
    for weight in (w1, w2):
        values = quantize_fp8(weight) if kind is FP8 else quantize_mxfp8(weight)
        steps = torch.randint(-2, 3, values.scales.shape, generator=generator)
        scales = values.scales * 2.0**steps if kind is FP8 else (values.scales + steps).byte()
        weights.append(replace(values, scales=scales))
    return tuple(weights)


@pytest.mark.parametrize(("kind", "kernels"), [(FP8, False), (MXFP8, False), slow(FP8, True), slow(MXFP8, True)])
@in_ranks(1, interpret="kernels")
def test_quantised_weights_are_refused_or_right(rank: int, world_size: int, kind: type, kernels: bool) -> None:
    case = BLOCKS if kind is FP8 else CASE
    w1, w2 = full_weights(case)
    right = quantised(kind, w1.flatten(1, 2), w2)
    given = {"none": right}
    for change, changed in {**SIZES, **OTHER_LAYERS}.items():
        given[change] = quantised(kind, *changed(w1.flatten(1, 2), w2))
    for view, seen in VIEWS.items():
        given[f"scales: {view}"] = tuple(replace(weight, scales=seen(weight.scales)) for weight in right)
    for view in ("transposed", "every second"):
        given[f"elements: {view}"] = tuple(replace(weight, elements=VIEWS[view](weight.elements)) for weight in right)
    found, outcome = every_path(case, kernels=kernels, kind=kind), {}
    for change, weights in given.items():
        exact = partial(loop, case, *(weight.dequantize() for weight in weights))
        outcome[change] = try_all(case, found, *weights, exact)
    check(outcome, refused=SIZES)
    for change, paths in outcome.items():
        if change != "none" and kind is FP8:
            assert paths["symmetric path"] == REFUSED, change


def test_the_worked_example() -> None:
    sizes = Sizes()
    sizes.match("w2", torch.empty(4, 256, 320), "e D F")
    assert sizes.values == {"e": 4, "D": 256, "F": 320}
    sizes.match("w1", torch.empty(4, 640, 256), "e 2F D")
    sizes.match("scales", torch.empty(4, 2, 3), "e D/128 F/128")
    with pytest.raises(ValueError) as refused:
        sizes.match("w1", torch.empty(4, 320, 256), "e 2F D")
    assert (
        str(refused.value)
        == "w1 of shape (4, 320, 256) must be (e, 2F, D) = (4, 640, 256) with e=4, F=320, D=256 of w2"
    )


def test_sizes_that_are_known_and_sizes_before_them() -> None:
    sizes = Sizes(K=(32, "the last block"))
    sizes.match("elements", torch.empty(3, 5, 7, 32), "... N K")
    sizes.match("scales", torch.empty(3, 5, 7, 1), "... N K/32")
    with pytest.raises(
        ValueError, match=r"scales of shape \(3, 7, 1\) must be \(..., N, K/32\) = \(3, 5, 7, 1\) with N=7 of"
    ):
        sizes.match("scales", torch.empty(3, 7, 1), "... N K/32")
    with pytest.raises(ValueError, match=r"odd of shape \(3,\) must be \(2A\)$"):
        sizes.match("odd", torch.empty(3), "2A")
    assert "A" not in sizes.values, "what was refused binds nothing"


def test_a_match_runs_once_for_tensors_that_are_alike() -> None:
    seen: list[Tensor] = []
    match = MatchOnce(lambda *tensors: seen.extend(tensors))
    for tensor in (torch.zeros(2, 2), torch.ones(2, 2), torch.ones(2, 3), torch.ones(3, 2).mT, torch.ones(2, 3).half()):
        match(tensor)
    assert [tuple(tensor.shape) for tensor in seen] == [(2, 2), (2, 3), (2, 3), (2, 3)]
    refuse = MatchOnce(partial(Sizes(T=(3, "the layer")).match, "tokens", spec="T"))
    for _ in range(2):
        with pytest.raises(ValueError, match="must be"):
            refuse(torch.zeros(2))


def test_a_runner_of_layers_with_other_numbers_of_experts() -> None:
    runner, wider = LocalRunner(CASE.top_k), replace(CASE, num_experts=6)
    for case in (CASE, wider, CASE):
        inputs, (w1, w2) = rank_inputs(case, 0), full_weights(case)
        weights = (w1.flatten(1, 2), w2)
        y = runner(inputs.routed, *weights)
        assert torch.allclose(y.double(), loop(case, *weights), atol=1e-3)
