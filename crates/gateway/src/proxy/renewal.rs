//! Leases that begin anew: a worker holds a prompt's KV for a puller, who is late for a reason.
//!
//! A decode worker's queue, its pool, or whoever else fills it may keep a leg from its pull for longer than a lease lasts (30 s),
//! and a leg that comes too late has its prompt prefilled again. So as long as the handoff is wanted its lease is renewed,
//! [`RENEWALS_A_LEASE`] times in its length so that two messages in a row may be lost. How long a leg may wait is not decided here:
//! the core's clock of that phase ends the attempt, and with it whatever polls this. A router that has died renews nothing, and
//! the lease ends; the worker itself bounds how often one may begin anew.
//!
//! The answer says what has become of the KV. Where it is gone (the lease ended all the same, or the worker has another life),
//! the core hears of it at once and plans anew, instead of when the pull fails.
//!
//! Only embedded workers can be told; vLLM's decode workers renew by heartbeats what they were asked to pull, and nobody
//! can do it for them.

use crate::upstream::{Answer, Upstream};
use bytes::Bytes;
use homing_wire::openai::ApiError;
use http::{Request, StatusCode};
use http_body_util::Full;
use serde::Deserialize;
use std::time::Duration;

/// How often a lease is renewed in its length.
const RENEWALS_A_LEASE: u32 = 3;
/// How long one try may take; a short lease leaves less time.
const TRY_TIMEOUT: Duration = Duration::from_secs(2);

/// What is said, and how often.
pub(super) struct Renewals {
    pub(super) upstream: Upstream,
    pub(super) request: Request<Full<Bytes>>,
    /// How long it lasts unless it is renewed.
    pub(super) lease: Duration,
}

/// What a worker has said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    /// It holds it, or will.
    Held,
    /// Its puller has it: there is nothing to renew any more.
    Pulled,
    /// It holds nothing.
    Gone,
    /// Nothing that can be made use of.
    Nothing,
}

/// A worker's answer; a later one may have more states.
#[derive(Debug, Deserialize)]
struct Renewed {
    state: String,
}

impl Renewals {
    /// Renews until the worker says that there is nothing to renew any more. Returns when the KV is gone, and never when it was
    /// pulled: what follows from that the decode leg says.
    pub(super) async fn run(self) {
        loop {
            tokio::time::sleep(self.lease / RENEWALS_A_LEASE).await;
            let timeout = TRY_TIMEOUT.min(self.lease / RENEWALS_A_LEASE);
            let answer = self.upstream.exchange(self.request.clone(), timeout).await;
            match answer.as_ref().map_or(Said::Nothing, said) {
                Said::Held | Said::Nothing => {}
                Said::Pulled => std::future::pending().await,
                Said::Gone => return,
            }
        }
    }
}

fn said(answer: &Answer) -> Said {
    if answer.status.is_success() {
        return match serde_json::from_slice::<Renewed>(&answer.body) {
            Ok(Renewed { state }) if state == "pulled" => Said::Pulled,
            Ok(_) => Said::Held,
            Err(_) => Said::Nothing,
        };
    }
    // Another 404 is a path that somebody in between does not know.
    let error = ApiError::parse(answer.status.as_u16(), &answer.body);
    match (answer.status, error.code.as_deref()) {
        (StatusCode::NOT_FOUND, Some("unknown_export" | "other_life")) => Said::Gone,
        _ => Said::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_worker_that_says_so_holds_nothing_any_more() {
        let check = |status: u16, body: &str, expected: Said| {
            let answer = Answer {
                status: StatusCode::from_u16(status).unwrap(),
                content_type: None,
                body: Bytes::copy_from_slice(body.as_bytes()),
            };
            assert_eq!(said(&answer), expected, "{status} {body}");
        };
        let error = |code: &str| format!(r#"{{"error":{{"message":"m","type":"t","code":"{code}"}}}}"#);
        check(200, r#"{"state":"held","lease_ms":30000}"#, Said::Held);
        check(200, r#"{"state":"computing"}"#, Said::Held);
        check(200, r#"{"state":"pulled"}"#, Said::Pulled);
        check(200, "ok", Said::Nothing);
        check(404, &error("unknown_export"), Said::Gone);
        check(404, &error("other_life"), Said::Gone);
        check(404, &error("not_found"), Said::Nothing);
        check(404, "not found", Said::Nothing);
        check(503, &error("unknown_export"), Said::Nothing);
        check(429, "", Said::Nothing);
    }
}
