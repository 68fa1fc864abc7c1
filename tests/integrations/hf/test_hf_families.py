"""Families that no code of Comet names: their own modules say what they compute."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import (
    DECODE_TOKENS,
    OTHERS,
    PROMPT,
    CountedReads,
    Expected,
    assert_ranks_agree,
    logits_with_cache,
    make_group,
    prompt,
    same_state,
    tiny_model,
)
from ranks import in_ranks
from torch import nn

from comet.integrations import hf
from comet.integrations.hf.families import Family, SharedExpert, check_experts
from comet.integrations.hf.modules import router_beside

transformers = pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")
BESIDE = SharedExpert("shared_experts", 32, None, comes_first=False)
WEIGHED = SharedExpert("shared_expert", 32, "shared_expert_gate", comes_first=True)
SHARED = {
    "qwen3_next": WEIGHED,
    "qwen3_5_moe_text": WEIGHED,
    "ernie4_5_moe": SharedExpert("shared_experts", 32, None, comes_first=True),
    "hunyuan_v1_moe": SharedExpert("shared_mlp", 32, None, comes_first=True),
} | dict.fromkeys(("glm4_moe", "glm4_moe_lite", "deepseek_v2", "dots1"), BESIDE)
# Drafts and prefetch can imitate these routers, which score so.
ROUTERS = {
    **dict.fromkeys(("olmoe", "qwen3_next", "qwen3_5_moe_text", "granitemoe", "granitemoeshared"), "softmax"),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "dots1"), "sigmoid"),
}


@pytest.mark.parametrize("family", OTHERS)
def test_modules_describe_their_family(family: str) -> None:
    model = tiny_model(family)
    found = Family.of(model)
    assert found == Family.of_config(model.config)
    moe = found.moe
    assert (moe.hidden_size, moe.ffn_size, moe.num_experts, moe.top_k) == (32, 32, 8, 2)
    assert (moe.activation.name, moe.expert_bias, found.interleaved) == ("swiglu", False, False)
    assert found.shared == SHARED.get(family)
    assert len(found.experts) == 2 - model.config.to_dict().get("first_k_dense_replace", family == "ernie4_5_moe")
    if family in ROUTERS:
        assert router_beside(model, found.experts[0], moe).config.score == ROUTERS[family]
        return
    with pytest.raises(ValueError, match=r"(gate|router) \(.*\) must (have a weight|score by).* set speculate='off'"):
        router_beside(model, found.experts[0], moe)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("llama", "model=LlamaForCausalLM must hold experts of transformers: it has no MoE layer"),
        ("nemotron_h", r"has_gate=False of model\.layers\.\d+\.mixer\.experts \(NemotronHExperts\) must be True"),
        (
            "deepseek_v4",
            r"model\..*experts \(DeepseekV4Experts\), with act_fn=SiLU.*, must compute the weighted sum",
        ),
    ],
)
def test_families_of_other_arithmetic_are_refused_by_name(family: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf.moe_config(transformers.AutoConfig.for_model(family))


@pytest.mark.parametrize("family", ["olmoe", "glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe"])
def test_a_module_that_computes_something_else_is_found(family: str) -> None:
    """One factor, in a place that no flag and no class name shows."""
    for change in ("experts", "act_fn"):
        model = tiny_model(family)
        name = Family.of(model).experts[0]
        experts: Any = model.get_submodule(name)
        if change == "experts":
            kind = type(experts)
            scaled = {"forward": lambda self, *given, kind=kind: 1.001 * kind.forward(self, *given)}
            experts.__class__ = type(kind.__name__, (kind,), scaled)
        else:
            experts.act_fn = Scaled()
        with pytest.raises(ValueError, match=rf"{name} \(\w+\), with act_fn=.*, must compute the weighted sum"):
            hf.convert(model)
    model = tiny_model(family)
    block: Any = model.get_submodule(Family.of(model).experts[0].rpartition(".")[0])
    kind = type(block)
    block.__class__ = type("Other", (kind,), {"forward": lambda self, tokens: 1.001 * kind.forward(self, tokens)})
    assert Family.of(model).shared is None


def test_the_last_expert_of_a_rank_is_checked_as_the_others() -> None:
    """transformers' expert parallelism leaves a rank one of several experts, and counts it alone."""
    experts: Any = tiny_model("olmoe").model.layers[0].mlp.experts
    experts.num_experts, experts._is_expert_parallel = 1, True
    assert check_experts(experts, "experts").name == "swiglu"


class Scaled(nn.Module):
    def forward(self, gate: torch.Tensor) -> torch.Tensor:
        return 1.001 * nn.functional.silu(gate)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each family as transformers saves it: with the published names."""
    found = {}
    for family in OTHERS:
        found[family] = tmp_path_factory.mktemp(family)
        tiny_model(family).save_pretrained(found[family])
    return found


def check_over_ranks(rank: int, ep: int, tp: int, folders: dict[str, Path]) -> None:
    """Prefill and decode of every family, converted, and loaded with each rank's part only."""
    for family, folder in folders.items():
        model, what = tiny_model(family), f"{family}, ep {ep}, tp {tp}, rank {rank}"
        expected = Expected.of(model)
        held = sum(weight.nbytes for name, weight in model.named_parameters() if ".experts." in name)
        group = make_group(model, ep, tp)
        with CountedReads() as counted:
            loaded = hf.load_pretrained(folder, group, decode_tokens=DECODE_TOKENS)
        stored = [(name, size) for name, size in counted.reads if "experts." in name or "_linear" in name]
        own = sum(size for name, size in stored if "shared" not in name and "bias" not in name)
        assert own * ep * tp == held, what
        logits = expected.check(hf.convert(model, group, decode_tokens=DECODE_TOKENS), what)
        assert_ranks_agree(logits, what)
        assert same_state(loaded, model), f"{what}: other weights"
        assert torch.equal(logits_with_cache(loaded, expected.ids, PROMPT[1]), logits), what
        hf.check(loaded)
        group.close()


@pytest.mark.slow
@in_ranks(2, timeout=600)
def test_families_over_ranks(rank: int, world_size: int, folders: dict[str, Path]) -> None:
    for ep, tp in ((2, 1), (1, 2)):
        check_over_ranks(rank, ep, tp, folders)


def test_a_family_over_ranks_and_in_a_store(folders: dict[str, Path]) -> None:
    """Granite's tensors have names of their own."""
    model, ids = tiny_model("granitemoe"), prompt(1, 12)
    for settings in ({}, {"expert_budget": 0.5}):
        loaded = hf.load_pretrained(folders["granitemoe"], **settings)
        torch.testing.assert_close(logits_with_cache(loaded, ids, 8), logits_with_cache(model, ids, 8))


def test_a_cut_off_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="model_type='llama' must be one of transformers' families with routed exp"):
        hf.load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "granitemoe", "hidden_size": 32}')
    with pytest.raises(ValueError, match=r"num_local_experts, intermediate_size, as that of a granitemoe model does"):
        hf.load_pretrained(tmp_path)
