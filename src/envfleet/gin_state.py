"""gin on both sides of a process boundary; with the error proxies that gin raises taken off again.

An actor is a fresh process: it knows neither the caller's bindings nor what the caller's
``__main__`` registered. `capture` takes the caller's configuration, `GinState.apply` puts it in
force in an actor, and `dumps` pickles what cloudpickle cannot: anything that gin has wrapped.

gin has no public way to enumerate its state, so this file reads gin 0.5's own tables; it is the
only one that does, and pyproject.toml pins gin to 0.5.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import io
import logging
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import cloudpickle
import gin
from gin import config as _gin
from gin import utils as _gin_utils

_log = logging.getLogger("envfleet")


@dataclasses.dataclass(frozen=True)
class GinState:
    """gin's configuration as plain data that pickles anywhere.

    Attributes:
      config: `gin.config_str()`: bindings, macros and imports, includes flattened.
      scope: the active scope, "" for none.
      modules: modules that register what the configuration names; an actor imports them first.
      selectors: what the configuration names.
      registered: pickled registrations that no import makes: of ``__main__``, and of
        `gin.external_configurable`.
      constants: pickled values of `gin.constant`.
      bindings: pickled values of bindings that are not literals, which `config` leaves out.
    """

    config: str = ""
    scope: str = ""
    modules: tuple[str, ...] = ()
    selectors: tuple[str, ...] = ()
    registered: tuple[bytes, ...] = ()
    constants: tuple[tuple[str, bytes], ...] = ()
    bindings: tuple[tuple[str, bytes], ...] = ()

    def apply(self) -> tuple[str, ...]:
        """Puts the configuration in force in this process; gives what it could not, and why.

        The process is an actor's: Ray may have used it before, so what it holds is cleared first.
        """
        if not (self.config or self.constants or self.registered):
            return ()
        problems = []
        for module in self.modules:
            try:
                importlib.import_module(module)
            except Exception as problem:  # skip_unknown would hide it, and use defaults in silence
                problems.append(f"{module} ({type(problem).__name__}: {problem})")
        gin.clear_config()
        for pickled in self.registered:
            cloudpickle.loads(pickled)
        unknown = [selector for selector in self.selectors if selector not in _gin._REGISTRY]
        if not problems:  # or these follow from those
            problems = [f"{selector} (nothing registers it there)" for selector in unknown]
        for name, value in self.constants:
            with contextlib.suppress(ValueError):  # the environment's own module defined it
                gin.constant(name, cloudpickle.loads(value))
        gin.parse_config(self.config, skip_unknown=True)
        for key, value in self.bindings:
            with contextlib.suppress(ValueError):  # of a configurable unknown here
                gin.bind_parameter(key, cloudpickle.loads(value))
        return tuple(problems)

    def scoped(self) -> contextlib.AbstractContextManager[Any]:
        """The scope that was active in the caller."""
        return gin.config_scope(self.scope or None)  # type: ignore[no-any-return]


def scope_only() -> GinState:
    """For environments in this process, where the configuration is in force already."""
    return GinState(scope=gin.current_scope_str())


def capture() -> GinState:
    """The configuration that is in force here, in a form that travels.

    A binding that cannot travel is named in a warning, not dropped in silence.
    """
    touched = {selector for _, selector in _gin._CONFIG}
    touched |= {ref.configurable.selector for ref in _references()}
    configurables = [_gin._REGISTRY[selector] for selector in sorted(touched)]
    modules = {c.wrapped.__module__ for c in configurables}
    modules = {m for m in modules if m and m != "__main__" and m.partition(".")[0] != "gin"}

    lost: list[str] = []
    registered = [
        _pickled(c.selector, c.wrapper, lost)
        for c in configurables
        if c.wrapped.__module__.partition(".")[0] != "gin" and not _importable(c.wrapper)
    ]
    constants = [
        (name, _pickled(f"%{name}", value, lost))
        for name, value in _gin._CONSTANTS.items()
        if name != "gin.REQUIRED"
    ]
    bindings = [
        (key, _pickled(key, value, lost))
        for key, value in _bindings()
        if not _gin._is_literally_representable(value)
    ]
    if lost:
        _log.warning("gin: these do not pickle and are not in force in actors: %s", "; ".join(lost))
    return GinState(
        config=gin.config_str(),
        scope=gin.current_scope_str(),
        modules=tuple(sorted(modules)),
        selectors=tuple(c.selector for c in configurables),
        registered=tuple(p for p in registered if p is not None),
        constants=tuple((name, p) for name, p in constants if p is not None),
        bindings=tuple((key, p) for key, p in bindings if p is not None),
    )


def _bindings() -> Iterator[tuple[str, Any]]:
    for (scope, selector), parameters in _gin._CONFIG.items():
        for name, value in parameters.items():
            yield f"{scope}/{selector}.{name}" if scope else f"{selector}.{name}", value


def _references() -> Iterator[Any]:
    for reference in _gin.iterate_references(_gin._CONFIG):
        if isinstance(reference, _gin.ConfigurableReference):
            yield reference


def _pickled(name: str, value: Any, lost: list[str]) -> bytes | None:
    try:
        return dumps(value)
    except Exception as problem:
        lost.append(f"{name} ({type(problem).__name__}: {problem})")
        return None


# -- as text ---------------------------------------------------------------------------------------

Operative = dict[tuple[str, str], dict[str, str]]
"""By scope and selector the parameters that a configurable was called with, as gin writes them."""


def parse(files: Sequence[str], bindings: Sequence[str]) -> None:
    """Reads gin files, then bindings, and checks that what they refer to is there.

    Raises:
      Exception: gin's; says where.
    """
    for path in files:
        if not os.path.exists(path):
            raise FileNotFoundError(f"no such gin file: {path}")
    gin.parse_config_files_and_bindings([*files], [*bindings])
    # Not locked: modules that are imported later, an environment's say, register what they have.
    _gin._set_config_is_locked(False)


def required() -> list[str]:
    """What is bound to `gin.REQUIRED`, which stands for a value that someone has yet to give."""
    return [key for key, value in _bindings() if value is gin.REQUIRED]


def bound(selector: str, parameter: str) -> Any:
    """What is bound to a parameter; None where nothing is."""
    with contextlib.suppress(ValueError):
        return copy.deepcopy(gin.query_parameter(f"{selector}.{parameter}"))  # resolves a macro
    return None


def arguments(selector: str) -> dict[str, Any]:
    """What is bound to the parameters of a configurable."""
    return dict(gin.get_bindings(selector))


def reference(value: Any) -> str | None:
    """How a gin file refers to a configurable, scope and all; None of anything else."""
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return None
    found = _find(value)
    return None if found is None else "/".join(filter(None, [found[1], found[0].selector]))


def bindings(say: Callable[[Any], str] = repr) -> dict[str, str]:
    """Every binding as text, by its key; with the values of macros in the place of their names.

    Args:
      say: gives words for a value that is no literal.
    """
    macros = {
        scope: _text(parameters["value"], say)
        for (scope, selector), parameters in _gin._CONFIG.items()
        if selector == _MACRO
    }

    def resolved(text: str) -> str:
        return re.sub(
            r"%([\w./]+)", lambda m: resolved(macros[m[1]]) if m[1] in macros else m[0], text
        )

    return {
        key: resolved(_text(value, say))
        for key, value in _bindings()
        if not key.endswith(f"/{_MACRO}.value")
    }


def config_text() -> str:
    """The configuration that is in force here, as gin writes it.

    And in comments what gin leaves out, since it could not be read again: what is no literal.
    """
    left_out = [f"# {key} = {text}" for key, text in bindings().items() if text.startswith("<")]
    return "\n".join([str(gin.config_str()), *left_out])


def operative() -> Operative:
    """What was used in this process so far."""
    return {
        key: {name: _text(value) for name, value in parameters.items()}
        for key, parameters in _gin._OPERATIVE_CONFIG.items()
    }


def operative_text(used: Iterable[Operative]) -> str:
    """What was used in some processes, as a file that gin parses.

    What gin could not parse, and what one process used otherwise than another, is a comment.
    """
    lines = [f"import {module}" for module in sorted(one.module for one in _gin._IMPORTS)]
    merged: dict[tuple[str, str], dict[str, list[str]]] = {}
    for one in used:
        for key, parameters in one.items():
            for name, text in parameters.items():
                texts = merged.setdefault(key, {}).setdefault(name, [])
                if text not in texts:
                    texts.append(text)
    for scope, selector in sorted(merged, key=lambda key: (key[1] != _MACRO, key[::-1])):
        where = scope if selector == _MACRO else f"{scope}/{selector}".lstrip("/")
        if selector != _MACRO:
            lines += ["", f"# {where}"]
        for name, texts in merged[scope, selector].items():
            bound_to = where if selector == _MACRO else f"{where}.{name}"
            for i, text in enumerate(texts):
                lines.append(f"{'# ' if i or text.startswith('<') else ''}{bound_to} = {text}")
    return "\n".join(lines) + "\n"


_MACRO = "gin.macro"


def _text(value: Any, say: Callable[[Any], str] = repr) -> str:
    if _gin._is_literally_representable(value):
        return repr(value)
    return re.sub(r" at 0x[0-9a-f]+", "", f"<{say(value)}>")


# -- pickling -------------------------------------------------------------------------------------


def dumps(value: Any) -> bytes:
    """`cloudpickle.dumps` that also takes what gin has wrapped.

    gin's wrappers close over gin's own locks and tables. They are reduced to what they stand for:
    the selector and scope of something that an actor can import, or the undecorated function or
    class of ``__main__`` with the registration to make of it there.
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if obj is gin.REQUIRED:  # recognised by identity, which a copy would not have
            return getattr, (gin, "REQUIRED")
        if isinstance(obj, types.CodeType):
            # cloudpickle drops the file's name, and a remote traceback needs it.
            make, args = self.dispatch_table[types.CodeType](obj)
            return make, tuple(obj.co_filename if a == "<dynamic-code>" else a for a in args)
        if not (inspect.isfunction(obj) or inspect.isclass(obj)) or _importable(obj):
            return super().reducer_override(obj)
        code = getattr(obj, "__code__", None)
        if code is _WRAPPER_CODE and obj.__name__ in _CONSTRUCTORS:
            # The constructor of a class that @gin.configurable changed in place: the class itself
            # is registered anew when it arrives, so its own constructor travels.
            return _identity, (vars(obj)["__wrapped__"],)
        found = _find(obj)
        if found is None:
            return super().reducer_override(obj)
        configurable, scope = found
        if obj is not configurable.wrapped:
            importable = _importable(configurable.wrapper)
            target = configurable.wrapper if importable else configurable.wrapped
            return _restore, (_Registration.of(configurable), target, scope)
        reduced = super().reducer_override(obj)
        in_place = obj is configurable.wrapper
        return _registering(reduced, _Registration.of(configurable)) if in_place else reduced


