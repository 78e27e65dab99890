"""The manifests as a cluster would get them: rendered by kustomize, checked against the API's schemas and by what they
promise (K8S-1, K8S-2)."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from reference_stack.kubernetes import rendering

pytestmark = pytest.mark.e2e  # kubectl

Document = dict[str, Any]
HERE = rendering.HERE
OVERLAYS = sorted(path.name for path in (HERE / "overlays").iterdir())
VERSIONS = ("1.30", "1.37")  # the oldest that knows all of it, and the newest that there are schemas of
WITH_A_TOKEN = {"prometheus", "promotion"}  # they ask the API server; nobody else may


def kustomize(folder: Path) -> subprocess.CompletedProcess[str]:
    assert shutil.which("kubectl"), "kubectl is missing: the manifests are rendered by its `kustomize`"
    return subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)


@cache
def rendered(overlay: str) -> tuple[Document, ...]:
    done = kustomize(HERE / "overlays" / overlay)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", done.stderr  # it warns of fields that are going away
    return tuple(yaml.safe_load_all(done.stdout))


def named(overlay: str, kind: str, name: str) -> Document:
    (found,) = [one for one in rendered(overlay) if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def workloads(overlay: str) -> Iterator[tuple[str, Document]]:
    """Every pod template, by its workload's name."""
    for one in rendered(overlay):
        spec = one.get("spec", {})
        template = spec.get("jobTemplate", {}).get("spec", spec).get("template")
        if template:
            yield one["metadata"]["name"], template


def containers(template: Document) -> list[Document]:
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def selected(labels: Document, selector: Document) -> bool:
    wanted = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", [])
    )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_schemas(overlay: str) -> None:
    """Every resource of every overlay is one that the API server knows, to the last field."""
    for one in rendered(overlay):
        for version in VERSIONS:
            validate(yaml.safe_dump(one), version)


@cache
def validate(text: str, version: str) -> None:
    """Overlays differ in little: what is alike is checked once."""
    kubernetes_validate.validate(yaml.safe_load(text), version, strict=True)


TYPOS = {
    "a field that is not there": ("readinessProbe:", "readynessProbe:", "engine"),
    "a number that is text": ("failureThreshold: 120", 'failureThreshold: "120"', "engine"),
    "a field in the wrong place": ("        runAsNonRoot: true", "        drop: [ALL]", "engine"),
    "an unknown probe": ("httpGet: {path: /health, port: http}", "httpPost: {path: /health, port: http}", "engine"),
}


