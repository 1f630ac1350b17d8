"""``nemo-aligner data inspect`` shows what training will see; samples to score from a file."""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemo_aligner.batch.packed import LabelColumns
from nemo_aligner.contract.messages import Conversation
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.formats import FORMATS, NAMED_FORMATS
from nemo_aligner.data.formats.base import PairKeys
from nemo_aligner.data.inspect import Inspection, inspect_files, mark_specials
from nemo_aligner.data.label_summary import label_range
from nemo_aligner.data.readers import ReaderConfig, parse_file
from nemo_aligner.data.records import Origin
from nemo_aligner.data.report import far_labels
from nemo_aligner.data.texts import label_of, labelled_texts, write_first_replies
from nemo_aligner.utils.errors import DataError
from tests.data.conftest import Run
from tests.data.files import write
from tests.harness import tiny
from tests.harness.contracts import Contracts

VERB = "data inspect"


def test_inspect_pairs_with_a_tokenizer(tokenizer_folder: Path, tmp_path: Path, run: Run) -> None:
    train = write(tmp_path / "train.jsonl", {"prompt": "why", "chosen": "a", "rejected": "b"})
    path = write(
        tmp_path / "pairs.jsonl",
        {"prompt": "why", "chosen": "the cat", "rejected": "no", "source": "x"},
        {"prompt": "who", "chosen": "dog " * 60, "rejected": "no"},
        {"prompt": "what", "chosen": "a", "rejected": "a"},
    )
    rules = (f"--tokenizer={tokenizer_folder}", "--seq-length=60")
    done = run(VERB, path, "--train", train, *rules)
    shown = done.stdout.splitlines()
    assert shown[0].startswith("scoring contract of these options (not yet of a training run): ")
    assert f"train: {train} (chat_pairs)" in shown
    assert "  dropped                   2 (1 identical, 1 overlong)" in shown
    assert "  prompts also in training  1" in shown
    assert "  sources                   x 1" in shown
    assert f"{path}:1 (x)" in shown
    start = shown.index(f"{path}:1 (x)")
    assert shown[start + 2 : start + 5] == [
        "[<|im_start|>]user",
        "why[<|im_end|>]",
        "[<|im_start|>]assistant",
    ]
    assert shown[start + 5] == "the cat[<|im_end|>]"
    assert "scored at the last token" in shown[start + 7]
    assert any("not used: got" in line for line in shown)


def test_inspect_counts_principles(tokenizer_folder: Path, tmp_path: Path, run: Run) -> None:
    pair = {"prompt": "why", "chosen": "the cat", "rejected": "no"}
    rows = [{**pair, "principle": text} for text in ("be kind", "be brief", "be kind", "")]
    path = write(tmp_path / "pairs.jsonl", *rows)
    row = "  principles                3 records, 2 different"
    shown = run(VERB, path).stdout.splitlines()
    assert row in shown
    assert shown.count("principle: be kind") == 2
    rules = (f"--tokenizer={tokenizer_folder}", "--principle-template=Is it {principle}?")
    shown = run(VERB, path, *rules).stdout.splitlines()
    assert row in shown
    assert shown.count("Is it be kind?[<|im_end|>]") == 2
    refused = run(VERB, path, rules[0], code=1).stdout
    assert f"{path}:1: " in refused
    assert "the model was not trained with principles" in refused


def test_inspect_puts_text_around_prompts_as_training_does(
    tokenizer_folder: Path, tmp_path: Path, run: Run
) -> None:
    system, words = tmp_path / "system.txt", tmp_path / "words.txt"
    system.write_text("Be brief.")
    words.write_text("Solve {} now.")
    path = write(tmp_path / "pairs.jsonl", {"prompt": "2+2?", "chosen": "4", "rejected": "5"})
    files = ("--system-prompt-file", system, "--prompt-file", words)
    shown = run(VERB, path, *files).stdout.splitlines()
    assert shown[-3:] == ["system: Be brief.", "user: Solve 2+2? now.", "assistant: 5"]
    shown = run(VERB, path, *files, f"--tokenizer={tokenizer_folder}").stdout.splitlines()
    assert shown.count("Be brief.[<|im_end|>]") == 2
    shown = run(VERB, path, "--input-template", "User: {} Assistant: ").stdout.splitlines()
    assert shown[-1] == "User: 2+2? Assistant: 5"
    for options, reason in (
        (("--prompt-file", system), "--prompt-file: 'Be brief.' has {} 0 times"),
        ((*files[:2], "--input-template", "{}"), "--input-template: it makes a raw text"),
        (
            ("--system-prompt-file", "missing"),
            "--system-prompt-file: missing: there is no such file",
        ),
    ):
        assert reason in run(VERB, path, *options, code=1).stderr


