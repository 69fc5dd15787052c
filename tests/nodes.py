"""A Ray cluster of several nodes on this machine, whose nodes can be killed, frozen and added."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster


class Nodes:
    """A head and some workers, each with its own raylet and processes.

    Its temporary directory is its own, so that no other `ray.init` on this machine finds it.

    Args:
      workers: how many nodes beside the head.
      num_cpus: of each worker.
      head: arguments of the head.
    """

    def __init__(
        self, workers: int = 2, num_cpus: int = 2, head: Mapping[str, Any] | None = None
    ) -> None:
        # Short: the names of Ray's sockets have 107 characters at most.
        self._directory = tempfile.mkdtemp(prefix="nodes-")
        self._before = os.environ.get("RAY_TMPDIR")
        os.environ["RAY_TMPDIR"] = self._directory
        self._num_cpus, self._num_workers = num_cpus, workers
        self.workers: list[Any] = []
        self._frozen: set[Any] = set()
        self._killed: list[Any] = []
        self._added = 0  # nodes of one machine would clear each other's directory
        arguments = {"num_cpus": 1, "include_dashboard": False, **(head or {})}
        self._cluster = Cluster(initialize_head=True, head_node_args=arguments)
        self.restore()

    @property
    def address(self) -> str:
        return self._cluster.address

    @property
    def head(self) -> Any:
        return self._cluster.head_node

    def add(self, **arguments: Any) -> Any:
        """Another node, when it is there."""
        self._added += 1
        own = {"num_cpus": self._num_cpus, "runtime_env_dir_name": f"runtime_env_{self._added}"}
        node = self._cluster.add_node(**{**own, **arguments})
        self.workers.append(node)
        return node

    def kill(self, node: Any) -> None:
        """Ends all processes of a node at once, as its machine's end would."""
        for pid in self.pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._frozen.discard(node)
        self._killed.append(node)
        self.workers.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)  # what it knows of it

    def freeze(self, node: Any) -> None:
        """Stops all processes of a node: it is silent, and its connections stand."""
        self._frozen.add(node)
        for pid in self.pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def thaw(self, node: Any) -> None:
        """They go on, as after a network that was cut and came back."""
        self._frozen.discard(node)
        for pid in self.pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def bury(self) -> None:
        """Has Ray know now who was killed; by itself it would find out a quarter of a minute later.

        They say goodbye as a raylet does that is ended in good order. Needs grpcio.
        """
        import grpc
        from ray.core.generated import common_pb2, gcs_service_pb2, gcs_service_pb2_grpc

        cause = common_pb2.NodeDeathInfo(reason=common_pb2.NodeDeathInfo.UNEXPECTED_TERMINATION)
        with grpc.insecure_channel(self.address) as channel:
            nodes_of_ray = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
            while self._killed:
                gone = bytes.fromhex(self._killed.pop().node_id)
                goodbye = gcs_service_pb2.UnregisterNodeRequest(node_id=gone, node_death_info=cause)
                nodes_of_ray.UnregisterNode(goodbye, timeout=10)

    def pids(self, node: Any) -> list[int]:
        """Its raylet first, then what that has started, and so on."""
        own = [one.process.pid for processes in node.all_processes.values() for one in processes]
        return own + [pid for one in own for pid in descendants(one)]

    def restore(self) -> None:
        """As many workers as at first, all new where one was not as at first."""
        for node in [*self._frozen]:
            self.kill(node)
        for node in [*self.workers][self._num_workers :]:
            self.kill(node)
        while len(self.workers) < self._num_workers:
            self.add()

    def stop(self) -> None:
        """Ends all of it."""
        for node in [*self._frozen]:
            self.kill(node)
        self._cluster.shutdown()
        if self._before is None:
            del os.environ["RAY_TMPDIR"]
        else:
            os.environ["RAY_TMPDIR"] = self._before
        shutil.rmtree(self._directory, ignore_errors=True)


def descendants(pid: int) -> list[int]:
    """What a process has started, what that has started, and so on."""
    found = [pid]
    for one in found:  # grows as it goes
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found[1:]


@contextlib.contextmanager
def connected(nodes: Nodes) -> Iterator[None]:
    """This process as a driver, on the head."""
    ray.init(address=nodes.address, logging_level="ERROR", log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def until(condition: Any, seconds: float = 60.0) -> None:
    """Waits for it."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)
