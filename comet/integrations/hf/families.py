"""The Hugging Face model families Comet runs, and the checks that a model, module or configuration is one of them.

transformers' decorator records flags on an experts module, but a class may define its gate, or all of its forward pass,
itself: DeepSeek-V4 clamps before the gate, and no flag says so. So what a class defines or inherits is compared with
the methods of Mixtral's experts. The gate is one function for all classes; each has its own copy of the eager loop.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from comet.config import MOE_DTYPES, MoEConfig, require
from comet.errors import UnavailableError
from comet.integrations.hf import gpt_oss
from comet.kernels.runtime.activation import ActivationName
from comet.utils.hooks import HOOKS

# model_type -> the configuration fields that hold E and F.
FAMILIES = {
    "mixtral": ("num_local_experts", "intermediate_size"),
    "qwen2_moe": ("num_experts", "moe_intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    "deepseek_v3": ("n_routed_experts", "moe_intermediate_size"),
    gpt_oss.FAMILY: ("num_local_experts", "intermediate_size"),
}
# Fields of a configuration that transformers does not read, with the only value it routes by.
ROUTED_BY = {"deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}}
ADAPTER = "adapter_config.json"
# Fields that transformers would make up where a configuration is cut off.
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts_per_tok", "vocab_size")
# model_type -> names, in a MoE block, of its shared expert and of the gate that weighs it, if there is one.
SHARED = {"qwen2_moe": ("shared_expert", "shared_expert_gate"), "deepseek_v3": ("shared_experts", None)}
SHARED_FIRST = ("qwen2_moe",)  # Blocks of these families call their shared expert before the routed ones.
ACTIVATIONS = ("silu", "swish")
OWN_EP = "_is_expert_parallel"  # transformers' own expert parallelism
# Comet's activations of gate and up, with transformers' names of their functions.
MADE_WITH = {"swiglu": "SiLU", "geglu": "GELU of the tanh form", "reglu": "ReLU"}
# The flags that transformers' decorator records on every experts module, with the only values that Comet computes.
# Versions before a flag existed record nothing, and have no experts with another value.
EXPERT_FLAGS = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}
GPT_OSS_FLAGS = EXPERT_FLAGS | {"has_bias": True, "is_transposed": True, "is_concatenated": False}


def require_transformers() -> None:
    """Raise ``UnavailableError`` unless a transformers with replaceable experts can be imported."""
    try:
        importlib.import_module("transformers.integrations.moe")
    except ImportError as error:
        raise UnavailableError(
            f"comet.integrations.hf needs transformers 5 or newer: pip install 'comet-moe[hf]' ({error})"
        ) from error


def read_config(folder: str | Path, changes: Mapping[str, Any] | None = None) -> Any:
    """The configuration in a model's folder, with other values of some fields."""
    from transformers import AutoConfig

    path = Path(folder) / "config.json"
    _refuse_adapter(path.parent)
    require(path.is_file(), f"folder={str(folder)!r} must hold a config.json")
    content = read_settings(path)
    family = content.get("model_type")
    require(str(family) in FAMILIES, f"model_type={family!r} must be one of {', '.join(FAMILIES)}")
    experts, width = FAMILIES[str(family)]
    # The number of experts may have a name that transformers gives it in all families.
    found = content | {experts: content.get(experts, content.get("num_local_experts"))}
    missing = ", ".join(name for name in (*SIZES, experts, width) if not isinstance(found.get(name), int))
    require(not missing, f"{path} must hold whole numbers for {missing}, as that of a {family} model does")
    with _explained(path):
        config, unknown = AutoConfig.from_pretrained(
            folder, local_files_only=True, return_unused_kwargs=True, **(changes or {})
        )
    names = ", ".join(unknown)
    require(not unknown, f"{names} must be arguments of load_pretrained or from_pretrained, or fields of {path}")
    return config


def read_generation_config(folder: Path) -> Any:
    """The defaults of generation in a model's folder; ``None`` where it has none."""
    from transformers import GenerationConfig

    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    end_ids(read_settings(path), str(path))
    with _explained(path):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)


def end_ids(settings: Mapping[str, Any], where: str) -> frozenset[int]:
    """The tokens that end a sequence: ``eos_token_id`` of a configuration, which is a number or a list of them."""
    found = settings.get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    usable = all(type(each) is int and each >= 0 for each in ids)  # True would be token 1
    require(usable, f"eos_token_id={found!r:.60} of {where} must be a token's number from 0 on, or a list of them")
    return frozenset(ids)


def read_settings(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ``ValueError`` if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, or no UTF-8
        raise ValueError(f"{path} must be JSON, is it complete? {error}") from error
    require(isinstance(content, dict), f"{path} must hold settings by name, not {content!r:.40}")
    return dict(content)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Name a file that transformers refuses."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (TypeError, KeyError, AttributeError, ValueError, StrictDataclassError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{path} has a value that transformers does not take: {said}") from error


