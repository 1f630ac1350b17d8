"""Reward models of Hugging Face: scored by transformers, or read for conversion.

Scoring runs the model as its authors do (``AutoModelForSequenceClassification``), so that its
rewards can be compared with ours. Conversion needs only the names of its outputs and a contract.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch

from nemo_aligner.checkpoint.decoder_tensors import attribute_names
from nemo_aligner.checkpoint.hf.heads import (
    READOUT_KEY,
    REWARD_TOKEN_KEY,
    FoundHead,
    find_head,
    forget_lengths,
    is_of_head,
    load_with_head,
    reads_steps,
    rotary_by_length,
)
from nemo_aligner.checkpoint.hf.source import Source, open_source
from nemo_aligner.checkpoint.nemo.open import CONTRACT_NAME
from nemo_aligner.checkpoint.weights.safe_pickle import bounded_torch_load
from nemo_aligner.config.common import Precision, RewardModelType
from nemo_aligner.config.dtypes import torch_dtype
from nemo_aligner.config.model import (
    DataConfig,
    HeadConfig,
    ModelConfig,
    RegressionConfig,
    ScoredPosition,
)
from nemo_aligner.contract.contract import (
    EncodedText,
    NoTemplateError,
    OverlongError,
    ScoringContract,
)
from nemo_aligner.contract.fields import are_numbers
from nemo_aligner.contract.from_settings import build_contract
from nemo_aligner.contract.messages import (
    Conversation,
    Messages,
    Text,
    messages_of,
    read_text,
    reply_of,
)
from nemo_aligner.contract.readout import BINS, Readout
from nemo_aligner.contract.template_check import TemplateReading, freeze_date
from nemo_aligner.contract.templates import names_in
from nemo_aligner.contract.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.contract.turns import TurnMarks
from nemo_aligner.distributed.collectives import current_device
from nemo_aligner.utils.console import Watch, unwatched
from nemo_aligner.utils.errors import CheckpointError, DataError, one_line, shown

# transformers names outputs LABEL_0, LABEL_1, ... where a model's config names none.
_UNNAMED = "LABEL_"
# transformers writes about 1e30 into a tokenizer's model_max_length for "no limit".
_NO_LENGTH = 10**9


@dataclass(frozen=True)
class HfRewardModel:
    """Scores texts by the tokenizer's own rules and chat template.

    Attributes:
        seq_length: most tokens of a text, by the stricter of model and tokenizer; None: any.
        batch_tokens: most tokens in a batch, padding included.
    """

    tokenizer: Any
    model: Any
    seq_length: int | None
    batch_tokens: int
    watch: Watch = unwatched

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of its outputs; "reward" for a single unnamed one."""
        means = getattr(self.model.config, "label_means", None)
        if self._readout is not None and means:
            return tuple(means)
        labels = self.model.config.id2label
        names = tuple(str(labels[number]) for number in range(self.model.config.num_labels))
        is_unnamed = len(names) == 1 and names[0].startswith(_UNNAMED)
        return ("reward",) if is_unnamed else names

    @cached_property
    def _readout(self) -> Readout | None:
        """How rewards follow from logits of bins, if our export says so."""
        found = getattr(self.model.config, READOUT_KEY, None)
        return None if found is None else Readout.from_json(json.dumps(found))

    def encode(self, text: Text) -> EncodedText:
        """Tokenize a text.

        Raises:
            OverlongError: it has more than ``seq_length`` tokens.
            TurnMarkError: a message contains the chat template's own markers.
            DataError: there is no chat template, it refuses the text, or no token is left.
        """
        ids = self._ids(text)
        if not ids:
            raise DataError("the text has no tokens: it is empty")
        if self.seq_length is not None and len(ids) > self.seq_length:
            raise OverlongError(f"got {len(ids)} tokens, wanted at most {self.seq_length}")
        return EncodedText(ids, False)

    def _ids(self, text: Text) -> list[int]:
        ids = self._ids_of(read_text(text))
        token_id: int | None = getattr(self.model.config, REWARD_TOKEN_KEY, None)
        return ids if token_id is None or ids[-1:] == [token_id] else [*ids, token_id]

    def _ids_of(self, text: str | Messages | Conversation) -> list[int]:
        if isinstance(text, str):
            return list(self.tokenizer(text).input_ids)
        if not self.tokenizer.chat_template:
            raise NoTemplateError("this text is a conversation, and the tokenizer has no template")
        # A message with the template's own markers could pose as another turn, and be scored so.
        self._turn_marks.check(text)
        written = self._write(self._reading.adapt(text))
        return list(self.tokenizer(written, add_special_tokens=False).input_ids)

    def _write(self, conversation: Messages | Conversation) -> str:
        beside: dict[str, Any] = {}
        if isinstance(conversation, Conversation):
            beside = {"tools": conversation.tools, "documents": conversation.documents}
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages_of(conversation), tokenize=False, **beside
                )
            )
        except Exception as error:  # whatever the template's author raises, or Jinja
            raise DataError(f"the chat template refuses this text: {one_line(error)}") from error

    @cached_property
    def _reading(self) -> TemplateReading:
        templates = self.tokenizer.chat_template
        texts = templates.values() if isinstance(templates, dict) else [templates]
        return TemplateReading(self._write, frozenset().union(*map(names_in, texts)))

    @cached_property
    def _turn_marks(self) -> TurnMarks:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        known = None
        if backend is not None:
            known = Tokenizer({"tokenizer.json": backend.to_str().encode()}, "tokenizer")
        return TurnMarks.of(self._write, known)

    def count_reply_tokens(self, texts: Sequence[Text]) -> list[int]:
        """Count the tokens of every text's reply alone."""
        replies = [reply_of(read_text(text)) for text in texts]
        return [len(self.tokenizer(one, add_special_tokens=False).input_ids) for one in replies]

    def score(self, texts: Sequence[Text]) -> np.ndarray:
        """Score texts: ``[N, A]`` float32, with the mean labels that our exports name added.

        Raises:
            DataError: as ``encode``; the message has the text's number.
        """
        return self.score_token_lists([self._encode_numbered(*each) for each in enumerate(texts)])

    def score_token_lists(self, token_lists: Sequence[list[int]]) -> np.ndarray:
        """``score`` for the token ids of texts that ``encode`` accepted."""
        total = len(token_lists)
        rewards = np.zeros((total, self.model.config.num_labels), dtype=np.float32)
        done = 0
        self.watch(0, total)
        for rows in self._batches(token_lists):
            rewards[rows] = self._logits([token_lists[row] for row in rows])
            done += len(rows)
            self.watch(done, total)
        if self._readout is not None:
            rewards = self._readout.rewards(rewards)
        means = getattr(self.model.config, "label_means", None) or {}
        return rewards + np.array([means.get(name, 0) for name in self.attributes], np.float32)

    def _encode_numbered(self, number: int, text: Text) -> list[int]:
        try:
            return self.encode(text).token_ids
        except DataError as error:
            raise DataError(f"text {number}: {error}") from error

    def _batches(self, token_lists: Sequence[list[int]]) -> Iterator[list[int]]:
        """Yield rows of similar length, the longest first, so that little is padded."""
        has_no_pad = self.model.config.get_text_config().pad_token_id is None
        is_alone = has_no_pad or bool(rotary_by_length(self.model))
        rows: list[int] = []
        for row in sorted(range(len(token_lists)), key=lambda row: -len(token_lists[row])):
            longest = len(token_lists[rows[0]]) if rows else 0
            if rows and (is_alone or longest * (len(rows) + 1) > self.batch_tokens):
                yield rows
                rows = []
            rows = [*rows, row]
        if rows:
            yield rows

    @torch.no_grad()
    def _logits(self, token_lists: Sequence[list[int]]) -> np.ndarray:
        forget_lengths(self.model)
        longest = max(map(len, token_lists))
        pad_id = self.model.config.get_text_config().pad_token_id or 0
        ids = torch.full((len(token_lists), longest), pad_id)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(token_lists):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        device = self.model.device
        logits = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return logits.float().cpu().numpy()


