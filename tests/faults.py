"""What can go wrong in an environment: importable, so that actors find it too."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class TwoArguments(Exception):
    """The commonest custom exception: what it passes on is not what its __init__ takes."""

    def __init__(self, joint: str, torque: float) -> None:
        super().__init__(f"{joint} at {torque}")
        self.joint, self.torque = joint, torque


class OneArgument(Exception):
    """It loads with a call of __init__, but says something else then."""

    def __init__(self, code: object) -> None:
        self.code = code
        super().__init__(f"failed with code {code}")


class RefusesAttributes(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("no")


class ArgsRaise(Exception):
    @property
    def args(self) -> Any:
        raise RuntimeError("no args")


class HoldsALock(Exception):
    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class ReduceRaises(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("no pickling")


def key_error() -> None:
    raise KeyError("arm")


def file_not_found() -> None:
    raise FileNotFoundError(2, "x", "y")


def two_arguments() -> None:
    raise TwoArguments("elbow", 2.5)


def one_argument() -> None:
    raise OneArgument(7)


def refuses_attributes() -> None:
    raise RefusesAttributes("stubborn")


def args_raise() -> None:
    raise ArgsRaise("argued")


def holds_a_lock() -> None:
    raise HoldsALock


def reduce_raises() -> None:
    raise ReduceRaises("reduced")


def exception_group() -> None:
    raise ExceptionGroup("several", [KeyError("arm"), ValueError("leg")])


def chained() -> None:
    try:
        raise ZeroDivisionError("inner")
    except ZeroDivisionError as error:
        raise KeyError("arm") from error


def stop_iteration() -> None:
    raise StopIteration("enough")


def system_exit() -> None:
    raise SystemExit(3)


def keyboard_interrupt() -> None:
    raise KeyboardInterrupt


def unpicklable_result() -> Any:
    return threading.Lock()


def exit_at_once() -> None:
    os._exit(3)


def sigkill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sigsegv() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang() -> None:
    time.sleep(1000)


def hang_in_c() -> None:
    """Keeps the GIL: no Python code of this process runs any more."""
    ctypes.PyDLL(None).sleep(1000)


def stop() -> None:
    """The process is there, and nothing of it runs, not even C++ threads of Ray's."""
    os.kill(os.getpid(), signal.SIGSTOP)


def exit_with_last_words() -> None:
    print("simulator: no license", file=sys.stderr, flush=True)
    os._exit(3)


def never() -> None:
    raise AssertionError("a fault of the phase 'never'")


def shortly(fault: Callable[[], Any]) -> None:
    """After the caller has met the process: only then can the kernel tell how it ended."""
    time.sleep(0.5)
    fault()


class Constructor:
    """Of a `FaultyEnv`; where the phase is `pickling`, it goes wrong on its way already."""

    def __init__(self, fault: Callable[[], Any], phase: str, **kwargs: Any) -> None:
        self.fault, self.phase, self.kwargs = fault, phase, kwargs

    def __getstate__(self) -> dict[str, Any]:
        if self.phase == "pickling":
            self.fault()
            return {"result": threading.Lock()}
        return self.__dict__

    def __call__(self) -> Any:
        from envfleet.testing import FaultyEnv

        return FaultyEnv(self.fault, self.phase, **self.kwargs)


class Lives:
    """A constructor whose n-th call builds a `FaultyEnv` by the n-th arguments, and then the last.

    Args:
      directory: where calls are counted, across processes.
      lives: of each call: fault and phase.
      kwargs: other arguments of all of them.
    """

    def __init__(
        self, directory: Path, *lives: tuple[Callable[[], Any], str], **kwargs: Any
    ) -> None:
        self.directory, self.lives, self.kwargs = directory, lives, kwargs

    def __call__(self) -> Any:
        from envfleet.testing import FaultyEnv

        self.directory.mkdir(exist_ok=True)
        number = len(list(self.directory.iterdir()))
        (self.directory / str(number)).write_text(str(time.time()))
        fault, phase = self.lives[min(number, len(self.lives) - 1)]
        return FaultyEnv(fault, phase, **self.kwargs)

    def times(self) -> list[float]:
        """When it was called."""
        count = len(list(self.directory.iterdir()))
        return [float((self.directory / str(n)).read_text()) for n in range(count)]
