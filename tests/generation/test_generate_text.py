"""Generation without a model: choosing tokens, settings, and text that is shown only when it is certain."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import FakeGPU

from comet.generation.generate import encode_prompts
from comet.generation.report import Printer, context_note, table
from comet.generation.roof import read_bytes_per_second
from comet.generation.sampling import Sampler, draw
from comet.generation.source import nested
from comet.generation.text import ByteCodec, ByteStream, Continuation, stop_prefix_length, visible
from comet.jobs.generate import GenerateConfig

CPU = torch.device("cpu")


def test_draw_example_of_the_docstring():
    logits = torch.tensor([[0.5, 0.125, 0.375]]).log().expand(2, 3)
    assert draw(logits, torch.tensor([0.5, 0.6], dtype=torch.float64), None, 0.8).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (None, 1.0, [0.4, 0.1, 0.3, 0.2]),
        (2, 1.0, [4 / 7, 0, 3 / 7, 0]),
        (9, 1.0, [0.4, 0.1, 0.3, 0.2]),
        (None, 0.39, [1.0, 0, 0, 0]),
        (None, 0.41, [4 / 7, 0, 3 / 7, 0]),
        (3, 0.75, [4 / 7, 0, 3 / 7, 0]),  # of the three, the first two have 0.78
        (1, 0.1, [1.0, 0, 0, 0]),
    ],
)
def test_draws_have_the_distribution_that_was_asked_for(top_k, top_p, expected):
    logits = torch.tensor([0.4, 0.1, 0.3, 0.2], dtype=torch.float64).log().expand(1000, 4)
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = draw(logits, uniform, top_k, top_p).bincount(minlength=4) / 1000
    torch.testing.assert_close(counts, torch.tensor(expected), rtol=0, atol=1.1e-3)


def test_draws_at_the_ends_and_among_impossible_tokens():
    logits = torch.tensor([[-math.inf, 0.0, -800.0, 0.0]]).expand(3, 4)
    uniform = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, uniform, None, 1.0).tolist() == [1, 3, 3]


def test_temperature_flattens():
    logits = torch.tensor([[2.0, 0.0]]).expand(2000, 2)
    share = [
        (Sampler(GenerateConfig(temperature=value), 2000, CPU)(logits, 0) == 0).float().mean() for value in (0.5, 4.0)
    ]
    assert share[0] == pytest.approx(1 / (1 + math.exp(-4.0)), abs=0.03)
    assert share[1] == pytest.approx(1 / (1 + math.exp(-0.5)), abs=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"temperature": -0.1}, r"temperature=-0\.1 must be finite and at least 0"),
        ({"temperature": math.nan}, "temperature=nan must be finite"),
        ({"temperature": math.inf}, "temperature=inf must be finite"),
        ({"top_p": 0.0}, r"top_p=0\.0 must be above 0 and at most 1"),
        ({"top_p": 1.1}, r"top_p=1\.1 must be above 0"),
        ({"top_p": math.nan}, "top_p=nan must be above 0"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"stop": ""}, "stop='' must have a character"),
        ({"source": ""}, "source='' must name a folder"),
        ({"prompts": ("a", "")}, r"prompts=\['a', ''\] must each have a character"),
        ({"dtype": "float8"}, "dtype='float8' must be one of auto, float32, bfloat16"),
    ],
)
def test_settings_rules(changes, message):
    with pytest.raises(ValueError, match=message):
        GenerateConfig(**changes)


def test_prompts_must_exist_and_fit():
    codec = ByteCodec()
    assert encode_prompts(GenerateConfig(prompt="x", prompts=("yz",)), codec, 3) == [[120], [121, 122]]
    with pytest.raises(ValueError, match=r"generate\.prompt='' must have a character"):
        encode_prompts(GenerateConfig(), codec, 32)
    with pytest.raises(ValueError, match=r"generate\.prompt of 32 tokens must be shorter than the .* context of 32"):
        encode_prompts(GenerateConfig(prompt="x" * 32), codec, 32)


def test_bytes_are_held_back_until_they_form_a_character():
    stream = ByteStream()
    assert [stream.push(byte) for byte in "a\u00e9\u20ac".encode()] == ["a", "", "\u00e9", "", "", "\u20ac"]
    assert [stream.push(0xE2), stream.push(0x41), stream.push(0xC3), stream.finish()] == ["", "\ufffdA", "", "\ufffd"]
    follows = ByteCodec().stream([0x41, 0xC3])
    assert follows.push(0xA9) == "\u00e9", "a prompt may end within a character"
    assert ByteCodec().encode("\u00e9\udcff") == [0xC3, 0xA9, 0xFF], "bytes of a command line that are no UTF-8"


def shown(text, *, stop=None, limit=99):
    sequence = Continuation(ByteStream(), limit=limit, stop=stop)
    return [sequence.push(byte) for byte in text.encode()], sequence


def test_stop_text_is_never_shown_in_part():
    pieces, sequence = shown("a--b---c", stop="---")
    assert pieces == ["a", "", "", "--b", "", "", "", ""]
    assert (sequence.text, sequence.done, sequence.num_tokens) == ("a--b", True, 7)
    pieces, sequence = shown("x--", stop="---", limit=3)
    assert (pieces[-1], sequence.text, sequence.done) == ("--", "x--", True), "held text is not lost at the end"
    assert [stop_prefix_length(text, "\n\n") for text in ("a\n", "a", "", "\n\na")] == [1, 0, 0, 0]
    assert stop_prefix_length("ab" * 5, "babac") == 3


def test_an_end_token_ends_without_text():
    sequence = Continuation(ByteStream(), limit=9, end_ids=frozenset([2]))
    assert [sequence.push(token) for token in (65, 2, 66)] == ["A", "", ""]
    assert (sequence.text, sequence.stopped_by, sequence.num_tokens) == ("A", "end token", 2)


def test_nothing_shown_commands_the_terminal():
    assert visible("a\tb\n\x1b[2J\r\u00e9\x9b") == "a\tb\n\\x1b[2J\\r\u00e9\\x9b"


def test_printer_shows_sequences_in_turn():
    out = io.StringIO()
    printer = Printer(["one", "two"], out)
    first, second = (Continuation(ByteStream(), limit=2) for _ in range(2))
    for sequence, byte, index in ((second, 88, 1), (first, 65, 0), (second, 89, 1)):
        printer(index, sequence, sequence.push(byte))
    assert out.getvalue() == "oneA", "the second waits for the first"
    printer(0, first, first.push(66))
    assert out.getvalue() == "oneAB\n\ntwoXY\n"


def test_printer_survives_a_terminal_without_the_character():
    raw = io.BytesIO()
    printer = Printer(["\u20ac"], io.TextIOWrapper(raw, encoding="ascii"))
    printer(0, Continuation(ByteStream(), limit=2), "\u00e9")
    assert raw.getvalue() == b"\\u20ac\\xe9"


def test_texts_cut_at_the_context_are_named():
    assert context_note(["length", "stop"], 32) == ""
    assert (
        context_note(["context"], 32)
        == "comet: text 1 of 1 ended at the model's context of 32 tokens, prompt included\n"
    )
    assert context_note(["context", "stop", "context"], 32).startswith("comet: texts 1, 3 of 3 ended at ")


def test_table_leaves_out_what_was_not_measured():
    result = {"prompt_tokens": 1, "new_tokens": 1, "time_to_first_token_s": 0.5, "tokens_per_second": None}
    assert table(result).splitlines() == ["prompt        1 tokens", "new           1 tokens", "first token   500.0 ms"]


def test_read_rate_is_positive():
    assert read_bytes_per_second(CPU, 2**20) > 0


def test_the_roof_is_read_by_a_warm_gpu(monkeypatch):
    """Reads of 1 / 128 s: half a second of them, then ten that count, each launched while the GPU waits for it."""
    gpu, waits = FakeGPU(2**-7), []
    gpu.install(monkeypatch)
    buffer = SimpleNamespace(nbytes=2**20, sum=lambda: gpu.calls.append(("read", 0)))
    monkeypatch.setattr(torch, "ones", lambda *_, **__: buffer)
    monkeypatch.setattr(torch.cuda, "_sleep", waits.append)
    rate = read_bytes_per_second(torch.device("cuda"), 2**20)
    assert len(gpu.calls) == len(waits) == 64 + 10
    assert rate == pytest.approx(2**20 / 68.5e-3)  # the ten take 64, 65, ..., 73 ms
    assert rate == pytest.approx(1.53e7, rel=1e-3)


def test_nested_example_of_the_docstring():
    assert nested({"a": 1, "moe.b": 2}) == {"a": 1, "moe": {"b": 2}}
