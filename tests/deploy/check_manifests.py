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

# The members that objects of other APIs may have; the pods in them are those of Kubernetes.
# Kubeflow Trainer 2.0 to 2.3, pkg/apis/trainer/v1alpha1 (trainjob_types.go,
# trainingruntime_types.go), JobSet's v1alpha2 (jobset_types.go), and the Prometheus operator's v1.
_TRAINER = "trainer.kubeflow.org/v1alpha1"
_MEMBERS = {
    "TrainJob": {
        "": {"runtimeRef", "initializer", "trainer", "suspend", "managedBy"},
        "runtimeRef": {"name", "apiGroup", "kind"},
        "trainer": {
            "image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode",
        },
    },
    "TrainingRuntime": {
        "": {"mlPolicy", "podGroupPolicy", "template"},
        "mlPolicy": {"numNodes", "torch", "mpi"},
        "template": {"metadata", "spec"},
        "template.spec": {
            "replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy",
            "suspend", "coordinator", "ttlSecondsAfterFinished",
        },
        "template.spec.failurePolicy": {"maxRestarts", "rules", "restartStrategy"},
    },
    "ServiceMonitor": {"": {"selector", "endpoints", "namespaceSelector", "jobLabel"}},
}  # fmt: skip
_VERSIONS = {
    "TrainJob": _TRAINER,
    "TrainingRuntime": _TRAINER,
    "ServiceMonitor": "monitoring.coreos.com/v1",
}


def custom_problems(manifest: dict[str, Any]) -> Iterator[str]:
    """Unknown members of an object of another API, and problems of the jobs that it makes."""
    kind = manifest["kind"]
    if manifest["apiVersion"] != _VERSIONS[kind]:
        yield f"apiVersion: got {manifest['apiVersion']!r}, wanted {_VERSIONS[kind]!r}"
    for path, members in _MEMBERS[kind].items():
        part: dict[str, Any] = manifest["spec"]
        for name in path.split(".") if path else ():
            part = part.get(name, {})
        yield from (f"unknown member {name!r} of spec {path}" for name in part.keys() - members)
    if kind == "TrainingRuntime":
        for job in manifest["spec"]["template"]["spec"]["replicatedJobs"]:
            whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
            yield from problems({**whole, "spec": job["template"]["spec"]})


def problems(manifest: dict[str, Any]) -> Iterator[str]:
    if manifest["kind"] in _MEMBERS:
        yield from custom_problems(manifest)
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
