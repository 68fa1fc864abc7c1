"""The MoE layers of a transformers model, as its own modules describe them.

transformers' decorator records how an experts module lays its weights out, but not its arithmetic: DeepSeek-V4 clamps
before the gate, and no flag says so. So the forward pass of each module runs on a few numbers, in float64 on the CPU,
and must answer as Comet's reference does. Blocks are asked in the same way what they do with their shared expert.

Letters: E experts, D hidden size, F hidden columns of an expert, K experts of a token.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils import parametrize

from comet.config import MOE_DTYPES, MoEConfig, require
from comet.errors import UnavailableError
from comet.integrations.hf.adapters import unadapted
from comet.integrations.hf.settings import explained, read_config
from comet.kernels.runtime.activation import Activation
from comet.layout import Biases
from comet.reference.layer import reference_experts
from comet.utils.hooks import HOOKS

# Fields of a configuration that transformers does not read, with the only value it routes by.
ROUTED_BY = {"deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}}
# The flags of transformers' decorator, with the only values that Comet computes. Versions before a flag existed record
# nothing, and have no experts with another value.
FLAGS = dict(has_gate=True, has_bias=False, has_post_expert_norm=False, is_transposed=False, is_concatenated=True)
GPT_OSS_FLAGS = FLAGS | dict(has_bias=True, is_transposed=True, is_concatenated=False)
# Comet's activations of gate and up, with transformers' names of their functions.
MADE_WITH = {"swiglu": "SiLU", "geglu": "GELU of the tanh form", "reglu": "ReLU"}
ADAPTED = ".base_layer"  # ends the name of experts whose parameters have adapters of PEFT
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")  # of a shared expert
OWN_EP = "_is_expert_parallel"  # transformers' own expert parallelism
TWO, WIDE, NARROW = 2, 4, 3  # E, D and F of samples
# A module that cannot run on sample numbers raises one of these.
UNFIT = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
SIZES = (0.3, 1.0, 10.0, 1e4)  # Clamps of gate and up show in the largest rows.


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The shared expert of a MoE block that adds it to its experts."""

    name: str
    ffn_size: int
    gate: str | None  # the child ``(T, D)`` -> ``(T, 1)`` whose sigmoid weighs it; ``None``: it weighs 1
    comes_first: bool  # whether the block calls it before its experts


@dataclass(frozen=True, slots=True)
class Family:
    """The common shape of a model's MoE layers, each of which was checked."""

    experts: tuple[str, ...]  # names of the experts modules, in the order of layers
    moe: MoEConfig  # routing stays the model's own and is left out
    interleaved: bool  # whether weights are gpt-oss's: transposed, gate and up in turn
    shared: SharedExpert | None

    @classmethod
    def of(cls, model: nn.Module) -> Family:
        """The family of a transformers model with its stock experts; ``ValueError`` if Comet cannot compute them."""
        found = stock_experts(model)
        kinds = {name: _moe_of(model, name, activation) for name, activation in found.items()}
        (first, moe), *_ = kinds.items()
        for name, other in kinds.items():
            require(other == moe, f"{name} must have the sizes and activation of {first}, as one group computes both")
        experts: Any = model.get_submodule(first)
        shared = None if is_interleaved(experts) else shared_expert(*block_of(model, first), moe.activation)
        return cls(tuple(found), moe, is_interleaved(experts), shared)

    @property
    def shared_ffn_size(self) -> int:
        """The width of the shared expert; 0 where there is none."""
        return 0 if self.shared is None else self.shared.ffn_size

    @classmethod
    def of_config(cls, config: Any) -> Family:
        """The family of models with a configuration, which are made without memory for it."""
        return cls.of(blueprint(config))


def require_transformers() -> None:
    """Raise ``UnavailableError`` unless a transformers with replaceable experts can be imported."""
    try:
        importlib.import_module("transformers.integrations.moe")
    except ImportError as error:
        raise UnavailableError(
            f"comet.integrations.hf needs transformers 5 or newer: pip install 'comet-moe[hf]' ({error})"
        ) from error


