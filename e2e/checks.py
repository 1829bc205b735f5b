"""What is checked of the paths that a turn can take, one function each; the last one kills an engine.

A check gets the cluster and `row(what, holds, found)`. Sessions and prompts are its own, so that any can run alone.
"""

import threading
import time

from engines import BLOCK_SIZE, SOON_S, greedy, post, stream, tokens_at_rest


class Session:
    """A session of token prompts through the router, beside the same through one engine alone."""

    def __init__(self, cluster, name, reference="p"):
        self.cluster, self.name = cluster, name
        self.reference = cluster.engines[reference]
        self.history = []

    def turn(self, new_tokens, max_tokens=16):
        """Appends new tokens, asks the router, keeps the answer."""
        self.history += self.cluster.tokens(new_tokens)
        turn = ask(self.cluster, self.history, max_tokens, self.name)
        self.history = self.history + turn.tokens
        return turn

    def alone(self, turn):
        """What one vLLM answers to the same prompt, from nothing that it has cached."""
        answer = self.reference.complete(turn.prompt, len(turn.tokens), cache_salt=f"{self.name}-{time.time_ns()}")
        return answer["choices"][0]["token_ids"]


class Turn:
    """A turn's answer, and what the engines' metrics say it took."""

    def __init__(self, prompt, headers, tokens, cached, before, cluster):
        self.prompt, self.tokens, self.cached = prompt, tokens, cached
        self.path = headers["x-homing-path"]
        self.worker = headers["x-homing-worker"]
        self.request = headers["x-request-id"]
        self.expected = int(headers["x-homing-cached-tokens"])
        self.why = cluster.router.explain(self.request)
        decoded = cluster.engines[self.worker].tokens_since(before[self.worker], len(prompt))
        self.took = tokens_at_rest({name: cluster.engines[name] for name in before}, before)
        self.took[self.worker] = decoded


def ask(cluster, prompt, max_tokens, session):
    """One turn through the router."""
    before = {name: engine.tokens() for name, engine in cluster.engines.items() if engine.is_running()}
    body = greedy(prompt, max_tokens)
    headers, answer = post(f"{cluster.router.url}/v1/completions", body, {"x-homing-session": session})
    cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Turn(list(prompt), headers, answer["choices"][0]["token_ids"], cached, before, cluster)


def whole_blocks(tokens):
    """Tokens in whole blocks."""
    return tokens // BLOCK_SIZE * BLOCK_SIZE


def seed(cluster, row):
    """A new session: P computes, D pulls all of it."""
    session = Session(cluster, "seed")
    turn = session.turn(1000, 24)
    row("path", turn.path == "seed", turn.path)
    row("P computed the prompt", turn.took["p"]["local_compute"] == 1000, turn.took["p"])
    row("D pulled the prompt", turn.took[turn.worker]["external_kv_transfer"] == 1000, turn.took[turn.worker])
    row("tokens equal one vLLM's", turn.tokens == session.alone(turn), turn.tokens[:6])


def append(cluster, row):
    """A later turn with a small tail: D computes it beside what it holds, P has no part."""
    session = Session(cluster, "append")
    first = session.turn(1000, 24)
    settle(cluster, first)
    turn = session.turn(200, 24)
    held = whole_blocks(1000 + 24 - 1)
    row("path", turn.path == "append", turn.path)
    row("same worker", turn.worker == first.worker, (first.worker, turn.worker))
    took = turn.took[turn.worker]
    row("cached tokens", took["local_cache_hit"] == held, f"{took['local_cache_hit']} of {len(turn.prompt)}")
    row("router expected them", turn.expected == held, turn.expected)
    row("nothing was pulled", took["external_kv_transfer"] == 0, took)
    row("P did nothing", sum(turn.took["p"].values()) == 0, turn.took["p"])
    row("tokens equal one vLLM's", turn.tokens == session.alone(turn), turn.tokens[:6])


def heavy(cluster, row):
    """A later turn with a heavy tail: P computes, D pulls only what it lacks."""
    session = Session(cluster, "heavy")
    first = session.turn(1000, 24)
    settle(cluster, first)
    turn = session.turn(1500, 24)
    held = whole_blocks(1000 + 24 - 1)
    took = turn.took[turn.worker]
    row("through P, to the same worker", turn.path == "reseed" and turn.worker == first.worker, (turn.path, turn.worker, turn.why))
    row("D had its prefix", took["local_cache_hit"] == held, took)
    missing = len(turn.prompt) - held
    row("only the missing blocks are pulled", took["external_kv_transfer"] == missing, f"{took['external_kv_transfer']} of {len(turn.prompt)}")
    row("tokens equal one vLLM's", turn.tokens == session.alone(turn), turn.tokens[:6])


