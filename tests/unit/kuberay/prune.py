"""Converts KubeRay's definitions of its kinds, from a clone of its repository, to the JSON Schemas beside this file.

    python tests/unit/kuberay/prune.py CLONE v1.7.0

Fields that a definition does not have are errors, as under kubectl. Left out: descriptions, status, Kubernetes' own
keywords. Pod templates and services name the kind of Kubernetes that they are checked as, in place of their fields.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
KINDS = ("rayclusters", "rayservices")
AS_KUBERNETES = {"template": "Pod", "headService": "Service", "serveService": "Service"}
"""Kind by property; x-kubernetes-kind in the schemas."""


def git(clone: str, *arguments: str) -> str:
    return subprocess.run(["git", "-C", clone, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def pruned(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a structural schema, which has no additionalProperties beside properties, without what is left out."""
    kept = {
        word: value
        for word, value in schema.items()
        if word not in ("description", "format", "properties") and not word.startswith("x-kubernetes-")
    }
    if schema.get("x-kubernetes-int-or-string"):
        kept.pop("type", None)
    if (properties := schema.get("properties")) is not None:
        kept["properties"] = {
            name: {"type": "object", "x-kubernetes-kind": AS_KUBERNETES[name]}
            if name in AS_KUBERNETES
            else pruned(inner)
            for name, inner in properties.items()
        }
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            kept["additionalProperties"] = False
    for word in ("items", "additionalProperties"):
        if isinstance(schema.get(word), dict):
            kept[word] = pruned(schema[word])
    return kept


def main(clone: str, version: str) -> None:
    commit = git(clone, "rev-parse", f"{version}^{{commit}}")
    for kind in KINDS:
        path = f"helm-chart/kuberay-operator/crds/ray.io_{kind}.yaml"
        definition = yaml.safe_load(git(clone, "show", f"{commit}:{path}"))
        (served,) = [each for each in definition["spec"]["versions"] if each["name"] == "v1"]
        schema = served["schema"]["openAPIV3Schema"]
        schema["properties"].pop("status")
        source = f"From {path} of KubeRay {version} ({commit}), Apache-2.0; pruned by prune.py"
        text = json.dumps({"$comment": source, **pruned(schema)}, separators=(",", ":"), sort_keys=True)
        (FOLDER / f"{kind}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
