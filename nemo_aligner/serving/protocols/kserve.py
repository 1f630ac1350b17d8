"""The KServe v2 tensors of the endpoints ``reward_model`` and ``contract``, and their meaning.

A request has B samples in exactly one of three forms:

====================  =====  ======  ==============================================================
input                 dtype  shape   meaning
====================  =====  ======  ==============================================================
``sentences``         BYTES  [B, 1]  raw UTF-8 text, scored unchanged, without a chat template
``conversations``     BYTES  [B, 1]  a JSON list of messages, or an object with ``messages``,
                                     ``tools``, ``documents`` and ``principle``; the contract's
                                     chat template is applied
``tokens``            INT64  [B, S]  token ids, scored unchanged; ids after a row's length are
                                     ignored
``sequence_lengths``  INT64  [B, 1]  the true lengths, with ``tokens``
``add_EOS``           BOOL   [B, 1]  optional, from clients of NeMo-Aligner 0.2-0.3; see below
====================  =====  ======  ==============================================================

The answer has:

=====================  =====  ==============  ====================================================
output                 dtype  shape           meaning
=====================  =====  ==============  ====================================================
``rewards``            FP32   [B, A]          one column per attribute
``exceeded``           INT32  [B, 1]          1 if the sample was longer than ``seq_length`` and the
                                              contract's ``truncate_left`` rule cut it
``contract_hash``      BYTES  [B, 1]          hash of the scoring contract; empty if unknown
``model_fingerprint``  BYTES  [B, 1]          fingerprint of the weights; empty if unknown
``raw_rewards``        FP32   [B, M * A]      only if the server shapes its rewards: the rewards of
                                              its M models before shaping
``deviation``          FP32   [B, A]          only with M > 1: standard deviation over the models
``passed``             INT32  [B, 1]          only with a threshold: 1 if the reward reaches it
``spread``             FP32   [B, A]          only with K outputs per attribute: uncertainty of each
                                              reward
``outputs``            FP32   [B, M * A * K]  only with K outputs per attribute: all of them
``steps``              BYTES  [B, 1]          only with a reward per turn or step: a JSON object
=====================  =====  ==============  ====================================================

A row that is rejected fails the whole request, unless the request has the parameter ``row_errors:
true``. The answer then has NaN for each such row, and the output ``errors`` BYTES [B, 1]: why a row
has no reward, empty for a row with one. A request whose rows all have rewards has no ``errors``.
``unscored`` INT32 [B, 1] is not 0 if the row is not rejected, but a gateway's judge or function
failed, or tokenizing took too long: 2 if the row may get a reward when it is sent again, else 1.

``steps`` has ``rewards``, a list of S rows of A numbers, and ``spans``, which give for each row the
message (null in a raw text) and the range of characters that it belongs to. For ``tokens`` it has
only the last row and no spans. With any overlong rule but ``truncate_left``, a sample that is too
long is an error; so is a row of ``tokens`` that is too long, because token ids are never cut.

The ``contract`` endpoint is not batched. It needs no input; ``dummy_var`` INT64 [1] is for clients
that must send one. All of its outputs are BYTES [1]: ``contract``, the scoring contract as JSON
with its hash; ``model_fingerprint``, empty if the model has none; ``statistics``, a JSON object of
counts since the server's start (see ``Meter.statistics``); ``turn_end``, what the chat template
writes after a reply (see ``TurnEnd``), as JSON or null; and ``sample_frame``, what the template
writes around a sample (see ``SampleFrame``), as JSON or null.

The setting ``complete_turns`` (of ``server`` and ``gateway``) applies neither to this protocol nor
to ``/v1/rewards``: the samples that clients and gateways of this package send must get the same
reward as in process.

Whether an end-of-sequence token is added is part of what a score means, so the scoring contract
decides it. ``add_EOS`` cannot change it: it must agree with the contract for ``sentences`` and be
false for the other forms; otherwise the request is rejected.

A bad request gets HTTP 400 with a one-line message. A request without the server's bearer token
gets 401 over HTTP and 400 from Triton. The other requests of its batch are not affected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Conversation, Messages, Text, as_json, read_text
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.contract.turns import TurnEnd
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest, StepRewards, TensorSpec
from nemo_aligner.serving.protocols.strict_json import read_json
from nemo_aligner.utils.errors import DataError, ServingError, short, shown

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
# Outputs of an answer that are optional: for shaped rewards, for several outputs of the head per
# attribute, and for rewards of turns or steps. Each tensor is the field of ``ScoredRows`` of the
# same name; a field ``[B]`` is sent as ``[B, 1]``.
OPTIONAL_OUTPUTS = (
    TensorSpec("raw_rewards", np.float32, (-1,)),
    TensorSpec("deviation", np.float32, (-1,)),
    TensorSpec("passed", np.int32, (1,)),
    TensorSpec("spread", np.float32, (-1,)),
    TensorSpec("outputs", np.float32, (-1,)),
    TensorSpec("steps", bytes, (1,)),
)
ERRORS, UNSCORED = "errors", "unscored"
# The prefix of all routes of one of several models.
_MODEL_PATH = re.compile(r"/models/(?P<name>[^/]+)(?=/)")
OPTIONAL_NAMES = tuple(spec.name for spec in OPTIONAL_OUTPUTS)
CONTRACT_INPUTS = (TensorSpec("dummy_var", np.int64, (1,), optional=True),)
CONTRACT_OUTPUTS = (
    TensorSpec("contract", bytes, (1,)),
    TensorSpec("model_fingerprint", bytes, (1,)),
    TensorSpec("statistics", bytes, (1,)),
    TensorSpec("turn_end", bytes, (1,)),
    TensorSpec("sample_frame", bytes, (1,)),
)


def contract_name(model_name: str) -> str:
    """Return the name of the endpoint that publishes the contract of ``model_name``.

    For ``reward_model`` it is ``contract``; for any further model ``NAME.contract``.
    """
    is_main = model_name == MODEL_NAME
    return CONTRACT_MODEL_NAME if is_main else f"{model_name}.{CONTRACT_MODEL_NAME}"


def split_model_path(path: str) -> tuple[str | None, str]:
    """Split a URL's path into the model's name (None without ``/models/NAME/``) and the rest."""
    match = _MODEL_PATH.match(path)
    return (None, path) if match is None else (match["name"], path[match.end() :])


def encode_sentences(texts: Sequence[str]) -> dict[str, np.ndarray]:
    """Encode the inputs of a request for B raw texts."""
    return {"sentences": _bytes_column(text.encode() for text in texts)}


def encode_conversations(conversations: Sequence[Messages | Conversation]) -> dict[str, np.ndarray]:
    """Encode the inputs of a request for B conversations."""
    # Not escaped to ASCII, which would double or triple the size of texts in most scripts.
    rows = (
        json.dumps(as_json(conversation), ensure_ascii=False).encode()
        for conversation in conversations
    )
    return {"conversations": _bytes_column(rows)}


def encode_tokens(token_lists: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Encode the inputs of a request for token ids: padded ``[B, S]``, and lengths ``[B, 1]``.

    Raises:
        DataError: a row is empty or has elements that are not token ids.
    """
    rows = [_token_ids(number, row) for number, row in enumerate(token_lists)]
    lengths = np.array([[len(row)] for row in rows], dtype=np.int64)
    tokens = np.zeros((len(rows), int(lengths.max())), dtype=np.int64)
    for line, row in zip(tokens, rows, strict=True):
        line[: len(row)] = row
    return {"tokens": tokens, "sequence_lengths": lengths}


