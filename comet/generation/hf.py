"""Hugging Face models as engines, and their tokenizers as vocabularies; transformers is imported on use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from comet.config import SpeculationConfig, require
from comet.generation.engine import Engine, draft_routers
from comet.generation.text import TokenizerCodec
from comet.integrations.hf.families import moe_config
from comet.integrations.hf.modules import CometExperts, drafting_gate, router_beside
from comet.integrations.hf.static import StaticDecoder, forgetful
from comet.integrations.hf.stored_experts import stored_paths
from comet.training.saved_settings import TOKENIZER_FILE, read_settings
from comet.utils.graphs import WARM_CALLS, GraphMode


def open_codec(folder: Path) -> TokenizerCodec:
    """The tokenizer of a model's folder."""
    from comet.integrations.hf.families import require_transformers
    from comet.integrations.hf.settings import end_ids, open_tokenizer, read_config, read_generation_config

    require_transformers()
    config, where = read_config(folder), f"the configuration of {folder}"
    ends = end_ids(vars(read_generation_config(folder) or config), where)
    return TokenizerCodec(open_tokenizer("generate.source", folder), ends, config.vocab_size)


def run_tokenizer(checkpoint: Path) -> Any:
    """The tokenizer that a run with one keeps in its checkpoints; else one whose tokens are bytes."""
    from comet.integrations.hf.families import require_transformers
    from comet.integrations.hf.settings import open_tokenizer

    require_transformers()
    if (checkpoint / TOKENIZER_FILE).is_file():
        end = (read_settings(checkpoint) or {})["data"]["end_token"]
        return open_tokenizer("generate.source", checkpoint / TOKENIZER_FILE, end)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    made = Tokenizer(models.BPE(vocab={char: byte for byte, char in bytes_to_unicode().items()}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def open_run_codec(checkpoint: Path, vocab_size: int) -> TokenizerCodec:
    """The tokenizer of a run that has one, for a model of ``vocab_size`` ids."""
    tokenizer = run_tokenizer(checkpoint)
    return TokenizerCodec(tokenizer, frozenset({tokenizer.eos_token_id}), vocab_size)


class HFEngine(Engine):
    """A model from ``load_pretrained`` or ``convert`` that generates; all its ranks call the engine equally.

    Without ``speculation``, the settings of drafts, ``draft`` and ``verify`` are not called.
    """

    def __init__(
        self,
        model: Any,
        *,
        cuda_graph: GraphMode = "auto",
        speculation: SpeculationConfig | None = None,
    ) -> None:
        from transformers import StaticCache

        super().__init__(model.device)
        rope_type = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type")
        rule = "must be another: it turns all sequences as the longest one needs, so that a text would depend on others"
        require(rope_type not in ("dynamic", "longrope"), f"rope_type={rope_type!r} of the model {rule}")
        self.model: Any = model
        self.cuda_graph: GraphMode = cuda_graph
        named = {name: each for name, each in self.model.named_modules() if isinstance(each, CometExperts)}
        self._experts = list(named.values())
        self.runners = list(dict.fromkeys(each.runner for each in self._experts))
        self.stored = stored_paths(model)
        self._longest_draft = 0 if speculation is None else speculation.draft_tokens
        if speculation is not None:
            others = forgetful(StaticCache(config=model.config, max_cache_len=1))
            if others:
                raise NotImplementedError(
                    f"speculate must be 'off' for models with {others} in their cache: tokens cannot be taken back"
                )
            moe = moe_config(model.config)
            self._drafts = draft_routers([router_beside(model, name, moe) for name in named], speculation)
            self._gates = [drafting_gate(model, name) for name in named]
        self._decoder: StaticDecoder | None = None
        self._shape = (0, 0)
        self._most_places = 0

    def rewind(self, lengths: Tensor) -> None:
        super().rewind(lengths.clamp(max=self._most_places))

    def _read(self, ids: Tensor, lengths: Tensor, max_length: int) -> Tensor:
        # The shortest prompt may grow most, and all of them start to grow behind the longest; drafts take these places
        # together, until they are taken back.
        shape = ids.shape[0], ids.shape[1] + max_length - int(lengths.min()) + self._longest_draft
        if self._decoder is None or self._shape != shape:
            self._decoder, self._shape, self._passes = None, shape, None  # a graph keeps its memory
            self._decoder = StaticDecoder(
                self.model,
                num_sequences=shape[0],
                num_places=shape[1] + WARM_CALLS,
                cuda_graph=self.cuda_graph,
                drafting=self._drafting,
            )
            self._passes = self._decoder.passes
        self._most_places = max_length
        return self._decoder.read(ids, lengths)

    def _room(self) -> StaticDecoder:
        assert self._decoder is not None, "prompts are read before tokens are appended"
        return self._decoder

    @contextmanager
    def _drafting(self) -> Iterator[None]:
        for gate, router in zip(self._gates, self._drafts, strict=True):
            gate.routers = (router,)
        try:
            yield
        finally:
            for gate in self._gates:
                gate.routers = ()
