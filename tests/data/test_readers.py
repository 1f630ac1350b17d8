"""Settings for the field names of pairs, and for text around prompts."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_aligner.config.common import Malformed, RecordKind
from nemo_aligner.contract.messages import Text
from nemo_aligner.data.clean import MalformedRule
from nemo_aligner.data.formats.base import PairKeys
from nemo_aligner.data.readers import PromptWrapping
from nemo_aligner.data.records import prompt_key
from nemo_aligner.data.split import prompt_keys
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.contract.refusals import assert_refused
from tests.data.conftest import Run
from tests.data.files import build, read, rows_of, write
from tests.harness.contracts import Contracts

PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
SYSTEM = {"role": "system", "content": "Be brief."}


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def texts(folder: Path, record: dict[str, Any], prompts: PromptWrapping | None) -> tuple[Text, ...]:
    (found,) = read(folder, record, prompts=prompts).records
    return found.texts


def wrapping(folder: Path, **given: str) -> PromptWrapping | None:
    """The wrapping by a section's settings, with the texts of files written to files."""
    names = ("system_prompt_file", "prompt_file", "input_template")
    found = dict.fromkeys(names, None) | given
    for name in names[:2]:
        if found[name] is not None and not Path(found[name]).is_absolute():
            (folder / name).write_text(found[name])
            found[name] = str(folder / name)
    return PromptWrapping.of(SimpleNamespace(**found), "model.data")


def test_prompt_has_what_the_settings_put_around_it(tmp_path: Path) -> None:
    """Add a system prompt if there is none, text around the last question, or make a raw text."""
    answer = turn("assistant", "4")
    before = [turn("user", "Hi"), turn("assistant", "Hello")]
    talk = {**PAIR, "prompt": [*before, turn("user", "2+2?")]}
    own = [turn("system", "Be long."), turn("user", "2+2?")]
    # Templates are filled in by ``str.format``, as in NeMo RL and OpenRLHF.
    words, template = 'Solve {0} as {{"a": 1}}.', "User: {}\nAssistant: "
    system = {"system_prompt_file": "Be brief."}
    cases: list[tuple[dict[str, str], dict[str, Any], Text]] = [
        (system, PAIR, [SYSTEM, turn("user", "2+2?"), answer]),
        (system, {**PAIR, "prompt": own}, [*own, answer]),
        (
            {"prompt_file": words},
            talk,
            [*before, turn("user", 'Solve 2+2? as {"a": 1}.'), answer],
        ),
        ({"input_template": template}, PAIR, "User: 2+2?\nAssistant: 4"),
        ({"input_template": "{}, in \\boxed{{}}: "}, PAIR, "2+2?, in \\boxed{}: 4"),
    ]
    for given, record, wanted in cases:
        first, second = texts(tmp_path, record, wrapping(tmp_path, **given))
        assert first == wanted, (given, record)
        assert second[:-1] == wanted[:-1] or isinstance(wanted, str), (given, record)
    assert wrapping(tmp_path) is None
    # The prompt of a rating is wrapped, too.
    rated = {"prompt": "2+2?", "response": "4", "helpfulness": 3}
    how = {"attributes": ("helpfulness",), "prompts": PromptWrapping("Be brief.", "{}!")}
    (found,) = read(tmp_path, rated, kind=RecordKind.rating, **how).records
    assert found.response == [SYSTEM, turn("user", "2+2?!"), answer]
    assert found.labels == (3,)


def test_raw_texts_stay_as_they_are_next_to_conversations(tmp_path: Path, run: Run) -> None:
    """A file of raw texts alone is an error, as the settings would have no effect at all."""
    raw = {"chosen": "The sky is blue.", "rejected": "The sky is green."}
    talk = {key: [turn("user", "2+2?"), turn("assistant", PAIR[key])] for key in raw}
    prompts = wrapping(tmp_path, system_prompt_file="Be brief.", prompt_file="{}!")
    first, second = read(tmp_path, raw, talk, format="trl", prompts=prompts).records
    assert first.texts == (*raw.values(),)
    assert second.texts[0] == [SYSTEM, turn("user", "2+2?!"), turn("assistant", "4")]
    problem = r"data\.jsonl has only raw texts \(format {}\).*Omit {}, or give"
    both = "system_prompt_file and prompt_file"
    found = rf"^model\.data\.system_prompt_file: .*{problem.format('trl', both)}"
    with pytest.raises(ConfigError, match=found):
        read(tmp_path, raw, raw, format="trl", prompts=prompts)
    refused = run("data inspect", tmp_path / "data.jsonl", "--input-template", "Q: {} A: ", code=1)
    assert refused.stderr.startswith("ConfigError: --input-template: ")
    assert re.search(problem.format("text_pairs", "input_template"), refused.stderr)


INSTRUCTION = "[INST] Summarize the following text:\n{}\n[/INST] "


@pytest.mark.parametrize(
    ("kind", "options", "form"),
    [
        ("comparison", {"prompts": PromptWrapping(raw=INSTRUCTION)}, "{}"),
        ("comparison", {"format": "trl"}, INSTRUCTION),
        ("rating", {"prompts": PromptWrapping(raw=INSTRUCTION)}, "{}"),
    ],
)
def test_prompt_that_a_raw_text_gets_from_its_own_field_is_known(
    tmp_path: Path, kind: str, options: dict[str, Any], form: str
) -> None:
    """Raw texts with the same instruction have different prompts, unless their fields are equal."""
    replies = ({"chosen": f"4 {n}", "rejected": f"5 {n}", "response": f"6 {n}"} for n in range(3))
    texts = ("The sky is blue.", "The sky is", "the SKY  is")
    rows = [
        {"prompt": form.format(text), **reply} for text, reply in zip(texts, replies, strict=True)
    ]
    if kind == "comparison":
        rows = [{key: row[key] for key in row if key != "response"} for row in rows]
    records = read(tmp_path, *rows, kind=RecordKind(kind), **options).records
    assert all(isinstance(record.texts[0], str) for record in records)
    assert len(set(map(prompt_key, records))) == 2
    first, second, third = prompt_keys(records)
    assert first != second == third


