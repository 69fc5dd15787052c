"""The files that start clusters: Ray takes them, and they say the same as each other.

`ray up` has no dry run. What it does with a file before it reaches for a machine is
`prepare_config` and `validate_config`, which need neither boto3 nor a network; what the autoscaler
on Kubernetes makes of a cluster is a function of Ray's, too. No Python package was found that has
KubeRay's schema, so `RAY_JOB` below is written after it, closed: what it does not name is refused.
"""

from __future__ import annotations

import copy
import ipaddress
import itertools
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import ray
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import cli

ROOT = Path(__file__).parent.parent
AWS, SPOT, ON_PREMISE = (
    "cluster.yaml",
    "examples/cluster/spot.yaml",
    "examples/cluster/on_premise.yaml",
)
RAY_UP = [AWS, SPOT, ON_PREMISE]
RAY_JOB_FILE, DOCKERFILE = "examples/cluster/rayjob.yaml", "examples/cluster/Dockerfile"
PAGE = "docs/cluster.md"
ALL = [*RAY_UP, RAY_JOB_FILE, DOCKERFILE]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def text(path: str) -> str:
    return (ROOT / path).read_text()


def load(path: str) -> dict[str, Any]:
    return yaml.safe_load(text(path))


def as_ray_up_takes_it(config: dict[str, Any]) -> dict[str, Any]:
    """With Ray's defaults for what it leaves out; raises where `ray up` would refuse it."""
    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


# -- ray up ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RAY_UP)
def test_ray_up_takes_the_file(path):
    as_ray_up_takes_it(load(path))


REFUSED: list[tuple[str, str, Callable[[dict[str, Any]], Any]]] = [
    ("misspelt key", AWS, lambda c: c.update(max_worker=8)),
    ("misspelt key of a node type", AWS, lambda c: worker(c).update(min_worker=1)),
    ("half a CPU", AWS, lambda c: worker(c)["resources"].update(environments=0.5)),
    ("more workers at once than at most", SPOT, lambda c: worker(c).update(min_workers=99)),
    ("a head that is no node type", SPOT, lambda c: c.update(head_node_type="haed")),
    ("a command that is no string", AWS, lambda c: c["setup_commands"].append(True)),
    ("no address of the head", ON_PREMISE, lambda c: c["provider"].pop("head_ip")),
    ("node types of one's own", ON_PREMISE, lambda c: c.update(available_node_types={"a": {}})),
]


