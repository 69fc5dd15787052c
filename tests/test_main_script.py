"""Scripts of their own: what is defined in `__main__`, and what only a whole process can show."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HEAD = """
import gin, logging, os, sys, time
import numpy as np
import envfleet
from envfleet.testing import ProbeEnv, FaultyEnv
QUIET = dict(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
"""


def run(tmp_path: Path, body: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(HEAD + body)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=180, cwd=tmp_path
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def test_remote_traceback_names_file_and_line_of_main(tmp_path):
    done = run(
        tmp_path,
        """
class Env(ProbeEnv):
    def step(self, action):
        joints = {}
        return joints["elbow"]  # the line that fails

env = envfleet.ParallelPyEnvironment([lambda: Env()] * 2, ray_init=QUIET)
env.reset()
env.step([0, 0])
""",
        expect=1,
    )
    lines = (tmp_path / "script.py").read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if "the line that fails" in line]
    assert f'script.py", line {number}, in step' in done.stderr
    assert 'return joints["elbow"]  # the line that fails' in done.stderr
    assert done.stderr.rstrip().count("KeyError: 'elbow'") >= 2
    assert "raised by env 0 in step" in done.stderr
    assert "in the same call, env 1 failed in step" in done.stderr


def test_gin_configurables_of_main_work_in_actors(tmp_path):
    done = run(
        tmp_path,
        """
@gin.configurable
def size(n=1):
    return n

@gin.configurable
def load(length=3, make_size=None):
    return ProbeEnv(size() + (make_size() if make_size else 0), length)

@gin.configurable
class Env(ProbeEnv):
    def __init__(self, env_id=1):
        super().__init__(env_id)

@gin.register
class Registered(ProbeEnv):
    def __init__(self, env_id=1):
        super().__init__(env_id)

gin.constant("main.BIG", 1000)
gin.parse_config('''
size.n = 10
load.make_size = @size
other/size.n = 20
Env.env_id = %main.BIG
Registered.env_id = 7
far/Registered.env_id = 8
ParallelPyEnvironment.env_constructors = [@load, @other/load, @Env, @Registered, @far/Registered]
ParallelPyEnvironment.envs_per_actor = 2
''')
gin.bind_parameter("load.length", np.int64(5))
gin.finalize()
env = envfleet.ParallelPyEnvironment(ray_init=QUIET)
print("ids", env.get_attr("env_id"))
print("lengths", [int(n) for n in env.get_attr("episode_length")])
env.close()
""",
    )
    # 20 for @load: the reference in its binding counts once more. In `other`, twice 20.
    assert "ids [20, 40, 1000, 7, 8]" in done.stdout
    assert "lengths [5, 5, 3, 3, 3]" in done.stdout


def test_under_gin_the_callers_exception_keeps_class_message_records_and_traceback(tmp_path):
    done = run(
        tmp_path,
        """
class TwoArguments(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a}{b}")
        self.a = a

def fail():
    raise {"key": KeyError("arm"), "two": TwoArguments("x", "y"),
           "group": ExceptionGroup("several", [ValueError("leg")])}[sys.argv[0]]

@gin.configurable
def load(kind=gin.REQUIRED, phase="construct"):
    def fault():
        sys.argv[0] = kind
        fail()
    return FaultyEnv(fault, phase)

for kind, cls in (("key", KeyError), ("two", TwoArguments), ("group", ExceptionGroup)):
    gin.clear_config()
    gin.parse_config(f"load.kind = '{kind}'")
    for backend in ("local", "ray"):
        try:
            envfleet.ParallelPyEnvironment([ProbeEnv, load], backend=backend, ray_init=QUIET)
        except Exception as error:
            assert type(error) is cls, (kind, backend, type(error), error)
            assert error.args == {"key": ("arm",), "two": ("xy",)}.get(kind, error.args)
            assert error.env_failures[0].index == 1
            assert "in fail" in str(error.__cause__), str(error.__cause__)
            assert any("env 1" in note for note in error.__notes__)
        else:
            raise SystemExit("nothing was raised")
print("all as they were")

@gin.configurable
def train():
    with envfleet.ParallelPyEnvironment([load], ray_init=QUIET) as env:
        env.reset()

gin.clear_config()
gin.parse_config("load.kind = 'key'; load.phase = 'reset'".replace("; ", chr(10)))
try:
    train()
except KeyError as error:
    assert error.env_failures[0].phase == "reset"
    raise
""",
        expect=1,
    )
    assert "all as they were" in done.stdout
    # gin's proxy has no cause, so the remote traceback stands in a note.
    assert "remote traceback:" in done.stderr
    assert "in fail" in done.stderr


def test_gin_instance_in_place_of_a_constructor_says_how_to_write_it(tmp_path):
    run(
        tmp_path,
        """
@gin.configurable
def load():
    return ProbeEnv()

gin.parse_config("ParallelPyEnvironment.env_constructors = [@load()]")
try:
    envfleet.ParallelPyEnvironment()
except TypeError as error:
    assert "@make_env and not @make_env()" in str(error), error
    assert type(error) is TypeError
else:
    raise SystemExit("accepted")
""",
    )


def test_binding_that_cannot_travel_is_named(tmp_path):
    done = run(
        tmp_path,
        """
import threading
logging.basicConfig()

@gin.configurable
def load(lock=None):
    return ProbeEnv(0 if lock is None else 1)

gin.bind_parameter("load.lock", threading.Lock())
with envfleet.ParallelPyEnvironment([load], ray_init=QUIET) as env:
    print("ids", env.get_attr("env_id"))
""",
    )
    assert "load.lock" in done.stderr
    assert "not in force in actors" in done.stderr


def test_module_that_an_actor_cannot_import_is_named(tmp_path):
    done = run(
        tmp_path,
        """
import types
logging.basicConfig()
module = types.ModuleType("only_here")
exec("import gin\\n@gin.configurable\\ndef helper(k=0): return k", module.__dict__)
sys.modules["only_here"] = module
gin.parse_config("only_here.helper.k = 3")
with envfleet.ParallelPyEnvironment([ProbeEnv], ray_init=QUIET) as env:
    env.reset()
""",
    )
    assert "only_here (ModuleNotFoundError" in done.stderr


def test_what_the_user_forgot_to_close_is_closed_at_exit(tmp_path):
    marker = tmp_path / "closed"
    run(
        tmp_path,
        f"""
class Env(ProbeEnv):
    def close(self):
        open({str(marker)!r}, "a").write("closed ")

env = envfleet.ParallelPyEnvironment([Env] * 2, ray_init=QUIET)
env.reset()
""",
    )
    assert marker.read_text() == "closed closed "


def test_importing_starts_nothing_and_imports_no_optional_package():
    code = (
        "import sys, threading, envfleet\n"
        "assert threading.active_count() == 1\n"
        "lazy = {'ray', 'gymnasium', 'tf_agents', 'tensorflow', 'envfleet.testing'}\n"
        "assert not lazy & set(sys.modules), lazy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


INTERRUPTED = """
class Slow(ProbeEnv):
    def step(self, action):
        if action == {hang}:
            open("stepping", "w").close()
            time.sleep({seconds})
        return super().step(action)

env = envfleet.ParallelPyEnvironment(
    [ProbeEnv, Slow], backend={backend!r}, ray_init=QUIET, close_timeout=5.0)
env.reset()
env.step([1, 1])
try:
    env.step([{hang}, {hang}])
except KeyboardInterrupt:
    print("interrupted", flush=True)
try:
    env.step([1, 1])
except envfleet.ResetNeeded as error:
    assert "interrupt" in str(error) or "env 1" in str(error), error
first = env.reset()
assert first.step_type.tolist() == [0, 0], first
for action in (3, 4):
    found = env.step([action, action]).observation["action"].tolist()
    assert found == [action, action], found
env.close()
print("closed", flush=True)
"""


@pytest.mark.parametrize(
    ("backend", "seconds"),
    [("ray", 2), ("ray", 1000), ("local", 1000)],
    ids=["slow", "hung", "local"],
)
def test_interrupt_leaves_a_batch_that_can_be_reset_and_used_again(backend, seconds, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(HEAD + INTERRUPTED.format(backend=backend, seconds=seconds, hang=99))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "stepping").exists():
        assert time.monotonic() < deadline, process.communicate(timeout=10)
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=90)
    assert process.returncode == 0, stdout + stderr
    assert stdout.split() == ["interrupted", "closed"]


def test_what_gin_requires_is_required_in_actors(tmp_path):
    run(
        tmp_path,
        """
@gin.configurable
def load(env_id=gin.REQUIRED):
    return ProbeEnv(env_id)

for backend in ("local", "ray"):
    try:
        envfleet.ParallelPyEnvironment([load], backend=backend, ray_init=QUIET)
    except RuntimeError as error:
        assert "Required bindings for" in str(error), error
    else:
        raise SystemExit("built without what it requires")
""",
    )


def test_external_configurables_reach_actors(tmp_path):
    (tmp_path / "third_party.py").write_text(
        "class Size:\n    def __init__(self, n=1): self.n = n\n"
    )
    done = run(
        tmp_path,
        """
import third_party
Size = gin.external_configurable(third_party.Size, module="ext")

@gin.configurable
def load(size=None):
    return ProbeEnv(size.n)

gin.parse_config("ext.Size.n = 7\\nload.size = @ext.Size()")
for backend in ("local", "ray"):
    with envfleet.ParallelPyEnvironment(
        [load, lambda: ProbeEnv(Size().n)], backend=backend, ray_init=QUIET
    ) as env:
        print("ids", env.get_attr("env_id"))
""",
    )
    assert done.stdout.count("ids [7, 7]") == 2


def test_ray_that_is_shut_down_under_a_batch_is_told_and_not_started_again(tmp_path):
    run(
        tmp_path,
        """
import ray
for again in (False, True):
    ray.init(**QUIET)
    env = envfleet.ParallelPyEnvironment([ProbeEnv] * 2)
    env.reset()
    ray.shutdown()
    if again:
        ray.init(**QUIET)
    try:
        env.step([0, 0])
    except envfleet.ActorDied as error:
        assert "was shut down" in str(error), error
    else:
        raise SystemExit("stepped")
    try:
        env.reset()
    except envfleet.EnvFleetError as error:
        assert "make a new batch" in str(error), error
    env.close()
    assert ray.is_initialized() == again
    if again:
        with envfleet.ParallelPyEnvironment([ProbeEnv]) as env:
            env.reset()
        assert ray.is_initialized()
""",
    )


def test_step_that_an_interrupt_overtook_does_not_come_back(tmp_path):
    run(
        tmp_path,
        """
import signal, threading

class Slow(ProbeEnv):
    def step(self, action):
        time.sleep(1.0)
        return super().step(action)

env = envfleet.ActorPyEnvironment(Slow, ray_init=QUIET)
env.start()
env.reset()
promise = env.step(1, blocking=False)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    env.step(2)
except KeyboardInterrupt:
    pass
else:
    raise SystemExit("not interrupted")
assert env.reset().step_type == 0
try:
    promise()
except (envfleet.EnvFleetError, KeyboardInterrupt):
    pass
assert env.current_time_step().step_type == 0
assert env.step(3).observation["action"] == 3
env.close()
""",
    )