def test_prompt_that_cannot_be_put_around_is_malformed_by_its_line(tmp_path: Path) -> None:
    several = [turn("user", "Hi"), turn("assistant", "Hello"), turn("user", "2+2?")]
    with pytest.raises(DataError, match="jsonl:1: got turns of user, assistant, user"):
        texts(tmp_path, {**PAIR, "prompt": several}, PromptWrapping(raw="Q: {} A: "))
    nobody = [turn("assistant", "4")]
    record = {"prompt": [SYSTEM], "chosen": nobody, "rejected": [turn("assistant", "5")]}
    with pytest.raises(DataError, match="jsonl:1: got turns of system, assistant"):
        texts(tmp_path, record, PromptWrapping(words="{}!"))


def test_prompt_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    templates = [
        ("Solve.", r"has \{\} 0 times\. Write \{\} once.*twice"),
        ("{{}}", r"has \{\} 0 times"),
        ("{} and {}", r"has \{\} 2 times"),
        ('{} as {"a": 1}', r"has the field \{\"a\"\}\. Write"),
        ("{1}", r"has the field \{1\}"),
        ("{0.text}", r"has the field \{0\.text\}"),
        ("{}}", "is not a template: Single '}' encountered"),
        ("{:d}", "is not a template: Unknown format code"),
    ]
    cases: list[tuple[dict[str, str], str]] = [
        ({name: template}, rf"^model\.data\.{name}: .* {problem}")
        for template, problem in templates
        for name in ("prompt_file", "input_template")
    ]
    both = {"system_prompt_file": "Be brief.", "input_template": "Q: {} A: "}
    cases.append((both, "a raw text, which has no system turn"))

    cases.append(
        ({"prompt_file": str(tmp_path / "none.txt")}, r"prompt_file: .*none\.txt: there is no such")
    )
    assert_refused(lambda given: wrapping(tmp_path, **given), cases, ConfigError)


WHY = [turn("user", "why")]
LEFT_OUT = MalformedRule(Malformed.drop, max_fraction=0.5)
NAMED = PairKeys.of("question", "better", None)
BY_NAME = {"question": "why", "better": "because", "rejected": "no", "prompt": "unread"}


def test_pair_keys_name_the_fields(tmp_path: Path) -> None:
    chosen = [turn("assistant", "because")]
    messages = {**BY_NAME, "question": [SYSTEM, *WHY], "better": chosen, "score_chosen": 3}
    file = read(
        tmp_path, BY_NAME, {**messages, "score_rejected": 1}, {**BY_NAME, "label_margin": None},
        pair_keys=NAMED, rule=LEFT_OUT, pair_columns=("label_margin",),
    )  # fmt: skip
    assert (file.format, file.counts["malformed"]) == ("chat_pairs", 1)
    replies = (turn("assistant", "because"), turn("assistant", "no"))
    assert file.records[0].texts == tuple([SYSTEM, *WHY, reply] for reply in replies)
    assert file.records[1].texts == tuple([*WHY, reply] for reply in replies)
    assert [pair.labels for pair in file.records] == [(2.0,), (None,)]


def test_pair_keys_of_other_fields_are_refused(tmp_path: Path) -> None:
    cases = [
        (PAIR, r":1: got keys 'prompt', .*wants 'question', 'better' and"),
        ({**BY_NAME, "better": 3}, r":1: better: got 3, wanted a string or a list"),
        ({**BY_NAME, "question": 3}, r":1: question: got 3, wanted a string or a list"),
    ]
    assert_refused(lambda record: read(tmp_path, record, pair_keys=NAMED), cases, DataError)


def test_pair_keys_are_for_chat_pairs_alone(tmp_path: Path, contracts: Contracts) -> None:
    assert PairKeys.of(None, None, None) is None
    assert PairKeys.of(None, None, "worse") == PairKeys("prompt", "chosen", "worse")
    assert read(tmp_path, BY_NAME, pair_keys=NAMED, format="chat_pairs").counts["kept"] == 1
    path = write(tmp_path / "named.jsonl", BY_NAME)
    found = build(contracts, [path], prompt_key="question", chosen_key="better")
    assert len(found.train.records) == 1
    with pytest.raises(ConfigError, match=r"data.format: got 'hh', wanted auto or chat_pairs"):
        read(tmp_path, BY_NAME, pair_keys=NAMED, format="hh")
    with pytest.raises(ConfigError, match=r"data.prompt_key: got 'question', wanted null"):
        read(tmp_path, BY_NAME, pair_keys=NAMED, kind=RecordKind.rating)
    with pytest.raises(ConfigError, match=r"model.data.prompt_key: got 'question', wanted null"):
        build(contracts, [path], attributes=["help"], prompt_key="question")


def test_pair_keys_of_inspect_and_split(tmp_path: Path, run: Run) -> None:
    rows = [{**BY_NAME, "question": f"why {number}"} for number in range(4)]
    path = write(tmp_path / "named.jsonl", *rows)
    flags = ("--prompt-key=question", "--chosen-key=better")
    shown = run("data inspect", path, *flags).stdout
    assert "why 0" in shown
    assert "unread" not in shown
    run("data split", path, f"--output={tmp_path}", "--heldout=0.5", *flags)
    parts = [row for name in ("train", "heldout") for row in rows_of(tmp_path / f"{name}.jsonl")]
    assert sorted(parts, key=lambda row: row["question"]) == rows
