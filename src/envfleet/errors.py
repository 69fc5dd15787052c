"""What can go wrong, and the record of it.

    EnvFleetError
    ├─ SpecMismatch (ValueError)    environments of a batch differ, or a value and its spec
    ├─ InvalidAction (ValueError)   actions of the wrong structure, leading axis, shape or dtype
    ├─ ResetNeeded (RuntimeError)   step() after a failure and before the next reset()
    ├─ EnvBusy (RuntimeError)       send() or step() of an environment that is under way
    ├─ RemoteEnvError               the environment raised what cannot be raised here as it is
    ├─ ActorDied                    an environment's process died
    ├─ EnvTimeout (TimeoutError)    environments passed their deadline
    ├─ FleetStartError              the actors could not be started in time
    └─ ClosedError                  a call after close()

An exception that an environment raised is raised again in the caller as it was: same class, same
``args``. Its ``__cause__`` is a `RemoteTraceback` (the convention of `concurrent.futures`), its
notes say which environment it came from, and its attribute ``env_failures`` holds an `EnvFailure`
for every environment that failed in the same call. The errors above carry ``env_failures`` too.
"""

from __future__ import annotations

import dataclasses
import pickle
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import cloudpickle

_Error = TypeVar("_Error", bound=BaseException)

_PACKAGE = Path(__file__).parent
_OWN_FILES = {str(_PACKAGE / "actor.py"), *map(str, (_PACKAGE / "environments").glob("*.py"))}


_LINE = 500
"""How many characters of a failure go into a log: the record has them all."""


_KEPT = 16 * 1024
"""How large each part of a failure may be that is kept in the record."""


class EnvFleetError(Exception):
    """Base class of the errors that envfleet itself raises."""

    env_failures: tuple[EnvFailure, ...] = ()


class SpecMismatch(EnvFleetError, ValueError):
    """The environments' specs differ from each other, or a value differs from its spec."""


class InvalidAction(EnvFleetError, ValueError):
    """Actions do not fit the action spec; no environment has moved."""


class ResetNeeded(EnvFleetError, RuntimeError):
    """An environment failed earlier: `reset()` rebuilds it, until then there is no step."""


class EnvBusy(EnvFleetError, RuntimeError):
    """An environment is under way: it was sent, and its time step has not been received."""


class RemoteEnvError(EnvFleetError):
    """The environment raised something that cannot be raised here as it is.

    Either it does not survive pickling, or it is no `Exception` (`SystemExit`,
    `KeyboardInterrupt`) and raising it would end the caller's program. The message holds the
    original type and text, ``__cause__`` the remote traceback.
    """


class ActorDied(EnvFleetError):
    """The process that hosted an environment is gone."""


class EnvTimeout(EnvFleetError, TimeoutError):
    """Environments did not finish a call before its deadline; their actors were ended."""


class FleetStartError(EnvFleetError):
    """Not all actors were ready within ``start_timeout``; those that were have been ended."""


class ClosedError(EnvFleetError):
    """The batch was closed."""


class RemoteTraceback(Exception):
    """The text of a traceback in another process, as the ``__cause__`` of what was raised there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text.rstrip()}\n"""'


@dataclasses.dataclass(frozen=True)
class EnvFailure:
    """One environment going wrong.

    Attributes:
      index: which environment of the batch, from 0.
      phase: what it was doing: ``construct``, ``reset``, ``step``, ``call`` or ``close``.
      type_name: qualified name of the exception's class.
      message: its text.
      traceback: the remote traceback as text, from the user's first frame on; empty when the
        process died or was late.
      pid: process id of the actor, if known.
      node: id of the Ray node (or host name) that it ran on, if known.
      episode_step: steps into the episode when it happened.
      unknown_name: the environment's name, where there is none of that name: it was not built.
      pickled: the exception, pickled, or None where it does not survive that.
      original: the exception itself, where the environment lives in the caller's process
        (``backend="local"``): a debugger then finds the environment's own frames.
    """

    index: int
    phase: str
    type_name: str
    message: str
    traceback: str = ""
    pid: int | None = None
    node: str | None = None
    episode_step: int = 0
    unknown_name: str | None = None
    pickled: bytes | None = dataclasses.field(default=None, repr=False)
    original: BaseException | None = dataclasses.field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        what = f"{self.type_name}: {self.message}" if self.message else self.type_name
        place = "" if f"(pid {self.pid}, " in self.message else self.place()
        return f"env {self.index} failed in {self.phase}{place}: {what}"

    def line(self) -> str:
        """The same in one line of a bounded length, for a log."""
        words = " ".join(str(self)[: 2 * _LINE].split())
        return words if len(words) <= _LINE else f"{words[:_LINE]} ..."

    def abridged(self) -> EnvFailure:
        """The same without what could fill the memory of a caller that keeps many.

        The exception itself goes (its traceback holds a local environment), the pickled one where
        it is large, and the middle of long texts.
        """
        small = self.pickled is not None and len(self.pickled) <= _KEPT
        return dataclasses.replace(
            self,
            original=None,
            pickled=self.pickled if small else None,
            message=_shortened(self.message),
            traceback=_shortened(self.traceback),
        )

    def place(self) -> str:
        """Where it ran and how far the episode was, in brackets."""
        known = [f"pid {self.pid}"] if self.pid is not None else []
        known += [f"node {self.node}"] if self.node is not None else []
        if self.phase == "step":
            known.append(f"{self.episode_step} steps into the episode")
        return f" ({', '.join(known)})" if known else ""

    def exception(self) -> BaseException:
        """The exception to raise in the caller for this failure, with its remote traceback."""
        error = self.original if self.original is not None else _load(self.pickled)
        if error is None:
            error = RemoteEnvError(
                f"{self} [{self.type_name} cannot be raised in the caller as it is]"
            )
        if self.traceback:
            _set(error, "__cause__", RemoteTraceback(self.traceback))
        return error


