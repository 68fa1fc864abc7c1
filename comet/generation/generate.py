"""The loop that makes tokens, and what it measures.

Letters: B sequences, S positions of the longest prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from comet.config import require
from comet.errors import NotFiniteError
from comet.generation.engine import Engine
from comet.generation.sampling import NO_TOKEN, Sampler, tokens_seen, uniform_draws
from comet.generation.speculation import Speculation
from comet.generation.text import Codec, Continuation
from comet.jobs.generate import GenerateConfig
from comet.utils.graphs import WARM_CALLS

NOT_FINITE = "NaN or infinity"
Show = Callable[[int, Continuation, str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """The texts that were made, and how fast."""

    texts: tuple[str, ...]  # continuation of each prompt
    stopped_by: tuple[str, ...]  # why each ended: end token, stop, length (max_new_tokens) or context
    prompt_tokens: int  # of all prompts
    new_tokens: int  # of all continuations
    # from the start of reading the prompts until every sequence's first token was known, in seconds
    first_token_s: float
    decode_s: float  # from then until the last token was known
    steps: int  # decode steps; every pass that drafts or verifies is one
    graph_fallback_reason: str  # why they were launched kernel by kernel; empty if they were replayed from a CUDA graph
    speculation: dict[str, Any] | None = None  # what was drafted and accepted; None without speculation


def encode_prompts(config: GenerateConfig, codec: Codec, context: int) -> list[list[int]]:
    """The tokens of every prompt."""
    require(bool(config.texts), "generate.prompt='' must have a character (or give generate.prompts)")
    prompts = [codec.encode(text) for text in config.texts]
    for text, prompt in zip(config.texts, prompts, strict=True):
        require(bool(prompt), f"generate.prompt={text!r} must encode to at least one token")
    token_limits(prompts, config, context)
    return prompts


def generate(
    engine: Engine,
    codec: Codec,
    prompts: Sequence[Sequence[int]],
    config: GenerateConfig,
    *,
    context: int,
    show: Show | None = None,
) -> Generated:
    """Continue all prompts at once (collective over the engine's ranks).

    Args:
        engine: The model; with ``config.speculate`` one that was made to draft.
        context: Most tokens of a sequence, prompt included.
        show: Called with (index, continuation, text) whenever text of a sequence became certain or it ended.

    Raises:
        NotFiniteError: If the logits of a sequence that goes on, or of its drafts, leave no finite largest one. All
            ranks raise it. Where ``Engine.check`` finds another cause, that is raised instead.
    """
    config = replace(config, max_new_tokens=min(config.max_new_tokens, context))  # each has a draw
    limits = token_limits(prompts, config, context)
    sequences = [
        Continuation(codec.stream(prompt), limit=limit, stop=config.stop, end_ids=codec.end_ids)
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    ids, lengths = pad(prompts, engine.device)
    penalises = config.repetition_penalty != 1
    seen = tokens_seen(ids, lengths, codec.num_tokens) if penalises else None
    sampler = Sampler(config, len(prompts), engine.device, num_tokens=codec.num_tokens, seen=seen)
    advance: PlainSteps | Speculation = PlainSteps(engine, sampler)
    if config.speculate != "off":
        numbers, rounds = 2 * config.draft_tokens + 1, config.max_new_tokens
        draws = [uniform_draws(config.seed, index, rounds * numbers) for index in range(len(prompts))]
        of_rounds = torch.stack(draws, dim=1).unflatten(0, (rounds, numbers)).transpose(1, 2)
        advance = Speculation(engine, sampler, config, of_rounds[1:].to(engine.device))  # the first token's is used
    started = time.perf_counter()
    with true_cause(engine):
        chosen = sampler.choose(engine.prefill(ids, lengths, most_positions(prompts, limits)), 0)
        tokens, first_token_s = [[token] for token in chosen.tolist()], 0.0
        if [NO_TOKEN] in tokens:
            raise NotFiniteError(f"logits of the prompts must be numbers, but the model's weights make {NOT_FINITE}")
    while True:
        for index, (sequence, made) in enumerate(zip(sequences, tokens, strict=True)):
            for token in made:
                if not sequence.done:  # tokens behind its end were drafted in vain
                    text = sequence.push(token)
                    if show is not None and (text or sequence.done):
                        show(index, sequence, text)
        first_token_s = first_token_s or time.perf_counter() - started
        active = [not sequence.done for sequence in sequences]
        if not any(active):
            break
        room = [limit - sequence.num_tokens for sequence, limit in zip(sequences, limits, strict=True)]
        with true_cause(engine):
            chosen, tokens = advance(chosen, active, max(compress(room, active)))
            for index in compress(range(len(tokens)), active):
                if NO_TOKEN in tokens[index]:
                    raise NotFiniteError(
                        f"logits of prompt {index} must be numbers, but the model makes {NOT_FINITE} "
                        f"behind {sequences[index].num_tokens} new tokens"
                    )
        chosen = chosen.clamp(min=0)  # NO_TOKEN of a sequence that has ended has no embedding
    stopped_by = [
        "context" if sequence.stopped_by == "length" and limit < config.max_new_tokens else sequence.stopped_by
        for sequence, limit in zip(sequences, limits, strict=True)
    ]
    return Generated(
        texts=tuple(sequence.text for sequence in sequences),
        stopped_by=tuple(stopped_by),
        prompt_tokens=sum(map(len, prompts)),
        new_tokens=sum(sequence.num_tokens for sequence in sequences),
        first_token_s=first_token_s,
        decode_s=time.perf_counter() - started - first_token_s,
        steps=advance.passes,
        graph_fallback_reason=engine.graph_fallback_reason,
        speculation=advance.report.facts() if isinstance(advance, Speculation) else None,
    )


@contextmanager
def true_cause(engine: Engine) -> Iterator[None]:
    """Raise the cause that the engine knows in place of ``NotFiniteError``: that the host's cores did not answer."""
    try:
        yield
    except NotFiniteError:
        engine.check()
        raise


class PlainSteps:
    """One token of every sequence a step."""

    def __init__(self, engine: Engine, sampler: Sampler) -> None:
        self.engine = engine
        self.sampler = sampler
        self.passes = 0

    def __call__(self, last: Tensor, active: Sequence[bool], most_tokens: int) -> tuple[Tensor, list[list[int]]]:
        """The tokens ``(B,)`` behind the ``last (B,)``, and the same as lists; see ``Speculation.__call__``."""
        self.passes += 1
        chosen = self.sampler.choose(self.engine.decode(last), self.passes)
        return chosen, [[token] for token in chosen.tolist()]


def warm_up(engine: Engine, prompts: Sequence[Sequence[int]], config: GenerateConfig, *, context: int) -> None:
    """Read the prompts and take some steps: what is compiled, allocated and captured once is not to be measured."""
    ids, lengths = pad(prompts, engine.device)
    limits = token_limits(prompts, config, context)
    engine.prefill(ids, lengths, most_positions(prompts, limits))
    for _ in range(WARM_CALLS + 1):
        engine.decode(ids[:, 0])
        for length in range(1, min(config.draft_tokens, max(limits) - 2) + 1 if config.speculate != "off" else 0):
            before = engine.lengths.clone()
            engine.draft(ids[:, 0])
            engine.rewind(before)
            engine.verify(ids[:, :1].expand(-1, length + 1))
            engine.rewind(before)


def token_limits(prompts: Sequence[Sequence[int]], config: GenerateConfig, context: int) -> list[int]:
    """Most new tokens of each sequence; prompts of 3 and 9 tokens, 4 new ones and a context of 10: 4 and 1."""
    for prompt in prompts:
        rule = f"must be shorter than the model's context of {context}"
        require(len(prompt) < context, f"generate.prompt of {len(prompt)} tokens {rule}")
    return [min(config.max_new_tokens, context - len(prompt)) for prompt in prompts]


def most_positions(prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> int:
    return max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))


def pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and lengths: prompts ``[7, 8]`` and ``[9]`` are ``[[7, 8], [9, 0]]`` and ``[2, 1]``."""
    longest = max(map(len, prompts))
    rows = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    return torch.tensor(rows, device=device), torch.tensor([len(prompt) for prompt in prompts], device=device)
