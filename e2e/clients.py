"""Real client packages in front of the router: `openai`, `anthropic` and the load generator of `vllm bench serve`.

Each is used as its documentation says, with the router as its base address. What is checked is that the package takes the
answers (streams, tools, usage, typed errors) and that a conversation stays where its KV is: each later turn is appended.
"""

import json
import subprocess

from engines import ANSWER_TIMEOUT_S, MODEL, START_TIMEOUT_S

# What the random model says to a tool's caller is noise; a schema of few texts lets it make a call that is well-formed and short.
LOOK = {"type": "object", "properties": {"path": {"type": "string", "enum": ["a.py", "b.py"]}}, "required": ["path"]}
SYSTEM = "You work on code, step by step, and say what you do. " * 40

# `vllm bench serve` without its `vllm` script, which looks for a distribution of another name.
BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


class Turns:
    """The turns of a check, as the router's log has them."""

    def __init__(self, cluster):
        self.router = cluster.router
        self.before = len(self.router.turns())

    def now(self):
        """Those that have ended so far."""
        return self.router.turns()[self.before :]

    def errors(self):
        """What went wrong in them."""
        return sorted({turn["error"] for turn in self.now() if "error" in turn})

    def conversations(self):
        """Paths of each session's turns, in order."""
        found = {}
        for turn in self.now():
            found.setdefault(turn["session"], []).append(turn["path"])
        return found


def is_appended(paths):
    """Whether a conversation of several turns stayed where its KV is."""
    return len(paths) > 1 and all(path == "append" for path in paths[1:])


def openai_package(cluster, row):
    """The `openai` package: a conversation that streams and calls tools, in chat and as responses."""
    import openai

    turns = Turns(cluster)
    client = openai.OpenAI(base_url=f"{cluster.router.url}/v1", api_key="none", timeout=ANSWER_TIMEOUT_S, max_retries=0)
    row("models", [model.id for model in client.models.list()] == [MODEL], [model.id for model in client.models.list()])
    openai_chat(client, row)
    chat = turns.conversations()
    row("a conversation stays at home", [is_appended(paths) for paths in chat.values()] == [True], chat)
    openai_responses(client, row)
    later = [paths for name, paths in turns.conversations().items() if name not in chat]
    row("so does one of responses", [is_appended(paths) for paths in later] == [True], later)
    completion = client.completions.create(model=MODEL, prompt="def f(", max_tokens=8, temperature=0)
    row("a completion", completion.usage.completion_tokens == 8, completion.usage.completion_tokens)
    try:
        client.chat.completions.create(model="another", messages=[{"role": "user", "content": "hi"}])
        row("an unknown model is an error", False, "it was answered")
    except openai.NotFoundError as error:
        row("an unknown model is an error", error.code == "model_not_found", error.message)
    row("no turn failed", turns.errors() == [], turns.errors())


def openai_chat(client, row):
    tools = [{"type": "function", "function": {"name": "look", "description": "Shows a file.", "parameters": LOOK}}]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is in a.py?"}]
    ask = dict(model=MODEL, tools=tools, temperature=0)
    forced = {"type": "function", "function": {"name": "look"}}
    answer = client.chat.completions.create(messages=messages, tool_choice=forced, max_tokens=64, **ask).choices[0].message
    call = answer.tool_calls[0]
    row("a tool is called", json.loads(call.function.arguments)["path"] in ("a.py", "b.py"), call.function)
    messages += [answer.model_dump(exclude_none=False, include={"role", "content", "tool_calls"})]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "def f():\n    return 1\n" * 10}]
    usage, text = None, ""
    stream = client.chat.completions.create(
        messages=messages, tool_choice="auto", max_tokens=24, stream=True, stream_options={"include_usage": True}, **ask
    )
    for chunk in stream:
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    row("the stream has text and usage", text != "" and usage.completion_tokens == 24, (text[:20], usage.completion_tokens))
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And in b.py?"}]
    name, arguments = "", ""
    for chunk in client.chat.completions.create(messages=messages, tool_choice=forced, max_tokens=64, stream=True, **ask):
        for call in (call for choice in chunk.choices for call in choice.delta.tool_calls or []):
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    row("a tool is called in a stream", (name, list(json.loads(arguments))) == ("look", ["path"]), (name, arguments))


