"""Find reward heads in Hugging Face checkpoints, and read them.

Published reward models name the layers of their heads in different ways. Each way is a
``HeadLayout`` in ``LAYOUTS``. Every head reads the hidden state after the final norm at the last
token of a sample; the chat template and the ``reward_token_id`` in the scoring contract define
which token that is. Some models have no head: their reward is a logit of the output layer (LM
head), or the difference of two logits. A conversion copies the tokens' rows of the output layer
into an ordinary head.

``convert`` uses this module to find and read a head, ``body_with_head`` to run one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.decoder_tensors import EMBEDDING
from nemo_aligner.checkpoint.hf.families import find_family
from nemo_aligner.checkpoint.hf.families.settings import is_tied
from nemo_aligner.checkpoint.hf.source import REWARD_SUFFIX, Source
from nemo_aligner.checkpoint.weights.save import LazyTensor
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.steps import MARKS
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.models.shapes.head import HeadShape
from nemo_aligner.utils.errors import CheckpointError, short, shown


@dataclass(frozen=True)
class HeadLayout:
    """Names of a head's layers in a checkpoint.

    Attributes:
        last: prefix of the names of the last layer, which computes the outputs; also the layout's
            name.
        hidden: prefix of the names of the layer before the last one, with a ReLU between the two;
            None if the head has one layer.
        writers: software or models whose checkpoints have this layout, for messages.
    """

    last: str
    hidden: str | None = None
    writers: str = ""

    def names(self) -> dict[str, str]:
        """Map the names of ``HeadShape.tensors`` to the names of the tensors in the checkpoint."""
        names = {"weight": f"{self.last}.weight", "bias": f"{self.last}.bias"}
        if self.hidden is not None:
            names |= {f"hidden.{kind}": f"{self.hidden}.{kind}" for kind in ("weight", "bias")}
        return names


LINEAR = HeadLayout("score", writers="ForSequenceClassification, TRL's RewardTrainer")
TWO_LAYERS = HeadLayout("score.2", "score.0", writers="Qwen2ForRewardModel, INF-ORM")
VALUE_LAYER = HeadLayout("v_head.summary", writers="TRL's value head, LLaMA-Factory")
LAYOUTS = (
    LINEAR,
    TWO_LAYERS,
    VALUE_LAYER,
    HeadLayout("v_head.summary.2", "v_head.summary.0", writers="GRM"),
    HeadLayout("value_head", writers="OpenRLHF"),
    HeadLayout("regression_head", writers="UltraRM, Eurus-RM"),
    HeadLayout("v_head", writers="InternLM2ForRewardModel"),
)
# Key of config.json with which OpenRLHF names the head. Without the key the head is named
# "value_head" or "score".
PREFIX_KEY = "value_head_prefix"
# Key of config.json with the tokens whose rows of the output layer vLLM uses as head.
_ROW_TOKENS_KEY = "classifier_from_token"
# Key of config.json with the id of the token at which InternLM2's reward models read. These models
# append the token to every sample.
REWARD_TOKEN_KEY = "reward_token_id"
# Key of config.json in exports of this package. Its value tells how rewards are computed from
# logits of bins.
READOUT_KEY = "readout"
# Suffixes of classes whose heads read each step, or each token, instead of the last token.
TOKEN_SUFFIX, STEP_SUFFIX = "ForTokenClassification", "ForProcessRewardModel"
# "ForPrmModel" is the suffix of Skywork-o1-Open-PRM's class.
_STEP_CLASS_SUFFIXES = (TOKEN_SUFFIX, STEP_SUFFIX, "ForPrmModel")
# Words in the names of published reward models' classes.
_REWARD_WORDS = ("Reward", "Score")
NO_HEAD, OUTPUT_LAYER_HEAD = "none", "lm_head:"
# Forms in which an export can write a head of one matrix. The first is the form of transformers'
# own classes.
SCORE_WITH_BIAS = "score.bias"
LINEAR_FORMS = (LINEAR.last, SCORE_WITH_BIAS, VALUE_LAYER.last)
# Limit for the rows of a head, because a damaged tensor without columns can claim any number of
# rows without having any data.
_MAX_OUTPUTS = 10_000
_MAX_ROW_DIGITS = 10


@dataclass(frozen=True)
class FoundHead:
    """A reward head that was found in a checkpoint.

    Attributes:
        names: names of its tensors in the checkpoint, by the names of ``HeadShape.tensors``.
        outputs: number of outputs, the rows of its last layer.
        shape: which layers and biases the head has; None for a single matrix without a bias.
        description: says which head it is, for messages.
        stored: all tensors of the checkpoint.
        rows: rows of the output layer (LM head) that make up the head, by token or by index; empty
            for a head with tensors of its own. With one output the reward is the first row's
            logit, minus the second row's if there is one. With two outputs the second row's logit
            is the first output.
        is_difference: the reward is the second output minus the first, as in this package's exports
            of models with one reward for each step.
        is_log_odds: the first of two outputs is always 0, and the checkpoint stores only the
            second.
        untied: for rows of the embedding, to which the config ties the output layer: name of the
            output layer, if the checkpoint has it nevertheless; else empty.
    """

    names: Mapping[str, str]
    outputs: int
    shape: HeadShape | None
    description: str
    stored: Mapping[str, LazyTensor] = field(repr=False)
    rows: tuple[str | int, ...] = ()
    is_difference: bool = False
    is_log_odds: bool = False
    untied: str = ""

    @classmethod
    def of(cls, layout: HeadLayout, source: Source) -> FoundHead:
        """Describe the head of a checkpoint that has at least the last layer of ``layout``."""
        names = {
            head_name: name for head_name, name in layout.names().items() if name in source.tensors
        }
        last = names["weight"]
        if layout.hidden is not None and "hidden.weight" not in names:
            raise CheckpointError(
                f"{last}: the head's other layer, {layout.hidden}.weight, is missing"
            )
        # The file's header, which is not trusted, has the number of rows, so check it before
        # reading.
        outputs = _count_rows(source.tensors[last])
        if outputs > _MAX_OUTPUTS:
            raise CheckpointError(
                f"{last}: got {outputs} rows, one for each output of the head, wanted at most "
                f"{_MAX_OUTPUTS}. The file is damaged, or this is not a reward head: name another "
                "with --head"
            )
        width = (
            None if layout.hidden is None else _count_rows(source.tensors[names["hidden.weight"]])
        )
        has_bias = any(head_name.endswith("bias") for head_name in names)
        shape = HeadShape(has_bias, width)
        description = f"{layout.last} ({shape}; written by {layout.writers})"
        head_shape = None if shape == HeadShape() else shape
        return cls(names, outputs, head_shape, description, source.tensors)

    @classmethod
    def of_rows(cls, rows: Sequence[str | int], source: Source) -> FoundHead:
        """Build the description of a head of one or two rows of the output layer.

        ``rows`` names each row by its token or its index.
        """
        family = find_family(source.config.get("model_type"))
        for key, neutral in _LOGIT_SETTINGS.items():
            value = source.config.get(key, _LOGIT_DEFAULTS.get((family.name, key), neutral))
            if value not in (None, neutral):
                raise CheckpointError(
                    f"{key}: got {shown(value)}. This setting changes the logits after the output "
                    "layer, so rows of the output layer cannot be used as a head of this model"
                )
        name, untied = family.untied.hf[0], ""
        if is_tied(family.to_nemo(source.config)):
            untied = name if name in source.tensors else ""
            name = next(rule.hf[0] for rule in family.model if rule.megatron == EMBEDDING)
        if name not in source.tensors:
            raise CheckpointError(
                f"{name}: the tensor is missing, but the head is made of its rows"
            )
        description = f"rows of {name}"
        head = cls({"weight": name}, 1, None, description, source.tensors, tuple(rows))
        return replace(head, untied=untied)

    def with_rows_of(self, tokenizer: Tokenizer) -> FoundHead:
        """Replace each token in ``rows`` by its id, the index of its row in the output layer.

        Raises:
            CheckpointError: there is no such row, or it is not certain which tensor has it.
        """
        if not self.rows:
            return self
        name = self.names["weight"]
        count = _count_rows(self.stored[name])
        ids = [row if isinstance(row, int) else tokenizer.token_id(row) for row in self.rows]
        for row in ids:
            if row >= count:
                raise CheckpointError(f"{name}: it has {count} rows, so there is no row {row}")
        self._check_tied(ids)
        row_texts = [f"row {row} ({tokenizer.decode([row])!r})" for row in ids]
        operator = " minus " if self.outputs == 1 else " against "
        description = f"{name}, {operator.join(row_texts)}"
        return replace(self, rows=tuple(ids), description=description)

    def _check_tied(self, rows: list[int]) -> None:
        """Raise CheckpointError if a tied output layer is stored, too, with other ``rows``.

        Then training changed the output layer, and the reward depends on which one is read:
        transformers 5 reads the stored one, earlier versions the embedding.
        """
        if not self.untied:
            return
        name = self.names["weight"]
        tied, untied = self.stored[name], self.stored[self.untied]
        is_same = max(rows) < _count_rows(untied) and torch.equal(
            tied.read()[rows].float(), untied.read()[rows].float()
        )
        if not is_same:
            raise CheckpointError(
                f"tie_word_embeddings: got true, but {self.untied} and {name} differ in the rows "
                f"{', '.join(map(str, rows))} of the head. Set it to false in config.json to read "
                f"{self.untied}, as transformers 5 does; or remove this tensor to read {name}"
            )

    def at_steps(self) -> FoundHead:
        """Return the head with two outputs per step: the logits of a wrong and of a right step.

        Two rows of the output layer become two outputs, because the model card of
        math-shepherd-mistral-7b-prm computes their softmax, and takes the probability of the first
        row. A value head's output becomes the logit of a right step, with 0 for a wrong one,
        because Skywork-o1-Open-PRM's program takes its sigmoid (skywork-o1-prm-inference,
        ``return_probs=True``).
        """
        is_log_odds = self.names["weight"] == VALUE_LAYER.names()["weight"]
        is_pair = is_log_odds or len(self.rows) == 2
        return replace(self, outputs=2, is_log_odds=is_log_odds) if is_pair else self

    def with_outputs(self, outputs: int) -> FoundHead:
        """Return the head with ``outputs`` outputs, the number in the scoring contract.

        If the contract has one output but the checkpoint's head two, the reward becomes the second
        output minus the first.
        """
        if outputs == self.outputs:
            return self
        return replace(self, outputs=outputs, is_difference=True)

    def sizes(self, hidden_size: int, outputs: int) -> dict[str, tuple[int, ...]]:
        """Return the expected shapes of the head's tensors, by their names in the checkpoint."""
        if self.rows:
            name = self.names["weight"]
            return {name: (_count_rows(self.stored[name]), hidden_size)}
        outputs = 1 if self.is_log_odds else outputs
        sizes = (self.shape or HeadShape()).tensors(outputs, hidden_size)
        return {name: sizes[head_name] for head_name, name in self.names.items()}

    def tensors(self, hidden_size: int) -> dict[str, LazyTensor]:
        """Return lazy fp32 tensors by the names of ``HeadShape.tensors``.

        If only one of two layers has a bias, the other's is zeros.
        """
        sizes = (self.shape or HeadShape()).tensors(self.outputs, hidden_size)
        return {
            head_name: LazyTensor(size, torch.float32, partial(self._read_tensor, head_name, size))
            for head_name, size in sizes.items()
        }

    def _read_tensor(self, head_name: str, size: tuple[int, ...]) -> Tensor:
        if head_name not in self.names:
            return torch.zeros(size)
        stored = self.stored[self.names[head_name]].read()
        if self.is_difference and head_name in ("weight", "bias"):
            wrong, right = stored.float()
            return (right - wrong)[None]
        if self.is_log_odds:
            return torch.cat([torch.zeros_like(stored), stored]).float()
        if not self.rows:
            return stored.float()
        rows = stored[list(map(int, self.rows))].float()
        # ``self.rows`` names the token that marks a right step first. But a head that scores steps
        # has the logit of a wrong step as its first output, so swap the two rows.
        if self.outputs == 2:
            return rows.flip(0)
        return rows if len(rows) == 1 else rows[:1] - rows[1:]


