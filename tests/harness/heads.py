"""Tiny reward models with every kind of head that training makes, and a server's outputs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import destroy_layout, initialize_layout
from nemo_aligner.serving.engine.pace import CallClock
from nemo_aligner.serving.engine.scorer import load_scorer
from nemo_aligner.serving.protocols import kserve
from nemo_aligner.serving.reward import RewardBackend
from tests.checkpoint.hf.exporting import edit, edit_tensors
from tests.harness import families, tiny

HIDDEN = tiny.SHAPE["hidden_size"]
NAMES = ("helpfulness", "verbosity")
MEANS = (0.75, -1.5)
LEVELS, VALUES = (0.1, 0.5, 0.9), ((0.0, 1.0, 4.0), (-1.0, 0.5, 2.0))
# The axes of a head's tensors by name: "outputs", and "hidden" for the hidden size.
LINEAR = {"score.weight": ("outputs", "hidden")}
BIAS = {**LINEAR, "score.bias": ("outputs",)}
TWO_LAYERS = {
    "score.0.weight": ("hidden", "hidden"),
    "score.0.bias": ("hidden",),
    "score.2.weight": ("outputs", "hidden"),
    "score.2.bias": ("outputs",),
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of head.

    Attributes:
        tensors: the axes of each tensor by its name.
        attributes: the names of the rewards.
        readout: how several outputs become one reward; None is one output per reward.
        reads_mean: the head reads the mean over the reply's tokens.
        rules: more fields of the scoring contract.
    """

    tensors: dict[str, tuple[str, ...]]
    attributes: tuple[str, ...] = ("reward",)
    readout: str | None = None
    reads_mean: bool = False
    rules: tuple[tuple[str, Any], ...] = ()


KINDS = {
    "one matrix": Kind(LINEAR),
    "several attributes": Kind(LINEAR, NAMES),
    "a bias": Kind(BIAS, NAMES),
    "one output and a bias": Kind(BIAS),
    "two layers": Kind(TWO_LAYERS),
    "two layers of several attributes": Kind(TWO_LAYERS, NAMES),
    "quantiles": Kind(BIAS, NAMES, "quantiles"),
    "quantiles of two layers": Kind(TWO_LAYERS, NAMES, "quantiles"),
    "several heads": Kind(LINEAR, NAMES, "heads"),
    "bins": Kind(LINEAR, NAMES, "bins"),
    "bins with a bias": Kind(BIAS, NAMES, "bins"),
    "probabilities": Kind(BIAS, NAMES, "sigmoid"),
    "a probability": Kind(BIAS, readout="sigmoid"),
    "the mean of a reply": Kind(LINEAR, NAMES, reads_mean=True),
}


def write_source(folder: Path, kind: Kind, body: str = "llama", **changes: Any) -> None:
    """Write a Hugging Face folder with this head, in which each output is an attribute."""
    outputs = len(kind.attributes) * (1 if kind.readout in (None, "sigmoid") else len(LEVELS))
    families.write_hf_checkpoint(folder, body, **changes)
    generator = torch.Generator().manual_seed(5)
    sizes_by_name = {"outputs": outputs, "hidden": changes.get("hidden_size", HIDDEN)}
    sizes = {name: [sizes_by_name[axis] for axis in axes] for name, axes in kind.tensors.items()}
    edit_tensors(
        folder,
        {name: torch.randn(size, generator=generator) * 0.3 for name, size in sizes.items()},
    )
    names = kind.attributes if kind.readout is None else [f"output {n}" for n in range(outputs)]
    edit(folder, architectures=["LlamaForSequenceClassification"], pad_token_id=0)
    edit(folder, id2label=dict(enumerate(names)), problem_type="regression")


def write_archive(
    path: Path,
    kind: Kind,
    body: str = "llama",
    pre_tokenizer: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write the archive of a reward model with this head and label means.

    ``pre_tokenizer`` replaces the tokenizer's. This starts and ends a process group.
    """
    from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
    from nemo_aligner.checkpoint.nemo.reward_model import load_reward_model, save_reward_model
    from nemo_aligner.contract.readout import Readout
    from nemo_aligner.contract.turns import make_reply_marker
    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import destroy_layout, initialize_layout

    source = path.with_suffix(".hf")
    write_source(source, kind, body, **changes)
    if pre_tokenizer is not None:
        edit(source, "tokenizer.json", pre_tokenizer=pre_tokenizer)
    convert_hf_to_nemo(source, path.with_suffix(".first"))
    count = len(kind.attributes)
    rules: dict[str, Any] = dict(kind.rules)
    if kind.readout is not None:
        rows: dict[str, Any] = {"bins": VALUES, "sigmoid": ((1.0,),) * count}
        numbers = rows.get(kind.readout, (LEVELS, LEVELS))
        rules |= {"readout": Readout(kind.readout, numbers).to_json()}
    # Labels that are probabilities are not centred, so their means are 0.
    means = (0.0,) * count if kind.readout == "sigmoid" else MEANS[:count]
    with launch():
        loaded = load_reward_model(path.with_suffix(".first"), initialize_layout())
        if kind.reads_mean:
            marker = make_reply_marker(
                loaded.contract.chat_template(loaded.tokenizer), loaded.tokenizer
            )
            rules = {"scored_position": "reply_mean", "reply_marker": marker}
        contract = dataclasses.replace(
            loaded.contract,
            attributes=kind.attributes,
            attribute_weights=(2.0, -1.0)[:count],
            label_means=means,
            reward_model_type="regression",
            **rules,
        )
        save_reward_model(path, loaded.model, loaded.config, loaded.tokenizer, contract)
        destroy_layout()
    return path


class OneRank:
    """An executor that runs every operation at once on the model of this process."""

    def __init__(self, backend: RewardBackend) -> None:
        self._backend, self.clock = backend, CallClock()

    def execute(self, operation: str, data: Any) -> Any:
        return self._backend.operations[operation](data)

    def submit(self, operation: str, data: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(self.execute(operation, data))
        return answer


def served(archive: Path, texts: Sequence[list[dict[str, str]]]) -> dict[str, np.ndarray]:
    """The outputs of the server's KServe endpoint for conversations, called without sockets."""

    async def answered() -> dict[str, np.ndarray]:
        conversations = [[json.dumps(text).encode()] for text in texts]
        return await endpoint.answer({"conversations": np.array(conversations, dtype=object)})

    with launch():
        scorer = load_scorer(archive, initialize_layout())
        backend = RewardBackend(scorer, ServerConfig())
        started = backend.start(OneRank(backend))
        endpoints = {endpoint.name: endpoint for endpoint in started.endpoints}
        endpoint = endpoints[kserve.MODEL_NAME]
        try:
            return dict(asyncio.run(answered()))
        finally:
            started.stop()
            destroy_layout()
