"""The integration with Megatron-core where it is not needed: routing, configurations, names of weights."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_cases import FIELDS
from torch.nn.functional import gelu, relu

from comet.capabilities import missing
from comet.config import MoEConfig, ParallelConfig
from comet.errors import UnavailableError
from comet.integrations.megatron import from_sequential, moe_config, with_comet
from comet.integrations.megatron.layer import MEGATRON, STORED, check_config, check_ranks, check_version, top_k_of
from comet.kernels.runtime.activation import Activation
from comet.layer.group import ExpertGroup, make_expert_group

DEFAULTS: dict[str, Any] = dict(  # fields of a TransformerConfig
    moe_token_dispatcher_type="alltoall",
    cuda_graph_impl="none",
    bf16=False,
    fp16=False,
    params_dtype=torch.float32,
)


def config(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**DEFAULTS, **FIELDS, **changes})


@pytest.fixture
def group() -> ExpertGroup:
    return make_expert_group(moe_config(config()), ParallelConfig(), max_tokens=8, dtype=torch.float32, device="cpu")


def test_routing_as_documented() -> None:
    probs = torch.tensor([[0.0, 0.3, 0.7], [0.0, 0.0, 0.6]], requires_grad=True)
    ids, weights = top_k_of(probs, probs > 0, 2)
    assert ids.dtype == torch.int32
    assert ids[0].tolist() == [2, 1]
    assert ids[1].tolist() == [2, -1]
    assert torch.equal(weights, torch.tensor([[0.7, 0.3], [0.6, 0.0]]))
    weights.backward(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert probs.grad is not None
    assert probs.grad.tolist() == [[0.0, 2.0, 1.0], [0.0, 0.0, 3.0]], "a dropped slot has no gradient"


def test_an_expert_of_weight_zero_stays_chosen() -> None:
    ids, weights = top_k_of(torch.tensor([[0.9, 0.0, 0.1]]).double(), torch.tensor([[True, True, False]]), 2)
    assert ids.tolist() == [[0, 1]]
    assert weights.dtype == torch.float32


def test_ids_instead_of_a_map_are_refused() -> None:
    with pytest.raises(ValueError, match=r"routing_map of dtype and shape .*int64.* must be of .*bool"):
        top_k_of(torch.ones(1, 3), torch.tensor([[0, 1]]), 2)


def test_the_shape_of_the_layers() -> None:
    assert moe_config(config(), max_imbalance=1.5) == MoEConfig(
        hidden_size=32, ffn_size=48, num_experts=4, top_k=2, balance="none", max_imbalance=1.5
    )
    assert moe_config(config(moe_ffn_hidden_size=None)).ffn_size == 64
    biased = moe_config(config(activation_func=relu, add_bias_linear=True))
    assert (biased.activation, biased.expert_bias) == (Activation("reglu"), True)
    for field in (dict(num_moe_experts=None), dict(num_moe_experts=0)):
        with pytest.raises(ValueError, match=r"num_moe_experts=(None|0) must be at least 1"):
            moe_config(config(**field))
    with pytest.raises(ValueError, match="ffn_size=40 must be at least 16 and a multiple of 16"):
        moe_config(config(moe_ffn_hidden_size=40))


@pytest.mark.parametrize("name", sorted(missing(MEGATRON).keys() - {"cuda_graph_impl"}))
def test_what_has_to_be_off(name: str, group: ExpertGroup) -> None:
    for value in (None, False, 0.0):
        check_config(config(**{name: value}), group)
    with pytest.raises(ValueError, match=f"{name}=1.5 must be left out with "):
        check_config(config(**{name: 1.5}), group)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(gated_linear_unit=False), "gated_linear_unit=False must be True: experts have a gate"),
        (dict(activation_func=gelu), "activation_func=gelu must be silu, relu, or fast_gelu"),
        (dict(activation_func_clamp_value=7.0), "activation_func_clamp_value=7.0 must be left out without"),
        (dict(glu_linear_offset=1.0), "glu_linear_offset=1.0 must be left out without activation_func=quick_gelu"),
        (dict(moe_token_dispatcher_type="flex"), "moe_token_dispatcher_type='flex' must be one of"),
        (dict(add_bias_linear=True, use_mup=True), "use_mup=True must be left out with biases of Megatron's experts"),
        (dict(cuda_graph_impl="local"), "cuda_graph_impl='local' must be left out .* 'none' does not"),
        (dict(params_dtype=torch.float16), "dtype=torch.float16 of the model's tokens must be the group's"),
        (dict(fp16=True), "dtype=torch.float16 of the model's tokens must be the group's torch.float32"),
        (dict(bf16=True), "dtype=torch.bfloat16 of the model's tokens must be the group's torch.float32"),
    ],
)
def test_configurations_comet_cannot_take(changes: dict[str, Any], message: str, group: ExpertGroup) -> None:
    check_config(config(), group)
    with pytest.raises(ValueError, match=message):
        check_config(config(**changes), group)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        (dict(ep=[4, 5]), r"ranks=\[4, 5\] of Megatron's ep group must be \[4, 6\], those of Comet's group"),
        (dict(expt_tp=[4, 5]), r"ranks=\[4, 5\] of Megatron's expt_tp group must be \[6, 7\]"),
        (dict(ep=[6]), r"expert_model_parallel_size=1 must be equal to 2: Comet's group has ep=2 and tp=2"),
        (dict(expt_tp=[4, 5, 6, 7]), r"expert_tensor_parallel_size=4 must be equal to 2"),
        (dict(expt_dp=None), "expt_dp of the process groups must be given"),
    ],
)
def test_ranks_of_both_have_to_be_the_same(
    changes: dict[str, Any], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", list)
    mine: Any = SimpleNamespace(world_rank=6, rank=2, parallel=ParallelConfig(ep=2, tp=2))
    groups = SimpleNamespace(**{**dict(ep=[4, 6], expt_tp=[6, 7], expt_dp=[2, 6]), **changes})
    if message is None:
        check_ranks(groups, mine)
        return
    with pytest.raises(ValueError, match=message):
        check_ranks(groups, mine)


def sequential(num_experts: int, prefix: str) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for expert in reversed(range(num_experts)):
        name = f"{prefix}local_experts.{expert}."
        state[f"{name}linear_fc1.weight"] = torch.full((6, 2), 10.0 + expert)
        state[f"{name}linear_fc1._extra_state"] = None
        state[f"{name}linear_fc2.weight"] = torch.full((2, 3), 20.0 + expert)
    return state


def test_weights_of_sequential_experts() -> None:
    rest = {"mlp.router.weight": torch.ones(12, 2), "mlp.shared_experts.linear_fc1._extra_state": None}
    found = from_sequential({**rest, **sequential(12, "mlp.experts."), **sequential(2, "")})
    assert found.keys() == {*rest, *(prefix + name for prefix in ("mlp.experts.", "") for name in STORED[:2])}
    assert found["mlp.experts.linear_fc1.weight"].shape == (12, 6, 2)
    assert found["mlp.experts.linear_fc1.weight"][:, 0, 0].tolist() == [10.0 + expert for expert in range(12)]
    assert found["mlp.experts.linear_fc2.weight"][:, 0, 0].tolist() == [20.0 + expert for expert in range(12)]
    assert from_sequential(found) == found


def test_experts_that_are_not_comets_or_missing() -> None:
    state = sequential(3, "experts.")
    with pytest.raises(ValueError, match=r"local_experts.0.linear_fc3.weight must be one of linear_fc1.weight, "):
        from_sequential({**state, "experts.local_experts.0.linear_fc3.weight": torch.ones(6)})
    del state["experts.local_experts.1.linear_fc2.weight"]
    with pytest.raises(ValueError, match=r"experts.linear_fc2.weight lacks the local experts \[1\]"):
        from_sequential(state)


@pytest.mark.parametrize("found", ["0.15.3", "0.20.0", "1.16.0"])
def test_other_versions_are_refused(found: str) -> None:
    with pytest.raises(ValueError, match=rf"^megatron.core.__version__={found} must be 0.16 to 0.19, whose layers"):
        check_version(found)


def test_without_megatron(monkeypatch: pytest.MonkeyPatch, group: ExpertGroup) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)
    spec = SimpleNamespace(submodules=SimpleNamespace(mlp=None))
    with pytest.raises(UnavailableError, match=r"pip install 'comet-moe\[megatron\]'"):
        with_comet(spec, group)
