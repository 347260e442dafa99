"""`msprobe-megatron completion`: commands, flags and their values on the Tab key."""

from __future__ import annotations

import argparse
import json

from msprobe_megatron.cli.commands import COMMANDS, OK

HELP = "print the completion for a shell: commands, flags, values"
EXAMPLE = "msprobe-megatron completion bash > ~/.msprobe_completion; source ~/.msprobe_completion"
SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that completes")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    words = {name: _words(name) for name in COMMANDS}
    text = _fish(words) if arguments.shell == "fish" else _bash(words)
    if arguments.shell == "zsh":
        text = f"autoload -U +X bashcompinit && bashcompinit\n{text}"
    print(json.dumps({"shell": arguments.shell, "text": text}) if arguments.json else text)
    return OK


def _words(name: str) -> list[str]:
    """The flags of a command and the words that its arguments accept."""
    from msprobe_megatron.cli.entry import command_parser

    found: list[str] = []
    for action in command_parser(name)._actions:
        found += [option for option in action.option_strings if option.startswith("--")]
        found += [str(choice) for choice in action.choices or ()]
    return sorted(dict.fromkeys(found))


def _bash(words: dict[str, list[str]]) -> str:
    cases = "\n".join(f"        {name}) words='{' '.join(known)}' ;;" for name, known in words.items())
    return f"""\
_msprobe_megatron() {{
    local words current=${{COMP_WORDS[COMP_CWORD]}}
    case ${{COMP_CWORD}}:${{COMP_WORDS[1]}} in
        1:*) words='{" ".join(words)} --help --version' ;;
        *) case ${{COMP_WORDS[1]}} in
{cases}
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _msprobe_megatron msprobe-megatron"""


def _fish(words: dict[str, list[str]]) -> str:
    lines = [f"complete -c msprobe-megatron -n __fish_use_subcommand -a '{' '.join(words)}'"]
    for name, known in words.items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        flags = [f"complete -c msprobe-megatron {seen} -l {word[2:]}" for word in known if word.startswith("--")]
        values = [word for word in known if not word.startswith("--")]
        lines += [*flags, *([f"complete -c msprobe-megatron {seen} -a '{' '.join(values)}'"] if values else [])]
    return "\n".join(lines)
