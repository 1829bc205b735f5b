//! Thousands of connections that say nothing, clients that read as slowly as they can, connections to workers cut again
//! and again, a full disk under recording and logs: others are served as if nothing were.

use super::Args;
use super::cluster::Cluster;
use super::kills::check_rest;
use super::load::{Load, ask, request};
use super::report::Report;
use crate::processes::http::{End, get};
use anyhow::Result;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Clients that read slowly.
const SLOW: u32 = 50;
/// Tokens of their answers.
const SLOW_ANSWER: usize = 400;
/// How long sessions talk while connections are cut.
const CUTTING: Duration = Duration::from_secs(30);
/// Between two cuts.
const CUT_EVERY: Duration = Duration::from_secs(2);
/// Tokens of an answer.
const ANSWER: usize = 80;

pub fn run(binary: &Path, args: &Args, report: &mut Report) -> Result<()> {
    let mut cluster = Cluster::start(binary, &[])?;
    let model = cluster.model()?;
    let before = cluster.router_memory();
    let idle: Vec<TcpStream> = (0..args.idle)
        .map_while(|_| TcpStream::connect(cluster.router).ok())
        .collect();
    report.check(
        "idle connections",
        idle.len(),
        "all that were tried",
        idle.len() == args.idle as usize,
    );
    let asked = Instant::now();
    let health = get(cluster.router, "/health")
        .map(|(status, _)| status)
        .unwrap_or_default();
    report.check(
        "health beside them",
        format!("{health} in {:.0?}", asked.elapsed()),
        "200",
        health == 200,
    );
    let slow: Vec<_> = (0..SLOW).map(|client| slow_client(&cluster, &model, client)).collect();
    let load = Load::start(cluster.router, &model, 20, ANSWER);
    let began = Instant::now();
    let mut cuts = 0;
    while began.elapsed() < CUTTING {
        std::thread::sleep(CUT_EVERY);
        cuts += cluster.cut(["p0", "d0", "d1"][cuts % 3])?.min(1);
    }
    let outcome = load.finish();
    let lost: u64 = outcome.lost.values().sum();
    report.say("rounds of cut connections", cuts);
    report.say(
        "turns",
        format!("{}, errors by code {:?}", outcome.all(), outcome.typed),
    );
    report.check(
        "turns lost without a typed error",
        format!("{lost} {:?}", outcome.lost),
        "0",
        lost == 0,
    );
    report.check(
        "answers of a wrong length",
        outcome.wrong_length,
        "0",
        outcome.wrong_length == 0,
    );
    let grown = cluster.router_memory() - before;
    report.check(
        "memory that it took",
        format!("{grown:.1} MiB"),
        "at most 200 MiB",
        grown <= 200.0,
    );
    drop(idle);
    drop(slow);
    check_rest(&cluster, report);
    report.check(
        "the router",
        if cluster.router_lives() { "lives" } else { "is gone" },
        "lives",
        cluster.router_lives(),
    );
    Ok(())
}

/// A client that takes a byte now and then. Its thread ends with its connection.
fn slow_client(cluster: &Cluster, model: &str, client: u32) -> Option<TcpStream> {
    let body = request(model, 5_000 + client, 300, SLOW_ANSWER).to_string();
    let mut stream = TcpStream::connect(cluster.router).ok()?;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-homing-session: slow-{client}\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).ok()?;
    let kept = stream.try_clone().ok()?;
    std::thread::spawn(move || {
        let mut byte = [0];
        while let Ok(1) = stream.read(&mut byte) {
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    Some(kept)
}

/// A router whose recording, log and turn lines all go to a disk that is full.
pub fn full_disk(binary: &Path, _args: &Args, report: &mut Report) -> Result<()> {
    let mut cluster = Cluster::start(binary, &["--record", "/dev/full"])?;
    let model = cluster.model()?;
    let turns = 20;
    let done = (0..turns).filter(|turn| {
        let (answer, end) = ask(cluster.router, "full", request(&model, 1, 600 + turn * 100, ANSWER));
        end == End::Done && answer.text.len() == ANSWER
    });
    let done = done.count();
    report.check(
        "turns that completed",
        format!("{done} of {turns}"),
        "all",
        done == turns,
    );
    report.check(
        "the router",
        if cluster.router_lives() { "lives" } else { "is gone" },
        "lives",
        cluster.router_lives(),
    );
    check_rest(&cluster, report);
    Ok(())
}
