# Every target makes the virtual environment that it needs: Python >= 3.11, make and git are enough.
#
#   make test PYTHON=python3.12 VENV=.venv-312     another Python, beside the first
#   make test TEST_ARGS="-x -k timeout"            arguments for pytest
#   make demo DEMO_ARGS="--steps 200"              arguments for the demo
#   make bench BENCH_ARGS="--only busy-16"         arguments for the benchmark

PYTHON ?= python3
PYTHON311 ?= python3.11
VENV ?= .venv
VENV_TF ?= .venv-tf
VENV_PEERS ?= .venv-peers
VENV_BENCH ?= .venv-bench
VENV_DEMO ?= .venv-demo
VENV_COLLECT ?= .venv-collect
VENV_CLUSTER ?= .venv-cluster

DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
CHAOS_ARGS ?=

# What the tests of TF-Agents run on: its last release, which needs Python 3.11 at most.
TF_PACKAGES := tensorflow-cpu==2.15.1 tf-agents==0.19.0 gymnasium 'pytest>=9' hypothesis attrs rich
TF_TESTS ?= tests/test_tf_agents.py tests/test_interop_tf_agents.py tests/test_layout.py \
  tests/test_specs.py tests/test_migrate.py \
  tests/test_collect_examples.py::test_recurrent_policy_collects_and_takes_its_weights

# What the tests of the other faces run on. dm-control asks for any MuJoCo, but fails with 4.0.
PEER_PACKAGES := stable-baselines3 moviepy opencv-python-headless dm-control 'mujoco>=3.17,<4' \
  'gymnasium[box2d,mujoco]' minigrid highway-env 'pytest>=9' hypothesis attrs rich
PEER_TESTS ?= tests/test_interop_sb3.py tests/test_third_party.py tests/test_migrate.py

# What the tests of collecting run on. Not with the others: each of Ray's workers imports pyarrow where
# it is installed, and RLlib wants a Gymnasium of its own. Minari's HDF5 needs Pillow without saying so.
COLLECT_PACKAGES := 'ray[rllib]' pandas polars 'minari[hdf5]' pillow 'gymnasium[mujoco]' \
  highway-env dm-control 'mujoco>=3.17,<4' 'pytest>=9' hypothesis attrs
COLLECT_TESTS ?= tests/test_collect.py $(wildcard tests/test_collect_*.py)

# What the tests on several nodes run on. Not with the others: with Ray's dashboard installed every
# local Ray takes longer to start.
CLUSTER_PACKAGES := 'ray[tune]' 'gymnasium' 'pytest>=9' hypothesis attrs
CLUSTER_TESTS ?= $(wildcard tests/test_cluster*.py)

# Some of them, and of what the benchmark compares with, need PyTorch, which is installed before
# them, so that it can be another build than the one that they would bring:
# make bench TORCH=torch-2.13.0+cpu-....whl
TORCH ?= torch==2.13.0
BENCH_PACKAGES := 'gymnasium[mujoco]' stable-baselines3 tianshou matplotlib

.DEFAULT_GOAL := help
.PHONY: help demo test lint chaos bench bench-collect bench-scaling \
  environments test-cluster test-collect test-interop test-peers test-tf
.NOTPARALLEL:  # two pips in one environment would get in each other's way
.DELETE_ON_ERROR:

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 15

demo: $(VENV_DEMO)/.demo  ## 8 CartPoles in 8 actors under a random policy; then a dataset of them
	$(VENV_DEMO)/bin/python examples/cartpole.py $(DEMO_ARGS)
	rm -rf demo-dataset
	cd examples && $(abspath $(VENV_DEMO))/bin/envfleet-collect --gin_file=collect_cartpole.gin \
	  --output_dir=../demo-dataset
	$(VENV_DEMO)/bin/envfleet-collect inspect demo-dataset
	@echo 'the report on it, for a browser: demo-dataset/report.html'

test: $(VENV)/.dev  ## the tests, without those that need TF-Agents
	$(VENV)/bin/python -m pytest $(TEST_ARGS)

lint: $(VENV)/.dev  ## ruff (format and rules) and mypy; changes nothing
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

chaos: $(VENV)/.dev  ## environments that crash, hang and are killed: 10 minutes, every step checked
	$(VENV)/bin/python tests/chaos.py $(CHAOS_ARGS)

bench: $(VENV_BENCH)/.bench $(VENV_TF)/.bench  ## beside the peers: a quarter of an hour; writes docs/benchmarks/
	$(VENV_BENCH)/bin/python benchmarks/run.py --tf-python $(VENV_TF)/bin/python $(BENCH_ARGS)

bench-collect: $(VENV_BENCH)/.bench  ## collecting beside plain loops: ten minutes; writes docs/benchmarks/
	$(VENV_BENCH)/bin/python benchmarks/collecting.py $(BENCH_ARGS)

bench-scaling: $(VENV_BENCH)/.bench  ## what one caller can keep busy: a quarter of an hour; writes docs/scaling.md
	$(VENV_BENCH)/bin/python benchmarks/scaling.py $(BENCH_ARGS)

test-collect: $(VENV_COLLECT)/.collect  ## datasets: written, killed, gone on with, read by pandas, RLlib ...
	$(VENV_COLLECT)/bin/python -m pytest $(COLLECT_TESTS) $(TEST_ARGS)

