"""Settings of torch for the whole process or a block of code change no number: autocast, default type, subnormals.

Types that cannot be right are refused by name.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from every_path import decode_weights, every_path, rank_inputs
from layer_cases import LayerCase
from layer_ranks import open_group
from modular_cases import rank_weights
from ranks import in_ranks
from torch import Tensor

from comet.config import MoEConfig, ParallelConfig
from comet.decode import DecodeWeights, LocalRunner, RankDecode, rank_slots, warp_decode
from comet.experts.cache import ExpertCache
from comet.experts.cached import CachedExperts
from comet.experts.host.cores import HostCores
from comet.experts.host.profile import HostProfile, HostSizes
from comet.experts.store import HeldExperts
from comet.layer.group import make_expert_group
from comet.layer.paths import make_path
from comet.layer.routed_experts import SymmetricPath
from comet.layer.sharding import local
from comet.layer.shared_expert import SharedExpert
from comet.layout import RoutedTokens
from comet.models.config import ModelConfig
from comet.models.gpt import GPT, rotary_table
from comet.modular import (
    GroupedContiguous,
    SymmetricContiguous,
    WarpDecodeExperts,
)
from comet.moe import MoE
from comet.quantization.formats import (
    WEIGHT_TYPES,
    quantize_fp8,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_rows,
)
from comet.schedule.choice import Problem
from comet.tuner.layers import NUM_INPUTS, make_inputs
from comet.utils.autocast import without_autocast

TYPES = (torch.float32, torch.float16, torch.bfloat16)
CASE = LayerCase("surroundings", 1, 1, (9,), hidden_size=128, ffn_size=128)

MODEL = ModelConfig(
    name="small", context=8, hidden_size=128, num_layers=1, num_heads=2, num_kv_heads=2, moe=CASE.config
)


EMPTY = torch.empty(0), torch.empty(0)  # weights of a layer that are in slots


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def flushed_subnormals() -> Iterator[None]:
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "default float64": lambda: default_dtype(torch.float64),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "subnormals are 0": flushed_subnormals,
}


def numbers(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def whole_layer(path: str, dtype: torch.dtype) -> list[Tensor]:
    """A new layer: its output, its losses and all gradients. Without a shared expert, which obeys autocast."""
    config = MoEConfig(hidden_size=32, ffn_size=32, num_experts=4, top_k=2, balance="bias", expert_bias=True)
    group = make_expert_group(config, ParallelConfig(), max_tokens=9, dtype=dtype, device="cpu", timeout_s=60.0)
    layer = MoE(config, group, path=path, seed=3)
    for seed, bias in enumerate((layer.b1, layer.b2)):
        bias.data = numbers(tuple(bias.shape), seed)
    x = numbers((9, 32), 1, dtype).requires_grad_()
    y, stats = layer(x)
    torch_refuses = path == "plain" and torch.get_autocast_dtype("cpu") == torch.float16  # to stack bfloat16 there
    with without_autocast(x.device) if torch_refuses else nullcontext():
        (y.float().square().sum() + stats.loss).backward()
    group.workspace.check()
    group.close()
    return [y, stats.loss, x.grad, *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None)]


def all_paths(kind: type, dtype: torch.dtype) -> list[Tensor]:
    case = replace(CASE, dtype=dtype)
    tokens, weights = rank_inputs(case, 0).tokens, rank_weights(case, 0, kind)
    torch_refuses = () if dtype == torch.float32 else ("specification", "reference")  # to put their parts together
    return [layer(tokens, *weights) for name, layer in every_path(case, kind=kind).items() if name not in torch_refuses]


def quantised(dtype: torch.dtype) -> list[Tensor]:
    values = numbers((8, 160), 5, dtype)
    values[0], values[1] = 0, values[1] * 2**-8
    packed = [quantize_mxfp8(values), quantize_mxfp8(values, rule="fit"), quantize_fp8(values), quantize_rows(values)]
    packed.append(quantize_mxfp4(values))
    return [part for each in packed for part in (each.elements.float(), each.scales, each.dequantize(dtype))]


@pytest.mark.parametrize("world_size", [1, 2])
@in_ranks("world_size")
def test_a_default_device_changes_nothing(rank: int, world_size: int) -> None:
    """Layers and models are on the group's device, whatever ``torch.set_default_device`` says."""
    parallel = ParallelConfig(ep=world_size)
    with torch.device("meta"):
        group = make_expert_group(MODEL.moe, parallel, max_tokens=16, dtype=torch.float32, device="cpu")
        layer, model = MoE(MODEL.moe, group, seed=0), GPT(MODEL, group)
    same = MoE(MODEL.moe, group, seed=0), GPT(MODEL, group)
    for made, wanted in zip((layer, model), same, strict=True):
        for one, other in zip(made.parameters(), wanted.parameters(), strict=True):
            assert torch.equal(local(one), local(other))
    x = numbers((9, 128), rank)
    assert torch.equal(layer(x)[0], same[0](x)[0])
    group.close()


