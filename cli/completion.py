"""`omlxctl completion bash|zsh|fish`: a script that completes commands, flags and model names.

Made from the commands' own parsers, so it knows every flag there is. Model names are asked from the daemon at the
moment of completing, and only from one that runs already. Main thread only.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from omlxd.cli.context import Context
from omlxd.cli.errors import DONE
from omlxd.cli.main import COMMANDS, command_parser
from omlxd.cli.parser import Parser

_NAMES = "omlxctl models --names --no-start --quiet 2>/dev/null"
_TAKE_A_MODEL = ("run", "chat", "complete", "load", "unload", "tokenize", "bench")


class Completion:
    """The script on standard output; its first lines say how to use it."""

    def arguments(self, parser: Parser) -> None:
        parser.add_argument("shell", choices=list(_WRITERS))

    def run(self, context: Context, given: argparse.Namespace) -> int:
        script = _WRITERS[given.shell]()
        if context.console.json:
            context.console.document({"shell": given.shell, "script": script})
        else:
            context.console.write(script)
        return DONE


def _declared() -> Mapping[str, Sequence[argparse.Action]]:
    return {name: command_parser(name)[1].declared for name in COMMANDS}


def _flags(actions: Sequence[argparse.Action]) -> list[str]:
    return [flag for action in actions for flag in action.option_strings if flag.startswith("--")]


def _words(actions: Sequence[argparse.Action]) -> list[str]:
    """What a command takes in place of a flag, where that is one of a few words."""
    return [str(word) for action in actions if not action.option_strings for word in action.choices or ()]


def _bash() -> str:
    cases = "\n".join(
        f'        {name}) flags="{" ".join(_flags(actions))}"; words="{" ".join(_words(actions))}" ;;'
        for name, actions in _declared().items()
    )
    # No compgen -W: it expands its words, and a model's name could hold a command.
    return f"""\
# Completion of omlxctl for bash. Use it with: source <(omlxctl completion bash)
_omlxctl() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" command="" word flags="" words="{" ".join(COMMANDS)}"
    COMPREPLY=()
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        if [[ "$word" != -* ]]; then command="$word"; break; fi
    done
    case "$command" in
{cases}
    esac
    if [[ "$current" == -* ]]; then words="$flags"; fi
    words="${{words// /$'\\n'}}"
    case "$current:$command" in
        -*) ;;
        {"|".join("*:" + name for name in _TAKE_A_MODEL)}) words="$({_NAMES})" ;;
    esac
    while IFS= read -r word; do
        if [[ -n "$word" && "$word" == "$current"* ]]; then COMPREPLY+=("$(printf %q "$word")"); fi
    done <<< "$words"
}}
complete -o default -F _omlxctl omlxctl
"""


def _zsh() -> str:
    cases = []
    for name, actions in _declared().items():
        words = " ".join(_words(actions))
        cases.append(f"        {name}) flags=({' '.join(_flags(actions))}); words_=({words}) ;;")
    summaries = "\n".join(f"        '{name}:{_single(summary)}'" for name, (_, _, summary) in COMMANDS.items())
    return f"""\
#compdef omlxctl
# Completion of omlxctl for zsh. Use it with: source <(omlxctl completion zsh)
_omlxctl() {{
    local command="" word
    local -a commands flags words_
    commands=(
{summaries}
    )
    for word in "${{(@)words[2,CURRENT-1]}}"; do
        if [[ "$word" != -* ]]; then command="$word"; break; fi
    done
    if [[ -z "$command" ]]; then _describe command commands; return; fi
    case "$command" in
{chr(10).join(cases)}
    esac
    case "$command" in
        {"|".join(_TAKE_A_MODEL)}) words_=("${{(@f)$({_NAMES})}}") ;;
    esac
    if [[ "${{words[CURRENT]}}" == -* ]]; then compadd -- $flags; else compadd -- $words_; _files; fi
}}
if [[ "$funcstack[1]" == _omlxctl ]]; then _omlxctl "$@"; else compdef _omlxctl omlxctl; fi
"""


def _fish() -> str:
    lines = [
        "# Completion of omlxctl for fish. Use it with: omlxctl completion fish | source",
        *(
            f"complete -c omlxctl -n __fish_use_subcommand -f -a {name} -d '{_single(summary)}'"
            for name, (_, _, summary) in COMMANDS.items()
        ),
    ]
    for name, actions in _declared().items():
        seen = f"complete -c omlxctl -n '__fish_seen_subcommand_from {name}'"
        for action in actions:
            takes = "" if action.nargs == 0 else " -r"
            lines += [
                f"{seen} -l {flag[2:]}{takes} -d '{_single(action.help or '')}'"
                for flag in action.option_strings
                if flag.startswith("--")
            ]
        words = " ".join(_words(actions))
        if words:
            lines.append(f"{seen} -f -a '{words}'")
    lines += [
        f"complete -c omlxctl -n '__fish_seen_subcommand_from {name}' -f -a '({_NAMES})'" for name in _TAKE_A_MODEL
    ]
    return "\n".join(lines) + "\n"


def _single(text: str) -> str:
    """`text` for inside single quotes of zsh and fish."""
    return text.replace("'", "’").replace("\\", "/")


_WRITERS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
