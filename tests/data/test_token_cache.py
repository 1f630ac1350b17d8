"""Token caches: the same data as in memory, written once, and complete or not at all."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer as Backend

from nemo_aligner.config.common import Contradicting, Malformed, Overlong
from nemo_aligner.contract.tokenizer import load_tokenizer
from nemo_aligner.data import token_cache, token_index, token_workers
from nemo_aligner.data.token_index import ArraysInFolder
from nemo_aligner.data.training_data import StepPlan, TrainingData, TrainLoader
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.data.files import build, rows_of, write
from tests.harness import tiny
from tests.harness.contracts import Contracts

LONG_AGO = 1_600_000_000


def old(path: Path) -> Path:
    """Set the file's time so far back that any change would show."""
    os.utime(path, (LONG_AGO, LONG_AGO))
    return path


def pairs(path: Path, count: int = 40, seed: int = 0) -> Path:
    return old(tiny.write_pairs(path, count, seed))


def parts_of(plan: StepPlan) -> list[Any]:
    """All tensors and numbers of a plan."""
    found: list[Any] = [plan.record_ids, plan.owners]
    for pack in plan.packs:
        records = pack.records
        labels = records.labels
        tensors = [
            pack.tokens, pack.position_ids, pack.cu_seqlens, pack.prefixes, pack.scored_tokens,
            pack.rows, records.ids, records.sample_bounds, records.reward_bounds,
            records.ranks, labels.values,
        ]  # fmt: skip
        found += [(tensor.dtype, tensor.numpy().tobytes()) for tensor in tensors]
        found += [labels.names, labels.means]
    return found


def steps_of(data: TrainingData) -> list[Any]:
    loaders = [TrainLoader(data.train, 8, 400, 5, rank, 2, 1e-3) for rank in range(2)]
    return [parts_of(loader.plan(step)) for step in range(6) for loader in loaders]


