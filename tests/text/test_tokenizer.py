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
