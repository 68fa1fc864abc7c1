"""The analysis derives the axis of every pipeline from descriptions, and refuses with the axis and the reason."""

import dataclasses
import re

import pytest

from comet.schedule.dependency import AxisUse, DependencyError, Operator, TileAxis, analyze, operators, pipelines

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
    consumers = ("grouped_gemm_layer0", "topk_reduce_combine", "dgrad_gemm_layer1", "reduce_combine_grad")
    for consumer, part in zip(consumers, pipelines().values(), strict=True):
        assert set(part.reasons) == {"tokens", "hidden"}, consumer
        assert all(consumer in reason for reason in part.reasons.values()), consumer


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


ROW = {"tokens": ALONE}
SCALAR = Operator(name="send", reads={}, writes={"scalar": {}}, communicates=True)
TWO = Operator(name="send", reads={}, writes={"a": ROW, "b": ROW}, communicates=True)


def reading(result: dict[str, AxisUse] = ROW, **reads: dict[str, AxisUse]) -> Operator:
    return Operator(name="gemm", reads=reads, writes={"out": result})


@pytest.mark.parametrize(
    ("producer", "consumer", "message"),
    [
        (
            send(),
            use("softmax", REDUCED, REDUCED),
            "no axis of 'rows' lets 'send' and 'softmax' overlap: axis 'tokens': softmax reduces over it, so it needs "
            "all elements at once; axis 'hidden': softmax reduces over it, so it needs all elements at once",
        ),
        (
            send(tokens=REDUCED),
            use("gemm", ALONE, REDUCED),
            "overlap: axis 'tokens': send finishes its elements only together; axis 'hidden': gemm reduces over it",
        ),
        (send(tensor="a"), reading(b=ROW), "'send' and 'gemm' share no tensor: ['a'] are written, ['b'] are read"),
        (TWO, reading(a=ROW, b=ROW), "'send' and 'gemm' share several tensors, ['a', 'b']"),
        (reading(), reading(out=ROW), "'gemm' and 'gemm' have nothing to overlap: neither communicates"),
        (send(), send(), "'send' and 'send' have nothing to overlap: both communicate"),
        (send(), reading(rows=ROW), "disagree about the axes of 'rows': ('tokens', 'hidden') and ('tokens',)"),
        (send(), reading(rows={"hidden": ALONE, "tokens": ALONE}), "and ('hidden', 'tokens')"),
        (SCALAR, reading(scalar={}), "no axis of 'scalar' lets 'send' and 'gemm' overlap: it has no axes"),
        *(
            (
                send(),
                reading(result, rows={"tokens": GATHERED, "hidden": REDUCED}),
                "axis 'tokens' of 'rows' must be one of the two sides of the tiles of 'gemm', but its output 'out' has",
            )
            for result in ({"slots": ALONE, "ffn": ALONE}, ROW)
        ),
    ],
)
def test_what_cannot_overlap_is_refused_with_axis_and_reason(
    producer: Operator, consumer: Operator, message: str
) -> None:
    with pytest.raises(DependencyError, match=re.escape(message)) as refusal:
        analyze(producer, consumer)
    assert isinstance(refusal.value, ValueError)
