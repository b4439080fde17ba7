"""The manifests of deploy/kubernetes and the images of deploy/images: what can be known of them without a cluster.

Each document is held against the schema of its kind, where unknown fields are errors: Kubernetes' own, and those of
KubeRay's definitions (kuberay/README.md), in which pod templates and services are Kubernetes' again.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from outrider.actors.serve_adapter import SERVE_ENVIRONMENT
from outrider.cluster.config import OutriderConfig, parse_config
from outrider.cluster.placement import Bundle, ReplicaPlacement, placement_of, plan_cores, pool_placement_of
from outrider.deploy.app import TAKE_DOWN_S
from outrider.deploy.gateway import TOKEN_VARIABLE

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
KUBERNETES = "1.36"
"""The API that KubeRay 1.7.0 is built with."""

DRAINED_WITHIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
"""Until a node that is sent SIGTERM goes, whatever still runs there: `ray start --block` reads it."""

LOADS_WITHIN_S = 300.0
"""Another replica, on a node that may have to come first."""

ENDS_WITHIN_S = 30.0
"""Ray's processes of a node, which Kubernetes kills otherwise."""

Tree = dict[str, Any]

KUBERAY: dict[str, Tree] = {
    kind: json.loads((Path(__file__).parent / "kuberay" / f"{kind.lower()}s.json").read_text())
    for kind in ("RayCluster", "RayService")
}


def check_kubernetes(document: Tree) -> None:
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def check_part(_: Any, kind: str, part: Tree, __: Tree) -> Iterator[jsonschema.ValidationError]:
    """Check a part of one of KubeRay's: Kubernetes' schemas are of whole objects."""
    try:
        check_kubernetes({"apiVersion": "v1", "kind": kind, **part, "metadata": {"name": "x", **part["metadata"]}})
    except kubernetes_validate.ValidationError as error:
        yield jsonschema.ValidationError(error.message, path=error.path)


WITH_PARTS = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"x-kubernetes-kind": check_part})


def check_document(document: Tree) -> None:
    if (schema := KUBERAY.get(document["kind"])) is None:
        check_kubernetes(document)
        return
    assert document["apiVersion"] == "ray.io/v1"
    check_kubernetes({"apiVersion": "v1", "kind": "ConfigMap", "metadata": document["metadata"]})
    wrong = [f"{error.json_path}: {error.message}" for error in WITH_PARTS(schema).iter_errors(document)]
    assert not wrong, f"{document['kind']} as KubeRay defines it: {wrong}"


def documents(folder: Path) -> Iterator[tuple[str, Tree]]:
    """Yield the documents of a kustomization and of the folders that it names, each with the file it comes from."""
    for name in yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]:
        path = (folder / name).resolve()
        if path.is_dir():
            yield from documents(path)
        else:
            yield from ((path.name, document) for document in yaml.safe_load_all(path.read_text()))


def installed(overlay: str, kind: str) -> list[Tree]:
    return [document for _, document in documents(FOLDER / "overlays" / overlay) if document["kind"] == kind]


def cluster(overlay: str) -> Tree:
    """The RayCluster's spec."""
    services = installed(overlay, "RayService")
    (spec,) = [service["spec"]["rayClusterConfig"] for service in services] or [
        found["spec"] for found in installed(overlay, "RayCluster")
    ]
    return spec


def containers(group: Tree) -> dict[str, Tree]:
    """Return the containers of its pods, Ray's first, as KubeRay wants it."""
    found = group["template"]["spec"]["containers"]
    assert found[0]["name"].startswith("ray-")
    return {"ray": found[0], **{container["name"]: container for container in found[1:]}}


def groups(overlay: str) -> Iterator[tuple[str, Tree]]:
    spec = cluster(overlay)
    yield "head", spec["headGroupSpec"]
    yield from ((group["groupName"], group) for group in spec["workerGroupSpecs"])


def config_map(overlay: str, name: str) -> dict[str, str]:
    (found,) = [each["data"] for each in installed(overlay, "ConfigMap") if each["metadata"]["name"] == name]
    return found


def configurations(overlay: str) -> dict[str, str]:
    return config_map(overlay, "outrider-configuration")