def test_what_inference_mode_made_serves_outside_of_it() -> None:
    with torch.inference_mode():
        group = make_expert_group(CASE.config, ParallelConfig(), max_tokens=9, dtype=torch.float32, device="cpu")
        decode = RankDecode(group.comm, hidden_size=CASE.hidden_size)
    layer, tokens = MoE(CASE.config, group, path="twin"), numbers((9, CASE.hidden_size), 1)
    output, _ = layer(tokens)
    output.sum().backward()
    w1, w2 = layer.expert_weights()
    experts = DecodeWeights(w1=w1.flatten(1, 2), w2=w2, slots=rank_slots(layer.layout, "cpu"))
    with torch.no_grad():
        routing = layer.router(tokens)
        torch.testing.assert_close(decode(tokens, routing.top_k_ids, routing.top_k_weights, experts), output)


def inputs_to_measure() -> list[Tensor]:
    group = make_expert_group(CASE.config, ParallelConfig(), max_tokens=128, dtype=torch.float32, device="cpu")
    inputs = make_inputs(Problem(CASE.config, ParallelConfig(), 9, torch.float32), group, seed=5)
    outputs = [inputs.run(make_path("twin", CASE.config, group), index) for index in range(NUM_INPUTS)]
    group.close()
    return [*inputs.routed[0], *inputs.routed[1], inputs.w1, inputs.w2, *outputs]


