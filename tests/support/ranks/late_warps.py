"""Triton's kernels with pauses in them, for tests on a GPU of what must not depend on which warp comes first.

    COMET_TEST_LATE_WARPS=SEED pytest tests/kernels/experts -m gpu
    COMET_TEST_LATE_WARPS=SEED python tests/sanitize.py

One warp of every fourth block, another for each place, pauses before an access to global memory: some of these places,
as the seed has it. Warps of one block then read at moments that differ by microseconds what others change meanwhile, as
they do once in a million launches without it. Kernels of CUDA C++ stay as they are.
"""

import os
import random
import re
import tempfile
from pathlib import Path
from typing import Any

LATE_WARPS = "COMET_TEST_LATE_WARPS"
ACCESS = re.compile(r"\s*(?:@!?%p\d+ )?(?:ld|st|atom|red|griddepcontrol)\.(?!param|shared|local|const)")
SHARE = 0.3  # share of the accesses that get a pause
PAUSES_NS = (300, 2_000, 10_000)


def with_pauses(ptx: str, seed: int, num_warps: int) -> str:
    """The same kernel, with pauses."""
    drawn, lines = random.Random(f"{seed} {ptx}"), []
    for line in ptx.splitlines():
        if ACCESS.match(line) and drawn.random() < SHARE:
            lines.append(_pause(drawn.randrange(num_warps), drawn.randrange(4), drawn.choice(PAUSES_NS)))
        lines.append(line)
    return "\n".join(lines) + "\n"


def _pause(warp: int, block: int, pause_ns: int) -> str:
    return (
        "{ .reg .pred late; .reg .b32 warp, block; mov.u32 warp, %tid.x; mov.u32 block, %ctaid.x;"
        f" shr.u32 warp, warp, 5; and.b32 block, block, 3; xor.b32 block, block, {block}; xor.b32 warp, warp, {warp};"
        f" or.b32 warp, warp, block; setp.eq.u32 late, warp, 0; @late nanosleep.u32 {pause_ns}; }}"
    )


def install(seed: int) -> None:
    """Let every kernel that this process compiles have them."""
    from triton import knobs

    def change(backend: Any, stages: dict[str, Any], options: Any, *_: object) -> None:
        make = stages["ptx"]
        stages["ptx"] = lambda source, metadata: with_pauses(make(source, metadata), seed, options.num_warps)

    knobs.runtime.add_stages_inspection_hook = change
    knobs.cache.dir = str(Path(tempfile.gettempdir(), f"late-warps-{seed}"))


def install_if_asked() -> None:
    """In each process of a test run."""
    if seed := os.environ.get(LATE_WARPS):
        install(int(seed))
