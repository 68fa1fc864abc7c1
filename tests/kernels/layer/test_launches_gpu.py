"""All launches in CUDA C++: bit for bit what their Triton twins compute, for ranks of a group emulated on one GPU."""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from activation_cases import ACTIVATIONS
from emulated_cases import CASES, FP8, FP8_CASES, SPLITS, draw_case, edges
from emulated_faults import LAUNCHES, SENDING, check_alone, check_failed
from emulated_layer import EmulatedCase, EmulatedRanks, Found
from kinds import Kind

from comet.kernels.runtime.activation import Activation

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
GPT_OSS = Activation("clamped_swiglu", limit=1.0)
EVENTS = EmulatedCase("events", 2, 1, (700, 300), 8, 2, 1152, 208, routing="first_half", num_panels=3)
TWO = CASES[2]
BIASED = [
    *(replace(TWO, activation=activation) for activation in ACTIVATIONS),
    replace(TWO, name="float16", num_tokens=(400, 300), dtype=torch.float16),
    replace(TWO, name="odd widths", num_experts=64, top_k=8, hidden_size=336, ffn_size=208, num_panels=1),
    replace(TWO, name="256 +- 15 rows of an expert", num_tokens=(1024, 1024), num_experts=16, top_k=2, ffn_size=272),
    replace(TWO, name="one rank, split", ep=1, num_tokens=(700,), num_panels=1, comm_blocks=4),
    replace(TWO, name="block FP8", fp8=True),
    replace(FP8, name="half a tile outside", num_tokens=(600, 500), hidden_size=640, ffn_size=384, num_panels=2),
    replace(FP8, name="float32", num_tokens=(300, 80), hidden_size=256, dtype=torch.float32),
    replace(FP8, name="few rows of an expert, split", num_tokens=(90, 60), num_experts=16, comm_blocks=4),
]


def assert_equal(found: Found, wanted: Found, what: object, close: dict[str, float] | None = None) -> None:
    for name, tensors in wanted.items():
        for rank, (mine, other) in enumerate(zip(found[name], tensors, strict=True)):
            last = (close or {}).get(name, 0.0)
            said = f"{name} of rank {rank} of {what}: "
            torch.testing.assert_close(mine, other, rtol=last, atol=last, msg=said.__add__)


def check(case: EmulatedCase) -> None:
    """Both implementations have the same bits, and are right."""
    ranks = EmulatedRanks(case, GPU)
    found, twin = ranks.results("cuda"), EmulatedRanks(case, GPU).results("triton")
    assert_equal(found, twin, case)
    ranks.check(found)


@pytest.mark.parametrize("case", [*CASES, *FP8_CASES], ids=lambda case: f"{case.name}{' in FP8' * case.fp8}")
def test_equals_its_twin(case: EmulatedCase) -> None:
    check(case)


@pytest.mark.parametrize("top_k", range(1, 9))
def test_experts_with_rows_around_the_heights_of_pieces(top_k: int) -> None:
    check(edges(top_k))


@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "block FP8"])
def test_random_cases(fp8: bool) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(12):
        check(replace(draw_case(draw, seed + number, fp8=fp8), backward=draw.random() < 0.7))


@pytest.mark.parametrize("comm_blocks", [1, 4, 16, 1000])
@pytest.mark.parametrize("case", SPLITS)
def test_blocks_that_communicate_at_first_change_no_bit(case: EmulatedCase, comm_blocks: int) -> None:
    """This holds, too, if all blocks communicate first or, in layer 1, all but two."""
    split = EmulatedRanks(replace(case, comm_blocks=comm_blocks), GPU).results("cuda")
    assert_equal(split, EmulatedRanks(case, GPU).results("cuda"), comm_blocks)
    assert_equal(split, EmulatedRanks(replace(case, comm_blocks=comm_blocks), GPU).results("triton"), comm_blocks)


@pytest.mark.parametrize("case", BIASED, ids=lambda case: f"{case.name}, {case.activation.name}")
def test_biases_are_those_of_the_twin(case: EmulatedCase) -> None:
    """Both add them to finished sums in float32, so gate and up have the same bits; of some activations hidden may be
    off by its last one, and then so is what follows from it.
    """
    case = replace(case, bias=case.dtype, backward=False)
    found, twin = (EmulatedRanks(case, GPU).results(kind) for kind in ("cuda", "triton"))
    exact = case.activation.name in ("swiglu", "clamped_swiglu")
    last = {} if exact else {"hidden": torch.finfo(case.dtype).eps, "output": 4 * torch.finfo(case.dtype).eps}
    assert_equal(found, twin, case, last)
    plain = EmulatedRanks(replace(case, bias=None), GPU).results("cuda")
    assert not torch.equal(found["output"][0], plain["output"][0]), "biases count"


@pytest.mark.parametrize("apart", [{0}, {1, 3}])
def test_ranks_may_differ_in_the_launch_of_hiddens_gradient(apart: set[int]) -> None:
    case = EmulatedCase("mixed", 4, 1, (500, 90, 0, 710), 16, 4, 512, 256)
    assert_equal(EmulatedRanks(case, GPU).results("cuda", apart=apart), EmulatedRanks(case, GPU).results("cuda"), apart)


@pytest.mark.parametrize("case", [TWO, FP8], ids=["16 bits", "block FP8"])
def test_layer_1_may_be_in_triton_behind_layer_0_in_cuda(case: EmulatedCase) -> None:
    """Layers with few tokens mix the two so. CUDA C++ leaves NaN in rows of no expert."""
    mixed, twin = EmulatedRanks(case, GPU).results("cuda", "triton"), EmulatedRanks(case, GPU).results("triton")
    assert_equal(mixed, twin, case)


@pytest.mark.parametrize(
    ("kind", "fp8", "comm_blocks"), [*product(["cuda", "triton"], [False, True], [0]), ("cuda", False, 4)]
)
def test_events(kind: Kind, fp8: bool, comm_blocks: int) -> None:
    """Recording or repeating changes no bit, and every work item is recorded."""
    case = replace(EVENTS, fp8=fp8, ffn_size=384 if fp8 else 208, comm_blocks=comm_blocks)
    silent, recorded = (EmulatedRanks(case, GPU, record=record).results(kind) for record in (False, True))
    assert_equal(recorded, silent, kind)


@pytest.mark.parametrize("kind", ["cuda", "triton"])
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_rank_that_never_comes_is_named(name: str, kind: Kind) -> None:
    """All spins of all blocks give up at nearly the same time."""
    case = EmulatedCase("deadline", 2, 1, (900, 200), 8, 4, 768, 128, num_panels=3)
    check_alone(name, case, "cuda", kind, timeout_s=0.02, times=10)


@pytest.mark.parametrize("kind", ["cuda", "triton"])
@pytest.mark.parametrize("name", SENDING)
def test_a_rank_that_failed_sends_nothing(name: str, kind: Kind) -> None:
    case = EmulatedCase("failed", 4, 1, (900, 200, 0, 300), 8, 4, 768, 128, num_panels=3)
    check_failed(name, case, "cuda", kind)
