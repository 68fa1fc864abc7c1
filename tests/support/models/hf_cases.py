"""Tiny transformers models of every family, the oracle for them, and what each rank of a group checks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self
from unittest import mock

import safetensors.torch
import torch
import torch.distributed as dist
from layer_cases import assert_as_close
from torch import Tensor, nn

from comet.config import ParallelConfig
from comet.integrations import hf
from comet.integrations.hf import stored
from comet.layer.group import ExpertGroup, make_expert_group
from comet.quantization.formats import quantize_mxfp4

VOCABULARY = 64
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3")
MLA = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4)
ROUTED = dict(n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, moe_intermediate_size=32)
GROUPED = dict(ROUTED, n_group=4, topk_group=2, intermediate_size=48)
HYBRID = dict(
    num_experts=8,
    moe_intermediate_size=32,
    intermediate_size=48,
    shared_expert_intermediate_size=32,
    head_dim=8,
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
# Further families, of which Comet's code names none.
OTHERS: dict[str, dict[str, Any]] = {
    "olmoe": dict(intermediate_size=32, num_experts=8),
    "phimoe": dict(intermediate_size=32, num_local_experts=8),
    "glm4_moe": dict(GROUPED, head_dim=8),
    "glm4_moe_lite": GROUPED | MLA,
    "qwen3_next": HYBRID,
    "qwen3_5_moe_text": HYBRID,
    "deepseek_v2": GROUPED | MLA | dict(topk_method="group_limited_greedy"),
    "minimax_m2": dict(intermediate_size=32, num_local_experts=8, head_dim=8),
    "granitemoe": dict(intermediate_size=32, num_local_experts=8),
    "granitemoeshared": dict(intermediate_size=32, num_local_experts=8, shared_intermediate_size=32),
    "ernie4_5_moe": dict(moe_num_experts=8, moe_k=2, moe_intermediate_size=32, intermediate_size=48,
                         moe_layer_start_index=1, moe_num_shared_experts=1),
    "dots1": dict(GROUPED, head_dim=8),
    "hunyuan_v1_moe": dict(intermediate_size=32, num_experts=8, moe_topk=2, head_dim=8),
}  # fmt: skip
PROMPT, NEW_TOKENS = (2, 9), 6  # 18 prompt tokens: more than DECODE_TOKENS, and 4 ranks do not divide them
DECODE_TOKENS = 6


def tiny_config(family: str, **changes: Any) -> Any:
    """A configuration of two or three small layers whose experts matter: wide initial weights."""
    from transformers import AutoConfig

    fields = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4 if family == "deepseek_v3" else 2,
        max_position_embeddings=128,
        initializer_range=0.25,
        num_experts_per_tok=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    kinds = OTHERS | {
        "mixtral": dict(intermediate_size=32, num_local_experts=4),
        "qwen2_moe": dict(
            intermediate_size=48, moe_intermediate_size=32, num_experts=8, shared_expert_intermediate_size=64
        ),
        "qwen3_moe": dict(
            num_experts_per_tok=4,
            num_hidden_layers=3,
            mlp_only_layers=[1],
            intermediate_size=48,
            moe_intermediate_size=32,
            num_experts=8,
            head_dim=8,
            norm_topk_prob=True,
        ),
        "deepseek_v3": dict(
            num_hidden_layers=3,
            first_k_dense_replace=1,
            intermediate_size=48,
            moe_intermediate_size=32,
            n_routed_experts=8,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        ),
        "gpt_oss": dict(
            intermediate_size=64,
            num_local_experts=4,
            head_dim=8,
            sliding_window=16,
            swiglu_limit=1.5,
        ),
    }
    fields |= kinds[family]
    return AutoConfig.for_model(family, **(fields | changes))


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The same random model in every process, with the stock experts."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(20)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), experts_implementation="eager").eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape) * 0.1)
    for name, parameter in model.named_parameters():
        if name.endswith(("_proj_bias", "router.bias")):
            parameter.data.normal_(std=0.3)
    return model.to(dtype)


def prompt(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(batch * 100 + length))


@torch.no_grad()
def logits_with_cache(model: Any, ids: Tensor, prefill: int) -> Tensor:
    """Logits ``(batch, length, V)``: the first ``prefill`` tokens at once, then one by one through the cache."""
    step = model(ids[:, :prefill], use_cache=True)
    logits = [step.logits]
    for position in range(prefill, ids.shape[1]):
        step = model(ids[:, position : position + 1], past_key_values=step.past_key_values, use_cache=True)
        logits.append(step.logits)
    return torch.cat(logits, dim=1)


@torch.no_grad()
def greedy(model: Any, ids: Tensor) -> Tensor:
    generated: Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    return generated


@dataclass(frozen=True)
class Expected:
    """Answers of the stock model in its own dtype and in float64."""

    ids: Tensor
    logits: Tensor
    exact: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, model: Any) -> Expected:
        batch, length = PROMPT
        ids = prompt(batch, length + 4)
        double = copy.deepcopy(model).double()
        return cls(
            ids=ids,
            logits=logits_with_cache(model, ids, length),
            exact=logits_with_cache(double, ids, length),
            tokens=greedy(model, ids[:, :length]),
        )

    def check(self, model: Any, what: str) -> Tensor:
        ids = self.ids.to(model.device)
        logits = logits_with_cache(model, ids, PROMPT[1]).cpu()
        assert_as_close(logits, self.exact, self.logits, self.logits.dtype, what)
        tokens = greedy(model, ids[:, : PROMPT[1]]).cpu()
        assert torch.equal(tokens, self.tokens), f"{what}: generated {tokens.tolist()}, not {self.tokens.tolist()}"
        return logits


def answers(model: Any, prefills: Sequence[int] = (1,)) -> Tensor:
    """Logits of steps behind such prompts, and tokens, drawn ones, too: to be compared bit for bit."""
    logits = [logits_with_cache(model, prompt(1, 20), prefill).flatten() for prefill in prefills]
    torch.manual_seed(5)
    drawn = model.generate(prompt(1, 1), max_new_tokens=20, do_sample=True, top_k=0)
    hf.check(model)
    return torch.cat([*logits, greedy(model, prompt(2, 9)).flatten(), drawn.flatten()])


def assert_ranks_agree(logits: Tensor, what: str) -> None:
    """All ranks of the job pass the same bits."""
    found = [logits] * dist.get_world_size()
    dist.all_gather_object(found, logits)
    assert all(torch.equal(each, logits) for each in found), f"{what}: ranks differ"


def make_group(
    model_or_config: Any, ep: int = 1, tp: int = 1, max_tokens: int = 64, node_size: int | None = None, **settings: Any
) -> ExpertGroup:
    config = getattr(model_or_config, "config", model_or_config)
    arguments = dict(max_tokens=max_tokens, dtype=torch.float32, device="cpu", timeout_s=60.0) | settings
    return make_expert_group(hf.moe_config(config), ParallelConfig(ep=ep, tp=tp, node_size=node_size), **arguments)


def publish_mxfp4(model: Any, folder: Path) -> Any:
    """A gpt-oss folder as it is published, experts in MXFP4; returns the model with the numbers it then has."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        packed = quantize_mxfp4(state.pop(name).transpose(1, 2))
        blocks, scales = packed.elements.unflatten(-1, (-1, 16)).contiguous(), packed.scales.contiguous()
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=model.dtype))
    save_fused(model, folder, state)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def save_fused(model: Any, folder: Path, state: dict[str, Tensor] | None = None) -> None:
    """A checkpoint whose experts are one tensor per layer, under the names the model itself uses, or of this state."""
    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(folder)
    state = state or {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def edit_state(folder: Path, change: Callable[[dict[str, Tensor]], object], target: Path | None = None) -> None:
    """Change the tensors of a checkpoint of one file, in place or for a ``target`` folder, which gets its config."""
    state = safetensors.torch.load_file(folder / "model.safetensors")
    change(state)
    if target is not None:
        (target / "config.json").write_text((folder / "config.json").read_text())
    safetensors.torch.save_file(state, (target or folder) / "model.safetensors", metadata={"format": "pt"})


def save_model(folder: Path, family: str, **changes: Any) -> Any:
    """A tiny model whose tokens are the 256 bytes and one end token; returns it with the stock experts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    model = tiny_model(family, vocab_size=257, **changes)
    model.save_pretrained(folder)
    return model


class CountedReads:
    """Notes what is read of which tensor of a folder, in bytes, as long as a model is loaded or used in here."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, int]] = []

    def __enter__(self) -> Self:
        self.patch = mock.patch.object(stored, "StoredTensor", partial(self.made, stored.StoredTensor))
        self.patch.start()
        return self

    def made(self, kind: Any, *, name: str, read: Callable[[Any], Tensor], **others: Any) -> Any:
        def noted(index: Any) -> Tensor:
            part = read(index)
            self.reads.append((name, part.nbytes))
            return part

        return kind(name=name, read=noted, **others)

    def __exit__(self, *error: object) -> None:
        self.patch.stop()

    def expert_bytes(self) -> int:
        return sum(num_bytes for name, num_bytes in self.reads if ".experts." in name)


def check_families(
    rank: int, ep: int, tp: int, families: tuple[str, ...], node_size: int | None = None
) -> list[Tensor]:
    """Every family converted over the group, against the stock model; returns the logits."""
    answers = []
    for family in families:
        model = tiny_model(family)
        expected = Expected.of(model)
        group = make_group(model, ep, tp, node_size=node_size)
        hf.convert(model, group, decode_tokens=DECODE_TOKENS)
        answers.append(expected.check(model, f"{family}, ep {ep}, tp {tp}, rank {rank}"))
        hf.check(model)
        group.close()
    return answers


def routed(num_tokens: int, seed: int, num_experts: int = 8, top_k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens ``(T, 32)``, ids and weights ``(T, K)`` as a stock router gives them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k]
    return (
        torch.randn(num_tokens, 32, generator=generator),
        ids,
        torch.rand(num_tokens, top_k, generator=generator),
    )


def same_state(model: nn.Module, other: nn.Module) -> bool:
    state, expected = model.state_dict(), other.state_dict()
    return state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