def record(
    error: BaseException,
    *,
    index: int,
    phase: str,
    pid: int | None = None,
    node: str | None = None,
    episode_step: int = 0,
    in_process: bool = False,
) -> EnvFailure:
    """Turns what an environment raised into a record that travels whatever the exception is."""
    pickled = _dump(error)
    return EnvFailure(
        index=index,
        phase=phase,
        type_name=_type_name(type(error)),
        message=_safe_str(error),
        traceback=_format(error) if error.__traceback__ is not None else "",
        pid=pid,
        node=node,
        episode_step=episode_step,
        unknown_name=getattr(error, _UNKNOWN, None),
        pickled=pickled,
        # Where it would not survive the way out of an actor, it is not raised locally either:
        # what a program catches does not depend on the backend.
        original=error if in_process and pickled is not None else None,
    )


def _shortened(text: str) -> str:
    if len(text) <= _KEPT:
        return text
    half = _KEPT // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters) ...\n{text[-half:]}"


def merge(
    ordered: Sequence[EnvFailure], attempts: Sequence[Sequence[EnvFailure]] = ()
) -> BaseException:
    """One exception for all that failed in one call: the first one's, with notes on every other.

    Args:
      ordered: the failures.
      attempts: for each of them the failures in a row that ended in it, where it was restarted.
    """
    first, *others = ordered
    error = first.exception()
    if first.traceback:  # our own errors say the same in their message
        note(error, f"raised by env {first.index} in {first.phase}{first.place()}")
    for failure in others:
        if failure.traceback or failure.message != first.message:  # an EnvTimeout names them all
            note(error, f"in the same call, {failure}")
    for row in attempts:
        if len(row) > 1:
            lines = "".join(f"\n  {number}. {failure}" for number, failure in enumerate(row, 1))
            words = f"env {row[0].index} failed {len(row)} times without a good step in between:"
            note(error, words + lines)
    attach(error, [failure for row in attempts or [ordered] for failure in row])
    return error


def attach(error: BaseException, failures: Sequence[EnvFailure]) -> None:
    """Sets ``error.env_failures``."""
    _set(error, "env_failures", tuple(failures))


def unknown(error: _Error, environment_name: str) -> _Error:
    """Marks an exception as one about a name that no environment has; its records say so, too."""
    _set(error, _UNKNOWN, environment_name)
    return error


_UNKNOWN = "_envfleet_unknown_name"


def note(error: BaseException, text: str) -> None:
    """`BaseException.add_note`, also where the exception's class refuses attributes."""
    _set(error, "__notes__", [*getattr(error, "__notes__", []), text])


def _set(error: BaseException, name: str, value: object) -> None:
    BaseException.__setattr__(error, name, value)  # past a __setattr__ of the user's class


def _dump(error: BaseException) -> bytes | None:
    """Pickles an exception, or gives None where it would not come back the same.

    Tried here, in the environment's process: an exception that fails to load in the caller would
    otherwise hide the one that the environment raised.
    """
    if not isinstance(error, Exception):
        return None
    try:
        pickled = bytes(cloudpickle.dumps(error))
        if _same(error, _load(pickled)):
            return pickled
        # It pickles and does not load: its __init__ takes other arguments than its `args` (the
        # commonest custom exception there is). In parts it travels without a call of __init__.
        pickled = bytes(cloudpickle.dumps(_Bare(type(error), error.args, dict(vars(error)))))
        return pickled if _same(error, _load(pickled)) else None
    except BaseException:  # a lock inside; a __reduce__ or a property that raises what it likes
        return None


@dataclasses.dataclass
class _Bare:
    """An exception in parts, put together again without its ``__init__``."""

    cls: type[Exception]
    args: tuple[object, ...]
    attributes: dict[str, object]

    def assemble(self) -> Exception:
        error = self.cls.__new__(self.cls, *self.args)
        error.args = self.args
        vars(error).update(self.attributes)
        return error


def _load(pickled: bytes | None) -> BaseException | None:
    if pickled is None:
        return None
    try:
        loaded = pickle.loads(pickled)
        error = loaded.assemble() if isinstance(loaded, _Bare) else loaded
    except BaseException:  # whatever __init__ or __setstate__ of a user's class raises
        return None
    return error if isinstance(error, Exception) else None


def _same(error: BaseException, copy: BaseException | None) -> bool:
    if copy is None or _type_name(type(copy)) != _type_name(type(error)):
        return False
    # By text: `args` may hold arrays, whose == has no truth value, or objects that have no ==.
    if _safe_str(copy) != _safe_str(error) or len(copy.args) != len(error.args):
        return False
    return all(
        type(mine) is type(theirs) and (not isinstance(mine, _PLAIN) or mine == theirs)
        for mine, theirs in zip(copy.args, error.args, strict=True)
    )


_PLAIN = (str, bytes, int, float, bool, type(None))


def _type_name(cls: type) -> str:
    module = cls.__module__
    return cls.__qualname__ if module == "builtins" else f"{module}.{cls.__qualname__}"


def _safe_str(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as problem:
        return f"<its __str__ raised {type(problem).__name__}>"


def _format(error: BaseException) -> str:
    try:
        trace = skip_own_frames(error.__traceback__)
        return "".join(traceback.format_exception(type(error), error, trace))
    except BaseException as problem:
        return f"{_type_name(type(error))} <formatting its traceback raised {problem!r}>"


def skip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Drops envfleet's own leading frames, so that the text begins in the user's code."""
    first = trace
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
        trace = trace.tb_next
    return trace if trace is not None else first
