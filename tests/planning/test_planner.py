"""``nemo-aligner plan``: layouts that fit, what they hold, and errors of one line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from nemo_aligner.cli.main import main
from nemo_aligner.config.load import load_config
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.gemma4 import Gemma4Shape
from nemo_aligner.models.shapes.lora import LoraShape, with_lora
from nemo_aligner.models.shapes.quantized import check_quantizable
from nemo_aligner.planning.planner import PlanRequest
from nemo_aligner.planning.presets import preset
from nemo_aligner.utils.errors import ConfigError
from tests.harness.contracts import Contracts
from tests.harness.launching import run_code

CONFIG = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 320,
    "encoder_seq_length": 256,
}


def rows(shown: str) -> list[dict[str, str]]:
    """The table: its heading begins with ``layout`` or ``GPUs``, an empty line ends it."""
    lines = shown.splitlines()
    start = next(index for index, line in enumerate(lines) if "layout  " in line)
    names = re.split(r" {2,}", lines[start].strip())
    table = lines[start + 1 : lines.index("", start) if "" in lines[start:] else None]
    # A layout has single blanks inside, columns are two apart.
    return [dict(zip(names, re.split(r" {2,}", line.strip()), strict=False)) for line in table]


class Plan:
    """``nemo-aligner plan`` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def shown(self, *arguments: str) -> str:
        code = main(["plan", *arguments])
        out, err = self._capsys.readouterr()
        assert (code, err) == (0, "")
        return out

    def error(self, *arguments: str) -> str:
        code = main(["plan", *arguments])
        message = self._capsys.readouterr().err
        assert (code, message.count("\n")) == (1, 1), message
        return message


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    return Plan(capsys)


def test_plan_has_layouts_that_fit_fastest_first(plan: Plan) -> None:
    layouts = rows(plan.shown("--params=8B", "--gpus=8", "--top=50"))
    speeds = [float(row["tokens/s"].replace(",", "")) for row in layouts]
    assert len(layouts) > 5
    assert speeds == sorted(speeds, reverse=True)
    assert all(float(row["GiB"]) <= 76 for row in layouts)
    parts = ("weights", "gradients", "optimizer", "activations", "transient")
    for row in layouts:
        assert sum(float(row[part]) for part in parts) == pytest.approx(float(row["GiB"]), abs=0.3)
        tp, pp, dp = (int(size) for size in re.findall(r"=(\d+)", row["layout"]))
        assert tp * pp * dp == 8
    # 7.5 billion parameters and a head: 2 bytes each where nothing splits them.
    alone = next(row for row in layouts if row["layout"] == "TP=1 PP=1 DP=8")
    assert float(alone["weights"]) == pytest.approx(2 * 7.504 / 1.0737, abs=0.1)


def test_plan_recomputes_layers_where_memory_is_short(plan: Plan) -> None:
    (row,) = rows(plan.shown("--params=8B", "--gpus=1", "--gpu-memory=141"))
    layers = int(row["recompute"].removesuffix(" layers"))
    assert 0 < layers < 32
    # One less would be too much.
    more = float(row["GiB"]) + (float(row["activations"]) / (32 - layers))
    assert float(row["GiB"]) <= 137 < more


def test_plan_offloads_activations_where_nothing_fits_without(plan: Plan) -> None:
    step = ("--params=8B", "--gpus=1", "--cpu-offload", "--seq-length=32768")
    (row,) = rows(plan.shown(*step, "--gpu-memory=141"))
    assert row["recompute"] == "26 layers"
    shown = plan.shown(*step, "--gpu-memory=90")
    (row,) = rows(shown)
    assert row["recompute"] == "full, offloaded"
    assert float(row["GiB"]) <= 86
    # Adam's moments, 8 bytes a parameter, and the inputs of 30 layers.
    inputs = 65536 * 4096 * 2 * 30
    assert float(row["host GiB"]) == pytest.approx((8 * 7.504e9 + inputs) / 2**30, rel=0.01)
    assert "  model.activations_offload=true" in shown.splitlines()