def assert_same(one: TrainingData, other: TrainingData) -> None:
    assert steps_of(one) == steps_of(other)
    assert one.train.digest == other.train.digest
    assert one.train.measure_digest() == other.train.measure_digest()
    assert one.contract == other.contract
    assert list(one.train.origins) == list(other.train.origins)
    digests = [[report.content_digest for report in data.train.reports] for data in (one, other)]
    assert digests[0] == digests[1] != [None]
    assert list(one.train.sources) == list(other.train.sources)
    assert one.train.reply_lengths.tolist() == other.train.reply_lengths.tolist()
    teachers = [data.train.records.teacher_rewards for data in (one, other)]
    assert repr(teachers[0]) == repr(teachers[1])
    assert one.table() == other.table()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose caches were written, in order."""
    paths: list[str] = []
    make_index = token_cache.make_index

    def make(path: str, rules: Any, arrays: Any, *rest: Any) -> Any:
        if isinstance(arrays, ArraysInFolder):
            paths.append(path)
        return make_index(path, rules, arrays, *rest)

    monkeypatch.setattr(token_cache, "make_index", make)
    return paths


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_aligner.data.files.BLOCK_BYTES", 700)


def files_of(name: str, folder: Path) -> tuple[list[Path], dict[str, Any]]:
    """Files of every kind of data, and the settings to read them."""
    if name == "pairs":
        rows = rows_of(pairs(folder / "p.jsonl"))
        rows += rows[:3]
        rows[5]["source"] = "one"
        rows[7]["rejected"] = rows[7]["chosen"]
        rows[9]["chosen"] = 3
        rows[11]["chosen"] = "cat " * 90
        return [old(write(folder / "a.jsonl", *rows))], {
            "seq_length": 60, "overlong": Overlong.drop, "max_malformed": 0.5,
            "malformed": Malformed.drop,
        }  # fmt: skip
    if name == "files":
        files = [pairs(folder / f"{seed}.jsonl", 20, seed) for seed in range(2)]
        return [*files, files[0]], {}
    if name == "lines":
        texts = [f"why {n}\nyes {word}" for n in range(30) for word in ("cat", "dog")]
        content = "\n\n".join(json.dumps({"text": text}) for text in texts)
        (folder / "lines.jsonl").write_text("\ufeff" + content)
        return [folder / "lines.jsonl"], {}
    if name == "soft":
        rows = rows_of(pairs(folder / "p.jsonl", 20))
        for number, row in enumerate(rows[:15]):
            row["teacher_rewards"] = [number, 0.5]
        rows[3] |= {"teacher": [{"name": "t"}]}
        rows += [*rows[:2], {**rows[0], "teacher_rewards": [1, 2]}]
        return [write(folder / "soft.jsonl", *rows), pairs(folder / "hard.jsonl", 5, 1)], {}
    if name == "list":
        replies = [(rank, f"{word} sings") for rank, word in enumerate(["cat", "dog", "a", "no"])]
        rows = [tiny.ranked(f"what is {n}", *replies[: 2 + n % 3]) for n in range(30)]
        (folder / "list.json").write_text(json.dumps(rows, indent=1))
        return [folder / "list.json"], {}
    assert name == "ratings"
    path = tiny.write_ratings(folder / "rated.jsonl", 40, ("help", "depth"))
    return [path], {"attributes": ["help", "depth"]}


@pytest.mark.parametrize("name", ["pairs", "files", "lines", "soft", "list", "ratings"])
def test_index_gives_the_data_of_memory_bit_for_bit(
    tmp_path: Path,
    contracts: Contracts,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    made: list[str],
) -> None:
    files, settings = files_of(name, tmp_path)
    in_memory = build(contracts, files, **settings)
    small_blocks(monkeypatch)
    settings["index_dir"] = str(tmp_path / "index")
    assert_same(build(contracts, files, **settings), in_memory)
    assert_same(build(contracts, files, **settings), in_memory)
    assert made == list(dict.fromkeys(map(str, files)))


def test_index_made_by_several_processes_is_the_same(
    tmp_path: Path, contracts: Contracts, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, settings = files_of("pairs", tmp_path)
    in_memory = build(contracts, files, **settings)
    small_blocks(monkeypatch)
    monkeypatch.setattr(token_cache, "_BYTES_PER_PROCESS", 100)
    monkeypatch.setattr(token_cache, "usable_cores", lambda: 2)
    monkeypatch.setattr(token_workers, "tokenize_block", None)
    settings["index_dir"] = str(tmp_path / "index")
    assert_same(build(contracts, files, **settings), in_memory)
    long = {"prompt": "a", "chosen": "x " * 99, "rejected": "b"}
    bad = old(write(tmp_path / "bad.jsonl", *[long] * 9))
    settings["overlong"] = Overlong.error
    with pytest.raises(DataError, match=r"bad.jsonl:1: got \d+ tokens, wanted at most 60"):
        build(contracts, [bad], **settings)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DataError, match=r"a.jsonl: .*exit code 1"):
        build(contracts, files, **{**settings, "index_dir": str(tmp_path / "other")})


CUSTOM_FORMAT = """
from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats.base import Format, has, read_conversation
from nemo_aligner.data.records import Comparison

def parse(values, origin, columns):
    q, good, bad = (values[0][key] for key in ("q", "good", "bad"))
    return Comparison.of_pair(
        read_conversation(q, good, "good"), read_conversation(q, bad, "bad"), origin
    )

