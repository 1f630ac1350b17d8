"""Worlds of processes, and a server, that score some texts beside this process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.diagnostics.invariance import Scored
from nemo_aligner.errors import PeerError
from nemo_aligner.parallel.local import run_ranks
from nemo_aligner.serving.process import served
from nemo_aligner.subcommand import environment


def run_world(job: Mapping[str, Any], size: int) -> Scored:
    """``score_everywhere`` in a world of ``size`` processes of its own.

    Raises:
        PeerError: the world failed; it has said why on stderr.
    """
    print(f"scoring in {job['precision']} at {size} process{'es' * (size > 1)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        asked, result = Path(folder, "asked.json"), Path(folder, "result.json")
        asked.write_text(json.dumps(job))
        arguments = ["-m", "nemo_aligner.diagnostics.everywhere", str(asked), str(result)]
        if run_ranks(arguments, size, environment()):
            raise PeerError(f"the run of {size} processes failed, and has said why")
        return Scored.from_dict(json.loads(result.read_text()))


def score_over_http(checkpoint: str, precision: str, texts: list[Any]) -> dict[str, np.ndarray]:
    """Rewards by variant, of a server with its settings.

    Raises:
        ServingError: the server does not start, or does not answer.
    """
    # Imported here: whoever leaves the server out needs no pytriton.
    from nemo_aligner.serving.client.reward import RewardClient

    print(f"scoring in {precision} over HTTP", flush=True)
    settings = [f"rm_model_file={checkpoint}", f"precision={precision}"]
    with (
        tempfile.TemporaryDirectory() as folder,
        served(settings, Path(folder, "log")) as url,
        RewardClient(url) as client,
    ):
        alone = np.concatenate([client.score([text]) for text in texts])
        return {"alone": alone, "all together": client.score(texts)}
