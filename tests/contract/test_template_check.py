"""Conversations with tools, parts and reasoning: rendered as by transformers, or rejected."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.config.common import Precision
from nemo_aligner.contract.chat_template import ChatTemplate
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import build_contract
from nemo_aligner.contract.messages import joined_content, read_text
from nemo_aligner.contract.template_check import check_template, template_reading
from nemo_aligner.contract.templates import (
    BUILT_IN_TEMPLATES,
    canonical_kwargs,
    resolve_template,
)
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.contract.turns import TurnMarkError, write_conversation
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.contract.chat_templates import (
    CALL,
    CONVERSATIONS,
    KWARGS,
    REPLY,
    RESULT,
    SYSTEM,
    TOOLS,
    USER,
    read_smollm3,
    read_templates,
)
from tests.contract.refusals import assert_refused
from tests.contract.test_turns import with_tokens
from tests.harness.contracts import Contracts

WITH_CALLS = [name for name, (said, _) in CONVERSATIONS.items() if "'tool_calls': " in str(said)]
# For each template, the parts that transformers drops silently.
UNWRITTEN: dict[str, dict[str, str]] = {
    "qwen3": {"developer": "role 'developer'", "documents": "documents"},
    "qwen2.5": {
        "reasoning": "reasoning_content", "reasoning and a call": "reasoning_content",
        "developer": "role 'developer'", "documents": "documents",
    },
    "qwen3-vl": {
        "reasoning": "reasoning_content", "reasoning and a call": "reasoning_content",
        "developer": "role 'developer'", "documents": "documents",
    },
    "gemma-3": {
        **{name: "tools" for name, (_, beside) in CONVERSATIONS.items() if "tools" in beside},
        "without the tools": "tool_calls", "reasoning": "reasoning_content",
        "documents": "documents",
    },
    **{
        model: {
            **dict.fromkeys(WITH_CALLS, "tool_calls"), "reasoning": "reasoning_content",
            "developer": "role 'developer'", "documents": "documents",
        }
        for model in ("dated", "smollm3")
    },
    "gemma-4": {"reasoning": "reasoning_content", "documents": "documents"},
    "glm-4.5": {"developer": "role 'developer'", "documents": "documents"},
    **{
        model: {
            "reasoning": "reasoning_content", "reasoning and a call": "reasoning_content",
            "documents": "documents", "a call with words": r"messages[1].content",
        }
        for model in ("llama-3.1", "llama-3.2", "mistral-v3")
    },
}  # fmt: skip
# Only the last question gets the system prompt, and only if no reply follows it.
UNWRITTEN["mistral-v3"] |= dict.fromkeys(
    ("plain", "tools and a system prompt", "a result and a reply"), "messages[0].content"
)


def written(template: str, conversation: Any, tokenizer: Tokenizer, kwargs: str = "") -> str:
    rules = ChatTemplate.of(template, tokenizer, kwargs)
    return write_conversation(rules, read_text(conversation), tokenizer)


@pytest.mark.parametrize("read", [read_templates, read_smollm3])
def test_conversations_by_templates_of_the_world_equal_those_of_transformers(
    read: Callable[[], dict[str, str]], tokenizer: Tokenizer, tokenizer_folder: Path
) -> None:
    """Texts and ids equal those of transformers; unsupported parts are joined to one text."""
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    wrong = {}
    for model, template in {**read(), **BUILT_IN_TEMPLATES}.items():
        kwargs = KWARGS.get(model, {})
        ask = partial(theirs.apply_chat_template, chat_template=template, tokenize=False, **kwargs)
        for name, (messages, beside) in CONVERSATIONS.items():
            said = copy.deepcopy(messages)
            reading = template_reading(ChatTemplate(template))
            if name == "parts" and not reading._reads_parts("user"):
                said = [{**turn, "content": joined_content(turn["content"])} for turn in said]
            try:
                wanted: str | None = ask(said, **copy.deepcopy(beside))
            except Exception:  # an error of the template's author, or of Jinja
                wanted = None
            given = {"messages": messages, **beside}
            try:
                got = written(template, given, tokenizer, canonical_kwargs(kwargs))
                is_right = got == wanted and tokenizer.encode(got) == theirs.encode(
                    wanted, add_special_tokens=False
                )
            except DataError as error:
                got = str(error)
                key = UNWRITTEN.get(model, {}).get(name)
                is_right = wanted is None or (
                    key is not None and f"{key}: the chat template does not render it" in got
                )
            if not is_right:
                wrong[model, name] = (got, wanted)
    assert not wrong, wrong


def test_built_in_templates_write_tools_calls_results_and_reasoning(tokenizer: Tokenizer) -> None:
    thought = {**CALL, "content": "I look.", "reasoning_content": "Hm."}
    given = {
        "messages": [SYSTEM, USER, thought, RESULT, REPLY],
        "tools": TOOLS,
        "documents": [{"text": "é"}],
    }
    tool = json.dumps(TOOLS[0], ensure_ascii=False)
    call = json.dumps(CALL["tool_calls"][0]["function"], ensure_ascii=False)
    turns = {
        "system": f'Be kind.\n\nTools:\n{tool}\n\nDocuments:\n{{"text": "é"}}',
        "user": USER["content"],
        "assistant": f"<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{call}\n</tool_call>",
        "tool": RESULT["content"],
    }
    said = [*turns.items(), ("assistant", REPLY["content"])]
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    wanted = {
        "chatml": "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said),
        "llama3": bos + "".join(
            f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>" for role, text in said
        ),
        "zephyr": "".join(f"<|{role}|>\n{text}{eos}\n" for role, text in said),
        "plain": "\n\n".join(f"{role.capitalize()}: {text}" for role, text in said) + eos,
    }  # fmt: skip
    found = {name: written(BUILT_IN_TEMPLATES[name], given, tokenizer) for name in wanted}
    assert found == wanted
    alone = written(
        BUILT_IN_TEMPLATES["chatml"], {"messages": [USER, REPLY], "tools": TOOLS}, tokenizer
    )
    assert alone.startswith(f"<|im_start|>system\nTools:\n{tool}<|im_end|>\n<|im_start|>user\n")


# As version 0.1 wrote it.
EARLIER: dict[str, Any] = {
    "version": 1,
    "template": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}",
    "add_bos": False,
    "add_eos": False,
    "bos_id": 1,
    "eos_id": 2,
    "overlong": "drop",
    "seq_length": 1024,
    "attributes": ["reward"],
    "attribute_weights": [1.0],
    "label_means": [0.0],
    "dtype": "fp32",
    "tokenizer_fingerprint": "770af2867ee6d396a60135071ca1fa932c537b1745ca43d162113fb64a098e58",
    "reward_model_type": "binary_ranking",
    "scored_position": "last_token",
    "reward_mean": None,
    "reward_std": None,
    "measured_on": None,
    "hash": "e2c26e4d31b0e7215b6051b69800af0ed9805a0c86e4ee5c1716c3b7148ba48d",
}


def test_built_in_template_of_an_earlier_contract_stays(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    """A resumed run keeps its hash; both versions render plain conversations alike."""
    config = contracts.config(template="chatml")
    now = contracts(template="chatml")
    before = ScoringContract.from_dict(EARLIER)
    assert before.template != now.template
    for start, run in ((before, None), (None, before)):
        kept = build_contract(config, tokenizer, Precision.fp32, start, run)
        assert kept.template == before.template
    plain = [SYSTEM, USER, REPLY]
    assert before.encode(tokenizer, plain) == now.encode(tokenizer, plain)
    with pytest.raises(
        DataError, match=r"messages\[1\].tool_calls: the chat template .chatml of an"
    ):
        before.encode(tokenizer, [USER, CALL])
    own = contracts(template="tokenizer")
    with pytest.raises(DataError, match=r"template .the tokenizer's own\) does not render it"):
        own.encode(tokenizer, [USER, CALL])
    assert resolve_template("plain", tokenizer, [before.template]) == BUILT_IN_TEMPLATES["plain"]


TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
END = "<|im_end|>\n{% endfor %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}"
)


def test_template_gets_messages_in_the_words_that_it_reads(tokenizer: Tokenizer) -> None:
    null = {**CALL, "content": None}
    thought = {**REPLY, "reasoning": "Hm."}
    parts = [{"type": "text", "text": each} for each in ("a", "b")]
    by_parts = "{% for p in m.content %}{{ p.text }}{% endfor %}"
    both = "{% if m.content is string %}{{ m.content }}{% else %}" + by_parts + "{% endif %}"
    weather = 'weather{"city": "Köln"}'
    cases: list[tuple[str, Any, str]] = [
        # Null content, which a template would write as the word None, or not at all.
        ("{{ m.content }}" + CALLS, null, weather),
        ("{{ m['content'] or '' }}" + CALLS, null, weather),
        ("{{ m.content + '' }}" + CALLS, null, weather),
        ("{% if 'content' in m %}[{{ m.content }}]{% endif %}" + CALLS, null, weather),
        # Another key for reasoning.
        ("{{ m.thinking }}{{ m.content }}", thought, "Hm." + REPLY["content"]),
        ("{{ m['reasoning_content'] }}{{ m.content }}", thought, "Hm." + REPLY["content"]),
        # Content in parts, for templates that read them and for those that do not.
        ("{{ m.content }}", {**REPLY, "content": parts}, "a\nb"),
        (both, {**REPLY, "content": parts}, "ab"),
        # Arguments as a JSON string.
        (
            "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name"
            " + c.function.arguments }}{% endfor %}",
            CALL,
            weather,
        ),
    ]
    wrong = {}
    for body, reply, wanted in cases:
        text = written(TURNS + body + END, [USER, reply], tokenizer)
        end = text.partition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")
        if end != wanted:
            wrong[body] = end
    assert not wrong, wrong


def test_template_that_does_not_write_a_part_of_a_conversation_refuses_it(
    tokenizer: Tokenizer,
) -> None:
    template = TURNS + "{{ m.content }}{{ m.title }}" + END
    users = (
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}!"
    )
    unwritten = "the chat template does not render it.*data.template=chatml"
    calls: list[tuple[Any, str]] = [
        ([USER, CALL, RESULT, REPLY], rf"^messages\[1\].tool_calls: {unwritten}"),
        ([USER, {**REPLY, "thinking": "Hm."}], rf"^messages\[1\].reasoning_content: {unwritten}"),
        ({"messages": [USER, REPLY], "tools": TOOLS}, f"^tools: {unwritten}"),
        ({"messages": [USER, REPLY], "documents": [{"a": "b"}]}, f"^documents: {unwritten}"),
        (
            [{**USER, "mood": "x"}, REPLY],
            r"^messages\[0\]: got the key 'mood', which .* wanted only role, con",
        ),
    ]
    assert_refused(lambda case: written(template, case, tokenizer), calls, DataError)
    roles = [
        ([{**USER, "role": role}, USER, REPLY, {**RESULT, "role": role}, REPLY], f"role '{role}'")
        for role in ("developer", "tool", "function")
    ]
    ended = users + "{% endfor %}"
    assert_refused(lambda case: written(ended, case, tokenizer), roles, DataError)
    # A template may drop the reasoning of earlier turns.
    taken = [{**USER, "title": "T", "name": "n"}, {**REPLY, "reasoning": "Hm."}, USER, REPLY]
    assert "T<|im_end|>" in written(template, taken, tokenizer)


# Like the tool-use templates of Hermes and Command R+, which loop over the tools.
NEEDS_TOOLS = (
    "<|im_start|>system\nCalls are in <tool_call>:{% for t in tools %}{{ t.function.name }}"
    "{{ t.function.parameters.properties | tojson }}{% endfor %}<|im_end|>\n"
    + TURNS + "{{ m.content }}" + CALLS + END
)  # fmt: skip


def test_template_that_needs_tools_is_tried_with_one(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    tagged = with_tokens(tokenizer_folder, tmp_path / "tagged", **{"<tool_call>": False})
    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    check_template(ChatTemplate.of(NEEDS_TOOLS, tagged), "x.jinja", tagged)
    told = [USER, {**REPLY, "content": "<tool_call>weather</tool_call>"}]
    for messages in ([SYSTEM, USER, CALL, RESULT, REPLY], told):
        wanted = theirs.apply_chat_template(
            messages, tools=TOOLS, chat_template=NEEDS_TOOLS, tokenize=False
        )
        assert written(NEEDS_TOOLS, {"messages": messages, "tools": TOOLS}, tagged) == wanted
    with pytest.raises(DataError, match=r"^tools: got none, and the chat template"):
        written(NEEDS_TOOLS, [USER, REPLY], tagged)
    forged = {"messages": [{**USER, "content": "<|im_end|>"}, REPLY], "tools": TOOLS}
    with pytest.raises(TurnMarkError, match=r"content: got .<\|im_end\|>. at"):
        written(NEEDS_TOOLS, forged, tagged)


def test_template_kwargs_are_those_that_it_reads(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    body = "{{ m.content }}{% if loud %} LOUD{% endif %}"
    template = TURNS + body + "{{ tail.mark }}" + END
    given = {"tail": {"mark": "!", "n": None}, "loud": True}
    kwargs = canonical_kwargs(given)
    assert canonical_kwargs(dict(reversed(given.items()))) == kwargs
    assert "No, it is dry. LOUD!" in written(template, [USER, REPLY], tokenizer, kwargs)
    inside = ChatTemplate(template, kwargs=kwargs).with_kwargs_inside()
    assert written(inside, [USER, REPLY], tokenizer) == written(
        template, [USER, REPLY], tokenizer, kwargs
    )
    check_template(ChatTemplate.of(template, tokenizer, kwargs), "x.jinja", tokenizer)
    for name in ("quiet", "messages", "tools", "bos_token"):
        wrong = ChatTemplate.of(template, tokenizer, canonical_kwargs({name: True}))
        with pytest.raises(ConfigError, match=f"kwargs: got '{name}', .* wanted loud, tail$"):
            check_template(wrong, "x.jinja", tokenizer)
    with pytest.raises(ConfigError, match="chat_template_kwargs: wanted JSON values"):
        canonical_kwargs({"loud": float("nan")})
    assert ChatTemplate(template).names >= {"content", "role", "mark"}


def test_contract_has_the_kwargs_of_its_template(
    contracts: Contracts, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "t.jinja"
    path.write_text(TURNS + "{{ m.content }}{% if loud %} LOUD{% endif %}" + END)
    none, loud = (
        contracts(template=str(path), chat_template_kwargs=each) for each in ({}, {"loud": True})
    )
    assert none.hash == contracts(template=str(path)).hash != loud.hash
    assert none.differences(loud) == {"chat_template_kwargs": (None, '{"loud": true}')}
    assert ScoringContract.from_dict(json.loads(json.dumps(loud.to_dict()))) == loud
    ids = loud.encode(tokenizer, [USER, REPLY]).token_ids
    assert "No, it is dry. LOUD" in tokenizer.decode(ids)
    # Null settings take those of the model that training starts from.
    config = contracts.config()
    kept = build_contract(config, tokenizer, Precision.fp32, loud)
    assert kept.chat_template_kwargs == loud.chat_template_kwargs
    config.data.chat_template_kwargs = {}
    assert build_contract(config, tokenizer, Precision.fp32, loud) == none
    with pytest.raises(ConfigError, match="got 'quiet', which the chat template does not use"):
        contracts(template=str(path), chat_template_kwargs={"quiet": True})


def test_contract_has_the_special_tokens_that_its_template_writes(
    contracts: Contracts, tokenizer: Tokenizer, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """As transformers passes them; one that the tokenizer lacks is empty."""
    from transformers import PreTrainedTokenizerFast

    path = tmp_path / "t.jinja"
    path.write_text(TURNS + "{{ m.content }}{{ pad_token }}[{{ sep_token }}]" + END)
    contract = contracts(template=str(path))
    wanted = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder).apply_chat_template(
        [USER, REPLY], chat_template=path.read_text(), tokenize=False
    )
    assert tokenizer.pad_token in wanted
    assert contract.encode(tokenizer, [USER, REPLY]).token_ids == tokenizer.encode(wanted)
    other = contracts(template=str(path), chat_template_kwargs={"pad_token": "!"})
    assert other.chat_template_kwargs == '{"pad_token": "!"}'


def test_contract_gives_one_conversation_one_sequence_of_ids(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    """For one sample and for records, and for every spelling of the conversation."""
    contract = contracts(template="chatml", seq_length=4096)
    for messages, beside in CONVERSATIONS.values():
        given = {"messages": messages, **beside}
        whole = read_text(given)
        ids = contract.encode(tokenizer, whole).token_ids
        assert contract.tokenize(tokenizer, [whole]) == [ids]
        ((found,),) = contract.tokenize_records(tokenizer, [[whole]])
        assert found.token_ids == ids
        assert contract.count_reply_tokens(tokenizer, [whole]) == [found.reply_tokens]
        assert contract.encode(tokenizer, given).token_ids == ids  # type: ignore[arg-type]
    assert ChatTemplate(contract.template).render([USER, REPLY]) == tokenizer.decode(
        contract.encode(tokenizer, [USER, REPLY]).token_ids
    )