def test_inspect_calls_completions_by_their_ranks(tmp_path: Path) -> None:
    record = tiny.ranked("why", (2, "bad"), (1, "good"), (2, "poor"))
    path = write(tmp_path / "ranked.jsonl", record)
    texts = [each.text for each in inspect_files([str(path)], [], Inspection())]
    (shown,) = [text for text in texts if "-- " in text]
    heads = [line for line in shown.splitlines() if line.startswith("-- ")]
    assert heads == ["-- rank 0", "-- rank 1", "-- rank 1"]
    assert shown.endswith("assistant: poor")


def test_inspect_shows_control_characters_as_escapes(tmp_path: Path) -> None:
    pair = {"prompt": "p\rq", "chosen": "a\x1b[2Jb\x00", "rejected": "one\n\ttwo"}
    path = write(tmp_path / "pairs.jsonl", pair)
    *_, shown = [each.text for each in inspect_files([str(path)], [], Inspection())]
    assert r"user: p\rq" in shown
    assert r"assistant: a\x1b[2Jb\x00" in shown
    assert "assistant: one\n\ttwo" in shown


def test_inspect_ratings_without_a_tokenizer(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        tmp_path / "rated.jsonl",
        {"prompt": "why", "response": "the cat", "help": 3, "depth": 2},
        {"prompt": "who", "response": "a", "help": None, "depth": None},
    )
    done = run(VERB, path, "--attributes=help, depth ", "--show=1")
    assert "  characters of a reply     7 to 7" in done.stdout
    assert "  dropped                   1 (1 no_label)" in done.stdout
    assert done.stdout.endswith("-- labels 3 2\nuser: why\nassistant: the cat\n")
    failed = run(VERB, path, "--attributes", "a,,b", code=1)
    assert failed.stderr.startswith("ConfigError: --attributes: got ['a', '', 'b'], wanted")
    failed = run(VERB, path, "--format=rated", code=1)
    assert failed.stderr.startswith("ConfigError: --format: got 'rated', wanted auto, one of")
    with pytest.raises(SystemExit):
        run(VERB, path, "model.data.malformed=drop")
    said = capsys.readouterr().err
    assert "got the setting model.data.malformed=drop, wanted a file" in said


def test_inspect_says_which_file_cannot_be_read_and_shows_the_next(
    tmp_path: Path, run: Run
) -> None:
    bad = write(tmp_path / "bad.jsonl", {"prompt": "why", "chosen": "a"})
    good = write(tmp_path / "good.jsonl", {"prompt": "why", "chosen": "a", "rejected": "b"})
    missing = str(tmp_path / "missing.jsonl")
    done = run(VERB, bad, good, "--train", missing, code=1)
    shown = done.stdout.splitlines()
    assert shown[0].startswith(f"train: {missing}: there is no such file")
    assert shown[1].startswith(f"file: {bad}:1: got a record with keys")
    assert shown[2] == f"file: {good} (chat_pairs)"
    assert done.stderr == ""


def test_inspect_of_malformed_records(
    tokenizer: Tokenizer, contracts: Contracts, tmp_path: Path
) -> None:
    """test_dataset.py tests how they are listed."""
    pair = {"prompt": "why", "chosen": "a", "rejected": "b"}
    refused = {**pair, "chosen": "a<|im_end|>"}
    path = write(tmp_path / "bad.jsonl", pair, refused, {**pair, "chosen": 1})
    other = write(tmp_path / "good.jsonl", {**pair, "prompt": "who"})
    how = Inspection(rules=(tokenizer, contracts()), show=0)
    first, second = inspect_files([str(path), str(other)], [], how)
    assert (first.is_good, second.is_good) == (False, True)
    lines = first.text.splitlines()
    assert "  malformed                 2 (66.67%)" in lines
    assert "  kept                      1" in lines
    (listed, _) = lines[lines.index("  malformed:") + 1 :]
    said = f"    {path}:2: prompt and chosen: messages[1].content: got '<|im_end|>'"
    assert listed.startswith(said)
    (only,) = inspect_files([str(write(path, *[{**pair, "chosen": 1}] * 12))], [], Inspection())
    assert not only.is_good
    lines = only.text.splitlines()
    assert "  kept                      0" in lines
    assert not [line for line in lines if line.startswith("  sources")]
    # Records with the same problem share a line.
    (listed,) = lines[lines.index("  malformed:") + 1 :]
    assert listed.startswith(f"    {path}:1: chosen: got 1, wanted a string")
    assert listed.endswith(" (11 more on lines 2, 3, 4, 5, 6, ...)")


