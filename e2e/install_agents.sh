#!/usr/bin/env bash
# Installs the coding agents of the end-to-end test beside the environment of `install.sh`: mini-swe-agent from the Python
# index, Claude Code from npm; about 800 MB, a minute or two.
#
#   install_agents.sh FOLDER     FOLDER/agents/NAME.installed says which version of an agent is there
#
# An agent that cannot be had is said so, and its checks are left out; the exit code is 0 all the same. What is there already
# stays.
set -uo pipefail

folder=${1:?the folder of the environment is expected}
agents=$folder/agents
mini=2.4.6
claude=2.1.328
mkdir -p "$agents"

is_there() { [ "$(cat "$agents/$1.installed" 2>/dev/null)" = "$2" ]; }
unavailable() {
  rm -f "$agents/$1.installed"
  printf '\n%s\n* %s CANNOT BE HAD, ITS CHECKS ARE LEFT OUT: %s\n%s\n\n' "$line" "$1" "$2" "$line"
}
line=$(printf '*%.0s' {1..78})

if ! is_there mini-swe-agent "$mini"; then
  uv=$folder/venv/bin/uv
  # Its own environment: what it depends on and what vLLM depends on need not agree.
  if "$uv" venv --quiet --clear --python "$folder/venv/bin/python" "$agents/venv" \
    && timeout 400 "$uv" pip install --quiet --python "$agents/venv/bin/python" "mini-swe-agent==$mini"; then
    "$uv" cache clean --quiet || true
    printf '%s' "$mini" > "$agents/mini-swe-agent.installed"
  else
    unavailable mini-swe-agent "the Python index does not deliver mini-swe-agent $mini"
  fi
fi

if ! is_there claude-code "$claude"; then
  if ! command -v npm >/dev/null; then
    unavailable claude-code "there is no npm"
  elif timeout 400 npm install --prefix "$agents" --no-save --no-audit --no-fund --loglevel=error "@anthropic-ai/claude-code@$claude" \
    && HOME=$agents "$agents/node_modules/.bin/claude" --version >/dev/null; then
    printf '%s' "$claude" > "$agents/claude-code.installed"
  else
    unavailable claude-code "npm does not deliver claude-code $claude, or it does not start here"
  fi
fi
exit 0
