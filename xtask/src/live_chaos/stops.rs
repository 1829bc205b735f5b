//! A decode worker is stopped (SIGSTOP): it is doubted soon, its streams go on elsewhere, nobody else is doubted, and when
//! it goes on it is used again soon.

use super::Args;
use super::cluster::Cluster;
use super::kills::{check_rest, check_texts};
use super::load::{Load, ask, request};
use super::report::Report;
use crate::processes::until;
use anyhow::Result;
use std::path::Path;
use std::time::{Duration, Instant};

/// Sessions at one time: enough that the worker has streams.
const SESSIONS: u32 = 40;
/// Tokens of an answer.
const ANSWER: usize = 150;
/// How long the worker stands still.
const STOPPED: Duration = Duration::from_secs(12);

pub fn run(binary: &Path, _args: &Args, report: &mut Report) -> Result<()> {
    let mut cluster = Cluster::start(binary, &[])?;
    let model = cluster.model()?;
    let load = Load::start(cluster.router, &model, SESSIONS, ANSWER);
    until("the worker has streams", Duration::from_secs(60), || {
        cluster.busy("d0").is_ok_and(|busy| busy >= 5.0) && cluster.sampled("d0").is_ok_and(|tokens| tokens >= 500.0)
    })?;
    let stopped = Instant::now();
    cluster.signal("d0", "STOP")?;
    let doubted = until("it is doubted", Duration::from_secs(15), || doubts(&cluster, "d0"));
    let value = doubted
        .as_ref()
        .map_or_else(ToString::to_string, |took| format!("{took:.2?}"));
    let in_time = doubted.is_ok_and(|took| took <= Duration::from_secs(3));
    report.check("suspected after", value, "at most 3 s", in_time);
    let mut cascade = false;
    while stopped.elapsed() < STOPPED {
        cascade |= doubts(&cluster, "d1") || doubts(&cluster, "p0");
        std::thread::sleep(Duration::from_millis(50));
    }
    report.check("other workers suspected", cascade, "no", !cascade);
    cluster.signal("d0", "CONT")?;
    let back = until("it is used again", Duration::from_secs(30), || {
        !doubts(&cluster, "d0") && served_there(&cluster, &model)
    });
    let value = back
        .as_ref()
        .map_or_else(ToString::to_string, |took| format!("{took:.2?}"));
    let in_time = back.is_ok_and(|took| took <= Duration::from_secs(5));
    report.check("used again after", value, "at most 5 s", in_time);
    let outcome = load.finish();
    let lost: u64 = outcome.lost.values().sum();
    report.say("turns", outcome.all());
    report.say("longest pause inside an answer", format!("{:?}", outcome.longest_pause));
    report.check(
        "turns lost without a typed error",
        format!("{lost} {:?}", outcome.lost),
        "0",
        lost == 0,
    );
    let errors: u64 = outcome.typed.values().sum();
    report.check(
        "turns with a typed error",
        format!("{errors} {:?}", outcome.typed),
        "0",
        errors == 0,
    );
    report.check(
        "answers of a wrong length",
        outcome.wrong_length,
        "0",
        outcome.wrong_length == 0,
    );
    check_texts(&cluster, &outcome, report);
    check_rest(&cluster, report);
    Ok(())
}

fn doubts(cluster: &Cluster, name: &str) -> bool {
    matches!(cluster.state(name).as_str(), "suspect" | "dead")
}

/// Whether the worker has work of the router's, which fresh sessions bring.
fn served_there(cluster: &Cluster, model: &str) -> bool {
    let (router, model) = (cluster.router, model.to_owned());
    // A session that nobody has: it goes to the worker with the least to do.
    std::thread::spawn(move || ask(router, "fresh", request(&model, 77_777, 300, 20)));
    cluster.busy("d0").is_ok_and(|busy| busy > 0.0)
}
