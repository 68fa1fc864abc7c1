"""A small GPT: pre-norm blocks of rotary grouped-query attention and a MoE (or dense SwiGLU) feed-forward layer.

Everything but the experts is replicated. Weights depend on (seed, parameter name) only, never on the layout of ranks.
Parameters and the residual stream are float32; products run in the dtype of the group's workspace.

Letters: B sequences, S positions, D hidden size, V vocabulary, E experts, L MoE layers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, rms_norm
from torch.utils.checkpoint import checkpoint

from comet.config import OverlapConfig, PathName, require
from comet.layer.group import ExpertGroup
from comet.layer.shared_expert import SharedExpert
from comet.models.cache import KeyValueCache, attend_causally
from comet.models.config import ModelConfig
from comet.moe import MoE
from comet.router.losses import RouterStats
from comet.router.router import Router

EMBEDDING_STD = 0.5

# Query (B, heads, S, width), key and value (B, kv_heads, S, width) -> what the queries gather, shaped like them.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class GPTOutput:
    """The result of one forward pass."""

    logits: Tensor  # (B, S, V) float32
    router_loss: Tensor  # () float32: load-balancing and z-loss of all MoE layers; zero if there are none
    expert_load: Tensor  # (L, E) float32: routed rows of this rank's tokens per MoE layer and expert


class GPT(nn.Module):
    """The model; every rank of the MoE group must call it equally often.

    Args:
        recomputes: Whether the backward pass computes each block again instead of keeping its activations.
    """

    rotary: Tensor

    def __init__(
        self,
        config: ModelConfig,
        group: ExpertGroup,
        *,
        path: PathName | str = "auto",
        overlap: OverlapConfig | None = None,
        seed: int = 0,
        expert_device: torch.device | None = None,
        recomputes: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.recomputes = recomputes
        self.dtype = group.workspace.shape.dtype
        made: dict[str, Any] = dict(device=group.device, dtype=torch.float32)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, **made)
        self.blocks: Any = nn.ModuleList()  # torch does not declare that these are ``Block``s
        for index in range(config.num_layers):
            ffn: MoE | SharedExpert
            if index < config.dense_layers:
                ffn = SharedExpert(
                    config.hidden_size, config.dense_ffn_size, activation=config.moe.activation, device=group.device
                )
            else:
                shared: dict[str, Any] = dict(path=path, overlap=overlap, expert_device=expert_device)
                ffn = MoE(config.moe, group, seed=_seed(seed, f"blocks.{index}"), **shared)
            self.blocks.append(Block(config, ffn, device=group.device, dtype=self.dtype))
        self.norm = nn.RMSNorm(config.hidden_size, **made)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, **made)
        self.register_buffer("rotary", rotary_table(config).to(group.device), persistent=False)
        self._draw_outside_moe(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draw all weights as a new model of this seed has them, in place.

        Matrices that write into the residual stream are scaled by ``1 / sqrt(2 * num_layers)``. The head starts at
        zero: an untrained model gives every byte the same probability.
        """
        for index, block in enumerate(self.blocks):
            if isinstance(block.ffn, MoE):
                block.ffn.reset_parameters(_seed(seed, f"blocks.{index}"))
        self._draw_outside_moe(seed)

    @torch.no_grad()
    def _draw_outside_moe(self, seed: int) -> None:
        """Draw all weights outside the MoE layers, whose own were drawn just before; then scale those of both."""
        scale = (2 * self.config.num_layers) ** -0.5
        inside_moe = {id(parameter) for layer in self.moe_layers() for parameter in layer.parameters()}
        for name, parameter in self.named_parameters():
            if id(parameter) in inside_moe:
                continue
            if parameter.dim() == 1:
                parameter.fill_(1.0)  # gains of norms
                continue
            generator = torch.Generator().manual_seed(_seed(seed, name))
            std = EMBEDDING_STD if name == "embedding.weight" else parameter.shape[-1] ** -0.5
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
            parameter.copy_(drawn * std)
        for block in self.blocks:
            block.attention.out.weight.mul_(scale)
            block.ffn.w2.mul_(scale)
            if isinstance(block.ffn, MoE) and block.ffn.shared is not None:
                block.ffn.shared.w2.mul_(scale)
        nn.init.zeros_(self.head.weight)

    def forward(self, ids: Tensor) -> GPTOutput:
        """Predict every next token of ``ids (B, S)`` int64."""
        length, context = ids.shape[1], self.config.context
        require(length <= context, f"sequence length {length} must be at most context={context}")
        return self._predict(ids, self.rotary[:, : ids.shape[1]], [attend_causally] * len(self.blocks))

    def prefill(self, ids: Tensor, lengths: Tensor, cache: KeyValueCache) -> GPTOutput:
        """Read prompts ``ids (B, S)`` of ``lengths (B,)`` into a cache, which is overwritten: logits ``(B, 1, V)`` of
        their next tokens; router loss and load include what is ignored behind a shorter prompt.
        """
        sequences, places = len(cache.lengths), cache.length
        fits = ids.shape[0] == sequences and ids.shape[1] <= places
        require(fits, f"prompts of shape {tuple(ids.shape)} must be ({sequences}, at most {places}), as the cache is")
        cache.lengths.copy_(lengths)
        attends = [partial(cache.fill, layer) for layer in range(len(self.blocks))]
        return self._predict(ids, self.rotary[:, : ids.shape[1]], attends, lengths - 1)

    def extend(self, ids: Tensor, cache: KeyValueCache, routers: Sequence[Router] | None = None) -> GPTOutput:
        """Append ``ids (B, S)`` and predict what follows each; static shapes, and the host never waits.

        Args:
            routers: What routes in place of each MoE layer's own router, as those of ``draft_routers`` do; one a layer.
        """
        if routers is not None:
            layers = len(self.moe_layers())
            require(len(routers) == layers, f"routers={len(routers)} must be one for each of {layers} MoE layers")
        newest = cache.next_positions(ids.shape[1])
        unseen = cache.unseen_from(newest)
        attends = [partial(cache.extend, layer, newest, unseen) for layer in range(len(self.blocks))]
        output = self._predict(ids, self.rotary[:, newest][:, :, None], attends, routers=routers)
        cache.advance(ids.shape[1])
        return output

    def moe_layers(self) -> list[MoE]:
        return [block.ffn for block in self.blocks if isinstance(block.ffn, MoE)]

    def expert_parameters(self) -> list[nn.Parameter]:
        """Parameters sharded over the MoE group: ``expert_matrices``, then ``expert_biases``."""
        return self.expert_matrices() + self.expert_biases()

    def expert_matrices(self) -> list[nn.Parameter]:
        return [parameter for layer in self.moe_layers() for parameter in (layer.w1, layer.w2)]

    def expert_biases(self) -> list[nn.Parameter]:
        return [bias for layer in self.moe_layers() for bias in (layer.b1, layer.b2) if bias is not None]

    def dense_parameters(self) -> list[nn.Parameter]:
        sharded = {id(parameter) for parameter in self.expert_parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in sharded]

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def _predict(
        self,
        ids: Tensor,
        rotary: Tensor,
        attends: Sequence[Attend],
        last: Tensor | None = None,
        routers: Sequence[Router] | None = None,
    ) -> GPTOutput:
        """Run all blocks; with ``last (B,)`` only that position of each sequence is predicted from."""
        stats: list[RouterStats] = []
        others = iter(routers or ())
        run = _recomputed if self.recomputes and torch.is_grad_enabled() else _called
        with torch.autocast(ids.device.type, self.dtype, enabled=self.dtype != torch.float32):
            x = self.embedding(ids)
            for block, attend in zip(self.blocks, attends, strict=True):
                router = next(others, None) if isinstance(block.ffn, MoE) else None
                x, layer_stats = run(block, x, rotary, attend, router)
                if layer_stats is not None:
                    stats.append(layer_stats)
            if last is not None:
                x = x.gather(1, last[:, None, None].expand(-1, 1, x.shape[2]))
            logits = self.head(self.norm(x))
        loads = [layer.expert_load for layer in stats]
        return GPTOutput(
            logits=logits.float(),
            router_loss=sum((layer.loss for layer in stats), start=x.new_zeros(())),
            expert_load=torch.stack(loads) if loads else x.new_zeros(0, self.config.moe.num_experts),
        )


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + ffn(norm(x))``."""

    def __init__(
        self, config: ModelConfig, ffn: MoE | SharedExpert, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.attention_norm = nn.RMSNorm(config.hidden_size, device=device, dtype=torch.float32)
        self.attention = Attention(config, device=device)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, device=device, dtype=torch.float32)
        self.ffn = ffn

    def forward(
        self, x: Tensor, rotary: Tensor, attend: Attend, router: Router | None = None
    ) -> tuple[Tensor, RouterStats | None]:
        """``(B, S, D)`` float32 -> the same, and the router's statistics unless the block is dense."""
        x = x + self.attention(self.attention_norm(x), rotary, attend)
        tokens = self.ffn_norm(x).to(self.dtype).flatten(0, 1)
        if isinstance(self.ffn, MoE):
            output, stats = self.ffn(tokens, router)
        else:
            output, stats = self.ffn(tokens), None
        return x + output.view_as(x), stats


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions and normalised queries and keys."""

    def __init__(self, config: ModelConfig, *, device: torch.device) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.width = config.num_heads, config.num_kv_heads, config.head_width
        projected = (self.num_heads + 2 * self.num_kv_heads) * self.width
        made: dict[str, Any] = dict(bias=False, device=device, dtype=torch.float32)
        self.qkv = nn.Linear(config.hidden_size, projected, **made)
        self.out = nn.Linear(self.num_heads * self.width, config.hidden_size, **made)

    def forward(self, x: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
        """``(B, S, D)`` and the ``(2, S, width / 2)`` table, or one for every sequence and head -> ``(B, S, D)``."""
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, -1, self.width).transpose(1, 2)
        query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        query, key = (rotate(rms_norm(part, (self.width,)), rotary).to(value.dtype) for part in (query, key))
        mixed = attend(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


def rotary_table(config: ModelConfig) -> Tensor:
    """Cosine and sine of ``position * rope_base ** (-2i / width)``: ``(2, context, width / 2)`` float32."""
    exponents = torch.arange(0, config.head_width, 2, dtype=torch.float32, device="cpu") / config.head_width
    angles = torch.outer(torch.arange(config.context, device="cpu"), config.rope_base**-exponents)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn each pair ``(x[i], x[i + width / 2])`` by its position's angle.

    Example: width 2, angle 90 degrees (cosine 0, sine 1): ``[1, 2]`` becomes ``[-2, 1]``.

    Args:
        rotary: ``(2, S, width / 2)``, cosines then sines; or more dimensions after the first, broadcast against x.
    """
    cosine, sine = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood in nats, of logits ``(B, S, V)``; targets ``(B, S)`` of -1 are left out."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def _called(block: Block, *arguments: Any) -> Any:
    return block(*arguments)


def _recomputed(block: Block, *arguments: Any) -> Any:
    # No block draws random numbers. A recomputation that stops early would leave the side stream of a layer unjoined.
    return checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False, early_stop=False)


def _seed(seed: int, name: str) -> int:
    """A 32-bit generator seed of one part of the model; equal on every rank and in every Python."""
    return zlib.crc32(f"{seed}/{name}".encode())