QUIZ = Format("quiz", RecordKind.comparison, has("q", "good", "bad"), "q, good, bad", parse, ({},))
"""


def test_format_of_a_users_code_is_found_in_every_process(
    tmp_path: Path, contracts: Contracts, monkeypatch: pytest.MonkeyPatch, made: list[str]
) -> None:
    """Also next to a script that is not on PYTHONPATH; new code tokenizes anew."""
    rows = rows_of(pairs(tmp_path / "p.jsonl"))
    keys = {"q": "prompt", "good": "chosen", "bad": "rejected"}
    custom = [{key: row[name] for key, name in keys.items()} for row in rows]
    file = old(write(tmp_path / "custom.jsonl", *custom))
    (tmp_path / "code").mkdir()
    module = tmp_path / "code/quiz_formats.py"
    module.write_text(CUSTOM_FORMAT)
    monkeypatch.syspath_prepend(str(module.parent))
    settings = {"format": "quiz_formats:QUIZ", "index_dir": str(tmp_path / "index")}
    expected = steps_of(build(contracts, [tmp_path / "p.jsonl"]))
    small_blocks(monkeypatch)
    monkeypatch.setattr(token_cache, "_BYTES_PER_PROCESS", 100)
    monkeypatch.setattr(token_cache, "usable_cores", lambda: 2)
    monkeypatch.setattr(token_workers, "tokenize_block", None)
    for code, count in ((CUSTOM_FORMAT, 1), (CUSTOM_FORMAT, 1), (CUSTOM_FORMAT + "\n", 2)):
        module.write_text(code)
        assert steps_of(build(contracts, [file], **settings)) == expected
        assert len(made) == count
    for name, problem in {
        "quiz": "got 'quiz', wanted auto, one of .*, or package.module:NAME",
        "quiz_formats:": "got 'quiz_formats:', wanted package.module:NAME of a format",
        "lost_formats:QUIZ": "of a format: No module named .* on PYTHONPATH",
        "quiz_formats:LOST": "wanted package.module:NAME of a format: .* no attribute 'LOST'",
        "quiz_formats:parse": "quiz_formats:parse: got function, wanted a Format",
    }.items():
        with pytest.raises(ConfigError, match=f"model.data.format: {problem}|{problem}"):
            build(contracts, [file], format=name)
    with pytest.raises(ConfigError, match=r"QUIZ reads records of the kind comparison, which are"):
        build(contracts, [file], attributes=["help"], format="quiz_formats:QUIZ")


def test_index_of_a_second_start_needs_no_text(
    tmp_path: Path, contracts: Contracts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "SMALL_BYTES", 0)
    train, valid = pairs(tmp_path / "train.jsonl"), pairs(tmp_path / "valid.jsonl", seed=1)
    first = build(contracts, [train], [valid])
    assert {path.name.partition(".index-")[0] for path in tmp_path.glob("*.index-*")} == {
        "train.jsonl",
        "valid.jsonl",
    }
    stamps = {str(path): token_cache.FileStat.of(str(path)) for path in (train, valid)}
    monkeypatch.setattr(token_cache.FileStat, "of", stamps.__getitem__)
    for path in (train, valid):
        path.unlink()
    assert_same(build(contracts, [train], [valid]), first)


def test_index_of_a_changed_file_is_made_anew(
    tmp_path: Path, contracts: Contracts, made: list[str]
) -> None:
    path, place = tmp_path / "a.jsonl", {"index_dir": str(tmp_path / "index")}
    build(contracts, [pairs(path)], **place)
    build(contracts, [pairs(path)], **place)  # the file was written again with the same content
    assert len(made) == 1
    text = path.read_text()
    path.write_text(text.replace("thank you", "thank two"))
    os.utime(path, (LONG_AGO, LONG_AGO))
    changed = build(contracts, [path], **place)
    assert len(made) == 2
    assert_same(changed, build(contracts, [path]))
    path.write_text(text + text)
    assert len(build(contracts, [path], **place).train) == 80
    assert len(list((tmp_path / "index").iterdir())) == 1


def test_index_of_a_file_written_a_moment_ago_is_compared_by_its_content(
    tmp_path: Path, contracts: Contracts, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, place = tmp_path / "a.jsonl", {"index_dir": str(tmp_path / "index")}
    tiny.write_pairs(path, 5)
    build(contracts, [path], **place)
    digests: list[str] = []
    digest_of = token_cache.content_digest

    def digest(path: str) -> str:
        digests.append(path)
        return digest_of(path)

    monkeypatch.setattr(token_cache, "content_digest", digest)
    build(contracts, [path], **place)
    assert (len(made), digests) == (1, [str(path)] * len(digests))
    assert digests


def test_index_of_other_rules_is_another(
    tmp_path: Path, contracts: Contracts, made: list[str], tmp_path_factory: Any
) -> None:
    path, place = pairs(tmp_path / "a.jsonl"), {"index_dir": str(tmp_path / "index")}
    build(contracts, [path], **place)
    for settings in (
        {"template": "plain"}, {"seq_length": 50}, {"overlong": Overlong.truncate_left},
        {"format": "chat_pairs"}, {"prompt_key": "prompt"}, {"add_eos": True},
        {"contradicting": Contradicting.drop},
    ):  # fmt: skip
        for _ in range(2):
            build(contracts, [path], **place, **settings)
    assert len(made) == 8
    folder = tmp_path_factory.mktemp("tokenizer")
    contracts.tokenizer.save(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    build(Contracts(load_tokenizer(folder)), [path], **place)
    assert len(made) == 9
    # Whether malformed records are dropped does not change the tokens.
    build(contracts, [path], **place, malformed=Malformed.drop)
    assert len(made) == 9


def test_index_that_is_damaged_is_made_anew(
    tmp_path: Path, contracts: Contracts, made: list[str]
) -> None:
    path, place = pairs(tmp_path / "a.jsonl"), {"index_dir": str(tmp_path / "index")}
    in_memory = build(contracts, [path])
    build(contracts, [path], **place)
    [folder] = (tmp_path / "index").iterdir()
    for number, name in enumerate(("tokens.bin", "index.json", "sample_bounds.bin"), start=2):
        damaged = folder / name
        damaged.write_bytes(damaged.read_bytes()[:-8])
        assert_same(build(contracts, [path], **place), in_memory)
        assert len(made) == number, name


def test_index_of_a_process_that_is_killed_is_not_used(
    tmp_path: Path, tokenizer_folder: Path, contracts: Contracts
) -> None:
    path, folder = pairs(tmp_path / "a.jsonl"), tmp_path / "index"
    arguments = map(str, (tokenizer_folder, folder, path))
    done = tiny.run_script("tests/data/token_cache_ranks.py", "--die", *arguments, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [name[0] for name in json.loads(done.stdout.splitlines()[-1])] == ["."]
    end = time.monotonic() + 10
    while list(folder.iterdir()) and time.monotonic() < end:
        time.sleep(0.05)
    assert list(folder.iterdir()) == []
    assert_same(build(contracts, [path], index_dir=str(folder)), build(contracts, [path]))


def test_index_that_another_process_made_meanwhile_stays(
    tmp_path: Path, contracts: Contracts, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second process writes the same cache while the first is working."""
    path, place = pairs(tmp_path / "a.jsonl"), {"index_dir": str(tmp_path / "index")}
    add, of_other = token_index._Writer.add, list[int]()

    def meanwhile(*block: Any) -> None:
        add(*block)
        if len(made) == 1:
            build(contracts, [path], **place)
            [folder] = (tmp_path / "index").glob("a.*")
            of_other.append(folder.stat().st_ino)

    monkeypatch.setattr(token_index._Writer, "add", meanwhile)
    mapped = build(contracts, [path], **place)
    assert len(made) == 2
    assert [folder.stat().st_ino for folder in (tmp_path / "index").iterdir()] == of_other
    assert_same(mapped, build(contracts, [path]))


