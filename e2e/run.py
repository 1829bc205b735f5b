"""The end-to-end test: `homing serve` before one prefill and two decode instances of a real vLLM.

    run.py --home FOLDER --out FOLDER --homing FILE

FOLDER is where `install.sh` put the environment; what is written and kept goes to `--out`: logs, and `summary.txt` and
`summary.json` with a row for each thing that was checked. Exit code 1 where one of them does not hold.

What is compared are greedy tokens: a turn that the router serves from KV that was cached, pulled, pulled in part, moved or
computed anew after a crash must have the very tokens that one vLLM alone gives. How much was cached, pulled and computed is
read from the engines' own metrics.
"""

import argparse
import json
import os
import random
import signal
import sys
import time

import agents
import checks
import clients
import joins
from engines import BLOCK_SIZE, Engine, Lab, Router, end_on_signals
from gap import Relay

PORT = 21000
# Four minutes where the cores are free, a quarter of an hour where they are busy; an hour means that something hangs.
DEADLINE_S = 3600

# In the order in which they run: the last ones kill and stop engines. With an agent, its name: it may not be installed.
CHECKS = [
    ("seed", checks.seed, None),
    ("append", checks.append, None),
    ("heavy", checks.heavy, None),
    ("fetch", checks.fetch, None),
    ("reseed", checks.reseed, None),
    ("chat", checks.chat, None),
    ("gaps", checks.gaps, None),
    ("migrate", checks.migrate, None),
    ("long", checks.long_session, None),
    ("openai", clients.openai_package, None),
    ("anthropic", clients.anthropic_package, None),
    ("bench", clients.bench_serve, None),
    ("mini-swe", agents.mini_swe_agent, "mini-swe-agent"),
    ("claude", agents.claude_code, "claude-code"),
    ("killed", checks.killed, None),
    ("joins", joins.joins, None),
]


def configuration(lab, engines):
    """The router's, with each way that KV events can come: connected to over ipc, relayed with gaps, bound over tcp."""
    lines = [
        f'listen = "127.0.0.1:{PORT + 10}"',
        # Texts are rendered and tokenised by the router itself, as the engines do; the routers of `joins` ask the engines.
        f'tokenizer = "{lab.model}"',
        "[router]",
        f"block_size = {BLOCK_SIZE}",
        # Small figures, so that prompts of hundreds of tokens take every path. Plans are priced with told speeds: the engines
        # share two cores, so what the router learns of which of them is slower is noise.
        'policy = "homing:append_tokens=1024:local_tokens=256:margin=0.05:margin_s=0:fetch_s=0:speed=h200"',
        "migrate = true",
        # A loaded engine is slow to answer, and is neither dead nor to be replaced for it: rows say where a turn went.
        "[router.clocks]",
        *(f"{name} = {{ secs = 300, nanos = 0 }}" for name in ("prefill_base", "fetch", "first_token_base", "stream_base")),
        "[clocks]",
        "probe_timeout = { secs = 20, nanos = 0 }",
    ]
    sources = {"p": engines["p"].events, "d0": f"tcp://127.0.0.1:{PORT + 22}", "d1": f"bind:{engines['d1'].events}"}
    for name, engine in engines.items():
        lines += [
            "[[workers]]",
            f'name = "{name}"',
            f'url = "{engine.url}"',
            f'role = "{"prefill" if name == "p" else "decode"}"',
            'kind = "vllm"',
            f'kv_events = "{sources[name]}"',
            f'kv_replay = "{engine.replay}"',
        ]
    return "\n".join(lines) + "\n"


