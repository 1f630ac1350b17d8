"""Settings of a model: its data, architecture, layout, optimizer, LoRA; and the layout to score
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf
from typing import Any

from nemo_aligner.config.common import (
    Checks,
    Contradicting,
    IdleRule,
    Malformed,
    Overlong,
    RewardModelType,
    setting,
)
from nemo_aligner.utils.errors import ConfigError

# Data.


@dataclass
class DataPrefixConfig:
    """Files of every part."""

    train: list[str] = setting([], "files to train on")
    validation: list[str] = setting([], "files to validate on, each as a set of its own")
    test: list[str] = setting([], "files to measure the finished model on, once, at the end")
    train_weights: list[float] = setting(
        [], "weights of the training files; []: by number of records"
    )

    def __post_init__(self) -> None:
        with Checks("model.data.data_prefix", self) as checks:
            are_weights = all(0 < weight < inf for weight in self.train_weights)
            checks.require(are_weights, "train_weights", "numbers above 0")
            for part in ("train", "validation", "test"):
                wanted = "files alone; weights of training files go into train_weights"
                checks.require(not any(map(_is_number, getattr(self, part))), part, wanted)

    @property
    def all_files(self) -> list[str]:
        """Files of all parts, in the order of the parts."""
        return [*self.train, *self.validation, *self.test]


def _is_number(text: str) -> bool:
    """Return True for a weight, as NeMo writes between the files; 2024_10 is a file."""
    if "_" in text:
        return False
    try:
        float(text)
    except ValueError:
        return False
    return True


# Pairs as TRL's RewardTrainer reads them, which ends raw texts with EOS.
TRL_FORMAT = "trl"


@dataclass
class DataConfig:
    """Data files, and the rules of the scoring contract by which texts become token ids.

    Where ``template``, ``chat_template_kwargs``, ``add_bos`` or ``add_eos`` is null, the reward
    model that training starts from decides, and for a base model its tokenizer; but with ``format:
    trl`` a null ``add_eos`` is true.
    """

    data_prefix: DataPrefixConfig = field(default_factory=DataPrefixConfig)
    format: str = setting("auto", "auto, or a format's name (docs/data.md)")
    prompt_key: str | None = setting(None, "field with the prompt (null: prompt)")
    chosen_key: str | None = setting(None, "field with the chosen reply (null: chosen)")
    rejected_key: str | None = setting(None, "field with the rejected reply (null: rejected)")
    system_prompt_file: str | None = setting(None, "system prompt for conversations that have none")
    prompt_file: str | None = setting(
        None, "text around the last user turn; {} stands for the turn"
    )
    input_template: str | None = setting(
        None, "write prompt and reply as raw text; {} stands for the prompt"
    )
    seq_length: int = setting(1024, "most tokens of a text")
    overlong: Overlong = setting(Overlong.drop, "what to do with a longer text")
    template: str | None = setting(
        None, "tokenizer (its own), chatml, llama3, plain, zephyr, or a file"
    )
    chat_template_kwargs: dict[str, Any] | None = setting(
        None, "variables of the template, as {enable_thinking: false} (null: none)"
    )
    add_bos: bool | None = setting(None, "put BOS before every text")
    add_eos: bool | None = setting(None, "put EOS after every text")
    step_separator: str | None = setting(
        None, "what stands between a reply's steps (null: a blank line)"
    )
    neutral_label: float | None = setting(
        1.0, "label of PRM800K's neutral steps: 1 right, 0 wrong, null: left out"
    )
    allow_prompt_overlap: bool = setting(False, "allow prompts in both training and validation")
    malformed: Malformed = setting(
        Malformed.error, "records that cannot be read: stop with an error, or skip them"
    )
    max_malformed: float = setting(0.01, "largest share of a file that may be skipped, 0 to 1")

    contradicting: Contradicting = setting(
        Contradicting.keep, "pairs of one file that say the opposite of each other: keep, or drop"
    )

    index_dir: str | None = setting(
        None, "folder for tokenized files (null: next to files of 4 MiB or more)"
    )
    keep_index: bool = setting(True, "keep tokens on the disk for the next start")

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
    """The labels of rated replies."""

    attributes: list[str] = setting([], "label columns, in the order of label lists")
    attribute_weights: dict[str, float] = setting(
        {}, "weights by attribute for the combined reward; {}: 1 each"
    )
    loss_mask_val: float = setting(-100.0, "number that means a missing label, like null")

    def __post_init__(self) -> None:
        with Checks("model.regression", self) as checks:
            are_names = all(name.strip() for name in self.attributes)
            checks.require(are_names, "attributes", "names, none of them empty")


# LoRA.

# Megatron's names of the linear layers of a block: fused QKV, attention output, MLP up (with the
# gate), MLP down.
LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass
class LoraConfig:
    """LoRA (Hu et al. 2021, arXiv:2106.09685) on the linear layers of the backbone."""

    rank: int = setting(0, "rank of the LoRA matrices; 0: train the weights themselves")
    alpha: float = setting(32.0, "LoRA's output is scaled by alpha / rank")
    dropout: float = setting(0.0, "dropout on LoRA's inputs")
    targets: list[str] = setting(
        list(LORA_TARGETS), "linear layers with LoRA; default: all four of a layer"
    )

    def __post_init__(self) -> None:
        with Checks("model.lora", self) as checks:
            checks.require_not_negative("rank")
            checks.require_positive("alpha")
            checks.require(0 <= self.dropout < 1, "dropout", "0 or more, and less than 1")
            known = bool(self.targets) and set(self.targets) <= set(LORA_TARGETS)
            fits = known and len(set(self.targets)) == len(self.targets)
            checks.require(fits, "targets", f"at least one of {', '.join(LORA_TARGETS)}, each once")


# Layout of a finished reward model.


class ContextExchange(Enum):
    all_gather = "all_gather"
    p2p = "p2p"


class PointwiseChoice(Enum):
    """Implementations of RMSNorm, SwiGLU and RoPE."""

    eager = "eager"
    compile = "compile"
    liger = "liger"
    triton = "triton"


ROWS_BY_DEVICE = 0
"""Rows of a product (see ``LayoutConfig.invariant_rows``) where none are set."""


ANY_ROWS: IdleRule = ({"model.batch_invariant": False}, ("model.batch_invariant_rows",))
WHOLE_TEXTS: IdleRule = ({"model.context_parallel_size": 1}, ("model.cp_comm_type",))


@dataclass
class LayoutConfig:
    """Batch invariance of rewards and parallel layout, of every model that is trained or scores."""

    batch_invariant: bool = setting(True, "rewards have the same bits alone and in any batch")
    batch_invariant_rows: int | None = setting(
        None, "rows per matmul, and others of the same bits; null: by device"
    )
    cuda_graphs: bool = setting(
        False, "launch a pack's kernels as one CUDA graph, on a GPU of one rank"
    )
    tensor_model_parallel_size: int = setting(1, "number of ranks that share each layer")
    pipeline_model_parallel_size: int = setting(1, "number of pipeline stages")
    context_parallel_size: int = setting(1, "number of ranks that share each text, for long texts")
    expert_model_parallel_size: int = setting(
        1, "number of data parallel ranks that share the experts of a mixture"
    )
    cp_comm_type: ContextExchange = setting(
        ContextExchange.all_gather,
        "how these exchange keys and values: all_gather, or p2p round a ring",
    )
    sequence_parallel: bool = setting(
        False, "also split norms along the tokens; needs tensor parallelism"
    )
    pointwise_kernels: PointwiseChoice | None = setting(
        None, "RMSNorm, SwiGLU and RoPE; null: triton on a GPU, else eager"
    )

    def __post_init__(self) -> None:
        with Checks("model", self) as checks:
            self.check(checks)

    def check(self, checks: Checks) -> None:
        """Check the section; whoever adds settings extends it."""
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
            "all_gather, or model.batch_invariant=false: the bits of a ring depend on the pack",
        )
        depends_on_rows = self.pointwise_kernels in (PointwiseChoice.compile, PointwiseChoice.liger)
        checks.require(
            not (depends_on_rows and self.batch_invariant),
            "pointwise_kernels",
            "triton, eager, or model.batch_invariant=false: bits of others may depend on the pack",
        )

    @property
    def is_ring(self) -> bool:
        """Keys and values go round a ring of ranks."""
        return self.context_parallel_size > 1 and self.cp_comm_type is ContextExchange.p2p

    @property
    def invariant_rows(self) -> int | None:
        """Rows of a product for ``make_batch_invariant``; None: rewards may depend on the batch."""
        return (self.batch_invariant_rows or ROWS_BY_DEVICE) if self.batch_invariant else None


def layout_sizes(model: LayoutConfig) -> dict[str, Any]:
    """Sizes of a layout, as ``distributed.layout.initialize_layout`` takes them."""
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
    """Parallel layout of a finished reward model for scoring."""

    micro_batch_tokens: int = setting(8192, "tokens per forward pass")

    def check(self, checks: Checks) -> None:
        super().check(checks)
        checks.require_positive("micro_batch_tokens")


# The model to train.

LAYERS_NOT_OFFLOADED = 2
"""Last layers of a model whose activations stay on the GPU with ``activations_offload``.

