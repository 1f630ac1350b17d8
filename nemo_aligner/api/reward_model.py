"""``nemo_aligner.RewardModel``: load a reward model in this process, score, evaluate and export it.

torch is imported only when a model is loaded, so that the command line, which imports this module,
starts quickly.
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
from nemo_aligner.config.describe import list_keys, suggest_setting
from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.ineffective import describe_ineffective_settings, find_ineffective_settings
from nemo_aligner.config.load import load_settings
from nemo_aligner.contract.messages import check_texts
from nemo_aligner.contract.principles import add_principles
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
    from nemo_aligner.contract.principles import Principles
    from nemo_aligner.contract.scorer import ScoredRows, StepRewards
    from nemo_aligner.distributed.layout import ParallelLayout
    from nemo_aligner.evaluation.run import Evaluation
    from nemo_aligner.evaluation.sources import RewardSource

# The settings of ``nemo-aligner evaluate`` that ``RewardModel.evaluate`` takes. Settings of the
# model are not among them, because the model is loaded already.
_EVALUATION_SETTINGS = (
    "data", "task", "threshold", "threshold_from", "aggregate", "swapped", "robustness_pairs",
    "output", "output_rewards", "report",
)  # fmt: skip
_SHARD_BYTES = 5 * 10**9


class RewardModel:
    """A reward model in this process, as ``train`` or ``from_pretrained`` returns it.

    Its rewards are bit-identical to those of the server. Under torchrun, every rank makes the same
    calls and gets the same results.

    Weights are loaded when they are needed. ``close``, training and an export in this process
    unload them; the next use loads them again. Several models can be loaded together if they have
    the same parallel layout. Loading a model with another layout unloads all others.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Check the settings; nothing is loaded yet.

        Args:
            settings: settings of ``nemo-aligner evaluate``, by their keys.

        Raises:
            SettingsError: the settings are invalid, or name no model.
            ConfigError: the settings name a server instead of a model.
        """
        config = load_settings(EvaluateConfig, settings)
        key, self.name = config.source_key()
        # The weights may be loaded again after the program has changed its working directory.
        path = os.path.abspath(self.name) if os.path.exists(self.name) else self.name
        absolute: dict[str, Any] = {key: path}
        self._settings = {**settings, **absolute}
        self._config = replace(config, **absolute)
        if key == "server":
            raise ConfigError(
                "server: a RewardModel runs in this process. For a server use RewardClient of "
                "nemo_aligner.serving.client"
            )
        # Report settings without an effect once, here. ``evaluate`` leaves these settings out of
        # its own reports.
        self._idle = frozenset(find_ineffective_settings(self._config))
        for note in describe_ineffective_settings(self._config):
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
            path: a ``.nemo`` archive, or a folder into which one was unpacked; or a Hugging Face
                folder, a ``.gguf`` file or a hub name, which is converted once into a cache
            hf_model: instead of ``path``, a Hugging Face folder or hub name; transformers then
                runs the model
            settings: settings of ``nemo-aligner evaluate`` that are about the model, by their keys,
                such as ``**{"precision": "bf16", "model.tensor_model_parallel_size": 2}``

        Raises:
            ConfigError: the settings are invalid, or there are fewer GPUs than ranks.
            CheckpointError: the model cannot be read.
        """
        arguments = {"rm_model_file": path, "hf_model": hf_model}
        sources = {key: value for key, value in arguments.items() if value is not None}
        model = cls({**settings, **sources})
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
        """Names of the A attributes that the model scores, which are the columns of rewards."""
        return self._source().attributes

    def contract(self) -> ScoringContract:
        """Return the scoring contract.

        Raises:
            ConfigError: the model is a Hugging Face model (``hf_model``), which has no contract.
        """
        contract = self._source().contract
        if contract is None:
            raise ConfigError(
                f"{self.name}: it is run by transformers (hf_model), so it has no scoring contract"
            )
        return contract

    @overload
    def score(
        self,
        texts: Sequence[Text],
        *,
        on_error: Literal["raise", "nan"] = "raise",
        steps: Literal[False] = False,
        principle: Principles = None,
    ) -> np.ndarray: ...

    @overload
    def score(self, texts: Sequence[Text], *, steps: Literal[True]) -> list[StepRewards]: ...

    def score(
        self,
        texts: Sequence[Text],
        *,
        on_error: Literal["raise", "nan"] = "raise",
        steps: bool = False,
        principle: Principles = None,
    ) -> np.ndarray | list[StepRewards]:
        """Score N samples.

        Args:
            texts: the samples. A string is raw text and scored verbatim. A list of messages
                (``role`` and ``content``, the reply last), a ``Conversation``, or a dict with
                ``messages``, ``tools``, ``documents`` and ``principle`` is rendered by the model's
                chat template.
            on_error: ``raise`` raises DataError for a sample that the contract rejects; ``nan``
                gives it the reward NaN, as the client of a server does.
            steps: return the rewards of every turn or step, for a model that has them.
            principle: the principle of all samples, or a list with an entry for each: a string,
                None, or a list of K strings. A sample with K principles has K rewards, one after
                the other, and counts as K samples in N.

        Returns:
            Rewards ``[N, A]`` float32, a column for each of ``attributes``. With ``steps``, a list
            of N ``StepRewards``. Each has the ``rewards`` ``[S, A]`` of the sample's S turns or
            steps, and ``spans``, the message and the range of characters of each turn or step. The
            reward of the whole sample is the last one, or all of them combined by the contract's
            ``aggregate``.

        Raises:
            ConfigError: ``steps`` is set, but the model gives only one reward per sample.
            DataError: the contract rejects a sample; the message has its number, from 0.
            ServingError: the model's reward of a sample is not a finite number.
            TypeError: ``texts`` is one sample instead of a list.
        """
        check_on_error(on_error)
        source = self._source()
        if steps and not source.has_steps:
            raise ConfigError(
                f"steps: {self.name} has only one reward for each sample; wanted a model that was "
                "trained with model.head.reads=turns or step_ends, for example"
            )
        samples = add_principles(check_texts(texts), principle)
        scored = source.scorer.score_rows(samples, on_error=on_error).check_finite()
        return scored.rewards if scored.steps is None or not steps else scored.steps.tolist()

    def score_rows(self, texts: Sequence[Text], *, principle: Principles = None) -> ScoredRows:
        """Score N samples, and return rewards, errors and more about each: see ``ScoredRows``.

        A sample that the contract rejects gets the reward NaN, and ``errors`` has the reason.
        ``RewardClient.score_rows`` returns the same from a server. ``principle`` is as in
        ``score``.

        Raises:
            ServingError: the model's reward of a sample is not a finite number.
            TypeError: ``texts`` is one sample instead of a list.
        """
        samples = add_principles(check_texts(texts), principle)
        return self._source().scorer.score_rows(samples).check_finite()

    def evaluate(
        self, records: str | PathLike[str] | Iterable[Mapping[str, Any]], **settings: Any
    ) -> Evaluation:
        """Measure the model on held-out data, as ``nemo-aligner evaluate`` does.

        Args:
            records: a data file, or the records themselves (dicts, a ``datasets.Dataset``, or a
                pandas DataFrame); errors then name record N (from 1) as ``records.jsonl:N``
            settings: settings of the command that are not about the model: ``task``, ``threshold``,
                ``threshold_from``, ``aggregate``, ``swapped``, ``robustness_pairs``, ``output``,
                ``output_rewards``, ``report`` and ``data.*``

        Returns:
            The metrics. ``print`` shows them as the table that the command prints.

        Raises:
            AlignerError: any error of the command, with the same message.
        """
        for key in settings:
            if key.partition(".")[0] not in _EVALUATION_SETTINGS:
                raise ConfigError(_describe_unknown_setting(key))
        if isinstance(records, str | PathLike):
            return self._evaluate(records, settings)
        folder = make_temporary("nemo_aligner_records_")
        try:
            path = folder / "records.jsonl"
            write_records(path, records)
            # The caller does not know the temporary folder, so results name the file without it.
            return self._evaluate(path, settings, data_name=path.name)
        finally:
            remove_temporary(folder)

    def export(
        self,
        output: str | PathLike[str],
        *,
        dtype: str | None = None,
        merge: bool = False,
        head: str | None = None,
        adapter_of: str | None = None,
        max_shard_bytes: int | None = None,
        base_license: str = "unknown",
    ) -> ExportSummary | str:
        """Export the model in Hugging Face's format, and check that the export scores the same.

        It does the same as ``nemo-aligner export``.

        Args:
            output: folder to write, or a ``.gguf`` file for llama.cpp
            dtype: ``fp32``, ``bf16`` or ``fp16`` for all weights but the head's; None keeps the
                dtype of the ``.nemo``
            merge: combine the attributes into one output, by the weights of the contract
            head: the form of a linear head, named by its tensor: ``score.bias`` or
                ``v_head.summary``; None means ``score``
            adapter_of: write the LoRA weights as a peft adapter for this base model
            max_shard_bytes: largest size of a safetensors file; None means 5 * 10**9
            base_license: the base model's licence, for the model card

        Raises:
            CheckpointError: ``output`` exists already, or the export gives other rewards.
            ConfigError: there are several processes, or the model is a Hugging Face model already.
        """
        if self._config.rm_model_file is None:
            raise ConfigError(
                f"{self.name}: it is a Hugging Face model already (hf_model), wanted a .nemo file"
            )
        release_models()  # an export starts its own process group, and loads models for its check
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

    def _evaluate(
        self,
        path: str | PathLike[str],
        settings: Mapping[str, Any],
        data_name: str | None = None,
    ) -> Evaluation:
        config = load_settings(EvaluateConfig, {**self._settings, **settings, "data.path": path})
        if config.report is not None:
            check_report("report")
        for note in describe_ineffective_settings(config, reported=self._idle):
            say(note)
        from nemo_aligner.evaluation.run import evaluate_source

        return evaluate_source(config, self._source(), data_name)

    def _source(self) -> RewardSource:
        """Load the model unless it is loaded; return it as a ``RewardSource``, ready to score."""
        return _SESSION.load(self, self._config)