_CONSTRUCTORS = ("__init__", "__new__")


def _importable(obj: Any) -> bool:
    """Whether another process finds this very object under its name."""
    if obj.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


@dataclasses.dataclass(frozen=True)
class _Registration:
    """What `gin.configurable` or `gin.register` was told."""

    name: str
    module: str | None
    allowlist: tuple[str, ...] | None
    denylist: tuple[str, ...] | None
    in_place: bool

    @classmethod
    def of(cls, configurable: Any) -> _Registration:
        return cls(
            name=configurable.name,
            module=configurable.module,
            allowlist=configurable.allowlist and tuple(configurable.allowlist),
            denylist=configurable.denylist and tuple(configurable.denylist),
            in_place=configurable.wrapper is configurable.wrapped,
        )

    @property
    def selector(self) -> str:
        return f"{self.module}.{self.name}" if self.module else self.name

    def make(self, wrapped: Any) -> None:
        register = gin.configurable if self.in_place else gin.register
        # Interactive mode: a notebook may have defined it again since this process last saw it.
        with _gin.interactive_mode():
            register(
                self.name, module=self.module, allowlist=self.allowlist, denylist=self.denylist
            )(wrapped)


def _restore(registration: _Registration, target: Any, scope: str) -> Any:
    """In the actor: the configurable version of `target`, within `scope`."""
    known = _gin._REGISTRY.get(registration.selector)
    if known is None or (target is not known.wrapped and target is not known.wrapper):
        registration.make(target)
    return gin.get_configurable(f"{scope}/{registration.selector}".lstrip("/"))