def test_inspect_names_labels_that_are_far_out(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "response": "r", "help": n % 5, "deep": 4} for n in range(40)]
    rows[6]["help"], rows[8]["help"], rows[9]["deep"] = 400, -1e38, 0
    path = write(tmp_path / "rated.jsonl", *rows)
    (table,) = inspect_files(
        [str(path)], [], Inspection(show=0, reading=ReaderConfig(attributes=["help", "deep"]))
    )
    assert table.is_good
    lines = table.text.splitlines()
    assert "  labels from               help -1e+38, deep 0" in lines
    assert "  labels to                 help 400, deep 4" in lines
    assert lines[lines.index("  labels that are far out:") + 1 :] == [
        f"    {path}:9: help is -1e+38, the median 2",
        f"    {path}:7: help is 400, the median 2",
    ]


def test_inspect_takes_the_rules_of_a_reward_model(tmp_path: Path, run: Run) -> None:
    model = tiny.write_reward_nemo(tmp_path / "rm.nemo")
    rated = {"prompt": "why", "response": "the cat", "helpfulness": 3, "verbosity": 1}
    done = run(VERB, write(tmp_path / "rated.jsonl", rated), f"--tokenizer={model}")
    assert done.stdout.startswith("scoring contract: ")
    assert "-- labels 3 1: " in done.stdout
    for flags, given in (
        (["--reads=turns"], "--reads"),
        (["--seq-length=9", "--template=chatml"], "--template, --seq-length"),
        (["--overlong=error"], "--overlong"),
    ):
        path = tmp_path / "rated.jsonl"
        failed = run(VERB, path, f"--tokenizer={model}", *flags, code=1)
        expected = f"{given}: {model} is a reward model, whose scoring contract is used"
        assert expected in failed.stderr
        failed = run(VERB, path, *flags, code=1)
        assert f"{given}: no effect without --tokenizer" in failed.stderr


def test_inspect_shows_steps_with_their_labels_and_tokens(
    tokenizer_folder: Path, tokenizer: Tokenizer, tmp_path: Path, run: Run
) -> None:
    steps = {"prompt": "why", "completions": ["the cat", "sings", "no"], "labels": [1, 0.7, None]}
    path = write(tmp_path / "steps.jsonl", steps)
    rules = [f"--tokenizer={tokenizer_folder}", "--attributes=right", "--template=chatml"]
    failed = run(VERB, path, *rules, code=1)
    assert "got labels of 3 turns or steps" in failed.stdout
    done = run(VERB, path, *rules, "--reads=step_marks", "--step-separator=!")
    assert "  turns or steps            3" in done.stdout
    _, _, shown = done.stdout.partition("-- labels 1, 0.7, none: ")
    *_, first, second, third = shown.splitlines()
    assert "the cat!sings!no!" in shown
    mark = tokenizer.token_id("!")
    assert first.startswith("   step 1 scored at token ")
    assert first.endswith(f": {mark} '!', label 1")
    assert second.endswith(f": {mark} '!', label 0.7")
    assert third.endswith(f": {mark} '!', label none")
    # All labels of PRM800K's path are neutral, or missing.
    neutral = {"text": "one", "rating": 0, "flagged": False}
    chosen = {"completions": [neutral], "chosen_completion": 0, "human_completion": None}
    record = {"question": {"problem": "why"}, "label": {"steps": [chosen]}}
    path = write(tmp_path / "prm800k.jsonl", record)
    for given, found, code in (("0", "-- labels 0", 0), ("null", "1 (1 no_label)", 1)):
        flags = ("--attributes=right", "--neutral-label", given)
        assert found in run(VERB, path, *flags, code=code).stdout


def test_inspect_marks_special_tokens(tokenizer: Tokenizer) -> None:
    token_ids = [*tokenizer.encode("the cat"), *tokenizer.special_ids][:-1]
    shown = mark_specials(token_ids, tokenizer, ("<<", ">>"))
    assert shown.startswith("the cat<<")
    assert shown.endswith(f"<<{tokenizer.decode(token_ids[-1:])}>>")


NAN = float("nan")
RNG = random.Random(0)


def far(values: list[float]) -> list[float]:
    labels = LabelColumns.of(["help"], torch.tensor(values)[:, None])
    found = far_labels(labels, [Origin("a.jsonl", n) for n in range(1, len(values) + 1)])
    assert all(values[label.origin.line - 1] == pytest.approx(label.value) for label in found)
    return [label.value for label in found]


