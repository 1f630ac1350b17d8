"""What the settings put around the prompts of a file, whatever its format is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.prompts import PromptWrapping
from nemo_aligner.errors import ConfigError, DataError
from nemo_aligner.text.messages import Text
from tests.data.files import read
from tests.text.refusals import assert_refused

PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
SYSTEM = {"role": "system", "content": "Be brief."}


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def texts(folder: Path, record: dict[str, Any], prompts: PromptWrapping | None) -> tuple[Text, ...]:
    (found,) = read(folder, record, prompts=prompts).records
    return found.texts


def settings(folder: Path, **given: str) -> SimpleNamespace:
    """Of a section: what is given as a file's text lies in a file."""
    names = ("system_prompt_file", "prompt_file", "input_template")
    found = dict.fromkeys(names, None) | given
    for name in names[:2]:
        if found[name] is not None:
            (folder / name).write_text(found[name])
            found[name] = str(folder / name)
    return SimpleNamespace(**found)


def test_prompt_is_as_it_is_where_nothing_is_set(tmp_path: Path) -> None:
    assert PromptWrapping.of(settings(tmp_path), "model.data") is None


def test_prompt_of_the_system_stands_before_conversations_that_have_none(tmp_path: Path) -> None:
    prompts = PromptWrapping.of(settings(tmp_path, system_prompt_file="Be brief."), "model.data")
    for text, reply in zip(texts(tmp_path, PAIR, prompts), ("4", "5"), strict=True):
        assert text == [SYSTEM, turn("user", "2+2?"), turn("assistant", reply)]
    own = [turn("system", "Be long."), turn("user", "2+2?")]
    (first, _) = texts(tmp_path, {**PAIR, "prompt": own}, prompts)
    assert first == [*own, turn("assistant", "4")]


def test_prompt_words_stand_around_the_last_question(tmp_path: Path) -> None:
    prompts = PromptWrapping.of(
        settings(tmp_path, prompt_file='Solve {} as {"a": 1}.'), "model.data"
    )
    before = [turn("user", "Hi"), turn("assistant", "Hello")]
    record = {**PAIR, "prompt": [*before, turn("user", "2+2?")]}
    (first, _) = texts(tmp_path, record, prompts)
    assert first == [*before, turn("user", 'Solve 2+2? as {"a": 1}.'), turn("assistant", "4")]


def test_prompt_of_a_rating_is_put_around_too(tmp_path: Path) -> None:
    record = {"prompt": "2+2?", "response": "4", "helpfulness": 3}
    how = {"attributes": ("helpfulness",), "prompts": PromptWrapping("Be brief.", "{}!")}
    (found,) = read(tmp_path, record, kind=RecordKind.rating, **how).records
    assert found.response == [SYSTEM, turn("user", "2+2?!"), turn("assistant", "4")]
    assert found.labels == (3,)


def test_prompt_input_template_makes_raw_texts(tmp_path: Path) -> None:
    template = "User: {}\nAssistant: "
    prompts = PromptWrapping.of(settings(tmp_path, input_template=template), "model.data")
    assert texts(tmp_path, PAIR, prompts) == (
        "User: 2+2?\nAssistant: 4",
        "User: 2+2?\nAssistant: 5",
    )
    raw = {"chosen": "The sky is blue.", "rejected": "The sky is green."}
    assert texts(tmp_path, raw, prompts) == ("The sky is blue.", "The sky is green.")


def test_prompt_that_cannot_be_put_around_is_malformed_by_its_line(tmp_path: Path) -> None:
    several = [turn("user", "Hi"), turn("assistant", "Hello"), turn("user", "2+2?")]
    with pytest.raises(DataError, match="jsonl:1: got turns of user, assistant, user, assistant"):
        texts(tmp_path, {**PAIR, "prompt": several}, PromptWrapping(raw="Q: {} A: "))
    nobody = [turn("assistant", "4")]
    record = {"prompt": [SYSTEM], "chosen": nobody, "rejected": [turn("assistant", "5")]}
    with pytest.raises(DataError, match="jsonl:1: got turns of system, assistant, wanted a user's"):
        texts(tmp_path, record, PromptWrapping(words="{}!"))


def test_prompt_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    places = r"model\.data\.{}: got \{{\}} {} times"
    cases: list[tuple[dict[str, str], str]] = [
        ({name: template}, places.format(name, times))
        for template, times in (("Solve.", 0), ("{} and {}", 2))
        for name in ("prompt_file", "input_template")
    ]
    both = {"system_prompt_file": "Be brief.", "input_template": "Q: {} A: "}
    cases.append((both, "a raw text has no turns"))

    def take(given: dict[str, str]) -> None:
        PromptWrapping.of(settings(tmp_path, **given), "model.data")

    assert_refused(take, cases, ConfigError)
    missing = settings(tmp_path)
    missing.prompt_file = str(tmp_path / "none.txt")
    with pytest.raises(ConfigError, match=r"data\.prompt_file: .*none\.txt cannot be read"):
        PromptWrapping.of(missing, "data")
