"""vLLM instances and the router as processes: started, waited for, asked, ended.

Every process is the leader of a group of its own and dies with this one, so that nothing is left behind whatever happens.
Nothing listens on anything but the loopback address.
"""

import ctypes
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

# Deadlines say that something hangs, not that it is slow: the cores are shared, and a machine may be three times as slow as
# where these were seen. Three engines that start together on two busy cores took four minutes.
START_TIMEOUT_S = 1200
# NIXL was seen to stall for seconds under load, a prefill of thousands of tokens takes many.
ANSWER_TIMEOUT_S = 900
# What should follow at once.
SOON_S = 240
BLOCK_SIZE = 32
MODEL = "m"
# Coding agents open with system prompt and tools of 10,000 tokens and more.
CONTEXT = 32768

# A field of a log line.
FIELD = re.compile(r'(\w+)=(?:"((?:[^"\\]|\\.)*)"|(\S+))')
# What the line of a turn has.
TURN = ": turn request="

# What an engine's metrics say of its prompts' tokens, by where their KV came from.
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


def die_with_parent():
    """Asks the kernel for a SIGKILL when the process that started this one ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def get(url, timeout_s=SOON_S):
    """The body of a page."""
    with urllib.request.urlopen(url, timeout=timeout_s) as answer:
        return answer.read().decode()


def post(url, body=None, headers=None, timeout_s=ANSWER_TIMEOUT_S):
    """Headers and body of a JSON answer; an error answer is raised with what it says."""
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text = answer.read().decode()
            return answer.headers, json.loads(text) if text else {}
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url} answered {error.code}: {error.read().decode()[:500]}") from error


def stream(url, body, headers=None):
    """The events of a streamed answer, one by one, after its headers."""
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})})
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
        yield answer.headers
        for line in answer:
            line = line.decode().strip()
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[len("data: ") :])


def samples(page):
    """Samples of a metrics page: name with labels to value."""
    found = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name] = float(value)
    return found


class Process:
    """A process group."""

    def __init__(self, name, command, log, environment=None):
        self.name, self.command, self.log, self.environment = name, command, pathlib.Path(log), environment
        self.process = None

    def start(self):
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.log.parent,
                # A group, not a session: a session of its own would not share the priority that the whole run was given.
                process_group=0,
                preexec_fn=die_with_parent,
            )

    def is_running(self):
        return self.process is not None and self.process.poll() is None

    def kill(self, how=signal.SIGKILL):
        """Ends the whole group as a crash does."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, how)
        except ProcessLookupError:
            pass
        self.process.wait()

    def tell_to_end(self):
        """Asks the group to end, and does not wait."""
        if self.is_running():
            os.killpg(self.process.pid, signal.SIGTERM)

    def stop(self):
        """Ends the group, kindly first."""
        if not self.is_running():
            self.kill()
            return
        self.tell_to_end()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def wait_for(self, url, timeout_s=START_TIMEOUT_S):
        """Waits until a page answers."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.is_running():
                raise RuntimeError(f"{self.name} ended while it was started:\n{self.tail()}")
            try:
                get(url, timeout_s=5)
                return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"{self.name} did not answer within {timeout_s} s:\n{self.tail()}")

    def tail(self, lines=40):
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Engine(Process):
    """A vLLM on CPU, with NIXL over loopback and, where they have a socket, KV events."""

    def __init__(self, lab, name, port, events=None, replay=None, model=MODEL, options=()):
        self.port, self.events, self.replay, self.model = port, events, replay, model
        self.url = f"http://127.0.0.1:{port}"
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        publisher = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": events,
            "replay_endpoint": replay,
            "topic": f"kv@{name}@{MODEL}",
        }
        # Not the `vllm` script: it looks for a distribution of another name.
        command = [lab.python, "-m", "vllm.entrypoints.openai.api_server", "--model", lab.model]
        command += ["--served-model-name", model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", str(CONTEXT), "--block-size", str(BLOCK_SIZE)]
        command += ["--enable-prompt-tokens-details", "--prefix-caching-hash-algo", "sha256_cbor"]
        command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        # A random model that may write any white space inside of JSON writes nothing else.
        command += ["--structured-outputs-config", json.dumps({"disable_any_whitespace": True, "backend": "xgrammar"})]
        command += ["--kv-transfer-config", json.dumps(transfer), *options]
        if events is not None:
            command += ["--kv-events-config", json.dumps(publisher)]
        super().__init__(name, command, lab.folder / f"{name}.log", self.variables(port + 1000))

    @staticmethod
    def variables(side_port):
        """The environment: one thread each, nothing bound to a core, nothing sent anywhere."""
        kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        return {
            **kept,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "PYTHONHASHSEED": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            # A call that is asked for by name follows its schema, whether or not the tool says `strict`.
            "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0",
            # `/reset_prefix_cache` is a page for developers.
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
            "UCX_TLS": "tcp,self,sm",
            "UCX_NET_DEVICES": "lo",
        }

    def start(self):
        try:
            get(f"{self.url}/health", timeout_s=2)
        except OSError:
            return super().start()
        raise RuntimeError(f"something else answers at {self.url}: an engine of another run?")

    def ready(self):
        self.wait_for(f"{self.url}/health")

    def complete(self, prompt, max_tokens, **members):
        """The answer of this engine alone."""
        body = {**greedy(prompt, max_tokens), **members}
        return post(f"{self.url}/v1/completions", body)[1]

    def tokens(self):
        """Prompt tokens so far, by where their KV came from."""
        page = samples(get(f"{self.url}/metrics"))
        of = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="%s",source="%s"}'
        return {source: int(page.get(of % (MODEL, source), 0)) for source in SOURCES}

    def tokens_since(self, before, prompt_tokens):
        """What came since `before`, once a prompt of so many tokens is counted: metrics come after the answer."""
        deadline = time.monotonic() + SOON_S
        while True:
            since = difference(before, self.tokens())
            if sum(since.values()) >= prompt_tokens or time.monotonic() > deadline:
                return since
            time.sleep(0.05)

    def forget(self):
        """Drops its cache. Its event comes with the next step, so it is made to take one."""
        post(f"{self.url}/reset_prefix_cache")
        self.complete([5] * 3, 1)


def difference(before, now):
    """Counts that came since, by source."""
    return {source: count - before[source] for source, count in now.items()}


def tokens_at_rest(engines, before):
    """What came since `before` at each of these engines, once two looks half a second apart agree: what an engine did for
    a turn of another ended before that one answered, but its metrics may be behind."""
    deadline, last = time.monotonic() + SOON_S, None
    while True:
        found = {name: engine.tokens() for name, engine in engines.items()}
        if found == last or time.monotonic() > deadline:
            return {name: difference(before[name], now) for name, now in found.items()}
        last = found
        time.sleep(0.5)


def greedy(prompt, max_tokens):
    """A completion whose tokens are decided by the prompt alone."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