def test_labels_that_are_ordinary_are_not_far_out() -> None:
    for values in (
        [4.0] * 999 + [0.0],
        [0.0] * 999 + [4.0],
        [1.0] * 999 + [10.0],
        [0.0] * 900 + [100.0] * 100,
        [RNG.gauss(0, 1) for _ in range(5000)],
        [RNG.expovariate(1) for _ in range(5000)],
        [RNG.random() for _ in range(1000)] + [2.0],
        [3.0, 1e38],
        [NAN] * 5,
        [],
    ):
        assert far(values) == []


def test_labels_that_are_far_out_are_found_the_farthest_first() -> None:
    for values in (
        [1.0, 2.0, 0.0, 4.0, 3.0, 2.0, 1.0],
        [4.0] * 999,
        [0.0] * 50,
        [RNG.gauss(0, 1) for _ in range(1000)],
        [RNG.randint(0, 4) + 0.0 for _ in range(100)] + [NAN] * 50,
    ):
        assert far([*values, 1e38]) == pytest.approx([1e38])
        assert far([400.0, *values, 0.0, *values, -1e6]) == [-1e6, 400.0]


def test_labels_range_leaves_out_missing_ones() -> None:
    values = torch.tensor([[1.0, NAN, 5.0], [3.0, NAN, NAN]])
    low, high = label_range(LabelColumns.of(["a", "b", "c"], values))
    assert str((low, high)) == "([1.0, nan, 5.0], [3.0, nan, 5.0])"


USER = {"role": "user", "content": "why?"}
REPLY = {"role": "assistant", "content": "so"}


TOOL = {"type": "function", "function": {"name": "f"}}


def test_texts_of_a_file_are_texts_messages_and_replies(tmp_path: Path) -> None:
    path = write(
        tmp_path / "asked.jsonl",
        {"text": "a  raw\ntext"},
        {"messages": [USER, REPLY]},
        {"prompt": "why?", "chosen": "so", "rejected": "no"},
        {"chosen": [USER, {"role": "assistant", "content": "so"}]},
        {"messages": [USER, REPLY], "tools": [TOOL]},
        {"prompt": "why?", "chosen": "so", "tools": json.dumps([TOOL])},
    )
    assert list(labelled_texts(path)) == [
        ("a raw text", "a  raw\ntext"),
        ("why? | so", [USER, REPLY]),
        ("chosen    why? | so", [USER, REPLY]),
        ("rejected  why? | no", [USER, {"role": "assistant", "content": "no"}]),
        ("chosen    why? | so", [USER, REPLY]),
        ("why? | so", Conversation([USER, REPLY], [TOOL])),
        ("chosen    why? | so", Conversation([USER, REPLY], [TOOL])),
    ]
    # TRL's trainers log completions like this; Arrow fills missing keys with nulls.
    filled = {**REPLY, "tool_calls": None}
    logged = {"step": 1, "reward_model": 0.5, "advantage": 1.0}
    path = write(
        tmp_path / "logged.jsonl",
        {**logged, "prompt": [USER], "completion": [filled]},
        {**logged, "prompt": "why? ", "completion": "so"},
        {**logged, "prompt": [USER], "completion": [REPLY], "tools": [TOOL]},
    )
    assert [text for _, text in labelled_texts(path)] == [
        [USER, REPLY], "why? so", Conversation([USER, REPLY], [TOOL])
    ]  # fmt: skip
    with pytest.raises(DataError, match="prompt and completion: got list and str, wanted strings"):
        list(labelled_texts(write(path, {**logged, "prompt": [USER], "completion": "so"})))
    # The label of a long sample has its beginning and its end.
    label = label_of("begin " + "x" * 100 + " end")
    assert (len(label), label[:7], label[-5:]) == (80, "begin x", "x end")