# Settings that change logits after the output layer, and the values that leave them unchanged.
# Gemma 2's classes cap logits even if the config does not have the setting.
_LOGIT_SETTINGS = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}
# transformers' defaults of these settings, for models whose default changes the logits.
_LOGIT_DEFAULTS = {
    ("gemma2", "final_logit_softcapping"): 30.0,
    ("cohere", "logit_scale"): 0.0625,
    ("cohere2", "logit_scale"): 0.0625,
}


def find_head(source: Source, choice: str | None = None) -> FoundHead | None:
    """Find the reward head of a checkpoint; None for a base model, or if the user wants no head.

    Args:
        choice: ``none`` ignores any head, so that the checkpoint counts as a base model; the name
            of a layout chooses that head; ``lm_head:ROW`` or ``lm_head:ROW,ROW`` chooses rows of
            the output layer, by index or token. None chooses the only head that the checkpoint
            has, or the rows that ``classifier_from_token`` names (a setting of vLLM).

    Raises:
        CheckpointError: the class is a reward model's, but no head has a known layout; there are
            several heads; or the chosen head is missing.
    """
    layouts = _list_layouts(source)
    if choice == NO_HEAD:
        return None
    if choice is not None and choice.startswith(OUTPUT_LAYER_HEAD):
        return FoundHead.of_rows(_parse_rows(choice), source)
    if choice is not None and choice not in layouts:
        supported = ", ".join([NO_HEAD, "lm_head:ROW", "lm_head:ROW,ROW", *layouts])
        raise CheckpointError(f"head: got {shown(choice)}, wanted one of {supported}")
    architecture = architecture_in(source.config)
    present = [layout for layout in layouts.values() if layout.names()["weight"] in source.tensors]
    chosen = [layout for layout in present if choice in (None, layout.last)]
    if len(chosen) > 1:
        names = ", ".join(layout.last for layout in chosen)
        raise CheckpointError(f"got several reward heads: {names}. Choose one with --head NAME")
    if chosen:
        return FoundHead.of(chosen[0], source)
    rows = _read_row_tokens(source) if choice is None else None
    if rows is not None:
        return FoundHead.of_rows(rows, source)
    if choice is not None or reads_steps(source) or _has_reward_class(source):
        names = " or ".join(f"{name}.weight" for name in ([choice] if choice else layouts))
        unknown = [name for name in _tensors_outside(source) if not is_of_head(name, source)]
        problem = f"without a reward head ({names})"
        if unknown:
            problem = f"whose reward head has no supported layout: {short(', '.join(unknown))}"
        raise CheckpointError(
            f"got a {short(architecture)} {problem}. To convert it as a base model, use --head none"
        )
    return None


