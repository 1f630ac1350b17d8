"""Messages between pipeline stages travel while the sender goes on."""

from __future__ import annotations

import pytest

from tests import tiny


@pytest.mark.slow(seconds=4)
def test_a_stage_goes_on_before_its_messages_are_received() -> None:
    done = tiny.run_script("tests/parallel/sent_ahead.py", processes=2)
    assert "received: [True, True]" in done.stdout
