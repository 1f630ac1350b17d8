"""Reward heads in Hugging Face checkpoints: the layouts that people publish, read and written back.

A layout is a line of ``LAYOUTS``: the names of a head's layers. All of them read the hidden state
behind the last norm at the last token of a text, and which token that is follows from the chat
template and the ``reward_token_id`` in the scoring contract. A reward that is read off rows of the
output layer becomes a matrix of its own when it is imported, so no later reader has to know them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.checkpoint.decoder_tensors import EMBEDDING
from nemo_aligner.checkpoint.hf.families import find_family
from nemo_aligner.checkpoint.hf.families.settings import is_tied
from nemo_aligner.checkpoint.hf.source import REWARD_SUFFIX, Source
from nemo_aligner.checkpoint.weights.save import LazyTensor
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.steps import MARKS
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.models.shape import HeadShape
from nemo_aligner.utils.errors import CheckpointError, short, shown


@dataclass(frozen=True)
class HeadLayout:
    """Names of a head's layers in a checkpoint.

    Attributes:
        last: prefix of the layer that gives the outputs; its name for people, too.
        hidden: prefix of the layer before it, with a ReLU between the two; None: there is none.
        by: software or models that write it.
    """

    last: str
    hidden: str | None = None
    by: str = ""

    def names(self) -> dict[str, str]:
        """Map our names of a head's tensors (``HeadShape.tensors``) to those in the checkpoint."""
        found = {"weight": f"{self.last}.weight", "bias": f"{self.last}.bias"}
        if self.hidden is not None:
            found |= {f"hidden.{kind}": f"{self.hidden}.{kind}" for kind in ("weight", "bias")}
        return found


LINEAR = HeadLayout("score", by="ForSequenceClassification, TRL's RewardTrainer")
TWO_LAYERS = HeadLayout("score.2", "score.0", by="Qwen2ForRewardModel, INF-ORM")
VALUE_LAYER = HeadLayout("v_head.summary", by="TRL's value head, LLaMA-Factory")
LAYOUTS = (
    LINEAR,
    TWO_LAYERS,
    VALUE_LAYER,
    HeadLayout("v_head.summary.2", "v_head.summary.0", by="GRM"),
    HeadLayout("value_head", by="OpenRLHF"),
    HeadLayout("regression_head", by="UltraRM, Eurus-RM"),
    HeadLayout("v_head", by="InternLM2ForRewardModel"),
)
# Name of OpenRLHF's head in a config.json; without it, "value_head" or "score".
PREFIX_KEY = "value_head_prefix"
# Token at which InternLM2's reward models read, in a config.json: they append it to every text.
REWARD_TOKEN_KEY = "reward_token_id"
# How rewards follow from logits of bins, in a config.json that this package exported.
READOUT_KEY = "readout"
# Heads that read each step, or each token, and not a text.
TOKEN_SUFFIX, STEP_SUFFIX = "ForTokenClassification", "ForProcessRewardModel"
# The last is Skywork-o1-Open-PRM's.
_STEP_READERS = (TOKEN_SUFFIX, STEP_SUFFIX, "ForPrmModel")
NO_HEAD, OUTPUT_LAYER_HEAD = "none", "lm_head:"
# Forms that a head of one matrix can be written in; the first is transformers' own.
SCORE_WITH_BIAS = "score.bias"
LINEAR_FORMS = (LINEAR.last, SCORE_WITH_BIAS, VALUE_LAYER.last)
# A tensor without columns may claim any number of rows at no cost.
_MOST_OUTPUTS = 10_000
_MOST_DIGITS = 10


