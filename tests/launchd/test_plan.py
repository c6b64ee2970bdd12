"""The plans: which steps each wish comes to, in every situation."""

from __future__ import annotations

from omlxd.launchd import plan
from omlxd.launchd.agent import Installed
from omlxd.launchd.plan import Bootout, Bootstrap, Enable, Kickstart, Remove, Situation, Write, described
from omlxd.launchd.printed import Printed

GUI, USER, PATH = "gui/501", "user/501", "/agents/x.plist"
INSTALLED = Installed(PATH, b"list", ("/venv/bin/python", "-m"), {"OMLXD_SOCKET": "/h/s"}, 30, on_demand=False)
ON_DEMAND = Installed(PATH, b"list", ("/venv/bin/python", "-m"), {"OMLXD_SOCKET": "/h/s"}, 40, on_demand=True)
RUNNING = Printed(
    state="running",
    pid=7,
    path=PATH,
    arguments=("/venv/bin/python", "-m"),
    environment={"OMLXD_SOCKET": "/h/s", "XPC_SERVICE_NAME": "x"},
)
STOPPED = Printed(state="not running", path=PATH, arguments=RUNNING.arguments, environment=RUNNING.environment)
STALE = Printed(state="running", pid=7, path=PATH, arguments=("/old/bin/python", "-m"), environment=RUNNING.environment)
UNREADABLE = Printed(pid=7)


def now(installed: Installed | None = INSTALLED, **loaded: Printed) -> Situation:
    return Situation(GUI, {{"gui": GUI, "user": USER}[kind]: printed for kind, printed in loaded.items()}, installed)


def install(now: Situation) -> list[plan.Step]:
    return list(plan.install(now, PATH, b"list", exit_timeout_s=35))


def test_installing_for_the_first_time_enables_before_it_loads() -> None:
    assert install(now(None)) == [Write(PATH, b"list"), Enable(GUI), Bootstrap(GUI, PATH)]


def test_installing_what_is_installed_and_runs_is_nothing() -> None:
    assert install(now(gui=RUNNING)) == []


def test_a_changed_file_is_put_in_place_while_nothing_is_loaded() -> None:
    changed = Installed(PATH, b"other", INSTALLED.arguments, INSTALLED.environment, 60, on_demand=False)
    assert install(now(changed, gui=RUNNING)) == [
        Bootout(GUI, 60),  # as long as the one that is loaded may take
        Write(PATH, b"list"),
        Enable(GUI),
        Bootstrap(GUI, PATH),
    ]


def test_one_loaded_in_another_domain_is_taken_out_there() -> None:
    assert install(now(user=RUNNING))[0] == Bootout(USER, 35)


def test_starting_does_what_is_missing_and_no_more() -> None:
    assert plan.start(now()) == [Enable(GUI), Bootstrap(GUI, PATH)]
    assert plan.start(now(gui=STOPPED)) == [Kickstart(GUI, kill=False)]
    assert plan.start(now(gui=RUNNING)) == []
    assert plan.start(now(ON_DEMAND, gui=STOPPED)) == []


def test_a_plain_restart_serves_only_what_is_loaded_as_the_file_says() -> None:
    assert plan.restart(now(gui=RUNNING)) == [Kickstart(GUI, kill=True)]
    for other in (STALE, UNREADABLE):  # kickstart -k would not read the file again
        assert plan.restart(now(gui=other)) == [Bootout(GUI, 30), Enable(GUI), Bootstrap(GUI, PATH)]


def test_loaded_in_both_domains_is_brought_down_to_one() -> None:
    assert plan.start(now(gui=RUNNING, user=RUNNING)) == [
        Bootout(GUI, 30),
        Bootout(USER, 30),
        Enable(GUI),
        Bootstrap(GUI, PATH),
    ]


def test_stopping_takes_it_out_everywhere_and_leaves_the_file() -> None:
    assert plan.stop(now(gui=RUNNING, user=STOPPED)) == [Bootout(GUI, 30), Bootout(USER, 30)]
    assert plan.stop(now()) == []


def test_uninstalling_removes_the_file_and_the_socket_that_launchd_leaves() -> None:
    assert plan.uninstall(now(gui=RUNNING)) == [Bootout(GUI, 30), Remove(PATH)]
    assert plan.uninstall(now(ON_DEMAND)) == [Remove(PATH), Remove("/h/s")]
    assert plan.uninstall(now(None)) == []
    assert plan.uninstall(now(None, gui=RUNNING)) == [Bootout(GUI, 30)]  # somebody removed the file alone


def test_each_step_is_shown_as_the_command_that_does_it() -> None:
    assert described(Bootstrap(GUI, PATH), "x") == f"launchctl bootstrap {GUI} {PATH}"
    assert described(Enable(GUI), "x") == "launchctl enable gui/501/x"
    assert described(Kickstart(GUI, kill=True), "x") == "launchctl kickstart -k gui/501/x"
    assert described(Kickstart(GUI, kill=False), "x") == "launchctl kickstart gui/501/x"
    assert described(Bootout(GUI, 30), "x").startswith("launchctl bootout gui/501/x ")
    assert described(Remove(PATH), "x") == f"rm -f {PATH}"
    assert described(Write(PATH, b"<plist>\n"), "x") == f"write {PATH} (mode 0600):\n<plist>"
