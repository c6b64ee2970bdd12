"""What arrives on standard output and standard error: odd text, odd locales, terminals, readers that leave."""

import os

import pytest

from omlxd.engine.api import Delta, EngineFailed, GenerateRequest, Progress
from tests.cli.running import Home, Terminal
from tests.cli.serving import Daemon
from tests.fakes import FakeGeneration, answering

ODD = "line\nline\u2028para \U0001f469\u200d\U0001f680 漢字 e\u0301 tab\t bell\x07 esc\x1b[31mred\x9b0m\r del\x7f end"


def odd(request: GenerateRequest) -> FakeGeneration:
    return answering(ODD)


@pytest.mark.parametrize(
    "env", [{}, {"LANG": "C", "LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}, {"COLUMNS": "20"}, {"PYTHONUTF8": "0"}]
)
def test_odd_text_reaches_a_pipe_unchanged_in_every_locale(home: Home, daemon: Daemon, env: dict[str, str]) -> None:
    daemon.backend.script = odd
    outcome = home.run("run", "hi", env=env)
    assert (outcome.code, outcome.out, outcome.err) == (0, ODD.encode() + b"\n", b"")
    json = home.run("run", "hi", "--json", env=env)
    assert json.document["text"] == ODD
    assert json.out.isascii()


def test_a_message_in_another_script_reaches_standard_error_under_lang_c(home: Home, daemon: Daemon) -> None:
    outcome = home.run("run", "模型", "hi", env={"LC_ALL": "C"})
    assert outcome.code == 1
    assert "模型" in outcome.errors[0]


def test_on_a_terminal_the_model_cannot_drive_it(home: Home, daemon: Daemon) -> None:
    daemon.backend.script = odd
    terminal = Terminal(home, "run", "hi")
    assert terminal.end() == 0
    terminal.close()
    shown = terminal.seen.decode().replace("\r\n", "\n")
    assert "line\nline\u2028para \U0001f469\u200d\U0001f680 漢字 e\u0301 tab\t bell\u2407 esc\u241b[31mred" in shown
    assert "del\u2421 end\n" in shown
    assert not set(shown) & {"\x07", "\x1b", "\x9b", "\x7f", "\r"}


@pytest.mark.parametrize("command", [["ps"], ["models"], ["status"], ["doctor"], ["run", "hi"], ["config", "show"]])
def test_no_escape_codes_in_a_pipe_even_if_colour_is_asked_for(home: Home, daemon: Daemon, command: list[str]) -> None:
    outcome = home.run(*command, env={"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "TERM": "xterm-256color"})
    assert b"\x1b" not in outcome.out + outcome.err
    assert b"\r" not in outcome.out + outcome.err


def test_a_name_with_control_characters_cannot_drive_the_terminal(home: Home, daemon: Daemon) -> None:
    terminal = Terminal(home, "run", "\x1b[2Jevil", "hi")
    assert terminal.end() == 1
    terminal.close()
    assert b"\x1b[2J" not in terminal.seen


def test_on_a_terminal_progress_is_drawn_on_one_line_and_gone_before_the_answer(home: Home, daemon: Daemon) -> None:
    answer = daemon.answer()
    terminal = Terminal(home, "run", "hi")
    answer.push(Progress("load", 30_000_000, 120_000_000))
    terminal.wait_for(b"\rloading 25 % (30 MB of 120 MB)")
    answer.push(Progress("prefill", 512, 2048))
    terminal.wait_for(b"\rreading the prompt 25 % (512 of 2048 tokens)")
    answer.push("answer")
    terminal.wait_for(b"\ranswer")
    answer.finish()
    assert terminal.end() == 0
    terminal.close()
    assert b"\x1b" not in terminal.seen


def test_quiet_draws_no_progress(home: Home, daemon: Daemon) -> None:
    terminal = Terminal(home, "load", "tiny", "--quiet")
    assert terminal.end() == 0
    terminal.close()
    assert terminal.seen == b"loaded tiny (1 kB)\r\n"


def test_an_answer_cut_at_max_tokens_is_said_on_a_terminal(home: Home, daemon: Daemon) -> None:
    daemon.backend.script = lambda request: answering("a b", finish_reason="length")
    terminal = Terminal(home, "run", "hi")
    terminal.end()
    terminal.close()
    assert b"(cut after 2 tokens; --max-tokens allows more)" in terminal.seen


@pytest.mark.parametrize("env", [{}, {"PYTHONUNBUFFERED": "1"}])
def test_a_reader_that_leaves_ends_run_silently_and_cancels_the_request(
    home: Home, daemon: Daemon, env: dict[str, str]
) -> None:
    answer = daemon.answer()
    with home.start("run", "hi", env=env) as process:
        answer.push("hello")
        assert process.stdout.read(5) == b"hello"
        process.stdout.close()
        answer.push(" world")
        err = process.stderr.read()
    assert (process.returncode, err) == (141, b"")
    answer.wait_cancelled()


@pytest.mark.parametrize("command", [["models"], ["status"], ["run", "hi", "--json"], ["completion", "bash"]])
def test_a_pipe_closed_from_the_start_ends_any_command_silently(home: Home, daemon: Daemon, command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with home.start(*command, stdout=writer) as process:
        os.close(writer)
        err = process.stderr.read()
    assert (process.returncode, err) == (141, b"")


def test_a_pipe_that_does_not_block_gets_everything(home: Home, daemon: Daemon) -> None:
    text = "y" * 500_000  # more than a pipe holds
    daemon.backend.script = lambda request: answering(text)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with home.start("run", "hi", stdout=writer), open(reader, "rb") as pipe:
        os.close(writer)
        assert pipe.read() == text.encode() + b"\n"


def test_a_daemon_that_dies_under_a_request_is_code_3_and_one_line(home: Home, daemon: Daemon) -> None:
    answer = daemon.answer()
    with home.start("run", "hi") as process:
        answer.push("hel")
        assert process.stdout.read(3) == b"hel"
        daemon.stop()
        err = process.stderr.read().decode().splitlines()
    assert process.returncode == 3
    assert len(err) == 1
    assert "closed the connection" in err[0]


def test_an_error_after_half_an_answer_starts_on_a_line_of_its_own(home: Home, daemon: Daemon) -> None:
    def failing(request: GenerateRequest) -> FakeGeneration:
        generation = FakeGeneration()
        generation.push(Delta("half"))
        generation.fail(EngineFailed("tiny", "out of luck"))
        return generation

    daemon.backend.script = failing
    outcome = home.run("run", "hi")
    assert (outcome.code, outcome.out) == (1, b"half\n")
    assert outcome.errors == ["error: the engine of 'tiny' failed: out of luck; send the request again"]
