"""Training on text by a tokenizer: what is read, the order of sequences, resuming, generating, and what is refused."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from refusals import refusal
from text_cases import DOCUMENTS, END, make_tokenizer
from training_cases import MODEL, Rank, losses, make_job, train_on_rank

datasets = pytest.importorskip("datasets", reason="needs pip install 'comet-moe[text]'")

from comet.generation.export import export  # noqa: E402
from comet.generation.hf import open_codec, open_run_codec  # noqa: E402
from comet.generation.source import find_source, model_of  # noqa: E402
from comet.jobs.config import DataConfig  # noqa: E402
from comet.training import tokens as module  # noqa: E402
from comet.training.data import packed_starts, read_corpus, sample_batch  # noqa: E402
from comet.training.tokens import pieces  # noqa: E402
from comet.training.trainer import train  # noqa: E402

WIDE = replace(MODEL, vocab_size=320)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def write_jsonl(path: Path, documents: list[str] = DOCUMENTS, field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text, "number": 1}) + "\n" for text in documents))
    return path


def documents_of(corpus) -> list[str]:
    decoded = b"".join(corpus.vocabulary.decode(part[:].tolist()) for part in (corpus.train, corpus.heldout)).decode()
    assert decoded.endswith(END)
    return sorted(decoded.split(END)[:-1])


def data_config(tokenizer: Path, path: Path, **changes) -> DataConfig:
    return DataConfig(**dict(tokenizer=str(tokenizer), path=str(path)) | changes)


def test_text_jsonl_and_parquet_hold_the_same_documents(tokenizer, tmp_path):
    (tmp_path / "folder").mkdir()
    for number, text in enumerate(DOCUMENTS):
        (tmp_path / "folder" / f"{number}.txt").write_text(text)
    jsonl = write_jsonl(tmp_path / "a.jsonl")
    datasets.Dataset.from_list([{"content": text, "number": 1} for text in DOCUMENTS]).to_parquet(
        tmp_path / "a.parquet"
    )
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl.read_bytes()))
    found = [
        read_corpus(data_config(tokenizer, jsonl), 32, 300),
        read_corpus(data_config(tokenizer, tmp_path / "b.jsonl.gz"), 32, 300),
        read_corpus(data_config(tokenizer, tmp_path / "*.parquet", text_field="content"), 32, 300),
        read_corpus(data_config(tokenizer / "tokenizer.json", jsonl, end_token=END), 32, 300),
        read_corpus(data_config(tokenizer, tmp_path / "folder"), 32, 300),
        read_corpus(data_config(tokenizer, tmp_path / "folder" / "*.txt"), 32, 300),
    ]
    for corpus in found:
        assert documents_of(corpus) == sorted(DOCUMENTS)
    assert len({corpus.digest for corpus in found[:4]}) == 1, "the order depends on that of the documents only"
    train, heldout = found[0].train, found[0].heldout
    assert len(heldout) == int(0.05 * (len(train) + len(heldout)))


def test_what_was_encoded_is_found_again_and_other_tokens_are_not(tokenizer, tmp_path, monkeypatch):
    jsonl, calls = write_jsonl(tmp_path / "a.jsonl"), []
    own = module.Encoder.__call__
    monkeypatch.setattr(module.Encoder, "__call__", lambda self, batch: calls.append(1) or own(self, batch))
    first = read_corpus(data_config(tokenizer, jsonl), 32, 300)
    assert calls
    calls.clear()
    assert read_corpus(data_config(tokenizer, jsonl), 32, 300).digest == first.digest
    assert not calls
    other = make_tokenizer(tmp_path / "other", vocab_size=280)
    assert read_corpus(data_config(other, jsonl), 32, 300).digest != first.digest
    assert calls
    write_jsonl(jsonl, DOCUMENTS[1:])
    assert read_corpus(data_config(tokenizer, jsonl), 32, 300).digest != first.digest


def write_lines(path: Path, *records) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in records))
    return path


def test_names_of_files_are_no_patterns(tokenizer, tmp_path):
    for name, text in {
        "a[1].txt": "one " * 40,
        "a1.txt": "two " * 50,
        "b*.txt": "three " * 40,
        "c::d.txt": "x" * 60,
    }.items():
        (tmp_path / name).write_text(text)
    found = documents_of(read_corpus(data_config(tokenizer, tmp_path), 8, 300))
    assert found == sorted(["one " * 40, "two " * 50, "three " * 40, "x" * 60])


def test_records_need_nothing_but_the_field(tokenizer, tmp_path):
    """Other fields of any kind, marks of order, empty lines and files, and nulls do no harm."""
    texts, folder = DOCUMENTS[:6], tmp_path / "texts"
    folder.mkdir()
    write_lines(folder / "a.jsonl", {"text": texts[0], "of": {"a": 1}}, "", {"of": [2**70], "text": texts[1]})
    write_lines(folder / "b.JSONL", {"text": None, "url": "x"}, {"text": texts[2], "url": 7}, {"text": ""})
    (folder / "c.ndjson").write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": texts[3]}).encode() + b"\r\n")
    (folder / "d.json").write_text(json.dumps([{"text": texts[4]}, {"text": "2020-01-01"}], indent=1))
    (folder / "e.jsonl").write_text("")
    (folder / "f.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": texts[5]}).encode()))
    corpus = read_corpus(data_config(tokenizer, folder), 8, 300)
    assert documents_of(corpus) == sorted([*texts, "2020-01-01"])


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"text": "a"}, {"body": "b"}], r"but line 2 of .*a\.jsonl has body \(str\)$"),
        ([{"text": "a"}, {"text": 7}], r"but line 2 of .*a\.jsonl has text \(int\)$"),
        ([{"text": ["a"]}], r"but line 1 of .*a\.jsonl has text \(list\)$"),
        (["[1]"], r"but record 1 of .*a\.jsonl has 1$"),
        ([{"text": "a"}, {"text": "\ud800"}], r"a\.jsonl fails after 1 of them: 'utf-8' codec can't encode"),
    ],
)
def test_a_record_without_text_is_named_by_its_line(records, message, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_corpus(data_config(tokenizer, write_lines(tmp_path / "a.jsonl", *records)), 8, 300)


def test_a_cache_that_cannot_be_written_is_named(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "cache")
    with pytest.raises(ValueError, match=r"file/cache, the folder of datasets, must be one that can be written to"):
        read_corpus(data_config(tokenizer, write_jsonl(tmp_path / "a.jsonl")), 8, 300)


def test_long_documents_are_encoded_in_pieces(monkeypatch):
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 20)
    text = "a" * 50 + "\n" + "b\n" * 40 + "c" * 30
    assert "".join(pieces(text)) == text
    assert all(piece.endswith("\n") for piece in pieces(text)[:-1])
    assert len(pieces(text)) > 3
    assert pieces("") == []


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_sequence_comes_once_in_a_pass_whatever_the_ranks(ranks):
    where = dict(batch_size=2, context=4, seed=5, ranks=ranks)
    length, wanted = 4 * 30 + 3, {4 * number for number in range(30)}
    runs = [
        [start for step in range(2 * 30 // (2 * ranks)) for rank in range(ranks)
         for start in packed_starts(length, step=step, rank=rank, **where | {"seed": seed}).tolist()]
        for seed in (5, 6)
    ]  # fmt: skip
    for run in runs:
        assert set(run[:30]) == set(run[30:]) == wanted
        assert run[:30] != run[30:], "each pass has its order"
    assert runs[0] != runs[1]
    text = torch.arange(length)
    batch = sample_batch(text, step=0, rank=0, starts=packed_starts, **where)
    assert batch.tolist() == [list(range(start, start + 5)) for start in runs[0][:2]]


def test_ranks_train_on_tokens_and_a_stopped_run_goes_on_bit_for_bit(tokenizer, tmp_path):
    data = data_config(tokenizer, write_jsonl(tmp_path / "a.jsonl"))
    options = dict(model=WIDE, ep=2, data=data, steps=8, checkpoint_every=4, sample_bytes=4)
    whole = make_job(tmp_path, output_dir=str(tmp_path / "out"), **options)
    result = run_ranks(train_on_rank, 2, whole)[0]
    assert result["heldout_nats_per_token"] < 5.7
    rest = make_job(
        tmp_path, output_dir=str(tmp_path / "rest"), resume=str(tmp_path / "out" / "step-000004"), **options
    )
    again = run_ranks(train_on_rank, 2, rest)[0]
    assert again["heldout_nats_per_token"] == result["heldout_nats_per_token"]
    assert losses(tmp_path / "rest") == losses(tmp_path / "out")
    source = find_source(str(tmp_path / "rest"))
    assert model_of(source).vocab_size == 320
    codec = open_run_codec(source.path, 320)
    assert codec.end_ids == {codec.tokenizer.convert_tokens_to_ids(END)}
    assert codec.tokenizer.decode(codec.encode(DOCUMENTS[3])) == DOCUMENTS[3]
    export(str(source.path), tmp_path / "hf")
    exported = open_codec(tmp_path / "hf")
    assert (exported.end_ids, exported.encode(DOCUMENTS[3])) == (codec.end_ids, codec.encode(DOCUMENTS[3]))


def test_text_of_other_tokens_does_not_resume(tokenizer, tmp_path):
    data = data_config(tokenizer, write_jsonl(tmp_path / "a.jsonl"))
    train(make_job(tmp_path, model=WIDE, data=data, steps=3), Rank())
    other = replace(data, tokenizer=str(make_tokenizer(tmp_path / "other", vocab_size=280)))
    job = make_job(tmp_path, model=WIDE, data=other, steps=3, resume=str(tmp_path / "out"))
    with pytest.raises(ValueError, match=r"the text of data\.path=.* differs"):
        train(job, Rank())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab": 256}, r"model\.vocab_size=256 must be at least the 300 ids of .*give model\.vocab_size=320"),
        ({"end_token": "</s>"}, r"data\.end_token='</s>' must be a token of data\.tokenizer="),
        ({"tokenizer": "endless"}, r"names no end token: data\.end_token must be given"),
        ({"tokenizer": "empty"}, r"data\.tokenizer=.*empty' must hold a tokenizer: one of tokenizer\.json"),
        (
            {"text_field": "body"},
            r"data\.text_field='body' must be a text field of .*, but line 1 of .* has text \(str\), number \(int\)",
        ),
        ({"text_field": "number"}, r"data\.text_field='number' must be a text field of "),
        (
            {"path": "cut.jsonl"},
            r"data\.path=.*cut\.jsonl' must hold whole records of json, but reading .*jsonl fails after 59 of them: ",
        ),
        ({"path": "bad.txt"}, r"data\.path=.*bad\.txt' must hold whole records of text, .*can't decode byte 0xff"),
        ({"path": "bad.parquet"}, r"data\.path=.*bad\.parquet' must hold whole records of parquet, but reading "),
        ({"path": "blank.jsonl"}, r"of 0 tokens leaves 0 for the training part"),
        ({"path": "none.txt"}, r"must hold text, but all its 1 files together hold 0 bytes"),
        ({"path": "[nb]*"}, r"must hold files of one kind, .* but holds json, parquet, text: name those of one kind"),
    ],
)
def test_what_does_not_fit_is_named_with_the_rule(changes, message, tokenizer, tmp_path):
    jsonl = write_jsonl(tmp_path / "a.jsonl")
    (tmp_path / "cut.jsonl").write_text(jsonl.read_text()[:-30])
    for name in ("bad.txt", "bad.parquet"):
        (tmp_path / name).write_bytes(b"abc\xff" * 100)
    write_jsonl(tmp_path / "blank.jsonl", [""] * 5)
    (tmp_path / "none.txt").write_text("")
    (tmp_path / "empty").mkdir()
    make_tokenizer(tmp_path / "endless", end=None)
    vocab = changes.get("vocab", 300)
    given = {name: str(tmp_path / value) if name in ("path", "tokenizer") else value
             for name, value in changes.items() if name != "vocab"}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        read_corpus(DataConfig(**{"tokenizer": str(tokenizer), "path": str(jsonl)} | given), 32, vocab)


@pytest.mark.parametrize("given", [{"end_token": END}, {"text_field": "body"}])
def test_settings_of_tokens_are_refused_for_bytes(given):
    with pytest.raises(ValueError, match=r"data\.end_token and data\.text_field must come with data\.tokenizer"):
        read_corpus(DataConfig(**given), 32)


def test_without_the_packages_the_setting_is_refused(tokenizer, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    words = [
        f"data.tokenizer={tokenizer}",
        f"data.path={write_jsonl(tmp_path / 'a.jsonl')}",
        f"output_dir={tmp_path}/o",
    ]
    said = refusal(capfd, "train", "--dry-run", *words)
    assert "must come with the packages datasets and transformers" in said
    assert "pip install 'comet-moe[text]'" in said


def test_a_folder_of_transformers_is_no_run(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"resume='.*hf' must be a run of comet train: .* docs/examples/trainer\.py"):
        train(make_job(tmp_path, resume=str(tmp_path / "hf")), Rank())
