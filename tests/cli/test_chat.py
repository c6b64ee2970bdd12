"""`omlxctl chat`: a conversation, from a pipe and at a terminal."""

from omlxd.engine.api import ChatPrompt, GenerateRequest, Unsupported
from tests.cli.running import Home, Terminal
from tests.cli.serving import Daemon
from tests.fakes import FakeGeneration, answering, last_words, refusing


def messages(request: GenerateRequest) -> list[tuple[object, object]]:
    assert isinstance(request.prompt, ChatPrompt)
    return [(message["role"], message["content"]) for message in request.prompt.messages]


def loud(request: GenerateRequest) -> FakeGeneration:
    return answering(last_words(request).upper())


def test_each_line_of_a_pipe_is_a_message_sent_with_all_before_it(home: Home, daemon: Daemon) -> None:
    daemon.backend.script = loud
    outcome = home.run("chat", "tiny", stdin=b"one\n\ntwo\n")
    assert (outcome.code, outcome.text, outcome.err) == (0, "ONE\nTWO\n", b"")
    assert messages(daemon.backend.requests[-1]) == [("user", "one"), ("assistant", "ONE"), ("user", "two")]


def test_reset_forgets_all_but_the_system_message(home: Home, daemon: Daemon) -> None:
    home.run("chat", "--system", "Be brief.", stdin=b"one\n/reset\ntwo\n/quit\nthree\n")
    assert [messages(request) for request in daemon.backend.requests] == [
        [("system", "Be brief."), ("user", "one")],
        [("system", "Be brief."), ("user", "two")],
    ]


def test_json_is_the_conversation_as_one_document(home: Home, daemon: Daemon) -> None:
    daemon.backend.script = loud
    assert home.run("chat", "--json", stdin=b"one\n").document == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "ONE"}],
    }


def test_in_a_pipe_a_refusal_ends_the_session_with_code_1(home: Home, daemon: Daemon) -> None:
    daemon.backend.script = lambda request: refusing(Unsupported("chat", "the model has no chat template"))
    outcome = home.run("chat", stdin=b"one\ntwo\n")
    assert (outcome.code, len(outcome.errors)) == (1, 1)
    assert len(daemon.backend.requests) == 1


def test_an_unknown_slash_word_in_a_pipe_is_a_usage_error(home: Home, daemon: Daemon) -> None:
    assert home.run("chat", stdin=b"/rest\n").code == 2


class Session:
    """A chat at a terminal."""

    def __init__(self, home: Home) -> None:
        self.terminal = Terminal(home, "chat")
        self.terminal.wait_for(b">>> ")

    def say(self, line: bytes) -> bytes:
        """Types a line and gives what is shown before the next prompt."""
        start = len(self.terminal.seen)
        self.terminal.type(line + b"\r")
        self.terminal.wait_for(b">>> ", after=start)
        return self.terminal.seen[start:]

    def end(self) -> int:
        code = self.terminal.end()
        self.terminal.close()
        return code


def test_at_a_terminal_lines_are_edited_and_recalled(home: Home, daemon: Daemon) -> None:
    session = Session(home)
    assert b"helo" not in session.say(b"helo\x1b[Dl")[-10:]
    session.say(b"\x1b[A")  # the line before, once more
    session.terminal.type(b"\x04")
    assert session.end() == 0
    assert [last_words(request) for request in daemon.backend.requests] == ["hello", "hello"]


def test_ctrl_c_ends_the_answer_and_keeps_the_conversation(home: Home, daemon: Daemon) -> None:
    session = Session(home)
    answer = daemon.answer()
    session.terminal.type(b"count\r")
    answer.push("one two")
    session.terminal.wait_for(b"one two")
    start = len(session.terminal.seen)
    session.terminal.type(b"\x03")
    session.terminal.wait_for(b">>> ", after=start)
    answer.wait_cancelled()
    daemon.backend.script = loud
    assert b"GO ON" in session.say(b"go on")
    session.terminal.type(b"/quit\r")
    assert session.end() == 0
    assert messages(daemon.backend.requests[-1]) == [("user", "count"), ("assistant", "one two"), ("user", "go on")]


def test_ctrl_c_at_the_prompt_drops_the_line_and_not_the_session(home: Home, daemon: Daemon) -> None:
    session = Session(home)
    start = len(session.terminal.seen)
    session.terminal.type(b"half a line")
    session.terminal.wait_for(b"half a line", after=start)
    session.terminal.interrupt_until(b">>> ")
    session.say(b"whole")
    session.terminal.type(b"\x04")
    assert session.end() == 0
    assert [last_words(request) for request in daemon.backend.requests] == ["whole"]


def test_a_refusal_at_a_terminal_is_shown_and_the_message_taken_back(home: Home, daemon: Daemon) -> None:
    session = Session(home)
    daemon.backend.script = lambda request: refusing(Unsupported("pictures", "the model sees none"))
    assert b"error: pictures is not supported" in session.say(b"look")
    daemon.backend.script = loud
    session.say(b"talk")
    session.terminal.type(b"\x04")
    assert session.end() == 0
    assert messages(daemon.backend.requests[-1]) == [("user", "talk")]


def test_help_lists_the_commands(home: Home, daemon: Daemon) -> None:
    session = Session(home)
    shown = session.say(b"/help")
    assert all(word in shown for word in (b"/reset", b"/quit", b"Ctrl-C"))
    assert b"no command /rest" in session.say(b"/rest")
    session.terminal.type(b"\x04")
    assert session.end() == 0


def test_a_daemon_that_dies_ends_the_session_with_code_3(home: Home, daemon: Daemon) -> None:
    session = Session(home)
    daemon.stop()
    session.terminal.type(b"hello\r")
    assert session.end() == 3
