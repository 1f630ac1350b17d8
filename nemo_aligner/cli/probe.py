"""Show that training sees its labels, with your model and settings.

probe_training.py [--records 8] [--steps 20] KEY=VALUE ...

Takes the settings of examples/train_reward_model.py (``--help-settings`` lists them); without
model.data.data_prefix.train, records of the demo set are used. It learns a handful of records by
heart, begins anew with their labels swapped (chosen and rejected exchanged, ratings mirrored), and
looks at the metric on the labels as they were: it must go up with the one, and down with the other.
A trainer that is blind to its labels fails, with exit code 1. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_aligner.cli.common import new_parser
from nemo_aligner.config.load import load_config
from nemo_aligner.config.training import TrainConfig


def main(argv: Sequence[str]) -> int:
    """0 where training follows its labels."""
    parser = new_parser(__doc__)
    parser.add_argument("--records", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--help-settings", action="store_true", help="list all settings")
    options, settings = parser.parse_known_args(argv)
    config = load_config(TrainConfig, ["--help"] if options.help_settings else settings)
    from nemo_aligner.diagnostics.probe_run import render_probe, run_probe
    from nemo_aligner.parallel.collectives import say

    result = run_probe(config, options.records, options.steps)
    say(render_probe(result))
    return 0 if result.passed else 1
