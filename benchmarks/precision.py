"""How much rewards in bf16 differ from fp32, by the parts of the model that compute in bf16.

    python benchmarks/precision.py --model megatron_gpt.nemo --data pairs.jsonl

The same reward model scores both replies of ``--pairs`` pairs in fp32, and in bf16 as servers do;
then with one more or one fewer of its parts in fp32. "mean, same weights" compares with fp32
computed on the bf16 weights, so it shows only the error of computing.

Replies with a shared prefix have the same rounding errors in the prefix, so few samples would give
an error by chance. Each of ``--draws`` therefore multiplies the weights that add to the residual
stream by a factor that the norms cancel: all values are rounded anew, and exact rewards stay the
same. Figures are means over the draws. In each draw every variant is timed once; the time ratio is
the median over the draws, of CPU seconds, which other programs disturb little.
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
_ADDED_TO_STREAM = ("word_embeddings.weight", "linear_proj.weight", "linear_fc2.weight")


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
            _load_scorer(arguments.model, layout, precision)
            for precision in (Precision.fp32, Precision.bf16)
        )
        if arguments.draws > 1 and any("post_" in name for name in _named_weights(exact)):
            sys.exit(
                "--draws: got more than 1, wanted 1: this model has norms on its layers' outputs"
            )
        token_lists = encode_pairs(
            arguments.data, arguments.pairs, lambda text: exact.encode(text).token_ids
        )
        exact_rewards = exact.score_token_lists(token_lists)[:, 0]
        rows = _measure_variants(exact, rounded, token_lists, exact_rewards, arguments.draws)
    about = {
        "machine": machine(),
        "tokens": sum(map(len, token_lists)),
        "rewards": f"{exact_rewards.min():.2f} to {exact_rewards.max():.2f}, standard deviation "
        f"{exact_rewards.std():.3f}",
    }
    print("\n" + ", ".join(f"{key}: {value}" for key, value in about.items()))
    write_json(arguments.output, {**about, "rows": rows})


def _load_scorer(path: Path, layout: Any, precision: Any) -> Any:
    """Load a scorer as a server does, but with weights that can be overwritten."""
    from nemo_aligner.checkpoint.nemo.reward_model import load_reward_model
    from nemo_aligner.config.model import ROWS_BY_DEVICE
    from nemo_aligner.models.batch_invariance import make_batch_invariant
    from nemo_aligner.serving.engine.scorer import RewardScorer

    loaded = load_reward_model(path, layout, precision)
    make_batch_invariant(loaded.model, ROWS_BY_DEVICE)
    tokens = max(8192, loaded.contract.seq_length)
    return RewardScorer(loaded.model, loaded.contract, loaded.tokenizer, layout, tokens)


def _measure_variants(
    exact: Any, rounded: Any, token_lists: list[list[int]], exact_rewards: np.ndarray, draws: int
) -> list[dict[str, Any]]:
    """Measure how far each variant's rewards are from those in fp32, and how long it takes.

    The first variant, "weights alone", computes in fp32 on the bf16 weights. ``_make_variants``
    makes the others, which compute in bf16 with some parts of the model in fp32. Returns a row for
    each variant.
    """
    weights = {name: weight.detach().clone() for name, weight in _named_weights(exact).items()}
    variants: dict[str, tuple[Any, Part]] = {
        "weights alone": (exact, lambda model: nullcontext()),
        **{name: (rounded, part) for name, part in _make_variants().items()},
    }
    rewards: dict[str, list[np.ndarray]] = {name: [] for name in variants}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    rows: list[dict[str, Any]] = []
    for draw in range(draws):
        _redraw_roundings(weights, (exact, rounded), 1 + draw / draws)
        for name, (scorer, part) in variants.items():
            with part(scorer.model):
                start = time.process_time()
                rewards[name].append(scorer.score_token_lists(token_lists)[:, 0])
                seconds[name].append(time.process_time() - start)
        rows = [_summarize_variant(name, rewards, seconds, exact_rewards) for name in variants]
        print(f"\nafter {draw + 1} of {draws} draws\n{render(rows)}", flush=True)
    return rows


def _named_weights(scorer: Any) -> dict[str, Any]:
    return dict(scorer.model.named_parameters())


def _redraw_roundings(weights: Mapping[str, Any], scorers: tuple[Any, Any], factor: float) -> None:
    """Give both scorers new bf16 weights, so that all values in the model are rounded anew.

    Weights whose output is added to the residual stream are multiplied by ``factor``. The norms
    cancel it, so exact rewards stay the same.
    """
    import torch

    exact, rounded = map(_named_weights, scorers)
    with torch.no_grad():
        for name, weight in weights.items():
            scaled = weight * factor if name.endswith(_ADDED_TO_STREAM) else weight
            rounded[name].copy_(scaled)
            exact[name].copy_(rounded[name])


def _summarize_variant(
    name: str,
    rewards_by_variant: Mapping[str, list[np.ndarray]],
    seconds: Mapping[str, list[float]],
    exact_rewards: np.ndarray,
) -> dict[str, Any]:
    differences = [np.abs(rewards - exact_rewards) for rewards in rewards_by_variant[name]]
    computed = [
        np.abs(rewards - same)
        for rewards, same in zip(
            rewards_by_variant[name], rewards_by_variant["weights alone"], strict=True
        )
    ]
    right = exact_rewards[::2] > exact_rewards[1::2]
    flipped = [
        np.sum((rewards[::2] > rewards[1::2]) != right) for rewards in rewards_by_variant[name]
    ]
    return {
        "in fp32": name,
        "largest |difference|": float(np.mean([difference.max() for difference in differences])),
        "mean": float(np.mean(differences)),
        "mean, same weights": float(np.mean(computed)),
        "pairs flipped": float(np.mean(flipped)),
        "rewards/s": len(exact_rewards) / median(seconds[name]),
        "time": median_of_ratios(seconds["as it is"], seconds[name]),
    }


def _make_variants() -> dict[str, Part]:
    """Build the variants, as context managers by their names.

    Within the block, a model computes more of its parts in fp32, or fewer.
    """
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
    parser.add_argument("--data", type=Path, required=True, help="file of pairs")
    parser.add_argument("--pairs", type=int, default=32, help="number of pairs (default 32)")
    parser.add_argument(
        "--draws",
        type=int,
        default=4,
        help="number of times that values are rounded anew (default 4)",
    )
    parser.add_argument("--output", type=Path, metavar="JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
