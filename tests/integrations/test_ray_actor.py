"""NeMo RL's environment as a real ray actor."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from nemo_aligner.integrations import nemo_rl
from tests.harness import tiny
from tests.harness.environments import kept_environment, make_environment

RAY = "ray==2.58.0"
SCRIPT = Path(__file__).parent / "clients" / "ray_actor.py"


def ray_python() -> Path:
    def make(folder: Path) -> None:
        make_environment(folder, RAY)

    return kept_environment("ray", (RAY,), make) / "bin" / "python"


def test_an_actor_of_ray_gives_rewards(fake_server: str, tmp_path: Path) -> None:
    actor = f"{nemo_rl.__name__}.RewardModelActor"
    python = ray_python()
    quiet = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [str(python), str(SCRIPT), actor, fake_server],
        capture_output=True,
        text=True,
        timeout=240,
        env={**quiet, **tiny.environment(RAY_USAGE_STATS_ENABLED="0")},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["rewards"] == [195.0, 199.0]
    assert found["terminateds"] == [True, True]
    assert found["answers"] == ["b", "c"]
    assert found["observations"][0] == {"role": "environment", "content": "Environment: 195"}
    assert found["metrics"]["reward_model_env/mean_reward"] == 197.0
    assert found["metrics"]["reward_model_env/num_samples"] == 2
