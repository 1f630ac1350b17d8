"""The models of a front, chosen by the path ``/models/NAME/...`` or by the ``model`` of a body."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nemo_aligner.serving.endpoints import Endpoint
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.serving.protocols.kserve import MODEL_NAME
from nemo_aligner.serving.scoring import ScoringService
from nemo_aligner.utils.errors import shown


@dataclass(frozen=True)
class HostedModel:
    """A model with its scoring service, and the KServe endpoints as if it were the only model."""

    scoring: ScoringService
    endpoints: Sequence[Endpoint]

    @property
    def name(self) -> str:
        return self.scoring.model_name

    def name_route(self, path: str) -> str:
        """Return the path of a route under which metrics and the log list this model."""
        return path if self.name == MODEL_NAME else f"/models/{self.name}{path}"


class HostedModels:
    """The models of a front by their names; the first one is the main model."""

    def __init__(self, models: Sequence[HostedModel]) -> None:
        self._models = {model.name: model for model in models}

    def __iter__(self) -> Iterator[HostedModel]:
        return iter(self._models.values())

    def find(self, name: str) -> HostedModel | None:
        """Return the model of this name; None if there is none."""
        return self._models.get(name)

    def __getitem__(self, name: str) -> HostedModel:
        """Return the model of this name; RequestError if there is none."""
        if name not in self._models:
            raise RequestError(
                f"unknown model {shown(name)}. Models: {', '.join(self._models)}",
                FailureKind.unknown_model,
            )
        return self._models[name]

    def choose(self, name: object, of_path: HostedModel | None = None) -> HostedModel:
        """Choose the model of a request.

        A single model, or the model that the path names, answers under any name that no other model
        has, because clients of vLLM have to send a name.

        Args:
            name: the ``model`` of the body; None is the main model, or that of the path.
            of_path: the model that the path names, if it does.

        Raises:
            RequestError: there is no model of this name, or the path names another one.
        """
        if name is None or len(self._models) == 1:
            return of_path or next(iter(self))
        if of_path is not None:
            if isinstance(name, str) and name != of_path.name and name in self._models:
                raise RequestError(
                    f"model: got {shown(name)} on a path of the model {of_path.name}. Send the "
                    f"request to /models/{name}, or leave out model",
                    FailureKind.unknown_model,
                )
            return of_path
        if not isinstance(name, str):
            raise RequestError(
                f"model: got {shown(name)}, wanted the name of a model, as a string",
                FailureKind.unknown_model,
            )
        return self[name]
