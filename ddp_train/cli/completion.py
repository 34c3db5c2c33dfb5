"""`ddp-train completion SHELL`: what TAB knows in a shell: commands, options of groups and keys. No process is started at a TAB."""

from pathlib import Path

from ddp_train import CONF
from ddp_train.cli.help import options
from ddp_train.config.command.commands import COMMANDS
from ddp_train.config.command.composition import parse
from ddp_train.config.spelling import nearest
from ddp_train.errors import DONE, UserError
from ddp_train.launch.job_runner import JobRunner

USAGE = """ddp-train completion bash|zsh|fish     [--config-dir=FOLDER]

  Prints the completion script for commands, groups and keys. Run it again after an update. For a project with its own conf/, run it there:

  bash   ddp-train completion bash > ~/.local/share/bash-completion/completions/ddp-train
         or in ~/.bashrc: eval "$(ddp-train completion bash)"
  zsh    ddp-train completion zsh > FOLDER/_ddp-train       FOLDER is one of $fpath, before compinit
  fish   ddp-train completion fish > ~/.config/fish/completions/ddp-train.fish
"""

_SCRIPTS = {
    "bash": """_ddp_train() {{
    local typed="${{COMP_LINE:0:COMP_POINT}}" words="{options} {keys}"
    [[ "$typed" == *" "*" "* ]] || words="{commands} $words"
    [[ "$typed" == *" runs "* && "$typed" != *" runs "*" "* ]] && words="{runs}"
    typed="${{typed##* }}"
    COMPREPLY=($(compgen -W "$words" -- "$typed"))
    [[ ${{#COMPREPLY[@]}} -eq 1 && "${{COMPREPLY[0]}}" == *= ]] && compopt -o nospace
    local before="${{typed%"${{typed##*=}}"}}"  # bash completes what follows the last =
    COMPREPLY=("${{COMPREPLY[@]#"$before"}}")
}}
complete -o bashdefault -o default -F _ddp_train ddp-train
""",
    "zsh": """#compdef ddp-train
_ddp_train() {{
    (( CURRENT == 2 )) && compadd -- {commands}
    (( CURRENT == 3 )) && [[ $words[2] == runs ]] && compadd -- {runs}
    compadd -- {options}
    compadd -S '' -- {keys}
    _files
}}
if [[ $funcstack[1] == _ddp-train ]]; then _ddp_train "$@"; else compdef _ddp_train ddp-train; fi
""",
    "fish": """complete -c ddp-train -n 'test (count (commandline -opc)) -eq 1' -a '{commands}'
complete -c ddp-train -n 'test (count (commandline -opc)) -eq 2; and __fish_seen_subcommand_from runs' -a '{runs}'
complete -c ddp-train -a '{options} {keys}'
""",
}


def complete(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train completion SHELL`: print what the shell needs."""
    args = parse(arguments)
    shell = str(args.overrides[0]) if len(args.overrides) == 1 else ""
    if shell not in _SCRIPTS:
        fix = f"ddp-train completion {nearest(shell, _SCRIPTS) or 'bash'}"
        raise UserError(happened=f"there is no completion for {shell or 'no shell'}", expected=", ".join(_SCRIPTS), fix=fix)
    known = [*options(CONF), *(options(Path(args.config_dir).absolute()) if args.config_dir is not None else [])]
    chosen = dict.fromkeys(f"{option.group}={option.name}" for option in known if option.group)
    keys = dict.fromkeys(f"{key.name}=" for option in known for key in option.keys)
    found = {"commands": COMMANDS, "runs": COMMANDS["runs"].words, "options": chosen, "keys": keys}
    print(_SCRIPTS[shell].format(**{name: " ".join(words) for name, words in found.items()}), end="")
    return DONE
