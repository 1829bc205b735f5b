//! Which session a request says it belongs to: our own header, else what coding agents say by themselves (`agents`).
//!
//! The name stays here; the core gets a hash of it. A field of an agent that makes no sense is ignored, because agents
//! do not send it for us; our own header is meant for us, so a bad one is an error.

use super::agents::{Agent, NAME_MAX, agent, conversation, valid};
use crate::prefix::watch::Origin;
use homing_router::event::{ClientKind, SessionHint};
use homing_wire::openai::{ApiError, Body};
use http::HeaderMap;
use serde::Deserialize;

/// Our own header, in requests and answers.
pub(crate) const SESSION_HEADER: &str = "x-homing-session";

/// A session as the client names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SessionName {
    /// The name as the client gave it; `None` where it gave none.
    pub(crate) name: Option<String>,
    /// What the core gets of it.
    pub(crate) hint: SessionHint,
    /// Who sent it.
    pub(crate) agent: Agent,
    /// The name without what tells its conversations apart.
    group: Option<u128>,
    /// The same of the session that this one works for, where the client says so.
    parent: Option<u128>,
}

impl SessionName {
    /// What the core is told of its client: which agent it is, and whether it works for another.
    pub(crate) const fn kind(&self) -> ClientKind {
        self.agent.kind(self.parent.is_some())
    }

    /// Who the session is of, for the watch of prefixes.
    pub(crate) const fn origin(&self) -> Origin {
        Origin {
            client: self.agent.as_str(),
            name: self.group,
            parent: self.parent,
        }
    }
}

/// Finds the session's name.
///
/// # Errors
/// `x-homing-session` is not 1 to 128 visible ASCII characters (400).
pub(crate) fn session_of(headers: &HeaderMap, body: &Body) -> Result<SessionName, ApiError> {
    let conversation = conversation(headers, body);
    let agent = agent(headers, body, conversation.as_ref());
    if let Some(value) = headers.get(SESSION_HEADER) {
        let Some(name) = valid(value.as_bytes()) else {
            let message = format!("expected `{SESSION_HEADER}` to be 1 to {NAME_MAX} visible ASCII characters");
            return Err(ApiError::invalid(message)
                .with_param(SESSION_HEADER)
                .with_code("invalid_session"));
        };
        let key = key("homing", name, &[]);
        return Ok(SessionName {
            name: Some(name.to_owned()),
            hint: SessionHint::Explicit(key),
            agent,
            group: Some(key),
            parent: None,
        });
    }
    let Some(conversation) = conversation else {
        return Ok(SessionName {
            name: None,
            hint: SessionHint::Recognise,
            agent,
            group: None,
            parent: None,
        });
    };
    let kind = conversation.kind;
    let lane = if conversation.is_exact { Vec::new() } else { lane(body) };
    Ok(SessionName {
        hint: SessionHint::Explicit(key(kind, &conversation.name, &lane)),
        group: Some(key(kind, &conversation.name, &[])),
        parent: conversation.parent.map(|parent| key(kind, &parent, &[])),
        name: Some(conversation.name),
        agent,
    })
}

/// The tools that a request has, by their names: what tells an agent's conversation from what it asks beside it.
/// Empty where there are none.
fn lane(body: &Body) -> Vec<u8> {
    #[derive(Deserialize)]
    struct Tool {
        #[serde(default)]
        name: Option<String>,
        #[serde(default)]
        function: Option<Named>,
    }
    #[derive(Deserialize)]
    struct Named {
        #[serde(default)]
        name: String,
    }
    let Ok(Some(tools)) = body.read::<Vec<Tool>>("tools", "a list of tools") else {
        return Vec::new();
    };
    let name = |tool: Tool| {
        tool.name
            .or(tool.function.map(|function| function.name))
            .unwrap_or_default()
    };
    let mut names: Vec<String> = tools.into_iter().map(name).collect();
    names.sort_unstable();
    names.join("\n").into_bytes()
}

