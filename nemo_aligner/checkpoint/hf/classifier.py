"""Score samples with published Hugging Face reward models, in transformers.

The models are not converted. They run as their authors run them
(``AutoModelForSequenceClassification``), so that their rewards can be compared with those of this
package. ``nemo-aligner evaluate`` uses this module for ``hf_model=``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from nemo_aligner.checkpoint.conversion_cache import TOKENIZER_FILES, find_or_download
from nemo_aligner.checkpoint.hf.body_with_head import (
    length_dependent_rope,
    load_with_head,
    reset_dynamic_rope,
)
from nemo_aligner.checkpoint.hf.heads import (
    READOUT_KEY,
    REWARD_TOKEN_KEY,
    check_are_rewards,
    find_head,
    is_of_head,
    reads_steps,
)
from nemo_aligner.checkpoint.hf.scored_token import (
    check_reward_token,
    find_skipped_pad,
    pad_id_of,
)
from nemo_aligner.checkpoint.hf.source import (
    REWARD_SUFFIX,
    find_exported_contract,
    open_source,
)
from nemo_aligner.checkpoint.hf.transformers_classes import load_pretrained
from nemo_aligner.checkpoint.safe_load import bounded_torch_load, read_json
from nemo_aligner.checkpoint.weights.store import check_finite
from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import torch_dtype
from nemo_aligner.contract.chat_template import ChatTemplate
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
from nemo_aligner.contract.principles import refuse_principle
from nemo_aligner.contract.readout import Readout
from nemo_aligner.contract.rendered import check_rendered
from nemo_aligner.contract.scorer import OnError, RowValues, ScoredRows, score_encodable
from nemo_aligner.contract.template_check import TemplateReading, freeze_date
from nemo_aligner.contract.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.contract.turns import TurnMarks
from nemo_aligner.distributed.collectives import current_device
from nemo_aligner.utils.console import Watch, unwatched
from nemo_aligner.utils.errors import CheckpointError, DataError, one_line, shown

# transformers names outputs LABEL_0, LABEL_1, ... if a model's config does not name them.
_UNNAMED = "LABEL_"
# transformers writes about 1e30 into a tokenizer's model_max_length for "no limit".
_NO_LENGTH = 10**9


@dataclass(frozen=True)
class HfRewardModel:
    """Scores samples with a model of transformers.

    Samples are tokenized by the scoring contract in the model's folder, or by the rules of its
    tokenizer if there is no contract.

    Attributes:
        tokenizer: tokenizer of transformers.
        model: reward model of transformers, on its device.
        seq_length: most tokens of a sample: the limit of the model or of the tokenizer, whichever
            is smaller; None if neither has a limit.
        batch_tokens: most tokens of a batch, including padding.
        watch: called after each batch with the number of finished samples and the number of all
            samples, to show progress.
        adds_eos: whether EOS is appended to raw texts, as TRL's RewardTrainer does.
        contract: scoring contract in the model's folder; None if this package did not export the
            model.
        contract_tokenizer: tokenizer for the contract; None without a contract.
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
        """Names of the rewards, from ``id2label``; "reward" for a single output without a name."""
        means = getattr(self.model.config, "label_means", None)
        if self._readout is not None and means:
            return tuple(means)
        labels = self.model.config.id2label
        names = tuple(str(labels[number]) for number in range(self.model.config.num_labels))
        is_unnamed = len(names) == 1 and names[0].startswith(_UNNAMED)
        return ("reward",) if is_unnamed else names

    def check_are_rewards(self, remedy: str) -> None:
        """Raise CheckpointError if the model is a classifier, whose logits are not rewards.

        See ``heads.check_are_rewards``. ``remedy`` tells the user what to do if they are rewards.
        """
        config = self.model.config
        classes = [str(name) for name in config.architectures or []]
        may_be_classes = any(name.endswith(REWARD_SUFFIX) for name in classes)
        names = self.attributes if may_be_classes else ()
        check_are_rewards(getattr(config, "problem_type", None), names, remedy)

    @property
    def _pad_id(self) -> int | None:
        return pad_id_of(self.model.config.get_text_config().pad_token_id)

    @cached_property
    def _readout(self) -> Readout | None:
        """Rule that computes rewards from logits of bins; None if the logits are the rewards."""
        readout = getattr(self.model.config, READOUT_KEY, None)
        return None if readout is None else Readout.from_json(json.dumps(readout))

    def encode(self, text: Text) -> EncodedText:
        """Tokenize a sample.

        Raises:
            OverlongError: the sample has more than ``seq_length`` tokens.
            TurnMarkError: a message contains the chat template's own markers.
            DataError: there is no chat template, the template rejects the sample, or the sample is
                empty.
        """
        if self.contract is not None and self.contract_tokenizer is not None:
            return self.contract.encode(self.contract_tokenizer, text)
        ids = self._encode_to_ids(text)
        if not ids:
            raise DataError("the sample has no tokens: it is empty")
        if self.seq_length is not None and len(ids) > self.seq_length:
            raise OverlongError(f"got {len(ids)} tokens, wanted at most {self.seq_length}")
        return EncodedText(ids, False)

    def _encode_to_ids(self, text: Text) -> list[int]:
        """Tokenize a sample, and append the reward token if the model has one."""
        ids = self._tokenize(read_text(text))
        token_id: int | None = getattr(self.model.config, REWARD_TOKEN_KEY, None)
        return ids if token_id is None or ids[-1:] == [token_id] else [*ids, token_id]

    def _tokenize(self, text: str | Messages | Conversation) -> list[int]:
        if isinstance(text, str):
            eos = self.tokenizer.eos_token
            ends = not self.adds_eos or eos is None or text.endswith(eos)
            return list(self.tokenizer(text if ends else text + eos).input_ids)
        if not self.tokenizer.chat_template:
            raise NoTemplateError(
                "this sample is a conversation, but the tokenizer has no chat template"
            )
        refuse_principle(text, "a model that transformers runs without a scoring contract")
        # Reject messages that contain the template's markers of a turn: they could imitate another
        # turn.
        self._turn_marks.check(text)
        rendered = self._render(self._reading.adapt(text))
        check_rendered(text, rendered)
        return list(self.tokenizer(rendered, add_special_tokens=False).input_ids)

    def _render(self, conversation: Messages | Conversation) -> str:
        """Render a conversation as text with the tokenizer's chat template.

        Raises:
            DataError: the tokenizer has no chat template, or the template rejects the conversation.
        """
        options: dict[str, Any] = {}
        if isinstance(conversation, Conversation):
            options = {"tools": conversation.tools, "documents": conversation.documents}
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages_of(conversation), tokenize=False, **options
                )
            )
        except Exception as error:  # templates, and Jinja itself, may raise anything
            raise DataError(f"the chat template refuses this sample: {one_line(error)}") from error

    @cached_property
    def _reading(self) -> TemplateReading:
        templates = self.tokenizer.chat_template
        sources = templates.values() if isinstance(templates, dict) else [templates]
        names = frozenset().union(*(ChatTemplate(source).names for source in sources))
        return TemplateReading(self._render, names)

    @cached_property
    def _turn_marks(self) -> TurnMarks:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        tokenizer = None
        if backend is not None:
            tokenizer = Tokenizer({"tokenizer.json": backend.to_str().encode()}, "tokenizer")
        return TurnMarks.of(self._render, tokenizer)

    def count_reply_tokens(self, texts: Sequence[Text]) -> list[int]:
        """Count the tokens of the response in each sample, without the prompt."""
        replies = [reply_of(read_text(text)) for text in texts]
        return [len(self.tokenizer(reply, add_special_tokens=False).input_ids) for reply in replies]

    def score_rows(self, samples: Sequence[Text], *, on_error: OnError = "nan") -> ScoredRows:
        """Compute the rewards of samples, as every ``Scorer`` (``data/``) does.

        For an export of this package, the label means in its ``config.json`` are added.

        Raises:
            DataError: with ``on_error="raise"``, as in ``encode``; the message has the index of
                the sample.
        """
        return score_encodable(samples, self.encode, self._score_encoded, on_error=on_error)

    def _score_encoded(self, samples: Sequence[EncodedText]) -> RowValues:
        return RowValues(self._score([sample.token_ids for sample in samples]))

    def _score(self, token_lists: Sequence[list[int]]) -> np.ndarray:
        """Compute the rewards, float32 ``[N, A]``, of samples given as token ids."""
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
        """Yield the indices of each batch: samples of similar length, so that padding is small."""
        # transformers finds the last token by the pad token. Without a pad token, or if RoPE
        # depends on the longest sequence of a batch, each batch has only one sample.
        is_single = self._pad_id is None or bool(length_dependent_rope(self.model))
        rows: list[int] = []
        # Begin with the longest samples, so that a batch that does not fit into memory fails at
        # once.
        for row in sorted(range(len(token_lists)), key=lambda row: -len(token_lists[row])):
            longest = len(token_lists[rows[0]]) if rows else 0
            if rows and (is_single or longest * (len(rows) + 1) > self.batch_tokens):
                yield rows
                rows = []
            rows = [*rows, row]
        if rows:
            yield rows

    @torch.no_grad()
    def _logits(self, token_lists: Sequence[list[int]]) -> np.ndarray:
        """Compute the logits, float32 ``[N, outputs]``, of one batch."""
        reset_dynamic_rope(self.model)
        longest = max(map(len, token_lists))
        # Without a pad token the batch has one sample, so that no padding is needed.
        ids = torch.full((len(token_lists), longest), self._pad_id or 0)
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
    """Load a folder or a model on the hub onto this rank's device, without running its code.

    Args:
        name: the folder, or the model's name on the hub.
        precision: precision of the weights; None means fp32.
        batch_tokens: see ``HfRewardModel``.
        watch: see ``HfRewardModel``.
        head: which head to read, see ``find_head``. None means transformers' class if it loads all
            tensors of the head; otherwise the head that ``find_head`` finds.

    Raises:
        CheckpointError: transformers cannot load the model, the model has no reward head, a weight
            is NaN or infinite, or the scoring contract in its folder belongs to another model.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    # Look for the contract first, because this call reports a missing folder at once. transformers
    # would query the hub for the folder's name several times.
    exported = find_exported_contract(name)
    dtype = torch_dtype(precision or Precision.fp32)
    tokenizer = _load_tokenizer(name)
    # Llama 3's template writes today's date into the prompt, so a reward would change every day.
    tokenizer.chat_template = _freeze_dates(tokenizer)
    model = _load_with_layout(name, dtype, head) if head else _load_model(name, dtype)
    model = model.to(current_device()).eval()
    for weight, values in model.named_parameters():
        check_finite(values.detach(), f"{name}: {weight}")
    length = _max_tokens(tokenizer, model)
    loaded = HfRewardModel(tokenizer, model, length, batch_tokens, watch)
    return loaded if exported is None else _add_contract(loaded, exported)


def _add_contract(loaded: HfRewardModel, path: Path) -> HfRewardModel:
    """Return a copy of ``loaded`` that tokenizes samples by the scoring contract at ``path``.

    Raises:
        CheckpointError: the names of the rewards or the tokenizer in the folder are not those of
            the contract.
    """
    contract = ScoringContract.from_dict(read_json(path))
    tokenizer = load_tokenizer(path.parent)
    # Anybody may have edited the template in the folder, so make sure that it does not loop
    # forever.
    contract.check_template_ends(tokenizer)
    for key, value, expected in (
        ("id2label", loaded.attributes, contract.attributes),
        ("tokenizer fingerprint", tokenizer.fingerprint, contract.tokenizer_fingerprint),
    ):
        if value != expected:
            raise CheckpointError(
                f"{path}: {key}: the model has {shown(value)}, but the scoring contract has "
                f"{shown(expected)}. Use an unchanged copy of the exported folder"
            )
    return replace(loaded, contract=contract, contract_tokenizer=tokenizer)


def _load_tokenizer(name: str) -> Any:
    """Load the tokenizer of the model ``name`` with transformers.

    ``tokenizer.json`` is run as it is, as in transformers 4 and in a conversion. Some classes of
    transformers 5, such as its LlamaTokenizer, replace the normalizer and pre-tokenizer in it, so
    they are used only if there is no such file, and for the BOS and EOS that only a class defines,
    as that of GPT-2 does.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    has_rules = (find_or_download(name, TOKENIZER_FILES) / "tokenizer.json").is_file()
    try:
        tokenizer = load_pretrained(PreTrainedTokenizerFast if has_rules else AutoTokenizer, name)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {_NOT_LOADED}{error}") from error
    missing = [key for key in ("bos_token", "eos_token") if getattr(tokenizer, key) is None]
    if missing:
        with suppress(CheckpointError):  # a class whose code is in the checkpoint
            of_class = load_pretrained(AutoTokenizer, name)
            for key in missing:
                token = getattr(of_class, key)
                if token is not None and token in tokenizer.get_vocab():
                    setattr(tokenizer, key, token)
    return tokenizer


