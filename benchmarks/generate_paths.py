"""The ways to take decode steps that the generation benchmark compares, each with a cache of its own, and their models.

They are Comet's GPT with random weights made on the device, and transformers' Qwen3-MoE on the tensors of the first.
They differ in details: Comet keeps residual stream, router and norms in float32, transformers in the model's dtype.

Letters: L layers, B sequences, G key and value heads, C positions of the context, w width, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

import torch
from shapes import MODELS
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from comet.config import MoEConfig
from comet.generation.engine import FrozenExperts, GPTEngine
from comet.generation.step import DecodeStep
from comet.graphs import GraphMode
from comet.group import ExpertGroup
from comet.models.cache import KeyValueCache
from comet.models.config import ModelConfig
from comet.models.gpt import GPT

# Fields of ModelConfig beside name, context, layers and the MoE layer, with which hidden_size goes.
ATTENTION: dict[str, dict[str, Any]] = {
    "qwen3_30b_a3b": dict(vocab_size=151_936, num_heads=32, num_kv_heads=4, head_dim=128),
    "tiny": dict(vocab_size=256, num_heads=4, num_kv_heads=2),
}
NORM_EPSILON = torch.finfo(torch.float32).eps


def model_config(name: str, num_layers: int, context: int) -> ModelConfig:
    """The shape called ``name``, with this many layers and room for this many positions."""
    moe: MoEConfig = MODELS[name]
    return ModelConfig(
        name=name, context=context, hidden_size=moe.hidden_size, num_layers=num_layers, moe=moe, **ATTENTION[name]
    )


def make_gpt(config: ModelConfig, group: ExpertGroup) -> GPT:
    """Comet's GPT with random weights, ready to generate; experts of different EP ranks are drawn alike."""
    with draws_on(group.device):
        model = GPT(config, group)
    nn.init.normal_(model.head.weight, std=config.hidden_size**-0.5)
    GPTEngine(model, group, cuda_graph="off")  # freezes the weights and puts warp decode under the layers
    return model


@contextmanager
def draws_on(device: torch.device) -> Iterator[None]:
    """Let ``torch.randn`` draw on a device: billions of weights take a CPU minutes."""
    torch.manual_seed(0)
    with _DrawsOn(device):
        yield


class _DrawsOn(TorchFunctionMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.randn:
            return torch.randn(*args, device=self.device)
        return func(*args, **(kwargs or {}))


def library_version() -> str | None:
    """The installed transformers, if any."""
    if importlib.util.find_spec("transformers") is None:
        return None
    import transformers

    return str(transformers.__version__)


def make_library_model(gpt: GPT, experts: str | None) -> Any:
    """transformers' Qwen3-MoE with the weights of ``gpt``, in evaluation mode; the experts take no further memory.

    Args:
        gpt: From ``make_gpt``.
        experts: An experts implementation of transformers; ``None``: the one it takes by itself; ``comet``: Comet's.
    """
    from transformers import AutoModelForCausalLM

    from comet.integrations import hf

    config = library_config(gpt.config)
    chosen = {} if experts is None else {"experts_implementation": "eager" if experts == "comet" else experts}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=gpt.dtype, **chosen)
    model.load_state_dict(library_state(gpt), assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(gpt.rotary.device)
    model.requires_grad_(False)
    return hf.convert(model.eval()) if experts == "comet" else model.eval()


def library_config(config: ModelConfig) -> Any:
    """The same shape as transformers describes it."""
    from transformers import AutoConfig

    no_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=config.vocab_size,
        max_position_embeddings=config.context,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_width,
        intermediate_size=config.moe.ffn_size,
        moe_intermediate_size=config.moe.ffn_size,
        num_experts=config.moe.num_experts,
        num_experts_per_tok=config.moe.top_k,
        norm_topk_prob=config.moe.renormalize,
        rms_norm_eps=NORM_EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
        tie_word_embeddings=False,
        **no_tokens,
    )


