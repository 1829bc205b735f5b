//! Where an engine's KV events come from: a socket that the engine has bound, or one that the router binds and engines
//! connect to.
//!
//! vLLM binds an endpoint with a wildcard and every `ipc` one, and connects to any other: `tcp://10.0.0.5:5557` in its
//! `--kv-events-config` means that somebody listens there. The text `bind:` before an endpoint says that it is the router.

use std::fmt;
use std::str::FromStr;

/// A source of KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EventSource {
    /// The engine listens.
    Connect(String),
    /// The router listens.
    Bind(String),
}

/// What a source looks like.
pub(crate) const EXPECTED_SOURCE: &str =
    "`tcp://HOST:PORT` or `ipc://PATH`, with `bind:` before it where engines connect to the router";

impl FromStr for EventSource {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (make, endpoint): (fn(String) -> Self, &str) = match text.strip_prefix("bind:") {
            Some(endpoint) => (Self::Bind, endpoint),
            None => (Self::Connect, text),
        };
        is_endpoint(endpoint).then(|| make(endpoint.to_owned())).ok_or(())
    }
}

impl fmt::Display for EventSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect(endpoint) => f.write_str(endpoint),
            Self::Bind(endpoint) => write!(f, "bind:{endpoint}"),
        }
    }
}

/// Whether an endpoint is one that can be reached or listened on.
pub(crate) fn is_endpoint(endpoint: &str) -> bool {
    if let Some(path) = endpoint.strip_prefix("ipc://") {
        return !path.is_empty();
    }
    let address = endpoint
        .strip_prefix("tcp://")
        .and_then(|address| address.rsplit_once(':'));
    address.is_some_and(|(host, port)| !host.is_empty() && host != "*" && port.parse::<u16>().is_ok())
}

/// The endpoint at which an engine on `host` is reached that bound this one; `None` where the engine does not bind it but
/// connects to it.
pub(crate) fn reached_at(bound: &str, host: &str) -> Option<String> {
    if bound.starts_with("ipc://") {
        return Some(bound.to_owned());
    }
    let (address, port) = bound.strip_prefix("tcp://")?.rsplit_once(':')?;
    let wildcard = matches!(address, "*" | "[::]" | "::" | "0.0.0.0");
    match (wildcard, address.contains("::")) {
        (true, _) => Some(format!("tcp://{host}:{port}")),
        (false, true) => Some(bound.to_owned()),
        (false, false) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_connected_to_or_bound() {
        let check = |text: &str, expected: Option<EventSource>| {
            let source: Option<EventSource> = text.parse().ok();
            assert_eq!(source, expected, "{text}");
            assert_eq!(
                source.map(|source| source.to_string()),
                expected.map(|_| text.to_owned())
            );
        };
        check("tcp://h:1", Some(EventSource::Connect("tcp://h:1".to_owned())));
        check("ipc:///a/b", Some(EventSource::Connect("ipc:///a/b".to_owned())));
        check(
            "bind:tcp://127.0.0.1:5557",
            Some(EventSource::Bind("tcp://127.0.0.1:5557".to_owned())),
        );
        for wrong in [
            "",
            "h:1",
            "udp://h:1",
            "tcp://h",
            "tcp://h:x",
            "tcp://*:1",
            "ipc://",
            "bind:",
            "bind:bind:ipc:///x",
        ] {
            check(wrong, None);
        }
    }

    #[test]
    fn what_an_engine_bound_is_reached_where_the_engine_is() {
        let check = |bound: &str, expected: Option<&str>| {
            assert_eq!(reached_at(bound, "10.0.0.7").as_deref(), expected, "{bound}");
        };
        check("tcp://*:5557", Some("tcp://10.0.0.7:5557"));
        check("tcp://[::]:5557", Some("tcp://10.0.0.7:5557"));
        check("tcp://[::1]:5557", Some("tcp://[::1]:5557"));
        check("ipc:///run/x", Some("ipc:///run/x"));
        check("tcp://127.0.0.1:5557", None);
        check("inproc://x", None);
    }
}
