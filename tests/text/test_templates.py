"""Templates by name, and those that would make scores wrong: refused, with what to set."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nemo_aligner.errors import ConfigError, DataError
from nemo_aligner.text.templates import BUILT_IN_TEMPLATES, check_template, render, resolve_template
from nemo_aligner.text.tokenizer import Tokenizer, load_tokenizer

CHAT = [
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": " the cat"},
]
LLAMA_3_2 = (
    "{{- bos_token }}"
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}"
    "{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date_string }}"
    "{%- for m in messages %}{{- m.content + '<|eot_id|>' }}{%- endfor %}"
)
TURNS = "{% for m in messages %}{{ m.content }}"


def test_templates_by_name_or_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages }}")
    assert resolve_template("tokenizer", tokenizer) == tokenizer.chat_template
    assert resolve_template("plain", tokenizer) == BUILT_IN_TEMPLATES["plain"]
    assert resolve_template(str(path), tokenizer) == "{{ messages }}"
    with pytest.raises(ConfigError, match=r"model.data.template: got 'llama', wanted 'tokenizer'"):
        resolve_template("llama", tokenizer)


def test_what_the_built_in_templates_write(tokenizer: Tokenizer) -> None:
    written = {
        name: render(template, CHAT, "<s>", "</s>") for name, template in BUILT_IN_TEMPLATES.items()
    }
    assert written == {
        "chatml": "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n the cat<|im_end|>\n",
        "llama3": "<s><|start_header_id|>user<|end_header_id|>\n\nwhy<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nthe cat<|eot_id|>",
        "plain": "User: why\n\nAssistant:  the cat</s>",
        "zephyr": "<|user|>\nwhy</s>\n<|assistant|>\n the cat</s>\n",
    }
    for name, template in BUILT_IN_TEMPLATES.items():
        check_template(template, name, tokenizer)


def test_chatml_is_the_tokenizers_own_chatml(tokenizer: Tokenizer) -> None:
    ours, own = resolve_template("chatml", tokenizer), resolve_template("tokenizer", tokenizer)
    assert render(ours, CHAT, "", "") == render(own, CHAT, "", "")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LLAMA_3_2, "its text depends on the date"),
        ("{{ strftime_now('%Y') }}" + TURNS + "</s>{% endfor %}", "its text depends on the date"),
        (TURNS + "{% endfor %}", "it writes nothing after the reply"),
        (TURNS + "\n{% endfor %}", "it writes nothing after the reply"),
        (TURNS + "<|im_end|>\n{% endfor %}<|im_end|>", "it ends the reply twice"),
        (TURNS + "{{ eos_token }}{% endfor %}{{ eos_token }}", "it ends the reply twice"),
        ("{{ bos_token }}{{ bos_token }}" + TURNS + "!{% endfor %}", "it writes BOS .* twice"),
        ("{{ raise_exception('no') }}", "the chat template cannot write this conversation"),
        ("{% for %}", "the chat template cannot write this conversation"),
        (
            "{{ 9 ** (9 ** (9 ** 9)) }}",
            "the chat template cannot write this.*more than 5 s or 1024 MiB",
        ),
        ("{{ 'a' * 10 ** 11 }}", "the chat template cannot write this conversation: MemoryError"),
    ],
)
def test_a_template_that_would_spoil_scores_is_refused(
    template: str, message: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(
        ConfigError, match=rf"model\.data\.template: x\.jinja: {message}.*; set it to"
    ):
        check_template(template, "x.jinja", tokenizer)


def test_plain_needs_an_eos(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "no_eos"
    shutil.copytree(tokenizer_folder, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="end with EOS, which the tokenizer has not"):
        check_template(BUILT_IN_TEMPLATES["plain"], "plain", load_tokenizer(folder))


def test_no_date_reaches_a_template() -> None:
    assert "26 Jul 2024" in render(LLAMA_3_2, CHAT, "", "")
    with pytest.raises(DataError, match="strftime_now"):
        render("{{ strftime_now('%Y') }}", CHAT, "", "")


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% for %}",
        "{{ messages[7]['content'] + 'x' }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_refusing_or_prying_template_is_a_data_error(template: str) -> None:
    with pytest.raises(DataError, match="the chat template cannot write this conversation"):
        render(template, CHAT, "", "")