def environment_of(overlay: str, container: Tree) -> dict[str, str]:
    """Return the environment that a container sees."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found |= config_map(overlay, source["configMapRef"]["name"])
    return found | {each["name"]: each.get("value", str(each.get("valueFrom"))) for each in container["env"]}


def configuration(overlay: str) -> OutriderConfig:
    return parse_config(yaml.safe_load(configurations(overlay)["outrider.yaml"]), overlay)


def serve_config(overlay: str) -> Tree:
    services = installed(overlay, "RayService")
    text = services[0]["spec"]["serveConfigV2"] if services else configurations(overlay)["serve.yaml"]
    return yaml.safe_load(text)


ALL = [
    pytest.param(document, id=f"{path.parent.name}/{path.name}:{document['kind']}:{document['metadata']['name']}")
    for path in sorted(FOLDER.rglob("*.yaml"))
    if path.name != "kustomization.yaml"
    for document in yaml.safe_load_all(path.read_text())
]


@pytest.mark.parametrize("document", ALL)
def test_every_document_fits_its_schema(document: Tree) -> None:
    check_document(document)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ray_wants_its_token_and_is_of_the_version_that_is_installed(overlay: str) -> None:
    spec = cluster(overlay)
    assert spec["authOptions"]["mode"] == "token"
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"ray[serve,default]=={spec['rayVersion']}" in dependencies


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_application_and_the_proxies_are_told_the_same(overlay: str) -> None:
    config, serve = configuration(overlay), serve_config(overlay)
    (application,) = serve["applications"]
    assert application["name"] == config.serving.app_name
    assert application["import_path"] == "outrider.deploy.app:build"
    assert serve["http_options"] == {"host": "127.0.0.1", "port": config.serving.http_port}, "the gateway is before it"
    assert serve["grpc_options"]["port"] == config.serving.grpc_port
    for role, group in groups(overlay):
        container = containers(group)["ray"]
        environment = environment_of(overlay, container)
        assert SERVE_ENVIRONMENT.items() <= environment.items(), role
        assert ("RAY_health_check_timeout_ms" in environment) == (role == "head"), "GCS looks after the nodes"
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert Path(application["args"]["config"]).name in configurations(overlay)
        assert mounts[str(Path(application["args"]["config"]).parent)] == "configuration"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_gateway_is_before_the_proxies_of_each_pod_that_clients_reach(overlay: str) -> None:
    gateway = configuration(overlay).serving.gateway
    for role, group in groups(overlay):
        pod, found = group["template"]["spec"], containers(group)
        token = environment_of(overlay, found["ray"])[TOKEN_VARIABLE]
        assert "outrider-gateway" in token, "the ingress may sit on any node"
        assert ("gateway" in found) == (role != "drafter")
        if role == "drafter":
            continue
        container = found["gateway"]
        assert environment_of(overlay, container)[TOKEN_VARIABLE] == token
        python, dash_m, module, path = container["command"]
        assert (python, dash_m, module) == ("python", "-m", "outrider.deploy.gateway")
        (application,) = serve_config(overlay)["applications"]
        assert path == application["args"]["config"]
        assert gateway.host == "0.0.0.0"
        assert container["livenessProbe"]["tcpSocket"]["port"] == gateway.http_port
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert {"/tmp", str(Path(path).parent)} <= mounts.keys()
        if gateway.keys_file is not None:
            (keys,) = [each for each in pod["volumes"] if each["name"] == mounts[str(Path(gateway.keys_file).parent)]]
            assert keys["secret"]["defaultMode"] & 0o027 == 0, "others may not read it, nor the group change it"
            assert pod["securityContext"]["fsGroup"] == 1000


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_hold_what_a_replica_asks_for_and_outlive_its_answers(overlay: str) -> None:
    config = configuration(overlay)
    workers = {role: group for role, group in groups(overlay) if role != "head"}
    for group in workers.values():
        pod = group["template"]["spec"]
        drained_s = float(environment_of(overlay, pod["containers"][0])[DRAINED_WITHIN])
        assert drained_s >= LOADS_WITHIN_S + config.serving.drain_s + TAKE_DOWN_S, "Serve cuts what is left before"
        assert pod["terminationGracePeriodSeconds"] >= drained_s + ENDS_WITHIN_S
        assert group["labels"]["outrider-role"] == group["groupName"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    has_gpus = "drafter" in workers
    cores = None if has_gpus else plan_cores(config, range(8))
    placement, pool = placement_of(config, cores), pool_placement_of(config, cores)
    largest = [node_of(group, has_gpus) for group in workers.values() for _ in range(group["maxReplicas"])]
    drafters = 0 if config.remote_drafter is None else config.remote_drafter.most_drafters
    wanted = [(placement, config.serving.most_replicas), *([] if pool is None else [(pool, drafters)])]
    assert has_room(wanted, largest)
    more = [(placement, config.serving.most_replicas + 1), *wanted[1:]]
    assert has_room(more, largest) == config.serving.surge, "a deploy takes one replica more for a while"
    if pool is not None:
        assert workers["drafter"]["maxReplicas"] == drafters


def has_room(wanted: Sequence[tuple[ReplicaPlacement, int]], nodes: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether empty nodes (``ray.nodes()``) would hold that many of each placement.

    Each placement goes to the first node with room, so a possible arrangement may be missed.
    """
    free = [(dict(node["Resources"]), node.get("Labels") or {}) for node in nodes if node["Alive"]]

    def take(needs: Bundle, labels: Mapping[str, str]) -> bool:
        for resources, carried in free:
            fits = all(resources.get(name, 0.0) >= count for name, count in needs.items())
            if fits and labels.items() <= carried.items():
                resources.update({name: resources.get(name, 0.0) - count for name, count in needs.items()})
                return True
        return False

    def place(placement: ReplicaPlacement) -> bool:
        if placement.strategy != "STRICT_PACK":
            return all(map(take, placement.bundles, placement.labels))
        names = {name for bundle in placement.bundles for name in bundle}
        return take({name: placement.total(name) for name in names}, placement.labels[0])

    return all(place(placement) for placement, number in wanted for _ in range(number))


def node_of(group: Tree, has_gpus: bool) -> Tree:
    """Return a node as ``ray.nodes()`` has it."""
    resources = {"CPU": float(cpus(group)), **({"GPU": float(gpus(group))} if has_gpus else {})}
    return {"Alive": True, "Resources": resources, "Labels": group["labels"]}


def cpus(group: Tree) -> int:
    given = group["rayStartParams"].get("num-cpus")
    return int(given or group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])


def gpus(group: Tree) -> int:
    return int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
