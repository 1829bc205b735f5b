//! What whoever asked for an export says of it: `/homing/release`, that nobody will pull it; `/homing/renew`, that somebody
//! still will.
//!
//! vLLM has no such calls: what a router gives up there stays until its lease ends. The export is named as its client named
//! the request (`x-request-id`), because a client that goes in the middle never learns what the worker calls it; where the
//! request is not at its end yet, it is given up with all that it has. Bytes of a block are read on the engine's thread and
//! only while the block is held, so that a pull that is under way breaks off, and never reads what is somebody else's.
//!
//! A lease is short, because whoever asked may have died. Whoever lives renews it as long as the puller is late for a reason, as
//! often as the engine allows. The answer says what is there: KV that is `held` and for how long, a request that is `computing`
//! still, KV that was `pulled`. What is not there is a 404 with its own code, so that whoever asked need not wait for a
//! pull to fail.
//!
//! To release twice, too late, or before the request is here, is no error: a request that comes after its release is given up as it
//! begins. To speak to another life of the worker is an error: what was meant is gone.

use super::{App, Payload, REQUEST_ID_BYTES_MAX, Shared, admin, failure};
use crate::engine_thread::{EngineStopped, Renewal};
use axum::body::Bytes;
use axum::extract::State;
use axum::response::Response;
use homing_units::BootEpoch;
use homing_wire::openai::{ApiError, Body, ErrorKind};
use serde::{Deserialize, Serialize};

/// A body at most, in bytes.
const BODY_BYTES_MAX: usize = 1024;

/// What `/homing/release` answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Released {
    /// Whether there was anything to release.
    pub released: bool,
}

/// What `/homing/renew` answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Renewed {
    /// It is held.
    Held {
        /// For so long from now on, in milliseconds.
        lease_ms: u64,
    },
    /// Its request has not come to its end: nothing is held yet, and nothing runs out.
    Computing,
    /// Its puller has it.
    Pulled,
}

/// Whose export is meant, and in which life.
struct Meant {
    request_id: String,
    epoch: BootEpoch,
}

pub(super) async fn release(State(app): State<Shared>, Payload(payload): Payload) -> Response {
    let name = match meant(&app, payload) {
        Ok(name) => name,
        Err(error) => return failure(&error),
    };
    match app.engine.release_export(name).await {
        Ok(released) => admin::answer(&Released { released }),
        Err(stopped) => failure(&engine_stopped(stopped)),
    }
}

pub(super) async fn renew(State(app): State<Shared>, Payload(payload): Payload) -> Response {
    let name = match meant(&app, payload) {
        Ok(name) => name,
        Err(error) => return failure(&error),
    };
    let renewed = match app.engine.renew_export(name).await {
        Ok(Renewal::Held(lease)) => Renewed::Held {
            lease_ms: u64::try_from(lease.as_millis()).unwrap_or(u64::MAX),
        },
        Ok(Renewal::Computing) => Renewed::Computing,
        Ok(Renewal::Pulled) => Renewed::Pulled,
        Ok(Renewal::Unknown) => {
            let message = "no kv is held for `request_id`, expected an export whose lease has not ended";
            return failure(&ApiError::new(ErrorKind::NotFound, message).with_code("unknown_export"));
        }
        Err(stopped) => return failure(&engine_stopped(stopped)),
    };
    admin::answer(&renewed)
}

fn engine_stopped(stopped: EngineStopped) -> ApiError {
    ApiError::new(ErrorKind::Unavailable, stopped.to_string()).with_code("engine_stopped")
}

/// The name of the request that is meant, if it is one of this life.
fn meant(app: &App, payload: Result<Bytes, ApiError>) -> Result<String, ApiError> {
    let bytes = payload?;
    if bytes.len() > BODY_BYTES_MAX {
        return Err(ApiError::body_too_large(BODY_BYTES_MAX));
    }
    let meant = Meant::parse(&Body::parse(&bytes)?)?;
    if meant.epoch != app.info.epoch {
        let (asked, own) = (meant.epoch.0, app.info.epoch.0);
        let message = format!("`boot_epoch` is `{asked}`, expected this life's `{own}`");
        return Err(ApiError::new(ErrorKind::NotFound, message).with_code("other_life"));
    }
    Ok(meant.request_id)
}

impl Meant {
    fn parse(body: &Body) -> Result<Self, ApiError> {
        let missing = |name: &str, expected: &str| {
            ApiError::invalid(format!("`{name}` is missing, expected {expected}")).with_param(name)
        };
        const NAME: &str = "the request's `x-request-id`";
        const EPOCH: &str = "the worker's boot epoch";
        let request_id: String = body
            .read("request_id", NAME)?
            .ok_or_else(|| missing("request_id", NAME))?;
        let epoch = body
            .read::<u64>("boot_epoch", EPOCH)?
            .ok_or_else(|| missing("boot_epoch", EPOCH))?;
        if request_id.len() > REQUEST_ID_BYTES_MAX {
            let message = format!("`request_id` is too long, expected at most {REQUEST_ID_BYTES_MAX} bytes");
            return Err(ApiError::invalid(message).with_param("request_id"));
        }
        Ok(Self {
            request_id,
            epoch: BootEpoch(epoch),
        })
    }
}