def load_hf_reward_model(
    name: str,
    precision: Precision | None,
    batch_tokens: int,
    watch: Watch = unwatched,
    head: str | None = None,
) -> HfRewardModel:
    """Load a folder or a model of the hub onto this rank's device; runs no code from it.

    Args:
        precision: None is fp32.
        head: see ``find_head``; None is that of transformers' class, if it is whole.

    Raises:
        CheckpointError: transformers cannot load it, or it has no head of its own.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = torch_dtype(precision or Precision.fp32)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # third-party code on files that may be wrong
        raise CheckpointError(f"{name}: {_NOT_LOADED}{one_line(error)}") from error
    tokenizer.chat_template = _without_date(tokenizer)
    model = _with_own_head(name, dtype, head) if head else _load(name, dtype)
    model = model.to(current_device()).eval()
    return HfRewardModel(tokenizer, model, _length(tokenizer, model), batch_tokens, watch)


def _without_date(tokenizer: Any) -> Any:
    """Its chat template, or its several by their names, as a conversion has them."""
    templates, bos, eos = tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token
    if isinstance(templates, dict):
        return {name: freeze_date(each, bos or "", eos or "") for name, each in templates.items()}
    return templates and freeze_date(templates, bos or "", eos or "")


_NOT_LOADED = "transformers loads no reward model from it: "


def _load(name: str, dtype: torch.dtype) -> Any:
    """Load transformers' class, or its decoder with another head if the class has not all of it."""
    from transformers import AutoModelForSequenceClassification

    try:
        with bounded_torch_load():  # its weights may be pickles
            model, report = AutoModelForSequenceClassification.from_pretrained(
                name, dtype=dtype, output_loading_info=True
            )
    except Exception as error:  # third-party code on files that may be wrong
        lost = _NOT_LOADED + one_line(error)
    else:
        missing = ", ".join(sorted(map(str, report["missing_keys"]))[:3])
        # transformers draws at random what is missing, and leaves out what its class does not have.
        if not missing and not any(map(is_of_head, map(str, report["unexpected_keys"]))):
            return model
        lost = f"got no weights for {missing}, wanted a trained reward model"
    try:
        return _with_own_head(name, dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {lost} ({error})") from error


def _with_own_head(name: str, dtype: torch.dtype, choice: str | None = None) -> Any:
    """Load a model whose head transformers' class does not have, by its layout."""
    with TemporaryDirectory() as scratch:
        found = open_source(name)
        head = find_head(found, choice)
        if head is None:
            raise CheckpointError("it has no reward head")
        contract = found.contract or {}
        if reads_steps(found) or contract.get("reply_marker") is not None:
            raise CheckpointError("its head reads steps or means: wanted its conversion to .nemo")
        if head.rows:
            found.save_tokenizer(Path(scratch) / "tokenizer")
            head = head.with_rows_of(load_tokenizer(Path(scratch) / "tokenizer"))
        return load_with_head(name, found, head, dtype)


def _length(tokenizer: Any, model: Any) -> int | None:
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if positions and rope.get("rope_type") == "dynamic":  # made for longer texts than it saw
        positions *= rope["factor"]
    lengths = [each for each in (positions, tokenizer.model_max_length) if each]
    return min((int(each) for each in lengths if each < _NO_LENGTH), default=None)


# For conversion: the names of a reward model's outputs, and its scoring contract.

MAX_DEFAULT_SEQ_LENGTH = 4096


def labels_of(
    found: Source, head: FoundHead | None, attributes: Sequence[str] | None
) -> list[str] | None:
    """Names of a reward model's outputs, in order; None for a base model.

    Args:
        attributes: names to use instead of those of ``id2label``.

    Raises:
        CheckpointError: its outputs are not rewards, or have no fitting names.
        ConfigError: the given names do not fit.
    """
    if head is None:
        return None
    if reads_steps(found):
        return _labels_of_steps(found, head, attributes)
    problem = found.config.get("problem_type")
    if problem not in (None, "regression"):
        raise CheckpointError(
            f"problem_type: got {shown(problem)}, wanted 'regression': the outputs of a classifier "
            "are no rewards"
        )
    if attributes is not None:
        return list(attribute_names(attributes, head.outputs))
    labels, contract = _stated_labels(found, head), _contract_of_bins(found)
    if contract is None:
        return labels
    if labels != contract.output_names:
        raise CheckpointError(
            f"config.json: id2label: got {shown(labels)}, {CONTRACT_NAME} wants "
            f"{shown(contract.output_names)}"
        )
    return list(contract.attributes)


def num_outputs(found: Source, head: FoundHead, labels: Sequence[str]) -> int:
    """Outputs that a head of these ``labels_of`` has to have; any, of a stranger's steps."""
    if reads_steps(found):
        if found.contract is None:
            return head.outputs
        wanted = ScoringContract.from_dict(found.contract).num_outputs
        return max(wanted, 2)  # one reward is exported as two outputs
    contract = _contract_of_bins(found)
    return len(labels if contract is None else contract.output_names)


def _contract_of_bins(found: Source) -> ScoringContract | None:
    """The contract of our export of a head of bins, which has several outputs an attribute."""
    if found.contract is None or found.contract.get("readout") is None:
        return None
    return ScoringContract.from_dict(found.contract)


def _labels_of_steps(found: Source, head: FoundHead, attributes: Sequence[str] | None) -> list[str]:
    """One name: a head of two outputs says how probable a wrong and a right step are.

    Our exports have those of their contracts.
    """
    if found.contract is not None:
        contract = ScoringContract.from_dict(found.contract)
        if not contract.has_steps:
            raise CheckpointError(
                f"architectures: got {shown(found.config.get('architectures'))}, which reads "
                f"steps, but {CONTRACT_NAME} has none (scored_position: {contract.scored_position})"
            )
        return list(contract.attributes)
    if head.outputs > 2:
        name = head.names["weight"]
        raise CheckpointError(
            f"{name}: got {head.outputs} rows, wanted 2 (a step is wrong or right) or 1, as "
            f"architectures is {shown(found.config.get('architectures'))}; head none takes its "
            "body as a base model"
        )
    return ["reward"] if attributes is None else list(attribute_names(attributes, 1))


def _stated_labels(found: Source, head: FoundHead) -> list[str]:
    if head.rows:  # what a config may say of labels is not about them
        return ["reward"]
    names = found.config.get("id2label")
    try:
        if names is None:
            names = {number: f"LABEL_{number}" for number in range(_num_labels(found, head))}
        by_number = {int(key): str(names[key]) for key in names}
        labels = [by_number[number] for number in range(len(names))]
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"id2label: got {shown(names)}, wanted names for the numbers from 0 on (or num_labels)"
        ) from error
    return ["reward"] if labels == ["LABEL_0"] else labels


