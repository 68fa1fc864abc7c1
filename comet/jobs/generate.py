"""Settings of the ``generate`` task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from comet.config import SpeculationConfig, SpeculationMode, require
from comet.experts.options import StoreOptions, check_host_cores, prefetch_wanted
from comet.utils.choices import GraphMode

GenerateDtype = Literal["auto", "float32", "bfloat16"]
LEAST, MOST = 1e-6, 1e6  # limits of factors on logits, which stay finite and different within them


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig(SpeculationConfig, StoreOptions):
    """The texts to continue, how, and for how long; ``SpeculationConfig`` says how tokens are drafted.

    Options of a store are checked together where a model is loaded (``StoreOptions.of``).

    Args:
        source: A checkpoint of a training job, its output folder (the newest complete checkpoint is taken), or a folder
            of a Hugging Face model; it also decides ``model``.
        prompt: Text to continue.
        prompts: More texts, continued at the same time.
        max_new_tokens: Most tokens made per sequence; a full context or the stop text ends a sequence earlier.
        temperature: Logits are divided by it before a token is drawn; 0 always takes the most probable token.
        top_k: Draw from this number of the most probable tokens; ``None``: from all.
        top_p: Draw from the smallest set of most probable tokens that has this share of the probability, above 0, at
            most 1.
        repetition_penalty: Positive logits of tokens that are already in the sequence are divided by it, negative ones
            multiplied; 1 changes nothing.
        seed: Of the draws; sequence i's draws depend on (seed, i) only. With speculation equal seeds give the same text
            only if draft lengths, which follow measured times, are the same; at temperature 0 the text is always the
            same.
        stop: Text that ends a sequence; it is not part of the result.
        dtype: Of weights and activations; ``auto`` is bfloat16 on a GPU and float32 on a CPU.
        cuda_graph: Whether decode steps are replayed from a CUDA graph: ``auto``: if possible; ``on``: an error if it
            is not; ``off``: never. The tokens are the same.
        expert_budget: Share of all experts (up to 1), or bytes (above 1), that GPU memory holds; the others stay in
            the store and are copied when they are needed. ``None``: all of them.
        expert_store: With a budget, where all experts are: in ``host`` memory, or in the ``file`` of a Hugging Face
            folder; then the host copies them, and steps are not replayed from a CUDA graph.
        host_budget: With ``expert_store=file``, share of all experts (up to 1), or bytes, that host memory holds.
        expert_policy: With a budget, which expert loses its slot to a missing one: the least recently used (``lru``) or
            the least frequently used (``lfu``); ``file`` takes ``lru`` only.
        expert_prefetch: With a budget, whether experts that a layer will probably need are copied during the layer
            before; the layer's router predicts them from that layer's tokens. ``auto``: if a GPU reads the host store
            itself; ``true``: on a CPU as well, elsewhere an error; ``false``: never. It changes no step's numbers.
        expert_dtype: With a budget, what experts are quantised to as they are read: ``mxfp8`` or ``mxfp4``, about a
            half or a quarter of bfloat16, so that a budget in bytes holds more. ``None``: as the model is.
        host_cores: With a budget and the host store, cores of this machine, divided among its ranks, that compute some
            of the missing experts while the others are copied: ``off``, their number, or ``auto``: all but one of each
            rank, if a measurement at load says that it is faster. The text is not bit for bit the one without.
        speculate: Self-speculative decoding: draft tokens with fewer experts of each layer and verify them in one pass
            with all. ``conservative`` keeps the distribution of the text; ``adaptive`` accepts more drafts and changes
            it; ``off``. Draft lengths follow measured times; plain steps are taken if they are faster.
        keep_fp8: Keep the experts of a Hugging Face folder in block FP8 as they are stored, also with a budget; else
            they are dequantised.
    """

    source: str | None = None
    prompt: str = ""
    prompts: tuple[str, ...] = ()
    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: str | None = None
    dtype: GenerateDtype = "auto"
    cuda_graph: GraphMode = "auto"
    speculate: SpeculationMode = "off"

    def __post_init__(self) -> None:
        SpeculationConfig.__post_init__(self)  # super() finds no class in one with slots
        require(self.source is None or bool(self.source), f"source={self.source!r} must name a folder")
        require(all(self.prompts), f"prompts={list(self.prompts)} must each have a character")
        require(self.max_new_tokens >= 1, f"max_new_tokens={self.max_new_tokens} must be at least 1")
        usable = self.temperature == 0 or LEAST <= self.temperature <= MOST
        rule = f"must be 0 (the most probable token) or between {LEAST} and {MOST:g}"
        require(usable, f"temperature={self.temperature} {rule}")
        require(self.top_k is None or self.top_k >= 1, f"top_k={self.top_k} must be at least 1, or None for all tokens")
        require(0 < self.top_p <= 1, f"top_p={self.top_p} must be above 0 and at most 1")
        usable = LEAST <= self.repetition_penalty <= MOST
        rule = f"must be between {LEAST} and {MOST:g} (1: none)"
        require(usable, f"repetition_penalty={self.repetition_penalty} {rule}")
        require(self.seed >= 0, f"seed={self.seed} must be at least 0")
        require(self.stop is None or bool(self.stop), f"stop={self.stop!r} must have a character, or be None")
        for name in ("expert_budget", "host_budget"):
            value = getattr(self, name)
            require(value is None or 0 < value < float("inf"), f"{name}={value} must be finite and above 0, or None")
        file_only = self.expert_store == "file" or self.host_budget is None
        require(
            file_only, f"host_budget={self.host_budget} must be None with expert_store=host, which holds all experts"
        )
        check_host_cores(self.host_cores)
        prefetch_wanted(self.expert_prefetch)

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts to continue; ``prompt``, if given, comes first."""
        return (self.prompt, *self.prompts) if self.prompt else self.prompts
