"""Router: which K experts a token goes to, with what weights, and the losses that keep experts evenly loaded.

``score -> select -> weigh``: scores come from the logits, the selection picks ids (no gradient), the weights are read
from the scores at those ids and carry the gradient. Arithmetic is float32 whatever the dtype of tokens and weight,
autocast included (torch's own TF32 switch still applies); float64 tokens stay float64, the oracle of the tests.
Nothing here waits for the GPU. Not covered: anything across ranks; loads and losses are those of this rank's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from comet.config import MoEConfig, Score, require


@dataclass(frozen=True, slots=True)
class RouterStats:
    """What one forward of the router measured over this rank's tokens.

    Args:
        aux_loss: ``()`` float32, load-balancing loss times its coefficient, with gradient; zero when unused.
        z_loss: ``()`` float32, router z-loss times its coefficient, with gradient; zero when unused.
        expert_load: ``(E,)`` float32, routed rows per expert; sums to T*K; no gradient.
    """

    aux_loss: Tensor
    z_loss: Tensor
    expert_load: Tensor

    @property
    def loss(self) -> Tensor:
        """``()`` float32: what the training loss should add for this layer."""
        return self.aux_loss + self.z_loss


@dataclass(frozen=True, slots=True)
class Routing:
    """The router's decision for T tokens.

    Args:
        top_k_ids: ``(T, K)`` int32, expert of every routed row, best first; no id occurs twice in a row.
        top_k_weights: ``(T, K)`` float32, factor of that expert's output, with gradient.
        stats: Losses and loads of this forward.
    """

    top_k_ids: Tensor
    top_k_weights: Tensor
    stats: RouterStats


class Router(nn.Module):
    """Linear router with softmax or sigmoid scores, group-limited top-k and two ways of balancing.

    Args:
        config: Shape and routing of the layer.
        device: Where the parameter lives.
        dtype: Dtype of the parameter ``weight (E, D)``; the arithmetic is float32 in any case.
    """

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
        """Route the tokens.

        Args:
            tokens: ``(T, D)``, a floating dtype; T may be 0.

        Returns:
            The ``Routing`` of these tokens.

        Raises:
            ValueError: If ``tokens`` is not ``(T, D)`` floating, or if ``check_finite`` refuses the logits.
        """
        self._check_tokens(tokens)
        config = self.config
        with torch.autocast(tokens.device.type, enabled=False):
            logits = compute_logits(tokens, self.weight)
            check_finite(logits)
            scores = score_logits(logits, config.score)
            top_k_ids = select_experts(self._selection_scores(logits, scores), config)
            top_k_weights = weigh_experts(scores, top_k_ids, config)
            stats = self._measure(logits, scores, top_k_ids)
        return Routing(top_k_ids.int(), top_k_weights, stats)

    @torch.no_grad()
    def update_bias(self, expert_load_global: Tensor) -> None:
        """Move every selection bias by one fixed step towards an even load (balancing without auxiliary loss).

        Example: ``bias_update_rate=0.5``, load ``[6, 1, 2]`` (mean 3): bias ``[0, 0, 0]`` becomes ``[-0.5, 0.5, 0.5]``.

        Args:
            expert_load_global: ``(E,)`` routed rows per expert, summed over all ranks that share this router.

        Raises:
            ValueError: If ``balance`` is not ``bias`` or the shape is not ``(E,)``.
        """
        bias, config = self.selection_bias, self.config
        if bias is None:
            raise ValueError(f"balance={config.balance!r} must be 'bias' to update the selection bias")
        require(
            expert_load_global.shape == bias.shape,
            f"expert_load_global of shape {tuple(expert_load_global.shape)} must be (E,) = {tuple(bias.shape)}",
        )
        load = expert_load_global.to(bias)
        bias.add_(torch.sign(load.mean() - load), alpha=config.bias_update_rate)

    def extra_repr(self) -> str:
        """The routing rule, for ``print(module)``."""
        config = self.config
        return f"experts={config.num_experts}, top_k={config.top_k}, score={config.score}, balance={config.balance}"

    def _check_tokens(self, tokens: Tensor) -> None:
        hidden_size = self.config.hidden_size
        require(
            tokens.dim() == 2 and tokens.shape[1] == hidden_size,
            f"tokens of shape {tuple(tokens.shape)} must be (T, D) with D = hidden_size={hidden_size}",
        )
        require(tokens.is_floating_point(), f"tokens of dtype {tokens.dtype} must be floating")

    def _selection_scores(self, logits: Tensor, scores: Tensor) -> Tensor:
        """What experts are compared by: logits where only their order counts, else scores (plus bias)."""
        if self.selection_bias is not None:
            return scores.detach() + self.selection_bias
        # Scores saturate at 0 and 1, and torch's vectorised sigmoid can differ from its scalar tail for equal logits.
        groups_are_summed = self.config.top_groups < self.config.num_groups
        return (scores if groups_are_summed else logits).detach()

    def _measure(self, logits: Tensor, scores: Tensor, top_k_ids: Tensor) -> RouterStats:
        config = self.config
        unused = logits.new_zeros(())
        expert_load = count_routed_rows(top_k_ids, config.num_experts)
        use_aux = config.balance == "aux" and config.aux_loss_coef != 0
        return RouterStats(
            aux_loss=config.aux_loss_coef * load_balancing_loss(scores, expert_load) if use_aux else unused,
            z_loss=config.z_loss_coef * router_z_loss(logits) if config.z_loss_coef != 0 else unused,
            expert_load=expert_load,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        # A bias of 0.5 in bf16 cannot move by 0.001, so module.to(bfloat16) and .half() must not reach the bias.
        bias = self.selection_bias
        super()._apply(fn, recurse)
        if bias is not None and self.selection_bias is not None and self.selection_bias.dtype != bias.dtype:
            self.selection_bias = bias.to(self.selection_bias.device)
        return self


def compute_logits(tokens: Tensor, weight: Tensor) -> Tensor:
    """Router logits in float32, or in float64 if ``tokens`` or ``weight`` is float64.

    Args:
        tokens: ``(T, D)`` floating.
        weight: ``(E, D)`` floating.

    Returns:
        ``(T, E)``.
    """
    dtype = torch.promote_types(torch.promote_types(tokens.dtype, weight.dtype), torch.float32)
    return nn.functional.linear(tokens.to(dtype), weight.to(dtype))


def check_finite(logits: Tensor) -> None:
    """Refuse NaN and infinite logits, without making the host wait for a GPU.

    On CPU the error is raised at once and names the place. On a GPU the check is an asynchronous device assertion: the
    process gets a RuntimeError at its next synchronisation, and the text below appears on stderr. It costs no host
    round trip and works inside CUDA graphs; the price is that the CUDA context cannot be used after the failure.

    Args:
        logits: ``(T, E)``.

    Raises:
        ValueError: On CPU, if a logit is not finite.
    """
    finite = logits.isfinite()
    if logits.device.type != "cpu":
        torch._assert_async(
            finite.all(), "router logits must be finite: look for NaN or Inf in tokens or router weight"
        )
        return
    if not bool(finite.all()):
        bad = (~finite).nonzero()
        token, expert = bad[0].tolist()
        raise ValueError(
            f"router logits[{token}, {expert}]={logits[token, expert].item()} must be finite ({len(bad)} of "
            f"{logits.numel()} are not): look for NaN or Inf in tokens or router weight"
        )


def score_logits(logits: Tensor, score: Score) -> Tensor:
    """Scores in ``[0, 1]``: ``softmax`` over the experts of a token, or ``sigmoid`` of each logit alone.

    Args:
        logits: ``(T, E)``.
        score: Which of the two.

    Returns:
        ``(T, E)``, same dtype.
    """
    return logits.softmax(dim=-1) if score == "softmax" else logits.sigmoid()


def select_experts(selection_scores: Tensor, config: MoEConfig) -> Tensor:
    """The K best experts of every token, best first; equal scores go to the lowest expert id.

    With groups (DeepSeek-V3): the E experts form ``num_groups`` groups of consecutive ids, a group's score is the sum
    of its two best scores (a lone expert's own), and only experts of the ``top_groups`` best groups compete.

    Example: scores ``[0.9, 0.0, 0.5, 0.6]``, K = 2. One group: ids ``[0, 3]``. Two groups and ``top_groups=1``: the
    groups score 0.9 and 1.1, so ids ``[3, 2]``.

    Args:
        selection_scores: ``(T, E)``, selection bias already added.
        config: Read for ``top_k``, ``num_groups`` and ``top_groups``.

    Returns:
        ``(T, K)`` int64.
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

    Args:
        scores: ``(T, E)``, without selection bias.
        top_k_ids: ``(T, K)`` int64.
        config: Read for ``renormalize`` and ``routed_scale``.

    Returns:
        ``(T, K)``, same dtype as ``scores``, with gradient. If all K scores underflow to zero, so do the weights.
    """
    weights = scores.gather(1, top_k_ids)
    if config.renormalize:
        weights = _normalize(weights)
    return weights * config.routed_scale


def _normalize(values: Tensor) -> Tensor:
    return values / values.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)


def load_balancing_loss(scores: Tensor, expert_load: Tensor) -> Tensor:
    """The Switch Transformer loss for any K: ``E * sum_e f_e * P_e``, equal to 1 when load or scores are even.

    ``f_e`` is expert e's share of the routed rows (no gradient), ``P_e`` the mean over tokens of its score divided by
    the token's sum of scores. (Definitions that let ``f`` sum to K instead of 1 give K times this value.)

    Example: E = 2, K = 1, scores ``[[0.75, 0.25], [0.75, 0.25]]``, load ``[2, 0]``: ``2 * (1 * 0.75 + 0 * 0.25)``
    = 1.5.

    Args:
        scores: ``(T, E)``.
        expert_load: ``(E,)`` routed rows per expert.

    Returns:
        ``()``; zero if T = 0.
    """
    num_tokens, num_experts = scores.shape
    share = (expert_load / expert_load.sum().clamp_min(1)).to(scores.dtype)
    mean_score = _normalize(scores).sum(dim=0) / max(num_tokens, 1)
    return num_experts * (share * mean_score).sum()


def router_z_loss(logits: Tensor) -> Tensor:
    """Mean over tokens of ``logsumexp(logits) ** 2``: keeps logits small.

    Example: logits ``[[0.0, 0.0]]`` give ``ln(2) ** 2 = 0.480453...``.

    Args:
        logits: ``(T, E)``.

    Returns:
        ``()``; zero if T = 0.
    """
    return logits.logsumexp(dim=-1).square().sum() / max(logits.shape[0], 1)


def count_routed_rows(top_k_ids: Tensor, num_experts: int) -> Tensor:
    """How many routed rows every expert gets.

    Example: ids ``[[2, 0], [2, -1]]``, E = 4: ``[1, 0, 2, 0]``.

    Args:
        top_k_ids: ``(T, K)`` integer; -1 is a masked slot and is not counted.
        num_experts: E.

    Returns:
        ``(E,)`` float32 (exact up to 2^24 rows per expert), no gradient.
    """
    bins = top_k_ids.flatten().long() + 1  # bin 0 takes the masked slots, so that nothing depends on their number
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=bins.device)
    return counts.scatter_add_(0, bins, torch.ones_like(bins))[1:].float()


def load_imbalance(expert_load: Tensor) -> Tensor:
    """Largest over mean load: 1 is even, E is everything on one expert.

    Example: ``[6, 1, 2, 3]`` gives 2.0.

    Args:
        expert_load: ``(E,)`` floating, routed rows per expert.

    Returns:
        ``()``, on the same device; zero if no row was routed.
    """
    return expert_load.max() / expert_load.mean().clamp_min(torch.finfo(expert_load.dtype).tiny)
