"""Hugging Face models in one process: every class of experts by name, conversion in place, and what is refused."""

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_cases
import pytest
import torch
from hf_cases import DECODE_TOKENS, FAMILIES, Expected, make_group, prompt, routed, tiny_config, tiny_model
from layer_cases import assert_as_close
from torch import Tensor, nn

from comet import CapacityError, EpochError, ExpertGroup, ParallelConfig, UnavailableError
from comet.decode import runners
from comet.decode.runners import rank_slice, rounds
from comet.integrations import hf
from comet.integrations.hf.convert import Place
from comet.integrations.hf.families import Family
from comet.integrations.hf.modules import CometExperts

transformers = pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
def test_models_answer_as_stock(family: str) -> None:
    model = tiny_model(family)
    expected = Expected.of(model)
    hf.register()
    hf.register()
    model.set_experts_implementation("comet")
    expected.check(model, f"{family}, registered")
    in_group, alone = copy.deepcopy(model), model
    hf.convert(alone, decode_tokens=DECODE_TOKENS)
    expected.check(alone, f"{family}, converted")
    group = make_group(in_group)
    hf.convert(in_group, group, decode_tokens=DECODE_TOKENS)
    logits = expected.check(in_group, f"{family}, converted in a group of one")
    copied = hf_cases.logits_with_cache(copy.deepcopy(in_group), expected.ids, hf_cases.PROMPT[1])
    assert torch.equal(copied, logits), f"{family}, copied"
    group.close()


def test_versions_that_record_fewer_flags() -> None:
    """transformers 5.17, for one, records neither flag."""
    model = tiny_model("mixtral")
    expected = Expected.of(model)
    for layer in model.model.layers:
        for flag in {"has_post_expert_norm", "_is_expert_parallel"} & vars(layer.mlp.experts).keys():
            delattr(layer.mlp.experts, flag)
    hf.register()
    model.set_experts_implementation("comet")
    expected.check(model, "registered")
    expected.check(hf.convert(model, decode_tokens=DECODE_TOKENS), "converted")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 64, 65])
def test_experts_in_every_dtype(dtype: torch.dtype, num_tokens: int) -> None:
    model = tiny_model("mixtral", dtype)
    stock = copy.deepcopy(model.model.layers[1].mlp.experts)
    exact = copy.deepcopy(stock).double()
    tokens, ids, weights = routed(num_tokens, seed=num_tokens, num_experts=4)
    tokens, weights = tokens.to(dtype), weights.to(dtype)  # Qwen's router rounds its weights to the model's dtype
    with torch.no_grad():
        truth, same = exact(tokens.double(), ids, weights.double()), stock(tokens, ids, weights)
        group = make_group(model, dtype=dtype)
        for label, place in (("alone", None), ("group", group)):
            converted = hf.convert(copy.deepcopy(model), place).model.layers[1].mlp.experts
            actual = converted(tokens, ids, weights)
            assert actual.dtype == dtype
            assert_as_close(actual, truth, same, dtype, f"{num_tokens} tokens in {dtype}, {label}")
    group.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
@torch.no_grad()
def test_decode_steps_include_the_shared_expert(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family, dtype)
    stock = model.model.layers[1].mlp
    exact = copy.deepcopy(stock).double()
    block = hf.convert(copy.deepcopy(model), decode_tokens=DECODE_TOKENS).model.layers[1].mlp
    shared = block.experts.shared.module
    ran, forward = [], type(shared).forward
    monkeypatch.setattr(type(shared), "forward", lambda own, tokens: ran.append(own) or forward(own, tokens))
    for num_tokens in (1, DECODE_TOKENS, DECODE_TOKENS + 1):
        tokens = routed(num_tokens, seed=num_tokens)[0].to(dtype)[None]
        truth, same = exact(tokens.double()), stock(tokens)
        assert_as_close(block(tokens), truth, same, dtype, f"{family}, {num_tokens} tokens in {dtype}")
        assert ran.count(shared) == (num_tokens > DECODE_TOKENS), (
            "decode steps compute it once, with the routed experts"
        )


@torch.no_grad()
def test_a_shared_expert_that_is_written_to_or_moved_is_read_anew() -> None:
    model = tiny_model("deepseek_v3")
    converted = hf.convert(copy.deepcopy(model))
    tokens = routed(3, seed=1)[0][None]
    block, stock = converted.model.layers[1].mlp, model.model.layers[1].mlp
    block(tokens)
    for mlp in (block.shared_experts, stock.shared_experts):
        mlp.down_proj.weight.mul_(-3)
    torch.testing.assert_close(block(tokens), stock(tokens))
    for weight in ("gate_up_proj", "down_proj"):
        getattr(block.experts, weight).data = getattr(stock.experts, weight).data.flip(0).clone()
        getattr(stock.experts, weight).data = getattr(stock.experts, weight).data.flip(0)
    torch.testing.assert_close(block(tokens), stock(tokens))
    truth, half = copy.deepcopy(stock).to(torch.bfloat16).double(), tokens.bfloat16()
    answers = block.to(torch.bfloat16)(half), truth(half.double()), stock.to(torch.bfloat16)(half)
    assert_as_close(*answers, torch.bfloat16, "in another dtype")