def check_are_rewards(problem: Any, names: Sequence[str] = (), remedy: str = "") -> None:
    """Raise CheckpointError for the outputs of a classifier, because its logits are not rewards.

    transformers treats a ``ForSequenceClassification`` with several outputs as a classifier unless
    its ``problem_type`` is ``regression``.

    Args:
        problem: ``problem_type`` in ``config.json``.
        names: names of the outputs; empty if the user has said that they are rewards.
        remedy: end of the error text: what the user has to do if the outputs are rewards.

    Raises:
        CheckpointError: the outputs are logits of classes, or the settings do not tell.
    """
    if problem not in (None, "regression"):
        raise CheckpointError(
            f"problem_type: got {shown(problem)}, wanted 'regression', because the outputs of a "
            "classifier are not rewards"
        )
    if problem is None and len(names) > 1:
        raise CheckpointError(
            f"problem_type: it is missing, and there are several outputs, {shown(list(names))}. "
            "transformers treats them as the classes of a classifier, whose logits are not "
            f"rewards. If each output is a reward, {remedy}"
        )


def reads_steps(source: Source) -> bool:
    """Tell by the name of a checkpoint's class if its head reads the steps of a response."""
    return architecture_in(source.config).endswith(_STEP_CLASS_SUFFIXES)


