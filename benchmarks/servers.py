"""The processes that contenders live in, as the one sees them that asks."""

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import processes

SERVE = Path(__file__).resolve().with_name("serve.py")


class Failed(Exception):
    """A contender did not do what it was asked; says why."""


class Server:
    """`serve.py` with a contender in it; stopped, with all that it has started, between commands.

    Args:
      python: the interpreter of the virtual environment that it lives in.
      contender: its name.
      directory: for its log, and for what packages write (Ray, multiprocessing, MuJoCo).
      reaper: ends it if nobody else does.
    """

    def __init__(
        self, python: str, contender: str, directory: Path, reaper: processes.Reaper
    ) -> None:
        variables = {
            "TMPDIR": str(directory),
            "RAY_TMPDIR": str(directory),
            "RAY_AUTH_MODE": "disabled",  # or it leaves a token in the home directory
            "RAY_USAGE_STATS_ENABLED": "0",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        with tempfile.NamedTemporaryFile(
            dir=directory, prefix=contender, suffix=".log", delete=False
        ) as log:
            self.process = subprocess.Popen(
                [os.path.abspath(python), str(SERVE), contender],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | variables,
                cwd=directory,
                start_new_session=True,
            )
        self.log = Path(log.name)
        self.reaper = reaper
        reaper.add(self.process.pid)

    def ask(self, deadline: float, **command: Any) -> dict[str, Any]:
        """What it answers to a command.

        Raises:
          Failed: it answered with an error, died, or took longer than so many seconds.
        """
        processes.signal_all(self.process.pid, signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()
            answer = json.loads(self._line(deadline))
        except BrokenPipeError:
            raise Failed(self._last_words()) from None
        if "error" in answer:
            raise Failed(answer["error"])
        processes.signal_all(self.process.pid, signal.SIGSTOP)
        return answer

    def _line(self, deadline: float) -> bytes:
        until = time.monotonic() + deadline
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise Failed(f"no answer in {deadline:.0f} s")
                part = os.read(self.process.stdout.fileno(), 1 << 16)
                if not part:
                    raise Failed(self._last_words())
                line += part
        return line

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"its process died: {lines[-1] if lines else 'without a word'}"

    def end(self) -> None:
        """Kills it, and all that it has started."""
        processes.kill_all(self.process.pid)
        self.reaper.remove(self.process.pid)
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()
