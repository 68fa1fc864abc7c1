"""Generation with a model: decoding with a cache equals the whole forward pass, and batches equal single sequences."""

import io
import math
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch.nn.functional import rms_norm, silu
from training_cases import MODEL, MOE, awake_model

from comet.decode import MAX_DECODE_TOKENS
from comet.errors import HostComputeError, NotFiniteError
from comet.generation.engine import GPTEngine, freeze
from comet.generation.generate import encode_prompts, generate, warm_up
from comet.generation.sampling import NO_TOKEN, Sampler, draw
from comet.generation.text import (
    ByteCodec,
    ByteStream,
    Continuation,
    Printer,
    stop_prefix_length,
    visible,
)
from comet.jobs.generate import GenerateConfig
from comet.models.cache import KeyValueCache
from comet.models.gpt import rotate
from comet.router.router import score_logits, select_experts, weigh_experts

CPU = torch.device("cpu")
EPSILON = torch.finfo(torch.float32).eps
MODELS = {
    "grouped heads": MODEL,
    "equal heads": replace(MODEL, num_kv_heads=2),
    "first layer dense": replace(MODEL, dense_layers=1),
    "all layers dense": replace(MODEL, dense_layers=2),
    "shared expert": replace(MODEL, moe=replace(MOE, shared_ffn_size=16)),
    "shared expert in decode steps": replace(MODEL, moe=replace(MOE, shared_ffn_size=2 * MOE.ffn_size)),
    "sigmoid, groups, bias": replace(
        MODEL,
        head_dim=24,
        moe=replace(MOE, score="sigmoid", balance="bias", num_groups=2, top_groups=1, shared_ffn_size=48),
    ),
}  # fmt: skip


def random_ids(*shape, seed=3):
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))


def exact_logits(model, ids):
    """The whole model in float64 from its formulas."""
    config, table = model.config, model.rotary.double()[:, : ids.shape[1]]
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    x = weights["embedding.weight"][ids]
    for layer in range(config.num_layers):
        of = {name.split(".", 2)[2]: value for name, value in weights.items() if name.startswith(f"blocks.{layer}.")}
        normed = rms_norm(x, x.shape[-1:], of["attention_norm.weight"], EPSILON)
        heads = (normed @ of["attention.qkv.weight"].T).unflatten(-1, (-1, config.head_width)).transpose(1, 2)
        query, key, value = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], 1)
        query, key = (rotate(rms_norm(part, part.shape[-1:], None, EPSILON), table) for part in (query, key))
        repeat = config.num_heads // config.num_kv_heads
        scores = query @ key.repeat_interleave(repeat, 1).mT / math.sqrt(config.head_width)
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), -math.inf)
        mixed = scores.softmax(-1) @ value.repeat_interleave(repeat, 1)
        x = x + mixed.transpose(1, 2).flatten(2) @ of["attention.out.weight"].T
        tokens = rms_norm(x, x.shape[-1:], of["ffn_norm.weight"], EPSILON).flatten(0, 1)
        x = x + exact_ffn(config.moe, of, tokens).view_as(x)
    return rms_norm(x, x.shape[-1:], weights["norm.weight"], EPSILON) @ weights["head.weight"].T


def swiglu(tokens, w1, w2):
    gate, up = (tokens @ w1.T).chunk(2, -1)
    return (silu(gate) * up) @ w2.T


def exact_ffn(moe, of, tokens):
    if "ffn.router.weight" not in of:
        return swiglu(tokens, of["ffn.w1"], of["ffn.w2"])
    scores = score_logits(tokens @ of["ffn.router.weight"].T, moe.score)
    ids = select_experts(scores + of.get("ffn.router.selection_bias", 0), moe)
    routing = torch.zeros_like(scores).scatter(1, ids, weigh_experts(scores, ids, moe))
    experts = [swiglu(tokens, w1.flatten(0, 1), w2) for w1, w2 in zip(of["ffn.w1"], of["ffn.w2"], strict=True)]
    output = torch.einsum("te,etd->td", routing, torch.stack(experts))
    return output + swiglu(tokens, of["ffn.shared.w1"], of["ffn.shared.w2"]) if moe.shared_ffn_size else output


