"""Ids and rendered templates equal those of transformers, and nothing is added to them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_aligner.errors import DataError
from nemo_aligner.text.templates import BUILT_IN_TEMPLATES, render
from nemo_aligner.text.tokenizer import Tokenizer, load_tokenizer

CHAT = [
    {"role": "system", "content": "be <good> & kind"},
    {"role": "user", "content": "why is the cat red?\n"},
    {"role": "assistant", "content": "  because é \u4f60 "},
]
TEMPLATES = [
    *BUILT_IN_TEMPLATES.values(),
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content | trim }}\n"
    "  {% else %}\n[{{ m.content }}]\n{% endif %}\n{% endfor %}{{ messages | tojson }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}x{% endif %}{% if tools is not none %}y{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_rendering_and_ids_equal_transformers(
    tokenizer: Tokenizer, tokenizer_folder: Path, template: str
) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    text = theirs.apply_chat_template(CHAT, chat_template=template, tokenize=False)
    assert render(template, CHAT, tokenizer.bos_token, tokenizer.eos_token) == text
    assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_in_the_text_are_one_id(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert ids[0] == tokenizer.bos_id
    assert ids[-1] == tokenizer.eos_id
    assert len(ids) == 3
    assert tokenizer.encode_batch(["a", "<|im_end|>b c"]) == [
        tokenizer.encode("a"),
        tokenizer.encode("<|im_end|>b c"),
    ]
    assert max(ids) < tokenizer.vocab_size == 320


def test_save_writes_the_same_files(
    tokenizer: Tokenizer, tokenizer_folder: Path, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path / "copy")
    for path in (tmp_path / "copy").iterdir():
        assert path.read_bytes() == (tokenizer_folder / path.name).read_bytes()
    again = load_tokenizer(tmp_path / "copy")
    assert again.fingerprint == tokenizer.fingerprint
    assert again.chat_template == tokenizer.chat_template is not None


def test_the_fingerprint_is_of_what_decides_ids(
    tokenizer: Tokenizer, tokenizer_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(tokenizer_folder, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["padding"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content, indent=3, sort_keys=True))
    (folder / "chat_template.jinja").write_text("another")
    assert load_tokenizer(folder).fingerprint == tokenizer.fingerprint
    content["model"]["merges"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(folder).fingerprint != tokenizer.fingerprint


def test_the_template_may_stand_in_the_config(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "older"
    shutil.copytree(tokenizer_folder, folder)
    (folder / "chat_template.jinja").unlink()
    assert load_tokenizer(folder).chat_template is None
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["bos_token"] = {"content": "<|endoftext|>", "lstrip": False}
    config["chat_template"] = [
        {"name": "tool_use", "template": "t"},
        {"name": "default", "template": "d"},
    ]
    path.write_text(json.dumps(config))
    older = load_tokenizer(folder)
    assert older.chat_template == "d"
    assert older.bos_id == older.encode("<|endoftext|>")[0]


def test_a_folder_without_a_fast_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"it has no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json: not a tokenizer"):
        load_tokenizer(tmp_path)


def test_reading_records_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, nemo_aligner.data.records, nemo_aligner.data.formats, "
        "nemo_aligner.text.contract; "
        "print([name for name in ('torch', 'transformers', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def changed(
    folder: Path, target: Path, file: str = "tokenizer_config.json", **changes: object
) -> Path:
    """A copy of a tokenizer folder in which one file has other values; None takes a key out."""
    shutil.copytree(folder, target)
    content = json.loads((target / file).read_text()) if (target / file).is_file() else {}
    content.update(changes)
    kept = {key: value for key, value in content.items() if value is not None}
    (target / file).write_text(json.dumps(kept))
    return target


def test_special_tokens_may_be_missing_or_unknown(tokenizer_folder: Path, tmp_path: Path) -> None:
    whole = load_tokenizer(tokenizer_folder)
    assert (whole.bos_token, whole.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert whole.pad_token == "<|endoftext|>"
    none = load_tokenizer(
        changed(tokenizer_folder, tmp_path / "a", bos_token=None, eos_token=None, pad_token=None)
    )
    assert (none.bos_token, none.eos_token, none.pad_token) == ("", "", "")
    assert (none.bos_id, none.eos_id) == (None, None)
    assert not none.adds_bos
    assert not none.adds_eos
    unknown = load_tokenizer(changed(tokenizer_folder, tmp_path / "b", bos_token="<nobody>"))
    assert (unknown.bos_token, unknown.bos_id) == ("<nobody>", None)
    assert len({whole.fingerprint, none.fingerprint, unknown.fingerprint}) == 3


def test_the_config_has_the_last_word_on_special_tokens(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    folder = changed(
        tokenizer_folder, tmp_path / "a", "special_tokens_map.json",
        eos_token="<|im_start|>", bos_token={"content": "<|im_end|>"},
    )  # fmt: skip
    assert load_tokenizer(folder).eos_token == "<|im_end|>"
    (folder / "tokenizer_config.json").unlink()
    older = load_tokenizer(folder)
    assert (older.eos_token, older.bos_token) == ("<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bos_token": 3}, "tokenizer_config.json: bos_token: got 3, wanted a text"),
        ({"eos_token": {"content": ["x"]}}, r"eos_token: got \['x'\], wanted a text"),
        ({"pad_token": "\ud800"}, "pad_token: got .*, wanted a text"),
        ({"chat_template": 3}, "tokenizer_config.json: chat_template: wanted a text"),
        ({"chat_template": [{"name": "default", "template": 3}]}, "chat_template: wanted a text"),
    ],
)
def test_a_config_that_no_text_could_be_written_by_is_refused_at_once(
    changes: dict[str, object], message: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    folder = changed(tokenizer_folder, tmp_path / "a", **changes)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match=message):
        load_tokenizer(folder)


@pytest.mark.parametrize(("content", "message"), [("{", "not JSON: "), ("[]", "wanted a JSON obj")])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_settings_that_are_no_object_are_named(
    name: str, content: str, message: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    folder = changed(tokenizer_folder, tmp_path / "a")
    (folder / name).write_text(content)
    with pytest.raises(DataError, match=rf"^theirs/{name}: {message}"):
        load_tokenizer(folder, "theirs")


def test_a_template_that_is_no_text_is_named(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = changed(tokenizer_folder, tmp_path / "a", chat_template="in the config")
    (folder / "chat_template.jinja").write_text("in the file é")
    assert load_tokenizer(folder).chat_template == "in the file é"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"chat_template.jinja: 'utf-8' codec"):
        load_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    assert load_tokenizer(folder).chat_template == "in the config"
    entries = ["odd", {"name": "tool_use", "template": "t"}]
    unnamed = changed(folder, tmp_path / "b", chat_template=entries)
    assert load_tokenizer(unnamed).chat_template is None


def test_what_does_not_encode_is_no_tokenizer(tokenizer_folder: Path, tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "nobody"}
    folder = changed(
        tokenizer_folder, tmp_path / "a", "tokenizer.json", model=model, pre_tokenizer=None
    )
    with pytest.raises(DataError, match=r"tokenizer\.json: it encodes nothing: "):
        load_tokenizer(folder)


def test_texts_are_neither_cut_nor_filled_up(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Settings of the file for other uses."""
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


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True)])
def test_the_habit_with_a_bare_text_is_seen(tokenizer_folder: Path, bos: bool, eos: bool) -> None:
    from tokenizers.processors import TemplateProcessing

    habitual = load_tokenizer(tokenizer_folder)
    special = [("<|im_start|>", habitual.bos_id), ("<|im_end|>", habitual.eos_id)]
    habitual._backend.post_processor = TemplateProcessing(
        single=f"{'<|im_start|> ' * bos}$A{' <|im_end|>' * eos}", special_tokens=special
    )
    assert (habitual.adds_bos, habitual.adds_eos) == (bos, eos)
    assert habitual.encode("a") == load_tokenizer(tokenizer_folder).encode("a")


