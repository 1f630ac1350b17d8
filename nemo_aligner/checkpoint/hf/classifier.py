"""Reward models of Hugging Face, scored by transformers.

They run as their authors run them (``AutoModelForSequenceClassification``), so that their rewards
can be compared with ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from nemo_aligner.checkpoint.hf.heads import (
    READOUT_KEY,
    REWARD_TOKEN_KEY,
    check_are_rewards,
    find_head,
    is_of_head,
    length_dependent_rope,
    load_with_head,
    reads_steps,
    reset_dynamic_rope,
)
from nemo_aligner.checkpoint.hf.source import (
    REWARD_SUFFIX,
    find_exported_contract,
    open_source,
)
from nemo_aligner.checkpoint.safe_load import bounded_torch_load, read_json
from nemo_aligner.checkpoint.weights.store import check_finite
from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import torch_dtype
from nemo_aligner.contract.contract import (
    EncodedText,
    NoTemplateError,
    OverlongError,
    ScoringContract,
)
from nemo_aligner.contract.messages import (
    Conversation,
    Messages,
    Text,
    messages_of,
    read_text,
    reply_of,
)
from nemo_aligner.contract.readout import Readout
from nemo_aligner.contract.scorer import OnError, RowValues, ScoredRows, score_encodable
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
    """Scores texts by the scoring contract in its folder, or else by the tokenizer's own rules.

    Attributes:
        seq_length: most tokens of a text, by the stricter of model and tokenizer; None: any.
        batch_tokens: most tokens in a batch, padding included.
        adds_eos: end raw texts with EOS, as TRL's RewardTrainer does.
        contract: of a model that this package exported; None for any other.
        contract_tokenizer: the one that the contract names; None without a contract.
    """

    tokenizer: Any
    model: Any
    seq_length: int | None
    batch_tokens: int
    watch: Watch = unwatched
    adds_eos: bool = False
    contract: ScoringContract | None = None
    contract_tokenizer: Tokenizer | None = None

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

    def check_are_rewards(self, remedy: str) -> None:
        """Refuse the logits of a classifier; see ``heads.check_are_rewards``."""
        config = self.model.config
        classes = [str(name) for name in config.architectures or []]
        may_be_classes = any(name.endswith(REWARD_SUFFIX) for name in classes)
        names = self.attributes if may_be_classes else ()
        check_are_rewards(getattr(config, "problem_type", None), names, remedy)

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
        if self.contract is not None and self.contract_tokenizer is not None:
            return self.contract.encode(self.contract_tokenizer, text)
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
            eos = self.tokenizer.eos_token
            ends = not self.adds_eos or eos is None or text.endswith(eos)
            return list(self.tokenizer(text if ends else text + eos).input_ids)
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

    def score_rows(self, samples: Sequence[Text], *, on_error: OnError = "nan") -> ScoredRows:
        """Score samples, with the mean labels that our exports name added; see ``Scorer``.

        Raises:
            DataError: with ``on_error="raise"``, as ``encode``; the message has the text's number.
        """
        return score_encodable(samples, self.encode, self._measure, on_error=on_error)

    def _measure(self, samples: Sequence[EncodedText]) -> RowValues:
        return RowValues(self._score([sample.token_ids for sample in samples]))

    def _score(self, token_lists: Sequence[list[int]]) -> np.ndarray:
        """Rewards ``[N, A]`` float32 of token ids."""
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

    def _batches(self, token_lists: Sequence[list[int]]) -> Iterator[list[int]]:
        """Yield rows of similar length, the longest first, so that little is padded."""
        # transformers finds the last token by the pad token; without one it takes only one text.
        has_no_pad = self.model.config.get_text_config().pad_token_id is None
        is_alone = has_no_pad or bool(length_dependent_rope(self.model))
        rows: list[int] = []
        # So a batch that does not fit into memory fails at once, too, and not at the end.
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
        reset_dynamic_rope(self.model)
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
        CheckpointError: transformers cannot load it, it has no head of its own, a weight is NaN or
            infinite, or the scoring contract in its folder is not of this model.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    # First: transformers would ask the hub for a missing folder again and again.
    exported = find_exported_contract(name)
    dtype = torch_dtype(precision or Precision.fp32)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # third-party code on files that may be wrong
        raise CheckpointError(f"{name}: {_NOT_LOADED}{one_line(error)}") from error
    # Llama 3's template writes today's date: a reward would change overnight.
    tokenizer.chat_template = _without_date(tokenizer)
    model = _with_own_head(name, dtype, head) if head else _load(name, dtype)
    model = model.to(current_device()).eval()
    for weight, values in model.named_parameters():
        check_finite(values.detach(), f"{name}: {weight}")
    length = _length(tokenizer, model)
    loaded = HfRewardModel(tokenizer, model, length, batch_tokens, watch)
    return loaded if exported is None else _by_contract(loaded, exported)


def _by_contract(loaded: HfRewardModel, path: Path) -> HfRewardModel:
    """The same model, whose texts are tokenized by the scoring contract in its folder."""
    contract = ScoringContract.from_dict(read_json(path))
    tokenizer = load_tokenizer(path.parent)
    # The template is the folder's: it might loop for ever.
    contract.check_template_ends(tokenizer)
    for key, got, wanted in (
        ("id2label", loaded.attributes, contract.attributes),
        ("tokenizer fingerprint", tokenizer.fingerprint, contract.tokenizer_fingerprint),
    ):
        if got != wanted:
            raise CheckpointError(f"{path}: {key}: got {shown(got)}, wanted {shown(wanted)}")
    return replace(loaded, contract=contract, contract_tokenizer=tokenizer)


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
        lost = "transformers' class has no place for a part of its head"
        if missing:
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
