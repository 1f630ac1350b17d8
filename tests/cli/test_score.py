"""What ``nemo-aligner score`` refuses before it asks a server."""

from __future__ import annotations

import pytest

from nemo_aligner.cli.score import new_parser, run
from nemo_aligner.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", r"got '\{', wanted JSON"),
        ("[" * 200_000, "wanted JSON"),
        ('"a text"', "got 'a text', wanted a list of messages"),
        ("5", "got 5, wanted a text or a list of messages"),
        ("null", "got None, wanted"),
        ('{"role": "user"}', "got an object with keys 'role', wanted"),
        ("[]", "got an empty conversation"),
        ("[5]", "message 1: got 5, wanted exactly 'role' and 'content'"),
        (
            '[{"role": "assistant", "content": [1]}]',
            r"message 1, content: got \[1\], wanted a string",
        ),
        ('[{"role": "user", "content": "a"}]', "got role 'user', wanted 'assistant'"),
    ],
)
def test_what_is_no_conversation(given: str, said: str) -> None:
    options = new_parser().parse(["--conversation", given])
    with pytest.raises(ConfigError, match=f"^--conversation: .*{said}"):
        run(options)