def _refuse_adapter(folder: Path) -> None:
    """Raise ``ValueError`` for the folder of an adapter, which transformers would load with its base model."""
    path = folder / ADAPTER
    if path.is_file():
        base = read_settings(path).get("base_model_name_or_path")
        raise ValueError(
            f"folder={str(folder)!r} must hold a whole model, but is an adapter of {base!r} ({ADAPTER}): save the "
            "merged model (merge_and_unload), or load the base model and add the adapter (peft.PeftModel)"
        )


def check_family(config: Any) -> None:
    """Raise ``ValueError`` unless Comet runs models of a configuration's family and activation."""
    family, activation = config.model_type, getattr(config, "hidden_act", None)
    require(family in FAMILIES, f"model_type={family!r} must be one of {', '.join(FAMILIES)}")
    require(activation in ACTIVATIONS, f"hidden_act={activation!r} of the {family} model must be one of {ACTIVATIONS}")
    for name, only in ROUTED_BY.get(family, {}).items():  # transformers takes other values, and routes as ever
        value = getattr(config, name, None)
        require(value in (None, only), f"{name}={value!r} of the {family} model must be {only!r}")


def moe_config(config: Any) -> MoEConfig:
    """The shape of a model's MoE layers, for ``make_expert_group``; routing stays the model's own and is left out.

    Args:
        config: Configuration of a supported model, or the folder that holds its ``config.json``.
    """
    require_transformers()
    if not hasattr(config, "model_type"):
        config = read_config(config)
    check_family(config)
    experts_field, ffn_field = FAMILIES[config.model_type]
    of_experts: dict[str, Any] = {}
    if config.model_type == gpt_oss.FAMILY:
        of_experts = dict(activation=gpt_oss.activation_of(config), expert_bias=True)
    return MoEConfig(
        hidden_size=config.hidden_size,
        ffn_size=getattr(config, ffn_field),
        num_experts=getattr(config, experts_field),
        top_k=config.num_experts_per_tok,
        balance="none",
        **of_experts,
    )


def num_moe_layers(config: Any) -> int:
    """Layers of a supported model that have routed experts.

    Example: DeepSeek-V3: 61 layers, the first 3 without: 58.
    """
    layers = range(config.num_hidden_layers)
    if config.model_type == "deepseek_v3":
        return len(layers[config.first_k_dense_replace :])
    if config.model_type in ("mixtral", gpt_oss.FAMILY):
        return len(layers)
    step, dense = config.decoder_sparse_step, config.mlp_only_layers
    return sum(layer not in dense and (layer + 1) % step == 0 for layer in layers)


def context_of(config: Any) -> int:
    """Most tokens of a sequence: ``max_position_embeddings``, or more where RoPE scales the trained positions.

    Example: 40,960, and YaRN of factor 4 over 32,768 trained positions, as model cards add it: 131,072.
    """
    rope, given = getattr(config, "rope_parameters", None) or {}, int(config.max_position_embeddings)
    trained, factor = rope.get("original_max_position_embeddings") or given, rope.get("factor")
    return max(given, int(trained * factor)) if isinstance(factor, int | float) else given


def shared_ffn_size(config: Any) -> int:
    """F_shared, the width of a supported model's shared expert; 0 where it has none."""
    if config.model_type == "qwen2_moe":
        return int(config.shared_expert_intermediate_size)
    if config.model_type == "deepseek_v3":
        return int(config.n_shared_experts or 0) * int(config.moe_intermediate_size)
    return 0


def check_experts(experts: nn.Module, name: str, activations: Collection[str] = ("swiglu",)) -> None:
    """Raise ``ValueError`` unless a module called ``name`` is stock experts that Comet can compute."""
    check_kind(experts, name, activations=activations)
    dtype: Any = getattr(experts, "gate_up_proj", torch.empty(0, dtype=torch.uint8)).dtype
    require(dtype in MOE_DTYPES, f"dtype={dtype} of {name} must be one of {MOE_DTYPES}")


_METHODS = ("forward", "_apply_gate", "linear")


