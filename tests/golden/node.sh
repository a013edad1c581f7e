#!/usr/bin/env bash
# Starts one node of clusterjob job train-abc234. CLUSTERJOB_NODE_RANK must be the node's rank.

export CLUSTERJOB_JOB_ID=train-abc234
export CLUSTERJOB_JOB_DIR='/home/o'"'"'neil/.local/state/clusterjob/jobs/train-abc234'
export CLUSTERJOB_TOKEN_FILE='/home/o'"'"'neil/.local/state/clusterjob/jobs/train-abc234/token'
export CLUSTERJOB_ATTEMPT=${CLUSTERJOB_ATTEMPT:-0}
export CLUSTERJOB_NNODES=2
export CLUSTERJOB_MASTER_ADDR=127.0.0.1

# A node that cannot start its agent writes the reason to a file; the other nodes' agents read it and do not wait.
note() {
  local end="$CLUSTERJOB_JOB_DIR/ends/node$CLUSTERJOB_NODE_RANK"
  [ "${CLUSTERJOB_ATTEMPT:-0}" = 0 ] || end+=".attempt$CLUSTERJOB_ATTEMPT" # the job was queued again
  end+=.refused
  [ -e "$end" ] || { printf '%s\n%s: %s\n' "$1" "${CLUSTERJOB_HOST:-${SLURMD_NODENAME:-$(uname -n)}}" "$2" > "$end.part" && mv -- "$end.part" "$end"; }
}
refuse() {
  trap - EXIT
  note "$1" "$2"
  printf 'clusterjob: %s\n' "$2" >&2
  exit "$(( $1 ? $1 : 1 ))"
}
# No agent runs during the setup lines: this watcher ends them if the shell is killed.
watch() {
  local stat
  while sleep 0.5; do
    read -r -a stat < "/proc/$BASHPID/stat" # fields: pid (bash) state parent; a killed shell is not the parent any more
    [ "${stat[3]}" = $$ ] || { note 137 'the script was killed in its setup lines'; break; }
  done
  kill -KILL 0
}
watch < /dev/null &
CLUSTERJOB_WATCHER=$! # started before the trap is set: a subshell would inherit the trap
CLUSTERJOB_DOING='the script ended early'
trap 'refuse "$?" "$CLUSTERJOB_DOING"' EXIT

export NCCL_DEBUG=INFO
export GREETING='it'"'"'s "$HOME"
and more'
cd -- '/data/my project' || refuse 1 'the working directory /data/my project cannot be entered'
[ ! "$OLDPWD" -ef . ] || cd -- "$OLDPWD" # the submitter's own path of it, such as a link: $PWD keeps it
export CLUSTERJOB_CODE_DIR=$PWD
CLUSTERJOB_DOING='a setup line failed: module load cuda/12'
{ :
module load cuda/12
} < /dev/null || refuse "$?" "$CLUSTERJOB_DOING"
CLUSTERJOB_DOING='a setup line failed: source "$HOME/venv/bin/activate"  # a comment'
{ :
source "$HOME/venv/bin/activate"  # a comment
} < /dev/null || refuse "$?" "$CLUSTERJOB_DOING"
{ kill "$CLUSTERJOB_WATCHER" && wait "$CLUSTERJOB_WATCHER"; } 2> /dev/null || :

CLUSTERJOB_DOING='there is no interpreter /opt/py thon/bin/python3'
command -v -- '/opt/py thon/bin/python3' > /dev/null || refuse 127 "$CLUSTERJOB_DOING"
export PYTHONPATH="$CLUSTERJOB_JOB_DIR/clusterjob-node.pyz${PYTHONPATH:+:$PYTHONPATH}"
CLUSTERJOB_SECRETS_FILE=${CLUSTERJOB_TOKEN_FILE%/*}/secrets
[ ! -e "$CLUSTERJOB_SECRETS_FILE" ] || export CLUSTERJOB_SECRETS_FILE
exec '/opt/py thon/bin/python3' "$CLUSTERJOB_JOB_DIR/clusterjob-node.pyz" --nproc-per-node 4 --lifeline --no-echo train.py --lr 0.1 'a b' ''
