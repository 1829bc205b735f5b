//! Clients hang up at random moments: what they had asked for is gone from the engines within a second, and so is what was held
//! for them.

use super::Args;
use super::cluster::Cluster;
use super::kills::check_rest;
use super::load::request;
use super::report::Report;
use crate::processes::http::post;
use crate::processes::until;
use anyhow::Result;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Clients at one time.
const AT_ONE_TIME: u32 = 64;
/// Tokens of an answer: more than anybody waits for.
const ANSWER: usize = 2_000;
/// Hang-ups come within so many tokens; one in four comes before the head of the answer is read.
const WITHIN_TOKENS: u32 = 40;

pub fn run(binary: &Path, args: &Args, report: &mut Report) -> Result<()> {
    let cluster = Cluster::start(binary, &[])?;
    let model = cluster.model()?;
    let next = AtomicU32::new(0);
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..AT_ONE_TIME {
            scope.spawn(|| {
                loop {
                    let client = next.fetch_add(1, Ordering::Relaxed);
                    if client >= args.hang_ups {
                        return;
                    }
                    hang_up(&cluster, &model, client);
                }
            });
        }
    });
    let ended = Instant::now();
    report.say("hang-ups", format!("{} in {:.1?}", args.hang_ups, ended - began));
    let idle = until("all engines are idle", Duration::from_secs(30), || {
        ["p0", "d0", "d1"]
            .iter()
            .all(|name| cluster.busy(name).is_ok_and(|busy| busy == 0.0))
    });
    let value = idle
        .as_ref()
        .map_or_else(ToString::to_string, |took| format!("{took:.2?}"));
    let in_time = idle.is_ok_and(|took| took <= Duration::from_secs(1));
    report.check("running counts at zero after", value, "at most 1 s", in_time);
    let free = until("no block is pinned", Duration::from_secs(35), || {
        ["p0", "d0", "d1"]
            .iter()
            .all(|name| cluster.pinned(name).is_ok_and(|share| share == 0.0))
    });
    let after = ended.elapsed();
    let value = free
        .as_ref()
        .map_or_else(ToString::to_string, |_| format!("{after:.2?}"));
    let in_time = free.is_ok() && after <= Duration::from_secs(1);
    report.check("no block pinned after", value, "at most 1 s", in_time);
    check_rest(&cluster, report);
    Ok(())
}

/// One client: asks, takes a few tokens, or none, and is gone.
fn hang_up(cluster: &Cluster, model: &str, client: u32) {
    // Spread by a fixed rule: a run is the same each time, as far as machines allow.
    let drawn = client.wrapping_mul(2_654_435_761) >> 16;
    let body = request(model, client % 100, 400 + (drawn % 900) as usize, ANSWER);
    let session = format!("gone-{}", client % 100);
    if drawn.is_multiple_of(4) {
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-homing-session: {session}\r\n\
             content-length: {}\r\n\r\n{body}",
            body.to_string().len()
        );
        // Whoever is refused has nothing to hang up.
        if let Ok(mut stream) = std::net::TcpStream::connect(cluster.router) {
            let _ = std::io::Write::write_all(&mut stream, head.as_bytes());
            std::thread::sleep(Duration::from_millis(u64::from(drawn % 400)));
        }
        return;
    }
    if let Ok(response) = post(cluster.router, "/v1/completions", &session, &body) {
        let mut left = drawn % WITHIN_TOKENS;
        response.completion(|_| {
            left = left.saturating_sub(1);
            left > 0
        });
    }
}
