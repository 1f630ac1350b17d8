"""The environment as a ray actor, created and called like in NeMo RL; needs a Python with ray.

``python ray_actor.py ACTOR URL`` with the actor's name and a server's URL prints the result of a
step of two samples, and the metrics.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

import ray


def main(actor: str, url: str) -> None:
    module, _, name = actor.rpartition(".")
    actor_class = getattr(importlib.import_module(module), name)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    options = {"py_executable": sys.executable, "env_vars": dict(os.environ)}
    environment = actor_class.options(runtime_env=options).remote({"url": url, "attribute": "sum"})
    logs = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]
        for text in ("b", "c")
    ]
    observations, _, _, rewards, terminateds, answers = ray.get(
        environment.step.remote(logs, [None, {"messages": [{"role": "user", "content": "d"}]}])
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
