"""What the settings put around the prompts of a file, whatever its format is."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.prompts import Prompts
from nemo_aligner.data.reading import Reading, read_records
from nemo_aligner.errors import ConfigError, DataError
from nemo_aligner.text.messages import Text

PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
SYSTEM = {"role": "system", "content": "Be brief."}


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def texts(folder: Path, record: dict[str, Any], prompts: Prompts | None) -> tuple[Text, ...]:
    path = folder / "data.jsonl"
    path.write_text(json.dumps(record))
    (read,) = read_records(path, Reading(prompts=prompts)).records
    return read.texts


def settings(folder: Path, **given: str) -> SimpleNamespace:
    """Of a section: what is given as a file's text lies in a file."""
    names = ("system_prompt_file", "prompt_file", "input_template")
    found = dict.fromkeys(names, None) | given
    for name in names[:2]:
        if found[name] is not None:
            (folder / name).write_text(found[name])
            found[name] = str(folder / name)
    return SimpleNamespace(**found)


def test_nothing_said_is_nothing_put(tmp_path: Path) -> None:
    assert Prompts.of(settings(tmp_path), "model.data") is None


def test_a_system_prompt_stands_before_conversations_that_have_none(tmp_path: Path) -> None:
    prompts = Prompts.of(settings(tmp_path, system_prompt_file="Be brief."), "model.data")
    for text, reply in zip(texts(tmp_path, PAIR, prompts), ("4", "5"), strict=True):
        assert text == [SYSTEM, turn("user", "2+2?"), turn("assistant", reply)]
    own = [turn("system", "Be long."), turn("user", "2+2?")]
    (first, _) = texts(tmp_path, {**PAIR, "prompt": own}, prompts)
    assert first == [*own, turn("assistant", "4")]


def test_words_stand_around_the_last_question(tmp_path: Path) -> None:
    prompts = Prompts.of(settings(tmp_path, prompt_file='Solve {} as {"a": 1}.'), "model.data")
    before = [turn("user", "Hi"), turn("assistant", "Hello")]
    record = {**PAIR, "prompt": [*before, turn("user", "2+2?")]}
    (first, _) = texts(tmp_path, record, prompts)
    assert first == [*before, turn("user", 'Solve 2+2? as {"a": 1}.'), turn("assistant", "4")]


def test_a_rating_gets_them_too(tmp_path: Path) -> None:
    prompts = Prompts("Be brief.", "{}!")
    record = {"prompt": "2+2?", "response": "4", "helpfulness": 3}
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(record))
    how = Reading(kind=RecordKind.rating, attributes=("helpfulness",), prompts=prompts)
    (read,) = read_records(path, how).records
    assert read.response == [SYSTEM, turn("user", "2+2?!"), turn("assistant", "4")]
    assert read.labels == (3,)


def test_an_input_template_makes_raw_texts(tmp_path: Path) -> None:
    template = "User: {}\nAssistant: "
    prompts = Prompts.of(settings(tmp_path, input_template=template), "model.data")
    assert texts(tmp_path, PAIR, prompts) == (
        "User: 2+2?\nAssistant: 4",
        "User: 2+2?\nAssistant: 5",
    )
    raw = {"chosen": "The sky is blue.", "rejected": "The sky is green."}
    assert texts(tmp_path, raw, prompts) == ("The sky is blue.", "The sky is green.")


def test_what_cannot_take_them_is_malformed_by_its_line(tmp_path: Path) -> None:
    several = [turn("user", "Hi"), turn("assistant", "Hello"), turn("user", "2+2?")]
    with pytest.raises(DataError, match="jsonl:1: got turns of user, assistant, user, assistant"):
        texts(tmp_path, {**PAIR, "prompt": several}, Prompts(raw="Q: {} A: "))
    nobody = [turn("assistant", "4")]
    record = {"prompt": [SYSTEM], "chosen": nobody, "rejected": [turn("assistant", "5")]}
    with pytest.raises(DataError, match="jsonl:1: got turns of system, assistant, wanted a user's"):
        texts(tmp_path, record, Prompts(words="{}!"))


@pytest.mark.parametrize("template", ["Solve.", "{} and {}"])
def test_a_template_has_one_place_for_the_prompt(template: str, tmp_path: Path) -> None:
    for name in ("prompt_file", "input_template"):
        with pytest.raises(ConfigError, match=rf"model\.data\.{name}: got \{{\}} [02] times"):
            Prompts.of(settings(tmp_path, **{name: template}), "model.data")


def test_a_raw_text_has_no_system_prompt(tmp_path: Path) -> None:
    given = settings(tmp_path, system_prompt_file="Be brief.", input_template="Q: {} A: ")
    with pytest.raises(ConfigError, match="a raw text has no turns"):
        Prompts.of(given, "model.data")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    given = settings(tmp_path)
    given.prompt_file = str(tmp_path / "none.txt")
    with pytest.raises(ConfigError, match=r"data\.prompt_file: .*none\.txt cannot be read"):
        Prompts.of(given, "data")
