"""Batches in the trials of Ray Tune."""

from __future__ import annotations

import pytest
from nodes import Nodes, connected

tune = pytest.importorskip(
    "ray.tune", reason="needs ray[tune], see `make test-cluster`", exc_type=ImportError
)
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore"),  # Ray Tune's own
]


def trainable(config):
    """A trial that steps a batch and reports where it was."""
    from envfleet import ParallelPyEnvironment
    from envfleet.testing import ProbeEnv

    with ParallelPyEnvironment([ProbeEnv] * 4, actor_options=config["options"]) as batch:
        batch.reset()
        tune.report({"actors": len(batch.actors), "nodes": len({a.node for a in batch.actors})})


@pytest.fixture(scope="module")
def nodes():
    nodes = Nodes(workers=2, num_cpus=3, head={"num_cpus": 2})
    try:
        with connected(nodes):
            yield nodes
    finally:
        nodes.stop()


def run(tmp_path, bundles, options):
    trial = tune.with_resources(trainable, tune.PlacementGroupFactory(bundles))
    tuner = tune.Tuner(
        trial,
        param_space={"options": options},
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    (result,) = tuner.fit()
    return result


def test_actors_live_in_the_bundles_of_their_trial(nodes, tmp_path):
    result = run(tmp_path, [{"CPU": 1}] + [{"CPU": 1}] * 4, {"num_cpus": 1})
    assert result.error is None
    assert result.metrics["actors"] == 4


def test_trial_without_bundles_for_its_actors_says_what_is_missing(nodes, tmp_path):
    result = run(tmp_path, [{"CPU": 1}], {})
    words = str(result.error)
    assert "FleetStartError: 4 actors of 1 CPU" in words
    assert "tune.PlacementGroupFactory([{'CPU': 1}] + [{'CPU': 1}] * 4)" in words
