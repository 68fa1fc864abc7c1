"""Router: which K experts a token goes to, and with what weights.

``score -> select -> weigh``: scores come from the logits, the selection picks ids (no gradient), the weights are read
from the scores at those ids and carry the gradient. On a GPU all three are one kernel (``comet.router.kernels``), of
which the functions here are the specification. Arithmetic is float32 whatever the dtype of tokens and weight,
autocast included (torch's own TF32 switch still applies); float64 tokens stay float64, the oracle of the tests.
Nothing here waits for the GPU. Not covered: anything across ranks; loads and losses are those of this rank's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from comet.config import MoEConfig, Score, require
from comet.errors import NotFiniteError
from comet.router.losses import RouterStats, measure_routing, normalize
from comet.utils.autocast import product, without_autocast

FEW_TOKENS = 64  # up to so many, logits are a product that torch's library cuts into more blocks than there are tokens


@dataclass(frozen=True, slots=True)
class Routing:
    """The router's decision for T tokens, with the logits and scores behind it."""

    top_k_ids: Tensor  # (T, K) int32, expert of every routed row, best first; no id occurs twice in a row
    top_k_weights: Tensor  # (T, K) float32, factor of that expert's output, with gradient
    logits: Tensor  # (T, E) float32, with gradient
    scores: Tensor  # (T, E) float32, without selection bias, with gradient