@dataclass(frozen=True)
class FoundHead:
    """A reward head that a checkpoint has.

    Attributes:
        names: its tensors in the checkpoint, by our names.
        outputs: rows of its last layer.
        shape: None for one matrix.
        about: which head it is, for people.
        rows: tokens, or numbers, of rows of the output layer: the reward is the first row's logit,
            less the second's if there is one; with two outputs the second's logit comes first.
            Empty for a head of its own.
        is_difference: its reward is its second output less its first, as our exports of a reward
            for each step have it.
        is_log_odds: its first output is 0, and the checkpoint has only the second.
    """

    names: Mapping[str, str]
    outputs: int
    shape: HeadShape | None
    about: str
    stored: Mapping[str, LazyTensor] = field(repr=False)
    rows: tuple[str | int, ...] = ()
    is_difference: bool = False
    is_log_odds: bool = False

    @classmethod
    def of(cls, layout: HeadLayout, found: Source) -> FoundHead:
        """The head of ``found`` in this layout, of which ``found`` has the last layer."""
        names = {ours: name for ours, name in layout.names().items() if name in found.tensors}
        last = names["weight"]
        if layout.hidden is not None and "hidden.weight" not in names:
            raise CheckpointError(f"{last}: got it without {layout.hidden}.weight, wanted both")
        # From the header alone; no weight has been read or compared yet.
        outputs = _num_rows(found, last)
        if outputs > _MOST_OUTPUTS:
            raise CheckpointError(f"{last}: got {outputs} rows, wanted at most {_MOST_OUTPUTS}")
        width = None if layout.hidden is None else _num_rows(found, names["hidden.weight"])
        has_bias = any(ours.endswith("bias") for ours in names)
        shape = HeadShape(has_bias, width)
        about = f"{layout.last} ({shape}; as of {layout.by})"
        return cls(names, outputs, None if shape == HeadShape() else shape, about, found.tensors)

    @classmethod
    def of_rows(cls, rows: Sequence[str | int], found: Source) -> FoundHead:
        """Rows of the output layer of ``found``, by their tokens or numbers."""
        family = find_family(found.config.get("model_type"))
        for key, usual in _LOGITS_BEYOND_ROWS.items():
            value = found.config.get(key, 30.0 if (family.name, key) == _CAPPED else usual)
            if value not in (None, usual):
                raise CheckpointError(
                    f"{key}: got {shown(value)}, so its logits are no products of rows; "
                    "wanted a model without it for a head of rows of the output layer"
                )
        name = family.untied.hf[0]
        if is_tied(family.to_nemo(found.config)):
            name = next(rule.hf[0] for rule in family.model if rule.megatron == EMBEDDING)
        if name not in found.tensors:
            raise CheckpointError(f"{name}: it is missing, wanted it for a head of its rows")
        return cls({"weight": name}, 1, None, f"rows of {name}", found.tensors, tuple(rows))

    def with_rows_of(self, tokenizer: Tokenizer) -> FoundHead:
        """The same head with numbers of rows instead of tokens."""
        if not self.rows:
            return self
        name = self.names["weight"]
        count = next(iter(self.stored[name].shape), 0)
        ids = [row if isinstance(row, int) else tokenizer.token_id(row) for row in self.rows]
        for row in ids:
            if row >= count:
                raise CheckpointError(f"{name}: got {count} rows, wanted row {row}")
        told = [f"row {row} ({tokenizer.decode([row])!r})" for row in ids]
        between = " minus " if self.outputs == 1 else " against "
        return replace(self, rows=tuple(ids), about=f"{name}, {between.join(told)}")

    def at_steps(self) -> FoundHead:
        """The same head for steps: two rows of the output layer are two outputs.

        The card of math-shepherd-mistral-7b-prm reads the first's probability of both. The logit of
        a value head is that of a right step, with 0 for a wrong one, as Skywork-o1-Open-PRM's
        program takes its sigmoid (skywork-o1-prm-inference, ``return_probs=True``).
        """
        is_log_odds = self.names["weight"] == VALUE_LAYER.names()["weight"]
        is_pair = is_log_odds or len(self.rows) == 2
        return replace(self, outputs=2, is_log_odds=is_log_odds) if is_pair else self

    def with_outputs(self, outputs: int) -> FoundHead:
        """The same head with one reward instead of two outputs, if so many are wanted."""
        if outputs == self.outputs:
            return self
        return replace(self, outputs=outputs, is_difference=True)

    def sizes(self, hidden_size: int, outputs: int) -> dict[str, tuple[int, ...]]:
        """Shapes that its tensors have to have for so many outputs, by the checkpoint's names."""
        if self.rows:
            name = self.names["weight"]
            return {name: (next(iter(self.stored[name].shape), 0), hidden_size)}
        outputs = 1 if self.is_log_odds else outputs
        sizes = (self.shape or HeadShape()).tensors(outputs, hidden_size)
        return {name: sizes[ours] for ours, name in self.names.items()}

    def tensors(self, hidden_size: int) -> dict[str, LazyTensor]:
        """Lazy fp32 tensors by our names; a bias that one of two layers lacks is zeros."""
        sizes = (self.shape or HeadShape()).tensors(self.outputs, hidden_size)
        return {
            ours: LazyTensor(size, torch.float32, partial(self._read, ours, size))
            for ours, size in sizes.items()
        }

    def _read(self, ours: str, size: tuple[int, ...]) -> Tensor:
        if ours not in self.names:
            return torch.zeros(size)
        stored = self.stored[self.names[ours]].read()
        if self.is_difference and ours in ("weight", "bias"):
            wrong, right = stored.float()
            return (right - wrong)[None]
        if self.is_log_odds:
            return torch.cat([torch.zeros_like(stored), stored]).float()
        if not self.rows:
            return stored.float()
        rows = stored[list(map(int, self.rows))].float()
        # Of steps: the second output is that of a right step, and rows name that token first.
        if self.outputs == 2:
            return rows.flip(0)
        first, *others = rows
        return (first - others[0] if others else first)[None]


