"""Tokenizer folders: ids, special tokens, the fingerprint, and invalid files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_aligner.contract.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.utils.errors import DataError
from tests.contract.refusals import assert_refused


def changed(
    folder: Path, target: Path, file: str = "tokenizer_config.json", **changes: object
) -> Path:
    """Copy a tokenizer folder, and change values of one file; None removes a key."""
    shutil.copytree(folder, target)
    content = json.loads((target / file).read_text()) if (target / file).is_file() else {}
    content.update(changes)
    kept = {key: value for key, value in content.items() if value is not None}
    (target / file).write_text(json.dumps(kept))
    return target


def test_tokenizer_takes_special_tokens_in_a_text_as_one_id(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert (ids[0], ids[-1], len(ids)) == (tokenizer.bos_id, tokenizer.eos_id, 3)
    both = ["a", "<|im_end|>b c"]
    assert tokenizer.encode_batch(both) == [tokenizer.encode(text) for text in both]
    assert max(ids) < tokenizer.vocab_size == 320
    special = {tokenizer.bos_id, tokenizer.eos_id, *tokenizer.encode("<|endoftext|>")}
    assert tokenizer.special_ids == special
    assert not special & set(tokenizer.encode("the cat"))


def test_tokenizer_is_saved_byte_for_byte(
    tokenizer: Tokenizer, tokenizer_folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "new" / "copy"
    for _ in range(2):
        tokenizer.save(copy)
    for path in copy.iterdir():
        assert path.read_bytes() == (tokenizer_folder / path.name).read_bytes()
    again = load_tokenizer(copy)
    assert again.fingerprint == tokenizer.fingerprint
    assert again.chat_template == tokenizer.chat_template is not None


def test_tokenizer_fingerprint_never_changes(tmp_path: Path) -> None:
    """The fingerprint is part of the contract of every archive."""
    (tmp_path / "tokenizer.json").write_text(
        '{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, '
        '"model": {"type": "WordLevel", "vocab": {"a": 0, "\u00e9": 1}, "unk_token": "a"}}',
        encoding="utf-8",
    )
    wanted = "90e146384bcf9620d4d7a66c99ae0af40d8bd1f4c047088849b2f9b81337bba0"
    assert load_tokenizer(tmp_path).fingerprint == wanted


def test_tokenizer_fingerprint_is_of_all_that_decides_ids(
    tokenizer: Tokenizer, tokenizer_folder: Path, tmp_path: Path
) -> None:
    content = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    fewer = {**content["model"], "merges": content["model"]["merges"][:-1]}
    changes: dict[str, object] = {
        "added_tokens": [],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "model": fewer,
    }
    found = {tokenizer.fingerprint}
    for name, value in changes.items():
        folder = changed(tokenizer_folder, tmp_path / name, "tokenizer.json", **{name: value})
        found.add(load_tokenizer(folder).fingerprint)
    for name in ("bos_token", "eos_token"):
        found.add(
            load_tokenizer(changed(tokenizer_folder, tmp_path / name, **{name: None})).fingerprint
        )
    assert len(found) == 7
    # File layout, padding and chat template do not change ids.
    same = changed(tokenizer_folder, tmp_path / "same")
    laid_out = json.dumps({**content, "padding": None}, indent=3, sort_keys=True)
    (same / "tokenizer.json").write_text(laid_out)
    (same / "chat_template.jinja").write_text("another")
    assert load_tokenizer(same).fingerprint == tokenizer.fingerprint


def test_tokenizer_config_has_the_last_word_on_special_tokens(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    whole = load_tokenizer(tokenizer_folder)
    assert (whole.bos_token, whole.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert whole.pad_token == "<|endoftext|>"
    folder = changed(
        tokenizer_folder, tmp_path / "a", "special_tokens_map.json",
        eos_token="<|im_start|>", bos_token={"content": "<|im_end|>"},
    )  # fmt: skip
    assert load_tokenizer(folder).eos_token == "<|im_end|>"
    (folder / "tokenizer_config.json").unlink()
    older = load_tokenizer(folder)
    assert (older.eos_token, older.bos_token) == ("<|im_start|>", "<|im_end|>")
    assert older.bos_id == whole.eos_id
    none = load_tokenizer(
        changed(tokenizer_folder, tmp_path / "b", bos_token=None, eos_token=None, pad_token=None)
    )
    assert (none.bos_token, none.eos_token, none.pad_token) == ("", "", "")
    assert (none.bos_id, none.eos_id) == (None, None)
    assert not none.adds_bos
    assert not none.adds_eos
    unknown = load_tokenizer(changed(tokenizer_folder, tmp_path / "c", bos_token="<nobody>"))
    assert (unknown.bos_token, unknown.bos_id) == ("<nobody>", None)


def test_tokenizer_template_stands_in_a_file_or_in_the_config(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    folder = changed(tokenizer_folder, tmp_path / "a", chat_template="in the config")
    template = folder / "chat_template.jinja"
    template.write_text("in the file é")
    assert load_tokenizer(folder).chat_template == "in the file é"
    template.write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"chat_template.jinja: 'utf-8' codec"):
        load_tokenizer(folder)
    template.unlink()
    assert load_tokenizer(folder).chat_template == "in the config"
    default = {"name": "default", "template": "d"}
    entries: list[object] = ["odd", {"name": "tool_use", "template": "t"}]
    for number, (written, wanted) in enumerate(((None, None), (entries, None))):
        other = changed(folder, tmp_path / f"{number}", chat_template=written)
        assert load_tokenizer(other).chat_template == wanted
    listed = changed(folder, tmp_path / "listed", chat_template=[*entries, default])
    assert load_tokenizer(listed).chat_template == "d"


def test_tokenizer_config_that_no_text_could_be_written_by_is_refused(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    def load(changes: dict[str, object]) -> None:
        folder = tmp_path / "a"
        shutil.rmtree(folder, ignore_errors=True)
        changed(tokenizer_folder, folder, **changes)
        (folder / "chat_template.jinja").unlink()
        load_tokenizer(folder)

    no_text = [{"name": "default", "template": 3}]
    cases: list[tuple[dict[str, object], str]] = [
        ({"bos_token": 3}, "tokenizer_config.json: bos_token: got 3, wanted a string"),
        ({"eos_token": {"content": ["x"]}}, r"eos_token: got \['x'\], wanted a string"),
        ({"pad_token": "\ud800"}, "pad_token: got .*, wanted a string"),
        ({"chat_template": 3}, "tokenizer_config.json: chat_template: got 3, wanted a string"),
        ({"chat_template": no_text}, "chat_template: got 3, wanted a string"),
    ]
    assert_refused(load, cases, DataError)


def test_tokenizer_files_that_cannot_be_read_are_named(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Errors name the folder, or the given location if it is a copy."""
    model = {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "nobody"}
    mute = changed(tokenizer_folder, tmp_path / "mute", "tokenizer.json", model=model)
    encodes_nothing = json.loads((mute / "tokenizer.json").read_text())
    encodes_nothing["pre_tokenizer"] = None
    files: list[tuple[str, str | None, str]] = [
        ("tokenizer_config.json", "{", "/tokenizer_config.json: not JSON: "),
        ("tokenizer_config.json", "[]", "/tokenizer_config.json: wanted a JSON obj"),
        ("special_tokens_map.json", "{", "/special_tokens_map.json: not JSON: "),
        ("special_tokens_map.json", "[]", "/special_tokens_map.json: wanted a JSON obj"),
        ("tokenizer.json", "{}", "/tokenizer.json: not a tokenizer: "),
        ("tokenizer.json", json.dumps(encodes_nothing), "/tokenizer.json: encoding a text fails: "),
        ("tokenizer.json", None, ": it has no tokenizer.json"),
    ]
    for number, (name, content, message) in enumerate(files):
        folder = changed(tokenizer_folder, tmp_path / f"{number}")
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_text(content)
        for named, where in ((None, str(folder)), ("theirs", "theirs")):
            with pytest.raises(DataError, match=f"^{where}{message}"):
                load_tokenizer(folder, named)