@torch.no_grad()
def test_a_shared_expert_with_an_adapter() -> None:
    class Adapter(torch.nn.Linear):
        def forward(self, tokens: Tensor) -> Tensor:
            return 2 * super().forward(tokens)

    def adapt(block: Any) -> Any:
        torch.manual_seed(1)
        block.shared_experts.up_proj = Adapter(32, 64, bias=False)
        return block

    tokens = routed(1, seed=1)[0][None]
    model, converted = tiny_model("deepseek_v3"), hf.convert(tiny_model("deepseek_v3"))
    wanted = adapt(model.model.layers[1].mlp)(tokens)
    torch.testing.assert_close(hf.convert(model).model.layers[1].mlp(tokens), wanted)
    block = converted.model.layers[1].mlp
    torch.testing.assert_close(adapt(block)(tokens), wanted)
    block.shared_experts.up_proj = block.experts.shared._children["up_proj"]
    block.shared_experts.up_proj.bias = nn.Parameter(torch.ones(64))
    with pytest.raises(ValueError, match=r"Linear of the shared expert must be a torch\.nn\.Linear without bias"):
        block(tokens)


def test_registered_experts_skip_those_of_other_ranks() -> None:
    hf.register()
    stock = tiny_model("mixtral").model.layers[0].mlp.experts
    tokens, ids, weights = routed(7, seed=3, num_experts=4)
    ids[2, 0], ids[5] = 4, 4  # how transformers' expert parallelism marks experts of other ranks
    weights[2, 0], weights[5] = torch.nan, 0.0
    stock._is_expert_parallel = True
    stock.config._experts_implementation = "comet"
    with torch.no_grad():
        actual = stock(tokens, ids, weights)
        stock.config._experts_implementation = "eager"
        alone = stock(tokens[2:3], ids[2:3, 1:], weights[2:3, 1:])
    assert torch.equal(actual[5], torch.zeros(32))
    torch.testing.assert_close(actual[2:3], alone)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("shape", [(1, 5), (2, 40)], ids=["as few as a step", "a prompt"])