When the backward pass begins, copies of theirs would just have left, and come back at once.
"""


class Recompute(Enum):
    none = "none"
    selective = "selective"
    full = "full"


class Schedule(Enum):
    cosine = "cosine"
    linear = "linear"
    constant = "constant"


@dataclass
class SchedulerConfig:
    """Learning rate over optimizer steps; it decays until the last step of the run."""

    name: Schedule = setting(Schedule.cosine, "learning rate schedule after warm-up")
    warmup_steps: int = setting(10, "steps of linear warm-up from 0")
    constant_steps: int = setting(0, "number of final steps at min_lr")
    min_lr: float = setting(0.0, "final learning rate")

    def __post_init__(self) -> None:
        with Checks("model.optim.sched", self) as checks:
            checks.require_not_negative("warmup_steps", "constant_steps", "min_lr")

    def last_decay_step(self, total_steps: int) -> int:
        """The step of a run of ``total_steps`` at which the rate comes to its end.

        Raises:
            ConfigError: the constant steps leave none to go down in.
        """
        most = max(0, total_steps - self.warmup_steps - 1)
        if self.constant_steps > most:
            raise ConfigError(
                f"model.optim.sched.constant_steps: got {self.constant_steps}, wanted at most "
                f"{most}, as the run has {total_steps} steps, {self.warmup_steps} of them warm-up, "
                "and the rate needs one to go down in; 0 lets it go down until the end"
            )
        # A run shorter than its warm-up stays in it; Megatron wants a step beyond.
        return max(total_steps - self.constant_steps, self.warmup_steps + 1)


IN_CONSTANT_SCHEDULES = ("model.optim.sched.constant_steps", "model.optim.sched.min_lr")
"""Settings that do nothing where the learning rate is constant."""


# 8.7e-5 at the 576 of SmolLM2-135M (docs/training.md), 1.2e-5 at the 4096 of a Llama of 8B.
_RATE_TIMES_WIDTH, _LORA_RATE = 0.05, 10


@dataclass
class OptimConfig:
    """AdamW through megatron-core's distributed optimizer."""

    lr: float | None = setting(
        None, "learning rate after warm-up; null: 0.05 / hidden size, 0.5 with LoRA"
    )
    weight_decay: float = setting(0.01, "applies to matrices, not to norms and biases")
    betas: tuple[float, float] = setting((0.9, 0.98), "Adam's")
    eps: float = setting(1e-8, "Adam's")
    head_lr_mult: float = setting(1.0, "learning rate of the head, as a multiple of lr")
    layer_lr_decay: float = setting(
        1.0, "learning rate of a layer, as a multiple of that of the one above"
    )
    cpu_offload: bool = setting(False, "Adam's moments (8 bytes a parameter) in host memory")
    sched: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        with Checks("model.optim", self) as checks:
            checks.require_positive("lr", "eps", "head_lr_mult")
            checks.require_not_negative("weight_decay")
            checks.require_finite("lr", "eps", "weight_decay", "head_lr_mult")
            fits = 0 < self.layer_lr_decay <= 1
            checks.require(fits, "layer_lr_decay", "a number above 0 and at most 1")
            fits = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
            checks.require(fits, "betas", "two numbers, each 0 or more and less than 1")
            # No model has a higher one by its width, which is not known here.
            most = _RATE_TIMES_WIDTH * _LORA_RATE if self.lr is None else self.lr
            fits = self.sched.min_lr <= most
            checks.require(fits, "sched.min_lr", f"at most model.optim.lr ({most})")


