"""Detection of raw texts that were rendered by another chat template."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from nemo_aligner.contract.chat_template import ChatTemplate
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import read_text
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.contract.templates import BUILT_IN_TEMPLATES
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.utils.errors import DataError
from tests.contract.chat_templates import CONVERSATIONS, KWARGS, read_templates
from tests.harness.contracts import Contracts

CHAT = [{"role": "user", "content": "What is red?"}, {"role": "assistant", "content": "A rose."}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *CHAT]
BUILT_IN = sorted(BUILT_IN_TEMPLATES)


def frame_of(contract: ScoringContract, tokenizer: Tokenizer) -> SampleFrame:
    found = SampleFrame.of(contract, tokenizer)
    assert found is not None
    assert SampleFrame.from_dict(found.to_dict()) == found
    return found


def written(template: str, conversation: Any, tokenizer: Tokenizer, **kwargs: Any) -> str:
    return ChatTemplate.of(template, tokenizer).render(conversation, **kwargs)


def test_sample_frame_tells_the_samples_of_each_template_from_those_of_the_others(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    """Texts and token ids, also of replies that were cut off."""
    wrong = []
    for name in BUILT_IN:
        frame = frame_of(contracts(template=name, seq_length=256), tokenizer)
        for other in BUILT_IN:
            for chat in (CHAT, SYSTEM, [*CHAT, *CHAT]):
                whole = written(BUILT_IN_TEMPLATES[other], chat, tokenizer)
                for text in (whole, whole[: whole.rindex("rose")]):
                    is_foreign = frame.find_fault(text) is not None
                    ids = frame.find_fault_of_ids(tokenizer.encode(text)) is not None
                    if (is_foreign, ids) != (name != other, name != other):
                        wrong.append((name, other, text))
        assert frame.find_fault("What is red? A rose.") is not None
    assert not wrong, wrong


def test_sample_frame_of_published_templates_fits_their_own_samples(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    """Every kind of conversation fits the frame of its own template family, and no other."""
    base, wrong = contracts(template="chatml"), []
    for model, template in read_templates().items():
        kwargs = KWARGS.get(model, {})
        contract = replace(base, template=template)
        frame = frame_of(contract, tokenizer)
        taken = 0
        for name, (messages, beside) in CONVERSATIONS.items():
            chat = read_text({"messages": messages, **beside})
            try:
                text = written(template, chat, tokenizer)
            except DataError:  # the template rejects this conversation
                continue
            taken += 1
            if frame.find_fault(text) is not None:
                wrong.append((model, name, frame.find_fault(text), kwargs))
        assert taken, model
        assert frame.find_fault(written(BUILT_IN_TEMPLATES["plain"], CHAT, tokenizer)), model
    assert not wrong, wrong


FAULTS: list[tuple[str, str]] = [
    ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_end|>", "ends with"),
    ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|></s>", "ends with"),
    ("<|im_start|>user\na<|im_end|>\n<|im_start|>model\nb<|im_end|>\n", "before a reply"),
    ("user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n", "lacks the BOS token"),
    ("[INST] a [/INST] b", r"begins with '\[INST\] a \[/INST\] b', and .* '<\|im_start\|>user"),
]


@pytest.mark.parametrize(("text", "words"), FAULTS)
def test_sample_frame_says_how_a_text_differs(
    text: str, words: str, contracts: Contracts, tokenizer: Tokenizer
) -> None:
    fault = frame_of(contracts(template="chatml"), tokenizer).find_fault(text)
    assert fault is not None
    assert re.search(words, fault), fault


def test_sample_frame_follows_the_contracts_bos_and_eos(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    """BOS may be missing and EOS may follow if the contract adds them to raw texts."""
    contract = contracts(template="llama3", add_bos=False, add_eos=False)
    whole = written(contract.template, CHAT, tokenizer)
    bare = whole.removeprefix(tokenizer.bos_token)
    ended = whole + tokenizer.eos_token
    cases = {(False, False): [None, "lacks", "ends"], (True, True): [None, None, None]}
    for (add_bos, add_eos), wanted in cases.items():
        frame = frame_of(replace(contract, add_bos=add_bos, add_eos=add_eos), tokenizer)
        for text, word in zip((whole, bare, ended), wanted, strict=True):
            fault = frame.find_fault(text)
            assert (fault is None) == (word is None), (text, fault)
            assert word is None or word in str(fault)
    assert SampleFrame.of(replace(contract, template=""), tokenizer) is None
