"""Comet inside Megatron-core on CPU ranks, against Megatron's own experts and dispatch.

Skipped without it; ``test_megatron_parts`` checks what does not need it. Passed with Megatron-core 0.16.1 and 0.19.2.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cases import (
    BATCH,
    SEQUENCE,
    Size,
    gradients,
    make_config,
    make_gpt,
    make_group,
    make_layer,
    save_and_load,
    start,
    stock_spec,
    train_beside_megatron,
    twins,
)
from pages import program
from ranks import in_ranks, run_ranks
from tiers import slow
from torch import Tensor
from torch.nn.functional import relu

from comet.config import ParallelConfig
from comet.integrations.megatron import CometMoELayer, from_sequential, moe_config, with_comet
from comet.integrations.megatron.layer import CometExperts
from comet.layer.group import make_expert_group
from comet.reference.plain import gather_weights

pytest.importorskip("megatron.core", reason="needs pip install 'comet-moe[megatron]'")
DEEPSEEK = dict(
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_num_groups=2,
    moe_router_group_topk=1,
    moe_router_topk_scaling_factor=2.5,
    moe_router_load_balancing_type="seq_aux_loss",
    moe_router_dtype="fp64",
)
CAPACITY = dict(moe_expert_capacity_factor=0.5, moe_token_dispatcher_type="alltoall")
RECOMPUTE = dict(recompute_granularity="selective", recompute_modules=["moe"])
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softmax": ({}, {}),
    "deepseek": (DEEPSEEK, {}),
    "dropped by capacity": (CAPACITY, {}),
    "recompute": (RECOMPUTE, {}),
    "no shared expert": (dict(moe_shared_expert_intermediate_size=None), {}),
    "all experts": (dict(moe_router_topk=4), {}),
    "an expert without tokens": ({}, {}),
    "padding": ({}, {}),
    "plain path": ({}, dict(path="plain")),
    "ReGLU": (dict(activation_func=relu), {}),
}


def cases(ep: int, expert_tp: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """All cases, with Megatron's own activations; with EP alone its experts train biases in 0.16.1."""
    from megatron.core.activations import fast_gelu, quick_gelu

    bias = dict(add_bias_linear=ep > expert_tp == 1, moe_shared_expert_intermediate_size=None)
    gpt_oss = dict(activation_func=quick_gelu, glu_linear_offset=1.0, activation_func_clamp_value=0.7)
    return CASES | {"GeGLU": (dict(activation_func=fast_gelu), {}), "gpt-oss": ({**gpt_oss, **bias}, {})}


