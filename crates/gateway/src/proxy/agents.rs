//! How coding agents say who they are and which conversation a request belongs to.
//!
//! Collected from what their public sources send:
//!
//! | agent | conversation | sub-agent |
//! | --- | --- | --- |
//! | Claude Code | `x-claude-code-session-id`; before it was there, `metadata.user_id` (JSON with `session_id`, or `..._session_<id>`) | `x-claude-code-agent-id`, of `x-claude-code-parent-agent-id` or else of the session itself |
//! | Codex | `thread-id`, else `session-id` (older: `session_id`, `conversation_id`) | a thread of its own, of `x-codex-parent-thread-id` |
//! | OpenCode | `x-opencode-session`, `x-session-affinity`, `x-session-id` | a session of its own, of `x-parent-session-id` |
//! | mini-swe-agent, aider | nothing: their prompts are recognised; they are told by the beginning of their system prompt, or by a header | none |
//! | any | `x-homing-session`, `prompt_cache_key` | |
//!
//! Agents that name only the conversation send requests of other kinds under its name: titles, summaries, sub-agents of
//! releases that did not tell them. These differ in the tools that they have, which therefore is part of what the core
//! gets as the name. An agent's own id for its thread needs no such help.

use homing_router::event::ClientKind;
use homing_wire::openai::Body;
use http::HeaderMap;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::collections::HashMap;

/// Longest name of a session, in characters.
pub(super) const NAME_MAX: usize = 128;

/// A kind of client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Agent {
    ClaudeCode,
    Codex,
    OpenCode,
    MiniSwe,
    Aider,
    Other,
}

/// All kinds, in the order of their numbers in the core.
const AGENTS: [Agent; 6] = [
    Agent::Other,
    Agent::ClaudeCode,
    Agent::Codex,
    Agent::OpenCode,
    Agent::MiniSwe,
    Agent::Aider,
];

impl Agent {
    /// Its number in the core, which is another for those who work for another agent: they have fewer turns, and no person to wait for.
    pub(crate) const fn kind(self, is_sub_agent: bool) -> ClientKind {
        let number = match self {
            Self::Other => 0,
            Self::ClaudeCode => 1,
            Self::Codex => 2,
            Self::OpenCode => 3,
            Self::MiniSwe => 4,
            Self::Aider => 5,
        };
        ClientKind(number * 2 + if is_sub_agent { 1 } else { 0 })
    }

    /// The agent of a number, and whether it works for another.
    pub(crate) fn of_kind(kind: ClientKind) -> (Self, bool) {
        let agent = AGENTS.get(usize::from(kind.0 / 2)).copied();
        (agent.unwrap_or(Self::Other), kind.0 % 2 == 1)
    }

    /// Its name in metrics and pages.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::ClaudeCode => "claude-code",
            Self::Codex => "codex",
            Self::OpenCode => "opencode",
            Self::MiniSwe => "mini-swe-agent",
            Self::Aider => "aider",
            Self::Other => "other",
        }
    }
}

/// A conversation as an agent names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Conversation {
    /// Names are told apart by it: two agents do not share a session by chance.
    pub(super) kind: &'static str,
    pub(super) name: String,
    /// The conversation that this one works for.
    pub(super) parent: Option<String>,
    /// Whether the name is of one thread and of nothing beside it.
    pub(super) is_exact: bool,
}

impl Conversation {
    fn new(kind: &'static str, name: &str, parent: Option<&str>, is_exact: bool) -> Self {
        Self {
            kind,
            name: name.to_owned(),
            parent: parent.filter(|parent| *parent != name).map(str::to_owned),
            is_exact,
        }
    }
}

/// The conversation that headers or fields of an agent name. What makes no sense is passed over: agents do not send it
/// for us.
pub(super) fn conversation(headers: &HeaderMap, body: &Body) -> Option<Conversation> {
    let header = |name: &str| headers.get(name).and_then(|value| valid(value.as_bytes()));
    claude(&header)
        .or_else(|| codex(&header))
        .or_else(|| opencode(&header))
        .or_else(|| of_body(body))
}

fn claude<'a>(header: &impl Fn(&str) -> Option<&'a str>) -> Option<Conversation> {
    let session = header("x-claude-code-session-id")?;
    let of_agent = |agent: &str| format!("{session}:{agent}");
    let Some(agent) = header("x-claude-code-agent-id") else {
        return Some(Conversation::new("claude", session, None, false));
    };
    let parent = header("x-claude-code-parent-agent-id").map_or_else(|| session.to_owned(), of_agent);
    Some(Conversation::new("claude", &of_agent(agent), Some(&parent), true))
}

