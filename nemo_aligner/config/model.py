"""Settings below ``model``: data, LoRA, parallel layout, optimizer, head.

``ModelConfig`` is for training, ``ScorerModelConfig`` for scoring with a finished reward model;
both extend ``LayoutConfig``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum
from math import inf
from typing import Any

from nemo_aligner.config.common import (
    Checks,
    Contradicting,
    IneffectiveRule,
    Malformed,
    Overlong,
    RewardModelType,
    setting,
)
from nemo_aligner.config.kernels import (
    AttentionChoice,
    DeltaChoice,
    KernelChoices,
    PointwiseChoice,
)
from nemo_aligner.utils.errors import ConfigError

# Data.


@dataclass
class DataPrefixConfig:
    """Data files for training, validation and test."""

    train: list[str] = setting([], "files to train on, or hub data sets as name[:split]")
    validation: list[str] = setting(
        [], "files to validate on; each file is a separate validation set"
    )
    test: list[str] = setting(
        [], "files to measure the finished model on, once, at the end of training"
    )
    train_weights: list[float] = setting(
        [], "sampling weights of the training files; []: by number of records"
    )

    def __post_init__(self) -> None:
        with Checks("model.data.data_prefix", self) as checks:
            are_weights = all(0 < weight < inf for weight in self.train_weights)
            checks.require(are_weights, "train_weights", "numbers above 0")
            for part in ("train", "validation", "test"):
                expected = "only files; weights of training files go into train_weights"
                checks.require(not any(map(_is_number, getattr(self, part))), part, expected)

    @property
    def all_files(self) -> list[str]:
        """All files: those for training, then validation, then test."""
        return [*self.train, *self.validation, *self.test]


def _is_number(text: str) -> bool:
    """Tell if an entry of a list of files is a number.

    NeMo's lists have a weight before each file; ours must not. ``2024_10`` counts as the name of a
    file, although Python parses it as a number.
    """
    if "_" in text:
        return False
    try:
        float(text)
    except ValueError:
        return False
    return True


DEFAULT_SEQ_LENGTH = 1024
"""Value of ``seq_length`` if neither the settings nor the model to start from has one."""

# Value of ``format`` for data of TRL's RewardTrainer, which appends EOS to raw texts.
TRL_FORMAT = "trl"


@dataclass
class DataConfig:
    """Data files, and the rules by which samples become token ids (see ``ScoringContract``).

    A null ``template``, ``chat_template_kwargs``, ``add_bos``, ``add_eos``, ``seq_length``,
    ``overlong`` or ``principle_template`` takes the value of the reward model that training starts
    from. If training starts from a base model, the first four take the value of the tokenizer,
    ``seq_length`` is ``DEFAULT_SEQ_LENGTH``, ``overlong`` is ``drop``, and there is no
    ``principle_template``. Exception: with ``format: trl`` a null ``add_eos`` is true.
    """

    data_prefix: DataPrefixConfig = field(default_factory=DataPrefixConfig)
    format: str = setting("auto", "format of the files: auto, a name, or package.module:NAME")
    prompt_key: str | None = setting(None, "name of the field with the prompt; null: prompt")
    chosen_key: str | None = setting(None, "name of the field with the chosen reply; null: chosen")
    rejected_key: str | None = setting(
        None, "name of the field with the rejected reply; null: rejected"
    )
    system_prompt_file: str | None = setting(
        None, "file with a system prompt for conversations that have none"
    )
    prompt_file: str | None = setting(
        None, "file with text around the last user turn, {}; braces are {{ and }}"
    )
    input_template: str | None = setting(
        None, "score raw text: this string, with the prompt as {}, and the reply"
    )
    seq_length: int | None = setting(
        None, "maximum tokens of a sample; null: of the initial reward model, else 1024"
    )
    overlong: Overlong | None = setting(
        None, "longer samples; null: as the initial reward model does, else drop"
    )
    template: str | None = setting(
        None, "chat template: tokenizer, chatml, llama3, plain, zephyr, or a file"
    )
    chat_template_kwargs: dict[str, Any] | None = setting(
        None, "variables for the template, such as {enable_thinking: false}"
    )
    add_bos: bool | None = setting(
        None, "add BOS to raw texts; null: as the initial model or tokenizer does"
    )
    add_eos: bool | None = setting(
        None, "add EOS to raw texts; null: as the initial model or tokenizer does"
    )
    step_separator: str | None = setting(
        None, "string between the steps of a reply; null: a blank line"
    )
    neutral_label: float | None = setting(
        1.0, "label of PRM800K's neutral steps, 0 (wrong) to 1 (right); null: drop"
    )
    allow_prompt_overlap: bool = setting(
        False, "allow prompts that are in both training and validation data"
    )
    malformed: Malformed = setting(
        Malformed.error, "records that cannot be read: stop with an error, or drop them"
    )
    max_malformed: float = setting(0.01, "largest fraction of a file that may be dropped, 0 to 1")

    contradicting: Contradicting = setting(
        Contradicting.keep, "pairs in a file that prefer opposite replies: keep them, or drop them"
    )

    index_dir: str | None = setting(
        None, "folder for cached tokens; null: next to data files of 4 MiB or more"
    )
    keep_index: bool = setting(True, "cache the tokens of data files on disk for the next start")
    principle_template: str | None = setting(
        None, "question after the reply with {principle}, or rlbff; '': no principles"
    )

    def __post_init__(self) -> None:
        with Checks("model.data", self) as checks:
            checks.require(
                self.keep_index or self.index_dir is None,
                "index_dir",
                "null, as model.data.keep_index is false",
            )
            checks.require_positive("seq_length")
            checks.require_fraction("max_malformed")


@dataclass
class RegressionConfig:
    """The labels of rated replies: their names, weights, and the mark of a missing label."""

    attributes: list[str] = setting([], "names of the label columns, in the order of label lists")
    attribute_weights: dict[str, float] = setting(
        {}, "weights of the attributes in the combined reward; {}: 1 each"
    )
    loss_mask_val: float = setting(-100.0, "number that marks a missing label, like null")

    def __post_init__(self) -> None:
        with Checks("model.regression", self) as checks:
            are_names = all(name.strip() for name in self.attributes)
            checks.require(are_names, "attributes", "names, none of them empty")


# LoRA.

# Megatron's names of the linear layers of a transformer layer: fused QKV, attention output, MLP up
# (with the gate), MLP down.
LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class BasePrecision(Enum):
    """How frozen weights under LoRA are stored: in 4 bits, or in 8 bits with one scale per row."""

    nf4 = "nf4"
    int8 = "int8"
    fp8 = "fp8"


@dataclass
class LoraConfig:
    """LoRA (Hu et al. 2021, arXiv:2106.09685) on the linear layers of the backbone."""

    rank: int = setting(0, "rank of the LoRA matrices; 0: full fine-tuning without LoRA")
    alpha: float = setting(32.0, "LoRA's output is scaled by alpha / rank")
    dropout: float = setting(0.0, "dropout probability on the inputs of LoRA")
    targets: list[str] = setting(
        list(LORA_TARGETS), "linear layers that get LoRA; default: all four of each layer"
    )
    base_precision: BasePrecision | None = setting(
        None, "quantize frozen linear weights: nf4, int8 or fp8; null: don't"
    )

    def __post_init__(self) -> None:
        with Checks("model.lora", self) as checks:
            checks.require_not_negative("rank")
            checks.require_positive("alpha")
            checks.require(0 <= self.dropout < 1, "dropout", "0 or more, and less than 1")
            are_targets = bool(self.targets) and set(self.targets) <= set(LORA_TARGETS)
            are_unique = len(set(self.targets)) == len(self.targets)
            expected = f"at least one of {', '.join(LORA_TARGETS)}, each once"
            checks.require(are_targets and are_unique, "targets", expected)


# The parallel layout; training and scoring have the same settings for it.


class ContextExchange(Enum):
    """The way context parallel ranks exchange keys and values.

    With ``all_gather`` each rank gets all of them at once; with ``p2p`` the ranks pass them around
    a ring.
    """

    all_gather = "all_gather"
    p2p = "p2p"


ROWS_BY_DEVICE = 0
"""Value of ``LayoutConfig.invariant_rows`` that lets the device choose the number of rows."""


ANY_ROWS: IneffectiveRule = ({"model.batch_invariant": False}, ("model.batch_invariant_rows",))
WHOLE_TEXTS: IneffectiveRule = ({"model.context_parallel_size": 1}, ("model.cp_comm_type",))


@dataclass
class LayoutConfig:
    """Batch invariance and parallel layout: the model settings that training and scoring share."""

    batch_invariant: bool = setting(True, "make each reward bit-identical in every batch")
    batch_invariant_rows: int | None = setting(
        None, "rows of the fixed-shape matmuls; null: chosen by device"
    )
    cuda_graphs: bool = setting(
        False, "launch each micro-batch as one CUDA graph; only on a single GPU"
    )
    tensor_model_parallel_size: int = setting(
        1, "tensor parallelism: number of ranks that each layer is split over"
    )
    pipeline_model_parallel_size: int = setting(1, "pipeline parallelism: number of stages")
    context_parallel_size: int = setting(
        1, "context parallelism: number of ranks that each sample is split over"
    )
    expert_model_parallel_size: int = setting(
        1, "expert parallelism: number of ranks that MoE experts are split over"
    )
    cp_comm_type: ContextExchange = setting(
        ContextExchange.all_gather,
        "how context parallel ranks exchange keys and values; p2p is a ring",
    )
    sequence_parallel: bool = setting(
        False, "with tensor parallelism: also split norms along the sequence"
    )
    pointwise_kernels: PointwiseChoice | None = setting(
        None, "kernels of RMSNorm, SwiGLU, RoPE; null: triton on a GPU, else eager"
    )
    attention_kernels: AttentionChoice = setting(
        AttentionChoice.torch, "first choice of attention kernels on a GPU"
    )

    def __post_init__(self) -> None:
        with Checks("model", self) as checks:
            self.check(checks)

    def check(self, checks: Checks) -> None:
        """Check the values of the section; subclasses extend it for their settings."""
        checks.require_positive(
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "batch_invariant_rows",
        )
        checks.require(
            not (self.is_ring and self.batch_invariant),
            "cp_comm_type",
            "all_gather, or model.batch_invariant=false: with a ring rewards depend on the batch",
        )
        depends_on_rows = self.pointwise_kernels in (PointwiseChoice.compile, PointwiseChoice.liger)
        checks.require(
            not (depends_on_rows and self.batch_invariant),
            "pointwise_kernels",
            "triton, eager, or model.batch_invariant=false: with other kernels rewards may depend "
            "on the batch",
        )

    @property
    def kernels(self) -> KernelChoices:
        """The choices of kernels that training and scoring share."""
        return KernelChoices(self.pointwise_kernels, self.attention_kernels, self.batch_invariant)

    @property
    def is_ring(self) -> bool:
        """True if context parallel ranks pass keys and values around a ring."""
        return self.context_parallel_size > 1 and self.cp_comm_type is ContextExchange.p2p

    @property
    def invariant_rows(self) -> int | None:
        """Rows per matmul for ``make_batch_invariant``; None if ``batch_invariant`` is false."""
        return (self.batch_invariant_rows or ROWS_BY_DEVICE) if self.batch_invariant else None


LAYOUT_KEYS = tuple(f"model.{item.name}" for item in fields(LayoutConfig))
"""Keys of the settings with which a model computes the same rewards as in training."""


def layout_sizes(model: LayoutConfig) -> dict[str, Any]:
    """Return the parallel sizes as arguments of ``distributed.layout.initialize_layout``."""
    return {
        "tp": model.tensor_model_parallel_size,
        "pp": model.pipeline_model_parallel_size,
        "cp": model.context_parallel_size,
        "ring": model.is_ring,
        "ep": model.expert_model_parallel_size,
        "sequence_parallel": model.sequence_parallel,
    }


@dataclass
class ScorerModelConfig(LayoutConfig):
    """Parallel layout and batch size of a reward model that is loaded only to score samples."""

    micro_batch_tokens: int = setting(8192, "maximum number of tokens per forward pass")

    def check(self, checks: Checks) -> None:
        super().check(checks)
        checks.require_positive("micro_batch_tokens")


# The model to train.

LAYERS_NOT_OFFLOADED = 2
"""Number of last layers whose activations stay on the GPU with ``activations_offload``.

