"""Check Kubernetes manifests against the schemas of their kinds; needs kubernetes-validate.

``check_manifests.py FILE...`` prints a line for each problem.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

# The members of objects of Kubeflow's training operator; its pods are those of Kubernetes.
# https://github.com/kubeflow/training-operator/tree/master/pkg/apis/kubeflow.org/v1
# (pytorch_types.go, common_types.go)
_SPEC = {"nprocPerNode", "runPolicy", "elasticPolicy", "pytorchReplicaSpecs"}
_RUN_POLICY = {
    "cleanPodPolicy",
    "ttlSecondsAfterFinished",
    "activeDeadlineSeconds",
    "backoffLimit",
    "schedulingPolicy",
}
_REPLICAS = {"replicas", "template", "restartPolicy"}
_RESTARTS = {"Always", "OnFailure", "Never", "ExitCode"}


def job_problems(job: dict[str, Any]) -> Iterator[str]:
    """Members of a PyTorchJob that the operator does not know."""
    if job["apiVersion"] != "kubeflow.org/v1":
        yield f"apiVersion: got {job['apiVersion']!r}"
    policy = job["spec"].get("runPolicy", {})
    replicas = job["spec"]["pytorchReplicaSpecs"]
    unknown = [*(job["spec"].keys() - _SPEC), *(policy.keys() - _RUN_POLICY)]
    unknown += replicas.keys() - {"Master", "Worker"}
    for name, replica in replicas.items():
        unknown += replica.keys() - _REPLICAS
        restart = replica.get("restartPolicy", "Never")
        if restart not in _RESTARTS:
            yield f"{name}: restartPolicy: {restart!r} is not one of {sorted(_RESTARTS)}"
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name.lower()}}
        yield from (f"{name}: {problem}" for problem in problems({**pod, **replica["template"]}))
    yield from (f"unknown member {name!r}" for name in unknown)


def problems(manifest: dict[str, Any]) -> Iterator[str]:
    if manifest["kind"] == "PyTorchJob":
        yield from job_problems(manifest)
        return
    try:
        newest = kubernetes_validate.latest_version()
        kubernetes_validate.validate(manifest, newest, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{manifest['kind']}: {'.'.join(map(str, error.path))}: {error.message}"


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        for manifest in yaml.safe_load_all(path.read_text()):
            for problem in problems(manifest):
                print(f"{path.name}: {problem}")


if __name__ == "__main__":
    main()
