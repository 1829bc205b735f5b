//! The text form of a schedule of faults: `TIME FAULT`, with `;` or a line's end between two.
//!
//! ```text
//! 1200ms crash 0; 1900ms restart 0; 2s pause 1; 5s resume 1; 700ms stall 1 300ms; 0ms slow 2 250%; 4s slow 2 100%
//! 1s link 0>1 cut; 3s link 0>1 up; 3s link 0>2 stalled; 4s link 1>2 400%
//! 1s probes 0 3; 1s loads 0 10; 2s kv 1 4 lost; 2s kv 1 1 300ms; 2s answers 0 lost; 3s answers 1 twice; 4s break 0
//! 1500ms hang-up 2; 2s router 800ms; 3s clear 1; 3s stranger 1 400+20
//! ```
//!
//! Workers go by their number in the cluster. Times are whole nanoseconds, milliseconds or seconds (`ns`, `ms`, `s`), so
//! that what was printed is read again to the bit.

use super::{Fault, LinkState, Mishap};
use homing_units::{Duration, Instant, WorkerId};
use std::fmt::{self, Display, Formatter};
use std::str::FromStr;
use thiserror::Error;

/// Faults by time; of two at one instant the first in the list comes first.
pub type Schedule = Vec<(Instant, Fault)>;

/// A part of a schedule that says nothing that could be done.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("`{entry}` is no fault, expected {expected}")]
pub struct ScheduleError {
    entry: String,
    expected: &'static str,
}

const FAULTS: &str = "`TIME FAULT` with a FAULT of `crash W`, `restart W`, `pause W`, `resume W`, `stall W TIME`, `slow W PERCENT%`, \
     `link W>W up|cut|stalled|PERCENT%`, `probes W N`, `loads W N`, `kv W N lost|twice|TIME`, `answers W lost|twice|TIME`, \
     `break W`, `hang-up N`, `router TIME`, `clear W` or `stranger W PROMPT+OUTPUT`";

/// Reads a schedule.
///
/// # Errors
/// If an entry is no fault; the message says what was expected.
pub fn parse(text: &str) -> Result<Schedule, ScheduleError> {
    text.split([';', '\n'])
        .map(str::trim)
        .filter(|entry| !entry.is_empty())
        .map(entry)
        .collect()
}

/// Prints a schedule so that [`parse`] gives it back.
#[must_use]
pub fn print(schedule: &[(Instant, Fault)]) -> String {
    entries(schedule).join("; ")
}

/// Prints each entry of a schedule.
#[must_use]
pub fn entries(schedule: &[(Instant, Fault)]) -> Vec<String> {
    let entry = |(at, fault): &(Instant, Fault)| format!("{} {fault}", time(at.saturating_since(Instant::ZERO)));
    schedule.iter().map(entry).collect()
}

fn entry(entry: &str) -> Result<(Instant, Fault), ScheduleError> {
    let wrong = || ScheduleError {
        entry: entry.to_owned(),
        expected: FAULTS,
    };
    let words: Vec<&str> = entry.split_whitespace().collect();
    let (at, words) = words.split_first().ok_or_else(wrong)?;
    let at = duration(at).ok_or_else(wrong)?;
    let fault = fault(words).ok_or_else(wrong)?;
    Ok((Instant::ZERO + at, fault))
}

fn fault(words: &[&str]) -> Option<Fault> {
    Some(match *words {
        ["crash", worker] => Fault::WorkerCrash(id(worker)?),
        ["restart", worker] => Fault::WorkerRestart(id(worker)?),
        ["pause", worker] => Fault::WorkerPause(id(worker)?),
        ["resume", worker] => Fault::WorkerResume(id(worker)?),
        ["break", worker] => Fault::ConnectionsBreak(id(worker)?),
        ["clear", worker] => Fault::CacheCleared(id(worker)?),
        ["stall", worker, lasts] => Fault::WorkerStall {
            worker: id(worker)?,
            lasts: duration(lasts)?,
        },
        ["slow", worker, share] => Fault::WorkerSlow {
            worker: id(worker)?,
            percent: percent(share)?,
        },
        ["link", ends, state] => link(ends, state)?,
        ["probes", worker, probes] => Fault::ProbesLost {
            worker: id(worker)?,
            probes: probes.parse().ok()?,
        },
        ["loads", worker, reports] => Fault::LoadsLost {
            worker: id(worker)?,
            reports: reports.parse().ok()?,
        },
        ["kv", worker, batches, what] => Fault::KvBatches {
            worker: id(worker)?,
            batches: batches.parse().ok()?,
            mishap: mishap(what)?,
        },
        ["answers", worker, what] => Fault::Answers {
            worker: id(worker)?,
            mishap: mishap(what)?,
        },
        ["hang-up", nth] => Fault::ClientAbort { nth: nth.parse().ok()? },
        ["router", lasts] => Fault::RouterStall {
            lasts: duration(lasts)?,
        },
        ["stranger", worker, lengths] => stranger(worker, lengths)?,
        _ => return None,
    })
}

fn link(ends: &str, state: &str) -> Option<Fault> {
    let (from, to) = ends.split_once('>')?;
    let state = match state {
        "up" => LinkState::Up,
        "cut" => LinkState::Cut,
        "stalled" => LinkState::Stalled,
        share => LinkState::Slow {
            percent: percent(share)?,
        },
    };
    let (from, to) = (id(from)?, id(to)?);
    Some(Fault::Link { from, to, state })
}

