"""launchctl's verbs: what its exit codes are taken for, what is waited for, and what is said in the end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from omlxd.launchd import exit_codes
from omlxd.launchd.launchctl import Done, Launchctl, LaunchctlFailed
from omlxd.launchd.printed import Printed, parse_disabled, parse_service

PRINTED = """\
gui/501/x = {
\tactive count = 1
\tpath = /Users/me/Library/LaunchAgents/x.plist
\tstate = running

\tprogram = /venv/bin/python
\targuments = {
\t\t/venv/bin/python
\t\t-m
\t\tomlxd.daemon
\t}

\tinherited environment = {
\t\tSSH_AUTH_SOCK => /private/tmp/x
\t}

\tenvironment = {
\t\tOMLXD_HOME => /Users/me/.omlxd
\t\tXPC_SERVICE_NAME => x
\t}

\tdomain = gui/501 [100006]
\truns = 3
\tpid = 4711
\tlast exit code = 78: EX_CONFIG
\tlast terminating signal = Abort trap: 6

\tevent triggers = {
\t\tother = {
\t\t\tpid = 1
\t\t}
\t}
\tspawn type = interactive (4)
}
"""


class Scripted:
    """Answers by verb, one after the other, the last one for ever; keeps what was asked."""

    def __init__(self, **answers: Sequence[int | tuple[int, str]]) -> None:
        self._answers = {verb.replace("_", "-"): list(codes) for verb, codes in answers.items()}
        self.asked: list[str] = []

    def __call__(self, arguments: Sequence[str]) -> Done:
        self.asked.append(" ".join(arguments))
        answers = self._answers[arguments[0]]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return Done(answer, "") if isinstance(answer, int) else Done(*answer)

    def verbs(self) -> list[str]:
        return [line.split()[0] for line in self.asked]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def launchctl(run: Scripted, clock: Clock | None = None) -> Launchctl:
    clock = clock or Clock()
    return Launchctl(run, label="x", uid=501, clock=lambda: clock.now, sleep=clock.sleep)


# -- domains ----------------------------------------------------------------------------------------------------------


def test_the_session_at_the_screen_is_taken_where_there_is_one() -> None:
    assert launchctl(Scripted(print=[0])).domain() == "gui/501"


@pytest.mark.parametrize("code", [112, 113, 125])
def test_over_ssh_without_it_the_users_own_domain_is_taken(code: int) -> None:
    assert launchctl(Scripted(print=[code])).domain() == "user/501"


def test_another_refusal_is_not_taken_for_a_missing_session() -> None:
    with pytest.raises(LaunchctlFailed, match="print gui/501 failed with 159: a sandbox forbids it; run omlxctl in"):
        launchctl(Scripted(print=[159])).domain()


def test_a_bootstrap_that_the_session_refuses_goes_to_the_users_domain() -> None:
    for code in (112, 125, 134):
        run = Scripted(bootstrap=[code, 0], print=[113])
        assert launchctl(run).bootstrap("gui/501", "/p") == "user/501"


def test_the_service_is_looked_for_in_both_domains() -> None:
    found = launchctl(Scripted(print=[113, (0, PRINTED)])).loaded()
    assert {domain: printed.pid for domain, printed in found.items()} == {"user/501": 4711}


# -- bootstrap --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 37])
def test_loaded_and_loaded_already_are_both_done(code: int) -> None:
    assert launchctl(Scripted(bootstrap=[code])).bootstrap("gui/501", "/p") == "gui/501"


def test_code_5_is_asked_about_and_tried_again_while_an_earlier_one_drains() -> None:
    run, clock = Scripted(bootstrap=[5, 5, 0], print=[113]), Clock()
    launchctl(run, clock).bootstrap("gui/501", "/p")
    assert run.verbs() == ["bootstrap", "print", "bootstrap", "print", "bootstrap"]
    assert clock.slept == [0.25, 0.5]


def test_code_5_for_what_is_loaded_all_the_same_is_done() -> None:
    assert launchctl(Scripted(bootstrap=[5], print=[(0, PRINTED)])).bootstrap("gui/501", "/p") == "gui/501"


def test_a_lasting_code_5_is_given_up_within_ten_seconds_and_names_login_items() -> None:
    run, clock = Scripted(bootstrap=[(5, "Bootstrap failed: 5: Input/output error\n")], print=[113]), Clock()
    with pytest.raises(LaunchctlFailed, match="Login Items") as caught:
        launchctl(run, clock).bootstrap("gui/501", "/p")
    assert "log show" in caught.value.advice
    assert sum(clock.slept) < 10


def test_a_disabled_service_is_enabled_and_loaded() -> None:
    run = Scripted(bootstrap=[119, 0], enable=[0], print=[113])
    launchctl(run).bootstrap("gui/501", "/p")
    assert run.asked[2] == "enable gui/501/x"


@pytest.mark.parametrize("code", [122, 150, 155, 64])
def test_what_trying_again_cannot_mend_is_not_tried_again(code: int) -> None:
    run = Scripted(bootstrap=[code], print=[113])
    with pytest.raises(LaunchctlFailed, match=f"failed with {code}"):
        launchctl(run).bootstrap("gui/501", "/p")
    assert run.verbs().count("bootstrap") == 1


# -- bootout, kickstart -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 36])
def test_a_bootout_is_over_when_the_service_is_no_longer_listed(code: int) -> None:
    run = Scripted(bootout=[code], print=[(0, PRINTED), (0, PRINTED), 113])
    launchctl(run).bootout("gui/501", exit_timeout_s=30)
    assert run.verbs() == ["bootout", "print", "print", "print"]


@pytest.mark.parametrize("code", [3, 113, 125])
def test_unloading_what_is_not_loaded_is_done(code: int) -> None:
    run = Scripted(bootout=[code])
    launchctl(run).bootout("gui/501", exit_timeout_s=30)
    assert run.verbs() == ["bootout"]


def test_a_bootout_that_does_not_end_is_given_up_after_launchds_own_time_out() -> None:
    clock = Clock()
    with pytest.raises(LaunchctlFailed, match=r"within 35 s; .* kill -9"):
        launchctl(Scripted(bootout=[0], print=[(0, PRINTED)]), clock).bootout("gui/501", exit_timeout_s=30)
    assert 35 <= clock.now < 36


def test_kickstart_kills_only_when_asked() -> None:
    run = Scripted(kickstart=[0])
    launchctl(run).kickstart("gui/501", kill=False)
    launchctl(run).kickstart("gui/501", kill=True)
    assert run.asked == ["kickstart gui/501/x", "kickstart -k gui/501/x"]
    with pytest.raises(LaunchctlFailed, match="not loaded, or macOS blocks it"):
        launchctl(Scripted(kickstart=[113])).kickstart("gui/501", kill=False)


# -- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code", [3, 5, 36, 37, 64, 108, 109, 110, 111, 112, 113, 119, 122, 124, 125, 134, 150, 155, 159]
)
def test_every_known_code_has_plain_words_and_something_to_do(code: int) -> None:
    meaning = exit_codes.meaning(code)
    assert meaning.what
    assert str(code) not in meaning.what
    assert meaning.advice


def test_an_unknown_code_says_how_to_look_it_up() -> None:
    assert "`launchctl error 147`" in exit_codes.meaning(147).advice


def test_only_an_end_that_was_asked_for_needs_no_words() -> None:
    assert exit_codes.meaning_of_end(0) is None
    for code in (1, 70, 78, 99):
        meaning = exit_codes.meaning_of_end(code)
        assert meaning is not None
        assert meaning.advice


def test_what_print_prints_is_read_at_its_first_level() -> None:
    assert parse_service(PRINTED) == Printed(
        state="running",
        pid=4711,
        path="/Users/me/Library/LaunchAgents/x.plist",
        runs=3,
        last_exit="78: EX_CONFIG",
        last_exit_code=78,
        last_signal="Abort trap: 6",
        arguments=("/venv/bin/python", "-m", "omlxd.daemon"),
        environment={"OMLXD_HOME": "/Users/me/.omlxd", "XPC_SERVICE_NAME": "x"},
    )


@pytest.mark.parametrize(
    "text", ["", "{", "}\n}\n}", "a = {\nb = {\n", "x = {\n\tpid = many\n\tlast exit code = (never exited)\n}"]
)
def test_whatever_it_prints_is_read_without_an_error(text: str) -> None:
    printed = parse_service(text)
    assert (printed.pid, printed.last_exit_code) == (None, None)


def test_the_record_of_disabled_services_is_read_in_both_of_its_spellings() -> None:
    text = 'disabled services = {\n\t"a" => disabled\n\t"b" => enabled\n\t"c" => true\n\t"d" => false\n}\n'
    assert parse_disabled(text) == {"a": True, "b": False, "c": True, "d": False}
