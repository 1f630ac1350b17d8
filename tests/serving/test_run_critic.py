"""What a server of a critic refuses before it answers anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_aligner.config.critic import ServeCriticConfig
from nemo_aligner.errors import ConfigError
from nemo_aligner.serving.run_critic import _check_reads_alike, run_critic_server
from tests.serving.fake_server import CONTRACT


def test_a_reward_model_that_reads_other_tokens_is_refused() -> None:
    _check_reads_alike("rm.nemo", CONTRACT, CONTRACT)
    with pytest.raises(ConfigError, match=r"rm\.nemo: got seq_length 64, wanted the critic's, 65"):
        _check_reads_alike("rm.nemo", CONTRACT, replace(CONTRACT, seq_length=65))


def test_a_server_without_a_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="restore_from_path: it is not set"):
        run_critic_server(ServeCriticConfig())
