"""Settings that have to be refused, many at once."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_aligner.config.load import load_config
from nemo_aligner.utils.errors import SettingsError


def not_refused(
    schema: type, refusals: Mapping[str, str], most_problems: int = 1
) -> dict[str, str]:
    """Of settings, each given alone, those whose error does not say what it has to, and no more."""
    wrong = {}
    for setting, wanted in refusals.items():
        try:
            load_config(schema, [setting])
            wrong[setting] = "it was taken"
        except SettingsError as error:
            if wanted not in str(error) or len(error.problems) > most_problems:
                wrong[setting] = str(error)
    return wrong
