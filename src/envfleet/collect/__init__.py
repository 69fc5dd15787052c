"""Collecting: policies beside environments, and what they collect as it comes."""

from envfleet.collect.collector import Collector, CollectStats
from envfleet.collect.policies import RandomPolicy
from envfleet.collect.rollout import Chunk

__all__ = ["Chunk", "CollectStats", "Collector", "RandomPolicy"]