def _describe_unknown_setting(key: str) -> str:
    """Write the error about a key that is not a setting of ``RewardModel.evaluate``."""
    names = [setting.name for setting in list_keys(EvaluateConfig)]
    near = suggest_setting(
        key, [name for name in names if name.partition(".")[0] in _EVALUATION_SETTINGS]
    )
    advice = "pass settings of the model to from_pretrained"
    if near is not None:
        advice = f"did you mean {near}?"
    return (
        f"{key}: wanted one of the settings of an evaluation "
        f"({', '.join(_EVALUATION_SETTINGS)}); {advice}"
    )


def release_models() -> None:
    """Unload all models of this process, and destroy the process group that they share."""
    _SESSION.close()


def export_archive(
    archive: Path,
    output: Path,
    *,
    dtype: str | None,
    merge: bool,
    head: str | None,
    adapter_of: str | None,
    max_shard_bytes: int | None,
    base_license: str,
    hub_name: str | None = None,
) -> ExportSummary | str:
    """Export a reward model's ``.nemo``, for ``nemo-aligner export`` and ``RewardModel.export``.

    ``hub_name`` is the model on the hub to which the caller uploads the export, for the model card.

    Raises:
        ConfigError: the options do not fit together, or there are several processes.
        CheckpointError: ``output`` exists already, or the export gives other rewards.
    """
    _check_export(output, dtype, head, adapter_of, max_shard_bytes)
    from nemo_aligner.checkpoint.hf.adapter import export_adapter
    from nemo_aligner.checkpoint.hf.export import export_to_hf
    from nemo_aligner.checkpoint.hf.reward_archive import ExportOptions
    from nemo_aligner.config.dtypes import torch_dtype
    from nemo_aligner.distributed.launch import single_process
    from nemo_aligner.distributed.layout import initialize_layout

    export_options = ExportOptions(
        dtype=None if dtype is None else torch_dtype(Precision(dtype)),
        merge=merge,
        head=head,
        max_shard_bytes=max_shard_bytes or _SHARD_BYTES,
        base_license=base_license,
        hub_name=hub_name,
    )
    with single_process():
        if _is_gguf(output):
            from nemo_aligner.checkpoint.hf.gguf_out import export_to_gguf

            return export_to_gguf(archive, output, export_options)
        if adapter_of is not None:
            return export_adapter(archive, output, adapter_of, initialize_layout(), export_options)
        return export_to_hf(archive, output, initialize_layout(), export_options)