fn codex<'a>(header: &impl Fn(&str) -> Option<&'a str>) -> Option<Conversation> {
    let session = ["session-id", "session_id", "conversation_id"]
        .into_iter()
        .find_map(header);
    let (name, is_exact) = match header("thread-id") {
        Some(thread) => (thread, true),
        None => (session?, false),
    };
    let parent = header("x-codex-parent-thread-id");
    Some(Conversation::new("codex", name, parent, is_exact))
}

fn opencode<'a>(header: &impl Fn(&str) -> Option<&'a str>) -> Option<Conversation> {
    let (kind, name) = [
        ("opencode", "x-opencode-session"),
        ("opencode", "x-session-affinity"),
        ("header", "x-session-id"),
    ]
    .into_iter()
    .find_map(|(kind, name)| Some((kind, header(name)?)))?;
    Some(Conversation::new(kind, name, header("x-parent-session-id"), false))
}

fn of_body(body: &Body) -> Option<Conversation> {
    if let Ok(Some(key)) = body.read::<String>("prompt_cache_key", "a string") {
        // What else runs under a key is its client's business: the key says that it belongs together.
        return valid(key.as_bytes()).map(|name| Conversation::new("cache-key", name, None, true));
    }
    let metadata: serde_json::Value = serde_json::from_slice(body.get("metadata")?).ok()?;
    let session = session_of_user(metadata.get("user_id")?.as_str()?)?;
    valid(session.as_bytes()).map(|name| Conversation::new("claude", name, None, false))
}

/// Claude Code packs its session into Anthropic's `metadata.user_id`: as JSON in its newer releases, behind `_session_`
/// in the older ones. A user id without a session says nothing: one user runs many sessions.
fn session_of_user(user: &str) -> Option<String> {
    if let Ok(value) = serde_json::from_str::<serde_json::Value>(user) {
        return value.get("session_id")?.as_str().map(str::to_owned);
    }
    user.rsplit_once("_session_").map(|(_, session)| session.to_owned())
}

/// A name: visible ASCII.
pub(super) fn valid(bytes: &[u8]) -> Option<&str> {
    let visible = !bytes.is_empty() && bytes.len() <= NAME_MAX && bytes.iter().all(u8::is_ascii_graphic);
    visible.then(|| str::from_utf8(bytes).expect("ASCII is UTF-8"))
}

/// Beginnings of system prompts that agents have by default.
const PROMPTS: [(&str, Agent); 4] = [
    ("You are Claude Code", Agent::ClaudeCode),
    ("x-anthropic-billing-header:", Agent::ClaudeCode),
    (
        "You are a helpful assistant that can interact multiple times with a computer shell",
        Agent::MiniSwe,
    ),
    (
        "You are a helpful assistant that can interact with a computer",
        Agent::MiniSwe,
    ),
];

/// Headers that only one agent sends, and the beginnings of their values.
const MARKS: [(&str, &str, Agent); 9] = [
    ("x-claude-code-session-id", "", Agent::ClaudeCode),
    ("user-agent", "claude-cli/", Agent::ClaudeCode),
    ("originator", "codex", Agent::Codex),
    ("user-agent", "codex", Agent::Codex),
    ("thread-id", "", Agent::Codex),
    ("x-opencode-session", "", Agent::OpenCode),
    ("user-agent", "opencode/", Agent::OpenCode),
    ("x-session-affinity", "ses_", Agent::OpenCode),
    ("x-title", "Aider", Agent::Aider),
];

/// Who sent a request, as far as its headers, its fields or the beginning of its system prompt tell.
pub(super) fn agent(headers: &HeaderMap, body: &Body, conversation: Option<&Conversation>) -> Agent {
    let starts = |name: &str, start: &str| {
        let value = headers.get(name).and_then(|value| value.to_str().ok());
        value.is_some_and(|value| value.to_ascii_lowercase().starts_with(&start.to_ascii_lowercase()))
    };
    let marked = MARKS.iter().find(|(name, start, _)| starts(name, start));
    if let Some((_, _, agent)) = marked {
        return *agent;
    }
    match conversation.map(|conversation| conversation.kind) {
        Some("claude") => Agent::ClaudeCode,
        Some("codex") => Agent::Codex,
        Some("opencode") => Agent::OpenCode,
        _ => by_prompt(body),
    }
}

fn by_prompt(body: &Body) -> Agent {
    let text = system_start(body).unwrap_or_default();
    let known = PROMPTS.iter().find(|(start, _)| text.trim_start().starts_with(start));
    known.map_or(Agent::Other, |(_, agent)| *agent)
}