def encode_rewards(scored: ScoredRows) -> dict[str, np.ndarray]:
    """Encode rewards as output tensors; optional outputs only if ``scored`` has them."""
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
            outputs[spec.name] = _bytes_column(
                b"" if steps is None else steps.to_json().encode() for steps in values
            )
        elif values is not None:
            # Integers have no NaN, which the rows in ``errors`` have.
            numbers = values if spec.dtype is np.float32 else np.nan_to_num(values)
            outputs[spec.name] = np.asarray(numbers, dtype=spec.dtype).reshape(rows, -1)
    if scored.errors:
        outputs[ERRORS] = _bytes_column(scored.errors.get(row, "").encode() for row in range(rows))
    if scored.unscored:
        marks = [[(row in scored.unscored) + (row in scored.temporary)] for row in range(rows)]
        outputs[UNSCORED] = np.array(marks, np.int32)
    return outputs


def decode_rewards(outputs: Mapping[str, np.ndarray]) -> ScoredRows:
    """Decode the outputs of an answer; other servers may send only ``rewards`` and ``exceeded``."""
    rewards = np.asarray(outputs["rewards"], dtype=np.float32)
    exceeded = outputs.get("exceeded", np.zeros(len(rewards)))
    optional: dict[str, Any] = {spec.name: outputs.get(spec.name) for spec in OPTIONAL_OUTPUTS}
    for spec in OPTIONAL_OUTPUTS:
        values = optional[spec.name]
        if values is not None and spec.dtype is bytes:
            optional[spec.name] = _decode_steps(values)
        elif values is not None and spec.shape == (1,):  # one number per row: sent as [B, 1]
            optional[spec.name] = values.reshape(-1)
    reasons = map(_decode_bytes, outputs.get(ERRORS, np.zeros(0, np.object_)).reshape(-1))
    errors = {row: reason for row, reason in enumerate(reasons) if reason}
    marks = np.asarray(outputs.get(UNSCORED, np.zeros(0))).reshape(-1).tolist()
    return ScoredRows(
        rewards,
        errors,
        np.asarray(exceeded).reshape(-1).astype(bool),
        _first_text(outputs, "contract_hash"),
        _first_text(outputs, "model_fingerprint"),
        unscored=frozenset(row for row, mark in enumerate(marks) if mark and row in errors),
        temporary=frozenset(row for row, mark in enumerate(marks) if mark == 2 and row in errors),
        **optional,
    )