def _freeze_dates(tokenizer: Any) -> Any:
    """Return the tokenizer's chat template with a fixed date in place of today's.

    A reward must not depend on the day. ``convert`` fixes the date in the same way.

    A tokenizer with several templates has a dict of them by name, and the result is a dict, too.
    """
    templates, bos, eos = tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token

    def freeze(source: str) -> str:
        return freeze_date(ChatTemplate(source, bos or "", eos or "")).source

    if isinstance(templates, dict):
        return {name: freeze(source) for name, source in templates.items()}
    return templates and freeze(templates)


_NOT_LOADED = "transformers cannot load a reward model from it: "


def _load_model(name: str, dtype: torch.dtype) -> Any:
    """Load the reward model ``name`` with transformers, together with its trained head.

    transformers' ``ForSequenceClassification`` is used if it has every tensor of the checkpoint's
    head. Otherwise transformers loads the decoder only, and ``_load_with_layout`` adds the head.

    Raises:
        CheckpointError: neither of the two can load the model.
    """
    from transformers import AutoModelForSequenceClassification

    try:
        with bounded_torch_load():  # the weights may be pickles
            model, report = load_pretrained(
                AutoModelForSequenceClassification, name, dtype=dtype, output_loading_info=True
            )
    except CheckpointError as error:
        problem = f"{_NOT_LOADED}{error}"
    else:
        missing = ", ".join(sorted(map(str, report["missing_keys"]))[:3])
        # transformers initialises tensors that the checkpoint lacks at random, and ignores tensors
        # of the checkpoint that its class lacks. Neither gives the trained rewards.
        if not missing and not any(map(is_of_head, map(str, report["unexpected_keys"]))):
            return model
        problem = "transformers' class does not have all tensors of the model's head"
        if missing:
            problem = f"weights are missing: {missing}, so it is not a trained reward model"
    try:
        return _load_with_layout(name, dtype)
    except CheckpointError as error:
        detail = "" if str(error) in problem else f" ({error})"
        raise CheckpointError(f"{name}: {problem}{detail}") from error