def lacks_output_layer(source: Source, choice: str | None) -> bool:
    """Tell if an output layer may be missing although the config does not tie it to the embedding.

    A checkpoint of a decoder alone, and a reward model whose head is dropped, have no output layer.
    They become base models for training reward models, which need none.
    """
    output_layer = find_family(source.config.get("model_type")).untied.hf[0]
    drops_head = choice == NO_HEAD and bool(unread_head_tensors(source, None, choice))
    is_decoder = architecture_in(source.config).endswith(
        ("Model", REWARD_SUFFIX, *_STEP_CLASS_SUFFIXES)
    )
    return output_layer not in source.tensors and (drops_head or is_decoder)


def unread_head_tensors(source: Source, head: FoundHead | None, choice: str | None) -> list[str]:
    """List the head tensors that are dropped because the user chose another head, or none."""
    if choice is None:
        return []
    if choice == NO_HEAD and _has_reward_class(source):
        return _tensors_outside(source)
    used = () if head is None else head.names.values()
    return sorted(name for name in source.tensors if is_of_head(name, source) and name not in used)


def is_reward_model(config: Mapping[str, Any]) -> bool:
    """Tell by ``config.json`` alone if a checkpoint should have a reward head, without its weights.

    A head that neither the class nor another setting tells of is missed.
    """
    architecture = architecture_in(config)
    return (
        architecture.endswith((REWARD_SUFFIX, *_STEP_CLASS_SUFFIXES))
        or any(word in architecture for word in _REWARD_WORDS)
        or any(config.get(key) is not None for key in (PREFIX_KEY, _ROW_TOKENS_KEY))
    )


def _has_reward_class(source: Source) -> bool:
    """Tell by the name of a checkpoint's class if it has a reward head, of whatever layout."""
    architecture = architecture_in(source.config)
    return architecture.endswith(REWARD_SUFFIX) or any(
        word in architecture for word in _REWARD_WORDS
    )


