"""The command `completion`: the script of each shell, which asks for candidates on each TAB.

The scripts run ``clusterjob __complete SHELL WORD...``, as those of docker and gh do. The answer is
one candidate per line, in zsh and fish with a description after a tab; or `FILES` alone.
"""

from __future__ import annotations

from typing import Annotated

import typer

from clusterjob.errors import UsageError

REQUEST = "__complete"
FILES = ":files"  # the shell completes names of files

_BASH = """\
# Completion of clusterjob in bash 4.4 or later. In ~/.bashrc:
#   source <(clusterjob completion bash)
_clusterjob() {
  local -a found
  mapfile -t found < <(
    clusterjob __complete bash "$COMP_WORDBREAKS" "${COMP_LINE:0:COMP_POINT}" 2>/dev/null
  )
  COMPREPLY=()
  if [[ ${found[0]-} == ":files" ]]; then
    compopt -o default
  else
    COMPREPLY=("${found[@]}")
    if [[ ${#found[@]} == 1 && ${found[0]} == *[:=,] ]]; then compopt -o nospace; fi
  fi
}
complete -o nosort -F _clusterjob clusterjob
"""

_ZSH = """\
#compdef clusterjob
# Completion of clusterjob in zsh. In ~/.zshrc, after compinit:
#   source <(clusterjob completion zsh)
_clusterjob() {
  local -a found values shown open_values open_shown
  local line
  found=("${(@f)$(
    clusterjob __complete zsh "${(@Q)words[1,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null
  )}")
  if [[ $found[1] == ':files' ]]; then
    _files
    return
  fi
  for line in "${found[@]}"; do
    [[ -n $line ]] || continue
    if [[ ${line%%$'\\t'*} == *[:=,] ]]; then
      open_values+=("${line%%$'\\t'*}")
      open_shown+=("${line/$'\\t'/  -- }")
    else
      values+=("${line%%$'\\t'*}")
      shown+=("${line/$'\\t'/  -- }")
    fi
  done
  compadd -V clusterjob -d shown -a values
  compadd -V clusterjob -S '' -d open_shown -a open_values
}
if [[ $funcstack[1] == _clusterjob ]]; then
  _clusterjob "$@"
else
  compdef _clusterjob clusterjob
fi
"""

_FISH = """\
# Completion of clusterjob in fish. In ~/.config/fish/config.fish:
#   clusterjob completion fish | source
function __clusterjob_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l found (clusterjob __complete fish $words "$current" 2>/dev/null)
    if test "$found[1]" = :files
        __fish_complete_path "$current"
    else
        printf '%s\\n' $found
    end
end
complete -c clusterjob -e
complete -c clusterjob -f -k -a '(__clusterjob_complete)'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> int:
    """Print a script that completes commands, options and values in a shell.

    It completes job ids (newest first), profiles, partitions, hosts and states.
    """
    if shell not in SCRIPTS:
        raise UsageError(f"there is no completion for {shell!r}", f"use {', '.join(SCRIPTS)}")
    print(SCRIPTS[shell], end="")
    return 0