def _is_gguf(output: Path) -> bool:
    return output.suffix.lower() == ".gguf"


def _check_export(
    output: Path,
    dtype: str | None,
    head: str | None,
    adapter_of: str | None,
    max_shard_bytes: int | None,
) -> None:
    """Raise ConfigError if the options of an export do not fit together."""
    if _is_gguf(output) and (adapter_of is not None or head is not None):
        raise ConfigError(
            f"{output}: a .gguf file has neither a peft adapter nor another form of the head. "
            "Omit adapter_of and head"
        )
    if max_shard_bytes is not None and (_is_gguf(output) or adapter_of is not None):
        kind = "a .gguf file" if _is_gguf(output) else "a peft adapter"
        raise ConfigError(
            f"max_shard_bytes: got {max_shard_bytes}, but the output is {kind}, whose weights are "
            "always one file. Omit it (--max-shard-size)"
        )
    if adapter_of is not None and Path(adapter_of).is_file():
        raise ConfigError(
            f"adapter_of: {adapter_of} is a file; wanted the base model as peft loads it, a "
            "Hugging Face folder or a name on the hub (--adapter-of)"
        )
    if adapter_of is not None and dtype is not None:
        raise ConfigError(
            "dtype: an adapter is always written in the dtype it is stored in. Omit dtype"
        )
    if adapter_of is not None and head is not None:
        raise ConfigError(
            f"head: got {head!r}, but the head of a peft adapter is always called score. Omit head"
        )