def test_index_has_ids_of_16_bits_where_the_vocabulary_allows(
    tmp_path: Path, contracts: Contracts, tokenizer_folder: Path, made: list[str]
) -> None:
    path, place = pairs(tmp_path / "a.jsonl"), {"index_dir": str(tmp_path / "index")}
    small = build(contracts, [path], **place)
    backend = Backend.from_file(str(tokenizer_folder / "tokenizer.json"))
    backend.add_tokens([f"<{n}>" for n in range(66_000)])
    large_folder = tmp_path / "large"
    large_folder.mkdir()
    contracts.tokenizer.save(large_folder)
    backend.save(str(large_folder / "tokenizer.json"))
    large_contracts = Contracts(load_tokenizer(large_folder))
    row = {"prompt": "why", "chosen": "<65999> yes", "rejected": "<65998> no"}
    other = write(tmp_path / "b.jsonl", row)
    large = build(large_contracts, [other], **place)
    sizes = {
        folder.name[0]: json.loads((folder / "index.json").read_text())["facts"]["token_type"]
        for folder in (tmp_path / "index").iterdir()
    }
    assert sizes == {"a": "uint16", "b": "int32"}
    highest = max(int(sequence.max()) for sequence in large.train.sequences)
    assert highest == large_contracts.tokenizer.vocab_size - 1 > 65535
    assert {sequence.dtype.name for sequence in small.train.sequences} == {"int32"}
    assert_same(large, build(large_contracts, [other]))


