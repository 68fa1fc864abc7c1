"""The analysis derives the axis of every pipeline from descriptions, and refuses with the axis and the reason."""

from __future__ import annotations

import dataclasses
import re

import pytest

from comet.schedule.dependency import (
    AxisUse,
    Decomposition,
    DependencyError,
    Operator,
    TileAxis,
    analyze,
    operators,
    pipelines,
)

ALONE, GATHERED, REDUCED = AxisUse.INDEPENDENT, AxisUse.GATHERED, AxisUse.REDUCED


def send(tokens: AxisUse = ALONE, hidden: AxisUse = ALONE, tensor: str = "rows") -> Operator:
    return Operator(name="send", reads={}, writes={tensor: {"tokens": tokens, "hidden": hidden}}, communicates=True)


def use(name: str, tokens: AxisUse, hidden: AxisUse, tensor: str = "rows") -> Operator:
    result = {"tokens": ALONE, "hidden": ALONE}
    return Operator(name=name, reads={tensor: {"tokens": tokens, "hidden": hidden}}, writes={"result": result})


def test_the_four_pipelines() -> None:
    found = {name: (part.tensor, part.axis, part.tile_axis) for name, part in pipelines().items()}
    assert found == {
        "layer0": ("x_recv", "tokens", TileAxis.ROWS),
        "layer1": ("y_rows", "hidden", TileAxis.COLUMNS),
        "layer1_backward": ("dy_recv", "tokens", TileAxis.ROWS),
        "layer0_backward": ("dx_rows", "hidden", TileAxis.COLUMNS),
    }


def test_every_axis_of_the_shared_tensor_has_a_reason_naming_the_consumer() -> None:
    for name, part in pipelines().items():
        assert set(part.reasons) == {"tokens", "hidden"}, name
        assert all(part.consumer.name in reason for reason in part.reasons.values()), name


def test_the_answer_follows_the_description_not_the_name() -> None:
    """Describe the layer-1 consumer as a plain send without top-k reduction: tokens become usable."""
    named = operators()
    rows = {"y_rows": {"tokens": GATHERED, "hidden": REDUCED}}
    other = dataclasses.replace(named["topk_reduce_combine"], reads=rows)
    part = analyze(named["grouped_gemm_layer1"], other)
    assert (part.axis, part.tile_axis) == ("tokens", TileAxis.ROWS)


@pytest.mark.parametrize(
    ("produced", "consumed", "axis"),
    [
        ((ALONE, ALONE), (ALONE, ALONE), "tokens"),  # both work: the outermost
        ((ALONE, ALONE), (GATHERED, ALONE), "hidden"),  # an axis without an index is better
        ((GATHERED, ALONE), (ALONE, ALONE), "hidden"),
        ((ALONE, ALONE), (GATHERED, GATHERED), "tokens"),
        ((ALONE, REDUCED), (GATHERED, ALONE), "tokens"),  # a half-finished element is of no use
        ((REDUCED, GATHERED), (ALONE, ALONE), "hidden"),
    ],
)
def test_choice_between_axes(produced: tuple[AxisUse, AxisUse], consumed: tuple[AxisUse, AxisUse], axis: str) -> None:
    assert analyze(send(*produced), use("gemm", *consumed)).axis == axis


def test_softmax_over_both_axes_is_refused_with_both_reasons() -> None:
    with pytest.raises(DependencyError) as error:
        analyze(send(), use("softmax", REDUCED, REDUCED))
    for axis in ("tokens", "hidden"):
        assert re.search(rf"axis '{axis}': softmax reduces over it, so it needs all elements at once", str(error.value))
    assert isinstance(error.value, ValueError)


def test_each_side_can_close_another_axis() -> None:
    message = (
        r"no axis of 'rows' lets 'send' and 'gemm' overlap: axis 'tokens': send finishes its elements only together; "
        r"axis 'hidden': gemm reduces over it"
    )
    with pytest.raises(DependencyError, match=message):
        analyze(send(tokens=REDUCED), use("gemm", ALONE, REDUCED))


def test_no_shared_tensor() -> None:
    with pytest.raises(DependencyError, match=r"share no tensor: \['a'\] are written, \['b'\] are read"):
        analyze(send(tensor="a"), use("gemm", ALONE, REDUCED, tensor="b"))


def test_several_shared_tensors() -> None:
    axes = {"tokens": ALONE}
    producer = Operator(name="p", reads={}, writes={"a": axes, "b": axes}, communicates=True)
    consumer = Operator(name="c", reads={"a": axes, "b": axes}, writes={"out": axes})
    with pytest.raises(DependencyError, match=r"'p' and 'c' share several tensors, \['a', 'b'\]"):
        analyze(producer, consumer)


@pytest.mark.parametrize(
    ("pair", "which"),
    [
        (("grouped_gemm_layer0", "grouped_gemm_layer1"), "neither communicates"),
        (("topk_reduce_combine", "dispatch"), "both communicate"),
    ],
)
def test_exactly_one_communicates(pair: tuple[str, str], which: str) -> None:
    named = operators()
    with pytest.raises(DependencyError, match=f"'{pair[0]}' and '{pair[1]}' have nothing to overlap: {which}"):
        analyze(named[pair[0]], named[pair[1]])


@pytest.mark.parametrize("axes", [{"tokens": ALONE}, {"hidden": ALONE, "tokens": ALONE}, {}])
def test_disagreement_about_axes(axes: dict[str, AxisUse]) -> None:
    consumer = Operator(name="c", reads={"rows": axes}, writes={"out": {"tokens": ALONE, "hidden": ALONE}})
    with pytest.raises(DependencyError, match=r"disagree about the axes of 'rows': \('tokens', 'hidden'\) and "):
        analyze(send(), consumer)


def test_tensor_without_axes() -> None:
    producer = Operator(name="p", reads={}, writes={"scalar": {}}, communicates=True)
    consumer = Operator(name="c", reads={"scalar": {}}, writes={"out": {}})
    with pytest.raises(DependencyError, match=r"no axis of 'scalar' .*: it has no axes"):
        analyze(producer, consumer)


def test_operator_must_write_something() -> None:
    with pytest.raises(ValueError, match="of operator 'sink' must name at least one tensor"):
        Operator(name="sink", reads={}, writes={})


def test_an_axis_that_disappears_is_not_independent() -> None:
    with pytest.raises(ValueError, match=r"reads\['rows'\]\['hidden'\]=independent of operator 'sum' must be an axis"):
        Operator(name="sum", reads={"rows": {"tokens": ALONE, "hidden": ALONE}}, writes={"out": {"tokens": ALONE}})


@pytest.mark.parametrize("result", [{"slots": ALONE, "ffn": ALONE}, {"tokens": ALONE}])
def test_axis_that_is_no_side_of_the_tiles(result: dict[str, AxisUse]) -> None:
    gemm = Operator(name="gemm", reads={"rows": {"tokens": GATHERED, "hidden": REDUCED}}, writes={"out": result})
    part: Decomposition = analyze(send(), gemm)
    with pytest.raises(DependencyError, match=r"axis 'tokens' of 'rows' must be one of the two sides of the tiles of"):
        _ = part.tile_axis
