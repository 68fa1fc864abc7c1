"""Hugging Face models as engines, and their tokenizers as vocabularies; transformers is imported on use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comet.config import require
from comet.generation.text import TokenizerCodec
from comet.group import ExpertGroup
from comet.integrations.hf.convert import check
from comet.integrations.hf.experts import CometExperts

TOKENIZER_FILES = ("tokenizer.json", "vocab.*", "*.model")


def open_codec(folder: Path) -> TokenizerCodec:
    """The tokenizer of a model's folder.

    Raises:
        ValueError: If the folder holds none that can be read.
        UnavailableError: If transformers is missing.
    """
    from comet.integrations.hf.families import require_transformers

    require_transformers()
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    # Without any of these files transformers hands out a tokenizer that knows no word.
    files = [path.name for pattern in TOKENIZER_FILES for path in folder.glob(pattern)]
    require(bool(files), f"generate.source={str(folder)!r} must hold a tokenizer: one of {', '.join(TOKENIZER_FILES)}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"generate.source={str(folder)!r} must hold a tokenizer that can be read: {error}") from error
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    if (folder / "generation_config.json").is_file():
        config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    ends = config.eos_token_id
    return TokenizerCodec(tokenizer, frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends))


class HFEngine:
    """A converted transformers model that generates.

    Shorter prompts are padded in front, so that all sequences of a batch append at the same position.

    Args:
        folder: Of the model.
        group: The ranks that share its experts; its dtype is the model's.
    """

    def __init__(self, folder: Path, group: ExpertGroup) -> None:
        from comet.integrations.hf import load_pretrained

        self.model: Any = load_pretrained(folder, group=group)
        self._experts = [module for module in self.model.modules() if isinstance(module, CometExperts)]
        for module in self._experts:
            module.register_forward_pre_hook(self._note_routing)
        self._group = group
        self._cache: Any = None
        self._mask, self._pads = torch.empty(0), torch.empty(0)
        self._position = 0
        self._routing: list[Tensor] = []

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._group.device

    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor, max_length: int) -> Tensor:
        """See ``Engine``."""
        from transformers import StaticCache

        longest = ids.shape[1]
        self._pads = longest - lengths
        # The shortest prompt may grow most, and all of them start to grow at ``longest``.
        places = torch.arange(longest + max_length - int(lengths.min()), device=self.device)
        self._mask = (places >= self._pads[:, None]).long()
        self._cache = StaticCache(config=self.model.config, max_cache_len=len(places))
        self._position = longest
        shifted = (places[:longest] - self._pads[:, None]) % longest
        logits = self._forward(ids.gather(1, shifted), places[:longest])
        self._routing.clear()
        return logits

    @torch.no_grad()
    def decode(self, ids: Tensor) -> Tensor:
        """See ``Engine``."""
        place = torch.full((1,), self._position, device=self.device)
        self._position += 1
        return self._forward(ids[:, None], place)

    def check(self) -> None:
        """See ``Engine``."""
        check(self.model)

    def weight_bytes_per_step(self) -> float:
        """See ``Engine``; the formula is that of ``GPTEngine``, an embedding that is also the head counts as head."""
        steps = len(self._routing) // max(len(self._experts), 1)
        if not steps:
            return 0.0
        embedding = self.model.get_input_embeddings().weight
        head = self.model.get_output_embeddings().weight
        expert_weights = {id(weight) for module in self._experts for weight in module.parameters()}
        dense = sum(weight.nbytes for weight in self.model.parameters() if id(weight) not in expert_weights)
        if head is not embedding:
            dense -= embedding.nbytes
        module = self._experts[0]
        expert = module.gate_up_proj[0].nbytes + module.down_proj[0].nbytes
        touched = touched_experts(torch.stack(self._routing), module.layout.first_expert, module.layout.experts_local)
        return touched / steps * expert + dense + len(self._pads) * embedding[0].nbytes

    def _forward(self, ids: Tensor, places: Tensor) -> Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=(places - self._pads[:, None]).clamp(min=0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, 0].float()

    def _note_routing(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._routing.append(arguments[1].flatten())


def touched_experts(routing: Tensor, first_expert: int, num_experts: int) -> int:
    """How many different experts of a rank were used, added up over calls.

    Example: ids ``[[0, 3, 3], [1, 2, 0]]`` of two calls on the rank that holds experts 2 and 3: 1 + 1 = 2.

    Args:
        routing: ``(N, B * K)`` global expert ids of N calls.
        first_expert: First expert of the rank.
        num_experts: Experts of the rank.

    Returns:
        At most ``N * num_experts``.
    """
    local = routing.long() - first_expert
    used = torch.zeros(len(local), num_experts + 1, dtype=torch.bool, device=local.device)
    outside = (local < 0) | (local >= num_experts)
    used.scatter_(1, local.masked_fill(outside, num_experts), True)
    return int(used[:, :num_experts].sum())