/// What the core gets of a name.
fn key(kind: &str, name: &str, lane: &[u8]) -> u128 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(kind.as_bytes());
    hasher.update(&[0]);
    hasher.update(name.as_bytes());
    if !lane.is_empty() {
        hasher.update(&[0]);
        hasher.update(lane);
    }
    let mut key = [0; 16];
    key.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    u128::from_le_bytes(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &[u8])]) -> HeaderMap {
        let value = |bytes: &[u8]| http::HeaderValue::from_bytes(bytes).unwrap();
        pairs
            .iter()
            .map(|(name, bytes)| (http::HeaderName::from_static(name), value(bytes)))
            .collect()
    }

    fn check(pairs: &[(&'static str, &[u8])], body: &str, expected: Option<&str>) {
        let found = session_of(&headers(pairs), &Body::parse(&body.to_owned().into()).unwrap()).unwrap();
        assert_eq!(found.name.as_deref(), expected, "{pairs:?} {body}");
        assert_eq!(
            found.hint == SessionHint::Recognise,
            expected.is_none(),
            "{pairs:?} {body}"
        );
    }

    #[test]
    fn the_most_specific_name_wins() {
        check(&[], "{}", None);
        check(&[("x-homing-session", b"a"), ("session-id", b"b")], "{}", Some("a"));
        check(
            &[("session-id", b"b"), ("x-session-affinity", b"c")],
            r#"{"prompt_cache_key":"d"}"#,
            Some("b"),
        );
        check(
            &[("x-claude-code-session-id", b"cc"), ("session_id", b"b")],
            "{}",
            Some("cc"),
        );
        check(
            &[("session-id", b"not one word")],
            r#"{"prompt_cache_key":"d"}"#,
            Some("d"),
        );
        check(
            &[],
            r#"{"metadata":{"user_id":"user_ab_account__session_1-2-3"}}"#,
            Some("1-2-3"),
        );
        check(
            &[],
            r#"{"metadata":{"user_id":"{\"device_id\":\"x\",\"session_id\":\"9\"}"}}"#,
            Some("9"),
        );
        check(&[], r#"{"metadata":{"user_id":"alice"}}"#, None);
        check(&[], r#"{"metadata":7,"prompt_cache_key":null}"#, None);
    }

    #[test]
    fn our_own_header_must_be_a_name() {
        let body = Body::parse(&"{}".into()).unwrap();
        let long = [b'a'; NAME_MAX + 1];
        for bad in [&b""[..], b"a b", b"\xff", &long] {
            let error = session_of(&headers(&[("x-homing-session", bad)]), &body).unwrap_err();
            assert_eq!(
                (error.status, error.code.as_deref()),
                (400, Some("invalid_session")),
                "{bad:?}"
            );
        }
        session_of(&headers(&[("x-homing-session", &long[..NAME_MAX])]), &body).unwrap();
    }

    #[test]
    fn two_agents_do_not_share_a_session_by_chance() {
        let body = Body::parse(&"{}".into()).unwrap();
        let hint = |header| session_of(&headers(&[(header, b"1")]), &body).unwrap().hint;
        assert_ne!(hint("session-id"), hint("x-opencode-session"));
        assert_eq!(
            hint("session-id"),
            hint("session_id"),
            "Codex renamed its header; the session is the same"
        );
    }

    #[test]
    fn what_an_agent_asks_beside_its_conversation_is_told_from_it() {
        let hint = |pairs: &[(&'static str, &[u8])], body: &str| {
            let body = Body::parse(&body.to_owned().into()).unwrap();
            session_of(&headers(pairs), &body).unwrap().hint
        };
        let tools = r#"{"tools":[{"name":"Task"},{"name":"Bash"}]}"#;
        let reordered = r#"{"tools":[{"name":"Bash","x":1},{"name":"Task"}]}"#;
        let claude: &[(&'static str, &[u8])] = &[("x-claude-code-session-id", b"s")];
        assert_eq!(hint(claude, tools), hint(claude, reordered), "the order says nothing");
        assert_ne!(hint(claude, tools), hint(claude, "{}"), "a title is no turn");
        assert_ne!(hint(claude, tools), hint(claude, r#"{"tools":[{"name":"Bash"}]}"#));
        let codex: &[(&'static str, &[u8])] = &[("thread-id", b"t")];
        assert_eq!(hint(codex, tools), hint(codex, "{}"), "a thread is one thing");
    }
}