def decoded_logits(engine, ids, lengths):
    """``{(sequence, position): logits}`` by reading each sequence's first tokens at once and the others one by one."""
    total = ids.shape[1]
    known = torch.tensor(lengths)
    logits = engine.prefill(ids[:, : max(lengths)], known, total)
    found = {}
    for _ in range(total):
        found.update({(row, int(known[row]) - 1): logits[row] for row in range(len(ids)) if known[row] <= total})
        logits = engine.decode(ids.gather(1, known.clamp(max=total - 1)[:, None])[:, 0])
        known += 1
    return found


@pytest.mark.parametrize(("name", "dtype", "decode_tokens"), [
    *((name, torch.float32, MAX_DECODE_TOKENS) for name in MODELS),
    ("sigmoid, groups, bias", torch.float32, 4),  # the prompts take the layer's own path
    *(("shared expert in decode steps", dtype, 4) for dtype in (torch.float32, torch.bfloat16)),
    *(("shared expert", torch.bfloat16, count) for count in (MAX_DECODE_TOKENS, 4, 0)),
])  # fmt: skip
@torch.no_grad()
def test_decoding_equals_the_whole_forward_pass_at_every_position(name, dtype, decode_tokens):
    model, group = awake_model(MODELS[name], dtype=dtype)
    ids = random_ids(3, 16)
    exact, whole = exact_logits(model, ids), model(ids).logits
    error = (whole - exact).abs().max()
    assert error < (1e-4 if dtype == torch.float32 else 0.1 * exact.std())
    found = decoded_logits(GPTEngine(model, group, decode_tokens=decode_tokens), ids, [6, 1, 15])
    assert len(found) == (16 - 5) + 16 + 2
    for (row, position), logits in found.items():
        difference = (logits - exact[row, position]).abs().max()
        assert difference <= 2 * error, f"sequence {row}, position {position}: {difference} > 2 x {error}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_freezing_changes_no_bit_and_halves_the_matrices(dtype):
    model, _ = awake_model(MODELS["shared expert"], dtype=dtype)
    before = model(random_ids(2, 32)).logits
    freeze(model)
    assert torch.equal(model(random_ids(2, 32)).logits, before)
    kept = {name for name, weight in model.named_parameters() if weight.dtype == torch.float32 and weight.dim() > 1}
    if dtype == torch.bfloat16:
        assert {name.split(".")[-2] for name in kept} == {"embedding", "router"}


@pytest.mark.parametrize(("sequences", "length", "message"), [
    (1, 0, "length=0 must be between"), (1, 33, "length=33 must be between 1 and"), (0, 4, "num_sequences=0 must be"),
])  # fmt: skip
def test_cache_rules(sequences, length, message):
    with pytest.raises(ValueError, match=message):
        KeyValueCache(MODEL, num_sequences=sequences, length=length, dtype=torch.float32, device=CPU)


def run(prompts, **changes):
    config = GenerateConfig(prompts=tuple(prompts), **{"max_new_tokens": 12, **changes})
    model, group = awake_model()
    codec = ByteCodec()
    tokens = encode_prompts(config, codec, 32)
    return generate(GPTEngine(model, group), codec, tokens, config, context=32)


PROMPTS = ["def f(x):", "a", "the quick brown fox jumps ove"]


def test_a_batch_makes_what_each_prompt_makes_alone():
    batch = run(PROMPTS, temperature=0)
    assert [run([prompt], temperature=0).texts[0] for prompt in PROMPTS] == list(batch.texts)
    assert batch.prompt_tokens == sum(map(len, PROMPTS))
    assert batch.new_tokens == 12 + 12 + 3, "the third ends at a full context"
    assert batch.stopped_by == ("length", "length", "context")
    assert batch.steps == 11


def test_sampling_depends_on_seed_and_number_of_the_sequence_only():
    texts = run(PROMPTS).texts
    assert run(PROMPTS).texts == texts
    assert run(PROMPTS[:1]).texts == texts[:1], "the batch changes nothing for a sequence"
    assert run(PROMPTS, seed=1).texts != texts
    first, second = run(["a", "a"]).texts
    assert first != second, "equal prompts are continued differently"


def test_the_stop_text_ends_a_sequence_and_is_left_out():
    text = run(["a"], temperature=0).texts[0]
    place = next(size for size in range(2, len(text)) if text.find(text[size : size + 2]) == size)
    stopped = run(["a"], temperature=0, stop=text[place : place + 2])
    assert stopped.texts[0] == text[:place]
    assert stopped.new_tokens < 12
    assert stopped.stopped_by == ("stop",)
    assert run(["a"], temperature=0, stop="\0never\0").texts[0] == text