def fetch(cluster, row):
    """A heavy tail on a history that lies at D only: P pulls it from D and computes the tail, D pulls back what is new."""
    session = Session(cluster, "fetch")
    first = session.turn(1000, 24)
    grown = [session.turn(300, 24) for _ in range(3)]
    row("its history lies at its home", {turn.worker for turn in grown} == {first.worker}, [turn.path for turn in grown])
    settle(cluster, first)
    held = whole_blocks(len(session.history) - 1)
    turn = session.turn(1500, 24)
    at_p, at_d = turn.took["p"], turn.took[turn.worker]
    row("through P, to the same worker", turn.path == "reseed" and turn.worker == first.worker, (turn.path, turn.worker, turn.why))
    row("P pulled what it lacked of the history", at_p["external_kv_transfer"] == held - whole_blocks(1000), at_p)
    row("P computed the tail only", at_p["local_compute"] <= len(turn.prompt) - held + BLOCK_SIZE, at_p)
    row("D pulled back only what is new", at_d["external_kv_transfer"] == len(turn.prompt) - held, at_d)
    row("tokens equal one vLLM's", turn.tokens == session.alone(turn), turn.tokens[:6])


def reseed(cluster, row):
    """D lost its cache: its event says so, and the next turn comes through P again."""
    session = Session(cluster, "reseed")
    first = session.turn(1000, 24)
    settle(cluster, first)
    forget(cluster, first.worker)
    turn = session.turn(200, 24)
    took = turn.took[turn.worker]
    row("path", turn.path == "reseed", turn.path)
    row("the whole prompt is pulled", took["external_kv_transfer"] == len(turn.prompt), took)
    row("tokens equal one vLLM's", turn.tokens == session.alone(turn), turn.tokens[:6])


def forget(cluster, name):
    """Makes an engine lose its cache, and waits until the router knows."""
    cluster.engines[name].forget()
    cluster.router.until(
        f"an empty index of {name} after AllBlocksCleared",
        lambda workers: workers[name]["indexed_gpu_blocks"] == 0 and workers[name]["state"] == "exact",
        SOON_S,
    )


def settle(cluster, turn, quiet_s=2.0):
    """Waits until the events of a turn's worker have been told: what is expected of its cache later is exact."""
    name = 'homing_kv_event_batches_total{worker="%s"}' % turn.worker
    seen, since, deadline = -1, time.monotonic(), time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        batches = cluster.router.sample(name)
        if batches != seen:
            seen, since = batches, time.monotonic()
        elif time.monotonic() - since > quiet_s:
            break
        time.sleep(0.1)
    cluster.router.until(f"{turn.worker} exact", lambda workers: workers[turn.worker]["state"] == "exact", SOON_S)


def long_session(cluster, row):
    """Forty turns that grow to 12,000 tokens: what vLLM reports as cached is what the router expected."""
    session = Session(cluster, "long")
    paths, differences, turns = {}, [], 40
    for index in range(turns):
        turn = session.turn(600 if index == 0 else 280, 12)
        paths[turn.path] = paths.get(turn.path, 0) + 1
        if turn.path == "append" and turn.cached != turn.expected:
            differences.append((index, turn.expected, turn.cached, turn.request))
    logged = [turn for turn in cluster.router.turns() if turn["session"] == session.name]
    row("prompt at the end", len(turn.prompt) > 11_500, len(turn.prompt))
    row("all later turns are appended", paths == {"seed": 1, "append": turns - 1}, paths)
    row("cached tokens as expected on 95%", len(differences) * 20 <= turns, f"{turns - len(differences)} of {turns} {differences}")
    explained = [turn["request"] for turn in logged if "cached_difference" in turn]
    row("each difference is explained in the log", {entry[3] for entry in differences} <= set(explained), explained)
    row("the last tokens equal one vLLM's, cold", turn.tokens == session.alone(turn), turn.tokens[:6])