test-cluster: $(VENV_CLUSTER)/.cluster  ## several nodes: placement, jobs, nodes lost and added, a cut link
	$(VENV_CLUSTER)/bin/python -m pytest -m cluster $(CLUSTER_TESTS) $(TEST_ARGS)

test-interop: test-peers test-tf  ## both of the following: the tests that need other packages

test-peers: $(VENV_PEERS)/.peers  ## beside Stable-Baselines3, dm_control, MiniGrid, highway-env
	$(VENV_PEERS)/bin/python -m pytest $(PEER_TESTS) $(TEST_ARGS)

test-tf: $(VENV_TF)/.tf  ## beside TensorFlow and TF-Agents, on Python 3.11
	$(VENV_TF)/bin/python -m pytest $(TF_TESTS) $(TEST_ARGS)

environments: $(VENV)/.dev $(VENV_DEMO)/.demo $(VENV_COLLECT)/.collect $(VENV_CLUSTER)/.cluster
environments: $(VENV_PEERS)/.peers $(VENV_TF)/.tf  ## those that all tests and the demo need

# -- virtual environments --------------------------------------------------------------------------
# The stamps lie inside, so that they go with it; they are made last, so that what failed half-way
# is done again. A changed pyproject.toml installs again, which is quick where nothing is missing.

# $(call create,python,directory): a new virtual environment with a pip that knows dependency
# groups (25.1).
define create
$(1) -m venv $(2)
$(2)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
touch $@
endef

# $(call require,python,condition on the version v,words for it,variable)
define require
@$(1) -c 'import sys; v = sys.version_info[:2]; sys.exit(not ($(2)))' 2>/dev/null || { \
  found=$$($(1) -c 'import platform; print(platform.python_version())' 2>/dev/null) \
    || found='not there'; \
  echo "envfleet: this needs $(3); $(1) is $$found. Name another one: make $(4)=..." >&2; exit 1; }
endef

$(addsuffix /.created,$(VENV) $(VENV_DEMO) $(VENV_CLUSTER) $(VENV_COLLECT) $(VENV_PEERS) $(VENV_BENCH)):
	$(call require,$(PYTHON),v >= (3$(comma) 11),Python 3.11 or newer,PYTHON)
	$(call create,$(PYTHON),$(@D))

$(VENV)/.dev: pyproject.toml $(VENV)/.created
	@echo "installing envfleet and the group dev into $(VENV) ..."
	$(VENV)/bin/python -m pip install --quiet --editable . --group dev
	touch $@

$(VENV_DEMO)/.demo: pyproject.toml $(VENV_DEMO)/.created
	@echo "installing envfleet[examples,collect] into $(VENV_DEMO) ..."
	$(VENV_DEMO)/bin/python -m pip install --quiet --editable '.[examples,collect]'
	touch $@

$(VENV_COLLECT)/.collect: pyproject.toml $(VENV_COLLECT)/.created
	@echo "installing readers of datasets and envfleet[collect] into $(VENV_COLLECT) ..."
	$(VENV_COLLECT)/bin/python -m pip install --quiet $(TORCH)
	$(VENV_COLLECT)/bin/python -m pip install --quiet $(COLLECT_PACKAGES) --editable '.[collect]'
	touch $@

$(VENV_CLUSTER)/.cluster: pyproject.toml $(VENV_CLUSTER)/.created
	@echo "installing Ray's dashboard, Ray Tune and envfleet[cluster,collect] into $(VENV_CLUSTER) ..."
	$(VENV_CLUSTER)/bin/python -m pip install --quiet $(CLUSTER_PACKAGES) --editable '.[cluster,collect]'
	touch $@

$(VENV_TF)/.created:
	$(call require,$(PYTHON311),v == (3$(comma) 11),Python 3.11,PYTHON311)
	$(call create,$(PYTHON311),$(VENV_TF))

$(VENV_TF)/.tf: pyproject.toml $(VENV_TF)/.created
	@echo "installing TensorFlow, TF-Agents and envfleet into $(VENV_TF) ..."
	$(VENV_TF)/bin/python -m pip install --quiet $(TF_PACKAGES) --editable .
	touch $@

$(VENV_PEERS)/.peers: pyproject.toml $(VENV_PEERS)/.created
	@echo "installing the other ecosystems and envfleet into $(VENV_PEERS) ..."
	$(VENV_PEERS)/bin/python -m pip install --quiet $(TORCH)
	$(VENV_PEERS)/bin/python -m pip install --quiet $(PEER_PACKAGES) --editable .
	touch $@

$(VENV_TF)/.bench: $(VENV_TF)/.tf
	@echo "installing MuJoCo into $(VENV_TF) ..."
	$(VENV_TF)/bin/python -m pip install --quiet $(TF_PACKAGES) 'gymnasium[mujoco]'
	touch $@

$(VENV_BENCH)/.bench: pyproject.toml $(VENV_BENCH)/.created
	@echo "installing the peers and envfleet into $(VENV_BENCH) ..."
	$(VENV_BENCH)/bin/python -m pip install --quiet $(TORCH)
	$(VENV_BENCH)/bin/python -m pip install --quiet $(BENCH_PACKAGES) --editable '.[collect]'
	touch $@

comma := ,
