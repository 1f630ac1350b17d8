"""Run the server of a reward model or a critic from its settings, until it is stopped."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint.nemo.archive import check_exists, keep_archives
from nemo_aligner.checkpoint.nemo.fingerprint import (
    check_expected_fingerprint,
    fingerprint_of_ensemble,
    read_fingerprint,
)
from nemo_aligner.checkpoint.nemo.reward_model import check_expected_contract
from nemo_aligner.checkpoint.run_lock import lock_run
from nemo_aligner.config.ineffective import describe_ineffective_settings
from nemo_aligner.config.model import layout_sizes
from nemo_aligner.config.serving import ServeConfig, ServeCriticConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import describe_differences, find_conflicts
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import ParallelLayout, initialize_layout
from nemo_aligner.models.shared_body import Bodies
from nemo_aligner.serving.critic import CriticBackend
from nemo_aligner.serving.engine.ensemble import RewardEnsemble
from nemo_aligner.serving.engine.scorer import RewardScorer, load_scorer
from nemo_aligner.serving.engine.shaping import build_shaper
from nemo_aligner.serving.protocols.kserve import MODEL_NAME
from nemo_aligner.serving.reward import RewardBackend
from nemo_aligner.serving.scoring import TemplateParts
from nemo_aligner.serving.server import ServerSocket, serve
from nemo_aligner.serving.service import Backend
from nemo_aligner.training.critic import CriticRun, find_published_model, open_critic
from nemo_aligner.utils.console import say
from nemo_aligner.utils.errors import ConfigError, ServingError
from nemo_aligner.utils.processes import environment, verb_command


def run_server(config: ServeConfig) -> int:
    """Serve the reward model on all ranks, and return the exit code.

    Raises:
        AlignerError: the settings or the model are invalid.
    """
    if config.rm_model_file is None:
        raise ConfigError("rm_model_file: it is not set, wanted a reward model's .nemo")
    files = [config.rm_model_file, *config.ensemble.files]
    for file in [*files, *config.models.values()]:
        check_exists(file)
    _check_fingerprint(files, config.expect_fingerprint)
    check_expected_contract(files[0], config.precision, config.expect_contract, "expect_contract")
    with launch(), ServerSocket(config.server) as port:
        layout = initialize_layout(**layout_sizes(config.model))
        for note in describe_ineffective_settings(config, layout.num_ranks):
            say(note)
        bodies: Bodies = {}
        load = partial(_load_model, config=config, layout=layout, precision=config.precision)
        members = [load(file, bodies=bodies) for file in files]
        scorer = RewardEnsemble(members) if len(members) > 1 else members[0]
        contracts = [member.contract for member in members]
        shaper = build_shaper(config.shaping, config.ensemble, contracts)
        backend = RewardBackend(
            scorer, config.server, shaper, template_parts=_template_parts(members[0])
        )
        further_models = {name: load(file, bodies=bodies) for name, file in config.models.items()}
        for line in _describe_sharing({MODEL_NAME: members[0], **further_models}):
            say(line)
        backends = [
            backend,
            *(_host(name, model, config) for name, model in further_models.items()),
        ]
        return serve(backends, config.server, port)


def _template_parts(scorer: RewardScorer) -> TemplateParts:
    return TemplateParts(scorer.turn_end(), scorer.sample_frame())


def _host(name: str, scorer: RewardScorer, config: ServeConfig) -> RewardBackend:
    """Return the backend of a further model; its log of the highest rewards has a separate file."""
    server, log = config.server, config.server.top_rewards_file
    if log is not None:
        path = Path(log)
        server = replace(server, top_rewards_file=str(path.with_stem(f"{path.stem}-{name}")))
    return RewardBackend(scorer, server, template_parts=_template_parts(scorer), name=name)


def _describe_sharing(models: Mapping[str, RewardScorer]) -> Iterator[str]:
    """Describe for each model but the first one how many of its weights are shared."""
    names = {scorer.model: name for name, scorer in models.items()}
    for name, scorer in [*models.items()][1:]:
        body = scorer.body
        assert body is not None, "load_scorer tells what it has shared"
        total = f"{body.num_parameters / 1e6:,.1f}M parameters"
        if body.source is None:
            reason = "another base or precision, all weights trained, or an old archive"
            yield f"{name}: {total}, none shared ({reason})"
        else:
            shared = f"{body.num_shared / 1e6:,.1f}M of {total}"
            yield f"{name}: shares {shared} with {names[body.source]}"


def _check_fingerprint(files: Sequence[str], expected: str | None) -> None:
    """Raise ConfigError if the models in ``files`` do not have the expected fingerprint.

    The check runs before the weights are loaded, which takes long for large models.
    """
    if expected is not None:
        fingerprint = fingerprint_of_ensemble([read_fingerprint(file) for file in files])
        check_expected_fingerprint(
            fingerprint, expected, "expect_fingerprint", ", ".join(map(str, files))
        )


def _load_model(
    file: str, config: ServeConfig | ServeCriticConfig, layout: ParallelLayout, **kinds: Any
) -> RewardScorer:
    say(f"loading {file} ...")
    scorer = load_scorer(
        file,
        layout,
        micro_batch_tokens=config.model.micro_batch_tokens,
        invariant_rows=config.model.invariant_rows,
        cuda_graphs=config.model.cuda_graphs,
        kernels=config.model.kernels,
        prefix_cache_tokens=config.server.prefix_cache_tokens,
        prefix_cache_states=config.server.prefix_cache_states,
        **kinds,
    )
    try:
        scorer.warm_up()
    except ServingError as error:
        raise ServingError(f"{file}: {error}") from error
    return scorer


# The critic's server follows.


def run_critic_server(config: ServeCriticConfig) -> int:
    """Serve a critic, and a reward model if configured, on all ranks; return the exit code.

    Raises:
        AlignerError: the settings, the model, or the training run to resume are invalid.
    """
    if config.pretrained_checkpoint.restore_from_path is None:
        raise ConfigError(
            "pretrained_checkpoint.restore_from_path: it is not set, wanted a reward model's .nemo"
        )
    folder = Path(config.exp_manager.explicit_log_dir)
    with launch(), lock_run(folder) as lock, ServerSocket(config.server) as port:
        layout = initialize_layout(**layout_sizes(config.model), seed=config.model.seed)
        for note in describe_ineffective_settings(config, layout.num_ranks):
            say(note)
        with keep_archives() if _shares_archive(config) else nullcontext():
            run = open_critic(config, layout, lock)
            backends = _build_backends(config, run, layout)
        try:
            return serve(backends, config.server, port)
        finally:
            run.loggers.close()


def _shares_archive(config: ServeCriticConfig) -> bool:
    """Return whether critic and reward model are loaded from the same archive."""
    files = (None, config.pretrained_checkpoint.restore_from_path)
    return config.trainer.ppo.combine_rm_and_critic_server and config.rm_model_file in files


def _build_backends(
    config: ServeCriticConfig, run: CriticRun, layout: ParallelLayout
) -> list[Backend]:
    if not config.trainer.ppo.combine_rm_and_critic_server:
        return [CriticBackend(run, config)]
    path = find_published_model(config)
    scorer = _load_model(path, config, layout, can_offload=True)
    _check_same_encoding(path, scorer.contract, run.contract)
    critic = CriticBackend(run, config, scorer)
    rewards = RewardBackend(
        scorer,
        config.server,
        prepare=critic.make_room_for_rewards,
        template_parts=_template_parts(scorer),
    )
    return [critic, rewards]


# Fields in which the contracts of a critic and its reward model may differ, because they do not
# change the token ids of a sample if rewards are not read at turns or steps.
_MAY_DIFFER = (
    "attributes",
    "attribute_weights",
    "label_means",
    "dtype",
    "base_precision",
    "reward_model_type",
    "readout",
    "scored_position",
    "reply_marker",
)


def _check_same_encoding(path: str, rewards: ScoringContract, critic: ScoringContract) -> None:
    """Check that a reward model can score the token ids that the critic's contract gives.

    Raises:
        ConfigError: its contract gives other token ids, or it reads rewards at turns or steps.
    """
    if rewards.has_steps:
        raise ConfigError(
            f"rm_model_file: {path}: its rewards are read at every turn or step (model.head.reads "
            f"is {rewards.scored_position}), wanted a model with one reward for each sample, which "
            "critic_infer returns"
        )
    differences = find_conflicts(critic, rewards, _MAY_DIFFER)
    if differences:
        raise ConfigError(
            f"rm_model_file: {path}: its scoring contract encodes samples differently from that of "
            f"pretrained_checkpoint (critic -> reward model): {describe_differences(differences)}. "
            "Use a reward model with the critic's encoding, or serve this one by itself "
            "(nemo-aligner serve)"
        )


# The code below runs a server in another process while a ``with`` block runs.

START_S = 300
STOP_S = 60
_SHOWN_CHARACTERS = 3000  # number of characters from the end of the log that an error shows


@contextmanager
def running_server(settings: Sequence[str], log: Path) -> Iterator[str]:
    """Run a server in another process on a free port of this machine, and yield its URL.

    ``settings`` are command-line settings of ``nemo-aligner serve``.

    The output of the server goes to the file ``log``.

    Raises:
        ServingError: the server does not start; the message has the end of its log.
    """
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready")
        server_settings = ["server.port=0", f"server.ready_file={ready}"]
        with log.open("wb") as output:
            server = subprocess.Popen(
                verb_command("serve", *settings, *server_settings),
                stdout=output,
                stderr=output,
                env=environment(),
            )
        try:
            yield _wait_until_ready(server, ready, log)
        finally:
            _stop_server(server)


def _wait_until_ready(server: subprocess.Popen[bytes], ready: Path, log: Path) -> str:
    end = time.monotonic() + START_S
    while not ready.exists():
        if server.poll() is not None or time.monotonic() > end:
            ending = log.read_text(errors="replace")[-_SHOWN_CHARACTERS:]
            raise ServingError(f"the server did not start; the end of {log}:\n{ending}")
        time.sleep(0.2)
    return ready.read_text().strip()


def _stop_server(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
