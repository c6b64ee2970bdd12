"""What launchctl's exit codes mean, in plain words and with what to do; and the codes that a job ends with.

Values; the numbers are those of macOS, where errno and launchd's own errors share one range. Anything that is not in
the table is looked up with `launchctl error N`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OK: Final = 0
NO_SUCH_PROCESS: Final = 3
IO_ERROR: Final = 5
IN_PROGRESS: Final = 36
ALREADY: Final = 37
NO_SUCH_DOMAIN: Final = 112
NOT_LOADED: Final = 113
DISABLED: Final = 119
BAD_OWNER: Final = 122
TEARING_DOWN: Final = 124
WRONG_DOMAIN: Final = 125
WRONG_SESSION: Final = 134

NOT_STARTED: Final = 78  # as a job's last exit code: launchd's helper could not run the program

LOGIN_ITEMS: Final = "System Settings > General > Login Items & Extensions > App Background Activity"
LAUNCHD_LOG: Final = """log show --last 5m --predicate 'process == "launchd" OR process == "xpcproxy"'"""


@dataclass(frozen=True, slots=True)
class Meaning:
    """One code: what it says, and what to do."""

    what: str
    advice: str


_OURS: Final = "this is a mistake of omlxctl's; please report it"
_OTHER_DOMAIN: Final = "log in at the Mac's screen once, or over ssh as the user that the service is for, without sudo"

_MEANINGS: Final[dict[int, Meaning]] = {
    NO_SUCH_PROCESS: Meaning("no such service is loaded", "`omlxctl service start` loads it"),
    IO_ERROR: Meaning(
        "launchd would not load the service and does not say why (input/output error)",
        f"see that omlxd is allowed in {LOGIN_ITEMS}; launchd's own words: {LAUNCHD_LOG}",
    ),
    IN_PROGRESS: Meaning("launchd is still taking the service down", "try again in a minute"),
    ALREADY: Meaning("the service is loaded already", "`omlxctl service restart` starts it anew"),
    64: Meaning("launchctl did not understand the command", _OURS),
    108: Meaning("launchd does not take the path of the property list", _OURS),
    109: Meaning("launchd cannot read the property list", "`omlxctl service install` writes it again"),
    110: Meaning("the property list has no label", "`omlxctl service install` writes it again"),
    111: Meaning("the property list names no program", "`omlxctl service install` writes it again"),
    NO_SUCH_DOMAIN: Meaning("this user has no such login session", _OTHER_DOMAIN),
    NOT_LOADED: Meaning("the service is not loaded, or macOS blocks it", f"see that omlxd is allowed in {LOGIN_ITEMS}"),
    DISABLED: Meaning("the service is switched off", f"switch it on in {LOGIN_ITEMS}, then `omlxctl service start`"),
    BAD_OWNER: Meaning(
        "the property list is not yours alone to write", "`omlxctl service install` writes it with the right mode"
    ),
    TEARING_DOWN: Meaning("the login session is just ending", "try again after the next login"),
    WRONG_DOMAIN: Meaning("this login session cannot have services of its own", _OTHER_DOMAIN),
    WRONG_SESSION: Meaning("the service may not be loaded in this kind of session", _OTHER_DOMAIN),
    150: Meaning("System Integrity Protection forbids it", "use a Python outside of the system's directories"),
    155: Meaning(
        "the program is in quarantine, as something downloaded", "xattr -d com.apple.quarantine on the Python it names"
    ),
    159: Meaning("a sandbox forbids it", "run omlxctl in a plain terminal"),
    161: Meaning("macOS blocks the service in the background", f"allow omlxd in {LOGIN_ITEMS}"),
}

_ENDS: Final[dict[int, Meaning]] = {
    1: Meaning("another daemon has its home or socket", "`omlxctl status` shows which; `omlxctl shutdown` ends it"),
    70: Meaning("a bug ended it", "`omlxctl service logs` shows where"),
    NOT_STARTED: Meaning(
        "it could not be started: its program, its output file or its settings cannot be used",
        "`omlxctl doctor` finds which",
    ),
}


def meaning(code: int) -> Meaning:
    """What a launchctl that exits with `code` says."""
    unknown = Meaning(f"launchd refused with code {code}", f"`launchctl error {code}` names it; {LAUNCHD_LOG}")
    return _MEANINGS.get(code, unknown)


def meaning_of_end(code: int) -> Meaning | None:
    """Why a job whose last exit code is `code` ended; None for an end that was asked for."""
    if code == OK:
        return None
    return _ENDS.get(code, Meaning(f"it ended with code {code}", "`omlxctl service logs` may show why"))
