"""Settings without effect are reported, for every verb."""

from __future__ import annotations

from copy import deepcopy
from operator import attrgetter
from typing import Any

from nemo_aligner.config.describe import list_keys
from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.ineffective import describe_ineffective_settings, find_ineffective_settings
from nemo_aligner.config.load import load_config
from nemo_aligner.config.training import TrainConfig
from tests.config.test_load import SCHEMAS


def under(section: str, names: str) -> set[str]:
    return {f"{section}.{name}".lstrip(".") for name in names.split()}


CALLBACKS = "exp_manager.checkpoint_callback_params"
EARLY = "exp_manager.early_stopping_callback_params"
LOGGERS = under("exp_manager", "wandb_logger_kwargs mlflow_logger_kwargs")
ALL_LOGGERS = ("exp_manager.create_wandb_logger=true", "exp_manager.create_mlflow_logger=true")
CONSTANT = "model.optim.sched.name=constant"
SCHEDULE = under("model.optim.sched", "constant_steps min_lr")
ROWS = {"model.batch_invariant_rows"}
VARIANT = "model.batch_invariant=false"
RING = (VARIANT, "model.context_parallel_size=2", "model.cp_comm_type=p2p")
LAYOUT = ROWS | under(
    "model",
    "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size "
    "context_parallel_size cp_comm_type "
    "sequence_parallel batch_invariant cuda_graphs pointwise_kernels attention_kernels",
)
LOGS = {"gateway": "gateway", "serve": "server", "serve_critic": "server"}
OF_SEVERAL = under("server", "heartbeat_secs worker_timeout_secs")
CRITIC = "pretrained_checkpoint.restore_from_path=rm.nemo"

# Verb, number of ranks, settings, and the keys that have no effect then.
KINDS: list[tuple[str, int, tuple[str, ...], set[str]]] = [
    (
        "train",
        1,
        (),
        {
            *under("model.lora", "alpha dropout targets base_precision"),
            *under("model.regression", "attributes attribute_weights loss_mask_val"),
            *under("model.data", "max_malformed allow_prompt_overlap"),
            *under("trainer.rm", "val_check_interval val_before_training limit_val_records"),
            *under(CALLBACKS, "mode save_top_k average_best"),
            f"{EARLY}.min_delta",
            *LOGGERS,
        },
    ),
    (
        "train",
        2,
        (
            "model.lora.rank=8",
            "model.reward_model_type=regression",
            "model.regression.attributes=[help]",
            "model.data.malformed=drop",
            "model.data.data_prefix.validation=[a.jsonl]",
            f"{EARLY}.patience=2",
            *ALL_LOGGERS,
            VARIANT,
            CONSTANT,
        ),
        ROWS | SCHEDULE,
    ),
    (
        "serve_critic",
        1,
        (CRITIC,),
        {
            "rm_model_file",
            "trainer.ppo.offload_idle_model",
            "server.prefix_cache_tokens",
            "server.prefix_cache_states",
            "server.top_rewards_file",
            "model.seed",
            *LOGGERS,
            *OF_SEVERAL,
        },
    ),
    (
        "serve_critic",
        2,
        (CRITIC, "trainer.ppo.combine_rm_and_critic_server=true", *ALL_LOGGERS, VARIANT, CONSTANT),
        {"model.seed", "trainer.ppo.max_steps", "server.prefix_cache_states", *ROWS, *SCHEDULE},
    ),
    ("serve", 1, (), {"ensemble.combine", "ensemble.k", *OF_SEVERAL}),
    (
        "serve",
        1,
        ("server.prefix_cache_tokens=0",),
        {"server.prefix_cache_states", "ensemble.combine", "ensemble.k", *OF_SEVERAL},
    ),
    ("serve", 2, ("ensemble.files=[b.nemo]", VARIANT), {"ensemble.k", *ROWS}),
    ("serve", 2, ("ensemble.files=[b.nemo]", "ensemble.combine=min"), {"ensemble.k"}),
    ("serve", 2, ("ensemble.files=[b.nemo]", "ensemble.combine=lower_bound"), set()),
    ("evaluate", 1, ("rm_model_file=a.nemo",), {"data.max_malformed"}),
    ("evaluate", 2, ("rm_model_file=a.nemo", *RING), ROWS | {"data.max_malformed"}),
    ("evaluate", 1, ("rm_model_file=a.nemo", "data.malformed=drop", VARIANT), ROWS),
    (
        "evaluate",
        1,
        ("hf_model=a", "data.malformed=drop", "robustness_pairs=5"),
        LAYOUT | {"data.loss_mask_val"},
    ),
    (
        "evaluate",
        1,
        ("server=http://a:1", "data.malformed=drop"),
        LAYOUT | {"model.micro_batch_tokens"},
    ),
    (
        "gateway",
        1,
        (),
        {
            *under("judge", "token_file token_variable task prompt pairs repeats principle"),
            *under("judge", "temperature max_tokens max_connections timeout_s retries fields"),
            *under("combine", "gate_part gate_margin fail_requests"),
            *under("", "function_timeout_s function_threads"),
        },
    ),
    (
        "gateway",
        1,
        ("judge.url=http://a:1/v1", "judge.model=a", "judge.task=rating", "combine.kind=gate"),
        {"judge.pairs", *under("", "function_timeout_s function_threads")},
    ),
]


def found_idle(verb: str, ranks: int, asked: tuple[str, ...]) -> set[str]:
    """Return the settings that are reported when each of them in turn is changed."""
    usual: Any = load_config(SCHEMAS[verb], asked)
    idle: set[str] = set()
    for key in list_keys(SCHEMAS[verb]):
        config = deepcopy(usual)
        if not any(setting.startswith(f"{key.name}=") for setting in asked):
            section, _, name = key.name.rpartition(".")
            setattr(attrgetter(section)(config) if section else config, name, "another")
        if key.name in find_ineffective_settings(config, ranks):
            idle.add(key.name)
    return idle


def test_ineffective_settings_are_told_of_every_kind_of_use() -> None:
    off = {}
    for verb, ranks, asked, wanted in KINDS:
        got = found_idle(verb, ranks, asked)
        if verb != "gateway" and "model.context_parallel_size=2" not in asked:
            wanted = wanted | {"model.cp_comm_type"}
        if verb in LOGS:
            log = "top_rewards_kept top_rewards_window top_rewards_files"
            wanted = wanted | under(LOGS[verb], log)
        if got != wanted:
            off[verb, ranks, asked] = got ^ wanted
    assert not off


def test_ineffective_settings_are_told_with_those_that_have_it_so() -> None:
    overlap = "model.data.allow_prompt_overlap=true"
    validation = "trainer.rm.val_check_interval=5"
    config = load_config(TrainConfig, ["model.lora.alpha=16", validation, overlap])
    files = "model.data.data_prefix.validation=[]"
    assert find_ineffective_settings(config) == {
        "model.lora.alpha": "model.lora.rank=0",
        "trainer.rm.val_check_interval": files,
        "model.data.allow_prompt_overlap": f"{files} and model.data.data_prefix.test=[]",
    }
    asked = ["server=http://a:1", "model.micro_batch_tokens=10"]
    assert list(describe_ineffective_settings(load_config(EvaluateConfig, asked))) == [
        "note: model.micro_batch_tokens does nothing\n  with server=http://a:1"
    ]
