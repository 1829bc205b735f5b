//! Exports that nobody will pull any more: given up at their workers, and said again until the worker has heard it.
//!
//! What a worker is not told to let go of stays pinned until its lease ends, half a minute of a prompt's room for one lost
//! message. So a release is said again, after pauses with jitter, until the worker has answered it (a refusal is an answer:
//! it would be refused again), lives another life, or has seen the lease end by itself. It names the request and the life
//! that it was sent to, so that to say it twice changes nothing. A worker that hears it before the request itself remembers
//! that, which is why `released: false` is an end, too.
//!
//! Only embedded workers can be told so; [`Fleet::release_uri`] knows.

use super::abort::command;
use super::renewal::Renewals;
use crate::fleet::Fleet;
use crate::upstream::Upstream;
use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use homing_router::Backoff;
use homing_units::{BootEpoch, WorkerId, rng_for};
use http::{HeaderMap, Request, StatusCode};
use http_body_util::Full;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// How long one try may take.
const TRY_TIMEOUT: Duration = Duration::from_secs(2);
/// The pauses between two tries.
const PAUSES: Backoff = Backoff {
    base: Duration::from_millis(50),
    cap: Duration::from_secs(2),
};
/// As long as the lease of an embedded worker (30 s): after that there is nothing to let go of.
const PATIENCE: Duration = Duration::from_secs(30);
/// Tries of one release, whatever the pauses.
const TRIES_MAX: u32 = 32;
/// Releases under way at once; those beyond are left to their leases.
const RELEASES_MAX: usize = 4_096;

/// The releases of a gateway. Clones share their bound.
#[derive(Clone)]
pub(crate) struct Releases {
    upstream: Upstream,
    fleet: Arc<Fleet>,
    places: Arc<Semaphore>,
    /// Counts them, so that no two draw the same pauses.
    begun: Arc<AtomicU64>,
}

/// What a leg holds, or will, for another: its lease is renewed while it is waited for, and it is given up when this is dropped
/// before it has ended.
pub(crate) struct Hold {
    releases: Releases,
    renewals: Option<Renewals>,
    /// Taken where there is nothing to give up any more.
    release: Option<Release>,
    /// What keeps it from ending by itself, from when on it is held; ends when the worker says that it is gone.
    renewal: Option<BoxFuture<'static, ()>>,
}

/// What is said, and to whom.
struct Release {
    worker: WorkerId,
    epoch: BootEpoch,
    request: Request<Full<Bytes>>,
}

/// What came of a try.
enum Tried {
    /// The worker has answered, so that there is nothing to say any more.
    Heard,
    /// It may hear it next time.
    Missed(String),
}

impl Releases {
    pub(crate) fn new(upstream: Upstream, fleet: Arc<Fleet>) -> Self {
        Self {
            upstream,
            fleet,
            places: Arc::new(Semaphore::new(RELEASES_MAX)),
            begun: Arc::default(),
        }
    }

    /// The hold of a leg that is called `name` and has these headers, where its worker can be told.
    pub(crate) fn hold(&self, worker: WorkerId, headers: &HeaderMap, name: &str) -> Option<Hold> {
        let uri = self.fleet.release_uri(worker)?;
        let epoch = self.fleet.life(worker).epoch;
        let body = json!({ "request_id": name, "boot_epoch": epoch });
        let release = command(&uri, headers, &body).map(|request| Release { worker, epoch, request });
        Some(Hold {
            renewals: self.renewals(worker, headers, &body),
            releases: self.clone(),
            release,
            renewal: None,
        })
    }

    /// How the lease of what a leg holds is renewed, where it can be.
    fn renewals(&self, worker: WorkerId, headers: &HeaderMap, body: &Value) -> Option<Renewals> {
        let (uri, lease) = self.fleet.renewal(worker)?;
        Some(Renewals {
            upstream: self.upstream.clone(),
            request: command(&uri, headers, body)?,
            lease,
        })
    }

    /// Says it until it is heard, in a task of its own.
    fn begin(&self, release: Release) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        match Arc::clone(&self.places).try_acquire_owned() {
            Ok(place) => drop(runtime.spawn(self.clone().insist(release, place))),
            Err(_) => tracing::warn!(
                worker = self.fleet.name(release.worker),
                at_once = RELEASES_MAX,
                "an export is left to its lease: too many are being released"
            ),
        }
    }

    async fn insist(self, release: Release, _place: OwnedSemaphorePermit) {
        let began = Instant::now();
        let mut rng = rng_for(self.begun.fetch_add(1, Ordering::Relaxed), "release");
        let mut pause = Duration::ZERO;
        let mut last = String::new();
        for _ in 0..TRIES_MAX {
            if began.elapsed() >= PATIENCE || self.fleet.life(release.worker).epoch != release.epoch {
                break;
            }
            match self.once(&release).await {
                Tried::Heard => return,
                Tried::Missed(why) => last = why,
            }
            pause = PAUSES.pause(pause, &mut rng);
            tokio::time::sleep(pause).await;
        }
        let worker = self.fleet.name(release.worker);
        tracing::debug!(
            worker,
            last,
            "an export was left to its lease, or its worker has another life"
        );
    }

    async fn once(&self, release: &Release) -> Tried {
        match self.upstream.exchange(release.request.clone(), TRY_TIMEOUT).await {
            Ok(answer) if is_an_end(answer.status) => Tried::Heard,
            Ok(answer) => Tried::Missed(format!("answered `{}`", answer.status)),
            Err(error) => Tried::Missed(error),
        }
    }
}

impl Hold {
    /// The worker holds it from now on, for a time that begins anew as long as this lives.
    pub(crate) fn begins(&mut self) {
        self.renewal = self.renewals.take().map(|renewals| renewals.run().boxed());
    }

    /// It was pulled, or never was, or is no more.
    pub(crate) fn ended(&mut self) {
        self.release = None;
        self.renewals = None;
        self.renewal = None;
    }

    /// Whether there is something to wait for.
    pub(crate) const fn is_renewed(&self) -> bool {
        self.renewal.is_some()
    }

    /// Renews the lease for as long as this is polled. Returns when the worker says that it holds nothing any more. Loses
    /// nothing when dropped before.
    pub(crate) async fn gone(&mut self) {
        match &mut self.renewal {
            Some(renewal) => renewal.await,
            None => std::future::pending().await,
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(release) = self.release.take() {
            self.releases.begin(release);
        }
    }
}

/// Whether an answer of this status would be the same the next time.
fn is_an_end(status: StatusCode) -> bool {
    let passing = [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS];
    !status.is_server_error() && !passing.contains(&status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_pass_is_said_again() {
        let check = |status: u16, expected: bool| {
            assert_eq!(is_an_end(StatusCode::from_u16(status).unwrap()), expected, "{status}");
        };
        check(200, true);
        check(404, true);
        check(401, true);
        check(408, false);
        check(429, false);
        check(500, false);
        check(503, false);
    }
}