def library_state(gpt: GPT) -> dict[str, Tensor]:
    """The weights under the names of transformers; the large ones are views."""
    config, dtype = gpt.config, gpt.dtype
    width = config.head_width
    rows = [config.num_heads * width, config.num_kv_heads * width, config.num_kv_heads * width]
    ones = torch.ones(width, dtype=dtype, device=gpt.rotary.device)
    state = {
        "model.embed_tokens.weight": gpt.embedding.weight.to(dtype),
        "model.norm.weight": gpt.norm.weight.to(dtype),
        "lm_head.weight": gpt.head.weight,
    }
    blocks: Any = gpt.blocks
    for index, (block, moe) in enumerate(zip(blocks, gpt.moe_layers(), strict=True)):
        attention = block.attention
        parts = attention.qkv.weight.split(rows)
        of_layer = {f"self_attn.{name}_proj.weight": part for name, part in zip("qkv", parts, strict=True)}
        of_layer |= {
            "self_attn.o_proj.weight": attention.out.weight,
            "self_attn.q_norm.weight": ones,
            "self_attn.k_norm.weight": ones,
            "input_layernorm.weight": block.attention_norm.weight.to(dtype),
            "post_attention_layernorm.weight": block.ffn_norm.weight.to(dtype),
            "mlp.gate.weight": moe.router.weight.to(dtype),
            "mlp.experts.gate_up_proj": moe.expert_weights()[0].flatten(1, 2),
            "mlp.experts.down_proj": moe.expert_weights()[1],
        }
        state |= {f"model.layers.{index}.{name}": tensor for name, tensor in of_layer.items()}
    return state


COMET, LOOP = "comet", "eager"
STOCK = ("grouped_mm", "batched_mm", LOOP)  # transformers' own experts; the last is a loop that asks the device


class StepPath(Protocol):
    """One way to take decode steps."""

    def rewind(self) -> None:
        """Stand at the end of the context again; on the device, without waiting."""
        ...

    def decode(self, ids: Tensor, num_steps: int) -> Tensor:
        """Append ``(B,)`` tokens, then the most probable ones; returns the choice of the last of ``num_steps``."""
        ...


class Stepwise:
    """Steps taken one after the other, the next token chosen on the device.

    Args:
        step: ``(B,)`` tokens to ``(B, V)`` logits.
        rewind: See ``StepPath``.
    """

    def __init__(self, step: Callable[[Tensor], Tensor], rewind: Callable[[], object]) -> None:
        self.step = step
        self._rewind = rewind

    def rewind(self) -> None:
        """See ``StepPath``."""
        self._rewind()

    def decode(self, ids: Tensor, num_steps: int) -> Tensor:
        """See ``StepPath``."""
        for _ in range(num_steps):
            ids = self.step(ids).argmax(-1)
        return ids


class Library:
    """``model.generate`` of transformers as a user calls it, over its static cache and without its compiler.

    Args:
        model: From ``make_library_model``.
        static: The cache, which holds the context.
        contents: The context.
    """

    def __init__(self, model: Any, static: Any, contents: Tensor) -> None:
        self.model, self.static = model, static
        batch, self._positions = contents.shape[2], contents.shape[4]
        self._ids = torch.zeros(batch, self._positions + 1, dtype=torch.int64, device=contents.device)
        self._mask = torch.ones_like(self._ids)

    def rewind(self) -> None:
        """See ``StepPath``."""
        rewind_library(self.static, self._positions)

    def decode(self, ids: Tensor, num_steps: int) -> Tensor:
        """See ``StepPath``; what the library does once for each call counts as well."""
        self._ids[:, -1] = ids
        made: Tensor = self.model.generate(
            self._ids,
            attention_mask=self._mask,
            past_key_values=self.static,
            max_new_tokens=num_steps,
            do_sample=False,
            disable_compile=True,
            pad_token_id=0,
        )
        return made[:, -1]