class ScoredPosition(Enum):
    last_token = "last_token"
    reply_mean = "reply_mean"
    turns = "turns"
    step_ends = "step_ends"
    step_marks = "step_marks"
    step_answers = "step_answers"


@dataclass
class HeadConfig:
    """Head that computes rewards from hidden states, in fp32."""

    reads: ScoredPosition = setting(
        ScoredPosition.last_token,
        "read the last token, the reply's mean, or each turn or step",
    )
    bias: bool = setting(False, "add a bias to each layer of the head")
    mlp_size: int | None = setting(None, "width of a hidden layer with ReLU; null: none")

    def __post_init__(self) -> None:
        with Checks("model.head", self) as checks:
            checks.require_positive("mlp_size")


@dataclass
class ModelConfig(LayoutConfig):
    """Model to train, its parallel layout, and its data."""

    reward_model_type: RewardModelType = setting(
        RewardModelType.binary_ranking, "learn from pairs, or from labels of single replies"
    )
    objective: str | None = setting(
        None, "an objective (docs/training.md), or module:Name; null: the default"
    )
    objective_kwargs: dict[str, Any] = setting({}, "settings of the objective")
    regression: RegressionConfig = field(default_factory=RegressionConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    activations_checkpoint_granularity: Recompute = setting(
        Recompute.none, "which activations to recompute in the backward pass"
    )
    activations_checkpoint_num_layers: int | None = setting(
        None, "with full: recompute the first N layers of a stage; null: all"
    )
    activations_offload: bool = setting(
        False, "keep activations for the backward pass in host memory"
    )
    freeze_layers: int = setting(0, "number of lowest layers to freeze, with the embeddings")
    train_router: bool = setting(False, "also train which experts a mixture's tokens go to")
    moe_aux_loss_coeff: float = setting(
        0.0, "factor of the loss that evens out the load of experts; 0: none"
    )
    lora: LoraConfig = field(default_factory=LoraConfig)
    global_batch_size: int = setting(64, "records (pairs or rated replies) per step")
    micro_batch_tokens: int = setting(4096, "tokens per forward and backward pass")
    seed: int = setting(1234, "random seed of the head and of the order of the data")
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)

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
            "0, or model.train_router=true: a router that is frozen learns no balance",
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
            fits = bool(names) and len(set(names)) == len(names)
            checks.require(fits, "regression.attributes", "at least one attribute name, each once")

    def _check_weights(self, checks: Checks) -> None:
        given, known = self.regression.attribute_weights, self.regression.attributes
        fits = not given or (set(given) <= set(known) and any(given.values()))
        wanted = f"weights of {', '.join(known) or 'no attribute'}, one of them not 0"
        checks.require(fits, "regression.attribute_weights", wanted)

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
        """These settings, with the learning rate that null stands for in a model of that width.

        Adam's best rate for a matrix falls with its width (Yang et al. 2022, arXiv:2203.03466,
        table 3), and LoRA's is about ten times as high (Schulman et al. 2025, "LoRA without
        regret").

        Raises:
            ConfigError: ``model.optim.sched.min_lr`` is above it.
        """
        if self.optim.lr is not None:
            return self
        lr = _RATE_TIMES_WIDTH * (_LORA_RATE if self.lora.rank else 1) / hidden_size
        return replace(self, optim=replace(self.optim, lr=lr))

    @property
    def num_attributes(self) -> int:
        """The width of the reward head."""
        if self.reward_model_type is RewardModelType.regression:
            return len(self.regression.attributes)
        return 1
