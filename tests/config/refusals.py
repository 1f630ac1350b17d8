"""Check of a table of invalid settings and their error messages."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_aligner.config.load import load_config
from nemo_aligner.utils.errors import SettingsError


def not_refused(
    schema: type, refusals: Mapping[str, str], most_problems: int = 1
) -> dict[str, str]:
    """Return the settings that raise no error, another error, or too many problems."""
    wrong = {}
    for setting, wanted in refusals.items():
        try:
            load_config(schema, [setting])
            wrong[setting] = "it was taken"
        except SettingsError as error:
            if wanted not in str(error) or len(error.problems) > most_problems:
                wrong[setting] = str(error)
    return wrong
