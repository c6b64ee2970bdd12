"""The completion scripts, run by their shells where these are installed."""

import shutil
import subprocess

import pytest

from omlxd.cli.main import COMMANDS
from tests.cli.running import Home

FAKE = r"""omlxctl() { printf 'tiny\nmy model\n$(touch pwned)\n'; }"""


def complete_in_bash(home: Home, *words: str) -> list[str]:
    script = home.run("completion", "bash").text
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=(omlxctl {quoted}); COMP_CWORD={len(words)}; _omlxctl; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{FAKE}\n{ask}"], capture_output=True, text=True, cwd=home.env["HOME"]
    )
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_script_knows_every_command_and_every_flag(home: Home, shell: str) -> None:
    script = home.run("completion", shell).text
    for word in [*COMMANDS, "max-tokens", "no-start", "kv-bits"]:
        assert word in script
    assert home.run("completion", shell, "--json").document == {"shell": shell, "script": script}


@pytest.mark.parametrize(("shell", "check"), [("bash", "-n"), ("zsh", "-n"), ("fish", "--no-execute")])
def test_every_script_is_one_its_shell_can_read(home: Home, shell: str, check: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    file = home.path.with_name("script")
    file.write_text(home.run("completion", shell).text)
    done = subprocess.run([shell, check, str(file)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_bash_completes_commands_flags_words_and_models(home: Home) -> None:
    assert complete_in_bash(home, "comp") == ["complete", "completion"]
    assert complete_in_bash(home, "run", "--top") == ["--top-p", "--top-k"]
    assert complete_in_bash(home, "config", "") == ["show", "get", "set", "path"]
    assert complete_in_bash(home, "--quiet", "load", "ti") == ["tiny"]


def test_a_models_name_is_quoted_and_never_run(home: Home) -> None:
    assert complete_in_bash(home, "run", "") == ["tiny", r"my\ model", r"\$\(touch\ pwned\)"]
    assert not home.path.with_name("pwned").exists()
