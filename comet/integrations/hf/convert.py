"""Comet as the experts of a transformers model, whose modules are replaced in place."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from comet.comm.handshake import gather
from comet.config import ParallelConfig, require
from comet.decode import SequenceClock, held_pieces, shared_columns
from comet.decode.runners import DECODE_TOKENS, LocalRunner, ReplicatedRunner, Runner
from comet.integrations.hf import gpt_oss
from comet.integrations.hf.by_name import check_named
from comet.integrations.hf.families import (
    ADAPTED,
    Family,
    asks_registry,
    block_of,
    require_transformers,
    shared_expert,
)
from comet.integrations.hf.fp8 import FP8Experts
from comet.integrations.hf.modules import CometExperts
from comet.integrations.hf.stored import BIASES, FUSED
from comet.integrations.hf.stored_experts import NOT_SAVED, StoredExperts, cores_of
from comet.layer.group import ExpertGroup
from comet.layout import ExpertLayout
from comet.limits import check_values, multiple_of
from comet.quantization.formats import FP8_BLOCK
from comet.reference.layer import shard_experts
from comet.utils.graphs import is_capturing
from comet.utils.uncompiled import uncompiled


def convert(model: nn.Module, group: ExpertGroup | None = None, *, decode_tokens: int | None = None) -> nn.Module:
    """Replace the experts of every MoE layer in place, and return the model; one that is refused is unchanged.

    All else stays the model's own. Decode steps include shared experts as experts that every token goes through, where
    their width is a multiple of a routed expert's on a rank: their weights are there twice then, and writes to them
    that torch does not count (``.data``, inference mode) reach decode steps at the next prompt, or after
    ``weights_changed``.

    On a group (collective) every rank holds the same model and passes it the same input; each keeps only its part of
    the experts. Sampling needs the same seed on all ranks.

    Args:
        model: A transformers model whose experts are gated, as almost all are; others are refused by name.
        group: The ranks that share the experts, made for ``moe_config(model.config)`` and the model's dtype and device;
            ``None``: this rank alone.
        decode_tokens: Most tokens of one call that take warp decode; more take the group's path. ``None``: 64, or 0
            where a rank's slices of experts are too narrow for it.
    """
    require_transformers()
    family = Family.of(model)
    stock = {name: model.get_submodule(name) for name in family.experts}
    if group is not None:
        dtype, device = group.workspace.shape.dtype, group.device
        for name, experts in stock.items():
            weight: Any = experts.gate_up_proj
            require(weight.dtype == dtype, f"dtype={weight.dtype} of {name} must be the group's {dtype}")
            require(weight.device == device, f"device={weight.device} of {name} must be the group's {device}")
    place = Place.create(family, group, decode_tokens)
    adapted = [name for name in stock if place.layout.world_size > 1 and name.endswith(ADAPTED)]
    rule = "must be merged (merge_and_unload) before a model is converted over several ranks, each with a part of them"
    require(not adapted, f"adapters of {', '.join(adapted[:1])} and {len(adapted) - 1} more {rule}")
    for name, experts in stock.items():
        place.install(model, name, experts)
    place.prepare(model)
    return model


def check(model: nn.Module) -> None:
    """Report what went wrong on the device in a converted model since it was converted; waits for the device.

    Of a model that calls Comet by its name, and is not converted, everything that could be refused later is checked.

    Raises:
        CommTimeoutError: If a rank did not come in time; what the model answered since then means nothing.
        EpochError: If so many calls were made that ``restart`` is due.
        CapacityError: If a prefill needed more routed rows than were reserved.
        HostComputeError: If the host's cores did not compute experts in time (``host_cores``).
    """
    runners = _runners(model)
    if not runners:
        check_named(model)
    left = [name for name, each in model.named_modules() if runners and asks_registry(each)]
    require(not left, f"{', '.join(left)} must be experts of Comet, as the others of the model are: convert it again")
    cores = cores_of(model)
    if cores is not None:
        cores.check()
    for runner in runners:
        runner.check()


def restart(model: nn.Module) -> None:
    """Restart the epochs of a converted model's signals, where ``check`` asks for it; collective, between two steps."""
    for runner in _runners(model):
        runner.restart()