# Settings that change logits after the product with the output layer, and what leaves them as they
# are. Gemma 2's classes cap logits even if their config does not say so.
_LOGITS_BEYOND_ROWS = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}
_CAPPED = ("gemma2", "final_logit_softcapping")


def find_head(found: Source, choice: str | None = None) -> FoundHead | None:
    """Find the reward head of a checkpoint; None if it is a base model, or asked to be one.

    Args:
        choice: ``none`` takes the body alone; the name of a layout that head; ``lm_head:ROW`` or
            ``lm_head:ROW,ROW`` rows of the output layer, by number or token. None takes the only
            head that there is, or the rows that ``classifier_from_token`` names (vLLM's setting).

    Raises:
        CheckpointError: a reward model has no head that is known, or several; its head reads
            something else than a text; or the choice is not there.
    """
    layouts = _layouts(found)
    if choice == NO_HEAD:
        return None
    if choice is not None and choice.startswith(OUTPUT_LAYER_HEAD):
        return FoundHead.of_rows(_rows_of_choice(choice), found)
    if choice is not None and choice not in layouts:
        wanted = ", ".join([NO_HEAD, "lm_head:ROW", "lm_head:ROW,ROW", *layouts])
        raise CheckpointError(f"head: got {shown(choice)}, wanted one of {wanted}")
    architecture = architecture_in(found)
    present = [each for each in layouts.values() if each.names()["weight"] in found.tensors]
    chosen = [each for each in present if choice in (None, each.last)]
    if len(chosen) > 1:
        several = ", ".join(each.last for each in chosen)
        raise CheckpointError(f"got several reward heads: {several}; wanted one (head NAME)")
    if chosen:
        return FoundHead.of(chosen[0], found)
    rows = _rows_of_config(found) if choice is None else None
    if rows is not None:
        return FoundHead.of_rows(rows, found)
    if (
        choice is not None
        or reads_steps(found)
        or "Reward" in architecture
        or (architecture.endswith(REWARD_SUFFIX))
    ):
        wanted = " or ".join(f"{each}.weight" for each in ([choice] if choice else layouts))
        raise CheckpointError(
            f"got a {short(architecture)} without {wanted}, wanted it as its head (head none takes "
            "its body as a base model)"
        )
    return None