class Paths:
    """Makes every path over the weights of one model.

    Args:
        gpt: From ``make_gpt``.
    """

    def __init__(self, gpt: GPT) -> None:
        self.gpt = gpt
        self._library_model = cache(partial(make_library_model, gpt))

    def makers(self, contents: Tensor, num_places: int, *, with_graphs: bool) -> dict[str, Callable[[], StepPath]]:
        """What makes each path; one may fail without the others.

        Args:
            contents: ``(2, L, B, G, C, w)`` keys and values of the context.
            num_places: Positions there must be room for.
            with_graphs: Also replay steps from CUDA graphs.

        Returns:
            Makers by name; those of transformers only where it is installed and this rank holds all experts.
        """
        modes: Mapping[str, GraphMode] = {"_graph": "on", "": "off"} if with_graphs else {"": "off"}
        found: dict[str, Callable[[], StepPath]] = {}
        for suffix, mode in modes.items():
            found[f"{COMET}{suffix}"] = partial(self._comet, contents, num_places, mode)
        if library_version() is None or self.gpt.moe_layers()[0].layout.world_size > 1:
            return found
        for experts in (COMET, *STOCK):
            for suffix, mode in modes.items():
                if mode == "off" or experts != LOOP:
                    found[f"hf_{experts}{suffix}"] = partial(self._library, experts, contents, num_places, mode)
        found["hf_generate"] = partial(self._generate, contents, num_places)
        return found

    def check(self) -> None:
        """Raise what went wrong on the device so far, such as a rank that did not come."""
        for layer in self.gpt.moe_layers():
            assert isinstance(layer.experts, FrozenExperts), "the model is ready to generate"
            layer.experts.runner.check()

    def _comet(self, contents: Tensor, num_places: int, cuda_graph: GraphMode) -> StepPath:
        """Comet's GPT."""
        gpt, batch, positions, device = self.gpt, contents.shape[2], contents.shape[4], contents.device
        held = KeyValueCache(gpt.config, num_sequences=batch, length=num_places, dtype=gpt.dtype, device=device)
        held.keys[:, :, :, :positions], held.values[:, :, :, :positions] = contents
        ids = torch.zeros(batch, dtype=torch.int64, device=device)
        step = DecodeStep(lambda: gpt.decode(ids, held).logits[:, 0], ids, cuda_graph=cuda_graph)
        return Stepwise(step, partial(held.lengths.fill_, positions))

    def _library(self, experts: str, contents: Tensor, num_places: int, cuda_graph: GraphMode) -> StepPath:
        """A model of transformers with experts of its own, or with Comet's."""
        from comet.integrations import hf

        decoder = hf.StaticDecoder(self._library_model(experts), contents.shape[2], num_places, cuda_graph=cuda_graph)
        fill_library(decoder.cache, contents)

        def rewind() -> None:
            decoder.skip_to(contents.shape[4], torch.zeros_like(decoder.pads))
            rewind_library(decoder.cache, contents.shape[4])

        return Stepwise(decoder.append, rewind)

    def _generate(self, contents: Tensor, num_places: int) -> StepPath:
        """transformers as it is."""
        from transformers import StaticCache

        model = self._library_model(None)
        static = StaticCache(config=model.config, max_cache_len=num_places)
        fill_library(static, contents)
        return Library(model, static, contents)


def fill_library(static: Any, contents: Tensor) -> None:
    """Put the context ``(2, L, B, G, C, w)`` into a static cache of transformers."""
    _, _, batch, num_heads, positions, width = contents.shape
    static.early_initialization(batch, num_heads, width, contents.dtype, contents.device)
    for layer, keys, values in zip(static.layers, *contents, strict=True):
        layer.keys[:, :, :positions], layer.values[:, :, :positions] = keys, values


def rewind_library(static: Any, positions: int) -> None:
    """Let a static cache of transformers hold so many positions."""
    for layer in static.layers:
        layer.cumulative_length.fill_(positions)
