"""``nemo_aligner.RewardModel``: a reward model in this process, to score, evaluate and export.

Nothing large is imported before a model is loaded: the verbs' options are read through here, too.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload
from weakref import WeakKeyDictionary

from nemo_aligner.config.common import Precision
from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.load import idle_notes, idle_settings, load_given
from nemo_aligner.contract.messages import check_texts
from nemo_aligner.contract.scorer import check_on_error
from nemo_aligner.data.records import write_records
from nemo_aligner.evaluation.report import check_report
from nemo_aligner.utils.console import say
from nemo_aligner.utils.errors import ConfigError
from nemo_aligner.utils.processes import find_process, make_temporary, remove_temporary

if TYPE_CHECKING:
    import numpy as np

    from nemo_aligner.checkpoint.hf.export import ExportSummary
    from nemo_aligner.contract.contract import ScoringContract
    from nemo_aligner.contract.messages import Text
    from nemo_aligner.contract.scorer import ScoredRows, StepRewards
    from nemo_aligner.distributed.layout import ParallelLayout
    from nemo_aligner.evaluation.run import Evaluation
    from nemo_aligner.evaluation.sources import RewardSource

# Settings of an evaluation; the others are about the model, which is loaded already.
_OF_EVALUATION = (
    "data", "task", "threshold", "threshold_from", "aggregate", "swapped", "robustness_pairs",
    "output", "output_rewards", "report",
)  # fmt: skip
_SHARD_BYTES = 5 * 10**9


class RewardModel:
    """A reward model in this process; ``train`` and ``from_pretrained`` make it.

    Rewards are those that the server gives, to the bit. Its weights are there from the first use
    to ``close``, or to a training or an export in this process, after which they are loaded again
    when they are needed. Several models may be loaded; they share the process group, and those of
    another parallel layout take turns. Under torchrun every rank makes the same calls, and gets
    the same results.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """``settings`` are keys of ``nemo-aligner evaluate``; nothing is loaded yet.

        Raises:
            SettingsError: they cannot be used, or name no model of this process.
        """
        self._settings = dict(settings)
        self._config = load_given(EvaluateConfig, self._settings)
        key, self.name = self._config.source_key()
        if key == "server":
            raise ConfigError("server: it is not of this process: see nemo_aligner.serving.client")
        self._idle = frozenset(idle_settings(self._config))  # said here, and not at each use again
        for note in idle_notes(self._config):
            say(note)

    @classmethod
    def from_pretrained(
        cls,
        path: str | PathLike[str] | None = None,
        *,
        hf_model: str | PathLike[str] | None = None,
        **settings: Any,
    ) -> RewardModel:
        """Load a reward model.

        Args:
            path: a ``.nemo`` archive, or the folder that it unpacks to
            hf_model: instead, a folder or name of the hub, whose decoder transformers runs
            settings: those of ``nemo-aligner evaluate`` that are about the model, by their keys, as
                ``**{"precision": "bf16", "model.tensor_model_parallel_size": 2}``

        Raises:
            ConfigError: the settings cannot be used, or there is no GPU for a rank.
            CheckpointError: the model cannot be read.
        """
        named = {"rm_model_file": path, "hf_model": hf_model}
        given = {key: value for key, value in named.items() if value is not None}
        model = cls({**settings, **given})
        model._source()
        return model

    def __repr__(self) -> str:
        return f"RewardModel({self.name!r})"

    def __enter__(self) -> RewardModel:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the columns of its rewards."""
        return self._source().attributes

    def contract(self) -> ScoringContract:
        """The scoring contract.

        Raises:
            ConfigError: it is a model of transformers, which has none.
        """
        contract = self._source().contract
        if contract is None:
            raise ConfigError(f"{self.name}: got a model of transformers, which has no contract")
        return contract

    @overload
    def score(
        self,
        texts: Sequence[Text],
        *,
        on_error: Literal["raise", "nan"] = "raise",
        steps: Literal[False] = False,
    ) -> np.ndarray: ...

    @overload
    def score(self, texts: Sequence[Text], *, steps: Literal[True]) -> list[StepRewards]: ...

    def score(
        self,
        texts: Sequence[Text],
        *,
        on_error: Literal["raise", "nan"] = "raise",
        steps: bool = False,
    ) -> np.ndarray | list[StepRewards]:
        """Rewards ``[N, A]`` float32 of N texts, a column for each of ``attributes``.

        A string is scored as it is. A list of messages (``role`` and ``content``, the reply last)
        gets the model's chat template, and so does a ``Conversation``, or a dict with ``messages``,
        ``tools`` and ``documents``. With ``on_error="nan"`` a text that the contract refuses has
        NaN, as with the client of a server.

        With ``steps`` they are those of every turn or step instead, of a model that reads them: for
        each text ``rewards`` ``[S, A]``, of which the contract's ``aggregate`` makes the text's, or
        the last one is it, and ``spans``, which say what characters of which message each is the
        reward of. One pass computes all of them.

        Raises:
            ConfigError: there are no rewards of steps.
            DataError: the contract refuses a text; the message has its number, from 0.
            ServingError: the model's reward of a text is not a finite number.
            TypeError: ``texts`` is one text, and no list of them.
        """
        check_on_error(on_error)
        source = self._source()
        if steps and not source.has_steps:
            raise ConfigError(
                f"steps: {self.name} has one reward for each text, wanted a model that was trained "
                "with model.head.reads=turns or step_ends, for example"
            )
        scored = source.scorer.score_rows(check_texts(texts), on_error=on_error).check_finite()
        return scored.rewards if scored.steps is None or not steps else scored.steps.tolist()

    def score_rows(self, texts: Sequence[Text]) -> ScoredRows:
        """``score``, with the reasons why refused texts have none, as ``RewardClient.score_rows``.

        A model with K outputs for each attribute also gives ``spread`` ``[N, A]`` and ``outputs``
        ``[N, A * K]``.

        Raises:
            ServingError: the model's reward of a text is not a finite number.
            TypeError: ``texts`` is one text, and no list of them.
        """
        return self._source().scorer.score_rows(check_texts(texts)).check_finite()

    def evaluate(
        self, records: str | PathLike[str] | Iterable[Mapping[str, Any]], **settings: Any
    ) -> Evaluation:
        """Measure it on held-out records, or a file of them, as ``nemo-aligner evaluate`` does.

        What is returned prints as the verb's table. Errors name records by ``records.jsonl:N``,
        counted from 1.

        Args:
            settings: those of the verb that are not about the model: ``task``, ``threshold``,
                ``aggregate``, ``swapped``, ``robustness_pairs``, ``output``, ``output_rewards``,
                ``report`` and ``data.*``

        Raises:
            AlignerError: what ends the verb, with the same message.
        """
        for key in settings:
            if key.partition(".")[0] not in _OF_EVALUATION:
                raise ConfigError(
                    f"{key}: it is none of {', '.join(_OF_EVALUATION)}, the settings of an "
                    "evaluation; those of the model go to from_pretrained"
                )
        if isinstance(records, str | PathLike):
            return self._evaluate(records, settings)
        folder = make_temporary("nemo_aligner_records_")
        try:
            path = folder / "records.jsonl"
            write_records(path, records)
            found = self._evaluate(path, settings)
        finally:
            remove_temporary(folder)
        # The folder is gone, and its name is another one each time.
        return replace(
            found,
            rows=[{**row, "record": Path(row["record"]).name} for row in found.rows],
            table=found.table.replace(f"{folder}/", ""),
        )

    def export(
        self,
        output: str | PathLike[str],
        *,
        dtype: str | None = None,
        merge: bool = False,
        head: str | None = None,
        adapter_of: str | None = None,
        max_shard_bytes: int = _SHARD_BYTES,
        base_license: str = "unknown",
    ) -> ExportSummary | str:
        """Write a Hugging Face folder that scores the same, as ``nemo-aligner export`` does.

        Args:
            output: the folder to make, or a ``.gguf`` file for llama.cpp
            dtype: ``fp32``, ``bf16`` or ``fp16``, of the body; None: as stored
            merge: one output, the attributes by the weights of the contract
            head: form of the head, ``score.bias`` or ``v_head.summary``; None: its own
            adapter_of: write LoRA by itself, for peft, onto this base model
            max_shard_bytes: of a safetensors file
            base_license: the base model's licence, for the model card

        Raises:
            CheckpointError: ``output`` is there, or what was written does not score the same.
            ConfigError: there are several processes, or it is a model of transformers already.
        """
        if self._config.rm_model_file is None:
            raise ConfigError(f"{self.name}: got a model of transformers, wanted a .nemo file")
        release_models()  # an export has a process group of its own, and checks what it wrote
        return export_archive(
            Path(self.name),
            Path(output),
            dtype=dtype,
            merge=merge,
            head=head,
            adapter_of=adapter_of,
            max_shard_bytes=max_shard_bytes,
            base_license=base_license,
        )

    def close(self) -> None:
        """Unload the weights; the next use loads them again."""
        _SESSION.leave(self)

    def _evaluate(self, path: str | PathLike[str], settings: Mapping[str, Any]) -> Evaluation:
        config = load_given(EvaluateConfig, {**self._settings, **settings, "data.path": path})
        if config.report is not None:
            check_report("report")
        for note in idle_notes(config, reported=self._idle):
            say(note)
        from nemo_aligner.evaluation.run import evaluate_source

        return evaluate_source(config, self._source())

    def _source(self) -> RewardSource:
        """The loaded source of rewards; loads it if need be."""
        return _SESSION.load(self, self._config)


def release_models() -> None:
    """Unload all models of this process and end their process group, as a run needs its own."""
    _SESSION.close()


def export_archive(
    archive: Path,
    output: Path,
    *,
    dtype: str | None,
    merge: bool,
    head: str | None,
    adapter_of: str | None,
    max_shard_bytes: int,
    base_license: str,
) -> ExportSummary | str:
    """Export a reward model's ``.nemo``, for the verb and for ``RewardModel.export``.

    Raises:
        ConfigError, CheckpointError: see ``RewardModel.export``.
    """
    from nemo_aligner.checkpoint.hf.adapter import export_adapter
    from nemo_aligner.checkpoint.hf.export import export_to_hf
    from nemo_aligner.checkpoint.hf.reward_archive import ExportOptions
    from nemo_aligner.config.dtypes import torch_dtype
    from nemo_aligner.distributed.launch import single_process
    from nemo_aligner.distributed.layout import initialize_layout

    how = ExportOptions(
        dtype=None if dtype is None else torch_dtype(Precision(dtype)),
        merge=merge,
        head=head,
        max_shard_bytes=max_shard_bytes,
        base_license=base_license,
    )
    if output.suffix.lower() == ".gguf":
        if adapter_of is not None or head is not None:
            raise ConfigError(f"{output}: got an adapter or a head's form, wanted none for a .gguf")
        from nemo_aligner.checkpoint.hf.gguf_out import export_to_gguf

        with single_process():
            return export_to_gguf(archive, output, how)
    if adapter_of is not None:
        if dtype is not None:
            raise ConfigError("dtype: an adapter is written as it is stored, wanted none")
        if head is not None:
            raise ConfigError(
                f"head: got {head!r} for an adapter of peft, which has score; wanted none"
            )
        with single_process():
            return export_adapter(archive, output, adapter_of, initialize_layout(), how)
    with single_process():
        return export_to_hf(archive, output, initialize_layout(), how)


class _Session:
    """The process group that loaded models share, with one parallel layout at a time."""

    def __init__(self) -> None:
        # megatron-core's process groups are global, so one layout is up at a time.
        self._held: ExitStack | None = None
        self._sizes: dict[str, Any] | None = None
        self._layout: ParallelLayout | None = None
        # Weakly: a model that nobody holds any more frees its weights, closed or not.
        self._loaded: WeakKeyDictionary[RewardModel, RewardSource] = WeakKeyDictionary()

    def load(self, model: RewardModel, config: EvaluateConfig) -> RewardSource:
        """The source of rewards of ``model``; loads it beside those of the same layout.

        Raises:
            AlignerError: it cannot be loaded.
        """
        found = self._loaded.get(model)
        if found is not None:
            return found
        from nemo_aligner.evaluation.sources import load_source, sizes_of_model

        layout = self._open(sizes_of_model(config))
        try:
            return self._loaded.setdefault(model, load_source(config, layout))
        finally:
            # Nothing could be loaded. Among several ranks the others may still be at it, and to end
            # the group under them would hide the error.
            if not self._loaded and find_process(os.environ).world_size == 1:
                self.close()

    def _open(self, sizes: dict[str, Any]) -> ParallelLayout:
        if self._layout is not None and self._sizes == sizes:
            return self._layout
        self.close()
        from nemo_aligner.distributed.launch import launch
        from nemo_aligner.distributed.layout import initialize_layout

        with ExitStack() as held:
            held.enter_context(launch())
            self._layout, self._sizes = initialize_layout(**sizes), sizes
            self._held = held.pop_all()
        return self._layout

    def leave(self, model: RewardModel) -> None:
        """Unload one model, and end the process group with the last of them."""
        self._loaded.pop(model, None)
        if not self._loaded:
            self.close()

    def close(self) -> None:
        """Unload all models."""
        self._loaded.clear()
        held, self._held, self._sizes, self._layout = self._held, None, None, None
        if held is not None:
            held.close()


_SESSION = _Session()


@atexit.register
def _close_at_exit() -> None:
    """Unload models, except after an error among several ranks, whose group may be half gone."""
    if find_process(os.environ).world_size == 1 or getattr(sys, "last_value", None) is None:
        release_models()