class _Session:
    """The process group and parallel layout that all loaded models share.

    megatron-core's process groups are global, so a process can have only one layout at a time.
    """

    def __init__(self) -> None:
        # Closing this stack destroys the process group; None if there is no group.
        self._exit_stack: ExitStack | None = None
        self._sizes: dict[str, Any] | None = None
        self._layout: ParallelLayout | None = None
        # With weak keys, a model that nobody refers to any more is freed even without ``close``.
        self._loaded: WeakKeyDictionary[RewardModel, RewardSource] = WeakKeyDictionary()

    def load(self, model: RewardModel, config: EvaluateConfig) -> RewardSource:
        """Load ``model`` unless it is loaded, and return it as a ``RewardSource``, ready to score.

        If the loaded models have another parallel layout, they are unloaded.

        Raises:
            AlignerError: the model cannot be loaded.
        """
        loaded = self._loaded.get(model)
        if loaded is not None:
            return loaded
        from nemo_aligner.evaluation.sources import load_source, sizes_of_model

        layout = self._open_layout(sizes_of_model(config))
        try:
            return self._loaded.setdefault(model, load_source(config, layout))
        finally:
            # If loading failed, destroy the process group. But keep it if there are several ranks:
            # others may still be loading, and would raise errors that hide the real one.
            if not self._loaded and find_process(os.environ).world_size == 1:
                self.close()

    def _open_layout(self, sizes: dict[str, Any]) -> ParallelLayout:
        if self._layout is not None and self._sizes == sizes:
            return self._layout
        self.close()
        from nemo_aligner.distributed.launch import launch
        from nemo_aligner.distributed.layout import initialize_layout

        with ExitStack() as stack:
            stack.enter_context(launch())
            self._layout, self._sizes = initialize_layout(**sizes), sizes
            self._exit_stack = stack.pop_all()
        return self._layout

    def leave(self, model: RewardModel) -> None:
        """Unload ``model``, and destroy the process group if no other model is loaded."""
        self._loaded.pop(model, None)
        if not self._loaded:
            self.close()

    def close(self) -> None:
        """Unload all models, and destroy the process group."""
        self._loaded.clear()
        stack, self._exit_stack, self._sizes, self._layout = self._exit_stack, None, None, None
        if stack is not None:
            stack.close()


_SESSION = _Session()


@atexit.register
def _close_at_exit() -> None:
    """Unload all models at exit, except after an error on one of several ranks.

    After such an error, other ranks may have left the process group already, so that destroying it
    could block.
    """
    if find_process(os.environ).world_size == 1 or getattr(sys, "last_value", None) is None:
        release_models()