def test_a_model_needs_embeddings_for_every_id(tokenizer: Tokenizer) -> None:
    tokenizer.check_fits(320)
    tokenizer.check_fits(321)
    with pytest.raises(
        DataError, match=r"got ids up to 319 \('.*' is 319\), wanted them below 319"
    ):
        tokenizer.check_fits(319)
    with pytest.raises(
        DataError, match=r"got ids up to 319 \('.*' is 300\), wanted them below 300"
    ):
        tokenizer.check_fits(300)


def test_added_tokens_count_and_are_special_if_they_say_so(
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


def test_special_ids_stand_for_no_text(tokenizer: Tokenizer) -> None:
    ids = {tokenizer.bos_id, tokenizer.eos_id, *tokenizer.encode("<|endoftext|>")}
    assert tokenizer.special_ids == ids
    assert not tokenizer.special_ids & set(tokenizer.encode("the cat"))


def test_every_part_that_decides_ids_is_in_the_fingerprint(
    tokenizer: Tokenizer, tokenizer_folder: Path, tmp_path: Path
) -> None:
    changes: dict[str, object] = {
        "added_tokens": [],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
    }
    found = {tokenizer.fingerprint}
    for name, value in changes.items():
        folder = changed(tokenizer_folder, tmp_path / name, "tokenizer.json", **{name: value})
        found.add(load_tokenizer(folder).fingerprint)
    for name in ("bos_token", "eos_token"):
        found.add(
            load_tokenizer(changed(tokenizer_folder, tmp_path / name, **{name: None})).fingerprint
        )
    assert len(found) == 6


def test_the_fingerprint_never_changes(tmp_path: Path) -> None:
    """It stands in the contract of every archive."""
    (tmp_path / "tokenizer.json").write_text(
        '{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, '
        '"model": {"type": "WordLevel", "vocab": {"a": 0, "\u00e9": 1}, "unk_token": "a"}}',
        encoding="utf-8",
    )
    wanted = "90e146384bcf9620d4d7a66c99ae0af40d8bd1f4c047088849b2f9b81337bba0"
    assert load_tokenizer(tmp_path).fingerprint == wanted


def test_a_tokenizer_is_saved_into_a_folder_that_is_made(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path / "new" / "folder")
    tokenizer.save(tmp_path / "new" / "folder")
    assert load_tokenizer(tmp_path / "new" / "folder").fingerprint == tokenizer.fingerprint


def test_a_copy_of_a_folder_is_named_as_what_it_is_a_copy_of(tmp_path: Path) -> None:
    for named, wanted in ((None, str(tmp_path)), ("theirs", "theirs")):
        (tmp_path / "tokenizer.json").unlink(missing_ok=True)
        with pytest.raises(DataError, match=rf"^{wanted}: it has no tokenizer.json"):
            load_tokenizer(tmp_path, named)
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(DataError, match=rf"^{wanted}/tokenizer.json: not a tokenizer"):
            load_tokenizer(tmp_path, named)
