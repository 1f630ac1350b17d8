"""Is a reward the same at every layout and in every batch? A table for your own checkpoint.

check_invariance.py --checkpoint megatron_gpt.nemo [--data pairs.jsonl] [--processes 2]

The texts of some pairs (of the demo set without --data) are scored at one process and at every
layout of 2, 4, ... processes that the model fits: each alone, all together, in other orders, in
small packs, and in a training forward pass with and without recomputed activations; then over HTTP.
Every reward is compared with that of its text alone at one process in fp32.

Started by torchrun or srun, it takes the layouts of that many processes only, with the first of
them as the reference, and leaves out the server. The exit code is 1 where the bar is missed.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from score_everywhere import Rewards

    from nemo_aligner.diagnostics.invariance import Row
    from nemo_aligner.models.shape import ModelShape
    from nemo_aligner.text.contract import ScoringContract

ROOT = Path(__file__).resolve().parent.parent
SERVER_START_S = 300
SERVER_STOP_S = 60


# --- What is scored ---------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """What is known of a reward model without its weights."""

    shape: ModelShape
    contract: ScoringContract


def read_model(checkpoint: str) -> Model:
    from nemo_aligner.checkpoint.nemo.open import open_nemo
    from nemo_aligner.errors import CheckpointError
    from nemo_aligner.models.shape import ModelShape
    from nemo_aligner.text.contract import ScoringContract

    with open_nemo(checkpoint, with_weights=False) as folder:
        if folder.contract is None:
            raise CheckpointError(
                f"{checkpoint}: it has no scoring contract; wanted a reward model"
            )
        return Model(
            ModelShape.from_config(folder.config), ScoringContract.from_dict(folder.contract)
        )


def choose_texts(arguments: argparse.Namespace) -> list[Any]:
    """Texts of ``--pairs`` pairs that the contract takes: chosen, rejected, chosen, ..."""
    from nemo_aligner.checkpoint.nemo.reward_model import read_text_rules
    from nemo_aligner.errors import DataError
    from nemo_aligner.text.contract import OverlongError

    tokenizer, contract = read_text_rules(arguments.checkpoint)
    assert contract is not None, "read_model has seen to it"
    texts: list[Any] = []
    too_long = 0
    for pair in _pairs(arguments.data):
        if len(texts) == 2 * arguments.pairs:
            break
        try:
            for text in pair:
                contract.encode(tokenizer, text)
        except OverlongError:
            too_long += 1
            continue
        texts += pair
    if not texts:
        raise DataError(f"{arguments.data or 'demo set'}: no pair is short enough")
    left_out = f", {too_long} left out as too long" if too_long else ""
    print(f"{len(texts) // 2} pairs{left_out}; scoring contract {contract.hash}")
    return texts


def _pairs(path: str | None) -> Iterator[tuple[Any, ...]]:
    from nemo_aligner.config.common import RecordKind
    from nemo_aligner.data.reading import read_records

    if path is not None:
        yield from (record.texts for record in read_records(path, RecordKind.comparison).records)
        return
    from demo_pairs import build_demo_pairs

    for pair in build_demo_pairs(2400, 0.1, 1)[1]:
        prompt = {"role": "user", "content": pair.prompt}
        yield tuple(
            [prompt, {"role": "assistant", "content": reply}]
            for reply in (pair.chosen, pair.rejected)
        )


# --- Driving the processes --------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """Rewards by layout and variant, those to compare with, and why some layouts do not fit."""

    rewards: Rewards
    reference: np.ndarray
    reasons: list[str]


def run_world(job: Mapping[str, Any], size: int) -> Scored:
    """``score_everywhere`` in a world of ``size`` processes of its own."""
    import numpy as np

    print(f"scoring in {job['precision']} at {size} process{'es' * (size > 1)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        asked, result = Path(folder, "asked.json"), Path(folder, "result.json")
        asked.write_text(json.dumps(job))
        command = [sys.executable]
        if size > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        command += [__file__, "--worker", str(asked), str(result)]
        if subprocess.run(command, env=_environment(), check=False).returncode:
            raise SystemExit(f"check_invariance.py: the run of {size} processes failed, see above")
        content = json.loads(result.read_text())
    rewards = {
        layout: {name: np.array(rows) for name, rows in variants.items()}
        for layout, variants in content["rewards"].items()
    }
    return Scored(rewards, np.array(content["reference"]), content["reasons"])


def work(asked: str, result: str) -> None:
    """One world's part: what ``run_world`` asked for, into a file."""
    from score_everywhere import score_everywhere

    from nemo_aligner.config.common import Precision

    job = json.loads(Path(asked).read_text())
    precision = Precision(job["precision"])
    found, reference, reasons = score_everywhere(job["checkpoint"], job["texts"], precision)
    if int(os.environ.get("RANK", "0")) == 0:
        rewards = {
            layout: {name: rows.tolist() for name, rows in variants.items()}
            for layout, variants in found.items()
        }
        content = {"rewards": rewards, "reference": reference.tolist(), "reasons": reasons}
        Path(result).write_text(json.dumps(content))


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


