"""Check of a written Hugging Face folder whose model has a reward for each turn or step.

Token ids and the places that are read are made as the model card's program makes them, by
transformers' tokenizer and chat template alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.check import complete, differ_most, load_written
from nemo_aligner.checkpoint.hf.heads import forget_lengths, rotary_by_length
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.steps import ANSWERS, MARKS, OPEN_ENDED, TURNS
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.packing import SequenceReads, pack_sequences
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.models.step import gather_rewards, infer
from nemo_aligner.utils.errors import CheckpointError, DataError

# Steps of a reply, or what is said in turn.
_REPLIES = (
    ("4",),
    ("2+2=4, and", "4+3=7;", "so it is 7!"),
    ("Zuerst: ça va 🙂", "你好", "print('hello')\t# 1 < 2 & 3 > 2", "no"),
)


@dataclass(frozen=True)
class StepsChecked:
    """A text with its steps, its token ids by the contract, and the places of them that are read.

    Attributes:
        text: a conversation, or what stands in a raw text.
    """

    text: Text
    steps: tuple[str, ...]
    token_ids: list[int]
    reads: tuple[int, ...]


def encode_steps(contract: ScoringContract, tokenizer: Tokenizer) -> list[StepsChecked]:
    """Select the texts with steps that the contract accepts whole.

    Raises:
        CheckpointError: it accepts none.
    """
    texts = []
    for steps in _REPLIES:
        for text in _written(contract, steps):
            try:
                found = contract.encode(tokenizer, text)
            except DataError:
                continue  # there is no chat template, or it refuses this conversation
            if found.reads is not None and len(found.reads) == len(steps) and not found.truncated:
                texts.append(StepsChecked(text, steps, found.token_ids, found.reads))
    if not texts:
        raise CheckpointError("the scoring contract accepts none of the texts to be checked")
    return texts


def our_step_logits(
    model: GPTRewardModel, texts: Sequence[StepsChecked], layout: ParallelLayout
) -> Tensor:
    """The head's outputs ``[S, A]`` float32 at all steps of all texts, without label means."""
    token_lists = [each.token_ids for each in texts]
    reads = SequenceReads.number([each.reads for each in texts])
    budget = sum(map(len, token_lists))
    packs = pack_sequences(token_lists, budget, reads, model.rotation_by_length)
    shape = (sum(len(own.rows) for own in reads), model.rm_head.weight.size(0))
    return gather_rewards(infer(model, packs, layout), packs, shape, layout)


def check_step_folder(
    folder: Path, contract: ScoringContract, texts: Sequence[StepsChecked], logits: Tensor
) -> float:
    """Load ``folder`` with transformers and compare; as ``check_folder``.

    Args:
        logits: ``[S, A]`` of the steps of all ``texts``.
    """
    tokenizer, model = load_written(folder)
    for each in texts:
        found = _their_steps(tokenizer, contract, each)
        if found != (each.token_ids, each.reads):
            raise CheckpointError(
                f"transformers reads {each.text!r} as the ids {found[0]} at {found[1]}, wanted the "
                f"scoring contract's {each.token_ids} at {each.reads}"
            )
    alone = [_their_logits(model, tokenizer, [each])[0] for each in texts]
    padded = list(alone)
    numbers = [] if rotary_by_length(model) else range(len(texts))
    by_length = sorted(numbers, key=lambda row: len(texts[row].token_ids))
    for shorter, longer in pairwise(by_length):
        padded[shorter] = _their_logits(model, tokenizer, [texts[shorter], texts[longer]])[0]
    rows = [each.text for each in texts for _ in each.reads]
    return differ_most(torch.cat(alone), torch.cat(padded), logits, rows)


def _written(contract: ScoringContract, steps: Sequence[str]) -> list[Text]:
    """A conversation and a raw text with these steps; none if the separator is within one."""
    question = {"role": "user", "content": "2+2+3?"}
    if contract.scored_position == TURNS:
        replies = ({"role": "assistant", "content": step} for step in steps)
        turns: list[Text] = [[message for reply in replies for message in (question, reply)]]
        return turns + ["".join(steps)] * (len(steps) == 1)
    separator = contract.step_separator or ""
    if any(separator in step for step in steps):
        return []
    reply = separator.join(steps) + separator * (contract.scored_position == MARKS)
    asked: Text = [question, {"role": "assistant", "content": reply}]
    return [asked] if contract.scored_position == ANSWERS else [asked, reply]


def _their_steps(
    tokenizer: Any, contract: ScoringContract, checked: StepsChecked
) -> tuple[list[int], tuple[int, ...]]:
    """Token ids and the places that are read, as the model card says."""
    position, text, steps = contract.scored_position, checked.text, checked.steps
    separator = contract.step_separator or ""
    if position == TURNS and isinstance(text, list):
        pieces, before = [], ""
        for turns in range(2, len(text) + 1, 2):
            written = tokenizer.apply_chat_template(text[:turns], tokenize=False)
            pieces.append(written.removeprefix(before))
            before = written
    elif position == ANSWERS and isinstance(text, list):
        pieces, before = [], ""
        asked: list[dict[str, str]] = []
        for step in (f"{text[0]['content']} {steps[0]}", *steps[1:]):
            asked += [{"role": "user", "content": step}, {"role": "assistant", "content": "+"}]
            written = tokenizer.apply_chat_template(asked, tokenize=False)
            begun = written[: written.rindex("+")]
            pieces.append(begun.removeprefix(before))
            before = begun
    else:
        pieces = [steps[0], *(separator + step for step in steps[1:])]
        if position == MARKS:
            pieces = [piece for step in steps for piece in (step, separator)]
        if not isinstance(text, str):
            written = tokenizer.apply_chat_template(text, tokenize=False)
            before, _, after = written.rpartition("".join(pieces))
            pieces[0] = before + pieces[0]
            pieces[-1] += "" if position == MARKS else after
    ids: list[int] = []
    reads = []
    for piece in pieces:
        ids += tokenizer(piece, add_special_tokens=False).input_ids
        reads.append(len(ids) - 1)
    reads = reads[1::2] if position == MARKS else reads
    if isinstance(text, str):
        whole = complete(ids, contract, ends=position not in OPEN_ENDED)
        begun = len(complete(ids, contract, ends=False)) - len(ids)
        ids, reads = whole, [*(place + begun for place in reads[:-1]), len(whole) - 1]
    return ids, tuple(reads)


def _their_logits(model: Any, tokenizer: Any, texts: Sequence[StepsChecked]) -> list[Tensor]:
    """Each text's ``[S, A]``."""
    forget_lengths(model)
    lists = {"input_ids": [each.token_ids for each in texts]}
    batch = tokenizer.pad(lists, padding_side="right", return_tensors="pt").to(model.device)
    with torch.no_grad():
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    logits = output.logits.float().cpu()
    return [own[list(each.reads)] for own, each in zip(logits, texts, strict=True)]