class Router(Process):
    """`homing serve` before the engines."""

    def __init__(self, lab, homing, port, config, name="router"):
        self.url = f"http://127.0.0.1:{port}"
        self.config = lab.folder / f"{name}.toml"
        self.configure(config)
        level = os.environ.get("HOMING_LOG", "info,homing_gateway=debug")
        environment = {**os.environ, "HOMING_LOG": level, "NO_COLOR": "1"}
        super().__init__(name, [homing, "serve", "--config", str(self.config)], lab.folder / f"{name}.log", environment)

    def configure(self, config):
        """Writes what it reads when it starts."""
        self.config.write_text(config)

    def ready(self):
        self.wait_for(f"{self.url}/ready", SOON_S)

    def workers(self):
        """What the router thinks of its workers, by name."""
        page = json.loads(get(f"{self.url}/admin/workers"))
        return {worker["name"]: worker for worker in page["data"]}

    def until(self, what, holds, timeout_s=SOON_S):
        """Waits until the router's view of its workers is as wanted."""
        deadline = time.monotonic() + timeout_s
        while True:
            workers = self.workers()
            if holds(workers):
                return workers
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited in vain for: {what}; workers: {json.dumps(workers)}")
            time.sleep(0.2)

    def turns(self):
        """The turns that have ended, as its log has them: fields by name. A turn's line comes after its answer: it is waited
        for until none is in flight, each that was counted has its line, and a second look finds the same."""
        deadline, last = time.monotonic() + SOON_S, None
        while True:
            in_flight = json.loads(get(f"{self.url}/admin/workers"))["in_flight_requests"]
            counted, turns = self.metric("homing_requests_total"), self.logged_turns()
            is_whole = in_flight == 0 and counted == len(turns)
            if (is_whole and last == len(turns)) or time.monotonic() > deadline:
                return turns
            last = len(turns) if is_whole else None
            time.sleep(0.3)

    def logged_turns(self):
        """The turns whose line is in its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        fields = (FIELD.findall(line) for line in lines if TURN in line)
        return [{name: quoted or bare for name, quoted, bare in found} for found in fields]

    def explain(self, request):
        """Why a turn went where it went: the reason, and the plans that were thought of with their costs in seconds."""
        decision = json.loads(get(f"{self.url}/admin/explain/{request}"))["attempts"][-1]["decision"]
        plans = (f"{plan['path']} {plan['prefill']}>{plan['decode']} {plan['score']:.3f}" for plan in decision["candidates"])
        return f"{decision['reason']} ({', '.join(plans)})"

    def sample(self, name):
        """One sample of its metrics, by name and labels."""
        return samples(get(f"{self.url}/metrics")).get(name, 0)

    def metric(self, name):
        """The sum over a metric's samples."""
        page = samples(get(f"{self.url}/metrics"))
        return sum(value for key, value in page.items() if key.split("{")[0] == name)


class Lab:
    """Where things lie."""

    def __init__(self, home, folder):
        self.home, self.folder = pathlib.Path(home), pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.python = str(self.home / "venv" / "bin" / "python")
        self.model = str(self.home / "model")

    def clear_logs(self):
        """What an earlier run has said is not this one's."""
        for log in self.folder.glob("*.log"):
            log.unlink()


def end_on_signals():
    """Makes a signal an ordinary end, so that `finally` blocks run."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
