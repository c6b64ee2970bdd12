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
from omlxd.daemon import logs, settings, settings_file
from omlxd.daemon.listener import Listener, SocketInUse, UnsafePlace, make_private, publish
from omlxd.daemon.lock import AlreadyRunning, InstanceLock
from omlxd.daemon.paths import Paths, SocketPathTooLong
from omlxd.daemon.settings import ConfigError, Settings

EXIT_ALREADY_RUNNING = 1
EXIT_FAILED = 70  # EX_SOFTWARE of sysexits.h
EXIT_CONFIG = 78  # EX_CONFIG

_EXIT_CODES = """\
exit codes: 0 stopped as asked; 1 another daemon has this home or socket; 2 usage; 70 a bug, see the log; 78 the
settings, the home or the socket's place cannot be used. With --supervised=launchd 1 and 78 become 0, because starting
again would not help.
"""

_log = logging.getLogger(__name__)


class _StoppedEarly(SystemExit):
    """A signal to stop came before the event loop could hear it."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the daemon until it is told to stop, and ends the process with one of the exit codes above."""
    options = _parser().parse_args(arguments)
    os.umask(0o077)
    faulthandler.enable()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_early)
    try:
        code = _live(options)
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


def _stop_early(number: int, _: FrameType | None) -> NoReturn:
    raise _StoppedEarly(number)


def _live(options: argparse.Namespace) -> int:
    with contextlib.ExitStack() as held:
        try:
            listener, read, paths = _open(options, held)
        except (AlreadyRunning, SocketInUse) as error:
            return _refuse(str(error), EXIT_ALREADY_RUNNING, options)
        except (ConfigError, SocketPathTooLong, UnsafePlace) as error:
            return _refuse(str(error), EXIT_CONFIG, options)
        except OSError as error:
            return _refuse(f"cannot start: {error}", EXIT_CONFIG, options)
        return _serve(listener, read, paths)


def _open(options: argparse.Namespace, held: contextlib.ExitStack) -> tuple[Listener, Settings, Paths]:
    """Everything that can refuse to start. What it takes is left in `held`, to be given back in reverse order."""
    env = dict(os.environ)
    if options.home:
        env["OMLXD_HOME"] = options.home
    paths = Paths.from_env(env)
    paths.check_socket()
    make_private(paths.home)
    read = settings.load(paths.config, env)
    lock = held.enter_context(InstanceLock(paths.lock, omlxd.__version__))
    if os.path.dirname(paths.socket) != paths.home:
        make_private(os.path.dirname(paths.socket))
        lock = held.enter_context(InstanceLock(f"{paths.socket}.lock", omlxd.__version__))  # of another home's daemon
    settings_file.create_default(paths.config)
    as_json, to_stderr = options.log_json or read.log.json, not (options.quiet or options.supervised)
    logs.set_up(paths.log_file, read.log, as_json=as_json, to_stderr=to_stderr)
    return held.enter_context(publish(paths.socket, lock)), read, paths


def _serve(listener: Listener, read: Settings, paths: Paths) -> int:
    _log.info("omlxd %s, pid %d, home %s", omlxd.__version__, os.getpid(), paths.home)
    try:
        import anyio  # clients wait in the socket's backlog by now, so what takes time to import comes here

        from omlxd.daemon.run import run
        from omlxd.daemon.service import build_service

        anyio.run(run, listener, read, partial(build_service, read, paths))
    except Exception:  # noqa: BLE001 - the top of the main thread
        _log.exception("the daemon failed")
        return EXIT_FAILED
    return 0


def _refuse(reason: str, code: int, options: argparse.Namespace) -> int:
    print(f"omlxd: {reason}", file=sys.stderr)
    return 0 if options.supervised else code


def _leave(code: int) -> NoReturn:
    """Ends the process, with a thread that does not end too: a stop that hangs is worse than a thread cut short."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if left:
        _log.warning("leaving with threads at work: %s", ", ".join(left))
    logging.shutdown()
    sys.stderr.flush()
    if left:
        os._exit(code)
    sys.exit(code)