def _num_labels(found: Source, head: FoundHead) -> int:
    count = found.config.get("num_labels", head.outputs)
    if count != head.outputs:
        raise CheckpointError(
            f"num_labels: got {shown(count)} and {head.outputs} rows of {head.names['weight']}, "
            "wanted as many"
        )
    return head.outputs


class ContractOptions(NamedTuple):
    """Options of a new contract, as of ``convert_hf_to_nemo``; None where not given."""

    template: str | None = None
    seq_length: int | None = None
    attributes: Sequence[str] | None = None
    step_separator: str | None = None
    reads: ScoredPosition | None = None

    @property
    def asks_for_steps(self) -> bool:
        """True if they say how steps are read."""
        return self.step_separator is not None or self.reads is not None


def refuse_options(found: Source, labels: list[str] | None, given: ContractOptions) -> None:
    """Refuse options of a contract where there is none to make by them.

    Raises:
        CheckpointError: there are options, but no contract to make by them.
    """
    makes_contract = labels is not None and found.contract is None
    if not makes_contract and any(each is not None for each in given):
        why = "a base model has none" if labels is None else f"it brings its own, {CONTRACT_NAME}"
        raise CheckpointError(f"got options for a scoring contract, but {why}")


def contract_of(
    found: Source,
    labels: list[str] | None,
    tokenizer: Tokenizer,
    precision: Precision,
    longest: int,
    given: ContractOptions,
    head: FoundHead | None,
) -> ScoringContract | None:
    """Contract of a reward model: its own if this package exported it, else a new one.

    Args:
        labels: as ``labels_of`` gives them.
        longest: tokens of the model's longest text.

    Raises:
        CheckpointError: its own contract is of another model, or the tokenizer lacks what a new one
            needs.
        ConfigError: the template is not found, or unfit.
    """
    if labels is None:
        return None
    if found.contract is not None:
        contract = ScoringContract.from_dict(found.contract)
        if found.remakes_tokenizer:
            fingerprint = tokenizer.fingerprint
            contract = dataclasses.replace(contract, tokenizer_fingerprint=fingerprint)
        contract.check_template_ends(tokenizer)
        _check_own(contract, labels, tokenizer.fingerprint)
        return contract.with_dtype(precision)
    contract = _new_contract(found, labels, tokenizer, precision, longest, given)
    if contract.has_steps and head is not None and (head.outputs, len(labels)) == (2, 1):
        contract = contract.with_readout(Readout(BINS, ((0.0, 1.0),)))
    is_ranking = contract.reward_model_type == RewardModelType.binary_ranking.value
    statistics: list[Any] = [found.config.get(key) for key in ("mean", "std")]
    if is_ranking and are_numbers(statistics) and statistics[1] > 0:
        # OpenRLHF's, which it subtracts and divides by only if told to (--normalize_reward).
        mean, std = statistics
        contract = contract.with_statistics([mean], [std], "OpenRLHF's evaluation (config.json)")
    token_id = found.config.get(REWARD_TOKEN_KEY)
    if token_id is not None:
        contract = dataclasses.replace(contract, reward_token_id=token_id)
        if token_id >= tokenizer.vocab_size:
            raise CheckpointError(
                f"{REWARD_TOKEN_KEY}: got {token_id}, wanted a token of {tokenizer.vocab_size}"
            )
    if given.template is not None and not contract.template:
        raise CheckpointError(
            f"template: got {given.template!r}, but the tokenizer has no chat template"
        )
    return dataclasses.replace(contract, attributes=tuple(labels))