/// The system prompt, in whichever dialect: `system`, `instructions`, or the first message.
fn system_start(body: &Body) -> Option<String> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Text {
        One(String),
        Blocks(Vec<Block>),
    }
    #[derive(Deserialize)]
    struct Block {
        #[serde(default)]
        text: String,
    }
    let text = |json: &[u8]| match serde_json::from_slice(json).ok()? {
        Text::One(text) => Some(text),
        Text::Blocks(blocks) => blocks.into_iter().next().map(|block| block.text),
    };
    if let Some(system) = body.get("system").or_else(|| body.get("instructions")) {
        return text(system);
    }
    // Only the first message is read: a history may be long.
    let list = body.get("messages")?.strip_prefix(b"[")?;
    let mut messages = serde_json::Deserializer::from_slice(list).into_iter::<HashMap<String, &RawValue>>();
    text(messages.next()?.ok()?.get("content")?.get().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (
                http::HeaderName::from_static(name),
                http::HeaderValue::from_static(value),
            )
        };
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn each_agent_and_its_sub_agents_have_a_number() {
        for agent in AGENTS {
            for is_sub_agent in [false, true] {
                assert_eq!(Agent::of_kind(agent.kind(is_sub_agent)), (agent, is_sub_agent));
            }
        }
        assert_eq!(Agent::Other.kind(false), ClientKind::default());
        assert_eq!(Agent::of_kind(ClientKind(200)), (Agent::Other, false));
    }

    #[test]
    fn sub_agents_name_their_parents() {
        let check = |pairs: &[(&'static str, &'static str)], name: &str, parent: Option<&str>, is_exact: bool| {
            let body = Body::parse(&"{}".into()).unwrap();
            let found = conversation(&headers(pairs), &body).unwrap();
            assert_eq!(
                (found.name.as_str(), found.parent.as_deref(), found.is_exact),
                (name, parent, is_exact),
                "{pairs:?}"
            );
        };
        let session = ("x-claude-code-session-id", "s");
        check(&[session], "s", None, false);
        check(&[session, ("x-claude-code-agent-id", "a")], "s:a", Some("s"), true);
        check(
            &[
                session,
                ("x-claude-code-agent-id", "b"),
                ("x-claude-code-parent-agent-id", "a"),
            ],
            "s:b",
            Some("s:a"),
            true,
        );
        check(&[("session-id", "s")], "s", None, false);
        check(&[("session-id", "s"), ("thread-id", "s")], "s", None, true);
        check(
            &[
                ("session-id", "s"),
                ("thread-id", "t"),
                ("x-codex-parent-thread-id", "s"),
            ],
            "t",
            Some("s"),
            true,
        );
        check(
            &[("x-session-affinity", "ses_b"), ("x-parent-session-id", "ses_a")],
            "ses_b",
            Some("ses_a"),
            false,
        );
    }

    #[test]
    fn agents_are_told_apart() {
        let check = |pairs: &[(&'static str, &'static str)], body: &str, expected: Agent| {
            let (headers, body) = (headers(pairs), Body::parse(&body.to_owned().into()).unwrap());
            let found = agent(&headers, &body, conversation(&headers, &body).as_ref());
            assert_eq!(found, expected, "{pairs:?} {body:?}");
        };
        check(&[], "{}", Agent::Other);
        check(
            &[("user-agent", "OpenAI/Python 2.0")],
            r#"{"messages":[{"role":"user","content":"hi"}]}"#,
            Agent::Other,
        );
        check(
            &[("user-agent", "claude-cli/2.1.139 (external, cli)")],
            "{}",
            Agent::ClaudeCode,
        );
        check(
            &[],
            r#"{"metadata":{"user_id":"user_a_account__session_1"}}"#,
            Agent::ClaudeCode,
        );
        check(
            &[],
            r#"{"system":[{"type":"text","text":"You are Claude Code, Anthropic's"}]}"#,
            Agent::ClaudeCode,
        );
        check(&[("originator", "codex_cli_rs")], "{}", Agent::Codex);
        check(&[("session_id", "x")], "{}", Agent::Codex);
        check(&[("user-agent", "opencode/1.0")], "{}", Agent::OpenCode);
        check(&[("x-session-affinity", "ses_1")], "{}", Agent::OpenCode);
        check(&[("x-title", "Aider")], "{}", Agent::Aider);
        check(
            &[],
            r#"{"messages":[{"role":"system","content":"You are a helpful assistant that can interact multiple times with a computer shell to solve programming tasks."}]}"#,
            Agent::MiniSwe,
        );
        check(&[], r#"{"messages":7}"#, Agent::Other);
    }
}