class Cluster:
    """What the checks work with."""

    def __init__(self, lab, homing):
        self.homing, self.port = homing, PORT
        ipc = lambda name: f"ipc://{lab.folder}/{name}"
        self.lab = lab
        self.engines = {
            "p": Engine(lab, "p", PORT + 1, ipc("p.events"), ipc("p.replay")),
            "d0": Engine(lab, "d0", PORT + 2, ipc("d0.events"), ipc("d0.replay")),
            # Neither ipc nor a wildcard: this one connects to whoever listens there.
            "d1": Engine(lab, "d1", PORT + 3, f"tcp://127.0.0.1:{PORT + 23}", f"tcp://127.0.0.1:{PORT + 24}"),
        }
        self.router = Router(lab, homing, PORT + 10, configuration(lab, self.engines))
        self.relay = None
        self.random = random.Random(7)

    def start(self):
        started = time.monotonic()
        for engine in self.engines.values():
            engine.start()
        self.relay = Relay(self.engines["d0"].events, f"tcp://127.0.0.1:{PORT + 22}")
        for engine in self.engines.values():
            engine.ready()
        self.router.start()
        self.router.ready()
        self.router.until("all workers exact", lambda workers: all(w["state"] == "exact" for w in workers.values()))
        print(f"three engines and the router are ready after {time.monotonic() - started:.0f} s", flush=True)

    def stop(self):
        # All are told to end before any is waited for.
        for process in (self.router, *self.engines.values()):
            process.tell_to_end()
        if self.relay is not None:
            self.relay.stop()
        for process in (self.router, *self.engines.values()):
            process.stop()

    def tokens(self, count):
        """Random token ids that are neither special nor bytes."""
        return [self.random.randrange(300, 8000) for _ in range(count)]


class Report:
    """A row for each thing that was checked, or left out."""

    def __init__(self):
        self.rows = []

    def row(self, check, what, holds, found):
        self.rows.append({"check": check, "what": what, "holds": bool(holds), "found": str(found)})
        print(f"{'ok  ' if holds else 'FAIL'} {check:<10} {what}: {found}", flush=True)

    def leave_out(self, check, why):
        self.rows.append({"check": check, "what": "LEFT OUT", "holds": None, "found": why})
        print(f"---- {check:<10} LEFT OUT: {why}", flush=True)

    def failed(self):
        return [row for row in self.rows if row["holds"] is False]

    def table(self):
        width = {key: max([len(key)] + [len(row[key]) for row in self.rows]) for key in ("check", "what")}
        line = "{:<4} {:<%d} {:<%d} {}" % (width["check"], width["what"])
        marks = {True: "ok", False: "FAIL", None: "----"}
        rows = [line.format(marks[row["holds"]], row["check"], row["what"], row["found"]) for row in self.rows]
        return "\n".join([line.format("", "check", "what", "found"), *rows])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--homing", required=True)
    parser.add_argument("--only", help="names of checks, with commas between them")
    arguments = parser.parse_args()
    end_on_signals()
    # Whatever hangs, the run ends and says so.
    signal.alarm(DEADLINE_S)
    if not os.access(arguments.homing, os.X_OK):
        parser.error(f"--homing is `{arguments.homing}`, expected a program")
    lab = Lab(arguments.home, arguments.out)
    lab.clear_logs()
    cluster, report = Cluster(lab, arguments.homing), Report()
    try:
        cluster.start()
        for name, check, agent in CHECKS:
            if arguments.only and name not in arguments.only.split(","):
                continue
            if agent is not None and not (lab.home / "agents" / f"{agent}.installed").exists():
                report.leave_out(name, f"{agent} could not be installed")
                continue
            started = time.monotonic()
            try:
                check(cluster, lambda what, holds, found, name=name: report.row(name, what, holds, found))
            except Exception as error:
                report.row(name, "ran to its end", False, f"{type(error).__name__}: {error}")
            print(f"     {name} took {time.monotonic() - started:.0f} s", flush=True)
    finally:
        cluster.stop()
    (lab.folder / "summary.txt").write_text(report.table() + "\n")
    (lab.folder / "summary.json").write_text(json.dumps(report.rows, indent=1) + "\n")
    print(f"\n{report.table()}\n")
    sys.exit(1 if report.failed() else 0)


if __name__ == "__main__":
    main()