class Router(nn.Module):
    """Linear router with softmax or sigmoid scores, group-limited top-k and two ways of balancing."""

    selection_bias: Tensor | None

    def __init__(
        self, config: MoEConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, device=device, dtype=dtype))
        has_bias = config.balance == "bias"
        bias = torch.zeros(config.num_experts, device=device, dtype=torch.float32) if has_bias else None
        self.register_buffer("selection_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight uniformly from ``+-1/sqrt(D)`` and set the selection bias, if any, to zero."""
        bound = self.config.hidden_size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.selection_bias is not None:
            nn.init.zeros_(self.selection_bias)

    def forward(self, tokens: Tensor) -> Routing:
        """Route tokens ``(T, D)``. On a CPU a logit that is not finite raises; on a GPU ``measure`` looks for it."""
        config, selection_bias = self.config, self.selection_bias
        require(
            tokens.dim() == 2 and tokens.shape[1] == config.hidden_size,
            lambda: f"tokens of shape {tuple(tokens.shape)} must be (T, D) with D = hidden_size={config.hidden_size}",
        )
        require(tokens.is_floating_point(), lambda: f"tokens of dtype {tokens.dtype} must be floating")
        with without_autocast(tokens.device):
            logits = compute_logits(tokens, self.weight)
            if logits.device.type == "cpu":
                check_finite(logits)
            if has_kernels(logits):
                from comet.router.kernels import select  # needs triton

                top_k_ids, top_k_weights, scores = select(logits, selection_bias, config)
            else:
                scores = score_logits(logits, config.score)
                top_k_ids = select_experts(_selection_scores(logits, scores, selection_bias, config), config)
                top_k_weights = weigh_experts(scores, top_k_ids, config)
        return Routing(top_k_ids.int(), top_k_weights, logits, scores)

    def measure(
        self, logits: Tensor, scores: Tensor, top_k_ids: Tensor, *, largest_logit: Tensor | None = None
    ) -> RouterStats:
        """Return losses and loads of a ``Routing``. They are apart from ``forward``, since no token waits for them.

        On a GPU this also looks for logits that are not finite, by ``watch_finite`` with ``largest_logit``.
        """
        with without_autocast(logits.device):
            if has_kernels(logits):
                from comet.router.kernels import measure  # needs triton

                largest = logits.new_zeros(()) if largest_logit is None else largest_logit
                stats = measure(logits, scores, top_k_ids, self.config, largest)
                if largest_logit is None:
                    watch_finite(largest, None)  # the largest is finite if all are
                return stats
            if logits.device.type != "cpu":
                watch_finite(logits, largest_logit)
            return measure_routing(logits, scores, top_k_ids, self.config)

    @torch.no_grad()
    def update_bias(self, expert_load_global: Tensor) -> None:
        """Move every selection bias by one fixed step towards an even load (balancing without auxiliary loss).

        Example: ``bias_update_rate=0.5``, load ``[6, 1, 2]`` (mean 3): bias ``[0, 0, 0]`` becomes ``[-0.5, 0.5, 0.5]``.

        Args:
            expert_load_global: ``(E,)`` routed rows per expert, summed over all ranks that share this router.
        """
        bias, config = self.selection_bias, self.config
        if bias is None:
            raise ValueError(f"balance={config.balance!r} must be 'bias' to update the selection bias")
        rule = "must be torch.float32, as it was made: in 16 bits a step is lost to rounding"
        require(bias.dtype == torch.float32, f"selection_bias of dtype {bias.dtype} {rule}")
        require(
            expert_load_global.shape == bias.shape,
            f"expert_load_global of shape {tuple(expert_load_global.shape)} must be (E,) = {tuple(bias.shape)}",
        )
        load = expert_load_global.to(bias)
        bias.add_(torch.sign(load.mean() - load), alpha=config.bias_update_rate)

    def extra_repr(self) -> str:
        config = self.config
        return f"experts={config.num_experts}, top_k={config.top_k}, score={config.score}, balance={config.balance}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        # A bias of 0.5 in bf16 cannot move by 0.001, so module.to(bfloat16) and .half() must not reach the bias.
        bias = self.selection_bias
        super()._apply(fn, recurse)
        if bias is not None and self.selection_bias is not None and self.selection_bias.dtype != bias.dtype:
            self.selection_bias = bias.to(self.selection_bias.device)
        return self


def router_of(weight: nn.Parameter, selection_bias: Tensor | None, config: MoEConfig) -> Router:
    """Make a router with another rule that shares the weight and selection bias."""
    router = Router(config, device="meta")
    router.weight, router.selection_bias = weight, selection_bias
    return router


def _selection_scores(logits: Tensor, scores: Tensor, selection_bias: Tensor | None, config: MoEConfig) -> Tensor:
    """Return the numbers that rank experts: logits if only their order counts, else scores (plus bias)."""
    if selection_bias is not None:
        return scores.detach() + selection_bias
    # Scores saturate at 0 and 1, and torch's vectorised sigmoid can differ from its scalar tail for equal logits.
    groups_are_summed = config.top_groups < config.num_groups
    return (scores if groups_are_summed else logits).detach()


def has_kernels(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype == torch.float32


def compute_logits(tokens: Tensor, weight: Tensor) -> Tensor:
    """Router logits ``(T, E)`` of ``(T, D)`` and ``(E, D)`` in float32, or in float64 if one of them is float64."""
    is_known = tokens.dtype == torch.bfloat16 and weight.dtype in (torch.float32, torch.bfloat16)
    if tokens.is_cuda and is_known and tokens.shape[0] > FEW_TOKENS:
        from comet.router.kernels import logits  # needs triton

        return logits(tokens, weight)
    dtype = torch.promote_types(torch.promote_types(tokens.dtype, weight.dtype), torch.float32)
    return product(tokens.to(dtype), weight.to(dtype))


def check_finite(logits: Tensor) -> None:
    """Raise ``NotFiniteError`` for the first of the logits ``(T, E)`` that is not finite; waits for the device."""
    bad = (~logits.isfinite()).nonzero()
    if len(bad):
        token, expert = bad[0].tolist()
        raise NotFiniteError(
            f"router logits[{token}, {expert}]={logits[token, expert].item()} must be finite ({len(bad)} of "
            f"{logits.numel()} are not): look for NaN or Inf in tokens or router weight"
        )


@torch.no_grad()
def watch_finite(logits: Tensor, largest_logit: Tensor | None) -> None:
    """Find NaN and infinite logits without making the host wait; inside CUDA graphs, too.

    Args:
        logits: ``(T, E)`` on a GPU.
        largest_logit: ``()`` float32, grows to the largest magnitude seen; stays NaN or infinite once a logit was, of
            which ``Workspace.check`` reports. ``None``: an assertion on the device ends the process at its next
            synchronisation, with the reason on standard error.
    """
    if largest_logit is None:
        torch._assert_async(
            logits.isfinite().all(), "router logits must be finite: look for NaN or Inf in tokens or router weight"
        )
    elif logits.numel():
        largest = torch.linalg.vector_norm(logits, float("inf"))
        torch.maximum(largest_logit, largest.to(largest_logit.dtype), out=largest_logit)


def score_logits(logits: Tensor, score: Score) -> Tensor:
    """Scores ``(T, E)`` in ``[0, 1]``: ``softmax`` over the experts of a token, or ``sigmoid`` of each logit alone."""
    return logits.softmax(dim=-1) if score == "softmax" else logits.sigmoid()


def select_experts(selection_scores: Tensor, config: MoEConfig) -> Tensor:
    """The K best experts of every token, best first; equal scores go to the lowest expert id.

    With groups (DeepSeek-V3): the E experts form ``num_groups`` groups of consecutive ids, a group's score is the sum
    of its two best scores (a lone expert's own), and only experts of the ``top_groups`` best groups compete.

    Example: scores ``[0.9, 0.0, 0.5, 0.6]``, K = 2. One group: ids ``[0, 3]``. Two groups and ``top_groups=1``: the
    groups score 0.9 and 1.1, so ids ``[3, 2]``.
    """
    if config.top_groups < config.num_groups:
        selection_scores = _mask_groups(selection_scores, config.num_groups, config.top_groups)
    return _best_ids(selection_scores, config.top_k)


def _mask_groups(scores: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """Scores with minus infinity at the experts of all groups but each token's best ``top_groups``."""
    grouped = scores.unflatten(1, (num_groups, -1))
    group_scores = grouped.topk(min(2, grouped.shape[2]), dim=-1).values.sum(dim=-1)
    closed = torch.ones_like(group_scores, dtype=torch.bool)
    closed.scatter_(1, _best_ids(group_scores, top_groups), False)
    return grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)


def _best_ids(scores: Tensor, count: int) -> Tensor:
    # torch.topk breaks ties in any order; a stable sort gives the lowest id, hence the same routing on every device.
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def weigh_experts(scores: Tensor, top_k_ids: Tensor, config: MoEConfig) -> Tensor:
    """Routing weights: the chosen scores, renormalised to sum to one if configured, times ``routed_scale``.

    Example: scores ``[0.5, 0.25, 0.25]``, ids ``[0, 2]``, ``routed_scale=3``: ``[2.0, 1.0]`` renormalised, else
    ``[1.5, 0.75]``.
    """
    weights = scores.gather(1, top_k_ids)
    if config.renormalize:
        weights = normalize(weights)
    return weights * config.routed_scale