def moe_config(config: Any) -> MoEConfig:
    """The shape of a model's MoE layers, for ``make_expert_group``; routing stays the model's own and is left out.

    Args:
        config: Configuration of a model, or the folder that holds its ``config.json``.
    """
    require_transformers()
    return Family.of_config(config if hasattr(config, "model_type") else read_config(config)).moe


def blueprint(config: Any) -> Any:
    """A causal language model of a configuration, on the meta device."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)  # transformers would act
    with explained(f"the configuration of {config.model_type}"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def stock_experts(model: nn.Module) -> dict[str, Activation]:
    """The experts modules of a transformers model by name, each of them checked, and their activations."""
    config: Any = getattr(model, "config", None)
    require(hasattr(config, "model_type"), f"model={type(model).__name__} must be a transformers model with a config")
    for field, only in ROUTED_BY.get(config.model_type, {}).items():  # transformers takes others, and routes as ever
        value = getattr(config, field, None)
        require(value in (None, only), f"{field}={value!r} of the {config.model_type} model must be {only!r}")
    found: dict[str, Any] = {name: module for name, module in model.named_modules() if asks_registry(module)}
    rule = "must hold experts of transformers: it has no MoE layer or is converted already"
    require(bool(found), f"model={type(model).__name__} {rule}")
    return {name: _replaceable(module, name) for name, module in found.items()}


def _replaceable(module: nn.Module, name: str) -> Activation:
    """The activation of experts of which nothing is lost when others take their place."""
    activation = check_experts(module, name)
    hooked = [each for each in HOOKS if getattr(module, each)]
    lost = {
        "must be its class's: it would be lost": ["forward"] if "forward" in vars(module) else [],
        "must be empty: they would be lost, register them afterwards": hooked,
        "must not be parametrized: only the present values would stay": getattr(module, "parametrizations", ()),
        "must be off: it has split the experts already": [OWN_EP] if getattr(module, OWN_EP, False) else [],
    }
    for rule, present in lost.items():
        require(not present, f"{', '.join(present)} of {name} ({type(module).__name__}) {rule}")
    return activation


def _moe_of(model: nn.Module, name: str, activation: Activation) -> MoEConfig:
    experts: Any = model.get_submodule(name)
    num_experts, hidden_size, ffn_size = experts.down_proj.shape
    if is_interleaved(experts):
        ffn_size, hidden_size = hidden_size, ffn_size
    modules = block_of(model, name)[0].modules()
    # A router or its block has K as ``top_k``, which may be another one in each layer.
    top_k = next((each.top_k for each in modules if hasattr(each, "top_k")), None)
    return MoEConfig(
        hidden_size=hidden_size,
        ffn_size=ffn_size,
        num_experts=num_experts,
        top_k=int(top_k or model.config.num_experts_per_tok),  # type: ignore[union-attr, arg-type]
        balance="none",
        activation=activation,
        expert_bias=is_interleaved(experts),
    )


def block_of(model: nn.Module, experts: str) -> tuple[nn.Module, str]:
    """The MoE block of experts with this name, and their name in it; PEFT wraps experts that have adapters."""
    while experts.endswith(ADAPTED):
        experts = experts.removesuffix(ADAPTED)
    block, _, child = experts.rpartition(".")
    return model.get_submodule(block), child


def asks_registry(module: nn.Module) -> bool:
    """Whether a module's forward pass is that of transformers' decorator, which asks the registry of experts."""
    return hasattr(module, "is_concatenated")


def is_interleaved(experts: nn.Module) -> bool:
    """Whether experts hold their weights as gpt-oss does."""
    return not getattr(experts, "is_concatenated", True)


def check_flags(experts: nn.Module, name: str, wanted: dict[str, bool]) -> None:
    """Raise ``ValueError`` unless transformers recorded these flags of experts."""
    for flag, value in wanted.items():
        found = getattr(experts, flag, value)
        require(found == value, f"{flag}={found} of {name} ({type(experts).__name__}) must be {value}")


def check_experts(experts: nn.Module, name: str) -> Activation:
    """The activation of stock experts called ``name``; ``ValueError`` unless Comet computes what they compute."""
    module: Any = experts
    check_flags(module, name, GPT_OSS_FLAGS if is_interleaved(module) else FLAGS)
    kinds = [Activation("swiglu"), Activation("geglu"), Activation("reglu")]
    if is_interleaved(module):
        kinds = [Activation("clamped_swiglu", alpha=module.alpha, limit=module.limit)]
    activation = check_arithmetic(module, name, kinds, ("eager", "batched_mm"))
    # A look at an adapted weight would be recorded for the backward pass, once and not when it is recomputed.
    dtype = getattr(unadapted(module, "gate_up_proj"), "dtype", None)
    require(dtype in MOE_DTYPES, f"dtype={dtype} of {name} must be one of {MOE_DTYPES}")
    return activation


@torch.no_grad()
def check_arithmetic(module: Any, name: str, kinds: Sequence[Activation], implementations: Sequence[str]) -> Activation:
    """The activation by which these implementations of transformers agree with Comet; ``ValueError`` if none does."""
    tokens, w1, w2 = sample_rows(WIDE), samples(TWO, 2 * NARROW, WIDE), samples(TWO, WIDE, NARROW)
    one, biases = tokens.new_ones(TWO, 1, 1), None
    held = {"gate_up_proj": w1, "down_proj": w2, "gate_up_proj_scale_inv": one, "down_proj_scale_inv": one}
    if is_interleaved(module):
        biases = Biases(samples(TWO, 2 * NARROW), samples(TWO, WIDE))
        held = {"gate_up_proj": _in_turn(w1).mT, "gate_up_proj_bias": _in_turn(biases.b1)}
        held |= {"down_proj": w2.mT, "down_proj_bias": biases.b2}
    given = tokens, torch.arange(len(tokens), device="cpu")[:, None] % TWO, samples(len(tokens), 1).abs()
    configs = [SimpleNamespace(_experts_implementation=each) for each in implementations]
    # Experts over ranks count their own; some versions record neither flag.
    whole = {"num_experts": TWO, OWN_EP: False, "has_post_expert_norm": False}
    asked = [twin(module, _parameters=held, config=each, **whole) for each in configs]
    for activation in kinds:
        wanted = reference_experts(*given, w1, w2, activation=activation, biases=biases)
        if all(_answers(each, wanted, *given) for each in asked):
            return activation
    known = " or ".join(MADE_WITH.get(each.name, each.name) for each in kinds)
    rule = f"must compute the weighted sum of down_proj(act(gate) * up), act being {known}, and nothing else"
    raise ValueError(f"{name} ({type(module).__name__}), with act_fn={getattr(module, 'act_fn', None)}, {rule}")


def _answers(asked: Any, wanted: Tensor, *given: Tensor) -> bool:
    try:
        with torch.device("cpu"):
            return close(type(asked).forward(asked, *given), wanted)
    except UNFIT:
        return False


def _in_turn(gate_up: Tensor) -> Tensor:
    """Rows of gate and up in turn, of ``(E, 2F, ..)`` with gate first."""
    return gate_up.unflatten(1, (2, NARROW)).transpose(1, 2).flatten(1, 2)


def shared_expert(block: nn.Module, experts: str, activation: Activation) -> SharedExpert | None:
    """The shared expert that a block adds to its experts, if both compute what decode steps do with them."""
    children: dict[str, Any] = {name: each for name, each in block.named_children() if name != experts}
    found = [name for name, each in children.items() if all(hasattr(each, part) for part in PROJECTIONS)]
    altered = [each for each in (block, *map(children.get, found)) if "forward" in vars(each)]
    if len(found) != 1 or altered or not _projects(children[found[0]], activation):
        return None
    (name,) = found
    gate = next((gate for gate, each in children.items() if getattr(each, "out_features", 0) == 1), None)
    calls = _calls_of(block, experts, name, gate)
    if sorted(calls) != sorted((experts, name)):
        return None
    return SharedExpert(name, children[name].gate_proj.weight.shape[0], gate, comes_first=calls[0] == name)


@torch.no_grad()
def _projects(shared: Any, activation: Activation) -> bool:
    """Whether a shared expert is a gated MLP, all but its projections."""
    w1, w2, tokens = samples(1, 2 * NARROW, WIDE), samples(1, WIDE, NARROW), sample_rows(WIDE)
    matrices = zip(PROJECTIONS, (*w1[0].chunk(2), w2[0]), strict=True)
    asked = twin(shared, _modules=shared._modules | {name: partial(linear, weight=each) for name, each in matrices})
    ids, ones = torch.zeros(len(tokens), 1, dtype=torch.int64, device="cpu"), tokens.new_ones(len(tokens), 1)
    return _answers(asked, reference_experts(tokens, ids, ones, w1, w2, activation=activation), tokens)


@torch.no_grad()
def _calls_of(block: nn.Module, experts: str, shared: str, gate: str | None) -> list[str]:
    """The order in which a block calls its experts and its shared expert; none if it does not just add them up."""
    calls: list[str] = []

    def compute(name: str, factor: int, tokens: Tensor, *_: Tensor) -> Tensor:
        calls.append(name)
        return factor * tokens

    modules = {name: filled(each) for name, each in block.named_children() if name not in (experts, shared)}
    computed = {name: partial(compute, name, factor) for name, factor in ((experts, 3), (shared, 5))}
    own: Any = block.get_submodule(shared)
    tokens = samples(1, 3, own.gate_proj.weight.shape[1]).float()
    weight = 1.0 if gate is None else linear(tokens, modules[gate].weight).sigmoid()
    asked = twin(block, _parameters={}, _modules=modules | computed)
    return calls if _answers(asked, 3 * tokens + 5 * weight * tokens, tokens) else []


def samples(*shape: int) -> Tensor:
    """The same random numbers at each call, float64."""
    return torch.randn(*shape, dtype=torch.float64, device="cpu", generator=torch.Generator().manual_seed(47))


def sample_rows(width: int) -> Tensor:
    """Two sample rows of each scale, ``(8, width)``."""
    return samples(2 * len(SIZES), width) * torch.tensor(2 * SIZES, device="cpu")[:, None]


def close(found: Any, wanted: Tensor) -> bool:
    """Whether rows agree to about float32's rounding."""
    if not isinstance(found, Tensor) or found.numel() != wanted.numel():
        return False
    found = found.reshape(wanted.shape).double()
    return bool(((found - wanted).abs().amax(-1) <= 1e-5 * wanted.abs().amax(-1)).all())


def twin(module: nn.Module, **attributes: Any) -> Any:
    """A module of the same class and attributes, without hooks, which has other ``_parameters`` and the like."""
    made: Any = object.__new__(parametrize.type_before_parametrizations(module))
    made.__dict__ |= {name: value for name, value in vars(module).items() if name != "forward"}
    made.__dict__ |= {name: {} for name in HOOKS} | {"training": False, "_buffers": {}} | attributes
    return made


def filled(module: nn.Module) -> Any:
    """A module whose parameters and buffers are alike in all places, on the CPU."""
    tables: dict[str, Any] = {"_parameters": {}, "_buffers": {}}
    for table, found in tables.items():
        for name, each in vars(module)[table].items():
            dtype = torch.float32 if each is None or each.is_floating_point() else each.dtype
            found[name] = each if each is None else torch.full_like(each, 1 / 8, device="cpu", dtype=dtype)
    return twin(module, **tables, _modules={name: filled(each) for name, each in module.named_children()})