The backward pass needs the activations of these layers first, so their copies would return to the
GPU as soon as they have left it.
"""


class Recompute(Enum):
    """The activations that the backward pass recomputes: none, those of attention, or all.

    The names are megatron-core's.
    """

    none = "none"
    selective = "selective"
    full = "full"


class Schedule(Enum):
    """Shape of the learning rate curve after warm-up."""

    cosine = "cosine"
    linear = "linear"
    constant = "constant"


@dataclass
class SchedulerConfig:
    """Schedule of the learning rate over the optimizer steps of a run."""

    name: Schedule = setting(Schedule.cosine, "learning rate schedule after warm-up")
    warmup_steps: int = setting(10, "number of steps of linear warm-up")
    constant_steps: int = setting(0, "number of final steps at min_lr")
    min_lr: float = setting(0.0, "final learning rate")

    def __post_init__(self) -> None:
        with Checks("model.optim.sched", self) as checks:
            checks.require_not_negative("warmup_steps", "constant_steps", "min_lr")

    def check_decay(self, total_steps: int) -> None:
        """Raise ConfigError if warm-up and constant steps leave no step for the decay.

        Args:
            total_steps: number of optimizer steps of the run.
        """
        max_constant_steps = max(0, total_steps - self.warmup_steps - 1)
        if self.name is not Schedule.constant and self.constant_steps > max_constant_steps:
            raise ConfigError(
                f"model.optim.sched.constant_steps: got {self.constant_steps}, wanted at most "
                f"{max_constant_steps}, as the run has {total_steps} steps, {self.warmup_steps} of "
                "them warm-up, and the decay needs one. Set it to 0 to decay until the end"
            )

    def last_decay_step(self, total_steps: int) -> int:
        """Return the optimizer step at which the learning rate reaches ``min_lr``."""
        # Megatron requires a step after the warm-up, even if the run ends during the warm-up.
        return max(total_steps - self.constant_steps, self.warmup_steps + 1)


IN_CONSTANT_SCHEDULES = ("model.optim.sched.constant_steps", "model.optim.sched.min_lr")
"""Settings that have no effect if the learning rate is constant."""


# The default learning rate is 0.05 / hidden size, and ten times that for LoRA. It is 8.7e-5 for
# SmolLM2-135M (width 576, docs/training.md), and 1.2e-5 for Llama 8B (width 4096).
_RATE_TIMES_WIDTH, _LORA_RATE = 0.05, 10


@dataclass
class OptimConfig:
    """AdamW through megatron-core's distributed optimizer."""

    lr: float | None = setting(
        None, "learning rate after warm-up; null: 0.05 (LoRA: 0.5) / hidden size"
    )
    weight_decay: float = setting(0.01, "weight decay of matrices; norms and biases have none")
    betas: tuple[float, float] = setting((0.9, 0.98), "beta1 and beta2 of Adam")
    eps: float = setting(1e-8, "epsilon of Adam")
    head_lr_mult: float = setting(1.0, "learning rate of the head, as a multiple of lr")
    layer_lr_decay: float = setting(
        1.0, "learning rate of each layer relative to the layer above it"
    )
    cpu_offload: bool = setting(False, "keep Adam's moments (8 bytes per parameter) in host memory")
    sched: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        with Checks("model.optim", self) as checks:
            checks.require_positive("lr", "eps", "head_lr_mult")
            checks.require_not_negative("weight_decay")
            checks.require_finite("lr", "eps", "weight_decay", "head_lr_mult")
            is_decay = 0 < self.layer_lr_decay <= 1
            checks.require(is_decay, "layer_lr_decay", "a number above 0 and at most 1")
            are_betas = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
            checks.require(are_betas, "betas", "two numbers, each 0 or more and less than 1")
            # The default of lr depends on the hidden size, which is not known here. If lr is null,
            # the bound is the largest possible default, that of hidden size 1.
            max_lr = _RATE_TIMES_WIDTH * _LORA_RATE if self.lr is None else self.lr
            is_below_lr = self.sched.min_lr <= max_lr
            checks.require(is_below_lr, "sched.min_lr", f"at most model.optim.lr ({max_lr})")