def check_blame(engine, config, message):
    """NaN is the weights' fault unless something else went wrong, as on cores that missed their deadline."""
    tokens = encode_prompts(config, ByteCodec(), 32)
    for error, words in ((NotFiniteError, message), (HostComputeError, "^they are late$")):
        engine.passes = 0
        with pytest.raises(error, match=words):
            generate(engine, ByteCodec(), tokens, config, context=32)
        engine.check = Mock(side_effect=HostComputeError("they are late"))


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]])
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("head", "logits of the prompts must be numbers, but the model's weights make NaN or infinity"),
        ("blocks.1.ffn.router", r"router logits\[0, 2\]=nan must be finite"),
    ],
)
def test_weights_that_make_nan_write_no_text(prompts, where, message):
    model, group = awake_model()
    with torch.no_grad():
        model.get_submodule(where).weight[2] = math.nan
    check_blame(GPTEngine(model, group), GenerateConfig(prompts=tuple(prompts)), message)


def set_all(value):
    return lambda logits: logits.fill_(value)


def set_one(value):
    return lambda logits: logits[..., 7].fill_(value)


DAMAGES = {
    "NaN": set_one(math.nan),
    "infinity": set_one(math.inf),
    "infinity of what is no token": lambda logits: logits[..., -1].fill_(math.inf),
    "nothing is possible": set_all(-math.inf),
    "all NaN": set_all(math.nan),
}