def test_index_beside_a_file_where_nothing_can_be_written(
    tmp_path: Path,
    contracts: Contracts,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    scratch: Path,
) -> None:
    monkeypatch.setattr(token_cache, "SMALL_BYTES", 0)
    data = tmp_path / "data"
    data.mkdir()
    path = pairs(data / "a.jsonl")
    in_memory = build(contracts, [path], keep_index=False)
    assert list(data.iterdir()) == [path]
    # A process of the same id, in another container, tries the same folder.
    (tmp_path / "index" / f".nemo_aligner_{os.getpid()}").mkdir(parents=True)
    assert_same(build(contracts, [path], index_dir=str(tmp_path / "index")), in_memory)
    own = os.mkdir

    def mkdir(folder: Any, *rest: Any, **how: Any) -> None:
        if data in Path(folder).parents:
            raise OSError(30, "Read-only file system")
        own(folder, *rest, **how)

    monkeypatch.setattr(os, "mkdir", mkdir)
    assert_same(build(contracts, [path]), in_memory)
    shown = capsys.readouterr().out
    assert f"{data}: cannot keep a token cache next to the data (Read-only" in shown
    assert list(data.iterdir()) == [path]
    with pytest.raises(ConfigError, match=r"model.data.index_dir: .*Read-only file system"):
        build(contracts, [path], index_dir=str(data / "index"))


def test_index_that_cannot_be_made_is_an_error(
    tmp_path: Path, contracts: Contracts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of a small file is not kept, and no partial cache remains."""
    path, place = pairs(tmp_path / "a.jsonl"), tmp_path / "index"
    build(contracts, [path])
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match=r"index_dir: got 'x', wanted null"):
        contracts.config(None, index_dir="x", keep_index=False)
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as patched:
        patched.setattr(token_cache.ArraysInFolder, "append", Mock(side_effect=full))
        with pytest.raises(DataError, match=r"its tokens cannot be .* the disk is full, with "):
            build(contracts, [path], index_dir=str(place))
    assert list(place.iterdir()) == []
    monkeypatch.setattr(token_cache, "content_digest", lambda _: os.utime(path) or "")
    with pytest.raises(DataError, match=r"a.jsonl: .*changed"):
        build(contracts, [path], index_dir=str(place))


def test_one_rank_makes_what_all_map_and_says_what_fails(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    good, bad = tiny.write_pairs(tmp_path / "a.jsonl", 40), tmp_path / "b.jsonl"
    bad.write_bytes(b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n\xff\n')
    place = tmp_path / "index"
    arguments = map(str, (tokenizer_folder, place, good, good, bad))
    done = tiny.run_script("tests/data/token_cache_ranks.py", *arguments, processes=2, check=False)
    first, second = (json.loads(line) for line in done.stdout.splitlines() if line[0] == "[")
    assert [made for made, *_ in first] == [1, 0]
    assert [made for made, *_ in second] == [0, 0]
    assert [rest for _, *rest in first] == [rest for _, *rest in second]
    digests, batches, tokens = zip(*(rest for _, *rest in first), strict=True)
    assert digests[0] == digests[1]
    assert batches[0] == batches[1]
    assert tokens[0] != tokens[1]
    assert done.returncode == 1
    assert done.stderr.count("not valid UTF-8") == 1
    assert "DataError" in done.stderr
    assert "b.jsonl:2: not valid UTF-8" in done.stderr
    assert [path.name.partition(".index-")[0] for path in place.iterdir()] == ["a.jsonl"]
