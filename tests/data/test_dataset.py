"""Data sets count what is dropped or changed, and centre labels on the training set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.config.common import Contradicting, Malformed, Overlong, RecordKind
from nemo_aligner.config.model import DataPrefixConfig
from nemo_aligner.data.packing import packed_size
from nemo_aligner.data.training_data import build_training_data
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.data.conftest import Run
from tests.data.files import build, write
from tests.harness import tiny
from tests.harness.contracts import Contracts


def pair(chosen: str, rejected: str, prompt: str = "why") -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def rows_of(table: str) -> dict[str, str]:
    """The rows of one file in the table, by name."""
    return {line[2:28].strip(): line[28:] for line in table.splitlines()[1:]}


def test_dataset_keeps_order_and_sides(tmp_path: Path, contracts: Contracts) -> None:
    path = write(tmp_path / "a.jsonl", pair("the cat", "no"), pair("a dog", "bad bad"))
    data = build(contracts, [path, path])
    dataset = data.train
    assert (len(dataset), dataset.kind) == (4, RecordKind.comparison)
    assert dataset.records.record_bounds.tolist() == [0, 2, 4, 6, 8]
    assert dataset.counts == {"read": 4, "kept": 4, "duplicates": 2}
    assert [str(origin) for origin in dataset.origins] == [f"{path}:1", f"{path}:2"] * 2
    for index, replies in enumerate([("the cat", "no"), ("a dog", "bad bad")]):
        for sequence, reply in zip(dataset.record(index), replies, strict=True):
            text = tiny.chat("why", reply)
            ids = data.contract.encode(contracts.tokenizer, text).token_ids
            assert torch.as_tensor(sequence).tolist() == ids
    assert data.contract == contracts()


def test_dataset_counts_pairs_that_contradict_each_other(
    tmp_path: Path, contracts: Contracts, run: Run
) -> None:
    """All contradicting records of a file may be dropped, as either verdict may be right."""
    rows: list[Any] = [
        pair("yes", "no"), pair("a", "b"), pair("no", "yes"), pair("yes", "no"),
        pair("yes", "no", prompt="who"), pair("a", "b"),
    ]  # fmt: skip
    ranked = tiny.ranked("what", (0, "good"), (1, "fair"), (1, "poor"), (2, "bad"))
    path = write(tmp_path / "a.jsonl", *rows)
    counts = {"read": 6, "kept": 6, "duplicates": 2, "contradicted": 3}
    kept = build(contracts, [path]).train
    assert kept.counts == counts
    assert rows_of(kept.table())["contradicting records"] == "3"
    shown = run("data inspect", path, "--show=0").stdout
    assert rows_of(shown)["contradicting records"] == "3"
    assert rows_of(shown)["duplicate records"] == "2"
    drop = {"contradicting": Contradicting.drop}
    dropped = build(contracts, [path], **drop).train
    assert dropped.counts == {"read": 6, "contradicting": 3, "kept": 3, "duplicates": 1}
    assert [origin.line for origin in dropped.origins] == [2, 5, 6]
    assert rows_of(dropped.table())["dropped"] == "3 (3 contradicting)"
    shown = run("data inspect", path, "--show=0", "--contradicting=drop").stdout
    assert rows_of(shown)["dropped"] == "3 (3 contradicting)"
    done = run("data split", path, f"--output={tmp_path}", "--contradicting=drop", "--heldout=0.5")
    assert "3 contradicting, 3 kept" in done.stdout
    # Records of earlier files count, too. Ties, and replies that were not compared with each
    # other, contradict nothing.
    other = write(tmp_path / "b.jsonl", pair("b", "a"), pair("c", "a"))
    both = build(contracts, [path, other], **drop).train
    assert [report.counts.get("contradicted", 0) for report in both.reports] == [0, 1]
    orders = [
        (tiny.ranked("what", (0, "poor"), (1, "fair")), 0),
        (tiny.ranked("what", (0, "fair"), (1, "bad")), 0),
        (tiny.ranked("what", (0, "bad"), (1, "fair")), 2),
        (tiny.ranked("what", (0, "poor"), (1, "good"), (2, "bad")), 2),
    ]
    for record, count in orders:
        path = write(tmp_path / "ranked.jsonl", ranked, record)
        assert build(contracts, [path]).train.counts.get("contradicted", 0) == count, record
    rated = [{"prompt": "why", "response": "so", "help": n} for n in (0, 1)]
    path = write(tmp_path / "rated.jsonl", *rated)
    assert "contradicted" not in build(contracts, [path], attributes=["help"], **drop).train.counts


def test_dataset_drops_overlong_pairs_whole(tmp_path: Path, contracts: Contracts) -> None:
    rows = [pair("yes", "no"), pair("yes", "cat " * 50), pair("cat " * 50, "no"), pair("a", "b")]
    path = write(tmp_path / "a.jsonl", *rows)
    dropped = build(contracts, [path], seq_length=30, overlong=Overlong.drop).train
    assert dropped.counts == {"read": 4, "kept": 2, "overlong": 2}
    assert [origin.line for origin in dropped.origins] == [1, 4]
    cut = build(contracts, [path], seq_length=30, overlong=Overlong.truncate_left).train
    assert cut.counts == {"read": 4, "kept": 4, "truncated": 2}
    assert max(len(sequence) for sequence in cut.sequences) == 30
    with pytest.raises(DataError, match=r"a.jsonl:2: got \d+ tokens, wanted at most 30"):
        build(contracts, [path], seq_length=30, overlong=Overlong.error)
    with pytest.raises(DataError, match=r"a.jsonl: .* no usable record.*4 overlong.*seq_length"):
        build(contracts, [path], seq_length=3, overlong=Overlong.drop)
    # After truncation, both samples may have the same tokens.
    rows = [pair("x" + " cat" * 60, "y" + " cat" * 60), pair("yes", "no")]
    path = write(tmp_path / "a.jsonl", *rows)
    same = build(contracts, [path], seq_length=30, overlong=Overlong.truncate_left).train
    assert same.counts == {"read": 2, "kept": 1, "same_tokens": 1}


def test_dataset_names_a_record_the_template_refuses(tmp_path: Path, contracts: Contracts) -> None:
    path = write(tmp_path / "a.jsonl", pair("yes", "no"), pair("forbidden", "no"))
    refusing = (
        "{% for m in messages %}{% if m.content == 'forbidden' %}{{ raise_exception('refused') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    how: dict[str, Any] = {"contract": replace(contracts(), template=refusing)}
    said = r"a.jsonl:2: prompt and chosen: the chat template .*refused"
    with pytest.raises(DataError, match=said):
        build(contracts, [path], **how)
    dropped = build(contracts, [path], **how, malformed=Malformed.drop, max_malformed=0.5).train
    assert dropped.counts == {"read": 2, "kept": 1, "malformed": 1}
    assert [origin.line for origin in dropped.origins] == [1]
    with pytest.raises(DataError, match=r"50.00%.* malformed\n.*a.jsonl:2: .*refused"):
        build(contracts, [path], **how, malformed=Malformed.drop, max_malformed=0.4)
    # Without a template no record can be read, and none is malformed.
    how = {"contract": replace(contracts(), template="")}
    with pytest.raises(DataError, match=r"^[^\n]*a.jsonl:1: .*there is no chat template") as caught:
        build(contracts, [path], **how, malformed=Malformed.drop, max_malformed=1.0)
    assert "malformed" not in str(caught.value)


def test_malformed_records_of_all_files_are_one_error(tmp_path: Path, contracts: Contracts) -> None:
    bad = [{**pair("a", "b"), "chosen": n} for n in range(12)]
    train = write(tmp_path / "train.jsonl", *bad, pair("a", "b"))
    valid = write(tmp_path / "valid.jsonl", *bad[:1], pair("c", "d", "y"))
    with pytest.raises(DataError) as caught:
        build(contracts, [train], [valid])
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{train}: 12 of its 13 records (92.31%) are malformed"
    assert lines[1] == f"  {train}:1: chosen: got 0, wanted a string or a list of messages"
    assert lines[11] == "  and 2 more"
    assert lines[12] == f"{valid}: 1 of its 2 records (50.00%) are malformed"
    assert "model.data.malformed=drop" in lines[-1]
    assert "model.data.max_malformed=" in lines[-1]
    data = build(contracts, [train], [valid], malformed=Malformed.drop, max_malformed=0.95)
    table = data.table().splitlines()
    assert "  dropped                   12 (12 malformed)" in table
    assert "  malformed                 1 (50.00%)" in table
    listed = table[table.index("  malformed:") + 1 :]
    assert listed[:2] == ["  " + line for line in lines[1:3]]
    assert listed[3] == "    and 9 more"


def test_labels_are_centred_on_the_training_set_and_shown(
    tmp_path: Path, contracts: Contracts
) -> None:
    train = [{"prompt": "a", "response": "b c", "help": n, "depth": None} for n in (1, 2, 6)]
    train += [{"prompt": "d", "response": "e", "help": -100, "depth": 4}]
    train += [{"prompt": "f", "response": "e", "help": None, "depth": -100}]
    valid = {"prompt": "g", "response": "e", "help": 3, "depth": 7}
    files = [write(tmp_path / "train.jsonl", *train)], [write(tmp_path / "valid.jsonl", valid)]
    data = build(contracts, *files, attributes=["help", "depth"])
    assert data.contract.label_means == (3.0, 4.0)
    assert data.train.counts == {"read": 5, "no_label": 1, "kept": 4}
    labels = data.train.records.select([2, 3]).labels.targets(["help", "depth"])
    assert torch.nan_to_num(labels, -1).tolist() == [[3.0, -1], [-1, 0.0]]
    heldout = data.validation[0].records.labels  # type: ignore[union-attr]
    assert heldout.targets(["help", "depth"]).tolist() == [[0.0, 3.0]]
    assert heldout.values.tolist() == [[3.0, 7.0]]
    train, valid = rows_of(data.train.table()), rows_of(data.validation[0].table())
    assert data.validation[0].table().startswith(f"validation-valid: {tmp_path / 'valid.jsonl'} (")
    assert train["records"] == "5"
    assert train["dropped"] == "1 (1 no_label)"
    assert train["prompts"] == "2, 2 repeated"
    assert train["labels missing"] == "help 1, depth 3"
    assert train["label means"] == "help 3, depth 4"
    assert (train["labels from"], train["labels to"]) == ("help 1, depth 4", "help 6, depth 4")
    assert "prompts also in training" not in train
    assert valid["prompts also in training"] == "0"
    assert data.table() == f"{data.train.table()}\n{data.validation[0].table()}"


def test_table_of_pairs(tmp_path: Path, contracts: Contracts) -> None:
    rows = [
        {**pair("cat cat cat", "no"), "source": "one"},
        {**pair("cat cat cat", "no"), "source": "one"},
        {**pair("no", "cat cat"), "subset": "two"},
        pair("cat", "dog", "WHO \n is"),
        pair("cat cat", "a", "who is"),
        pair("same", "same", "what"),
    ]
    train = build(contracts, [write(tmp_path / "a.jsonl", *rows)]).train
    table, overview = rows_of(train.table()), rows_of(train.overview())
    # A run prints fewer rows, with the same problems; the values of the others are unchanged.
    assert overview.pop("records") == "6, 5 kept, from 2 sources"
    assert (
        overview.pop("tokens") == f"{table['tokens']}, shared prefixes: {table['shared prefixes']}"
    )
    assert set(overview) == set(table) - {
        "records", "kept", "sources", "tokens", "shared prefixes", "tokens of a reply"
    }  # fmt: skip
    assert overview.items() <= table.items()
    whole = build(contracts, [write(tmp_path / "b.jsonl", pair("cat", "no"))]).train.overview()
    assert rows_of(whole)["records"] == "1, all kept"
    assert "dropped" not in whole
    assert table["kept"] == "5"
    assert table["dropped"] == "1 (1 identical)"
    assert table["exact ties (dropped)"] == "1"
    assert table["duplicate records"] == "1"
    assert table["prompts"] == "2, 3 repeated"
    assert table["chosen is the longer"] == "70.0% (in tokens)"
    assert table["sources"] == "none 2, one 2, two 1"
    longest = len(contracts.tokenizer.encode("cat cat cat"))
    assert table["tokens of a reply"].startswith(f"1 to {longest}, median ")
    # Tokens that are computed once for both samples.
    replies = [(1, "yes"), (2, "cat"), (3, "no dog"), (4, "a tree")]
    path = write(tmp_path / "ranked.jsonl", tiny.ranked("why is it so", *replies))
    train = build(contracts, [path]).train
    total, packed = sum(train.lengths(0)), packed_size(train, 0)
    assert total > 2 * packed
    saved = rows_of(train.table())["shared prefixes"]
    assert saved == f"{1 - packed / total:.1%} of tokens saved"


def test_prompt_in_training_and_validation_is_an_error_unless_allowed(
    tmp_path: Path, contracts: Contracts
) -> None:
    train = write(tmp_path / "train.jsonl", pair("a", "b", "x"), pair("a", "b"))
    valid = write(tmp_path / "valid.jsonl", pair("c", "d", "y"), pair("c", "d"))
    with pytest.raises(DataError, match=r"valid.jsonl:2 .*train.jsonl:2"):
        build(contracts, [train], [valid])
    data = build(contracts, [train], [valid], allow_prompt_overlap=True)
    assert rows_of(data.validation[0].table())["prompts also in training"] == "1"
    # Validation sets have the names of their files.
    (tmp_path / "other").mkdir()
    names = ("a.jsonl", "other/a.jsonl", "b.v2.jsonl")
    paths = [tiny.write_pairs(tmp_path / name, 3, seed) for seed, name in enumerate(names)]
    data = build(contracts, paths[:1], paths, allow_prompt_overlap=True)
    named = [dataset.name for dataset in data.validation]
    assert named == ["validation-a_1", "validation-a_2", "validation-b"]
    # The complete lines that raw texts share are their prompt.
    sides = (("why\nyes cat", "why\nyes dog"), ("why\nno", "why\na tree"))
    for path, texts in zip((train, valid), sides, strict=True):
        write(path, *({"text": text} for text in texts))
    with pytest.raises(DataError, match="1 of its 1 prompts"):
        build(contracts, [train], [valid])


def test_training_data_that_cannot_be_trained_on_is_refused_at_the_start(
    tmp_path: Path, contracts: Contracts
) -> None:
    config = contracts.config()
    config.micro_batch_tokens = 60
    path = write(tmp_path / "a.jsonl", pair("yes", "no"), pair("cat " * 30, "dog " * 30))
    config.data.data_prefix = DataPrefixConfig([str(path)])
    with pytest.raises(ConfigError, match=r"micro_batch_tokens: got 60, .* 145, .*a.jsonl:2"):
        build_training_data(config, contracts(), contracts.tokenizer)
    with pytest.raises(ConfigError, match=r"data_prefix.train: no file"):
        build(contracts, [])
    rated = {"prompt": "a", "response": "b", "help": 1, "depth": None}
    with pytest.raises(DataError, match="no record has a label of depth"):
        build(contracts, [write(path, rated)], attributes=["help", "depth"])
