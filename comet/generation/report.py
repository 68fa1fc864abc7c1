"""What a person sees of a generation: the text as it is made, a short table, and the result line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from comet.generation.text import Continuation, visible


class Printer:
    """Writes the texts one after the other: the first unfinished one as it is made, the others in their turn."""

    def __init__(self, prompts: Sequence[str], out: TextIO) -> None:
        self._prompts = prompts
        self._out = out
        self._waiting = [""] * len(prompts)
        self._done = [False] * len(prompts)
        self._turn = -1
        self._next()

    def __call__(self, index: int, sequence: Continuation, text: str) -> None:
        """Show new text of one sequence; see ``comet.generation.generate.Show``."""
        self._waiting[index] += text
        self._done[index] = sequence.done
        while self._turn < len(self._prompts):
            self._write(self._waiting[self._turn])
            self._waiting[self._turn] = ""
            if not self._done[self._turn]:
                break
            self._write("\n")
            self._next()

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the table and, as the last line, the result as one JSON object."""
        self._write(f"----\n{table(result)}\n{json.dumps(result)}\n")

    def _next(self) -> None:
        self._turn += 1
        if self._turn < len(self._prompts):
            self._write(("\n" if self._turn else "") + self._prompts[self._turn])

    def _write(self, text: str) -> None:
        encoding = self._out.encoding or "utf-8"
        self._out.write(visible(text).encode(encoding, "backslashreplace").decode(encoding))
        self._out.flush()


def context_note(stopped_by: Sequence[str], context: int) -> str:
    """A line for people about texts that had to end before they were as long as was asked for; "" if none had to."""
    cut = [str(number) for number, reason in enumerate(stopped_by, 1) if reason == "context"]
    if not cut:
        return ""
    which = f"{'text' if len(cut) == 1 else 'texts'} {', '.join(cut)} of {len(stopped_by)}"
    return f"comet: {which} ended at the model's context of {context} tokens, prompt included\n"


def table(result: Mapping[str, Any]) -> str:
    """The measurements of a result, one per line; what was not measured is left out."""
    rows = [
        ("prompt", f"{result['prompt_tokens']:,} tokens"),
        ("new", f"{result['new_tokens']:,} tokens"),
        ("first token", f"{1e3 * result['time_to_first_token_s']:,.1f} ms"),
    ]
    if result["tokens_per_second"] is not None:
        rows += [
            ("decode", f"{result['tokens_per_second']:,.1f} tokens/s, {_launched(result)}"),
            ("weights read", f"{result['weight_bytes_per_step'] / 1e6:,.2f} MB per step and rank"),
            (
                "memory rate",
                f"{1e3 * result['achieved_tb_per_s']:,.2f} GB/s, {result['roofline_fraction']:.1%} of the "
                f"{1e3 * result['roofline_tb_per_s']:,.1f} GB/s a plain read reaches here",
            ),
        ]
    if cache := result.get("expert_cache"):
        speed = cache["expected_tokens_per_second"]
        told = "" if speed is None else f" and up to {speed:,.1f} tokens/s by bytes alone"
        rows.append(("expert hits", f"{cache['hits']:.3f}; uniform routing: {cache['expected_hits']:.3f}{told}"))
    drafts = result.get("speculation")
    if drafts and drafts["drafted"]:
        rows.append(
            (
                "drafts",
                f"{drafts['acceptance']:.1%} of {drafts['drafted']:,} accepted, "
                f"{drafts['tokens_per_round']:.2f} tokens per round of a sequence",
            )
        )
    return "\n".join(f"{name:<14}{value}" for name, value in rows)


def _launched(result: Mapping[str, Any]) -> str:
    if result["cuda_graph"]:
        return "each step replayed from a CUDA graph"
    return f"without a CUDA graph ({result['graph_fallback_reason'] or 'on another rank'})"
