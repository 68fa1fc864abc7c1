"""Settings of the ``generate`` task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from comet import limits
from comet.config import SpeculationConfig, SpeculationMode
from comet.experts.options import StoreOptions
from comet.utils.choices import GraphMode

GenerateDtype = Literal["auto", "float32", "bfloat16"]
LEAST, MOST = 1e-6, 1e6  # limits of factors on logits, which stay finite and different within them
TEMPERATURE = limits.Limit(
    lambda value, _: value == 0 or LEAST <= value <= MOST,
    f"0 (the most probable token) or between {LEAST} and {MOST:g}",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig(SpeculationConfig, StoreOptions):
    """The texts to continue, how, and for how long; ``SpeculationConfig`` says how tokens are drafted.

    Args:
        source: A checkpoint of a training job, its output folder (the newest complete checkpoint is taken), or a folder
            of a Hugging Face model; it also decides ``model``.
        prompt: Text to continue.
        prompts: More texts, continued at the same time.
        max_new_tokens: Most tokens made per sequence; a full context or the stop text ends a sequence earlier.
        temperature: Logits are divided by it before a token is drawn; 0 always takes the most probable token.
        top_k: Draw from this number of the most probable tokens; ``None``: from all.
        top_p: Draw from the smallest set of most probable tokens that has this share of the probability.
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

    source: Annotated[str, limits.filled("the name of a folder")] | None = None
    prompt: str = ""
    prompts: tuple[Annotated[str, limits.filled("at least one character")], ...] = ()
    max_new_tokens: limits.Count = 200
    temperature: Annotated[float, TEMPERATURE] = 0.8
    top_k: limits.Count | None = None
    top_p: Annotated[float, limits.above(0), limits.at_most(1)] = 1.0
    repetition_penalty: Annotated[float, limits.at_least(LEAST), limits.at_most(MOST)] = 1.0
    seed: limits.Natural = 0
    stop: Annotated[str, limits.filled("at least one character")] | None = None
    dtype: GenerateDtype = "auto"
    cuda_graph: GraphMode = "auto"
    speculate: SpeculationMode = "off"

    def __post_init__(self) -> None:
        StoreOptions.__post_init__(self)  # super() finds no class in one with slots

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts to continue; ``prompt``, if given, comes first."""
        return (self.prompt, *self.prompts) if self.prompt else self.prompts