def model_step() -> list[Tensor]:
    group = make_expert_group(CASE.config, ParallelConfig(), max_tokens=16, dtype=torch.float32, device="cpu")
    model = GPT(MODEL, group)
    model.head.weight.data = numbers(tuple(model.head.weight.shape), 4)  # It starts at zero.
    with without_autocast(group.device):  # the model runs its products in the group's type itself
        output = model(torch.arange(16).view(2, 8))
        output.logits.square().mean().backward()
    group.close()
    return [output.logits, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def experts_from_slots() -> list[Tensor]:
    """Steps of a cache, and what is decided and kept for the host's cores."""
    cache = ExpertCache(HeldExperts(numbers((6, 64, 32), 1), numbers((6, 32, 32), 2), True), 2, torch.device("cpu"))
    path, weights = CachedExperts(cache, LocalRunner(2, 4), 2), torch.tensor([[0.3, 0.7]], dtype=torch.float32)
    ids = [torch.tensor([[step % 3, 3 + step % 2]], dtype=torch.int32) for step in range(7)]
    outputs = [path(RoutedTokens(numbers((1, 32), step), each, weights), *EMPTY) for step, each in enumerate(ids)]
    costs = dict(request_ns=20.0, expert_ns=290.3, full_request_ns=21.0, full_expert_ns=301.7)
    share = HostProfile(link_ns=200.1, shared_link_ns=203.3, **costs).share_table(2, 8)
    sizes = dict(num_experts=6, first_expert=0, hidden_size=32, top_k=2, max_tokens=4, dtype=torch.float32)
    cores = HostCores(1, HostSizes(**sizes), torch.device("cpu"), 60.0)
    cores.close()
    return [*outputs, share, cores.mail.sums]


COMPUTED: dict[str, Callable[[], list[Tensor]]] = {
    "experts from slots": experts_from_slots,
    "twin layer": partial(whole_layer, "twin", torch.float32),
    "twin layer in bfloat16": partial(whole_layer, "twin", torch.bfloat16),
    "plain layer in bfloat16": partial(whole_layer, "plain", torch.bfloat16),
    "reference layer": partial(whole_layer, "reference", torch.float32),
    **{f"{kind.__name__}, {dtype}": partial(all_paths, kind, dtype) for kind in WEIGHT_TYPES for dtype in TYPES},
    "quantised float32": partial(quantised, torch.float32),
    "quantised bfloat16": partial(quantised, torch.bfloat16),
    "inputs of the tuner": inputs_to_measure,
    "model": model_step,
    "rotary table": lambda: [rotary_table(MODEL)],
}


@pytest.mark.parametrize("computed", COMPUTED)
def test_surroundings_change_no_number(computed: str) -> None:
    wanted = COMPUTED[computed]()
    for name, surroundings in SURROUNDINGS.items():
        with surroundings():
            found = COMPUTED[computed]()
        assert len(found) == len(wanted)
        for index, (got, right) in enumerate(zip(found, wanted, strict=True)):
            assert got.dtype == right.dtype, f"{computed}, {name}: {index} is {got.dtype}, without {right.dtype}"
            assert torch.equal(got, right), f"{computed}, {name}: {index} differs by {(got - right).abs().max()}"


@pytest.mark.parametrize("quantise", [quantize_mxfp8, partial(quantize_mxfp8, rule="fit"), quantize_mxfp4])
def test_mx_blocks_of_the_smallest_scale_outlive_flushed_subnormals(quantise: Callable) -> None:
    """2^-127 is subnormal in float32; 2^-125 is not, and neither are zeros."""
    values = torch.zeros(2, 32)
    values[1, :2] = torch.tensor([2.0**-120 if quantise is not quantize_mxfp4 else 2.0**-126, -(2.0**-125)])
    with flushed_subnormals():
        packed = quantise(values)
        found = packed.dequantize()
        coarse = packed.dequantize(torch.bfloat16)
    assert packed.scales.tolist() == [[0], [0]]
    assert torch.equal(found, values)
    assert torch.equal(coarse, values.bfloat16())


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
def test_tokens_that_are_integers_are_refused(dtype: torch.dtype, kind: type) -> None:
    tokens, weights = rank_inputs(CASE, 0).tokens.to(dtype), rank_weights(CASE, 0, kind)
    for name, layer in every_path(CASE, kind=kind).items():
        with pytest.raises(
            ValueError, match=rf"(tokens of dtype {dtype}|dtype={dtype} of (the )?tokens) must be "
        ) as refused:
            layer(tokens, *weights)
        assert "float" in str(refused.value), name


@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_shared_expert_takes_the_tokens_dtype(param_dtype: torch.dtype) -> None:
    shared = SharedExpert(16, 32, dtype=param_dtype)
    for dtype in TYPES:
        tokens = numbers((5, 16), 2, dtype).requires_grad_()
        cast = SharedExpert(16, 32, dtype=dtype)
        cast.load_state_dict(shared.state_dict())
        y = shared(tokens)
        assert y.dtype == dtype
        assert torch.equal(y, cast(tokens))
        for narrow in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", narrow):
                assert shared(tokens).dtype == dtype
        y.sum().backward()
        assert tokens.grad is not None
    assert shared.w1.grad is not None
    assert shared.w1.grad.dtype == param_dtype


@in_ranks(1, interpret=True)
def test_bfloat16_is_refused_by_interpreted_kernels(rank: int, world_size: int) -> None:
    """A path refuses when it is made, or else when it is called."""
    case = replace(CASE, dtype=torch.bfloat16)
    group, tokens, weights = open_group(case), rank_inputs(case, 0).tokens, rank_weights(case, 0, Tensor)
    steps = tokens, rank_inputs(case, 0).top_k_ids, rank_inputs(case, 0).top_k_weights, decode_weights(*weights, 4)
    config, kernels = case.config, dict(use_kernels=True)
    calls: dict[str, Callable[[], object]] = {
        "fused": lambda: MoE(config, group, path="fused", param_dtype=torch.bfloat16),
        "decode": lambda: warp_decode(*steps, **kernels),
        "decode over ranks": lambda: RankDecode(group.comm, hidden_size=case.hidden_size, **kernels)(*steps),
        "symmetric path": lambda: SymmetricPath(config, group, None, **kernels),
        "grouped experts": lambda: GroupedContiguous(config, group, **kernels),
        "warp decode experts": lambda: WarpDecodeExperts(config, group, **kernels),
        "transport": lambda: SymmetricContiguous(config, group, **kernels),
    }
    rule = "dtype=torch.bfloat16 must be left out in kernels on a CPU: Triton's interpreter is wrong"
    for call in calls.values():
        with pytest.raises(ValueError, match=f"^{rule}.*path='twin', use_kernels=False"):
            call()


def test_second_derivatives_are_refused_and_not_left_out() -> None:
    x = torch.randn(5, 64, requires_grad=True)
    config = MoEConfig(hidden_size=64, ffn_size=32, num_experts=4, top_k=2)
    group = make_expert_group(config, ParallelConfig(), max_tokens=5, dtype=torch.float32, device="cpu")
    output, _ = MoE(config, group)(x)
    with pytest.raises(RuntimeError, match=r"^create_graph=True must be False"):
        torch.autograd.grad(output.sum(), x, create_graph=True)
