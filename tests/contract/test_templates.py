"""Chat templates: rendered as by transformers, and checked before training."""

from __future__ import annotations

import re
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest

from nemo_aligner.config.common import Precision
from nemo_aligner.contract import template_check
from nemo_aligner.contract.chat_template import ChatTemplate
from nemo_aligner.contract.from_settings import build_contract
from nemo_aligner.contract.template_check import check_template, freeze_date, is_dated
from nemo_aligner.contract.templates import (
    BUILT_IN_TEMPLATES,
    resolve_template,
)
from nemo_aligner.contract.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.contract.refusals import assert_refused
from tests.harness.contracts import Contracts

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


SYSTEM = {"role": "system", "content": "be <good> & kind"}
AS_IN_THE_WORLD = [
    *BUILT_IN_TEMPLATES.values(),
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content | trim }}\n"
    "  {% else %}\n[{{ m.content }}]\n{% endif %}\n{% endfor %}{{ messages | tojson }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}x{% endif %}{% if tools is not none %}y{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}",
]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the trial in a subprocess, for templates that are known to terminate."""
    monkeypatch.setattr(template_check, "check_terminates", lambda *template: None)


def check_x(tokenizer: Tokenizer, template: str) -> None:
    check_template(ChatTemplate.of(template, tokenizer), "x.jinja", tokenizer)


def test_templates_and_ids_equal_those_of_transformers(
    tokenizer: Tokenizer, tokenizer_folder: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    chat = [
        SYSTEM,
        {"role": "user", "content": "why is the cat red?\n"},
        {"role": "assistant", "content": "  because é \u4f60 "},
    ]
    for template in AS_IN_THE_WORLD:
        text = theirs.apply_chat_template(chat, chat_template=template, tokenize=False)
        assert ChatTemplate.of(template, tokenizer).render(chat) == text, template
        assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False), template
        assert tokenizer.decode(tokenizer.encode(text)) == text, template


def test_templates_by_name_or_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_bytes("\ufeff{{ 'é你' }}".encode())  # with a byte order mark
    assert resolve_template("tokenizer", tokenizer) == tokenizer.chat_template
    assert resolve_template("plain", tokenizer) == BUILT_IN_TEMPLATES["plain"]
    assert resolve_template(str(path), tokenizer) == "{{ 'é你' }}"
    for other in ("llama", str(tmp_path)):
        wanted = rf"template: got '{other}', wanted 'tokenizer', 'chatml', .*or the path of"
        with pytest.raises(ConfigError, match=wanted):
            resolve_template(other, tokenizer)
    with pytest.raises(ConfigError, match="got a template, wanted the path of a file"):
        resolve_template("{{ messages }}" * 100, tokenizer)
    path.write_bytes("{{ 'é' }}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"template: .*mine.jinja cannot be read: 'utf-8' codec"):
        resolve_template(str(path), tokenizer)


def test_templates_that_are_built_in(tokenizer: Tokenizer) -> None:
    written = {
        name: ChatTemplate(template, "<s>", "</s>").render(CHAT)
        for name, template in BUILT_IN_TEMPLATES.items()
    }
    assert written == {
        "chatml": "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n the cat<|im_end|>\n",
        "llama3": "<s><|start_header_id|>user<|end_header_id|>\n\nwhy<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nthe cat<|eot_id|>",
        "plain": "User: why\n\nAssistant:  the cat</s>",
        "zephyr": "<|user|>\nwhy</s>\n<|assistant|>\n the cat</s>\n",
    }
    for name, template in BUILT_IN_TEMPLATES.items():
        check_template(ChatTemplate.of(template, tokenizer), name, tokenizer)
    own = resolve_template("tokenizer", tokenizer)
    assert ChatTemplate(own).render(CHAT) == written["chatml"]


def test_template_that_does_not_end_is_stopped(tokenizer: Tokenizer) -> None:
    """The trial runs in a subprocess with limits of time and memory."""
    cases = [
        ("{{ 9 ** (9 ** (9 ** 9)) }}", "the chat template cannot render this.*5 s or 1024 MiB"),
        ("{{ 'a' * 10 ** 11 }}", "the chat template cannot render this.*MemoryError"),
    ]
    where = r"^model\.data\.template: x\.jinja: "
    cases = [(template, rf"{where}{wanted}.*; set one of") for template, wanted in cases]
    assert_refused(partial(check_x, tokenizer), cases, ConfigError)


@pytest.mark.usefixtures("in_this_process")
def test_template_that_would_spoil_scores_is_refused(tokenizer: Tokenizer) -> None:
    end = "{% endfor %}"
    cases = [
        (LLAMA_3_2, "the template writes today's date"),
        ("{{ strftime_now('%Y') }}" + TURNS + "</s>" + end, "the template writes today's date"),
        (TURNS + end, "the template writes nothing after the reply"),
        (TURNS + "\n" + end, "the template writes nothing after the reply"),
        (TURNS + "<|im_end|>\n" + end + "<|im_end|>", "the template ends the reply twice"),
        (TURNS + "{{ eos_token }}" + end + "{{ eos_token }}", "the template ends the reply twice"),
        (TURNS + "ab" + end + "ab", r"the template ends the reply twice \(abab\); set a copy of "),
        (TURNS + "a" + end + " \n a", r"the template ends the reply twice \(aa\)"),
        ("{{ bos_token }}{{ bos_token }}" + TURNS + "!" + end, "the template writes BOS .* twice"),
        ("{{ raise_exception('no') }}", "the chat template cannot render this.*; set one of"),
        ("{% for %}", "the chat template cannot render this conversation.*; set one of"),
        ("{{ messages[-1].content }}<e>", ".* as 'the reply<e>', without .*'a question'"),
        ("{{ messages[0].content }}<e>", ".* as 'a question<e>', without .*'the reply'"),
    ]
    where = r"^model\.data\.template: x\.jinja: "
    cases = [(template, rf"{where}{wanted}") for template, wanted in cases]
    assert_refused(partial(check_x, tokenizer), cases, ConfigError)


@pytest.mark.usefixtures("in_this_process")
def test_template_may_end_a_turn_by_anything(tokenizer: Tokenizer) -> None:
    for end in ("!", "ab", "aba", "abcab", "<e>\n"):
        template = TURNS + "{% if loop.last %}" + end + "{% endif %}{% endfor %}"
        with_bos = ChatTemplate.of("{{ bos_token }}" + template, tokenizer)
        check_template(with_bos, "x.jinja", tokenizer)
        assert ChatTemplate(template).after_reply().strip() == end.strip()


@pytest.mark.usefixtures("in_this_process")
def test_template_of_a_tokenizer_without_special_tokens(tokenizer_folder: Path) -> None:
    bare = load_tokenizer(tokenizer_folder)
    bare._config["bos_token"] = bare._config["eos_token"] = None
    bare.bos_id = bare.eos_id = None
    check_template(ChatTemplate.of(BUILT_IN_TEMPLATES["chatml"], bare), "chatml", bare)
    with pytest.raises(ConfigError, match="end with EOS, which this tokenizer lacks"):
        check_template(ChatTemplate.of(BUILT_IN_TEMPLATES["plain"], bare), "plain", bare)


def test_template_gets_no_date() -> None:
    assert "26 Jul 2024" in ChatTemplate(LLAMA_3_2).render(CHAT)
    with pytest.raises(DataError, match="strftime_now"):
        ChatTemplate("{{ strftime_now('%Y') }}").render(CHAT)
    for form in ("%d", "%B", "%Y"):
        assert is_dated(ChatTemplate("{{ strftime_now('" + form + "') }}")), form
    assert not is_dated(ChatTemplate("{{ strftime_now('always') }}"))


class Then:
    """Return the date of the day that templates get instead of today's."""

    @staticmethod
    def now() -> datetime:
        return datetime(2024, 7, 26)