class ScoredPosition(Enum):
    """The tokens of a sample at which rewards are read.

    ``last_token`` is the last token of the sample, ``reply_mean`` the mean over the reply's tokens.
    The others give a reward for each turn or step; ``contract/steps.py`` explains them.
    """

    last_token = "last_token"
    reply_mean = "reply_mean"
    turns = "turns"
    step_ends = "step_ends"
    step_marks = "step_marks"
    step_answers = "step_answers"


@dataclass
class HeadConfig:
    """The head that computes rewards from hidden states, in fp32."""

    reads: ScoredPosition = setting(
        ScoredPosition.last_token,
        "where rewards are read: last token, mean of the reply, turns or steps",
    )
    bias: bool = setting(False, "add a bias to each layer of the head")
    mlp_size: int | None = setting(None, "width of a hidden ReLU layer in the head; null: none")

    def __post_init__(self) -> None:
        with Checks("model.head", self) as checks:
            checks.require_positive("mlp_size")


@dataclass
class ModelConfig(LayoutConfig):
    """The model to train, its parallel layout, its optimizer and its data."""

    reward_model_type: RewardModelType = setting(
        RewardModelType.binary_ranking, "train on pairs, or on labels of single replies"
    )
    objective: str | None = setting(
        None, "training objective (docs/objectives.md), or module:Name; null: default"
    )
    objective_kwargs: dict[str, Any] = setting({}, "settings of the objective")
    regression: RegressionConfig = field(default_factory=RegressionConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    activations_checkpoint_granularity: Recompute = setting(
        Recompute.none, "which activations to recompute in the backward pass"
    )
    activations_checkpoint_num_layers: int | None = setting(
        None, "with full: recompute a stage's first N layers with a backward; null: all"
    )
    activations_offload: bool = setting(
        False, "keep activations for the backward pass in host memory"
    )
    freeze_layers: int = setting(0, "number of first layers to freeze, with the embeddings")
    train_router: bool = setting(False, "also train the router of a mixture-of-experts (MoE) model")
    moe_aux_loss_coeff: float = setting(
        0.0, "weight of the loss that balances the load of MoE experts; 0: none"
    )
    lora: LoraConfig = field(default_factory=LoraConfig)
    global_batch_size: int = setting(64, "records (pairs or rated replies) per optimizer step")
    micro_batch_tokens: int = setting(
        4096, "maximum number of tokens per forward and backward pass"
    )
    seed: int = setting(1234, "random seed for the head and the order of the data")
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    linear_attention_kernels: DeltaChoice = setting(
        DeltaChoice.torch, "kernels of Gated DeltaNet in training; scoring always uses torch"
    )

    def check(self, checks: Checks) -> None:
        super().check(checks)
        checks.require_positive(
            "activations_checkpoint_num_layers",
            "global_batch_size",
            "micro_batch_tokens",
        )
        checks.require_not_negative("freeze_layers", "moe_aux_loss_coeff")
        checks.require_seed("seed")
        checks.require(
            self.train_router or not self.moe_aux_loss_coeff,
            "moe_aux_loss_coeff",
            "0, or model.train_router=true: a frozen router cannot learn to balance the load",
        )
        checks.require(
            self.lora.rank == 0 or not self.train_router,
            "train_router",
            f"false, as model.lora.rank={self.lora.rank} freezes all weights of the backbone",
        )
        checks.require(
            self.lora.rank == 0 or self.freeze_layers == 0,
            "freeze_layers",
            f"0, as model.lora.rank={self.lora.rank} freezes all weights of the backbone",
        )
        self._check_layout(checks)
        self._check_weights(checks)
        if self.reward_model_type is RewardModelType.regression:
            names = self.regression.attributes
            are_unique = bool(names) and len(set(names)) == len(names)
            expected = "at least one attribute name, each once"
            checks.require(are_unique, "regression.attributes", expected)

    def _check_weights(self, checks: Checks) -> None:
        weights, names = self.regression.attribute_weights, self.regression.attributes
        are_valid = not weights or (set(weights) <= set(names) and any(weights.values()))
        expected = f"weights of {', '.join(names) or 'no attribute'}, one of them not 0"
        checks.require(are_valid, "regression.attribute_weights", expected)

    def _check_layout(self, checks: Checks) -> None:
        checks.require(
            self.activations_checkpoint_num_layers is None
            or self.activations_checkpoint_granularity is Recompute.full,
            "activations_checkpoint_num_layers",
            "null, or model.activations_checkpoint_granularity=full",
        )
        checks.require(
            not self.sequence_parallel or self.tensor_model_parallel_size > 1,
            "sequence_parallel",
            "false, or model.tensor_model_parallel_size above 1",
        )

    def with_learning_rate(self, hidden_size: int) -> ModelConfig:
        """Return a copy in which a null learning rate has its default for this hidden size.

        The best learning rate of Adam is inversely proportional to the width of a matrix (Yang et
        al. 2022, arXiv:2203.03466, table 3), and that of LoRA about ten times as high (Schulman et
        al. 2025, "LoRA without regret").

        Raises:
            ConfigError: ``model.optim.sched.min_lr`` is above the default.
        """
        if self.optim.lr is not None:
            return self
        lr = _RATE_TIMES_WIDTH * (_LORA_RATE if self.lora.rank else 1) / hidden_size
        return replace(self, optim=replace(self.optim, lr=lr))

    @property
    def num_attributes(self) -> int:
        """Number of rewards per sample: the attributes of a regression model, 1 for pairs.

        Shapes of tensors call it A.
        """
        if self.reward_model_type is RewardModelType.regression:
            return len(self.regression.attributes)
        return 1
