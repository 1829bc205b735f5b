"""Real coding agents in front of the router: mini-swe-agent and Claude Code, a few turns each with the random model.

The model says noise and never calls a tool, so each agent goes on as it does with a model that misbehaves: mini-swe-agent tells
it what a call looks like, Claude Code asks it to go on where the limit of tokens cut it. That is a conversation of
several turns as an agent makes it: its own system prompt, tools and history. What is checked is that the router caused no
error, and that each later turn of the main conversation was appended.

An agent sees nothing of the environment that the test runs in, has a home folder of its own, and a key that opens nothing.
"""

import os
import shutil
import subprocess

from clients import Turns, is_appended
from engines import MODEL

# Several turns on two busy cores, the first with a prompt of thousands of tokens.
AGENT_TIMEOUT_S = 1200
TASK = "Say what is in this folder."


def run(cluster, name, command, variables, goes_on=False):
    """Runs an agent in folders of its own, the same again where it goes on; what it printed is kept."""
    home, work = cluster.lab.folder / f"{name}.home", cluster.lab.folder / f"{name}.work"
    if not goes_on:
        for folder in (home, work):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        (work / "a.py").write_text("def f():\n    return 1\n")
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", "TERM": "dumb", "NO_COLOR": "1", **variables}
    with open(cluster.lab.folder / f"{name}.log", "ab" if goes_on else "wb") as log:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=work, env=environment, timeout=AGENT_TIMEOUT_S, check=False)


def judge(row, turns, client, least):
    """What holds of every agent's turns."""
    of_agent = [turn for turn in turns.now() if turn["client"] == client]
    row("it is recognised", len(of_agent) >= least and len(of_agent) == len(turns.now()), f"{len(of_agent)} of {len(turns.now())} turns")
    row("no turn failed", turns.errors() == [], turns.errors())
    conversations = turns.conversations()
    main = max(conversations.values(), key=len, default=[])
    row("its main conversation stays at home", len(main) >= least and is_appended(main), conversations)
    breaks = [(turn.get("prefix_break"), turn["prefix_lost_tokens"]) for turn in of_agent if turn.get("prefix_break")]
    row("its prompts repeat themselves", breaks == [], breaks)


def mini_swe_agent(cluster, row):
    """mini-swe-agent: chat completions with a tool, without a stream."""
    turns = Turns(cluster)
    command = [str(cluster.lab.home / "agents" / "venv" / "bin" / "mini"), "-m", f"openai/{MODEL}", "-y", "--exit-immediately", "-t", TASK]
    command += ["-c", "mini.yaml", "-c", "model.model_kwargs.max_tokens=48", "-c", "agent.step_limit=5"]
    command += ["-c", "agent.max_consecutive_format_errors=0", "-o", "trajectory.json"]
    variables = {
        "OPENAI_API_KEY": "none",
        "OPENAI_BASE_URL": f"{cluster.router.url}/v1",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": str(cluster.lab.folder / "mini.home"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    run(cluster, "mini", command, variables)
    judge(row, turns, "mini-swe-agent", 4)


def claude_code(cluster, row):
    """Claude Code: Anthropic's Messages with streams, its own tools and system prompt; a second run goes on with the first."""
    turns = Turns(cluster)
    command = [str(cluster.lab.home / "agents" / "node_modules" / ".bin" / "claude"), "--tools", "Bash,Read,Edit", "--print"]
    variables = {
        "ANTHROPIC_BASE_URL": cluster.router.url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": MODEL,
        **{f"ANTHROPIC_DEFAULT_{size}_MODEL": MODEL for size in ("HAIKU", "SONNET", "OPUS")},
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "48",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "API_TIMEOUT_MS": str(AGENT_TIMEOUT_S * 1000),
    }
    run(cluster, "claude", [*command, TASK], variables)
    row("its first run took several turns", len(turns.now()) >= 3, len(turns.now()))
    run(cluster, "claude", [*command, "And what does a.py do?", "--continue"], variables, goes_on=True)
    judge(row, turns, "claude-code", 6)
