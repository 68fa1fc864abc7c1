"""Comet by its name in transformers, ``experts_implementation="comet"``: stock modules keep their weights.

A block FP8 folder meets transformers' own quantiser on the way, which needs accelerate. Without a GPU it dequantises
the weights; what it gets wrong there is refused. On a GPU it keeps experts in FP8, which have a class and a registry of
their own, and computes all other layers by kernels that it downloads. ``load_pretrained`` needs none of it.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils.parametrize import type_before_parametrizations

from comet.comm.handshake import largest
from comet.config import DIM_MULTIPLE, MoEConfig, require
from comet.decode.runners import DECODE_TOKENS, DataParallelDecode, LocalRunner
from comet.integrations.hf import gpt_oss
from comet.integrations.hf.adapters import trained_adapters, unadapted
from comet.integrations.hf.families import (
    FLAGS,
    asks_registry,
    check_arithmetic,
    check_experts,
    check_flags,
    is_interleaved,
    require_transformers,
)
from comet.integrations.hf.fp8 import kept_weights, run_kept
from comet.integrations.hf.modules import operands
from comet.integrations.hf.stored import (
    BLOCK_FP8,
    INDEX_FILE,
    SCALE_DTYPES,
    SCALES,
    SINGLE_FILE,
    StoredTensor,
    open_checkpoint,
    some,
)
from comet.kernels.runtime.activation import SWIGLU, Activation
from comet.kernels.runtime.arguments import power_of_2
from comet.layer.group import join_expert_group
from comet.layout import Biases, ExpertLayout, RoutedTokens, gate_first
from comet.quantization.formats import FP8_BLOCK
from comet.reference.plain import plain_experts

IMPLEMENTATION = "comet"
_NAME = "the model's experts"
_CHECKED = "_comet_checked"  # attribute for the kind of a module that was checked, and its activation
_CONFIG = "config.json"
_SCALE_NAMES = (".weight_scale_inv", ".scale", ".qscale_weight")  # instead of ".weight"
_RULE = "comet.integrations.hf.load_pretrained(folder) dequantises block FP8, with keep_fp8=True it keeps the experts"


def register() -> None:
    """Make ``experts_implementation="comet"`` known to transformers; calling it again changes nothing.

    Then ``from_pretrained(..., experts_implementation="comet")`` and ``model.set_experts_implementation("comet")``
    run the stock modules' weights through Comet, on one GPU or under transformers' own expert parallelism. Models whose
    experts do not ask the registry (Llama-4, DBRX, JetMoE, LongCat-Flash) take any name and never call Comet, which
    nothing can notice by itself: ``check(model)`` says so, and names all else that Comet cannot compute.
    """
    require_transformers()
    from transformers.integrations import finegrained_fp8
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(IMPLEMENTATION, comet_experts_forward)
    if hasattr(finegrained_fp8, "FP8ExpertsInterface"):  # older versions leave FP8 experts no choice
        finegrained_fp8.FP8ExpertsInterface.register(IMPLEMENTATION, comet_fp8_experts_forward)
    if find_spec("transformers.distributed.expert_parallel"):  # older versions have none
        from transformers.distributed.expert_parallel import EPImplementationInterface

        EPImplementationInterface.register(IMPLEMENTATION, CometEP)


def check_named(model: nn.Module) -> None:
    """Check every experts module of a model that is to call Comet by its name, before any of them does."""
    require_transformers()
    modules = dict(model.named_modules())
    asking: dict[str, Any] = {name: module for name, module in modules.items() if asks_registry(module)}
    found = {name: each for name, each in asking.items() if each.config._experts_implementation == IMPLEMENTATION}
    deaf = {type(module).__name__ for name, module in modules.items() if name not in asking}
    named = ", ".join(sorted(kind for kind in deaf if "Expert" in kind))
    others = f"; {named} do not" if named else ""
    ways = f"convert it, or give experts_implementation={IMPLEMENTATION!r} where experts ask transformers' registry"
    require(bool(found), f"model={type(model).__name__} must have experts that call Comet: {ways}{others}")
    check_dequantized(getattr(model, "config", None))
    for name, module in found.items():
        if hasattr(module, "gate_up_proj_scale_inv"):
            check_fp8_experts(module, name)
        else:
            check_experts(module, name)


@torch.compiler.disable
def comet_experts_forward(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute ``(T, D)`` of a stock experts module, or gpt-oss's, by Comet.

    Ids of ``top_k_index (T, K)`` from E on are experts of other ranks, which contribute nothing.
    """
    module: Any = experts
    activation, interleaved = _checked_activation(module), is_interleaved(module)
    _, *sizes = unadapted(module, "down_proj").shape
    # Warp decode takes multiples only, unlike F = 24 of F = 48 over two ranks.
    takes_steps = not any(size % DIM_MULTIPLE for size in sizes)
    top_k, in_step = top_k_index.shape[1], takes_steps and gpt_oss.is_step(hidden_states, DECODE_TOKENS)
    adapters = trained_adapters(module) if torch.is_grad_enabled() else None
    tokens, w1, w2, biases = operands(module, hidden_states, in_step=in_step, without_adapters=adapters is not None)
    routed = RoutedTokens(tokens, _local_ids(module, top_k_index, len(w1)), top_k_weights.float())
    if takes_steps and adapters is None:
        output = LocalRunner(top_k, activation=activation, interleaved=interleaved)(routed, w1, w2, biases)
    else:
        layout = ExpertLayout(num_experts=w2.shape[0], top_k=top_k, ep=1, tp=1, rank=0)
        output = plain_experts(
            routed, w1, w2, layout, None, activation, biases, interleaved=interleaved,
            adapters=adapters or (None, None),
        )  # fmt: skip
    return output.to(hidden_states.dtype)