def check_are_rewards(problem: Any, names: Sequence[str] = (), remedy: str = "") -> None:
    """Refuse the outputs of a classifier, whose logits are no rewards.

    transformers takes a ``ForSequenceClassification`` of several outputs for a classifier unless
    its ``problem_type`` says regression.

    Args:
        problem: ``problem_type`` in ``config.json``.
        names: of the outputs; empty if the user has said that they are rewards.
        remedy: what a user does to say so.

    Raises:
        CheckpointError: they are a classifier's, or nothing says that they are rewards.
    """
    if problem not in (None, "regression"):
        raise CheckpointError(
            f"problem_type: got {shown(problem)}, wanted 'regression': the outputs of a classifier "
            "are no rewards"
        )
    if problem is None and len(names) > 1:
        raise CheckpointError(
            f"problem_type: got none for the outputs {shown(list(names))}, which transformers then "
            "takes for the classes of a classifier, whose logits are no rewards. If each output is "
            f"a reward, {remedy}"
        )


def reads_steps(found: Source) -> bool:
    """Tell if the head of a checkpoint reads the steps of a text, by the name of its class."""
    return architecture_in(found).endswith(_STEP_READERS)


def lacks_output_layer(found: Source, choice: str | None) -> bool:
    """Tell if a body may come without the output layer that is not its embeddings.

    A body alone has none, and neither has a reward model whose head is left out. A model to train
    needs none.
    """
    name = find_family(found.config.get("model_type")).untied.hf[0]
    is_reward_model = choice == NO_HEAD and any(is_of_head(each, found) for each in found.tensors)
    is_body = architecture_in(found).endswith(("Model", REWARD_SUFFIX, *_STEP_READERS))
    return name not in found.tensors and (is_reward_model or is_body)


def unread_head_tensors(found: Source, head: FoundHead | None, choice: str | None) -> list[str]:
    """Names of tensors of ``found`` that are left out because of the chosen head."""
    if choice is None:
        return []
    used = () if head is None else head.names.values()
    return sorted(name for name in found.tensors if is_of_head(name, found) and name not in used)


def describe_head(
    head: FoundHead | None, left_out: Sequence[str], contract: ScoringContract | None
) -> str:
    """Say in a line which head was found, what it reads, and whether it is kept."""
    beside = f"; left out: {', '.join(left_out)}" if left_out else ""
    if head is None:
        asked = " as asked" if left_out else " in the source"
        return f"none{asked}{beside}; training begins with a fresh one"
    token = "the last token of a text"
    if contract is not None and contract.reward_token_id is not None:
        token = f"token {contract.reward_token_id}, which is appended to a text"
    if contract is not None and contract.has_steps:
        token = f"its {contract.scored_position}"
        if contract.scored_position == MARKS:
            token = f"the end of {contract.step_separator!r} behind each step"
    return f"{head.about}, reads {token}, kept{beside}"


def is_of_head(name: str, found: Source | None = None) -> bool:
    """Tell by its name if a tensor belongs to a head of some layout."""
    layouts = LAYOUTS if found is None else _layouts(found).values()
    return name.startswith(tuple(f"{layout.last.partition('.')[0]}." for layout in layouts))


def _layouts(found: Source) -> dict[str, HeadLayout]:
    """All layouts by name, with OpenRLHF's head under the name that its config has."""
    layouts = {layout.last: layout for layout in LAYOUTS}
    prefix = found.config.get(PREFIX_KEY)
    if prefix is None:
        return layouts
    if not isinstance(prefix, str) or not prefix.isidentifier():
        raise CheckpointError(f"{PREFIX_KEY}: got {shown(prefix)}, wanted a layer's name")
    return {prefix: HeadLayout(prefix, by="OpenRLHF"), **layouts}


def _rows_of_choice(choice: str) -> list[str | int]:
    rows = choice.removeprefix(OUTPUT_LAYER_HEAD).split(",")
    if len(rows) > 2 or not all(rows):
        raise CheckpointError(f"head: got {shown(choice)}, wanted lm_head:ROW or lm_head:ROW,ROW")
    return [int(row) if row.isdecimal() and len(row) < _MOST_DIGITS else row for row in rows]