@pytest.mark.parametrize(
    ("path", "spoil"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_ray_up_refuses_a_spoilt_one(path, spoil):
    config = load(path)
    spoil(config)
    with pytest.raises((jsonschema.ValidationError, ValueError, click.ClickException)):
        as_ray_up_takes_it(config)


def worker(config: dict[str, Any]) -> dict[str, Any]:
    (name,) = config["available_node_types"].keys() - {config["head_node_type"]}
    return config["available_node_types"][name]


def shell_commands(path: str) -> list[str]:
    config = as_ray_up_takes_it(load(path))
    return [command for key in config if key.endswith("_commands") for command in config[key]]


@pytest.mark.parametrize("path", RAY_UP)
def test_commands_are_bash(path):
    for command in shell_commands(path):
        done = subprocess.run(["bash", "-n"], input=command, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), command


START = {
    (path, role): f"{role}_start_ray_commands" for path in RAY_UP for role in ("head", "worker")
}


def started(path: str, role: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """What `ray start` gets of its command: the arguments and the environment.

    The command is run as `ray up` runs it, with a function in the place of Ray.
    """
    (command,) = [c for c in load(path)[START[path, role]] if "ray start" in c]
    script = f"""
        ray() {{ printf '%s\\0' "$@" > "$HOME/arguments"; env -0 > "$HOME/environment"; }}
        source() {{ :; }}
        export RAY_HEAD_IP=192.0.2.1 OMP_NUM_THREADS=1 && ({command})
    """
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    subprocess.run(["bash", "-c", script], env=environment, check=True, capture_output=True)
    arguments = (home / "arguments").read_text().split("\0")[:-1]
    variables = (home / "environment").read_text().split("\0")[:-1]
    assert arguments.pop(0) == "start"
    return arguments, dict(variable.split("=", 1) for variable in variables)


@pytest.mark.parametrize(("path", "role"), START)
def test_ray_start_understands_its_arguments(path, role, tmp_path):
    arguments, _ = started(path, role, tmp_path)
    options = cli.commands["start"].make_context("start", arguments).params
    assert options["head"] == (role == "head")
    assert (options["object_manager_port"], options["node_manager_port"]) == (8076, 8077)
    if role == "head":
        assert options["port"] == 6379
        assert options["dashboard_host"] == "127.0.0.1"  # it takes jobs, which are code
        assert options["autoscaling_config"].endswith("/ray_bootstrap_config.yaml")
    else:
        assert options["address"] == "192.0.2.1:6379"


@pytest.mark.parametrize(("path", "role"), START)
def test_every_node_has_the_settings_that_have_to_be_equal(path, role, tmp_path):
    _, variables = started(path, role, tmp_path)
    assert variables["RAY_AUTH_MODE"] == "token"
    assert variables["RAY_max_direct_call_object_size"] == "1048576"
    assert variables.get("RAY_worker_niceness") == (None if role == "head" else "0")
    assert "OMP_NUM_THREADS" not in variables
    if path == ON_PREMISE:  # elsewhere all have one image
        assert variables["RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL"] == "minor"


@pytest.mark.parametrize("path", RAY_UP)
def test_the_head_takes_no_environments_and_each_worker_one_a_cpu(path, tmp_path):
    if path == ON_PREMISE:
        head, _ = started(path, "head", tmp_path)
        assert "--num-cpus=0" in head
        arguments, _ = started(path, "worker", tmp_path)
        assert f'--resources={{"environments": {len(os.sched_getaffinity(0))}}}' in arguments
    else:
        config = load(path)
        assert config["available_node_types"]["head"]["resources"] == {"CPU": 0}
        assert worker(config)["node_config"]["InstanceType"] == "c5.4xlarge"  # of 16 CPUs
        assert worker(config)["resources"] == {"environments": 16}


def test_spot_is_the_cluster_with_other_workers():
    cluster, spot = load(AWS), load(SPOT)
    for key in cluster.keys() - {"cluster_name", "max_workers", "provider", "available_node_types"}:
        assert spot[key] == cluster[key], key
    assert spot.keys() == cluster.keys()
    assert worker(spot)["node_config"].pop("InstanceMarketOptions") == {"MarketType": "spot"}
    assert worker(spot)["labels"] == {"market-type": "spot"}
    assert worker(spot)["node_config"] == worker(cluster)["node_config"]
    # Whoever takes back the head takes the cluster.
    head = spot["available_node_types"]["head"]
    assert head.pop("labels") == {"market-type": "on-demand"}
    assert head == cluster["available_node_types"]["head"]


def test_on_premise_names_a_head_and_its_workers():
    provider = load(ON_PREMISE)["provider"]
    addresses = [provider["head_ip"], *provider["worker_ips"]]
    assert len(set(addresses)) == 3
    for address in addresses:  # nobody's, so that a file left as it is reaches nobody's machine
        assert ipaddress.ip_address(address) in ipaddress.ip_network("192.0.2.0/24")


def test_on_premise_has_the_autoscaler_that_starts_all_workers(tmp_path):
    _, variables = started(ON_PREMISE, "head", tmp_path)
    assert variables["RAY_enable_autoscaler_v2"] == "0"
    config = as_ray_up_takes_it(load(ON_PREMISE))
    (node_type,) = config["available_node_types"].values()
    assert node_type["min_workers"] == node_type["max_workers"] == 2


# -- what is installed -----------------------------------------------------------------------------


def pinned(path: str) -> set[str]:
    """Every version of Ray that a file names."""
    found = re.findall(
        r"(?:ray(?:\[\w+\])?==|rayproject/ray:|envfleet:ray-|rayVersion: ')([\w.]+)", text(path)
    )
    assert found, path
    return set(found)


@pytest.mark.parametrize("path", [*ALL, PAGE])
def test_ray_is_pinned_to_one_version_that_the_project_supports(path):
    (version,) = pinned(path)
    assert {version} == pinned(AWS)
    (supported,) = [
        r.specifier for r in map(Requirement, PROJECT["dependencies"]) if r.name == "ray"
    ]
    assert Version(version) in supported
    assert Version(version) <= Version(ray.__version__), "never tried"
    (extra,) = map(Requirement, PROJECT["optional-dependencies"]["cluster"])
    assert (extra.name, extra.extras, extra.specifier) == ("ray", {"default"}, supported)


@pytest.mark.parametrize("path", [*ALL, PAGE])
def test_python_is_the_same_everywhere(path):
    found = set(re.findall(r"-py3(\d\d)\b", text(path))) | set(
        re.findall(r"\bpython3\.(\d+)", text(path), re.IGNORECASE)
    )
    assert found == {"11"}
    assert Version("3.11") in SpecifierSet(PROJECT["requires-python"])


@pytest.mark.parametrize("path", ALL)
def test_nothing_is_a_nightly_build(path):
    said = "\n".join(shell_commands(path)) if path in RAY_UP else text(path)
    assert not re.search(r"nightly|latest|\.whl|\.dev\d|3\.0\.0|rayproject/ray(?!:\d)", said)


@pytest.mark.parametrize("path", [*RAY_UP, DOCKERFILE])
def test_envfleet_is_installed_from_what_is_brought_there(path):
    brought = brought_along(path)
    for name in brought:
        assert (ROOT / name).exists(), name
    needed = {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], "src"}
    assert needed <= brought
    installed = re.findall(r"/envfleet\[([\w,]+)\]", text(path))
    assert installed == ["collect,gymnasium"]
    assert set(installed[0].split(",")) <= set(PROJECT["optional-dependencies"])


def brought_along(path: str) -> set[str]:
    """Files and directories of the repository, by their place in it."""
    if path == DOCKERFILE:
        copies = re.findall(r"^COPY --chown=ray:users (.*) /home/ray/envfleet", text(path), re.M)
        return set(itertools.chain.from_iterable(line.split() for line in copies))
    mounts = load(path)["file_mounts"]
    assert mounts.pop("~/.ray/auth_token") == "~/.ray/auth_token"
    assert all(there == f"~/envfleet/{here}" for there, here in mounts.items())
    return set(mounts.values())


# -- Kubernetes ------------------------------------------------------------------------------------

STRING = {"type": "string"}
STRINGS = {"type": "object", "additionalProperties": STRING}
COUNT = {"type": "integer", "minimum": 0}
QUANTITY = {"type": "string", "pattern": r"^\d+(\.\d+)?(m|[KMGT]i?)?$"}


def closed(*required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


QUANTITIES = closed("cpu", "memory", cpu=QUANTITY, memory=QUANTITY)
CONTAINER = closed(
    "name",
    "image",
    "resources",
    name={"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
    image=STRING,
    env={"type": "array", "items": closed("name", "value", name=STRING, value=STRING)},
    ports={"type": "array", "items": closed("containerPort", containerPort=COUNT, name=STRING)},
    resources=closed("requests", "limits", requests=QUANTITIES, limits=QUANTITIES),
)
TEMPLATE = closed(
    "spec",
    spec=closed("containers", containers={"type": "array", "items": CONTAINER, "minItems": 1}),
)
# KubeRay's ray.io/v1, as far as it is used here.
RAY_JOB = closed(
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=closed(
        "name", name={"type": "string", "pattern": r"^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$"}
    ),
    spec=closed(
        "entrypoint",
        "rayClusterSpec",
        entrypoint=STRING,
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
        rayClusterSpec=closed(
            "rayVersion",  # needed where there is a token
            "headGroupSpec",
            "workerGroupSpecs",
            rayVersion=STRING,
            authOptions=closed("mode", mode={"enum": ["disabled", "token"]}),
            enableInTreeAutoscaling={"type": "boolean"},
            autoscalerOptions=closed(idleTimeoutSeconds=COUNT),
            headGroupSpec=closed(
                "rayStartParams", "template", rayStartParams=STRINGS, template=TEMPLATE
            ),
            workerGroupSpecs={
                "type": "array",
                "items": closed(
                    "groupName",
                    "minReplicas",
                    "maxReplicas",
                    "rayStartParams",
                    "template",
                    groupName=STRING,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    rayStartParams=STRINGS,
                    template=TEMPLATE,
                ),
            },
        ),
    ),
)


def node_types(job: dict[str, Any]) -> dict[str, Any]:
    """What Ray's autoscaler makes of the job's cluster; raises where KubeRay would not have it."""
    jsonschema.validate(job, RAY_JOB)
    cluster = {
        "metadata": {"name": job["metadata"]["name"], "namespace": "default"},
        "spec": job["spec"]["rayClusterSpec"],
    }
    return _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]


def cluster_of(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["rayClusterSpec"]


def container_of(group: dict[str, Any]) -> dict[str, Any]:
    return group["template"]["spec"]["containers"][0]


def test_rayjob_is_as_kuberay_has_it():
    types = node_types(load(RAY_JOB_FILE))
    assert types["headgroup"]["resources"]["CPU"] == 0
    workers = types["environments"]
    assert workers["resources"]["environments"] == workers["resources"]["CPU"] == 8
    assert (workers["min_workers"], workers["max_workers"]) == (0, 8)


def test_rayjob_has_one_image_and_the_settings_of_the_other_files():
    cluster = cluster_of(load(RAY_JOB_FILE))
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert container_of(head)["image"] == container_of(workers)["image"]
    assert f"-t {container_of(head)['image']} " in text(DOCKERFILE)
    assert f":ray-{cluster['rayVersion']}-py311" in container_of(head)["image"]
    assert cluster["authOptions"] == {"mode": "token"}
    for group, niceness in ((head, []), (workers, [{"name": "RAY_worker_niceness", "value": "0"}])):
        size = {"name": "RAY_max_direct_call_object_size", "value": "1048576"}
        assert container_of(group)["env"] == [size, *niceness]


SPOILT_JOBS: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("a version that is a number", lambda j: cluster_of(j).update(rayVersion=2.6)),
    ("a start parameter that is a number", lambda j: head_of(j)["rayStartParams"].update({"a": 0})),
    ("a variable that is a number", lambda j: container_of(head_of(j))["env"][0].update(value=1)),
    ("a misspelt key", lambda j: workers_of(j).update(maxReplica=8)),
    ("a token at the wrong place", lambda j: j["spec"].update(authOptions={"mode": "token"})),
    ("no limits", lambda j: container_of(workers_of(j))["resources"].pop("limits")),
    ("no pods", lambda j: head_of(j).pop("template")),
    ("resources that are no JSON", lambda j: workers_of(j)["rayStartParams"].update(resources="x")),
]


def head_of(job: dict[str, Any]) -> dict[str, Any]:
    return cluster_of(job)["headGroupSpec"]


def workers_of(job: dict[str, Any]) -> dict[str, Any]:
    return cluster_of(job)["workerGroupSpecs"][0]


@pytest.mark.parametrize(
    "spoil", [case[1] for case in SPOILT_JOBS], ids=[c[0] for c in SPOILT_JOBS]
)
def test_spoilt_rayjob_is_refused(spoil):
    job = load(RAY_JOB_FILE)
    spoil(job)
    with pytest.raises((jsonschema.ValidationError, ValueError)):
        node_types(job)


# -- the page --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*ALL, PAGE])
def test_commands_that_are_shown_are_rays(path):
    """Every `ray ...` line that a reader may copy: the command and its options are there."""
    lines = re.sub(r"\\\n\s*", " ", text(path)).splitlines()
    shown = [
        match[1] for line in lines if (match := re.match(r"^(?:#? {4,}|)(ray [a-z-]+ .*)$", line))
    ]
    assert shown or path in (DOCKERFILE, RAY_JOB_FILE)
    for line in shown:
        words = shlex.split(line.partition("  #")[0].partition(" > ")[0].partition(" && ")[0])[1:]
        command: click.Command = cli
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        command.make_context(line, words)