def test_gradients_equal_stock(family: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    # The decode kernels have no backward pass; their twin on the CPU would hide that they were taken.
    monkeypatch.setattr(runners, "warp_decode", lambda *_, **__: pytest.fail("warp decode has no gradient"))
    hf.register()
    model, ids, found = tiny_model(family), prompt(*shape), []
    for implementation in ("eager", "comet"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, wanted in found[0].items():
        torch.testing.assert_close(found[1][name], wanted, rtol=1e-3, atol=1e-5, msg=name.__add__)


def test_decode_reads_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    # Meta tensors have no values: whatever reads one on the host raises. Only the decode op itself (whose twin reads
    # ids, and whose kernels' test is their own) is passed over.
    def decode(tokens: Tensor, ids: Tensor, weights: Tensor, experts: Any, **_: Any) -> Tensor:
        assert ids.dtype == torch.int32
        assert weights.dtype == torch.float32
        assert experts.slots.device == tokens.device
        steps.append(tokens.shape[0])
        return torch.empty_like(tokens)

    steps: list[int] = []
    monkeypatch.setattr(runners, "warp_decode", decode)
    for family in FAMILIES:
        model = hf.convert(tiny_model(family)).to("meta")
        group = make_group(model)
        block = next(layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts"))
        replicated = runners.ReplicatedRunner(hf.moe_config(model.config), group, 64)
        replicated.slots, replicated.decode_on_ranks = replicated.slots.to("meta"), decode
        for runner in (block.experts.runner, replicated):
            block.experts.runner = runner
            with torch.no_grad():
                assert block(torch.empty(3, 1, 32, device="meta")).shape == (3, 1, 32)
        group.close()
    assert steps == [3] * 2 * len(FAMILIES)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.empty(1, device="meta").tolist()


def test_docstring_examples() -> None:
    assert rounds(300, 256) == [(0, 256), (256, 300)]
    assert rounds(0, 256) == []
    assert [rank_slice(0, 256, rank, 2) for rank in range(2)] == [slice(0, 128), slice(128, 256)]
    assert [rank_slice(256, 300, rank, 2) for rank in range(2)] == [slice(256, 278), slice(278, 300)]
    assert rank_slice(0, 3, 1, 2) == slice(2, 3)
    assert [rank_slice(0, 5, rank, 4) for rank in range(4)] == [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 5)]


def refuse(model: Any, message: str, group: ExpertGroup | None = None, **settings: Any) -> None:
    """Conversion fails with the message and leaves the model as it was."""
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=message):
        hf.convert(model, group, **settings)
    assert dict(model.named_modules()) == before, "half converted"


def test_refused_models() -> None:
    refuse(torch.nn.Linear(2, 2), "model=Linear must be a transformers model")
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    dense = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **sizes))
    refuse(dense, "model=LlamaForCausalLM must hold experts of transformers: it has no MoE layer")
    deepseek = tiny_model("deepseek_v3")
    deepseek.config.scoring_func, deepseek.config.topk_method = "softmax", "noaux_tc"
    refuse(deepseek, "scoring_func='softmax' of the deepseek_v3 model must be 'sigmoid'")
    message = r"layers\.0\.mlp\.experts \(Qwen3MoeExperts\), with act_fn=GELUActivation\(\), must .* SiLU or GELU of"
    refuse(tiny_model("qwen3_moe", hidden_act="gelu"), message)
    refuse(tiny_model("mixtral", intermediate_size=40), "ffn_size=40 must be at least 16 and a multiple of 16")
    refuse(tiny_model("mixtral", torch.float64), "dtype=torch.float64 of model.layers.0.mlp.experts must be")
    refuse(tiny_model("mixtral"), "decode_tokens=65 must be at least 0 and at most 64", decode_tokens=65)

    late = tiny_model("mixtral")  # the second module is the bad one: the first must stay as well
    late.model.layers[1].mlp.experts.is_transposed = True
    refuse(late, r"is_transposed=True of model.layers.1.mlp.experts \(MixtralExperts\) must be False")
    late.model.layers[1].mlp.experts.is_transposed = False
    late.model.layers[1].mlp.experts.act_fn = torch.nn.GELU()
    refuse(late, r"model\.layers\.1\.mlp\.experts .*, with act_fn=GELU.*, must compute .* SiLU")
    late.model.layers[1].mlp.experts.act_fn = torch.nn.ReLU()
    refuse(late, r"model\.layers\.1\.mlp\.experts must have the sizes and activation of model\.layers\.0\.mlp\.experts")
    split = tiny_model("mixtral")
    split.model.layers[1].mlp.experts._is_expert_parallel = True
    refuse(split, "_is_expert_parallel of model.layers.1.mlp.experts .* must be off")
    refuse(hf.convert(tiny_model("mixtral")), "must hold experts of transformers")


def test_refused_groups() -> None:
    model = tiny_model("mixtral")
    refuse(model, "num_experts=4 must be divisible by ep=3", replace(make_group(model), parallel=ParallelConfig(ep=3)))
    refuse(model, "ffn_size=32 must be divisible by tp=3", replace(make_group(model), parallel=ParallelConfig(tp=3)))
    narrow_slices = replace(make_group(model), parallel=ParallelConfig(tp=4))
    message = "ffn_size=32 must be a multiple of 64: 16 x tp, or give decode_tokens=0"
    refuse(model, message, narrow_slices, decode_tokens=4)
    refuse(
        model, "dtype=torch.float32 of .* must be the group's torch.bfloat16", make_group(model, dtype=torch.bfloat16)
    )
    narrow, wide = tiny_config("mixtral", num_experts_per_tok=1), tiny_config("mixtral", hidden_size=64)
    refuse(model, "top_k=2 of the layer must be at most the group's 1", make_group(narrow))
    refuse(model, "hidden_size=32 of the layer must be the group's 64", make_group(wide))


def test_a_group_infers_only() -> None:
    model = tiny_model("mixtral")
    hf.convert(model, make_group(model))
    with pytest.raises(
        ValueError, match=r"requires_grad=True must be left out in a converted model.*torch.no_grad\(\)"
    ):
        model(prompt(1, 3))
    assert isinstance(model.model.layers[0].mlp.experts, CometExperts)
    hf.check(model)
    pool = model.model.layers[0].mlp.experts.runner.group.workspace
    pool.epoch.fill_(2**30 + 1)
    with pytest.raises(EpochError, match="epoch=1073741825 of rank 0"):
        hf.check(model)
    hf.restart(model)
    hf.check(model)
    pool.fault[7] = 9
    with pytest.raises(CapacityError, match="rank 0 needs 9 routed rows"):
        hf.check(model)
    assert "experts 0..3 of 4, slice 0 of 1" in repr(model)