def _first_text(outputs: Mapping[str, np.ndarray], name: str) -> str | None:
    """Decode a text output from its first row, because all rows have the same text.

    None if the server does not send it, or sends an empty one.
    """
    values = outputs.get(name, np.array([b""]))
    return _decode_bytes(values.reshape(-1)[0]) or None


def _decode_steps(values: np.ndarray) -> np.ndarray:
    steps = np.full(len(values), None, dtype=np.object_)
    for row, raw in enumerate(values.reshape(-1)):
        steps[row] = StepRewards.from_json(_decode_bytes(raw)) if raw else None
    return steps


def encode_contract(
    contract: ScoringContract,
    turn_end: TurnEnd | None,
    sample_frame: SampleFrame | None,
    fingerprint: str | None = None,
) -> dict[str, np.ndarray]:
    """Encode the outputs of the ``contract`` endpoint that stay fixed while a server runs."""
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
        CheckpointError: the contract's version is not supported, or its hash does not match its
            content.
    """
    return ScoringContract.from_dict(_decode_json(outputs["contract"]))


def decode_fingerprint(outputs: Mapping[str, np.ndarray]) -> str | None:
    """Decode the model's fingerprint; None if the server does not publish one."""
    return _first_text(outputs, "model_fingerprint")


def decode_template_part(
    outputs: Mapping[str, np.ndarray], name: str, from_dict: Callable[[Any], T]
) -> T | None:
    """Decode the output ``name``, ``turn_end`` or ``sample_frame``; None if the template has none.

    Raises:
        ServingError: the server does not send it, e.g. because it runs an earlier version.
    """
    try:
        values = _decode_json(outputs[name])
        return None if values is None else from_dict(values)
    except (KeyError, ValueError, TypeError, IndexError, RecursionError) as error:
        raise ServingError(f"{name}: {short(error)}") from error


