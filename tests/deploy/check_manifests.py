"""Kubernetes manifests against the schemas of their kinds; by a Python with kubernetes-validate.

``check_manifests.py FILE...`` prints a line for each thing that is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

_COUNT = {"type": "integer", "minimum": 0}
_NAME = {"type": "string"}
# Of Kubeflow's training operator; the pods in it are checked as Kubernetes' own.
# https://github.com/kubeflow/training-operator/tree/master/pkg/apis/kubeflow.org/v1
# (pytorch_types.go, common_types.go)
_REPLICAS = {
    "type": "object",
    "additionalProperties": False,
    "required": ["template"],
    "properties": {
        "replicas": _COUNT,
        "template": {"type": "object"},
        "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    },
}
_RUN_POLICY = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "cleanPodPolicy": {"enum": ["All", "Running", "None"]},
        "ttlSecondsAfterFinished": _COUNT,
        "activeDeadlineSeconds": _COUNT,
        "backoffLimit": _COUNT,
        "schedulingPolicy": {"type": "object"},
    },
}
PYTORCH_JOB = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "kubeflow.org/v1"},
        "kind": {"const": "PyTorchJob"},
        "metadata": {"type": "object", "required": ["name"], "properties": {"name": _NAME}},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["pytorchReplicaSpecs"],
            "properties": {
                "nprocPerNode": _NAME,
                "runPolicy": _RUN_POLICY,
                "elasticPolicy": {"type": "object"},
                "pytorchReplicaSpecs": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"Master": _REPLICAS, "Worker": _REPLICAS},
                },
            },
        },
    },
}


def problems(manifest: dict[str, Any]) -> Iterator[str]:
    if manifest["kind"] == "PyTorchJob":
        for error in jsonschema.Draft202012Validator(PYTORCH_JOB).iter_errors(manifest):
            yield f"{error.json_path}: {error.message}"
        for name, replicas in manifest["spec"]["pytorchReplicaSpecs"].items():
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name.lower()},
                **replicas["template"],
            }
            yield from (f"{name}: {problem}" for problem in problems(pod))
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
