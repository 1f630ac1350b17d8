"""Principles: how the principle by which a reply is rewarded becomes a part of the sample.

A sample may carry a principle or a criterion of a rubric, such as "correctness". If the scoring
contract has a ``principle_template``, the principle is put into this text, which follows the reply
as a user turn; the reward is read where the answer to it would begin. Because the principle comes
last, several principles for one reply share prompt and reply as a prefix, which is computed once. A
sample without a principle is rendered without that turn.

The built-in template ``rlbff`` is that of NVIDIA's Principle reward models, which answer Yes or No
(RLBFF, arXiv 2509.21319; the model card of Llama-3.3-Nemotron-70B-Reward-Principle).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from nemo_aligner.contract.messages import (
    Conversation,
    Message,
    Messages,
    Text,
    attach_principle,
    messages_of,
    principle_of,
    read_principle,
    with_messages,
)
from nemo_aligner.utils.errors import ConfigError, DataError, shown

PRINCIPLE_KEY = "model.data.principle_template"
_PLACEHOLDER = "{principle}"
_BUILT_IN = {
    "rlbff": (
        "Evaluate the response to the previous prompt in terms of whether it satisfies this "
        "principle: {principle}. Only answer Yes or No."
    )
}
# Largest length in characters of a template, so that an untrusted contract stays small.
_MAX_LENGTH = 10_000

Principles: TypeAlias = str | Sequence[str | Sequence[str] | None] | None
"""One principle for all samples; or for each sample one, several (a list), or None."""


def is_principle_template(text: str) -> bool:
    """Return whether a text has the placeholder exactly once, and is not too long."""
    return len(text) <= _MAX_LENGTH and text.count(_PLACEHOLDER) == 1


def resolve_principle_template(setting: str) -> str | None:
    """Return the template that ``model.data.principle_template`` names; None if it is empty.

    Raises:
        ConfigError: it is neither a built-in name nor a text with one ``{principle}``.
    """
    template = _BUILT_IN.get(setting, setting)
    if template and not is_principle_template(template):
        raise ConfigError(
            f"{PRINCIPLE_KEY}: got {shown(setting)}, wanted {' or '.join(_BUILT_IN)}, or a text of "
            f"at most {_MAX_LENGTH} characters with {_PLACEHOLDER} once"
        )
    return template or None


def write_question(conversation: Messages | Conversation, template: str | None) -> Message | None:
    """Build the user turn that follows the reply; None if the sample has no principle.

    Raises:
        DataError: the sample has a principle, and ``template`` is None.
    """
    principle = principle_of(conversation)
    if principle is None:
        return None
    if template is None:
        raise DataError(
            f"principle: got {shown(principle)}, but the model was not trained with principles, "
            "so it would never see it. Remove the principle, or train a model with "
            f"{PRINCIPLE_KEY}=rlbff"
        )
    return {"role": "user", "content": template.replace(_PLACEHOLDER, principle)}


def ask_after_reply(
    conversation: Messages | Conversation, question: Message
) -> Messages | Conversation:
    """Append ``question`` to a conversation that the chat template can render.

    The result has no principle. It is a bare list if there are neither tools nor documents, which
    is rendered faster.
    """
    turns = [*messages_of(conversation), question]
    if isinstance(conversation, Conversation) and (conversation.tools or conversation.documents):
        return with_messages(conversation, turns)
    return turns


def check_question_rendered(question: Message, rendered: str) -> None:
    """Check that a chat template renders the question that follows a reply.

    Raises:
        DataError: the question is not in ``rendered``.
    """
    if question["content"].strip() not in rendered:
        raise DataError("principle: the chat template does not render the question about it")


# Samples from outside, to which a caller adds principles.


def add_principles(samples: Sequence[Any], principle: Principles) -> list[Any]:
    """Add principles to samples; one with K principles becomes K samples, one after the other.

    Raises:
        DataError: ``principle`` has another number of entries than there are samples, or an entry
            does not fit its sample.
    """
    expanded: list[Any] = []
    principles = list_principles(principle, len(samples))
    for number, (sample, texts) in enumerate(zip(samples, principles, strict=True)):
        try:
            expanded += [_add_principle(sample, text) for text in texts]
        except DataError as error:
            raise DataError(f"row {number}: {error}") from error
    return expanded


def list_principles(principle: Principles, num_samples: int) -> list[list[str | None]]:
    """Return the principles of each sample in the normal form; ``[None]`` if it has none.

    Raises:
        DataError: ``principle`` has another number of entries than there are samples, or an entry
            is an empty list or has a principle that is not a string.
    """
    if isinstance(principle, str | None):
        return [[read_principle(principle)]] * num_samples
    if not isinstance(principle, list | tuple) or len(principle) != num_samples:
        raise DataError(
            f"principle: got {shown(principle)}, wanted a string, or a list with one entry for "
            f"each of the {num_samples} samples"
        )
    return [_read_entry(number, entry) for number, entry in enumerate(principle)]


def _read_entry(number: int, entry: Any) -> list[str | None]:
    texts = entry if isinstance(entry, list | tuple) else [entry]
    if not texts:
        raise DataError(f"principle, row {number}: got an empty list, wanted a string or null")
    try:
        return [*map(read_principle, texts)]
    except DataError as error:
        raise DataError(f"row {number}: {error}") from error


def _add_principle(sample: Any, principle: str | None) -> Any:
    # The messages of the sample are checked later, so that their errors are those of its row.
    if principle is None:
        return sample
    if not isinstance(sample, Mapping):
        return attach_principle(sample, principle)
    present = Conversation([], principle=sample.get("principle"))
    return {**sample, "principle": principle_of(attach_principle(present, principle))}


def refuse_principle(text: Text, reader: str) -> None:
    """Raise DataError if a sample has a principle, which ``reader`` would silently ignore."""
    principle = principle_of(text)
    if principle is not None:
        raise DataError(
            f"principle: got {shown(principle)}, wanted none: {reader} reads no principles"
        )
