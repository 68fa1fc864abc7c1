"""A shared expert within decode steps: cut over every layout of ranks, all ranks' parts add up to the whole."""

import copy

import pytest
import torch
from decode_cases import DecodeCase
from shared_cases import SharedStep, layouts
from torch import nn

from comet.config import MAX_TOP_K
from comet.decode import SharedMatrices, SharedSlots, joins_step, matrices_of, shared_columns, warp_decode_torch
from comet.integrations.hf.modules import InDecodeSteps
from comet.layer.shared_expert import SharedExpert
from comet.layout import ExpertLayout

CASE = DecodeCase(name="shared", T=5, K=2, E=4, D=32, F=64, routing="masked", seed=7)
LAYOUTS = [(1, 1), (4, 1), (1, 4), (2, 2), (1, 2)]


def in_decode_steps(shared: SharedExpert, decode_tokens: int) -> InDecodeSteps:
    layout = ExpertLayout(num_experts=1, top_k=1, ep=1, tp=1, rank=0)
    return InDecodeSteps(shared, decode_tokens, SharedSlots(layout, 1, shared, matrices_of))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize(("ep", "tp"), LAYOUTS)
@torch.no_grad()
def test_parts_of_all_ranks_add_up(ep: int, tp: int, times: int, gated: bool) -> None:
    step = SharedStep.make(CASE, torch.float64, "cpu", times=times, gated=gated)
    total = torch.zeros_like(step.inputs.tokens)
    for layout in layouts(CASE, ep, tp):
        slots = step.slots(layout)
        total += warp_decode_torch(*step.rank_inputs(slots))
        assert slots.columns == -(-times * tp // (ep * tp))
    torch.testing.assert_close(total, step.exact(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("ep", "tp", "top_k", "sizes", "columns"),
    [
        (2, 2, 2, (32, 64), 1),  # the example of the docstring
        (1, 1, 2, (32, 64), 2),
        (1, 1, 2, (32, 0), 0),
        (1, 1, 2, (32, 48), 0),
        (1, 2, 2, (32, 48), 2),  # three pieces of 16 for two ranks
        (1, 1, MAX_TOP_K, (32, 32), 0),
    ],
)
def test_columns(ep: int, tp: int, top_k: int, sizes: tuple[int, int], columns: int) -> None:
    layout = ExpertLayout(num_experts=64, top_k=top_k, ep=ep, tp=tp, rank=0)
    assert shared_columns(layout, *sizes) == columns


def test_a_gradient_or_many_tokens_leave_the_shared_expert_to_itself() -> None:
    shared = SharedExpert(32, 64)
    standing = in_decode_steps(shared, 3)
    few, many = torch.randn(3, 32), torch.randn(4, 32)
    assert torch.equal(standing(few), shared(few))
    with torch.no_grad():
        assert standing(few).shape == ()
        assert standing(few) == 0
        assert torch.equal(standing(many), shared(many))
        assert joins_step(torch.empty(1, 3, 32), 3)
        assert not joins_step(torch.empty(2, 2, 32), 3)


def test_what_stands_in_for_a_module_shows_its_weights_and_nothing_else() -> None:
    shared = SharedExpert(32, 64)
    standing, tokens = in_decode_steps(shared, 3), torch.randn(4, 32)
    assert list(standing.state_dict()) == list(shared.state_dict())
    assert standing.activation is shared.activation, "an attribute of its own module"
    with pytest.raises(AttributeError, match="has no attribute 'w3'"):
        _ = standing.w3
    copied = copy.deepcopy(standing)
    standing.w2.data.zero_()
    assert not shared(tokens).any()
    assert copied(tokens).any(), "a copy computes with its own"
    standing.w2 = nn.Parameter(torch.ones(32, 64))
    assert shared.w2 is standing.w2
    standing.double()
    assert shared.w1.dtype == torch.float64


def test_weights_loaded_in_inference_mode() -> None:
    with torch.inference_mode():
        gate, up, down = torch.randn(16, 16), torch.randn(16, 16), torch.randn(16, 16)
        layout = ExpertLayout(num_experts=1, top_k=1, ep=1, tp=1, rank=0)
        slots = SharedSlots(layout, 1, nn.Identity(), lambda _: SharedMatrices(gate, up, down))
        w1, w2 = nn.Parameter(torch.randn(1, 32, 16)), nn.Parameter(torch.randn(1, 16, 16))
        joined = slots.weights(w1, w2)
        assert torch.equal(joined.w1[1], torch.cat([gate, up]))
        assert torch.equal(joined.w2[1], down)


@torch.no_grad()
def test_pieces_are_renewed_before_a_replay_where_the_shared_expert_was_written_to() -> None:
    step = SharedStep.make(CASE, torch.float32, "cpu", times=2)
    (layout,) = layouts(CASE, 1, 1)
    slots, parts = step.slots(layout), step.parts(layout)
    slots.refresh()  # nothing was joined yet
    joined = slots.weights(*parts)
    other = copy.deepcopy({"slots": slots, "shared": step.shared, "parts": parts})
    for draw in range(6):
        matrix = (step.shared.w1, step.shared.w2)[draw % 2]
        matrix.view(-1)[draw::7].normal_(generator=torch.Generator().manual_seed(draw))
        slots.refresh()
        wanted = step.slots(layout).weights(*step.parts(layout))
        assert torch.equal(joined.w1, wanted.w1), f"draw {draw}"
        assert torch.equal(joined.w2, wanted.w2), f"draw {draw}"
        before = joined.w1._version
        slots.refresh()
        slots.clock.proceed()
        assert slots.weights(*parts) is joined
        assert joined.w1._version == before, "a step behind the same prompt, so nothing is copied"
        matrix.data.mul_(2)
        slots.refresh()
        assert joined.w1._version == before, "torch does not count this"
        slots.clock.start()
        slots.refresh()
        assert joined.w1._version > before, "a prompt came"
    other["shared"].w1.zero_()
    other["slots"].refresh()
    assert not other["slots"]._joined.w1[-2:].any(), "a copied layer looks at its own shared expert"
    assert joined.w1[-2:].any()


@torch.no_grad()
def test_other_tensors_in_the_place_of_the_shared_expert_s_are_seen() -> None:
    step = SharedStep.make(CASE, torch.float32, "cpu")
    (layout,) = layouts(CASE, 1, 1)
    slots, parts = step.slots(layout), step.parts(layout)
    slots.weights(*parts)
    step.shared.load_state_dict(
        {name: torch.ones_like(each) for name, each in step.shared.state_dict().items()}, assign=True
    )
    assert (slots.weights(*parts).w2[-1] == 1).all()


@torch.no_grad()
def test_a_graph_finds_the_nothing_of_its_dtype_whatever_came_after(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = in_decode_steps(SharedExpert(32, 64), 4)
    first = shared(torch.ones(1, 32))
    assert shared(torch.ones(1, 32).bfloat16()).dtype == torch.bfloat16
    assert shared(torch.ones(1, 32)) is first
    monkeypatch.setattr("comet.integrations.hf.modules.is_capturing", lambda device: True)
    made = shared(torch.ones(1, 32).half())
    assert shared(torch.ones(1, 32).half()) is not made, "what a capture makes is zero at a replay only"


def test_the_step_that_moves_weights_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comet.decode.shared.is_capturing", lambda device: True)
    step = SharedStep.make(CASE, torch.float32, "cpu")
    (layout,) = layouts(CASE, 1, 1)
    with pytest.raises(ValueError, match="a decode step must run once before a CUDA graph of it is captured"):
        step.slots(layout).weights(*step.parts(layout))
