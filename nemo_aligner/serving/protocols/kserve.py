"""KServe v2: the tensors of the ``reward_model`` endpoint, to and from what they mean.

A request carries B texts (or token rows), in exactly one of three forms:

====================  =====  ======  ==============================================================
input                 dtype  shape   meaning
====================  =====  ======  ==============================================================
``sentences``         BYTES  [B, 1]  raw UTF-8 text, scored as it stands, without chat template
``conversations``     BYTES  [B, 1]  a JSON list of messages, or an object with ``messages``,
                                     ``tools`` and ``documents``; the contract's chat template is
                                     applied
``tokens``            INT64  [B, S]  token ids, scored as sent; whatever stands after the length
                                     is ignored
``sequence_lengths``  INT64  [B, 1]  the true lengths, with ``tokens``
``add_EOS``           BOOL   [B, 1]  optional, from clients of NeMo-Aligner 0.2-0.3; see below
====================  =====  ======  ==============================================================

The answer has ``rewards`` FP32 [B, A], one column per attribute; ``exceeded`` INT32 [B, 1], 1
where a text was longer than ``seq_length`` and the contract's ``truncate_left`` rule cut it; and
``contract_hash`` and ``model_fingerprint`` BYTES [B, 1], which say by what contract and by what
weights it was scored, empty where the server does not know. With any other overlong
rule, and for ``tokens``, which are never altered, too long is an error. A server that shapes its
rewards also answers with ``raw_rewards`` FP32 [B, M * A], those of each of M models before;
``deviation`` FP32 [B, A] where it has several; and ``passed`` INT32 [B, 1] where it has a
threshold. A model with K outputs for each attribute also answers with ``spread`` FP32 [B, A], the
uncertainty of the rewards, and ``outputs`` FP32 [B, M * A * K]. A model with a reward for each turn
or step also answers with ``steps`` BYTES [B, 1], JSON: ``rewards``, S rows of A, and ``spans``, of
each what message (null in a raw text) and which characters of it it is the reward of; for
``tokens`` it has the last one alone, and no spans.

The model ``contract``, not batched, answers with ``contract`` BYTES [1]: the scoring contract as
JSON, its hash included; with ``model_fingerprint`` BYTES [1], empty if the model has none; with
``statistics`` BYTES [1]: what the server has counted since its start, a JSON object of numbers (see
``Meter.statistics``); with ``turn_end`` BYTES [1]: what the chat template writes after a reply (see
``TurnEnd``), as JSON, or null; and with ``sample_frame`` BYTES [1]: what the template writes around
a sample (see ``SampleFrame``), as JSON, or null. It needs no
input; ``dummy_var`` INT64 [1] is for clients that must send one.

``complete_turns`` does not concern this protocol, nor ``/v1/rewards``: clients and gateways of this
package send texts by it that are to have the reward of the same text in process, and a gateway has
completed those of its own routes.

Whether an end-of-sequence token is added is part of what a score means, so the checkpoint's scoring
contract decides it. ``add_EOS`` cannot change that: for ``sentences`` it must say what the contract
says, for the other forms it must be false, and a request that disagrees is refused.

A bad request is answered with HTTP 400 and one line of its own; the others in its batch are not
touched. So is one without the server's bearer token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Conversation, Messages, Text, as_json, read_text
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.contract.turns import TurnEnd
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest, StepRewards, TensorSpec
from nemo_aligner.serving.protocols.strict_json import read_json
from nemo_aligner.utils.errors import DataError, ServingError, shown

T = TypeVar("T")

MODEL_NAME = "reward_model"
CONTRACT_MODEL_NAME = "contract"
DEFAULT_URL = "http://127.0.0.1:5555"

INPUTS = (
    TensorSpec("sentences", bytes, (1,), optional=True),
    TensorSpec("conversations", bytes, (1,), optional=True),
    TensorSpec("tokens", np.int64, (-1,), optional=True),
    TensorSpec("sequence_lengths", np.int64, (1,), optional=True),
    TensorSpec("add_EOS", np.bool_, (1,), optional=True),
)
OUTPUTS = (
    TensorSpec("rewards", np.float32, (-1,)),
    TensorSpec("exceeded", np.int32, (1,)),
    TensorSpec("contract_hash", bytes, (1,)),
    TensorSpec("model_fingerprint", bytes, (1,)),
)
# Only if rewards are shaped, or a head has several outputs for an attribute. Each is the field of
# ``ScoredRows`` of the same name, which is ``[B]`` where the tensor has one number a row.
OPTIONAL_OUTPUTS = (
    TensorSpec("raw_rewards", np.float32, (-1,)),
    TensorSpec("deviation", np.float32, (-1,)),
    TensorSpec("passed", np.int32, (1,)),
    TensorSpec("spread", np.float32, (-1,)),
    TensorSpec("outputs", np.float32, (-1,)),
    TensorSpec("steps", bytes, (1,)),
)
OPTIONAL_NAMES = tuple(spec.name for spec in OPTIONAL_OUTPUTS)
CONTRACT_INPUTS = (TensorSpec("dummy_var", np.int64, (1,), optional=True),)
CONTRACT_OUTPUTS = (
    TensorSpec("contract", bytes, (1,)),
    TensorSpec("model_fingerprint", bytes, (1,)),
    TensorSpec("statistics", bytes, (1,)),
    TensorSpec("turn_end", bytes, (1,)),
    TensorSpec("sample_frame", bytes, (1,)),
)


def encode_sentences(texts: Sequence[str]) -> dict[str, np.ndarray]:
    """The inputs of a request for raw texts."""
    return {"sentences": _bytes_column(text.encode() for text in texts)}


def encode_conversations(conversations: Sequence[Messages | Conversation]) -> dict[str, np.ndarray]:
    """The inputs of a request for conversations."""
    # In UTF-8: escaped, a text in most scripts would be two to three times as long.
    rows = (json.dumps(as_json(each), ensure_ascii=False).encode() for each in conversations)
    return {"conversations": _bytes_column(rows)}


def encode_tokens(token_lists: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """The inputs of a request for token ids: rows padded with zeros, and their true lengths.

    Raises:
        DataError: a row is empty, or has what is no token id.
    """
    rows = [_token_ids(number, row) for number, row in enumerate(token_lists)]
    lengths = np.array([[len(row)] for row in rows], dtype=np.int64)
    tokens = np.zeros((len(rows), int(lengths.max())), dtype=np.int64)
    for line, row in zip(tokens, rows, strict=True):
        line[: len(row)] = row
    return {"tokens": tokens, "sequence_lengths": lengths}


def encode_rewards(scored: ScoredRows) -> dict[str, np.ndarray]:
    """The outputs of one answered request."""
    rows = len(scored.rewards)
    outputs = {
        "rewards": np.asarray(scored.rewards, dtype=np.float32),
        "exceeded": np.asarray(scored.exceeded, dtype=np.int32).reshape(-1, 1),
        "contract_hash": _bytes_column([(scored.contract_hash or "").encode()] * rows),
        "model_fingerprint": _bytes_column([(scored.model_fingerprint or "").encode()] * rows),
    }
    for spec in OPTIONAL_OUTPUTS:
        values = getattr(scored, spec.name)
        if values is not None and spec.dtype is bytes:
            outputs[spec.name] = _bytes_column(each.to_json().encode() for each in values)
        elif values is not None:
            outputs[spec.name] = np.asarray(values, dtype=spec.dtype).reshape(len(values), -1)
    return outputs


def decode_rewards(outputs: Mapping[str, np.ndarray]) -> ScoredRows:
    """Decode an answer; a server of NeMo-Aligner sends ``exceeded`` at most, or only rewards."""
    rewards = np.asarray(outputs["rewards"], dtype=np.float32)
    exceeded = outputs.get("exceeded", np.zeros(len(rewards)))
    optional = {spec.name: outputs.get(spec.name) for spec in OPTIONAL_OUTPUTS}
    for spec in OPTIONAL_OUTPUTS:
        values = optional[spec.name]
        if values is not None and spec.dtype is bytes:
            optional[spec.name] = _decode_steps(values)
        elif values is not None and spec.shape == (1,):  # one number a row: [B, 1] on the wire
            optional[spec.name] = values.reshape(-1)
    return ScoredRows(
        rewards,
        {},
        np.asarray(exceeded).reshape(-1).astype(bool),
        _first_text(outputs, "contract_hash"),
        _first_text(outputs, "model_fingerprint"),
        **optional,
    )


def _first_text(outputs: Mapping[str, np.ndarray], name: str) -> str | None:
    """Text that is the same for all rows; None where a server sends none, or an empty one."""
    values = outputs.get(name, np.array([b""]))
    return _decode_bytes(values.reshape(-1)[0]) or None


def _decode_steps(values: np.ndarray) -> np.ndarray:
    found = np.full(len(values), None, dtype=np.object_)
    for row, raw in enumerate(values.reshape(-1)):
        found[row] = StepRewards.from_json(_decode_bytes(raw))
    return found


def encode_contract(
    contract: ScoringContract,
    turn_end: TurnEnd | None,
    sample_frame: SampleFrame | None,
    fingerprint: str | None = None,
) -> dict[str, np.ndarray]:
    """Outputs of the ``contract`` model that stay: how samples become scores, and which model."""
    end = None if turn_end is None else turn_end.to_dict()
    frame = None if sample_frame is None else sample_frame.to_dict()
    return {
        "contract": _json_output(contract.to_dict()),
        "model_fingerprint": np.array([(fingerprint or "").encode()], dtype=np.object_),
        "turn_end": _json_output(end),
        "sample_frame": _json_output(frame),
    }


def decode_contract(outputs: Mapping[str, np.ndarray]) -> ScoringContract:
    """Decode the scoring contract.

    Raises:
        CheckpointError: it is of another version, or was changed.
    """
    return ScoringContract.from_dict(_decode_json(outputs["contract"]))


def decode_fingerprint(outputs: Mapping[str, np.ndarray]) -> str | None:
    """Decode the model's fingerprint; None where the server tells none."""
    return _first_text(outputs, "model_fingerprint")