def _registering(reduced: tuple[Any, ...], registration: _Registration) -> tuple[Any, ...]:
    """A class's reduction whose last act, after its attributes are set, is to register it."""
    make, args, state, items, pairs, setter = reduced  # cloudpickle's way for a dynamic class
    return make, args, (setter, state, registration), items, pairs, _set_state_and_register


def _set_state_and_register(cls: Any, packed: tuple[Any, Any, _Registration]) -> Any:
    setter, state, registration = packed
    setter(cls, state)
    registration.make(cls)
    return cls


def _identity(fn: Any) -> Any:
    return fn


def _find(obj: Any) -> tuple[Any, str] | None:
    """The registered configurable that a function or class is, or wraps, and the scope it adds."""
    scope: list[str] = []
    while obj is not None:
        configurable = _gin._INVERSE_REGISTRY.get(obj)
        if configurable is not None:
            return configurable, "/".join(scope)
        wrapper = obj
        if inspect.isclass(obj):
            # gin.register and a scope make a subclass whose metaclass's __call__ is the wrapper.
            wrapper = vars(type(obj)).get("__call__")
        code = getattr(wrapper, "__code__", None)
        if code is _SCOPE_CODE:
            scope = [*inspect.getclosurevars(wrapper).nonlocals["scope_components"], *scope]
        elif code is not _WRAPPER_CODE:
            return None
        obj = obj.__bases__[0] if inspect.isclass(obj) else obj.__wrapped__
    return None