@pytest.mark.parametrize("typo", TYPOS)
def test_a_typo_fails(typo: str, tmp_path: Path) -> None:
    """What is not in the schema does not pass: each of these was one slip of the hand."""
    right, wrong, name = TYPOS[typo]
    shutil.copytree(HERE, tmp_path / "k")
    file = tmp_path / "k/base/engine/deployment.yaml"
    assert right in file.read_text()
    file.write_text(file.read_text().replace(right, wrong))
    done = kustomize(tmp_path / "k/overlays/h100")
    assert done.returncode == 0, done.stderr
    (broken,) = [
        one for one in yaml.safe_load_all(done.stdout) if (one["kind"], one["metadata"]["name"]) == ("Deployment", name)
    ]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def test_a_missing_file_fails(tmp_path: Path) -> None:
    """A resource that is listed and not there is kustomize's to refuse."""
    shutil.copytree(HERE, tmp_path / "k")
    (tmp_path / "k/base/network.yaml").unlink()
    assert kustomize(tmp_path / "k/overlays/h100").returncode != 0


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("name", ["engine", "engine-candidate"])
def test_engine(overlay: str, name: str) -> None:
    """An engine gets a card, of the profile's kind, time to load, shared memory, and its weights read-only (K8S-1)."""
    pod = named(overlay, "Deployment", name)["spec"]["template"]["spec"]
    (engine,) = pod["containers"]
    assert (
        engine["resources"]["limits"]["nvidia.com/gpu"]
        == engine["args"][engine["args"].index("--tensor-parallel-size") + 1]
    )
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    wanted = {one["key"]: one["values"] for term in terms for one in term["matchExpressions"]}
    assert len(terms) == 1 and wanted["nvidia.com/gpu.present"] == ["true"] and wanted["nvidia.com/gpu.product"]
    start = engine["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 900
    mounts = {mount["mountPath"]: mount for mount in engine["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"
    assert mounts["/models"]["readOnly"] and "persistentVolumeClaim" in volumes[mounts["/models"]["name"]]


def test_readiness_is_a_canary() -> None:
    """A frozen engine, whose /health is 200, is not ready and not alive: both probes ask for a token (K8S-1)."""
    pod = named("h100", "Deployment", "engine")["spec"]["template"]["spec"]
    (engine,) = pod["containers"]
    (canary,) = pod["initContainers"]
    assert canary["restartPolicy"] == "Always"
    (port,) = [port["containerPort"] for port in canary["ports"]]
    for probe in ("readinessProbe", "livenessProbe"):
        assert engine[probe]["httpGet"] == {"path": "/canary", "port": port}
    assert engine["livenessProbe"]["periodSeconds"] * engine["livenessProbe"]["failureThreshold"] >= 60


def test_an_end_without_losses() -> None:
    """There is time to leave the Service, to end what is under way, and only then to be killed (K8S-1)."""
    pod = named("h100", "Deployment", "engine")["spec"]["template"]["spec"]
    (engine,) = pod["containers"]
    drain_s = int(engine["args"][engine["args"].index("--shutdown-timeout") + 1])
    assert pod["terminationGracePeriodSeconds"] > drain_s + engine["lifecycle"]["preStop"]["sleep"]["seconds"]
    for name, template in workloads("h100"):
        waits = [one["lifecycle"]["preStop"]["sleep"]["seconds"] for one in containers(template) if "lifecycle" in one]
        assert template["spec"].get("terminationGracePeriodSeconds", 30) > max(waits, default=0), name


def test_least_privilege() -> None:
    """No pod but two has a token; none is root, gains rights, writes its image or keeps a capability (K8S-1)."""
    seen = set()
    for name, template in workloads("h100"):
        pod = template["spec"]
        seen.add(name)
        assert pod["automountServiceAccountToken"] is (name in WITH_A_TOKEN), name
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"], name
        for one in containers(template):
            rights = one["securityContext"]
            assert rights["capabilities"] == {"drop": ["ALL"]}, one["name"]
            assert not rights["allowPrivilegeEscalation"] and rights["readOnlyRootFilesystem"], one["name"]
            assert one["resources"]["limits"]["memory"] and one["resources"]["requests"]["cpu"], one["name"]
    assert seen == {
        "engine",
        "engine-candidate",
        "gateway",
        "orchestrator",
        "redis",
        "qdrant",
        "prometheus",
        "promotion",
    }


def test_images_are_pinned() -> None:
    """Nothing runs whatever `latest` is today."""
    images = {one["image"] for _, template in workloads("h100") for one in containers(template)}
    assert len(images) == 6 and all(re.search(r":v?\d", image) for image in images), images


def test_probes() -> None:
    """Whoever serves says when it is ready, and is started anew when it is not alive."""
    for name, template in workloads("h100"):
        for one in template["spec"]["containers"]:
            if name != "promotion":
                assert {"readinessProbe", "livenessProbe"} <= one.keys(), (name, one["name"])


def test_names_lead_somewhere() -> None:
    """Every ConfigMap, claim and account that a pod names is there; the one Secret is the operator's own."""
    there = {(one["kind"], one["metadata"]["name"]) for one in rendered("h100")}
    for name, template in workloads("h100"):
        pod = template["spec"]
        used = [("ServiceAccount", pod["serviceAccountName"])] if "serviceAccountName" in pod else []
        for volume in pod.get("volumes", []):
            if "configMap" in volume:
                used.append(("ConfigMap", volume["configMap"]["name"]))
            if "persistentVolumeClaim" in volume:
                used.append(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
            if "secret" in volume:
                assert volume["secret"]["secretName"] == "orchestrator-keys"
        for one in containers(template):
            for variable in one.get("env", []):
                if "valueFrom" in variable:
                    used.append(("ConfigMap", variable["valueFrom"]["configMapKeyRef"]["name"]))
        assert set(used) <= there, (name, set(used) - there)


def test_selectors_select() -> None:
    """Every Service and budget selects the pods of one workload, and every network policy those of one at least."""
    pods = {name: template["metadata"]["labels"] for name, template in workloads("h100")}
    for one in rendered("h100"):
        kind, spec = one["kind"], one.get("spec", {})
        if kind == "Service":
            selector = {"matchLabels": spec["selector"]}
        elif kind == "PodDisruptionBudget":
            selector = spec["selector"]
        elif kind == "NetworkPolicy":
            selector = spec["podSelector"]
        else:
            continue
        found = {name for name, labels in pods.items() if selected(labels, selector)}
        if kind == "NetworkPolicy":
            assert found, one["metadata"]["name"]
        else:
            assert found == {one["metadata"]["name"]}, (kind, one["metadata"]["name"], found)


def test_budgets() -> None:
    """A drained node takes one replica at a time, of engines and of what stands before them (K8S-1)."""
    budgets = {one["metadata"]["name"] for one in rendered("h100") if one["kind"] == "PodDisruptionBudget"}
    assert budgets == {"engine", "gateway", "orchestrator"}
    for name in budgets:
        assert named("h100", "PodDisruptionBudget", name)["spec"]["maxUnavailable"] == 1
        assert named("h100", "Deployment", name)["spec"]["replicas"] >= 2


PATHS = {  # who speaks to whom, at which port; what is not here is not allowed
    ("gateway", "engine", 8000),
    ("gateway", "engine", 8001),
    ("orchestrator", "gateway", 8080),
    ("orchestrator", "redis", 6379),
    ("orchestrator", "qdrant", 6333),
    ("promotion", "gateway", 8080),
    ("promotion", "engine", 8000),
    ("promotion", "prometheus", 9090),
    ("prometheus", "engine", 8000),
    ("prometheus", "gateway", 9902),
    ("prometheus", "orchestrator", 8090),
    ("prometheus", "qdrant", 6333),
}
OPEN = {("gateway", 8080), ("orchestrator", 8090)}  # to users, wherever they are


def allowed(source: Document, to: Document, port: int) -> bool:
    """Whether the network policies let pods with these labels speak: out of the one, and into the other."""
    policies = [one["spec"] for one in rendered("h100") if one["kind"] == "NetworkPolicy"]

    def one_way(own: Document, other: Document, way: str, peers: str) -> bool:
        for policy in policies:
            if not selected(own, policy["podSelector"]):
                continue
            for rule in policy.get(way, []):
                ports = [one["port"] for one in rule.get("ports", [])]
                to_pods = [one for one in rule.get(peers, []) if "namespaceSelector" not in one]
                reaches = peers not in rule or any(selected(other, one["podSelector"]) for one in to_pods)
                if reaches and (not ports or port in ports):
                    return True
        return False

    return one_way(source, to, "egress", "to") and one_way(to, source, "ingress", "from")


def test_who_may_speak_to_whom() -> None:
    """The paths that serving needs are open, and no other between these pods is."""
    pods = {name: template["metadata"]["labels"] for name, template in workloads("h100")}
    ports = {port for *_, port in PATHS} | {9901, 9400}
    kinds = {labels["app.kubernetes.io/component"]: labels for labels in pods.values()}
    found = {
        (a, b, port) for a in kinds for b in kinds for port in ports if a != b and allowed(kinds[a], kinds[b], port)
    }
    assert found >= PATHS
    # Users' ports take from anywhere, so from Prometheus, which may speak to every pod, too.
    assert {path for path in found - PATHS if path[1:] not in OPEN} == set()


def test_nothing_else() -> None:
    """By default nobody speaks to anybody."""
    spec = named("h100", "NetworkPolicy", "nothing-else")["spec"]
    assert spec == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_chaos_is_not_allowed() -> None:
    """No overlay opts into experiments; the component does, on engines and the gateway."""
    for overlay in OVERLAYS:
        assert not any("harness/chaos" in template["metadata"]["labels"] for _, template in workloads(overlay))


def test_opt_in(tmp_path: Path) -> None:
    """An overlay with the component labels the pods that experiments may break, and leaves the selectors alone."""
    shutil.copytree(HERE, tmp_path / "k")
    with (tmp_path / "k/overlays/h100/kustomization.yaml").open("a") as file:
        file.write("components: [../../components/chaos_allowed]\n")
    done = kustomize(tmp_path / "k/overlays/h100")
    assert done.returncode == 0, done.stderr
    opted = {}
    for one in yaml.safe_load_all(done.stdout):
        kubernetes_validate.validate(one, VERSIONS[-1], strict=True)
        labels = one.get("spec", {}).get("template", {}).get("metadata", {}).get("labels", {})
        if "harness/chaos" in labels:
            opted[one["metadata"]["name"]] = labels["harness/chaos"]
            assert "harness/chaos" not in one["spec"]["selector"]["matchLabels"]
    assert opted == dict.fromkeys(("engine", "engine-candidate", "gateway"), "allowed")


def test_candidate() -> None:
    """The next release waits with no replica, no share and labels of its own (K8S-2)."""
    candidate, engine = (named("h100", "Deployment", name) for name in ("engine-candidate", "engine"))
    assert candidate["spec"]["replicas"] == 0
    assert candidate["spec"]["template"]["metadata"]["labels"]["harness/release"] == "candidate"
    assert engine["spec"]["template"]["metadata"]["labels"]["harness/release"] == "stable"
    assert candidate["spec"]["template"]["spec"]["containers"] == engine["spec"]["template"]["spec"]["containers"]
    assert named("h100", "ConfigMap", "weights")["data"] == {"routing.engines": "100", "routing.candidate": "0"}
    promotion = named("h100", "CronJob", "promotion")["spec"]
    assert promotion["suspend"] and promotion["jobTemplate"]["spec"]["backoffLimit"] == 0


def test_rights() -> None:
    """The promotion may change two Deployments and the weights, by name, and nothing else (K8S-2)."""
    (role,) = [one for one in rendered("h100") if one["kind"] == "Role"]
    changes = {
        (tuple(rule["resources"]), tuple(rule.get("resourceNames", ())))
        for rule in role["rules"]
        if set(rule["verbs"]) - {"get", "list", "watch"}
    }
    assert changes == {(("deployments",), ("engine", "engine-candidate")), (("configmaps",), ("weights",))}
    (cluster_wide,) = [one for one in rendered("h100") if one["kind"] == "ClusterRole"]
    assert all(set(rule["verbs"]) <= {"get", "list", "watch"} for rule in cluster_wide["rules"])


def test_commands() -> None:
    """Every program of ours that a pod starts is there, and knows the flags it is given."""
    checked = set()
    for _, template in workloads("h100"):
        for one in containers(template):
            command = one.get("command", [])
            if command[:2] != ["python", "-m"]:
                continue
            done = subprocess.run(
                [sys.executable, "-m", command[2], "--help"],
                capture_output=True,
                text=True,
                check=False,
                cwd=HERE.parents[1],
            )
            assert done.returncode == 0, done.stderr
            for word in one.get("args", []):
                flag = word.partition("=")[0]
                assert not flag.startswith("--") or re.search(rf"{flag}\b", done.stdout), (command, flag)
            checked.add(command[2].rpartition(".")[2])
    assert checked == {"canary_service", "guard", "orchestrator", "promotion"}


@pytest.mark.parametrize("overlay", ["a10", "h100"])
def test_prometheus_takes_its_files(overlay: str, tmp_path: Path) -> None:
    """Prometheus would start with what is mounted, its rules included; pods are found by a part that this build may
    lack, and stand in as addresses (MON-1, MON-4)."""
    assert shutil.which("promtool"), "promtool is missing: it comes with the Debian package prometheus"
    (mounted,) = [
        one["data"]
        for one in rendered(overlay)
        if one["kind"] == "ConfigMap" and one["metadata"]["name"].startswith("prometheus-")
    ]
    for name, text in mounted.items():
        (tmp_path / name).write_text(text)
    config = yaml.safe_load(mounted["prometheus.yml"])
    for job in config["scrape_configs"]:
        assert job.pop("kubernetes_sd_configs")
        job["static_configs"] = [{"targets": ["127.0.0.1:1"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        ["promtool", "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "2 rule files found" in done.stdout, done.stdout + done.stderr


def test_the_orchestrator_takes_its_file() -> None:
    """Its configuration is one by its own reader, but for the files that only a pod has."""
    from reference_stack.orchestrator.config import Config, document

    document(HERE / "base/orchestrator/orchestrator.yaml", Config)