def decode_template_part(
    outputs: Mapping[str, np.ndarray], name: str, from_dict: Callable[[Any], T]
) -> T | None:
    """Decode ``turn_end`` or ``sample_frame``, by ``name``; None if the template has none.

    Raises:
        ServingError: the server does not say, as one of an earlier version.
    """
    try:
        values = _decode_json(outputs[name])
        return None if values is None else from_dict(values)
    except (KeyError, ValueError, TypeError, IndexError, RecursionError) as error:
        raise ServingError(f"{name}: {error}") from error


def encode_statistics(statistics: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Outputs of the ``contract`` model: the server's counts."""
    return {"statistics": _json_output(dict(statistics))}


def decode_statistics(outputs: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Decode a server's counts; values that are no numbers are left out.

    Raises:
        ServingError: it does not say, or not as a JSON object.
    """
    try:
        found = _decode_json(outputs["statistics"])
        return {name: float(value) for name, value in found.items() if _is_number(value)}
    except (KeyError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise ServingError(f"statistics: {error}") from error


def _json_output(value: Any) -> np.ndarray:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return np.array([text.encode()], dtype=np.object_)


def _decode_json(values: np.ndarray) -> Any:
    return json.loads(_decode_bytes(values.reshape(-1)[0]))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def decode_request(inputs: Mapping[str, np.ndarray]) -> ScoreRequest:
    """Check one request's tensors and take them apart.

    Raises:
        ServingError: the tensors contradict each other or the contract above, in one line.
    """
    forms = [name for name in ("sentences", "conversations", "tokens") if name in inputs]
    # One form, so that all rows of a request have the same rule: with a template, or without.
    if len(forms) != 1:
        raise ServingError(
            f"got {_listing(inputs)}, wanted exactly one of sentences, conversations, "
            "or tokens with sequence_lengths"
        )
    form = forms[0]
    if len(inputs[form]) == 0:
        raise ServingError(f"{form}: got no rows, wanted at least one")
    if (form == "tokens") != ("sequence_lengths" in inputs):
        raise ServingError(f"got {_listing(inputs)}, wanted tokens and sequence_lengths together")
    add_eos = _column(inputs, "add_EOS", len(inputs[form])) if "add_EOS" in inputs else None
    flags = None if add_eos is None else [bool(flag) for flag in add_eos]
    if form == "tokens":
        return ScoreRequest(token_lists=_decode_tokens(inputs), add_eos=flags)
    rows = [_text(form, *each) for each in enumerate(_column(inputs, form, len(inputs[form])))]
    if form == "sentences":
        return ScoreRequest(texts=list(rows), add_eos=flags)
    conversations = [_conversation(row, text) for row, text in enumerate(rows)]
    return ScoreRequest(texts=list(conversations), add_eos=flags)


def size_of_request(inputs: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """Rows and bytes of a request's tensors, before any is looked into."""
    rows = max((len(array) for array in inputs.values() if array.ndim), default=0)
    return rows, sum(map(_num_bytes, inputs.values()))


def _num_bytes(array: np.ndarray) -> int:
    # Of an array of bytes numpy would count the pointers.
    return sum(map(len, array.reshape(-1))) if array.dtype == np.object_ else array.nbytes


def _token_ids(number: int, row: Sequence[int]) -> np.ndarray:
    if len(row) == 0:
        raise DataError(f"row {number}: it has no tokens")
    try:
        ids = np.asarray(row)
    except ValueError:  # lists of different lengths
        ids = np.array(None)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(f"row {number}: got {shown(row)}, wanted token ids")
    return ids


def _bytes_column(rows: Any) -> np.ndarray:
    return np.array([[row] for row in rows], dtype=np.object_)


def _listing(inputs: Mapping[str, np.ndarray]) -> str:
    return ", ".join(sorted(inputs)) or "no inputs"


def _column(inputs: Mapping[str, np.ndarray], name: str, rows: int) -> list[Any]:
    array = inputs[name]
    if array.shape != (rows, 1):
        raise ServingError(f"{name}: got shape {list(array.shape)}, wanted [{rows}, 1]")
    return list(array.reshape(-1))


def _text(form: str, row: int, raw: Any) -> str:
    """Decode a text; bytes that are not UTF-8 would be scored as another one."""
    try:
        return raw.decode("utf-8") if isinstance(raw, bytes) else str(raw)
    except UnicodeDecodeError as error:
        raise ServingError(f"{form}, row {row}: not UTF-8 ({error.reason})") from None


def _decode_bytes(raw: Any) -> str:
    return raw.decode("utf-8", errors="replace") if isinstance(raw, bytes) else str(raw)


def _decode_tokens(inputs: Mapping[str, np.ndarray]) -> list[list[int]]:
    tokens = inputs["tokens"]
    if tokens.ndim != 2:
        raise ServingError(f"tokens: got shape {list(tokens.shape)}, wanted [B, S]")
    lengths = [int(length) for length in _column(inputs, "sequence_lengths", len(tokens))]
    for row, length in enumerate(lengths):
        if not 1 <= length <= tokens.shape[1]:
            raise ServingError(
                f"sequence_lengths, row {row}: got {length}, "
                f"wanted 1 to {tokens.shape[1]} (the width of tokens)"
            )
    return [tokens[row, :length].tolist() for row, length in enumerate(lengths)]


def _conversation(row: int, text: str) -> Text:
    """Parse a conversation of a row; raise ServingError with the row if it is none."""
    try:
        given = read_json(text)
    except ServingError as error:
        raise ServingError(f"conversations, row {row}: {error}") from None
    messages = given.get("messages") if isinstance(given, dict) else given
    if not isinstance(messages, list) or not messages:
        raise ServingError(
            f"conversations, row {row}: got {text[:80]}, "
            "wanted a list of messages that is not empty, or an object with messages"
        )
    try:
        return read_text(given)
    except DataError as error:
        raise ServingError(f"row {row}: {error}") from error
