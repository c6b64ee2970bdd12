"""`launchctl`: its verbs, with what they need around them, because most of them return before they have done it.

Owns the waiting and the retrying, and which of a user's two domains a service belongs to. Waits on the calling thread;
not for an event loop. Clock, sleep and the program itself are handed in.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from omlxd.launchd import exit_codes as codes
from omlxd.launchd.printed import Printed, parse_disabled, parse_service

_ANSWER_S: Final = 30.0
_POLL_S: Final = 0.1
_GONE_MARGIN_S: Final = 5.0
_RETRY_AFTER_S: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
_ELSEWHERE: Final = frozenset({codes.NO_SUCH_DOMAIN, codes.WRONG_DOMAIN, codes.WRONG_SESSION})
_NO_DOMAIN: Final = frozenset({codes.NO_SUCH_DOMAIN, codes.NOT_LOADED, codes.WRONG_DOMAIN})
_GONE: Final = frozenset({codes.NO_SUCH_PROCESS, codes.NOT_LOADED, *_ELSEWHERE})


@dataclass(frozen=True, slots=True)
class Done:
    """What a finished launchctl said."""

    code: int
    output: str


class Runner(Protocol):
    """Runs launchctl with some arguments and waits for it. Raises LaunchctlFailed when it does not end."""

    def __call__(self, arguments: Sequence[str]) -> Done: ...


class LaunchctlFailed(Exception):
    """launchd did not do it; `advice` says what may help."""

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(f"{message}; {advice}")
        self.message = message
        self.advice = advice


def refused(verb: str, code: int, output: str = "") -> LaunchctlFailed:
    """The failure behind an exit code, in plain words."""
    meaning = codes.meaning(code)
    said = f": {output.strip().splitlines()[-1]}" if output.strip() and code == codes.IO_ERROR else ""
    return LaunchctlFailed(f"launchctl {verb} failed with {code}: {meaning.what}{said}", meaning.advice)


class Program:
    """The launchctl at `path`, as a process."""

    def __init__(self, path: str, env: Mapping[str, str]) -> None:
        self._path = path
        self._env = dict(env)

    def __call__(self, arguments: Sequence[str]) -> Done:
        try:
            done = subprocess.run(
                [self._path, *arguments],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_ANSWER_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            message = f"`launchctl {' '.join(arguments)}` did not answer within {_ANSWER_S:.0f} s"
            raise LaunchctlFailed(message, "log out and in again") from None
        return Done(done.returncode, done.stdout.decode(errors="replace"))


class Launchctl:
    """One label's service in the domains of one user."""

    def __init__(
        self,
        run: Runner,
        *,
        label: str,
        uid: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run = run
        self._label = label
        self._uid = uid
        self._clock = clock
        self._sleep = sleep

    @property
    def domains(self) -> Sequence[str]:
        """Where a user's services can be: with a login at the screen, and with any login."""
        return f"gui/{self._uid}", f"user/{self._uid}"

    # -- asking -------------------------------------------------------------------------------------------------------

    def domain(self) -> str:
        """Where to load: the session at the screen if there is one, also from ssh; else the user's own."""
        gui, user = self.domains
        done = self._run(["print", gui])
        if done.code == codes.OK:
            return gui
        if done.code in _NO_DOMAIN:
            return user
        raise refused(f"print {gui}", done.code, done.output)

    def loaded(self) -> Mapping[str, Printed]:
        """The service in each domain that has it, by domain."""
        found = {domain: self._print(domain) for domain in self.domains}
        return {domain: printed for domain, printed in found.items() if printed is not None}

    def is_disabled(self, domain: str) -> bool:
        """Whether launchd's own record says that it is switched off; what macOS blocks besides, nobody can ask."""
        return parse_disabled(self._run(["print-disabled", domain]).output).get(self._label, False)

    # -- doing --------------------------------------------------------------------------------------------------------

    def enable(self, domain: str) -> None:
        """Lifts an earlier `disable`, which outlives the property list."""
        self._must("enable", f"{domain}/{self._label}")

    def bootstrap(self, domain: str, path: str) -> str:
        """Loads the property list at `path`; returns the domain that took it. Raises LaunchctlFailed.

        Code 5 is also what it says while an earlier bootout is not over, so that is tried again for some seconds.
        """
        for delay_s in (*_RETRY_AFTER_S, None):
            done = self._run(["bootstrap", domain, path])
            if done.code in (codes.OK, codes.ALREADY) or self._print(domain) is not None:
                return domain
            if done.code in _ELSEWHERE and domain != self.domains[-1]:
                return self.bootstrap(self.domains[-1], path)
            if done.code == codes.DISABLED:
                self.enable(domain)
            elif done.code not in (codes.IO_ERROR, codes.IN_PROGRESS, codes.TEARING_DOWN):
                break
            if delay_s is not None:
                self._sleep(delay_s)
        raise refused(f"bootstrap {domain}", done.code, done.output)

    def bootout(self, domain: str, *, exit_timeout_s: float) -> None:
        """Unloads, and waits until the daemon has gone: before that, a bootstrap would leave nothing loaded at all."""
        target = f"{domain}/{self._label}"
        done = self._run(["bootout", target])
        if done.code in _GONE:
            return
        if done.code not in (codes.OK, codes.IN_PROGRESS):
            raise refused(f"bootout {target}", done.code, done.output)
        deadline = self._clock() + exit_timeout_s + _GONE_MARGIN_S
        while self._print(domain) is not None:
            if self._clock() > deadline:
                message = f"launchd has not ended {target} within {exit_timeout_s + _GONE_MARGIN_S:.0f} s"
                raise LaunchctlFailed(message, "`omlxctl doctor` shows its pid; end it with kill -9, then try again")
            self._sleep(_POLL_S)

    def kickstart(self, domain: str, *, kill: bool) -> None:
        """Starts it now, after ending the one that runs if `kill`. launchd's throttle is not shortened by that."""
        self._must("kickstart", *(["-k"] if kill else []), f"{domain}/{self._label}")

    def _must(self, *arguments: str) -> None:
        done = self._run(arguments)
        if done.code != codes.OK:
            raise refused(" ".join(arguments), done.code, done.output)

    def _print(self, domain: str) -> Printed | None:
        done = self._run(["print", f"{domain}/{self._label}"])
        return parse_service(done.output) if done.code == codes.OK else None
