"""Templates with a place for the prompt, in the syntax of Python's ``str.format``.

NeMo RL (``prompt_file``) and OpenRLHF (``input_template``) fill in their templates with
``str.format``: ``{}`` or ``{0}`` is the prompt, and ``{{`` and ``}}`` are braces of the text. With
any other syntax, a reward model would be trained on other prompts than those that the policy
answers.
"""

from __future__ import annotations

from string import Formatter

from nemo_aligner.utils.errors import ConfigError

_PLACES = ("", "0")
_ADVICE = (
    "Write {} once, where the prompt goes, and the braces of the text twice, {{ and }}, as for "
    "Python's str.format"
)


def check_template(template: str, key: str) -> None:
    """Check that a template has exactly one place for the prompt, and no other field.

    Args:
        key: the setting that the template comes from, for the error.

    Raises:
        ConfigError: it has no place or several, another field, or an unpaired brace.
    """
    problem = _find_problem(template)
    if problem is not None:
        raise ConfigError(f"{key}: {template!r:.80} {problem}. {_ADVICE}")


def _find_problem(template: str) -> str | None:
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
        for name in names:
            if name not in _PLACES:
                return f"has the field {{{name}}}"
        if len(names) != 1:
            return f"has {{}} {len(names)} times"
        fill_template(template, "")
    # A brace is unpaired, or the place has a conversion or a format that texts do not have.
    except (ValueError, LookupError) as error:
        return f"is not a template: {error}"
    return None


def fill_template(template: str, prompt: str) -> str:
    """Put ``prompt`` in its place in a template that ``check_template`` accepts."""
    return template.format(prompt)