LETTERS = "aAwudejbhBmyYCgGUVWDFxcHkIlpPMSfzZRTXr"
# Positions of the date in a template, and the text before it.
DATED = [
    LLAMA_3_2,
    "{% block a %}{{ strftime_now(format='%d %B %Y') }}{% endblock %}",
    "{% macro day() %}{{ strftime_now('%-d/%-m, %%d %%%d %j') }}{% endmacro %}\n{{ day() }}",
    "\n\n  {% if true %}\n  {{ '[' ~ strftime_now('%H:%M') ~ ']' }}\n{% endif %} {{ bos_token }}",
    "  {# a comment #}\n{% for m in messages %}{{ strftime_now('%A, %b %d') + '!' }}{% endfor %}",
    "Today {{ strftime_now is defined }} {{ strftime_now('%Y-%m-%d').split('-') | join('.') }}",
    "{% set ns = namespace(day='') %}{% set ns.day = strftime_now('%x')|upper %}{{ ns.day }}",
    "|".join(f"{{{{ strftime_now('%{letter}') }}}}" for letter in LETTERS),
]


@pytest.mark.usefixtures("in_this_process")
def test_frozen_template_writes_one_day_as_transformers_writes_it(
    tokenizer: Tokenizer, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils

    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    ends = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    for dated in DATED:
        template = ChatTemplate.of(dated if dated is LLAMA_3_2 else dated + ends, tokenizer)
        assert is_dated(template), dated
        frozen = freeze_date(template)
        assert not is_dated(frozen), dated
        assert freeze_date(frozen) == frozen
        ask = partial(theirs.apply_chat_template, CHAT, tokenize=False)
        today = ask(chat_template=frozen.source)
        with monkeypatch.context() as then:
            then.setattr(chat_template_utils, "datetime", Then)
            assert ask(chat_template=template.source) == today, dated
        assert frozen.render(CHAT) == today, dated
    undated = BUILT_IN_TEMPLATES["chatml"] + "{% if false %}{{ strftime_now('%Y') }}{% endif %}"
    for kept in (BUILT_IN_TEMPLATES["chatml"], undated, "{% for %}{{ strftime_now('%Y') }}"):
        assert freeze_date(ChatTemplate.of(kept, tokenizer)).source == kept


@pytest.mark.usefixtures("in_this_process")
def test_contract_of_a_dated_template_has_the_day_inside(
    contracts: Contracts, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    freeze_date.cache_clear()
    path = tmp_path / "dated.jinja"
    path.write_text(LLAMA_3_2)
    frozen, again = contracts(template=str(path)), contracts(template=str(path))
    said = capsys.readouterr().out
    assert len(re.findall("writes today's date: .*26 July 2024", said)) == 1
    assert frozen.hash == again.hash
    assert frozen.template.endswith(LLAMA_3_2)
    text = tokenizer.decode(frozen.encode(tokenizer, CHAT).token_ids)
    assert "Today Date: 26 Jul 2024" in text
    # Training that starts from this model, with its template or with the file's.
    for data in ({}, {"template": str(path)}):
        config = contracts.config(**data)
        assert build_contract(config, tokenizer, Precision.fp32, frozen).hash == frozen.hash
    # A template that fixes its own date is not changed.
    mine = contracts(template=str(path), chat_template_kwargs={"date_string": "1 May 2026"})
    assert (mine.template, capsys.readouterr().out) == (LLAMA_3_2, "")
    assert "1 May 2026" in tokenizer.decode(mine.encode(tokenizer, CHAT).token_ids)
    kept = build_contract(contracts.config(template=str(path)), tokenizer, Precision.fp32, mine)
    assert kept.hash == mine.hash


def test_template_that_refuses_or_pries_is_a_data_error() -> None:
    texts = (
        "{{ raise_exception('roles must alternate') }}",
        "{% for %}",
        "{{ messages[7]['content'] + 'x' }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
    )
    cases = [(text, "the chat template cannot render this conversation") for text in texts]
    assert_refused(lambda text: ChatTemplate(text).render(CHAT), cases, DataError)


def test_template_writes_json_as_it_reads() -> None:
    told = [{"role": "user", "content": "é <b> & 'c'"}]
    assert ChatTemplate("{{ messages[0].content | tojson }}").render(told) == "\"é <b> & 'c'\""
    escaped = ChatTemplate("{{ messages[0].content | tojson(ensure_ascii=True) }}").render(told)
    assert escaped == "\"\\u00e9 <b> & 'c'\""
    assert ChatTemplate("{{ [1, 2] | tojson(indent=1) }}").render(told) == "[\n 1,\n 2\n]"


def test_template_is_given_nothing_but_the_conversation() -> None:
    source = "{{ [tools, documents, add_generation_prompt, bos_token, eos_token] }}"
    text = ChatTemplate(source, "<s>", "</s>").render(CHAT)
    assert text == "[None, None, False, '<s>', '</s>']"
