"""How far bf16 moves rewards from fp32's, by what is rounded, and what it costs not to.

    python benchmarks/precision.py --model megatron_gpt.nemo --data pairs.jsonl

The same reward model scores both replies of ``--pairs`` in fp32, and in bf16 as it is scored
everywhere; then with one more or one less of its parts in fp32. "mean, same weights" is
against fp32 with the weights that bf16 has: what computing alone brings.

How roundings fall is chance, and the same for all texts where they begin alike. So each of
``--draws`` multiplies what is added to the residual stream by a factor that the norms take out
again: all numbers are rounded anew, and exact rewards are the same. Figures are means over the
draws; times are taken in turns, one of each a draw, and the ratio is the median. They are seconds
of one core's work, so that what else a machine does disturbs them little.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
from common import choose_device, machine, median_of_ratios, render, write_json
from scoring_work import encode_pairs

Part = Callable[[Any], AbstractContextManager[Any]]
_ADDED = ("word_embeddings.weight", "linear_proj.weight", "linear_fc2.weight")


def main() -> None:
    arguments = _parse()
    choose_device("cpu")
    import torch

    from nemo_aligner.config.common import Precision
    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import initialize_layout

    torch.set_num_threads(1)
    with launch():
        layout = initialize_layout()
        exact, rounded = (
            _scorer(arguments.model, layout, each) for each in (Precision.fp32, Precision.bf16)
        )
        if arguments.draws > 1 and any("post_" in name for name in _weights(exact)):
            sys.exit("--draws: got more than 1, wanted 1: this model norms what its layers add")
        token_lists = encode_pairs(
            arguments.data, arguments.pairs, lambda text: exact.encode(text).token_ids
        )
        wanted = exact.score_token_lists(token_lists)[:, 0]
        rows = _measure(exact, rounded, token_lists, wanted, arguments.draws)
    about = {
        "machine": machine(),
        "tokens": sum(map(len, token_lists)),
        "rewards": f"{wanted.min():.2f} to {wanted.max():.2f}, standard deviation "
        f"{wanted.std():.3f}",
    }
    print("\n" + ", ".join(f"{key}: {value}" for key, value in about.items()))
    write_json(arguments.output, {**about, "rows": rows})


def _scorer(path: Path, layout: Any, precision: Any) -> Any:
    """As a server's, but with weights that can be overwritten."""
    from nemo_aligner.checkpoint.nemo.reward_model import load_reward_model
    from nemo_aligner.config.model import ROWS_BY_DEVICE
    from nemo_aligner.models.batch_invariance import make_batch_invariant
    from nemo_aligner.serving.engine.scorer import RewardScorer

    loaded = load_reward_model(path, layout, precision)
    make_batch_invariant(loaded.model, ROWS_BY_DEVICE)
    tokens = max(8192, loaded.contract.seq_length)
    return RewardScorer(loaded.model, loaded.contract, loaded.tokenizer, layout, tokens)


def _measure(
    exact: Any, rounded: Any, token_lists: list[list[int]], wanted: np.ndarray, draws: int
) -> list[dict[str, Any]]:
    """A row for each of ``_parts``, after one of the weights alone."""
    weights = {name: each.detach().clone() for name, each in _weights(exact).items()}
    ways: dict[str, tuple[Any, Part]] = {
        "weights alone": (exact, lambda model: nullcontext()),
        **{name: (rounded, part) for name, part in _parts().items()},
    }
    found: dict[str, list[np.ndarray]] = {name: [] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    rows: list[dict[str, Any]] = []
    for draw in range(draws):
        _round_anew(weights, (exact, rounded), 1 + draw / draws)
        for name, (scorer, part) in ways.items():
            with part(scorer.model):
                start = time.process_time()
                found[name].append(scorer.score_token_lists(token_lists)[:, 0])
                seconds[name].append(time.process_time() - start)
        rows = [_row(name, found, seconds, wanted) for name in ways]
        print(f"\nafter {draw + 1} of {draws} draws\n{render(rows)}", flush=True)
    return rows


def _weights(scorer: Any) -> dict[str, Any]:
    return dict(scorer.model.named_parameters())


def _round_anew(weights: Mapping[str, Any], scorers: tuple[Any, Any], factor: float) -> None:
    """Give both scorers the same numbers of bf16, what is added to the stream times ``factor``."""
    import torch

    exact, rounded = map(_weights, scorers)
    with torch.no_grad():
        for name, weight in weights.items():
            scaled = weight * factor if name.endswith(_ADDED) else weight
            rounded[name].copy_(scaled)
            exact[name].copy_(rounded[name])


def _row(
    name: str,
    found: Mapping[str, list[np.ndarray]],
    seconds: Mapping[str, list[float]],
    wanted: np.ndarray,
) -> dict[str, Any]:
    differences = [np.abs(rewards - wanted) for rewards in found[name]]
    computed = [
        np.abs(rewards - same)
        for rewards, same in zip(found[name], found["weights alone"], strict=True)
    ]
    right = wanted[::2] > wanted[1::2]
    turned = [np.sum((each[::2] > each[1::2]) != right) for each in found[name]]
    return {
        "in fp32": name,
        "largest |difference|": float(np.mean([each.max() for each in differences])),
        "mean": float(np.mean(differences)),
        "mean, same weights": float(np.mean(computed)),
        "pairs turned": float(np.mean(turned)),
        "rewards/s": len(wanted) / median(seconds[name]),
        "time": median_of_ratios(seconds["as it is"], seconds[name]),
    }


def _parts() -> dict[str, Part]:
    """What is computed in fp32, or no more, while a context of the model lasts."""
    import torch

    from nemo_aligner.cpu import kernels
    from nemo_aligner.models.attention import packed
    from nemo_aligner.models.layers import RowLinear
    from nemo_aligner.models.reward_model import GPTRewardModel

    def wide(rotate: Any) -> Any:
        return lambda x, *tables: rotate(x.float(), *tables).to(x.dtype)

    @contextmanager
    def rotation(model: Any) -> Iterator[None]:
        with (
            patch.object(model.config, "params_dtype", torch.float32),
            patch.object(packed, "rotate", wide(packed.rotate)),
            patch.object(kernels, "rotate", wide(kernels.rotate)),
        ):
            yield

    def outputs(model: Any) -> Any:
        def wide(layer: Any, x: Any) -> Any:
            return torch.nn.functional.linear(x.float(), layer.weight.float())

        return patch.object(RowLinear, "infer", wide)

    return {
        "as it is": lambda model: nullcontext(),
        "but a stream in bf16": lambda model: patch.object(
            GPTRewardModel, "stream_dtype", torch.bfloat16
        ),
        "and the last norm": lambda model: patch.object(
            model.decoder.final_layernorm, "_dtype", torch.float32
        ),
        "and rotation": rotation,
        "and what layers add": outputs,
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a reward model's .nemo")
    parser.add_argument("--data", type=Path, required=True, help="pairs")
    parser.add_argument("--pairs", type=int, default=32, help="how many (default 32)")
    parser.add_argument("--draws", type=int, default=4, help="of roundings (default 4)")
    parser.add_argument("--output", type=Path, metavar="JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