def _load_with_layout(name: str, dtype: torch.dtype, choice: str | None = None) -> Any:
    """Load transformers' decoder, and put the checkpoint's head on top (see ``heads``).

    Args:
        name: a folder, or a model's name on the hub.
        dtype: dtype of the decoder; the head is fp32.
        choice: which head to read, see ``find_head``.

    Raises:
        CheckpointError: the checkpoint has no such head, or its head reads steps or the mean of a
            response, which this module does not support.
    """
    with TemporaryDirectory() as scratch:
        source = open_source(name)
        head = find_head(source, choice)
        if head is None:
            raise CheckpointError("it has no reward head")
        contract = source.contract or {}
        if reads_steps(source) or contract.get("reply_marker") is not None:
            raise CheckpointError(
                "its head reads steps or the mean of a response, which is supported only in "
                ".nemo archives. Convert the model with `nemo-aligner convert`"
            )
        if head.rows:
            source.save_tokenizer(Path(scratch) / "tokenizer")
            head = head.with_rows_of(load_tokenizer(Path(scratch) / "tokenizer"))
        pad_id = find_skipped_pad(source, head)
        check_reward_token(head, source.config.get(REWARD_TOKEN_KEY))
        return load_with_head(name, source, head, dtype, pad_id)


def _max_tokens(tokenizer: Any, model: Any) -> int | None:
    """Return the most tokens that a sample may have; None if there is no limit."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    # With dynamic RoPE, samples may be longer than the model's positions by this factor.
    if positions and rope.get("rope_type") == "dynamic":
        positions *= rope["factor"]
    limits = [limit for limit in (positions, tokenizer.model_max_length) if limit]
    return min((int(limit) for limit in limits if limit < _NO_LENGTH), default=None)
