"""`omlxd`: the daemon in the foreground, from the command line to the exit code.

Owns the order of starting: settings, private home, lock, log, socket; only then the imports that take time, so that a
client can connect within a moment of the start. Runs on the main thread before and after the event loop.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import NoReturn

import omlxd
from omlxd.daemon import logs, open_files, settings, settings_file
from omlxd.daemon.listener import Listener, SocketInUse, adopt, publish, turn_away
from omlxd.daemon.lock import AlreadyRunning, InstanceLock
from omlxd.daemon.paths import Paths, SocketPathTooLong
from omlxd.daemon.private import UnsafePlace, make_private
from omlxd.daemon.reload import LiveSettings
from omlxd.daemon.settings import ConfigError
from omlxd.launchd.activation import ActivationFailed, Launchd, ListenFds, activated_listeners

EXIT_ALREADY_RUNNING = 1
EXIT_FAILED = 70  # EX_SOFTWARE of sysexits.h
EXIT_CONFIG = 78  # EX_CONFIG

_EXIT_CODES = """\
exit codes: 0 stopped as asked; 1 another daemon has this home or socket; 2 usage; 70 a bug, see the log; 78 the
settings, the home or the socket cannot be used. With --supervised=launchd 1 and 78 become 0, because starting
again would not help.
"""

_log = logging.getLogger(__name__)


class _StoppedEarly(SystemExit):
    """A signal to stop came before the event loop could hear it."""


class _EarlyStop:
    """The handler of such a signal. It remembers: what is being imported may swallow the exception or make another."""

    asked = False

    def __call__(self, number: int, _: FrameType | None) -> NoReturn:
        self.asked = True
        raise _StoppedEarly(number)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the daemon until it is told to stop, and ends the process with one of the exit codes above."""
    options = _parser().parse_args(arguments)
    os.umask(0o077)
    open_files.allow_many()
    faulthandler.enable()
    # transformers is here for its tokenizers: that it finds no PyTorch is no news. mlx-lm sets this as well, too late.
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    stop = _EarlyStop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        code = _live(options, stop)
    except _StoppedEarly:
        code = 0
    _leave(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omlxd", description="A local inference daemon for MLX models.", epilog=_EXIT_CODES
    )
    parser.add_argument("--home", metavar="DIR", help="in place of $OMLXD_HOME (default ~/.omlxd)")
    parser.add_argument("--log-json", action="store_true", help="log JSON objects, as log.json = true does")
    parser.add_argument("--quiet", action="store_true", help="once it runs, log to the file and not to stderr")
    parser.add_argument("--supervised", choices=["launchd"], help="started by launchd; implies --quiet")
    parser.add_argument("--version", action="version", version=f"omlxd {omlxd.__version__}")
    return parser


def _live(options: argparse.Namespace, stop: _EarlyStop) -> int:
    with contextlib.ExitStack() as held:
        handed: Listener | None = None
        try:
            handed = _handed_over(options, held)
            listener, live, paths = _open(options, held, handed)
        except (AlreadyRunning, SocketInUse) as error:
            return _refuse(str(error), EXIT_ALREADY_RUNNING, options, handed)
        except (ActivationFailed, ConfigError, SocketPathTooLong, UnsafePlace) as error:
            return _refuse(str(error), EXIT_CONFIG, options, handed)
        except OSError as error:
            return _refuse(f"cannot start: {error}", EXIT_CONFIG, options, handed)
        return _serve(listener, live, paths, stop)


def _handed_over(options: argparse.Namespace, held: contextlib.ExitStack) -> Listener | None:
    """The socket that launchd or systemd listens on for us, if one does."""
    supervisor = Launchd() if options.supervised else ListenFds(os.environ, os.getpid())
    listeners = [held.enter_context(adopt(handed)) for handed in activated_listeners(supervisor)]
    if len(listeners) > 1:
        raise ActivationFailed(f"{len(listeners)} sockets were handed over, omlxd serves one; take the others away")
    return listeners[0] if listeners else None


def _open(
    options: argparse.Namespace, held: contextlib.ExitStack, handed: Listener | None
) -> tuple[Listener, LiveSettings, Paths]:
    """Everything that can refuse to start. What it takes is left in `held`, to be given back in reverse order."""
    env = dict(os.environ)
    if options.home:
        env["OMLXD_HOME"] = options.home
    paths = Paths.from_env(env)
    if handed is None:
        paths.check_socket()
    make_private(paths.home)
    load = partial(settings.load, paths.config, env)
    read = load()
    lock = held.enter_context(InstanceLock(paths.lock, omlxd.__version__))
    if handed is None and os.path.dirname(paths.socket) != paths.home:
        make_private(os.path.dirname(paths.socket))
        lock = held.enter_context(InstanceLock(f"{paths.socket}.lock", omlxd.__version__))  # of another home's daemon
    settings_file.create_default(paths.config)
    as_json, to_stderr = options.log_json or read.log.json, not (options.quiet or options.supervised)
    if options.supervised:
        logs.trim_output(sys.stderr.fileno())
    logs.set_up(paths.log_file, read.log, as_json=as_json, to_stderr=to_stderr)
    if handed is None:
        return held.enter_context(publish(paths.socket, lock)), LiveSettings(read, load), paths
    if handed.path != paths.socket:
        _log.warning("listening at %s, where omlxctl does not look: it looks at %s", handed.path, paths.socket)
    return handed, LiveSettings(read, load), Paths(paths.home, handed.path)


def _serve(listener: Listener, live: LiveSettings, paths: Paths, stop: _EarlyStop) -> int:
    _log.info("omlxd %s, pid %d, home %s", omlxd.__version__, os.getpid(), paths.home)
    try:
        import anyio  # clients wait in the socket's backlog by now, so what takes time to import comes here

        from omlxd.daemon.run import run
        from omlxd.daemon.wiring import build_service

        if not stop.asked:
            anyio.run(run, listener, live, partial(build_service, live, paths))
    except Exception:  # noqa: BLE001 - the top of the main thread
        if stop.asked:
            return 0
        _log.exception("the daemon failed")
        return EXIT_FAILED
    return 0


def _refuse(reason: str, code: int, options: argparse.Namespace, handed: Listener | None) -> int:
    print(f"omlxd: {reason}", file=sys.stderr)
    if handed is not None:
        turn_away(handed, reason)
    return 0 if options.supervised else code


def _leave(code: int) -> NoReturn:
    """Ends the process at once: all that is ours has been closed and flushed by now.

    Without the interpreter's own end: mlx's stream threads live on, and what they still use is torn down under them; a
    thread that does not end would be waited for without limit.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if left:
        _log.warning("leaving with threads at work: %s", ", ".join(left))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