def test_plan_has_host_memory_of_all_layouts_if_one_uses_it(plan: Plan) -> None:
    """Also if the first one does not."""
    step = ("--params=1B", "--gpus=2", "--freeze-layers=14", "--activations-offload")
    hosts = [float(row["host GiB"]) for row in rows(plan.shown(*step))]
    assert hosts[0] == 0 < max(hosts)


def test_plan_says_what_would_fit_where_nothing_does(plan: Plan) -> None:
    message = plan.error("--params=70B", "--gpus=8")
    assert "no layout fits on 8 GPUs" in message
    enough = int(re.search(r"the fewest GPUs that fit: (\d+) GPUs, as TP=8\+SP", message)[1])  # type: ignore[index]
    assert enough > 8
    plan.shown("--params=70B", f"--gpus={enough}")


def test_the_fewest_gpus_for_experts_are_found_by_expert_parallelism() -> None:
    """A batch of 7 has work for 7 replicas, but only 2, 4 or 6 can share 8 experts."""
    shape = {
        **{"num_layers": 1, "hidden_size": 128, "ffn_hidden_size": 256, "vocab_size": 500},
        **{"num_attention_heads": 1, "kv_channels": 128, "max_position_embeddings": 512},
        **{"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 65536},
    }
    request = PlanRequest(seq_length=64, global_batch_size=7, gpu_memory=1.2, reserve=0)
    planner = request.planner(ModelShape.from_config(shape))
    every = [layout for gpus in range(1, 8) for layout in planner.candidates(gpus)]
    fitting = planner.ranked(every)
    assert {layout.plan.ep for layout in fitting} == {2, 4}
    least = planner.least_gpus()
    assert least is not None
    assert least.num_ranks == min(layout.plan.num_ranks for layout in fitting) == 4


def test_plan_has_only_layouts_that_training_accepts(plan: Plan) -> None:
    """nf4's blocks do not divide the MLP of a 7B on 8 ranks; experts are not trained in fp16.

    Layers that read an earlier layer's keys are not recomputed in full.
    """
    shape, _ = preset("7B")
    quantized = {"lora_rank": 16, "base_precision": "nf4", "seq_length": 1024}
    planner = PlanRequest(gpu_memory=12, reserve=2, **quantized).planner(shape)  # type: ignore[arg-type]
    layouts = planner.ranked(planner.candidates(8))
    assert layouts
    for layout in layouts:
        check_quantizable(planner.shape, layout.plan.tp)
    least = PlanRequest(gpu_memory=5, reserve=1, **quantized).planner(shape).least_gpus()  # type: ignore[arg-type]
    assert least is not None
    check_quantizable(planner.shape, least.tp)
    config = {**CONFIG, "max_position_embeddings": 256, "num_moe_experts": 4, "moe_router_topk": 2}
    experts = ModelShape.from_config({**config, "moe_ffn_hidden_size": 32})
    with pytest.raises(ConfigError, match=r"precision: got fp16, but .*Set it to bf16 or fp32"):
        PlanRequest(precision="fp16").planner(experts)
    # Adapters of experts are split along LoRA's rank, and those of other layers are not.
    for rank, tps in ((3, {1}), (4, {1, 2})):
        planner = PlanRequest(lora_rank=rank, seq_length=64).planner(experts)
        assert {layout.plan.tp for layout in planner.candidates(2)} == tps
        # Adapters that training will fold are loaded first.
        adapted = replace(experts, lora=planner.shape.lora)
        planner = PlanRequest(lora_rank=0, seq_length=64).planner(adapted)
        assert planner.shape.lora is None
        assert {layout.plan.tp for layout in planner.candidates(2)} == tps
    gemma4 = Gemma4Shape(16, 2, keys_as_values=False, global_rotary=0.5, shared_layers=2)
    with pytest.raises(ConfigError, match=r"^recompute: got full, .* Set it to auto, selective"):
        PlanRequest(recompute="full").planner(replace(shape, gemma4=gemma4))


@pytest.mark.parametrize(
    ("channels", "of_full_layers", "can_ring"),
    [(256, 256, True), (264, 264, False), (84, 84, False), (256, 512, False)],
)
def test_ring_is_offered_only_if_its_kernel_supports_the_heads_of_all_layers(
    channels: int, of_full_layers: int, can_ring: bool
) -> None:
    config = {**CONFIG, "max_position_embeddings": 8192, "kv_channels": channels}
    shape = ModelShape.from_config({**config, "window_size": [511, 0], "window_attn_skip_freq": 2})
    if of_full_layers != channels:
        shape = replace(shape, gemma4=Gemma4Shape(of_full_layers, 2, False, 0.5))
    planner = PlanRequest(seq_length=8192).planner(shape)
    plans = [layout.plan for layout in planner.candidates(2)]
    assert any(plan.cp == 2 for plan in plans)
    assert any(plan.ring for plan in plans) is can_ring


def test_plan_assumes_the_peak_of_the_precision(plan: Plan) -> None:
    """Training in fp32 does not use TF32."""
    step = ("--params=1B", "--gpus=8", "--top=1")
    for precision, peak in (("fp32", 67), ("bf16", 989), ("fp16", 989)):
        assert f"assumed: {peak} TFLOP/s" in plan.shown(*step, f"--precision={precision}")
    assert "assumed: 156 TFLOP/s" in plan.shown(*step, "--precision=fp32", "--tflops=156")


def test_plan_says_what_would_fit_with_what_it_offloads(plan: Plan) -> None:
    """The message counts offloaded activations, which are tried, and offers to move moments."""
    step = ("--params=8B", "--gpus=1", "--seq-length=32768")
    moments, activations = "model.optim.cpu_offload=true", "model.activations_offload=true"
    # Eight times 7.504 billion parameters for the moments, at least.
    message = plan.error(*step, "--gpu-memory=90")
    assert f" with recompute full and {activations}: it needs " in message
    assert "86.0 GiB are free; the fewest GPUs that fit: " in message
    assert re.search(rf"; or 1 GPU, as TP=1 PP=1 DP=1 with {moments} and {activations}$", message)
    assert "model.optim.cpu_offload=true" in plan.shown(*step, "--gpu-memory=90", "--cpu-offload")
    # What was asked for already is a part of every plan, and nothing more to offer.
    message = plan.error(*step, "--gpu-memory=60", "--cpu-offload")
    assert f" with recompute full and {moments} and {activations}: it needs " in message
    enough = re.search(rf"; the fewest GPUs that fit: (\d+) GPUs?, as .* with {moments}", message)
    assert enough is not None
    assert "; or " not in message
    shown = plan.shown(
        "--params=8B", f"--gpus={enough[1]}", *step[2:], "--gpu-memory=60", "--cpu-offload"
    )
    assert f"  {moments}" in shown.splitlines()


def test_plan_has_settings_of_training(plan: Plan) -> None:
    shown = plan.shown("--params=70B", "--gpus=64", "--top=1")
    settings = [line.strip() for line in shown.splitlines() if line.startswith("  model.")]
    model = load_config(TrainConfig, settings).model
    row = rows(shown)[0]["layout"]
    assert f"TP={model.tensor_model_parallel_size}" in row
    assert f"PP={model.pipeline_model_parallel_size}" in row
    # The budget of the plan is a setting only if it is not the default of training.
    assert not [setting for setting in settings if "micro_batch_tokens" in setting]
    for options, budget in (("--seq-length=8192", 16384), ("--micro-batch-tokens=8192", 8192)):
        shown = plan.shown("--params=1B", "--gpus=8", options)
        assert f"  model.micro_batch_tokens={budget}" in shown.splitlines()


def test_plan_of_a_model_config_and_of_an_archive_s_folder(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "model_weights").mkdir()
    options = ("--gpus=4", "--precision=fp32", "--top=50")
    of_file = plan.shown(f"--config={path}", *options)
    of_folder = plan.shown(f"--config={tmp_path}", *options)
    assert rows(of_file) == rows(of_folder)
    # Two query groups do not split over four.
    assert not [row for row in rows(of_file) if "TP=4" in row["layout"]]


def test_plan_of_a_reward_model_is_that_of_training_from_it(
    plan: Plan, tmp_path: Path, contracts: Contracts
) -> None:
    """Length, precision and adapters are the archive's; without adapters, all weights train."""
    lora = LoraShape(4, 8.0, ("linear_qkv", "linear_fc1"))
    config = with_lora({**CONFIG, "max_position_embeddings": 4096}, lora)
    (tmp_path / "model_config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "model_weights").mkdir()
    contract = replace(contracts(), seq_length=512, dtype="fp32")
    (tmp_path / "scoring_contract.json").write_text(json.dumps(contract.to_dict()))
    step = (f"--config={tmp_path}", "--gpus=1")
    shown = plan.shown(*step)
    assert f"parameters, fp32, LoRA of {lora}\n" in shown
    assert " pairs of 2 x 512 tokens" in shown
    settings = [line.strip() for line in shown.splitlines() if line.startswith("  model.")]
    model = load_config(TrainConfig, settings).model
    assert LoraShape.from_settings(model.lora) == lora
    for full in ("--lora-rank=0", "--freeze-layers=1"):
        assert "lora" not in plan.shown(*step, full).lower()
    shown = plan.shown(*step, "--lora-rank=4", "--seq-length=128", "--precision=bf16")
    assert f"parameters, bf16, LoRA of {lora}\n" in shown
    assert " pairs of 2 x 128 tokens" in shown
    for other in ("--lora-rank=8", "--base-precision=int8"):
        assert f"--config: the model has LoRA adapters of {lora}, but" in plan.error(*step, other)


def test_plan_of_several_numbers_of_gpus_has_a_line_each(plan: Plan) -> None:
    best = rows(plan.shown("--params=70B", "--gpus", "8", "64"))
    assert [row["GPUs"] for row in best] == ["8", "64"]
    assert best[0]["layout"] == "none fits"


# Options that are rejected, and the beginning of the error.
REFUSED = [
    (["--params=9B"], "--params: got 9B, wanted one of 1B, 3B"),
    (["--config=nowhere.yaml"], "--config: got nowhere.yaml, which does not exist"),
    (["--params=8B", "--micro-batch-tokens=100"], "--micro-batch-tokens: got 100, wanted 2048"),
    (
        ["--params=8B", "--gpu-memory=3"],
        "--gpu-memory: got 3, wanted more than reserve",
    ),
    (["--params=8B", "--mfu=1.5"], "--mfu: got 1.5, wanted more than 0, at most 1"),
    (["--params=8B", "--tflops=0"], "--tflops: got 0, wanted a number above 0"),
    (["--params=8B", "--freeze-layers=32"], "--freeze-layers: got 32, wanted 0 to 31"),
    (["--params=70B", "--gpus=7"], "no layout fits on 7 GPUs"),
    (["--params=8B", "--gpus=37", "--global-batch-size=4"], "--gpus: got 37, wanted a number"),
]


def test_plan_errors_are_one_line(plan: Plan, tmp_path: Path) -> None:
    messages = {start: plan.error("--gpus=8", *arguments) for arguments, start in REFUSED}
    wrong = {
        start: message
        for start, message in messages.items()
        if not message.startswith(f"ConfigError: {start}")
    }
    assert not wrong

    path = tmp_path / "model_config.yaml"
    path.write_text("num_layers: 4\n")
    assert "it lacks hidden_size" in plan.error(f"--config={path}", "--gpus=1")
    path.write_text("a: [b\n")
    assert f"--config: {path}: " in plan.error(f"--config={path}", "--gpus=1")


def test_plan_and_its_help_import_no_torch() -> None:
    """A machine that only plans needs none, and an answer takes no seconds."""
    program = (
        "import sys\n"
        "from nemo_aligner.cli.main import main\n"
        "try:\n"
        "    sys.exit(main(['plan', *sys.argv[1:]]))\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules\n"
    )
    for arguments in (["--help"], ["--params=8B", "--gpus=8"]):
        done = run_code(program, *arguments)
        assert done.returncode == 0, done.stderr
        assert "layout" in done.stdout