def _tensors_outside(source: Source) -> list[str]:
    """List the tensors outside the decoder and its output layer; a reward head consists of some."""
    family = find_family(source.config.get("model_type"))
    names = (name for rule in (*family.model, family.untied) for name in rule.hf)
    inside = {name.partition(".")[0] for name in names}
    return sorted(name for name in source.tensors if name.partition(".")[0] not in inside)


def describe_head(
    head: FoundHead | None, dropped: Sequence[str], contract: ScoringContract | None
) -> str:
    """Describe in one line which head was found, what it reads, and whether it is kept.

    Args:
        dropped: names of the tensors that the conversion drops.
    """
    dropped_text = f"; dropped: {', '.join(dropped)}" if dropped else ""
    if head is None:
        reason = " as requested" if dropped else " in the source"
        return f"none{reason}{dropped_text}; training begins with a new one"
    token = "the last token of a sample"
    if contract is not None and contract.trailing_pad_id is not None:
        token += f" that is not {contract.trailing_pad_id}"
    if contract is not None and contract.reward_token_id is not None:
        token = f"token {contract.reward_token_id}, which is appended to a sample"
    if contract is not None and contract.has_steps:
        token = f"its {contract.scored_position}"
        if contract.scored_position == MARKS:
            token = f"the end of {contract.step_separator!r} after each step"
    return f"{head.description}, reads {token}, kept{dropped_text}"


def is_of_head(name: str, source: Source | None = None) -> bool:
    """Tell by its name if a tensor belongs to a reward head of any layout.

    With ``source``, the head's name in its ``config.json`` (``value_head_prefix``, which OpenRLHF
    writes) counts, too.
    """
    layouts = LAYOUTS if source is None else _list_layouts(source).values()
    return name.startswith(tuple(f"{layout.last.partition('.')[0]}." for layout in layouts))


def _list_layouts(source: Source) -> dict[str, HeadLayout]:
    """Return ``LAYOUTS`` by name, and one more if ``config.json`` renames OpenRLHF's head."""
    layouts = {layout.last: layout for layout in LAYOUTS}
    prefix = source.config.get(PREFIX_KEY)
    if prefix is None:
        return layouts
    if not isinstance(prefix, str) or not prefix.isidentifier():
        raise CheckpointError(f"{PREFIX_KEY}: got {shown(prefix)}, wanted the name of a layer")
    return {prefix: HeadLayout(prefix, writers="OpenRLHF"), **layouts}


def _parse_rows(choice: str) -> list[str | int]:
    """Parse ``lm_head:ROW`` or ``lm_head:ROW,ROW``; a row is a token or the index of a row."""
    rows = choice.removeprefix(OUTPUT_LAYER_HEAD).split(",")
    if len(rows) > 2 or not all(rows):
        raise CheckpointError(f"head: got {shown(choice)}, wanted lm_head:ROW or lm_head:ROW,ROW")
    return [int(row) if row.isdecimal() and len(row) < _MAX_ROW_DIGITS else row for row in rows]


def _read_row_tokens(source: Source) -> list[str] | None:
    """Read the tokens whose rows of the output layer vLLM uses as head; None if none are named.

    Of two tokens, vLLM's setting ``classifier_from_token`` names first the one whose logit lowers
    the score. The result has the opposite order, as ``FoundHead.rows``.
    """
    tokens, method = source.config.get(_ROW_TOKENS_KEY), source.config.get("method")
    if tokens is None:
        return None
    is_valid = isinstance(tokens, list) and all(
        isinstance(token, str) and token for token in tokens
    )
    if is_valid and len(tokens) == 2 and method in (None, "from_2_way_softmax"):
        return [tokens[1], tokens[0]]
    if is_valid and len(tokens) == 1 and method == "no_post_processing":
        return tokens
    raise CheckpointError(
        f"classifier_from_token: got {shown(tokens)} with method={shown(method)}, wanted two "
        "tokens with method=from_2_way_softmax, or one token with method=no_post_processing"
    )


def _count_rows(tensor: LazyTensor) -> int:
    """Return the length of the first axis; 0 for a damaged tensor that has none."""
    return next(iter(tensor.shape), 0)


def architecture_in(config: Mapping[str, Any]) -> str:
    """Read the name of the model's class (``architectures`` in ``config.json``); empty if none."""
    architectures = config.get("architectures") or [""]
    if not isinstance(architectures, list):
        raise CheckpointError(f"architectures: got {shown(architectures)}, wanted a list of names")
    return str(architectures[0])