def _rows_of_config(found: Source) -> list[str] | None:
    """Rows that vLLM makes a head of: it writes the losing token first, then the winning one."""
    tokens, method = found.config.get("classifier_from_token"), found.config.get("method")
    if tokens is None:
        return None
    fits = isinstance(tokens, list) and all(isinstance(each, str) and each for each in tokens)
    if fits and len(tokens) == 2 and method in (None, "from_2_way_softmax"):
        return [tokens[1], tokens[0]]
    if fits and len(tokens) == 1 and method == "no_post_processing":
        return tokens
    raise CheckpointError(
        f"classifier_from_token: got {shown(tokens)} with the method {shown(method)}, wanted two "
        "tokens with from_2_way_softmax, or one with no_post_processing"
    )


def _num_rows(found: Source, name: str) -> int:
    return next(iter(found.tensors[name].shape), 0)


def architecture_in(found: Source) -> str:
    """Read the name of the class in ``config.json``; empty if there is none."""
    architectures = found.config.get("architectures") or [""]
    if not isinstance(architectures, list):
        raise CheckpointError(f"architectures: got {shown(architectures)}, wanted a list of names")
    return str(architectures[0])


# A head beside transformers' decoder.


class BodyWithHead(torch.nn.Module):
    """transformers' decoder with a head that transformers has no class for.

    It is called like a ``ForSequenceClassification``, or, if it ``reads_all``, like a
    ``ForTokenClassification``, with padding on the right.
    """

    def __init__(self, body: Any, head: Mapping[str, Tensor], *, reads_all: bool = False) -> None:
        super().__init__()
        self.reads_all = reads_all
        self.body = body
        self.head = dict(head)
        if body.config.num_labels != len(head["weight"]):
            body.config.num_labels = len(head["weight"])

    @property
    def config(self) -> Any:
        return self.body.config

    @property
    def device(self) -> torch.device:
        return self.body.device

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        """``logits [S, A]`` float32 of ``input_ids [S, T]``, read at each row's last token.

        ``[S, T, A]`` if it reads all.
        """
        hidden = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        # Padding is on the right.
        last = attention_mask.sum(dim=1) - 1
        rows = torch.arange(len(hidden), device=hidden.device)
        read = (hidden if self.reads_all else hidden[rows, last]).float()
        head = {name: tensor.to(read.device) for name, tensor in self.head.items()}
        if "hidden.weight" in head:
            read = F.linear(read, head["hidden.weight"], head.get("hidden.bias")).relu()
        return SimpleNamespace(logits=F.linear(read, head["weight"], head.get("bias")))


@contextmanager
def quiet_about_heads() -> Iterator[None]:
    """Load by transformers without its warning that the class and the file differ by their head."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def load_with_head(name: str, found: Source, head: FoundHead, dtype: torch.dtype | str) -> Any:
    """Load the decoder of a folder or model of the hub by transformers, with the head of ``found``.

    Args:
        head: one whose rows have numbers, if it has any.
    """
    from transformers import AutoModel

    with quiet_about_heads():
        body, report = AutoModel.from_pretrained(name, dtype=dtype, output_loading_info=True)
    if report["missing_keys"]:
        missing = ", ".join(sorted(map(str, report["missing_keys"]))[:3])
        raise CheckpointError(f"{name}: got no weights for {missing}")
    tensors = head.tensors(body.config.get_text_config().hidden_size)
    read = {ours: tensor.read() for ours, tensor in tensors.items()}
    return BodyWithHead(body, read, reads_all=reads_steps(found))


# transformers rotates all texts of a batch by the length of the longest, and keeps the largest base
# of a dynamic rotation that it has seen. What a text's reward is, a fresh model says of it alone.


def rotary_by_length(model: torch.nn.Module) -> list[Any]:
    """List a model's rotary embeddings that differ with the length of a batch."""
    kinds = "dynamic", "longrope"
    return [each for each in model.modules() if getattr(each, "rope_type", None) in kinds]


def forget_lengths(model: torch.nn.Module) -> None:
    """Make transformers' dynamic rotations those of a model that has seen no text."""
    for rotary in rotary_by_length(model):
        if rotary.rope_type == "dynamic":
            rotary.inv_freq = rotary.original_inv_freq.clone()
            rotary.max_seq_len_cached = rotary.original_max_seq_len