def test_tokenizer_neither_cuts_nor_fills_up_texts(tokenizer_folder: Path, tmp_path: Path) -> None:
    """tokenizer.json may have truncation and padding set, which do not apply here."""
    from tokenizers import Tokenizer as Backend

    folder = changed(tokenizer_folder, tmp_path / "a")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    theirs, plain = load_tokenizer(folder), load_tokenizer(tokenizer_folder)
    for text in ("a", "the cat sings what is where"):
        assert theirs.encode(text) == plain.encode(text)
    assert theirs.encode_batch(["a", "the cat sings"]) == plain.encode_batch(["a", "the cat sings"])
    assert theirs.fingerprint == plain.fingerprint


def test_tokenizer_habit_with_a_bare_text_is_seen(tokenizer_folder: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    for bos, eos in ((True, False), (False, True), (True, True)):
        habitual = load_tokenizer(tokenizer_folder)
        special = [("<|im_start|>", habitual.bos_id), ("<|im_end|>", habitual.eos_id)]
        habitual._backend.post_processor = TemplateProcessing(
            single=f"{'<|im_start|> ' * bos}$A{' <|im_end|>' * eos}", special_tokens=special
        )
        assert (habitual.adds_bos, habitual.adds_eos) == (bos, eos)
        assert habitual.encode("a") == load_tokenizer(tokenizer_folder).encode("a")


def test_tokenizer_fits_a_model_with_embeddings_for_every_id(tokenizer: Tokenizer) -> None:
    for size in (320, 321):
        tokenizer.check_fits(size)
    for size in (319, 300):
        wanted = rf"got ids up to 319 \('.*' is {size}\), wanted them below {size}"
        with pytest.raises(DataError, match=wanted):
            tokenizer.check_fits(size)


def test_tokenizer_with_added_tokens_that_are_special_if_they_say_so(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    folder = changed(tokenizer_folder, tmp_path / "a")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens(["wonderful"])
    backend.add_special_tokens([AddedToken("<judge>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    found = load_tokenizer(folder)
    assert found.vocab_size == 322
    assert found.special_ids - load_tokenizer(tokenizer_folder).special_ids == {321}
    assert found.encode("wonderful<judge>") == [320, 321]


def test_imports_for_reading_records_are_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, nemo_aligner.data.records, nemo_aligner.data.formats, "
        "nemo_aligner.contract.contract, nemo_aligner.config.dtypes; "
        "print([name for name in ('torch', 'transformers', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