def _probe() -> None:
    """A function to wrap, to learn which code gin's two kinds of wrapper run."""


_WRAPPER_CODE = _gin._make_gin_wrapper(_probe, _probe, "probe", "probe", None, None).__code__
_SCOPE_CODE = _gin._decorate_with_scope(
    _gin.Configurable(_probe, _probe, "probe", "", None, None, None, "probe"), ["scope"]
).__code__


# -- exceptions -----------------------------------------------------------------------------------

_ours: set[str] = set()
"""Selectors of what `configurable` has decorated."""

_AUGMENT_CODE = _gin_utils.augment_exception_message_and_reraise.__code__


def original(error: BaseException) -> BaseException:
    """The exception that was raised, where gin replaced it on its way out of a configurable.

    gin 0.5 raises a proxy instead, of a class made on the spot, without ``args`` and ``__cause__``;
    where it cannot make one (an `ExceptionGroup`) a `TypeError` about gin itself comes out. In both
    cases the frame of gin's function stands in the traceback and still holds what was raised.
    """
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is _AUGMENT_CODE:
            return original(trace.tb_frame.f_locals["exception"])
        trace = trace.tb_next
    return error


def within_configurable() -> bool:
    """Whether this runs inside a configurable of the user's, whose proxy drops a ``__cause__``.

    Our own classes take the proxy off again (`configurable`, below) and do not count.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _WRAPPER_CODE and frame.f_locals["selector"] not in _ours:
            return True
        frame = frame.f_back
    return False


_Configurable = TypeVar("_Configurable", bound=Callable[..., Any])


def configurable(made: _Configurable, module: str | None = "envfleet") -> _Configurable:
    """`gin.configurable`; the exceptions of a function, or a constructor, come out as they were.

    Without a module, its selector is its bare name. To gin a selector that is complete is not
    ambiguous, whatever else has one that ends with it.
    """
    own = made.__module__
    try:
        if module is None:  # to gin that means the class's own, if it says one
            made.__module__ = None  # type: ignore[assignment]
        decorated: Any = gin.configurable(made, module=module)
    finally:
        made.__module__ = own
    _ours.add(f"{module}.{made.__name__}" if module else made.__name__)
    if not isinstance(made, type):
        return _unwrapping(decorated)  # type: ignore[return-value]
    decorated.__init__ = _unwrapping(decorated.__init__)
    return decorated  # type: ignore[no-any-return]


def _unwrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as proxy:
            error = original(proxy)
        raise error

    return called