def test_a_part_of_the_experts_is_not_saved_as_a_model(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    place = Place.create(Family.of(model), None)
    place.keep_from_saving(model)
    model.save_pretrained(tmp_path / "whole")
    replace(place, layout=replace(place.layout, ep=2, rank=1)).keep_from_saving(model)
    with pytest.raises(ValueError, match="save_pretrained: rank 1 of 2 holds a part of the experts only; save the"):
        model.save_pretrained(tmp_path / "part")
    assert not (tmp_path / "part").exists()


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "transformers.integrations.moe"):
        monkeypatch.setitem(sys.modules, name, None)
    calls = (
        hf.register,
        lambda: hf.convert(torch.nn.Linear(1, 1)),
        lambda: hf.check(torch.nn.Linear(1, 1)),
        lambda: hf.load_pretrained("somewhere"),
        lambda: hf.moe_config("somewhere"),
    )
    for call in calls:
        with pytest.raises(UnavailableError, match=r"pip install 'comet-moe\[hf\]'"):
            call()


# Every class of 5.23 whose arithmetic is its own, and what of it is named.
def test_methods_that_a_class_inherits_or_overrides() -> None:
    from transformers.integrations.moe import use_experts_implementation
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    class Same(MixtralExperts):
        """Nothing of its own."""

    class Doubled(MixtralExperts):
        def forward(self, *arguments: Any) -> Tensor:
            return 2 * super().forward(*arguments)

    class Gate(Same):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            return gate_up.chunk(2, dim=-1)[0]

    class Inherited(Gate, DeepseekV4Experts):
        """The forward pass comes by way of two classes."""

    model = tiny_model("mixtral")
    experts = model.model.layers[1].mlp.experts
    expected = Expected.of(model)
    hf.register()
    model.set_experts_implementation("comet")
    for kind in (Same, use_experts_implementation(type("Again", (Same,), {}))):
        experts.__class__ = kind
        expected.check(model, kind.__name__)
        expected.check(hf.convert(copy.deepcopy(model)), kind.__name__)
    experts.__class__ = Doubled
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts \(Doubled\), with act_fn=.*, must compute"):
        hf.convert(model)
    for kind in (Gate, Inherited):
        experts.__class__ = kind
        for call in (hf.convert, hf.check, lambda model: model(prompt(1, 3))):
            with pytest.raises(ValueError, match=rf"experts \({kind.__name__}\), with act_fn=.*, must compute"):
                call(model)
    experts.__class__ = MixtralExperts
    experts.forward = experts.forward
    expected.check(model, "as hooks of accelerate put it")
    with pytest.raises(ValueError, match=r"forward of model\.layers\.1.* must be its class's: it would be lost"):
        hf.convert(model)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_arithmetic_that_was_put_into_a_module(family: str) -> None:
    hf.register()
    model = tiny_model(family)
    model.set_experts_implementation("comet")
    model.model.layers[1].mlp.experts._apply_gate = lambda gate_up: gate_up.chunk(2, dim=-1)[1]
    for call in (hf.check, lambda model: model(prompt(1, 3))):
        with pytest.raises(ValueError, match=r"experts \(\w+\), with act_fn=.*, must compute"):
            call(model)


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_a_shared_expert_that_adds_up_otherwise_stays_outside_of_steps(family: str) -> None:
    for part in ("block", "shared", "activation", "width"):
        changes = {"shared_expert_intermediate_size": 48} if family == "qwen2_moe" and part == "width" else {}
        model = tiny_model(family, **changes)
        block = model.model.layers[1].mlp
        shared = block.shared_expert if family == "qwen2_moe" else block.shared_experts
        if part == "activation":
            shared.act_fn = nn.Tanh()
        else:
            module = block if part == "block" else shared
            kind = type(module)
            other = {"forward": lambda self, tokens, kind=kind: 3 * kind.forward(self, tokens) - 1}
            module.__class__ = type("Other", (kind,), other)
        expected = Expected.of(model)
        hf.convert(model)
        assert block.experts.shared is None
        expected.check(model, f"{family}, another {part}")


def test_a_scan_names_models_that_never_call_comet() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=2, vocab_size=64)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_local_experts=2, pad_token_id=0)
    config = AutoConfig.for_model("llama4_text", **sizes, **heads)
    hf.register()
    deaf = AutoModelForCausalLM.from_config(config, experts_implementation="comet")
    with pytest.raises(ValueError, match=r"model=Llama4ForCausalLM must have experts that call Comet.*; Llama4TextEx"):
        hf.check(deaf)
    mixtral = tiny_model("mixtral")
    with pytest.raises(ValueError, match=r"experts_implementation='comet' where experts ask .* registry$"):
        hf.check(mixtral)
    mixtral.set_experts_implementation("comet")
    hf.check(mixtral)
    mixtral.model.layers[1].mlp.experts.has_bias = True
    with pytest.raises(ValueError, match=r"has_bias=True of model\.layers\.1\.mlp\.experts"):
        hf.check(mixtral)
