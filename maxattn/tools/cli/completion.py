"""`maxattn completion`: prints a script with which a shell completes maxattn's command lines."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from string import Template

from maxattn.tools.cli import COMMANDS
from maxattn.tools.cli.config import keys, names_of
from maxattn.tools.cli.options import parser_of
from maxattn.tools.known_models import KNOWN_SHAPES

TARGETS = ("cpu", "v4", "v5e", "v5p", "v6e", "tpu7x", "A100", "H100", "H200", "B200", "GB200")
WORDS = Template("""\
_maxattn_words() {  # words for the command $$1 after the word $$2
  case "$$2" in
$options
  esac
  case "$$1" in
$commands
    *) echo "$names" ;;
  esac
}
""")
BASH = """\
_maxattn() {
  local line="${COMP_LINE:0:COMP_POINT}" given
  local cur="${line##* }"
  given=(${line%"$cur"})
  local command="${given[1]}" before="${given[${#given[@]}-1]}"
  COMPREPLY=($(compgen -W "$(_maxattn_words "$command" "$before")" -- "$cur"))
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
  if [[ $cur == *=* && $COMP_WORDBREAKS == *=* ]]; then
    COMPREPLY=("${COMPREPLY[@]#"${cur%"${cur##*=}"}"}")
  fi
}
complete -o default -F _maxattn maxattn
"""
ZSH = """\
_maxattn() {
  local -a known
  known=(${=$(_maxattn_words "${words[2]}" "${words[CURRENT-1]}")})
  (( CURRENT == 2 )) && known=(${=$(_maxattn_words "" "")})
  compadd -S '' -- ${(M)known:#*=}
  compadd -- ${known:#*=}
  (( CURRENT > 2 )) && _files
}
compdef _maxattn maxattn
"""


def run(args: argparse.Namespace) -> int:
    """Print the script of a shell."""
    print(script(args.shell), end="")
    return 0


def script(shell: str) -> str:
    """Return the script of bash, zsh or fish."""
    by_command = {name: " ".join(words_of(name)) for name in COMMANDS}
    by_option = {option: " ".join(words) for option, words in after_options().items()}
    if shell == "fish":
        return _fish(by_command, by_option)
    words = WORDS.substitute(
        options="\n".join(f'    {o}) echo "{w}"; return ;;' for o, w in by_option.items()),
        commands="\n".join(f'    {name}) echo "{w}" ;;' for name, w in by_command.items()),
        names=" ".join(COMMANDS),
    )
    return words + (BASH if shell == "bash" else ZSH)


def words_of(command: str) -> list[str]:
    """Return the words of a command: its options, and the values without an option."""
    parser, settings = parser_of(command), keys()
    words = [name for name in parser._option_string_actions if name.startswith("--")]
    places = {each.dest: each for each in parser._actions if not each.option_strings}
    if "keys" in places:
        return [*words, *settings]
    if "overrides" in places:
        words += [f"{key}={value}" for key, its in settings.items() for value in names_of(its)]
        for key, its in settings.items():
            is_number = not names_of(its) and "object" not in str(its.get("type"))
            words += [f"{key}="] if is_number else []
    if places.keys() & {"config", "shapes"}:
        words += KNOWN_SHAPES
    return [*words, *(word for each in places.values() for word in each.choices or ())]


def after_options() -> dict[str, list[str]]:
    """Return the values of the options that have a choice of names."""
    found = {"--shape": list(KNOWN_SHAPES), "--target": list(TARGETS)}
    for command in COMMANDS:
        actions = parser_of(command)._option_string_actions.items()
        found |= {o: list(each.choices) for o, each in actions if each.choices}
    return found


def _fish(by_command: Mapping[str, str], by_option: Mapping[str, str]) -> str:
    first = f"complete -c maxattn -n __fish_use_subcommand -f -a '{' '.join(COMMANDS)}'"
    lines = ["complete -c maxattn -e", first]
    before = "__fish_prev_arg_in"
    others = f"not {before} {' '.join(by_option)}"
    for name, words in by_command.items():
        seen = f"__fish_seen_subcommand_from {name}"
        lines.append(f"complete -c maxattn -n '{seen}; and {others}' -a '{words}'")
    for option, words in by_option.items():
        lines.append(f"complete -c maxattn -n '{before} {option}' -f -a '{words}'")
    return "\n".join(lines) + "\n"
