"""Steps of a sample: where they are found, and at which token each reward is read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nemo_aligner.config.common import Overlong, Precision
from nemo_aligner.config.model import HeadConfig, ScoredPosition
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import build_contract
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.steps import OPEN_ENDED, StepSpan
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.contract.refusals import assert_refused
from tests.harness.contracts import Contracts

USER = {"role": "user", "content": "why\n\nis it so"}
RULES = [rule.value for rule in ScoredPosition][2:]


def said(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def parts(*steps: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": step} for step in steps]


def make(contracts: Contracts, reads: str, **data: Any) -> ScoringContract:
    config = contracts.config(["right"], **data)
    config.head = HeadConfig(reads=ScoredPosition(reads))
    return build_contract(config, contracts.tokenizer, Precision.fp32)


def read_texts(contract: ScoringContract, tokenizer: Tokenizer, text: Text) -> list[str]:
    """Return the decoded text up to each token that is read."""
    encoded = contract.encode(tokenizer, text)
    assert encoded.reads is not None
    assert encoded.reads[-1] == len(encoded.token_ids) - 1
    return [tokenizer.decode(encoded.token_ids[: place + 1]) for place in encoded.reads]


def test_steps_of_a_reply_end_before_the_separator_or_with_it(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    before = "<|im_start|>user\nwhy\n\nis it so<|im_end|>\n<|im_start|>assistant\n"
    ends, marks = make(contracts, "step_ends"), make(contracts, "step_marks")
    replies = ("the cat\n\n \n\nsings\n\n", parts("the cat", "sings"))
    for reply, between in zip(replies, ("\n\n \n\n", "\n\n"), strict=True):
        text = [USER, said(reply)]
        begun = f"{before}the cat"
        tail = "\n\n<|im_end|>\n" if between != "\n\n" else "<|im_end|>\n"
        whole = f"{begun}{between}sings"
        assert read_texts(ends, tokenizer, text) == [begun, whole + tail]
        assert read_texts(marks, tokenizer, text) == [f"{begun}\n\n", f"{whole}\n\n"]
    spans = ends.encode(tokenizer, [USER, said("the cat\n\nsings")]).spans
    assert spans == (StepSpan(1, 0, 7), StepSpan(1, 9, 14))
    # In raw text the whole text is the reply.
    assert read_texts(ends, tokenizer, "why\n\nno") == ["why", "why\n\nno"]
    assert marks.encode(tokenizer, "why\n\nno").spans == (
        StepSpan(None, 0, 3),
        StepSpan(None, 5, 7),
    )


def test_turns_are_read_where_the_conversation_could_end(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    contract = make(contracts, "turns")
    plain = contracts(["right"])
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "cat"}}}
    for template in ("chatml", "llama3", "zephyr"):
        text = [
            USER,
            {**said(None), "tool_calls": [call]},
            {"role": "tool", "content": "a cat"},
            said("a cat\n\nsings"),
            USER,
            said("no"),
        ]
        both = [make(contracts, rule, template=template) for rule in ("turns", "last_token")]
        whole = both[0].encode(tokenizer, text)
        assert whole.reads is not None
        assert [span.message for span in whole.spans] == [1, 3, 5]
        for place, end in zip(whole.reads, (2, 4, 6), strict=True):
            cut = both[1].encode(tokenizer, text[:end]).token_ids
            assert whole.token_ids[: place + 1] == cut
    assert contract.encode(tokenizer, "why").token_ids == plain.encode(tokenizer, "why").token_ids


def test_steps_are_read_where_their_answers_begin(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    contract = make(contracts, "step_answers")
    system = {"role": "system", "content": "be brief"}
    text = [system, {**USER, "content": "why"}, said("the cat \n\n sings\n\n")]
    first = (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nwhy the cat<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    second = f"{first}+<|im_end|>\n<|im_start|>user\nsings<|im_end|>\n<|im_start|>assistant\n"
    assert read_texts(contract, tokenizer, text) == [first, second]
    assert contract.encode(tokenizer, text).spans == (StepSpan(2, 0, 8), StepSpan(2, 10, 16))
    for wrong in ("why\n\nno", [system, said("no")]):
        with pytest.raises(
            DataError, match="the sample has no user message right before its last reply"
        ):
            contract.encode(tokenizer, wrong)


@pytest.mark.parametrize("rule", RULES)
def test_ids_of_a_step_do_not_depend_on_what_follows(
    contracts: Contracts, tokenizer: Tokenizer, rule: str
) -> None:
    """So a step's reward is that of the sample cut behind it, and one step is as none."""
    contract = make(contracts, rule, step_separator=None if rule == "turns" else "\n")
    plain = contracts(["right"])
    steps = ["the cat", "\tsings two", " quick"]
    texts: list[Text] = []
    for count in (1, 2, 3):
        if rule == "turns":
            texts.append([turn for step in steps[:count] for turn in (USER, said(step))])
        else:
            texts.append([USER, said("\n".join(steps[:count]))])
    encoded = [contract.encode(tokenizer, text) for text in texts]
    whole = encoded[-1]
    assert whole.reads is not None
    for place, each in zip(whole.reads, encoded, strict=True):
        own = each.token_ids
        if rule == "step_ends" and each is not whole:  # the template's end of turn follows
            own = own[: own.index(tokenizer.token_id("<|im_end|>"), 20)]
            own = own[: place + 1]
        assert whole.token_ids[: place + 1] == own
    if rule not in OPEN_ENDED:
        assert encoded[0].token_ids == plain.encode(tokenizer, texts[0]).token_ids
    # Many samples at once give the same as one by one.
    (found,) = contract.tokenize_records(tokenizer, [texts])
    assert [(each.token_ids, each.reads) for each in found] == [
        (each.token_ids, each.reads) for each in encoded
    ]
    assert contract.tokenize(tokenizer, texts) == [each.token_ids for each in encoded]


