"""What `make run` does once everything is installed: a daemon, the demo model, one streamed answer.

Owns the daemon that it starts, and ends it however the demo ends; one that already runs in the home is used and left
alone. Talks to it by `omlxctl` only, as a user would. Main thread only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

from omlxd.daemon.paths import Paths, SocketPathTooLong
from omlxd.rpc.client import Client, DaemonUnreachable

MODEL = "SmolLM2-135M-Instruct"
_DAEMON = (sys.executable, "-P", "-m", "omlxd.daemon", "--quiet")
_START_S = 30.0
_STOP_S = 30.0
_POLL_S = 0.02

_NEXT = """
That was {model} on your own machine. To go on, in this directory:

  export OMLXD_HOME="$PWD/.omlxd"{socket}
  .venv/bin/omlxctl chat {model}          # starts a daemon in the background
  .venv/bin/omlxctl status
  .venv/bin/omlxctl pull mlx-community/Qwen3-0.6B-4bit
  .venv/bin/omlxctl shutdown
"""


def main(arguments: Sequence[str]) -> int:
    """Asks the demo model the one argument and returns omlxctl's exit code."""
    (prompt,) = arguments
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with _environment() as env, _daemon(env):
            _say("fetching the demo model (98 MB, the first time)")
            code = _omlxctl(env, "pull", "demo")
            if code == 0:
                _say(f"asking {MODEL}: {prompt}\n")
                code = _omlxctl(env, "run", "--temperature", "0", "--max-tokens", "256", "--", MODEL, prompt)
    except KeyboardInterrupt:
        return 130
    if code == 0:
        socket = '\n  export OMLXD_SOCKET="$HOME/.omlxd/demo.sock"' if "OMLXD_SOCKET" in env else ""
        print(_NEXT.format(model=MODEL, socket=socket))
    return code


@contextlib.contextmanager
def _environment() -> Iterator[Mapping[str, str]]:
    """This one, with a short socket path for the time of the demo where the clone lies too deep for one."""
    env = {name: value for name, value in os.environ.items() if name != "OMLXD_SOCKET"}
    try:
        Paths.from_env(env).check_socket()
    except SocketPathTooLong:
        with tempfile.TemporaryDirectory(prefix="omlxd-") as directory:  # mode 0700
            yield {**env, "OMLXD_SOCKET": os.path.join(directory, "omlxd.sock")}
    else:
        yield env


@contextlib.contextmanager
def _daemon(env: Mapping[str, str]) -> Iterator[None]:
    paths = Paths.from_env(env)
    if _answers(paths.socket):
        _say(f"using the daemon that runs at {paths.socket}")
        yield
        return
    # A session of its own: Ctrl-C is for the answer first, and then for us, who end the daemon.
    daemon = subprocess.Popen(_DAEMON, env=env, start_new_session=True)
    try:
        _say(f"started omlxd (pid {daemon.pid}, log {paths.log_file})")
        _wait(daemon, paths)
        yield
    finally:
        _stop(daemon)


def _wait(daemon: subprocess.Popen[bytes], paths: Paths) -> None:
    deadline = time.monotonic() + _START_S
    while not _answers(paths.socket):
        if daemon.poll() is not None:
            sys.exit(f"omlxd ended with code {daemon.returncode}; see above and {paths.log_file}")
        if time.monotonic() > deadline:
            sys.exit(f"omlxd did not answer within {_START_S:.0f} s; see {paths.log_file}")
        time.sleep(_POLL_S)


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _answers(socket: str) -> bool:
    try:
        Client.connect(socket).close()
    except DaemonUnreachable:
        return False
    return True


def _omlxctl(env: Mapping[str, str], command: str, *arguments: str) -> int:
    program = os.path.join(os.path.dirname(sys.executable), "omlxctl")
    return subprocess.run([program, command, "--no-start", *arguments], env=env).returncode


def _say(text: str) -> None:
    print(f"==> {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
