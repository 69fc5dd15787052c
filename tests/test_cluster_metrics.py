"""What batches tell Ray's metrics, read where Prometheus reads it."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import faults
import numpy as np
import pytest
import ray
from nodes import Nodes, connected, until

from envfleet import ParallelPyEnvironment
from envfleet.testing import ProbeEnv

pytest.importorskip("aiohttp", reason="needs ray[default], see `make test-cluster`")
pytestmark = pytest.mark.cluster

DASHBOARD = Path(__file__).parent.parent / "examples" / "cluster" / "grafana_envfleet.json"


@pytest.fixture(scope="module")
def nodes():
    nodes = Nodes(workers=1, num_cpus=2, head={"num_cpus": 2, "include_dashboard": True})
    try:
        with connected(nodes):
            yield nodes
    finally:
        nodes.stop()


def scraped():
    """All samples: by name, (labels, value)."""
    found = {}
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as page:
            lines = page.read().decode().splitlines()
        for line in lines:
            if match := re.fullmatch(r"(ray_envfleet_\w+)\{(.*)\} (\S+)", line):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
                found.setdefault(match[1], []).append((labels, float(match[3])))
    return found


def total(found, name, **labels):
    return sum(value for has, value in found.get(name, []) if labels.items() <= has.items())


def test_what_a_batch_counts_stands_where_prometheus_reads_it(nodes, tmp_path):
    fails, works = (faults.key_error, "step"), (faults.never, "never")
    constructors = [faults.Lives(tmp_path / str(i), works) for i in range(4)]
    constructors[1] = faults.Lives(tmp_path / "1", fails, works)
    with ParallelPyEnvironment(constructors, on_failure="restart") as batch:
        batch.reset()
        for _ in range(20):
            batch.step(np.zeros(4, np.int64))
        calls = batch.stats().num_calls
        by_node = {one.node: 0 for one in batch.actors}
        for one in batch.actors:
            by_node[one.node] += calls[one.env_ids[0]]
        assert len(by_node) == 2
        batch._fleet._tell()  # what else comes after ten seconds of stepping
        until(lambda: total(scraped(), "ray_envfleet_steps_total") >= sum(calls), 90)
        found = scraped()
    for node, number in by_node.items():
        assert total(found, "ray_envfleet_steps_total", node=node) == number
        assert total(found, "ray_envfleet_environments_alive", node=node) == 2
        assert 0 < total(found, "ray_envfleet_step_seconds_count", node=node) <= number
    assert total(found, "ray_envfleet_failures_total", cause="raised", phase="step") == 1
    assert total(found, "ray_envfleet_restarts_total", cause="raised") == 1
    assert total(found, "ray_envfleet_wait_seconds_total") > 0
    (batches,) = [{has["batch"] for has, _ in found["ray_envfleet_steps_total"]}]
    assert len(batches) == 1


def test_dashboard_asks_for_metrics_that_there_are(nodes):
    with ParallelPyEnvironment([ProbeEnv], on_failure="restart") as batch:
        batch.reset()
        batch._fleet._tell()
        until(lambda: total(scraped(), "ray_envfleet_steps_total") > 0, 90)
        exported = scraped().keys()
    asked = set(re.findall(r"ray_envfleet_\w+", DASHBOARD.read_text()))
    assert len(asked) >= 6
    # Of failures there are none to be seen, unless the test before has had one.
    assert asked - exported <= {"ray_envfleet_failures_total", "ray_envfleet_restarts_total"}


def test_dashboard_lies_where_rays_setup_looks_for_dashboards(nodes):
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    folder = session / "metrics" / "grafana"
    until(lambda: (folder / "dashboards" / "default_grafana_dashboard.json").exists(), 60)
    provisioning = (folder / "provisioning" / "dashboards" / "default.yml").read_text()
    assert "metrics/grafana/dashboards" in provisioning
    own = json.loads(DASHBOARD.read_text())
    rays = json.loads((folder / "dashboards" / "default_grafana_dashboard.json").read_text())
    assert rays["uid"] != own["uid"]
    assert own["schemaVersion"] == rays["schemaVersion"]
    assert {"panels", "templating", "time", "title"} <= own.keys()
    kinds = {variable["name"]: variable["type"] for variable in own["templating"]["list"]}
    theirs = {variable["name"]: variable["type"] for variable in rays["templating"]["list"]}
    assert kinds["datasource"] == theirs["datasource"]
    for panel in own["panels"]:
        assert {"id", "gridPos", "targets", "title", "type", "datasource"} <= panel.keys()
    assert len({panel["id"] for panel in own["panels"]}) == len(own["panels"])


def test_batches_one_after_another_and_beside_each_other_tell(nodes):
    with ParallelPyEnvironment([ProbeEnv]) as one, ParallelPyEnvironment([ProbeEnv]) as other:
        for batch in (one, other, one):
            batch.reset()
            batch._fleet._tell()
    one.close()
    with ParallelPyEnvironment([ProbeEnv]) as batch:
        batch.reset()
