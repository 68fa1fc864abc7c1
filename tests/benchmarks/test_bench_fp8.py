"""Block FP8 as a variant of the layer benchmark, and the limit it is held to."""

from __future__ import annotations

import math

import pytest
import torch
from bench_cases import CPU
from ranks import run_ranks
from torch import Tensor

from comet.config import MoEConfig, ParallelConfig
from comet.layer.routed_experts import SymmetricPath
from comet.quantization.formats import quantize_fp8

from lib.moe.fp8 import deviation, noise, quantize_layer
from lib.moe.layer import Settings, make_inputs, open_layer
from lib.moe.report import COLUMNS
from lib.ranks import Ranks
from suites.moe import checked_variants, parse

VARIANTS = ("comet", "plain", "comet_fp8", "comet_fp8_graph")
CONFIG = MoEConfig(num_experts=4, top_k=2, hidden_size=256, ffn_size=128)


def checked(rank: int, world_size: int, config: MoEConfig) -> tuple[list[str], dict[str, float | None], dict[str, str]]:
    import torch.distributed as dist

    ranks = Ranks(rank, CPU, dist.group.WORLD)
    settings = Settings(parallel=ParallelConfig(ep=world_size), max_tokens=48, variants=VARIANTS)
    failures: dict[str, str] = {}
    with open_layer(config, settings, ranks) as layer:
        inputs = make_inputs(config, 40, settings, ranks)
        usable, errors = checked_variants(layer, inputs, settings, ranks, failures)
    return sorted(usable), errors, failures


def test_it_is_compared_with_the_plain_path() -> None:
    for usable, errors, failures in run_ranks(checked, 2, CONFIG):
        assert usable == ["comet", "comet_fp8", "plain"]
        assert not failures
        assert errors["comet_fp8"] is not None
        assert 0.02 < errors["comet_fp8"] < 0.12


def test_widths_that_are_no_whole_blocks_have_no_such_variant() -> None:
    for usable, _, failures in run_ranks(checked, 2, MoEConfig(num_experts=4, top_k=2, hidden_size=64, ffn_size=128)):
        assert usable == ["comet", "plain"]
        assert not failures


def make_weights(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, 256, 384), (2, 384, 128), (64, 384)
    w1, w2, tokens = (torch.randn(shape, generator=generator) / math.sqrt(shape[-1]) for shape in shapes)
    return w1, w2, tokens


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_that_of_three_roundings_to_e4m3(seed: int) -> None:
    """A rounding is off by at most 2^-4, on average by 2^-4 / sqrt(3) of a number that is at most twice as large."""
    w1, w2, tokens = make_weights(seed)
    found = noise(tokens, (w1[0], w2[0]), (quantize_fp8(w1), quantize_fp8(w2)))
    one = 2**-4 / math.sqrt(3)
    assert one < found < 3 * one, f"seed {seed}"


def test_one_wrong_row_or_a_wrong_scale_is_noticed() -> None:
    generator = torch.Generator().manual_seed(1)
    wanted = torch.randn(2000, 256, generator=generator)
    output = wanted + 0.06 * torch.randn(2000, 256, generator=generator)
    assert deviation(output, wanted, 0.06)[0] == ""
    assert "differs by" in deviation(output * 1.06, wanted, 0.06)[0]
    output[7] = output[8]
    failure, rms = deviation(output, wanted, 0.06)
    assert failure.startswith("differs by 0.0")
    assert rms < 1.25 * 0.06, "seen by its largest element only"
    assert deviation(wanted[:0], wanted[:0], 0.06) == ("", 0.0)


def test_quantised_layers_are_those_of_the_quantiser() -> None:
    w1, w2, _ = make_weights(5)
    layer = quantize_layer(SymmetricPath.__new__(SymmetricPath), w1, w2)
    for found, weight in ((layer.w1, w1), (layer.w2, w2)):
        wanted = quantize_fp8(weight)
        assert torch.equal(found.elements.view(torch.uint8), wanted.elements.view(torch.uint8))
        assert torch.equal(found.scales, wanted.scales)


def test_it_has_columns_and_is_measured_where_it_is_asked_for() -> None:
    assert {"comet_fp8_ms", "comet_fp8_graph_ms", "error_fp8"} <= set(COLUMNS)
    assert not {"comet_fp8"} & set(parse([])[1].variants)
    assert parse(["--variants", "plain,comet_fp8"])[1].variants == ("plain", "comet_fp8")