def assert_near(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal but for some roundings in float32 of the largest value."""
    assert actual.shape == expected.shape, what
    error, largest = float((actual - expected).abs().max()), float(expected.abs().max())
    assert error <= 5e-6 * largest, f"{what}: error {error} of values up to {largest}"


LAYOUTS = [(2, 1, 1, 1), slow(1, 2, 1, None), slow(2, 1, 2, None), slow(2, 2, 2, None)]


@pytest.mark.parametrize(("ep", "expert_tp", "tp", "node_size"), LAYOUTS)
@in_ranks("ep expert_tp", timeout=300)
def test_layer(rank: int, world_size: int, ep: int, expert_tp: int, tp: int, node_size: int | None) -> None:
    """Each case of one layout: output, gradient of the input, and of all parameters.

    Under ``tp`` the rest of the model is tensor-parallel, too, and ranks have parts of the sequence.
    """
    start(ep, expert_tp, tp)
    group = make_group(make_config(moe_router_topk=4), node_size)
    for name, (fields, settings) in cases(ep, expert_tp).items():
        stock, ours = twins(make_layer, make_config(**fields), group, rank, **settings)
        torch.manual_seed(rank)
        x, mask = torch.randn(SEQUENCE, BATCH, 32), None
        if name == "an expert without tokens":
            x = x.abs()
            for layer in (stock, ours):
                layer.router.weight.data[3] = -3.0
        if name == "padding":
            mask = torch.rand(BATCH, SEQUENCE) < 0.4
        results = []
        for layer in (stock, ours):
            inputs = x.clone().requires_grad_()
            output, bias = layer(inputs, padding_mask=mask)
            assert bias is None
            output.square().mean().backward()
            results.append((output.detach(), inputs.grad, gradients(layer)))
        (output, grad, grads), (our_output, our_grad, our_grads) = results
        assert_near(our_output, output, f"{name}: output")
        assert_near(our_grad, grad, f"{name}: gradient of the input")
        expected = from_sequential(grads)
        assert expected.keys() == our_grads.keys()
        for key, value in expected.items():
            assert_near(our_grads[key], value, f"{name}: gradient of {key}")
        if name == "an expert without tokens" and rank == world_size - 1:
            assert not our_grads["experts.linear_fc1.weight"][-1].any()
    group.close()


@pytest.mark.slow
def test_checkpoints(tmp_path: Path) -> None:
    fields = dict(add_bias_linear=True, moe_shared_expert_intermediate_size=None)
    run_ranks(save_and_load, 2, tmp_path, "cpu", fields, timeout=300)


@pytest.mark.slow
@in_ranks(2, timeout=300)
def test_initial_weights_do_not_depend_on_the_layout(rank: int, world_size: int) -> None:
    """Compare the weights of two layers, gathered in each layout, and what Megatron reads off the parameters."""
    alone: dict[str, Tensor] = {}
    for ep, expert_tp in ((1, 1), (2, 1), (1, 2)):
        start(ep, expert_tp)
        config = make_config()
        group = make_group(config)
        model = make_gpt(config, with_comet(stock_spec(config), group))
        for name, parameter in model.named_parameters():
            is_expert = ".mlp.experts." in name
            assert getattr(parameter, "allreduce", True) is not (is_expert and ep * expert_tp > 1), name
            assert not is_expert or parameter.tensor_model_parallel, name
        whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
        for name, experts in model.named_modules() if ep * expert_tp > 1 else ():
            if isinstance(experts, CometExperts):
                names = f"{name}.linear_fc1.weight", f"{name}.linear_fc2.weight"
                parts = (whole[each] for each in names)
                whole |= dict(zip(names, gather_weights(*parts, experts.layout, dist.group.WORLD), strict=True))
        alone = alone or whole
        for name, value in alone.items():
            assert torch.equal(whole[name], value), f"{name} in ep {ep}, tp {expert_tp}"
        group.close()
    w1 = torch.cat([alone[f"decoder.layers.{layer}.mlp.experts.linear_fc1.weight"] for layer in range(2)])
    assert w1.std().item() == pytest.approx(0.3, rel=0.05)
    assert len({float(expert.sum()) for expert in w1}) == 8, "experts of all layers differ"


@pytest.mark.slow
@in_ranks(1, timeout=300)
def test_specs(rank: int, world_size: int) -> None:
    """Specs have a block with a dense layer, and process groups other than Megatron's global ones."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    start(1)
    config = make_config(moe_layer_freq=[0, 1])
    group = make_group(config)
    stock = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    first, second = make_gpt(config, with_comet(stock, group)).decoder.layers
    assert not isinstance(first.mlp, CometMoELayer)
    assert isinstance(second.mlp, CometMoELayer)
    assert not any(isinstance(layer.mlp, CometMoELayer) for layer in make_gpt(config, stock).decoder.layers)

    process_groups, spec = get_default_pg_collection(), stock_spec(config)
    parallel_state.destroy_model_parallel()
    layer = make_layer(config, with_comet(spec, group, process_groups=process_groups))
    assert layer(torch.ones(SEQUENCE, BATCH, 32))[0].shape == (SEQUENCE, BATCH, 32)
    group.close()


AFTER_THE_SNIPPET = """
import sys

sys.path.insert(0, sys.argv[1])
from megatron.core.transformer.moe import moe_utils
from megatron_cases import use_cpu

moe_utils.te_general_gemm = None
torch.compiler.set_stance("force_eager")
use_cpu()
ids = torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
inputs = (ids, torch.arange(16).expand(3, -1), torch.ones(1, 1, 16, 16).triu(1).bool())
losses = [each.eval()(*inputs, labels=ids) for each in (stock, model)]
torch.testing.assert_close(losses[1], losses[0])
losses[1].mean().backward()
assert all(layer.mlp.experts.linear_fc1.weight.grad.any() for layer in model.decoder.layers)
group.workspace.check()
group.close()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_program_of_the_page(tmp_path: Path) -> None:
    """Run the program on two CPU ranks, then its result, as far as Megatron can without a GPU."""
    root, script = Path(__file__).parents[3], tmp_path / "train.py"
    script.write_text(program("docs/howto/megatron.md") + AFTER_THE_SNIPPET)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), str(root / "tests/support/models")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@in_ranks(2, timeout=300)
def test_refusals_name_field_value_and_rule(rank: int, world_size: int) -> None:
    from megatron.core.activations import quick_gelu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.quantization.quant_config import RecipeConfig

    start(2)
    config = make_config()
    group = make_group(config)
    settings: dict[str, Any] = dict(max_tokens=8, dtype=torch.float32, device="cpu")
    one = make_expert_group(moe_config(config), ParallelConfig(), **settings)

    def build(group: Any = group, **fields: Any) -> Any:
        changed = make_config(**fields)
        return make_layer(changed, with_comet(stock_spec(changed), group))

    layer, whole = build(), build()
    whole.attn_tp_group = dist.group.WORLD
    tokens, routing = torch.zeros(SEQUENCE, BATCH, 32), (torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 2))
    for call, message in (
        (lambda: build(one), "expert_model_parallel_size=2 must be equal to 1: Comet's group has ep=1 and tp=1"),
        (lambda: build(moe_router_topk=3), "top_k=3 of the layer must be at most the group's 2"),
        (lambda: build(hidden_size=48), "hidden_size=48 of the layer must be the group's 32"),
        (lambda: build(activation_func=quick_gelu), "activation_func_clamp_value=None must be above 0 for activation"),
        (lambda: build(quant_recipe=RecipeConfig([], {})), "must be left out with Megatron's layers: experts train in"),
        (lambda: build(use_kitchen=True), "use_kitchen=True must be left out with Megatron's layers: experts train in"),
        (lambda: layer(torch.zeros(50, BATCH, 32)), "num_tokens=150 must be at most max_tokens=128"),
        (lambda: layer.experts(torch.zeros(1, 32).half(), *routing), "dtype=torch.float16 of tokens must be the gro"),
        (lambda: layer(tokens, intermediate_tensors=()), "intermediate_tensors=() must be left out"),
        (lambda: with_comet(get_gpt_layer_local_spec(), group), "spec must have a layer whose mlp is Megatron's MoEL"),
        (
            lambda: layer.sharded_state_dict(metadata={"singleton_local_shards": True}),
            "singleton_local_shards=True must be left out",
        ),
        (lambda: whole(tokens), "sequence_parallel=False must be True in training with tensor_model_parallel_size=2"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    group.close()
    one.close()


SIZE = Size(hidden=64, vocabulary=96, sequence=32, batch=2)


@pytest.mark.slow
def test_training() -> None:
    run_ranks(train_beside_megatron, 2, SIZE, [(2, 1, 1), (1, 2, 1)], 3, "cpu", timeout=300)