def test_step_token_is_read_wherever_it_stands_and_put_behind_the_last_step(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    # The separator may be an added token, such as Qwen's <extra_0>.
    contract = make(contracts, "step_marks", step_separator="<|endoftext|>")
    mark = tokenizer.token_id("<|endoftext|>")
    for reply in ("a cat<|endoftext|>sings", "a cat<|endoftext|>sings<|endoftext|>"):
        encoded = contract.encode(tokenizer, [USER, said(reply)])
        places = [n for n, token in enumerate(encoded.token_ids) if token == mark]
        assert list(encoded.reads or ()) == places
        assert len(places) == 2
    raw = dataclasses.replace(contract, add_bos=True, add_eos=True)
    encoded = raw.encode(tokenizer, "a cat<|endoftext|>sings")
    ids = tokenizer.encode("a cat<|endoftext|>sings<|endoftext|>")
    assert encoded.token_ids == [tokenizer.bos_id, *ids]  # nothing follows the last separator
    assert [encoded.token_ids[place] for place in encoded.reads or ()] == [mark, mark]


def test_steps_of_a_reply_that_its_own_call_repeats_are_read_in_the_reply(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    for reads, end in (("step_ends", "one"), ("step_marks", "one; ")):
        contract = make(contracts, reads, template="chatml", step_separator="; ")
        for content in ("one; two", "  one; two", "one; two; "):
            call = {"function": {"name": "f", "arguments": {"a": content, "b": f"{content}; "}}}
            reply = {**said(content), "tool_calls": [call]}
            first, *_ = read_texts(contract, tokenizer, [USER, reply])
            lead = content[: content.index("one")]
            assert first.endswith(f"<|im_start|>assistant\n{lead}{end}"), (reads, content)


@pytest.mark.parametrize("template", ["chatml", "llama3"])
@pytest.mark.parametrize("reads", ["step_ends", "step_marks"])
def test_raw_text_that_is_a_rendered_conversation_has_its_steps(
    contracts: Contracts, tokenizer: Tokenizer, reads: str, template: str
) -> None:
    """As OpenRLHF sends it; the end of the turn is no step of its own."""
    contract = make(contracts, reads, template=template, step_separator=";")
    render = contract.chat_template(tokenizer).render
    for reply in ("the cat;sings", "the cat;sings;"):
        text = [{**USER, "content": "why"}, said(reply)]
        wanted, rendered = contract.encode(tokenizer, text), render(text)
        assert len(wanted.reads or ()) == 2
        for raw in (rendered, rendered.rstrip("\n"), f"{rendered}\n"):
            found = contract.encode(tokenizer, raw)
            if raw == rendered:
                assert (found.token_ids, found.reads) == (wanted.token_ids, wanted.reads)
            assert [raw[span.start : span.end][-5:] for span in found.spans] == ["e cat", "sings"]


def test_eos_ends_a_raw_text_of_a_model_without_a_template(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    contract = dataclasses.replace(make(contracts, "step_marks"), template="")
    plain, ended = (
        contract.encode(tokenizer, f"a cat\n\nsings\n\n{end}") for end in ("", tokenizer.eos_token)
    )
    assert ended == plain


def test_steps_are_read_in_the_reply_that_the_question_quotes(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    """The quotation has whitespace that the template strips from the reply."""
    contract = make(contracts, "step_ends", template="llama3")
    question = {**USER, "content": "read: the\n\ncat\n please"}
    first, _ = read_texts(contract, tokenizer, [question, said("the\n\ncat\n")])
    assert first.endswith(" please<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nthe")


def test_steps_that_are_cut_off_are_counted(contracts: Contracts, tokenizer: Tokenizer) -> None:
    how = {"seq_length": 12, "overlong": Overlong.truncate_left}
    contract = make(contracts, "step_ends", **how)
    encoded = contract.encode(tokenizer, [USER, said("the cat sings\n\na\n\nred bird")])
    assert (encoded.truncated, encoded.lost, len(encoded.token_ids)) == (True, 1, 12)
    assert encoded.spans == (StepSpan(1, 15, 16), StepSpan(1, 18, 26))
    ids, places = encoded.token_ids, encoded.reads or ()
    assert [tokenizer.decode(ids[: place + 1])[-3:] for place in places] == [">\na", "|>\n"]


def test_text_whose_steps_cannot_be_told_is_refused(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    ends = make(contracts, "step_ends")
    cases = [
        (parts("a", "b\n\nc"), r"step 2 of 2: got 'b\\n\\nc', wanted one .* separator '\\n\\n'"),
        (parts("a", "  "), "step 2 of 2: got '  ', wanted one that is not blank"),
    ]
    assert_refused(lambda given: ends.encode(tokenizer, [USER, said(given)]), cases, DataError)
    one_line = ends.template.replace("'content']", "'content'] | replace('\\n\\n', ' ')")
    joined = dataclasses.replace(ends, template=one_line)
    with pytest.raises(DataError, match="the chat template changes the reply"):
        joined.encode(tokenizer, [USER, said("a\n\nb")])
    trims = ends.template.replace("'content']", "'content'] | trim")
    spaced = [USER, said(" a\n\nb \n\n ")]
    trimmed = dataclasses.replace(ends, template=trims)
    assert [each[-3:] for each in read_texts(trimmed, tokenizer, spaced)] == ["t\na", "|>\n"]
    marks = make(contracts, "step_marks")
    with pytest.raises(DataError, match=r"does not write the separator .* wanted .*step_ends"):
        dataclasses.replace(marks, template=trims).encode(tokenizer, spaced)
    # ``plain`` ends only the last turn; other templates drop the reasoning of earlier turns.
    turns = make(contracts, "turns", template="plain")
    with pytest.raises(
        DataError, match=r"messages\[1\]: the chat template writes this turn differently"
    ):
        turns.encode(tokenizer, [USER, said("a"), USER, said("b")])


def test_separator_belongs_to_a_rule_that_has_steps(contracts: Contracts) -> None:
    assert make(contracts, "step_ends").step_separator == "\n\n"
    assert make(contracts, "turns").step_separator is None
    for reads in ("last_token", "turns"):
        with pytest.raises(ConfigError, match=rf"step_separator: got '\\n', .* is {reads}, and"):
            make(contracts, reads, step_separator="\n")
    with pytest.raises(ConfigError, match="got an empty text"):
        make(contracts, "step_ends", step_separator="")
    with pytest.raises(DataError, match="step_separator: got None with scored_position step_marks"):
        dataclasses.replace(make(contracts, "step_marks"), step_separator=None)
    # A null setting takes the value of the model that training starts from.
    config = contracts.config(["right"])
    config.head = HeadConfig(reads=ScoredPosition.step_marks)
    start = make(contracts, "step_marks", step_separator="\n")
    found = build_contract(config, contracts.tokenizer, Precision.fp32, start)
    assert found.step_separator == "\n"
