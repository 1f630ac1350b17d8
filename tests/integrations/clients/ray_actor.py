"""The environment as a ray actor, as NeMo RL makes and asks it; run in a Python with ray.

``python ray_actor.py ACTOR URL CHATS`` with the actor's name, a server's URL and conversations as
JSON prints what a step of these and the metrics give.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

import ray


def main(actor: str, url: str, given: str) -> None:
    chats = json.loads(given)
    module, _, name = actor.rpartition(".")
    actor_class = getattr(importlib.import_module(module), name)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    options = {"py_executable": sys.executable, "env_vars": dict(os.environ)}
    config = {"url": url, "attribute": "helpfulness"}
    environment = actor_class.options(runtime_env=options).remote(config)
    # One log holds what its prompt was made of, the others have that beside them.
    logs = [[{"role": "user", "content": "templated"}, chat[1]] for chat in chats]
    logs[0] = chats[0]
    beside = [None, *({"messages": chat[:1]} for chat in chats[1:])]
    observations, _, _, rewards, terminateds, answers = ray.get(
        environment.step.remote(logs, beside)
    )
    batch = {"message_log": logs, "total_reward": rewards}
    _, metrics = ray.get(environment.global_post_process_and_metrics.remote(batch))
    ray.get(environment.shutdown.remote())
    found = {
        "rewards": rewards.tolist(),
        "terminateds": terminateds.tolist(),
        "answers": answers,
        "observations": observations,
        "metrics": metrics,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