def gaps(cluster, row):
    """Batches of events are lost on the way to the router: it asks for them, and knows all again."""
    session = Session(cluster, "gaps")
    first = session.turn(1000, 8)
    for attempt in range(8):
        if first.worker == "d0":
            break
        session = Session(cluster, f"gaps-{attempt}")
        first = session.turn(1000, 8)
    if first.worker != "d0":
        return row("a session lives behind the relay", False, first.worker)
    settle(cluster, first)
    gaps_before = cluster.router.metric("homing_kv_event_gaps_total")
    lost_before = cluster.relay.lost
    cluster.relay.lose = 2
    second = session.turn(200, 40)
    third = session.turn(200, 40)
    lost = cluster.relay.lost - lost_before
    row("batches were lost", lost == 2, lost)
    settle(cluster, third)
    fourth = session.turn(100, 8)
    found = cluster.router.metric("homing_kv_event_gaps_total") - gaps_before
    row("the router saw the gap", found >= 1, found)
    row("and knows all again", fourth.expected == fourth.cached and fourth.path == "append", (fourth.expected, fourth.cached))
    row("tokens equal one vLLM's", fourth.tokens == session.alone(fourth), fourth.tokens[:6])


def migrate(cluster, row):
    """The session's home is busy: another worker pulls the session's KV from it, and P computes nothing."""
    # How busy is busy enough is the planner's to say: there is one request more until a turn moves. If that is the request
    # which was to keep the home busy, another session is tried.
    for attempt in range(4):
        session = Session(cluster, f"migrate-{attempt}")
        first = session.turn(1500, 24)
        # What these turns add lies at the session's home only.
        grown = [session.turn(300, 24) for _ in range(3)]
        settle(cluster, first)
        held, turn = leave_home(session, first.worker)
        if turn.path == "migrate":
            break
    took = turn.took[turn.worker]
    row("its history lies at its home", {turn.worker for turn in grown} == {first.worker}, [turn.path for turn in grown])
    row("path", turn.path == "migrate", (turn.path, turn.why))
    row("another worker", turn.worker != first.worker, (first.worker, turn.worker))
    row("it pulled the session's KV", took["external_kv_transfer"] == len(turn.prompt), took)
    row("P did nothing", sum(turn.took["p"].values()) == 0, turn.took["p"])
    row("its old home had it", turn.took[first.worker]["local_cache_hit"] >= held, turn.took[first.worker])
    row("tokens equal one vLLM's", turn.tokens == session.alone(turn), turn.tokens[:6])


def leave_home(session, home):
    """Makes a session's home busier until a turn of it goes elsewhere: whole blocks that its home held, and that turn."""
    cluster, busy = session.cluster, []
    try:
        while True:
            # A branch of the session is drawn to its home as the session itself is.
            busy.append(Busy(cluster, session.name, session.history + cluster.tokens(40)))
            # Nor does P hold it: it may have prefilled for the busy home.
            forget(cluster, "p")
            held = whole_blocks(len(session.history) - 1)
            turn = session.turn(100, 24)
            if turn.worker != home or busy[-1].worker != home or len(busy) == 8:
                return held, turn
    finally:
        for answer in busy:
            answer.stop()


class Busy:
    """A long answer that is taken until it is stopped."""

    def __init__(self, cluster, session, prompt):
        self.worker, self.started, self.stopping = None, threading.Event(), threading.Event()
        body = greedy(prompt, 1500)
        self.answer = stream(f"{cluster.router.url}/v1/completions", body, {"x-homing-session": session})
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        self.started.wait(SOON_S)

    def run(self):
        self.worker = next(self.answer)["x-homing-worker"]
        for _ in self.answer:
            self.started.set()
            if self.stopping.is_set():
                return self.answer.close()

    def stop(self):
        self.stopping.set()
        self.thread.join(SOON_S)


def streamed(cluster, session, prompt, max_tokens, after, act):
    """A streamed turn in which something is done after so many tokens: headers and all tokens."""
    events = stream(f"{cluster.router.url}/v1/completions", greedy(prompt, max_tokens), {"x-homing-session": session})
    headers, tokens, done = next(events), [], False
    for event in events:
        if "error" in event:
            raise RuntimeError(f"the stream ended with {event['error']}")
        for choice in event.get("choices", []):
            tokens += choice.get("token_ids") or []
        if len(tokens) >= after and not done:
            act(headers["x-homing-worker"])
            done = True
    return headers, tokens