def _checked_activation(module: Any) -> Activation:
    """The activation of experts, which are checked at their first call and when they became others.

    peft gives experts with adapters a class of their own at each call.
    """
    kind = (
        type_before_parametrizations(module),
        unadapted(module, "down_proj").dtype,
        getattr(module, "act_fn", None),
        module.__dict__.get("_apply_gate"),
    )
    checked = module.__dict__.get(_CHECKED, (None, SWIGLU))
    if checked[0] != kind:
        checked = module.__dict__[_CHECKED] = kind, check_experts(module, _NAME)
        check_dequantized(module.config)
    activation: Activation = checked[1]
    return activation


@torch.compiler.disable
def comet_fp8_experts_forward(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """``comet_experts_forward`` of experts that transformers keeps in block FP8, whose weights get no gradient.

    Activations stay in the model's type, where transformers' own kernels quantise them.
    """
    module: Any = experts
    kept = kept_weights(module, partial(_checked_slots, module))
    routed = RoutedTokens(hidden_states, _local_ids(module, top_k_index, len(kept.w1)), top_k_weights.float())
    return run_kept(LocalRunner(top_k_index.shape[1]), routed, kept)


def _checked_slots(experts: Any) -> Tensor:
    check_fp8_experts(experts, _NAME)
    return torch.arange(len(experts.gate_up_proj), dtype=torch.int32, device=experts.gate_up_proj.device)


def check_fp8_experts(experts: Any, name: str) -> None:
    """Raise ``ValueError`` unless a module called ``name`` is FP8 experts of transformers that Comet can compute."""
    check_flags(experts, name, FLAGS)
    block = (FP8_BLOCK, FP8_BLOCK)
    found = {
        "weight_block_size": (tuple(experts.block_size or ()), block),
        "activation_scheme": (experts.activation_scheme, "dynamic"),
        "dtype": (experts.gate_up_proj.dtype, torch.float8_e4m3fn),
    }
    for field, (value, wanted) in found.items():
        require(value == wanted, f"{field}={value} of {name} must be {wanted}; {_RULE}")
    check_arithmetic(experts, name, [SWIGLU], ("eager",))  # The other implementations are kernels for a GPU.
    scales, ffn_size = experts.gate_up_proj_scale_inv.dtype, experts.down_proj.shape[2]
    known = tuple(SCALE_DTYPES.values())
    require(scales in known, f"scales of dtype {scales} of {name} must be one of {known}; {_RULE}")
    # Else up would begin inside a block, and transformers lays each half's scales out by itself.
    require(ffn_size % FP8_BLOCK == 0, f"ffn_size={ffn_size} of {name} must be a multiple of {FP8_BLOCK}; {_RULE}")


def _local_ids(experts: Any, top_k_index: Tensor, count: int) -> Tensor:
    """Ids of this rank's ``count`` experts, int32; -1 for those of other ranks."""
    ids = top_k_index.to(torch.int32)
    if getattr(experts, "_is_expert_parallel", True):  # older versions do not say
        ids = ids.masked_fill(ids >= count, -1)
    return ids


@cache
def experts_of_ranks(
    ranks: ProcessGroup, moe: MoEConfig, max_tokens: int, dtype: torch.dtype, device: torch.device
) -> DataParallelDecode:
    """The experts of layers of one shape over an EP group, for so many tokens of a rank (collective at the first call).

    transformers has no place that all layers of a model share, and closes nothing of theirs: the memory stays until the
    process ends.
    """
    group = join_expert_group(ranks, moe, max_tokens=max_tokens, dtype=dtype, device=device)
    return DataParallelDecode(moe, group)


class CometEP:
    """A layer's experts over the ranks of an EP mesh, each with its own tokens: an ``EPImplementation``."""

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        advice = "its ranks share their tokens, which ep_implementation='auto' takes"
        require(tp_mesh.size() == 1, f"tp_size={tp_mesh.size()} must be 1 with ep_implementation='comet': {advice}")
        self.experts, self.activation = experts, check_experts(experts, _NAME)
        self.ranks, self.num_experts = ep_mesh.get_group(), experts.num_experts * ep_mesh.size()
        _, *sizes = experts.down_proj.shape
        self.hidden_size, self.ffn_size = reversed(sizes) if is_interleaved(experts) else sizes

    @torch.compiler.disable
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return ``(T, D)``, the weighted sum of each token's experts; the host waits, as transformers' own does."""
        tokens, w1, w2, biases = operands(self.experts, hidden_states, in_step=False)
        if is_interleaved(self.experts):
            w1, biases = gate_first(w1, -2), biases and Biases(gate_first(biases.b1, -1), biases.b2)
        moe = MoEConfig(
            hidden_size=self.hidden_size, ffn_size=self.ffn_size, activation=self.activation, balance="none",
            num_experts=self.num_experts, top_k=top_k_index.shape[1],
            expert_bias=biases is not None,
        )  # fmt: skip
        most = int(largest([len(tokens)], tokens.device, self.ranks)[0])
        computed = experts_of_ranks(self.ranks, moe, power_of_2(max(most, 1)), tokens.dtype, tokens.device)
        computed.check()
        routed = RoutedTokens(tokens, top_k_index.int(), top_k_weights.float())
        return computed(routed, w1.contiguous(), w2.contiguous(), biases, most_tokens=most)


def check_dequantized(config: Any) -> None:
    """Raise ``ValueError`` if transformers dequantised the weights of a model with this configuration wrongly.

    It takes a tensor's rows over those of its scales for the height of a block: 192 rows of two scales become blocks of
    96. And an element without a scale stays a raw value. Neither can be seen in the model, but both in its folder.
    """
    name = getattr(config, "name_or_path", "")
    if not name or getattr(config, "quantization_config", None) is not None:
        return  # made without a folder, or kept as it is quantised
    from transformers.utils import cached_file

    try:
        found = cached_file(name, _CONFIG, local_files_only=True, revision=getattr(config, "_commit_hash", None))
    except OSError:
        return  # the folder is gone
    if found is not None:
        _check_folder(Path(found).parent, Path(found).stat().st_mtime_ns)


@cache
def _check_folder(folder: Path, _written_ns: int) -> None:
    """Reads no tensor, and the folder once for all layers, until its ``config.json`` is written again."""
    settings = json.loads((folder / _CONFIG).read_text()).get("quantization_config") or {}
    has_tensors = (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file()
    if settings.get("quant_method") != "fp8" or not has_tensors:
        return
    with ExitStack() as files:
        tensors = open_checkpoint(folder, files)
    wrong = [name for name, tensor in tensors.items() if _is_wrong(tensor, tensors, settings.get("weight_block_size"))]
    rule = f"must have scales, and be one block or whole blocks of {settings.get('weight_block_size')}"
    advice = "transformers dequantises others wrongly, use comet.integrations.hf.load_pretrained(folder)"
    require(not wrong, f"{some(wrong)} of {folder} {rule}: {advice}")


def _is_wrong(tensor: StoredTensor, tensors: dict[str, StoredTensor], block: list[int] | None) -> bool:
    if tensor.dtype != BLOCK_FP8:
        return False
    names = tensor.name + SCALES, *(tensor.name.removesuffix(".weight") + ending for ending in _SCALE_NAMES)
    scales = next((tensors[name] for name in names if name in tensors), None)
    if scales is None:
        return True
    sizes = zip(tensor.shape[-2:], scales.shape[-2:], block or (), strict=False)
    return any(count > 1 and size % side for size, count, side in sizes)