@pytest.mark.parametrize(
    "changes",
    [
        dict(temperature=0),
        dict(temperature=0.8, repetition_penalty=1.3),
        dict(temperature=2.0, top_k=3, top_p=0.9),
        dict(temperature=0, speculate="conservative", draft_tokens=2, draft_experts=(1,)),
        dict(temperature=0.8, speculate="adaptive", draft_tokens=2, draft_experts=(1,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_sequence_whose_logits_are_not_finite_is_named_if_it_goes_on(changes, damage):
    class Damaged(GPTEngine):
        passes, sequence, drafting = 0, 1, False

        def _damaged(self, logits):
            self.passes += 1
            if self.passes >= 3:
                DAMAGES[damage](logits[self.sequence])
            return logits

        def prefill(self, *args):
            logits = super().prefill(*args)
            if self.sequence:
                return logits
            self.passes = 3
            return self._damaged(logits)

        def decode(self, ids):
            return self._damaged(super().decode(ids))

        def draft(self, ids):
            return self._damaged(super().draft(ids)) if self.drafting else super().draft(ids)

        def verify(self, ids):
            return super().verify(ids) if self.drafting else self._damaged(super().verify(ids))

    model, group = awake_model()
    config = GenerateConfig(prompts=tuple(PROMPTS), max_new_tokens=12, **changes)
    engine = Damaged(model, group, speculation=config if config.speculate != "off" else None)
    tokens = encode_prompts(config, ByteCodec(), 32)
    named = r"logits of prompt 1 must be numbers, but the model makes NaN or infinity behind \d+ new"
    check_blame(engine, config, named)
    if config.speculate != "off":
        engine.check, engine.drafting = Mock(), True
        check_blame(engine, config, named)
        engine.drafting = False
    engine.passes, engine.sequence = 0, 2  # this one has all its three tokens by then
    if config.temperature == 0:
        wanted = run(PROMPTS, **{**changes, "speculate": "off"}).texts
        assert generate(engine, ByteCodec(), tokens, config, context=32).texts == wanted
    engine.check, engine.sequence = Mock(), 0
    check_blame(engine, config, "logits of the prompts must be numbers")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_that_a_model_rules_out_are_never_chosen(temperature):
    """Minus infinity is allowed if another token is possible, and for logits that only pad."""

    class Masked(GPTEngine):
        def decode(self, ids):
            logits = super().decode(ids)
            logits[:, :97] = logits[:, 98:] = -math.inf
            return logits

    model, group = awake_model()
    config = GenerateConfig(prompt="abc", max_new_tokens=6, temperature=temperature)
    assert generate(Masked(model, group), ByteCodec(), [[1, 2]], config, context=32).texts[0][1:] == "aaaaa"


def test_finite_logits_that_a_temperature_makes_infinite_choose_no_token():
    logits = torch.tensor([[1e34, 0.0, 0.0], [3.0, 2.0, 1.0]])
    for config in (GenerateConfig(temperature=1e-6), GenerateConfig(repetition_penalty=1e-6)):
        sampler = Sampler(config, 2, CPU, seen=torch.ones(2, 3, dtype=torch.bool))
        assert sampler.choose(logits, 0).tolist()[0] == NO_TOKEN
        assert sampler.choose(logits, 0).tolist()[1] != NO_TOKEN


def test_as_many_tokens_as_there_is_room_for_may_be_any_number():
    made = run(["abc"], max_new_tokens=1)
    assert (made.steps, made.new_tokens) == (0, 1)
    made = run(["abc"], max_new_tokens=10**15)
    assert made.stopped_by == ("context",)
    assert made.texts == run(["abc"], max_new_tokens=40).texts


def test_warm_up_leaves_no_trace():
    model, group = awake_model()
    engine, config, codec = GPTEngine(model, group), GenerateConfig(prompt="abc", max_new_tokens=5), ByteCodec()
    cold = generate(engine, codec, [[1, 2]], config, context=32)
    warm_up(engine, [[1, 2], [3]], config, context=32)
    warm_up(engine, [[7, 8]], config, context=32)  # in the very memory of the next line
    assert generate(engine, codec, [[1, 2]], config, context=32).texts == cold.texts


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (None, 1.0, [0.4, 0.1, 0.3, 0.2]),
        (2, 1.0, [4 / 7, 0, 3 / 7, 0]),
        (9, 1.0, [0.4, 0.1, 0.3, 0.2]),
        (None, 0.39, [1.0, 0, 0, 0]),
        (None, 0.41, [4 / 7, 0, 3 / 7, 0]),
        (3, 0.75, [4 / 7, 0, 3 / 7, 0]),  # the first two have 0.78 of the three
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
        (Sampler(GenerateConfig(temperature=value), 2000, CPU).choose(logits, 0) == 0).float().mean()
        for value in (0.5, 4.0)
    ]
    assert share[0] == pytest.approx(1 / (1 + math.exp(-4.0)), abs=0.03)
    assert share[1] == pytest.approx(1 / (1 + math.exp(-0.5)), abs=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"temperature": -0.1}, r"temperature=-0\.1 must be 0 \(the most .*\) or between 1e-06 and 1e\+06"),
        ({"temperature": 1e-40}, "temperature=1e-40 must be 0"),  # logits would be infinite
        ({"temperature": math.nan}, "temperature=nan must be a finite number and 0"),
        ({"temperature": math.inf}, "temperature=inf must be a finite number and 0"),
        ({"top_p": 0.0}, r"top_p=0\.0 must be above 0 and at most 1"),
        ({"top_p": 1.1}, r"top_p=1\.1 must be above 0"),
        ({"top_p": math.nan}, "top_p=nan must be a finite number and above 0"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"stop": ""}, "stop='' must be at least one character"),
        ({"source": ""}, "source='' must be the name of a folder, or None"),
        ({"speculate": "eager"}, "speculate='eager' must be one of off, conservative, adaptive"),
        ({"draft_experts": (0,)}, r"draft_experts=\[0\] must each be at least 1"),
        ({"draft_tokens": 0}, "draft_tokens=0 must be at least 1"),
        ({"tau": 1.5}, "tau=1.5 must be at least 0 and at most 1"),
        ({"tau": math.nan}, "tau=nan must be a finite number"),
        ({"adaptive_tolerance": -0.1}, "adaptive_tolerance=-0.1 must be at least 0"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty=0\.0 must be at least 1e-06 and at most 1e\+06"),
        ({"repetition_penalty": 1e40}, r"repetition_penalty=1e\+40 must be at least"),
        ({"prompts": ("a", "")}, r"prompts=\['a', ''\] must each be at least one character"),
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
    model, group = awake_model()
    with pytest.raises(ValueError, match=r"generate\.prompt of 32 tokens must be shorter than the .* context of 32"):
        generate(GPTEngine(model, group), codec, [[1], [120] * 32], GenerateConfig(max_new_tokens=4), context=32)


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
