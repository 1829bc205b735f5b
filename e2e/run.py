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
import sys
import time

import checks
from engines import BLOCK_SIZE, Engine, Lab, Router, end_on_signals
from gap import Relay

PORT = 21000


def configuration(lab, engines):
    """The router's, with each way that KV events can come: connected to over ipc, relayed with gaps, bound over tcp."""
    lines = [
        f'listen = "127.0.0.1:{PORT + 10}"',
        "[router]",
        f"block_size = {BLOCK_SIZE}",
        # Small figures, so that prompts of hundreds of tokens take every path.
        'policy = "homing:append_tokens=1024:local_tokens=256:abs=1:rel=1.0"',
        "migrate = true",
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
        self.router.stop()
        if self.relay is not None:
            self.relay.stop()
        for engine in self.engines.values():
            engine.stop()

    def tokens(self, count):
        """Random token ids that are neither special nor bytes."""
        return [self.random.randrange(300, 8000) for _ in range(count)]


class Report:
    """A row for each thing that was checked."""

    def __init__(self):
        self.rows = []

    def row(self, check, what, holds, found):
        self.rows.append({"check": check, "what": what, "holds": bool(holds), "found": str(found)})
        print(f"{'ok  ' if holds else 'FAIL'} {check:<10} {what}: {found}", flush=True)

    def failed(self):
        return [row for row in self.rows if not row["holds"]]

    def table(self):
        width = {key: max([len(key)] + [len(row[key]) for row in self.rows]) for key in ("check", "what")}
        line = "{:<4} {:<%d} {:<%d} {}" % (width["check"], width["what"])
        rows = [line.format("ok" if row["holds"] else "FAIL", row["check"], row["what"], row["found"]) for row in self.rows]
        return "\n".join([line.format("", "check", "what", "found"), *rows])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--homing", required=True)
    parser.add_argument("--only", help="names of checks, with commas between them")
    arguments = parser.parse_args()
    end_on_signals()
    if not os.access(arguments.homing, os.X_OK):
        parser.error(f"--homing is `{arguments.homing}`, expected a program")
    lab = Lab(arguments.home, arguments.out)
    cluster, report = Cluster(lab, arguments.homing), Report()
    try:
        cluster.start()
        for name, check in checks.ALL:
            if arguments.only and name not in arguments.only.split(","):
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