def weights_changed(model: nn.Module) -> None:
    """Let the next pass of a converted model take all weights as they are now.

    Decode steps keep copies of a shared expert's weights, which each prompt renews, and each step after a write that
    torch counts. torch counts no write through ``.data`` or in inference mode: call this after such a write in the
    middle of a sequence, as where rollouts go on with new weights.
    """
    for module in model.modules():
        if isinstance(module, CometExperts) and module.shared is not None:
            module.shared.clock.start()


def _runners(model: nn.Module) -> list[Runner]:
    """In the order of the layers, which all ranks share."""
    return list(dict.fromkeys(module.runner for module in model.modules() if isinstance(module, CometExperts)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A rank's place among a model's experts."""

    layout: ExpertLayout  # its part of them
    runner: Runner  # computes them, for all layers
    family: Family
    shared_columns: int  # K of decode steps grows by so much where they include the shared expert; else 0
    num_pieces: int  # pieces of the shared expert that this rank holds for them
    keep_fp8: bool = False  # whether its experts are kept in block FP8
    in_store: bool = False  # whether its experts are in a store that is opened after the model was made
    clock: SequenceClock = field(default_factory=SequenceClock)  # of the model's passes

    @classmethod
    def create(
        cls,
        family: Family,
        group: ExpertGroup | None,
        decode_tokens: int | None = None,
        *,
        keep_fp8: bool = False,
        in_store: bool = False,
    ) -> Place:
        """This rank's place among the experts of a family's models; raises ``ValueError`` as above."""
        moe = family.moe
        layout = ExpertLayout.create(moe, ParallelConfig(), 0) if group is None else group.layout(moe)
        width = moe.ffn_size // layout.tp
        whole = multiple_of(
            FP8_BLOCK if keep_fp8 else 1, "keep_fp8=True: a rank holds whole blocks, each with its scale"
        )
        check_values(whole, **{"ffn_size / tp": width})
        shared = family.shared_ffn_size
        columns = 0 if in_store else shared_columns(layout, moe.ffn_size, shared)
        in_turn = family.interleaved and not in_store
        if group is None:
            most = DECODE_TOKENS if decode_tokens is None else decode_tokens
            runner: Runner = LocalRunner(moe.top_k + columns, most, activation=moe.activation, interleaved=in_turn)
        else:
            runner = ReplicatedRunner(moe, group, decode_tokens, shared_columns=columns, interleaved=in_turn)
        return cls(
            layout=layout,
            runner=runner,
            family=family,
            shared_columns=columns,
            num_pieces=len(held_pieces(layout, width, shared)) if columns else 0,
            keep_fp8=keep_fp8,
            in_store=in_store,
        )

    @property
    def in_turn(self) -> bool:
        """Whether experts are held as gpt-oss publishes them: transposed, gate and up in turn."""
        return self.runner.interleaved

    def install(self, model: nn.Module, name: str, stock: nn.Module) -> None:
        """Put this rank's part of a model's stock experts in their place, next to their block's shared expert."""
        experts = self.take(stock)
        model.set_submodule(name, experts)
        if not self.shared_columns:
            return
        block, child = block_of(model, name)
        shared = shared_expert(block, child, self.family.moe.activation)
        if shared is not None and shared == self.family.shared:  # another one stays outside of decode steps
            experts.join(block, shared, self.shared_columns, self.clock)

    @torch.no_grad()
    def take(self, stock: nn.Module) -> CometExperts:
        """This rank's part of a stock experts module, copied unless it is all of it; room for it to be kept in FP8."""
        module: Any = stock
        if self.in_store:
            return StoredExperts(self.layout, self.runner)
        if self.keep_fp8:
            _, hidden_size, ffn_size = module.down_proj.shape
            device, width = module.down_proj.device, ffn_size // self.layout.tp
            return FP8Experts(hidden_size, width, self.layout, self.runner, device, self.num_pieces)
        parts = [getattr(module, name) for name in FUSED + (BIASES if self.in_turn else ())]
        if self.layout.world_size > 1:
            w1, w2, *_ = parts
            own = gpt_oss.part_of(module, self.layout) if self.in_turn else shard_experts(w1, w2, self.layout)
            copies = (part.clone(memory_format=torch.contiguous_format) for part in own)
            parts = [nn.Parameter(copy, requires_grad=False) for copy in copies]
        gate_up_proj, down_proj, *biases = parts
        return CometExperts(gate_up_proj, down_proj, self.layout, self.runner, biases, is_transposed=self.in_turn)

    def prepare(self, model: nn.Module) -> None:
        """Refuse what the whole model, converted, does not do."""
        self.keep_from_saving(model)
        modules = model.named_modules()
        joined = [name for name, each in modules if isinstance(each, CometExperts) and each.shared is not None]
        if joined:
            decoder = model.get_submodule(joined[0].rpartition(".layers.")[0])
            decoder.register_forward_pre_hook(self.clock.observe, with_kwargs=True)
        if isinstance(self.runner, ReplicatedRunner) and self.layout.world_size > 1:
            hook = partial(_require_same_prompts, self.runner.group, digest_of(model))
            model.register_forward_pre_hook(hook, with_kwargs=True)

    def keep_from_saving(self, model: nn.Module) -> None:
        """Let ``save_pretrained`` raise ``ValueError`` where its folder would look like a model's, and be none.

        It would hold one rank's shard, or scales that nothing in it explains.
        """
        part = f"rank {self.layout.rank} of {self.layout.world_size} holds a part of the experts only"
        reasons = (
            (self.layout.world_size > 1, f"{part}; save the model before it is converted"),
            (self.keep_fp8, "experts are kept in block FP8; load the model with keep_fp8=False to save it"),
            (self.in_store, NOT_SAVED),
        )
        reason = next((reason for holds, reason in reasons if holds), None)

        def save_pretrained(*arguments: Any, **options: Any) -> None:
            raise ValueError(f"save_pretrained: {reason}")

        if reason is not None:
            model.save_pretrained = save_pretrained  # type: ignore[assignment]


SAMPLES = 4096  # elements of a tensor that a digest looks at


def digest_of(model: nn.Module) -> str:
    """A fingerprint of what all ranks of a group hold alike: a sample of every tensor that is no expert's."""
    digest = hashlib.sha256()
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if ".experts." not in name:
            flat = tensor.detach().flatten()
            sample = flat[:: max(len(flat) // SAMPLES, 1)].cpu().contiguous()
            digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode() + sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def require_same_model(group: ExpertGroup, model: nn.Module) -> None:
    """Raise ``ValueError`` on all ranks that hold other models (collective), as of folders on the disk of each node."""
    if group.process_group is not None:
        _require_same(gather(group.process_group, (digest_of(model),)))


def _require_same(found: Sequence[tuple[Any, ...]]) -> None:
    """Raise ``ValueError`` unless all ranks have the same digest of the model, and of ``input_ids`` where given."""
    rules = {
        "model": "all but its experts is on every rank, with equal weights; is the folder the same?",
        "input_ids": "all ranks take the same tokens, and each computes its part of the experts",
    }
    for (what, advice), values in zip(rules.items(), zip(*found, strict=True), strict=False):
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        require(not others, f"{what} of ranks {others} must be as on rank 0: {advice}")


@uncompiled
def _require_same_prompts(
    group: ExpertGroup, digest: str, _: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
) -> None:
    """Raise ``ValueError`` on all ranks that are given different prompts (collective), which no expert would notice, or
    hold different models.

    Decode steps are not looked at, nor what is read into a static cache or captured: that would wait for the device.
    """
    from transformers import StaticCache

    ids, cache = given.get("input_ids", args[0] if args else None), given.get("past_key_values")
    if ids is None or is_capturing(ids.device) or isinstance(cache, StaticCache):
        return
    if cache is not None and cache.get_seq_length():
        return
    assert group.process_group is not None
    prompt = ids.shape, hashlib.sha256(ids.cpu().numpy().tobytes()).digest()
    _require_same(gather(group.process_group, (digest, prompt)))