fn stranger(worker: &str, lengths: &str) -> Option<Fault> {
    let (prompt, output) = lengths.split_once('+')?;
    let at_least_one = |text: &str| text.parse().ok().filter(|tokens| *tokens > 0);
    Some(Fault::Stranger {
        worker: id(worker)?,
        prompt_tokens: at_least_one(prompt)?,
        output_tokens: at_least_one(output)?,
    })
}

fn mishap(text: &str) -> Option<Mishap> {
    Some(match text {
        "lost" => Mishap::Lost,
        "twice" => Mishap::Twice,
        late => Mishap::Late(duration(late)?),
    })
}

fn id(text: &str) -> Option<WorkerId> {
    u32::from_str(text).ok().map(WorkerId)
}

fn percent(text: &str) -> Option<u32> {
    text.strip_suffix('%')?.parse().ok().filter(|percent| *percent > 0)
}

fn duration(text: &str) -> Option<Duration> {
    let digits = text.find(|letter: char| !letter.is_ascii_digit())?;
    let (number, unit) = text.split_at(digits);
    let number = number.parse().ok()?;
    match unit {
        "ns" => Some(Duration::from_nanos(number)),
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        _ => None,
    }
}

/// The shortest whole number of a unit.
fn time(duration: Duration) -> String {
    let nanos = duration.as_nanos();
    match nanos {
        _ if nanos.is_multiple_of(1_000_000_000) => format!("{}s", nanos / 1_000_000_000),
        _ if nanos.is_multiple_of(1_000_000) => format!("{}ms", nanos / 1_000_000),
        _ => format!("{nanos}ns"),
    }
}

impl Display for Fault {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match *self {
            Self::WorkerCrash(worker) => write!(f, "crash {}", worker.0),
            Self::WorkerRestart(worker) => write!(f, "restart {}", worker.0),
            Self::WorkerPause(worker) => write!(f, "pause {}", worker.0),
            Self::WorkerResume(worker) => write!(f, "resume {}", worker.0),
            Self::ConnectionsBreak(worker) => write!(f, "break {}", worker.0),
            Self::CacheCleared(worker) => write!(f, "clear {}", worker.0),
            Self::WorkerStall { worker, lasts } => write!(f, "stall {} {}", worker.0, time(lasts)),
            Self::WorkerSlow { worker, percent } => write!(f, "slow {} {percent}%", worker.0),
            Self::Link { from, to, state } => write!(f, "link {}>{} {state}", from.0, to.0),
            Self::ProbesLost { worker, probes } => write!(f, "probes {} {probes}", worker.0),
            Self::LoadsLost { worker, reports } => write!(f, "loads {} {reports}", worker.0),
            Self::KvBatches {
                worker,
                batches,
                mishap,
            } => write!(f, "kv {} {batches} {mishap}", worker.0),
            Self::Answers { worker, mishap } => write!(f, "answers {} {mishap}", worker.0),
            Self::ClientAbort { nth } => write!(f, "hang-up {nth}"),
            Self::RouterStall { lasts } => write!(f, "router {}", time(lasts)),
            Self::Stranger {
                worker,
                prompt_tokens,
                output_tokens,
            } => write!(f, "stranger {} {prompt_tokens}+{output_tokens}", worker.0),
        }
    }
}

impl Display for LinkState {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Up => f.write_str("up"),
            Self::Cut => f.write_str("cut"),
            Self::Stalled => f.write_str("stalled"),
            Self::Slow { percent } => write!(f, "{percent}%"),
        }
    }
}

impl Display for Mishap {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost => f.write_str("lost"),
            Self::Twice => f.write_str("twice"),
            Self::Late(lasts) => f.write_str(&time(*lasts)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_is_read_again() {
        let all = "1200ms crash 0; 1900ms restart 0; 2s pause 1; 5s resume 1; 700ms stall 1 300ms; 0s slow 2 250%; \
                   1s link 0>1 cut; 3s link 0>1 up; 3s link 0>2 stalled; 4s link 1>2 400%; 1s probes 0 3; 1s loads 0 10; \
                   2s kv 1 4 lost; 2s kv 1 1 300ms; 2s answers 0 lost; 3s answers 1 twice; 4s break 0; 1500ms hang-up 2; \
                   2s router 800ms; 3s clear 1; 3s stranger 1 400+20; 1000001ns crash 1";
        let schedule = parse(all).expect("all are faults");
        assert_eq!(schedule.len(), all.split(';').count());
        assert_eq!(print(&schedule), all);
        assert_eq!(
            parse(&print(&schedule).replace("; ", "\n")),
            Ok(schedule),
            "a line each"
        );
        assert_eq!(parse(" ; \n"), Ok(Vec::new()));
    }

    #[test]
    fn what_is_no_fault_is_refused() {
        for entry in [
            "crash 0",
            "1s",
            "1s crash",
            "1s crash w0",
            "1 crash 0",
            "1.5s crash 0",
            "1s slow 0 0%",
            "1s slow 0 20",
            "1s link 0 cut",
            "1s link 0>1 down",
            "1s kv 0 1 early",
            "1s stranger 0 0+1",
            "1s stranger 0 10",
            "-1s crash 0",
        ] {
            let error = parse(&format!("1s crash 0; {entry}")).expect_err(entry);
            assert!(
                error.to_string().starts_with(&format!("`{entry}` is no fault")),
                "{error}"
            );
        }
    }
}
