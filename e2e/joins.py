"""Engines that a router meets at the door: one that caches no prefixes, one that serves another model, one without KV events.

Each is a real vLLM. Two more fit into the machine's memory where two of the cluster's have left, so this check is the last.
"""

from engines import BLOCK_SIZE, MODEL, SOON_S, Engine, Router, greedy, post

OTHER = "n"


def configuration(port, engines):
    """A router before these engines, each of which does both."""
    lines = [f'listen = "127.0.0.1:{port}"', "[router]", f"block_size = {BLOCK_SIZE}"]
    for engine in engines:
        lines += ["[[workers]]", f'name = "{engine.name}"', f'url = "{engine.url}"', 'kind = "vllm"', 'role = "both"']
    return "\n".join(lines) + "\n"


def joins(cluster, row):
    """What does not fit is refused with the reason, and what says nothing of its cache is predicted."""
    lab, homing, port = cluster.lab, cluster.homing, cluster.port
    for name in ("d0", "d1"):
        cluster.engines[name].stop()
    forgetful = Engine(lab, "forgetful", port + 4, options=["--no-enable-prefix-caching"])
    other = Engine(lab, "other", port + 5, model=OTHER)
    peers, alone = Router(lab, homing, port + 11, "", "peers"), Router(lab, homing, port + 12, "", "alone")
    try:
        for engine in (forgetful, other):
            engine.start()
        for engine in (forgetful, other):
            engine.ready()
        refusals(cluster, row, peers, configuration(port + 11, [cluster.engines["p"], forgetful, other]))
        predictions(cluster, row, alone, configuration(port + 12, [other]))
    finally:
        for process in (peers, alone, forgetful, other):
            process.tell_to_end()
        for process in (peers, alone, forgetful, other):
            process.stop()


def refusals(cluster, row, router, config):
    """A router before one engine that fits and two that do not: of two models the one that is met first is the cluster's."""
    router.configure(config)
    router.start()
    router.ready()
    models = {"p": MODEL, "other": OTHER}

    def all_tried(workers):
        joined = [name for name in models if workers[name]["state"] in ("exact", "degraded")]
        return len(joined) == 1 and sum(bool(worker.get("problem")) for worker in workers.values()) == 2

    workers = router.until("one joined and two were refused", all_tried, SOON_S)
    problem = workers["forgetful"]["problem"]
    row("without prefix caching: refused", "caches prefixes" in problem, problem)
    late, first = sorted(models, key=lambda name: not workers[name].get("problem"))
    problem = workers[late]["problem"]
    row("another model: refused", f"`{models[first]}`, found `{models[late]}`" in problem, problem)
    body = {**greedy(cluster.tokens(300), 4), "model": models[first]}
    headers, _ = post(f"{router.url}/v1/completions", body)
    row("the one that fits serves", headers["x-homing-worker"] == first, headers["x-homing-worker"])


def predictions(cluster, row, router, config):
    """A router before an engine without KV events, two turns of a session."""
    router.configure(config)
    router.start()
    router.ready()
    workers = router.until("it joined", lambda workers: workers["other"]["state"] == "degraded", SOON_S)
    row("without events: taken, and known to be", True, workers["other"]["state"])
    prompt = cluster.tokens(640)
    for _ in range(2):
        headers, answer = post(f"{router.url}/v1/completions", {**greedy(prompt, 8), "model": OTHER}, {"x-homing-session": "alone"})
        prompt += answer["choices"][0]["token_ids"] + cluster.tokens(100)
    cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")
    expected = int(headers["x-homing-cached-tokens"])
    row("its cache is predicted", expected == cached == 640, (expected, cached))