def encode_statistics(statistics: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Encode the server's counts as the output ``statistics`` of the ``contract`` endpoint."""
    return {"statistics": _json_output(dict(statistics))}


def decode_statistics(outputs: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Decode the counts of a server; values that are not numbers are dropped.

    Raises:
        ServingError: the server sends no counts, or not as a JSON object.
    """
    try:
        counts = _decode_json(outputs["statistics"])
        return {name: float(value) for name, value in counts.items() if _is_number(value)}
    except (KeyError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise ServingError(f"statistics: {short(error)}") from error


def _json_output(value: Any) -> np.ndarray:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return np.array([text.encode()], dtype=np.object_)


def _decode_json(values: np.ndarray) -> Any:
    return json.loads(_decode_bytes(values.reshape(-1)[0]))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def decode_request(inputs: Mapping[str, np.ndarray]) -> ScoreRequest:
    """Check the input tensors of one request and convert them to a ``ScoreRequest``.

    Raises:
        ServingError: the tensors contradict each other, or are not inputs of ``reward_model``.
    """
    forms = [name for name in ("sentences", "conversations", "tokens") if name in inputs]
    # Exactly one form, so that either all rows or none are written in the chat template.
    if len(forms) != 1:
        raise ServingError(
            f"got {_list_names(inputs)}, wanted exactly one of sentences, conversations, "
            "or tokens with sequence_lengths"
        )
    form = forms[0]
    if len(inputs[form]) == 0:
        raise ServingError(f"{form}: got no rows, wanted at least one")
    if (form == "tokens") != ("sequence_lengths" in inputs):
        raise ServingError(
            f"got {_list_names(inputs)}, wanted tokens and sequence_lengths together"
        )
    add_eos = _read_column(inputs, "add_EOS", len(inputs[form])) if "add_EOS" in inputs else None
    flags = None if add_eos is None else [bool(flag) for flag in add_eos]
    if form == "tokens":
        return ScoreRequest(token_lists=_decode_tokens(inputs), add_eos=flags)
    column = _read_column(inputs, form, len(inputs[form]))
    rows = [_decode_text(form, row, raw) for row, raw in enumerate(column)]
    if form == "sentences":
        return ScoreRequest(texts=list(rows), add_eos=flags)
    conversations = [_decode_conversation(row, text) for row, text in enumerate(rows)]
    return ScoreRequest(texts=list(conversations), add_eos=flags)


def size_of_request(inputs: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """Return the number of rows and bytes of a request's tensors, without decoding them."""
    rows = max((len(array) for array in inputs.values() if array.ndim), default=0)
    return rows, sum(map(_num_bytes, inputs.values()))


def _num_bytes(array: np.ndarray) -> int:
    # Sum the lengths: for an array of bytes objects, nbytes would count only the pointers.
    return sum(map(len, array.reshape(-1))) if array.dtype == np.object_ else array.nbytes


def _token_ids(number: int, row: Sequence[int]) -> np.ndarray:
    if len(row) == 0:
        raise DataError(f"row {number}: it has no tokens; omit the row")
    try:
        ids = np.asarray(row)
    except ValueError:  # ValueError: nested lists of different lengths
        ids = np.array(None)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(f"row {number}: got {shown(row)}, wanted token ids")
    return ids


def _bytes_column(rows: Any) -> np.ndarray:
    return np.array([[row] for row in rows], dtype=np.object_)


def _list_names(inputs: Mapping[str, np.ndarray]) -> str:
    return ", ".join(sorted(inputs)) or "no inputs"


def _read_column(inputs: Mapping[str, np.ndarray], name: str, rows: int) -> list[Any]:
    array = inputs[name]
    if array.shape != (rows, 1):
        raise ServingError(f"{name}: got shape {list(array.shape)}, wanted [{rows}, 1]")
    return list(array.reshape(-1))


def _decode_text(form: str, row: int, raw: Any) -> str:
    """Decode one text as UTF-8.

    Raise if it is invalid, because replaced bytes would change the text.
    """
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
    lengths = [int(length) for length in _read_column(inputs, "sequence_lengths", len(tokens))]
    for row, length in enumerate(lengths):
        if not 1 <= length <= tokens.shape[1]:
            raise ServingError(
                f"sequence_lengths, row {row}: got {length}, "
                f"wanted 1 to {tokens.shape[1]} (the width of tokens)"
            )
    return [tokens[row, :length].tolist() for row, length in enumerate(lengths)]


def _decode_conversation(row: int, text: str) -> Text:
    """Parse the conversation of a row; raise ServingError with the row number if it is invalid."""
    try:
        value = read_json(text)
    except ServingError as error:
        raise ServingError(f"conversations, row {row}: {error}") from None
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages:
        raise ServingError(
            f"conversations, row {row}: got {text[:80]}, "
            "wanted a non-empty list of messages, or an object with messages"
        )
    try:
        return read_text(value)
    except DataError as error:
        raise ServingError(f"row {row}: {error}") from error