def test_field_that_no_record_has_is_an_error_and_leaves_out_no_reply(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", {"question": "a", "chosen": "b", "rejected": "c"})
    keys = PairKeys("question", "chosen", "rejected")
    assert len(list(labelled_texts(path, ReaderConfig(pair_keys=keys)))) == 2
    for side in ("chosen", "rejected"):
        wrong = ReaderConfig(pair_keys=replace(keys, **{side: "nope"}))
        with pytest.raises(DataError, match=f"no record has the field 'nope' of --{side}-key"):
            list(labelled_texts(path, wrong))
    with pytest.raises(DataError, match=r'A line to score may also be \{"text": \.\.\.\}'):
        list(labelled_texts(write(path, {"id": 4})))


def test_texts_are_read_from_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(write, pipe, {"text": "one"}, {"text": "two"})
        assert [text for _, text in labelled_texts(pipe)] == ["one", "two"]


def test_texts_of_preference_data_are_those_of_its_records(tmp_path: Path) -> None:
    """Every format gives the samples that evaluate reads; evaluate has a question once."""
    published = {
        "ultrafeedback_binarized": {
            "prompt": "why?",
            "chosen": [USER, REPLY],
            "rejected": [USER, {**REPLY, "content": "no"}],
        },
        "hh": {
            "chosen": "\n\nHuman: why?\n\nAssistant: so",
            "rejected": "\n\nHuman: why?\n\nAssistant: no",
        },
        "raw texts": {"chosen": "why? so", "rejected": "why? no"},
    }
    files = {name: ("auto", [row, row]) for name, row in published.items()}
    formats = {**FORMATS, **NAMED_FORMATS}
    files |= {name: (name, [*known.sample]) for name, known in formats.items()}
    wrong = {}
    for name, (fmt, rows) in files.items():
        path, reading = write(tmp_path / "data.jsonl", *rows), ReaderConfig(format=fmt)
        records = parse_file(path, reading).records
        texts = [text for record in records for text in record.texts]
        found = [text for _, text in labelled_texts(path, reading)]
        if not texts or found != texts:
            wrong[name] = (texts, found)
    assert not wrong, wrong
    named = write(tmp_path / "named.jsonl", {"q": "why?", "good": "so", "bad": "no"})
    reading = ReaderConfig(pair_keys=PairKeys("q", "good", "bad"))
    assert next(text for _, text in labelled_texts(named, reading)) == [USER, REPLY]
    with pytest.raises(DataError, match=r"named.jsonl:1: got a record with keys 'q', 'good'"):
        list(labelled_texts(named))


def test_texts_are_missing_from_lines_that_are_named(tmp_path: Path) -> None:
    rows = [{"text": 3}, {"texts": "a"}, {"messages": [USER]}, {"prompt": 3, "chosen": "a"}]
    path = write(tmp_path / "asked.jsonl", {"text": "a"}, *rows)
    with pytest.raises(DataError) as caught:
        list(labelled_texts(path))
    assert str(caught.value).splitlines() == [
        f"{path}: 4 of its 5 lines are malformed",
        f"  {path}:2: text: got 3, wanted a sample: a string, or a list of messages with role and "
        "content",
        f"  {path}:3: got keys 'texts'; chat_pairs wants 'prompt', 'chosen' and 'rejected', "
        "strings or lists of messages",
        f"  {path}:4: messages: the last message is the reply that is scored: got role 'user', "
        "wanted 'assistant'",
        f"  {path}:5: prompt: got 3, wanted a string or a list of messages",
    ]
    with pytest.raises(DataError, match=r"asked.jsonl:2: malformed JSON"):
        list(labelled_texts(write(tmp_path / "asked.jsonl", {"text": "a"}, "{")))


def test_texts_to_ask_a_server_for_are_the_first_replies(tmp_path: Path) -> None:
    pairs = [{"prompt": f"p{n}", "chosen": f"c{n}", "rejected": f"r{n}"} for n in range(3)]
    target = tmp_path / "two.jsonl"
    shown = write_first_replies(write(tmp_path / "pairs.jsonl", *pairs), target)
    assert shown.splitlines() == ["user: p0", "reply: c0", "reply: r0"]
    assert [label for label, _ in labelled_texts(target)] == ["p0 | c0", "p0 | r0"]
    row = {"messages": [USER, REPLY], "tools": [TOOL]}
    with_tools = {"prompt": [USER], "chosen": [REPLY], "rejected": "no", "tools": [TOOL]}
    write_first_replies(write(tmp_path / "tools.jsonl", with_tools), target)
    assert json.loads(target.read_text().splitlines()[0]) == row
    ratings = [{"prompt": f"p{n}", "response": f"r{n}"} for n in range(3)]
    shown = write_first_replies(write(tmp_path / "rated.jsonl", *ratings), target)
    assert shown.splitlines() == ["user: p0", "reply: r0", "reply: r1"]
    assert len(target.read_text().splitlines()) == 2


def test_conversation_to_score_has_its_system_prompt(tmp_path: Path) -> None:
    """A conversation to score gets a ``system`` column, as one of preference data does."""
    system = {"role": "system", "content": "be kind"}
    path = write(tmp_path / "a.jsonl", {"messages": [USER, REPLY], "system": "be kind"})
    assert [text for _, text in labelled_texts(path)] == [[system, USER, REPLY]]