def openai_responses(client, row):
    tools = [{"type": "function", "name": "look", "description": "Shows a file.", "parameters": LOOK, "strict": False}]
    items = [{"role": "user", "content": "What is in b.py?"}]
    ask = dict(model=MODEL, instructions=SYSTEM + "Be brief.", tools=tools, temperature=0, store=False)
    forced = {"type": "function", "name": "look"}
    with client.responses.stream(input=items, tool_choice=forced, max_output_tokens=64, **ask) as stream:
        kinds = {event.type for event in stream}
        response = stream.get_final_response()
    call = response.output[0]
    row("a response calls a tool", call.type == "function_call" and call.name == "look", call.arguments)
    row("its events are known", {"response.created", "response.function_call_arguments.done", "response.completed"} <= kinds, len(kinds))
    items += [{key: value for key, value in call.model_dump().items() if key in ("type", "call_id", "name", "arguments")}]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "x = 1\n" * 20}]
    response = client.responses.create(input=items, tool_choice="auto", max_output_tokens=16, **ask)
    row("it is told to be cut", response.status == "incomplete" and response.output_text != "", response.status)
    row("it says what was cached", response.usage.input_tokens_details.cached_tokens > 0, response.usage.input_tokens_details.cached_tokens)


def anthropic_package(cluster, row):
    """The `anthropic` package: a conversation that streams and uses tools."""
    import anthropic

    turns = Turns(cluster)
    client = anthropic.Anthropic(base_url=cluster.router.url, api_key="none", timeout=ANSWER_TIMEOUT_S, max_retries=0)
    tools = [{"name": "look", "description": "Shows a file.", "input_schema": LOOK}]
    messages = [{"role": "user", "content": "What is in a.py, please?"}]
    ask = dict(model=MODEL, system=[{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}], tools=tools)
    counted = client.messages.count_tokens(messages=messages, **ask).input_tokens
    forced = {"type": "tool", "name": "look"}
    with client.messages.stream(messages=messages, tool_choice=forced, max_tokens=64, **ask) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_message()
    use = answer.content[-1]
    row("a tool is used", use.type == "tool_use" and use.input["path"] in ("a.py", "b.py"), use)
    row("its events are known", {"message_start", "content_block_delta", "message_delta", "message_stop"} <= kinds, sorted(kinds))
    told = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    row("tokens are counted as they are used", told == counted, (told, counted))
    messages += [{"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]}]
    messages += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "y = 2\n" * 20}]}]
    answer = client.messages.create(messages=messages, max_tokens=24, **ask)
    row("it is told to be cut", answer.stop_reason == "max_tokens", answer.stop_reason)
    row("it says what was cached", answer.usage.cache_read_input_tokens > 0, answer.usage.cache_read_input_tokens)
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "And now?"}]
    with client.messages.stream(messages=messages, max_tokens=24, **ask) as stream:
        text = "".join(stream.text_stream)
    row("text is streamed", text != "", text[:20])
    conversations = turns.conversations()
    row("the conversation stays at home", [is_appended(paths) for paths in conversations.values()] == [True], conversations)
    try:
        client.messages.create(messages=[{"role": "user", "content": [{"type": "document"}]}], max_tokens=8, **ask)
        row("what cannot be served is an error", False, "it was answered")
    except anthropic.BadRequestError as error:
        row("what cannot be served is an error", "document" in error.message, error.message[:80])
    row("no turn failed", turns.errors() == [], turns.errors())


def bench_serve(cluster, row):
    """`vllm bench serve` against the router: all of its requests are served."""
    turns = Turns(cluster)
    count = 12
    command = [cluster.lab.python, "-c", BENCH, "--backend", "vllm", "--endpoint", "/v1/completions"]
    command += ["--base-url", cluster.router.url, "--model", MODEL, "--tokenizer", cluster.lab.model]
    command += ["--dataset-name", "random", "--random-input-len", "300", "--random-output-len", "16"]
    command += ["--num-prompts", str(count), "--max-concurrency", "4", "--ignore-eos", "--disable-tqdm"]
    command += ["--save-result", "--result-dir", str(cluster.lab.folder), "--result-filename", "bench.json"]
    with open(cluster.lab.folder / "bench.log", "wb") as log:
        done = subprocess.run(command, stdout=log, stderr=log, timeout=START_TIMEOUT_S, env=cluster.engines["p"].environment, check=False)
    row("it ended well", done.returncode == 0, done.returncode)
    result = json.loads((cluster.lab.folder / "bench.json").read_text())
    row("all requests were served", (result["completed"], result.get("failed", 0)) == (count, 0), result["completed"])
    row("each had its tokens", result["total_output_tokens"] == count * 16, result["total_output_tokens"])
    row("no turn failed", turns.errors() == [] and len(turns.now()) >= count, turns.errors())
