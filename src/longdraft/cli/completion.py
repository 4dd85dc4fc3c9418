"""``longdraft completion``: a script for the shell. All words are in it, so completing starts no Python."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from longdraft.cli import console


class Shell(str, Enum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(
    context: typer.Context,
    shell: Annotated[Shell | None, typer.Argument(help="For which shell.", show_default="that of $SHELL")] = None,
) -> None:
    """Print a completion script: eval "$(longdraft completion)" in ~/.bashrc or ~/.zshrc; for fish, | source."""
    name = Path(os.environ.get("SHELL", "bash")).name
    kind = shell or (Shell(name) if name in Shell.__members__ else Shell.bash)
    verbs = verbs_of(context.find_root().command)
    console.line(fish(verbs) if kind is Shell.fish else bash(verbs, zsh=kind is Shell.zsh))


def verbs_of(command: Any, prefix: str = "") -> dict[str, dict[str, list[str] | None]]:
    """Verb, in one word or two -> its flags -> their values; None: no value, []: a file or anything else."""
    found: dict[str, dict[str, list[str] | None]] = {}
    if prefix or not hasattr(command, "commands"):
        flags = found[prefix] = {}
        for parameter in command.params:
            for flag in [*parameter.opts, *parameter.secondary_opts] if parameter.param_type_name == "option" else []:
                flags[flag] = None if parameter.is_flag else _values(parameter)
        flags["--help"] = None
    for name in command.list_commands(None) if hasattr(command, "commands") else ():
        found |= verbs_of(command.get_command(None, name), f"{prefix} {name}".strip())
    return found


def _values(parameter: Any) -> list[str]:
    from longdraft.methods import METHODS

    if parameter.name in ("method", "methods"):
        return sorted(METHODS)
    # typer's own parameters keep the annotation; earlier ones were click's.
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(each.value) for each in kind]
    return list(getattr(getattr(parameter, "type", None), "choices", ()))


def bash(verbs: dict[str, dict[str, list[str] | None]], zsh: bool = False) -> str:
    cases, values = [], []
    for verb, flags in verbs.items():
        cases.append(f'    "{verb}") flags="{" ".join(flags)}" ;;')
        for flag, choices in flags.items():
            if choices is not None and (line := f'    {flag}) values="{" ".join(choices)}" ;;') not in values:
                values.append(line)
    words = " ".join(dict.fromkeys(word for verb in verbs for word in verb.split()[:1]))
    head = "autoload -U +X compinit && compinit -u; autoload -U +X bashcompinit && bashcompinit\n" if zsh else ""
    seconds = sorted({verb.split()[0] for verb in verbs if " " in verb})
    second = "\n".join(
        f'    {word}) second="{" ".join(v.split()[1] for v in verbs if v.startswith(word + " "))}" ;;'
        for word in seconds
    )
    newline = "\n"
    return f"""{head}_longdraft() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" verb="${{COMP_WORDS[1]}}"
  local flags="" values="-" second=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{words} --help --version" -- "$word")); return
  fi
  case "$verb" in
{second}
  esac
  if [ "$COMP_CWORD" -eq 2 ] && [ -n "$second" ] && [ "${{word#-}}" = "$word" ]; then
    COMPREPLY=($(compgen -W "$second" -- "$word")); return
  fi
  if [ -n "$second" ] && [[ " $second " == *" ${{COMP_WORDS[2]}} "* ]]; then verb="$verb ${{COMP_WORDS[2]}}"; fi
  case "$verb" in
{newline.join(cases)}
  esac
  case "$before" in
{newline.join(values)}
  esac
  if [ "$values" != "-" ]; then
    COMPREPLY=($(compgen -f -- "$word"))
    if [ -n "$values" ]; then COMPREPLY=($(compgen -W "$values" -- "$word")); fi
  else
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
  fi
}}
complete -o filenames -F _longdraft longdraft"""


def fish(verbs: dict[str, dict[str, list[str] | None]]) -> str:
    lines = ["complete -c longdraft -f"]
    for word in dict.fromkeys(verb.split()[0] for verb in verbs):
        lines.append(f"complete -c longdraft -n __fish_use_subcommand -a {word}")
    for verb, flags in verbs.items():
        seen = " ; and ".join(f"__fish_seen_subcommand_from {word}" for word in verb.split())
        if " " in verb:
            first, last = verb.split()
            lines.append(f"complete -c longdraft -n '__fish_seen_subcommand_from {first}' -a {last}")
        for flag, choices in flags.items():
            name = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            more = "" if choices is None else f" -x -a '{' '.join(choices)}'" if choices else " -r -F"
            lines.append(f"complete -c longdraft -n '{seen}' {name}{more}")
    return "\n".join(lines)