@contextmanager
def served(checkpoint: str, precision: str) -> Iterator[str]:
    """The URL of a server of the checkpoint, on a free port of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        ready, log = Path(folder, "ready"), Path(folder, "log")
        settings = [f"rm_model_file={checkpoint}", f"precision={precision}"]
        settings += ["server.port=0", f"server.ready_file={ready}"]
        command = [sys.executable, str(ROOT / "examples/serve_reward_model.py"), *settings]
        with log.open("wb") as output:
            server = subprocess.Popen(command, stdout=output, stderr=output, env=_environment())
        try:
            end = time.monotonic() + SERVER_START_S
            while not ready.exists():
                if server.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the server did not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.2)
            yield ready.read_text().strip()
        finally:
            server.terminate()
            try:
                server.wait(SERVER_STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()


def score_over_http(checkpoint: str, precision: str, texts: list[Any]) -> dict[str, np.ndarray]:
    import numpy as np

    from nemo_aligner.serving.client.reward import RewardClient

    print(f"scoring in {precision} over HTTP", flush=True)
    with served(checkpoint, precision) as url, RewardClient(url) as client:
        alone = np.concatenate([client.score([text]) for text in texts])
        return {"alone": alone, "all together": client.score(texts)}


# --- Comparing --------------------------------------------------------------


def compare_all(scored: Scored, model: Model, precision: str) -> tuple[list[Row], str]:
    """The table's rows, and the summary; both are printed."""
    from nemo_aligner.diagnostics.invariance import choose_bar, compare, render_rows, summarise

    bar = choose_bar(precision, model.shape.num_layers, scored.reference)
    weights = model.contract.attribute_weights
    rows = [
        compare(layout, variant, rewards, scored.reference, weights, bar)
        for layout, variants in scored.rewards.items()
        for variant, rewards in variants.items()
    ]
    summary = summarise(rows, bar)
    print(f"\n{render_rows(rows)}\n\n{precision}: {summary}", flush=True)
    return rows, summary


def drive(arguments: argparse.Namespace, model: Model, texts: list[Any], precision: str) -> Scored:
    """Start worlds of 1, 2, 4, ... processes and the server; the reference is of one process."""
    from torch.cuda import device_count

    job = {"checkpoint": arguments.checkpoint, "texts": texts, "precision": precision}
    most = arguments.processes or device_count() or 2
    worlds = [run_world(job, 2**power) for power in range(10) if 2**power <= most]
    rewards = {layout: found for world in worlds for layout, found in world.rewards.items()}
    if arguments.server:
        rewards["server"] = score_over_http(arguments.checkpoint, precision, texts)
    reasons = [reason for world in worlds for reason in world.reasons]
    return Scored(rewards, worlds[0].reference, reasons)


def take_part(
    arguments: argparse.Namespace, model: Model, texts: list[Any], precision: str
) -> Scored:
    """In a world that torchrun or srun started: its layouts, the first of them as the reference."""
    from score_everywhere import score_everywhere

    from nemo_aligner.config.common import Precision

    return Scored(
        *score_everywhere(
            arguments.checkpoint, texts, Precision(precision), arguments.min_model_parallel
        )
    )


def check(arguments: argparse.Namespace) -> bool:
    """Score, compare, print and write; whether the bar holds."""
    from nemo_aligner.parallel.launch import is_launched

    model = read_model(arguments.checkpoint)
    texts = choose_texts(arguments)
    precision = arguments.precision or model.contract.dtype
    scored = (take_part if is_launched() else drive)(arguments, model, texts, precision)
    for reason in dict.fromkeys(scored.reasons):
        print(f"does not fit: {reason}")
    rows, summary = compare_all(scored, model, precision)
    if arguments.output is not None and _is_first():
        content = {"precision": precision, "summary": summary, "rows": [asdict(r) for r in rows]}
        # JSON has no NaN.
        text = json.dumps(content, indent=2).replace("NaN", "null")
        arguments.output.write_text(text + "\n")
    return all(row.ok for row in rows)


def _is_first() -> bool:
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", required=True, help="a reward model's .nemo")
    parser.add_argument("--data", metavar="FILE", help="pairs, in any format that training takes")
    parser.add_argument("--pairs", type=int, default=32, help="how many (default 32)")
    parser.add_argument("--processes", type=int, help="at most (default: all GPUs, or 2)")
    parser.add_argument(
        "--min-model-parallel", type=int, default=1, metavar="N",
        help="under torchrun or srun: no layout that splits the model less (default 1)",
    )  # fmt: skip
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help="default: its own")
    parser.add_argument("--no-server", dest="server", action="store_false")
    parser.add_argument("--output", type=Path, metavar="JSON", help="the table for programs")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    worker = argv[:1] == ["--worker"]
    arguments = None if worker else _parse(argv)
    from nemo_aligner.errors import AlignerError

    try:
        if arguments is None:
            work(*argv[1:])
            return 0
        with redirect_stdout(sys.stdout if _is_first() else io.StringIO()):
            return 0 if check(arguments) else 1
    except AlignerError as error:
        print(f"check_invariance.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
