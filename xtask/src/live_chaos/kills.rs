//! A decode worker is killed again and again under load: no turn may be lost without a word, nearly all complete, those
//! that went on elsewhere are right to the letter, and nothing is left behind.

use super::Args;
use super::cluster::Cluster;
use super::load::{Load, Outcome, ask};
use super::report::Report;
use crate::processes::http::End;
use crate::processes::until;
use anyhow::Result;
use std::path::Path;
use std::time::{Duration, Instant};

/// Tokens of an answer.
const ANSWER: usize = 100;
/// How long a killed worker is away.
const DOWN: Duration = Duration::from_secs(1);
/// How long what is left may take to go after the last turn.
const REST: Duration = Duration::from_secs(35);
/// Answers that are asked for again when all is quiet.
const AGAIN: usize = 40;
/// What a router's memory may grow by between the second and the last quarter, beside 5%, in MiB.
const GROWTH_MIB: f64 = 8.0;

pub fn run(binary: &Path, args: &Args, report: &mut Report) -> Result<()> {
    let mut cluster = Cluster::start(binary, &[])?;
    let model = cluster.model()?;
    let load = Load::start(cluster.router, &model, args.sessions, ANSWER);
    let (kills, memory) = kill_for(&mut cluster, args)?;
    let outcome = load.finish();
    report.say("kills", kills);
    report.say("turns", outcome.all());
    report.say("errors by code", format!("{:?}", outcome.typed));
    report.say("longest pause inside an answer", format!("{:?}", outcome.longest_pause));
    let lost: u64 = outcome.lost.values().sum();
    report.check(
        "turns lost without a typed error",
        format!("{lost} {:?}", outcome.lost),
        "0",
        lost == 0,
    );
    let share = format!("{:.2}%", outcome.share() * 100.0);
    report.check("completed", share, "at least 99%", outcome.share() >= 0.99);
    report.check(
        "answers of a wrong length",
        outcome.wrong_length,
        "0",
        outcome.wrong_length == 0,
    );
    check_memory(&memory, report);
    check_rest(&cluster, report);
    check_texts(&cluster, &outcome, report);
    Ok(())
}

/// Kills decode workers in turn; gives how many, and the router's memory over time.
fn kill_for(cluster: &mut Cluster, args: &Args) -> Result<(u32, Vec<f64>)> {
    let (began, mut kills, mut memory) = (Instant::now(), 0, Vec::new());
    let mut next = args.every();
    while began.elapsed() < args.killing() {
        std::thread::sleep(Duration::from_millis(500));
        memory.push(cluster.router_memory());
        if began.elapsed() >= next {
            let name = ["d0", "d1"][kills as usize % 2];
            cluster.kill(name, DOWN)?;
            kills += 1;
            next += args.every();
        }
    }
    Ok((kills, memory))
}

fn check_memory(memory: &[f64], report: &mut Report) {
    let mean = |part: &[f64]| part.iter().sum::<f64>() / (part.len() as f64).max(1.0);
    let quarter = memory.len() / 4;
    let (second, last) = (mean(&memory[quarter..2 * quarter]), mean(&memory[3 * quarter..]));
    let flat = last <= second * 1.05 + GROWTH_MIB;
    let value = format!("{second:.1} MiB in the second quarter, {last:.1} MiB in the last");
    report.check("memory of the router", value, "flat within 5% and 8 MiB", flat);
}

/// After the last turn nothing is booked and nothing runs.
pub fn check_rest(cluster: &Cluster, report: &mut Report) {
    let rest = until("nothing is booked", REST, || {
        cluster.booked().is_ok_and(|booked| booked == 0)
    });
    let value = rest
        .as_ref()
        .map_or_else(ToString::to_string, |took| format!("none after {took:.1?}"));
    report.check("reservations left", value, "none within 35 s", rest.is_ok());
    for name in ["p0", "d0", "d1"] {
        let idle =
            || cluster.busy(name).is_ok_and(|busy| busy == 0.0) && cluster.pinned(name).is_ok_and(|share| share == 0.0);
        let rest = until("it is idle", REST, idle);
        let value = rest
            .as_ref()
            .map_or_else(ToString::to_string, |took| format!("none after {took:.1?}"));
        report.check(
            &format!("requests and pinned blocks left at {name}"),
            value,
            "none",
            rest.is_ok(),
        );
    }
}

/// The answers that paused longest are asked for again: the same letters come.
pub fn check_texts(cluster: &Cluster, outcome: &Outcome, report: &mut Report) {
    let asked = outcome.kept.iter().take(AGAIN);
    let same = asked.clone().filter(|turn| {
        let (again, end) = ask(cluster.router, "again", turn.body.clone());
        end == End::Done && again.text == turn.text
    });
    let (count, same) = (asked.len(), same.count());
    let value = format!("{same} of {count}");
    report.check(
        "answers with the longest pauses, asked for again: the same text",
        value,
        "all",
        same == count,
    );
}
