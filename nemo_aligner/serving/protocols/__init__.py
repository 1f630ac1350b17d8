"""Wire protocols: how a request becomes a ``ScoreRequest``, and rewards become an answer.

A request passes through these files in this order:

``strict_json.py``   rejects JSON with duplicate keys or too deep nesting, before it is parsed
``base.py``          ``Route``, request bodies as pydantic models, unpacking, messages about bodies
one file a protocol  ``rewards.py`` (``/v1/rewards``, our own), ``vllm.py``, ``sglang.py``,
                     ``tei.py``, ``rerank.py`` (vLLM, Jina, Cohere), ``openrlhf.py``, ``slime.py``
                     and ``gym.py`` (NeMo Gym) translate a body to a ``ScoreRequest`` and
                     ``ScoredRows`` to the answer of their protocol
``responses_api.py`` items of OpenAI's Responses API as messages, for ``gym.py``

KServe v2 sends tensors instead of JSON objects:

``kserve_body.py``   tensors as HTTP bodies; the client also uses it
``kserve.py``        what the tensors of ``reward_model`` and ``contract`` mean
``critic.py``        what the tensors of a PPO critic's endpoints mean

This module has the types that all protocols share. ``serving/front`` owns sockets, limits and
tokens. The client imports this module, ``strict_json.py``, ``kserve*.py`` and ``critic.py``, so
none of them may import pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.scorer import ScoredRows, StepRewards, place_rows

__all__ = ["ScoreRequest", "ScoredRows", "StepRewards", "TensorSpec", "place_rows"]


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of one tensor of a KServe v2 endpoint.

    ``shape`` does not include the batch dimension; -1 stands for any size.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True)
class ScoreRequest:
    """One decoded request of any protocol, with B samples.

    Attributes:
        texts: B raw texts or conversations; None if the request has token ids.
        token_lists: B lists of token ids; None if the request has texts.
        add_eos: B flags: whether the sender expects an end-of-sequence token to be added. Only
            clients of NeMo-Aligner send them.
        refused: row number in the request -> reason, for rows that are rejected before scoring.
            They come in addition to the B rows, which have the remaining row numbers in order.
        adds_special_tokens: False if the sender expects that no BOS or EOS is added to raw texts;
            then a text to which the scoring contract adds one is rejected. Only clients of vLLM
            send it.
        num_prompt_turns: number of messages with which all B conversations begin, and after which
            their replies begin; None if only the conversations themselves tell (``question_of``).
    """

    texts: list[Text] | None = None
    token_lists: list[list[int]] | None = None
    add_eos: list[bool] | None = None
    refused: Mapping[int, str] = field(default_factory=dict)
    adds_special_tokens: bool = True
    num_prompt_turns: int | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows of the request, including the rejected ones."""
        return len(self.texts or self.token_lists or ()) + len(self.refused)

    @property
    def row_numbers(self) -> list[int]:
        """Indices in the request of the B rows that are not rejected, ascending."""
        return [row for row in range(self.num_rows) if row not in self.refused]

    def without_rows(self, reasons: Mapping[int, str]) -> ScoreRequest:
        """Return a copy with more rejected rows; ``reasons`` maps their numbers to the reasons."""
        keeps = [row not in reasons for row in self.row_numbers]

        def remaining(rows: Sequence[Any] | None) -> list[Any] | None:
            return None if rows is None else [*compress(rows, keeps)]

        return ScoreRequest(
            remaining(self.texts),
            remaining(self.token_lists),
            remaining(self.add_eos),
            {**self.refused, **reasons},
            self.adds_special_tokens,
            self.num_prompt_turns,
        )
