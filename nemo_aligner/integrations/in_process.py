"""Score with a reward model in the trainer's process; its weights may leave the idle GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock

import torch

from nemo_aligner.config.evaluation import RewardEnvironmentConfig
from nemo_aligner.config.model import layout_sizes
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.scorer import OnError, ScoredRows
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import initialize_layout
from nemo_aligner.models.offload import OffloadGroup, OffloadPolicy
from nemo_aligner.serving.engine.scorer import RewardScorer, load_scorer
from nemo_aligner.utils.console import say
from nemo_aligner.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_DEVICE_FILES = Path("/dev")  # a node's GPUs are nvidia0, nvidia1, ... there


class InProcessScorer:
    """Scorer that runs a ``RewardScorer`` in this process.

    Calls from several threads run one after another. If the model runs on several ranks, all of
    them must make the same calls. An instance made by ``load`` must be closed.
    """

    def __init__(
        self, scorer: RewardScorer, cpu_offload: bool = False, resources: ExitStack | None = None
    ) -> None:
        """Wrap a scorer.

        Args:
            scorer: computes the rewards.
            cpu_offload: keep the weights in host memory except during ``score_rows``.
            resources: contexts that ``close`` exits, such as the process group; None if there are
                none.
        """
        self._scorer = scorer
        self._lock = Lock()
        self._weights: OffloadGroup | None = None
        if cpu_offload:
            tensors = [*scorer.model.parameters(), *scorer.model.buffers()]
            self._weights = OffloadGroup(tensors, OffloadPolicy.constant)
            self._weights.offload()
        self._resources = ExitStack() if resources is None else resources

    @classmethod
    def load(cls, config: RewardEnvironmentConfig) -> InProcessScorer:
        """Load ``rm_model_file``, with this process as its only rank.

        Raises:
            ConfigError: the settings need several processes.
            CheckpointError: the model cannot be read.
        """
        assert config.rm_model_file is not None
        model = config.model
        sizes = layout_sizes(model)
        ranks = {name: size for name, size in sizes.items() if size > 1}
        if ranks:
            raise ConfigError(
                f"model: got the parallel sizes {ranks}, wanted 1 for each in a single process. "
                "Start nemo-aligner serve with torchrun instead, and set url to its address"
            )
        # If loading fails, the end of this block destroys the process group. Otherwise ``pop_all``
        # keeps the group until ``close``.
        with ExitStack() as resources:
            device = resources.enter_context(launch()).device
            layout = initialize_layout()
            scorer = load_scorer(
                config.rm_model_file,
                layout,
                precision=config.precision,
                micro_batch_tokens=config.model.micro_batch_tokens,
                invariant_rows=config.model.invariant_rows,
                cuda_graphs=config.model.cuda_graphs,
                kernels=config.model.kernels,
                prefix_cache_tokens=config.prefix_cache_tokens,
            )
            _report_device(config.rm_model_file, device)
            return cls(scorer, config.cpu_offload, resources.pop_all())

    @property
    def contract(self) -> ScoringContract:
        """The scoring contract of the model."""
        return self._scorer.contract

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the A columns of the rewards."""
        return self._scorer.attributes

    def score_rows(self, samples: Sequence[Text], *, on_error: OnError = "nan") -> ScoredRows:
        """Score N samples; with ``on_error="nan"`` a rejected sample gets NaN, and its reason.

        Raises:
            DataError: with ``on_error="raise"``, for the first sample that is rejected.
            ServingError: the reward of a sample is not a finite number.
        """
        with self._lock, self._weights_on_device():
            return self._scorer.score_rows(samples, on_error=on_error).check_finite()

    def find_rejected(self, samples: Sequence[Text]) -> dict[int, str]:
        """Return why samples are rejected, by their number."""
        return self.score_rows(samples).rejected

    @contextmanager
    def _weights_on_device(self) -> Iterator[None]:
        if self._weights is None:
            yield
            return
        self._weights.reload()
        try:
            yield
        finally:
            self._weights.offload()

    def close(self) -> None:
        """Destroy the process group, if ``load`` has created one.

        A scorer that was passed to the constructor stays usable: its weights return to the device.
        """
        with self._lock:
            if self._weights is not None:
                self._weights.reload()
            self._resources.close()


def _report_device(file: str, device: torch.device) -> None:
    """Print the device of a loaded model; warn if it is the CPU of a node with GPUs."""
    say(f"{file}: the reward model scores on {device}")
    if device.type == "cpu" and any(_DEVICE_FILES.glob("nvidia[0-9]*")):
        logger.warning(
            "%s: the reward model scores on the CPU, which is slow, because this process sees none "
            "of the node's GPUs. Before ray starts the process, set "
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0, and unset CUDA_VISIBLE_DEVICES if it is empty",
            file,
        )
