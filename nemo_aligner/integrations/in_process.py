"""A reward model in this process that is only on its device while it scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from nemo_aligner.config.evaluation import RewardEnvironmentConfig
from nemo_aligner.config.model import layout_sizes
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.scorer import OnError, ScoredRows
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import initialize_layout
from nemo_aligner.models.offload import OffloadGroup, OffloadPolicy
from nemo_aligner.serving.engine.scorer import RewardScorer, load_scorer
from nemo_aligner.utils.errors import ConfigError


class InProcessScorer:
    """Scores by a ``RewardScorer``, in packs of any lengths; every rank of it calls the same.

    ``close`` has to be called where the model was loaded here.
    """

    def __init__(
        self, scorer: RewardScorer, cpu_offload: bool = False, owned: ExitStack | None = None
    ) -> None:
        """With ``cpu_offload`` the model is on the device only while it scores.

        ``owned``: what ``close`` ends with it.
        """
        self._scorer = scorer
        self._weights: OffloadGroup | None = None
        if cpu_offload:
            tensors = [*scorer.model.parameters(), *scorer.model.buffers()]
            self._weights = OffloadGroup(tensors, OffloadPolicy.constant)
            self._weights.offload()
        self._owned = ExitStack() if owned is None else owned

    @classmethod
    def load(cls, config: RewardEnvironmentConfig) -> InProcessScorer:
        """The model of ``rm_model_file``, with this process as its only rank.

        Raises:
            ConfigError: settings that need several processes.
            CheckpointError: the model cannot be read.
        """
        assert config.rm_model_file is not None
        model = config.model
        sizes = layout_sizes(model)
        ranks = {name: size for name, size in sizes.items() if size > 1}
        if ranks:
            raise ConfigError(
                f"model: got the parallel sizes {ranks}, wanted 1 of each in one process; start "
                "nemo-aligner serve by torchrun, and give its url"
            )
        # A model that cannot be loaded leaves no process group behind.
        with ExitStack() as started:
            started.enter_context(launch())
            layout = initialize_layout()
            scorer = load_scorer(
                config.rm_model_file,
                layout,
                precision=config.precision,
                micro_batch_tokens=config.model.micro_batch_tokens,
                invariant_rows=config.model.invariant_rows,
                cuda_graphs=config.model.cuda_graphs,
                pointwise_kernels=config.model.pointwise_kernels,
                prefix_cache_tokens=config.prefix_cache_tokens,
            )
            return cls(scorer, config.cpu_offload, started.pop_all())

    @property
    def contract(self) -> ScoringContract:
        """The scoring contract."""
        return self._scorer.contract

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the columns of the rewards."""
        return self._scorer.attributes

    def score_rows(self, samples: Sequence[Text], *, on_error: OnError = "nan") -> ScoredRows:
        """Score samples; see ``Scorer``.

        Raises:
            DataError: with ``on_error="raise"``, for the first sample that is rejected.
            ServingError: the model's reward of a sample is not a finite number.
        """
        with self._weights_here():
            return self._scorer.score_rows(samples, on_error=on_error).check_finite()

    @contextmanager
    def _weights_here(self) -> Iterator[None]:
        if self._weights is None:
            yield
            return
        self._weights.reload()
        try:
            yield
        finally:
            self._weights.offload()

    def close(self) -> None:
        """End the process group if the model was loaded here; a given scorer is left as it is."""
        if self._weights is not None:
            self._weights.reload()
        self._owned.close()
