"""A launchd for one user, as far as PLATFORM.md knows the real one: domains, exit codes, KeepAlive, throttling.

It really starts what the property lists name, and its time is moved by hand: throttles and exit time-outs pass when the
test says so, while processes take the time that they take. What outlives a restart of the machine (which labels are
disabled) is a file in its directory. `launchctl` beside this file talks to it over a socket there.
"""

from __future__ import annotations

import json
import os
import plistlib
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.launchd.fake_job import Job

Answer = tuple[int, str]
TICK_S = 0.02
SESSIONS = {"gui": "Aqua", "user": "Background"}


class FakeLaunchd:
    """`domains` that exist at the start; `blocked` labels are those that Login Items has switched off."""

    def __init__(
        self, state: Path, user_home: Path, *, domains: Sequence[str] = ("gui", "user"), libsystem: Path | None = None
    ) -> None:
        self.socket = str(state / "launchd.sock")
        self.blocked: set[str] = set()
        self.log: list[str] = []  # every command that was given
        self._disabled_file = state / "disabled.json"
        self._user_home = user_home
        self._uid = os.getuid()
        self._domains = {f"{kind}/{self._uid}" for kind in domains}
        self._libsystem = libsystem
        self._jobs: dict[tuple[str, str], Job] = {}
        self._now = 0.0
        self._changed = threading.Condition(threading.RLock())
        self._ending = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.socket)
        self._listener.listen()
        self._threads = [threading.Thread(target=self._serve), threading.Thread(target=self._tick_on)]
        for thread in self._threads:
            thread.start()

    # -- what a test does ---------------------------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        with self._changed:
            self._now += seconds
            self._tick()

    def login(self) -> None:
        """A login at the screen: the agents of the user are loaded, those that may be."""
        self._appear(f"gui/{self._uid}")

    def login_in_background(self) -> None:
        """What the same login may do besides, since the agent allows both kinds of session."""
        self._appear(f"user/{self._uid}")

    def logout(self) -> None:
        with self._changed:
            domain = f"gui/{self._uid}"
            for key in [key for key in self._jobs if key[0] == domain]:
                self._bootout("/".join(key))
            self._domains.discard(domain)

    def job(self, label: str, kind: str = "gui") -> Job | None:
        with self._changed:
            return self._jobs.get((f"{kind}/{self._uid}", label))

    def wait_for(self, condition: Callable[[], bool], within_s: float = 30.0) -> None:
        """Returns when `condition` holds, which a process or the fake itself brings about."""
        deadline = time.monotonic() + within_s
        with self._changed:
            while not condition():
                assert time.monotonic() < deadline, "it did not come about in time"
                self._changed.wait(TICK_S)

    def close(self) -> None:
        """The machine goes down: everything is killed."""
        with self._changed:
            self._ending = True
            jobs = list(self._jobs.values())
            for job in jobs:
                job.removing = True
                if job.process is not None:
                    job.process.kill()
        self.wait_for(lambda: all(job.process is None for job in jobs))
        for job in jobs:
            job.close()
        with socket.socket(socket.AF_UNIX) as waking:
            waking.connect(self.socket)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        os.unlink(self.socket)

    # -- launchctl ----------------------------------------------------------------------------------------------------

    def command(self, arguments: Sequence[str]) -> Answer:
        with self._changed:
            self.log.append(" ".join(arguments))
            match [*arguments]:
                case ["print", target] if target.count("/") == 1:
                    return self._print_domain(target)
                case ["print", target]:
                    return self._print(target)
                case ["print-disabled", domain]:
                    return self._print_disabled(domain)
                case [("enable" | "disable") as verb, target]:
                    return self._set_disabled(target.rsplit("/", 1)[1], verb == "disable")
                case ["bootstrap", domain, path]:
                    return self._bootstrap(domain, path)
                case ["bootout", target]:
                    return self._bootout(target)
                case ["kickstart", "-k", target]:
                    return self._kickstart(target, kill=True)
                case ["kickstart", target]:
                    return self._kickstart(target, kill=False)
            return 64, "Unrecognized subcommand.\n"

    def _print_domain(self, domain: str) -> Answer:
        if domain not in self._domains:
            return 125, "Domain does not support specified action\n"
        return 0, f"{domain} = {{\n\ttype = {domain.split('/')[0]}\n}}\n"

    def _print(self, target: str) -> Answer:
        job = self._jobs.get(_key(target))
        if job is None:
            domain, label = _key(target)
            return 113, f'Could not find service "{label}" in domain for {domain.replace("/", ": ")}\n'
        return 0, job.printed()

    def _print_disabled(self, domain: str) -> Answer:
        lines = [
            f'\t"{label}" => {"disabled" if disabled else "enabled"}' for label, disabled in self._disabled().items()
        ]
        return 0, "\n".join(["disabled services = {", *lines, "}"]) + "\n"

    def _set_disabled(self, label: str, disabled: bool) -> Answer:
        self._disabled_file.write_text(json.dumps({**self._disabled(), label: disabled}))
        return 0, ""

    def _bootstrap(self, domain: str, path: str) -> Answer:
        code = self._load(domain, path)
        return code, f"Bootstrap failed: {code}: {os.strerror(code)}\n" if code else ""

    def _bootout(self, target: str) -> Answer:
        job = self._jobs.get(_key(target))
        if job is None:
            return 3, "Boot-out failed: 3: No such process\n"
        if job.removing:
            return 36, "Boot-out failed: 36: Operation now in progress\n"
        job.removing = True
        if job.process is None:
            self._remove(job)
        else:
            job.kill_at = self._now + float(job.plist.get("ExitTimeOut", 5))
            job.terminate()
        return 0, ""  # it returns before the job has gone

    def _kickstart(self, target: str, *, kill: bool) -> Answer:
        job = self._jobs.get(_key(target))
        if job is None:
            return 113, "Could not find service\n"
        if job.process is None:
            job.schedule(self._now)
            self._tick()
        elif kill:
            job.again = True
            job.kill_at = self._now + float(job.plist.get("ExitTimeOut", 5))
            job.terminate()
        return 0, ""

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def _load(self, domain: str, path: str) -> int:
        """An exit code."""
        if domain not in self._domains:
            return 125
        try:
            state = os.stat(path)
            plist: dict[str, Any] = plistlib.loads(Path(path).read_bytes())
        except (OSError, plistlib.InvalidFileException):
            return 5
        if state.st_uid != self._uid or stat.S_IMODE(state.st_mode) & 0o022:
            return 122
        label = plist["Label"]
        if label in self.blocked:
            return 5  # 161 is seen in the unified log alone
        if self._disabled().get(label, False):
            return 119
        if SESSIONS[domain.split("/")[0]] not in plist.get("LimitLoadToSessionType", ["Aqua"]):
            return 134
        known = self._jobs.get((domain, label))
        if known is not None:
            return 5 if known.removing else 37
        job = self._jobs[domain, label] = Job(domain, path, plist, preload=self._libsystem)
        if job.starts_at_load:
            job.schedule(self._now)
            self._tick()
        return 0

    def _appear(self, domain: str) -> None:
        with self._changed:
            self._domains.add(domain)
            for path in sorted((self._user_home / "Library" / "LaunchAgents").glob("*.plist")):
                if not path.is_symlink():
                    self._load(domain, str(path))

    def _tick(self) -> None:
        """What is due by now."""
        for job in list(self._jobs.values()):
            if job.process is not None:
                if job.kill_at is not None and self._now >= job.kill_at:
                    job.process.kill()
                continue
            if job.due_at is None and not job.removing and job.has_visitor():
                job.schedule(self._now)
            if job.due_at is not None and self._now >= job.due_at:
                self._spawn(job)
        self._changed.notify_all()

    def _spawn(self, job: Job) -> None:
        env = {
            "HOME": str(self._user_home),
            "USER": "me",
            "LOGNAME": "me",
            "SHELL": "/bin/sh",
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
        }
        if job.spawn(self._now, env):
            threading.Thread(target=self._watch, args=(job,)).start()

    def _watch(self, job: Job) -> None:
        process = job.process
        assert process is not None
        process.wait()
        with self._changed:
            _kill_group(process.pid)  # what is left of the job does not outlive it
            job.kill_at = None
            job.ended(process.returncode, self._now)
            if job.removing and not self._ending:
                self._remove(job)
            self._changed.notify_all()

    def _remove(self, job: Job) -> None:
        job.close()
        del self._jobs[job.domain, job.label]
        self._changed.notify_all()

    def _disabled(self) -> dict[str, bool]:
        return dict(json.loads(self._disabled_file.read_text())) if self._disabled_file.exists() else {}

    # -- threads ------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._ending:
            connected, _ = self._listener.accept()
            with connected, connected.makefile("rw") as stream:
                line = stream.readline()
                if line:
                    code, output = self.command(json.loads(line))
                    stream.write(json.dumps({"code": code, "output": output}))

    def _tick_on(self) -> None:
        """Visitors at sockets come without anybody telling."""
        while True:
            with self._changed:
                if self._ending:
                    return
                self._tick()
                self._changed.wait(TICK_S)


def _key(target: str) -> tuple[str, str]:
    domain, _, label = target.rpartition("/")
    return domain, label


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
