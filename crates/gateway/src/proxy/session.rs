//! Which session a request says it belongs to: our own header, else the fields that coding agents send by themselves.
//!
//! The name stays here; the core gets a hash of it. A field of an agent that makes no sense is ignored, because agents
//! do not send it for us; our own header is meant for us, so a bad one is an error.

use homing_router::event::SessionHint;
use homing_wire::openai::{ApiError, Body};
use http::HeaderMap;

/// Our own header, in requests and answers.
pub(crate) const SESSION_HEADER: &str = "x-homing-session";

/// Longest session name, in characters.
const NAME_MAX: usize = 128;

/// The headers of agents that name a conversation, the most specific first. Each value names a session only together
/// with the kind of its agent, so that two agents cannot meet in one session by chance.
const AGENT_HEADERS: [(&str, &str); 6] = [
    ("x-claude-code-session-id", "claude"),
    ("session-id", "codex"),
    ("session_id", "codex"),
    ("x-opencode-session", "opencode"),
    ("x-session-affinity", "opencode"),
    ("x-session-id", "header"),
];

/// A session as the client names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SessionName {
    /// The name as the client gave it; `None` where it gave none.
    pub(crate) name: Option<String>,
    /// What the core gets of it.
    pub(crate) hint: SessionHint,
}

/// Finds the session's name.
///
/// # Errors
/// `x-homing-session` is not 1 to 128 visible ASCII characters (400).
pub(crate) fn session_of(headers: &HeaderMap, body: &Body) -> Result<SessionName, ApiError> {
    if let Some(value) = headers.get(SESSION_HEADER) {
        let Some(name) = valid(value.as_bytes()) else {
            let message = format!("expected `{SESSION_HEADER}` to be 1 to {NAME_MAX} visible ASCII characters");
            return Err(ApiError::invalid(message)
                .with_param(SESSION_HEADER)
                .with_code("invalid_session"));
        };
        return Ok(named("homing", name));
    }
    let of_header = AGENT_HEADERS.iter().find_map(|(header, agent)| {
        headers
            .get(*header)
            .and_then(|value| valid(value.as_bytes()))
            .map(|name| (*agent, name))
    });
    let found = of_header
        .map(|(agent, name)| named(agent, name))
        .or_else(|| of_body(body));
    Ok(found.unwrap_or(SessionName {
        name: None,
        hint: SessionHint::Recognise,
    }))
}

fn of_body(body: &Body) -> Option<SessionName> {
    if let Ok(Some(key)) = body.read::<String>("prompt_cache_key", "a string") {
        return valid(key.as_bytes()).map(|name| named("cache-key", name));
    }
    let metadata: serde_json::Value = serde_json::from_slice(body.get("metadata")?).ok()?;
    let session = session_of_user(metadata.get("user_id")?.as_str()?)?;
    valid(session.as_bytes()).map(|name| named("claude", name))
}

/// Claude Code packs its session into Anthropic's `metadata.user_id`: as JSON in its newer releases, behind `_session_`
/// in the older ones. A user id without a session says nothing: one user runs many sessions.
fn session_of_user(user: &str) -> Option<String> {
    if let Ok(value) = serde_json::from_str::<serde_json::Value>(user) {
        return value.get("session_id")?.as_str().map(str::to_owned);
    }
    user.rsplit_once("_session_").map(|(_, session)| session.to_owned())
}

fn valid(bytes: &[u8]) -> Option<&str> {
    let visible = !bytes.is_empty() && bytes.len() <= NAME_MAX && bytes.iter().all(u8::is_ascii_graphic);
    visible.then(|| str::from_utf8(bytes).expect("ASCII is UTF-8"))
}

fn named(agent: &str, name: &str) -> SessionName {
    let mut hasher = blake3::Hasher::new();
    hasher.update(agent.as_bytes());
    hasher.update(&[0]);
    hasher.update(name.as_bytes());
    let mut key = [0; 16];
    key.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    SessionName {
        name: Some(name.to_owned()),
        hint: SessionHint::Explicit(u128::from_le_bytes(key)),
    }
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
}
