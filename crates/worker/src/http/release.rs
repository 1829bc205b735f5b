//! `/homing/release`: whoever asked for an export says that nobody will pull it.
//!
//! vLLM has no such call: what a router gives up there stays until its lease ends. The export is named as its client named
//! the request (`x-request-id`), because a client that goes in the middle never learns what the worker calls it; where the
//! request is not at its end yet, it is given up with all that it has. Bytes of a block are read on the engine's thread and
//! only while the block is held, so that a pull that is under way breaks off, and never reads what is somebody else's.
//!
//! To say it twice, too late, or before the request is here, is no error: a request that comes after its release is given up as it
//! begins. To say it to another life of the worker is an error: what was meant is gone.

use super::{Payload, REQUEST_ID_BYTES_MAX, Shared, admin, failure};
use axum::extract::State;
use axum::response::Response;
use homing_units::BootEpoch;
use homing_wire::openai::{ApiError, Body, ErrorKind};
use serde::{Deserialize, Serialize};

/// A release's body at most, in bytes.
const BODY_BYTES_MAX: usize = 1024;

/// What `/homing/release` answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Released {
    /// Whether there was anything to release.
    pub released: bool,
}

/// What it is asked.
struct Release {
    request_id: String,
    epoch: BootEpoch,
}

pub(super) async fn release(State(app): State<Shared>, Payload(payload): Payload) -> Response {
    let asked = payload.and_then(|bytes| match bytes.len() > BODY_BYTES_MAX {
        true => Err(ApiError::body_too_large(BODY_BYTES_MAX)),
        false => Release::parse(&Body::parse(&bytes)?),
    });
    let asked = match asked {
        Ok(asked) => asked,
        Err(error) => return failure(&error),
    };
    if asked.epoch != app.info.epoch {
        let (asked, own) = (asked.epoch.0, app.info.epoch.0);
        let message = format!("`boot_epoch` is `{asked}`, expected this life's `{own}`");
        return failure(&ApiError::new(ErrorKind::NotFound, message).with_code("other_life"));
    }
    match app.engine.release_export(asked.request_id).await {
        Ok(released) => admin::answer(&Released { released }),
        Err(stopped) => {
            failure(&ApiError::new(ErrorKind::Unavailable, stopped.to_string()).with_code("engine_stopped"))
        }
    }
}

impl Release {
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