def check_kind(
    experts: nn.Module,
    name: str,
    like: type[nn.Module] | None = None,
    activations: Collection[str] = ("swiglu",),
) -> None:
    """Raise ``ValueError`` unless experts are gated, gate before up, without extras and as ``like``, or gpt-oss's.

    Args:
        like: A class that has the methods of the experts' own; ``None``: Mixtral's experts, or gpt-oss's.
    """
    flags, is_gpt_oss, kind = EXPERT_FLAGS, like is None and gpt_oss.is_gpt_oss(experts), type(experts)
    if is_gpt_oss:
        flags, like = GPT_OSS_FLAGS, gpt_oss.stock_class()
    for flag, value in flags.items():
        found = getattr(experts, flag, value)
        require(found == value, f"{flag}={found} of {name} ({kind.__name__}) must be {value}")
    known: Any = like or _mixtral_experts()
    methods = [(method, getattr(kind, method, None), getattr(known, method, None)) for method in _METHODS]
    # A forward pass of the object's own is around the class's: it is called all the same.
    others = [method for method, own, wanted in methods if not _same_method(own, wanted)]
    others += [method for method in _METHODS[1:] if method in experts.__dict__]
    rule = f"must be as in {known.__name__}: Comet computes the weighted sum of down_proj(act(gate) * up), or gpt-oss's"
    require(not others, f"{', '.join(others)} of {name} ({kind.__name__}) {rule} experts, and nothing else")
    activation: Any = getattr(experts, "act_fn", None)
    rule = f"must be {' or '.join(MADE_WITH[each] for each in activations)}"
    known = is_gpt_oss or activation_name(activation) in activations
    require(known, f"act_fn={activation} of {name} ({kind.__name__}) {rule}")


def stock_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The experts modules of a supported transformers model by name, each of them checked."""
    config: Any = getattr(model, "config", None)
    require(hasattr(config, "model_type"), f"model={type(model).__name__} must be a transformers model with a config")
    check_family(config)
    found = {name: module for name, module in model.named_modules() if hasattr(module, "is_concatenated")}
    rule = "must hold experts of transformers: it has no MoE layer or is converted already"
    require(bool(found), f"model={type(model).__name__} {rule}")
    for name, module in found.items():
        check_experts(module, name)
        hooked = [each for each in HOOKS if getattr(module, each)]
        lost = {
            "must be its class's: it would be lost": ["forward"] if "forward" in vars(module) else [],
            "must be empty: they would be lost, register them afterwards": hooked,
            "must not be parametrized: only the present values would stay": getattr(module, "parametrizations", ()),
            "must be off: it has split the experts already": [OWN_EP] if getattr(module, OWN_EP, False) else [],
        }
        for rule, present in lost.items():
            require(not present, f"{', '.join(present)} of {name} ({type(module).__name__}) {rule}")
    return found


def activation_name(function: Any) -> ActivationName | None:
    """Comet's name of experts whose gate goes through this module or function; ``None``: it has none."""
    return "swiglu" if function is functional.silu else _names_of_forwards().get(_class_forward(function))


def is_stock(module: nn.Module, family: str) -> bool:
    """Whether a module's forward pass is defined in the file that transformers has for a family of models."""
    return getattr(_class_forward(module), "__module__", None) == f"transformers.models.{family}.modeling_{family}"


def asks_registry(module: nn.Module) -> bool:
    """Whether a module's forward pass is that of transformers' decorator, which asks the registry of experts."""
    return getattr(type(module).forward, "__code__", None) is _mixtral_experts().forward.__code__


def _class_forward(module: Any) -> Any:
    """The forward pass of a module's class; ``None`` where the module has one of its own, or there is no module."""
    return None if "forward" in getattr(module, "__dict__", {}) else getattr(type(module), "forward", None)


@cache
def _mixtral_experts() -> Any:
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    return MixtralExperts


@cache
def _names_of_forwards() -> dict[Any, ActivationName]:
    """Names of activations by the forward passes of modules; those of GELU are spellings of its tanh form."""
    from transformers.activations import ACT2FN, SiLUActivation

    spelt: dict[str, ActivationName] = {"gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "gelu_fast": "geglu"}
    found = {type(ACT2FN[name]).forward: made for name, made in spelt.items()}
    return {**found, nn.ReLU.forward: "reglu", nn.SiLU.forward: "swiglu", SiLUActivation.forward: "swiglu"}


@cache
def _same_method(found: Any, known: Any) -> bool:
    """Whether two functions compute the same, each perhaps within the decorator's function, which must be there."""
    if found is known or found is None or known is None:
        return found is known
    decorator = known.__code__ if hasattr(known, "__wrapped__") else None
    if decorator is not None and getattr(found, "__code__", None) is not decorator:
        return False
    found, known = (
        inspect.unwrap(each, stop=lambda inner: getattr(inner, "__code__", None) is not decorator)
        for each in (found, known)
    )
    return hasattr(found, "__code__") and _statements(found) == _statements(known) and not found.__code__.co_freevars


def _statements(function: Any) -> tuple[Any, ...]:
    """The statements of a function, without its comments and the names of its variables."""
    code = function.__code__
    constants = tuple(constant for constant in code.co_consts if constant != function.__doc__)
    return code.co_code, code.co_names, constants, code.co_argcount, function.__defaults__
