"""`omlxctl stdio`: bytes go through unchanged, and both ends notice when the other is done."""

import json
import subprocess

from tests.cli.running import Home
from tests.cli.serving import Daemon


def line(request_id: int, method: str, **params: object) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}).encode() + b"\n"


def test_the_end_of_standard_input_is_passed_on_and_the_last_answer_still_comes(home: Home, daemon: Daemon) -> None:
    outcome = home.run("stdio", stdin=line(1, "ping") + line(2, "ping"))
    assert (outcome.code, outcome.err) == (0, b"")
    assert sorted(json.loads(answer)["id"] for answer in outcome.out.splitlines()) == [1, 2]


def test_header_framing_goes_through_as_it_is(home: Home, daemon: Daemon) -> None:
    body = line(1, "ping").strip()
    outcome = home.run("stdio", stdin=b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
    assert outcome.out.startswith(b"Content-Length: ")
    assert outcome.out.endswith(b'"result":"pong","id":1}')


def test_megabytes_go_both_ways(home: Home, daemon: Daemon) -> None:
    text = "z" * 3_000_000
    outcome = home.run("stdio", stdin=line(1, "generate.complete", model="tiny", prompt=text))
    assert json.loads(outcome.out)["result"]["text"] == text


def test_a_daemon_that_ends_the_connection_ends_it_while_standard_input_stays_open(home: Home, daemon: Daemon) -> None:
    with home.start("stdio", stdin=subprocess.PIPE) as process:
        process.stdin.write(line(1, "ping"))
        process.stdin.flush()
        assert b"pong" in process.stdout.readline()
        daemon.stop()
        assert process.wait(30) == 0
        assert process.stderr.read() == b""


def test_a_reader_that_leaves_ends_it_and_cancels_what_runs(home: Home, daemon: Daemon) -> None:
    answer = daemon.answer()
    with home.start("stdio", stdin=subprocess.PIPE) as process:
        process.stdin.write(line(1, "generate.complete", model="tiny", prompt="x", stream=True))
        process.stdin.flush()
        answer.push("hello")
        assert b"hello" in process.stdout.readline()
        process.stdout.close()
        answer.push("world")
        assert process.wait(30) == 141
        assert process.stderr.read() == b""
    answer.wait_cancelled()
