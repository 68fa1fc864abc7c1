"""Megatron's MoE layer with Comet between router and output, in a model's spec; what Comet takes of a configuration.

In a distributed checkpoint the experts of a layer are two tensors, ``experts.linear_fc1.weight (E, 2F, h)`` and
``experts.linear_fc2.weight (E, h, F)``, and where they have biases two more, ``bias (E, 2F)`` and ``(E, h)``, as
``SequentialMLP`` writes them. Its extra states, which are empty, are not written: it reads Comet's checkpoints with
``strict=StrictHandling.LOG_UNEXPECTED``. Comet reads its as they are.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import relu, silu

from comet.capabilities import missing, refuse
from comet.config import MoEConfig, OverlapConfig, PathName, require
from comet.errors import UnavailableError
from comet.kernels.runtime.activation import Activation, ActivationName
from comet.layer.expert_path import ExpertPath
from comet.layer.group import ExpertGroup
from comet.layer.paths import make_path, path_to_train
from comet.layout import Biases, RoutedTokens
from comet.limits import check_values, equal_to, one_of
from comet.utils.autocast import in_dtype

NEEDS = "comet.integrations.megatron needs Megatron-core 0.16 to 0.19: pip install 'comet-moe[megatron]'"
MEGATRON = "with Megatron's layers"
LOCAL_EXPERT = re.compile(r"(.*)local_experts\.(\d+)\.(.+)")
STORED = ("linear_fc1.weight", "linear_fc2.weight", "linear_fc1.bias", "linear_fc2.bias")


class CometMoELayer:
    """Router, load-balancing losses and shared experts of Megatron's ``MoELayer``; routed experts of Comet.

    ``with_comet`` mixes it into ``MoELayer``, which cannot be imported everywhere. Tokens dropped by an expert capacity
    skip the expert, and padding counts in no loss but goes through the experts, both as in Megatron.

    Args:
        submodules: Router and shared experts; the experts in it are not built.
        process_groups: Taken where ``pg_collection`` is ``None``: Megatron-core 0.16 does not hand its own to layers it
            does not know.
    """

    experts: CometExperts
    route: Any
    shared_experts_compute: Any

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        *,
        choices: Choices,
        process_groups: Any = None,
        **kwargs: Any,
    ) -> None:
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
        from megatron.core.transformer.spec_utils import ModuleSpec

        process_groups = pg_collection or process_groups or get_default_pg_collection()
        check_config(config, choices.group)
        check_ranks(process_groups, choices.group)
        submodules = replace(submodules, experts=ModuleSpec(module=CometExperts, params={"choices": choices}))
        super().__init__(config, submodules, layer_number, process_groups, **kwargs)  # type: ignore[call-arg]
        # Steps of MoELayer that are not called any more fail with it, instead of computing something else.
        self.token_dispatcher = None

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Run the layer on ``(s, b, h)``, at most ``max_tokens`` of the group.

        Args:
            intermediate_tensors: ``None``; Megatron's own layer resumes from them after a part in a CUDA graph.
            padding_mask: ``(b, s)``, true where a token is padding.
        """
        refuse(MEGATRON, intermediate_tensors=intermediate_tensors)
        ranks, sequence = self.attn_tp_group.size(), self.config.sequence_parallel  # type: ignore[attr-defined]
        require(
            sequence or ranks == 1 or not self.training,  # type: ignore[attr-defined]
            f"sequence_parallel={sequence} must be True in training with tensor_model_parallel_size={ranks}, or ranks "
            "train experts on the same tokens twice",
        )
        mask = None if padding_mask is None else padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute:  # type: ignore[attr-defined]
            from megatron.core.tensor_parallel import checkpoint

            return checkpoint(self._compute, False, hidden_states, mask), None
        return self._compute(hidden_states, mask), None

    def backward_dw(self, routed_experts: bool = True, shared_experts: bool = False) -> None:
        """Nothing is left to do: ``delay_wgrad_compute`` is off."""

    def _compute(self, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        shared = self.shared_experts_compute(hidden_states)
        probs, routing_map = self.route(hidden_states, padding_mask)
        ids, weights = top_k_of(probs, routing_map, self.experts.layout.top_k)
        routed = self.experts(hidden_states.flatten(0, 1), ids, weights).view_as(hidden_states)
        return routed if shared is None else routed + shared


def top_k_of(probs: Tensor, routing_map: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Megatron's routing as Comet takes it: ids ``(T, K)`` int32, largest first, and weights, differentiable in
    ``probs``.

    Example: probs ``[[0, 0.3, 0.7], [0, 0, 0.6]]``, true in the map where positive, K=2: ids ``[[2, 1], [2, -1]]``,
    weights ``[[0.7, 0.3], [0.6, 0]]``; the second token was dropped by one of its experts.
    """
    found, wanted = (routing_map.dtype, routing_map.shape), (torch.bool, probs.shape)
    require(found == wanted, f"routing_map of dtype and shape {found} must be of {wanted}")
    ids = probs.detach().masked_fill(~routing_map, -torch.inf).topk(top_k, dim=1).indices
    dropped = ~routing_map.gather(1, ids)
    weights = probs.gather(1, ids).masked_fill(dropped, 0.0)
    return ids.masked_fill(dropped, -1).int(), weights.float()


def with_comet(
    spec: Any,
    group: ExpertGroup,
    *,
    path: PathName | str = "auto",
    overlap: OverlapConfig | None = None,
    max_imbalance: float | None = None,
    process_groups: Any = None,
) -> Any:
    """A spec whose MoE layers are Comet's, with ``path``, ``overlap`` as of ``MoE`` and ``max_imbalance`` of
    ``MoEConfig``.

    On a GPU what goes wrong in a layer shows in ``group.workspace.check()``, which waits for it: call it once per step.
    Where gradients are reduced while layers run (``overlap_grad_reduce``), ``reserved_sms`` of the group let
    NCCL run during layer 1, not after it.

    Args:
        spec: Of a transformer layer (``get_gpt_layer_local_spec`` and the like), or of a block of such layers
            (``get_gpt_decoder_block_spec``); layers without experts stay.
        group: Made by ``make_expert_group(moe_config(config), ...)``, for the ranks of Megatron's expert groups.
        process_groups: The ``ProcessGroupCollection`` that the model is built with, where it is not Megatron's global
            one: Megatron-core 0.16 does not pass it on.
    """
    try:
        check_version(importlib.import_module("megatron.core").__version__)
        stock = importlib.import_module("megatron.core.transformer.moe.moe_layer").MoELayer
    except ImportError as error:
        raise UnavailableError(NEEDS) from error
    choices = Choices(group=group, path=path, overlap=overlap, max_imbalance=max_imbalance)
    settings = dict(choices=choices, process_groups=process_groups)
    layers = getattr(spec, "layer_specs", None)
    ours = type(CometMoELayer.__name__, (CometMoELayer, stock), {"__doc__": CometMoELayer.__doc__})
    made = [_layer_with_comet(layer, stock, ours, settings) for layer in ([spec] if layers is None else layers)]
    rule = "must have a layer whose mlp is Megatron's MoELayer: its num_experts is not set"
    require(any(layer is not None for layer in made), f"spec {rule}")
    if layers is None:
        return made[0]
    return replace(spec, layer_specs=[new or old for new, old in zip(made, layers, strict=True)])


def check_version(found: str) -> None:
    """Raise ``ValueError`` unless Comet's layer fits this version of Megatron-core."""
    fits = re.match(r"0\.(1[6-9])\.", found)
    require(
        fits is not None, f"megatron.core.__version__={found} must be 0.16 to 0.19, whose layers Comet extends: {NEEDS}"
    )


def _layer_with_comet(layer: Any, stock: type, ours: type, settings: dict[str, Any]) -> Any:
    """A transformer layer's spec with Comet; ``None`` if it has no MoE layer."""
    mlp = layer.submodules.mlp
    if getattr(mlp, "module", None) is stock:
        new = replace(mlp, module=ours, params={**mlp.params, **settings})
    elif isinstance(mlp, partial) and mlp.func is stock:  # Megatron-core 0.17 and later
        new = partial(ours, *mlp.args, **mlp.keywords, **settings)
    else:
        return None
    return replace(layer, submodules=replace(layer.submodules, mlp=new))


def moe_config(config: Any, *, max_imbalance: float | None = None) -> MoEConfig:
    """The shape of a Megatron model's MoE layers, for ``make_expert_group``; Megatron does the routing."""
    experts = config.num_moe_experts
    require(bool(experts), f"num_moe_experts={experts} must be at least 1: the model has no MoE layers")
    return MoEConfig(
        hidden_size=config.hidden_size,
        ffn_size=config.moe_ffn_hidden_size or config.ffn_hidden_size,
        num_experts=experts,
        top_k=config.moe_router_topk,
        balance="none",
        max_imbalance=max_imbalance,
        activation=activation_of(config),
        expert_bias=bool(config.add_bias_linear),
    )


def activation_of(config: Any) -> Activation:
    """How gate and up become hidden in a Megatron model."""
    gated, function = config.gated_linear_unit, config.activation_func
    require(gated, f"gated_linear_unit={gated} must be True: experts have a gate")
    names: dict[Any, ActivationName] = {silu: "swiglu", relu: "reglu"}
    with suppress(ImportError):
        theirs = importlib.import_module("megatron.core.activations")
        names |= {theirs.fast_gelu: "geglu", theirs.quick_gelu: "clamped_swiglu"}
    rule = "must be silu, relu, or fast_gelu (of tanh) or quick_gelu of megatron.core.activations"
    require(function in names, f"activation_func={getattr(function, '__name__', function)} {rule}")
    limit = getattr(config, "activation_func_clamp_value", None)
    offset = getattr(config, "glu_linear_offset", 0.0) or 0.0
    if names[function] == "clamped_swiglu":
        require(bool(limit), f"activation_func_clamp_value={limit} must be above 0 for activation_func=quick_gelu")
        check_values(equal_to(1.0, "activation_func=quick_gelu adds 1 to up"), glu_linear_offset=offset)
        return Activation("clamped_swiglu", limit=limit)
    refuse("without activation_func=quick_gelu", activation_func_clamp_value=limit, glu_linear_offset=offset)
    return Activation(names[function])


def check_config(config: Any, group: ExpertGroup) -> None:
    """Raise ``ValueError``, naming field, value and rule, for what Comet's experts would compute otherwise."""
    refuse(MEGATRON, **{name: getattr(config, name, None) for name in missing(MEGATRON)})  # or versions have no such
    if config.add_bias_linear:
        refuse("with biases of Megatron's experts", use_mup=getattr(config, "use_mup", None))
    activation_of(config)
    check_values(one_of("allgather", "alltoall"), moe_token_dispatcher_type=config.moe_token_dispatcher_type)
    # Megatron casts hidden states to bf16 or fp16 where these are set, whatever ``params_dtype`` is.
    dtype = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else config.params_dtype
    wanted = group.workspace.shape.dtype
    require(dtype == wanted, f"dtype={dtype} of the model's tokens must be the group's {wanted}")


def check_ranks(process_groups: Any, group: ExpertGroup) -> None:
    """Raise ``ValueError`` unless Megatron gives experts to the same ranks, in the same order, as Comet's group.

    Example: EP=2 and TP=2 over the ranks 4..7: rank 6 has the EP ranks [4, 6] and the expert TP ranks [6, 7].
    """
    ep, tp = group.parallel.ep, group.parallel.tp
    first, shard, column = group.world_rank - group.rank, *divmod(group.rank, tp)
    wanted = {
        "ep": ("expert_model_parallel_size", [first + tp * other + column for other in range(ep)]),
        "expt_tp": ("expert_tensor_parallel_size", [first + tp * shard + other for other in range(tp)]),
    }
    for name in (*wanted, "expt_dp"):
        given = getattr(process_groups, name, None)
        require(given is not None, f"{name} of the process groups must be given: experts live in it")
    for name, (size, ranks) in wanted.items():
        found = dist.get_process_group_ranks(getattr(process_groups, name))
        check_values(equal_to(len(ranks), f"Comet's group has ep={ep} and tp={tp}"), **{size: len(found)})
        require(found == ranks, f"ranks={found} of Megatron's {name} group must be {ranks}, those of Comet's group")


def from_sequential(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of a model with Megatron's ``SequentialMLP``, for the same model with Comet, on the same ranks.

    Example: ``mlp.experts.local_experts.0.linear_fc1.weight (2F, h)`` and ``...local_experts.1...`` become
    ``mlp.experts.linear_fc1.weight (2, 2F, h)``; ``mlp.router.weight`` stays.
    """
    made: dict[str, Any] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for key, value in state.items():
        found = LOCAL_EXPERT.fullmatch(key)
        if found is None:
            made[key] = value
        elif not found[3].endswith("._extra_state"):
            require(found[3] in STORED, f"{key} must be one of {', '.join(STORED)}: Comet's experts have no other")
            experts.setdefault(found[1] + found[3], {})[int(found[2])] = value
    for key, parts in experts.items():
        missing = sorted(set(range(max(parts) + 1)) - set(parts))
        require(not missing, f"{key} lacks the local experts {missing}")
        made[key] = torch.stack([parts[index] for index in range(len(parts))])
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The arguments of ``with_comet`` for the routed experts of all layers."""

    group: ExpertGroup  # the ranks that share the experts, and their memory; one for all layers
    path: PathName | str
    overlap: OverlapConfig | None
    max_imbalance: float | None


class ExpertLinear(nn.Module):
    """``weight (e, rows, columns)`` and ``bias (e, rows)``, whose name spares it Megatron's weight decay."""

    def __init__(self, shape: tuple[int, int, int], has_bias: bool, **made: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, **made))
        self.bias = nn.Parameter(torch.zeros(shape[:2], **made)) if has_bias else None

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return both in a type. Megatron gathers the parameters of a module when this module is called."""
        return self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)


class CometExperts(nn.Module):
    """``linear_fc1 (e, 2F/TP, h)``, gate rows first, and ``linear_fc2 (e, h, F/TP)``, computed by one of Comet's paths.

    With ``add_bias_linear`` they have biases ``(e, 2F)`` and ``(e, h)``; Megatron allows them without expert TP.

    Every expert gets a gradient, also without tokens. Weights are drawn per global expert, with a seed from torch's CPU
    generator, which Megatron seeds alike on all ranks that hold the layer: the model does not depend on EP.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        submodules: Any = None,
        pg_collection: Any = None,
        *,
        choices: Choices,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        moe, group = moe_config(config, max_imbalance=choices.max_imbalance), choices.group
        self.layout, self.dtype = group.layout(moe), group.workspace.shape.dtype
        assert num_local_experts == self.layout.experts_local
        path = path_to_train(choices.path, moe, group, choices.overlap, replays=False)
        self.compute: ExpertPath = make_path(path, moe, group, choices.overlap)
        self.expert_data_group = pg_collection.expt_dp
        self.ffn_size = moe.ffn_size
        device = torch.device("cpu") if config.use_cpu_initialization else group.device
        width, made = moe.ffn_size // self.layout.tp, dict(device=device, dtype=config.params_dtype)
        self.linear_fc1 = ExpertLinear((num_local_experts, 2 * width, moe.hidden_size), moe.expert_bias, **made)
        self.linear_fc2 = ExpertLinear((num_local_experts, moe.hidden_size, width), moe.expert_bias, **made)
        self._mark(config.tensor_model_parallel_size)
        if config.perform_initialization:
            self.reset_parameters(config.init_method, config.output_layer_init_method)

    def _mark(self, tensor_parallel: int) -> None:
        """Say who shares a parameter's gradient (``allreduce``: all data-parallel ranks, not those of ``expt_dp``).

        All would mix parts of an expert where its TP is not the model's, as Megatron-core 0.16's own experts do.
        """
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        alike = self.layout.ep == 1 and self.layout.tp == tensor_parallel
        for name, parameter in self.named_parameters():
            parameter.allreduce = alike  # type: ignore[attr-defined]
            dim = 2 if name == "linear_fc2.weight" else 1
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)

    @torch.no_grad()
    def reset_parameters(self, init_w1: Callable[[Tensor], Any], init_w2: Callable[[Tensor], Any]) -> None:
        """Draw the matrices: of each expert ``(2F, h)`` and ``(h, F)`` as a whole, of which this slice is kept."""
        layout, fc1, fc2 = self.layout, self.linear_fc1.weight, self.linear_fc2.weight
        width = fc2.shape[2]
        columns = slice(layout.tp_rank * width, (layout.tp_rank + 1) * width)
        seed = int(torch.randint(2**48, ()))
        devices = [fc1.device] if fc1.is_cuda else []
        for local in range(layout.experts_local):
            with torch.random.fork_rng(devices=devices):  # later draws do not depend on these
                torch.manual_seed(seed + layout.first_expert + local)
                w1 = fc1.new_empty(2, self.ffn_size, fc1.shape[2])
                w2 = fc2.new_empty(fc2.shape[1], self.ffn_size)
                init_w1(w1.view(-1, w1.shape[2]))
                init_w2(w2)
            fc1[local].copy_(w1[:, columns].flatten(0, 1))
            fc2[local].copy_(w2[:, columns])

    def forward(self, tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum ``(T, h)`` of each token's experts, by ids ``(T, K)`` int32, -1 masks, and weights ``(T,
        K)`` float32.
        """
        routed = RoutedTokens(in_dtype(tokens, self.dtype), top_k_ids, top_k_weights)
        (w1, b1), (w2, b2) = (linear(routed.tokens.dtype) for linear in (self.linear_fc1, self.linear_fc2))
        biases = None if b1 is None or b2 is None else Biases(b1, b2)
        return self.compute(routed, w1, w2, biases).to(tokens.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The weights for Megatron's distributed checkpoints, under the names and shapes of ``SequentialMLP``."""
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

        refuse(MEGATRON, singleton_local_shards=(metadata or {}).get("singleton_local_shards"))
        axis, layout = len(sharded_offsets), self.layout
        whole = (0, 0, self.expert_data_group.rank())

        def part(key: str, tensor: Tensor, replica: Any, *columns: tuple[int, int, int]) -> Any:
            offsets = (*sharded_offsets, (axis, layout.ep_rank, layout.ep), *columns)
            return ShardedTensor.from_rank_offsets(key, tensor, *offsets, replica_id=replica, prepend_axis_num=axis)

        def split(key: str, tensor: Tensor, replica: Any, flattened_range: slice | None = None) -> list[Any]:
            refuse(MEGATRON, flattened_range=flattened_range)
            halves = enumerate(tensor.detach().chunk(2, dim=1))
            places = [(half.contiguous(), number * layout.tp + layout.tp_rank) for number, half in halves]
            return [part(key, half, replica, (axis + 1, place, 2 * layout.tp)) for half, place in places]

        found: dict[str, Any] = {}
        for name, tensor in self.named_parameters():
            key = f"{prefix}experts.{name}"
            if name.startswith("linear_fc1."):
                found[prefix + name] = ShardedTensorFactory(key, tensor, split, partial(torch.cat, dim=1), whole)
            else:
                columns = [(axis + 2, layout.tp_rank, layout.tp)] if name == "linear_fc2.weight" else []
                found[prefix + name] = part(key, tensor, whole, *columns)
        return found
