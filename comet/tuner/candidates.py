"""Which settings are worth measuring: the legal ones, each way to launch once, cut down by the model."""

from __future__ import annotations

from itertools import islice

from comet.config import OverlapConfig, Transport
from comet.tuner.layers import effective
from comet.tuner.machine import Machine
from comet.tuner.model import BLOCK_ROWS, Prediction, all_gemms, predict
from comet.tuner.problem import Problem

COMM_BLOCKS = (4, 8, 16, 24, 32, 48, 64)
PANELS = (1, 2, 3, 4, 6, 8)
# Other values of each knob of the best that are worth measuring; all panels, so that points can be compared.
KNOBS = {"num_panels": len(PANELS) - 1, "comm_blocks": 2, "num_phases": 1}
FIELDS = (*KNOBS, "block_rows", "beside", "transport")
MOST_SETTINGS = 12
# Beyond this ratio to the best not even a wrong prediction makes a setting the fastest.
HOPELESS = 1.3


def candidates(problem: Problem, machine: Machine) -> list[OverlapConfig]:
    """Every setting the model compares; all are legal for the problem and the machine, and differ in a launch."""
    ranks = problem.world_size
    phases = sorted({2, 3, 4, ranks})
    blocks = [num for num in COMM_BLOCKS if num < machine.num_sms] or [1]
    splits: list[tuple[Transport, bool, int]] = [("push", beside, num) for num in blocks for beside in (True, False)]
    if ranks > 1:
        splits += [("copy", True, 0), *(("copy", False, num) for num in blocks)]
    everything = (
        OverlapConfig(
            comm_blocks=num,
            num_phases=num_phases,
            num_panels=num_panels,
            block_rows=block_rows,
            beside=beside,
            transport=transport,
        )
        for transport, beside, num in splits
        for num_phases in phases
        for num_panels in PANELS
        for block_rows in BLOCK_ROWS
    )
    return list(dict.fromkeys(effective(setting, problem, machine) for setting in everything))


def propose(problem: Problem, machine: Machine) -> list[Prediction]:
    """The candidates worth measuring, best first.

    They are plain, the default, and where they may pay: the best with tiles of 128 rows beside communication (where
    there are layers in CUDA C++, they are in it), with smaller tiles, of the split launches and with copy engines, and
    for each knob of the first its other values. Measured neighbours tell where the model is wrong; the next best
    settings of the whole list would all be alike. With the default among them, a tuned layer is never slower than an
    untuned one.

    Args:
        problem: Shape, tokens and routing density.
        machine: Its rates.

    Returns:
        At most 12 predictions with distinct settings, ascending in ms; the plain path is one of them.
    """
    gemms = all_gemms(problem, machine)
    settings = candidates(problem, machine)
    ranked = sorted((predict(problem, setting, machine, gemms) for setting in settings), key=_order)
    best = next(item.setting for item in ranked if item.setting and _kind(item.setting) == "beside")
    assert best is not None
    firsts = {_kind(item.setting): item for item in reversed(ranked) if item.setting}
    tried = list(firsts.values())
    for knob, num in KNOBS.items():
        tried += islice((item for item in ranked if item.setting and _differs_only(item.setting, best, knob)), num)
    bound = HOPELESS * ranked[0].ms
    plain = predict(problem, None, machine, gemms)
    chosen = {plain.setting: plain}
    if OverlapConfig().comm_blocks < machine.num_sms:
        default = effective(OverlapConfig(), problem, machine)
        chosen[default] = predict(problem, default, machine, gemms)
    for item in sorted(tried, key=_order):
        if item.ms <= bound and len(chosen | {item.setting: item}) <= MOST_SETTINGS:
            chosen[item.setting] = item
    return sorted(chosen.values(), key=_order)


def _kind(setting: OverlapConfig) -> str:
    """What tells launches apart before all else."""
    if setting.transport == "copy":
        return "copy"
    if not setting.beside:
        return "split"
    return "beside" if setting.block_rows == max(BLOCK_ROWS) else "small tiles"


def _order(prediction: Prediction) -> tuple[float, str]:
    return prediction.ms, str(prediction.setting)


def _differs_only(setting: OverlapConfig, other: OverlapConfig, knob: str) -> bool:
    return [name for name in FIELDS if getattr(setting, name) != getattr(other, name)] == [knob]