def _new_contract(
    found: Source,
    labels: list[str],
    tokenizer: Tokenizer,
    precision: Precision,
    longest: int,
    given: ContractOptions,
) -> ScoringContract:
    has_steps = reads_steps(found) or given.asks_for_steps
    is_ranking = len(labels) == 1 and not has_steps
    reads, step_separator = given.reads, given.step_separator
    if reads is None:
        reads = ScoredPosition.step_marks if has_steps else ScoredPosition.last_token
    if reads is ScoredPosition.step_marks:
        step_separator = _separator(tokenizer, step_separator)
    settings = ModelConfig(
        reward_model_type=RewardModelType.binary_ranking
        if is_ranking
        else RewardModelType.regression,
        regression=RegressionConfig(attributes=labels),
        data=DataConfig(
            template=given.template,
            seq_length=given.seq_length or min(longest, MAX_DEFAULT_SEQ_LENGTH),
            step_separator=step_separator,
        ),
        head=HeadConfig(reads=reads),
    )
    return build_contract(settings, tokenizer, precision)


# The step token of Qwen2.5-Math-PRM.
_STEP_TOKEN = "<extra_0>"


def _separator(tokenizer: Tokenizer, given: str | None) -> str:
    """The text behind each step, which checkpoints do not say."""
    if given is not None:
        return given
    try:
        tokenizer.token_id(_STEP_TOKEN)
    except DataError as error:
        raise CheckpointError(
            f"step_separator: got none, and the tokenizer has no {_STEP_TOKEN}; wanted the text "
            "behind each step, at which the head reads (a line break, if TRL trained it)"
        ) from error
    return _STEP_TOKEN


def _check_own(contract: ScoringContract, labels: Sequence[str], fingerprint: str) -> None:
    for name, got, wanted in (
        ("config.json: id2label", list(labels), list(contract.attributes)),
        ("tokenizer fingerprint", fingerprint, contract.tokenizer_fingerprint),
    ):
        if got != wanted:
            raise CheckpointError(
                f"{name}: got {shown(got)}, {CONTRACT_NAME} wants {shown(wanted)}"
            )