def chat(cluster, row):
    """A conversation with tools, a call without content, and its result: through the router as without it."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}}
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"path": "a.py"}'}}
    messages = [
        {"role": "system", "content": "You work on code. " * 60},
        {"role": "user", "content": "What is in a.py?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "def f():\n    return 1\n" * 20},
    ]
    body = {"model": "m", "messages": messages, "tools": [tool], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    headers, routed = post(f"{cluster.router.url}/v1/chat/completions", body)
    _, alone = post(f"{cluster.engines['p'].url}/v1/chat/completions", {**body, "cache_salt": "chat"})
    of = lambda answer: {key: answer["choices"][0]["message"].get(key) for key in ("content", "tool_calls")}
    row("answer equals one vLLM's", of(routed) == of(alone), str(of(routed))[:60])
    events = list(stream(f"{cluster.router.url}/v1/chat/completions", body))[1:]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event.get("choices", []))
    row("so does the stream", text == (of(alone)["content"] or ""), text[:30])
    messages += [{"role": "assistant", "content": of(routed)["content"]}, {"role": "user", "content": "And now?"}]
    headers, routed = post(f"{cluster.router.url}/v1/chat/completions", body)
    row("the next turn is appended", headers["x-homing-path"] == "append", headers["x-homing-path"])
    logged = [int(turn["prompt_tokens"]) for turn in cluster.router.turns() if turn["request"] == headers["x-request-id"]]
    asks = "tokenises otherwise" in cluster.router.log.read_text(errors="replace")
    row("the router tokenises as the engines do", not asks, "they are asked instead" if asks else "by its own model")
    row("the router's tokens are the engine's", logged == [routed["usage"]["prompt_tokens"]], (logged, routed["usage"]["prompt_tokens"]))


def killed(cluster, row):
    """D dies in the middle of an answer: the stream goes on elsewhere, token for token. Then it comes back with nothing."""
    session = Session(cluster, "killed")
    first = session.turn(1000, 16)
    settle(cluster, first)
    prompt = session.history + cluster.tokens(50)
    victims = []

    def kill(worker):
        victims.append(worker)
        cluster.engines[worker].kill()

    _, tokens = streamed(cluster, "killed", prompt, 120, 30, kill)
    victim = victims[0]
    expected = session.reference.complete(prompt, 120, cache_salt=f"killed-{time.time_ns()}")["choices"][0]["token_ids"]
    row("the answer is whole", len(tokens) == 120, len(tokens))
    row("tokens equal one vLLM's", tokens == expected, f"{tokens[:3]}..{tokens[-3:]}")
    cluster.router.until("a dead worker", lambda workers: workers[victim]["state"] == "dead", SOON_S)
    row("its worker counts as dead", True, victim)
    epoch = cluster.router.workers()[victim]["epoch"]
    cluster.engines[victim].start()
    cluster.engines[victim].ready()
    workers = cluster.router.until(
        "the restarted worker exact and in a new life",
        lambda workers: workers[victim]["state"] == "exact" and workers[victim]["epoch"] != epoch,
        SOON_S,
    )
    row("it is back in a new life, with nothing", workers[victim]["indexed_gpu_blocks"] == 0, workers[victim]["indexed_gpu_blocks"])
    session.history = prompt + tokens
    turn = session.turn(100, 16)
    held = turn.took[turn.worker]["local_cache_hit"]
    row("nothing of its old cache is expected", turn.expected == held, (turn.path, turn.worker, turn.expected, held))
    row("tokens equal one vLLM's, again", turn.tokens == session.alone(turn), turn.tokens[:6])
    # The other one is kept busy, so that a new session is better off with the one that came back.
    other = next(name for name in ("d0", "d1") if name != victim)
    busy = []
    try:
        while sum(answer.worker == other for answer in busy) < 4 and len(busy) < 12:
            busy.append(Busy(cluster, f"other-{len(busy)}", cluster.tokens(300)))
        used = [Session(cluster, f"back-{index}").turn(900, 4) for index in range(4)]
    finally:
        for answer in busy:
            answer.stop()
    back = [turn for turn in used if turn.worker == victim]
    pulled = bool(back) and back[0].took[victim]["external_kv_transfer"] == 900
    row("it is used again, and pulls", pulled, [turn.worker for turn in used])
