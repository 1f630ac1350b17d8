"""Templates by name, and those that would make scores wrong: refused, with what to set."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nemo_aligner.errors import ConfigError, DataError
from nemo_aligner.text.templates import (
    BUILT_IN_TEMPLATES,
    check_template,
    end_of_turn,
    is_dated,
    render,
    resolve_template,
)
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


def test_a_tokenizer_without_a_template_has_an_empty_one(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(tokenizer_folder, tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    assert resolve_template("tokenizer", load_tokenizer(tmp_path / "bare")) == ""


def test_a_template_file_is_utf8_and_a_folder_is_none(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_bytes("{{ 'é你' }}".encode())
    assert resolve_template(str(tmp_path / "mine.jinja"), tokenizer) == "{{ 'é你' }}"
    with pytest.raises(ConfigError, match="'chatml', 'llama3', 'plain', 'zephyr' or the path of"):
        resolve_template(str(tmp_path), tokenizer)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ messages[-1].content }}<end>",
            "it writes 'the reply<end>', without the conversation's 'a question'",
        ),
        (
            "{{ messages[0].content }}<end>",
            "it writes 'a question<end>', without the conversation's 'the reply'",
        ),
        (TURNS + "ab{% endfor %}ab", r"it ends the reply twice \(abab\); set it to a file"),
        (TURNS + "a{% endfor %} \n a", r"it ends the reply twice \(aa\)"),
    ],
)
def test_a_template_says_all_of_a_conversation_and_ends_it_once(
    template: str, message: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.data\.template: x\.jinja: {message}"):
        check_template(template, "x.jinja", tokenizer)


@pytest.mark.parametrize("end", ["!", "ab", "aba", "abcab", "<e>\n"])
def test_an_end_of_any_length_will_do(end: str, tokenizer: Tokenizer) -> None:
    template = TURNS + "{% if loop.last %}" + end + "{% endif %}{% endfor %}"
    check_template("{{ bos_token }}" + template, "x.jinja", tokenizer)
    assert end_of_turn(template, "", "") == end.strip()


def test_only_a_tokenizer_without_eos_is_told_of_those_that_need_it(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="it writes nothing after the reply") as caught:
        check_template(TURNS + "{% endfor %}", "x.jinja", tokenizer)
    assert "end with EOS" not in str(caught.value)


def test_a_tokenizer_without_bos_begins_with_none(tokenizer_folder: Path) -> None:
    bare = load_tokenizer(tokenizer_folder)
    bare._config["bos_token"] = None
    bare.bos_id = None
    check_template(BUILT_IN_TEMPLATES["chatml"], "chatml", bare)


@pytest.mark.parametrize("form", ["%d", "%B", "%Y"])
def test_a_date_in_any_form_is_seen(form: str) -> None:
    assert is_dated("{{ strftime_now('" + form + "') }}", "", "")
    assert not is_dated("{{ strftime_now('always') }}", "", "")


def test_json_is_written_as_it_reads() -> None:
    told = [{"role": "user", "content": "é <b> & 'c'"}]
    assert render("{{ messages[0].content | tojson }}", told, "", "") == "\"é <b> & 'c'\""
    escaped = render("{{ messages[0].content | tojson(ensure_ascii=True) }}", told, "", "")
    assert escaped == "\"\\u00e9 <b> & 'c'\""
    assert render("{{ [1, 2] | tojson(indent=1) }}", told, "", "") == "[\n 1,\n 2\n]"


def test_nothing_is_asked_for_but_the_conversation() -> None:
    template = "{{ [tools, documents, add_generation_prompt, bos_token, eos_token] }}"
    assert render(template, CHAT, "<s>", "</s>") == "[None, None, False, '<s>', '</s>']"
